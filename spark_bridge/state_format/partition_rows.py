"""All rows of a state variable in one partition, in the order of the stored keys.

Lists and maps stand in two column families, which are read side by side, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import encode_keys
from backends.encoding.sorted_pairs import SortedPairs, as_binary
from backends.partition.partition_state import PartitionState
from coordinator_actor.reading import partition_reader
from spark_bridge.state_format.family_order import in_step, order_keys, row_order, without_order
from spark_bridge.state_format.layouts import MAP
from spark_bridge.state_format.stored_keys import key_groups_of
from spark_bridge.state_format.stored_rows import DecodedRows, Positions, VariableRows
from spark_bridge.state_format.user_columns import KEY_GROUP

DECODE_STEP_ROWS = 1 << 14
"""Pairs that are decoded at once, at most."""
DECODE_STEP_BYTES = 4 << 20
"""Bytes of pairs that are decoded at once, about; one pair at least."""


def scan_partition(rows: VariableRows, state: PartitionState, partition: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a partition that is open at one version, as batches of ``rows.output``."""
    return partition_rows(
        rows, {family: partition_reader.scan_family(state, family) for family in rows.families}, partition
    )


def partition_rows(
    rows: VariableRows, pairs: Mapping[str, Iterator[pa.RecordBatch]], partition: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a partition's pairs, as batches of ``rows.output``.

    ``pairs`` are batches of stored keys and values, ascending by key, for each of ``rows.families``.
    """
    batches = _in_order(rows, pairs)
    if rows.collect and rows.second is not None:
        batches = _collected(rows, batches)
    for batch in batches:
        *columns, groups = batch.columns
        keys = [columns[i] for i in rows.key_order]
        number = pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows)
        yield pa.RecordBatch.from_arrays([*keys, *columns[len(rows.key) :], groups, number], schema=rows.output)


def numbered(schema: pa.Schema) -> list[str]:
    """Return names for columns whose own names may be equal: "0", "1", and so on."""
    return [str(i) for i in range(len(schema))]


def _in_order(rows: VariableRows, pairs: Mapping[str, Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Yield rows of key, inner and value columns, and the key group."""
    streams = [_sorted_parts(rows, family, pairs[family]) for family in rows.families]
    for step in in_step(streams):
        parts = [
            _decoded(rows, family, without_order(rows, family, part.keys), part.values)
            for family, part in zip(rows.families, step, strict=True)
        ]
        batch = _interleaved(rows, [part.keys for part in step], parts)
        if batch.num_rows:
            yield batch


def _sorted_parts(rows: VariableRows, family: str, batches: Iterator[pa.RecordBatch]) -> Iterator[SortedPairs]:
    """Yield pairs a few megabytes at a time, under keys whose byte order is the order of the rows."""
    for batch in batches:
        keys, values = as_binary("keys", batch.column(0)), as_binary("values", batch.column(1))
        pairs = SortedPairs(order_keys(rows, family, keys), values)
        length = max(1, min(DECODE_STEP_ROWS, DECODE_STEP_BYTES * len(pairs) // max(1, pairs.nbytes)))
        for at in range(0, len(pairs), length):
            yield pairs.slice(at, length)


def _decoded(rows: VariableRows, family: str, keys: pa.BinaryArray, values: pa.BinaryArray) -> DecodedRows:
    """Return the rows of pairs, the key group after the other columns."""
    decoded = rows.decode(family, keys, values)
    return DecodedRows(decoded.pair, [*decoded.columns, pa.array(key_groups_of(keys)[decoded.pair], pa.int32())])


def _interleaved(rows: VariableRows, keys: Sequence[pa.BinaryArray], parts: Sequence[DecodedRows]) -> pa.RecordBatch:
    """Return the rows of several families in the order of their pairs' keys."""
    schema = pa.schema([*rows.key, *rows.inner, *rows.value, pa.field(KEY_GROUP, pa.int32())])
    held = [(k, part) for k, part in zip(keys, parts, strict=True) if len(part.pair)]
    if len(held) < 2:
        columns = held[0][1].columns if held else [pa.array([], f.type) for f in schema]
        return pa.RecordBatch.from_arrays(columns, names=numbered(schema))
    order = pa.array(row_order([k for k, _ in held], [part.pair for _, part in held]))
    columns = [pa.concat_arrays(c).take(order) for c in zip(*(part.columns for _, part in held), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=numbered(schema))


# -- one row per key ---------------------------------------------------------------------------


def _collected(rows: VariableRows, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a row per key, of rows that come in the order of the keys."""
    pending: list[pa.RecordBatch] = []
    last: bytes | None = None
    for batch in batches:
        ids = encode_keys(_keys_of(rows, batch), np.asarray(batch.column(batch.num_columns - 1)))
        starts = np.concatenate([[0], 1 + np.flatnonzero(np.asarray(pc.not_equal(ids[1:], ids[:-1])))])
        if pending and ids[0].as_py() == last:
            starts = starts[1:]
        if len(starts):
            cut = int(starts[-1])
            held = sum(b.num_rows for b in pending)
            bounds = np.concatenate([[0] if pending else [], held + starts]).astype(np.int64)
            if held + cut:
                yield _in_arrays(rows, _concatenated([*pending, batch.slice(0, cut)]), bounds)
            pending, batch = [], batch.slice(cut)  # noqa: PLW2901 - the rest of the batch
        pending.append(batch)
        last = ids[len(ids) - 1].as_py()
    if pending:
        yield _in_arrays(rows, _concatenated(pending), np.array([0, sum(b.num_rows for b in pending)]))


def _keys_of(rows: VariableRows, batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns[: len(rows.key)], schema=rows.key)


def _in_arrays(rows: VariableRows, batch: pa.RecordBatch, bounds: Positions) -> pa.RecordBatch:
    """Return a row per key, whose rows are those of ``batch`` from one of the n+1 ``bounds`` to the next."""
    n, inner = len(rows.key), len(rows.inner)
    firsts = pa.array(bounds[:-1])
    offsets = pa.array(bounds, pa.int32())
    columns = batch.columns
    values = _struct(columns[n + inner : -1], rows.value)
    kind = rows.output.field(n).type
    if rows.kind == MAP:
        keys = _struct(columns[n : n + inner], rows.inner)
        made = pa.MapArray.from_arrays(offsets, keys, values).cast(kind)
    else:
        made = pa.ListArray.from_arrays(offsets, values).cast(kind)
    taken = [c.take(firsts) for c in (*columns[:n], columns[-1])]
    return pa.RecordBatch.from_arrays([*taken[:-1], made, taken[-1]], names=[*map(str, range(n)), "value", KEY_GROUP])


def _concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all batches in one batch."""
    columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=batches[0].schema.names)


def _struct(columns: Sequence[pa.Array], schema: pa.Schema) -> pa.StructArray:
    return pa.StructArray.from_arrays(list(columns), fields=list(schema))
