"""Pausing and resuming across ranks: four processes over gloo, on the embedded driver."""

from __future__ import annotations

import signal

import pytest

from support.ranks import run

pytestmark = pytest.mark.soak  # processes that import PyTorch, four at a time


def test_all_ranks_pause_and_resume_together(tmp_path):
    said, _ = run(
        tmp_path,
        """
        for cycle in range(3):
            say(**attempt(fpd.pause, "weights", "kv_cache"), **states())
            mapped = sum(pool.bytes_mapped for pool in fp.status())
            dist.barrier()
            say(**attempt(fpd.resume, "weights"), **states(), mapped=mapped)
            fpd.resume()
        say(right=bool((tensor == rank + 1).all()), zero=not bool(keys.any()))
        """,
    )
    for answers in said.values():
        for pause, resume in zip(answers[0:6:2], answers[1:6:2], strict=True):
            assert (pause["error"], pause["weights"], pause["cache"]) == ("", "paused", "paused")
            assert resume["mapped"] == 0
            assert (resume["error"], resume["weights"], resume["cache"]) == ("", "active", "paused")
        assert answers[6]["right"]
        assert answers[6]["zero"]


def test_a_call_that_returned_on_one_rank_means_released_on_all(tmp_path):
    said, _ = run(
        tmp_path,
        f"""
        if rank == 2:
            time.sleep(0.5)
        fpd.pause("weights", "kv_cache")
        open({str(tmp_path)!r} + f"/released-{{rank}}", "w").close()
        # Everybody's memory is gone when anybody's call returns: the slowest has told so before.
        say(mapped=sum(pool.bytes_mapped for pool in fp.status()))
        """,
    )
    assert all(answers == [{"rank": rank, "mapped": 0}] for rank, answers in said.items())


def test_one_rank_without_memory_keeps_all_paused_with_the_same_error(tmp_path):
    said, _ = run(
        tmp_path,
        """
        fpd.pause("weights", "kv_cache")
        free, total = fp.memory_info("cpu")
        if rank == 1:
            fp.host_driver.configure("cpu", memory_limit=1 << 20)
        say(**attempt(fpd.resume, "weights"), **states())
        fp.host_driver.configure("cpu", memory_limit=total)
        say(**attempt(fpd.resume), **states(), right=bool((tensor == rank + 1).all()))
        """,
    )
    messages = {answers[0]["error"] for answers in said.values()}
    assert len(messages) == 1
    message = messages.pop()
    assert "rank 1" in message
    assert "missing" in message
    assert "1 of 4" in message
    for rank, (failed, again) in said.items():
        assert list(failed["ranks"]) == ["1"]
        assert failed["weights"] == "paused"
        assert failed["cause"] == ("OutOfMemoryError" if rank == 1 else "NoneType")
        assert (again["error"], again["weights"], again["right"]) == ("", "active", True)


def test_one_rank_that_cannot_prepare_leaves_all_active_with_their_contents(tmp_path):
    said, _ = run(
        tmp_path,
        """
        if rank == 3:
            with weights.region():
                say(**attempt(fpd.pause), **states())
        else:
            say(**attempt(fpd.pause), **states())
        say(right=bool((tensor == rank + 1).all()) and bool((keys == 7).all()))
        say(**attempt(fpd.pause), **states())
        """,
    )
    assert len({answers[0]["error"] for answers in said.values()}) == 1
    for answers in said.values():
        assert list(answers[0]["ranks"]) == ["3"]
        assert "region" in answers[0]["error"]
        assert (answers[0]["weights"], answers[0]["cache"]) == ("active", "active")
        assert answers[1]["right"]
        assert (answers[2]["error"], answers[2]["weights"]) == ("", "paused")


def test_a_pause_that_fails_on_one_rank_in_the_second_step_is_undone_on_all(tmp_path):
    said, _ = run(
        tmp_path,
        """
        if rank == 0:
            _core.arm_fault("host", "cuMemUnmap", 1, True, 999)
        say(**attempt(fpd.pause, patience=20), **states(), right=bool((tensor == rank + 1).all()))
        """,
    )
    for answers in said.values():
        assert list(answers[0]["ranks"]) == ["0"]
        assert "cuMemUnmap" in answers[0]["error"]
        assert (answers[0]["weights"], answers[0]["cache"]) == ("active", "active")
        assert answers[0]["right"]
    assert "kv_cache" in " ".join(said[1][0]["notes"])


DEATHS = {
    "before a pause": ("pause", "die_before(fpd.transitions, '_prepare')"),
    "between preparing and pausing": ("pause", "die_before(fpd.transitions.local, '_pause')"),
    "after pausing": ("pause", "die_before(fpd.agreement.Agreement, 'decide', 2)"),
    "before a resume": ("resume", "die_before(fpd.transitions.local, '_resume')"),
    "after resuming": ("resume", "die_before(fpd.agreement.Agreement, 'decide')"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_dies_is_named_and_nobody_hangs(tmp_path, death):
    call, dying = DEATHS[death]
    said, statuses = run(
        tmp_path,
        f"""
        import fencepool.distributed.agreement
        if {call == "resume"}:
            fpd.pause()
        if rank == 2:
            {dying}
        options = {{"timeout": 1.0}} if {call == "pause"} else {{}}
        say(**attempt(fpd.{call}, patience=3, **options), **states())
        fp.resume()
        say(right=bool((tensor == rank + 1).all()))
        """,
    )
    assert statuses == [0, 0, -signal.SIGKILL, 0]
    survivors = [said[rank] for rank in (0, 1, 3)]
    assert len({answers[0]["error"] for answers in survivors}) == 1
    for answers in survivors:
        assert list(answers[0]["ranks"]) == ["2"]
        assert "has not answered" in answers[0]["error"]
        assert answers[0]["weights"] == ("active" if call == "pause" else "paused")
        assert answers[1]["right"]


def test_a_rank_that_was_given_up_learns_it_and_does_not_go_on_alone(tmp_path):
    said, _ = run(
        tmp_path,
        """
        if rank == 1:
            original = fpd.transitions._prepare
            fpd.transitions._prepare = lambda *args: (time.sleep(4), original(*args))
        say(**attempt(fpd.pause, timeout=0.5, patience=1), **states())
        """,
    )
    assert len({answers[0]["error"] for answers in said.values()}) == 1
    for answers in said.values():
        assert list(answers[0]["ranks"]) == ["1"]
        assert (answers[0]["weights"], answers[0]["cache"]) == ("active", "active")


def test_what_an_earlier_process_group_left_in_its_store_does_not_count(tmp_path):
    said, _ = run(
        tmp_path,
        """
        from datetime import timedelta
        store = dist.FileStore(os.environ["INIT"].removeprefix("file://") + "-kept", size)
        for life in range(3):
            dist.destroy_process_group()
            own = dist.PrefixStore(str(life), store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
            dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", dist.PrefixStore("same", store))
            say(**attempt(fpd.pause, "weights" if rank != 1 or life == 0 else "nothing"), **states())
            fp.resume()
            dist.barrier()
        """,
    )
    for answers in said.values():
        assert (answers[0]["error"], answers[0]["weights"]) == ("", "paused")
        for answer in answers[1:]:
            assert list(answer["ranks"]) == ["1"]
            assert answer["weights"] == "active"


def test_the_store_of_a_process_group_that_is_destroyed_is_let_go(tmp_path):
    said, _ = run(
        tmp_path,
        """
        import gc, weakref
        fpd.pause()
        store = weakref.ref(dist.distributed_c10d._get_default_store())
        agreement = weakref.ref(fpd.agreement.agreement_of(None))
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        say(store=store() is None, agreement=agreement() is None)
        """,
        ranks=2,
    )
    assert [answers[0] for answers in said.values()] == [
        {"rank": rank, "store": True, "agreement": True} for rank in range(2)
    ]


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_ctrl_c_while_a_rank_waits_for_the_others_counts_on_all_or_on_none(tmp_path, call):
    said, _ = run(
        tmp_path,
        f"""
        if {call == "resume"}:
            fpd.pause()
        if rank == 1:  # only says its own when the other has been interrupted
            weights.on_{call}(lambda _: dist.distributed_c10d._get_default_store().wait(["interrupted"]))
        else:
            original = fpd.agreement.Agreement._hear
            def interrupted(self, patience):
                if self._round == {2 if call == "pause" else 3}:
                    dist.distributed_c10d._get_default_store().set("interrupted", "")
                    raise KeyboardInterrupt
                return original(self, patience)
            fpd.agreement.Agreement._hear = interrupted
        try:
            say(**attempt(fpd.{call}), **states())
        except KeyboardInterrupt as error:
            say(notes=error.__notes__, **states())
        fpd.agreement.Agreement._hear = original if rank == 0 else fpd.agreement.Agreement._hear
        say(**attempt(fpd.{call}), **states())
        """,
        ranks=2,
    )
    before, after = ("active", "paused") if call == "pause" else ("paused", "active")
    assert list(said[1][0]["ranks"]) == ["0"]
    assert "KeyboardInterrupt" in said[0][0]["notes"][0]
    for answers in said.values():
        assert answers[0]["weights"] == before
        assert (answers[1]["error"], answers[1]["weights"]) == ("", after)


@pytest.mark.parametrize("step", [1, 2])
def test_ctrl_c_after_all_have_decided_to_go_on_leaves_the_ranks_together(tmp_path, step):
    said, _ = run(
        tmp_path,
        f"""
        original = fpd.agreement.Agreement._settle
        def interrupted(self, failures):
            decision = original(self, failures)
            if rank == 0 and self._round == {step} and KeyboardInterrupt not in done:
                done.append(KeyboardInterrupt)
                raise KeyboardInterrupt
            return decision
        done = []
        fpd.agreement.Agreement._settle = interrupted
        try:
            say(**attempt(fpd.pause), **states())
        except KeyboardInterrupt as error:
            say(notes=getattr(error, "__notes__", []), **states())
        say(**attempt(fpd.resume), **states())
        """,
        ranks=2,
    )
    together = "active" if step == 1 else "paused"
    for answers in said.values():
        assert answers[0]["weights"] == together
        assert (answers[1]["error"], answers[1]["weights"]) == ("", "active")
    assert list(said[1][0]["ranks"]) == (["0"] if step == 1 else [])
    assert ("all ranks have paused" in str(said[0][0]["notes"])) == (step == 2)


def test_a_decision_stands_though_its_rank_cannot_tidy_up(tmp_path):
    said, _ = run(
        tmp_path,
        """
        def failing(self):
            raise RuntimeError("the store has gone")
        fpd.agreement.Agreement._forget_old = failing
        say(**attempt(fpd.pause), **states())
        """,
        ranks=1,
    )
    assert (said[0][0]["error"], said[0][0]["weights"]) == ("", "paused")


def test_a_forked_child_does_not_answer_for_its_parents_rank(tmp_path):
    said, _ = run(
        tmp_path,
        """
        child = os.fork()
        if child == 0:
            try:
                fpd.pause()
            except fp.ForkedError:
                os._exit(3)
            os._exit(4)
        say(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), **attempt(fpd.pause), **states())
        """,
        ranks=1,
    )
    assert said[0][0]["child"] == 3
    assert said[0][0]["error"] == ""


def test_pools_made_between_the_two_steps_are_resumed_too_when_the_pause_fails(tmp_path):
    said, _ = run(
        tmp_path,
        """
        original = fpd.transitions._prepare
        def prepare(*args):
            original(*args)
            fp.pool("late", "cpu")
        fpd.transitions._prepare = prepare
        if rank == 1:
            weights.on_pause(lambda _: 1 / 0)
        say(**attempt(fpd.pause), **states(), late=fp.pool("late", "cpu").state)
        """,
        ranks=2,
    )
    for answers in said.values():
        assert list(answers[0]["ranks"]) == ["1"]
        assert (answers[0]["weights"], answers[0]["late"]) == ("active", "active")


def test_a_failing_on_resume_callback_on_one_rank_leaves_all_paused_and_not_that_one_active(tmp_path):
    said, _ = run(
        tmp_path,
        """
        fpd.pause()
        handle = weights.on_resume(lambda _: 1 / 0) if rank == 1 else None
        say(**attempt(fpd.resume), **states())
        if handle is not None:
            handle.remove()
        say(**attempt(fpd.resume), **states(), right=bool((tensor == rank + 1).all()))
        """,
        ranks=2,
    )
    for failed, again in said.values():
        assert list(failed["ranks"]) == ["1"]
        assert (failed["weights"], failed["cache"]) == ("paused", "paused")
        assert "are paused again" in str(failed["notes"])
        assert (again["error"], again["weights"], again["right"]) == ("", "active", True)


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_ctrl_c_between_the_core_and_the_report_leaves_that_rank_as_the_others(tmp_path, call):
    said, _ = run(
        tmp_path,
        f"""
        if {call == "resume"}:
            fpd.pause()
        core = _core.{call}
        def interrupted(*args, **options):
            core(*args, **options)
            _core.{call} = core
            raise KeyboardInterrupt
        if rank == 1:
            _core.{call} = interrupted
        try:
            say(**attempt(fpd.{call}), **states())
        except KeyboardInterrupt:
            say(ranks={{"1": ""}}, **states())
        """,
        ranks=2,
    )
    before = "active" if call == "pause" else "paused"
    for answers in said.values():
        assert list(answers[0]["ranks"]) == ["1"]
        assert (answers[0]["weights"], answers[0]["cache"]) == (before, before)


def test_a_failing_callback_in_taking_a_pause_back_is_not_said_to_leave_pools_paused(tmp_path):
    said, _ = run(
        tmp_path,
        """
        if rank == 0:
            weights.on_resume(lambda _: 1 / 0)
        else:
            weights.on_pause(lambda _: 1 / 0)
        say(**attempt(fpd.pause), **states())
        """,
        ranks=2,
    )
    assert (said[0][0]["weights"], said[0][0]["cache"]) == ("active", "active")
    assert "failed in part" in str(said[0][0]["notes"])
    assert "are paused:" not in str(said[0][0]["notes"])


def test_times_without_a_limit_are_refused():
    import fencepool.distributed as fpd

    for wrong in ({"timeout": None}, {"patience": float("inf")}):
        with pytest.raises(ValueError, match="limit"):
            fpd.pause(**wrong)
    with pytest.raises(ValueError, match="limit"):
        fpd.resume(wait=float("inf"))


def test_groups_of_some_ranks_and_several_groups(tmp_path):
    said, _ = run(
        tmp_path,
        """
        halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = halves[rank % 2]
        if rank % 2 == 0:
            say(**attempt(fpd.pause, "weights", group=mine), **states())
            fpd.resume(group=mine)
        else:
            say(**attempt(fpd.pause, "nothing", group=mine), **states())
        try:
            fpd.pause(group=halves[1 - rank % 2])
        except ValueError as error:
            say(refused=str(error))
        dist.barrier()
        say(**attempt(fpd.pause), **states())
        """,
    )
    for rank, answers in said.items():
        if rank % 2:
            assert "known tags" in answers[0]["error"]
            assert sorted(answers[0]["ranks"]) == ["1", "3"]
        else:
            assert (answers[0]["error"], answers[0]["weights"], answers[0]["cache"]) == (
                "",
                "paused",
                "active",
            )
        assert "not in the group" in answers[1]["refused"]
        assert (answers[2]["error"], answers[2]["weights"]) == ("", "paused")


def test_without_a_process_group_it_says_so():
    import fencepool.distributed as fpd

    with pytest.raises(RuntimeError, match="init_process_group"):
        fpd.pause()


def test_a_store_that_is_gone_is_said(tmp_path):
    said, statuses = run(
        tmp_path,
        """
        # The process that hosts a TCP store ends.
        from datetime import timedelta
        port = 20000 + os.getppid() % 20000
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", port, size, is_master=True, timeout=timedelta(seconds=20))
        else:
            store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=timedelta(seconds=20))
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        fpd.pause("kv_cache")
        store.set(f"paused/{rank}", "")
        if rank == 0:
            store.wait([f"paused/{other}" for other in range(size)])
            os.kill(os.getpid(), signal.SIGKILL)
        say(**attempt(fpd.resume, "kv_cache", patience=3), **states())
        """,
    )
    assert statuses[1:] == [0, 0, 0]
    for rank in (1, 2, 3):
        assert "store" in said[rank][0]["error"]
        assert said[rank][0]["cache"] == "paused"
