"""``deduplicate``: of the rows with one key, only the first goes through, as an ordinary streaming DataFrame."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import fixed_array, null_mask
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import DUPLICATES, OperatorFigures, OperatorSpec
from spark_bridge.aggregates.row_groups import group_rows, order_codes, plain
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import checked_names
from spark_bridge.operators import columns
from spark_bridge.operators.map_in_arrow import DeclaredOperator, KeyRouting, refusing, state_layout, stateful_operator
from spark_bridge.state_format.layouts import EXPIRES_AT, EXPIRY_FAMILY, deduplicate_schema, is_present
from spark_bridge.state_format.stored_rows import by_expiry, without_expiry
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.keyed_rows import Ids, KeyedRows, RowReducer, parts_of, scanned
from spark_bridge.task.state_task import EventTime, late_rows_removed
from spark_bridge.task.task_store import Spool, StateAccess

# The work of ``deduplicate`` in a state task: of the rows with one key, only the first row of all goes through.


DEDUPLICATE_KEYS_PER_STEP = 1 << 18
"""Keys that are looked up at once."""
_GREATEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class DeduplicateLogic:
    """The first row of each key: the row with the least event time, if there is one; of several, the least by content.

    ``columns`` are the columns of the output. ``compared`` are the columns that order rows with the same time,
    so that the result does not depend on the order of the rows. ``event_time`` is the column that
    makes rows late. A key is removed from the state when the watermark passes ``key_time``, which is the key's first
    column, or ``within_us`` (microseconds) after the event time of the key's first row. Spark's counterparts are
    ``StreamingDeduplicateExec`` and ``StreamingDeduplicateWithinWatermarkExec``.
    """

    schema: OperatorSchema
    columns: tuple[str, ...]
    compared: tuple[str, ...]
    event_time: EventTime | None = None
    key_time: EventTime | None = None
    within_us: int | None = None
    limits: Limits | None = None

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Find the first row of each key, drop the rows whose key is in the state, commit, and yield the others."""
        work = _DeduplicateBatch(self, store, timer)
        parts = parts_of(batches, timer, "deduplicate_ms")
        if (first := next(parts, None)) is None:
            work.evict()
            store.commit(work.figures(), timer.milliseconds)
            return
        without = first.slice(0, 0).select(list(self.columns))
        reducing = RowReducer(self._keys, store.num_key_groups, without, self.first_rows, self.limits)
        with reducing as reducer, Spool(without.schema) as spool:
            work.add(first, reducer)
            del first
            for rows in parts:
                work.add(rows, reducer)
            for part in reducer.steps():
                for start in range(0, len(part.keys), DEDUPLICATE_KEYS_PER_STEP):
                    work.pass_new(part.slice(start, DEDUPLICATE_KEYS_PER_STEP), spool)
            work.evict()
            timer.step("merge_ms")
            store.commit(work.figures(), timer.milliseconds)
            yield from spool.batches()

    @property
    def _keys(self) -> pa.Schema:
        return self.schema.families[DEFAULT_FAMILY].key

    def by_key(self, rows: pa.RecordBatch, num_key_groups: int) -> KeyedRows:
        groups = group_rows(rows, self._keys, num_key_groups)
        return KeyedRows(groups.keys, *self.first_rows(groups.ids, len(groups.keys), rows.select(list(self.columns))))

    def first_rows(self, ids: Ids, num_keys: int, rows: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
        """Return one row for each id; every id from 0 to ``num_keys - 1`` occurs."""
        chosen = np.arange(len(ids))
        if self.event_time is not None and len(chosen) > num_keys:
            times = self.event_time.times(rows).fill_null(_GREATEST).to_numpy()
            chosen = least(ids, num_keys, times)
        for name in self.compared:
            if len(chosen) == num_keys:
                break
            column = plain(rows.column(name).take(pa.array(chosen)))
            codes, mask = order_codes(column), null_mask(column)
            if mask is not None:
                # A null is less than any value, as in Spark.
                kept = least(ids[chosen], num_keys, (~mask).astype(np.int64))
                chosen, codes = chosen[kept], np.where(mask, 0, codes)[kept]
            chosen = chosen[least(ids[chosen], num_keys, codes)]
        first = np.empty(num_keys, np.int64)
        first[ids[chosen]] = chosen
        return np.arange(num_keys), rows.take(pa.array(first))


def least(ids: Ids, num_keys: int, values: npt.NDArray[np.int64]) -> Ids:
    """Return the rows that have the least value of their id."""
    best = np.full(num_keys, _GREATEST)
    np.minimum.at(best, ids, values)
    return np.flatnonzero(values == best[ids])


class _DeduplicateBatch:
    """One micro-batch of one partition."""

    def __init__(self, logic: DeduplicateLogic, store: StateAccess, timer: StepTimer) -> None:
        self._logic = logic
        self._store = store
        self._timer = timer
        self._rows = self._late = self._new = self._removed = 0

    def figures(self) -> OperatorFigures:
        duplicates = {DUPLICATES: float(self._rows - self._new)}
        return OperatorFigures(self._rows, self._new, self._removed, self._late, duplicates)

    def add(self, rows: pa.RecordBatch, reducer: RowReducer) -> None:
        """Keep the rows that are not late."""
        if self._logic.event_time is not None:
            rows, late = late_rows_removed(rows, self._logic.event_time, self._store.times.late_watermark_ms)
            self._late += late
        self._rows += rows.num_rows
        if rows.num_rows:
            reducer.add(self._logic.by_key(rows, self._store.num_key_groups))

    def pass_new(self, part: KeyedRows, spool: Spool) -> None:
        """Put the rows whose key is not in the state into the spool, and remember their keys."""
        self._timer.step("merge_ms")
        is_new = self._store.get_many(part.keys).is_null()
        self._timer.step("get_ms")
        keys, rows = part.keys.filter(is_new), part.rows.filter(is_new)
        self._new += len(keys)
        spool.add(rows)
        if self._logic.within_us is None:
            self._remember(keys)
        else:
            assert self._logic.event_time is not None
            # As in Spark, a row without time counts as of 1970.
            times = self._logic.event_time.times(rows).fill_null(0).to_numpy()
            self._remember_until(keys, times + self._logic.within_us)

    def evict(self) -> None:
        """Remove the keys that the watermark has passed."""
        logic, store = self._logic, self._store
        if logic.key_time is None and logic.within_us is None:
            return
        times = store.times
        if times.watermark_ms <= times.late_watermark_ms:
            return  # the last batch has removed the keys that this watermark has passed
        column = logic.key_time or EventTime(EXPIRES_AT)
        ranges = column.done_ranges(store.key_groups, times.watermark_ms)
        family = DEFAULT_FAMILY if logic.within_us is None else EXPIRY_FAMILY
        for pairs in scanned(store, ranges, family):
            keys = pairs.column(0)
            if not column.is_exact:
                done = column.is_done(decode_keys(keys, logic.schema.families[family].key), times.watermark_ms)
                keys = keys.filter(pa.array(done))
            self._removed += len(keys)
            store.stage(keys, pa.nulls(len(keys), pa.binary()), family)
            if family == EXPIRY_FAMILY:
                store.stage(without_expiry(keys), pa.nulls(len(keys), pa.binary()))

    def _remember(self, keys: pa.BinaryArray) -> None:
        schema = self._logic.schema.families[DEFAULT_FAMILY]
        if self._logic.key_time is not None:
            done = self._logic.key_time.is_done(decode_keys(keys, schema.key), self._store.times.watermark_ms)
            self._removed += int(np.count_nonzero(done))
            keys = keys.filter(pa.array(~done))
        self._stage(keys, is_present(len(keys)), DEFAULT_FAMILY)

    def _remember_until(self, keys: pa.BinaryArray, expires_at: Ids) -> None:
        stays = expires_at > self._store.times.watermark_ms * 1000
        self._removed += int(np.count_nonzero(~stays))
        keys, expires_at = keys.filter(pa.array(stays)), expires_at[stays]
        value = self._logic.schema.families[DEFAULT_FAMILY].value
        times = fixed_array(expires_at, None, value.field(0).type)
        self._stage(keys, pa.RecordBatch.from_arrays([times], schema=value), DEFAULT_FAMILY)
        self._stage(by_expiry(keys, expires_at), is_present(len(keys)), EXPIRY_FAMILY)

    def _stage(self, keys: pa.BinaryArray, values: pa.RecordBatch, family: str) -> None:
        if len(keys):
            self._store.stage(keys, self._logic.schema.families[family].encode_values(values), family)


def deduplicate(
    df: DataFrame,
    by: str | Sequence[str],
    *,
    operator: str,
    within: str | None = None,
    num_partitions: int | None = None,
) -> DataFrame:
    """Drop the rows of a stream whose key has occurred before; the other rows keep all their columns.

    The counterparts in Spark are ``dropDuplicates`` and, with ``within``, ``dropDuplicatesWithinWatermark``.

    Arguments:

    - ``df``: a streaming DataFrame. If it has a watermark, late rows are dropped.
    - ``by``: the key column or columns. Of several rows of a key in a batch, the one with the least event time
      goes through.
    - ``operator``: the name of this state in the checkpoint and in queries.
    - ``within``: a duration such as ``"10 minutes"``; a key is forgotten that long after the event time of its first
      row. With the delay of the watermark this is ``dropDuplicatesWithinWatermark``. Without ``within``, keys are
      remembered for ever, or, if the watermark column is one of them, until the watermark passes it.
    - ``num_partitions``: the number of state partitions, by default the session's ``spark.sql.shuffle.partitions``. The
      number stays with the checkpoint.

    Raises ``InvalidOperatorError`` for every mistake that the DataFrame and the arguments show.
    """
    keys = checked_names("by=", by)
    if not df.isStreaming:
        raise InvalidOperatorError(
            "deduplicate takes a streaming DataFrame (spark.readStream); for a batch DataFrame use "
            "df.dropDuplicates(...)."
        )
    columns.check_keys(df.schema, keys)
    if len(set(df.columns)) != len(df.columns):
        raise InvalidOperatorError(f"The DataFrame has two columns of one name: {', '.join(df.columns)}.")
    partitions, key_groups = state_layout(operator, num_partitions, df)
    event_time = columns.event_time_of(df.schema, df.columns)
    expiry, within_us = None, None
    if within is not None:
        if event_time is None or event_time.is_window:
            raise InvalidOperatorError(
                f"within={within!r} counts from the event time of a key's first row: put withWatermark on a time "
                "column first."
            )
        within_us = columns.microseconds(df.sparkSession, within)
        if within_us < 0:
            raise InvalidOperatorError(f"within={within!r} is negative; give a duration such as '10 minutes'.")
        expiry = columns.arrow_type(df.schema[event_time.column].dataType)
    key_time = event_time if within is None and event_time is not None and event_time.column in keys else None
    stored = sorted(keys, key=lambda name: key_time is None or name != key_time.column)
    key_schema = columns.arrow_schema([df.schema[name] for name in stored])
    with refusing(operator):
        schema = deduplicate_schema(key_schema, tuple(keys), expiry)
    uses_time = event_time is not None
    spec = OperatorSpec(operator, partitions, schema.to_json(), kind="deduplicate", uses_time=uses_time)
    compared = tuple(f.name for f in df.schema.fields if f.name not in keys and columns.is_ordered(f.dataType))
    logic = DeduplicateLogic(schema, tuple(df.columns), compared, event_time, key_time, within_us)
    routing, lag_ms = KeyRouting(stored, partitions, key_groups), columns.watermark_lag_ms(df.schema, event_time)
    return stateful_operator(df, DeclaredOperator(spec), routing, logic, df.schema, lag_ms)
