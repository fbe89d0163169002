"""The table of the format ``ray_statestore``: read by executors, a partition of the state each. For Spark 4."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import datasource

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from coordinator_actor.reading.stored_versions import StateVersions
from spark_bridge.exceptions import RequestError
from spark_bridge.state_data.source_options import EARLIEST, LATEST, OF_CHANGES, STATE, SourceOptions, source_of
from spark_bridge.state_data.state_sources import StateSource, changes_source, selected, state_source, unpacked_piece

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FILTERING_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"
_SIGNS = {
    "EqualTo": "=",
    "In": "in",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
}
_COMPARISONS: dict[type, str] = {
    getattr(datasource, name): sign for name, sign in _SIGNS.items() if hasattr(datasource, name)
}
"""PySpark's filters and their signs; none on Spark 4.0, which asks no reader to filter."""
HAS_LIMITS = hasattr(datasource.DataSourceStreamReader, "getDefaultReadLimit")
"""Whether Spark takes the limit of a batch from a stream's reader: since 4.2."""


class StatePartition(datasource.InputPartition):  # type: ignore[misc]
    """One partition of the state, packed; of a stream with the source that reads it."""

    def __init__(self, piece: bytes, source: StateSource | None = None) -> None:
        super().__init__(None)
        self.piece = piece
        self.source = source


class StateReader(datasource.DataSourceReader):  # type: ignore[misc]
    """Reads a table, a partition of the state in each of Spark's partitions."""

    def __init__(self, source: StateSource, schema: pa.Schema) -> None:
        self._source, self._packed = source.split()
        self._schema = schema

    def partitions(self) -> Sequence[StatePartition]:
        """Return the partitions that can have rows that pass."""
        packed, self._packed = self._packed, ()  # Spark sends this reader to executors
        if not self._source.where:
            return [StatePartition(p) for p in packed]
        return [StatePartition(p) for p in packed if self._source.may_have(unpacked_piece(p))]

    def read(self, partition: datasource.InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition, on an executor.

        If there is nothing to read, PySpark replaces our empty list by one partition.
        """
        if isinstance(partition, StatePartition):
            yield from fitting(self._source.packed_batches(partition.piece), self._schema)


class FilteringStateReader(StateReader):
    """Reads a table of rows. Conditions on key columns leave out partitions and keys; Spark applies them again."""

    def pushFilters(self, filters: list[datasource.Filter]) -> Iterator[datasource.Filter]:
        """Accept the conditions on key columns, and return all for Spark to apply.

        A condition on a column of floats is not taken, since Spark takes NaN for the greatest value.
        """
        key = {f.name: f.type for f in self._source.rows.key if not pa.types.is_floating(f.type)}
        conditions = [condition for f in filters if (condition := _condition(f, key)) is not None]
        if where := [condition for condition in conditions if self._is_possible(condition)]:
            self._source = selected(self._source, None, where)
        yield from filters

    def _is_possible(self, condition: tuple[str, str, Any]) -> bool:
        """Return whether the value is one that the column can be compared with here; if not, Spark does it alone."""
        try:
            selected(self._source, None, [condition])
        except RequestError:
            return False
        return True


def reader_of(options: SourceOptions, schema: StructType) -> StateReader:
    """Return the reader of a table. Raises what ``source_of`` raises.

    Spark refuses a reader that takes filters unless ``spark.sql.python.filterPushdown.enabled`` is set, which a reader
    cannot see. But with the setting, another process of Spark asks for the reader than without it.
    """
    source = source_of(options)
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)  # of the module that this process runs
    takes_filters = FILTERING_WORKER in sys.modules or (spec is not None and spec.name == FILTERING_WORKER)
    if source.form == "rows" and takes_filters:
        return FilteringStateReader(source, reader_schema(schema))
    return StateReader(source, reader_schema(schema))


def reader_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark wants of a data source's batches.

    Spark 4.0 and 4.1 always take UTC; later lines take it as an argument.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)


def fitting(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches with exactly the types that Spark compares with: it is strict about nulls within structs."""
    for batch in batches:
        if batch.schema.equals(schema):
            yield batch
        else:
            columns = [column.cast(f.type) for column, f in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _condition(spark_filter: datasource.Filter, key: dict[str, pa.DataType]) -> tuple[str, str, Any] | None:
    comparison = _COMPARISONS.get(type(spark_filter))
    if comparison is None or len(spark_filter.attribute) != 1 or spark_filter.attribute[0] not in key:
        return None
    values = spark_filter.value if comparison == "in" else (spark_filter.value,)
    if any(value is None for value in values):
        return None
    return spark_filter.attribute[0], comparison, spark_filter.value


# The stream of the format ``ray_statestore``: the changes of a state, version by version. For Spark 4.


OFFSET_FIELD = "version"
RUN_FIELD = "run"
"""The run of the query that has made the version of an offset. Offsets of earlier releases have none."""
BEFORE_STATE = -1
"""The offset before the state itself: the first batch of the stream has all rows as inserted."""


class ChangeStreamReader(datasource.DataSourceStreamReader):  # type: ignore[misc]
    """Reads what completed versions change. An offset is a version; a batch has the changes between two of them.

    An offset has the run that made the version, so that a rollback shows also once the query has made it again.

    ``startingVersion`` is the start of a new stream: "state" (the default) with all rows of the version that is
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

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new stream. Raises ``VersionNotFoundError`` for a version that does not exist."""
        starting = self._options.starting
        versions = self._versions()
        if starting == STATE:
            return {OFFSET_FIELD: BEFORE_STATE}
        if starting in (EARLIEST, LATEST):
            readable = versions.readable
            is_earliest = readable and starting == EARLIEST
            return self._offset(versions, readable[0] if is_earliest else self._completed(versions))
        assert isinstance(starting, int)
        return self._offset(versions, versions.resolve(starting))

    def getDefaultReadLimit(self) -> Any:
        """Return the limit of a batch, which Spark hands back; it has none that counts versions."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles

        most = self._options.most_versions
        return ReadAllAvailable() if most is None else ReadMaxFiles(most)

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        """Return the last completed version, or the version at which the limit ends a batch.

        Raises ``VersionNotFoundError`` if the query was rolled back to a version before the ones that the stream has
        read.
        """
        from pyspark.sql.streaming.datasource import ReadMaxFiles

        begin, versions = start[OFFSET_FIELD], self._versions()
        newest = self._completed(versions) if self._target is None else self._target
        if newest < begin:
            if self._target is not None:
                return start
            raise self._went_back(begin, newest)
        self._require_same_history(versions, start)
        if newest == begin:
            return start  # also without a run: another offset would be another batch
        if begin != BEFORE_STATE and isinstance(limit, ReadMaxFiles):
            newest = min(newest, begin + limit.max_files)
        return self._offset(versions, newest)

    def prepareForTriggerAvailableNow(self) -> None:
        """Keep the version that is completed now: the stream ends there."""
        self._target = self._completed(self._versions())

    def reportLatestOffset(self) -> dict[str, Any]:
        versions = self._versions()
        return self._offset(versions, self._completed(versions))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[StatePartition]:
        """Return a partition for each one of the state. Raises ``VersionNotFoundError`` if the versions have been
        removed, or were made again.
        """
        begin, last = start[OFFSET_FIELD], end[OFFSET_FIELD]
        if last < begin:
            raise self._went_back(begin, last)
        if RUN_FIELD in start or RUN_FIELD in end:
            versions = self._versions()
            self._require_same_history(versions, start)
            self._require_same_history(versions, end)
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
        bare, pieces = source.split()
        return [StatePartition(packed, bare) for packed in pieces]

    def _source(self, begin: int, last: int) -> StateSource:
        of = self._options
        if begin == BEFORE_STATE:
            return state_source(of.place, of.operator, of.state, last, raw=of.state_columns, inserts=True)
        return changes_source(of.place, of.operator, of.state, begin, last, raw=of.state_columns)

    def read(self, partition: StatePartition) -> Iterator[pa.RecordBatch]:
        """Yield the changes of one partition, on an executor."""
        assert partition.source is not None
        return fitting(partition.source.packed_batches(partition.piece), self._schema)

    def _went_back(self, begin: int, newest: int) -> VersionNotFoundError:
        return VersionNotFoundError(
            f"The query at {self._options.place.checkpoint_location} went back to version {newest}, but changes up "
            f"to version {begin} have been read, which no longer hold. Start this stream with a new checkpoint."
        )

    def _require_same_history(self, versions: StateVersions, offset: dict[str, Any]) -> None:
        """Raise ``VersionNotFoundError`` if another run has made the version of an offset again."""
        version, manifest = offset[OFFSET_FIELD], versions.chain.get(offset[OFFSET_FIELD])
        if manifest is not None and offset.get(RUN_FIELD, manifest.run_id) != manifest.run_id:
            raise VersionNotFoundError(
                f"The query at {self._options.place.checkpoint_location} went back to a version before {version}, and "
                f"has made that one again, but changes up to version {version} have been read, or were to be read in "
                "this batch: these no longer hold. Start this stream with a new checkpoint."
            )

    @staticmethod
    def _offset(versions: StateVersions, version: int) -> dict[str, Any]:
        manifest = versions.chain.get(version)
        return {OFFSET_FIELD: version} if manifest is None else {OFFSET_FIELD: version, RUN_FIELD: manifest.run_id}

    def _versions(self) -> StateVersions:
        return StateVersions.look(self._options.place)

    @staticmethod
    def _completed(versions: StateVersions) -> int:
        """Return the last completed version; 0 before the first one."""
        return 0 if versions.completed == 0 else versions.resolve(None)


class UnlimitedChangeStreamReader(ChangeStreamReader):
    """The reader of a stream on Spark 4.0 and 4.1, which give ``latestOffset`` neither the start nor a limit.

    ``maxVersionsPerTrigger`` is refused. That the query went back shows when Spark asks for the partitions.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        options.refuse(("maxVersionsPerTrigger",), "A stream on Spark 4.0 or 4.1")
        super().__init__(options, schema)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]
        return self.reportLatestOffset()


def stream_reader_of(options: SourceOptions, schema: StructType) -> ChangeStreamReader:
    """Return the reader of a stream for this line of Spark. Raises ``InvalidStateStoreArgument``."""
    return (ChangeStreamReader if HAS_LIMITS else UnlimitedChangeStreamReader)(options, schema)
