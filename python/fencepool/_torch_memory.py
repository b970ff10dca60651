"""What PyTorch's caching allocator holds on a GPU, inside and outside of pools. Imports nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fencepool import _torch_snapshot
from fencepool.division import TorchMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fencepool.pools import Pool


def look(ordinal: int, pools: Iterable[Pool]) -> TorchMemory | None:
    """Ask the allocator; None where PyTorch does not use CUDA in this process, or has another allocator.

    ``pools`` are those on that GPU. Takes milliseconds for thousands of blocks, with PyTorch's allocator
    locked (torch.cuda.memory_snapshot).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    if torch.cuda.get_allocator_backend() != "native":  # cudaMallocAsync and others have no snapshot
        return None
    states = [(pool, pool.state) for pool in pools]

    def pool_state(address: int) -> str | None:
        return next((state for pool, state in states if pool._core.contains(address)), None)

    return divide((one for one in _torch_snapshot.segments() if one["device"] == ordinal), pool_state)


def divide(segments: Iterable[dict[str, Any]], pool_state: Callable[[int], str | None]) -> TorchMemory:
    """Sort segments of a snapshot; ``pool_state`` says in what state the pool is that has an address."""
    in_pools = tensors = graphs = cached = 0
    for segment in segments:
        # Active blocks have a tensor in them, or had one that a stream may still use.
        unused = segment["total_size"] - segment["active_size"]
        state = pool_state(segment["address"])
        if state == "paused":
            continue  # addresses without memory
        if state is not None:
            in_pools += unused
        elif tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            graphs += segment["total_size"]
        else:
            tensors += segment["active_size"]
            cached += unused
    return TorchMemory(cached_in_pools=in_pools, tensors=tensors, graphs=graphs, cached=cached)
