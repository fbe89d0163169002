"""State variables as the Arrow datasets that DuckDB reads, all of one statement at one version."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from spark_bridge.queryable.sql.catalog import CatalogTable
from spark_bridge.queryable.sql.pushdown import ScanPushdown, push_down
from spark_bridge.queryable.sql.sql_client import SqlClient, VersionedRows


class StatementSnapshot:
    """The state as one statement sees it: everything of a query is read at one version.

    The first rows that are read fix that version, unless ``version`` does.
    """

    def __init__(self, client: SqlClient, timeout: float | None = None, version: int | None = None) -> None:
        self._client = client
        self._timeout = timeout
        self._version = version
        self._lock = threading.Lock()
        self.versions: dict[str, int] = {}
        """The version by query id. ``_lock`` guards the choice of a version."""
        self._failure: Exception | None = None

    def failed(self, error: Exception) -> None:
        """Keep the first error of a scan, because DuckDB passes on only the text of an error."""
        self._failure = self._failure or error

    def taken_failure(self) -> Exception | None:
        """Return the first error since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def scan(self, table: CatalogTable, pushdown: ScanPushdown, limit: int | None = None) -> VersionedRows:
        """Begin to read rows at the version of this snapshot."""
        with self._lock:
            version = self.versions.get(table.query_id)
            if version is None:
                rows = self._open(table, pushdown, limit, self._version)
                self.versions[table.query_id] = rows.version
                return rows
        return self._open(table, pushdown, limit, version)

    def _open(
        self, table: CatalogTable, pushdown: ScanPushdown, limit: int | None, version: int | None
    ) -> VersionedRows:
        if pushdown.keys is not None:
            return self._client.key_rows(
                table.operator,
                pushdown.keys,
                table.state,
                pushdown.columns,
                query=table.query_id,
                version=version,
                timeout=self._timeout,
            )
        return self._client.scan(
            table.operator,
            table.state,
            pushdown.prefix,
            pushdown.start,
            pushdown.end,
            limit,
            pushdown.columns,
            where=pushdown.where,
            query=table.query_id,
            version=version,
            timeout=self._timeout,
        )


class StateDataset(pads.Dataset):  # type: ignore[misc]
    """One state variable as a table that DuckDB reads. DuckDB pushes columns and filters down into a ``Dataset``."""

    def __init__(self, snapshot: StatementSnapshot, table: CatalogTable) -> None:
        # Arrow's own part of the object is not initialized: only the methods that DuckDB calls work.
        self._snapshot = snapshot
        self._table = table

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._schema

    @cached_property
    def _schema(self) -> pa.Schema:
        with _keeping_failure(self._snapshot):
            rows = self._snapshot.scan(self._table, ScanPushdown(), limit=0)
            rows.close()
            return rows.schema

    def scanner(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, **_: Any
    ) -> StateScanner:
        """Begin a scan of the rows that pass ``filter``, in ``columns`` (None: all)."""
        with _keeping_failure(self._snapshot):
            pushdown = push_down(filter, columns, self._schema, self._table.key, has_ranges=self._table.has_ranges)
            return StateScanner(self._snapshot, self._snapshot.scan(self._table, pushdown), columns, filter)


class StateScanner:
    """The object that DuckDB takes for a ``pyarrow.dataset.Scanner``."""

    def __init__(
        self,
        snapshot: StatementSnapshot,
        rows: VersionedRows,
        columns: Sequence[str] | None,
        expression: pc.Expression | None,
    ) -> None:
        self._snapshot = snapshot
        self._rows = rows
        self._columns = list(rows.schema.names if columns is None else columns)
        self._filter = expression

    @property
    def projected_schema(self) -> pa.Schema:
        """The columns asked for."""
        return pa.schema([self._rows.schema.field(name) for name in self._columns])

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a stream. The scan ends when the reader is released."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            with _keeping_failure(self._snapshot):
                for batch in self._rows:
                    # The whole filter once more: the conditions that were pushed down need not be all of it, nor exact.
                    passing = batch if self._filter is None else batch.filter(self._filter)
                    if passing.num_rows:
                        yield passing.select(self._columns)
        finally:
            self._rows.close()


@contextmanager
def _keeping_failure(snapshot: StatementSnapshot) -> Iterator[None]:
    """Keep the error that ends the block, for the caller that waits for DuckDB."""
    try:
        yield
    except Exception as error:
        snapshot.failed(error)
        raise
