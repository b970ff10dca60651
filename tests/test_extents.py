"""Any order of allocating, freeing, pausing and resuming: blocks never overlap, and contents stay."""

from __future__ import annotations

import itertools

import pytest
import torch

import fencepool as fp
from support.contents import is_same, pattern
from support.machine import MIB
from support.policies import KEEPING
from support.waiting import eventually

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ALIGNMENT = 512
GRANULE = 2 * MIB
OWN = MIB

small = st.integers(min_value=1, max_value=4 * ALIGNMENT)
middle = st.integers(min_value=1, max_value=OWN - 1)
large = st.integers(min_value=OWN, max_value=GRANULE + OWN)
step = st.one_of(
    st.tuples(st.just("allocate"), st.one_of(small, small, middle, large)),
    st.tuples(st.just("free"), st.integers(min_value=0, max_value=1000)),
    st.tuples(st.just("cycle"), st.just(0)),
    st.tuples(st.just("free while paused"), st.integers(min_value=0, max_value=1000)),
)


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def check(pool: fp.Pool, held: list[tuple[torch.Tensor, int]]) -> None:
    """What must hold between any two steps."""
    spans = sorted((tensor.data_ptr(), padded(tensor.numel())) for tensor, _ in held)
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans)), "blocks overlap"
    assert all(pool.contains(tensor) for tensor, _ in held)
    status = pool.status()
    assert status.bytes_used == sum(size for _, size in spans)
    assert status.bytes_reserved % GRANULE == 0
    assert (status.segments == 0) == (status.bytes_reserved == 0)
    if not held:  # the end of a restore's last work may be some microseconds away
        eventually(lambda: pool.status().segments == 0, "the segments are given back")
    for tensor, seed in held:
        assert is_same(tensor, pattern(tensor.numel(), seed)), "the contents changed"


def play(pool: fp.Pool, steps: list[tuple[str, int]]) -> None:
    held: list[tuple[torch.Tensor, int]] = []
    for number, (what, value) in enumerate(steps):
        if what == "allocate":
            tensor = pool.empty((value,), dtype=torch.uint8)
            tensor.copy_(pattern(value, number))
            held.append((tensor, number))
            del tensor
        elif what == "free" and held:
            held.pop(value % len(held))
        elif what == "cycle":
            fp.pause(pool.tag)
            fp.resume(pool.tag)
        elif what == "free while paused":
            fp.pause(pool.tag)
            if held:
                held.pop(value % len(held))
            fp.resume(pool.tag)
        check(pool, held)


@pytest.mark.parametrize("policy", KEEPING, ids=lambda policy: policy.name)
def test_blocks_never_overlap_and_contents_stay(clean, new_tag, policy):
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(step, min_size=1, max_size=25))
    def plays(steps):
        pool = fp.pool(new_tag(), "cpu", **policy.options)
        play(pool, steps)
        fp.pause(pool.tag)
        fp.resume(pool.tag)
        assert pool.status().bytes_used == 0
        pool.close()

    plays()


def test_gaps_are_joined_and_filled_again(clean, tag):
    """Freed neighbours become one gap, whatever the order in which they were freed."""
    pool = fp.pool(tag, "cpu")
    size = GRANULE // 4
    for order in itertools.permutations(range(4)):
        tensors: list = [pool.empty((size,), dtype=torch.uint8) for _ in range(4)]
        anchor = pool.empty((1,), dtype=torch.uint8)  # a segment with a live block is never given back
        for at in order:
            tensors[at] = None
        again = [pool.empty((size - ALIGNMENT,), dtype=torch.uint8) for _ in range(4)]
        status = pool.status()
        assert status.bytes_reserved <= 3 * GRANULE
        spans = sorted(tensor.data_ptr() for tensor in again)
        assert all(b - a >= size - ALIGNMENT for a, b in itertools.pairwise(spans))
        del again, anchor
        assert pool.status().bytes_used == 0
