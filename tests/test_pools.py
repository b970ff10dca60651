"""Pools: made once, found again, closed."""

from __future__ import annotations

import threading

import pytest
import torch

import fencepool as fp
from support import children
from support.contents import assert_same, filled
from support.machine import MIB
from support.policies import POLICIES


def test_the_same_tag_and_policy_give_the_same_pool(machine, pool, policy, tag):
    assert fp.pool(tag, machine.device, **policy.options) is pool
    assert fp.pool(tag, machine.torch_device, **policy.options) is pool
    if not machine.is_host:
        assert fp.pool(tag, torch.device(machine.device), **policy.options) is pool


def test_another_policy_is_another_pool(machine, tag):
    pools = [fp.pool(tag, machine.device, **policy.options) for policy in POLICIES]
    assert len({id(pool) for pool in pools}) == len(POLICIES)
    assert {pool.tag for pool in pools} == {tag}


def test_another_device_is_another_pool(machines, policy, tag):
    first, second = (fp.pool(tag, machine.device, **policy.options) for machine in machines)
    assert first is not second
    tensor, _ = filled(first, MIB)
    assert first.contains(tensor)
    assert not second.contains(tensor)


def test_making_the_first_pool_with_digests_does_not_wait_for_what_the_device_does(device):
    """Its kernel is loaded then, and launched once: not to be waited for while another pool is restored."""
    if device != "cpu":
        pytest.skip("the device is held by the embedded driver's latch")
    children.run_silently(
        """
        driver = raw.Driver("host")
        context = driver.primary_retain(driver.device_get(0)[1])[1]
        driver.push(context)
        stream, latch = driver.stream_create(1)[1], raw.Latch()
        driver.hold(latch, stream)
        event = driver.event_create()[1]
        driver.event_record(event, stream)
        driver.ctx_wait_event(context, event)
        pool = fp.pool("first", "cpu", backup="host")
        assert pool.digests
        assert driver.stream_query(stream) != 0
        latch.open()
        block = block_of(pool, 4 << 20, 3)
        fp.pause("first")
        fp.resume("first")
        assert is_filled(block, 4 << 20, 3)
        """
    )


def test_devices_by_name(new_tag):
    assert fp.pool(new_tag(), "cpu").device == "cpu"
    assert fp.pool(new_tag(), "cpu:0").device == "cpu"
    assert fp.pool(new_tag(), "cpu:3").device == "cpu:3"
    assert fp.pool(new_tag(), torch.device("cpu")).device == "cpu"


@pytest.mark.gpu
def test_the_default_device_is_the_current_gpu(tag):
    torch.cuda.init()
    assert fp.pool(tag).device == f"cuda:{torch.cuda.current_device()}"
    assert fp.pool(tag, "cuda") is fp.pool(tag)


@pytest.mark.parametrize("text", ["weights", "a b", "größe", "重み", "'quoted\"", "a" * 10_000, "\n"])
def test_any_text_is_a_tag(machine, text):
    pool = fp.pool(text, machine.device, backup="host")
    tensor, before = filled(pool, 1000)
    assert pool.tag == text
    assert fp.pause(text).pools[0].tag == text
    fp.resume(text)
    assert_same(tensor, before)


def test_threads_that_ask_at_once_get_one_pool(machine, policy, new_tag):
    for _ in range(20):
        tag = new_tag()
        barrier = threading.Barrier(8)
        found: list[fp.Pool] = []

        def ask(tag=tag, barrier=barrier, found=found):
            barrier.wait()
            found.append(fp.pool(tag, machine.device, **policy.options))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len({id(pool) for pool in found}) == 1
        assert sum(status.tag == tag for status in fp.status()) == 1


def test_closing_gives_everything_back(machine, pool, policy, tag):
    free = machine.free()
    tensor, _ = filled(pool, 2 * MIB)
    fp.pause(tag)
    fp.resume(tag)
    del tensor
    pool.close()
    assert machine.free() == free
    assert tag not in [status.tag for status in fp.status()]
    with pytest.raises(fp.UnknownTagError):
        fp.pause(tag)
    again = fp.pool(tag, machine.device, **policy.options)
    assert again is not pool
    assert again.state == "active"
    assert again.status().last_pause is None


def test_closing_a_paused_pool(machine, pool, tag):
    free = machine.free()
    tensor, _ = filled(pool, 2 * MIB)
    fp.pause(tag)
    del tensor
    pool.close()
    assert machine.free() == free


def test_a_pool_with_live_tensors_is_not_closed(machine, pool, policy):
    tensor, before = filled(pool, MIB)
    small, small_before = filled(pool, 10)
    with pytest.raises(fp.PoolBusyError, match="2 live tensors") as caught:
        pool.close()
    assert caught.value.pool == pool.tag
    assert pool.state == "active"
    assert_same(tensor, before)
    fp.pause(pool.tag)
    with pytest.raises(fp.PoolBusyError):
        pool.close()
    assert pool.state == "paused"
    fp.resume(pool.tag)
    policy.assert_after(tensor, before)
    policy.assert_after(small, small_before)


def test_a_closed_pool_cannot_be_used(pool, tag):
    pool.close()
    for use in (lambda: pool.empty((10,)), pool.prepare, pool.trim, pool.close):
        with pytest.raises(ValueError, match="closed"):
            use()
    assert not pool.contains(torch.zeros(1))
    assert tag not in [status.tag for status in fp.status()]


def test_closing_waits_for_the_work_on_freed_tensors(machine, pool):
    tensor, _ = filled(pool, 2 * MIB)
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(tensor, 3, stream)
    del tensor
    opener = threading.Thread(target=latch.open)
    opener.start()
    pool.close()
    assert latch.passed == 1
    opener.join()


def test_contains(machine, pool, policy, new_tag):
    other = fp.pool(new_tag(), machine.device, **policy.options)
    tensor, _ = filled(pool, 2 * MIB)
    assert pool.contains(tensor)
    assert pool.contains(tensor[100:200])
    assert pool.contains(tensor.view(2, -1).t())
    assert not other.contains(tensor)
    assert not pool.contains(tensor.clone())
    assert not pool.contains(pool.empty((0,)))
    assert not pool.contains(torch.empty(3, device="meta"))
    fp.pause(pool.tag)
    assert pool.contains(tensor)
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        pool.contains(tensor.data_ptr())


@pytest.mark.gpu
def test_a_tensor_of_the_other_kind_of_device_is_not_contained(tag):
    here, there = fp.pool(tag, "cpu"), fp.pool(tag, "cuda:0")
    tensor = here.empty((10,))
    assert here.contains(tensor)
    assert not there.contains(tensor)
    assert not here.contains(there.empty((10,)))


def test_a_pool_that_was_closed_after_it_was_listed_is_not_known_again(host, new_tag):
    from fencepool.pools import _known, known

    pool = fp.pool(new_tag(), "cpu")
    core = pool._core  # as a thread has it that lists pools, and comes to its turn after the close
    assert known(core) is pool
    pool.close()
    assert known(core) is not pool
    assert core.id not in _known
