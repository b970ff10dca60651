"""A plug-in of the tests: lets them look into a scheduler's process, and make its memory scarce.

``engine.collective_rpc(name, **arguments)`` calls a method of the scheduler on every rank.
"""

import json
import os
import threading
from pathlib import Path

import torch

import fencepool as fp


def register():
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.probe_report = report
    Scheduler.probe_limit = limit
    Scheduler.probe_write = write


def report(self, folder):
    """Write what the pools and the process say, one file for each rank."""
    resident = Path("/proc/self/smaps_rollup").read_text()
    said = {
        "pools": [
            {
                "tag": status.tag,
                "backup": status.backup,
                "state": status.state,
                "segments": status.segments,
                "mapped": status.bytes_mapped,
                "used": status.bytes_used,
            }
            for status in fp.status()
        ],
        "resident": 1024 * int(resident.split("Rss:")[1].split()[0]),
    }
    target = Path(folder, f"{os.getpid()}.json")
    target.with_suffix(".part").write_text(json.dumps(said))
    target.with_suffix(".part").rename(target)


def limit(self, size, lift_after=None, rank=None):
    """Limit the emulated device's memory to so many bytes; 0 lifts the limit. On one rank, or on all."""
    if rank is not None and getattr(self, "tp_rank", 0) != rank:
        return
    fp.host_driver.configure(memory_limit=size)
    if lift_after is not None:
        threading.Timer(lift_after, lambda: fp.host_driver.configure(memory_limit=0)).start()


def write(self):
    """Write every parameter of the model."""
    worker = getattr(self.tp_worker, "worker", self.tp_worker)
    with torch.no_grad():
        for parameter in worker.model_runner.model.parameters():
            parameter.fill_(0.5)
