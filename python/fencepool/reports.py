"""What pause, resume and status report. Sizes are bytes, times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fencepool.fences import Fence
    from fencepool.pools import Pool

# Seconds by phase, in the order the phases ran; "total" is the whole call.
Timings = Mapping[str, float]


@dataclass(frozen=True)
class PoolTransition:
    """What one pause or resume did to one pool."""

    tag: str
    device: str
    backup: str
    changed: bool
    """False: the pool was in the wanted state already, and nothing was done."""
    bytes: int
    """Device memory that was released or mapped."""
    bytes_copied: int
    """Contents copied to or from the backup."""


@dataclass(frozen=True)
class DeviceMemory:
    """Free bytes of a device around the call, as its driver reports them. Other processes change them too."""

    device: str
    free_before: int
    free_after: int
    total: int


@dataclass(frozen=True)
class PauseReport:
    """What a pause did."""

    pools: tuple[PoolTransition, ...]
    seconds: Timings
    """Phases: quiesce, digest, provision, copy, unmap, release; total."""
    device_memory: tuple[DeviceMemory, ...]
    """One for each device."""
    unreleased_bytes: int
    """What the driver refused to take back; it stays held, unused, until the next pause or resume.
    Normally 0."""
    notes: tuple[str, ...]
    """What was out of the ordinary, in words."""

    @property
    def bytes_released(self) -> int:
        """Device memory given back, over all pools; in a swap also what went to the other side."""
        return sum(pool.bytes for pool in self.pools)


@dataclass(frozen=True)
class Resumed:
    """What a resume did, and its fence."""

    pools: tuple[PoolTransition, ...]
    seconds: Timings
    """Phases: create, map, copy (submitting it, not its end), fence; total. And quiesce, where it waits for
    the work in flight: for a resident pool, or with ``FENCEPOOL_DEBUG=1``."""
    device_memory: tuple[DeviceMemory, ...]
    """One for each device."""
    fence: Fence
    """Of this resume; done at once when nothing was restored."""
    host_held: bool
    """Whether the host waited because nothing else orders later work: the embedded driver's default, or
    before CUDA 12.5. Also with a backup on a disk, whose file was read by then; the last copies to the device
    may still run. The waits of ``retain=False`` and ``verify=True`` are not told here."""
    notes: tuple[str, ...]
    """What was out of the ordinary, in words."""
    _pools: tuple[Pool, ...] = field(default=(), repr=False, compare=False)

    def fence_for(self, tensor: torch.Tensor) -> Fence:
        """The part of the fence that brings one tensor back, so that it can be used before the rest is there.

        A pool's copies go in allocation order, one after the other. After ``resume(order="explicit")`` there
        is an event behind every segment and every 64 MiB within one (segments that are smaller than a
        thousandth of the pool may share one); this fence is the first that lies behind the tensor's bytes.
        After ``order="context"`` it is the pool's whole restore. It is done where nothing is brought back:
        without a backup and ``fill="zero"``, or in a pool that was active already and whose own last restore
        has ended. It stays this resume's: after a later pause and resume ask that one. Thread-safe.

        Raises:
            TypeError: it is no tensor.
            ValueError: it does not lie in a pool of this resume.
        """
        from fencepool import _tensors

        return _tensors.fence_for(self.fence, self._pools, tensor)

    @property
    def bytes_mapped(self) -> int:
        """Device memory taken, over all pools."""
        return sum(pool.bytes for pool in self.pools if pool.changed)


@dataclass(frozen=True)
class Swapped:
    """What a swap did. The two sides' phases overlap; ``seconds["total"]`` of both is the whole call."""

    paused: PauseReport
    resumed: Resumed

    @property
    def fence(self) -> Fence:
        """The end of the restores."""
        return self.resumed.fence


@dataclass(frozen=True)
class PoolStatus:
    """A pool at one moment."""

    tag: str
    device: str
    backup: str
    state: str
    """"active", "paused", or what it is in the middle of: "pausing", "resuming", "preparing"."""
    segments: int
    """Address ranges of the pool."""
    bytes_mapped: int
    """Device memory held now."""
    bytes_reserved: int
    """Address space, held for as long as the segments live."""
    bytes_used: int
    """What live tensors take, each rounded up to 512 bytes."""
    bytes_backed_up: int
    """Contents in the backup, while paused."""
    host_bytes: int
    """Host memory held for the backup, in any state."""
    disk_bytes: int
    """Space that the pool's file has of a disk, in any state; 0 unless its backup is "disk"."""
    direct_io: bool | None
    """Whether the file is read and written past the page cache. None unless the backup is "disk"; False
    where the file system cannot: slower, and through the machine's memory."""
    digests: bool
    """Whether a pause copies only what changed since the last one."""
    pending_frees: int
    """Freed blocks whose last work has not ended on the device."""
    last_pause: Timings | None
    """Seconds by phase of the last one; None before the first."""
    last_resume: Timings | None
    """As for the pause."""
    problems: tuple[str, ...] = field(default=())
    """Failures of this process that could not be raised where they happened, the oldest first."""


def timings(pairs: list[tuple[str, float]]) -> Timings:
    """The core's list of phases as a read-only mapping."""
    return MappingProxyType(dict(pairs))


def pool_transitions(report: dict[str, Any]) -> tuple[PoolTransition, ...]:
    """The pools of a core report."""
    return tuple(
        PoolTransition(
            tag=pool["tag"],
            device=pool["device"],
            backup=pool["backup"],
            changed=pool["is_changed"],
            bytes=pool["bytes"],
            bytes_copied=pool["bytes_copied"],
        )
        for pool in report["pools"]
    )


def device_memory(report: dict[str, Any]) -> tuple[DeviceMemory, ...]:
    """The devices of a core report."""
    return tuple(DeviceMemory(**memory) for memory in report["memory"])
