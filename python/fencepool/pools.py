"""Pools: tensors that give their memory away together and take it back at the same addresses."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Literal, TypeVar

from fencepool import _core
from fencepool._devices import DeviceName, parse_device
from fencepool._streams import capture_candidates
from fencepool.errors import PoolBusyError, UnsupportedError
from fencepool.reports import PoolStatus, timings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import torch

    from fencepool.fences import Fence

    _Made = TypeVar("_Made")
    _Owner = TypeVar("_Owner", bound="torch.nn.Module | torch.Tensor")

Backup = Literal["none", "host", "resident", "disk"]
Fill = Literal["undefined", "zero"]


class CallbackHandle:
    """What registering a callback returns. Thread-safe."""

    def __init__(self, callbacks: dict[CallbackHandle, Callable[[Pool], None]]) -> None:
        self._callbacks = callbacks

    def remove(self) -> None:
        """Stop calling it. Harmless when done before."""
        self._callbacks.pop(self, None)


class Pool:
    """The tensors that share a tag, a device and a policy. Made by :func:`pool`. Thread-safe.

    After :meth:`close` whatever needs its memory raises ``ValueError``; in a forked child everything raises
    :class:`ForkedError`.
    """

    def __init__(self, core: _core.Pool) -> None:
        self._core = core
        self._before_pause: dict[CallbackHandle, Callable[[Pool], None]] = {}
        self._after_resume: dict[CallbackHandle, Callable[[Pool], None]] = {}
        # Held through a transition, so that callbacks run once for it; taken in the order of ids.
        self._transition = threading.RLock()
        self._changing = 0  # the thread that holds it and relies on no region being entered
        # Of the last resume, where the tensors' users are to wait for it themselves: see fence_modules().
        self._restoring: Fence | None = None
        # The thread of each region that is entered. Without a lock: a fork or a signal may come in between.
        self._entered: dict[object, int] = {}

    @property
    def tag(self) -> str:
        """The name that pause and resume take."""
        return self._core.tag

    @property
    def device(self) -> str:
        """The device: ``"cuda:0"``, or ``"cpu"`` for the embedded driver."""
        return self._core.device

    @property
    def torch_device(self) -> str:
        """The device as its tensors report it: every device of the embedded driver is PyTorch's "cpu"."""
        return "cpu" if self._core.provider == "host" else self._core.device

    @property
    def backup(self) -> Backup:
        """Where the contents are while the pool is paused: "none" drops them, "host" keeps them out of reach,
        "resident" in host memory at the tensors' own addresses, "disk" in a file.
        """
        return self._core.backup

    @property
    def directory(self) -> str:
        """Where the file of a backup on a disk lies; it has no name there. Empty for other backups."""
        return self._core.directory

    @property
    def retain(self) -> bool:
        """Whether the backup's host memory, or its space on a disk, is kept from one pause to the next."""
        return self._core.retain

    @property
    def fill(self) -> Fill:
        """What a pool without backup holds after a resume."""
        return self._core.fill

    @property
    def digests(self) -> bool:
        """Whether a pause copies only the blocks that changed, and a resume can be verified."""
        return self._core.has_digests

    @property
    def state(self) -> str:
        """Either "active" or "paused", or what it is in the middle of: "pausing", "resuming", "preparing"."""
        return str(self._core.status()["state"])

    @property
    def _is_paused(self) -> bool:
        """Settled state: what a transition under way will change is still what it was."""
        return bool(self._core.status()["is_paused"])

    def __repr__(self) -> str:
        return f"<fencepool.Pool {self.tag!r} on {self.device}, backup={self.backup!r}, {self.state}>"

    def empty(
        self, shape: int | tuple[int, ...] | list[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A tensor in the pool, contents undefined, contiguous, its address fixed for as long as it lives.

        Tensors of 1 MiB and more get a segment of their own, rounded up to the device's granularity
        (2 MiB on today's GPUs); smaller ones share segments. A tensor without elements takes no memory.
        When the tensor dies, on any thread, its memory is given back once the device's work so far has
        ended; the device is not stopped. Thread-safe. Rests on cuMemAddressReserve, cuMemCreate and cuMemMap
        (CUDA Driver API, Virtual Memory Management).

        Args:
            shape: sizes, in elements.
            dtype: PyTorch's default when None.

        Raises:
            TypeError, ValueError: a bad shape or dtype, or more bytes than an address space.
            PoolPausedError: the pool is paused.
            OutOfMemoryError: the device has too little memory, after PyTorch's cache was emptied too, or less
                would be left than the memory margin; nothing was allocated.
        """
        import torch

        from fencepool import _tensors

        sizes = _tensors.parse_shape(shape)
        kind = _tensors.parse_dtype(dtype)
        size = _tensors.byte_size(sizes, kind)
        self._prepare_torch()
        if size == 0:
            return torch.empty(sizes, dtype=kind, device=self.torch_device)
        block = _retry_without_cache(lambda: self._core.allocate(size))
        return _tensors.tensor_over(_tensors.storage_over(block, size), kind, sizes)

    def adopt(self, owner: _Owner) -> _Owner:
        """Move a module's parameters and buffers, or one tensor, into the pool, and return the owner.

        The tensors stay the same objects, so optimizers and tied weights keep working; storages that
        were shared stay shared, and views stay views with their strides. Tensors may come from any
        device. What lies in the pool already is left alone. References from outside the module to the
        old storages keep the old memory. All or nothing: when it fails nothing has changed. Not
        thread-safe against other uses of the module meanwhile.

        Raises:
            TypeError: it is neither a module nor a tensor.
            ValueError: a tensor on the meta device, a sparse or quantized one, a lone non-contiguous one,
                or a parameter with a gradient that would change its device.
            PoolPausedError: the pool is paused, or a tensor lies in a pool that is.
            OutOfMemoryError: the device has too little memory.
        """
        from fencepool import _adopt

        self._prepare_torch()
        _adopt.adopt(self, owner)
        return owner

    def region(self) -> AbstractContextManager[Pool]:
        """Have PyTorch allocate in the pool: a context manager for this thread and the pool's device.

        On a GPU this goes through ``torch.cuda.MemPool``; on the embedded driver every new CPU tensor is
        moved into the pool. Regions nest, the innermost counts, and may be entered again. Other threads,
        autograd's and new ones included, allocate where they did. Tensors may outlive the region and be
        freed anywhere; when PyTorch gives their memory back it is released once the device's work so far
        has ended. Memory that died inside the region is given back at its end.

        While a region is entered, pausing the pool raises :class:`PoolBusyError`: PyTorch would hand out
        addresses with no memory behind them. When memory is short, PyTorch frees its caches, tries again,
        then raises ``torch.OutOfMemoryError`` with what the pool says in its notes.

        Raises:
            UnsupportedError: on entry, on a GPU, PyTorch is older than 2.8.
            PoolPausedError: on entry, the pool is paused.
            PoolBusyError: on entry, 64 pools have regions already, or the pool is one that another thread is
                changing while this one is in a callback of another pool.
        """
        from fencepool.pytorch import regions

        return regions.region(self)

    def backup_of(self, tensor: torch.Tensor, *, copy: bool = True) -> torch.Tensor:
        """What a tensor holds, read from the backup while the pool is paused.

        Args:
            tensor: one whose memory lies in this pool.
            copy: a copy of its own. False: a view of the backup itself. The view stays readable
                for as long as it lives, but holds the tensor's contents only until the pool resumes; what
                is written to it is restored then. It keeps its part of the host memory from being given
                back, and has the next pause copy everything, as digests cannot tell what was written. Of a
                resident pool it is the same memory as the tensor's, and the way to read it on a GPU's host:
                synchronise first with kernels that write there. A backup on a disk has none.

        Returns:
            A CPU tensor of the same dtype, shape and strides.

        Raises:
            TypeError: it is no tensor.
            ValueError: it does not lie in this pool, has not one dense storage, the pool is active or keeps
                no backup, or, with ``copy=False``, its backup is in several pieces or shared with equal bytes
                elsewhere in the pool.
            PoolBusyError: for a copy, from a callback of another pool while another thread changes this one.
            UnsupportedError: with ``copy=False``, the backup is on a disk.
            DiskError: it cannot be read from there.
        """
        from fencepool.pytorch import backups

        return backups.backup_of(self, tensor, is_copied=copy)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory lies in this pool. False for one without elements or without one storage.

        Raises:
            TypeError: it is no tensor.
        """
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"contains() takes a torch.Tensor, not {type(tensor).__name__}")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            return False
        if tensor.numel() == 0 or str(tensor.device) != self.torch_device:
            return False
        return self._core.contains(tensor.data_ptr())

    def prepare(self, *, progress: bool = False) -> int:
        """Provision the backup for what is live now, so that the first pause is as fast as later ones.

        What is allocated later is provided for by the pause, or by calling again.

        Args:
            progress: show a bar on standard error when it takes longer than a second (an estimate; tqdm).

        Returns:
            Bytes of host memory added, or of a disk; 0 without a backup, when there is enough, or while
            paused.

        Raises:
            HostMemoryError: the host has too little; nothing was changed.
            DiskError: the disk has too little; nothing was changed.
            DriverError: the driver cannot register it (cuMemHostRegister) or, for a resident pool, make or
                map it; nothing was changed.
        """
        from fencepool import progress as bars

        with bars.shown(progress, "prepare", [self]):
            return self._core.prepare()

    def trim(self) -> int:
        """Give the backup's host memory back; the process's resident memory falls before it returns.

        Of a backup on a disk, its space there, and the pinned buffers to it that no transition uses.

        Returns:
            Bytes given back.

        Raises:
            PoolPausedError: the pool is paused and its contents are in the backup.
        """
        return self._core.trim()

    def on_pause(self, callback: Callable[[Pool], None]) -> CallbackHandle:
        """Call ``callback(pool)`` before each pause, while the memory is still there.

        For what is registered with NCCL or for RDMA and must be deregistered before its pages change.
        When a callback raises, the pause does not happen: ``on_resume`` callbacks run for the pools whose
        ``on_pause`` callbacks had run, and the exception goes to the caller. Callbacks run on the thread that
        pauses, in the order they were registered; not at all when the pool is paused already.

        Raises:
            TypeError: it is not callable.
        """
        return _register(self._before_pause, callback)

    def on_resume(self, callback: Callable[[Pool], None]) -> CallbackHandle:
        """Call ``callback(pool)`` after each resume, with memory at the same addresses again.

        The copies may still run; the device's own work is ordered behind them. When callbacks raise, the
        rest still run, the pools stay active, and the resume raises :class:`CallbackError`. Callbacks run on
        the thread that resumes, in the order they were registered.

        Raises:
            TypeError: it is not callable.
        """
        return _register(self._after_resume, callback)

    def status(self) -> PoolStatus:
        """The pool at this moment. Never waits for a transition."""
        status = self._core.status()
        return PoolStatus(
            tag=self.tag,
            device=self.device,
            backup=self.backup,
            state=status["state"],
            segments=status["segments"],
            bytes_mapped=status["bytes_mapped"],
            bytes_reserved=status["bytes_reserved"],
            bytes_used=status["bytes_used"],
            bytes_backed_up=status["bytes_backed_up"],
            host_bytes=status["host_bytes"],
            disk_bytes=status["disk_bytes"],
            direct_io=status["is_direct"],
            digests=status["has_digests"],
            pending_frees=status["pending_frees"],
            last_pause=timings(status["last_pause"]) if status["last_pause"] else None,
            last_resume=timings(status["last_resume"]) if status["last_resume"] else None,
            problems=tuple(_core.problems()),
        )

    def close(self) -> None:
        """Give everything back and forget the pool; :func:`pool` makes a new one.

        Waits for the work that still uses what was freed. A paused pool can be closed too.

        Raises:
            PoolBusyError: it still has live tensors, or a region of it is entered; nothing was changed.
            ValueError: it is closed already.
        """
        with exclusive(self), self._without_regions("closed"):
            self._trim_torch(is_waiting=True)
            _core.close_pool(self._core)
            self._restoring = None
            if "fencepool.pytorch.cuda_regions" in sys.modules:
                sys.modules["fencepool.pytorch.cuda_regions"].forget(self)
        with _known_lock:
            _known.pop(self._core.id, None)

    @contextlib.contextmanager
    def _without_regions(self, doing: str) -> Iterator[None]:
        """Meanwhile no other thread enters a region. The caller has the pool to itself."""
        before = self._changing
        self._changing = threading.get_ident()
        try:
            self._refuse_inside_region(doing)
            yield
        finally:
            self._changing = before

    def _is_changed_elsewhere(self) -> bool:
        return self._changing not in (0, threading.get_ident())

    def _refuse_inside_region(self, doing: str) -> None:
        if self._entered:
            raise PoolBusyError(
                f"{self!r} cannot be {doing}: {len(self._entered)} of its regions or captures are entered; "
                "leave them first. Nothing was changed"
            )

    def _trim_torch(self, *, is_waiting: bool) -> None:
        # What PyTorch holds of the pool without using it goes back to the pool.
        regions = sys.modules.get("fencepool.pytorch.cuda_regions")
        if regions is not None and self._core.provider == "cuda":
            regions.trim(self, is_waiting=is_waiting)

    def _dead_bytes(self) -> dict[int, int]:
        # What PyTorch holds of the pool as free is no contents: address to bytes.
        regions = sys.modules.get("fencepool.pytorch.cuda_regions")
        if regions is None or self._core.provider != "cuda" or self.backup == "none":
            return {}
        dead: dict[int, int] = regions.dead_bytes(self)
        return dead

    def _prepare_torch(self) -> None:
        # The streams to look at before a free are known from here on.
        if self._core.provider == "cuda":
            import torch

            torch.cuda.init()  # type: ignore[no-untyped-call]
            capture_candidates([DeviceName("cuda", self._core.ordinal)])


class _Held(threading.local):
    """Ids of the pools that this thread has to itself."""

    def __init__(self) -> None:
        self.ids: list[int] = []


_held = _Held()


@contextlib.contextmanager
def exclusive(*pools: Pool) -> Iterator[None]:
    """Keep other threads from changing these pools, which are in the order of their ids.

    Raises:
        PoolBusyError: a callback of one pool asks for another that another thread has, and waiting could be
            for ever, since that one may wait for this.
    """
    _core.require_owner()  # a forked child may have a lock that nobody will let go of
    with contextlib.ExitStack() as stack:
        for pool in pools:
            number = pool._core.id
            may_wait = all(number >= held for held in _held.ids)
            if not pool._transition.acquire(blocking=may_wait):
                raise PoolBusyError(
                    f"{pool!r} is being changed by another thread, which may wait for this one to leave a "
                    "callback; nothing was changed"
                )
            stack.callback(pool._transition.release)
            _held.ids.append(number)
            stack.callback(_held.ids.remove, number)
        yield


def _retry_without_cache(allocate: Callable[[], _Made]) -> _Made:
    """Allocate; when memory is short, PyTorch's cached blocks are given back and it is tried once more."""
    import torch

    try:
        return allocate()
    except MemoryError:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise
        empty_torch_cache()
    return allocate()


def empty_torch_cache() -> None:
    """Have PyTorch give back what it holds without use.

    It refuses with a RuntimeError while a region or a capture of any thread is under way (an assertion in
    c10/cuda/CUDACachingAllocator.cpp, synchronize_and_free_events). Then memory is as short as it was.
    """
    import torch

    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


def _register(
    callbacks: dict[CallbackHandle, Callable[[Pool], None]], callback: Callable[[Pool], None]
) -> CallbackHandle:
    _core.require_owner()
    if not callable(callback):
        raise TypeError(f"a callback is callable with the pool, not {type(callback).__name__}")
    handle = CallbackHandle(callbacks)
    callbacks[handle] = callback
    return handle


_known: dict[int, Pool] = {}
_known_lock = threading.RLock()  # a destructor or a signal handler may come in between and ask for pools


def known(core: _core.Pool) -> Pool:
    """The one Pool object of a pool of the core.

    For one that another thread has closed since it was listed: an object that nobody keeps.
    """
    with _known_lock:
        found = _known.get(core.id)
        if found is None:
            found = Pool(core)
            # Whoever closes it takes it from the core first, and forgets it here after that.
            if any(one.id == core.id for one in _core.pools()):
                _known[core.id] = found
        return found


def pool(
    tag: str,
    device: str | torch.device = "cuda",
    *,
    backup: Backup = "none",
    retain: bool = True,
    fill: Fill = "undefined",
    digests: bool | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Pool:
    """Get or create the pool of that tag, device and policy. Thread-safe.

    The same tag with another policy or on another device is another pool of that tag: pause and resume
    act on all of them together.

    Args:
        tag: a name; not empty, without NUL characters.
        device: "cuda" (PyTorch's current device), "cuda:N", or "cpu" to "cpu:3" for the embedded driver.
        backup: "none" drops the contents at a pause; "host" keeps them in pinned host memory; "resident"
            keeps them in host memory that stands at the tensors' own addresses while the pool is paused:
            kernels, copies and the processor go on reading and writing there, at the speed of the link, and
            what they wrote is there after the resume. That memory takes a quarter of a second for a gibibyte
            to make (:meth:`Pool.prepare` makes it ahead), and a resume waits for the work in flight. "disk"
            keeps them in a file, for what the host has no memory for: a pause returns when they are
            written, and a resume when they are read.
        retain: keep the backup's host memory, or its space on a disk, from one pause to the next. Without it
            the memory goes back before each resume returns, which then waits for the restore.
        fill: what a pool without backup holds after a resume: "undefined", or "zero".
        digests: have the device take 128-bit digests of the contents at each pause, and copy only the blocks
            of 256 KiB that are not in the backup yet; equal blocks are stored once, zeros nowhere. None:
            where the device can (:attr:`Pool.digests` says so); False: every byte is copied at every
            pause; True: it must be able to. A resident backup has none.
        directory: of a local disk, for a backup on a disk; ``FENCEPOOL_DISK_DIRECTORY`` when None. The pool
            has one file there, which no other user can read, has no name, and is gone when the process and
            those it forked have ended, however they ended. A relative path counts from where the process is
            now.

    Raises:
        TypeError, ValueError: a bad argument; a backup on a disk without a directory.
        DiskError: no file can be made in the directory, or it lies in the host's memory (tmpfs).
        DriverUnavailable: the device's driver cannot be used here.
        UnsupportedError: digests were asked for, and the device cannot take them; or a resident backup, and
            the driver puts no host memory at the device's addresses.
    """
    if not isinstance(tag, str):
        raise TypeError(f"a tag is a string, not {type(tag).__name__}")
    if not isinstance(retain, bool):
        raise TypeError(f"retain is True or False, not {type(retain).__name__}")
    for name, value in (("backup", backup), ("fill", fill)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a string, not {type(value).__name__}")
    if digests is not None and not isinstance(digests, bool):
        raise TypeError(f"digests is True, False or None, not {type(digests).__name__}")
    if digests and backup == "none":
        raise ValueError("digests are of a backup, and backup is 'none'")
    if digests and backup == "resident":
        raise ValueError("a resident backup has no digests: what is written while it is paused counts")
    folder = _folder(backup, directory)
    where = parse_device(device)
    if backup == "resident" and (reason := _core.why_no_host_memory(where.provider, where.ordinal)):
        raise UnsupportedError(
            f"{where} has no backup='resident': {reason}; backup='host' keeps contents too"
        )
    if digests and (reason := _core.load_kernels(where.provider, where.ordinal)):
        raise UnsupportedError(f"{where} cannot take digests: {reason}")
    has_digests = backup in ("host", "disk") and digests is not False
    return known(
        _core.get_pool(where.provider, where.ordinal, tag, backup, retain, fill, has_digests, folder)
    )


def _folder(backup: str, directory: str | os.PathLike[str] | None) -> str:
    """The absolute path for a backup on a disk; empty for others."""
    if backup != "disk":
        if directory is not None:
            raise ValueError(f"a directory is for backup='disk', and backup is {backup!r}")
        return ""
    chosen = directory if directory is not None else os.environ.get("FENCEPOOL_DISK_DIRECTORY", "")
    path = os.fspath(chosen)
    if not isinstance(path, str):
        raise TypeError(f"directory is a string or a path, not {type(path).__name__}")
    if not path:
        raise ValueError(
            "backup='disk' needs a directory of a local disk: pass directory=, or set "
            "FENCEPOOL_DISK_DIRECTORY"
        )
    if "\0" in path:
        raise ValueError("directory must not hold a NUL character")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"directory must be text in UTF-8, not {os.fsencode(path)!r}") from None
    return os.path.abspath(path)
