"""What the log, the metrics and a trace tell of transitions."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

import fencepool as fp
from fencepool import observing
from support import children
from support.contents import filled
from support.machine import MIB

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def kept(host, new_tag):
    pool = fp.pool(new_tag("weights"), "cpu", backup="host")
    tensor, _ = filled(pool, MIB)
    yield pool
    del tensor


def said_by(code):
    """What a program prints and warns of, in a process that has configured nothing."""
    done = subprocess.run(
        [sys.executable, "-c", children.PRELUDE + code],
        env=children.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, done.stderr


def test_nothing_is_said_unless_asked():
    assert said_by("pool = fp.pool('t', 'cpu'); fp.pause(); fp.resume()") == ("", "")


def test_what_integrations_say_is_shown_without_any_configuration():
    code = "import logging; logging.getLogger('fencepool.integrations.x').warning('heard')"
    assert said_by(code) == ("", "heard\n")


def test_one_line_a_transition_at_info(kept, caplog):
    with caplog.at_level(logging.INFO, "fencepool"):
        fp.pause(kept.tag)
        fp.resume(kept.tag)
    lines = [record.getMessage() for record in caplog.records if kept.tag in record.getMessage()]
    assert [line.split()[0] for line in lines] == ["pause", "resume"]
    assert "2.0 MiB, 1.0 MiB copied" in lines[0]
    assert "quiesce" in lines[0]
    assert "create" in lines[1]


def test_a_failure_is_a_warning_with_its_cause(kept, caplog):
    fp.pause(kept.tag)
    total = fp.memory_info("cpu")[1]
    fp.host_driver.configure("cpu", memory_limit=1 << 20)
    with caplog.at_level(logging.WARNING, "fencepool"), pytest.raises(fp.OutOfMemoryError):
        fp.resume(kept.tag)
    fp.host_driver.configure("cpu", memory_limit=total)
    (record,) = [record for record in caplog.records if kept.tag in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "OutOfMemoryError" in record.getMessage()
    fp.resume(kept.tag)


def test_an_observer_that_fails_changes_nothing(kept, caplog):
    def fails(_seen: observing.Transition) -> None:
        raise ZeroDivisionError

    observing.add(fails)
    try:
        fp.pause(kept.tag)
        fp.resume(kept.tag)
    finally:
        observing.remove(fails)
    assert kept.state == "active"
    assert "observer" in caplog.text
    observing.remove(fails)


BUCKETS = ("0.001", "0.1", "60.0", "+Inf")


def values(registry):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def test_metrics_count_transitions_and_show_bytes(kept):
    import fencepool.metrics

    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    collector = fencepool.metrics.register(registry)
    try:
        for _ in range(3):
            fp.pause(kept.tag)
            fp.resume(kept.tag)
        with pytest.raises(ValueError, match="timeout"):
            fp.pause(kept.tag, timeout=-1)
        found = values(registry)
        assert found["fencepool_transitions_total", ("kind", "pause")] == 3
        assert found["fencepool_bytes_copied_total", ("kind", "pause")] == MIB  # unchanged after the first
        assert found["fencepool_phase_seconds_total", ("kind", "pause"), ("phase", "copy")] > 0
        assert ("fencepool_phase_seconds_total", ("kind", "pause"), ("phase", "total")) not in found
        assert found["fencepool_transition_seconds_count", ("kind", "resume")] == 3
        assert found["fencepool_transition_seconds_sum", ("kind", "resume")] > 0
        within = [
            found["fencepool_transition_seconds_bucket", ("kind", "pause"), ("le", le)] for le in BUCKETS
        ]
        assert within == sorted(within)
        assert within[-1] == 3
        assert (
            found["fencepool_device_bytes", ("device", "cpu"), ("kind", "total")] == fp.memory_info("cpu")[1]
        )
        labels = (("backup", "host"), ("device", "cpu"), ("kind", "bytes_mapped"), ("state", "active"))
        assert found[("fencepool_pool_bytes", *labels, ("tag", kept.tag))] == 2 * MIB
        fp.host_driver.configure("cpu", memory_limit=1 << 20)
        fp.pause(kept.tag)
        with pytest.raises(fp.OutOfMemoryError):
            fp.resume(kept.tag)
        found = values(registry)
        cause = (("cause", "OutOfMemoryError"), ("kind", "resume"))
        assert found[("fencepool_failures_total", *cause)] == 1
        assert b"fencepool_pools" in prometheus_client.generate_latest(registry)
        with pytest.raises(ValueError, match="Duplicated"):
            fencepool.metrics.register(registry)
    finally:
        collector.close()


def test_a_trace_has_transitions_phases_and_memory(kept, tmp_path):
    path = tmp_path / "trace.json"
    with fp.trace(path) as trace:
        fp.pause(kept.tag)
        fp.resume(kept.tag)
    fp.pause(kept.tag)  # not recorded any more
    fp.resume(kept.tag)
    events = json.loads(path.read_text())["traceEvents"]
    assert events == trace.events()
    names = [event["name"] for event in events if event["ph"] == "X" and event["cat"] == "fencepool"]
    assert names == [f"pause {kept.tag}", f"resume {kept.tag}"]
    pause, resume = (event for event in events if event["name"] in names)
    assert pause["ts"] + pause["dur"] <= resume["ts"] + 1e4
    phases = [event for event in events if event.get("cat") == "phase"]
    assert {"quiesce", "copy", "create", "map"} <= {event["name"] for event in phases}
    assert all(event["dur"] >= 0 for event in phases)
    pools = [event["args"] for event in events if event["name"] == "device memory of pools"]
    held = [counted[f"{kept.tag} on cpu"] for counted in pools]
    full = 2 * MIB
    assert held == [full, full, 0, 0, full, full]  # at the start, around each transition, at the end


def test_a_trace_of_a_failure_is_saved_too(kept, tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(fp.PoolBusyError), fp.trace(path), kept.region():
        fp.pause(kept.tag)
    (event,) = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert "PoolBusyError" in event["args"]["error"]
