"""Sizes in words."""

from __future__ import annotations


def size(count: int) -> str:
    """``count`` bytes for people, in powers of two: "87.4 MiB", "139.8 GiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:,.1f} {name}"
    return f"{count} B"
