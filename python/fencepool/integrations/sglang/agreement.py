"""One answer from all tensor-parallel ranks."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

_Said = TypeVar("_Said")


def gather(group: Any, said: _Said) -> list[_Said]:
    """What every rank of the group says, by rank. Every rank has to call it, and waits for the others.

    Args:
        group: SGLang's CPU group of the tensor-parallel ranks; None when there is one rank.
        said: what this rank says; it is pickled.
    """
    if group is None:
        return [said]
    dist = importlib.import_module("torch.distributed")
    size = dist.get_world_size(group=group)
    if size == 1:
        return [said]
    heard: list[Any] = [None] * size
    dist.all_gather_object(heard, said, group=group)
    return heard


def failures(outcomes: list[str]) -> str:
    """The ranks that failed and why; an empty outcome is a success."""
    is_many = len(outcomes) > 1
    return "; ".join(
        f"rank {rank}: {outcome}" if is_many else outcome for rank, outcome in enumerate(outcomes) if outcome
    )
