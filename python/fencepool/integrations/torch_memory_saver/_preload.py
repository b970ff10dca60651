"""The file that starters of processes put into LD_PRELOAD by torch_memory_saver's name for it.

slime, miles and others start their trainers so. Ours hooks nothing: it puts the directory it lies in first
on the process's PYTHONPATH, so that the process imports fencepool's torch_memory_saver.
"""

from __future__ import annotations

from pathlib import Path

from fencepool.errors import Error, UnsupportedError
from fencepool.integrations.torch_memory_saver._children import SHIM

STEM = "torch_memory_saver_hook_mode_preload"


def get_binary_path_from_package(stem: str) -> Path:
    """The library for LD_PRELOAD.

    Raises:
        UnsupportedError: for any other stem; fencepool has no library to allocate through.
        Error: this build of fencepool lacks it.
    """
    if stem != STEM:
        raise UnsupportedError(f"fencepool's torch_memory_saver has no library {stem!r}, only {STEM!r}")
    path = Path(SHIM) / f"{STEM}.abi3.so"
    if not path.is_file():
        raise Error(f"{path} is missing; install fencepool with pip, which builds it")
    return path


def is_xpu() -> bool:
    """Whether the device is an Intel GPU: never."""
    return False
