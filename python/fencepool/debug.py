"""With ``FENCEPOOL_DEBUG=1`` a process survives a stray use of paused tensors, and is told of it.

The addresses of a paused pool then lead to one page of a pattern (2 MiB a pool, all bytes 255: NaN, or -1),
over and over, in place of nowhere. A stray read gets the pattern. A stray write changes it, and the resume
finds that: there is a warning on the logger ``fencepool.debug`` with the pool, how long it was paused and the
stack of the pause, a :class:`StrayWriteWarning`, and a line among the problems of the pool's status.
docs/troubleshooting.md says what it costs and what it does not see.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fencepool import _core

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepool.pools import Pool

VARIABLE = "FENCEPOOL_DEBUG"
_logger = logging.getLogger("fencepool.debug")
_is_on = False


class StrayWriteWarning(RuntimeWarning):
    """Something wrote to the tensors of a pool while it was paused."""


@dataclass(frozen=True)
class _Pause:
    at: float
    stack: str


# By the id of a pool that is paused. Written with the pool's transition lock held.
_pauses: dict[int, _Pause] = {}


def from_environment() -> None:
    """Switch it on where the environment says so."""
    switch(os.environ.get(VARIABLE, "0").strip().lower() not in {"", "0", "false", "no"})


def switch(is_on: bool) -> None:
    """Switch it on or off, for pauses to come."""
    global _is_on
    _is_on = is_on
    _core.set_tripwires(is_on)


def note_pause(changed: Iterable[int]) -> None:
    """Remember where these pools were paused."""
    if not _is_on:
        return
    now = _Pause(time.time(), "".join(traceback.format_stack()[:-1]))
    for number in changed:
        _pauses[number] = now


def note_resume(pools: Iterable[Pool], report: dict[str, Any]) -> list[str]:
    """Log what was written to pools that have been resumed, and return it for warnings."""
    warned = []
    found = {one["id"]: one for one in report["strays"]}
    for pool in pools:
        pause = _pauses.pop(pool._core.id, None)
        stray = found.get(pool._core.id)
        if stray is None:
            continue
        says = f"{pool!r} was written to while it was paused: {_places(stray)}"
        if pause is None:
            _logger.warning("%s", says)
        else:
            when = time.strftime("%H:%M:%S", time.localtime(pause.at))
            seconds = time.time() - pause.at
            _logger.warning("%s. Paused at %s, for %.3f s, by:\n%s", says, when, seconds, pause.stack)
        warned.append(says)
    return warned


def warn(strays: Iterable[str], stacklevel: int) -> None:
    """Warn of stray writes, when everything else about the resume is done."""
    for says in strays:
        warnings.warn(says, StrayWriteWarning, stacklevel=stacklevel + 1)


def _places(stray: dict[str, Any]) -> str:
    # Every granule shows the same page: which of them was written to cannot be told.
    return (
        f"{stray['bytes']} bytes, the first {stray['first']} bytes behind one of the multiples of "
        f"{stray['page']} bytes in a segment"
    )
