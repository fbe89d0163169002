"""Rows and the columns that a lookup puts behind them, against a plain loop; from hosts and from storage."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark import TaskContext

from backends import spans
from backends.exceptions import VersionNotFoundError
from coordinator_actor.durable.records import LookupRecord
from coordinator_actor.reading.stored_versions import VersionTimes, find_state
from spark_bridge import lookups
from spark_bridge.exceptions import StateVersionError
from spark_bridge.lookups import LookupTask
from spark_bridge.queryable.reads import scans
from spark_bridge.state_data import looked_up_state
from spark_bridge.state_data.looked_up_state import Batch, LookedUpState, in_storage, state_in_cluster
from spark_bridge.state_format.layouts import aggregate_schema
from spark_bridge.task.executor import ADDRESSES, RUN_ID, Endpoints
from spark_bridge.task.executor import TOKEN as TASK_TOKEN
from tests.collector import recorded_spans
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import TOKEN, TOTALS, Cluster, go_back
from tests.spark_bridge.state_data.format_fixtures import Stored

ROWS = pa.schema([("id", pa.int64()), ("who", pa.int32()), ("text", pa.string())])
OUT = pa.schema([*ROWS, ("n", pa.int64()), ("name", pa.string())])


def task(*, is_inner: bool = False, columns: tuple[str, ...] = ("n", "name")) -> LookupTask:
    schema = pa.schema([*ROWS, *(OUT.field(name) for name in columns)])
    return LookupTask("totals", "q", None, {"user": "who"}, columns, schema, is_inner, True, None, None)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    made.batch({user: (user * 10, f"user {user}") for user in range(0, 60, 2)})
    (tmp_path / "ck/metadata").write_text('{"id":"q"}')
    yield made
    made.close()


@pytest.fixture
def endpoints(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    return endpoints_of(cluster, monkeypatch)


def endpoints_of(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Endpoints:
    """Messages of tasks reach the coordinator as through a host."""

    def ask(endpoints: Endpoints, method: str, args: dict[str, Any]) -> Any:
        return msgspec.json.decode(msgspec.json.encode(getattr(cluster.c, method)(**args)))

    monkeypatch.setattr(Endpoints, "call_coordinator", ask)
    monkeypatch.setattr(looked_up_state, "_routers", {})
    return Endpoints((), TOKEN, "", PATIENCE)


def rows(rng: random.Random, n: int) -> pa.RecordBatch:
    who = [rng.choice([None, rng.randrange(-5, 70)]) for _ in range(n)]
    return pa.RecordBatch.from_pydict({"id": range(n), "who": who, "text": [f"t{i}" for i in range(n)]}, schema=ROWS)


def expected(batch: pa.RecordBatch, factor: int, *, is_inner: bool) -> list[dict[str, Any]]:
    found = []
    for row in batch.to_pylist():
        who = row["who"]
        is_there = who is not None and 0 <= who < 60 and who % 2 == 0
        if is_there or not is_inner:
            there = {"n": who * factor, "name": f"user {who}"} if is_there else {"n": None, "name": None}
            found.append({**row, **there})
    return found


def given(of: LookupTask, batch: pa.RecordBatch, found: LookedUpState) -> list[dict[str, Any]]:
    made = list(of.enriched(batch, found))
    assert all(part.schema == of.schema and part.num_rows for part in made)
    return [row for part in made for row in part.to_pylist()]


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("where", ["hosts", "storage"])
def test_rows_are_those_of_a_loop(cluster: Cluster, endpoints: Endpoints, where: str, is_inner: bool) -> None:
    place = find_state(str(cluster.root / "ck"))
    batch = Batch("other", 0)

    def found() -> LookedUpState:
        if where == "storage":
            return in_storage(place, "totals", None, batch, None)
        return state_in_cluster(endpoints, "totals", "q", None, batch, None)

    rng = random.Random(3)
    first = rows(rng, 200)
    assert given(task(is_inner=is_inner), first, found()) == expected(first, 10, is_inner=is_inner)
    cluster.batch({user: (user * 11, f"user {user}") for user in range(0, 60, 2)})
    for n in (1, 7, 300):
        again = rows(rng, n)
        assert given(task(is_inner=is_inner), again, found()) == expected(again, 10, is_inner=is_inner), "version 1"
    batch = Batch("other", 1)
    assert given(task(is_inner=is_inner), first, found()) == expected(first, 11, is_inner=is_inner)


def test_hosts_and_storage_find_the_same_record(cluster: Cluster, endpoints: Endpoints) -> None:
    place, batch = find_state(str(cluster.root / "ck")), Batch("other", 5)
    in_storage(place, "totals", None, batch, None)
    cluster.batch({0: (7, "x")})
    found = state_in_cluster(endpoints, "totals", "q", None, batch, None)
    one = pa.RecordBatch.from_pydict({"id": [1], "who": [0], "text": [""]}, schema=ROWS)
    assert given(task(columns=("n",)), one, found) == [{"id": 1, "who": 0, "text": "", "n": 0}]
    assert in_storage(place, "totals", None, batch, None).at_ms == found.at_ms


def test_hosts_that_move_and_runs_that_are_replaced_are_found_again(cluster: Cluster, endpoints: Endpoints) -> None:
    found = state_in_cluster(endpoints, "totals", "q", None, Batch("other", 0), None)
    first = rows(random.Random(4), 50)
    assert given(task(), first, found) == expected(first, 10, is_inner=False)
    cluster.hosts[0].close()
    cluster.replace_host(0)
    cluster.start("run2")
    assert given(task(), first, found) == expected(first, 10, is_inner=False)


def test_no_rows_no_known_keys_and_a_version_that_is_fixed(cluster: Cluster, endpoints: Endpoints) -> None:
    cluster.batch({user: (user * 11, f"user {user}") for user in range(0, 60, 2)})
    found = state_in_cluster(endpoints, "totals", "q", None, None, LookupRecord(1, "", 0))
    nulls = pa.RecordBatch.from_pydict({"id": [1, 2], "who": [None, None], "text": ["", ""]}, schema=ROWS)
    assert given(task(is_inner=True), nulls, found) == []
    assert [row["n"] for row in given(task(), nulls, found)] == [None, None]
    first = rows(random.Random(5), 20)
    assert given(task(), first, found) == expected(first, 10, is_inner=False)
    assert list(task().run(iter([]))) == []
    with pytest.raises(StateVersionError, match="Version 9 of the state"):
        in_storage(find_state(str(cluster.root / "ck")), "totals", None, None, LookupRecord(9, "", 0)).values(
            pa.array([b"\x00\x00x"], pa.binary()), "default"
        )


def test_a_version_in_hosts_that_is_made_again_during_a_job_is_an_error(cluster: Cluster, endpoints: Endpoints) -> None:
    cluster.batch({user: (user * 11, f"user {user}") for user in range(0, 60, 2)})
    first, location = rows(random.Random(6), 20), cluster.c.locate("totals")
    record = LookupRecord(location.completed_version, location.made_by, 0)
    assert (record.version, record.made_by) == (2, "run1")
    before = state_in_cluster(endpoints, "totals", "q", None, None, record)
    assert given(task(), first, before) == expected(first, 11, is_inner=False)

    go_back(cluster, 1, "run2")
    with pytest.raises(VersionNotFoundError, match=r"Version 2 .* as run run1 had made it\. It is not kept any more"):
        state_in_cluster(endpoints, "totals", "q", None, None, record)
    assert given(task(), first, before) == expected(first, 11, is_inner=False), "hosts still serve the old run"
    cluster.batch({user: (user * 12, f"user {user}") for user in range(0, 60, 2)})
    with pytest.raises(VersionNotFoundError, match="rolled back since, and run run2 has replaced the version"):
        given(task(), first, before)
    with pytest.raises(VersionNotFoundError, match="rolled back since, and run run2 has replaced the version"):
        state_in_cluster(endpoints, "totals", "q", None, None, record)

    # The error says to call lookup again. Version 1 is still the one that run1 made.
    for version, maker, factor in ((None, "run2", 12), (1, "run1", 10)):
        location = cluster.c.locate("totals", None, version)
        again = LookupRecord(version or location.completed_version, location.made_by, 0)
        assert again.made_by == maker
        found = state_in_cluster(endpoints, "totals", "q", None, None, again)
        assert given(task(), first, found) == expected(first, factor, is_inner=False)


def test_a_version_that_is_made_again_between_the_record_and_the_read_is_an_error(cluster: Cluster) -> None:
    """A task may stand still in between, and the query that it looks up may roll back and make the version again."""
    place, first = find_state(str(cluster.root / "ck")), rows(random.Random(6), 20)
    record = looked_up_state.recorded_in_storage(place, None)
    assert record.version == 1
    found = in_storage(place, "totals", None, None, record)
    assert given(task(), first, found) == expected(first, 10, is_inner=False)
    of_another_run = in_storage(place, "totals", None, None, msgspec.structs.replace(record, made_by="run0"))
    with pytest.raises(StateVersionError, match=rf"as run run0 had made it.*run {record.made_by} has replaced"):
        given(task(), first, of_another_run)


class Context:
    """The context of a task in a Spark worker; ``run_id`` exists if the query has its own state."""

    def __init__(self, run_id: str | None) -> None:
        given = {"sql.streaming.queryId": "other", "streaming.sql.batchId": "6", RUN_ID: run_id}
        self.getLocalProperty = {**given, ADDRESSES: '["grpc://h:1"]', TASK_TOKEN: TOKEN}.get
        self.partitionId = self.stageId = self.taskAttemptId = lambda: 3


@pytest.mark.parametrize("run_id", ["run-of-other", None])
def test_task_span_is_in_the_trace_of_its_batch_or_a_new_trace(
    cluster: Cluster, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch, run_id: str | None
) -> None:
    monkeypatch.setattr(TaskContext, "get", lambda: Context(run_id))
    batches = [rows(random.Random(6), n) for n in (0, 40, 2)]
    with recorded_spans(role="task") as recorded:
        assert sum(part.num_rows for part in task().run(iter(batches))) == 42
        assert list(task().run(iter(batches[:1]))) == [], "a task without rows has no span"
    whole = recorded.one("lookup")
    assert {recorded.path(s)[0] for s in recorded.all()} == {"lookup"}
    assert recorded.path(recorded.one("lookup.version"))[:2] == ["lookup", "lookup.version"]
    assert len(recorded.named("lookup.read")) == 2
    assert whole.attributes is not None and whole.context is not None
    said = {name.removeprefix("statestore."): value for name, value in whole.attributes.items()}
    assert (said["operator"], said["looked_up"], said["partition"], said["num_rows"]) == ("totals", "q", 3, 42)
    of_batch, root = spans.batch("run-of-other", 7).ids
    if run_id is None:
        assert whole.context.trace_id != of_batch and whole.parent is None
    else:
        assert whole.context.trace_id == of_batch
        assert whole.parent is not None and whole.parent.span_id == root


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("where", ["hosts", "storage"])
def test_rows_multiply_by_the_matches_of_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_inner: bool
) -> None:
    monkeypatch.setattr(lookups, "OUTPUT_ROWS", 7)
    monkeypatch.setattr(looked_up_state, "MAX_RANGES", 32)  # two values a request
    monkeypatch.setattr(scans, "MAX_RANGES", 0)  # the cluster writes no entries of the index, so that hosts scan
    cluster = Cluster(tmp_path)
    cluster.start("run2", {"totals": aggregate_schema(TOTALS, (), [pa.field("name", pa.string())])})
    endpoints = endpoints_of(cluster, monkeypatch)
    names = {user: f"name {user % 9}" for user in range(40)} | {40: None}
    cluster.batch({user: (user, name) for user, name in names.items()})
    (cluster.root / "ck/metadata").write_text('{"id":"q"}')
    if where == "storage":
        found = in_storage(find_state(str(cluster.root / "ck")), "totals", None, None, LookupRecord(1, "", 0))
    else:
        found = state_in_cluster(endpoints, "totals", "q", None, None, LookupRecord(1, "", 0))
    out = pa.schema([*ROWS, ("user", pa.int64()), ("n", pa.int64())])
    columns = ("user", "n")
    of = LookupTask("totals", "q", None, {"name": "text"}, columns, out, is_inner, True, None, None, by_index=True)
    for texts in (["name 1", None, "none", "name 1", "name 8", *["name 0"] * 9], ["none"], [None]):
        batch = pa.RecordBatch.from_pydict({"id": range(len(texts)), "who": [0] * len(texts), "text": texts}, ROWS)
        expected = []
        for row in batch.to_pylist():
            users = [user for user, name in names.items() if name == row["text"] and name is not None]
            expected += [{**row, "user": user, "n": user} for user in users]
            if not users and not is_inner:
                expected.append({**row, "user": None, "n": None})
        parts = list(of.enriched(batch, found))
        assert [row["id"] for part in parts for row in part.to_pylist()] == [row["id"] for row in expected]
        assert sorted(map(repr, (row for part in parts for row in part.to_pylist()))) == sorted(map(repr, expected))
        assert all(part.schema == out and 0 < part.num_rows <= 7 for part in parts)
    cluster.close()


BY_KEY = {"k": "k", "g": "g"}


def stored_totals() -> LookedUpState:
    place = find_state(str(Stored("file").checkpoint))
    return in_storage(place, "totals", None, None, LookupRecord(4, "", 0))


def test_a_number_that_the_key_cannot_have_has_no_match() -> None:
    """A DataFrame's longs may be looked up in ints: one that is too large is a row like any other."""
    rows = pa.table({"k": ["a", "a", "a", None], "g": pa.array([0, 1 << 40, -(1 << 63), 0])}).to_batches()[0]
    out = pa.schema([*rows.schema, ("n", pa.int64())])
    for by_index, keys in ((False, BY_KEY), (True, {"g": "g"})):
        of = LookupTask("totals", "q", None, keys, ("n",), out, False, True, None, None, by_index=by_index)
        found = [(row["g"], row["n"] is not None) for row in given(of, rows, stored_totals())]
        assert set(found) == {(0, True), (0, by_index), (1 << 40, False), (-(1 << 63), False)}
        inner = given(replace(of, is_inner=True), rows, stored_totals())
        assert {row["g"] for row in inner} == {0}


def test_numbers_match_by_an_index_as_in_a_join_of_spark() -> None:
    """-0.0 is 0.0, and every NaN is the same."""
    other_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
    stored = pa.table({"x": [0.0, -0.0, math.nan, other_nan, 1.5, None], "id": range(6)})

    def matching(column: str, values: pa.Array, columns: Sequence[str]) -> pa.Table:
        """Return what hosts do: numbers are compared as by the order of keys."""
        asked = {"nan" if v != v else v + 0.0 for v in values.to_pylist()}
        rows = [i for i, v in enumerate(stored.column(column).to_pylist()) if ("nan" if v != v else v) in asked]
        return stored.take(pa.array(rows, pa.int64())).select(columns)

    view: Any = SimpleNamespace(types={"x": pa.float64()})
    state = LookedUpState(view, 0, lambda keys, family: keys, matching)
    out = pa.schema([("y", pa.float64()), ("id", pa.int64())])
    of = LookupTask("op", "q", None, {"x": "y"}, ("id",), out, False, True, None, None, by_index=True)
    for given_y, expected in (([0.0], [0, 1]), ([-0.0], [0, 1]), ([math.nan], [2, 3]), ([2.0], [None])):
        for ys in (given_y, [*given_y, other_nan, -0.0, 0.0, 1.5]):
            batch = pa.record_batch({"y": pa.array(ys, pa.float64())})
            rows = [row["id"] for part in of.enriched(batch, state) for row in part.to_pylist()]
            assert rows == expected + ([] if ys is given_y else [2, 3, 0, 1, 0, 1, 4]), ys


def test_a_row_without_a_recorded_version_from_before_the_first_one_is_an_error() -> None:
    times = VersionTimes("ck", (3, 4), (5_000, 6_000))

    def versions(*rows: tuple[int | None, int | None]) -> list[int]:
        batch = pa.RecordBatch.from_pylist(
            [{"at": at and at * 1000, "version": version} for at, version in rows],
            schema=pa.schema([("at", pa.timestamp("us")), ("version", pa.int64())]),
        )
        (found,) = lookups._Versions(times, "at", "version").run(iter([batch]))
        of_rows: list[int] = found.column(lookups.VERSION_COLUMN).to_pylist()
        return of_rows

    assert versions((5_500, None), (6_500, None), (4_000, 3), (None, 4)) == [3, 4, 3, lookups.NO_VERSION]
    with pytest.raises(VersionNotFoundError, match="as of 1970-01-01"):
        versions((5_500, None), (4_000, None))
