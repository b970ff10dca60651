"""What goes wrong for people elsewhere, and must not here. Each test is named after what it shows."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support import children
from support.contents import assert_same, filled
from support.machine import MIB, host_counts
from support.waiting import Job, eventually


def leave_free(bytes_free: int) -> None:
    left, total = fp.memory_info("cpu")
    fp.host_driver.configure(memory_limit=total - left + bytes_free)


# --- out of memory on resume ------------------------------------------------------------------------


def test_a_resume_without_memory_raises_and_the_same_call_works_later(host, keeping, new_tag):
    pool = fp.pool(new_tag(), "cpu", **keeping.options)
    tensor, before = filled(pool, 4 * MIB)
    fp.pause(pool.tag)
    leave_free(MIB)
    for _ in range(3):
        with pytest.raises(fp.OutOfMemoryError, match=r"4\.00 MiB wanted, 1\.00 MiB free, 3\.00 MiB missing"):
            fp.resume(pool.tag)
        assert pool.state == "paused"
    fp.host_driver.configure(memory_limit=0)
    fp.resume(pool.tag)
    assert_same(tensor, before)


def test_a_resume_waits_for_memory_that_comes_a_moment_later(host, keeping, new_tag):
    pool, training = (fp.pool(new_tag(), "cpu", **keeping.options) for _ in range(2))
    tensor, before = filled(pool, 4 * MIB, 1)
    optimizer, optimizer_before = filled(training, 4 * MIB, 2)
    fp.pause(pool.tag)
    leave_free(0)
    resuming = Job(lambda: fp.resume(pool.tag, wait=600))
    eventually(lambda: pool.state == "resuming", "the resume has begun")
    fp.pause(training.tag)
    resuming.result()
    assert_same(tensor, before)
    fp.host_driver.configure(memory_limit=0)
    fp.resume(training.tag)
    assert_same(optimizer, optimizer_before)


def test_weights_are_paused_again_when_the_cache_does_not_fit(host, keeping, new_tag):
    weights, cache = (
        fp.pool(new_tag("weights"), "cpu", **keeping.options),
        fp.pool(new_tag("kv_cache"), "cpu"),
    )
    tensor, before = filled(weights, 2 * MIB)
    blocks, _ = filled(cache, 8 * MIB)
    fp.pause(weights.tag, cache.tag)
    leave_free(9 * MIB)
    with pytest.raises(fp.OutOfMemoryError):
        fp.resume(weights.tag, cache.tag)
    assert (weights.state, cache.state) == ("paused", "paused")
    fp.host_driver.configure(memory_limit=0)
    fp.resume(weights.tag, cache.tag)
    assert_same(tensor, before)
    assert host.is_all_mapped(blocks)


# --- use of released memory -------------------------------------------------------------------------


def test_a_writer_on_a_side_stream_is_waited_for_and_its_last_values_are_backed_up(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    tensor, _ = filled(pool, 4 * MIB)
    stream = machine.stream()
    latch = machine.hold(stream)
    for value in range(1, 60):
        machine.memset(tensor, value, stream)
    pausing = Job(lambda: fp.pause(tag))
    eventually(lambda: pool.state == "pausing", "the pause has begun")
    latch.open()
    pausing.result()
    fp.resume(tag)
    assert_same(tensor, torch.full((4 * MIB,), 59, dtype=torch.uint8))
    machine.synchronize(stream)


def test_two_hundred_times_allocate_use_and_drop(machine, pool):
    """Each tensor dies with its work in flight: no fault, and no stop of the device."""
    stream = machine.stream()
    source, _ = filled(pool, MIB)
    latch = machine.hold(stream)
    for turn in range(200):
        if turn == 100:
            latch.open()
        tensor = pool.empty((MIB,), dtype=torch.uint8)
        machine.memset(tensor, turn, stream)
        machine.copy(tensor, source, stream)
        del tensor
        if turn == 99:
            assert latch.waiting == 1
            assert pool.status().pending_frees == 100
    machine.synchronize(stream)
    eventually(lambda: pool.status().pending_frees == 0, "everything is given back")
    assert pool.status().bytes_reserved == 2 * MIB
    assert _core.problems() == []


# --- wrong contents in silence ----------------------------------------------------------------------


def test_buffers_among_the_weights_keep_their_values(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(300, 300))
    module.register_buffer("rotary", torch.randn(100), persistent=False)
    module.register_buffer("scale", torch.tensor(0.125))
    before = [tensor.detach().clone() for tensor in (module.weight, module.rotary, module.scale)]
    pool.adopt(module)
    for _ in range(2):
        fp.pause(tag)
        fp.resume(tag)
        for tensor, expected in zip((module.weight, module.rotary, module.scale), before, strict=True):
            assert torch.equal(tensor.detach().cpu(), expected)


def test_one_tag_with_two_policies_keeps_what_each_promises(machine, tag):
    draft = fp.pool(tag, machine.device, backup="host")
    target = fp.pool(tag, machine.device, fill="zero")
    kept, before = filled(draft, MIB, 1)
    dropped, _ = filled(target, MIB, 2)
    fp.pause(tag)
    fp.resume(tag)
    assert_same(kept, before)
    assert not bool(dropped.any())


# --- the tag follows the tensor ---------------------------------------------------------------------


def test_memory_freed_under_one_tag_is_not_reused_under_another(machine, policy, new_tag):
    first, second = (fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2))
    tensor, _ = filled(first, 2 * MIB)
    del tensor
    tensor, before = filled(second, 2 * MIB)
    assert not first.contains(tensor)
    fp.pause(first.tag)
    assert machine.is_all_mapped(tensor)
    assert_same(tensor, before)


def test_pools_of_two_devices_and_two_threads_at_once(machines, keeping, new_tag):
    tags = [new_tag(), new_tag()]
    made: list = []

    def build(tag, machine):
        pool = fp.pool(tag, machine.device, **keeping.options)
        made.append([(pool, *filled(pool, size, i)) for i, size in enumerate((MIB, 500, 2 * MIB))])

    jobs = [Job(lambda tag=tag, m=machine: build(tag, m)) for tag in tags for machine in machines]
    for job in jobs:
        job.result()
    for held in made:
        assert all(pool.contains(tensor) for pool, tensor, _ in held)
    fp.pause(tags[0])
    for held in made:
        for pool, tensor, before in held:
            if pool.tag == tags[1]:
                assert_same(tensor, before)
    fp.resume(tags[0])
    for held in made:
        for _, tensor, before in held:
            assert_same(tensor, before)


def test_what_others_allocate_meanwhile_stays_outside(machine, pool):
    outside = torch.zeros(MIB, dtype=torch.uint8, device=machine.torch_device)
    filled(pool, MIB)
    fp.pause(pool.tag)
    assert not pool.contains(outside)
    assert not bool(outside.any())


# --- not everything is released ---------------------------------------------------------------------


def test_a_pause_says_what_it_released_and_what_the_driver_says(machine, policy, new_tag):
    pools = [fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2)]
    held = [filled(pool, size) for pool in pools for size in (3 * MIB, 500)]
    free = machine.free()
    report = fp.pause(*(pool.tag for pool in pools))
    (memory,) = report.device_memory
    assert report.bytes_released == 12 * MIB
    assert memory.free_after - memory.free_before == machine.free() - free == 12 * MIB
    assert report.unreleased_bytes == 0
    held.clear()


@pytest.mark.leaves
def test_what_the_driver_keeps_is_reported_and_warned_of(host, keeping, tag):
    pool = fp.pool(tag, "cpu", **keeping.options)
    held = [filled(pool, 2 * MIB, i) for i in range(3)]
    free = host.free()
    _core.arm_fault("host", "cuMemRelease", 2, True, 999)  # the first goes back, the others do not
    with pytest.warns(ResourceWarning, match="stay held"):
        report = fp.pause(tag)
    _core.disarm_fault("host")
    assert (report.bytes_released, report.unreleased_bytes) == (2 * MIB, 4 * MIB)
    assert host.free() == free + 2 * MIB
    assert pool.status().bytes_mapped == 4 * MIB
    assert pool.state == "paused"
    fp.resume(tag)
    for tensor, before in held:
        assert_same(tensor, before)


def test_weights_that_are_repacked_leave_no_old_segments_behind(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    module = pool.adopt(torch.nn.Linear(1024, 1024, bias=False))
    for _ in range(5):
        repacked = pool.empty((1024, 1024))
        repacked.copy_(module.weight.detach().t())
        module.weight = torch.nn.Parameter(repacked)
        del repacked
    eventually(lambda: pool.status().pending_frees == 0, "the old weights are given back")
    assert pool.status().bytes_reserved == 4 * MIB
    assert fp.pause(tag).bytes_released == 4 * MIB
    fp.resume(tag)


# --- state ------------------------------------------------------------------------------------------


def test_pausing_all_after_one_and_resuming_all_after_one(machine, keeping, new_tag):
    pools = [fp.pool(new_tag(), machine.device, **keeping.options) for _ in range(3)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    fp.pause(pools[1].tag)
    report = fp.pause()
    assert [pool.changed for pool in report.pools] == [True, False, True]
    fp.resume(pools[2].tag)
    resumed = fp.resume()
    assert [pool.changed for pool in resumed.pools] == [True, True, False]
    for tensor, before in held:
        assert_same(tensor, before)


def test_allocating_and_freeing_under_a_paused_tag(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    kept, before = filled(pool, MIB, 1)
    freed, _ = filled(pool, MIB, 2)
    fp.pause(tag)
    del freed
    with pytest.raises(fp.PoolPausedError, match="resume"):
        pool.empty((100,))
    fp.resume(tag)
    late, late_before = filled(pool, MIB, 3)
    assert_same(kept, before)
    assert_same(late, late_before)


def test_device_memory_does_not_grow_from_cycle_to_cycle(machine, pool):
    tensor, _ = filled(pool, 4 * MIB)
    seen = []
    for _ in range(20):
        fp.pause(pool.tag)
        seen.append((machine.free(), host_counts()["registrations"]))
        fp.resume(pool.tag)
    assert len(set(seen)) == 1
    del tensor


# --- registrations ----------------------------------------------------------------------------------


def test_registrations_elsewhere_are_undone_and_redone(machine, pool):
    registered: set[int] = set()
    tensor, _ = filled(pool, MIB)
    address = tensor.data_ptr()

    def deregister(_):
        assert machine.is_mapped(address)
        registered.discard(address)

    def register(_):
        assert machine.is_mapped(address)
        registered.add(address)

    pool.on_pause(deregister)
    pool.on_resume(register)
    registered.add(address)
    fp.pause(pool.tag)
    assert registered == set()
    fp.resume(pool.tag)
    assert registered == {address}
    del tensor


# --- host memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [MIB + 512, 5 * MIB, 9 * MIB + 1024, 33 * MIB])
def test_a_backup_is_not_rounded_to_powers_of_two(machine, pinned, tag, size):
    pool = fp.pool(tag, machine.device, **pinned.options)
    tensor, _ = filled(pool, size)
    fp.pause(tag)
    assert pool.status().host_bytes == size
    fp.resume(tag)
    del tensor


# --- environment ------------------------------------------------------------------------------------


def test_no_preload_no_variable_and_no_runtime_library_is_needed():
    children.run_silently(
        """
        assert "LD_PRELOAD" not in os.environ
        pool = fp.pool("t", "cpu", backup="host")
        block = block_of(pool, 1 << 20, 7)
        fp.pause("t"); fp.resume("t")
        assert is_filled(block, 1 << 20, 7)
        with open("/proc/self/maps") as maps:
            loaded = maps.read()
        assert "libcudart" not in loaded and "libtorch" not in loaded and "libcuda.so" not in loaded
        assert "torch" not in sys.modules
        """
    )


@pytest.mark.gpu
@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_no_obstacle(variable):
    children.run_silently(
        """
        import torch
        pool = fp.pool("t", "cuda:0", backup="host")
        tensor = pool.empty((1 << 20,))
        tensor.copy_(torch.arange(1 << 20))
        other = torch.ones(1 << 20, device="cuda:0")
        fp.pause("t"); fp.resume("t")
        assert torch.equal(tensor.cpu(), torch.arange(1 << 20).float())
        assert bool((other == 1).all())
        """,
        **{variable: "expandable_segments:True"},
    )


def test_a_device_without_virtual_memory_management_is_refused_and_nothing_half_works():
    """The driver's answer to that question is made to fail, which counts as no."""
    children.run_silently(
        """
        fp.driver_info("host")
        _core.arm_fault("host", "cuDeviceGetAttribute", 1, True, 1)
        for _ in range(2):
            try:
                fp.pool("t", "cpu")
            except fp.DriverUnavailable as error:
                assert "virtual memory management" in str(error) and "doctor" in str(error)
            else:
                raise SystemExit("it was made")
            assert fp.status() == []
        _core.disarm_fault("host")
        assert fp.pool("t", "cpu").state == "active"
        """
    )


def test_what_elsewhere_ends_the_process_raises_or_does_nothing():
    """Pausing twice, resuming what is active, a resume without memory, an unknown tag: all in one process."""
    children.run_silently(
        """
        pool = fp.pool("t", "cpu", backup="host")
        block = block_of(pool, 4 << 20, 7)
        fp.pause("t"); fp.pause("t")
        fp.host_driver.configure(memory_limit=1 << 20)
        for call, kind in ((lambda: fp.resume("t"), MemoryError), (lambda: fp.pause("u"), KeyError)):
            try:
                call()
            except kind:
                continue
            raise SystemExit(f"no {kind}")
        fp.host_driver.configure(memory_limit=0)
        fp.resume("t"); fp.resume("t")
        assert is_filled(block, 4 << 20, 7)
        """
    )
