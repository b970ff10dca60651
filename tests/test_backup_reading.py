"""Reading tensors from the backup while their pool is paused."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled
from support.machine import MIB


@pytest.fixture
def kept(machine, keeping, tag):
    return fp.pool(tag, machine.device, **keeping.options)


@pytest.fixture
def seen(machine, viewed, tag):
    return fp.pool(tag, machine.device, **viewed.options)


def check_what_is_read(pool: fp.Pool, *, is_copied: bool) -> None:
    tensors = [filled(pool, size, seed) for seed, size in enumerate((1, 4097, 3 * MIB))]
    fp.pause(pool.tag)
    for tensor, expected in tensors:
        found = pool.backup_of(tensor, copy=is_copied)
        assert found.device.type == "cpu"
        assert found.shape == tensor.shape
        assert_same(found, expected)


def test_what_was_there_is_read(kept):
    check_what_is_read(kept, is_copied=True)


def test_what_was_there_is_seen(seen):
    check_what_is_read(seen, is_copied=False)


def test_shapes_strides_dtypes_and_views(kept):
    tensor = kept.empty((4, 6), dtype=torch.complex64)
    tensor.copy_(torch.arange(24).view(4, 6) * (1 + 2j))
    views = [tensor, tensor.t(), tensor[1:3, ::2], tensor.conj(), tensor.imag, tensor[2, 3], tensor[:0]]
    expected = [view.cpu().clone() for view in views]
    fp.pause(kept.tag)
    for view, wanted in zip(views, expected, strict=True):
        found = kept.backup_of(view)
        assert found.dtype is view.dtype
        assert found.stride() == view.stride()
        assert torch.equal(found, wanted)


def test_an_empty_tensor_is_on_the_cpu_whatever_the_default_device(kept):
    tensor, _ = filled(kept, 10)
    fp.pause(kept.tag)
    with torch.device("meta"):
        assert kept.backup_of(tensor[:0]).device.type == "cpu"
        assert kept.backup_of(tensor).device.type == "cpu"


def test_a_tensor_without_one_storage_is_refused_and_is_in_no_pool(kept):
    sparse = torch.eye(3).to_sparse()
    assert not kept.contains(sparse)
    with pytest.raises(ValueError, match="sparse"):
        kept.backup_of(sparse)


def test_a_backup_larger_than_a_chunk_is_one_view(seen):
    tensor = seen.empty((150 * MIB // 8,), dtype=torch.int64)
    torch.arange(tensor.numel(), out=tensor)  # no two blocks are equal
    whole = int(tensor.sum())
    fp.pause(seen.tag)
    view = seen.backup_of(tensor, copy=False)
    assert view.numel() == tensor.numel()
    assert int(view.sum()) == whole


def test_what_is_written_to_a_view_is_restored(seen):
    tensor, _ = filled(seen, 5000)
    fp.pause(seen.tag)
    seen.backup_of(tensor, copy=False).fill_(9)
    fp.resume(seen.tag)
    assert bool((tensor == 9).all())


def test_a_view_stays_readable_after_the_backup_has_gone(seen):
    tensor, expected = filled(seen, 3 * MIB)
    fp.pause(seen.tag)
    view, copy = seen.backup_of(tensor, copy=False), seen.backup_of(tensor)
    fp.resume(seen.tag)
    seen.trim()
    del tensor
    gc.collect()
    seen.close()
    assert view.sum() == view.clone().sum()
    assert_same(copy, expected)


def test_what_has_no_backup_is_refused(machine, kept, new_tag):
    tensor, _ = filled(kept, 100)
    with pytest.raises(ValueError, match="active"):
        kept.backup_of(tensor)
    dropped = fp.pool(new_tag(), machine.device)
    lost, _ = filled(dropped, 100)
    fp.pause(kept.tag, dropped.tag)
    with pytest.raises(ValueError, match="policy"):
        dropped.backup_of(lost)
    with pytest.raises(ValueError, match="segments"):
        kept.backup_of(lost)
    with pytest.raises(TypeError):
        kept.backup_of([1])
    with pytest.raises(ValueError, match="meta"):
        kept.backup_of(torch.empty(3, device="meta"))
    assert kept.backup_of(tensor[:0]).numel() == 0


def test_reading_while_others_pause_and_resume(kept, machine, new_tag):
    tensor, expected = filled(kept, 2 * MIB)
    other = fp.pool(new_tag(), machine.device, backup="host")
    filled(other, MIB)
    fp.pause(kept.tag)
    for _ in range(5):
        fp.pause(other.tag)
        assert_same(kept.backup_of(tensor), expected)
        fp.resume(other.tag)


@pytest.mark.leaves
def test_what_is_written_to_a_view_is_restored_though_the_memory_could_not_be_released(host, viewed, tag):
    pool = fp.pool(tag, "cpu", **viewed.options)
    tensors = [filled(pool, 2 * MIB, seed)[0] for seed in range(2)]
    _core.arm_fault("host", "cuMemRelease", 2, True, 999)  # the first goes back, the other does not
    with pytest.warns(ResourceWarning, match="refused"):
        assert fp.pause(tag).unreleased_bytes == 2 * MIB
    _core.disarm_fault("host")
    for tensor in tensors:
        pool.backup_of(tensor, copy=False).fill_(9)
    fp.resume(tag)
    assert all(bool((tensor == 9).all()) for tensor in tensors)


def test_a_copy_of_a_backup_is_of_one_pause_as_nobody_resumes_meanwhile(host, new_tag, monkeypatch):
    pool = fp.pool(new_tag(), "cpu", backup="host")
    tensor = pool.empty((1 << 20,), dtype=torch.uint8).fill_(7)
    fp.pause(pool.tag)
    could_change = []

    def change():
        could_change.append(pool._transition.acquire(blocking=False))
        if could_change[-1]:
            pool._transition.release()

    def put_together(pieces, cat=torch.cat):
        other = threading.Thread(target=change)
        other.start()
        other.join()
        return cat(pieces)

    monkeypatch.setattr(torch, "cat", put_together)
    assert bool((pool.backup_of(tensor) == 7).all())
    assert could_change == [False]
    monkeypatch.undo()
    fp.resume(pool.tag)
