"""``serve_state`` of a running query, an ended query and a savepoint: the same clients, no Spark."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray

from spark_bridge import QueryableStateClient, aggregate, serve_state, trigger_savepoint
from spark_bridge import functions as S
from spark_bridge.exceptions import AccessDeniedError, SessionError
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import Stream, settle, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.spark, pytest.mark.slow]


def test_state_is_served_during_and_after_a_query_and_of_a_savepoint(stream: Stream, tmp_path: Path) -> None:
    stream.add([(k, 1.0) for k in range(100)])
    frame = aggregate(stream.read(), by="k", operator="served", n=S.count(), num_partitions=3)
    writer = frame.writeStream.outputMode("append").option("checkpointLocation", stream.checkpoint)
    query = writer.format("noop").start()
    settle(query)
    with serve_state(stream.checkpoint, replicas=2, name="beside", follow=True) as serving:
        assert serving.operators == ("served",)
        with serving.client() as client:
            assert client.get("served", 7) == {"n": 1}
            stream.add([(k, 1.0) for k in range(100)])
            settle(query)
            wait_until(lambda: client.get("served", 7) == {"n": 2})
            assert client.sql("select count(*) as rows, sum(n) as n from served").df().values.tolist() == [[100, 200]]
            saved = trigger_savepoint(query, str(tmp_path / "savepoints")).result(PATIENCE)
            query.stop()
            os.kill(ray.get(serving._cluster.hosts[0].pid.remote()), signal.SIGKILL)
            assert client.get_many("served", list(range(100)))["n"].to_pylist() == [2] * 100
        with pytest.raises(SessionError, match="under the name 'beside' in this cluster already"):
            serve_state(stream.checkpoint, name="beside")
        with (
            QueryableStateClient.connect(address=serving.addresses, token="wrong") as other,
            pytest.raises(AccessDeniedError),
        ):
            other.get("served", 7)
    with serve_state(saved, name="saved") as serving:
        token = serving.token
        with QueryableStateClient.connect(address=serving.addresses, token=token) as other:
            assert other.get("served", 7) == {"n": 2}
            assert [o["ended"] for o in other.operators()] == [True]
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    assert not [name for name in names if name.startswith("StateServing-")]
