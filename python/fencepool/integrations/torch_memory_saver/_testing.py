"""What torch_memory_saver's own tests use to look at the device."""

from __future__ import annotations

import logging

import fencepool as fp
from fencepool.integrations.torch_memory_saver import _settings

_log = logging.getLogger(__name__)


def get_device() -> str:
    """PyTorch's name for the kind of device that regions allocate on."""
    return _settings.device().partition(":")[0]


def empty_cache() -> None:
    """Give PyTorch's unused blocks back to the device."""
    import torch

    torch.cuda.empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes of the device in use by all processes. Logged, since fencepool prints nothing."""
    kind = get_device()
    free, total = fp.memory_info(f"{kind}:{gpu_id}")
    _log.info("%s:%d: %.2f GiB in use (%s)", kind, gpu_id, (total - free) / 2**30, message)
    return total - free
