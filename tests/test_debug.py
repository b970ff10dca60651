"""FENCEPOOL_DEBUG=1: stray uses of paused tensors are survived, and stray writes are told."""

from __future__ import annotations

import logging
import warnings

import pytest

import fencepool as fp
from fencepool import _core, debug
from support import children
from support.contents import assert_same, filled
from support.machine import MIB

PAGE = _core.raw.GRANULARITY


@pytest.fixture(autouse=True)
def debugging():
    debug.switch(True)
    yield
    debug.switch(False)


def stray_fill(machine, tensor, value):
    stream = machine.stream()
    machine.memset(tensor, value, stream)
    machine.synchronize(stream)


def test_the_memory_goes_but_for_a_page_and_comes_back(machine, pool, policy):
    if policy.backup == "resident":
        pytest.skip("its contents are at the addresses")
    size = 5 * MIB if machine.is_host else 255 * MIB
    tensor, expected = filled(pool, size)
    free = machine.free()
    for _ in range(2):
        fp.pause(pool.tag)
        assert machine.has_freed(free, size + MIB - PAGE)
        assert pool.status().bytes_mapped == 0
        assert machine.read(tensor.data_ptr(), size) == b"\xff" * size  # survived
        fp.resume(pool.tag)
        policy.assert_after(tensor, expected)
        assert machine.has_freed(free, 0)
        tensor.copy_(expected)


@pytest.mark.leaves
def test_a_stray_write_is_told_with_the_pool_and_the_stack_of_the_pause(machine, keeping, tag, caplog):
    if keeping.backup == "resident":
        pytest.skip("writing is no mistake there")
    pool, other = fp.pool(tag, machine.device, **keeping.options), fp.pool(f"{tag}-2", machine.device)
    tensor, expected = filled(pool, 5 * MIB)
    untouched, _ = filled(other, MIB)
    fp.pause(pool.tag, other.tag)
    stray_fill(machine, tensor[3 * MIB : 3 * MIB + 100], 7)
    with pytest.warns(debug.StrayWriteWarning, match=tag) as caught, caplog.at_level(logging.WARNING):
        fp.resume(pool.tag, other.tag)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert f"100 bytes, the first {MIB} bytes behind" in str(caught[0].message)
    (record,) = [one for one in caplog.records if one.name == "fencepool.debug"]
    assert "test_a_stray_write_is_told" in record.getMessage()
    assert any(tag in problem and "written to" in problem for problem in pool.status().problems)
    assert_same(tensor, expected)  # the write did not reach the contents
    assert untouched.numel() == MIB


def test_without_a_stray_write_nothing_is_said(machine, pool):
    filled_tensor, _ = filled(pool, 3 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp.pause(pool.tag)
        fp.resume(pool.tag)
    assert filled_tensor.numel() == 3 * MIB


def test_tensors_die_and_pools_close_while_they_are_paused(machine, pool):
    free = machine.free()
    first, _ = filled(pool, 3 * MIB)
    second, _ = filled(pool, 3 * MIB)
    fp.pause(pool.tag)
    del first
    fp.resume(pool.tag)
    fp.pause(pool.tag)
    del second
    pool.close()
    assert machine.has_freed(free, 0)


@pytest.mark.leaves
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"])
def test_a_page_that_cannot_be_had_is_a_problem_and_no_failure(host, tag, call):
    pool = fp.pool(tag, "cpu")
    tensor, _ = filled(pool, 5 * MIB)
    _core.arm_fault("host", call, 1, False, 999)
    fp.pause(tag)
    _core.disarm_fault("host")
    assert any("no page for stray accesses" in problem for problem in _core.problems())
    assert not host.is_any_mapped(tensor)
    fp.resume(tag)
    tensor.fill_(1)


def test_a_resume_that_fails_can_be_made_again(host, tag):
    pool = fp.pool(tag, "cpu", backup="host")
    tensor, expected = filled(pool, 5 * MIB)
    for call in ("cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemMap"):
        fp.pause(tag)
        _core.arm_fault("host", call, 1, False, 999)
        with pytest.raises(fp.DriverError):
            fp.resume(tag)
        _core.disarm_fault("host")
        fp.resume(tag)
        assert_same(tensor, expected)


def test_the_environment_switches_it_on():
    code = """
        pool = fp.pool("stray", "cpu")
        block = block_of(pool, 1 << 20, 1)
        fp.pause("stray")
        print(ctypes.string_at(block.address, 2))
        ctypes.memset(block.address, 0, 1)
        fp.resume("stray")
    """
    child = children.start(code, FENCEPOOL_DEBUG="1")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert out.strip() == r"b'\xff\xff'"
    assert "'stray' on cpu" in err
    assert "Paused at" in err
