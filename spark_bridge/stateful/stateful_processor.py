"""The interface for users of ``transform_with_state``: a processor of rows by key.

Names and meaning are those of PySpark 4.2; any supported PySpark will do.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.types import StructType

from backends.exceptions import StateStoreError
from spark_bridge.exceptions import StateDeclarationError
from spark_bridge.operators.columns import spark_struct
from spark_bridge.stateful.declaration import PySparkExpiredTimerInfo, PySparkTimerValues
from spark_bridge.stateful.handle import StatefulProcessorHandle


class TimerValues(PySparkTimerValues):
    """Processing time and watermark of the batch, in ms since 1970; -1 if there is none."""

    __slots__ = ("_processing_time_ms", "_watermark_ms")

    def __init__(self, currentProcessingTimeInMs: int = -1, currentWatermarkInMs: int = -1) -> None:
        self._processing_time_ms = currentProcessingTimeInMs
        self._watermark_ms = currentWatermarkInMs

    def getCurrentProcessingTimeInMs(self) -> int:
        """Return the batch's processing time, in ms since 1970; -1 with time mode "none"."""
        return self._processing_time_ms

    def getCurrentWatermarkInMs(self) -> int:
        """Return the batch's watermark, in ms since 1970; -1 with time mode "none"."""
        return self._watermark_ms


class ExpiredTimerInfo(PySparkExpiredTimerInfo):
    """The timer that ``handleExpiredTimer`` is called for."""

    __slots__ = ("_expiry_ms",)

    def __init__(self, expiryTimeInMs: int = -1) -> None:
        self._expiry_ms = expiryTimeInMs

    def getExpiryTimeInMs(self) -> int:
        """Return when the timer was to fire, in ms since 1970."""
        return self._expiry_ms


def call_problem(processor: Any, *, has_timers: bool) -> str | None:
    """Return why a method of a processor cannot be called as tasks call it, or None if all can.

    Tasks call ``handleExpiredTimer`` by the names of its parameters, as Spark does, and the others by position.
    """
    calls: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("handleInputRows", ("key", "rows", "timerValues"), ()),
        ("handleInitialState", ("key", "initialState", "timerValues"), ()),
    ]
    if has_timers:
        calls.append(("handleExpiredTimer", (), ("key", "timerValues", "expiredTimerInfo")))
    for name, by_position, by_name in calls:
        try:
            signature = inspect.signature(getattr(processor, name))
        except (AttributeError, TypeError, ValueError):
            continue  # a method that the processor does not need, or whose signature Python does not know
        try:
            signature.bind(*by_position, **dict.fromkeys(by_name))
        except TypeError as error:
            how = "by name, as Spark calls it" if by_name else "by position"
            return (
                f"{type(processor).__name__}.{name}{signature} cannot be called: {error}. It is called with "
                f"{', '.join((*by_position, *by_name))} {how}: declare {name}(self, "
                f"{', '.join((*by_position, *by_name))})."
            )
    return None


class StatefulProcessor(ABC):
    """The logic of ``transform_with_state``: called for each key with its rows, and keeping state between batches.

    A subclass has ``init`` and ``handleInputRows``, and other methods as needed. Rows, output and initial state are
    ``pyspark.sql.Row``; with ``transform_with_state_in_pandas`` they are pandas DataFrames. A subclass of PySpark's own
    ``StatefulProcessor`` serves as well.
    """

    @abstractmethod
    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state variables, by ``handle.getValueState`` and so on; called before all else.

        It is called on the driver as well as in each task and batch, and must declare the same variables every time.
        """

    @abstractmethod
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        """Handle the rows that one key (a tuple) has in the batch, and yield the rows to emit."""

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Any]:
        """Handle an expired timer of the key, and yield the rows to emit; the timer is deleted afterwards."""
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        """Make state of one row (or DataFrame) of the key's initial state; called before the first batch only."""
        return

    def close(self) -> None:
        """Release what ``init`` has acquired; called last."""
        return


# The interface for users of ``transform_with_state_in_arrow``: a processor in columns.
#
# The processor is called once per partition and batch, with all rows, their keys, and the state that the keys have.


Columns: TypeAlias = pa.Table | pa.RecordBatch
"""Columns of rows; they go by name."""
Flags: TypeAlias = npt.NDArray[np.bool_]
KeyMask: TypeAlias = pa.BooleanArray | Flags
"""A boolean per key."""

TIMERS_SCHEMA = pa.schema([("key_index", pa.int64()), ("expiry_ms", pa.int64())])
"""Timers: the number of the key among the keys of the batch, and when the timer fires, in ms since 1970."""


@dataclass(frozen=True)
class ArrowBatch:
    """The input of a processor: m keys, the n rows of these keys, and the state that the keys have.

    - ``keys``: the key columns, a row per key. A key without rows has a timer that has expired.
    - ``rows``: all columns of the rows, sorted by key; the rows of one key keep their order.
    - ``key_index``: the number of each row's key, int64, one per row.
    - ``offsets``: m + 1 numbers; the rows of key i are those from ``offsets[i]`` to ``offsets[i + 1]``.
    - ``state``: the declared columns, a row per key, of nulls where ``has_state`` is false.
    - ``expired_timers``: the timers that fire in this batch, as in ``TIMERS_SCHEMA``; they are deleted afterwards.
    - ``timer_values``: processing time and watermark of the batch.
    """

    keys: pa.Table
    rows: pa.Table
    key_index: pa.Int64Array
    offsets: npt.NDArray[np.int64]
    state: pa.Table
    has_state: pa.BooleanArray
    expired_timers: pa.Table
    timer_values: TimerValues

    @property
    def num_keys(self) -> int:
        """Return the number of keys, m."""
        return int(self.keys.num_rows)


@dataclass(frozen=True)
class ArrowResult:
    """The answer of a processor. Columns of all tables go by name.

    - ``output``: the rows to emit, any number of them.
    - ``state``: the new state, a row per key in the order of the batch's keys; None leaves all state as it is.
    - ``updated``: which keys' state is written (None: that of all keys).
    - ``removed``: which keys lose their state (None: no key).
    - ``timers``: timers to set, as in ``TIMERS_SCHEMA``.
    - ``deleted_timers``: timers to delete, as in ``TIMERS_SCHEMA``.
    """

    output: Columns | None = None
    state: Columns | None = None
    updated: KeyMask | None = None
    removed: KeyMask | None = None
    timers: Columns | None = None
    deleted_timers: Columns | None = None


class ArrowStatefulProcessorHandle:
    """Declares, in ``init``, the state that a key has."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self.declared: str | None = None

    def declare_state(
        self, schema: StructType | pa.Schema | str, *, name: str = "state", ttl_ms: int | None = None
    ) -> None:
        """Declare that each key has a row of ``schema``: a StructType, an Arrow schema, or DDL text.

        The row is kept as a value state named ``name``. With ``ttl_ms``, it lives for that many milliseconds after the
        batch that wrote it. Raises ``StateDeclarationError`` for a second declaration, or for a schema that cannot be
        kept, and ``TimeModeError`` for a TTL without processing time.
        """
        if self.declared is not None:
            raise StateDeclarationError(
                f"State is declared twice, as {self.declared!r} and {name!r}: a processor in columns has one row of "
                "state per key, of as many columns as it likes."
            )
        self._handle.getValueState(name, _struct(schema), ttl_ms)
        self.declared = name

    def delete_if_exists(self, name: str) -> None:
        """Remove the state that an earlier version of the processor has declared under that name."""
        self._handle.deleteIfExists(name)


class ArrowStatefulProcessor(ABC):
    """The logic of ``transform_with_state_in_arrow``; a subclass has ``init`` and ``process``."""

    @abstractmethod
    def init(self, handle: ArrowStatefulProcessorHandle) -> None:
        """Declare the state, by ``handle.declare_state``; called before all else."""

    @abstractmethod
    def process(self, batch: ArrowBatch) -> ArrowResult | Columns | None:
        """Handle the rows and expired timers of many keys; an answer that is a table is output alone.

        Called once per partition and micro-batch. If there are more rows than the task may hold in memory, it is called
        for some keys after the other. If the rows of one key alone are more, it is called for this key several times,
        each time with the state that the call before has left; the last call has the key's expired timers.
        """

    def handle_initial_state(self, batch: ArrowBatch) -> ArrowResult | None:
        """Make state of the rows of an initial state, ``batch.rows``; the answer must have no output."""
        raise NotImplementedError(
            f"{type(self).__name__} receives an initial state, but has no handle_initial_state(batch)."
        )

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Release what ``init`` has acquired; called last."""


def arrow_processor(
    state: StructType | pa.Schema | str, *, name: str = "state", ttl_ms: int | None = None
) -> Callable[[Callable[[ArrowBatch], ArrowResult | Columns | None]], ArrowStatefulProcessor]:
    """Make a processor of a function of a batch, as a decorator: ``@arrow_processor("n long, total double")``.

    ``state``, ``name`` and ``ttl_ms`` are those of ``ArrowStatefulProcessorHandle.declare_state``.
    """

    def made(function: Callable[[ArrowBatch], ArrowResult | Columns | None]) -> ArrowStatefulProcessor:
        return _FunctionProcessor(function, state, name, ttl_ms)

    return made


@dataclass
class _FunctionProcessor(ArrowStatefulProcessor):
    function: Callable[[ArrowBatch], ArrowResult | Columns | None]
    state: StructType | pa.Schema | str
    name: str
    ttl_ms: int | None

    def init(self, handle: ArrowStatefulProcessorHandle) -> None:
        handle.declare_state(self.state, name=self.name, ttl_ms=self.ttl_ms)

    def process(self, batch: ArrowBatch) -> ArrowResult | Columns | None:
        return self.function(batch)


def _struct(schema: StructType | pa.Schema | str) -> StructType | str:
    if not isinstance(schema, pa.Schema):
        return schema
    try:
        return spark_struct(schema)
    except StateStoreError as error:
        raise StateDeclarationError(f"The schema of the state cannot be kept: {error}") from error
