"""``ProcessorTester``: unit tests of processors without a cluster. The counterpart in PySpark 4.2 is ``TwsTester``.

The state is kept by the same code as in a query, in a store of the tester's own, so that TTL and checks of values are
the same as in a query.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import IllegalArgumentException, PySparkValueError
from pyspark.errors.exceptions.base import PySparkAssertionError
from pyspark.sql import Row
from pyspark.sql import types as T
from pyspark.sql.types import StructType

from backends import FileStateStoreProvider, StateStoreConf, StateStoreId
from backends.conf import DEFAULT_FAMILY
from backends.encoding.keys import KeyRange, decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.providers.standalone_provider import LocalStateStoreProvider
from backends.store import StateStore
from coordinator_actor.messages import BatchTimes, OperatorFigures
from spark_bridge.exceptions import ProcessorTesterError
from spark_bridge.state_format.layouts import LIST, MAP, VALUE
from spark_bridge.stateful import handle
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.declaration import make_deleted
from spark_bridge.stateful.list_state import ListState
from spark_bridge.stateful.map_state import MapState
from spark_bridge.stateful.process_task import ProcessorState, detached
from spark_bridge.stateful.state_values import RowCodec
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo, call_problem

if TYPE_CHECKING:
    import pandas as pd

# Errors of ``ProcessorTester`` that are also of the class that PySpark's ``TwsTester`` raises in their place.
#
# So a test that was written for ``TwsTester`` catches them. All are ``ProcessorTesterError``.


class TesterValueError(PySparkValueError, ProcessorTesterError):  # type: ignore[misc]
    """An argument is missing, or a call does not go with the time mode."""


class TesterTimeError(IllegalArgumentException, ProcessorTesterError):  # type: ignore[misc]
    """Time does not move forward."""


class TesterAssertionError(PySparkAssertionError, ProcessorTesterError):  # type: ignore[misc]
    """The state variable, time mode or output mode does not exist, or there are two kinds of initial state."""


# The ``handle`` of a ``ProcessorTester``: state and timers of a key outside a call of the processor.


class TesterHandle:
    """Chooses a key, whose state variables and timers a test may then use; names are those of ``TwsTester.handle``.

    The state variables are the objects that the processor's ``init`` received, whatever schema and TTL a test names.
    The tester's next call keeps the changes that a test makes through them and here. Raises ``ProcessorTesterError``
    for a variable that ``init`` has not declared, and for timers without a time mode or a current key.
    """

    def __init__(self, tester: ProcessorTester) -> None:
        self._tester = tester
        self.grouping_key: Any = None
        """The key that ``setGroupingKey`` has made the current one last; None before."""

    def setGroupingKey(self, key: Any) -> None:
        """Make a key the current one until the tester's next call."""
        self._tester._begin(key)
        self.grouping_key = key

    def setWatermark(self, watermarkMs: int) -> None:
        """Move the watermark to ``watermarkMs`` (since 1970) without firing timers: the next call fires them."""
        self._tester._set_watermark(watermarkMs)

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> handle.ValueState:
        """Return a value that ``init`` has declared."""
        return self._tester._declared(handle.ValueState, stateName)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        """Return a list that ``init`` has declared."""
        return self._tester._declared(ListState, stateName)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Return a map that ``init`` has declared."""
        return self._tester._declared(MapState, stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer of the current key; see ``StatefulProcessorHandle.registerTimer``."""
        self._tester._timers().registerTimer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key, if the key has it."""
        self._tester._timers().deleteTimer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        """Yield the timers of the current key, ascending."""
        return self._tester._timers().listTimers()

    def deleteState(self, stateName: str) -> None:
        """Remove the current key's value, list or map."""
        self._tester._clear(stateName)

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state variable with the values of all keys; the processor cannot use it any more."""
        self._tester._forget(stateName)


_KEYS = pa.schema([pa.field("key", pa.int64())])
"""A key is stored as its number, in the order of appearance: so it may be of any type."""
_KINDS = {handle.ValueState: VALUE, ListState: LIST, MapState: MAP}


class ProcessorTester:
    """Runs a processor on the rows of one key at a time; each call is a micro-batch.

    Names and meaning are those of PySpark 4.2's ``TwsTester``. Timers fire when ``setProcessingTime`` or
    ``setWatermark`` moves time on to them.

    Arguments:

    - ``processor``: the processor, of rows or of pandas DataFrames.
    - ``initialStateRow``, ``initialStatePandas``: pairs of a key and a ``Row`` or DataFrame, which are handed to
      ``handleInitialState`` at once.
    - ``timeMode``: "None", "ProcessingTime" or "EventTime".
    - ``eventTimeExtractor``: with "EventTime", a function that returns the event time of a row in ms since 1970. Rows
      at or before the watermark are late, and dropped.
    - ``keySchema``: the schema of the key, a StructType or DDL text. With it, a key is a value, or a tuple if it has
      several columns, and is checked. Without it, a key is one column, whatever its type is, as in ``TwsTester``.

    ``init`` is called once. ``handle`` reaches the state of a key between calls. Raises ``ProcessorTesterError`` for
    wrong arguments, of classes that are also PySpark's own.
    """

    def __init__(
        self,
        processor: Any,
        initialStateRow: Sequence[tuple[Any, Row]] | None = None,
        initialStatePandas: Sequence[tuple[Any, pd.DataFrame]] | None = None,
        timeMode: str = "None",
        outputMode: str = "Append",
        eventTimeExtractor: Callable[[Any], int] | None = None,
        *,
        keySchema: T.StructType | str | None = None,
    ) -> None:
        self.processor = processor
        self._time_mode = timeMode.lower()
        self._event_time = eventTimeExtractor
        if self._time_mode not in handle.TIME_MODES:
            raise TesterAssertionError(
                f"timeMode={timeMode!r} is unknown: choose 'None', 'ProcessingTime' or 'EventTime'."
            )
        if outputMode.lower() not in ("append", "update", "complete"):
            raise TesterAssertionError(
                f"outputMode={outputMode!r} is unknown: choose 'Append', 'Update' or 'Complete'."
            )
        if self._time_mode == handle.EVENT_TIME and eventTimeExtractor is None:
            raise TesterValueError("[ARGUMENT_REQUIRED] eventTimeExtractor is missing: timeMode='EventTime' needs it.")
        if (problem := call_problem(processor, has_timers=self._time_mode != handle.NONE)) is not None:
            raise TesterAssertionError(problem)
        if initialStateRow is not None and initialStatePandas is not None:
            raise TesterAssertionError("Give initialStateRow or initialStatePandas, not both.")
        self._times = BatchTimes()
        self._uses_pandas = initialStatePandas is not None
        directory = tempfile.TemporaryDirectory(prefix="statestore-tester-")
        self._provider = FileStateStoreProvider(
            StateStoreId(directory.name, "tester", 0), StateStoreConf(fsync=False, min_versions_to_retain=1)
        )
        self._finalizer = weakref.finalize(self, _remove, self._provider, directory)
        self._key_codec: RowCodec | None = None if keySchema is None else RowCodec(struct_of(keySchema))
        self._numbers: dict[Any, int] = {}
        self._keys: list[tuple[Any, ...]] = []
        self._open: LocalStateAccess | None = None
        self._state = ProcessorState(_KEYS, self._time_mode, None)
        processor.init(self._state.handle)
        self._schema = OperatorSchema(self._state.declare(), tuple(_KEYS.names))
        self.handle = TesterHandle(self)
        initial = initialStateRow if initialStateRow is not None else initialStatePandas
        for key, state in initial or ():
            with self._batch(key) as columns:
                processor.handleInitialState(columns, state, self._state.timer_values)

    def test(self, key: Any, input: Sequence[Row]) -> list[Row]:
        """Return the rows that the processor returns for a key's rows; late rows are left out."""
        self._uses_pandas = False
        return self._handle_rows(key, iter([row for row in input if self._is_in_time(row)]))

    def testInPandas(self, key: Any, input: pd.DataFrame) -> pd.DataFrame:
        """Return the DataFrame that the processor returns for a key's DataFrame; late rows are left out."""
        self._uses_pandas = True
        if self._time_mode == handle.EVENT_TIME:
            in_time = np.array([self._is_in_time(row) for _, row in input.iterrows()], np.bool_)
            input = input[in_time].reset_index(drop=True)
        return _one_frame(self._handle_rows(key, iter([input])))

    def _is_in_time(self, row: Any) -> bool:
        if self._time_mode != handle.EVENT_TIME or self._event_time is None:
            return True
        return self._event_time(row) > self._times.watermark_ms

    def setProcessingTime(self, currentTimeMs: int) -> Any:
        """Move processing time on to ``currentTimeMs`` (since 1970), and return the output of the timers that fire.

        Values whose TTL has passed expire. Raises ``ProcessorTesterError`` if time would not move forward, or in
        another time mode.
        """
        self._check_advance(handle.PROCESSING_TIME, "Processing time", self._times.timestamp_ms, currentTimeMs)
        self._times = BatchTimes(timestamp_ms=currentTimeMs)
        return self._handle_timers()

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark on to ``currentWatermarkMs`` (since 1970), and return the output of the timers that fire.

        Raises ``ProcessorTesterError`` if the watermark would not move forward, or in another time mode.
        """
        self._set_watermark(currentWatermarkMs)
        return self._handle_timers()

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set a key's value; raises ``ProcessorTesterError`` if the value state does not exist."""
        with self._variable(handle.ValueState, stateName, key) as state:
            state.update(value)

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """Return a key's value or None; raises ``ProcessorTesterError`` if the value state does not exist."""
        with self._variable(handle.ValueState, stateName, key) as state:
            return state.get()

    def updateListState(self, stateName: str, key: Any, value: Sequence[tuple[Any, ...]]) -> None:
        """Set a key's list; raises ``ProcessorTesterError`` if the list state does not exist."""
        with self._variable(ListState, stateName, key) as state:
            if value:
                state.put(value)
            else:
                state.clear()

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """Return a key's list; raises ``ProcessorTesterError`` if the list state does not exist."""
        with self._variable(ListState, stateName, key) as state:
            return list(state.get())

    def updateMapState(self, stateName: str, key: Any, value: dict[tuple[Any, ...], tuple[Any, ...]]) -> None:
        """Set a key's map; raises ``ProcessorTesterError`` if the map state does not exist."""
        with self._variable(MapState, stateName, key) as state:
            state.clear()
            for user_key, user_value in value.items():
                state.updateValue(user_key, user_value)

    def peekMapState(self, stateName: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return a key's map; raises ``ProcessorTesterError`` if the map state does not exist."""
        with self._variable(MapState, stateName, key) as state:
            return dict(state.iterator())

    def deleteState(self, stateName: str, key: Any) -> None:
        """Remove a key's value, list or map; raises ``ProcessorTesterError`` if the state variable does not exist."""
        with self._batch(key):
            self._clear(stateName)

    def _handle_rows(self, key: Any, rows: Iterator[Any]) -> list[Any]:
        with self._batch(key) as columns:
            return self._as_in_a_query(self.processor.handleInputRows(columns, rows, self._state.timer_values))

    def _handle_timers(self) -> Any:
        output: list[Any] = []
        with self._committed():
            state = self._restarted()
            encoded = state.keys_with_expired_timers()
            rows = decode_keys(encoded, _KEYS)
            state.begin(encoded, rows)
            for i, number in enumerate(rows.column(0).to_pylist()):
                state.set_key(i)
                for expiry in state.expired_timers():
                    # By name, as tasks call it, and as PySpark's do.
                    key, info = self._keys[number], ExpiredTimerInfo(expiry)
                    result = self.processor.handleExpiredTimer(
                        key=key, timerValues=state.timer_values, expiredTimerInfo=info
                    )
                    output += self._as_in_a_query(result)
                    state.handle.deleteTimer(expiry)
        return _one_frame(output) if self._uses_pandas else output

    def _as_in_a_query(self, result: Any) -> list[Any]:
        """Return the processor's output; a NaT or NA in a row is None, as in the output of a query."""
        return list(result or ()) if self._uses_pandas else [detached(row) for row in result or ()]

    def _check_advance(self, mode: str, what: str, now_ms: int, then_ms: int) -> None:
        if self._time_mode != mode:
            raise TesterValueError(
                f"[UNSUPPORTED_OPERATION] {what} cannot be set with timeMode={self._time_mode!r}; it needs {mode!r}."
            )
        if then_ms <= now_ms:
            raise TesterTimeError(f"{what} must move forward: it is {now_ms} ms, and {then_ms} ms was given.")
        self._commit()

    @contextmanager
    def _variable(self, kind: type[handle.State], name: str, key: Any) -> Iterator[handle.State]:
        """Yield a state variable with the key as the current key, in a separate micro-batch."""
        state = self._declared(kind, name)
        with self._batch(key):
            yield state

    def _declared(self, kind: type[handle.State], name: str) -> handle.State:
        state = self._state.states.get(name)
        if not isinstance(state, kind):
            raise _unknown(f"{_KINDS[kind]} state", name, self._state)
        return state

    @contextmanager
    def _batch(self, key: Any) -> Iterator[tuple[Any, ...]]:
        """Run a micro-batch with one key, and yield the key's columns; it is committed if no error is raised."""
        with self._committed():
            yield self._begin(key)

    @contextmanager
    def _committed(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._open = None
            raise
        self._commit()

    def _begin(self, key: Any) -> tuple[Any, ...]:
        """Begin a micro-batch with one key, which is the current one from now on; return the key's columns."""
        identity, columns = self._identified(key)
        try:
            number = self._numbers.setdefault(identity, len(self._numbers))
        except TypeError as error:
            raise ProcessorTesterError(f"The key {key!r} has no hash: give keySchema=, or another key.") from error
        if number == len(self._keys):
            self._keys.append(columns)
        state = self._restarted()
        rows = pa.RecordBatch.from_pydict({"key": [number]}, schema=_KEYS)
        state.begin(encode_keys(rows, np.zeros(1, np.uint16)), rows)
        state.set_key(0)
        return columns

    def _restarted(self) -> ProcessorState:
        """Commit the open micro-batch, and begin one without keys."""
        self._commit()
        self._open = LocalStateAccess(self._provider, self._schema, self._times, (0, 1), 1)
        self._state.restart(self._open)
        return self._state

    def _commit(self) -> None:
        """Commit the open micro-batch, if there is one."""
        store, self._open = self._open, None
        if store is not None:
            self._state.end()
            self._state.finish()
            store.commit(OperatorFigures())

    def _timers(self) -> handle.StatefulProcessorHandle:
        if self._time_mode == handle.NONE:
            raise TesterValueError(
                "[UNSUPPORTED_OPERATION] Timers need timeMode='ProcessingTime' or 'EventTime', not 'None'."
            )
        self._require_key()
        return self._state.handle

    def _require_key(self) -> None:
        if self._open is None:
            raise ProcessorTesterError("Between calls no key is current: call handle.setGroupingKey(key) first.")

    def _clear(self, name: str) -> None:
        """Remove the current key's state of a variable."""
        if name not in self._state.states:
            raise _unknown("state variable", name, self._state)
        self._require_key()
        self._state.states[name].clear()

    def _set_watermark(self, watermark_ms: int) -> None:
        self._check_advance(handle.EVENT_TIME, "The watermark", self._times.watermark_ms, watermark_ms)
        self._times = BatchTimes(watermark_ms=watermark_ms, late_watermark_ms=watermark_ms)

    def _forget(self, name: str) -> None:
        self._commit()
        if (state := self._state.handle._states.pop(name, None)) is not None:
            make_deleted(state, name, _KINDS[type(state)])

    def _identified(self, key: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the encoded key, and its columns as the processor gets them."""
        codec = self._key_codec
        if codec is None:
            return key, (key,)
        try:
            rows = codec.to_batch([tuple(key) if isinstance(key, tuple) else (key,)])
        except (TypeError, ValueError) as error:
            raise ProcessorTesterError(
                f"The key {key!r} is not of keySchema, {codec.struct.simpleString()}: {error}"
            ) from error
        return encode_keys(rows, np.zeros(1, np.uint16))[0].as_py(), codec.to_tuples(rows)[0]


def _unknown(kind: str, name: str, batch: ProcessorState) -> TesterAssertionError:
    names = ", ".join(f"{n!r} ({_KINDS[type(state)]} state)" for n, state in batch.states.items())
    return TesterAssertionError(
        f"[STATE_NOT_EXISTS] The processor declares no {kind} {name!r}; it declares {names or 'none'}."
    )


def _one_frame(frames: list[Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _remove(provider: FileStateStoreProvider, directory: tempfile.TemporaryDirectory[str]) -> None:
    provider.close()
    directory.cleanup()


# ``StateAccess`` over a provider in this process: for ``ProcessorTester``, which needs no cluster.


class LocalStateAccess:
    """The newest version of a provider, as a task of the next batch sees that version."""

    def __init__(
        self,
        provider: LocalStateStoreProvider,
        schema: OperatorSchema,
        times: BatchTimes,
        key_groups: tuple[int, int],
        num_key_groups: int,
    ) -> None:
        self.batch_id = provider.latest_version()
        self.times = times
        self.schema = schema
        self.key_groups = key_groups
        self.num_key_groups = num_key_groups
        self.figures: OperatorFigures | None = None
        self._base = provider.get_read_store(self.batch_id)
        self._store: StateStore = provider.get_store(self.batch_id)
        for family in schema.families:
            if family != DEFAULT_FAMILY:
                self._store.create_column_family(family)
        self._known = self._base.column_families

    def get_many(self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        if column_family not in self._known:
            return pa.nulls(len(keys), pa.binary())
        return self._base.get_many(keys, column_family)

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        left = limit
        for start, end in ranges if column_family in self._known else ():
            for batch in self._base.scan(start, end, column_family):
                if left is not None:
                    batch = batch.slice(0, left)  # noqa: PLW2901 - at most the limit
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left == 0:
                    return

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        if column_family != DEFAULT_FAMILY:
            self._store.create_column_family(column_family)  # also one that is in no schema, as hosts take them
        is_kept = pc.is_valid(values)
        # In the given order: if a key occurs twice, its last change counts.
        if pc.all(is_kept).as_py():
            self._store.put_many(keys, values, column_family)
        elif not pc.any(is_kept).as_py():
            self._store.remove_many(keys, column_family)
        else:
            for i, kept in enumerate(is_kept.to_pylist()):
                if kept:
                    self._store.put(keys[i].as_py(), values[i].as_py(), column_family)
                else:
                    self._store.remove(keys[i].as_py(), column_family)

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        self._store.commit()
        self._base.abort()
        self.figures = figures
