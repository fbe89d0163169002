"""``ProcessorTester``: unit tests of processors without a cluster. The counterpart in PySpark 4.2 is ``TwsTester``.

The state is kept by the same code as in a query, in a store of the tester's own, so that TTL and checks of values are
the same as in a query.
"""

from __future__ import annotations

import datetime as dt
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql import types as T

from backends import FileStateStoreProvider, StateStoreConf, StateStoreId
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes, OperatorFigures
from spark_bridge.exceptions import ProcessorTesterError
from spark_bridge.state_format.layouts import LIST, MAP, VALUE
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.handle import EVENT_TIME, PROCESSING_TIME, TIME_MODES
from spark_bridge.stateful.list_state import ListState
from spark_bridge.stateful.map_state import MapState
from spark_bridge.stateful.process_task import started
from spark_bridge.stateful.processor_state import ProcessorState
from spark_bridge.stateful.row_values import RowCodec
from spark_bridge.stateful.stateful_processor import ExpiredTimerInfo
from spark_bridge.stateful.value_state import ValueState
from spark_bridge.task.local_state import LocalStateAccess

if TYPE_CHECKING:
    import pandas as pd

State = TypeVar("State", ValueState, ListState, MapState)

_KEY_GROUPS = 16
_KINDS = {ValueState: VALUE, ListState: LIST, MapState: MAP}
_KEY_TYPES: tuple[tuple[type, T.DataType], ...] = (
    (bool, T.BooleanType()),
    (int, T.LongType()),
    (float, T.DoubleType()),
    (str, T.StringType()),
    (bytes, T.BinaryType()),
    (dt.datetime, T.TimestampType()),
    (dt.date, T.DateType()),
    (Decimal, T.DecimalType(38, 18)),
)
"""The type of a key's column by the class of its value; the first that fits counts."""


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
    - ``keySchema``: the schema of the key, a StructType or DDL text; by default that of the first key.

    A key is a value, or a tuple if it has several columns. Raises ``ProcessorTesterError`` for wrong arguments.
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
        if self._time_mode not in TIME_MODES:
            raise ProcessorTesterError(
                f"timeMode={timeMode!r} is unknown: choose 'None', 'ProcessingTime' or 'EventTime'."
            )
        if outputMode.lower() not in ("append", "update", "complete"):
            raise ProcessorTesterError(
                f"outputMode={outputMode!r} is unknown: choose 'Append', 'Update' or 'Complete'."
            )
        if self._time_mode == EVENT_TIME and eventTimeExtractor is None:
            raise ProcessorTesterError(
                "[ARGUMENT_REQUIRED] eventTimeExtractor is missing: timeMode='EventTime' needs it."
            )
        if initialStateRow is not None and initialStatePandas is not None:
            raise ProcessorTesterError("Give initialStateRow or initialStatePandas, not both.")
        self._times = BatchTimes()
        self._uses_pandas = initialStatePandas is not None
        directory = tempfile.TemporaryDirectory(prefix="statestore-tester-")
        self._provider = FileStateStoreProvider(
            StateStoreId(directory.name, "tester", 0), StateStoreConf(fsync=False, min_versions_to_retain=1)
        )
        self._finalizer = weakref.finalize(self, _remove, self._provider, directory)
        self._keys: RowCodec | None = None if keySchema is None else RowCodec(struct_of(keySchema))
        self._schema: OperatorSchema | None = None
        # Mistakes in init() are raised here, not with the first key.
        self._declared(RowCodec(struct_of("key STRING")))
        initial = initialStateRow if initialStateRow is not None else initialStatePandas
        for key, state in initial or ():
            with self._batch([key]) as (batch, keys):
                batch.set_key(0)
                processor.handleInitialState(keys[0], state, batch.timer_values)

    def test(self, key: Any, input: Sequence[Row]) -> list[Row]:
        """Return the rows that the processor gives for a key's rows; late rows are left out."""
        self._uses_pandas = False
        extractor, watermark = self._event_time, self._times.watermark_ms
        if self._time_mode == EVENT_TIME and extractor is not None:
            input = [row for row in input if extractor(row) > watermark]
        return self._handle_rows(key, iter(input))

    def testInPandas(self, key: Any, input: pd.DataFrame) -> pd.DataFrame:
        """Return the DataFrame that the processor gives for a key's DataFrame; late rows are left out."""
        self._uses_pandas = True
        extractor, watermark = self._event_time, self._times.watermark_ms
        if self._time_mode == EVENT_TIME and extractor is not None:
            in_time = [extractor(row) > watermark for _, row in input.iterrows()]
            input = input[in_time].reset_index(drop=True)
        return _one_frame(self._handle_rows(key, iter([input])))

    def setProcessingTime(self, currentTimeMs: int) -> Any:
        """Move processing time on to ``currentTimeMs`` (since 1970), and return the output of the timers that fire.

        Values whose TTL has passed expire. Raises ``ProcessorTesterError`` if time would not move forward, or in
        another time mode.
        """
        self._check_advance(PROCESSING_TIME, "Processing time", self._times.timestamp_ms, currentTimeMs)
        self._times = BatchTimes(timestamp_ms=currentTimeMs)
        return self._handle_timers()

    def setWatermark(self, currentWatermarkMs: int) -> Any:
        """Move the watermark on to ``currentWatermarkMs`` (since 1970), and return the output of the timers that fire.

        Raises ``ProcessorTesterError`` if the watermark would not move forward, or in another time mode.
        """
        self._check_advance(EVENT_TIME, "The watermark", self._times.watermark_ms, currentWatermarkMs)
        self._times = BatchTimes(watermark_ms=currentWatermarkMs, late_watermark_ms=currentWatermarkMs)
        return self._handle_timers()

    def updateValueState(self, stateName: str, key: Any, value: tuple[Any, ...]) -> None:
        """Set a key's value; raises ``ProcessorTesterError`` if there is no such value state."""
        with self._state(ValueState, stateName, key) as state:
            state.update(value)

    def peekValueState(self, stateName: str, key: Any) -> tuple[Any, ...] | None:
        """Return a key's value or None; raises ``ProcessorTesterError`` if there is no such value state."""
        with self._state(ValueState, stateName, key) as state:
            return state.get()

    def updateListState(self, stateName: str, key: Any, value: Sequence[tuple[Any, ...]]) -> None:
        """Set a key's list; raises ``ProcessorTesterError`` if there is no such list state."""
        with self._state(ListState, stateName, key) as state:
            if value:
                state.put(value)
            else:
                state.clear()

    def peekListState(self, stateName: str, key: Any) -> list[tuple[Any, ...]]:
        """Return a key's list; raises ``ProcessorTesterError`` if there is no such list state."""
        with self._state(ListState, stateName, key) as state:
            return list(state.get())

    def updateMapState(self, stateName: str, key: Any, value: dict[tuple[Any, ...], tuple[Any, ...]]) -> None:
        """Set a key's map; raises ``ProcessorTesterError`` if there is no such map state."""
        with self._state(MapState, stateName, key) as state:
            state.clear()
            for user_key, user_value in value.items():
                state.updateValue(user_key, user_value)

    def peekMapState(self, stateName: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return a key's map; raises ``ProcessorTesterError`` if there is no such map state."""
        with self._state(MapState, stateName, key) as state:
            return dict(state.iterator())

    def deleteState(self, stateName: str, key: Any) -> None:
        """Remove a key's value, list or map; raises ``ProcessorTesterError`` if there is no such state variable."""
        with self._batch([key]) as (batch, _):
            if stateName not in batch.states:
                raise _unknown("state variable", stateName, batch)
            batch.set_key(0)
            batch.states[stateName].clear()

    def _handle_rows(self, key: Any, rows: Iterator[Any]) -> list[Any]:
        with self._batch([key]) as (batch, keys):
            batch.set_key(0)
            return list(self.processor.handleInputRows(keys[0], rows, batch.timer_values) or ())

    def _handle_timers(self) -> Any:
        output: list[Any] = []
        if self._schema is not None:
            with self._batch(None) as (batch, keys):
                for i, key in enumerate(keys):
                    batch.set_key(i)
                    for expiry in batch.expired_timers():
                        info = ExpiredTimerInfo(expiry)
                        output += (
                            self.processor.handleExpiredTimer(
                                key=key, timerValues=batch.timer_values, expiredTimerInfo=info
                            )
                            or ()
                        )
                        batch.handle.deleteTimer(expiry)
        return _one_frame(output) if self._uses_pandas else output

    def _check_advance(self, mode: str, what: str, now_ms: int, then_ms: int) -> None:
        if self._time_mode != mode:
            raise ProcessorTesterError(
                f"[UNSUPPORTED_OPERATION] {what} cannot be set with timeMode={self._time_mode!r}; it needs {mode!r}."
            )
        if then_ms <= now_ms:
            raise ProcessorTesterError(f"{what} must move forward: it is {now_ms} ms, and {then_ms} ms was given.")

    @contextmanager
    def _state(self, kind: type[State], name: str, key: Any) -> Iterator[State]:
        """Give a state variable with the key as the current key, in a micro-batch of its own."""
        with self._batch([key]) as (batch, _):
            state = batch.states.get(name)
            if not isinstance(state, kind):
                raise _unknown(f"{_KINDS[kind]} state", name, batch)
            batch.set_key(0)
            yield state

    @contextmanager
    def _batch(self, keys: list[Any] | None) -> Iterator[tuple[ProcessorState, list[tuple[Any, ...]]]]:
        """Run a micro-batch with these keys (None: those whose timers fire); it is committed if no error is raised.

        Gives the state, and the keys as tuples.
        """
        if keys is not None and self._keys is None:
            self._keys = RowCodec(_struct_of_key(_columns(keys[0])))
        codec = self._keys or RowCodec(struct_of("key STRING"))
        if self._schema is None:
            self._schema = self._declared(codec)
        store = LocalStateAccess(self._provider, self._schema, self._times, (0, _KEY_GROUPS), _KEY_GROUPS)
        with started(self.processor, codec.schema, self._time_mode, store) as batch:
            if keys is None:
                encoded = batch.keys_with_expired_timers()
                rows = decode_keys(encoded, codec.schema)
            else:
                rows = self._key_rows(codec, keys)
                encoded = encode_keys(rows, key_groups(rows, _KEY_GROUPS))
            batch.begin(encoded, rows)
            yield batch, codec.to_tuples(rows)
            batch.end()
            batch.finish()
            store.commit(OperatorFigures())

    def _key_rows(self, codec: RowCodec, keys: list[Any]) -> pa.RecordBatch:
        try:
            return codec.to_batch([_columns(key) for key in keys])
        except (TypeError, ValueError) as error:
            raise ProcessorTesterError(
                f"The keys {keys!r} are not of the key's schema, {codec.struct.simpleString()}: {error} Give keys of "
                "one type, or keySchema=."
            ) from error

    def _declared(self, keys: RowCodec) -> OperatorSchema:
        """Return what the processor declares, as on the driver of a query."""
        driver = ProcessorState(self.processor, keys.schema, self._time_mode, None)
        self.processor.init(driver.handle)
        self.processor.close()
        return OperatorSchema(driver.declare(), tuple(keys.schema.names))


def _columns(key: Any) -> tuple[Any, ...]:
    """Return the columns of a key; a ``Row`` is a tuple of columns as well."""
    return tuple(key) if isinstance(key, tuple) else (key,)


def _struct_of_key(columns: tuple[Any, ...]) -> T.StructType:
    struct = T.StructType()
    for i, value in enumerate(columns):
        plain = value.item() if hasattr(value, "item") else value
        for kind, data_type in _KEY_TYPES:
            if isinstance(plain, kind):
                struct.add(f"key{i}" if len(columns) > 1 else "key", data_type)
                break
        else:
            raise ProcessorTesterError(
                f"The type of the key {columns!r} cannot be told from {value!r}: give keySchema=."
            )
    return struct


def _unknown(kind: str, name: str, batch: ProcessorState) -> ProcessorTesterError:
    known = ", ".join(f"{n!r} ({_KINDS[type(state)]} state)" for n, state in batch.states.items())
    return ProcessorTesterError(f"The processor declares no {kind} {name!r}; it declares {known or 'none'}.")


def _one_frame(frames: list[Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _remove(provider: FileStateStoreProvider, directory: tempfile.TemporaryDirectory[str]) -> None:
    provider.close()
    directory.cleanup()
