"""Modules that can be imported and decorated with, in place of packages that need a GPU or gigabytes.

SGLang imports Triton, torchvision and its own kernels while it defines functions that a CPU engine never
calls. So every attribute exists, decorators give back what they decorate, and nothing can be run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

_roots: set[str] = set()


class _Name(str):
    """An attribute of a class: the name of a kind or mode, or a method that is looked at."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self} is a stand-in: it cannot be run")


class _Named(type):
    """Classes whose every attribute exists."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{cls.__name__}.{name}")


class _Anything(metaclass=_Named):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class StandIn(types.ModuleType):
    """A module, function, decorator or decorator's maker, as it is used."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made = (
            _Named(name, (_Anything,), {"__module__": self.__name__}) if name[0].isupper() else StandIn(full)
        )
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # @decorator
        return lambda decorated=None, *_, **__: decorated  # @decorator(options)

    def __contains__(self, _: Any) -> bool:
        return False

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"{self.__name__} is a stand-in: a kernel cannot be launched")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_Anything,)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root, dot, _ = name.partition(".")
        if dot and root in _roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(module: str) -> Any:
    """A ``__getattr__`` for the package of that name; its submodules are stand-ins too."""
    if not _roots:
        sys.meta_path.append(_Finder())  # after what is really there
    _roots.add(module)
    made = StandIn(module)
    return made.__getattr__
