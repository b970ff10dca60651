"""Release and resume around SGLang's code, which stands here as little more than its barrier."""

from __future__ import annotations

import sys
import types

import pytest

import fencepool as fp
from support.ranks import run

# What SGLang's code does, of every release that is supported: the flush, the barrier, the books.
SGLANG = """
import sys, types
import torch.distributed as dist
from fencepool.integrations.sglang import adapter, agreement, answers, occupation, state

class Answer:
    rid = ""

class Request:
    def __init__(self, tags):
        self.tags = tags

for name in ("sglang.srt.constants", "sglang.srt.managers.io_struct"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.constants"].GPU_MEMORY_ALL_TYPES = ["kv_cache", "weights"]
for name in ("ReleaseMemoryOccupationReqOutput", "ResumeMemoryOccupationReqOutput"):
    setattr(sys.modules["sglang.srt.managers.io_struct"], name, Answer)
occupation.is_ours = lambda adapter: True

class Scheduler:
    memory_saver_adapter = None

    def __init__(self, group=None, fails=""):
        self.tp_cpu_group, self.fails = group, fails
        self.offload_tags, self.stashed, self.flushes = set(), None, 0

    def is_fully_idle(self):
        return True

    def flush_cache(self):
        self.flushes += 1

    def release_memory_occupation(self, request):
        if self.fails == "before the flush":
            raise AssertionError("shared weights")
        self.offload_tags.update(request.tags)
        self.flush_cache()
        if self.fails == "before the barrier":
            raise MemoryError("no room to stash")
        self.stashed = "stashed"
        if self.tp_cpu_group is not None:
            dist.barrier(self.tp_cpu_group)
        if self.fails == "after the barrier":
            raise RuntimeError("a sticky error")

    def resume_memory_occupation(self, request):
        for tag in request.tags:
            self.offload_tags.remove(tag)
        if self.tp_cpu_group is not None:
            dist.barrier(self.tp_cpu_group)
        self.stashed = None

    def release(self, *tags):
        return occupation.release(Scheduler.release_memory_occupation, self, Request(list(tags))).rid

    def resume(self, *tags):
        return occupation.resume(Scheduler.resume_memory_occupation, self, Request(list(tags))).rid
"""


@pytest.mark.soak
@pytest.mark.parametrize("failing", ["before the flush", "before the barrier", "after the barrier"])
def test_when_sglangs_own_release_fails_on_one_rank_all_refuse_and_the_next_release_is_right(
    tmp_path, failing
):
    said, statuses = run(
        tmp_path,
        SGLANG
        + f"""
owner = Scheduler(dist.new_group(backend="gloo"), {failing!r} if rank == 1 else "")
say(answer=owner.release(), **states(), books=sorted(owner.offload_tags), flushes=owner.flushes)
owner.fails = ""
say(answer=owner.release(), **states())
say(answer=owner.resume(), **states(), right=bool((tensor == rank + 1).all()))
say(heard=agreement.gather(owner.tp_cpu_group, f"rank {{rank}}"))
""",
        ranks=2,
    )
    assert statuses == [0, 0]
    assert said[0][0]["answer"] == said[1][0]["answer"]
    for refused, released, resumed, last in said.values():
        assert refused["answer"].startswith("fencepool:refused:kv_cache, weights not released: rank 1: ")
        assert (refused["weights"], refused["cache"], refused["books"]) == ("active", "active", [])
        assert refused["flushes"] >= 1
        assert released["answer"].startswith("fencepool:done:")
        assert (released["weights"], released["cache"]) == ("paused", "paused")
        assert resumed["answer"].startswith("fencepool:done:")
        assert (resumed["weights"], resumed["cache"], resumed["right"]) == ("active", "active", True)
        assert last["heard"] == ["rank 0", "rank 1"]


@pytest.fixture
def sglang(monkeypatch):
    """The stand-in above in this process, with nothing left of it afterwards."""
    from fencepool.integrations.sglang import occupation, state

    for name in ("sglang.srt.constants", "sglang.srt.managers.io_struct"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(occupation, "is_ours", occupation.is_ours)
    # What is logged keeps frames, and with them fences, until after the test.
    monkeypatch.setattr(occupation.logger, "disabled", True)
    fresh = state.Occupation()
    monkeypatch.setattr(occupation, "_occupation", fresh)
    monkeypatch.setattr(state, "occupation", fresh)
    names: dict = {}
    exec(SGLANG, names)
    yield names["Scheduler"]
    fresh.fences.clear()


def test_a_failing_on_resume_callback_leaves_no_memory_behind_an_answer_that_says_not_resumed(host, sglang):
    pool = fp.pool("weights", "cpu", backup="host")
    tensor = pool.empty((1 << 20,))
    owner = sglang()
    assert owner.release("weights").startswith("fencepool:done:")
    handle = pool.on_resume(lambda _: 1 / 0)
    assert "not resumed" in owner.resume("weights")
    assert pool.state == "paused"
    handle.remove()
    assert owner.resume("weights").startswith("fencepool:done:")
    assert pool.state == "active"
    del tensor
    pool.close()


def test_a_refusal_of_sglangs_own_with_one_rank_changes_nothing(host, sglang):
    owner = sglang(fails="before the flush")
    assert owner.release("weights") == (
        "fencepool:refused:weights not released: AssertionError: shared weights"
    )
    assert owner.offload_tags == set()
