"""Hosts in memory whose partitions a router asks.

``Source`` is a coordinator whose answers about locations a test chooses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from coordinator_actor.exceptions import QueryEndedError as EndedError
from coordinator_actor.exceptions import UnknownOperatorError as UnknownError
from coordinator_actor.messages import HostInfo, KvStateLocationOracle, OperatorLocation, OperatorSpec
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.queryable.protocol import At
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import KEYS, TOTALS, Cluster, G

FAMILY = "default"
COMPLETED = At()


def soon(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def stored(users: Sequence[int]) -> pa.BinaryArray:
    columns = pa.record_batch([pa.array(users, pa.int64())], schema=KEYS)
    return encode_keys(columns, key_groups(columns, G))


def numbers(values: pa.BinaryArray) -> list[int | None]:
    """Return the first column of stored values."""
    n = TOTALS.decode_values(values).column(0)
    return [x if there else None for x, there in zip(n.to_pylist(), values.is_valid().to_pylist(), strict=True)]


def located(cluster: Cluster) -> OperatorLocation:
    location: OperatorLocation = cluster.c.locate("totals")
    return location


def owned_by(cluster: Cluster, host: int) -> list[int]:
    """Users whose partition the host owns."""
    columns = pa.record_batch([pa.array(range(1000), pa.int64())], schema=KEYS)
    partitions = key_groups(columns, G).astype(np.int64) * cluster.partitions // G
    owners = located(cluster).owners
    return [u for u in range(1000) if owners[partitions[u]].host_id == f"h{host}"]


def asked(cluster: Cluster, verb: str) -> list[int]:
    """How many such requests each host has had."""
    snapshots = [h.proxy.statistics.snapshot("totals") for h in cluster.hosts]
    return [s.get("totals", {}).get(verb, {}).get("requests", 0) for s in snapshots]


class Source:
    """A coordinator whose answers a test chooses; counts how often it is asked."""

    def __init__(self) -> None:
        self.fetched = 0
        self.running: dict[str, KvStateLocationOracle] = {}
        self.ended: set[str] = set()
        self.away = False
        self.pause = 0.0
        self.suspected: list[str] = []

    def suspect_host(self, address: str) -> None:
        self._answer()
        self.suspected.append(address)

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        self._answer()
        for oracle in self.running.values():
            if query in (oracle.query_id, oracle.run_id):
                owners = oracle.owners(operator)
                spec = OperatorSpec(operator, len(owners), "schema")
                return OperatorLocation(oracle.query_id, oracle.run_id, None, spec, 64, 1, owners)
        if query in self.ended:
            raise EndedError(f"{query} has ended")
        raise UnknownError(f"No running query {query}")

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        self.fetched += 1
        self._answer()
        time.sleep(self.pause)
        of_run = next((oracle for oracle in self.running.values() if oracle.run_id == job_id), None)
        return self.running.get(job_id, of_run)

    def _answer(self) -> None:
        if self.away:
            raise HostUnavailableError("away")


def oracle_of(run: str, address: str = "ip:1", job: str = "q1", operator: str = "op") -> KvStateLocationOracle:
    host = HostInfo("h", "a", "", "n", "s", address)
    return KvStateLocationOracle.of(job, run, None, 64, 1, {operator: [host, host]})
