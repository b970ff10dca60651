"""The adapter and the hooks on real pools, without an engine: what a CPU engine does not come to."""

from __future__ import annotations

import os
import types

import pytest
import torch

import fencepool as fp
from fencepool.integrations.sglang import adapter, occupation, state


@pytest.fixture
def saver():
    fp.host_driver.configure(poisoned=True)
    yield adapter.create(None, enable=True)
    if fp.status():
        fp.resume()
    state.occupation.mark_resumed(["weights", "kv_cache", "cuda_graph"])
    fp.host_driver.configure(poisoned=False)


def states(tag):
    return {status.backup: status.state for status in fp.status() if status.tag == tag}


def test_draft_weights_with_another_policy_go_with_the_weights_and_keep_theirs(saver):
    with saver.region("weights", enable_cpu_backup=False):
        target = torch.full((1000,), 1.0)
    with saver.region("weights", enable_cpu_backup=True):
        draft = torch.full((1000,), 2.0)
    saver.pause("weights")
    assert states("weights") == {"none": "paused", "host": "paused"}
    saver.resume("weights")
    assert states("weights") == {"none": "active", "host": "active"}
    assert torch.equal(draft, torch.full((1000,), 2.0))
    assert not torch.equal(target, torch.full((1000,), 1.0))


def test_disable_leaves_a_region(saver):
    with saver.region("kv_cache"):
        inside = torch.zeros(1000)
        with saver.disable():
            outside = torch.zeros(1000)
    pool = fp.pool("kv_cache", "cpu")
    assert pool.contains(inside)
    assert not pool.contains(outside)


def test_a_tag_without_pools_is_paused_and_resumed_without_complaint(saver):
    saver.pause("cuda_graph")
    assert state.occupation.blocked == set()  # no request waits for what is not there
    saver.resume("cuda_graph")


def test_child_processes_need_nothing(saver, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with saver.configure_subprocess():
        assert "LD_PRELOAD" not in os.environ


@pytest.mark.parametrize(
    ("given", "backup"),
    [({}, "host"), ({"enable_cpu_backup": True}, "host"), ({"enable_cpu_backup": False}, "none")],
)
def test_graphs_are_captured_into_the_pool_of_their_tag_with_what_sglang_passes(
    saver, monkeypatch, given, backup
):
    seen = []
    monkeypatch.setattr(fp, "cuda_graph", lambda graph, **named: seen.append((graph, named)))
    saver.cuda_graph(cuda_graph="graph", pool="shared", stream="stream", tag="cuda_graph", **given)
    [(graph, named)] = seen
    assert graph == "graph"
    assert (named["pool"], named["stream"], named["tag"]) == ("shared", "stream", "cuda_graph")
    assert (named["backup"], named["capture_error_mode"]) == (backup, "global")


def test_graphs_that_are_away_hold_requests_until_they_are_resumed(saver):
    with saver.region("cuda_graph", enable_cpu_backup=True):
        kept = torch.full((1000,), 3.0)
    saver.pause("cuda_graph")
    assert state.occupation.blocked == {"cuda_graph"}
    saver.resume("cuda_graph")
    assert state.occupation.blocked == set()
    assert torch.equal(kept, torch.full((1000,), 3.0))


def test_a_release_that_sglang_itself_refuses_is_an_answer_and_changes_nothing(saver):
    """As of weights that another process shares (--weight-cache-mode)."""
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.full((1000,), 1.0)
    owner = types.SimpleNamespace(
        memory_saver_adapter=saver, offload_tags=set(), is_fully_idle=lambda: True, tp_cpu_group=None
    )

    def original(owner, request):
        owner.offload_tags.update(request.tags)
        saver.pause("kv_cache")
        raise RuntimeError("the weights are shared")

    answer = occupation.release(original, owner, types.SimpleNamespace(tags=["weights"]))
    assert "refused" in answer.rid
    assert "weights not released: RuntimeError: the weights are shared" in answer.rid
    assert owner.offload_tags == state.occupation.released == set()
    assert torch.equal(weights, torch.full((1000,), 1.0))


def test_without_the_memory_saver_sglang_is_as_it_was():
    owner = types.SimpleNamespace(memory_saver_adapter=object())
    for hook in (occupation.release, occupation.resume):
        assert hook(lambda owner, request: (owner, request), owner, "request") == (owner, "request")
