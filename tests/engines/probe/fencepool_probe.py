"""A plug-in of the tests: lets them look into a scheduler's process, and make trouble there.

``engine.collective_rpc(name, **arguments)`` calls a method of the scheduler on every rank.
"""

import hashlib
import json
import os
import threading
from pathlib import Path

import torch

import fencepool as fp
from fencepool.integrations.sglang import occupation, versions

_imported = {}
_cleared = []
_refusals = []
_wait_for_restore = occupation.wait_for_restore


def register():
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method in (report, limit, write, slow_restore, refuse_to_pause):
        setattr(Scheduler, f"probe_{method.__name__}", method)
    place = versions.layout().static_state.replace(":", ".")
    HookRegistry.register(place, note_import, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.process_input_requests", note_clears, HookType.BEFORE
    )


def note_import(result, model, static_params):
    """Right after ``_import_static_state``: what the model's memory holds now."""
    _imported["digest"] = digest(model)


def note_clears(scheduler, requests):
    """Count how often the cache's memory pool is cleared, by SGLang's own code inside flush_cache."""
    allocator = scheduler.token_to_kv_pool_allocator
    if not hasattr(allocator, "probe_clear"):
        allocator.probe_clear = allocator.clear
        allocator.clear = lambda: (_cleared.append(_cache_state()), allocator.probe_clear())[1]


def _cache_state():
    return {status.state for status in fp.status() if status.tag == "kv_cache"}.pop()


def report(self, folder):
    """Write what the pools, the process and the model say, one file for each rank."""
    resident = Path("/proc/self/smaps_rollup").read_text()
    pools = [
        {
            "tag": status.tag,
            "backup": status.backup,
            "state": status.state,
            "segments": status.segments,
            "mapped": status.bytes_mapped,
            "used": status.bytes_used,
        }
        for status in fp.status()
    ]
    is_there = all(pool["state"] == "active" for pool in pools)
    said = {
        "pools": pools,
        "resident": 1024 * int(resident.split("Rss:")[1].split()[0]),
        "digest": digest(_model(self)) if is_there else None,
        "cleared_while": list(_cleared),
        "digest_after_import": _imported.get("digest"),
    }
    target = Path(folder, f"{torch.distributed.get_rank()}-{os.getpid()}.json")
    target.with_suffix(".part").write_text(json.dumps(said))
    target.with_suffix(".part").rename(target)


def limit(self, size, lift_after=None, rank=None):
    """Limit the emulated device's memory to so many bytes; 0 lifts the limit. On one rank, or on all."""
    if rank is not None and torch.distributed.get_rank() != rank:
        return
    fp.host_driver.configure(memory_limit=size)
    if lift_after is not None:
        threading.Timer(lift_after, lambda: fp.host_driver.configure(memory_limit=0)).start()


def write(self):
    """Write every parameter of the model."""
    with torch.no_grad():
        for parameter in _model(self).parameters():
            parameter.fill_(0.5)


def slow_restore(self, bandwidth, is_fenced):
    """Restores as a GPU's: behind the host's back, at so many bytes per second. 0 sets all back."""
    fp.host_driver.configure(bandwidth=bandwidth, host_waits=not bandwidth)
    occupation.wait_for_restore = _wait_for_restore if is_fenced else lambda: None
    if not bandwidth:
        _wait_for_restore()


def refuse_to_pause(self, rank=None):
    """Have a callback of the weights refuse the next pauses, on one rank or on every one ("all")."""
    while _refusals:
        _refusals.pop().remove()
    if rank not in (torch.distributed.get_rank(), "all"):
        return
    for status in fp.status():
        if status.tag == "weights":
            pool = fp.pool(status.tag, status.device, backup=status.backup)
            _refusals.append(pool.on_pause(_refuse))


def _refuse(pool):
    raise RuntimeError("the test refuses")


def digest(model):
    """Of every parameter and buffer, as they are this moment."""
    found = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors):
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _model(scheduler):
    worker = getattr(scheduler.tp_worker, "worker", scheduler.tp_worker)
    return worker.model_runner.model
