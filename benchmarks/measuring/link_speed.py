"""How long the link alone takes for some bytes: plain copies from and to pinned memory."""

from __future__ import annotations

import gc
from typing import Any

import torch

from measuring.devices import Device
from systems import pinned_copy
from systems.emulated_link import EmulatedLink


def measure(device: Device, nbytes: int, count: int) -> dict[str, Any]:
    """`count` samples each way of at least `nbytes`, checked; its buffers are given back on a GPU."""
    size = min(nbytes, pinned_copy.BUFFER_BYTES)
    link: Any = EmulatedLink(device.name, size) if device.is_emulated else pinned_copy.TorchLink(device, size)
    pinned_copy.check(link)
    repeats = -(-nbytes // link.size)
    made = {
        "bytes": repeats * link.size,
        "in_seconds": pinned_copy.samples(link, link.copy_in, repeats, count),
        "out_seconds": pinned_copy.samples(link, link.copy_out, repeats, count),
    }
    del link
    gc.collect()
    if not device.is_emulated:
        torch.cuda.empty_cache()
    return made
