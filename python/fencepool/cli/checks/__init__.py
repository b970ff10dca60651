"""The doctor's checks: pure functions from facts to a finding, or to None where there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable

from ..facts import Facts
from . import environment, gpu, memory, packages
from .finding import Finding, Status, worst

Check = Callable[[Facts], Finding | None]

CHECKS: tuple[Check, ...] = (
    packages.fencepool,
    gpu.cuda_driver,
    gpu.gpus,
    gpu.virtual_memory,
    gpu.context_events,
    gpu.absent_calls,
    gpu.digests,
    gpu.descriptors,
    gpu.rdma,
    gpu.host_memory_mapping,
    memory.embedded_driver,
    memory.host_memory,
    memory.huge_pages,
    memory.disk,
    memory.locked_memory,
    packages.pytorch,
    packages.regions,
    packages.sglang,
    packages.vllm,
    packages.torch_memory_saver,
    environment.allocator_settings,
    environment.preload,
    environment.nccl_graph_registration,
)


def examine(facts: Facts) -> list[Finding]:
    """Every check's finding, in the order they are shown."""
    return [finding for check in CHECKS if (finding := check(facts)) is not None]


__all__ = ["CHECKS", "Check", "Finding", "Status", "examine", "worst"]
