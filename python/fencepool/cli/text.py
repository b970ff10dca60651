"""How the command line writes sizes, times and errors: one place, so that all commands look alike."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from fencepool._sizes import size

__all__ = [
    "GIB",
    "MIB",
    "ago",
    "count",
    "mebibytes",
    "messages",
    "milliseconds",
    "output",
    "say_error",
    "size",
]

MIB, GIB = 1 << 20, 1 << 30


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


def ago(seconds: float) -> str:
    """How long ago something was: "3 s ago", "12 min ago", "5 h ago"."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


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
