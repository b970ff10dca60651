"""The rules of the CUDA driver that fencepool rests on, asked of every provider.

The embedded driver must keep them; the real one, where there is a GPU, shows that they are the rules.
No order is proven by sleeping: a latch holds a stream until the test lets it go.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import pytest

from fencepool import _core
from support import children
from support.raw_machine import (
    ACTIVE,
    ALREADY_REGISTERED,
    BLOCKING,
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_MERGE,
    CAPTURE_UNJOINED,
    CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD,
    CAPTURED_EVENT,
    GLOBAL,
    GRANULE,
    ILLEGAL_ADDRESS,
    ILLEGAL_STATE,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_PTX,
    INVALID_VALUE,
    INVALIDATED,
    LEGACY_STREAM,
    MIB,
    NO_ACCESS,
    NON_BLOCKING,
    NONE,
    NOT_FOUND,
    NOT_READY,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    ON_HOST,
    OUT_OF_MEMORY,
    READ_WRITE,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    HostBuffer,
    Machine,
    in_thread,
    raw,
)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def provider(request):
    try:
        raw.Driver(request.param)
    except Exception as reason:
        pytest.skip(f"no {request.param} driver: {reason}")
    return request.param


@pytest.fixture
def machine(provider):
    before = vars_of(raw.counts())
    machine = Machine(provider)
    yield machine
    machine.close()
    assert vars_of(raw.counts()) == before


def vars_of(counts):
    return {name: getattr(counts, name) for name in dir(counts) if not name.startswith("_")}


# The library and contexts


def test_errors_have_names_and_descriptions(machine):
    assert machine.driver.error_name(INVALID_VALUE) == (SUCCESS, "CUDA_ERROR_INVALID_VALUE")
    assert machine.driver.error_name(CAPTURE_UNSUPPORTED) == (
        SUCCESS,
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    )
    assert machine.driver.error_name(123456) == (INVALID_VALUE, "")
    code, text = machine.driver.error_string(OUT_OF_MEMORY)
    assert code == SUCCESS
    assert "memory" in text


def test_devices_are_numbered_from_zero(machine):
    count = machine.ok(machine.driver.device_count())
    assert count >= 1
    assert machine.ok(machine.driver.device_get(count - 1)) == count - 1
    assert machine.driver.device_get(count)[0] == INVALID_DEVICE
    assert machine.ok(machine.driver.device_name(0))
    assert machine.driver.device_bus_id(0)[1].count(":") == 2
    assert machine.ok(machine.driver.device_total_mem(0)) >= machine.free_bytes()


def test_calls_that_need_a_context_say_so(machine):
    driver = machine.driver
    host = HostBuffer(4096)
    address = machine.memory()

    def codes():
        return [
            driver.mem_get_info()[0],
            driver.stream_create()[0],
            driver.event_create()[0],
            driver.ctx_synchronize(),
            driver.host_register(host.address, host.size),
            driver.memset_d8(address, 0, 16, 0),
            driver.stream_get_ctx(0)[0],
            driver.pop()[0],
        ]

    assert in_thread(codes) == [INVALID_CONTEXT] * 8


def test_each_thread_has_its_own_stack_of_contexts(machine):
    driver = machine.driver

    def other_thread():
        assert driver.current() == (SUCCESS, 0)
        assert driver.push(machine.context) == SUCCESS
        assert driver.push(machine.context) == SUCCESS
        assert driver.current() == (SUCCESS, machine.context)
        assert [driver.pop() for _ in range(2)] == [(SUCCESS, machine.context)] * 2
        return driver.current()

    assert in_thread(other_thread) == (SUCCESS, 0)
    assert driver.current() == (SUCCESS, machine.context)


def test_a_stream_knows_its_context(machine):
    assert machine.driver.stream_get_ctx(machine.stream()) == (SUCCESS, machine.context)
    assert machine.driver.stream_get_ctx(LEGACY_STREAM) == (SUCCESS, machine.context)


# Address ranges, physical memory, mappings


def test_granularity_is_two_mebibytes(machine):
    assert machine.driver.granularity(0, 0) == (SUCCESS, GRANULE)
    assert machine.driver.granularity(0, 1) == (SUCCESS, GRANULE)


def test_sizes_are_multiples_of_the_granularity(machine):
    for size in (0, 4096, GRANULE + 4096):
        assert machine.driver.mem_create(0, size)[0] == INVALID_VALUE
    assert machine.driver.address_reserve(0)[0] == INVALID_VALUE


@pytest.mark.parametrize("alignment", [0, GRANULE, 64 * MIB, 512 * MIB])
def test_a_range_is_aligned_as_asked(machine, alignment):
    assert machine.reserve(4 * MIB, alignment) % max(alignment, GRANULE) == 0


def test_an_alignment_must_be_a_power_of_two(machine):
    assert machine.driver.address_reserve(GRANULE, 3 * MIB)[0] == INVALID_VALUE


def test_a_range_is_freed_as_it_was_reserved(machine):
    driver = machine.driver
    address = machine.ok(driver.address_reserve(2 * GRANULE))
    assert driver.address_free(address, GRANULE) == INVALID_VALUE
    assert driver.address_free(address + GRANULE, GRANULE) == INVALID_VALUE
    assert driver.address_free(address, 2 * GRANULE) == SUCCESS


def test_physical_memory_is_made_on_a_device_that_exists(machine):
    assert machine.driver.mem_create(99, GRANULE)[0] in (INVALID_DEVICE, INVALID_VALUE)
    assert machine.driver.mem_create(0, GRANULE, type=0)[0] == INVALID_VALUE


def mapped_host_memory(machine, size=GRANULE):
    """An address where memory of the host's first NUMA node is mapped, without access."""
    address = machine.reserve(size)
    handle = machine.ok(machine.driver.mem_create(0, size, location=ON_HOST))
    machine.undo(machine.driver.mem_release, handle)
    machine.map(address, size, handle, NO_ACCESS)
    return address


def test_host_memory_is_not_the_devices_and_has_its_granularity(machine):
    assert GRANULE % machine.ok(machine.driver.granularity(0, 0, ON_HOST)) == 0
    before = machine.free_bytes()
    mapped_host_memory(machine, 4 * GRANULE)
    assert machine.free_bytes() == before


def test_host_memory_at_a_device_address_is_read_and_written_by_both(machine):
    driver, stream = machine.driver, machine.stream()
    address = mapped_host_memory(machine)
    machine.ok(driver.mem_set_access(address, GRANULE, 0))
    machine.ok(driver.mem_set_access(address, GRANULE, 0, READ_WRITE, ON_HOST))
    assert driver.mem_get_access(address, 0) == (SUCCESS, READ_WRITE)
    assert driver.mem_get_access(address, 0, ON_HOST) == (SUCCESS, READ_WRITE)
    other = machine.memory()
    machine.ok(driver.memset_d8(address, 5, GRANULE, stream))
    machine.ok(driver.memcpy_dtod(other, address, 64, stream))
    machine.ok(driver.stream_synchronize(stream))
    assert ctypes.string_at(address, 4) == bytes([5] * 4)
    ctypes.memset(address, 7, 64)
    machine.ok(driver.memcpy_dtod(other + 64, address, 64, stream))
    assert machine.read(other, 128, stream) == bytes([5] * 64 + [7] * 64)


def test_the_host_is_given_access_to_its_own_memory_alone(machine):
    driver = machine.driver
    address = machine.memory()
    assert driver.mem_set_access(address, GRANULE, 0, READ_WRITE, ON_HOST) != SUCCESS
    assert driver.mem_get_access(address, 0, ON_HOST)[1] == NO_ACCESS


def test_a_mapping_covers_free_reserved_addresses(machine):
    driver = machine.driver
    address = machine.reserve(4 * GRANULE)
    handle = machine.create(2 * GRANULE)
    machine.map(address, 2 * GRANULE, handle)
    other = machine.create(2 * GRANULE)
    assert driver.mem_map(address, 2 * GRANULE, other) == INVALID_VALUE
    assert driver.mem_map(address + GRANULE, 2 * GRANULE, other) == INVALID_VALUE
    if machine.is_host:  # NVIDIA's driver lets a mapping run into a reservation that adjoins
        assert driver.mem_map(address + 3 * GRANULE, 2 * GRANULE, other) == INVALID_VALUE
    machine.map(address + 2 * GRANULE, 2 * GRANULE, other)


def test_a_mapping_starts_at_offset_zero(machine):
    address = machine.reserve(GRANULE)
    code = machine.driver.mem_map(address, GRANULE, machine.create(2 * GRANULE), GRANULE)
    assert code in (INVALID_VALUE, NOT_SUPPORTED)


def test_only_whole_mappings_are_unmapped(machine):
    driver = machine.driver
    address = machine.reserve(6 * GRANULE)
    for index in range(3):
        handle = machine.create(2 * GRANULE)
        machine.ok(driver.mem_map(address + 2 * index * GRANULE, 2 * GRANULE, handle))
    assert driver.mem_unmap(address, GRANULE) == INVALID_VALUE
    assert driver.mem_unmap(address + GRANULE, GRANULE) == INVALID_VALUE
    assert driver.mem_unmap(address, 3 * GRANULE) == INVALID_VALUE
    assert driver.mem_unmap(address, 6 * GRANULE) == SUCCESS  # several neighbours in one call
    if machine.is_host:  # NVIDIA's driver lets it pass
        assert driver.mem_unmap(address, 2 * GRANULE) == INVALID_VALUE


def test_access_starts_with_none_and_is_lost_by_unmapping(machine):
    driver = machine.driver
    address = machine.reserve(GRANULE)
    handle = machine.create(GRANULE)
    machine.ok(driver.mem_map(address, GRANULE, handle))
    assert driver.mem_get_access(address, 0) == (SUCCESS, NO_ACCESS)
    assert driver.mem_set_access(address, GRANULE, 0, READ_WRITE) == SUCCESS
    assert driver.mem_get_access(address, 0) == (SUCCESS, READ_WRITE)
    machine.ok(driver.mem_unmap(address, GRANULE))
    assert driver.mem_get_access(address, 0)[0] == INVALID_VALUE
    machine.map(address, GRANULE, handle, NO_ACCESS)
    assert driver.mem_get_access(address, 0) == (SUCCESS, NO_ACCESS)


def test_access_is_set_on_a_range_without_holes(machine):
    driver = machine.driver
    address = machine.reserve(4 * GRANULE)
    for index in (0, 1, 3):
        machine.map(address + index * GRANULE, GRANULE, machine.create(GRANULE), NO_ACCESS)
    if machine.is_host:  # NVIDIA's driver passes over the hole
        assert driver.mem_set_access(address, 4 * GRANULE, 0) == INVALID_VALUE
    assert driver.mem_set_access(address, 2 * GRANULE, 0) == SUCCESS
    assert driver.mem_get_access(address + 2 * GRANULE - 1, 0) == (SUCCESS, READ_WRITE)
    assert driver.mem_get_access(address + 3 * GRANULE, 0) == (SUCCESS, NO_ACCESS)


def test_one_handle_is_mapped_at_two_addresses(machine):
    first, second = machine.reserve(GRANULE), machine.reserve(GRANULE)
    handle = machine.create(GRANULE)
    machine.map(first, GRANULE, handle)
    machine.map(second, GRANULE, handle)
    stream = machine.stream()
    machine.fill(first, 0x5A, GRANULE, stream)
    assert machine.read(second, GRANULE, stream) == b"\x5a" * GRANULE


def test_addresses_outlive_their_memory(machine):
    driver = machine.driver
    address = machine.reserve(GRANULE)
    stream = machine.stream()
    for value in (1, 2, 3):
        handle = machine.ok(driver.mem_create(0, GRANULE))
        machine.ok(driver.mem_map(address, GRANULE, handle))
        machine.ok(driver.mem_set_access(address, GRANULE, 0))
        machine.fill(address, value, GRANULE, stream)
        assert machine.read(address, 16, stream) == bytes([value]) * 16
        machine.ok(driver.mem_unmap(address, GRANULE))
        machine.ok(driver.mem_release(handle))


def test_memory_is_freed_with_its_last_handle_and_mapping(machine):
    driver = machine.driver
    size = 64 * MIB
    address = machine.reserve(size)
    free = machine.free_bytes()
    handle = machine.ok(driver.mem_create(0, size))
    assert machine.free_bytes() <= free - size
    machine.ok(driver.mem_map(address, size, handle))
    machine.ok(driver.mem_set_access(address, size, 0))
    machine.ok(driver.mem_release(handle))  # legal while it is mapped
    assert machine.free_bytes() <= free - size
    stream = machine.stream()
    machine.fill(address, 7, size, stream)
    assert machine.read(address, 16, stream) == b"\x07" * 16
    before_unmap = machine.free_bytes()
    machine.ok(driver.mem_unmap(address, size))
    assert machine.free_bytes() >= before_unmap + size


def test_memory_stays_while_a_handle_is_left(machine):
    driver = machine.driver
    address, stream = machine.reserve(GRANULE), machine.stream()
    handle = machine.create(GRANULE)
    machine.ok(driver.mem_map(address, GRANULE, handle))
    machine.ok(driver.mem_set_access(address, GRANULE, 0))
    machine.fill(address, 9, GRANULE, stream)
    machine.ok(driver.stream_synchronize(stream))
    machine.ok(driver.mem_unmap(address, GRANULE))
    machine.map(address, GRANULE, handle)
    assert machine.read(address, 16, stream) == b"\x09" * 16


def test_a_retained_handle_is_the_one_that_was_mapped(machine):
    driver = machine.driver
    address = machine.reserve(GRANULE)
    assert driver.mem_retain(address)[0] == INVALID_VALUE
    handle = machine.ok(driver.mem_create(0, GRANULE))
    machine.map(address, GRANULE, handle)
    machine.ok(driver.mem_release(handle))
    assert driver.mem_retain(address + 4096) == (SUCCESS, handle)
    assert driver.mem_release(handle) == SUCCESS


def test_an_exported_descriptor_is_the_same_memory(machine):
    driver = machine.driver
    first, second, stream = machine.reserve(GRANULE), machine.reserve(GRANULE), machine.stream()
    handle = machine.create(GRANULE, exportable=True)
    machine.map(first, GRANULE, handle)
    descriptor = machine.ok(driver.mem_export(handle))
    imported = machine.ok(driver.mem_import(descriptor))
    os.close(descriptor)
    machine.undo(driver.mem_release, imported)
    machine.map(second, GRANULE, imported)
    machine.fill(first, 0x3C, GRANULE, stream)
    assert machine.read(second, GRANULE, stream) == b"\x3c" * GRANULE


def test_memory_made_without_export_is_not_exported(machine):
    assert machine.driver.mem_export(machine.create(GRANULE))[0] != SUCCESS


# Host memory and copies


def test_host_memory_is_registered_once(machine):
    driver = machine.driver
    buffer = HostBuffer(MIB)
    assert driver.host_unregister(buffer.address) == NOT_REGISTERED
    machine.ok(driver.host_register(buffer.address, MIB // 2))
    assert driver.host_register(buffer.address, MIB // 2) == ALREADY_REGISTERED
    assert driver.host_register(buffer.address + MIB // 4, MIB // 2) == ALREADY_REGISTERED
    machine.ok(driver.host_register(buffer.address + MIB // 2, MIB // 2))
    assert driver.host_unregister(buffer.address) == SUCCESS
    assert driver.host_unregister(buffer.address + MIB // 2) == SUCCESS
    assert driver.host_unregister(buffer.address) == NOT_REGISTERED


def test_no_host_memory_is_not_registered(machine):
    assert machine.driver.host_register(0, 4096) == INVALID_VALUE
    assert machine.driver.host_register(HostBuffer(4096).address, 0) == INVALID_VALUE


def test_registered_memory_has_an_address_on_the_device(machine):
    buffer = machine.pinned(MIB)
    address = machine.ok(machine.driver.host_device_pointer(buffer.address))
    assert machine.provider != "host" or address == buffer.address
    assert machine.driver.host_device_pointer(HostBuffer(MIB).address)[0] == INVALID_VALUE


@pytest.fixture
def kernel(machine):
    """The digest kernel's module and function; not every build has it for a GPU."""
    if machine.provider == "cuda" and (reason := _core.load_kernels("cuda", 0)):
        pytest.skip(reason)
    module = machine.ok(machine.driver.module_load())
    machine.undo(machine.driver.module_unload, module)
    return machine.ok(machine.driver.module_function(module))


def test_a_module_has_its_functions_until_it_is_unloaded(machine, kernel):
    driver = machine.driver
    # The real driver takes text for PTX.
    assert driver.module_load("no image at all, and long enough to be looked at")[0] in (
        INVALID_IMAGE,
        INVALID_PTX,
    )
    module = machine.ok(driver.module_load())
    assert driver.module_function(module, "no such function")[0] == NOT_FOUND
    machine.ok(driver.module_function(module))
    machine.ok(driver.module_unload(module))
    if machine.provider == "host":  # the real driver takes the handle's word
        assert driver.module_unload(module) == INVALID_HANDLE


def test_a_kernel_runs_in_order_on_its_stream(machine, kernel):
    driver = machine.driver
    memory, output, stream = machine.memory(), machine.pinned(4096), machine.stream()
    latch = machine.latch(stream)
    machine.ok(driver.memset_d8(memory, 7, GRANULE, stream))
    assert output.bytes() == bytes(4096)
    machine.ok(driver.launch_digest(kernel, output.address, memory, GRANULE, stream))
    assert driver.stream_query(stream) == NOT_READY
    latch.open()
    machine.ok(driver.stream_synchronize(stream))
    expected = _core.digest_on_cpu(bytes([7]) * _core.DIGEST_BLOCK)
    assert output.bytes()[: 8 * 16] == expected * 8


def test_a_kernel_that_touches_unmapped_memory_ends_the_context():
    """In a process of its own, on the embedded driver: on a GPU the context would be lost to all tests."""
    children.run_silently(
        """
        from fencepool._core import raw
        driver = raw.Driver("host")
        ok = lambda answer: answer[1] if isinstance(answer, tuple) and answer[0] == 0 else answer
        driver.push(ok(driver.primary_retain(0)))
        address = ok(driver.address_reserve(2 << 20, 0, 0))
        stream = ok(driver.stream_create(1))
        function = ok(driver.module_function(ok(driver.module_load())))
        assert driver.launch_digest(function, address, address, 2 << 20, stream) == 0
        assert driver.stream_synchronize(stream) == 700
        assert driver.ctx_synchronize() == 700
        """
    )


def test_copies_carry_bytes_there_and_back(machine):
    driver = machine.driver
    size = 3 * MIB + 123  # several chunks, and an odd end
    source, target = machine.pinned(size), machine.pinned(size)
    source.fill(0x11)
    first, second, stream = machine.memory(4 * MIB), machine.memory(4 * MIB), machine.stream()
    machine.ok(driver.memcpy_htod(first, source.address, size, stream))
    machine.ok(driver.memset_d8(first + MIB, 0x22, MIB, stream))
    machine.ok(driver.memcpy_dtod(second, first, size, stream))
    machine.ok(driver.memcpy_dtoh(target.address, second, size, stream))
    machine.ok(driver.stream_synchronize(stream))
    assert target.bytes() == b"\x11" * MIB + b"\x22" * MIB + b"\x11" * (MIB + 123)


def test_a_copy_of_nothing_succeeds(machine):
    assert machine.driver.memset_d8(machine.memory(), 1, 0, machine.stream()) == SUCCESS


def test_a_pageable_copy_out_is_done_when_the_call_returns(machine):
    address, stream = machine.memory(), machine.stream()
    machine.fill(address, 0x44, GRANULE, stream)
    buffer = HostBuffer(GRANULE)
    machine.ok(machine.driver.memcpy_dtoh(buffer.address, address, GRANULE, stream))
    assert buffer.bytes() == b"\x44" * GRANULE  # nothing was synchronised


def test_a_pageable_copy_in_has_read_its_source_when_the_call_returns(machine):
    address, stream = machine.memory(), machine.stream()
    buffer = HostBuffer(GRANULE)
    buffer.fill(0x55)
    machine.ok(machine.driver.memcpy_htod(address, buffer.address, GRANULE, stream))
    buffer.fill(0)
    assert machine.read(address, GRANULE, stream) == b"\x55" * GRANULE


def test_a_pinned_copy_does_not_hold_the_host(machine):
    address, stream = machine.memory(), machine.stream()
    buffer = machine.pinned(GRANULE)
    latch = machine.latch(stream)
    machine.ok(machine.driver.memcpy_dtoh(buffer.address, address, GRANULE, stream))
    assert machine.driver.stream_query(stream) == NOT_READY
    latch.open()
    machine.ok(machine.driver.stream_synchronize(stream))


def test_a_copy_is_of_registered_memory_or_of_none(machine):
    address, stream = machine.memory(), machine.stream()
    buffer = machine.host(MIB)
    machine.ok(machine.driver.host_register(buffer.address, MIB // 2))
    machine.undo(machine.driver.host_unregister, buffer.address)
    assert machine.driver.memcpy_htod(address, buffer.address, MIB, stream) == INVALID_VALUE


# Streams and events


def test_work_on_a_stream_is_in_order(machine):
    driver = machine.driver
    address, stream = machine.memory(), machine.stream()
    buffer = machine.pinned(16)
    latch = machine.latch(stream)
    machine.fill(address, 1, 16, stream)
    machine.fill(address, 2, 8, stream)
    machine.ok(driver.memcpy_dtoh(buffer.address, address, 16, stream))
    assert driver.stream_query(stream) == NOT_READY
    assert buffer.bytes() == b"\0" * 16
    latch.open()
    machine.ok(driver.stream_synchronize(stream))
    assert driver.stream_query(stream) == SUCCESS
    assert buffer.bytes() == b"\2" * 8 + b"\1" * 8


def test_streams_do_not_wait_for_each_other(machine):
    held, free, address = machine.stream(), machine.stream(), machine.memory()
    machine.latch(held)
    machine.fill(address, 1, 16, free)
    machine.ok(machine.driver.stream_synchronize(free))
    assert machine.driver.stream_query(held) == NOT_READY


def test_an_event_never_recorded_is_complete(machine):
    event = machine.event()
    assert machine.driver.event_query(event) == SUCCESS
    assert machine.driver.event_synchronize(event) == SUCCESS
    machine.ok(machine.driver.stream_wait_event(machine.stream(), event))


def test_an_event_stands_for_the_work_before_it(machine):
    driver = machine.driver
    stream, early, late = machine.stream(), machine.event(), machine.event()
    machine.ok(driver.event_record(early, stream))
    machine.ok(driver.event_synchronize(early))
    latch = machine.latch(stream)
    machine.ok(driver.event_record(late, stream))
    assert driver.event_query(early) == SUCCESS
    assert driver.event_query(late) == NOT_READY
    latch.open()
    machine.ok(driver.event_synchronize(late))
    assert driver.event_query(late) == SUCCESS


def test_a_stream_waits_for_an_event(machine):
    driver = machine.driver
    address, first, second = machine.memory(), machine.stream(), machine.stream()
    event, done = machine.event(), machine.event()
    latch = machine.latch(first)
    machine.fill(address, 1, 16, first)
    machine.ok(driver.event_record(event, first))
    machine.ok(driver.stream_wait_event(second, event))
    machine.fill(address, 2, 16, second)
    machine.ok(driver.event_record(done, second))
    assert driver.event_query(done) == NOT_READY
    latch.open()
    machine.ok(driver.event_synchronize(done))
    assert machine.read(address, 16) == b"\2" * 16


def test_a_wait_is_for_the_record_before_it(machine):
    driver = machine.driver
    first, second, event = machine.stream(), machine.stream(), machine.event()
    machine.ok(driver.event_record(event, first))
    machine.ok(driver.stream_wait_event(second, event))
    machine.latch(first)
    machine.ok(driver.event_record(event, first))  # moves the event, not the wait
    machine.ok(driver.stream_synchronize(second))
    assert driver.event_query(event) == NOT_READY


def test_a_destroyed_event_is_still_waited_for(machine):
    driver = machine.driver
    first, second = machine.stream(), machine.stream()
    event = machine.ok(driver.event_create())
    latch = machine.latch(first)
    machine.ok(driver.event_record(event, first))
    machine.ok(driver.stream_wait_event(second, event))
    machine.ok(driver.event_destroy(event))
    assert driver.stream_query(second) == NOT_READY
    latch.open()
    machine.ok(driver.stream_synchronize(second))


def test_a_destroyed_stream_finishes_its_work(machine):
    driver = machine.driver
    address, event = machine.memory(), machine.event()
    stream = machine.ok(driver.stream_create())
    latch = raw.Latch()
    machine.ok(driver.hold(latch, stream))
    machine.fill(address, 6, 16, stream)
    machine.ok(driver.event_record(event, stream))
    machine.ok(driver.stream_destroy(stream))  # returns at once
    assert driver.event_query(event) == NOT_READY
    latch.open()
    machine.ok(driver.event_synchronize(event))
    assert machine.read(address, 16) == b"\6" * 16


def test_a_context_is_synchronised_with_all_its_streams(machine):
    streams = [machine.stream() for _ in range(3)]
    latches = [machine.latch(stream, is_first=stream == streams[0]) for stream in streams]
    for latch in latches:
        latch.open()
    machine.ok(machine.driver.ctx_synchronize())
    assert [latch.passed for latch in latches] == [1, 1, 1]


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(machine):
    driver = machine.driver
    blocking, free = machine.stream(BLOCKING), machine.stream(NON_BLOCKING)
    address = machine.memory()
    latch = machine.latch(blocking)
    machine.fill(address, 1, 16, LEGACY_STREAM)
    machine.fill(address, 1, 16, free)
    machine.ok(driver.stream_synchronize(free))
    assert driver.stream_query(LEGACY_STREAM) == NOT_READY
    latch.open()
    machine.ok(driver.stream_synchronize(LEGACY_STREAM))

    latch = machine.latch(LEGACY_STREAM)
    machine.fill(address, 2, 16, blocking)
    assert driver.stream_query(blocking) == NOT_READY
    latch.open()
    machine.ok(driver.stream_synchronize(blocking))


# The whole context


def needs_context_events(machine):
    if machine.driver.ctx_record_event(machine.context, machine.event()) == NOT_SUPPORTED:
        pytest.skip("cuCtxRecordEvent came with CUDA 12.5")


def test_a_context_event_stands_for_the_work_of_every_stream(machine):
    needs_context_events(machine)
    driver = machine.driver
    event, streams = machine.event(), (machine.stream(), machine.stream())
    first, second = machine.latch(streams[0]), machine.latch(streams[1], is_first=False)
    machine.ok(driver.ctx_record_event(machine.context, event))
    assert driver.event_query(event) == NOT_READY
    first.open()
    assert driver.event_query(event) == NOT_READY
    second.open()
    machine.ok(driver.event_synchronize(event))


def test_a_context_event_does_not_stand_for_later_work(machine):
    needs_context_events(machine)
    event, stream = machine.event(), machine.stream()
    machine.ok(machine.driver.ctx_record_event(machine.context, event))
    machine.latch(stream)
    machine.ok(machine.driver.event_synchronize(event))


def test_streams_there_and_to_come_wait_for_a_context_wait(machine):
    needs_context_events(machine)
    driver = machine.driver
    source, present, event = machine.stream(), machine.stream(), machine.event()
    address, buffer = machine.memory(), machine.pinned(48)
    latch = machine.latch(source)
    machine.fill(address, 1, 48, source)
    machine.ok(driver.event_record(event, source))
    machine.ok(driver.ctx_wait_event(machine.context, event))
    future = machine.stream()
    for index, stream in enumerate((present, future, LEGACY_STREAM)):
        start = 16 * index
        machine.ok(driver.memcpy_dtoh(buffer.address + start, address + start, 16, stream))
        assert driver.stream_query(stream) == NOT_READY
    latch.open()
    machine.ok(driver.ctx_synchronize())
    assert buffer.bytes() == b"\1" * 48


def test_a_graph_launch_waits_for_a_context_wait(machine):
    needs_context_events(machine)
    driver = machine.driver
    source, stream, event = machine.stream(), machine.stream(), machine.event()
    address, buffer = machine.memory(), machine.pinned(16)
    machine.ok(driver.begin_capture(stream))
    machine.ok(driver.memcpy_dtoh(buffer.address, address, 16, stream))
    executable = machine.graph(stream)
    latch = machine.latch(source)
    machine.fill(address, 5, 16, source)
    machine.ok(driver.event_record(event, source))
    machine.ok(driver.ctx_wait_event(machine.context, event))
    machine.ok(driver.graph_launch(executable, stream))
    assert driver.stream_query(stream) == NOT_READY
    latch.open()
    machine.ok(driver.stream_synchronize(stream))
    assert buffer.bytes() == b"\5" * 16


@pytest.mark.parametrize("call", ["ctx_record_event", "ctx_wait_event"])
def test_context_events_break_a_capture(machine, call):
    needs_context_events(machine)
    driver = machine.driver
    stream, event = machine.stream(), machine.event()
    machine.ok(driver.begin_capture(stream, RELAXED))
    assert getattr(driver, call)(machine.context, event) == CAPTURE_UNSUPPORTED
    assert machine.capture_status(stream) == INVALIDATED
    assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED
    assert machine.capture_status(stream) == NONE
    assert getattr(driver, call)(machine.context, event) == SUCCESS


# Captures and graphs


def test_captured_work_runs_when_its_graph_is_launched(machine):
    driver = machine.driver
    address, stream = machine.memory(), machine.stream()
    machine.fill(address, 1, 16, stream)
    machine.ok(driver.stream_synchronize(stream))
    machine.ok(driver.begin_capture(stream))
    assert machine.capture_status(stream) == ACTIVE
    machine.fill(address, 2, 16, stream)
    executable = machine.graph(stream)
    assert machine.capture_status(stream) == NONE
    assert machine.read(address, 16) == b"\1" * 16
    for _ in range(2):
        machine.ok(driver.graph_launch(executable, stream))
        assert machine.read(address, 16, stream) == b"\2" * 16
        machine.fill(address, 1, 16, stream)


def test_a_launch_is_in_the_order_of_its_stream(machine):
    driver = machine.driver
    address, stream = machine.memory(), machine.stream()
    machine.ok(driver.begin_capture(stream))
    machine.fill(address, 8, 16, stream)
    executable = machine.graph(stream)
    other = machine.stream()
    latch = machine.latch(other)
    machine.ok(driver.graph_launch(executable, other))
    assert driver.stream_query(other) == NOT_READY
    latch.open()
    assert machine.read(address, 16, other) == b"\x08" * 16


def test_launches_of_one_graph_do_not_overlap(machine):
    driver = machine.driver
    address = machine.memory()
    first, second = machine.stream(), machine.stream()
    machine.ok(driver.begin_capture(first))
    machine.fill(address, 8, 16, first)
    executable = machine.graph(first)
    latch = machine.latch(first)
    machine.ok(driver.graph_launch(executable, first))
    machine.ok(driver.graph_launch(executable, second))  # behind the launch on the other stream
    assert driver.stream_query(second) == NOT_READY
    latch.open()
    machine.ok(driver.stream_synchronize(second))


def test_a_launched_graph_may_be_destroyed(machine):
    driver = machine.driver
    address, stream = machine.memory(), machine.stream()
    machine.ok(driver.begin_capture(stream))
    machine.fill(address, 3, 16, stream)
    graph = machine.ok(driver.end_capture(stream))
    executable = machine.ok(driver.graph_instantiate(graph))
    machine.ok(driver.graph_destroy(graph))
    latch = machine.latch(stream)
    machine.ok(driver.graph_launch(executable, stream))
    machine.ok(driver.graph_exec_destroy(executable))
    latch.open()
    assert machine.read(address, 16, stream) == b"\3" * 16


@pytest.mark.parametrize("call", ["stream_synchronize", "stream_query"])
def test_a_capturing_stream_is_not_waited_for(machine, call):
    driver, stream = machine.driver, machine.stream()
    machine.ok(driver.begin_capture(stream, RELAXED))
    assert getattr(driver, call)(stream) == CAPTURE_UNSUPPORTED
    assert machine.capture_status(stream) == INVALIDATED
    code, graph = driver.end_capture(stream)
    assert (code, graph) == (CAPTURE_INVALIDATED, 0)


def test_a_context_with_a_capture_is_not_waited_for(machine):
    driver, stream = machine.driver, machine.stream()
    machine.ok(driver.begin_capture(stream))
    assert driver.ctx_synchronize() == CAPTURE_UNSUPPORTED
    assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_an_event_query_breaks_a_global_capture(machine):
    driver, stream, event = machine.driver, machine.stream(), machine.event()
    machine.ok(driver.event_record(event, machine.stream()))
    machine.ok(driver.begin_capture(stream, GLOBAL))
    assert driver.event_query(event) == CAPTURE_UNSUPPORTED
    assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_an_event_query_of_another_thread_breaks_a_global_capture(machine):
    driver, stream, event = machine.driver, machine.stream(), machine.event()
    machine.ok(driver.event_record(event, machine.stream()))
    machine.ok(driver.begin_capture(stream, GLOBAL))
    assert machine.in_thread(lambda: driver.event_query(event)) == CAPTURE_UNSUPPORTED
    assert machine.capture_status(stream) == INVALIDATED
    assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_a_relaxed_thread_may_query_events_during_a_capture(machine):
    driver, stream, event = machine.driver, machine.stream(), machine.event()
    machine.ok(driver.begin_capture(stream, GLOBAL))
    assert driver.exchange_capture_mode(RELAXED) == (SUCCESS, GLOBAL)
    assert driver.event_query(event) == SUCCESS
    assert driver.event_synchronize(event) == SUCCESS
    assert driver.exchange_capture_mode(GLOBAL) == (SUCCESS, RELAXED)
    machine.graph(stream)


@pytest.mark.parametrize("mode", [THREAD_LOCAL, RELAXED])
def test_a_capture_that_is_not_global_does_not_mind_other_threads(machine, mode):
    driver, stream, event = machine.driver, machine.stream(), machine.event()
    machine.ok(driver.begin_capture(stream, mode))
    assert machine.in_thread(lambda: driver.event_query(event)) == SUCCESS
    machine.graph(stream)


def test_the_capture_mode_is_a_threads_own(machine):
    driver = machine.driver
    assert driver.exchange_capture_mode(THREAD_LOCAL) == (SUCCESS, GLOBAL)
    assert machine.in_thread(lambda: driver.exchange_capture_mode(RELAXED)) == (SUCCESS, GLOBAL)
    assert driver.exchange_capture_mode(GLOBAL) == (SUCCESS, THREAD_LOCAL)
    if machine.is_host:  # NVIDIA's driver does not look at the value
        assert driver.exchange_capture_mode(9)[0] == INVALID_VALUE


def test_an_event_recorded_in_a_capture_is_not_queried(machine):
    driver, stream, event = machine.driver, machine.stream(), machine.event()
    machine.ok(driver.begin_capture(stream, RELAXED))
    machine.ok(driver.event_record(event, stream))
    assert driver.event_query(event) == CAPTURED_EVENT
    machine.end_capture(stream)


def test_a_capture_is_ended_by_the_thread_that_began_it(machine):
    driver, stream = machine.driver, machine.stream()
    machine.ok(driver.begin_capture(stream, GLOBAL))
    assert machine.in_thread(lambda: driver.end_capture(stream)[0]) == CAPTURE_WRONG_THREAD
    machine.end_capture(stream)
    machine.ok(driver.begin_capture(stream, RELAXED))
    graph = machine.ok(machine.in_thread(lambda: driver.end_capture(stream)))
    machine.ok(driver.graph_destroy(graph))


def test_the_legacy_stream_is_not_captured(machine):
    assert machine.driver.begin_capture(LEGACY_STREAM, RELAXED) == CAPTURE_UNSUPPORTED


def test_a_capture_is_begun_once(machine):
    driver, stream = machine.driver, machine.stream()
    machine.ok(driver.begin_capture(stream, RELAXED))
    assert driver.begin_capture(stream, RELAXED) in (ILLEGAL_STATE, INVALID_VALUE)
    machine.end_capture(stream)
    assert driver.end_capture(stream)[0] in (ILLEGAL_STATE, INVALID_VALUE)


def test_the_legacy_stream_is_unusable_while_a_blocking_stream_captures(machine):
    driver, stream, address = machine.driver, machine.stream(BLOCKING), machine.memory()
    machine.ok(driver.begin_capture(stream, RELAXED))
    assert driver.stream_is_capturing(LEGACY_STREAM)[0] == CAPTURE_IMPLICIT
    assert machine.capture_status(stream) == ACTIVE
    assert driver.memset_d8(address, 1, 16, LEGACY_STREAM) == CAPTURE_IMPLICIT
    assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED


def fork(machine, origin):
    """Makes a second stream part of the origin's capture."""
    side, event = machine.stream(), machine.event()
    machine.ok(machine.driver.event_record(event, origin))
    machine.ok(machine.driver.stream_wait_event(side, event))
    return side


def test_a_capture_spreads_along_events(machine):
    driver, origin, joined = machine.driver, machine.stream(), machine.event()
    address = machine.memory()
    machine.ok(driver.begin_capture(origin))
    machine.fill(address, 1, 16, origin)
    side = fork(machine, origin)
    assert machine.capture_status(side) == ACTIVE
    machine.fill(address, 2, 8, side)
    machine.ok(driver.event_record(joined, side))
    machine.ok(driver.stream_wait_event(origin, joined))
    executable = machine.graph(origin)
    assert machine.capture_status(side) == NONE
    machine.ok(driver.graph_launch(executable, origin))
    assert machine.read(address, 16, origin) == b"\2" * 8 + b"\1" * 8


def test_a_fork_must_be_joined(machine):
    driver, origin, address = machine.driver, machine.stream(), machine.memory()
    machine.ok(driver.begin_capture(origin))
    machine.fill(address, 1, 16, origin)
    side = fork(machine, origin)
    machine.fill(address, 2, 16, side)
    assert driver.end_capture(origin)[0] == CAPTURE_UNJOINED
    assert machine.capture_status(side) == NONE


def test_a_capture_is_ended_on_its_first_stream(machine):
    driver, origin, address = machine.driver, machine.stream(), machine.memory()
    machine.ok(driver.begin_capture(origin))
    machine.fill(address, 1, 16, origin)
    assert driver.end_capture(fork(machine, origin))[0] == CAPTURE_UNMATCHED
    machine.end_capture(origin)


def test_captured_work_does_not_wait_for_other_work(machine):
    driver, stream, other, event = machine.driver, machine.stream(), machine.stream(), machine.event()
    machine.ok(driver.event_record(event, other))
    machine.ok(driver.begin_capture(stream))
    assert driver.stream_wait_event(stream, event) == CAPTURE_ISOLATION
    assert driver.end_capture(stream)[0] == CAPTURE_INVALIDATED


def test_two_captures_do_not_merge(machine):
    driver, first, second, event = machine.driver, machine.stream(), machine.stream(), machine.event()
    machine.ok(driver.begin_capture(first))
    machine.ok(driver.begin_capture(second))
    machine.ok(driver.event_record(event, first))
    assert driver.stream_wait_event(second, event) == CAPTURE_MERGE
    for stream in (first, second):
        machine.end_capture(stream)


# Memory that is unmapped under work ends the context, so this happens in a process of its own.

UNMAP_UNDER_WORK = """
    import sys
    from support.raw_machine import *
    machine = Machine(sys.argv[1])
    driver = machine.driver
    stream, event, other = machine.stream(), machine.event(), machine.stream()
    address = machine.reserve(GRANULE)
    handle = machine.ok(driver.mem_create(0, GRANULE))
    machine.ok(driver.mem_map(address, GRANULE, handle))
    machine.ok(driver.mem_set_access(address, GRANULE, 0))
    latch = raw.Latch()
    machine.ok(driver.hold(latch, stream))
    latch.wait_until_held()
    machine.fill(address, 1, GRANULE, stream)
    machine.ok(driver.event_record(event, stream))
    assert driver.mem_unmap(address, GRANULE) == SUCCESS, "unmapping does not wait"
    latch.open()
    assert driver.stream_synchronize(stream) == ILLEGAL_ADDRESS
    codes = [driver.stream_synchronize(stream), driver.event_query(event), driver.stream_query(other)]
    codes += [driver.ctx_synchronize(), driver.stream_create()[0], driver.event_record(event, other)]
    print(*codes)
    sys.stdout.flush()
    import os
    os._exit(0)
"""


def test_unmapping_under_work_ends_the_context(provider):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNMAP_UNDER_WORK), provider],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(ILLEGAL_ADDRESS)] * 6
