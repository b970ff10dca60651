"""What a scheduler's process has released. Pools are the process's, and so is this."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import fencepool as fp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"


@dataclass
class Occupation:
    """The state behind the hooks. Used by the scheduler's thread alone."""

    device_type: str = ""
    """SGLang's ``device`` once a scheduler is made: "cuda", "cpu"."""
    released: set[str] = field(default_factory=set)
    """Tags that were released and not resumed since, those without pools included."""
    blocked: set[str] = field(default_factory=set)
    """Those of them without which no request may run. Asked on every turn of the scheduler's loop."""
    fences: dict[str, fp.Fence] = field(default_factory=dict)
    """The end of each tag's latest restore."""
    is_flush_due: bool = False
    """Whether SGLang flushed its cache while the cache's memory was away."""
    is_guarded: bool = False
    """While SGLang's own code releases or resumes: its calls of the adapter act on nothing then."""
    deferred: list[tuple[Any, float]] = field(default_factory=list)
    """Releases that wait for an idle scheduler, and until when."""
    retried: dict[int, float] = field(default_factory=dict)
    """Deadlines of those that are being tried again, by the identity of the request."""

    def device(self) -> str:
        """Where pools are made now."""
        torch = sys.modules["torch"]
        if self.device_type == "cpu" or not torch.cuda.is_available():
            return "cpu"
        return f"cuda:{torch.cuda.current_device()}"

    def mark_released(self, tags: Iterable[str]) -> None:
        """From here on the tags count as released, and requests that need them do not run."""
        tags = set(tags)
        self.released |= tags
        # Weights and KV cache always have memory; a CUDA graph's may be none of ours.
        self.blocked |= (tags & {WEIGHTS, KV_CACHE}) | set(with_pools(tags))

    def mark_resumed(self, tags: Iterable[str]) -> None:
        """The tags are there again."""
        tags = set(tags)
        self.released -= tags
        self.blocked -= tags

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """While SGLang's own release or resume runs."""
        self.is_guarded = True
        try:
            yield
        finally:
            self.is_guarded = False


occupation = Occupation()


def with_pools(tags: Iterable[str]) -> list[str]:
    """Those of the tags that have a pool. SGLang releases "cuda_graph" whether there is one or not."""
    known = {status.tag for status in fp.status()}
    return [tag for tag in tags if tag in known]


def pause(tags: Iterable[str]) -> None:
    """Pause every pool of the tags, all or nothing; tags without pools are none."""
    chosen = with_pools(tags)
    if chosen:
        fp.pause(*chosen)


def resume(tags: Iterable[str], wait: float) -> None:
    """Resume every pool of the tags, all or nothing, and keep the fence for those that were paused."""
    chosen = with_pools(tags)
    if chosen:
        resumed = fp.resume(*chosen, wait=wait)
        changed = {pool.tag for pool in resumed.pools if pool.changed}
        occupation.fences.update(dict.fromkeys(changed, resumed.fence))
