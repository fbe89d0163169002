"""The memory that a host reports, and a commit that exceeds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pytest

from backends.exceptions import HostMemoryBusyError, HostMemoryError
from backends.formats.changelog import Changes
from spark_bridge import flight_server
from spark_bridge.flight_server import HostFlightServer
from spark_bridge.transport.flight_client import HostClient
from spark_bridge.transport.protocol import COMMIT_SCHEMA, CommitCommand, GetCommand, TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.host.host_steps import ch, make_host, plan_spark, reg_of, spec, task

MIB = 1 << 20


def held(host) -> dict[str, int]:
    return host.describe()["memory"]


def commit(host, given: TaskIdentity, changes: Changes) -> None:
    assert host.open(given).redirect is None
    host.commit(given, changes, {})


def test_a_commit_without_room_is_refused_and_the_next_attempt_with_less_succeeds(tmp_path):
    w = World(tmp_path)
    c = w.coordinator(0)
    host = make_host(w, c, 0, tmp_path, host_memory=18 * MIB)
    assert c.register_query(reg_of(w, spec())).refusal is None
    plan_spark(w, 0)
    assert held(host)["host_memory"] == 18 * MIB
    before = held(host)["deltas"]
    large = Changes.of(
        pa.array([b"%06d" % i for i in range(80)], pa.binary()),
        pa.array([os.urandom(100_000) for _ in range(80)], pa.binary()),
    )
    assert 2 * large.nbytes < 18 * MIB
    commit(host, task(0), ch(b"v" * 3 * MIB))
    assert 6 * MIB <= held(host)["deltas"] - before < 7 * MIB
    with pytest.raises(HostMemoryError, match=r"The commit of version 1 of .* needs .* host_memory=18,874,368"):
        commit(host, task(0, 1), large)
    assert held(host)["staged_commits"] == 0
    commit(host, task(0, 1), ch(b"w"))
    w.commit_spark(0)
    assert host.open(task(1)).version == 1 and host.open(task(1, 1)).version == 1
    assert held(host)["deltas"] == before
    host.close()


def test_requests_are_counted_while_they_are_received(tmp_path, monkeypatch):
    w = World(tmp_path)
    host = make_host(w, w.coordinator(0), 0, tmp_path, host_memory=65 * MIB)
    assert host.coordinator.register_query(reg_of(w, spec())).refusal is None
    plan_spark(w, 0)
    server = HostFlightServer(lambda: host, "127.0.0.1", "token", lambda method, args: None)
    client = HostClient(f"grpc://127.0.0.1:{server.port}", "token", timeout=PATIENCE)
    given = task(0)
    assert host.open(given).redirect is None
    seen = []

    def changes() -> Iterator[tuple[str, pa.RecordBatch]]:
        for n in (1, 2):
            values = pa.array([os.urandom(MIB)], pa.binary())
            yield "default", pa.record_batch([pa.array([b"k%d" % n], pa.binary()), values], schema=COMMIT_SCHEMA)
            # The stream continues when the host has received this part.
            seen.append(wait_until(lambda least=n * MIB: (now := held(host)["requests"]) >= least and now))

    get_many = host.reads.get_many

    def looked_up(*args: object) -> pa.BinaryArray:
        seen.append(held(host)["requests"])
        return get_many(*args)

    try:
        client.commit(CommitCommand(given), changes())
        assert MIB <= seen[0] < 1.1 * MIB and 2 * MIB <= seen[1] < 2.1 * MIB
        wait_until(lambda: held(host)["requests"] == 0)
        monkeypatch.setattr(host.reads, "get_many", looked_up)
        keys = pa.array([os.urandom(MIB)], pa.binary())
        client.get_many(GetCommand(given.run_id, given.operator, 0, 0), keys)
        assert MIB <= seen[2] < 1.1 * MIB
        wait_until(lambda: held(host)["requests"] == 0)
    finally:
        client.close()
        server.shutdown()
        host.close()


def test_a_commit_waits_at_its_task_until_the_host_has_room(tmp_path, monkeypatch):
    """The data that it has sent stays in the connection: the host reads none of it."""
    w = World(tmp_path)
    host = make_host(w, w.coordinator(0), 0, tmp_path, host_memory=64 * MIB)
    assert host.coordinator.register_query(reg_of(w, spec())).refusal is None
    plan_spark(w, 0)
    server = HostFlightServer(lambda: host, "127.0.0.1", "token", lambda method, args: None)
    clients = [HostClient(f"grpc://127.0.0.1:{server.port}", "token", timeout=PATIENCE) for _ in range(2)]
    written, go_on = threading.Event(), threading.Event()
    commit_at_host, most = host.commit, []

    def held_up(*args: object) -> object:
        written.set()
        assert go_on.wait(PATIENCE)
        most.append(held(host)["requests"])
        return commit_at_host(*args)

    monkeypatch.setattr(host, "commit", held_up)
    errors = []

    def send(client: HostClient, partition: int) -> None:
        values = pa.array([os.urandom(MIB) for _ in range(8)], pa.binary())
        keys = pa.array([b"k%d" % n for n in range(8)], pa.binary())
        batches = [pa.record_batch([keys.slice(n, 1), values.slice(n, 1)], schema=COMMIT_SCHEMA) for n in range(8)]
        command = CommitCommand(task(0, partition), nbytes=sum(b.nbytes for b in batches))
        try:
            assert host.open(command.task).redirect is None
            client.commit(command, (("default", b) for b in batches))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=send, args=(c, p), daemon=True) for p, c in enumerate(clients)]
    try:
        threads[0].start()
        assert written.wait(PATIENCE)
        # A second commit with a peak of 24 MiB does not fit: some 56 MiB belong to RocksDB or are reserved.
        deltas = host.memory.claim("deltas", 20 * MIB, "A commit")
        threads[1].start()
        wait_until(lambda: host.memory.num_waiting == 1)
        assert held(host)["requests"] == 0 and host.describe()["waiting_commits"] == 1
        go_on.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert not errors and len(most) == 2 and not host.memory.num_waiting
        del deltas
    finally:
        go_on.set()
        for client in clients:
            client.close()
        server.shutdown()
        host.close()


def test_task_learns_why_its_large_commit_is_not_received(tmp_path, monkeypatch):
    w = World(tmp_path)
    host = make_host(w, w.coordinator(0), 0, tmp_path, host_memory=32 * MIB)
    assert host.coordinator.register_query(reg_of(w, spec())).refusal is None
    plan_spark(w, 0)
    monkeypatch.setattr(flight_server, "TURN_SECONDS", 0.05)
    server = HostFlightServer(lambda: host, "127.0.0.1", "token", lambda method, args: None)
    client = HostClient(f"grpc://127.0.0.1:{server.port}", "token", timeout=PATIENCE)
    assert host.open(task(0)).redirect is None
    value = pa.array([os.urandom(4 * MIB)], pa.binary())
    batches = [pa.record_batch([pa.array([b"k%d" % n], pa.binary()), value], schema=COMMIT_SCHEMA) for n in range(6)]
    command = CommitCommand(task(0), nbytes=sum(b.nbytes for b in batches))
    try:
        with pytest.raises(HostMemoryError, match=r"The commit of batch 0 of partition 0 of operator 'op' needs"):
            client.commit(command, (("default", b) for b in batches))
        with host.memory.admitted("run1", 8 * MIB, "Another", 0), pytest.raises(HostMemoryBusyError, match="its turn"):
            client.commit(msgspec.structs.replace(command, nbytes=8 * MIB), (("default", b) for b in batches))
    finally:
        client.close()
        server.shutdown()
        host.close()
