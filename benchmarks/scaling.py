"""What a pause and a resume cost by the bytes of a pool and by the number of its segments.

    python benchmarks/scaling.py --device cuda:0

One series has more and more bytes in as many segments, the other as many bytes in more and more segments.
Every word changes before each pause, and contents are checked after each resume. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

import fencepool as fp
from measuring import contents, host_pages
from measuring.devices import Device
from reporting import result_files

MIB, GIB = 1 << 20, 1 << 30
MOMENTS = ("pause", "returned", "resume")


@dataclass(frozen=True)
class Point:
    """A pool: so many segments of one size."""

    series: str
    bytes: int
    segments: int

    @property
    def label(self) -> str:
        size = f"{self.bytes / GIB:g} GiB" if self.bytes >= GIB else f"{self.bytes / MIB:g} MiB"
        return f"{size} in {self.segments:,} segments"


def points(is_small: bool) -> list[Point]:
    """Both series; the embedded driver's are small."""
    unit, segments = (MIB, 2) if is_small else (GIB, 8)
    of_bytes = [
        Point("bytes", unit * 8 * factor, segments) for factor in ((1, 2, 4) if is_small else (1, 2, 3))
    ]
    counts = (2, 4, 8) if is_small else (8, 64, 512, 2048)
    return of_bytes + [Point("segments", unit * 16, count) for count in counts]


def main(
    device: result_files.DeviceOption = "cuda:0",
    backup: Annotated[str, typer.Option(help="The pools' policy: host or none.")] = "host",
    cycles: Annotated[int, typer.Option(min=1, help="Cycles after the first.")] = 5,
    hold: Annotated[float, typer.Option(min=0, help="Seconds between pause and resume.")] = 0.3,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
    break_contents: result_files.BreakOption = False,
) -> None:
    """Time pools of several sizes and of several numbers of segments."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    if backup not in ("host", "none"):
        raise typer.BadParameter(f"--backup is host or none, not {backup!r}")
    there = Device(device)
    document = result_files.describe("scaling", device, {"name": f"backup {backup}"}, cycles, hold)
    document["points"] = []
    path = output / result_files.file_name(document)
    series = points(there.is_emulated)
    if backup == "host":
        host_pages.touch(max(point.bytes for point in series) * 9 // 8)
    with result_files.kept_if_right(document, path, console):
        for point in series:
            with console.status(point.label):
                samples = measure(there, point, backup, cycles + 1, hold, break_contents)
            document["points"].append({**vars(point), "label": point.label, "cycles": samples})
            result_files.write(document, path)
        document["slopes"] = slopes(document["points"])


def measure(
    device: Device, point: Point, backup: str, cycles: int, hold: float, is_broken: bool
) -> list[dict[str, float]]:
    """Seconds of each cycle of a pool that is made for it and closed afterwards.

    Raises:
        ContentsError: the pool does not hold what it held.
    """
    pool = fp.pool("scaling", device.name, backup=backup)
    words = point.bytes // point.segments // 4
    tensors = [pool.empty((words,), torch.int32) for _ in range(point.segments)]
    contents.fill(tensors)
    samples = []
    for _ in range(cycles):
        contents.change(tensors)
        expected = contents.checksums(tensors)
        device.synchronize()
        seconds = {}
        start = time.perf_counter()
        fp.pause("scaling")
        seconds["pause"] = time.perf_counter() - start
        time.sleep(hold)
        start = time.perf_counter()
        resumed = fp.resume("scaling")
        seconds["returned"] = time.perf_counter() - start
        resumed.fence.synchronize(timeout=60)
        device.synchronize()
        seconds["resume"] = time.perf_counter() - start
        if is_broken:
            contents.break_one(tensors)
        if backup == "host":
            contents.check(tensors, expected)
        samples.append(seconds)
    del tensors
    pool.close()
    return samples


def slopes(measured: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds for one more GiB and for one more segment, by least squares of the later cycles' medians."""
    made = {}
    for series, unit, scale in (("bytes", "GiB", GIB), ("segments", "segment", 1)):
        here = [one for one in measured if one["series"] == series]
        places = [one[series] / scale for one in here]
        made[unit] = {
            moment: statistics.linear_regression(
                places, [statistics.median(cycle[moment] for cycle in one["cycles"][1:]) for one in here]
            ).slope
            for moment in MOMENTS
        }
    return made


if __name__ == "__main__":
    typer.run(main)
