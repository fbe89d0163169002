"""``aggregate``: running aggregates by key and window, as an ordinary streaming DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.errors import AnalysisException, IllegalArgumentException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.encoding.columns import RESERVED_PREFIX, from_spark_type, normalized_type
from backends.encoding.operator_schema import HORIZONS, ROLLING_KIND, OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import StateStoreError
from coordinator_actor.messages import OperatorSpec
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import GROUP_ID, Output, UserAggregate
from spark_bridge.aggregates.rolling import Rolling, declared_rolling, piece_fields
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import AggregateFunction, SessionWindow, UserFunctions, Window, as_list, checked_names
from spark_bridge.operators import columns, map_in_arrow
from spark_bridge.operators.aggregate_task import AggregateLogic, aggregated_ahead
from spark_bridge.operators.rolling_task import RollingLogic
from spark_bridge.operators.session_task import SessionLogic
from spark_bridge.state_format.layouts import ALL_ROWS_KEY, aggregate_schema, rolling_schema, session_schema

# The declared outputs of ``aggregate``, checked against a DataFrame's columns: each becomes an ``Output``.


OF_NUMBERS = ("sum", "mean", "stddev_samp", "stddev_pop", "var_samp", "var_pop", "percentile_approx")
WITH_ORDER = ("first", "last")
COMPARING = ("min", "max", "top_k", "collect_set", "approx_count_distinct")


def output_of(schema: T.StructType, name: str, function: AggregateFunction, watermark_column: str | None) -> Output:
    """Return the output ``name`` of a DataFrame of ``schema``; ``watermark_column`` is the default of ``by``.

    Raises ``InvalidOperatorError`` naming output, function, column and type.
    """
    where = f"{name}=S.{function.name}: "
    if function.user is not None:
        return _user_output(schema, name, function, function.user, where)
    if function.columns:
        kind = _struct_type(schema, function, where)
    elif function.column is None:
        return Output(name, function.name, None, None, None)
    else:
        kind = columns.column_type(schema, function.column, where)
    _check_input(function, kind, where)
    by, by_type = _order(schema, function, watermark_column, where)
    arguments = function.arguments
    if function.name == "mean" and isinstance(kind, T.DecimalType):
        arguments = (str(kind.precision), str(kind.scale))
    text = f"{function.name}({','.join(arguments)})" if arguments else function.name
    # Rows can be counted for any type of the column.
    arrow = pa.null() if function.name == "count" else columns.arrow_type(kind)
    return Output(name, text, function.column, by, arrow, by_type, function.columns, max_bytes=function.max_bytes)


def _check_input(function: AggregateFunction, kind: T.DataType, where: str) -> None:
    column = function.column if function.column is not None else ", ".join(function.columns)
    if function.name in COMPARING:
        _check_collation(kind, f"{where}column {column!r}")
    match function.name:
        case "count":
            is_fine = True
        case "count_if":
            is_fine = isinstance(kind, T.BooleanType)
        case n if n in OF_NUMBERS:
            is_fine = isinstance(kind, columns.NUMERIC)
        case _:  # a map has neither an order nor a hash
            is_fine = columns.is_ordered(kind)
    if not is_fine:
        remedy = ""
        if function.name in OF_NUMBERS and isinstance(kind, T.StringType):
            # Spark casts, and counts strings that are not numbers as null, or fails on them in ANSI mode: the user must
            # choose.
            cast = f'.withColumn({column!r}, F.col({columns.column_literal(column)}).cast("double"))'
            remedy = f" Say what is meant: {cast} is what Spark does."
        raise InvalidOperatorError(
            f"{where}column {column!r} has type {kind.simpleString()}, which {function.name} does not take.{remedy}"
        )


def _check_collation(kind: T.DataType, where: str) -> None:
    if columns.is_collated(kind):
        raise InvalidOperatorError(
            f"{where} has type {kind.simpleString()}, and values are compared by their bytes: cast it to "
            f"{columns.plain_type(kind)}."
        )


def _order(
    schema: T.StructType, function: AggregateFunction, watermark_column: str | None, where: str
) -> tuple[str | None, pa.DataType | None]:
    by = function.by
    if by is None and function.name in (*WITH_ORDER, "collect_list"):
        by = watermark_column
    if by is None:
        if function.name in WITH_ORDER:
            raise InvalidOperatorError(
                f"{where}which event time? Give by=<column>, or put withWatermark on the DataFrame first."
            )
        return None, None
    kind = columns.column_type(schema, by, f"{where}by=")
    if not columns.is_ordered(kind):
        raise InvalidOperatorError(f"{where}by={by!r} has type {kind.simpleString()}, which has no order.")
    _check_collation(kind, f"{where}by={by!r}")
    return by, columns.arrow_type(kind)


def _struct_type(schema: T.StructType, function: AggregateFunction, where: str) -> T.StructType:
    if len(set(function.columns)) != len(function.columns):
        raise InvalidOperatorError(f"{where}a column is named twice in {', '.join(function.columns)}.")
    return T.StructType([T.StructField(c, columns.column_type(schema, c, where)) for c in function.columns])


def _user_output(
    schema: T.StructType, name: str, function: AggregateFunction, user: UserFunctions, where: str
) -> Output:
    _struct_type(schema, function, where)
    if GROUP_ID in function.columns:
        raise InvalidOperatorError(f"{where}{GROUP_ID!r} is the column of the groups; rename the input column.")
    state = _state_schema(user.state, where)
    wrong = [f.name for f in state if f.name == GROUP_ID or "." in f.name or not f.name]
    if wrong or not len(state):
        raise InvalidOperatorError(
            f"{where}the state must have at least one column, and no name may be {GROUP_ID!r} or contain a dot; "
            f"it has {', '.join(map(repr, state.names)) or 'none'}."
        )
    result = None if user.result is None else _any_type(user.result, f"{where}result=")
    declared = UserAggregate(state, user.partial, user.merge, user.finish, result)
    return Output(name, function.name, None, None, None, columns=function.columns, user=declared)


def _state_schema(schema: Any, where: str) -> pa.Schema:
    try:
        if isinstance(schema, str):
            schema = T._parse_datatype_string(schema)
        if isinstance(schema, T.StructType):
            fields = [pa.field(f.name, from_spark_type(f.dataType.jsonValue())) for f in schema.fields]
            return StateSchema(pa.schema([]), pa.schema(fields)).value
        if isinstance(schema, pa.Schema):
            return StateSchema(pa.schema([]), pa.schema([pa.field(f.name, f.type) for f in schema])).value
    except StateStoreError as error:
        raise InvalidOperatorError(f"{where}state={schema!r}: {error}") from error
    raise InvalidOperatorError(
        f"{where}state={schema!r} declares no columns; give a pyarrow.Schema, a StructType, or a string such as "
        '"total double, n long".'
    )


def _any_type(kind: Any, where: str) -> pa.DataType:
    if isinstance(kind, str):
        kind = T._parse_datatype_string(kind)
    if isinstance(kind, T.DataType):
        return columns.arrow_type(kind)
    if isinstance(kind, pa.DataType):
        try:
            return normalized_type("result", kind)
        except StateStoreError as error:
            raise InvalidOperatorError(f"{where}{kind}: {error}") from error
    raise InvalidOperatorError(
        f"{where}{kind!r} is not a type; give an Arrow or Spark type, or a string such as 'double'."
    )


AGGREGATE_OUTPUT_MODES = ("update", "append", "complete")
GroupingKey: TypeAlias = str | Window | SessionWindow


def aggregate(
    df: DataFrame,
    *,
    by: GroupingKey | Sequence[GroupingKey],
    operator: str,
    output_mode: str = "update",
    num_partitions: int | None = None,
    partial_aggregation: bool | None = None,
    index: str | Sequence[str] = (),
    event_time: str | None = None,
    exact_windows: bool = False,
    **aggregations: AggregateFunction,
) -> DataFrame:
    """Keep running aggregates of a stream by key; the state is in the state store.

    The counterpart in Spark is ``df.groupBy(...).agg(...)`` on a stream. The result is an ordinary streaming DataFrame
    with the keys (windows as Spark names them) and the outputs. It goes to any sink with ``outputMode("append")`` or
    ``("update")``.

    Arguments:

    - ``df``: a streaming DataFrame.
    - ``by``: the key column or columns; all nulls form one key. One of the keys may be a ``window(...)`` or a
      ``session_window(...)`` of ``spark_bridge.functions``. ``[]`` aggregates all rows into one, which every batch
      emits, also one without rows (except where an output is a ``merge``). Its state has one partition, and in queries
      the key column ``all_rows``, which is true.
    - ``operator``: the name of this state in the checkpoint and in queries.
    - ``output_mode``: which rows a micro-batch emits. "update": one row per key that the batch touched (of sessions,
      those that rows of the batch belong to). "append": each window once, when the watermark closes it. "complete": all
      keys. With a watermark on the event time, late rows are dropped, and closed windows are removed from the state, as
      in Spark; in "complete" they stay. If a key is a session window, that key must have the watermark.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.
    - ``partial_aggregation``: whether rows are aggregated before the shuffle as well. This pays if few keys have
      most of the rows, or if the network is slow. Otherwise the second pass through Python costs more than it saves, so
      it is off by default, except with ``by=[]``.
    - ``index``: the column or columns, outputs or keys, by whose values ``find``, ``where=`` and SQL look rows up. Each
      has an index, which changes in the same commit as the rows. It costs time and space, see "Find keys by another
      column".
    - ``event_time``: the column that horizons are of, which must have a watermark. Only with
      ``S.count().rolling(...)`` and the like, which then all outputs must have. The result has this column, with the
      time of the key's newest row; all horizons are as of it. Late rows count as long as a horizon has their time.
      The watermark expires a key that no horizon has rows of.
    - ``exact_windows``: horizons begin exactly, not at a multiple of their hop. The state of a key then grows with its
      rows in the longest horizon, and is written whole every few rows of the key.
    - every other keyword names an output column and gives its function, such as ``n=S.count()``.

    Raises ``InvalidOperatorError`` for every mistake that the DataFrame and the arguments show.
    """
    indexed = _indexed_columns(index)
    _check_arguments(df, aggregations, output_mode)
    if indexed and any(function.horizons for function in aggregations.values()):
        raise InvalidOperatorError(
            f"index={index!r} with horizons: their values change with time, and no index can have them. Leave index= "
            "out, or add an aggregate of the same rows without horizons, and index that one."
        )
    keys = _keys_of(by)
    if keys.is_global:
        if num_partitions not in (None, 1):
            raise InvalidOperatorError(
                f"num_partitions={num_partitions!r}: by=[] makes one row of all, which is in one partition."
            )
        num_partitions = 1
        partial_aggregation = partial_aggregation is not False
    partitions, key_groups = map_in_arrow.state_layout(operator, num_partitions, df)
    marked = columns.watermark_columns(df.schema)
    rolling = _rolling(df, aggregations, event_time, exact_windows, output_mode)
    outputs = [output_of(df.schema, n, f, marked[0] if len(marked) == 1 else None) for n, f in aggregations.items()]
    aggregator = Aggregator(outputs)
    _check_keys(df, keys, aggregator)

    if isinstance(keys.window, SessionWindow) and not isinstance(keys.window.gap, str):
        # The gap may refer to any column of the DataFrame, also as ``df.gap``: what follows renames the columns.
        df = df.select("*", _checked_gap(df, keys.window.gap))
    if output_mode == "append" and marked:
        df = map_in_arrow.with_ticks(df, operator)
    rows = _windowed(df, keys, aggregator, () if event_time is None else (event_time,))
    with map_in_arrow.refusing(operator):
        if rolling is None:
            declared = _declared(rows, keys, aggregator, output_mode, indexed)
        else:
            declared = _declared_rolling(rows, keys, aggregator, rolling, str(event_time))
        spec = OperatorSpec(
            operator, partitions, declared.schema.to_json(), kind=declared.kind, uses_time=declared.uses_time
        )

    prepared, logic = rows, declared.logic
    if partial_aggregation:
        if not isinstance(logic, AggregateLogic):
            raise InvalidOperatorError(
                "partial_aggregation=True does not go with session windows or horizons: which rows are late is known "
                "only where the state is. Leave it out."
            )
        prepared = aggregated_ahead(prepared, logic)
        logic = replace(logic, is_partial=True)
    results = declared.results if declared.results is not None else pa.schema(aggregator.result_fields)
    output = T.StructType([*(rows.schema[k] for k in keys.emitted), *columns.spark_struct(results).fields])
    routing = map_in_arrow.KeyRouting(declared.stored, partitions, key_groups)
    stated = map_in_arrow.DeclaredOperator(spec, aggregator=aggregator)
    return map_in_arrow.stateful_operator(prepared, stated, routing, logic, output, declared.lag_ms)


@dataclass(frozen=True)
class _Keys:
    """Grouping keys in the user's order, and the window among them, if there is one."""

    names: tuple[str, ...]
    window: Window | SessionWindow | None
    is_global: bool = False

    @property
    def emitted(self) -> tuple[str, ...]:
        """Return the keys that are columns of the output."""
        return () if self.is_global else self.names

    @property
    def columns(self) -> list[str]:
        """Return the keys that are columns of the DataFrame."""
        return [n for n in self.names if self.window is None or n != self.window.name]


@dataclass(frozen=True)
class _Declared:
    """The state of the operator: its kind, its schema, the key columns in stored order, and the logic of its tasks.

    ``lag_ms`` is how far behind the watermark of the query rows may be. ``results`` are the columns of the output after
    the keys, by default the results of the aggregator.
    """

    kind: str
    schema: OperatorSchema
    stored: list[str]
    logic: AggregateLogic | SessionLogic | RollingLogic
    uses_time: bool
    lag_ms: int
    results: pa.Schema | None = None


def _keys_of(by: GroupingKey | Sequence[GroupingKey]) -> _Keys:
    if not (keys := as_list(by)):
        return _Keys((ALL_ROWS_KEY,), None, is_global=True)
    windows = [k for k in keys if isinstance(k, (Window, SessionWindow))]
    if len(windows) > 1:
        raise InvalidOperatorError(f"by= has {len(windows)} windows; there can be one: put one operator after another.")
    for key in keys:
        if not isinstance(key, (str, Window, SessionWindow)):
            raise InvalidOperatorError(
                f"by={key!r} is not a key; give column names, S.window(...) or S.session_window(...) of "
                "spark_bridge.functions."
            )
    return _Keys(tuple(k if isinstance(k, str) else k.name for k in keys), windows[0] if windows else None)


def _check_arguments(df: DataFrame, aggregations: dict[str, AggregateFunction], output_mode: str) -> None:
    if not df.isStreaming:
        raise InvalidOperatorError(
            "aggregate takes a streaming DataFrame (spark.readStream); for a batch DataFrame use "
            "df.groupBy(...).agg(...)."
        )
    if output_mode not in AGGREGATE_OUTPUT_MODES:
        raise InvalidOperatorError(
            f'output_mode={output_mode!r} is not one of "update" (keys touched in the batch), "append" '
            '(windows when they close), "complete" (all keys).'
        )
    if not aggregations:
        raise InvalidOperatorError("aggregate needs at least one output, for instance n=S.count().")
    for name, function in aggregations.items():
        if not isinstance(function, AggregateFunction):
            raise InvalidOperatorError(
                f"{name}={function!r} is not an aggregate function of the state store; use spark_bridge.functions, "
                f"for instance {name}=S.count()."
            )


def _indexed_columns(index: str | Sequence[str]) -> tuple[str, ...]:
    names = as_list(index)
    if not all(isinstance(name, str) for name in names):
        raise InvalidOperatorError(
            f'index={index!r} must name the columns to index, as index="merchant". An output cannot be called index.'
        )
    if len(set(names)) < len(names):
        raise InvalidOperatorError(f"index={index!r} names a column twice.")
    return tuple(names)


def _indexed_fields(names: Sequence[str], keys: pa.Schema, aggregator: Aggregator) -> list[pa.Field]:
    """Return the columns to index. Raises ``InvalidOperatorError`` for a column that can have no index."""
    fields = {field.name: field for field in [*keys, *aggregator.result_fields]}
    of_user = {output.name for output in aggregator.outputs if output.user is not None}
    for name in names:
        if name not in fields:
            raise InvalidOperatorError(
                f"index={name!r}: the operator has no such column; it has {', '.join(map(repr, fields))}."
            )
        if pa.types.is_nested(fields[name].type) or name in of_user:
            what = "the output of a merge" if name in of_user else str(fields[name].type)
            raise InvalidOperatorError(
                f"index={name!r}: the column is {what}, which can have no index. Index a column with plain values, for "
                'instance one more output S.last("merchant").'
            )
    return [fields[name] for name in names]


def _check_keys(df: DataFrame, keys: _Keys, aggregator: Aggregator) -> None:
    if keys.is_global and ALL_ROWS_KEY in aggregator.inputs:
        raise InvalidOperatorError(
            f"{ALL_ROWS_KEY!r} is the key column of by=[] and an input as well: rename the input."
        )
    if not keys.is_global and (keys.columns or keys.window is None):
        columns.check_keys(df.schema, keys.columns)
    for output in aggregator.outputs:
        if output.name in keys.names:
            raise InvalidOperatorError(f"Output {output.name!r} has the name of a key column; choose another name.")
    if keys.window is None:
        return
    columns.check_time_window(df.sparkSession, df.schema, keys.window)
    if len(set(keys.names)) != len(keys.names) or keys.window.name in aggregator.inputs:
        raise InvalidOperatorError(
            f"The window is called {keys.window.name!r}, as another column that is used; give it a different name, for "
            f'instance S.window(...).alias("{keys.window.name}_of_event").'
        )
    if isinstance(keys.window, SessionWindow) and not keys.columns:
        raise InvalidOperatorError("by= has a session window alone; sessions need another key, whose rows they are.")


def _windowed(df: DataFrame, keys: _Keys, aggregator: Aggregator, more: Sequence[str]) -> DataFrame:
    """Return the needed columns, and the window of each row: a row for each window that contains it."""
    rows, by_name = map_in_arrow.columns_by_name(df)
    if keys.is_global:
        return rows.select(F.lit(True).alias(ALL_ROWS_KEY), *(by_name[name].alias(name) for name in aggregator.inputs))
    inputs = [by_name[name].alias(name) for name in dict.fromkeys([*keys.columns, *aggregator.inputs, *more])]
    if keys.window is None:
        return rows.select(*inputs)
    window = keys.window
    if isinstance(window, SessionWindow) and SESSION_GAP in by_name:
        window = replace(window, gap=by_name[SESSION_GAP])
    try:
        return rows.select(columns.window_column(window, by_name[window.time_column]), *inputs)
    except (AnalysisException, IllegalArgumentException) as error:
        raise InvalidOperatorError(f"by={window!r}: Spark has no such windows: {error}") from error


SESSION_GAP = f"{RESERVED_PREFIX}session_gap"
"""The column of a session window's gap, if each row has its own."""


def _checked_gap(df: DataFrame, gap: Column) -> Column:
    try:
        df.select(F.session_window(F.current_timestamp(), gap))
    except AnalysisException as error:
        raise InvalidOperatorError(
            f"S.session_window: the gap {gap} must be a column of durations such as '10 minutes': {error}"
        ) from error
    # PySpark 3.5 has no type for a column of intervals.
    return gap.cast("string").alias(SESSION_GAP)


def _rolling(
    df: DataFrame, aggregations: dict[str, AggregateFunction], event_time: str | None, exact: bool, output_mode: str
) -> Rolling | None:
    """Return the horizons of the outputs, None if no output has one."""
    plain = [name for name, function in aggregations.items() if not function.horizons]
    if len(plain) == len(aggregations):
        if event_time is not None or exact:
            raise InvalidOperatorError(
                "event_time= and exact_windows= are for horizons, and no output has one: give S.count().rolling("
                "'10 minutes'), or leave them out."
            )
        return None
    if plain:
        raise InvalidOperatorError(
            f"Of the outputs, {', '.join(plain)} have no horizon and others have one: give all of them .rolling(...), "
            "or make two operators."
        )
    if output_mode != "update":
        raise InvalidOperatorError(
            f"output_mode={output_mode!r}: a horizon has no end at which it could be emitted. Horizons are emitted in "
            '"update" mode: a row for each key that a batch touches.'
        )
    if event_time is not None:
        checked_names("event_time=", [event_time])
    if event_time is None or event_time not in columns.watermark_columns(df.schema):
        marked = [n for n in columns.watermark_columns(df.schema) if isinstance(df.schema[n].dataType, T.TimestampType)]
        which = f"event_time={marked[0]!r}" if marked else "event_time='ts', and df.withWatermark('ts', '1 hour')"
        raise InvalidOperatorError(
            f"event_time={event_time!r}: horizons need the event time of rows, and a watermark on it, which expires "
            f"old rows: give {which}."
        )
    if not isinstance(df.schema[event_time].dataType, T.TimestampType):
        raise InvalidOperatorError(
            f"event_time={event_time!r} has type {df.schema[event_time].dataType.simpleString()}; it must be a "
            "timestamp."
        )
    return declared_rolling({name: function.horizons for name, function in aggregations.items()}, exact=exact)


def _declared_rolling(
    rows: DataFrame, keys: _Keys, aggregator: Aggregator, rolling: Rolling, event_time: str
) -> _Declared:
    if keys.window is not None or keys.is_global:
        raise InvalidOperatorError(
            "Horizons are of keys, and by= has a window or no key: give the key columns, whose last rows are "
            "aggregated."
        )
    types = {name: columns.arrow_type(rows.schema[name].dataType) for name in (*keys.names, event_time)}
    by_key = pa.schema([pa.field(n, types[n]) for n in keys.names])
    results = pa.schema([pa.field(event_time, types[event_time]), *rolling.fields(aggregator.state_schema)])
    names = [*keys.names, *results.names]
    if twice := [n for i, n in enumerate(names) if n in names[:i]]:
        raise InvalidOperatorError(
            f"The output would have two columns {twice[0]!r}: horizons are named <output>_<horizon>, and the event "
            "time is a column too. Rename the output or the key."
        )
    pieces = piece_fields(types[event_time], aggregator.state_schema)
    schema = rolling_schema(by_key, keys.names, pieces, {HORIZONS: rolling.to_text()}, aggregator.zeros)
    logic = RollingLogic(schema, aggregator, rolling, pa.schema([*by_key, *results]), event_time)
    lag_ms = columns.watermark_lag_ms(rows.schema, columns.event_time_of(rows.schema, [event_time]))
    return _Declared(ROLLING_KIND, schema, list(keys.names), logic, True, lag_ms, results)


def _declared(
    rows: DataFrame, keys: _Keys, aggregator: Aggregator, output_mode: str, index: Sequence[str] = ()
) -> _Declared:
    types = {name: columns.arrow_type(rows.schema[name].dataType) for name in keys.names}
    output = pa.schema([*(pa.field(n, types[n]) for n in keys.emitted), *aggregator.result_fields])
    event_time = columns.event_time_of(rows.schema, keys.names)
    if output_mode == "append" and event_time is None:
        raise InvalidOperatorError(
            'output_mode="append" emits a window when the watermark closes it, and no key has a watermark: put '
            "withWatermark on the DataFrame, and a window of that column, or the column itself, into by=."
        )
    if isinstance(keys.window, SessionWindow):
        window = keys.window.name
        if index:
            raise InvalidOperatorError(
                f"index={index!r} with session windows: a key has several sessions, and no index can have them. Leave "
                "index= out, or add an aggregate of the same rows without sessions, and index that one."
            )
        by_key = pa.schema([pa.field(n, types[n]) for n in keys.columns])
        schema = session_schema(by_key, types[window].field(0).type, aggregator.state_schema, aggregator.zeros)
        event_time = columns.session_event_time(rows.schema, keys.names, window, output_mode)
        logic = SessionLogic(schema, aggregator, output, window, output_mode, event_time is not None)
        lag_ms = columns.watermark_lag_ms(rows.schema, event_time)
        return _Declared("session_aggregate", schema, keys.columns, logic, event_time is not None, lag_ms)
    if event_time is not None and isinstance(keys.window, Window) and event_time.column == keys.window.name:
        event_time = replace(event_time, window_us=columns.microseconds(rows.sparkSession, keys.window.duration))
    stored = sorted(keys.names, key=lambda n: event_time is None or n != event_time.column)
    by_key = pa.schema([pa.field(n, types[n]) for n in stored])
    state = StateSchema(by_key, aggregator.state_schema, zeros=aggregator.zeros)
    indexed = _indexed_fields(index, by_key, aggregator)
    operator_schema = aggregate_schema(state, () if stored == list(keys.names) else keys.names, indexed)
    uses_time = event_time is not None and output_mode != "complete"
    # The functions of a user's own aggregate need not handle empty input.
    is_global = keys.is_global and not any(o.user for o in aggregator.outputs)
    rows_logic = AggregateLogic(state, aggregator, output, output_mode, event_time, is_global=is_global)
    lag_ms = columns.watermark_lag_ms(rows.schema, event_time)
    return _Declared("aggregate", operator_schema, stored, rows_logic, uses_time, lag_ms)
