"""Pausing and resuming on all ranks of a process group, or on none.

>>> import fencepool.distributed as fpd
>>> fpd.pause("kv_cache", "weights", group=tensor_parallel_group)  # doctest: +SKIP
>>> fpd.resume("weights", group=tensor_parallel_group, wait=30)  # doctest: +SKIP
"""

from fencepool.distributed.transitions import pause, resume
from fencepool.errors import RankError

__all__ = ["RankError", "pause", "resume"]
