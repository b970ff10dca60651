"""CUDA graphs whose memory can be paused."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fencepool._devices import parse_device
from fencepool.pools import Backup, Pool
from fencepool.pools import pool as get_pool
from fencepool.pytorch import cuda_regions, regions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepool._torch_snapshot import MemPoolId


class _GraphMemory:
    """One MemPool that graphs are captured into, and those graphs."""

    def __init__(self, owner: Pool) -> None:
        self.owner = owner
        self.mem_pool: Any = cuda_regions.mem_pools_of(owner).make()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()


_lock = threading.RLock()
# By the id that a capture was given as `pool=`, and by the MemPool's own, which graph.pool() returns.
_by_id: dict[MemPoolId, _GraphMemory] = {}


@contextlib.contextmanager
def cuda_graph(
    cuda_graph: torch.cuda.CUDAGraph,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "global",
    *,
    tag: str = "cuda_graph",
    backup: Backup = "host",
    device: str | torch.device = "cuda",
) -> Iterator[Pool]:
    """Capture a CUDA graph as ``torch.cuda.graph`` does, its memory in a pool that can be paused.

    After a pause and a resume the graph replays as before: every address is the same. No LD_PRELOAD.
    Regions around it do not count inside. PyTorch allows one capture at a time in a process.

    Args:
        cuda_graph: what to capture into.
        pool: captures that are given the same id share memory, as do those given another's
            ``graph.pool()``. None: memory of its own.
        stream: to capture on; None: one that fencepool keeps for the device.
        capture_error_mode: as for ``torch.cuda.graph``.
        tag: of the pool that holds the memory.
        backup: "host" keeps what the capture left in that memory, for replays that read it before they
            write it: results of the warm-up, constants made inside. "none" drops it.
        device: the device that is captured on; PyTorch's current one.

    Yields:
        the pool.

    Raises:
        PoolPausedError: the pool is paused; nothing was captured.
        ValueError: ``pool`` is the memory of graphs under another tag or policy, or the stream belongs to
            another device.
        UnsupportedError: PyTorch is older than 2.8; nothing was changed.
        DriverUnavailable: there is no GPU. The embedded driver has no kernels to capture.
        torch.OutOfMemoryError: the capture needs more memory; its notes say what the pool wanted.

    Source: CUDA C++ Programming Guide, "CUDA Graphs"; PyTorch's notes, "Graph memory management".
    """
    if parse_device(device).provider == "cuda":
        cuda_regions.require_mem_pools()
    owner = get_pool(tag, device, backup=backup)
    if owner._core.provider != "cuda":
        raise ValueError(f"a CUDA graph is captured on a CUDA device, not on {owner.device!r}")
    owner._prepare_torch()
    ordinal = owner._core.ordinal
    if stream is None:
        stream = _capture_stream(ordinal)
    elif stream.device_index != ordinal:
        raise ValueError(
            f"the stream belongs to cuda:{stream.device_index}, the graph's memory to {owner.device}"
        )
    with regions.occupied(owner), regions.disable():
        # Only now: a pause or a close gives up the memory of graphs that are gone, or not there yet.
        memory = _memory_for(owner, None if pool is None else tuple(pool))
        try:
            with (
                torch.cuda.device(ordinal),
                torch.cuda.graph(
                    cuda_graph,
                    pool=memory.mem_pool.id,
                    stream=stream,
                    capture_error_mode=capture_error_mode,
                ),
            ):
                memory.graphs.add(cuda_graph)
                yield owner
        except torch.OutOfMemoryError as error:
            regions.explain(owner, error)
            raise


_streams: dict[int, torch.cuda.Stream] = {}


def _capture_stream(ordinal: int) -> torch.cuda.Stream:
    """One for each device. PyTorch's own default belongs to whatever device was current first."""
    with _lock:
        if ordinal not in _streams:
            _streams[ordinal] = torch.cuda.Stream(device=ordinal)  # type: ignore[no-untyped-call]
        return _streams[ordinal]


def forget_dead(owner: Pool) -> None:
    """Let go of the memory of graphs that are all gone."""
    with _lock:
        dead = [key for key, memory in _by_id.items() if memory.owner is owner and not len(memory.graphs)]
        gone = {id(memory): memory for memory in (_by_id.pop(key) for key in dead)}
    for memory in gone.values():
        cuda_regions.mem_pools_of(owner).give_up(memory.mem_pool)


def _memory_for(owner: Pool, wanted: MemPoolId | None) -> _GraphMemory:
    with _lock:
        memory = _by_id.get(wanted) if wanted is not None else None
        if memory is None:
            memory = _GraphMemory(owner)
            _by_id[memory.mem_pool.id] = memory
            if wanted is not None:
                _by_id[wanted] = memory
        elif memory.owner is not owner:
            raise ValueError(
                f"pool={wanted} is the memory of graphs in {memory.owner!r}; graphs that share memory "
                f"belong to one pool, and this one would be in {owner!r}"
            )
        return memory
