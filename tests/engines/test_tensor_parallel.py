"""Two tensor-parallel ranks of a real engine: both release, both resume, or neither does."""

from __future__ import annotations

import os

import pytest

import engines
from fencepool.integrations.sglang import MemoryOccupationError


@pytest.fixture(scope="module")
def kept(start):
    bind = pytest.MonkeyPatch()
    # Without it SGLang wants a NUMA node for each rank. Both ranks may share one CPU.
    cpus = sorted(os.sched_getaffinity(0))
    bind.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")
    yield start(enable_weights_cpu_backup=True, tp_size=2)
    bind.undo()


def test_tokens_are_the_same_after_cycles(engine, look):
    expected = engines.tokens(engine)
    for resumes in ([["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]], [None]):
        engine.release_memory_occupation()
        ranks = look(engine)
        assert [engines.states(rank) for rank in ranks] == 2 * [
            {"weights": {"paused"}, "kv_cache": {"paused"}}
        ]
        for tags in resumes:
            engine.resume_memory_occupation(tags)
        assert engines.tokens(engine) == expected


@pytest.mark.parametrize("poor", [0, 1])
def test_when_one_rank_cannot_resume_none_does_and_the_answer_names_it(engine, look, poor):
    expected = engines.tokens(engine)
    engine.release_memory_occupation()
    engine.collective_rpc("probe_limit", size=1, rank=poor)
    with pytest.raises(MemoryOccupationError, match=rf"not resumed .*on any rank: rank {poor}: OutOfMemory"):
        engine.resume_memory_occupation()
    for rank in look(engine):
        assert engines.states(rank) == {"weights": {"paused"}, "kv_cache": {"paused"}}
    with pytest.raises(Exception, match="request refused"):
        engines.tokens(engine)
    engine.collective_rpc("probe_limit", size=0)
    engine.resume_memory_occupation()
    assert engines.tokens(engine) == expected


def test_updates_are_refused_on_every_rank(engine):
    expected = engines.tokens(engine)
    engine.release_memory_occupation(["weights"])
    is_done, message = engines.update(engine, engines.weights(seed=3))
    assert not is_done
    assert "the weights are released" in message
    engine.resume_memory_occupation()
    assert engines.tokens(engine) == expected


@pytest.mark.parametrize("stubborn", [0, 1])
def test_when_one_rank_cannot_release_the_answer_names_it_and_nothing_is_lost(engine, look, stubborn):
    expected = engines.tokens(engine)
    engine.collective_rpc("probe_refuse_to_pause", rank=stubborn)
    with pytest.raises(MemoryOccupationError, match=rf"not released everywhere: rank {stubborn}: .*refuses"):
        engine.release_memory_occupation()
    by_rank = [engines.states(rank)["weights"] for rank in look(engine)]
    assert by_rank == [{"active"} if rank == stubborn else {"paused"} for rank in range(2)]
    with pytest.raises(Exception, match="request refused"):
        engines.tokens(engine)
    engine.collective_rpc("probe_refuse_to_pause", rank=None)
    engine.release_memory_occupation()
    assert [engines.states(rank)["weights"] for rank in look(engine)] == [{"paused"}, {"paused"}]
    engine.resume_memory_occupation()
    assert engines.tokens(engine) == expected


def test_when_one_rank_did_not_release_a_resume_brings_the_others_back(engine, look):
    expected = engines.tokens(engine)
    engine.collective_rpc("probe_refuse_to_pause", rank=1)
    with pytest.raises(MemoryOccupationError, match="rank 1"):
        engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert all(states == {"active"} for rank in look(engine) for states in engines.states(rank).values())
    assert engines.tokens(engine) == expected


def test_when_no_rank_can_release_the_engine_goes_on(engine):
    expected = engines.tokens(engine)
    engine.collective_rpc("probe_refuse_to_pause", rank="all")
    with pytest.raises(MemoryOccupationError, match=r"nothing was changed: rank 0: .*; rank 1: "):
        engine.release_memory_occupation()
    assert engines.tokens(engine) == expected
