"""Tensors of a pool and another GPU: a pool's memory is accessible to the pool's own device, and to no other.

PyTorch copies from GPU to GPU on the source's device, by a copy or a kernel that writes to the other device's
memory (aten/src/ATen/native/cuda/Copy.cu). For memory of cudaMalloc it turns peer access on first; that does
nothing for memory of cuMemCreate, which every device but its own has to be given access to.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

import fencepool as fp
from support import children
from support.contents import filled
from support.machine import MIB, check


def test_another_device_has_no_access_to_a_pools_memory(machines, policy, tag):
    owner, other = machines
    if owner.provider != other.provider:
        pytest.skip("a driver knows nothing of the other's devices")
    tensor, _ = filled(fp.pool(tag, owner.device, **policy.options), MIB)
    for _ in range(2):
        assert owner.is_all_mapped(tensor)
        with owner.current():
            assert check(owner.driver.mem_get_access(tensor.data_ptr(), other.ordinal)) == 0
        fp.pause(tag)
        fp.resume(tag)


# Each in a process of its own: after an illegal access a process can do nothing more with its GPUs.
PROGRAM = """
import json
import torch

first = fp.pool("first", "cuda:0", backup="host")
second = fp.pool("second", "cuda:1", backup="host")
expected = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)

def pooled(pool):
    return pool.empty((1024, 1024), dtype=torch.float32)

def plain(device):
    return torch.empty((1024, 1024), dtype=torch.float32, device=device)

def source(make, where):
    return make(where).copy_(expected)

{setup}
outcome = "right"
for cycle in range(2):
    target.zero_()
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    try:
        copied, wanted = {copy}
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
    except RuntimeError as error:
        outcome = "refused: " + str(error).splitlines()[0]
        break
    if not torch.equal(copied.cpu(), wanted):
        outcome = "wrong"
        break
    fp.pause()
    fp.resume()
print(json.dumps([outcome, torch.cuda.can_device_access_peer(0, 1)]), flush=True)
os._exit(0)
"""

OUT = "start, target = source(pooled, first), plain('cuda:1')"
IN = "start, target = source(plain, 'cuda:0'), pooled(second)"
BOTH = "start, target = source(pooled, first), pooled(second)"

WORKS = {
    "to() out of a pool": (OUT, "start.to('cuda:1'), expected"),
    "out of a pool": (OUT, "target.copy_(start), expected"),
    "out of a pool, transposed": (OUT, "target.copy_(start.t()), expected.t()"),
    "out of a pool, converted": (OUT, "target.copy_(start.int()), expected"),
    # The way that always works: to memory of the target's device first.
    "into a pool by way of its device": (IN, "target.copy_(start.to('cuda:1')), expected"),
    "from pool to pool by way of its device": (BOTH, "target.copy_(start.to('cuda:1')), expected"),
}
# The source's device would write to memory that it has no access to. An error, or the driver finds a way.
NEEDS_ACCESS = {
    "into a pool": (IN, "target.copy_(start), expected"),
    "into a pool, transposed": (IN, "target.copy_(start.t()), expected.t()"),
    "from pool to pool": (BOTH, "target.copy_(start), expected"),
    "from pool to pool, transposed": (BOTH, "target.copy_(start.t()), expected.t()"),
}


def outcome(case: tuple[str, str]) -> tuple[str, bool]:
    setup, copy = case
    done = children.run(PROGRAM.format(setup=setup, copy=copy))
    assert done.returncode == 0, done.stderr[-3000:]
    found, are_peers = json.loads(done.stdout)
    return found, are_peers


def outcomes(cases: dict[str, tuple[str, str]]) -> dict[str, str]:
    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(cases, threads.map(outcome, cases.values()), strict=True))
    print(found)  # with -rP: what this machine's driver does, and whether its GPUs are peers
    return {name: what for name, (what, _) in found.items()}


@pytest.mark.soak
@pytest.mark.gpu(count=2)
@pytest.mark.timeout(300)
def test_copies_out_of_a_pool_to_another_gpu_are_right_before_and_after_a_cycle():
    assert set(outcomes(WORKS).values()) == {"right"}


@pytest.mark.soak
@pytest.mark.gpu(count=2)
@pytest.mark.timeout(300)
def test_copies_from_another_gpu_into_a_pool_are_right_or_an_error_and_never_lost():
    found = outcomes(NEEDS_ACCESS)
    assert {name for name, what in found.items() if what == "wrong"} == set(), found
