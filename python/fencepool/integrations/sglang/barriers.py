"""SGLang's own code on every rank, where one of them may fail.

In the middle of a release SGLang waits for the other ranks, at a barrier of the group that ranks agree over
too. Collectives of a group pair up by their order alone. So a rank that fails before the barrier, and asks
the others next, would be answered by their barriers, and every agreement from there on would be mistaken.
Nor can it be told afterwards: the others do not come out of the barrier.

So while SGLang's code runs each of its barriers is an agreement, in which a rank says that all is well so
far. A rank that has failed says so in the place of its next barrier, or of the end, and all stop there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from typing import TYPE_CHECKING, Any

from fencepool.integrations.sglang import agreement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class OtherRankError(RuntimeError):
    """Raised where SGLang would have waited for a rank that does not come."""


def run(group: Any, attempt: Callable[[], str]) -> tuple[list[str], bool]:
    """Run it on every rank; each has to call this.

    Args:
        group: SGLang's CPU group of the tensor-parallel ranks.
        attempt: runs SGLang's code; returns why it failed, or an empty text.

    Returns:
        how each rank fared, the same on all of them, and whether SGLang's code can be taken back on this
        one: where it came to its end, or to a barrier at which another rank was missing. By then a release
        has done all but give memory away.
    """
    stopped: list[str] = []

    def meet() -> None:
        outcomes = agreement.gather(group, "")
        if any(outcomes):
            stopped[:] = outcomes
            raise OtherRankError(agreement.failures(outcomes))

    with _replaced(group, meet):
        outcome = attempt()
    if stopped:
        return stopped, True
    return agreement.gather(group, outcome), not outcome


def without(group: Any) -> contextlib.AbstractContextManager[None]:
    """For code that only some of the ranks run: it waits for none of the others."""
    return _replaced(group, lambda: None)


@contextlib.contextmanager
def _replaced(group: Any, meet: Callable[[], None]) -> Iterator[None]:
    """Within the block this thread's barriers of the group are that."""
    if group is None:
        yield
        return
    dist: Any = importlib.import_module("torch.distributed")
    original, thread = dist.barrier, threading.get_ident()

    @functools.wraps(original)
    def barrier(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("group")
        if given is not group or threading.get_ident() != thread:
            return original(*args, **kwargs)
        return meet()

    dist.barrier = barrier
    try:
        yield
    finally:
        dist.barrier = original
