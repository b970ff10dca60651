"""For releases of SGLang before plug-ins: the same hooks, put in place by ourselves."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import types
from typing import TYPE_CHECKING, Any

from fencepool.integrations.sglang import settings, versions
from fencepool.integrations.sglang.hooks import Hook, hooks

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)
_LAUNCHERS = (
    ("sglang.srt.managers.scheduler", "run_scheduler_process"),
    ("sglang.srt.managers.data_parallel_controller", "run_data_parallel_controller_process"),
)
_MARK = "__fencepool__"


def patch() -> None:
    """Put pools behind SGLang's memory saver, in this process and in those that its engines start.

    Call it before an engine is made. Calling it twice does nothing more. Not thread-safe.

    Raises:
        UnsupportedSGLang: this release is not known and FENCEPOOL_SGLANG_ANY_VERSION is not set, or it lacks
            what has to be patched; SGLang is as it was.
        ValueError: a FENCEPOOL_SGLANG variable cannot be read.
        ImportError: SGLang is not installed.
    """
    settings.check()
    versions.check(versions.installed(), settings.is_any_version())
    for hook in hooks():
        apply(hook)
    if versions.release_of(versions.installed()) < versions.PLUGINS_SINCE:
        _patch_launchers()


def apply(hook: Hook) -> None:
    """Wrap one function or method, also where other modules imported it by name."""
    where, _, name = hook.place.rpartition("." if "." in hook.place.partition(":")[2] else ":")
    holder = versions.resolve(where) if ":" in where else importlib.import_module(where)
    original = getattr(holder, name)
    if hasattr(original, _MARK):
        return
    is_static = isinstance(holder, type) and isinstance(vars(holder).get(name), staticmethod)
    wrapped = _around(original, hook.around)
    setattr(holder, name, staticmethod(wrapped) if is_static else wrapped)
    if isinstance(holder, types.ModuleType):
        _replace_imports(original, wrapped)


def run_launcher(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    """What a new process of SGLang runs in place of its own function: patch first."""
    patch()
    launcher = getattr(importlib.import_module(module), name)
    return getattr(launcher, "__wrapped__", launcher)(*args, **kwargs)


def _patch_launchers() -> None:
    # A spawned process unpickles the function it runs, so it must be one that brings the patch along.
    for module, name in _LAUNCHERS:
        original = getattr(importlib.import_module(module), name)
        if hasattr(original, _MARK):
            continue
        launcher = _Launcher(module, name, original)
        setattr(sys.modules[module], name, launcher)
        _replace_imports(original, launcher)


class _Launcher:
    """A function of SGLang that starts a process, pickled by where it is and run behind the patch."""

    def __init__(self, module: str, name: str, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._module, self._name = module, name
        setattr(self, _MARK, True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_launcher(self._module, self._name, *args, **kwargs)

    def __reduce__(self) -> Any:
        return functools.partial, (run_launcher, self._module, self._name)


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    return wrapper


def _replace_imports(original: Any, wrapped: Any) -> None:
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType) or not module.__name__.startswith("sglang"):
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, wrapped)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                _replace_attributes(value, original, wrapped)


def _replace_attributes(holder: type, original: Any, wrapped: Any) -> None:
    # Engine keeps the launcher as a static method from 0.5.7 on.
    for name, value in list(vars(holder).items()):
        if isinstance(value, staticmethod) and value.__func__ is original:
            setattr(holder, name, staticmethod(wrapped))
