"""What a host publishes of its requests and its memory, by Ray's own classes (which need no cluster to be filled)."""

from __future__ import annotations

from typing import Any

import pytest

from backends import StateStoreConf
from backends.host_memory import DELTAS, HostMemory
from backends.storage.request_counts import RequestCounts
from coordinator_actor.on_ray import storage_metrics
from spark_bridge.host_actor import ray_metrics
from spark_bridge.queryable.server.request_statistics import RequestStatistics


@pytest.fixture
def recorded(monkeypatch):
    found: list[tuple[Any, ...]] = []

    class Counted(ray_metrics.Counter):
        def inc(self, value=1.0, tags=None):
            super().inc(value, tags)
            found.append((self.info["name"], value, tags))

    class Shown(ray_metrics.Gauge):
        def set(self, value, tags=None):
            super().set(value, tags)
            found.append((self.info["name"], value, tags))

    monkeypatch.setattr(ray_metrics, "Counter", Counted)
    monkeypatch.setattr(ray_metrics, "Gauge", Shown)
    monkeypatch.setattr(storage_metrics, "Counter", Counted)
    return found


def test_requests_failures_and_latencies_are_published_once(recorded):
    statistics = RequestStatistics()
    publish = ray_metrics.request_metrics(statistics, "statestore", "host-1")
    publish()
    assert recorded == []
    for _ in range(99):
        statistics.observe("totals", "lookup", 0.001)
    statistics.observe("totals", "lookup", 0.2, failed=True)
    publish()
    tags = {"namespace": "statestore", "host": "host-1", "operator": "totals", "verb": "lookup"}
    assert recorded[:2] == [("statestore_requests_total", 100, tags), ("statestore_request_failures_total", 1, tags)]
    latencies = {t["quantile"]: value for name, value, t in recorded[2:] if name == "statestore_request_latency_ms"}
    assert latencies == {
        "0.5": pytest.approx(1.0, rel=0.07),
        "0.9": pytest.approx(1.0, rel=0.07),
        "0.99": pytest.approx(1.0, rel=0.07),
        "1": pytest.approx(200.0),
    }


def test_latencies_of_requests_that_have_ended_do_not_stay(recorded):
    statistics = RequestStatistics()
    publish = ray_metrics.request_metrics(statistics, "statestore", "host-1")
    statistics.observe("totals", "lookup", 0.001)
    publish()
    recorded.clear()
    publish()
    assert [(name, value) for name, value, _ in recorded] == [("statestore_request_latency_ms", 0.0)] * 4
    recorded.clear()
    publish()
    assert recorded == []


def test_the_memory_of_a_host_is_published_by_kind(recorded):
    memory = HostMemory(StateStoreConf())
    publish = ray_metrics.memory_metrics(memory, "statestore", "host-1")
    claim = memory.note(DELTAS, 1000)
    publish()
    published = {(name, tags.get("kind")): value for name, value, tags in recorded}
    assert published[("statestore_memory_limit_bytes", None)] == StateStoreConf().host_memory
    assert published[("statestore_memory_bytes", "deltas")] == 1000
    recorded.clear()
    del claim
    publish()
    assert ("statestore_memory_bytes", 0, {"namespace": "statestore", "host": "host-1", "kind": "deltas"}) in recorded


def test_requests_to_storage_are_published_once_by_kind(recorded):
    requests = RequestCounts()
    tags = {"namespace": "statestore", "host": "host-1"}
    publish = storage_metrics.storage_metrics(requests, tags)
    for verb in ("write", "write", "look up"):
        requests.note(verb)
    publish()
    name = "statestore_storage_requests_total"
    assert recorded == [(name, 2, {**tags, "kind": "put"}), (name, 1, {**tags, "kind": "head"})]
    recorded.clear()
    requests.note("write")
    publish()
    assert recorded == [(name, 1, {**tags, "kind": "put"})]
