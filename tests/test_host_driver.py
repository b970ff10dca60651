"""What the embedded driver alone has: settings, accounts, checks that a GPU leaves undefined, and its
safety as a part of the process. The rules it shares with CUDA are in test_driver_rules.py.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import pytest

from support.raw_machine import (
    GRANULE,
    ILLEGAL_ADDRESS,
    ILLEGAL_STATE,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    MIB,
    NO_ACCESS,
    NOT_PERMITTED,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    READ_ONLY,
    SUCCESS,
    HostBuffer,
    Machine,
    raw,
)

DEVICE = 2  # pools of other tests are on the first ones; accounts here start at nothing


@pytest.fixture
def machine():
    before = counts()
    machine = Machine("host", DEVICE)
    yield machine
    raw.clear_sticky_error(DEVICE)
    machine.close()
    assert counts() == before


@pytest.fixture
def configure():
    """Changes the device's settings for one test."""

    def configure(**settings):
        raw.set_settings(DEVICE, raw.Settings(**settings))

    before = raw.settings(DEVICE)
    yield configure
    raw.set_settings(DEVICE, before)


def counts():
    now = raw.counts()
    return {name: getattr(now, name) for name in dir(now) if not name.startswith("_")}


def run_python(program, *arguments, timeout=60, **options):
    """Runs a program of tests' helpers in another process."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])},
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )


# The table


def test_every_call_has_its_documented_name_and_its_exported_symbol():
    calls = {name: (symbol, since, required) for name, symbol, since, required in raw.calls()}
    assert calls["cuMemGetInfo"][0] == "cuMemGetInfo_v2"
    assert calls["cuMemMap"][0] == "cuMemMap"
    assert calls["cuMemMap"][2]
    assert not calls["cuCtxRecordEvent"][2]
    assert all(symbol in (name, name + "_v2") for name, (symbol, _, _) in calls.items())
    assert [raw.find_call(name) for name in calls] == list(range(len(calls)))
    assert raw.find_call("cuNothing") == len(calls)


def test_four_devices_that_can_do_virtual_memory():
    driver = raw.Driver("host")
    assert driver.device_count() == (SUCCESS, 4)
    assert driver.device_name(3) == (SUCCESS, "host 3")
    virtual_memory, descriptors, numa_memory = 102, 103, 141
    for device in range(4):
        assert driver.device_attribute(virtual_memory, device) == (SUCCESS, 1)
        assert driver.device_attribute(descriptors, device) == (SUCCESS, 1)
        assert driver.device_attribute(numa_memory, device) == (SUCCESS, 1)
    assert driver.device_attribute(virtual_memory, 4)[0] == INVALID_DEVICE
    assert driver.device_bus_id(1, 4)[0] == INVALID_VALUE


# Memory limits and accounts


def test_a_limit_gives_out_of_memory(machine, configure):
    configure(memory_limit=8 * GRANULE)
    driver = machine.driver
    assert driver.mem_get_info() == (SUCCESS, 8 * GRANULE, 8 * GRANULE)
    assert driver.device_total_mem(DEVICE) == (SUCCESS, 8 * GRANULE)
    machine.create(6 * GRANULE)
    assert driver.mem_create(DEVICE, 3 * GRANULE)[0] == OUT_OF_MEMORY
    assert driver.mem_get_info()[1] == 2 * GRANULE
    machine.create(2 * GRANULE)
    assert driver.mem_create(DEVICE, GRANULE)[0] == OUT_OF_MEMORY


def test_a_limit_below_what_is_held_leaves_nothing_free(machine, configure):
    machine.create(4 * GRANULE)
    configure(memory_limit=2 * GRANULE)
    assert machine.driver.mem_get_info() == (SUCCESS, 0, 2 * GRANULE)
    assert machine.driver.mem_create(DEVICE, GRANULE)[0] == OUT_OF_MEMORY


def test_devices_have_accounts_of_their_own(machine, configure):
    configure(memory_limit=GRANULE)
    machine.create(GRANULE)
    handle = machine.ok(machine.driver.mem_create(1, GRANULE))
    machine.ok(machine.driver.mem_release(handle))


def test_without_a_limit_the_machine_is_the_limit(machine):
    total = machine.ok(machine.driver.device_total_mem(DEVICE))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < total <= pages
    assert machine.driver.mem_create(DEVICE, (total // GRANULE + 1) * GRANULE)[0] == OUT_OF_MEMORY


def test_memory_takes_pages_when_it_is_touched_and_gives_them_back(machine):
    def resident():
        with open("/proc/self/smaps_rollup") as lines:
            fields = dict(line.split(":", 1) for line in lines if ":" in line and line[0].isupper())
        return int(fields["Pss_Shmem"].split()[0]) * 1024

    size = 64 * MIB
    driver = machine.driver
    address, stream = machine.reserve(size), machine.stream()
    start = resident()
    handle = machine.ok(driver.mem_create(DEVICE, size))
    machine.ok(driver.mem_map(address, size, handle))
    machine.ok(driver.mem_set_access(address, size, DEVICE))
    assert resident() < start + MIB
    machine.fill(address, 1, size, stream)
    machine.ok(driver.stream_synchronize(stream))
    assert resident() >= start + size
    machine.ok(driver.mem_unmap(address, size))
    machine.ok(driver.mem_release(handle))
    assert resident() < start + MIB


def test_new_memory_is_zero_or_poison(machine, configure):
    assert machine.read(machine.memory(), GRANULE) == bytes(GRANULE)
    configure(is_poisoned=True)
    assert machine.read(machine.memory(), GRANULE) == bytes([raw.POISON]) * GRANULE


def test_counts_follow_what_is_alive(machine):
    before = counts()
    driver = machine.driver
    address = machine.reserve(4 * GRANULE)
    handle = machine.ok(driver.mem_create(DEVICE, 2 * GRANULE))
    machine.map(address, 2 * GRANULE, handle)
    machine.stream(), machine.event(), machine.pinned(4096)
    made = {name: now - before[name] for name, now in counts().items()}
    assert made == {
        "ranges": 1,
        "handles": 1,
        "mappings": 1,
        "streams": 1,
        "events": 1,
        "registrations": 1,
        "graphs": 0,
        "physical_bytes": 2 * GRANULE,
    }
    machine.ok(driver.mem_release(handle))
    assert raw.counts().handles == before["handles"]
    assert raw.counts().physical_bytes == before["physical_bytes"] + 2 * GRANULE


# Bandwidth


def copy_seconds(machine, copies):
    begin = time.monotonic()
    for call, *arguments in copies:
        machine.ok(call(*arguments))
    machine.ok(machine.driver.ctx_synchronize())
    return time.monotonic() - begin


def test_copies_take_the_links_time(machine, configure):
    size = 8 * MIB
    address, buffer = machine.memory(size), machine.pinned(size)
    streams = machine.stream(), machine.stream()
    configure(bandwidth=80 * MIB)
    driver = machine.driver
    one = copy_seconds(machine, [(driver.memcpy_htod, address, buffer.address, size, streams[0])])
    assert one >= 0.099
    # Two streams share the link of a direction.
    half = size // 2
    two = copy_seconds(
        machine,
        [
            (driver.memcpy_htod, address + half * index, buffer.address + half * index, half, stream)
            for index, stream in enumerate(streams)
        ],
    )
    assert two >= 0.099


def test_directions_do_not_share_a_link(machine, configure):
    size = 8 * MIB
    first, second = machine.memory(size), machine.memory(size)
    buffers = machine.pinned(size), machine.pinned(size)
    streams = machine.stream(), machine.stream()
    configure(bandwidth=16 * MIB)
    driver = machine.driver
    both = copy_seconds(
        machine,
        [
            (driver.memcpy_htod, first, buffers[0].address, size, streams[0]),
            (driver.memcpy_dtoh, buffers[1].address, second, size, streams[1]),
        ],
    )
    assert 0.499 <= both < 0.95


def test_work_within_the_device_does_not_take_the_link(machine, configure):
    first, second, stream = machine.memory(8 * MIB), machine.memory(8 * MIB), machine.stream()
    configure(bandwidth=MIB)  # eight seconds, if it did
    driver = machine.driver
    seconds = copy_seconds(
        machine,
        [(driver.memset_d8, first, 1, 8 * MIB, stream), (driver.memcpy_dtod, second, first, 8 * MIB, stream)],
    )
    assert seconds < 4


# Checks


def test_handles_that_name_nothing_are_refused(machine):
    driver = machine.driver
    address = machine.memory()
    stream, event = 0x7000000, 0x7000001
    assert driver.stream_synchronize(stream) == INVALID_HANDLE
    assert driver.stream_destroy(stream) == INVALID_HANDLE
    assert driver.memset_d8(address, 0, 1, stream) == INVALID_HANDLE
    assert driver.event_query(event) == INVALID_HANDLE
    assert driver.event_destroy(event) == INVALID_HANDLE
    assert driver.push(12345) == INVALID_CONTEXT
    assert driver.ctx_record_event(12345, machine.event()) == INVALID_CONTEXT
    assert driver.mem_release(999999) == INVALID_VALUE
    assert driver.graph_launch(1, machine.stream()) == INVALID_VALUE
    assert driver.graph_destroy(1) == INVALID_VALUE
    assert driver.graph_exec_destroy(1) == INVALID_VALUE


def test_a_stale_handle_is_refused(machine):
    driver = machine.driver
    stream, event = machine.ok(driver.stream_create()), machine.ok(driver.event_create())
    machine.ok(driver.stream_destroy(stream))
    machine.ok(driver.event_destroy(event))
    machine.stream(), machine.event()
    assert driver.stream_query(stream) == INVALID_HANDLE
    assert driver.event_query(event) == INVALID_HANDLE
    handle = machine.ok(driver.mem_create(DEVICE, GRANULE))
    machine.ok(driver.mem_release(handle))
    assert driver.mem_release(handle) == INVALID_VALUE
    assert driver.mem_map(machine.reserve(GRANULE), GRANULE, handle) == INVALID_VALUE


def test_an_event_and_its_stream_share_a_context(machine):
    driver = machine.driver
    stream, recorded = machine.stream(), machine.event()
    other = Machine("host", 1)
    event, held = other.event(), other.stream()
    assert driver.event_record(event, stream) == INVALID_HANDLE
    assert driver.event_record(recorded, held) == INVALID_HANDLE
    assert driver.ctx_record_event(machine.context, event) == INVALID_HANDLE
    # Waiting crosses contexts.
    latch = other.latch(held)
    other.ok(driver.event_record(event, held))
    machine.ok(driver.stream_wait_event(stream, event))
    machine.ok(driver.ctx_wait_event(machine.context, event))
    machine.ok(driver.event_record(recorded, stream))
    assert driver.event_query(recorded) == NOT_READY
    latch.open()
    machine.ok(driver.event_synchronize(recorded))
    other.close()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"location": 0}, INVALID_VALUE),
        ({"location": 2}, NOT_SUPPORTED),  # host
        ({"location": 3}, INVALID_VALUE),  # host, a NUMA node that is not there
        ({"location": 4}, INVALID_VALUE),  # host, the current NUMA node
        ({"handle_types": 2}, NOT_SUPPORTED),  # Windows
        ({"handle_types": 8}, NOT_SUPPORTED),  # fabric
        ({"type": 2}, INVALID_VALUE),
    ],
)
def test_kinds_of_memory_that_do_not_exist_here(machine, arguments, code):
    assert machine.driver.mem_create(DEVICE, GRANULE, **arguments)[0] == code


def test_memory_of_the_host_is_not_exported(machine):
    assert machine.driver.mem_create(0, GRANULE, exportable=True, location=3)[0] == NOT_SUPPORTED


def test_states_and_devices_that_are_wrong_have_their_own_codes(machine):
    driver, stream = machine.driver, machine.stream()
    assert driver.mem_create(4, GRANULE)[0] == INVALID_DEVICE
    assert driver.end_capture(stream)[0] == ILLEGAL_STATE
    machine.ok(driver.begin_capture(stream))
    assert driver.begin_capture(stream) == ILLEGAL_STATE
    machine.end_capture(stream)


def test_a_range_is_a_multiple_of_the_granularity(machine):
    assert machine.driver.address_reserve(GRANULE + 4096)[0] == INVALID_VALUE
    assert machine.driver.address_reserve(GRANULE, 0, 12345)[0] == INVALID_VALUE


def test_a_hint_is_followed_when_it_can_be(machine):
    driver = machine.driver
    hint = machine.ok(driver.address_reserve(4 * GRANULE, 64 * MIB))
    machine.ok(driver.address_free(hint, 4 * GRANULE))
    address = machine.ok(driver.address_reserve(4 * GRANULE, 0, hint))
    assert address == hint
    elsewhere = machine.ok(driver.address_reserve(4 * GRANULE, 0, hint))
    assert elsewhere not in (0, hint)
    for reserved in (address, elsewhere):
        machine.ok(driver.address_free(reserved, 4 * GRANULE))


def test_a_range_with_a_mapping_is_not_freed(machine):
    address = machine.reserve(2 * GRANULE)
    machine.map(address + GRANULE, GRANULE, machine.create(GRANULE))
    assert machine.driver.address_free(address, 2 * GRANULE) == INVALID_VALUE


def test_a_mapping_shows_its_handle_whole_and_inside_one_range(machine):
    address, handle = machine.reserve(2 * GRANULE), machine.create(2 * GRANULE)
    assert machine.driver.mem_map(address, GRANULE, handle) == INVALID_VALUE
    assert machine.driver.mem_map(address + GRANULE, 2 * GRANULE, handle) == INVALID_VALUE
    assert machine.driver.mem_map(address + 4096, 2 * GRANULE, handle) == INVALID_VALUE


def test_a_range_with_a_hole_is_not_unmapped(machine):
    address = machine.reserve(3 * GRANULE)
    for index in (0, 2):
        machine.map(address + index * GRANULE, GRANULE, machine.create(GRANULE))
    assert machine.driver.mem_unmap(address, 3 * GRANULE) == INVALID_VALUE
    assert raw.is_accessible(address, GRANULE)
    assert raw.is_accessible(address + 2 * GRANULE, GRANULE)


def test_accessible_means_mapped_with_access_throughout(machine):
    driver = machine.driver
    address = machine.reserve(2 * GRANULE)
    machine.map(address, GRANULE, machine.create(GRANULE))
    machine.map(address + GRANULE, GRANULE, machine.create(GRANULE), NO_ACCESS)
    assert raw.is_accessible(address, GRANULE)
    assert not raw.is_accessible(address, GRANULE + 1)
    machine.ok(driver.mem_set_access(address, 2 * GRANULE, DEVICE))
    assert raw.is_accessible(address + 1, 2 * GRANULE - 1)
    assert not raw.is_accessible(0, 1)
    assert not raw.is_accessible(address, 2**64 - 1)


def test_work_is_refused_on_addresses_that_are_not_mapped(machine):
    driver, stream = machine.driver, machine.stream()
    address = machine.reserve(2 * GRANULE)
    machine.map(address, GRANULE, machine.create(GRANULE))
    assert driver.memset_d8(address, 0, GRANULE + 1, stream) == INVALID_VALUE
    assert driver.memset_d8(address + GRANULE, 0, 1, stream) == INVALID_VALUE
    assert driver.memcpy_dtod(address, address + GRANULE, 1, stream) == INVALID_VALUE
    assert driver.memcpy_htod(address, 0, 16, stream) == INVALID_VALUE
    assert driver.stream_synchronize(stream) == SUCCESS


def test_missing_pages_are_not_registered(machine):
    assert machine.driver.host_register(4096, 4096) == INVALID_VALUE
    assert machine.driver.host_register(HostBuffer(4096).address, 2**64 - 1) == INVALID_VALUE


def test_an_unregistration_names_the_start(machine):
    buffer = machine.pinned(MIB)
    assert machine.driver.host_unregister(buffer.address + 4096) == INVALID_VALUE


def test_a_copy_may_span_two_registrations(machine):
    buffer, address, stream = machine.host(MIB), machine.memory(), machine.stream()
    for start in (buffer.address, buffer.address + MIB // 2):
        machine.ok(machine.driver.host_register(start, MIB // 2))
        machine.undo(machine.driver.host_unregister, start)
    latch = machine.latch(stream)
    machine.ok(machine.driver.memcpy_htod(address, buffer.address, MIB, stream))
    assert machine.driver.stream_query(stream) == NOT_READY  # as pinned memory, not held
    latch.open()
    machine.ok(machine.driver.stream_synchronize(stream))


def test_host_functions_make_no_driver_calls(machine):
    assert machine.driver.call_inside_host_function(machine.stream()) == (SUCCESS, NOT_PERMITTED)


LAST_RELEASE = """
    from support.raw_machine import *
    driver = raw.Driver("host")
    _, context = driver.primary_retain(3)
    assert driver.push(context) == SUCCESS
    _, stream = driver.stream_create()
    _, event = driver.event_create()
    assert driver.primary_release(3) == SUCCESS
    assert driver.stream_query(stream) == INVALID_HANDLE
    assert driver.event_query(event) == INVALID_HANDLE
    assert driver.mem_get_info()[0] == CONTEXT_IS_DESTROYED
    assert driver.pop() == (SUCCESS, context)
    assert driver.push(context) == INVALID_CONTEXT
    assert driver.primary_release(3) == INVALID_CONTEXT
    assert (raw.counts().streams, raw.counts().events) == (0, 0)
"""


def test_the_last_release_of_a_context_ends_its_streams_and_events():
    result = run_python(LAST_RELEASE)
    assert result.returncode == 0, result.stderr


# Work that touches what it may not


def break_context(machine, stream, address):
    """Makes the device write where it may not."""
    machine.ok(machine.driver.memset_d8(address, 1, 16, stream))
    assert machine.driver.stream_synchronize(stream) == ILLEGAL_ADDRESS


@pytest.mark.parametrize("access", [NO_ACCESS, READ_ONLY])
def test_work_without_access_ends_the_context(machine, access):
    address, stream = machine.reserve(GRANULE), machine.stream()
    machine.map(address, GRANULE, machine.create(GRANULE), access)
    break_context(machine, stream, address)
    driver = machine.driver
    assert driver.mem_create(DEVICE, GRANULE)[0] == ILLEGAL_ADDRESS
    assert driver.mem_unmap(address, GRANULE) == ILLEGAL_ADDRESS
    assert driver.primary_retain(DEVICE)[0] == ILLEGAL_ADDRESS
    raw.clear_sticky_error(DEVICE)
    assert driver.stream_synchronize(stream) == SUCCESS


def test_reading_is_enough_to_copy_from(machine):
    address, stream = machine.reserve(GRANULE), machine.stream()
    machine.map(address, GRANULE, machine.create(GRANULE), READ_ONLY)
    assert machine.read(address, 16, stream) == bytes(16)


def test_a_broken_context_lets_everyone_go_on(machine):
    driver = machine.driver
    address, bad, waiting = machine.reserve(GRANULE), machine.stream(), machine.stream()
    machine.map(address, GRANULE, machine.create(GRANULE), NO_ACCESS)
    event, latch = machine.event(), machine.latch(bad)
    other = Machine("host", 1)
    elsewhere = other.stream()
    machine.ok(driver.memset_d8(address, 1, 16, bad))
    skipped = raw.Latch()
    machine.ok(driver.hold(skipped, bad))  # would never be opened, but is never run
    machine.ok(driver.event_record(event, bad))
    machine.ok(driver.stream_wait_event(waiting, event))
    machine.ok(driver.stream_wait_event(elsewhere, event))
    latch.open()
    assert driver.event_synchronize(event) == ILLEGAL_ADDRESS
    assert driver.stream_synchronize(waiting) == ILLEGAL_ADDRESS
    assert driver.stream_synchronize(elsewhere) == SUCCESS  # a context of its own
    other.close()
    raw.clear_sticky_error(DEVICE)
    machine.ok(driver.ctx_synchronize())
    assert skipped.passed == 0


def test_unmapping_during_a_long_copy_is_caught_between_chunks(machine, configure):
    driver = machine.driver
    size = 32 * MIB
    address, buffer, stream = machine.reserve(size), machine.pinned(size), machine.stream()
    handle = machine.create(size)
    machine.ok(driver.mem_map(address, size, handle))
    machine.ok(driver.mem_set_access(address, size, DEVICE))
    buffer.fill(1)
    configure(bandwidth=64 * MIB)
    machine.ok(driver.memcpy_htod(address, buffer.address, size, stream))
    while ctypes.string_at(address, 1) != b"\1":  # until the copy is under way
        pass
    machine.ok(driver.mem_unmap(address, size))
    configure(bandwidth=0)
    assert driver.stream_synchronize(stream) == ILLEGAL_ADDRESS
    raw.clear_sticky_error(DEVICE)


def test_a_captured_copy_meets_the_memory_of_its_launch(machine):
    driver = machine.driver
    address, stream = machine.reserve(GRANULE), machine.stream()
    handle = machine.create(GRANULE)
    machine.ok(driver.mem_map(address, GRANULE, handle))
    machine.ok(driver.mem_set_access(address, GRANULE, DEVICE))
    machine.ok(driver.begin_capture(stream))
    machine.fill(address, 4, 16, stream)
    executable = machine.graph(stream)
    machine.ok(driver.mem_unmap(address, GRANULE))
    machine.map(address, GRANULE, machine.create(GRANULE))
    machine.ok(driver.graph_launch(executable, stream))
    assert machine.read(address, 17, stream) == b"\4" * 16 + b"\0"


# Other processes


IMPORT = """
    import sys
    from support.raw_machine import *
    machine = Machine("host")
    descriptor = int(sys.argv[1])
    handle = machine.ok(machine.driver.mem_import(descriptor))
    machine.undo(machine.driver.mem_release, handle)
    address, stream = machine.reserve(GRANULE), machine.stream()
    machine.map(address, GRANULE, handle)
    assert machine.read(address, 16, stream) == b"\\x21" * 16
    machine.fill(address, 0x22, 16, stream)
    machine.ok(machine.driver.stream_synchronize(stream))
    machine.close()
"""


def test_another_process_maps_the_same_memory(machine):
    driver = machine.driver
    handle = machine.create(GRANULE, exportable=True)
    address, stream = machine.reserve(GRANULE), machine.stream()
    machine.map(address, GRANULE, handle)
    machine.fill(address, 0x21, GRANULE, stream)
    machine.ok(driver.stream_synchronize(stream))
    descriptor = machine.ok(driver.mem_export(handle))
    result = run_python(IMPORT, descriptor, pass_fds=[descriptor])
    os.close(descriptor)
    assert result.returncode == 0, result.stderr
    assert machine.read(address, 17, stream) == b"\x22" * 16 + b"\x21"


def test_imported_memory_is_not_counted_twice(machine):
    handle = machine.create(GRANULE, exportable=True)
    before = raw.counts().physical_bytes
    descriptor = machine.ok(machine.driver.mem_export(handle))
    imported = machine.ok(machine.driver.mem_import(descriptor))
    os.close(descriptor)
    assert imported != handle
    assert raw.counts().physical_bytes == before
    machine.ok(machine.driver.mem_release(imported))
    assert machine.driver.mem_import(descriptor)[0] == INVALID_VALUE


def foreign_descriptors():
    yield -1
    with tempfile.TemporaryFile() as file:
        file.truncate(GRANULE)
        yield file.fileno()
    memory = os.memfd_create("fencepool-host-0")  # the name alone is not enough
    os.ftruncate(memory, GRANULE)
    yield memory
    os.close(memory)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours.fileno()


def test_only_descriptors_of_the_driver_are_imported(machine):
    for descriptor in foreign_descriptors():
        assert machine.driver.mem_import(descriptor)[0] == INVALID_VALUE


READ_UNMAPPED = """
    import ctypes, sys
    from support.raw_machine import *
    machine = Machine("host")
    address = machine.memory()
    assert ctypes.string_at(address, 1) == b"\\0"
    if sys.argv[1] == "unmapped":
        machine.ok(machine.driver.mem_unmap(address, GRANULE))
    else:
        machine.ok(machine.driver.mem_set_access(address, GRANULE, 0, NO_ACCESS))
    print("about to fault", flush=True)
    ctypes.string_at(address, 1)
"""


@pytest.mark.parametrize("state", ["unmapped", "no access"])
def test_the_processor_faults_on_memory_that_is_away(state):
    result = run_python(READ_UNMAPPED, state)
    assert result.stdout == "about to fault\n"
    assert result.returncode == -signal.SIGSEGV


EXIT_WHILE_BLOCKED = """
    from support.raw_machine import *
    machine = Machine("host")
    stream, other = machine.stream(), machine.stream()
    address = machine.memory(64 * MIB)
    latch = raw.Latch()
    machine.ok(machine.driver.hold(latch, stream))
    latch.wait_until_held()
    event = machine.event()
    machine.ok(machine.driver.event_record(event, stream))
    machine.ok(machine.driver.stream_wait_event(other, event))
    for _ in range(50):
        machine.fill(address, 1, 64 * MIB, machine.stream())
    import builtins
    builtins.kept = (machine, latch)  # nothing is undone
"""


def test_a_process_ends_in_peace_with_streams_blocked_and_busy():
    result = run_python(EXIT_WHILE_BLOCKED)
    assert (result.returncode, result.stderr) == (0, "")


FORK = """
    import os
    from support.raw_machine import *
    machine = Machine("host")
    driver, stream = machine.driver, machine.stream()
    child = os.fork()
    if child == 0:
        codes = {driver.stream_synchronize(stream), driver.mem_create(0, GRANULE)[0], driver.init()}
        codes.add(driver.primary_retain(0)[0])
        os._exit(0 if codes == {NOT_INITIALIZED} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert driver.stream_synchronize(stream) == SUCCESS
    machine.close()
"""


def test_a_child_after_fork_is_told_so():
    result = run_python(FORK)
    assert result.returncode == 0, result.stderr


def test_a_process_out_of_descriptors_is_out_of_memory():
    program = """
        import resource
        from support.raw_machine import *
        machine = Machine("host")
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        code = SUCCESS
        while code == SUCCESS:
            code, handle = machine.driver.mem_create(0, GRANULE)
        assert code == OUT_OF_MEMORY
        assert raw.counts().physical_bytes == raw.counts().handles * GRANULE
    """
    result = run_python(program)
    assert result.returncode == 0, result.stderr


# Many threads


def test_threads_that_map_copy_and_unmap_do_not_disturb_each_other():
    before = counts()

    def work(seed):
        random_numbers = random.Random(seed)
        machine = Machine("host", seed % 4)
        driver = machine.driver
        stream, event = machine.stream(), machine.event()
        address, buffer = machine.reserve(8 * GRANULE), machine.pinned(4096)
        for _ in range(60):
            count = random_numbers.randint(1, 4)
            size = count * GRANULE
            handle = machine.ok(driver.mem_create(machine.ordinal, size))
            machine.ok(driver.mem_map(address, size, handle))
            machine.ok(driver.mem_set_access(address, size, machine.ordinal))
            value = random_numbers.randrange(256)
            machine.fill(address, value, size, stream)
            machine.ok(driver.memcpy_dtoh(buffer.address, address + size - 4096, 4096, stream))
            machine.ok(driver.ctx_record_event(machine.context, event))
            machine.ok(driver.ctx_wait_event(machine.context, event))
            machine.ok(driver.event_synchronize(event))
            assert buffer.bytes() == bytes([value]) * 4096
            machine.ok(driver.mem_unmap(address, size))
            machine.ok(driver.mem_release(handle))
        machine.close()

    errors = []

    def guarded(seed):
        try:
            work(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert counts() == before
