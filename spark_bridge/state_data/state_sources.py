"""The rows, or the changes, of one state variable in storage, partition by partition."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import msgspec
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.decoders import msgpack_decoder
from backends.encoding.operator_schema import TIMERS, StateVariable
from backends.exceptions import InvalidStateStoreArgument
from backends.formats.changelog import read_changelog
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import Piece, Reading, StatePlace, StateVersions, VersionTimes, ms_of
from spark_bridge.queryable.reads.change_feed import GroupingKeyFilter
from spark_bridge.state_format.partition_rows import scan_partition
from spark_bridge.state_format.stored_changes import VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows


@dataclass(frozen=True)
class StateSource:
    """The rows of one state variable at a version, piece by piece; every batch has ``schema``."""

    reading: Reading
    rows: VariableRows
    open_storage: OpenStorage = CheckpointStorage.open

    @property
    def schema(self) -> pa.Schema:
        """Return the columns."""
        return self.rows.output

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Raises ``VersionNotFoundError`` if the version has been removed."""
        with opened_partition(self.reading.place, piece, open_storage=self.open_storage) as state:
            yield from scan_partition(self.rows, state, piece.partition)


@dataclass(frozen=True)
class ChangesSource:
    """The changes of one state variable between two versions, piece by piece; every batch has ``schema``."""

    reading: Reading
    changes: VariableChanges
    open_storage: OpenStorage = CheckpointStorage.open

    @property
    def schema(self) -> pa.Schema:
        """Return the columns."""
        return self.changes.output

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the changes of one partition.

        Raises ``VersionNotFoundError`` if versions have been removed.
        """
        return self.changes.changes(self.reading.place, piece, self.open_storage)


@dataclass(frozen=True)
class InsertsSource:
    """The rows of one state variable at a version, in the columns of ``ChangesSource``: each row as inserted."""

    reading: Reading
    changes: VariableChanges
    open_storage: OpenStorage = CheckpointStorage.open

    @property
    def schema(self) -> pa.Schema:
        """Return the columns."""
        return self.changes.output

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Raises ``VersionNotFoundError`` if the version has been removed."""
        rows = self.changes.rows
        for batch in StateSource(self.reading, rows, self.open_storage).batches(piece):
            yield self.changes.as_inserts(self.reading.version, batch)


AnySource = StateSource | ChangesSource | InsertsSource


def state_source(
    place: StatePlace,
    operator: str,
    state: str | None,
    version: int | None,
    *,
    as_of: str | datetime | None = None,
    collect: bool = False,
    raw: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> StateSource:
    """Return the source of ``state_batches``; see there."""
    versions = StateVersions.look(place, open_storage=open_storage)
    if as_of is not None:
        if version is not None:
            raise InvalidStateStoreArgument(f"version={version} and as_of={as_of!r}: give one of them.")
        version = VersionTimes.of(versions).version_at(ms_of(as_of))
    reading = versions.reading(operator, version)
    variable = _variable(reading, state)
    return StateSource(reading, VariableRows(reading.schema, variable, collect, raw), open_storage)


def inserts_source(
    place: StatePlace,
    operator: str,
    state: str | None,
    version: int | None,
    *,
    raw: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> InsertsSource:
    """Return the rows at a version as inserts: the beginning of a change feed."""
    source = state_source(place, operator, state, version, raw=raw, open_storage=open_storage)
    return InsertsSource(source.reading, VariableChanges(source.rows), open_storage)


def changes_source(
    place: StatePlace,
    operator: str,
    state: str | None,
    from_version: int,
    to_version: int | None,
    *,
    raw: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> ChangesSource:
    """Return the source of ``state_changes_batches``; see there."""
    versions = StateVersions.look(place, open_storage=open_storage)
    reading = versions.reading_of_changes(operator, from_version, to_version)
    rows = VariableRows(reading.schema, _variable(reading, state), raw=raw)
    return ChangesSource(reading, VariableChanges(rows), open_storage)


def _variable(reading: Reading, name: str | None) -> StateVariable:
    """Return the variable of that name; for None the only one (timers apart), or that of the operator's own rows."""
    if name is not None:
        return reading.schema.variable(name)
    there = list(reading.schema.in_use)
    own = [v for v in there if v.name == DEFAULT_FAMILY] or [v for v in there if v.kind != TIMERS] or there
    if len(own) == 1:
        return own[0]
    raise InvalidStateStoreArgument(
        f"Operator {reading.operator!r} has the state variables {', '.join(repr(v.name) for v in there) or 'none'}: "
        "name the one to read with state=."
    )


# Partitions to be read, packed for the way to another process: a chain of many versions names many files.


def packed_pieces(pieces: Sequence[Piece]) -> tuple[bytes, ...]:
    """Return the bytes of each piece."""
    return tuple(zlib.compress(msgspec.msgpack.encode(piece)) for piece in pieces)


def unpacked_piece(packed: bytes) -> Piece:
    """Return the piece of ``packed_pieces``."""
    return msgpack_decoder(Piece).decode(zlib.decompress(packed))


def without_pieces(source: AnySource) -> AnySource:
    """Return a source without its pieces, which go to other processes one by one."""
    reading = replace(source.reading, pieces=())
    match source:
        case StateSource():
            return replace(source, reading=reading)
        case ChangesSource():
            return replace(source, reading=reading)
        case InsertsSource():
            return replace(source, reading=reading)


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
