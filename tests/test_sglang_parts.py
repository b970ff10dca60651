"""The parts of the SGLang integration that need no SGLang; tests/engines has those that do."""

from __future__ import annotations

import asyncio
import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

from fencepool.integrations.sglang import (
    MemoryOccupationError,
    agreement,
    answers,
    patching,
    register,
    settings,
    startup,
    versions,
)
from fencepool.integrations.sglang.hooks import Hook


def test_the_entry_point_is_where_sglang_looks():
    project = Path(__file__).resolve().parent.parent / "pyproject.toml"
    [group] = re.findall(r'entry-points."sglang.srt.plugins"\]\n(.*)\n', project.read_text())
    name, value = re.fullmatch(r'(\w+) = "(.*)"', group).groups()
    assert name == "fencepool"  # what SGLANG_PLUGINS selects by
    assert pkgutil.resolve_name(value) is register


@pytest.mark.parametrize("version", ["0.4.9", "0.5.2", "0.5.6", "0.5.11", "0.5.13.post1", "0.5.17", "0.5.23"])
def test_known_releases_are_welcome(version):
    versions.check(version, is_any_version=False)


@pytest.mark.parametrize("version", ["0.4.8", "0.5.5", "0.5.24", "0.6.0", "1.0", "0.5.23rc1", "main"])
def test_other_releases_are_not_unless_all_are(version):
    with pytest.raises(versions.UnsupportedSGLang, match="does not know SGLang"):
        versions.check(version, is_any_version=False)
    versions.check(version, is_any_version=True)


def test_settings_have_defaults_and_are_read_when_needed(monkeypatch):
    for name in (settings.WAIT, settings.IDLE, settings.ANY_VERSION):
        monkeypatch.delenv(name, raising=False)
    assert (settings.wait_seconds(), settings.idle_seconds(), settings.is_any_version()) == (30.0, 1.0, False)
    monkeypatch.setenv(settings.WAIT, "0")
    monkeypatch.setenv(settings.IDLE, "2.5")
    monkeypatch.setenv(settings.ANY_VERSION, "1")
    assert (settings.wait_seconds(), settings.idle_seconds(), settings.is_any_version()) == (0.0, 2.5, True)


@pytest.mark.parametrize(
    ("name", "value"), [(settings.WAIT, "soon"), (settings.IDLE, "-1"), (settings.ANY_VERSION, "maybe")]
)
def test_settings_that_cannot_be_read_are_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name} is .*{value}"):
        settings.check()


class Arguments:
    def __init__(self, **given):
        self.__dict__.update({"device": "cuda", "tp_size": 1, **given})


def test_cuda_ipc_is_said_at_every_start_on_a_gpu_and_never_on_a_cpu():
    assert "CUDA IPC" in startup.limits(Arguments(), {})[0]
    assert startup.limits(Arguments(device="cpu"), {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}) == []


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ({"weight_cache_mode": "on"}, {}, "--weight-cache-mode"),
        ({"disaggregation_mode": "decode"}, {}, "register it again"),
        ({"tp_size": 2}, {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}, "NCCL_GRAPH_REGISTER=0"),
        ({"tp_size": 2}, {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}, "--disable-custom-all-reduce"),
    ],
)
def test_what_cannot_work_is_said_where_it_applies(arguments, environment, said):
    assert any(said in line for line in startup.limits(Arguments(**arguments), environment))
    assert not any(said in line for line in startup.limits(Arguments(), {}))


def test_what_has_been_set_right_is_not_said():
    environment = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "NCCL_GRAPH_REGISTER": "0"}
    arguments = Arguments(tp_size=2, disable_custom_all_reduce=True)
    assert len(startup.limits(arguments, environment)) == 1


def test_one_rank_agrees_with_itself():
    assert agreement.gather(None, "view") == ["view"]
    assert agreement.failures([""]) == ""
    assert agreement.failures(["no memory"]) == "no memory"
    assert agreement.failures(["", "no memory", ""]) == "rank 1: no memory"


def answer_with(*results):
    async def original(communicator, request):
        return results

    async def ask(manager):
        await answers.read_answers(original, None, "request")

    return asyncio.run(answers.return_message(ask, None))


def test_a_message_travels_in_an_answer_without_room_for_one():
    class Answer:
        rid = None

    assert answer_with(Answer()) == (True, "Success.")
    assert answer_with(answers.done(Answer(), "released weights")) == (True, "released weights")
    with pytest.raises(MemoryOccupationError, match="no memory") as caught:
        answer_with(answers.done(Answer(), "fine"), answers.refused(Answer(), "no memory"))
    assert (caught.value.success, caught.value.message) == (False, "no memory")


def test_a_patch_wraps_once_keeps_static_methods_and_follows_imports_by_name(monkeypatch):
    defining, importing = types.ModuleType("sglang_defining"), types.ModuleType("sglang_importing")

    def work(value):
        return value

    class Factory:
        @staticmethod
        def make(value):
            return value

    defining.work = importing.work = work
    defining.Factory = Factory
    for module in (defining, importing):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def around(original, value):
        return original(value) + 1

    for _ in range(2):
        patching.apply(Hook("sglang_defining:work", around))
        patching.apply(Hook("sglang_defining:Factory.make", around))
    assert defining.work(1) == importing.work(1) == 2
    assert Factory.make(1) == Factory().make(1) == 2
