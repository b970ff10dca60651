"""What the system says this process uses."""

from __future__ import annotations

import re
from pathlib import Path


def process_memory() -> int:
    """Resident bytes of this process, its own and shared ones; 0 where the system does not say.

    From /proc/self/smaps_rollup, which is exact; /proc/self/status, where that is missing, may lag behind by
    some pages a thread (docs.kernel.org, filesystems/proc).
    """
    for path, key in (("/proc/self/smaps_rollup", "Rss"), ("/proc/self/status", "VmRSS")):
        try:
            text = Path(path).read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    return 0
