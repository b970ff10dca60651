"""fencepool's torch_memory_saver under the name torch_memory_saver."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from fencepool.errors import Error
from fencepool.integrations.torch_memory_saver import _children

NAME = "torch_memory_saver"


def install(*, children: bool = True) -> None:
    """``import torch_memory_saver``, its submodules too, gives fencepool's from here on. May be repeated.

    Call it before anything imports torch_memory_saver, whether that is installed or not.

    Args:
        children: also in processes that this one starts, for as long as it lives; see
            :func:`configure_subprocess` for those of a block only.

    Raises:
        Error: another torch_memory_saver was imported before, and nothing was changed; or an import hook
            (``sys.meta_path``) gives another one.
    """
    known = sys.modules.get(NAME)
    if known is not None and not _is_ours(known):
        where = getattr(known, "__file__", None) or "elsewhere"
        raise Error(
            f"torch_memory_saver was imported before, from {where}, and who did so keeps that; "
            "call install() before any such import"
        )
    _children.keep(in_environment=children)
    module = importlib.import_module(NAME)
    if not _is_ours(module):
        raise Error(f"torch_memory_saver still comes from {module.__file__}: an import hook finds that first")


def _is_ours(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(_children.SHIM)
