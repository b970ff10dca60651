"""Running one operation again and again, with every one of its driver calls failing in turn."""

from __future__ import annotations

import errno
import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

import fencepool as fp
from fencepool import _core
from support.contents import is_same, pattern
from support.machine import MIB, Machine, check, host_counts
from support.policies import DIGESTED, Policy

PROVIDER = "host"
ANY = "*"
# The system calls are another seam, with names of their own.
SYSTEM = "system"
ANY_SYSTEM = "any system call"
UNKNOWN = 999  # CUDA_ERROR_UNKNOWN: nobody has a special way to deal with it
OUT_OF_MEMORY = 2
# In place of a driver call: memory for our own tables, on the calling thread.
ALLOCATION = "operator new"

# What puts host memory in the place of device memory, and back: where one of them keeps failing, a pause of a
# resident pool cannot be undone either.
SWAPPING = ("cuMemMap", "cuMemSetAccess", "cuMemUnmap")

# By what a file that cannot grow says so, where the rest fails with EIO.
GROWING = ("fallocate", "pwrite")

# Asked again and again until work has ended: how often is a matter of time, and the first few stand for all.
POLLED = ("cuEventQuery",)
MOST_POLLS = 6

OWN = MIB  # bytes of a tensor with a segment of its own
SHARED = 3000  # bytes of one that shares a segment


@dataclass
class Held:
    """A tensor and what it has to hold; None when that is undefined."""

    pool: fp.Pool
    tensor: torch.Tensor | None
    expected: torch.Tensor | None


class World:
    """Two pools with tensors, and what is known of them."""

    def __init__(self, machine: Machine, policy: Policy, tags: tuple[str, str]) -> None:
        self.machine = machine
        self.policy = policy
        self.tags = tags
        self.pools = [fp.pool(tag, machine.device, **policy.options) for tag in tags]
        self.held: list[Held] = []
        self.discarded: set[str] = set()  # tags whose contents the last pause dropped
        self.result: Any = None  # of the last action
        for number, pool in enumerate(self.pools):
            for size in (OWN, SHARED):
                self.add(pool, size, number)

    def add(self, pool: fp.Pool, size: int, seed: int) -> None:
        held = Held(pool, pool.empty((size,), dtype=torch.uint8), pattern(size, seed))
        held.tensor.copy_(held.expected)
        self.held.append(held)

    def warm_up(self) -> None:
        """Make what a pool makes once and keeps: its stream. The host memory goes back again."""
        self.cycle()
        for pool in self.pools:
            pool.trim()

    def cycle(self) -> None:
        fp.pause(*self.tags)
        self.resume(*self.tags)

    def pause(self, *tags: str, discard: tuple[str, ...] = ()) -> None:
        self.result = fp.pause(*tags, discard=discard)
        self.discarded = set(discard)

    def resume(self, *tags: str, order: str = "context", verify: bool = False) -> None:
        paused = [held for held in self.held if held.pool.tag in tags and held.pool.state == "paused"]
        self.result = fp.resume(*tags, order=order, verify=verify)
        self.restored(paused)

    def restored(self, paused: list[Held]) -> None:
        """Those tensors hold from now on what the policy says."""
        for held in paused:
            if self.policy.keeps_contents and held.pool.tag not in self.discarded:
                continue
            held.expected = torch.zeros_like(held.expected) if self.policy.fill == "zero" else None
        for held in self.held:
            if held.expected is None:
                held.expected = pattern(held.tensor.numel(), 77)
                held.tensor.copy_(held.expected)

    def swap(self, out: str, into: str) -> None:
        """The first is paused, the second resumed."""
        resumed = [held for held in self.held if held.pool.tag == into and held.pool.state == "paused"]
        self.result = fp.swap(pause=out, resume=into).paused
        self.restored(resumed)

    def leave_free(self, nbytes: int) -> None:
        """The device has so much memory beside what it holds now."""
        free, total = fp.memory_info(self.machine.device)
        fp.host_driver.configure(self.machine.device, memory_limit=total - free + nbytes)

    def snapshot(self) -> dict[str, Any]:
        """What a failed operation must leave as it was."""
        pools = {}
        for pool in self.pools:
            status = pool.status()
            pools[pool.tag] = {
                "state": status.state,
                "segments": status.segments,
                "bytes_mapped": status.bytes_mapped,
                "bytes_reserved": status.bytes_reserved,
                "bytes_used": status.bytes_used,
                "bytes_backed_up": status.bytes_backed_up,
                "host_bytes": status.host_bytes,
                "disk_bytes": status.disk_bytes,
            }
        return {
            "pools": pools,
            "driver": host_counts(),
            "free": self.machine.free(),
            "addresses": [held.tensor.data_ptr() for held in self.held if held.tensor is not None],
        }

    def wrong_contents(self) -> list[str]:
        """What is wrong with the tensors of active pools. Asks the driver before it reads."""
        wrong = []
        for held in self.held:
            if held.tensor is None or held.pool.state != "active":
                continue
            name = f"the {held.tensor.numel()} bytes of {held.pool.tag}"
            if held.pool.contains(held.tensor) and not self.machine.is_all_mapped(held.tensor):
                wrong.append(f"{name}: the pool says that it is active, but its memory is not mapped")
            elif held.expected is not None and not is_same(held.tensor, held.expected):
                wrong.append(f"{name}: the contents are lost")
        return wrong

    def paused_but_mapped(self) -> list[str]:
        return [
            f"{held.pool.tag} says that it is paused, but memory is mapped"
            for held in self.held
            if held.tensor is not None
            and held.pool.state == "paused"
            and self.machine.is_any_mapped(held.tensor)
        ]

    def finish(self) -> list[str]:
        """Bring everything back, look at it, and close the pools."""
        fp.host_driver.configure(self.machine.device, memory_limit=0)
        wrong = []
        open_tags = [pool.tag for pool in self.pools if pool.tag in {one.tag for one in fp.status()}]
        if open_tags:
            self.resume(*open_tags)
        wrong += self.wrong_contents()
        pools = [pool for pool in self.pools if pool.tag in open_tags]
        self.held.clear()
        self.result = None
        for pool in pools:
            pool.close()
        return wrong


@dataclass(frozen=True)
class Scenario:
    name: str
    act: Callable[[World], None]
    wrong_after: Callable[[World], list[str]]
    """What is wrong when the action has succeeded."""
    prepare: Callable[[World], None] = lambda world: None
    never_raises: bool = False
    needs_backup: bool = False
    needs_digests: bool = False

    def suits(self, policy: Policy) -> bool:
        return (policy.keeps_contents or not self.needs_backup) and (
            policy in DIGESTED or not self.needs_digests
        )


@dataclass
class Sweep:
    """What came of all points of one scenario."""

    points: int = 0
    raised: int = 0
    leaked: int = 0
    wrong: list[str] = field(default_factory=list)


def _counts() -> dict[str, int]:
    return {**_core.call_counts(PROVIDER), **_core.call_counts(SYSTEM)}


def is_of_system(name: str) -> bool:
    return name == ANY_SYSTEM or name in _core.call_counts(SYSTEM)


def calls_of(make: Callable[[], World], scenario: Scenario) -> dict[str, int]:
    """How often a clean run makes each driver call, and each system call that backups rest on."""
    world = make()
    scenario.prepare(world)
    before = _counts()
    scenario.act(world)
    after = _counts()
    wrong = scenario.wrong_after(world)
    assert wrong == [], f"{scenario.name} goes wrong without a fault"
    assert world.finish() == []
    made = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    return {name: min(count, MOST_POLLS) if name in POLLED else count for name, count in made.items()}


def call_points_of(calls: dict[str, int]) -> Iterator[tuple[str, int, bool, int]]:
    """Every call and every k, failing once and from then on; and a whole seam from each of its calls on."""
    for name, count in calls.items():
        for nth in range(1, count + 1):
            for is_lasting in (False, True):
                for code in _codes_of(name):
                    yield name, nth, is_lasting, code
    of_system = sum(count for name, count in calls.items() if is_of_system(name))
    for nth in range(1, sum(calls.values()) - of_system + 1):
        yield ANY, nth, True, UNKNOWN
    for nth in range(1, of_system + 1):
        yield ANY_SYSTEM, nth, True, errno.EIO


def _codes_of(name: str) -> list[int]:
    if is_of_system(name):
        return [errno.EIO, errno.ENOSPC] if name in GROWING else [errno.EIO]
    return [UNKNOWN, OUT_OF_MEMORY] if name in ("cuMemCreate", "cuMemHostRegister") else [UNKNOWN]


def allocations_of(make: Callable[[], World], scenario: Scenario) -> int:
    """How many allocations of the core a clean run makes on the calling thread."""
    world = make()
    scenario.prepare(world)
    _core.arm_allocation_fault(1 << 62, False)
    scenario.act(world)
    count = _core.disarm_allocation_fault()
    wrong = scenario.wrong_after(world)
    assert wrong == [], f"{scenario.name} goes wrong without a fault"
    assert world.finish() == []
    return count


def allocation_points_of(count: int) -> Iterator[tuple[str, int, bool, int]]:
    """Every allocation, failing once and from then on."""
    for nth in range(1, count + 1):
        for is_lasting in (False, True):
            yield ALLOCATION, nth, is_lasting, 0


def sweep(
    make: Callable[[], World],
    scenario: Scenario,
    points_of: Callable[[Callable[[], World], Scenario], list[tuple[str, int, bool, int]]] | None = None,
) -> Sweep:
    # Every point ends with a collection, which need not look at what other tests have left.
    gc.collect()
    gc.freeze()
    points = points_of(make, scenario) if points_of else list(call_points_of(calls_of(make, scenario)))
    return _sweep(make, scenario, points)


def _sweep(make: Callable[[], World], scenario: Scenario, points: list[tuple[str, int, bool, int]]) -> Sweep:
    found = Sweep(points=len(points))
    for name, nth, is_lasting, code in points:
        how = "from then on" if is_lasting else "once"
        where = f"{scenario.name}: call {nth} of {name} fails {how} with {code}"
        try:
            wrong = _one(make, scenario, name, nth, is_lasting, code, found)
            found.wrong += [f"{where}: {one}" for one in wrong]
        except fp.Error as error:
            # Not the operation under test: what an earlier point left behind keeps this one from starting.
            found.wrong.append(f"before {where}: {error!r}; the sweep ends here")
            break
    return found


def reset_thread(machine: Machine) -> None:
    """Faults in the undo of a scope leave this thread's contexts and capture mode changed (and say so)."""
    while machine.driver.current() != (0, 0):
        check(machine.driver.pop())
    check(machine.driver.exchange_capture_mode(0))


def _one(
    make: Callable[[], World],
    scenario: Scenario,
    name: str,
    nth: int,
    is_lasting: bool,
    code: int,
    found: Sweep,
) -> list[str]:
    _core.clear_problems()
    baseline = host_counts()
    world = make()
    scenario.prepare(world)
    before = world.snapshot()
    error: fp.Error | MemoryError | None = None
    if name == ALLOCATION:
        _core.arm_allocation_fault(nth, is_lasting)
    elif is_of_system(name):
        _core.arm_fault(SYSTEM, "*" if name == ANY_SYSTEM else name, nth, is_lasting, code)
    else:
        _core.arm_fault(PROVIDER, name, nth, is_lasting, code)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # of memory that the driver refused to take back
            scenario.act(world)
    except (fp.Error, MemoryError) as raised:
        error = raised.with_traceback(None)
        error.__context__ = None  # its frames would keep tensors too
    finally:
        _core.disarm_allocation_fault()
        seam = SYSTEM if is_of_system(name) else PROVIDER
        _core.disarm_fault(seam)
        reset_thread(world.machine)
    wrong: list[str] = []
    problems = _core.problems()
    has_leaked = any(word in problem for problem in problems for word in ("leaked", "stays", "giving back"))
    # The one who would record it has no memory to do so.
    has_leaked = has_leaked or (name == ALLOCATION and is_lasting)
    found.leaked += has_leaked
    # A single failure never costs anything. Where the driver keeps failing an undo has failed too: that may
    # leak, but only when it is recorded, and never at the cost of contents.
    if has_leaked and not is_lasting:
        wrong.append(f"one failure alone made something leak: {problems}")
    if error is not None:
        found.raised += 1
        # With no memory at all nothing can be undone, and nothing be said of it: a pool may be paused then,
        # its contents safe, which finish() looks at.
        if name == ALLOCATION and is_lasting:
            wrong += world.wrong_contents()
        else:
            # What undoing may fail at: everything, or the very call that keeps failing.
            can_undo = name != ANY and not (
                is_lasting
                and (
                    scenario.name.startswith("swap")
                    or (name in SWAPPING and world.policy.backup == "resident")
                )
            )
            wrong += _wrong_after_failure(world, scenario, error, before, has_leaked, can_undo)
    else:
        wrong += scenario.wrong_after(world)
    if wrong:
        wrong += _abandon(world)
        return wrong
    if error is not None:
        is_halfway = "is paused now" in " ".join(getattr(error, "__notes__", ()))
        # The note that says so takes memory too.
        is_halfway = is_halfway or any("is paused after a pause that failed" in one for one in problems)
        wrong += [] if is_halfway else _retry(world, scenario, name, has_leaked)
    if wrong:
        return wrong + _abandon(world)
    try:
        wrong += world.finish()
    except fp.Error as error:
        if name not in (ANY, ALLOCATION) or not has_leaked:  # as in _retry()
            wrong.append(f"it cannot be brought back: {error!r}")
        world.held.clear()
    gc.collect()
    if not has_leaked and host_counts() != baseline:
        wrong.append(f"driver resources are left: {_changes(baseline, host_counts())}")
    return wrong


def _wrong_after_failure(
    world: World,
    scenario: Scenario,
    error: fp.Error,
    before: dict[str, Any],
    has_leaked: bool,
    can_undo: bool,
) -> list[str]:
    wrong = world.wrong_contents()
    if wrong:
        return [*wrong, f"after {type(error).__name__}: {error}"]
    if scenario.never_raises:
        wrong.append(f"raised {error!r}, though what it does cannot be refused")
    if not str(error):
        wrong.append("the exception has no message")
    after = world.snapshot()
    notes = " ".join(getattr(error, "__notes__", ()))
    is_backup_kept = (
        scenario.name.startswith(("pause", "swap")) and world.policy.keeps_contents and world.policy.retain
    )
    for tag, was in before["pools"].items():
        # While the whole driver fails nothing can be undone. The contents are safe (see above), and when what
        # was unmapped cannot be mapped again, the error says that the pool is paused now with its contents in
        # device memory.
        now = after["pools"][tag]
        # The same where undoing takes the very call that keeps failing: the memory is the other side's.
        if not can_undo and f"'{tag}'" in notes and "is paused now" in notes:
            continue
        allowed = []
        if has_leaked:  # recorded: memory that could not be given back is still held, and shown as held
            allowed += ["bytes_mapped", "host_bytes", "disk_bytes"]
        if is_backup_kept:  # the policy keeps host memory, and the next try needs it
            allowed += ["host_bytes"]
        now = {**now, **{key: was[key] for key in allowed if now[key] > was[key]}}
        if now != was:
            wrong.append(f"{tag} changed: {_changes(was, after['pools'][tag])} after {error}")
    if after["addresses"] != before["addresses"]:
        wrong.append("addresses changed")
    if not has_leaked and "is paused now" not in notes:
        was, now = before["driver"], dict(after["driver"])
        more = now["registrations"] - was["registrations"]
        is_on_disk = world.policy.backup == "disk"
        if (is_backup_kept or is_on_disk) and more > 0:
            now["registrations"] -= more
            now["events"] -= more if is_on_disk else 0  # buffers stay with the device, each with an event
        if now != was:
            wrong.append(f"driver resources changed: {_changes(was, now)} after {error}")
        if after["free"] != before["free"]:
            wrong.append(f"free memory went from {before['free']} to {after['free']} after {error}")
    return wrong


def _retry(world: World, scenario: Scenario, name: str, has_leaked: bool) -> list[str]:
    try:
        scenario.act(world)
    except fp.Error as error:
        # When the whole driver failed for a while, a mapping may have leaked at the very address that is
        # needed (and is recorded): the pool then stays as it is. Any other retry has to work.
        if name == ANY and has_leaked:
            return []
        return [f"the retry failed: {error!r} {getattr(error, '__notes__', '')}"]
    return scenario.wrong_after(world)


def _abandon(world: World) -> list[str]:
    """After something went wrong: leave nothing behind that would spoil the next point."""
    try:
        wrong = world.finish()
    except fp.Error as error:
        world.held.clear()
        return [f"and it cannot be brought back: {error!r}"]
    return [f"and then: {one}" for one in wrong]


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    return ", ".join(f"{key} {before[key]} -> {after[key]}" for key in before if before[key] != after[key])
