"""The doctor: its checks are fed facts, what collects facts a made-up /proc and /sys; then it runs here."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import fencepool as fp
from fencepool.cli import doctor, gather
from fencepool.cli.app import app
from fencepool.cli.cgroup import Cgroup, read_cgroup
from fencepool.cli.checks import Status, examine, worst
from fencepool.cli.facts import Disk, Driver, Facts, Gpu, Memory, Packages

GIB = 1 << 30
H200 = Gpu(
    "cuda:0",
    "NVIDIA H200",
    140 * GIB,
    {"vmm": 1, "rdma_vmm": 1, "host_numa_vmm": 1, "posix_fd": 1, "compute_major": 9, "compute_minor": 0},
)
GOOD_MEMORY = Memory(total=512 * GIB, available=500 * GIB, cgroup_version=2, huge_pages="madvise")
GOOD_PACKAGES = Packages({"torch": "2.13.0"}, torch_cuda="13.0")


def facts_with(**changes) -> Facts:
    """A machine on which everything is as it should be, but for `changes`."""
    good = Facts(
        fencepool="0.1.0",
        python="3.12.3",
        system="Linux",
        cuda=Driver(True, version=(13, 0), gpus=(H200,)),
        embedded=Driver(True, version=(13, 0)),
        has_kernels=True,
        kernel_driver="580.159",
        memory=GOOD_MEMORY,
        packages=GOOD_PACKAGES,
    )
    return replace(good, **changes)


def without_gpu(reason="libcuda.so.1 was not found", **changes) -> Facts:
    return facts_with(**{"cuda": Driver(False, reason), "kernel_driver": None, **changes})


def gpu_without(*attributes, device="cuda:0") -> Gpu:
    return replace(H200, device=device, attributes={**H200.attributes, **dict.fromkeys(attributes, 0)})


def finding(facts, name):
    return next(one for one in examine(facts) if one.name == name)


def names(facts):
    return [one.name for one in examine(facts)]


def test_a_machine_with_everything_is_ready():
    facts = facts_with()
    assert {one.status for one in examine(facts)} == {Status.OK}
    assert doctor.verdict(facts, examine(facts)) == "Ready on cuda:0."
    assert worst(examine(facts)).exit_status == 0


def test_every_finding_that_is_not_ok_says_what_to_do_or_that_nothing_is_needed():
    troubled = [
        without_gpu(),
        facts_with(
            cuda=Driver(True, version=(12, 2), absent_calls=("cuCtxRecordEvent",), gpus=(gpu_without("vmm"),))
        ),
        facts_with(packages=Packages()),
        facts_with(memory=Memory(available=1, huge_pages="never", locked_limit=1)),
        facts_with(disk=Disk("/full", problem="no space")),
        facts_with(disk=Disk("/overlay", free=1, is_direct=False)),
        facts_with(environment={"LD_PRELOAD": "torch_memory_saver.so", "NCCL_GRAPH_REGISTER": "1"}),
    ]
    for facts in troubled:
        for one in examine(facts):
            assert one.status is Status.OK or one.do, one


# The driver and the GPUs.


def test_no_libcuda_means_the_embedded_driver_only():
    facts = without_gpu()
    driver = finding(facts, "CUDA driver")
    assert driver.status is Status.WARN
    assert "libcuda.so.1 was not found" in driver.says
    assert "device='cpu'" in driver.do
    assert "embedded driver" in doctor.verdict(facts, examine(facts))
    assert worst(examine(facts)).exit_status == 1
    assert "virtual memory management" not in names(facts)


def test_a_kernel_driver_without_a_usable_libcuda_is_broken():
    facts = without_gpu(kernel_driver="580.159")
    assert finding(facts, "CUDA driver").status is Status.FAIL
    assert doctor.verdict(facts, examine(facts)) == "Broken: repair CUDA driver first."
    assert worst(examine(facts)).exit_status == 2


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_named_as_such(value):
    facts = without_gpu(
        "CUDA_ERROR_NO_DEVICE", kernel_driver="580.159", environment={"CUDA_VISIBLE_DEVICES": value}
    )
    driver = finding(facts, "CUDA driver")
    assert driver.status is Status.WARN
    assert "CUDA_VISIBLE_DEVICES" in driver.says


def test_a_driver_that_shows_no_gpu_warns():
    facts = facts_with(cuda=Driver(True, version=(13, 0)))
    assert finding(facts, "GPUs").status is Status.WARN


def test_a_gpu_without_virtual_memory_management_is_broken():
    facts = facts_with(cuda=Driver(True, version=(13, 0), gpus=(gpu_without("vmm"),)))
    vmm = finding(facts, "virtual memory management")
    assert vmm.status is Status.FAIL
    assert "cuda:0 (NVIDIA H200)" in vmm.says
    assert "raises" in vmm.says


def test_one_such_gpu_beside_a_good_one_is_a_limit():
    facts = facts_with(
        cuda=Driver(True, version=(13, 0), gpus=(gpu_without("vmm"), replace(H200, device="cuda:1")))
    )
    assert finding(facts, "virtual memory management").status is Status.WARN
    assert doctor.verdict(facts, examine(facts)).startswith("Works with limits on cuda:1")


def test_an_old_driver_lacks_context_events():
    absent = ("cuCtxRecordEvent", "cuCtxWaitEvent")
    facts = facts_with(cuda=Driver(True, version=(12, 2), absent_calls=absent, gpus=(H200,)))
    events = finding(facts, "context events")
    assert events.status is Status.WARN
    assert "cuCtxRecordEvent" in events.says
    assert "12.5" in events.do
    assert "driver calls" not in names(facts)


def test_other_absent_calls_are_named():
    facts = facts_with(cuda=Driver(True, version=(13, 0), absent_calls=("cuNewCall",), gpus=(H200,)))
    assert finding(facts, "driver calls").status is Status.NOTE
    assert "cuNewCall" in finding(facts, "driver calls").says


@pytest.mark.parametrize(
    ("attribute", "name"),
    [
        ("rdma_vmm", "RDMA with pools"),
        ("posix_fd", "POSIX descriptors"),
        ("host_numa_vmm", "host memory at device addresses"),
    ],
)
def test_a_capability_that_some_uses_need_is_a_note(attribute, name):
    facts = facts_with(
        cuda=Driver(True, version=(13, 0), gpus=(H200, gpu_without(attribute, device="cuda:1")))
    )
    assert finding(facts, name).status is Status.NOTE
    assert "cuda:1" in finding(facts, name).says
    assert "cuda:0" not in finding(facts, name).says
    assert worst(examine(facts)).exit_status == 0


def test_a_broken_embedded_driver_matters_most_where_there_is_no_gpu():
    broken = Driver(False, "memfd_create is forbidden")
    assert finding(facts_with(embedded=broken), "embedded driver").status is Status.WARN
    facts = without_gpu(embedded=broken)
    assert finding(facts, "embedded driver").status is Status.FAIL
    assert worst(examine(facts)).exit_status == 2


# Memory.


@pytest.mark.parametrize(
    ("limit", "used", "status"),
    [
        (8 * GIB, 4 * GIB, Status.WARN),
        (64 * GIB, 4 * GIB, Status.NOTE),
        (400 * GIB, 4 * GIB, Status.OK),
        (None, None, Status.OK),
    ],
)
def test_a_container_limit_is_measured_against_the_gpu(limit, used, status):
    memory = replace(GOOD_MEMORY, cgroup_limit=limit, cgroup_used=used)
    room = finding(facts_with(memory=memory), "host memory for backups")
    assert room.status is status
    assert ("container" in room.says) == (limit is not None)


def test_without_a_gpu_little_memory_is_enough():
    memory = replace(GOOD_MEMORY, cgroup_limit=4 * GIB, cgroup_used=GIB)
    assert finding(without_gpu(memory=memory), "host memory for backups").status is Status.OK
    memory = replace(memory, cgroup_limit=GIB)
    assert finding(without_gpu(memory=memory), "host memory for backups").status is Status.WARN


@pytest.mark.parametrize(("setting", "status"), [("always", "ok"), ("madvise", "ok"), ("never", "note")])
def test_huge_pages(setting, status):
    facts = facts_with(memory=replace(GOOD_MEMORY, huge_pages=setting))
    assert finding(facts, "transparent huge pages").status == status


@pytest.mark.parametrize(
    ("disk", "status", "says"),
    [
        (Disk("/nvme", free=2 * GIB), Status.OK, "/nvme: 2.0 GiB free, direct I/O"),
        (Disk("/nvme", free=2 * GIB, is_direct=False), Status.NOTE, "without direct I/O"),
        (Disk("/nvme", problem="/nvme is a tmpfs"), Status.WARN, "/nvme is a tmpfs"),
    ],
)
def test_a_disk_for_backups(disk, status, says):
    found = finding(facts_with(disk=disk), "disk for backups")
    assert found.status is status
    assert says in found.says


def test_without_a_named_directory_nothing_is_said_of_disks():
    assert "disk for backups" not in names(facts_with())
    assert gather.disk("") is None


def test_a_directory_is_looked_at_and_left_as_it_was(tmp_path):
    found = gather.disk(str(tmp_path))
    assert (found.directory, found.problem) == (str(tmp_path), "")
    assert found.free > 0
    assert list(tmp_path.iterdir()) == []
    assert fp.status() == []
    absent = gather.disk(str(tmp_path / "absent"))
    assert "absent" in absent.problem
    assert "fencepool doctor" not in absent.problem


def test_a_locked_memory_limit_is_a_note():
    limit = finding(facts_with(memory=replace(GOOD_MEMORY, locked_limit=8 << 20)), "locked memory limit")
    assert limit.status is Status.NOTE
    assert "8.0 MiB" in limit.says


def test_what_is_unknown_is_left_out():
    assert not {"host memory for backups", "transparent huge pages"} & set(names(facts_with(memory=Memory())))


# Packages and the environment.


def test_no_pytorch_is_broken():
    torch = finding(facts_with(packages=Packages()), "PyTorch")
    assert torch.status is Status.FAIL
    assert torch.do == "pip install torch"


def test_a_cpu_build_of_pytorch_is_wrong_only_beside_a_gpu():
    packages = Packages({"torch": "2.13.0+cpu"})
    assert finding(facts_with(packages=packages), "PyTorch").status is Status.WARN
    assert finding(without_gpu(packages=packages), "PyTorch").status is Status.OK


def test_pytorch_for_rocm_warns():
    packages = Packages({"torch": "2.13.0+rocm7.0"}, torch_hip="7.0")
    assert finding(facts_with(packages=packages), "PyTorch").status is Status.WARN


@pytest.mark.parametrize(
    ("driver", "status"), [((13, 0), "ok"), ((12, 9), "warn"), ((13, 2), "ok"), ((14, 0), "ok"), (None, "ok")]
)
def test_pytorch_must_not_be_built_for_a_newer_major_version_than_the_driver(driver, status):
    facts = facts_with(cuda=Driver(True, version=driver, gpus=(H200,)))
    assert finding(facts, "PyTorch").status == status


@pytest.mark.parametrize(("name", "field"), [("SGLang", "sglang_plugins"), ("vLLM", "vllm_plugins")])
def test_an_engine_with_and_without_a_plugin(name, field):
    assert finding(facts_with(), name).says == "not installed"
    packages = replace(GOOD_PACKAGES, versions={"torch": "2.13.0", name.lower(): "0.5.23"})
    found = finding(facts_with(packages=packages), name)
    assert "no plug-in" in found.says
    assert found.status is Status.NOTE
    assert found.do
    packages = replace(packages, **{field: ("fencepool",)})
    assert "plug-in fencepool is registered" in finding(facts_with(packages=packages), name).says


def test_torch_memory_saver_is_a_note_when_installed_and_a_warning_when_preloaded():
    packages = replace(GOOD_PACKAGES, versions={"torch": "2.13.0", "torch_memory_saver": "0.0.10"})
    assert finding(facts_with(packages=packages), "torch_memory_saver").status is Status.NOTE
    preloaded = {"LD_PRELOAD": "/site/torch_memory_saver_hook_mode_preload.abi3.so"}
    assert finding(facts_with(environment=preloaded), "LD_PRELOAD").status is Status.WARN
    assert (
        finding(facts_with(environment={"LD_PRELOAD": "libjemalloc.so.2"}), "LD_PRELOAD").status is Status.OK
    )


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_seen_under_either_name_and_are_no_problem(name):
    setting = finding(facts_with(environment={name: "expandable_segments:True"}), "PyTorch allocator")
    assert setting.status is Status.OK
    assert f"{name}=expandable_segments:True: pools are unaffected" in setting.says


@pytest.mark.parametrize(
    ("value", "gpus", "status"),
    [
        ("0", 2, Status.OK),
        ("1", 1, Status.WARN),
        (None, 2, Status.WARN),
        (None, 1, Status.NOTE),
    ],
)
def test_nccl_graph_registration(value, gpus, status):
    facts = facts_with(
        cuda=Driver(
            True, version=(13, 0), gpus=tuple(replace(H200, device=f"cuda:{i}") for i in range(gpus))
        ),
        environment={} if value is None else {"NCCL_GRAPH_REGISTER": value},
        packages=replace(GOOD_PACKAGES, versions={"torch": "2.13.0", "nvidia-nccl-cu13": "2.28"}),
    )
    assert finding(facts, "NCCL graph registration").status is status


@pytest.mark.parametrize(
    ("has_kernels", "gpus", "status"),
    [(True, (H200,), Status.OK), (False, (H200,), Status.WARN), (False, (), Status.NOTE)],
)
def test_a_build_without_kernels_is_said(has_kernels, gpus, status):
    facts = facts_with(has_kernels=has_kernels, cuda=Driver(True, version=(13, 0), gpus=gpus))
    found = finding(facts, "digests")
    assert found.status is status
    assert ("nvcc" in found.do) is not has_kernels


def test_nccl_is_not_mentioned_where_there_is_none():
    assert "NCCL graph registration" not in names(facts_with())


# Collecting facts.


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_cgroup_version_2_takes_the_tightest_of_nested_limits(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
            "sys/fs/cgroup/outer/memory.max": "4096\n",
            "sys/fs/cgroup/outer/memory.current": "3000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 2000\ninactive_file 500\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "10\n",
        },
    )
    assert read_cgroup(tmp_path) == Cgroup(2, limit=4096, used=2500)


def test_cgroup_version_1_without_a_limit_writes_a_huge_number(tmp_path):
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu,memory:/job\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/job/memory.limit_in_bytes": "9223372036854771712\n",
    }
    write(tmp_path, files)
    assert read_cgroup(tmp_path) == Cgroup(1)
    write(
        tmp_path,
        {f"{folder}/job/memory.limit_in_bytes": "1000\n", f"{folder}/job/memory.usage_in_bytes": "300\n"},
    )
    assert read_cgroup(tmp_path) == Cgroup(1, limit=1000, used=300)


def test_a_container_sees_its_own_group_as_the_root(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/container1\n",
            "sys/fs/cgroup/cgroup.controllers": "memory\n",
            "sys/fs/cgroup/memory.max": "2048\n",
            "sys/fs/cgroup/memory.current": "48\n",
        },
    )
    assert read_cgroup(tmp_path) == Cgroup(2, limit=2048, used=48)


def test_no_cgroup_at_all(tmp_path):
    assert read_cgroup(tmp_path) == Cgroup()


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  Tue Nov 12 08:24:51 UTC 2024\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (builder)\n",
    ],
)
def test_the_kernel_driver_is_read_from_proc(tmp_path, line):
    assert gather.kernel_driver(tmp_path) is None
    write(tmp_path, {"dev/nvidiactl": ""})
    assert gather.kernel_driver(tmp_path) == "of unknown version"
    write(tmp_path, {"proc/driver/nvidia/version": line})
    assert gather.kernel_driver(tmp_path) == "580.159"


def test_memory_facts(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       2048 kB\nMemAvailable:   1024 kB\nHugePages_Total:       0\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        },
    )
    memory = gather.memory(tmp_path)
    assert (memory.total, memory.available, memory.huge_pages) == (2048 * 1024, 1024 * 1024, "never")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert memory.locked_limit == (None if soft == resource.RLIM_INFINITY else soft)


def test_only_named_variables_leave_the_environment():
    facts = gather.gather(environ={"NCCL_GRAPH_REGISTER": "0", "SECRET_TOKEN": "x"})
    assert facts.environment == {"NCCL_GRAPH_REGISTER": "0"}


def test_a_driver_that_raises_is_a_fact_not_a_traceback(monkeypatch):
    def raising(provider):
        raise fp.DriverUnavailable("the library is damaged")

    monkeypatch.setattr(fp, "driver_info", raising)
    assert gather.driver("cuda") == Driver(False, "the library is damaged")


def test_this_machine():
    facts = gather.gather()
    assert facts.fencepool == fp.__version__
    assert facts.embedded.is_available
    assert facts.embedded.version is not None
    assert facts.memory.total > 0


def test_pytorch_is_not_imported_to_find_out_about_it():
    code = "import sys; from fencepool.cli.gather import gather; gather(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The report.


def test_square_brackets_in_a_message_are_shown():
    text = io.StringIO()
    facts = without_gpu("dlopen failed [libcuda.so.1]")
    doctor.show(Console(file=text, width=100), facts, examine(facts))
    assert "dlopen failed [libcuda.so.1]" in text.getvalue()
    assert "\x1b" not in text.getvalue()


def test_json_of_facts():
    facts = without_gpu()
    report = doctor.as_json(facts, examine(facts))
    assert json.loads(json.dumps(report))["facts"]["cuda"]["reason"] == "libcuda.so.1 was not found"
    assert (report["schema"], report["verdict"], report["exit_status"]) == (
        "fencepool.doctor/1",
        "limited",
        1,
    )
    assert report["findings"][1]["status"] == "warn"


def test_the_command_prints_json_and_its_exit_status_agrees():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == json.loads(result.stdout)["exit_status"]


def test_the_command_prints_a_verdict_for_people():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code in {0, 1, 2}
    assert "embedded driver" in result.stdout
    assert result.stdout.rstrip().endswith(".")


def test_help_says_what_the_exit_status_means():
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    for word in ("0 ready", "1 works with limits", "2 broken"):
        assert word in " ".join(result.stdout.split())


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout == f"fencepool {fp.__version__}\n"
    assert result.exit_code == 0


@pytest.mark.parametrize(("version", "status"), [("2.4.1", Status.WARN), ("2.7.1+cu126", Status.WARN)])
def test_regions_on_a_gpu_are_said_not_to_work_with_a_pytorch_without_mempools_of_a_thread(version, status):
    found = finding(facts_with(packages=Packages({"torch": version}, torch_cuda="12.6")), "regions on a GPU")
    assert found.status is status
    assert version in found.says
    assert "2.8" in found.do
    good = Packages({"torch": "2.10.0"}, torch_cuda="12.6")
    assert finding(facts_with(packages=good), "regions on a GPU").status is Status.OK
    assert "regions on a GPU" not in names(without_gpu(packages=good))


def test_a_directory_whose_name_is_not_text_is_a_problem_and_not_the_doctors_end():
    name = os.fsdecode(b"/tmp/\xff")
    found = gather.disk(name)
    assert "UTF-8" in found.problem
    facts = gather.gather(environ={"FENCEPOOL_DISK_DIRECTORY": name})
    assert facts.environment == {"FENCEPOOL_DISK_DIRECTORY": "/tmp/\\xff"}
    json.dumps(doctor.as_json(facts, examine(facts)), ensure_ascii=False).encode()
