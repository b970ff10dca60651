"""Two sets of pools changing places: one is paused while the other one is resumed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fencepool import _core, debug, observing, transitions
from fencepool.errors import UnknownTagError
from fencepool.fences import parse_seconds
from fencepool.pools import Pool, exclusive, known
from fencepool.reports import Swapped

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from fencepool.transitions import Order


def swap(
    *,
    pause: str | Pool | Iterable[str | Pool],
    resume: str | Pool | Iterable[str | Pool],
    device: str | torch.device | None = None,
    timeout: float | None = 60.0,
    discard: Collection[str] = (),
    wait: float = 0.0,
    order: Order = "context",
) -> Swapped:
    """Pause some pools and resume others at once; all of both or none.

    What is paused is copied to its backup while what is resumed is copied back, on streams of their own, so
    that both directions of the link are in use. Where the device has room for everything at once, the
    copies overlap in full. Where it has not, the resumed pools take memory piece by piece, as the paused ones
    let go of theirs. But for the time it takes, everything is as in :func:`pause` followed by
    :func:`resume`: work in flight ends first, the paused memory is released, or with the resumed pools, when
    the call returns, and what comes later runs behind the restore, as ``order`` says. Backups of both sides
    exist at the same time. Thread-safe. Backups on a disk are written before the copies in begin, and read
    segment by segment.

    When it raises, but for :class:`CallbackError`, both sides are as they were, contents included, and the
    call can be made again. There is one exception: pools whose contents are dropped are released last, but
    where the resumed pools need their memory a driver call may fail after that. They are active again then,
    without what they held, and a note says so. When undoing fails too, a pool may stay paused, its contents
    kept, as after a pause; a note says so. An interrupt that comes when the swap has happened already is
    raised after it, with notes that say so.

    Args:
        pause: tags, or pools, to pause; those that are paused already stay so.
        resume: tags, or pools, to resume; those that are active already stay so.
        device: of the tags, only the pools of this device.
        timeout: seconds for the work in flight to end; None waits as long as it takes.
        discard: those of the tags to pause whose contents are dropped, as for :func:`pause`.
        wait: seconds, before anything changes, for the memory to be there: what is free and what this call
            will release.
        order: "context" or "explicit", as for :func:`resume`.

    Raises:
        ValueError: a pool is to be paused and resumed at once; a bad time or order.
        UnknownTagError: no pool has such a tag, a pool is closed, or ``discard`` names one not to be paused.
        OutOfMemoryError: the memory would not be there even after the pause.
        QuiesceTimeout, PoolBusyError, CaptureError, HostMemoryError, DiskError, DriverError: as for the two.
        Exception: whatever an ``on_pause`` callback raises.
        CallbackError: an ``on_resume`` callback failed; the swap has happened.
    """
    seconds, limit = parse_seconds("wait", wait), parse_seconds("timeout", timeout)
    transitions.require_order(order)
    out, into = _select("pause", pause, device), _select("resume", resume, device)
    both = [pool for pool in out if pool in into]
    if both:
        names = ", ".join(dict.fromkeys(repr(pool.tag) for pool in both))
        raise ValueError(f"{names} cannot be paused and resumed at once")
    discarded = transitions._discarded(out, discard)
    swapped = _swap(out, into, limit, discarded, seconds, order)
    transitions._warn_of_unreleased(swapped.paused, stacklevel=3)
    return swapped


def _select(name: str, chosen: Any, device: str | torch.device | None) -> list[Pool]:
    """The pools of one side, each once, in the order they were made."""
    if isinstance(chosen, (str, Pool)):
        chosen = [chosen]
    if not isinstance(chosen, Iterable):
        raise TypeError(f"{name} takes tags or pools, not {type(chosen).__name__}")
    tags: list[str] = []
    pools: set[Pool] = set()
    for one in chosen:
        if isinstance(one, str):
            tags.append(one)
        elif isinstance(one, Pool):
            pools.add(one)
        else:
            raise TypeError(f"{name} takes tags or pools, not {type(one).__name__}")
    if tags:
        pools.update(transitions.select(tuple(tags), device))
    open_pools = [known(core) for core in _core.pools()]
    for pool in pools:
        if pool not in open_pools:
            raise UnknownTagError(f"a pool of the tag {pool.tag!r} was closed and cannot be swapped")
    return [pool for pool in open_pools if pool in pools]


def _swap(
    out: list[Pool], into: list[Pool], timeout: float, discarded: set[int], wait: float, order: Order
) -> Swapped:
    every = sorted([*out, *into], key=lambda pool: pool._core.id)
    with (
        observing.transition("pause", out) as seen_out,
        observing.transition("resume", into) as seen_in,
        exclusive(*every),
    ):
        captures = transitions._captures(every)
        is_held = transitions._is_host_held(into, order)
        sides = [pool._core for pool in out], [pool._core for pool in into]
        away = [pool for pool in into if pool._is_paused]
        unpaused: list[Pool] = []
        told: list[Pool] = []
        try:
            with transitions._ready_to_pause(out) as unpaused:
                dead = transitions._dead_bytes(unpaused)
                paused, resumed = transitions._with_torch_cache_emptied(
                    into,
                    wait,
                    lambda seconds: _core.swap(
                        *sides, timeout, discarded, seconds, order, is_held, captures, dead
                    ),
                )
            seen_out.fill(paused)
            seen_in.fill(resumed)
            debug.note_pause(transitions._changed(paused))
            return Swapped(
                transitions._pause_report(paused, seen_out),
                transitions._finish_resume(resumed, into, order, seen_in, told),
            )
        except BaseException as error:
            transitions._finish_interrupted_pause(error, unpaused)
            if not told:
                transitions._finish_interrupted_resume(error, away, order)
            raise
