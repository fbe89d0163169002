"""``state_as_of``: for each row of a DataFrame, the state as it was at the row's own time.

The point-in-time join of feature stores (Feast, Tecton), from the versions that the state store keeps anyway: a model
is trained with what a client was answered at the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coordinator_actor.durable.lookup_records import LookupRecord
from coordinator_actor.reading.stored_versions import StateVersions
from coordinator_actor.reading.version_times import VersionTimes
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.lookups.looked_up_state import LookedUpState, in_storage
from spark_bridge.lookups.lookup import planned_lookup
from spark_bridge.lookups.lookup_task import LookupTask
from spark_bridge.operators.map_in_arrow import map_in_arrow
from spark_bridge.operators.spark_types import other_case
from spark_bridge.state_data.spark_frames import state_place
from spark_bridge.state_data.stored_reads import StoredReads

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    columns: Sequence[str] | None = None,
    how: Literal["left", "inner"] = "left",
    state: str | None = None,
    state_location: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a batch DataFrame with the state of each row's key at the row's own time, from a checkpoint in storage.

        state_as_of(orders, "s3://bucket/ck", "user_totals", on="user", time="ordered_at", columns=["spent"])

    ``time`` is a timestamp column of ``df``. A row gets the state of the last version that was completed by then: what
    a client was answered at that moment. Rows after the last completion get the last version. Rows without a time have
    no match. The other arguments are those of ``lookup``; ``checkpoint``, ``state_location`` and ``storage_options``
    are those of ``read_state``. Rows are shuffled by version, and come in another order.

    As many versions are there as the query keeps (``min_versions_to_retain``). Of the last one, in its first 10 s, the
    time counts at which Spark committed the batch, a moment before the version was completed. State with a TTL shows
    what had not expired at the time of completion.

    Raises ``InvalidOperatorError`` for everything that can be seen to be wrong, ``VersionNotFoundError`` if no version
    is completed; an action raises it for a row from before the first version that is kept, naming both times.
    """
    if df.isStreaming:
        raise InvalidOperatorError("state_as_of takes a batch DataFrame; for a stream use lookup.")
    if time not in df.columns or not df.schema[time].dataType.typeName().startswith("timestamp"):
        there = ", ".join(f.name for f in df.schema.fields if f.dataType.typeName().startswith("timestamp")) or "none"
        raise InvalidOperatorError(
            f"time={time!r} must be a timestamp column of the DataFrame; it has {there}."
            f"{other_case([time], df.columns)}"
        )
    place = state_place(df.sparkSession, checkpoint, state_location, storage_options)
    location = StoredReads(place).locate(operator, None)
    task, schema = planned_lookup(df, location, state, on, columns, how, None, place)
    times = VersionTimes.of(StateVersions.look(place))
    with_version = type(df.schema)([*df.schema.fields]).add(VERSION_COLUMN, "long")
    found = map_in_arrow(df, _Versions(times, time).run, "versions_as_of", with_version)
    by_version = found.repartition(VERSION_COLUMN).sortWithinPartitions(VERSION_COLUMN)
    return map_in_arrow(by_version, _AsOf(task, times).run, f"state_as_of_{operator}", schema)


@dataclass(frozen=True)
class _Versions:
    """Puts the version of each row's time after the row."""

    times: VersionTimes
    time: str

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        completed = np.array(self.times.completed_ms, np.int64)
        versions = np.array([NO_VERSION, *self.times.versions], np.int64)
        for batch in batches:
            us = pc.cast(batch.column(batch.schema.get_field_index(self.time)), pa.int64())
            is_known = np.asarray(us.is_valid())
            ms = np.asarray(us.fill_null(0)) // 1000
            index = np.searchsorted(completed, ms, side="right")
            early = is_known & (index == 0)
            if early.any():
                raise self.times.too_early(int(ms[early].min()))
            index[~is_known] = 0
            schema = pa.schema([*batch.schema, pa.field(VERSION_COLUMN, pa.int64())])
            yield pa.RecordBatch.from_arrays([*batch.columns, pa.array(versions[index])], schema=schema)


@dataclass(frozen=True)
class _AsOf:
    """Looks rows up that come in the order of their versions."""

    task: LookupTask
    times: VersionTimes

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found: tuple[int, LookedUpState] | None = None
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
                if found is None or found[0] != version:
                    found = version, self._state(version)
                yield from self.task.enriched(part, found[1])

    def _state(self, version: int) -> LookedUpState:
        task = self.task
        assert task.place is not None
        at_ms = self.times.completed_ms[self.times.versions.index(version)]
        return in_storage(task.place, task.operator, task.state, None, LookupRecord(version, "", at_ms))

    def _without(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if not self.task.is_inner:
            fields = list(self.task.schema)
            own = [column.cast(field.type) for column, field in zip(rows.columns, fields, strict=False)]
            added = [pa.nulls(rows.num_rows, field.type) for field in fields[len(own) :]]
            yield pa.RecordBatch.from_arrays([*own, *added], schema=self.task.schema)
