"""Runs of a ``KafkaSink``, and what is in its topic."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spark_bridge.queryable.client.kafka_sink import KafkaSink
from tests.patience import PATIENCE
from tests.services.kafka import KafkaBroker, Record
from tests.spark_bridge.queryable.memory_reads import eventually


class Running:
    """A sink that runs in a thread; ``error`` is what ended it."""

    def __init__(self, sink: KafkaSink) -> None:
        self.sink = sink
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.sink.run()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def is_at(self, version: int, generation: int = 1) -> bool:
        if self.error is not None:
            raise self.error
        position = self.sink.position
        if position is None or not position.is_whole or position.generation < generation:
            return False
        return position.version >= version

    def ended(self) -> BaseException | None:
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        return self.error


@contextmanager
def running(
    client: Any, broker: KafkaBroker, topic: str, operator: str = "totals", **options: Any
) -> Iterator[Running]:
    sink = Running(KafkaSink(client, operator, topic=topic, bootstrap=broker.address, **options))
    try:
        yield sink
    finally:
        sink.sink.close()
        sink.ended()


def write_up_to(
    version: int, client: Any, broker: KafkaBroker, topic: str, generation: int = 1, **options: Any
) -> None:
    """Run a sink until the changes of a version are in the topic."""
    with running(client, broker, topic, **options) as sink:
        eventually(lambda: sink.is_at(version, generation))
    assert sink.error is None


def run_to_the_end(client: Any, broker: KafkaBroker, topic: str) -> None:
    """Run a sink that must end by itself. Raises its error."""
    error = Running(KafkaSink(client, "totals", topic=topic, bootstrap=broker.address)).ended()
    if error is not None:
        raise error


def header(record: Record, name: str) -> str:
    return dict(record.headers)[f"statestore-{name}"].decode()


def compacted(records: list[Record]) -> dict[Any, Any]:
    """The last value of each key, without removed keys, as a reader of the compacted topic ends with."""
    last = {(record.partition, record.key): record.value for record in records}
    values: dict[Any, Any] = {}
    for (_, key), value in last.items():
        if value is not None:
            assert key not in values, f"{key!r} is in two partitions"
            values[key] = json.loads(value)
    return values


def state_of(client: Any, operator: str = "totals", **options: Any) -> dict[Any, Any]:
    """The state, as keys and values in a topic."""
    return {
        json.dumps({"user": row["user"]}, separators=(",", ":")).encode(): {"n": row["n"], "name": row["name"]}
        for row in client.scan(operator, **options).to_pylist()
    }


def of_versions(records: list[Record], generation: int = 1) -> dict[int, dict[bytes | None, bytes | None]]:
    """The records of each version by key. No key is there twice, and no version comes after a later one."""
    versions: dict[int, dict[bytes | None, bytes | None]] = {}
    last = dict.fromkeys({record.partition for record in records}, 0)
    for record in records:
        if int(header(record, "generation")) == generation:
            version = int(header(record, "version"))
            assert version >= last[record.partition]
            last[record.partition] = version
            assert record.key not in versions.setdefault(version, {})
            versions[version][record.key] = record.value
    return versions


Rows = dict[int | None, tuple[int, str] | None]


def changes_of(history: list[Rows], after: int) -> dict[int, dict[bytes, Any]]:
    """The changes of the versions after ``after``, by key as in a topic."""
    state: Rows = {}
    expected: dict[int, dict[bytes, Any]] = {}
    for version, batch in enumerate(history, 1):
        changed = {user: row for user, row in batch.items() if state.get(user) != row}
        state.update(batch)
        if changed and version > after:
            expected[version] = {
                json.dumps({"user": user}, separators=(",", ":")).encode(): (
                    None if row is None else {"n": row[0], "name": row[1]}
                )
                for user, row in changed.items()
            }
    return expected


def random_rows(rng: random.Random) -> Rows:
    users: list[int | None] = [None, *range(25)]
    return {
        user: None if rng.random() < 0.3 else (rng.randrange(4), rng.choice("ab")) for user in rng.sample(users, k=6)
    }


def parsed(versions: dict[int, dict[bytes | None, bytes | None]]) -> dict[int, dict[Any, Any]]:
    return {
        version: {key: None if value is None else json.loads(value) for key, value in by_key.items()}
        for version, by_key in versions.items()
    }
