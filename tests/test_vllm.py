"""vLLM's allocator on pools, and the plug-in that puts it in place. The real vLLM: test_vllm_sources.py."""

from __future__ import annotations

import gc
import logging
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fencepool as fp
from fencepool.integrations import vllm as integration
from fencepool.integrations.vllm import CuMemAllocator, UnsupportedVllmError
from support import children
from support.contents import assert_same, is_same, pattern
from support.machine import MIB

LOGGER = "vllm.fencepool"
WEIGHTS, CACHE, RUNTIME = 3 * MIB, 5 * MIB, 4096


@pytest.fixture
def allocator(machine, monkeypatch) -> Iterator[CuMemAllocator]:
    monkeypatch.setenv("FENCEPOOL_DEVICE", machine.device)
    monkeypatch.setenv("FENCEPOOL_VLLM_WAIT", "0")
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    monkeypatch.setattr(CuMemAllocator, "deferrable_tags", None)
    made = CuMemAllocator.get_instance()
    yield made
    if any(status.state == "paused" for status in fp.status()):
        made.wake_up()
    gc.collect()
    made.release_pools()


class Engine:
    """What a vLLM worker allocates: weights; then a KV cache inside of runtime state."""

    def __init__(self, allocator: CuMemAllocator, device: str) -> None:
        self.allocator = allocator
        with allocator.use_memory_pool(tag="weights"):
            self.weights = torch.empty(WEIGHTS, dtype=torch.uint8, device=device)
        with allocator.use_memory_pool(tag="runtime"):
            self.runtime = torch.empty(RUNTIME, dtype=torch.uint8, device=device)
            with allocator.use_memory_pool(tag="kv_cache"):
                self.cache = torch.empty(CACHE, dtype=torch.uint8, device=device)
            self.more_runtime = torch.empty(RUNTIME, dtype=torch.uint8, device=device)
        self.fill(1)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {"weights": self.weights, "runtime": self.runtime, "kv_cache": self.cache}

    def fill(self, seed: int) -> None:
        for tensor in (*self.tensors.values(), self.more_runtime):
            tensor.copy_(pattern(tensor.numel(), seed))

    def kept(self, seed: int) -> set[str]:
        return {tag for tag, one in self.tensors.items() if is_same(one, pattern(one.numel(), seed))}


@pytest.fixture
def engine(allocator, machine) -> Iterator[Engine]:
    made = Engine(allocator, machine.torch_device)
    yield made
    vars(made).clear()  # its tensors go before the pools are looked at


def states() -> dict[str, str]:
    return {status.tag.removeprefix("vllm:"): status.state for status in fp.status()}


def test_the_instance_is_one(allocator):
    assert CuMemAllocator.get_instance() is allocator
    assert CuMemAllocator.instance is allocator


def test_each_allocation_is_in_the_pool_of_the_innermost_tag(engine):
    pools = {tag: engine.allocator._pool(tag) for tag in engine.tensors}
    for tag, tensor in engine.tensors.items():
        assert [name for name, pool in pools.items() if pool.contains(tensor)] == [tag]
    assert pools["runtime"].contains(engine.more_runtime)


def test_without_a_tag_the_default_one_is_used(allocator, machine):
    with allocator.use_memory_pool():
        tensor = torch.zeros(MIB, dtype=torch.uint8, device=machine.torch_device)
    assert states() == {"default": "active"}
    tensor.fill_(7)
    allocator.sleep()  # the default tag is what is kept when none is named
    allocator.wake_up()
    assert_same(tensor, torch.full((MIB,), 7, dtype=torch.uint8))


def test_level_1_keeps_the_weights_and_gives_everything_away(engine, machine):
    free_awake = machine.free()
    engine.allocator.sleep(offload_tags=("weights", "runtime"))
    assert machine.free() >= free_awake + WEIGHTS + CACHE
    assert not any(machine.is_any_mapped(tensor) for tensor in engine.tensors.values())
    assert engine.allocator._pool("kv_cache").status().host_bytes == 0  # nothing is copied only to be dropped
    engine.allocator.wake_up()
    assert {"weights", "runtime"} <= engine.kept(1)
    engine.cache.fill_(1)


def test_level_2_takes_no_host_memory(engine):
    addresses = {tag: tensor.data_ptr() for tag, tensor in engine.tensors.items()}
    engine.allocator.sleep(offload_tags=())
    assert sum(status.host_bytes for status in fp.status()) == 0
    engine.allocator.wake_up()
    assert {tag: tensor.data_ptr() for tag, tensor in engine.tensors.items()} == addresses
    engine.fill(2)
    assert engine.kept(2) == set(engine.tensors)


def test_levels_may_change_from_sleep_to_sleep(engine):
    for seed, offload in enumerate([("weights",), (), ("weights", "runtime"), (), "weights"]):
        engine.fill(seed)
        engine.allocator.sleep(offload_tags=offload)
        engine.allocator.wake_up()
        assert {offload} if isinstance(offload, str) else set(offload) <= engine.kept(seed)


def test_waking_in_stages(engine, machine):
    engine.allocator.sleep(offload_tags=("weights",))
    engine.allocator.wake_up(tags=["weights"])
    assert states() == {"weights": "active", "runtime": "paused", "kv_cache": "paused"}
    assert is_same(engine.weights, pattern(WEIGHTS, 1))
    assert not machine.is_any_mapped(engine.cache)
    engine.allocator.wake_up(tags=["kv_cache"])
    assert states() == {"weights": "active", "runtime": "paused", "kv_cache": "active"}


def test_where_vllm_defers_only_some_tags_a_wake_up_brings_every_other_back(engine):
    CuMemAllocator.deferrable_tags = ("weights", "kv_cache")
    engine.allocator.sleep(offload_tags=("weights", "runtime"))
    engine.allocator.wake_up(tags=["weights"])
    assert states() == {"weights": "active", "runtime": "active", "kv_cache": "paused"}
    assert is_same(engine.weights, pattern(WEIGHTS, 1))
    assert is_same(engine.runtime, pattern(RUNTIME, 1))
    engine.allocator.wake_up(tags=["kv_cache"])
    assert states()["kv_cache"] == "active"


def test_discarding_one_tag_leaves_the_others_awake(engine, machine):
    engine.allocator.discard(("kv_cache",))
    assert states() == {"weights": "active", "runtime": "active", "kv_cache": "paused"}
    assert not machine.is_any_mapped(engine.cache)
    engine.allocator.sleep(offload_tags=("weights", "runtime"))
    engine.allocator.wake_up()
    assert {"weights", "runtime"} <= engine.kept(1)


def test_asleep_twice_keeps_what_the_first_kept_and_says_so(engine, caplog):
    engine.allocator.sleep(offload_tags=("weights", "runtime"))
    with caplog.at_level(logging.WARNING, LOGGER):
        engine.allocator.sleep(offload_tags=("kv_cache",))
    warned = " ".join(caplog.messages)
    assert "'weights' is asleep already, its contents kept" in warned
    assert "'kv_cache' is asleep already, its contents discarded" in warned
    engine.allocator.wake_up()
    assert {"weights", "runtime"} <= engine.kept(1)


def test_tags_without_memory_and_tags_twice_are_no_error(engine):
    engine.allocator.sleep(offload_tags=("weights", "weights", "lora"))
    engine.allocator.discard("lora")
    engine.allocator.wake_up(tags=["lora"])
    engine.allocator.wake_up(tags=["weights", "weights"])
    assert is_same(engine.weights, pattern(WEIGHTS, 1))
    engine.allocator.wake_up()
    engine.allocator.wake_up()  # never slept


@pytest.mark.parametrize("tags", [7, ("weights", 7), [None], b"weights"])
def test_what_is_no_tag_is_refused(engine, tags):
    for call in (engine.allocator.sleep, engine.allocator.discard, engine.allocator.wake_up):
        with pytest.raises(TypeError, match="tags"):
            call(tags)
    assert set(states().values()) == {"active"}


def test_a_pool_is_not_entered_while_its_tag_sleeps(engine):
    engine.allocator.sleep(offload_tags=())
    with (
        pytest.raises(fp.PoolPausedError, match="vllm:weights"),
        engine.allocator.use_memory_pool("weights"),
    ):
        pytest.fail("entered")


def test_a_wake_up_without_memory_leaves_everything_asleep_and_can_be_made_again(host, monkeypatch):
    monkeypatch.setenv("FENCEPOOL_DEVICE", "cpu")
    monkeypatch.setenv("FENCEPOOL_VLLM_WAIT", "0")
    engine = Engine(CuMemAllocator(), "cpu")
    engine.allocator.sleep(offload_tags=("weights", "runtime"))
    fp.host_driver.configure(memory_limit=2 * MIB)
    with pytest.raises(fp.OutOfMemoryError, match="still paused"):
        engine.allocator.wake_up()
    assert set(states().values()) == {"paused"}
    fp.host_driver.configure(memory_limit=0)
    engine.allocator.wake_up()
    assert {"weights", "runtime"} <= engine.kept(1)
    engine.allocator.release_pools()


def test_current_usage_counts_what_is_allocated_asleep_or_awake(engine):
    awake = engine.allocator.get_current_usage()
    assert awake >= WEIGHTS + CACHE + 2 * RUNTIME
    engine.allocator.sleep(offload_tags=())
    assert engine.allocator.get_current_usage() == awake
    engine.allocator.wake_up()


def test_an_engine_that_is_gone_leaves_no_usage(allocator, machine):
    for _ in range(2):
        engine = Engine(allocator, machine.torch_device)
        allocator.sleep(offload_tags=("weights",))
        del engine
        gc.collect()
        allocator.release_pools()
        assert allocator.get_current_usage() == 0
        assert states() == {}


def test_releasing_pools_leaves_tensors_that_live(engine):
    engine.allocator.release_pools()
    assert engine.kept(1) == set(engine.tensors)
    engine.allocator.sleep(offload_tags=("weights",))
    engine.allocator.close()
    engine.allocator.wake_up()
    assert "weights" in engine.kept(1)


def test_a_trainers_pools_of_the_same_names_are_left_alone(engine, machine):
    trainer = fp.pool("weights", machine.device, backup="host")
    tensor = trainer.empty((MIB,), dtype=torch.uint8).fill_(3)
    engine.allocator.sleep(offload_tags=())
    assert trainer.state == "active"
    assert tensor.eq(3).all()
    engine.allocator.wake_up()


@pytest.mark.parametrize(("value", "is_kept"), [("1", True), ("0", False)])
def test_the_host_memory_is_kept_while_awake_as_the_environment_says(
    machine, allocator, monkeypatch, value, is_kept
):
    monkeypatch.setenv("FENCEPOOL_VLLM_RETAIN", value)
    engine = Engine(allocator, machine.torch_device)
    engine.allocator.sleep(offload_tags=("weights",))
    engine.allocator.wake_up()
    assert (sum(status.host_bytes for status in fp.status()) > 0) == is_kept
    assert "weights" in engine.kept(1)


@pytest.mark.parametrize("value", ["-1", "soon", "nan"])
def test_a_wait_that_is_no_time_is_refused(engine, monkeypatch, value):
    monkeypatch.setenv("FENCEPOOL_VLLM_WAIT", value)
    engine.allocator.sleep(offload_tags=("weights",))
    with pytest.raises(ValueError, match="FENCEPOOL_VLLM_WAIT"):
        engine.allocator.wake_up()
    monkeypatch.setenv("FENCEPOOL_VLLM_WAIT", "0")
    engine.allocator.wake_up()
    assert "weights" in engine.kept(1)


def test_a_retain_that_is_no_choice_is_refused(allocator, monkeypatch):
    monkeypatch.setenv("FENCEPOOL_VLLM_RETAIN", "yes")
    with pytest.raises(ValueError, match="FENCEPOOL_VLLM_RETAIN"), allocator.use_memory_pool():
        pytest.fail("entered")


def test_there_are_no_graph_captures_without_a_gpu(host, monkeypatch):
    monkeypatch.setenv("FENCEPOOL_DEVICE", "cpu")
    allocator = CuMemAllocator()
    with pytest.raises(ValueError, match="captured on a GPU"), allocator.cudagraph_pool():
        pytest.fail("entered")


def test_a_read_of_a_sleeping_cache_faults():
    done = children.run(
        """
        import torch
        from fencepool.integrations.vllm import CuMemAllocator
        allocator = CuMemAllocator.get_instance()
        with allocator.use_memory_pool("kv_cache"):
            cache = torch.ones(1 << 20)
        allocator.sleep(offload_tags=("weights",))
        print("asleep", flush=True)
        cache.sum().item()
        print("read")
        """,
        FENCEPOOL_DEVICE="cpu",
    )
    assert done.stdout == "asleep\n"
    assert done.returncode == -11


@pytest.mark.gpu
def test_graphs_captured_into_the_graph_pool_replay_after_a_sleep(monkeypatch):
    from support.machine import Machine, warm_up_gpu

    warm_up_gpu("cuda:0")
    machine = Machine("cuda:0")
    monkeypatch.setenv("FENCEPOOL_DEVICE", "cuda:0")
    allocator = CuMemAllocator()
    source = torch.zeros(MIB, device="cuda:0")
    (source * 2 + 1).sum()  # kernels are loaded before the capture
    torch.cuda.synchronize()
    graphs, results = [], []
    for factor in (2, 3):
        graphs.append(torch.cuda.CUDAGraph())
        with allocator.cudagraph_pool() as memory, torch.cuda.graph(graphs[-1], pool=memory):
            results.append(source * factor + 1)
    owner = allocator._pool("cudagraph")
    assert all(owner.contains(result) for result in results)
    for value in (5.0, 7.0):
        allocator.sleep(offload_tags=("cudagraph",))
        assert not any(machine.is_any_mapped(result) for result in results)
        allocator.wake_up()
        source.fill_(value)
        for graph, result, factor in zip(graphs, results, (2, 3), strict=True):
            graph.replay()
            assert result.eq(value * factor + 1).all()
    machine.close()
    for graph in graphs:
        graph.reset()
    del graphs, results, graph, result
    gc.collect()
    allocator.release_pools()
    assert allocator.get_current_usage() == 0


# --- the plug-in ------------------------------------------------------------------------------------


class Theirs:
    """A class with the surface of vLLM's, which must not be used."""

    instance = None
    default_tag = "default"

    @staticmethod
    def get_instance() -> Theirs:
        raise AssertionError("vLLM's own allocator was used")

    def sleep(self, offload_tags=None): ...

    def wake_up(self, tags=None): ...

    @contextmanager
    def use_memory_pool(self, tag=None):
        yield

    def get_current_usage(self): ...

    def _python_malloc_callback(self, allocation_handle): ...


@pytest.fixture
def vllm(monkeypatch) -> types.SimpleNamespace:
    """Modules as vLLM's are named, with a class of their own for each test."""
    theirs = type("CuMemAllocator", (), dict(vars(Theirs)))
    package = types.ModuleType("vllm")
    package.__version__ = "9.8.7"
    package.device_allocator = types.ModuleType("vllm.device_allocator")
    module = types.ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator, module.cumem_available = theirs, False
    package.device_allocator.cumem = module
    for one in (package, package.device_allocator, module):
        one.__path__ = []
        monkeypatch.setitem(sys.modules, one.__name__, one)
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    monkeypatch.setattr(CuMemAllocator, "deferrable_tags", None)
    monkeypatch.setenv("FENCEPOOL_DEVICE", "cpu")
    return types.SimpleNamespace(theirs=theirs, package=package, module=module)


def test_installing_puts_our_allocator_in_place_for_old_and_new_imports(vllm, caplog):
    vllm.package.device_allocator.DEFERRABLE_TAGS = ("weights",)
    with caplog.at_level(logging.INFO, LOGGER):
        integration.register()
        integration.register()  # vLLM loads plug-ins more than once
    assert vllm.module.CuMemAllocator is CuMemAllocator
    assert vllm.module.cumem_available
    assert isinstance(vllm.theirs.get_instance(), CuMemAllocator)
    assert CuMemAllocator.deferrable_tags == ("weights",)
    installed, warned = caplog.messages  # once
    assert "sleep mode of vLLM 9.8.7" in installed
    assert "GPU memory is not given away" in warned


def renamed(theirs: type) -> None:
    del theirs.wake_up


def grown(theirs: type) -> None:
    theirs.hibernate = lambda self: None


def with_another_argument(theirs: type) -> None:
    theirs.sleep = lambda self, offload_tags=None, to_disk=False: None


def with_another_default(theirs: type) -> None:
    theirs.default_tag = "other"


def made(theirs: type) -> None:
    theirs.instance = theirs()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (renamed, "wake_up is missing"),
        (grown, "hibernate is new"),
        (with_another_argument, "to_disk"),
        (with_another_default, "default_tag is 'other'"),
        (made, "has made its allocator already"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_allocator_that_is_not_known_is_left_alone_and_said(vllm, caplog, change, why):
    change(vllm.theirs)
    with pytest.raises(UnsupportedVllmError, match=why):
        integration.install()
    with caplog.at_level(logging.WARNING, LOGGER):
        integration.register()
    assert why in caplog.text
    assert "vLLM keeps its own allocator" in caplog.text
    assert vllm.module.CuMemAllocator is vllm.theirs
    assert not vllm.module.cumem_available


def test_a_vllm_without_the_class_is_left_alone(vllm):
    del vllm.module.CuMemAllocator
    with pytest.raises(UnsupportedVllmError, match="no CuMemAllocator"):
        integration.install()


def test_a_vllm_whose_module_cannot_be_imported_is_left_alone(vllm, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", None)
    with caplog.at_level(logging.WARNING, LOGGER):
        integration.register()
    assert "cannot be imported here" in caplog.text


def test_without_a_gpu_and_without_the_embedded_driver_vllm_is_left_alone(vllm, monkeypatch, caplog):
    monkeypatch.delenv("FENCEPOOL_DEVICE")
    monkeypatch.setattr(torch.version, "cuda", None)
    with caplog.at_level(logging.WARNING, LOGGER):
        integration.register()
    assert "not built for CUDA" in caplog.text
    assert vllm.module.CuMemAllocator is vllm.theirs


@pytest.mark.parametrize(
    ("name", "value"),
    [("FENCEPOOL_DEVICE", "tpu"), ("FENCEPOOL_VLLM_WAIT", "soon"), ("FENCEPOOL_VLLM_RETAIN", "yes")],
)
def test_a_setting_that_cannot_be_used_is_said_before_an_engine_is_built(
    vllm, monkeypatch, caplog, name, value
):
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, LOGGER):
        integration.register()
    assert repr(value) in caplog.text
    assert "vLLM keeps its own allocator" in caplog.text
    assert vllm.module.CuMemAllocator is vllm.theirs


def test_the_plug_in_calls_no_driver_so_that_workers_may_be_forked():
    children.run_silently(
        """
        import contextlib, logging, types
        logging.disable()
        class Theirs:
            instance, default_tag = None, "default"
            @staticmethod
            def get_instance(): ...
            def sleep(self, offload_tags=None): ...
            def wake_up(self, tags=None): ...
            @contextlib.contextmanager
            def use_memory_pool(self, tag=None): yield
            def get_current_usage(self): ...
        for name in ("vllm", "vllm.device_allocator", "vllm.device_allocator.cumem"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["vllm.device_allocator.cumem"].CuMemAllocator = Theirs
        from fencepool.integrations import vllm
        vllm.install()
        child = os.fork()
        if child == 0:
            import torch
            allocator = vllm.CuMemAllocator.get_instance()
            with allocator.use_memory_pool("weights"):
                tensor = torch.ones(1000)
            allocator.sleep(("weights",))
            allocator.wake_up()
            os._exit(0 if tensor.eq(1).all() else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        FENCEPOOL_DEVICE="cpu",
    )


def test_importing_the_integration_imports_neither_vllm_nor_pytorch():
    children.run_silently(
        """
        import fencepool.integrations.vllm
        assert not {"vllm", "torch"} & set(sys.modules)
        """
    )


def test_the_entry_point_leads_to_the_plug_in():
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split('[project.entry-points."vllm.general_plugins"]\n')[1].splitlines()
    assert section[0] == 'fencepool = "fencepool.integrations.vllm:register"'
