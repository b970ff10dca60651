"""What pools, devices and drivers say about themselves, beside what the driver says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import filled
from support.machine import MIB, raw
from support.waiting import eventually


def test_the_status_of_a_pool_through_a_cycle(machine, pool, policy):
    free = machine.free()
    assert dataclasses.asdict(pool.status()) == {
        "tag": pool.tag,
        "device": machine.device,
        "backup": policy.backup,
        "state": "active",
        "segments": 0,
        "bytes_mapped": 0,
        "bytes_reserved": 0,
        "bytes_used": 0,
        "bytes_backed_up": 0,
        "host_bytes": 0,
        "disk_bytes": 0,
        "direct_io": pool.status().direct_io,
        "digests": policy.backup in ("host", "disk"),
        "pending_frees": 0,
        "last_pause": None,
        "last_resume": None,
        "problems": (),
    }
    tensor, _ = filled(pool, 3 * MIB)
    small, _ = filled(pool, 700)
    status = pool.status()
    assert (status.segments, status.bytes_used) == (2, 3 * MIB + 1024)
    assert status.bytes_mapped == status.bytes_reserved == free - machine.free()

    fp.pause(pool.tag)
    status = pool.status()
    contents = 3 * MIB + 1024 if policy.keeps_contents else 0
    assert (status.state, status.bytes_mapped, status.bytes_used) == ("paused", 0, 3 * MIB + 1024)
    disk_bytes = contents if policy.backup == "disk" else 0
    host_bytes = status.bytes_reserved if policy.backup == "resident" else contents - disk_bytes
    assert (status.bytes_backed_up, status.host_bytes) == (contents, host_bytes)
    assert disk_bytes <= status.disk_bytes < disk_bytes + 4096
    assert status.direct_io in ((True, False) if policy.backup == "disk" else (None,))
    assert status.last_pause["total"] > 0

    fp.resume(pool.tag)
    status = pool.status()
    assert (status.state, status.bytes_backed_up) == ("active", 0)
    assert status.host_bytes == (host_bytes if policy.retain else 0)
    assert (status.disk_bytes >= disk_bytes) if policy.retain else (status.disk_bytes == 0)
    assert status.last_resume["total"] > 0
    with pytest.raises(TypeError):
        status.last_resume["total"] = 0
    del tensor, small
    eventually(lambda: pool.status().bytes_reserved == 0, "the segments are given back")
    assert machine.free() == free


def test_every_pool_in_the_order_it_was_made(machine, policy, new_tag):
    pools = [fp.pool(new_tag(), machine.device, **policy.options) for _ in range(3)]
    assert [status.tag for status in fp.status()] == [pool.tag for pool in pools]
    pools[1].close()
    assert [status.tag for status in fp.status()] == [pools[0].tag, pools[2].tag]


def test_a_pool_shows_what_it_is(pool, policy, machine):
    assert (
        repr(pool) == f"<fencepool.Pool {pool.tag!r} on {machine.device}, backup={policy.backup!r}, active>"
    )
    assert (pool.backup, pool.retain, pool.fill) == (policy.backup, policy.retain, policy.fill)
    assert pool.device == machine.device
    assert pool.torch_device == machine.torch_device


def test_a_freed_tensor_with_work_in_flight_is_pending(machine, pool):
    tensor, _ = filled(pool, 2 * MIB)
    address = tensor.data_ptr()
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(tensor, 1, stream)
    del tensor
    status = pool.status()
    assert (status.pending_frees, status.bytes_used, status.bytes_mapped) == (1, 0, 2 * MIB)
    assert machine.is_mapped(address)
    latch.open()
    machine.synchronize(stream)
    eventually(lambda: pool.status().pending_frees == 0, "the segment is given back")
    assert pool.status().bytes_reserved == 0
    assert not machine.is_mapped(address)


@pytest.mark.leaves
def test_what_cannot_be_raised_is_shown(host, tag):
    pool = fp.pool(tag, "cpu")
    tensor, _ = filled(pool, 2 * MIB)
    free = host.free()
    _core.arm_fault("host", "cuMemRelease", 1, True, 999)
    del tensor
    _core.disarm_fault("host")
    problems = pool.status().problems
    assert any("cuMemRelease" in problem and "leaked" in problem for problem in problems)
    assert host.free() == free  # leaked: still held
    assert fp.status()[0].problems == problems


def test_memory_info_is_what_the_driver_says(machine):
    with machine.current():
        status, free, total = machine.driver.mem_get_info()
    assert status == 0
    assert fp.memory_info(machine.device)[1] == total
    assert abs(fp.memory_info(machine.device)[0] - free) < (MIB if machine.is_host else 64 * MIB)


def test_memory_info_follows_the_limit(host, tag):
    free, total = fp.memory_info("cpu")
    limit = total - free + 100 * MIB
    fp.host_driver.configure(memory_limit=limit)
    assert fp.memory_info("cpu") == (100 * MIB, limit)
    tensor = fp.pool(tag, "cpu").empty((3 * MIB,), dtype=torch.uint8)
    assert fp.memory_info("cpu") == (96 * MIB, limit)
    del tensor
    assert fp.memory_info("cpu:1") != (100 * MIB, limit)


def test_the_embedded_driver_describes_itself():
    info = fp.driver_info("host")
    assert (info.provider, info.is_available, info.reason, info.absent_calls) == ("host", True, "", ())
    assert [device.device for device in info.devices] == ["cpu", "cpu:1", "cpu:2", "cpu:3"]
    assert len(info.devices) == raw.DEVICE_COUNT
    assert all(device.attributes["vmm"] == 1 and device.total_bytes > 0 for device in info.devices)
    assert info.version >= 12050


@pytest.mark.gpu
def test_the_gpu_driver_describes_itself():
    info = fp.driver_info("cuda")
    assert (info.is_available, info.reason) == (True, "")
    assert info.devices[0].device == "cuda:0"
    assert info.devices[0].name == torch.cuda.get_device_name(0)
    assert info.devices[0].attributes["compute_major"] == torch.cuda.get_device_capability(0)[0]


def test_a_driver_that_is_not_there_says_why():
    info = fp.driver_info("cuda")
    if info.is_available:
        pytest.skip("there is a GPU")
    assert info.reason
    assert (info.version, info.devices) == (0, ())
    with pytest.raises(fp.DriverUnavailable) as caught:
        fp.pool("gpu", "cuda:0")
    assert info.reason in str(caught.value)
    with pytest.raises(fp.DriverUnavailable):
        fp.pool("gpu")  # the default device is a GPU
    with pytest.raises(fp.DriverUnavailable):
        fp.memory_info("cuda:0")


def test_without_a_gpu_the_error_says_which_device_needs_none():
    if fp.driver_info("cuda").is_available:
        pytest.skip("there is a GPU")
    with pytest.raises(fp.DriverUnavailable, match='device="cpu"'):
        fp.pool("gpu")


@pytest.mark.parametrize("wrong", ["", "host ", "rocm", "cpu"])
def test_an_unknown_driver_is_refused(wrong):
    with pytest.raises(ValueError, match=r"provider|driver"):
        fp.driver_info(wrong)
