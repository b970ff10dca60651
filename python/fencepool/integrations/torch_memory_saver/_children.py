"""How child processes come to import fencepool's torch_memory_saver: a directory on their path.

``shim/`` holds a package of that name and nothing else, so that putting it in front shadows only
torch_memory_saver. Processes that are executed read it from PYTHONPATH; those of multiprocessing's spawn
get their parent's ``sys.path`` instead, so it goes there too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_VARIABLE = "PYTHONPATH"
SHIM = str(Path(__file__).resolve().parent / "shim")


def shim_directory() -> str:
    """The directory to put first on PYTHONPATH, for starters that make an environment of their own."""
    return SHIM


class _Blocks:
    """The configure_subprocess() blocks that are under way, of all threads, and what the first one added."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.is_in_environment = False
        self.is_on_path = False


_blocks = _Blocks()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes started in the block, by any means that pass the environment on, import ours.

    Puts a directory first on PYTHONPATH and ``sys.path`` of the whole process for that long. Thread-safe.
    """
    with _blocks.lock:
        if _blocks.count == 0:
            _blocks.is_in_environment = _put_first_in_environment()
            _blocks.is_on_path = _put_first_on_path()
        _blocks.count += 1
    try:
        yield
    finally:
        with _blocks.lock:
            _blocks.count -= 1
            if _blocks.count == 0:
                if _blocks.is_in_environment:
                    _remove_from_environment()
                if _blocks.is_on_path and SHIM in sys.path:
                    sys.path.remove(SHIM)


def keep(*, in_environment: bool) -> None:
    """Put the directory first for good: blocks under way leave it there."""
    with _blocks.lock:
        _put_first_on_path()
        _blocks.is_on_path = False
        if in_environment:
            _put_first_in_environment()
            _blocks.is_in_environment = False


def _put_first_in_environment() -> bool:
    """False when it is there already."""
    entries = os.environ.get(_VARIABLE, "")
    if entries.split(os.pathsep)[0] == SHIM:
        return False
    os.environ[_VARIABLE] = f"{SHIM}{os.pathsep}{entries}" if entries else SHIM
    return True


def _put_first_on_path() -> bool:
    """False when it is there already."""
    if sys.path[:1] == [SHIM]:
        return False
    sys.path.insert(0, SHIM)
    return True


def _remove_from_environment() -> None:
    entries = os.environ.get(_VARIABLE, "").split(os.pathsep)
    if SHIM in entries:
        entries.remove(SHIM)
    if entries:
        os.environ[_VARIABLE] = os.pathsep.join(entries)
    else:
        os.environ.pop(_VARIABLE, None)
