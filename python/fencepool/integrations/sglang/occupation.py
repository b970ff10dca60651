"""Around SGLang's release and resume: what is refused, what every rank agrees on, and in which order.

SGLang's own code keeps its bookkeeping: queues, the flushed cache, the copies of buffers. Memory itself goes
in one transition for all tags, after SGLang's code when it is released and before it when it is resumed, so
that each is all or nothing.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import time
from typing import TYPE_CHECKING, Any

from fencepool.integrations.sglang import agreement, answers, barriers, settings, state
from fencepool.integrations.sglang.adapter import is_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)
_occupation = state.occupation


def release(original: Callable[..., Any], owner: Any, request: Any) -> Any:
    """Around ``release_memory_occupation``, on every rank. None when it is tried again later."""
    if not is_ours(owner.memory_saver_adapter):
        return original(owner, request)
    answer = _answer("ReleaseMemoryOccupationReqOutput")
    tags, problem = _tags(request)
    if problem:
        return _refuse(answer, problem)
    group = getattr(owner, "tp_cpu_group", None)
    now = time.monotonic()
    deadline = _occupation.retried.pop(id(request), now + settings.idle_seconds())
    views = agreement.gather(
        group, ([tag for tag in tags if tag not in _occupation.released], _is_idle(owner), now >= deadline)
    )
    fresh = [tag for tag in tags if any(tag in view[0] for view in views)]
    if fresh and not all(is_idle for _, is_idle, _ in views):
        if not any(is_over for _, _, is_over in views):
            _occupation.deferred.append((request, deadline))
            return None
        return _refuse(
            answer,
            f"{_names(fresh)} not released: requests are running or queued. Wait for "
            "them or abort them, then release again",
        )
    if fresh:
        # SGLang's own refusal, of weights that another process shares for one, may be one rank's alone.
        outcomes, can_undo = barriers.run(
            group, lambda: _attempt(lambda: _inside(original, owner, request, fresh))
        )
        if any(outcomes):
            undone = agreement.gather(group, _attempt(lambda: _undo(owner, request, fresh, can_undo)))
            message = f"{_names(fresh)} not released: {agreement.failures(outcomes)}"
            if any(undone):
                message += f"; and not undone: {agreement.failures(undone)}"
            return _refuse(answer, message)
    outcomes = agreement.gather(group, _attempt(lambda: state.pause(tags)))
    if all(outcomes) and fresh:
        _inside(_inner(owner, "resume_memory_occupation"), owner, request, fresh)
        return _refuse(
            answer, f"{_names(fresh)} not released, nothing was changed: {agreement.failures(outcomes)}"
        )
    _occupation.mark_released(fresh)
    if any(outcomes):
        # Taking it back would lose contents without a backup on the ranks that succeeded.
        return _refuse(
            answer,
            f"{_names(tags)} not released everywhere: {agreement.failures(outcomes)}; "
            "other ranks have released it. Release again, or resume it",
        )
    return _done(answer, "released", fresh, [tag for tag in tags if tag not in fresh], "released already")


def resume(original: Callable[..., Any], owner: Any, request: Any) -> Any:
    """Around ``resume_memory_occupation``, on every rank."""
    if not is_ours(owner.memory_saver_adapter):
        return original(owner, request)
    answer = _answer("ResumeMemoryOccupationReqOutput")
    tags, problem = _tags(request)
    if problem:
        return _refuse(answer, problem)
    group = getattr(owner, "tp_cpu_group", None)
    views = agreement.gather(group, [tag for tag in tags if tag in _occupation.released])
    wanted = [tag for tag in tags if any(tag in view for view in views)]
    rest = [tag for tag in tags if tag not in wanted]
    if not wanted:
        return _done(answer, "resumed", [], rest, "not released")
    wait = settings.wait_seconds()
    outcomes = agreement.gather(group, _attempt(lambda: state.resume(wanted, wait)))
    if any(outcomes):
        # On the ranks that failed too: after a callback's failure the memory is there all the same.
        undone = agreement.gather(group, _attempt(lambda: state.pause(wanted)))
        message = (
            f"{_names(wanted)} not resumed after {wait:g} s, on any rank: {agreement.failures(outcomes)}"
        )
        if any(undone):
            message += f"; and not paused again: {agreement.failures(undone)}"
        else:
            message += "; all of it is paused"  # a callback's failure says that its pools are active
        return _refuse(answer, f"{message}. Its contents are kept; resume again once memory is free")
    _inside(original, owner, request, wanted)
    _occupation.mark_resumed(wanted)
    if state.KV_CACHE in wanted and _occupation.is_flush_due:
        _occupation.is_flush_due = False
        owner.flush_cache()
    return _done(answer, "resumed", wanted, rest, "not released")


def wait_for_weights(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``_import_static_state``: what it writes lands behind the restore, on its own stream."""
    wait_for_restore()
    return original(*args, **kwargs)


def wait_for_restore() -> None:
    """Order this thread's current stream behind every restore; on a CPU the host is what waits."""
    device = _occupation.device()
    for fence in _occupation.fences.values():
        if device == "cpu":
            fence.synchronize()
        else:
            torch = importlib.import_module("torch")
            fence.wait(torch.cuda.current_stream(device))


def retry_releases(original: Callable[..., Any], scheduler: Any, requests: Any) -> Any:
    """Around ``process_input_requests``: first the releases that found the scheduler busy the last time.

    The results of a batch are processed one turn of the loop after it ran, so a release right after a
    request's last token finds the scheduler busy with it. Every rank comes here on the same turn.
    """
    again, _occupation.deferred = _occupation.deferred, []
    if not again:
        return original(scheduler, requests)
    _occupation.retried = {id(request): deadline for request, deadline in again}
    try:
        return original(scheduler, [*(request for request, _ in again), *requests])
    finally:
        _occupation.retried = {}  # identities mean something only while the requests live


def _tags(request: Any) -> tuple[list[str], str]:
    """The tags without repetition, all when none are given; or what is wrong with them."""
    constants = importlib.import_module("sglang.srt.constants")
    known = list(getattr(constants, "GPU_MEMORY_ALL_TYPES", (state.KV_CACHE, state.WEIGHTS)))
    tags = list(dict.fromkeys(request.tags or known))
    unknown = [tag for tag in tags if tag not in known]
    if unknown:
        return [], f"unknown tag {_names(unknown)}; SGLang has {_names(known)}. Nothing was changed"
    return tags, ""


def _is_idle(owner: Any) -> bool:
    check = getattr(owner, "is_fully_idle", None)
    if check is None:
        return _is_drained(owner)
    if "ignore_waiting" in inspect.signature(check).parameters:
        scheduler = getattr(owner, "scheduler", None)
        return bool(check(ignore_waiting=scheduler is not None and scheduler._engine_paused))
    return bool(check())


def _is_drained(scheduler: Any) -> bool:
    """For releases that release while the batch after a request's last token is still computed.

    It was launched before that token was seen, and would compute on memory that is gone.
    """
    if scheduler.waiting_queue or getattr(scheduler, "result_queue", None):
        return False
    batches = (getattr(scheduler, name, None) for name in ("running_batch", "cur_batch", "last_batch"))
    check = getattr(scheduler, "_is_no_request", None)
    return all(batch is None or batch.is_empty() for batch in batches) and (check is None or bool(check()))


def _inside(call: Callable[..., Any], owner: Any, request: Any, tags: list[str]) -> None:
    """SGLang's own release or resume of those tags, which acts on no memory."""
    with _occupation.guarded():
        call(owner, _with_tags(request, tags))


def _undo(owner: Any, request: Any, tags: list[str], can_undo: bool) -> None:
    """Take SGLang's release back where a rank failed in it, on every rank. No memory has gone anywhere.

    The rank that failed cannot be resumed by SGLang's code, which wants what the release leaves at its end:
    its books are put right, and what else it had done stays, as queues of a disaggregated engine. The others
    must not wait for it. One rank may have flushed its cache and another not, and ranks with unlike caches
    run unlike batches: all flush it.
    """
    if can_undo:
        with barriers.without(getattr(owner, "tp_cpu_group", None)):
            _inside(_inner(owner, "resume_memory_occupation"), owner, request, tags)
    else:
        _forget(owner, tags)
    if state.KV_CACHE in tags:
        owner.flush_cache()


def _forget(owner: Any, tags: Iterable[str]) -> None:
    offloaded = getattr(owner, "offload_tags", None)
    if offloaded is not None:
        offloaded.difference_update(tags)


def _inner(owner: Any, name: str) -> Callable[..., Any]:
    """SGLang's own method below our hook."""
    method: Callable[..., Any] = inspect.unwrap(getattr(type(owner), name))
    return method


def _attempt(do: Callable[[], None]) -> str:
    """Empty, or why it failed: the other ranks have to hear of it before anything is raised."""
    try:
        do()
    except Exception as error:  # a callback may raise anything
        logger.exception("a memory transition failed")
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return ""


def _with_tags(request: Any, tags: list[str]) -> Any:
    copied = copy.copy(request)
    copied.tags = tags
    return copied


def _answer(name: str) -> Any:
    return getattr(importlib.import_module("sglang.srt.managers.io_struct"), name)()


def _refuse(answer: Any, message: str) -> Any:
    logger.warning(message)
    return answers.refused(answer, message)


def _done(answer: Any, verb: str, did: list[str], rest: list[str], why: str) -> Any:
    parts = [f"{verb} {_names(did)}"] if did else []
    if rest:
        parts.append(f"nothing to do for {_names(rest)}: {why}")
    message = "; ".join(parts)
    logger.log(logging.WARNING if rest and not did else logging.INFO, message)
    return answers.done(answer, message)


def _names(tags: Iterable[str]) -> str:
    return ", ".join(map(str, tags))
