"""A recorded trace: read back, as a table, as a picture; and ranges for profilers."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from rich.console import Console  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import fencepool as fp  # noqa: E402
from fencepool import picture, ranges, timeline  # noqa: E402
from fencepool.cli import trace as trace_view  # noqa: E402
from fencepool.cli.app import app  # noqa: E402
from support import children  # noqa: E402
from support.contents import filled  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def pools(host, new_tag):
    kept, dropped = fp.pool(new_tag("weights"), "cpu", backup="host"), fp.pool(new_tag("kv"), "cpu")
    tensors = [filled(kept, 4 * MIB)[0], filled(dropped, 2 * MIB)[0]]
    yield kept, dropped
    tensors.clear()


@pytest.fixture
def recorded(pools, tmp_path):
    """A cycle, a resume that fails, and one that does not."""
    kept, dropped = pools
    path = tmp_path / "trace.json"
    with fp.trace(path):
        fp.pause(kept.tag, dropped.tag)
        fp.resume(kept.tag)
        fp.host_driver.configure("cpu", memory_limit=1 << 20)
        with pytest.raises(fp.OutOfMemoryError):
            fp.resume(dropped.tag)
        fp.host_driver.configure("cpu", memory_limit=0)
        fp.resume(dropped.tag)
    return path


def test_what_was_recorded_is_read_back(recorded, pools):
    kept, dropped = pools
    found = timeline.load(recorded)
    assert [(one.kind, one.tags) for one in found.transitions] == [
        ("pause", (kept.tag, dropped.tag)),
        ("resume", (kept.tag,)),
        ("resume", (dropped.tag,)),
        ("resume", (dropped.tag,)),
    ]
    pause, _, failed, last = found.transitions
    assert (pause.bytes, pause.bytes_copied) == (6 * MIB, 4 * MIB)
    assert {"quiesce", "copy", "release"} <= {name for name, _ in pause.phases}
    assert sum(seconds for _, seconds in pause.phases) <= pause.seconds * 1.01
    assert failed.error.startswith("OutOfMemoryError")
    assert failed.phases == ()
    assert 0 <= pause.began <= last.began <= found.seconds


def test_memory_is_known_before_and_after_each_transition(recorded, pools):
    kept, dropped = pools
    found = timeline.load(recorded)
    held = {tag: [count for _, count in found.pools[f"{tag} on cpu"]] for tag in (kept.tag, dropped.tag)}
    four, two = 4 * MIB, 2 * MIB
    #                        start  pause    resume   failed      resume     end
    assert held[kept.tag] == [four, four, 0, 0, four, four, four, four, four, four]
    assert held[dropped.tag] == [two, two, 0, 0, 0, 0, 0, 0, two, two]
    used = [count for _, count in found.devices["cpu"]]
    assert used[0] - used[1] == 6 * MIB


def test_events_of_others_in_the_same_file_are_passed_over(recorded):
    whole = json.loads(recorded.read_text())
    whole["traceEvents"] += [
        {"ph": "M", "name": "process_name", "pid": 1},
        {"ph": "X", "name": "k", "cat": "kernel"},
    ]
    recorded.write_text(json.dumps(whole))
    assert len(timeline.load(recorded).transitions) == 4


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [1]}', "[" * 500_000],
    ids=["empty", "cut off", "list", "table", "no events", "no event", "nesting without end"],
)
def test_what_is_no_recording_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        timeline.load(path)


@pytest.mark.parametrize(
    "value", [10**400, float("inf"), float("nan"), "soon", None, True], ids=lambda one: f"{one!r:.9}"
)
@pytest.mark.parametrize("name", ["ts", "dur"])
def test_a_time_that_is_none_is_refused(recorded, name, value):
    whole = json.loads(recorded.read_text())
    next(one for one in whole["traceEvents"] if one.get("cat") == "fencepool")[name] = value
    recorded.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="damaged"):
        timeline.load(recorded)


def test_a_damaged_recording_is_refused(recorded):
    whole = json.loads(recorded.read_text())
    del next(one for one in whole["traceEvents"] if one.get("cat") == "fencepool")["args"]["kind"]
    recorded.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="damaged: KeyError"):
        timeline.load(recorded)


# The command.


def run(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_the_command_lists_transitions_and_sums_them_up(recorded):
    result = run(recorded)
    assert result.exit_code == 0
    assert "4 transitions in" in result.stdout
    assert "2 resumes and 1 failed: median" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "the last 2 are shown" in run(recorded, "--rows", 2).stdout


def test_the_command_gives_json(recorded):
    report = json.loads(run(recorded, "--json").stdout)
    assert report["schema"] == "fencepool.trace/1"
    assert report["transitions"][0]["phases"]["copy"] > 0
    assert len(report["pools"]) >= 2


def test_a_file_that_is_none_is_status_2(tmp_path):
    absent = run(tmp_path / "nothing.json")
    assert absent.exit_code == 2
    assert "No such file" in absent.stderr
    (tmp_path / "x.json").write_text("{")
    assert "is not a trace" in run(tmp_path / "x.json").stderr


def test_a_recording_without_transitions_is_shown(tmp_path):
    with fp.trace(tmp_path / "t.json"):
        pass
    assert run(tmp_path / "t.json").stdout.startswith("0 transitions")


def test_tags_in_brackets_are_shown(tmp_path):
    one = timeline.Recorded("pause", ("[red]",), 0.0, 1.0, (), 1, 1, "")
    with open(tmp_path / "x", "w") as file:
        trace_view.show(Console(file=file, width=100), timeline.Timeline(1.0, (one,)), 10)
    assert "[red]" in (tmp_path / "x").read_text()


# The picture.


def test_of_many_pools_the_smaller_ones_are_one():
    pools = {f"model {number} on cpu": [(0.0, number), (1.0, 2 * number)] for number in range(10)}
    few = picture._few(pools)
    assert list(few) == [*(f"model {number}" for number in range(3, 10)), "3 smaller pools"]
    assert few["3 smaller pools"] == [(0.0, 3), (1.0, 6)]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(recorded, tmp_path, ending):
    pytest.importorskip("matplotlib")
    to = tmp_path / f"picture.{ending}"
    result = run(recorded, "--picture", to)
    assert result.exit_code == 0, result.stderr
    assert to.stat().st_size > 10_000
    assert f"drawn: {to}" in result.stdout


def test_the_trace_draws_itself(tmp_path):
    pytest.importorskip("matplotlib")
    with fp.trace() as trace:
        pass
    trace.picture(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_an_ending_that_nobody_knows_is_refused(recorded, tmp_path):
    pytest.importorskip("matplotlib")
    result = run(recorded, "--picture", tmp_path / "x.doc")
    assert result.exit_code == 2
    assert "doc" in result.stderr


def test_without_matplotlib_it_says_what_to_install(recorded, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(recorded, "--picture", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "pip install 'fencepool[observe]'" in result.stderr


# Ranges.


@pytest.fixture
def nvtx(monkeypatch):
    """A stand-in for the package, which the program has imported."""
    seen = []
    made = ModuleType("nvtx")

    @contextlib.contextmanager
    def annotate(text, domain):
        seen.append(("begin", domain, text))
        try:
            yield
        finally:
            seen.append(("end", domain, text))

    made.annotate = annotate
    monkeypatch.setitem(sys.modules, "nvtx", made)
    return seen


def test_transitions_are_nvtx_ranges(pools, nvtx):
    tag = pools[0].tag
    fp.pause(tag)
    fp.resume(tag)
    assert nvtx == [
        (side, "fencepool", f"{kind} {tag}") for kind in ("pause", "resume") for side in ("begin", "end")
    ]


def test_a_failure_ends_its_range(pools, nvtx):
    with pytest.raises(ValueError, match="timeout"):
        fp.pause(pools[0].tag, timeout=-1)
    with pools[0].region(), pytest.raises(fp.PoolBusyError):
        fp.pause(pools[0].tag)
    assert [side for side, *_ in nvtx] == ["begin", "end"]


def test_nvtx_is_imported_only_when_a_profiler_listens():
    code = "fp.pool('a', 'cpu'); fp.pause(); fp.resume(); print('nvtx' in sys.modules)"
    assert children.run(code, PYTHONWARNINGS="ignore").stdout == "False\n"
    pytest.importorskip("nvtx")
    assert children.run(code, NSYS_PROFILING_SESSION_ID="1").stdout == "True\n"


def test_where_nvtx_is_not_installed_nothing_happens(pools, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/x")
    ranges._import_nvtx.cache_clear()
    fp.pause(pools[0].tag)
    fp.resume(pools[0].tag)
    ranges._import_nvtx.cache_clear()


def test_pytorchs_profiler_shows_transitions_by_name(pools):
    tag = pools[0].tag
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fp.pause(tag)
        fp.resume(tag)
    names = [event.name for event in profile.events()]
    assert f"fencepool pause {tag}" in names
    assert f"fencepool resume {tag}" in names


def test_the_two_sides_of_a_swap_do_not_overlap_in_one_row_of_a_viewer(pools):
    kept, dropped = pools
    fp.pause(dropped.tag)
    with fp.trace() as trace:
        fp.swap(pause=kept, resume=dropped)
        fp.swap(pause=dropped, resume=kept)
        fp.resume(dropped.tag)
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in trace.events():
        if event.get("cat") == "fencepool":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) == 2
    for slices in rows.values():
        slices.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(slices))
    named = [event for event in trace.events() if event["ph"] == "M"]
    assert [(event["name"], event["tid"]) for event in named] == [("thread_name", max(rows))]
    found = timeline.parse(trace.events()).transitions
    assert sorted(one.kind for one in found) == 2 * ["pause"] + 3 * ["resume"]
    assert all(one.phases for one in found)
