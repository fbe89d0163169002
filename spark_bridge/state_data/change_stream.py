"""The stream of the format ``ray_statestore``: the changes of a state, version by version. For Spark 4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from coordinator_actor.reading.stored_versions import StateVersions
from spark_bridge.state_data.packed_pieces import packed_pieces, unpacked_piece, without_pieces
from spark_bridge.state_data.source_options import EARLIEST, LATEST, OF_CHANGES, STATE, SourceOptions
from spark_bridge.state_data.state_reader import StatePartition, fitting, reader_schema
from spark_bridge.state_data.state_sources import AnySource, changes_source, inserts_source

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OFFSET_FIELD = "version"
BEFORE_STATE = -1
"""The offset before the state itself: the first batch of the stream has all rows as inserted."""


class ChangeStreamReader(DataSourceStreamReader):  # type: ignore[misc]
    """Reads what completed versions change. An offset is a version; a batch has the changes between two of them.

    ``startingVersion`` is where a new stream begins: "state" (the default) with all rows of the version that is
    completed then, as inserted; "latest" after that version; "earliest" after the oldest version that is kept; a
    number after that version. ``maxVersionsPerTrigger`` limits a batch. The query need not run.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        if not options.is_changes:
            raise InvalidStateStoreArgument(
                "A stream of state is the feed of its changes: give option('readChangeFeed', 'true')."
            )
        options.refuse((*OF_CHANGES, "flattenCollectionTypes"), "A stream")
        self._options = options
        self._schema = reader_schema(schema)
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:
        """Return where a new stream begins. Raises ``VersionNotFoundError`` for a version that is not there."""
        starting = self._options.starting
        versions = self._versions()
        if starting == STATE:
            return {OFFSET_FIELD: BEFORE_STATE}
        if starting in (EARLIEST, LATEST):
            there = versions.readable
            return {OFFSET_FIELD: there[0] if there and starting == EARLIEST else self._completed(versions)}
        assert isinstance(starting, int)
        return {OFFSET_FIELD: versions.resolve(starting)}

    def getDefaultReadLimit(self) -> Any:
        """Return the limit of a batch, which Spark hands back; it has none that counts versions."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles

        most = self._options.most_versions
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        """Return the last completed version, or the one up to which the limit lets a batch read.

        Raises ``VersionNotFoundError`` if the query went back to a version before what the stream has read.
        """
        from pyspark.sql.streaming.datasource import ReadMaxFiles

        begin = start[OFFSET_FIELD]
        newest = self._completed(self._versions()) if self._target is None else self._target
        if newest < begin:
            if self._target is not None:
                return {OFFSET_FIELD: begin}
            raise VersionNotFoundError(
                f"The query at {self._options.place.checkpoint_location} went back to version {newest}, but changes up "
                f"to version {begin} have been read, which no longer hold. Start this stream with a new checkpoint."
            )
        if begin != BEFORE_STATE and isinstance(limit, ReadMaxFiles):
            newest = min(newest, begin + limit.max_files)
        return {OFFSET_FIELD: newest}

    def prepareForTriggerAvailableNow(self) -> None:
        """Keep the version that is completed now: the stream ends there."""
        self._target = self._completed(self._versions())

    def reportLatestOffset(self) -> dict[str, int]:
        """Return the last completed version."""
        return {OFFSET_FIELD: self._completed(self._versions())}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[StatePartition]:
        """Return a partition for each one of the state. Raises ``VersionNotFoundError`` if the versions are gone."""
        begin, last = start[OFFSET_FIELD], end[OFFSET_FIELD]
        if begin == last:
            return []
        try:
            source = self._source(begin, last)
        except VersionNotFoundError as error:
            raise VersionNotFoundError(
                f"The changes after version {begin} up to version {last} are no longer kept. {error} Start this "
                "stream with a new checkpoint, and let the query that it reads keep more versions "
                "(min_versions_to_retain)."
            ) from error
        of_stream = without_pieces(source)
        return [StatePartition(packed, of_stream) for packed in packed_pieces(source.reading.pieces)]

    def _source(self, begin: int, last: int) -> AnySource:
        of = self._options
        if begin == BEFORE_STATE:
            return inserts_source(of.place, of.operator, of.state, last, raw=of.state_columns)
        return changes_source(of.place, of.operator, of.state, begin, last, raw=of.state_columns)

    def read(self, partition: StatePartition) -> Iterator[pa.RecordBatch]:
        """Give the changes of one partition, on an executor."""
        assert partition.source is not None
        return fitting(partition.source.batches(unpacked_piece(partition.piece)), self._schema)

    def _versions(self) -> StateVersions:
        return StateVersions.look(self._options.place)

    @staticmethod
    def _completed(versions: StateVersions) -> int:
        """Return the last completed version; 0 before the first one."""
        return 0 if versions.completed == 0 else versions.resolve(None)
