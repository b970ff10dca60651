"""Digests: the device's against two implementations on the CPU, and what pauses and resumes make of them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import assert_same, filled, pattern
from support.machine import MIB

BLOCK = _core.DIGEST_BLOCK
PRIME = 2**61 - 1
UNIT, LANES, WARPS, ROWS = 16, 32, 8, 16
TILE = UNIT * LANES * ROWS
KIB = 1 << 10


def digest_in_python(data: bytes) -> bytes:
    """Written from csrc/digest/format.h alone, in whole numbers without limits."""
    key = _core.digest_key()
    data = data.ljust(BLOCK, b"\0")
    result = []
    for part in range(2):
        total = 0
        for warp in range(WARPS):
            of_warp = 0
            for lane in range(LANES):
                value = 0
                for tile in range(warp, BLOCK // TILE, WARPS):
                    sums = [0, 0]
                    for row in range(ROWS):
                        at = tile * TILE + row * LANES * UNIT + lane * UNIT
                        unit = [int.from_bytes(data[at + 4 * i : at + 4 * i + 4], "little") for i in range(4)]
                        for which in range(2):
                            words = key["words"][4 * row + 2 * (2 * part + which) :]
                            for pair in (0, 2):
                                left = (unit[pair] + words[pair]) % 2**32
                                right = (unit[pair + 1] + words[pair + 1]) % 2**32
                                sums[which] = (sums[which] + left * right) % 2**64
                    for one in sums:
                        value = (value * key["points"][part] + one) % PRIME
                of_warp += value * key["lanes"][part][lane]
            total += of_warp * key["warps"][part][warp]
        result.append((total % PRIME).to_bytes(8, "little"))
    return b"".join(result)


def digests_of(machine, tensor, **options):
    """The device's, of a pool's tensor."""
    size = tensor.numel() * tensor.element_size()
    provider = "host" if machine.is_host else "cuda"
    return _core.digests_on_device(provider, 0, tensor.data_ptr(), size, **options)[0]


@pytest.fixture(autouse=True)
def able(request):
    """Not every build has the kernels; the suite of a GPU machine with nvcc has."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    if device.startswith("cuda") and (reason := _core.load_kernels("cuda", 0)):
        pytest.skip(reason)


@pytest.mark.parametrize("size", [16, 512, TILE - 16, TILE, TILE + 512, 3 * TILE + 16, BLOCK - 512, BLOCK])
def test_two_implementations_on_the_cpu_agree(size):
    data = bytes(pattern(size, seed=size).numpy())
    assert _core.digest_on_cpu(data) == digest_in_python(data)


def test_they_agree_on_words_that_overflow():
    for value in (0x00, 0xFF, 0x80):
        data = bytes([value]) * BLOCK
        assert _core.digest_on_cpu(data) == digest_in_python(data)


@pytest.mark.parametrize("head", [BLOCK, 512, BLOCK - 16])
@pytest.mark.parametrize("size", [16, 512, TILE, BLOCK, BLOCK + 16, 3 * BLOCK + 4096, 2 * MIB])
def test_the_device_computes_what_the_cpu_does(machine, tag, size, head):
    pool = fp.pool(tag, machine.device)
    tensor, expected = filled(pool, size, seed=size)
    data = bytes(expected.numpy())
    cuts = [0, *range(min(head, size), size, BLOCK), size]
    wanted = [_core.digest_on_cpu(data[a:b]) for a, b in itertools.pairwise(cuts)]
    assert digests_of(machine, tensor, head=head) == wanted


def test_the_device_tells_adversarial_blocks_apart(machine, tag):
    """Single bits, swapped words and units, shifted contents: all different, and as the CPU has them."""
    base = bytearray(pattern(BLOCK, seed=3).numpy().tobytes())
    blocks = [bytes(base), bytes(BLOCK), b"\1" + bytes(BLOCK - 1), bytes(BLOCK - 1) + b"\1"]
    chance = random.Random(5)
    for bit in [0, 7, 31, 32, 8 * BLOCK - 1, *(chance.randrange(8 * BLOCK) for _ in range(40))]:
        flipped = bytearray(base)
        flipped[bit // 8] ^= 1 << bit % 8
        blocks.append(bytes(flipped))
    for width in (4, 8, 16, 512, 8192):  # neighbours of every kind change places
        at = chance.randrange(BLOCK // width - 1) * width
        swapped = bytearray(base)
        swapped[at : at + width], swapped[at + width : at + 2 * width] = (
            base[at + width : at + 2 * width],
            base[at : at + width],
        )
        blocks.append(bytes(swapped))
    blocks += [bytes(base[16:] + base[:16]), bytes(base[1:] + base[:1])]
    pool = fp.pool(tag, machine.device)
    tensor = pool.empty((len(blocks) * BLOCK,), torch.uint8)
    tensor.copy_(torch.frombuffer(bytearray(b"".join(blocks)), dtype=torch.uint8))
    found = digests_of(machine, tensor)
    assert found == [_core.digest_on_cpu(block) for block in blocks]
    assert len(set(found)) == len(blocks)


def test_equal_blocks_have_equal_digests_wherever_they_are(machine, tag):
    pool = fp.pool(tag, machine.device)
    tensor = pool.empty((4 * BLOCK,), torch.uint8)
    tensor.view(4, BLOCK).copy_(pattern(BLOCK).expand(4, BLOCK))
    assert len(set(digests_of(machine, tensor))) == 1


def kept(machine, tag, **options):
    return fp.pool(tag, machine.device, backup="host", **options)


def copied(report):
    return sum(pool.bytes_copied for pool in report.pools)


def test_only_changed_blocks_are_copied(machine, tag):
    pool = kept(machine, tag)
    assert pool.digests
    assert pool.status().digests
    tensor, expected = filled(pool, 8 * BLOCK)
    expected = expected.clone()
    assert copied(fp.pause(tag)) == 8 * BLOCK
    fp.resume(tag)
    assert copied(fp.pause(tag)) == 0
    fp.resume(tag)
    for cycle in range(3):
        at = cycle * 2 * BLOCK + 77
        tensor[at] += 1
        expected[at] += 1
        assert copied(fp.pause(tag)) == BLOCK
        fp.resume(tag)
        assert_same(tensor, expected)
    assert pool.status().host_bytes == 8 * BLOCK


def test_without_digests_everything_is_copied_every_time(machine, tag):
    pool = kept(machine, tag, digests=False)
    assert not pool.digests
    tensor, expected = filled(pool, 4 * BLOCK)
    for _ in range(2):
        assert copied(fp.pause(tag)) == 4 * BLOCK
        fp.resume(tag)
        assert_same(tensor, expected)
    fp.pause(tag)
    with pytest.raises(fp.UnsupportedError, match="digests"):
        fp.resume(tag, verify=True)
    fp.resume(tag)


def test_zeros_are_stored_nowhere(machine, tag):
    pool = kept(machine, tag)
    tensor = pool.empty((16 * MIB,), torch.uint8)
    tensor.zero_()
    assert copied(fp.pause(tag)) == 0
    assert pool.status().host_bytes == 0
    assert pool.status().bytes_backed_up == 16 * MIB
    assert not pool.backup_of(tensor).any()
    fp.resume(tag)
    assert not tensor.any()


def test_equal_blocks_are_stored_once(machine, tag):
    pool = kept(machine, tag)
    block = pattern(BLOCK)
    tensors = [pool.empty((8, BLOCK), torch.uint8) for _ in range(3)]
    for tensor in tensors:
        tensor.copy_(block.expand(8, BLOCK))
    assert copied(fp.pause(tag)) == BLOCK
    assert pool.status().host_bytes == BLOCK
    for tensor in tensors:
        assert_same(pool.backup_of(tensor), block.expand(8, BLOCK))
    with pytest.raises(ValueError, match="stored once"):
        pool.backup_of(tensors[0][0], copy=False)
    fp.resume(tag)
    for tensor in tensors:
        assert_same(tensor, block.expand(8, BLOCK))
    tensors[1][3, 0] += 1  # one of them goes its own way
    assert copied(fp.pause(tag)) == BLOCK
    fp.resume(tag)
    assert_same(tensors[0], block.expand(8, BLOCK))
    assert int(tensors[1][3, 0].cpu()) == (int(block[0]) + 1) % 256
    assert_same(tensors[1][3, 1:], block[1:])


def test_contents_that_move_to_another_tensor_are_not_copied_again(machine, tag):
    pool = kept(machine, tag)
    first, expected = filled(pool, 4 * MIB)
    fp.pause(tag)
    fp.resume(tag)
    second = pool.empty((4 * MIB,), torch.uint8)
    second.copy_(first)
    first.copy_(pattern(4 * MIB, seed=9))
    assert copied(fp.pause(tag)) == 4 * MIB  # the new contents of the first
    fp.resume(tag)
    assert_same(second, expected)
    assert_same(first, pattern(4 * MIB, seed=9))


def test_freed_tensors_give_their_place_to_new_ones(machine, tag):
    pool = kept(machine, tag)
    tensors = [filled(pool, 2 * MIB, seed) for seed in range(4)]
    fp.pause(tag)
    fp.resume(tag)
    for round_ in range(6):
        tensors[round_ % 4] = filled(pool, 2 * MIB, 10 + round_)
        fp.pause(tag)
        fp.resume(tag)
        for tensor, expected in tensors:
            assert_same(tensor, expected)
    assert pool.status().host_bytes <= 12 * MIB


def test_trimming_forgets_what_was_stored(machine, tag):
    pool = kept(machine, tag)
    tensor, expected = filled(pool, 2 * MIB)
    fp.pause(tag)
    fp.resume(tag)
    pool.trim()
    assert copied(fp.pause(tag)) == 2 * MIB
    fp.resume(tag)
    assert_same(tensor, expected)


def test_after_a_pause_that_failed_nothing_counts_as_stored(host, tag):
    pool = kept(host, tag)
    tensor, expected = filled(pool, 4 * MIB)
    fp.pause(tag)
    fp.resume(tag)
    changed = pattern(4 * MIB, seed=5)
    tensor.copy_(changed)
    _core.arm_fault("host", "cuEventRecord", 2, False, 999)  # the copies have been submitted
    with pytest.raises(fp.DriverError):
        fp.pause(tag)
    _core.disarm_fault("host")
    assert_same(tensor, changed)
    assert copied(fp.pause(tag)) == 4 * MIB
    fp.resume(tag, verify=True)
    assert_same(tensor, changed)
    tensor.copy_(expected)  # what was stored before the failure may have been overwritten
    fp.pause(tag)
    fp.resume(tag, verify=True)
    assert_same(tensor, expected)


def test_a_view_that_was_written_to_is_no_longer_trusted(machine, tag):
    """Two tensors that come to hold what the view's bytes held must not get what was written over them."""
    pool = kept(machine, tag)
    tensor, expected = filled(pool, 2 * MIB)
    fp.pause(tag)
    view = pool.backup_of(tensor, copy=False)
    view.fill_(9)
    fp.resume(tag)
    assert bool((tensor == 9).all())
    tensor.copy_(expected)
    assert copied(fp.pause(tag)) == 2 * MIB
    fp.resume(tag)
    assert_same(tensor, expected)
    view.fill_(7)  # while the pool is active: what is stored is not what it was
    fp.pause(tag)
    fp.resume(tag)
    assert_same(tensor, expected)
    del view


def test_verifying_finds_one_flipped_byte(machine, tag):
    pool = kept(machine, tag)
    tensor, expected = filled(pool, 6 * MIB)
    other, untouched = filled(pool, 2 * MIB, seed=1)
    fp.pause(tag)
    fp.resume(tag, verify=True)
    fp.pause(tag)
    # A copy's parts are the backup itself: this is how memory goes bad.
    part = torch.utils.dlpack.from_dlpack(
        pool._core.backup_of(tensor.data_ptr(), tensor.numel(), False)[0].to_dlpack()
    )
    part[3 * MIB + 5] ^= 4
    before = pool.status()
    with pytest.raises(fp.CorruptedBackupError, match=r"1 of \d+ blocks differ.* at byte 3145728") as caught:
        fp.resume(tag, verify=True)
    assert caught.value.pool == tag
    assert pool.state == "paused"
    assert pool.status().bytes_backed_up == before.bytes_backed_up
    part[3 * MIB + 5] ^= 4
    del part
    fp.resume(tag, verify=True)
    assert_same(tensor, expected)
    assert_same(other, untouched)


def test_what_is_corrupted_comes_back_as_it_is_without_verifying(machine, tag):
    pool = kept(machine, tag)
    tensor, expected = filled(pool, MIB)
    fp.pause(tag)
    part = torch.utils.dlpack.from_dlpack(pool._core.backup_of(tensor.data_ptr(), MIB, False)[0].to_dlpack())
    part[1] ^= 1
    del part
    fp.resume(tag)
    expected = expected.clone()
    expected[1] ^= 1
    assert_same(tensor, expected)


def test_digests_can_be_required_and_have_no_meaning_without_a_backup(machine, tag):
    assert kept(machine, tag, digests=True) is kept(machine, tag)
    with pytest.raises(ValueError, match="none"):
        fp.pool(tag, machine.device, digests=True)
    with pytest.raises(TypeError):
        kept(machine, tag, digests=1)
    with pytest.raises(TypeError):
        fp.resume(verify="yes")


def test_dead_bytes_inside_a_block_are_neither_copied_nor_stored(machine, tag):
    """PyTorch's allocator holds parts of its segments free."""
    pool = kept(machine, tag)
    tensor, expected = filled(pool, 8 * MIB)
    start = tensor.data_ptr()
    dead = {start + MIB: 2 * MIB, start + 5 * MIB + 100: MIB}
    report = _core.pause([pool._core], 10.0, {}, set(), dead)
    assert report["pools"][0]["bytes_copied"] <= 5 * MIB + 2 * KIB
    assert pool.status().bytes_backed_up <= 5 * MIB + 2 * KIB
    fp.resume(tag)
    for begin, end in ((0, MIB), (3 * MIB, 5 * MIB + 100), (6 * MIB + 100, 8 * MIB)):
        assert_same(tensor[begin:end], expected[begin:end])


def test_a_view_that_outlived_a_pause_is_not_trusted_after_its_death(machine, tag):
    """It may have been written to after the pause that found it had stored everything anew."""
    pool = kept(machine, tag)
    tensor, expected = filled(pool, 2 * MIB)
    fp.pause(tag)
    view = pool.backup_of(tensor, copy=False)
    fp.resume(tag)
    fp.pause(tag)
    fp.resume(tag)
    view.fill_(7)
    del view
    assert copied(fp.pause(tag)) == 2 * MIB
    fp.resume(tag, verify=True)
    assert_same(tensor, expected)
    assert copied(fp.pause(tag)) == 0  # nobody could have written to it since
    fp.resume(tag)


def test_preparing_while_paused_adds_nothing(machine, tag):
    """Zeros and equal bytes take less host memory than what is live."""
    pool = kept(machine, tag)
    tensor = pool.empty((4 * MIB,), torch.uint8)
    tensor.zero_()
    fp.pause(tag)
    assert pool.prepare() == 0
    assert pool.status().host_bytes == 0
    fp.resume(tag)


def scattered(pool):
    """Small tensors, far apart in the backup: what lay between them is dead, and new blocks do not fit."""
    between, pins, spacing = [], [], []
    for number in range(16):
        between.append(filled(pool, BLOCK // 2, seed=number)[0])
        spacing.append(pool.empty((BLOCK // 2,), torch.uint8))
        pins.append(filled(pool, 512, seed=100 + number))
        spacing.append(pool.empty((BLOCK - 512,), torch.uint8))
    return between, pins, spacing


@pytest.mark.parametrize("is_budget_spent", [False, True])
def test_gaps_that_nothing_fits_into_do_not_let_the_backup_grow(machine, tag, is_budget_spent):
    pool = kept(machine, tag)
    between, tensors, spacing = scattered(pool)
    spacing.clear()
    fp.pause(tag)
    fp.resume(tag)
    stored = pool.status().host_bytes
    if is_budget_spent:  # then a single gap is too much
        tensors += [(tensor, tensor.cpu().clone()) for tensor in between[2:]]
        fp.set_host_budget(_core.host_memory_used())
    between.clear()
    tensors.append(filled(pool, BLOCK if is_budget_spent else 2 * MIB))
    fp.pause(tag)
    assert pool.status().host_bytes <= max(stored, sum(tensor.numel() for tensor, _ in tensors) + 4 * KIB)
    fp.resume(tag, verify=True)
    for tensor, expected in tensors:
        assert_same(tensor, expected)


def test_reading_zeros_takes_no_memory_of_their_size(machine, tag):
    pool = kept(machine, tag)
    tensor = pool.empty((4 * MIB,), torch.uint8)
    tensor.zero_()
    tensor[MIB + 5] = 1
    fp.pause(tag)
    parts = pool._core.backup_of(tensor.data_ptr(), 4 * MIB, False)
    starts = [torch.utils.dlpack.from_dlpack(part.to_dlpack()).data_ptr() for part in parts]
    assert len(set(starts)) == 2  # one block of zeros, and the one that is stored
    assert_same(pool.backup_of(tensor).nonzero().view(-1), torch.tensor([MIB + 5]))
    del parts
    fp.resume(tag)


def test_digests_of_more_runs_than_a_launch_takes(machine, tag):
    pool = kept(machine, tag)
    tensors, spacing = [], []
    for number in range(130):
        tensors.append(filled(pool, 512, seed=number))
        spacing.append(pool.empty((BLOCK // 2,), torch.uint8))
    spacing.clear()
    for expected in (130 * 512, 0):
        assert copied(fp.pause(tag)) == expected
        fp.resume(tag, verify=True)
    for tensor, contents in tensors:
        assert_same(tensor, contents)
