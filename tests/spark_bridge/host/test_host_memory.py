"""What a host says that it holds, and a commit for which it has no room."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pytest

from backends.exceptions import HostMemoryError
from backends.formats.changelog import Changes
from spark_bridge.host_actor.flight_server import HostFlightServer
from spark_bridge.transport.flight_client import HostClient
from spark_bridge.transport.protocol import COMMIT_SCHEMA, CommitCommand, GetCommand, TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.host.host_operators import reg_of, spec
from tests.spark_bridge.host.host_steps import ch, make_host, plan_spark, task

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
            # The stream goes on when the host has taken this part in.
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
