"""What is said when a scheduler starts: that fencepool is at work, and what cannot work with it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import fencepool as fp
from fencepool.integrations.sglang import state, versions

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


def note_arguments(
    original: Callable[..., Any], scheduler: Any, server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``Scheduler.__init__``: learn the device before the first region, and say what does not work."""
    state.occupation.device_type = str(getattr(server_args, "device", None) or "")
    if getattr(server_args, "enable_memory_saver", False):
        logger.info("fencepool %s is SGLang %s's memory saver", fp.__version__, versions.installed())
        for line in limits(server_args, os.environ):
            logger.warning(line)
    return original(scheduler, server_args, *args, **kwargs)


def limits(server_args: Any, environment: Any) -> list[str]:
    """What cannot work under these arguments of SGLang."""

    def argument(name: str, default: Any) -> Any:
        return getattr(server_args, name, default)

    if argument("device", "cuda") == "cpu":
        return []
    lines = [
        "fencepool: tensors of released kinds (weights, kv_cache, cuda_graph) cannot be given to other "
        "processes through CUDA IPC; the driver does not share memory of cuMemCreate that way"
    ]
    if argument("weight_cache_mode", "off") != "off":
        lines.append("fencepool: --weight-cache-mode shares weights through CUDA IPC; it cannot work here")
    if argument("disaggregation_mode", "null") != "null":
        lines.append(
            "fencepool: a KV cache registered for transfers keeps its registration over a release, and its "
            "pages change; register it again after resume"
        )
    is_graph_pausable = environment.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "0").lower() in ("1", "true", "yes")
    if is_graph_pausable and argument("tp_size", 1) > 1:
        lines += _graph_limits(argument, environment)
    return lines


def _graph_limits(argument: Callable[[str, Any], Any], environment: Any) -> list[str]:
    lines = []
    if environment.get("NCCL_GRAPH_REGISTER", "1") != "0":
        lines.append(
            "fencepool: NCCL registers buffers of captured graphs (NCCL_GRAPH_REGISTER), and keeps the pages "
            "that a release gives away; with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 set NCCL_GRAPH_REGISTER=0"
        )
    if not argument("disable_custom_all_reduce", False):
        lines.append(
            "fencepool: custom all-reduce shares buffers of captured graphs through CUDA IPC, which pooled "
            "memory cannot; with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 use --disable-custom-all-reduce"
        )
    return lines
