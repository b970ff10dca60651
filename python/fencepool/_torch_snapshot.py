"""PyTorch's account of the segments it holds, asked for without harm to what it is asked with.

``torch._C._cuda_memorySnapshot`` drops a reference to each number it is given and owns none (PyTorch's pull
request 196366; 2.8 to 2.13 at least). A number that nothing else refers to is then freed while it is in use,
and the process dies later, anywhere. Small numbers are spared, which hides it: before Python 3.12 until their
many references are used up, since then for good, so that it begins with the 257th MemPool of a process.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import operator
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MemPoolId = tuple[int, int]


def segments(mem_pool_id: MemPoolId | None = None) -> list[dict[str, Any]]:
    """Those of a MemPool, or of all devices; empty for a MemPool that holds none. PyTorch has to be imported.

    Thread-safe.
    """
    ask = sys.modules["torch"].cuda.memory_snapshot
    parameters = _parameters(ask)
    # Newer releases add the history that a program may be recording, which can be much.
    options = {"include_traces": False} if "include_traces" in parameters else {}
    if "mempool_id" not in parameters:  # before 2.7, which is given nothing
        return list(ask(**options))
    if _drops_references(ask):
        for number in (*(mem_pool_id or (0, 0)), False):
            _add_reference(number)
    return list(ask(mem_pool_id, **options))


@functools.cache
def _parameters(ask: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(ask).parameters)


@functools.cache
def _drops_references(ask: Callable[..., Any]) -> bool:
    """Try it, with numbers that only this function knows."""
    options = {"include_traces": False} if "include_traces" in _parameters(ask) else {}
    unknown = (int("4000000001"), int("4000000002"))  # no MemPool's id
    spare = list(unknown)  # so that they outlive the loss of a reference
    before = _references(unknown)
    ask(unknown, **options)
    after = _references(unknown)
    for number, lost in zip(unknown, map(operator.sub, before, after), strict=True):
        for _ in range(lost):
            _add_reference(number)
    del spare
    return after != before


def _references(numbers: tuple[int, ...]) -> list[int]:
    return [sys.getrefcount(number) for number in numbers]


def _add_reference(number: int) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
