"""Makes states of an ``aggregate`` from input rows, and merges states, as its tasks do."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from backends.encoding.key_groups import DEFAULT_KEY_GROUPS
from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.state_format.layouts import ALL_ROWS_KEY
from spark_bridge.state_format.rows_to_pairs import PairsOfRows


@dataclass(frozen=True)
class StatesOfRows:
    """Makes rows of state of input rows: a row for each key of a batch."""

    aggregator: Aggregator
    pairs: PairsOfRows
    owner: str

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the state columns. Raises ``InvalidStateStoreArgument`` for missing columns."""
        keys = _keys(self.pairs)
        if keys.names == [ALL_ROWS_KEY] and ALL_ROWS_KEY not in batch.schema.names:
            batch = batch.append_column(ALL_ROWS_KEY, pa.repeat(pa.scalar(True), batch.num_rows))
        needed = [*keys.names, *self.aggregator.inputs]
        missing = [name for name in needed if name not in batch.schema.names]
        if missing:
            raise InvalidStateStoreArgument(
                f"The input rows of {self.owner} came without {', '.join(map(repr, missing))}: they need the columns "
                f"{', '.join(map(repr, dict.fromkeys(needed)))}."
            )
        groups = group_rows(batch, keys, DEFAULT_KEY_GROUPS)
        states = self.aggregator.partial(groups.ids, len(groups.keys), batch)
        return _rows(self.pairs, groups.columns, states)


@dataclass(frozen=True)
class MergedStates:
    """Merges rows of state: ``combine`` of an aggregate."""

    aggregator: Aggregator
    pairs: PairsOfRows

    def __call__(self, table: pa.Table) -> pa.RecordBatch:
        """Return a row for each key of the table."""
        batch = table.rename_columns(_stored_names(self.pairs)).combine_chunks().to_batches()[0]
        groups = group_rows(batch, _keys(self.pairs), DEFAULT_KEY_GROUPS)
        merged = self.aggregator.merge(groups.ids, len(groups.keys), batch)
        return _rows(self.pairs, groups.columns, merged)


def _keys(pairs: PairsOfRows) -> pa.Schema:
    return pa.schema([pa.field(f.name, f.type) for f in pairs.rows.key])


def _stored_names(pairs: PairsOfRows) -> list[str]:
    """Return the names of ``pairs.columns`` as the operator knows them, without a suffix that tells them apart."""
    rows = pairs.rows
    return [*(rows.key.names[i] for i in rows.key_order), *rows.stored_value.names]


def _rows(pairs: PairsOfRows, keys: pa.RecordBatch, states: pa.RecordBatch) -> pa.RecordBatch:
    columns = dict(zip(keys.schema.names, keys.columns, strict=True))
    columns |= dict(zip(states.schema.names, states.columns, strict=True))
    return pa.RecordBatch.from_arrays([columns[name] for name in _stored_names(pairs)], names=pairs.columns.names)
