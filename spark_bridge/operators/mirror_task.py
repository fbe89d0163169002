"""The work of ``mirror`` in a state task: rows of Spark's own state, or changes of it, replace those that are kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backends.conf import DEFAULT_FAMILY
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import OperatorFigures
from spark_bridge.aggregates.row_groups import group_rows
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.keyed_rows import Ids, KeyedRows, RowReducer, empty, parts_of, scanned
from spark_bridge.task.state_task import all_keys
from spark_bridge.task.task_store import StateAccess

REMOVED = "__statestore_removed"
"""Whether a change removes its key (bool)."""
PLACE = "__statestore_place"
"""The place of a change among the changes of its key (int64)."""
MARKS = (pa.field(REMOVED, pa.bool_()), pa.field(PLACE, pa.int64()))
"""The columns of a change after those of its key and its value."""


@dataclass(frozen=True)
class MirrorLogic:
    """Keeps the last change of each key. ``is_scan``: the rows are the whole state, and other keys are removed.

    The figures do not count the keys that a scan removes.
    """

    schema: OperatorSchema
    is_scan: bool
    limits: Limits | None = None

    def process(
        self, batches: Iterable[pa.RecordBatch], store: StateAccess, timer: StepTimer
    ) -> Iterator[pa.RecordBatch]:
        """Stage the changes and commit them; yield nothing."""
        rows = self.schema.families[DEFAULT_FAMILY]
        num_rows = num_updated = num_removed = 0
        if self.is_scan:
            # Remove all stored keys first. The rows of the scan are staged later, and later changes count.
            for pairs in scanned(store, all_keys(store.key_groups)):
                store.stage(pairs.column(0), pa.nulls(pairs.num_rows, pa.binary()))
            timer.step("scan_ms")
        changes = empty(pa.schema([*rows.value, *MARKS]))
        with RowReducer(rows.key, store.num_key_groups, changes, last_changes, self.limits) as reducer:
            for part in parts_of(batches, timer, "mirror_ms"):
                num_rows += part.num_rows
                reducer.add(_by_key(part, rows, store.num_key_groups))
            for step in reducer.steps():
                is_removed = np.asarray(step.rows.column(REMOVED))
                removed, kept = pa.array(np.flatnonzero(is_removed)), pa.array(np.flatnonzero(~is_removed))
                store.stage(step.keys.take(removed), pa.nulls(len(removed), pa.binary()))
                values = step.rows.take(kept).select(rows.value.names)
                store.stage(step.keys.take(kept), rows.encode_values(values))
                num_updated += len(kept)
                num_removed += len(removed)
        timer.step("merge_ms")
        store.commit(OperatorFigures(num_rows, num_updated, num_removed), timer.milliseconds)
        return iter(())


def _by_key(part: pa.RecordBatch, schema: StateSchema, num_key_groups: int) -> KeyedRows:
    groups = group_rows(part, schema.key, num_key_groups)
    changes = pa.schema([*schema.value, *MARKS])
    # Spark's Arrow gives timestamps the zone of the session.
    columns = [pc.cast(part.column(field.name), field.type) for field in changes]
    rows = pa.RecordBatch.from_arrays(columns, schema=changes)
    return KeyedRows(groups.keys, *last_changes(groups.ids, len(groups.keys), rows))


def last_changes(ids: Ids, num_keys: int, changes: pa.RecordBatch) -> tuple[Ids, pa.RecordBatch]:
    """Return the last change of each id; every id from 0 to ``num_keys - 1`` occurs."""
    order = np.lexsort((np.asarray(changes.column(PLACE)), ids))
    is_last = np.empty(len(order), np.bool_)
    is_last[-1:] = True
    np.not_equal(ids[order][1:], ids[order][:-1], out=is_last[:-1])
    return np.arange(num_keys, dtype=np.int64), changes.take(pa.array(order[is_last]))
