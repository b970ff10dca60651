"""Ranks of a torch.distributed process group, each a process of its own with two pools."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import children


@dataclass(frozen=True)
class Setting:
    """What the ranks run on."""

    backend: str = "gloo"
    kind: str = "cpu"  # the embedded driver; or "cuda", a GPU for each rank
    size: int = 1 << 20  # bytes, of each rank's weights


PRELUDE = """
import json, os, signal, sys, time
import torch, torch.distributed as dist
import fencepool as fp
import fencepool.distributed as fpd
from fencepool import _core

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
IS_CUDA, BYTES = os.environ["KIND"] == "cuda", int(os.environ["BYTES"])
DEVICE = f"cuda:{rank}" if IS_CUDA else "cpu"
if IS_CUDA:
    torch.cuda.set_device(rank)
dist.init_process_group(os.environ["BACKEND"], init_method=os.environ["INIT"], rank=rank, world_size=size)
weights = fp.pool("weights", DEVICE, backup="host")
cache = fp.pool("kv_cache", DEVICE, fill="zero")
tensor = weights.empty((BYTES,), dtype=torch.uint8)
tensor.fill_(rank + 1)
keys = cache.empty((1 << 20,), dtype=torch.uint8)
keys.fill_(7)

def say(**facts):
    print("SAID " + json.dumps({"rank": rank, **facts}), flush=True)

def states():
    return {"weights": weights.state, "cache": cache.state}

def attempt(call, *args, **kwargs):
    began = time.monotonic()
    try:
        call(*args, **kwargs)
        return {"error": "", "ranks": {}, "seconds": time.monotonic() - began}
    except fp.RankError as error:
        return {
            "error": str(error),
            "ranks": error.ranks,
            "cause": type(error.__cause__).__name__,
            "notes": getattr(error, "__notes__", []),
            "seconds": time.monotonic() - began,
        }

def die_before(module, name, when=1):
    original, calls = getattr(module, name), []
    def dying(*args, **kwargs):
        calls.append(1)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(module, name, dying)
"""


def run(
    tmp_path: Path, program: str, ranks: int = 4, setting: Setting | None = None
) -> tuple[dict[int, list[dict[str, Any]]], list[int]]:
    """What each rank said, by rank; and each process's exit status."""
    setting = setting or Setting()
    environment = children.environment(
        WORLD_SIZE=str(ranks),
        INIT=f"file://{tmp_path}/store",
        BACKEND=setting.backend,
        KIND=setting.kind,
        BYTES=str(setting.size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NVLS_ENABLE="0",  # multicast needs a fabric manager, which a container may not reach
        NCCL_DEBUG="WARN",
    )
    code = PRELUDE + textwrap.dedent(program) + "\nsys.stdout.flush(); os._exit(0)\n"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said: dict[int, list[dict[str, Any]]] = {}
    statuses = []
    try:
        for rank, process in enumerate(processes):
            output, errors = process.communicate(timeout=100)
            statuses.append(process.returncode)
            lines = [line.removeprefix("SAID ") for line in output.splitlines() if line.startswith("SAID ")]
            said[rank] = [json.loads(line) for line in lines]
            assert process.returncode in (0, -signal.SIGKILL), errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return said, statuses
