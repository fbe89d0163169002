"""A sink that keeps metrics as Prometheus would see them, and refuses what the table does not have."""

from __future__ import annotations

from coordinator_actor.metrics import COUNTER, GAUGE, HISTOGRAM, METRICS

Series = tuple[str, tuple[tuple[str, str], ...]]


class KeptMetrics:
    """``own`` are the labels of the process, as a ``RayMetrics`` has them, without the namespace."""

    def __init__(self, **own: str) -> None:
        self.own = own
        self.values: dict[Series, float] = {}
        self.observed: dict[Series, list[float]] = {}

    def _key(self, name: str, kind: str, labels: dict[str, str]) -> Series:
        metric = METRICS[name]
        assert metric.kind == kind, name
        whole = {**self.own, **labels}
        assert set(whole) - set(self.own) | set(metric.labels) & set(self.own) == set(metric.labels), (name, labels)
        return name, tuple(sorted(whole.items()))

    def set(self, name: str, value: float, **labels: str) -> None:
        self.values[self._key(name, GAUGE, labels)] = value

    def increase(self, name: str, more: float, **labels: str) -> None:
        assert more >= 0, (name, more)
        key = self._key(name, COUNTER, labels)
        if more:
            self.values[key] = self.values.get(key, 0) + more

    def observe(self, name: str, value: float, **labels: str) -> None:
        self.observed.setdefault(self._key(name, HISTOGRAM, labels), []).append(value)

    def get(self, name: str, **labels: str) -> float:
        return self.values[name, tuple(sorted({**self.own, **labels}.items()))]

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        """Return all values of a metric, keyed by its label values in the order of the label names."""
        return {
            tuple(v for k, v in labels if k not in self.own): value
            for (n, labels), value in self.values.items()
            if n == name
        }
