"""The rows of a task by key, reduced as they arrive: for aggregates, session windows and deduplication.

The rows of a key are reduced (to one state, to its sessions, to its first row) whenever many rows have arrived, so that
usually little more than a row per key is held. Rows beyond the memory limit go to the local disk, sorted by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import KeyRange, decode_keys
from spark_bridge.aggregates.row_groups import merge_keys
from spark_bridge.exceptions import StateTooLargeError
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits, RowSorter
from spark_bridge.task.task_store import StateAccess

Ids: TypeAlias = npt.NDArray[np.int64]
Reduce: TypeAlias = Callable[[Ids, int, pa.RecordBatch], tuple[Ids, pa.RecordBatch]]
"""Takes ids, the number of ids and rows; returns fewer rows with ascending ids. Also applied to its own results."""

ROWS_PER_PART = 1 << 18
BYTES_PER_PART = 32 << 20
"""At most this many rows, or bytes, of input are reduced at once."""
ROWS_PER_MERGE = 1 << 20
KEYED_SCAN_ROWS = 1 << 16
KEYED_STEP_BYTES = 64 << 20
REDUCED_ROWS_BYTES = 64 << 20
"""The memory limit of reduced rows. Sorting the rows beyond the limit takes several times as much in addition."""
_ROWS = "__statestore_rows"


@dataclass(frozen=True)
class KeyedRows:
    """Rows by key: ``ids``, ascending, has for each of ``rows`` the place of its key in ``keys``.

    ``keys`` are distinct encoded keys, ascending; a key may have no rows.
    """

    keys: pa.BinaryArray
    ids: Ids
    rows: pa.RecordBatch

    def slice(self, start: int, length: int) -> KeyedRows:
        """Return ``length`` consecutive keys from ``start`` on, and their rows."""
        length = min(length, len(self.keys) - start)
        if length == len(self.keys):
            return self
        first, last = np.searchsorted(self.ids, [start, start + length])
        return KeyedRows(
            self.keys.slice(start, length), self.ids[first:last] - start, self.rows.slice(first, last - first)
        )


class StepSize:
    """The number of keys to handle at once: ``KEYED_STEP_BYTES`` by the bytes that each of the last keys took."""

    def __init__(self, first: int, bytes_per_step: int = KEYED_STEP_BYTES) -> None:
        self.keys = first
        self._bytes = bytes_per_step

    def seen(self, num_keys: int, num_bytes: int) -> None:
        """Learn how many bytes the rows of ``num_keys`` keys took."""
        if num_keys:
            self.keys = max(1, min(1 << 18, self._bytes * num_keys // max(1, num_bytes)))


VisitOthers: TypeAlias = Callable[[bytes | None, bytes | None, pa.BinaryArray], None]
"""Takes a range of stored keys, after the first key and up to the second (None: unbounded), and touched keys in it."""


class RowReducer:
    """Takes rows by key and reduces them; yields them in steps of ascending keys. Use it in a ``with`` statement.

    ``empty`` is a batch without rows that has the columns which ``reduce`` takes and returns.
    """

    def __init__(
        self, keys: pa.Schema, num_key_groups: int, empty: pa.RecordBatch, reduce: Reduce, limits: Limits | None = None
    ) -> None:
        self._keys = keys
        self._num_key_groups = num_key_groups
        self._empty = empty
        self._reduce = reduce
        self._limits = limits or Limits(memory=REDUCED_ROWS_BYTES)
        self._sorter: RowSorter | None = None
        self._parts: list[KeyedRows] = []
        self._rows = 0
        self._bytes = 0

    def __enter__(self) -> RowReducer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sorter is not None:
            self._sorter.__exit__()

    def add(self, part: KeyedRows) -> None:
        """Take rows that have been reduced."""
        self._parts.append(part)
        self._rows += part.rows.num_rows + len(part.keys)
        self._bytes += part.rows.nbytes + part.keys.nbytes
        if self._bytes > self._limits.memory or self._rows > ROWS_PER_MERGE:
            merged = self._merged()
            self._rows, self._bytes = 0, merged.rows.nbytes + merged.keys.nbytes
            if self._bytes > self._limits.memory // 2:
                self._spill(merged)
            else:
                self._parts = [merged]

    def steps(self) -> Iterator[KeyedRows]:
        """Yield all rows, reduced, in ascending order of their keys; no key occurs twice."""
        if self._sorter is None:
            yield self._merged()
            return
        if self._parts:
            self._spill(self._merged())
        carried = self._empty
        for step in self._sorter.steps():
            ids = np.repeat(np.arange(len(step.keys), dtype=np.int64), np.diff(step.offsets))
            row_counts = step.rows.column(_ROWS)
            present = row_counts.is_valid()
            rows = pa.RecordBatch.from_struct_array(row_counts.filter(present))
            ids = ids[np.asarray(present)]
            if carried.num_rows:
                ids = np.concatenate([np.zeros(carried.num_rows, np.int64), ids])
                rows = one_batch([carried, rows])
            if len(ids):
                ids, rows = self._reduce(ids, len(step.keys), rows)
            carried = rows if step.is_part else self._empty
            if not step.is_part:
                yield KeyedRows(step.keys, ids, rows)

    def _merged(self) -> KeyedRows:
        parts, self._parts = self._parts, []
        if not parts:
            return KeyedRows(pa.array([], pa.binary()), np.zeros(0, np.int64), self._empty)
        if len(parts) == 1:
            return parts[0]
        keys, places, _ = merge_keys([p.keys for p in parts])
        starts = np.cumsum([0, *(len(p.keys) for p in parts)])
        ids = places[np.concatenate([p.ids + start for p, start in zip(parts, starts, strict=False)])]
        reduced, rows = self._reduce(ids, len(keys), one_batch([p.rows for p in parts]))
        return KeyedRows(keys, reduced, rows)

    def _spill(self, part: KeyedRows) -> None:
        if self._sorter is None:
            limits = replace(self._limits, memory=self._limits.memory // 2)
            self._sorter = RowSorter(self._keys, self._num_key_groups, limits)
        self._bytes = 0
        if not len(part.keys):
            return
        # A key without rows is kept by a row that is null.
        is_without = np.ones(len(part.keys), np.bool_)
        is_without[part.ids] = False
        without = np.flatnonzero(is_without)
        ids = np.concatenate([part.ids, without])
        rows = pa.concat_arrays(
            [part.rows.to_struct_array(), pa.nulls(len(without), pa.struct(list(part.rows.schema)))]
        )
        columns = {
            **dict(zip(self._keys.names, decode_keys(part.keys, self._keys).take(pa.array(ids)).columns, strict=True)),
            _ROWS: rows,
        }
        batch = pa.record_batch(columns)
        size = max(1, self._limits.memory // 4 * len(ids) // max(1, batch.nbytes))
        for start in range(0, len(ids), size):
            self._sorter.add(batch.slice(start, size))


def in_steps(
    reducer: RowReducer, size: StepSize, merge: Callable[[KeyedRows], int], visit: VisitOthers | None = None
) -> None:
    """Call ``merge`` for some keys at a time, and ``visit`` for the stored keys between and after them.

    ``merge`` returns the bytes that the rows of the keys take.
    """
    behind = None
    for part in reducer.steps():
        start = 0
        while start < len(part.keys):
            step = part.slice(start, size.keys)
            start += len(step.keys)
            size.seen(len(step.keys), merge(step))
            if visit is not None:
                last = step.keys[-1].as_py()
                visit(behind, last, step.keys)
                behind = last
    if visit is not None:
        visit(behind, None, pa.array([], pa.binary()))


def scanned(
    store: StateAccess, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY
) -> Iterator[pa.RecordBatch]:
    """Yield stored pairs of ranges in large batches: there may be many ranges with few pairs each."""
    return _together(store.scan(ranges, column_family), KEYED_SCAN_ROWS)


def parts_of(batches: Iterable[pa.RecordBatch], timer: StepTimer, work: str) -> Iterator[pa.RecordBatch]:
    """Put batches together into larger ones; book the wait for them as ``input_wait``, and the rest as ``work``."""

    def arriving() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            timer.step("input_wait")
            yield batch
        timer.step("input_wait")

    timer.restart()
    for part in _together(arriving(), ROWS_PER_PART):
        yield part
        timer.step(work)
    timer.step(work)


def _together(batches: Iterable[pa.RecordBatch], least_rows: int) -> Iterator[pa.RecordBatch]:
    """Put batches together until they have that many rows, or ``BYTES_PER_PART``."""
    waiting: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in chain(batches, (None,)):
        if batch is not None:
            waiting.append(batch)
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
        if num_rows >= (1 if batch is None else least_rows) or num_bytes >= BYTES_PER_PART:
            # Several batches, if a column has more than 2 GiB.
            yield from pa.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting, num_rows, num_bytes = [], 0, 0


def one_batch(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all parts in one batch.

    Raises ``StateTooLargeError`` if a column of them has more than 2 GiB.
    """
    if not (batches := pa.Table.from_batches(parts).combine_chunks().to_batches()):
        return parts[0]
    if len(batches) > 1:
        raise StateTooLargeError(
            f"The states of {sum(map(len, parts))} keys of one partition and batch have more than 2 GiB in one column: "
            "use more partitions (num_partitions=), or smaller batches."
        )
    return batches[0]


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)
