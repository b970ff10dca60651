"""The tables of the benchmarks of one pool or one buffer: digest_speed.py, resident.py and scaling.py."""

from __future__ import annotations

import statistics

from measuring.figures import Document
from reporting.result_tables import Table, milliseconds, spread

DIGEST_TARGET = 0.8  # of the bandwidth that a copy reaches
# Which way over the link the contents go.
_DIRECTIONS = {
    "pause": "to_host",
    "paused: kernel reads": "to_device",
    "paused: kernel writes": "to_host",
    "resume, contents there": "to_device",
}


def digest_speed(document: Document) -> list[Table]:
    """Digests beside copies, in bytes of device memory a second."""
    rates, kind = document["bytes_a_second"], document["kind"]
    rows = [
        (name, spread(taken), f"{rates[name] / 1e9:,.0f}", f"{rates[name] / rates['copy']:.0%}", kind)
        for name, taken in document["seconds"].items()
    ]
    target = (
        "digests, of a copy's bandwidth",
        f"{DIGEST_TARGET:.0%}",
        f"{rates['digest'] / rates['copy']:.0%}",
        document["verdict"],
    )
    return [
        Table(
            f"{document['bytes'] / 2**30:.2f} GiB, ms",
            ("what", "ms", "GB/s of device memory", "of a copy's", "kind"),
            rows,
        ),
        Table("Target", ("target", "at least", "measured", "verdict"), [target]),
    ]


def resident(document: Document) -> list[Table]:
    """The first of several samples is left out of the median: first times pay for more."""
    rows: list[tuple[str, ...]] = []
    for name, taken in document["seconds"].items():
        later = taken[1:] or taken
        passes = 2 if "reads and writes" in name else 1
        rate = passes * document["bytes"] / statistics.median(later)
        limit = document["link"].get(_DIRECTIONS.get(name, ""))
        share = f"{rate / limit:.0%}" if limit else ""
        rows.append(
            (name, spread(later), milliseconds(taken[0]), f"{rate / 1e9:,.1f}", share, document["kind"])
        )
    for name, rate in document["link"].items():
        label = f"the link, {name.replace('_', ' ')}"
        rows.append(
            (label, milliseconds(document["bytes"] / rate), "", f"{rate / 1e9:,.1f}", "", document["kind"])
        )
    header = ("what", "ms", "first", "GB/s", "of the link", "kind")
    return [Table(f"A resident backup of {document['bytes'] / 2**30:.2f} GiB", header, rows)]


def scaling(document: Document) -> list[Table]:
    """Each point of both series, and what one more GiB and one more segment cost."""
    rows = [
        (
            one["label"],
            *(
                spread(samples[1:])
                for samples in (
                    [cycle[name] for cycle in one["cycles"]] for name in ("pause", "returned", "resume")
                )
            ),
            document["kind"],
        )
        for one in document["points"]
    ]
    slopes: list[tuple[str, ...]] = [
        (
            f"one more {unit}, {scale}",
            *(_short(each[moment] * factor) for moment in ("pause", "returned", "resume")),
        )
        for (unit, each), (scale, factor) in zip(
            document["slopes"].items(), (("ms", 1e3), ("µs", 1e6)), strict=True
        )
    ]
    header = ("pool", "pause", "resume returns", "contents are back", "kind")
    return [
        Table("By bytes and by segments, ms", header, rows),
        Table(
            "What more of it costs, least squares of the medians",
            ("", "pause", "resume returns", "contents are back"),
            slopes,
        ),
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"
