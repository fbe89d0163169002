"""Sessions of keys as rows: which rows make one session, and sessions to and from their stored form.

In a task, a session is a row of its start and end (int64, microseconds since 1970) and the state columns of the
aggregator. Stored are all sessions of a key in one array, in order; see ``state_format.layouts.session_schema``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from backends.encoding.columns import fixed_array, list_array, list_parts, struct_array
from spark_bridge.state_format.layouts import END, START
from spark_bridge.task.keyed_rows import Ids
from spark_bridge.task.watermark import Times


def joined_sessions(ids: Ids, starts: Times, ends: Times) -> tuple[Ids, Ids, Times, Times]:
    """Join the sessions of each key whose times touch, as Spark's ``MergingSessionsExec`` does.

    ``ids`` are the numbers of the rows' keys. Returns for each row the number of its session, and for each session its
    key, start and end. Sessions are numbered by key and start.
    """
    order = np.lexsort((starts, ids))
    keys, begun, ended = ids[order], starts[order], ends[order]
    is_new = np.ones(len(ids), np.bool_)
    same_key = keys[1:] == keys[:-1]
    reached = ended
    if (same_key & (ended[1:] < ended[:-1])).any():
        # The greatest end so far of the same key, by numbers that order by key and then by end.
        distinct, ranks = np.unique(ended, return_inverse=True)
        reached = distinct[np.maximum.accumulate(keys * len(distinct) + ranks) - keys * len(distinct)]
    is_new[1:] = ~same_key | (begun[1:] > reached[:-1])
    of_rows = np.empty(len(ids), np.int64)
    of_rows[order] = np.cumsum(is_new) - 1
    first = np.flatnonzero(is_new)
    last = np.append(first[1:], len(ids)) - 1
    return of_rows, keys[first], begun[first], reached[last] if len(ids) else ended


@dataclass(frozen=True)
class SessionColumns:
    """The columns of sessions: ``states`` of the aggregator, ``value`` of the stored row of a key."""

    states: pa.Schema
    value: pa.Schema

    @property
    def time(self) -> pa.DataType:
        """Return the type of stored starts, ends and due times."""
        return self.value.field(1).type

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the columns of sessions in a task."""
        return pa.schema([pa.field(START, pa.int64()), pa.field(END, pa.int64()), *self.states])

    def rows(self, starts: Times, ends: Times, states: pa.RecordBatch) -> pa.RecordBatch:
        """Return sessions with these starts, ends and states."""
        return pa.RecordBatch.from_arrays([pa.array(starts), pa.array(ends), *states.columns], schema=self.schema)

    def windows(self, sessions: pa.RecordBatch, kind: pa.DataType) -> pa.Array:
        """Return the bounds of sessions as structs of type ``kind``."""
        starts, ends = (sessions.column(i).cast(self.time) for i in (0, 1))
        return struct_array([starts, ends], sessions.num_rows, None, kind)

    def states_of(self, sessions: pa.RecordBatch) -> pa.RecordBatch:
        """Return the state columns of sessions."""
        return pa.RecordBatch.from_arrays(sessions.columns[2:], schema=self.states)

    def decoded(self, values: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch, pa.Array]:
        """Return the sessions of stored rows with the numbers of their keys, and the due time of each key."""
        elements, offsets = list_parts(values.column(0))
        ids = np.repeat(np.arange(values.num_rows, dtype=np.int64), np.diff(offsets))
        start, end, *states = elements.flatten()
        columns = [start.cast(pa.int64()), end.cast(pa.int64()), *states]
        return ids, pa.RecordBatch.from_arrays(columns, schema=self.schema), values.column(1)

    def stored(self, sessions: pa.RecordBatch, offsets: npt.NDArray[np.int64], due: Times) -> pa.RecordBatch:
        """Return the rows to store of n keys: the sessions between each key's n+1 ``offsets``, and its due time."""
        kind = self.value.field(0).type
        starts, ends, *states = sessions.columns
        element = struct_array(
            [starts.cast(self.time), ends.cast(self.time), *states], sessions.num_rows, None, kind.value_type
        )
        row = [list_array(element, offsets, None, kind), fixed_array(due, None, self.time)]
        return pa.RecordBatch.from_arrays(row, schema=self.value)
