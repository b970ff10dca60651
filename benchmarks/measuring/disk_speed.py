"""What a disk does by itself: direct I/O, several requests at a time, each on its part of one file."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_BLOCK = 8 << 20
# More and longer than fencepool's own, which has four threads and buffers of 4 MiB: this is to be the disk's
# limit, and where a disk gains by the greater depth the comparison errs against fencepool.
_WORKERS = 8


class NoDirectIo(Exception):  # noqa: N818 - it says what is not there
    """The file system refuses direct I/O."""


def measure(folder: Path, nbytes: int, count: int) -> dict[str, Any]:
    """Seconds for writing and for reading at least `nbytes` in `folder`, `count` samples each.

    Raises:
        NoDirectIo: says why it cannot be measured.
    """
    blocks = max(1, nbytes // _BLOCK // _WORKERS)
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    # Random bytes: a disk or a file system that compresses would have nothing to do with zeros.
    buffers = [_filled() for _ in range(_WORKERS)]
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, ThreadPoolExecutor(_WORKERS) as threads:
            descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                ways = {"write": _write, "read": _read}
                _run(threads, descriptor, _write, buffers, blocks)  # the space is there, as a backup's is
                for _ in range(count):
                    for way, taken in seconds.items():
                        start = time.perf_counter()
                        _run(threads, descriptor, ways[way], buffers, blocks)
                        taken.append(time.perf_counter() - start)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise NoDirectIo(str(error)) from None
    return {
        "tool": f"direct I/O, {_WORKERS} at a time, {_BLOCK >> 20} MiB a request, random bytes",
        "bytes": blocks * _BLOCK * _WORKERS,
        **{f"{way}_seconds": taken for way, taken in seconds.items()},
    }


def _filled() -> mmap.mmap:
    buffer = mmap.mmap(-1, _BLOCK)  # at a page's start, as direct I/O wants it
    buffer.write(os.urandom(_BLOCK))
    return buffer


_Way = Callable[[int, mmap.mmap, int], int]


def _write(descriptor: int, buffer: mmap.mmap, at: int) -> int:
    return os.pwrite(descriptor, buffer, at)


def _read(descriptor: int, buffer: mmap.mmap, at: int) -> int:
    return os.preadv(descriptor, [buffer], at)


def _run(
    threads: ThreadPoolExecutor, descriptor: int, way: _Way, buffers: list[mmap.mmap], blocks: int
) -> None:
    def work(worker: int) -> None:
        for number in range(worker * blocks, (worker + 1) * blocks):
            if way(descriptor, buffers[worker], number * _BLOCK) != _BLOCK:
                raise OSError(f"only a part of {_BLOCK} bytes was read or written")

    list(threads.map(work, range(len(buffers))))
