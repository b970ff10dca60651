"""Layer by layer: parts of a restore that can be waited for, and modules that wait for their own part."""

from __future__ import annotations

import pytest
import torch

import fencepool as fp
from fencepool import _core
from fencepool.pytorch import fence_modules
from support.contents import assert_same, filled, pattern
from support.machine import MIB
from support.waiting import Job, eventually

SLOW = 2 * MIB  # bytes a second


def as_a_gpu() -> None:
    """The embedded driver's host waits for nothing, and memory without contents holds rubbish."""
    fp.host_driver.configure(host_waits=False, poisoned=True)


@pytest.fixture
def there(machine):
    if machine.is_host:
        as_a_gpu()
    return machine


# --- parts of a fence -------------------------------------------------------------------------------


def test_the_first_tensor_is_there_while_the_last_is_on_its_way(host, keeping, tag):
    as_a_gpu()
    pool = fp.pool(tag, "cpu", backup="host")
    early, early_before = filled(pool, MIB, 1)
    late, late_before = filled(pool, 4 * MIB, 2)
    fp.pause(tag)
    fp.host_driver.configure(bandwidth=SLOW)
    resumed = fp.resume(tag, order="explicit")
    resumed.fence_for(early).synchronize(timeout=60)
    assert not resumed.fence_for(late).done()
    assert not resumed.fence.done()
    assert_same(early, early_before)
    fp.host_driver.configure(bandwidth=0)
    resumed.fence_for(late).synchronize(timeout=60)
    assert_same(late, late_before)


def test_a_large_segment_has_parts_of_64_mib(host, tag):
    """`adopt` packs tensors into segments of up to 1 GiB, and one tensor may be as large."""
    as_a_gpu()
    pool = fp.pool(tag, "cpu", backup="host")
    before = pattern(MIB).repeat(160)
    whole = pool.empty((160 * MIB,), dtype=torch.uint8).copy_(before)
    assert pool.status().segments == 1
    fp.pause(tag)
    fp.host_driver.configure(bandwidth=1024 * MIB)
    recorded = _core.call_counts("host")["cuEventRecord"]
    resumed = fp.resume(tag, order="explicit")
    assert _core.call_counts("host")["cuEventRecord"] - recorded == 3
    first, second, third = (whole[at * MIB :][:100] for at in (0, 70, 140))
    resumed.fence_for(first).synchronize(timeout=60)
    assert not resumed.fence_for(third).done()
    fp.host_driver.configure(bandwidth=0)
    resumed.fence_for(second).synchronize(timeout=60)
    resumed.fence_for(whole).synchronize(timeout=60)
    assert resumed.fence.done()
    assert_same(whole, before)


def test_in_context_order_one_event_stands_for_all(there, tag):
    pool = fp.pool(tag, there.device, backup="host")
    held = [filled(pool, MIB, seed) for seed in range(3)]
    fp.pause(tag)
    latch = there.hold_context()
    recorded = _core.call_counts(there.provider)["cuEventRecord"]
    resumed = fp.resume(tag)
    assert _core.call_counts(there.provider)["cuEventRecord"] - recorded == 1
    parts = [resumed.fence_for(tensor) for tensor, _ in held]
    assert not any(part.done() for part in parts)
    latch.open()
    parts[0].synchronize(timeout=60)
    assert resumed.fence.done()
    for tensor, before in held:
        assert_same(tensor, before)


def test_a_stream_that_waits_for_a_part_sees_the_contents(there, keeping, tag):
    pool = fp.pool(tag, there.device, **keeping.options)
    held = [filled(pool, MIB, seed) for seed in range(4)]
    scratch = fp.pool(f"{tag}-scratch", there.device).empty((MIB,), dtype=torch.uint8)
    stream = there.stream()
    fp.pause(tag)
    resumed = fp.resume(tag, order="explicit")
    for tensor, before in reversed(held):
        resumed.fence_for(tensor).wait(stream)
        there.copy(scratch, tensor, stream)
        there.synchronize(stream)
        assert there.read(scratch.data_ptr(), MIB) == bytes(before.numpy())


def test_small_tensors_and_gaps_between_them(there, pinned, tag):
    pool = fp.pool(tag, there.device, **pinned.options)
    held = [filled(pool, 100_000, seed) for seed in range(12)]
    del held[3:6]
    eventually(lambda: pool.status().pending_frees == 0, "the freed tensors are given back")
    fp.pause(tag)
    latch = None if pinned.name == "host-once" else there.hold_context()  # a resume without retain waits
    resumed = fp.resume(tag, order="explicit")
    parts = [resumed.fence_for(tensor) for tensor, _ in held]
    if latch is not None:
        assert not any(part.done() for part in parts)
        latch.open()
    for part, (tensor, before) in zip(parts, held, strict=True):
        part.synchronize(timeout=60)
        assert_same(tensor, before)


def test_pools_without_a_backup(there, new_tag):
    dropped = fp.pool(new_tag(), there.device)
    zeroed = fp.pool(new_tag(), there.device, fill="zero")
    held = [filled(pool, MIB)[0] for pool in (dropped, zeroed)]
    fp.pause(dropped.tag, zeroed.tag)
    latch = there.hold_context()
    resumed = fp.resume(dropped.tag, zeroed.tag, order="explicit")
    assert resumed.fence_for(held[0]).done()
    part = resumed.fence_for(held[1])
    assert not part.done()
    latch.open()
    part.synchronize(timeout=60)
    assert not held[1].any()


def test_pools_that_were_active_have_their_own_last_restore(there, new_tag):
    pools = [fp.pool(new_tag(), there.device, backup="host") for _ in range(3)]
    held = [filled(pool, MIB, i) for i, pool in enumerate(pools)]
    tags = [pool.tag for pool in pools]
    fp.pause(*tags[:2])
    latch = there.hold_context()
    fp.resume(tags[0], order="explicit")
    resumed = fp.resume(*tags, order="explicit")
    assert [one.changed for one in resumed.pools] == [False, True, False]
    parts = [resumed.fence_for(tensor) for tensor, _ in held]
    assert [part.done() for part in parts] == [False, False, True]
    latch.open()
    for part, (tensor, before) in zip(parts, held, strict=True):
        part.synchronize(timeout=60)
        assert_same(tensor, before)
    again = fp.resume(*tags, order="explicit")
    assert all(again.fence_for(tensor).done() for tensor, _ in held)


def test_what_lies_in_no_resumed_pool_is_refused(there, new_tag):
    pool, other = (fp.pool(new_tag(), there.device, backup="host") for _ in range(2))
    tensor, _ = filled(pool, 1000)
    foreign, _ = filled(other, 1000)
    fp.pause(pool.tag)
    resumed = fp.resume(pool.tag, order="explicit")
    for wrong in (foreign, torch.zeros(3), torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()):
        with pytest.raises(ValueError, match=pool.tag):
            resumed.fence_for(wrong)
    for wrong in (None, 3, "tensor", [tensor]):
        with pytest.raises(TypeError, match=r"torch\.Tensor"):
            resumed.fence_for(wrong)
    assert resumed.fence_for(torch.zeros(0)).done()
    resumed.fence.synchronize(timeout=60)


def test_a_part_outlives_its_pool(there, tag):
    pool = fp.pool(tag, there.device, backup="host")
    tensor, _ = filled(pool, MIB)
    fp.pause(tag)
    resumed = fp.resume(tag, order="explicit")
    part = resumed.fence_for(tensor)
    part.synchronize(timeout=60)
    stays = tensor.clone()
    del tensor
    pool.close()
    assert part.done()
    with pytest.raises(ValueError, match="none of the pools"):
        resumed.fence_for(stays)


# --- modules ----------------------------------------------------------------------------------------


def make_model(pool: fp.Pool, layers: int = 4, width: int = 512) -> torch.nn.Sequential:
    """Each layer has a segment of its own: 1 MiB of weights and more."""
    torch.manual_seed(3)
    made = [pool.adopt(torch.nn.Linear(width, width).requires_grad_(False)) for _ in range(layers)]
    return torch.nn.Sequential(*made)


def on(there, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(there.torch_device)


def test_the_first_layer_runs_while_the_last_is_on_its_way(host, tag):
    as_a_gpu()
    pool = fp.pool(tag, "cpu", backup="host")
    model = make_model(pool)
    given = torch.rand(3, 512)
    first, whole = model[0](given), model(given)
    fence_modules(model, pool)
    fp.pause(tag)
    fp.host_driver.configure(bandwidth=SLOW)
    resumed = fp.resume(tag, order="explicit")
    assert torch.equal(model[0](given), first)
    assert not resumed.fence_for(model[3].weight).done()
    fp.host_driver.configure(bandwidth=0)
    assert torch.equal(model(given), whole)
    assert resumed.fence_for(model[3].weight).done()


def test_nothing_is_computed_before_it_is_there(there, tag):
    """All copies are held, by a latch: the model must not have read anything when it opens."""
    pool = fp.pool(tag, there.device, backup="host")
    model = make_model(pool)
    given = on(there, torch.rand(3, 512))
    whole = model(given)
    fence_modules(model, pool)
    fp.pause(tag)
    latch = there.hold_context()
    resumed = fp.resume(tag, order="explicit")
    if there.is_host:
        running = Job(lambda: model(given))
        assert running.is_running()
    else:
        answer = model(given)  # the host is not held
    assert not resumed.fence.done()
    latch.open()
    assert torch.equal(running.result() if there.is_host else answer, whole)


@pytest.mark.parametrize("order", ["explicit", "context"])
def test_hooks_serve_every_later_cycle(there, keeping, tag, order):
    pool = fp.pool(tag, there.device, **keeping.options)
    model = make_model(pool)
    given = on(there, torch.rand(3, 512))
    handle = fence_modules(model, pool)
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        whole = model(given)
        fp.pause(tag)
        fp.resume(tag, order=order)
        assert torch.equal(model(given), whole)
    handle.remove()
    handle.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_without_a_restore_under_way_a_hook_calls_no_driver(there, tag):
    pool = fp.pool(tag, there.device, backup="host")
    model = make_model(pool, layers=2)
    given = on(there, torch.rand(3, 512))
    fence_modules(model, pool)
    before = _core.call_counts(there.provider)
    model(given)
    assert _core.call_counts(there.provider) == before
    fp.pause(tag)
    fp.resume(tag, order="explicit").fence.synchronize(timeout=60)
    model(given)  # sees that it has ended
    before = _core.call_counts(there.provider)
    model(given)
    assert _core.call_counts(there.provider) == before


class Reads(torch.nn.Module):
    """Reads weights that lie in modules which it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = torch.nn.ParameterList([torch.rand(512, 512), torch.rand(512, 512)])
        self.blocks = torch.nn.ModuleList([torch.nn.ParameterDict({"only": torch.rand(512, 512)})])
        self.called = torch.nn.Linear(512, 512)
        self.register_buffer("scale", torch.rand(512))
        self.register_parameter("nothing", None)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for weight in [*self.listed, self.blocks[0]["only"]]:
            given = given @ weight / 512
        return self.called(given) * self.scale


@pytest.mark.parametrize(
    "make",
    [
        Reads,
        lambda: torch.nn.MultiheadAttention(512, 4, batch_first=True),
        lambda: torch.nn.TransformerEncoderLayer(512, 4, 512, batch_first=True).eval(),
    ],
    ids=["lists", "attention", "encoder"],
)
def test_weights_that_a_module_reads_inside_others(there, tag, make):
    """Those of containers, and of the modules of PyTorch that do so."""
    pool = fp.pool(tag, there.device, backup="host")
    torch.manual_seed(5)
    model = make().requires_grad_(False)
    for parameter in model.parameters():
        pool.adopt(parameter)
    for name, buffer in list(model.named_buffers()):
        setattr(model, name, pool.adopt(buffer))
    given = on(there, torch.rand(2, 3, 512))
    arguments = (given,) * (3 if isinstance(model, torch.nn.MultiheadAttention) else 1)

    def answer() -> torch.Tensor:
        made = model(*arguments)
        return made[0] if isinstance(made, tuple) else made

    fence_modules(model, pool)
    before = answer()
    fp.pause(tag)
    latch = there.hold_context()
    fp.resume(tag, order="explicit")
    running = Job(answer) if there.is_host else None
    after = None if there.is_host else answer()
    latch.open()
    # Another thread may add up in another order.
    torch.testing.assert_close(running.result() if running is not None else after, before)


def test_tied_weights_and_two_pools(there, new_tag):
    first, second = (fp.pool(new_tag(), there.device, backup="host") for _ in range(2))
    torch.manual_seed(1)
    embedding = torch.nn.Embedding(600, 512)
    head = torch.nn.Linear(512, 600, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, torch.nn.Linear(512, 512), head).requires_grad_(False)
    first.adopt(embedding)
    second.adopt(model[1])
    given = on(there, torch.arange(5))
    before = model(given)
    fp.pause(first.tag, second.tag)
    resumed = fp.resume(first.tag, second.tag, order="explicit")
    fence_modules(model, resumed)
    assert torch.equal(model(given), before)
    for tags in ([first.tag], [second.tag], [second.tag, first.tag]):
        fp.pause(*tags)
        for tag in tags:
            fp.resume(tag, order="explicit")
        assert torch.equal(model(given), before)


def test_hooks_of_one_module_wait_for_no_other(host, tag):
    as_a_gpu()
    pool = fp.pool(tag, "cpu", backup="host")
    model = make_model(pool, layers=3)
    fence_modules(model, pool)
    given = torch.rand(1, 512)
    expected = [layer(given) for layer in model]
    fp.pause(tag)
    fp.host_driver.configure(bandwidth=SLOW)
    resumed = fp.resume(tag, order="explicit")
    ended = []
    for layer, answer in zip(model, expected, strict=True):
        assert torch.equal(layer(given), answer)
        ended.append([resumed.fence_for(one.weight).done() for one in model])
    assert ended[0][:1] == [True]
    assert ended[0][2] is False
    assert ended[2] == [True] * 3


def test_what_cannot_be_hooked_is_refused(there, new_tag):
    pool, other = (fp.pool(new_tag(), there.device, backup="host") for _ in range(2))
    model = make_model(pool, layers=1)
    for wrong in (None, pool, torch.zeros(3)):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
            fence_modules(wrong, pool)
    for wrong in (None, pool.tag, model):
        with pytest.raises(TypeError, match="pools or what a resume returned"):
            fence_modules(model, wrong)
    with pytest.raises(ValueError, match=other.tag):
        fence_modules(model, other)
    with pytest.raises(ValueError, match="none"):
        fence_modules(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_restore_that_failed_is_raised_by_whoever_needs_it(host, tag):
    as_a_gpu()
    pool = fp.pool(tag, "cpu", backup="host")
    model = make_model(pool, layers=2)
    given = torch.rand(1, 512)
    before = model(given)
    fence_modules(model, pool)
    fp.pause(tag)
    fp.resume(tag, order="explicit").fence.synchronize(timeout=60)
    fp.pause(tag)
    latch = host.hold_context()
    fp.resume(tag, order="explicit")
    _core.arm_fault("host", "cuEventQuery", 1, True, 719)
    with pytest.raises(fp.DriverError, match="cuEventQuery"):
        model(given)
    _core.disarm_fault("host")
    latch.open()
    assert torch.equal(model(given), before)


def test_a_failing_event_between_the_copies_leaves_everything_paused(host, tag):
    as_a_gpu()
    pool = fp.pool(tag, "cpu", backup="host")
    held = [filled(pool, MIB, seed) for seed in range(3)]
    fp.pause(tag)
    for call in ("cuEventCreate", "cuEventRecord"):
        for nth in (1, 2, 3):
            _core.arm_fault("host", call, nth, False, 999)
            with pytest.raises(fp.DriverError, match=call) as caught:
                fp.resume(tag, order="explicit")
            assert caught.value.pool == tag
            assert pool.state == "paused"
            assert pool.status().bytes_mapped == 0
    resumed = fp.resume(tag, order="explicit")
    for tensor, before in held:
        resumed.fence_for(tensor).synchronize(timeout=60)
        assert_same(tensor, before)


def test_a_hook_in_a_capture_raises_or_does_nothing(there, tag):
    if there.is_host:
        pytest.skip("modules of the embedded driver run on no stream")
    pool = fp.pool(tag, there.device, backup="host")
    model = make_model(pool)
    given = on(there, torch.rand(3, 512))
    stream = torch.cuda.Stream(there.device)
    with torch.cuda.stream(stream):
        whole = model(given)  # what this stream takes once
    torch.cuda.synchronize()
    fence_modules(model, pool)
    fp.pause(tag)
    latch = there.hold_context()
    resumed = fp.resume(tag, order="explicit")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            kept = given + 1
            with pytest.raises(fp.CaptureError, match="captured"):
                model(given)
        finally:
            graph.capture_end()
    latch.open()
    resumed.fence.synchronize(timeout=60)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(kept, given + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        answer = model(given)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(answer, whole)
