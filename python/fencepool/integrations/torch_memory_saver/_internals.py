"""The part of torch_memory_saver's insides that programs reach for: ``_impl._binary_wrapper.cdll``.

slime, for one, turns the saver off around an allocation of another library with
``tms_set_interesting_region(False)`` and on again with ``True``.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from fencepool.integrations.torch_memory_saver import _settings
from fencepool.integrations.torch_memory_saver._pools import ambient
from fencepool.integrations.torch_memory_saver._thread import innermost

if TYPE_CHECKING:
    from fencepool.integrations.torch_memory_saver._saver import TorchMemorySaver
    from fencepool.pools import Backup


class Internals:
    """What stands at ``torch_memory_saver._impl`` once the saver was used."""

    def __init__(self, saver: TorchMemorySaver) -> None:
        self._saver = saver
        self._binary_wrapper = _Wrapper(saver)

    @property
    def _hook_mode(self) -> str:
        return self._saver.hook_mode


class _Wrapper:
    def __init__(self, saver: TorchMemorySaver) -> None:
        self.cdll = Functions(saver)


class _Turned(threading.local):
    def __init__(self) -> None:
        self.off: list[contextlib.ExitStack] = []


class Functions:
    """The C functions, as ctypes would call them. Those that are not here raise AttributeError by name."""

    def __init__(self, saver: TorchMemorySaver) -> None:
        self._saver = saver
        self._turned = _Turned()

    def tms_get_interesting_region(self) -> bool:
        """Whether this thread's allocations can be paused."""
        scope = innermost()
        return scope.is_pausable if scope is not None else ambient.is_of_this_thread()

    def tms_set_interesting_region(self, value: bool) -> None:
        """False is the beginning of a disable() block of this thread, and True the end of the last begun.

        True without a False before does nothing: there is no region's pool to allocate into.
        """
        if not value:
            block = contextlib.ExitStack()
            block.enter_context(self._saver.disable(dispose_mem_pool_after_use=False))
            self._turned.off.append(block)
        elif self._turned.off:
            self._turned.off.pop().close()

    def tms_get_current_tag(self) -> bytes:
        """The tag of this thread's allocations."""
        scope = innermost()
        return (scope.tag if scope is not None and scope.is_pausable else "default").encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        """Whether this thread's allocations keep their contents in host memory."""
        return _backup() == "host"

    def tms_get_cpu_backup_backend(self) -> bytes:
        """The backend that was asked for; empty for none in particular."""
        scope = innermost()
        return (scope.backend if scope is not None else _settings.backend_from_start()).encode()

    def tms_get_enable_disk_backup(self) -> bool:
        """Whether they keep them on disk."""
        return _backup() == "disk"

    def tms_get_retain_cpu_backup(self) -> bool:
        """As the property."""
        return self._saver.retain_cpu_backup

    def tms_set_retain_cpu_backup(self, value: bool) -> None:
        """As the property."""
        self._saver.retain_cpu_backup = value

    def set_memory_margin_bytes(self, value: int) -> None:
        """As the property."""
        self._saver.memory_margin_bytes = value

    def tms_pause(self, tag: bytes | None) -> int:
        """As the method."""
        self._saver.pause(tag.decode() if tag else None)
        return 0

    def tms_resume(self, tag: bytes | None) -> int:
        """As the method."""
        self._saver.resume(tag.decode() if tag else None)
        return 0

    def __getattr__(self, name: str) -> Any:
        _refuse(name)


def _backup() -> Backup:
    scope = innermost()
    return scope.backup if scope is not None else _settings.backup_from_start()


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"fencepool's torch_memory_saver has no {name}(): it keeps no library of its own below the methods"
    )
