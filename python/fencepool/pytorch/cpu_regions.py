"""PyTorch's CPU allocations into pools of the embedded driver.

PyTorch's CPU allocator cannot be replaced for one thread. Instead every operator's result that came with
new storage is moved into the pool before anyone else sees it: to its caller it was made there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from fencepool import _core
from fencepool._tensors import storage_over, tensor_over
from fencepool.pytorch import regions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepool.pools import Pool

_aten = torch.ops.aten
# Their results hold nothing yet: they are made in the pool at once, without memory elsewhere before.
_EMPTY = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
# What torch.tensor() ends with: storage that no operator made.
_LIFT = {_aten.lift, _aten.lift_fresh}


class _MovesResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves what operators return into the thread's current pool, when its storage is new."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        route = regions.innermost("cpu")
        pool = route.pool if isinstance(route, PoolRoute) else _beneath.pool
        if pool is None or _core.is_forked_child():
            return func(*args, **kwargs)
        packet = getattr(func, "overloadpacket", None)
        # A mode below, a tracer's, has to see every call.
        if packet in _EMPTY and _get_current_dispatch_mode() is None:
            return _empty(pool, func, args, kwargs)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if _is_plain(leaf)]
        if made:
            given = tree_leaves((args, kwargs)) if packet not in _LIFT else []
            with torch._C._DisableTorchDispatch():  # nor may a tracer below record what is done here
                _move(pool, made, {leaf.untyped_storage()._cdata for leaf in given if _is_plain(leaf)})
        return result


def _empty(pool: Pool, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    where = torch.device(kwargs.get("device") or (like.device if like is not None else "cpu"))
    is_dense = kwargs.get("layout") in (None, torch.strided) and (like is None or _is_plain(like))
    if where.type != "cpu" or not is_dense:
        return func(*args, **kwargs)
    shaped = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": False})
    size = shaped.untyped_storage().nbytes() if shaped.layout is torch.strided else 0
    if size == 0 or shaped.is_quantized or not _is_plain_type(shaped):
        return func(*args, **kwargs)
    storage = storage_over(pool._core.allocate(size), size)
    return tensor_over(storage, shaped.dtype, shaped.shape, shaped.stride(), int(shaped.storage_offset()))


def _move(pool: Pool, tensors: list[torch.Tensor], given: set[int]) -> None:
    moved: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        old = tensor.untyped_storage()
        size = old.nbytes()
        if old._cdata in given or size == 0 or pool._core.contains(old.data_ptr()):
            continue
        if old._cdata not in moved:
            moved[old._cdata] = storage_over(pool._core.allocate(size), size)
            moved[old._cdata].copy_(old)
        tensor.set_(moved[old._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_plain(leaf: Any) -> bool:
    """A tensor that holds CPU memory itself."""
    return (
        isinstance(leaf, torch.Tensor)
        and _is_plain_type(leaf)
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and not leaf.is_quantized
        and not leaf.is_nested
        and not leaf._is_zerotensor()  # zeros that have no memory, of forward-mode differentiation
    )


def _is_plain_type(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


class PoolRoute:
    """A thread's CPU allocations into one pool. The mode asks for the innermost."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def begin(self) -> None:
        """See :class:`regions.Route`."""

    def end(self) -> None:
        """See :class:`regions.Route`."""


class _Beneath(threading.local):
    """Where a thread's allocations go outside of regions."""

    def __init__(self) -> None:
        self.pool: Pool | None = None


_beneath = _Beneath()


class BeneathRoute(PoolRoute):
    """A thread's CPU allocations outside of regions into one pool; see :func:`regions.lie_beneath`."""

    def begin(self) -> None:
        """See :class:`regions.Route`."""
        _beneath.pool = self.pool

    def end(self) -> None:
        """See :class:`regions.Route`."""
        _beneath.pool = None


class _ThreadMode(threading.local):
    """The one mode of a thread, from its first region to its last: modes of others may lie in between."""

    def __init__(self) -> None:
        self.mode: _MovesResults | None = None
        self.users: set[object] = set()

    def settle(self) -> None:
        if self.users and self.mode is None:
            self.mode = _MovesResults()  # type: ignore[no-untyped-call]
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        elif not self.users and self.mode is not None and _get_current_dispatch_mode() is self.mode:
            # Under a mode that was entered later it stays, and does nothing outside of regions.
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


_thread_mode = _ThreadMode()


@contextlib.contextmanager
def mode() -> Iterator[None]:
    """The thread's mode is there, by the first that asks until the last has left."""
    user, users = object(), _thread_mode.users
    try:
        users.add(user)
        _thread_mode.settle()
        yield
    finally:
        users.discard(user)
        _thread_mode.settle()  # of the thread that leaves, which may be another one


@contextlib.contextmanager
def inside(pool: Pool) -> Iterator[None]:
    """Lead this thread's CPU allocations into the pool."""
    # Whatever the pool's device of the embedded driver, PyTorch knows one "cpu": the innermost wins.
    with mode(), regions.entered("cpu", PoolRoute(pool)):
        yield
