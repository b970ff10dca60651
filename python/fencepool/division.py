"""How the device memory of a process divides, in lines with a size each and what to do about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fencepool._sizes import size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SETTLED_WORDS = {"pausing": "being paused", "resuming": "being resumed", "preparing": "being prepared"}


@dataclass(frozen=True)
class PoolBytes:
    """What the division needs to know of a pool."""

    tag: str
    device: str
    state: str
    bytes_mapped: int
    host_bytes: int


@dataclass(frozen=True)
class TorchMemory:
    """Bytes of one device that PyTorch's caching allocator holds, each counted once."""

    cached_in_pools: int
    """In active pools, without a tensor in it."""
    tensors: int
    """Outside of pools, with a tensor in it."""
    graphs: int
    """Outside of pools, in PyTorch's private pools: CUDA graphs and MemPools."""
    cached: int
    """Outside of pools, without a tensor in it."""


@dataclass(frozen=True)
class Line:
    """One part of the memory that is held."""

    key: str
    """For programs: paused_pools, active_pools, torch_cache_in_pools, torch_tensors, torch_graphs,
    torch_cache, context, other_processes or unknown."""
    name: str
    """For people."""
    bytes: int | None
    """None: not to be told apart here; it is part of ``unknown``, where there is such a line."""
    says: str
    """What is in it; may be empty."""
    do: str
    """What gives it back; empty when there is nothing to do."""


def of_process(pools: Sequence[PoolBytes], torch: TorchMemory | None, held: int | None) -> list[Line]:
    """The lines of one process on one device.

    Args:
        pools: those on that device.
        torch: None where PyTorch does not use the device.
        held: what the process holds in all, as NVML says; None: not known, or not a GPU.
    """
    lines = [_paused(pools), *_active(pools, torch.cached_in_pools if torch else 0)]
    if torch is not None:
        lines += _outside_of_pools(torch)
    if held is not None:
        known = total(lines)
        lines.append(_context(max(0, held - known)))
    return lines


def total(lines: Iterable[Line]) -> int:
    """The sum of what is known."""
    return sum(line.bytes or 0 for line in lines)


def _paused(pools: Sequence[PoolBytes]) -> Line:
    paused = [pool for pool in pools if pool.state == "paused"]
    held = sum(pool.bytes_mapped for pool in paused)
    says = _by_tag(paused) if held else (", ".join(dict.fromkeys(pool.tag for pool in paused)) or "none")
    do = "The driver refused to take this back. Pause again; fp.status() has what it said (problems)."
    return Line("paused_pools", "paused pools", held, says, do if held else "")


def _active(pools: Sequence[PoolBytes], cached: int) -> list[Line]:
    active = [pool for pool in pools if pool.state != "paused"]
    held = sum(pool.bytes_mapped for pool in active)
    cached = min(cached, held)
    tags = ", ".join(repr(tag) for tag in dict.fromkeys(pool.tag for pool in active if pool.bytes_mapped))
    do = f"fp.pause({tags}) gives it back." if tags else ""
    lines = [Line("active_pools", "active pools", held - cached, _by_tag(active) or "none", do)]
    if cached:
        lines.append(
            Line(
                "torch_cache_in_pools",
                "PyTorch's cache in pools",
                cached,
                "blocks of active pools that no tensor uses",
                "torch.cuda.empty_cache(), or pausing the pool, gives it back.",
            )
        )
    return lines


def _outside_of_pools(torch: TorchMemory) -> list[Line]:
    return [
        Line(
            "torch_tensors",
            "PyTorch's tensors",
            torch.tensors,
            "in no pool",
            "Make them in a pool (pool.region(), pool.adopt(module)), or drop what still refers to them: "
            "gradients, optimizer state, outputs."
            if torch.tensors
            else "",
        ),
        Line(
            "torch_cache",
            "PyTorch's cache",
            torch.cached,
            "in no pool, used by no tensor",
            "torch.cuda.empty_cache() gives it back." if torch.cached else "",
        ),
        Line(
            "torch_graphs",
            "CUDA graphs",
            torch.graphs,
            "PyTorch's private memory pools",
            "Capture with fp.cuda_graph(graph, tag=...), and it can be paused." if torch.graphs else "",
        ),
    ]


def _context(held: int) -> Line:
    return Line(
        "context",
        "CUDA context, libraries",
        held,
        "kernels, NCCL's buffers, cudaMalloc of others",
        "Some hundred MiB go with the process only. Much more: end NCCL groups that are not needed, lower "
        "NCCL_BUFFSIZE."
        if held > 1 << 30
        else "",
    )


def others(processes: Mapping[int, int | None]) -> Line:
    """The line for other processes, by their number."""
    held = sum(count or 0 for count in processes.values())
    largest = sorted(processes.items(), key=lambda item: -(item[1] or 0))
    says = ", ".join(f"{pid}: {'?' if count is None else size(count)}" for pid, count in largest[:4])
    if len(largest) > 4:
        says += f", {len(largest) - 4} more"
    do = "`fencepool residual` divides each." if held else ""
    return Line("other_processes", "other processes", held, f"process {says}" if says else "none", do)


def unknown(held: int | None, says: str, do: str = "") -> Line:
    """The line for what is left."""
    return Line("unknown", "unknown", held, says, do)


def _by_tag(pools: Iterable[PoolBytes]) -> str:
    held: Counter[str] = Counter()
    for pool in pools:
        word = _SETTLED_WORDS.get(pool.state)
        held[f"{pool.tag} ({word})" if word else pool.tag] += pool.bytes_mapped
    return ", ".join(f"{name} {size(count)}" for name, count in held.most_common())
