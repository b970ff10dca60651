"""Runs clang-tidy over the project's translation units, as many at a time as there are cores.

Usage: tidy.py BUILD_DIR [--checks=LIST] [FILE...]; BUILD_DIR has compile_commands.json, LIST is added to what
.clang-tidy says. Fails if any file does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CLANG_TIDY = Path(sys.executable).with_name("clang-tidy")


def check(build: Path, options: list[str], source: Path) -> tuple[Path, int, str]:
    """One file's exit status and findings."""
    command = [CLANG_TIDY, "--quiet", f"-p={build}", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # stderr counts suppressed warnings of system headers; it matters only when the run itself fails.
    return source, done.returncode, done.stdout + (done.stderr if done.returncode else "")


def main() -> int:
    """The exit status: 0 when every file is clean."""
    build = Path(sys.argv[1])
    options = [argument for argument in sys.argv[2:] if argument.startswith("--")]
    chosen = {Path(name).resolve() for name in sys.argv[2:] if name not in options}
    units = [Path(unit["file"]) for unit in json.loads((build / "compile_commands.json").read_text())]
    units = sorted(unit for unit in units if not chosen or unit in chosen)
    failed = 0
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as executor:
        for source, status, output in executor.map(lambda unit: check(build, options, unit), units):
            if status:
                failed += 1
                print(f"{source}:\n{output}", file=sys.stderr)
    print(f"clang-tidy: {len(units)} files, {failed} with findings")
    return 1 if failed or not units else 0


if __name__ == "__main__":
    sys.exit(main())
