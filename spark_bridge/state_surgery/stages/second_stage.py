"""The second stage in which rows become new state: a task combines the rows of one partition, and writes the partition.

A task maps the runs that have rows of its partition, and holds the rows of some key groups in memory: about
``REWRITE_CHUNK_BYTES``, or one key group if that has more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import StateStoreConf
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import KEY_GROUP_BYTES
from backends.encoding.sorted_pairs import SortedPairs, as_binary
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.changelog import ChangelogMeta
from backends.formats.partition_entries import PartitionEntry
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.partition_reader import opened_partition
from coordinator_actor.reading.stored_versions import Piece, StatePlace
from coordinator_actor.savepoints.partition_builder import build_partition
from spark_bridge.state_format.stored_keys import key_groups_of
from spark_bridge.state_surgery.stages.first_stage import (
    SORT_KEY,
    OperatorVariable,
    PackedRows,
    Target,
    combined_batch,
    unpacked_rows,
)
from spark_bridge.state_surgery.stages.given_rows import conformed, in_key_order, key_in_words

REWRITE_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class CopiedState:
    """Column families of an operator whose pairs go to the new state as they are."""

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
    """A partition of new state: where it is written, and of what. ``place`` None: nothing is written."""

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
    """Yield the rows of key groups ``first`` (included) to ``end`` (not included) of sorted runs, by ranges of groups.

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
            f"{len(overlapping)} sessions of {target.in_words} begin before an earlier one of their key has ended, as "
            f"that of {key_in_words(rows, pairs, int(overlapping[0]))}: sessions of a key must lie apart."
        )
    return rows, keys


def _combined(
    target: Target, rows: pa.RecordBatch, keys: pa.BinaryArray, is_repeated: npt.NDArray[np.bool_], num_groups: int
) -> tuple[pa.RecordBatch, pa.BinaryArray]:
    repeated = pa.array(is_repeated)
    several = rows.filter(repeated)
    if target.combine is None:
        raise InvalidStateStoreArgument(
            f"Keys of {target.in_words} come several times, as {key_in_words(several, target.pairs, 0)} "
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
    both = combined_batch([rows.filter(single), combined.cast(rows.schema)], target.in_words)
    return in_key_order(both, pa.concat_arrays([keys.filter(single), new_keys]))
