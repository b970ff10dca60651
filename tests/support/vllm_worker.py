"""A program: vLLM's own plug-in loader and worker code, on pools of the embedded driver.

The functions of `Worker` that touch the allocator are taken from vLLM's file as they are and run on a small
model. What they need of the rest of vLLM is stood in for by name: a name that is not known here fails.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import logging
import os
import time
from fnmatch import filter as fnmatch_filter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import fencepool as fp

TAKEN = {
    "load_model",
    "initialize_from_config",
    "sleep",
    "wake_up",
    "discard",
    "shutdown",
    "sleep_mode_backend",
    "_maybe_get_memory_pool_context",
    "_get_sleep_parameters",
    "_save_sleep_parameters",
    "_restore_sleep_parameters",
}


class Cuda:
    """The platform as vLLM's code asks for it."""

    device_type = "cuda"

    def is_cuda_alike(self) -> bool:
        return True

    def is_cuda(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_cpu = is_pin_memory_available = is_rocm


class Torch:
    """PyTorch, where the machine's accelerator is the embedded driver's device."""

    def __init__(self) -> None:
        memory = SimpleNamespace(
            mem_get_info=memory_info, get_memory_info=memory_info, synchronize=lambda: None
        )
        self.cuda = self.accelerator = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def memory_info() -> tuple[int, int]:
    return fp.memory_info("cpu")


def worker_class(source: Path, names: dict[str, Any]) -> type:
    """The Worker of that file, of the functions above only."""
    (found,) = [
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Worker"
    ]
    found.bases, found.keywords, found.decorator_list = [], [], []
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in TAKEN]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    program = ast.fix_missing_locations(ast.Module([future, found], []))
    exec(compile(program, str(source), "exec"), names)
    return names["Worker"]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
        self.register_buffer("scale", torch.rand(512))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.layer(given) * self.scale


class Runner:
    """What of a model runner allocates."""

    def load_model(self, **_: Any) -> None:
        self.model = Model()

    def get_model(self) -> Model:
        return self.model

    def initialize_kv_cache(self, config: Any, kv_cache_allocation_context: Any = None) -> None:
        self.table = torch.arange(1000)
        with kv_cache_allocation_context or contextlib.nullcontext():
            self.cache = torch.zeros(3 << 20, dtype=torch.uint8)

    def post_kv_cache_wake_up(self) -> None:
        self.cache.zero_()

    def shutdown(self) -> None:
        del self.model, self.table, self.cache

    def ensure_kv_transfer_shutdown(self) -> None:
        self.shutdown()


def names_of(module: Any) -> dict[str, Any]:
    """What the taken functions find as globals."""
    return {
        "contextlib": contextlib,
        "current_platform": Cuda(),
        "ensure_ec_transfer_shutdown": None,
        "ensure_kv_transfer_initialized": lambda *_: None,
        "ensure_kv_transfer_shutdown": None,
        "fnmatch_filter": fnmatch_filter,
        "format_gib": lambda size: f"{size / (1 << 30):.2f}",
        "gc": gc,
        "get_mem_allocator_instance": getattr(module, "get_mem_allocator_instance", None),
        "GiB_bytes": 1 << 30,
        "has_ec_transfer": lambda: False,
        "has_kv_transfer_group": lambda: False,
        "instrument": lambda **_: lambda function: function,
        "logger": logging.getLogger("vllm.worker"),
        "nullcontext": contextlib.nullcontext,
        "os": os,
        "set_current_vllm_config": lambda _: contextlib.nullcontext(),
        "set_torch_threads_for_runtime": lambda: None,
        "time": time,
        "torch": Torch(),
    }


def make_worker(kind: type) -> Any:
    """A worker with the attributes that the taken functions read."""
    model_config = SimpleNamespace(
        enable_sleep_mode=True,
        enable_cumem_allocator=True,
        sleep_mode_backend="cumem",
        enable_nccl_comm_suspend=False,
        sleep_preserve_parameter_names=(),
        enable_return_routed_experts=False,
    )
    worker = kind()
    vars(worker).update(
        model_config=model_config,
        vllm_config=SimpleNamespace(model_config=model_config, weight_transfer_config=None),
        cache_config=SimpleNamespace(),
        model_runner=Runner(),
        elastic_ep_executor=SimpleNamespace(shutdown=lambda: None),
        profiler=None,
        get_draft_model=lambda: None,
        synchronize_device=lambda: None,
        _scoped_allocator_max_split=lambda **_: contextlib.nullcontext(),
        _sleep_mode_backend=None,
        _sleep_saved_buffers={},
        _sleep_saved_parameters={},
        _sleep_saved_draft_buffers={},
    )
    return worker


def states() -> dict[str, str]:
    return {status.tag.removeprefix("vllm:"): status.state for status in fp.status()}


def cycles(worker: Any, is_new: bool) -> None:
    """Every level and every order of waking, with the model's answers compared."""
    runner = worker.model_runner
    given = torch.rand(4, 512)
    answer = runner.model(given).detach().clone()
    weights = {name: value.clone() for name, value in runner.model.named_parameters()}
    awake = memory_info()[0]
    tags = {"weights", "kv_cache"} | ({"runtime"} if is_new else set())
    assert set(states()) == tags, states()
    orders = [(None,), (["weights"], ["kv_cache"]), (["kv_cache"], ["weights"])]
    for level in (1, 2, 1):
        for order in orders:
            if level == 2 and order[0] == ["kv_cache"] and not is_new:
                continue  # these releases write buffers back after any wake-up: into weights that are asleep
            worker.sleep(level=level)
            assert set(states().values()) == {"paused"}, states()
            assert memory_info()[0] >= awake + (4 << 20)
            for tags_woken in order:
                worker.wake_up(tags_woken)
            assert set(states().values()) == {"active"}, states()
            assert memory_info()[0] == awake
            if level == 2:
                with torch.no_grad():
                    for name, value in runner.model.named_parameters():
                        value.copy_(weights[name])
            assert torch.equal(runner.model(given), answer)
            if is_new:
                assert torch.equal(runner.table, torch.arange(1000))
            runner.cache.fill_(1)
    if is_new:
        worker.discard(("kv_cache",))
        assert states() == {"weights": "active", "runtime": "active", "kv_cache": "paused"}
        worker.wake_up(["kv_cache"])
        assert torch.equal(runner.model(given), answer)


def main() -> None:
    import vllm.platforms

    vllm.platforms.current_platform = Cuda()  # before its other modules take it by name
    from vllm.plugins import load_general_plugins

    load_general_plugins()

    import vllm.device_allocator
    from vllm.device_allocator.cumem import CuMemAllocator, cumem_available

    assert CuMemAllocator.__module__.startswith("fencepool."), CuMemAllocator
    assert cumem_available
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations or []
    source = Path(folder) / "v1" / "worker" / "gpu_worker.py"
    kind = worker_class(source, names_of(vllm.device_allocator))
    is_new = hasattr(kind, "discard")
    for _ in range(2):  # an engine, and another after it in the same process
        worker = make_worker(kind)
        worker.load_model()
        worker.initialize_from_config(
            SimpleNamespace(
                num_blocks=8,
                kv_cache_layout=None,
                hash_block_size=16,
                cache_hit_alignment_tokens=16,
                needs_kv_cache_zeroing=False,
            )
        )
        cycles(worker, is_new)
        worker.shutdown()
        gc.collect()
        assert CuMemAllocator.get_instance().get_current_usage() == 0
    print(f"vLLM {vllm.__version__}: {' '.join(sorted(set(vars(kind)) & TAKEN))}")


if __name__ == "__main__":
    main()
