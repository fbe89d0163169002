"""Turns rows into new state in two stages of tasks: cut the rows of a source by partition, then write a partition.

Rows travel as Arrow's IPC streams, sorted by key group, and so by partition. A task flushes when it has
``FLUSH_BYTES`` of rows. A run has the rows of a flush for neighbouring partitions. It has at least ``RUN_BYTES``,
because Ray keeps small objects in the memory of the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.sorted_pairs import SortedPairs, as_binary, key_order
from backends.encoding.user_values import CAST_ERRORS, cast_without_loss, check_same, python_value
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.changelog import ChangelogMeta
from backends.formats.manifest import PartitionEntry
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import Piece, StatePlace
from coordinator_actor.savepoints.new_checkpoint import build_partition
from spark_bridge.state_format.layouts import KEY_GROUP, PARTITION
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import key_groups_of

# Rows that users give for stored state, as the columns of a state variable: by name, without loss, or refused.


DERIVED = (KEY_GROUP, PARTITION)
"""Columns of stored rows that follow from the key: they may be present, and are ignored."""


def conformed(new_rows: Any, pairs: PairsOfRows, owner: str) -> pa.RecordBatch:
    """Return rows in the columns of ``pairs.columns``; ``owner`` names their purpose in messages.

    ``given`` is a ``pa.RecordBatch`` or ``pa.Table``. Raises ``InvalidStateStoreArgument`` for anything else, for
    columns that are missing or too many, for values that a column's type cannot have, and for nulls where none may be.
    """
    columns = pairs.columns
    if not isinstance(new_rows, (pa.RecordBatch, pa.Table)):
        raise InvalidStateStoreArgument(
            f"The rows of {owner} came as {type(new_rows).__name__}: they must be a pyarrow RecordBatch or Table."
        )
    names = [name for name in new_rows.schema.names if name not in DERIVED or name in columns.names]
    missing = [name for name in columns.names if name not in names]
    extra = [name for name in names if name not in columns.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if missing or extra or twice:
        said = [
            f"{what} {', '.join(map(repr, which))}"
            for what, which in (("without", missing), ("with the unknown", extra), ("twice with", twice))
            if which
        ]
        raise InvalidStateStoreArgument(
            f"The rows of {owner} came {' and '.join(said)}: they need the columns "
            f"{', '.join(f'{f.name} ({f.type})' for f in columns)}."
        )
    arrays = [_column(new_rows, field, owner) for field in columns]
    bare = pa.schema([pa.field(f.name, f.type) for f in columns])
    rows = pa.RecordBatch.from_arrays(arrays, schema=bare)
    wrong = pairs.without_length(rows)
    if len(wrong):
        raise InvalidStateStoreArgument(
            f"{len(wrong)} sessions of {owner} do not end after their beginning, as that of "
            f"{key_in_words(rows, pairs, int(wrong[0]))}."
        )
    return rows


def _column(new_rows: pa.RecordBatch | pa.Table, field: pa.Field, owner: str) -> pa.Array:
    column = new_rows.column(field.name)
    try:
        array = cast_without_loss(column, field.type)
        check_same(column, array)
    except CAST_ERRORS as error:
        raise InvalidStateStoreArgument(
            f"Column {field.name!r} of the rows of {owner} is {column.type}, and the state has {field.type}: {error} "
            "Cast it in the function."
        ) from error
    if array.null_count and not field.nullable:
        raise InvalidStateStoreArgument(
            f"Column {field.name!r} of the rows of {owner} has {array.null_count} nulls, and the state has none there."
        )
    return array


def key_in_words(rows: pa.RecordBatch, pairs: PairsOfRows, at: int) -> str:
    """Return the key of one row, for messages, with the part that distinguishes it from others of the same key."""
    n = len(pairs.rows.key) + len(pairs.rows.inner)
    return ", ".join(f"{name}={python_value(rows.column(i)[at])!r}" for i, name in enumerate(rows.schema.names[:n]))


def in_key_order(rows: pa.RecordBatch, keys: pa.BinaryArray) -> tuple[pa.RecordBatch, pa.BinaryArray]:
    """Return rows and keys sorted by key; equal keys keep their order."""
    if len(keys) < 2 or pc.all(pc.greater_equal(keys.slice(1), keys.slice(0, len(keys) - 1))).as_py():
        return rows, keys
    order = key_order(keys)
    return rows.take(order), keys.take(order)


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
RowSource: TypeAlias = Callable[[], Iterator[pa.RecordBatch]]
"""Yields rows to be rewritten, in any process."""
TargetColumns: TypeAlias = Mapping[Any, pa.Schema]
"""The columns of new rows, by target."""


class RunName(NamedTuple):
    """Whose rows a run has: those of a variable, for partitions from the first to the last."""

    name: OperatorVariable
    first: int
    last: int


@dataclass(frozen=True)
class Target:
    """A state variable that gets rows, and the layout of its operator."""

    name: OperatorVariable
    num_partitions: int
    pairs: PairsOfRows
    combine: Combine | None = None

    @property
    def in_words(self) -> str:
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

    def count_rows(self, what: str, name: OperatorVariable, rows: pa.RecordBatch) -> None:
        """Count rows; ``what`` is "before" or "after"."""
        counts = self.read if what == "before" else self.made
        counts[name] = counts.get(name, 0) + rows.num_rows
        sample = self.samples.get((what, name))
        if rows.num_rows and (sample is None or sample.num_rows < SAMPLE_ROWS):
            self._sample(what, name, pa.Table.from_batches([rows.slice(0, SAMPLE_ROWS)]))

    def merge(self, other: RowCounts) -> None:
        for mine, theirs in ((self.read, other.read), (self.made, other.made)):
            for name, rows in theirs.items():
                mine[name] = mine.get(name, 0) + rows
        for (what, name), table in other.samples.items():
            self._sample(what, name, table)

    def _sample(self, what: str, name: OperatorVariable, table: pa.Table) -> None:
        sample = self.samples.get((what, name))
        if sample is not None and sample.schema != table.schema:
            return
        parts = [table] if sample is None else [sample, table]
        both = pa.concat_tables(parts).slice(0, SAMPLE_ROWS)
        # A copy as a new table: a slice would hold the buffers of the whole batch.
        self.samples[what, name] = unpacked_rows(packed(both.schema, both.to_batches())).read_all().combine_chunks()


@dataclass(frozen=True)
class Routing:
    """The work on the rows of the variable ``name``, which is the same for all its sources."""

    name: OperatorVariable
    function: Function | None
    targets: Mapping[OperatorVariable, Target]
    num_groups: int

    def columns(self, batches: Iterator[pa.RecordBatch]) -> TargetColumns | None:
        """Return the columns of the function's first output that has rows; None if it never has any."""
        for batch in batches:
            output = batch if self.function is None else self.function(batch)
            if output is not None:
                return {key: rows.schema for key, rows in self._by_target(output) if rows is not None}
        return None

    def cut(self, batches: Iterator[pa.RecordBatch], counts: RowCounts) -> Iterator[dict[RunName, PackedRows]]:
        """Yield the runs of each flush; all rows are counted."""
        pending: dict[OperatorVariable, list[pa.RecordBatch]] = {}
        size = 0
        for batch in batches:
            counts.count_rows("before", self.name, batch)
            for name, rows in self._made(batch):
                counts.count_rows("after", name, rows)
                pending.setdefault(name, []).append(rows)
                size += rows.nbytes
            if size >= FLUSH_BYTES:
                yield self._runs(pending)
                pending, size = {}, 0
        if pending:
            yield self._runs(pending)

    def _by_target(self, output: Any) -> list[tuple[Any, Any]]:
        return list(output.items()) if isinstance(output, Mapping) else [(self.name, output)]

    def _made(self, batch: pa.RecordBatch) -> Iterator[tuple[OperatorVariable, pa.RecordBatch]]:
        output = batch if self.function is None else self.function(batch)
        for key, rows in [] if output is None else self._by_target(output):
            if rows is None:
                continue
            target = self._target(key)
            conform = conformed(rows, target.pairs, target.in_words)
            if conform.num_rows:
                yield target.name, conform

    def _target(self, key: Any) -> Target:
        if (name := target_name(key, self.targets)) is None:
            listed = ", ".join(f"{o!r} ({v!r})" for o, v in sorted(self.targets))
            raise InvalidStateStoreArgument(
                f"The function gave rows of {self.name[0]!r} ({self.name[1]!r}) to {key!r}, which takes none: it can "
                f"give rows to {listed}. Without program=, these are the ones that it gave its first rows to."
            )
        return self.targets[name]

    @cached_property
    def _first_groups(self) -> dict[OperatorVariable, list[int]]:
        """Return the first key group of each partition, by target, and the one after the last."""
        groups = {}
        for name, t in self.targets.items():
            firsts = (partition_range(p, t.num_partitions, self.num_groups)[0] for p in range(t.num_partitions))
            groups[name] = [*firsts, self.num_groups]
        return groups

    def _runs(self, pending: Mapping[OperatorVariable, list[pa.RecordBatch]]) -> dict[RunName, PackedRows]:
        runs: dict[RunName, PackedRows] = {}
        for name, batches in pending.items():
            target = self.targets[name]
            rows = combined_batch(batches, target.in_words)
            keys = target.pairs.keys(rows, self.num_groups)
            names = [*map(str, range(rows.num_columns)), SORT_KEY]
            keyed = pa.RecordBatch.from_arrays([*rows.columns, keys], names=names)
            # By key group alone, which is quick: the second stage puts several runs in the order of their keys.
            groups = key_groups_of(keys)
            order = np.argsort(groups.astype(np.uint16), kind="stable")  # numpy has a radix sort for 16 bits
            keyed, groups = keyed.take(pa.array(order)), groups[order]
            cuts = np.searchsorted(groups, self._first_groups[name]).tolist()
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
            f"{sum(b.num_rows for b in batches)} rows of {owner} must fit into one batch, because they are of one key "
            f"group or made from one batch, but a column of them has more than 2 GiB: {error}. Use more key groups, or "
            "make fewer rows from a batch."
        ) from error
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def packed(schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> PackedRows:
    """Return rows as bytes."""
    # Once without bytes: a buffer that grows would be copied each time.
    counted = pa.MockOutputStream()
    _write(counted, schema, batches)
    buffer = pa.allocate_buffer(counted.size())
    with pa.FixedSizeBufferWriter(buffer) as sink:
        _write(sink, schema, batches)
    return np.frombuffer(buffer, np.uint8)


def _write(sink: pa.NativeFile, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def unpacked_rows(rows: PackedRows) -> pa.RecordBatchReader:
    """Return the rows of ``packed``; nothing is copied."""
    return pa.ipc.open_stream(pa.py_buffer(rows))


# The second stage of turning rows into new state: a task combines the rows of one partition, and writes the
# partition.
#
# A task maps the runs that have rows of its partition, and holds the rows of some key groups in memory: about
# ``REWRITE_CHUNK_BYTES``, or one key group if that has more.


REWRITE_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class CopiedState:
    """Column families of an operator whose pairs go to the new state unchanged."""

    place: StatePlace
    pieces: tuple[Piece, ...]
    families: tuple[str, ...]
    open_storage: OpenStorage = CheckpointStorage.open

    def pairs(self, first: int, end: int, num_groups: int) -> Iterator[tuple[str, SortedPairs]]:
        """Yield the pairs of key groups ``first`` (included) to ``end`` (not included)."""
        lower = first.to_bytes(KEY_GROUP_BYTES, "big")
        upper = None if end >= 1 << 8 * KEY_GROUP_BYTES else end.to_bytes(KEY_GROUP_BYTES, "big")
        for piece in self.pieces:
            begins, behind = partition_range(piece.partition, len(self.pieces), num_groups)
            if behind <= first or end <= begins:
                continue
            with opened_partition(self.place, piece, open_storage=self.open_storage) as state:
                for family in self.families:
                    if family in state.reads.column_families():
                        for batch in state.reads.scan(None, lower, upper, family):
                            keys, values = as_binary("keys", batch.column(0)), as_binary("values", batch.column(1))
                            yield family, SortedPairs(keys, values)


@dataclass(frozen=True)
class NewPartition:
    """A partition of new state: its location and its sources. ``place`` None: nothing is written."""

    meta: ChangelogMeta
    families: tuple[str, ...]
    conf: StateStoreConf
    place: StatePlace | None
    num_groups: int
    targets: tuple[Target, ...]
    copied: CopiedState | None = None
    open_storage: OpenStorage = CheckpointStorage.open

    def build(self, runs: Mapping[OperatorVariable, Sequence[PackedRows]]) -> BuiltPartition:
        """Write the partition. Raises ``InvalidStateStoreArgument`` for keys that come twice, ``StorageError``."""
        counts = dict.fromkeys([t.name for t in self.targets], 0)
        pairs = self._pairs(runs, counts)
        if self.place is None:
            total, entry = sum(len(of_family) for _, of_family in pairs), None
        else:
            storage = self.open_storage(self.place.state_location, dict(self.place.options))
            entry, total = build_partition(storage, self.meta, self.families, pairs, self.conf, is_distinct=True)
        return BuiltPartition(self.meta.operator, self.meta.partition, entry, counts, total)

    def _pairs(
        self, runs: Mapping[OperatorVariable, Sequence[PackedRows]], counts: dict[OperatorVariable, int]
    ) -> Iterator[tuple[str, SortedPairs]]:
        meta = self.meta
        first, end = partition_range(meta.partition, meta.num_partitions, self.num_groups)
        if self.copied is not None:
            yield from self.copied.pairs(first, end, self.num_groups)
        for target in self.targets:
            for rows, keys in gather_pairs(target, runs.get(target.name, ()), first, end):
                distinct, ordered = _distinct(target, rows, keys, self.num_groups)
                counts[target.name] += distinct.num_rows
                yield from target.pairs.pairs(distinct, ordered)


@dataclass(frozen=True)
class BuiltPartition:
    """A partition that was written: the entry for the manifest, the rows of each rewritten variable, and the pairs."""

    operator: str
    partition: int
    entry: PartitionEntry | None
    rows: dict[OperatorVariable, int]
    pairs: int


def gather_pairs(
    target: Target, runs: Sequence[PackedRows], first: int, end: int
) -> Iterator[tuple[pa.RecordBatch, pa.BinaryArray]]:
    """Yield the rows of key groups ``first`` (included) to ``end`` (not included) of runs, by ranges of groups.

    Each range comes in the order of its keys, with these. Rows of equal keys come in the order of the runs.
    """
    schema = pa.schema([pa.field(f.name, f.type) for f in target.pairs.columns])
    opened = [unpacked_rows(run).read_next_batch() for run in runs]
    of_runs = [key_groups_of(batch.column(SORT_KEY)) for batch in opened]
    own = [np.searchsorted(groups, [first, end]).tolist() for groups in of_runs]
    size = sum(b.nbytes * (stop - begin) // max(1, b.num_rows) for b, (begin, stop) in zip(opened, own, strict=True))
    steps = max(1, min(end - first, -(-size // REWRITE_CHUNK_BYTES)))
    bounds = np.linspace(first, end, steps + 1).astype(np.int64)
    cuts = [np.searchsorted(groups, bounds).tolist() for groups in of_runs]
    for step in range(steps):
        parts = [b.slice(c[step], c[step + 1] - c[step]) for b, c in zip(opened, cuts, strict=True)]
        parts = [part for part in parts if part.num_rows]
        if parts:
            whole = combined_batch(parts, target.in_words)
            rows = pa.RecordBatch.from_arrays(whole.columns[:-1], schema=schema)
            yield in_key_order(rows, whole.column(SORT_KEY))


def _distinct(
    target: Target, rows: pa.RecordBatch, keys: pa.BinaryArray, num_groups: int
) -> tuple[pa.RecordBatch, pa.BinaryArray]:
    """Return sorted rows with one row per key: those of a key that comes several times are combined."""
    pairs = target.pairs
    if not pairs.has_equal_keys and len(keys) > 1:
        is_same = np.asarray(pc.equal(keys.slice(1), keys.slice(0, len(keys) - 1)))
        if is_same.any():
            is_repeated = np.append(is_same, False) | np.append(False, is_same)
            rows, keys = _combined(target, rows, keys, is_repeated, num_groups)
    overlapping = pairs.overlapping(rows, keys)
    if len(overlapping):
        raise InvalidStateStoreArgument(
            f"{len(overlapping)} sessions of {target.in_words} overlap an earlier session of their key, such as "
            f"{key_in_words(rows, pairs, int(overlapping[0]))}: merge the sessions of a key that overlap."
        )
    return rows, keys


def _combined(
    target: Target, rows: pa.RecordBatch, keys: pa.BinaryArray, is_repeated: npt.NDArray[np.bool_], num_groups: int
) -> tuple[pa.RecordBatch, pa.BinaryArray]:
    repeated = pa.array(is_repeated)
    several = rows.filter(repeated)
    if target.combine is None:
        raise InvalidStateStoreArgument(
            f"Keys of {target.in_words} come several times, such as {key_in_words(several, target.pairs, 0)} "
            f"(and {several.num_rows - 1} more such rows in some key groups): give combine=, a function that returns "
            "one row for each key."
        )
    output = target.combine(pa.Table.from_batches([several]))
    combined = conformed(output, target.pairs, target.in_words)
    new_keys = target.pairs.keys(combined, num_groups)
    before, after = pc.unique(keys.filter(repeated)), pc.unique(new_keys)
    if len(after) != len(new_keys) or not pc.all(pc.is_in(new_keys, value_set=before)).as_py():
        raise InvalidStateStoreArgument(
            f"combine= returned {combined.num_rows} rows for {len(before)} keys of {target.in_words}: it must return "
            "at most one row for each of these keys, and no row for another key."
        )
    single = pc.invert(repeated)
    both = combined_batch([rows.filter(single), combined.cast(rows.schema)], target.in_words)
    return in_key_order(both, pa.concat_arrays([keys.filter(single), new_keys]))
