"""The memory limit of the control group this process is in, which in a container is the container's.

Both versions are read from files; docs.kernel.org describes them: admin-guide/cgroup-v2 (memory.max,
memory.current, memory.stat) and admin-guide/cgroup-v1/memory (memory.limit_in_bytes, memory.usage_in_bytes,
memory.stat).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "no limit" as the largest multiple of the page size; no machine has half of that.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Cgroup:
    """The tightest limit on this process and what counts against it, in bytes. None: unknown, or no limit."""

    version: int | None = None
    limit: int | None = None
    used: int | None = None


@dataclass(frozen=True)
class _Files:
    version: int
    limit: str
    used: str
    reclaimable: str  # the line of memory.stat with page cache that is dropped before anything fails


_V1 = _Files(1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files(2, "memory.max", "memory.current", "inactive_file")


def read_cgroup(root: Path) -> Cgroup:
    """The limit that applies to this process: groups nest, and the tightest one counts."""
    version = None
    for files, mount, path in _memory_groups(root):
        version = version or files.version
        limits = [
            (limit, folder)
            for folder in _upwards(mount, path)
            if (limit := _limit(folder / files.limit)) is not None
        ]
        if limits:
            limit, folder = min(limits, key=lambda pair: pair[0])
            return Cgroup(files.version, limit, _used(folder, files))
    return Cgroup(version)


def _memory_groups(root: Path) -> list[tuple[_Files, Path, str]]:
    # /proc/self/cgroup: "4:memory:/a/b" for version 1, "0::/a/b" for version 2; both can be there at once.
    groups = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            groups.append((_V1, root / "sys/fs/cgroup/memory", path))
        elif number == "0" and (root / "sys/fs/cgroup/cgroup.controllers").exists():
            groups.append((_V2, root / "sys/fs/cgroup", path))
    return groups


def _upwards(mount: Path, path: str) -> list[Path]:
    # A container often sees its own group as the mount's root while the path names one outside: what does not
    # exist has no limit file and is passed over.
    folder = mount / path.lstrip("/")
    folders = [folder]
    while folder != mount and mount in folder.parents:
        folder = folder.parent
        folders.append(folder)
    return folders


def _limit(path: Path) -> int | None:
    value = _number(path)
    return None if value is None or value >= _NO_LIMIT else value


def _used(folder: Path, files: _Files) -> int | None:
    used = _number(folder / files.used)
    if used is None:
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return used
    return max(0, used - int(stat.get(files.reclaimable, "0")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # ValueError: "max", version 2's word for no limit
        return None
