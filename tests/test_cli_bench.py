"""The quick comparison, on the embedded driver with little memory; and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

import fencepool as fp  # noqa: E402
from fencepool.cli import bench, bench_ways  # noqa: E402
from fencepool.cli.app import app  # noqa: E402
from support import children  # noqa: E402

MIB = 1 << 20


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--mib", "4", "--seconds", "0", *arguments])


def test_every_way_is_measured_and_contents_are_looked_at():
    report = json.loads(run("--json").stdout)
    assert report["schema"] == "fencepool.bench/1"
    assert report["is_emulated"]
    kept, dropped, naive, pinned = report["measured"]
    assert [one["is_same"] for one in (kept, dropped, naive, pinned)] == [True, None, True, True]
    assert kept["is_unmoved"]
    assert kept["freed"] >= 4 * MIB
    assert pinned["freed"] == 0
    assert all(one["cycles"] >= 3 and one["back"] >= one["resume"] >= 0 for one in report["measured"])


def test_the_table_fits_80_columns_and_says_that_it_is_an_emulation():
    result = run()
    assert result.exit_code == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "Emulation" in result.stdout
    assert "…" not in result.stdout


def test_contents_that_are_lost_are_status_1(monkeypatch):
    class Loses(bench_ways.Naive):
        def resume(self):
            super().resume()
            self.tensors[3][100] += 1

    monkeypatch.setattr(bench, "Naive", Loses)
    result = run()
    assert result.exit_code == 1
    assert "DIFFERENT" in result.stdout


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result = run("--picture", str(tmp_path / "b.png"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "b.png").stat().st_size > 10_000


def test_without_matplotlib_nothing_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(bench, "run", None)
    result = run("--picture", str(tmp_path / "b.png"))
    assert result.exit_code == 2
    assert "pip install 'fencepool[observe]'" in result.stderr


@pytest.mark.parametrize(("name", "says"), [("b.doc", "b.doc"), ("b", ".png"), ("nowhere/b.png", "nowhere")])
def test_where_no_picture_can_be_drawn_nothing_is_measured(monkeypatch, tmp_path, name, says):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "run", None)
    result = run("--picture", str(tmp_path / name))
    assert result.exit_code == 2
    assert says in result.stderr


def test_too_little_memory_is_an_error_and_leaves_nothing_behind():
    fp.host_driver.configure("cpu", memory_limit=2 * MIB)
    try:
        result = run()
    finally:
        fp.host_driver.configure("cpu", memory_limit=0)
    assert result.exit_code == 2
    assert "--mib" in result.stderr
    assert not [one for one in fp.status() if one.tag == bench_ways.TAG]


@pytest.mark.parametrize("device", ["cpu:9", "tpu"])
def test_a_device_that_is_not_there_is_refused(device):
    result = CliRunner().invoke(app, ["bench", "--device", device, "--mib", "4"])
    assert result.exit_code == 2
    assert device in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_had(shell):
    done = subprocess.run(
        [sys.executable, "-m", "fencepool", "--show-completion", shell],
        env={**children.environment(), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "_FENCEPOOL_COMPLETE" in done.stdout


def test_completion_knows_the_commands():
    done = subprocess.run(
        [sys.executable, "-m", "fencepool"],
        env={
            **children.environment(),
            "_FENCEPOOL_COMPLETE": "complete_bash",
            "COMP_WORDS": "fencepool re",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["residual"]


@pytest.mark.parametrize("command", ["demo", "doctor", "residual", "trace", "bench"])
def test_help_says_what_the_exit_status_means(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "100", **os.environ})
    assert "Exit status: 0" in " ".join(result.stdout.split())
    assert "--json" in result.stdout


def test_too_little_memory_in_the_middle_is_what_is_raised_and_nothing_is_left(monkeypatch):
    sums = bench._sums

    def fail(way):
        for tensor in way.tensors:
            assert tensor.numel()
            raise fp.OutOfMemoryError("too little") from None
        return sums(way)

    monkeypatch.setattr(bench, "_sums", fail)
    with pytest.raises(fp.OutOfMemoryError, match="too little"):
        bench.run("cpu", 4 * MIB, 0.0, lambda _: None)
    assert not [pool for pool in fp.status() if pool.tag == bench_ways.TAG]
