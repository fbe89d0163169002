"""A port to a coordinator in the test's process, whose hosts have no heartbeat threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.spark_bridge.queryable.client_world import Cluster


class Port:
    """Calls ``before`` and ``after`` around a message. Before it holds a query, all hosts send a heartbeat."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}

    def __getattr__(self, name: str) -> Any:
        def send(*args: Any, **kwargs: Any) -> Any:
            self.before.pop(name, lambda: None)()
            for h in self._cluster.hosts if name == "hold_query" else ():
                h.host.heartbeat()
            answer = getattr(self._cluster.c, name)(*args, **kwargs)
            self.after.pop(name, lambda: None)()
            return answer

        return send
