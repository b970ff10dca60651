"""Waiting, with an end, for what can be seen. Never to put things in order: latches do that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT = 60.0  # seconds; far beyond what a loaded machine needs


def eventually(condition: Callable[[], Any], what: str) -> None:
    """Wait until the condition holds; fail when it does not within LIMIT."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT:.0f} seconds in vain until {what}"
        time.sleep(0.0005)


class Job:
    """A call on a thread of its own, whose result or exception is fetched later."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # handed over in result()
            self._error = error

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        """What the call returned, or its exception raised here."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), f"the call did not end within {LIMIT:.0f} seconds"
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._value
