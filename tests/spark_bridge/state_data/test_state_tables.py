"""State as Arrow tables: every kind of variable, at every version, and what changed, against a model; without Ray
and Spark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument, MissingFileError, VersionNotFoundError
from spark_bridge.operators.aggregate_task import AggregateLogic
from spark_bridge.operators.deduplicate import DeduplicateLogic
from spark_bridge.state_data import state_sources
from spark_bridge.state_data.frames import (
    state_batches,
    state_changes_batches,
    state_changes_table,
    state_metadata_table,
    state_table,
)
from spark_bridge.state_format import partition_rows
from spark_bridge.state_format.layouts import deduplicate_schema
from spark_bridge.task.state_task import EventTime
from tests.effort import effort
from tests.spark_bridge.operators.operator_runs import SECOND, TS, WINDOW, batch_of, seconds
from tests.spark_bridge.state_flows import KEYS, NAMES, Flow, G, Operation, Query
from tests.spark_bridge.variable_operations import (
    AGGREGATOR,
    Expiring,
    Row,
    flat,
    in_order,
    note,
    one_key,
    random_batch,
    session_operator,
)

BACKEND = effort("file", "rocksdb")
"""What RocksDB has stored is read in ``test_format_1_reads``, too."""


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Callable[..., Flow]]:
    made: list[Flow] = []

    def make(*args: Any, **kwargs: Any) -> Flow:
        made.append(Flow(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def worked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    """Five random batches, in two layouts; tests only read it."""
    rng = random.Random(5)
    f = Flow(tmp_path_factory.mktemp("worked"), n=2, backend="file")
    for _ in range(3):
        f.batch(random_batch(rng))
    f = f.restarted("run2", 1, BACKEND)
    f.batch(random_batch(rng))
    f.batch(random_batch(rng))
    yield f
    f.close()


def rows_of(table: pa.Table) -> list[Row]:
    """Rows without key group and partition, which are right."""
    if table.num_rows:
        first = table.select([0, 1]).combine_chunks().to_batches()[0]
        keys = pa.RecordBatch.from_arrays(first.columns, schema=KEYS)
        groups = key_groups(keys, G).tolist()
        assert table.column("key_group").to_pylist() == groups
    names = [n for n in table.column_names if n not in ("key_group", "partition_id")]
    return list(zip(*(table.column(n).to_pylist() for n in names), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_every_version_holds_what_the_model_holds(worked, name):
    for version in effort((3, 5), range(6)):
        table = state_table(worked.location, "op", name, version)
        expected = flat(name, worked.at[version][name])
        found = rows_of(table)
        assert in_order(found) == in_order(expected), version
        if name == "visits":  # their order counts, within a key
            for key in worked.at[version][name]:
                assert [r for r in found if r[:2] == key] == [r for r in expected if r[:2] == key]
        n = 2 if version <= 3 else 1
        partitions = [partition_of(g, G, n) for g in table.column("key_group").to_pylist()]
        assert table.column("partition_id").to_pylist() == partitions
        assert partitions == sorted(partitions)
    assert state_table(worked.location, "op", name).equals(table), "the last version is the default"


def test_the_columns(worked):
    own = {"key_group": pa.int32(), "partition_id": pa.int32()}
    keys = {"user": pa.string(), "shard": pa.int32()}
    note_type = pa.struct([("text", pa.string())])
    columns = {
        "total": {"n": pa.int64(), "user__value": pa.string()},
        "visits": {"page": pa.string(), "at": pa.int64()},
        "pages": {"page": pa.string(), "user__value": pa.string(), "n": pa.int32(), "note": note_type},
        "timers": {"expiration_timestamp_ms": pa.int64()},
    }
    for name, of in columns.items():
        schema = state_batches(worked.location, "op", name).schema
        assert dict(zip(schema.names, schema.types, strict=True)) == {**keys, **of, **own}
        assert schema.names == [*keys, *of, *own]


def test_lists_and_maps_in_one_row_per_key(worked):
    for version in (1, 5):
        held = worked.at[version]
        lists = state_table(worked.location, "op", "visits", version, flatten=False)
        assert lists.column_names == ["user", "shard", "list_value", "key_group", "partition_id"]
        assert {(u, s): [(e["page"], e["at"]) for e in v] for u, s, v in rows_of(lists)} == held["visits"]
        maps = state_table(worked.location, "op", "pages", version, flatten=False)
        found = {
            (u, s): {(k["page"], k["user"]): (v["n"], note(v["note"] and v["note"]["text"])) for k, v in entries}
            for u, s, entries in rows_of(maps)
        }
        assert found == held["pages"]
        assert maps.num_rows == len(held["pages"])
    assert state_table(worked.location, "op", "total", flatten=False) == state_table(worked.location, "op", "total")


@pytest.mark.parametrize("name", ["visits", "pages"])
def test_batches_stay_small_and_in_order_whatever_is_read_at_once(worked, name, monkeypatch):
    whole = state_table(worked.location, "op", name)
    collected = state_table(worked.location, "op", name, flatten=False)
    least = {"visits": 3, "pages": 40}[name]  # few list elements are stored as separate pairs
    for rows, size in ((7, 1 << 20), (1 << 14, 500)):
        monkeypatch.setattr(partition_rows, "DECODE_STEP_ROWS", rows)
        monkeypatch.setattr(partition_rows, "DECODE_STEP_BYTES", size)
        with state_batches(worked.location, "op", name) as reader:
            batches = list(reader)
        assert len(batches) >= least, "each step is a batch"
        assert pa.Table.from_batches(batches) == whole
        assert state_table(worked.location, "op", name, flatten=False) == collected


def test_read_can_be_cancelled(worked):
    with state_batches(worked.location, "op", "visits") as reader:
        assert reader.read_next_batch().num_rows


# -- changes -----------------------------------------------------------------------------------


def applied(name: str, rows: list[Row], changes: list[dict[str, Any]]) -> list[Row]:
    """Return the rows after the changes.

    Deleted and updated rows must exist; inserted rows must not, except in lists.
    """
    held = list(rows)
    for change in changes:
        key = tuple(v for k, v in change.items() if k not in (*OURS, "before", "after"))
        before, after = (
            None if change.get(side) is None else (*key, *change[side].values()) for side in ("before", "after")
        )
        if name == "timers":
            before, after = (key, None) if change["change_type"] == "delete" else (None, key)
        kinds = {"insert": (False, True), "update": (True, True), "delete": (True, False)}
        assert (before is not None, after is not None) == kinds[change["change_type"]], change
        assert before != after
        if before is not None:
            held.remove(before)
        elif name != "visits":
            assert all(r[: len(key)] != key for r in held if after is not None)
        if after is not None:
            held.append(after)
    return held


OURS = ("version", "change_type", "key_group", "partition_id")


@pytest.mark.parametrize("name", NAMES)
def test_changes_lead_from_each_version_to_the_next(worked, name):
    table = state_changes_table(worked.location, "op", name, from_version=0)
    changes = table.to_pylist()
    assert {c["version"] for c in changes} == set(range(1, 6))
    for version in range(1, 6):
        rows = flat(name, worked.at[version - 1][name])
        after = applied(name, rows, [c for c in changes if c["version"] == version])
        assert in_order(after) == in_order(flat(name, worked.at[version][name])), version
    part = state_changes_table(worked.location, "op", name, from_version=2, to_version=4)
    assert in_order(part.to_pylist()) == in_order([c for c in changes if 2 < c["version"] <= 4])
    assert state_changes_table(worked.location, "op", name, from_version=4, to_version=4).num_rows == 0
    with state_changes_batches(worked.location, "op", name, from_version=0) as reader:
        assert reader.schema == table.schema


def changed(f: Flow, name: str) -> list[tuple[Any, ...]]:
    """The changes of the last batch, without key and place."""
    last = max(f.at)
    rows = state_changes_table(f.location, "op", name, from_version=last - 1, to_version=last).to_pylist()
    return [
        tuple(
            tuple(v.values()) if isinstance(v, dict) else v
            for k, v in row.items()
            if k not in ("version", "user", "shard", "key_group", "partition_id")
        )
        for row in rows
    ]


def test_append_to_a_list_changes_only_the_new_elements(flow):
    f = flow(n=1)
    f.batch(one_key(lambda of: of.visits.appendList([("/", i) for i in range(60)])))
    f.batch(one_key(lambda of: of.visits.appendList([("/x", i) for i in range(300)])))  # with the first ones to chunks
    assert changed(f, "visits") == [("insert", None, ("/x", i)) for i in range(300)]
    f.batch(one_key(lambda of: of.visits.appendList([("/y", 1)])))
    assert changed(f, "visits") == [("insert", None, ("/y", 1))]
    kept = [*(("/x", i) for i in range(291, 300)), ("/y", 1)]
    f.batch(one_key(lambda of: of.visits.put([*kept, ("/z", 0)])))
    found = changed(f, "visits")
    assert [c[0] for c in found] == ["delete"] * 351 + ["insert"]
    assert found[-2:] == [("delete", ("/x", 290), None), ("insert", None, ("/z", 0))]
    f.batch(one_key(lambda of: of.visits.put([*kept[2:], ("/z", 0), ("/z", 1)])))
    assert changed(f, "visits") == [("delete", e, None) for e in kept[:2]] + [("insert", None, ("/z", 1))]
    f.batch(one_key(lambda of: of.visits.put([*kept[2:4], ("/w", 0), *kept[5:], ("/z", 0), ("/z", 1)])))
    assert changed(f, "visits") == [("delete", kept[4], None), ("insert", None, ("/w", 0))], "in the middle"
    f.batch(one_key(lambda of: of.visits.clear()))
    assert {c[0] for c in changed(f, "visits")} == {"delete"} and len(changed(f, "visits")) == 10


def test_a_map_that_has_grown_large_did_not_go_and_come(flow):
    f = flow(n=1)
    few = [((f"/{i:03}", "u"), (i, None)) for i in range(50)]
    many = [((f"/{i:03}", "u"), (i, None)) for i in range(200)]

    def write(entries: list[Any]) -> Operation:
        return lambda of: [of.pages.updateValue(*entry) for entry in entries]

    f.batch(one_key(write(few)))
    assert len(changed(f, "pages")) == 50
    f.batch(one_key(write(many)))  # the first ones again, unchanged
    assert [(c[0], c[1]) for c in changed(f, "pages")] == [("insert", k[0]) for k, _ in many[50:]]
    f.batch(one_key(write([(many[7][0], (-1, None)), many[8]])))
    assert changed(f, "pages") == [("update", "/007", "u", (7, None), (-1, None))]
    f.batch(one_key(lambda of: of.pages.removeKey(("/007", "u"))))
    assert changed(f, "pages") == [("delete", "/007", "u", (-1, None), None)]


def test_rewriting_an_equal_value_is_not_a_change(flow):
    f = flow(n=1)
    f.batch(one_key(lambda of: of.total.update((1, "x"))))
    assert changed(f, "total") == [("insert", None, (1, "x"))]
    f.batch(one_key(lambda of: of.total.update((1, "x"))))
    assert changed(f, "total") == []
    f.batch(one_key(lambda of: of.total.update((2, "x"))))
    assert changed(f, "total") == [("update", (1, "x"), (2, "x"))]
    f.batch(one_key(lambda of: of.total.clear()))
    assert changed(f, "total") == [("delete", (2, "x"), None)]
    f.batch(one_key(lambda of: of.total.clear()))
    assert changed(f, "total") == []


# -- TTL, changed schemas, names ---------------------------------------------------------------


def test_the_time_to_live_is_a_column(flow):
    f = flow(Expiring, n=1)

    def write(n: int) -> Operation:
        def operation(of: Any) -> None:
            of.seen.update((n,))
            of.log.appendList([(n,)] * 20)
            of.by_page.updateValue((f"/{n}",), (n,))

        return operation

    f.batch(one_key(write(1)))
    f.batch(one_key(write(2)))
    seen = state_table(f.location, "op", "seen")
    assert seen.column_names == ["user", "shard", "n", "ttl_expiration_ms", "key_group", "partition_id"]
    assert rows_of(seen) == [("a", 0, 2, 12_000)]
    assert rows_of(state_table(f.location, "op", "log")) == [("a", 0, 1, 11_000)] * 20 + [("a", 0, 2, 12_000)] * 20
    assert rows_of(state_table(f.location, "op", "by_page")) == [
        ("a", 0, "/1", 1, 11_000),
        ("a", 0, "/2", 2, 12_000),
    ]
    (collected,) = rows_of(state_table(f.location, "op", "log", 1, flatten=False))
    assert collected == ("a", 0, [{"n": 1, "ttl_expiration_ms": 11_000}] * 20)
    f.times[2] = 11_500  # what is of the first batch has expired
    f.batch(one_key(lambda of: of.log.appendList([(3,)])))
    assert changed(f, "log")[-1] == ("insert", None, (3, 21_500))
    assert changed(f, "log")[:-1] == [("delete", (1, 11_000), None)] * 20
    assert rows_of(state_table(f.location, "op", "log")) == [("a", 0, 2, 12_000)] * 20 + [("a", 0, 3, 21_500)]


class Later:
    """``Everything`` some releases later."""

    def init(self, handle: Any) -> None:
        handle.deleteIfExists("visits")
        self.timers = handle
        self.total = handle.getValueState("total", "extra STRING, n DOUBLE")
        self.pages = handle.getMapState(
            "pages", "page STRING, user STRING", "n LONG, note STRUCT<text: STRING, x: INT>"
        )
        self.new = handle.getValueState("new", "v LONG")


def test_rows_of_earlier_schemas_are_read_as_each_version_has_them(flow):
    f = flow(n=2)
    f.batch({("a", 0): lambda of: of.total.update((1, "x")), ("b", 1): lambda of: of.total.update((2, "y"))})
    f.batch(one_key(lambda of: of.pages.updateValue(("/", "u"), (5, ("t",)))))
    f.batch(one_key(lambda of: of.visits.appendList([("/", 1)])))
    f = f.restarted("run2", 3, "file", Later)
    f.batch({("a", 0): lambda of: of.total.update(("new", 1.5)), ("c", 1): lambda of: of.new.update((7,))})
    assert in_order(rows_of(state_table(f.location, "op", "total", 3))) == [("a", 0, 1, "x"), ("b", 1, 2, "y")]
    assert in_order(rows_of(state_table(f.location, "op", "total", 4))) == [("a", 0, "new", 1.5), ("b", 1, None, 2.0)]
    assert rows_of(state_table(f.location, "op", "pages", 4)) == [("a", 0, "/", "u", 5, {"text": "t", "x": None})]
    assert rows_of(state_table(f.location, "op", "new")) == [("c", 1, 7)]
    changes = state_changes_table(f.location, "op", "total", from_version=0).to_pylist()
    assert [
        (c["version"], c["before"], c["after"]) for c in sorted(changes, key=lambda c: (c["version"], c["user"]))
    ] == [
        (1, None, {"extra": None, "n": 1.0}),
        (1, None, {"extra": None, "n": 2.0}),
        (4, {"extra": None, "n": 1.0}, {"extra": "new", "n": 1.5}),
    ]
    with pytest.raises(InvalidStateStoreArgument, match=r"State variable 'visits' does not exist; there are .*'new'"):
        state_table(f.location, "op", "visits")
    assert state_table(f.location, "op", "visits", 3).num_rows == 1
    assert set(state_metadata_table(f.location).column("stateVarName").to_pylist()) == {
        "total",
        "pages",
        "new",
        "timers",
    }


class Confusing:
    """Names that are taken."""

    def init(self, handle: Any) -> None:
        self.v = handle.getValueState("v", "User STRING, key_group STRING, partition_id LONG, version LONG, before INT")


def test_no_two_columns_have_the_same_name(flow):
    f = flow(Confusing, n=1)
    f.batch(one_key(lambda of: of.v.update(("u", "g", 1, 2, 3))))
    table = state_table(f.location, "op", "v")
    assert table.column_names == [
        "user",
        "shard",
        "User__value",
        "key_group",
        "partition_id",
        "version",
        "before",
        "key_group__value",
        "partition_id__value",
    ]
    assert table.to_pylist()[0]["partition_id"] == 1
    changes = state_changes_table(f.location, "op", "v", from_version=0)
    assert changes.column_names == [
        "version",
        "change_type",
        "user",
        "shard",
        "before",
        "after",
        "key_group",
        "partition_id",
    ]
    assert changes.column("after").to_pylist() == [
        {"User": "u", "key_group": "g", "partition_id": 1, "version": 2, "before": 3}
    ]


class Ambiguous:
    def init(self, handle: Any) -> None:
        self.v = handle.getListState("v", "ttl_expiration_ms LONG, TTL_EXPIRATION_MS__value LONG", 10_000)


@pytest.mark.parametrize("flatten", [True, False])
def test_a_field_named_as_the_time_to_live_is_not_mistaken_for_it(flow, flatten):
    f = flow(Ambiguous, n=1)
    f.batch(one_key(lambda of: of.v.appendList([(1, 2)])))
    (row,) = state_table(f.location, "op", flatten=flatten).select([2] if not flatten else [2, 3, 4]).to_pylist()
    found = row if flatten else row["list_value"][0]
    assert list(found.values()) == [1, 2, 11_000]
    assert list(found) == ["ttl_expiration_ms", "TTL_EXPIRATION_MS__value", "ttl_expiration_ms__value__value"]
    (change,) = state_changes_table(f.location, "op", from_version=0).to_pylist()
    assert change["after"] == found


# -- operators with special rows ----------------------------------------------------------------


def query(tmp_path: Path, schema: OperatorSchema, logic: Any, keys: list[str], *batches: pa.RecordBatch) -> Query:
    made = Query(tmp_path, schema, "aggregate")
    for rows in batches:
        made.process(logic, keys, rows)
    made.stop()
    return made


BY_WINDOW = pa.schema([pa.field("window", WINDOW), pa.field("k", pa.string())])
VALUES = pa.schema([*BY_WINDOW, pa.field("v", pa.float64())])


def test_aggregates_show_their_results_or_stored_columns(tmp_path):
    state = StateSchema(BY_WINDOW, AGGREGATOR.state_schema)
    schema = OperatorSchema.of_rows(state, ("k", "window"))
    logic = AggregateLogic(state, AGGREGATOR, pa.schema([*BY_WINDOW, *AGGREGATOR.result_fields]), "update", None)
    q = query(
        tmp_path,
        schema,
        logic,
        BY_WINDOW.names,
        batch_of(VALUES, [((0, 10), "a", 1.0), ((0, 10), "a", 2.0), ((10, 20), "b", 3.0)]),
        batch_of(VALUES, [((0, 10), "a", 6.0), ((0, 10), "c", None)]),
    )
    table = state_table(q.location, "op")
    assert table.column_names == ["k", "window", "n", "mean", "key_group", "partition_id"]
    rows = sorted(tuple(map(seconds, row.values()))[:4] for row in table.to_pylist())
    assert rows == [("a", (0, 10), 3, 3), ("b", (10, 20), 1, 3), ("c", (0, 10), 1, None)]
    kept = state_table(q.location, "op", state_columns=True)
    assert kept.column_names[2:-2] == ["n.count.count", "mean.mean.sum", "mean.mean.count"]
    assert sorted(kept.column("mean.mean.sum").drop_null().to_pylist()) == [3.0, 9.0]
    changes = state_changes_table(q.location, "op", from_version=1).to_pylist()
    assert sorted((c["change_type"], c["k"], c["before"], c["after"]) for c in changes) == [
        ("insert", "c", None, {"n": 1, "mean": None}),
        ("update", "a", {"n": 2, "mean": 1.5}, {"n": 3, "mean": 3.0}),
    ]
    (of,) = state_metadata_table(q.location).to_pylist()
    assert (of["operatorKind"], of["stateVarName"], of["stateVariableType"]) == ("aggregate", "default", "rows")


def test_sessions_are_separate_rows(tmp_path):
    schema, logic, rows = session_operator()
    q = query(
        tmp_path,
        schema,
        logic,
        ["k"],
        batch_of(rows, [("a", (5, 15), 1.0), ("a", (40, 50), 2.0), ("b", (5, 15), 3.0)]),
        batch_of(rows, [("a", (12, 22), 5.0), ("b", (60, 70), 1.0)]),
    )
    table = state_table(q.location, "op")
    assert table.column_names == ["k", "session_window", "n", "mean", "key_group", "partition_id"]
    found = sorted(tuple(map(seconds, row.values()))[:4] for row in table.to_pylist())
    assert found == [("a", (5, 22), 2, 3), ("a", (40, 50), 1, 2), ("b", (5, 15), 1, 3), ("b", (60, 70), 1, 1)]
    assert state_table(q.location, "op", state_columns=True).column_names[2] == "n.count.count"
    changes = state_changes_table(q.location, "op", from_version=1).to_pylist()
    assert sorted((c["change_type"], c["k"], seconds(c["session_window"])) for c in changes) == [
        ("delete", "a", (5, 15)),
        ("insert", "a", (5, 22)),
        ("insert", "b", (60, 70)),
    ]
    (of,) = state_metadata_table(q.location).to_pylist()
    assert of["operatorKind"] == "session_aggregate"


@pytest.mark.parametrize("within", [None, 10])
def test_deduplicated_keys_have_their_expiry_time(tmp_path, within):
    rows = pa.schema([pa.field("k", pa.string()), pa.field("ts", TS)])
    schema = deduplicate_schema(rows.remove(1), ("k",), None if within is None else TS)
    time = None if within is None else EventTime("ts")
    logic = DeduplicateLogic(schema, ("k", "ts"), ("ts",), time, None, None if within is None else within * SECOND)
    q = query(
        tmp_path, schema, logic, ["k"], batch_of(rows, [("a", 5), ("b", 7)]), batch_of(rows, [("a", 9), ("c", 8)])
    )
    table = state_table(q.location, "op")
    found = sorted(tuple(map(seconds, row.values()))[:-2] for row in table.to_pylist())
    assert found == ([("a",), ("b",), ("c",)] if within is None else [("a", 15), ("b", 17), ("c", 18)])
    changes = state_changes_table(q.location, "op", from_version=1).to_pylist()
    assert [(c["change_type"], c["k"]) for c in changes] == [("insert", "c")]
    assert ("after" in changes[0]) is (within is not None)
    (of,) = state_metadata_table(q.location).to_pylist()
    assert (of["operatorKind"], of["valueSchema"] is None) == ("deduplicate", within is None)


# -- asking ------------------------------------------------------------------------------------


def test_the_variable_must_be_named_if_there_are_several(worked, flow, tmp_path):
    with pytest.raises(InvalidStateStoreArgument, match=r"'total', 'visits', 'pages', 'timers'.*state="):
        state_table(worked.location, "op")
    with pytest.raises(InvalidStateStoreArgument, match="State variable 'pagesx' does not exist"):
        state_table(worked.location, "op", "pagesx")
    with pytest.raises(InvalidStateStoreArgument, match="there are 'op'"):
        state_table(worked.location, "other", "total")
    with pytest.raises(VersionNotFoundError, match="versions 0 to 5"):
        state_table(worked.location, "op", "total", 6)
    with pytest.raises(VersionNotFoundError, match="versions 0 to 5"):
        state_changes_table(worked.location, "op", "total", from_version=-1)
    with pytest.raises(MissingFileError, match=r"query\.json"):
        state_table(str(tmp_path / "nowhere"), "op", "total")


class Single:
    def init(self, handle: Any) -> None:
        self.v = handle.getValueState("v", "n LONG")


def test_the_only_variable_need_not_be_named(flow):
    f = flow(Single)
    f.batch(one_key(lambda of: of.v.update((1,))))
    assert rows_of(state_table(f.location, "op")) == [("a", 0, 1)]
    assert state_table(f.location, "op", version=0).num_rows == 0


def test_newest_version_is_looked_up_again_if_it_is_removed(flow, monkeypatch):
    f = flow(Single, n=1)
    f.batch(one_key(lambda of: of.v.update((1,))))
    f.batch(one_key(lambda of: of.v.update((2,))))
    looks: list[int] = []
    real = state_sources.scan_partition

    def scan(rows: Any, state: Any, partition: int) -> Iterator[pa.RecordBatch]:
        looks.append(state.version)
        if len(looks) == 1:
            raise VersionNotFoundError("removed while it was read") from MissingFileError("a file")
        return real(rows, state, partition)

    monkeypatch.setattr(state_sources, "scan_partition", scan)
    assert rows_of(state_table(f.location, "op")) == [("a", 0, 2)]
    assert looks == [2, 2]
    looks.clear()
    with pytest.raises(VersionNotFoundError, match="removed while it was read"):
        state_table(f.location, "op", version=1)


def test_metadata_names_variables_schemas_and_versions(worked):
    table = state_metadata_table(worked.location)
    assert table.column("stateVarName").to_pylist() == list(NAMES)
    assert table.column("stateVariableType").to_pylist() == ["value", "list", "map", "timers"]
    rows = {row["stateVarName"]: row for row in table.to_pylist()}
    pages = rows["pages"]
    assert pages["operatorName"] == "op" and pages["operatorKind"] == "transform_with_state"
    assert [pages[n] for n in ("numPartitions", "numKeyGroups", "provider")] == [1, G, BACKEND]
    assert [pages[n] for n in ("minVersion", "maxVersion", "minBatchId", "maxBatchId")] == [0, 5, 0, 4]
    names = {
        column: [f["name"] for f in json.loads(pages[column])["fields"]]
        for column in ("keySchema", "userKeySchema", "valueSchema")
    }
    assert names == {
        "keySchema": ["user", "shard"],
        "userKeySchema": ["page", "user"],
        "valueSchema": ["n", "note"],
    }
    assert rows["total"]["userKeySchema"] is None and rows["total"]["ttlMs"] is None
