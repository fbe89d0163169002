"""``join`` and ``join_asof``: rows of two streams that have one key and are close in time, as a streaming DataFrame."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from coordinator_actor.messages import OperatorSpec
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import checked_names
from spark_bridge.operators import columns, join_sides, map_in_arrow
from spark_bridge.operators.asof_join import BACKWARD, DIRECTIONS, Asof, asof_logic
from spark_bridge.operators.join_task import Apply, JoinLogic, join_logic
from spark_bridge.state_format.layouts import LEFT, RIGHT
from spark_bridge.task.state_task import EventTime

# Checks the two streams of a join, finds their event times, and brings their rows into shared columns.


ONLY = T.StructField("present", T.BooleanType())
"""The stored column of a side without columns other than the key."""


LogicOfColumns: TypeAlias = Callable[[pa.Schema, tuple[pa.Schema, pa.Schema], pa.Schema], JoinLogic]
"""Returns the work of a join for its keys, the other columns of both sides, and the columns of the output."""


def joined_stream(
    left: DataFrame,
    right: DataFrame,
    keys: list[str],
    others: list[list[T.StructField]],
    output: T.StructType,
    operator: str,
    layout: tuple[int, int],
    logic_of: LogicOfColumns,
) -> DataFrame:
    """Return the output of a join of both sides: the columns ``output``; for ``layout`` see ``state_layout``."""
    with map_in_arrow.refusing(operator):
        of_keys, of_left, of_right = map(columns.arrow_schema, ([left.schema[key] for key in keys], *others))
        logic = logic_of(of_keys, (of_left, of_right), columns.arrow_schema(output.fields))
    spec = OperatorSpec(operator, layout[0], logic.schema.to_json(), kind="join", uses_time=logic.bounds.uses_time)
    both = _both(left, right, keys, others, logic)
    if any(side.keeps_unmatched for side in logic.sides):
        both = map_in_arrow.with_ticks(both, operator)
    declared = map_in_arrow.DeclaredOperator(spec, sides=logic.sides if type(logic) is JoinLogic else ())
    return map_in_arrow.stateful_operator(
        both, declared, map_in_arrow.KeyRouting(keys, *layout), logic, output, lag_of(left, right, logic.bounds)
    )


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
    if how not in join_sides.JOIN_TYPES:
        raise InvalidOperatorError(f"how={how!r} is not one of {', '.join(map(repr, join_sides.JOIN_TYPES))}.")
    if (apply is None) != (output is None):
        raise InvalidOperatorError(
            "apply= and output= go together: apply returns rows, and output declares their columns, such as "
            'output="user long, amount double".'
        )
    if apply is not None and how in (join_sides.SEMI, join_sides.ANTI):
        raise InvalidOperatorError(
            f"apply= takes matching rows, and how={how!r} emits rows of the left side alone: use mapInArrow after it."
        )


def check_columns(left: DataFrame, right: DataFrame, keys: list[str], how: str) -> None:
    """Raise ``InvalidOperatorError`` for keys that the sides do not share, and other columns of one name."""
    for name, df in ((LEFT, left), (RIGHT, right)):
        try:
            columns.check_keys(df.schema, keys)
        except InvalidOperatorError as error:
            raise InvalidOperatorError(f"on={keys!r}, {name}=: {error}") from error
    for key in keys:
        of_left, of_right = left.schema[key].dataType, right.schema[key].dataType
        if of_left != of_right:
            raise InvalidOperatorError(
                f"Key column {key!r} has type {of_left.simpleString()} on the left side and {of_right.simpleString()} "
                "on the right side: cast one of them."
            )
    if how in (join_sides.SEMI, join_sides.ANTI):
        return
    if both := [c for c in right.columns if c not in keys and c in left.columns]:
        raise InvalidOperatorError(
            f"Both sides have columns named {', '.join(both)} that are not keys: rename them on one side "
            "(withColumnRenamed), or drop them."
        )


def refuse_or_warn(sides: Sequence[str], operator: str, how: str) -> None:
    """Refuse a join whose unmatched rows would never be emitted; warn of the sides that keep all rows."""
    needed = {
        LEFT: (join_sides.LEFT_OUTER, join_sides.FULL, join_sides.SEMI, join_sides.ANTI),
        RIGHT: (join_sides.RIGHT_OUTER, join_sides.FULL),
    }
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
        f"join {operator!r} keeps all rows of {whose} for ever, so that its state grows without end. Put "
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
) -> join_sides.Bounds:
    """Return the times that decide matches and lateness; raises ``InvalidOperatorError`` if they are not known."""
    late = [_event_time(left, LEFT, left_time), _event_time(right, RIGHT, right_time)]
    in_key = next((t for t in late if t is not None and t.column in keys), None)
    if within is None:
        if left_time is not None or right_time is not None:
            raise InvalidOperatorError("left_time= and right_time= are what within= is about: give within= as well.")
        if in_key is None:
            return join_sides.Bounds(None, None, late[0], late[1])
        # The times of matching rows are equal.
        return join_sides.Bounds(in_key, in_key, late[0], late[1], in_key=True)
    if in_key is not None:
        raise InvalidOperatorError(
            f"The key {in_key.column!r} has the watermark, so that rows match at equal times only, and within= says "
            f"nothing more: leave one of them out."
        )
    lower, upper = _durations(left, within)
    of_left, of_right = times_of_both(left, right, late, f"within={within!r}")
    return join_sides.Bounds(of_left, of_right, of_left, of_right, lower, upper)


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


def _event_time(df: DataFrame, side: str, column: str | None) -> EventTime | None:
    """Return the column of a side that has the watermark: the given one of several."""
    if column is None:
        return columns.event_time_of(df.schema, df.columns)
    checked_names(f"{side}_time=", [column])
    columns.column_type(df.schema, column, f"{side}_time=")
    if column not in columns.watermark_columns(df.schema):
        raise InvalidOperatorError(
            f"{side}_time={column!r} has no watermark, so that no row would ever leave the state: put "
            f'{side}.withWatermark({columns.column_literal(column)}, "10 minutes") on it.'
        )
    return columns.event_time_of(df.schema, [column])


def _durations(df: DataFrame, within: tuple[str | None, str | None]) -> tuple[int | None, int | None]:
    wrong = (
        f"within={within!r} must be two durations: the least and the most that the right row may be later than the "
        'left row, such as ("0 seconds", "1 hour"); one of them may be None.'
    )
    if isinstance(within, str) or len(within) != 2 or all(d is None for d in within):
        raise InvalidOperatorError(wrong)
    lower, upper = (None if d is None else columns.microseconds(df.sparkSession, d) for d in within)
    if lower is not None and upper is not None and lower > upper:
        raise InvalidOperatorError(f"{wrong} The first is greater than the second, so that nothing would match.")
    return lower, upper


def lag_of(left: DataFrame, right: DataFrame, bounds: join_sides.Bounds) -> int:
    """Return how far behind the watermark of the query rows of the sides may be, in ms; both sides wait for it."""
    return max(
        columns.watermark_lag_ms(left.schema, bounds.left_late),
        columns.watermark_lag_ms(right.schema, bounds.right_late),
    )


# -- columns -----------------------------------------------------------------------------------


def other_fields(left: DataFrame, right: DataFrame, keys: list[str]) -> list[list[T.StructField]]:
    """Return the columns of both sides that are not keys."""
    return [[f for f in df.schema.fields if f.name not in keys] or [ONLY] for df in (left, right)]


def _both(
    left: DataFrame, right: DataFrame, keys: list[str], others: list[list[T.StructField]], logic: JoinLogic
) -> DataFrame:
    """Return the rows of both sides in shared columns: the side, the keys, and a column for each slot."""
    types: dict[int, T.DataType] = {}
    for fields, side in zip(others, logic.sides, strict=True):
        types.update((slot, f.dataType) for f, slot in zip(fields, side.slots, strict=True) if slot not in types)
    frames = []
    codes = (join_sides.LEFT_ROW, join_sides.RIGHT_ROW)
    for df, code, fields, side in zip((left, right), codes, others, logic.sides, strict=True):
        rows, by_name = map_in_arrow.columns_by_name(df)
        own: dict[int, Column] = {
            slot: F.lit(True) if f is ONLY else by_name[f.name] for f, slot in zip(fields, side.slots, strict=True)
        }
        slots = [own.get(i, F.lit(None).cast(types[i])).alias(join_sides.slot_name(i)) for i in range(len(types))]
        key_columns = [by_name[key].alias(key) for key in keys]
        frames.append(rows.select(F.lit(code).cast("byte").alias(join_sides.SIDE), *key_columns, *slots))
    return frames[0].union(frames[1])


def output_struct(left: DataFrame, right: DataFrame, keys: list[str], how: str) -> T.StructType:
    """Return the columns of the output, all nullable, and without the watermarks of the sides."""
    fields = [left.schema[k] for k in keys] + [f for f in left.schema.fields if f.name not in keys]
    if how not in (join_sides.SEMI, join_sides.ANTI):
        fields += [f for f in right.schema.fields if f.name not in keys]
    return T.StructType([T.StructField(f.name, f.dataType) for f in fields])


def struct_of_output(output: str | T.StructType) -> T.StructType:
    """Return the columns that ``output=`` names; raises ``InvalidOperatorError`` for a string that is not a schema."""
    if isinstance(output, T.StructType):
        return output
    try:
        parsed = T._parse_datatype_string(output)
    except Exception as error:
        raise InvalidOperatorError(
            f'output={output!r} is not a schema; give one such as "user long, n int".'
        ) from error
    if not isinstance(parsed, T.StructType):
        raise InvalidOperatorError(f'output={output!r} has no names; give a schema such as "user long, n int".')
    return parsed


# The event time of a join's output: which column has it, and how far its rows may be behind the query's watermark.
#
# A row that has waited comes when the watermark is long after its time. So the column says by how much, and operators
# after the join take the watermark so much earlier. Spark's counterpart is the watermark that an operator hands on to
# the next one (``WatermarkPropagator``), which Spark knows for its own operators only.


@dataclass(frozen=True)
class SideTime:
    """A side's column of event time, and how long its rows wait at most, in ms; None: for ever."""

    field: T.StructField
    waits_ms: int | None


def side_times(
    left: DataFrame, right: DataFrame, bounds: join_sides.Bounds, waits_ms: tuple[int | None, int | None]
) -> list[SideTime]:
    """Return the times of both sides; none if the join has no bounds."""
    if bounds.left is None or bounds.right is None:
        return []
    fields = (left.schema[bounds.left.column], right.schema[bounds.right.column])
    return [SideTime(field, wait) for field, wait in zip(fields, waits_ms, strict=True)]


def timed_output(
    output: T.StructType, column: str | None, times: Sequence[SideTime], lag_ms: int, *, made_by_apply: bool = False
) -> T.StructType:
    """Return the output's columns, ``column`` alone as event time; ``lag_ms`` is that of the joined rows.

    With ``made_by_apply``, any column of the type of the times may be the event time, and has values of one of the
    sides. Raises ``InvalidOperatorError`` for a column that has no event time.
    """
    output = T.StructType([columns.without_event_time(f) for f in output.fields])
    if column is None:
        return output
    named = f"event_time_column={column!r}"
    if column not in output.names:
        raise InvalidOperatorError(
            f"{named}: the output has no such column; it has {', '.join(output.names)}."
            f"{columns.other_case([column], output.names)}"
        )
    if not times:
        raise InvalidOperatorError(
            f"{named} needs to know how long rows wait: put withWatermark on both sides and give within=, or put the "
            "watermark on a key column, such as a window."
        )
    if made_by_apply:
        sources = list(times)
        if output[column].dataType != times[0].field.dataType:
            raise InvalidOperatorError(
                f"{named} has type {output[column].dataType.simpleString()}; the event time of the sides is "
                f"{times[0].field.dataType.simpleString()}."
            )
    else:
        sources = [t for t in times if t.field.name == column]
    if not sources:
        raise InvalidOperatorError(
            f"{named} is not an event time of a side; these are "
            f"{', '.join(dict.fromkeys(t.field.name for t in times))}."
        )
    waits = [t.waits_ms for t in sources if t.waits_ms is not None]
    if len(waits) < len(sources):
        raise InvalidOperatorError(
            f"{named}: rows of that side wait for ever, so that an operator after the join would never be done with a "
            "time. Give both bounds of within=, or tolerance= of join_asof."
        )
    source = sources[0].field
    return T.StructType(
        [columns.with_event_time(f, source, lag_ms + max(waits)) if f.name == column else f for f in output.fields]
    )


def join(
    left: DataFrame,
    right: DataFrame,
    *,
    on: str | Sequence[str],
    operator: str,
    how: str = join_sides.INNER,
    within: tuple[str | None, str | None] | None = None,
    left_time: str | None = None,
    right_time: str | None = None,
    apply: Apply | None = None,
    output: str | T.StructType | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Join the rows of two streams that have the same key and are close enough in time.

    The counterpart in Spark is ``left.join(right, condition, how)`` with both sides streams. The result is an ordinary
    streaming DataFrame with the keys, the other columns of the left side and those of the right side.

    Arguments:

    - ``left``, ``right``: streaming DataFrames. If a side has a watermark, its late rows are dropped.
    - ``on``: the key column or columns, which both sides have, with the same types. Nulls match nothing.
    - ``operator``: the name of this state in the checkpoint and in queries, which show the rows that wait for a match
      as the lists ``left`` and ``right``.
    - ``how``: "inner"; "left", "right" or "full", which also emit the rows of that side or of both that have no match,
      with nulls; "left_semi" or "left_anti", which emit the rows of the left side that have a match or have none. A row
      without a match is emitted once the watermark rules out a match.
    - ``within``: the least and the most that the time of the right row may be later than that of the left row, both
      included, such as ``("0 seconds", "1 hour")``; negative durations mean earlier. None for one means no bound. Both
      sides need a watermark on their time. Rows are removed from the state when the watermark has passed all times
      of a possible match. ``within`` is not needed if the watermark is on a key column; otherwise only an
      inner join can omit it, and keeps all rows for ever.
    - ``left_time``, ``right_time``: the columns that ``within`` compares, by default those with the watermark.
    - ``apply``: a function that makes the output. It takes matching rows of both sides as two ``pyarrow.Table``, row i
      of one with row i of the other; a side without a match has nulls. It returns a table of any number of rows with
      the columns ``output``. It runs in the tasks, may be called several times in a batch, and must return the same for
      the same rows.
    - ``output``: the columns that ``apply`` returns, as a ``StructType`` or in DDL.
    - ``event_time_column``: the output column that is the event time of this project's operators after the join, one
      of the times of the sides; or a column that ``apply`` makes, with times not before those of its input rows. Rows
      of the output are as old as rows wait, which such operators allow for. Without it, the output has no
      watermark.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for every mistake that the DataFrames and the arguments show.
    """
    keys = checked_names("on=", on)
    check_frames(left, right, how, apply, output)
    check_columns(left, right, keys, how)
    layout = map_in_arrow.state_layout(operator, num_partitions, left, right)
    bounds = bounds_of(left, right, keys, within, left_time, right_time)
    kept = [name for name, after in zip((LEFT, RIGHT), bounds.expires_after_us, strict=True) if after is None]
    if kept:
        refuse_or_warn(kept, operator, how)

    others = other_fields(left, right, keys)
    if how in (join_sides.SEMI, join_sides.ANTI):
        times = [t.column for t in (bounds.right, bounds.right_late) if t is not None]
        others[1] = [f for f in others[1] if f.name in times] or [ONLY]
    output_schema = output_struct(left, right, keys, how) if output is None else struct_of_output(output)
    output_schema = timed_output(
        output_schema,
        event_time_column,
        side_times(left, right, bounds, bounds.waits_ms),
        lag_of(left, right, bounds),
        made_by_apply=apply is not None,
    )

    def logic_of(of_keys: pa.Schema, of_sides: tuple[pa.Schema, pa.Schema], emitted: pa.Schema) -> JoinLogic:
        return join_logic(of_keys, of_sides, how, bounds, emitted, apply, (tuple(left.columns), tuple(right.columns)))

    return joined_stream(left, right, keys, others, output_schema, operator, layout, logic_of)


def join_asof(
    left: DataFrame,
    right: DataFrame,
    *,
    on: str | Sequence[str],
    operator: str,
    left_time: str | None = None,
    right_time: str | None = None,
    direction: str = BACKWARD,
    tolerance: str | None = None,
    allow_exact_matches: bool = True,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Give each row of a stream the row of another stream that has the same key and is nearest in time.

    The terms and the results are those of pandas' ``merge_asof`` over all rows that are not late, in any order and any
    batches. A row of the left side is emitted when the watermark settles which row of the right side it gets,
    with nulls if there is none. Right rows of a key at the same time are ordered by their columns.

    Arguments:

    - ``left``, ``right``: streaming DataFrames with a watermark on their time. Late rows are dropped. Rows of the left
      side with a null as key or time are emitted at once, with nulls; such rows of the right side are dropped.
    - ``on``: the key column or columns (pandas: ``by``), which both sides have, with the same types.
    - ``operator``: the name of this state in the checkpoint and in queries, which show the rows that wait as the lists
      ``left`` and ``right``.
    - ``left_time``, ``right_time``: the columns of the times, by default those with the watermark.
    - ``direction``: "backward" takes the last right row at or before the time of the left row, "forward" the first one
      at or after it, "nearest" the nearer of both, and the one before if they are equally near.
    - ``tolerance``: a duration, the greatest difference of the two times. Without it, the state keeps the last row of
      each key of the right side for ever ("backward", "nearest"), and a left row waits until a right row comes after
      it ("forward", "nearest").
    - ``allow_exact_matches``: whether a right row at the same time counts.
    - ``event_time_column``: the output column that is the event time of this project's operators after the join, one
      of the times of the sides. Rows of the output are as old as rows wait, which such operators allow for. Without it,
      the output has no watermark.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for every mistake that the DataFrames and the arguments show.
    """
    keys = checked_names("on=", on)
    check_frames(left, right, join_sides.LEFT_OUTER, None, None)
    if direction not in DIRECTIONS:
        raise InvalidOperatorError(f"direction={direction!r} is not one of {', '.join(map(repr, DIRECTIONS))}.")
    check_columns(left, right, keys, join_sides.LEFT_OUTER)
    layout = map_in_arrow.state_layout(operator, num_partitions, left, right)
    tolerance_us = None if tolerance is None else columns.microseconds(left.sparkSession, tolerance)
    if tolerance_us is not None and tolerance_us < 0:
        raise InvalidOperatorError(f"tolerance={tolerance!r} is negative; give a duration such as '1 minute'.")
    late = [_event_time(left, LEFT, left_time), _event_time(right, RIGHT, right_time)]
    for time in late:
        if time is not None and time.column in keys:
            raise InvalidOperatorError(
                f"The key {time.column!r} has the watermark: rows of one key would have one time. Leave it out of on=."
            )
    of_left, of_right = times_of_both(left, right, late, "join_asof")
    bounds = join_sides.Bounds(of_left, of_right, of_left, of_right)
    asof = Asof(direction, tolerance_us, allow_exact_matches)
    output = timed_output(
        output_struct(left, right, keys, join_sides.LEFT_OUTER),
        event_time_column,
        side_times(left, right, bounds, asof.waits_ms),
        lag_of(left, right, bounds),
    )

    def logic_of(of_keys: pa.Schema, of_sides: tuple[pa.Schema, pa.Schema], emitted: pa.Schema) -> JoinLogic:
        return asof_logic(of_keys, of_sides, bounds, emitted, asof)

    others = other_fields(left, right, keys)
    return joined_stream(left, right, keys, others, output, operator, layout, logic_of)
