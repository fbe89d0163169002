"""The result of a SQL statement, as a DuckDB relation that raises the errors of the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.sql.dataset import StatementSnapshot
from spark_bridge.queryable.sql.duckdb_connections import StatementDatabase, import_duckdb, is_out_of_memory

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl


class StateRelation:
    """The result of a statement: a ``duckdb.DuckDBPyRelation`` that raises the client's own errors.

    It has all methods of ``relation``, DuckDB's object. Rows are read when a method that needs rows is called; each
    such call reads them again, at the same version. Not for several threads at once.
    """

    def __init__(
        self,
        relation: Any,
        connection: duckdb.DuckDBPyConnection,
        snapshot: StatementSnapshot,
        database: StatementDatabase | None = None,
    ) -> None:
        self.relation = relation
        self._database = database  # no other statement gets it as long as this one may run
        self._connection = connection  # must live as long as the relation
        self._snapshot = snapshot

    @property
    def versions(self) -> dict[str, int]:
        """The version read, by query id."""
        return dict(self._snapshot.versions)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.relation.columns)

    def interrupt(self) -> None:
        """End what runs on the statement, from another thread: that call raises DuckDB's ``InterruptException``."""
        self._connection.interrupt()

    def arrow(self) -> pa.Table:
        """Return all rows as an Arrow table."""
        return self._call("to_arrow_table")

    def to_arrow_reader(self, batch_size: int = 100_000) -> pa.RecordBatchReader:
        """Return the rows as a stream, which is read while the hosts send."""
        # The name of the method since DuckDB 1.5, and the name before.
        name = "to_arrow_reader" if hasattr(self.relation, "to_arrow_reader") else "fetch_arrow_reader"
        return self._call(name, batch_size)

    def record_batches(self, batch_size: int = 100_000) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Return the columns and the rows as they come, with the client's own errors while they are read, too.

        Raises ``RequestError`` for wrong SQL and for a statement that was interrupted.
        """
        duckdb = import_duckdb()
        try:
            reader = self.to_arrow_reader(batch_size)
        except duckdb.Error as error:
            raise_client_error(self._snapshot, error, self._database)
            raise RequestError(str(error)) from error
        return reader.schema, self._read(reader)

    def _read(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        try:
            yield from reader
        except (pa.ArrowException, OSError, MemoryError, import_duckdb().Error) as error:
            raise_client_error(self._snapshot, error, self._database)
            raise RequestError(str(error)) from error
        finally:
            reader.close()

    def df(self) -> pd.DataFrame:
        """Return all rows as a pandas DataFrame."""
        frame: pd.DataFrame = self._call("df")
        return frame

    def pl(self) -> pl.DataFrame:
        """Return all rows as a Polars DataFrame."""
        frame: pl.DataFrame = self._call("pl")
        return frame

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return all rows as tuples."""
        rows: list[tuple[Any, ...]] = self._call("fetchall")
        return rows

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.relation, name)
        if not callable(attribute):
            return attribute
        return lambda *args, **kwargs: self._call(name, *args, **kwargs)

    def __repr__(self) -> str:
        return str(self._call("__repr__"))

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        duckdb = import_duckdb()
        self._snapshot.taken_failure()
        try:
            result = getattr(self.relation, method)(*args, **kwargs)
        except (duckdb.Error, MemoryError) as error:
            raise_client_error(self._snapshot, error, self._database)
            raise
        if isinstance(result, duckdb.DuckDBPyRelation):
            return StateRelation(result, self._connection, self._snapshot, self._database)
        return result


def raise_client_error(
    snapshot: StatementSnapshot, error: Exception, database: StatementDatabase | None = None
) -> None:
    """Raise the client's error that has caused the error of DuckDB, or ``RequestLimitError``, if there is one."""
    failure = snapshot.taken_failure()
    if failure is not None:
        raise failure from error
    if database is not None and is_out_of_memory(error):
        raise database.limits.exceeded(error) from error
