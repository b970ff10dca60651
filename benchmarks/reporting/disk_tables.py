"""The tables of disk_backup.py."""

from __future__ import annotations

import statistics

from measuring import figures
from measuring.figures import Document
from reporting.result_tables import Table, milliseconds, spread

DISK_TARGET = 0.9  # of what the disk does by itself


def disk_backup(document: Document) -> list[Table]:
    """The disk by itself, every system beside it, the target, and what could not be run."""
    measured = [result for result in document["systems"] if figures.has_cycles(result)]
    nbytes, kind = document["layout"]["weights"]["bytes"], document["kind"]
    alone = disk_seconds(document)
    disk = [
        (name, f"{nbytes / alone[way] / 1e9:.2f}", milliseconds(alone[way]), kind)
        for way, name in (("write", "writing"), ("read", "reading"))
    ]
    rows: list[tuple[str, ...]] = []
    targets: list[tuple[str, ...]] = []
    for result in measured:
        pause, restore = figures.figure(result, "pause_weights"), figures.figure(result, "resume_weights")
        is_all_written = "unchanged" not in result["id"]
        rows.append(
            (
                result["id"],
                milliseconds(pause.first),
                spread(pause.later),
                f"{alone['write'] / pause.median:.0%}" if is_all_written else "",
                spread(restore.later),
                f"{alone['read'] / restore.median:.0%}",
                result["cycles"][0]["contents"],
                kind,
            )
        )
        if result["id"] == "fencepool/disk":
            targets = [
                _target("pause, of the disk's writing", alone["write"] / pause.median, kind),
                _target("restore, of the disk's reading", alone["read"] / restore.median, kind),
            ]
    missing = [
        (result["id"], f"{result['status']}: {result['reason']}")
        for result in document["systems"]
        if result["status"] != "ok"
    ]
    header = (
        "system",
        "first pause",
        "later pauses",
        "of the disk",
        "contents are back",
        "of the disk",
        "contents",
        "kind",
    )
    made = [
        Table(
            f"The disk by itself: {document['disk']['tool']}",
            ("", "GB/s", "ms for the weights", "kind"),
            disk,
        ),
        Table(f"Weights, {nbytes / 2**30:.2f} GiB, ms", header, rows),
        Table("Targets", ("target", "at least", "measured", "verdict"), targets),
        Table("Not run, failed", ("system", "why"), missing),
    ]
    return [table for table in made if table.rows]


def disk_seconds(document: Document) -> dict[str, float]:
    """Seconds that the disk alone takes for the weights' bytes, by "write" and "read"."""
    disk, nbytes = document["disk"], document["layout"]["weights"]["bytes"]
    return {
        way: statistics.median(disk[f"{way}_seconds"]) / disk["bytes"] * nbytes for way in ("write", "read")
    }


def _target(what: str, share: float, kind: str) -> tuple[str, ...]:
    verdict = "met" if share >= DISK_TARGET else "missed"
    return (
        what,
        f"{DISK_TARGET:.0%}",
        f"{share:.0%}",
        verdict if kind == "measured" else "not judged: emulation",
    )
