"""Finds the nvcc that builds the kernels. Run as a program, this prints its path, or nothing.

`FENCEPOOL_NVCC` chooses where to look:

- `auto` or unset: `CUDA_HOME`, `CUDA_PATH`, the `PATH`, `/usr/local/cuda*`, then NVIDIA's packages from
  PyPI where they are installed (`nvidia-cuda-nvcc`, `nvidia-nvvm`, `nvidia-cuda-crt`);
- `off`: nowhere, so that the extension has no kernels;
- a path: that one, which has to exist.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "FENCEPOOL_NVCC"
# GPUs with machine code of their own, if the compiler knows them; PTX of the first serves all others.
ARCHITECTURES = ("80", "90", "100", "120")


class NvccNotFoundError(Exception):
    """`FENCEPOOL_NVCC` names no program."""


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name], "bin", "nvcc")
    found = shutil.which("nvcc", path=environ.get("PATH"))
    if found:
        yield Path(found)
    yield Path("/usr/local/cuda/bin/nvcc")
    yield from sorted(Path("/usr/local").glob("cuda-*/bin/nvcc"), reverse=True)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("cu1*/bin/nvcc"), reverse=True):
            if (path.parent.parent / "nvvm" / "bin" / "cicc").is_file():
                yield path


def find(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The compiler's path; None where there is none."""
    wanted = environ.get(VARIABLE, "auto") or "auto"
    if wanted == "off":
        return None
    if wanted != "auto":
        if not os.access(wanted, os.X_OK):
            raise NvccNotFoundError(f"{VARIABLE}={wanted} is no program")
        return Path(wanted)
    return next((path for path in _candidates(environ) if os.access(path, os.X_OK)), None)


def arguments(nvcc: Path) -> list[str]:
    """What tells that compiler which GPUs to build for."""
    listed = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = [arch for arch in ARCHITECTURES if f"compute_{arch}" in listed.split()]
    if not known:
        raise NvccNotFoundError(f"{nvcc} builds for none of the GPUs {', '.join(ARCHITECTURES)}")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
    return [*flags, f"-gencode=arch=compute_{known[0]},code=compute_{known[0]}"]


if __name__ == "__main__":
    try:
        compiler = find()
        print(";".join([str(compiler), *arguments(compiler)]) if compiler else "", end="")
    except (NvccNotFoundError, subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"nvcc: {error}")
