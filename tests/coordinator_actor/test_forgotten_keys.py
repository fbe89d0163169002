"""Which stored rows belong to keys: in families of any order of columns, with nulls, and where it cannot be decided."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from coordinator_actor.rewriting import ForgottenKeys

KEY = pa.schema([("user", pa.string()), ("share", pa.float64())])
BY_TIME = pa.schema([pa.field("due", pa.int64()), *KEY])
VALUE = pa.schema([("n", pa.int64())])
FAMILIES = {"default": StateSchema(KEY, VALUE), "default.-due": StateSchema(BY_TIME, VALUE)}
ROWS = [("a", 1.0), ("a", None), (None, 1.0), (None, None), ("a", math.nan), ("a", 0.0), ("b", -0.0)]


def batch(rows: list[tuple[object, ...]], schema: pa.Schema = KEY) -> pa.RecordBatch:
    return pa.record_batch([pa.array([row[i] for row in rows], f.type) for i, f in enumerate(schema)], schema=schema)


def pairs(rows: list[tuple[object, ...]], schema: pa.Schema) -> SortedPairs:
    keys = encode_keys(batch(rows, schema), np.zeros(len(rows), np.int64))
    return SortedPairs.of(keys, pa.array([repr(row).encode() for row in rows], pa.binary()))


@pytest.mark.parametrize("gone", [[0], [1, 2], [3], [4], [5], [6], [0, 1, 2, 3, 4, 5, 6]])
def test_rows_of_the_keys_go_from_every_family_and_no_others(gone: list[int]) -> None:
    forgotten = ForgottenKeys(batch([ROWS[i] for i in gone]), FAMILIES, 16, is_whole=True)
    left = {repr(row).encode() for i, row in enumerate(ROWS) if i not in gone}
    kept = forgotten.without("default", pairs(ROWS, KEY))
    assert set(kept.values.to_pylist()) == left
    by_time = [(due, *row) for due in (1, 2) for row in ROWS]
    kept = forgotten.without("default.-due", pairs(by_time, BY_TIME))
    assert len(kept) == 2 * len(left)
    removals = SortedPairs(pairs(ROWS, KEY).keys, pa.nulls(len(ROWS), pa.binary()))
    assert len(forgotten.without("default", removals)) == len(left), "a removal has the bytes of the key as well"


def test_rows_without_a_schema_are_removed_as_possible_rows_of_a_key() -> None:
    forgotten = ForgottenKeys(batch([ROWS[0]]), FAMILIES, 16, is_whole=True)
    assert len(forgotten.without("ttl.-sweep", pairs(ROWS, KEY))) == 0


def test_only_partitions_of_the_keys_are_looked_at_where_all_columns_are_given() -> None:
    keys = batch(ROWS[:2])
    groups = key_groups(keys, 16)
    assert ForgottenKeys(keys, FAMILIES, 16, is_whole=True).partitions(4) == {int(g) * 4 // 16 for g in groups}
    assert ForgottenKeys(keys.select(["user"]), FAMILIES, 16, is_whole=False).partitions(3) == {0, 1, 2}
