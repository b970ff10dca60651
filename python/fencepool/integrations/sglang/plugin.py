"""The entry point that SGLang calls in the engine's process and in every process that it starts."""

from __future__ import annotations

import importlib
import logging

from fencepool.integrations.sglang import settings, versions
from fencepool.integrations.sglang.hooks import hooks

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the hooks with SGLang, which applies them after every plug-in has registered its own.

    A release of SGLang that is not known is left as it is, with a warning. Anything else that goes wrong is
    raised, which SGLang logs before it goes on without the plug-in.
    """
    try:
        settings.check()
        versions.check(versions.installed(), settings.is_any_version())
        found = hooks()
    except versions.UnsupportedSGLang as error:
        logger.warning("%s", error)
        return
    except Exception:
        logger.exception("fencepool cannot be SGLang's memory saver and leaves SGLang as it is")
        raise
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    for hook in found:
        registry.HookRegistry.register(hook.place.replace(":", "."), hook.around, registry.HookType.AROUND)
