"""What still holds device memory: after a pause, or at any other moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fencepool import _core, _nvml, _torch_memory, division
from fencepool._devices import DeviceName, parse_device
from fencepool._sizes import size
from fencepool.division import Line, PoolBytes, TorchMemory
from fencepool.machine import memory_info
from fencepool.pools import known

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Residual:
    """How the memory of a device divides. The lines are bytes and add up to ``used``."""

    device: str
    total: int
    used: int
    """Total minus free, as the device's driver reports them: all processes together."""
    lines: tuple[Line, ...]
    host_bytes: int
    """Host memory that backups of this device's pools hold; ``Pool.trim()`` gives it back."""

    def __getitem__(self, key: str) -> Line:
        """The line of that key. Raises KeyError when it is not there."""
        for line in self.lines:
            if line.key == key:
                return line
        raise KeyError(key)

    def __str__(self) -> str:
        """A table for people."""
        rows = [f"{self.device}: {size(self.used)} of {size(self.total)} held"]
        for line in self.lines:
            held = "?" if line.bytes is None else size(line.bytes)
            rows.append(f"  {held:>10}  {line.name}{': ' + line.says if line.says else ''}")
            if line.do:
                rows.append(f"  {'':>10}    -> {line.do}")
        rows.append(f"  {size(self.host_bytes):>10}  of host memory in backups")
        return "\n".join(rows)


def residual(device: str | torch.device | None = None) -> Residual:
    """Say how the memory that is held on a device divides, and what gives each part back.

    For "157 of 180 GB are still held after a sleep": paused pools hold nothing, so it is something else. The
    lines, each in bytes: paused pools (0, or what the driver refused to take back), active pools, PyTorch's
    cache in them, PyTorch's tensors, cache and graphs in no pool, this process's CUDA context and libraries,
    other processes, and what none of these explains. The figures are taken one after the other, so with work
    going on they may miss each other by what changes meanwhile.

    Other processes and the context need NVML (``pip install 'fencepool[observe]'``); without it, and on
    MIG slices and in containers where NVML does not know this process, they are part of ``unknown``, which
    says so. Thread-safe; waits for no transition. Makes the device's context where the process has none,
    which takes device memory. On the embedded driver the device's memory is this process's.

    Args:
        device: None is the device of the pool that was made first, and "cuda" without pools.

    Raises:
        TypeError, ValueError: a bad device.
        DriverUnavailable: the device's driver cannot be used here.
    """
    where = parse_device(device) if device is not None else _default()
    free, whole = memory_info(str(where))
    used = whole - free
    pools, seen = look(where)
    if where.provider == "host":
        lines = division.of_process(pools, None, None)
        lines.append(_rest_of_embedded(used - division.total(lines)))
    else:
        lines = _on_gpu(where, used, pools, seen)
    return Residual(
        device=str(where),
        total=whole,
        used=used,
        lines=tuple(lines),
        host_bytes=sum(pool.host_bytes for pool in pools),
    )


def look(where: DeviceName) -> tuple[list[PoolBytes], TorchMemory | None]:
    """The pools on a device and, on a GPU, what PyTorch holds."""
    pools = [pool for pool in map(known, _core.pools()) if pool.device == str(where)]
    statuses = [pool.status() for pool in pools]
    found = [PoolBytes(one.tag, one.device, one.state, one.bytes_mapped, one.host_bytes) for one in statuses]
    return found, _torch_memory.look(where.ordinal, pools) if where.provider == "cuda" else None


def bus_id(where: DeviceName) -> str:
    """The PCI address of a device; empty when its driver does not say."""
    driver = _core.raw.Driver(where.provider)
    status, text = driver.device_bus_id(driver.device_get(where.ordinal)[1])
    return str(text) if status == 0 else ""


def _default() -> DeviceName:
    first = next(iter(_core.pools()), None)
    return parse_device(first.device if first is not None else "cuda")


def _on_gpu(where: DeviceName, used: int, pools: list[PoolBytes], seen: TorchMemory | None) -> list[Line]:
    missing = "this process's CUDA context, other processes, and the driver's own"
    try:
        processes = _nvml.gpu(bus_id(where)).processes
    except _nvml.NvmlUnavailable as error:
        lines = division.of_process(pools, seen, None)
        return [*lines, division.unknown(max(0, used - division.total(lines)), missing, f"{error}.")]
    own = processes.get(os.getpid())
    if own is not None and own < sum(pool.bytes_mapped for pool in pools):
        own = None  # of a process outside of this one's container, which has the same number there
    lines = division.of_process(pools, seen, own)
    if own is None:
        why = "NVML does not say what this process holds (a container's or a MIG slice's numbers)."
        return [*lines, division.unknown(max(0, used - division.total(lines)), missing, why)]
    del processes[os.getpid()]
    lines.append(division.others(processes))
    left = max(0, used - division.total(lines))
    return [*lines, division.unknown(left, "the driver's own, and processes that NVML does not show")]


def _rest_of_embedded(count: int) -> Line:
    return division.unknown(max(0, count), "taken from the embedded driver by other means than pools")
