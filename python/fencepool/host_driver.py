"""Settings of the embedded driver, the machine behind ``device="cpu"``.

It emulates CUDA's virtual-memory, stream and event calls on ordinary memory, with the real driver's rules
and error codes (docs/host-driver.md), so that everything runs on a machine without a GPU.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from fencepool import _core
from fencepool._devices import parse_device

if TYPE_CHECKING:
    import torch

_lock = threading.Lock()
_not_waiting: set[str] = set()


def configure(
    device: str | torch.device = "cpu",
    *,
    memory_limit: int | None = None,
    bandwidth: int | None = None,
    poisoned: bool | None = None,
    host_waits: bool | None = None,
) -> None:
    """Change settings of one emulated device; what is None stays. Thread-safe; applies to later calls.

    Args:
        device: "cpu", or "cpu:1" to "cpu:3".
        memory_limit: bytes of device memory; 0 is the machine's own.
        bandwidth: bytes per second of the link to the host, each way; 0 is as fast as memory copies run.
        poisoned: fill new device memory with 0xA5, as undefined contents, instead of zeros.
        host_waits: whether ``resume(order="context")`` returns only when the restore has ended. True, the
            default, since on this device the CPU itself runs what comes later. False behaves as a GPU
            does: only work submitted to the emulated device's streams is ordered.

    Raises:
        ValueError: it is no device of the embedded driver, or a negative size.
        TypeError: a value of the wrong type.
    """
    _core.require_owner()
    where = parse_device(device)
    if where.provider != "host" or where.ordinal >= _core.raw.DEVICE_COUNT:
        raise ValueError(f"{device} is no device of the embedded driver; those are 'cpu' to 'cpu:3'")
    limit = None if memory_limit is None else _size("memory_limit", memory_limit)
    rate = None if bandwidth is None else _size("bandwidth", bandwidth)
    poison = None if poisoned is None else _flag("poisoned", poisoned)
    waits = None if host_waits is None else _flag("host_waits", host_waits)
    with _lock:
        now = _core.raw.settings(where.ordinal)
        now.memory_limit = now.memory_limit if limit is None else limit
        now.bandwidth = now.bandwidth if rate is None else rate
        now.is_poisoned = now.is_poisoned if poison is None else poison
        _core.raw.set_settings(where.ordinal, now)
        if waits is not None:
            (_not_waiting.discard if waits else _not_waiting.add)(str(where))


def is_waiting(device: str) -> bool:
    """Whether resumes on that device hold the host until the restore has ended. Thread-safe."""
    return parse_device(device).provider == "host" and device not in _not_waiting


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is from 0 to 2**63 - 1, not {value}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {type(value).__name__}")
    return value
