"""What the figures were measured on and with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import fencepool as fp
from measuring.devices import is_emulated


def machine(device: str) -> dict[str, Any]:
    """The machine, without making a context on its GPU. Null is what it does not tell."""
    return {
        "gpu": None if is_emulated(device) else _gpu_name(device),
        "driver": None if is_emulated(device) else _driver_version(),
        "cuda": None if is_emulated(device) else _cuda_version(),
        "pcie": None if is_emulated(device) else _pcie(device),
        "cpu": _first(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "transparent_huge_pages": _first(Path("/sys/kernel/mm/transparent_hugepage/enabled"), r"\[(\w+)\]"),
    }


def versions() -> dict[str, str | None]:
    """The software under test and its peers; null is not installed."""
    return {
        "fencepool": fp.__version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "torch_cuda": _torch_cuda(),
        "torch_memory_saver": _version("torch_memory_saver"),
    }


def _gpu_name(device: str) -> str | None:
    found = [one.name for one in fp.driver_info("cuda").devices if one.device == device]
    return found[0] if found else None


def _cuda_version() -> str:
    version = fp.driver_info("cuda").version
    return f"{version // 1000}.{version % 1000 // 10}"


def _driver_version() -> str | None:
    loaded = _first(Path("/proc/driver/nvidia/version"), r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")
    return loaded or _ask_nvidia_smi("driver_version", "0")


def _pcie(device: str) -> str | None:
    return _ask_nvidia_smi("pcie.link.gen.max,pcie.link.width.max", device.partition(":")[2])


def _ask_nvidia_smi(fields: str, index: str) -> str | None:
    # Its index need not be CUDA's where CUDA_VISIBLE_DEVICES is set; GPUs of one machine are mostly alike.
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={index}"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _first(path: Path, pattern: str) -> str | None:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda
