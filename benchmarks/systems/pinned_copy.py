"""The limit of the link: plain asynchronous copies from and to pinned memory, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from measuring.contents import ContentsError
from measuring.cycles import Plan
from measuring.devices import Device
from measuring.layouts import LAYOUTS, WEIGHTS
from systems.emulated_link import EmulatedLink

# One buffer of this size is copied as often as the weights' size needs: pinning all of it takes seconds.
BUFFER_BYTES = 2 << 30


class Link(Protocol):
    """A host buffer, a device buffer, and asynchronous copies of their whole size."""

    @property
    def size(self) -> int: ...

    def write_host(self, value: int) -> None: ...

    def host_holds(self, value: int) -> bool: ...

    def copy_in(self) -> None: ...

    def copy_out(self) -> None: ...

    def synchronize(self) -> None: ...


class TorchLink:
    """PyTorch's pinned memory; its non-blocking copies are cudaMemcpyAsync on the current stream."""

    def __init__(self, device: Device, size: int) -> None:
        self.size = size
        self._wait = device.synchronize
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size, dtype=torch.uint8, device=device.torch_device)

    def write_host(self, value: int) -> None:
        self._host.fill_(value)

    def host_holds(self, value: int) -> bool:
        return bool((self._host == value).all())

    def copy_in(self) -> None:
        self._device.copy_(self._host, non_blocking=True)

    def copy_out(self) -> None:
        self._host.copy_(self._device, non_blocking=True)

    def synchronize(self) -> None:
        self._wait()


def run(plan: Plan) -> dict[str, Any]:
    """Time both directions for as many bytes as the weights have; at least that many are copied."""
    device = Device(plan.device)
    wanted = LAYOUTS[plan.layout].size(WEIGHTS)
    size = min(wanted, BUFFER_BYTES)
    link: Link = EmulatedLink(plan.device, size) if device.is_emulated else TorchLink(device, size)
    repeats = -(-wanted // link.size)
    check(link)
    return {
        "link": {
            "buffer_bytes": link.size,
            "bytes": repeats * link.size,
            "in_seconds": samples(link, link.copy_in, repeats, plan.cycles),
            "out_seconds": samples(link, link.copy_out, repeats, plan.cycles),
        }
    }


def check(link: Link) -> None:
    """What goes in comes out."""
    link.write_host(0x5A)
    link.copy_in()
    link.synchronize()
    link.write_host(0)
    link.copy_out()
    link.synchronize()
    if not link.host_holds(0x5A):
        raise ContentsError("a pinned copy out and in changed the bytes")


def samples(link: Link, copy: Callable[[], None], repeats: int, count: int) -> list[float]:
    """Seconds of `repeats` copies, `count` times."""
    seconds = []
    for _ in range(count):
        link.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            copy()
        link.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds
