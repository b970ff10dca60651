"""Pools whose contents are in a file while they are paused."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support import children
from support.contents import assert_same, filled, is_same, pattern
from support.machine import MIB
from support.policies import disk_directory
from support.waiting import Job, eventually

BLOCK = _core.DIGEST_BLOCK
STEP = 4096


@pytest.fixture(autouse=True)
def no_faults():
    yield
    _core.disarm_fault("system")


@pytest.fixture
def directory(tmp_path_factory):
    """One of its own, on a disk."""
    path = Path(disk_directory()) / f"fencepool-tests-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == [], "something is left in the directory"
    path.rmdir()


@pytest.fixture
def pool(machine, tag, directory):
    return fp.pool(tag, machine.device, backup="disk", directory=directory)


def files_in(directory: Path) -> list[Path]:
    """Open files of this process there, which have no names."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = entry.readlink()
        except FileNotFoundError:  # the listing's own
            continue
        if str(target).startswith(f"{directory}/") or str(target) == f"{directory} (deleted)":
            found.append(entry)
    return found


def the_file(directory: Path) -> Path:
    (found,) = files_in(directory)
    return found


def fail(call: str, code: int, nth: int = 1, *, lasting: bool = False) -> None:
    _core.arm_fault("system", call, nth, lasting, code)


# --- the directory ---------------------------------------------------------------------------------


def test_without_a_directory_it_says_what_to_do(machine, tag, monkeypatch):
    monkeypatch.delenv("FENCEPOOL_DISK_DIRECTORY", raising=False)
    with pytest.raises(ValueError, match=r"directory=.*FENCEPOOL_DISK_DIRECTORY"):
        fp.pool(tag, machine.device, backup="disk")


def test_the_variable_names_the_directory(machine, tag, directory, monkeypatch):
    monkeypatch.setenv("FENCEPOOL_DISK_DIRECTORY", str(directory))
    pool = fp.pool(tag, machine.device, backup="disk")
    assert pool.directory == str(directory)
    assert fp.pool(tag, machine.device, backup="disk", directory=directory) is pool
    assert files_in(directory)


@pytest.mark.parametrize("backup", ["none", "host", "resident"])
def test_a_directory_is_for_a_disk_alone(machine, tag, backup):
    with pytest.raises(ValueError, match="backup='disk'"):
        fp.pool(tag, machine.device, backup=backup, directory="/")


@pytest.mark.parametrize("wrong", [3, b"/tmp", "a\0b"])
def test_a_directory_is_a_path(machine, tag, wrong):
    with pytest.raises((TypeError, ValueError), match=r"directory|[Pp]ath"):
        fp.pool(tag, machine.device, backup="disk", directory=wrong)


def test_relative_directories_count_from_where_the_process_was(machine, tag, directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    pool = fp.pool(tag, machine.device, backup="disk", directory=directory.name)
    monkeypatch.chdir("/")
    assert pool.directory == str(directory)
    tensor, expected = filled(pool, MIB)
    fp.pause(tag)
    fp.resume(tag).fence.synchronize()
    assert_same(tensor, expected)


def test_what_is_no_directory_is_refused(machine, tag, directory):
    for path, code in ((directory / "missing", errno.ENOENT), ("/proc/self/status", errno.ENOTDIR)):
        with pytest.raises(fp.DiskError, match="directory of a local disk") as caught:
            fp.pool(tag, machine.device, backup="disk", directory=path)
        assert caught.value.errno == code
        assert caught.value.path == str(path)
        assert caught.value.call == "openat"
        assert caught.value.pool == tag
        assert os.strerror(code) in str(caught.value)
    assert tag not in {status.tag for status in fp.status()}


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a tmpfs")
def test_memory_of_the_host_is_no_disk(machine, tag):
    with pytest.raises(fp.DiskError, match=r'tmpfs.*backup="host"'):
        fp.pool(tag, machine.device, backup="disk", directory="/dev/shm")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_to_is_refused(host, tag, directory, code):
    fail("faccessat", code)
    with pytest.raises(fp.DiskError) as caught:
        fp.pool(tag, "cpu", backup="disk", directory=directory)
    assert caught.value.errno == code


def test_a_directory_that_is_gone_is_found_before_a_pause_changes_anything(machine, tag, directory):
    inside = directory / "inside"
    inside.mkdir()
    pool = fp.pool(tag, machine.device, backup="disk", directory=inside)
    tensor, expected = filled(pool, MIB)
    inside.rmdir()
    with pytest.raises(fp.DiskError, match="Nothing was changed"):
        fp.pause(tag)
    assert pool.state == "active"
    assert machine.is_all_mapped(tensor)
    inside.mkdir()
    fp.pause(tag)
    fp.resume(tag).fence.synchronize()
    assert_same(tensor, expected)
    del tensor
    pool.close()
    inside.rmdir()


# --- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_a_file_is_private_and_has_no_name(host, tag, directory, has_tmpfile):
    if not has_tmpfile:
        # The first openat is the directory's.
        fail("openat", errno.EOPNOTSUPP, nth=2)
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, MIB)
    assert list(directory.iterdir()) == []
    fp.pause(tag)
    assert list(directory.iterdir()) == []
    found = the_file(directory).stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_nlink == 0
    descriptor = int(the_file(directory).name)
    assert not os.get_inheritable(descriptor)
    fp.resume(tag)
    assert_same(tensor, expected)


LEFT = """
pool = fp.pool("t", "cpu", backup="disk", directory=os.environ["WHERE"], digests=False)
block = block_of(pool, 5 << 20, 7)
fp.pause("t")
"""


@pytest.mark.parametrize("has_tmpfile", [True, False])
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "pass", "os._exit(0)"])
def test_nothing_is_left_however_the_process_ends(directory, end, has_tmpfile):
    before = "" if has_tmpfile else f'_core.arm_fault("system", "openat", 2, False, {errno.EOPNOTSUPP})\n'
    done = children.run(before + LEFT + end, WHERE=str(directory))
    assert done.returncode == (-9 if "SIGKILL" in end else 0), done.stderr
    assert list(directory.iterdir()) == []


def test_nothing_is_left_of_a_pause_that_failed(pool, directory):
    tensor, expected = filled(pool, 3 * MIB)
    fail("pwrite", errno.EIO)
    with pytest.raises(fp.DiskError):
        fp.pause(pool.tag)
    assert list(directory.iterdir()) == []
    assert pool.status().disk_bytes == 0
    assert the_file(directory).stat().st_size == 0
    assert_same(tensor, expected)


def test_a_closed_pool_has_no_file(pool, directory):
    filled(pool, MIB)
    fp.pause(pool.tag)
    gc.collect()
    pool.close()
    assert files_in(directory) == []


# --- cycles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("digests", [None, False])
@pytest.mark.parametrize("retain", [True, False])
def test_contents_come_back_over_cycles_in_which_pools_grow(machine, new_tag, directory, digests, retain):
    tag = new_tag()
    pool = fp.pool(tag, machine.device, backup="disk", directory=directory, digests=digests, retain=retain)
    kept = [filled(pool, size, seed) for seed, size in enumerate((1, 513, 70_000, MIB + 5, 9 * MIB))]
    for cycle in range(3):
        fp.pause(tag)
        assert not any(machine.is_any_mapped(tensor) for tensor, _ in kept)
        status = pool.status()
        assert status.disk_bytes >= sum(expected.numel() for _, expected in kept)
        assert status.disk_bytes % STEP == 0
        assert status.host_bytes == 0
        for tensor, expected in kept:
            assert_same(pool.backup_of(tensor), expected)
        resumed = fp.resume(tag)
        assert resumed.host_held
        resumed.fence.synchronize()
        for tensor, expected in kept:
            assert_same(tensor, expected)
        assert (pool.status().disk_bytes > 0) is retain
        kept += [filled(pool, 300, 100 + cycle), filled(pool, 2 * MIB + cycle, 200 + cycle)]
        del kept[1]


def test_only_what_changed_is_written_and_equal_bytes_once_and_zeros_not_at_all(pool):
    tensor, _ = filled(pool, 16 * BLOCK, 1)
    tensor[8 * BLOCK : 12 * BLOCK] = tensor[: 4 * BLOCK].clone()
    tensor[12 * BLOCK :] = 0
    expected = tensor.cpu().clone()
    assert fp.pause(pool.tag).pools[0].bytes_copied == 8 * BLOCK
    assert pool.status().disk_bytes == 8 * BLOCK
    fp.resume(pool.tag, verify=True)
    assert_same(tensor, expected)
    written = _core.call_counts("system")["pwrite"]
    assert fp.pause(pool.tag).pools[0].bytes_copied == 0
    assert _core.call_counts("system")["pwrite"] == written
    fp.resume(pool.tag)
    tensor[3 * BLOCK + 17] += 1
    expected = tensor.cpu().clone()
    assert fp.pause(pool.tag).pools[0].bytes_copied == BLOCK
    fp.resume(pool.tag, verify=True)
    assert_same(tensor, expected)


def test_neighbouring_blocks_go_in_large_writes(pool):
    tensor, expected = filled(pool, 32 * MIB)
    before = _core.call_counts("system")
    fp.pause(pool.tag)
    fp.resume(pool.tag).fence.synchronize()
    after = _core.call_counts("system")
    assert after["pwrite"] - before["pwrite"] == 8
    assert after["pread"] - before["pread"] == 8
    assert_same(tensor, expected)


def test_a_pool_without_tensors_and_one_with_zeros_alone(machine, new_tag, directory):
    empty, zeros = (fp.pool(new_tag(), machine.device, backup="disk", directory=directory) for _ in range(2))
    tensor = zeros.empty((3 * MIB,), dtype=torch.uint8)
    tensor.zero_()
    fp.pause(empty.tag, zeros.tag)
    assert (empty.status().disk_bytes, zeros.status().disk_bytes) == (0, 0)
    assert not bool(zeros.backup_of(tensor).any())
    fp.resume(empty.tag, zeros.tag).fence.synchronize()
    assert not bool(tensor.any())


def test_tensors_that_die_while_their_pool_is_paused(pool):
    kept, expected = filled(pool, 2 * MIB, 1)
    dead, _ = filled(pool, 5 * MIB, 2)
    fp.pause(pool.tag)
    del dead
    fp.resume(pool.tag).fence.synchronize()
    assert_same(kept, expected)
    assert pool.status().bytes_used == 2 * MIB


def test_other_policies_pause_and_resume_with_it(machine, tag, directory):
    pools = [
        fp.pool(tag, machine.device, **options)
        for options in (
            {"backup": "disk", "directory": directory},
            {"backup": "host"},
            {"backup": "none", "fill": "zero"},
            {"backup": "disk", "directory": directory, "retain": False},
        )
    ]
    kept = [filled(pool, 2 * MIB, seed) for seed, pool in enumerate(pools)]
    fp.pause(tag)
    resumed = fp.resume(tag)
    resumed.fence.synchronize()
    for number in (0, 1, 3):
        assert_same(*kept[number])
    assert not bool(kept[2][0].any())
    assert len(resumed.pools) == 4


def test_what_is_discarded_takes_no_space(pool):
    tensor, expected = filled(pool, 2 * MIB)
    fp.pause(pool.tag, discard=[pool.tag])
    assert pool.status().disk_bytes == 0
    assert not fp.resume(pool.tag).host_held or pool.device == "cpu"
    tensor.copy_(expected)
    fp.pause(pool.tag)
    fp.resume(pool.tag).fence.synchronize()
    assert_same(tensor, expected)


def test_prepare_takes_the_space_and_trim_gives_it_back(pool, directory):
    first = filled(pool, 3 * MIB, 8)
    assert pool.prepare() == 3 * MIB == pool.status().disk_bytes
    assert the_file(directory).stat().st_blocks * 512 >= 3 * MIB
    assert pool.prepare() == 0
    tensor, expected = filled(pool, MIB, 9)
    assert_same(*first)
    fp.pause(pool.tag)
    with pytest.raises(fp.PoolPausedError):
        pool.trim()
    fp.resume(pool.tag).fence.synchronize()
    assert pool.trim() >= MIB
    assert pool.status().disk_bytes == 0
    assert the_file(directory).stat().st_blocks == 0
    fp.pause(pool.tag)
    fp.resume(pool.tag).fence.synchronize()
    assert_same(tensor, expected)


def test_a_swap_goes_through_disks_both_ways(machine, new_tag, directory):
    first, second = (fp.pool(new_tag(), machine.device, backup="disk", directory=directory) for _ in range(2))
    one, two = filled(first, 6 * MIB + 3, 1), filled(second, 5 * MIB, 2)
    fp.pause(second.tag)
    for _ in range(2):
        swapped = fp.swap(pause=first.tag, resume=second.tag)
        swapped.fence.synchronize()
        assert swapped.resumed.host_held
        assert_same(*two)
        assert first.state == "paused"
        fp.swap(pause=second.tag, resume=first.tag).fence.synchronize()
        assert_same(*one)
    fp.resume(second.tag).fence.synchronize()
    assert_same(*two)


def test_parts_of_an_explicit_resume_can_be_waited_for(pool):
    kept = [filled(pool, 3 * MIB, seed) for seed in range(4)]
    fp.pause(pool.tag)
    resumed = fp.resume(pool.tag, order="explicit")
    for tensor, expected in kept:
        resumed.fence_for(tensor).synchronize()
        assert_same(tensor, expected)
    resumed.fence.synchronize()
    assert resumed.fence.done()


def test_a_resume_returns_with_copies_to_the_device_still_to_come(host, tag, directory):
    """The host waits for the disk, not for the device; what comes later is behind the fence."""
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    fp.host_driver.configure("cpu", host_waits=False)
    tensor, expected = filled(pool, 3 * MIB)
    fp.pause(tag)
    latch = host.hold_context()
    resumed = fp.resume(tag)
    assert resumed.host_held
    assert not resumed.fence.done()
    copy = torch.empty(3 * MIB, dtype=torch.uint8)
    reader = Job(lambda: host.read(tensor.data_ptr(), 3 * MIB))
    latch.open()
    assert bytes(reader.result()) == bytes(expected.numpy())
    resumed.fence.synchronize()
    copy.copy_(tensor)
    assert_same(copy, expected)


def test_more_than_the_buffers_hold_goes_through_a_held_device_in_the_end(host, tag, directory):
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    fp.host_driver.configure("cpu", host_waits=False)
    tensor, expected = filled(pool, 80 * MIB)
    fp.pause(tag)
    latch = host.hold_context()
    read = _core.call_counts("system")["pread"]
    resume = Job(lambda: fp.resume(tag))
    eventually(lambda: _core.call_counts("system")["pread"] >= read + 8, "buffers are filled")
    other = fp.pool(f"{tag}-2", "cpu")  # nobody waits for it
    assert other.empty((MIB,)).numel() == MIB
    assert resume.is_running()
    latch.open()
    resume.result().fence.synchronize()
    assert_same(tensor, expected)


# --- reading the backup ----------------------------------------------------------------------------


def test_a_view_of_a_backup_on_a_disk_is_refused(pool):
    tensor, expected = filled(pool, MIB)
    fp.pause(pool.tag)
    with pytest.raises(fp.UnsupportedError, match="copy=True"):
        pool.backup_of(tensor, copy=False)
    assert_same(pool.backup_of(tensor[3:70_001]), expected[3:70_001])


def test_reading_a_backup_says_what_failed(pool):
    tensor, expected = filled(pool, MIB)
    fp.pause(pool.tag)
    fail("pread", errno.EIO)
    with pytest.raises(fp.DiskError, match="still paused") as caught:
        pool.backup_of(tensor)
    assert (caught.value.errno, caught.value.call) == (errno.EIO, "pread")
    assert_same(pool.backup_of(tensor), expected)


# --- direct input and output -------------------------------------------------------------------------


def test_it_is_said_when_the_page_cache_is_between(pool):
    assert pool.status().direct_io in (True, False)
    assert fp.pool(f"{pool.tag}-2", pool.device).status().direct_io is None


@pytest.mark.parametrize(("call", "nth"), [("openat", 2), ("pwrite", 1), ("pwrite", 3), ("pread", 1)])
def test_where_direct_access_is_refused_the_page_cache_serves(host, tag, directory, call, nth):
    if call == "openat":
        fail(call, errno.EINVAL, nth)
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, 20 * MIB)
    if call == "pwrite":
        fail(call, errno.EINVAL, nth)
    before = _core.call_counts("system")
    fp.pause(tag)
    if call == "pread":
        fail(call, errno.EINVAL, nth)
    else:
        assert pool.status().direct_io is False
        after = _core.call_counts("system")
        for made in ("sync_file_range", "fdatasync", "posix_fadvise"):
            assert after[made] > before[made], made
    fp.resume(tag, verify=True)
    assert pool.status().direct_io is False
    assert_same(tensor, expected)
    tensor[5] += 1
    changed = tensor.clone()
    fp.pause(tag)
    fp.resume(tag, verify=True)
    assert_same(tensor, changed)


def test_a_failed_sync_undoes_the_pause(host, tag, directory):
    fail("openat", errno.EINVAL, 2)
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, MIB)
    fail("fdatasync", errno.EIO)
    with pytest.raises(fp.DiskError, match="fdatasync"):
        fp.pause(tag)
    assert pool.state == "active"
    assert_same(tensor, expected)
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, expected)


# --- space -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_too_little_space_is_found_before_anything_is_copied(host, new_tag, directory, code):
    pools = [fp.pool(new_tag(), "cpu", backup="disk", directory=directory) for _ in range(2)]
    kept = [filled(pool, 3 * MIB, seed) for seed, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    before = _core.call_counts("system")["pwrite"], _core.call_counts("host")["cuMemcpyDtoHAsync"]
    fail("fallocate", code, nth=2)
    with pytest.raises(fp.DiskError, match=r"3.00 MiB wanted, .* free.*Nothing was changed") as caught:
        fp.pause(*tags)
    error = caught.value
    assert (error.errno, error.call, error.path, error.pool) == (code, "fallocate", str(directory), tags[1])
    assert error.bytes_wanted == 3 * MIB
    assert error.bytes_free > 0
    assert isinstance(error, OSError)
    after = _core.call_counts("system")["pwrite"], _core.call_counts("host")["cuMemcpyDtoHAsync"]
    assert after == before
    assert [pool.state for pool in pools] == ["active", "active"]
    assert [pool.status().disk_bytes for pool in pools] == [0, 0]
    fp.pause(*tags)
    fp.resume(*tags)
    for tensor, expected in kept:
        assert_same(tensor, expected)


def test_a_real_limit_of_file_sizes(directory):
    children.run_silently(
        """
        import errno, resource
        pool = fp.pool("t", "cpu", backup="disk", directory=os.environ["WHERE"], digests=False)
        block = block_of(pool, 8 << 20, 7)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, resource.RLIM_INFINITY))
        try:
            fp.pause("t")
        except fp.DiskError as error:
            assert error.errno == errno.EFBIG, error
        else:
            raise AssertionError("a file beyond the limit was made")
        assert pool.state == "active" and is_filled(block, 8 << 20, 7)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        fp.pause("t")
        fp.resume("t")
        assert is_filled(block, 8 << 20, 7)
        """,
        WHERE=str(directory),
    )


def test_where_nothing_is_set_aside_free_space_is_asked_for_and_a_full_disk_undoes(host, new_tag, directory):
    pool = fp.pool(new_tag(), "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, 3 * MIB)
    fail("fallocate", errno.EOPNOTSUPP)
    before = _core.call_counts("system")["fstatfs"]
    fp.pause(pool.tag)
    assert _core.call_counts("system")["fstatfs"] >= before + 2  # of the directory, and for the space
    fp.resume(pool.tag)
    assert_same(tensor, expected)
    pool.trim()
    fail("pwrite", errno.ENOSPC)
    with pytest.raises(fp.DiskError, match="free") as caught:
        fp.pause(pool.tag)
    assert caught.value.errno == errno.ENOSPC
    assert pool.state == "active"
    assert_same(tensor, expected)


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_failed_write_undoes_the_pause_of_all_pools(machine, new_tag, directory, nth):
    pools = [
        fp.pool(new_tag(), machine.device, **options)
        for options in ({"backup": "disk", "directory": directory}, {"backup": "host"}, {"backup": "none"})
    ]
    kept = [filled(pool, 24 * MIB, seed) for seed, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    fail("pwrite", errno.EIO, nth)
    with pytest.raises(fp.DiskError, match="Nothing was changed") as caught:
        fp.pause(*tags)
    assert (caught.value.errno, caught.value.pool) == (errno.EIO, tags[0])
    assert not getattr(caught.value, "__notes__", [])
    for pool, (tensor, expected) in zip(pools, kept, strict=True):
        assert pool.state == "active"
        assert machine.is_all_mapped(tensor)
        assert_same(tensor, expected)
    fp.pause(*tags)
    fp.resume(*tags).fence.synchronize()
    for tensor, expected in kept[:2]:
        assert_same(tensor, expected)


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_failed_read_undoes_the_resume_of_all_pools(machine, new_tag, directory, nth):
    pools = [
        fp.pool(new_tag(), machine.device, **options)
        for options in ({"backup": "host"}, {"backup": "disk", "directory": directory})
    ]
    kept = [filled(pool, 24 * MIB, seed) for seed, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    fp.pause(*tags)
    free = machine.free()
    fail("pread", errno.EIO, nth)
    with pytest.raises(fp.DiskError, match="still paused") as caught:
        fp.resume(*tags)
    assert (caught.value.errno, caught.value.pool) == (errno.EIO, tags[1])
    assert [pool.state for pool in pools] == ["paused", "paused"]
    assert machine.free() == free
    fp.resume(*tags).fence.synchronize()
    for tensor, expected in kept:
        assert_same(tensor, expected)


def test_memory_that_was_released_is_filled_again_from_the_file(host, new_tag, directory):
    """The disk's pool has been given away when unmapping another one fails."""
    disk = fp.pool(new_tag(), "cpu", backup="disk", directory=directory)
    other = fp.pool(new_tag(), "cpu", backup="host")
    kept = [filled(disk, 9 * MIB, 1), filled(other, MIB, 2)]
    _core.arm_fault("host", "cuMemUnmap", 2, True, 999)
    try:
        with pytest.raises(fp.DriverError):
            fp.pause(disk.tag, other.tag)
    finally:
        _core.disarm_fault("host")
    assert [disk.state, other.state] == ["active", "active"]
    for tensor, expected in kept:
        assert_same(tensor, expected)


@pytest.mark.parametrize("size", [0, STEP, 5 * MIB, 5 * MIB + 100])
def test_a_file_that_ends_early_is_said_with_pool_segment_and_place(pool, machine, directory, size):
    tensor, expected = filled(pool, 9 * MIB)
    fp.pause(pool.tag)
    whole = the_file(directory).read_bytes()
    os.truncate(the_file(directory), size)
    missing = size // STEP * STEP
    with pytest.raises(fp.DiskError) as caught:
        fp.resume(pool.tag)
    text = str(caught.value)
    assert f"'{pool.tag}'" in text
    assert f"segment at {tensor.data_ptr():#x}" in text
    at = int(text.split("begins at byte ")[1].split()[0])
    assert missing <= at <= size
    assert pool.state == "paused"
    assert caught.value.errno is None
    the_file(directory).write_bytes(whole)
    fp.resume(pool.tag).fence.synchronize()
    assert_same(tensor, expected)


def test_a_flipped_byte_is_found_by_verify(pool, machine, directory):
    tensor, expected = filled(pool, 3 * MIB)
    fp.pause(pool.tag)
    with the_file(directory).open("r+b") as file:
        file.seek(MIB + 7)
        byte = file.read(1)
        file.seek(MIB + 7)
        file.write(bytes([byte[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    with pytest.raises(fp.CorruptedBackupError, match="1 of 12 blocks"):
        fp.resume(pool.tag, verify=True)
    assert pool.state == "paused"
    fp.resume(pool.tag, verify=False).fence.synchronize()
    assert int((tensor.cpu() != expected).sum()) == 1


def test_a_pause_that_failed_half_way_is_not_relied_upon(pool):
    tensor, _ = filled(pool, 20 * MIB, 1)
    fp.pause(pool.tag)
    fp.resume(pool.tag).fence.synchronize()
    changed = pattern(20 * MIB, 2)
    tensor.copy_(changed)
    fail("pwrite", errno.EIO, 3)
    with pytest.raises(fp.DiskError):
        fp.pause(pool.tag)
    assert fp.pause(pool.tag).pools[0].bytes_copied == 20 * MIB
    fp.resume(pool.tag, verify=True)
    assert_same(tensor, changed)


@pytest.mark.leaves
@pytest.mark.parametrize("is_lasting", [False, True])
@pytest.mark.parametrize(
    ("call", "nth"),
    [("openat", 1), ("openat", 2), ("fstatfs", 1), ("faccessat", 1), ("statx", 1), ("close", 1)],
)
def test_whatever_fails_while_a_pool_is_made_leaves_nothing(host, tag, directory, call, nth, is_lasting):
    fail(call, errno.EIO, nth, lasting=is_lasting)
    if call == "close":  # of the directory: there is nothing that it could spoil
        fp.pool(tag, "cpu", backup="disk", directory=directory)
        assert any("closing a directory failed" in problem for problem in _core.problems())
        return
    with pytest.raises(fp.DiskError, match=r"was not made.*Input/output error") as caught:
        fp.pool(tag, "cpu", backup="disk", directory=directory)
    assert (caught.value.errno, caught.value.call) == (errno.EIO, call)
    assert files_in(directory) == []
    _core.disarm_fault("system")
    fp.pool(tag, "cpu", backup="disk", directory=directory)


@pytest.mark.parametrize(
    ("call", "nth"),
    [("sync_file_range", 1), ("sync_file_range", 3), ("posix_fadvise", 2), ("fdatasync", 1)],
)
@pytest.mark.parametrize("is_lasting", [False, True])
def test_whatever_fails_by_way_of_the_page_cache_undoes_the_pause(
    host, tag, directory, call, nth, is_lasting
):
    fail("openat", errno.EINVAL, 2)
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, 20 * MIB)
    fail(call, errno.EIO, nth, lasting=is_lasting)
    with pytest.raises(fp.DiskError, match="Nothing was changed") as caught:
        fp.pause(tag)
    _core.disarm_fault("system")
    assert (caught.value.call, caught.value.errno) == (call, errno.EIO)
    assert pool.state == "active"
    assert_same(tensor, expected)
    fp.pause(tag)
    fp.resume(tag, verify=True)
    assert_same(tensor, expected)


# --- buffers, threads, processes ---------------------------------------------------------------------


def test_buffers_count_in_the_host_budget_and_go_with_the_last_pool(host, new_tag, directory):
    before = fp.host_memory().used
    pools = [fp.pool(new_tag(), "cpu", backup="disk", directory=directory) for _ in range(2)]
    kept = [filled(pool, 9 * MIB, seed) for seed, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    assert pools[0].prepare() == 9 * MIB
    assert fp.host_memory().used - before == 12 * MIB
    fp.pause(*tags)
    assert fp.host_memory().used - before == 12 * MIB
    fp.resume(*tags)  # the second finds those of the first in use, where its copies have not ended
    assert 12 * MIB <= fp.host_memory().used - before <= 24 * MIB
    for tensor, expected in kept:
        assert_same(tensor, expected)
    kept.clear()
    del tensor
    pools[0].close()
    pools[1].close()
    assert fp.host_memory().used == before


def test_no_budget_at_all_is_said_and_a_small_one_does(host, tag, directory):
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, 30 * MIB)
    used = fp.host_memory().used
    fp.set_host_budget(used)
    with pytest.raises(fp.HostMemoryError):
        fp.pause(tag)
    assert pool.state == "active"
    fp.set_host_budget(used + 4 * MIB)
    fp.pause(tag)
    assert fp.host_memory().used == used + 4 * MIB
    fp.set_host_budget(0)
    fp.resume(tag)  # by the buffer that is there
    assert_same(tensor, expected)


def test_pools_go_to_disks_and_come_back_on_threads_of_their_own(host, new_tag, directory):
    pools = [fp.pool(new_tag(), "cpu", backup="disk", directory=directory) for _ in range(4)]
    kept = [filled(pool, 12 * MIB, seed) for seed, pool in enumerate(pools)]

    def cycle(pool: fp.Pool) -> None:
        for _ in range(4):
            fp.pause(pool.tag)
            fp.resume(pool.tag, verify=True)

    jobs = [Job(lambda pool=pool: cycle(pool)) for pool in pools]
    for job in jobs:
        job.result()
    for tensor, expected in kept:
        assert_same(tensor, expected)


@pytest.mark.parametrize("doing", ["pause", "resume"])
def test_a_signal_ends_it_and_nothing_has_changed(directory, doing):
    """The link is so slow that it takes seconds."""
    seam, call = ("host", "cuMemcpyDtoHAsync") if doing == "pause" else ("system", "pread")
    children.run_silently(
        f"""
        import time
        fp.host_driver.configure("cpu", host_waits=False)
        pool = fp.pool("t", "cpu", backup="disk", directory=os.environ["WHERE"], digests=False)
        block = block_of(pool, 100 << 20, 7)
        fp.pause("t")
        if {doing!r} == "pause":
            fp.resume("t").fence.synchronize()
        fp.host_driver.configure("cpu", bandwidth=20_000_000)
        made = _core.call_counts({seam!r})[{call!r}]

        def interrupt():
            while _core.call_counts({seam!r})[{call!r}] < made + 3:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            fp.{doing}("t")
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not interrupted")
        thread.join()
        fp.host_driver.configure("cpu", bandwidth=0)
        assert pool.state == ("active" if {doing!r} == "pause" else "paused"), pool.state
        fp.resume("t").fence.synchronize()
        assert is_filled(block, 100 << 20, 7)
        fp.pause("t")
        fp.resume("t").fence.synchronize()
        assert is_filled(block, 100 << 20, 7)
        assert _core.problems() == [], _core.problems()
        """,
        WHERE=str(directory),
    )


@pytest.mark.parametrize("state", ["active", "paused"])
def test_a_forked_child_leaves_the_file_alone(directory, state):
    pause = 'fp.pause("t")' if state == "paused" else ""
    children.run_silently(
        f"""
pool = fp.pool("t", "cpu", backup="disk", directory=os.environ["WHERE"])
block = block_of(pool, 5 << 20, 7)
fp.pause("t"); fp.resume("t")
{pause}
child = os.fork()
if child == 0:
    for call in (fp.pause, fp.resume, pool.trim, pool.close, pool.prepare):
        try:
            call()
        except fp.ForkedError:
            continue
        os._exit(3)
    del pool
    sys.exit(0)
_, ended = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(ended) == 0
{"" if state == "paused" else 'fp.pause("t")'}
fp.resume("t", verify=True)
assert is_filled(block, 5 << 20, 7)
""",
        WHERE=str(directory),
    )


def test_the_gil_is_free_while_a_disk_is_waited_for(host, tag, directory):
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory, digests=False)
    tensor, expected = filled(pool, 40 * MIB)
    fp.host_driver.configure("cpu", bandwidth=100_000_000)
    ticks = 0
    is_over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    fp.pause(tag)
    is_over.set()
    thread.join()
    assert ticks > 20
    fp.host_driver.configure("cpu", bandwidth=0)
    fp.resume(tag)
    assert is_same(tensor, expected)


# --- pinned buffers, space and names ----------------------------------------------------------------


def test_nobody_can_give_the_file_a_name(pool, directory):
    library = ctypes.CDLL(None, use_errno=True)
    here, follow = -100, 0x400  # AT_FDCWD, AT_SYMLINK_FOLLOW
    named = directory / "named"
    status = library.linkat(here, os.fsencode(the_file(directory)), here, os.fsencode(named), follow)
    if status == 0:
        named.unlink()
    assert status == -1


@pytest.mark.leaves
def test_space_that_was_not_taken_does_not_count_when_it_cannot_be_given_back_either(host, tag, directory):
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory, digests=False)
    tensor, expected = filled(pool, 3 * MIB)
    # The directory's openat, fstatfs, faccessat and close; then fallocate, and whatever follows.
    fail("*", errno.ENOSPC, 5, lasting=True)
    with pytest.raises(fp.DiskError, match="fallocate"):
        fp.pause(tag)
    _core.disarm_fault("system")
    assert any("ftruncate" in problem for problem in _core.problems())
    assert pool.status().disk_bytes == 0
    before = _core.call_counts("system")["fallocate"]
    fp.pause(tag)
    assert _core.call_counts("system")["fallocate"] == before + 1
    fp.resume(tag).fence.synchronize()
    assert_same(tensor, expected)


def test_prepare_makes_do_with_the_buffers_that_the_budget_allows(host, tag, directory):
    pool = fp.pool(tag, "cpu", backup="disk", directory=directory)
    tensor, expected = filled(pool, 30 * MIB)
    used = fp.host_memory().used
    fp.set_host_budget(used + 3 * MIB)
    with pytest.raises(fp.HostMemoryError, match="Nothing was changed"):
        pool.prepare()
    assert (fp.host_memory().used, pool.status().disk_bytes) == (used, 0)
    fp.set_host_budget(used + 9 * MIB)
    assert pool.prepare() == 30 * MIB
    assert fp.host_memory().used == used + 8 * MIB
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, expected)


def test_prepare_makes_do_with_buffers_that_another_transfer_has(host, new_tag, directory):
    fp.host_driver.configure("cpu", host_waits=False)
    first, second = (fp.pool(new_tag(), "cpu", backup="disk", directory=directory) for _ in range(2))
    (tensor, expected), other = filled(first, 3 * MIB), filled(second, 3 * MIB, 1)
    fp.pause(first.tag)
    fp.set_host_budget(0)  # no buffer is made beside the one there is
    latch = host.hold_context()
    fence = fp.resume(first.tag, order="explicit").fence
    assert second.prepare() == 3 * MIB
    latch.open()
    fence.synchronize()
    assert_same(tensor, expected)
    fp.pause(second.tag)
    fp.resume(second.tag).fence.synchronize()
    assert_same(*other)


def test_resumes_beside_a_busy_device_pin_no_more_than_the_bound(host, new_tag, directory):
    fp.host_driver.configure("cpu", host_waits=False)
    used = fp.host_memory().used
    pools = [fp.pool(new_tag(), "cpu", backup="disk", directory=directory) for _ in range(4)]
    kept = [filled(pool, 48 * MIB, seed) for seed, pool in enumerate(pools)]
    fp.pause(*[pool.tag for pool in pools])
    latch = host.hold_context()
    job = Job(lambda: [fp.resume(pool.tag, order="explicit") for pool in pools])
    eventually(lambda: fp.host_memory().used >= used + 128 * MIB, "the buffers are in use")
    time.sleep(0.1)  # those who would take more have had the time
    assert fp.host_memory().used <= used + (128 + 4) * MIB
    assert job.is_running()
    latch.open()
    for resumed in job.result():
        resumed.fence.synchronize()
    for tensor, expected in kept:
        assert_same(tensor, expected)
    pools[0].trim()
    assert fp.host_memory().used <= used + 64 * MIB


def test_a_buffer_that_cannot_be_asked_about_is_not_waited_for(host, new_tag, directory):
    fp.host_driver.configure("cpu", host_waits=False)
    first, second = (fp.pool(new_tag(), "cpu", backup="disk", directory=directory) for _ in range(2))
    kept = [filled(pool, 3 * MIB, seed) for seed, pool in enumerate((first, second))]
    fp.pause(first.tag, second.tag)
    fp.set_host_budget(0)  # no buffer is made beside the one there is
    latch = host.hold_context()
    resumed = fp.resume(first.tag, order="explicit")
    _core.arm_fault("host", "cuEventQuery", 1, True, 700)
    undoing = threading.Timer(0.3, latch.open)  # it waits for the device, as always
    undoing.start()
    with pytest.raises(fp.HostMemoryError):
        fp.resume(second.tag)
    undoing.join()
    _core.disarm_fault("host")
    resumed.fence.synchronize()
    fp.set_host_budget(None)
    fp.resume(second.tag).fence.synchronize()
    for tensor, expected in kept:
        assert_same(tensor, expected)


def test_a_pause_asks_for_the_buffer_to_the_disk_together_with_the_rest(host, tag, directory):
    pools = [fp.pool(tag, "cpu", backup="host"), fp.pool(tag, "cpu", backup="disk", directory=directory)]
    kept = [filled(pool, 6 * MIB, seed) for seed, pool in enumerate(pools)]
    fp.set_host_budget(fp.host_memory().used + 6 * MIB)
    copied = _core.call_counts("host")["cuMemcpyDtoHAsync"]
    with pytest.raises(fp.HostMemoryError, match="budget"):
        fp.pause(tag)
    assert _core.call_counts("host")["cuMemcpyDtoHAsync"] == copied
    fp.set_host_budget(None)
    fp.pause(tag)
    fp.resume(tag)
    for tensor, expected in kept:
        assert_same(tensor, expected)


def test_a_directory_that_is_no_text_is_refused(tag):
    with pytest.raises(ValueError, match="UTF-8"):
        fp.pool(tag, "cpu", backup="disk", directory=os.fsdecode(b"/tmp/\xff"))
