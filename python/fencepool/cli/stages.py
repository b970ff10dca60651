"""What is being done, shown on a terminal while it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextmanager
def stages(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that is told the name of each of `total` stages as it begins."""
    # On a terminal only, and on stderr: a bar in a log is noise. It is gone when the report appears.
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)
        is_first = True

        def stage(name: str) -> None:
            nonlocal is_first
            progress.update(task, description=name, advance=0 if is_first else 1)
            is_first = False

        yield stage
