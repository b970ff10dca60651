"""The environment variables of the SGLang integration, read when they are needed."""

from __future__ import annotations

import math
import os

WAIT = "FENCEPOOL_SGLANG_WAIT"
IDLE = "FENCEPOOL_SGLANG_IDLE"
ANY_VERSION = "FENCEPOOL_SGLANG_ANY_VERSION"


def wait_seconds() -> float:
    """How long ``resume_memory_occupation`` waits for memory that another process still holds."""
    return _seconds(WAIT, 30.0)


def idle_seconds() -> float:
    """How long ``release_memory_occupation`` waits for what the scheduler has still to finish."""
    return _seconds(IDLE, 1.0)


def is_any_version() -> bool:
    """Whether releases of SGLang that nobody has looked at are patched too."""
    value = os.environ.get(ANY_VERSION, "0").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{ANY_VERSION} is 0 or 1, not {value!r}")


def check() -> None:
    """Raise ValueError for a variable that cannot be read, at start and not at the first pause."""
    wait_seconds()
    idle_seconds()
    is_any_version()


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value < 0:
        raise ValueError(f"{name} is a number of seconds from 0 on, not {text!r}")
    return value
