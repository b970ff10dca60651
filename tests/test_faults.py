"""Every driver call of every operation fails in turn: nothing changes, nothing is lost, and a retry works.

The calls are learnt from a clean run; then each one fails once, and from then on, and the whole driver fails
from each of them on. The embedded driver's table is where the faults are put in: the code above is the same
for both providers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import filled, is_same, pattern
from support.faults import (
    OWN,
    SHARED,
    UNKNOWN,
    Held,
    Scenario,
    World,
    allocation_points_of,
    allocations_of,
    call_points_of,
    calls_of,
    is_of_system,
    reset_thread,
    sweep,
)
from support.machine import Machine
from support.policies import BY_NAME, LATER, POLICIES, Policy
from support.waiting import eventually

_numbers = itertools.count()

# Points of a scenario without and with a backup. Fewer mean that the sweep has shrunk.
LEAST_POINTS = {
    "pause": (110, 150),
    "pause again": (110, 140),
    "pause what changed": (0, 150),
    "pause two tags": (120, 220),
    "pause and discard one": (120, 180),
    "resume": (85, 150),
    "resume two tags": (130, 260),
    "resume and verify": (0, 280),
    "resume in parts": (85, 130),
    "swap": (150, 250),
    "swap without room": (0, 250),
    "allocate": (25, 25),
    "allocate small": (12, 12),
    "free": (150, 150),
    "adopt": (25, 25),
    "prepare": (0, 24),
    "trim": (12, 27),
    "close": (12, 36),
}


# They change what is there and need no tables; a pool without backup has nothing to prepare.
NO_ALLOCATIONS = {"prepare", "trim", "close", "free"}


def states(world: World, *wanted: str) -> list[str]:
    found = [pool.state for pool in world.pools]
    wrong = [] if found == list(wanted) else [f"the pools are {found} instead of {list(wanted)}"]
    return wrong + world.wrong_contents() + world.paused_but_mapped()


def first(world: World) -> str:
    return world.tags[0]


def parts_of_the_first(world: World) -> list[str]:
    parts = [world.result.fence_for(held.tensor) for held in world.held if held.pool is world.pools[0]]
    for part in parts:
        part.synchronize(timeout=60)
    return [] if world.result.fence.done() else ["every part has ended, and the whole has not"]


def allocate(world: World, size: int) -> None:
    world.result = world.pools[0].empty((size,), dtype=torch.uint8)


def is_usable(world: World) -> list[str]:
    tensor = world.result
    if not world.machine.is_all_mapped(tensor):
        return ["the new tensor is not mapped"]
    expected = pattern(tensor.numel(), 5)
    tensor.copy_(expected)
    return ([] if is_same(tensor, expected) else ["the new tensor does not hold what was written"]) + states(
        world, "active", "active"
    )


def free_first(world: World) -> None:
    for held in world.held:
        if held.pool is world.pools[0]:
            held.tensor = None


def is_free(world: World) -> list[str]:
    status = world.pools[0].status()  # a look at the pool takes up what had to be put off
    wrong = [] if status.bytes_used == 0 else [f"{status.bytes_used} bytes still count as used"]
    if status.bytes_reserved and not _core.problems():
        wrong.append(f"{status.bytes_reserved} bytes are still reserved, and no problem says why")
    return wrong + states(world, "active", "active")


def make_outsider(world: World) -> None:
    expected = pattern(SHARED, 9)
    world.held.append(Held(world.pools[1], expected.clone(), expected))


def adopt_outsider(world: World) -> None:
    world.pools[1].adopt(world.held[-1].tensor)


def is_adopted(world: World) -> list[str]:
    wrong = [] if world.pools[1].contains(world.held[-1].tensor) else ["the tensor is not in the pool"]
    return wrong + states(world, "active", "active")


def is_prepared(world: World) -> list[str]:
    status = world.pools[0].status()
    # Each tensor in whole steps of 512 bytes, and no more.
    wanted = OWN + 3072 if world.policy.keeps_contents else 0
    if world.policy.backup == "resident":  # host memory for each of its two segments
        wanted = status.bytes_reserved
    held = status.host_bytes
    if world.policy.backup == "disk":  # in whole steps
        held, wanted = status.disk_bytes, -(-wanted // 4096) * 4096
    wrong = [] if held == wanted else [f"{held} bytes of a backup instead of {wanted}"]
    return wrong + states(world, "active", "active")


def is_trimmed(world: World) -> list[str]:
    status = world.pools[0].status()
    held = status.host_bytes + status.disk_bytes
    is_said = any("stays larger" in problem for problem in _core.problems())
    wrong = [] if held == 0 or is_said else [f"{held} bytes of a backup are held"]
    return wrong + states(world, "active", "active")


def empty_first(world: World) -> None:
    free_first(world)
    world.held = [held for held in world.held if held.tensor is not None]
    eventually(lambda: world.pools[0].status().pending_frees == 0, "the last work on them has ended")


def is_closed(world: World) -> list[str]:
    tags = {status.tag for status in fp.status()}
    wrong = [] if world.tags[0] not in tags else ["the pool is still there"]
    return wrong + world.wrong_contents()


def change_some(world: World) -> None:
    """After a cycle: new contents, contents that moved, zeros, and equal ones."""
    world.cycle()
    own, shared = (held for held in world.held if held.pool.tag == first(world))
    moved = own.expected.clone()
    moved[: OWN // 4] = own.expected[OWN // 4 : OWN // 2]
    moved[OWN // 4 : OWN // 2] = pattern(OWN // 4, 55)
    moved[OWN // 2 : 3 * OWN // 4] = 0
    for held, changed in ((own, moved), (shared, pattern(SHARED, 56))):
        held.tensor.copy_(changed)
        held.expected = changed
    world.add(own.pool, OWN, 57)
    world.held[-1].tensor.copy_(moved)
    world.held[-1].expected = moved


SCENARIOS = [
    Scenario(
        "pause",
        act=lambda world: world.pause(first(world)),
        wrong_after=lambda world: states(world, "paused", "active"),
        prepare=World.warm_up,
    ),
    Scenario(
        "pause again",
        act=lambda world: world.pause(first(world)),
        wrong_after=lambda world: states(world, "paused", "active"),
        prepare=World.cycle,
    ),
    Scenario(
        "pause what changed",
        act=lambda world: world.pause(first(world)),
        wrong_after=lambda world: states(world, "paused", "active"),
        prepare=change_some,
        needs_backup=True,
    ),
    Scenario(
        "pause two tags",
        act=lambda world: world.pause(*world.tags),
        wrong_after=lambda world: states(world, "paused", "paused"),
        prepare=World.warm_up,
    ),
    Scenario(
        "pause and discard one",
        act=lambda world: world.pause(*world.tags, discard=world.tags[1:]),
        wrong_after=lambda world: states(world, "paused", "paused"),
        prepare=World.warm_up,
    ),
    Scenario(
        "resume",
        act=lambda world: world.resume(first(world)),
        wrong_after=lambda world: states(world, "active", "active"),
        prepare=lambda world: (world.warm_up(), fp.pause(first(world))),
    ),
    Scenario(
        "resume two tags",
        act=lambda world: world.resume(*world.tags),
        wrong_after=lambda world: states(world, "active", "active"),
        prepare=lambda world: (world.warm_up(), fp.pause(*world.tags)),
    ),
    Scenario(
        "resume and verify",
        act=lambda world: world.resume(*world.tags, verify=True),
        wrong_after=lambda world: states(world, "active", "active"),
        prepare=lambda world: (change_some(world), fp.pause(*world.tags)),
        needs_backup=True,
        needs_digests=True,
    ),
    Scenario(
        "resume in parts",
        act=lambda world: world.resume(first(world), order="explicit"),
        wrong_after=lambda world: parts_of_the_first(world) + states(world, "active", "active"),
        prepare=lambda world: (world.warm_up(), fp.pause(first(world))),
    ),
    Scenario(
        "swap",
        act=lambda world: world.swap(*world.tags),
        wrong_after=lambda world: states(world, "paused", "active"),
        prepare=lambda world: (world.warm_up(), fp.pause(world.tags[1])),
    ),
    Scenario(
        "swap without room",
        act=lambda world: world.swap(*world.tags),
        wrong_after=lambda world: states(world, "paused", "active"),
        prepare=lambda world: (world.warm_up(), fp.pause(world.tags[1]), world.leave_free(0)),
        needs_backup=True,
    ),
    Scenario("allocate", act=lambda world: allocate(world, OWN), wrong_after=is_usable),
    Scenario("allocate small", act=lambda world: allocate(world, SHARED), wrong_after=is_usable),
    Scenario("free", act=free_first, wrong_after=is_free, never_raises=True),
    Scenario("adopt", act=adopt_outsider, wrong_after=is_adopted, prepare=make_outsider),
    Scenario(
        "prepare", act=lambda world: world.pools[0].prepare(), wrong_after=is_prepared, prepare=World.warm_up
    ),
    Scenario("trim", act=lambda world: world.pools[0].trim(), wrong_after=is_trimmed, prepare=World.cycle),
    Scenario(
        "close",
        act=lambda world: world.pools[0].close(),
        wrong_after=is_closed,
        prepare=lambda world: (world.cycle(), empty_first(world)),
    ),
]


# What `make test` sweeps, by policy; the rest is for `make soak`. A pool that keeps its backup does most of
# what the others do.
QUICK = {
    "none-zero": {"pause", "resume"},
    "host-retain": {
        "pause",
        "pause what changed",
        "resume",
        "allocate",
        "free",
        "adopt",
        "prepare",
        "trim",
        "close",
    },
    "resident": {"resume"},
}


# Where a backup that goes with each resume does anything else than one that is kept.
OF_BACKUPS_THAT_GO = {
    "pause",
    "pause again",
    "resume",
    "swap",
    "swap without room",
    "prepare",
    "trim",
    "close",
}


def is_worth_it(scenario: Scenario, policy: Policy) -> bool:
    return scenario.suits(policy) and (policy.retain or scenario.name in OF_BACKUPS_THAT_GO)


def marks_of(scenario: Scenario, policy: Policy) -> list[Any]:
    if scenario.name in QUICK.get(policy.name, ()):
        return []
    return LATER.get(policy.name, [pytest.mark.soak])


def cases(policies: list[Policy]) -> list[Any]:
    return [
        pytest.param(
            scenario,
            policy,
            id=f"{policy.name}-{scenario.name.replace(' ', '-')}",
            marks=marks_of(scenario, policy),
        )
        for policy in policies
        for scenario in SCENARIOS
        if is_worth_it(scenario, policy)
    ]


@pytest.mark.leaves
@pytest.mark.parametrize(("scenario", "policy"), cases(POLICIES))
def test_a_failing_call_changes_nothing_and_loses_nothing(
    scenario: Scenario, policy, host: Machine, record_property
):

    def make() -> World:
        number = next(_numbers)
        return World(host, policy, (f"first-{number}", f"second-{number}"))

    found = sweep(make, scenario)
    record_property("points", found.points)
    record_property("raised", found.raised)
    record_property("leaked", found.leaked)
    counts = f"{found.points} points, {found.raised} raised, {found.leaked} leaked"
    print(f"{scenario.name}, {policy.name}: {counts}")
    assert not found.wrong, f"{len(found.wrong)} of {found.points} points:\n" + "\n".join(found.wrong[:40])
    assert found.points >= LEAST_POINTS[scenario.name][policy.keeps_contents]
    assert found.raised > 0 or scenario.never_raises or found.points == 0


def points_of_system(make: Callable[[], World], scenario: Scenario) -> list[tuple[str, int, bool, int]]:
    return [point for point in call_points_of(calls_of(make, scenario)) if is_of_system(point[0])]


@pytest.mark.leaves
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name.replace(" ", "-"))
def test_a_failing_call_on_a_file_changes_nothing_and_loses_nothing(scenario: Scenario, host: Machine):
    """The part of a disk's sweep that other policies have nothing of."""

    def make() -> World:
        number = next(_numbers)
        return World(host, BY_NAME["disk"], (f"first-{number}", f"second-{number}"))

    found = sweep(make, scenario, points_of_system)
    print(f"{scenario.name}: {found.points} points, {found.raised} raised, {found.leaked} leaked")
    assert not found.wrong, f"{len(found.wrong)} of {found.points} points:\n" + "\n".join(found.wrong[:40])
    assert found.points > 0 or scenario.name in ("allocate", "allocate small", "free", "adopt")


@pytest.mark.leaves
@pytest.mark.skipif(
    not _core.HAS_ALLOCATION_FAULTS, reason="a sanitizer's build has the sanitizer's operator new"
)
@pytest.mark.parametrize(
    ("scenario", "policy"),
    cases([BY_NAME[name] for name in ("none-zero", "host-retain", "resident", "disk")]),
)
def test_running_out_of_memory_for_tables_changes_nothing_and_loses_nothing(
    scenario: Scenario, policy, host: Machine, record_property
):

    def make() -> World:
        number = next(_numbers)
        return World(host, policy, (f"first-{number}", f"second-{number}"))

    found = sweep(make, scenario, lambda *args: list(allocation_points_of(allocations_of(*args))))
    record_property("points", found.points)
    print(
        f"{scenario.name}, {policy.name}: {found.points} points, {found.raised} raised, {found.leaked} leaked"
    )
    assert not found.wrong, f"{len(found.wrong)} of {found.points} points:\n" + "\n".join(found.wrong[:40])
    assert found.points > 0 or scenario.name in NO_ALLOCATIONS


@pytest.mark.leaves
@pytest.mark.skipif(
    not _core.HAS_ALLOCATION_FAULTS, reason="a sanitizer's build has the sanitizer's operator new"
)
def test_a_pool_that_a_failed_pause_never_touched_keeps_its_contents_without_any_memory(host: Machine):
    """Undoing needs no tables for a pool whose turn had not come: it lost what it held."""
    failed = 0
    for nth in itertools.count(1):
        number = next(_numbers)
        kept = fp.pool(f"kept-{number}", "cpu", backup="host")
        dropped = fp.pool(f"dropped-{number}", "cpu", fill="zero")
        held = [filled(pool, OWN, seed) for seed, pool in enumerate((kept, dropped))]
        _core.arm_allocation_fault(nth, True)
        try:
            fp.pause(kept.tag, dropped.tag)
            break
        except (fp.Error, MemoryError):
            failed += 1
        finally:
            _core.disarm_allocation_fault()
            reset_thread(host)
        fp.resume(kept.tag, dropped.tag)
        for tensor, before in held:
            assert is_same(tensor, before), f"allocation {nth}"
    assert failed > 20


@pytest.mark.leaves
def test_the_error_of_a_broken_context_names_the_pool_all_the_same(host: Machine):
    """Then the driver cannot say either how much memory is free, which was to be in the message."""
    named = []
    for nth in range(1, 40):
        pool = fp.pool(f"broken-{next(_numbers)}", "cpu", backup="host")
        tensor, _ = filled(pool, OWN)
        fp.pause(pool.tag)
        _core.arm_fault("host", "*", nth, True, UNKNOWN)
        try:
            fp.resume(pool.tag)
            break
        except fp.Error as error:
            named += [(pool.tag, str(error))] if error.pool else []
        finally:
            _core.disarm_fault("host")
            reset_thread(host)
        del tensor
    assert any("cuMemCreate" in message for _, message in named)
    assert all(f"pool '{tag}'" in message and "resume again" in message for tag, message in named)


@pytest.mark.leaves
def test_host_memory_that_had_to_be_leaked_counts_in_the_budget(host: Machine):
    used = fp.host_memory().used
    pool = fp.pool(f"leaked-{next(_numbers)}", "cpu", backup="resident")
    tensor, before = filled(pool, OWN)
    pool.prepare()
    assert fp.host_memory().used > used
    _core.arm_fault("host", "cuMemRelease", 1, True, UNKNOWN)
    pool.trim()
    _core.disarm_fault("host")
    assert fp.host_memory().used > used
    assert any("leaked" in problem for problem in _core.problems())
    fp.pause(pool.tag)
    fp.resume(pool.tag)
    assert is_same(tensor, before)


def test_the_sweep_covers_every_scenario_and_thousands_of_points():
    assert {scenario.name for scenario in SCENARIOS} == set(LEAST_POINTS)
    least = sum(
        LEAST_POINTS[scenario.name][policy.keeps_contents]
        for policy in POLICIES
        for scenario in SCENARIOS
        if is_worth_it(scenario, policy)
    )
    assert least >= 9000


ON_FILES = {
    "pause": {"openat", "fstatfs", "faccessat", "close", "fallocate", "pwrite", "cuMemcpyDtoHAsync"},
    "pause what changed": {"pwrite"},
    "resume": {"pread", "cuMemcpyHtoDAsync", "cuCtxWaitEvent"},
    "swap": {"pwrite", "pread"},
    "prepare": {"fallocate"},
    "trim": {"ftruncate"},
    "close": {"ftruncate", "close"},
}


@pytest.mark.parametrize("name", list(ON_FILES))
def test_system_calls_of_a_disk_are_made_to_fail_too(host, name):
    number = next(_numbers)
    scenario = next(one for one in SCENARIOS if one.name == name)
    calls = calls_of(lambda: World(host, BY_NAME["disk"], (f"a-{number}", f"b-{number}")), scenario)
    assert set(calls) >= ON_FILES[name]


def test_the_calls_that_are_made_to_fail_are_those_of_each_step():
    """A sweep over calls that are not made would show nothing: what each operation rests on is among them."""
    machine = Machine("cpu")
    wanted = {
        "pause": {"cuCtxRecordEvent", "cuMemHostRegister", "cuMemcpyDtoHAsync", "cuMemUnmap", "cuMemRelease"},
        "resume": {"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuCtxWaitEvent"},
        "resume in parts": {"cuMemcpyHtoDAsync", "cuEventCreate", "cuEventRecord"},
        "allocate": {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"},
        "free": {"cuCtxRecordEvent", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"},
        "trim": {"cuMemHostUnregister"},
        "close": {"cuStreamDestroy"},
    }
    for scenario in SCENARIOS:
        number = next(_numbers)
        calls = calls_of(
            lambda n=number: World(machine, BY_NAME["host-retain"], (f"a-{n}", f"b-{n}")), scenario
        )
        assert wanted.get(scenario.name, set()) <= set(calls), scenario.name
