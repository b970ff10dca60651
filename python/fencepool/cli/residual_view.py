"""How the division of device memory looks: for people, and for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .residual import Holder, Place, Report
from .text import ago, size

SCHEMA = "fencepool.residual/1"


def show(console: Console, report: Report) -> None:
    """Write the report for people."""
    for number, place in enumerate(report.places):
        if number:
            console.print()
        held = f"{size(place.used)} of {size(place.total)} held"
        console.print(f"[bold]{escape(place.name)}[/]: {held}")
        console.print(_table(place))
    if any(not one.runs_fencepool for place in report.places for one in place.holders):
        console.print("A program that is started with FENCEPOOL_STATUS_DIR=1 says how its memory divides.")
    for note in report.notes:
        console.print(f"[dim]{escape(note)}[/]")


def as_json(report: Report) -> dict[str, Any]:
    """The report for programs. The schema's number changes when a key changes its meaning or goes away."""
    return {"schema": SCHEMA, "exit_status": 0, **asdict(report)}


def _table(place: Place) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("held", justify="right", no_wrap=True)
    table.add_column("by", no_wrap=True)
    table.add_column("what it is, and what gives it back", ratio=1)
    for holder in place.holders:
        _add_holder(table, holder)
    if place.unknown:
        table.add_row(size(place.unknown), "unknown", "the driver's own, and processes that nobody shows")
    return table


def _add_holder(table: Table, holder: Holder) -> None:
    held = sum(line.bytes or 0 for line in holder.lines) if holder.bytes is None else holder.bytes
    name = f"process {holder.pid}"
    says = escape(holder.program or "?")
    if holder.last and holder.seconds_ago is not None:
        says += f"; {escape(holder.last)}, {ago(holder.seconds_ago)}"
    is_known = holder.bytes is not None or holder.lines
    table.add_row(f"[bold]{size(held) if is_known else '?'}[/]", f"[bold]{name}[/]", says)
    for line in holder.lines:
        text = escape(line.says)
        if line.do:
            text += f"\n[italic]-> {escape(line.do)}[/]"
        table.add_row("?" if line.bytes is None else size(line.bytes), f"  {escape(line.name)}", text)
    if holder.host_bytes:
        table.add_row("", "  backups", f"{size(holder.host_bytes)} of host memory, beside the device's")
