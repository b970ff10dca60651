"""What the driver's virtual-memory calls cost, by the size of a handle.

    python benchmarks/driver_calls.py --device cuda:0
    python benchmarks/driver_calls.py --device cpu      # the embedded driver: emulation

Every page is written before it is released, as a pool in use does. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fencepool._core import raw
from measuring.devices import is_emulated
from reporting import report, result_files

MIB = 1 << 20
CALLS = ("create", "map", "access", "unmap", "release")


class Driver:
    """The raw calls on one device, each checked."""

    def __init__(self, device: str) -> None:
        self._calls = raw.Driver("host" if is_emulated(device) else "cuda")
        self.ordinal = int(device.partition(":")[2] or 0)
        self("init")
        self("push", self("primary_retain", self.ordinal))

    def __call__(self, name: str, *arguments: int) -> Any:
        answer = getattr(self._calls, name)(*arguments)
        status, value = answer if isinstance(answer, tuple) else (answer, None)
        if status != 0:
            raise RuntimeError(f"{name} failed with {self._calls.error_name(status)[1]}")
        return value


def one_round(driver: Driver, size: int, count: int) -> dict[str, float]:
    """Seconds a call, averaged over `count` handles of `size` bytes."""
    base = driver("address_reserve", size * count)
    places = [base + number * size for number in range(count)]
    handles: list[int] = []
    ordinal = driver.ordinal
    seconds = {}
    seconds["create"] = _timed(
        lambda: handles.extend(driver("mem_create", ordinal, size) for _ in range(count))
    )
    seconds["map"] = _timed(
        lambda: [driver("mem_map", *pair) for pair in zip(places, [size] * count, handles, strict=True)]
    )
    seconds["access"] = _timed(lambda: [driver("mem_set_access", place, size, ordinal) for place in places])
    driver("memset_d8", base, 1, size * count, 0)
    driver("ctx_synchronize")
    seconds["unmap"] = _timed(lambda: [driver("mem_unmap", place, size) for place in places])
    seconds["release"] = _timed(lambda: [driver("mem_release", handle) for handle in handles])
    driver("address_free", base, size * count)
    return {name: total / count for name, total in seconds.items()}


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main(
    device: result_files.DeviceOption = "cuda:0",
    sizes: Annotated[str, typer.Option(help="MiB of a handle, comma-separated.")] = "2,20,128,1024",
    total: Annotated[int, typer.Option(min=2, help="MiB that are taken in each round.")] = 8192,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    hold: Annotated[float, typer.Option(min=0, help="Seconds between rounds.")] = 0.3,
    output: Annotated[Path | None, typer.Option(help="Write the samples to this JSON file.")] = None,
) -> None:
    """Time create, map, set access, unmap and release, one call a handle."""
    kind = "emulation" if is_emulated(device) else "measured"
    driver = Driver(device)
    table = Table(*("handle", "handles", *(f"{name}, us" for name in CALLS), "ms a GiB", "kind"))
    samples = {}
    for size in [int(size) for size in sizes.split(",")]:
        count = max(1, total // size)
        taken = []
        for _ in range(rounds):
            taken.append(one_round(driver, size * MIB, count))
            time.sleep(hold)  # the driver scrubs released pages meanwhile
        samples[str(size)] = taken
        medians = [statistics.median(one[name] for one in taken) for name in CALLS]
        whole = sum(medians) * 1024 / size
        cells = [f"{value * 1e6:.1f}" for value in medians]
        table.add_row(f"{size} MiB", str(count), *cells, f"{whole * 1e3:.2f}", kind)
    report.console().print(table)
    if output is not None:
        document = {
            **result_files.head("driver_calls", device),
            "total_mib": total,
            "hold_seconds": hold,
            "seconds_a_call_by_mib": samples,
        }
        result_files.write(document, output)


if __name__ == "__main__":
    typer.run(main)
