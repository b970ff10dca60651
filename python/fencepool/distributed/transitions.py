"""pause and resume across ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fencepool import _core
from fencepool import transitions as local
from fencepool.distributed.agreement import agreement_of
from fencepool.errors import RankError, add_note
from fencepool.fences import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from fencepool.pools import Pool
    from fencepool.reports import PauseReport, Resumed


def pause(
    *tags: str,
    group: Any = None,
    device: str | torch.device | None = None,
    timeout: float = 60.0,
    patience: float = 60.0,
) -> PauseReport:
    """Give the memory of those tags away on every rank of a group, or on none.

    First every rank prepares: it waits for its work in flight and takes the host memory for its backups,
    which is what can fail. When all are ready, all pause. When the call returns on one rank, memory is
    released on all. Every rank of the group has to call it. Thread-safe only as far as all ranks call in
    one order.

    Args:
        tags: no tags mean every pool of the rank.
        group: a process group of ``torch.distributed``, of any backend; None for all ranks.
        device: act on pools of this device only.
        timeout: seconds for the work in flight to end, on each rank.
        patience: seconds to wait for the other ranks at each step, beyond ``timeout``.

    Raises:
        RankError: the same on every rank; names each rank that failed and its cause, or that did not answer.
            What this rank itself failed with is its ``__cause__``. Every pool is as it was; after a failure
            in the second step, which takes a driver error or the end of a process, pools without backup
            have lost their contents, and a note says so.
        RuntimeError: torch.distributed is not initialised.
        ValueError: this rank is not in the group, or a bad time.
    """
    seconds, patience = _limited("timeout", timeout), _limited("patience", patience)
    agreement = agreement_of(group)
    mine: list[Pool] = []
    prepared = _Step(agreement, "preparing to pause", seconds + patience)
    with prepared:
        _prepare([pool for pool in local.select(tags, device) if not pool._is_paused], seconds)
    paused = _Step(agreement, "pausing", seconds + patience)
    try:
        with paused:
            prepared.raise_interruption()  # the others are in this step by now, and hear of it here
            report = local._pause(local.select(tags, device), seconds, changed=mine)
            local._warn_of_unreleased(report, stacklevel=3)
    except BaseException as error:
        _resume_again(mine, patience, error)
        raise
    paused.raise_interruption("all ranks have paused, and this one too")
    return report


def resume(
    *tags: str,
    group: Any = None,
    device: str | torch.device | None = None,
    wait: float = 0.0,
    patience: float = 60.0,
) -> Resumed:
    """Take memory for those tags again on every rank of a group, or on none.

    When the call returns on one rank, the contents are restored on all: a rank may write to another's
    memory at once. Every rank of the group has to call it.

    Args:
        tags: no tags mean every pool of the rank.
        group: a process group of ``torch.distributed``, of any backend; None for all ranks.
        device: act on pools of this device only.
        wait: seconds to keep trying while memory is short, on each rank.
        patience: seconds to wait for the restore and for the other ranks, beyond ``wait``.

    Raises:
        RankError: the same on every rank; names each rank that failed and its cause, or that did not answer.
            Every pool that was paused is paused again, contents in its backup; call again when all can.
        RuntimeError, ValueError: as for :func:`pause`.
    """
    seconds, patience = _limited("wait", wait), _limited("patience", patience)
    agreement = agreement_of(group)
    mine: list[Pool] = []
    step = _Step(agreement, "resuming", seconds + patience)
    try:
        with step:
            resumed = local._resume(local.select(tags, device), seconds, "context", changed=mine)
            resumed.fence.synchronize(timeout=patience)
    except BaseException as error:
        _pause_again(mine, patience, error)  # after a callback's failure or an interrupt, too
        raise
    step.raise_interruption("all ranks have resumed, and this one too")
    return resumed


def _limited(name: str, value: float) -> float:
    seconds = parse_seconds(name, value)
    if seconds < 0:
        raise ValueError(
            f"{name} needs a limit: without one a rank that has ended would be waited for forever"
        )
    return seconds


class _Step:
    """What every rank does between two agreements. Its failure, of whatever kind, is told to the others."""

    def __init__(self, agreement: Any, doing: str, patience: float) -> None:
        self._agreement = agreement
        self._doing = doing
        self._patience = patience
        self._interruption: BaseException | None = None

    def raise_interruption(self, note: str = "") -> None:
        """Raise what interrupted this rank while it waited for the others, who had all succeeded."""
        if self._interruption is None:
            return
        if note:
            add_note(self._interruption, note)
        raise self._interruption

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        is_stopping = error is not None and not isinstance(error, Exception)
        try:
            # When somebody wants this process to stop, the others are told and not waited for.
            patience = 0.0 if is_stopping else self._patience
            self._interruption = self._agreement.decide(self._doing, error, patience)
        except RankError as failure:
            if error is None or not is_stopping:
                raise
            add_note(error, str(failure))


def _prepare(pools: list[Pool], seconds: float) -> None:
    for pool in pools:
        pool._refuse_inside_region("paused")
    for pool in pools:
        pool.prepare()
    if pools:
        _core.quiesce([pool._core for pool in pools], seconds, local._captures(pools))


def _resume_again(pools: list[Pool], patience: float, error: BaseException) -> None:
    if not pools:
        return
    try:
        local._resume(pools, patience, "context")
    except Exception as second:
        still = _tags(pool for pool in pools if pool._is_paused)
        if still:
            add_note(error, f"this rank's pools {still} are paused: resuming them again failed: {second}")
            return
        add_note(error, f"resuming this rank's pools again failed in part: {second}")
    lost = _tags(pool for pool in pools if pool.backup == "none")
    if lost:
        add_note(error, f"this rank's pools without backup have lost their contents: {lost}")


def _pause_again(pools: list[Pool], patience: float, error: BaseException) -> None:
    if not pools:
        return
    try:
        local._pause(pools, patience)
    except Exception as second:
        still = _tags(pool for pool in pools if not pool._is_paused)
        if still:
            add_note(error, f"this rank's pools {still} are active: pausing them again failed: {second}")
            return
        add_note(error, f"pausing this rank's pools again failed in part: {second}")
    add_note(error, f"this rank's pools {_tags(pools)} had been resumed, and are paused again")


def _tags(pools: Iterable[Pool]) -> str:
    return ", ".join(sorted({pool.tag for pool in pools}))
