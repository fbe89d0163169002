"""Latency percentiles that are right within their documented error, and counts that clients cannot make grow."""

from __future__ import annotations

import random
import threading

import pytest

from spark_bridge.queryable.server.limits import (
    MAX_SERIES,
    OCTAVES,
    OTHER,
    SUB_BUCKETS,
    LatencyHistogram,
    RequestStatistics,
    bucket_of,
    middle_of,
)


def test_a_bucket_is_wrong_by_six_percent_at_most():
    rng = random.Random(1)
    for _ in range(20_000):
        seconds = 10 ** rng.uniform(-6, 1.5)
        assert abs(middle_of(bucket_of(seconds)) - seconds) <= seconds / 16.0001 * 1.001
    buckets = [bucket_of(1e-6 * 1.01**i) for i in range(1815)]
    assert buckets == sorted(buckets) and set(buckets) == set(range(SUB_BUCKETS * OCTAVES))


@pytest.mark.parametrize("seconds", [0.0, 1e-12, -1.0, 1e6, 3600.0])
def test_latencies_beyond_the_buckets_are_counted(seconds):
    histogram = LatencyHistogram()
    histogram.add(seconds)
    assert histogram.total == sum(histogram.counts) == 1


def test_percentiles_are_those_of_the_latencies():
    rng = random.Random(2)
    latencies = [rng.lognormvariate(-8, 1.5) for _ in range(20_000)]
    statistics = RequestStatistics()
    for seconds in latencies:
        statistics.observe("totals", "lookup", seconds)
    figures = statistics.snapshot()["totals"]["lookup"]
    latencies.sort()
    for name, share in (("p50_ms", 0.5), ("p90_ms", 0.9), ("p99_ms", 0.99)):
        assert figures[name] == pytest.approx(latencies[int(share * len(latencies)) - 1] * 1e3, rel=0.08)
    assert figures["max_ms"] == pytest.approx(latencies[-1] * 1e3, abs=0.001)
    assert figures["requests"] == 20_000 and figures["failures"] == 0


def test_a_percentile_is_never_above_the_slowest():
    statistics = RequestStatistics()
    statistics.observe("totals", "lookup", 0.001024)  # the lowest of its bucket
    figures = statistics.snapshot()["totals"]["lookup"]
    assert figures["p50_ms"] <= figures["max_ms"] == 1.024
    assert middle_of(bucket_of(0.001024)) > 0.001024


def test_deltas_count_requests_since_the_last_report():
    statistics = RequestStatistics()
    statistics.observe("totals", "lookup", 5.0)
    statistics.observe("totals", "scan", 1.0, failed=True)
    assert {(d.operator, d.verb, d.requests, d.failures) for d in statistics.deltas()} == {
        ("totals", "lookup", 1, 0),
        ("totals", "scan", 1, 1),
    }
    assert statistics.deltas() == []
    for _ in range(10):
        statistics.observe("totals", "lookup", 0.001)
    (delta,) = statistics.deltas()
    assert (delta.requests, delta.failures) == (10, 0)
    assert delta.latencies.counts_up_to([0.0005, 0.0011, 1.0]) == [0, 10, 10, 10]
    assert statistics.snapshot()["totals"]["lookup"]["max_ms"] == 5000.0


def test_names_that_clients_make_up_are_counted_together():
    statistics = RequestStatistics()
    for i in range(10_000):
        statistics.observe(f"made up {i}", "lookup", 0.001, failed=True)
    statistics.observe("totals", "lookup", 0.001)
    statistics.observe("totals", "lookup", 0.001, failed=True)
    figures = statistics.snapshot()
    assert set(figures) == {OTHER, "totals"}
    assert figures[OTHER]["lookup"]["failures"] == 10_000 and figures["totals"]["lookup"]["failures"] == 1


def test_series_are_bounded():
    statistics = RequestStatistics()
    for i in range(MAX_SERIES + 100):
        statistics.observe(f"operator {i}", "lookup", 0.001)
    assert len(statistics._series) <= MAX_SERIES + 1
    assert sum(f["lookup"]["requests"] for f in statistics.snapshot().values()) == MAX_SERIES + 100
    assert list(statistics.snapshot("operator 3")) == ["operator 3"]


def test_no_request_is_lost_between_threads():
    statistics = RequestStatistics()
    taken = []

    def count() -> None:
        for _ in range(5000):
            statistics.observe("totals", "lookup", 0.0001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):
        taken += statistics.deltas()
    for thread in threads:
        thread.join()
    taken += statistics.deltas()
    assert sum(d.requests for d in taken) == statistics.snapshot()["totals"]["lookup"]["requests"] == 20_000
