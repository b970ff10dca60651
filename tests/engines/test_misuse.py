"""What killed engines before: each ends in a message, loses nothing, and leaves a living engine."""

from __future__ import annotations

import asyncio

import pytest
import sglang

import engines
from fencepool.integrations.sglang import MemoryOccupationError


def refused(call, *arguments, **named):
    """The message with which SGLang's own way of failing, ``(False, message)``, says no."""
    is_done, message, *_ = call(*arguments, **named)
    assert not is_done
    return message


@pytest.fixture
def expected(engine):
    return engines.tokens(engine)


@pytest.fixture
def asleep(engine, expected):
    engine.release_memory_occupation(["kv_cache", "weights"])
    return engine


def test_update_from_tensor_while_paused_is_refused_and_names_the_tag(asleep, expected):
    message = refused(engines.update, asleep, engines.weights(seed=3))
    assert "resume_memory_occupation" in message
    assert "'weights'" in message
    asleep.resume_memory_occupation()
    assert engines.tokens(asleep) == expected


def test_a_request_with_weights_but_no_cache_is_refused(asleep, expected):
    asleep.resume_memory_occupation(["weights"])
    with pytest.raises(Exception, match=r"request refused.*kv_cache"):
        engines.tokens(asleep)
    asleep.resume_memory_occupation(["kv_cache"])
    assert engines.tokens(asleep) == expected


def test_a_request_with_a_cache_but_no_weights_is_refused(asleep, expected):
    asleep.resume_memory_occupation(["kv_cache"])
    with pytest.raises(Exception, match=r"request refused.*weights"):
        engines.tokens(asleep)
    asleep.resume_memory_occupation(["weights"])
    assert engines.tokens(asleep) == expected


def test_releasing_twice_does_nothing_and_says_so(engine, expected):
    engine.release_memory_occupation(["kv_cache"])
    is_done, message = engine.release_memory_occupation(["kv_cache"])
    assert is_done
    assert "nothing to do for kv_cache: released already" in message
    engine.resume_memory_occupation(["kv_cache"])
    assert engines.tokens(engine) == expected


def test_weights_released_twice_keep_their_buffers_and_contents(asleep, expected):
    asleep.release_memory_occupation(["weights"])
    asleep.release_memory_occupation()
    asleep.resume_memory_occupation()
    assert engines.tokens(asleep) == expected


def test_resuming_what_is_there_already_does_nothing_and_says_so(asleep, expected):
    asleep.resume_memory_occupation(["weights"])
    is_done, message = asleep.resume_memory_occupation(["kv_cache", "weights"])
    assert is_done
    assert "resumed kv_cache" in message
    assert "nothing to do for weights: not released" in message
    assert engines.tokens(asleep) == expected


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["kv_cache", "weights"]], ids=str)
def test_resuming_what_was_never_released_does_nothing_and_says_so(engine, expected, tags):
    is_done, message = engine.resume_memory_occupation(tags)
    assert is_done
    assert "not released" in message
    assert engines.tokens(engine) == expected


@pytest.mark.parametrize("tags", [["weight"], ["kv_cache", "KV_CACHE"], [""]], ids=str)
def test_an_unknown_tag_is_refused_with_the_known_ones(engine, expected, tags):
    for call in (engine.release_memory_occupation, engine.resume_memory_occupation):
        with pytest.raises(MemoryOccupationError, match=r"unknown tag.*kv_cache, weights, cuda_graph"):
            call(tags)
    assert engines.tokens(engine) == expected  # the known tag beside it was not released either


def test_an_unknown_tag_while_paused_changes_nothing(asleep, expected, look):
    with pytest.raises(MemoryOccupationError, match="unknown tag"):
        asleep.resume_memory_occupation(["weights", "nothing"])
    [report] = look(asleep)
    assert engines.states(report) == {"weights": {"paused"}, "kv_cache": {"paused"}}
    asleep.resume_memory_occupation()
    assert engines.tokens(asleep) == expected


def test_a_tag_given_twice_counts_once(engine, expected):
    engine.release_memory_occupation(["kv_cache", "kv_cache", "weights", "weights"])
    engine.resume_memory_occupation(["weights", "weights", "kv_cache", "kv_cache"])
    assert engines.tokens(engine) == expected


def test_releasing_right_after_generating_waits_for_the_scheduler_to_be_idle(engine, expected):
    for _ in range(5):
        assert engines.tokens(engine) == expected
        assert engine.release_memory_occupation()[0]
        engine.resume_memory_occupation()


def test_releasing_while_a_request_runs_is_refused_and_the_request_ends_well(engine):
    whole = engines.tokens(engine, count=400)

    async def both():
        sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
        stream = await engine.async_generate(input_ids=engines.PROMPT, sampling_params=sampling, stream=True)
        refusal, output = None, []
        async for part in stream:
            output = part["output_ids"]
            if refusal is None:
                with pytest.raises(MemoryOccupationError) as caught:
                    await engine.tokenizer_manager.release_memory_occupation(release_request(), None)
                refusal = str(caught.value)
        return refusal, output

    refusal, output = engine.loop.run_until_complete(both())
    assert "requests are running or queued" in refusal
    assert list(output)[-len(whole) :] == whole[-len(list(output)) :]


def release_request(tags=None):
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    return ReleaseMemoryOccupationReqInput(tags=tags)


def test_reading_and_checking_weights_while_paused_is_refused(asleep, expected):
    with pytest.raises(MemoryOccupationError, match=r"get_weights_by_name refused.*'weights'") as caught:
        asleep.get_weights_by_name("lm_head.weight")
    assert caught.value.success is False
    asleep.resume_memory_occupation()
    assert len(asleep.get_weights_by_name("lm_head.weight")) > 0
    assert engines.tokens(asleep) == expected


def test_every_other_way_to_the_weights_is_refused_while_paused(asleep, expected, tmp_path):
    from sglang.srt.managers import io_struct

    manager, run = asleep.tokenizer_manager, asleep.loop.run_until_complete
    message = refused(asleep.update_weights_from_disk, str(tmp_path))
    assert "update_weights_from_disk refused" in message
    message = refused(asleep.update_weights_from_distributed, ["lm_head.weight"], ["float32"], [[2048, 256]])
    assert "refused: the weights are released" in message
    message = refused(
        lambda: run(
            manager.update_weights_from_ipc(io_struct.UpdateWeightsFromIPCReqInput(zmq_handles={}), None)
        )
    )
    assert "update_weights_from_ipc refused" in message
    checked = run(manager.check_weights(io_struct.CheckWeightsReqInput(action="snapshot"), None))
    is_done, message = (
        checked[:2] if isinstance(checked, (tuple, list)) else (checked.success, checked.message)
    )
    assert not is_done
    assert "check_weights refused" in message
    with pytest.raises(AssertionError, match="save_sharded_model refused"):
        asleep.save_sharded_model(path=str(tmp_path), pattern=None, max_size=None)
    asleep.resume_memory_occupation()
    assert engines.tokens(asleep) == expected


def test_an_asynchronous_update_in_the_second_cycle_without_a_resume_is_refused(engine, expected):
    """The path that overlaps sleeping and updating: right in the first cycle, wrong from the second on."""
    trained = engines.weights(seed=3)
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    assert engines.update(engine, trained)[0]
    engine.resume_memory_occupation(["kv_cache"])
    second = engines.tokens(engine)
    assert second != expected

    async def cycle():
        manager = engine.tokenizer_manager
        await manager.release_memory_occupation(release_request(), None)
        return await update_without_resuming(engine, engines.weights(seed=4))

    is_done, message = engine.loop.run_until_complete(cycle())
    assert not is_done
    assert "the weights are released" in message
    engine.resume_memory_occupation()
    assert engines.tokens(engine) == second


async def update_without_resuming(engine, named):
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer

    manager = engine.tokenizer_manager
    if hasattr(io_struct, "BeginWeightUpdateReqInput"):
        is_open, message = await manager.begin_weight_update(io_struct.BeginWeightUpdateReqInput(), None)
        if not is_open:
            return is_open, message
    sent = io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(named)]
    )
    return await manager.update_weights_from_tensor(sent, None)


def test_a_resume_waits_for_memory_that_comes_in_time(asleep, expected):
    asleep.collective_rpc("probe_limit", size=1, lift_after=0.5)
    assert asleep.resume_memory_occupation()[0]
    assert engines.tokens(asleep) == expected


def test_a_resume_without_memory_says_so_keeps_everything_and_works_later(asleep, expected, look):
    asleep.collective_rpc("probe_limit", size=1)
    with pytest.raises(MemoryOccupationError, match=r"not resumed after 2 s.*OutOfMemoryError.*resume again"):
        asleep.resume_memory_occupation(["weights"])
    [report] = look(asleep)
    assert engines.states(report)["weights"] == {"paused"}
    asleep.collective_rpc("probe_limit", size=0)
    asleep.resume_memory_occupation()
    assert engines.tokens(asleep) == expected


def test_requests_retracted_before_a_release_are_held_until_memory_is_there(engine):
    """SGLang 0.5.23 releases with retracted requests in its queue; before, it refuses to."""
    from sglang.srt.managers import io_struct

    whole = engines.tokens(engine, count=300)
    manager = engine.tokenizer_manager

    async def cycle():
        sampling = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
        asked = engine.async_generate(input_ids=engines.PROMPT, sampling_params=sampling)
        running = asyncio.ensure_future(asked)
        await asyncio.sleep(0.1)
        await manager.pause_generation(io_struct.PauseGenerationReqInput(mode="retract"))
        try:
            await manager.release_memory_occupation(release_request(), None)
            is_released = True
        except MemoryOccupationError:
            is_released = False
        await manager.continue_generation(io_struct.ContinueGenerationReqInput())
        await asyncio.sleep(0.3)
        if is_released:
            assert not running.done()
            await manager.resume_memory_occupation(io_struct.ResumeMemoryOccupationReqInput(), None)
        return is_released, list((await running)["output_ids"])

    is_released, output = engine.loop.run_until_complete(cycle())
    assert output == whole
    assert is_released == (sglang.__version__ == "0.5.23")
