"""Every system that is measured, and the variants of each."""

from __future__ import annotations

from dataclasses import dataclass

PINNED_COPY = "pinned_copy"
FENCEPOOL = "fencepool"
TORCH_MEMORY_SAVER = "torch_memory_saver"
NAIVE_OFFLOAD = "naive_offload"


@dataclass(frozen=True)
class Entry:
    """One row of the results; run in a process of its own."""

    system: str
    variant: str
    module: str
    """Its `run(plan)` measures it."""
    title: str
    needs_gpu: bool = False
    package: str = ""
    """What must be installed for it, as it is imported."""
    most_cycles: int | None = None
    """After the first; for what takes so long that more tell nothing."""
    timeout: float = 90.0
    """Seconds for the whole process."""

    @property
    def id(self) -> str:
        return f"{self.system}/{self.variant}" if self.variant else self.system


def _fencepool(variant: str, title: str, most_cycles: int | None = None) -> Entry:
    return Entry(FENCEPOOL, variant, "systems.fencepool_system", title, most_cycles=most_cycles)


def _saver(variant: str, title: str, most_cycles: int | None = None, timeout: float = 90.0) -> Entry:
    return Entry(
        TORCH_MEMORY_SAVER,
        variant,
        "systems.torch_memory_saver_system",
        title,
        needs_gpu=True,
        package="torch_memory_saver",
        most_cycles=most_cycles,
        timeout=timeout,
    )


# The order they run in: what the targets need comes first, should the run be cut short.
CATALOGUE = (
    Entry(PINNED_COPY, "", "systems.pinned_copy", "the link's limit: plain pinned copies"),
    _fencepool("per-tensor", "weights by one Pool.empty a tensor, backup on the host"),
    _fencepool("adopted", "weights adopted as one module, backup on the host"),
    _fencepool("prepared", "as adopted, Pool.prepare() before the first pause", most_cycles=2),
    _fencepool("no-digests", "as adopted, every byte copied at every pause"),
    _fencepool("no-backup", "weights dropped, by one adopted module"),
    _saver("no-backup", "preload mode, weights dropped"),
    _saver("cpu-backup-retained", "preload mode, CPU backup kept between cycles"),
    # Its pauses take 6 to 9 seconds each.
    _saver("cpu-backup", "preload mode, CPU backup as it is by default", most_cycles=2, timeout=120.0),
    _saver(
        "cpu-backup-mmap",
        "preload mode, CPU backup in mapped memory that is not pinned",
        most_cycles=2,
        timeout=120.0,
    ),
    Entry(
        NAIVE_OFFLOAD,
        "",
        "systems.naive_offload",
        'weights through .to("cpu") and back, KV cache dropped; addresses change',
        needs_gpu=True,
        most_cycles=2,
    ),
)


def select(names: list[str]) -> list[Entry]:
    """The entries of those systems or ids, in the order they run; all of them for no names.

    Raises:
        ValueError: nothing is called so.
    """
    for name in names:
        if not any(name in (entry.system, entry.id) for entry in CATALOGUE):
            known = ", ".join(dict.fromkeys(entry.system for entry in CATALOGUE))
            raise ValueError(f"unknown system {name!r}; there are {known}, and ids such as fencepool/adopted")
    return [entry for entry in CATALOGUE if not names or entry.system in names or entry.id in names]
