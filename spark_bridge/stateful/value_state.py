"""``ValueState``: a single value per grouping key, as a processor uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.operator_schema import StateVariable
from spark_bridge.state_format.layouts import family_of
from spark_bridge.stateful.declaration import Declaration, KeyStep, PySparkValueState
from spark_bridge.stateful.state_values import StateValues
from spark_bridge.stateful.ttl import Ttl

_UNREAD: Any = object()


class ValueState(PySparkValueState):
    """A state variable that holds one value per grouping key, a tuple of its schema's fields.

    Methods read and change the value of the current key; see ``StatefulProcessorHandle.getValueState``.
    """

    def __init__(self, declaration: Declaration, variable: StateVariable, step: KeyStep) -> None:
        self._codec = declaration.codec
        self._family, self._schema = family_of(variable)
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
        if value is _UNREAD:
            value = self._read()
        return value is not None

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
        """Stage the step's changes."""
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
