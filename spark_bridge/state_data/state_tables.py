"""State as Arrow tables, for pandas, Polars and the like: needs neither Spark nor Ray, only the storage.

The counterparts with Spark are ``read_state``, ``read_state_changes`` and ``state_metadata`` in ``state_data``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import pyarrow as pa

from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.spark_types import to_spark_type
from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.ids import DEFAULT_FAMILY
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.partition_reader import opened_partition
from coordinator_actor.reading.stored_versions import Piece, Reading, StatePlace, StateVersions, find_state
from spark_bridge.aggregates.aggregator import is_aggregate_state
from spark_bridge.state_format.layouts import MAP, ROWS, SESSIONS, TIMERS
from spark_bridge.state_format.partition_rows import scan_partition
from spark_bridge.state_format.stored_changes import VariableChanges
from spark_bridge.state_format.stored_rows import VariableRows

T = TypeVar("T")

ATTEMPTS = 3
"""How often the last version is looked up anew if it is gone before it could be read."""


@dataclass(frozen=True)
class StateSource:
    """The rows of one state variable at a version, piece by piece; ``schema`` is that of every batch."""

    reading: Reading
    rows: VariableRows
    open_storage: OpenStorage = CheckpointStorage.open

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self.rows.output

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The rows of one partition. Raises ``VersionNotFoundError`` if the version has been removed meanwhile."""
        with opened_partition(self.reading.place, piece, open_storage=self.open_storage) as state:
            yield from scan_partition(self.rows, state, piece.partition)


@dataclass(frozen=True)
class ChangesSource:
    """What changed in one state variable between two versions, piece by piece."""

    reading: Reading
    changes: VariableChanges
    open_storage: OpenStorage = CheckpointStorage.open

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self.changes.output

    def batches(self, piece: Piece) -> Iterator[pa.RecordBatch]:
        """The changes of one partition. Raises ``VersionNotFoundError`` if the versions have been removed meanwhile."""
        return self.changes.changes(self.reading.place, piece, self.open_storage)


Source = StateSource | ChangesSource


def state_source(
    place: StatePlace,
    operator: str,
    state: str | None,
    version: int | None,
    *,
    collect: bool = False,
    raw: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> StateSource:
    """What ``state_batches`` reads; see there."""
    reading = StateVersions.look(place, open_storage=open_storage).reading(operator, version)
    variable = _variable(reading, state)
    return StateSource(reading, VariableRows(reading.schema, variable, collect, raw), open_storage)


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
    """What ``state_changes_batches`` reads; see there."""
    versions = StateVersions.look(place, open_storage=open_storage)
    reading = versions.reading_of_changes(operator, from_version, to_version)
    rows = VariableRows(reading.schema, _variable(reading, state), raw=raw)
    return ChangesSource(reading, VariableChanges(rows), open_storage)


def _variable(reading: Reading, name: str | None) -> StateVariable:
    """The variable of that name; None is the only one, timers apart, or the one of the operator's own rows."""
    if name is not None:
        return reading.schema.variable(name)
    there = [v for v in reading.schema.variables if not v.deleted]
    own = [v for v in there if v.name == DEFAULT_FAMILY] or [v for v in there if v.kind != TIMERS] or there
    if len(own) == 1:
        return own[0]
    raise InvalidStateStoreArgument(
        f"Operator {reading.operator!r} has the state variables {', '.join(repr(v.name) for v in there) or 'none'}: name the "
        "one to read with state=."
    )


def state_batches(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.RecordBatchReader:
    """The rows of a state variable at a retained version, a partition after the other, in batches.

    ``state`` is the variable, by default the only one or the operator's own rows; timers are ``"timers"``. ``version`` is
    by default the last completed one; version N+1 is the state behind batch N. The columns are those of the key, then: of a
    value its fields; of a list those of an element, a row per element in their order; of a map those of the user's key and the
    value, a row per entry; of timers ``expiration_timestamp_ms``; of an aggregate its results, or with ``state_columns``
    what it keeps. ``ttl_expiration_ms`` if the variable has a TTL (what has expired but was not removed yet is
    shown), ``key_group`` and ``partition_id`` follow. A name that is there before gets ``__value`` appended. Without ``flatten``
    a list or map is one row per key, in the column ``list_value`` or ``map_value``.

    ``state_location`` is what ``spark.statestore.location`` was when the query ran, if it was set, ``storage_options`` how the
    storage is reached. The query may run meanwhile, and is not touched. Raises ``VersionNotFoundError`` naming the versions that
    there are, also if the version is removed while it is read; ``MissingFileError``, ``DamagedFileError``,
    ``InvalidStateStoreArgument`` naming operators and variables.
    """
    place = find_state(checkpoint_location, state_location, storage_options)
    return _reader(
        lambda: state_source(place, operator, state, version, collect=not flatten, raw=state_columns),
        is_newest=version is None,
    )


def state_table(
    checkpoint_location: str,
    operator: str,
    state: str | None = None,
    version: int | None = None,
    *,
    flatten: bool = True,
    state_columns: bool = False,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """All that ``state_batches`` gives, as one table."""

    def read() -> pa.Table:
        return state_batches(
            checkpoint_location,
            operator,
            state,
            version,
            flatten=flatten,
            state_columns=state_columns,
            state_location=state_location,
            storage_options=storage_options,
        ).read_all()

    return _again(read, is_newest=version is None)


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
    """What changed in a state variable from one version to a later one, by default the last completed one, in batches.

    Those are the changes of batches ``from_version`` to ``to_version - 1``. A row per change: ``version`` (that it led to),
    ``change_type`` ("insert", "update" or "delete"), the columns of the key and of a map's user key, the structs ``before`` and
    ``after`` of the value columns (null where there is none), ``key_group``, ``partition_id`` (of the layout of that version). Elements
    of lists are only inserted and deleted. Rows ascend by version within a partition. Everything else as in ``state_batches``.
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
    """All that ``state_changes_batches`` gives, as one table."""
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


def _reader(source: Callable[[], Source], *, is_newest: bool) -> pa.RecordBatchReader:
    """The batches of all pieces. The first one is read at once: what is wrong is raised here, and the newest version found anew."""

    def begin() -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        made = source()
        batches = (batch for piece in made.reading.pieces for batch in made.batches(piece))
        first = next(batches, None)
        return made.schema, batches if first is None else chain([first], batches)

    return pa.RecordBatchReader.from_batches(*_again(begin, is_newest=is_newest))


def _again(read: Callable[[], T], *, is_newest: bool) -> T:
    for _ in range(ATTEMPTS - 1 if is_newest else 0):
        try:
            return read()
        except VersionNotFoundError as error:
            if error.__cause__ is None:  # not removed meanwhile: there is none
                raise
    return read()


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
"""The columns of ``state_metadata``, named as those of Spark's state metadata source where that has them."""


def state_metadata_table(
    checkpoint_location: str,
    *,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """A row per state variable of every operator, as of the last completed version.

    ``keySchema``, ``userKeySchema`` (of a map) and ``valueSchema`` are in Spark's JSON. Versions ``minVersion`` to ``maxVersion``
    can be read, the states behind batches ``minBatchId`` to ``maxBatchId`` (-1: no batch is committed). Raises ``VersionNotFoundError``
    if there is no version, ``MissingFileError``, ``DamagedFileError``.
    """
    return metadata_of(StateVersions.look(find_state(checkpoint_location, state_location, storage_options)))


def metadata_of(versions: StateVersions) -> pa.Table:
    """The table of ``state_metadata_table``."""
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
    """What makes such state: the kind of the operator's ``OperatorSpec``, as far as its schema tells."""
    if any(v.kind != ROWS for v in schema.variables):
        return "transform_with_state"
    (variable,) = schema.variables
    rows = VariableRows(schema, variable)
    if not is_aggregate_state(rows.stored_value):
        return "deduplicate"
    return "session_aggregate" if rows.kind == SESSIONS else "aggregate"


def _json(fields: Iterable[pa.Field]) -> str:
    """A struct in Spark's JSON."""
    return json.dumps(to_spark_type("the columns", pa.struct(list(fields))), separators=(",", ":"), ensure_ascii=False)
