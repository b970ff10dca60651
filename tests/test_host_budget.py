"""The budget for the backups of a process: what counts, what is refused, and that this changes nothing."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support import children
from support.contents import assert_same, filled
from support.machine import MIB, host_counts
from support.waiting import Job
from test_host_memory import resident


def test_what_the_backups_of_all_pools_hold_is_counted(machine, new_tag):
    before = fp.host_memory().used
    pools = [fp.pool(new_tag(), machine.device, backup="host", retain=retain) for retain in (True, False)]
    held = [filled(pool, (i + 1) * MIB, i) for i, pool in enumerate(pools)]
    pools[0].prepare()
    assert fp.host_memory().used - before == MIB
    fp.pause(*(pool.tag for pool in pools))
    assert fp.host_memory().used - before == 3 * MIB == sum(pool.status().host_bytes for pool in pools)
    fp.resume(*(pool.tag for pool in pools))
    assert fp.host_memory().used - before == MIB
    pools[0].trim()
    assert fp.host_memory().used == before
    for tensor, contents in held:
        assert_same(tensor, contents)


def test_a_view_of_a_backup_counts_for_as_long_as_it_keeps_the_memory(machine, tag):
    before = fp.host_memory().used
    pool = fp.pool(tag, machine.device, backup="host", retain=False)
    tensor, _ = filled(pool, MIB)
    fp.pause(tag)
    view = pool.backup_of(tensor, copy=False)
    fp.resume(tag)
    assert pool.status().host_bytes == 0
    assert fp.host_memory().used == before + MIB
    del view
    assert fp.host_memory().used == before


def test_beyond_the_budget_nothing_is_paused_copied_or_taken(machine, pinned, new_tag):
    small, large = (fp.pool(new_tag(), machine.device, **pinned.options) for _ in range(2))
    held = [filled(small, MIB, 1), filled(large, 4 * MIB, 2)]
    used = fp.host_memory().used
    fp.set_host_budget(used + 4 * MIB)
    status = [pool.status() for pool in (small, large)]
    counts, copies = host_counts(), _core.call_counts(machine.provider)["cuMemcpyDtoHAsync"]
    # The second pool alone would fit: it is the two together that do not.
    with pytest.raises(fp.HostMemoryError) as caught:
        fp.pause(small.tag, large.tag)
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.pool, error.bytes_wanted, error.bytes_free) == (large.tag, 5 * MIB, 4 * MIB)
    for part in (large.tag, "5.00 MiB more", "budget is", "set_host_budget", "trim"):
        assert part in str(error)
    assert [pool.status() for pool in (small, large)] == status
    # A pool's stream is made once and kept.
    assert ({**host_counts(), "streams": 0}, fp.host_memory().used) == ({**counts, "streams": 0}, used)
    assert _core.call_counts(machine.provider)["cuMemcpyDtoHAsync"] == copies
    for tensor, contents in held:
        assert_same(tensor, contents)
    fp.set_host_budget(used + 5 * MIB)
    fp.pause(small.tag, large.tag)
    fp.resume(small.tag, large.tag)
    for tensor, contents in held:
        assert_same(tensor, contents)


def test_host_memory_that_stands_at_addresses_counts_by_whole_segments(host, new_tag):
    pools = [fp.pool(new_tag(), "cpu", backup="resident") for _ in range(2)]
    held = [filled(pool, MIB, seed) for seed, pool in enumerate(pools)]
    used = fp.host_memory().used
    fp.set_host_budget(used + 3 * MIB)
    with pytest.raises(fp.HostMemoryError) as caught:
        fp.pause(*(pool.tag for pool in pools))
    assert (caught.value.pool, caught.value.bytes_wanted) == (pools[1].tag, 4 * MIB)
    assert fp.host_memory().used == used
    fp.pause(pools[0].tag)
    assert fp.host_memory().used == used + 2 * MIB
    with pytest.raises(fp.HostMemoryError):
        pools[1].prepare()
    fp.resume(pools[0].tag)
    pools[0].trim()
    assert fp.host_memory().used == used
    for tensor, contents in held:
        assert_same(tensor, contents)


def test_prepare_keeps_to_the_budget(machine, pinned, tag):
    pool = fp.pool(tag, machine.device, **pinned.options)
    tensor, _ = filled(pool, 2 * MIB)
    fp.set_host_budget(fp.host_memory().used + MIB)
    with pytest.raises(fp.HostMemoryError, match="budget") as caught:
        pool.prepare()
    assert caught.value.pool == tag
    assert pool.status().host_bytes == 0
    fp.set_host_budget(None)
    assert pool.prepare() == 2 * MIB
    del tensor


def test_a_retained_backup_is_used_again_beyond_a_smaller_budget(machine, tag):
    pool = fp.pool(tag, machine.device, backup="host")
    tensor, before = filled(pool, 2 * MIB)
    pool.prepare()
    fp.set_host_budget(0)
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, before)
    pool.trim()
    with pytest.raises(fp.HostMemoryError):
        fp.pause(tag)


def test_pools_without_backup_and_dropped_contents_need_no_budget(machine, new_tag):
    fp.set_host_budget(0)
    dropped, kept = fp.pool(new_tag(), machine.device), fp.pool(new_tag(), machine.device, backup="host")
    held = [filled(pool, MIB)[0] for pool in (dropped, kept)]
    fp.pause(dropped.tag, kept.tag, discard=[kept.tag])
    assert kept.state == dropped.state == "paused"
    fp.resume(dropped.tag, kept.tag)
    del held


def test_pauses_side_by_side_share_the_budget(host, new_tag):
    """Each fits alone. However they meet, no more is ever pinned, and whoever fails can try again."""
    pools = [fp.pool(new_tag(), "cpu", backup="host", retain=False) for _ in range(4)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    limit = fp.host_memory().used + 2 * MIB
    fp.set_host_budget(limit)

    def cycle(pool: fp.Pool) -> int:
        paused = 0
        while paused < 5:
            try:
                fp.pause(pool.tag)
            except fp.HostMemoryError:
                continue
            assert fp.host_memory().used <= limit
            fp.resume(pool.tag)
            paused += 1
        return paused

    assert [job.result() for job in [Job(lambda pool=pool: cycle(pool)) for pool in pools]] == [5] * 4
    for tensor, contents in held:
        assert_same(tensor, contents)


def test_without_retain_resident_memory_falls_within_the_resume(host, tag):
    size = 128 * MIB
    pool = fp.pool(tag, "cpu", backup="host", retain=False)
    tensor = pool.empty((size // 8,), dtype=torch.int64)
    torch.arange(tensor.numel(), out=tensor)  # no two blocks are equal
    start = resident()
    fp.pause(tag)
    assert resident() > start + size * 3 // 4 - size  # the tensor's own memory has gone
    assert fp.host_memory().used >= size
    paused = resident()
    fp.resume(tag)
    # The tensor's memory is back, and the backup's is not there any more.
    assert resident() < paused + size // 4
    assert resident() < start + size // 4
    assert torch.equal(tensor, torch.arange(tensor.numel()))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1073741824", 1 << 30),
        ("64GiB", 64 << 30),
        ("1.5 GiB", 3 << 29),
        ("2TB", 2 * 10**12),
        ("10 B", 10),
        ("7KB", 7000),
        ("512MiB", 512 << 20),
    ],
)
def test_sizes_in_words(text, nbytes):
    fp.set_host_budget(text)
    assert fp.host_memory().budget == nbytes


@pytest.mark.parametrize(
    "wrong", ["", "GiB", "-1", "1e9", "64G", "1 2", "0x10", "nan", "9999999TiB", "1..5", "1GiB!"]
)
def test_what_is_no_size_is_refused(wrong):
    fp.set_host_budget(17)
    with pytest.raises(ValueError, match="a budget is a size such as"):
        fp.set_host_budget(wrong)
    assert fp.host_memory().budget == 17


def test_the_variable_sets_the_budget_until_the_program_does():
    children.run_silently(
        """
        assert fp.host_memory().budget == 3 << 20, fp.host_memory()
        pool = fp.pool("t", "cpu", backup="host", digests=False)
        block = block_of(pool, 4 << 20, 7)
        try:
            fp.pause("t")
        except fp.HostMemoryError as error:
            assert "FENCEPOOL_HOST_BUDGET" in str(error), error
        else:
            raise SystemExit("it was within the budget")
        fp.set_host_budget("4MiB")
        fp.pause("t")
        assert fp.host_memory().used == 4 << 20
        fp.resume("t")
        assert is_filled(block, 4 << 20, 7)
        """,
        FENCEPOOL_HOST_BUDGET="3MiB",
    )


def test_a_variable_that_is_no_size_is_said_and_changes_nothing():
    children.run_silently(
        """
        pool = fp.pool("t", "cpu", backup="host")
        block = block_of(pool, 1 << 20, 7)
        for call in (fp.host_memory, pool.prepare, lambda: fp.pause("t")):
            try:
                call()
            except ValueError as error:
                assert "FENCEPOOL_HOST_BUDGET" in str(error) and "'plenty'" in str(error), error
            else:
                raise SystemExit("it was taken")
        assert pool.state == "active" and is_filled(block, 1 << 20, 7)
        fp.set_host_budget(None)
        fp.pause("t")
        """,
        FENCEPOOL_HOST_BUDGET="plenty",
    )
