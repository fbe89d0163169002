"""Windows as users name them: in the key, or beside it as ``window=``, by start and end or by the start alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.client.answers.state_views import StateView
from spark_bridge.queryable.client.arguments.key_codec import KeyCodec
from spark_bridge.state_format.layouts import SESSIONS, WINDOWS


@dataclass(frozen=True)
class KeysWithWindows:
    """Makes whole keys of an aggregate by windows.

    ``length`` returns the length of the windows in us; None if there are none.
    """

    view: StateView
    length: Callable[[], int | None]

    @property
    def _window(self) -> str:
        name = self.view.window
        assert name is not None
        return name

    def columns(self, keys: Any, window: Any) -> pa.RecordBatch:
        """Return keys with their windows, in the order of ``by``. Without ``window`` the keys have the window in them.

        Raises ``RequestError`` and ``UnknownKeyOrNamespaceError``.
        """
        codec, others = self.view.codec, self.view.without_window
        if window is None:
            if not others.by and isinstance(keys, list):
                keys = [None if key is None else self._bounds(self._only_column(key)) for key in keys]
            return codec.columns(keys)
        if not others.by:
            raise RequestError(
                f"The window is all of the key of operator {self.view.operator!r}; give it as key, and no window= "
                "besides."
            )
        columns = others.columns(keys)
        if isinstance(window, list):
            if len(window) != columns.num_rows:
                raise RequestError(
                    f"There are {len(window)} windows for {columns.num_rows} keys; give one for all, or one each."
                )
            windows = self._column(window)
        else:
            windows = self._column([window]).take(pa.array(np.zeros(columns.num_rows, np.int64)))
        named = {**dict(zip(others.by, columns.columns, strict=True)), self._window: windows}
        return codec.columns(pa.RecordBatch.from_arrays([named[n] for n in codec.by], names=list(codec.by)))

    def _only_column(self, key: Any) -> Any:
        """Return the window of a key that has no other column."""
        if isinstance(key, tuple) and len(key) == 1:
            return key[0]
        return key[self._window] if isinstance(key, dict) and list(key) == [self._window] else key

    def _column(self, windows: list[Any]) -> pa.Array:
        name = self._window
        only = KeyCodec(self.view.operator, pa.schema([self.view.codec.schema.field(name)]), (name,), 1)
        return only.columns([self._bounds(window) for window in windows]).column(0)

    def _bounds(self, window: Any) -> Any:
        """Return start and end of a window."""
        if not isinstance(window, dt.datetime | np.datetime64):
            start, end = start_and_end(window)
            return {"start": start, "end": end}
        length = self.length()
        start = _micros(window)  # not as datetimes: a window may end in the year 10000
        return {"start": window, "end": None if length is None else start + np.timedelta64(length, "us")}


def length_of(operator: str, windows: pa.StructArray) -> int | None:
    """Return the length of windows in us; None if there are none.

    Raises ``RequestError`` if they have several lengths.
    """
    if not len(windows):
        return None
    start, end = (np.asarray(column.cast(pa.int64())) for column in windows.flatten())
    lengths = np.unique(end - start)
    if len(lengths) > 1:
        raise RequestError(
            f"The windows of operator {operator!r} are of different lengths; give window=(start, end), not the start "
            "alone."
        )
    return int(lengths[0])


def check_window(view: StateView, window: Any) -> None:
    """Raise ``RequestError`` for a window of an operator that has none."""
    if window is not None and view.kind not in (WINDOWS, SESSIONS):
        raise RequestError(
            f"Operator {view.operator!r} has no windows (key columns {view.codec.in_words}): leave window= out."
        )


def has_window(view: StateView, key: Any) -> bool:
    """Return whether a key of an aggregate by windows has the window in it."""
    by = view.codec.by
    if len(by) == 1:
        return True
    if isinstance(key, dict):
        return view.window in key
    return isinstance(key, tuple | list) and len(key) == len(by)


def have_windows(view: StateView, keys: Any) -> bool:
    """Return whether keys of an aggregate by windows have the window in them."""
    if len(view.codec.by) == 1:
        return True
    names = _names_of(keys)
    if names is not None:
        return view.window in names or len(names) == len(view.codec.by)
    try:
        first = next(iter(keys), None)
    except TypeError:
        return False
    return has_window(view, first)


def _names_of(keys: Any) -> list[str] | None:
    """Return the names of the columns of keys, if they have several columns."""
    if isinstance(keys, pa.RecordBatch | pa.Table):
        return list(keys.schema.names)
    if isinstance(keys, dict):
        return list(keys)
    columns = getattr(keys, "columns", None)
    if columns is not None:
        return [str(c) for c in columns]
    names = getattr(getattr(keys, "dtype", None), "names", None)
    if names:
        return list(names)
    if isinstance(keys, np.ndarray) and keys.ndim == 2:
        return [""] * keys.shape[1]
    return None


def session_at(sessions: list[dict[str, Any]], column: str, window: Any) -> dict[str, Any] | None:
    """Return a key's session with a start (and an end), without its window; None if there is none."""
    start, end = (window, None) if isinstance(window, dt.datetime | np.datetime64) else start_and_end(window)
    for session in sessions:
        bounds = session[column]
        if _is_time(bounds["start"], start) and (end is None or _is_time(bounds["end"], end)):
            return {name: value for name, value in session.items() if name != column}
    return None


def start_and_end(window: Any) -> tuple[Any, Any]:
    """Return both ends of a window that is given as a pair or a dict. Raises ``UnknownKeyOrNamespaceError``."""
    if isinstance(window, dict) and set(window) == {"start", "end"}:
        return window["start"], window["end"]
    if isinstance(window, tuple | list) and len(window) == 2:
        return window[0], window[1]
    raise UnknownKeyOrNamespaceError(f"{window!r} is no window; give its start, a datetime, or (start, end).")


def _is_time(one: dt.datetime | np.datetime64, other: Any) -> bool:
    """Return whether two times are the same; times without a zone are UTC."""
    return isinstance(other, dt.datetime | np.datetime64) and bool(_micros(one) == _micros(other))


def _micros(time: dt.datetime | np.datetime64) -> np.datetime64:
    """Return a time in UTC; times without a zone are UTC."""
    if isinstance(time, dt.datetime) and time.tzinfo is not None:
        time = time.astimezone(dt.timezone.utc).replace(tzinfo=None)
    return np.datetime64(time) if isinstance(time, np.datetime64) else np.datetime64(time, "us")
