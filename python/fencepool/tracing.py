"""Recording transitions, for a timeline."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepool import observing, transitions

if TYPE_CHECKING:
    from types import TracebackType


class trace:  # noqa: N801 - used as a function: with fp.trace("run.json"): ...
    """Record every transition of this process while the block runs, on any thread.

    ``save`` writes the Trace Event Format, which chrome://tracing and https://ui.perfetto.dev open: one slice
    for each transition with its phases inside, and the bytes that each pool holds of its device as counters.
    Phases that overlap, as copying and releasing do, are shown one after the other.

    Args:
        path: save there at the end of the block, also when it raises.

    Source: "Trace Event Format", the Chromium project.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> trace:
        """Begin to record."""
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

    def _record(self, seen: observing.Transition) -> None:
        outcome: dict[str, Any] = {"bytes": seen.bytes, "bytes_copied": seen.bytes_copied}
        if seen.error is not None:
            outcome = {"error": f"{type(seen.error).__name__}: {seen.error}"}
        name = f"{seen.kind} {', '.join(seen.tags)}"
        made = [_slice(seen, name, "fencepool", seen.began, seen.total, outcome)]
        at = seen.began
        for phase, seconds in seen.seconds.items():
            if phase != "total":
                made.append(_slice(seen, phase, "phase", at, seconds, {}))
                at += seconds
        made.append(_memory_held(seen))
        with self._lock:
            self._events += made


def _event(
    seen: observing.Transition, name: str, kind: str, at: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {"name": name, "ph": kind, "ts": at * 1e6, "pid": os.getpid(), "tid": seen.thread, "args": args}


def _slice(
    seen: observing.Transition, name: str, category: str, began: float, seconds: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {**_event(seen, name, "X", began, args), "cat": category, "dur": seconds * 1e6}


def _memory_held(seen: observing.Transition) -> dict[str, Any]:
    held: Counter[str] = Counter()
    for pool in transitions.status():
        held[f"{pool.tag} on {pool.device}"] += pool.bytes_mapped
    return _event(seen, "device memory of pools", "C", seen.began + seen.total, dict(held))
