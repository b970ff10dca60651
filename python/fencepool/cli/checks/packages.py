"""Checks of the Python packages around fencepool."""

from __future__ import annotations

import re

from ..facts import Facts
from .finding import Finding, Status


def fencepool(facts: Facts) -> Finding:
    """Which fencepool this is."""
    return Finding("fencepool", Status.OK, f"{facts.fencepool}, Python {facts.python}, {facts.system}")


def pytorch(facts: Facts) -> Finding:
    """Whether PyTorch is there, and its build fits the driver."""
    name = "PyTorch"
    packages = facts.packages
    version = packages.versions.get("torch")
    if version is None:
        return Finding(name, Status.FAIL, "not installed: pools hold its tensors", "pip install torch")
    if packages.torch_hip:
        return Finding(
            name,
            Status.WARN,
            f"{version}, built for ROCm {packages.torch_hip}: fencepool speaks to the CUDA driver only",
            "use device='cpu', or a CUDA build of PyTorch on an NVIDIA GPU",
        )
    if packages.torch_cuda is None:
        says = f"{version}, a build without CUDA"
        if not facts.gpus:
            return Finding(name, Status.OK, says)
        do = "install a CUDA build of PyTorch to use the GPU"
        return Finding(name, Status.WARN, f"{says}: it makes no tensors on the GPU", do)
    says = f"{version}, built for CUDA {packages.torch_cuda}"
    driver = facts.cuda.version if facts.gpus else None
    # Minor versions are compatible within a major one, majors are not (CUDA Compatibility guide).
    if driver is not None and driver[0] < int(packages.torch_cuda.split(".")[0]):
        return Finding(
            name,
            Status.WARN,
            f"{says}; the driver implements CUDA {driver[0]}.{driver[1]}",
            "install a newer driver, or a PyTorch built for that CUDA version",
        )
    return Finding(name, Status.OK, says)


def regions(facts: Facts) -> Finding | None:
    """Whether PyTorch can lead what it allocates on a GPU into a pool."""
    version = facts.packages.versions.get("torch")
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if not facts.gpus or numbers is None or facts.packages.torch_cuda is None:
        return None
    name = "regions on a GPU"
    if (int(numbers[1]), int(numbers[2])) >= (2, 8):
        return Finding(name, Status.OK, "yes")
    return Finding(
        name,
        Status.WARN,
        f"not with PyTorch {version}: Pool.region() and fp.cuda_graph() raise on a GPU, and the integrations "
        "rest on them; Pool.empty() and Pool.adopt() work",
        "install PyTorch 2.8 or newer",
    )


def sglang(facts: Facts) -> Finding:
    """Whether SGLang is there, and would load a plug-in of fencepool's."""
    return _engine("SGLang", facts.packages.versions.get("sglang"), facts.packages.sglang_plugins)


def vllm(facts: Facts) -> Finding:
    """Whether vLLM is there, and would load a plug-in of fencepool's."""
    return _engine("vLLM", facts.packages.versions.get("vllm"), facts.packages.vllm_plugins)


def _engine(name: str, version: str | None, plugins: tuple[str, ...]) -> Finding:
    if version is None:
        return Finding(name, Status.OK, "not installed")
    if not plugins:
        return Finding(
            name,
            Status.NOTE,
            f"{version}; no plug-in of fencepool is registered with it",
            "install fencepool with pip: entry points come with its metadata",
        )
    return Finding(name, Status.OK, f"{version}; plug-in {', '.join(plugins)} is registered with it")


def torch_memory_saver(facts: Facts) -> Finding:
    """Another package for the same purpose; both may be installed."""
    name = "torch_memory_saver"
    version = facts.packages.versions.get("torch_memory_saver")
    if version is None:
        return Finding(name, Status.OK, "not installed, not needed")
    return Finding(name, Status.NOTE, f"{version} is installed: harmless unless it is preloaded, not needed")
