"""Callbacks before a pause and after a resume: for what is registered elsewhere and goes stale."""

from __future__ import annotations

import pytest

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled
from support.machine import MIB


@pytest.fixture
def calls() -> list[str]:
    return []


def test_called_while_the_memory_is_there(machine, pool, calls):
    tensor, _ = filled(pool, MIB)

    def look(name):
        def callback(given):
            assert given is pool
            assert machine.is_all_mapped(tensor)
            calls.append(f"{name} {given.state}")

        return callback

    handles = [pool.on_pause(look("pause")), pool.on_resume(look("resume"))]
    fp.pause(pool.tag)
    assert calls == ["pause active"]
    fp.resume(pool.tag)
    assert calls == ["pause active", "resume active"]
    for handle in handles:
        handle.remove()  # a callback keeps alive what it refers to, here the tensor


def test_called_in_the_order_of_registration_and_of_pools(machine, policy, new_tag, calls):
    pools = [fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2)]
    for number, pool in enumerate(pools):
        for turn in "ab":
            pool.on_pause(lambda _, text=f"pause {number}{turn}": calls.append(text))
            pool.on_resume(lambda _, text=f"resume {number}{turn}": calls.append(text))
    tags = [pool.tag for pool in pools]
    fp.pause(*tags)
    fp.resume(*tags)
    assert calls == [f"{what} {at}" for what in ("pause", "resume") for at in ("0a", "0b", "1a", "1b")]


def test_not_called_when_nothing_changes(pool, calls):
    pool.on_pause(lambda _: calls.append("pause"))
    pool.on_resume(lambda _: calls.append("resume"))
    fp.resume(pool.tag)
    assert calls == []
    fp.pause(pool.tag)
    fp.pause(pool.tag)
    assert calls == ["pause"]
    fp.resume(pool.tag)
    fp.resume(pool.tag)
    assert calls == ["pause", "resume"]


def test_a_removed_callback_is_not_called(pool, calls):
    handle = pool.on_pause(lambda _: calls.append("pause"))
    handle.remove()
    handle.remove()
    fp.pause(pool.tag)
    assert calls == []


def test_a_callback_may_remove_itself(pool, calls):
    def once(_):
        calls.append("once")
        handle.remove()

    handle = pool.on_pause(once)
    pool.on_pause(lambda _: calls.append("always"))
    for _ in range(2):
        fp.pause(pool.tag)
        fp.resume(pool.tag)
    assert calls == ["once", "always", "always"]


def test_a_callback_may_allocate_in_its_pool(pool, policy, calls):
    pool.on_pause(lambda given: calls.append(filled(given, MIB)))
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    policy.assert_after(*calls.pop())


def test_a_failing_callback_stops_the_pause(machine, policy, new_tag, calls):
    pools = [fp.pool(new_tag(), machine.device, **policy.options) for _ in range(3)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    for number, pool in enumerate(pools):
        pool.on_resume(lambda _, at=number: calls.append(f"resume {at}"))
    pools[0].on_pause(lambda _: calls.append("pause 0"))
    failing = pools[1].on_pause(lambda _: 1 / 0)
    pools[2].on_pause(lambda _: calls.append("pause 2"))

    with pytest.raises(ZeroDivisionError):
        fp.pause(*(pool.tag for pool in pools))

    assert calls == ["pause 0", "resume 0"]
    assert {pool.state for pool in pools} == {"active"}
    for tensor, before in held:
        assert_same(tensor, before)
    failing.remove()
    fp.pause(*(pool.tag for pool in pools))
    assert calls == ["pause 0", "resume 0", "pause 0", "pause 2"]


def test_when_the_pause_itself_fails_the_callbacks_are_undone(machine, pool, calls):
    tensor, before = filled(pool, MIB)
    pool.on_pause(lambda _: calls.append("pause"))
    pool.on_resume(lambda _: calls.append("resume"))
    stream = machine.stream()
    latch = machine.hold(stream)
    with pytest.raises(fp.QuiesceTimeout):
        fp.pause(pool.tag, timeout=0.01)
    assert calls == ["pause", "resume"]
    latch.open()
    machine.synchronize(stream)
    assert_same(tensor, before)


def test_a_failing_undo_becomes_a_note(machine, pool, calls):
    pool.on_pause(lambda _: calls.append("pause"))
    pool.on_resume(lambda _: 1 / 0)
    latch = machine.hold(machine.stream())
    with pytest.raises(fp.QuiesceTimeout) as caught:
        fp.pause(pool.tag, timeout=0.01)
    assert any("ZeroDivisionError" in note for note in caught.value.__notes__)
    latch.open()


def test_a_failing_callback_after_a_resume_leaves_the_pools_active(machine, policy, new_tag, calls):
    pools = [fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    pools[0].on_resume(lambda _: 1 / 0)
    pools[0].on_resume(lambda _: calls.append("resume 0"))
    pools[1].on_resume(lambda _: [][0])
    pools[1].on_resume(lambda _: calls.append("resume 1"))
    fp.pause(*tags)
    with pytest.raises(fp.CallbackError) as caught:
        fp.resume(*tags)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert any("IndexError" in note for note in caught.value.__notes__)
    assert calls == ["resume 0", "resume 1"]
    assert {pool.state for pool in pools} == {"active"}
    for tensor, before in held:
        policy.assert_after(tensor, before)


def test_not_called_after_a_resume_that_fails(host, keeping, tag, calls):
    pool = fp.pool(tag, "cpu", **keeping.options)
    tensor, before = filled(pool, 2 * MIB)
    pool.on_resume(lambda _: calls.append("resume"))
    fp.pause(tag)
    fp.host_driver.configure(memory_limit=MIB)
    with pytest.raises(MemoryError):
        fp.resume(tag)
    assert calls == []
    fp.host_driver.configure(memory_limit=0)
    fp.resume(tag)
    assert calls == ["resume"]
    assert_same(tensor, before)


@pytest.mark.parametrize("wrong", [None, 3, "callback"])
def test_what_cannot_be_called_is_refused(pool, wrong):
    for register in (pool.on_pause, pool.on_resume):
        with pytest.raises(TypeError, match="callable"):
            register(wrong)
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    assert _core.problems() == []


def test_the_paused_block_calls_them_too(pool, calls):
    pool.on_pause(lambda _: calls.append("pause"))
    pool.on_resume(lambda _: calls.append("resume"))
    with fp.paused(pool.tag):
        calls.append("block")
    assert calls == ["pause", "block", "resume"]
