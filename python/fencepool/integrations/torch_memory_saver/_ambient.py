"""TMS_INIT_ENABLE: a region without a block, from the start of the program to its end.

It belongs to one thread: the first that uses CUDA, or on the embedded driver the one that imports fencepool's
torch_memory_saver. It lies below every other region of that thread, and follows PyTorch's current device.
While its pool is paused it leads nowhere, so that what the program allocates meanwhile is ordinary memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import fencepool as fp
    from fencepool.pytorch.regions import Route


class _Bottom:
    """A route whose target can change at any time, in force or not."""

    def __init__(self) -> None:
        self._target: Route | None = None
        self._is_in_force = False

    def begin(self) -> None:
        self._is_in_force = True
        if self._target is not None:
            self._target.begin()

    def end(self) -> None:
        self._is_in_force = False
        if self._target is not None:
            self._target.end()

    def lead_to(self, target: Route | None) -> None:
        """Allocations go there from here on; with None, where they would without this route."""
        if self._is_in_force and self._target is not None:
            self._target.end()
        self._target = target
        if self._is_in_force and target is not None:
            target.begin()


class Ambient:
    """The region that TMS_INIT_ENABLE asks for. Does nothing before :meth:`start`."""

    def __init__(self, open_pool: Callable[[str, bool], fp.Pool]) -> None:
        self._open_pool = open_pool
        self._policy: tuple[str, bool] | None = None
        self._thread: int | None = None
        self._process = os.getpid()
        self._bottoms: dict[str, _Bottom] = {}  # by the device's name in PyTorch
        self._pool: fp.Pool | None = None  # where allocations go now
        self._inside = contextlib.ExitStack()  # of that pool
        self._mode = contextlib.ExitStack()  # of the embedded driver, for good

    def start(self, tag: str, has_backup: bool) -> None:
        """Begin: at once, or on a GPU when the program first uses CUDA, on the device it has chosen then."""
        self._policy = tag, has_backup
        atexit.register(self._end)
        if os.environ.get("FENCEPOOL_DEVICE", "cuda").startswith("cuda"):
            self._follow_torch()
        else:
            from fencepool.pytorch import cpu_regions

            self._mode.enter_context(cpu_regions.mode())
            self.settle()

    def is_of_this_thread(self) -> bool:
        """Whether what the calling thread allocates outside of other regions can be paused."""
        return self._thread == threading.get_ident()

    def settle(self) -> None:
        """Enter the pool or leave it, as its state and the current device say now."""
        if self._policy is None:
            return
        if self._thread is None:
            self._thread = threading.get_ident()
        if not self.is_of_this_thread():
            return
        pool = self._open_pool(*self._policy)
        wanted = pool if pool.state == "active" else None
        if self._pool is not wanted:
            self._leave()
            if wanted is not None:
                self._enter(wanted)

    @contextlib.contextmanager
    def left_for(self, tags: list[str]) -> Iterator[None]:
        """Outside of the pool while it is being paused, as it has to be, if it is one of those tags."""
        if self._pool is not None and self._pool.tag in tags and self.is_of_this_thread():
            self._leave()
        try:
            yield
        finally:
            self.settle()

    def _enter(self, pool: fp.Pool) -> None:
        from fencepool.pytorch import regions

        with contextlib.ExitStack() as inside:
            inside.enter_context(regions.occupied(pool))
            route = _host_route(pool) if pool.torch_device == "cpu" else _cuda_route(pool, inside)
            bottom = self._bottom(pool.torch_device)
            bottom.lead_to(route)
            inside.callback(bottom.lead_to, None)
            self._inside = inside.pop_all()
        self._pool = pool

    def _leave(self) -> None:
        self._pool = None
        self._inside.close()

    def _end(self) -> None:
        if os.getpid() == self._process:  # a forked child has nothing of it
            self._leave()
            self._mode.close()

    def _bottom(self, device: str) -> _Bottom:
        from fencepool.pytorch import regions

        if device not in self._bottoms:
            self._bottoms[device] = _Bottom()
            regions.put_beneath(device, self._bottoms[device])
        return self._bottoms[device]

    def _follow_torch(self) -> None:
        """Have PyTorch tell when it first uses CUDA, when a device is chosen, and what is captured."""
        import torch

        set_device = torch.cuda.set_device
        choosing = threading.local()

        @functools.wraps(set_device)
        def chosen(device: Any) -> None:
            choosing.now = True  # the first call initialises CUDA, on a device that is not the one meant
            try:
                set_device(device)
            finally:
                choosing.now = False
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self.settle()

        def initialised() -> None:
            if not getattr(choosing, "now", False):
                self.settle()

        torch.cuda.set_device = chosen
        _leave_captures_alone(torch.cuda.CUDAGraph)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.settle()
        else:
            torch.cuda._lazy_call(initialised)  # type: ignore[no-untyped-call]


def _host_route(pool: fp.Pool) -> Route:
    from fencepool.pytorch import cpu_regions

    return cpu_regions.PoolRoute(pool)


def _cuda_route(pool: fp.Pool, inside: contextlib.ExitStack) -> Route:
    from fencepool.pytorch import cuda_regions

    pool._prepare_torch()
    mem_pools = cuda_regions.mem_pools_of(pool)
    mem_pool = mem_pools.take()
    inside.callback(mem_pools.put_back, mem_pool)
    return cuda_regions.MemPoolRoute(pool, mem_pool)


def _leave_captures_alone(graph_class: Any) -> None:
    """What a graph captures goes into the graph's own memory, as without this region.

    PyTorch would lead it to whatever MemPool became active first, and reuse memory that replays need.
    """
    from fencepool.pytorch import regions

    begin, end = graph_class.capture_begin, graph_class.capture_end
    captures = threading.local()

    @functools.wraps(begin)
    def capture_begin(graph: Any, *arguments: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as outside:
            outside.enter_context(regions.disable())
            result = begin(graph, *arguments, **options)
            captures.outside = outside.pop_all()
        return result

    @functools.wraps(end)
    def capture_end(graph: Any) -> Any:
        try:
            return end(graph)
        finally:
            captures.__dict__.pop("outside", contextlib.ExitStack()).close()

    graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end
