"""``lookup``: a DataFrame, enriched with another query's state at one recorded version per batch.

The lookup join of Flink SQL and the lookup of Quix Streams read whatever the table holds at the moment, so a batch that
runs again gives other rows. Here each batch of a stream records the version that it reads, before it reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends import spans
from backends.exceptions import VersionNotFoundError
from backends.tracing import try_set_up
from coordinator_actor.durable.records import LookupRecord
from coordinator_actor.messages import OperatorLocation
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions, VersionTimes
from spark_bridge.aggregates.row_groups import normalized
from spark_bridge.exceptions import InvalidOperatorError, StateStoreRefusedError
from spark_bridge.functions import checked_names
from spark_bridge.operators.columns import arrow_schema, arrow_type, column_literal, is_collated, other_case, plain_type
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.state_views import StateView
from spark_bridge.state_data import looked_up_state
from spark_bridge.state_data.checkpoint_client import StoredReads
from spark_bridge.state_format.layouts import ROLLING, ROWS, VALUE
from spark_bridge.task.executor import RUN_ID, TRACING, local_endpoints
from spark_bridge.task.state_task import OUTPUT_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

# The work of a lookup in a PySpark worker: Arrow batches in, the same rows with the columns of the state out.


QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Spark's local properties of the jobs of a streaming query."""


@dataclass(frozen=True)
class LookupTask:
    """Looks the rows of a partition up. All tasks of a batch read one version.

    ``keys`` are the columns of the rows by key column, ``columns`` the wanted columns of the state; ``schema`` is that
    of the output. ``by_index``: the only one of ``keys`` is a column with an index, not the key. With ``fixed`` it is
    that version, also of a stream. With ``place`` storage is read, else the hosts. ``time`` is the column of rows that
    has the time of their rolling aggregates; None is that of the version's record.
    """

    operator: str
    query: str
    state: str | None
    keys: dict[str, str]
    columns: tuple[str, ...]
    schema: pa.Schema
    is_inner: bool
    is_stream: bool
    fixed: LookupRecord | None
    place: StatePlace | None
    time: str | None = None
    by_index: bool = False

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows with the columns of the state after them."""
        filled = (batch for batch in batches if batch.num_rows)
        if (first := next(filled, None)) is None:
            return  # a task without rows does no I/O
        rows = 0
        with self._span() as span:
            with spans.step("lookup.version"):
                state = self._found()
            for batch in chain((first,), filled):
                rows += batch.num_rows
                yield from self.enriched(batch, state)
            span.note(num_rows=rows)

    def _span(self) -> spans.Span:
        """Begin the span of a task: in the trace of its batch if its query has state, otherwise in a new trace."""
        context = _task_context()
        try_set_up(context.getLocalProperty(TRACING), {"role": "task"})
        attributes = {
            "operator": self.operator,
            "looked_up": self.query,
            "partition": context.partitionId(),
            "attempt": str(context.taskAttemptId()),
            "stage": context.stageId(),
        }
        run_id, batch_id = context.getLocalProperty(RUN_ID), context.getLocalProperty(BATCH_ID)
        if run_id is None or not self.is_stream or batch_id is None:
            return spans.alone("lookup", **attributes)
        return spans.span("lookup", spans.batch(run_id, int(batch_id) + 1), **attributes)

    def enriched(self, batch: pa.RecordBatch, looked_up: looked_up_state.LookedUpState) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one batch. A key with a null has no match, as in SQL."""
        if self.by_index:
            yield from self._multiplied(batch, looked_up)
            return
        columns = {key: batch.column(batch.schema.get_field_index(name)) for key, name in self.keys.items()}
        is_known = np.ones(batch.num_rows, np.bool_)
        for key, column in columns.items():
            possible = _only_possible(column, looked_up.view.types[key])
            if possible.null_count:
                is_known &= np.asarray(possible.is_valid())
        keys = pa.RecordBatch.from_pydict(columns)
        if not is_known.all():
            keys = keys.filter(pa.array(is_known))
        codec = looked_up.view.codec
        # Each key once: rows of one key come together often, and all share the answer.
        once = codec.encode(codec.columns(keys)).dictionary_encode()
        indices = np.full(batch.num_rows, -1, np.int64)
        indices[is_known] = np.asarray(once.indices)
        positions = pa.array(indices, mask=indices < 0)
        moments = None
        if self.time is not None:
            moments = batch.column(batch.schema.get_field_index(self.time)).cast(pa.int64())
        with spans.step("lookup.read", num_keys=len(once.dictionary)):
            values, has_state = looked_up.columns(once.dictionary, positions, moments)
        state = dict(zip([f.name for f in looked_up.view.stored_values.fields], values, strict=True))
        out = [*batch.columns, *(state[name] for name in self.columns)]
        typed = [_as(column, field.type) for column, field in zip(out, self.schema, strict=True)]
        rows = pa.RecordBatch.from_arrays(typed, schema=self.schema)
        if self.is_inner:
            rows = rows.filter(has_state)
        if rows.num_rows:
            yield rows

    def _multiplied(self, batch: pa.RecordBatch, looked_up: looked_up_state.LookedUpState) -> Iterator[pa.RecordBatch]:
        """Yield a row for each match that a row has by an index."""
        ((indexed, name),) = self.keys.items()
        ours = _only_possible(batch.column(batch.schema.get_field_index(name)), looked_up.view.types[indexed])
        ours = normalized(ours)  # Arrow finds no -0.0 for 0.0, as hosts and Spark do
        asked = ours.drop_null().unique()
        with spans.step("lookup.read", num_keys=len(asked)):
            matches = looked_up.matching(indexed, asked, list(dict.fromkeys([indexed, *self.columns])))
        matches = matches.combine_chunks()
        theirs = normalized(matches.column(indexed).combine_chunks().cast(asked.type))
        value_of_match = np.asarray(pc.index_in(theirs, value_set=asked))
        by_value = np.argsort(value_of_match, kind="stable")
        counts = np.append(np.bincount(value_of_match, minlength=len(asked)), 0)  # the last one is that of null
        begins = np.cumsum(counts) - counts
        value_of_row = np.asarray(pc.index_in(ours, value_set=asked).fill_null(len(asked)))
        emitted = counts[value_of_row] if self.is_inner else np.maximum(counts[value_of_row], 1)
        ends = np.cumsum(emitted)
        first = 0
        while first < batch.num_rows:
            before = ends[first] - emitted[first]
            last = max(first + 1, int(np.searchsorted(ends, before + OUTPUT_ROWS, side="right")))
            row = np.repeat(np.arange(first, last), emitted[first:last])
            at = before + np.arange(len(row)) - (ends - emitted)[row] + begins[value_of_row[row]]
            is_match = counts[value_of_row[row]] > 0
            found = pa.array(by_value[np.where(is_match, at, 0)] if len(by_value) else at, mask=~is_match)
            out = [*batch.take(pa.array(row)).columns, *(matches.column(c).take(found) for c in self.columns)]
            typed = [_as(one, field.type) for one, field in zip(out, self.schema, strict=True)]
            if len(row):
                yield from pa.Table.from_arrays(typed, schema=self.schema).combine_chunks().to_batches()
            first = last

    def _found(self) -> looked_up_state.LookedUpState:
        context, batch = _task_context(), None
        if self.is_stream and self.fixed is None:
            by, number = (context.getLocalProperty(p) for p in (QUERY_ID, BATCH_ID))
            batch = looked_up_state.Batch(str(by), int(str(number)))
        if self.place is not None:
            return looked_up_state.in_storage(self.place, self.operator, self.state, batch, self.fixed)
        if (endpoints := local_endpoints(context.getLocalProperty)) is None:
            raise StateStoreRefusedError(
                f"A lookup in {self.operator!r} runs in a query of a Spark session without a state store: use the "
                "session that init_spark returned or that attach(spark) was called with, or give checkpoint=."
            )
        return looked_up_state.state_in_cluster(endpoints, self.operator, self.query, self.state, batch, self.fixed)


def _task_context() -> Any:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "a task runs in a worker of Spark"
    return context


def _only_possible(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column with null for each integer that a column of type ``kind`` cannot have: such a row has no match.

    An error would be one of every attempt of the batch, and end the stream because of one row.
    """
    if column.type == kind or not (pa.types.is_integer(column.type) and pa.types.is_integer(kind)):
        return column
    theirs, own = np.iinfo(kind.to_pandas_dtype()), np.iinfo(column.type.to_pandas_dtype())
    bounds = [pa.scalar(int(bound), column.type) for bound in (max(theirs.min, own.min), min(theirs.max, own.max))]
    is_possible = pc.and_(pc.greater_equal(column, bounds[0]), pc.less_equal(column, bounds[1]))
    return pc.if_else(is_possible, column, pa.scalar(None, column.type))


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    return column if column.type == kind else pc.cast(column, kind)


LOOKUP_TYPES = ("left", "inner")


def lookup(
    df: DataFrame,
    operator: str,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    columns: Sequence[str] | None = None,
    how: Literal["left", "inner"] = "left",
    query: str | None = None,
    state: str | None = None,
    checkpoint: str | None = None,
    version: Literal["completed"] | int = "completed",
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a DataFrame, streaming or not, with columns of another query's state after its own.

        lookup(clicks, "user_totals", on="user", columns=["spent"])

    Each batch of a stream reads **one version**: the one that is completed when its first task asks. The version is
    recorded next to the state before anything is read, and kept until two batches later. So a batch that is retried
    after any failure reads the same version; if that is impossible, it fails with an error. A batch DataFrame reads the
    version that is completed when ``lookup`` is called.

    - ``on``: the columns of ``df`` that are the key, by the names of the key's columns; or a dict of ``df``'s columns
      to them. A row with a null in the key has no match, as in SQL. Or one column with an index (``index=`` of
      ``aggregate``): then there is a row for each match, as after a join.
    - ``columns``: those of ``get``; by default all of them, and by an index those of the key too. The names must differ
      from those of columns of ``df``.
    - ``how``: "left" has nulls if there is no match, "inner" leaves such rows out.
    - ``query``: the name or id of the query, if several have the operator. It runs in this cluster, or has ended
      there and is still served. ``state`` names the state variable of a processor; it must be a value state.
    - ``checkpoint``: read the checkpoint at this location instead, whether its query runs or not. Every task loads the
      partitions that it needs; if that is too slow, ``serve_state`` the checkpoint and ask its hosts.
    - ``version``: "completed", or the number of a version, for all batches.
    - ``state_location`` and ``storage_options``: see ``read_state``.

    State with a TTL, and rolling aggregates, are as of the moment when the version was recorded. Raises
    ``InvalidOperatorError`` for every mistake that the arguments show, ``UnknownOperatorError`` if no query has the
    operator, ``VersionNotFoundError`` if a version is not kept.
    """
    # Workers of Spark import this file, too: only the driver needs the session and its Ray.
    from spark_bridge.session.current import current_cluster
    from spark_bridge.state_data.frames import state_place

    number = _number(version)
    place: StatePlace | None = None
    fixed: LookupRecord | None = None
    is_fixed = number is not None or not df.isStreaming
    if checkpoint is None:
        location: OperatorLocation = current_cluster().coordinator.locate(operator, query, number)
        if is_fixed:
            asked = location.completed_version if number is None else number
            fixed = LookupRecord(asked, location.made_by, int(time.time() * 1000))
    else:
        place = state_place(df.sparkSession, checkpoint, state_location, storage_options)
        location = StoredReads(place).locate(operator, query)
        if is_fixed:
            fixed = looked_up_state.recorded_in_storage(place, None, number)
    task, schema = planned_lookup(df, location, state, on, columns, how, fixed, place)
    return map_in_arrow(df, task.run, f"lookup_in_{operator}", schema)


def planned_lookup(
    df: DataFrame,
    location: OperatorLocation,
    state: str | None,
    on: str | Sequence[str] | Mapping[str, str],
    columns: Sequence[str] | None,
    how: str,
    fixed: LookupRecord | None,
    place: StatePlace | None,
) -> tuple[LookupTask, StructType]:
    """Return the task of a lookup, and the schema of its output. Raises ``InvalidOperatorError``."""
    if how not in LOOKUP_TYPES:
        raise InvalidOperatorError(f"how={how!r}: give one of {', '.join(map(repr, LOOKUP_TYPES))}.")
    operator = location.operator.name
    view = KnownOperator.of(location).view(state)
    names = set(_names(on))
    by_index = names != set(view.codec.by) and len(names) == 1 and names <= view.variable.indexes.keys()
    if view.kind not in (ROWS, VALUE, ROLLING) and not by_index:
        raise InvalidOperatorError(
            f"Operator {operator!r} keeps {view.kind}, which have several rows for a key; lookup takes aggregates "
            "without windows and value states. Read the others by a query client or by read_state, and join them."
        )
    keys = _keys(df, view, on, by_index)
    fields = [f for f in view.scan_fields if f.name not in keys] if by_index else view.stored_values.fields
    wanted = _columns(df, view, columns, [f.name for f in fields])
    kinds = {f.name: f.type for f in fields}
    added = pa.schema([pa.field(name, kinds[name]) for name in wanted])
    own = arrow_schema(df.schema.fields)
    task = LookupTask(
        operator,
        location.query_id,
        state,
        keys,
        tuple(wanted),
        pa.schema([*own, *added]),
        how == "inner",
        df.isStreaming,
        fixed,
        place,
        by_index=by_index,
    )
    from spark_bridge.state_data.frames import spark_schema

    return task, type(df.schema)([*df.schema.fields, *spark_schema(added).fields])


def _number(version: Any) -> int | None:
    if version == "completed":
        return None
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise InvalidOperatorError(f'version={version!r}: give "completed", or the number of a version.')
    return version


def _names(on: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return the column of the DataFrame for each column of the state."""
    if isinstance(on, Mapping):
        checked_names("on=", [*on, *on.values()])
        return {key: name for name, key in on.items()}
    return {name: name for name in checked_names("on=", on)}


def _keys(
    df: DataFrame, view: StateView, on: str | Sequence[str] | Mapping[str, str], by_index: bool
) -> dict[str, str]:
    """Return the column of ``df`` for each key column, or for the indexed column."""
    column_of_key = _names(on)
    by = tuple(column_of_key) if by_index else view.codec.by
    if set(column_of_key) != set(by):
        example = "{" + ", ".join(f"'...': {key!r}" for key in by) + "}"
        indexed = "".join(f" Or name the column {column!r}, which has an index." for column in view.variable.indexes)
        raise InvalidOperatorError(
            f"on={on!r}: the key of {view.operator!r} is {view.codec.in_words}. Name these columns, or give a dict of "
            f"the DataFrame's columns to them: on={example}.{indexed}{other_case(list(column_of_key), by)}"
        )
    if missing := [name for name in column_of_key.values() if name not in df.columns]:
        raise InvalidOperatorError(
            f"on={on!r}: the DataFrame has no {', '.join(missing)}; it has {df.columns}."
            f"{other_case(missing, df.columns)}"
        )
    what = "indexed" if by_index else "key"
    for key, name in column_of_key.items():
        if is_collated(df.schema[name].dataType):
            raise InvalidOperatorError(
                f"Column {name!r} has type {df.schema[name].dataType.simpleString()}, and {what} columns are compared "
                f"by their bytes: cast it to {plain_type(df.schema[name].dataType)}."
            )
        ours, theirs = arrow_type(df.schema[name].dataType), view.types[key]
        if ours != theirs and not (pa.types.is_integer(ours) and pa.types.is_integer(theirs)):
            raise InvalidOperatorError(
                f"Column {name!r} is {ours}, and the {what} column {key!r} of {view.operator!r} is {theirs}: cast it."
            )
    return {key: column_of_key[key] for key in by}


def _columns(df: DataFrame, view: StateView, columns: Sequence[str] | None, names: list[str]) -> list[str]:
    wanted = names if columns is None else list(dict.fromkeys(columns))
    if unknown := [name for name in wanted if name not in names]:
        raise InvalidOperatorError(
            f"columns={columns}: {view.operator!r} has {names}, and no {', '.join(unknown)}."
            f"{other_case(unknown, names)}"
        )
    if twice := [name for name in wanted if name in df.columns]:
        raise InvalidOperatorError(
            f"The DataFrame and {view.operator!r} both have {', '.join(twice)}: rename the DataFrame's column "
            "(withColumnRenamed), or leave the state's out of columns=."
        )
    if len(set(df.columns)) != len(df.columns):
        raise InvalidOperatorError(f"The DataFrame has two columns of one name: {', '.join(df.columns)}.")
    return wanted


# ``state_as_of``: for each row of a DataFrame, the state as it was at the row's own time.
#
# The point-in-time join of feature stores (Feast, Tecton), from the versions that the state store keeps anyway: a
# model is trained with the values that a client received at the time.


VERSION_COLUMN = "__statestore_version"
NO_VERSION = -1
"""The version of a row without a time."""


def state_as_of(
    df: DataFrame,
    checkpoint: str,
    operator: str,
    *,
    on: str | Sequence[str] | Mapping[str, str],
    time: str,
    version: str | None = None,
    columns: Sequence[str] | None = None,
    how: Literal["left", "inner"] = "left",
    state: str | None = None,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a batch DataFrame with the state of each row's key at the row's own time, from a checkpoint in storage.

        state_as_of(orders, "s3://bucket/ck", "user_totals", on="user", time="ordered_at", columns=["spent"])

    ``time`` is a timestamp column of ``df``; one without a time zone is refused: cast it to timestamp. A row gets the
    state of the last version that was completed by then: the state that a client received at that moment. Rows after
    the last completion get the last version. Rows without a time have no match. ``version`` is a column with the
    version of each row, if clients have recorded it (``answered_version``): hosts learn of a version up to about a
    second after it completes. Rolling aggregates are as of each row's time (``answered_at``), so that both columns give
    exactly the numbers that a client received. The other arguments are those of ``lookup``; ``checkpoint``,
    ``state_location`` and ``storage_options`` are those of ``read_state``. Rows are shuffled by version, and are
    returned in another order.

    Only the versions that the query keeps can be read (``min_versions_to_retain``). For the last one, in its first 10
    s, the time when Spark committed the batch counts, a moment before the version was completed. State with a TTL shows
    the values that had not expired at the time of completion.

    Raises ``InvalidOperatorError`` for every mistake that the arguments show, ``VersionNotFoundError`` if no version
    is completed; an action raises it for a row from before the first version that is kept, naming both times.
    """
    if df.isStreaming:
        raise InvalidOperatorError("state_as_of takes a batch DataFrame; for a stream use lookup.")
    checked_names("time=", [time])
    kinds = {f.name: f.dataType.typeName() for f in df.schema.fields}
    if kinds.get(time) == "timestamp_ntz":
        # Its microseconds are those of a wall clock, which no version has.
        named = column_literal(time)
        raise InvalidOperatorError(
            f"time={time!r} has type timestamp_ntz, which does not name a moment: .withColumn({time!r}, "
            f'F.col({named}).cast("timestamp")) takes it for a time of the session\'s time zone.'
        )
    if kinds.get(time) != "timestamp":
        timestamps = ", ".join(name for name, kind in kinds.items() if kind == "timestamp") or "none"
        raise InvalidOperatorError(
            f"time={time!r} must be a timestamp column of the DataFrame; it has {timestamps}."
            f"{other_case([time], df.columns)}"
        )
    if version is not None:
        checked_names("version=", [version])
    if version is not None and (version not in df.columns or df.schema[version].dataType.typeName() != "long"):
        raise InvalidOperatorError(
            f"version={version!r} must be a column of longs of the DataFrame; it has {', '.join(df.columns)}."
        )
    from spark_bridge.state_data.frames import state_place

    place = state_place(df.sparkSession, checkpoint, state_location, storage_options)
    location = StoredReads(place).locate(operator, None)
    task, schema = planned_lookup(df, location, state, on, columns, how, None, place)
    task = replace(task, time=time)
    times = VersionTimes.of(StateVersions.look(place))
    with_version = type(df.schema)([*df.schema.fields]).add(VERSION_COLUMN, "long")
    versions = map_in_arrow(df, _Versions(times, time, version).run, "versions_as_of", with_version)
    by_version = versions.repartition(VERSION_COLUMN).sortWithinPartitions(VERSION_COLUMN)
    return map_in_arrow(by_version, _AsOf(task, times).run, f"state_as_of_{operator}", schema)


@dataclass(frozen=True)
class _Versions:
    """Puts the version of each row, that of its column ``version`` or else of its time, after the row."""

    times: VersionTimes
    time: str
    version: str | None

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        completed = np.array(self.times.completed_ms, np.int64)
        versions = np.array([NO_VERSION, *self.times.versions], np.int64)
        for batch in batches:
            us = pc.cast(batch.column(batch.schema.get_field_index(self.time)), pa.int64())
            is_known = np.asarray(us.is_valid())
            ms = np.asarray(us.fill_null(0)) // 1000
            index = np.searchsorted(completed, ms, side="right")
            named = None if self.version is None else batch.column(batch.schema.get_field_index(self.version))
            is_by_time = is_known if named is None else is_known & np.asarray(named.is_null())
            early = is_by_time & (index == 0)
            if early.any():
                raise self.times.too_early(int(ms[early].min()))
            index[~is_known] = 0
            of_rows = pa.array(versions[index])
            if named is not None:
                of_rows = pc.if_else(pa.array(is_known), pc.coalesce(named, of_rows), NO_VERSION)
            schema = pa.schema([*batch.schema, pa.field(VERSION_COLUMN, pa.int64())])
            yield pa.RecordBatch.from_arrays([*batch.columns, of_rows], schema=schema)


@dataclass(frozen=True)
class _AsOf:
    """Looks rows up that come in the order of their versions."""

    task: LookupTask
    times: VersionTimes

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        state: tuple[int, looked_up_state.LookedUpState] | None = None
        for batch in batches:
            last = batch.num_columns - 1
            versions, rows = np.asarray(batch.column(last)), batch.select(list(range(last)))
            bounds = [0, *(1 + np.flatnonzero(versions[1:] != versions[:-1])).tolist(), len(versions)]
            for begin, end in pairwise(bounds):
                if begin == end:
                    continue
                version, part = int(versions[begin]), rows.slice(begin, end - begin)
                if version == NO_VERSION:
                    yield from self._without(part)
                    continue
                if state is None or state[0] != version:
                    state = version, self._state(version)
                yield from self.task.enriched(part, state[1])

    def _state(self, version: int) -> looked_up_state.LookedUpState:
        task = self.task
        assert task.place is not None
        if version not in self.times.versions:
            raise VersionNotFoundError(
                f"Version {version} is not kept; versions {self.times.versions[0]} to {self.times.versions[-1]} are."
            )
        at_ms = self.times.completed_ms[self.times.versions.index(version)]
        return looked_up_state.in_storage(task.place, task.operator, task.state, None, LookupRecord(version, "", at_ms))

    def _without(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if not self.task.is_inner:
            fields = list(self.task.schema)
            own = [column.cast(field.type) for column, field in zip(rows.columns, fields, strict=False)]
            added = [pa.nulls(rows.num_rows, field.type) for field in fields[len(own) :]]
            yield pa.RecordBatch.from_arrays([*own, *added], schema=self.task.schema)
