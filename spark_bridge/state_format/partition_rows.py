"""All rows of a state variable in one partition, in the order of the stored keys.

Lists and maps are in two column families, which are read in parallel, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import (
    Mask,
    Offsets,
    binary_content,
    binary_values,
    fixed_dtype,
    is_list_like,
    list_array,
    list_parts,
    offsets_of,
    struct_array,
)
from backends.encoding.keys import encode_keys
from backends.encoding.sorted_pairs import SortedPairs, as_binary, in_step
from spark_bridge.state_format import stored_rows
from spark_bridge.state_format.layouts import KEY_GROUP, MAP, ROLLING

if TYPE_CHECKING:
    from backends.partition.partition_state import PartitionState

DECODE_STEP_ROWS = 1 << 14
"""At most this many pairs are decoded at once."""
DECODE_STEP_BYTES = 4 << 20
"""Pairs of about this many bytes are decoded at once, and at least one pair."""


def scan_partition(rows: stored_rows.VariableRows, state: PartitionState, partition: int) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a partition that is open at one version, as batches of ``rows.output``."""
    from coordinator_actor.reading.stored_files import scan_family  # not above: workers of Spark import this file

    return partition_rows(rows, {family: scan_family(state, family) for family in rows.families}, partition)


def partition_rows(
    rows: stored_rows.VariableRows, pairs: Mapping[str, Iterator[pa.RecordBatch]], partition: int
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


def numbered(columns: Sequence[object]) -> list[str]:
    """Return names for columns whose own names may be equal: "0", "1", and so on."""
    return [str(i) for i in range(len(columns))]


def _in_order(
    rows: stored_rows.VariableRows, pairs: Mapping[str, Iterator[pa.RecordBatch]]
) -> Iterator[pa.RecordBatch]:
    """Yield rows of key, inner and value columns, and the key group."""
    streams = [_sorted_parts(rows, family, pairs[family]) for family in rows.families]
    for step in in_step(streams):
        if rows.kind == ROLLING:
            yield _rolled(rows, *step)
            continue
        parts = [
            _decoded(rows, family, stored_rows.without_order(rows, family, part.keys), part.values)
            for family, part in zip(rows.families, step, strict=True)
        ]
        batch = _interleaved(rows, [part.keys for part in step], parts)
        if batch.num_rows:
            yield batch


def _rolled(rows: stored_rows.VariableRows, recent: SortedPairs, tiles: SortedPairs) -> pa.RecordBatch:
    """Return the rows of keys with horizons, the key group after the other columns."""
    of_tiles = pa.nulls(len(recent), pa.binary())
    if len(tiles):
        of_tiles = tiles.values.take(pc.index_in(recent.keys, value_set=tiles.keys))
    decoded = rows.decode_rolling(recent.keys, recent.values, of_tiles)
    columns = [*decoded.columns, pa.array(stored_rows.key_groups_of(recent.keys), pa.int32())]
    return pa.RecordBatch.from_arrays(columns, names=numbered(columns))


def _sorted_parts(
    rows: stored_rows.VariableRows, family: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[SortedPairs]:
    """Yield pairs a few megabytes at a time, under keys whose byte order is the order of the rows."""
    for batch in batches:
        keys, values = as_binary("keys", batch.column(0)), as_binary("values", batch.column(1))
        pairs = SortedPairs(stored_rows.order_keys(rows, family, keys), values)
        length = max(1, min(DECODE_STEP_ROWS, DECODE_STEP_BYTES * len(pairs) // max(1, pairs.nbytes)))
        for at in range(0, len(pairs), length):
            yield pairs.slice(at, length)


def _decoded(
    rows: stored_rows.VariableRows, family: str, keys: pa.BinaryArray, values: pa.BinaryArray
) -> stored_rows.DecodedRows:
    """Return the rows of pairs, the key group after the other columns."""
    decoded = rows.decode(family, keys, values)
    groups = pa.array(stored_rows.key_groups_of(keys)[decoded.pair], pa.int32())
    return stored_rows.DecodedRows(decoded.pair, [*decoded.columns, groups])


def _interleaved(
    rows: stored_rows.VariableRows, keys: Sequence[pa.BinaryArray], parts: Sequence[stored_rows.DecodedRows]
) -> pa.RecordBatch:
    """Return the rows of several families in the order of their pairs' keys."""
    schema = pa.schema([*rows.key, *rows.inner, *rows.value, pa.field(KEY_GROUP, pa.int32())])
    filled = [(k, part) for k, part in zip(keys, parts, strict=True) if len(part.pair)]
    if len(filled) < 2:
        columns = filled[0][1].columns if filled else [pa.array([], f.type) for f in schema]
        return pa.RecordBatch.from_arrays(columns, names=numbered(schema))
    order = pa.array(stored_rows.row_order([k for k, _ in filled], [part.pair for _, part in filled]))
    columns = [pa.concat_arrays(c).take(order) for c in zip(*(part.columns for _, part in filled), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=numbered(schema))


# -- one row per key ---------------------------------------------------------------------------


def _collected(rows: stored_rows.VariableRows, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield a row per key, of rows that come in the order of the keys."""
    pending: list[pa.RecordBatch] = []
    last: bytes | None = None
    for batch in batches:
        keys = pa.RecordBatch.from_arrays(batch.columns[: len(rows.key)], schema=rows.key)
        ids = encode_keys(keys, np.asarray(batch.column(batch.num_columns - 1)))
        starts = np.concatenate([[0], 1 + np.flatnonzero(np.asarray(pc.not_equal(ids[1:], ids[:-1])))])
        if pending and ids[0].as_py() == last:
            starts = starts[1:]
        if len(starts):
            cut = int(starts[-1])
            num_rows = sum(b.num_rows for b in pending)
            bounds = np.concatenate([[0] if pending else [], num_rows + starts]).astype(np.int64)
            if num_rows + cut:
                yield _in_arrays(rows, _concatenated([*pending, batch.slice(0, cut)]), bounds)
            pending, batch = [], batch.slice(cut)  # noqa: PLW2901 - the rest of the batch
        pending.append(batch)
        last = ids[len(ids) - 1].as_py()
    if pending:
        yield _in_arrays(rows, _concatenated(pending), np.array([0, sum(b.num_rows for b in pending)]))


def _in_arrays(rows: stored_rows.VariableRows, batch: pa.RecordBatch, bounds: stored_rows.Positions) -> pa.RecordBatch:
    """Return a row per key, whose rows are those of ``batch`` from one of the n+1 ``bounds`` to the next."""
    n, inner, columns = len(rows.key), len(rows.inner), batch.columns
    offsets = pa.array(bounds, pa.int32())
    values = pa.StructArray.from_arrays(columns[n + inner : -1], fields=list(rows.value))
    if rows.kind == MAP:
        keys = pa.StructArray.from_arrays(columns[n : n + inner], fields=list(rows.inner))
        collected = pa.MapArray.from_arrays(offsets, keys, values)
    else:
        collected = pa.ListArray.from_arrays(offsets, values)
    *of_keys, groups = (c.take(pa.array(bounds[:-1])) for c in (*columns[:n], columns[-1]))
    made = [*of_keys, collected.cast(rows.output.field(n).type), groups]
    return pa.RecordBatch.from_arrays(made, names=[*numbered(of_keys), "value", KEY_GROUP])


def _concatenated(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=batches[0].schema.names)


# Many lists in one Arrow array: picking ranges of elements, dropping expired elements, and sizes in bytes.


_BLOCK_ELEMENTS = 4096


def flat_ranges(starts: Offsets, counts: Offsets) -> Offsets:
    """Return the numbers of the ranges, one range after the other: ``counts[i]`` numbers from ``starts[i]`` on."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Offsets = np.repeat(starts - (ends - counts), counts) + np.arange(total)
    return numbers


def pick(elements: pa.Array, starts: Offsets, counts: Offsets, kind: pa.DataType) -> pa.Array:
    """Return lists of type ``kind``: list i has ``counts[i]`` of the elements, from ``starts[i]`` on."""
    return list_array(elements.take(pa.array(flat_ranges(starts, counts))), offsets_of(counts), None, kind)


def structs(rows: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
    """Return rows as an array of structs of type ``kind``."""
    return struct_array(rows.columns, rows.num_rows, None, kind)


def rows_of_structs(array: pa.Array) -> pa.RecordBatch:
    """Return an array of structs, none of them null, as rows."""
    return pa.RecordBatch.from_arrays(array.flatten(), names=[field.name for field in array.type])


def alive_lists(array: pa.Array, alive_of: Callable[[pa.RecordBatch], Mask] | None) -> tuple[pa.Array, Offsets]:
    """Return the elements (structs) of all lists that are alive, and n+1 offsets; ``alive_of`` None: all are."""
    elements, offsets = list_parts(array)
    if alive_of is not None and len(elements):
        alive = alive_of(rows_of_structs(elements))
        if not alive.all():
            elements = elements.filter(pa.array(alive))
            offsets = offsets_of(alive)[offsets]
    return elements, offsets


def sizes_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return about how many bytes each value takes when stored."""
    kind = array.type
    if (dtype := fixed_dtype(kind)) is not None:
        return np.full(len(array), dtype.itemsize, np.int64)
    if pa.types.is_struct(kind):
        total = np.zeros(len(array), np.int64)
        for child in array.flatten():
            total += sizes_of(child)
        return total
    if is_list_like(kind):
        elements, offsets = list_parts(array)
        ends = offsets_of(sizes_of(elements))
        sizes: npt.NDArray[np.int64] = ends[offsets[1:]] - ends[offsets[:-1]] + 4
        return sizes
    content: npt.NDArray[np.int64] = np.diff(binary_content(binary_values(array))[1]) + 4
    return content


class LazyLists:
    """Lists whose elements are made into Python values when they are asked for, some thousand at a time.

    ``decode`` converts elements to Python values. Lists that are asked for in order are decoded once.
    """

    def __init__(self, elements: pa.Array, offsets: Offsets, decode: Callable[[pa.RecordBatch], list[Any]]) -> None:
        self.elements = elements
        self.offsets = offsets
        self._decode = decode
        self._bounds: list[int] = offsets.tolist()
        self._first = self._end = 0
        self._block: list[Any] = []

    def __getitem__(self, i: int) -> list[Any]:
        """Return the elements of list ``i``, in a new list."""
        a, b = self._bounds[i], self._bounds[i + 1]
        if a == b:
            return []
        if not self._first <= a <= b <= self._end:
            behind = int(np.searchsorted(self.offsets, a + _BLOCK_ELEMENTS, "right")) - 1
            self._first, self._end = a, max(b, self._bounds[behind])
            self._block = self._decode(rows_of_structs(self.elements.slice(a, self._end - a)))
        return self._block[a - self._first : b - self._first]


# Divides lists and maps by size: small ones are stored at the grouping key, large ones in chunks or entries.


TAIL_ELEMENTS = 64
TAIL_BYTES = 16 << 10
"""The most elements and bytes (about) of a list at its key; a chunk has as many bytes."""
CHUNK_ELEMENTS = 256
"""The most elements of a chunk."""
SMALL_ENTRIES = 64
SMALL_MAP_BYTES = 16 << 10
"""The most entries and bytes (about) of a small map."""


def cut_lists(elements: pa.Array, offsets: Offsets) -> tuple[Offsets, Offsets, Offsets, Offsets]:
    """Return where each list's tail begins, and the chunks before the tails: their lists, starts and lengths.

    ``offsets`` are the n+1 bounds of the n lists among the ``elements``.
    """
    ends = offsets_of(sizes_of(elements))
    tails = offsets[:-1].copy()
    is_long = (np.diff(offsets) > TAIL_ELEMENTS) | (ends[offsets[1:]] - ends[offsets[:-1]] > TAIL_BYTES)
    chunks: list[tuple[int, int, int]] = []
    for i in np.flatnonzero(is_long).tolist():
        start, stop = int(offsets[i]), int(offsets[i + 1])
        while stop - start > TAIL_ELEMENTS or ends[stop] - ends[start] > TAIL_BYTES:
            by_bytes = int(np.searchsorted(ends, ends[start] + TAIL_BYTES, "right")) - 1
            end = min(max(by_bytes, start + 1), start + CHUNK_ELEMENTS, stop)
            chunks.append((i, start, end - start))
            start = end
        tails[i] = start
    columns = np.array(chunks, np.int64).reshape(-1, 3)
    return tails, columns[:, 0], columns[:, 1], columns[:, 2]


def chunk_keys(keys: pa.BinaryArray, numbers: Offsets) -> pa.BinaryArray:
    """Return the stored keys of chunks of the lists that have the stored keys ``keys``."""
    return stored_rows.with_more(keys, stored_rows.longs_of_key(numbers))


def are_large(entries: pa.Array, offsets: Offsets) -> npt.NDArray[np.bool_]:
    """Return which maps have too many entries, or bytes, to be stored at their keys; ``offsets`` are their bounds."""
    ends = offsets_of(sizes_of(entries))
    large: npt.NDArray[np.bool_] = (np.diff(offsets) > SMALL_ENTRIES) | (
        ends[offsets[1:]] - ends[offsets[:-1]] > SMALL_MAP_BYTES
    )
    return large
