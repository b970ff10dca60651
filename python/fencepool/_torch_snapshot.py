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
    if not knows_mem_pools():  # an older one, which is given nothing
        return list(ask())
    if _drops_references(ask):
        for number in _given(ask, mem_pool_id):
            _add_reference(number)
    return list(ask(mem_pool_id, **_options(ask)))


def knows_mem_pools() -> bool:
    """Whether this PyTorch can be asked about one MemPool. It has to be imported."""
    return "mempool_id" in _parameters(sys.modules["torch"].cuda.memory_snapshot)


@functools.cache
def _parameters(ask: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(ask).parameters)


def _options(ask: Callable[..., Any]) -> dict[str, bool]:
    # Newer releases add the history that a program may be recording, which can be much.
    return {"include_traces": False} if "include_traces" in _parameters(ask) else {}


def _given(ask: Callable[..., Any], mem_pool_id: MemPoolId | None) -> tuple[int, ...]:
    """What PyTorch passes on to the function that drops references."""
    if options := _options(ask):
        return (*(mem_pool_id or (0, 0)), *options.values())
    return mem_pool_id or ()


@functools.cache
def _drops_references(ask: Callable[..., Any]) -> bool:
    """Try it, with numbers that only this function knows."""
    unknown = (int("4000000001"), int("4000000002"))  # no MemPool's id
    for number in _given(ask, unknown):  # beforehand: whatever comes in between, none is missing
        _add_reference(number)
    before = _references(unknown)
    ask(unknown, **_options(ask))
    return _references(unknown) != before


def _references(numbers: MemPoolId) -> list[int]:
    return [sys.getrefcount(number) for number in numbers]


def _add_reference(number: int) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
