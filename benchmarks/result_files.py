"""What every benchmark does around its measurement: which device, what is written down, and where."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import fencepool as fp
import machine_facts
import report
from devices import is_emulated

# Options that every one of several programs has.
DeviceOption = Annotated[str, typer.Option(help="cuda:N, or cpu: the embedded driver (emulation).")]
OutputOption = Annotated[Path, typer.Option(help="Folder for the JSON and Markdown files.")]
RenderOption = Annotated[Path | None, typer.Option(help="Only redo this JSON file's tables.")]
BreakOption = Annotated[
    bool, typer.Option("--break-contents", help="Spoil restored contents: the run must fail.")
]

RESULTS = Path(__file__).resolve().with_name("results")
SCHEMA = 1


def check_device(device: str) -> None:
    """Raise typer.BadParameter with what is there instead."""
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
    layout = document["layout"]["name"] + ("" if change >= 1 else f" {change * 100:g} percent changed")
    slug = re.sub(r"[^a-z0-9]+", "-", f"{place} {layout}".lower()).strip("-")
    stamp = document["date"].split("+")[0].replace(":", "")
    return f"{document['benchmark']}-{slug}-{stamp}.json"


def write(document: dict[str, Any], path: Path) -> None:
    """The JSON file, in whatever state the measurement is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_page(
    document: dict[str, Any],
    title: str,
    facts: list[str],
    header: list[str],
    rows: list[list[str]],
    output: Path,
) -> None:
    """The JSON file, and a Markdown file with one table beside it."""
    place = "emulation" if document["kind"] == "emulation" else "gpu"
    stamp = document["date"].split("+")[0].replace(":", "")
    path = output / f"{document['benchmark']}-{place}-{stamp}.json"
    write(document, path)
    lines = [
        f"# {title}",
        "",
        *(f"- {fact}" for fact in facts),
        "",
        "| " + " | ".join(header) + " |",
        "|" + " --- |" + " ---: |" * (len(header) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def place_of(document: dict[str, Any]) -> str:
    """The GPU and its driver, in words."""
    gpu = document["machine"]["gpu"] or "the embedded driver (emulation)"
    return f"{gpu}, driver {document['machine']['driver']}"


def write_markdown(document: dict[str, Any], path: Path, console: Console) -> None:
    """Show it, and write the Markdown file beside the JSON file."""
    report.show(document, console)
    path.with_suffix(".md").write_text(report.markdown(document), encoding="utf-8")
    console.print(f"{path}\n{path.with_suffix('.md')}", markup=False, highlight=False, soft_wrap=True)


def render(path: Path, console: Console) -> None:
    """Only redo a JSON file's tables."""
    write_markdown(json.loads(path.read_text(encoding="utf-8")), path, console)
