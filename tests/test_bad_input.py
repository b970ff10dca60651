"""Anything at all as an argument: it works, or raises what is documented, and changes nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fencepool as fp
from fencepool import _core
from support.contents import filled

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ALLOWED = (TypeError, ValueError, OverflowError, fp.Error)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from(
        [float("nan"), math.inf, -math.inf, 1 << 63, -(1 << 63), 1 << 200, "\0", "cuda:99999", "cpu:9"]
    ),
)
anything = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.tuples(scalars, scalars),
    st.dictionaries(st.text(max_size=2), scalars, max_size=2),
    st.sampled_from([object(), int, torch.float32, torch.device("meta"), torch.ones(2), lambda: None]),
)
fuzz = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def kept(host, tag):
    """A pool with a tensor, which no bad argument may change."""
    pool = fp.pool(tag, "cpu", backup="host")
    tensor, expected = filled(pool, 5000)
    yield pool
    assert pool.state == "active"
    is_same = torch.equal(tensor, expected)
    assert is_same


def attempt(call: Any, *args: Any, **kwargs: Any) -> Any:
    before = states()
    try:
        return call(*args, **kwargs)
    except ALLOWED as raised:
        message = str(raised)
    assert message
    assert states() == before
    return None


def states() -> list[tuple[int, bool]]:
    return [(core.id, core.status()["is_paused"]) for core in _core.pools()]


def close(pool: fp.Pool | None, kept: fp.Pool) -> None:
    if pool is not None and pool is not kept:
        pool.close()


@fuzz
@given(tag=anything, device=anything, backup=anything, retain=anything, fill=anything)
def test_pool(kept, tag, device, backup, retain, fill):
    close(attempt(fp.pool, tag, device, backup=backup, retain=retain, fill=fill), kept)


@fuzz
@given(bad=anything, where=st.sampled_from(["tag", "device", "backup", "retain", "fill"]))
def test_pool_with_one_bad_argument(kept, bad, where):
    good = {"tag": "t", "device": "cpu", "backup": "host", "retain": True, "fill": "zero"}
    arguments = {**good, where: bad}
    close(attempt(fp.pool, arguments.pop("tag"), arguments.pop("device"), **arguments), kept)


@fuzz
@given(shape=anything, dtype=st.one_of(anything, st.just(torch.float32), st.none()))
def test_empty(kept, shape, dtype):
    if isinstance(shape, int) and not isinstance(shape, bool) and shape > 1 << 20:
        shape = 1 << 60
    attempt(kept.empty, shape, dtype)


@fuzz
@given(owner=anything)
def test_adopt_contains_and_backup_of(kept, owner):
    if isinstance(owner, torch.Tensor):
        owner = owner.tolist()
    attempt(kept.adopt, owner)
    attempt(kept.contains, owner)
    attempt(kept.backup_of, owner)


@fuzz
@given(tags=st.lists(anything, min_size=1, max_size=3), timeout=anything, device=anything)
def test_pause_and_resume(kept, tags, timeout, device):
    tags = [tag for tag in tags if tag != kept.tag]
    for call, option in ((fp.pause, "timeout"), (fp.resume, "wait")):
        attempt(call, *tags, **{option: timeout, "device": device}) if tags else None
        attempt(call, "no-such-tag", **{option: timeout})


@fuzz
@given(order=anything, discard=anything)
def test_orders_and_discards(kept, order, discard):
    assert order in ("context", "explicit") or attempt(fp.resume, kept.tag, order=order) is None
    if discard not in ((), [], {}, "") and kept.tag not in str(discard):
        attempt(fp.pause, "no-such-tag", discard=discard)


@fuzz
@given(chosen=anything, order=anything)
def test_swaps_and_parts_of_fences(kept, chosen, order):
    attempt(fp.swap, pause=chosen, resume="no-such-tag", order=order)
    attempt(fp.swap, pause="no-such-tag", resume=chosen, order=order)
    attempt(fp.resume(kept.tag).fence_for, chosen)
    attempt(fp.fence_modules, chosen, kept)


@fuzz
@given(timeout=anything, stream=anything)
def test_fences(kept, timeout, stream):
    fence = fp.resume(kept.tag).fence
    attempt(fence.synchronize, timeout)
    if not (isinstance(stream, int) and not isinstance(stream, bool) and stream > 0):
        attempt(fence.wait, stream)  # another positive integer is taken for a stream's handle, as CUDA does


@fuzz
@given(nbytes=anything, device=anything)
def test_margins_and_memory(kept, nbytes, device):
    attempt(fp.set_memory_margin, nbytes, device)
    attempt(fp.set_memory_margin, nbytes, "cpu")
    fp.set_memory_margin(0, "cpu")
    attempt(fp.memory_info, device)
    attempt(fp.memory_margin, device)
    attempt(fp.driver_info, device)


@fuzz
@given(nbytes=anything)
def test_budgets(kept, nbytes):
    attempt(fp.set_host_budget, nbytes)
    fp.set_host_budget(None)


@fuzz
@given(limit=anything, bandwidth=anything, waits=anything)
def test_settings_of_the_embedded_driver(kept, limit, bandwidth, waits):
    total = fp.memory_info("cpu")[1]
    attempt(fp.host_driver.configure, "cpu:3", memory_limit=limit, bandwidth=bandwidth, host_waits=waits)
    fp.host_driver.configure("cpu:3", memory_limit=total, bandwidth=0, host_waits=True)


@fuzz
@given(callback=anything)
def test_callbacks(kept, callback):
    if not callable(callback):
        with pytest.raises(TypeError):
            kept.on_pause(callback)
        with pytest.raises(TypeError):
            kept.on_resume(callback)


@fuzz
@given(value=st.text(max_size=12).filter(lambda text: "\0" not in text))
def test_environment_variables(kept, monkeypatch, value):
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return
    monkeypatch.setenv("FENCEPOOL_HOST_MEMORY_CHECK", value)
    fp.pause(kept.tag)
    fp.resume(kept.tag)
