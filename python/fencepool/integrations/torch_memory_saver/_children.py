"""How child processes come to import fencepool's torch_memory_saver: a directory on their path.

``shim/`` holds a package of that name and nothing else, so that putting it in front shadows only
torch_memory_saver. Processes that are executed read it from PYTHONPATH; those of multiprocessing's spawn
get their parent's ``sys.path`` instead, so it goes there too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIM = str(Path(__file__).resolve().parent / "shim")


def shim_directory() -> str:
    """The directory to put first on PYTHONPATH, for starters that make an environment of their own."""
    return SHIM


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes started in the block, by any means that pass the environment on, import ours.

    Changes PYTHONPATH and ``sys.path`` of the whole process for that long, and undoes just that change.
    """
    before = os.environ.get("PYTHONPATH")
    is_new = SHIM not in sys.path
    put_first_in_environment()
    if is_new:
        put_first_on_path()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
        if is_new and SHIM in sys.path:
            sys.path.remove(SHIM)


def put_first_in_environment() -> None:
    """PYTHONPATH starts with the shim."""
    others = [
        entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", SHIM)
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join([SHIM, *others])


def put_first_on_path() -> None:
    """``sys.path`` starts with the shim."""
    if SHIM in sys.path:
        sys.path.remove(SHIM)
    sys.path.insert(0, SHIM)
