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
    """Ask a driver what it is. Makes no context, so it takes no device memory.

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


def memory_info(device: str | torch.device = "cuda") -> tuple[int, int]:
    """Free and total bytes of a device, as its driver reports them (cuMemGetInfo).

    Raises:
        DriverUnavailable: the device's driver cannot be used here.
    """
    where = parse_device(device)
    return _core.memory_info(where.provider, where.ordinal)
