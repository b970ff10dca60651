"""How the quick comparison looks: a table, a picture, and JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fencepool import picture

from .bench import Measured, Report
from .bench_ways import COUNT
from .device import Choice
from .text import mebibytes, milliseconds, size

SCHEMA = "fencepool.bench/1"
SAME = "Contents stay as they are; a pool that takes digests has nothing to copy at later pauses."
EMULATION = "Emulation: the embedded driver on host memory. The figures say nothing about a GPU."
_COLUMNS = (
    ("first pause", "first_pause"),
    ("later pauses", "pause"),
    ("data back", "back"),
)


def show(console: Console, choice: Choice, report: Report) -> None:
    """Write the report for people."""
    console.print(f"[bold]{report.device}[/] ({escape(choice.name)}), because {escape(choice.why)}")
    console.print(f"{size(report.size)} in {COUNT} tensors; medians in milliseconds")
    console.print(SAME)
    if report.is_emulated:
        console.print(f"[yellow]{EMULATION}[/]")
    console.print(_table(report))
    if not report.is_ok:
        console.print("[bold red]DIFFERENT[/]: contents were not the same after a cycle.")


def as_json(choice: Choice, report: Report) -> dict[str, Any]:
    """The report for programs. The schema's number changes when a key changes its meaning or goes away."""
    return {
        "schema": SCHEMA,
        "exit_status": 0 if report.is_ok else 1,
        "device_name": choice.name,
        "why": choice.why,
        **asdict(report),
    }


def draw(choice: Choice, report: Report, path: Path) -> None:
    """Draw the table as bars. Raises what `picture.draw_timeline` raises."""
    figure = picture.new_figure(9, 4.6)
    axis = figure.subplots()
    height = 0.8 / len(_COLUMNS)
    largest = max(getattr(one, key) for one in report.measured for _, key in _COLUMNS) * 1e3
    for index, (label, key) in enumerate(_COLUMNS):
        rows = [row + (index - 1) * height for row in range(len(report.measured))]
        values = [getattr(one, key) * 1e3 for one in report.measured]
        axis.barh(rows, values, height=height * 0.92, color=picture.COLOURS[index], label=label)
        for row, value in zip(rows, values, strict=True):
            axis.text(value + largest * 0.008, row, milliseconds(value / 1e3), va="center", fontsize=8)
    axis.set_yticks(range(len(report.measured)), [one.name for one in report.measured])
    axis.invert_yaxis()
    axis.set_xlim(0, largest * 1.1)
    axis.set_xlabel("milliseconds, medians; less is better")
    title = f"{size(report.size)} given away and taken back\n{report.device}, {choice.name}"
    axis.set_title(title + (" (emulation)" if report.is_emulated else ""), loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("way", no_wrap=True)
    for heading in ("first\npause", "later\npauses", "resume\nreturns", "data\nback"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("freed\nMiB", justify="right", no_wrap=True)
    table.add_column("address", no_wrap=True)
    table.add_column("contents", no_wrap=True)
    for one in report.measured:
        table.add_row(
            escape(one.name),
            *(milliseconds(value) for value in (one.first_pause, one.pause, one.resume, one.back)),
            _freed(report, one),
            "same" if one.is_unmoved else "changed",
            {None: "dropped", True: "identical", False: "[bold red]DIFFERENT[/]"}[one.is_same],
        )
    return table


def _freed(report: Report, one: Measured) -> str:
    # PyTorch's own CPU memory is not the embedded driver's, which therefore cannot say.
    return "?" if report.is_emulated and not one.name.startswith("fencepool") else mebibytes(one.freed)
