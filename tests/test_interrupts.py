"""Ctrl-C between the core's return and its caller: the transition has happened, and is finished."""

from __future__ import annotations

import gc
import weakref

import pytest

import fencepool as fp
from fencepool import _core, transitions
from support.contents import assert_same, filled
from support.machine import MIB
from support.waiting import Job


@pytest.fixture
def interrupted(monkeypatch):
    """Have a call of the core end as if a signal had come just before its caller got the result."""

    def arm(name: str, then=None) -> None:
        core = getattr(_core, name)

        def call(*arguments, **options):
            monkeypatch.setattr(_core, name, then or core)  # once
            core(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(_core, name, call)

    return arm


def recorded(pool: fp.Pool) -> list[str]:
    """Its on_resume callbacks from now on, as they are called."""
    calls: list[str] = []
    pool.on_resume(lambda _: calls.append("on_resume"))
    return calls


def notes_of(caught) -> str:
    return " ".join(getattr(caught.value, "__notes__", []))


def test_after_a_pause_the_pool_is_paused_and_a_note_says_so(machine, pool, policy, interrupted):
    tensor, before = filled(pool, 2 * MIB)
    interrupted("pause")
    with pytest.raises(KeyboardInterrupt) as caught:
        fp.pause(pool.tag)
    assert pool.state == "paused"
    assert f"'{pool.tag}' are paused now" in notes_of(caught)
    fp.resume(pool.tag)
    policy.assert_after(tensor, before)


def test_after_a_resume_the_callbacks_run_and_a_note_says_that_the_pool_is_active(
    machine, pool, policy, interrupted
):
    tensor, before = filled(pool, 2 * MIB)
    calls = recorded(pool)
    fp.pause(pool.tag)
    interrupted("resume")
    with pytest.raises(KeyboardInterrupt) as caught:
        fp.resume(pool.tag)
    assert (pool.state, calls) == ("active", ["on_resume"])
    assert f"'{pool.tag}' are active now" in notes_of(caught)
    policy.assert_after(tensor, before)


def test_modules_still_wait_for_a_restore_whose_fence_was_lost(host, new_tag, interrupted):
    import torch

    from fencepool.pytorch import fence_modules

    pool = fp.pool(new_tag(), "cpu", backup="host")
    model = torch.nn.Linear(512, 512, bias=False)
    pool.adopt(model)
    inputs = torch.ones(1, 512)
    expected = model(inputs)
    fence_modules(model, pool)
    fp.pause(pool.tag)
    fp.host_driver.configure(bandwidth=8 * MIB, host_waits=False)
    interrupted("resume")
    with pytest.raises(KeyboardInterrupt):
        fp.resume(pool.tag, order="explicit")
    assert torch.equal(model(inputs), expected)


def test_a_block_that_never_ran_leaves_its_pools_active(machine, pool, policy, interrupted):
    tensor, before = filled(pool, 2 * MIB)
    interrupted("pause")
    with pytest.raises(KeyboardInterrupt), fp.paused(pool.tag):
        raise AssertionError("the block has run")
    assert pool.state == "active"
    policy.assert_after(tensor, before)


def test_a_swap_that_has_happened_is_finished(machine, new_tag, interrupted):
    out, into = (fp.pool(new_tag(), machine.device, backup="host") for _ in range(2))
    leaving, leaving_before = filled(out, 2 * MIB, 1)
    arriving, arriving_before = filled(into, 2 * MIB, 2)
    calls = recorded(into)
    fp.pause(into.tag)
    interrupted("swap")
    with pytest.raises(KeyboardInterrupt) as caught:
        fp.swap(pause=out, resume=into)
    assert (out.state, into.state, calls) == ("paused", "active", ["on_resume"])
    assert f"'{out.tag}' are paused now" in notes_of(caught)
    assert f"'{into.tag}' are active now" in notes_of(caught)
    fp.resume(out.tag)
    assert leaving.equal(leaving_before.to(leaving.device))
    assert arriving.equal(arriving_before.to(arriving.device))


def test_a_pool_that_another_thread_paused_meanwhile_is_left_paused(host, new_tag, monkeypatch):
    mine, theirs = (fp.pool(new_tag(), "cpu") for _ in range(2))
    exclusive = transitions.exclusive

    def late(*pools):
        monkeypatch.setattr(transitions, "exclusive", exclusive)
        Job(lambda: fp.pause(theirs.tag)).result()  # it got the pool first
        return exclusive(*pools)

    def fail(_):
        raise ZeroDivisionError

    mine.on_pause(fail)
    monkeypatch.setattr(transitions, "exclusive", late)
    with pytest.raises(ZeroDivisionError), fp.paused(mine.tag, theirs.tag):
        raise AssertionError("the block has run")
    assert (mine.state, theirs.state) == ("active", "paused")


def test_callbacks_run_where_the_fence_of_an_interrupted_resume_cannot_be_had_again(
    host, new_tag, interrupted
):
    pool = fp.pool(new_tag(), "cpu", backup="host")
    tensor, before = filled(pool, MIB)
    calls = recorded(pool)
    fp.pause(pool.tag)

    def fail(*_):
        raise fp.DriverError("it is broken")

    interrupted("resume", then=fail)
    with pytest.raises(KeyboardInterrupt) as caught:
        fp.resume(pool.tag)
    assert (pool.state, calls) == ("active", ["on_resume"])
    assert "it is broken" in notes_of(caught)
    assert_same(tensor, before)


def test_an_interrupt_between_the_core_and_the_callbacks_does_not_pass_over_them(host, new_tag, monkeypatch):
    pool = fp.pool(new_tag(), "cpu")
    calls = recorded(pool)
    fp.pause(pool.tag)
    set_restoring = transitions._set_restoring

    def interrupted_once(*arguments):
        monkeypatch.setattr(transitions, "_set_restoring", set_restoring)
        raise KeyboardInterrupt

    monkeypatch.setattr(transitions, "_set_restoring", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        fp.resume(pool.tag)
    assert (pool.state, calls) == ("active", ["on_resume"])


def test_every_callback_runs_before_one_that_stops_the_process_is_heard(host, new_tag):
    pool = fp.pool(new_tag(), "cpu")
    calls: list[str] = []

    def stop(_):
        raise SystemExit(3)

    pool.on_resume(stop)
    pool.on_resume(lambda _: calls.append("second"))
    fp.pause(pool.tag)
    with pytest.raises(SystemExit) as caught:
        fp.resume(pool.tag)
    assert (pool.state, calls) == ("active", ["second"])
    assert "the pools are active" in notes_of(caught)


def test_a_failing_callback_keeps_no_tensor_of_the_callers_alive(host, new_tag):
    pool = fp.pool(new_tag(), "cpu")

    def fail(_):
        raise ValueError("no")

    pool.on_resume(fail)
    fp.pause(pool.tag)

    class Local:
        pass

    def call() -> weakref.ref:
        local = Local()
        seen = weakref.ref(local)
        try:  # pytest.raises would keep the frames itself
            fp.resume(pool.tag)
        except fp.CallbackError:
            return seen
        raise AssertionError("no failure")

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
