"""Pausing and resuming: what is released, what comes back, and that it is all or nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support import children
from support.contents import assert_same, filled, pattern
from support.machine import MIB
from support.waiting import Job, eventually


def test_a_pause_gives_the_memory_to_the_driver(machine, pool):
    free_before = machine.free()
    tensor, _ = filled(pool, 4 * MIB)
    small, _ = filled(pool, 1000)
    free_active = machine.free()
    assert free_before - free_active == pool.status().bytes_mapped

    report = fp.pause(pool.tag)

    assert machine.free() == free_before
    assert not machine.is_any_mapped(tensor)
    assert not machine.is_any_mapped(small)
    assert report.bytes_released == free_before - free_active
    assert report.unreleased_bytes == 0
    (memory,) = report.device_memory
    assert (memory.device, memory.free_before, memory.free_after) == (pool.device, free_active, free_before)
    assert pool.state == "paused"
    assert pool.status().bytes_mapped == 0


def test_a_resume_takes_the_memory_at_the_same_addresses(machine, pool, policy):
    tensor, before = filled(pool, 4 * MIB, 1)
    small, small_before = filled(pool, 1000, 2)
    addresses = [tensor.data_ptr(), small.data_ptr()]
    free_active = machine.free()
    fp.pause(pool.tag)

    resumed = fp.resume(pool.tag)

    assert [tensor.data_ptr(), small.data_ptr()] == addresses
    assert machine.is_all_mapped(tensor)
    assert machine.is_all_mapped(small)
    assert machine.free() == free_active
    assert resumed.bytes_mapped == pool.status().bytes_mapped
    assert pool.state == "active"
    policy.assert_after(tensor, before)
    policy.assert_after(small, small_before)


def test_contents_and_addresses_over_twenty_cycles(pool, policy):
    tensors = [pool.empty((size,), dtype=torch.uint8) for size in (3 * MIB, 70_000, 512, 1)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for cycle in range(20):
        before = [pattern(tensor.numel(), seed=100 * cycle + i) for i, tensor in enumerate(tensors)]
        for tensor, contents in zip(tensors, before, strict=True):
            tensor.copy_(contents)
        fp.pause(pool.tag)
        fp.resume(pool.tag)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        for tensor, contents in zip(tensors, before, strict=True):
            policy.assert_after(tensor, contents)


def test_what_was_not_written_since_the_last_cycle_comes_back_too(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, before = filled(pool, 2 * MIB)
    for _ in range(3):
        fp.pause(tag)
        fp.resume(tag)
        assert_same(tensor, before)


def test_a_backup_of_more_than_one_piece_of_host_memory(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, before = filled(pool, 200 * MIB + 12345)
    report = fp.pause(tag)
    assert report.pools[0].bytes_copied >= 200 * MIB + 12345
    fp.resume(tag)
    assert_same(tensor, before)


def test_small_tensors_between_freed_ones(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    held = [filled(pool, 300_000, seed) for seed in range(12)]
    for at in (10, 7, 6, 3, 0):
        del held[at]
    fp.pause(tag)
    fp.resume(tag)
    for tensor, before in held:
        assert_same(tensor, before)


def test_freed_while_paused(machine, pool, policy):
    kept, kept_before = filled(pool, 2 * MIB, 1)
    freed, _ = filled(pool, 3 * MIB, 2)
    small_kept, small_before = filled(pool, 1000, 3)
    small_freed, _ = filled(pool, 2000, 4)
    fp.pause(pool.tag)
    reserved = pool.status().bytes_reserved

    del freed, small_freed

    status = pool.status()
    assert status.bytes_reserved == reserved - 4 * MIB  # 3 MiB in steps of 2
    assert status.state == "paused"
    resumed = fp.resume(pool.tag)
    assert resumed.bytes_mapped == reserved - 4 * MIB
    policy.assert_after(kept, kept_before)
    policy.assert_after(small_kept, small_before)


def test_everything_freed_while_paused(machine, pool):
    free = machine.free()
    tensor, _ = filled(pool, 2 * MIB)
    fp.pause(pool.tag)
    del tensor
    assert pool.status().bytes_reserved == 0
    assert fp.resume(pool.tag).bytes_mapped == 0
    assert pool.state == "active"
    assert machine.free() == free


def test_allocating_in_a_paused_pool_is_refused(machine, pool, policy):
    tensor, before = filled(pool, MIB)
    fp.pause(pool.tag)
    free = machine.free()
    status = pool.status()
    for size in (10, 5 * MIB):
        with pytest.raises(fp.PoolPausedError, match=pool.tag):
            pool.empty((size,), dtype=torch.uint8)
    assert machine.free() == free
    assert pool.status() == status
    fp.resume(pool.tag)
    policy.assert_after(tensor, before)


def test_allocated_between_cycles(pool, policy):
    held = []
    for cycle in range(4):
        held.append(filled(pool, MIB + 1000 * cycle, cycle))
        held.append(filled(pool, 1000, 50 + cycle))
        fp.pause(pool.tag)
        fp.resume(pool.tag)
        for tensor, before in held:
            policy.assert_after(tensor, before)
            tensor.copy_(before)


def test_tensors_without_elements(machine, pool):
    free = machine.free()
    tensor = pool.empty((0, 7), dtype=torch.float16)
    report = fp.pause(pool.tag)
    assert (report.pools[0].changed, report.bytes_released) == (True, 0)
    assert fp.resume(pool.tag).bytes_mapped == 0
    assert tensor.shape == (0, 7)
    assert machine.free() == free


def test_a_pool_without_tensors_changes_state(pool):
    assert fp.pause(pool.tag).pools[0].changed
    assert pool.state == "paused"
    resumed = fp.resume(pool.tag)
    assert resumed.pools[0].changed
    assert resumed.fence.done()
    assert pool.state == "active"


# --- several pools in one call ----------------------------------------------------------------------


def test_two_tags_in_one_call(machine, policy, new_tag):
    tags = [new_tag(), new_tag()]
    held = [filled(fp.pool(tag, machine.device, **policy.options), 2 * MIB, i) for i, tag in enumerate(tags)]
    free = machine.free()
    report = fp.pause(*tags)
    assert [pool.tag for pool in report.pools] == tags
    assert machine.free() == free + 4 * MIB
    resumed = fp.resume(*reversed(tags))
    assert [pool.tag for pool in resumed.pools] == tags
    for tensor, before in held:
        policy.assert_after(tensor, before)


def test_a_tag_named_twice_counts_once(pool):
    filled(pool, MIB)
    assert len(fp.pause(pool.tag, pool.tag).pools) == 1
    assert len(fp.resume(pool.tag, pool.tag).pools) == 1


def test_one_tag_with_every_policy(machine, tag):
    from support.policies import POLICIES

    pools = [fp.pool(tag, machine.device, **policy.options) for policy in POLICIES]
    assert len(set(map(id, pools))) == len(POLICIES)
    held = [filled(pool, MIB + 10, i) for i, pool in enumerate(pools)]
    report = fp.pause(tag)
    assert [pool.backup for pool in report.pools] == [policy.backup for policy in POLICIES]
    assert all(pool.state == "paused" for pool in pools)
    fp.resume(tag)
    for (tensor, before), policy in zip(held, POLICIES, strict=True):
        policy.assert_after(tensor, before)


def test_a_tag_of_two_devices(machines, policy, tag):
    pools = [fp.pool(tag, machine.device, **policy.options) for machine in machines]
    free = [machine.free() for machine in machines]
    held = [filled(pool, 2 * MIB, i) for i, pool in enumerate(pools)]
    report = fp.pause(tag)
    assert [machine.free() for machine in machines] == free
    assert [memory.device for memory in report.device_memory] == [machine.device for machine in machines]
    resumed = fp.resume(tag)
    assert len(resumed.device_memory) == 2
    for machine, (tensor, before) in zip(machines, held, strict=True):
        assert machine.is_all_mapped(tensor)
        policy.assert_after(tensor, before)


def test_one_device_of_a_tag(machines, keeping, tag):
    first, second = (fp.pool(tag, machine.device, **keeping.options) for machine in machines)
    held, before = filled(first, MIB, 1)
    other, other_before = filled(second, MIB, 2)
    report = fp.pause(tag, device=second.device)
    assert [pool.device for pool in report.pools] == [second.device]
    assert (first.state, second.state) == ("active", "paused")
    assert_same(held, before)
    fp.resume(tag, device=first.device)
    assert second.state == "paused"
    fp.resume(tag, device=second.device)
    assert_same(other, other_before)


def test_no_tags_mean_every_pool(machine, keeping, new_tag):
    pools = [fp.pool(new_tag(), machine.device, **keeping.options) for _ in range(3)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    assert len(fp.pause().pools) == 3
    assert {pool.state for pool in pools} == {"paused"}
    fp.resume()
    for tensor, before in held:
        assert_same(tensor, before)


# --- repeating --------------------------------------------------------------------------------------


def test_pausing_twice_does_nothing_and_says_so(machine, pool, policy):
    tensor, before = filled(pool, MIB)
    assert fp.pause(pool.tag).pools[0].changed
    status = pool.status()
    again = fp.pause(pool.tag)
    assert not again.pools[0].changed
    assert (again.bytes_released, again.pools[0].bytes_copied, again.device_memory) == (0, 0, ())
    assert pool.status() == status
    fp.resume(pool.tag)
    policy.assert_after(tensor, before)


def test_resuming_twice_does_nothing_and_says_so(pool):
    tensor, before = filled(pool, MIB)
    for _ in range(2):
        resumed = fp.resume(pool.tag)
        assert not resumed.pools[0].changed
        assert (resumed.bytes_mapped, resumed.pools[0].bytes_copied) == (0, 0)
        assert resumed.fence.done()
        assert_same(tensor, before)


def test_an_unknown_tag_names_the_known_ones(machine, policy, new_tag):
    first, second = new_tag("first"), new_tag("second")
    for tag in (first, second):
        fp.pool(tag, machine.device, **policy.options)
    for call in (fp.pause, fp.resume):
        with pytest.raises(fp.UnknownTagError) as caught:
            call(first, "nonsuch")
        assert isinstance(caught.value, KeyError)
        assert "'nonsuch'" in str(caught.value)
        assert repr(first) in str(caught.value)
        assert repr(second) in str(caught.value)
    assert {status.state for status in fp.status()} == {"active"}


# --- with fp.paused() -------------------------------------------------------------------------------


def test_paused_is_paused_inside_and_active_after(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, before = filled(pool, 2 * MIB)
    free = machine.free()
    with fp.paused(tag) as report:
        assert report.bytes_released == 2 * MIB
        assert pool.state == "paused"
        assert machine.free() == free + 2 * MIB
    assert pool.state == "active"
    assert_same(tensor, before)


def test_paused_leaves_alone_what_was_paused_before(machine, policy, new_tag):
    first, second = (fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2))
    fp.pause(first.tag)
    with fp.paused(first.tag, second.tag):
        assert (first.state, second.state) == ("paused", "paused")
    assert (first.state, second.state) == ("paused", "active")


def test_paused_resumes_when_its_block_raises(pool):
    with pytest.raises(RuntimeError, match="of the block"), fp.paused(pool.tag):
        raise RuntimeError("of the block")
    assert pool.state == "active"


def test_paused_keeps_the_blocks_exception_when_the_resume_fails_too(host, keeping, tag):
    pool = fp.pool(tag, "cpu", **keeping.options)
    tensor, before = filled(pool, 2 * MIB)

    def block():
        with fp.paused(tag):
            fp.host_driver.configure(memory_limit=MIB)
            raise RuntimeError("of the block")

    with pytest.raises(RuntimeError, match="of the block") as caught:
        block()
    assert any("resum" in note and "wanted" in note for note in caught.value.__notes__)
    assert pool.state == "paused"
    fp.host_driver.configure(memory_limit=0)
    fp.resume(tag)
    assert_same(tensor, before)


# --- work in flight ---------------------------------------------------------------------------------


def test_a_pause_waits_for_the_work_in_flight_and_backs_up_what_it_wrote(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, _ = filled(pool, 2 * MIB)
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(tensor, 0x5C, stream)

    pausing = Job(lambda: fp.pause(tag))
    eventually(lambda: pool.state == "pausing", "the pause has begun")
    assert latch.waiting == 1
    assert machine.is_all_mapped(tensor)
    latch.open()
    assert pausing.result().pools[0].changed

    assert not machine.is_any_mapped(tensor)
    assert machine.is_idle(stream)
    fp.resume(tag)
    assert_same(tensor, torch.full((2 * MIB,), 0x5C, dtype=torch.uint8))


def test_a_pause_that_waits_too_long_changes_nothing(machine, pool, policy):
    tensor, before = filled(pool, 2 * MIB)
    stream = machine.stream()
    latch = machine.hold(stream)
    status = pool.status()
    for timeout in (0, 0.02):
        with pytest.raises(fp.QuiesceTimeout) as caught:
            fp.pause(pool.tag, timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
        assert pool.device in str(caught.value)
    assert pool.status() == status
    assert machine.is_all_mapped(tensor)
    latch.open()
    machine.synchronize(stream)
    assert_same(tensor, before)
    fp.pause(pool.tag, timeout=30)
    fp.resume(pool.tag)
    policy.assert_after(tensor, before)


def test_a_pause_of_two_devices_waits_for_both(machines, policy, tag):
    pools = [fp.pool(tag, machine.device, **policy.options) for machine in machines]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    for machine in machines:
        stream = machine.stream()
        latch = machine.hold(stream)
        with pytest.raises(fp.QuiesceTimeout, match=machine.device):
            fp.pause(tag, timeout=0.02)
        assert [pool.state for pool in pools] == ["active", "active"]
        latch.open()
        machine.synchronize(stream)
    for tensor, before in held:
        assert_same(tensor, before)


def test_other_pools_can_be_used_while_a_pause_waits(machine, policy, new_tag):
    pool, other = (fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2))
    latch = machine.hold(machine.stream())
    pausing = Job(lambda: fp.pause(pool.tag))
    eventually(lambda: pool.state == "pausing", "the pause has begun")
    tensor = other.empty((MIB,), dtype=torch.uint8)
    assert other.contains(tensor)
    assert [status.state for status in fp.status()] == ["pausing", "active"]
    assert pausing.is_running()
    latch.open()
    pausing.result()


@pytest.mark.parametrize("options", ["backup='none'", "backup='host'"])
def test_reading_paused_memory_on_the_cpu_faults(options):
    done = children.run(
        f"""
        pool = fp.pool("t", "cpu", {options})
        block = block_of(pool, 1 << 20, 7)
        fp.pause("t")
        print("paused", flush=True)
        ctypes.string_at(block.address, 1)
        print("read", flush=True)
        """
    )
    assert done.returncode == -11  # SIGSEGV
    assert done.stdout == "paused\n"


@pytest.mark.gpu
def test_the_driver_refuses_copies_from_paused_memory():
    done = children.run(
        """
        pool = fp.pool("t", "cuda:0", backup="host")
        block = pool._core.allocate(1 << 20)
        fp.pause("t")
        driver = raw.Driver("cuda")
        driver.push(driver.primary_retain(driver.device_get(0)[1])[1])
        here = ctypes.create_string_buffer(16)
        stream = driver.stream_create(1)[1]
        copied = driver.memcpy_dtoh(ctypes.addressof(here), block.address, 16, stream)
        print(copied != 0 or driver.stream_synchronize(stream) != 0)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# --- what is reported -------------------------------------------------------------------------------


def test_the_reports_of_one_cycle(machine, pool, policy):
    filled(pool, 10)  # freed at once: not live, so not copied
    tensor, _ = filled(pool, 3 * MIB)
    mapped = pool.status().bytes_mapped
    paused = fp.pause(pool.tag)
    copied = 3 * MIB if policy.keeps_contents else 0
    (one,) = paused.pools
    assert (one.tag, one.device, one.backup, one.bytes_copied) == (
        pool.tag,
        pool.device,
        policy.backup,
        copied,
    )
    assert list(paused.seconds) == ["quiesce", "digest", "provision", "copy", "unmap", "release", "total"]
    assert all(seconds >= 0 for seconds in paused.seconds.values())
    assert sum(paused.seconds.values()) <= 2 * paused.seconds["total"] + 1e-6
    assert paused.bytes_released == one.bytes == mapped
    assert paused.notes == ()

    resumed = fp.resume(pool.tag)
    (one,) = resumed.pools
    assert (one.bytes, one.bytes_copied) == (mapped, copied)
    quiesce = ["quiesce"] if policy.backup == "resident" else []
    assert list(resumed.seconds) == ["create", *quiesce, "map", "copy", "fence", "total"]
    has_something_to_wait_for = policy.keeps_contents or policy.fill == "zero"
    assert resumed.notes == ()
    is_read_by_the_host = policy.backup == "disk"
    assert resumed.host_held == (is_read_by_the_host or (machine.is_host and has_something_to_wait_for))
    status = pool.status()
    assert status.last_pause == paused.seconds
    assert status.last_resume == resumed.seconds
    del tensor


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_resuming_in_another_order_than_pausing(device, clean, new_tag, order):
    pools = [fp.pool(new_tag(), device, backup="host") for _ in range(3)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    for pool in pools:
        fp.pause(pool.tag)
    for at in order:
        fp.resume(pools[at].tag)
        assert_same(*held[at])
    assert _core.problems() == []
