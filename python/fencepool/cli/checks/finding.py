"""What a check of the doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """How much a finding matters, mildest first. The worst one decides the doctor's exit status."""

    OK = "ok"  # as it should be
    NOTE = "note"  # worth knowing; nothing of what fencepool promises is lost
    WARN = "warn"  # something works less well than it could, or does not work on this machine
    FAIL = "fail"  # broken: fencepool, or the GPU in this machine, cannot be used until it is repaired

    @property
    def exit_status(self) -> int:
        """0 for ok and note, 1 for warn, 2 for fail."""
        return {Status.OK: 0, Status.NOTE: 0, Status.WARN: 1, Status.FAIL: 2}[self]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report: what was looked at, how it is, and what to do about it."""

    name: str
    status: Status
    says: str
    do: str = ""


def worst(findings: list[Finding]) -> Status:
    """The most serious status among `findings`; OK when there is none."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)
