"""Which pools a thread's PyTorch allocations go to: what it has entered, innermost last."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

import torch

from fencepool import _core
from fencepool.errors import Error, PoolPausedError, add_note
from fencepool.pools import exclusive

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


class _Entry:
    """One region that was entered, or a place where regions were left for a while (no route)."""

    def __init__(self, route: Route | None) -> None:
        self.route = route


class _Stack:
    """What one thread has entered on one device, innermost last. The last one's route is in force.

    Contexts need not be left in the order of entering: generators and tasks that share a thread do not.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self._thread = threading.get_ident()
        self._in_force: Route | None = None

    def innermost(self) -> Route | None:
        return self.entries[-1].route if self.entries else None

    def enter(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self._settle()

    def leave(self, entry: _Entry) -> None:
        """Harmless when it is not there. Whichever thread calls, the route is in force no longer."""
        if entry in self.entries:
            self.entries.remove(entry)
        self._settle()

    def _settle(self) -> None:
        wanted = self.innermost()
        if self._in_force is wanted:
            return
        old, self._in_force = self._in_force, None
        if old is not None:
            old.end()
        # A generator may be closed by another thread, for which nothing can begin here.
        if wanted is None or threading.get_ident() != self._thread:
            return
        self._in_force = wanted
        try:
            wanted.begin()
        except Exception:
            self._in_force = None
            raise


class _Stacks(threading.local):
    """The stacks of a thread, by device."""

    def __init__(self) -> None:
        self.by_device: dict[str, _Stack] = {}


_stacks = _Stacks()


@contextlib.contextmanager
def entered(device: str, route: Route | None) -> Iterator[None]:
    """Put a route on this thread's stack of that device; the one below ends meanwhile."""
    with _beneath():
        stack = _stacks.by_device.setdefault(device, _Stack())
        entry = _Entry(route)
        try:
            stack.enter(entry)
            yield
        finally:
            try:
                stack.leave(entry)
            except BaseException:  # Ctrl-C may come even here, and what was left must not stay in force
                stack.leave(entry)
                raise


_beneath: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def lie_beneath(left: Callable[[], AbstractContextManager[None]]) -> None:
    """For what leads allocations outside of regions: have ``left()`` around every region of any thread."""
    global _beneath
    _beneath = left


def innermost(device: str) -> Route | None:
    """The route of this thread's innermost region of that device."""
    stack = _stacks.by_device.get(device)
    return stack.innermost() if stack is not None else None


def entered_route(device: str, kind: type[Route], pool: Pool) -> Route | None:
    """A route to the pool that this thread is inside of already, however deep."""
    stack = _stacks.by_device.get(device)
    for entry in stack.entries if stack is not None else []:
        if isinstance(entry.route, kind) and getattr(entry.route, "pool", None) is pool:
            return entry.route
    return None


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Inside regions: this thread's PyTorch allocations go where they would without them, on every device.

    For scratch memory, or for what must stay when the pool is paused. A region entered inside counts
    again. Outside every region it does nothing. Threads do not affect each other. A pool whose region is
    left in this way still counts as entered, and is not paused meanwhile.
    """
    with contextlib.ExitStack() as stack:
        for device in list(_stacks.by_device):
            stack.enter_context(entered(device, None))
        yield


@contextlib.contextmanager
def occupied(pool: Pool) -> Iterator[None]:
    """Hold the pool active: a pause raises PoolBusyError meanwhile. Raises when it is paused already.

    PyTorch serves small allocations from memory it holds, without asking: inside a region of a paused
    pool it would hand out addresses with nothing behind them.
    """
    _core.require_owner()  # a forked child may have a lock that nobody will let go of
    token = object()
    try:
        # Whoever changes the pool says so first and looks for regions then. Here it is the other way round.
        pool._entered[token] = threading.get_ident()
        while pool._is_changed_elsewhere():
            pool._entered.pop(token, None)
            with exclusive(pool):  # a pause that is under way ends first
                pool._entered[token] = threading.get_ident()
        if pool._is_paused:
            raise PoolPausedError(
                f"{pool!r} is paused and takes no new memory; resume({pool.tag!r}) before a region of it "
                "is entered"
            )
        yield
    finally:
        pool._entered.pop(token, None)


@contextlib.contextmanager
def region(pool: Pool) -> Iterator[Pool]:
    """See :meth:`Pool.region`."""
    if pool._core.provider == "cuda":
        from fencepool.pytorch import cuda_regions

        cuda_regions.require_mem_pools()
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
