"""`fencepool trace`: what a recording of `fp.trace` has, as a table and as a picture."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .text import count, milliseconds, size

if TYPE_CHECKING:
    from fencepool.timeline import Recorded, Timeline

SCHEMA = "fencepool.trace/1"


def show(console: Console, timeline: Timeline, rows: int) -> None:
    """Write the table for people: the last `rows` transitions, then all of them together."""
    shown = timeline.transitions[-rows:]
    left_out = len(timeline.transitions) - len(shown)
    lasting = f"{timeline.seconds:.1f} s" if timeline.seconds >= 1 else f"{timeline.seconds * 1e3:.0f} ms"
    console.print(f"{count(len(timeline.transitions), 'transition')} in {lasting}", end="")
    console.print(f"; the last {len(shown)} are shown (--rows)" if left_out else "")
    if not timeline.transitions:
        return
    console.print(_table(shown, left_out))
    for kind in ("pause", "resume"):
        done = [one for one in timeline.transitions if one.kind == kind and not one.error]
        failed = sum(one.kind == kind and bool(one.error) for one in timeline.transitions)
        if done or failed:
            console.print(_summary(kind, done, failed))


def as_json(timeline: Timeline) -> dict[str, Any]:
    """The recording for programs. The schema's number changes when a key changes its meaning or goes away."""
    return {
        "schema": SCHEMA,
        "exit_status": 0,
        "seconds": timeline.seconds,
        "transitions": [{**asdict(one), "phases": dict(one.phases)} for one in timeline.transitions],
        "pools": timeline.pools,
        "devices": timeline.devices,
    }


def _table(shown: tuple[Recorded, ...], left_out: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("at s", justify="right", no_wrap=True)
    table.add_column("what")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("given or\ntaken", justify="right", no_wrap=True)
    table.add_column("copied", justify="right", no_wrap=True)
    table.add_column("phases, ms", ratio=1)
    for number, one in enumerate(shown, left_out + 1):
        phases = ", ".join(
            f"{name} {milliseconds(seconds)}" for name, seconds in one.phases if seconds >= 5e-5
        )
        table.add_row(
            str(number),
            f"{one.began:.2f}",
            escape(f"{one.kind} {_named(one.tags)}"),
            milliseconds(one.seconds),
            size(one.bytes) if not one.error else "",
            size(one.bytes_copied) if not one.error else "",
            f"[bold red]failed[/]: {escape(_shortened(one.error))}" if one.error else phases,
        )
    return table


def _named(tags: tuple[str, ...]) -> str:
    names = list(tags[:3])
    if len(tags) > 3:
        names = [*tags[:2], f"{len(tags) - 2} more"]
    return ", ".join(names)


def _shortened(error: str) -> str:
    return error if len(error) <= 80 else f"{error[:79]}…"  # the whole is in the JSON


def _summary(kind: str, done: list[Recorded], failed: int) -> str:
    text = count(len(done), kind)
    if failed:
        text += f" and [bold red]{failed} failed[/]"
    if done:
        seconds = [one.seconds for one in done]
        text += f": median {milliseconds(statistics.median(seconds))} ms"
        text += f", longest {milliseconds(max(seconds))} ms"
        text += f", {size(sum(one.bytes for one in done))} {'given back' if kind == 'pause' else 'taken'}"
        text += f", {size(sum(one.bytes_copied for one in done))} copied"
    return text
