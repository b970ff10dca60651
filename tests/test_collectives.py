"""Ranks that reduce what lies in their pools: over NCCL with a GPU each, over gloo on the embedded driver.

The agreement among ranks uses the process group's store only, so a group that knows no CPU tensors will do.
"""

from __future__ import annotations

import signal

import pytest

from support.ranks import Setting, run

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]  # processes that import PyTorch

GIB = 1 << 30
GPUS = pytest.mark.gpu(count=2)
SETTINGS = [
    Setting(),
    pytest.param(Setting("nccl", "cuda", GIB), marks=GPUS),
    pytest.param(Setting("cpu:gloo,cuda:nccl", "cuda", GIB), marks=GPUS),
]

# `numbers` are the weights, which a collective reads and writes in place.
NUMBERS = """
numbers = tensor.view(torch.float32)

def is_everywhere(value):
    return bool((numbers == value).all())

def reduce_outside():
    "Collectives go on while pools are paused: NCCL's own memory is in none of them."
    here = torch.full((1000,), float(rank + 1), device=weights.torch_device)
    dist.all_reduce(here)
    return bool((here == size * (size + 1) / 2).all())
"""

CYCLES = """
for cycle in range(10):
    numbers.fill_(cycle + rank)
    keys.fill_(7)
    work = dist.all_reduce(numbers, async_op=True)
    if not IS_CUDA:
        work.wait()  # gloo's threads are nothing that a pause could wait for
    fpd.pause("weights", "kv_cache")
    mapped = sum(pool.bytes_mapped for pool in fp.status())
    reduced = reduce_outside()

    fpd.resume("weights", wait=30)
    total = sum(cycle + one for one in range(size))
    kept = is_everywhere(total)
    dist.all_reduce(numbers)
    again = is_everywhere(size * total)

    fpd.resume("kv_cache", wait=30)
    say(mapped=mapped, reduced=reduced, kept=kept, again=again, zero=not bool(keys.any()), **states())
"""


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.backend)
def test_weights_are_reduced_right_after_each_resume_in_stages(tmp_path, setting):
    """Each pause comes while a reduction of the weights is in flight on the device."""
    said, _ = run(tmp_path, NUMBERS + CYCLES, ranks=2, setting=setting)
    for rank in range(2):
        assert len(said[rank]) == 10
        for cycle in said[rank]:
            assert cycle == {
                "rank": rank,
                "mapped": 0,
                "reduced": True,
                "kept": True,
                "again": True,
                "zero": True,
                "weights": "active",
                "cache": "active",
            }


SHORT = """
def take_memory():
    "All but a fraction of what the weights need."
    if not IS_CUDA:
        fp.host_driver.configure("cpu", memory_limit=1 << 20)
        return None
    free, _ = fp.memory_info(DEVICE)
    return torch.empty(free - BYTES // 2, dtype=torch.uint8, device=DEVICE)

def give_memory():
    fp.host_driver.configure("cpu", memory_limit=0)
    if IS_CUDA:
        torch.cuda.empty_cache()

numbers.fill_(rank + 1)
dist.all_reduce(numbers)
fpd.pause()
hog = take_memory() if rank == 1 else None
say(**attempt(fpd.resume, "weights"), **states())
reduced = reduce_outside()
del hog
give_memory()
say(**attempt(fpd.resume, wait=30), **states(), kept=is_everywhere(3), reduced=reduced)
dist.all_reduce(numbers)
say(right=is_everywhere(6))
"""


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=lambda setting: setting.backend)
def test_a_rank_without_memory_is_named_and_all_stay_paused_and_can_reduce(tmp_path, setting):
    said, _ = run(tmp_path, NUMBERS + SHORT, ranks=2, setting=setting)
    assert said[0][0]["error"] == said[1][0]["error"]
    for rank in range(2):
        failed, again, last = said[rank]
        assert list(failed["ranks"]) == ["1"]
        assert "missing" in failed["ranks"]["1"]
        assert failed["cause"] == ("OutOfMemoryError" if rank == 1 else "NoneType")
        assert (failed["weights"], failed["cache"]) == ("paused", "paused")
        assert (again["error"], again["weights"], again["cache"]) == ("", "active", "active")
        assert (again["kept"], again["reduced"], last["right"]) == (True, True, True)


KILLED = """
dist.all_reduce(numbers.fill_(rank + 1))
fpd.pause()
if rank == 1:
    die_before(fpd.transitions.local, "_resume")
say(**attempt(fpd.resume, patience=5), **states())
fp.resume()
say(kept=is_everywhere(3))
"""


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=lambda setting: setting.backend)
def test_a_killed_rank_is_named_after_the_patience_is_over(tmp_path, setting):
    said, statuses = run(tmp_path, NUMBERS + KILLED, ranks=2, setting=setting)
    assert statuses == [0, -signal.SIGKILL]
    failed, last = said[0]
    assert list(failed["ranks"]) == ["1"]
    assert "has not answered within 5 s" in failed["error"]
    assert 4 < failed["seconds"] < 30
    assert failed["weights"] == "paused"
    assert last["kept"]


def test_ranks_agree_in_a_group_without_collectives(tmp_path):
    """PyTorch's "fake" backend does nothing when it is called."""
    said, _ = run(
        tmp_path,
        """
        from torch.testing._internal.distributed import fake_pg
        dist.destroy_process_group()
        store = dist.FileStore(os.environ["INIT"].removeprefix("file://") + "-fake", size)
        dist.init_process_group("fake", store=store, rank=rank, world_size=size)
        say(**attempt(fpd.pause, "weights" if rank != 1 else "nothing"), **states())
        say(**attempt(fpd.pause), **states())
        say(**attempt(fpd.resume), **states())
        """,
    )
    for answers in said.values():
        assert list(answers[0]["ranks"]) == ["1"]
        assert (answers[1]["error"], answers[1]["weights"]) == ("", "paused")
        assert (answers[2]["error"], answers[2]["weights"]) == ("", "active")
