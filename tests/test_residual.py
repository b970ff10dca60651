"""What still holds device memory: the division, PyTorch's part, NVML's part, and on a device itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import fencepool as fp  # noqa: E402
from fencepool import _nvml, _torch_memory, division, remaining  # noqa: E402
from fencepool._devices import DeviceName  # noqa: E402
from fencepool.division import PoolBytes, TorchMemory  # noqa: E402
from support import children, nvml  # noqa: E402
from support.contents import filled  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30


def pool_bytes(tag="weights", state="active", held=0, host=0):
    return PoolBytes(tag, "cuda:0", state, held, host)


def by_key(lines):
    return {line.key: line for line in lines}


# The division.


def test_the_lines_of_a_process_add_up_to_what_it_holds():
    pools = [pool_bytes(held=14 * GIB), pool_bytes("kv", "paused")]
    seen = TorchMemory(cached_in_pools=2 * GIB, tensors=30 * GIB, graphs=GIB, cached=7 * GIB)
    lines = division.of_process(pools, seen, 53 * GIB)
    found = by_key(lines)
    assert division.total(lines) == 53 * GIB
    assert found["paused_pools"].bytes == 0
    assert found["active_pools"].bytes == 12 * GIB
    assert found["context"].bytes == GIB
    assert "fp.pause('weights')" in found["active_pools"].do
    assert "empty_cache" in found["torch_cache"].do


def test_a_paused_pool_that_holds_memory_says_that_the_driver_refused():
    line = division.of_process([pool_bytes(state="paused", held=MIB)], None, None)[0]
    assert line.bytes == MIB
    assert "refused" in line.do


def test_where_nothing_is_held_there_is_nothing_to_do():
    lines = division.of_process([pool_bytes(state="paused")], TorchMemory(0, 0, 0, 0), 400 * MIB)
    assert [line.do for line in lines] == [""] * len(lines)


def test_figures_that_miss_each_other_never_make_a_negative_line():
    lines = division.of_process([pool_bytes(held=GIB)], TorchMemory(2 * GIB, 0, 0, 0), 10 * MIB)
    assert min(line.bytes for line in lines) == 0


def test_a_pool_in_a_transition_is_said_to_be():
    (line,) = [
        one
        for one in division.of_process([pool_bytes(state="pausing", held=MIB)], None, None)
        if one.key == "active_pools"
    ]
    assert "being paused" in line.says


# PyTorch's part.


def segment(address, total, active, pool_id=(0, 0)):
    return {"address": address, "total_size": total, "active_size": active, "segment_pool_id": pool_id}


def test_segments_are_sorted_by_where_they_lie():
    states = {1: "active", 2: "paused"}
    seen = _torch_memory.divide(
        [
            segment(1, 100, 60, (0, 3)),
            segment(2, 1000, 900, (0, 4)),  # addresses only: it is paused
            segment(3, 10, 4, (1, 0)),
            segment(4, 7, 5),
        ],
        states.get,
    )
    assert seen == TorchMemory(cached_in_pools=40, tensors=5, graphs=10, cached=2)


def test_the_allocator_is_asked_about_one_gpu_and_its_pools(monkeypatch, host, tag):
    pool = fp.pool(tag, "cpu")
    tensor, _ = filled(pool, 2 * MIB)
    inside = {**segment(tensor.data_ptr(), 2 * MIB, MIB), "device": 0}
    elsewhere = {**segment(1, 7, 7), "device": 1}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [inside, elsewhere])
    assert _torch_memory.look(0, [pool]) == TorchMemory(MIB, 0, 0, 0)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert _torch_memory.look(0, [pool]) is None


def test_without_cuda_pytorch_holds_nothing():
    if torch.cuda.is_initialized():
        pytest.skip("PyTorch uses CUDA here")
    assert _torch_memory.look(0, []) is None


# NVML's part.


def test_nvml_says_who_holds_what(monkeypatch):
    nvml.install(monkeypatch, nvml.gpu(100, {1: 60, 2: None}))
    (gpu,) = _nvml.gpus()
    assert (gpu.index, gpu.name, gpu.total, gpu.used) == (0, "NVIDIA H200", 140 << 30, 100)
    assert gpu.processes == {1: 60, 2: None}
    assert _nvml.gpu(nvml.BUS) == gpu


def test_an_error_of_nvml_says_so(monkeypatch):
    made = nvml.install(monkeypatch, nvml.gpu(0, {}))

    def fails():
        raise made.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(made, "nvmlInit", fails)
    with pytest.raises(fp.Error, match="Driver Not Loaded"):
        _nvml.gpus()


def test_without_its_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(_nvml.NvmlUnavailable, match=r"pip install 'fencepool\[observe\]'"):
        _nvml.gpus()


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("0000:3B:00.0", "00000000:3b:00.0", True),
        ("0000:3B:00.0", "00000000:3C:00.0", False),
        ("", "", True),
        ("", "0000:3B:00.0", False),
    ],
)
def test_pci_addresses_are_compared_as_numbers(one, other, is_same):
    assert _nvml.same_bus(one, other) == is_same


# A GPU's lines, with the embedded driver's device in its place.


def on_gpu(used, pools=()):
    return by_key(remaining._on_gpu(DeviceName("host", 0), used, list(pools), None))


def test_a_gpu_divides_among_pools_context_others_and_unknown(monkeypatch):
    nvml.install(monkeypatch, nvml.gpu(0, {os.getpid(): 12 * GIB, 77: 100 * GIB, 78: 2 * GIB}))
    lines = on_gpu(115 * GIB, [pool_bytes(held=11 * GIB)])
    assert lines["context"].bytes == GIB
    assert lines["other_processes"].bytes == 102 * GIB
    assert lines["other_processes"].says.startswith("process 77: 100.0 GiB")
    assert lines["unknown"].bytes == GIB
    assert division.total(lines.values()) == 115 * GIB


@pytest.mark.parametrize("processes", [{}, {77: 100 * GIB}, {77: None}])
def test_what_nvml_cannot_tell_apart_is_unknown_and_says_why(monkeypatch, processes):
    nvml.install(monkeypatch, nvml.gpu(0, processes))
    lines = on_gpu(20 * GIB, [pool_bytes(held=11 * GIB)])
    assert "context" not in lines
    assert lines["unknown"].bytes == 9 * GIB
    assert "NVML does not say" in lines["unknown"].do


def test_without_nvml_the_unknown_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in on_gpu(GIB)["unknown"].do


# On a device. Sweeps of faults leave memory behind, which is unknown from then on.


def test_after_a_pause_the_pools_hold_nothing(host, new_tag):
    unknown = fp.residual("cpu")["unknown"].bytes
    kept, other = fp.pool(new_tag("weights"), "cpu", backup="host"), fp.pool(new_tag("kv"), "cpu")
    tensors = [filled(kept, 4 * MIB)[0], filled(other, 2 * MIB)[0]]
    fp.pause(kept.tag)
    found = fp.residual("cpu")
    assert found["paused_pools"].bytes == 0
    assert kept.tag in found["paused_pools"].says
    assert found["active_pools"].bytes == 2 * MIB
    assert other.tag in found["active_pools"].do
    assert found["unknown"].bytes == unknown
    assert sum(line.bytes for line in found.lines) == found.used
    assert found.host_bytes >= 4 * MIB
    free, total = fp.memory_info("cpu")
    assert (found.total, found.used) == (total, total - free)
    text = str(found)
    assert "2.0 MiB  active pools" in text
    assert "host memory in backups" in text
    with pytest.raises(KeyError):
        found["nothing"]
    fp.resume(kept.tag)
    del tensors


def test_memory_that_no_pool_took_is_unknown(host):
    before = fp.residual("cpu")["unknown"].bytes
    with host.current():
        handle = host.driver.mem_create(0, 2 * MIB)[1]
    try:
        assert fp.residual("cpu")["unknown"].bytes == before + 2 * MIB
    finally:
        host.driver.mem_release(handle)


def test_the_default_is_the_device_of_the_first_pool():
    code = "fp.pool('a', 'cpu:2'); fp.pool('b', 'cpu'); print(fp.residual().device)"
    done = children.run(code)
    assert (done.returncode, done.stdout) == (0, "cpu:2\n"), done.stderr


def test_a_device_that_is_none_is_refused():
    with pytest.raises(ValueError, match="tpu"):
        fp.residual("tpu")


def test_it_needs_neither_pytorch_nor_a_package():
    code = "import sys; fp.residual('cpu'); sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"
    assert children.run(code).returncode == 0


@pytest.mark.gpu
def test_on_a_gpu_the_lines_add_up(new_tag):
    pool = fp.pool(new_tag("weights"), "cuda:0")
    tensor = pool.empty((64 * MIB,), dtype=torch.uint8)
    outside = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    before = fp.residual("cuda:0")
    assert before["active_pools"].bytes >= 64 * MIB
    assert before["torch_tensors"].bytes >= 64 * MIB
    fp.pause(pool.tag)
    after = fp.residual("cuda:0")
    assert after["paused_pools"].bytes == 0
    assert before.used - after.used >= 64 * MIB
    assert after["unknown"].bytes >= 0
    fp.resume(pool.tag).fence.synchronize(timeout=10)
    del outside, tensor


def test_the_table_is_legible_in_a_terminal_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", "import fencepool as fp; print(fp.residual('cpu'))"],
        env=children.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_process_of_the_machine_with_this_ones_number_in_its_container_is_not_taken_for_it(monkeypatch):
    nvml.install(monkeypatch, nvml.gpu(0, {os.getpid(): 2 * GIB}))
    lines = on_gpu(20 * GIB, [pool_bytes(held=11 * GIB)])
    assert "context" not in lines
    assert lines["unknown"].bytes == 9 * GIB
    assert "NVML does not say" in lines["unknown"].do
