"""What anyone writes first: `.to("cpu")`, drop the tensors, empty PyTorch's cache. Addresses change."""

from __future__ import annotations

from typing import Any

import torch

from measuring import cycles
from measuring.devices import Device
from measuring.layouts import KV_CACHE, LAYOUTS, WEIGHTS, Layout


class NaiveOffload:
    """Weights go to pageable host memory; the KV cache is dropped and made anew."""

    has_backup = True
    keeps_addresses = False

    def __init__(self, device: Device, layout: Layout) -> None:
        self._device = device
        self._layout = layout
        self._on_host: list[torch.Tensor] = []
        self._tensors = {WEIGHTS: self._empty(WEIGHTS), KV_CACHE: self._empty(KV_CACHE)}

    def _empty(self, tag: str) -> list[torch.Tensor]:
        return [
            torch.empty(shape, dtype=torch.bfloat16, device=self._device.torch_device)
            for shape in self._layout.shapes(tag)
        ]

    def tensors(self, tag: str) -> list[torch.Tensor]:
        return self._tensors[tag]

    def pause(self, tag: str) -> cycles.Phases:
        if tag == WEIGHTS:
            self._on_host = [tensor.to("cpu") for tensor in self._tensors[tag]]
        self._tensors[tag] = []
        torch.cuda.empty_cache()
        return {}

    def resume(self, tag: str) -> cycles.Phases:
        if tag == WEIGHTS:
            self._tensors[tag] = [tensor.to(self._device.torch_device) for tensor in self._on_host]
            self._on_host = []
        else:
            self._tensors[tag] = self._empty(tag)
        return {}

    def finish(self) -> None:
        """The device's synchronisation covers everything."""


def run(plan: cycles.Plan) -> dict[str, Any]:
    """Measure it."""
    device = Device(plan.device)
    layout = LAYOUTS[plan.layout]
    return {"cycles": cycles.measure(NaiveOffload(device, layout), device, layout, plan)}
