"""Several column families, scans, times of a batch and initial states, between real hosts and a real coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.conf import StateStoreConf
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.changelog import Changes
from coordinator_actor.messages import BatchTimes, OperatorFigures, OperatorSpec
from spark_bridge.exceptions import NotOwnerError
from spark_bridge.operators.map_in_arrow import InitialStateAccess
from spark_bridge.transport.protocol import GetCommand, ScanCommand
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import (
    FAMILIES_SCHEMA,
    binary,
    make_host,
    plan_spark,
    reg_of,
    spec,
    task,
    write_offsets,
)


def start(tmp_path: Path, **changes: Any) -> tuple[World, Any, Any]:
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path)
    assert c.register_query(reg_of(w, spec(**changes))).refusal is None
    return w, c, h


def commit(h: Any, batch: int, families: dict[str, dict[bytes, bytes | None]], p: int = 0) -> None:
    given = task(batch, p)
    assert h.open(given).redirect is None
    changes = {
        f: Changes.of(binary(*pairs), binary(*pairs.values())).families["default"] for f, pairs in families.items()
    }
    h.commit(given, Changes(changes), {}, OperatorFigures(num_rows_updated=3))


def scan(h: Any, version: int, family: str, *ranges: tuple[bytes, bytes | None], limit: int | None = None) -> list[Any]:
    command = ScanCommand("run1", "op", 0, version, family, limit)
    return [tuple(r.values()) for batch in h.reads.scan(command, ranges) for r in batch.to_pylist()]


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_families_are_read_scanned_and_made_when_they_are_first_written(tmp_path, backend):
    w, _, h = start(tmp_path, backend=backend)
    opened = h.open(task(0))
    assert (opened.key_groups, opened.schema, opened.times) == (1024, FAMILIES_SCHEMA, None)
    assert h.reads.get_many(GetCommand("run1", "op", 0, 0, "a"), binary(b"k")).to_pylist() == [None]
    assert scan(h, 0, "a", (b"", None)) == []
    plan_spark(w, 0)
    commit(h, 0, {"default": {}, "a": {b"k1": b"1", b"k2": b"2", b"k3": b"3"}})
    commit(h, 0, {"default": {}}, p=1)
    w.commit_spark(0)
    opened = h.open(task(1))
    assert h.reads.get_many(GetCommand("run1", "op", 0, 1, "a"), binary(b"k2", b"x")).to_pylist() == [b"2", None]
    assert h.reads.get_many(GetCommand("run1", "op", 0, 1, "b"), binary(b"k2")).to_pylist() == [None]
    assert scan(h, 1, "a", (b"k3", None), (b"", b"k2")) == [(b"k3", b"3"), (b"k1", b"1")]
    assert scan(h, 1, "a", (b"", None), limit=2) == [(b"k1", b"1"), (b"k2", b"2")]
    assert scan(h, 1, "a", (b"", b"k2"), (b"k2", None), limit=2) == [(b"k1", b"1"), (b"k2", b"2")]
    with pytest.raises(NotOwnerError):
        scan(h, 7, "a", (b"", None))
    (instance,) = [i for i in h.describe()["instances"] if i["partition"] == 0]
    assert instance["commits"][1]["num_rows_updated"] == 3


def test_the_times_are_those_that_spark_has_logged_and_rows_are_late_by_the_batch_before(tmp_path):
    w, _, h = start(tmp_path, uses_time=True)
    write_offsets(w, 0, 0, 1000)
    assert h.open(task(0)).times == BatchTimes(1000, 0, 0)
    for p in (0, 1):
        commit(h, 0, {"default": {}}, p)
    w.commit_spark(0)
    write_offsets(w, 1, 500, 2000)
    assert h.open(task(1)).times == BatchTimes(2000, 500, 0)
    for p in (0, 1):
        commit(h, 1, {"default": {}}, p)
    w.commit_spark(1)
    write_offsets(w, 2, 900, 3000)
    # The same after a restart, for every reader.
    c2 = w.coordinator(0)
    h2 = make_host(w, c2, 0, tmp_path, inc="b")
    c2.register_query(reg_of(w, spec(uses_time=True), run="run2"))
    assert h2.open(task(2, run="run2")).times == BatchTimes(3000, 900, 500)


def test_a_batch_without_its_times_is_an_error_that_names_the_file(tmp_path):
    w, _, h = start(tmp_path, uses_time=True)
    with pytest.raises(MissingFileError, match="offsets/0"):
        h.open(task(0))
    plan_spark(w, 0)
    with pytest.raises(DamagedFileError, match="offsets/0"):
        h.open(task(0))


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_a_query_begins_with_its_initial_state(tmp_path, backend):
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path)
    other = OperatorSpec("other", 2, FAMILIES_SCHEMA, backend=backend, kind="transform_with_state")
    registration = reg_of(w, spec(backend=backend), other)
    access = InitialStateAccess(
        registration, spec(backend=backend), 0, "t1", BatchTimes(5), StateStoreConf(fsync=False)
    )
    assert access.get_many(binary(b"\x00\x00k"), "a").to_pylist() == [None]
    access.stage(binary(b"\x00\x00k", b"\x00\x00l"), binary(b"old", b"gone"), "a")
    access.stage(binary(b"\x00\x00k", b"\x00\x00l"), binary(b"1", None), "a")
    access.commit(OperatorFigures())
    initial = {"op": {0: access.entry}}
    assert c.register_query(registration, initial).refusal is None
    command = GetCommand("run1", "op", 0, None, "a")
    assert h.reads.get_many(command, binary(b"\x00\x00k", b"\x00\x00l")).to_pylist() == [b"1", None]
    plan_spark(w, 0)

    def batch(host: Any, number: int, run: str) -> None:
        for name in ("op", "other"):
            for p in (0, 1):
                given = task(number, p, run)
                given = type(given)(**{**{f: getattr(given, f) for f in given.__struct_fields__}, "operator": name})
                assert host.open(given).redirect is None
                if (name, p, number) == ("op", 0, 0):
                    read = host.reads.get_many(GetCommand(run, "op", 0, 0, "a"), binary(b"\x00\x00k", b"\x00\x00l"))
                    assert read.to_pylist() == [b"1", None]
                key = b"\x00\x00new" if p == 0 else b"\x02\x00new"
                host.commit(given, Changes.of(binary(key), binary(str(number).encode())), {})
        w.commit_spark(number)

    batch(h, 0, "run1")
    # A restarted query, another host and another coordinator: it is there, and an initial state counts no more.
    c2 = w.coordinator(0)
    h2 = make_host(w, c2, 0, tmp_path, inc="b")
    assert c2.register_query(reg_of(w, spec(backend=backend), other, run="run2"), initial).refusal is None
    plan_spark(w, 1)
    batch(h2, 1, "run2")
    h2.heartbeat()
    read = h2.reads.get_many(GetCommand("run2", "op", 0, None, "a"), binary(b"\x00\x00k"))
    assert read.to_pylist() == [b"1"]


def test_repeated_first_batch_begins_with_the_initial_state(tmp_path):
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path)
    registration = reg_of(w, spec())
    access = InitialStateAccess(registration, spec(), 0, "t1", BatchTimes(5), StateStoreConf(fsync=False))
    access.stage(binary(b"\x00\x00k"), binary(b"1"), "a")
    access.commit(OperatorFigures())
    c.register_query(registration, {"op": {0: access.entry}})
    plan_spark(w, 0)
    commit(h, 0, {"default": {}, "a": {b"\x00\x00k": b"2"}})
    # Both die before the batch is whole.
    c2 = w.coordinator(0)
    h2 = make_host(w, c2, 0, tmp_path, inc="b")
    assert c2.register_query(reg_of(w, spec(), run="run2")).completed_version == 0
    assert h2.open(task(0, 0, "run2")).version == 0
    assert h2.reads.get_many(GetCommand("run2", "op", 0, 0, "a"), binary(b"\x00\x00k")).to_pylist() == [b"1"]


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1)])
def test_a_query_with_an_initial_state_restarts_with_other_partitions_before_its_first_batch(
    tmp_path, backend, before, after
):
    """Partitions without rows, and operators without an initial state, are not in the manifest of version 0."""
    w = World(tmp_path)
    c = w.coordinator(0)
    first = spec(before, backend)
    empty = OperatorSpec("other", before, FAMILIES_SCHEMA, backend=backend, kind="transform_with_state")
    registration = reg_of(w, first, empty)
    access = InitialStateAccess(registration, first, 0, "t1", BatchTimes(5), StateStoreConf(fsync=False))
    access.stage(binary(b"\x00\x00k"), binary(b"1"), "a")
    access.commit(OperatorFigures())
    assert c.register_query(registration, {"op": {0: access.entry}}).refusal is None
    plan_spark(w, 0)
    c2 = w.coordinator(0)
    h2 = make_host(w, c2, 0, tmp_path, inc="b")
    second = (
        spec(after, backend),
        OperatorSpec("other", after, FAMILIES_SCHEMA, backend=backend, kind="transform_with_state"),
    )
    assert c2.register_query(reg_of(w, *second, run="run2")).refusal is None
    found = []
    for name in ("op", "other"):
        for p in range(after):
            given = task(0, p, "run2")
            given = type(given)(**{**{f: getattr(given, f) for f in given.__struct_fields__}, "operator": name})
            assert h2.open(given).redirect is None
            scanned = h2.reads.scan(ScanCommand("run2", name, p, 0, "a"), [(b"", None)])
            found += [(name, *row.values()) for batch in scanned for row in batch.to_pylist()]
    assert found == [("op", b"\x00\x00k", b"1")]
