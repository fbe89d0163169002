"""``StatefulProcessorHandle``, which declares state variables and sets timers; ``ValueState``; and the time modes."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from backends.encoding.columns import list_array, list_parts, offsets_of
from backends.encoding.operator_schema import StateVariable
from backends.encoding.sorted_pairs import key_order
from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import IllegalStateValueError, StateDeclarationError, TimeModeError
from spark_bridge.state_format import layouts
from spark_bridge.state_format.stored_rows import by_expiry, expired_ranges, without_expiry
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.declaration import (
    CREATED,
    INITIALIZED,
    INT64_MAX,
    PRE_INIT,
    Declaration,
    KeyStep,
    NoKey,
    PySparkStatefulProcessorHandle,
    PySparkValueState,
    check_variable_name,
    invalid_handle_state,
    make_deleted,
)
from spark_bridge.stateful.list_state import ListState
from spark_bridge.stateful.map_state import MapState
from spark_bridge.stateful.state_values import StateValues
from spark_bridge.stateful.ttl import Ttl

# Values: one at a grouping key.


_UNREAD: Any = object()


class ValueState(PySparkValueState):
    """A state variable that holds one value per grouping key, a tuple of its schema's fields.

    Methods read and change the value of the current key; see ``StatefulProcessorHandle.getValueState``.
    """

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep) -> None:
        self._codec = declaration.codec
        self._family, self._schema = layouts.family_of(variable)
        self._step = step
        self._ttl = Ttl(declaration.ttl_ms, step)
        self._accepted = StateValues(declaration.name, "value", declaration.codec)
        self._accept = self._accepted.accept
        self._is_immutable = self._accepted.is_immutable
        self._values: list[Any] = []
        self._changed: list[int] = []
        self._expired: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, np.int64)

    def exists(self) -> bool:
        """Return whether the key has a value."""
        value = self._values[self._step.index]
        return (self._read() if value is _UNREAD else value) is not None

    def get(self) -> tuple[Any, ...] | None:
        """Return the key's value, None if it has none."""
        value = self._values[self._step.index]
        if value is _UNREAD:
            value = self._read()
        if value is None or self._is_immutable:
            return value  # type: ignore[no-any-return]
        return self._accepted.copied(value)

    def update(self, newValue: tuple[Any, ...]) -> None:
        """Set the key's value; its TTL restarts. Raises ``IllegalStateValueError`` if it does not fit the schema."""
        index = self._step.index
        self._values[index] = self._accept(newValue)
        self._changed.append(index)

    def clear(self) -> None:
        """Remove the key's value."""
        index = self._step.index
        self._values[index] = None
        self._changed.append(index)

    def _begin(self) -> None:
        self._values = [_UNREAD] * len(self._step.keys)
        self._changed = []
        self._expired = np.zeros(0, np.int64)

    def _read(self) -> Any:
        """Read the values of all keys of the step at once; return the current key's value."""
        stored = self._step.store.get_many(self._step.keys, self._family)
        present = pc.is_valid(stored).to_numpy(zero_copy_only=False)
        where = np.flatnonzero(present)
        decoded = self._schema.decode_values(stored if len(where) == len(stored) else stored.take(pa.array(where)))
        if self._ttl.is_on:
            alive = self._ttl.alive(decoded)
            self._expired, where = where[~alive], where[alive]
            decoded = decoded.filter(pa.array(alive))
        rows = self._codec.to_tuples(decoded.select(self._codec.schema.names))
        values = self._values
        if len(where) == len(values) and not self._changed:
            self._values = rows
        else:
            changed = {i: values[i] for i in self._changed}
            values[:] = [None] * len(values)
            for i, row in zip(where.tolist(), rows, strict=True):
                values[i] = row
            for i, value in changed.items():
                values[i] = value
        return self._values[self._step.current]

    def _end(self) -> None:
        step, values = self._step, self._values
        indices = np.unique(np.array(self._changed, np.int64))
        written = np.array([i for i in indices.tolist() if values[i] is not None], np.int64)
        removed = np.setdiff1d(indices, written, assume_unique=True)
        try:
            rows = self._codec.to_batch([values[i] for i in written.tolist()])
        except (TypeError, ValueError) as error:
            raise self._accepted.refusal(error) from error
        batch = self._ttl.stamped(rows)
        step.stage(step.keys.take(pa.array(written)), self._schema.encode_values(batch), self._family)
        swept = np.setdiff1d(self._expired, indices)
        step.stage(step.keys.take(pa.array(np.union1d(removed, swept))), None, self._family)
        step.figures.num_rows_updated += len(written)
        step.figures.num_rows_removed += len(removed)
        if len(swept):
            step.figures.count("numValuesRemovedDueToTTLExpiry", len(swept))
        self._values, self._changed = [], []


# Timers of grouping keys: stored by key, and by time, so that the timers that fire are one range per key group.


class Timers:
    """The timers of one partition's grouping keys; those at or before ``until_ms`` (since 1970) fire in this batch."""

    def __init__(self, variable: StateVariable, step: KeyStep, until_ms: int) -> None:
        self._family, self._schema = layouts.family_of(variable, layouts.TIMERS_BY_KEY)
        self._expiry_family, self._expiry_schema = layouts.family_of(variable, layouts.TIMERS_BY_EXPIRY)
        self._step = step
        self.until_ms = until_ms
        self._lists: list[list[int] | None] | None = None
        self._before: dict[int, list[int]] = {}

    def register(self, expiry_ms: int) -> None:
        """Add a timer to the current key, unless the key has it."""
        timers = self._changeable()
        at = bisect_left(timers, expiry_ms)
        if at == len(timers) or timers[at] != expiry_ms:
            timers.insert(at, expiry_ms)
        self._step.figures.count("numRegisteredTimers")

    def delete(self, expiry_ms: int) -> None:
        """Remove a timer of the current key, if the key has it."""
        timers = self._changeable()
        at = bisect_left(timers, expiry_ms)
        if at < len(timers) and timers[at] == expiry_ms:
            del timers[at]
        self._step.figures.count("numDeletedTimers")

    def listed(self) -> Iterator[int]:
        """Yield the timers that the current key has at the time of the call, ascending."""
        return iter(list(self._all()[self._step.current] or ()))

    def expired(self) -> list[int]:
        """Return the current key's timers that fire in this batch, ascending."""
        timers = self._all()[self._step.current]
        if not timers or timers[0] > self.until_ms:
            return []
        expired = timers[: bisect_right(timers, self.until_ms)]
        self._step.figures.count("numExpiredTimers", len(expired))
        return expired

    def keys_with_expired(self) -> pa.BinaryArray:
        """Return the grouping keys that have a stored timer which fires in this batch, sorted."""
        ranges = expired_ranges(self._step.store.key_groups, self.until_ms)
        key_batches = [without_expiry(batch.column(0)) for batch in self._step.store.scan(ranges, self._expiry_family)]
        keys = pc.unique(pa.chunked_array(key_batches, pa.binary()))
        return keys.take(key_order(keys))

    def begin(self) -> None:
        self._lists, self._before = None, {}

    def end(self) -> None:
        lists = self._lists
        if not self._before or lists is None:
            return
        step = self._step
        changed = sorted(self._before)
        after = [lists[i] or [] for i in changed]
        added: list[tuple[int, int]] = []
        removed: list[tuple[int, int]] = []
        for i, now in zip(changed, after, strict=True):
            before = self._before[i]
            added += [(i, expiry) for expiry in set(now).difference(before)]
            removed += [(i, expiry) for expiry in set(before).difference(now)]
        counts = offsets_of(np.array([len(now) for now in after]))
        kind = self._schema.value.field(layouts.EXPIRIES).type
        expiries = pa.array([expiry for now in after for expiry in now], kind.value_type)
        rows = pa.RecordBatch.from_arrays([list_array(expiries, counts, None, kind)], schema=self._schema.value)
        keys = step.keys.take(pa.array(changed))
        is_kept = pa.array(np.diff(counts) > 0)
        step.stage(keys.filter(is_kept), self._schema.encode_values(rows.filter(is_kept)), self._family)
        step.stage(keys.filter(pc.invert(is_kept)), None, self._family)
        marks = self._expiry_schema.encode_values(layouts.is_present(len(added)))
        step.stage(self._by_expiry(added), marks, self._expiry_family)
        step.stage(self._by_expiry(removed), None, self._expiry_family)
        self.begin()

    def _by_expiry(self, timers: list[tuple[int, int]]) -> pa.BinaryArray:
        """Return the stored keys of timers, sorted. A timer is the position of its key in the step, and its expiry."""
        columns = np.array(timers, np.int64).reshape(-1, 2)
        keys = by_expiry(self._step.keys.take(pa.array(columns[:, 0])), columns[:, 1])
        return keys.take(key_order(keys))

    def _changeable(self) -> list[int]:
        """Return the current key's timers for changes, and remember their old values."""
        lists, i = self._all(), self._step.current
        timers = lists[i]
        if timers is None:
            timers = lists[i] = []
        if i not in self._before:
            self._before[i] = timers.copy()
        return timers

    def _all(self) -> list[list[int] | None]:
        """Return the timers of all keys of the step, read for all keys at once when first needed."""
        lists = self._lists
        if lists is None:
            stored = self._step.store.get_many(self._step.keys, self._family)
            if stored.null_count == len(stored):
                lists = [None] * len(stored)
            else:
                elements, offsets = list_parts(self._schema.decode_values(stored).column(layouts.EXPIRIES))
                flat = elements.to_numpy().tolist()
                lists = [flat[a:b] if a < b else None for a, b in pairwise(offsets.tolist())]
            self._lists = lists
        return lists


State = TypeVar("State", ValueState, ListState, MapState)

NONE, PROCESSING_TIME, EVENT_TIME = TIME_MODES = ("none", "processingtime", "eventtime")
"""The time modes. Users may write them in upper or lower case."""
_SPELLINGS = {NONE: "NoTime", PROCESSING_TIME: "ProcessingTime", EVENT_TIME: "EventTime"}


class StatefulProcessorHandle(PySparkStatefulProcessorHandle):
    """Declares state variables in ``init``, and sets timers of the current key later.

    Names and meaning are those of PySpark 4.2.
    """

    def __init__(self, key_schema: pa.Schema, time_mode: str, step: KeyStep, timers: Timers | None) -> None:
        self._key_schema = key_schema
        self._time_mode = time_mode
        self._step = step
        self._timers = timers
        self._states: dict[str, ValueState | ListState | MapState] = {}
        self._variables: dict[str, StateVariable] = {}
        self._deleted: dict[str, StateVariable] = {}

    def getValueState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ValueState:
        """Declare a variable that has one value per key, and return its object.

        ``schema`` is a StructType, or DDL text of its fields. With ``ttlDurationMs``, a value lives for that many
        milliseconds after the batch that wrote it. Raises ``StateDeclarationError`` for an invalid name or schema,
        ``TimeModeError`` for a TTL without processing time, and ``HandleStateError`` outside ``init``.
        """
        return self._declared("get_value_state", stateName, layouts.VALUE, ValueState, ttlDurationMs, schema)

    def getListState(self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None) -> ListState:
        """Declare a variable that has a list per key; ``schema`` is that of an element. See ``getValueState``."""
        return self._declared("get_list_state", stateName, layouts.LIST, ListState, ttlDurationMs, schema)

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        """Declare a variable that has a map per key; a TTL is that of each entry. See ``getValueState``."""
        return self._declared(
            "get_map_state", stateName, layouts.MAP, MapState, ttlDurationMs, valueSchema, userKeySchema
        )

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Set a timer of the current key, in ms since 1970; one in the past fires in this batch.

        Raises ``TimeModeError`` without a time mode, ``HandleStateError`` without a current key.
        """
        self._usable_timers("register_timer").register(_timestamp(expiryTimestampMs))

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        """Delete a timer of the current key (ms since 1970), if the key has it; raises as ``registerTimer`` does."""
        self._usable_timers("delete_timer").delete(_timestamp(expiryTimestampMs))

    def listTimers(self) -> Iterator[int]:
        """Yield the timers of the current key (ms since 1970), ascending.

        The timer that ``handleExpiredTimer`` is called for is one of them. Raises as ``registerTimer`` does.
        """
        return self._usable_timers("list_timers").listed()

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state variable that an earlier run has declared, with all its values; to be called in ``init``.

        A variable that this ``init`` has declared before cannot be used any more. Raises ``HandleStateError`` outside
        ``init``.
        """
        self._check_declaring("delete_if_exists")
        check_variable_name(stateName)
        if stateName in self._variables:
            make_deleted(self._states.pop(stateName), stateName, self._variables.pop(stateName).kind)
        self._deleted[stateName] = StateVariable(stateName, layouts.VALUE, {}, deleted=True)

    def _declared(
        self,
        operation: str,
        name: str,
        kind: str,
        state_class: type[State],
        ttl_ms: int | None,
        value_schema: StructType | str,
        user_key_schema: StructType | str | None = None,
    ) -> State:
        self._check_declaring(operation)
        if name in self._variables:
            raise StateDeclarationError(
                f"[STATEFUL_PROCESSOR_DUPLICATE_STATE_VARIABLE_DEFINED] State variable {name!r} is declared twice, as "
                f"{self._variables[name].kind} state and as {kind} state. Give each variable a different name, and "
                "keep the object that the first call returned."
            )
        user_key = None if user_key_schema is None else struct_of(user_key_schema)
        declaration = Declaration(name, kind, struct_of(value_schema), user_key, self._checked_ttl(name, ttl_ms))
        variable = declaration.variable(self._key_schema)
        kept = variable if self._step.index is PRE_INIT else self._kept(variable)
        state = state_class(declaration, kept, self._step)
        self._states[name], self._variables[name] = state, variable
        return state

    def _kept(self, declared: StateVariable) -> StateVariable:
        """Return the variable of the operator's schema that was declared, with the history of its schema.

        Raises ``StateDeclarationError`` if the operator's schema differs from the declaration.
        """
        try:
            kept = self._step.store.schema.variable(declared.name)
        except InvalidStateStoreArgument:
            return declared  # init() may still delete it; if it does not, _check_declared raises
        now = sorted((str(s.key), str(s.value)) for s in declared.families.values())
        then = sorted((str(s.key), str(s.value)) for s in kept.families.values())
        if kept.kind != declared.kind or now != then:
            raise StateDeclarationError(
                f"State variable {declared.name!r} is declared as {declared.kind} state of {now}, but the operator has "
                f"it as {kept.kind} state of {then}. init() must declare the same variables whenever it is called."
            )
        return kept

    def _check_declared(self) -> None:
        """Raise ``StateDeclarationError`` for variables that the driver's ``init`` has not declared."""
        for name in self._variables:
            try:
                self._step.store.schema.variable(name)
            except InvalidStateStoreArgument as error:
                raise StateDeclarationError(
                    f"{error} init() must declare the same variables whenever it is called."
                ) from error

    def _checked_ttl(self, name: str, ttl_ms: int | None) -> int | None:
        if ttl_ms is None or ttl_ms == 0:  # in Spark, 0 means no TTL as well
            return None
        if isinstance(ttl_ms, bool) or not hasattr(ttl_ms, "__index__"):
            raise StateDeclarationError(
                f"ttlDurationMs of state variable {name!r} is {ttl_ms!r}: give an int of ms, or None."
            )
        if self._time_mode != PROCESSING_TIME:
            raise TimeModeError(
                f"[STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL] State variable {name!r} has a TTL of {ttl_ms} "
                f"ms, which time mode {_SPELLINGS[self._time_mode]} cannot measure. Use time_mode='processingTime', or "
                "leave ttlDurationMs out."
            )
        if ttl_ms <= 0:
            raise StateDeclarationError(
                f"[STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE] State variable {name!r} has a TTL of {ttl_ms} ms. "
                "Give 1 ms or more, or leave ttlDurationMs out."
            )
        return operator.index(ttl_ms)

    def _check_declaring(self, operation: str) -> None:
        index = self._step.index
        if index is not PRE_INIT and index is not CREATED:
            raise invalid_handle_state(operation, index.phase if isinstance(index, NoKey) else INITIALIZED.phase)

    def _usable_timers(self, operation: str) -> Timers:
        if self._time_mode == NONE:
            raise TimeModeError(
                "[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE] Cannot perform "
                f"{operation} with invalid timeMode={_SPELLINGS[NONE]}: timers need time_mode='processingTime' or "
                "'eventTime'."
            )
        if isinstance(self._step.index, NoKey) or self._timers is None:
            raise invalid_handle_state(operation, getattr(self._step.index, "phase", PRE_INIT.phase))
        return self._timers


def _timestamp(value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise IllegalStateValueError(
            f"A timer cannot fire at {value!r} ({type(value).__name__}): give an int of ms since 1970."
        )
    timestamp = operator.index(value)
    if not -INT64_MAX <= timestamp <= INT64_MAX:
        raise IllegalStateValueError(f"A timer cannot fire at {timestamp} ms since 1970: that is no 64-bit integer.")
    return timestamp
