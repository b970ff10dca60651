"""Prometheus metrics of the pools of this process. ``pip install 'fencepool[metrics]'`` brings the client.

>>> import fencepool.metrics
>>> fencepool.metrics.register()  # doctest: +SKIP

Gauges ``fencepool_pool_bytes{tag, device, backup, state, kind}``, ``fencepool_pools{state}`` and
``fencepool_device_bytes{device, kind}``; the histogram ``fencepool_transition_seconds{kind}``; counters
``fencepool_transitions_total{kind}``, ``fencepool_phase_seconds_total{kind, phase}``,
``fencepool_bytes_copied_total{kind}``, ``fencepool_failures_total{kind, cause}`` and
``fencepool_problems_total``. docs/observing.md says what each is.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

import fencepool as fp
from fencepool import _core, observing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

# Seconds: from a pool without backup to a first pause of all of a GPU, or a resume that waits for memory.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_KINDS = ("bytes_mapped", "bytes_reserved", "bytes_used", "bytes_backed_up", "host_bytes", "disk_bytes")


class PoolCollector(Collector):
    """Asks the pools when it is scraped, and counts transitions from when it was made. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transitions: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._within: Counter[tuple[str, float]] = Counter()  # by kind and bucket
        self._phases: Counter[tuple[str, str]] = Counter()
        self._copied: Counter[str] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        observing.add(self._count)

    def close(self) -> None:
        """Count no longer. Harmless when done before; a registry keeps it until it is unregistered there."""
        observing.remove(self._count)

    def _count(self, seen: observing.Transition) -> None:
        with self._lock:
            if seen.error is not None:
                self._failures[seen.kind, type(seen.error).__name__] += 1
                return
            self._transitions[seen.kind] += 1
            self._copied[seen.kind] += seen.bytes_copied
            self._seconds[seen.kind] += seen.total  # type: ignore[assignment]  # a Counter of seconds
            for bucket in _BUCKETS:
                self._within[seen.kind, bucket] += seen.total <= bucket
            for phase, seconds in seen.seconds.items():
                if phase != "total":  # a sum over phases shall have each second once
                    self._phases[seen.kind, phase] += seconds  # type: ignore[assignment]

    def collect(self) -> Iterable[Metric]:
        """See ``prometheus_client``'s custom collectors. A forked child has no pools to tell of."""
        if _core.is_forked_child():
            return []
        return [*self._gauges(), self._histogram(), *self._counters()]

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
        devices = GaugeMetricFamily(
            "fencepool_device_bytes", "Memory of devices, of all processes", labels=("device", "kind")
        )
        for device in sorted({device for _, device, *_ in totals}):
            with contextlib.suppress(fp.Error):  # a driver that does not answer must not hide the rest
                free, total = fp.memory_info(device)
                devices.add_metric((device, "free"), free)
                devices.add_metric((device, "total"), total)
        return by_pool, pools, devices

    def _histogram(self) -> Metric:
        family = HistogramMetricFamily(
            "fencepool_transition_seconds", "Pauses and resumes, callbacks included", labels=("kind",)
        )
        with self._lock:
            for kind, count in self._transitions.items():
                buckets = [(str(bucket), float(self._within[kind, bucket])) for bucket in _BUCKETS]
                family.add_metric((kind,), [*buckets, ("+Inf", float(count))], self._seconds[kind])
        return family

    def _counters(self) -> Iterable[Metric]:
        with self._lock:
            counted: list[tuple[str, str, tuple[str, ...], dict[Any, float]]] = [
                ("fencepool_transitions", "Pauses and resumes", ("kind",), dict(self._transitions)),
                ("fencepool_phase_seconds", "Seconds by phase", ("kind", "phase"), dict(self._phases)),
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
    """Make a collector and register it. Thread-safe.

    Raises:
        ValueError: the registry has one already; nothing was changed.
    """
    collector = PoolCollector()
    try:
        registry.register(collector)
    except ValueError:
        collector.close()
        raise
    return collector
