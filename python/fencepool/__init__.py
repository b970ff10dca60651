"""GPU memory that can be given away and taken back without anything moving, with the waiting built in.

>>> import fencepool as fp
>>> weights = fp.pool("weights", device="cpu", backup="host")
>>> report = fp.pause("weights")
>>> resumed = fp.resume("weights")

Importing this package imports neither PyTorch nor CUDA.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from fencepool import debug, errors, host_driver
from fencepool._streams import watch_stream
from fencepool._version import __version__
from fencepool.errors import (
    CallbackError,
    CaptureError,
    CorruptedBackupError,
    DiskError,
    DriverError,
    DriverUnavailable,
    Error,
    ForkedError,
    HostMemoryError,
    PoolBusyError,
    PoolPausedError,
    QuiesceTimeout,
    RankError,
    UnknownTagError,
    UnsupportedError,
)
from fencepool.fences import Fence
from fencepool.machine import (
    DeviceInfo,
    DriverInfo,
    HostMemory,
    driver_info,
    host_memory,
    memory_info,
    memory_margin,
    set_host_budget,
    set_memory_margin,
)
from fencepool.pools import CallbackHandle, Pool, pool
from fencepool.reports import DeviceMemory, PauseReport, PoolStatus, PoolTransition, Resumed, Swapped
from fencepool.swapping import swap
from fencepool.tracing import trace
from fencepool.transitions import pause, paused, resume, status

if TYPE_CHECKING:
    from fencepool.errors import OutOfMemoryError
    from fencepool.pytorch.graphs import cuda_graph
    from fencepool.pytorch.module_fences import fence_modules
    from fencepool.pytorch.regions import disable
    from fencepool.remaining import Residual, residual

__all__ = [
    "CallbackError",
    "CallbackHandle",
    "CaptureError",
    "CorruptedBackupError",
    "DeviceInfo",
    "DeviceMemory",
    "DiskError",
    "DriverError",
    "DriverInfo",
    "DriverUnavailable",
    "Error",
    "Fence",
    "ForkedError",
    "HostMemory",
    "HostMemoryError",
    "OutOfMemoryError",
    "PauseReport",
    "Pool",
    "PoolBusyError",
    "PoolPausedError",
    "PoolStatus",
    "PoolTransition",
    "QuiesceTimeout",
    "RankError",
    "Residual",
    "Resumed",
    "Swapped",
    "UnknownTagError",
    "UnsupportedError",
    "__version__",
    "cuda_graph",
    "debug",
    "disable",
    "driver_info",
    "errors",
    "fence_modules",
    "host_driver",
    "host_memory",
    "memory_info",
    "memory_margin",
    "pause",
    "paused",
    "pool",
    "residual",
    "resume",
    "set_host_budget",
    "set_memory_margin",
    "status",
    "swap",
    "trace",
    "watch_stream",
]

debug.from_environment()
if os.environ.get("FENCEPOOL_STATUS_DIR", "0") not in ("", "0"):
    importlib.import_module("fencepool.status_files").from_environment()

# What needs PyTorch, and what few programs need, is imported on first use.
_ON_USE = {
    "Residual": "fencepool.remaining",
    "cuda_graph": "fencepool.pytorch.graphs",
    "disable": "fencepool.pytorch.regions",
    "residual": "fencepool.remaining",
    "fence_modules": "fencepool.pytorch.module_fences",
}


def __getattr__(name: str) -> Any:
    if name == "OutOfMemoryError":  # made on first use, see errors.py
        return errors.__getattr__(name)
    if name in _ON_USE:
        return getattr(importlib.import_module(_ON_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
