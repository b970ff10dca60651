"""The end of a restore, and the ways to wait for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fencepool._streams import parse_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepool import _core


class Fence:
    """The end of a restore. Thread-safe, and valid for as long as it is kept.

    After ``resume(order="context")`` nobody has to wait: the device's later work is ordered already.
    After ``order="explicit"`` whoever touches the memory waits here first.
    """

    def __init__(self, core: _core.Fence) -> None:
        self._core = core
        self._has_ended = False  # seen to have: asking again would be a call of the driver

    def wait(self, stream: Any) -> None:
        """Order work submitted to ``stream`` from now on behind the restore; the host is not held.

        Rests on cuStreamWaitEvent (CUDA Driver API, Stream Management).

        Args:
            stream: a ``torch.cuda.Stream``, an object with ``__cuda_stream__``, or an integer handle.

        Raises:
            TypeError: it is no stream.
            ValueError: it belongs to a device that the resume did not concern, or cannot be told whose it is.
            CaptureError: it is being captured into a CUDA graph.
            DriverError: a driver call failed; the stream is not ordered.
        """
        parsed = parse_stream(stream)
        providers = self._core.providers
        if parsed.is_torch:
            self._core.wait(parsed.handle, "cuda", parsed.ordinal)
        elif len(providers) > 1:
            raise ValueError(
                "the fence concerns GPUs and the embedded driver, and a plain stream handle does not say "
                "whose it is; resume them apart, or call synchronize()"
            )
        elif providers:
            self._core.wait(parsed.handle, providers[0], parsed.ordinal)

    def synchronize(self, timeout: float | None = None) -> None:
        """Hold the host until the restore has ended.

        Args:
            timeout: seconds; None waits as long as it takes. Ctrl-C ends the wait.

        Raises:
            TimeoutError: it did not end in time; it goes on, and can be waited for again.
            DriverError: the restore failed.
        """
        if not self._core.synchronize(parse_seconds("timeout", timeout)):
            raise TimeoutError(f"the restore did not end within {timeout} seconds; it goes on")
        self._has_ended = True

    def done(self) -> bool:
        """Whether the restore has ended. Never waits.

        Raises:
            DriverError: the restore failed.
        """
        if not self._has_ended:
            self._has_ended = self._core.is_done()
        return self._has_ended

    def _part(self, runs: Sequence[tuple[int, int]]) -> Fence:
        """What of it concerns these runs of (address, bytes); done where nothing is brought back to them."""
        return Fence(self._core.part(runs))


def parse_seconds(name: str, value: float | None) -> float:
    """A time limit as the core takes it: None becomes -1, no limit."""
    if value is None:
        return -1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds or None, not {type(value).__name__}")
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} is a number of seconds from 0 on, not {value}")
    return -1.0 if math.isinf(value) else float(value)
