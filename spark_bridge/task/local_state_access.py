"""``StateAccess`` over a provider in this process: for ``ProcessorTester``, which needs no cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.keys import KeyRange
from backends.encoding.operator_schema import OperatorSchema
from backends.ids import DEFAULT_FAMILY
from backends.providers.standalone_provider import LocalStateStoreProvider
from backends.store import StateStore
from coordinator_actor.messages import BatchTimes, OperatorFigures


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
        """Return values at the version opened; see ``StateAccess``."""
        if column_family not in self._known:
            return pa.nulls(len(keys), pa.binary())
        return self._base.get_many(keys, column_family)

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Give pairs of the ranges; see ``StateAccess``."""
        left = limit
        for start, end in ranges if column_family in self._known else ():
            for batch in self._base.scan(start, end, column_family):
                if left is not None:
                    batch = batch.slice(0, left)  # noqa: PLW2901 - no more than the limit allows
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left == 0:
                    return

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        """Add changes to the commit; see ``StateAccess``."""
        if column_family != DEFAULT_FAMILY:
            self._store.create_column_family(column_family)  # also one that is in no schema, as hosts take them
        is_kept = pc.is_valid(values)
        # In the order given: of a key given twice the last change counts.
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
        """Make the staged changes the provider's next version."""
        self._store.commit()
        self._base.abort()
        self.figures = figures
