"""Requests to storage as Ray metrics, which Ray's dashboard and Prometheus read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ray.util.metrics import Counter

from backends.storage.request_counts import RequestCounts


def storage_metrics(requests: RequestCounts, tags: Mapping[str, str]) -> Callable[[], None]:
    """Return a function that publishes the requests since its last call, for one thread that calls it now and then.

    ``statestore_storage_requests_total`` counts by ``kind``: put, get, head, list, delete.
    """
    counter = Counter("statestore_storage_requests_total", "Requests to checkpoint storage", (*tags, "kind"))
    shown: dict[str, int] = {}

    def publish() -> None:
        for kind, count in requests.read().items():
            more = count - shown.get(kind, 0)
            if more:  # Ray refuses to add 0 to a counter
                counter.inc(more, {**tags, "kind": kind})
            shown[kind] = count

    return publish
