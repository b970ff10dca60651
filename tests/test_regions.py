"""Regions: which of PyTorch's allocations go into a pool, on both devices."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading

import pytest
import torch

import fencepool as fp
from support.contents import assert_same, pattern
from support.machine import MIB
from support.waiting import eventually

SIZES = [1, 3 * MIB, 23 * MIB]  # PyTorch's caching allocator treats each of them in another way


def ones(machine, size=MIB):
    return torch.ones(size, dtype=torch.uint8, device=machine.torch_device)


@contextlib.contextmanager
def entered_elsewhere(pool):
    """Another thread is inside a region of the pool meanwhile."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with pool.region():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize("size", SIZES)
def test_what_is_made_in_a_region_lies_in_the_pool_and_survives_cycles(machine, keeping, tag, size):
    pool = fp.pool(tag, machine.device, **keeping.options)
    expected = pattern(size, seed=5)
    with pool.region():
        tensor = expected.to(machine.torch_device, copy=True)
    after = ones(machine, size)
    assert pool.contains(tensor)
    assert not pool.contains(after)
    address = tensor.data_ptr()
    for _ in range(3):
        fp.pause(tag)
        assert pool.status().bytes_mapped == 0
        fp.resume(tag)
        assert tensor.data_ptr() == address
        assert_same(tensor, expected)


def test_a_model_built_in_a_region_computes_the_same_after_cycles(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    with pool.region():
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 3)
        )
        model = model.to(machine.torch_device).eval()
    assert all(pool.contains(tensor) for tensor in [*model.parameters(), *model.buffers()])
    inputs = torch.ones(7, 64, device=machine.torch_device)
    with torch.no_grad():
        before = model(inputs).cpu()
        for _ in range(3):
            fp.pause(tag)
            fp.resume(tag)
            assert torch.equal(model(inputs).cpu(), before)


def test_the_innermost_region_counts(machine, new_tag):
    outer, inner = (fp.pool(new_tag(), machine.device) for _ in range(2))
    with outer.region():
        first = ones(machine)
        with inner.region():
            second = ones(machine)
            with outer.region():
                third = ones(machine)
            fourth = ones(machine)
        fifth = ones(machine)
    outside = ones(machine)
    assert [outer.contains(x) for x in (first, second, third, fourth, fifth)] == [1, 0, 1, 0, 1]
    assert [inner.contains(x) for x in (first, second, third, fourth, fifth)] == [0, 1, 0, 1, 0]
    assert not outer.contains(outside)


def test_a_region_entered_inside_itself_and_again_later(machine, pool):
    with pool.region(), pool.region():
        first = ones(machine)
    with pool.region():
        second = ones(machine)
    assert pool.contains(first)
    assert pool.contains(second)


def test_disable_leaves_all_regions_and_a_region_inside_counts_again(machine, new_tag):
    outer, inner = (fp.pool(new_tag(), machine.device) for _ in range(2))
    with outer.region():
        with fp.disable():
            first = ones(machine)
            with inner.region():
                second = ones(machine)
        third = ones(machine)
    with fp.disable():
        fourth = ones(machine)
    assert [outer.contains(x) for x in (first, second, third, fourth)] == [0, 0, 1, 0]
    assert [inner.contains(x) for x in (first, second, third, fourth)] == [0, 1, 0, 0]


def test_an_exception_in_a_region_leaves_it(machine, pool):
    with pytest.raises(ZeroDivisionError), pool.region(), fp.disable():
        raise ZeroDivisionError
    assert not pool.contains(ones(machine))
    with pool.region():
        assert pool.contains(ones(machine))


def test_regions_left_in_another_order_than_they_were_entered(machine, new_tag):
    first, second = (fp.pool(new_tag(), machine.device) for _ in range(2))

    def suspended():
        with first.region():
            yield

    generator = suspended()
    next(generator)
    with second.region():
        assert next(generator, None) is None
        tensor = ones(machine)
        assert second.contains(tensor)
        fp.pause(first.tag)
        fp.resume(first.tag)
    outside = ones(machine)
    assert not first.contains(outside)
    assert not second.contains(outside)
    with first.region():
        assert first.contains(ones(machine))
    fp.pause(first.tag, second.tag)
    fp.resume(first.tag, second.tag)


def test_one_pool_entered_twice_and_left_in_another_order(machine, pool):
    def suspended():
        with pool.region():
            yield

    generators = [suspended() for _ in range(2)]
    for generator in generators:
        next(generator)
    next(generators[0], None)
    assert pool.contains(ones(machine))
    with pytest.raises(fp.PoolBusyError):
        fp.pause(pool.tag)
    next(generators[1], None)
    assert not pool.contains(ones(machine))
    fp.pause(pool.tag)


def test_a_region_that_another_thread_leaves(machine, pool):
    def suspended():
        with pool.region():
            yield

    generator = suspended()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert not pool.contains(ones(machine))
    with pool.region():
        assert pool.contains(ones(machine))
    assert not pool.contains(ones(machine))
    fp.pause(pool.tag)


def test_tasks_that_share_a_thread_leave_no_region_behind(machine, new_tag):
    pools = [fp.pool(new_tag(), machine.device) for _ in range(3)]

    async def task(pool, turns):
        with pool.region():
            for _ in range(turns):
                await asyncio.sleep(0)

    async def all_tasks():
        await asyncio.gather(*(task(pool, turns) for pool, turns in zip(pools, (1, 3, 2), strict=True)))

    asyncio.run(all_tasks())
    assert not any(pool.contains(ones(machine)) for pool in pools)
    fp.pause(*(pool.tag for pool in pools))


def test_other_threads_stay_outside_and_have_regions_of_their_own(machine, new_tag):
    pools = [fp.pool(new_tag(), machine.device) for _ in range(4)]
    barrier = threading.Barrier(len(pools) + 1)
    found = {}

    def work(index: int) -> None:
        own = pools[index]
        barrier.wait()
        for _ in range(5):
            outside = ones(machine)
            with own.region():
                barrier.wait()
                tensors = [ones(machine, size) for size in (100, MIB, 3 * MIB)]
                barrier.wait()
            found.setdefault(index, []).append(
                all(own.contains(x) for x in tensors)
                and not any(other.contains(x) for other in pools if other is not own for x in tensors)
                and not any(pool.contains(outside) for pool in pools)
            )

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(pools))]
    for thread in threads:
        thread.start()
    barrier.wait()
    for _ in range(5):
        barrier.wait()
        assert not any(pool.contains(ones(machine)) for pool in pools)
        barrier.wait()
    for thread in threads:
        thread.join()
    assert found == {index: [True] * 5 for index in range(len(pools))}


def test_one_region_in_two_threads_at_once(machine, pool):
    barrier = threading.Barrier(2)
    kept = []

    def work() -> None:
        with pool.region():
            barrier.wait()
            kept.extend(ones(machine) for _ in range(10))
            barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept) == 20
    assert all(pool.contains(tensor) for tensor in kept)
    assert len({tensor.data_ptr() for tensor in kept}) == 20


def test_a_paused_pool_has_no_region_to_enter(machine, pool):
    fp.pause(pool.tag)
    with pytest.raises(fp.PoolPausedError, match="resume"), pool.region():
        pass
    assert not pool.contains(ones(machine))
    fp.resume(pool.tag)
    with pool.region():
        assert pool.contains(ones(machine))


def test_a_pool_whose_region_is_entered_is_not_paused_and_not_closed(machine, pool, new_tag):
    other = fp.pool(new_tag(), machine.device)
    with pool.region():
        tensor = ones(machine)
        for forbidden in (lambda: fp.pause(other.tag, pool.tag), pool.close):
            with pytest.raises(fp.PoolBusyError, match="region"):
                forbidden()
        assert pool.state == other.state == "active"
        fp.pause(other.tag)
    assert bool(tensor.all())
    fp.pause(pool.tag)
    assert pool.state == "paused"


def test_a_region_of_a_pool_that_another_thread_holds_is_not_paused(machine, pool):
    with entered_elsewhere(pool), pytest.raises(fp.PoolBusyError):
        fp.pause(pool.tag)
    fp.pause(pool.tag)


@pytest.mark.parametrize("size", SIZES)
def test_tensors_die_after_the_region_in_another_thread_and_while_paused(machine, pool, size):
    with pool.region():
        tensors = [ones(machine, size) for _ in range(3)]
    tensors.pop()
    thread = threading.Thread(target=tensors.pop)
    thread.start()
    thread.join()
    fp.pause(pool.tag)
    tensors.clear()
    fp.resume(pool.tag)
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    eventually(lambda: pool.status().bytes_used == 0, "everything is given back")
    assert pool.status().segments == 0


def test_a_tag_follows_its_tensor_when_another_tag_takes_the_same_size(machine, new_tag):
    first, second = (fp.pool(new_tag(), machine.device, backup="host") for _ in range(2))
    with first.region():
        tensor = ones(machine, 4 * MIB)
    del tensor
    with second.region():
        kept = ones(machine, 4 * MIB).fill_(7)
    fp.pause(first.tag)
    assert second.contains(kept)
    assert not first.contains(kept)
    assert bool((kept == 7).all())


def test_repacking_in_a_region_leaves_no_dead_segments(machine, pool):
    with pool.region():
        for _ in range(4):
            raw = [ones(machine, 24 * MIB) for _ in range(3)]
            packed = [part[::2].contiguous() for part in raw]
            del raw
    live = sum(tensor.untyped_storage().nbytes() for tensor in packed)
    eventually(lambda: pool.status().bytes_mapped <= live + 6 * MIB, "dead segments are gone")
    report = fp.pause(pool.tag)
    if pool.backup == "host":
        assert report.pools[0].bytes_copied <= live + 6 * MIB


def test_a_callback_that_leaves_a_region_open_stops_the_pause(machine, pool):
    with contextlib.ExitStack() as stack:
        handle = pool.on_pause(lambda paused: stack.enter_context(paused.region()))
        with pytest.raises(fp.PoolBusyError, match="region"):
            fp.pause(pool.tag)
        assert pool.state == "active"
        assert pool.contains(ones(machine))
    handle.remove()
    fp.pause(pool.tag)


def test_a_callback_may_allocate_in_a_region_of_its_own_pool(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    made = []

    def allocate(own):
        with own.region():
            made.append(ones(machine))

    pool.on_pause(allocate)
    pool.on_resume(allocate)
    fp.pause(tag)
    fp.resume(tag)
    assert all(pool.contains(tensor) and bool(tensor.all()) for tensor in made)
    assert len(made) == 2
    made.clear()  # the pool's callbacks keep it


@pytest.mark.parametrize("enter", [True, False])
def test_a_callback_that_needs_another_pool_never_waits_in_a_circle(machine, new_tag, enter):
    first, second = (fp.pool(new_tag(), machine.device) for _ in range(2))
    inside, go_on = threading.Event(), threading.Event()
    caught = []

    def hold(_):
        inside.set()
        go_on.wait(60)

    def need(_):
        inside.wait(60)
        try:
            if enter:
                with first.region():
                    caught.append(None)
            else:
                fp.pause(first.tag)
        except fp.PoolBusyError as error:
            caught.append(error)
        go_on.set()

    first.on_pause(hold)
    second.on_pause(need)
    thread = threading.Thread(target=fp.pause, args=(first.tag,))
    thread.start()
    fp.pause(second.tag)
    thread.join(60)
    assert not thread.is_alive()
    assert first.state == second.state == "paused"
    assert "callback" in str(caught[0])


def test_no_region_is_entered_while_its_pool_closes(machine, pool, monkeypatch):
    results = []

    def enter():
        with pool.region():
            results.append(pool.state)

    thread = threading.Thread(target=enter)
    original = fp.Pool._trim_torch

    def trim(self, **options):
        thread.start()
        thread.join(0.2)  # it has to wait: nothing comes of waiting longer
        assert results == []
        original(self, **options)

    monkeypatch.setattr(fp.Pool, "_trim_torch", trim)
    pool.close()
    monkeypatch.undo()
    thread.join()
    assert fp.pool(pool.tag, machine.device) is not pool


def test_autograd_frees_and_allocates_around_a_region(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    with pool.region():
        weight = torch.ones(256, 256, device=machine.torch_device, requires_grad=True)
    for _ in range(3):
        loss = (weight @ weight).relu().sum()
        loss.backward()
        weight.grad = None
        fp.pause(tag)
        fp.resume(tag)
    with pool.region():
        inside = (weight * 2).sum()
    inside.backward()
    assert pool.contains(inside)
    assert bool((weight.grad == 2).all())
    assert bool((weight == 1).all())


def test_too_little_memory_in_a_region_is_an_error_and_the_region_goes_on(machine, pool):
    too_much = fp.memory_info(machine.device)[1] * 2
    with pool.region():
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(too_much, dtype=torch.uint8, device=machine.torch_device)
        assert pool.contains(ones(machine))


def test_memory_that_is_short_is_said_though_pytorch_refuses_to_empty_its_cache(host, tag, monkeypatch):
    def refuse():
        raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    pool = fp.pool(tag, "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    monkeypatch.setattr(fp.Pool, "_prepare_torch", lambda _: None)
    with pytest.raises(fp.OutOfMemoryError), pool.region():
        pool.empty((fp.memory_info("cpu")[1] * 2,), dtype=torch.uint8)


@pytest.mark.gpu
def test_resuming_waits_for_memory_though_another_thread_is_in_a_region(pool_on_gpu, new_tag):
    other = fp.pool(new_tag(), "cuda:0")
    size = fp.memory_info("cuda:0")[0] // 5 * 3
    tensor = pool_on_gpu.empty((size,), dtype=torch.uint8)
    fp.pause(pool_on_gpu.tag, discard=[pool_on_gpu.tag])
    taken = other.empty((size,), dtype=torch.uint8)
    with other.region(), pytest.raises(fp.OutOfMemoryError):
        fp.resume(pool_on_gpu.tag, wait=0.1)
    del taken
    torch.cuda.synchronize()
    fp.resume(pool_on_gpu.tag)
    assert tensor.numel() == size


@pytest.mark.gpu
def test_pytorchs_error_says_what_the_pool_wanted(pool_on_gpu):
    total = fp.memory_info("cuda:0")[1]
    with pytest.raises(torch.OutOfMemoryError) as caught, pool_on_gpu.region():
        torch.empty(2 * total, dtype=torch.uint8, device="cuda:0")
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert pool_on_gpu.tag in notes
    assert "missing" in notes


@pytest.mark.gpu
def test_what_pytorch_has_cached_makes_room_for_a_region(pool_on_gpu):
    size = fp.memory_info("cuda:0")[0] // 5 * 3
    cached = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    del cached
    with pool_on_gpu.region():
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    assert pool_on_gpu.contains(tensor)


@pytest.mark.gpu
def test_a_region_ends_with_dead_segments_while_another_thread_is_in_a_region(pool_on_gpu, new_tag):
    with entered_elsewhere(fp.pool(new_tag(), "cuda:0")), pool_on_gpu.region():
        doomed = torch.empty(24 * MIB, dtype=torch.uint8, device="cuda:0")
        del doomed
    fp.pause(pool_on_gpu.tag)
    assert pool_on_gpu.status().segments == 0


@pytest.fixture
def pool_on_gpu(tag):
    return fp.pool(tag, "cuda:0", backup="host")


def test_regions_of_two_devices_at_once(machines, new_tag):
    pools = [fp.pool(new_tag(), machine.device) for machine in machines]
    with pools[0].region(), pools[1].region():
        tensors = [ones(machine) for machine in machines]
    if machines[0].torch_device == machines[1].torch_device:
        # PyTorch knows one "cpu": the innermost region has it.
        assert [pools[1].contains(tensor) for tensor in tensors] == [True, True]
    else:
        assert [pool.contains(tensor) for pool, tensor in zip(pools, tensors, strict=True)] == [True, True]
    fp.pause(*(pool.tag for pool in pools))
    fp.resume(*(pool.tag for pool in pools))


def test_views_and_in_place_operators_stay_where_they_are(machine, pool):
    outside = ones(machine)
    with pool.region():
        assert not pool.contains(outside.view(-1)[3:])
        assert not pool.contains(outside.add_(1))
        new = outside + 1
        assert pool.contains(new[5:].view(-1))
        parts = torch.split(new, 1000)
        assert parts[0].data_ptr() == new.data_ptr()
        left, right = torch.sort(new)
        assert pool.contains(left)
        assert pool.contains(right)
        torch.add(outside, 1, out=outside)
    assert not pool.contains(outside)


def test_margins_refuse_allocations_and_let_resumes_through(machine, pool):
    free, total = fp.memory_info(machine.device)
    with pool.region():
        before = ones(machine, 4 * MIB)
    fp.set_memory_margin(total, machine.device)
    try:
        assert fp.memory_margin(machine.device) == total
        said = "margin" if machine.is_host else "memory"
        with pytest.raises(torch.OutOfMemoryError, match=said), pool.region():
            ones(machine, 64 * MIB)
        with pytest.raises(fp.OutOfMemoryError, match="margin"):
            pool.empty((64 * MIB,), dtype=torch.uint8)
        fp.pause(pool.tag)
        fp.resume(pool.tag)
    finally:
        fp.set_memory_margin(0, machine.device)
    assert pool.contains(before)
    assert pool.empty((MIB,)).numel() == MIB
    assert free <= total


@pytest.mark.parametrize("margin", [-1, 1 << 62])
def test_margins_that_cannot_be(margin):
    with pytest.raises(ValueError, match="margin"):
        fp.set_memory_margin(margin, "cpu")
    with pytest.raises(TypeError, match="integer"):
        fp.set_memory_margin(1.5, "cpu")


@pytest.mark.gpu
def test_what_pytorch_holds_free_inside_a_segment_is_neither_copied_nor_stored(machine_on_gpu, tag):
    pool = fp.pool(tag, "cuda:0", backup="host")
    expected = pattern(MIB, seed=4)
    with pool.region():
        tensors = [torch.empty(MIB, dtype=torch.uint8, device="cuda:0") for _ in range(20)]  # 20 MiB segments
    for tensor in tensors:
        tensor.copy_(expected)
    tensors = tensors[::4]
    for seed, tensor in enumerate(tensors):
        tensor.copy_(pattern(MIB, seed=10 + seed))
    torch.cuda.synchronize()
    assert pool.status().bytes_used >= 20 * MIB
    report = fp.pause(tag)
    assert sum(one.bytes_copied for one in report.pools) == len(tensors) * MIB
    assert pool.status().bytes_backed_up == len(tensors) * MIB
    fp.resume(tag)
    for seed, tensor in enumerate(tensors):
        assert_same(tensor, pattern(MIB, seed=10 + seed))


@pytest.mark.gpu
def test_a_stream_that_still_uses_a_freed_tensor_is_waited_for(machine_on_gpu, tag):
    pool = fp.pool(tag, "cuda:0")
    side = torch.cuda.Stream()
    for _ in range(20):
        with pool.region():
            tensor = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda:0")
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            tensor.fill_(1)
        tensor.record_stream(side)
        del tensor
        gc.collect()
    torch.cuda.synchronize()
    fp.pause(tag)


@pytest.fixture
def machine_on_gpu():
    return torch.cuda.current_device()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # PyTorch's own, when it is loaded
def test_forward_mode_differentiation_in_a_region(machine, tag):
    pool = fp.pool(tag, machine.device)
    with pool.region():
        values = torch.ones(3, device=machine.torch_device)
        hessian = torch.func.hessian(lambda x: (x**3).sum())(values)
        _, tangent = torch.func.jvp(lambda x: torch.real(x * 2) + x.sin(), (values,), (values,))
        assert torch._efficientzerotensor(3, device=machine.torch_device)._is_zerotensor()
    assert torch.equal(hessian.cpu(), 6 * torch.eye(3))
    assert torch.allclose(tangent.cpu(), 2 + torch.cos(torch.ones(3)))


# What the embedded driver's regions do not move, they leave alone.


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype", "ignore:.*quantize_per_tensor")
def test_tensors_without_one_dense_storage_in_a_region(host, tag):
    pool = fp.pool(tag, "cpu")
    with pool.region():
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
        assert (nested + 1).is_nested
        assert torch.empty(3, 4, layout=torch._mkldnn).layout is torch._mkldnn
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
        assert torch.empty_like(quantized).is_quantized
        assert torch.eye(3).to_sparse().layout is torch.sparse_coo
        assert pool.contains(quantized.dequantize())


def test_tracing_in_a_region_sees_the_program_alone(host, tag):
    from torch.fx.experimental.proxy_tensor import make_fx

    pool = fp.pool(tag, "cpu")
    with pool.region():
        traced = make_fx(lambda x: x.sin() + torch.empty(3).fill_(1))(torch.ones(3))
        result = traced(torch.ones(3))
    assert torch.equal(result, torch.ones(3).sin() + 1)
    assert pool.contains(result)
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert any("empty" in name for name in called)
    assert not any("set_" in name for name in called)


def test_a_child_that_is_forked_inside_a_region_allocates_as_ever(host, tag):
    pool = fp.pool(tag, "cpu")
    with pool.region():
        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(Exception):
                status = 0 if float((torch.ones(3) + torch.empty(3).fill_(1)).sum()) == 6 else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pool.contains(ones(host))


@pytest.mark.parametrize("lacking", ["MemPool", "begin", "snapshot"])
def test_a_pytorch_too_old_for_regions_on_a_gpu_is_named_before_anything_changes(monkeypatch, lacking):
    from fencepool.pytorch import cuda_regions

    if lacking == "MemPool":  # 2.4
        monkeypatch.delattr(torch.cuda, "MemPool")
    elif lacking == "begin":  # 2.6 and 2.7
        monkeypatch.delattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool")
    else:
        monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    pools = fp.status()
    with pytest.raises(fp.UnsupportedError, match=rf"2\.8 or newer.*{torch.__version__[:4]}"):
        cuda_regions.require_mem_pools()
    with pytest.raises(fp.UnsupportedError), fp.cuda_graph(None, device="cuda:0"):
        raise AssertionError("captured")
    assert fp.status() == pools
