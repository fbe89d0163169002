"""Rows by key in bounded memory: rows on disk count like rows in memory, and no key comes twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.encoding.keys import decode_keys
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.keyed_rows import Ids, KeyedRows, RowReducer, StepSize, empty, one_batch, parts_of
from tests.effort import examples

KEYS = pa.schema([pa.field("k", pa.string()), pa.field("n", pa.int32())])
SUMS = pa.schema([pa.field("count", pa.int64()), pa.field("text", pa.string())])


def summed(ids: Ids, num_keys: int, rows: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
    """One row per key that has any: how many there were, and the greatest text."""
    present = np.unique(ids)
    counts = np.bincount(ids, rows.column(0).to_numpy(), num_keys)[present].astype(np.int64)
    texts = rows.column(1).to_pylist()
    greatest = [max(texts[r] for r in np.flatnonzero(ids == i)) for i in present]
    return present, pa.RecordBatch.from_arrays([pa.array(counts), pa.array(greatest)], schema=SUMS)


def keyed(keys: list[tuple[str | None, int]]) -> KeyedRows:
    columns = pa.RecordBatch.from_arrays(
        [pa.array([k[i] for k in keys], f.type) for i, f in enumerate(KEYS)], schema=KEYS
    )
    groups = group_rows(columns, KEYS, 16)
    rows = [pa.array(np.ones(len(keys), np.int64)), pa.array([f"{k[0]}{i}" for i, k in enumerate(keys)])]
    ids, reduced = summed(groups.ids, len(groups.keys), pa.RecordBatch.from_arrays(rows, schema=SUMS))
    return KeyedRows(groups.keys, ids, reduced)


some_keys = st.lists(st.tuples(st.sampled_from(["a", "bb", "\x00", None]), st.integers(0, 40)), min_size=1, max_size=30)


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(some_keys, max_size=5), some_keys, st.sampled_from([1 << 27, 400]))
def test_each_key_comes_once_with_all_its_rows(
    parts: list[list[tuple[str | None, int]]], without: list[tuple[str | None, int]], memory: int
) -> None:
    limits = Limits(memory=memory, step_rows=4, step_bytes=300, fan_in=2)
    with RowReducer(KEYS, 16, empty(SUMS), summed, limits) as reducer:
        for part in parts:
            reducer.add(keyed(part))
        # Keys that are to be visited though they have no rows.
        reducer.add(KeyedRows(keyed(without).keys, np.zeros(0, np.int64), empty(SUMS)))
        steps = list(reducer.steps())
        if memory > 400:
            assert reducer._sorter is None
        elif sum(map(len, parts)) > 20:
            assert reducer._sorter is not None
    every = [key for step in steps for key in step.keys.to_pylist()]
    assert every == sorted(set(every))
    expected = Counter(key for part in parts for key in part)
    found = {}
    for step in steps:
        columns = decode_keys(step.keys, KEYS).to_pylist()
        for i, row in zip(step.ids, step.rows.to_pylist(), strict=True):
            found[tuple(columns[i].values())] = row["count"]
    assert found == expected
    assert len(every) == len(set(expected) | set(without))


def test_key_with_more_rows_than_a_step_continues_in_the_next_step() -> None:
    def kept(ids: Ids, num_keys: int, rows: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
        order = np.argsort(ids, kind="stable")
        return ids[order], rows.take(pa.array(order))

    with RowReducer(KEYS, 16, empty(SUMS), kept, Limits(memory=2000, step_rows=5, step_bytes=200, fan_in=2)) as reducer:
        for i in range(40):
            part = keyed([("a", 1), ("b", i)])
            reducer.add(KeyedRows(part.keys, part.ids, part.rows))
        assert reducer._sorter is not None
        steps = list(reducer.steps())
    counts = [int(n) for step in steps for n in np.bincount(step.ids, minlength=len(step.keys))]
    assert sorted(counts) == [1] * 40 + [40]


def test_slices_of_keys_have_their_rows() -> None:
    part = keyed([("a", i) for i in range(10)])
    pieces = [part.slice(i, 3) for i in range(0, 10, 3)]
    assert [len(p.keys) for p in pieces] == [3, 3, 3, 1]
    assert one_batch([p.rows for p in pieces]).equals(part.rows)
    assert [p.ids.tolist() for p in pieces] == [[0, 1, 2]] * 3 + [[0]]
    assert len(part.slice(0, 99).keys) == 10


def test_step_sizes_follow_the_size_of_keys() -> None:
    size = StepSize(100, bytes_per_step=1000)
    size.seen(10, 5000)
    assert size.keys == 2
    size.seen(2, 1 << 30)
    assert size.keys == 1
    size.seen(0, 0)
    size.seen(1, 0)
    assert size.keys == 1000


@pytest.mark.parametrize(("rows", "num_parts"), [(10, 1), (300_000, 2)])
def test_batches_are_put_together(rows: int, num_parts: int) -> None:
    batch = pa.record_batch({"x": np.arange(rows)})
    parts = list(parts_of((batch.slice(i, 10_000) for i in range(0, rows, 10_000)), StepTimer(), "work_ms"))
    assert len(parts) == num_parts
    assert pa.Table.from_batches(parts).column("x").to_pylist() == list(range(rows))
