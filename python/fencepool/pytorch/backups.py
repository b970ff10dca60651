"""Reading tensors from a paused pool's backup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.utils.dlpack

from fencepool._tensors import span_of, tensor_over
from fencepool.errors import UnsupportedError
from fencepool.pools import exclusive

if TYPE_CHECKING:
    from fencepool.pools import Pool


def backup_of(pool: Pool, tensor: torch.Tensor, *, is_copied: bool) -> torch.Tensor:
    """See :meth:`Pool.backup_of`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"backup_of() takes a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(
            f"a {tensor.layout} tensor has not one storage to read; read the tensors it is made of"
        )
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if str(tensor.device) != pool.torch_device:
        raise ValueError(f"{pool!r} holds no tensors of {tensor.device}")
    if pool.backup == "disk" and not is_copied:
        raise UnsupportedError(
            f"{pool!r} keeps its contents in a file, which has no view; copy=True reads it"
        )
    if is_copied:
        with exclusive(pool):  # a resume and a pause in between would give some pieces of another time
            whole = torch.cat(_pieces(pool, tensor, is_viewed=False))
    else:
        pieces = _pieces(pool, tensor, is_viewed=True)
        if len(pieces) > 1:
            raise ValueError(
                f"the backup of this tensor is in {len(pieces)} pieces of host memory and has no one view; "
                "copy=True puts them together"
            )
        whole = pieces[0]
    view = tensor_over(whole.untyped_storage(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.is_conj():  # conjugation and negation that PyTorch puts off are part of the view
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def _pieces(pool: Pool, tensor: torch.Tensor, *, is_viewed: bool) -> list[torch.Tensor]:
    return [
        torch.utils.dlpack.from_dlpack(piece.to_dlpack())
        for piece in pool._core.backup_of(*span_of(tensor), is_viewed)
    ]
