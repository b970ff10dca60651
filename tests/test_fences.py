"""The end of a restore: what is ordered behind it, and who can wait for it.

`machine.hold_context()` puts everything that comes later on the device behind a latch, the restore's copies
too. So a resume is known to be unfinished until the test opens the latch.
"""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled
from support.machine import MIB, Machine
from support.waiting import Job, eventually

SIZE = 8 * MIB
SLOW = 100 * MIB  # bytes a second: the restore of 8 MiB then takes far longer than work that does not wait


class Restoring:
    """A paused pool that keeps its contents, its tensor, what that holds, and a place to copy it to."""

    def __init__(self, machine: Machine, tag: str, **options) -> None:
        if machine.is_host:
            fp.host_driver.configure(host_waits=False, poisoned=True)
        self.pool = fp.pool(tag, machine.device, **(options or {"backup": "host"}))
        self.tensor, self.before = filled(self.pool, SIZE)
        self.scratch = fp.pool(f"{tag}-scratch", machine.device).empty((SIZE,), dtype=torch.uint8)
        self.scratch.zero_()
        if not machine.is_host:
            torch.cuda.synchronize()
        fp.pause(tag)

    def __iter__(self):
        return iter((self.pool, self.tensor, self.before, self.scratch))


@pytest.mark.parametrize("order", ["context", "explicit"])
def test_a_resume_does_not_hold_the_host_for_the_copies(machine, tag, order):
    pool, tensor, before, _ = Restoring(machine, tag)
    latch = machine.hold_context()
    resumed = fp.resume(pool.tag, order=order)
    assert latch.waiting == 1
    assert not resumed.host_held
    assert not resumed.fence.done()
    assert pool.state == "active"
    with pytest.raises(TimeoutError):
        resumed.fence.synchronize(timeout=0)
    with pytest.raises(TimeoutError):
        resumed.fence.synchronize(timeout=0.02)
    latch.open()
    resumed.fence.synchronize(timeout=60)
    assert resumed.fence.done()
    assert_same(tensor, before)


def test_streams_made_before_and_after_the_resume_run_behind_it(machine, tag):
    pool, tensor, before, scratch = Restoring(machine, tag)
    streams = [machine.stream(), machine.stream(flags=0)]
    if machine.is_host:
        fp.host_driver.configure(bandwidth=SLOW)
    fp.resume(pool.tag)
    streams += [machine.stream(), 0]  # 0: the default stream
    for stream in streams:
        machine.memset(scratch, 0, stream)
        machine.copy(scratch, tensor, stream)
        machine.synchronize(stream)
        assert machine.read(scratch.data_ptr(), SIZE) == bytes(before.numpy())
    assert_same(tensor, before)


def test_work_that_is_queued_during_the_restore_runs_behind_it(machine, tag):
    pool, tensor, before, scratch = Restoring(machine, tag)
    stream = machine.stream()
    if machine.is_host:
        fp.host_driver.configure(bandwidth=SLOW)
    latch = machine.hold_context()
    fence = fp.resume(pool.tag).fence
    machine.copy(scratch, tensor, stream)
    assert not fence.done()
    latch.open()
    machine.synchronize(stream)
    assert fence.done()
    assert_same(scratch, before)


def test_a_graph_replay_runs_behind_the_restore(machine, tag):
    pool, tensor, before, scratch = Restoring(machine, tag)
    if not machine.is_host:
        pytest.skip("torch's graphs: see test_captures.py")
    stream = machine.stream()
    fp.resume(pool.tag).fence.synchronize()
    driver = machine.driver
    with machine.current():
        assert driver.begin_capture(stream) == 0
        assert driver.memcpy_dtod(scratch.data_ptr(), tensor.data_ptr(), SIZE, stream) == 0
        status, graph = driver.end_capture(stream)
        assert status == 0
        status, executable = driver.graph_instantiate(graph)
        assert status == 0
    fp.pause(pool.tag)
    fp.host_driver.configure(bandwidth=SLOW)
    fence = fp.resume(pool.tag).fence
    with machine.current():
        assert driver.graph_launch(executable, stream) == 0
        assert driver.stream_synchronize(stream) == 0
        assert fence.done()
        assert driver.graph_exec_destroy(executable) == 0
        assert driver.graph_destroy(graph) == 0
    assert_same(scratch, before)


def test_with_explicit_order_a_stream_that_waits_runs_behind_the_restore(machine, tag):
    pool, tensor, before, scratch = Restoring(machine, tag)
    stream = machine.stream()
    if machine.is_host:
        fp.host_driver.configure(bandwidth=SLOW)
    fence = fp.resume(pool.tag, order="explicit").fence
    fence.wait(stream)
    machine.copy(scratch, tensor, stream)
    machine.synchronize(stream)
    assert fence.done()
    assert_same(scratch, before)


def test_with_explicit_order_a_stream_that_does_not_wait_is_not_held(host, tag):
    pool = fp.pool(tag, "cpu", backup="host")
    tensor, before = filled(pool, 4 * MIB)
    other, other_before = filled(fp.pool(f"{tag}-other", "cpu"), MIB, 1)
    scratch = fp.pool(f"{tag}-scratch", "cpu").empty((MIB,), dtype=torch.uint8)
    stream = host.stream()
    fp.pause(tag)
    fp.host_driver.configure(bandwidth=MIB)  # the restore takes four seconds
    fence = fp.resume(tag, order="explicit").fence
    host.copy(scratch, other, stream)
    host.synchronize(stream)
    assert not fence.done()
    assert_same(scratch, other_before)
    fp.host_driver.configure(bandwidth=0)
    fence.synchronize()
    assert_same(tensor, before)


def test_with_explicit_order_one_layer_can_be_used_while_another_is_on_its_way(host, tag):
    first = fp.pool(f"{tag}-0", "cpu", backup="host")
    last = fp.pool(f"{tag}-30", "cpu", backup="host")
    early, early_before = filled(first, MIB, 1)
    late, late_before = filled(last, 4 * MIB, 2)
    fp.pause(first.tag, last.tag)
    early_fence = fp.resume(first.tag, order="explicit").fence
    early_fence.synchronize()
    fp.host_driver.configure(bandwidth=MIB)
    late_fence = fp.resume(last.tag, order="explicit").fence
    assert_same(early, early_before)
    assert early_fence.done()
    assert not late_fence.done()
    fp.host_driver.configure(bandwidth=0)
    late_fence.synchronize()
    assert_same(late, late_before)


def test_on_the_embedded_driver_the_cpu_itself_waits(host, tag):
    pool = fp.pool(tag, "cpu", backup="host")
    tensor, before = filled(pool, 2 * MIB)
    fp.pause(tag)
    fp.host_driver.configure(bandwidth=50 * MIB)
    resumed = fp.resume(tag)
    assert resumed.host_held
    assert resumed.fence.done()
    assert_same(tensor, before)


def test_the_cpu_is_held_until_the_restore_has_ended(host, tag):
    pool = fp.pool(tag, "cpu", backup="host")
    tensor, before = filled(pool, MIB)
    fp.pause(tag)
    latch = host.hold_context()
    copies = _core.call_counts("host")["cuMemcpyHtoDAsync"]
    resuming = Job(lambda: fp.resume(tag))
    eventually(lambda: _core.call_counts("host")["cuMemcpyHtoDAsync"] > copies, "the copies are submitted")
    assert latch.waiting == 1
    assert resuming.is_running()
    latch.open()
    assert resuming.result().fence.done()
    assert_same(tensor, before)


# --- who waits --------------------------------------------------------------------------------------


class Protocol:
    """A stream of another library, by the protocol of cuda.core."""

    def __init__(self, handle: int, version: int = 0, is_method: bool = True) -> None:
        pair = (version, handle)
        self.__cuda_stream__ = (lambda: pair) if is_method else pair


@pytest.mark.parametrize("is_method", [True, False])
def test_a_stream_by_protocol(machine, keeping, tag, is_method):
    pool, tensor, before, scratch = Restoring(machine, tag, **keeping.options)
    stream = machine.stream()
    fence = fp.resume(pool.tag, order="explicit").fence
    fence.wait(Protocol(stream, is_method=is_method))
    machine.copy(scratch, tensor, stream)
    machine.synchronize(stream)
    assert_same(scratch, before)


@pytest.mark.gpu
def test_torch_streams(keeping, tag):
    machine = Machine("cuda:0")
    pool = fp.pool(tag, "cuda:0", **keeping.options)
    tensor, before = filled(pool, 64 * MIB)
    fp.pause(tag)
    fence = fp.resume(tag, order="explicit").fence
    stream = torch.cuda.Stream("cuda:0")
    fence.wait(stream)
    with torch.cuda.stream(stream):
        copy = tensor.clone()
    stream.synchronize()
    assert fence.done()
    fence.wait(torch.cuda.default_stream("cuda:0"))
    assert_same(copy, before)
    assert machine.is_all_mapped(tensor)


def test_what_is_no_stream_is_refused(machine, keeping, tag):
    pool, tensor, before, _ = Restoring(machine, tag, **keeping.options)
    fence = fp.resume(pool.tag).fence
    for wrong in (None, "stream", 1.5, True, object()):
        with pytest.raises(TypeError, match="stream"):
            fence.wait(wrong)
    with pytest.raises(ValueError, match="negative"):
        fence.wait(-1)
    with pytest.raises(ValueError, match="version 3"):
        fence.wait(Protocol(0, version=3))
    fence.synchronize()
    assert_same(tensor, before)


def test_a_stream_of_another_device_is_refused(machines, keeping, tag):
    first, second = machines
    pool = fp.pool(tag, first.device, **keeping.options)
    filled(pool, MIB)
    if first.provider != second.provider:
        pytest.skip("a handle of another driver cannot be told apart")
    foreign = second.stream()
    fp.pause(tag)
    fence = fp.resume(tag, order="explicit").fence
    with pytest.raises(ValueError, match="another device"):
        fence.wait(foreign)
    fence.wait(first.stream())


def test_a_fence_of_two_devices_is_waited_for_on_either(machines, keeping, tag):
    held = [
        filled(fp.pool(tag, machine.device, **keeping.options), MIB, i) for i, machine in enumerate(machines)
    ]
    fp.pause(tag)
    fence = fp.resume(tag, order="explicit").fence
    if machines[0].provider == machines[1].provider:
        for machine in machines:
            fence.wait(machine.stream())
    fence.synchronize()
    for tensor, before in held:
        assert_same(tensor, before)


def test_a_fence_with_nothing_to_wait_for_is_done(machine, tag):
    pool = fp.pool(tag, machine.device)
    pool.empty((MIB,))
    fence = fp.resume(tag).fence
    assert fence.done()
    fence.synchronize(timeout=0)
    fence.wait(machine.stream())
    fp.pause(tag)
    assert fp.resume(tag).fence.done()


def test_a_fence_outlives_its_pool(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, _ = filled(pool, MIB)
    fp.pause(tag)
    fence = fp.resume(tag, order="explicit").fence
    del tensor
    pool.close()
    assert fence.done()
    fence.synchronize(timeout=0)
    fence.wait(machine.stream())


@pytest.mark.parametrize("wrong", [-1, float("nan"), -0.001])
def test_a_timeout_is_not_negative(machine, tag, wrong):
    fp.pool(tag, machine.device)
    with pytest.raises(ValueError, match="timeout"):
        fp.resume(tag).fence.synchronize(timeout=wrong)


@pytest.mark.parametrize("wrong", ["1", True, [1]])
def test_a_timeout_is_a_number(machine, tag, wrong):
    fp.pool(tag, machine.device)
    with pytest.raises(TypeError, match="timeout"):
        fp.resume(tag).fence.synchronize(timeout=wrong)


# --- while the restore is on its way ----------------------------------------------------------------


def test_a_pause_during_the_restore_loses_nothing(machine, tag):
    pool, tensor, before, _ = Restoring(machine, tag)
    latch = machine.hold_context()
    fence = fp.resume(pool.tag, order="explicit").fence
    with pytest.raises(fp.QuiesceTimeout):
        fp.pause(pool.tag, timeout=0)
    pausing = Job(lambda: fp.pause(pool.tag))
    eventually(lambda: pool.state == "pausing", "the pause has begun")
    assert not fence.done()
    latch.open()
    pausing.result()
    fp.resume(pool.tag).fence.synchronize()
    assert_same(tensor, before)


def test_the_backup_is_not_given_back_during_the_restore(machine, tag):
    pool, tensor, before, _ = Restoring(machine, tag)
    latch = machine.hold_context()
    fence = fp.resume(pool.tag, order="explicit").fence
    trimming = Job(pool.trim)
    eventually(lambda: pool.state == "trimming", "the trim has begun")
    assert not fence.done()
    assert pool.status().host_bytes >= SIZE
    latch.open()
    assert trimming.result() >= SIZE
    assert fence.done()
    assert pool.status().host_bytes == 0
    assert_same(tensor, before)


def test_closing_during_the_restore_waits_for_it(machine, tag):
    pool, tensor, _, scratch = Restoring(machine, tag)
    latch = machine.hold_context()
    fence = fp.resume(pool.tag, order="explicit").fence
    del tensor, scratch
    closing = Job(pool.close)
    eventually(lambda: pool.state == "closing", "the close has begun")
    assert not fence.done()
    latch.open()
    closing.result()
    assert fence.done()
    assert pool.tag not in [status.tag for status in fp.status()]


def test_a_tensor_freed_during_the_restore_is_given_back_after_it(machine, tag):
    if machine.is_host:
        fp.host_driver.configure(host_waits=False)
    pool = fp.pool(tag, machine.device, backup="host")
    tensor, _ = filled(pool, SIZE)
    fp.pause(tag)
    latch = machine.hold_context()
    fence = fp.resume(tag, order="explicit").fence
    address = tensor.data_ptr()
    del tensor
    assert machine.is_mapped(address)
    assert pool.status().pending_frees == 1
    latch.open()
    fence.synchronize()
    eventually(lambda: pool.status().pending_frees == 0, "the segment is given back")
    assert not machine.is_mapped(address)
    assert _core.problems() == []
