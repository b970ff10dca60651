"""The results as tables of text, for the terminal and for Markdown alike."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from measuring import figures
from measuring.figures import Document, Figure, Result

_GIB = 1 << 30


@dataclass(frozen=True)
class Table:
    """Rows of text. The first column is left-aligned."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(document: Document) -> list[Table]:
    """All of a result's tables; one without a row is left out."""
    made = [
        _link(document),
        _weights(document),
        _kv_cache(document),
        _phases(document, "pause_weights", "Where fencepool's pause of the weights goes, ms"),
        _phases(document, "resume_weights", "Where fencepool's resume of the weights goes, ms"),
        _targets(document),
        _missing(document),
    ]
    return [table for table in made if table.rows]


def milliseconds(seconds: float) -> str:
    """Three digits that count, and no more."""
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"


def spread(seconds: Sequence[float]) -> str:
    """The median, and the least and the most in brackets, in milliseconds."""
    middle = milliseconds(statistics.median(seconds))
    return f"{middle} ({milliseconds(min(seconds))} to {milliseconds(max(seconds))})"


def _spread(one: Figure) -> str:
    return spread(one.later)


def _measured(document: Document) -> list[Result]:
    return [result for result in document["systems"] if figures.has_cycles(result)]


def _weights(document: Document) -> Table:
    layout = document["layout"]["weights"]
    rows: list[tuple[str, ...]] = []
    for result in _measured(document):
        pause = figures.figure(result, "pause_weights")
        restore = figures.figure(result, "resume_weights")
        link = figures.link_seconds(document, "in") if result["cycles"][0]["contents"] == "verified" else None
        rows.append(
            (
                result["id"],
                milliseconds(pause.first),
                _spread(pause),
                _spread(figures.figure(result, "resume_weights", "returned")),
                _spread(restore),
                f"{restore.median / link:.2f}" if link else "",
                result["cycles"][0]["contents"],
                result["kind"],
            )
        )
    return Table(
        f"Weights, {_size(layout['bytes'])} in {layout['tensors']} tensors, ms",
        (
            "system",
            "first pause",
            "later pauses",
            "resume returns",
            "restore complete",
            "x link",
            "contents",
            "kind",
        ),
        rows,
    )


def _kv_cache(document: Document) -> Table:
    layout = document["layout"]["kv_cache"]
    rows: list[tuple[str, ...]] = []
    for result in _measured(document):
        pause = figures.figure(result, "pause_kv")
        free = statistics.median(cycle["free_bytes_paused"] for cycle in result["cycles"])
        rows.append(
            (
                result["id"],
                milliseconds(pause.first),
                _spread(pause),
                _spread(figures.figure(result, "resume_kv", "returned")),
                _spread(figures.figure(result, "resume_kv")),
                f"{free / _GIB:.2f}",
                result["kind"],
            )
        )
    return Table(
        f"KV cache without backup, {_size(layout['bytes'])} in {layout['tensors']} tensors, ms",
        (
            "system",
            "first pause",
            "later pauses",
            "resume returns",
            "resume complete",
            "GiB free while paused",
            "kind",
        ),
        rows,
    )


def _link(document: Document) -> Table:
    result = figures.find(document, "pinned_copy")
    rows: list[tuple[str, ...]] = []
    for direction, name in (("in", "host to device"), ("out", "device to host")):
        if result is not None:
            link = result["link"]
            rates = [link["bytes"] / seconds / 1e9 for seconds in link[f"{direction}_seconds"]]
            seconds = figures.link_seconds(document, direction) or 0.0
            rows.append(
                (
                    name,
                    f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})",
                    milliseconds(seconds),
                    result["kind"],
                )
            )
    return Table("The link, pinned copies only", ("direction", "GB/s", "ms for the weights", "kind"), rows)


def _phases(document: Document, operation: str, title: str) -> Table:
    results = [result for result in _measured(document) if figures.phases(result, operation)]
    names = list(dict.fromkeys(name for result in results for name in figures.phases(result, operation)))
    rows: list[tuple[str, ...]] = []
    for result in results:
        parts = figures.phases(result, operation)
        for label, pick in (("first", False), ("later, median", True)):
            values = [
                milliseconds(parts[name].median if pick else parts[name].first) if name in parts else ""
                for name in names
            ]
            rows.append((f"{result['id']}, {label}", *values, result["kind"]))
    return Table(title, ("system", *names, "kind"), rows)


def _targets(document: Document) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            row["target"],
            row["system"],
            milliseconds(row["limit"]) if row["limit"] is not None else "",
            milliseconds(row["measured"]) if row["measured"] is not None else "",
            row["verdict"],
        )
        for row in document["targets"]
    ]
    return Table("Targets, ms", ("target", "system", "at most", "measured", "verdict"), rows)


def _missing(document: Document) -> Table:
    rows: list[tuple[str, ...]] = []
    for result in document["systems"]:
        if result["status"] != "ok":
            rows.append((result["id"], f"{result['status']}: {result['reason']}", result["kind"]))
        rows += [(result["id"], f"note: {note}", result["kind"]) for note in result.get("notes", [])]
    return Table("Not run, failed, noted", ("system", "what", "kind"), rows)
