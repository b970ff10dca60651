"""Cycle after cycle nothing grows: device memory, host memory, address space, descriptors, threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fencepool as fp
from support import children
from support.contents import assert_same, filled, pattern
from support.machine import MIB, host_counts

CYCLES = {"cpu": 1000}  # of the long run
GPU_CYCLES = 300  # its driver takes milliseconds for each call that maps


def process() -> dict[str, int]:
    """What the process holds, as the kernel says."""
    # What the heap keeps of freed memory comes and goes by tens of MiB; only what is in use may not grow.
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {
        "resident": int(fields["VmRSS"].split()[0]) * 1024,
        "address space": int(fields["VmSize"].split()[0]) * 1024,
        "threads": int(fields["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def turn(pool: fp.Pool, held: list, cycle: int) -> None:
    """One cycle with frees and allocations around it."""
    for tensor, before in held:
        tensor.copy_(before)
    fp.pause(pool.tag)
    if cycle % 3 == 0:
        held.pop(0)
    fp.resume(pool.tag)
    while len(held) < 4:
        held.append(filled(pool, (3 * MIB, 40_000, MIB, 700)[cycle % 4], cycle % 4))


def run(machine, pool, policy, cycles: int) -> None:
    held = [filled(pool, size, size % 97) for size in (3 * MIB, 40_000, MIB, 700)]
    early = max(4, cycles // 10)  # until thread arenas and caches have their size
    for cycle in range(early):
        turn(pool, held, cycle)
    held[:] = held[:4]
    fp.pause(pool.tag)
    before_process, before_counts = process(), host_counts()
    before_free, before_used = machine.free(), pool.status().bytes_used
    fp.resume(pool.tag)
    for cycle in range(early, cycles):
        turn(pool, held, cycle)
        if policy.keeps_contents:
            for tensor, contents in held:
                assert_same(tensor, contents)
    fp.pause(pool.tag)
    after_process, after_counts = process(), host_counts()
    assert machine.free() == before_free
    # As many tensors, of other sizes: what is reserved may differ by them, and by nothing else.
    difference = pool.status().bytes_used - before_used
    assert after_counts["handles"] == before_counts["handles"]
    assert after_counts["streams"] == before_counts["streams"]
    assert after_counts["events"] == before_counts["events"]
    assert after_counts["registrations"] <= before_counts["registrations"] + 8
    assert after_process["threads"] <= before_process["threads"]
    assert after_process["descriptors"] <= before_process["descriptors"]
    slack = 32 * MIB + max(difference, 0)
    resident, space = (after_process[name] - before_process[name] for name in ("resident", "address space"))
    assert resident <= slack, f"resident memory has grown by {resident} bytes"
    assert space <= slack + 64 * MIB, f"the address space has grown by {space} bytes"
    fp.resume(pool.tag)


def test_nothing_grows_over_twenty_cycles(machine, pool, policy):
    run(machine, pool, policy, 20)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nothing_grows_over_many_cycles(device, policy):
    # In a process of its own: what other tests have left in this one's heap comes and goes.
    cycles = CYCLES.get(device, GPU_CYCLES)
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
torch.set_num_threads(1)
import fencepool as fp
from support.machine import Machine, warm_up_gpu
from support.policies import POLICIES
from test_cycles import run

if {device!r} != "cpu":
    warm_up_gpu({device!r})
machine = Machine({device!r})
policy = next(policy for policy in POLICIES if policy.name == {policy.name!r})
run(machine, fp.pool("soak", {device!r}, **policy.options), policy, {cycles})
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=children.environment(),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_pools_come_and_go(machine, policy, new_tag):
    free, counts = 0, host_counts()
    for number in range(100):
        if number == 10:  # a driver keeps some memory of the first streams and events
            free = machine.free()
        pool = fp.pool(new_tag(), machine.device, **policy.options)
        tensor, before = filled(pool, MIB + number, number)
        fp.pause(pool.tag)
        fp.resume(pool.tag)
        policy.assert_after(tensor, before)
        del tensor
        pool.close()
    assert machine.free() == free
    assert host_counts() == counts


def test_the_second_cycle_is_as_the_first(machine, pool, policy):
    tensor, _ = filled(pool, 2 * MIB)
    frees, hosts = [], []
    for cycle in range(2):
        contents = pattern(2 * MIB, cycle)
        tensor.copy_(contents)
        fp.pause(pool.tag)
        frees.append(machine.free())
        hosts.append(pool.status().host_bytes)
        fp.resume(pool.tag)
        policy.assert_after(tensor, contents)
    assert frees[0] == frees[1]
    assert hosts[0] == hosts[1]
