"""Names transitions for profilers: NVTX ranges for Nsight Systems, and PyTorch's own profiler.

NVTX needs the package ``nvtx`` (``pip install 'fencepool[observe]'``). It is used when a profiler listens or
the program has imported it already: importing it takes a tenth of a second, which no first pause should pay
for nothing. PyTorch's profiler is told while it runs on the thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DOMAIN = "fencepool"
# What profilers set for the programs they start: the library that receives NVTX's calls (NVTX's own way,
# used by Nsight Systems and Compute), and Nsight Systems' session.
_LISTENERS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


@contextlib.contextmanager
def named(text: str) -> Iterator[None]:
    """Show the block under that name."""
    with contextlib.ExitStack() as stack:
        nvtx = _nvtx()
        if nvtx is not None:
            stack.enter_context(nvtx.annotate(text, domain=DOMAIN))
        torch = sys.modules.get("torch")
        # Only while it runs: a record_function is an operator, and takes its time without a profiler too.
        if torch is not None and torch.autograd._profiler_enabled():
            stack.enter_context(torch.profiler.record_function(f"{DOMAIN} {text}"))
        yield


def _nvtx() -> Any:
    """The package, where somebody listens; else None."""
    if any(variable in os.environ for variable in _LISTENERS):
        return _import_nvtx()
    return sys.modules.get("nvtx")


@functools.cache
def _import_nvtx() -> Any:
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx
