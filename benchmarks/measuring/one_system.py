"""A child process of the benchmark: measures one system, writes the result to a file.

Usage: python -m measuring.one_system MODULE PLAN RESULT, where PLAN is JSON and RESULT a path.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from measuring.cycles import Plan


def main(module: str, plan: str, result: str) -> int:
    try:
        outcome: dict[str, Any] = importlib.import_module(module).run(Plan(**json.loads(plan)))
    except Exception as error:  # whatever it is, it belongs into the results
        traceback.print_exc()
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    else:
        outcome["status"] = "ok"
    Path(result).write_text(json.dumps(outcome), encoding="utf-8")
    return 0 if outcome["status"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
