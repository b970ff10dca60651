"""A stand-in for NVIDIA's management library: the calls of the package pynvml that fencepool makes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

BUS = "FFFF:00:00.0"  # what the embedded driver's devices say of themselves


def install(monkeypatch: Any, *gpus: SimpleNamespace) -> ModuleType:
    """Put it in the package's place until the test ends."""
    made = ModuleType("pynvml")
    made.NVMLError = type("NVMLError", (Exception,), {})
    made.nvmlMemory_v2 = 2
    made.nvmlInit = made.nvmlShutdown = lambda: None
    made.nvmlDeviceGetCount = lambda: len(gpus)
    made.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
    made.nvmlDeviceGetHandleByPciBusId = lambda bus_id: next(one for one in gpus if one.bus_id == bus_id)
    made.nvmlDeviceGetIndex = gpus.index
    made.nvmlDeviceGetName = lambda gpu: "NVIDIA H200"
    made.nvmlDeviceGetPciInfo = lambda gpu: SimpleNamespace(busId=gpu.bus_id)
    made.nvmlDeviceGetMemoryInfo = lambda gpu, version: SimpleNamespace(
        total=gpu.total + 512, reserved=512, used=gpu.used
    )
    made.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [
        SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in gpu.processes.items()
    ]
    made.nvmlDeviceGetGraphicsRunningProcesses = lambda gpu: []
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def gpu(used: int, processes: dict[int, int | None], bus_id: str = BUS) -> SimpleNamespace:
    return SimpleNamespace(bus_id=bus_id, total=140 << 30, used=used, processes=processes)
