"""Recording transitions, for a timeline."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepool import observing, transitions

if TYPE_CHECKING:
    from types import TracebackType

POOLS = "device memory of pools"
DEVICES = "device memory in use"
_MOST_THREADS = 1 << 22  # thread ids are below it (Linux, PID_MAX_LIMIT)


class trace:  # noqa: N801 - used as a function: with fp.trace("run.json"): ...
    """Record every transition of this process while the block runs, on any thread. Thread-safe.

    ``save`` writes the Trace Event Format, which chrome://tracing and https://ui.perfetto.dev open: one slice
    for each transition with its phases inside, and as counters, in bytes, what each pool holds of its device
    and what all processes hold of it. Phases that overlap, as copying and releasing do, are shown one after
    the other. Transitions that run side by side, as the two of a swap do, are in rows of their own.
    ``picture`` draws it, and ``fencepool trace FILE`` shows a saved one.

    Args:
        path: save there at the end of the block, also when it raises.

    Source: "Trace Event Format", the Chromium project.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._count = 0
        self._rows: dict[int, list[float]] = {}  # of each thread: when the last transition in it ended

    def __enter__(self) -> trace:
        """Begin to record."""
        self._note_pools()
        observing.add(self._record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop, and save where a path was given."""
        observing.remove(self._record)
        self._note_pools()
        if self._path is not None:
            self.save(self._path)

    def events(self) -> list[dict[str, Any]]:
        """What was recorded so far, in the Trace Event Format; times in microseconds."""
        with self._lock:
            return list(self._events)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that the viewers open.

        Raises:
            OSError: it cannot be written.
        """
        whole = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(whole), encoding="utf-8")

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw device memory by pool over time, and the phases of transitions, as PNG, SVG or PDF.

        Raises:
            ModuleNotFoundError: matplotlib is not installed; says how to get it.
            ValueError: an ending that matplotlib does not know.
            OSError: it cannot be written.
        """
        from fencepool import picture, timeline

        picture.draw_timeline(timeline.parse(self.events()), path)

    def _note_pools(self) -> None:
        made = _counter(POOLS, time.time(), threading.get_native_id(), _held())
        with self._lock:
            self._events.append(made)

    def _record(self, seen: observing.Transition) -> None:
        with self._lock:
            number = self._count = self._count + 1
        of: dict[str, Any] = {"transition": number}
        outcome = {**of, "kind": seen.kind, "tags": list(seen.tags)}
        if seen.error is None:
            outcome |= {"bytes": seen.bytes, "bytes_copied": seen.bytes_copied}
        else:
            outcome["error"] = f"{type(seen.error).__name__}: {seen.error}"
        name = f"{seen.kind} {', '.join(seen.tags)}"
        phases = [(phase, seconds) for phase, seconds in seen.seconds.items() if phase != "total"]
        lasting = max(seen.total, sum(seconds for _, seconds in phases))
        with self._lock:
            row, made = self._row(seen, seen.began + lasting)
        made.append(_slice(row, name, "fencepool", seen.began, seen.total, outcome))
        at = seen.began
        for phase, seconds in phases:
            made.append(_slice(row, phase, "phase", at, seconds, of))
            at += seconds
        made += _memory(seen)
        with self._lock:
            self._events += made

    def _row(self, seen: observing.Transition, end: float) -> tuple[int, list[dict[str, Any]]]:
        """The row for it, in which slices must not overlap; and what names the row, when it is new.

        A thread's transitions are recorded as they end, so that the last one's end is all there is to know.
        """
        rows = self._rows.setdefault(seen.thread, [])
        number = next((at for at, ended in enumerate(rows) if ended <= seen.began), len(rows))
        row = seen.thread + number * _MOST_THREADS
        if number < len(rows):
            rows[number] = end
            return row, []
        rows.append(end)
        return row, [_name(row, f"thread {seen.thread}, side by side")] if number else []


def _memory(seen: observing.Transition) -> list[dict[str, Any]]:
    """Counters before and after. What a transition changed is in its report; the rest counts as it is now."""
    after = _held()
    before = dict(after)
    for pool in seen.pools:
        if pool.changed:
            name = f"{pool.tag} on {pool.device}"
            before[name] = max(0, before.get(name, 0) + (pool.bytes if seen.kind == "pause" else -pool.bytes))
    ended = seen.began + seen.total
    made = [
        _counter(POOLS, seen.began, seen.thread, before),
        _counter(POOLS, ended, seen.thread, after),
    ]
    if seen.device_memory:
        used_before = {one.device: one.total - one.free_before for one in seen.device_memory}
        used_after = {one.device: one.total - one.free_after for one in seen.device_memory}
        made += [
            _counter(DEVICES, seen.began, seen.thread, used_before),
            _counter(DEVICES, ended, seen.thread, used_after),
        ]
    return made


def _held() -> dict[str, int]:
    held: Counter[str] = Counter()
    for pool in transitions.status():
        held[f"{pool.tag} on {pool.device}"] += pool.bytes_mapped
    return dict(held)


def _counter(name: str, at: float, thread: int, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "ts": at * 1e6, "pid": os.getpid(), "tid": thread, "args": values}


def _name(row: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": row, "args": {"name": name}}


def _slice(
    row: int, name: str, category: str, began: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": began * 1e6,
        "dur": seconds * 1e6,
        "pid": os.getpid(),
        "tid": row,
        "cat": category,
        "args": args,
    }
