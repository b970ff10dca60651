"""What a paused pool with a resident backup costs: pause, resume, and use while it is paused.

    python benchmarks/resident.py --device cuda:0

Its addresses lead to host memory then, so kernels read and write over the link. Beside each rate stands the
link's own: copies between the device and pinned memory. Contents are checked in every cycle.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer

import fencepool as fp
from measuring.devices import EMULATED_BANDWIDTH, Device
from reporting import result_files

TAG = "resident"
PART = 2**27  # words of a segment, 1 GiB: as `Pool.adopt` makes them


def main(
    device: result_files.DeviceOption = "cuda:0",
    size: Annotated[float, typer.Option(min=0, help="GiB of contents; 0: 8 on a GPU.")] = 0,
    cycles: Annotated[int, typer.Option(min=1, help="Cycles after the first.")] = 5,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
) -> None:
    """Time a resident pool's pauses and resumes, and what runs at its addresses meanwhile."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    where = Device(device)
    words = int((size or (0.03 if where.is_emulated else 8)) * 2**30) // 8
    document = {
        **result_files.head("resident", device),
        "cycles": cycles,
        "bytes": words * 8,
        "link": link(where, words),
        "seconds": measure(where, words, cycles + 1),
    }
    path = output / result_files.file_name(document)
    result_files.write(document, path)
    result_files.write_markdown(document, path, console)


def measure(where: Device, words: int, cycles: int) -> dict[str, list[float]]:
    """Seconds by what was done. The program ends when contents are wrong or memory is not released."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        where.synchronize()
        start = time.perf_counter()
        result = work()
        where.synchronize()
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    pool = fp.pool(TAG, where.name, backup="resident")
    sizes = [min(PART, words - start) for start in range(0, words, PART)]
    tensors = [pool.empty((size,), torch.int64).random_() for size in sizes]
    timed("make host memory (once)", pool.prepare)
    for cycle in range(cycles):
        tensors[0][0] = cycle
        wanted = total(tensors)
        where.synchronize()
        free = where.free_bytes()
        timed("pause", lambda: fp.pause(TAG))
        # But for the device's page tables of the host memory.
        released = where.free_bytes() - free
        require(
            released >= 0.97 * words * 8, f"the pause released {released} bytes of {words * 8} on the device"
        )
        read = timed("paused: kernel reads", functools.partial(total, tensors))
        require(read == wanted, "a kernel has read other contents")
        views = [pool.backup_of(tensor, copy=False) for tensor in tensors]
        read = timed("paused: processor reads", functools.partial(total, views))
        require(read == wanted, "the processor has read other contents")
        timed("paused: kernel writes", functools.partial(fill, tensors, cycle))
        timed("paused: kernel reads and writes", functools.partial(add, tensors, 1))
        is_seen = all(int(view[-1]) == cycle + 1 for view in views)
        require(is_seen, "the processor does not see what a kernel wrote")
        del views
        timed("resume, contents there", lambda: fp.resume(TAG).fence.synchronize())
        is_there = all(bool((tensor == cycle + 1).all()) for tensor in tensors)
        require(is_there, "what was written while it was paused is not there")
        for tensor in tensors:
            tensor.random_()
    tensors.clear()
    del tensor
    pool.close()
    return seconds


def total(tensors: list[torch.Tensor]) -> int:
    """The sum of all words, modulo 2**64 a tensor."""
    return sum(int(part) for part in [tensor.sum() for tensor in tensors])


def fill(tensors: list[torch.Tensor], value: int) -> None:
    for tensor in tensors:
        tensor.fill_(value)


def add(tensors: list[torch.Tensor], value: int) -> None:
    for tensor in tensors:
        tensor.add_(value)


def link(where: Device, words: int) -> dict[str, Any]:
    """Bytes a second between the device and pinned memory, each way."""
    if where.is_emulated:
        return {"to_host": float(EMULATED_BANDWIDTH), "to_device": float(EMULATED_BANDWIDTH)}
    here = torch.zeros(min(words, 2**27), dtype=torch.int64, device=where.torch_device)
    host = torch.zeros(here.shape, dtype=torch.int64, pin_memory=True)
    rates = {}
    for name, to, source in (("to_host", host, here), ("to_device", here, host)):
        taken = []
        for _ in range(4):
            where.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            where.synchronize()
            taken.append(time.perf_counter() - start)
        rates[name] = here.numel() * 8 / statistics.median(taken[1:])
    del here, host
    torch.cuda.empty_cache()
    return rates


def require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        print(f"no result: {otherwise}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
