"""torch_memory_saver's interface over fencepool's pools, and its place in ``sys.modules``.

Either import from here, or leave a program's imports as they are and call :func:`install` first:

>>> from fencepool.integrations import torch_memory_saver
>>> torch_memory_saver.install()
>>> from torch_memory_saver import torch_memory_saver as saver
>>> saver.enabled
True

See docs/torch-memory-saver.md for what each name and variable does. With ``TMS_INIT_ENABLE=1`` importing
this makes allocations pausable; it has no other effect.
"""

from fencepool.integrations.torch_memory_saver._children import configure_subprocess, shim_directory
from fencepool.integrations.torch_memory_saver._install import install
from fencepool.integrations.torch_memory_saver._pools import start_from_environment
from fencepool.integrations.torch_memory_saver._saver import HookMode, TorchMemorySaver

__all__ = [
    "HookMode",
    "TorchMemorySaver",
    "configure_subprocess",
    "install",
    "shim_directory",
    "torch_memory_saver",
]

torch_memory_saver = TorchMemorySaver()

start_from_environment()
