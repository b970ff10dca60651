"""Plain copies between registered host memory and the embedded driver's device memory."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, ClassVar

import fencepool as fp
from fencepool._core import raw


class EmulatedLink:
    """One device buffer and one host buffer of the same size, and copies between them on one stream.

    Lives as long as its process: nothing is given back, and what is registered must stay.
    """

    _kept: ClassVar[list[mmap.mmap]] = []

    def __init__(self, device: str, size: int) -> None:
        self._calls = raw.Driver("host")
        self._size = -(-size // raw.GRANULARITY) * raw.GRANULARITY
        ordinal = int(device.partition(":")[2] or 0)
        self._call("init")
        self._call("push", self._call("primary_retain", ordinal))
        self._device = self._call("address_reserve", self._size)
        self._call("mem_map", self._device, self._size, self._call("mem_create", ordinal, self._size))
        self._call("mem_set_access", self._device, self._size, ordinal)
        self._host = mmap.mmap(-1, self._size)
        self._kept.append(self._host)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        self._call("host_register", self._address, self._size)
        self._stream = self._call("stream_create")

    @property
    def size(self) -> int:
        return self._size

    def write_host(self, value: int) -> None:
        """Set every byte of the host's buffer."""
        ctypes.memset(self._address, value, self._size)

    def host_holds(self, value: int) -> bool:
        return bytes(self._host[:]) == bytes([value]) * self._size

    def copy_in(self) -> None:
        self._call("memcpy_htod", self._device, self._address, self._size, self._stream)

    def copy_out(self) -> None:
        self._call("memcpy_dtoh", self._address, self._device, self._size, self._stream)

    def synchronize(self) -> None:
        self._call("stream_synchronize", self._stream)

    def _call(self, name: str, *arguments: int) -> Any:
        answer = getattr(self._calls, name)(*arguments)
        status, value = answer if isinstance(answer, tuple) else (answer, None)
        if status != 0:
            raise fp.Error(f"{name} failed with {self._calls.error_name(status)[1]}")
        return value
