"""``join`` and ``join_asof``: rows of two streams that have one key and lie close in time, as a streaming DataFrame."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from backends.exceptions import StateStoreError
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.operators.join.asof_matching import BACKWARD, DIRECTIONS, Asof
from spark_bridge.operators.join.asof_task import asof_logic
from spark_bridge.operators.join.join_output import Apply
from spark_bridge.operators.join.join_task import join_logic
from spark_bridge.operators.join.output_time import asof_times, side_times, timed_output
from spark_bridge.operators.join.sides import ANTI, INNER, LEFT_OUTER, SEMI, Bounds
from spark_bridge.operators.join.streams import (
    ONLY,
    arrow_schema,
    bounds_of,
    check_columns,
    check_frames,
    event_times,
    joined_stream,
    lag_of,
    other_fields,
    output_struct,
    placing_of,
    refuse_or_warn,
    struct_of_output,
    times_of_both,
)
from spark_bridge.operators.windows import microseconds
from spark_bridge.state_format.layouts import LEFT, RIGHT


def join(
    left: DataFrame,
    right: DataFrame,
    *,
    on: str | Sequence[str],
    operator: str,
    how: str = INNER,
    within: tuple[str | None, str | None] | None = None,
    left_time: str | None = None,
    right_time: str | None = None,
    apply: Apply | None = None,
    output: str | T.StructType | None = None,
    event_time_column: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Join the rows of two streams that have the same key and lie close enough in time.

    The counterpart in Spark is ``left.join(right, condition, how)`` with both sides streams. The result is an ordinary
    streaming DataFrame with the keys, the other columns of the left side and those of the right side.

    Arguments:

    - ``left``, ``right``: streaming DataFrames. Of a side that has a watermark, late rows are dropped.
    - ``on``: the key column or columns, which both sides have, with the same types. Nulls match nothing.
    - ``operator``: the name of this state in the checkpoint and in queries, which show the rows that wait for a match
      as the lists ``left`` and ``right``.
    - ``how``: "inner"; "left", "right" or "full", which also give the rows of that side or of both that have no match,
      with nulls; "left_semi" or "left_anti", which give the rows of the left side that have a match or have none. A row
      without a match comes once the watermark says that none can come any more.
    - ``within``: from which to which duration the time of the right row may be later than that of the left row, both
      included, such as ``("0 seconds", "1 hour")``; negative ones are earlier. None in place of one is no bound. Both
      sides need a watermark on their time. Rows are removed from the state when the watermark has passed all times
      at which a match could come. ``within`` is not needed where the watermark is on a key column; elsewhere only an
      inner join goes without, and keeps all rows for good.
    - ``left_time``, ``right_time``: the columns that ``within`` is about, by default those with the watermark.
    - ``apply``: a function that makes the output. It takes matching rows of both sides as two ``pyarrow.Table``, row i
      of one with row i of the other; a side without a match has nulls. It gives a table of any number of rows with the
      columns ``output``. It runs in the tasks, may be called several times in a batch, and must give the same for the
      same rows.
    - ``output``: the columns that ``apply`` gives, as a ``StructType`` or in DDL.
    - ``event_time_column``: the output column that is the event time of this project's operators after the join, one
      of the times of the sides; or a column that ``apply`` makes, with times not before those of the rows that it was
      given. Rows of the output are as old as rows wait, which such operators allow for. Without it, the output has no
      watermark.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for everything that the DataFrames and the arguments show to be wrong.
    """
    keys = [on] if isinstance(on, str) else list(on)
    check_frames(left, right, how, apply, output)
    check_columns(left, right, keys, how)
    placing = placing_of(left, right, operator, num_partitions)
    bounds = bounds_of(left, right, keys, within, left_time, right_time)
    kept = [name for name, after in zip((LEFT, RIGHT), bounds.expires_after_us, strict=True) if after is None]
    if kept:
        refuse_or_warn(kept, operator, how)

    others = other_fields(left, right, keys)
    if how in (SEMI, ANTI):
        times = [t.column for t in (bounds.right, bounds.right_late) if t is not None]
        others[1] = [f for f in others[1] if f.name in times] or [ONLY]
    given = output_struct(left, right, keys, how) if output is None else struct_of_output(output)
    given = timed_output(
        given,
        event_time_column,
        side_times(left, right, bounds),
        lag_of(left, right, bounds),
        made_by_apply=apply is not None,
    )
    try:
        logic = join_logic(
            arrow_schema([left.schema[key] for key in keys]),
            (arrow_schema(others[0]), arrow_schema(others[1])),
            how,
            bounds,
            arrow_schema(given.fields),
            apply,
            (tuple(left.columns), tuple(right.columns)),
        )
    except StateStoreError as error:
        raise InvalidOperatorError(f"Operator {operator!r}: {error}") from error
    return joined_stream(left, right, keys, others, logic, given, placing)


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

    The words and the results are those of pandas' ``merge_asof`` over all rows that are not late, in whichever order
    and batches they come. A row of the left side comes when the watermark says which row of the right side it gets,
    with nulls if there is none. Of several right rows of a key at one time, the order is that of their columns.

    Arguments:

    - ``left``, ``right``: streaming DataFrames with a watermark on their time. Late rows are dropped. Rows of the left
      side with a null as key or time come at once, with nulls; such rows of the right side are dropped.
    - ``on``: the key column or columns (pandas: ``by``), which both sides have, with the same types.
    - ``operator``: the name of this state in the checkpoint and in queries, which show the rows that wait as the lists
      ``left`` and ``right``.
    - ``left_time``, ``right_time``: the columns of the times, by default those with the watermark.
    - ``direction``: "backward" takes the last right row at or before the time of the left row, "forward" the first one
      at or after it, "nearest" the nearer of both, and the one before if they are equally near.
    - ``tolerance``: a duration, the greatest difference of the two times. Without it, the state keeps the last row of
      each key of the right side for good ("backward", "nearest"), and a left row waits until a right row comes after
      it ("forward", "nearest").
    - ``allow_exact_matches``: whether a right row at the same time counts.
    - ``event_time_column``: the output column that is the event time of this project's operators after the join, one
      of the times of the sides. Rows of the output are as old as rows wait, which such operators allow for. Without it,
      the output has no watermark.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for everything that the DataFrames and the arguments show to be wrong.
    """
    keys = [on] if isinstance(on, str) else list(on)
    check_frames(left, right, LEFT_OUTER, None, None)
    if direction not in DIRECTIONS:
        raise InvalidOperatorError(f"direction={direction!r} is none of {', '.join(map(repr, DIRECTIONS))}.")
    check_columns(left, right, keys, LEFT_OUTER)
    placing = placing_of(left, right, operator, num_partitions)
    tolerance_us = None if tolerance is None else microseconds(left.sparkSession, tolerance)
    if tolerance_us is not None and tolerance_us < 0:
        raise InvalidOperatorError(f"tolerance={tolerance!r} is less than nothing; give a duration such as '1 minute'.")
    late = event_times(left, right, left_time, right_time)
    for time in late:
        if time is not None and time.column in keys:
            raise InvalidOperatorError(
                f"The key {time.column!r} has the watermark: rows of one key would have one time. Leave it out of on=."
            )
    of_left, of_right = times_of_both(left, right, late, "join_asof")
    others = other_fields(left, right, keys)
    given = output_struct(left, right, keys, LEFT_OUTER)
    bounds, asof = Bounds(of_left, of_right, of_left, of_right), Asof(direction, tolerance_us, allow_exact_matches)
    given = timed_output(given, event_time_column, asof_times(left, right, bounds, asof), lag_of(left, right, bounds))
    try:
        logic = asof_logic(
            arrow_schema([left.schema[key] for key in keys]),
            (arrow_schema(others[0]), arrow_schema(others[1])),
            bounds,
            arrow_schema(given.fields),
            asof,
        )
    except StateStoreError as error:
        raise InvalidOperatorError(f"Operator {operator!r}: {error}") from error
    return joined_stream(left, right, keys, others, logic, given, placing)
