"""Traces of a batch, a savepoint, a restart with other partitions and a move, over Flight servers.

The coordinator runs in the process of the hosts, so its spans are children of theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends import spans
from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import OperatorFigures
from spark_bridge.exceptions import NotOwnerError
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.task import task_store
from spark_bridge.task.executor import Endpoints
from spark_bridge.task.state_task import task_span
from spark_bridge.task.task_store import TaskStore
from spark_bridge.transport import flight_client
from tests.collector import Recorded, recorded_spans
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.host.host_steps import FAMILIES_SCHEMA, make_host, reg_of, run_task, spec, task, write_offsets

SCHEMA_A = OperatorSchema.from_json(FAMILIES_SCHEMA).families["a"]
VALUE = SCHEMA_A.encode_values(pa.record_batch([pa.array([1])], ["v"]))


def key_of(partition: int) -> pa.BinaryArray:
    """A key of one of two partitions, as it is stored."""
    columns = pa.record_batch([pa.array(range(20))], ["k"])
    groups = key_groups(columns, 1024)
    at = next(i for i, group in enumerate(groups.tolist()) if partition_of(group, 1024, 2) == partition)
    return encode_keys(columns, groups).slice(at, 1)


KEYS = [key_of(0), key_of(1)]


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recorded_spans() as found:
        yield found


class Stream:
    """A query on hosts of one session, each behind a Flight server; a test runs its batches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.world = World(root)
        self.c = self.world.coordinator(0)
        self.hosts: list[Any] = []
        self.servers: list[HostFlightServer] = []
        self.add_host()

    def add_host(self, incarnation: str = "a") -> None:
        number = len(self.hosts)
        self.hosts.append(None)
        server = HostFlightServer(lambda: self.hosts[number], "127.0.0.1", "token", lambda method, args: None)
        self.servers.append(server)
        self.hosts[number] = make_host(self.world, self.c, number, self.root, incarnation)

    def restart_host(self) -> None:
        self.hosts[0] = make_host(self.world, self.c, 0, self.root, "b")

    def register(self, n: int = 2, run: str = "run1") -> None:
        assert self.c.register_query(reg_of(self.world, spec(n), run=run)).refusal is None

    def task(self, batch: int, p: int, run: str = "run1") -> None:
        addresses = tuple(server.address for server in self.servers)
        given = task(batch, p, run)
        with task_span(given):
            store = TaskStore(given, 2, 1024, Endpoints(addresses, "token", "", PATIENCE))
            store.open()
            store.get_many(KEYS[p], "a")
            store.stage(KEYS[p], VALUE, "a")
            store.commit(OperatorFigures())

    def batch(self, batch: int) -> None:
        write_offsets(self.world, batch, 0, 1000)
        for p in range(2):
            self.task(batch, p)
        self.world.commit_spark(batch)

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
        task_store._owners.clear()
        flight_client._clients.clear()


@pytest.fixture
def stream(recorded: Recorded, tmp_path: Path) -> Iterator[Stream]:
    made = Stream(tmp_path)
    yield made
    made.close()


def test_one_trace_a_batch_from_the_task_to_storage(recorded: Recorded, stream: Stream) -> None:
    stream.register()
    recorded.exporter.clear()
    stream.batch(0)
    stream.c.batch_committed("run1", 0)
    stream.hosts[0].heartbeat()
    wait_until(lambda: len(recorded.named("host.apply")) == 2)
    trace_id, root_id = spans.batch("run1", 1).ids
    assert {s.context.trace_id for s in recorded.all()} == {trace_id}
    paths = {" > ".join(recorded.path(s)) for s in recorded.all()}
    commit = "task > task.commit > host.commit"
    acknowledged = f"{commit} > host.acknowledge > coordinator.acknowledge"
    assert {
        "task > task.open > host.open > coordinator.open_batch > coordinator.assign",
        "task > task.read > host.read",
        f"{commit} > host.changelog > storage.put",
        f"{acknowledged} > coordinator.manifest > storage.put",
        "coordinator.complete",
        "host.apply",
    } <= paths
    topmost = [s for s in recorded.all() if len(recorded.path(s)) == 1]
    assert {s.name for s in topmost} == {"task", "coordinator.complete", "host.apply"}
    assert {s.parent.span_id for s in topmost if s.parent} == {root_id}
    read = recorded.named("host.read")[0]
    assert read.attributes == {"statestore.operator": "op", "statestore.partition": 0}


def test_an_attempt_that_fails_and_the_next_one_are_in_the_same_trace(recorded: Recorded, stream: Stream) -> None:
    stream.register()
    write_offsets(stream.world, 0, 0, 1000)
    with pytest.raises(NotOwnerError):
        stream.hosts[0].commit(task(0), None, {})  # no task has opened the partition
    stream.task(0, 0)
    refused, accepted = recorded.named("host.commit")
    assert refused.status.description == "NotOwnerError"
    assert accepted.status.is_unset
    assert refused.context.trace_id == accepted.context.trace_id


def test_a_host_that_comes_back_loads_within_the_trace(recorded: Recorded, stream: Stream) -> None:
    stream.register()
    stream.batch(0)
    stream.c.batch_committed("run1", 0)
    stream.restart_host()
    recorded.exporter.clear()
    stream.task(1, 0)
    assert ["task", "task.open", "host.open", "host.load", "storage.get"] in map(recorded.path, recorded.all())


def test_a_restart_with_other_partitions(recorded: Recorded, stream: Stream) -> None:
    stream.register()
    stream.batch(0)
    recorded.exporter.clear()
    stream.register(4, run="run2")
    claim = recorded.one("coordinator.claim")
    assert recorded.path(claim) == ["coordinator.register", "coordinator.claim"]
    assert claim.attributes == {"statestore.was_known": False, "statestore.rescaled": True}
    registered = recorded.one("coordinator.register")
    assert registered.parent is not None
    assert (registered.context.trace_id, registered.parent.span_id) == spans.run("run2").ids
    assert registered.attributes is not None
    assert (registered.attributes["statestore.query_id"], registered.attributes["statestore.version"]) == ("q", 1)
    write_offsets(stream.world, 1, 0, 1000)
    run_task(stream.hosts, 1, 3, "run2")
    load = recorded.one("host.load")
    assert recorded.path(load) == ["host.open", "host.load"]
    assert load.attributes is not None and load.attributes["statestore.rescaled"] is True
    assert load.context.trace_id == spans.batch("run2", 2).ids[0]


def test_savepoint_has_its_own_trace(recorded: Recorded, stream: Stream) -> None:
    stream.register()
    stream.batch(0)
    stream.c.batch_committed("run1", 0)
    recorded.exporter.clear()
    stream.c.trigger_savepoint("request", "run1", str(stream.root / "saved"))

    def is_done() -> bool:
        stream.hosts[0].heartbeat()
        return stream.c.savepoint_status("request").path is not None

    wait_until(is_done)
    wait_until(lambda: recorded.named("savepoint"))
    root = recorded.one("savepoint")
    assert root.parent is None and root.attributes is not None
    savepoint_id = root.attributes["statestore.savepoint_id"]
    assert (root.context.trace_id, root.context.span_id) == spans.savepoint("run1", int(str(savepoint_id))).ids
    below = {s.name for s in recorded.all() if s.parent and s.parent.span_id == root.context.span_id}
    assert below == {"savepoint.trigger", "savepoint.spark_files", "host.export", "savepoint.metadata"}
    exported = [(s.attributes or {})["statestore.partition"] for s in recorded.named("host.export")]
    assert sorted(map(int, map(str, exported))) == [0, 1]
    assert ["savepoint", "savepoint.spark_files", "storage.put"] in map(recorded.path, recorded.all())
    assert ["savepoint", "host.export", "storage.put"] in map(recorded.path, recorded.all())


def test_moving_partition_is_loaded_concurrently_with_the_batch(recorded: Recorded, stream: Stream) -> None:
    stream.register()
    stream.batch(0)
    stream.c.batch_committed("run1", 0)
    recorded.exporter.clear()
    stream.add_host()

    def has_moved() -> bool:
        stream.c.expire()
        for host in stream.hosts:
            host.heartbeat()
        return any((s.attributes or {})["statestore.moved"] == 1 for s in recorded.named("coordinator.assign"))

    wait_until(has_moved)
    warm = recorded.one("host.warm_up")
    assert warm.parent is not None
    assert (warm.context.trace_id, warm.parent.span_id) == spans.batch("run1", 2).ids
    assert recorded.path(recorded.one("host.load")) == ["host.warm_up", "host.load"]
    assert ["host.warm_up", "host.load", "storage.get"] in map(recorded.path, recorded.all())


def test_calls_have_no_other_headers_while_tracing_is_off(tmp_path: Path) -> None:
    assert not spans.is_on()
    client = flight_client.HostClient("grpc://127.0.0.1:1", "token")
    assert client._options() is client._options()
    client.close()
