"""Coverage-guided fuzzing (atheris) of whatever parses what others wrote: `make fuzz`.

    python tests/fuzz/parsers.py status_files -max_total_time=10

Arguments after the target's name are libFuzzer's. A finding is an exception that no caller expects; libFuzzer
then writes the input to a file, prints it and ends with another status than 0.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info < (3, 11):
    print("not fuzzed: atheris needs Python 3.11 or newer")
    sys.exit()

import atheris

with atheris.instrument_imports(include=["fencepool"]):
    from fencepool import _core, _devices, status_files, timeline
    from fencepool.integrations.sglang import settings as sglang_settings
    from fencepool.integrations.torch_memory_saver import _settings as saver_settings
    from fencepool.integrations.vllm import _settings as vllm_settings

_PROCESS = {
    "schema": status_files.SCHEMA,
    "pid": os.getpid(),
    "started": status_files.start_time(os.getpid()),
    "program": "engine",
    "written": 1.5,
    "last": "",
    "devices": [
        {
            "device": "cpu",
            "bus_id": "",
            "total": 1,
            "used": 1,
            "pools": [{"tag": "t", "device": "cpu", "state": "paused", "bytes_mapped": 0, "host_bytes": 1}],
            "torch": None,
        }
    ],
}
_TRACE = {
    "traceEvents": [
        {
            "ph": "X",
            "cat": "fencepool",
            "name": "pause",
            "pid": 1,
            "ts": 1,
            "dur": 2,
            "args": {"kind": "pause", "tags": ["t"], "transition": 1, "bytes": 3},
        },
        {"ph": "X", "cat": "phase", "name": "copy", "pid": 1, "ts": 1, "dur": 2, "args": {"transition": 1}},
        {"ph": "C", "name": timeline.POOLS, "pid": 1, "ts": 1, "args": {"t on cpu": 5}},
    ]
}


def sizes(data: bytes) -> None:
    """FENCEPOOL_HOST_BUDGET, and the strings of set_host_budget."""
    try:
        assert 0 <= _core.parse_bytes(_text(data), "a size") <= 1 << 62
    except (ValueError, TypeError):  # TypeError: not to be had in UTF-8
        return


def devices(data: bytes) -> None:
    """FENCEPOOL_DEVICE, and the names that every call takes."""
    try:
        name = _devices.parse_device(_text(data))
    except ValueError:
        return
    assert _devices.parse_device(str(name)) == name


def settings(data: bytes) -> None:
    """Each integration's variables hold the same text."""
    value = os.fsdecode(data.replace(b"\0", b""))
    calls: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("TMS_INIT_ENABLE", saver_settings.is_enabled_from_start),
        ("TMS_INIT_ENABLE_CPU_BACKUP", saver_settings.backup_from_start),
        ("TMS_INIT_CPU_BACKUP_BACKEND", saver_settings.backend_from_start),
        (sglang_settings.WAIT, sglang_settings.wait_seconds),
        (sglang_settings.IDLE, sglang_settings.idle_seconds),
        (sglang_settings.ANY_VERSION, sglang_settings.is_any_version),
        ("FENCEPOOL_VLLM_RETAIN", vllm_settings.is_retaining),
        ("FENCEPOOL_VLLM_WAIT", vllm_settings.wait),
    )
    for name, call in calls:
        os.environ[name] = value
        refusal = name
        try:
            call()
        except ValueError as error:
            refusal = str(error)
        finally:
            del os.environ[name]
        assert name in refusal


def status_file(data: bytes) -> None:
    """Files of other processes, as `fencepool residual` reads them: it passes over what is damaged."""
    name = f"{os.getpid()}.json"
    status_files.parse(name, data)
    status_files.parse(name, json.dumps(_mutated(_PROCESS, data)).encode())


def trace(data: bytes) -> None:
    """Recordings, as `fencepool trace` opens them."""
    whole = _mutated(_TRACE, data)
    try:
        timeline.parse(whole["traceEvents"] if isinstance(whole, dict) and "traceEvents" in whole else whole)
    except ValueError:
        return


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _mutated(whole: Any, data: bytes) -> Any:
    """The document with one value in it replaced or removed, or one more put in, as the input says."""
    provider = atheris.FuzzedDataProvider(data)
    made = json.loads(json.dumps(whole))
    for _ in range(provider.ConsumeIntInRange(0, 3)):
        here, parent, key = made, None, None
        # Without input left every choice is the lowest: deeper, and there the first.
        while isinstance(here, (dict, list)) and here and provider.ConsumeIntInRange(0, 5) < 5:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            parent, key = here, keys[provider.ConsumeIntInRange(0, len(keys) - 1)]
            here = parent[key]
        if parent is None:
            return _value(provider)
        if provider.ConsumeIntInRange(0, 4) == 0:
            del parent[key]
        else:
            parent[key] = _value(provider)
    return made


def _value(provider: Any) -> Any:
    return (
        lambda: None,
        provider.ConsumeBool,
        lambda: provider.ConsumeInt(40),
        lambda: provider.PickValueInList([10**400, float("inf"), float("nan"), -1, 1 << 63]),
        provider.ConsumeFloat,
        lambda: provider.ConsumeUnicodeNoSurrogates(8),
        lambda: [_value(provider)] if provider.remaining_bytes() else [],
        lambda: (
            {provider.ConsumeUnicodeNoSurrogates(4): _value(provider)} if provider.remaining_bytes() else {}
        ),
    )[provider.ConsumeIntInRange(0, 7)]()


TARGETS = {one.__name__: one for one in (sizes, devices, settings, status_file, trace)}


def main() -> None:
    """Run one target until libFuzzer's options end it."""
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: {sys.argv[0]} {'|'.join(TARGETS)} [libFuzzer option...]")
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
