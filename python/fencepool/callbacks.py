"""Running what users have registered with Pool.on_pause and Pool.on_resume."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fencepool.errors import CallbackError, add_note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepool.pools import Pool


def before_pause(pools: Iterable[Pool]) -> list[Pool]:
    """Run those of every pool, and return the pools. What one raises goes on, when the others are undone."""
    called: list[Pool] = []
    try:
        for pool in pools:
            for callback in list(pool._before_pause.values()):
                callback(pool)
            called.append(pool)
    except BaseException as error:
        undo_before_pause(called, error)
        raise
    return called


def undo_before_pause(called: Iterable[Pool], error: BaseException) -> None:
    """Run the on_resume callbacks of pools that stay active after all, because of this error."""
    for pool in called:
        if pool._is_paused:  # undoing failed, and its memory is not there: see the error's notes
            continue
        for callback in list(pool._after_resume.values()):
            try:
                callback(pool)
            except Exception as second:  # the first failure is the one to raise
                add_note(error, f"an on_resume callback of {pool!r} failed while undoing: {second!r}")


def after_resume(pools: Iterable[Pool]) -> None:
    """Run those of every pool, whatever any of them raises: their memory is back.

    Raises:
        CallbackError: some have failed.
        BaseException: what stops the process (Ctrl-C, SystemExit) is raised as it is, once all have run.
    """
    failures: list[tuple[Pool, BaseException]] = []
    left = deque((pool, callback) for pool in pools for callback in pool._after_resume.values())
    while left:
        try:
            while left:
                pool, callback = left.popleft()
                callback(pool)
        except BaseException as error:  # the other callbacks have to know of the memory too
            failures.append((pool, error))
    if not failures:
        return
    failure = _one_of(failures)
    failures.clear()
    try:
        raise failure
    finally:
        del failure  # a cycle with the traceback would keep the callers' tensors


def _one_of(failures: list[tuple[Pool, BaseException]]) -> BaseException:
    """The exception to raise for all of them: what stops the process, else a CallbackError."""
    stopping = next((one for one in failures if not isinstance(one[1], Exception)), None)
    pool, first = stopping or failures[0]
    failure = first
    if stopping is None:
        failure = CallbackError(f"an on_resume callback of {pool!r} failed: {first!r}; the pools are active")
        failure.__cause__ = first
    else:
        add_note(failure, "the pools are active")
    for other, second in failures:
        if second is not first:
            add_note(failure, f"another on_resume callback of {other!r} failed: {second!r}")
    return failure
