"""Touches host memory ahead of a measurement, so that a virtual machine has it from its host.

The first write to a page that a virtual machine has never used, or gave back when it was freed, is answered
by the hypervisor and takes several times as long as on bare metal. Every system's process touches as much as
its backup will take and frees it again; then first pauses are compared by what the systems do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor


def touch(size: int) -> None:
    """Write to every page of ``size`` bytes of fresh memory, on all cores, and free it."""
    workers = len(os.sched_getaffinity(0))
    part = -(-size // workers)
    with mmap.mmap(-1, part * workers, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        view = ctypes.c_char.from_buffer(memory)
        start = ctypes.addressof(view)
        try:
            with ThreadPoolExecutor(workers) as executor:
                list(executor.map(lambda index: ctypes.memset(start + index * part, 1, part), range(workers)))
        finally:
            del view  # a mapping with a view on it cannot be closed
