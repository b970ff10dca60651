"""Pools under PyTorch's allocator, in its CUDA graphs and modules. Everything here imports PyTorch."""

from fencepool.pytorch.module_fences import ModuleFences, fence_modules

__all__ = ["ModuleFences", "fence_modules"]
