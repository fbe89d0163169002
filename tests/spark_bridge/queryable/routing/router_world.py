"""Hosts in memory whose partitions a router asks."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from coordinator_actor.messages import OperatorLocation
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
