"""A task's store over real hosts and their Flight servers: several families, scans and commits, also when a host
dies.

A worker process excludes objects that outlive tasks from garbage collection, and can still import modules.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups
from backends.encoding.sorted_pairs import PAIRS_SCHEMA
from backends.exceptions import HostMemoryBusyError
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.exceptions import BatchHeldError, QueryBusyError
from coordinator_actor.messages import DUPLICATES, BatchTimes, OperatorFigures
from spark_bridge import flight_server
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError, PartitionMismatchError
from spark_bridge.flight_server import HostFlightServer, changes_of
from spark_bridge.task import task_store as task_client
from spark_bridge.task.executor import Endpoints
from spark_bridge.task.state_task import StateTask, partitions_of
from spark_bridge.task.task_store import Spool, TaskStore
from spark_bridge.transport import flight_client
from spark_bridge.transport.protocol import OpenReply, TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.host.host_steps import FAMILIES_SCHEMA, binary, make_host, reg_of, spec, task, write_offsets


class Served:
    """A host behind a Flight server; ``stop`` leaves its callers without an answer."""

    def __init__(self, world: World, coordinator: Coordinator, incarnation: str, tmp_path: Path) -> None:
        self.server = HostFlightServer(lambda: self.host, "127.0.0.1", "token", lambda method, args: None)
        self.address = f"grpc://127.0.0.1:{self.server.port}"
        self.host: Any = make_host(world, coordinator, 0, tmp_path, incarnation)

    def stop(self) -> None:
        self.server.shutdown()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[list[Served]]:
    started: list[Served] = []
    yield started
    for one in started:
        one.stop()
    task_client._owners.clear()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def start(world: World, served: list[Served], tmp_path: Path) -> Coordinator:
    c = world.coordinator(0)
    served.append(Served(world, c, "a", tmp_path))
    assert c.register_query(reg_of(world, spec(uses_time=True))).refusal is None
    return c


def store(served: list[Served], batch: int, p: int = 0, timeout: float = PATIENCE, key_groups: int = 1024) -> TaskStore:
    made = TaskStore(task(batch, p), 2, key_groups, Endpoints(tuple(s.address for s in served), "token", "", timeout))
    made.open()
    return made


def keys_of(n: int) -> pa.BinaryArray:
    return binary(*(b"\x00\x00%06d" % i for i in range(n)))


def test_history_records_the_work_of_a_task(world: World, served: list[Served], tmp_path: Path) -> None:
    c = start(world, served, tmp_path)
    write_offsets(world, 0, 7, 1000)
    for p, duplicates in ((0, 3.0), (1, 4.0)):
        store(served, 0, p).commit(OperatorFigures(10, 5, 2, 1, {DUPLICATES: duplicates}))
    world.commit_spark(0)
    run_id = task(0, 0).run_id
    c.batch_committed(run_id, 0)
    (record,) = c.checkpoint_stats(run_id)["history"]
    done = ("rows", "updated", "removed", "late", "duplicates")
    assert [record[name] for name in done] == [20, 10, 4, 2, 7]


def test_task_reads_and_commits(world: World, served: list[Served], tmp_path: Path) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 7, 1000)
    first, other = store(served, 0), store(served, 0, 1)
    assert (first.batch_id, first.times, first.key_groups) == (0, BatchTimes(1000, 7, 0), (0, 512))
    assert first.schema.to_json() == FAMILIES_SCHEMA
    keys = keys_of(5000)
    first.stage(keys, keys, "a")
    first.stage(binary(b"\x00\x00000001", b"\x00\x00x"), binary(None, b"x"), "a")  # the last counts
    first.stage(keys.slice(0, 2), keys.slice(2, 2), "b")
    assert first.get_many(keys.slice(0, 1), "a").to_pylist() == [None]  # what is staged is not seen
    first.commit(OperatorFigures(num_rows_updated=1))
    other.commit(OperatorFigures())
    world.commit_spark(0)
    write_offsets(world, 1, 8, 2000)

    again = store(served, 1)
    assert again.get_many(keys.slice(0, 3), "a").to_pylist() == [keys[0].as_py(), None, keys[2].as_py()]
    assert again.get_many(keys.slice(0, 3), "b").to_pylist() == [keys[2].as_py(), keys[3].as_py(), None]
    found = [
        k
        for b in again.scan(
            [(b"\x00\x00000004", b"\x00\x00000006"), (b"\x00\x01", None), (b"", b"\x00\x00000002")], "a"
        )
        for k in b.column(0).to_pylist()
    ]
    assert found == [keys[4].as_py(), keys[5].as_py(), keys[0].as_py()]
    assert sum(b.num_rows for b in again.scan([(b"", None)], "a", limit=10)) == 10
    assert list(again.scan([(b"", None)], "unknown")) == []


def test_buffers_from_a_host_are_aligned(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC puts buffers anywhere, and Arrow's query engine warns about them, or refuses them."""
    start(world, served, tmp_path)
    committed: list[pa.RecordBatch] = []

    def kept(batches: list[pa.RecordBatch]) -> Any:
        committed.extend(batches)
        return changes_of(batches)

    monkeypatch.setattr(flight_server, "changes_of", kept)
    for batch, n in enumerate((1, 2, 3, 300, 5000)):  # the places depend on the lengths
        write_offsets(world, batch, 7, 1000)
        made, keys = store(served, batch), keys_of(n)
        values = made.get_many(keys, "a")
        assert len(values) == n
        made.stage(keys, keys, "a")
        made.commit(OperatorFigures())
        store(served, batch, 1).commit(OperatorFigures())
        world.commit_spark(batch)
        write_offsets(world, batch + 1, 8, 2000)
        scanned = [column for b in store(served, batch + 1).scan([(b"", None)], "a") for column in b.columns]
        arrays = [values, *scanned, *(column for b in committed for column in b.columns)]
        assert len(arrays) > 2
        assert all(array.buffers()[1].address % 4 == 0 for array in arrays), n


def calls_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that the host's server gets from now on."""
    calls: list[str] = []

    def note(name: str, real: Any) -> None:
        def noted(*args: Any) -> Any:
            calls.append(args[1].type if name == "do_action" else name)
            return real(*args)

        monkeypatch.setattr(served.server, name, noted)

    for name in ("do_action", "do_exchange", "do_put"):
        note(name, getattr(served.server, name))
    return calls


def unopened(served: list[Served], batch: int, p: int = 0, key_groups: int = 1024) -> TaskStore:
    endpoints = Endpoints(tuple(s.address for s in served), "token", "", PATIENCE)
    return TaskStore(task(batch, p), 2, key_groups, endpoints)


def test_a_task_that_knows_its_owner_opens_with_its_first_get(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 7, 1000)
    keys = keys_of(100)
    assert not unopened(served, 0).knows_owner
    first, other = store(served, 0), store(served, 0, 1)
    first.stage(keys, keys, "a")
    first.commit(OperatorFigures())
    other.commit(OperatorFigures())
    world.commit_spark(0)
    write_offsets(world, 1, 8, 2000)

    calls = calls_of(served[0], monkeypatch)
    again = unopened(served, 1)
    assert again.knows_owner
    assert again.get_many(pa.concat_arrays([keys.slice(98), binary(b"\x00\x00x")]), "a").to_pylist() == [
        *keys.slice(98).to_pylist(),
        None,
    ]
    assert again.get_many(keys.slice(0, 0), "a").to_pylist() == []
    again.stage(keys.slice(0, 1), keys.slice(1, 1), "a")
    again.commit(OperatorFigures())
    assert calls == ["do_exchange", "do_exchange", "do_put"]
    # What the opening call has told is known.
    assert again.times == BatchTimes(2000, 8, 7)
    assert again.schema.to_json() == FAMILIES_SCHEMA
    assert len(calls) == 3
    # A task without keys to read opens with its commit.
    empty = unopened(served, 1, 1)
    empty.commit(OperatorFigures())
    assert calls[3:] == ["open", "do_put"]
    world.commit_spark(1)
    write_offsets(world, 2, 9, 3000)
    assert store(served, 2).get_many(keys.slice(0, 1), "a").to_pylist() == [keys[1].as_py()]


def test_a_get_that_opens_finds_the_new_owner(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    keys = keys_of(10)
    for p in (0, 1):
        held = store(served, 0, p)
        held.stage(keys if p == 0 else keys.slice(0, 0), keys if p == 0 else keys.slice(0, 0), "a")
        held.commit(OperatorFigures())
    world.commit_spark(0)
    write_offsets(world, 1, 0, 2000)
    # The owner is gone, and another one has its partitions.
    successor = Served(world, c, "b", tmp_path)
    served.append(successor)
    served[0].stop()
    again = unopened(served, 1)
    assert again.knows_owner
    assert again.get_many(keys, "a").to_pylist() == keys.to_pylist()
    again.commit(OperatorFigures())
    # A host that is not the owner names the owner.
    asked = Served(world, c, "c", tmp_path)
    served.append(asked)
    asked.host.open = lambda task: OpenReply(successor.address, 1)
    task_client._owners[("run1", "op", 1)] = (asked.address, "token")
    calls = calls_of(asked, monkeypatch)
    other = unopened(served, 1, 1)
    assert other.get_many(keys, "a").to_pylist() == [None] * 10
    assert calls == ["do_exchange"]
    assert task_client._owners[("run1", "op", 1)] == (successor.address, "token")


def test_a_held_batch_is_not_sent_its_keys_again_and_again(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    store(served, 0)
    monkeypatch.setattr(task_client, "HELD_DELAY", 0.02)
    opens, held = served[0].host.open, [BatchHeldError("a savepoint")] * 4

    def holding(task: Any) -> Any:
        if held:
            raise held.pop()
        return opens(task)

    monkeypatch.setattr(served[0].host, "open", holding)
    calls = calls_of(served[0], monkeypatch)
    assert unopened(served, 0).get_many(keys_of(3), "a").to_pylist() == [None] * 3
    assert calls == ["do_exchange", *["open"] * 4, "do_exchange"]


def test_a_task_whose_query_is_busy_asks_again(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    given, refusals = served[0].host.grants.for_task, [QueryBusyError("1000 messages wait already")] * 2

    def busy(task: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return given(task)

    monkeypatch.setattr(served[0].host.grants, "for_task", busy)
    assert store(served, 0).batch_id == 0 and not refusals


def test_a_commit_for_which_its_host_has_no_room_yet_stays_with_that_host(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long others take there: longer than it would look for another owner."""
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    monkeypatch.setattr(task_client, "HELD_DELAY", 0.02)
    host, busy = served[0].host, [HostMemoryBusyError("busy")] * 4

    @contextmanager
    def admitted(run_id: str, nbytes: int, what: str, seconds: float) -> Iterator[None]:
        assert nbytes > 3 * len(keys) and seconds > 0
        if busy:
            raise busy.pop()
        yield

    keys = keys_of(3)
    monkeypatch.setattr(
        host, "memory", SimpleNamespace(admitted=admitted, note=host.memory.note, resize=host.memory.resize)
    )
    held = store(served, 0)
    held._endpoints = dataclasses.replace(held._endpoints, timeout=0.01)
    calls = calls_of(served[0], monkeypatch)
    held.stage(keys, keys, "a")
    held.commit(OperatorFigures())
    assert not busy and calls == ["do_put"] * 5


@pytest.mark.parametrize("first", ["get", "commit"])
def test_an_attempt_does_not_open_a_second_time_without_saying_so(
    world: World, served: list[Served], tmp_path: Path, first: str
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    before = store(served, 0)
    again = unopened(served, 0)
    again._task = msgspec.structs.replace(before._task, invocation="another")
    with pytest.raises(PartitionMismatchError, match="a second time"):
        again.get_many(keys_of(1), "a") if first == "get" else again.commit(OperatorFigures())


@pytest.mark.parametrize("lost", [HostUnavailableError("died"), NotOwnerError("moved")])
def test_open_is_repeated_if_the_host_is_lost_before_get(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    keys = keys_of(3)
    for p in (0, 1):
        held = store(served, 0, p)
        held.stage(keys.slice(p), keys.slice(p), "a")
        held.commit(OperatorFigures())
    world.commit_spark(0)
    write_offsets(world, 1, 0, 2000)
    gets, left = served[0].host.reads.get_many, [lost]

    def losing(*args: Any) -> Any:
        if left:
            raise left.pop()
        return gets(*args)

    monkeypatch.setattr(served[0].host.reads, "get_many", losing)
    calls = calls_of(served[0], monkeypatch)
    again = unopened(served, 1)
    assert again.get_many(keys, "a").to_pylist() == keys.to_pylist()
    again.commit(OperatorFigures())
    assert calls == ["do_exchange", "open", "do_exchange", "do_put"]


def test_tasks_of_a_worker_share_the_knowledge_of_a_lost_host(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    for p in (0, 1):
        store(served, 0, p).commit(OperatorFigures())
    world.commit_spark(0)
    write_offsets(world, 1, 0, 2000)
    served[0].stop()
    gone = served[0].address
    served.append(Served(world, served[0].host.coordinator, "b", tmp_path))
    called: list[str] = []
    make = flight_client.HostClient
    monkeypatch.setattr(
        flight_client, "HostClient", lambda address, *args, **kw: called.append(address) or make(address, *args, **kw)
    )
    for p in (0, 1):
        store(served, 1, p).commit(OperatorFigures())
        assert gone not in {address for address, _ in task_client._owners.values()}
    assert gone not in called, "a connection of the first batch has shown that the host is gone"


def test_a_task_says_which_owner_it_cannot_reach_and_asks_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []
    slept: list[float] = []

    class Asked:
        def __init__(self, address: str, *_: object, **__: object) -> None:
            self.address = address

        def open(self, asked: TaskIdentity) -> OpenReply:
            opened.append((self.address, asked.unreachable))
            if self.address == "dead":
                raise HostUnavailableError("connection refused")
            return OpenReply("dead" if len(opened) < 8 else None, 0, 1024, FAMILIES_SCHEMA)

    monkeypatch.setattr(task_client, "client_for", Asked)
    monkeypatch.setattr(task_client.time, "sleep", slept.append)
    TaskStore(task(0), 2, 1024, Endpoints(("host",), "token", "", PATIENCE)).open()
    task_client._owners.clear()
    assert opened == [("host", ""), ("dead", ""), *[("host", "dead"), ("dead", "")] * 3, ("host", "dead")]
    assert slept == [0.02, 0.04, 0.08, 0.1]


def test_a_known_owner_that_takes_no_connection_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    class Asked:
        def __init__(self, address: str, *_: object, **__: object) -> None:
            asked.append((address, ""))
            if address == "quiet":
                raise HostUnavailableError("took none of 2 connections")
            self.address = address

        def open(self, opening: TaskIdentity) -> OpenReply:
            asked.append((self.address, opening.unreachable))
            return OpenReply(None, 0, 1024, FAMILIES_SCHEMA)

        def get_many(self, command: object, keys: pa.BinaryArray) -> pa.BinaryArray:
            return keys

    monkeypatch.setattr(task_client, "client_for", Asked)
    identity, other = task(0), task(0, 1)
    for one in (identity, other):
        task_client._owners[one.run_id, one.operator, one.partition] = ("quiet", "token")
    TaskStore(identity, 2, 1024, Endpoints(("host",), "token", "", PATIENCE)).get_many(pa.array([b"k"]))
    assert asked == [("quiet", ""), ("host", ""), ("host", "quiet")]
    assert "quiet" not in {address for address, _ in task_client._owners.values()}
    task_client._owners.clear()


def test_a_get_that_opens_refuses_other_key_groups(world: World, served: list[Served], tmp_path: Path) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    store(served, 0)
    with pytest.raises(PartitionMismatchError, match=r"shuffled by 512 key groups"):
        unopened(served, 0, key_groups=512).get_many(keys_of(1), "a")


def test_rows_that_were_shuffled_by_other_key_groups_are_refused(
    world: World, served: list[Served], tmp_path: Path
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    with pytest.raises(
        PartitionMismatchError, match=r"shuffled by 512 key groups.*query has 1024.*No state was touched"
    ):
        store(served, 0, key_groups=512)
    store(served, 0)  # "Make the DataFrame again": its rows are shuffled by the key groups of now


def test_row_carries_its_partition() -> None:
    users = pa.record_batch({"user": pa.array(range(100), pa.int64()), "n": pa.array([0] * 100)})
    expected = key_groups(users.select(["user"]), 1024).astype(int) * 3 // 1024
    assert partitions_of(users, ["user"], 1024, 3) == expected.tolist()
    assert set(expected) == {0, 1, 2}


def test_a_task_refuses_rows_of_another_partition() -> None:
    work = StateTask("op", 3, 1024, ("user",), None, uses_time=False)  # type: ignore[arg-type]
    users = pa.record_batch({"user": pa.array(range(100), pa.int64())})
    owners = np.array(partitions_of(users, ["user"], 1024, 3))
    own, others = (users.take(pa.array(np.flatnonzero(owners == p))) for p in (0, 1))
    assert work._partition(0, own) == 0
    assert work._partition(2, None) == 2
    with pytest.raises(PartitionMismatchError, match="union"):
        work._partition(3, None)
    with pytest.raises(PartitionMismatchError, match=r"Task 0 .* rows of shuffle partition 1 of 3.*coalesce"):
        work._partition(0, others)
    assert list(work._checked(own, iter([own.slice(0, 0), own.slice(3)]), 0)) == [own, own.slice(3)]
    for mixed in ([*range(5), len(own) + 1], [len(own) + 1, *range(5)]):
        both = pa.Table.from_batches([own, others]).combine_chunks().to_batches()[0].take(pa.array(mixed))
        with pytest.raises(PartitionMismatchError, match="several shuffle partitions"):
            list(work._checked(own, iter([both]), 0))


def test_scan_resumes_where_a_host_has_died(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    first, other = store(served, 0), store(served, 0, 1)
    keys = keys_of(100)
    first.stage(keys, keys, "a")
    first.commit(OperatorFigures())
    other.commit(OperatorFigures())
    world.commit_spark(0)
    write_offsets(world, 1, 0, 2000)
    again = store(served, 1)

    scan, died = served[0].host.reads.scan, []

    def dying(command: Any, ranges: Any) -> Iterator[pa.RecordBatch]:
        for batch in scan(command, ranges):
            yield batch.slice(0, 10)
            died.append(True)
            raise HostUnavailableError("gone")

    monkeypatch.setattr(served[0].host.reads, "scan", dying)
    successor = Served(world, c, "b", tmp_path)
    again._endpoints = Endpoints((served[0].address, successor.address), "token", "", PATIENCE)
    served.append(successor)
    ranges = [(b"\x00\x00000050", None), (b"", b"\x00\x00000020")]
    found = [k for b in again.scan(ranges, "a") for k in b.column(0).to_pylist()]
    assert died and found == [*keys.to_pylist()[50:], *keys.to_pylist()[:20]]


def test_changes_beyond_the_budget_can_be_sent_repeatedly() -> None:
    staged = Spool(PAIRS_SCHEMA, 200, None)

    def add(family: str, key: pa.BinaryArray, value: pa.BinaryArray) -> None:
        staged.add(pa.RecordBatch.from_arrays([key, value], schema=PAIRS_SCHEMA), family)

    for i in range(20):
        add("a" if i % 2 else "b", binary(b"k%02d" % i), binary(b"x" * i if i % 3 else None))
    once, twice = ([(f, *b.to_pylist()[0].values()) for f, b in staged.labelled()] for _ in range(2))
    assert once == twice == [("a" if i % 2 else "b", b"k%02d" % i, b"x" * i if i % 3 else None) for i in range(20)]
    add("c", binary(b"later"), binary(b""))
    assert [f for f, _ in staged.labelled()][-1] == "c" and len(list(staged.labelled())) == 21
    staged.close()


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_a_read_of_changes_that_is_overtaken_fails_and_loses_none(memory: int) -> None:
    batches = [pa.RecordBatch.from_arrays([binary(b"k%d" % i)] * 2, schema=PAIRS_SCHEMA) for i in range(5)]
    with Spool(PAIRS_SCHEMA, memory, None) as staged:
        for batch in batches[:4]:
            staged.add(batch)
        overtaken, complete = staged.batches(), staged.batches()
        assert [next(overtaken), next(complete)] == [batches[0]] * 2
        with pytest.raises(RuntimeError, match="while they were being read"):
            next(overtaken)
        assert list(complete) == batches[1:4]
        begun = staged.batches()
        next(begun)
        staged.add(batches[4])
        with pytest.raises(RuntimeError, match="while they were being read"):
            next(begun)
        assert list(staged.batches()) == batches


def test_a_scan_that_is_left_early_is_not_read_to_its_end(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    sent = []

    def endless(command: Any, ranges: Any) -> Iterator[pa.RecordBatch]:
        keys = keys_of(10_000)
        while len(sent) < 2000:
            sent.append(len(keys))
            yield pa.RecordBatch.from_arrays([keys, keys], schema=PAIRS_SCHEMA)

    monkeypatch.setattr(served[0].host.reads, "scan", endless)
    scanned = store(served, 0).scan([(b"", None)], "a")
    next(scanned)
    scanned.close()
    time.sleep(0.2)
    assert len(sent) < 200


def test_scan_that_never_succeeds_times_out(
    world: World, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(world, served, tmp_path)
    write_offsets(world, 0, 0, 1000)
    calls = []

    def failing(command: Any, ranges: Any) -> Iterator[pa.RecordBatch]:
        calls.append(command)
        raise HostUnavailableError("always")

    # Calls take a thousandth of a second each: however slow the machine is, there is time for several.
    now = [0.0]

    def wait(seconds: float = 0.001) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(task_client, "time", SimpleNamespace(monotonic=wait, sleep=wait))
    monkeypatch.setattr(served[0].host.reads, "scan", failing)
    with pytest.raises(HostUnavailableError, match=r"within 1 s.*always"):
        list(store(served, 0, timeout=0.6).scan([(b"", None)], "a"))
    assert 2 <= len(calls) < 50


CHILD = """
import gc, importlib, sys
sys.path.insert(0, sys.argv[1])
import packed.one
from spark_bridge.task.executor import settle_worker
importers = lambda: [f for f in sys.path_importer_cache.values() if type(f).__name__ == "zipimporter"]
assert importers()
settle_worker()
frozen = gc.get_freeze_count()
assert frozen > 1000 and not importers()
junk = [[] for _ in range(5000)]
settle_worker()
assert gc.get_freeze_count() <= frozen  # what later tasks make is collected as ever
importlib.invalidate_caches()
import packed.two
assert (packed.one.x, packed.two.x) == (1, 2)
"""


def test_a_settled_worker_imports_from_zip_files_and_freezes_once(tmp_path: Path) -> None:
    archive = tmp_path / "lib.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("packed/__init__.py", "")
        packed.writestr("packed/one.py", "x = 1")
        packed.writestr("packed/two.py", "x = 2")
    subprocess.run([sys.executable, "-c", CHILD, str(archive)], check=True, timeout=HANG)
