"""The tables of the benchmarks in which copies overlap with something: layers.py and swap.py."""

from __future__ import annotations

import statistics
from typing import Any

from measuring.figures import Document, Figure
from reporting.result_tables import Table, milliseconds, spread

_SWAP_LIMIT = 1.25  # times the link's time for one direction


def layers(document: Document) -> list[Table]:
    """Times from the call of resume, by mode."""
    link = statistics.median(document["link"]["in_seconds"]) / document["link"]["bytes"]
    whole = document["layout"]["bytes"] * link
    first = document["layout"]["first_layer_bytes"] * link
    rows: list[tuple[str, ...]] = []
    for mode, samples in document["modes"].items():
        cells = [_figure(samples, name) for name in ("returned", "first_layer", "whole_forward")]
        rows.append(
            (
                mode,
                *(spread(one.later) for one in cells),
                f"{cells[1].median / first:.2f}",
                f"{cells[2].median / whole:.2f}",
                "verified",
                document["kind"],
            )
        )
    size = f"{document['layout']['bytes'] / 2**30:.2f} GiB in {document['layout']['layers']} layers"
    limits: list[tuple[str, ...]] = [
        ("the link: the first layer's bytes", milliseconds(first), document["kind"]),
        ("the link: all bytes", milliseconds(whole), document["kind"]),
        ("a forward by itself", spread(_figure(document["forward"], "seconds").later), document["kind"]),
    ]
    header = (
        "mode",
        "resume returns",
        "first layer",
        "whole forward",
        "x link",
        "x link, whole",
        "contents",
        "kind",
    )
    return [
        Table("Limits, ms", ("what", "ms", "kind"), limits),
        Table(f"From the call of resume, {size}, ms", header, rows),
    ]


def swap(document: Document) -> list[Table]:
    """Both ways of changing places, in each amount of room, and the target."""
    link = document["link"]
    nbytes = document["layout"]["bytes"]
    seconds = {
        way: statistics.median(link[f"{way}_seconds"]) / link["bytes"] * nbytes for way in ("in", "out")
    }
    one_way = max(seconds.values())
    rows: list[tuple[str, ...]] = []
    targets: list[tuple[str, ...]] = []
    for run in document["runs"]:
        figure = _figure(run["cycles"], "done")
        rows.append(
            (
                run["id"],
                f"{run['free_bytes'] / 2**30:.2f}",
                milliseconds(figure.first),
                spread(_figure(run["cycles"], "returned").later),
                spread(figure.later),
                f"{figure.median / one_way:.2f}",
                f"{2 * nbytes / figure.median / 1e9:.1f}",
                "verified",
                document["kind"],
            )
        )
        if run["id"].startswith("swap"):
            verdict = "met" if figure.median <= _SWAP_LIMIT * one_way else "missed"
            if document["kind"] == "emulation":
                verdict = "not judged: emulation"
            targets.append(
                (run["id"], milliseconds(_SWAP_LIMIT * one_way), milliseconds(figure.median), verdict)
            )
    ways = [
        (name, f"{nbytes / seconds[way] / 1e9:.1f}", milliseconds(seconds[way]), document["kind"])
        for way, name in (("in", "host to device"), ("out", "device to host"))
    ]
    header = (
        *(
            "what",
            "GiB free",
            "first",
            "returns",
            "complete",
            "x one way",
            "GB/s both ways",
            "contents",
            "kind",
        ),
    )
    return [
        Table(
            "The link, one direction at a time", ("direction", "GB/s", "ms for one pool", "kind"), list(ways)
        ),
        Table(f"Two pools of {nbytes / 2**30:.2f} GiB change places, ms", header, rows),
        Table("Targets, ms", ("what", "at most", "median", "verdict"), targets),
    ]


def _figure(samples: list[dict[str, Any]], name: str) -> Figure:
    values = [float(sample[name]) for sample in samples]
    return Figure(values[0], tuple(values[1:]))
