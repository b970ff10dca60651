"""Two pools that change places: by one swap, and by a pause and a resume; with room for both, and without.

    python benchmarks/swap.py --device cuda:0
    python benchmarks/swap.py --device cpu              # the embedded driver: emulation
    python benchmarks/swap.py --render benchmarks/results/FILE.json

Exit status: 0, also when the target is missed; 1 when contents were wrong; 2 for bad usage. See
docs/benchmarks.md.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
import typer

import fencepool as fp
from measuring import contents, host_pages, link_speed
from measuring.devices import EMULATED_MEMORY, Device, is_emulated
from reporting import result_files

MIB = 1 << 20
_FILLER = 8 << 30  # bytes taken at a time


class Bench:
    """Two pools of the same size, one of them paused, and what takes the device's other memory."""

    def __init__(self, device: Device, nbytes: int, segment: int) -> None:
        self.device = device
        self.pools = [fp.pool(f"side-{number}", device.name, backup="host") for number in range(2)]
        self.tensors = [self._make(pool, nbytes, segment, seed) for seed, pool in enumerate(self.pools)]
        for pool in self.pools:
            pool.prepare()
        self.expected = [contents.checksums(tensors) for tensors in self.tensors]
        self.active = 0
        self._filler: list[torch.Tensor] = []
        fp.pause("side-1")

    def _make(self, pool: fp.Pool, nbytes: int, segment: int, seed: int) -> list[torch.Tensor]:
        sizes = [min(segment, nbytes - start) for start in range(0, nbytes, segment)]
        made = [pool.empty((size,), torch.uint8) for size in sizes]
        contents.fill(made, seed + 1)
        return made

    def fill_device(self, spare: int) -> None:
        """Leave about so many bytes free beside the active pool."""
        if not self.device.is_emulated:
            torch.cuda.synchronize()
        pool = fp.pool("filler", self.device.name)
        while (left := self.device.free_bytes() - spare) >= 2 * MIB:
            self._filler.append(pool.empty((min(left, _FILLER) // (2 * MIB) * 2 * MIB,), torch.uint8))

    def cycle(self, index: int, is_swap: bool, hold: float, is_broken: bool) -> dict[str, Any]:
        """The two pools change places; seconds until the calls returned and until the device was done.

        Raises:
            ContentsError: the pool that came back does not hold what it held.
        """
        out, into = self.active, 1 - self.active
        contents.change(self.tensors[out])
        self.expected[out] = contents.checksums(self.tensors[out])
        self.device.synchronize()
        time.sleep(hold)
        free = self.device.free_bytes()
        start = time.perf_counter()
        if is_swap:
            swapped = fp.swap(pause=self.pools[out], resume=self.pools[into])
            paused, resumed = swapped.paused, swapped.resumed
        else:
            paused = fp.pause(f"side-{out}")
            resumed = fp.resume(f"side-{into}")
        returned = time.perf_counter() - start
        resumed.fence.synchronize(timeout=120)
        self.device.synchronize()
        done = time.perf_counter() - start
        self.active = into
        if is_broken:
            contents.break_one(self.tensors[into])
        contents.check(self.tensors[into], self.expected[into])
        return {
            "index": index,
            "returned": returned,
            "done": done,
            "free_bytes": free,
            "pause_phases": dict(paused.seconds),
            "resume_phases": dict(resumed.seconds),
            "unreleased_bytes": paused.unreleased_bytes,
        }


def main(
    device: result_files.DeviceOption = "cuda:0",
    size: Annotated[int, typer.Option(min=0, help="MiB of each pool; by default 14336, 256 on cpu.")] = 0,
    segment: Annotated[int, typer.Option(min=0, help="MiB of a segment; by default 1024, 128 on cpu.")] = 0,
    spare: Annotated[
        int, typer.Option(min=0, help="MiB free where there is no room; by default 2048, 16 on cpu.")
    ] = 0,
    cycles: Annotated[int, typer.Option(min=1, help="Changes of place after the first, of each kind.")] = 7,
    hold: Annotated[float, typer.Option(min=0, help="Seconds between changes of place.")] = 0.3,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
    break_contents: result_files.BreakOption = False,
) -> None:
    """Time two pools that change places."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    is_small = is_emulated(device)
    nbytes = (size or (256 if is_small else 14336)) * MIB
    segment_bytes = (segment or (128 if is_small else 1024)) * MIB
    if is_small and 3 * nbytes > EMULATED_MEMORY:
        raise typer.BadParameter(f"two pools of {nbytes // MIB} MiB are too large for the emulation")
    layout = {"name": f"{nbytes // MIB}-mib", "bytes": nbytes, "segment_bytes": segment_bytes}
    document = result_files.describe("swap", device, layout, cycles, hold)
    there = Device(device)
    document["link"] = link_speed.measure(there, nbytes, max(3, cycles))
    host_pages.touch(2 * nbytes * 9 // 8)
    bench = Bench(there, nbytes, segment_bytes)
    document["runs"] = []
    path = output / result_files.file_name(document)
    with result_files.kept_if_right(document, path, console):
        for room in ("with room", "without room"):
            if room == "without room":
                bench.fill_device((spare or (16 if is_small else 2048)) * MIB)
            for is_swap in (True, False):
                name = f"{'swap' if is_swap else 'pause, then resume'}, {room}"
                run: dict[str, Any] = {"id": name, "kind": document["kind"], "cycles": []}
                for index in range(cycles + 1):
                    with console.status(f"{name}, {index} of {cycles}"):
                        run["cycles"].append(bench.cycle(index, is_swap, hold, break_contents))
                run["free_bytes"] = run["cycles"][-1]["free_bytes"]
                document["runs"].append(run)
                result_files.write(document, path)


if __name__ == "__main__":
    typer.run(main)
