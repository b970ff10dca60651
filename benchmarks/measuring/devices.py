"""The device under test: a GPU through PyTorch, or fencepool's embedded driver."""

from __future__ import annotations

import torch

import fencepool as fp

# The emulated machine: a link slow enough that a copy can be told from a call.
EMULATED_BANDWIDTH = 4 * 10**9
EMULATED_MEMORY = 1 << 30


def is_emulated(name: str) -> bool:
    """Whether a device's name stands for the embedded driver."""
    return name.split(":")[0] == "cpu"


class Device:
    """What the measurements need to know and do, the same for a GPU and for the embedded driver."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_emulated = is_emulated(name)
        self.torch_device = "cpu" if self.is_emulated else name
        if self.is_emulated:
            # As a GPU behaves: new memory holds rubbish, and a resume does not hold the host.
            fp.host_driver.configure(
                name,
                memory_limit=EMULATED_MEMORY,
                bandwidth=EMULATED_BANDWIDTH,
                poisoned=True,
                host_waits=False,
            )
        else:
            torch.cuda.set_device(name)
            torch.cuda.synchronize(name)  # the context exists before anything is timed

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do. The embedded driver's tensors are the host's own."""
        if not self.is_emulated:
            torch.cuda.synchronize(self.name)

    def free_bytes(self) -> int:
        """Free device memory, as the driver reports it."""
        return fp.memory_info(self.name)[0] if self.is_emulated else torch.cuda.mem_get_info(self.name)[0]
