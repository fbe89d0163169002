"""The rows that single grouping keys have in a state variable of any kind, in the order of the keys asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import MAX_BYTES, concatenated, content_bytes, list_parts
from backends.encoding.key_order import key_order
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import TIMERS
from backends.ids import DEFAULT_FAMILY
from spark_bridge.exceptions import RequestLimitError
from spark_bridge.queryable.protocol.request_context import raise_if_cancelled, reserve_memory
from spark_bridge.queryable.reads.operators.operator_plan import OperatorPlan, without_prefix
from spark_bridge.queryable.reads.rows.row_selection import POSITION
from spark_bridge.queryable.reads.versions.answer_version import PartitionView
from spark_bridge.state_format.families import TIMERS_BY_KEY, family_of
from spark_bridge.state_format.layouts import EXPIRIES, IS_LARGE, LIST, NUM_CHUNKS
from spark_bridge.state_format.stored_keys import key_groups_of, prefix_range
from spark_bridge.state_format.stored_rows import DecodedRows, Positions, VariableRows

READ_KEYS = 1 << 14
"""Keys that are read at once."""
READ_BYTES = 64 << 20
"""Bytes of values that are read at once, estimated from the values read before."""
FIRST_KEYS = 1 << 10
"""Keys that are read first, to learn how large values are."""
DECODED_ROWS = 1 << 14
"""Keys whose rows are decoded at once."""
LONG_ROWS = 1 << 8
"""Stored rows of one key that are decoded at once: each may be a chunk of many elements."""


@dataclass(frozen=True)
class FoundPairs:
    """Stored pairs that were found in one partition, and the positions of their keys, ascending.

    ``more`` has, by position, the pairs that are too long to be stored beside the key: chunks of lists, entries of
    large maps.
    """

    positions: Positions
    keys: pa.BinaryArray
    values: pa.BinaryArray
    more: dict[int, Iterator[pa.RecordBatch]]


def values_of(view: PartitionView, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
    """Return the values of stored keys, null where there is none. Sorted keys are fastest."""
    if family != DEFAULT_FAMILY and family not in view.reads.column_families(view.version, head=view.head):
        return pa.nulls(len(keys), pa.binary())
    # A completed version is applied when the reads of the version before are done: no single read may take long.
    parts: list[pa.BinaryArray] = []
    at, nbytes, step = 0, 0, FIRST_KEYS
    while at < len(keys) or not parts:
        raise_if_cancelled()
        try:
            part = view.reads.get_many(keys.slice(at, step), view.version, family, head=view.head, remember=False)
        except pa.ArrowInvalid as error:
            if "overflow" not in str(error):
                raise
            raise RequestLimitError(
                f"{step:,} values are more than one answer can have: ask for fewer keys."
            ) from error
        size = content_bytes(part)  # absent values cost little, and are soon dropped where windows are tried
        reserve_memory(size)
        parts.append(part)
        at, nbytes = at + len(part), nbytes + size
        require_bytes(nbytes)
        step = max(1, min(READ_KEYS, READ_BYTES * at // max(1, nbytes)))
    return joined_arrays(parts)


def require_bytes(nbytes: int) -> None:
    """Raise ``RequestLimitError`` for more bytes than one Arrow array can have."""
    if nbytes > MAX_BYTES:
        raise RequestLimitError(
            f"The answer has {nbytes:,} bytes, more than the {MAX_BYTES:,} that one can have: ask for fewer keys."
        )


def joined_arrays(parts: Sequence[pa.BinaryArray]) -> pa.BinaryArray:
    """Return keys or values one after the other. Raises ``RequestLimitError`` if they have too many bytes."""
    try:
        return concatenated(parts)
    except pa.ArrowInvalid:
        require_bytes(sum(map(content_bytes, parts)))
        raise


def find_pairs(view: PartitionView, rows: VariableRows, keys: pa.BinaryArray, positions: Positions) -> FoundPairs:
    """Return the pairs that a partition has of grouping keys, whose positions ascend."""
    values = _sorted_values(view, keys, _family(rows))
    is_there = pc.is_valid(values)
    keys, values = keys.filter(is_there), values.filter(is_there)
    positions = positions[np.asarray(is_there)]
    return FoundPairs(positions, keys, values, _more(view, rows, keys, values, positions))


def _family(rows: VariableRows) -> str:
    return family_of(rows.variable, TIMERS_BY_KEY)[0] if rows.kind == TIMERS else rows.main


def _sorted_values(view: PartitionView, keys: pa.BinaryArray, family: str) -> pa.BinaryArray:
    order = np.asarray(key_order(keys))
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return values_of(view, keys.take(pa.array(order)), family).take(pa.array(back))


def _more(
    view: PartitionView, rows: VariableRows, keys: pa.BinaryArray, values: pa.BinaryArray, positions: Positions
) -> dict[int, Iterator[pa.RecordBatch]]:
    if rows.second is None or not len(keys):
        return {}
    stored = rows.variable.families[rows.main].decode_values(values)
    if rows.kind == LIST:
        is_long = np.asarray(stored.column(NUM_CHUNKS).fill_null(0)) > 0
    else:
        is_long = np.asarray(stored.column(IS_LARGE).fill_null(False))
    asked = np.flatnonzero(is_long).tolist()
    if not asked or rows.second not in view.reads.column_families(view.version, head=view.head):
        return {}
    # An iterator for each position: a key that is asked for twice is read twice.
    return {
        int(positions[i]): view.reads.scan(
            view.version, *prefix_range(keys[i].as_py()), column_family=rows.second, head=view.head
        )
        for i in asked
    }


def rows_of_keys(
    plan: OperatorPlan, rows: VariableRows, found: Sequence[FoundPairs], *, by_window: bool
) -> Iterator[pa.RecordBatch]:
    """Yield rows in the columns of ``VariableRows.output`` and the position of each row's key, ascending.

    Within a key as in a scan. ``by_window``: the rows of one key are in several partitions, and come in the order of
    their windows.
    """
    positions = np.concatenate([f.positions for f in found]) if found else np.zeros(0, np.int64)
    keys = joined_arrays([f.keys for f in found])
    values = joined_arrays([f.values for f in found])
    more = {position: pairs for f in found for position, pairs in f.more.items()}
    if by_window:
        # Without their key groups, the stored keys of one grouping key are in the order of their windows.
        ids = without_prefix(keys)
        order = np.lexsort((_ranks(ids), positions))
    else:
        order = np.argsort(positions, kind="stable")
    positions, keys, values = positions[order], keys.take(pa.array(order)), values.take(pa.array(order))
    begin = 0
    is_long = np.isin(positions, list(more)) if more else np.zeros(len(positions), np.bool_)
    while begin < len(positions):
        if is_long[begin]:
            yield from _rows_of_long(plan, rows, more[int(positions[begin])], int(positions[begin]))
            end = begin + 1
        else:
            long = np.flatnonzero(is_long[begin:])
            end = min(begin + DECODED_ROWS, begin + int(long[0]) if len(long) else len(positions))
        part = slice(begin, end)
        yield _decoded(plan, rows, rows.main, keys[part], values[part], positions[part])
        begin = end


def _ranks(keys: pa.BinaryArray) -> npt.NDArray[np.int64]:
    ranks = np.empty(len(keys), np.int64)
    ranks[np.asarray(key_order(keys))] = np.arange(len(keys))
    return ranks


def _rows_of_long(
    plan: OperatorPlan, rows: VariableRows, pairs: Iterator[pa.RecordBatch], position: int
) -> Iterator[pa.RecordBatch]:
    """Yield the part of a key's rows that is stored elsewhere; it comes before the part beside the key."""
    for batch in pairs:
        raise_if_cancelled()
        for at in range(0, batch.num_rows, LONG_ROWS):
            keys, values = batch.column(0)[at : at + LONG_ROWS], batch.column(1)[at : at + LONG_ROWS]
            yield _decoded(plan, rows, rows.second or "", keys, values, np.full(len(keys), position))


def _decoded(
    plan: OperatorPlan,
    rows: VariableRows,
    family: str,
    keys: pa.BinaryArray,
    values: pa.BinaryArray,
    positions: Positions,
) -> pa.RecordBatch:
    made = _timers(rows, keys, values) if rows.kind == TIMERS else rows.decode(family, keys, values)
    groups = key_groups_of(keys)[made.pair]
    n = len(rows.key)
    columns = [
        *(made.columns[i] for i in rows.key_order),
        *made.columns[n:],
        pa.array(groups, pa.int32()),
        pa.array(plan.partitions_of(groups.astype(np.int64)), pa.int32()),
        pa.array(positions[made.pair], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, names=[*rows.output.names, POSITION])


def _timers(rows: VariableRows, keys: pa.BinaryArray, values: pa.BinaryArray) -> DecodedRows:
    schema = family_of(rows.variable, TIMERS_BY_KEY)[1]
    expiries, offsets = list_parts(schema.decode_values(values).column(EXPIRIES))
    pair = np.repeat(np.arange(len(keys)), np.diff(offsets))
    columns = [column.take(pa.array(pair)) for column in decode_keys(keys, rows.key).columns]
    return DecodedRows(pair, [*columns, expiries])
