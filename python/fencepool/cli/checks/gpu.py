"""Checks of the CUDA driver and of the GPUs it shows.

A capability is one finding over all GPUs, so that a machine with eight of them does not get forty lines.
Where a finding names a CUDA version, csrc/driver/calls.h says in which version each call came.
"""

from __future__ import annotations

from ..facts import Facts, Gpu
from ..text import size
from .finding import Finding, Status


def cuda_driver(facts: Facts) -> Finding:
    """Whether there is a CUDA driver that can be used."""
    name = "CUDA driver"
    cuda = facts.cuda
    if cuda.is_available:
        version = f"CUDA {cuda.version[0]}.{cuda.version[1]}" if cuda.version else "unknown version"
        kernel = f", kernel driver {facts.kernel_driver}" if facts.kernel_driver else ""
        return Finding(name, Status.OK, f"{version}{kernel}")
    reason = cuda.reason or "no reason given"
    if facts.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}:
        return Finding(
            name,
            Status.WARN,
            f"CUDA_VISIBLE_DEVICES hides every GPU: {reason}",
            "unset CUDA_VISIBLE_DEVICES, or name the GPUs to use; until then use device='cpu'",
        )
    if facts.kernel_driver:
        return Finding(
            name,
            Status.FAIL,
            f"the NVIDIA kernel driver {facts.kernel_driver} is loaded, but libcuda cannot be used: {reason}",
            "install a libcuda.so.1 of the kernel driver's version, 520 or newer (CUDA 11.8); in a container "
            "start it with --gpus all, so that the host's libcuda is mounted",
        )
    return Finding(
        name,
        Status.WARN,
        f"no GPU here: {reason}",
        "nothing, to develop and test with device='cpu'; for device='cuda' a machine with an NVIDIA GPU",
    )


def gpus(facts: Facts) -> Finding | None:
    """Which GPUs there are."""
    if not facts.cuda.is_available:
        return None
    if not facts.gpus:
        return Finding(
            "GPUs",
            Status.WARN,
            "the driver shows none to this process",
            "check CUDA_VISIBLE_DEVICES, and in a container --gpus",
        )
    return Finding("GPUs", Status.OK, "\n".join(_describe(gpu) for gpu in facts.gpus))


def virtual_memory(facts: Facts) -> Finding | None:
    """Whether physical memory can be taken from under an address: without that, no pool on the device."""
    if not facts.gpus:
        return None
    name = "virtual memory management"
    lacking = _lacking(facts, "vmm")
    if not lacking:
        return Finding(name, Status.OK, "yes")
    does = f"not on {_names(lacking)}: fp.pool() raises there"
    if len(lacking) < len(facts.gpus):
        return Finding(name, Status.WARN, does, "use the other GPUs")
    return Finding(
        name,
        Status.FAIL,
        does,
        "use a GPU that has it; on a virtual GPU, ask for a profile with it. device='cpu' works meanwhile",
    )


def context_events(facts: Facts) -> Finding | None:
    """Whether a context can be ordered behind a restore without holding the host."""
    if not facts.gpus:
        return None
    name = "context events"
    absent = [call for call in ("cuCtxRecordEvent", "cuCtxWaitEvent") if call in facts.cuda.absent_calls]
    if not absent:
        return Finding(name, Status.OK, "yes: resume() does not hold the host while contents are copied back")
    return Finding(
        name,
        Status.WARN,
        f"this driver lacks {' and '.join(absent)}: fencepool synchronises the context instead, and resume() "
        "holds the calling thread until the contents are back",
        "install a driver for CUDA 12.5 or newer (555 or newer)",
    )


def absent_calls(facts: Facts) -> Finding | None:
    """Other driver calls that are missing. Each has a fallback, or the driver would not be available."""
    rest = [call for call in facts.cuda.absent_calls if call not in {"cuCtxRecordEvent", "cuCtxWaitEvent"}]
    if not facts.gpus or not rest:
        return None
    return Finding("driver calls", Status.NOTE, f"absent: {', '.join(rest)}", "install a newer driver")


def digests(facts: Facts) -> Finding:
    """Whether pauses can find out on the GPU what has changed."""
    name = "digests"
    if facts.has_kernels:
        return Finding(name, Status.OK, "built in: a pause copies only what changed since the last one")
    return Finding(
        name,
        Status.WARN if facts.gpus else Status.NOTE,
        "this build has no kernels, as there was no nvcc: on a GPU a backup copies every byte at every pause",
        "install a CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt, and reinstall "
        "fencepool with --no-build-isolation",
    )


def descriptors(facts: Facts) -> Finding | None:
    """Whether another process can get at the memory by a descriptor."""
    return _capability(
        facts,
        "posix_fd",
        "POSIX descriptors",
        "memory there cannot be handed to another process",
        "a Linux driver",
    )


def rdma(facts: Facts) -> Finding | None:
    """Whether a network card can read and write a pool's memory."""
    return _capability(
        facts,
        "rdma_vmm",
        "RDMA with pools",
        "a pool's memory there cannot be registered with a network card",
        "keep buffers for RDMA outside of pools",
    )


def host_memory_mapping(facts: Facts) -> Finding | None:
    """Whether host memory can stand at a device address."""
    return _capability(
        facts,
        "host_numa_vmm",
        "host memory at device addresses",
        "fp.pool(backup='resident') raises there",
        "a driver for CUDA 12.2 or newer, where the GPU supports it",
    )


def _capability(facts: Facts, attribute: str, name: str, lack: str, do: str) -> Finding | None:
    # For capabilities that only some uses need: their absence is worth a note.
    if not facts.gpus:
        return None
    lacking = _lacking(facts, attribute)
    if not lacking:
        return Finding(name, Status.OK, "yes")
    return Finding(name, Status.NOTE, f"not on {_names(lacking)}: {lack}", f"if you need it: {do}")


def _lacking(facts: Facts, attribute: str) -> list[Gpu]:
    return [gpu for gpu in facts.gpus if not gpu.can(attribute)]


def _names(found: list[Gpu]) -> str:
    return ", ".join(f"{gpu.device} ({gpu.name})" for gpu in found)


def _describe(gpu: Gpu) -> str:
    major, minor = gpu.attributes.get("compute_major"), gpu.attributes.get("compute_minor")
    compute = f", compute capability {major}.{minor}" if major is not None and minor is not None else ""
    return f"{gpu.device} {gpu.name}, {size(gpu.total_bytes)}{compute}"


__all__ = [
    "absent_calls",
    "context_events",
    "cuda_driver",
    "descriptors",
    "gpus",
    "host_memory_mapping",
    "rdma",
    "virtual_memory",
]
