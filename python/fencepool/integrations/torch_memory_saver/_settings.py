"""What the environment asks for: torch_memory_saver's TMS_* variables, and the device.

Read when needed rather than at import, so that a program may set them first.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Literal, cast

from fencepool.errors import DriverUnavailable

if TYPE_CHECKING:
    from fencepool.pools import Backup

BackupBackend = Literal["mmap", "pinned"]

_YES = ("1", "true", "TRUE", "yes", "YES")
_NO = ("", "0", "false", "FALSE", "no", "NO")
_BACKENDS = ("mmap", "pinned")


def flag(name: str) -> bool:
    """Whether a variable says yes. Unset and empty are no.

    Raises:
        ValueError: it says something else; torch_memory_saver ends the process there.
    """
    value = os.environ.get(name, "")
    if value in _YES:
        return True
    if value in _NO:
        return False
    raise ValueError(f"{name} is 1 or 0 (true/false, yes/no), not {value!r}")


def is_enabled_from_start() -> bool:
    """Whether allocations are pausable without a region: TMS_INIT_ENABLE."""
    if not flag("TMS_INIT_ENABLE"):
        return False
    backup_from_start()
    backend_from_start()
    return True


def backup_from_start() -> Backup:
    """Where those allocations keep their contents: TMS_INIT_ENABLE_CPU_BACKUP, TMS_INIT_ENABLE_DISK_BACKUP.

    Raises:
        ValueError: both, or what is neither yes nor no.
    """
    return backup_of(flag("TMS_INIT_ENABLE_CPU_BACKUP"), flag("TMS_INIT_ENABLE_DISK_BACKUP"))


def backend_from_start() -> str:
    """The backend their backups are to have: TMS_INIT_CPU_BACKUP_BACKEND; empty for none in particular."""
    value = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "")
    return parse_backend("TMS_INIT_CPU_BACKUP_BACKEND", value) if value else ""


def backup_of(
    enable_cpu_backup: bool, enable_disk_backup: bool = False, cpu_backup_backend: str | None = None
) -> Backup:
    """The policy that those arguments mean, or ValueError for what torch_memory_saver refuses.

    The backend changes nothing: fencepool's backups in host memory are pinned and made of huge pages, and
    their memory goes back with ``retain_cpu_backup`` off.
    """
    if enable_cpu_backup and enable_disk_backup:
        raise ValueError("enable_cpu_backup and enable_disk_backup exclude each other")
    if cpu_backup_backend is not None:
        if not enable_cpu_backup:
            raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")
        parse_backend("cpu_backup_backend", cpu_backup_backend)
    if enable_disk_backup:
        return "disk"
    return "host" if enable_cpu_backup else "none"


def parse_backend(name: str, value: str) -> BackupBackend:
    """A backup backend's name, or ValueError."""
    if value not in _BACKENDS:
        raise ValueError(f"{name} is 'mmap' or 'pinned', not {value!r}")
    return cast("BackupBackend", value)


def disk_directory() -> str:
    """Where backups on disk lie when set_disk_backup_dir() was not called.

    TMS_DISK_BACKUP_DIR, or FENCEPOOL_DISK_DIRECTORY, or the directory for temporary files.
    """
    return (
        os.environ.get("TMS_DISK_BACKUP_DIR")
        or os.environ.get("FENCEPOOL_DISK_DIRECTORY")
        or tempfile.gettempdir()
    )


def device() -> str:
    """Where regions allocate: FENCEPOOL_DEVICE, or PyTorch's current CUDA device.

    Raises:
        DriverUnavailable: neither is there.
    """
    named = os.environ.get("FENCEPOOL_DEVICE", "")
    if named and named != "cuda":
        return named
    import torch

    if not torch.cuda.is_available():
        raise DriverUnavailable(
            "PyTorch has no CUDA device here, and FENCEPOOL_DEVICE names no other; FENCEPOOL_DEVICE=cpu "
            "works without a GPU, on the embedded driver"
        )
    return f"cuda:{torch.cuda.current_device()}"
