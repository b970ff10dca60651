"""PyTorch's CUDA allocations into pools, through ``torch.cuda.MemPool`` over the extension's entry points.

PyTorch lets the allocations of a thread go to the MemPool that became active first of those that apply,
and refuses to activate one that is active already (c10/cuda/CUDACachingAllocator.cpp). So only a thread's
innermost region is active, and every entered region has a MemPool to itself, taken from those its pool has
idle.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from fencepool import _core, _torch_snapshot
from fencepool._devices import DeviceName
from fencepool._streams import capture_candidates
from fencepool.errors import UnsupportedError
from fencepool.pools import empty_torch_cache
from fencepool.pytorch import regions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepool._torch_snapshot import MemPoolId
    from fencepool.pools import Pool


def require_mem_pools() -> None:
    """Raise UnsupportedError where PyTorch cannot lead one thread's allocations into a pool.

    2.4 has no MemPool; up to 2.7 a MemPool cannot be one thread's, nor be asked what lives in it.
    """
    if (
        hasattr(torch.cuda, "MemPool")
        and hasattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
        and _torch_snapshot.knows_mem_pools()
    ):
        return
    raise UnsupportedError(
        "regions and CUDA graphs in pools need PyTorch 2.8 or newer on a GPU, and this is "
        f"{torch.__version__}; Pool.empty() and Pool.adopt() work with it. Nothing was changed"
    )


class MemPools:
    """The MemPools of one pool. Thread-safe."""

    def __init__(self, pool: Pool) -> None:
        require_mem_pools()
        slot = _core.torch_slot(pool._core)
        self._allocator = _allocator_of(slot)
        self._ordinal = pool._core.ordinal
        self._lock = threading.RLock()  # a destructor may come in between
        self._idle: list[torch.cuda.MemPool] = []
        # Given up: what dies in them stays with PyTorch until its cache is emptied.
        self._given_up: set[MemPoolId] = set()

    def make(self) -> torch.cuda.MemPool:
        """A new MemPool over the pool, to be given up in the end."""
        with torch.cuda.device(self._ordinal):  # PyTorch makes it for the current device
            mem_pool = torch.cuda.MemPool(self._allocator.allocator())
        # Its destructor ends the process while a region or a capture of any thread is under way
        # (an assertion in c10/cuda/CUDACachingAllocator.cpp, synchronize_and_free_events). So it never runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mem_pool))
        return mem_pool

    def take(self) -> torch.cuda.MemPool:
        """One that nobody uses."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self.make()

    def put_back(self, mem_pool: torch.cuda.MemPool) -> None:
        """The region that had it has ended. What died in it is released now rather than kept."""
        if has_dead_segments(mem_pool.id):
            self.give_up(mem_pool)
            empty_cache(self._ordinal)
        else:
            with self._lock:
                self._idle.append(mem_pool)

    def give_up(self, mem_pool: torch.cuda.MemPool) -> None:
        """Nobody allocates from it any more. Tensors may live in it."""
        with self._lock:
            self._given_up.add(mem_pool.id)
        torch._C._cuda_releasePool(self._ordinal, mem_pool.id)

    def dead_bytes(self) -> dict[int, int]:
        """What PyTorch holds free inside segments that are in use: address to bytes.

        Only of MemPools that regions had. A graph's memory counts as used, free or not: replays use it.
        """
        with self._lock:
            ids = [mem_pool.id for mem_pool in self._idle] + list(self._given_up)
        return {
            block["address"]: block["size"]
            for mem_pool_id in ids
            for segment in _torch_snapshot.segments(mem_pool_id)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        }

    def trim(self, *, is_waiting: bool) -> None:
        """Have PyTorch give back what nothing lives in any more.

        What died while a stream still used it (``Tensor.record_stream``) is waited for only when asked to.
        """
        with self._lock:
            idle, self._idle = self._idle, []
        for mem_pool in idle:
            if any(_is_dead(segment, is_waiting) for segment in _torch_snapshot.segments(mem_pool.id)):
                self.give_up(mem_pool)
            else:
                with self._lock:
                    self._idle.append(mem_pool)
        with self._lock:
            given_up = {one: _torch_snapshot.segments(one) for one in self._given_up}
            self._given_up = {mem_pool_id for mem_pool_id, segments in given_up.items() if segments}
        if any(_is_dead(segment, is_waiting) for segments in given_up.values() for segment in segments):
            empty_cache(self._ordinal)


class MemPoolRoute:
    """A thread's allocations on a device into one MemPool."""

    def __init__(self, pool: Pool, mem_pool: torch.cuda.MemPool) -> None:
        self.pool = pool
        self._ordinal = pool._core.ordinal
        self.mem_pool = mem_pool
        self.users: set[object] = set()
        self._id: MemPoolId = mem_pool.id

    def begin(self) -> None:
        """See :class:`regions.Route`."""
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._ordinal, self._id)

    def end(self) -> None:
        """See :class:`regions.Route`."""
        torch._C._cuda_endAllocateToPool(self._ordinal, self._id)
        torch._C._cuda_releasePool(self._ordinal, self._id)


@contextlib.contextmanager
def inside(pool: Pool) -> Iterator[None]:
    """Lead this thread's allocations on the pool's device into the pool."""
    # Entered again, further in: the same MemPool, so that its gaps are used.
    route = regions.entered_route(pool.device, MemPoolRoute, pool)
    mem_pools = mem_pools_of(pool)
    if not isinstance(route, MemPoolRoute):
        _make_room(pool._core.ordinal)
        route = MemPoolRoute(pool, mem_pools.take())
    user = object()
    try:
        route.users.add(user)
        with regions.entered(pool.device, route):
            yield
    finally:
        route.users.discard(user)
        if not route.users:
            mem_pools.put_back(route.mem_pool)


def empty_cache(ordinal: int) -> None:
    """Have PyTorch give back what it holds without use, unless that would disturb somebody.

    It refuses while a region or a capture of any thread is under way; a later call sees to it then.
    """
    current = capture_candidates([DeviceName("cuda", ordinal)]).get(ordinal, [])
    if not _core.is_capturing("cuda", ordinal, current):
        empty_torch_cache()


def _make_room(ordinal: int) -> None:
    # Inside a region PyTorch does not empty its cache when memory is short: it takes it for a capture.
    cached = torch.cuda.memory_reserved(ordinal) - torch.cuda.memory_allocated(ordinal)
    if cached > _core.memory_info("cuda", ordinal)[0]:
        empty_cache(ordinal)


def has_dead_segments(mem_pool_id: MemPoolId) -> bool:
    """Whether PyTorch holds memory of a MemPool in which nothing lives."""
    return any(_is_dead(segment, is_waiting=False) for segment in _torch_snapshot.segments(mem_pool_id))


def _is_dead(segment: dict[str, Any], is_waiting: bool) -> bool:
    if is_waiting:
        return all(block["state"] != "active_allocated" for block in segment["blocks"])
    return bool(segment["active_size"] == 0)


# PyTorch's MemPools refer to their allocator by address, without keeping it: one for each slot, for good.
_allocators: dict[int, Any] = {}
_made: weakref.WeakKeyDictionary[Pool, MemPools] = weakref.WeakKeyDictionary()
_making = threading.RLock()


def _allocator_of(slot: int) -> Any:
    if slot not in _allocators:
        _allocators[slot] = torch.cuda.memory.CUDAPluggableAllocator(
            str(_core.__file__), f"fencepool_alloc_{slot:02o}", f"fencepool_free_{slot:02o}"
        )
    return _allocators[slot]


def mem_pools_of(pool: Pool) -> MemPools:
    """The pool's MemPools, made on first use."""
    with _making:
        found = _made.get(pool)
        if found is None:
            found = _made[pool] = MemPools(pool)
        return found


def trim(pool: Pool, *, is_waiting: bool) -> None:
    """Have PyTorch give back what it holds of the pool without using it."""
    with _making:
        found = _made.get(pool)
    if found is not None:
        from fencepool.pytorch import graphs

        graphs.forget_dead(pool)
        found.trim(is_waiting=is_waiting)


def dead_bytes(pool: Pool) -> dict[int, int]:
    """See :meth:`MemPools.dead_bytes`. No region of the pool may be entered."""
    with _making:
        found = _made.get(pool)
    return {} if found is None else found.dead_bytes()


def forget(pool: Pool) -> None:
    """The pool is closed."""
    with _making:
        if _made.pop(pool, None) is not None:
            _core.give_torch_slot_back(pool._core)
