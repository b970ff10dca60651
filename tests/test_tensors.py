"""Tensors of a pool: shape, dtype, where they lie, and when their memory goes back."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch

import fencepool as fp
from support.contents import assert_same, filled
from support.machine import MIB, raw
from support.waiting import eventually


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (7, (7,)),
        ((3, 5), (3, 5)),
        ([2, 1, 4], (2, 1, 4)),
        ((), ()),
        (torch.Size([6]), (6,)),
        ((4, 0, 2), (4, 0, 2)),
    ],
)
def test_shapes(machine, pool, shape, sizes):
    tensor = pool.empty(shape)
    assert tensor.shape == sizes
    assert tensor.is_contiguous()
    assert tensor.device == torch.device(machine.torch_device)
    assert tensor.stride() == torch.empty(sizes).stride()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.bool,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_dtypes(pool, dtype):
    tensor = pool.empty((33, 3), dtype=dtype)
    assert tensor.dtype is dtype
    assert tensor.untyped_storage().nbytes() == 99 * dtype.itemsize


def test_the_default_dtype_is_pytorchs(pool):
    assert pool.empty((1,)).dtype is torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert pool.empty((1,)).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


def test_arithmetic_autograd_and_views(machine, keeping, tag):
    pool = fp.pool(tag, machine.device, **keeping.options)
    weight = pool.empty((8, 8))
    weight.copy_(torch.arange(64.0).view(8, 8))
    weight.requires_grad_(True)
    fp.pause(tag)
    fp.resume(tag)
    (weight.t() @ weight).sum().backward()
    assert weight.grad is not None
    assert weight[2:4, 1].tolist() == [17.0, 25.0]


def test_addresses_are_aligned_and_apart(pool):
    sizes = [1, 511, 512, 513, 100_000, MIB - 512, MIB, 3 * MIB]
    tensors = [pool.empty((size,), dtype=torch.uint8) for size in sizes for _ in range(3)]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in tensors)
    assert all(start % 512 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_large_tensors_have_segments_of_their_own_and_small_ones_share(pool):
    large = [pool.empty((size,), dtype=torch.uint8) for size in (MIB, 2 * MIB + 1)]
    assert (pool.status().segments, pool.status().bytes_reserved) == (2, 6 * MIB)
    assert all(tensor.data_ptr() % raw.GRANULARITY == 0 for tensor in large)
    small = [pool.empty((1000,), dtype=torch.uint8) for _ in range(100)]
    assert (pool.status().segments, pool.status().bytes_reserved) == (3, 8 * MIB)
    del small


def test_many_small_tensors_need_few_segments(pool):
    small = [pool.empty((400_000,), dtype=torch.uint8) for _ in range(100)]
    status = pool.status()
    assert status.segments <= 7
    assert status.bytes_reserved < 2 * 40 * MIB
    del small


def test_the_memory_of_a_dead_tensor_goes_back(machine, pool):
    free = machine.free()
    tensor = pool.empty((2 * MIB,), dtype=torch.uint8)
    address = tensor.data_ptr()
    del tensor
    eventually(lambda: pool.status().pending_frees == 0, "the last work has ended")
    assert machine.free() == free
    assert not machine.is_mapped(address)


def test_the_place_of_a_dead_small_tensor_is_taken_again(pool):
    keep = pool.empty((1000,), dtype=torch.uint8)
    first = pool.empty((1000,), dtype=torch.uint8)
    address = first.data_ptr()
    del first
    eventually(lambda: pool.status().pending_frees == 0, "the last work has ended")
    assert pool.empty((1000,), dtype=torch.uint8).data_ptr() == address
    del keep


def test_a_view_keeps_the_memory_alive(pool, policy):
    tensor, before = filled(pool, 2 * MIB)
    view = tensor[MIB:]
    storage = tensor.untyped_storage()
    del tensor
    gc.collect()
    assert pool.status().bytes_used == 2 * MIB
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    policy.assert_after(view, before[MIB:])
    del view
    assert pool.status().bytes_used == 2 * MIB
    del storage
    assert pool.status().bytes_used == 0


def test_tensors_outlive_the_pool_object(machine, keeping, tag):
    tensor, before = filled(fp.pool(tag, machine.device, **keeping.options), MIB)
    gc.collect()
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, before)


def test_a_tensor_dies_on_another_thread(machine, pool):
    free = machine.free()
    held = [pool.empty((MIB,), dtype=torch.uint8), pool.empty((100,), dtype=torch.uint8)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    eventually(lambda: pool.status().pending_frees == 0, "the last work has ended")
    assert pool.status().bytes_used == 0
    assert machine.free() == free


def test_a_thread_without_python_state_drops_the_last_reference(pool):
    # Autograd's worker threads free saved tensors without Python in between.
    tensor = pool.empty((1000,))
    tensor.zero_()
    scaled = (tensor.clone().requires_grad_(True) * tensor).sum()
    del tensor
    scaled.backward()
    del scaled
    gc.collect()
    eventually(lambda: pool.status().bytes_used == 0, "autograd has dropped the tensor")


def test_freeing_does_not_wait_for_the_device(machine, pool):
    tensor, _ = filled(pool, 2 * MIB)
    latch = machine.hold(machine.stream())
    del tensor  # would never return if it waited
    assert latch.waiting == 1
    assert pool.status().pending_frees == 1
    other = pool.empty((2 * MIB,), dtype=torch.uint8)
    assert pool.contains(other)
    latch.open()


def test_new_memory_is_not_what_is_still_in_use(machine, pool):
    """A block that was freed with work in flight is not handed out before that work has ended."""
    keep = pool.empty((1000,), dtype=torch.uint8)
    first = pool.empty((1000,), dtype=torch.uint8)
    stream = machine.stream()
    latch = machine.hold(stream)
    machine.memset(first, 0xEE, stream)
    address = first.data_ptr()
    del first
    second, before = filled(pool, 1000, 5)
    assert second.data_ptr() != address
    latch.open()
    machine.synchronize(stream)
    assert_same(second, before)
    del keep


@pytest.mark.gpu
def test_work_of_a_torch_stream_keeps_a_freed_tensors_memory(policy, tag):
    pool = fp.pool(tag, "cuda:0", **policy.options)
    stream = torch.cuda.Stream("cuda:0")
    for round_ in range(50):
        tensor = pool.empty((4 * MIB,), dtype=torch.uint8)
        with torch.cuda.stream(stream):
            tensor.fill_(round_)
        del tensor
    torch.cuda.synchronize()
    eventually(lambda: pool.status().pending_frees == 0, "the segments are given back")
    assert pool.status().bytes_reserved == 0
