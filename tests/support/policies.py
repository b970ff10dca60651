"""The policies a pool can have, and what its tensors hold after a pause and a resume."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.contents import assert_same, is_same, pattern


def disk_directory() -> str:
    """A directory of a disk: where temporary files lie in the host's memory, another one."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    in_memory = {mount[1] for mount in mounts if mount[2] in ("tmpfs", "ramfs")}
    places = {mount[1] for mount in mounts}
    fallbacks = (tempfile.gettempdir(), "/var/tmp", str(Path(__file__).parent))
    for directory in (os.environ.get("FENCEPOOL_DISK_DIRECTORY", ""), *fallbacks):
        if not directory or not os.access(directory, os.W_OK):
            continue
        real = Path(directory).resolve()
        mounted_at = next(str(one) for one in (real, *real.parents) if str(one) in {*places, "/"})
        if mounted_at not in in_memory:
            return directory
    raise AssertionError("no directory of a disk; name one in FENCEPOOL_DISK_DIRECTORY")


@dataclass(frozen=True)
class Policy:
    name: str
    backup: str
    retain: bool = True
    fill: str = "undefined"

    @property
    def options(self) -> dict[str, Any]:
        options = {"backup": self.backup, "retain": self.retain, "fill": self.fill}
        return {**options, "directory": disk_directory()} if self.backup == "disk" else options

    @property
    def keeps_contents(self) -> bool:
        return self.backup != "none"

    def differs(self, tensor: Any, before: Any) -> bool:
        """Whether a tensor that held `before` when it was paused holds what it must not after the resume."""
        if self.keeps_contents:
            return not is_same(tensor, before)
        if self.fill == "zero":
            return bool(tensor.any())
        return False

    def assert_after(self, tensor: Any, before: Any) -> None:
        """The tensor, which held `before` when it was paused, holds after the resume what the policy says."""
        if self.keeps_contents:
            assert_same(tensor, before)
        elif self.fill == "zero":
            assert_same(tensor, before * 0)
        else:  # undefined: but the memory is there, to be written and read
            anew = pattern(before.numel(), seed=4321)
            tensor.view(-1).copy_(anew)
            assert_same(tensor.view(-1), anew)


POLICIES = [
    Policy("none-undefined", "none"),
    Policy("none-zero", "none", fill="zero"),
    Policy("host-retain", "host"),
    Policy("host-once", "host", retain=False),
    Policy("resident", "resident"),
    Policy("disk", "disk"),
    Policy("disk-once", "disk", retain=False),
]
# A backup out of reach of the tensors: nobody writes to it while the pool is paused.
HOST = [policy for policy in POLICIES if policy.backup == "host"]
KEEPING = [policy for policy in POLICIES if policy.keeps_contents]
# One whose contents can be seen where they are, and another time.
VIEWED = [policy for policy in KEEPING if policy.backup != "disk"]
# Where digests tell what has changed.
DIGESTED = [policy for policy in POLICIES if policy.backup in ("host", "disk")]
BY_NAME = {policy.name: policy for policy in POLICIES}
# Whose tests wait: it does in them what another one does, only slower.
LATER = {"disk-once": [pytest.mark.soak, pytest.mark.release]}
