"""Release and resume in every order, on a real engine: memory goes, comes back, and tokens are the same."""

from __future__ import annotations

import itertools

import pytest

import engines

CYCLES = 3
ORDERS = [
    [["weights"], ["kv_cache"]],
    [["kv_cache"], ["weights"]],
    [["weights", "kv_cache"]],
    [["kv_cache", "weights"]],
    [["cuda_graph"], ["weights"], ["kv_cache"]],
    [None],
]


@pytest.mark.parametrize("resumes", ORDERS, ids=str)
@pytest.mark.parametrize("releases", ORDERS, ids=str)
def test_tokens_are_the_same_after_cycles_in_any_order(engine, look, releases, resumes):
    expected = engines.tokens(engine)
    for _ in range(CYCLES):
        for tags in releases:
            is_done, message = engine.release_memory_occupation(tags)
            assert is_done, message
        [report] = look(engine)
        assert engines.states(report) == {"weights": {"paused"}, "kv_cache": {"paused"}}
        assert sum(pool["mapped"] for pool in report["pools"]) == 0
        for tags in resumes:
            is_done, message = engine.resume_memory_occupation(tags)
            assert is_done, message
        assert engines.tokens(engine) == expected


def test_a_partial_wake_leaves_the_rest_away(engine, look):
    for first, second in itertools.permutations(["weights", "kv_cache"]):
        engine.release_memory_occupation()
        engine.resume_memory_occupation([first])
        [report] = look(engine)
        assert engines.states(report) == {first: {"active"}, second: {"paused"}}
        engine.resume_memory_occupation([second])


def test_a_flush_while_the_cache_is_away_waits_for_its_memory(engine, look):
    """As at the end of an update: flushing writes to the memory of some kinds of cache."""
    expected = engines.tokens(engine)
    before = len(look(engine)[0]["cleared_while"])
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    engine.flush_cache()
    engine.resume_memory_occupation(["kv_cache"])
    cleared = look(engine)[0]["cleared_while"][before:]
    assert cleared == ["active", "active"]  # by the release, and by the flush once the memory was there
    assert engines.tokens(engine) == expected


def test_every_byte_of_weights_and_cache_is_in_pools(engine, look):
    [report] = look(engine)
    used = {pool["tag"]: pool["used"] for pool in report["pools"]}
    numbers = sum(tensor.numel() for _, tensor in engines.weights(0))
    assert used["weights"] >= 2 * numbers  # two bytes or more for each
    assert used["kv_cache"] > 0
    assert {pool["backup"] for pool in report["pools"] if pool["tag"] == "weights"} == {"host"}


def test_without_a_backup_tokens_are_the_same_after_an_update(start, look):
    engine = start(enable_weights_cpu_backup=False)
    trained = engines.weights(seed=7)
    assert engines.update(engine, trained)[0]
    expected = engines.tokens(engine)
    for _ in range(CYCLES):
        engine.release_memory_occupation(["kv_cache", "weights"])
        [report] = look(engine)
        assert {pool["backup"] for pool in report["pools"]} == {"none"}
        engine.resume_memory_occupation(["weights"])
        assert engines.update(engine, trained)[0]
        engine.resume_memory_occupation(["kv_cache"])
        assert engines.tokens(engine) == expected


def test_without_a_backup_the_weights_are_gone(start):
    engine = start(enable_weights_cpu_backup=False)
    assert engines.update(engine, engines.weights(seed=7))[0]
    before = engines.tokens(engine)
    engine.release_memory_occupation()
    engine.resume_memory_occupation()
    assert engines.tokens(engine) != before
    assert engines.update(engine, engines.weights(seed=7))[0]
    assert engines.tokens(engine) == before


def test_the_processs_memory_falls_while_paused(start, look):
    engine = start(enable_weights_cpu_backup=False, model={"vocab_size": 65536})
    engines.tokens(engine)
    for _ in range(CYCLES):
        [awake] = look(engine)
        weights = sum(pool["used"] for pool in awake["pools"] if pool["tag"] == "weights")
        assert weights > 50 << 20  # beside which an allocator's own changes are small
        engine.release_memory_occupation()
        [asleep] = look(engine)
        assert awake["resident"] - asleep["resident"] > 0.9 * weights
        engine.resume_memory_occupation()
        # A machine's memory comes with the first write to it, the emulated device's too.
        engine.collective_rpc("probe_write")
