"""``forget_keys`` on a running and an ended stream on Spark leaves exact results and no byte of a key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_bridge import QueryableStateClient, aggregate, forget_keys
from spark_bridge import functions as S
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.state_surgery.surgery_steps import files_with

pytestmark = [pytest.mark.ray, pytest.mark.spark, pytest.mark.spark42_only]

USERS = ["Zq8vKw3xTn5bRm1yLd7c", "Hj4sPf9gVt2eWa6kXo0u", "other"]


def test_keys_are_forgotten_during_and_after_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    stream = Stream(spark, tmp_path, "user string, v double")

    def add() -> None:
        stream.add([(user, 1.0) for user in USERS[1:]])

    stream.add([(user, 1.0) for user in USERS])
    frame = aggregate(stream.read(), by="user", operator="by_user", n=S.count(), num_partitions=3)
    writer = frame.writeStream.outputMode("append").option("checkpointLocation", stream.checkpoint).format("noop")
    query = writer.start()
    for _ in range(4):
        add()
    settle(query)
    ended = threading.Event()

    def feed() -> None:
        while not ended.wait(0.3):
            add()

    feeding = threading.Thread(target=feed)
    feeding.start()
    try:
        with QueryableStateClient.connect() as client:
            assert client.get("by_user", USERS[0]) == {"n": 1} and files_with(stream.checkpoint, USERS[0])
            report = forget_keys(query, "by_user", USERS[:1], reference="request 7")
            assert report.rows > 0
            assert client.get("by_user", USERS[0]) is None
            assert client.get("by_user", USERS[1])["n"] >= 5
    finally:
        ended.set()
        feeding.join()
    settle(query)
    with QueryableStateClient.connect() as client:
        assert [client.get("by_user", user) for user in USERS] == [None, *[{"n": stream.files}] * 2]
        query.stop()
        assert files_with(stream.checkpoint, USERS[0]) == []

        def is_forgotten() -> bool:
            forget_keys(stream.checkpoint, "by_user", USERS[1:2])
            return files_with(stream.checkpoint, USERS[1]) == []

        # A snapshot that a host was uploading as the query ended may come behind the removal of the old files.
        wait_until(is_forgotten)
        assert client.get("by_user", USERS[1]) is None and client.get("by_user", USERS[2]) == {"n": stream.files}
    stream.add([(user, 1.0) for user in USERS])
    query = writer.start()
    settle(query)
    with QueryableStateClient.connect() as client:
        assert [client.get("by_user", user) for user in USERS] == [{"n": 1}, {"n": 1}, {"n": stream.files}]
    query.stop()
