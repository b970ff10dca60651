"""Prometheus metrics of the pools of this process. ``pip install 'fencepool[metrics]'`` brings the client.

>>> import fencepool.metrics
>>> fencepool.metrics.register()  # doctest: +SKIP

Gauges ``fencepool_pool_bytes{tag, device, backup, state, kind}`` and ``fencepool_pools{state}``; counters
``fencepool_transitions_total{kind}``, ``fencepool_transition_seconds_total{kind, phase}``,
``fencepool_bytes_copied_total{kind}``, ``fencepool_failures_total{kind, cause}`` and
``fencepool_problems_total``.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import fencepool as fp
from fencepool import _core, observing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

_KINDS = ("bytes_mapped", "bytes_reserved", "bytes_used", "bytes_backed_up", "host_bytes")


class PoolCollector(Collector):
    """Asks the pools when it is scraped, and counts transitions from when it was made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transitions: Counter[str] = Counter()
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._copied: Counter[str] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        observing.add(self._count)

    def close(self) -> None:
        """Count no longer."""
        observing.remove(self._count)

    def _count(self, seen: observing.Transition) -> None:
        with self._lock:
            if seen.error is not None:
                self._failures[seen.kind, type(seen.error).__name__] += 1
                return
            self._transitions[seen.kind] += 1
            self._copied[seen.kind] += seen.bytes_copied
            for phase, seconds in seen.seconds.items():
                self._seconds[seen.kind, phase] += seconds  # type: ignore[assignment]  # a Counter of seconds

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client``'s custom collectors. A forked child has no pools to tell of."""
        if _core.is_forked_child():
            return []
        return [*self._gauges(), *self._counters()]

    def _gauges(self) -> Iterable[Metric]:
        by_pool = GaugeMetricFamily(
            "fencepool_pool_bytes", "Bytes of pools", labels=("tag", "device", "backup", "state", "kind")
        )
        states: Counter[str] = Counter()
        totals: Counter[tuple[str, ...]] = Counter()  # two pools may differ in nothing that is a label
        for pool in fp.status():
            states[pool.state] += 1
            for kind in _KINDS:
                totals[pool.tag, pool.device, pool.backup, pool.state, kind] += getattr(pool, kind)
        for labels, value in totals.items():
            by_pool.add_metric(labels, value)
        pools = GaugeMetricFamily("fencepool_pools", "Number of pools", labels=("state",))
        for state, count in states.items():
            pools.add_metric((state,), count)
        return by_pool, pools

    def _counters(self) -> Iterable[Metric]:
        with self._lock:
            counted: list[tuple[str, str, tuple[str, ...], dict[Any, float]]] = [
                ("fencepool_transitions", "Pauses and resumes", ("kind",), dict(self._transitions)),
                ("fencepool_transition_seconds", "Seconds by phase", ("kind", "phase"), dict(self._seconds)),
                ("fencepool_bytes_copied", "Bytes copied to and from backups", ("kind",), dict(self._copied)),
                ("fencepool_failures", "Failed pauses and resumes", ("kind", "cause"), dict(self._failures)),
            ]
        for name, text, labels, values in counted:
            family = CounterMetricFamily(name, text, labels=labels)
            for key, value in values.items():
                family.add_metric((key,) if isinstance(key, str) else key, value)
            yield family
        problems = CounterMetricFamily("fencepool_problems", "Failures that could not be raised")
        problems.add_metric((), _core.problem_count())
        yield problems


def register(registry: CollectorRegistry = REGISTRY) -> PoolCollector:
    """Make a collector and register it.

    Raises:
        ValueError: the registry has one already.
    """
    collector = PoolCollector()
    try:
        registry.register(collector)
    except ValueError:
        collector.close()
        raise
    return collector
