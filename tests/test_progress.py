"""The bar of what takes longer than a second."""

from __future__ import annotations

import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import fencepool as fp  # noqa: E402
from fencepool import progress  # noqa: E402
from support.contents import assert_same, filled  # noqa: E402
from support.policies import disk_directory  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def bars(monkeypatch):
    """What bars there were: what they were made with, and how far they came."""
    import tqdm

    made = []

    class Bar(tqdm.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    monkeypatch.setattr(progress, "_DELAY", 0.02)
    monkeypatch.setattr(progress, "_EVERY", 0.01)
    return made


@pytest.fixture
def slow(host, new_tag):
    """A pool whose copies take a quarter of a second."""
    pool = fp.pool(new_tag("weights"), "cpu", backup="host")
    tensor, expected = filled(pool, 16 * MIB)
    fp.host_driver.configure("cpu", bandwidth=64 * MIB)
    yield pool
    fp.host_driver.configure("cpu", bandwidth=0)
    assert_same(tensor, expected)
    del tensor


def test_a_long_pause_and_resume_show_a_bar_each(slow, bars, capsys):
    fp.pause(slow.tag, progress=True)
    fp.resume(slow.tag, progress=True)
    pause, resume = bars
    assert (pause.desc, resume.desc) == (f"pause {slow.tag}", f"resume {slow.tag}")
    assert pause.total == 32 * MIB  # a backup of 16 MiB to be made, and as much to be released
    assert resume.total == 16 * MIB
    assert 0 <= pause.n <= pause.total
    assert "16.0M" in capsys.readouterr().err


def test_what_is_short_shows_none(slow, bars, monkeypatch):
    fp.host_driver.configure("cpu", bandwidth=0)
    monkeypatch.setattr(progress, "_DELAY", 60)
    slow.prepare(progress=True)
    fp.pause(slow.tag, progress=True)
    fp.resume(slow.tag, progress=True)
    assert bars == []
    assert not [one for one in threading.enumerate() if one.name == "fencepool progress"]


def test_by_default_there_is_no_bar_and_no_thread(slow, bars, monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    fp.pause(slow.tag)
    fp.resume(slow.tag)
    assert bars == []


def test_a_failure_ends_its_bar(slow, bars):
    with slow.region(), pytest.raises(fp.PoolBusyError):
        fp.pause(slow.tag, progress=True)
    assert slow.state == "active"
    assert not [one for one in threading.enumerate() if one.name == "fencepool progress"]


def test_what_is_done_follows_the_device(slow):
    task = progress._Task("pause", [slow])
    assert task.done() < 16 * MIB
    fp.pause(slow.tag)
    assert task.done() >= 16 * MIB
    task = progress._Task("resume", [slow])
    assert (task.total, task.done()) == (16 * MIB, 0)
    fp.resume(slow.tag)
    assert task.done() == 16 * MIB


def test_what_is_done_follows_the_disk(host, new_tag):
    pool = fp.pool(new_tag(), "cpu", backup="disk", directory=disk_directory())
    tensor, expected = filled(pool, 16 * MIB)
    task = progress._Task("pause", [pool])
    assert (task.total, task.done()) == (32 * MIB, 0)
    fp.pause(pool.tag)
    assert task.done() >= 16 * MIB
    task = progress._Task("resume", [pool])
    assert task.total == 32 * MIB
    fp.resume(pool.tag)
    assert task.done() >= 16 * MIB
    assert_same(tensor, expected)


def test_without_tqdm_it_is_an_error_before_anything_happens(slow, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match="tqdm"):
        fp.pause(slow.tag, progress=True)
    assert slow.state == "active"
