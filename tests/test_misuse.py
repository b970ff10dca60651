"""Bad arguments are refused at once, with an exception that says what is wrong, and nothing has changed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled
from support.machine import MIB

NAN = float("nan")


# --- pools ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["", "a\0b", "\0"])
def test_a_tag_that_cannot_be(device, clean, tag):
    with pytest.raises(ValueError, match="tag"):
        fp.pool(tag, device)
    assert fp.status() == []


@pytest.mark.parametrize("tag", [None, 3, b"weights", ["weights"], True])
def test_a_tag_that_is_no_string(device, clean, tag):
    with pytest.raises(TypeError, match="tag"):
        fp.pool(tag, device)
    for call in (fp.pause, fp.resume):
        with pytest.raises(TypeError, match="tag"):
            call(tag)
    with pytest.raises(TypeError, match="tag"), fp.paused(tag):
        pass
    assert fp.status() == []


@pytest.mark.parametrize(
    "name",
    ["", "gpu", "cpu:4", "cpu:-1", "CPU", "cuda:", "cuda:x", "cuda:99999", "meta", "cpu:0 ", "cpu:00000"],
)
def test_an_unknown_device(clean, tag, name):
    with pytest.raises((ValueError, fp.DriverUnavailable)) as caught:
        fp.pool(tag, name)
    if not name.startswith("cuda"):
        assert isinstance(caught.value, ValueError)
    assert fp.status() == []


@pytest.mark.gpu
def test_a_gpu_that_is_not_there(tag):
    with pytest.raises(ValueError, match="cuda:1234"):
        fp.pool(tag, "cuda:1234")


@pytest.mark.parametrize("device", [None, 0, 1.0, b"cpu", ("cpu",)])
def test_a_device_that_is_no_device(clean, tag, device):
    with pytest.raises(TypeError, match="device"):
        fp.pool(tag, device)
    with pytest.raises(TypeError, match="device"):
        fp.memory_info(device)


def test_a_device_that_no_transition_knows(pool):
    for call in (fp.pause, fp.resume):
        with pytest.raises(ValueError, match="device"):
            call(pool.tag, device="tpu")
        with pytest.raises(TypeError, match="device"):
            call(pool.tag, device=3)
    assert pool.state == "active"


@pytest.mark.parametrize("backup", ["", "Host", "tape", "disk"])
def test_an_unknown_backup(device, clean, tag, backup):
    with pytest.raises(ValueError, match="backup"):
        fp.pool(tag, device, backup=backup)


@pytest.mark.parametrize("fill", ["", "ones", "Zero"])
def test_an_unknown_fill(device, clean, tag, fill):
    with pytest.raises(ValueError, match="fill"):
        fp.pool(tag, device, fill=fill)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backup", None),
        ("backup", 1),
        ("backup", True),
        ("fill", 0),
        ("fill", None),
        ("retain", 1),
        ("retain", "yes"),
    ],
)
def test_a_policy_of_the_wrong_type(device, clean, tag, name, value):
    with pytest.raises(TypeError, match=name):
        fp.pool(tag, device, **{name: value})
    assert fp.status() == []


def test_a_policy_is_given_by_name(device, clean, tag):
    with pytest.raises(TypeError):
        fp.pool(tag, device, "host")


# --- tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [-1, (3, -1), [-5, 2]])
def test_negative_sizes(pool, shape):
    with pytest.raises(ValueError, match="negative"):
        pool.empty(shape)
    assert pool.status().segments == 0


@pytest.mark.parametrize("shape", [None, "3", b"3", 2.0, (2.0,), True, (True,), (None,), {3}, ((1, 2),)])
def test_shapes_that_are_none(pool, shape):
    with pytest.raises(TypeError, match="shape"):
        pool.empty(shape)
    assert pool.status().segments == 0


@pytest.mark.parametrize("shape", [1 << 48, (1 << 40, 1 << 40), (1 << 62, 1 << 62), 1 << 200])
def test_sizes_beyond_the_address_space(machine, pool, shape):
    free = machine.free()
    with pytest.raises(ValueError, match="address space"):
        pool.empty(shape, dtype=torch.uint8)
    assert machine.free() == free
    assert pool.status().segments == 0


def test_the_largest_size_that_is_not_refused_by_its_number(machine, pool):
    free = machine.free()
    with pytest.raises(MemoryError) as caught:
        pool.empty((1 << 47,), dtype=torch.uint8)
    assert isinstance(caught.value, fp.OutOfMemoryError)
    assert caught.value.bytes_wanted == 1 << 47
    assert machine.free() >= free  # more when PyTorch's cache was given back for another try
    assert pool.status().segments == 0


def test_a_size_of_zero_is_an_empty_tensor(pool):
    assert pool.empty(0).numel() == 0
    assert pool.status().segments == 0


@pytest.mark.parametrize("dtype", ["float32", np.float32, float, 7])
def test_a_dtype_that_is_none(pool, dtype):
    with pytest.raises(TypeError, match="dtype"):
        pool.empty((1,), dtype=dtype)


# --- adopting ---------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor without a storage of its own, as quantisation libraries make them."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4,))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


def test_a_numpy_array_is_not_adopted(pool):
    for wrong in (np.zeros(4), None, [torch.zeros(2)], {"weight": torch.zeros(2)}, 3.0):
        with pytest.raises(TypeError, match="adopts"):
            pool.adopt(wrong)
    assert pool.status().segments == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 4).t()[1:],
        lambda: torch.zeros(8)[::2],
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.zeros(4, device="meta"),
        lambda: torch.zeros(3).expand(2, 3),
        Wrapper,
    ],
    ids=["transposed", "strided", "sparse", "meta", "expanded", "wrapper"],
)
def test_tensors_that_cannot_be_adopted(pool, make):
    tensor = make()
    with pytest.raises(ValueError, match=r"adopt|tensor|storage"):
        pool.adopt(tensor)
    assert pool.status().segments == 0


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(4, device="meta"), lambda: torch.eye(3).to_sparse(), Wrapper]
)
def test_a_module_with_one_such_tensor_is_left_as_it_is(machine, pool, make):
    module = torch.nn.Linear(4, 4)
    module.register_buffer("odd", make())
    pointer = module.weight.data_ptr()
    weight = module.weight.detach().clone()
    with pytest.raises(ValueError, match=r"tensor|storage"):
        pool.adopt(module)
    assert module.weight.data_ptr() == pointer
    assert torch.equal(module.weight, weight)
    assert pool.status().segments == 0


# --- transitions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, -1, -0.5, -math.inf])
def test_times_that_cannot_be(pool, value):
    tensor, before = filled(pool, 100)
    with pytest.raises(ValueError, match="timeout"):
        fp.pause(pool.tag, timeout=value)
    with pytest.raises(ValueError, match="wait"):
        fp.resume(pool.tag, wait=value)
    for name in ("timeout", "wait"):
        with pytest.raises(ValueError, match=name), fp.paused(pool.tag, **{name: value}):
            pass
    assert pool.state == "active"
    assert_same(tensor, before)


@pytest.mark.parametrize("value", ["5", b"5", True, [5], 5j, torch.ones(1)])
def test_times_of_the_wrong_type(pool, value):
    with pytest.raises(TypeError, match="timeout"):
        fp.pause(pool.tag, timeout=value)
    with pytest.raises(TypeError, match="wait"):
        fp.resume(pool.tag, wait=value)
    assert pool.state == "active"


@pytest.mark.parametrize("order", ["", "Context", "none", None, 1, b"context", ["context"]])
def test_an_unknown_order(pool, order):
    fp.pause(pool.tag)
    with pytest.raises((ValueError, TypeError), match="order"):
        fp.resume(pool.tag, order=order)
    assert pool.state == "paused"


def test_endless_times_are_times(pool):
    fp.pause(pool.tag, timeout=math.inf)
    fp.resume(pool.tag, wait=math.inf)
    fp.pause(pool.tag, timeout=None)
    fp.resume(pool.tag, wait=1e300)
    assert pool.state == "active"


def test_a_bad_argument_beside_a_good_tag_pauses_nothing(machine, policy, new_tag):
    pools = [fp.pool(new_tag(), machine.device, **policy.options) for _ in range(2)]
    for bad, kind in ((3, TypeError), ("nonsuch", fp.UnknownTagError)):
        with pytest.raises(kind):
            fp.pause(pools[0].tag, bad)
    assert {pool.state for pool in pools} == {"active"}


# --- the embedded driver's settings -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["memory_limit", "bandwidth"])
def test_settings_that_cannot_be(clean, name):
    before = _core.raw.settings(0)
    for wrong in (-1, 1 << 63):
        with pytest.raises(ValueError, match=name):
            fp.host_driver.configure(**{name: wrong})
    for wrong in ("1", 1.5, True):
        with pytest.raises(TypeError, match=name):
            fp.host_driver.configure(**{name: wrong})
    assert getattr(_core.raw.settings(0), name) == getattr(before, name)


@pytest.mark.parametrize("name", ["poisoned", "host_waits"])
def test_flags_that_are_none(clean, name):
    for wrong in (0, "yes"):
        with pytest.raises(TypeError, match=name):
            fp.host_driver.configure(**{name: wrong})
    assert fp.host_driver.is_waiting("cpu")


def test_a_bad_setting_changes_none_of_them(clean):
    with pytest.raises(TypeError):
        fp.host_driver.configure(memory_limit=MIB, host_waits="no")
    assert _core.raw.settings(0).memory_limit == 0


def test_only_the_embedded_driver_has_settings(clean):
    with pytest.raises(ValueError, match="embedded"):
        fp.host_driver.configure("cuda:0", memory_limit=1)
    with pytest.raises(ValueError, match="cpu:9"):
        fp.host_driver.configure("cpu:9", memory_limit=1)
