"""Contents that are told apart byte for byte."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.lru_cache(maxsize=64)
def pattern(size: int, seed: int = 0) -> torch.Tensor:
    """Bytes on the CPU, different for each seed and at each place. Not to be written to."""
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's elements on the CPU, as bytes in row-major order."""
    flat = tensor.detach().to("cpu", copy=True).contiguous().view(-1)
    return flat.view(torch.uint8) if flat.dtype is not torch.uint8 else flat


def is_same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a tensor holds those bytes; both are bytes and contiguous."""
    return torch.equal(tensor.cpu(), expected)  # on the CPU without a copy


def assert_same(tensor: torch.Tensor, expected: torch.Tensor) -> None:
    found, wanted = bytes_of(tensor), bytes_of(expected)
    assert found.shape == wanted.shape
    if not torch.equal(found, wanted):
        wrong = (found != wanted).nonzero().view(-1)
        at = int(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {len(found)} bytes differ, the first at {at}: "
            f"{int(found[at])} instead of {int(wanted[at])}"
        )


def filled(pool: Any, size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of a pool with a pattern in it, and the pattern."""
    expected = pattern(size, seed)
    tensor = pool.empty((size,), dtype=torch.uint8)
    tensor.copy_(expected)
    return tensor, expected
