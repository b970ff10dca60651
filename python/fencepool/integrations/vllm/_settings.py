"""What the environment says. Read when it is needed, so that workers see what their process was given."""

from __future__ import annotations

import logging
import os

from fencepool._devices import parse_device

# Below vLLM's own logger, so that its handlers and its level apply.
logger = logging.getLogger("vllm.fencepool")


def device() -> str:
    """``FENCEPOOL_DEVICE``: where pools are made. The default is PyTorch's current GPU; "cpu" needs none."""
    return os.environ.get("FENCEPOOL_DEVICE") or "cuda"


def check() -> None:
    """Raise ValueError for a setting that cannot be used, before an engine is built on it."""
    parse_device(device())
    is_retaining()
    wait()


def is_retaining() -> bool:
    """``FENCEPOOL_VLLM_RETAIN``: keep the backup's host memory while awake, for the next sleep. Default 1.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    value = os.environ.get("FENCEPOOL_VLLM_RETAIN") or "1"
    if value not in ("0", "1"):
        raise ValueError(f"FENCEPOOL_VLLM_RETAIN is 0 or 1, not {value!r}")
    return value == "1"


def wait() -> float:
    """``FENCEPOOL_VLLM_WAIT``: seconds that a wake-up waits for memory that others give back. Default 30.

    Raises:
        ValueError: it is no number of seconds from 0 on.
    """
    value = os.environ.get("FENCEPOOL_VLLM_WAIT") or "30"
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # NaN too
        raise ValueError(f"FENCEPOOL_VLLM_WAIT is a number of seconds from 0 on, not {value!r}")
    return seconds
