"""State as data: DataFrames of any retained version of a query's state, and of its changes (Spark's state data source).

A Spark partition reads one state partition, on the executor, from the checkpoint location alone: the query need not
run, and is not disturbed if it runs. The version is fixed when the DataFrame is made, so that every action sees the
same version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from backends.encoding.columns import spark_struct_json
from backends.encoding.operator_schema import ROLLING_KIND, OperatorSchema
from backends.exceptions import VersionNotFoundError
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions, find_state
from spark_bridge.aggregates.aggregator import is_aggregate_state
from spark_bridge.session.current import current_cluster, current_spark
from spark_bridge.session.settings import STATE_LOCATION_CONF, storage_settings
from spark_bridge.state_data.state_sources import StateSource, changes_source, state_source
from spark_bridge.state_format.layouts import MAP, ROWS, SESSIONS
from spark_bridge.state_format.stored_rows import VariableRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# Tables of the operators and state variables in storage, their schemas, and the versions that can be read.


METADATA_SCHEMA = pa.schema(
    [
        pa.field("operatorName", pa.string()),
        pa.field("operatorKind", pa.string()),
        pa.field("stateVarName", pa.string()),
        pa.field("stateVariableType", pa.string()),
        pa.field("ttlMs", pa.int64()),
        pa.field("keySchema", pa.string()),
        pa.field("userKeySchema", pa.string()),
        pa.field("valueSchema", pa.string()),
        pa.field("numPartitions", pa.int32()),
        pa.field("numKeyGroups", pa.int32()),
        pa.field("provider", pa.string()),
        pa.field("minVersion", pa.int64()),
        pa.field("maxVersion", pa.int64()),
        pa.field("minBatchId", pa.int64()),
        pa.field("maxBatchId", pa.int64()),
    ]
)
"""The columns of ``state_metadata``, with the names of Spark's state metadata source if it has them."""


def state_metadata_table(
    checkpoint_location: str, *, state_location: str | None = None, storage_options: Mapping[str, str] | None = None
) -> pa.Table:
    """Return a row per state variable of every operator, as of the last completed version.

    ``keySchema``, ``userKeySchema`` (of a map) and ``valueSchema`` are in Spark's JSON. Versions ``minVersion`` to
    ``maxVersion`` can be read: the states after batches ``minBatchId`` to ``maxBatchId`` (-1: no batch is committed).
    Raises ``VersionNotFoundError`` if the state has no version, ``MissingFileError``, ``DamagedFileError``.
    """
    return metadata_of(StateVersions.look(find_state(checkpoint_location, state_location, storage_options)))


def metadata_of(versions: StateVersions) -> pa.Table:
    """Return the table of ``state_metadata_table``."""
    readable = versions.readable
    oldest, newest = (readable[0], readable[-1]) if readable else (0, versions.resolve(None))
    rows = []
    for operator, entry in sorted(versions.operators(newest).items()):
        schema = versions.schema(entry)
        for variable in schema.variables:
            if variable.deleted:
                continue
            of = VariableRows(schema, variable)
            rows.append(
                {
                    "operatorName": operator,
                    "operatorKind": operator_kind(schema),
                    "stateVarName": variable.name,
                    "stateVariableType": variable.kind,
                    "ttlMs": variable.ttl_ms,
                    "keySchema": _json([of.key.field(i) for i in of.key_order]),
                    "userKeySchema": _json(of.inner) if variable.kind == MAP else None,
                    "valueSchema": _json(of.value) if len(of.value) else None,
                    "numPartitions": entry.num_partitions,
                    "numKeyGroups": versions.key_groups,
                    "provider": entry.backend,
                    "minVersion": oldest,
                    "maxVersion": newest,
                    "minBatchId": max(0, oldest - 1),
                    "maxBatchId": newest - 1,
                }
            )
    return pa.Table.from_pylist(rows, schema=METADATA_SCHEMA)


def operator_kind(schema: OperatorSchema) -> str:
    """Return the kind of operator that makes such state, as in ``OperatorSpec``, as far as the schema shows it."""
    if any(v.kind != ROWS for v in schema.variables):
        return "transform_with_state"
    (variable,) = schema.variables
    rows = VariableRows(schema, variable)
    if rows.rolling is not None:
        return ROLLING_KIND
    if not is_aggregate_state(rows.stored_value):
        return "deduplicate"
    return "session_aggregate" if rows.kind == SESSIONS else "aggregate"


def _json(fields: Iterable[pa.Field]) -> str:
    """Return a struct of the fields in Spark's JSON."""
    return json.dumps(spark_struct_json(list(fields)), separators=(",", ":"), ensure_ascii=False)


def read_state(
    spark: SparkSession,
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    as_of: str | datetime | None = None,
    at: str | datetime | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the rows of a state variable at a retained version, by default the last completed one.

    ``as_of="2026-01-01T00:00:00"`` reads the version that was the last completed one at that time.

    See ``state_batches`` for the arguments, the columns and the errors. If the version is removed before an action has
    read it, that action fails: then create a new DataFrame. ``state_location`` and ``storage_options`` are by default
    the session's. The DataFrame has as many partitions as the state.
    """
    place = state_place(spark, checkpoint_location, state_location, storage_options)
    return _data_frame(
        spark, state_source(place, operator, state, version, as_of=as_of, at=at, collect=not flatten, raw=state_columns)
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
    """Return the location of a query's state, by the settings of the session. Raises ``MissingFileError``."""
    of_session = storage_settings(spark)
    if current_spark() is not None:
        of_session.update(current_cluster().conf.storage_options)
    base = state_location or spark.conf.get(STATE_LOCATION_CONF, "") or None
    return find_state(checkpoint_location, base, {**of_session, **(storage_options or {})})


def _data_frame(spark: SparkSession, source: StateSource) -> DataFrame:
    bare, packed = source.split()
    schema = spark_schema(source.schema)
    if not packed:
        return spark.createDataFrame([], schema)
    # Every partition has one row: the number of its piece.
    numbers = spark.range(0, len(packed), 1, len(packed))
    from spark_bridge.operators.map_in_arrow import map_in_arrow  # not above: tables of state need no Spark

    return map_in_arrow(numbers, _Task(bare, packed).run, f"state_of_{source.reading.operator}", schema)


@dataclass(frozen=True)
class _Task:
    """Reads packed pieces in a PySpark worker."""

    source: StateSource
    packed: tuple[bytes, ...]

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.source.packed_batches(self.packed[number])


def spark_schema(schema: pa.Schema) -> StructType:
    """Return an Arrow schema as Spark's schema."""
    from pyspark.sql.types import StructType

    return StructType.fromJson(spark_struct_json([field.with_nullable(True) for field in schema]))


# State as Arrow tables, for pandas, Polars and the like, without Spark and Ray: only the storage is read.
#
# The counterparts with Spark are ``read_state`` and ``read_state_changes``.


T = TypeVar("T")

VERSION_ATTEMPTS = 3
"""At most this many attempts to read the last version, if retention removes it first."""


def state_batches(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    as_of: str | datetime | None = None,
    at: str | datetime | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.RecordBatchReader:
    """Return the rows of a state variable at a retained version, one partition after the other, in batches.

    ``state`` is the variable, by default the only one or the operator's own rows; timers are ``"timers"``. ``version``
    is by default the last completed one; version N+1 is the state after batch N. ``as_of`` selects the version that
    was the last completed one at a time: a datetime, or an ISO 8601 string; without a zone it is UTC. Rolling
    aggregates are as of ``at``, by default that time, or now.

    The key's columns come first, then the columns of the variable. A value has its fields. A list has the
    fields of an element, one row per element in their order. A map has the columns of the user's key and of the value,
    one row per entry. Timers have ``expiration_timestamp_ms``. An aggregate has its results, or with ``state_columns``
    the state that it keeps. Then come ``ttl_expiration_ms`` if the variable has a TTL (rows that have expired and are
    not removed yet are shown), ``key_group`` and ``partition_id``. A column whose name is taken already gets
    ``__value`` appended. Without ``flatten`` a list or map is one row per key, in the column ``list_value`` or
    ``map_value``.

    ``state_location`` is the value of ``spark.statestore.location`` when the query ran, if it was set;
    ``storage_options`` are the settings of the storage. The query may run at the same time, and is not disturbed.
    Raises ``VersionNotFoundError`` naming the existing versions, also if the version is removed during the read;
    ``MissingFileError``; ``DamagedFileError``; ``InvalidStateStoreArgument`` naming operators and variables.
    """
    place = find_state(checkpoint_location, state_location, storage_options)
    source = partial(
        state_source, place, operator, state, version, as_of=as_of, at=at, collect=not flatten, raw=state_columns
    )
    return _reader(source, is_newest=version is None and as_of is None)


def state_table(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    as_of: str | datetime | None = None,
    at: str | datetime | None = None,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return all rows of ``state_batches`` as one table."""
    place = find_state(checkpoint_location, state_location, storage_options)
    source = partial(
        state_source, place, operator, state, version, as_of=as_of, at=at, collect=not flatten, raw=state_columns
    )
    is_newest = version is None and as_of is None
    return _again(lambda: _reader(source, is_newest=is_newest).read_all(), is_newest=is_newest)


def state_changes_batches(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    *,
    from_version: int,
    to_version: int | None = None,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.RecordBatchReader:
    """Return the changes of a state variable from one version to a later one, in batches.

    ``to_version`` is by default the last completed one. These are the changes of batches ``from_version`` to
    ``to_version - 1``. There is a row per change. Its columns are ``version`` (the version that the change led to),
    ``change_type`` ("insert", "update" or "delete"), and the columns of the key and of a map's user key. Then come the
    structs ``before`` and ``after`` of the value columns (null if the value does not exist), ``key_group``, and
    ``partition_id`` (in the layout of that version). Elements of lists are only inserted and deleted. Rows ascend by
    version within a partition. Everything else is as in ``state_batches``.
    """
    place = find_state(checkpoint_location, state_location, storage_options)
    source = partial(changes_source, place, operator, state, from_version, to_version, raw=state_columns)
    return _reader(source, is_newest=False)


def state_changes_table(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    *,
    from_version: int,
    to_version: int | None = None,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return all rows of ``state_changes_batches`` as one table."""
    place = find_state(checkpoint_location, state_location, storage_options)
    source = partial(changes_source, place, operator, state, from_version, to_version, raw=state_columns)
    return _reader(source, is_newest=False).read_all()


def _reader(source: Callable[[], StateSource], *, is_newest: bool) -> pa.RecordBatchReader:
    """Return the batches of all pieces.

    The first batch is read at once, so that errors are raised here, and a newest version that has been removed is
    looked up again.
    """

    def begin() -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        opened = source()
        batches = (batch for piece in opened.pieces for batch in opened.batches(piece))
        first = next(batches, None)
        return opened.schema, batches if first is None else chain([first], batches)

    return pa.RecordBatchReader.from_batches(*_again(begin, is_newest=is_newest))


def _again(read: Callable[[], T], *, is_newest: bool) -> T:
    for _ in range(VERSION_ATTEMPTS - 1 if is_newest else 0):
        try:
            return read()
        except VersionNotFoundError as error:
            if error.__cause__ is None:  # the version was not removed during the read: it does not exist
                raise
    return read()
