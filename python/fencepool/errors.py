"""Every exception fencepool raises, and the one place where the core's failures become exceptions.

Bad arguments raise ``ValueError`` or ``TypeError``; everything else derives from :class:`Error`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Error(Exception):
    """Base of fencepool's exceptions.

    Attributes:
        pool: tag of the pool at work; empty when none was.
        bytes_wanted: bytes the operation needed; 0 when it needed none.
        bytes_free: bytes that were free, on the device or, for a backup, on the host.
    """

    pool: str = ""
    bytes_wanted: int = 0
    bytes_free: int = 0


class DriverError(Error):
    """A driver call failed.

    Attributes:
        call: the call, as the CUDA Driver API names it: ``"cuMemMap"``.
        status: its result's name: ``"CUDA_ERROR_INVALID_VALUE"``.
        code: its result's number.
    """

    call: str = ""
    status: str = ""
    code: int = 0


class HostMemoryError(Error, MemoryError):
    """The host has too little memory for a backup. Nothing was changed."""


class DiskError(Error, OSError):
    """The directory of a backup is not fit for it, or its file could not be made, grown, written or read.

    Nothing was changed: a pool that was to be paused is active, one that was to be resumed is paused, and
    the call can be made again. ``bytes_wanted`` and ``bytes_free`` are of the file system when it is full,
    ``errno`` and ``strerror`` the system call's; they are None where no call failed.

    Attributes:
        call: the system call: ``"fallocate"``; empty when none failed.
        path: the directory.
    """

    call: str = ""
    path: str = ""

    def __str__(self) -> str:
        """The message as it is: OSError would make one of ``errno``."""
        return str(self.args[0]) if self.args else ""


class QuiesceTimeout(Error, TimeoutError):  # noqa: N818 - named for what happened, as TimeoutError is
    """Work in flight did not end in time. Nothing was changed."""


class CaptureError(Error):
    """A stream is being captured into a CUDA graph, which the operation would break. Nothing was changed."""


class PoolPausedError(Error):
    """The pool is paused, and the operation needs it active. Nothing was changed."""


class PoolBusyError(Error):
    """The pool is in use: live tensors, entered regions, another thread's change. Nothing was changed."""


class CorruptedBackupError(Error):
    """A backup holds something else than was stored. Nothing was handed out, and the pools stay paused."""


class UnknownTagError(Error, KeyError):
    """No pool has that tag; the message names those there are. Nothing was changed."""

    def __str__(self) -> str:
        """The message as it is: KeyError would quote it."""
        return str(self.args[0]) if self.args else ""


class DriverUnavailable(Error):  # noqa: N818 - a state of the machine
    """The driver of that device cannot be used on this machine; the message says why and what to do."""


class UnsupportedError(Error, NotImplementedError):
    """Something that this device, build or pool cannot do, or that fencepool does not do of another library's
    interface; the message names it.
    """


class ForkedError(Error):
    """Called in a child process made by ``fork``; no driver was called. Use ``spawn`` or ``forkserver``."""


class CallbackError(Error):
    """An ``on_resume`` callback failed. The pools are active; the callback's exception is the cause."""


class RankError(Error):
    """An operation across ranks failed on one of them, and so on all. The message is the same everywhere.

    Attributes:
        ranks: global rank -> why it failed. Empty when the ranks could not be asked.
    """

    def __init__(self, message: str, ranks: dict[int, str]) -> None:
        super().__init__(message)
        self.ranks = dict(ranks)


if TYPE_CHECKING:

    class OutOfMemoryError(DriverError, MemoryError):
        """The device has too little memory. What was asked for did not happen, and can be asked again.

        At run time it also derives from ``torch.OutOfMemoryError`` where PyTorch is installed.
        """


_KINDS: dict[str, type[BaseException]] = {
    "driver": DriverError,
    "host_memory": HostMemoryError,
    "disk": DiskError,
    "quiesce_timeout": QuiesceTimeout,
    "capture": CaptureError,
    "paused": PoolPausedError,
    "busy": PoolBusyError,
    "unavailable": DriverUnavailable,
    "forked": ForkedError,
    "corrupted": CorruptedBackupError,
    "invalid": ValueError,
}


def __getattr__(name: str) -> Any:
    # Made on first use: its base may be PyTorch's class, and importing fencepool must not import PyTorch.
    if name != "OutOfMemoryError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in globals():
        return globals()[name]
    bases: tuple[type, ...] = (DriverError, MemoryError)
    if importlib.util.find_spec("torch") is not None:
        # A broken PyTorch must not hide that memory ran out.
        with contextlib.suppress(ImportError, OSError, AttributeError):
            bases = (DriverError, importlib.import_module("torch").OutOfMemoryError, MemoryError)
    made = type(
        "OutOfMemoryError",
        bases,
        {
            "__module__": __name__,
            "__doc__": "The device has too little memory. What was asked for did not happen.",
        },
    )
    return globals().setdefault(name, made)


def from_core(
    *,
    kind: str,
    message: str,
    call: str,
    code: int,
    status: str,
    path: str,
    pool: str,
    bytes_wanted: int,
    bytes_free: int,
    notes: Sequence[str],
) -> BaseException:
    """Make the exception for a failure of the core. Called by the extension."""
    made: type[BaseException] = __getattr__("OutOfMemoryError") if kind == "out_of_memory" else _KINDS[kind]
    error = made(message)
    if isinstance(error, Error):
        error.pool, error.bytes_wanted, error.bytes_free = pool, bytes_wanted, bytes_free
    if isinstance(error, DriverError):
        error.call, error.status, error.code = call, status, code
    if isinstance(error, DiskError):
        error.call, error.path, error.filename = call, path, path
        if code:
            error.errno, error.strerror = code, status
    for note in notes:
        add_note(error, note)
    return error


def add_note(error: BaseException, note: str) -> None:
    """Attach a second failure to the first (PEP 678; kept in ``__notes__`` before Python 3.11 too)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        vars(error).setdefault("__notes__", []).append(note)
