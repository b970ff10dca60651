"""Moving existing tensors into a pool: shared storages stay shared, views stay views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fencepool import _core
from fencepool._tensors import storage_over, tensor_over
from fencepool.errors import PoolPausedError
from fencepool.pools import _retry_without_cache

if TYPE_CHECKING:
    from fencepool.pools import Pool

# A storage, as tensors share it: its device and where its bytes start.
StorageKey = tuple[str, int]


@dataclass
class _Move:
    tensors: list[torch.Tensor]
    storages: dict[StorageKey, torch.UntypedStorage]


def adopt(pool: Pool, owner: Any) -> None:
    """Move a module's parameters and buffers, or one tensor, into ``pool``. See :meth:`Pool.adopt`."""
    move = _plan(pool, _tensors_of(owner))
    keys = list(move.storages)
    sizes = [move.storages[key].nbytes() for key in keys]
    blocks = _retry_without_cache(lambda: pool._core.allocate_batch(sizes))
    # Until the swap below nothing of the owner has changed: a failure just drops the new storages.
    moved: dict[StorageKey, torch.UntypedStorage] = {}
    for key, block in zip(keys, blocks, strict=True):
        moved[key] = storage_over(block, move.storages[key].nbytes())
        source = move.storages[key]
        if source.device.type == "cuda" and str(source.device) != pool.torch_device:
            # Pool memory is reachable from its own device only; another GPU would write to it directly.
            source = source.cpu()  # type: ignore[no-untyped-call]
        moved[key].copy_(source)
    swaps = [(tensor, _like(tensor, moved[_key(tensor)])) for tensor in move.tensors]
    with torch.no_grad():
        for tensor, replacement in swaps:
            tensor.data = replacement


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The same view, of other storage."""
    view = tensor_over(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    if tensor.is_conj():  # conjugation and negation that PyTorch puts off are part of the view
        view = view.conj()
    if tensor.is_neg():
        view = torch._neg_view(view)
    return view


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor holds its data itself: a wrapper subclass holds other tensors instead."""
    try:
        storage = tensor.untyped_storage()
        return storage.nbytes() == 0 or storage.data_ptr() != 0
    except (RuntimeError, NotImplementedError):  # PyTorch's answer for storages that are none
        return False


def _tensors_of(owner: Any) -> list[torch.Tensor]:
    if isinstance(owner, torch.nn.Module):
        return [*owner.parameters(), *owner.buffers()]
    if isinstance(owner, torch.Tensor):
        if not owner.is_contiguous():
            raise ValueError(
                "a tensor that is adopted by itself must be contiguous; adopt the module it belongs to"
            )
        return [owner]
    raise TypeError(f"a pool adopts a torch.nn.Module or a torch.Tensor, not {type(owner).__name__}")


def _key(tensor: torch.Tensor) -> StorageKey:
    storage = tensor.untyped_storage()
    return (str(storage.device), storage.data_ptr())


def _plan(pool: Pool, tensors: list[torch.Tensor]) -> _Move:
    """Check every tensor before anything changes, and find the storages to move."""
    move = _Move([], {})
    paused = [other for other in _core.pools() if other.status()["is_paused"]]
    for tensor in tensors:
        if _is_left_alone(pool, tensor):
            continue
        key = _key(tensor)
        for other in paused:
            if other.contains(key[1]):
                raise PoolPausedError(
                    f"a tensor lies in pool {other.tag!r}, which is paused; resume it first"
                )
        storage = tensor.untyped_storage()
        known = move.storages.get(key)
        if known is None or known.nbytes() < storage.nbytes():
            move.storages[key] = storage
        move.tensors.append(tensor)
    return move


def _is_left_alone(pool: Pool, tensor: torch.Tensor) -> bool:
    """Whether a tensor has nothing to move. Raises when it cannot be moved."""
    if tensor.is_meta:
        raise ValueError(
            "a tensor on the meta device holds no data; materialise the module first (to_empty, load)"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"only dense tensors on a CPU or a CUDA device can be adopted, not a {tensor.layout} tensor "
            f"on {tensor.device}"
        )
    if not _has_storage(tensor):
        raise ValueError(f"a {type(tensor).__name__} has no storage of its own and cannot be adopted")
    if tensor.untyped_storage().nbytes() == 0:
        return True
    if tensor.grad is not None and str(tensor.device) != pool.torch_device:
        raise ValueError(
            "a parameter with a gradient cannot change its device; zero_grad(set_to_none=True) first"
        )
    return pool._core.contains(tensor.untyped_storage().data_ptr())
