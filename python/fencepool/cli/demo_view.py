"""How the demonstration's report looks: for people, and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .demo import KV_CACHE, WEIGHTS, Report
from .device import Choice
from .text import count, mebibytes, milliseconds, size

SCHEMA = "fencepool.demo/1"

_GOOD = {"ok", "released", "same address", "identical", "reference"}


def show(console: Console, choice: Choice, report: Report) -> None:
    """Write the report for people."""
    console.print(f"[bold]Device[/]  {report.device} ({escape(choice.name)}), because {escape(choice.why)}")
    console.print(f"[bold]Model[/]   {escape(report.model)}")
    console.print(f"[bold]Pools[/]   {WEIGHTS}: a pause keeps its contents in host memory")
    console.print(f"        {KV_CACHE}: a pause drops its contents")
    console.print(_table(report))
    console.print(
        f"Most alike of {count(report.sentences, 'sentence')} (cosine; 1 would be the same meaning):"
    )
    for cosine, one, other in report.pairs:
        console.print(f"  {cosine:.2f}  {escape(one)}")
        console.print(f"        {escape(other)}")
    console.print()
    for line in _verdict(report):
        console.print(line)


def as_json(choice: Choice, report: Report) -> dict[str, Any]:
    """The report for programs. The schema's number changes when a key changes its meaning or goes away."""
    return {
        "schema": SCHEMA,
        "device_name": choice.name,
        "why": choice.why,
        **asdict(report),
        "pairs": [{"cosine": pair[0], "sentences": list(pair[1:])} for pair in report.pairs],
        "exit_status": 0 if report.is_ok else 1,
    }


def _table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("step", no_wrap=True)
    table.add_column("what happened", ratio=1)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("device\nfree MiB", justify="right", no_wrap=True)
    table.add_column("process\nMiB", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for step in report.steps:
        colour = "green" if step.verdict in _GOOD else "bold red"
        table.add_row(
            step.name,
            escape(step.what),
            milliseconds(step.seconds),
            mebibytes(step.device_free),
            mebibytes(step.process_memory),
            f"[{colour}]{step.verdict}[/]",
        )
    return table


def _verdict(report: Report) -> list[str]:
    grown = -report.process_released
    lines = [
        f"A pause gives {size(report.released)} of device memory back, and the process "
        f"{'grows' if grown > 0 else 'shrinks'} by {size(abs(grown))}: "
        f"meanwhile {size(report.backed_up)} of {WEIGHTS} are in host memory."
    ]
    if report.unreleased > 0:
        lines.append(
            f"[yellow]The driver's free memory rose by {size(report.unreleased)} less than that. "
            "On a device that others use too, one of them may have taken it.[/]"
        )
    cycles = count(report.cycles, "cycle")
    if report.is_ok:
        lines.append(
            f"[bold green]Identical[/]: after {cycles} all {report.numbers:,} numbers are the same"
            " to the bit, from tensors at the same addresses."
        )
    if not report.is_identical:
        lines.append(
            f"[bold red]DIFFERENT[/]: not all {report.numbers:,} numbers are the same after {cycles}."
        )
    if not report.is_unmoved:
        lines.append("[bold red]MOVED[/]: a tensor has another address than before.")
    return lines
