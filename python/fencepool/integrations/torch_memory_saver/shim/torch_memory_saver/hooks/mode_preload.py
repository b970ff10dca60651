"""Where torch_memory_saver has configure_subprocess."""

from fencepool.integrations.torch_memory_saver import configure_subprocess

__all__ = ["configure_subprocess"]
