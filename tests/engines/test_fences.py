"""A restore that is still under way when SGLang writes a model's buffers back (sglang #7733)."""

from __future__ import annotations

import pytest

SLOW = 2 << 20  # bytes per second: the restore of the weights takes seconds, what follows it a moment


@pytest.fixture
def asleep(engine, look):
    [awake] = look(engine)
    engine.release_memory_occupation()
    return awake["digest"]


def test_import_static_state_sees_the_right_bytes_behind_a_slow_restore(engine, asleep, look):
    engine.collective_rpc("probe_slow_restore", bandwidth=SLOW, is_fenced=True)
    engine.resume_memory_occupation(["weights"])
    engine.resume_memory_occupation()
    [report] = look(engine)
    assert report["digest_after_import"] == asleep


def test_import_static_state_would_see_stale_bytes_without_the_fence(engine, asleep, look):
    engine.collective_rpc("probe_slow_restore", bandwidth=SLOW, is_fenced=False)
    engine.resume_memory_occupation(["weights"])
    engine.resume_memory_occupation()
    engine.collective_rpc("probe_slow_restore", bandwidth=0, is_fenced=True)
    [report] = look(engine)
    assert report["digest_after_import"] != asleep
    assert report["digest"] == asleep  # once the restore has ended
