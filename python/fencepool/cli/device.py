"""Which device the demonstration runs on, and the reason it gives for that."""

from __future__ import annotations

from dataclasses import dataclass

import fencepool as fp

EMBEDDED = "the embedded driver, on host memory"


@dataclass(frozen=True)
class Choice:
    """A device in fencepool's notation, and in words: what it is, and why this one."""

    device: str
    name: str
    why: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a real GPU rather than the embedded driver."""
        return self.device.startswith("cuda")


def choose_device(wanted: str | None, torch_version: str, torch_has_cuda: bool) -> Choice:
    """The device asked for; else the first GPU that has what fencepool needs; else the embedded driver.

    What was asked for is checked by `fp.pool`, which says best what is wrong; here only what it cannot know.

    Raises:
        ValueError: a GPU was asked for, and this PyTorch cannot use it.
    """
    cuda = fp.driver_info("cuda")
    if wanted is not None:
        if wanted.startswith("cuda") and cuda.is_available and not torch_has_cuda:
            raise ValueError(f"this PyTorch ({torch_version}) cannot use the GPU; install a CUDA build of it")
        return Choice(wanted, _name(cuda, wanted), "you asked for it")
    if not cuda.is_available:
        return _embedded(f"no GPU can be used: {cuda.reason}")
    if not torch_has_cuda:
        return _embedded(f"this PyTorch ({torch_version}) cannot use the GPU")
    for one in cuda.devices:
        if one.attributes.get("vmm"):
            return Choice(one.device, one.name, "it is the first GPU with virtual memory management")
    return _embedded("no GPU here has virtual memory management")


def _embedded(why: str) -> Choice:
    return Choice("cpu", EMBEDDED, why)


def _name(cuda: fp.DriverInfo, device: str) -> str:
    if not device.startswith("cuda"):
        return EMBEDDED
    return next((one.name for one in cuda.devices if one.device == device), "GPU")
