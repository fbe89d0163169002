"""The state of a query of Spark, and its rows in the columns of this project: for ``take_over`` and ``mirror``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.encoding.operator_schema import TIMERS, OperatorSchema
from backends.exceptions import InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import METADATA, SparkCommits
from coordinator_actor.exceptions import SavepointError
from spark_bridge.aggregates.computation import outputs_of, split_function
from spark_bridge.operators.join_sides import JoinSide
from spark_bridge.state_format.layouts import ALL_ROWS_KEY, EXPIRES_AT, LIST, MAP, ROWS, SESSIONS, VALUE
from spark_bridge.state_surgery.shuffle import Target

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# What Spark's operators keep, by the names in ``_metadata`` of their state.


AGGREGATE, SESSION, DEDUPLICATE, JOIN = "aggregate", "session_aggregate", "deduplicate", "join"
PROCESSOR = "transform_with_state"
KINDS_BY_SPARK = {
    "stateStoreSave": AGGREGATE,
    "sessionWindowStateStoreSaveExec": SESSION,
    "dedupe": DEDUPLICATE,
    "dedupeWithinWatermark": DEDUPLICATE,
    "symmetricHashJoin": JOIN,
    "applyInPandasWithState": PROCESSOR,
    "transformWithStateInPandasExec": PROCESSOR,
    "transformWithStateInPySparkExec": PROCESSOR,
}
"""The kinds of this project's operators that take over the state of Spark's operators."""
GROUP_STATE = "applyInPandasWithState"
KINDS_BY_FIELD = {
    "sessionStartTime": "sessionWindowStateStoreSaveExec",
    "__dummy__": "dedupe",
    "expiresAtMicros": "dedupeWithinWatermark",
    "groupState": GROUP_STATE,
}
"""Fields of keys and values that only these operators of Spark have; others belong to an aggregation."""
MOMENT_BUFFERS = ("n", "avg", "m2")
BUFFERS = {
    "count": ("count",),
    "count_if": ("count",),
    "sum": ("sum",),
    "mean": ("sum", "count"),
    "min": ("min",),
    "max": ("max",),
    **dict.fromkeys(("stddev_samp", "stddev_pop", "var_samp", "var_pop"), MOMENT_BUFFERS),
}
"""The buffers that Spark keeps for each function."""
EMPTY_SUM = ("sum", "isEmpty")
"""The buffers of a sum of decimals."""
JOIN_FORMAT = "spark.sql.streaming.join.stateFormatVersion"
MAX_JOIN_FORMAT = 3
"""The newest format of a join's state whose rows Spark's reader gives as they are; 4.3 may write a newer one."""
CHECKPOINT_FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
UNIQUE_IDS = b'"stateUniqueIds":{'
"""A field of Spark's commits from format 2 on, whose state files have ids in their names."""
PLACEHOLDER = "present"
"""The column of a side of a join that keeps only keys."""
SINK_LOG = "_spark_metadata"
"""The directory that a file sink keeps its batches in."""
TTL_FIELDS = ["value", "ttlExpirationMs"]
"""The fields around a value with a TTL."""


@dataclass(frozen=True)
class SparkOperator:
    """A stateful operator of the old query: its number, Spark's name for its kind, and the variables of a processor."""

    id: int
    name: str
    variables: tuple[str, ...] = ()
    time_mode: str | None = None

    @property
    def in_words(self) -> str:
        return f"Spark's operator {self.id} ({self.name})"


@dataclass(frozen=True)
class FileSink:
    """The directory that a file sink of the old query writes to: ``_spark_metadata`` has a file for each batch.

    The sink skips a batch whose file is there already, and its plan does not run.
    """

    storage: CheckpointStorage

    def check_last(self, committed: int, planned: int | None, checkpoint: str) -> None:
        """Raise ``InvalidStateStoreArgument`` unless the last batch of the sink is the last committed one."""
        log = self.storage.full_location(SINK_LOG)
        names = [path.rpartition("/")[2].removesuffix(".compact") for path, _ in self.storage.list(SINK_LOG)]
        last = max((int(name) for name in names if name.isdigit()), default=None)
        if last == committed:
            return
        if last == planned and last == committed + 1:
            raise InvalidStateStoreArgument(
                f"{log} has the output of batch {last}, and {checkpoint} has not committed it. The sink would skip it "
                "in the new query too, and its state would be lost. Start the old query again, stop it when it has "
                f"committed batch {last}, and call take_over again."
            )
        said = "no batch" if last is None else f"batch {last} as its last one"
        raise InvalidStateStoreArgument(
            f"{log} has {said}, and {checkpoint} has committed batch {committed}. file_sink= must be the directory "
            "that the old query writes to. If it is, another query writes there too, and the sink would skip batches "
            "of the new query: give that another directory, and leave out file_sink=."
        )

    def check_unused(self, spark: SparkSession) -> None:
        """Raise ``InvalidStateStoreArgument`` if a running query of the session writes to the directory."""
        for query in spark.streams.active:
            # Progress names the sink too, but only after the first batch.
            sink = str(query._jsq.streamingQuery().sink().toString())
            path = sink.removeprefix("FileSink[").removesuffix("]")
            if sink != path and _path_of(path) == _path_of(self.storage.location):
                raise InvalidStateStoreArgument(
                    f"The query {query.name or query.id} writes to {self.storage.location}: one directory takes the "
                    "batches of one query. Stop it, or give the new query another directory, and leave out file_sink=."
                )


def _path_of(location: str) -> str:
    """Return a location without its scheme: Hadoop's and this project's may differ."""
    return (location.partition(":/")[2] or location).strip("/")


def check_state_of_spark(caller: str, spark: SparkSession, storage: CheckpointStorage, instead: str) -> None:
    """Raise ``InvalidStateStoreArgument`` unless ``caller`` can read the checkpoint with Spark's state reader."""
    if int(spark.version.split(".")[0]) < 4:
        raise InvalidStateStoreArgument(
            f"{caller} reads state with Spark's own reader, which Spark {spark.version} does not have: run {caller} on "
            "Spark 4.0 or later. It reads checkpoints of Spark 3.5 too."
        )
    if not storage.exists(METADATA):
        raise InvalidStateStoreArgument(f"{storage.location} is not the checkpoint of a query: it has no metadata.")
    if storage.list("statestore"):
        raise InvalidStateStoreArgument(f"{storage.location} is the checkpoint of a query of this project: {instead}.")
    newest = SparkCommits(storage).last_committed()
    if newest is None or str(spark.conf.get(CHECKPOINT_FORMAT, "1")) != "1":
        return
    if UNIQUE_IDS in storage.get(f"commits/{newest}"):
        raise InvalidStateStoreArgument(
            f"The state of {storage.location} has checkpoint format 2, which Spark's reader only finds in a session "
            f'of that format: spark.conf.set("{CHECKPOINT_FORMAT}", "2"), and call {caller} again. Such a session '
            "reads format 1 too."
        )


@dataclass(frozen=True)
class SparkQuery:
    """A query of Spark at its last committed batch; ``planned`` is its last planned one, of a stopped query.

    ``location`` is as the user gives it: Spark's readers may know it under another scheme than ``storage`` does.
    """

    spark: SparkSession
    location: str
    storage: CheckpointStorage
    batch_id: int
    planned: int | None

    @classmethod
    def at(
        cls, spark: SparkSession, location: str, storage: CheckpointStorage, sink: FileSink | None = None
    ) -> SparkQuery:
        """Return the query of a checkpoint. Raises ``InvalidStateStoreArgument`` if no state can be taken over."""
        check_state_of_spark("take_over", spark, storage, "use a savepoint, or rewrite_state")
        commits = SparkCommits(storage)
        batch_id, planned = commits.last_committed(), commits.last_begun()
        if batch_id is None:
            raise InvalidStateStoreArgument(
                f"{storage.location} has no committed batch, so there is no state to take over: start the new query "
                "with an empty checkpoint."
            )
        if planned is not None and planned > batch_id + 1:
            raise InvalidStateStoreArgument(
                f"{storage.location} has offsets of batch {planned}, and batch {batch_id} is the last committed one. "
                "Only one batch can run again. Run the old query, without asynchronous progress tracking, until it has "
                "committed its batches."
            )
        query = cls(spark, location, storage, batch_id, planned)
        if query.id in [one.id for one in spark.streams.active]:
            raise InvalidStateStoreArgument(f"The query {query.id} of {storage.location} is running: stop it first.")
        if sink is not None:
            sink.check_unused(spark)
            sink.check_last(batch_id, planned, storage.location)
        return query

    @property
    def id(self) -> str:
        """Read the id of the query. A checkpoint that is removed and created again has another one."""
        return str(json.loads(self.storage.get(METADATA))["id"])

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return the settings of Spark that the query keeps from its first batch on."""
        lines = self.storage.get(f"offsets/{self.batch_id}").split(b"\n")
        return dict(json.loads(lines[1]).get("conf", {}))

    def check_stopped(self) -> None:
        """Raise ``SavepointError`` if the query has planned or committed a batch since ``at``: it still runs."""
        commits = SparkCommits(self.storage)
        if (commits.last_committed(), commits.last_begun()) != (self.batch_id, self.planned):
            raise SavepointError(
                f"The query {self.id} of {self.storage.location} has gone to batch {commits.last_begun()} while its "
                f"state at batch {self.batch_id} was read: stop it, and call take_over again."
            )

    @cached_property
    def operators(self) -> list[SparkOperator]:
        """Return the stateful operators, in the order of their numbers."""
        if not self.storage.list("state"):
            return []
        if not (rows := self.spark.read.format("state-metadata").load(self.location).collect()):
            return self._operators_by_schema()
        variables, modes = {}, {}
        for row in rows:
            properties = json.loads(row["operatorProperties"] or "{}") if "operatorProperties" in row else {}
            names = [one["stateName"] for one in properties.get("stateVariables", ())]
            variables[row["operatorId"]] = tuple(name for name in names if not name.startswith("$"))
            modes[row["operatorId"]] = properties.get("timeMode")
        named = {row["operatorId"]: row["operatorName"] for row in rows}
        return [SparkOperator(number, name, variables[number], modes[number]) for number, name in sorted(named.items())]

    def _operators_by_schema(self) -> list[SparkOperator]:
        """Return the operators of a query that began on Spark 3.5, which keeps no metadata, by the fields of state."""
        paths = [path.split("/") for path, _ in self.storage.list("state")]
        stores = {int(p[1]): {q[3] for q in paths if len(q) > 4 and q[1] == p[1]} for p in paths if p[1].isdigit()}
        operators = []
        for number, names in sorted(stores.items()):
            if any(name.startswith("left-") for name in names):
                operators.append(SparkOperator(number, "symmetricHashJoin"))
                continue
            schema = self.state(SparkOperator(number, "")).schema
            fields = schema["key"].dataType.names + schema["value"].dataType.names
            kind = next((kind for mark, kind in KINDS_BY_FIELD.items() if mark in fields), "stateStoreSave")
            operators.append(SparkOperator(number, kind))
        return operators

    def state(self, operator: SparkOperator, after: int | None = None, /, **options: object) -> DataFrame:
        """Return the rows of an operator, as Spark's reader shows them; or the changes after the batch ``after``."""
        batches: dict[str, object] = {"batchId": self.batch_id}
        if after is not None:
            batches = {"readChangeFeed": True, "changeStartBatchId": after + 1, "changeEndBatchId": self.batch_id}
        settings = {k: str(v) for k, v in {"operatorId": operator.id, **batches, **options}.items()}
        return self.spark.read.format("statestore").options(**settings).load(self.location)


def times_of_micros(time: pa.Field, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose last column, microseconds since 1970, is one of times: the function of a ``Routing``."""
    last = batch.num_columns - 1
    return batch.set_column(last, time, batch.column(last).cast(time.type))


# The rows of an operator of Spark, in the columns of a state variable of this project.


@dataclass(frozen=True)
class Conversion:
    """Takes the state of an operator of Spark for the variable ``target`` of an operator of the program.

    ``columns`` has Spark's name of a column that has another name there, and the places of an aggregate's outputs among
    Spark's buffers; without places, they come in the same order.
    ``side`` is the side of a join whose rows the variable keeps.
    """

    query: SparkQuery
    operator: SparkOperator
    target: Target
    columns: Mapping[str, str | int] = field(default_factory=dict)
    side: JoinSide | None = None

    def rows(self) -> DataFrame | None:
        """Return the rows of the variable, or None if Spark has none for it. Raises ``InvalidStateStoreArgument``."""
        if self.side is not None:
            return self._waiting_rows(self.side)
        if self.target.pairs.rows.kind in (ROWS, SESSIONS):
            is_aggregate = KINDS_BY_SPARK[self.operator.name] != DEDUPLICATE
            return self._aggregate() if is_aggregate else self._duplicates()
        return self._group_state() if self.operator.name == GROUP_STATE else self._variable()

    @property
    def schema(self) -> OperatorSchema:
        return self.target.pairs.rows.schema

    @property
    def _values(self) -> list[str]:
        rows = self.target.pairs.rows
        return list(self.target.pairs.columns.names)[len(rows.key) + len(rows.inner) :]

    @property
    def _keys(self) -> list[str]:
        """Return the columns of the program's key, in the user's order."""
        rows = self.target.pairs.rows
        return [rows.key.names[i] for i in rows.key_order]

    def _selected(self, frame: DataFrame, *values: Column, keys: list[Column] | None = None) -> DataFrame:
        """Return the key's columns, by their names, and the other columns of the variable, in its order."""
        names = self.target.pairs.columns.names
        columns = [*(self._key_columns(frame) if keys is None else keys), *values]
        return frame.select(*(column.alias(name) for column, name in zip(columns, names, strict=True)))

    def _key_columns(self, frame: DataFrame) -> list[Column]:
        keys, of_spark = self._keys, frame.schema["key"].dataType.names
        if keys == [ALL_ROWS_KEY] and not of_spark:
            return [F.lit(True)]
        # The state of a session has its start after the key.
        num_columns = len(keys) + (self.target.pairs.rows.kind == SESSIONS)
        there = [str(self.columns.get(name, name)) for name in keys]
        if len(of_spark) != num_columns or any(name not in of_spark for name in there):
            raise self._other_key(of_spark)
        if len(set(there)) < len(there):
            raise self._refusal(
                f"columns= takes the keys {listed(keys)} from its columns {listed(there)}: each must be there once, "
                f"and its key has {listed(of_spark)}."
            )
        return [F.col("key").getField(name) for name in there]

    def _join_keys(self, frame: DataFrame, own: list[str]) -> list[Column]:
        """Return the key's columns, which Spark numbers; ``own`` are those of the rows, in the fields of ``value``.

        Where a row has the key under its name as well, tasks check that both are the same.
        """
        keys = self._keys
        numbered = [name for name in frame.schema["key"].dataType.names if name.startswith("field")]
        if len(numbered) != len(keys):
            raise self._other_key(numbered)
        columns = []
        for name, default in zip(keys, numbered, strict=True):
            column = F.col("key").getField(str(self.columns.get(name, default)))
            if name in own:
                text = (
                    f"The key {default} of {self.operator.in_words} is not the column {name!r} of its rows: give on= "
                    f"the order of the old condition, or columns={{{self.target.name[0]!r}: {{{name!r}: "
                    f"{default!r}}}}} with the number of each key."
                )
                of_row = F.col(f"value.b{own.index(name)}")
                column = F.when(column.eqNullSafe(of_row), column).otherwise(F.raise_error(F.lit(text)))
            columns.append(column)
        return columns

    def _other_key(self, of_spark: list[str]) -> InvalidStateStoreArgument:
        keys = self._keys
        remedy = f"columns={{{self.target.name[0]!r}: {{{keys[0]!r}: {(of_spark or [''])[0]!r}}}}}"
        return self._refusal(
            f"its key has the columns {listed(of_spark)}, and the program's has {listed(keys)}. Both must be "
            f"as many; other names are given as {remedy}."
        )

    # -- aggregations and keys -----------------------------------------------------------------

    def _aggregate(self) -> DataFrame:
        frame, rows = self.query.state(self.operator), self.target.pairs.rows
        fields = frame.schema["value"].dataType.fields
        first = 1 + len(rows.key) if rows.kind == SESSIONS else 0
        # Buffers of one function have the same name: numbers tell them apart.
        frame = frame.withColumn("value", numbered_fields(frame, "value"))
        names, columns, place = [f.name for f in fields], [], first
        has_places = any(isinstance(place, int) for place in self.columns.values())
        for name, function, parts in outputs_of(rows.stored_value):
            if has_places:
                given = self.columns.get(name)
                place = first + given if isinstance(given, int) else len(names)
            wanted = BUFFERS.get(split_function(function)[0], ("",))
            if wanted == BUFFERS["sum"] and names[place : place + 2] == list(EMPTY_SUM):
                wanted = EMPTY_SUM
            if names[place : place + len(wanted)] != list(wanted):
                raise self._other_buffers(names[first:], name, function)
            buffers = [F.col("value").getField(f"b{place + i}") for i in range(len(wanted))]
            if wanted[0] == "sum" and pa.types.is_decimal(parts[0].type):
                scaled = _scaled(buffers[0], fields[place].dataType, parts[0].type, is_mean=len(parts) > 1)
                if scaled is None:
                    raise self._refusal(
                        f"{name}={function} is of decimals, and Spark's buffer {place - first} is a "
                        f"{fields[place].dataType.simpleString()}: give the column the type that it had."
                    )
                buffers[0] = scaled
            columns += _parts(wanted, buffers, self.operator.in_words)
            place += len(wanted)
        if place != len(names) and not has_places:
            raise self._other_buffers(names[first:])
        of_key = frame.schema["key"].dataType.names
        bounds = [F.col("value").getField(f"b{i}") for i, n in enumerate(names[:first]) if n not in of_key]
        return self._selected(frame, *bounds, *columns)

    def _other_buffers(self, names: list[str], output: str = "", function: str = "") -> InvalidStateStoreArgument:
        places = ", ".join(f"{place} {name}" for place, name in enumerate(names))
        why = f"it has buffers that no function takes ({places})."
        if output:
            why = f"{output}={function} does not find its buffers there ({places})."
        return self._refusal(
            f"{why} The program needs the functions of the old agg(...) in their order, equal ones once, or give "
            f"columns={{{self.target.name[0]!r}: {{{output or 'n'!r}: 0}}}}, the places of first buffers. "
            f"Buffers that can be read are those of {', '.join(BUFFERS)}."
        )

    def _duplicates(self) -> DataFrame:
        frame = self.query.state(self.operator)
        expires = "expiresAtMicros" in frame.schema["value"].dataType.names
        if expires != (EXPIRES_AT in self._values):
            raise self._refusal(
                f"its keys {'expire' if expires else 'do not expire'}, and those of the program "
                f"{'do not: give' if expires else 'do: leave out'} within=."
            )
        return self._selected(frame, *([F.col("value").getField("expiresAtMicros")] if expires else []))

    def _waiting_rows(self, side: JoinSide) -> DataFrame:
        """Return the rows that wait on a side of a join. Those that an output needs no more are left out."""
        # A query without the setting began before Spark had format 2.
        version = int(self.query.settings.get(JOIN_FORMAT, 1))
        if version > MAX_JOIN_FORMAT:
            raise self._refusal(
                f"its state has format {version}, and formats up to {MAX_JOIN_FORMAT} can be read. Run the old query "
                f"with {JOIN_FORMAT}={MAX_JOIN_FORMAT} from a new checkpoint, or stay with it."
            )
        needs_flag = side.flag is not None or side.leaves_once_matched
        store = {"storeName": f"{side.name}-keyWithIndexToValue"} if needs_flag else {"joinSide": side.name}
        frame = self.query.state(self.operator, **store)
        fields = frame.schema["value"].dataType.names
        if needs_flag and fields[-1] != "matched":
            raise self._refusal(
                "its state is of a format that does not say which rows have found a match: run the old query with "
                f"{JOIN_FORMAT}=2 from a new checkpoint."
            )
        own = fields[:-1] if needs_flag else fields
        is_placeholder = side.columns.names == [PLACEHOLDER] and PLACEHOLDER not in own
        names = [] if is_placeholder else side.columns.names
        wanted = {name: str(self.columns.get(name, name)) for name in names}
        if missing := [name for name, there in wanted.items() if there not in own]:
            raise self._refusal(
                f"its rows of the {side.name} side have the columns {listed(own)}, and the program's rows need "
                f"{listed(missing)}. Say which they are: columns={{{self.target.name[0]!r}: {{{missing[0]!r}: "
                f"{own[0]!r}}}}}."
            )
        # A column of the user may have the name of Spark's flag: numbers tell them apart.
        frame = frame.withColumn("value", numbered_fields(frame, "value"))
        if side.leaves_once_matched:
            frame = frame.where(~F.col(f"value.b{len(fields) - 1}"))
        columns = {name: F.col(f"value.b{own.index(there)}") for name, there in wanted.items()}
        if side.flag is not None:
            columns[side.flag] = F.col(f"value.b{len(fields) - 1}")
        values = (columns.get(name, F.lit(True)) for name in self._values)
        return self._selected(frame, *values, keys=self._join_keys(frame, own))

    # -- state variables -----------------------------------------------------------------------

    def _group_state(self) -> DataFrame | None:
        """Return the value or the timers of ``applyInPandasWithState``, which has one of each at a key."""
        frame, kind = self.query.state(self.operator), self.target.pairs.rows.kind
        has_timeouts = "timeoutTimestamp" in frame.schema["value"].dataType.names
        if kind == TIMERS:
            expires = F.col("value").getField("timeoutTimestamp")
            return self._selected(frame.where(expires > 0), expires) if has_timeouts else None
        if has_timeouts and self.schema.settings.get("time_mode", "none") == "none":
            raise self._refusal("it has timeouts: give the processor the time_mode= of the old timeout.")
        if kind != VALUE:
            raise self._refusal(f"it has one value at a key, and the program has the {kind} {self.target.name[1]!r}.")
        state = F.col("value").getField("groupState")
        fields = frame.schema["value"].dataType["groupState"].dataType.names
        return self._selected(frame.where(state.isNotNull()), *self._fields(state, fields, self._values))

    def _variable(self) -> DataFrame | None:
        rows, variable = self.target.pairs.rows, self.target.name[1]
        old_mode, mode = (self.operator.time_mode or "none").lower(), self.schema.settings.get("time_mode", "none")
        if ("none" if old_mode.startswith("no") else old_mode) != mode.lower():
            raise self._refusal(f"its time mode is {self.operator.time_mode}, and that of the program {mode}.")
        if rows.kind == TIMERS:
            frame = self.query.state(self.operator, readRegisteredTimers=True)
            return self._selected(frame, F.col("expiration_timestamp_ms"))
        if variable not in self.operator.variables:
            return None
        frame = self.query.state(self.operator, stateVarName=variable)
        inner = self._of(frame, "user_map_key", list(rows.inner.names)) if rows.kind == MAP else []
        column = {VALUE: "value", LIST: "list_element", MAP: "user_map_value"}[rows.kind]
        return self._selected(frame, *inner, *self._of(frame, column, self._values))

    def _of(self, frame: DataFrame, column: str, wanted: list[str]) -> list[Column]:
        """Return the columns of a value, an element or an entry, with the time of its TTL as the last one."""
        if column not in frame.columns:
            raise self._refusal(
                f"its state variable {self.target.name[1]!r} has the columns {listed(frame.columns)}, and the program "
                f"declares a {self.target.pairs.rows.kind} of that name."
            )
        value, kind = F.col(column), frame.schema[column].dataType
        has_ttl = kind.names == TTL_FIELDS
        if column != "user_map_key" and has_ttl != (self.target.pairs.rows.variable.ttl_ms is not None):
            raise self._refusal(
                f"its state variable {self.target.name[1]!r} has {'a' if has_ttl else 'no'} TTL, and that of the "
                f"program has {'none' if has_ttl else 'one'}: declare it as it was."
            )
        if has_ttl:
            of_value = self._fields(value.getField("value"), kind["value"].dataType.names, wanted[:-1])
            return [*of_value, value.getField("ttlExpirationMs")]
        return self._fields(value, kind.names, wanted)

    def _fields(self, value: Column, names: list[str], wanted: list[str]) -> list[Column]:
        if names != [str(self.columns.get(name, name)) for name in wanted]:
            raise self._refusal(
                f"its state variable {self.target.name[1]!r} has the fields {listed(names)}, and the program declares "
                f"{listed(wanted)}: declare them as they were."
            )
        return [value.getField(name) for name in names]

    def _refusal(self, why: str) -> InvalidStateStoreArgument:
        return InvalidStateStoreArgument(
            f"{self.target.in_words} cannot take over the state of {self.operator.in_words}: {why}"
        )


def numbered_fields(frame: DataFrame, column: str, levels: int = 1) -> Column:
    """Return a struct with the names ``b0``, ``b1``, ... for its fields: users' names may be equal, but for their case.

    With two ``levels`` the fields of a value with a TTL have such names as well.
    """

    def numbered(kind: T.StructType, levels: int) -> T.StructType:
        return T.StructType([T.StructField(f"b{i}", inner(kind, f, levels)) for i, f in enumerate(kind.fields)])

    def inner(kind: T.StructType, field: T.StructField, levels: int) -> T.DataType:
        is_value = levels > 1 and kind.names == TTL_FIELDS and isinstance(field.dataType, T.StructType)
        return numbered(field.dataType, levels - 1) if is_value else field.dataType

    return F.col(column).cast(numbered(frame.schema[column].dataType, levels))


def _scaled(total: Column, kind: Any, wanted: pa.DataType, *, is_mean: bool) -> Column | None:
    """Return a sum of decimals, or None if it is a sum of something else.

    Spark sums decimals of up to 8 digits as longs, and for means those of up to 11 digits as doubles, both without
    their point (``DecimalAggregates``). ``wanted`` has ten digits more than the decimals.
    """
    if isinstance(kind, T.DecimalType):
        return total
    unscaled_type, max_digits = (T.DoubleType, 11) if is_mean else (T.LongType, 8)
    if not isinstance(kind, unscaled_type) or wanted.precision - 10 > max_digits:
        return None
    unscaled = total.cast(T.DecimalType(wanted.precision, 0))
    return (unscaled * F.lit(Decimal(1).scaleb(-wanted.scale))).cast(T.DecimalType(wanted.precision, wanted.scale))


def _parts(names: tuple[str, ...], buffers: list[Column], where: str) -> list[Column]:
    if names == MOMENT_BUFFERS:
        return [buffers[0].cast("long"), *buffers[1:]]
    if names not in (EMPTY_SUM, BUFFERS["mean"]):
        return buffers
    # Spark keeps zero as the sum of no values, and null where a decimal has overflowed.
    is_empty = buffers[1] if names == EMPTY_SUM else buffers[1] == 0
    overflow = F.raise_error(F.lit(f"A sum of {where} has overflowed: its state cannot be taken over."))
    total = F.when(is_empty, F.lit(None)).otherwise(F.coalesce(buffers[0], overflow))
    return [total] if names == EMPTY_SUM else [total, buffers[1]]


def listed(names: list[str]) -> str:
    """Return names for a message."""
    return ", ".join(map(repr, names)) or "none"
