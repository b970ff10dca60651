"""Releases without plug-ins: ``patch()`` in front of a real engine, which starts its own processes."""

from __future__ import annotations

import asyncio

import pytest
import sglang
from safetensors.torch import save_file

import engines
from fencepool.integrations.sglang import MemoryOccupationError, patch
from fencepool.integrations.sglang.versions import PLUGINS_SINCE, release_of

pytestmark = pytest.mark.skipif(release_of(sglang.__version__) >= PLUGINS_SINCE, reason="has plug-ins")
CYCLES = 3


@pytest.fixture(scope="module")
def kept(start, folder):
    """Real weights on the disk, since 0.4.9 knows no backup, and its tensors go through a GPU."""
    patch()
    folder.mkdir(exist_ok=True)
    save_file(dict(engines.weights(seed=7)), str(folder / "model.safetensors"))
    engine = start(load_format="auto")
    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # where these releases look for one
    return engine


@pytest.fixture
def engine(kept):
    yield kept
    wake(kept, "weights", "kv_cache")
    assert len(engines.tokens(kept)) == 8


def wake(engine, *tags):
    """Resume in stages, and load the weights again where they were resumed."""
    for tag in tags:
        _, message = engine.resume_memory_occupation([tag])
        if "resumed weights" in message:
            is_done, why = engines.reload(engine)
            assert is_done, why


def test_tokens_are_the_same_after_cycles_in_either_order(engine):
    expected = engines.tokens(engine)
    for tags in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        for _ in range(CYCLES):
            is_done, message = engine.release_memory_occupation()
            assert is_done
            assert "released" in message
            wake(engine, *tags)
            assert engines.tokens(engine) == expected


def test_the_weights_are_gone_while_released(engine):
    expected = engines.tokens(engine)
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    assert engines.tokens(engine) != expected
    engines.reload(engine)
    assert engines.tokens(engine) == expected


def test_misuse_ends_in_a_message_and_a_living_engine(engine):
    expected = engines.tokens(engine)
    engine.release_memory_occupation(["kv_cache"])
    is_done, message = engine.release_memory_occupation(["kv_cache"])
    assert is_done
    assert "released already" in message
    engine.release_memory_occupation(["weights"])
    is_done, message = engines.reload(engine)
    assert not is_done
    assert "update_weights_from_disk refused: the weights are released" in message
    is_done, message = engine.update_weights_from_tensor(engines.weights(seed=7))[:2]
    assert not is_done
    assert "'weights'" in message
    with pytest.raises(MemoryOccupationError, match="get_weights_by_name refused"):
        engine.get_weights_by_name("lm_head.weight")
    wake(engine, "weights")
    is_done, message = engine.resume_memory_occupation(["kv_cache", "weights"])
    assert is_done
    assert "nothing to do for weights" in message
    with pytest.raises(MemoryOccupationError, match="unknown tag"):
        engine.release_memory_occupation(["weight"])
    assert engines.tokens(engine) == expected


def test_a_request_without_memory_is_refused_or_held_and_never_run(engine):
    expected = engines.tokens(engine)
    engine.release_memory_occupation(["kv_cache"])
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}

    async def ask():
        asked = asyncio.ensure_future(
            engine.async_generate(input_ids=engines.PROMPT, sampling_params=sampling)
        )
        if release_of(sglang.__version__) > (0, 4, 9):
            with pytest.raises(Exception, match="request refused"):
                await asked
            return None
        done, _ = await asyncio.wait([asked], timeout=1)  # no message fits into 0.4.9's answer: held
        assert not done
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        await engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(), None)
        return (await asked)["output_ids"]

    output = asyncio.get_event_loop().run_until_complete(ask())
    wake(engine, "kv_cache")
    assert output in (None, expected)
    assert engines.tokens(engine) == expected


def test_patching_again_changes_nothing():
    from sglang.srt.managers.scheduler import Scheduler

    patch()
    before = Scheduler.process_input_requests
    patch()
    assert Scheduler.process_input_requests is before
