"""Which pools a thread's PyTorch allocations go to: what it has entered, innermost last."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from fencepool import _core
from fencepool.errors import Error, PoolPausedError, add_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from fencepool.pools import Pool


class Route(Protocol):
    """Leads a thread's allocations on one device to one place, while it is that thread's innermost."""

    def begin(self) -> None:
        """From here on; never called while another of this thread and device is in force."""

    def end(self) -> None:
        """No longer."""


class _Stack(threading.local):
    """By device, what this thread has entered. None: left for a while."""

    def __init__(self) -> None:
        self.routes: dict[str, list[Route | None]] = {}


_stack = _Stack()


@contextlib.contextmanager
def entered(device: str, route: Route | None) -> Iterator[None]:
    """Put a route on this thread's stack of that device; the one below ends meanwhile."""
    with _beneath():
        routes = _stack.routes.setdefault(device, [])
        below = routes[-1] if routes else None
        _switch(below, route)
        routes.append(route)
        try:
            yield
        finally:
            routes.pop()
            _switch(route, below)


_beneath: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def lie_beneath(left: Callable[[], AbstractContextManager[None]]) -> None:
    """For what leads allocations outside of regions: have ``left()`` around every region of any thread."""
    global _beneath
    _beneath = left


def _switch(old: Route | None, new: Route | None) -> None:
    if old is new:
        return
    if old is not None:
        old.end()
    if new is not None:
        new.begin()


def entered_route(device: str, kind: type[Route], pool: Pool) -> Route | None:
    """A route to the pool that this thread is inside of already, however deep."""
    for route in _stack.routes.get(device, []):
        if isinstance(route, kind) and getattr(route, "pool", None) is pool:
            return route
    return None


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Inside regions: this thread's PyTorch allocations go where they would without them, on every device.

    For scratch memory, or for what must stay when the pool is paused. A region entered inside counts
    again. Outside every region it does nothing. Threads do not affect each other.
    """
    with contextlib.ExitStack() as stack:
        for device in list(_stack.routes):
            stack.enter_context(entered(device, None))
        yield


@contextlib.contextmanager
def occupied(pool: Pool) -> Iterator[None]:
    """Hold the pool active: a pause raises PoolBusyError meanwhile. Raises when it is paused already.

    PyTorch serves small allocations from memory it holds, without asking: inside a region of a paused
    pool it would hand out addresses with nothing behind them.
    """
    with pool._transition:  # a pause that is under way ends first
        if pool._core.status()["is_paused"]:
            raise PoolPausedError(
                f"{pool!r} is paused and takes no new memory; resume({pool.tag!r}) before a region of it "
                "is entered"
            )
        with pool._regions_lock:
            pool._regions += 1
    try:
        yield
    finally:
        with pool._regions_lock:
            pool._regions -= 1


@contextlib.contextmanager
def region(pool: Pool) -> Iterator[Pool]:
    """See :meth:`Pool.region`."""
    if pool._core.provider == "cuda":
        from fencepool.pytorch import cuda_regions

        pool._prepare_torch()
        inside = cuda_regions.inside(pool)
    else:
        from fencepool.pytorch import cpu_regions

        inside = cpu_regions.inside(pool)
    with occupied(pool), inside:
        try:
            yield pool
        except torch.OutOfMemoryError as error:
            explain(pool, error)
            raise


def explain(pool: Pool, error: torch.OutOfMemoryError) -> None:
    """Put why the pool refused memory into PyTorch's error, which knows nothing of it."""
    if isinstance(error, Error):
        return
    try:
        _core.raise_torch_refusal(pool._core)
    except Error as refusal:
        add_note(error, f"fencepool: {refusal}")
