"""What of PyTorch has to know that everything is led into a pool: TMS_INIT_ENABLE on a GPU.

Four functions are wrapped: the one that chooses a device, the two that begin and end a capture, and the one
that empties the cache, which PyTorch refuses while a MemPool is active (c10/cuda/CUDACachingAllocator.cpp,
synchronize_and_free_events).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

from fencepool.pytorch.cuda_regions import MemPoolRoute

if TYPE_CHECKING:
    from fencepool.integrations.torch_memory_saver._ambient import Ambient


class WholeProcessRoute(MemPoolRoute):
    """All threads' allocations on a device into one MemPool."""

    def begin(self) -> None:
        """From here on."""
        torch._C._cuda_beginAllocateToPool(self._ordinal, self._id)


def install(ambient: Ambient) -> None:
    """Have PyTorch tell the region when CUDA is first used, and keep out of the way of the rest."""
    _follow_device(ambient)
    _keep_out_of_captures(ambient)
    _let_the_cache_be_emptied(ambient)


def _follow_device(ambient: Ambient) -> None:
    set_device = torch.cuda.set_device
    choosing = threading.local()

    @functools.wraps(set_device)
    def chosen(device: Any) -> None:
        choosing.now = True  # the first call initialises CUDA, on a device that is not the one meant
        try:
            set_device(device)
        finally:
            choosing.now = False
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            ambient.follow()

    def initialised() -> None:
        if not getattr(choosing, "now", False):
            ambient.follow()

    torch.cuda.set_device = chosen
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        ambient.follow()
    else:
        torch.cuda._lazy_call(initialised)  # type: ignore[no-untyped-call]


def _keep_out_of_captures(ambient: Ambient) -> None:
    # A graph's memory would be led to the region, and be reused there though replays need it.
    graph_class: Any = torch.cuda.CUDAGraph
    begin, end = graph_class.capture_begin, graph_class.capture_end
    captures: dict[int, contextlib.ExitStack] = {}  # by the graph's id

    @functools.wraps(begin)
    def capture_begin(graph: Any, *arguments: Any, **options: Any) -> Any:
        with contextlib.ExitStack() as outside:
            outside.enter_context(ambient.left())
            result = begin(graph, *arguments, **options)
            captures[id(graph)] = outside.pop_all()
        return result

    @functools.wraps(end)
    def capture_end(graph: Any) -> Any:
        try:
            return end(graph)
        finally:
            captures.pop(id(graph), contextlib.ExitStack()).close()

    graph_class.capture_begin, graph_class.capture_end = capture_begin, capture_end


def _let_the_cache_be_emptied(ambient: Ambient) -> None:
    empty_cache: Any = torch.cuda.empty_cache

    @functools.wraps(empty_cache)
    def emptied(*arguments: Any, **options: Any) -> Any:
        with ambient.renewed():
            return empty_cache(*arguments, **options)

    torch.cuda.empty_cache = torch.cuda.memory.empty_cache = emptied
