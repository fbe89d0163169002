"""Statistics of a host's answers: requests, failures and latency percentiles by operator and verb.

``describe()`` has them since the start, Ray's metrics since they were last taken.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_bridge.queryable.server.limits.latency_histogram import QUANTILES, LatencyHistogram, bucket_of

MAX_SERIES = 512
"""Pairs of operator and verb that are counted apart. Names come from clients, and must not make memory grow."""
OTHER = "(other)"
"""The operator under which requests for unknown operators are counted, and those beyond ``MAX_SERIES``."""


class _Series:
    """One operator and verb; the lock guards all figures."""

    __slots__ = ("failures", "histogram", "lock", "slowest")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.histogram = LatencyHistogram()
        self.failures = 0
        self.slowest = 0.0

    def observe(self, seconds: float, failed: bool) -> None:
        histogram, bucket = self.histogram, bucket_of(seconds)
        with self.lock:
            histogram.counts[bucket] += 1
            histogram.total += 1
            if failed:
                self.failures += 1
            self.slowest = max(self.slowest, seconds)


@dataclass(frozen=True)
class RequestDelta:
    """The figures of one operator and verb since the deltas were last taken.

    ``latencies`` are those of the requests in between.
    """

    operator: str
    verb: str
    requests: int
    failures: int
    latencies: LatencyHistogram

    def counts(self, bounds: Sequence[float]) -> list[int]:
        """Return how many requests took at most each bound, in ascending seconds, and then how many there were."""
        return self.latencies.counts_up_to(bounds)


class RequestStatistics:
    """Counts requests; safe from many threads.

    An operator gets figures of its own once a request for it has been answered. Until then, and beyond ``MAX_SERIES``,
    it counts as ``OTHER``. Requests that name no operator have the operator "". One lock guards which series there are,
    another the taken deltas.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._operators: set[str] = {"", OTHER}
        self._lock = threading.Lock()
        self._taking = threading.Lock()
        self._taken: dict[tuple[str, str], tuple[LatencyHistogram, int]] = {}

    def observe(self, operator: str, verb: str, seconds: float, failed: bool = False) -> None:
        """Count one request, which took ``seconds``. ``verb`` is one of ``VERBS``, never a client's word."""
        series = self._series.get((operator, verb))
        if series is None:
            series = self._new_series(operator, verb, failed)
        series.observe(seconds, failed)

    def _new_series(self, operator: str, verb: str, failed: bool) -> _Series:
        with self._lock:
            is_full = len(self._series) >= MAX_SERIES
            if operator not in self._operators:
                if failed or is_full:
                    operator = OTHER
                else:
                    self._operators.add(operator)
            elif is_full and operator:
                operator = OTHER
            return self._series.setdefault((operator, verb), _Series())

    def snapshot(self, operator: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the figures since the start, by operator and verb.

        They are ``requests``, ``failures``, ``p50_ms``, ``p90_ms``, ``p99_ms``, ``max_ms``. With ``operator`` only
        those of one operator.
        """
        answer: dict[str, dict[str, dict[str, Any]]] = {}
        for (name, verb), series in self._all():
            if operator is not None and name != operator:
                continue
            with series.lock:
                histogram, failures, slowest = series.histogram.copy(), series.failures, series.slowest
            latencies = zip(QUANTILES, histogram.quantiles(), strict=True)
            answer.setdefault(name, {})[verb] = {
                "requests": histogram.total,
                "failures": failures,
                **{f"p{q * 100:g}_ms": round(min(s, slowest) * 1e3, 3) for q, s in latencies},
                "max_ms": round(slowest * 1e3, 3),
            }
        return answer

    def deltas(self) -> list[RequestDelta]:
        """Return the figures since the last call, of operators and verbs with requests."""
        found = []
        with self._taking:
            for key, series in self._all():
                with series.lock:
                    histogram, failures = series.histogram.copy(), series.failures
                before, failures_before = self._taken.get(key) or (LatencyHistogram(), 0)
                since = histogram.since(before)
                if not since.total:
                    continue
                self._taken[key] = histogram, failures
                found.append(RequestDelta(*key, since.total, failures - failures_before, since))
        return found

    def _all(self) -> list[tuple[tuple[str, str], _Series]]:
        with self._lock:
            return sorted(self._series.items())
