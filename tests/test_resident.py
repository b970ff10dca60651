"""Pools whose addresses lead to host memory while they are paused."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled, pattern
from support.machine import MIB
from support.waiting import eventually

MAPPED = 4 * MIB  # device memory of a tensor of 3 MiB


@pytest.fixture(params=[True, False], ids=["retained", "once"])
def resident(machine, tag, request) -> fp.Pool:
    return fp.pool(tag, machine.device, backup="resident", retain=request.param)


def device_fill(machine, tensor, value):
    stream = machine.stream()
    machine.memset(tensor, value, stream)
    machine.synchronize(stream)


def test_the_device_memory_goes_and_host_memory_stands_at_the_same_addresses(machine, resident):
    size = 3 * MIB if machine.is_host else 255 * MIB
    tensor, expected = filled(resident, size)
    address, free, mapped = tensor.data_ptr(), machine.free(), size + MIB
    report = fp.pause(resident.tag)
    assert machine.has_freed(free, mapped)
    assert report.unreleased_bytes == 0
    assert tensor.data_ptr() == address
    assert machine.is_all_host_memory(tensor)
    assert machine.read(address, size) == expected.numpy().tobytes()
    status = resident.status()
    assert (status.bytes_mapped, status.host_bytes, status.bytes_backed_up) == (0, mapped, size)
    fp.resume(resident.tag)
    assert machine.is_all_mapped(tensor)
    assert machine.has_freed(free, 0)
    assert_same(tensor, expected)
    assert resident.status().host_bytes == (mapped if resident.retain else 0)


def test_what_the_device_writes_while_it_is_paused_is_there_after_the_resume(machine, resident):
    tensor, expected = filled(resident, 3 * MIB)
    small, _ = filled(resident, 5000)
    for cycle in (1, 2):
        fp.pause(resident.tag)
        device_fill(machine, tensor[: 2 * MIB], cycle)
        device_fill(machine, small, 10 + cycle)
        assert machine.read(tensor.data_ptr(), 16) == bytes([cycle] * 16)
        fp.resume(resident.tag)
        wanted = expected.clone()
        wanted[: 2 * MIB] = cycle
        assert_same(tensor, wanted)
        assert bool((small == 10 + cycle).all())


def test_what_the_processor_reads_and_writes_while_it_is_paused(machine, resident):
    tensor, expected = filled(resident, 3 * MIB)
    fp.pause(resident.tag)
    view = resident.backup_of(tensor, copy=False)
    assert_same(view, expected)
    view[:100] = 7
    assert machine.read(tensor.data_ptr(), 100) == bytes([7] * 100)
    if machine.is_host:  # the tensor itself is the processor's to use
        assert bool((tensor[:100] == 7).all())
        tensor[100:200] = 8
        assert bool((view[100:200] == 8).all())
    else:
        view[100:200] = 8
    del view
    fp.resume(resident.tag)
    wanted = expected.clone()
    wanted[:100], wanted[100:200] = 7, 8
    assert_same(tensor, wanted)


@pytest.mark.gpu
def test_kernels_run_on_a_paused_pool(machine, resident):
    if machine.is_host:
        pytest.skip("the embedded driver runs no kernels of PyTorch")
    tensor = resident.empty((1 << 20,), dtype=torch.float32)
    tensor.fill_(2)
    fp.pause(resident.tag)
    assert float(tensor.sum()) == 2 << 20
    tensor.add_(1)
    assert float(tensor.sum()) == 3 << 20
    fp.resume(resident.tag)
    assert float(tensor.sum()) == 3 << 20


def test_two_tags_go_their_own_ways(machine, new_tag):
    pools = [fp.pool(new_tag(), machine.device, backup="resident") for _ in range(2)]
    held = [filled(pool, 2 * MIB, seed) for seed, pool in enumerate(pools)]
    fp.pause(*(pool.tag for pool in pools))
    device_fill(machine, held[0][0], 3)
    fp.resume(pools[0].tag)
    assert bool((held[0][0] == 3).all())
    assert machine.is_all_host_memory(held[1][0])
    device_fill(machine, held[1][0], 4)
    fp.resume(pools[1].tag)
    assert bool((held[1][0] == 4).all())


def test_it_is_paused_and_resumed_together_with_pools_of_other_policies(machine, tag):
    pools = [fp.pool(tag, machine.device, backup=backup) for backup in ("none", "host", "resident")]
    held = [filled(pool, MIB, seed) for seed, pool in enumerate(pools)]
    fp.pause(tag)
    fp.resume(tag)
    for tensor, expected in held[1:]:
        assert_same(tensor, expected)


def test_a_paused_pool_takes_no_new_tensors(resident):
    filled(resident, 100)
    fp.pause(resident.tag)
    with pytest.raises(fp.PoolPausedError):
        resident.empty((10,))
    with pytest.raises(fp.PoolPausedError), resident.region():
        pass
    fp.resume(resident.tag)


def test_a_tensor_that_dies_while_it_is_paused_waits_for_the_work_that_writes_there(machine, resident):
    tensor, _ = filled(resident, 3 * MIB)
    kept, expected = filled(resident, 3 * MIB, 1)
    fp.pause(resident.tag)
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(tensor, 1, stream)
    del tensor
    gc.collect()
    status = resident.status()
    assert (status.pending_frees, status.segments, status.host_bytes) == (1, 2, 2 * MAPPED)
    latch.open()
    eventually(lambda: resident.status().pending_frees == 0, "the work on it has ended")
    assert (resident.status().segments, resident.status().host_bytes) == (1, MAPPED)
    fp.resume(resident.tag)
    assert_same(kept, expected)


def test_a_resume_waits_for_the_work_that_writes_there(machine, resident):
    tensor, _ = filled(resident, 3 * MIB)
    fp.pause(resident.tag)
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(tensor, 9, stream)
    thread = threading.Thread(target=fp.resume, args=(resident.tag,))
    thread.start()
    eventually(lambda: resident.state == "resuming", "the resume is under way")
    assert machine.is_all_host_memory(tensor)
    latch.open()
    thread.join()
    assert bool((tensor == 9).all())


def test_prepare_makes_the_host_memory_and_trim_gives_it_back(machine, tag):
    pool = fp.pool(tag, machine.device, backup="resident")
    tensor, expected = filled(pool, 3 * MIB)
    free = machine.free()
    assert pool.prepare() == MAPPED
    assert pool.prepare() == 0
    assert machine.has_freed(free, 0)
    assert pool.status().host_bytes == MAPPED
    fp.pause(tag)
    with pytest.raises(fp.PoolPausedError):
        pool.trim()
    assert pool.prepare() == 0
    fp.resume(tag)
    assert pool.trim() == MAPPED
    assert pool.status().host_bytes == 0
    assert_same(tensor, expected)


def test_contents_that_are_discarded_leave_no_memory_at_the_addresses(machine, tag):
    pool = fp.pool(tag, machine.device, backup="resident", fill="zero")
    tensor, _ = filled(pool, 3 * MIB)
    fp.pause(tag, discard=(tag,))
    assert not machine.is_any_mapped(tensor)
    assert not machine.is_all_host_memory(tensor)
    with pytest.raises(ValueError, match="discarded"):
        pool.backup_of(tensor)
    fp.resume(tag)
    assert not bool(tensor.any())
    expected = pattern(3 * MIB, 5)
    tensor.copy_(expected)
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, expected)


def test_a_pool_closes_while_it_is_paused(machine, resident):
    free = machine.free()
    tensor, _ = filled(resident, 3 * MIB)
    fp.pause(resident.tag)
    with pytest.raises(fp.PoolBusyError):
        resident.close()
    assert machine.is_all_host_memory(tensor)
    del tensor
    resident.close()
    assert machine.has_freed(free, 0)


def test_too_little_host_memory_is_said_and_changes_nothing(machine, resident):
    tensor, expected = filled(resident, 3 * MIB)
    free = machine.free()
    _core.arm_fault(machine.provider, "cuMemCreate", 1, True, 2)
    with pytest.raises(fp.HostMemoryError, match="cuMemCreate"):
        fp.pause(resident.tag)
    _core.disarm_fault(machine.provider)
    assert (resident.state, resident.status().host_bytes, machine.free()) == ("active", 0, free)
    assert_same(tensor, expected)
    fp.pause(resident.tag)
    fp.resume(resident.tag)
    assert_same(tensor, expected)


def test_a_resume_without_memory_leaves_host_memory_at_the_addresses(host, tag):
    pool = fp.pool(tag, "cpu", backup="resident")
    tensor, expected = filled(pool, 3 * MIB)
    fp.pause(tag)
    _core.raw.set_settings(0, _core.raw.Settings(memory_limit=2 * MIB))
    with pytest.raises(fp.OutOfMemoryError):
        fp.resume(tag)
    assert host.is_all_host_memory(tensor)
    assert_same(tensor, expected)
    tensor.fill_(4)
    _core.raw.set_settings(0, _core.raw.Settings())
    fp.resume(tag)
    assert bool((tensor == 4).all())


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemcpyDtoDAsync"])
def test_a_resume_that_fails_leaves_what_was_written_meanwhile(host, tag, call):
    pool = fp.pool(tag, "cpu", backup="resident")
    tensor, _ = filled(pool, 3 * MIB)
    fp.pause(tag)
    tensor.fill_(6)
    _core.arm_fault("host", call, 1, False, 999)
    with pytest.raises(fp.DriverError):
        fp.resume(tag)
    _core.disarm_fault("host")
    assert host.is_all_host_memory(tensor)
    assert bool((tensor == 6).all())
    tensor[:10] = 7
    fp.resume(tag)
    assert bool((tensor[:10] == 7).all())
    assert bool((tensor[10:] == 6).all())


def test_work_at_a_paused_address_takes_the_link(host, tag):
    pool = fp.pool(tag, "cpu", backup="resident")
    tensor, _ = filled(pool, 4 * MIB)
    fp.pause(tag)
    fp.host_driver.configure("cpu", bandwidth=64 * MIB)
    start = time.perf_counter()
    device_fill(host, tensor, 1)
    assert time.perf_counter() - start > 0.05
    fp.host_driver.configure("cpu", bandwidth=0)
    fp.resume(tag)


def test_digests_and_verification_are_not_for_what_may_be_written_to(resident):
    with pytest.raises(ValueError, match="resident"):
        fp.pool(resident.tag, resident.device, backup="resident", digests=True)
    assert not resident.digests
    filled(resident, 100)
    fp.pause(resident.tag)
    with pytest.raises(fp.UnsupportedError):
        fp.resume(resident.tag, verify=True)
    fp.resume(resident.tag)


def test_a_device_that_cannot_is_said(host, tag):
    _core.arm_fault("host", "cuDeviceGetAttribute", 1, True, 801)
    try:
        with pytest.raises(fp.UnsupportedError, match="host memory"):
            fp.pool(tag, "cpu", backup="resident")
    finally:
        _core.disarm_fault("host")


def test_the_phases_of_a_resume_say_how_long_it_waited(resident):
    tensor, _ = filled(resident, 100)
    fp.pause(resident.tag)
    assert tensor.data_ptr()
    assert list(fp.resume(resident.tag).seconds) == ["create", "quiesce", "map", "copy", "fence", "total"]


def test_a_forked_child_is_refused_and_the_parent_goes_on(host, tag):
    pool = fp.pool(tag, "cpu", backup="resident")
    tensor, expected = filled(pool, 3 * MIB)
    fp.pause(tag)
    child = os.fork()
    if child == 0:
        try:
            fp.resume(tag)
        except fp.ForkedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_same(tensor, expected)
    fp.resume(tag)
    assert_same(tensor, expected)
