"""The demonstration itself: a model and a KV cache give their memory back, get it again, nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import fencepool as fp

from .demo_model import Embedder, Stage, closest_pairs, say_nothing
from .measure import process_memory
from .text import count, size

WEIGHTS, KV_CACHE = "weights", "kv_cache"
# A stand-in for an engine's cache: keys and values of four layers, eight heads of 64 numbers.
_KV_TENSORS, _KV_HEADS, _KV_WIDTH = 8, 8, 64
_KV_DTYPE = torch.float16


@dataclass(frozen=True)
class Step:
    """One line of the report. Memory is in bytes, measured when the step had ended."""

    name: str
    what: str
    seconds: float
    device_free: int
    process_memory: int
    verdict: str


@dataclass
class Report:
    """All that happened. `is_ok` is the demonstration's answer."""

    device: str
    model: str
    cycles: int
    steps: list[Step] = field(default_factory=list)
    pairs: list[tuple[float, str, str]] = field(default_factory=list)
    sentences: int = 0
    numbers: int = 0  # compared bit for bit in each cycle
    is_identical: bool = True
    is_unmoved: bool = True
    released: int = 0  # bytes the pools gave back in the first pause, by fencepool's count
    unreleased: int = 0  # of these, bytes by which the driver's free memory fell short
    backed_up: int = 0  # bytes of contents that were kept in host memory meanwhile
    process_released: int = 0  # bytes by which the process shrank in the first pause

    @property
    def is_ok(self) -> bool:
        """Every embedding was the same to the bit, and no tensor moved."""
        return self.is_identical and self.is_unmoved


@dataclass(frozen=True)
class Pools:
    """Where the model and the cache are put: two pools on one device."""

    weights: fp.Pool
    cache: fp.Pool


def make_pools(device: str) -> Pools:
    """Both pools on `device`. Raises what `fp.pool` raises."""
    return Pools(fp.pool(WEIGHTS, device, backup="host"), fp.pool(KV_CACHE, device, backup="none"))


class Demo:
    """One run. The pools keep the model's tensors afterwards: they go when the model does."""

    def __init__(
        self,
        pools: Pools,
        embedder: Embedder,
        sentences: Sequence[str],
        kv_bytes: int,
        stage: Stage = say_nothing,
    ) -> None:
        """Of `embedder`, in `pools`, on `sentences`; `stage` is told what is going on."""
        self._weights, self._cache = pools.weights, pools.cache
        self._device = pools.weights.device
        self._embedder = embedder
        self._sentences = sentences
        self._kv_bytes = kv_bytes
        self._stage = stage
        self._kv: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._before = torch.empty(0)
        self._report = Report(self._device, embedder.name, cycles=0, sentences=len(sentences))

    def run(self, cycles: int, load_seconds: float = 0.0) -> Report:
        """Adopt, embed, and go through `cycles` of pause, resume and embed. Call it once.

        `load_seconds` is what loading the model took, for the report's first line. Raises what fencepool
        raises.
        """
        report = self._report
        report.cycles = cycles
        self._add("load", "model read onto the CPU", load_seconds, "ok")
        self._stage("moving the model into a pool")
        self._step("adopt", self._adopt)
        self._step("allocate", self._allocate)
        self._step("embed", self._embed)
        for cycle in range(1, cycles + 1):
            self._stage(f"pause and resume, cycle {cycle} of {cycles}")
            self._step(f"pause {cycle}", self._pause)
            if cycle == 1:
                report.process_released = report.steps[-2].process_memory - report.steps[-1].process_memory
            self._step(f"resume {cycle}", self._resume)
            self._step(f"rewrite {cycle}", self._rewrite)
            self._step(f"embed {cycle}", self._embed_again)
        return report

    def _adopt(self) -> tuple[str, str]:
        self._weights.adopt(self._embedder.module)
        tensors = self._tensors()
        outside = [tensor for tensor in tensors if not self._weights.contains(tensor)]
        total = sum(tensor.nbytes for tensor in tensors)
        if outside:
            raise fp.Error(f"{len(outside)} of {len(tensors)} tensors of the model are not in the pool")
        return f"{count(len(tensors), 'tensor')}, {size(total)}, into pool '{WEIGHTS}'", "ok"

    def _allocate(self) -> tuple[str, str]:
        row = _KV_HEADS * _KV_WIDTH * _KV_DTYPE.itemsize
        rows = max(1, self._kv_bytes // _KV_TENSORS // row)
        shape = (rows, _KV_HEADS, _KV_WIDTH)
        self._kv = [self._cache.empty(shape, dtype=_KV_DTYPE) for _ in range(_KV_TENSORS)]
        self._write_cache()
        self._addresses = [tensor.data_ptr() for tensor in (*self._tensors(), *self._kv)]
        total = sum(tensor.nbytes for tensor in self._kv)
        return f"{count(_KV_TENSORS, 'tensor')}, {size(total)}, in pool '{KV_CACHE}'", "ok"

    def _embed(self) -> tuple[str, str]:
        self._before = self._embedder.embed(self._sentences)
        self._report.numbers = self._before.numel()
        self._report.pairs = closest_pairs(self._before, self._sentences, 3)
        sentences, width = self._before.shape
        return f"{count(sentences, 'sentence')}, {width} numbers each", "reference"

    def _pause(self) -> tuple[str, str]:
        done = fp.pause(WEIGHTS, KV_CACHE, device=self._device)
        released = done.bytes_released
        copied = sum(pool.bytes_copied for pool in done.pools)
        # What counts is not our books but the driver's.
        missing = max(
            0, released - sum(memory.free_after - memory.free_before for memory in done.device_memory)
        )
        if not self._report.released:
            self._report.released, self._report.unreleased, self._report.backed_up = released, missing, copied
        # The second time nothing has changed, and the backup is still true.
        kept = f"{size(copied)} copied to the host" if copied else "nothing to copy, as nothing changed"
        what = f"{size(released)} given back, {kept}"
        return what, f"{size(missing)} short" if missing else "released"

    def _resume(self) -> tuple[str, str]:
        done = fp.resume(WEIGHTS, KV_CACHE, device=self._device)
        is_unmoved = self._addresses == [tensor.data_ptr() for tensor in (*self._tensors(), *self._kv)]
        self._report.is_unmoved &= is_unmoved
        copied = size(sum(pool.bytes_copied for pool in done.pools))
        copying = f"{copied} copied back" if done.host_held else f"copying {copied} back"
        what = f"{size(done.bytes_mapped)} mapped, {copying}"
        return what, "same address" if is_unmoved else "MOVED"

    def _rewrite(self) -> tuple[str, str]:
        # It has no backup, so what it holds now is undefined, and an engine fills it anew.
        self._write_cache()
        return f"{KV_CACHE} written anew", "ok"

    def _embed_again(self) -> tuple[str, str]:
        after = self._embedder.embed(self._sentences)
        is_identical = torch.equal(self._before, after)
        self._report.is_identical &= is_identical
        return "same sentences again", "identical" if is_identical else "DIFFERENT"

    def _write_cache(self) -> None:
        for tensor in self._kv:
            tensor.fill_(1)
        if self._kv[0].is_cuda:
            torch.cuda.synchronize(self._kv[0].device)

    def _tensors(self) -> list[torch.Tensor]:
        # buffers() has those that are not saved with a model too, such as position ids.
        return [*self._embedder.module.parameters(), *self._embedder.module.buffers()]

    def _step(self, name: str, action: Callable[[], tuple[str, str]]) -> None:
        begin = time.perf_counter()
        what, verdict = action()
        self._add(name, what, time.perf_counter() - begin, verdict)

    def _add(self, name: str, what: str, seconds: float, verdict: str) -> None:
        free, _ = fp.memory_info(self._device)
        self._report.steps.append(Step(name, what, seconds, free, process_memory(), verdict))
