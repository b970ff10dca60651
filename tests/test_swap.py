"""Swapping: two sets of pools change places in one call, overlapped, in little memory too, or not at all."""

from __future__ import annotations

import itertools

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled, pattern
from support.machine import MIB, host_counts
from support.policies import POLICIES
from support.waiting import Job, eventually


def written(pool: fp.Pool, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As filled(), and quick for whole MiB, no two of which are equal."""
    parts = torch.arange(size // MIB, dtype=torch.uint8).unsqueeze(1)
    expected = (pattern(MIB, seed) + parts).view(-1)
    tensor = pool.empty((size,), dtype=torch.uint8)
    return tensor.copy_(expected), expected


class Pair:
    """Two pools of the same size, the second one paused."""

    def __init__(
        self, machine, tags, out: dict, into: dict, sizes=(2 * MIB, 3 * MIB, 2 * MIB), sizes_in=None
    ) -> None:
        self.machine = machine
        self.out, self.into = (
            fp.pool(tag, machine.device, **options) for tag, options in zip(tags, (out, into), strict=True)
        )
        self.held_in = [written(self.into, size, 10 + i) for i, size in enumerate(sizes_in or sizes)]
        fp.pause(self.into.tag)
        self.held_out = [written(self.out, size, 20 + i) for i, size in enumerate(sizes)]

    def leave_free(self, nbytes: int) -> None:
        """The device has so much beside what it holds now."""
        free, total = fp.memory_info("cpu")
        fp.host_driver.configure(memory_limit=total - free + nbytes)

    def swap(self, **options) -> fp.Swapped:
        return fp.swap(pause=self.out, resume=self.into, **options)

    def assert_as_before(self) -> None:
        assert (self.out.state, self.into.state) == ("active", "paused")
        for tensor, before in self.held_out:
            assert self.machine.is_all_mapped(tensor)
            assert_same(tensor, before)
        for tensor, _ in self.held_in:
            assert not self.machine.is_any_mapped(tensor)

    def assert_swapped(self) -> None:
        assert (self.out.state, self.into.state) == ("paused", "active")
        for tensor, _ in self.held_out:
            assert not self.machine.is_any_mapped(tensor)
        for tensor, before in self.held_in:
            assert self.machine.is_all_mapped(tensor)
            assert_same(tensor, before)


@pytest.fixture
def tags(new_tag):
    return new_tag("out"), new_tag("into")


KEPT = {"backup": "host"}
ONCE = {"backup": "host", "retain": False}


def calls(name: str) -> int:
    return _core.call_counts("host")[name]


# --- what it does -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.product(POLICIES, POLICIES)), ids=lambda policy: policy.name
)
def test_every_pair_of_policies(machine, tags, first, second):
    pair = Pair(machine, tags, first.options, second.options)
    addresses = [tensor.data_ptr() for tensor, _ in pair.held_out + pair.held_in]
    free = machine.free()
    swapped = pair.swap()
    swapped.fence.synchronize(timeout=60)
    assert machine.free() == free
    assert (swapped.paused.bytes_released, swapped.resumed.bytes_mapped) == (8 * MIB, 8 * MIB)
    for tensor, before in pair.held_in:
        second.assert_after(tensor, before)
        tensor.copy_(before)
    back = fp.swap(pause=[pair.into], resume=[pair.out])
    back.fence.synchronize(timeout=60)
    for tensor, before in pair.held_out:
        first.assert_after(tensor, before)
    fp.resume(pair.into.tag).fence.synchronize(timeout=60)
    for tensor, before in pair.held_in:
        second.assert_after(tensor, before)
    assert [tensor.data_ptr() for tensor, _ in pair.held_out + pair.held_in] == addresses


def test_the_reports_are_those_of_a_pause_and_a_resume(machine, tags):
    pair = Pair(machine, tags, KEPT, KEPT)
    swapped = pair.swap()
    (paused,), (resumed,) = swapped.paused.pools, swapped.resumed.pools
    assert (paused.tag, paused.changed, paused.bytes, paused.bytes_copied) == (
        tags[0],
        True,
        8 * MIB,
        7 * MIB,
    )
    assert (resumed.tag, resumed.changed, resumed.bytes) == (tags[1], True, 8 * MIB)
    assert resumed.bytes_copied == 7 * MIB
    assert list(swapped.paused.seconds) == [
        "quiesce",
        "digest",
        "provision",
        "copy",
        "unmap",
        "release",
        "total",
    ]
    assert list(swapped.resumed.seconds) == ["create", "map", "copy", "fence", "total"]
    assert swapped.paused.seconds["total"] == swapped.resumed.seconds["total"] > 0
    assert all(value >= 0 for side in (swapped.paused, swapped.resumed) for value in side.seconds.values())
    assert pair.out.status().last_pause == swapped.paused.seconds
    assert pair.into.status().last_resume == swapped.resumed.seconds
    (memory,) = swapped.paused.device_memory
    assert memory.free_before == memory.free_after
    assert swapped.paused.unreleased_bytes == 0


def test_pools_and_tags_one_or_several(machine, new_tag):
    pools = [fp.pool(new_tag(), machine.device, backup="host") for _ in range(4)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    fp.pause(*tags[2:])
    fp.swap(pause=[pools[1], tags[0]], resume=(tag for tag in tags[2:]))
    assert [pool.state for pool in pools] == ["paused", "paused", "active", "active"]
    swapped = fp.swap(pause=tags[3], resume=pools[0])
    assert [pool.state for pool in pools] == ["active", "paused", "active", "paused"]
    # What is there already is only reported.
    swapped = fp.swap(pause=tags[1], resume=[tags[0]])
    assert not swapped.paused.pools[0].changed
    assert not swapped.resumed.pools[0].changed
    assert swapped.fence.done()
    fp.swap(pause=[], resume=tags[1])
    fp.swap(pause=tags[0], resume=[])
    assert [pool.state for pool in pools] == ["paused", "active", "active", "paused"]
    fp.resume(*tags)
    for tensor, before in held:
        assert_same(tensor, before)


def test_pools_of_two_devices(machines, keeping, new_tag):
    tags = new_tag("out"), new_tag("into")
    out, into = (
        fp.pool(tag, machine.device, **keeping.options) for tag, machine in zip(tags, machines, strict=True)
    )
    held = [filled(out, 2 * MIB, 1), filled(into, 2 * MIB, 2)]
    fp.pause(into.tag)
    for pause, resume in ((out, into), (into, out)):
        fp.swap(pause=pause, resume=resume).fence.synchronize(timeout=60)
    fp.resume(into.tag).fence.synchronize(timeout=60)
    for tensor, before in held:
        assert_same(tensor, before)


def test_dropped_contents_and_explicit_order(machine, tags):
    if machine.is_host:
        fp.host_driver.configure(host_waits=False, poisoned=True)
    pair = Pair(machine, tags, {**KEPT, "fill": "zero"}, KEPT)
    swapped = pair.swap(discard=[tags[0]], order="explicit")
    assert swapped.paused.pools[0].bytes_copied == 0
    for tensor, before in pair.held_in:
        swapped.resumed.fence_for(tensor).synchronize(timeout=60)
        assert_same(tensor, before)
    fp.resume(tags[0]).fence.synchronize(timeout=60)
    assert not any(tensor.any() for tensor, _ in pair.held_out)


def test_what_comes_later_runs_behind_the_restore(machine, tags):
    if machine.is_host:
        fp.host_driver.configure(host_waits=False, poisoned=True, bandwidth=64 * MIB)
    pair = Pair(machine, tags, KEPT, KEPT)
    scratch = fp.pool(f"{tags[0]}-scratch", machine.device).empty((2 * MIB,), dtype=torch.uint8)
    stream = machine.stream()
    swapped = pair.swap()
    assert not swapped.resumed.host_held
    machine.copy(scratch, pair.held_in[0][0], stream)
    machine.synchronize(stream)
    assert machine.read(scratch.data_ptr(), 2 * MIB) == bytes(pair.held_in[0][1].numpy())
    swapped.fence.synchronize(timeout=60)
    pair.assert_swapped()


# --- overlap, and memory as it becomes free ---------------------------------------------------------


def test_with_room_for_both_every_copy_is_on_its_way_before_anything_is_released(host, tags):
    fp.host_driver.configure(host_waits=False, poisoned=True)
    pair = Pair(host, tags, KEPT, KEPT, sizes=(MIB, MIB, MIB))
    pair.out.prepare()
    copied, released = calls("cuMemcpyHtoDAsync"), calls("cuMemRelease")
    fp.host_driver.configure(bandwidth=8 * MIB)
    swapping = Job(pair.swap)
    eventually(lambda: calls("cuMemcpyHtoDAsync") == copied + 3, "the copies in are submitted")
    assert calls("cuMemRelease") == released
    assert (pair.out.state, pair.into.state) == ("pausing", "resuming")
    fp.host_driver.configure(bandwidth=0)
    swapping.result().fence.synchronize(timeout=60)
    pair.assert_swapped()


@pytest.mark.parametrize("spare", [0, 2 * MIB], ids=["no-room", "room-for-one"])
def test_with_less_room_memory_is_passed_on_piece_by_piece(host, tags, spare):
    """Batches are of 128 MiB: each one that is released lets the next segments of other sizes in."""
    fp.host_driver.configure(poisoned=True)
    sizes = (128 * MIB, 2 * MIB, 128 * MIB)
    pair = Pair(host, tags, KEPT, KEPT, sizes, sizes_in=(64 * MIB, 66 * MIB, 4 * MIB, 124 * MIB))
    pair.out.prepare()
    pair.leave_free(spare)
    copied, released = calls("cuMemcpyHtoDAsync"), calls("cuMemRelease")
    swapping = Job(pair.swap)
    eventually(
        lambda: calls("cuMemcpyHtoDAsync") > copied or not swapping.is_running(), "a copy in is submitted"
    )
    swapping.result().fence.synchronize(timeout=60)
    assert calls("cuMemRelease") == released + 3
    pair.assert_swapped()


@pytest.mark.parametrize("out", [KEPT, {"backup": "none"}], ids=["kept", "dropped"])
def test_memory_of_the_same_size_is_handed_over_and_neither_released_nor_taken(host, tags, out):
    """The driver scrubs what is released, and that takes the engine that copies into the device."""
    pair = Pair(host, tags, out, KEPT)
    pair.leave_free(0)
    taken, released = calls("cuMemCreate"), calls("cuMemRelease")
    swapped = pair.swap()
    swapped.fence.synchronize(timeout=60)
    assert calls("cuMemCreate") == taken + 1  # there was none
    assert calls("cuMemRelease") == released
    assert swapped.paused.bytes_released == swapped.resumed.bytes_mapped == 8 * MIB
    pair.assert_swapped()


def test_with_room_nothing_is_released_before_the_copies_out_have_ended(host, tags):
    fp.host_driver.configure(host_waits=False)
    sizes = (128 * MIB, 128 * MIB, 2 * MIB)
    pair = Pair(host, tags, KEPT, KEPT, sizes)
    pair.out.prepare()
    released, unmapped = calls("cuMemRelease"), calls("cuMemUnmap")
    fp.host_driver.configure(bandwidth=512 * MIB)
    swapping = Job(pair.swap)
    eventually(lambda: calls("cuMemUnmap") > unmapped, "the first batch has gone out")
    assert pair.out.state == "pausing"
    assert calls("cuMemRelease") == released
    fp.host_driver.configure(bandwidth=0)
    swapping.result().fence.synchronize(timeout=60)
    assert calls("cuMemRelease") == released + 3
    pair.assert_swapped()


def test_a_piece_comes_in_while_a_later_one_is_still_going_out(host, tags):
    fp.host_driver.configure(host_waits=False, poisoned=True)
    out = fp.pool(tags[0], "cpu", backup="host")
    into = fp.pool(tags[1], "cpu", backup="host")
    arriving, arriving_before = filled(into, 2 * MIB, 1)
    fp.pause(into.tag)
    large = out.empty((128 * MIB,), dtype=torch.uint8).fill_(7)
    last, last_before = filled(out, 3 * MIB, 2)
    out.prepare()
    free, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - free)
    copied = calls("cuMemcpyHtoDAsync")
    fp.host_driver.configure(bandwidth=512 * MIB)
    swapping = Job(lambda: fp.swap(pause=out, resume=into))
    # The first batch, 128 MiB, has been released; the last segment is slow to go.
    eventually(lambda: calls("cuMemcpyHtoDAsync") > copied, "the copy in is submitted")
    swapped = swapping.result()
    swapped.fence.synchronize(timeout=60)
    assert_same(arriving, arriving_before)
    fp.host_driver.configure(memory_limit=0, bandwidth=0)
    fp.resume(out.tag).fence.synchronize(timeout=60)
    assert_same(last, last_before)
    assert bool((large == 7).all())


def test_dropped_memory_is_passed_on_where_it_is_needed(host, tags):
    pair = Pair(host, tags, {"backup": "none", "fill": "zero"}, KEPT)
    pair.leave_free(0)
    pair.swap()
    pair.assert_swapped()
    fp.swap(pause=pair.into, resume=pair.out)
    assert not any(tensor.any() for tensor, _ in pair.held_out)


def test_dropped_memory_is_kept_until_nothing_else_can_fail(host, tags):
    """Where there is room, a failure of the very last step of the resume loses nothing at all."""
    pair = Pair(host, tags, {"backup": "none"}, KEPT)
    _core.arm_fault("host", "cuCtxWaitEvent", 1, False, 999)
    with pytest.raises(fp.DriverError, match="cuCtxWaitEvent"):
        pair.swap()
    pair.assert_as_before()
    pair.swap()
    pair.assert_swapped()


def test_contents_that_were_dropped_before_a_failure_are_said_to_be_lost(host, tags):
    pair = Pair(host, tags, {"backup": "none", "fill": "zero"}, KEPT)
    pair.leave_free(0)
    _core.arm_fault("host", "cuMemcpyHtoDAsync", 1, False, 999)
    with pytest.raises(fp.DriverError, match="cuMemcpyHtoDAsync") as caught:
        pair.swap()
    (note,) = caught.value.__notes__
    assert tags[0] in note
    assert "without its contents" in note
    assert (pair.out.state, pair.into.state) == ("active", "paused")
    assert not any(tensor.any() for tensor, _ in pair.held_out)  # memory as `fill` says
    pair.swap()
    pair.assert_swapped()


# --- failures ---------------------------------------------------------------------------------------


def test_memory_that_would_not_do_is_refused_before_anything_changes(host, keeping, new_tag):
    out, into = (fp.pool(new_tag(), "cpu", **keeping.options) for _ in range(2))
    arriving, arriving_before = filled(into, 8 * MIB, 1)
    fp.pause(into.tag)
    leaving, leaving_before = filled(out, 4 * MIB, 2)
    free, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - free + 2 * MIB)
    before = host_counts(), [pool.status() for pool in (out, into)]
    released = calls("cuMemRelease")
    for wait in (0, 0.02):
        with pytest.raises(fp.OutOfMemoryError) as caught:
            fp.swap(pause=out, resume=into, wait=wait)
        error = caught.value
        assert (error.pool, error.bytes_wanted, error.bytes_free) == (into.tag, 8 * MIB, 2 * MIB)
        assert "4.00 MiB back" in str(error)
        assert (host_counts(), [pool.status() for pool in (out, into)]) == before
    assert calls("cuMemRelease") == released
    assert_same(leaving, leaving_before)
    swapping = Job(lambda: fp.swap(pause=out, resume=into, wait=60))
    fp.host_driver.configure(memory_limit=0)
    swapping.result()
    assert_same(arriving, arriving_before)


def test_a_pool_cannot_go_both_ways(machine, new_tag):
    pools = [fp.pool(new_tag(), machine.device, backup="host") for _ in range(2)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    for pause, resume in ((tags[0], tags), (pools[0], tags[0]), (tags, pools[1])):
        with pytest.raises(ValueError, match="at once") as caught:
            fp.swap(pause=pause, resume=resume)
        assert any(repr(tag) in str(caught.value) for tag in tags)
    for tensor, before in held:
        assert_same(tensor, before)


def test_what_is_no_tag_or_pool_is_refused(machine, tag):
    pool = fp.pool(tag, machine.device)
    for wrong in (None, 3, [None], [pool, 3], pool._core):
        with pytest.raises(TypeError, match="pause takes tags or pools"):
            fp.swap(pause=wrong, resume=tag)
        with pytest.raises(TypeError, match="resume takes tags or pools"):
            fp.swap(pause=tag, resume=wrong)
    with pytest.raises(fp.UnknownTagError, match="nonsuch"):
        fp.swap(pause=tag, resume="nonsuch")
    with pytest.raises(fp.UnknownTagError, match="discard"):
        fp.swap(pause=tag, resume=[], discard=["nonsuch"])
    with pytest.raises(ValueError, match="order"):
        fp.swap(pause=tag, resume=[], order="any")
    with pytest.raises(ValueError, match="wait"):
        fp.swap(pause=tag, resume=[], wait=-1)
    pool.close()
    with pytest.raises(fp.UnknownTagError, match="closed"):
        fp.swap(pause=pool, resume=[])


def test_work_in_flight_ends_first(machine, tags):
    pair = Pair(machine, tags, KEPT, KEPT)
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(pair.held_out[0][0], 9, stream)
    with pytest.raises(fp.QuiesceTimeout):
        pair.swap(timeout=0.01)
    swapping = Job(pair.swap)
    eventually(lambda: pair.out.state == "pausing", "the swap has begun")
    assert machine.is_all_mapped(pair.held_out[0][0])
    latch.open()
    swapping.result().fence.synchronize(timeout=60)
    fp.swap(pause=pair.into, resume=pair.out).fence.synchronize(timeout=60)
    assert bool((pair.held_out[0][0] == 9).all())


def test_a_region_that_is_entered_is_refused(machine, tags):
    pair = Pair(machine, tags, KEPT, KEPT)
    with pair.out.region(), pytest.raises(fp.PoolBusyError, match=tags[0]):
        pair.swap()
    pair.assert_as_before()


def test_beyond_the_host_budget_nothing_changes(machine, tags):
    pair = Pair(machine, tags, KEPT, ONCE)
    fp.set_host_budget(fp.host_memory().used + MIB)
    with pytest.raises(fp.HostMemoryError, match="budget") as caught:
        pair.swap()
    assert caught.value.pool == tags[0]
    pair.assert_as_before()
    fp.set_host_budget(None)
    pair.swap().fence.synchronize(timeout=60)
    pair.assert_swapped()


def test_callbacks_run_once_and_are_undone(machine, tags):
    pair = Pair(machine, tags, KEPT, KEPT)
    heard: list[str] = []
    for name, pool in (("out", pair.out), ("into", pair.into)):
        pool.on_pause(lambda _, name=name: heard.append(f"{name} before"))
        pool.on_resume(lambda _, name=name: heard.append(f"{name} after"))
    pair.swap()
    assert heard == ["out before", "into after"]
    heard.clear()
    fp.swap(pause=pair.into, resume=pair.out)
    assert heard == ["into before", "out after"]
    heard.clear()
    broken = pair.out.on_pause(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.swap()
    broken.remove()
    heard.clear()
    if machine.is_host:
        _core.arm_fault("host", "cuMemMap", 1, False, 999)
        with pytest.raises(fp.DriverError, match="cuMemMap"):
            pair.swap()
        assert heard == ["out before", "out after"]
    fp.resume(pair.into.tag).fence.synchronize(timeout=60)


def test_a_failing_callback_after_a_swap_says_that_it_has_happened(machine, tags):
    pair = Pair(machine, tags, KEPT, KEPT)
    pair.into.on_resume(lambda _: 1 / 0)
    with pytest.raises(fp.CallbackError):
        pair.swap()
    fp.resume(pair.into.tag).fence.synchronize(timeout=60)
    pair.assert_swapped()


def test_it_is_told_as_a_pause_and_a_resume(machine, tags):
    pair = Pair(machine, tags, KEPT, KEPT)
    with fp.trace() as trace:
        pair.swap()
    names = [event["name"] for event in trace.events() if event.get("cat") == "fencepool"]
    assert sorted(names) == [f"pause {tags[0]}", f"resume {tags[1]}"]


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemCreate", "cuMemSetAccess"])
@pytest.mark.parametrize("is_tight", [False, True], ids=["roomy", "tight"])
def test_a_failing_swap_names_the_pool(host, pinned, tags, call, is_tight):
    pair = Pair(host, tags, pinned.options, pinned.options)
    if is_tight:
        pair.leave_free(0)
    _core.arm_fault("host", call, 1, False, 999)
    with pytest.raises(fp.DriverError, match=call) as caught:
        pair.swap()
    assert caught.value.pool in tags
    pair.assert_as_before()
    pair.swap()
    pair.assert_swapped()


# --- side by side -----------------------------------------------------------------------------------


RESIDENT = {"backup": "resident"}


@pytest.mark.leaves
@pytest.mark.parametrize(
    ("out", "nth"), [(KEPT, 1), (RESIDENT, 4), (RESIDENT, 5), (RESIDENT, 6), (RESIDENT, 7)]
)
def test_a_side_that_could_not_be_brought_back_gives_up_what_it_still_holds(host, tags, out, nth):
    """From some call on nothing can be mapped, nor the undo; the contents are in the backup by then."""
    pair = Pair(host, tags, out, KEPT)
    pair.leave_free(0)
    _core.arm_fault("host", "cuMemMap", nth, True, 999)
    with pytest.raises(fp.DriverError, match="cuMemMap"):
        pair.swap()
    _core.disarm_fault("host")
    assert (pair.out.state, pair.into.state) == ("paused", "paused")
    pair.swap()
    pair.assert_swapped()
    fp.swap(pause=pair.into, resume=pair.out)
    pair.assert_as_before()


@pytest.mark.leaves
def test_contents_that_are_nowhere_else_are_kept_and_the_error_says_whose(host, tags):
    """The first of two batches was copied when mapping starts to fail; of the second one nothing is known."""
    pair = Pair(host, tags, RESIDENT, KEPT, sizes=(130 * MIB, 2 * MIB))
    pair.swap()
    fp.swap(pause=pair.into, resume=pair.out)
    pair.leave_free(0)
    _core.arm_fault("host", "cuMemMap", 1, True, 999)
    with pytest.raises(fp.DriverError, match="cuMemMap"):
        pair.swap()
    _core.disarm_fault("host")
    assert (pair.out.state, pair.into.state) == ("paused", "paused")
    with pytest.raises(fp.OutOfMemoryError, match="together with what is free") as caught:
        pair.swap()
    assert f"pool '{tags[0]}' on cpu is paused and holds 2.00 MiB" in caught.value.__notes__[0]
    fp.resume(pair.out.tag)
    pair.assert_as_before()
    pair.swap()
    pair.assert_swapped()


def test_threads_that_swap_the_same_pools_back_and_forth(host, new_tag):
    pools = [fp.pool(new_tag(), "cpu", backup="host") for _ in range(3)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    orders = [(0, 1), (1, 2), (2, 0), (1, 0)]

    def run(pair: tuple[int, int]) -> bool:
        for _ in range(10):
            fp.swap(pause=pools[pair[0]], resume=pools[pair[1]])
        return True

    assert all(job.result() for job in [Job(lambda pair=pair: run(pair)) for pair in orders])
    fp.resume(*(pool.tag for pool in pools))
    for tensor, before in held:
        assert_same(tensor, before)


def test_allocating_and_freeing_meanwhile(host, tags):
    pair = Pair(host, tags, KEPT, KEPT)
    other = fp.pool(f"{tags[0]}-other", "cpu")
    freed, _ = filled(pair.out, MIB, 99)
    del freed
    for _ in range(3):
        swapping = Job(pair.swap)
        other.empty((MIB,))
        swapping.result()
        pair.assert_swapped()
        fp.swap(pause=pair.into, resume=pair.out)
        pair.assert_as_before()


@pytest.mark.leaves
@pytest.mark.parametrize(
    "bring_back",
    [
        lambda pool: fp.swap(pause=[], resume=pool, order="explicit"),
        lambda pool: fp.resume(pool.tag, order="explicit"),
    ],
    ids=["swap", "resume"],
)
def test_memory_freed_after_an_undo_that_could_not_wait_is_kept_while_copies_run(host, new_tag, bring_back):
    """The whole driver fails from some call on, so that copies in flight, here held, cannot be awaited.

    Freeing the paused tensors must not unmap what those copies still write to: that breaks the context.
    """
    fp.host_driver.configure(host_waits=False)
    for nth in range(1, 60):
        pool = fp.pool(new_tag(), "cpu", backup="host")
        held = [filled(pool, MIB, seed)[0] for seed in range(2)]
        fp.pause(pool.tag)
        latch = host.hold_context()
        _core.arm_fault("host", "*", nth, True, 999)
        try:
            bring_back(pool)
        except fp.Error:
            failed = True
        else:
            failed = False
        _core.disarm_fault("host")
        while host.driver.current() != (0, 0):
            host.driver.pop()
        host.driver.exchange_capture_mode(0)
        del held
        latch.open()
        host.close()
        with host.current():
            assert host.driver.ctx_synchronize() == 0, f"call {nth} broke the context"
        if not failed:
            break
    assert not failed


@pytest.mark.leaves
def test_what_is_written_to_a_resident_pool_after_a_swap_that_failed_is_there_after_the_resume(host, new_tag):
    """The pool was paused by a pause that failed and could not be undone: it holds its memory still."""
    resident = fp.pool(new_tag("resident"), "cpu", backup="resident")
    into, dropped = fp.pool(new_tag("into"), "cpu", backup="host"), fp.pool(new_tag("dropped"), "cpu")
    tensor = resident.empty((2 * MIB,), dtype=torch.uint8).fill_(3)
    arriving, arriving_before = filled(into, 2 * MIB)
    leaving, leaving_before = filled(dropped, 2 * MIB)
    fp.pause(into.tag)
    fp.pause(resident.tag)
    fp.resume(resident.tag)  # its host memory is there from now on
    _core.arm_fault("host", "cuMemMap", 1, True, 999)
    with pytest.raises(fp.DriverError):
        fp.pause(resident.tag)
    _core.disarm_fault("host")
    assert resident.state == "paused"
    _core.arm_fault("host", "cuMemUnmap", 1, False, 999)
    with pytest.raises(fp.DriverError):
        fp.swap(pause=[resident, dropped], resume=into)
    _core.disarm_fault("host")
    assert (resident.state, dropped.state, into.state) == ("paused", "active", "paused")
    assert_same(leaving, leaving_before)
    assert bool((tensor == 3).all())
    tensor.fill_(77)
    fp.resume(resident.tag)
    assert bool((tensor == 77).all())
    fp.resume(into.tag)
    assert_same(arriving, arriving_before)
