"""Instants to wall-clock times of this process's time zone and back, whole columns at a time.

PySpark gives a ``TimestampType`` to Python as a naive datetime in the local time zone, and takes such datetimes back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

import numpy as np
import numpy.typing as npt

Micros = npt.NDArray[np.int64]
"""Microseconds since 1970: of an instant in UTC, of a wall-clock time as if it were UTC."""

_SECOND = 1_000_000
_DAY_SECONDS = 86_400
_FIRST = -62_135_596_800 * _SECOND
_LAST = 253_402_300_799 * _SECOND + 999_999


def to_local(instants: Micros) -> list[datetime]:
    """Return naive local datetimes; ``fold`` is set in the second of two equal hours.

    Raises ``ValueError`` for a time outside the years 1 to 9999.
    """
    check_years(instants)
    offsets, is_steady = _offsets(instants)
    wall = instants + offsets * _SECOND
    check_years(wall)
    values: list[datetime] = wall.view("datetime64[us]").tolist()
    for i in np.flatnonzero(~is_steady).tolist():
        seconds, micros = divmod(int(instants[i]), _SECOND)
        values[i] = datetime.fromtimestamp(seconds).replace(microsecond=micros)
    return values


def from_local(wall: Micros, values: Sequence[datetime | None]) -> Micros:
    """Return the instants of naive local datetimes: ``wall`` are the wall-clock times of ``values`` (of None: any)."""
    offsets, is_steady = _offsets(wall)
    instants: Micros = wall - offsets * _SECOND
    for i in np.flatnonzero(~is_steady).tolist():
        value = values[i]
        if value is not None:
            # A float of whole seconds is exact.
            instants[i] = int(value.replace(microsecond=0).timestamp()) * _SECOND + value.microsecond
    return instants


def check_years(micros: Micros) -> None:
    """Raise ``ValueError`` for a time that Python's datetime cannot hold."""
    if len(micros) and (micros.min() < _FIRST or micros.max() > _LAST):
        wrong = micros[(micros < _FIRST) | (micros > _LAST)][0]
        raise ValueError(
            f"The time {np.datetime64(int(wrong), 'us')} is outside the years 1 to 9999, which are all that Python's "
            "datetime has. Cast the column to a string or a number."
        )


def _offsets(micros: Micros) -> tuple[Micros, npt.NDArray[np.bool_]]:
    """Return the seconds by which local time is ahead of UTC, and whether they are the same on the days around."""
    if time.tzname == ("UTC", "UTC"):
        return np.zeros(len(micros), np.int64), np.ones(len(micros), np.bool_)
    days, which = np.unique(micros // (_DAY_SECONDS * _SECOND), return_inverse=True)
    offsets = np.zeros(len(days), np.int64)
    is_steady = np.zeros(len(days), np.bool_)
    for i, day in enumerate(days.tolist()):
        # A wall-clock day lies within these three days of UTC; datetime looks a day back to see which hours come twice.
        around = {time.localtime((day + d) * _DAY_SECONDS).tm_gmtoff for d in (-1, 0, 1, 2)}
        offsets[i] = around.pop()
        is_steady[i] = not around
    return offsets[which], is_steady[which]
