"""torch_memory_saver's helpers for tests."""

from fencepool.integrations.torch_memory_saver._testing import (
    empty_cache,
    get_and_print_gpu_memory,
    get_device,
)

__all__ = ["empty_cache", "get_and_print_gpu_memory", "get_device"]
