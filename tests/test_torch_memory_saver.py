"""Code written for torch_memory_saver, over pools: what its calls do, and what they do on misuse."""

from __future__ import annotations

import logging
import stat
import threading

import pytest
import torch

import fencepool as fp
from fencepool import transitions
from fencepool.integrations.torch_memory_saver import TorchMemorySaver, _pools
from support import children
from support.contents import assert_same, is_same, pattern
from support.machine import MIB, Machine

SIZE = 4 * MIB


@pytest.fixture
def saver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> TorchMemorySaver:
    monkeypatch.setenv("FENCEPOOL_DEVICE", machine.device)
    return TorchMemorySaver()


def filled(machine: Machine, seed: int = 0, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor made by PyTorch where the innermost region says, with a pattern in it, and the pattern."""
    with fp.disable():  # the pattern itself is kept for other tests
        expected = pattern(size, seed)
    return torch.empty(size, dtype=torch.uint8, device=machine.torch_device).copy_(expected), expected


def states(*tags: str) -> list[str]:
    return [pool.state for pool in fp.status() if pool.tag in tags]


# --- pause and resume ------------------------------------------------------------------------------


def test_a_region_with_a_backup_keeps_addresses_and_contents(saver, machine, tag):
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(machine)
    address, free = tensor.data_ptr(), machine.free()
    for _ in range(2):
        saver.pause(tag)
        assert not machine.is_any_mapped(tensor)
        assert machine.free() >= free + SIZE
        saver.resume(tag)
        assert tensor.data_ptr() == address
        assert_same(tensor, before)


def test_a_region_without_a_backup_keeps_addresses_only(saver, machine, tag):
    with saver.region(tag=tag):
        tensor, _ = filled(machine)
    address = tensor.data_ptr()
    saver.pause(tag)
    assert not machine.is_any_mapped(tensor)
    assert [pool.host_bytes for pool in fp.status() if pool.tag == tag] == [0]
    saver.resume(tag)
    assert tensor.data_ptr() == address
    assert_same(tensor.copy_(pattern(SIZE, 1)), pattern(SIZE, 1))


def test_a_region_without_a_tag_has_the_default_one(saver, machine):
    with saver.region():
        tensor, _ = filled(machine)
    saver.pause("default")
    assert not machine.is_any_mapped(tensor)
    saver.resume("default")
    assert machine.is_all_mapped(tensor)


def test_a_region_is_a_decorator_too(saver, machine, tag):
    @saver.region(tag=tag)
    def make() -> torch.Tensor:
        return filled(machine)[0]

    tensors = [make(), make()]
    saver.pause(tag)
    assert not any(map(machine.is_any_mapped, tensors))
    saver.resume(tag)


def test_a_tag_with_both_policies_is_paused_as_one(saver, machine, tag):
    with saver.region(tag=tag, enable_cpu_backup=True):
        kept, before = filled(machine)
    with saver.region(tag=tag, enable_cpu_backup=False):
        dropped, _ = filled(machine)
    saver.pause(tag)
    assert not machine.is_any_mapped(kept)
    assert not machine.is_any_mapped(dropped)
    saver.resume(tag)
    assert machine.is_all_mapped(dropped)
    assert_same(kept, before)


def test_one_tag_is_paused_and_the_others_are_not(saver, machine, new_tag):
    weights, cache = new_tag("weights"), new_tag("kv_cache")
    with saver.region(tag=weights):
        first, _ = filled(machine)
    with saver.region(tag=cache):
        second, before = filled(machine)
    saver.pause(tag=weights)
    assert not machine.is_any_mapped(first)
    assert_same(second, before)
    saver.resume(tag=weights)


@pytest.mark.parametrize("nothing", [{}, {"tag": None}, {"tag": ""}], ids=str)
def test_without_a_tag_everything_of_the_saver_is_paused_and_nothing_else(saver, machine, new_tag, nothing):
    mine, others = [new_tag(), new_tag()], new_tag()
    for tag in mine:
        with saver.region(tag=tag):
            filled(machine)
    fp.pool(others, machine.device)
    saver.pause(**nothing)
    assert states(*mine) == ["paused", "paused"]
    assert states(others) == ["active"]
    saver.resume(**nothing)
    assert states(*mine) == ["active", "active"]


def test_all_savers_of_a_process_act_on_the_same_pools(saver, machine, tag):
    with saver.region(tag=tag):
        tensor, _ = filled(machine)
    TorchMemorySaver().pause()
    assert not machine.is_any_mapped(tensor)
    saver.resume()


# --- misuse that ends the process with torch_memory_saver ------------------------------------------------


def test_pausing_twice_and_resuming_twice_are_harmless(saver, machine, tag):
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(machine)
    saver.resume(tag)
    assert_same(tensor, before)
    saver.pause(tag)
    saver.pause(tag)
    saver.pause()
    assert not machine.is_any_mapped(tensor)
    saver.resume(tag)
    saver.resume()
    assert_same(tensor, before)


def test_resuming_everything_resumes_what_is_still_paused(saver, machine, new_tag):
    tags = [new_tag(), new_tag()]
    held = []
    for tag in tags:
        with saver.region(tag=tag, enable_cpu_backup=True):
            held.append(filled(machine))
    saver.pause()
    saver.resume(tags[0])
    saver.resume()
    for tensor, before in held:
        assert_same(tensor, before)


def test_a_resume_without_memory_raises_and_works_later(host, monkeypatch, tag):
    monkeypatch.setenv("FENCEPOOL_DEVICE", "cpu")
    saver = TorchMemorySaver()
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(host)
    saver.pause(tag)
    left, total = fp.memory_info("cpu")
    fp.host_driver.configure("cpu", memory_limit=total - left + SIZE // 2)
    with pytest.raises(fp.OutOfMemoryError):
        saver.resume(tag)
    assert states(tag) == ["paused"]
    fp.host_driver.configure("cpu", memory_limit=0)
    saver.resume(tag)
    assert_same(tensor, before)


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_tag_without_pools_is_passed_over_with_one_warning(saver, machine, new_tag, caplog, verb):
    known, unknown = new_tag(), new_tag("unknown")
    with saver.region(tag=known):
        filled(machine)
    with caplog.at_level(logging.DEBUG, logger="fencepool"):
        getattr(saver, verb)(unknown)
        getattr(saver, verb)(unknown)
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
    assert f"no pool has the tag {unknown!r}: nothing to {verb}" in caplog.text
    assert repr(known) in caplog.text
    assert states(known) == ["active"]


def test_a_tag_whose_pool_was_closed_is_passed_over(saver, machine, tag):
    with saver.region(tag=tag):
        pass
    fp.pool(tag, machine.device).close()
    saver.pause()
    saver.pause(tag)
    saver.resume()
    assert states(tag) == []


def test_entering_a_region_of_a_paused_tag_raises(saver, machine, tag):
    with saver.region(tag=tag):
        filled(machine)
    saver.pause(tag)
    with pytest.raises(fp.PoolPausedError), saver.region(tag=tag):
        pytest.fail("the block ran")
    saver.resume(tag)
    with saver.region(tag=tag):
        tensor, before = filled(machine)
    assert_same(tensor, before)


def test_a_read_of_paused_memory_does_not_see_old_contents():
    code = """
    import torch
    from fencepool.integrations.torch_memory_saver import torch_memory_saver
    with torch_memory_saver.region():
        tensor = torch.full((1 << 20,), 7, dtype=torch.uint8)
    torch_memory_saver.pause()
    print(tensor.data_ptr(), flush=True)
    print(tensor[0].item())
    """
    done = children.run(code, FENCEPOOL_DEVICE="cpu")
    assert done.returncode == -11, done.stderr  # SIGSEGV
    assert len(done.stdout.split()) == 1


# --- regions ---------------------------------------------------------------------------------------


def test_the_innermost_region_counts(saver, machine, new_tag):
    outer, inner = new_tag("outer"), new_tag("inner")
    with saver.region(tag=outer):
        first, _ = filled(machine)
        with saver.region(tag=inner):
            second, _ = filled(machine)
        third, _ = filled(machine)
    fourth, before = filled(machine)
    saver.pause(inner)
    assert machine.is_all_mapped(first)
    assert not machine.is_any_mapped(second)
    saver.pause(outer)
    assert not machine.is_any_mapped(first)
    assert not machine.is_any_mapped(third)
    assert_same(fourth, before)
    saver.resume()


def test_a_region_that_an_exception_leaves_is_left(saver, machine, tag):
    with pytest.raises(ZeroDivisionError), saver.region(tag=tag):
        raise ZeroDivisionError
    tensor, before = filled(machine)
    saver.pause()
    assert_same(tensor, before)
    saver.resume()


def test_a_region_is_of_its_thread(saver, machine, tag):
    tensors = []
    with saver.region(tag=tag):
        thread = threading.Thread(target=lambda: tensors.append(filled(machine)))
        thread.start()
        thread.join()
    saver.pause(tag)
    assert is_same(*tensors[0])
    saver.resume(tag)


def test_disable_allocates_ordinary_memory(saver, machine, tag):
    with saver.region(tag=tag):
        with saver.disable():
            ordinary, before = filled(machine)
        pausable, _ = filled(machine)
    saver.pause(tag)
    assert not machine.is_any_mapped(pausable)
    assert_same(ordinary, before)
    saver.resume(tag)


def test_disable_outside_of_a_region_is_harmless(saver, machine):
    with saver.disable(), saver.disable(dispose_mem_pool_after_use=False):
        tensor, before = filled(machine)
    saver.pause()
    assert_same(tensor, before)


@pytest.mark.gpu
def test_memory_of_a_disable_block_goes_back_to_the_device_at_its_end(saver, machine, tag):
    if machine.is_host:
        pytest.skip("PyTorch has no cache on the embedded driver")
    torch.cuda.empty_cache()
    free = machine.free()
    with saver.region(tag=tag), saver.disable():
        tensor, _ = filled(machine, size=64 * MIB)
        assert machine.free() <= free - 64 * MIB
        del tensor
    assert machine.free() >= free - 2 * MIB


def test_a_region_without_a_device_says_what_to_do(saver, monkeypatch):
    monkeypatch.delenv("FENCEPOOL_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(fp.DriverUnavailable, match="FENCEPOOL_DEVICE=cpu"), saver.region():
        pytest.fail("the block ran")


@pytest.mark.gpu
def test_without_a_setting_the_current_device_counts(monkeypatch, new_tag):
    monkeypatch.delenv("FENCEPOOL_DEVICE", raising=False)
    for setting in (None, "cuda"):
        if setting:
            monkeypatch.setenv("FENCEPOOL_DEVICE", setting)
        tag = new_tag()
        with TorchMemorySaver().region(tag=tag):
            pass
        assert [pool.device for pool in fp.status() if pool.tag == tag] == [
            f"cuda:{torch.cuda.current_device()}"
        ]


# --- backups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_copy", [False, True])
def test_the_backup_of_a_paused_tensor_can_be_read(saver, machine, tag, zero_copy):
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(machine)
        typed = torch.arange(600, dtype=torch.float32, device=machine.torch_device).view(10, 20, 3)
    saver.pause(tag)
    backup = saver.get_cpu_backup(tensor, zero_copy=zero_copy)
    assert backup.device == torch.device("cpu")
    assert_same(backup, before)
    found = saver.get_cpu_backup(typed, zero_copy=zero_copy)
    assert (found.dtype, found.shape, found.stride()) == (typed.dtype, typed.shape, typed.stride())
    assert torch.equal(found, torch.arange(600, dtype=torch.float32).view(10, 20, 3))
    del backup, found
    saver.resume(tag)
    assert_same(tensor, before)


def test_zero_copy_gives_the_backup_itself(saver, machine, tag):
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, _ = filled(machine)
    saver.pause(tag)
    views = [saver.get_cpu_backup(tensor, zero_copy=True) for _ in range(2)]
    assert views[0].data_ptr() == views[1].data_ptr()
    copies = [saver.get_cpu_backup(tensor) for _ in range(2)]
    assert copies[0].data_ptr() != copies[1].data_ptr()
    views[0].fill_(9)  # what is written to it is restored
    saver.resume(tag)
    assert bool((tensor == 9).all())


def test_a_backup_in_pieces_is_copied_whatever_was_asked_for(saver, machine, tag, monkeypatch):
    backup_of = fp.Pool.backup_of

    def in_pieces(pool, tensor, *, copy=True):
        if not copy:
            raise ValueError("the backup is in 2 pieces")
        return backup_of(pool, tensor, copy=copy)

    monkeypatch.setattr(fp.Pool, "backup_of", in_pieces)
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(machine)
    saver.pause(tag)
    assert_same(saver.get_cpu_backup(tensor, zero_copy=True), before)
    saver.resume(tag)


def test_a_copy_of_a_backup_outlives_the_resume(saver, machine, tag):
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(machine)
    saver.pause(tag)
    backup = saver.get_cpu_backup(tensor)
    saver.resume(tag)
    tensor.zero_()
    assert_same(backup, before)


def test_what_is_not_paused_has_no_backup_to_read(saver, machine, tag):
    ordinary, _ = filled(machine)
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, _ = filled(machine)
    assert saver.get_cpu_backup(tensor) is None
    saver.pause(tag)
    assert saver.get_cpu_backup(ordinary) is None
    saver.resume(tag)
    assert saver.get_cpu_backup(tensor) is None


def test_a_tensor_paused_without_a_backup_raises(saver, machine, tag):
    with saver.region(tag=tag):
        tensor, _ = filled(machine)
    saver.pause(tag)
    with pytest.raises(fp.Error, match="enable_cpu_backup=True"):
        saver.get_cpu_backup(tensor)
    saver.resume(tag)


def host_bytes(tag: str) -> int:
    return sum(pool.host_bytes for pool in fp.status() if pool.tag == tag)


def test_backups_go_back_at_a_resume_unless_retained(saver, machine, tag, monkeypatch):
    monkeypatch.delenv("TMS_RETAIN_CPU_BACKUP", raising=False)
    assert saver.retain_cpu_backup is False
    with saver.region(tag=tag, enable_cpu_backup=True):
        tensor, before = filled(machine)
    saver.pause(tag)
    assert host_bytes(tag) >= SIZE
    saver.resume(tag)
    assert host_bytes(tag) == 0
    assert_same(tensor, before)

    saver.retain_cpu_backup = True
    assert saver.retain_cpu_backup is True
    saver.pause(tag)
    saver.resume(tag)
    assert host_bytes(tag) >= SIZE
    assert_same(tensor, before)

    saver.retain_cpu_backup = False  # not at once: at the next resume
    assert host_bytes(tag) >= SIZE
    saver.pause(tag)
    saver.resume(tag)
    assert host_bytes(tag) == 0
    assert_same(tensor, before)


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("no", False)])
def test_the_environment_says_whether_backups_are_retained_at_first(monkeypatch, value, expected):
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", value)
    saver = TorchMemorySaver()
    assert saver.retain_cpu_backup is expected
    saver.retain_cpu_backup = not expected
    assert saver.retain_cpu_backup is not expected


def test_a_variable_that_says_neither_yes_nor_no_raises(monkeypatch):
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", "perhaps")
    with pytest.raises(ValueError, match="TMS_RETAIN_CPU_BACKUP is 1 or 0"):
        _ = TorchMemorySaver().retain_cpu_backup


@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_both_backup_backends_keep_contents(saver, machine, tag, backend):
    with saver.region(tag=tag, enable_cpu_backup=True, cpu_backup_backend=backend):
        assert saver._impl._binary_wrapper.cdll.tms_get_cpu_backup_backend() == backend.encode()
        tensor, before = filled(machine)
    assert saver._impl._binary_wrapper.cdll.tms_get_cpu_backup_backend() == b""
    saver.pause(tag)
    saver.resume(tag)
    assert_same(tensor, before)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"cpu_backup_backend": "pinned"}, ValueError),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "tape"}, ValueError),
        ({"enable_cpu_backup": True, "enable_disk_backup": True}, ValueError),
    ],
    ids=str,
)
def test_a_region_that_cannot_be_is_refused(saver, machine, tag, arguments, error):
    with pytest.raises(error), saver.region(tag=tag, **arguments):
        pytest.fail("the block ran")
    assert states(tag) == []


def test_a_region_keeps_its_contents_on_disk(saver, machine, tag, tmp_path):
    saver.set_disk_backup_dir(str(tmp_path / "new" / "backups"))
    assert stat.S_IMODE((tmp_path / "new" / "backups").stat().st_mode) == 0o700
    with saver.region(tag=tag, enable_disk_backup=True):
        functions = saver._impl._binary_wrapper.cdll
        assert functions.tms_get_enable_disk_backup() is True
        assert functions.tms_get_enable_cpu_backup() is False
        tensor, before = filled(machine)
    for _ in range(2):
        saver.pause(tag)
        (pool,) = [one for one in fp.status() if one.tag == tag]
        assert (pool.backup, pool.host_bytes) == ("disk", 0)
        assert pool.disk_bytes >= tensor.numel()
        assert_same(saver.get_cpu_backup(tensor), before)
        assert_same(saver.get_cpu_backup(tensor, zero_copy=True), before)  # a copy, since a file has no view
        saver.resume(tag)
        assert_same(tensor, before)


def test_the_directory_for_backups_on_disk_may_be_a_variable(saver, machine, tag, tmp_path, monkeypatch):
    monkeypatch.setattr(_pools.pools, "_directory", "")
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path / "absent"))
    with pytest.raises(fp.DiskError, match="absent"), saver.region(tag=tag, enable_disk_backup=True):
        pytest.fail("the block ran")
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path))
    with saver.region(tag=tag, enable_disk_backup=True):
        tensor, before = filled(machine)
    saver.pause(tag)
    saver.resume(tag)
    assert_same(tensor, before)


# --- settings --------------------------------------------------------------------------------------


def test_the_saver_is_enabled_and_takes_both_hook_modes(saver, machine, tag):
    assert saver.enabled is True
    assert saver.hook_mode == "preload"
    for mode in ("torch", "preload"):
        saver.hook_mode = mode
        assert saver.hook_mode == mode
        with saver.region(tag=tag, enable_cpu_backup=True):
            tensor, before = filled(machine)
        saver.pause(tag)
        assert not machine.is_any_mapped(tensor)
        saver.resume(tag)
        assert_same(tensor, before)
    with pytest.raises(ValueError, match="hook_mode"):
        saver.hook_mode = "both"


def test_the_margin_stays_free(host, monkeypatch, tag):
    monkeypatch.setenv("FENCEPOOL_DEVICE", "cpu")
    saver = TorchMemorySaver()
    left, total = fp.memory_info("cpu")
    fp.host_driver.configure("cpu", memory_limit=total - left + 32 * MIB)
    try:
        saver.memory_margin_bytes = 16 * MIB
        assert saver.memory_margin_bytes == 16 * MIB
        with saver.region(tag=tag):
            tensor, before = filled(host, size=8 * MIB)
            with pytest.raises(torch.OutOfMemoryError):
                filled(host, size=12 * MIB)
        assert_same(tensor, before)
        saver.memory_margin_bytes = 0
        with saver.region(tag=tag):
            assert filled(host, size=12 * MIB)[0].numel() == 12 * MIB
    finally:
        saver.memory_margin_bytes = 0


def test_a_margin_set_first_holds_for_the_device_of_a_later_region(monkeypatch, tag):
    device = "cpu:3"  # no other test's regions were on it
    monkeypatch.setenv("FENCEPOOL_DEVICE", device)
    saver = TorchMemorySaver()
    saver.memory_margin_bytes = MIB
    try:
        assert fp.memory_margin(device) == 0
        with saver.region(tag=tag):
            pass
        assert fp.memory_margin(device) == MIB
    finally:
        saver.memory_margin_bytes = 0
    assert fp.memory_margin(device) == 0


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_margin_that_is_none_is_refused(value, error):
    saver = TorchMemorySaver()
    with pytest.raises(error):
        saver.memory_margin_bytes = value
    assert saver.memory_margin_bytes == 0


# --- what programs reach for below the methods -----------------------------------------------------


def test_the_insides_are_there_once_the_saver_was_used(saver):
    assert saver._impl is None
    saver._ensure_initialized()
    assert saver._impl is not None
    assert saver._impl._binary_wrapper.cdll.tms_get_enable_disk_backup() is False


def test_the_saver_can_be_turned_off_and_on_as_slime_does_it(saver, machine, tag):
    with saver.region(tag=tag, enable_cpu_backup=True):
        functions = saver._impl._binary_wrapper.cdll
        assert functions.tms_get_interesting_region()
        assert functions.tms_get_enable_cpu_backup()
        assert functions.tms_get_current_tag() == tag.encode()
        functions.tms_set_interesting_region(False)
        assert not functions.tms_get_interesting_region()
        ordinary, before = filled(machine)
        functions.tms_set_interesting_region(True)
        assert functions.tms_get_interesting_region()
        pausable, _ = filled(machine)
    assert not functions.tms_get_interesting_region()
    functions.tms_pause(tag.encode())
    assert not machine.is_any_mapped(pausable)
    assert_same(ordinary, before)
    functions.tms_resume(None)
    assert machine.is_all_mapped(pausable)


def test_turning_off_inside_disable_leaves_it_disabled(saver, machine, tag):
    with saver.region(tag=tag), saver.disable():
        functions = saver._impl._binary_wrapper.cdll
        functions.tms_set_interesting_region(False)
        functions.tms_set_interesting_region(True)
        assert not functions.tms_get_interesting_region()
        tensor, before = filled(machine)
    saver.pause(tag)
    assert_same(tensor, before)
    saver.resume(tag)


def test_a_function_that_is_not_there_is_named(saver):
    saver._ensure_initialized()
    with pytest.raises(AttributeError, match="tms_set_current_tag"):
        saver._impl._binary_wrapper.cdll.tms_set_current_tag(b"x")


# --- CUDA graphs -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["preload", "torch"])
def test_a_captured_graph_replays_after_a_pause(saver, machine, tag, mode):
    if machine.is_host:
        pytest.skip("the embedded driver runs no graphs of PyTorch's")
    saver.hook_mode = mode
    given = torch.ones(SIZE, dtype=torch.float32, device=machine.torch_device)
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(cuda_graph=graph, tag=tag, enable_cpu_backup=True):
        made = given * 2
        result = made + 1
    graph.replay()
    assert bool((result == 3).all())
    saver.pause(tag)
    assert not machine.is_any_mapped(result)
    saver.resume(tag)
    given.fill_(5)
    graph.replay()
    assert bool((result == 11).all())
    del graph, made, result


@pytest.mark.gpu
def test_graphs_that_share_a_memory_pool_are_paused_together(saver, machine, tag):
    if machine.is_host:
        pytest.skip("the embedded driver runs no graphs of PyTorch's")
    given = torch.ones(SIZE, dtype=torch.float32, device=machine.torch_device)
    shared, graphs, results = torch.cuda.graph_pool_handle(), [], []
    for factor in (2, 3, 4):
        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, pool=shared, tag=tag, enable_cpu_backup=True):
            results.append(given * factor)
        graphs.append(graph)
    saver.pause(tag)
    assert not any(map(machine.is_any_mapped, results))
    saver.resume(tag)
    for graph, result, factor in zip(graphs, results, (2, 3, 4), strict=True):
        graph.replay()
        assert bool((result == factor).all())
    del graph, result
    graphs.clear()
    results.clear()


def test_regions_left_in_another_order_or_by_another_thread_leave_their_own_scope(new_tag):
    from fencepool.integrations.torch_memory_saver._thread import Scope, entered, innermost

    first, second, third = (Scope(new_tag(), "none") for _ in range(3))
    blocks = [entered(scope) for scope in (first, second, third)]
    for block in blocks:
        block.__enter__()
    blocks[0].__exit__(None, None, None)
    assert innermost() is third
    closing = threading.Thread(target=blocks[2].__exit__, args=(None, None, None))
    closing.start()
    closing.join()
    assert innermost() is second
    blocks[1].__exit__(None, None, None)
    assert innermost() is None


def test_another_directory_for_disks_makes_no_second_pool_of_a_tag_that_is_known(
    saver, machine, new_tag, tmp_path, monkeypatch
):
    monkeypatch.setattr(_pools.pools, "_directory", "")
    early, late = new_tag(), new_tag()
    for folder in ("first", "second"):
        saver.set_disk_backup_dir(str(tmp_path / folder))
        with saver.region(tag=early, enable_disk_backup=True):
            pass
    with saver.region(tag=late, enable_disk_backup=True):
        pass
    found = {pool.tag: pool.directory for pool in transitions.select((early, late), None)}
    assert found == {early: str(tmp_path / "first"), late: str(tmp_path / "second")}
    assert len(states(early)) == 1
