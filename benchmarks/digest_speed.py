"""How fast the device takes digests of its own memory, beside how fast it copies it.

    python benchmarks/digest_speed.py --device cuda:0

Both are medians over rounds of several passes each over one buffer of random bytes. A copy reads and writes,
so it moves two bytes for each that it copies; a digest reads only. See docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

import report
import result_files
from devices import Device, is_emulated
from fencepool import _core

PASSES = 5
TARGET = 0.8  # of the bandwidth that a copy reaches


def main(
    device: result_files.DeviceOption = "cuda:0",
    size: Annotated[float, typer.Option(min=0, help="GiB of the buffer; 0: 14 on a GPU.")] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    output: Annotated[Path | None, typer.Option(help="Folder for a JSON and a Markdown file.")] = None,
) -> None:
    """Time digests and copies of device memory."""
    where = Device(device)
    kind = "emulation" if is_emulated(device) else "measured"
    words = int((size or (0.03 if where.is_emulated else 14)) * 2**30) // 8
    if where.is_emulated:
        import fencepool as fp

        buffer = fp.pool("digest speed", device).empty((words,), torch.int64)
    else:
        buffer = torch.empty((words,), dtype=torch.int64, device=where.torch_device)
    buffer.random_()
    other = torch.empty_like(buffer)
    bytes_each = buffer.numel() * 8
    seconds: dict[str, list[float]] = {"copy": [], "digest": []}
    for _ in range(rounds):
        where.synchronize()
        start = time.perf_counter()
        for _ in range(PASSES):
            other.copy_(buffer)
        where.synchronize()
        seconds["copy"].append((time.perf_counter() - start) / PASSES)
        provider, ordinal = ("host" if where.is_emulated else "cuda"), int(device.partition(":")[2] or 0)
        _, once = _core.digests_on_device(provider, ordinal, buffer.data_ptr(), bytes_each, times=PASSES)
        seconds["digest"].append(once)
    rates = {
        "copy": 2 * bytes_each / statistics.median(seconds["copy"]),
        "digest": bytes_each / statistics.median(seconds["digest"]),
    }
    header = ["what", "ms", "GB/s of device memory", "of a copy's", "kind"]
    rows = [
        [
            name,
            f"{statistics.median(taken) * 1e3:.2f} ({min(taken) * 1e3:.2f} to {max(taken) * 1e3:.2f})",
            f"{rates[name] / 1e9:,.0f}",
            f"{rates[name] / rates['copy'] * 100:.0f}%",
            kind,
        ]
        for name, taken in seconds.items()
    ]
    table = Table(*header, title=f"{bytes_each / 2**30:.2f} GiB on {device}")
    for row in rows:
        table.add_row(*row)
    report.console().print(table)
    verdict = "met" if rates["digest"] >= TARGET * rates["copy"] else "missed"
    print(f"target, {TARGET:.0%} of a copy's bandwidth: {'not judged' if where.is_emulated else verdict}")
    if output is None:
        return
    document = {
        **result_files.head("digest_speed", device),
        "bytes": bytes_each,
        "seconds": seconds,
        "bytes_a_second": rates,
        "verdict": verdict,
    }
    facts = [
        f"{document['date']}, {result_files.place_of(document)}; {bytes_each / 2**30:.2f} GiB,"
        f" {rounds} rounds of {PASSES} passes",
        f"target, {TARGET:.0%} of a copy's bandwidth: {verdict}",
    ]
    result_files.write_page(document, "Digests of device memory", facts, header, rows, output)


if __name__ == "__main__":
    typer.run(main)
