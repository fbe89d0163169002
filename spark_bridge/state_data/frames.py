"""State as data: DataFrames of any retained version of a query's state, and of its changes (Spark's state data source).

A Spark partition reads one state partition, on the executor, from the checkpoint location alone: the query need not
run, and is not disturbed if it runs. The version is fixed when the DataFrame is made, so that every action sees the
same version.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from backends.encoding.columns import to_spark_type
from backends.encoding.key_groups import key_groups, partition_range
from backends.encoding.keys import KEY_GROUP_BYTES, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import VersionNotFoundError
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import Piece, StatePlace, StateVersions, find_state
from spark_bridge.aggregates.aggregator import is_aggregate_state
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.queryable.client.arguments import WhereCondition, comparisons, first_key_after
from spark_bridge.queryable.protocol import Comparison
from spark_bridge.queryable.reads.answer_version import PartitionView
from spark_bridge.queryable.reads.scans import KeyBounds, RowSelection, normalized_condition, pairs_of, scalar_of
from spark_bridge.session.current import current_cluster, current_spark
from spark_bridge.session.settings import STATE_LOCATION_CONF, storage_settings
from spark_bridge.state_data.state_sources import (
    AnySource,
    StateSource,
    changes_source,
    packed_pieces,
    state_source,
    unpacked_piece,
    without_pieces,
)
from spark_bridge.state_format.layouts import MAP, ROWS, SESSIONS
from spark_bridge.state_format.partition_rows import partition_rows
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
    checkpoint_location: str,
    *,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Return a row per state variable of every operator, as of the last completed version.

    ``keySchema``, ``userKeySchema`` (of a map) and ``valueSchema`` are in Spark's JSON. Versions ``minVersion`` to
    ``maxVersion`` can be read: the states after batches ``minBatchId`` to ``maxBatchId`` (-1: no batch is committed).
    Raises ``VersionNotFoundError`` if the state has no version, ``MissingFileError``, ``DamagedFileError``.
    """
    return metadata_of(StateVersions.look(find_state(checkpoint_location, state_location, storage_options)))


def metadata_of(versions: StateVersions) -> pa.Table:
    """Return the table of ``state_metadata_table``."""
    there = versions.readable
    oldest, newest = (there[0], there[-1]) if there else (0, versions.resolve(None))
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
    if not is_aggregate_state(rows.stored_value):
        return "deduplicate"
    return "session_aggregate" if rows.kind == SESSIONS else "aggregate"


def _json(fields: Iterable[pa.Field]) -> str:
    """Return a struct of the fields in Spark's JSON."""
    return json.dumps(to_spark_type("the columns", pa.struct(list(fields))), separators=(",", ":"), ensure_ascii=False)


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
    read it, that action fails: then create a new DataFrame. ``state_location`` and ``storage_options`` are by default
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
    """Return the location of a query's state, by the settings of the session. Raises ``MissingFileError``."""
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
        """Yield the rows of the pieces whose numbers come in."""
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.source.batches(unpacked_piece(self.packed[number]))


def spark_schema(schema: pa.Schema) -> StructType:
    """Return an Arrow schema as Spark's schema."""
    from pyspark.sql.types import StructType

    fields = [{"name": f.name, "type": to_spark_type(f.name, f.type), "nullable": True, "metadata": {}} for f in schema]
    return StructType.fromJson({"type": "struct", "fields": fields})


# Some rows and columns of a state variable in storage: conditions on keys leave out partitions and ranges of keys.


MAX_SELECTED_KEYS = 10_000
"""Conditions that this many keys can meet, or more, leave out no partition."""


@dataclass(frozen=True)
class SelectedSource:
    """The rows of a source that meet all conditions, in the columns wanted; every batch has ``schema``.

    ``groups`` are the key groups that can have such rows (None: all). Make one with ``selected``.
    """

    source: StateSource
    selection: RowSelection
    bounds: KeyBounds
    groups: frozenset[int] | None

    @property
    def schema(self) -> pa.Schema:
        """Return the columns."""
        return self.selection.schema

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the partitions that can have such rows."""
        return tuple(piece for piece in self.source.reading.pieces if self.may_have(piece))

    def may_have(self, piece: Piece) -> bool:
        """Return whether a partition can have such rows."""
        return self.groups is None or not self.groups.isdisjoint(self._key_groups(piece))

    def _key_groups(self, piece: Piece) -> range:
        reading = self.source.reading
        return range(*partition_range(piece.partition, reading.num_partitions, reading.key_groups))

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition. Raises ``VersionNotFoundError`` if the version has been removed."""
        source = self.source
        with opened_partition(source.reading.place, piece, open_storage=source.open_storage) as state:
            view = PartitionView(piece.partition, state.reads, source.reading.version, None)
            pairs = pairs_of(view, source.rows, self._key_groups(piece), self.bounds)
            for batch in partition_rows(source.rows, pairs, piece.partition):
                found = self.selection.rows(batch)
                if found.num_rows:
                    yield found


def selected(
    source: StateSource, columns: Sequence[str] | None = None, where: Sequence[WhereCondition] | None = None
) -> SelectedSource:
    """Return the rows of a source that meet all conditions (as in ``client.scan``), in some columns (None: all).

    Raises ``RequestError`` naming a column that there is not, or a value that is not of a column's type.
    """
    output = source.rows.output
    types = {field.name: field.type for field in output}
    conditions = comparisons(where, types)
    wanted = output.names if columns is None else list(columns)
    selection = RowSelection.of(source.rows, wanted, conditions)
    conditions = [normalized_condition(c, types[c.column]) for c in conditions]
    groups = _groups(source, conditions)
    bounds = key_bounds(source.rows, conditions)
    if bounds is None:  # no key is in an empty range
        return SelectedSource(source, selection, KeyBounds(), frozenset())
    return SelectedSource(source, selection, bounds, groups)


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


def _groups(source: StateSource, conditions: Sequence[Comparison]) -> frozenset[int] | None:
    """Return the key groups of the keys that can meet the conditions; None if key columns are missing."""
    key = source.rows.key
    choices: list[list[object]] = []
    many = 1
    for field in key:
        given = [c for c in conditions if c.column == field.name and c.comparison in ("=", "in")]
        if not given or pa.types.is_floating(field.type):
            return None
        values = [scalar_of(field.name, value, field.type) for value in given[0].values]
        many *= len(values)
        if many > MAX_SELECTED_KEYS:
            return None
        choices.append(values)
    keys = list(itertools.product(*choices))
    columns = [pa.array([k[i] for k in keys], field.type) for i, field in enumerate(key)]
    batch = pa.RecordBatch.from_arrays(columns, schema=key)
    return frozenset(key_groups(batch, source.reading.key_groups).tolist())


# State as Arrow tables, for pandas, Polars and the like, without Spark and Ray: only the storage is read.
#
# The counterparts with Spark are ``read_state`` and ``read_state_changes`` in ``spark_frames``.


T = TypeVar("T")

VERSION_ATTEMPTS = 3
"""So often the last version is looked up, if it is removed before it can be read."""


def state_batches(
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
) -> pa.RecordBatchReader:
    """Return the rows of a state variable at a retained version, one partition after the other, in batches.

    ``state`` is the variable, by default the only one or the operator's own rows; timers are ``"timers"``. ``version``
    is by default the last completed one; version N+1 is the state after batch N. ``as_of`` selects the version that
    was the last completed one at a time: a datetime, or an ISO 8601 string; without a zone it is UTC.

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
    return _reader(
        lambda: state_source(place, operator, state, version, as_of=as_of, collect=not flatten, raw=state_columns),
        is_newest=version is None and as_of is None,
    )


def state_table(
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
) -> pa.Table:
    """Return all rows of ``state_batches`` as one table."""

    def read() -> pa.Table:
        return state_batches(
            checkpoint_location,
            operator,
            state,
            version,
            as_of=as_of,
            flatten=flatten,
            state_columns=state_columns,
            state_location=state_location,
            storage_options=storage_options,
        ).read_all()

    return _again(read, is_newest=version is None and as_of is None)


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
    return _reader(
        lambda: changes_source(place, operator, state, from_version, to_version, raw=state_columns), is_newest=False
    )


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
    return state_changes_batches(
        checkpoint_location,
        operator,
        state,
        from_version=from_version,
        to_version=to_version,
        state_columns=state_columns,
        state_location=state_location,
        storage_options=storage_options,
    ).read_all()


def _reader(source: Callable[[], AnySource], *, is_newest: bool) -> pa.RecordBatchReader:
    """Return the batches of all pieces.

    The first batch is read at once, so that errors are raised here, and a newest version that has been removed is
    looked up again.
    """

    def begin() -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        made = source()
        batches = (batch for piece in made.reading.pieces for batch in made.batches(piece))
        first = next(batches, None)
        return made.schema, batches if first is None else chain([first], batches)

    return pa.RecordBatchReader.from_batches(*_again(begin, is_newest=is_newest))


def _again(read: Callable[[], T], *, is_newest: bool) -> T:
    for _ in range(VERSION_ATTEMPTS - 1 if is_newest else 0):
        try:
            return read()
        except VersionNotFoundError as error:
            if error.__cause__ is None:  # the version was not removed during the read: it does not exist
                raise
    return read()
