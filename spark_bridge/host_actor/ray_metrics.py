"""Request statistics and memory as Ray metrics, which Ray's dashboard and Prometheus read."""

from __future__ import annotations

from collections.abc import Callable

from ray.util.metrics import Counter, Gauge

from backends.host_memory import HostMemory
from spark_bridge.queryable.server.request_statistics import RequestDelta, RequestStatistics

_TAGS = ("namespace", "host", "operator", "verb")


def request_metrics(statistics: RequestStatistics, namespace: str, host: str) -> Callable[[], None]:
    """Return a function that publishes the requests since its last call; for a host's heartbeat thread.

    ``statestore_requests_total`` and ``statestore_request_failures_total`` count. ``statestore_request_latency_ms`` has
    the latencies of the requests since the last call by ``quantile`` (0.5, 0.9, 0.99, and 1 for the slowest), and 0
    when there were none.
    """
    requests = Counter("statestore_requests_total", "Queries of state that were answered", _TAGS)
    failures = Counter("statestore_request_failures_total", "Queries of state that failed", _TAGS)
    latency = Gauge("statestore_request_latency_ms", "Latency of queries of state", (*_TAGS, "quantile"))
    shown: dict[tuple[str, str], tuple[float, ...]] = {}

    def tags(operator: str, verb: str) -> dict[str, str]:
        return {"namespace": namespace, "host": host, "operator": operator, "verb": verb}

    def show(operator: str, verb: str, latencies: dict[float, float]) -> None:
        for quantile, seconds in latencies.items():
            latency.set(seconds * 1e3, {**tags(operator, verb), "quantile": f"{quantile:g}"})

    def count(delta: RequestDelta) -> None:
        # Ray refuses to add 0 to a counter.
        requests.inc(delta.requests, tags(delta.operator, delta.verb))
        if delta.failures:
            failures.inc(delta.failures, tags(delta.operator, delta.verb))

    def publish() -> None:
        deltas = statistics.deltas()
        for delta in deltas:
            count(delta)
            show(delta.operator, delta.verb, delta.latencies)
        for key in shown.keys() - {(d.operator, d.verb) for d in deltas}:
            show(*key, dict.fromkeys(shown.pop(key), 0.0))
        shown.update({(d.operator, d.verb): tuple(d.latencies) for d in deltas})

    return publish


def memory_metrics(memory: HostMemory, namespace: str, host: str) -> Callable[[], None]:
    """Return a function that publishes what a host holds now; for a host's heartbeat thread.

    ``statestore_memory_bytes`` has the bytes by ``kind``, ``statestore_memory_limit_bytes`` the option ``host_memory``.
    """
    tags = {"namespace": namespace, "host": host}
    held = Gauge("statestore_memory_bytes", "Memory that a host holds, by kind", (*tags, "kind"))
    limit = Gauge("statestore_memory_limit_bytes", "The most memory that a host may hold", tuple(tags))

    def publish() -> None:
        limit.set(memory.limit, tags)
        for kind, nbytes in memory.held().items():
            held.set(nbytes, {**tags, "kind": kind})

    return publish
