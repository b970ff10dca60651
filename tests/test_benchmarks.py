"""The benchmarks on the embedded driver: what they write, and when they must fail.

resume_latency.py stands for all in `make test`; the others run in `make soak`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
RECORDED = BENCHMARKS / "results" / "resume_latency-nvidia-h200-7b-2026-12-01T022432.json"
OPERATIONS = {"pause_kv", "pause_weights", "resume_weights", "resume_kv"}


@dataclass
class Run:
    status: int
    output: str
    folder: Path

    @property
    def document(self) -> dict[str, Any]:
        (path,) = self.folder.glob("*.json")
        return json.loads(path.read_text(encoding="utf-8"))

    def system(self, name: str) -> dict[str, Any]:
        (found,) = [one for one in self.document["systems"] if one["id"] == name]
        return found


def run_benchmark(folder: Path, *options: str) -> Run:
    return run_script("resume_latency", folder, *options)


def run_script(script: str, folder: Path, *options: str) -> Run:
    """A benchmark in a process of its own; on the embedded driver unless the options say otherwise."""
    where = [] if "--device" in options else ["--device", "cpu"]
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--output", str(folder), *where, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    return Run(done.returncode, done.stdout + done.stderr, folder)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> Run:
    systems = "pinned_copy,fencepool/adopted,torch_memory_saver,naive_offload"
    folder = tmp_path_factory.mktemp("results")
    return run_benchmark(folder, "--device", "cpu", "--systems", systems, "--cycles", "2", "--hold", "0")


@pytest.fixture
def benchmark_modules(monkeypatch):
    """Import the benchmark's modules as its script does, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def test_a_run_says_what_it_was_measured_on(emulated):
    assert emulated.status == 0, emulated.output
    document = emulated.document
    assert document["schema"] == 1
    assert document["benchmark"] == "resume_latency"
    assert document["layout"]["name"] == "tiny"
    assert document["layout"]["weights"]["tensors"] == 16
    assert document["layout"]["kv_cache"] == {"tensors": 4, "bytes": 16 << 20}
    assert {"gpu", "driver", "cuda", "cpu", "cores", "memory_bytes", "kernel"} <= set(document["machine"])
    assert {"fencepool", "torch", "torch_memory_saver"} <= set(document["versions"])


def test_a_run_keeps_every_sample(emulated):
    result = emulated.system("fencepool/adopted")
    assert result["status"] == "ok"
    assert [cycle["index"] for cycle in result["cycles"]] == [0, 1, 2]
    wanted = sum(emulated.document["layout"][tag]["bytes"] for tag in ("weights", "kv_cache"))
    for cycle in result["cycles"]:
        assert set(cycle["operations"]) == OPERATIONS
        assert cycle["contents"] == "verified"
        assert cycle["free_bytes_paused"] - cycle["free_bytes_before"] >= wanted
        for sample in cycle["operations"].values():
            assert sample["returned"] > 0 <= sample["done"]
            assert "total" in sample["phases"]
    figures = result["summary"]["pause_weights_done"]
    assert figures["first"] == result["cycles"][0]["operations"]["pause_weights"]["done"]
    assert figures["min"] <= figures["median"] <= figures["max"]
    link = emulated.system("pinned_copy")["link"]
    assert link["bytes"] >= emulated.document["layout"]["weights"]["bytes"]
    assert len(link["in_seconds"]) == len(link["out_seconds"]) == 2


def test_an_emulation_is_marked_wherever_its_figures_go(emulated):
    document = emulated.document
    assert document["kind"] == "emulation"
    assert all(result["kind"] == "emulation" for result in document["systems"])
    assert all(target["kind"] == "emulation" for target in document["targets"])
    assert all(one["kind"] == "emulation" for one in emulated.system("fencepool/adopted")["summary"].values())
    verdicts = {target["verdict"] for target in document["targets"]}
    assert verdicts == {"not judged: emulation", "not measured"}
    for path in emulated.folder.iterdir():
        assert "emulation" in path.name
    rows = [line for line in emulated.output.splitlines() if "fencepool/adopted" in line and "│" in line]
    assert rows
    assert all("emulation" in row or "not measured" in row for row in rows)


def test_peers_that_need_a_gpu_are_listed(emulated):
    for name in ("torch_memory_saver/cpu-backup", "torch_memory_saver/no-backup", "naive_offload"):
        assert emulated.system(name)["status"] == "not run"
        assert emulated.system(name)["reason"] == "needs a GPU"
    assert emulated.output.count("not run: needs a GPU") >= 4


def test_the_tables_can_be_made_again_from_the_json_file(emulated, tmp_path):
    (source,) = emulated.folder.glob("*.json")
    copy = tmp_path / source.name
    copy.write_bytes(source.read_bytes())
    command = [sys.executable, str(BENCHMARKS / "resume_latency.py"), "--render", str(copy)]
    subprocess.run(command, capture_output=True, check=True, timeout=110)
    page = copy.with_suffix(".md").read_text(encoding="utf-8")
    assert page == source.with_suffix(".md").read_text(encoding="utf-8")
    assert "(emulation)" in page.splitlines()[0]
    assert "| fencepool/adopted |" in page
    assert "| torch_memory_saver/no-backup | not run: needs a GPU | emulation |" in page


def test_wrong_contents_fail_the_run_and_leave_no_figure(tmp_path):
    options = "--device cpu --systems pinned_copy,fencepool/adopted --cycles 1 --hold 0 --break-contents"
    run = run_benchmark(tmp_path, *options.split())
    assert run.status == 1
    result = run.system("fencepool/adopted")
    assert result["status"] == "failed"
    assert "1 of 16 weight tensors differ" in result["reason"]
    assert "cycles" not in result
    assert "summary" not in result
    assert run.system("pinned_copy")["status"] == "ok"  # another system's results survive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "tpu"), "unknown device"),
        (("--device", "cpu", "--layout", "70b"), "unknown layout"),
        (("--device", "cpu", "--layout", "7b"), "too large"),
        (("--device", "cpu", "--systems", "other"), "unknown system"),
    ],
)
def test_bad_options_are_refused(benchmark_modules, options, message):
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(benchmark_modules("resume_latency").main)
    result = CliRunner().invoke(app, list(options), env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in result.output


def test_a_peer_that_is_missing_or_dies_is_said(benchmark_modules, tmp_path, monkeypatch):
    isolation, systems = benchmark_modules("measuring.isolation"), benchmark_modules("systems")
    (tmp_path / "dying_peer.py").write_text(
        "import os\ndef run(plan):\n    print('last words')\n    os.abort()\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    plan = benchmark_modules("measuring.cycles").Plan("", "cpu", "tiny", 1, 0.0)
    result = isolation.measure(systems.Entry("peer", "", "dying_peer", ""), plan)
    assert result["status"] == "failed"
    assert "without a result" in result["reason"]
    absent = systems.Entry("peer", "", "", "", needs_gpu=True, package="no_such_package_of_a_peer")
    assert isolation.why_not_run(absent, "cuda:0") == "no_such_package_of_a_peer is not installed"
    assert isolation.why_not_run(absent, "cpu") == "needs a GPU"


SMALL = {
    "layers": "--layers 3",
    "swap": "--size 16 --segment 8 --spare 4",
    "scaling": "",
}


def run_small(script: str, folder: Path, options: str) -> Run:
    return run_script(script, folder, *f"--cycles 1 --hold 0 {SMALL[script]} {options}".split())


@pytest.mark.soak
def test_layers_are_timed_in_every_mode(tmp_path):
    run = run_small("layers", tmp_path, "")
    assert run.status == 0, run.output
    document = run.document
    assert (document["benchmark"], document["kind"]) == ("layers", "emulation")
    assert set(document["modes"]) == {"layer by layer", "whole, explicit", "context"}
    for samples in document["modes"].values():
        assert len(samples) == 2
        for sample in samples:
            assert 0 < sample["first_layer"] <= sample["whole_forward"]
            assert sample["returned"] > 0
    assert document["layout"]["bytes"] == 3 * document["layout"]["first_layer_bytes"]
    (page,) = tmp_path.glob("*.md")
    assert page.read_text(encoding="utf-8").startswith("# Layer by layer (emulation): tiny, ")
    assert "| layer by layer |" in page.read_text(encoding="utf-8")


@pytest.mark.soak
def test_swaps_are_timed_with_room_and_without(tmp_path):
    run = run_small("swap", tmp_path, "")
    assert run.status == 0, run.output
    runs = {one["id"]: one for one in run.document["runs"]}
    ways, rooms = ("swap", "pause, then resume"), ("with room", "without room")
    assert set(runs) == {f"{way}, {room}" for way in ways for room in rooms}
    for one in runs.values():
        assert len(one["cycles"]) == 2
        assert all(0 < cycle["returned"] <= cycle["done"] for cycle in one["cycles"])
        assert (one["free_bytes"] < 16 << 20) == ("without" in one["id"])
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Two pools changing places (emulation): 16-mib, ")
    assert "not judged: emulation" in text
    command = [sys.executable, str(BENCHMARKS / "swap.py"), "--render", str(page.with_suffix(".json"))]
    subprocess.run(command, capture_output=True, check=True, timeout=110)
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.soak
@pytest.mark.parametrize("script", SMALL)
def test_wrong_contents_leave_no_figure(tmp_path, script):
    run = run_small(script, tmp_path, "--break-contents")
    assert run.status == 1
    assert "1 of" in run.output
    assert "tensors differ" in run.output
    assert not list(tmp_path.iterdir())


def test_memory_that_is_not_released_is_no_result(benchmark_modules):
    import torch

    cycles, layouts = benchmark_modules("measuring.cycles"), benchmark_modules("measuring.layouts")
    layout = layouts.LAYOUTS["tiny"]

    class KeepsItAll:
        has_backup = keeps_addresses = True

        def __init__(self):
            self.made = {
                tag: [torch.empty(shape, dtype=torch.bfloat16) for shape in layout.shapes(tag)]
                for tag in ("weights", "kv_cache")
            }

        def tensors(self, tag):
            return self.made[tag]

        def pause(self, tag):
            return {}

        def resume(self, tag):
            return {}

        def finish(self):
            pass

    class Idle:
        def synchronize(self):
            pass

        def free_bytes(self):
            return 1 << 30

    with pytest.raises(cycles.NotReleased, match="released 0 bytes"):
        cycles.measure(KeepsItAll(), Idle(), layout, cycles.Plan("", "cpu", "tiny", 1, 0.0))


def test_the_large_layout_is_the_one_that_was_announced(benchmark_modules):
    layout = benchmark_modules("measuring.layouts").LAYOUTS["7b"]
    assert len(layout.weights) == 198
    assert layout.size("weights") / 2**30 == pytest.approx(14.19, abs=0.005)
    assert layout.size("kv_cache") == 56 << 30
    assert len(layout.kv_cache) == 56


def test_targets_are_judged_by_the_worst_sample_and_by_medians(benchmark_modules):
    targets = benchmark_modules("reporting.targets")

    def result(name: str, kv_pause: float, later_pauses: tuple[float, ...] = (0.29, 0.28)) -> dict[str, Any]:
        cycles = []
        for pause in (0.6, *later_pauses):
            seconds = {"pause_kv": kv_pause, "pause_weights": pause, "resume_weights": 0.28}
            seconds["resume_kv"] = 0.01
            operations = {
                key: {"returned": 0.01, "done": value, "phases": {}} for key, value in seconds.items()
            }
            cycles.append({"operations": operations})
        return {"id": name, "status": "ok", "cycles": cycles, "kind": "measured"}

    link = {"bytes": 30 * 10**9, "in_seconds": [0.5, 0.55, 0.6]}
    document = {
        "kind": "measured",
        "layout": {"weights": {"bytes": 15 * 10**9}},
        "systems": [
            {"id": "pinned_copy", "status": "ok", "link": link},
            result("fencepool/adopted", 0.05),
            result("fencepool/per-tensor", 0.05, (0.1, 0.31)),
            result("torch_memory_saver/cpu-backup-retained", 0.04),
            {"id": "torch_memory_saver/no-backup", "status": "not run", "reason": "is not installed"},
        ],
    }
    rows = {(row["system"], row["target"]): row for row in targets.evaluate(document)}
    verdicts = {key: row["verdict"] for key, row in rows.items()}
    assert verdicts["fencepool/adopted", "first pause with backup"] == "met"
    assert verdicts["fencepool/adopted", "later pauses with backup"] == "met"
    assert verdicts["fencepool/per-tensor", "later pauses with backup"] == "missed"
    restore = rows["fencepool/adopted", "restore complete, 1.05 x the link"]
    assert restore["verdict"] == "met"
    assert restore["limit"] == pytest.approx(1.05 * 0.275)
    against = "of the KV cache, against torch_memory_saver/cpu-backup-retained"
    assert verdicts["fencepool/adopted", f"pause {against}"] == "missed"
    assert verdicts["fencepool/adopted", f"resume {against}"] == "met"
    assert verdicts["fencepool/prepared", "first pause after prepare()"] == "not measured"


@pytest.mark.soak
def test_the_resident_benchmark_checks_contents_and_writes_its_figures(tmp_path):
    run = run_script("resident", tmp_path, "--cycles", "2", "--size", "0.01")
    assert run.status == 0, run.output
    document = run.document
    assert document["kind"] == "emulation"
    assert len(document["seconds"]["pause"]) == len(document["seconds"]["resume, contents there"]) == 3
    assert all(taken > 0 for samples in document["seconds"].values() for taken in samples)
    (page,) = tmp_path.glob("resident-emulation-*.md")
    assert "| paused: kernel reads |" in page.read_text(encoding="utf-8")


@pytest.mark.soak
def test_digests_are_timed_beside_copies(tmp_path):
    run = run_script("digest_speed", tmp_path, "--rounds", "2", "--size", "0.004")
    assert run.status == 0, run.output
    document = run.document
    assert {name: len(taken) for name, taken in document["seconds"].items()} == {"copy": 2, "digest": 2}
    assert document["verdict"] == "not judged: emulation"
    (page,) = tmp_path.glob("digest_speed-emulation-*.md")
    assert "| digest |" in page.read_text(encoding="utf-8")


@pytest.mark.soak
def test_cost_is_told_by_bytes_and_by_segments(tmp_path):
    run = run_small("scaling", tmp_path, "")
    assert run.status == 0, run.output
    document = run.document
    assert {(one["series"], one["segments"]) for one in document["points"]} == {
        ("bytes", 2),
        *(("segments", count) for count in (2, 4, 8)),
    }
    assert all(len(one["cycles"]) == 2 for one in document["points"])
    assert set(document["slopes"]) == {"GiB", "segment"}
    (page,) = tmp_path.glob("scaling-emulation-*.md")
    assert "| one more segment, µs |" in page.read_text(encoding="utf-8")


@pytest.mark.soak
def test_backups_on_disk_are_timed_beside_the_disk(tmp_path):
    run = run_script("disk_backup", tmp_path, "--directory", str(tmp_path), "--cycles", "1", "--hold", "0")
    assert run.status == 0, run.output
    document = run.document
    assert min(document["disk"]["write_seconds"] + document["disk"]["read_seconds"]) > 0
    statuses = {one["id"]: one["status"] for one in document["systems"]}
    assert statuses == {
        "fencepool/disk": "ok",
        "fencepool/disk, unchanged": "ok",
        "torch_memory_saver/disk-backup": "not run",
    }
    assert run.system("fencepool/disk")["cycles"][1]["contents"] == "verified"
    (page,) = tmp_path.glob("disk_backup-emulation-*.md")
    assert "| restore, of the disk's reading |" in page.read_text(encoding="utf-8")
    assert sorted(one.suffix for one in tmp_path.iterdir()) == [".json", ".md", ".png"]  # no file left over


def test_a_directory_without_direct_io_is_refused_by_the_benchmark(tmp_path):
    run = run_script("disk_backup", tmp_path, "--directory", "/proc", "--cycles", "1")
    assert run.status == 2
    assert "/proc cannot be measured" in run.output
    assert not list(tmp_path.iterdir())


def test_slopes_are_those_of_a_straight_line(benchmark_modules):
    scaling = benchmark_modules("scaling")

    def point(series, nbytes, segments):
        seconds = 0.001 + nbytes / scaling.GIB * 0.02 + segments * 5e-6
        cycle = dict.fromkeys(scaling.MOMENTS, seconds)
        return {"series": series, "bytes": nbytes, "segments": segments, "cycles": [cycle] * 3}

    measured = [point("bytes", scaling.GIB * factor, 8) for factor in (1, 2, 5)]
    measured += [point("segments", scaling.GIB, count) for count in (8, 64, 512)]
    slopes = scaling.slopes(measured)
    assert slopes["GiB"] == pytest.approx(dict.fromkeys(scaling.MOMENTS, 0.02))
    assert slopes["segment"] == pytest.approx(dict.fromkeys(scaling.MOMENTS, 5e-6))


def test_a_picture_lies_beside_every_result(emulated):
    pytest.importorskip("matplotlib")
    (path,) = emulated.folder.glob("*.json")
    picture = path.with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"]({picture.name})" in path.with_suffix(".md").read_text(encoding="utf-8")
    assert str(picture) in emulated.output


def test_a_picture_shows_what_was_measured_beside_the_limit(benchmark_modules):
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    panels = {one.title: one for one in benchmark_modules("reporting.panels").resume_latency(document)}
    pause = panels["Pause of the weights, after the first"]
    assert [row.label for row in pause.rows][:2] == ["fencepool/per-tensor", "fencepool/adopted"]
    assert all("no-backup" not in row.label for row in pause.rows)
    cycles = next(one for one in document["systems"] if one["id"] == "fencepool/adopted")["cycles"]
    assert pause.rows[1].seconds == tuple(one["operations"]["pause_weights"]["done"] for one in cycles[1:])
    assert pause.limit == pytest.approx(0.275, rel=0.01)
    assert [row.is_ours for row in pause.rows] == [row.label.startswith("fencepool/") for row in pause.rows]


def test_without_matplotlib_a_benchmark_says_that_there_is_no_picture(
    benchmark_modules, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(benchmark_modules("reporting.pictures"), "is_possible", lambda: False)
    path = tmp_path / RECORDED.name
    path.write_bytes(RECORDED.read_bytes())
    _, device = benchmark_modules("reporting.result_files").begin("cuda:0", path)
    assert device is None
    assert "no picture: matplotlib is not installed" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))
    assert "![" not in path.with_suffix(".md").read_text(encoding="utf-8")


def test_what_a_disk_is_measured_with_does_not_compress(benchmark_modules, tmp_path):
    disk_speed = benchmark_modules("measuring.disk_speed")
    buffer = disk_speed._filled()
    assert len(zlib.compress(buffer[:], 1)) > 0.99 * len(buffer)
    try:
        found = disk_speed.measure(tmp_path, 1, 2)
    except disk_speed.NoDirectIo as error:
        pytest.skip(str(error))
    assert (len(found["write_seconds"]), len(found["read_seconds"])) == (2, 2)
    assert min(found["write_seconds"] + found["read_seconds"]) > 0
    assert list(tmp_path.iterdir()) == []
