"""What every benchmark does around its measurement: which device, what is written down, and where."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import fencepool as fp
from measuring import contents, machine_facts
from measuring.devices import is_emulated
from reporting import pictures, report
from reporting.panels import Panel

# Options that every one of several programs has.
DeviceOption = Annotated[str, typer.Option(help="cuda:N, or cpu: the embedded driver (emulation).")]
OutputOption = Annotated[Path, typer.Option(help="Folder for the JSON and Markdown files.")]
RenderOption = Annotated[Path | None, typer.Option(help="Only redo this JSON file's tables and picture.")]
BreakOption = Annotated[
    bool, typer.Option("--break-contents", help="Spoil restored contents: the run must fail.")
]

RESULTS = Path(__file__).resolve().parent.with_name("results")
SCHEMA = 1


def begin(device: str, render: Path | None) -> tuple[Console, str | None]:
    """Where to print, and the device to measure; None when a file was to be rendered only, which is done.

    Raises:
        typer.BadParameter: there is no such device; says what is there instead.
    """
    console = report.console()
    if render is not None:
        write_markdown(json.loads(render.read_text(encoding="utf-8")), render, console)
        return console, None
    device = "cuda:0" if device == "cuda" else device
    _check(device)
    return console, device


def _check(device: str) -> None:
    if not re.fullmatch(r"cuda:\d+|cpu(:[1-3])?", device):
        raise typer.BadParameter(f"unknown device {device!r}; there are cuda:N and cpu")
    if is_emulated(device):
        return
    info = fp.driver_info("cuda")
    if not info.is_available:
        raise typer.BadParameter(f"no GPU can be used here ({info.reason}); --device cpu runs an emulation")
    if device not in [one.device for one in info.devices]:
        raise typer.BadParameter(f"there is no {device}; there are {len(info.devices)} GPUs")


def head(benchmark: str, device: str) -> dict[str, Any]:
    """What every results file begins with."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "kind": "emulation" if is_emulated(device) else "measured",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "machine": machine_facts.machine(device),
        "versions": machine_facts.versions(),
    }


def describe(benchmark: str, device: str, layout: dict[str, Any], cycles: int, hold: float) -> dict[str, Any]:
    """The head of a results file of pauses and resumes; `layout` has a name."""
    return {**head(benchmark, device), "layout": layout, "cycles": cycles, "hold_seconds": hold}


def file_name(document: dict[str, Any]) -> str:
    """What it was measured on, and when: a result never takes another's place."""
    place = "emulation" if document["kind"] == "emulation" else str(document["machine"]["gpu"])
    change = document.get("change", 1.0)
    layout = document["layout"]["name"] if "layout" in document else ""
    changed = "" if change >= 1 else f"{change * 100:g} percent changed"
    slug = re.sub(r"[^a-z0-9]+", "-", f"{place} {layout} {changed}".lower()).strip("-")
    stamp = document["date"].split("+")[0].replace(":", "")
    return f"{document['benchmark']}-{slug}-{stamp}.json"


def write(document: dict[str, Any], path: Path) -> None:
    """The JSON file, in whatever state the measurement is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_markdown(document: dict[str, Any], path: Path, console: Console) -> None:
    """Show it, and write the Markdown file and the picture beside the JSON file."""
    report.show(document, console)
    panels = report.PAGES[document["benchmark"]].panels(document)
    picture = write_picture(panels, report.title(document), path)
    text = report.markdown(document, picture.name if picture else "")
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    written = [path, path.with_suffix(".md"), *([picture] if picture else [])]
    console.print("\n".join(str(one) for one in written), markup=False, highlight=False, soft_wrap=True)
    if picture is None and any(panel.rows for panel in panels):
        console.print("no picture: matplotlib is not installed", style="dim")


def write_picture(panels: list[Panel], title: str, path: Path) -> Path | None:
    """The picture beside a JSON file; None where there is nothing to draw, or no matplotlib to draw it."""
    if not any(panel.rows for panel in panels) or not pictures.is_possible():
        return None
    pictures.draw(panels, title, path.with_suffix(".png"))
    return path.with_suffix(".png")


@contextlib.contextmanager
def kept_if_right(document: dict[str, Any], path: Path, console: Console) -> Iterator[None]:
    """Writes the result at the end of the block. When contents were wrong, says so, and no figure is kept.

    Raises:
        typer.Exit: contents were wrong.
    """
    try:
        yield
    except contents.ContentsError as error:
        console.print(f"failed: {error}", style="bold red", markup=False)
        path.unlink(missing_ok=True)
        raise typer.Exit(1) from None
    write(document, path)
    write_markdown(document, path, console)
