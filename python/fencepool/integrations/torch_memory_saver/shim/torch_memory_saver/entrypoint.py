"""Where torch_memory_saver has its class."""

from fencepool.integrations.torch_memory_saver import TorchMemorySaver

__all__ = ["TorchMemorySaver"]
