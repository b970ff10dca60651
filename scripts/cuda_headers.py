"""Finds the directory of a `cuda.h` that is new enough to build against.

Only the header is needed: its types, error codes and function signatures. The libraries are opened
at run time. Run as a program, this prints the directory.

`FENCEPOOL_CUDA_HEADERS` chooses where to look:

- `auto` or unset: a CUDA toolkit (`CUDA_HOME`, `CUDA_PATH`, beside `nvcc`, `/usr/local/cuda*`), and
  the PyPI package where there is no toolkit or it is too old;
- `pypi`: the PyPI package only;
- a directory: that one, which has to hold a usable `cuda.h`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "FENCEPOOL_CUDA_HEADERS"
MINIMUM = 12050  # cuCtxRecordEvent and cuCtxWaitEvent are declared from CUDA 12.5 on
PYPI_REQUIREMENT = "nvidia-cuda-runtime>=13.0,<14"  # brings nvidia/cu13/include/cuda.h
TOOLKIT_ROOT = Path("/usr/local")
SYSTEM_INCLUDE = Path("/usr/include")


class HeadersNotFoundError(Exception):
    """No usable `cuda.h` where it was looked for."""


def header_version(include: Path) -> int | None:
    """`CUDA_VERSION` (major * 1000 + minor * 10) of the `cuda.h` in `include`; None without one."""
    try:
        text = (include / "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^\s*#\s*define\s+CUDA_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def is_usable(include: Path) -> bool:
    """Whether `include` holds a `cuda.h` of at least `MINIMUM`."""
    version = header_version(include)
    return version is not None and version >= MINIMUM


def toolkits(environ: Mapping[str, str]) -> Iterator[Path]:
    """Roots a toolkit may have, the most deliberate choice first."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name])
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        yield Path(nvcc).resolve().parent.parent
    yield TOOLKIT_ROOT / "cuda"
    # "cuda-9.2" before "cuda-13.0" as text, so compare numbers.
    yield from sorted(
        TOOLKIT_ROOT.glob("cuda-*"),
        key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)],
        reverse=True,
    )


def pypi_roots() -> list[Path]:
    """Where NVIDIA's PyPI packages lie in the running interpreter's environment, the newest CUDA first."""
    spec = importlib.util.find_spec("nvidia")
    locations = (spec.submodule_search_locations or ()) if spec else ()
    return [root for location in locations for root in sorted(Path(location).glob("cu[0-9]*"), reverse=True)]


def toolkit_include(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The include directory of the first usable toolkit on this machine."""
    for root in toolkits(environ):
        for include in (root / "include", *sorted(root.glob("targets/*-linux/include"))):
            if is_usable(include):
                return include
    return SYSTEM_INCLUDE if is_usable(SYSTEM_INCLUDE) else None


def pypi_include() -> Path | None:
    """The include directory of the PyPI package in the running interpreter's environment."""
    includes = (root / "include" for root in pypi_roots())
    return next((include for include in includes if is_usable(include)), None)


def build_requirements(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What has to be installed from PyPI for a build on this machine: the headers, or nothing."""
    choice = environ.get(VARIABLE, "auto") or "auto"
    if choice == "pypi" or (choice == "auto" and toolkit_include(environ) is None):
        return [PYPI_REQUIREMENT]
    return []


def find(environ: Mapping[str, str] = os.environ) -> Path:
    """The include directory to build against; raises `HeadersNotFoundError` and says what to do."""
    choice = environ.get(VARIABLE, "auto") or "auto"
    if choice == "auto":
        found = toolkit_include(environ) or pypi_include()
    elif choice == "pypi":
        found = pypi_include()
    else:
        found = Path(choice) if is_usable(Path(choice)) else None
    if found is None:
        raise HeadersNotFoundError(
            f"no cuda.h of CUDA {MINIMUM // 1000}.{MINIMUM % 1000 // 10} or newer with {VARIABLE}={choice}; "
            f"set CUDA_HOME to a toolkit, or pip install '{PYPI_REQUIREMENT}'"
        )
    return found


if __name__ == "__main__":
    try:
        print(find())
    except HeadersNotFoundError as error:
        sys.exit(str(error))
