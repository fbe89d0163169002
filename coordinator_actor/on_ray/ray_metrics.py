"""Publishes metrics through Ray, whose metrics endpoint Prometheus and Ray's dashboard read."""

from __future__ import annotations

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from coordinator_actor.metrics import COUNTER, DURATION_BOUNDS, GAUGE, METRICS


class RayMetrics:
    """The sink of one process. ``own`` are the labels that all its values have. For one thread at a time.

    Ray's metrics are made when they get their first value. Names and labels are those of ``METRICS``; others are a
    ``KeyError`` or Ray's ``ValueError``.
    """

    def __init__(self, own: Mapping[str, str]) -> None:
        self._own = dict(own)
        self._made: dict[str, Counter | Gauge | Histogram] = {}

    def set(self, name: str, value: float, **labels: str) -> None:
        """See ``MetricSink``."""
        metric = self._metric(name)
        assert isinstance(metric, Gauge), name
        metric.set(value, {**self._own, **labels})

    def add(self, name: str, more: float, **labels: str) -> None:
        """See ``MetricSink``."""
        metric = self._metric(name)
        assert isinstance(metric, Counter), name
        if more:  # Ray refuses to add 0
            metric.inc(more, {**self._own, **labels})

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See ``MetricSink``."""
        metric = self._metric(name)
        assert isinstance(metric, Histogram), name
        metric.observe(value, {**self._own, **labels})

    def _metric(self, name: str) -> Counter | Gauge | Histogram:
        made = self._made.get(name)
        if made is None:
            declared = METRICS[name]
            labels = tuple(dict.fromkeys((*self._own, *declared.labels)))
            if declared.kind == COUNTER:
                made = Counter(name, declared.help, labels)
            elif declared.kind == GAUGE:
                made = Gauge(name, declared.help, labels)
            else:
                made = Histogram(name, declared.help, list(DURATION_BOUNDS), labels)
            self._made[name] = made
        return made
