"""Applies the watermark: which rows are late, and which keys are done, by the event time of rows and keys.

Spark computes the watermark, and the coordinator reads it from Spark's offset log for each batch (``BatchTimes``,
``coordinator_actor/durable/spark_commits.py``). A timestamp is compared with the watermark itself, a window by its end,
as in Spark's ``WatermarkSupport``. A key column with event time is stored first, so that the keys that are done lie
together in every key group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import KeyRange, encode_keys

WATERMARK_METADATA = "spark.watermarkDelayMs"
"""Where Spark notes that a column has a watermark."""

Times = npt.NDArray[np.int64]
"""Microseconds since 1970."""

_MAX_TIME = np.iinfo(np.int64).max


@dataclass(frozen=True)
class EventTime:
    """A column of event time: timestamps, or windows (structs of start and end).

    ``window_us`` is the length of the windows in microseconds if they all have the same, else 0.
    """

    column: str
    is_window: bool = False
    window_us: int = 0

    def times(self, rows: pa.RecordBatch) -> pa.Int64Array:
        """Return the time of each row, in microseconds since 1970."""
        column = rows.column(rows.schema.get_field_index(self.column))
        if self.is_window:
            column = pc.struct_field(column, [1])
        return column.cast(pa.int64())

    def is_done(self, rows: pa.RecordBatch, watermark_ms: int) -> npt.NDArray[np.bool_]:
        """Return for each row whether the watermark (in ms) has reached its time; False for a row without time."""
        done: npt.NDArray[np.bool_] = np.asarray(pc.less_equal(self.times(rows), watermark_ms * 1000).fill_null(False))
        return done

    @property
    def is_exact(self) -> bool:
        """Return whether ``done_ranges`` gives only keys that are done."""
        return not self.is_window or self.window_us > 0

    def done_ranges(self, key_groups: tuple[int, int], watermark_ms: int) -> list[KeyRange]:
        """Return the ranges in which all done keys lie, if this column is their first.

        Unless ``is_exact``, other keys lie there, too.
        Windows are stored by their start: a window that begins after the watermark cannot have ended.
        """
        begin = np.array([min(watermark_ms * 1000 - self.window_us + 1, _MAX_TIME)])
        time = pa.array(begin)
        first = pa.StructArray.from_arrays([time], ["start"]) if self.is_window else time
        end = encode_keys(pa.record_batch({self.column: first}), np.zeros(1, np.uint16))[0].as_py()[2:]
        # From the first byte of a key that has a time: keys without time come before.
        return [(g + b"\x01", g + end) for g in map(_group, range(*key_groups))]


def late_rows_removed(
    rows: pa.RecordBatch, event_time: EventTime | None, late_watermark_ms: int
) -> tuple[pa.RecordBatch, int]:
    """Return the rows that are not late, and the number of late rows."""
    if event_time is None:
        return rows, 0
    late = event_time.is_done(rows, late_watermark_ms)
    count = int(np.count_nonzero(late))
    return (rows.filter(pa.array(~late)), count) if count else (rows, 0)


def all_keys(key_groups: tuple[int, int]) -> list[KeyRange]:
    """Return the range of all keys of some key groups: from the first (included) to the last (not included)."""
    first, last = key_groups
    return [(_group(first), _group(last) if last < 1 << 16 else None)]


def between(ranges: Sequence[KeyRange], after: bytes | None, up_to: bytes | None) -> list[KeyRange]:
    """Return the parts of ascending ranges that lie after ``after`` and not after ``up_to`` (None: no limit)."""
    if after is None and up_to is None:
        return list(ranges)
    clipped = []
    for start, end in ranges:
        low = start if after is None else max(start, after + b"\x00")
        high = end
        if up_to is not None:
            high = up_to + b"\x00" if end is None else min(end, up_to + b"\x00")
        if high is None or low < high:
            clipped.append((low, high))
    return clipped


def _group(group: int) -> bytes:
    return group.to_bytes(2, "big")
