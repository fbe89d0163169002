"""A secondary index always has the rows that a scan of everything has, through every change of the state."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import INDEX_FAMILY, OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.reading.stored_files import opened_partition, scan_family
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from spark_bridge.aggregates.aggregator import Aggregator, Output
from spark_bridge.exceptions import RequestError
from spark_bridge.operators.aggregate_task import AggregateLogic
from spark_bridge.queryable.protocol import Comparison, ScanRequest
from spark_bridge.queryable.reads import index_reads, scans
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.state_format.layouts import aggregate_schema
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.state_surgery.rewrite_state import rewrite_state
from spark_bridge.task.state_task import EventTime
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.operator_runs import SECOND, TS, WINDOW, batch_of
from tests.spark_bridge.state_flows import Query
from tests.spark_bridge.state_surgery.own_workers import OwnWorkers

AGGREGATOR = Aggregator(
    [
        Output("n", "count", None, None, None),
        Output("merchant", "last", "shop", "ts", pa.string(), TS),
        Output("peak", "max", "amount", None, pa.float64()),
    ]
)
CARD = [pa.field("card", pa.int64()), pa.field("country", pa.string())]
BY_KEY, BY_WINDOW = pa.schema(CARD), pa.schema([pa.field("window", WINDOW), *CARD])
INDEXED = ("merchant", "peak", "country")
SHOPS = ["a", "b", "ab", "", "a\0b", "é", None]
COUNTRIES = ["de", "fr", None]
BACKENDS = ("file", "rocksdb")


def logic_of(keys: pa.Schema) -> AggregateLogic:
    output = pa.schema([*keys, *AGGREGATOR.result_fields])
    time = EventTime("window", True, 10 * SECOND) if keys == BY_WINDOW else None
    state = StateSchema(keys, AGGREGATOR.state_schema, zeros=AGGREGATOR.zeros)
    return AggregateLogic(state, AGGREGATOR, output, "update", time)


def schema_of(keys: pa.Schema, indexed: tuple[str, ...] = INDEXED) -> OperatorSchema:
    fields = {f.name: f for f in [*keys, *AGGREGATOR.result_fields]}
    by_user = ("card", "country", "window") if keys == BY_WINDOW else ()
    return aggregate_schema(logic_of(keys).schema, by_user, [fields[name] for name in indexed])


class Payments:
    """A query over random payments; restarted with other partitions and backends."""

    def __init__(self, root: Path, keys: pa.Schema, backend: str, seed: int = 0) -> None:
        self.root, self.keys = root, keys
        self.rng = random.Random(seed)
        self.now_s = 0
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
        columns = [*self.keys, pa.field("ts", TS), pa.field("shop", pa.string()), pa.field("amount", pa.float64())]
        batch = batch_of(pa.schema(columns), rows)
        self.query.process(logic_of(self.keys), self.keys.names, batch, watermark_ms=(self.now_s - 10) * 1000)
        self.query.host.heartbeat()
        self.now_s += 7

    def snapshots(self) -> None:
        for upload in self.query.host.maintenance.do_maintenance():
            upload.result()

    def restart(self, run: str, n: int, backend: str) -> None:
        self.query.stop()
        self.query = Query(self.root, schema_of(self.keys), "aggregate", n, backend, run)

    def check(self, location: str | None = None) -> int:
        return check_indexes(location or self.query.location, schema_of(self.keys))


def check_indexes(location: str, schema: OperatorSchema) -> int:
    """Compare each index with the rows, and each answer by an index with a scan; return the number of rows."""
    client = CheckpointClient.open(location)
    everything = client.scan("op").to_arrow()
    (variable,) = schema.variables
    for column, family in variable.indexes.items():
        keys = schema.families[family].key.names[1:]
        expected = sorted(map(repr, zip(*(everything[name].to_pylist() for name in (column, *keys)), strict=True)))
        entries = [tuple(entry.values()) for entry in entries_of(location, schema, family)]
        assert sorted(map(repr, entries)) == expected, column
        values = set(everything[column].to_pylist())
        for value in values:
            assert_same(
                client.find("op", **{column: value}).to_arrow(), everything.filter(is_value(everything, column, value))
            )
        for value in ("no such shop", 17.25):
            if isinstance(value, str) == pa.types.is_string(everything[column].type):
                assert client.find("op", **{column: value}).to_arrow().num_rows == 0
    shops = client.find("op", merchant=["a", "b", "none"], country="de").to_arrow()
    wanted = pc.and_(pc.is_in(everything["merchant"], pa.array(["a", "b"])), pc.equal(everything["country"], "de"))
    assert_same(shops, everything.filter(wanted))
    client.close()
    return int(everything.num_rows)


def is_value(rows: pa.Table, column: str, value: Any) -> pa.ChunkedArray:
    if value is None:
        return pc.is_null(rows[column])
    return pc.is_nan(rows[column]) if value != value else pc.equal(rows[column], value)


def assert_same(one: pa.Table, other: pa.Table) -> None:
    assert sorted(map(repr, one.to_pylist())) == sorted(map(repr, other.to_pylist()))


def entries_of(location: str, schema: OperatorSchema, family: str) -> Iterator[dict[str, Any]]:
    versions = StateVersions.look(find_state(location))
    for piece in versions.reading("op").pieces:
        with opened_partition(versions.place, piece) as state:
            for batch in scan_family(state, family):
                yield from decode_keys(batch.column(0), schema.families[family].key).to_pylist()


@pytest.fixture
def payments(tmp_path: Path) -> Iterator[Callable[..., Payments]]:
    made: list[Payments] = []

    def make(*args: Any) -> Payments:
        made.append(Payments(tmp_path, *args))
        return made[-1]

    yield make
    for one in made:
        one.query.close()


@pytest.mark.parametrize("keys", [BY_KEY, BY_WINDOW], ids=["keys", "windows"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_index_agrees_with_the_rows_through_rescaling_and_forgetting(
    payments: Callable[..., Payments], keys: pa.Schema, backend: str
) -> None:
    stream = payments(keys, backend, random.randrange(1 << 30))
    for _ in range(effort(4, 20)):
        stream.batch()
    rows = stream.check()
    assert rows > 20
    stream.snapshots()
    stream.batch(15)
    stream.restart("run2", 5, BACKENDS[1 - BACKENDS.index(backend)])
    stream.check()
    stream.batch()
    stream.check()
    stream.query.stop()
    before = CheckpointClient.open(stream.query.location).find("op", country="de").to_arrow()
    gone = sorted({(row["card"], "de") for row in before.to_pylist()})[:3]
    forget_keys(stream.query.location, "op", gone)
    stream.check()
    after = CheckpointClient.open(stream.query.location).find("op", country="de").to_arrow()
    assert {(c, "de") for c in after["card"].to_pylist()} == {(c, "de") for c in before["card"].to_pylist()} - set(gone)
    stream.query = Query(stream.root, schema_of(keys), "aggregate", 3, backend, "run3")
    stream.batch()
    stream.check()
