"""Python files of real vLLM releases, from their source distributions, without what it takes to run them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The worker that asks for CuMemAllocator itself; the one that asks for its platform's allocator; the one with
# sleep-mode backends, selective discard and a pool for CUDA graphs.
RELEASES = ("0.11.2", "0.24.0", "0.33.0")
# What vLLM's plug-in loader and its allocator import, beside PyTorch and psutil.
_IMPORTED = ("regex", "cbor2")
# What vLLM's setup.py imports: pip asks it for the release's metadata before it keeps a source distribution.
_SETUP = ("setuptools-scm", "setuptools-rust")


class UnavailableError(Exception):
    """The sources are not here and could not be fetched; the message has the end of what pip said."""


def sources(release: str) -> list[Path]:
    """Folders to put on the module path: vLLM's own and that of the few packages it imports.

    ``FENCEPOOL_VLLM_SOURCES`` names a folder that has them; else they are fetched once, into build/vllm.
    """
    base = Path(os.environ.get("FENCEPOOL_VLLM_SOURCES") or ROOT / "build" / "vllm")
    tree, modules = base / f"vllm-{release}", base / "modules"
    base.mkdir(parents=True, exist_ok=True)
    with _locked(base / "lock"):  # tests run side by side
        if not modules.exists():
            with tempfile.TemporaryDirectory(dir=base) as scratch:
                _pip("install", "--no-deps", "--target", f"{scratch}/modules", *_IMPORTED)
                (Path(scratch) / "modules").rename(modules)
        if not tree.exists():
            with tempfile.TemporaryDirectory(dir=base) as scratch:
                _fetch(release, Path(scratch))
                (Path(scratch) / f"vllm-{release}").rename(tree)
    return [tree, modules]


def _fetch(release: str, scratch: Path) -> None:
    setup = str(scratch / "setup")
    _pip("install", "--target", setup, *_SETUP)
    _pip(
        *("download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation"),
        *("--dest", str(scratch), f"vllm=={release}"),
        PYTHONPATH=setup,
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=release,
    )
    with tarfile.open(scratch / f"vllm-{release}.tar.gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".py") and "/vllm/" in member.name:
                archive.extract(member, scratch, filter="data")


def _pip(*arguments: str, **changes: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    if done.returncode != 0:
        raise UnavailableError(f"pip {arguments[0]} failed: {done.stderr.strip()[-400:]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
