"""A Kafka broker of one node, and what tests do with its topics."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE
from tests.services.artifacts import class_path
from tests.services.processes import JavaService, free_port

Headers = list[tuple[str, bytes]]


@dataclass(frozen=True)
class Record:
    """A record of a topic: ``value`` None is a tombstone."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    partition: int | None = None
    offset: int = -1


class KafkaTopics:
    """What tests do with the topics of the broker at ``address``."""

    def __init__(self, address: str) -> None:
        from confluent_kafka.admin import AdminClient

        self.address = address
        self._admin = AdminClient({"bootstrap.servers": address, "log_level": 0})

    def is_reachable(self) -> bool:
        """Whether a broker answers."""
        from confluent_kafka import KafkaException

        try:
            return bool(self._admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def names(self) -> set[str]:
        """Return the names of all topics."""
        return set(self._admin.list_topics(timeout=PATIENCE).topics)

    def create(self, name: str, partitions: int = 2, **configs: str) -> None:
        """Create a topic; ``configs`` have underscores where Kafka's names have dots."""
        from confluent_kafka.admin import NewTopic

        config = {key.replace("_", "."): value for key, value in configs.items()}
        self._admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(PATIENCE)

    def add_partitions(self, topic: str, total: int) -> None:
        """Grow a topic to ``total`` partitions."""
        from confluent_kafka.admin import NewPartitions

        self._admin.create_partitions([NewPartitions(topic, total)])[topic].result(PATIENCE)

    def delete_records(self, topic: str, offsets: dict[int, int]) -> None:
        """Delete the records before an offset, by partition; -1 deletes all."""
        from confluent_kafka import TopicPartition

        parts = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
        for answer in self._admin.delete_records(parts).values():
            answer.result(PATIENCE)

    def end_offsets(self, topic: str) -> dict[int, int]:
        """Return the offset behind the last record of each partition."""
        with self._consumer() as consumer:
            from confluent_kafka import TopicPartition

            partitions = consumer.list_topics(topic, timeout=PATIENCE).topics[topic].partitions
            return {p: consumer.get_watermark_offsets(TopicPartition(topic, p), PATIENCE)[1] for p in partitions}

    def send(self, topic: str, records: Iterable[Record]) -> None:
        """Append records and wait until the broker has them all. ``partition`` None lets the key decide."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.address, "linger.ms": 5, "acks": "all", "log_level": 0})
        failures: list[Any] = []
        for record in records:
            producer.produce(
                topic,
                record.value,
                record.key,
                **({} if record.partition is None else {"partition": record.partition}),
                headers=list(record.headers),
                on_delivery=lambda error, _: failures.append(error) if error else None,
            )
            producer.poll(0)
        assert producer.flush(PATIENCE) == 0
        assert failures == []

    def send_rows(self, topic: str, rows: Iterable[dict[str, Any]], key: str | None = None) -> None:
        """Append rows as JSON, keyed by the field ``key``."""
        self.send(
            topic,
            [Record(None if key is None else str(row[key]).encode(), json.dumps(row).encode()) for row in rows],
        )

    def records(self, topic: str, isolation: str = "read_committed") -> list[Record]:
        """Return all records that the topic has now, in order within each partition."""
        from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

        with self._consumer(**{"isolation.level": isolation, "enable.partition.eof": True}) as consumer:
            unread = set(consumer.list_topics(topic, timeout=PATIENCE).topics[topic].partitions)
            consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in unread])
            records: list[Record] = []
            while unread:
                message = consumer.poll(PATIENCE)
                assert message is not None, (topic, unread)
                if message.error():
                    if message.error().code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(message.error())
                    unread.discard(message.partition())
                else:
                    headers = tuple(message.headers() or ())
                    place = message.partition(), message.offset()
                    records.append(Record(message.key(), message.value(), headers, *place))
            return sorted(records, key=lambda record: (record.partition, record.offset))

    @contextmanager
    def _consumer(self, **settings: Any) -> Iterator[Any]:
        from confluent_kafka import Consumer

        usual = {"bootstrap.servers": self.address, "group.id": "tests", "enable.auto.commit": False, "log_level": 0}
        consumer = Consumer({**usual, **settings})
        try:
            yield consumer
        finally:
            consumer.close()


class KafkaBroker:
    """A broker that keeps its port and its records over crashes and restarts."""

    def __init__(self, directory: Path) -> None:
        self._jars = class_path("kafka")
        port, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        properties = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.address}",
            "log.dirs": directory / "data",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            # A broker that was killed is fenced until its old session ends.
            "broker.session.timeout.ms": 1000,
            "broker.heartbeat.interval.ms": 200,
            "auto.create.topics.enable": "false",
            "log.retention.check.interval.ms": 200,
            "log.segment.delete.delay.ms": 0,
        }
        self._properties = directory / "server.properties"
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        storage = ["kafka.tools.StorageTool", "format", "-t", "bmQxc3RhdGVzdG9yZS10ZQ", "-c", str(self._properties)]
        subprocess.run(["java", "-cp", self._jars, *storage], check=True, capture_output=True)
        level = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
        broker = [level, "-cp", self._jars, "kafka.Kafka", str(self._properties)]
        self._service = JavaService(broker, directory / "broker.log")
        self.topics = KafkaTopics(self.address)

    def start(self) -> None:
        """Start the broker, again after ``stop`` or ``kill``, and wait until it answers."""
        self._service.start(self.topics.is_reachable)

    def stop(self) -> None:
        """End the broker regularly."""
        self._service.stop()

    def kill(self) -> None:
        """End the broker as a crash does."""
        self._service.kill()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Let the broker answer nothing for a while, with open connections."""
        self._service.hang()
        try:
            yield
        finally:
            self._service.resume()


@contextmanager
def running_kafka(directory: Path) -> Iterator[KafkaBroker]:
    """Run a broker over ``directory``. Skips the test if its jars have not been fetched."""
    broker = KafkaBroker(directory)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
