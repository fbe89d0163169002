"""``KafkaSink``: a reader of the topic ends with exactly the state, whatever is killed, and in whatever moment."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_bridge.exceptions import EnvironmentProblemError, KafkaSinkError, RequestError, StateVersionError
from spark_bridge.queryable.client import kafka_sink, kafka_topic, watch
from spark_bridge.queryable.client.kafka_sink import KafkaSink
from spark_bridge.queryable.reads import answer_version, operator_plan
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.state_surgery.forget_keys import forget_keys
from tests.effort import effort
from tests.patience import PATIENCE
from tests.services.kafka import KafkaBroker, Record
from tests.spark_bridge.queryable.client.sink_runs import (
    Rows,
    changes_of,
    compacted,
    header,
    of_versions,
    parsed,
    random_rows,
    run_to_the_end,
    running,
    state_of,
    write_up_to,
)
from tests.spark_bridge.queryable.client_world import TOKEN, Cluster, go_back, served
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_flows import Flow

pytestmark = pytest.mark.service
NUMBERS = count()


@pytest.fixture
def broker(kafka: KafkaBroker) -> KafkaBroker:
    return kafka


@pytest.fixture
def topic(broker: KafkaBroker) -> str:
    name = f"totals-{next(NUMBERS)}"
    broker.topics.create(name, 3, cleanup_policy="compact")
    return name


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts soon ask the coordinator where queries are, and a sink soon notices that it is closed."""
    monkeypatch.setattr(operator_plan, "DIRECTORY_SECONDS", 0.05)
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.1)
    monkeypatch.setattr(watch, "AWAIT_SECONDS", 0.2)
    monkeypatch.setattr(kafka_topic, "CALL_SECONDS", 1.0)
    monkeypatch.setitem(kafka_topic.PRODUCER_DEFAULTS, "socket.timeout.ms", 2_000)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes queries; their checkpoints can be read without them."""
    made: list[Cluster] = []

    def make(**arguments: Any) -> Cluster:
        made.append(Cluster(tmp_path, **arguments))
        (tmp_path / "ck/metadata").write_text('{"id": "q"}')
        return made[-1]

    yield make
    for one in made:
        one.close()


# -- what is in the topic --------------------------------------------------------------------------


def test_topic_has_the_state_and_then_the_changes_of_each_version(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str
) -> None:
    c = cluster()
    c.batch({1: (1, "a"), 2: (2, "b"), 3: (3, "c")})
    client = c.client()
    with running(client, broker, topic) as sink:
        eventually(lambda: sink.is_at(1))
        c.batch({1: None, 2: (20, "b")})
        c.batch({3: (3, "c")})  # the same value
        c.batch({4: (4, "d")})
        eventually(lambda: sink.is_at(4))
    records = broker.topics.records(topic)
    kinds = [(r.key, r.value, header(r, "version"), header(r, "kind")) for r in records]
    assert sorted(kinds, key=lambda kind: (kind[2], kind[0])) == [
        (b'{"user":1}', b'{"n":1,"name":"a"}', "1", "insert"),
        (b'{"user":2}', b'{"n":2,"name":"b"}', "1", "insert"),
        (b'{"user":3}', b'{"n":3,"name":"c"}', "1", "insert"),
        (b'{"user":1}', None, "2", "delete"),
        (b'{"user":2}', b'{"n":20,"name":"b"}', "2", "update"),
        (b'{"user":4}', b'{"n":4,"name":"d"}', "4", "insert"),
    ]
    assert {(header(r, "query"), header(r, "operator"), header(r, "generation")) for r in records} == {
        ("q", "totals", "1")
    }
    assert compacted(records) == state_of(client)


def test_random_changes_through_restarts_and_other_partitions(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str
) -> None:
    rng = random.Random(4)
    c = cluster()
    history: list[Rows] = []

    def batch() -> int:
        history.append(random_rows(rng))
        return c.batch(history[-1])

    batch()
    client = c.client(hosts=(0, 1))
    with running(client, broker, topic) as sink:
        eventually(lambda: sink.is_at(1))
        for n in range(24):
            if n == 6:
                c.partitions = 3
                c.start("run2")
            if n == 12:
                c.hosts[1].kill()
                c.replace_host(1, "b")
            if n == 18:
                c.replace_coordinator()
            version = batch()
        eventually(lambda: sink.is_at(version))
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client)
    got = parsed(of_versions(records))
    assert {v: rows for v, rows in got.items() if v > 1} == changes_of(history, 1)
    assert len({(r.key, r.partition) for r in records}) == len({r.key for r in records})


def test_state_of_processors_and_own_encoders(tmp_path: Path, broker: KafkaBroker, topic: str) -> None:
    flow = Flow(tmp_path)

    def first(of: Any) -> None:
        of.total.update((1, "u"))
        of.visits.appendList([("/", 1)])
        of.pages.updateValue(("/a", "x"), (1, None))
        of.pages.updateValue(("/b", "x"), (2, None))
        of.timers.registerTimer(9_000_000)

    def second(of: Any) -> None:
        of.pages.removeKey(("/b", "x"))

    broker.topics.create(f"{topic}-timers", 1)
    with served(flow) as client:
        flow.batch({("a", 1): first})
        flow.host.heartbeat()
        flow.batch({("a", 1): second})
        flow.host.heartbeat()
        with pytest.raises(RequestError, match=r"'visits' of operator 'op' is a list.*map state"):
            KafkaSink(client, "op", state="visits", topic=topic, bootstrap=broker.address).run()

        def joined(batch: Any) -> list[bytes]:
            return ["|".join(map(str, row.values())).encode() for row in batch.to_pylist()]

        write_up_to(2, client, broker, topic, operator="op", state="pages", encode_key=joined, encode_value=joined)
        flow.batch({("b", 1): first})
        flow.host.heartbeat()
        write_up_to(3, client, broker, topic, operator="op", state="pages", encode_key=joined, encode_value=joined)
        write_up_to(3, client, broker, f"{topic}-timers", operator="op", state="timers")
    flow.close()
    records = broker.topics.records(topic)
    assert sorted((r.key, r.value, header(r, "version"), header(r, "state")) for r in records) == [
        (b"a|1|/a|x", b"1|None", "2", "pages"),
        (b"b|1|/a|x", b"1|None", "3", "pages"),
        (b"b|1|/b|x", b"2|None", "3", "pages"),
    ]
    timers = compacted(broker.topics.records(f"{topic}-timers"))
    assert len(timers) == 2 and list(timers.values()) == [{}, {}]


def test_transactions_of_large_rows_have_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_sink, "STATE_TRANSACTION_BYTES", 1_000_000)
    read = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for _ in range(25):
            read += 1
            yield pa.record_batch({"value": [b"x" * 10_000] * 10})

    lengths = []
    for transaction in kafka_sink._transactions(batches()):
        lengths.append(len(transaction))
        assert read == sum(lengths), "only the rows of one transaction are in memory"
    assert lengths == [10, 10, 5]


# -- deaths of the writer and of the broker --------------------------------------------------------


WRITER = """
import os, signal, sys
import confluent_kafka
from spark_bridge.queryable.client.client import QueryableStateClient
from spark_bridge.queryable.client.kafka_sink import KafkaSink

address, token, topic, bootstrap, until, steps = sys.argv[1:]
left = int(steps)

def step(producer):
    global left
    left -= 1
    if left == 0:
        confluent_kafka.Producer.flush(producer, 10)  # the broker has a part of a version
        os.kill(os.getpid(), signal.SIGKILL)

class Dying(confluent_kafka.Producer):
    def begin_transaction(self):
        step(self)
        super().begin_transaction()

    def produce(self, *args, **kwargs):
        super().produce(*args, **kwargs)
        step(self)

    def commit_transaction(self, seconds):
        step(self)
        super().commit_transaction(seconds)
        step(self)

real, confluent_kafka.Producer = confluent_kafka.Producer, Dying
confluent_kafka.Producer.flush = real.flush
client = QueryableStateClient.connect(address=address, token=token)
sink = KafkaSink(client, "totals", topic=topic, bootstrap=bootstrap)
write, sink._write = sink._write, None

def written(target, parts, at, **options):
    keys = write(target, parts, at, **options)
    if at.version >= int(until):
        sink.close()
    return keys

sink._write = written
sink.run()
"""


def test_writer_killed_at_random_points_leaves_no_gap(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str
) -> None:
    rng = random.Random(11)
    c = cluster()
    history: list[Rows] = [random_rows(rng)]
    c.batch(history[0])
    kills, dead = effort(6, 60), 0
    for n in range(kills + 1):
        for _ in range(2):
            history.append(random_rows(rng))
            c.batch(history[-1])
        steps = 0 if n == kills else rng.randrange(1, 28)
        arguments = [c.hosts[0].address, TOKEN, topic, broker.address, str(c.version), str(steps)]
        done = subprocess.run(
            [sys.executable, "-c", WRITER, *arguments], capture_output=True, timeout=PATIENCE, check=False
        )
        assert done.returncode in (0, -9), done.stderr.decode()
        dead += done.returncode == -9
    assert dead > kills // 2
    committed, everything = broker.topics.records(topic), broker.topics.records(topic, "read_uncommitted")
    assert len(everything) > len(committed), "no version was written in part"
    assert compacted(committed) == state_of(c.client())
    newest = max(int(header(r, "generation")) for r in committed)
    versions = parsed(of_versions(committed, newest))
    begin = min(versions)
    expected = changes_of(history, begin)
    assert {v: rows for v, rows in versions.items() if v > begin} == expected
    seen: dict[tuple[bytes | None, str, str], bytes | None] = {}
    for record in everything:
        place = (record.key, header(record, "generation"), header(record, "version"))
        assert seen.setdefault(place, record.value) == record.value, "a repeated record is another one"


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_writer_killed_between_a_version_and_its_position_knows_the_version(
    cluster: Callable[..., Cluster],
    broker: KafkaBroker,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    is_rolled_back: bool,
) -> None:
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()
    write_up_to(1, client, broker, topic)
    sink = KafkaSink(client, "totals", topic=topic, bootstrap=broker.address)

    def dies(position: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sink._topic, "commit", dies)
    c.batch({1: (2, "a"), 2: (2, "a")})
    with pytest.raises(KeyboardInterrupt):
        sink.run()
    if is_rolled_back:
        go_back(c, 1, "run2")
        c.batch({1: (20, "b")})
        c.batch({1: (30, "b")})
        with pytest.raises(StateVersionError, match=r"rolled back.*version 2"):
            run_to_the_end(client, broker, topic)
        write_up_to(3, client, broker, topic, 2, on_gap="resend")
    else:
        c.batch({1: (3, "a")})
        write_up_to(3, client, broker, topic)
        assert set(of_versions(broker.topics.records(topic))) == {1, 2, 3}
    assert compacted(broker.topics.records(topic)) == state_of(client)


def test_interrupted_state_is_written_again(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster()
    c.batch({user: (user, "a") for user in range(40)})
    client = c.client()
    write_up_to(1, client, broker, topic)
    monkeypatch.setattr(kafka_sink, "STATE_TRANSACTION_ROWS", 1)
    c.batch({user: None if user < 20 else (1, "b") for user in range(40)})
    sink = KafkaSink(client, "totals", topic=topic, bootstrap=broker.address, resend=True)
    write, written = sink._write, count()

    def dies(*args: Any, **options: Any) -> set[bytes]:
        if next(written) == 1:
            raise KeyboardInterrupt
        return write(*args, **options)

    monkeypatch.setattr(sink, "_write", dies)
    with pytest.raises(KeyboardInterrupt):
        sink.run()
    assert compacted(broker.topics.records(topic)) != state_of(client)
    write_up_to(2, client, broker, topic)
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client) and len(state_of(client)) == 20
    assert {header(r, "generation") for r in records} == {"1", "2", "3"}


def test_broker_is_killed_and_returns(cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str) -> None:
    rng = random.Random(5)
    c = cluster()
    history: list[Rows] = [random_rows(rng)]
    c.batch(history[0])
    client = c.client()
    with running(client, broker, topic) as sink:
        eventually(lambda: sink.is_at(1))
        for _ in range(3):
            broker.kill()
            for _ in range(3):
                history.append(random_rows(rng))
                c.batch(history[-1])
            broker.start()
            eventually(lambda: sink.is_at(max(changes_of(history, 0))))
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client)
    assert {v: rows for v, rows in parsed(of_versions(records)).items() if v > 1} == changes_of(history, 1)


def test_hanging_broker_ends_the_writer_with_an_error_and_loses_nothing(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str
) -> None:
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()
    with running(client, broker, topic, timeout=3.0) as sink:
        eventually(lambda: sink.is_at(1))
        with broker.hanging():
            c.batch({1: (2, "a"), 2: (2, "b")})
            error = sink.ended()
    assert isinstance(error, KafkaSinkError) and "have not answered for 3 s" in str(error)
    assert sink.sink.position is not None and sink.sink.position.version == 1
    write_up_to(2, client, broker, topic)
    assert (
        parsed(of_versions(broker.topics.records(topic)))[2]
        == changes_of([{1: (1, "a")}, {1: (2, "a"), 2: (2, "b")}], 1)[2]
    )


def test_full_buffer_holds_the_feed_back(cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str) -> None:
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()
    settings = {"queue.buffering.max.messages": 10}
    with running(client, broker, topic, config=settings) as sink:
        eventually(lambda: sink.is_at(1))
        with broker.hanging():
            c.batch({user: (user, "a") for user in range(500)})
            c.batch({user: (user, "b") for user in range(500)})
            producer = sink.sink._topic._producer
            eventually(lambda: len(producer) == 10)
        eventually(lambda: sink.is_at(3))
    assert compacted(broker.topics.records(topic)) == state_of(client)


def test_second_writer_ends_the_first_one(cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str) -> None:
    c = cluster()
    history: list[Rows] = [{1: (1, "a")}]
    c.batch(history[0])
    client = c.client()
    with running(client, broker, topic) as first:
        eventually(lambda: first.is_at(1))
        with running(c.client(), broker, topic) as second:
            eventually(lambda: second.is_at(1))
            for n in range(2, 6):
                history.append({1: (n, "a"), n: (n, "b")})
                c.batch(history[-1])
            eventually(lambda: second.is_at(5))
            error = first.ended()
    assert isinstance(error, KafkaSinkError) and "Another writer writes to topic" in str(error)
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client)
    assert {v: rows for v, rows in parsed(of_versions(records)).items() if v > 1} == changes_of(history, 1)


# -- gaps ------------------------------------------------------------------------------------------


def test_writer_behind_retention_stops_or_sends_the_state_again(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str
) -> None:
    c = cluster(min_versions_to_retain=2, maintenance_interval=1.0)
    c.batch(dict.fromkeys(range(40), (1, "a")))
    client = c.client()
    write_up_to(1, client, broker, topic)
    for n in range(2, 9):
        c.batch({user: None if user < 10 else (n, "a") for user in range(40)})
        c.remove_old_versions()
    with pytest.raises(StateVersionError, match=r"changes up to version 1\. .*on_gap='resend'.*min_versions_to_retain"):
        run_to_the_end(client, broker, topic)
    assert {header(r, "generation") for r in broker.topics.records(topic)} == {"1"}
    write_up_to(8, client, broker, topic, on_gap="resend")
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client) and len(state_of(client)) == 30
    again = of_versions(records, 2)
    assert set(again) == {8} and sum(value is None for value in again[8].values()) == 10
    c.batch({20: (90, "a")})
    write_up_to(9, client, broker, topic)
    assert compacted(broker.topics.records(topic)) == state_of(client)


@pytest.mark.parametrize("is_running", [True, False])
def test_versions_that_were_rolled_back_are_replaced(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str, is_running: bool
) -> None:
    c = cluster()
    for n in range(1, 7):
        c.batch({1: (n, "a"), n + 10: (n, "a")})
    client = c.client()
    with running(client, broker, topic, on_gap="resend" if is_running else "stop") as sink:
        eventually(lambda: sink.is_at(6))
        if is_running:
            go_back(c, 4, "run2")
            for n in range(5, 8):
                c.batch({1: (10 * n, "b")})
            eventually(lambda: sink.is_at(7))
    if not is_running:
        go_back(c, 4, "run2")
        for n in range(5, 8):
            c.batch({1: (10 * n, "b")})
        with pytest.raises(StateVersionError, match=r"rolled back.*version 6.*on_gap='resend'"):
            run_to_the_end(client, broker, topic)
        write_up_to(7, client, broker, topic, on_gap="resend")
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client)
    assert {header(r, "generation") for r in records} == {"1", "2"}
    assert b'{"user":16}' in of_versions(records)[6] and b'{"user":16}' not in compacted(records)


def test_checkpoint_without_cluster_and_its_rollback(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster()
    for n in range(1, 4):
        c.batch({1: (n, "a"), n + 10: (n, "a")})
    client = CheckpointClient.open(str(c.world.root / "ck"))
    write_up_to(3, client, broker, topic)
    for n in range(4, 7):
        c.batch({1: (n, "a"), n + 10: (n, "a")})
    c.batch({11: None})
    write_up_to(7, CheckpointClient.open(str(c.world.root / "ck")), broker, topic)
    assert set(of_versions(broker.topics.records(topic))) == {3, 4, 5, 6, 7}
    assert compacted(broker.topics.records(topic)) == state_of(c.client())
    go_back(c, 5, "run2")
    for n in range(6, 9):
        c.batch({1: (10 * n, "b")})
    client = CheckpointClient.open(str(c.world.root / "ck"))
    with pytest.raises(StateVersionError, match=r"rolled back.*version 7"):
        run_to_the_end(client, broker, topic)
    write_up_to(8, client, broker, topic, on_gap="resend")
    assert compacted(broker.topics.records(topic)) == state_of(c.client())


def test_forgotten_keys_get_tombstones(cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str) -> None:
    c = cluster()
    c.batch({1: (1, "a"), 2: (2, "b")})
    checkpoint = str(c.world.root / "ck")
    write_up_to(1, CheckpointClient.open(checkpoint), broker, topic)
    forget_keys(checkpoint, "totals", [2], reference="request 1")
    write_up_to(1, CheckpointClient.open(checkpoint), broker, topic, 2, resend=True)
    assert compacted(broker.topics.records(topic)) == {b'{"user":1}': {"n": 1, "name": "a"}}


def test_another_query_of_the_name_is_a_gap(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    c = cluster()
    for n in (1, 2, 3):
        c.batch({1: (n, "a"), n + 10: (n, "a")})
    write_up_to(3, c.client(), broker, topic)
    c.close()
    (tmp_path / "other").mkdir()
    other = Cluster(tmp_path / "other", query_id="q2")
    other.batch({1: (7, "b")})
    client = other.client()
    with pytest.raises(StateVersionError, match=r"has the state of query q up to version 3.*of query q2 now"):
        run_to_the_end(client, broker, topic)
    write_up_to(1, client, broker, topic, 2, on_gap="resend")
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client) == {b'{"user":1}': {"n": 7, "name": "b"}}
    assert {header(r, "query") for r in records if header(r, "generation") == "2"} == {"q2"}
    other.close()


def test_topic_that_gains_partitions_is_emptied_and_written_again(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str
) -> None:
    c = cluster()
    c.batch(dict.fromkeys(range(30), (1, "a")))
    client = c.client()
    with running(client, broker, topic) as sink:
        eventually(lambda: sink.is_at(1))
        broker.topics.add_partitions(topic, 7)
        c.batch(dict.fromkeys(range(20), (2, "a")))
        error = sink.ended()
    assert isinstance(error, StateVersionError) and "had 3 partitions and has 7 now" in str(error)
    assert set(of_versions(broker.topics.records(topic))) == {1}
    with pytest.raises(StateVersionError, match="had 3 partitions at version 1, and has 7 now"):
        run_to_the_end(client, broker, topic)
    write_up_to(2, client, broker, topic, on_gap="resend")
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client)
    assert len({r.partition for r in records}) > 3


def test_lost_position_is_no_gap(cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str) -> None:
    c = cluster()
    c.batch(dict.fromkeys(range(20), (1, "a")))
    client = c.client()
    write_up_to(1, client, broker, topic)
    c.batch(dict.fromkeys(range(5)))
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
    admin.delete_consumer_groups([f"statestore-sink-{topic}"])[f"statestore-sink-{topic}"].result(PATIENCE)
    write_up_to(2, client, broker, topic)
    records = broker.topics.records(topic)
    assert compacted(records) == state_of(client)
    assert {header(r, "generation") for r in records} == {"1", "2", "3"}  # emptied as 2, written as 3


def test_versions_without_changes_move_the_position(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_sink, "QUIET_COMMIT_SECONDS", 0.0)
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()
    with running(client, broker, topic) as sink:
        eventually(lambda: sink.is_at(1))
        c.batch({1: (1, "a")})
        eventually(lambda: sink.is_at(2))
    assert set(of_versions(broker.topics.records(topic))) == {1}


# -- wrong use -------------------------------------------------------------------------------------


def test_wrong_topics_are_refused(cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str) -> None:
    c = cluster()
    c.batch({1: (1, "a")})
    client = c.client()

    def run(name: str, operator: str = "totals", **options: Any) -> None:
        KafkaSink(client, operator, topic=name, bootstrap=broker.address, **options).run()

    with pytest.raises(RequestError, match=r"'nowhere' cannot be written to.*cleanup\.policy=compact"):
        run("nowhere")
    with pytest.raises(RequestError, match=r"on_gap='skip' must be one of 'stop', 'resend'"):
        run(topic, on_gap="skip")
    with pytest.raises(KafkaSinkError, match=r"refuses the settings.*no\.such\.setting"):
        run(topic, config={"no.such.setting": 1})
    broker.topics.create(f"{topic}-foreign", 1)
    broker.topics.send(f"{topic}-foreign", [Record(b"k", b"v")])
    with pytest.raises(RequestError, match=rf"{topic}-foreign\[0\]@0 was not written by a sink of operator 'totals'"):
        run(f"{topic}-foreign")
    assert len(broker.topics.records(f"{topic}-foreign")) == 1
    for name in ("encode_key", "encode_value"):
        with pytest.raises(RequestError, match=rf"{name} returned 2 values for 1 rows"):
            run(topic, **{name: lambda rows: [b"a", b"b"]})
    assert not broker.topics.records(topic)
    write_up_to(1, client, broker, topic)


def test_topic_of_another_state_is_refused_and_its_writer_goes_on(
    tmp_path: Path, broker: KafkaBroker, topic: str
) -> None:
    flow = Flow(tmp_path)
    with served(flow) as client:
        flow.batch({("a", 1): lambda of: of.total.update((1, "u"))})
        flow.host.heartbeat()
        with running(client, broker, topic, "op", state="total") as sink:
            eventually(lambda: sink.is_at(1))
            with pytest.raises(RequestError, match=r"the state 'total' of operator 'op' up to version 1, and not 'p"):
                KafkaSink(client, "op", state="pages", topic=topic, bootstrap=broker.address).run()
            flow.batch({("b", 1): lambda of: of.total.update((1, "u"))})
            flow.host.heartbeat()
            eventually(lambda: sink.is_at(2))
    flow.close()


def test_command_writes_until_ctrl_c(
    cluster: Callable[..., Cluster], broker: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    c = cluster()
    c.batch({1: (1, "a"), 2: (2, "b")})
    settings = tmp_path / "kafka.properties"
    settings.write_text("# for the test\n\nclient.id = the test\ncompression.type=none\n")
    program = [sys.executable, "-m", "ray_statestore", "changes", "totals", "--to-kafka", topic]
    options = ["--bootstrap", broker.address, "--kafka-config", str(settings), "--checkpoint", str(tmp_path / "ck")]
    with subprocess.Popen([*program, *options], stderr=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stderr is not None
            lines = iter(writer.stderr.readline, "")
            first = next(line for line in lines if "generation" in line)
            next(line for line in lines if "writing the changes of totals after version 1" in line)
            c.batch({1: None})
            eventually(lambda: len(broker.topics.records(topic)) == 3)
            writer.send_signal(signal.SIGINT)
            assert writer.wait(PATIENCE) == 0
        finally:
            writer.kill()
    assert "writing the state of totals at version 1, generation 1" in first
    assert compacted(broker.topics.records(topic)) == state_of(c.client())
    settings.write_text("no value\n")
    done = subprocess.run([*program, *options], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Line 1 of" in done.stderr and "must be name=value" in done.stderr


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(EnvironmentProblemError, match=r"KafkaSink needs .*pip install 'ray-statestore\[kafka\]'"):
        KafkaSink(None, "totals", topic="t", bootstrap="b")  # type: ignore[arg-type]


def test_errors_of_partitions_are_no_answers_of_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read ends with an error although errors arrive that may pass."""
    kafka = pytest.importorskip("confluent_kafka")
    clock = count()
    monkeypatch.setattr(kafka_topic, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    topic = kafka_topic.SinkTopic(kafka, "t", "writer", {"bootstrap.servers": "b"}, 30.0, threading.Event())
    error = kafka.KafkaError(kafka.KafkaError.LEADER_NOT_AVAILABLE)
    message = SimpleNamespace(error=lambda: error, partition=lambda: 0)
    topic._consumer = SimpleNamespace(assign=lambda _: None, unassign=lambda: None, consume=lambda *_: [message])
    with pytest.raises(KafkaSinkError, match=r"have not answered for 30 s: .*[Ll]eader not available"):
        list(topic._read_from({0: 0}))
