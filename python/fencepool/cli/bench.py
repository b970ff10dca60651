"""`fencepool bench`: a quick comparison on this machine. benchmarks/ has the long one, with peers."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

import fencepool as fp
from fencepool.errors import add_note

from .bench_ways import COUNT, Fencepool, Naive, Pinned, Way, synchronize
from .text import MIB

_MOST_CYCLES = 10


@dataclass(frozen=True)
class Measured:
    """One way. Seconds; medians over the cycles after the first."""

    name: str
    what: str
    first_pause: float
    pause: float
    resume: float  # until the call returned
    back: float  # until the contents were back, counted from the call of resume
    cycles: int
    freed: int  # bytes by which the device's free memory rose in the first pause, as its driver reports them
    is_unmoved: bool
    is_same: bool | None  # contents after each cycle; None: they were dropped, as told


@dataclass(frozen=True)
class Report:
    """The comparison."""

    device: str
    size: int
    is_emulated: bool
    measured: tuple[Measured, ...]

    @property
    def is_ok(self) -> bool:
        """No way that keeps contents lost any."""
        return all(one.is_same is not False for one in self.measured)


def default_size(device: str) -> int:
    """4 GiB on a GPU with room for it, else a quarter of what is free; 256 MiB on the embedded driver."""
    if not device.startswith("cuda"):
        return 256 * MIB
    free, _ = fp.memory_info(device)
    return min(4096 * MIB, free // 4)


def run(device: str, size: int, seconds: float, stage: Callable[[str], None]) -> Report:
    """Measure every way, each for its share of `seconds`, and at least three cycles.

    Raises what fencepool and PyTorch raise; nothing is left behind then.
    """
    size = max(size // (COUNT * 512), 1) * COUNT * 512
    ways: list[tuple[str, str, bool, Callable[[], Way]]] = [
        ("fencepool, kept", "backup in pinned host memory", True, partial(Fencepool, device, size, "host")),
        ("fencepool, dropped", "no backup", False, partial(Fencepool, device, size, "none")),
        ("naive .to('cpu')", "new tensors, pageable memory", True, partial(Naive, device, size)),
        ("pinned copies", "the limit: copies, nothing given away", True, partial(Pinned, device, size)),
    ]
    measured = []
    for name, what, is_kept, make in ways:
        stage(name)
        measured.append(_measure(name, what, is_kept, make, device, seconds / len(ways)))
    return Report(device, size, not device.startswith("cuda"), tuple(measured))


def _measure(
    name: str, what: str, is_kept: bool, make: Callable[[], Way], device: str, seconds: float
) -> Measured:
    way = make()
    try:
        _fill(way)
        sums = _sums(way)
        addresses = [tensor.data_ptr() for tensor in way.tensors]
        cycles: list[tuple[float, float, float]] = []
        freed = 0
        is_same = is_unmoved = True
        end = time.perf_counter() + seconds
        while len(cycles) < 3 or (time.perf_counter() < end and len(cycles) <= _MOST_CYCLES):
            synchronize(device)
            free = fp.memory_info(device)[0]
            pause = _timed(way.pause)
            if not cycles:
                freed = max(0, fp.memory_info(device)[0] - free)
            begin = time.perf_counter()
            resume = _timed(way.resume)
            synchronize(device)
            cycles.append((pause, resume, time.perf_counter() - begin))
            is_same &= not is_kept or _sums(way) == sums
            is_unmoved &= addresses == [tensor.data_ptr() for tensor in way.tensors]
        later = list(zip(*cycles[1:], strict=True))
    except BaseException as error:
        _close_after(error, way)
        raise
    way.close()
    return Measured(
        name=name,
        what=what,
        first_pause=cycles[0][0],
        pause=statistics.median(later[0]),
        resume=statistics.median(later[1]),
        back=statistics.median(later[2]),
        cycles=len(cycles),
        freed=freed,
        is_unmoved=is_unmoved,
        is_same=is_same if is_kept else None,
    )


def _close_after(error: BaseException, way: Way) -> None:
    """Close it whatever has failed; this error is the one to tell of."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)  # they hold tensors, and a pool with tensors stays
        seen = seen.__context__
    try:
        way.close()
    except Exception as second:
        add_note(error, f"giving its memory back failed too: {second}")


def _fill(way: Way) -> None:
    for number, tensor in enumerate(way.tensors):
        numbers = torch.arange(number, number + tensor.numel() // 8, device=tensor.device)
        tensor.copy_(numbers.view(torch.uint8))


def _sums(way: Way) -> list[int]:
    return [int(tensor.view(torch.int64).sum()) for tensor in way.tensors]


def _timed(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
