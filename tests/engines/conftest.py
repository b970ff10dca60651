"""Tests with real SGLang engines. Run by ``make engines``, once for each release, with SGLang on the path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before SGLang is imported: engines on the CPU, without what their kernels would need.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("FENCEPOOL_SGLANG_WAIT", "2")

import pytest

import engines


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., Any]]:
    """Starts an engine with more arguments. One at a time: the one before is shut down."""
    running: list[Any] = []

    def start(**arguments: Any) -> Any:
        while running:
            running.pop().shutdown()
        running.append(engines.start(folder, **arguments))
        return running[-1]

    yield start
    while running:
        running.pop().shutdown()


@pytest.fixture(scope="module")
def kept(start: Callable[..., Any]) -> Any:
    """An engine whose weights have a backup."""
    return start(enable_weights_cpu_backup=True)


@pytest.fixture
def engine(kept: Any) -> Iterator[Any]:
    """The engine with a backup, awake before and after each test, and alive."""
    engines.wake(kept)
    yield kept
    engines.wake(kept)
    assert len(engines.tokens(kept, count=4)) == 4


@pytest.fixture
def look(tmp_path: Path) -> Callable[[Any], list[dict[str, Any]]]:
    """What pools and processes of an engine say now, one entry for each rank."""
    return lambda engine: engines.look(engine, tmp_path)
