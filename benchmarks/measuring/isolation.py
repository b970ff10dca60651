"""Runs one system in a process of its own, so that none can spoil, or end, another's measurement."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring import figures
from measuring.cycles import Plan
from measuring.devices import is_emulated
from systems import TORCH_MEMORY_SAVER, Entry

_BENCHMARKS = Path(__file__).resolve().parent.parent
# How much of a failed child's last output goes into the results, in lines.
_TAIL = 6


def why_not_run(entry: Entry, device: str) -> str:
    """Why a system cannot run here; empty when it can."""
    if entry.needs_gpu and is_emulated(device):
        return "needs a GPU"
    if entry.package and importlib.util.find_spec(entry.package) is None:
        return f"{entry.package} is not installed"
    return ""


def head(document: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """What every system's result begins with."""
    return {
        "id": entry.id,
        "system": entry.system,
        "variant": entry.variant,
        "title": entry.title,
        "kind": document["kind"],
    }


def result_of(document: dict[str, Any], entry: Entry, change: float, is_broken: bool) -> dict[str, Any]:
    """One system's result as the document's device, layout, cycles and hold say, or why it was not run."""
    reason = why_not_run(entry, document["device"])
    if reason:
        return {**head(document, entry), "status": "not run", "reason": reason}
    plan = Plan(
        variant=entry.variant.partition(",")[0],  # behind a comma stands how it is run
        device=document["device"],
        layout=document["layout"]["name"],
        cycles=min(document["cycles"], entry.most_cycles or document["cycles"]),
        hold=document["hold_seconds"],
        change=change,
        is_broken=is_broken,
    )
    result = {**head(document, entry), **measure(entry, plan)}
    if figures.has_cycles(result):
        result["summary"] = figures.summary(result)
    return result


def measure(entry: Entry, plan: Plan) -> dict[str, Any]:
    """One system's result; a failure of any kind is a result with the status "failed" and a reason."""
    start = time.perf_counter()
    try:
        with _environment(entry) as environment:
            outcome = _run(entry, plan, environment)
    except Exception as error:  # another system's results must survive it
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**outcome, "wall_seconds": time.perf_counter() - start}


def _environment(entry: Entry) -> contextlib.AbstractContextManager[dict[str, str]]:
    if entry.system == TORCH_MEMORY_SAVER:
        from systems.torch_memory_saver_system import child_environment

        return child_environment()
    return contextlib.nullcontext(dict(os.environ))


def _run(entry: Entry, plan: Plan, environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="resume-latency-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "output.txt")
        command = [
            sys.executable,
            "-m",
            "measuring.one_system",
            entry.module,
            json.dumps(asdict(plan)),
            str(result),
        ]
        path = [str(_BENCHMARKS), environment.get("PYTHONPATH", "")]
        environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        with log.open("wb") as output:
            try:
                status = subprocess.run(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=entry.timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return _failed(f"did not end within {entry.timeout:.0f} s", log)
        if not result.exists():
            return _failed(f"the process ended with status {status} and without a result", log)
        outcome: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        if outcome["status"] != "ok":
            return _failed(outcome["reason"], log)
        if status != 0:
            # It measured and checked everything, then died on its way out: the figures stand.
            note = f"the process ended with status {status}, after its measurement"
            outcome["notes"] = [*outcome.get("notes", []), note]
        return outcome


def _failed(reason: str, log: Path) -> dict[str, Any]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return {"status": "failed", "reason": reason, "output": lines[-_TAIL:]}
