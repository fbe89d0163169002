"""The first stage in which rows become new state: a task reads one source, and cuts its rows by target partition.

Rows travel as Arrow's IPC streams, sorted by stored key: so by key group, and so by partition. A task flushes when it
has ``FLUSH_BYTES`` of rows. A run has the rows of a flush for neighbouring partitions. It has ``RUN_BYTES`` at least,
for Ray keeps small objects in the memory of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.key_groups import partition_range
from backends.exceptions import InvalidStateStoreArgument
from backends.ids import DEFAULT_FAMILY
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_keys import key_groups_of
from spark_bridge.state_surgery.stages.given_rows import conformed, in_key_order

FLUSH_BYTES = 64 << 20
RUN_BYTES = 1 << 20
SAMPLE_ROWS = 5
"""At most this many rows of each source and target are kept to be looked at."""
SORT_KEY = "__key"
"""The column of a run that has the sort key; the others are numbered."""

OperatorVariable: TypeAlias = tuple[str, str]
"""An operator, and one of its state variables."""
Function: TypeAlias = Callable[[pa.RecordBatch], Any]
"""Makes new rows: a batch or table for the same variable, a mapping of them by target, or None for no rows."""
Combine: TypeAlias = Callable[[pa.Table], Any]
"""Makes one row of the rows of each key, of a table with all rows of some keys."""
PackedRows: TypeAlias = npt.NDArray[np.uint8]
"""Rows as the bytes of an IPC stream."""
TargetColumns: TypeAlias = Mapping[Any, pa.Schema]
"""The columns of new rows, by target."""


class RunName(NamedTuple):
    """Whose rows a run has: those of a variable, for partitions from the first to the last."""

    name: OperatorVariable
    first: int
    last: int


class RowSource(Protocol):
    """Rows to be rewritten."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Give the rows."""
        ...


@dataclass(frozen=True)
class Target:
    """A state variable that gets rows, and the layout of its operator."""

    name: OperatorVariable
    num_partitions: int
    pairs: PairsOfRows
    combine: Combine | None = None

    @property
    def in_words(self) -> str:
        """Return how messages name it."""
        operator, variable = self.name
        of_operator = f"operator {operator!r}"
        return of_operator if variable == DEFAULT_FAMILY else f"state variable {variable!r} of {of_operator}"


class RowCounts:
    """Counts of the rows that were read and made, by variable, and the first rows."""

    def __init__(self) -> None:
        self.read: dict[OperatorVariable, int] = {}
        self.made: dict[OperatorVariable, int] = {}
        self.samples: dict[tuple[str, OperatorVariable], pa.Table] = {}
        """By "before" or "after", and variable."""

    def note(self, what: str, name: OperatorVariable, rows: pa.RecordBatch) -> None:
        """Count rows; ``what`` is "before" or "after"."""
        counts = self.read if what == "before" else self.made
        counts[name] = counts.get(name, 0) + rows.num_rows
        held = self.samples.get((what, name))
        if rows.num_rows and (held is None or held.num_rows < SAMPLE_ROWS):
            self._sample(what, name, pa.Table.from_batches([rows.slice(0, SAMPLE_ROWS)]))

    def add(self, other: RowCounts) -> None:
        """Add the counts of another task."""
        for mine, theirs in ((self.read, other.read), (self.made, other.made)):
            for name, rows in theirs.items():
                mine[name] = mine.get(name, 0) + rows
        for (what, name), table in other.samples.items():
            self._sample(what, name, table)

    def _sample(self, what: str, name: OperatorVariable, table: pa.Table) -> None:
        held = self.samples.get((what, name))
        if held is not None and held.schema != table.schema:
            return
        parts = [table] if held is None else [held, table]
        both = pa.concat_tables(parts).slice(0, SAMPLE_ROWS)
        # A table of its own: a slice would hold the buffers of the whole batch.
        self.samples[what, name] = unpacked_rows(packed(both.schema, both.to_batches())).read_all().combine_chunks()


@dataclass(frozen=True)
class Routing:
    """The work on the rows of the variable ``name``, which is the same for all its sources."""

    name: OperatorVariable
    function: Function | None
    targets: Mapping[OperatorVariable, Target]
    num_groups: int

    def columns(self, batches: Iterator[pa.RecordBatch]) -> TargetColumns | None:
        """Return the columns that the function makes of the first rows of which it makes any; None if of no rows."""
        for batch in batches:
            made = batch if self.function is None else self.function(batch)
            if made is not None:
                return {key: rows.schema for key, rows in self._by_target(made) if rows is not None}
        return None

    def cut(self, batches: Iterator[pa.RecordBatch], counts: RowCounts) -> Iterator[dict[RunName, PackedRows]]:
        """Yield the runs of each flush; all rows are counted."""
        pending: dict[OperatorVariable, list[pa.RecordBatch]] = {}
        size = 0
        for batch in batches:
            counts.note("before", self.name, batch)
            for name, rows in self._made(batch):
                counts.note("after", name, rows)
                pending.setdefault(name, []).append(rows)
                size += rows.nbytes
            if size >= FLUSH_BYTES:
                yield self._runs(pending)
                pending, size = {}, 0
        if pending:
            yield self._runs(pending)

    def _by_target(self, made: Any) -> list[tuple[Any, Any]]:
        return list(made.items()) if isinstance(made, Mapping) else [(self.name, made)]

    def _made(self, batch: pa.RecordBatch) -> Iterator[tuple[OperatorVariable, pa.RecordBatch]]:
        made = batch if self.function is None else self.function(batch)
        for key, rows in [] if made is None else self._by_target(made):
            if rows is None:
                continue
            target = self._target(key)
            conform = conformed(rows, target.pairs, target.in_words)
            if conform.num_rows:
                yield target.name, conform

    def _target(self, key: Any) -> Target:
        name = target_name(key, self.targets)
        if name is None:
            known = ", ".join(f"{o!r} ({v!r})" for o, v in sorted(self.targets))
            raise InvalidStateStoreArgument(
                f"The function gave rows of {self.name[0]!r} ({self.name[1]!r}) to {key!r}, which gets none: it can "
                f"give rows to {known}. Without program=, these are the ones that it gave its first rows to."
            )
        return self.targets[name]

    @cached_property
    def _first_groups(self) -> dict[OperatorVariable, list[int]]:
        """Return the first key group of each partition, by target, and the one after the last."""
        return {
            name: [partition_range(p, t.num_partitions, self.num_groups)[0] for p in range(t.num_partitions)]
            + [self.num_groups]
            for name, t in self.targets.items()
        }

    def _runs(self, pending: Mapping[OperatorVariable, list[pa.RecordBatch]]) -> dict[RunName, PackedRows]:
        runs: dict[RunName, PackedRows] = {}
        for name, batches in pending.items():
            target = self.targets[name]
            rows = combined_batch(batches, target.in_words)
            rows, keys = in_key_order(rows, target.pairs.keys(rows, self.num_groups))
            names = [*map(str, range(rows.num_columns)), SORT_KEY]
            keyed = pa.RecordBatch.from_arrays([*rows.columns, keys], names=names)
            cuts = np.searchsorted(key_groups_of(keys), self._first_groups[name]).tolist()
            least = max(1, RUN_BYTES * len(keys) // max(1, keyed.nbytes))
            first = 0
            for partition in range(target.num_partitions):
                begin, end = cuts[first], cuts[partition + 1]
                if end - begin >= least or (begin < end and partition + 1 == target.num_partitions):
                    runs[RunName(name, first, partition)] = packed(keyed.schema, [keyed.slice(begin, end - begin)])
                    first = partition + 1
        return runs


class ReadJob(NamedTuple):
    """One task of the first stage."""

    source: RowSource
    routing: Routing


def target_name(key: Any, targets: Mapping[OperatorVariable, Any]) -> OperatorVariable | None:
    """Return the target that a user calls ``key``: an operator, or an operator and its variable; None for none."""
    if isinstance(key, tuple):
        return key if key in targets else None
    of_operator = [name for name in targets if name[0] == key]
    return of_operator[0] if len(of_operator) == 1 else None


def combined_batch(batches: Sequence[pa.RecordBatch], owner: str) -> pa.RecordBatch:
    """Return the rows of all batches, which have one schema, as one.

    Raises ``InvalidStateStoreArgument`` if a column has more bytes than Arrow's arrays can have.
    """
    if len(batches) == 1:
        return batches[0]
    try:
        columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    except pa.ArrowInvalid as error:
        raise InvalidStateStoreArgument(
            f"{sum(b.num_rows for b in batches)} rows of {owner} have to be put together, of one key group or made of "
            f"one batch, and a column of them has more than 2 GiB: {error}. Use more key groups, or make fewer rows of "
            "a batch."
        ) from error
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def packed(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> PackedRows:
    """Return rows as bytes."""
    # Once without bytes: a buffer that grows would be copied each time.
    counted = pa.MockOutputStream()
    _write(counted, schema, batches)
    made = pa.allocate_buffer(counted.size())
    with pa.FixedSizeBufferWriter(made) as sink:
        _write(sink, schema, batches)
    return np.frombuffer(made, np.uint8)


def _write(sink: pa.NativeFile, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def unpacked_rows(rows: PackedRows) -> pa.RecordBatchReader:
    """Return the rows of ``packed``; nothing is copied."""
    return pa.ipc.open_stream(pa.py_buffer(rows))
