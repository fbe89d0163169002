"""External sort: the rows of one task in key order, in bounded memory.

Spark gives a task unordered rows (Spark refuses every sort on a stream), so the task sorts them: in memory while
they fit, beyond that in sorted runs on the local disk, which are merged. The rows of a key stay in the order of
arrival.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.columns import MAX_BYTES, offsets_of
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.task.executor import temporary_file

KEY_COLUMN = "__statestore_key"
_IPC = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True)
class Limits:
    """Bounds of the memory and of the steps of a sort. Sizes are in bytes.

    ``fan_in`` runs are merged at once, and as many may be open on each level of merges.
    """

    memory: int = 128 << 20
    step_rows: int = 1 << 16
    step_bytes: int = 32 << 20
    fan_in: int = 32


@dataclass(frozen=True)
class RowStep:
    """Rows of consecutive keys.

    ``keys`` are distinct encoded keys in order; the rows of the i-th key are ``offsets[i]`` to ``offsets[i + 1]``.
    ``is_part``: the step has a single key, and the next step continues with the same key.
    """

    keys: pa.BinaryArray
    offsets: npt.NDArray[np.int64]
    rows: pa.RecordBatch
    is_part: bool = False


@dataclass
class _Run:
    """Sorted rows in a file without a name: the file disappears once it is closed, or if the process dies."""

    file: IO[bytes]
    reader: pa.ipc.RecordBatchStreamReader
    keys: pa.BinaryArray
    rows: pa.RecordBatch | None = None
    has_more: bool = True

    def read(self, num_bytes: int) -> None:
        """Read at least ``num_bytes`` bytes of further rows into memory, if there are as many."""
        batches = (
            [] if self.rows is None or not self.rows.num_rows else [self.rows.append_column(KEY_COLUMN, self.keys)]
        )
        got = 0
        while self.has_more and got < num_bytes:
            try:
                batches.append(self.reader.read_next_batch())
                got += batches[-1].nbytes
            except StopIteration:
                self.has_more = False
        if batches:
            both = _concatenated(batches)
            self.keys, self.rows = both.column(KEY_COLUMN), both.drop_columns([KEY_COLUMN])

    def take(self, n: int) -> list[pa.RecordBatch]:
        """Remove and return the first ``n`` rows, with their keys."""
        if self.rows is None or not n:
            return []
        rows = self.rows.slice(0, n).append_column(KEY_COLUMN, self.keys.slice(0, n))
        self.keys, self.rows = self.keys.slice(n), self.rows.slice(n)
        return [rows]


@dataclass
class RowSorter:
    """Takes rows that have the key columns ``keys``, and yields them in steps, sorted by key as stored keys are.

    Use it in a ``with`` statement, which removes the files.
    """

    keys: pa.Schema
    num_key_groups: int
    limits: Limits = field(default_factory=Limits)
    num_rows: int = 0
    num_spills: int = 0
    """Runs written to disk, merges included."""
    _waiting: list[pa.RecordBatch] = field(default_factory=list)
    _waiting_bytes: int = 0
    _levels: list[list[_Run]] = field(default_factory=list)

    def __enter__(self) -> RowSorter:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._runs():
            run.file.close()
        self._levels.clear()

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            if self._waiting and self._waiting_bytes + batch.nbytes > MAX_BYTES:
                self._spill(0, self._sorted())  # they might not fit into one array of Arrow
            self.num_rows += batch.num_rows
            self._waiting.append(batch)
            self._waiting_bytes += batch.nbytes
        if self._waiting_bytes > self.limits.memory:
            self._spill(0, self._sorted())

    def steps(self) -> Iterator[RowStep]:
        """Yield all rows, once, in steps within the limits. Only a key that has more rows than a step is split."""
        if self._levels and self._waiting:
            self._spill(0, self._sorted())
        while len(self._runs()) > self.limits.fan_in:
            self._merge_level(next(i for i, runs in enumerate(self._levels) if runs))
        merged = self._merge(self._runs()) if self._levels else self._sorted()
        for step in merged:
            yield from _cut(step, self.limits)

    def _runs(self) -> list[_Run]:
        """Return the runs in the order of arrival of their rows: runs that were merged more often are earlier."""
        return [run for level in reversed(self._levels) for run in level]

    def _sorted(self) -> Iterator[RowStep]:
        if not self._waiting:
            return
        rows = _concatenated(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        groups = group_rows(rows, self.keys, self.num_key_groups)
        yield _ranked(groups.keys, groups.ids, rows)

    def _spill(self, level: int, steps: Iterator[RowStep]) -> None:
        if len(self._levels) == level:
            self._levels.append([])
        self._levels[level].append(_write_run(steps, self.limits))
        self.num_spills += 1
        if len(self._levels[level]) >= self.limits.fan_in:
            self._merge_level(level)

    def _merge_level(self, level: int) -> None:
        """Replace all runs of a level by one run of the next level."""
        runs, self._levels[level] = self._levels[level], []
        try:
            self._spill(level + 1, self._merge(runs))
        finally:
            for run in runs:
                run.file.close()

    def _merge(self, runs: list[_Run]) -> Iterator[RowStep]:
        """Yield the rows of several runs, in the order of arrival; a step is as large as the memory allows."""
        share = max(1, self.limits.memory // (4 * len(runs)))
        while True:
            for run in runs:
                if run.has_more and not len(run.keys):
                    run.read(share)
            limit = min((run.keys[-1].as_py() for run in runs if run.has_more), default=None)
            if limit is None:
                if rest := [part for run in runs for part in run.take(len(run.keys))]:
                    yield _sorted_parts(rest)
                return
            # A run whose last key in memory is the limit may have more rows of that key.
            parts = [part for run in runs for part in run.take(_number_below(run.keys, limit))]
            if parts:
                yield _sorted_parts(parts)
                continue
            nbytes = sum(run.rows.nbytes for run in runs if run.rows is not None)
            if nbytes > self.limits.memory // 2:
                yield from self._single_key(runs, limit, share)
            else:
                for run in runs:
                    if run.has_more and run.keys[-1].as_py() == limit:
                        run.read(share)

    def _single_key(self, runs: list[_Run], key: bytes, share: int) -> Iterator[RowStep]:
        """Yield in parts, one run after the other, the rows of a key that has too many rows for the memory."""
        pending: pa.RecordBatch | None = None
        for run in runs:
            while len(run.keys) and run.keys[0].as_py() == key:
                (rows,) = run.take(_number_up_to(run.keys, key))
                if pending is not None:
                    yield _one_key(key, pending, is_part=True)
                pending = rows.drop_columns([KEY_COLUMN])
                if run.has_more and not len(run.keys):
                    run.read(share)
        if pending is not None:
            yield _one_key(key, pending, is_part=False)


def sort_by_key(keys: pa.BinaryArray, rows: pa.RecordBatch) -> RowStep:
    """Return rows and their encoded keys as one step, sorted."""
    encoded = keys.dictionary_encode()
    order = pc.sort_indices(encoded.dictionary)
    ranks = np.empty(len(order), np.int64)
    ranks[order.to_numpy()] = np.arange(len(order))
    return _ranked(encoded.dictionary.take(order), ranks[encoded.indices.to_numpy()], rows)


def _ranked(keys: pa.BinaryArray, ranks: npt.NDArray[np.int64], rows: pa.RecordBatch) -> RowStep:
    """Return rows as one step; ``ranks`` has the place of each row's key in ``keys``, which are distinct and ascend."""
    counts = np.bincount(ranks, minlength=len(keys))
    # Sorting (rank, position) as one number keeps the order of arrival, and is faster than any sort of bytes.
    order = (ranks.astype(np.uint64) << np.uint64(32)) | np.arange(len(ranks), dtype=np.uint64)
    order.sort()
    order &= np.uint64(0xFFFFFFFF)
    return RowStep(keys, offsets_of(counts), rows.take(pa.array(order)))


def with_keys(steps: Iterator[RowStep], others: pa.BinaryArray, limit: int) -> Iterator[RowStep]:
    """Yield the steps with ``others`` (sorted, distinct) among their keys; a key that no row has gets no rows.

    A step takes at most ``limit`` of these keys. A step that would take more is cut. Keys before the first key or
    after the last key of all steps make separate steps, whose rows have no columns.
    """
    no_rows = pa.RecordBatch.from_arrays([], names=[])
    pending: RowStep | None = None
    own_keys = 0
    can_join = False
    for step in steps:
        if pending is not None:
            yield from _in_parts(pending, own_keys + limit)
        goes_on = pending is not None and pending.is_part
        before = _number_below(others, step.keys[0].as_py())
        alone = before if step.is_part or goes_on else max(0, before - limit)
        yield from _without_rows(others.slice(0, alone), limit, no_rows)
        among = _number_up_to(others, step.keys[-1].as_py())
        can_join = not (step.is_part or goes_on)
        pending = _joined(step, others.slice(alone, among - alone)) if can_join else step
        own_keys = len(step.keys)
        others = others.slice(among)
    if pending is not None:
        if can_join and len(others) <= limit:
            pending, others = _joined(pending, others), others.slice(len(others))
        yield from _in_parts(pending, own_keys + limit)
    yield from _without_rows(others, limit, no_rows)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all batches in one batch. Each column must have less than 2 GiB."""
    if len(batches) == 1:
        return batches[0]
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def _without_rows(keys: pa.BinaryArray, limit: int, no_rows: pa.RecordBatch) -> Iterator[RowStep]:
    for start in range(0, len(keys), limit):
        part = keys.slice(start, limit)
        yield RowStep(part, np.zeros(len(part) + 1, np.int64), no_rows)


def _in_parts(step: RowStep, limit: int) -> Iterator[RowStep]:
    """Yield the step, or, if it has more than ``limit`` keys, steps of ``limit`` keys each."""
    if len(step.keys) <= limit:
        yield step
        return
    for i in range(0, len(step.keys), limit):
        offsets = step.offsets[i : i + limit + 1]
        rows = step.rows.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        yield RowStep(step.keys.slice(i, limit), offsets - offsets[0], rows)


def _joined(step: RowStep, others: pa.BinaryArray) -> RowStep:
    """Return the step with other keys among its own."""
    if not len(others):
        return step
    keys = pc.unique(pa.concat_arrays([step.keys, others]))
    keys = keys.take(pc.sort_indices(keys))
    counts = np.zeros(len(keys), np.int64)
    counts[pc.index_in(step.keys, keys).to_numpy()] = np.diff(step.offsets)
    return RowStep(keys, offsets_of(counts), step.rows)


def _sorted_parts(parts: list[pa.RecordBatch]) -> RowStep:
    both = _concatenated(parts)
    return sort_by_key(both.column(KEY_COLUMN), both.drop_columns([KEY_COLUMN]))


def _one_key(key: bytes, rows: pa.RecordBatch, *, is_part: bool) -> RowStep:
    return RowStep(pa.array([key], pa.binary()), np.array([0, rows.num_rows]), rows, is_part)


def _cut(step: RowStep, limits: Limits) -> Iterator[RowStep]:
    """Yield the step in steps within the limits."""
    per_row = max(1, step.rows.nbytes // max(1, step.rows.num_rows))
    size = max(1, min(limits.step_rows, limits.step_bytes // per_row))
    i, num_keys = 0, len(step.keys)
    while i < num_keys:
        start = int(step.offsets[i])
        j = int(np.searchsorted(step.offsets, start + size, "right")) - 1
        if j > i:
            stop = int(step.offsets[j])
            yield RowStep(
                step.keys.slice(i, j - i),
                step.offsets[i : j + 1] - start,
                step.rows.slice(start, stop - start),
                step.is_part and j == num_keys,
            )
            i = j
            continue
        stop = int(step.offsets[i + 1])
        for part in range(start, stop, size):
            is_last = part + size >= stop
            yield _one_key(
                step.keys[i].as_py(), step.rows.slice(part, min(size, stop - part)), is_part=not is_last or step.is_part
            )
        i += 1


def _write_run(steps: Iterator[RowStep], limits: Limits) -> _Run:
    file = temporary_file()
    try:
        writer: pa.ipc.RecordBatchStreamWriter | None = None
        for step in steps:
            keys = step.keys.take(pa.array(np.repeat(np.arange(len(step.keys)), np.diff(step.offsets))))
            rows = step.rows.append_column(KEY_COLUMN, keys)
            if writer is None:
                writer = pa.ipc.new_stream(pa.PythonFile(file, "w"), rows.schema, options=_IPC)
            per_row = max(1, rows.nbytes // max(1, rows.num_rows))
            size = max(1, limits.memory // (8 * limits.fan_in) // per_row)
            for start in range(0, rows.num_rows, size):
                writer.write_batch(rows.slice(start, size))
        assert writer is not None
        writer.close()
        file.seek(0)
        return _Run(file, pa.ipc.open_stream(pa.PythonFile(file, "r")), pa.array([], pa.binary()))
    except BaseException:
        file.close()
        raise


def _number_below(keys: pa.BinaryArray, key: bytes) -> int:
    """Return how many of the sorted keys are less than ``key``."""
    return bisect_left(keys, key, key=_bytes)


def _number_up_to(keys: pa.BinaryArray, key: bytes) -> int:
    """Return how many of the sorted keys are less than or equal to ``key``."""
    return bisect_right(keys, key, key=_bytes)


def _bytes(scalar: pa.BinaryScalar) -> bytes:
    value: bytes = scalar.as_py()
    return value
