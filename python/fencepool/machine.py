"""What the drivers and devices of this machine are, without changing anything on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from fencepool import _core
from fencepool._devices import DeviceName, Provider, parse_device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceInfo:
    """A device, as its driver describes it."""

    device: str
    name: str
    total_bytes: int
    attributes: Mapping[str, int]
    """CUDA device attributes that matter here; one that the driver does not know is missing:
    vmm, rdma_vmm, host_numa_vmm, posix_fd, compute_major, compute_minor, host_numa_id, async_engines,
    multiprocessors."""


@dataclass(frozen=True)
class DriverInfo:
    """A driver and its devices."""

    provider: Provider
    is_available: bool
    reason: str
    """Why it cannot be used; empty when it can."""
    version: int
    """major * 1000 + minor * 10, as cuDriverGetVersion gives it; 0 when it cannot be used."""
    absent_calls: tuple[str, ...]
    """Calls of fencepool's driver table that this driver lacks, each with a documented fallback."""
    devices: tuple[DeviceInfo, ...]


def driver_info(provider: Provider) -> DriverInfo:
    """Ask a driver what it is. Makes no context, so it takes no device memory. Thread-safe.

    Args:
        provider: "cuda" or "host", the embedded driver.

    Raises:
        ValueError: it is neither.
        DriverError: the driver is there but does not answer.
    """
    info = _core.driver_info(provider)
    devices = tuple(
        DeviceInfo(
            device=str(DeviceName(provider, device["ordinal"])),
            name=device["name"],
            total_bytes=device["total_bytes"],
            attributes=MappingProxyType(device["attributes"]),
        )
        for device in info["devices"]
    )
    return DriverInfo(
        provider=provider,
        is_available=not info["reason"],
        reason=info["reason"],
        version=info["version"],
        absent_calls=tuple(info["absent_calls"]),
        devices=devices,
    )


def set_memory_margin(nbytes: int, device: str | torch.device = "cuda") -> None:
    """Leave so many bytes of a device free: an allocation from a pool that would leave fewer is refused.

    For what other libraries take later, and a resume: neither is held back by the margin. Memory that
    PyTorch has already from a pool is not looked at again. Thread-safe.

    Args:
        nbytes: 0 for no margin, as at the start.
        device: all pools of this device.

    Raises:
        TypeError, ValueError: no integer, or a negative one.
        DriverUnavailable: the device's driver cannot be used here.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"a margin is an integer of bytes, not {type(nbytes).__name__}")
    if not 0 <= nbytes < 1 << 62:
        raise ValueError(f"a margin of {nbytes} bytes cannot be kept")
    where = parse_device(device)
    _core.set_memory_margin(where.provider, where.ordinal, nbytes)


def memory_margin(device: str | torch.device = "cuda") -> int:
    """The bytes that :func:`set_memory_margin` asked to leave free; 0 at the start. Thread-safe.

    Raises:
        DriverUnavailable: the device's driver cannot be used here.
    """
    where = parse_device(device)
    return _core.memory_margin(where.provider, where.ordinal)


@dataclass(frozen=True)
class HostMemory:
    """Host memory for backups, in bytes."""

    used: int
    """Pinned by the backups of all pools of this process, views of backups and buffers to disks included."""
    budget: int | None
    """What they may take together; None is no budget."""
    available: int
    """What the machine, or this process's control group, could still give."""


def host_memory() -> HostMemory:
    """What backups take of the host's memory, and what they may take. Thread-safe.

    Raises:
        ValueError: ``FENCEPOOL_HOST_BUDGET`` holds something that is no size.
    """
    _core.require_owner()
    return HostMemory(
        used=_core.host_memory_used(), budget=_core.host_budget(), available=_core.available_host_memory()
    )


def set_host_budget(nbytes: int | str | None) -> None:
    """Limit the pinned host memory that the backups of all pools of this process take together.

    A pause, a swap or ``prepare`` that would take more raises :class:`HostMemoryError`, which names the pool,
    what is wanted, used and the budget, before anything has changed. What backups hold already stays, also
    beyond a smaller budget; ``Pool.trim`` gives back what an active pool keeps. At the start the budget is
    what the environment variable ``FENCEPOOL_HOST_BUDGET`` says, in the same form. Thread-safe.

    Args:
        nbytes: bytes, or a string such as "64GiB" (KB, MB, GB, TB are powers of ten; KiB, MiB, GiB, TiB of
            two). 0 allows no backups. None is no budget.

    Raises:
        TypeError, ValueError: it is no size.
    """
    _core.require_owner()
    if isinstance(nbytes, str):
        nbytes = _core.parse_bytes(nbytes, "a budget")
    elif nbytes is not None:
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(
                f"a budget is bytes, a size such as '64GiB', or None, not {type(nbytes).__name__}"
            )
        if not 0 <= nbytes < 1 << 62:
            raise ValueError(f"a budget of {nbytes} bytes cannot be kept")
    _core.set_host_budget(nbytes)


def memory_info(device: str | torch.device = "cuda") -> tuple[int, int]:
    """Free and total bytes of a device, as its driver reports them (cuMemGetInfo). Thread-safe.

    On a GPU this makes the device's primary context where there is none yet, which takes memory itself.

    Raises:
        DriverUnavailable: the device's driver cannot be used here.
    """
    where = parse_device(device)
    return _core.memory_info(where.provider, where.ordinal)
