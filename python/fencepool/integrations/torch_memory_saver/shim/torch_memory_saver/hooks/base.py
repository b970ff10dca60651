"""Where torch_memory_saver names its hook modes."""

from fencepool.integrations.torch_memory_saver import HookMode

__all__ = ["HookMode"]
