"""torch_memory_saver in its preload mode: its library is in LD_PRELOAD when the process starts."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from measuring import cycles
from measuring.devices import Device
from measuring.layouts import KV_CACHE, LAYOUTS, WEIGHTS, Layout

# Imported by name: it is optional, and has no types.
_PACKAGE = "torch_memory_saver"

# How the weights' region is entered, by variant; files lie in TMS_DISK_BACKUP_DIR.
_OPTIONS: dict[str, dict[str, Any]] = {
    "no-backup": {},
    "cpu-backup-mmap": {"enable_cpu_backup": True, "cpu_backup_backend": "mmap"},
    "disk-backup": {"enable_disk_backup": True},
}


class TorchMemorySaverSystem:
    """One region a tag; the KV cache's without backup."""

    keeps_addresses = True

    def __init__(self, device: Device, layout: Layout, variant: str) -> None:
        self._saver: Any = importlib.import_module(_PACKAGE).torch_memory_saver
        self.has_backup = variant != "no-backup"
        if variant == "cpu-backup-retained":
            self._saver.retain_cpu_backup = True
        self._tensors = {}
        options = {WEIGHTS: _OPTIONS.get(variant, {"enable_cpu_backup": True}), KV_CACHE: {}}
        for tag in (WEIGHTS, KV_CACHE):
            with self._saver.region(tag=tag, **options[tag]):
                self._tensors[tag] = [
                    torch.empty(shape, dtype=torch.bfloat16, device=device.torch_device)
                    for shape in layout.shapes(tag)
                ]

    def tensors(self, tag: str) -> list[torch.Tensor]:
        return self._tensors[tag]

    def pause(self, tag: str) -> cycles.Phases:
        self._saver.pause(tag)
        return {}

    def resume(self, tag: str) -> cycles.Phases:
        self._saver.resume(tag)
        return {}

    def finish(self) -> None:
        """Its calls leave nothing running that the device's synchronisation does not cover."""


def run(plan: cycles.Plan) -> dict[str, Any]:
    """Measure one mode: "no-backup", "disk-backup", "cpu-backup" (pinned), "-retained" or "-mmap"."""
    device = Device(plan.device)
    layout = LAYOUTS[plan.layout]
    system = TorchMemorySaverSystem(device, layout, plan.variant)
    return {"cycles": cycles.measure(system, device, layout, plan)}


@contextlib.contextmanager
def child_environment() -> Iterator[dict[str, str]]:
    """The environment of a child process that preloads the library, as the package itself sets it up.

    The library links to the CUDA runtime, and the loader needs that before Python has started: a runtime
    that came with PyTorch's packages is added to the search path, behind whatever is there.
    """
    with importlib.import_module(_PACKAGE).configure_subprocess():
        environment = dict(os.environ)
    # The package refuses expandable segments, which these may ask for.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    folders = [environment.get("LD_LIBRARY_PATH", ""), *_runtime_folders()]
    environment["LD_LIBRARY_PATH"] = ":".join(folder for folder in folders if folder)
    yield environment


def _runtime_folders() -> list[str]:
    found = {
        str(library.parent)
        for place in sys.path
        if place
        for library in Path(place).glob("nvidia/*/lib/libcudart.so.*")
    }
    return sorted(found)
