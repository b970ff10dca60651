"""One decision for all ranks: the same on each, whoever is late, and never a hang.

Ranks post how they fared under keys of the process group's store, wait for the others' keys, and then
settle on one decision by the store's compare-and-set: the first proposal holds for everybody. So a rank that
is late, and was given up by another, learns that; it does not go on alone. (Two-phase commit with the
decision in one atomic register: Gray and Lamport, "Consensus on Transaction Commit", 2006.)

A store rather than collectives: it works whatever the group's backend is, takes no device, and when a rank
has died the others can say which. Collectives over gloo fail without a name, or only on one rank with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fencepool.errors import RankError

_OK = ""
# The longest single wait, so that Python's signals are looked at.
_SLICE = timedelta(milliseconds=500)


class Agreement:
    """What the ranks of one group have agreed on. Every rank makes the same calls in the same order."""

    def __init__(self, group: Any) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank: int = dist.get_rank()
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in the group of ranks {self.ranks}")
        name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        default = dist.distributed_c10d._get_default_store()
        self._store: Any = dist.distributed_c10d.PrefixStore(f"fencepool/{name}", default)
        self._round = 0
        self._were_all_there = False  # in the round before

    def decide(self, doing: str, failure: BaseException | None, patience: float) -> None:
        """Post this rank's outcome, hear the others', and return when all succeeded.

        Args:
            doing: what was tried, for messages.
            failure: why this rank cannot go on; None when it can.
            patience: seconds to wait for the others.

        Raises:
            RankError: the same on every rank: one or more failed, or did not answer in time.
        """
        self._round += 1
        try:
            self._store.set(f"{self._round}/{self.rank}", json.dumps(_said(failure)))
            heard = self._hear(patience)
            missing = f"has not answered within {patience:g} s; it has ended, or hangs"
            failures = {
                rank: heard.get(rank, missing) for rank in self.ranks if heard.get(rank, missing) != _OK
            }
            decision = self._settle(failures)
            self._forget_old()
            self._were_all_there = len(heard) == len(self.ranks)
        except (RuntimeError, ValueError) as error:  # the store's errors; PyTorch has no one class for them
            raise RankError(
                f"{doing}: the process group's store does not answer: {error}. The process that hosts it has "
                "ended (rank 0, unless the launcher does)",
                {},
            ) from failure
        if decision:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(decision.items()))
            message = f"{doing} failed on {len(decision)} of {len(self.ranks)} ranks. {causes}"
            raise RankError(message, decision) from failure

    def _hear(self, patience: float) -> dict[int, str]:
        """What each rank that answers in time says."""
        deadline = time.monotonic() + patience
        heard: dict[int, str] = {}
        for rank in self.ranks:
            key = f"{self._round}/{rank}"
            while not self._is_there(key, deadline):
                if time.monotonic() >= deadline:
                    break
            else:
                heard[rank] = str(json.loads(self._store.get(key)))
        return heard

    def _is_there(self, key: str, deadline: float) -> bool:
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        with contextlib.suppress(RuntimeError):  # the wait's time is over; check() says whether the store is
            self._store.wait([key], min(left, _SLICE))
            return True
        return bool(self._store.check([key]))

    def _settle(self, failures: dict[int, str]) -> dict[int, str]:
        """The decision that holds: this proposal, or the one that came first."""
        proposal = json.dumps({"failures": failures})
        final = json.loads(self._store.compare_set(f"{self._round}/decision", "", proposal))
        return {int(rank): str(cause) for rank, cause in final["failures"].items()}

    def _forget_old(self) -> None:
        # Whoever posted in the round before has finished the one before that.
        if self._were_all_there:
            self._store.delete_key(f"{self._round - 2}/{self.rank}")
            if self.rank == self.ranks[0]:
                self._store.delete_key(f"{self._round - 2}/decision")


def _said(failure: BaseException | None) -> str:
    return _OK if failure is None else f"{type(failure).__name__}: {failure}"


_agreements: dict[tuple[int, ...], Agreement] = {}
_making = threading.Lock()


def agreement_of(group: Any) -> Agreement:
    """The one agreement of that group; None stands for all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this rank is not in the group.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call init_process_group() first")
    with _making:
        made = Agreement(group)
        # Another init_process_group() brings another store, whose rounds begin anew.
        key = (id(dist.distributed_c10d._get_default_store()), *made.ranks)
        return _agreements.setdefault(key, made)
