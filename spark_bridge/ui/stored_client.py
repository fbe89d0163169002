"""State in storage by the verbs of a query client: scans, keys, changes, SQL. Needs no cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from backends.encoding.key_groups import key_groups, partition_of
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from spark_bridge.overview.from_storage import stored_query
from spark_bridge.overview.model import Query
from spark_bridge.queryable.client.conditions import comparisons
from spark_bridge.queryable.client.watch import StateChange
from spark_bridge.queryable.reads.operator_summary import variables_summary
from spark_bridge.queryable.reads.row_selection import RowSelection
from spark_bridge.queryable.sql.relation import StateRelation
from spark_bridge.queryable.sql.sql import sql
from spark_bridge.state_data.state_sources import StateSource, changes_source, state_source

POLL_SECONDS = 2.0
"""How often a watch looks for a new version."""


@dataclass
class StoredRows:
    """Rows of one version in storage, partition by partition. Memory grows with one batch."""

    version: int
    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    limit: int | None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        left = self.limit
        for batch in self.batches if left != 0 else ():
            given = batch if left is None else batch.slice(0, left)
            yield given  # also without rows: a reader looks at the clock
            if left is not None:
                left -= given.num_rows
                if left <= 0:
                    return

    def close(self) -> None:
        """Do nothing: reading goes on only while somebody iterates."""


class StoredClient:
    """Reads state from storage by the verbs of ``QueryableStateClient`` (a ``StateClient``, and a ``SqlClient``).

    ``query`` is ignored, as a checkpoint has one query. A filter is applied to all rows: a scan reads the whole
    operator, a lookup the key's partition, unless the key has a window.
    """

    def __init__(self, place: Callable[[], StatePlace], open_storage: OpenStorage = CheckpointStorage.open) -> None:
        self._place = place
        self._open = open_storage

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators as of the last completed version, as ``QueryableStateClient.operators`` does."""
        place = self._place()
        query = stored_query(place, StateVersions.look(place, open_storage=self._open), self._open)
        return list(_summaries(query))

    def scan(
        self,
        operator: str,
        state: str | None = None,
        prefix: Any = None,
        start: Any = None,
        end: Any = None,
        limit: int | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: Any = None,
        query: str | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> StoredRows:
        """Return the rows of a state variable.

        ``prefix``, ``start`` and ``end`` only narrow what hosts read, and are ignored: SQL, which gives them, applies
        its whole filter to the rows. Then ``limit`` is too, unless it is 0.
        """
        if limit and (prefix, start, end) != (None, None, None):
            limit = None
        source = self._source(operator, state, version)
        return self._rows(source, columns, where, limit, lambda batch: batch)

    def key_rows(
        self,
        operator: str,
        keys: Any,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        query: str | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> StoredRows:
        """Return the rows of one key, given as a list of one tuple of its columns without the window.

        Keys in another form come from SQL, which applies its whole filter to the rows: all rows are returned.
        """
        source = self._source(operator, state, version)
        if not isinstance(keys, list):
            return self._rows(source, columns, None, None, lambda batch: batch)
        (key,) = keys
        names = _key_names(source)
        values = [pa.scalar(value, source.schema.field(name).type) for name, value in zip(names, key, strict=True)]

        def of_key(batch: pa.RecordBatch) -> pa.RecordBatch:
            for name, value in zip(names, values, strict=True):
                column = batch.column(batch.schema.get_field_index(name))
                batch = batch.filter(pc.equal(column, value) if value.is_valid else pc.is_null(column))
            return batch

        return self._rows(source, columns, None, None, of_key, _partition_of(source, names, values))

    def _source(self, operator: str, state: str | None, version: int | None) -> StateSource:
        return state_source(self._place(), operator, state, version, open_storage=self._open)

    def _rows(
        self,
        source: StateSource,
        columns: Sequence[str] | None,
        where: Any,
        limit: int | None,
        narrowed: Callable[[pa.RecordBatch], pa.RecordBatch],
        partition: int | None = None,
    ) -> StoredRows:
        types = {field.name: field.type for field in source.schema}
        selection = RowSelection.of(source.rows, columns, comparisons(where, types))
        batches = (
            selection.rows(narrowed(batch))
            for piece in source.reading.pieces
            if partition is None or piece.partition == partition
            for batch in source.batches(piece)
        )
        return StoredRows(source.reading.version, selection.schema, batches, limit)

    def watch(
        self,
        operator: str,
        keys: Any = None,
        *,
        state: str | None = None,
        query: str | None = None,
        from_version: int | None = None,
        timeout: float | None = None,
    ) -> StoredChanges:
        """Return what each completed version changes, as storage shows it. See ``StoredChanges``."""
        return StoredChanges(self, operator, keys, state, from_version)

    def newest(self) -> int:
        """Return the last completed version."""
        return StateVersions.look(self._place(), open_storage=self._open).resolve(None)

    def changes(self, operator: str, state: str | None, since: int, until: int) -> Iterator[StateChange]:
        """Give the changes of the versions behind one up to another."""
        source = changes_source(self._place(), operator, state, since, until, open_storage=self._open)
        for piece in source.reading.pieces:
            for batch in source.batches(piece):
                for version in sorted(set(batch.column("version").to_pylist())):
                    yield StateChange(version, batch.filter(pc.equal(batch.column("version"), version)))

    def sql(self, query: str, *, timeout: float | None = None) -> StateRelation:
        """See ``QueryableStateClient.sql``."""
        return sql(self, query, timeout=timeout)


class StoredChanges:
    """The changes of a state variable, as versions complete in storage, which is looked at every ``POLL_SECONDS``."""

    def __init__(
        self, client: StoredClient, operator: str, keys: Any, state: str | None, from_version: int | None
    ) -> None:
        self._client = client
        self._operator = operator
        self._keys = keys
        self._state = state
        self._position = from_version
        self._closed = threading.Event()

    def close(self) -> None:
        """End the watch; a thread that waits is told at once."""
        self._closed.set()

    def __iter__(self) -> Iterator[StateChange]:
        while not self._closed.is_set():
            newest = self._client.newest()
            if self._position is None:
                self._position = newest
            if newest > self._position:
                found = []
                for change in self._client.changes(self._operator, self._state, self._position, newest):
                    batch = change.batch if self._keys is None else _of_keys(change.batch, self._keys)
                    if batch.num_rows:
                        found.append(StateChange(change.version, batch))
                yield from sorted(found, key=lambda change: change.version)  # they come partition by partition
                self._position = newest
            self._closed.wait(POLL_SECONDS)


def _of_keys(batch: pa.RecordBatch, keys: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Return the changes of some keys: the columns of the key follow the version and the kind of change."""
    there = zip(*(batch.column(2 + i).to_pylist() for i in range(len(keys[0]))), strict=True)
    wanted = set(keys)
    return batch.filter(pa.array([key in wanted for key in there], pa.bool_()))


def _summaries(query: Query) -> Iterator[dict[str, Any]]:
    for operator in query.operators:
        yield {
            "operator": operator.name,
            "query_name": query.name,
            "query_id": query.query_id,
            "run_id": query.run_id,
            "oldest_version": query.oldest_version or 0,
            "completed_version": query.completed_version,
            "partitions": operator.num_partitions,
            "backend": operator.backend,
            "state": [
                {"name": v.name, "kind": v.kind, "key": v.key, "value": v.value, "inner": v.inner}
                | ({} if v.window is None else {"window": v.window})
                for v in operator.variables
            ],
        }


def _key_names(source: StateSource) -> list[str]:
    """Return the columns of the key in the user's order, without the window of an aggregate."""
    (described,) = [v for v in variables_summary(source.reading.schema) if v["name"] == source.rows.variable.name]
    return [name for name in described["key"] if name != described.get("window")]


def _partition_of(source: StateSource, names: Sequence[str], values: Sequence[pa.Scalar]) -> int | None:
    """Return the partition of a key; None if the key has a window too, so that its rows are in all partitions."""
    stored = source.rows.key
    if set(stored.names) != set(names):
        return None
    given = dict(zip(names, values, strict=True))
    row = pa.record_batch([pa.array([given[f.name].as_py()], f.type) for f in stored], schema=stored)
    groups = source.reading.key_groups
    return int(partition_of(int(key_groups(row, groups)[0]), groups, source.reading.num_partitions))
