"""Ways to give device memory away and have it back, for `fencepool bench`."""

from __future__ import annotations

from typing import Protocol

import torch

import fencepool as fp
from fencepool.pools import empty_torch_cache

TAG = "fencepool bench"
COUNT = 16  # tensors


class Way(Protocol):
    """One way. It has its tensors from the start, and they hold numbers until `close`."""

    tensors: list[torch.Tensor]

    def pause(self) -> None:
        """Give the memory away; it is free when this returns."""

    def resume(self) -> None:
        """Have it back. The contents may still be on their way."""

    def close(self) -> None:
        """Give everything up."""


class Fencepool:
    """A pool, with or without a backup."""

    def __init__(self, device: str, size: int, backup: fp.pools.Backup) -> None:
        self._pool = fp.pool(TAG, device, backup=backup)
        self._device = device
        try:
            self.tensors = [self._pool.empty((size // COUNT,), dtype=torch.uint8) for _ in range(COUNT)]
        except BaseException:
            self.close()
            raise

    def pause(self) -> None:
        """See Way."""
        fp.pause(TAG, device=self._device)

    def resume(self) -> None:
        """See Way."""
        fp.resume(TAG, device=self._device)

    def close(self) -> None:
        """See Way."""
        self.tensors = []
        self._pool.close()


class Naive:
    """What is written first: copy to the CPU, drop the tensors, empty PyTorch's cache. Addresses change."""

    def __init__(self, device: str, size: int) -> None:
        self._device = torch_device(device)
        self._host: list[torch.Tensor] = []
        self.tensors = _plain(self._device, size)

    def pause(self) -> None:
        """See Way."""
        # A copy on the CPU too, where .to("cpu") would be the tensor itself.
        self._host = [tensor.to("cpu", copy=True) for tensor in self.tensors]
        self.tensors = []
        if self._device != "cpu":
            empty_torch_cache()

    def resume(self) -> None:
        """See Way."""
        self.tensors = [tensor.to(self._device, copy=True) for tensor in self._host]
        self._host = []

    def close(self) -> None:
        """See Way."""
        self.tensors = self._host = []
        if self._device != "cpu":
            empty_torch_cache()


class Pinned:
    """The limit: copies to and from pinned memory that is there already. No memory is given away."""

    def __init__(self, device: str, size: int) -> None:
        self._device = torch_device(device)
        self.tensors = _plain(self._device, size)
        is_gpu = self._device != "cpu"
        self._host = [torch.empty_like(tensor, device="cpu", pin_memory=is_gpu) for tensor in self.tensors]

    def pause(self) -> None:
        """Only copies, until they have ended."""
        for host, tensor in zip(self._host, self.tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        synchronize(self._device)

    def resume(self) -> None:
        """Only copies."""
        for host, tensor in zip(self._host, self.tensors, strict=True):
            tensor.copy_(host, non_blocking=True)

    def close(self) -> None:
        """See Way."""
        self.tensors = self._host = []
        if self._device != "cpu":
            empty_torch_cache()


def torch_device(device: str) -> str:
    """The device as PyTorch names it: every device of the embedded driver is its "cpu"."""
    return device if device.startswith("cuda") else "cpu"


def synchronize(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _plain(device: str, size: int) -> list[torch.Tensor]:
    return [torch.empty((size // COUNT,), dtype=torch.uint8, device=device) for _ in range(COUNT)]
