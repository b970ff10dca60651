"""How SGLang finds the plug-in, which memory saver it then uses, and when it is left as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

_SAY = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
for enable in (False, True):
    try:
        adapter = TorchMemorySaverAdapter.create(enable=enable)
        print("SAVER", enable, type(adapter).__name__, adapter.enabled)
    except ImportError as error:
        print("SAVER", enable, "ImportError", error.name)
"""
_OURS = ["SAVER False _TorchMemorySaverAdapterNoop False", "SAVER True FencepoolAdapter True"]
_LEFT = ["SAVER False _TorchMemorySaverAdapterNoop False", "SAVER True ImportError torch_memory_saver"]


def say(before: str = "", **variables: str) -> tuple[list[str], str]:
    """Which savers a fresh process gets, and what it writes to its standard error."""
    environment = {**os.environ, "SGLANG_LOGGING_LEVEL": "warning", **variables}
    command = [sys.executable, "-c", textwrap.dedent(before) + _SAY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("SAVER")], done.stderr


def test_installing_fencepool_is_enough():
    assert say()[0] == _OURS


def test_sglang_plugins_still_selects():
    assert say(SGLANG_PLUGINS="another")[0] == _LEFT
    assert say(SGLANG_PLUGINS="another, fencepool")[0] == _OURS


def test_it_is_the_saver_where_torch_memory_saver_is_installed_too(tmp_path):
    (tmp_path / "torch_memory_saver.py").write_text("torch_memory_saver = None\n")
    savers, _ = say(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    assert savers == _OURS


def test_an_unknown_release_is_left_as_it_is_and_said_so():
    pretend = "import sglang; sglang.__version__ = '0.6.0'"
    savers, errors = say(pretend)
    assert savers == _LEFT
    assert "fencepool does not know SGLang 0.6.0 and leaves it as it is" in errors
    assert "FENCEPOOL_SGLANG_ANY_VERSION=1" in errors
    assert say(pretend, FENCEPOOL_SGLANG_ANY_VERSION="1")[0] == _OURS


def test_a_release_without_what_is_hooked_is_left_as_it_is_whatever_it_is_told():
    without = """
    from sglang.srt.managers.scheduler import Scheduler
    del Scheduler.get_new_batch_prefill
    """
    savers, errors = say(without, FENCEPOOL_SGLANG_ANY_VERSION="1")
    assert savers == _LEFT
    assert "Scheduler.get_new_batch_prefill; fencepool leaves it as it is" in errors


@pytest.mark.parametrize("wait", ["soon", "-1", "nan"])
def test_a_variable_that_cannot_be_read_is_said_at_start(wait):
    savers, errors = say(FENCEPOOL_SGLANG_WAIT=wait)
    assert savers == _LEFT
    assert "leaves SGLang as it is" in errors
    assert "FENCEPOOL_SGLANG_WAIT is a number of seconds" in errors
