"""The examples run as they stand, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import children

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=children.environment(OMP_NUM_THREADS="1"),  # small tensors, and the tests run side by side
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_loop_passes_the_device_back_and_forth_and_rewards_go_up(device):
    lines = run("rl_loop.py", "--device", device, "--turns", "20")
    assert len(lines) == 3
    rewards = [float(reward) for line in lines for reward in re.findall(r"mean reward ([\d.]+)", line)]
    assert rewards[0] < 0.25  # one in eight by chance
    assert rewards[-1] > 0.5
    for line in lines:
        trainer, engine = map(int, re.findall(r"(\d+) MiB", line))
        assert trainer >= 2
        assert engine >= 2


def test_models_take_turns_and_answer_as_they_did(device):
    lines = run("many_models.py", "--device", device, "--requests", "20")
    assert len(lines) == 20
    assert all("gave the same answer" in line and "2 of 6 models hold" in line for line in lines)
    assert sum("came back" in line for line in lines) >= 5
    held = {line.rsplit("hold ", 1)[1] for line in lines}
    assert len(held) == 1  # two models' memory at any time, and never more


@pytest.mark.gpu
def test_the_graph_replays_after_each_turn():
    lines = run("cuda_graph.py", "--device", "cuda:0")
    assert len(lines) == 3
    for line in lines:
        assert "the same result" in line
        assert int(re.findall(r"(\d+) MiB", line)[0]) > 200  # four weights of 64 MiB


def test_the_graph_says_that_it_needs_a_gpu():
    (line,) = run("cuda_graph.py", "--device", "cpu")
    assert line.startswith("Skipped: CUDA graphs need a GPU")


def test_every_example_is_in_the_list():
    listed = set(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}
