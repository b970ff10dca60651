"""Checks of environment variables that change how memory is handled."""

from __future__ import annotations

from ..facts import Facts
from .finding import Finding, Status

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_settings(facts: Facts) -> Finding:
    """PyTorch's allocator under either name of its variable."""
    name = "PyTorch allocator"
    settings = {key: facts.environment[key] for key in _ALLOCATOR if facts.environment.get(key)}
    if not settings:
        return Finding(name, Status.OK, "default settings")
    says = ", ".join(f"{key}={value}" for key, value in settings.items())
    if any("expandable_segments:true" in value.replace(" ", "").lower() for value in settings.values()):
        says += ": pools are unaffected by expandable segments"
    return Finding(name, Status.OK, says)


def preload(facts: Facts) -> Finding:
    """A preloaded torch_memory_saver takes over cudaMalloc of the whole process."""
    name = "LD_PRELOAD"
    value = facts.environment.get("LD_PRELOAD", "")
    if not value:
        return Finding(name, Status.OK, "not set, not needed")
    if "torch_memory_saver" in value:
        return Finding(
            name,
            Status.WARN,
            f"torch_memory_saver is preloaded ({value}): it takes over cudaMalloc of the whole process",
            "unset LD_PRELOAD: fencepool needs no preloading",
        )
    return Finding(name, Status.OK, f"{value}: nothing that is known to disturb")


def nccl_graph_registration(facts: Facts) -> Finding | None:
    """NCCL registers buffers of captured collectives by their pages; a pause and resume changes those.

    On by default in NCCL; a replay can then wait for ever on memory that is no longer there. Seen with
    collectives between machines, in NCCL issue 1820 and torch_memory_saver issue 88.
    """
    name = "NCCL graph registration"
    value = facts.environment.get("NCCL_GRAPH_REGISTER")
    if value == "0":
        return Finding(name, Status.OK, "off (NCCL_GRAPH_REGISTER=0)")
    is_set = value is not None
    has_nccl = any(package.startswith("nvidia-nccl") for package in facts.packages.versions)
    if not is_set and not has_nccl:
        return None
    state = f"on (NCCL_GRAPH_REGISTER={value})" if is_set else "on, NCCL's default"
    risk = "a CUDA graph that holds collectives on a pool's tensors can hang after a resume"
    do = "if graphs hold collectives: set NCCL_GRAPH_REGISTER=0 before they are captured"
    status = Status.WARN if is_set or len(facts.gpus) > 1 else Status.NOTE
    return Finding(name, status, f"{state}: {risk}", do)
