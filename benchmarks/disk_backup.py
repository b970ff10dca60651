"""Pause and resume with a backup on disk, beside what the disk does by itself: contents checked.

    python benchmarks/disk_backup.py --device cuda:0 --directory /local/nvme
    python benchmarks/disk_backup.py --device cpu --directory .      # the embedded driver: emulation

Exit status: 0, also when a target is missed; 1 when a system failed or its contents were wrong; 2 for bad
usage. See docs/benchmarks.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from measuring import disk_speed, isolation
from measuring.devices import is_emulated
from measuring.layouts import LAYOUTS, WEIGHTS
from reporting import result_files
from systems import FENCEPOOL, TORCH_MEMORY_SAVER, Entry

# The fraction of the weights that changes before each later pause, beside what is run.
ENTRIES = (
    (1.0, Entry(FENCEPOOL, "disk", "systems.fencepool_system", "every word changes", timeout=300)),
    (0.0, Entry(FENCEPOOL, "disk, unchanged", "systems.fencepool_system", "nothing changes", timeout=300)),
    (
        1.0,
        Entry(
            TORCH_MEMORY_SAVER,
            "disk-backup",
            "systems.torch_memory_saver_system",
            "preload mode, backup on disk",
            needs_gpu=True,
            package="torch_memory_saver",
            most_cycles=2,
            timeout=300,
        ),
    ),
)


def main(
    device: result_files.DeviceOption = "cuda:0",
    directory: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder on the disk to measure.")
    ] = None,
    layout: Annotated[str, typer.Option(help="A layout; by default disk (4 GiB), on cpu tiny.")] = "",
    cycles: Annotated[int, typer.Option(min=1, help="Cycles after the first.")] = 5,
    hold: Annotated[float, typer.Option(min=0, help="Seconds between pause and resume.")] = 0.3,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
    break_contents: result_files.BreakOption = False,
) -> None:
    """Measure the disk, then pauses and resumes with backups on it."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    if directory is None:
        raise typer.BadParameter("--directory names a folder on the disk to measure")
    layout = layout or ("tiny" if is_emulated(device) else "disk")
    if layout not in LAYOUTS:
        raise typer.BadParameter(f"unknown layout {layout!r}; there are {', '.join(LAYOUTS)}")
    shape = LAYOUTS[layout]
    document = result_files.describe("disk_backup", device, shape.facts(), cycles, hold)
    try:
        document["disk"] = disk_speed.measure(directory, shape.size(WEIGHTS), max(3, cycles))
    except disk_speed.NoDirectIo as error:
        raise typer.BadParameter(f"{directory} cannot be measured: {error}") from None
    for variable in ("FENCEPOOL_DISK_DIRECTORY", "TMS_DISK_BACKUP_DIR"):
        os.environ[variable] = str(directory.resolve())
    document["systems"] = []
    path = output / result_files.file_name(document)
    for change, entry in ENTRIES:
        with console.status(f"{entry.id}: {entry.title}"):
            result = isolation.result_of(document, entry, change, break_contents)
            document["systems"].append({**result, "change": change})
        result_files.write(document, path)
    result_files.write_markdown(document, path, console)
    if any(result["status"] == "failed" for result in document["systems"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
