"""torch_memory_saver's helpers that other programs import."""

from fencepool.integrations.torch_memory_saver._preload import get_binary_path_from_package, is_xpu

__all__ = ["get_binary_path_from_package", "is_xpu"]
