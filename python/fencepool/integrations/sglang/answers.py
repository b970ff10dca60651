"""What a scheduler says to the engine's process beyond SGLang's own answers, which have no room for it.

The answers to release, resume and get_weights_by_name carry no message. Every answer of every release can
carry a string ``rid``, which nobody reads in an answer to a control request; so the message travels there.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

_SUCCESS = "fencepool:done:"
_FAILURE = "fencepool:refused:"
_said: contextvars.ContextVar[str] = contextvars.ContextVar("fencepool_sglang_said", default="")


class MemoryOccupationError(RuntimeError):
    """SGLang was asked for what cannot be done now. Nothing was lost, and the engine goes on.

    Attributes:
        success: always False, as in the answers of SGLang that have the field.
        message: what happened, on which rank, and what to do.
    """

    success = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def done(answer: Any, message: str) -> Any:
    """The answer with a message to a request that was carried out, or that had nothing to do."""
    answer.rid = _SUCCESS + message
    return answer


def refused(answer: Any, message: str) -> Any:
    """The answer with a message to a request that was not carried out; awaiting it raises."""
    answer.rid = _FAILURE + message
    return answer


async def read_answers(
    original: Callable[..., Awaitable[Sequence[Any]]], communicator: Any, *args: Any, **kwargs: Any
) -> Sequence[Any]:
    """Around a communicator's call: raise MemoryOccupationError when a scheduler refused."""
    results = await original(communicator, *args, **kwargs)
    texts = [text for text in (getattr(result, "rid", None) for result in results) if isinstance(text, str)]
    failures = _unique(texts, _FAILURE)
    if failures:
        raise MemoryOccupationError("; ".join(failures))
    _said.set("; ".join(_unique(texts, _SUCCESS)))
    return results


async def return_message(original: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
    """Around the engine's release and resume, which return nothing: ``(True, message)``, as updates do."""
    _said.set("")
    result = await original(*args, **kwargs)
    return (True, _said.get() or "Success.") if result is None else result


def _unique(texts: Sequence[str], prefix: str) -> list[str]:
    return list(dict.fromkeys(text[len(prefix) :] for text in texts if text.startswith(prefix)))
