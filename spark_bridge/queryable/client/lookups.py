"""Lookups of keys in an operator whose location is known: the work of ``get`` and ``get_many``, without retries."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from backends.encoding.user_values import python_values
from spark_bridge.exceptions import RequestError, RequestLimitError, StateVersionError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.client.arguments import KeyCodec, datetime64_of
from spark_bridge.queryable.client.discovery import KnownOperator
from spark_bridge.queryable.client.scans import StateScan
from spark_bridge.queryable.client.state_views import ONE_ROW, StateView
from spark_bridge.queryable.protocol import At, KeyRowsRequest, ScanRequest, StateAnswer
from spark_bridge.queryable.routing.router import KEYS_PER_REQUEST, PinnedVersion, StateRouter, shifted_positions
from spark_bridge.state_format.layouts import ROLLING, ROWS, SESSIONS, VALUE, WINDOWS

# Windows as users name them: in the key, or separately as ``window=``, by start and end or by the start alone.


@dataclass(frozen=True)
class KeysWithWindows:
    """Makes whole keys of an aggregate by windows. ``length`` returns their length in us; None without windows."""

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
        if not isinstance(window, dt.datetime | np.datetime64):
            start, end = start_and_end(window)
            return {"start": start, "end": end}
        length = self.length()
        start = datetime64_of(window)  # not as datetimes: a window may end in the year 10000
        return {"start": window, "end": None if length is None else start + np.timedelta64(length, "us")}


def length_of(operator: str, windows: pa.StructArray) -> int | None:
    """Return the length of windows in us; None without windows. Raises ``RequestError`` for several lengths."""
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
    raise UnknownKeyOrNamespaceError(f"{window!r} is not a window; give its start, a datetime, or (start, end).")


def _is_time(one: dt.datetime | np.datetime64, other: Any) -> bool:
    """Return whether two times are the same; times without a zone are UTC."""
    return isinstance(other, dt.datetime | np.datetime64) and bool(datetime64_of(one) == datetime64_of(other))


T = TypeVar("T")

WINDOWS_LOOKED_AT = 1000
"""At least this many windows must have one length for ``window=`` to be given by its start alone."""


@dataclass(frozen=True)
class KeyLookups:
    """Lookups in one state variable at ``at``, until ``deadline``. Raises the errors of ``StateRouter``."""

    router: StateRouter
    target: KnownOperator
    view: StateView
    at: At
    deadline: float

    # -- one key -------------------------------------------------------------------------------

    def one(self, key: Any, window: Any) -> dict[str, Any] | list[Any] | None:
        view = self.view
        check_window(view, window)
        if view.kind in ONE_ROW and (view.kind != WINDOWS or window is not None or has_window(view, key)):
            if view.kind == WINDOWS:
                encoded = view.codec.encode(self._with_windows([key], window))[0].as_py()
            else:
                encoded = view.codec.encode_one(key)
            return self._value(encoded)
        codec = view.without_window
        rows: list[Any] | None = view.one_answer(view.rows_of(self._rows(codec.encode(codec.columns([key])))))
        if window is None or rows is None:
            return rows
        (column,) = view.row_columns[0]
        return session_at(rows, column, window)

    def _value(self, encoded: bytes) -> dict[str, Any] | None:
        _, value = self.router.lookup_one(self.target.location, self.view.family, encoded, self.at, self.deadline)
        return None if value is None else self.view.stored_values.decode_one(value)

    # -- keys of several callers ---------------------------------------------------------------

    def each(self, keys: Sequence[Any]) -> list[Any]:
        """Return the result of ``one`` for each key; for a value that cannot be a key, the error itself."""
        if self.view.kind in (VALUE, ROWS, ROLLING):
            return self._values_of_each(keys)
        try:
            if self.view.kind != WINDOWS or not any(has_window(self.view, key) for key in keys):
                return self._rows_of_each(keys)
        except UnknownKeyOrNamespaceError:
            pass  # looked up one by one below, to find the wrong key
        return [self._one_or_error(key) for key in keys]

    def _values_of_each(self, keys: Sequence[Any]) -> list[Any]:
        encode, decode = self.view.codec.encode_one, self.view.stored_values.decode_one
        answers: list[Any] = [None] * len(keys)
        encoded, places = [], []
        for i, key in enumerate(keys):
            try:
                encoded.append(encode(key))
                places.append(i)
            except UnknownKeyOrNamespaceError as error:
                answers[i] = error
        if len(encoded) == 1:
            answers[places[0]] = self._value(encoded[0])
            return answers
        parts = self.values(pa.array(encoded, pa.binary()))
        values = [value for _, part in parts for value in python_values(part)]
        for i, value in zip(places, values, strict=True):
            if value is not None:
                answers[i] = decode(value)
        return answers

    def _rows_of_each(self, keys: Sequence[Any]) -> list[Any]:
        codec = self.view.without_window
        once = codec.encode(codec.columns(list(keys))).dictionary_encode()
        rows = self.view.rows_of(self._rows(once.dictionary))
        answers = [self.view.one_answer(part) for part in rows.of_each(len(once.dictionary))]
        return [answers[i] for i in once.indices.to_pylist()]

    def _one_or_error(self, key: Any) -> Any:
        try:
            return self.one(key, None)
        except UnknownKeyOrNamespaceError as error:
            return error

    # -- a table -------------------------------------------------------------------------------

    def table(self, keys: Any, window: Any) -> pa.Table:
        view = self.view
        check_window(view, window)
        if view.kind in ONE_ROW and (view.kind != WINDOWS or window is not None or have_windows(view, keys)):
            columns = self._with_windows(keys, window) if view.kind == WINDOWS else view.codec.columns(keys)
            parts = self.values(view.codec.encode(columns))
            if len(parts) == 1:
                return view.table(columns, parts[0][1])
            # Each column in chunks: all values may be more than an Arrow array can have.
            return pa.concat_tables([view.table(columns.slice(begin, len(part)), part) for begin, part in parts])
        if window is not None:
            raise RequestError(
                f"get_many of {view.kind} takes no window=; leave it out and filter by the column, or use get."
            )
        codec = view.without_window
        columns = codec.columns(keys)
        if not columns.num_rows:
            # Look up a null key, because the types of the columns are known only from an answer.
            null_key = codec.columns(pa.RecordBatch.from_arrays([pa.nulls(1)] * len(codec.by), names=list(codec.by)))
            rows = view.rows_of(self._rows(codec.encode(null_key)))
            return view.listed_table(columns, view.listed(rows, 1).slice(0, 0))
        # Each key once: the rows of its list or map would come as often as the key.
        once = codec.encode(columns).dictionary_encode()
        listed = view.listed(view.rows_of(self._rows(once.dictionary)), len(once.dictionary))
        return view.listed_table(columns, listed.take(once.indices))

    # -- requests to hosts ---------------------------------------------------------------------

    def rows(self, keys: Any, state: str | None, columns: Sequence[str] | None) -> StateScan:
        """Return the rows of keys, in the columns of ``scan`` that are wanted (None: all)."""
        view, codec = self.view, self.view.without_window
        if view.window is not None and have_windows(view, keys):
            keys = view.codec.columns(keys).select(list(codec.by))
        location = self.target.location
        wanted = None if columns is None else list(columns)
        request = KeyRowsRequest(location.run_id, location.operator.name, state, self.at, wanted)
        answer = self.key_rows(request, codec.encode(codec.columns(keys)).unique())
        # The first column is the position of the key.
        return StateScan(answer, None, range(1, len(answer.schema)), moment=self.at.moment)

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        """Return the result of ``StateRouter.key_rows``, at one version, in as many requests as hosts accept."""

        def ask(part: pa.BinaryArray, at: At) -> tuple[int, StateAnswer]:
            answer = self.router.key_rows(self.target.location, replace(request, at=at), part, self.deadline)
            return answer.version, answer

        answers = self._in_parts(keys, ask)
        if len(answers) == 1:
            return answers[0][1]
        last = answers[-1][1]
        batches = [shifted_positions(batch, None, begin) for begin, answer in answers for batch in answer.batches]
        return StateAnswer(last.version, last.schema, iter(batches))

    def values(self, keys: pa.BinaryArray, family: str | None = None) -> list[tuple[int, pa.BinaryArray]]:
        """Return the values of stored keys, by default of the view's family, at one version, as ``_in_parts``."""
        location, family = self.target.location, self.view.family if family is None else family
        return self._in_parts(keys, lambda part, at: self.router.lookup(location, family, part, at, self.deadline))

    def _in_parts(
        self, keys: pa.BinaryArray, ask: Callable[[pa.BinaryArray, At], tuple[int, T]]
    ) -> list[tuple[int, T]]:
        """Return the answers for the keys at one version: parts, each with the position of its first key.

        A part has fewer keys if hosts refuse it as too large, or if its answer does not fit into an array. The parts
        before it are not asked for again, unless their version is gone (``PinnedVersion``).
        """
        answers: list[tuple[int, T]] = []
        pinned, begin, max_keys = PinnedVersion(self.at), 0, KEYS_PER_REQUEST
        while begin < len(keys) or not answers:
            part = keys.slice(begin, max_keys)
            try:
                version, answer = ask(part, pinned.at)
            except RequestLimitError:
                if len(part) <= 1:
                    raise
                max_keys = (len(part) + 1) // 2
                continue
            except StateVersionError as error:
                if pinned.restarts(error):
                    answers, begin = [], 0
                continue
            answers.append((begin, answer))
            begin += len(part)
            pinned.answered(version)
        return answers

    def _rows(self, keys: pa.BinaryArray) -> pa.Table:
        location = self.target.location
        request = KeyRowsRequest(location.run_id, location.operator.name, self.view.variable.name, self.at)
        answer = self.key_rows(request, keys)
        return pa.Table.from_batches(list(answer.batches), answer.schema)

    def _with_windows(self, keys: Any, window: Any) -> pa.RecordBatch:
        return KeysWithWindows(self.view, self._window_length).columns(keys, window)

    def _window_length(self) -> int | None:
        """Return the length of the operator's windows in us, looked up once; None before the first window."""
        name = self.view.window
        assert name is not None
        if name not in self.target.window_us:
            location = self.target.location
            run_id, operator = location.run_id, location.operator.name
            request = ScanRequest(run_id, operator, at=self.at, columns=[name], limit=WINDOWS_LOOKED_AT)
            with StateScan(self.router.scan(location, request, self.deadline), WINDOWS_LOOKED_AT) as rows:
                windows = rows.to_arrow().column(name).combine_chunks()
            length = length_of(self.view.operator, windows)
            if length is not None:
                self.target.window_us[name] = length
        return self.target.window_us.get(name)


# The answer of ``describe``: a client's own facts about an operator, and the reports of the operator's hosts.


_OF_HOST = ("host_id", "incarnation", "query_address", "node_id", "failure")


def operator_description(target: KnownOperator, hosts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the description of an operator, ready for JSON. ``hosts`` are the answers of all hosts.

    ``requests`` are those of all hosts together, by verb; each host has its own, with percentiles.
    """
    location = target.location
    views = [target.view(v.name) for v in target.schema.in_use]
    of_hosts = [_described_host(location.operator.name, host) for host in hosts]
    return {
        "operator": location.operator.name,
        "kind": location.operator.kind,
        "query_name": location.query_name,
        "query_id": location.query_id,
        "run_id": location.run_id,
        "backend": location.operator.backend,
        "key_groups": location.key_groups,
        "completed_version": location.completed_version,
        "key": _columns(list(views[0].codec.schema)) if views else [],
        "states": [
            {"state": v.variable.name, "kind": v.kind, "ttl_ms": v.variable.ttl_ms}
            | {"columns": _columns(v.scan_fields), "index": list(v.variable.indexes)}
            for v in views
        ],
        "partitions": [
            {"partition": i, "host_id": owner.host_id, "address": owner.query_address}
            for i, owner in enumerate(location.owners)
        ],
        "hosts": of_hosts,
        "requests": merged_requests([host["requests"] for host in of_hosts]),
    }


def _described_host(operator: str, host: dict[str, Any]) -> dict[str, Any]:
    (of_operator, *_) = [o for o in host.get("operators", ()) if o.get("operator") == operator] or [{}]
    return {
        **{name: host[name] for name in _OF_HOST if name in host},
        **{name: of_operator[name] for name in ("completed_version_here", "oldest_version") if name in of_operator},
        "held": of_operator.get("held", []),
        "requests": host.get("requests", {}).get(operator, {}),
    }


def merged_requests(of_hosts: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return requests, failures and the slowest latency of all hosts by verb: percentiles cannot be merged."""
    merged: dict[str, dict[str, Any]] = {}
    for requests in of_hosts:
        for verb, figures in requests.items():
            of_verb = merged.setdefault(verb, {"requests": 0, "failures": 0, "max_ms": 0.0})
            of_verb["requests"] += figures["requests"]
            of_verb["failures"] += figures["failures"]
            of_verb["max_ms"] = max(of_verb["max_ms"], figures["max_ms"])
    return merged


def _columns(fields: Sequence[pa.Field]) -> list[dict[str, str]]:
    return [{"name": f.name, "type": str(f.type)} for f in fields]
