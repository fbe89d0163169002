"""The two stages in which rows become partitions of new state: each task of the first stage reads one source and cuts
its rows by target partition; each task of the second one puts together what came for one partition, and writes it.

Rows travel as Arrow's IPC streams of up to ``FLUSH_BYTES``, sorted by stored key. A task of the second stage maps them
and holds a few key groups of them in memory, ``CHUNK_BYTES`` about, or one key group if that has more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import StateStoreConf
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import GROUP_BYTES
from backends.encoding.sorted_pairs import SortedPairs, as_binary
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.changelog import ChangelogMeta
from backends.formats.partition_entries import PartitionEntry
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.reading.partition_reader import opened_partition
from coordinator_actor.reading.stored_versions import Piece, StatePlace
from coordinator_actor.savepoints.partition_builder import build_partition
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_keys import key_groups_of
from spark_bridge.state_surgery.given_rows import conformed, in_key_order, in_words

FLUSH_BYTES = 64 << 20
CHUNK_BYTES = 64 << 20
SAMPLE_ROWS = 5
"""So many rows of each source and target are kept to be looked at."""
_KEY = "__key"

Name: TypeAlias = tuple[str, str]
"""An operator, and one of its state variables."""
Function: TypeAlias = Callable[[pa.RecordBatch], Any]
"""Makes new rows: a batch or table for the same variable, a mapping of them by target, or None for no rows."""
Combine: TypeAlias = Callable[[pa.Table], Any]
"""Makes one row of the rows of each key, of a table with all rows of some keys."""
Run: TypeAlias = npt.NDArray[np.uint8]
"""Rows for one partition, as the bytes of an IPC stream: ``PairsOfRows.columns`` and the sort key, in its order."""


class RowSource(Protocol):
    """Rows to be rewritten."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Give the rows."""
        ...

    def no_rows(self) -> pa.RecordBatch:
        """Return a batch of the same columns without rows."""
        ...


@dataclass(frozen=True)
class Target:
    """A state variable that gets rows, and the layout of its operator."""

    name: Name
    num_partitions: int
    pairs: PairsOfRows
    combine: Combine | None = None

    @property
    def in_words(self) -> str:
        """Return how messages name it."""
        operator, variable = self.name
        return f"operator {operator!r}" if variable == "default" else f"state variable {variable!r} of {operator!r}"


@dataclass
class RowCounts:
    """How many rows were read and made, by variable, and the first of them."""

    read: dict[Name, int] = field(default_factory=dict)
    made: dict[Name, int] = field(default_factory=dict)
    samples: dict[tuple[str, Name], pa.Table] = field(default_factory=dict)
    """By "before" or "after", and variable."""

    def note(self, what: str, name: Name, rows: pa.RecordBatch) -> None:
        """Count rows; ``what`` is "before" or "after"."""
        counts = self.read if what == "before" else self.made
        counts[name] = counts.get(name, 0) + rows.num_rows
        if rows.num_rows:
            self._sample(what, name, pa.Table.from_batches([rows.slice(0, SAMPLE_ROWS)]))

    def add(self, other: RowCounts) -> None:
        """Add the counts of another task."""
        for mine, theirs in ((self.read, other.read), (self.made, other.made)):
            for name, rows in theirs.items():
                mine[name] = mine.get(name, 0) + rows
        for (what, name), table in other.samples.items():
            self._sample(what, name, table)

    def _sample(self, what: str, name: Name, table: pa.Table) -> None:
        held = self.samples.get((what, name))
        if held is None:
            self.samples[what, name] = _copied(table)
        elif held.num_rows < SAMPLE_ROWS and held.schema == table.schema:
            both = pa.concat_tables([held, table.slice(0, SAMPLE_ROWS - held.num_rows)])
            self.samples[what, name] = _copied(both)


# -- first stage -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadJob:
    """One source, whose rows are those of the variable ``name``."""

    name: Name
    source: RowSource
    function: Function | None
    targets: Mapping[Name, Target]
    num_groups: int

    def run(self, counts: RowCounts) -> Iterator[dict[tuple[Name, int], Run]]:
        """Yield rows by target and partition; all of them are counted."""
        pending: dict[Name, list[pa.RecordBatch]] = {}
        size = 0
        for batch in self.source.batches():
            counts.note("before", self.name, batch)
            for name, rows in self._made(batch):
                counts.note("after", name, rows)
                pending.setdefault(name, []).append(rows)
                size += rows.nbytes
            if size >= FLUSH_BYTES:
                yield self._routed(pending)
                pending, size = {}, 0
        if pending:
            yield self._routed(pending)

    def columns(self, of_no_rows: bool = False) -> dict[Any, pa.Schema] | None:
        """Return the columns that the function makes of the first rows, by target; None if it makes no rows.

        With ``of_no_rows``, of a batch without rows.
        """
        for batch in [self.source.no_rows()] if of_no_rows else self.source.batches():
            made = batch if self.function is None else self.function(batch)
            if made is not None:
                return {key: rows.schema for key, rows in self._by_target(made) if rows is not None}
        return None

    def _by_target(self, made: Any) -> list[tuple[Any, Any]]:
        return list(made.items()) if isinstance(made, Mapping) else [(self.name, made)]

    def _made(self, batch: pa.RecordBatch) -> Iterator[tuple[Name, pa.RecordBatch]]:
        made = batch if self.function is None else self.function(batch)
        if made is None:
            return
        for key, rows in self._by_target(made):
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
                f"give rows to {known}."
            )
        return self.targets[name]

    def _routed(self, pending: dict[Name, list[pa.RecordBatch]]) -> dict[tuple[Name, int], Run]:
        routed: dict[tuple[Name, int], Run] = {}
        for name, batches in pending.items():
            target = self.targets[name]
            rows = one_batch(batches)
            rows, keys = in_key_order(rows, target.pairs.keys(rows, self.num_groups))
            groups = key_groups_of(keys)
            bounds = [partition_range(p, target.num_partitions, self.num_groups) for p in range(target.num_partitions)]
            cuts = np.searchsorted(groups, [first for first, _ in bounds] + [self.num_groups]).tolist()
            keyed = pa.RecordBatch.from_arrays([*rows.columns, keys], names=[*map(str, range(rows.num_columns)), _KEY])
            for partition, (begin, end) in enumerate(pairwise(cuts)):
                if begin < end:
                    routed[name, partition] = _packed(keyed.slice(begin, end - begin))
        return routed


def target_name(key: Any, targets: Mapping[Name, Target]) -> Name | None:
    """Return the target that a user calls ``key``: an operator, or an operator and its variable; None for none."""
    if isinstance(key, tuple):
        return key if key in targets else None
    of_operator = [name for name in targets if name[0] == key]
    return of_operator[0] if len(of_operator) == 1 else None


def one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all batches, which have one schema, as one."""
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays(c) for c in zip(*(b.columns for b in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=batches[0].schema)


def _packed(rows: pa.RecordBatch) -> Run:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return np.frombuffer(sink.getvalue(), np.uint8)


def _copied(rows: pa.Table) -> pa.Table:
    """Return a table that does not hold the buffers of the batches that its rows are of."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return pa.ipc.open_stream(sink.getvalue()).read_all().combine_chunks()


# -- second stage ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopiedState:
    """Column families of an operator whose pairs go to the new state as they are."""

    place: StatePlace
    pieces: tuple[Piece, ...]
    families: tuple[str, ...]

    def pairs(self, first: int, end: int, num_groups: int) -> Iterator[tuple[str, SortedPairs]]:
        """Yield the pairs of key groups ``first`` (included) to ``end`` (not included)."""
        lower = first.to_bytes(GROUP_BYTES, "big")
        upper = None if end >= 1 << 8 * GROUP_BYTES else end.to_bytes(GROUP_BYTES, "big")
        for piece in self.pieces:
            begins, behind = partition_range(piece.partition, len(self.pieces), num_groups)
            if behind <= first or end <= begins:
                continue
            with opened_partition(self.place, piece) as state:
                for family in self.families:
                    if family in state.column_families():
                        for batch in state.scan(None, lower, upper, family):
                            keys, values = as_binary("keys", batch.column(0)), as_binary("values", batch.column(1))
                            yield family, SortedPairs(keys, values)


@dataclass(frozen=True)
class NewPartition:
    """A partition of new state: where it is written, and of what. ``place`` None: nothing is written."""

    meta: ChangelogMeta
    families: tuple[str, ...]
    conf: StateStoreConf
    place: StatePlace | None
    num_groups: int
    targets: tuple[Target, ...]
    copied: CopiedState | None = None

    def build(self, runs: Mapping[Name, Sequence[Run]]) -> BuiltPartition:
        """Write the partition. Raises ``InvalidStateStoreArgument`` for keys that come twice, ``StorageError``."""
        counts = dict.fromkeys([t.name for t in self.targets], 0)
        pairs = self._pairs(runs, counts)
        if self.place is None:
            copied = sum(len(p) for family, p in pairs if self.copied and family in self.copied.families)
            return BuiltPartition(self.meta.operator, self.meta.partition, None, counts, copied)
        storage = CheckpointStorage.open(self.place.state_location, dict(self.place.options))
        entry, total = build_partition(storage, self.meta, self.families, pairs, self.conf, is_distinct=True)
        return BuiltPartition(self.meta.operator, self.meta.partition, entry, counts, total)

    def _pairs(self, runs: Mapping[Name, Sequence[Run]], counts: dict[Name, int]) -> Iterator[tuple[str, SortedPairs]]:
        meta = self.meta
        first, end = partition_range(meta.partition, meta.num_partitions, self.num_groups)
        if self.copied is not None:
            yield from self.copied.pairs(first, end, self.num_groups)
        for target in self.targets:
            for rows, keys in gathered(target.pairs, runs.get(target.name, ()), first, end):
                distinct, ordered = _distinct(target, rows, keys, self.num_groups)
                counts[target.name] += distinct.num_rows
                yield from target.pairs.pairs(distinct, ordered)


@dataclass(frozen=True)
class BuiltPartition:
    """What was written: the entry for the manifest, the rows of each rewritten variable, and the pairs."""

    operator: str
    partition: int
    entry: PartitionEntry | None
    rows: dict[Name, int]
    pairs: int


def gathered(
    pairs: PairsOfRows, runs: Sequence[Run], first: int, end: int
) -> Iterator[tuple[pa.RecordBatch, pa.BinaryArray]]:
    """Yield the rows of sorted runs by ranges of key groups, each range in the order of its keys, with these.

    Rows of equal keys come in the order of the runs.
    """
    schema = pa.schema([pa.field(f.name, f.type) for f in pairs.columns])
    opened = [pa.ipc.open_stream(pa.py_buffer(run)).read_next_batch() for run in runs]
    if not opened:
        return
    steps = max(1, min(end - first, -(-sum(len(run) for run in runs) // CHUNK_BYTES)))
    bounds = np.linspace(first, end, steps + 1).astype(np.int64)
    cuts = [np.searchsorted(key_groups_of(batch.column(_KEY)), bounds).tolist() for batch in opened]
    for step in range(steps):
        parts = [b.slice(c[step], c[step + 1] - c[step]) for b, c in zip(opened, cuts, strict=True)]
        parts = [part for part in parts if part.num_rows]
        if parts:
            whole = one_batch(parts)
            rows = pa.RecordBatch.from_arrays(whole.columns[:-1], schema=schema)
            yield in_key_order(rows, whole.column(_KEY))


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
            f"{len(overlapping)} sessions of {target.in_words} begin before an earlier one of their key has ended, as "
            f"that of {in_words(rows, pairs, int(overlapping[0]))}: sessions of a key must lie apart."
        )
    return rows, keys


def _combined(
    target: Target, rows: pa.RecordBatch, keys: pa.BinaryArray, is_repeated: npt.NDArray[np.bool_], num_groups: int
) -> tuple[pa.RecordBatch, pa.BinaryArray]:
    repeated = pa.array(is_repeated)
    several = rows.filter(repeated)
    if target.combine is None:
        raise InvalidStateStoreArgument(
            f"Keys of {target.in_words} come several times, as {in_words(several, target.pairs, 0)} "
            f"(and {several.num_rows - 1} more such rows in some key groups): give combine=, a function that makes one "
            "row of the rows of each key."
        )
    made = target.combine(pa.Table.from_batches([several]))
    combined = conformed(made, target.pairs, target.in_words)
    new_keys = target.pairs.keys(combined, num_groups)
    before, after = pc.unique(keys.filter(repeated)), pc.unique(new_keys)
    if len(after) != len(new_keys) or not pc.all(pc.is_in(new_keys, value_set=before)).as_py():
        raise InvalidStateStoreArgument(
            f"combine= gave {combined.num_rows} rows for the {len(before)} keys of {target.in_words} that it was given "
            "the rows of: it must give at most one row for each of them, and none for another key."
        )
    single = pc.invert(repeated)
    both = one_batch([rows.filter(single), combined.cast(rows.schema)])
    return in_key_order(both, pa.concat_arrays([keys.filter(single), new_keys]))
