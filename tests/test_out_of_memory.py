"""Too little device memory: what the error says, that nothing is lost, and waiting for others' memory."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support import children
from support.contents import assert_same, filled
from support.machine import MIB
from support.waiting import Job, eventually


def limit_free(free: int, device: str = "cpu") -> None:
    """Leave `free` bytes of an emulated device's memory."""
    left, total = fp.memory_info(device)
    fp.host_driver.configure(device, memory_limit=total - left + free)


def test_an_allocation_that_does_not_fit(host, policy, tag):
    pool = fp.pool(tag, "cpu", **policy.options)
    tensor, before = filled(pool, 2 * MIB)
    limit_free(4 * MIB)
    status = pool.status()
    with pytest.raises(fp.OutOfMemoryError) as caught:
        pool.empty((6 * MIB,), dtype=torch.uint8)
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, MemoryError)
    assert isinstance(error, fp.DriverError)
    assert (error.call, error.status, error.code) == ("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)
    assert (error.pool, error.bytes_wanted, error.bytes_free) == (tag, 6 * MIB, 4 * MIB)
    assert tag in str(error)
    assert pool.status() == status
    fitting = pool.empty((4 * MIB,), dtype=torch.uint8)
    assert pool.contains(fitting)
    assert_same(tensor, before)


def test_a_resume_that_does_not_fit_stays_paused_with_its_contents(host, policy, tag):
    pool = fp.pool(tag, "cpu", **policy.options)
    tensor, before = filled(pool, 4 * MIB, 1)
    other, other_before = filled(pool, 2 * MIB, 2)
    fp.pause(tag)
    limit_free(5 * MIB)
    free, status = host.free(), pool.status()
    for wait in (0.0, 0.02):
        with pytest.raises(fp.OutOfMemoryError) as caught:
            fp.resume(tag, wait=wait)
        error = caught.value
        assert isinstance(error, torch.OutOfMemoryError)
        assert (error.pool, error.bytes_wanted, error.bytes_free) == (tag, 6 * MIB, 5 * MIB)
        assert "6.00 MiB wanted, 5.00 MiB free, 1.00 MiB missing" in str(error)
        assert host.free() == free
        assert pool.status() == status
        assert not host.is_any_mapped(tensor)
    fp.host_driver.configure(memory_limit=0)
    fp.resume(tag)
    policy.assert_after(tensor, before)
    policy.assert_after(other, other_before)


def test_of_two_tags_the_second_does_not_fit_and_none_is_resumed(host, policy, new_tag):
    pools = [fp.pool(new_tag(), "cpu", **policy.options) for _ in range(2)]
    held = [filled(pool, 4 * MIB, i) for i, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    fp.pause(*tags)
    limit_free(6 * MIB)
    free = host.free()
    with pytest.raises(fp.OutOfMemoryError) as caught:
        fp.resume(*tags)
    assert (caught.value.bytes_wanted, caught.value.bytes_free) == (8 * MIB, 6 * MIB)
    assert [pool.state for pool in pools] == ["paused", "paused"]
    assert host.free() == free
    assert not any(host.is_any_mapped(tensor) for tensor, _ in held)
    fp.resume(tags[1])
    policy.assert_after(*held[1])
    fp.host_driver.configure(memory_limit=0)
    fp.resume(*tags)
    policy.assert_after(*held[0])


def test_of_two_devices_one_has_too_little_and_none_is_resumed(clean, keeping, tag):
    pools = [fp.pool(tag, device, **keeping.options) for device in ("cpu", "cpu:1")]
    held = [filled(pool, 4 * MIB, i) for i, pool in enumerate(pools)]
    fp.pause(tag)
    limit_free(2 * MIB, "cpu:1")
    free = fp.memory_info("cpu")
    with pytest.raises(fp.OutOfMemoryError) as caught:
        fp.resume(tag)
    assert (caught.value.bytes_wanted, caught.value.bytes_free) == (4 * MIB, 2 * MIB)
    assert "cpu:1" in str(caught.value)
    assert [pool.state for pool in pools] == ["paused", "paused"]
    assert fp.memory_info("cpu") == free
    fp.host_driver.configure("cpu:1", memory_limit=0)
    fp.resume(tag)
    for tensor, before in held:
        assert_same(tensor, before)


def retries() -> int:
    return _core.call_counts("host")["cuMemCreate"]


def wait_for_retries(count: int) -> None:
    start = retries()
    eventually(lambda: retries() >= start + count, "the resume has tried again")


def test_waiting_for_memory_that_another_pool_gives_back(host, policy, new_tag):
    pool, other = (fp.pool(new_tag(), "cpu", **policy.options) for _ in range(2))
    tensor, before = filled(pool, 4 * MIB)
    fp.pause(pool.tag)
    hog = other.empty((4 * MIB,), dtype=torch.uint8)
    limit_free(0)
    resuming = Job(lambda: fp.resume(pool.tag, wait=1000))
    wait_for_retries(3)
    assert pool.state == "resuming"
    assert resuming.is_running()
    fp.pause(other.tag)
    assert resuming.result().pools[0].changed
    policy.assert_after(tensor, before)
    del hog


def test_waiting_for_memory_that_is_freed(host, keeping, new_tag):
    pool, other = (fp.pool(new_tag(), "cpu", **keeping.options) for _ in range(2))
    tensor, before = filled(pool, 4 * MIB)
    fp.pause(pool.tag)
    hogs = [other.empty((2 * MIB,), dtype=torch.uint8) for _ in range(2)]
    limit_free(0)
    resuming = Job(lambda: fp.resume(pool.tag, wait=1000))
    wait_for_retries(2)
    hogs.pop()
    wait_for_retries(2)
    assert resuming.is_running()
    hogs.pop()
    resuming.result()
    assert_same(tensor, before)


def test_a_resume_that_waits_holds_no_memory_meanwhile(host, policy, tag):
    """Two that each hold half of what both need would wait for each other for ever."""
    pool = fp.pool(tag, "cpu", **policy.options)
    held = [pool.empty((2 * MIB,), dtype=torch.uint8) for _ in range(3)]
    fp.pause(tag)
    limit_free(4 * MIB)
    resuming = Job(lambda: fp.resume(tag, wait=1000))
    wait_for_retries(6)
    eventually(lambda: host.free() == 4 * MIB, "what was taken is given back")
    assert resuming.is_running()
    fp.host_driver.configure(memory_limit=0)
    resuming.result()
    assert host.is_all_mapped(held[2])


def test_an_allocation_waits_for_what_was_just_freed(host, policy, tag):
    """Freed memory whose last work is in flight counts as there: the allocation waits for that work."""
    pool = fp.pool(tag, "cpu", **policy.options)
    first = pool.empty((4 * MIB,), dtype=torch.uint8)
    limit_free(0)
    stream = host.stream()
    latch = host.hold(stream)
    host.memset(first, 1, stream)
    del first
    allocating = Job(lambda: pool.empty((4 * MIB,), dtype=torch.uint8))
    assert latch.waiting == 1
    latch.open()
    assert pool.contains(allocating.result())


@pytest.mark.gpu
def test_waiting_for_memory_that_another_process_gives_back(keeping, tag):
    pool = fp.pool(tag, "cuda:0", **keeping.options)
    tensor, before = filled(pool, 256 * MIB)
    fp.pause(tag)
    # The other process takes all but 64 MiB of what is free, and gives it back when it is told to.
    other = children.start(
        """
        driver = raw.Driver("cuda")
        driver.push(driver.primary_retain(driver.device_get(0)[1])[1])
        step, handles = 1 << 30, []
        while step >= GRANULARITY:
            free = driver.mem_get_info()[1]
            if free < step + (64 << 20):
                step >>= 1
                continue
            status, handle = driver.mem_create(0, step)
            if status:
                step >>= 1
                continue
            handles.append(handle)
        print("taken", flush=True)
        sys.stdin.readline()
        for handle in handles:
            driver.mem_release(handle)
        print("given", flush=True)
        sys.stdin.readline()
        """
    )
    try:
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(fp.OutOfMemoryError) as caught:
            fp.resume(tag)
        assert caught.value.bytes_wanted == 256 * MIB
        assert caught.value.bytes_free < 256 * MIB
        assert pool.state == "paused"
        start = _core.call_counts("cuda")["cuMemCreate"]
        resuming = Job(lambda: fp.resume(tag, wait=1000))
        eventually(
            lambda: _core.call_counts("cuda")["cuMemCreate"] >= start + 3, "the resume has tried again"
        )
        assert resuming.is_running()
        other.stdin.write("\n")
        other.stdin.flush()
        resuming.result()
        assert_same(tensor, before)
    finally:
        other.stdin.close()
        other.wait(60)
        other.stdout.close()
        other.stderr.close()


@pytest.mark.gpu
def test_what_pytorch_caches_is_given_back_before_giving_up(keeping, tag):
    pool = fp.pool(tag, "cuda:0", **keeping.options)
    tensor, before = filled(pool, 256 * MIB)
    fp.pause(tag)
    free, _ = fp.memory_info("cuda:0")
    hogs = []
    size = (free - 128 * MIB) // 2 // (2 * MIB) * (2 * MIB)
    hogs = [torch.empty(size, dtype=torch.uint8, device="cuda:0") for _ in range(2)]
    hogs.clear()  # back to PyTorch, which keeps it
    assert fp.memory_info("cuda:0")[0] < 256 * MIB
    fp.resume(tag)
    assert_same(tensor, before)


def test_without_pytorch_the_error_is_a_memory_error():
    children.run_silently(
        """
        sys.modules["torch"] = None  # as where it is not installed
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
        pool = fp.pool("t", "cpu")
        fp.host_driver.configure(memory_limit=2 << 20)
        try:
            pool._core.allocate(4 << 20)
        except fp.OutOfMemoryError as error:
            assert isinstance(error, MemoryError) and isinstance(error, fp.DriverError)
            assert error.bytes_wanted == 4 << 20 and error.bytes_free == 2 << 20
        else:
            raise SystemExit("it fitted")
        """
    )
