"""The rules of the architecture, read from the sources. Needs neither a build nor a GPU."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "fencepool"

# Each layer may include itself and the layers before it.
LAYERS = ["base", "digest", "driver", "owners", "backup", "pool", "pytorch", "bindings"]

CPP_FILES = sorted([*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h")])
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    return path.relative_to(CSRC).parts[0]


def code_of(path: Path) -> str:
    """A C++ file without comments and string contents, with its lines kept."""
    token = re.compile(
        r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""",
        re.DOTALL,
    )

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        return '""' if text[0] == '"' else "''" if text[0] == "'" else "\n" * text.count("\n")

    return token.sub(blank, path.read_text(encoding="utf-8"))


def includes_of(path: Path) -> Iterator[tuple[str, bool]]:
    """What a C++ file includes, and whether it is one of ours ("...") rather than a system's (<...>)."""
    for match in re.finditer(
        r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE
    ):
        yield match.group(2), match.group(1) == '"'


def driver_calls() -> list[str]:
    """The driver's functions that the table has."""
    return re.findall(r"\bX\((cu[A-Z]\w*),", (CSRC / "driver" / "calls.h").read_text(encoding="utf-8"))


def offences(pattern: str, paths: list[Path]) -> list[str]:
    """Where a pattern occurs in the code of some files, as "file:line: text"."""
    return [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(code_of(path).splitlines(), start=1)
        if re.search(pattern, line)
    ]


def test_there_is_something_to_check():
    assert {layer_of(path) for path in CPP_FILES} == set(LAYERS)
    assert "cuMemMap" in driver_calls()
    assert PYTHON_FILES


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_include_only_lower_layers(layer):
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    wrong = [
        f"{name_of(path)} includes {included}"
        for path in CPP_FILES
        if layer_of(path) == layer
        for included, is_ours in includes_of(path)
        if is_ours and included.split("/")[0] not in allowed
    ]
    assert not wrong


def test_our_headers_are_included_by_their_path_from_csrc():
    wrong = [
        f"{name_of(path)} includes {included}"
        for path in CPP_FILES
        for included, is_ours in includes_of(path)
        if is_ours and not (CSRC / included).is_file()
    ]
    assert not wrong


def test_the_embedded_driver_is_used_through_the_table_only():
    wrong = [
        f"{name_of(path)} includes {included}"
        for path in CPP_FILES
        if layer_of(path) not in ("driver", "bindings")  # the bindings set the emulated machine's limits
        for included, _ in includes_of(path)
        if included.startswith("driver/host/")
    ]
    assert not wrong


def test_only_the_bindings_know_python():
    wrong = [
        f"{name_of(path)} includes {included}"
        for path in CPP_FILES
        if layer_of(path) != "bindings"
        for included, _ in includes_of(path)
        if included == "Python.h" or included.startswith(("pybind11/", "python"))
    ]
    assert not wrong


def test_nobody_knows_libtorch_or_the_cuda_runtime():
    wrong = [
        f"{name_of(path)} includes {included}"
        for path in CPP_FILES
        for included, _ in includes_of(path)
        if included.startswith(("torch/", "ATen/", "c10/", "cuda_runtime")) or included == "nvml.h"
    ]
    assert not wrong


def test_only_the_driver_layer_opens_libraries():
    outside = [path for path in CPP_FILES if layer_of(path) != "driver"]
    wrong = [
        f"{name_of(path)} includes {included}"
        for path in outside
        for included, _ in includes_of(path)
        if included == "dlfcn.h"
    ]
    assert not wrong + offences(r"\bdl(v?sym|m?open)\s*\(", outside)


def test_driver_calls_go_through_the_table():
    # `call<Call::cuMemMap>(...)` names a call; `cuMemMap(...)` or `&cuMemMap` would link to it.
    outside = [path for path in CPP_FILES if layer_of(path) != "driver"]
    assert not offences(r"(?<!Call::)(?<!\w)(?:" + "|".join(driver_calls()) + r")\s*\(", outside)
    # Any other function of the driver is no better.
    assert not offences(r"(?<!::)(?<![\w.>])cu[A-Z]\w*(?:_v\d+)?\s*\(", outside)


def test_system_calls_go_through_their_seam():
    # The embedded driver stands where a driver's closed code would, with calls of its own.
    exempt = ("csrc/base/system_calls", "csrc/driver/host/")
    outside = [path for path in CPP_FILES if not name_of(path).startswith(exempt)]
    calls = "openat|creat|fallocate|ftruncate|pwritev?|preadv?|fdatasync|fsync|sync_file_range"
    calls += "|unlink(?:at)?|mmap|munmap"
    assert not offences(rf"(?<!sys::)(?<!\w)(?:{calls})\s*\(", outside)


def test_the_library_never_prints_or_ends_the_process():
    prints = r"v?f?printf|f?puts|putchar|perror"
    ends = r"abort|_?exit|_Exit|quick_exit|terminate"
    wrong = offences(rf"(?<![\w.>])(?:std::|::)?(?:{prints}|{ends})\s*\(", CPP_FILES)
    wrong += offences(r"\b(?:std::)?(?:cout|cerr|clog)\b|\bassert\s*\(|#\s*include\s*<iostream>", CPP_FILES)
    assert not wrong


def test_locks_are_the_ones_the_analysis_understands():
    # csrc/base/mutex.h wraps the standard ones for clang's thread-safety analysis. The embedded driver
    # stands where a driver's closed code would, with locks of its own.
    exempt = ("csrc/base/mutex.h", "csrc/driver/host/")
    others = [path for path in CPP_FILES if not name_of(path).startswith(exempt)]
    assert not offences(
        r"\bstd::(?:(?:recursive_|shared_|timed_)*mutex|lock_guard|unique_lock|scoped_lock)\b", others
    )


def test_no_header_forgets_its_guard():
    headers = [path for path in CPP_FILES if path.suffix == ".h"]
    assert not [name_of(path) for path in headers if "#pragma once" not in path.read_text(encoding="utf-8")]


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in CPP_FILES}
    assert not {name: length for name, length in lengths.items() if length > 400}


def imports_at_top(tree: ast.Module) -> Iterator[str]:
    """Modules that importing a file imports, in whatever block they stand, `if TYPE_CHECKING` aside."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            for handler in getattr(node, "handlers", []):
                pending += handler.body


def may_import_torch(path: Path) -> bool:
    relative = path.relative_to(PACKAGE)
    # _adopt and _tensors are loaded by the calls that make tensors, not by `import fencepool`.
    return relative.parts[0].startswith(
        ("pytorch", "distributed", "integrations", "_adopt.py", "_tensors.py")
    ) or any(part.startswith(("demo", "bench")) for part in relative.with_suffix("").parts)


def is_command_line(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0] in ("cli", "__main__.py") or "demo" in name_of(path)


def test_importing_the_package_needs_neither_torch_nor_the_command_line():
    optional = {"torch", "typer", "rich", "tqdm", "numpy", "psutil", "prometheus_client"}
    optional |= {"matplotlib", "pynvml", "nvtx"}
    wrong = []
    for path in PYTHON_FILES:
        imported = {
            module.split(".")[0] for module in imports_at_top(ast.parse(path.read_text(encoding="utf-8")))
        }
        for module in sorted(imported & optional):
            if module == "torch" and may_import_torch(path):
                continue
            if module in ("typer", "rich", "tqdm") and is_command_line(path):
                continue
            if module == "prometheus_client" and path.name == "metrics.py":
                continue
            wrong.append(f"{name_of(path)} imports {module}")
    assert not wrong


def test_no_python_code_swallows_exceptions():
    wrong = []
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "everything"
            is_broad = caught in ("everything", "Exception", "BaseException")
            does_nothing = all(
                isinstance(statement, (ast.Pass, ast.Continue))
                or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
                for statement in node.body
            )
            if is_broad and (does_nothing or caught == "everything"):
                wrong.append(f"{name_of(path)}:{node.lineno}: except {caught}")
    assert not wrong


def test_the_library_does_not_print_in_python_either():
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in PYTHON_FILES
        if not is_command_line(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.exit", "os._exit", "exit")
    ]
    assert not wrong
