"""Names of devices: "cuda:0" is a GPU, "cpu" and "cpu:1" to "cpu:3" the embedded driver's."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Literal

Provider = Literal["cuda", "host"]

_NAME = re.compile(r"(cuda|cpu)(?::(\d{1,4}))?")


@dataclass(frozen=True)
class DeviceName:
    """A device, by who serves it and its number there."""

    provider: Provider
    ordinal: int

    def __str__(self) -> str:
        """The name as users write it."""
        if self.provider == "cuda":
            return f"cuda:{self.ordinal}"
        return f"cpu:{self.ordinal}" if self.ordinal else "cpu"


def parse_device(device: Any) -> DeviceName:
    """Turn "cuda", "cuda:1", "cpu", "cpu:2" or a ``torch.device`` into a device.

    "cuda" is PyTorch's current device where PyTorch uses CUDA already, else "cuda:0".

    Raises:
        TypeError: it is neither a string nor a ``torch.device``.
        ValueError: there can be no such device.
    """
    if not isinstance(device, str):
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(device, torch.device):
            raise TypeError(
                f"a device is a string such as 'cuda:0' or a torch.device, not {type(device).__name__}"
            )
        device = str(device)
    match = _NAME.fullmatch(device)
    if match is None:
        raise ValueError(
            f"unknown device {device!r}; there are 'cuda', 'cuda:N', and 'cpu' for the embedded driver"
        )
    kind, number = match.groups()
    if kind == "cpu":
        return DeviceName("host", int(number or 0))
    if number is not None:
        return DeviceName("cuda", int(number))
    torch = sys.modules.get("torch")
    current = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
    return DeviceName("cuda", int(current))
