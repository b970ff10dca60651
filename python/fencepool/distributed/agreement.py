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
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fencepool import _core
from fencepool.errors import RankError, add_note

_OK = ""
# The longest single wait, in seconds, so that Python's signals are looked at.
_SLICE = 0.5


class Agreement:
    """What the ranks of one group have agreed on. Every rank makes the same calls in the same order."""

    def __init__(self, group: Any) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank: int = dist.get_rank()
        if self.rank not in self.ranks:
            raise ValueError(f"rank {self.rank} is not in the group of ranks {self.ranks}")
        name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        default = dist.distributed_c10d._get_default_store()
        lives = dist.distributed_c10d.PrefixStore(f"fencepool/{name}", default)
        # A store may outlive its process groups, as a launcher's does: what it still holds of an earlier
        # init_process_group() would answer for this one. So each has keys of its own. A rank counts for
        # itself: where it counts too few it sees rounds it was not part of, and none of those succeeded.
        life = lives.add(f"life/{self.rank}", 1)
        self._store: Any = dist.distributed_c10d.PrefixStore(str(life), lives)
        self._round = 0
        self._were_all_there = False  # in the round before

    def decide(self, doing: str, failure: BaseException | None, patience: float) -> BaseException | None:
        """Post this rank's outcome, hear the others', and return when all succeeded.

        Args:
            doing: what was tried, for messages.
            failure: why this rank cannot go on; None when it can.
            patience: seconds to wait for the others.

        Returns:
            None; or what interrupted this rank (Ctrl-C) when all had succeeded by then, so that it holds for
            this rank too. An interruption that came before is told to the others and raised.

        Raises:
            RankError: the same on every rank: one or more failed, or did not answer in time.
        """
        self._round += 1
        interruption: BaseException | None = None
        try:
            try:
                self._store.set(f"{self._round}/{self.rank}", json.dumps(_said(failure)))
                heard = self._hear(patience)
                decision = self._settle(self._failures(heard, patience))
                is_complete = len(heard) == len(self.ranks)
            except Exception:
                raise
            except BaseException as error:  # others may have counted on this rank: only the decision says
                interruption = error
                decision = self._settle({self.rank: _said(failure or error)})
                is_complete = False
        except (RuntimeError, ValueError) as error:  # the store's errors; PyTorch has no one class for them
            raise RankError(
                f"{doing}: the process group's store does not answer: {error}. The process that hosts it has "
                "ended (rank 0, unless the launcher does)",
                {},
            ) from failure
        with contextlib.suppress(RuntimeError, ValueError):  # the decision holds, whatever the store does now
            self._forget_old()
        self._were_all_there = is_complete
        if not decision:
            return interruption
        causes = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(decision.items()))
        message = f"{doing} failed on {len(decision)} of {len(self.ranks)} ranks. {causes}"
        if interruption is not None:
            add_note(interruption, message)
            raise interruption
        raise RankError(message, decision) from failure

    def _failures(self, heard: dict[int, str], patience: float) -> dict[int, str]:
        missing = f"has not answered within {patience:g} s; it has ended, or hangs"
        return {rank: heard.get(rank, missing) for rank in self.ranks if heard.get(rank, missing) != _OK}

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
        left = timedelta(seconds=min(max(0.001, deadline - time.monotonic()), _SLICE))
        with contextlib.suppress(RuntimeError):  # the wait's time is over; check() says whether the store is
            self._store.wait([key], left)
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


# By the default process group's store, and by ranks. Another init_process_group() brings another store.
# The old one must not be kept alive from here: PyTorch would serve what it holds at its port again.
_agreements: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Agreement]] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def agreement_of(group: Any) -> Agreement:
    """The one agreement of that group; None stands for all ranks.

    Raises:
        ForkedError: in a forked child, which must not speak for its parent's rank.
        RuntimeError: torch.distributed is not initialised.
        ValueError: this rank is not in the group.
    """
    _core.require_owner()
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call init_process_group() first")
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    with _making:
        made = _agreements.setdefault(dist.distributed_c10d._get_default_store(), {})
        if ranks not in made:
            made[ranks] = Agreement(group)
        return made[ranks]
