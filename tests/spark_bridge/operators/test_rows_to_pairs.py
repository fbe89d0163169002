"""Rows make the pairs that operators have stored, for every kind of state: seen on a checkpoint of real streams."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from coordinator_actor.reading.stored_files import opened_partition, scan_family
from coordinator_actor.reading.stored_versions import Piece, Reading, StateVersions, find_state
from spark_bridge.state_format.layouts import ENDS_FAMILY, LIST, MAP, SESSIONS, list_families, timers_variable
from spark_bridge.state_format.partition_rows import partition_rows, scan_partition
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from tests.spark_bridge.state_data.format_fixtures import Stored

KEY = pa.schema([pa.field("k", pa.string())])


EMPTY = [pa.array([], pa.binary())] * 2


def _columns(batch: pa.RecordBatch) -> list[pa.Array]:
    return list(batch.columns)


@dataclass(frozen=True)
class Kept:
    """A variable of the fixtures."""

    reading: Reading
    variable: StateVariable

    @property
    def pairs(self) -> PairsOfRows:
        return PairsOfRows(VariableRows(self.reading.schema, self.variable, raw=True))

    def of(self, piece: Piece) -> tuple[pa.RecordBatch, dict[str, pa.Table]]:
        """The rows of a partition, and the pairs of each of its families."""
        with opened_partition(self.reading.place, piece) as state:
            rows = pa.Table.from_batches(
                list(scan_partition(self.pairs.rows, state, piece.partition)), self.pairs.rows.output
            )
            stored = {
                family: pa.table(
                    [
                        pa.chunked_array(c, pa.binary())
                        for c in zip(*map(_columns, scan_family(state, family)), strict=True)
                    ]
                    or EMPTY,
                    ["k", "v"],
                )
                for family in self.variable.families
            }
        batch = rows.select(self.pairs.columns.names).combine_chunks().to_batches()
        return batch[0] if batch else self.pairs.columns.empty_table().to_batches()[0], stored


def kept(backend: str) -> list[Kept]:
    versions = StateVersions.look(find_state(Stored(backend).checkpoint))
    readings = [versions.reading(name) for name in sorted(versions.operators(versions.completed))]
    return [Kept(r, v) for r in readings for v in r.schema.in_use if not v.name.startswith(("left", "right"))]


def made(pairs: PairsOfRows, batch: pa.RecordBatch, num_groups: int) -> dict[str, list[SortedPairs]]:
    keys = pairs.keys(batch, num_groups)
    order = pc.sort_indices(keys)
    found: dict[str, list[SortedPairs]] = {}
    for family, of_family in pairs.pairs(batch.take(order), keys.take(order)):
        found.setdefault(family, []).append(of_family)
    return found


def in_any_order(rows: pa.RecordBatch) -> list[dict[str, object]]:
    """The rows, with the elements of each array in one order: that of a small map's entries says nothing."""
    return [
        {name: sorted(v, key=repr) if isinstance(v, list) else v for name, v in row.items()} for row in rows.to_pylist()
    ]


@pytest.mark.parametrize("backend", ["rocksdb", "file"])
def test_rows_make_the_pairs_that_are_stored(backend: str) -> None:
    kinds = set()
    for one in kept(backend):
        for piece in one.reading.pieces:
            batch, stored = one.of(piece)
            found = made(one.pairs, batch, one.reading.key_groups)
            kinds |= {one.pairs.rows.kind} if batch.num_rows else set()
            for family, table in stored.items():
                keys = pa.chunked_array([p.keys for p in found.get(family, [])], pa.binary()).combine_chunks()
                values = pa.chunked_array([p.values for p in found.get(family, [])], pa.binary()).combine_chunks()
                schema = one.variable.families[family]
                if family == ENDS_FAMILY:
                    continue  # a time before which no session ends, which may be an earlier one than that of the first
                assert keys.equals(table["k"].combine_chunks()), (one.reading.operator, family)
                # Earlier rows have the number of an earlier schema, and a list that grew was cut where it was then.
                now, then = schema.decode_values(values), schema.decode_values(table["v"])
                if one.pairs.rows.kind == SESSIONS:
                    now, then = now.select([SESSIONS]), then.select([SESSIONS])
                if one.pairs.rows.kind == MAP:
                    assert in_any_order(now) == in_any_order(then), (one.reading.operator, family)
                elif one.pairs.rows.kind != LIST:
                    assert now.equals(then), (one.reading.operator, family)
                    if not schema.history and one.pairs.rows.kind != SESSIONS:
                        assert values.equals(table["v"].combine_chunks()), (one.reading.operator, family)
    assert kinds == {"rows", "sessions", "value", "list", "map", "timers"}


@pytest.mark.parametrize("backend", ["rocksdb", "file"])
def test_the_pairs_are_read_as_the_rows(backend: str) -> None:
    for one in kept(backend):
        for piece in one.reading.pieces:
            batch, _ = one.of(piece)
            found = made(one.pairs, batch, one.reading.key_groups)
            rows = one.pairs.rows
            given = {
                f: iter([pa.record_batch([p.keys, p.values], names=["key", "value"]) for p in found.get(f, [])])
                for f in rows.families
            }
            again = pa.Table.from_batches(list(partition_rows(rows, given, piece.partition)), rows.output)
            now, then = again.select(one.pairs.columns.names).to_pylist(), batch.to_pylist()
            if rows.kind == MAP:
                now, then = sorted(now, key=repr), sorted(then, key=repr)
            assert now == then, rows.variable.name


def test_a_timer_that_is_given_twice_is_one_timer() -> None:
    variable = timers_variable(KEY)
    pairs = PairsOfRows(VariableRows(OperatorSchema((variable,)), variable, raw=True))
    batch = pa.record_batch([pa.array(["a", "a", "a", "b"]), pa.array([5, 2, 5, 5])], schema=pairs.columns)
    found = made(pairs, batch, 8)
    by_key, by_time = (b"".join([]), b"") if not found else (found["timers.-keys"][0], found["timers.-expiry"][0])
    assert isinstance(by_key, SortedPairs) and isinstance(by_time, SortedPairs)
    lists = variable.families["timers.-keys"].decode_values(by_key.values).column(0).to_pylist()
    assert sorted(lists) == [[2, 5], [5]] and len(by_time) == 3


def test_missing_requirements_are_named() -> None:
    element = [pa.field("n", pa.int64(), nullable=False), pa.field("note", pa.string())]
    variable = StateVariable("seen", LIST, list_families("seen", KEY, element))
    pairs = PairsOfRows(VariableRows(OperatorSchema((variable,)), variable, raw=True))
    assert [(f.name, f.nullable) for f in pairs.columns] == [("k", True), ("n", False), ("note", True)]
    rows = StateSchema(pa.schema([pa.field("k", pa.string(), nullable=False)]), pa.schema([("v", pa.int32())]))
    schema = OperatorSchema.of_rows(rows)
    pairs = PairsOfRows(VariableRows(schema, schema.in_use[0], raw=True))
    assert [(f.name, f.nullable) for f in pairs.columns] == [("k", False), ("v", True)]


def test_long_lists_and_large_maps_are_cut() -> None:
    kinds: dict[str, int] = {}
    for one in kept("file"):
        if one.variable.name in ("seen", "pages"):
            for piece in one.reading.pieces:
                batch, _ = one.of(piece)
                second = one.pairs.rows.second
                assert second is not None
                found = made(one.pairs, batch, one.reading.key_groups)
                kinds[one.pairs.rows.kind] = kinds.get(one.pairs.rows.kind, 0) + sum(map(len, found.get(second, [])))
    assert kinds[LIST] >= 1 and kinds[MAP] >= 70
