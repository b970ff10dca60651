"""Which releases of SGLang are known, and where each keeps what the integration hooks into."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

PLUGINS_SINCE = (0, 5, 11)
_KNOWN = frozenset({(0, 4, 9), (0, 5, 2), *((0, 5, minor) for minor in range(6, 24))})

_MANAGERS = "sglang.srt.managers"
# Newest place first: the first one that is there is the one in use.
_ADAPTERS = (
    "sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter",
    "sglang.srt.torch_memory_saver_adapter:TorchMemorySaverAdapter",
)
_OWNERS = (
    f"{_MANAGERS}.scheduler_components.weight_updater:SchedulerWeightUpdaterManager",
    f"{_MANAGERS}.scheduler:Scheduler",
)
_STATIC_STATES = (
    f"{_MANAGERS}.scheduler_components.weight_updater:_import_static_state",
    f"{_MANAGERS}.scheduler_update_weights_mixin:_import_static_state",
    f"{_MANAGERS}.scheduler:_import_static_state",
)
_COMMUNICATORS = (
    f"{_MANAGERS}.communicator:FanOutCommunicator",
    f"{_MANAGERS}.tokenizer_communicator_mixin:_Communicator",
    f"{_MANAGERS}.tokenizer_manager:_Communicator",
)


class UnsupportedSGLang(Exception):  # noqa: N818 - a state of the installation
    """The installed SGLang is not known, or lacks what has to be hooked; it was left as it is."""


@dataclass(frozen=True)
class Layout:
    """Where this release keeps the seams, as "module:name"."""

    adapter: str
    """The class whose ``create`` gives memory savers."""
    owner: str
    """The class that releases and resumes memory in a scheduler's process."""
    static_state: str
    """The function that writes a model's buffers back after its weights are resumed."""
    communicator: str
    """The class that asks schedulers, from the engine's process, and awaits their answers."""
    scheduler: str = f"{_MANAGERS}.scheduler:Scheduler"
    tokenizer_manager: str = f"{_MANAGERS}.tokenizer_manager:TokenizerManager"


def installed() -> str:
    """The version of the SGLang of this process."""
    return str(importlib.import_module("sglang").__version__)


def release_of(version: str) -> tuple[int, ...]:
    """Its release number; (0, 5, 13) for "0.5.13.post1"; empty for what is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?$", version)
    return tuple(int(part) for part in match.groups()) if match else ()


def check(version: str, is_any_version: bool) -> None:
    """Raise UnsupportedSGLang for a release that nobody has looked at, unless all are welcome."""
    if release_of(version) in _KNOWN or is_any_version:
        return
    raise UnsupportedSGLang(
        f"fencepool does not know SGLang {version} and leaves it as it is: --enable-memory-saver stays with "
        "torch_memory_saver. It knows 0.4.9, 0.5.2 and 0.5.6 to 0.5.23; set FENCEPOOL_SGLANG_ANY_VERSION=1 "
        "to try this one"
    )


def layout() -> Layout:
    """Find the seams of the installed release; UnsupportedSGLang names what is missing."""
    return Layout(
        adapter=_first("a memory-saver adapter", _ADAPTERS),
        owner=_first("release_memory_occupation", _OWNERS),
        static_state=_first("_import_static_state", _STATIC_STATES),
        communicator=_first("a communicator", _COMMUNICATORS),
    )


def resolve(place: str) -> Any:
    """The object at "module:name"."""
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _first(what: str, places: tuple[str, ...]) -> str:
    for place in places:
        module, _, name = place.partition(":")
        if _is_there(module) and hasattr(importlib.import_module(module), name):
            return place
    raise UnsupportedSGLang(
        f"fencepool found no place for {what} in SGLang {installed()}, and leaves it as it is"
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package on the way to it is missing
        return False
