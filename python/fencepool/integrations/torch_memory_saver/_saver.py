"""The object that programs written for torch_memory_saver call: its methods, over pools."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Literal

import fencepool as fp
from fencepool.integrations.torch_memory_saver import _settings
from fencepool.integrations.torch_memory_saver._internals import Internals
from fencepool.integrations.torch_memory_saver._pools import (
    DEFAULT_TAG,
    ambient,
    backup_of,
    give_backups_back,
    pools,
)
from fencepool.integrations.torch_memory_saver._thread import Scope, entered

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from fencepool.integrations.torch_memory_saver._settings import BackupBackend

HookMode = Literal["preload", "torch"]


class TorchMemorySaver:
    """torch_memory_saver 0.0.10's interface. Thread-safe; all instances act on the same pools.

    A region's pool is on ``FENCEPOOL_DEVICE``, or on PyTorch's current CUDA device when it is entered.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hook_mode: HookMode = "preload"
        self._is_retaining: bool | None = None  # None: as TMS_RETAIN_CPU_BACKUP says
        self._impl: Internals | None = None  # programs look whether it is there, and reach through it

    @contextlib.contextmanager
    def region(
        self,
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: BackupBackend | None = None,
    ) -> Iterator[None]:
        """What the calling thread allocates in the block can be paused, under that tag. The innermost counts.

        Args:
            tag: what :meth:`pause` and :meth:`resume` take.
            enable_cpu_backup: keep the contents through a pause, in pinned host memory.
            enable_disk_backup: keep them in a file, see :meth:`set_disk_backup_dir`.
            cpu_backup_backend: "pinned" and "mmap" are the same here.

        Raises:
            ValueError: arguments that exclude each other.
            DiskError: the directory for backups on disk cannot be used.
            PoolPausedError: the tag's pool is paused.
            DriverUnavailable: there is no device.
        """
        backup = _settings.backup_of(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        self._ensure_initialized()
        pool = pools.open(tag, backup)
        scope = Scope(tag, backup, backend=cpu_backup_backend or "")
        with entered(scope), pool.region():
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: BackupBackend | None = None,
    ) -> Iterator[None]:
        """``torch.cuda.graph`` whose memory can be paused, in either hook mode. Arguments as in region().

        Raises:
            Exception: whatever :func:`fencepool.cuda_graph` and the capture raise.
        """
        backup = _settings.backup_of(enable_cpu_backup, cpu_backup_backend=cpu_backup_backend)
        self._ensure_initialized()
        owner = pools.open(tag, backup)
        with (
            entered(Scope(tag, backup, backend=cpu_backup_backend or "")),
            fp.cuda_graph(
                cuda_graph,
                pool=pool,
                stream=stream,
                capture_error_mode=capture_error_mode,
                tag=tag,
                backup=owner.backup,
                device=owner.device,
            ),
        ):
            yield

    @contextlib.contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        """The calling thread allocates as if there were no region; harmless outside of one.

        Args:
            dispose_mem_pool_after_use: give what the block's dead tensors leave in PyTorch's cache back
                to the device at its end, as programs count on that hand the GPU to another process.
        """
        self._ensure_initialized()
        with ambient.left(), entered(Scope("", "none", is_pausable=False)), fp.disable():
            yield
            if dispose_mem_pool_after_use:
                _empty_cache()  # here, since PyTorch refuses inside of a region

    def pause(self, tag: str | None = None) -> None:
        """Give the tag's device memory away; without a tag, that of every tag this saver was given.

        What is paused already stays so. A tag without pools is passed over, with one warning.

        Raises:
            Error: whatever :func:`fencepool.pause` raises; every pool is then as it was.
        """
        self._ensure_initialized()
        tags = pools.tags(tag, "pause")
        if tags:
            with ambient.left_for(tags):
                fp.pause(*tags)

    def resume(self, tag: str | None = None) -> None:
        """Take the memory again, at the same addresses; without a tag, for every tag this saver was given.

        What is active already stays so. A tag without pools is passed over, with one warning. The device's
        later work is ordered behind the copies back; with ``retain_cpu_backup`` off they are waited for.

        Raises:
            OutOfMemoryError: the memory is not there; everything is still paused, and can be resumed later.
            Error: whatever else :func:`fencepool.resume` raises.
        """
        self._ensure_initialized()
        tags = pools.tags(tag, "resume")
        if not tags:
            return
        fp.resume(*tags)
        if not self.retain_cpu_backup:
            give_backups_back(tags)
        ambient.settle()

    @property
    def enabled(self) -> bool:
        """Always True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """What was asked for; "preload" and "torch" do the same. May be set at any time."""
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise ValueError(f"hook_mode is 'preload' or 'torch', not {hook_mode!r}")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """Bytes that an allocation in a region leaves free on its device, or else fails; 0 at first.

        PyTorch then frees its caches, tries again, and raises ``torch.OutOfMemoryError``.
        """
        return pools.margin

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized()
        pools.set_margin(value)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether host memory of backups is kept after a resume. Looked at when resuming.

        At first TMS_RETAIN_CPU_BACKUP, which is off. Turn it on where the host memory can be spared:
        pauses are several times as fast, and a resume does not hold the host.
        """
        if self._is_retaining is None:
            return _settings.flag("TMS_RETAIN_CPU_BACKUP")
        return self._is_retaining

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._is_retaining = bool(value)

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """A paused tensor's contents, on the CPU; None when they are in the tensor itself.

        That is so while its pool is active, and for a tensor of no pool.

        Args:
            x: a tensor of a region.
            zero_copy: a view of the backup instead of a copy, valid until the pool is resumed. Large
                backups lie in pieces, and a tensor whose backup does is copied all the same.

        Raises:
            Error: it is paused and was allocated without a backup.
        """
        self._ensure_initialized()
        return backup_of(x, is_copied=not zero_copy)

    def set_disk_backup_dir(self, path: str) -> None:
        """Set where the files of regions with ``enable_disk_backup`` lie.

        It counts for tags whose region is entered for the first time later; the directory is made if need be.
        Without this call it is TMS_DISK_BACKUP_DIR, or else the directory for temporary files. A file keeps
        its space between cycles, so that only what has changed is written again.

        Raises:
            OSError: it cannot be made.
        """
        pools.set_disk_directory(path)

    def _ensure_initialized(self) -> None:
        with self._lock:
            if self._impl is None:
                self._impl = Internals(self)


def _empty_cache() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from fencepool.pytorch import cuda_regions

        cuda_regions.empty_cache(torch.cuda.current_device())
