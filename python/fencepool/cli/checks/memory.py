"""Checks of host memory and disks, where backups live, and of the embedded driver, which is host memory."""

from __future__ import annotations

from ..facts import Facts
from ..text import GIB, size
from .finding import Finding, Status

# Less than this share of a GPU's memory: only small pools can be backed up in host memory.
_SMALL_SHARE = 0.1
# Without a GPU the largest thing that is likely to be backed up is a test.
_SMALL_WITHOUT_GPU = 1 * GIB


def embedded_driver(facts: Facts) -> Finding:
    """The embedded driver is part of fencepool; without it and without a GPU nothing works."""
    name = "embedded driver"
    if facts.embedded.is_available:
        return Finding(name, Status.OK, "device='cpu' works")
    return Finding(
        name,
        Status.WARN if facts.gpus else Status.FAIL,
        f"cannot be used: {facts.embedded.reason or 'no reason given'}",
        "it needs Linux with memfd_create; a sandbox may forbid that call",
    )


def host_memory(facts: Facts) -> Finding | None:
    """How much can be backed up before the system, or the container, runs out."""
    name = "host memory for backups"
    memory = facts.memory
    room = _room(facts)
    if room is None:
        return None
    says = f"{size(room)} free"
    if memory.cgroup_limit is not None:
        says += f" of the container's limit of {size(memory.cgroup_limit)} (cgroup v{memory.cgroup_version})"
    elif memory.total is not None:
        says += f" of {size(memory.total)}"
    largest = max((gpu.total_bytes for gpu in facts.gpus), default=None)
    do = "raise the limit, or back up less: backup='none' for what is made anew, such as a KV cache"
    if largest is None:
        return (
            Finding(name, Status.WARN, says, do)
            if room < _SMALL_WITHOUT_GPU
            else Finding(name, Status.OK, says)
        )
    if room < _SMALL_SHARE * largest:
        return Finding(name, Status.WARN, f"{says}: little beside a GPU with {size(largest)}", do)
    if room < largest:
        return Finding(name, Status.NOTE, f"{says}: a GPU with {size(largest)} cannot be backed up whole", do)
    return Finding(name, Status.OK, says)


def disk(facts: Facts) -> Finding | None:
    """Where backups on disk lie, when the environment says where."""
    name = "disk for backups"
    disk = facts.disk
    if disk is None:
        return None
    if disk.problem:
        do = "let FENCEPOOL_DISK_DIRECTORY name a directory of yours on a local disk"
        return Finding(name, Status.WARN, disk.problem, do)
    says = f"{disk.directory}: {size(disk.free)} free"
    if not disk.is_direct:
        do = "name a directory on a file system with direct I/O, such as ext4 or XFS"
        return Finding(name, Status.NOTE, f"{says}, without direct I/O: pauses go through the page cache", do)
    return Finding(name, Status.OK, f"{says}, direct I/O")


def huge_pages(facts: Facts) -> Finding | None:
    """Backups ask for transparent huge pages: fewer pages to touch and to pin."""
    name = "transparent huge pages"
    setting = facts.memory.huge_pages
    if setting is None:
        return None
    if setting in {"always", "madvise"}:
        return Finding(name, Status.OK, setting)
    return Finding(
        name,
        Status.NOTE,
        f"{setting}: a pool's first backup takes longer, as its host memory comes in 4 KiB pages",
        "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def locked_memory(facts: Facts) -> Finding:
    """The limit that RDMA registrations run into. CUDA's own pinned memory does not count."""
    name = "locked memory limit"
    limit = facts.memory.locked_limit
    if limit is None:
        return Finding(name, Status.OK, "none")
    return Finding(
        name,
        Status.NOTE,
        f"{size(limit)}: pinned backups do not count against it, memory registered for RDMA does",
        "if you use RDMA: ulimit -l unlimited (containers: --ulimit memlock=-1)",
    )


def _room(facts: Facts) -> int | None:
    memory = facts.memory
    limits = [] if memory.available is None else [memory.available]
    if memory.cgroup_limit is not None:
        limits.append(max(0, memory.cgroup_limit - (memory.cgroup_used or 0)))
    return min(limits, default=None)
