"""Collects the doctor's facts: reads files and package metadata, asks the driver, changes nothing.

Whatever cannot be read is left unknown: a doctor that ends with a traceback helps nobody.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import fencepool as fp
from fencepool import _core

from .cgroup import read_cgroup
from .facts import Disk, Driver, Facts, Gpu, Memory, Packages

DISTRIBUTIONS = (
    "torch",
    "sglang",
    "vllm",
    "torch_memory_saver",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
# Only these are read, so that a report can be shared without giving away the rest of the environment.
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "LD_PRELOAD",
    "NCCL_GRAPH_REGISTER",
    "CUDA_VISIBLE_DEVICES",
    "FENCEPOOL_DISK_DIRECTORY",
)


def gather(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts of this machine. `root` is where /proc and /sys are looked for."""
    return Facts(
        fencepool=fp.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cuda=driver("cuda"),
        embedded=driver("host"),
        has_kernels=_core.HAS_KERNELS,
        kernel_driver=kernel_driver(root),
        memory=memory(root),
        disk=disk(environ.get("FENCEPOOL_DISK_DIRECTORY", "")),
        packages=packages(),
        environment={name: _legible(environ[name]) for name in VARIABLES if name in environ},
    )


def driver(provider: Literal["cuda", "host"]) -> Driver:
    """What fencepool's driver table says of `provider`."""
    try:
        info = fp.driver_info(provider)
    except fp.Error as error:
        return Driver(is_available=False, reason=str(error))
    gpus = tuple(Gpu(one.device, one.name, one.total_bytes, dict(one.attributes)) for one in info.devices)
    # cuDriverGetVersion: major * 1000 + minor * 10.
    version = (info.version // 1000, info.version % 1000 // 10) if info.version else None
    return Driver(info.is_available, info.reason, version, tuple(info.absent_calls), gpus)


def kernel_driver(root: Path) -> str | None:
    """The NVIDIA kernel module's version, "of unknown version" where only its device node shows, or None."""
    found = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", _read(root / "proc/driver/nvidia/version") or "")
    if found:
        return found.group()
    return "of unknown version" if (root / "dev/nvidiactl").exists() else None


def memory(root: Path) -> Memory:
    """The host's memory and what limits this process's share of it."""
    sizes = {
        key: int(kib) * 1024
        for key, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo") or "", re.MULTILINE)
    }
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pages = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    group = read_cgroup(root)
    return Memory(
        total=sizes.get("MemTotal"),
        available=sizes.get("MemAvailable"),
        cgroup_version=group.version,
        cgroup_limit=group.limit,
        cgroup_used=group.used,
        locked_limit=None if soft == resource.RLIM_INFINITY else soft,
        huge_pages=pages.group(1) if pages else None,
    )


def disk(directory: str) -> Disk | None:
    """What backups on disk would find in `directory`; nothing is left there."""
    if not directory:
        return None
    try:
        fp.pool("fencepool doctor", "cpu", backup="disk", directory=directory).close()
        free = os.statvfs(directory)
    except (fp.Error, OSError, ValueError) as error:  # ValueError: a name that is not text in UTF-8
        # Of the pool, which was made for this look alone, nobody needs to hear.
        return Disk(_legible(directory), problem=str(error).rpartition(" was not made: ")[2])
    return Disk(directory, free=free.f_bavail * free.f_frsize, is_direct=_has_direct_io(directory))


def _legible(value: str) -> str:
    """Bytes that are not UTF-8 as escapes: they could not be written out."""
    return os.fsencode(value).decode(errors="backslashreplace")


def _has_direct_io(directory: str) -> bool:
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def packages() -> Packages:
    """What is installed, from metadata alone: importing PyTorch would take seconds and touch the GPU."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch_versions = _torch_versions()
    return Packages(
        versions=versions,
        torch_cuda=torch_versions.get("cuda"),
        torch_hip=torch_versions.get("hip"),
        sglang_plugins=_plugins("sglang.srt.plugins"),
        vllm_plugins=_plugins("vllm.general_plugins"),
    )


def _plugins(group: str) -> tuple[str, ...]:
    points = importlib.metadata.entry_points(group=group)
    return tuple(point.name for point in points if point.module.split(".")[0] == "fencepool")


def _torch_versions() -> dict[str, str]:
    # torch/version.py is a list of assignments; find_spec of a top-level package does not import it.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = _read(Path(spec.origin).with_name("version.py")) or ""
    return dict(re.findall(r"^(\w+)\s*(?::[^=]+)?=\s*'([^']*)'", text, re.MULTILINE))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
