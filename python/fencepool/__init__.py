"""GPU memory that can be given away and taken back without anything moving, with the waiting built in.

>>> import fencepool as fp
>>> weights = fp.pool("weights", device="cpu", backup="host")
>>> report = fp.pause("weights")
>>> resumed = fp.resume("weights")

Importing this package imports neither PyTorch nor CUDA.
"""

from typing import TYPE_CHECKING, Any

from fencepool import errors, host_driver
from fencepool._streams import watch_stream
from fencepool._version import __version__
from fencepool.errors import (
    CallbackError,
    CaptureError,
    DriverError,
    DriverUnavailable,
    Error,
    ForkedError,
    HostMemoryError,
    PoolBusyError,
    PoolPausedError,
    QuiesceTimeout,
    UnknownTagError,
)
from fencepool.fences import Fence
from fencepool.machine import DeviceInfo, DriverInfo, driver_info, memory_info
from fencepool.pools import CallbackHandle, Pool, pool
from fencepool.reports import DeviceMemory, PauseReport, PoolStatus, PoolTransition, Resumed
from fencepool.transitions import pause, paused, resume, status

if TYPE_CHECKING:
    from fencepool.errors import OutOfMemoryError

__all__ = [
    "CallbackError",
    "CallbackHandle",
    "CaptureError",
    "DeviceInfo",
    "DeviceMemory",
    "DriverError",
    "DriverInfo",
    "DriverUnavailable",
    "Error",
    "Fence",
    "ForkedError",
    "HostMemoryError",
    "OutOfMemoryError",
    "PauseReport",
    "Pool",
    "PoolBusyError",
    "PoolPausedError",
    "PoolStatus",
    "PoolTransition",
    "QuiesceTimeout",
    "Resumed",
    "UnknownTagError",
    "__version__",
    "driver_info",
    "errors",
    "host_driver",
    "memory_info",
    "pause",
    "paused",
    "pool",
    "resume",
    "status",
    "watch_stream",
]


def __getattr__(name: str) -> Any:
    if name == "OutOfMemoryError":  # made on first use, see errors.py
        return errors.__getattr__(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
