"""Pools behind SGLang's memory saver.

Installing fencepool is enough for SGLang 0.5.11 and later: the entry point ``fencepool`` of the group
``sglang.srt.plugins`` calls :func:`register` in every process of an engine. For earlier releases call
:func:`patch` before an engine is made. docs/sglang.md says what changes.

Importing this package imports neither SGLang nor PyTorch.
"""

from fencepool.integrations.sglang.answers import MemoryOccupationError
from fencepool.integrations.sglang.patching import patch
from fencepool.integrations.sglang.plugin import register
from fencepool.integrations.sglang.versions import UnsupportedSGLang

__all__ = ["MemoryOccupationError", "UnsupportedSGLang", "patch", "register"]
