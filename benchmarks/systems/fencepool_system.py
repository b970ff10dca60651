"""fencepool, its weights put into the pool in the ways its users do."""

from __future__ import annotations

import time
from typing import Any

import torch

import fencepool as fp
from measuring import cycles
from measuring.devices import Device
from measuring.layouts import KV_CACHE, LAYOUTS, WEIGHTS, Layout

# By variant; a backup on disk lies in FENCEPOOL_DISK_DIRECTORY.
_BACKUPS: dict[str, fp.Backup] = {"no-backup": "none", "disk": "disk"}


class FencepoolSystem:
    """Two pools, one a tag; the KV cache is one `Pool.empty` a tensor, without backup."""

    keeps_addresses = True

    def __init__(self, device: Device, layout: Layout, variant: str) -> None:
        self.has_backup = variant != "no-backup"
        self.pools = {
            WEIGHTS: fp.pool(
                WEIGHTS,
                device.name,
                backup=_BACKUPS.get(variant, "host"),
                digests=False if variant == "no-digests" else None,
            ),
            KV_CACHE: fp.pool(KV_CACHE, device.name, backup="none"),
        }
        make = _one_by_one if variant == "per-tensor" else _adopted
        self._tensors = {
            WEIGHTS: make(self.pools[WEIGHTS], device, layout),
            KV_CACHE: [self.pools[KV_CACHE].empty(shape, torch.bfloat16) for shape in layout.kv_cache],
        }
        self._resumed: fp.Resumed | None = None

    def tensors(self, tag: str) -> list[torch.Tensor]:
        return self._tensors[tag]

    def pause(self, tag: str) -> cycles.Phases:
        return dict(fp.pause(tag).seconds)

    def resume(self, tag: str) -> cycles.Phases:
        self._resumed = fp.resume(tag)
        return dict(self._resumed.seconds)

    def finish(self) -> None:
        if self._resumed is not None:
            self._resumed.fence.synchronize(timeout=60)
            self._resumed = None


def _one_by_one(pool: fp.Pool, _device: Device, layout: Layout) -> list[torch.Tensor]:
    return [pool.empty(shape, torch.bfloat16) for shape in layout.weights]


def _adopted(pool: fp.Pool, device: Device, layout: Layout) -> list[torch.Tensor]:
    """A module's parameters, moved into the pool in one batch."""
    module = torch.nn.ParameterList(
        torch.nn.Parameter(
            torch.empty(shape, dtype=torch.bfloat16, device=device.torch_device), requires_grad=False
        )
        for shape in layout.weights
    )
    pool.adopt(module)
    if not device.is_emulated:
        torch.cuda.empty_cache()  # the memory that the weights came from
    return list(module.parameters())


def run(plan: cycles.Plan) -> dict[str, Any]:
    """Measure one variant, by its name in the catalogue."""
    device = Device(plan.device)
    layout = LAYOUTS[plan.layout]
    system = FencepoolSystem(device, layout, plan.variant)
    setup: dict[str, Any] = {f"{tag}_segments": pool.status().segments for tag, pool in system.pools.items()}
    notes = []
    if plan.variant == "prepared":
        start = time.perf_counter()
        setup["prepare_bytes"] = system.pools[WEIGHTS].prepare()
        setup["prepare_seconds"] = time.perf_counter() - start
        notes.append(f"prepare() took {setup['prepare_seconds'] * 1e3:.0f} ms")
    samples = cycles.measure(system, device, layout, plan)
    setup["host_bytes"] = system.pools[WEIGHTS].status().host_bytes
    notes += [f"problem: {problem}" for problem in system.pools[WEIGHTS].status().problems]
    return {"cycles": samples, "setup": setup, "notes": notes}
