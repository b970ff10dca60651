"""What must not touch memory that is not there: weights being read or written, and requests."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fencepool.integrations.sglang import answers, state
from fencepool.integrations.sglang.adapter import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
_occupation = state.occupation

# Methods of the owner of the weights, and the answer that each gives.
WEIGHTS_USERS = {
    "update_weights_from_disk": "UpdateWeightFromDiskReqOutput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqOutput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqOutput",
    "update_weights_from_ipc": "UpdateWeightsFromIPCReqOutput",
    "begin_weight_update": "BeginWeightUpdateReqOutput",
    "end_weight_update": "EndWeightUpdateReqOutput",
    "get_weights_by_name": "GetWeightsByNameReqOutput",
    "check_weights": "CheckWeightsReqOutput",
}
# Those that SGLang calls through its RPC request, which reports what they raise.
WEIGHTS_SAVERS = ("save_remote_model", "save_sharded_model")


def guard_weights(name: str) -> Callable[..., Any]:
    """A hook around one of WEIGHTS_USERS: refused with a message while the weights are paused."""

    def around(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        message = _weights_message(owner, name)
        if not message:
            return original(owner, *args, **kwargs)
        logger.warning(message)
        answer = getattr(importlib.import_module("sglang.srt.managers.io_struct"), WEIGHTS_USERS[name])
        if name == "get_weights_by_name":
            return answers.refused(answer(parameter=[]), message)
        return answer(success=False, message=message)

    return around


def guard_saving(name: str) -> Callable[..., Any]:
    """A hook around one of WEIGHTS_SAVERS."""

    def around(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        message = _weights_message(owner, name)
        if message:
            raise answers.MemoryOccupationError(message)
        return original(owner, *args, **kwargs)

    return around


def _weights_message(owner: Any, name: str) -> str:
    if state.WEIGHTS not in _occupation.blocked or not is_ours(owner.memory_saver_adapter):
        return ""
    return (
        f"{name} refused: the weights are released. Call resume_memory_occupation with the tag "
        f"{state.WEIGHTS!r} first; nothing was changed"
    )


def refuse_request(
    original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around a scheduler's handling of a new request: ended at once while memory is not there.

    After ``pause_generation`` it is queued, as SGLang does, and waits for memory too.
    """
    is_held = getattr(scheduler, "_engine_paused", False) or not _can_say_why()
    if not _occupation.blocked or is_held or not is_ours(scheduler.memory_saver_adapter):
        return original(scheduler, request, *args, **kwargs)
    tags = sorted(_occupation.blocked)
    message = (
        f"request refused: released memory of {', '.join(tags)} is not there. Call "
        f"resume_memory_occupation with the tags {tags} first"
    )
    logger.warning(message)
    abort = importlib.import_module("sglang.srt.managers.io_struct").AbortReq(
        rid=request.rid,
        finished_reason={
            "type": "abort",
            "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
            "message": message,
        },
    )
    _send(scheduler, abort, request)
    return None


def hold_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the choice of waiting requests to run next: none while memory is not there."""
    if not _occupation.blocked or not is_ours(scheduler.memory_saver_adapter):
        return original(scheduler, *args, **kwargs)
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    # 0.5.17 and later hand the running batch in and out.
    running = args[0] if args else kwargs.get("running_batch")
    plan = getattr(batches, "NextBatchPlan", None)
    return None if running is None or plan is None else plan(batch_to_run=None, running_batch=running)


def defer_flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``flush_cache``: put off while the cache's memory is away, as after an update of the weights.

    The release flushed the cache, and nothing has run since, so that it is empty; but flushing writes to the
    memory of some kinds of cache.
    """
    if state.KV_CACHE not in _occupation.blocked or not is_ours(scheduler.memory_saver_adapter):
        return original(scheduler, *args, **kwargs)
    _occupation.is_flush_due = True
    return True


@functools.cache
def _can_say_why() -> bool:
    """Whether a request can be ended with a message: not in 0.4.9, where it is held instead."""
    abort = importlib.import_module("sglang.srt.managers.io_struct").AbortReq
    return "finished_reason" in inspect.signature(abort).parameters


def _send(scheduler: Any, abort: Any, request: Any) -> None:
    if hasattr(scheduler, "send_abort_output"):
        scheduler.send_abort_output(abort, request)
        return
    channels = getattr(scheduler, "ipc_channels", scheduler)
    sender = channels.send_to_tokenizer
    if hasattr(sender, "send_output"):
        sender.send_output(abort, request)
    else:
        sender.send_pyobj(abort)
