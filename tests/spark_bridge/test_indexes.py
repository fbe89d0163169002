"""A secondary index always has the rows that a scan of everything has, through every change of the state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument
from coordinator_actor.messages import OperatorFigures, OperatorSpec
from coordinator_actor.reading.stored_files import opened_partition, scan_family
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from spark_bridge.aggregates.aggregator import Aggregator, Output
from spark_bridge.cli.main import app
from spark_bridge.exceptions import RequestError
from spark_bridge.operators.aggregate_task import AggregateLogic
from spark_bridge.overview.model import variables_in_use
from spark_bridge.queryable.protocol import At, Comparison, ScanRequest
from spark_bridge.queryable.reads import index_reads, scans
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_format.layouts import aggregate_schema, is_present
from spark_bridge.state_format.stored_rows import key_groups_of
from spark_bridge.state_surgery import shuffle
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.state_surgery.rewrite_state import rewrite_state
from spark_bridge.task.state_task import EventTime
from tests.command_line import CliRunner
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.operator_runs import SECOND, TS, WINDOW, batch_of
from tests.spark_bridge.state_flows import Query
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers

AGGREGATOR = Aggregator(
    [
        Output("n", "count", None, None, None),
        Output("merchant", "last", "shop", "ts", pa.string(), TS),
        Output("peak", "max", "amount", None, pa.float64()),
    ]
)
CARD = [pa.field("card", pa.int64()), pa.field("country", pa.string())]
BY_KEY, BY_WINDOW = pa.schema(CARD), pa.schema([pa.field("window", WINDOW), *CARD])
INDEXED = ("country", "merchant", "peak")
SHOPS = ["a", "b", "ab", "", "a\0b", "é", None]
COUNTRIES = ["de", "fr", None]
BACKENDS = ("file", "rocksdb")


def logic_of(keys: pa.Schema, mode: str = "update") -> AggregateLogic:
    output = pa.schema([*keys, *AGGREGATOR.result_fields])
    time = EventTime("window", True, 10 * SECOND) if keys == BY_WINDOW else None
    state = StateSchema(keys, AGGREGATOR.state_schema, zeros=AGGREGATOR.zeros)
    return AggregateLogic(state, AGGREGATOR, output, mode, time)


def schema_of(keys: pa.Schema, indexed: tuple[str, ...] = INDEXED) -> OperatorSchema:
    fields = {f.name: f for f in [*keys, *AGGREGATOR.result_fields]}
    by_user = ("card", "country", "window") if keys == BY_WINDOW else ()
    return aggregate_schema(logic_of(keys).schema, by_user, [fields[name] for name in indexed])


class Payments:
    """A query over random payments; restarted with other partitions and backends."""

    def __init__(self, root: Path, keys: pa.Schema, backend: str, mode: str = "update") -> None:
        self.root, self.keys, self.mode = root, keys, mode
        self.rng = random.Random(17)
        self.now_s = self.watermark_s = 0
        self.query = Query(root, schema_of(keys), "aggregate", 2, backend)
        Path(self.query.location).mkdir(exist_ok=True)
        (Path(self.query.location) / "metadata").write_text('{"id":"q"}')

    def batch(self, size: int = 40) -> None:
        rows = []
        for _ in range(size):
            ts = self.now_s + self.rng.randrange(10)
            start = ts - ts % 10
            key = (self.rng.randrange(30), self.rng.choice(COUNTRIES))
            amount = self.rng.choice([0.0, -0.0, 1.5, float("nan"), 2.0, None])
            windows = [(start, start + 10)] if self.keys == BY_WINDOW else []
            rows.append((*windows, *key, ts, self.rng.choice(SHOPS), amount))
        batch = self.batch_rows(rows)
        self.query.process(logic_of(self.keys, self.mode), self.keys.names, batch, watermark_ms=self.watermark_s * 1000)
        self.query.host.heartbeat()
        self.now_s += 7
        self.watermark_s = max(self.watermark_s, self.now_s + self.rng.randrange(-10, 6))

    def batch_rows(self, rows: list[Any]) -> pa.RecordBatch:
        columns = [*self.keys, pa.field("ts", TS), pa.field("shop", pa.string()), pa.field("amount", pa.float64())]
        return batch_of(pa.schema(columns), rows)

    def snapshots(self) -> None:
        for upload in self.query.host.maintenance.do_maintenance():
            upload.result()

    def restart(self, run: str, n: int, backend: str) -> None:
        self.query.stop()
        self.query = Query(self.root, schema_of(self.keys), "aggregate", n, backend, run)

    def rows(self, *where: Comparison, at: int | None = None, **bounds: Any) -> pa.Table:
        """The rows that the host answers with."""
        asked = At("version", self.query.version if at is None else at)
        request = ScanRequest(self.query.run, "op", None, asked, where=list(where), **bounds)
        answer = HostReads(self.query.host).scan(request)
        return pa.Table.from_batches(list(answer.batches), answer.schema)

    def check(self) -> int:
        """Compare indexes with rows, and the answers of the host by each index with a scan; return the number of rows.

        Also at the version before, whose pairs are under the changes of the last one.
        """
        schema = schema_of(self.keys)
        request = ScanRequest(self.query.run, "op", None, At("version", self.query.version))
        assert HostReads(self.query.host).count(request)[1] == self.rows().num_rows
        everything = check_entries(self.query.location, schema)
        for version in (self.query.version, self.query.version - 1):
            rows = self.rows(at=version)
            for column in INDEXED:
                for value in {repr(v): v for v in rows[column].to_pylist()}.values():
                    wanted = rows.filter(is_value(rows, column, value))
                    values = [] if value is None else ["NaN" if value != value else value]
                    assert_same(self.rows(Comparison(column, "=" if values else "is null", values), at=version), wanted)
            shops = Comparison("merchant", "in", ["a", "b", "none"])
            of_shops = pc.and_(pc.is_in(rows["merchant"], pa.array(["a", "b"])), pc.equal(rows["country"], "de"))
            assert_same(self.rows(shops, Comparison("country", "=", ["de"]), at=version), rows.filter(of_shops))
            in_order = self.rows(at=version)
            in_order = in_order.filter(pc.is_in(in_order["merchant"], pa.array(["a", "b"])))
            assert repr(self.rows(shops, at=version).to_pylist()) == repr(in_order.to_pylist())
            assert self.rows(Comparison("merchant", "=", ["none"]), at=version).num_rows == 0
            for most in pc.unique(rows["n"]).to_pylist():
                of_n = rows.filter(pc.and_(pc.equal(rows["n"], most), pc.equal(rows["country"], "fr")))
                asked = (Comparison("n", "=", [most]), Comparison("country", "=", ["fr"]))
                assert self.rows(*asked, at=version, limit=1).num_rows == min(1, of_n.num_rows)
            of_country = pc.sum(pc.equal(rows["country"], "fr")).as_py() or 0
            assert self.rows(asked[1], at=version, limit=2).num_rows == min(2, of_country)
        return int(everything.num_rows)


def check_entries(location: str, schema: OperatorSchema) -> pa.Table:
    """Compare the entries of each index with the rows, all read from storage; return the rows."""
    rows = state_table(location, "op").drop_columns(["key_group", "partition_id"])
    (variable,) = schema.variables
    versions = StateVersions.look(find_state(location))
    for column, family in variable.indexes.items():
        keys = schema.families[family].key
        expected = sorted(map(repr, zip(*(rows[name].to_pylist() for name in (column, *keys.names[1:])), strict=True)))
        entries: list[str] = []
        for piece in versions.reading("op").pieces:
            with opened_partition(versions.place, piece) as state:
                for batch in scan_family(state, family):
                    entries += [repr(tuple(e.values())) for e in decode_keys(batch.column(0), keys).to_pylist()]
        assert sorted(entries) == expected, column
    return rows


def is_value(rows: pa.Table, column: str, value: Any) -> pa.ChunkedArray:
    if value is None:
        return pc.is_null(rows[column])
    return pc.is_nan(rows[column]) if value != value else pc.equal(rows[column], value)


def assert_same(one: pa.Table, other: pa.Table) -> None:
    assert sorted(map(repr, one.to_pylist())) == sorted(map(repr, other.to_pylist()))


@pytest.fixture
def payments(tmp_path: Path) -> Iterator[Callable[..., Payments]]:
    made: list[Payments] = []

    def make(*args: Any) -> Payments:
        made.append(Payments(tmp_path, *args))
        return made[-1]

    yield make
    for one in made:
        one.query.close()


@pytest.mark.parametrize(
    ("backend", "keys", "mode"),
    [
        ("file", BY_KEY, "update"),
        ("rocksdb", BY_WINDOW, "update"),
        pytest.param("file", BY_WINDOW, "append", marks=pytest.mark.slow),
        only_thorough("rocksdb", BY_WINDOW, "complete"),
        only_thorough("rocksdb", BY_KEY, "update"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.names[0],
)
def test_index_agrees_with_the_rows_through_rescaling_and_forgetting(
    payments: Callable[..., Payments], backend: str, keys: pa.Schema, mode: str
) -> None:
    stream = payments(keys, backend, mode)
    for _ in range(effort(2, 20)):
        stream.batch()
    rows = stream.check()
    assert rows > 5
    stream.snapshots()
    stream.batch(15)
    stream.restart("run2", 5, BACKENDS[1 - BACKENDS.index(backend)])
    stream.check()
    stream.batch()
    stream.check()
    stream.query.stop()
    before = check_entries(stream.query.location, schema_of(keys))
    gone = sorted({(row["card"], "de") for row in before.to_pylist() if row["country"] == "de"})[:3]
    forget_keys(stream.query.location, "op", gone)
    after = check_entries(stream.query.location, schema_of(keys))
    assert_same(after, before.filter(pa.array([(r["card"], r["country"]) not in gone for r in before.to_pylist()])))
    with CheckpointClient.open(stream.query.location) as client:
        found = client.find("op", country="de").to_arrow()
        assert_same(found, after.filter(pc.equal(after["country"], "de")))
    stream.query = Query(stream.root, schema_of(keys), "aggregate", 3, backend, "run3")
    stream.batch()
    stream.check()


def test_removed_keys_leave_the_index(payments: Callable[..., Payments]) -> None:
    stream = payments(BY_WINDOW, "file")
    stream.batch()
    stream.now_s += 100
    stream.batch(1)  # whose watermark closes no window yet: that of the next batch does
    stream.now_s += 100
    stream.batch(1)
    assert stream.check() <= 2


def test_lookup_by_index_reads_the_matching_rows_only(
    payments: Callable[..., Payments], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = payments(BY_KEY, "file")
    stream.batch()
    rows = stream.rows()

    def refused(*_: Any) -> Any:
        raise AssertionError("all rows are read")

    monkeypatch.setattr(scans, "pairs_of", refused)
    found = stream.rows(Comparison("country", "=", ["de"]), Comparison("n", ">", [1]))
    assert_same(found, rows.filter(pc.and_(pc.equal(rows["country"], "de"), pc.greater(rows["n"], 1))))
    for where in ([Comparison("n", "=", [1])], [Comparison("country", ">", ["de"])], []):
        with pytest.raises(AssertionError, match="all rows are read"):
            stream.rows(*where)
    assert HostReads(stream.query.host).count(
        ScanRequest(stream.query.run, "op", where=[Comparison("country", "is null", [])])
    ) == (1, rows["country"].null_count)


@pytest.mark.parametrize(
    ("module", "bound"), [(index_reads, "MAX_MATCHES"), (index_reads, "MAX_MATCHES_BYTES"), (scans, "MAX_RANGES")]
)
def test_many_matches_are_scanned(
    payments: Callable[..., Payments], monkeypatch: pytest.MonkeyPatch, module: Any, bound: str
) -> None:
    stream = payments(BY_KEY, "file")
    stream.batch()
    monkeypatch.setattr(module, bound, 3)
    whole, scanned = scans.pairs_of, []

    def noting(*args: Any) -> Any:
        scanned.append(args)
        return whole(*args)

    monkeypatch.setattr(scans, "pairs_of", noting)
    stream.check()
    scanned.clear()
    stream.rows(Comparison("country", "=", ["de"]))
    assert scanned


def test_entry_without_a_row_is_an_error(payments: Callable[..., Payments], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = payments(BY_KEY, "file")
    stream.batch()
    monkeypatch.setattr(index_reads.key_reads, "values_of", lambda view, keys, family: pa.nulls(len(keys), pa.binary()))
    with pytest.raises(DamagedFileError, match=r"index of column 'country' has \d+ entries without a row in partition"):
        stream.rows(Comparison("country", "=", ["de"]))


class Plant:
    """A batch that changes an index without its rows: it removes entries of a column, and writes others."""

    def __init__(self, column: str, change: Callable[[pa.RecordBatch], pa.RecordBatch | None], num: int) -> None:
        self.column, self.change, self.num = column, change, num
        self.removed: list[dict[str, Any]] = []
        self.written: list[dict[str, Any]] = []

    def process(self, batches: Iterator[pa.RecordBatch], store: Any, timer: Any) -> Iterator[pa.RecordBatch]:
        (rows,) = store.schema.variables
        family = rows.indexes[self.column]
        schema = rows.families[family]
        ranges = [(group.to_bytes(2, "big"), (group + 1).to_bytes(2, "big")) for group in range(*store.key_groups)]
        for pairs in store.scan(ranges, family):
            keys = pairs.column(0).slice(0, self.num)
            columns = decode_keys(keys, schema.key)
            changed = self.change(columns)
            if changed is None:
                self.removed += columns.to_pylist()
                store.stage(keys, pa.nulls(len(keys), pa.binary()), family)
            else:
                self.written += changed.to_pylist()
                entries = encode_keys(changed, key_groups_of(keys))
                store.stage(entries, schema.encode_values(is_present(len(keys))), family)
            break
        store.commit(OperatorFigures(), timer.milliseconds)
        yield from ()


@pytest.mark.in_turns("file", "rocksdb")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [BY_KEY, BY_WINDOW], ids=["key", "window"])
def test_verify_compares_indexes_with_rows(payments: Callable[..., Payments], keys: pa.Schema, backend: str) -> None:
    """It names a row without an entry, an entry of another value, and an entry without a row."""

    def verified(code: int) -> Any:
        result = CliRunner().invoke(app, ["verify", stream.query.location, "--rows", "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def other_value(columns: pa.RecordBatch) -> pa.RecordBatch:
        values = pa.array(["x"] * columns.num_rows)
        return pa.RecordBatch.from_arrays([values, *columns.columns[1:]], schema=columns.schema)

    def other_key(columns: pa.RecordBatch) -> pa.RecordBatch:
        cards = pa.array([1000] * columns.num_rows, pa.int64())
        named = {**dict(zip(columns.schema.names, columns.columns, strict=True)), "card": cards}
        return pa.RecordBatch.from_arrays(list(named.values()), schema=columns.schema)

    stream = payments(keys, backend)
    for _ in range(3):
        stream.batch()
    stream.snapshots()
    assert verified(0)["is_sound"]
    missing = Plant("merchant", lambda columns: None, 2)
    wrong, without_row = Plant("country", other_value, 1), Plant("peak", other_key, 1)
    nothing = stream.batch_rows([])
    for plant in (missing, wrong, without_row):
        stream.query.process(plant, stream.keys.names, nothing, stream.watermark_s * 1000)
    found = verified(1)
    assert not found["is_sound"] and not found["damages"] and not found["lost"]
    said = {(d["partition"], d["what"]) for d in found["differences"]}
    assert len(said) == 6 and {p for p, _ in said} == {0, 1}
    for p in (0, 1):
        texts = "\n".join(what for partition, what in said if partition == p)
        assert "the index of column 'merchant' has no entry for 2 rows, as for" in texts
        assert "the index of column 'country' has 1 entries without a row of that value, as country='x'" in texts
        assert "the index of column 'peak' has 1 entries without a row of that value" in texts
    cards = {f"card={row['card']!r}" for row in missing.removed}
    assert all(any(card in what for card in cards) for _, what in said if "'merchant'" in what)
    assert all("card=1000" in what for _, what in said if "'peak'" in what)
    text = CliRunner().invoke(app, ["verify", stream.query.location, "--rows"]).stdout
    assert "rewrite_state builds the indexes" in text.replace("\n", " ")
    assert CliRunner().invoke(app, ["verify", stream.query.location]).exit_code == 0


def test_index_of_a_savepoint_is_that_of_its_rows(payments: Callable[..., Payments], tmp_path: Path) -> None:
    stream = payments(BY_KEY, "rocksdb")
    stream.batch()
    query = stream.query
    query.c.trigger_savepoint("r1", "name", str(tmp_path / "savepoints"))
    while (status := query.c.savepoint_status("r1")).path is None:
        assert status.failure is None, status
        query.host.heartbeat()
    restore_into_checkpoint(status.path, str(tmp_path / "restored"))
    assert_same(check_entries(str(tmp_path / "restored"), schema_of(BY_KEY)), stream.rows())


@pytest.mark.parametrize(("before", "after"), [((), INDEXED), (INDEXED, ("peak",)), (("merchant",), ())])
def test_other_indexes_are_refused_and_the_remedy_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    query = Query(tmp_path, schema_of(BY_KEY, before), "aggregate")
    columns = [*BY_KEY, pa.field("ts", TS), pa.field("shop", pa.string()), pa.field("amount", pa.float64())]
    rows = [(i, COUNTRIES[i % 3], i, SHOPS[i % 7], float(i % 5)) for i in range(30)]
    query.process(logic_of(BY_KEY), BY_KEY.names, batch_of(pa.schema(columns), rows))
    query.stop()
    spec = OperatorSpec("op", 2, schema_of(BY_KEY, after).to_json(), "file", "aggregate", uses_time=True)
    registration = query.world.registration("run2", 2, operators=(spec,), key_groups=16)
    refusal = query.world.coordinator(1).register_query(registration).refusal
    assert refusal is not None and "The indexes of operator 'op' differ" in refusal
    names = {name: f"index={name!r}" if name else "no index" for name in (before, after)}
    assert f"have {names[before]}, and the program declares {names[after]}." in refusal
    new = query.location + "-2"
    call = f"rewrite_state({query.location!r}, 'op', lambda rows: rows, {new!r}, program=dataframe)"
    assert call in refusal
    (Path(query.location) / "metadata").write_text('{"id":"q"}')
    monkeypatch.setattr(shuffle, "REWRITE_CHUNK_BYTES", 200)

    def rewriting(*args: Any, **options: Any) -> None:
        rewrite_state(*args, **options, workers=OwnWorkers())

    eval(call, {"rewrite_state": rewriting, "dataframe": [spec]})
    assert_same(check_entries(new, schema_of(BY_KEY, after)), check_entries(query.location, schema_of(BY_KEY, before)))
    with pytest.raises(InvalidStateStoreArgument, match="also kept by an index: give program="):
        rewrite_state(
            query.location if before else new,
            "op",
            lambda rows: rows,
            str(tmp_path / "third"),
            program=None if before or after else [spec],
            workers=OwnWorkers(),
        )


def test_find_needs_an_index(payments: Callable[..., Payments]) -> None:
    stream = payments(BY_KEY, "file")
    stream.batch()
    with CheckpointClient.open(stream.query.location) as client:
        assert client.operators()[0]["state"][0]["index"] == list(INDEXED)
        assert variables_in_use(schema_of(BY_KEY))[0].index == list(INDEXED)
        assert_same(client.find("op", country="de", limit=3, columns=["card"]).to_arrow().slice(3), pa.table({}))
        with pytest.raises(RequestError) as refused:
            client.find("op", n=3)
    assert str(refused.value) == (
        "find('op') needs a condition on a column with an index, and only 'country', 'merchant', 'peak' have one. "
        "scan('op', where=[('n', '=', ...)]) reads all rows; index= of aggregate declares an index."
    )
