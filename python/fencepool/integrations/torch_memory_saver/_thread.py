"""What each thread is in the middle of: its regions and disable() blocks, innermost last."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepool.pools import Backup


@dataclass(frozen=True)
class Scope:
    """One region, capture or disable() block."""

    tag: str
    backup: Backup
    is_pausable: bool = True
    backend: str = ""
    """What was asked for; it changes nothing."""


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.entered: list[Scope] = []


_scopes = _Scopes()


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Within the block the calling thread is in that scope.

    Blocks need not be left in the order of entering, nor by the thread that entered: generators are not.
    """
    mine = _scopes.entered
    mine.append(scope)
    try:
        yield
    finally:
        del mine[max(at for at, one in enumerate(mine) if one is scope)]


def innermost() -> Scope | None:
    """The scope that this thread's allocations go by; None outside of all."""
    return _scopes.entered[-1] if _scopes.entered else None
