"""How fast the device takes digests of its own memory, beside how fast it copies it.

    python benchmarks/digest_speed.py --device cuda:0

Both are medians over rounds of several passes each over one buffer of random bytes. A copy reads and writes,
so it moves two bytes for each that it copies; a digest reads only. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer

import fencepool as fp
from fencepool import _core
from measuring.devices import Device
from reporting import result_files
from reporting.memory_tables import DIGEST_TARGET

PASSES = 5


def main(
    device: result_files.DeviceOption = "cuda:0",
    size: Annotated[float, typer.Option(min=0, help="GiB of the buffer; 0: 14 on a GPU.")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    output: result_files.OutputOption = result_files.RESULTS,
    render: result_files.RenderOption = None,
) -> None:
    """Time digests and copies of device memory."""
    console, device = result_files.begin(device, render)
    if device is None:
        return
    where = Device(device)
    words = int((size or (0.03 if where.is_emulated else 14)) * 2**30) // 16 * 2
    buffer, other = _buffer(where, words), _buffer(where, words)
    buffer.random_()
    seconds: dict[str, list[float]] = {"copy": [], "digest": []}
    for _ in range(rounds):
        seconds["copy"].append(_time_copies(where, other, buffer))
        provider, ordinal = ("host" if where.is_emulated else "cuda"), int(device.partition(":")[2] or 0)
        _, once = _core.digests_on_device(provider, ordinal, buffer.data_ptr(), words * 8, times=PASSES)
        seconds["digest"].append(once)
    rates = {
        "copy": 2 * words * 8 / statistics.median(seconds["copy"]),
        "digest": words * 8 / statistics.median(seconds["digest"]),
    }
    verdict = "met" if rates["digest"] >= DIGEST_TARGET * rates["copy"] else "missed"
    document = {
        **result_files.head("digest_speed", device),
        "bytes": words * 8,
        "seconds": seconds,
        "bytes_a_second": rates,
        "verdict": "not judged: emulation" if where.is_emulated else verdict,
    }
    path = output / result_files.file_name(document)
    result_files.write(document, path)
    result_files.write_markdown(document, path, console)


def _buffer(where: Device, words: int) -> torch.Tensor:
    if where.is_emulated:
        return fp.pool("digest speed", where.name).empty((words,), torch.int64)
    return torch.empty((words,), dtype=torch.int64, device=where.torch_device)


def _time_copies(where: Device, to: torch.Tensor, source: torch.Tensor) -> float:
    where.synchronize()
    start = time.perf_counter()
    for _ in range(PASSES):
        to.copy_(source)
    where.synchronize()
    return (time.perf_counter() - start) / PASSES


if __name__ == "__main__":
    typer.run(main)
