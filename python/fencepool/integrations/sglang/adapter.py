"""SGLang's memory-saver adapter, over pools."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import fencepool as fp
from fencepool.integrations.sglang import settings, state, versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


def create(original: Callable[..., Any], enable: bool, *args: Any, **kwargs: Any) -> Any:
    """Around ``TorchMemorySaverAdapter.create``: ours where a real one is asked for."""
    return adapter_class()() if enable else original(enable, *args, **kwargs)


def is_ours(adapter: Any) -> bool:
    """Whether the memory saver in use is fencepool's."""
    return isinstance(adapter, adapter_class())


@functools.cache
def adapter_class() -> type:
    """The adapter, a subclass of SGLang's own; made on first use, since SGLang is imported for it."""
    base = versions.resolve(versions.layout().adapter)
    return type("FencepoolAdapter", (PoolAdapter, base), {"__doc__": PoolAdapter.__doc__})


class PoolAdapter:
    """Regions and graphs go into pools of their tag; the policy follows ``enable_cpu_backup``."""

    enabled = True

    def check_validity(self, caller_name: str) -> None:
        """Nothing can be missing."""

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Child processes need nothing: no LD_PRELOAD, no variable."""
        return contextlib.nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[Any]:
        """Allocations go into the pool of that tag and policy on this process's device."""
        return fp.pool(tag, state.occupation.device(), backup=_backup(enable_cpu_backup)).region()

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = state.CUDA_GRAPH,
        enable_cpu_backup: bool = True,
    ) -> AbstractContextManager[Any]:
        """``torch.cuda.graph`` whose memory is in the pool of that tag and policy.

        Replays read what the capture left, so that there is a backup unless SGLang says otherwise. Releases
        before 0.5.23 do not say.
        """
        return fp.cuda_graph(
            cuda_graph,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
            tag=tag,
            backup=_backup(enable_cpu_backup),
        )

    def disable(self) -> AbstractContextManager[Any]:
        """Allocations inside go where they would go without a region."""
        return fp.disable()

    def pause(self, tag: str) -> None:
        """Pause the tag, unless a guarded release is going to pause all of its tags at once."""
        if not state.occupation.is_guarded:
            state.pause([tag])
            state.occupation.mark_released([tag])

    def resume(self, tag: str) -> None:
        """Resume the tag, unless a guarded resume has resumed all of its tags before."""
        if not state.occupation.is_guarded:
            state.resume([tag], settings.wait_seconds())
            state.occupation.mark_resumed([tag])


def _backup(enable_cpu_backup: bool) -> Any:
    return "host" if enable_cpu_backup else "none"
