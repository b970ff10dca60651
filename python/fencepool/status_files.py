"""Files in which processes tell, for ``fencepool residual``, how their device memory divides. Off by default.

With ``FENCEPOOL_STATUS_DIR`` in its environment a process writes one small file, ``<process number>.json``,
after every transition, and removes it when it ends. Nobody is asked or stopped to read it: a reader never
waits for the process, nor the process for a reader.

The directory belongs to one user, who alone may enter it (0700), and so do the files (0600). Anything else is
refused, by writers and by readers, so that nobody can plant a file or a link there. No command line,
environment, path or content is written: tags, sizes, times, and the program's name.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import stat
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fencepool import _core, division, observing, remaining
from fencepool._devices import parse_device
from fencepool._version import __version__
from fencepool.machine import memory_info

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "FENCEPOOL_STATUS_DIR"
SCHEMA = "fencepool.status/1"
_LARGEST = 1 << 20

logger = logging.getLogger(__name__)


def directory(value: str) -> Path:
    """What a value of the variable names: "1" is $XDG_RUNTIME_DIR/fencepool, else /tmp/fencepool-<user>.

    A relative path counts from where the process is now, wherever it goes later.
    """
    if value != "1":
        return Path(os.path.abspath(value))
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "fencepool" if runtime else Path(f"/tmp/fencepool-{os.geteuid()}")


def chosen_directory() -> Path | None:
    """The directory that the environment names; None where it asks for no status file."""
    value = os.environ.get(VARIABLE)
    return None if value in (None, "", "0") else directory(value)


class StatusFile:
    """Writes this process's file from now on. Thread-safe; a forked child writes nothing."""

    def __init__(self, where: Path) -> None:
        """Make the directory if need be, and the first file.

        Raises:
            OSError: it cannot be made or written.
            PermissionError: it is not this user's alone.
        """
        self._where = where
        self._pid = os.getpid()
        self._started = start_time(self._pid)
        self._lock = threading.RLock()  # a signal handler may pause pools while a file is written
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(None)
        observing.add(self._observe)
        atexit.register(self.close)

    def close(self) -> None:
        """Write no longer, and remove the file."""
        observing.remove(self._observe)
        atexit.unregister(self.close)
        if os.getpid() == self._pid:
            with self._lock, contextlib.suppress(OSError):
                (self._where / f"{self._pid}.json").unlink()

    def _observe(self, seen: observing.Transition) -> None:
        if not _core.is_forked_child():
            self._write(seen)

    def _write(self, seen: observing.Transition | None) -> None:
        with self._lock:
            self._replace(self._tell(seen))

    def _tell(self, seen: observing.Transition | None) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "fencepool": __version__,
            "pid": self._pid,
            "started": self._started,
            "program": os.path.basename(sys.argv[0] or sys.executable)[:64],
            "written": time.time(),
            "last": _told(seen),
            "devices": [_device(name) for name in dict.fromkeys(core.device for core in _core.pools())],
        }

    def _replace(self, whole: dict[str, Any]) -> None:
        with opened(self._where) as folder:
            new = f".{self._pid}.{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(new, flags, 0o600, dir_fd=folder), "w", encoding="utf-8") as file:
                json.dump(whole, file)
            os.replace(new, f"{self._pid}.json", src_dir_fd=folder, dst_dir_fd=folder)


def from_environment() -> StatusFile | None:
    """Begin, where the environment asks for it. What stands against it is logged: it is no reason to stop."""
    where = chosen_directory()
    if where is None:
        return None
    try:
        return StatusFile(where)
    except OSError as error:
        logger.warning("no status file is written (%s=%s): %s", VARIABLE, os.environ[VARIABLE], error)
        return None


@dataclass(frozen=True)
class OtherDevice:
    """A device of another process, when it last wrote."""

    device: str
    bus_id: str
    total: int
    used: int
    pools: tuple[division.PoolBytes, ...]
    torch: division.TorchMemory | None


@dataclass(frozen=True)
class OtherProcess:
    """What another process last wrote."""

    pid: int
    program: str
    written: float
    """Seconds on the clock of ``time.time``."""
    last: str
    """Its last transition in words; empty before the first."""
    devices: tuple[OtherDevice, ...]


def read(where: Path) -> list[OtherProcess]:
    """What the processes that are alive wrote; what is damaged or left over from ended ones is passed over.

    Raises:
        FileNotFoundError: no process has written there.
        PermissionError: the directory is not this user's alone.
    """
    with opened(where) as folder:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        found = [_read(folder, name) for name in names]
    return [one for one in found if one is not None]


@contextlib.contextmanager
def opened(where: Path) -> Iterator[int]:
    """The directory's descriptor, if it is this user's alone. Root may look into anybody's."""
    folder = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(folder)
        if facts.st_uid != os.geteuid() and os.geteuid() != 0:
            raise PermissionError(
                f"{where} belongs to another user; {VARIABLE} wants a directory of your own"
            )
        if stat.S_IMODE(facts.st_mode) & 0o077:
            raise PermissionError(f"{where} is open to other users: chmod 700 {where}")
        yield folder
    finally:
        os.close(folder)


def start_time(pid: int) -> int:
    """When a process began, in ticks since the machine's start (proc(5), field 22); 0 when there is none."""
    try:
        # The program's name comes before, in parentheses, and may have anything in it.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        return int(fields.split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _device(name: str) -> dict[str, Any]:
    where = parse_device(name)
    pools, torch = remaining.look(where)
    free, whole = memory_info(name)
    return {
        "device": name,
        "bus_id": remaining.bus_id(where),
        "total": whole,
        "used": whole - free,
        "pools": [asdict(pool) for pool in pools],
        "torch": asdict(torch) if torch is not None else None,
    }


def _told(seen: observing.Transition | None) -> str:
    if seen is None:
        return ""
    failed = f" failed ({type(seen.error).__name__})" if seen.error is not None else ""
    return f"{seen.kind} of {', '.join(seen.tags) or 'nothing'}{failed}, {seen.total * 1e3:.1f} ms"


def _read(folder: int, name: str) -> OtherProcess | None:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # removed meanwhile, or a link
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        text = os.read(file, _LARGEST)
    finally:
        os.close(file)
    return parse(name, text)


def parse(name: str, text: bytes) -> OtherProcess | None:
    """What a file of that name says; None when it is damaged, or its process has ended. Trusts nothing."""
    try:
        whole = json.loads(text)
        if whole["schema"] != SCHEMA or name != f"{int(whole['pid'])}.json":
            return None
        if start_time(int(whole["pid"])) != whole["started"]:
            return None  # it has ended, and another may have its number
        return OtherProcess(
            pid=int(whole["pid"]),
            program=str(whole["program"]),
            written=float(whole["written"]),
            last=str(whole["last"]),
            devices=tuple(_other_device(one) for one in whole["devices"]),
        )
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return None


def _other_device(one: dict[str, Any]) -> OtherDevice:
    torch = one["torch"]
    return OtherDevice(
        device=str(one["device"]),
        bus_id=str(one["bus_id"]),
        total=int(one["total"]),
        used=int(one["used"]),
        pools=tuple(
            division.PoolBytes(
                tag=str(pool["tag"]),
                device=str(pool["device"]),
                state=str(pool["state"]),
                bytes_mapped=int(pool["bytes_mapped"]),
                host_bytes=int(pool["host_bytes"]),
            )
            for pool in one["pools"]
        ),
        torch=division.TorchMemory(**{key: int(value) for key, value in torch.items()}) if torch else None,
    )
