"""The targets that were set before anything was measured, and whether a run met them.

Limits in seconds are held against the worst sample; comparisons with the link and with a peer are made
between medians of the cycles after the first. The driver releases memory in 20 or in 40 milliseconds, for
minutes at a time and for every system; so where a median is above the peer's and the fastest sample is not,
the verdict is "within the spread".
"""

from __future__ import annotations

from typing import Any

from measuring import figures
from measuring.figures import Document, Result

FIRST_PAUSE = 0.65
LATER_PAUSE = 0.300
# By the fraction of the weights that changed.
UNCHANGED_PAUSE = 0.030
PARTLY_CHANGED_PAUSE = 0.040  # up to 1%
RESUME_RETURNS = 0.020
OVER_LINK = 1.05

_WITH_BACKUP = ("fencepool/per-tensor", "fencepool/adopted", "fencepool/prepared")
# The KV cache has no backup in any of them. Pairs do the same otherwise, so the driver has the same to scrub.
_KV_PAIRS = (
    ("fencepool/no-backup", "torch_memory_saver/no-backup"),
    ("fencepool/adopted", "torch_memory_saver/cpu-backup-retained"),
)


def evaluate(document: Document) -> list[dict[str, Any]]:
    """Every target, for every variant it applies to; what was not measured is said."""
    rows = []
    for name in _WITH_BACKUP:
        result = figures.find(document, name)
        if name == "fencepool/prepared":
            rows.append(_row(document, "first pause after prepare()", name, LATER_PAUSE, _first(result)))
        else:
            rows.append(_row(document, "first pause with backup", name, FIRST_PAUSE, _first(result)))
        what, pause_limit = _of_later_pauses(document)
        rows.append(_row(document, what, name, pause_limit, _later(result)))
        rows.append(_row(document, "resume of the weights returns", name, RESUME_RETURNS, _returns(result)))
        limit, restored = _link(document), _median(result, "resume_weights")
        rows.append(_row(document, "restore complete, 1.05 x the link", name, limit, restored))
    for ours, theirs in _KV_PAIRS:
        for operation in ("pause_kv", "resume_kv"):
            target = f"{operation.split('_')[0]} of the KV cache, against {theirs}"
            limit = _median(figures.find(document, theirs), operation)
            result = figures.find(document, ours)
            row = _row(document, target, ours, limit, _median(result, operation))
            if row["verdict"] == "missed" and figures.figure(result, operation).least <= limit:
                row["verdict"] = "within the spread"
            rows.append(row)
    return rows


def _row(
    document: Document, target: str, name: str, limit: float | None, measured: float | None
) -> dict[str, Any]:
    if limit is None or measured is None:
        verdict = "not measured"
    elif document["kind"] == "emulation":
        verdict = "not judged: emulation"
    else:
        verdict = "met" if measured <= limit else "missed"
    return {
        "target": target,
        "system": name,
        "limit": limit,
        "measured": measured,
        "verdict": verdict,
        "kind": document["kind"],
    }


def _of_later_pauses(document: Document) -> tuple[str, float]:
    fraction = document.get("change", 1.0)
    if fraction == 0:
        return "later pauses, nothing changed", UNCHANGED_PAUSE
    if fraction <= 0.01:
        return "later pauses, 1% changed", PARTLY_CHANGED_PAUSE
    return "later pauses with backup", LATER_PAUSE


def _first(result: Result | None) -> float | None:
    return figures.figure(result, "pause_weights").first if result else None


def _later(result: Result | None) -> float | None:
    return max(figures.figure(result, "pause_weights").later) if result else None


def _returns(result: Result | None) -> float | None:
    return figures.figure(result, "resume_weights", "returned").most_of_all if result else None


def _link(document: Document) -> float | None:
    seconds = figures.link_seconds(document, "in")
    return OVER_LINK * seconds if seconds is not None else None


def _median(result: Result | None, operation: str) -> float | None:
    return figures.figure(result, operation).median if result else None
