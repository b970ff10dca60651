"""The backup's host memory: what it costs, when it goes back, and what happens when there is too little."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support import children
from support.contents import assert_same, filled
from support.machine import MIB, host_counts
from support.waiting import eventually


def resident() -> int:
    """Bytes of this process in memory that are not shared: what a backup is made of."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_a_backup_costs_what_is_live_and_no_more(machine, pinned, tag):
    pool = fp.pool(tag, machine.device, **pinned.options)
    large, _ = filled(pool, 5 * MIB + 100)  # no rounding to 8 MiB, nor to the segment's 6
    small, _ = filled(pool, 1000)
    dead, _ = filled(pool, 3 * MIB)
    del dead
    eventually(lambda: pool.status().pending_frees == 0, "the freed tensor is given back")
    report = fp.pause(tag)
    exact = 5 * MIB + 512 + 1024
    status = pool.status()
    assert (status.host_bytes, status.bytes_backed_up, report.pools[0].bytes_copied) == (exact, exact, exact)
    fp.resume(tag)
    del large, small


def test_a_retained_backup_is_kept_and_used_again(machine, tag):
    pool = fp.pool(tag, machine.device, backup="host")
    tensor, before = filled(pool, 4 * MIB)
    for _ in range(3):
        fp.pause(tag)
        assert pool.status().host_bytes == 4 * MIB
        fp.resume(tag)
        assert pool.status().host_bytes == 4 * MIB
    assert_same(tensor, before)


def test_a_backup_that_is_not_retained_goes_back_with_each_resume(machine, tag):
    pool = fp.pool(tag, machine.device, backup="host", retain=False)
    tensor, before = filled(pool, 4 * MIB)
    registrations = host_counts()["registrations"]
    for _ in range(3):
        fp.pause(tag)
        assert pool.status().host_bytes == 4 * MIB
        assert fp.resume(tag).fence.done()
        assert pool.status().host_bytes == 0
        assert host_counts()["registrations"] == registrations
        assert_same(tensor, before)


def test_a_pool_without_backup_costs_no_host_memory(machine, tag):
    for fill in ("undefined", "zero"):
        pool = fp.pool(tag, machine.device, fill=fill)
        tensor, _ = filled(pool, 2 * MIB)
        assert pool.prepare() == 0
        fp.pause(tag)
        assert (pool.status().host_bytes, pool.trim()) == (0, 0)
        fp.resume(tag)
        del tensor


def test_prepare_takes_what_the_first_pause_will_need(machine, pinned, tag):
    pool = fp.pool(tag, machine.device, **pinned.options)
    tensor, before = filled(pool, 3 * MIB)
    assert pool.prepare() == 3 * MIB
    assert pool.prepare() == 0
    assert pool.status().host_bytes == 3 * MIB
    more, more_before = filled(pool, MIB, 1)
    assert pool.prepare() == MIB
    fp.pause(tag)
    assert pool.status().host_bytes == 4 * MIB
    fp.resume(tag)
    assert_same(tensor, before)
    assert_same(more, more_before)


def test_trim_gives_it_back_and_the_next_pause_takes_it_again(machine, tag):
    pool = fp.pool(tag, machine.device, backup="host")
    tensor, before = filled(pool, 2 * MIB)
    fp.pause(tag)
    fp.resume(tag)
    assert pool.trim() == 2 * MIB
    assert pool.trim() == 0
    assert pool.status().host_bytes == 0
    assert_same(tensor, before)
    fp.pause(tag)
    assert pool.status().host_bytes == 2 * MIB
    fp.resume(tag)
    assert_same(tensor, before)


def test_trim_is_refused_while_the_backup_holds_the_contents(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, before = filled(pool, 2 * MIB)
    fp.pause(tag)
    with pytest.raises(fp.PoolPausedError, match=tag) as caught:
        pool.trim()
    assert caught.value.pool == tag
    status = pool.status()
    assert status.host_bytes + status.disk_bytes == 2 * MIB
    fp.resume(tag)
    assert_same(tensor, before)


def test_resident_memory_falls_when_the_backup_goes_back(host, pinned, tag):
    size = 128 * MIB
    pool = fp.pool(tag, "cpu", **pinned.options)
    tensor = pool.empty((size // 8,), dtype=torch.int64)
    torch.arange(tensor.numel(), out=tensor)  # no two blocks are equal
    start = resident()
    fp.pause(tag)
    assert resident() > start + size * 3 // 4
    fp.resume(tag)
    pool.trim()
    assert resident() < start + size // 4
    assert torch.equal(tensor, torch.arange(tensor.numel()))


def test_more_than_the_host_has_is_refused_before_anything_is_taken(host, viewed, new_tag):
    """The tensor is never written, so that it takes no memory of the machine itself."""
    available = _core.available_host_memory()
    fp.host_driver.configure(memory_limit=5 * available + fp.memory_info("cpu")[1])
    # Digests would read it, and find out that zeros need no memory.
    pool, other = (fp.pool(new_tag(), "cpu", digests=False, **viewed.options) for _ in range(2))
    tensor, before = filled(other, MIB)
    huge = pool.empty((2 * available,), dtype=torch.uint8)
    status, counts = [one.status() for one in (pool, other)], host_counts()
    for call in (lambda: fp.pause(other.tag, pool.tag), lambda: fp.pause(pool.tag), pool.prepare):
        with pytest.raises(fp.HostMemoryError) as caught:
            call()
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.bytes_wanted >= 2 * available
        assert 0 < error.bytes_free < 2 * available
        assert error.pool == pool.tag
        assert pool.tag in str(error)
        assert [one.status() for one in (pool, other)] == status
        after = host_counts()
        assert {**after, "streams": 0} == {**counts, "streams": 0}  # a pool's stream is made once and kept
    assert_same(tensor, before)
    del huge
    fp.pause(other.tag, pool.tag)
    fp.resume(other.tag, pool.tag)
    assert_same(tensor, before)


FULL = """
import resource
pool = fp.pool("t", "cpu", backup="host", retain={retain}, digests=False)
other = fp.pool("u", "cpu", backup="host", retain={retain}, digests=False)
blocks = [block_of(one, 64 << 20, 7 + i) for i, one in enumerate((other, pool))]
fp.pause("u"); fp.resume("u")  # what is kept for good is made: streams, threads' stacks
other.trim()
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
before = pool.status()
resource.setrlimit(resource.RLIMIT_AS, (now + (96 << 20), resource.RLIM_INFINITY))
try:
    fp.pause("u", "t")
except fp.HostMemoryError as error:
    assert isinstance(error, MemoryError)
else:
    raise SystemExit("it had enough")
assert pool.status() == before and other.state == "active", (pool.status(), before)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert all(is_filled(block, 64 << 20, 7 + i) for i, block in enumerate(blocks))
fp.pause("u", "t")
fp.resume("u", "t")
assert all(is_filled(block, 64 << 20, 7 + i) for i, block in enumerate(blocks))
assert _core.problems() == [], _core.problems()
"""


@pytest.mark.parametrize("retain", [True, False])
def test_the_host_is_full_in_the_middle_of_a_pause(retain):
    children.run_silently(FULL.format(retain=retain))


def test_host_memory_that_cannot_be_pinned_is_a_lack_of_host_memory(host, pinned, tag):
    """What CUDA calls OUT_OF_MEMORY there is the host's, not the device's."""
    pool = fp.pool(tag, "cpu", **pinned.options)
    tensor, before = filled(pool, 2 * MIB)
    for call in (lambda: fp.pause(tag), pool.prepare):
        _core.arm_fault("host", "cuMemHostRegister", 1, False, 2)
        with pytest.raises(fp.HostMemoryError) as caught:
            call()
        assert "cuMemHostRegister" in str(caught.value)
        assert caught.value.pool == tag
        assert pool.state == "active"
        assert pool.status().host_bytes == 0
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, before)


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemUnmap"])
def test_a_failing_pause_names_the_pool(host, pinned, tag, call):
    pool = fp.pool(tag, "cpu", **pinned.options)
    tensor, before = filled(pool, 2 * MIB)
    _core.arm_fault("host", call, 1, False, 999)
    with pytest.raises(fp.DriverError) as caught:
        fp.pause(tag)
    assert (caught.value.call, caught.value.status) == (call, "CUDA_ERROR_UNKNOWN")
    assert caught.value.pool == tag
    assert tag in str(caught.value)
    assert_same(tensor, before)


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuEventRecord"]
)
def test_a_failing_resume_names_the_pool(host, pinned, tag, call):
    pool = fp.pool(tag, "cpu", **pinned.options)
    tensor, before = filled(pool, 2 * MIB)
    fp.pause(tag)
    _core.arm_fault("host", call, 1, False, 999)
    with pytest.raises(fp.DriverError) as caught:
        fp.resume(tag)
    assert (caught.value.call, caught.value.status) == (call, "CUDA_ERROR_UNKNOWN")
    assert caught.value.pool == tag
    assert tag in str(caught.value)
    fp.resume(tag)
    assert_same(tensor, before)
