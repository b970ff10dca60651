"""TMS_INIT_ENABLE: a region without a block, from the start of the program to its end.

It is of all threads, lies beneath every region and graph capture, and follows PyTorch's current device. While
its pool is paused it leads nowhere, so that what the program allocates meanwhile is ordinary memory.

PyTorch lets an allocation go to the MemPool that became active first of those that apply. So this one is
inactive while any thread is inside a region, a disable() block or a capture: what other threads allocate at
that time is ordinary memory too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from fencepool.errors import PoolPausedError
from fencepool.integrations.torch_memory_saver import _settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import fencepool as fp
    from fencepool.pools import Backup
    from fencepool.pytorch.regions import Route


class _Switch:
    """Leads allocations to a place that can be changed, except while it is left. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._target: Route | None = None
        self._left = 0

    def lead_to(self, target: Route | None) -> None:
        """Allocations go there from here on; with None, where they would without this."""
        with self._lock:
            if self._target is not None and not self._left:
                self._target.end()
            self._target = target
            if target is not None and not self._left:
                target.begin()

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """For the block allocations go where they would without this."""
        with self._lock:
            self._left += 1
            if self._left == 1 and self._target is not None:
                self._target.end()
        try:
            yield
        finally:
            with self._lock:
                self._left -= 1
                if not self._left and self._target is not None:
                    self._target.begin()


class Ambient:
    """The region that TMS_INIT_ENABLE asks for. Does nothing before :meth:`start`."""

    def __init__(self, open_pool: Callable[[str, Backup, str], fp.Pool]) -> None:
        self._open_pool = open_pool
        self._policy: tuple[str, Backup] | None = None
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._device: str | None = None  # before the program has chosen one
        self._chooser = 0  # the thread whose device it is
        self._is_of_one_thread = False  # on the embedded driver
        self._switch = _Switch()
        self._pool: fp.Pool | None = None  # where allocations go now
        self._inside = contextlib.ExitStack()  # of that pool
        self._mode = contextlib.ExitStack()  # of the embedded driver, for good

    def start(self, tag: str, backup: Backup) -> None:
        """Begin: at once, or on a GPU when the program first uses CUDA, on the device it has chosen then.

        On the embedded driver only the calling thread's allocations are led, as PyTorch has no other way.
        """
        from fencepool.pytorch import regions

        self._policy = tag, backup
        regions.lie_beneath(self.left)
        atexit.register(self._end)
        if os.environ.get("FENCEPOOL_DEVICE", "cuda").startswith("cuda"):
            from fencepool.integrations.torch_memory_saver import _torch_hooks

            _torch_hooks.install(self)
        else:
            from fencepool.pytorch import cpu_regions

            self._is_of_one_thread = True
            self._mode.enter_context(cpu_regions.mode())
            self.follow()

    def is_of_this_thread(self) -> bool:
        """Whether what the calling thread allocates outside of regions can be paused."""
        if self._policy is None:
            return False
        return not self._is_of_one_thread or threading.get_ident() == self._chooser

    def follow(self) -> None:
        """Go to the device that regions of the calling thread would be on. Only the first thread counts."""
        with self._lock:
            if self._device is None:
                self._chooser = threading.get_ident()
            if threading.get_ident() == self._chooser:
                self._device = _settings.device()
        self.settle()

    def settle(self) -> None:
        """Enter the pool or leave it, as its state says now."""
        from fencepool.pytorch import regions

        while (wanted := self._to_enter()) is not None:
            with contextlib.ExitStack() as inside:
                # Without the lock: this waits for a thread that changes the pool, and that thread may want
                # the lock, for PyTorch's cache.
                try:
                    inside.enter_context(regions.occupied(wanted))
                except PoolPausedError:  # since it was looked at
                    continue
                with self._lock:
                    if self._to_enter() is wanted:
                        self._leave()
                        self._enter(wanted, inside.pop_all())

    def _to_enter(self) -> fp.Pool | None:
        """The pool that should be entered and is not; one that is paused is left."""
        with self._lock:
            if self._policy is None or self._device is None or not self.is_of_this_thread():
                return None
            pool = self._open_pool(*self._policy, self._device)
            if pool._is_paused:
                if self._pool is not None:
                    self._leave()
                return None
            return None if self._pool is pool else pool

    @contextlib.contextmanager
    def left_for(self, tags: list[str]) -> Iterator[None]:
        """Outside of the pool while it is being paused, as it has to be, if it is one of those tags."""
        with self._lock:
            if self._pool is not None and self._pool.tag in tags and self.is_of_this_thread():
                self._leave()
        try:
            yield
        finally:
            self.settle()

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Outside of the pool for the block, with another MemPool after it.

        PyTorch frees nothing of a MemPool that somebody has: what died in this one goes when it is given up.
        """
        with self._lock:
            is_inside = self._pool is not None and self.is_of_this_thread()
            if is_inside:
                self._leave()
        try:
            yield
        finally:
            if is_inside:
                self.settle()

    def left(self) -> contextlib.AbstractContextManager[None]:
        """For the block allocations go where they would without this region."""
        return self._switch.left() if self.is_of_this_thread() else contextlib.nullcontext()

    def _enter(self, pool: fp.Pool, inside: contextlib.ExitStack) -> None:
        """It is occupied, until the stack is closed."""
        with inside:
            route = _host_route(pool) if self._is_of_one_thread else _cuda_route(pool, inside)
            self._switch.lead_to(route)
            inside.callback(self._switch.lead_to, None)
            self._inside = inside.pop_all()
        self._pool = pool

    def _leave(self) -> None:
        self._pool = None
        self._inside.close()

    def _end(self) -> None:
        if os.getpid() == self._process:  # a forked child has nothing of it
            self._leave()
            self._mode.close()


def _host_route(pool: fp.Pool) -> Route:
    from fencepool.pytorch import cpu_regions

    return cpu_regions.BeneathRoute(pool)


def _cuda_route(pool: fp.Pool, inside: contextlib.ExitStack) -> Route:
    from fencepool.integrations.torch_memory_saver import _torch_hooks
    from fencepool.pytorch import cuda_regions

    pool._prepare_torch()
    mem_pools = cuda_regions.mem_pools_of(pool)
    mem_pool = mem_pools.take()
    inside.callback(mem_pools.put_back, mem_pool)
    return _torch_hooks.WholeProcessRoute(pool, mem_pool)
