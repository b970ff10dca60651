"""Python programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import fencepool

_PACKAGES = str(Path(fencepool.__file__).parent.parent)

# Without PyTorch a child starts in a fraction of the time; it then works on blocks of the core.
PRELUDE = """
import ctypes, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
import fencepool as fp
from fencepool import _core
raw = _core.raw
GRANULARITY = raw.GRANULARITY

def block_of(pool, size, value):
    block = pool._core.allocate(size)
    ctypes.memset(block.address, value, size)
    return block

def is_filled(block, size, value):
    return ctypes.string_at(block.address, size) == bytes([value]) * size
"""


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join([_PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}


def start(code: str, **changes: str) -> subprocess.Popen[str]:
    """Start a program with the prelude above; its standard streams are pipes."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**changes),
    )


def run(code: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run such a program to its end."""
    with start(code, **changes) as child:
        try:
            output, errors = child.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def run_silently(code: str, **changes: str) -> None:
    """Run such a program, which has to end with status 0 and without a word."""
    done = run(code, **changes)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
