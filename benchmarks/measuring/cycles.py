"""The measured cycle, the same for every system: pause both tags, wait, resume both, check."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from measuring import contents, host_pages
from measuring.devices import Device
from measuring.layouts import KV_CACHE, WEIGHTS, Layout

# Seconds by phase, from systems that say where their time went.
Phases = dict[str, float]

# How much of the tensors' bytes must come free in a pause. Small tensors share pages with what stays.
_RELEASED = 0.97


class System(Protocol):
    """A way to give device memory away and to take it back."""

    has_backup: bool
    """Whether the weights keep their contents."""
    keeps_addresses: bool

    def tensors(self, tag: str) -> list[torch.Tensor]:
        """The tag's tensors as they are now. Callers keep no reference over a pause."""

    def pause(self, tag: str) -> Phases: ...

    def resume(self, tag: str) -> Phases: ...

    def finish(self) -> None:
        """Wait by the system's own means for what its last resume left running."""


@dataclass(frozen=True)
class Plan:
    """How one system is run."""

    variant: str
    device: str
    layout: str
    cycles: int
    """Cycles after the first."""
    hold: float
    """Seconds between pause and resume. The driver scrubs released pages meanwhile."""
    change: float = 1.0
    """The fraction of the weights that changes before each pause but the first."""
    is_broken: bool = False
    """Change a word after a resume, so that the check must fail."""


class NotReleased(Exception):  # noqa: N818 - it says what happened
    """A pause returned and the driver does not report the memory free."""


class MovedError(Exception):
    """A tensor that must not move has another address after a resume."""


def measure(system: System, device: Device, layout: Layout, plan: Plan) -> list[dict[str, Any]]:
    """Run all cycles; times are in seconds, the first cycle is number 0.

    Raises:
        ContentsError, MovedError, NotReleased: the system did not do what is being timed.
    """
    if system.has_backup:
        host_pages.touch(layout.size(WEIGHTS) * 5 // 4)
    contents.fill(system.tensors(WEIGHTS))
    addresses = _addresses(system)
    gc.collect()
    gc.freeze()  # a collection inside a timed call would look at all of PyTorch
    samples = []
    try:
        for index in range(plan.cycles + 1):
            samples.append(_cycle(system, device, layout, plan, index))
            if system.keeps_addresses and _addresses(system) != addresses:
                raise MovedError(f"tensors moved in cycle {index}")
    finally:
        gc.unfreeze()
    return samples


def _cycle(system: System, device: Device, layout: Layout, plan: Plan, index: int) -> dict[str, Any]:
    contents.change(system.tensors(WEIGHTS), plan.change if index else 1.0, index)
    contents.write_cache(system.tensors(KV_CACHE), index + 1)
    expected = contents.checksums(system.tensors(WEIGHTS)) if system.has_backup else []
    device.synchronize()
    free_before = device.free_bytes()

    operations = {
        "pause_kv": _timed(system, device, lambda: system.pause(KV_CACHE)),
        "pause_weights": _timed(system, device, lambda: system.pause(WEIGHTS)),
    }
    free_paused = device.free_bytes()
    wanted = layout.size(WEIGHTS) + layout.size(KV_CACHE)
    if free_paused - free_before < _RELEASED * wanted:
        raise NotReleased(
            f"cycle {index}: the pause released {free_paused - free_before} bytes; the tensors take {wanted}"
        )
    time.sleep(plan.hold)
    operations["resume_weights"] = _timed(system, device, lambda: system.resume(WEIGHTS))
    operations["resume_kv"] = _timed(system, device, lambda: system.resume(KV_CACHE))

    if plan.is_broken and system.has_backup:
        contents.break_one(system.tensors(WEIGHTS))
    if system.has_backup:
        contents.check(system.tensors(WEIGHTS), expected)
    contents.write_cache(system.tensors(KV_CACHE), index + 2)
    return {
        "index": index,
        "operations": operations,
        "free_bytes_before": free_before,
        "free_bytes_paused": free_paused,
        "contents": "verified" if system.has_backup else "dropped",
    }


def _timed(system: System, device: Device, operation: Callable[[], Phases]) -> dict[str, Any]:
    """Seconds until the call returned, and until the device had done all of it."""
    device.synchronize()
    start = time.perf_counter()
    phases = operation()
    returned = time.perf_counter() - start
    system.finish()
    device.synchronize()
    done = time.perf_counter() - start
    return {"returned": returned, "done": done, "phases": phases}


def _addresses(system: System) -> list[int]:
    return [tensor.data_ptr() for tag in (WEIGHTS, KV_CACHE) for tensor in system.tensors(tag)]
