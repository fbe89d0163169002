"""Hosts come and go while a stream runs: no answer is wrong or late, and tasks know who stays."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import DataFrame

from spark_bridge import QueryableStateClient, aggregate, scale_hosts
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from spark_bridge.task.executor import ADDRESSES
from tests.spark_bridge.conftest import Stream, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.slow]
PARTITIONS = 6


def owned() -> dict[str, int]:
    """How many partitions each host of the session owns."""
    answer = current_cluster().coordinator.locate("counts")
    hosts = {host.host_id: 0 for host in current_cluster().placement.hosts}
    for owner in answer.owners:
        hosts[owner.host_id] = hosts.get(owner.host_id, 0) + 1
    return hosts


def test_stream_continues_and_is_served_while_hosts_come_and_go(spark: Any, make_stream: Callable[..., Stream]) -> None:
    stream = make_stream()
    told: dict[int, list[str]] = {}
    done = 0

    def take(batch: DataFrame, batch_id: int) -> None:
        nonlocal done
        batch.collect()
        told[batch_id] = json.loads(spark.sparkContext.getLocalProperty(ADDRESSES))
        done = batch_id + 1

    counts = aggregate(stream.read(), by="k", operator="counts", n=S.count(), num_partitions=PARTITIONS)
    query = counts.writeStream.foreachBatch(take).option("checkpointLocation", stream.checkpoint).start()
    wrong: list[Any] = []
    ended = threading.Event()

    def ask() -> None:
        with QueryableStateClient.connect() as client:
            while not ended.is_set():
                least = done
                rows = client.get_many("counts", list(range(20)))
                if len(set(rows["n"].to_pylist())) != 1 or rows["n"][0].as_py() < least - 1:
                    wrong.append((least, rows["n"].to_pylist()))

    def batch() -> None:
        stream.add([(k, 1.0) for k in range(20)])
        query.processAllAvailable()

    def has_come_to(num_hosts: int) -> bool:
        batch()
        shares = owned().values()
        return len(shares) == num_hosts and max(shares) - min(shares) <= 1

    def tasks_know_all() -> bool:
        batch()  # partitions may move before the driver has looked who is there
        return sorted(told[max(told)]) == sorted(current_cluster().addresses())

    batch()
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for num_hosts in (4, 1, None):
            scale_hosts(num_hosts)
            wait_until(lambda n=num_hosts or 2: has_come_to(n))  # type: ignore[misc]
            wait_until(tasks_know_all)
    finally:
        ended.set()
        asking.join()
        scale_hosts(None)
    assert not wrong and query.exception() is None
    with QueryableStateClient.connect() as client:
        assert client.get("counts", 3) == {"n": stream.files}
