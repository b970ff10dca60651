"""PyTorch's CPU allocations into pools of the embedded driver.

PyTorch's CPU allocator cannot be replaced for one thread. Instead every operator's result that came with
new storage is moved into the pool before anyone else sees it: to its caller it was made there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fencepool import _regions
from fencepool._tensors import storage_over

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepool.pools import Pool

_aten = torch.ops.aten
# Their results hold nothing yet, so nothing is copied.
_EMPTY = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}


class _Current(threading.local):
    """What holds for this thread."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.has_mode = False


_current = _Current()


class _MovesResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves what operators return into the thread's current pool, when its storage is new."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        pool = _current.pool
        if pool is None:
            return result
        made = [leaf for leaf in tree_leaves(result) if _is_plain(leaf)]
        if made:
            given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
            _move(pool, made, given, is_empty=getattr(func, "overloadpacket", None) in _EMPTY)
        return result


def _move(pool: Pool, tensors: list[torch.Tensor], given: set[int], *, is_empty: bool) -> None:
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        old = tensor.untyped_storage()
        if old._cdata in given or old.nbytes() == 0 or pool._core.contains(old.data_ptr()):
            continue
        if old._cdata not in moved:
            moved[old._cdata] = _moved(pool, old, is_empty=is_empty)
        tensor.set_(moved[old._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())


def _moved(pool: Pool, old: torch.UntypedStorage, *, is_empty: bool) -> torch.UntypedStorage:
    size = old.nbytes()
    new = storage_over(pool._core.allocate(size), size)
    if not is_empty:
        new.copy_(old)
    return new


def _is_plain(leaf: Any) -> bool:
    """A tensor that holds CPU memory itself."""
    return (
        type(leaf) in (torch.Tensor, torch.nn.Parameter)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_quantized
    )


class _PoolRoute:
    """A thread's CPU allocations into one pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def begin(self) -> None:
        _current.pool = self.pool

    def end(self) -> None:
        _current.pool = None


@contextlib.contextmanager
def _mode() -> Iterator[None]:
    """One mode a thread, by its outermost region: modes of others may lie between regions."""
    if _current.has_mode:
        yield
        return
    _current.has_mode = True
    try:
        with _MovesResults():  # type: ignore[no-untyped-call]
            yield
    finally:
        _current.has_mode = False


@contextlib.contextmanager
def inside(pool: Pool) -> Iterator[None]:
    """Lead this thread's CPU allocations into the pool."""
    # Whatever the pool's device of the embedded driver, PyTorch knows one "cpu": the innermost wins.
    with _mode(), _regions.entered("cpu", _PoolRoute(pool)):
        yield
