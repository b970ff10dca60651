"""Finds the nvcc that builds the kernels. Run as a program, this prints its path, or nothing.

`FENCEPOOL_NVCC` chooses where to look:

- `auto` or unset: `CUDA_HOME`, `CUDA_PATH`, the `PATH`, `/usr/local/cuda*`, then NVIDIA's packages from
  PyPI where they are installed (`nvidia-cuda-nvcc`, `nvidia-nvvm`, `nvidia-cuda-crt`);
- `off`: nowhere, so that the extension has no kernels;
- a path: that one, which has to exist.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import cuda_headers

VARIABLE = "FENCEPOOL_NVCC"
# GPUs with machine code of their own, if the compiler knows them; PTX of the first serves all others.
ARCHITECTURES = ("80", "90", "100", "120")


class NvccNotFoundError(Exception):
    """`FENCEPOOL_NVCC` names no program."""


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    yield from (root / "bin" / "nvcc" for root in cuda_headers.toolkits(environ))
    for root in cuda_headers.pypi_roots():
        if (root / "nvvm" / "bin" / "cicc").is_file():  # it needs another package's compiler
            yield root / "bin" / "nvcc"


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
