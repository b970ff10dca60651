"""One behavioural suite over {embedded driver, GPU} x {policies}; and nothing may be left behind."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fencepool as fp
from fencepool import _core

pytest.register_assert_rewrite(
    *(f"support.{name}" for name in ("machine", "waiting", "contents", "children", "ranks", "nvml"))
)

try:
    import torch
except ImportError:  # the tests of the sources and of the command line run without
    torch = None

collect_ignore = ["engines"]  # real engines: run by their own target, in environments of their own

_MARKERS = [
    "leaves: leaves recorded problems behind, which are part of what the test shows",
]
_numbers = itertools.count()
_failed = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if torch is not None:
        torch.set_num_threads(1)  # the tensors are small, and the tests run side by side


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    info = fp.driver_info("cuda")
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        wanted = marker.kwargs.get("count", 1)
        if not info.is_available:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {info.reason}"))
        elif len(info.devices) < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} GPUs"))
        elif torch is None or not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a PyTorch with CUDA"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


if torch is not None:
    from support.machine import Machine, host_counts, warm_up_gpu
    from support.policies import HOST, KEEPING, LATER, POLICIES, VIEWED, Policy

    DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
    PAIRS = [
        ("cpu", "cpu:1"),
        pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu(count=2)),
        pytest.param(("cpu", "cuda:0"), marks=pytest.mark.gpu),
    ]

    @pytest.fixture(params=DEVICES)
    def device(request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.fixture(params=PAIRS, ids="+".join)
    def devices(request: pytest.FixtureRequest) -> tuple[str, str]:
        """Two devices of one process."""
        return request.param

    def _params(policies: list[Policy]) -> list[Any]:
        return [pytest.param(one, id=one.name, marks=LATER.get(one.name, [])) for one in policies]

    @pytest.fixture(params=_params(POLICIES))
    def policy(request: pytest.FixtureRequest) -> Policy:
        return request.param

    @pytest.fixture(params=_params(KEEPING))
    def keeping(request: pytest.FixtureRequest) -> Policy:
        """A policy that keeps the contents."""
        return request.param

    @pytest.fixture(params=VIEWED, ids=lambda policy: policy.name)
    def viewed(request: pytest.FixtureRequest) -> Policy:
        """A policy that keeps the contents in memory, where a view of them can be had."""
        return request.param

    @pytest.fixture(params=HOST, ids=lambda policy: policy.name)
    def pinned(request: pytest.FixtureRequest) -> Policy:
        """A policy that keeps the contents in pinned host memory, as much of it as is live."""
        return request.param

    def _warm_up(device: str) -> None:
        if device.startswith("cuda"):
            warm_up_gpu(device)

    @pytest.fixture
    def machine(device: str, clean: None) -> Iterator[Machine]:
        _warm_up(device)
        made = Machine(device)
        yield made
        made.close()

    @pytest.fixture
    def machines(devices: tuple[str, str], clean: None) -> Iterator[list[Machine]]:
        for name in devices:
            _warm_up(name)
        made = [Machine(name) for name in devices]
        yield made
        for one in made:
            one.close()

    @pytest.fixture
    def host(clean: None) -> Iterator[Machine]:
        """The embedded driver's first device, for what only it lets us arrange."""
        made = Machine("cpu")
        yield made
        made.close()

    @pytest.fixture
    def new_tag(clean: None) -> Callable[..., str]:
        """Makes tags that no other test uses."""
        return lambda stem="pool": f"{stem}-{next(_numbers)}"

    @pytest.fixture
    def tag(new_tag: Callable[..., str]) -> str:
        return new_tag()

    @pytest.fixture
    def pool(machine: Machine, policy: Policy, tag: str) -> fp.Pool:
        return fp.pool(tag, machine.device, **policy.options)

    @pytest.fixture(autouse=True)
    def clean(request: pytest.FixtureRequest) -> Iterator[None]:
        """Undo a test's settings, close its pools, and look for what is still alive."""
        # The traceback of a test that failed goes before what is alive is frozen, with the test's tensors.
        sys.last_exc = sys.last_value = sys.last_traceback = None
        gc.collect()
        # What is alive now stays: collections from here on need not look at PyTorch and at the other tests.
        gc.freeze()
        _close_pools()  # of a test that failed
        kept = {core.id for core in _core.pools()}
        _core.clear_problems()
        before = host_counts()
        yield
        _reset_machine()
        gc.collect()
        busy = [error for number, error in _close_pools() if number not in kept]
        if request.node.stash.get(_failed, True) or request.node.get_closest_marker("leaves"):
            return
        assert busy == [], "tensors outlive the test"
        assert _core.problems() == []
        # Less is fine: what a failed test's traceback kept alive may have gone meanwhile.
        more = {name: (before[name], now) for name, now in host_counts().items() if now > before[name]}
        assert more == {}, "driver resources outlive the test: before and after"

    def _reset_machine() -> None:
        _core.disarm_fault("host")
        fp.set_host_budget(None)
        for ordinal in range(_core.raw.DEVICE_COUNT):
            _core.raw.set_settings(ordinal, _core.raw.Settings())
            fp.host_driver.configure(f"cpu:{ordinal}" if ordinal else "cpu", host_waits=True)
        if fp.driver_info("cuda").is_available:
            _core.disarm_fault("cuda")

    def _close_pools() -> list[tuple[int, fp.Error]]:
        """Close what can be closed; the ids of the others, and why."""
        busy = []
        for core in _core.pools():
            try:
                fp.pools.known(core).close()
            except fp.Error as error:
                busy.append((core.id, error))
        return busy
