"""A device under test, asked through the driver itself instead of through fencepool's books."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from fencepool import _core
from support.waiting import eventually

raw = _core.raw

MIB = 1 << 20
PAGE_TABLES = 4 * MIB
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
ON_DEVICE, ON_HOST = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_HOST_NUMA
COUNTED = ("ranges", "handles", "mappings", "streams", "events", "registrations", "graphs", "physical_bytes")


def check(result: Any) -> Any:
    """The outputs of a raw driver call that has to succeed."""
    status, *outputs = result if isinstance(result, tuple) else (result,)
    assert status == 0, f"a driver call of the test itself failed: CUresult {status}"
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def host_counts() -> dict[str, int]:
    """What is alive in the embedded driver, over all its devices."""
    counts = raw.counts()
    return {name: getattr(counts, name) for name in COUNTED}


@functools.cache
def _context(provider: str, ordinal: int) -> int:
    # Retained for as long as the tests run, as the pools themselves do.
    driver = raw.Driver(provider)
    return int(check(driver.primary_retain(check(driver.device_get(ordinal)))))


@functools.cache
def warm_up_gpu(device: str) -> None:
    """Let the driver and PyTorch take what they take once: contexts, kernels, streams, staging memory.

    Tests compare free memory before and after, and hold streams while they submit work: neither may meet
    the first use of something, which takes memory and may wait for the device.
    """
    import torch

    import fencepool as fp

    here = torch.ones(1 << 20, device=device)
    (here @ here).item()
    here.copy_(torch.ones(1 << 20))
    here.fill_(2).zero_()
    here.clone().eq(1).any().item()
    here.view(torch.uint8).clone().fill_(3).any().item()
    pool = fp.pool("warm-up", device, backup="host")
    tensor = pool.empty((8 * MIB,), dtype=torch.uint8)
    tensor.copy_(torch.zeros(8 * MIB, dtype=torch.uint8)).fill_(1)
    machine = Machine(device)
    for _ in range(4):
        stream = machine.stream()
        latch = machine.hold(stream)
        machine.memset(tensor, 1, stream)
        machine.copy(tensor[: 4 * MIB], tensor[4 * MIB :], stream)
        latch.open()
        machine.synchronize(stream)
    machine.read(tensor.data_ptr(), MIB)
    machine.close()
    for _ in range(2):
        fp.pause("warm-up")
        fp.resume("warm-up")
    torch.cuda.synchronize(device)
    del tensor
    pool.close()
    del here
    torch.cuda.empty_cache()


class Machine:
    """One device. Streams and latches made through it end with the test (see the fixture)."""

    def __init__(self, device: str) -> None:
        kind, _, number = device.partition(":")
        self.device = device
        self.provider = "host" if kind == "cpu" else "cuda"
        self.ordinal = int(number or 0)
        self.torch_device = "cpu" if self.is_host else device
        self.driver = raw.Driver(self.provider)
        self._streams: list[int] = []
        self._latches: list[Any] = []

    @property
    def is_host(self) -> bool:
        return self.provider == "host"

    @property
    def context(self) -> int:
        return _context(self.provider, self.ordinal)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is current on this thread."""
        check(self.driver.push(self.context))
        try:
            yield
        finally:
            check(self.driver.pop())

    def close(self) -> None:
        for latch in self._latches:
            latch.open()
        with self.current():
            for stream in self._streams:
                self.driver.stream_synchronize(stream)
                self.driver.stream_destroy(stream)
        self._latches.clear()
        self._streams.clear()

    # --- what the driver says -------------------------------------------------------------------

    def free(self) -> int:
        with self.current():
            return int(check(self.driver.mem_get_info())[0])

    def has_freed(self, before: int, nbytes: int) -> bool:
        """Whether so many bytes have come free since.

        For pools at whose addresses something else stands while they are paused. A GPU takes the page
        tables for that from its own memory, in pieces of its own size, and may keep them.
        """
        came = self.free() - before
        return came == nbytes if self.is_host else nbytes - PAGE_TABLES <= came <= nbytes

    def is_mapped(self, address: int) -> bool:
        """Whether the device may read and write memory of its own there now."""
        return self._may_access(address) and not self.is_host_memory(address)

    def is_host_memory(self, address: int) -> bool:
        """Whether memory of the host is there, for the device and the processor to read and write."""
        return self._may_access(address) and self._may_access(address, ON_HOST)

    def _may_access(self, address: int, location: int = ON_DEVICE) -> bool:
        with self.current():
            status, flags = self.driver.mem_get_access(address, self.ordinal, location)
        return status == 0 and flags == READ_WRITE

    def is_all_mapped(self, tensor: Any) -> bool:
        return all(self.is_mapped(address) for address in _granules(tensor))

    def is_all_host_memory(self, tensor: Any) -> bool:
        return all(self.is_host_memory(address) for address in _granules(tensor))

    def is_any_mapped(self, tensor: Any) -> bool:
        return any(self.is_mapped(address) for address in _granules(tensor))

    # --- work -----------------------------------------------------------------------------------

    def stream(self, flags: int = NON_BLOCKING) -> int:
        with self.current():
            stream = int(check(self.driver.stream_create(flags)))
        self._streams.append(stream)
        return stream

    def latch(self) -> Any:
        latch = raw.Latch()
        self._latches.append(latch)
        return latch

    def hold(self, stream: int) -> Any:
        """Hold a stream; what is submitted to it later runs when the returned latch is opened."""
        latch = self.latch()
        with self.current():
            check(self.driver.hold(latch, stream))
        eventually(lambda: latch.waiting == 1, "the stream is held")
        return latch

    def hold_context(self) -> Any:
        """Hold everything that is submitted later to the device's context, the pools' own copies too."""
        stream = self.stream()
        latch = self.hold(stream)
        with self.current():
            event = check(self.driver.event_create())
            check(self.driver.event_record(event, stream))
            check(self.driver.ctx_wait_event(self.context, event))
            check(self.driver.event_destroy(event))
        return latch

    def memset(self, tensor: Any, value: int, stream: int) -> None:
        with self.current():
            check(
                self.driver.memset_d8(
                    tensor.data_ptr(), value, tensor.numel() * tensor.element_size(), stream
                )
            )

    def copy(self, to: Any, source: Any, stream: int) -> None:
        size = source.numel() * source.element_size()
        with self.current():
            check(self.driver.memcpy_dtod(to.data_ptr(), source.data_ptr(), size, stream))

    def synchronize(self, stream: int) -> None:
        with self.current():
            check(self.driver.stream_synchronize(stream))

    def is_idle(self, stream: int) -> bool:
        with self.current():
            return self.driver.stream_query(stream) == 0

    def read(self, address: int, size: int) -> bytes:
        """Bytes of device memory, through a stream of its own."""
        buffer = ctypes.create_string_buffer(size)
        with self.current():
            stream = check(self.driver.stream_create(NON_BLOCKING))
            try:
                check(self.driver.memcpy_dtoh(ctypes.addressof(buffer), address, size, stream))
                check(self.driver.stream_synchronize(stream))
            finally:
                check(self.driver.stream_destroy(stream))
        return buffer.raw


def _granules(tensor: Any) -> list[int]:
    """An address in each granule of a tensor, and its last byte."""
    start = tensor.data_ptr()
    end = start + tensor.numel() * tensor.element_size()
    return [*range(start, end, raw.GRANULARITY), end - 1]
