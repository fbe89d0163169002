"""Aggregates run as an operator runs them, over batches, without an operator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from spark_bridge.aggregates.aggregator import Aggregator, result_fields, results
from spark_bridge.aggregates.row_groups import group_rows, merge_keys

KEY = "key"
KEYS = pa.schema([(KEY, pa.int64())])
GROUPS = 16


def run(aggregator: Aggregator, batches: Sequence[pa.RecordBatch], *, by_pairs: bool) -> dict[int, dict[str, Any]]:
    """The results by key after all batches; states go through their stored form after each batch.

    ``by_pairs``: a batch's states are merged with the old ones row by row, else all together in groups.
    """
    schema = StateSchema(KEYS, aggregator.state_schema)
    keys = pa.array([], pa.binary())
    stored = pa.array([], pa.binary())
    for batch in batches:
        grouped = group_rows(batch, KEYS, GROUPS)
        new = aggregator.partial(grouped.ids, len(grouped.keys), batch)
        every, ids, _ = merge_keys([keys, grouped.keys])
        old = schema.decode_values(stored)
        if by_pairs:
            at_old, at_new = ids[: len(keys)], ids[len(keys) :]
            place = np.full(len(every), -1, np.int64)
            place[at_old] = np.arange(len(keys))
            rows = pa.array(place[at_new], mask=place[at_new] < 0)
            touched = aggregator.merge_pairs(old.take(rows), rows.is_valid(), new)
            merged = pa.Table.from_batches([old, touched]).combine_chunks().to_batches()[0]
            last = np.empty(len(every), np.int64)
            last[at_old] = np.arange(len(keys))
            last[at_new] = len(keys) + np.arange(len(at_new))
            merged = merged.take(pa.array(last))
        else:
            both = pa.Table.from_batches([old, new]).combine_chunks().to_batches()[0]
            merged = aggregator.merge(ids, len(every), both)
        keys, stored = every, schema.encode_values(merged)
    columns = named_results(aggregator, schema.decode_values(stored))
    found = pa.array([int.from_bytes(k.as_py()[3:], "big") - (1 << 63) for k in keys], pa.int64())
    assert encode_keys(pa.record_batch({KEY: found}), key_groups(pa.record_batch({KEY: found}), GROUPS)).equals(keys)
    return dict(zip(found.to_pylist(), columns.to_pylist(), strict=True))


def named_results(aggregator: Aggregator, states: pa.RecordBatch) -> pa.RecordBatch:
    """Results as a batch; what query clients see by the state's schema alone must be the same."""
    columns = pa.RecordBatch.from_arrays(aggregator.results(states), schema=pa.schema(aggregator.result_fields))
    if all(o.user is None for o in aggregator.outputs):
        seen = pa.RecordBatch.from_arrays(results(states), schema=pa.schema(result_fields(states.schema)))
        assert repr(seen.to_pylist()) == repr(columns.to_pylist())
    return columns


def split(rows: Sequence[Any], cuts: Sequence[int]) -> list[list[Any]]:
    """The rows in runs, cut at the given places, empty runs left out."""
    bounds = [0, *sorted(min(c, len(rows)) for c in cuts), len(rows)]
    return [list(rows[a:b]) for a, b in pairwise(bounds) if b > a]
