"""The rows that a host gives of state variables of every kind: scans, single keys, changes; against a model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import RequestError, StateVersionError, UnknownKvStateIdError
from spark_bridge.operators.aggregate_task import AggregateLogic
from spark_bridge.queryable.protocol import At, ChangesRequest, Comparison, KeyRowsRequest, LookupRequest, ScanRequest
from spark_bridge.queryable.reads import change_feed, key_reads
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.state_data import frames
from spark_bridge.task.state_task import EventTime
from tests.effort import effort
from tests.patience import PATIENCE
from tests.spark_bridge.operators.operator_runs import WINDOW, batch_of, seconds
from tests.spark_bridge.queryable.host_world import COMPLETED
from tests.spark_bridge.state_flows import KEYS, NAMES, Flow, G, Query
from tests.spark_bridge.variable_operations import (
    AGGREGATOR,
    Expiring,
    flat,
    in_order,
    one_key,
    random_batch,
    session_operator,
)

USERS = [(user, shard) for user in ("é", "zz", "a", "b", "ab", "") for shard in (1, 0)]


def stored(keys: list[Any], schema: pa.Schema = KEYS, num_groups: int = G) -> pa.BinaryArray:
    made = [pa.array([key[i] for key in keys], f.type) for i, f in enumerate(schema)]
    columns = pa.RecordBatch.from_arrays(made, schema=schema)
    return encode_keys(columns, key_groups(columns, num_groups))


def rows_of(answer: Any) -> tuple[list[str], list[tuple[Any, ...]]]:
    table = pa.Table.from_batches(list(answer.batches), answer.schema)
    return table.column_names, list(zip(*(c.to_pylist() for c in table.columns), strict=True))


class Asked:
    """The answers of one host. Tests that expect a timeout wait less than a slow machine takes to load a partition."""

    def __init__(self, query: Query, *, wait_seconds: float = PATIENCE, **given: Any) -> None:
        self.query = query
        self.reads = HostReads(query.host, wait_seconds=wait_seconds, **given)

    def scan(self, state: str | None = None, at: At = COMPLETED, **asked: Any) -> list[tuple[Any, ...]]:
        return rows_of(self.reads.scan(ScanRequest(self.query.run, "op", state, at, **asked)))[1]

    def rows(
        self, keys: pa.BinaryArray, state: str | None = None, at: At = COMPLETED, columns: list[str] | None = None
    ) -> list[tuple[Any, ...]]:
        return rows_of(self.reads.key_rows(KeyRowsRequest(self.query.run, "op", state, at, columns), keys))[1]

    def changes(self, after: int, until: int, state: str | None = None, keys: Any = None) -> list[dict[str, Any]]:
        answer = self.reads.changes(ChangesRequest(self.query.run, "op", after, until, state), keys)
        batches = list(answer.batches)
        assert all(len(b.column(0).unique()) == 1 for b in batches), "a batch is of one version"
        versions = [b.column(0)[0].as_py() for b in batches]
        assert versions == sorted(versions)
        return pa.Table.from_batches(batches, answer.schema).to_pylist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    """Random batches of every kind of variable, in two layouts; tests only read it."""
    rng = random.Random(11)
    f = Flow(tmp_path_factory.mktemp("flow"), n=3, backend="file")
    for _ in range(2):
        f.batch(random_batch(rng))
    f = f.restarted("run2", 2, "rocksdb")
    for _ in range(2):
        f.batch(random_batch(rng))
    f.host.heartbeat()
    yield f
    f.close()


@pytest.mark.parametrize("name", NAMES)
def test_scans_show_what_the_model_holds_at_every_version(flow, name):
    asked = Asked(flow)
    for version in effort((3, flow.version), range(flow.version + 1)):
        expected = flat(name, flow.at[version][name])
        found = asked.scan(name, At("version", version))
        assert in_order(found) == in_order(expected)
        if name == "visits":
            for key in flow.at[version][name]:
                assert [r for r in found if r[:2] == key] == [r for r in expected if r[:2] == key]
        assert asked.reads.count(ScanRequest(flow.run, "op", name, At("version", version)))[1] == len(expected)
    assert in_order(asked.scan(name)) == in_order(expected)
    part = asked.scan(name, partitions=[1]) + asked.scan(name, partitions=[0])
    assert in_order(part) == in_order(expected)


@pytest.mark.parametrize("name", NAMES)
def test_scans_within_bounds_of_the_grouping_key(flow, name):
    asked = Asked(flow)
    rows = flat(name, flow.at[flow.version][name])
    user = pa.schema([KEYS.field(0)])
    for low, high in (("a", "b"), ("ab", None), (None, "ab"), ("b", "zz")):
        start, end = (
            None if v is None else encode_keys(pa.record_batch([[v]], schema=user), [0])[0].as_py()[2:]
            for v in (low, high)
        )
        expected = [r for r in rows if (low is None or r[0] >= low) and (high is None or r[0] < high)]
        assert in_order(asked.scan(name, start=start, end=end)) == in_order(expected), (low, high)
        assert asked.reads.count(ScanRequest(flow.run, "op", name, start=start, end=end))[1] == len(expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1 << 14, 3])
def test_the_rows_of_keys_come_by_position_and_in_their_order(flow, monkeypatch, name, step):
    monkeypatch.setattr(key_reads, "DECODED_ROWS", step)
    monkeypatch.setattr(key_reads, "LONG_ROWS", step)
    asked = Asked(flow)
    keys = [*USERS, USERS[4], USERS[4]]
    for version in (0, 2, flow.version):
        held = flow.at[version][name]
        found = asked.rows(stored(keys), name, At("version", version))
        assert [r[0] for r in found] == sorted(r[0] for r in found)
        for position, key in enumerate(keys):
            own = [r[1:] for r in found if r[0] == position]
            expected = flat(name, {key: held[key]} if key in held else {})
            assert own == expected if name in ("visits", "total") else in_order(own) == in_order(expected)
    in_scan = [r for r in asked.scan(name) if r[:2] == USERS[4]]
    assert [r[1:] for r in asked.rows(stored([USERS[4]]), name)] == in_scan, "the order of a scan"
    assert asked.rows(pa.array([], pa.binary()), name) == []


def test_lists_and_maps_in_one_row_per_key(flow):
    asked = Asked(flow)
    held = flow.at[flow.version]
    lists = {r[:2]: [tuple(e.values()) for e in r[2]] for r in asked.scan("visits", collect=True)}
    assert lists == held["visits"]
    assert asked.reads.count(ScanRequest(flow.run, "op", "visits", collect=True))[1] == len(held["visits"])
    maps = {r[:2]: {tuple(k.values()): v["n"] for k, v in r[2]} for r in asked.scan("pages", collect=True)}
    assert maps == {key: {k: n for k, (n, _) in entries.items()} for key, entries in held["pages"].items()}
    with pytest.raises(RequestError, match=r"Column 'list_value' is list.*compared with null alone"):
        asked.scan("visits", collect=True, where=[Comparison("list_value", "=", ["x"])])


class Two:
    def init(self, handle: Any) -> None:
        self.a = handle.getValueState("a", "n LONG")
        self.b = handle.getValueState("b", "n LONG")


class One:
    def init(self, handle: Any) -> None:
        handle.deleteIfExists("b")
        self.a = handle.getValueState("a", "n LONG")


def test_rows_of_a_deleted_variable_are_not_counted(tmp_path):
    f = Flow(tmp_path, Two, n=1)

    def both(of: Any) -> None:
        of.a.update((1,))
        of.b.update((2,))

    f.batch(dict.fromkeys(USERS, both))
    f = f.restarted("run2", 1, "file", One)
    asked = Asked(f)
    assert len(asked.scan("a")) == asked.reads.count(ScanRequest(f.run, "op", "a"))[1] == len(USERS)
    with pytest.raises(UnknownKvStateIdError, match=r"no state variable 'b'; there are 'a' \(value\)"):
        asked.scan("b")
    with pytest.raises(UnknownKvStateIdError, match="no column family 'b'"):
        asked.reads.lookup(LookupRequest(f.run, "op", column_family="b"), stored(USERS))
    f.close()


def test_columns_of_keys_and_values(flow):
    asked = Asked(flow)
    key = stored([USERS[4]])
    names, _ = rows_of(asked.reads.key_rows(KeyRowsRequest(flow.run, "op", "pages"), key))
    assert names == ["position", "user", "shard", "page", "user__value", "n", "note"]
    names, _ = rows_of(
        asked.reads.key_rows(KeyRowsRequest(flow.run, "op", "pages", columns=["n", "partition_id"]), key)
    )
    assert names == ["position", "n", "partition_id"]
    with pytest.raises(
        UnknownKvStateIdError, match=r"state=.*'total' \(value\), 'visits' \(list\), 'pages' \(map\), 'timers'"
    ):
        asked.scan()
    with pytest.raises(UnknownKvStateIdError, match="no state variable 'x'"):
        asked.rows(key, "x")


@pytest.mark.parametrize("name", NAMES)
def test_changes_are_those_of_the_change_feed_version_by_version(flow, name):
    asked = Asked(flow)
    every = frames.state_changes_table(flow.location, "op", name, from_version=0)
    answer = asked.reads.changes(ChangesRequest(flow.run, "op", 0, flow.version, name), None)
    assert answer.schema == every.schema and answer.version == flow.version
    answer.batches.close()
    expected = every.to_pylist()

    def in_any_order(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(map(repr, rows))

    assert in_any_order(asked.changes(0, flow.version, name)) == in_any_order(expected)
    for version in effort((flow.version,), (2, flow.version)):
        of = [r for r in expected if r["version"] == version]
        assert in_any_order(asked.changes(version - 1, version, name)) == in_any_order(of)
        chosen = [r for r in of if (r["user"], r["shard"]) in USERS[2:6]]
        assert in_any_order(asked.changes(version - 1, version, name, stored(USERS[2:6]))) == in_any_order(chosen)
    assert asked.changes(2, 2, name) == []
    assert asked.changes(0, flow.version, name, pa.array([], pa.binary())) == []


def test_missing_changes_are_rejected(flow):
    asked = Asked(flow, wait_seconds=0.05)
    with pytest.raises(StateVersionError, match=f"Version 99 .*not completed; version {flow.version} is"):
        asked.changes(1, 99, "total")
    with pytest.raises(RequestError, match="there can be none"):
        asked.changes(3, 2, "total")


def test_watch_of_a_running_query_loads_no_state(tmp_path, monkeypatch):
    f = Flow(tmp_path, n=2)
    asked = Asked(f)
    copies: list[int] = []
    real = f.host.files.open_copy
    monkeypatch.setattr(f.host.files, "open_copy", lambda *a: (copies.append(1), real(*a))[1])
    rng = random.Random(2)
    for version in range(1, 6):
        f.batch(random_batch(rng))
        f.host.heartbeat()
        for name in NAMES if version == 5 else effort(["total"], NAMES):
            expected = frames.state_changes_table(f.location, "op", name, from_version=version - 1).to_pylist()
            assert sorted(map(repr, asked.changes(version - 1, version, name))) == sorted(map(repr, expected))
    assert copies == []
    assert asked.changes(0, 5, "total")
    assert len(copies) == 2, "past versions come from storage"
    loads: list[tuple[int, int]] = []
    load = change_feed.stored_files.load
    monkeypatch.setattr(
        change_feed.stored_files,
        "load",
        lambda place, state, piece, version, **k: (
            loads.append((state.version, version)),
            load(place, state, piece, version, **k),
        )[1],
    )
    f.host.cache.unload(f.host.cache.instance(f.run, "op", 0))
    f.host.cache.unload(f.host.cache.instance(f.run, "op", 1))
    f.batch(random_batch(rng))
    f.host.cache.unload(f.host.cache.instance(f.run, "op", 0))
    f.host.cache.unload(f.host.cache.instance(f.run, "op", 1))
    asked.changes(5, 6, "total")
    assert len(copies) == 2 and loads, "the copies continue from their last version"
    assert all(behind - before <= 2 for before, behind in loads)
    f.host.cache._clock = lambda: 1e12
    f.host.maintenance.do_maintenance()
    assert not any(f.host.files.copies.glob("*"))
    f.close()


# -- what expires --------------------------------------------------------------------------------


def test_expired_state_has_no_row(tmp_path):
    f = Flow(tmp_path, Expiring, n=1)

    def write(n: int) -> Any:
        def operation(of: Any) -> None:
            of.seen.update((n,))
            of.log.appendList([(n,)] * 20)
            for i in range(40):
                of.by_page.updateValue((f"/{n}-{i:02}",), (n,))

        return operation

    for n in range(1, 6):  # at 1 to 5 s, for 10 s each; with more entries than are stored with the key
        f.batch(one_key(write(n)))
    f.host.heartbeat()
    now = [5_000]
    asked = Asked(f, now_ms=lambda: now[0])
    key = stored([("a", 0)])
    for time_ms, alive in ((5_000, range(1, 6)), (12_000, range(3, 6)), (14_999, [5]), (15_000, [])):
        now[0] = time_ms
        assert asked.scan("seen") == ([("a", 0, 5)] if alive else [])
        assert asked.rows(key, "seen") == ([(0, "a", 0, 5)] if alive else [])
        assert [r[2] for r in asked.scan("log")] == [n for n in alive for _ in range(20)]
        assert [r[3] for r in asked.rows(key, "log")] == [n for n in alive for _ in range(20)]
        assert sorted(r[3] for r in asked.scan("by_page")) == [n for n in alive for _ in range(40)]
        assert len(asked.rows(key, "by_page")) == 40 * len(alive)
        assert [len(asked.scan(s, collect=True)) for s in ("log", "by_page")] == ([1, 1] if alive else [0, 0])
        counts = [asked.reads.count(ScanRequest(f.run, "op", s))[1] for s in ("seen", "log", "by_page")]
        assert counts == [bool(alive), 20 * len(alive), 40 * len(alive)]
    now[0] = 5_000
    assert rows_of(asked.reads.scan(ScanRequest(f.run, "op", "seen", columns=["n", "ttl_expiration_ms"])))[1] == [
        (5, 15_000)
    ]
    found = asked.scan("log", where=[Comparison("ttl_expiration_ms", "<=", [12_000])])
    assert [r[2] for r in found] == [1] * 20 + [2] * 20
    ((_, _, elements),) = asked.scan("log", collect=True)
    assert elements[0] == {"n": 1}
    f.close()


# -- windows -------------------------------------------------------------------------------------

BY_WINDOW = pa.schema([pa.field("window", WINDOW), pa.field("k", pa.string())])
WINDOW_LAST = pa.schema([pa.field("k", pa.string()), pa.field("window", WINDOW)])


def windowed(tmp_path: Path, key: pa.Schema) -> tuple[Query, AggregateLogic, pa.Schema]:
    state = StateSchema(key, AGGREGATOR.state_schema)
    output = pa.schema([*key, *AGGREGATOR.result_fields])
    # Only what is stored first can be of event time, and go.
    time = EventTime("window", is_window=True) if key.names[0] == "window" else None
    logic = AggregateLogic(state, AGGREGATOR, output, "update", time)
    query = Query(tmp_path, OperatorSchema.of_rows(state, ("k", "window")), "aggregate", n=3)
    return query, logic, pa.schema([*key, pa.field("v", pa.float64())])


@pytest.mark.parametrize("key", [BY_WINDOW, WINDOW_LAST])
def test_the_windows_of_keys_wherever_they_are(tmp_path, monkeypatch, key):
    monkeypatch.setattr(key_reads, "CANDIDATES", 7)
    q, logic, rows = windowed(tmp_path, key)
    asked = Asked(q)
    scanned: list[int] = []
    windows_of = key_reads.KeyWindowIndex._windows_of
    monkeypatch.setattr(
        key_reads.KeyWindowIndex, "_windows_of", lambda self, keys: (scanned.append(1), windows_of(self, keys))[1]
    )
    model: dict[tuple[str, tuple[int, int]], int] = {}
    rng = random.Random(4)
    at: dict[int, dict[tuple[str, tuple[int, int]], int]] = {0: {}}
    for number in range(effort(4, 6)):
        given = []
        for _ in range(40):
            start = 10 * rng.randrange(number, number + 4)
            k = rng.choice("abcd")
            model[(k, (start, start + 10))] = model.get((k, (start, start + 10)), 0) + 1
            by = {"k": k, "window": (start, start + 10)}
            given.append((*(by[name] for name in key.names), 1.0))
        watermark = 10_000 * number
        q.process(logic, list(key.names), batch_of(rows, given), watermark)
        # A window that has ended by the watermark goes.
        if logic.event_time is not None:
            model = {(k, w): n for (k, w), n in model.items() if w[1] * 1000 > watermark}
        at[q.version] = dict(model)
        q.host.heartbeat()
        for version in {q.version, q.version - 1}:
            found = asked.rows(ask(["c", "x", "a", "c"]), at=At("version", version))
            expected = [
                (position, k, w, n)
                for position, k in enumerate(["c", "x", "a", "c"])
                for (of, w), n in sorted(at[version].items())
                if of == k
            ]
            assert [(p, k, seconds(w), n) for p, k, w, n, _ in found] == expected
    if logic.event_time is not None:
        assert len(at[q.version]) < len({w for v in at.values() for w in v}), "some are gone"
    assert len(scanned) < 40
    assert len(asked.scan()) == len(model)
    by_partition = [
        row
        for p in range(3)
        for row in rows_of(asked.reads.key_rows(KeyRowsRequest(q.run, "op", partitions=[p]), ask(["c"])))[1]
    ]
    assert sorted(map(repr, by_partition)) == sorted(map(repr, asked.rows(ask(["c"]))))
    changes = asked.changes(q.version - 1, q.version, keys=ask(["c"]))
    assert changes and {c["k"] for c in changes} == {"c"}
    assert asked.rows(ask(["a"]), at=At("version", 1)) != [], "of a copy from storage"
    with pytest.raises(RequestError, match=r"without the window 'window', as \(k: string\)"):
        asked.rows(pa.array([b"\x00\x00\x07"]))
    q.close()


def ask(keys: list[str]) -> pa.BinaryArray:
    return stored([(k,) for k in keys], pa.schema([BY_WINDOW.field("k")]))


def test_windows_are_searched_again_after_a_reload(tmp_path):
    q, logic, rows = windowed(tmp_path, BY_WINDOW)
    asked = Asked(q)
    q.process(logic, BY_WINDOW.names, batch_of(rows, [((0, 10), "a", 1.0)]))
    q.host.heartbeat()
    assert len(asked.rows(ask(["a"]))) == 1
    for p in range(3):
        q.host.cache.unload(q.host.cache.instance(q.run, "op", p))
    q.process(logic, BY_WINDOW.names, batch_of(rows, [((10, 20), "a", 1.0)]))
    q.host.heartbeat()
    assert len(asked.rows(ask(["a"]))) == 2
    q.process(logic, BY_WINDOW.names, batch_of(rows, [((30, 40), "a", 1.0)]))
    assert len(asked.rows(ask(["a"]), at=At("latest"))) == 3
    assert len(asked.rows(ask(["a"]))) == 2 + (asked.reads.await_completed(q.run, -1, 0) - 2)
    q.close()


def test_the_sessions_of_keys(tmp_path):
    schema, logic, rows = session_operator()
    q = Query(tmp_path, schema, "session_aggregate")
    q.process(logic, ["k"], batch_of(rows, [("a", (5, 15), 1.0), ("a", (40, 50), 2.0), ("b", (5, 15), 3.0)]))
    q.process(logic, ["k"], batch_of(rows, [("a", (12, 22), 5.0), ("b", (60, 70), 1.0)]))
    q.host.heartbeat()
    asked = Asked(q)
    names, found = rows_of(asked.reads.key_rows(KeyRowsRequest(q.run, "op"), ask(["b", "x", "a"])))
    assert names == ["position", "k", "session_window", "n", "mean"]
    assert [(p, k, seconds(w), n, mean) for p, k, w, n, mean in found] == [
        (0, "b", (5, 15), 1, 3.0),
        (0, "b", (60, 70), 1, 1.0),
        (2, "a", (5, 22), 2, 3.0),
        (2, "a", (40, 50), 1, 2.0),
    ]
    assert sorted(r[0] for r in asked.scan(where=[Comparison("n", "=", [1])])) == ["a", "b", "b"]
    (of,) = asked.reads.operators()
    assert of["state"][0]["kind"] == "sessions" and of["kind"] == "session_aggregate"
    q.close()
