"""TMS_INIT_ENABLE: everything that a program allocates can be paused, as slime starts its trainers."""

from __future__ import annotations

import threading

import pytest

import fencepool as fp
from support import children

PROGRAM = """
import torch
from fencepool.integrations.torch_memory_saver import torch_memory_saver as saver
from fencepool import transitions

DEVICE = torch.device({torch_device!r})
MIB = 1 << 20

def full(value, size=4 * MIB):
    return torch.full((size,), value, dtype=torch.uint8, device=DEVICE)

def is_pooled(tensor):
    return any(pool.contains(tensor) for pool in transitions.select((), None))

def is_all(tensor, value):
    return bool((tensor == value).all())
"""


def run(device: str, code: str, **changes: str) -> None:
    """Run a program with everything pausable on that device; it has to end well and in silence."""
    start = PROGRAM.format(torch_device=device.partition(":")[0])
    settings = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1", **changes}
    if device == "cpu":
        settings["FENCEPOOL_DEVICE"] = "cpu"
    children.run_silently(start + code, **settings)


def test_everything_is_paused_and_comes_back(device):
    code = """
weights = full(42)
address = weights.data_ptr()
assert is_pooled(weights)
saver.pause()
assert fp.status()[0].state == "paused"
saver.resume()
assert weights.data_ptr() == address and is_all(weights, 42)
later = full(7)
saver.pause()
saver.resume()
assert is_all(weights, 42) and is_all(later, 7)
"""
    run(device, code)


def test_on_the_embedded_driver_other_threads_allocate_ordinary_memory():
    code = """
import threading
weights = full(42)
found = []
thread = threading.Thread(target=lambda: found.append(full(5)))
thread.start(); thread.join()
assert is_pooled(weights) and not is_pooled(found[0])
saver.pause()
assert is_all(found[0], 5)
saver.resume()
"""
    run("cpu", code)


def test_a_region_of_a_pool_made_without_the_saver_counts_too(device):
    code = """
weights = full(42)
other = fp.pool("other", DEVICE)
with other.region():
    inside = full(1)
    with fp.disable():
        outside = full(2)
assert other.contains(inside) and not is_pooled(outside)
assert not other.contains(full(3)) and is_pooled(full(4))
"""
    run(device, code)


def test_contents_are_kept_only_when_asked_for(device):
    code = """
full(42)
assert [pool.backup for pool in fp.status()] == ["none"]
"""
    run(device, code, TMS_INIT_ENABLE_CPU_BACKUP="0")


def test_what_is_allocated_while_it_is_paused_is_ordinary_memory(device):
    code = """
weights = full(42)
saver.pause()
meanwhile = full(1)
assert not is_pooled(meanwhile) and is_all(meanwhile, 1)
with saver.disable():
    inside = full(2)
assert not is_pooled(inside) and is_all(inside, 2)
saver.resume()
later = full(3)
assert is_pooled(later)
saver.pause()
assert is_all(meanwhile, 1) and is_all(inside, 2)
saver.resume()
assert is_all(weights, 42) and is_all(later, 3)
"""
    run(device, code)


def test_a_pause_that_fails_leaves_everything_pausable(device):
    code = """
weights = full(42)
[pool] = transitions.select((), None)
def refuse(pool):
    raise ZeroDivisionError
handle = pool.on_pause(refuse)
try:
    saver.pause()
except ZeroDivisionError:
    pass
assert pool.state == "active"
assert is_pooled(full(1)) and is_all(weights, 42)
handle.remove()
saver.pause()
assert pool.state == "paused"
saver.resume()
assert is_all(weights, 42)
"""
    run(device, code)


def test_disable_while_it_is_active_and_a_resume_inside(device):
    code = """
weights = full(42)
with saver.disable():
    inside = full(2)
    assert not is_pooled(inside)
    saver.pause()
    saver.resume()
    assert not is_pooled(full(3))
assert is_pooled(full(4))
saver.pause()
with saver.disable():
    saver.resume()
    assert not is_pooled(full(5))
assert is_pooled(full(6))
assert is_all(weights, 42) and is_all(inside, 2)
"""
    run(device, code)


def test_a_region_inside_has_its_own_tag_and_policy(device):
    code = """
weights = full(42)
cdll = saver._impl and saver._impl._binary_wrapper.cdll
with saver.region(tag="grad_buffer", enable_cpu_backup=False):
    grad_buffer = full(99)
cdll = saver._impl._binary_wrapper.cdll
assert cdll.tms_get_interesting_region() and cdll.tms_get_enable_cpu_backup()
assert cdll.tms_get_current_tag() == b"default"
policies = {pool.tag: pool.backup for pool in fp.status()}
assert policies == {"default": "host", "grad_buffer": "none"}, policies
saver.pause("grad_buffer")
assert is_all(weights, 42)
saver.pause()
saver.resume()
assert is_all(weights, 42)
assert is_all(grad_buffer.fill_(0), 0)
assert is_pooled(full(1))
"""
    run(device, code)


def test_the_saver_is_turned_off_and_on_as_slime_does_it(device):
    code = """
weights = full(42)
saver._ensure_initialized()
cdll = saver._impl._binary_wrapper.cdll
cdll.tms_set_interesting_region(False)
assert not cdll.tms_get_interesting_region()
assert not is_pooled(full(1))
cdll.tms_set_interesting_region(True)
assert is_pooled(full(2))
"""
    run(device, code)


@pytest.mark.gpu
def test_on_a_gpu_all_threads_allocate_pausable_memory():
    code = """
import threading
weights = torch.ones(1 << 20, device=DEVICE, requires_grad=True)
(weights * 2).sum().backward()
assert is_pooled(weights) and is_pooled(weights.grad)
found = []
thread = threading.Thread(target=lambda: found.append(full(5)))
thread.start(); thread.join()
assert is_pooled(found[0])
thread = threading.Thread(target=saver.pause)
thread.start(); thread.join()
assert not is_pooled(full(6))
saver.resume()
assert is_all(weights, 1) and is_all(weights.grad, 2) and is_all(found[0], 5)
"""
    run("cuda", code)


@pytest.mark.gpu
def test_on_a_gpu_the_cache_can_be_emptied():
    code = """
weights = full(42)
scratch = full(1, 256 * MIB)
mapped = lambda: sum(pool.bytes_mapped for pool in fp.status())
before = mapped()
del scratch
torch.cuda.empty_cache()
torch.cuda.synchronize()  # freed memory goes when the device is done with it
assert mapped() <= before - 256 * MIB
saver.pause()
saver.resume()
assert is_all(weights, 42)
"""
    run("cuda", code)


def test_everything_may_be_kept_on_disk(device, tmp_path):
    code = """
weights = full(42)
saver.pause()
(pool,) = fp.status()
assert (pool.backup, pool.state) == ("disk", "paused")
saver.resume()
assert is_all(weights, 42)
"""
    run(
        device,
        code,
        TMS_INIT_ENABLE_CPU_BACKUP="0",
        TMS_INIT_ENABLE_DISK_BACKUP="1",
        TMS_DISK_BACKUP_DIR=str(tmp_path),
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_on_a_gpu_a_capture_has_its_own_memory():
    code = """
weights = torch.full((1 << 20,), 3.0, device=DEVICE)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    doubled = weights * 2
    result = doubled + 1
assert not is_pooled(doubled) and not is_pooled(result)
assert is_pooled(full(1))
saver.pause()
saver.resume()
graph.replay()
assert is_all(result, 7)
graph = torch.cuda.CUDAGraph()
with saver.cuda_graph(graph, tag="graph", enable_cpu_backup=True):
    result = weights * 5
assert is_pooled(result)
saver.pause()
saver.resume()
graph.replay()
assert is_all(result, 15)
"""
    run("cuda", code)


@pytest.mark.gpu(count=2)
def test_the_device_that_the_program_chooses_counts():
    code = """
torch.cuda.set_device(1)
weights = full(42)
assert is_pooled(weights)
assert [pool.device for pool in fp.status()] == ["cuda:1"]
"""
    run("cuda", code)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"TMS_INIT_ENABLE": "perhaps"}, "ValueError: TMS_INIT_ENABLE is 1 or 0"),
        ({"TMS_INIT_ENABLE_CPU_BACKUP": "perhaps"}, "ValueError: TMS_INIT_ENABLE_CPU_BACKUP is 1 or 0"),
        ({"TMS_INIT_CPU_BACKUP_BACKEND": "tape"}, "ValueError: TMS_INIT_CPU_BACKUP_BACKEND is 'mmap'"),
        ({"TMS_INIT_ENABLE_DISK_BACKUP": "perhaps"}, "ValueError: TMS_INIT_ENABLE_DISK_BACKUP is 1 or 0"),
        (
            {"TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"},
            "ValueError: enable_cpu_backup and enable_disk_backup exclude each other",
        ),
        ({"TMS_INIT_ENABLE_DISK_BACKUP": "1", "TMS_DISK_BACKUP_DIR": "/nowhere"}, "DiskError"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_met_is_refused_at_import(changes, error):
    code = "import fencepool.integrations.torch_memory_saver"
    done = children.run(code, **{"TMS_INIT_ENABLE": "1", "FENCEPOOL_DEVICE": "cpu", **changes})
    assert done.returncode == 1
    assert error in done.stderr


def test_the_other_variables_alone_change_nothing():
    code = """
    import torch
    from fencepool.integrations.torch_memory_saver import torch_memory_saver
    torch.full((1 << 20,), 1)
    assert fp.status() == []
    """
    children.run_silently(
        code,
        TMS_INIT_ENABLE="0",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
        TMS_INIT_ENABLE_DISK_BACKUP="1",
        TMS_INIT_CPU_BACKUP_BACKEND="mmap",
        TMS_DISK_BACKUP_DIR="/nowhere",
        TMS_DISK_BACKUP_CHUNK_MB="8",
        FENCEPOOL_DEVICE="cpu",
    )


def test_a_pause_that_empties_pytorchs_cache_and_a_thread_that_enters_the_pool_do_not_wait_for_each_other(
    host, new_tag, monkeypatch
):
    from fencepool.integrations.torch_memory_saver import _ambient
    from fencepool.pools import exclusive
    from fencepool.pytorch import regions

    class Route:
        def begin(self):
            pass

        end = begin

    pool = fp.pool(new_tag(), "cpu")
    waits, emptied = threading.Event(), threading.Event()

    def waiting(*pools):
        waits.set()
        return exclusive(*pools)

    def empty():
        with ambient.renewed():
            emptied.set()

    monkeypatch.setattr(regions, "exclusive", waiting)
    monkeypatch.setattr(_ambient, "_cuda_route", lambda pool, inside: Route())
    ambient = _ambient.Ambient(lambda tag, backup, device: pool)
    ambient._policy, ambient._device = (pool.tag, "none"), "cpu"
    threads = [threading.Thread(target=ambient.settle), threading.Thread(target=empty)]
    with exclusive(pool), pool._without_regions("paused"):
        threads[0].start()
        assert waits.wait(20)
        threads[1].start()
        is_emptied = emptied.wait(20)  # before the pool is let go
    for thread in threads:
        thread.join()
    assert is_emptied
    assert ambient._pool is pool
    ambient._end()
