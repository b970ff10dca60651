"""``pause(discard=...)``: contents of pools with a backup that one pause drops."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled, pattern
from support.machine import MIB


@pytest.fixture
def kept(machine, keeping, new_tag) -> fp.Pool:
    return fp.pool(new_tag("kept"), machine.device, **keeping.options)


@pytest.fixture
def dropped(machine, keeping, new_tag) -> fp.Pool:
    return fp.pool(new_tag("dropped"), machine.device, **keeping.options)


def test_one_pause_keeps_one_tag_and_drops_another(machine, kept, dropped):
    weights, before = filled(kept, 3 * MIB, 1)
    cache, _ = filled(dropped, 5 * MIB, 2)
    address = cache.data_ptr()
    free_active = machine.free()

    report = fp.pause(kept.tag, dropped.tag, discard=(dropped.tag,))

    assert machine.free() == free_active + report.bytes_released
    assert not machine.is_any_mapped(weights)
    assert not machine.is_any_mapped(cache)
    copied = {pool.tag: pool.bytes_copied for pool in report.pools}
    assert copied[kept.tag] >= 3 * MIB
    assert copied[dropped.tag] == 0
    assert dropped.status().host_bytes == 0  # no host memory is taken for what is dropped
    assert dropped.status().bytes_backed_up == 0

    resumed = fp.resume(kept.tag, dropped.tag)

    assert {pool.tag: pool.bytes_copied for pool in resumed.pools}[dropped.tag] == 0
    assert_same(weights, before)
    assert cache.data_ptr() == address
    anew = pattern(5 * MIB, 3)
    cache.copy_(anew)
    assert_same(cache, anew)


def test_the_pause_after_one_that_discarded_keeps_the_contents_again(dropped):
    tensor, _ = filled(dropped, 2 * MIB, 1)
    for cycle in range(3):
        fp.pause(dropped.tag, discard=(dropped.tag,))
        fp.resume(dropped.tag)
        before = pattern(2 * MIB, cycle)
        tensor.copy_(before)
        fp.pause(dropped.tag)
        fp.resume(dropped.tag)
        assert_same(tensor, before)


def test_contents_of_an_earlier_backup_do_not_come_back(machine, new_tag):
    pool = fp.pool(new_tag(), machine.device, backup="host", fill="zero")
    tensor, _ = filled(pool, 2 * MIB, 1)
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    tensor.copy_(pattern(2 * MIB, 2))

    fp.pause(pool.tag, discard=(pool.tag,))
    fp.resume(pool.tag)

    assert_same(tensor, torch.zeros(2 * MIB, dtype=torch.uint8))


def test_discarding_what_is_paused_with_its_contents_loses_nothing(kept):
    tensor, before = filled(kept, 2 * MIB)
    fp.pause(kept.tag)
    report = fp.pause(kept.tag, discard=(kept.tag,))
    assert [pool.changed for pool in report.pools] == [False]
    assert kept.status().bytes_backed_up >= 2 * MIB
    fp.resume(kept.tag)
    assert_same(tensor, before)


def test_what_was_discarded_cannot_be_read_from_a_backup(dropped):
    tensor, before = filled(dropped, 2 * MIB)
    fp.pause(dropped.tag)
    assert_same(dropped.backup_of(tensor), before)
    fp.resume(dropped.tag)
    fp.pause(dropped.tag, discard=(dropped.tag,))
    with pytest.raises(ValueError, match="the pause discarded them"):
        dropped.backup_of(tensor)
    fp.resume(dropped.tag)


def test_the_host_memory_of_a_discarded_pool_can_be_given_back_while_it_is_paused(machine, new_tag):
    pool = fp.pool(new_tag(), machine.device, backup="host")
    tensor, _ = filled(pool, 2 * MIB)
    fp.pause(pool.tag)
    with pytest.raises(fp.PoolPausedError):
        pool.trim()
    fp.resume(pool.tag)
    fp.pause(pool.tag, discard=(pool.tag,))
    held = pool.status().host_bytes
    assert held >= 2 * MIB
    assert pool.trim() == held
    assert pool.status().host_bytes == 0
    fp.resume(pool.tag)
    tensor.fill_(7)


def test_freed_while_discarded(kept, dropped):
    tensor, _ = filled(dropped, 2 * MIB)
    freed, _ = filled(dropped, 4 * MIB)
    fp.pause(dropped.tag, discard=(dropped.tag,))
    del freed
    assert fp.resume(dropped.tag).bytes_mapped == 2 * MIB
    tensor.fill_(1)


def test_a_pool_without_a_backup_may_be_named_too(machine, tag):
    pool = fp.pool(tag, machine.device)
    tensor, _ = filled(pool, 2 * MIB)
    fp.pause(tag, discard=[tag])
    fp.resume(tag)
    tensor.fill_(1)


@pytest.mark.parametrize("discard", ["name", [1], ["name", None]])
def test_what_is_no_collection_of_tags_is_refused(kept, discard):
    with pytest.raises(TypeError, match="collection of tags"):
        fp.pause(kept.tag, discard=discard)
    assert kept.state == "active"


def test_a_tag_that_is_not_to_be_paused_is_refused(kept, dropped):
    with pytest.raises(fp.UnknownTagError, match=f"{dropped.tag}.*not among"):
        fp.pause(kept.tag, discard=(dropped.tag,))
    assert (kept.state, dropped.state) == ("active", "active")


@pytest.mark.leaves
@pytest.mark.parametrize("backup", ["none", "host"])
def test_dropped_contents_are_zeroed_though_their_memory_could_not_be_released(host, tag, backup):
    pool = fp.pool(tag, "cpu", backup=backup, fill="zero")
    tensors = [filled(pool, 2 * MIB, seed)[0] for seed in range(2)]
    _core.arm_fault("host", "cuMemRelease", 2, True, 999)  # the first goes back, the other does not
    with pytest.warns(ResourceWarning, match="refused"):
        assert fp.pause(tag, discard=(tag,)).unreleased_bytes == 2 * MIB
    _core.disarm_fault("host")
    fp.resume(tag)
    assert not any(bool(tensor.any()) for tensor in tensors)


def test_tags_to_discard_that_can_be_gone_through_only_once(dropped):
    filled(dropped, 2 * MIB, 1)
    tensor, _ = filled(dropped, 2 * MIB, 2)
    report = fp.pause(dropped.tag, discard=(tag for tag in [dropped.tag]))
    assert report.pools[0].bytes_copied == 0
    fp.resume(dropped.tag)
    assert tensor.numel() == 2 * MIB
