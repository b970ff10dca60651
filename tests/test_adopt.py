"""Moving what exists into a pool: same objects, same values, same sharing."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from support.machine import MIB
from support.waiting import eventually


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def assert_values(module: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = values(module)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


class Model(torch.nn.Module):
    """Parameters, a tied one, buffers, a view, and tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16)
        )
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(24.0).view(4, 6))
        self.register_buffer("column", self.table[:, 2])
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.register_buffer("nothing", torch.empty(0, 5))
        self.frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_a_module_keeps_its_objects_values_and_sharing(machine, pool, policy):
    module = Model()
    before = values(module)
    objects = [id(tensor) for tensor in [*module.parameters(), *module.buffers()]]
    flags = [parameter.requires_grad for parameter in module.parameters()]

    assert pool.adopt(module) is module

    tensors = [*module.parameters(), *module.buffers()]
    assert [id(tensor) for tensor in tensors] == objects
    assert [parameter.requires_grad for parameter in module.parameters()] == flags
    assert all(pool.contains(tensor) for tensor in tensors if tensor.numel())
    assert {str(tensor.device) for tensor in tensors if tensor.numel()} == {machine.torch_device}
    assert_values(module, before)
    assert module.head.weight is module.embed.weight
    assert module.column.stride() == (6,)
    module.table[1, 2] = 99
    assert module.column[1] == 99

    addresses = [tensor.data_ptr() for tensor in tensors]
    before = values(module)
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    if policy.keeps_contents:
        assert_values(module, before)


def test_the_old_memory_is_let_go(machine, pool, new_tag, policy):
    other = fp.pool(new_tag(), machine.device, **policy.options)
    tensor = other.empty((2 * MIB,), dtype=torch.uint8)
    tensor.fill_(7)
    pool.adopt(tensor)
    assert pool.contains(tensor)
    assert not other.contains(tensor)
    assert bool((tensor == 7).all())
    eventually(lambda: other.status().bytes_reserved == 0, "the old segment is given back")


def test_a_module_costs_what_its_storages_take_once(pool):
    module = torch.nn.Module()
    big = torch.zeros(3 * MIB // 4)
    module.register_buffer("whole", big)
    module.register_buffer("part", big[: MIB // 4])
    module.weight = torch.nn.Parameter(torch.zeros(100))
    pool.adopt(module)
    assert pool.status().bytes_used == 3 * MIB + 512
    assert pool.status().segments == 1


def test_what_lies_in_the_pool_already_is_left_alone(pool):
    tensor = pool.empty((1000,))
    address = tensor.data_ptr()
    status = pool.status()
    pool.adopt(tensor)
    pool.adopt(tensor)
    assert tensor.data_ptr() == address
    assert pool.status() == status


def test_a_module_is_adopted_again_after_it_grew(pool):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    pool.adopt(module)
    first = module[0].weight.data_ptr()
    module.append(torch.nn.Linear(4, 4))
    pool.adopt(module)
    assert module[0].weight.data_ptr() == first
    assert all(pool.contains(parameter) for parameter in module.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(10),
        lambda: torch.randn(3, 4, dtype=torch.complex64),
        lambda: torch.randn(5).to(torch.bfloat16),
        lambda: torch.tensor(3.5),
        lambda: torch.arange(20)[5:10],
    ],
    ids=["integers", "complex", "bfloat16", "scalar", "slice"],
)
def test_a_lone_tensor(pool, make):
    tensor = make()
    expected = tensor.clone()
    assert pool.adopt(tensor) is tensor
    assert pool.contains(tensor)
    assert torch.equal(tensor.cpu(), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
        lambda: torch._neg_view(torch.ones(4)),
    ],
    ids=["conjugated", "negated"],
)
def test_lazily_conjugated_and_negated_tensors_keep_their_values(pool, make):
    tensor = make()
    expected = tensor.clone()
    assert tensor.is_conj() or tensor.is_neg()
    pool.adopt(tensor)
    assert torch.equal(tensor.cpu(), expected)


def test_layouts_within_a_module(pool):
    module = torch.nn.Module()
    module.register_buffer("transposed", torch.arange(12.0).view(3, 4).t())
    module.register_buffer("expanded", torch.arange(3.0).expand(4, 3))
    module.register_buffer("channels_last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    before = values(module)
    strides = [buffer.stride() for buffer in module.buffers()]
    pool.adopt(module)
    assert_values(module, before)
    assert [buffer.stride() for buffer in module.buffers()] == strides


def test_an_optimizer_goes_on(machine, pool):
    torch.manual_seed(0)
    module, twin = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    twin.load_state_dict(module.state_dict())
    inputs = torch.randn(3, 4)
    optimizer, twin_optimizer = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, twin)
    )

    pool.adopt(module)
    twin.to(machine.torch_device)
    for _ in range(3):
        for model, steps in ((module, optimizer), (twin, twin_optimizer)):
            steps.zero_grad(set_to_none=True)
            model(inputs.to(machine.torch_device)).square().sum().backward()
            steps.step()
    assert torch.equal(module.weight, twin.weight)
    assert pool.contains(module.weight)


def test_gradients_survive_on_the_same_device(host, tag):
    pool = fp.pool(tag, "cpu", backup="host")
    module = torch.nn.Linear(3, 3)
    module(torch.ones(1, 3)).sum().backward()
    gradient = module.weight.grad.clone()
    pool.adopt(module)
    assert torch.equal(module.weight.grad, gradient)


@pytest.mark.gpu
def test_a_gradient_does_not_change_its_device(tag):
    pool = fp.pool(tag, "cuda:0")
    module = torch.nn.Linear(3, 3)
    module(torch.ones(1, 3)).sum().backward()
    before = values(module)
    with pytest.raises(ValueError, match="gradient"):
        pool.adopt(module)
    assert module.weight.device.type == "cpu"
    assert_values(module, before)
    assert pool.status().segments == 0


@pytest.mark.gpu
def test_a_module_of_the_gpu_moves_to_the_cpu_and_back(new_tag):
    there, here = fp.pool(new_tag(), "cuda:0", backup="host"), fp.pool(new_tag(), "cpu", backup="host")
    module = Model().cuda()
    before = values(module)
    for pool in (there, here, there):
        pool.adopt(module)
        assert pool.contains(module.embed.weight)
        assert_values(module, before)


def test_adopting_into_a_paused_pool_changes_nothing(pool):
    module = torch.nn.Linear(3, 3)
    before, address = values(module), module.weight.data_ptr()
    fp.pause(pool.tag)
    with pytest.raises(fp.PoolPausedError):
        pool.adopt(module)
    assert module.weight.data_ptr() == address
    assert_values(module, before)


def test_adopting_from_a_paused_pool_changes_nothing(machine, pool, policy, new_tag):
    other = fp.pool(new_tag(), machine.device, backup="host")
    module = other.adopt(torch.nn.Linear(3, 3))
    before = values(module)
    fp.pause(other.tag)
    with pytest.raises(fp.PoolPausedError, match=other.tag):
        pool.adopt(module)
    assert pool.status().segments == 0
    fp.resume(other.tag)
    assert_values(module, before)
    assert other.contains(module.weight)


def test_too_little_memory_changes_nothing(host, policy, tag):
    pool = fp.pool(tag, "cpu", **policy.options)
    module = torch.nn.Linear(1024, 1024)
    before, address = values(module), module.weight.data_ptr()
    used = sum(fp.memory_info("cpu")) - 2 * fp.memory_info("cpu")[0]
    fp.host_driver.configure(memory_limit=used + 2 * MIB)
    with pytest.raises(fp.OutOfMemoryError) as caught:
        pool.adopt(module)
    assert caught.value.pool == tag
    assert module.weight.data_ptr() == address
    assert_values(module, before)
    fp.host_driver.configure(memory_limit=0)
    pool.adopt(module)
    assert_values(module, before)


def test_a_tensor_that_torch_will_not_change_leaves_the_module_as_it_was(pool):
    module = torch.nn.Linear(3, 3)
    with torch.inference_mode():
        module.register_buffer("frozen", torch.ones(3))
    before = values(module)
    addresses = [tensor.data_ptr() for tensor in module.state_dict().values()]
    try:
        pool.adopt(module)
    except (ValueError, RuntimeError, fp.Error):
        assert [tensor.data_ptr() for tensor in module.state_dict().values()] == addresses
    else:
        assert pool.contains(module.frozen)
    assert_values(module, before)


def test_an_empty_module(pool):
    pool.adopt(torch.nn.Module())
    assert pool.status().segments == 0
