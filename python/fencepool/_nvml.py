"""What NVIDIA's management library says of the GPUs and of all processes on them.

Needs the package ``nvidia-ml-py``: ``pip install 'fencepool[observe]'``. Nothing here makes a context or
takes device memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fencepool.errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterator


class NvmlUnavailable(Error):  # noqa: N818 - a state of the machine, as DriverUnavailable is
    """NVML cannot be asked; the message says why and what to do."""


@dataclass(frozen=True)
class GpuMemory:
    """A GPU and who holds how much of it, in bytes."""

    index: int
    """NVML's, which is nvidia-smi's; CUDA may number the GPUs otherwise."""
    name: str
    bus_id: str
    total: int
    used: int
    """All processes and the driver's own; what it has reserved for itself for good is not in it."""
    processes: dict[int, int | None]
    """By process number, on the machine: in a container another than the process knows itself by, or none.
    None: the driver does not say."""


def gpus() -> list[GpuMemory]:
    """Every GPU, those that CUDA_VISIBLE_DEVICES hides too.

    Raises:
        NvmlUnavailable: no package, no driver, or the driver does not answer.
    """
    with _library() as nvml:
        return [
            _look(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
            for index in range(nvml.nvmlDeviceGetCount())
        ]


def gpu(bus_id: str) -> GpuMemory:
    """The GPU with that PCI address (cuDeviceGetPCIBusId). Raises what :func:`gpus` raises."""
    with _library() as nvml:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(bus_id)
        return _look(nvml, nvml.nvmlDeviceGetIndex(handle), handle)


@contextlib.contextmanager
def _library() -> Iterator[Any]:
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise NvmlUnavailable(
            "the package nvidia-ml-py is not installed: pip install 'fencepool[observe]'"
        ) from error
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(f"NVML cannot be asked: {error}") from error


def _look(nvml: Any, index: int, handle: Any) -> GpuMemory:
    # The second version leaves out what the driver reserves for good, as cuMemGetInfo's total does.
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    processes: dict[int, int | None] = {}
    for ask in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for one in ask(handle):
            said = (processes.get(one.pid), one.usedGpuMemory)
            processes[one.pid] = max((count for count in said if count is not None), default=None)
    return GpuMemory(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        bus_id=_text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        total=memory.total - memory.reserved,
        used=memory.used,
        processes=processes,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def same_bus(one: str, other: str) -> bool:
    """Whether two PCI addresses are one: CUDA writes the domain with four digits, NVML with eight."""
    return _bus(one) == _bus(other)


def _bus(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part, 16) for part in text.replace(".", ":").split(":"))
    except ValueError:
        return (-1, hash(text))
