"""The surface of vLLM's ``CuMemAllocator``, over pools.

vLLM says only when it sleeps which tags keep their contents: level 1 keeps the weights, level 2 nothing.
So every tag is a pool with a backup, and a sleep discards the tags that are not to be kept.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import TYPE_CHECKING, ClassVar

from fencepool.errors import PoolBusyError
from fencepool.integrations.vllm import _settings
from fencepool.pools import Pool, pool
from fencepool.transitions import _pause, _resume, _warn_of_unreleased

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from fencepool.pytorch.cuda_regions import MemPools

# vLLM's tags are common words. With this before them its pools never are another part's pools, as those of
# a trainer in the same process.
PREFIX = "vllm:"
_PAUSE_TIMEOUT = 60.0  # seconds for the work in flight
_GIB = 1 << 30
_making = threading.Lock()


class CuMemAllocator:
    """vLLM's allocator for sleep mode. One for the process, given out by :meth:`get_instance`.

    A tag is the pool ``vllm:<tag>``. Sleeping and waking is all or nothing: when one raises, every pool is
    as it was and the same call can be made again. What is asleep already stays as it is. Thread-safe.
    """

    instance: ClassVar[CuMemAllocator | None] = None
    default_tag: ClassVar[str] = "default"
    # The tags that a wake-up of other tags leaves asleep; None: all of them. From vLLM, see _plugin.py.
    deferrable_tags: ClassVar[tuple[str, ...] | None] = None

    @staticmethod
    def get_instance() -> CuMemAllocator:
        """The one allocator of this process."""
        with _making:
            if CuMemAllocator.instance is None:
                CuMemAllocator.instance = CuMemAllocator()
            return CuMemAllocator.instance

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, Pool] = {}  # by id
        self._graphs: tuple[MemPools, torch.cuda.MemPool] | None = None  # what graphs are captured into

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """PyTorch's allocations of this thread go to that tag's pool. Nests; the innermost counts.

        Raises:
            TypeError: the tag is no string.
            PoolPausedError: on entry, the tag is asleep.
            DriverUnavailable: fencepool cannot use the device here.
        """
        with self._pool(self.default_tag if tag is None else tag).region():
            yield

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Give the memory of every tag away; return when the driver reports it free.

        Args:
            offload_tags: the tags whose contents are kept in host memory; those of all others are dropped.
                The default tag when None.

        Raises:
            TypeError: it is no collection of tags.
            PoolBusyError: a region of a tag is entered.
            QuiesceTimeout: work in flight did not end within 60 seconds.
            HostMemoryError: too little host memory for the contents.
            DriverError: a driver call failed.
        """
        kept = _tags(self.default_tag if offload_tags is None else offload_tags)
        self._pause(self._known(), kept)

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Give the memory of those tags away and drop the contents. A tag without memory is no error.

        Raises as :meth:`sleep` does.
        """
        chosen = _tags(tags)
        self._pause([own for own in self._known() if _tag_of(own) in chosen], kept=())

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take memory again, at the same addresses. The device's later work runs after the contents are back.

        While memory is short it waits for ``FENCEPOOL_VLLM_WAIT`` seconds. A tag without memory, or one
        that is awake, is no error.

        Args:
            tags: which to wake. All when None.

        Raises:
            TypeError: it is no collection of tags.
            OutOfMemoryError: the memory did not become free in time; all of these tags are still asleep.
            DriverError: a driver call failed; the same holds.
        """
        chosen = None if tags is None else _tags(tags)
        woken = [own for own in self._known() if self._is_woken(own, chosen)]
        resumed = _resume(woken, _settings.wait(), "context")
        _settings.logger.info(
            "fencepool: took %.2f GiB again for %s, in %.3f s",
            resumed.bytes_mapped / _GIB,
            ", ".join(_tag_of(own) for own in woken) or "no tag",
            resumed.seconds["total"],
        )

    def get_current_usage(self) -> int:
        """Bytes that allocations take, asleep or awake, in whole segments."""
        return sum(own.status().bytes_reserved for own in self._known())

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """The id of a memory pool for CUDA graph captures, whose memory has the tag "cudagraph".

        Raises:
            PoolPausedError: the tag is asleep.
            ValueError: ``FENCEPOOL_DEVICE`` is no GPU, and there is nothing to capture.
        """
        owner = self._pool("cudagraph")
        if owner.torch_device == "cpu":
            raise ValueError("CUDA graphs are captured on a GPU, and FENCEPOOL_DEVICE is the embedded driver")
        from fencepool.pytorch import cuda_regions, regions

        owner._prepare_torch()
        with self._lock:
            if self._graphs is None:
                mem_pools = cuda_regions.mem_pools_of(owner)
                self._graphs = (mem_pools, mem_pools.make())
            memory = self._graphs[1]
        # The capture itself leads allocations there; a region around it would take some away.
        with regions.occupied(owner), regions.disable():
            yield memory.id

    def release_pools(self) -> None:
        """Give back what the pools hold and forget those without live tensors. Harmless when repeated."""
        with self._lock:
            graphs, self._graphs = self._graphs, None
        if graphs is not None:
            mem_pools, memory = graphs
            mem_pools.give_up(memory)
        gc.collect()
        for own in self._known():
            try:
                own.close()
            except PoolBusyError as busy:  # its tensors outlive the engine: it stays, and its memory with it
                _settings.logger.debug("fencepool: %s", busy)
                continue
            with self._lock:
                self._pools.pop(own._core.id, None)

    def close(self) -> None:
        """The same as :meth:`release_pools`."""
        self.release_pools()

    def _pool(self, tag: str) -> Pool:
        if not isinstance(tag, str):
            raise TypeError(f"a tag is a string, not {type(tag).__name__}")
        made = pool(PREFIX + tag, _settings.device(), backup="host", retain=_settings.is_retaining())
        with self._lock:
            return self._pools.setdefault(made._core.id, made)

    def _known(self) -> list[Pool]:
        """In the order of ids, in which transitions take them."""
        with self._lock:
            return [self._pools[number] for number in sorted(self._pools)]

    def _is_woken(self, own: Pool, chosen: Collection[str] | None) -> bool:
        if chosen is None or _tag_of(own) in chosen:
            return True
        return self.deferrable_tags is not None and _tag_of(own) not in self.deferrable_tags

    def _pause(self, pools: list[Pool], kept: Collection[str]) -> None:
        gc.collect()  # what is garbage need not be copied
        _warn_of_conflicts(pools, kept)
        dropped = {own._core.id for own in pools if _tag_of(own) not in kept}
        report = _pause(pools, _PAUSE_TIMEOUT, dropped)
        _warn_of_unreleased(report, stacklevel=4)
        _empty_torch_cache(pools)
        _settings.logger.info(
            "fencepool: freed %.2f GiB, of which %.2f GiB of contents are kept in host memory, in %.3f s",
            report.bytes_released / _GIB,
            sum(one.bytes_copied for one in report.pools) / _GIB,
            report.seconds["total"],
        )


def _tag_of(own: Pool) -> str:
    """The tag as vLLM says it."""
    return own.tag[len(PREFIX) :]


def _tags(tags: Collection[str] | str) -> tuple[str, ...]:
    """One tag or several, as a tuple."""
    if isinstance(tags, str):
        return (tags,)
    if not isinstance(tags, (tuple, list, set, frozenset)) or not all(isinstance(tag, str) for tag in tags):
        raise TypeError(f"tags are one string or a collection of them, not {tags!r}")
    return tuple(tags)


def _warn_of_conflicts(pools: list[Pool], kept: Collection[str]) -> None:
    """What is asleep keeps what it kept; say so where something else is asked for now."""
    for own in pools:
        status = own.status()
        if status.state != "paused" or status.bytes_used == 0:
            continue
        was_kept = status.bytes_backed_up > 0
        if was_kept != (_tag_of(own) in kept):
            _settings.logger.warning(
                "fencepool: %r is asleep already, its contents %s; that stays so until it is woken",
                _tag_of(own),
                "kept" if was_kept else "discarded",
            )


def _empty_torch_cache(pools: list[Pool]) -> None:
    """Give PyTorch's own cached blocks back too: a sleep is there to make room for others."""
    for ordinal in {own._core.ordinal for own in pools if own._core.provider == "cuda"}:
        from fencepool.pytorch import cuda_regions

        cuda_regions.empty_cache(ordinal)
