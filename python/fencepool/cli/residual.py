"""`fencepool residual`: who holds the memory of the GPUs, and how those that run fencepool divide theirs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from fencepool import _nvml, division, status_files
from fencepool.division import Line
from fencepool.status_files import OtherDevice, OtherProcess


class NothingToShow(Exception):  # noqa: N818 - an outcome
    """Nobody can be asked, or the process is not there. str() says why; `hint` what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a device."""

    pid: int
    program: str
    bytes: int | None  # None: NVML does not say
    runs_fencepool: bool = False  # and has written how its memory divides
    seconds_ago: float | None = None  # when it wrote that
    last: str = ""  # its last transition, in words
    lines: tuple[Line, ...] = ()
    host_bytes: int = 0


@dataclass(frozen=True)
class Place:
    """A GPU, or the embedded driver's device of one process."""

    name: str
    total: int
    used: int
    holders: tuple[Holder, ...]
    unknown: int


@dataclass(frozen=True)
class Report:
    """All that could be found out."""

    places: tuple[Place, ...]
    notes: tuple[str, ...] = field(default=())


def gather(where: Path, pid: int | None = None) -> Report:
    """Ask NVML, and read the status files in `where`.

    Raises:
        NothingToShow: neither says anything, or nothing about the process `pid`.
    """
    notes = []
    gpus: list[_nvml.GpuMemory] = []
    told: list[OtherProcess] = []
    try:
        gpus = _nvml.gpus()
    except _nvml.NvmlUnavailable as error:
        notes.append(f"GPUs are not shown: {error}.")
    try:
        told = status_files.read(where)
    except FileNotFoundError:
        pass  # nobody writes there, which is the default
    except OSError as error:
        notes.append(f"Status files are not read: {error}.")
    places = [_gpu(gpu, told) for gpu in gpus]
    places += [_embedded(one, device) for one in told for device in one.devices if _is_embedded(device)]
    if pid is not None:
        places = [_only(place, pid) for place in places if any(one.pid == pid for one in place.holders)]
    if not places:
        raise NothingToShow(_why(told, pid, notes), _HINT.format(variable=status_files.VARIABLE))
    return Report(tuple(places), tuple(notes))


_HINT = (
    "Inside a program, print(fencepool.residual()) needs neither NVML nor a file.\n"
    "For other processes: pip install 'fencepool[observe]' on a machine with a GPU, and start the programs "
    "with {variable}=1 for how each one's memory divides."
)


def _why(told: list[OtherProcess], pid: int | None, notes: list[str]) -> str:
    if pid is None:
        return " ".join(["No process tells what it holds.", *notes])
    if any(one.pid == pid for one in told):
        return f"Process {pid} runs fencepool and has no pools."
    return " ".join([f"Process {pid} holds no device memory that could be seen.", *notes])


def _is_embedded(device: OtherDevice) -> bool:
    return device.device.startswith("cpu")


def _gpu(gpu: _nvml.GpuMemory, told: list[OtherProcess]) -> Place:
    here = {
        one.pid: (one, device)
        for one in told
        for device in one.devices
        if not _is_embedded(device) and _nvml.same_bus(device.bus_id, gpu.bus_id)
    }
    # In a container NVML may not know a process by its number here: then it is shown with what it says.
    held = {**dict.fromkeys(here), **gpu.processes}
    holders = [
        _holder(*here[pid], count) if pid in here else Holder(pid, _program(pid), count)
        for pid, count in held.items()
    ]
    holders.sort(key=lambda one: -_held(one))
    known = sum(map(_held, holders))
    return Place(
        f"GPU {gpu.index}, {gpu.name}", gpu.total, gpu.used, tuple(holders), max(0, gpu.used - known)
    )


def _held(one: Holder) -> int:
    """What NVML says, else what the process itself does."""
    return division.total(one.lines) if one.bytes is None else one.bytes


def _embedded(one: OtherProcess, device: OtherDevice) -> Place:
    holder = _holder(one, device, None)
    unknown = max(0, device.used - division.total(holder.lines))
    name = f"{device.device}, the embedded driver of process {one.pid}"
    return Place(name, device.total, device.used, (holder,), unknown)


def _holder(one: OtherProcess, device: OtherDevice, count: int | None) -> Holder:
    return Holder(
        pid=one.pid,
        program=one.program,
        bytes=count,
        runs_fencepool=True,
        seconds_ago=max(0.0, time.time() - one.written),
        last=one.last,
        lines=tuple(division.of_process(device.pools, device.torch, count)),
        host_bytes=sum(pool.host_bytes for pool in device.pools),
    )


def _only(place: Place, pid: int) -> Place:
    holders = tuple(one for one in place.holders if one.pid == pid)
    return Place(place.name, place.total, place.used, holders, place.unknown)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
