"""The plug-in: puts our allocator in the place of vLLM's, where it fits.

vLLM loads it in every process, before anything is built, and some of those processes fork later. So nothing
here calls a driver.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from fencepool._devices import parse_device
from fencepool._version import __version__
from fencepool.errors import Error
from fencepool.integrations.vllm import _settings
from fencepool.integrations.vllm._allocator import CuMemAllocator

if TYPE_CHECKING:
    from types import ModuleType

_MODULE = "vllm.device_allocator.cumem"
# Without these it is not the allocator that is known here.
_NEEDED = ("get_instance", "use_memory_pool", "sleep", "wake_up", "get_current_usage")


class UnsupportedVllmError(Error):
    """The allocator of this vLLM is not one that fencepool knows, the message says why. vLLM is as it was."""


def register() -> None:
    """Install where it fits: the entry point. Logs what is in the way, since vLLM would not survive it."""
    try:
        install()
    except (UnsupportedVllmError, ValueError) as error:
        _settings.logger.warning("fencepool: %s. vLLM keeps its own allocator for sleep mode.", error)


def install() -> None:
    """Put :class:`CuMemAllocator` in the place of vLLM's, in this process. Harmless when repeated.

    Who imported vLLM's class before gets our allocator from its ``get_instance()`` too.

    Raises:
        UnsupportedVllmError: vLLM is not there, or its allocator's surface is not known, or it is used
            already, or PyTorch here is not for CUDA; nothing was changed.
        ValueError: a setting in the environment cannot be used; nothing was changed.
    """
    _settings.check()
    is_host = parse_device(_settings.device()).provider == "host"
    package, module = _import()
    theirs: Any = getattr(module, "CuMemAllocator", None)
    if theirs is CuMemAllocator:
        return
    release = f"vLLM {getattr(importlib.import_module('vllm'), '__version__', 'of an unknown version')}"
    if not inspect.isclass(theirs):
        raise UnsupportedVllmError(f"{release} has no CuMemAllocator in {_MODULE}")
    differences = differences_of(theirs)
    if differences:
        raise UnsupportedVllmError(
            f"the CuMemAllocator of {release} is not one that fencepool {__version__} knows: "
            + "; ".join(differences)
        )
    if getattr(theirs, "instance", None) is not None:
        raise UnsupportedVllmError(
            f"{release} has made its allocator already; install fencepool's before the engine is built"
        )
    if not is_host and importlib.import_module("torch").version.cuda is None:
        raise UnsupportedVllmError("this PyTorch is not built for CUDA, and FENCEPOOL_DEVICE is not set")
    CuMemAllocator.deferrable_tags = getattr(package, "DEFERRABLE_TAGS", None)
    setattr(theirs, "get_instance", staticmethod(CuMemAllocator.get_instance))  # noqa: B010 - not typed
    module.CuMemAllocator = CuMemAllocator  # type: ignore[attr-defined]
    _settings.logger.info("fencepool %s: sleep mode of %s runs on its pools", __version__, release)
    if is_host:
        module.cumem_available = True  # type: ignore[attr-defined]  # theirs is not, without a GPU
        _settings.logger.warning(
            "fencepool: FENCEPOOL_DEVICE=%s is the embedded driver, for tests: GPU memory is not given away",
            _settings.device(),
        )


def differences_of(theirs: type) -> list[str]:
    """What vLLM's class offers and ours does not, or offers otherwise; empty when ours can stand for it."""
    found = [f"{name} is missing" for name in _NEEDED if not hasattr(theirs, name)]
    for name, attribute in vars(theirs).items():
        if name.startswith("_"):
            continue
        if not hasattr(CuMemAllocator, name):
            found.append(f"{name} is new")
        elif callable(getattr(theirs, name)):
            found += _differences(name, getattr(theirs, name), getattr(CuMemAllocator, name))
        elif name != "instance" and attribute != getattr(CuMemAllocator, name):
            found.append(f"{name} is {attribute!r} instead of {getattr(CuMemAllocator, name)!r}")
    return found


def _differences(name: str, theirs: Any, ours: Any) -> list[str]:
    """Whether every call that their function takes is one that ours takes, with the same meaning by name."""
    if not callable(ours):
        return [f"{name} has become a function"]
    wanted = list(inspect.signature(theirs).parameters.values())
    offered = list(inspect.signature(ours).parameters.values())
    same = [(one.name, one.kind, one.default) for one in wanted]
    if same == [(one.name, one.kind, one.default) for one in offered]:
        return []
    return [f"{name}{inspect.signature(theirs)} was {name}{inspect.signature(ours)}"]


def _import() -> tuple[ModuleType, ModuleType]:
    """``vllm.device_allocator`` and the module with its allocator."""
    try:
        return importlib.import_module("vllm.device_allocator"), importlib.import_module(_MODULE)
    except Exception as error:  # whatever vLLM's own imports raise on this machine
        raise UnsupportedVllmError(f"{_MODULE} cannot be imported here: {error!r}") from error
