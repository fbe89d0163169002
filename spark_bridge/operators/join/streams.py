"""Checks two streams that are to be joined, finds their event times, and brings their rows into shared columns."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.conf import key_group_count, partition_count
from spark_bridge.operators.declared_operators import check_operator_name, declare
from spark_bridge.operators.join.join_output import Apply
from spark_bridge.operators.join.join_task import JoinLogic
from spark_bridge.operators.join.sides import (
    ANTI,
    FULL,
    JOIN_TYPES,
    LEFT_OUTER,
    LEFT_ROW,
    RIGHT_OUTER,
    RIGHT_ROW,
    SEMI,
    SIDE,
    Bounds,
    slot_name,
)
from spark_bridge.operators.key_columns import check_keys
from spark_bridge.operators.map_in_arrow import KeyRouting, columns_by_name, map_in_arrow
from spark_bridge.operators.spark_types import arrow_type, column_literal, column_type
from spark_bridge.operators.ticks import with_ticks
from spark_bridge.operators.watermark_columns import event_time_of, watermark_columns, watermark_lag_ms
from spark_bridge.operators.windows import microseconds
from spark_bridge.state_format.layouts import LEFT, RIGHT
from spark_bridge.task.state_task import StateTask
from spark_bridge.task.watermark import EventTime

ONLY = T.StructField("present", T.BooleanType())
"""The column that is stored of a side that has nothing but the key."""


@dataclass(frozen=True)
class Placing:
    """The name of the operator, and the numbers of its partitions and key groups."""

    operator: str
    partitions: int
    key_groups: int


def placing_of(left: DataFrame, right: DataFrame, operator: str, num_partitions: int | None) -> Placing:
    """Return where the state of the operator lies; raises ``InvalidOperatorError`` for a wrong name or number."""
    check_operator_name(operator, left)
    check_operator_name(operator, right)
    key_groups = key_group_count(left)
    return Placing(operator, partition_count(left, num_partitions, key_groups), key_groups)


def joined_stream(
    left: DataFrame,
    right: DataFrame,
    keys: list[str],
    others: list[list[T.StructField]],
    logic: JoinLogic,
    given: T.StructType,
    placing: Placing,
) -> DataFrame:
    """Return the output of the work ``logic`` over both sides: the columns ``given``."""
    uses_time = logic.bounds.uses_time
    spec = OperatorSpec(placing.operator, placing.partitions, logic.schema.to_json(), kind="join", uses_time=uses_time)
    both = _both(left, right, keys, others, logic)
    if any(side.keeps_unmatched for side in logic.sides):
        both = with_ticks(both)
    n, groups, lag_ms = placing.partitions, placing.key_groups, lag_of(left, right, logic.bounds)
    task = StateTask(placing.operator, n, groups, tuple(keys), logic, uses_time, lag_ms)
    return map_in_arrow(both, task.run, declare(spec), given, KeyRouting(keys, n, groups))


# -- what is refused ---------------------------------------------------------------------------


def check_frames(left: DataFrame, right: DataFrame, how: str, apply: Apply | None, output: object) -> None:
    """Raise ``InvalidOperatorError`` for DataFrames that cannot be joined, and arguments that do not go together."""
    for name, df in ((LEFT, left), (RIGHT, right)):
        if not df.isStreaming:
            raise InvalidOperatorError(
                f"{name}= is a batch DataFrame; join takes two streaming DataFrames (spark.readStream). A stream is "
                "joined with a batch DataFrame by Spark's own df.join(...), which needs no state."
            )
        if len(set(df.columns)) != len(df.columns):
            raise InvalidOperatorError(f"{name}= has two columns of one name: {', '.join(df.columns)}.")
    if how not in JOIN_TYPES:
        raise InvalidOperatorError(f"how={how!r} is none of join's: {', '.join(map(repr, JOIN_TYPES))}.")
    if (apply is None) != (output is None):
        raise InvalidOperatorError(
            "apply= and output= go together: apply gives rows, and output says which columns they have, such as "
            'output="user long, amount double".'
        )
    if apply is not None and how in (SEMI, ANTI):
        raise InvalidOperatorError(
            f"apply= takes matching rows, and how={how!r} gives rows of the left side alone: use mapInArrow after it."
        )


def check_columns(left: DataFrame, right: DataFrame, keys: list[str], how: str) -> None:
    """Raise ``InvalidOperatorError`` for keys that the sides do not share, and other columns of one name."""
    for name, df in ((LEFT, left), (RIGHT, right)):
        try:
            check_keys(df.schema, keys)
        except InvalidOperatorError as error:
            raise InvalidOperatorError(f"on={keys!r}, {name}=: {error}") from error
    for key in keys:
        of_left, of_right = left.schema[key].dataType, right.schema[key].dataType
        if of_left != of_right:
            raise InvalidOperatorError(
                f"Key column {key!r} has type {of_left.simpleString()} on the left side and {of_right.simpleString()} "
                "on the right side: cast one of them."
            )
    if how in (SEMI, ANTI):
        return
    both = [c for c in right.columns if c not in keys and c in left.columns]
    if both:
        raise InvalidOperatorError(
            f"Both sides have columns named {', '.join(both)} that are no keys: rename them on one side "
            "(withColumnRenamed), or drop them."
        )


def refuse_or_warn(sides: Sequence[str], operator: str, how: str) -> None:
    """Refuse a join whose rows without a match would never come; warn of the sides that keep all rows."""
    needed = {LEFT: (LEFT_OUTER, FULL, SEMI, ANTI), RIGHT: (RIGHT_OUTER, FULL)}
    bounds = {LEFT: "upper", RIGHT: "lower"}
    for side in sides:
        if how in needed[side]:
            raise InvalidOperatorError(
                f"how={how!r} needs to know when a row of the {side} side can find no match any more: put "
                f"withWatermark on both sides, and give within= with its {bounds[side]} bound, such as "
                'within=("0 seconds", "1 hour"); or put the watermark on a key column, such as a window.'
            )
    whose = f"the {sides[0]} side" if len(sides) == 1 else "both sides"
    warnings.warn(
        f"join {operator!r} keeps all rows of {whose} for good, so that its state grows without end. Put "
        'withWatermark on both sides and give within= with both bounds, such as within=("0 seconds", "1 hour").',
        stacklevel=3,
    )


# -- time --------------------------------------------------------------------------------------


def bounds_of(
    left: DataFrame,
    right: DataFrame,
    keys: list[str],
    within: tuple[str | None, str | None] | None,
    left_time: str | None,
    right_time: str | None,
) -> Bounds:
    """Return the times by which rows match and are late; raises ``InvalidOperatorError`` where they are not known."""
    late = event_times(left, right, left_time, right_time)
    in_key = next((t for t in late if t is not None and t.column in keys), None)
    if within is None:
        if left_time is not None or right_time is not None:
            raise InvalidOperatorError("left_time= and right_time= are what within= is about: give within= as well.")
        if in_key is None:
            return Bounds(None, None, late[0], late[1])
        # The times of matching rows are equal.
        return Bounds(in_key, in_key, late[0], late[1], in_key=True)
    if in_key is not None:
        raise InvalidOperatorError(
            f"The key {in_key.column!r} has the watermark, so that rows match at equal times only, and within= says "
            f"nothing more: leave one of them out."
        )
    lower, upper = _durations(left, within)
    of_left, of_right = times_of_both(left, right, late, f"within={within!r}")
    return Bounds(of_left, of_right, of_left, of_right, lower, upper)


def event_times(
    left: DataFrame, right: DataFrame, left_time: str | None, right_time: str | None
) -> list[EventTime | None]:
    """Return the columns of both sides that have the watermark: the given ones, if a side has several."""
    return [_event_time(df, name, time) for df, name, time in ((left, LEFT, left_time), (right, RIGHT, right_time))]


def times_of_both(
    left: DataFrame, right: DataFrame, late: list[EventTime | None], needing: str
) -> tuple[EventTime, EventTime]:
    """Return the columns of time of both sides; raises if there is none, or if they cannot be compared."""
    times = []
    for time, name, df in ((late[0], LEFT, left), (late[1], RIGHT, right)):
        if time is None or time.is_window:
            raise InvalidOperatorError(
                f"{needing} needs a watermark on a time column of the {name} side: put "
                f'{name}.withWatermark("...", "10 minutes") on it. Its columns are {", ".join(df.columns)}.'
            )
        times.append(time)
    kinds = [df.schema[time.column].dataType for df, time in zip((left, right), times, strict=True)]
    if kinds[0] != kinds[1]:
        raise InvalidOperatorError(
            f"{times[0].column!r} is a {kinds[0].simpleString()} and {times[1].column!r} a {kinds[1].simpleString()}: "
            "cast one of them, then put withWatermark on it."
        )
    return times[0], times[1]


def _event_time(df: DataFrame, side: str, given: str | None) -> EventTime | None:
    """Return the column of a side that has the watermark: the given one of several."""
    if given is None:
        return event_time_of(df.schema, df.columns)
    column_type(df.schema, given, f"{side}_time=")
    if given not in watermark_columns(df.schema):
        raise InvalidOperatorError(
            f"{side}_time={given!r} has no watermark, so that no row would ever leave the state: put "
            f'{side}.withWatermark({column_literal(given)}, "10 minutes") on it.'
        )
    return event_time_of(df.schema, [given])


def _durations(df: DataFrame, within: tuple[str | None, str | None]) -> tuple[int | None, int | None]:
    wrong = (
        f"within={within!r} must be two durations, from which to which the right row may be later than the left row, "
        'such as ("0 seconds", "1 hour"); one of them may be None.'
    )
    if isinstance(within, str) or len(within) != 2 or all(d is None for d in within):
        raise InvalidOperatorError(wrong)
    lower, upper = (None if d is None else microseconds(df.sparkSession, d) for d in within)
    if lower is not None and upper is not None and lower > upper:
        raise InvalidOperatorError(f"{wrong} The first is greater than the second, so that nothing would match.")
    return lower, upper


def lag_of(left: DataFrame, right: DataFrame, bounds: Bounds) -> int:
    """Return how far behind the watermark of the query rows of the sides may be, in ms; both sides wait for it."""
    return max(watermark_lag_ms(left.schema, bounds.left_late), watermark_lag_ms(right.schema, bounds.right_late))


# -- columns -----------------------------------------------------------------------------------


def other_fields(left: DataFrame, right: DataFrame, keys: list[str]) -> list[list[T.StructField]]:
    """Return the columns of both sides that are no keys."""
    return [[f for f in df.schema.fields if f.name not in keys] or [ONLY] for df in (left, right)]


def _both(
    left: DataFrame, right: DataFrame, keys: list[str], others: list[list[T.StructField]], logic: JoinLogic
) -> DataFrame:
    """Return the rows of both sides in shared columns: the side, the keys, and a column for each slot."""
    types: dict[int, T.DataType] = {}
    for fields, side in zip(others, logic.sides, strict=True):
        types.update((slot, f.dataType) for f, slot in zip(fields, side.slots, strict=True) if slot not in types)
    frames = []
    for df, code, fields, side in zip((left, right), (LEFT_ROW, RIGHT_ROW), others, logic.sides, strict=True):
        rows, by_name = columns_by_name(df)
        own: dict[int, Column] = {
            slot: F.lit(True) if f is ONLY else by_name[f.name] for f, slot in zip(fields, side.slots, strict=True)
        }
        columns = [own.get(i, F.lit(None).cast(types[i])).alias(slot_name(i)) for i in range(len(types))]
        frames.append(
            rows.select(F.lit(code).cast("byte").alias(SIDE), *(by_name[key].alias(key) for key in keys), *columns)
        )
    return frames[0].union(frames[1])


def arrow_schema(fields: Sequence[T.StructField]) -> pa.Schema:
    """Return the columns as Arrow has them."""
    return pa.schema([pa.field(f.name, arrow_type(f.dataType)) for f in fields])


def output_struct(left: DataFrame, right: DataFrame, keys: list[str], how: str) -> T.StructType:
    """Return the columns of the output, all nullable, and without the watermarks of the sides."""
    fields = [left.schema[k] for k in keys] + [f for f in left.schema.fields if f.name not in keys]
    if how not in (SEMI, ANTI):
        fields += [f for f in right.schema.fields if f.name not in keys]
    return T.StructType([T.StructField(f.name, f.dataType) for f in fields])


def struct_of_output(output: str | T.StructType) -> T.StructType:
    """Return the columns that ``output=`` names; raises ``InvalidOperatorError`` for a text that is no schema."""
    if isinstance(output, T.StructType):
        return output
    try:
        parsed = T._parse_datatype_string(output)
    except Exception as error:
        raise InvalidOperatorError(f'output={output!r} is no schema; give one such as "user long, n int".') from error
    if not isinstance(parsed, T.StructType):
        raise InvalidOperatorError(f'output={output!r} has no names; give a schema such as "user long, n int".')
    return parsed
