"""Many threads at once: transitions, allocations and frees of the same pools."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled, is_same, pattern
from support.machine import MIB, host_counts
from support.waiting import LIMIT, Job, eventually


def together(*calls) -> None:
    """Start all at once, wait for all, and raise the first failure."""
    barrier = threading.Barrier(len(calls))

    def start(call):
        barrier.wait(LIMIT)
        return call()

    jobs = [Job(lambda call=call: start(call)) for call in calls]
    for job in jobs:
        job.result()


def test_tensors_freed_by_other_threads_while_a_pause_runs(machine, pool, policy):
    kept, before = filled(pool, 2 * MIB, 1)
    stream = machine.stream()
    doomed = [[filled(pool, size, 2)[0] for size in (MIB, 900, 2 * MIB, 30)] for _ in range(4)]
    latch = machine.hold(stream)
    pausing = Job(lambda: fp.pause(pool.tag))
    eventually(lambda: pool.state == "pausing", "the pause has begun")
    together(*(tensors.clear for tensors in doomed))
    assert pausing.is_running()
    latch.open()
    pausing.result()
    assert pool.status().bytes_used == 2 * MIB
    fp.resume(pool.tag)
    policy.assert_after(kept, before)
    eventually(lambda: pool.status().pending_frees == 0, "everything is given back")
    assert pool.status().bytes_reserved == 2 * MIB


def test_tensors_freed_by_other_threads_while_a_resume_waits(host, policy, tag):
    pool = fp.pool(tag, "cpu", **policy.options)
    kept, before = filled(pool, 2 * MIB, 1)
    doomed = [filled(pool, 2 * MIB, 2)[0], filled(pool, 100, 3)[0]]
    fp.pause(tag)
    left, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - left + 3 * MIB)
    resuming = Job(lambda: fp.resume(tag, wait=1000))
    eventually(lambda: pool.state == "resuming", "the resume has begun")
    together(doomed.clear)
    # What was freed comes off the next try or the next call: raise the limit for either.
    fp.host_driver.configure(memory_limit=0)
    resuming.result()
    policy.assert_after(kept, before)
    eventually(lambda: pool.status().bytes_reserved == 2 * MIB, "everything is given back")


def test_allocations_wait_for_a_transition_and_then_happen_or_are_refused(machine, pool):
    stream = machine.stream()
    latch = machine.hold(stream)
    pausing = Job(lambda: fp.pause(pool.tag))
    eventually(lambda: pool.state == "pausing", "the pause has begun")
    allocating = Job(lambda: pool.empty((10,)))
    assert pool.state == "pausing"
    latch.open()
    pausing.result()
    with pytest.raises(fp.PoolPausedError):
        allocating.result()


def test_of_many_that_pause_at_once_one_does(machine, pool, policy):
    tensor, before = filled(pool, MIB)
    calls = []
    for _ in range(10):
        reports: list = []
        together(*[lambda reports=reports: reports.append(fp.pause(pool.tag))] * 6)
        calls.append(sum(report.pools[0].changed for report in reports))
        reports = []
        together(*[lambda reports=reports: reports.append(fp.resume(pool.tag))] * 6)
        calls.append(sum(report.pools[0].changed for report in reports))
        policy.assert_after(tensor, before)
        tensor.copy_(before)
    assert calls == [1] * 20


def test_callbacks_run_once_for_a_transition_of_many_threads(machine, pool):
    calls: list[str] = []
    pool.on_pause(lambda _: calls.append("pause"))
    pool.on_resume(lambda _: calls.append("resume"))
    for _ in range(10):
        together(*[lambda: fp.pause(pool.tag)] * 4)
        together(*[lambda: fp.resume(pool.tag)] * 4)
    assert calls == ["pause", "resume"] * 10


def test_overlapping_sets_of_tags_do_not_lock_each_other_out(machine, keeping, new_tag):
    tags = [new_tag() for _ in range(3)]
    held = [filled(fp.pool(tag, machine.device, **keeping.options), MIB, i) for i, tag in enumerate(tags)]

    def cycle(*some):
        for _ in range(25):
            fp.pause(*some)
            fp.resume(*some)

    together(
        lambda: cycle(tags[0], tags[1]),
        lambda: cycle(tags[1], tags[2]),
        lambda: cycle(tags[2], tags[0]),
        lambda: cycle(*reversed(tags)),
    )
    fp.resume()
    for tensor, before in held:
        assert_same(tensor, before)


def test_everything_at_once(machine, policy, new_tag):
    """Threads allocate, write, look, free and cycle; what lives through a cycle of its own pool is right."""
    tags = [new_tag(), new_tag()]
    pools = [fp.pool(tag, machine.device, **policy.options) for tag in tags]
    quiet = fp.pool(new_tag(), machine.device, **policy.options)
    errors: list[str] = []
    turns = 40

    def allocate(seed: int) -> None:
        held = []
        for turn in range(turns):
            try:
                held.append(pools[turn % 2].empty((1 << (turn % 22),), dtype=torch.uint8))
            except fp.PoolPausedError:
                continue
            if len(held) > 5:
                held.pop(seed % len(held))

    def write(seed: int) -> None:
        for turn in range(turns):
            contents = pattern(100_000, seed + turn % 3)
            tensor = quiet.empty((100_000,), dtype=torch.uint8)
            tensor.copy_(contents)
            if not is_same(tensor, contents):
                errors.append(f"turn {turn}: the contents are wrong")

    def cycle() -> None:
        for _ in range(turns):
            fp.pause(*tags)
            fp.resume(*tags)

    def look() -> None:
        for _ in range(turns):
            for status in fp.status():
                if status.bytes_used > status.bytes_reserved:
                    errors.append(f"{status}")

    together(lambda: allocate(1), lambda: allocate(2), lambda: write(3), cycle, cycle, look)
    assert errors == []
    assert {pool.state for pool in pools} == {"active"}
    eventually(lambda: all(pool.status().bytes_used == 0 for pool in pools), "everything is given back")
    assert _core.problems() == []


def test_eight_threads_with_a_region_each_allocate_free_pause_and_resume(machine, keeping, new_tag):
    """What PyTorch allocates lands in the thread's own pool, whatever the other threads are doing."""
    sizes = (3 * MIB, 700, MIB, 40_000)

    def live(seed: int) -> None:
        pool = fp.pool(new_tag(), machine.device, **keeping.options)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        for turn in range(8):
            before = pattern(sizes[turn % 4], seed)  # outside: there it would lie in the pool itself
            with pool.region():
                held.append((before.to(machine.torch_device, copy=True), before))
                lost = torch.zeros(sizes[seed % 4], dtype=torch.uint8, device=machine.torch_device)
                assert pool.contains(lost)
            del lost
            if len(held) > 3:
                held.pop(turn % 3)
            addresses = [tensor.data_ptr() for tensor, _ in held]
            fp.pause(pool.tag)
            assert pool.status().bytes_mapped == 0
            fp.resume(pool.tag)
            assert [tensor.data_ptr() for tensor, _ in held] == addresses
            for tensor, contents in held:
                assert pool.contains(tensor)
                assert_same(tensor, contents)

    together(*(lambda seed=seed: live(seed) for seed in range(8)))
    assert _core.problems() == []


def stuck_in_its_copy(machine, pool) -> tuple[Job, Any]:
    """A resume of the paused pool whose copy waits for a latch, and the latch."""
    copies = _core.call_counts(machine.provider)["cuEventRecord"]
    latch = machine.hold_context()
    resuming = Job(lambda: fp.resume(pool.tag))
    eventually(
        lambda: _core.call_counts(machine.provider)["cuEventRecord"] > copies + 1, "the copies are submitted"
    )
    return resuming, latch


def cycled(*pools) -> None:
    """Make what a pool makes on first use: a driver may wait for the device then, which will be held."""
    for pool in pools:
        fp.pause(pool.tag)
        fp.resume(pool.tag)


def test_no_operation_on_a_pool_but_a_pause_waits_for_the_copy_of_another(machine, policy, new_tag):
    """A pause does, and a resume of a resident pool: they wait for all work of their device."""
    # Without retaining, a resume waits for its own copy, to give the backup back: only the slow one here.
    policy = dataclasses.replace(policy, retain=True)
    slow = fp.pool(new_tag(), machine.device, backup="host", retain=False)
    other = fp.pool(new_tag(), machine.device, **policy.options)
    paused = fp.pool(new_tag(), machine.device, **policy.options)
    held, before = filled(slow, 2 * MIB, 1)
    away, away_before = filled(paused, MIB, 3)
    cycled(slow, paused)
    away.copy_(away_before)
    freed = [filled(other, MIB, 2)[0]]
    fp.pause(slow.tag, paused.tag)
    resuming, latch = stuck_in_its_copy(machine, slow)

    def operate() -> None:
        assert other.contains(other.empty((MIB,), dtype=torch.uint8))
        freed.clear()
        assert [status.state for status in fp.status()][-3:] == ["resuming", "active", "paused"]
        if policy.backup != "resident":
            fp.resume(paused.tag, order="explicit")
            assert paused.state == "active"

    Job(operate).result()
    assert resuming.is_running()
    latch.open()
    resuming.result()
    assert_same(held, before)
    fp.resume(paused.tag)  # behind the copies of before, where there are any
    policy.assert_after(away, away_before)


def test_a_pool_pauses_and_resumes_during_the_copy_of_another_device(machines, new_tag):
    slow = fp.pool(new_tag(), machines[0].device, backup="host", retain=False)
    free = fp.pool(new_tag(), machines[1].device, backup="host")
    held, before = filled(slow, 2 * MIB, 1)
    other, other_before = filled(free, 2 * MIB, 2)
    cycled(slow, free)
    fp.pause(slow.tag)
    resuming, latch = stuck_in_its_copy(machines[0], slow)
    Job(lambda: cycled(free, free)).result()
    assert resuming.is_running()
    latch.open()
    resuming.result()
    assert_same(other, other_before)
    assert_same(held, before)


class ClosedError(Exception):
    """The pool was closed by another thread meanwhile."""


@contextlib.contextmanager
def telling_closed():
    """Tell the ValueError of a closed pool from any other."""
    try:
        yield
    except ValueError as error:
        if "closed" in str(error):
            raise ClosedError from error
        raise


def test_closing_while_others_use_the_pool(machine, policy, new_tag):
    """Whoever comes too late is told that the pool is closed; nothing else may happen."""
    for _ in range(15):
        tag = new_tag()
        made = fp.pool(tag, machine.device, **policy.options)

        def use(tag=tag):
            for _ in range(10):
                with contextlib.suppress(fp.PoolPausedError, ClosedError), telling_closed():
                    fp.pool(tag, machine.device, **policy.options).empty((100,))

        def close(pool=made):
            with contextlib.suppress(fp.PoolBusyError):
                pool.close()

        def cycle(tag=tag):
            with contextlib.suppress(fp.UnknownTagError, ClosedError), telling_closed():
                fp.pause(tag)
                fp.resume(tag)

        together(use, close, use, cycle)
        if any(status.tag == tag for status in fp.status()):
            fp.resume(tag)


def test_fences_from_many_threads(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, before = filled(pool, 4 * MIB)
    fp.pause(tag)
    fence = fp.resume(tag, order="explicit").fence

    def wait():
        fence.wait(machine.stream())
        fence.synchronize(timeout=60)
        assert fence.done()
        assert_same(tensor, before)

    together(*[wait] * 6)


def test_pools_of_threads_that_have_ended(machine, policy, new_tag):
    counts = host_counts()
    made: list = []

    def build():
        pool = fp.pool(new_tag(), machine.device, **policy.options)
        made.append((pool, *filled(pool, MIB)))

    together(*[build] * 4)
    fp.pause()
    fp.resume()
    for _, tensor, before in made:
        policy.assert_after(tensor, before)
    pools = [pool for pool, _, _ in made]
    del tensor
    made.clear()
    for pool in pools:
        pool.close()
    assert host_counts()["ranges"] == counts["ranges"]
