"""What the environment asks for: torch_memory_saver's TMS_* variables, and the device.

Read when needed rather than at import, so that a program may set them first.
"""

from __future__ import annotations

import os
from typing import Literal, cast

from fencepool.errors import DriverUnavailable, UnsupportedError

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
    """Whether allocations are pausable without a region: TMS_INIT_ENABLE.

    Raises:
        UnsupportedError: with backups on disk, TMS_INIT_ENABLE_DISK_BACKUP.
    """
    if not flag("TMS_INIT_ENABLE"):
        return False
    if flag("TMS_INIT_ENABLE_DISK_BACKUP"):
        raise no_disk_backups("TMS_INIT_ENABLE_DISK_BACKUP=1")
    backend_from_start()
    return True


def has_backup_from_start() -> bool:
    """Whether those allocations keep their contents: TMS_INIT_ENABLE_CPU_BACKUP."""
    return flag("TMS_INIT_ENABLE_CPU_BACKUP")


def backend_from_start() -> str:
    """The backend their backups are to have: TMS_INIT_CPU_BACKUP_BACKEND; empty for none in particular."""
    value = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "")
    return parse_backend("TMS_INIT_CPU_BACKUP_BACKEND", value) if value else ""


def check_backup(
    enable_cpu_backup: bool, cpu_backup_backend: str | None, enable_disk_backup: bool = False
) -> None:
    """Refuse what torch_memory_saver refuses, and backups on disk.

    The backend itself changes nothing: fencepool's backups are pinned and made of huge pages, and their
    memory goes back with ``retain_cpu_backup`` off.
    """
    if enable_cpu_backup and enable_disk_backup:
        raise ValueError("enable_cpu_backup and enable_disk_backup exclude each other")
    if enable_disk_backup:
        raise no_disk_backups("enable_disk_backup=True")
    if cpu_backup_backend is None:
        return
    if not enable_cpu_backup:
        raise ValueError("cpu_backup_backend needs enable_cpu_backup=True")
    parse_backend("cpu_backup_backend", cpu_backup_backend)


def parse_backend(name: str, value: str) -> BackupBackend:
    """A backup backend's name, or ValueError."""
    if value not in _BACKENDS:
        raise ValueError(f"{name} is 'mmap' or 'pinned', not {value!r}")
    return cast("BackupBackend", value)


def no_disk_backups(what: str) -> UnsupportedError:
    """The refusal of everything about backups on disk."""
    return UnsupportedError(
        f"{what}: fencepool has no backups on disk; use backups in host memory, enable_cpu_backup=True"
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
