"""Serve a page of 50 queries with 10,000 partitions on 40 hosts in a separate process.

    python -m tests.spark_bridge.ui.large_page DIRECTORY

The overview refreshes without a pause. One query is real, with real replies of the coordinator and hosts. The others
are copies with different names. Each refresh gets their replies pickled, as from Ray. Each query completes a version
between two refreshes. The first line of stdout is the address.
"""

from __future__ import annotations

import pickle
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from spark_bridge.host.instances import in_columns
from spark_bridge.overview.from_cluster import KnownCheckpoints, overview_of_cluster
from spark_bridge.overview.model import Overview
from spark_bridge.ui import requests as overviews
from spark_bridge.ui.app import create_ui
from spark_bridge.ui.live import LiveSystem
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.ui.systems import Tokens

QUERIES, PARTITIONS, HOSTS, HISTORY = 50, 10_000, 40, 300
REAL_PARTITIONS = 64
PATHS = (
    "/",
    "/query?query=q7",
    "/operator?query=q7&operator=totals",
    "/operator?query=q7&operator=totals&by=time&sort=time",
    "/hosts",
    "/keys",
    "/keys?table=q/totals/default&key.user=5",
    "/scan",
    "/scan?table=q/totals/default",
    "/scan?table=q/totals/default&limit=100",
    "/sql",
    "/savepoints",
    "/savepoints?query=q",
)


class LargeCluster:
    """Describes itself as a coordinator and hosts of that size do."""

    def __init__(self, root: Path) -> None:
        self.real = Cluster(root, partitions=REAL_PARTITIONS)
        (root / "ck" / "metadata").write_text('{"id":"q"}')
        for batch in range(3):
            self.real.batch({i: (i + batch, f"user {i}") for i in range(2_000)})
        self._known = KnownCheckpoints()
        self._coordinator, self._hosts = self._answers()
        self._stats = self.real.c.checkpoint_stats("run1")
        self._record = self._stats["history"][-1]
        self._newest = HISTORY

    def _answers(self) -> tuple[bytes, list[bytes]]:
        coordinator = {**self.real.c.describe(), "namespace": "statestore", "node_ip": "192.0.2.1", "pid": 11}
        (first,) = coordinator["queries"]
        each = (PARTITIONS - REAL_PARTITIONS) // (QUERIES - 1) + 1
        copies = [
            {**first, "query_id": f"q{i}", "run_id": f"run-{i}", "name": f"query {i}", "operators": {"totals": each}}
            for i in range(1, QUERIES)
        ]
        described = [h.host.describe() for h in self.real.hosts]
        instance = described[0]["instances"][0]
        others = [
            {**_copy(instance), "run_id": f"run-{i}", "partition": p} for i in range(1, QUERIES) for p in range(each)
        ]
        requests = [h.proxy.statistics.snapshot() for h in self.real.hosts]
        hosts = [
            {
                **described[n % len(described)],
                "host_id": described[n]["host_id"] if n < len(described) else f"host-{n}",
                "instances": [*(described[n]["instances"] if n < len(described) else ()), *others[n::HOSTS]],
                "query_address": self.real.hosts[n % len(described)].address,
                "requests": requests[n % len(described)],
            }
            for n in range(HOSTS)
        ]
        lease = coordinator["hosts"][0]
        coordinator["hosts"] = [{**lease, "host_id": host["host_id"]} for host in hosts]
        coordinator["queries"] = [first, *copies]
        coordinator["instances"] = []
        return pickle.dumps(coordinator), [pickle.dumps(in_columns(host)) for host in hosts]

    def _told(self, run_id: str) -> bytes:
        """Return the answer to ``checkpoint_stats``: the whole history the first time, then the newest."""
        is_all = not self._known.mark(run_id)
        first = self._newest - HISTORY + 1
        history = [
            {**_copy(self._record), "id": i, "version": i}
            for i in range(first if is_all else self._newest, self._newest + 1)
        ]
        told = {"history": history, "history_first": first, "history_mark": "a", "history_is_all": is_all}
        assert told.keys() < self._stats.keys()
        return pickle.dumps({**self._stats, **told})

    def overview(self) -> Overview:
        """Look, as into a cluster that answers at once. Each query has completed a version since the last look."""
        coordinator = pickle.loads(self._coordinator)
        told = {q["run_id"]: self._told(q["run_id"]) for q in coordinator["queries"]}
        self._newest += 1
        return overview_of_cluster(
            coordinator,
            [pickle.loads(host) for host in self._hosts],
            {run_id: pickle.loads(answer) for run_id, answer in told.items()},
            known=self._known,
            now_ms=int(time.time() * 1000),
        )

    def call(self, method: str, *args: Any) -> Any:
        """Send a message to the real coordinator, and have its hosts do what it orders."""
        answer = getattr(self.real.c, method)(*args)
        for h in self.real.hosts:
            h.host.heartbeat()
        return answer


def _copy(described: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that shares nothing, so that its pickle is as long as that of another one."""
    copied: dict[str, Any] = pickle.loads(pickle.dumps(described))
    return copied


def main() -> None:
    """Serve until the process is ended."""
    overviews.PAGE_FRESH_SECONDS = 0.0
    cluster = LargeCluster(Path(sys.argv[1]))
    client = cluster.real.client()
    page = create_ui(LiveSystem("statestore", cluster.overview, lambda: client, cluster.call), Tokens())
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(page, log_level="warning", lifespan="off")).run(sockets=[listening])


if __name__ == "__main__":
    main()
