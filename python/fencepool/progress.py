"""A bar for what takes longer than a second: `progress=True` of pause, resume and prepare.

The core tells nothing while it works, so a thread looks from outside: at how much device memory is free, and,
for a backup that is still to be made, at how much memory this process has, or how much it has written to
disks. The bar is an estimate, then: other processes' memory moves it too, and what has not changed is not
written. What is done is not held up: nothing is looked at in the first second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from fencepool.errors import Error
from fencepool.machine import memory_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fencepool.pools import Pool

_DELAY = 1.0
_EVERY = 0.2


@contextlib.contextmanager
def shown(is_wanted: bool, doing: str, pools: Sequence[Pool]) -> Iterator[None]:
    """Show a bar on standard error if the block, a "pause", "resume" or "prepare", lasts over a second.

    Raises:
        ModuleNotFoundError: it is wanted, and tqdm is not installed.
    """
    if not is_wanted:
        yield
        return
    import tqdm

    task = _Task(doing, pools)
    ended = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(task, ended, tqdm.tqdm), name="fencepool progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Task:
    """What is to be done in bytes, and how much of it seems to be done."""

    def __init__(self, doing: str, pools: Sequence[Pool]) -> None:
        statuses = [pool.status() for pool in pools]
        tags = ", ".join(dict.fromkeys(one.tag for one in statuses))
        self.text = f"{doing} {tags}"[:40]
        self._backups = self._files = 0
        self._device: Counter[str] = Counter()
        for one in statuses:
            is_paused = one.state == "paused"
            if one.backup == "disk":
                is_written, is_read = doing == "pause" and not is_paused, doing == "resume" and is_paused
                self._files += one.bytes_used if is_written else one.bytes_backed_up if is_read else 0
            elif doing != "resume" and one.backup != "none" and not is_paused:
                self._backups += max(0, one.bytes_used - one.host_bytes)
            if doing == "pause" and not is_paused:
                self._device[one.device] += one.bytes_mapped
            elif doing == "resume" and is_paused:
                self._device[one.device] += one.bytes_reserved - one.bytes_mapped
        self._sign = -1 if doing == "resume" else 1
        self._free = {device: memory_info(device)[0] for device in self._device}
        self._memory = resident()
        self._way = "read_bytes" if doing == "resume" else "write_bytes"
        self._passed = passed(self._way)
        self._most = 0
        self.total = self._backups + self._files + sum(self._device.values())

    def done(self) -> int:
        """Never less than before."""
        done = min(self._backups, max(0, resident() - self._memory))
        done += min(self._files, max(0, passed(self._way) - self._passed))
        for device, size in self._device.items():
            done += min(size, max(0, self._sign * (memory_info(device)[0] - self._free[device])))
        self._most = max(self._most, done)
        return self._most


def _watch(task: _Task, ended: threading.Event, make_bar: Callable[..., Any]) -> None:
    if ended.wait(_DELAY) or not task.total:
        return
    bar = make_bar(
        total=task.total,
        desc=task.text,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        file=sys.stderr,
    )
    # Where the driver cannot be asked, the work itself says so; here there is only nothing more to show.
    with bar, contextlib.suppress(Error):
        while not ended.wait(_EVERY):
            bar.update(task.done() - bar.n)


def resident() -> int:
    """Resident bytes of this process; 0 where the system does not say (proc(5), statm)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def passed(way: str) -> int:
    """Bytes of this process to or from disks so far; 0 where the system does not say (proc(5), io)."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return int(dict(line.split(": ") for line in file)[way])
    except (OSError, KeyError, ValueError):
        return 0
