"""Pools in any order of calls, held against a plain model that knows what every byte must be."""

from __future__ import annotations

import errno
import os

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import pattern
from support.machine import MIB
from support.policies import POLICIES, Policy

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

TAGS = ["weights", "kv_cache", "cuda_graph"]
DEVICES = ["cpu", "cpu:1"]
SIZES = [1, 511, 4096, MIB - 1, MIB, 2 * MIB, 3 * MIB + 5]
TOTAL = fp.memory_info("cpu")[1]
tags = st.lists(st.sampled_from(TAGS), max_size=3, unique=True)
steps = 0


class ModelTensor:
    def __init__(self, pool: ModelPool, tensor: torch.Tensor, seed: int) -> None:
        self.pool = pool
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.write(seed)

    def write(self, seed: int) -> None:
        self.expected: torch.Tensor | None = pattern(self.tensor.numel(), seed)
        self.tensor.copy_(self.expected)

    def check(self) -> None:
        # In variables first: what an assert names lives in its traceback, and must not keep the tensor.
        is_there = self.tensor.data_ptr() == self.address and self.pool.real.contains(self.tensor)
        is_right = self.expected is None or torch.equal(self.tensor, self.expected)
        assert is_there
        assert is_right


class ModelPool:
    def __init__(self, real: fp.Pool, policy: Policy) -> None:
        self.real = real
        self.policy = policy
        self.is_paused = False
        self.tensors: list[ModelTensor] = []

    def pause(self) -> None:
        if self.is_paused:
            return
        self.is_paused = True
        if not self.policy.keeps_contents:
            for tensor in self.tensors:
                size = tensor.tensor.numel()
                is_zero = self.policy.fill == "zero"
                tensor.expected = torch.zeros(size, dtype=torch.uint8) if is_zero else None

    def check(self) -> None:
        status = self.real.status()
        assert status.state == ("paused" if self.is_paused else "active")
        assert status.bytes_mapped == (0 if self.is_paused else status.bytes_reserved)
        assert status.bytes_used >= sum(tensor.tensor.numel() for tensor in self.tensors)


class Pools(RuleBasedStateMachine):
    """The calls, and what each has to do."""

    pools = Bundle("pools")
    tensors = Bundle("tensors")

    def __init__(self) -> None:
        super().__init__()
        _core.clear_problems()
        self.model: dict[int, ModelPool] = {}
        self.fences: list[fp.Fence] = []

    def teardown(self) -> None:
        _core.disarm_fault("host")
        _core.disarm_fault("system")
        for device in DEVICES:
            fp.host_driver.configure(device, memory_limit=TOTAL)
        fp.resume()
        try:
            for model in self.model.values():
                model.is_paused = False
                model.check()
                for tensor in model.tensors:
                    tensor.check()
        finally:  # nothing is left for the next example, whatever this one has shown
            for model in self.model.values():
                for tensor in model.tensors:
                    del tensor.tensor
                model.tensors.clear()
                model.real.close()

    def chosen(self, names: list[str]) -> list[ModelPool]:
        return [pool for pool in self.model.values() if not names or pool.real.tag in names]

    def known(self, names: list[str]) -> list[str]:
        return [name for name in names if any(pool.real.tag == name for pool in self.model.values())]

    @rule(
        target=pools,
        tag=st.sampled_from(TAGS),
        device=st.sampled_from(DEVICES),
        policy=st.sampled_from(POLICIES),
    )
    def get_pool(self, tag, device, policy):
        real = fp.pool(tag, device, **policy.options)
        return self.model.setdefault(real._core.id, ModelPool(real, policy))

    @rule(
        target=tensors,
        pool=pools,
        size=st.sampled_from(SIZES),
        seed=st.integers(0, 60),
        in_region=st.booleans(),
    )
    def allocate(self, pool, size, seed, in_region):
        try:
            if in_region:
                with pool.real.region():
                    tensor = torch.empty(size, dtype=torch.uint8)
            else:
                tensor = pool.real.empty((size,), dtype=torch.uint8)
        except fp.PoolPausedError:
            assert pool.is_paused
            return multiple()
        except fp.OutOfMemoryError:
            return multiple()
        assert not pool.is_paused
        made = ModelTensor(pool, tensor, seed)
        pool.tensors.append(made)
        return made

    @rule(tensor=tensors, seed=st.integers(0, 60))
    def write(self, tensor, seed):
        if not tensor.pool.is_paused:
            tensor.write(seed)

    @rule(tensor=tensors)
    def read(self, tensor):
        if not tensor.pool.is_paused:
            tensor.check()
        elif tensor.pool.policy.keeps_contents:
            is_right = torch.equal(tensor.pool.real.backup_of(tensor.tensor), tensor.expected)
            assert is_right

    @rule(tensor=consumes(tensors))
    def free(self, tensor):
        tensor.pool.tensors.remove(tensor)
        del tensor.tensor

    @rule(names=tags)
    def pause(self, names):
        names = self.known(names)
        chosen = self.chosen(names)
        report = fp.pause(*names)
        changed = {(p.tag, p.device, p.backup) for p in report.pools if p.changed}
        for pool in chosen:
            if not pool.is_paused:
                assert (pool.real.tag, pool.real.device, pool.real.backup) in changed
            pool.pause()

    @rule(names=tags, order=st.sampled_from(["context", "explicit"]))
    def resume(self, names, order):
        names = self.known(names)
        try:
            resumed = fp.resume(*names, order=order)
        except fp.OutOfMemoryError:
            return
        # On the embedded driver nothing but the host waits: reads of the test come after the fence.
        assert resumed.fence.synchronize(timeout=30) is not False
        assert resumed.fence.done()
        self.fences = [*self.fences[-4:], resumed.fence]
        for pool in self.chosen(names):
            pool.is_paused = False

    @rule(
        out=st.lists(pools, max_size=3),
        into=st.lists(pools, max_size=3),
        order=st.sampled_from(["context", "explicit"]),
    )
    def swap(self, out, into, order):
        into = [pool for pool in into if pool not in out]
        try:
            swapped = fp.swap(
                pause=[pool.real for pool in out], resume=[pool.real for pool in into], order=order
            )
        except fp.OutOfMemoryError:  # found out before anything has changed
            return
        swapped.fence.synchronize(timeout=30)
        self.fences = [*self.fences[-4:], swapped.fence]
        for pool in out:
            pool.pause()
        for pool in into:
            pool.is_paused = False

    @rule(
        names=tags,
        is_pause=st.booleans(),
        call=st.integers(1, 40),
        seam=st.sampled_from(["host", "system"]),
    )
    def fail(self, names, is_pause, call, seam):
        """One call of the driver or on a file fails, once: all or nothing, and a retry works."""
        names = self.known(names)
        _core.arm_fault(seam, "*", call, False, 2 if seam == "host" else errno.EIO)
        try:
            (fp.pause if is_pause else fp.resume)(*names)
        except fp.Error as error:
            notes = getattr(error, "__notes__", [])
        else:
            notes = []
            for pool in self.chosen(names):
                if is_pause:
                    pool.pause()
                else:
                    pool.is_paused = False
        finally:
            _core.disarm_fault(seam)
        # What could not be raised is recorded; one failure alone costs nothing.
        assert not any("leaked" in problem for problem in _core.problems())
        _core.clear_problems()
        assert not notes, "undoing failed too"
        for fence in self.fences:
            fence.synchronize(timeout=30)

    @rule(device=st.sampled_from(DEVICES), limit=st.sampled_from([0, 4 * MIB, 12 * MIB, TOTAL]))
    def set_budget(self, device, limit):
        used = sum(
            pool.real.status().bytes_mapped for pool in self.model.values() if pool.real.device == device
        )
        fp.host_driver.configure(device, memory_limit=max(used + limit, 1) if limit != TOTAL else TOTAL)

    @rule(pool=pools)
    def prepare(self, pool):
        pool.real.prepare()

    @rule(pool=pools)
    def trim(self, pool):
        try:
            pool.real.trim()
        except fp.PoolPausedError:
            assert pool.is_paused
            assert pool.policy.keeps_contents

    @rule()
    def old_fences_stay_done(self):
        assert all(fence.done() for fence in self.fences)

    @invariant()
    def states_are_the_models(self):
        global steps
        steps += 1
        for pool in self.model.values():
            pool.check()


def run(examples: int) -> int:
    """Steps taken. A failure prints how to repeat it; make that a test of its own."""
    global steps
    steps = 0
    run_state_machine_as_test(
        Pools,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
    return steps


def test_any_order_of_calls_keeps_to_the_model(clean):
    assert run(60) > 1000


@pytest.mark.soak
def test_twenty_thousand_steps_in_any_order(clean, record_property):
    taken, rounds = 0, 0
    while taken < 20_000:
        taken += run(int(os.environ.get("FENCEPOOL_ANY_ORDER_EXAMPLES", "100")))
        rounds += 1
        assert rounds < 40, taken
    record_property("steps", taken)
    print(f"{taken} steps")
