"""``aggregate``: running aggregates by key, as an ordinary streaming DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.exceptions import StateStoreError
from backends.schema import StateSchema, from_spark_type, to_spark_type
from coordinator_actor.messages import OperatorSpec
from spark_bridge.aggregate_task import AggregateLogic
from spark_bridge.aggregation import Aggregator, Output, result_fields
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import AggregateFunction
from spark_bridge.operators import check_operator_name, declare
from spark_bridge.partitioning import key_group_column, quote, target_column
from spark_bridge.state_task import KEY_GROUP_COLUMN, PARTITION_COLUMN, StateTask

DEFAULT_KEY_GROUPS = 1024
MAX_KEY_GROUPS = 65_536
KEY_GROUPS_CONF = "spark.statestore.keyGroups"
WATERMARK_METADATA = "spark.watermarkDelayMs"

NUMERIC = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.DecimalType)
ORDERED = (
    *NUMERIC,
    T.BooleanType,
    T.StringType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)
KEYS = ORDERED


def aggregate(
    df: DataFrame,
    *,
    by: str | Sequence[str],
    operator: str,
    output_mode: str = "update",
    num_partitions: int | None = None,
    **aggregations: AggregateFunction,
) -> DataFrame:
    """Keep running aggregates of a stream by key, in the state store.

    ``df`` is a streaming DataFrame, ``by`` its key column or columns (nulls are a key of their own),
    ``operator`` the name of this state in the checkpoint and in queries. Each keyword names an
    output column and gives its function from ``spark_bridge.functions``. The result has the key
    columns and the outputs, one row per key touched in each micro-batch (``output_mode="update"``),
    and goes to any sink with ``outputMode("append")`` or ``("update")``.

    ``num_partitions`` is the number of state partitions, by default the session's
    ``spark.sql.shuffle.partitions``; it stays with the checkpoint.

    Raises ``InvalidOperatorError`` for whatever the DataFrame shows to be wrong. The counterpart in
    Spark is ``groupBy(...).agg(...)`` on a stream.
    """
    keys = [by] if isinstance(by, str) else list(by)
    _check_input(df, keys, aggregations, output_mode)
    check_operator_name(operator, df)
    key_groups = int(df.sparkSession.conf.get(KEY_GROUPS_CONF, str(DEFAULT_KEY_GROUPS)) or DEFAULT_KEY_GROUPS)
    partitions = _num_partitions(df, num_partitions, key_groups)

    key_schema = pa.schema([pa.field(k, _arrow_type(df.schema[k].dataType)) for k in keys])
    outputs = [_output(df, name, function) for name, function in aggregations.items()]
    aggregator = Aggregator(outputs)
    try:
        state_schema = StateSchema(key_schema, aggregator.state_schema)
        schema_json = state_schema.to_json()
    except StateStoreError as error:
        raise InvalidOperatorError(f"Operator {operator!r}: {error}") from error
    spec = OperatorSpec(operator, partitions, schema_json)
    output = pa.schema([*key_schema, *result_fields(aggregator.state_schema)])

    inputs = list(dict.fromkeys([*keys, *(c for o in outputs for c in (o.column, o.by) if c is not None)]))
    routed = (
        df.select(*[F.col(quote(c)) for c in inputs], key_group_column(keys, key_groups).alias(KEY_GROUP_COLUMN))
        .repartition(partitions, target_column(KEY_GROUP_COLUMN, partitions, key_groups))
        .select("*", F.spark_partition_id().alias(PARTITION_COLUMN))
    )
    task = StateTask(operator, partitions, AggregateLogic(key_schema, aggregator, output))
    return routed.mapInArrow(_named(task, declare(spec)), _spark_schema(df, keys, aggregator.state_schema))


def _named(task: StateTask, name: str) -> Any:
    def run(batches: Any) -> Any:
        return task.run(batches)

    run.__name__ = run.__qualname__ = name
    return run


def _check_input(df: DataFrame, keys: list[str], aggregations: dict[str, AggregateFunction], output_mode: str) -> None:
    if not df.isStreaming:
        raise InvalidOperatorError(
            "aggregate takes a streaming DataFrame (spark.readStream); for a batch DataFrame use "
            "df.groupBy(...).agg(...)."
        )
    if output_mode != "update":
        raise InvalidOperatorError(
            f'output_mode={output_mode!r} is not supported by aggregate; use "update": '
            "one row per key touched in the batch."
        )
    if not keys:
        raise InvalidOperatorError("by= names no key column; give one column name or a list of them.")
    if len(set(keys)) != len(keys):
        raise InvalidOperatorError(f"by={keys!r} names a key column twice.")
    if not aggregations:
        raise InvalidOperatorError("aggregate needs at least one output, for instance n=S.count().")
    for key in keys:
        kind = _column_type(df, key, "by=")
        if not isinstance(kind, KEYS):
            raise InvalidOperatorError(f"Key column {key!r} has type {kind.simpleString()}, which cannot be a key.")
    for name, function in aggregations.items():
        if not isinstance(function, AggregateFunction):
            raise InvalidOperatorError(
                f"{name}={function!r} is no aggregate function of the state store; use spark_bridge.functions, "
                f"for instance {name}=S.count()."
            )
        if name in keys:
            raise InvalidOperatorError(f"Output {name!r} has the name of a key column; choose another name.")


def _column_type(df: DataFrame, column: str, where: str) -> T.DataType:
    names = df.schema.names
    if names.count(column) != 1:
        problem = "is ambiguous" if column in names else "does not exist"
        raise InvalidOperatorError(f"{where}{column!r}: the column {problem}; the DataFrame has {', '.join(names)}.")
    return df.schema[column].dataType


def _output(df: DataFrame, name: str, function: AggregateFunction) -> Output:
    where = f"{name}=S.{function.name}: "
    if function.column is None:
        return Output(name, function.name, None, None, None)
    kind = _column_type(df, function.column, where)
    allowed = {"sum": NUMERIC, "mean": NUMERIC, "count": (T.DataType,)}.get(function.name, ORDERED)
    if not isinstance(kind, allowed):
        raise InvalidOperatorError(
            f"{where}column {function.column!r} has type {kind.simpleString()}, which {function.name} does not take."
        )
    arrow = pa.null() if function.name == "count" else _arrow_type(kind)
    if function.name not in ("first", "last"):
        return Output(name, function.name, function.column, None, arrow)
    by = function.by or _watermark_column(df, where)
    by_kind = _column_type(df, by, f"{where}by=")
    if not isinstance(by_kind, ORDERED):
        raise InvalidOperatorError(f"{where}by={by!r} has type {by_kind.simpleString()}, which has no order.")
    return Output(name, function.name, function.column, by, arrow, _arrow_type(by_kind))


def _watermark_column(df: DataFrame, where: str) -> str:
    marked = [f.name for f in df.schema.fields if WATERMARK_METADATA in (f.metadata or {})]
    if len(marked) != 1:
        raise InvalidOperatorError(
            f"{where}which event time? Give by=<column>, or put withWatermark on the DataFrame first."
        )
    return str(marked[0])


def _num_partitions(df: DataFrame, given: int | None, key_groups: int) -> int:
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise InvalidOperatorError(f"{KEY_GROUPS_CONF}={key_groups} is out of range; it must be 1 to {MAX_KEY_GROUPS}.")
    n = given if given is not None else int(df.sparkSession.conf.get("spark.sql.shuffle.partitions", "200") or 200)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidOperatorError(f"num_partitions={given!r} must be a positive integer.")
    if n > key_groups:
        raise InvalidOperatorError(
            f"num_partitions={n} is greater than the number of key groups, {key_groups}; lower it, or start a new "
            f"checkpoint with a greater {KEY_GROUPS_CONF}."
        )
    return n


def _arrow_type(kind: T.DataType) -> pa.DataType:
    try:
        return from_spark_type(kind.jsonValue())
    except StateStoreError as error:
        raise InvalidOperatorError(f"The type {kind.simpleString()} cannot be kept as state: {error}") from error


def _spark_schema(df: DataFrame, keys: list[str], state: pa.Schema) -> T.StructType:
    outputs = [
        {"name": f.name, "type": to_spark_type(f.name, f.type), "nullable": True, "metadata": {}}
        for f in result_fields(state)
    ]
    key_fields = [T.StructField(k, df.schema[k].dataType) for k in keys]
    return T.StructType([*key_fields, *T.StructType.fromJson({"type": "struct", "fields": outputs}).fields])
