"""A page of 50 queries with 10,000 partitions on 40 hosts, served by a process of its own.

    python -m tests.spark_bridge.ui.large_page DIRECTORY

The overview is renewed without a pause. One of the queries is real, and so is what coordinator and hosts say of it. The
others are copies of it under names of their own, and each look takes their answers as they come from Ray: pickled. The
first line of stdout is the address.
"""

from __future__ import annotations

import pickle
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn

from spark_bridge.overview.from_cluster import KnownCheckpoints, overview_of_cluster
from spark_bridge.overview.model import Overview
from spark_bridge.ui import overviews
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
        self._coordinator, self._hosts, self._stats = self._answers()

    def _answers(self) -> tuple[bytes, list[bytes], dict[str, bytes]]:
        coordinator = {**self.real.c.describe(), "namespace": "statestore", "node_ip": "192.0.2.1", "pid": 11}
        (first,) = coordinator["queries"]
        each = (PARTITIONS - REAL_PARTITIONS) // (QUERIES - 1) + 1
        copies = [
            {**first, "query_id": f"q{i}", "run_id": f"run-{i}", "name": f"query {i}", "operators": {"totals": each}}
            for i in range(1, QUERIES)
        ]
        described = [h.host.describe() for h in self.real.hosts]
        instance = described[0]["instances"][0]
        others = [{**instance, "run_id": f"run-{i}", "partition": p} for i in range(1, QUERIES) for p in range(each)]
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
        stats = self.real.c.checkpoint_stats(first["run_id"])
        record = stats["history"][-1]
        stats["history"] = [{**record, "version": v} for v in range(1, HISTORY + 1)]
        told = pickle.dumps(stats)
        return (
            pickle.dumps(coordinator),
            [pickle.dumps(host) for host in hosts],
            {q["run_id"]: told for q in coordinator["queries"]},
        )

    def overview(self) -> Overview:
        """Look, as into a cluster that answers at once."""
        return overview_of_cluster(
            pickle.loads(self._coordinator),
            [pickle.loads(host) for host in self._hosts],
            {run_id: pickle.loads(told) for run_id, told in self._stats.items()},
            known=self._known,
            now_ms=int(time.time() * 1000),
        )

    def call(self, method: str, *args: Any) -> Any:
        """Send a message to the real coordinator, and have its hosts do what it orders."""
        answer = getattr(self.real.c, method)(*args)
        for h in self.real.hosts:
            h.host.heartbeat()
        return answer


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
