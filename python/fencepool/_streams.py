"""CUDA streams as other libraries hand them over, and PyTorch's streams that may be capturing."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fencepool import _core
from fencepool._devices import DeviceName, parse_device

if TYPE_CHECKING:
    from collections.abc import Iterable

# PyTorch hands its side streams out in turn from a pool of 32 for each device and priority (c10/cuda,
# CUDAStream.h), and they live as long as the process: drawing until 32 are known names every one.
_TORCH_POOL = 32
_MOST_DRAWS = 8 * _TORCH_POOL
_watched: set[int] = set()
_watching = threading.Lock()


@dataclass(frozen=True)
class StreamHandle:
    """A stream's handle and, where its owner says so, its device's number (-1: unknown)."""

    handle: int
    ordinal: int = -1
    is_torch: bool = False


def parse_stream(stream: Any) -> StreamHandle:
    """Accept a ``torch.cuda.Stream``, anything with ``__cuda_stream__``, or an integer handle.

    ``__cuda_stream__`` is the protocol of NVIDIA's cuda.core: a pair of version and handle.

    Raises:
        TypeError: it is none of them.
        ValueError: a negative handle, or a version of the protocol other than 0.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise ValueError(f"a stream handle is not negative: {stream}")
        return StreamHandle(stream)
    if hasattr(stream, "cuda_stream"):
        return StreamHandle(int(stream.cuda_stream), int(getattr(stream, "device_index", -1)), is_torch=True)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise ValueError(f"version {version} of __cuda_stream__ is not known; fencepool knows version 0")
        return StreamHandle(int(handle))
    raise TypeError(
        "a stream is a torch.cuda.Stream, an object with __cuda_stream__, or an integer handle, "
        f"not {type(stream).__name__}"
    )


def capture_candidates(devices: Iterable[DeviceName]) -> dict[int, list[int]]:
    """Handles of PyTorch's current streams, by CUDA device; its stream pools are watched from now on.

    A pause and a resume ask these whether they are being captured, since a context-wide record or wait
    would break the capture. For a stream made elsewhere there is :func:`watch_stream`.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    current = {}
    for ordinal in sorted({device.ordinal for device in devices if device.provider == "cuda"}):
        with _watching:
            if ordinal not in _watched:
                _core.watch_streams("cuda", ordinal, _torch_streams(torch, ordinal))
                _watched.add(ordinal)
        handle = int(torch.cuda.current_stream(ordinal).cuda_stream)
        current[ordinal] = [handle] if handle != 0 else []
    return current


def watch_stream(stream: Any, device: Any = None) -> None:
    """Look at this stream too before a pause, a resume or a free touches the whole device.

    A pause then raises :class:`CaptureError` while it is captured (cuStreamIsCapturing).

    For a stream that was made outside PyTorch and is captured into CUDA graphs. It must live as long as
    the process. PyTorch's own streams are known already. Thread-safe.

    Args:
        stream: what :meth:`Fence.wait` takes.
        device: whose it is. None: what the stream says, and the current device for one that does not, as a
            handle or an object with ``__cuda_stream__``.

    Raises:
        TypeError: it is no stream, or no device.
        ValueError: it is no stream, or no device, or the stream says that it belongs to another.
        DriverUnavailable: the device's driver cannot be used here.
    """
    parsed = parse_stream(stream)
    if parsed.ordinal < 0:
        where = parse_device("cuda" if device is None else device)
    else:
        where = DeviceName("cuda", parsed.ordinal)
        if device is not None and parse_device(device) != where:
            raise ValueError(f"the stream belongs to {where}, and not to {parse_device(device)}")
    _core.watch_streams(where.provider, where.ordinal, [parsed.handle])


def _torch_streams(torch: Any, ordinal: int) -> list[int]:
    """Every side stream PyTorch hands out on that device, of every priority."""
    least, greatest = torch.cuda.Stream.priority_range()
    handles: set[int] = set()
    for priority in range(greatest, least + 1):
        own: set[int] = set()
        for _ in range(_MOST_DRAWS):
            own.add(int(torch.cuda.Stream(device=ordinal, priority=priority).cuda_stream))
            if len(own) == _TORCH_POOL:
                break
        handles |= own
    return sorted(handles)
