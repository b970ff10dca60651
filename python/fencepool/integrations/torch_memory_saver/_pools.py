"""The pools below the saver: which it made, which a tag means, and what becomes of their backups."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

import fencepool as fp
from fencepool import transitions
from fencepool.integrations.torch_memory_saver import _settings
from fencepool.integrations.torch_memory_saver._ambient import Ambient

if TYPE_CHECKING:
    import torch

    from fencepool.pools import Backup

DEFAULT_TAG = "default"

_log = logging.getLogger(__name__)


class Pools:
    """The pools of the tags that savers of this process were given. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: set[str] = set()
        self._missed: set[str] = set()
        self._margin = 0
        self._directory = ""
        self._directories: dict[str, str] = {}  # by tag: another directory would be another pool
        self._devices: set[str] = set()  # of all pools opened

    def open(self, tag: str, backup: Backup, device: str | None = None) -> fp.Pool:
        """The pool of a region entered now; by default on the device that is meant now."""
        # One pool whatever retain_cpu_backup says: that is looked at when resuming.
        directory = self._directories.get(tag, self.disk_directory) if backup == "disk" else None
        pool = fp.pool(tag, device or _settings.device(), backup=backup, directory=directory)
        with self._lock:
            self._given.add(tag)
            if directory is not None:
                self._directories[tag] = directory
            if pool.device not in self._devices:
                self._devices.add(pool.device)
                if self._margin:
                    fp.set_memory_margin(self._margin, pool.device)
        return pool

    @property
    def disk_directory(self) -> str:
        """Where the files of pools with a backup on disk lie that are made now."""
        return self._directory or _settings.disk_directory()

    def set_disk_directory(self, path: str) -> None:
        """For pools made from now on; it is made if need be, for this user alone."""
        os.makedirs(path, mode=0o700, exist_ok=True)
        self._directory = os.fspath(path)

    @property
    def margin(self) -> int:
        """Bytes that stay free on the devices of these pools."""
        return self._margin

    def set_margin(self, nbytes: int) -> None:
        """For the devices of the pools opened so far, and of those opened later."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(f"memory_margin_bytes is an integer, not {type(nbytes).__name__}")
        if nbytes < 0:
            raise ValueError(f"memory_margin_bytes is 0 or more, not {nbytes}")
        with self._lock:
            for device in self._devices:
                fp.set_memory_margin(nbytes, device)
            self._margin = nbytes

    def tags(self, tag: str | None, verb: str) -> list[str]:
        """Which tags with pools are meant.

        None for a tag without: programs name tags that no region was entered for, as SGLang does with
        "cuda_graph". It is logged, the first time as a warning.
        """
        existing = {pool.tag for pool in fp.status()}
        with self._lock:
            if not tag:
                return sorted(self._given & existing)
            if tag in existing:
                return [tag]
            is_new = tag not in self._missed
            self._missed.add(tag)
        _log.log(
            logging.WARNING if is_new else logging.DEBUG,
            "no pool has the tag %r: nothing to %s; known tags: %s",
            tag,
            verb,
            ", ".join(map(repr, sorted(existing))) or "none yet",
        )
        return []


pools = Pools()
ambient = Ambient(pools.open)


def start_from_environment() -> None:
    """Do what TMS_INIT_ENABLE asks for."""
    if _settings.is_enabled_from_start():
        ambient.start(DEFAULT_TAG, _settings.backup_from_start())


def give_backups_back(tags: list[str]) -> None:
    """Wait for the restore, as trim() does, then give the host memory of the tags' backups back."""
    for pool in transitions.select((), None):
        if pool.tag in tags and pool.backup == "host":
            with contextlib.suppress(fp.PoolPausedError):  # paused again meanwhile: the backup is in use
                pool.trim()


def backup_of(tensor: torch.Tensor, is_copied: bool) -> torch.Tensor | None:
    """A paused tensor's contents; None for one of an active pool, or of no pool."""
    for pool in transitions.select((), None):
        if pool.contains(tensor):
            break
    else:
        return None
    if not pool._is_paused:
        return None
    if pool.backup == "none":
        raise fp.Error(
            f"the tensor lies in the paused pool {pool.tag!r}, which was made without a backup: its contents "
            "are gone; allocate it in a region with enable_cpu_backup=True"
        )
    with fp.disable():  # a copy on the CPU belongs to no pool of the embedded driver
        if not is_copied:
            # In several pieces, which have no one view, or in a file.
            with contextlib.suppress(ValueError, fp.UnsupportedError):
                return pool.backup_of(tensor, copy=False)
        return pool.backup_of(tensor, copy=True)
