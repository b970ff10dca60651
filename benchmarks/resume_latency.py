"""Pause and resume latency of fencepool beside its peers: same run, same layout, contents checked.

    python benchmarks/resume_latency.py --device cuda:0 --layout 7b
    python benchmarks/resume_latency.py --device cpu              # the embedded driver: emulation
    python benchmarks/resume_latency.py --render benchmarks/results/FILE.json

Exit status: 0, also when a target is missed; 1 when a system failed or its contents were wrong; 2 for bad
usage. See docs/benchmarks.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from measuring import isolation
from measuring.devices import EMULATED_MEMORY, is_emulated
from measuring.layouts import KV_CACHE, LAYOUTS, WEIGHTS, Layout
from reporting import result_files, targets
from systems import Entry, select


def main(
    device: result_files.DeviceOption = "cuda:0",
    layout: Annotated[str, typer.Option(help="7b, moe, small or tiny; by default 7b, on cpu tiny.")] = "",
    systems: Annotated[
        list[str] | None, typer.Option(help="Systems or ids, comma-separated or repeated; by default all.")
    ] = None,
    cycles: Annotated[int, typer.Option(min=1, help="Cycles after the first. Slow systems run fewer.")] = 5,
    hold: Annotated[float, typer.Option(min=0, help="Seconds between pause and resume.")] = 0.3,
    change: Annotated[
        float,
        typer.Option(min=0, max=1, help="Fraction of the weights to change before each later pause."),
    ] = 1.0,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
    break_contents: result_files.BreakOption = False,
) -> None:
    """Measure pause and resume of weights and KV cache, and write the results."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    shape = _layout(layout or ("tiny" if is_emulated(device) else "7b"))
    entries = _entries(systems or [])
    if is_emulated(device) and shape.size(WEIGHTS) + shape.size(KV_CACHE) > EMULATED_MEMORY:
        raise typer.BadParameter(f"layout {shape.name} is too large for the emulation; --layout tiny is not")
    document = {**_describe(device, shape, cycles, hold), "change": change}
    path = output / result_files.file_name(document)
    try:
        _measure_all(document, entries, path, break_contents, console)
    finally:  # after Ctrl-C too: what was measured is shown
        document["targets"] = targets.evaluate(document)
        result_files.write(document, path)
        result_files.write_markdown(document, path, console)
    if any(result["status"] == "failed" for result in document["systems"]):
        raise typer.Exit(1)


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise typer.BadParameter(f"unknown layout {name!r}; there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def _entries(names: list[str]) -> list[Entry]:
    try:
        return select([name.strip() for part in names for name in part.split(",") if name.strip()])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _describe(device: str, layout: Layout, cycles: int, hold: float) -> dict[str, Any]:
    head = result_files.describe("resume_latency", device, layout.facts(), cycles, hold)
    return {**head, "systems": [], "targets": []}


def _measure_all(
    document: dict[str, Any], entries: list[Entry], path: Path, is_broken: bool, console: Console
) -> None:
    """Add every system's result, and write the file after each: nothing that happens later loses it."""
    results = document["systems"]
    try:
        for number, entry in enumerate(entries, start=1):
            with console.status(f"{entry.id}: {entry.title} ({number} of {len(entries)})"):
                result = isolation.result_of(document, entry, document["change"], is_broken)
            results.append(result)
            result_files.write(document, path)
            seconds = f" ({result['wall_seconds']:.1f} s)" if "wall_seconds" in result else ""
            reason = f": {result['reason']}" if "reason" in result else ""
            console.print(f"{entry.id} {result['status']}{reason}{seconds}", markup=False, highlight=False)
    except KeyboardInterrupt:
        for entry in entries[len(results) :]:
            results.append({**isolation.head(document, entry), "status": "not run", "reason": "interrupted"})
        raise


if __name__ == "__main__":
    typer.run(main)
