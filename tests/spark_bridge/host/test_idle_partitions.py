"""Two queries in one host: the idle one does not keep the write buffers from the busy one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.conf import StateStoreConf
from backends.engines import engine
from backends.formats.changelog import Changes
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import OperatorSpec
from spark_bridge.host import maintenance
from spark_bridge.host.host import Host
from tests.coordinator_actor.coordinator_world import SCHEMA, World
from tests.spark_bridge.host.host_steps import task
from tests.spark_bridge.queryable.memory_reads import eventually

MIB = 1 << 20
ROWS = 20
PARTITIONS = 4


@dataclass
class Query:
    """A query of one operator, whose batches write ``ROWS`` pairs to each partition."""

    world: World
    coordinator: Coordinator
    host: Host
    name: str
    batches: int = 0
    pairs: dict[int, dict[bytes, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        registration = self.world.registration(
            self.name,
            PARTITIONS,
            query_id=self.name,
            checkpoint_location=str(self.world.root / self.name),
            state_location=str(self.world.root / self.name / "statestore"),
            operators=(OperatorSpec("op", PARTITIONS, SCHEMA),),
        )
        assert self.coordinator.register_query(registration).refusal is None
        self.registration = registration

    def run_batch(self, value_bytes: int) -> None:
        """Run a batch, and have the host complete the one before it."""
        offsets = self.world.root / self.name / "offsets" / str(self.batches)
        offsets.parent.mkdir(parents=True, exist_ok=True)
        offsets.write_text("v1\n{}\n{}")
        for p in range(PARTITIONS):
            given = task(self.batches, p, self.name)
            assert self.host.open(given).is_open
            keys = [b"%06d-%03d" % (self.batches, row) for row in range(ROWS)]
            written = {key: os.urandom(value_bytes) for key in keys}
            self.host.commit(given, Changes.of(pa.array(keys), pa.array(list(written.values()))), {})
            self.pairs.setdefault(p, {}).update(written)
        self.world.commit_spark(self.batches, self.name)
        self.batches += 1

    def instances(self) -> list[Any]:
        return [i for i in self.host.cache.all() if i.registration.run_id == self.name]

    def files(self) -> set[Path]:
        return {p for i in self.instances() for p in i.state._local.engine.glob("*.sst")}

    def check(self) -> None:
        for instance in self.instances():
            pairs = {k: v for k, v in self.pairs[instance.partition].items() if int(k[:6]) < instance.state.version}
            assert instance.state.reads.get_many(pa.array(list(pairs)), remember=False).to_pylist() == list(
                pairs.values()
            )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[World, Coordinator, Host]]:
    w = World(tmp_path)
    c = w.coordinator(0)
    conf = StateStoreConf(
        fsync=False, host_memory=69 * MIB, rocksdb_write_buffer_bytes=MIB, deltas_per_snapshot=1_000_000
    )
    host = Host(w.host(0), c, tmp_path / "local", conf=conf, open_storage=w.storage)
    host.register()
    yield w, c, host
    host.close()


def test_an_idle_query_gives_its_write_buffers_to_a_busy_one(
    host: tuple[World, Coordinator, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "UNWRITTEN_BYTES", 0)
    idle, busy = Query(*host, "idle"), Query(*host, "busy")
    for _ in range(4):
        idle.run_batch(2_000)
    host[2].open(task(idle.batches, 0, "idle"))
    busy.run_batch(10)
    busy.run_batch(10)
    used = host[2].memory.held
    assert not idle.files() | busy.files()
    assert MIB // 2 < used()["write_buffers"] < MIB * 7 // 8
    for _ in range(2):
        for begun in host[2].maintenance.do_maintenance():
            begun.result()
        busy.run_batch(10)
    assert idle.files() and not busy.files()
    assert used()["write_buffers"] < MIB // 2
    # The amount that did not fit while the idle query held its memory.
    for _ in range(8):
        busy.run_batch(400)
    assert not busy.files()
    busy.run_batch(3_000)
    # The busy partitions are not idle, and the idle ones have no more to give.
    for _ in range(2):
        busy.run_batch(2_000)
        assert used()["write_buffers"] > MIB // 2
        assert host[2].maintenance.do_maintenance() == []
    idle.run_batch(10)
    host[2].open(task(idle.batches, 0, "idle"))
    for query in (idle, busy):
        query.check()


def test_idle_query_flushes_when_others_need_memory(
    host: tuple[World, Coordinator, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "UNWRITTEN_BYTES", MIB)
    idle, busy = Query(*host, "idle"), Query(*host, "busy")
    for _ in range(5):
        idle.run_batch(10_000)
    host[2].open(task(idle.batches, 0, "idle"))
    used, room = host[2].memory.held, host[2].memory.copies_bytes
    assert not idle.files() and used()["copies"] > room // 2
    for _ in range(2):
        busy.run_batch(10)
        for begun in host[2].maintenance.do_maintenance():
            begun.result()
    assert idle.files() and not busy.files() and used()["copies"] < room // 2
    for query in (idle, busy):
        query.check()


def test_an_ended_query_flushes_at_once(host: tuple[World, Coordinator, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "UNWRITTEN_BYTES", 0)
    ended, busy = Query(*host, "ended"), Query(*host, "busy")
    for _ in range(4):
        ended.run_batch(2_000)
    busy.run_batch(10)
    buffers = host[2].memory.held()["write_buffers"]
    assert not ended.files()
    host[1].serve_ended(ended.registration)
    host[2].heartbeat()
    eventually(lambda: [i.written_out for i in ended.instances()] == [ended.batches] * PARTITIONS)
    assert ended.files() and not busy.files() and host[2].memory.held()["write_buffers"] < buffers // 2
    ended.check()
    files = ended.files()
    host[2].maintenance.write_out_ended("ended")
    assert ended.files() == files


def maintain(host: Host) -> None:
    for begun in host.maintenance.do_maintenance():
        begun.result()


def snapshot_versions(query: Query) -> set[int]:
    return {instance.snapshot_version for instance in query.instances()}


def test_an_idle_partition_with_large_changes_has_a_snapshot(
    host: tuple[World, Coordinator, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart need not write the changes of a large fill again."""
    monkeypatch.setattr(maintenance, "IDLE_SNAPSHOT_BYTES", 70_000)
    one, query = host[2], Query(*host, "filled")
    for _ in range(3):
        query.run_batch(2_000)
        maintain(one)
    assert snapshot_versions(query) == {0}, "it was busy"
    # The host completes the second version: 80,000 bytes of changelogs.
    maintain(one)
    assert snapshot_versions(query) == {2}
    query.run_batch(10)
    for _ in range(3):
        maintain(one)
    assert snapshot_versions(query) == {2}, "the third version has 40,000 bytes"
    query.run_batch(2_000)
    query.run_batch(10)
    for _ in range(2):
        maintain(one)
    assert snapshot_versions(query) == {5}
