"""Interrupts, such as Ctrl-C, that come when a transition has happened already.

The core looks for signals until it can no longer go back. What comes later Python raises as soon as the core
returns, and before anybody has its report. The transition stands then, as if the interrupt had come after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fencepool.errors import Error, add_note

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fencepool.pools import Pool


def changed_all_the_same(
    error: BaseException, pools: Iterable[Pool], state: Literal["paused", "active"]
) -> list[Pool]:
    """Those of the pools, all of them in the other state before, that are in this one; a note says so."""
    if isinstance(error, (Error, MemoryError)):  # the core's own, which says what it had to leave
        return []
    changed = [pool for pool in pools if pool._is_paused == (state == "paused")]
    if changed:
        names = ", ".join(dict.fromkeys(repr(pool.tag) for pool in changed))
        add_note(error, f"the pools of {names} are {state} now")
    return changed
