"""What is built and shipped: the module's links and symbols, where the headers come from, the lists."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fencepool.integrations.sglang import versions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import cuda_headers  # noqa: E402
import requirements  # noqa: E402

CORE = "import fencepool._core as core; print(core.__file__)"


@pytest.fixture(scope="module")
def module() -> Path:
    """The extension module that tests import."""
    done = subprocess.run([sys.executable, "-c", CORE], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def readelf(*arguments: str | Path) -> str:
    program = shutil.which("readelf")
    if program is None:
        pytest.skip("readelf is not installed")
    return subprocess.run([program, "--wide", *arguments], capture_output=True, text=True, check=True).stdout


def test_the_module_links_to_nothing_of_cuda_or_torch(module):
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", module))
    assert needed
    system = re.compile(r"(libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|librt|ld-linux.*)\.so\.\d+")
    assert not [name for name in needed if not system.fullmatch(name)]


def test_the_module_has_no_search_path_of_its_own(module):
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", readelf("--dynamic", module))


def test_the_module_asks_for_no_driver_symbol(module):
    undefined = re.findall(r"\bUND\s+(\S+)", readelf("--dyn-syms", module))
    assert not [name for name in undefined if re.match(r"(cu[A-Z]|cuda[A-Z]|nv[A-Z])", name)]


def test_the_module_exports_its_entry_points_only(module):
    exported = [
        fields[7].split("@")[0]
        for fields in (line.split() for line in readelf("--dyn-syms", module).splitlines())
        if len(fields) == 8 and fields[4] in ("GLOBAL", "WEAK") and fields[6] not in ("UND", "Ndx")
    ]
    slots = [f"{slot:02o}" for slot in range(64)]
    assert sorted(exported) == sorted(
        ["PyInit__core", *(f"fencepool_{what}_{slot}" for what in ("alloc", "free") for slot in slots)]
    )


def test_importing_the_package_loads_nothing_of_cuda_or_torch():
    program = "import fencepool; print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "/_core." in done.stdout
    assert not re.findall(r"\S*lib(?:cuda|cudart|nvidia|torch|c10)\S*", done.stdout)


def test_the_version_is_the_same_everywhere():
    import fencepool

    assert fencepool.__version__ == importlib.metadata.version("fencepool")
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)
    assert not released or released[0] == fencepool.__version__


def test_the_base_requirements_hold_no_torch():
    names = {Requirement(item).name for item in pyproject()["project"]["dependencies"]}
    assert "torch" not in names
    assert not [name for name in names if name.startswith("nvidia")]


@pytest.mark.parametrize(("extra", "ranged"), [("lint", []), ("docs", ["prometheus_client"]), ("wheels", [])])
def test_the_tools_are_pinned(extra, ranged):
    tools = [Requirement(item) for item in requirements.requirements(extra, pyproject())]
    assert [item.name for item in tools if not str(item.specifier).startswith("==")] == ranged


def test_the_extra_for_sglang_asks_for_releases_that_are_known():
    (item,) = requirements.requirements("sglang", pyproject())
    known = {".".join(map(str, release)) for release in versions._KNOWN if release >= versions.PLUGINS_SINCE}
    candidates = [f"0.{minor}.{patch}" for minor in range(4, 7) for patch in range(40)]
    assert set(Requirement(item).specifier.filter(candidates)) == known


def parameters(function: ast.FunctionDef) -> list[tuple[str, str]]:
    """Names and defaults; "" for none."""
    defaults = [ast.unparse(default) for default in function.args.defaults]
    names = [argument.arg for argument in function.args.args]
    return list(zip(names, [""] * (len(names) - len(defaults)) + defaults, strict=True))


def functions_of(stubs: str) -> dict[str, ast.FunctionDef]:
    """A .pyi file's functions and methods by their names, without properties."""
    found = {}
    for node in ast.parse(stubs).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for one in inside:
            if isinstance(one, ast.FunctionDef) and not one.decorator_list:
                found[prefix + one.name] = one
    return found


@pytest.mark.parametrize(("file", "module_name"), [("__init__.pyi", "_core"), ("raw.pyi", "_core.raw")])
def test_the_stubs_have_the_extensions_parameters(file, module_name):
    # mypy's stubtest sees no parameters: pybind11 gives its functions' signatures in their docstrings.
    module = importlib.import_module(f"fencepool.{module_name}")
    stubs = functions_of((ROOT / "python/fencepool/_core" / file).read_text(encoding="utf-8"))
    assert len(stubs) > 10
    wrong = {}
    for name, stub in stubs.items():
        text = (functools.reduce(getattr, name.split("."), module).__doc__ or "").splitlines()
        try:
            (real,) = ast.parse(f"def {text[0]}: ...").body
        except (IndexError, SyntaxError):
            continue  # a default that is no Python expression
        assert isinstance(real, ast.FunctionDef)
        given, shown = parameters(real), parameters(stub)
        is_same = len(given) == len(shown) and all(
            (own == other or own.startswith("arg")) and kept in (default, "...")
            for (own, default), (other, kept) in zip(given, shown, strict=True)
        )
        if not is_same:
            wrong[name] = (given, shown)
    assert wrong == {}


def pyproject() -> dict:
    return requirements.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# --- where cuda.h comes from -----------------------------------------------------------------------


def toolkit(root: Path, version: int | None, include: str = "include") -> Path:
    directory = root / include
    directory.mkdir(parents=True)
    text = "/* no version */\n" if version is None else f"#define CUDA_VERSION {version}\n"
    (directory / "cuda.h").write_text(text)
    return directory


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without any CUDA, whose /usr/local is returned."""
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(cuda_headers, "TOOLKIT_ROOT", local)
    monkeypatch.setattr(cuda_headers, "SYSTEM_INCLUDE", tmp_path / "include")
    monkeypatch.setattr(cuda_headers, "pypi_include", lambda: None)
    return local


def test_without_a_toolkit_the_headers_are_a_build_requirement(bare):
    assert cuda_headers.build_requirements({}) == [cuda_headers.PYPI_REQUIREMENT]


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_is_found_by_variable(bare, tmp_path, variable):
    toolkit(bare / "cuda", 12080)
    include = toolkit(tmp_path / "chosen", 13000)
    assert cuda_headers.find({variable: str(tmp_path / "chosen")}) == include
    assert cuda_headers.build_requirements({variable: str(tmp_path / "chosen")}) == []


def test_a_toolkit_is_found_beside_nvcc(bare, tmp_path):
    include = toolkit(tmp_path / "cuda-x", 13000)
    compiler = tmp_path / "cuda-x" / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    link = tmp_path / "bin" / "nvcc"
    link.parent.mkdir()
    link.symlink_to(compiler)
    assert cuda_headers.find({"PATH": str(link.parent)}) == include


def test_the_newest_toolkit_is_chosen_by_number(bare):
    toolkit(bare / "cuda-9.2", 9020)
    toolkit(bare / "cuda-12.6", 12060)
    newest = toolkit(bare / "cuda-13.0", 13000)
    assert cuda_headers.find({}) == newest


def test_a_toolkit_for_another_layout_is_found(bare):
    include = toolkit(bare / "cuda", 13000, "targets/x86_64-linux/include")
    assert cuda_headers.find({}) == include


@pytest.mark.parametrize("version", [12040, None])
def test_a_toolkit_that_is_too_old_is_passed_over(bare, version):
    toolkit(bare / "cuda", version)
    assert cuda_headers.build_requirements({}) == [cuda_headers.PYPI_REQUIREMENT]
    with pytest.raises(cuda_headers.HeadersNotFoundError, match=r"CUDA 12\.5 or newer.*pip install"):
        cuda_headers.find({})


def test_the_package_can_be_forced(bare, tmp_path, monkeypatch):
    toolkit(bare / "cuda", 13000)
    include = toolkit(tmp_path / "site" / "nvidia" / "cu13", 13000)
    monkeypatch.setattr(cuda_headers, "pypi_include", lambda: include)
    environment = {cuda_headers.VARIABLE: "pypi"}
    assert cuda_headers.build_requirements(environment) == [cuda_headers.PYPI_REQUIREMENT]
    assert cuda_headers.find(environment) == include


def test_a_directory_can_be_named(bare, tmp_path):
    toolkit(bare / "cuda", 13000)
    include = toolkit(tmp_path / "mine", 12080)
    assert cuda_headers.find({cuda_headers.VARIABLE: str(include)}) == include
    assert cuda_headers.build_requirements({cuda_headers.VARIABLE: str(include)}) == []
    # A directory that was named and has nothing is an error, never replaced by another.
    with pytest.raises(cuda_headers.HeadersNotFoundError):
        cuda_headers.find({cuda_headers.VARIABLE: str(tmp_path)})


def test_the_build_backend_reports_the_headers(tmp_path):
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    package = tmp_path / "python" / "fencepool"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "python" / "fencepool" / "_version.py", package)
    (package / "__init__.py").touch()
    program = "from setuptools import build_meta as b; print('=', b.get_requires_for_build_wheel())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, cuda_headers.VARIABLE: "pypi"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"= {[cuda_headers.PYPI_REQUIREMENT]}"
