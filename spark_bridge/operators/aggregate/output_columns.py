"""The declared outputs of ``aggregate``, checked against a DataFrame's columns: each becomes an ``Output``."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import types as T

from backends.encoding.schema import StateSchema
from backends.encoding.spark_types import from_spark_type, normalized_type
from backends.exceptions import StateStoreError
from spark_bridge.aggregates.outputs import Output, UserAggregate
from spark_bridge.aggregates.user_aggregate import GROUP_ID
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import AggregateFunction, UserFunctions
from spark_bridge.operators.spark_types import NUMERIC, arrow_type, column_literal, column_type, is_ordered

OF_NUMBERS = ("sum", "mean", "stddev_samp", "stddev_pop", "var_samp", "var_pop")
WITH_ORDER = ("first", "last")


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
        kind = column_type(schema, function.column, where)
    _check_input(function, kind, where)
    by, by_type = _order(schema, function, watermark_column, where)
    arguments = function.arguments
    if function.name == "mean" and isinstance(kind, T.DecimalType):
        arguments = (str(kind.precision), str(kind.scale))
    text = f"{function.name}({','.join(arguments)})" if arguments else function.name
    # Rows can be counted whatever the type of the column is.
    arrow = pa.null() if function.name == "count" else arrow_type(kind)
    return Output(name, text, function.column, by, arrow, by_type, function.columns, max_bytes=function.max_bytes)


def _check_input(function: AggregateFunction, kind: T.DataType, where: str) -> None:
    match function.name:
        case "count":
            is_fine = True
        case "count_if":
            is_fine = isinstance(kind, T.BooleanType)
        case "approx_count_distinct":
            is_fine = is_ordered(kind)  # a map has no hash
        case n if n in OF_NUMBERS:
            is_fine = isinstance(kind, NUMERIC)
        case _:
            is_fine = is_ordered(kind)
    if not is_fine:
        column = function.column if function.column is not None else ", ".join(function.columns)
        remedy = ""
        if function.name in OF_NUMBERS and isinstance(kind, T.StringType):
            # Spark casts, and counts text that is no number as null, or fails at it in ANSI mode: that is for the user
            # to choose.
            cast = f'.withColumn({column!r}, F.col({column_literal(column)}).cast("double"))'
            remedy = f" Say what is meant: {cast} is what Spark does."
        raise InvalidOperatorError(
            f"{where}column {column!r} has type {kind.simpleString()}, which {function.name} does not take.{remedy}"
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
    kind = column_type(schema, by, f"{where}by=")
    if not is_ordered(kind):
        raise InvalidOperatorError(f"{where}by={by!r} has type {kind.simpleString()}, which has no order.")
    return by, arrow_type(kind)


def _struct_type(schema: T.StructType, function: AggregateFunction, where: str) -> T.StructType:
    if len(set(function.columns)) != len(function.columns):
        raise InvalidOperatorError(f"{where}a column is named twice in {', '.join(function.columns)}.")
    return T.StructType([T.StructField(c, column_type(schema, c, where)) for c in function.columns])


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


def _state_schema(given: Any, where: str) -> pa.Schema:
    try:
        if isinstance(given, str):
            given = T._parse_datatype_string(given)
        if isinstance(given, T.StructType):
            fields = [pa.field(f.name, from_spark_type(f.dataType.jsonValue())) for f in given.fields]
            return StateSchema(pa.schema([]), pa.schema(fields)).value
        if isinstance(given, pa.Schema):
            return StateSchema(pa.schema([]), pa.schema([pa.field(f.name, f.type) for f in given])).value
    except StateStoreError as error:
        raise InvalidOperatorError(f"{where}state={given!r}: {error}") from error
    raise InvalidOperatorError(
        f"{where}state={given!r} declares no columns; give a pyarrow.Schema, a StructType, or text such as "
        '"total double, n long".'
    )


def _any_type(given: Any, where: str) -> pa.DataType:
    if isinstance(given, str):
        given = T._parse_datatype_string(given)
    if isinstance(given, T.DataType):
        return arrow_type(given)
    if isinstance(given, pa.DataType):
        try:
            return normalized_type("result", given)
        except StateStoreError as error:
            raise InvalidOperatorError(f"{where}{given}: {error}") from error
    raise InvalidOperatorError(f"{where}{given!r} is no type; give an Arrow or Spark type, or text such as 'double'.")
