"""A host's metrics, made of counts that the host keeps anyway; see ``coordinator_actor.metrics`` for the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.storage.sending.request_counts import RequestCounts
from coordinator_actor.metrics import REQUEST_DURATION_BOUNDS, MetricSink, running_totals, storage_totals
from spark_bridge.queryable.server.limits.request_statistics import RequestStatistics

MOST_PARTITIONS = 100
"""Operators of more partitions have one value for each host: the number of series must not follow the partitions."""
HOST_METRICS_SECONDS = 5.0
"""Seconds between two looks at what a host holds, which costs some microseconds for each partition."""
_COUNTS = ("loads", "commits", "snapshots", "keys_read", "keys_written")


class HostMetrics:
    """Publishes what a host holds and has done, whom it has answered, and its ``requests`` to storage. For one thread.

    ``restarts`` is how many times Ray had started the host before.
    """

    def __init__(self, sink: MetricSink, statistics: RequestStatistics, requests: RequestCounts, restarts: int) -> None:
        self._sink = sink
        self._statistics = statistics
        self._requests = requests
        self._total = running_totals(sink)
        self._held: set[tuple[str, str, str]] = set()
        self._restarts = restarts

    def publish(self, described: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Publish a host's description of itself. ``names`` are the titles of queries by run id."""
        # Again and again: what was set once, at the start of the process, was not exported.
        self._sink.set("statestore_host_restarts", self._restarts)
        for name in _COUNTS:
            self._total(f"statestore_{name}_total", described[name])
        storage_totals(self._requests, self._total)
        memory = dict(described["memory"])
        self._sink.set("statestore_memory_limit_bytes", memory.pop("host_memory"))
        for kind, nbytes in memory.items():
            self._sink.set("statestore_memory_bytes", nbytes, kind=kind)
        self._sink.set("statestore_loads_under_way", len(described["loading"]))
        self._sink.set("statestore_waiting_commits", described["waiting_commits"])
        self._publish_partitions(described["instances"], names)
        self._publish_requests()

    def _publish_partitions(self, instances: list[dict[str, Any]], names: Mapping[str, str]) -> None:
        keys: dict[tuple[str, str, str], int] = {}
        nbytes: dict[tuple[str, str, str], int] = {}
        lags: dict[tuple[str, str], int] = {}
        for one in instances:
            query, operator = names.get(one["run_id"], one["query_id"]), one["operator"]
            # By the number of the partition itself: all hosts then give an operator's partitions the same labels.
            partition = str(one["partition"]) if one["num_partitions"] <= MOST_PARTITIONS else "all"
            at = (query, operator, partition)
            keys[at] = keys.get(at, 0) + one["keys"]
            nbytes[at] = nbytes.get(at, 0) + one["memory_bytes"]
            lag = max(0, one["version"] - one["snapshot_version"])
            lags[query, operator] = max(lag, lags.get((query, operator), 0))
        for gone in self._held - keys.keys():  # Ray forgets no series: what a host no longer holds is 0
            keys[gone] = nbytes[gone] = 0
            lags.setdefault(gone[:2], 0)
        for (query, operator, partition), count in keys.items():
            labels = {"query": query, "operator": operator, "partition": partition}
            self._sink.set("statestore_keys", count, **labels)
            self._sink.set("statestore_partition_memory_bytes", nbytes[query, operator, partition], **labels)
        for (query, operator), lag in lags.items():
            self._sink.set("statestore_snapshot_lag_versions", lag, query=query, operator=operator)
        self._held = {at for at, count in nbytes.items() if count or keys[at]}

    def _publish_requests(self) -> None:
        for delta in self._statistics.deltas():
            labels = {"operator": delta.operator, "verb": delta.verb}
            self._sink.add("statestore_requests_total", delta.requests, **labels)
            self._sink.add("statestore_request_failures_total", delta.failures, **labels)
            for bound, count in zip(
                (*REQUEST_DURATION_BOUNDS, None), delta.counts(REQUEST_DURATION_BOUNDS), strict=True
            ):
                le = "+Inf" if bound is None else f"{bound:g}"
                self._sink.add("statestore_request_seconds_bucket", count, **labels, le=le)
