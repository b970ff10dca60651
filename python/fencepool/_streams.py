"""CUDA streams as other libraries hand them over, and PyTorch's streams that may be capturing."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fencepool import _core

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepool._devices import DeviceName

# PyTorch makes its side streams in one round-robin pool of 32 for each device and priority (c10/cuda,
# CUDAStream.h), and they live as long as the process: 32 new Stream objects name every one of them.
_TORCH_POOL = 32
_TORCH_PRIORITIES = (0, -1)
_watched: set[int] = set()


@dataclass(frozen=True)
class StreamHandle:
    """A stream's handle and, where its owner says so, its device's number (-1: unknown)."""

    handle: int
    ordinal: int = -1


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
        return StreamHandle(int(stream.cuda_stream), int(getattr(stream, "device_index", -1)))
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


def capture_candidates(devices: Iterable[DeviceName]) -> list[int]:
    """Handles of PyTorch's current streams on those devices; its stream pools are watched from now on.

    A pause and a resume ask these whether they are being captured, since a context-wide record or wait
    would break the capture. A stream made outside PyTorch and captured outside it is not seen; then the
    driver's own error says that the capture was broken.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    handles = []
    for ordinal in sorted({device.ordinal for device in devices if device.provider == "cuda"}):
        if ordinal not in _watched:
            pool = [
                torch.cuda.Stream(device=ordinal, priority=priority).cuda_stream
                for priority in _TORCH_PRIORITIES
                for _ in range(_TORCH_POOL)
            ]
            _core.watch_streams("cuda", ordinal, pool)
            _watched.add(ordinal)
        handles.append(int(torch.cuda.current_stream(ordinal).cuda_stream))
    return [handle for handle in handles if handle != 0]
