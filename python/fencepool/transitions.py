"""pause, resume and what goes around them: callbacks, PyTorch's caches, the embedded driver's host."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from fencepool import _core, callbacks, debug, host_driver, interrupts, observing
from fencepool import progress as bars
from fencepool._devices import DeviceName, parse_device
from fencepool._streams import capture_candidates
from fencepool.errors import CallbackError, HostMemoryError, UnknownTagError, UnsupportedError, add_note
from fencepool.fences import Fence, parse_seconds
from fencepool.pools import empty_torch_cache, exclusive, known
from fencepool.reports import PauseReport, PoolStatus, Resumed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Set
    from typing import TypeVar

    import torch

    from fencepool.pools import Pool

    _Taken = TypeVar("_Taken")

Order = Literal["context", "explicit"]


def pause(
    *tags: str,
    device: str | torch.device | None = None,
    timeout: float | None = 60.0,
    discard: Collection[str] = (),
    progress: bool = False,
) -> PauseReport:
    """Give the device memory of every pool of those tags away; all of them or none.

    Waits for the work in flight, copies contents where the policy says so, and returns when the driver
    reports the memory free. Addresses stay reserved. Pausing what is paused does nothing and says so.
    Thread-safe; operations on other pools go on meanwhile. When it raises, every pool is as it was,
    contents included, and the call can be made again; where undoing failed too, the exception's notes say
    what holds. An interrupt (Ctrl-C) that comes when it has happened already is raised after it, with a note
    that the pools are paused. Rests on cuCtxRecordEvent, cuMemUnmap and cuMemRelease (CUDA Driver API).

    Args:
        tags: no tags mean every pool.
        device: act on pools of this device only.
        timeout: seconds for the work in flight to end; None waits as long as it takes.
        discard: those of the tags whose contents this pause drops, though their pools have a backup: no
            host memory is taken for them, and after the resume they hold what the pool's ``fill`` says. A
            pool that is paused already keeps what it kept.
        progress: show a bar on standard error when it takes longer than a second (an estimate; tqdm).

    Raises:
        UnknownTagError: no pool has such a tag, or ``discard`` names one that is not to be paused.
        QuiesceTimeout: work in flight did not end in time.
        PoolBusyError: a region of a pool is entered.
        CaptureError: a stream of a device is being captured.
        HostMemoryError: too little host memory for the backup.
        DiskError: too little space for a backup on a disk, found before anything is copied, or a failure to
            write there.
        DriverError: a driver call failed.
        Exception: whatever an ``on_pause`` callback raises.
    """
    pools = select(tags, device)
    seconds, discarded = parse_seconds("timeout", timeout), _discarded(pools, discard)
    with bars.shown(progress, "pause", pools):
        report = _pause(pools, seconds, discarded)
    _warn_of_unreleased(report, stacklevel=3)
    return report


def resume(
    *tags: str,
    device: str | torch.device | None = None,
    wait: float = 0.0,
    order: Order = "context",
    verify: bool = False,
    progress: bool = False,
) -> Resumed:
    """Take device memory for every pool of those tags again, at the same addresses; all of them or none.

    Returns once the copies back are submitted. With ``order="context"`` everything submitted later to the
    devices, on any stream and by any graph replay, runs after them (CUDA Driver API, cuCtxWaitEvent). On
    the embedded driver the CPU itself is what runs later, so the call returns when they have ended
    (see :func:`fencepool.host_driver.configure`). With ``order="explicit"`` only those who wait on the
    fence are ordered. For a pool with a resident backup it first waits for all work in flight on the
    device, which may be using the host memory; so it does with ``FENCEPOOL_DEBUG=1``. For a pool with a
    backup on a disk it returns once the file is read and the last copy is submitted. Resuming what is
    active does nothing and says so. Thread-safe. When it raises, but for :class:`CallbackError`, every pool
    is paused as it was, its contents in the backup, and the call can be made again. An interrupt (Ctrl-C)
    that comes when it has happened already is raised after the ``on_resume`` callbacks, with a note that the
    pools are active.

    Args:
        tags: no tags mean every pool.
        device: act on pools of this device only.
        wait: seconds to keep trying while memory is short, as when another process is still giving its
            memory back. PyTorch's own cached blocks are given back before the first retry.
        order: "context" or "explicit".
        verify: compare what came back with its digests, on the device. The host waits for the restore then.
        progress: show a bar on standard error when it takes longer than a second, as it may with ``wait`` (an
            estimate; tqdm). Copies that still run when the call returns are not in it.

    Raises:
        UnknownTagError: no pool has such a tag.
        OutOfMemoryError: the memory is not there; says how much is wanted, free and missing.
        CaptureError: a stream of a device is being captured.
        CorruptedBackupError: with ``verify``, a backup is not what was stored. Without it the contents
            would come back as they are.
        UnsupportedError: with ``verify``, a pool with a backup has no digests.
        DiskError: a backup on a disk cannot be read; says what is missing where its file ended early.
        DriverError: a driver call failed.
        CallbackError: an ``on_resume`` callback failed; the pools are active.
    """
    seconds = parse_seconds("wait", wait)
    require_order(order)
    if not isinstance(verify, bool):
        raise TypeError(f"verify is True or False, not {type(verify).__name__}")
    pools = select(tags, device)
    if verify:
        for pool in pools:
            if pool.backup != "none" and not pool.digests:
                raise UnsupportedError(f"{pool!r} has no digests to verify by; nothing was changed")
    with bars.shown(progress, "resume", pools):
        return _resume(pools, seconds, order, verify=verify)


@contextlib.contextmanager
def paused(
    *tags: str,
    device: str | torch.device | None = None,
    timeout: float | None = 60.0,
    wait: float = 0.0,
) -> Iterator[PauseReport]:
    """Pause for the length of a ``with`` block, then resume what the block paused.

    Pools that were paused before stay paused. The block's own exception is not hidden: when the resume
    fails too, that failure becomes a note on it. Thread-safe.

    Args:
        tags: no tags mean every pool.
        device: act on pools of this device only.
        timeout: seconds for the work in flight to end; None waits as long as it takes.
        wait: seconds that the resume keeps trying while memory is short.

    Yields:
        PauseReport: what the pause did.

    Raises:
        Error: on entry what :func:`pause` raises, with nothing changed; at the end what :func:`resume`
            raises, with the pools still paused.
    """
    seconds = parse_seconds("wait", wait)
    pools = select(tags, device)
    limit = parse_seconds("timeout", timeout)
    mine: list[Pool] = []
    try:
        report = _pause(pools, limit, changed=mine)
        _warn_of_unreleased(report, stacklevel=4)
        yield report
    except BaseException as error:
        _resume_after(error, mine, seconds)
        raise
    _resume(mine, seconds, "context")


def _resume_after(error: BaseException, pools: list[Pool], seconds: float) -> None:
    if not pools:
        return
    try:
        _resume(pools, seconds, "context")
    except Exception as second:  # the first exception is what matters
        add_note(error, f"resuming failed too: {second}")


def status() -> list[PoolStatus]:
    """Every pool at this moment, in the order they were made. Never waits for a transition. Thread-safe."""
    return [known(core).status() for core in _core.pools()]


def require_order(order: Any) -> None:
    """Raise ValueError unless it is one."""
    if order not in ("context", "explicit"):
        raise ValueError(f"order is 'context' or 'explicit', not {order!r}")


def select(tags: tuple[str, ...], device: str | torch.device | None) -> list[Pool]:
    """The pools of those tags, in the order they were made; UnknownTagError for a tag without any."""
    pools = [known(core) for core in _core.pools()]
    for tag in tags:
        if not isinstance(tag, str):
            raise TypeError(f"a tag is a string, not {type(tag).__name__}")
        if not any(pool.tag == tag for pool in pools):
            names = ", ".join(sorted({repr(pool.tag) for pool in pools})) or "none yet"
            raise UnknownTagError(f"no pool has the tag {tag!r}; known tags: {names}")
    wanted = str(parse_device(device)) if device is not None else None
    chosen = [
        pool for pool in pools if (not tags or pool.tag in tags) and (wanted is None or pool.device == wanted)
    ]
    if tags and not chosen:
        raise UnknownTagError(f"no pool of the tags {', '.join(map(repr, tags))} is on {wanted}")
    return chosen


def _discarded(pools: list[Pool], tags: Collection[str]) -> set[int]:
    """The ids of those pools whose tag is among the ones to discard."""
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise TypeError(f"discard is a collection of tags, not {tags!r}")
    tags = list(tags)  # a generator would be used up by the first look
    if not all(isinstance(tag, str) for tag in tags):
        raise TypeError(f"discard is a collection of tags, not {tags!r}")
    for tag in tags:
        if not any(pool.tag == tag for pool in pools):
            raise UnknownTagError(f"discard names {tag!r}, which is not among the tags to pause")
    return {pool._core.id for pool in pools if pool.tag in tags}


def _pause(
    pools: list[Pool],
    seconds: float,
    discarded: Set[int] = frozenset(),
    changed: list[Pool] | None = None,
) -> PauseReport:
    """What pause() does. Whether it returns or raises, `changed` gets the pools that it has paused."""
    with observing.transition("pause", pools) as seen, exclusive(*pools):
        unpaused: list[Pool] = []
        try:
            with _ready_to_pause(pools) as unpaused:
                cores = [pool._core for pool in pools]
                report = _core.pause(cores, seconds, _captures(pools), discarded, _dead_bytes(unpaused))
            seen.fill(report)
            debug.note_pause(_changed(report))
            return _pause_report(report, seen)
        except BaseException as error:
            _finish_interrupted_pause(error, unpaused)
            raise
        finally:
            if changed is not None:
                changed[:] = [pool for pool in unpaused if pool._is_paused]


def _dead_bytes(pools: list[Pool]) -> dict[int, int]:
    """What PyTorch holds free inside of these pools: address to bytes."""
    return {start: size for pool in pools for start, size in pool._dead_bytes().items()}


@contextlib.contextmanager
def _ready_to_pause(pools: list[Pool]) -> Iterator[list[Pool]]:
    """What goes before the core's part of a pause; yields the active ones of the pools.

    The caller has them to itself. When the block raises, what callbacks have done is undone.
    """
    unpaused = [pool for pool in pools if not pool._is_paused]
    with contextlib.ExitStack() as stack:
        for pool in unpaused:
            stack.enter_context(pool._without_regions("paused"))
        for pool in unpaused:
            pool._trim_torch(is_waiting=False)
        called = callbacks.before_pause(unpaused)
        try:
            for pool in unpaused:  # a callback may have entered one and left it open
                if threading.get_ident() in pool._entered.values():
                    pool._refuse_inside_region("paused")
            yield unpaused
        except BaseException as error:
            callbacks.undo_before_pause(called, error)
            raise


def _changed(report: dict[str, Any]) -> set[int]:
    """The ids of the pools whose state a core report's call has changed."""
    return {one["id"] for one in report["pools"] if one["is_changed"]}


def _pause_report(report: dict[str, Any], seen: observing.Transition) -> PauseReport:
    return PauseReport(
        pools=seen.pools,
        seconds=seen.seconds,
        device_memory=seen.device_memory,
        unreleased_bytes=report["unreleased_bytes"],
        notes=tuple(report["notes"]),
    )


def _warn_of_unreleased(report: PauseReport, stacklevel: int) -> None:
    if report.unreleased_bytes:
        warnings.warn(
            f"the driver refused to take {report.unreleased_bytes} bytes back; they stay held, unused, until "
            "the next pause or resume of their pools",
            ResourceWarning,
            stacklevel=stacklevel,
        )


def _resume(
    pools: list[Pool],
    seconds: float,
    order: Order,
    *,
    verify: bool = False,
    changed: list[Pool] | None = None,
) -> Resumed:
    """What resume() does. Whether it returns or raises, `changed` gets the pools that it has resumed."""
    with observing.transition("resume", pools) as seen, exclusive(*pools):
        away = [pool for pool in pools if pool._is_paused]
        told: list[Pool] = []
        try:
            report = _resume_core(pools, seconds, order, verify)
            seen.fill(report)
            return _finish_resume(report, pools, order, seen, told)
        except BaseException as error:
            if not told:
                _finish_interrupted_resume(error, away, order)
            raise
        finally:
            if changed is not None:
                changed[:] = [pool for pool in away if not pool._is_paused]


def _finish_interrupted_pause(error: BaseException, pools: list[Pool]) -> None:
    """What is left to do where a pause of these active pools has happened although this was raised."""
    debug.note_pause(pool._core.id for pool in interrupts.changed_all_the_same(error, pools, "paused"))


def _finish_interrupted_resume(error: BaseException, pools: list[Pool], order: Order) -> None:
    """What is left to do where a resume of these paused pools has happened although this was raised."""
    active = interrupts.changed_all_the_same(error, pools, "active")
    if not active:
        return
    try:
        # For the fence of the restore that runs now: the report with it is lost. The device is ordered.
        report = _resume_core(active, 0.0, "explicit", verify=False)
        _set_restoring(active, Fence(report["fence"]), order)
        debug.note_resume(active, report)
    except Exception as second:
        add_note(error, f"what has to wait for the restore is not known: {second}")
    try:
        callbacks.after_resume(active)
    except CallbackError as second:
        add_note(error, str(second))


def _finish_resume(
    report: dict[str, Any], pools: list[Pool], order: Order, seen: observing.Transition, told: list[Pool]
) -> Resumed:
    """What comes after the core's part of a resume. `told` gets the pools whose callbacks have their turn."""
    fence = Fence(report["fence"])
    changed = _changed(report)
    resumed = [pool for pool in pools if pool._core.id in changed]
    _set_restoring(resumed, fence, order)
    strays = debug.note_resume(pools, report)
    told.extend(resumed)
    callbacks.after_resume(resumed)
    debug.warn(strays, stacklevel=4)
    return Resumed(
        pools=seen.pools,
        seconds=seen.seconds,
        device_memory=seen.device_memory,
        fence=fence,
        host_held=report["is_host_held"],
        notes=tuple(report["notes"]),
        _pools=tuple(pools),
    )


def _set_restoring(pools: list[Pool], fence: Fence, order: Order) -> None:
    """Have the hooks of fence_modules() wait for it, unless the device's own order does."""
    for pool in pools:
        # Nothing orders what the CPU itself runs on the embedded driver, in either order.
        is_awaited = order == "explicit" or pool._core.provider == "host"
        pool._restoring = fence if is_awaited else None


def _resume_core(pools: list[Pool], seconds: float, order: Order, verify: bool) -> dict[str, Any]:
    cores = [pool._core for pool in pools]
    captures = _captures(pools)
    is_held = _is_host_held(pools, order)
    return _with_torch_cache_emptied(
        pools, seconds, lambda wait: _core.resume(cores, wait, order, is_held, captures, verify)
    )


def _is_host_held(pools: list[Pool], order: Order) -> bool:
    return order == "context" and any(host_driver.is_waiting(pool.device) for pool in pools)


def _with_torch_cache_emptied(pools: list[Pool], seconds: float, take: Callable[[float], _Taken]) -> _Taken:
    """Take device memory; where there is too little, what PyTorch holds without use goes back first."""
    torch = sys.modules.get("torch")
    is_cuda = any(pool._core.provider == "cuda" for pool in pools)
    if torch is not None and is_cuda and torch.cuda.is_initialized():
        try:
            return take(0.0)
        except HostMemoryError:  # of the host, where PyTorch's cache is not
            raise
        except MemoryError as error:
            notes = getattr(error, "__notes__", ())
        empty_torch_cache()
        try:
            return take(seconds if seconds >= 0 else float("inf"))
        except BaseException as error:
            for note in notes:  # what could not be undone the first time is still so
                add_note(error, note)
            raise
    return take(seconds if seconds >= 0 else float("inf"))


def _captures(pools: list[Pool]) -> dict[int, list[int]]:
    return capture_candidates([DeviceName(pool._core.provider, pool._core.ordinal) for pool in pools])
