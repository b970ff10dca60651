"""vLLM's sleep mode on fencepool's pools: its ``CuMemAllocator``, and the plug-in that puts it in place.

Installing fencepool is all that is needed: vLLM finds the plug-in through its entry point, and
``--enable-sleep-mode`` then runs on pools. Importing this package imports neither vLLM nor PyTorch.
"""

from fencepool.integrations.vllm._allocator import CuMemAllocator
from fencepool.integrations.vllm._plugin import UnsupportedVllmError, install, register

__all__ = ["CuMemAllocator", "UnsupportedVllmError", "install", "register"]
