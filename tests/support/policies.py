"""The policies a pool can have, and what its tensors hold after a pause and a resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.contents import assert_same, is_same, pattern


@dataclass(frozen=True)
class Policy:
    name: str
    backup: str
    retain: bool = True
    fill: str = "undefined"

    @property
    def options(self) -> dict[str, Any]:
        return {"backup": self.backup, "retain": self.retain, "fill": self.fill}

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
]
# A backup out of reach of the tensors: nobody writes to it while the pool is paused.
HOST = [policy for policy in POLICIES if policy.backup == "host"]
KEEPING = [policy for policy in POLICIES if policy.keeps_contents]
