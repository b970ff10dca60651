"""Builds `fencepool._core` and the file for LD_PRELOAD with CMake and Ninja; everything declarative is in
pyproject.toml.

Environment variables, all optional:

- `FENCEPOOL_CUDA_HEADERS`: where `cuda.h` comes from, see scripts/cuda_headers.py.
- `FENCEPOOL_NVCC`: what builds the kernels, see scripts/nvcc.py.
- `FENCEPOOL_BUILD_DIR`: keep CMake's build tree here, so that the next build is incremental.
- `FENCEPOOL_SANITIZE`: `address,undefined` or `thread`.
- `FENCEPOOL_WERROR`: `1` makes compiler warnings errors.
"""

import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
# From the package's directory; beside the Python package that torch_memory_saver's users find there.
PRELOAD = Path("integrations/torch_memory_saver/shim/torch_memory_saver_hook_mode_preload.abi3.so")
sys.path.insert(0, str(ROOT / "scripts"))
import cuda_headers  # noqa: E402  (its directory is put on the path just above)


def tool(name: str) -> str:
    """The program `name` from the PyPI package of that name, else from PATH."""
    try:
        directory = import_module(name)
    except ImportError:
        found = shutil.which(name)
    else:
        bin_directory = getattr(directory, "CMAKE_BIN_DIR", None) or directory.BIN_DIR
        found = shutil.which(name, path=bin_directory) or shutil.which(name)
    if found is None:
        raise CompileError(f"{name} is needed to build fencepool: pip install {name}")
    return found


def put(built: Path, target: Path) -> None:
    """Copy a built file to its place in the package."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A running process may have the old file mapped: replace it, never write into it.
    fresh = target.with_name(target.name + ".new")
    shutil.copy2(built, fresh)
    fresh.replace(target)


class CMakeBuild(build_ext):
    """Runs CMake and puts what it makes where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        try:
            include = cuda_headers.find()
        except cuda_headers.HeadersNotFoundError as error:
            raise CompileError(str(error)) from error
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build = Path(os.environ.get("FENCEPOOL_BUILD_DIR") or self.build_temp).resolve()
        cmake = tool("cmake")
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{build}",
            "-GNinja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DFENCEPOOL_CUDA_INCLUDE={include}",
            f"-DFENCEPOOL_SANITIZE={os.environ.get('FENCEPOOL_SANITIZE', '')}",
            f"-DFENCEPOOL_WERROR={os.environ.get('FENCEPOOL_WERROR', '0')}",
        ]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        for command in (configure, [cmake, "--build", str(build), "--parallel", jobs]):
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                raise CompileError(f"{command[:2]} failed with exit status {error.returncode}") from error
        put(build / target.name, target)
        put(build / PRELOAD.name, target.parent / PRELOAD)


setup(
    ext_modules=[Extension("fencepool._core", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=cuda_headers.build_requirements(),
)
