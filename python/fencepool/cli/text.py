"""How the command line writes sizes, times and errors: one place, so that all commands look alike."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def size(count: int) -> str:
    """`count` bytes in the largest unit that keeps it readable, powers of two: "87.4 MiB", "139.8 GiB"."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"


def mebibytes(count: int) -> str:
    """`count` bytes as a number of MiB, for columns whose figures are compared: "143,771"."""
    return f"{count / MIB:,.0f}"


def milliseconds(seconds: float) -> str:
    """`seconds` in milliseconds, with a digit after the point only where it says something."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def count(number: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`: English plurals of the regular kind."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def output() -> Console:
    """The console for results. Not a terminal: no colours, no control characters, 80 columns or COLUMNS."""
    return Console(file=sys.stdout, highlight=False)


def messages() -> Console:
    """The console for progress and errors, so that results can be piped elsewhere."""
    return Console(file=sys.stderr, highlight=False)


def say_error(what: str, hint: str = "") -> None:
    """Write one error, and below it what to do about it."""
    console = messages()
    # The terminal wraps, not rich: in a log an error stays one line, and a path can be copied from it.
    console.print(f"[bold red]error:[/] {escape(what)}", soft_wrap=True)
    if hint:
        console.print(escape(hint), soft_wrap=True)
