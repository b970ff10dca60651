"""Status files: private, fresh, gone at the end; readers trust nothing."""

from __future__ import annotations

import json
import os
import stat
import sys

import pytest

pytest.importorskip("torch")

from rich.console import Console
from typer.testing import CliRunner

import fencepool as fp
from fencepool import division, status_files
from fencepool.cli import residual, residual_view
from fencepool.cli.app import app
from support import children, nvml
from support.contents import filled

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def where(tmp_path):
    return tmp_path / "status"


@pytest.fixture
def written(where):
    file = status_files.StatusFile(where)
    yield where / f"{os.getpid()}.json"
    file.close()


@pytest.fixture
def paused(host, new_tag, written):
    pool = fp.pool(new_tag("weights"), "cpu", backup="host")
    tensor, _ = filled(pool, 4 * MIB)
    fp.pause(pool.tag)
    yield pool
    fp.resume(pool.tag)
    del tensor


def test_every_transition_is_written(paused, where):
    (one,) = status_files.read(where)
    assert one.pid == os.getpid()
    assert one.last.startswith(f"pause of {paused.tag}, ")
    (device,) = one.devices
    (pool,) = [pool for pool in device.pools if pool.tag == paused.tag]
    assert (pool.state, pool.bytes_mapped) == ("paused", 0)
    fp.resume(paused.tag)
    (one,) = status_files.read(where)
    assert next(pool.state for pool in one.devices[0].pools if pool.tag == paused.tag) == "active"


def test_a_failure_is_written_by_its_kind_only(paused, where):
    total = fp.memory_info("cpu")[1]
    fp.host_driver.configure("cpu", memory_limit=1 << 20)
    with pytest.raises(fp.OutOfMemoryError):
        fp.resume(paused.tag)
    fp.host_driver.configure("cpu", memory_limit=total)
    (one,) = status_files.read(where)
    assert "failed (OutOfMemoryError)" in one.last


def test_directory_and_file_are_the_users_alone(written, where):
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert [path.name for path in where.iterdir()] == [written.name]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_may_enter_is_refused(where, mode):
    where.mkdir()
    where.chmod(mode)
    with pytest.raises(PermissionError, match="chmod 700"):
        status_files.StatusFile(where)
    with pytest.raises(PermissionError):
        status_files.read(where)
    assert list(where.iterdir()) == []


def test_a_directory_behind_a_link_is_refused(tmp_path, where):
    (tmp_path / "real").mkdir(mode=0o700)
    where.symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="status"):
        status_files.StatusFile(where)


def test_a_link_in_the_files_place_is_replaced_not_followed(where, tmp_path):
    where.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (where / f"{os.getpid()}.json").symlink_to(victim)
    file = status_files.StatusFile(where)
    file.close()
    assert victim.read_text() == "mine"


def test_what_is_damaged_foreign_or_left_over_is_passed_over(written, where, tmp_path):
    good = json.loads(written.read_text())
    (where / "1.json").write_text("{")
    (where / "2.json").write_text("[]")
    (where / "3.json").write_text(json.dumps({**good, "pid": 3, "started": -1}))  # its number has another now
    (where / "4.json").write_text(json.dumps(good))  # not its name
    (where / "5.json").write_text(json.dumps({**good, "devices": [{"device": 1}]}))
    (where / "6.json").symlink_to(written)
    os.mkfifo(where / "7.json")
    (where / "8.json").mkdir()
    assert [one.pid for one in status_files.read(where)] == [os.getpid()]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: {**good, "written": float("inf"), "devices": [{"total": float("inf")}]},
        lambda good: {**good, "devices": [{**good["devices"][0], "total": float("inf")}]},
        lambda good: {**good, "devices": [{**good["devices"][0], "torch": [1]}]},
        lambda good: {**good, "written": 10**400},
        lambda good: {**good, "devices": None},
    ],
    ids=["infinity", "infinite bytes", "a list for a table", "a number beyond all floats", "nothing"],
)
def test_values_that_no_program_of_ours_writes_are_passed_over(paused, written, spoil):
    good = json.loads(written.read_text())
    name = written.name
    assert status_files.parse(name, json.dumps(good).encode()) is not None
    assert status_files.parse(name, json.dumps(spoil(good)).encode()) is None


def test_a_file_that_nests_without_end_is_passed_over(written):
    assert status_files.parse(written.name, b"[" * 500_000) is None


def test_a_process_writes_when_its_environment_says_so_and_leaves_nothing(where):
    code = f"""
    import os
    fp.pool('weights', 'cpu'); fp.pause()
    print(sorted(os.listdir({str(where)!r})) == [f'{{os.getpid()}}.json'], flush=True)
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
    """
    done = children.run(code, FENCEPOOL_STATUS_DIR=str(where))
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert list(where.iterdir()) == []


def test_a_child_that_ends_in_the_ordinary_way_leaves_its_parents_file(where):
    code = f"""
    import os
    pid = os.fork()
    if pid == 0: sys.exit(0)
    os.waitpid(pid, 0)
    print(len(os.listdir({str(where)!r})))
    """
    assert children.run(code, FENCEPOOL_STATUS_DIR=str(where)).stdout == "1\n"


def test_a_directory_that_cannot_be_used_is_a_warning_not_an_end(where):
    where.mkdir()
    where.chmod(0o755)
    done = children.run("print(fp.__version__)", FENCEPOOL_STATUS_DIR=str(where))
    assert done.returncode == 0
    assert "no status file is written" in done.stderr
    assert "chmod 700" in done.stderr


@pytest.mark.parametrize("value", ["", "0"])
def test_by_default_nothing_is_written_or_loaded(tmp_path, value):
    code = f"import sys; sys.exit('fencepool.status_files' in sys.modules or os.path.exists({value!r}))"
    code = f"import os; {code}"
    assert children.run(code, FENCEPOOL_STATUS_DIR=value, XDG_RUNTIME_DIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [("/run/user/7", "/run/user/7/fencepool"), ("", f"/tmp/fencepool-{os.geteuid()}")],
)
def test_the_default_directory(monkeypatch, runtime, expected):
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    assert str(status_files.directory("1")) == expected
    assert str(status_files.directory("/a/b")) == "/a/b"


# The command.


@pytest.fixture
def without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


def run(*arguments):
    return CliRunner().invoke(app, ["residual", *arguments])


def test_the_command_shows_a_process_that_tells(paused, where, without_nvml):
    result = run("--status-dir", str(where))
    assert result.exit_code == 0
    assert f"process {os.getpid()}" in result.stdout
    assert paused.tag in result.stdout
    assert "nvidia-ml-py is not installed" in " ".join(result.stdout.split())
    report = json.loads(run("--status-dir", str(where), "--json", "--pid", str(os.getpid())).stdout)
    assert report["schema"] == "fencepool.residual/1"
    (holder,) = report["places"][0]["holders"]
    assert holder["runs_fencepool"]
    assert {line["key"]: line["bytes"] for line in holder["lines"]}["paused_pools"] == 0


def test_nobody_who_tells_is_status_2_with_what_to_do(where, without_nvml):
    result = run("--status-dir", str(where))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "FENCEPOOL_STATUS_DIR=1" in result.stderr
    assert (
        "Process 999999 holds no device memory" in run("--status-dir", str(where), "--pid", "999999").stderr
    )


def test_a_process_without_pools_is_named_as_such(written, where, without_nvml, monkeypatch):
    monkeypatch.setattr(status_files, "read", lambda where: [status_files.OtherProcess(7, "x", 0.0, "", ())])
    result = run("--pid", "7")
    assert result.exit_code == 2
    assert "runs fencepool and has no pools" in result.stderr


def gpu_report(monkeypatch, where, pid=None):
    """A GPU with an engine that tells, another that does not, and one that NVML has no figure for."""
    nvml.install(
        monkeypatch, nvml.gpu(134 * GIB, {100: 42 * GIB, 200: 90 * GIB, 300: None}, "00000000:3B:00.0")
    )
    engine = status_files.OtherProcess(
        100,
        "serve.py",
        0.0,
        "pause of weights, kv_cache, 281.3 ms",
        (
            status_files.OtherDevice(
                "cuda:0",
                "0000:3B:00.0",
                140 * GIB,
                134 * GIB,
                (
                    division.PoolBytes("weights", "cuda:0", "paused", 0, 14 * GIB),
                    division.PoolBytes("adapters", "cuda:0", "active", 3 * GIB, 0),
                ),
                division.TorchMemory(GIB // 2, 30 * GIB, 2 * GIB, 5 * GIB),
            ),
        ),
    )
    monkeypatch.setattr(status_files, "read", lambda where: [engine])
    return residual.gather(where, pid)


def test_a_gpu_divides_among_its_processes(monkeypatch, where):
    (place,) = gpu_report(monkeypatch, where).places
    assert [one.pid for one in place.holders] == [200, 100, 300]
    assert place.unknown == 2 * GIB
    engine = place.holders[1]
    assert sum(line.bytes for line in engine.lines) == 42 * GIB
    assert not place.holders[0].runs_fencepool


def test_the_table_of_a_gpu_fits_80_columns(monkeypatch, where):
    report = gpu_report(monkeypatch, where)
    with open(where.with_suffix(".txt"), "w") as file:
        residual_view.show(Console(file=file, width=80), report)
    text = where.with_suffix(".txt").read_text()
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        "process 100",
        "PyTorch's cache",
        "CUDA graphs",
        "14.0 GiB of host memory",
        "FENCEPOOL_STATUS_DIR",
    ):
        assert word in " ".join(text.split())


def test_one_process_of_a_gpu(monkeypatch, where):
    (place,) = gpu_report(monkeypatch, where, pid=100).places
    assert [one.pid for one in place.holders] == [100]


def test_what_a_process_without_a_figure_of_nvmls_tells_of_itself_is_not_unknown_too(monkeypatch, where):
    nvml.install(monkeypatch, nvml.gpu(20 * GIB, {100: None}, "00000000:3B:00.0"))
    pools = (division.PoolBytes("weights", "cuda:0", "active", 14 * GIB, 0),)
    device = status_files.OtherDevice("cuda:0", "0000:3B:00.0", 140 * GIB, 20 * GIB, pools, None)
    engine = status_files.OtherProcess(100, "serve.py", 0.0, "", (device,))
    monkeypatch.setattr(status_files, "read", lambda where: [engine])
    (place,) = residual.gather(where).places
    assert place.unknown == 6 * GIB


def test_a_relative_directory_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path, monkeypatch, host, new_tag
):
    monkeypatch.chdir(tmp_path)
    file = status_files.StatusFile(status_files.directory("status"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    pool = fp.pool(new_tag(), "cpu")
    fp.pause(pool.tag)
    (one,) = status_files.read(tmp_path / "status")
    assert one.last.startswith("pause")
    file.close()
    assert list((tmp_path / "status").iterdir()) == []
