"""Torch tensors over blocks of a pool. Imported only when a tensor is wanted: it needs PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

if TYPE_CHECKING:
    from fencepool import _core
    from fencepool.fences import Fence
    from fencepool.pools import Pool

# More than any address space fencepool runs in; a size beyond it is a slip, not a wish.
MAX_BYTES = 1 << 47


def parse_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of sizes.

    Raises:
        TypeError: it is neither an integer nor a sequence of integers.
        ValueError: a size is negative.
    """
    sizes = (shape,) if isinstance(shape, int) and not isinstance(shape, bool) else shape
    if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
        raise TypeError(f"a shape is an integer or a sequence of integers, not {type(shape).__name__}")
    if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        raise TypeError(f"a shape holds integers only: {tuple(sizes)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"a shape holds no negative sizes: {tuple(sizes)}")
    return tuple(int(size) for size in sizes)


def parse_dtype(dtype: Any) -> torch.dtype:
    """A dtype, PyTorch's default when None."""
    if dtype is None:
        return torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is a torch.dtype, not {type(dtype).__name__}")
    return dtype


def byte_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a dense tensor; ValueError when no address space holds them."""
    size = math.prod(shape) * dtype.itemsize
    if size > MAX_BYTES:
        raise ValueError(
            f"a tensor of shape {shape} and {dtype} takes {size} bytes, beyond the address space"
        )
    return size


def storage_over(block: _core.Block, size: int) -> torch.UntypedStorage:
    """The first ``size`` bytes of a block as a storage that keeps the block alive. No copy."""
    return torch.utils.dlpack.from_dlpack(block.to_dlpack(size)).untyped_storage()


def tensor_over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor on that storage; strides and offset count elements."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    if strides is None:
        strides = dense_strides(shape)
    return tensor.set_(storage, offset, tuple(shape), tuple(strides))


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a strided tensor begins, and the bytes from there to its last element's end, gaps included."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr(), (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def fence_for(fence: Fence, pools: Sequence[Pool], tensor: Any) -> Fence:
    """See :meth:`fencepool.Resumed.fence_for`."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"fence_for() takes a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta and tensor.numel() == 0:
        return fence._part([])  # it has no memory to wait for
    if not any(pool.contains(tensor) for pool in pools):
        names = ", ".join(dict.fromkeys(repr(pool.tag) for pool in pools)) or "none"
        raise ValueError(f"the tensor lies in none of the pools of this resume, which are {names}")
    return fence._part([span_of(tensor)])
