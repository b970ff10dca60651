"""The list of what is hooked: every hook wraps one function of SGLang and calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fencepool.integrations.sglang import adapter, answers, guards, occupation, startup, versions

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Hook:
    """``around(original, *arguments)`` in place of what is at "module:Class.name"."""

    place: str
    around: Callable[..., Any]


def hooks() -> list[Hook]:
    """Every hook for the installed release.

    Raises:
        UnsupportedSGLang: something that has to be hooked is not there.
    """
    at = versions.layout()
    scheduler, owner, manager = at.scheduler, at.owner, at.tokenizer_manager
    found = [
        Hook(f"{at.adapter}.create", adapter.create),
        Hook(f"{owner}.release_memory_occupation", occupation.release),
        Hook(f"{owner}.resume_memory_occupation", occupation.resume),
        Hook(at.static_state, occupation.wait_for_weights),
        Hook(f"{scheduler}.__init__", startup.note_arguments),
        Hook(f"{scheduler}.process_input_requests", occupation.retry_releases),
        Hook(f"{scheduler}.get_new_batch_prefill", guards.hold_requests),
        Hook(f"{scheduler}.flush_cache", guards.defer_flush),
        Hook(f"{at.communicator}.__call__", answers.read_answers),
        Hook(f"{manager}.release_memory_occupation", answers.return_message),
        Hook(f"{manager}.resume_memory_occupation", answers.return_message),
        *(Hook(_handler(scheduler, kind), guards.refuse_request) for kind in ("generate", "embedding")),
    ]
    for hook in found:
        if not _exists(hook.place):
            raise versions.UnsupportedSGLang(
                f"SGLang {versions.installed()} has no {hook.place}; fencepool leaves it as it is"
            )
    # What is not in every release.
    found += [
        Hook(f"{owner}.{name}", guards.guard_weights(name))
        for name in guards.WEIGHTS_USERS
        if _exists(f"{owner}.{name}")
    ]
    found += [
        Hook(f"{owner}.{name}", guards.guard_saving(name))
        for name in guards.WEIGHTS_SAVERS
        if _exists(f"{owner}.{name}")
    ]
    return found


def _handler(scheduler: str, kind: str) -> str:
    # Where there are two, the outer one gives back what came with a request, so the inner one is hooked.
    inner = f"{scheduler}._handle_{kind}_request"
    return inner if _exists(inner) else f"{scheduler}.handle_{kind}_request"


def _exists(place: str) -> bool:
    try:
        versions.resolve(place)
    except AttributeError:
        return False
    return True
