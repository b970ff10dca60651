"""TMS_INIT_ENABLE: a region without a block, from the start of the program to its end.

It belongs to one thread, the one that imports fencepool's torch_memory_saver, and follows PyTorch's current
device. While its pool is paused it is left, so that what the program allocates meanwhile is ordinary memory.
A region is left in the order it was entered, so both happen only outside of every other scope of the thread.
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


class Ambient:
    """The region that TMS_INIT_ENABLE asks for. Does nothing before :meth:`start`."""

    def __init__(self, open_pool: Callable[[str, bool], fp.Pool]) -> None:
        self._open_pool = open_pool
        self._policy: tuple[str, bool] | None = None
        self._thread = 0
        self._depth = 0  # scopes that the thread is in
        self._pool: fp.Pool | None = None  # whose region is entered
        self._region = contextlib.ExitStack()

    def start(self, tag: str, has_backup: bool) -> None:
        """Begin on this thread: at once, or on a GPU when the program first uses CUDA.

        That makes no CUDA context before the program has chosen its device.
        """
        self._policy, self._thread = (tag, has_backup), threading.get_ident()
        atexit.register(self._leave)
        if _is_cuda():
            self._follow_torch()
        else:
            self.settle()

    @contextlib.contextmanager
    def beneath(self) -> Iterator[None]:
        """The block is a scope of this thread; this region is as it has to be before it and after it."""
        if threading.get_ident() != self._thread:
            yield
            return
        self.settle()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.settle()

    def settle(self) -> None:
        """Enter the region or leave it, as the pool's state and the current device say now."""
        if self._policy is None or threading.get_ident() != self._thread or self._depth:
            return
        pool = self._open_pool(*self._policy)
        is_wanted = pool.state == "active"
        if self._pool is not None and not (is_wanted and pool is self._pool):
            self._leave()
        if is_wanted and self._pool is None:
            self._region.enter_context(pool.region())
            self._pool = pool

    def _leave(self) -> None:
        self._pool = None
        self._region.close()

    def _follow_torch(self) -> None:
        import torch

        chosen = torch.cuda.set_device
        is_choosing = threading.local()

        @functools.wraps(chosen)
        def set_device(device: Any) -> None:
            is_choosing.now = True  # the first call initialises CUDA, on a device that is not the one meant
            try:
                chosen(device)
            finally:
                is_choosing.now = False
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                self.settle()

        def initialised() -> None:
            if not getattr(is_choosing, "now", False):
                self.settle()

        torch.cuda.set_device = set_device
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.settle()
        else:
            torch.cuda._lazy_call(initialised)  # type: ignore[no-untyped-call]


def _is_cuda() -> bool:
    return os.environ.get("FENCEPOOL_DEVICE", "cuda").startswith("cuda")
