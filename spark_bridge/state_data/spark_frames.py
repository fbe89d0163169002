"""State as data: DataFrames of any retained version of a query's state, and of its changes (Spark's state data source).

A Spark partition reads one state partition, on the executor, from the checkpoint location alone: the query need not
run, and is not disturbed if it runs. The version is fixed when the DataFrame is made, so that every action sees the
same version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from backends.encoding.spark_types import to_spark_type
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions, find_state
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.session.current import current_cluster, current_spark
from spark_bridge.session.spark_settings import STATE_LOCATION_CONF, storage_settings
from spark_bridge.state_data.metadata import metadata_of
from spark_bridge.state_data.packed_pieces import packed_pieces, unpacked_piece, without_pieces
from spark_bridge.state_data.state_sources import AnySource, changes_source, state_source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def read_state(
    spark: SparkSession,
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    as_of: str | datetime | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the rows of a state variable at a retained version, by default the last completed one.

    ``as_of="2026-01-01T00:00:00"`` reads the version that was the last completed one at that time.

    See ``state_batches`` for the arguments, the columns and the errors. If the version is removed before an action has
    read it, that action fails: make the DataFrame anew then. ``state_location`` and ``storage_options`` are by default
    the session's. The DataFrame has as many partitions as the state.
    """
    place = state_place(spark, checkpoint_location, state_location, storage_options)
    return _data_frame(
        spark, state_source(place, operator, state, version, as_of=as_of, collect=not flatten, raw=state_columns)
    )


def read_state_changes(
    spark: SparkSession,
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    *,
    from_version: int,
    to_version: int | None = None,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the changes of a state variable from one version to a later one, by default the last completed one.

    See ``state_changes_batches`` for the arguments and columns, and ``read_state``.
    """
    place = state_place(spark, checkpoint_location, state_location, storage_options)
    return _data_frame(spark, changes_source(place, operator, state, from_version, to_version, raw=state_columns))


def state_metadata(
    spark: SparkSession,
    checkpoint_location: str,
    *,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return operators, state variables, schemas, and the versions that can be read; see ``state_metadata_table``."""
    table = metadata_of(StateVersions.look(state_place(spark, checkpoint_location, state_location, storage_options)))
    rows = [tuple(row.values()) for row in table.to_pylist()]
    return spark.createDataFrame(rows, spark_schema(table.schema))


def state_place(
    spark: SparkSession,
    checkpoint_location: str,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> StatePlace:
    """Return where a query's state is, by the settings of the session. Raises ``MissingFileError``."""
    of_session = storage_settings(spark)
    if current_spark() is not None:
        of_session.update(current_cluster().conf.storage_options)
    base = state_location or spark.conf.get(STATE_LOCATION_CONF, "") or None
    return find_state(checkpoint_location, base, {**of_session, **(storage_options or {})})


def _data_frame(spark: SparkSession, source: AnySource) -> DataFrame:
    pieces = source.reading.pieces
    schema = spark_schema(source.schema)
    if not pieces:
        return spark.createDataFrame([], schema)
    # Every partition has one row: the number of its piece.
    numbers = spark.range(0, len(pieces), 1, len(pieces))
    return map_in_arrow(numbers, _Task.of(source).run, f"state_of_{source.reading.operator}", schema)


@dataclass(frozen=True)
class _Task:
    """Reads pieces in a PySpark worker. The pieces are packed, for a chain of many versions names many files."""

    source: AnySource
    packed: tuple[bytes, ...]

    @classmethod
    def of(cls, source: AnySource) -> _Task:
        return cls(without_pieces(source), packed_pieces(source.reading.pieces))

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Give the rows of the pieces whose numbers come in."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.source.batches(unpacked_piece(self.packed[number]))


def spark_schema(schema: pa.Schema) -> StructType:
    """Return an Arrow schema as Spark's schema."""
    from pyspark.sql.types import StructType

    fields = [{"name": f.name, "type": to_spark_type(f.name, f.type), "nullable": True, "metadata": {}} for f in schema]
    return StructType.fromJson({"type": "struct", "fields": fields})
