"""torch_memory_saver, served by fencepool."""

from fencepool.integrations.torch_memory_saver import (
    TorchMemorySaver,
    configure_subprocess,
    torch_memory_saver,
)

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]
