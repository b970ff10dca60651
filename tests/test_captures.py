"""CUDA-graph captures: an allocation or a free does not break one; a pause or a resume raises first."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled, pattern
from support.machine import MIB, NON_BLOCKING, Machine, check
from support.waiting import LIMIT, Job, eventually

SIZE = MIB

# Made before any test, and so not taken for something that a test left behind.
pytestmark = pytest.mark.usefixtures("watched_stream")


class HostCapture:
    """A capture on a stream of the embedded driver; `replay` runs what was captured."""

    def __init__(self, machine: Machine, stream: int) -> None:
        self.machine = machine
        self.stream = stream
        self._executable = 0

    def __enter__(self):
        with self.machine.current():
            check(self.machine.driver.begin_capture(self.stream))
        return self

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.machine.copy(to, source, self.stream)

    def __exit__(self, *error):
        driver = self.machine.driver
        with self.machine.current():
            graph = check(driver.end_capture(self.stream))
            self._executable = check(driver.graph_instantiate(graph))
            check(driver.graph_destroy(graph))

    def replay(self) -> None:
        with self.machine.current():
            check(self.machine.driver.graph_launch(self._executable, self.stream))
            check(self.machine.driver.stream_synchronize(self.stream))

    def close(self) -> None:
        if self._executable:
            with self.machine.current():
                check(self.machine.driver.graph_exec_destroy(self._executable))


class TorchCapture:
    """The same through torch.cuda.graph, on a stream of PyTorch's."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self._context = torch.cuda.graph(self.graph, capture_error_mode="thread_local")

    def __enter__(self):
        self._context.__enter__()
        return self

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source)

    def __exit__(self, *error):
        self._context.__exit__(*error)

    def replay(self) -> None:
        self.graph.replay()
        torch.cuda.synchronize()

    def close(self) -> None:
        self.graph.reset()


@pytest.fixture(scope="module")
def watched_stream():
    """One stream of the embedded driver that pools look at; watched streams live as long as the process."""
    machine = Machine("cpu")
    with machine.current():
        stream = check(machine.driver.stream_create(NON_BLOCKING))
    _core.watch_streams("host", 0, [stream])
    return stream


@pytest.fixture
def capture(machine, request):
    if machine.is_host:
        made = HostCapture(machine, request.getfixturevalue("watched_stream"))
    else:
        made = TorchCapture()
    yield made
    made.close()


@pytest.fixture
def scratch(machine, tag):
    return lambda: fp.pool(f"{tag}-scratch", machine.device).empty((SIZE,), dtype=torch.uint8)


def test_a_pause_during_a_capture_raises_and_the_capture_survives(machine, pool, capture, scratch):
    tensor, before = filled(pool, SIZE)
    to = scratch()
    to.zero_()
    status = pool.status()
    with capture:
        capture.copy(to, tensor)
        with pytest.raises(fp.CaptureError, match="captur"):
            fp.pause(pool.tag)
        with pytest.raises(fp.CaptureError):
            fp.pause()
        capture.copy(to, tensor)
    assert pool.status() == status
    assert_same(tensor, before)
    capture.replay()
    assert_same(to, before)
    fp.pause(pool.tag)
    fp.resume(pool.tag)


def test_a_resume_during_a_capture_raises_and_the_capture_survives(
    machine, policy, new_tag, capture, scratch
):
    pool, other = (fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2))
    tensor, before = filled(pool, SIZE, 1)
    source, source_before = filled(other, SIZE, 2)
    to = scratch()
    fp.pause(pool.tag)
    status, free = pool.status(), machine.free()
    with capture:
        capture.copy(to, source)
        for order in ("context", "explicit"):
            with pytest.raises(fp.CaptureError):
                fp.resume(pool.tag, order=order)
    assert (pool.status(), machine.free()) == (status, free)
    capture.replay()
    assert_same(to, source_before)
    fp.resume(pool.tag)
    policy.assert_after(tensor, before)


def test_a_swap_during_a_capture_raises_and_the_capture_survives(machine, policy, new_tag, capture, scratch):
    out, into = (fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2))
    arriving, arriving_before = filled(into, SIZE, 1)
    fp.pause(into.tag)
    source, before = filled(out, SIZE, 2)
    to = scratch()
    status, free = [pool.status() for pool in (out, into)], machine.free()
    with capture:
        capture.copy(to, source)
        with pytest.raises(fp.CaptureError, match="a swap"):
            fp.swap(pause=out, resume=into)
    assert ([pool.status() for pool in (out, into)], machine.free()) == (status, free)
    capture.replay()
    assert_same(to, before)
    fp.swap(pause=out, resume=into).fence.synchronize(timeout=60)
    policy.assert_after(arriving, arriving_before)


@pytest.mark.parametrize("order", ["context", "explicit"])
def test_a_capture_that_begins_while_a_resume_waits_for_memory_survives(host, tag, watched_stream, order):
    capture = HostCapture(host, watched_stream)
    pool = fp.pool(tag, "cpu", backup="host")
    tensor, before = filled(pool, SIZE)
    scratch = fp.pool(f"{tag}-scratch", "cpu")
    source, source_before = filled(scratch, SIZE, 3)
    to = scratch.empty((SIZE,), dtype=torch.uint8)
    fp.pause(tag)
    free, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - free)
    before_waiting = _core.call_counts("host")["cuMemCreate"]
    resuming = Job(lambda: fp.resume(tag, wait=LIMIT, order=order))
    eventually(
        lambda: _core.call_counts("host")["cuMemCreate"] > before_waiting + 1, "the resume waits for memory"
    )
    with capture:
        capture.copy(to, source)
        fp.host_driver.configure(memory_limit=0)
        with pytest.raises(fp.CaptureError, match="captured"):
            resuming.result()
        assert pool.state == "paused"
    capture.replay()
    assert_same(to, source_before)
    fp.resume(tag).fence.synchronize(timeout=LIMIT)
    assert_same(tensor, before)
    capture.close()


@pytest.mark.parametrize("is_another_paused", [False, True])
def test_a_restore_under_way_is_not_ordered_into_a_capture(host, new_tag, watched_stream, is_another_paused):
    """Resuming what is active already orders the context behind its last restore, which breaks a capture."""
    capture = HostCapture(host, watched_stream)
    pool, other = (fp.pool(new_tag(), "cpu", backup="host") for _ in range(2))
    tensor, before = filled(pool, SIZE)
    source, source_before = filled(other, SIZE, 3)
    to = other.empty((SIZE,), dtype=torch.uint8)
    third = fp.pool(new_tag(), "cpu:1" if is_another_paused else "cpu")
    if is_another_paused:
        fp.pause(third.tag)
    fp.pause(pool.tag)
    fp.host_driver.configure(bandwidth=4 * MIB, host_waits=False)
    fence = fp.resume(pool.tag, order="explicit").fence
    with capture:
        capture.copy(to, source)
        assert not fence.done()
        with pytest.raises(fp.CaptureError, match="captured"):
            fp.resume(pool.tag, third.tag)
        assert third.state == ("paused" if is_another_paused else "active")
    capture.replay()
    assert_same(to, source_before)
    fence.synchronize(timeout=LIMIT)
    assert_same(tensor, before)
    fp.resume(pool.tag, third.tag)
    capture.close()


def test_a_capture_that_begins_while_a_swap_waits_costs_no_contents(host, new_tag, watched_stream):
    """Where there is no room for both sides, contents are dropped before the resume can order the device."""
    capture = HostCapture(host, watched_stream)
    into, out = fp.pool(new_tag(), "cpu", backup="host"), fp.pool(new_tag(), "cpu")
    arriving, arriving_before = filled(into, SIZE, 1)
    fp.pause(into.tag)
    leaving, leaving_before = filled(out, SIZE, 2)
    other = fp.pool(new_tag(), "cpu")
    source, source_before = filled(other, SIZE, 3)
    to = other.empty((SIZE,), dtype=torch.uint8)
    free, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - free)
    latch = host.hold(host.stream())
    before = _core.call_counts("host")["cuEventQuery"]
    swapping = Job(lambda: fp.swap(pause=out, resume=into))
    eventually(
        lambda: _core.call_counts("host")["cuEventQuery"] > before + 2, "it waits for the work in flight"
    )
    with capture:
        capture.copy(to, source)
        latch.open()
        with pytest.raises(fp.CaptureError, match=r"a swap on cpu.*Nothing was changed"):
            swapping.result()
        assert (out.state, into.state) == ("active", "paused")
    assert_same(leaving, leaving_before)
    capture.replay()
    assert_same(to, source_before)
    fp.swap(pause=out, resume=into)
    assert_same(arriving, arriving_before)
    capture.close()


def test_what_does_nothing_is_not_refused(machine, policy, new_tag, capture, scratch):
    paused, active = (fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2))
    fp.pause(paused.tag)
    source, before = filled(active, SIZE)
    to = scratch()
    with capture:
        capture.copy(to, source)
        assert not fp.pause(paused.tag).pools[0].changed
        assert not fp.resume(active.tag).pools[0].changed
    capture.replay()
    assert_same(to, before)


def test_a_tensor_freed_during_a_capture_does_not_break_it(machine, pool, capture, scratch):
    tensors = [filled(pool, size)[0] for size in (SIZE, 1000)]
    source, before = filled(pool, SIZE, 3)
    to = scratch()
    with capture:
        capture.copy(to, source)
        tensors.clear()
        assert pool.status().pending_frees == 2
        capture.copy(to, source)
    capture.replay()
    assert_same(to, before)
    eventually(lambda: pool.status().pending_frees == 0, "the tensors are given back after the capture")
    assert _core.problems() == []


def test_an_allocation_during_a_capture_does_not_break_it(machine, pool, capture, scratch):
    source, before = filled(pool, SIZE)
    to = scratch()
    with capture:
        capture.copy(to, source)
        made = [pool.empty((size,), dtype=torch.uint8) for size in (2 * SIZE, 100)]
        capture.copy(made[0][:SIZE], source)
    capture.replay()
    assert_same(to, before)
    assert_same(made[0][:SIZE], before)


def test_too_little_memory_during_a_capture_does_not_break_it(host, policy, tag, watched_stream):
    capture = HostCapture(host, watched_stream)
    pool = fp.pool(tag, "cpu", **policy.options)
    source, before = filled(pool, SIZE)
    to, gone = (pool.empty((SIZE,), dtype=torch.uint8) for _ in range(2))
    left, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - left)
    with capture:
        capture.copy(to, source)
        del gone
        with pytest.raises(fp.OutOfMemoryError):
            pool.empty((SIZE,), dtype=torch.uint8)
    capture.replay()
    assert_same(to, before)
    assert pool.contains(pool.empty((SIZE,), dtype=torch.uint8))
    capture.close()


def test_a_status_during_a_capture_does_not_break_it(machine, pool, capture, scratch):
    source, before = filled(pool, SIZE)
    to = scratch()
    with capture:
        capture.copy(to, source)
        assert pool.tag in [status.tag for status in fp.status()]
        assert pool.status().state == "active"
        fp.memory_info(machine.device)
        pool.prepare()
    capture.replay()
    assert_same(to, before)


def test_a_stream_that_is_being_captured_cannot_wait_for_a_fence(machine, keeping, new_tag, capture, scratch):
    pool, other = (fp.pool(new_tag(), machine.device, **keeping.options) for _ in range(2))
    tensor, tensor_before = filled(pool, SIZE, 1)
    source, before = filled(other, SIZE, 2)
    to = scratch()
    fp.pause(pool.tag)
    fence = fp.resume(pool.tag, order="explicit").fence
    with capture:
        capture.copy(to, source)
        stream = capture.stream if machine.is_host else torch.cuda.current_stream()
        with pytest.raises(fp.CaptureError, match="captur"):
            fence.wait(stream)
        fence.done()
    fence.synchronize()
    capture.replay()
    assert_same(to, before)
    assert_same(tensor, tensor_before)


def test_a_captured_graph_replays_after_twenty_cycles(machine, keeping, new_tag, capture):
    """Addresses in the graph stay right, and each replay runs behind the restore."""
    weights, cache = (fp.pool(new_tag(), machine.device, **keeping.options) for _ in range(2))
    source, _ = filled(weights, SIZE)
    to, _ = filled(cache, SIZE)
    with capture:
        capture.copy(to, source)
    for cycle in range(20):
        contents = pattern(SIZE, cycle)
        source.copy_(contents)
        to.zero_()
        fp.pause(weights.tag, cache.tag)
        fp.resume(cache.tag, weights.tag)
        capture.replay()
        assert_same(to, contents)


@pytest.mark.gpu
def test_a_capture_on_a_stream_of_pytorchs_pool_is_seen(policy, tag):
    pool = fp.pool(tag, "cuda:0", **policy.options)
    tensor, before = filled(pool, SIZE)
    copy = torch.empty_like(tensor)
    stream = torch.cuda.Stream("cuda:0")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="relaxed")
        copy.copy_(tensor)
    # The stream is not the current one any more, but it still captures.
    with pytest.raises(fp.CaptureError):
        fp.pause(tag)
    with torch.cuda.stream(stream):
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(copy, before)
    graph.reset()


def test_a_stream_that_says_its_device_is_watched_there_and_on_no_other(monkeypatch):
    class Stream:
        cuda_stream, device_index = 0x1234, 1

    seen = []
    monkeypatch.setattr(_core, "watch_streams", lambda *arguments: seen.append(arguments))
    fp.watch_stream(Stream())
    fp.watch_stream(Stream(), "cuda:1")
    fp.watch_stream(0x1234, "cuda:2")
    fp.watch_stream(0x1234, "cpu")
    assert seen == [("cuda", at, [0x1234]) for at in (1, 1, 2)] + [("host", 0, [0x1234])]
    for wrong in ("cuda:0", "cpu:1"):
        with pytest.raises(ValueError, match="belongs to cuda:1"):
            fp.watch_stream(Stream(), wrong)
    assert len(seen) == 4
