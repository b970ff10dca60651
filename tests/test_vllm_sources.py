"""Real vLLM releases find the plug-in, load it, and run their own sleep mode on pools. No GPU, no engine."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepool.integrations.vllm import CuMemAllocator
from support import children, vllm_sources

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).resolve().parent / "support" / "vllm_worker.py"
GIVERS = ("get_mem_allocator_instance", "get_instance")


@pytest.fixture(params=vllm_sources.RELEASES)
def sources(request: pytest.FixtureRequest) -> list[Path]:
    """The folders of one release."""
    if request.param == "0.33.0" and sys.version_info < (3, 11):
        pytest.skip("this release needs Python 3.11")
    try:
        return vllm_sources.sources(request.param)
    except vllm_sources.UnavailableError as error:
        if os.environ.get("FENCEPOOL_REQUIRE_ENGINES") == "1":
            raise
        pytest.skip(f"vLLM's sources are not here: {error}")


@pytest.fixture
def metadata(tmp_path: Path) -> Path:
    """The entry points of pyproject.toml as an installed fencepool has them; a checkout may have none."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].split("\n\n")[0]
    folder = tmp_path / "fencepool-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fencepool\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\n" + group.replace('"', "") + "\n")
    return tmp_path


def run(paths: list[Path], **changes: str) -> subprocess.CompletedProcess[str]:
    own = children.environment(**changes)
    own["PYTHONPATH"] = os.pathsep.join([*map(str, paths), own["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM)],
        env=own,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_vllms_own_worker_sleeps_and_wakes_on_pools(sources, metadata):
    done = run([*sources, metadata], FENCEPOOL_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    release = sources[0].name.removeprefix("vllm-")
    assert f"vLLM {release}: " in done.stdout
    for name in ("load_model", "initialize_from_config", "sleep", "wake_up"):
        assert name in done.stdout


def test_vllm_selects_plug_ins_as_it_always_does(sources, metadata):
    done = run([*sources, metadata], FENCEPOOL_DEVICE="cpu", VLLM_PLUGINS="another")
    assert done.returncode != 0
    assert "vllm.device_allocator.cumem.CuMemAllocator" in done.stderr  # its own class is in place


def calls_and_attributes(source: Path) -> tuple[list[ast.Call], set[str]]:
    """What a file calls on the allocator, and every attribute of it that it names."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    holders = {"CuMemAllocator"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _gives(node.value):
            holders |= {target.id for target in node.targets if isinstance(target, ast.Name)}

    def is_allocator(node: Any) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "instance":
            return is_allocator(node.value)
        return _gives(node) or (isinstance(node, ast.Name) and node.id in holders)

    named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_allocator(node.value)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in named]
    return calls, {node.attr for node in named}


def _gives(node: Any) -> bool:
    """Whether an expression is the allocator: a call that gives it out, perhaps inside of a cast."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    return name in GIVERS or (name == "cast" and _gives(node.args[1]))


def test_every_use_of_the_allocator_in_vllm_is_one_that_ours_takes(sources):
    used: set[str] = set()
    package = sources[0] / "vllm"
    for source in package.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        if source.name == "cumem.py" or "xpu" in source.name:
            continue
        if "CuMemAllocator" not in text and "get_mem_allocator_instance" not in text:
            continue
        calls, attributes = calls_and_attributes(source)
        used |= attributes
        for call in calls:
            name = call.func.attr
            bound = inspect.signature(getattr(CuMemAllocator, name))
            given = [None] * (len(call.args) + (name != "get_instance"))  # and self
            bound.bind(*given, **{keyword.arg: None for keyword in call.keywords})
    assert {"get_instance", "use_memory_pool", "sleep", "wake_up", "get_current_usage"} <= used
    assert [name for name in used if not hasattr(CuMemAllocator, name)] == []
