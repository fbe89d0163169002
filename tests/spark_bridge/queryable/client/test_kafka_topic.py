"""How the writer of a topic waits for its brokers: with stand-ins for Kafka's producer, without a broker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from spark_bridge.exceptions import KafkaSinkError, RequestError
from spark_bridge.queryable.client.kafka_topic import SinkTopic
from tests.patience import PATIENCE


def topic_at(producer: SimpleNamespace, timeout: float) -> SinkTopic:
    config = {"bootstrap.servers": "broker:9092"}
    topic = SinkTopic(confluent_kafka, "totals", "writer", config, timeout, threading.Event())
    topic._producer = producer
    return topic


def test_a_topic_whose_leader_is_being_elected_is_waited_for() -> None:
    def list_topics(name: str, _: float) -> SimpleNamespace:
        return SimpleNamespace(topics={name: SimpleNamespace(error=errors.pop(0), partitions={0: None, 1: None})})

    producer = SimpleNamespace(list_topics=list_topics, poll=lambda _: None)
    electing = confluent_kafka.KafkaError(confluent_kafka.KafkaError.LEADER_NOT_AVAILABLE)
    errors: list[Any] = [electing, electing, None]
    topic = topic_at(producer, PATIENCE)
    assert topic._num_partitions(topic._deadline()) == 2
    errors = [electing, electing]
    with pytest.raises(KafkaSinkError, match=r"have not answered for 0 s: .*Leader not available"):
        topic = topic_at(producer, 0.0)
        topic._num_partitions(topic._deadline())
    errors = [confluent_kafka.KafkaError(confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART)]
    with pytest.raises(RequestError, match="Create it"):
        topic._num_partitions(topic._deadline())


def test_a_producer_whose_buffer_stays_full_ends_after_the_timeout() -> None:
    def produce(*_: Any, **__: Any) -> None:
        raise BufferError

    topic = topic_at(SimpleNamespace(produce=produce, poll=lambda _: None), 0.0)
    with pytest.raises(KafkaSinkError, match=r"have not answered for 0 s"):
        topic.produce([b"key"], [b"value"], [[]])
