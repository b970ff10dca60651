"""Contents that can be checked: written on the device, changed before every pause, summed on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# Words summed at a time. PyTorch widens them to 64 bits first, so this bounds the scratch memory (512 MiB).
_SLICE = 1 << 26
_ROW = 4096
_BLOCK = (256 << 10) // 4  # words


class ContentsError(Exception):
    """A resumed tensor does not hold what it held when it was paused. No figure of that run counts."""


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.int32)


def fill(tensors: Sequence[torch.Tensor], seed: int = 1) -> None:
    """Random bits, other ones in every tensor."""
    generator = torch.Generator(device=tensors[0].device).manual_seed(seed)
    for tensor in tensors:
        _words(tensor).random_(generator=generator)


def change(tensors: Sequence[torch.Tensor], fraction: float = 1.0, seed: int = 0) -> None:
    """Change every word, or one word in that fraction of the blocks of 256 KiB."""
    if fraction >= 1:
        for tensor in tensors:
            _words(tensor).add_(0x01010101)  # wraps around
        return
    if fraction <= 0:
        return
    step = round(_BLOCK / fraction)
    passed = seed * 7919 % step  # other blocks each time
    for tensor in tensors:
        words = _words(tensor)
        words[-passed % step :: step].add_(0x01010101)
        passed += words.numel()


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One sum a tensor over all its 32-bit words, weighted by their place, 4,096 words at a time."""
    return [int(total) for total in torch.stack([_checksum(_words(tensor)) for tensor in tensors]).tolist()]


def _checksum(words: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    first = 1
    for start in range(0, words.numel(), _SLICE):
        part = words[start : start + _SLICE]
        rows = part.view(-1, math.gcd(part.numel(), _ROW)).sum(1, dtype=torch.int64)
        total += (rows * torch.arange(first, first + rows.numel(), device=words.device)).sum()
        first += rows.numel()
    return total


def check(tensors: Sequence[torch.Tensor], expected: Sequence[int]) -> None:
    """Compare with earlier checksums; ContentsError names how many tensors differ, and the first one."""
    wrong = [
        index for index, (now, was) in enumerate(zip(checksums(tensors), expected, strict=True)) if now != was
    ]
    if wrong:
        raise ContentsError(
            f"after the resume {len(wrong)} of {len(expected)} weight tensors differ, first number {wrong[0]}"
        )


def break_one(tensors: Sequence[torch.Tensor]) -> None:
    """Change one word of one tensor, to show that the check sees it."""
    _words(tensors[-1])[-1].bitwise_xor_(1)


def write_cache(tensors: Sequence[torch.Tensor], value: int) -> None:
    """Write a whole KV cache and read its ends back: resumed memory that cannot be used is no result.

    It also leaves the pages dirty, as a cache in use does: fresh pages are quicker to take again.
    """
    for tensor in tensors:
        tensor.fill_(value)
    ends = torch.stack([end for tensor in tensors for end in (tensor[0], tensor[-1])])
    if not bool((ends == value).all()):
        raise ContentsError("the resumed KV cache does not hold what was written to it")
