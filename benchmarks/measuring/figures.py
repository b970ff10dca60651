"""Figures from raw samples: the first cycle by itself, then median, least and most of the later ones."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

OPERATIONS = ("pause_kv", "pause_weights", "resume_weights", "resume_kv")

Document = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """Seconds."""

    first: float
    later: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.later)

    @property
    def least(self) -> float:
        return min(self.later)

    @property
    def most(self) -> float:
        return max(self.later)

    @property
    def most_of_all(self) -> float:
        return max(self.first, *self.later)


def figure(result: Result, operation: str, moment: str = "done") -> Figure:
    """One operation of a system that ran; the moment is "returned" or "done"."""
    seconds = [cycle["operations"][operation][moment] for cycle in result["cycles"]]
    return Figure(seconds[0], tuple(seconds[1:]))


def phases(result: Result, operation: str) -> dict[str, Figure]:
    """Where a system says its time went; empty when it does not say."""
    samples = [cycle["operations"][operation]["phases"] for cycle in result["cycles"]]
    return {
        name: Figure(samples[0].get(name, 0.0), tuple(one.get(name, 0.0) for one in samples[1:]))
        for name in samples[-1]
    }


def summary(result: Result) -> dict[str, Any]:
    """The figures as the results file holds them beside the samples."""
    made: dict[str, Any] = {}
    for operation in OPERATIONS:
        for moment in ("returned", "done"):
            one = figure(result, operation, moment)
            made[f"{operation}_{moment}"] = {
                "kind": result["kind"],
                "first": one.first,
                "median": one.median,
                "min": one.least,
                "max": one.most,
            }
    return made


def has_cycles(result: Result) -> bool:
    return result["status"] == "ok" and "cycles" in result


def find(document: Document, name: str) -> Result | None:
    """A system's result by its id, if it was measured."""
    for result in document["systems"]:
        if result["id"] == name and result["status"] == "ok":
            return dict(result)
    return None


def link_seconds(document: Document, direction: str) -> float | None:
    """Seconds the link alone takes for the weights' bytes, "in" or "out"; None when it was not measured."""
    result = find(document, "pinned_copy")
    if result is None:
        return None
    link = result["link"]
    rate = link["bytes"] / statistics.median(link[f"{direction}_seconds"])
    return float(document["layout"]["weights"]["bytes"] / rate)
