"""What a reader of stored state reads: the rows of one state variable, or its changes, partition by partition."""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.decoders import msgpack_decoder
from backends.encoding.key_groups import key_groups, partition_range
from backends.encoding.keys import KEY_GROUP_BYTES, encode_keys, first_key_after
from backends.encoding.operator_schema import TIMERS, StateVariable
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.changelog import read_changelog
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.stored_files import opened_partition, scan_family
from coordinator_actor.reading.stored_versions import Piece, Reading, StatePlace, StateVersions, VersionTimes, ms_of
from spark_bridge.queryable.client.arguments import WhereCondition, comparisons
from spark_bridge.queryable.protocol import Comparison
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.change_feed import GroupingKeyFilter
from spark_bridge.queryable.reads.scans import KeyBounds, RowSelection, normalized_condition, pairs_of, scalar_of
from spark_bridge.state_format.layouts import LOST_FAMILY, ROLLING
from spark_bridge.state_format.partition_rows import partition_rows, scan_partition
from spark_bridge.state_format.stored_changes import VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows

Form = Literal["rows", "inserts", "changes"]
MAX_SELECTED_KEYS = 10_000
"""Conditions that this many keys can meet, or more, leave out no partition."""


@dataclass(frozen=True)
class StateSource:
    """The rows of one state variable in storage, or its changes, piece by piece; every batch has ``schema``.

    ``form``: the rows at a version; the same rows in the columns of changes, each as inserted; or the changes between
    two versions. Of rows, ``columns`` (None: all) and ``where`` are those that ``selected`` has checked. Every reader
    of stored state reads one: Arrow, Spark's DataFrames and data source, Ray Data. ``split`` makes it ready for other
    processes.
    """

    reading: Reading
    rows: VariableRows
    form: Form = "rows"
    open_storage: OpenStorage = CheckpointStorage.open
    columns: tuple[str, ...] | None = None
    where: tuple[WhereCondition, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        if self._selection is not None:
            return self._selection.rows.schema
        return self.rows.output if self.form == "rows" else VariableChanges(self.rows).output

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the partitions that can have rows that meet all conditions."""
        return tuple(piece for piece in self.reading.pieces if self.may_have(piece))

    def may_have(self, piece: Piece) -> bool:
        """Return whether a partition can have rows that meet all conditions."""
        groups = None if self._selection is None else self._selection.groups
        return groups is None or not groups.isdisjoint(self._key_groups(piece))

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows or changes of one partition.

        Raises ``VersionNotFoundError`` if a version has been removed.
        """
        if self.form == "changes":
            yield from VariableChanges(self.rows).changes(self.reading.place, piece, self.open_storage)
            return
        with opened_partition(self.reading.place, piece, open_storage=self.open_storage) as state:
            lost = (pairs.column(1) for pairs in scan_family(state, LOST_FAMILY))
            self.rows.require_retained(self.rows.first_moment(lost))
            if self._selection is None:
                batches = scan_partition(self.rows, state, piece.partition)
                if self.form == "inserts":
                    changes = VariableChanges(self.rows)
                    batches = (changes.as_inserts(self.reading.version, batch) for batch in batches)
                yield from batches
                return
            view = PartitionView(piece.partition, state.reads, self.reading.version, None)
            pairs = pairs_of(view, self.rows, self._key_groups(piece), self._selection.bounds)
            for batch in partition_rows(self.rows, pairs, piece.partition):
                passing = self._selection.rows.rows(batch)
                if passing.num_rows:
                    yield passing

    def split(self) -> tuple[StateSource, tuple[bytes, ...]]:
        """Return the source without its pieces, and the pieces packed: a chain of many versions names many files."""
        return replace(self, reading=replace(self.reading, pieces=())), packed_pieces(self.pieces)

    def packed_batches(self, packed: bytes) -> Iterator[pa.RecordBatch]:
        return self.batches(unpacked_piece(packed))

    def _key_groups(self, piece: Piece) -> range:
        return range(*partition_range(piece.partition, self.reading.num_partitions, self.reading.key_groups))

    @cached_property
    def _selection(self) -> _Selection | None:
        if self.columns is None and not self.where:
            return None
        output = self.rows.output
        types = {field.name: field.type for field in output}
        conditions = comparisons(self.where, types)
        rows = RowSelection.of(self.rows, output.names if self.columns is None else self.columns, conditions)
        conditions = [normalized_condition(c, types[c.column]) for c in conditions]
        bounds = key_bounds(self.rows, conditions)
        if bounds is None:  # no key is in an empty range
            return _Selection(rows, KeyBounds(), frozenset())
        return _Selection(rows, bounds, _groups(self.rows.key, self.reading.key_groups, conditions))


@dataclass(frozen=True)
class _Selection:
    """Some rows and columns. ``groups`` are the key groups that can have such rows (None: all)."""

    rows: RowSelection
    bounds: KeyBounds
    groups: frozenset[int] | None


def packed_pieces(pieces: Sequence[Piece]) -> tuple[bytes, ...]:
    """Return the bytes of each piece, for the way to another process."""
    return tuple(zlib.compress(msgspec.msgpack.encode(piece)) for piece in pieces)


def unpacked_piece(packed: bytes) -> Piece:
    """Return the piece of ``packed_pieces``."""
    return msgpack_decoder(Piece).decode(zlib.decompress(packed))


def state_source(
    place: StatePlace,
    operator: str,
    state: str | None,
    version: int | None,
    *,
    as_of: str | datetime | None = None,
    collect: bool = False,
    raw: bool = False,
    inserts: bool = False,
    at: str | datetime | None = None,
) -> StateSource:
    """Return the source of ``state_batches``; see there. ``inserts``: the rows begin a feed of changes."""
    moment = at if at is not None else as_of
    moment_us = time.time_ns() // 1000 if moment is None else ms_of(moment) * 1000
    versions = StateVersions.look(place)
    if as_of is not None:
        if version is not None:
            raise InvalidStateStoreArgument(f"version={version} and as_of={as_of!r}: give one of them.")
        version = VersionTimes.of(versions).version_at(ms_of(as_of))
    reading = versions.reading(operator, version)
    variable = _variable(reading, state)
    rows = VariableRows(reading.schema, variable, collect, raw, moment=moment_us)
    if at is not None and rows.kind != ROLLING:
        raise InvalidStateStoreArgument(
            f"Operator {operator!r} has no rolling aggregates, and at= is the time that those are of: leave it out. "
            "as_of= selects a version by its time."
        )
    return StateSource(reading, rows, "inserts" if inserts else "rows")


def changes_source(
    place: StatePlace, operator: str, state: str | None, from_version: int, to_version: int | None, *, raw: bool = False
) -> StateSource:
    """Return the source of ``state_changes_batches``; see there."""
    versions = StateVersions.look(place)
    reading = versions.reading_of_changes(operator, from_version, to_version)
    rows = VariableRows(reading.schema, _variable(reading, state), raw=raw)
    return StateSource(reading, rows, "changes")


def _variable(reading: Reading, name: str | None) -> StateVariable:
    """Return the variable of that name; for None the only one (timers apart), or that of the operator's own rows."""
    if name is not None:
        return reading.schema.variable(name)
    variables = list(reading.schema.in_use)
    own = [v for v in variables if v.name == DEFAULT_FAMILY] or [v for v in variables if v.kind != TIMERS] or variables
    if len(own) == 1:
        return own[0]
    names = ", ".join(repr(v.name) for v in variables) or "none"
    raise InvalidStateStoreArgument(
        f"Operator {reading.operator!r} has the state variables {names}: name the one to read with state=."
    )


# Conditions on keys, which leave out partitions and ranges of keys.


def selected(
    source: StateSource, columns: Sequence[str] | None = None, where: Sequence[WhereCondition] | None = None
) -> StateSource:
    """Return the rows of a source that meet all conditions (as in ``client.scan``), in some columns (None: all).

    Raises ``RequestError`` naming a column that does not exist, or a value that is not of a column's type.
    """
    chosen = replace(source, columns=None if columns is None else tuple(columns), where=tuple(where or ()))
    _ = chosen.schema  # checks them
    return chosen


def key_bounds(rows: VariableRows, conditions: Sequence[Comparison]) -> KeyBounds | None:
    """Return the range of keys outside which no row meets the conditions; None if no key is in the range.

    Leading key columns in stored order that must be equal to one value bound the range, and the first one after them
    by its comparisons. Columns of floats bound nothing: equal floats can be stored as different bytes.
    """
    prefix: list[pa.Scalar] = []
    fields: list[pa.Field] = []
    start = end = b""
    for field in rows.key:
        if pa.types.is_floating(field.type):
            break
        of_column = [c for c in conditions if c.column == field.name]
        equal = [c for c in of_column if c.comparison == "="]
        fields.append(field)
        if equal:
            prefix.append(scalar_of(field.name, equal[0].values[0], field.type))
            continue
        starts, ends = [], []
        for condition in of_column:
            if condition.comparison in ("<", "<=", ">", ">="):
                at = _encoded(fields, [*prefix, scalar_of(field.name, condition.values[0], field.type)])
                if condition.comparison[0] == ">":
                    starts.append(at)
                else:
                    ends.append(at if condition.comparison == "<" else first_key_after(at) or b"")
        start, end = max(starts, default=b""), min((e for e in ends if e), default=b"")
        break
    before = _encoded(fields[: len(prefix)], prefix) if prefix else b""
    first = start or before
    last = end or (first_key_after(before) if before else None)
    if last is not None and last <= first:
        return None
    return KeyBounds(first or None, last)


def _encoded(fields: Sequence[pa.Field], values: Sequence[pa.Scalar]) -> bytes:
    """Return the first columns of a key as they are stored, without the key group."""
    arrays = [pa.array([value], field.type) for field, value in zip(fields, values, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(list(fields)))
    encoded: bytes = encode_keys(batch, np.zeros(1, np.uint16))[0].as_py()
    return encoded[KEY_GROUP_BYTES:]


def _groups(key: pa.Schema, num_groups: int, conditions: Sequence[Comparison]) -> frozenset[int] | None:
    """Return the key groups of the keys that can meet the conditions; None if key columns are missing."""
    choices: list[list[object]] = []
    many = 1
    for field in key:
        equal = [c for c in conditions if c.column == field.name and c.comparison in ("=", "in")]
        if not equal or pa.types.is_floating(field.type):
            return None
        values = [scalar_of(field.name, value, field.type) for value in equal[0].values]
        many *= len(values)
        if many > MAX_SELECTED_KEYS:
            return None
        choices.append(values)
    keys = list(itertools.product(*choices))
    columns = [pa.array([k[i] for k in keys], field.type) for i, field in enumerate(key)]
    batch = pa.RecordBatch.from_arrays(columns, schema=key)
    return frozenset(key_groups(batch, num_groups).tolist())


# The changes of single versions, in the order of versions: a change feed from storage alone.


def changes_by_version(
    rows: VariableRows, readings: Sequence[Reading], wanted: GroupingKeyFilter | None, open_storage: OpenStorage
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the columns, and the changes of some grouping keys or of all; each reading is that of one version.

    A partition is loaded only if its changelog has a pair that passes. One changelog is held in memory at a time.
    """
    changes = VariableChanges(rows)

    def batches() -> Iterator[pa.RecordBatch]:
        for reading in readings:
            for piece in reading.pieces:
                if not _touches(reading, piece, rows, wanted, open_storage):
                    continue
                for batch in changes.changes(reading.place, piece, open_storage):
                    passing = batch if wanted is None else wanted.of_changes(batch)
                    if passing.num_rows:
                        yield passing

    return changes.output, batches()


def _touches(
    reading: Reading, piece: Piece, rows: VariableRows, wanted: GroupingKeyFilter | None, open_storage: OpenStorage
) -> bool:
    """Return whether a changelog after ``piece.since`` has pairs of the variable, and perhaps of the keys."""
    storage = open_storage(reading.place.state_location, reading.place.options)
    since = piece.lineage.version if piece.since is None else piece.since
    for ref in piece.lineage.changelogs:
        if ref.version <= since:
            continue
        _, written = read_changelog(storage.read(ref.file), storage.full_location(ref.file.path))
        for family in rows.families:
            pairs = written.families.get(family)
            if pairs is None or not len(pairs):
                continue
            passing = None if wanted is None else wanted.of_pairs(family, pairs.keys)
            if passing is None or passing.true_count:
                return True
    return False
