"""The declared state of a processor in columns: a row per key, read and written whole columns at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from backends.encoding.schema import StateSchema
from spark_bridge.exceptions import StatefulProcessorError
from spark_bridge.state_format.families import family_of
from spark_bridge.state_format.layouts import TTL_COLUMN
from spark_bridge.stateful.arrow_processor import ArrowResult, Flags
from spark_bridge.stateful.tasks.arrow_answers import aligned, flags_of
from spark_bridge.stateful.variables.step import StateFigures
from spark_bridge.stateful.variables.ttl import alive_at, expiry_at
from spark_bridge.task.state_access import StateAccess


@dataclass
class StateColumns:
    """The declared state of the keys of one step. ``family`` is None if no state is declared.

    ``keys`` are the stored keys of the step. ``rows`` has a row per key, of nulls where ``has_state`` is false.
    """

    store: StateAccess
    figures: StateFigures
    family: str | None = None
    schema: StateSchema = field(default_factory=lambda: StateSchema(pa.schema([]), pa.schema([])))
    ttl_ms: int | None = None
    keys: pa.BinaryArray = field(default_factory=lambda: pa.array([], pa.binary()))
    rows: pa.Table = field(default_factory=lambda: pa.table({}))
    has_state: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    @classmethod
    def of(cls, name: str | None, store: StateAccess, figures: StateFigures) -> StateColumns:
        """Return the columns of the state of that name (None: of no state)."""
        if name is None:
            return cls(store, figures)
        variable = store.schema.variable(name)
        return cls(store, figures, *family_of(variable), variable.ttl_ms)

    def begin(self, keys: pa.BinaryArray) -> None:
        """Read the state of the next keys."""
        self.keys = keys
        self.has_state = np.zeros(len(keys), np.bool_)
        if self.family is None:
            return
        stored = self.store.get_many(keys, self.family)
        rows = self.schema.decode_values(stored)
        is_stored = np.asarray(stored.is_valid())
        # Rows that have expired are removed by the sweep, see ``ttl``.
        is_alive = alive_at(rows, self.store.times.timestamp_ms) if self.ttl_ms is not None else True
        self.has_state = is_stored & is_alive
        names = [n for n in self.schema.value.names if n != TTL_COLUMN]
        self.rows = _blanked(pa.Table.from_batches([rows.select(names)]), is_stored & ~self.has_state)

    def apply(self, answer: ArrowResult) -> None:
        """Stage the changes of an answer; raises ``StatefulProcessorError`` for an answer that does not fit."""
        if self.family is None:
            if answer.state is not None or answer.removed is not None:
                raise StatefulProcessorError(
                    "The processor gave state, but has declared none: call handle.declare_state in init()."
                )
            return
        n = len(self.keys)
        removed = flags_of(answer.removed, n, "removed", default=False)
        if answer.state is not None:
            if answer.state.num_rows != n:
                raise StatefulProcessorError(
                    f"The processor gave {answer.state.num_rows} rows of state for {n} keys: give one for each, in the "
                    "order of batch.keys; updated= says which of them are to be written."
                )
            self._write(
                aligned(answer.state, self.rows.schema, "state"),
                flags_of(answer.updated, n, "updated", default=True) & ~removed,
            )
        if removed.any():
            keys = self.keys.filter(pa.array(removed))
            self.store.stage(keys, pa.nulls(len(keys), pa.binary()), self.family)
            self.figures.num_rows_removed += int((removed & self.has_state).sum())
            self.rows = _blanked(self.rows, removed)
            self.has_state = self.has_state & ~removed

    def _write(self, new: pa.Table, written: Flags) -> None:
        n, keys, rows = len(self.keys), self.keys, new
        if self.ttl_ms is not None:
            expiry = expiry_at(self.store.times.timestamp_ms, self.ttl_ms)
            rows = rows.append_column(TTL_COLUMN, pa.array(np.full(n, expiry, np.int64)))
        if not written.all():
            chosen = pa.array(written)
            keys, rows = keys.filter(chosen), rows.filter(chosen)
            places = np.where(written, np.arange(n, 2 * n), np.arange(n))
            new = pa.concat_tables([self.rows, new]).take(pa.array(places))
        if len(keys):
            (batch,) = rows.combine_chunks().to_batches()
            assert self.family is not None
            self.store.stage(keys, self.schema.encode_values(batch), self.family)
        self.figures.num_rows_updated += len(keys)
        self.rows, self.has_state = new, self.has_state | written


def _blanked(rows: pa.Table, which: Flags) -> pa.Table:
    """Return the rows, with nulls in those that ``which`` marks."""
    return rows.take(pa.array(np.arange(rows.num_rows), mask=which)) if which.any() else rows
