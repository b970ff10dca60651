"""A driver and what a test made with it, for the tests of the driver's rules."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

from fencepool import _core

raw = _core.raw

MIB = 1 << 20
GRANULE = 2 * MIB

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_DEVICE = 101
INVALID_IMAGE = 200
INVALID_CONTEXT = 201
INVALID_PTX = 218
INVALID_HANDLE = 400
ILLEGAL_STATE = 401
NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
CONTEXT_IS_DESTROYED = 709
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_MERGE = 902
CAPTURE_UNMATCHED = 903
CAPTURE_UNJOINED = 904
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907
CAPTURE_WRONG_THREAD = 908

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2
BLOCKING = 0  # cuStreamCreate's flags
NON_BLOCKING = 1

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # CUstreamCaptureMode
NONE, ACTIVE, INVALIDATED = range(3)  # CUstreamCaptureStatus
ON_HOST = 3  # CU_MEM_LOCATION_TYPE_HOST_NUMA
NO_ACCESS, READ_ONLY, READ_WRITE = 0, 1, 3  # CUmemAccess_flags


def in_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in a thread of its own, where no context is current."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class HostBuffer:
    """Page-aligned host memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fill(self, value: int) -> None:
        ctypes.memset(self.address, value, self.size)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.size)


class Machine:
    """A provider's driver with a device's primary context current to this thread.

    What its methods make is undone, newest first, when the machine is closed; a test that undoes
    something itself asks for the plain call (`machine.driver`) instead.
    """

    _contexts: ClassVar[dict[tuple[str, int], int]] = {}  # kept: making one takes a GPU a while

    def __init__(self, provider: str, ordinal: int = 0) -> None:
        self.provider = provider
        self.is_host = provider == "host"
        self.ordinal = ordinal
        self.driver = raw.Driver(provider)
        self._undo = ExitStack()
        self._latches: list[Any] = []
        key = provider, ordinal
        is_new = key not in self._contexts
        if is_new:
            self._contexts[key] = self.ok(self.driver.primary_retain(ordinal))
        self.context = self._contexts[key]
        self.ok(self.driver.push(self.context))
        self._undo.callback(lambda: self.ok(self.driver.pop()))
        if is_new and provider == "cuda":
            self._warm_up()

    def close(self) -> None:
        """Lets all work end, for memory must not be unmapped under it, and undoes what was made."""
        for latch in self._latches:
            latch.open()
        self.driver.ctx_synchronize()  # fails after a failed test, which left a capture: so be it
        self._undo.close()

    def _warm_up(self) -> None:
        """Has the driver load what it loads lazily, which could wait for a stream that a latch holds."""
        address, stream = self.memory(), self.stream()
        self.fill(address, 1, 16, stream)
        self.ok(self.driver.memcpy_dtod(address + 64, address, 16, stream))
        assert self.read(address + 64, 16, stream) == b"\1" * 16

    def undo(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Makes a driver call when the machine is closed; it must succeed."""
        self._undo.callback(lambda: self.ok(function(*arguments)))

    def ok(self, result: Any) -> Any:
        """The output of a call that must have succeeded."""
        code, outputs = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        assert code == SUCCESS, self.driver.error_name(code)[1]
        return outputs[0] if len(outputs) == 1 else outputs or None

    def reserve(self, size: int, alignment: int = 0) -> int:
        address = self.ok(self.driver.address_reserve(size, alignment))
        self.undo(self.driver.address_free, address, size)
        return address

    def create(self, size: int, exportable: bool = False) -> int:
        handle = self.ok(self.driver.mem_create(self.ordinal, size, exportable))
        self.undo(self.driver.mem_release, handle)
        return handle

    def map(self, address: int, size: int, handle: int, access: int = READ_WRITE) -> None:
        self.ok(self.driver.mem_map(address, size, handle))
        self.undo(self.driver.mem_unmap, address, size)
        if access != NO_ACCESS:
            self.ok(self.driver.mem_set_access(address, size, self.ordinal, access))

    def memory(self, size: int = GRANULE) -> int:
        """The address of device memory that may be used at once."""
        address = self.reserve(size)
        self.map(address, size, self.create(size))
        return address

    def host(self, size: int) -> HostBuffer:
        """Pageable host memory that lives as long as the machine, so that no late copy misses it."""
        buffer = HostBuffer(size)
        self._undo.callback(lambda: buffer)
        return buffer

    def pinned(self, size: int) -> HostBuffer:
        buffer = self.host(size)
        self.ok(self.driver.host_register(buffer.address, size))
        self.undo(self.driver.host_unregister, buffer.address)
        return buffer

    def stream(self, flags: int = NON_BLOCKING) -> int:
        stream = self.ok(self.driver.stream_create(flags))
        self.undo(self.driver.stream_destroy, stream)
        return stream

    def event(self) -> int:
        event = self.ok(self.driver.event_create())
        self.undo(self.driver.event_destroy, event)
        return event

    def latch(self, stream: int, is_first: bool = True) -> Any:
        """A latch that holds the stream. Opened, at the latest, when the machine is closed.

        CUDA may run host functions one after another: only the first of several latches is known to hold
        its stream now, the others hold theirs once those before them are open.
        """
        latch = raw.Latch()
        self.ok(self.driver.hold(latch, stream))
        self._latches.append(latch)
        if is_first:
            latch.wait_until_held()
        return latch

    def in_thread(self, function: Callable[[], Any]) -> Any:
        """What a function returns in a thread of its own, with the context current there."""

        def run() -> Any:
            self.ok(self.driver.push(self.context))
            try:
                return function()
            finally:
                self.ok(self.driver.pop())

        return in_thread(run)

    def fill(self, address: int, value: int, size: int, stream: int) -> None:
        self.ok(self.driver.memset_d8(address, value, size, stream))

    def read(self, address: int, size: int, stream: int | None = None) -> bytes:
        """The contents of device memory, once the stream (by default a new one) gets there."""
        with_stream = self.stream() if stream is None else stream
        buffer = HostBuffer(size)
        self.ok(self.driver.memcpy_dtoh(buffer.address, address, size, with_stream))
        self.ok(self.driver.stream_synchronize(with_stream))
        return buffer.bytes()

    def free_bytes(self) -> int:
        return self.ok(self.driver.mem_get_info())[0]

    def capture_status(self, stream: int) -> int:
        return self.ok(self.driver.stream_is_capturing(stream))

    def end_capture(self, stream: int) -> None:
        """Ends the stream's capture, whatever became of it."""
        code, graph = self.driver.end_capture(stream)
        if code == SUCCESS:
            self.ok(self.driver.graph_destroy(graph))

    def graph(self, stream: int) -> int:
        """Ends the stream's capture; the executable graph."""
        graph = self.ok(self.driver.end_capture(stream))
        self.undo(self.driver.graph_destroy, graph)
        executable = self.ok(self.driver.graph_instantiate(graph))
        self.undo(self.driver.graph_exec_destroy, executable)
        return executable
