"""Who is told of every transition: the log, and whoever asked (metrics, traces)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fencepool import ranges
from fencepool.reports import device_memory, pool_transitions, timings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fencepool.pools import Pool
    from fencepool.reports import DeviceMemory, PoolTransition, Timings

# Quiet by default: a handler of the program's own, on it or above, makes it speak. Only this logger: what the
# integrations have to say is shown where nobody has configured logging, too.
logger = logging.getLogger("fencepool.transitions")
logger.addHandler(logging.NullHandler())


@dataclass
class Transition:
    """One pause or resume of some pools, from the call to its end."""

    kind: Literal["pause", "resume"]
    tags: tuple[str, ...]
    """Each once, in the order of the pools."""
    thread: int
    """The native id of the thread that called."""
    began: float
    """Seconds on the clock of ``time.time``."""
    total: float = 0.0
    """Seconds, callbacks included."""
    pools: tuple[PoolTransition, ...] = ()
    """Empty after a failure."""
    seconds: Timings = field(default_factory=dict)
    """By phase, in the order they ran."""
    device_memory: tuple[DeviceMemory, ...] = ()
    """Of the devices of the pools, before and after; empty after a failure."""
    error: BaseException | None = None

    def fill(self, report: dict[str, Any]) -> None:
        """Take the outcome over from a report of the core."""
        self.pools, self.seconds = pool_transitions(report), timings(report["seconds"])
        self.device_memory = device_memory(report)

    @property
    def bytes(self) -> int:
        """Device memory released or mapped."""
        return sum(pool.bytes for pool in self.pools if pool.changed)

    @property
    def bytes_copied(self) -> int:
        """Contents copied to or from backups."""
        return sum(pool.bytes_copied for pool in self.pools)


Observer = Callable[[Transition], None]
_observers: list[Observer] = []
_lock = threading.Lock()


def add(observer: Observer) -> None:
    """Call ``observer(transition)`` at each one's end, on its thread. What it raises is logged."""
    with _lock:
        _observers.append(observer)


def remove(observer: Observer) -> None:
    """Stop calling it. Harmless when done before."""
    with _lock, contextlib.suppress(ValueError):
        _observers.remove(observer)


@contextlib.contextmanager
def transition(kind: Literal["pause", "resume"], pools: Sequence[Pool]) -> Iterator[Transition]:
    """Observe the block as one transition; it fills in the outcome. What it raises goes on."""
    tags = tuple(dict.fromkeys(pool.tag for pool in pools))
    seen = Transition(kind, tags, threading.get_native_id(), time.time())
    start = time.perf_counter()
    try:
        with ranges.named(f"{kind} {', '.join(tags)}"):
            yield seen
    except BaseException as error:
        seen.error = error
        raise
    finally:
        seen.total = time.perf_counter() - start
        _log(seen)
        with _lock:
            observers = list(_observers)
        for observer in observers:
            try:
                observer(seen)
            except Exception:  # the transition itself has happened, or has its own failure
                logger.exception("an observer of transitions failed")
        # A traceback would keep the frames of a failed call, and the tensors in them, alive.
        seen.error = None


def _log(seen: Transition) -> None:
    names = ", ".join(seen.tags) or "nothing"
    if seen.error is not None:
        logger.warning(
            "%s of %s failed after %.1f ms: %s: %s",
            seen.kind,
            names,
            seen.total * 1e3,
            type(seen.error).__name__,
            str(seen.error),  # whoever keeps the record must not keep the error's frames, and their tensors
        )
    elif logger.isEnabledFor(logging.INFO):
        phases = ", ".join(
            f"{name} {value * 1e3:.1f}" for name, value in seen.seconds.items() if name != "total"
        )
        logger.info(
            "%s of %s: %.1f MiB, %.1f MiB copied, %.1f ms (%s)",
            seen.kind,
            names,
            seen.bytes / 2**20,
            seen.bytes_copied / 2**20,
            seen.total * 1e3,
            phases,
        )
