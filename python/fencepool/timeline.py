"""Reads what `fp.trace` recorded. Plain data; needs no driver."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepool.tracing import DEVICES, POOLS

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

# Seconds since the recording began, and bytes.
Series = list[tuple[float, int]]


@dataclass(frozen=True)
class Recorded:
    """One transition."""

    kind: str
    tags: tuple[str, ...]
    began: float
    """Seconds since the recording began."""
    seconds: float
    phases: tuple[tuple[str, float], ...]
    """By name, in the order they ran, in seconds."""
    bytes: int
    bytes_copied: int
    error: str
    """Empty when it succeeded."""


@dataclass(frozen=True)
class Timeline:
    """A recording."""

    seconds: float
    transitions: tuple[Recorded, ...]
    pools: dict[str, Series] = field(default_factory=dict)
    """What pools held, by "tag on device"."""
    devices: dict[str, Series] = field(default_factory=dict)
    """What all processes held of a device."""


def load(path: str | os.PathLike[str]) -> Timeline:
    """Read a saved recording.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no recording of fencepool's.
    """
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
        events = whole["traceEvents"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{path} is not a trace in JSON") from None
    return parse(events)


def parse(events: Sequence[dict[str, Any]]) -> Timeline:
    """Sort out the events of a recording; those of other programs in the same file are passed over.

    Raises:
        ValueError: none of them is fencepool's.
    """
    try:
        slices = [one for one in events if one.get("ph") == "X" and one.get("cat") in ("fencepool", "phase")]
        counters = [one for one in events if one.get("ph") == "C" and one.get("name") in (POOLS, DEVICES)]
        if not slices and not counters:
            raise ValueError(
                "no transition of fencepool's was recorded in it: with fencepool.trace(path): ..."
            )
        start = min(_number(one["ts"]) for one in [*slices, *counters])
        end = max(one["ts"] + _number(one.get("dur", 0)) for one in [*slices, *counters])
        return Timeline(
            seconds=(end - start) / 1e6,
            transitions=_transitions(slices, start),
            pools=_series(counters, POOLS, start),
            devices=_series(counters, DEVICES, start),
        )
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"the trace is damaged: {error!r}") from None


def _number(value: Any) -> float:
    """A number that sums and axes can be made of."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:  # NaN too
        raise TypeError(f"{value!r:.40} where a number should be")
    return value


def _transitions(slices: Sequence[dict[str, Any]], start: float) -> tuple[Recorded, ...]:
    phases: dict[Any, list[tuple[str, float]]] = defaultdict(list)
    for one in slices:
        if one["cat"] == "phase":
            phases[one["pid"], one["args"]["transition"]].append(
                (str(one["name"]), _number(one["dur"]) / 1e6)
            )
    found = [
        Recorded(
            kind=str(one["args"]["kind"]),
            tags=tuple(str(tag) for tag in one["args"]["tags"]),
            began=(one["ts"] - start) / 1e6,
            seconds=_number(one["dur"]) / 1e6,
            phases=tuple(phases[one["pid"], one["args"]["transition"]]),
            bytes=int(_number(one["args"].get("bytes", 0))),
            bytes_copied=int(_number(one["args"].get("bytes_copied", 0))),
            error=str(one["args"].get("error", "")),
        )
        for one in slices
        if one["cat"] == "fencepool"
    ]
    return tuple(sorted(found, key=lambda one: one.began))


def _series(counters: Sequence[dict[str, Any]], name: str, start: float) -> dict[str, Series]:
    chosen = sorted((one for one in counters if one["name"] == name), key=lambda one: one["ts"])
    keys = dict.fromkeys(key for one in chosen for key in one["args"])
    series = {
        key: [
            ((one["ts"] - start) / 1e6, int(_number(one["args"].get(key, 0))))
            for one in chosen
            # A pool that a sample does not name was not there then; of a device it says nothing.
            if name == POOLS or key in one["args"]
        ]
        for key in keys
    }
    return {str(key): one for key, one in series.items()}
