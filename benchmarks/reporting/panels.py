"""What a result's picture shows: samples of time beside the limit, one panel a question."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from measuring import figures
from measuring.figures import Document
from reporting.disk_tables import disk_seconds
from systems import FENCEPOOL


@dataclass(frozen=True)
class Row:
    """Times of one thing, in seconds."""

    label: str
    seconds: tuple[float, ...]
    is_ours: bool


@dataclass(frozen=True)
class Panel:
    """Rows under one question, and what nothing can be faster than, or should not be slower than."""

    title: str
    rows: list[Row] = field(default_factory=list)
    limit: float | None = None
    limit_label: str = ""


def resume_latency(document: Document) -> list[Panel]:
    """Later pauses, resumes and restores of the weights; pauses and resumes of the KV cache."""
    made = []
    for title, operation, moment, limit in (
        ("Pause of the weights, after the first", "pause_weights", "done", "out"),
        ("Resume of the weights: the call returns", "resume_weights", "returned", ""),
        ("Resume of the weights: contents are back", "resume_weights", "done", "in"),
        ("Pause of the KV cache, no backup", "pause_kv", "done", ""),
        ("Resume of the KV cache, no backup", "resume_kv", "done", ""),
    ):
        rows = [
            Row(result["id"], figures.figure(result, operation, moment).later, result["system"] == FENCEPOOL)
            for result in document["systems"]
            if figures.has_cycles(result)
            and ("kv" in operation or result["cycles"][0]["contents"] == "verified")
        ]
        seconds = figures.link_seconds(document, limit) if limit else None
        label = "the link, every byte copied" if seconds else ""
        made.append(Panel(title, rows, seconds, label))
    return made


def layers(document: Document) -> list[Panel]:
    """The first layer's result and the whole forward's, by mode."""
    link = statistics.median(document["link"]["in_seconds"]) / document["link"]["bytes"]
    made = []
    for title, name, nbytes in (
        ("First layer's result, from the call of resume", "first_layer", "first_layer_bytes"),
        ("The whole forward's result", "whole_forward", "bytes"),
    ):
        rows = [
            Row(mode, _later(samples, name), mode == "layer by layer")
            for mode, samples in document["modes"].items()
        ]
        made.append(Panel(title, rows, link * document["layout"][nbytes], "the link, these bytes alone"))
    return made


def swap(document: Document) -> list[Panel]:
    """Both ways of changing places."""
    link, nbytes = document["link"], document["layout"]["bytes"]
    one_way = max(statistics.median(link[f"{way}_seconds"]) / link["bytes"] * nbytes for way in ("in", "out"))
    rows = [
        Row(run["id"], _later(run["cycles"], "done"), run["id"].startswith("swap"))
        for run in document["runs"]
    ]
    return [Panel("Two pools have changed places", rows, one_way, "the link, one pool, one way")]


def digest_speed(document: Document) -> list[Panel]:
    """A digest of a buffer beside a copy of it."""
    seconds = document["seconds"]
    rows = [Row(name, tuple(taken), name == "digest") for name, taken in seconds.items()]
    limit = statistics.median(seconds["copy"]) / 2  # a copy moves two bytes for each that it copies
    title = f"{document['bytes'] / 2**30:.0f} GiB of device memory"
    return [Panel(title, rows, limit, "reading it at a copy's bandwidth")]


def resident(document: Document) -> list[Panel]:
    """Pauses, resumes, and reading and writing meanwhile."""
    rows = [
        Row(name, tuple(taken[1:] or taken), True)
        for name, taken in document["seconds"].items()
        if "once" not in name
    ]
    limit = document["bytes"] / min(document["link"].values())
    return [Panel("A resident backup, after the first cycle", rows, limit, "the link, one pass")]


def disk_backup(document: Document) -> list[Panel]:
    """Later pauses and restores, beside the disk by itself."""
    alone = disk_seconds(document)
    measured = [result for result in document["systems"] if figures.has_cycles(result)]
    return [
        Panel(
            title,
            [
                Row(result["id"], figures.figure(result, operation).later, result["system"] == FENCEPOOL)
                for result in measured
            ],
            alone[way],
            f"the disk by itself, {name} every byte",
        )
        for title, operation, way, name in (
            ("Pause of the weights, after the first", "pause_weights", "write", "writing"),
            ("Resume of the weights: contents are back", "resume_weights", "read", "reading"),
        )
    ]


def scaling(document: Document) -> list[Panel]:
    """Fixed segments of more and more bytes, and fixed bytes in more and more segments."""
    made = []
    for series, title in (
        ("bytes", "More bytes, as many segments"),
        ("segments", "More segments, as many bytes"),
    ):
        for operation in ("pause", "resume"):
            rows = [
                Row(one["label"], _later(one["cycles"], operation), True)
                for one in document["points"]
                if one["series"] == series
            ]
            made.append(Panel(f"{title}: {operation}", rows))
    return made


def sglang_engine(results: Sequence[dict[str, Any]]) -> list[Panel]:
    """Release and resume as an engine's caller sees them."""
    done = [result for result in results if result.get("samples")]
    return [
        Panel(
            title,
            [
                Row(
                    result["scenario"],
                    tuple(sample[name] / 1e3 for sample in result["samples"][1:]),
                    result["scenario"].startswith(FENCEPOOL),
                )
                for result in done
            ],
        )
        for title, name in (
            ("release_memory_occupation, after the first", "release_ms"),
            ("resume_memory_occupation", "resume_ms"),
        )
    ]


def _later(samples: list[dict[str, Any]], name: str) -> tuple[float, ...]:
    return tuple(float(sample[name]) for sample in samples[1:])
