"""What a disk does by itself: dd with direct I/O, several at a time, each on its part of one file."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_BLOCK = 8 << 20
_WORKERS = 8  # as many requests at a time as fencepool has under way


class NoDirectIo(Exception):  # noqa: N818 - it says what is not there
    """The file system refuses direct I/O, or there is no dd."""


def measure(folder: Path, nbytes: int, count: int) -> dict[str, Any]:
    """Seconds for writing and for reading at least `nbytes` in `folder`, `count` samples each.

    Raises:
        NoDirectIo: says why it cannot be measured.
    """
    blocks = max(1, nbytes // _BLOCK // _WORKERS)
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            _run(file.name, "write", blocks)  # the space is there, as a backup's is
            for _ in range(count):
                for way, taken in seconds.items():
                    start = time.perf_counter()
                    _run(file.name, way, blocks)
                    taken.append(time.perf_counter() - start)
    except OSError as error:
        raise NoDirectIo(str(error)) from None
    return {
        "tool": f"dd, direct I/O, {_WORKERS} at a time, {_BLOCK >> 20} MiB a request",
        "bytes": blocks * _BLOCK * _WORKERS,
        **{f"{way}_seconds": taken for way, taken in seconds.items()},
    }


def _run(name: str, way: str, blocks: int) -> None:
    commands = []
    for worker in range(_WORKERS):
        if way == "write":
            ends = ["if=/dev/zero", f"of={name}", f"seek={worker * blocks}", "oflag=direct", "conv=notrunc"]
        else:
            ends = [f"if={name}", "of=/dev/null", f"skip={worker * blocks}", "iflag=direct"]
        commands.append(["dd", *ends, f"bs={_BLOCK}", f"count={blocks}", "status=none"])
    children = [
        subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "LC_ALL": "C"})
        for command in commands
    ]
    said = [child.communicate()[1].decode().strip() for child in children]
    if any(child.returncode for child in children):
        raise NoDirectIo("; ".join(sorted(set(filter(None, said)))))
