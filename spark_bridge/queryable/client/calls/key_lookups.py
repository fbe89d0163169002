"""Lookups of keys in an operator whose location is known: the work of ``get`` and ``get_many``, without retries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from backends.encoding.given_values import python_values
from spark_bridge.exceptions import RequestError, RequestLimitError, StateVersionError, UnknownKeyOrNamespaceError
from spark_bridge.queryable.client.answers.state_views import ONE_ROW, StateView
from spark_bridge.queryable.client.calls.state_scan import StateScan
from spark_bridge.queryable.client.calls.windows import (
    KeysWithWindows,
    check_window,
    has_window,
    have_windows,
    length_of,
    session_at,
)
from spark_bridge.queryable.client.cluster.known_operators import KnownOperator
from spark_bridge.queryable.protocol.messages import At, KeyRowsRequest, ScanRequest
from spark_bridge.queryable.protocol.state_reads import StateAnswer
from spark_bridge.queryable.routing.key_chunks import KEYS_PER_REQUEST, shifted_positions
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.version_alignment import PinnedVersion
from spark_bridge.state_format.layouts import ROWS, VALUE, WINDOWS

T = TypeVar("T")

WINDOWS_LOOKED_AT = 1000
"""At least this many windows must have one length for ``window=`` to be given by its start alone."""


@dataclass(frozen=True)
class KeyLookups:
    """Lookups in one state variable at ``at``, until ``deadline``. Raises the errors of ``StateRouter``."""

    router: StateRouter
    known: KnownOperator
    view: StateView
    at: At
    deadline: float

    # -- one key -------------------------------------------------------------------------------

    def one(self, key: Any, window: Any) -> dict[str, Any] | list[Any] | None:
        """Return the result of ``get``."""
        view = self.view
        check_window(view, window)
        if view.kind in ONE_ROW and (view.kind != WINDOWS or window is not None or has_window(view, key)):
            if view.kind == WINDOWS:
                encoded = view.codec.encode(self._with_windows([key], window))[0].as_py()
            else:
                encoded = view.codec.encode_one(key)
            return self._value(encoded)
        codec = view.without_window
        found: list[Any] | None = view.one_answer(view.rows_of(self._rows(codec.encode(codec.columns([key])))))
        if window is None or found is None:
            return found
        (column,) = view.row_columns[0]
        return session_at(found, column, window)

    def _value(self, encoded: bytes) -> dict[str, Any] | None:
        _, value = self.router.lookup_one(self.known.location, self.view.family, encoded, self.at, self.deadline)
        return None if value is None else self.view.decode_one(value)

    # -- keys of several callers ---------------------------------------------------------------

    def each(self, keys: Sequence[Any]) -> list[Any]:
        """Return the result of ``one`` for each key; for a value that cannot be a key, the error itself."""
        if self.view.kind in (VALUE, ROWS):
            return self._values_of_each(keys)
        try:
            if self.view.kind != WINDOWS or not any(has_window(self.view, key) for key in keys):
                return self._rows_of_each(keys)
        except UnknownKeyOrNamespaceError:
            pass  # looked up one by one below, to find the wrong key
        return [self._one_or_error(key) for key in keys]

    def _values_of_each(self, keys: Sequence[Any]) -> list[Any]:
        encode, decode = self.view.codec.encode_one, self.view.decode_one
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
        """Return the result of ``get_many``."""
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
                f"get_many of {view.kind} takes no window=; give none and take what is wanted of the column, or use "
                "get."
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

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        """Return the result of ``StateRouter.key_rows``, at one version, in as many requests as hosts accept."""

        def ask(part: pa.BinaryArray, at: At) -> tuple[int, StateAnswer]:
            answer = self.router.key_rows(self.known.location, replace(request, at=at), part, self.deadline)
            return answer.version, answer

        answers = self._in_parts(keys, ask)
        if len(answers) == 1:
            return answers[0][1]
        last = answers[-1][1]
        batches = [shifted_positions(batch, None, begin) for begin, answer in answers for batch in answer.batches]
        return StateAnswer(last.version, last.schema, iter(batches))

    def values(self, keys: pa.BinaryArray) -> list[tuple[int, pa.BinaryArray]]:
        """Return values of stored keys at one version: parts, each with the position of its first key."""
        location, family = self.known.location, self.view.family
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
        """Return the rows of stored keys."""
        location = self.known.location
        request = KeyRowsRequest(location.run_id, location.operator.name, self.view.variable.name, self.at)
        answer = self.key_rows(request, keys)
        return pa.Table.from_batches(list(answer.batches), answer.schema)

    def _with_windows(self, keys: Any, window: Any) -> pa.RecordBatch:
        return KeysWithWindows(self.view, self._window_length).columns(keys, window)

    def _window_length(self) -> int | None:
        """Return the length of the operator's windows in us, which is looked up once.

        None if there are no windows yet.
        """
        name = self.view.window
        assert name is not None
        if name not in self.known.window_us:
            location = self.known.location
            request = ScanRequest(
                location.run_id, location.operator.name, at=self.at, columns=[name], limit=WINDOWS_LOOKED_AT
            )
            with StateScan(self.router.scan(location, request, self.deadline), WINDOWS_LOOKED_AT) as rows:
                windows = rows.to_arrow().column(name).combine_chunks()
            length = length_of(self.view.operator, windows)
            if length is None:
                return None
            self.known.window_us[name] = length
        return self.known.window_us[name]
