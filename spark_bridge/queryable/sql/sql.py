"""SQL over the state of running queries: DuckDB on a client's scans.

DuckDB takes each operator for a ``pyarrow.dataset.Dataset``, as it takes tables of Lance. DuckDB asks for a scanner of
the columns and rows that it needs, and gets a scan of them from the hosts, as a stream. The hosts apply the part of a
filter that ``pushdown`` understands; Arrow then applies the whole filter to the rows that come.
"""

from __future__ import annotations

import atexit
import datetime as dt
import os
import re
import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backends.exceptions import InvalidStateStoreArgument
from backends.lazy_names import import_optional
from spark_bridge.exceptions import EnvironmentProblemError, RequestError, RequestLimitError, UnknownOperatorError
from spark_bridge.queryable.sql.catalog import (
    SqlClient,
    StateDataset,
    StatementSnapshot,
    UnclearNameError,
    candidate_names,
    catalog,
    quoted,
    resolve,
)

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

# DuckDB connections with the state variables of a statement as tables, and the limits of a statement.
#
# DuckDB bounds the memory, threads and temporary files of a database, not of a statement. So no two statements share
# a database at the same time. Making a database takes 40 ms, so an idle one is reused.


MIN_MEMORY_BYTES = 16 << 20
"""DuckDB needs about this much for the smallest statement."""
KEPT_DATABASES = 4
"""At most this many empty databases wait for their next statement."""


@dataclass(frozen=True)
class SqlLimits:
    """The limits of one SQL statement. Raises ``InvalidStateStoreArgument`` for a limit too low for any statement.

    - ``memory_bytes``: the memory that DuckDB may use for the statement; at least 16 MiB.
    - ``threads``: the threads that DuckDB may use for the statement.
    - ``temp_bytes``: the bytes that the statement may move to temporary files when ``memory_bytes`` are not enough;
      with 0 it moves none. The files are in a private directory below ``tempfile.gettempdir()``.
    """

    memory_bytes: int = 2048 << 20
    threads: int = os.cpu_count() or 1
    temp_bytes: int = 8192 << 20

    def __post_init__(self) -> None:
        least = {"memory_bytes": MIN_MEMORY_BYTES, "threads": 1, "temp_bytes": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least[field.name]:
                raise InvalidStateStoreArgument(
                    f"SqlLimits.{field.name} must be a whole number of at least {least[field.name]}, not {value!r}."
                )

    def share_of(self, statements: int) -> SqlLimits:
        """Return the limits of each of so many statements at once that have these bytes together."""
        memory_bytes = max(MIN_MEMORY_BYTES, self.memory_bytes // statements)
        return SqlLimits(memory_bytes, self.threads, self.temp_bytes // statements)

    def exceeded(self, error: object) -> RequestLimitError:
        """Return the error for a statement that needs more memory than it may use."""
        temp = f" and {_mib(self.temp_bytes)} of temporary files" if self.temp_bytes else ""
        first = str(error).strip().partition("\n")[0]
        return RequestLimitError(
            f"The statement needs more than the {_mib(self.memory_bytes)} of memory{temp} that one statement may use "
            "here. Ask for less: conditions on the key columns, fewer columns, groups of fewer keys, no sort of all "
            "rows. Or have the limit raised: SqlLimits of client.sql(limits=...), sql_memory_bytes of the HTTP "
            f"application, --sql-memory of 'statestore ui' and 'statestore sql'. (DuckDB: {first})"
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of DuckDB or Arrow means that a statement has reached its memory limit."""
    return isinstance(error, MemoryError) or "Out of Memory Error" in str(error)


_idle: deque[tuple[SqlLimits, Any]] = deque()
"""Empty databases that may run the next SELECT with the same limits. A deque needs no lock."""


def import_duckdb() -> Any:
    """Return the module ``duckdb``. Raises ``EnvironmentProblemError`` if it is not installed."""
    return import_optional("duckdb", "SQL over state", EnvironmentProblemError)


def statement_kind(duckdb: Any, statement: str) -> str:
    """Return "SELECT" or "EXPLAIN". Raises ``RequestError`` for another statement, or for several."""
    kinds = [s.type.name for s in duckdb.extract_statements(statement)]
    if kinds not in (["SELECT"], ["EXPLAIN"]):
        raise RequestError(
            f"One statement that reads is possible, not {', '.join(kinds) or 'none'}: the state cannot be changed. "
            "To keep what is read in tables of your own, give connection=."
        )
    return str(kinds[0])


class StatementDatabase:
    """A connection to an empty database in memory with the limits of one statement, which it alone uses.

    With ``may_share`` the next statement reuses the database once this object is garbage. So this statement must not be
    able to change it.
    """

    def __init__(self, duckdb: Any, limits: SqlLimits, *, may_share: bool) -> None:
        self.limits = limits
        self._may_share = may_share
        self._database = (_taken(limits) if may_share else None) or _empty_database(duckdb, limits)
        self.connection = self._database.cursor() if may_share else self._database

    def __del__(self) -> None:
        # There is nothing to remove if the database could not be created.
        if getattr(self, "_may_share", False) and hasattr(self, "connection") and len(_idle) < KEPT_DATABASES:
            _idle.append((self.limits, self._database))


def _taken(limits: SqlLimits) -> Any:
    """Return an idle database with these limits, or None. Others are looked through at most once."""
    for _ in range(len(_idle)):
        try:
            kept, database = _idle.popleft()
        except IndexError:  # another thread has taken it
            return None
        if kept == limits:
            return database
        _idle.append((kept, database))
    return None


def database_with_tables(
    duckdb: Any, tables: Mapping[tuple[str, ...], StateDataset], limits: SqlLimits, *, may_share: bool
) -> StatementDatabase:
    """Return an empty database with the tables. It is used again if ``may_share``, and if no name is qualified."""
    database = StatementDatabase(duckdb, limits, may_share=may_share and all(len(name) == 1 for name in tables))
    connection = database.connection
    catalogs = {name[0].lower() for name in tables if len(name) == 3}
    for number, (name, dataset) in enumerate(tables.items()):
        if len(name) == 1:
            connection.register(name[0], dataset)
            continue
        # A view by the full name, on a table of this connection alone.
        connection.register(f"__statestore_{number}", dataset)
        first, *others = map(quoted, name)
        if name[0].lower() in catalogs:
            connection.execute(f"attach if not exists ':memory:' as {first}")
            schema = f"{first}.{others[0]}" if len(others) == 2 else f"{first}.main"
        else:
            schema = first
        connection.execute(f"create schema if not exists {schema}")
        connection.execute(f"create or replace view {schema}.{others[-1]} as from temp.main.__statestore_{number}")
    return database


def _empty_database(duckdb: Any, limits: SqlLimits) -> Any:
    connection = duckdb.connect(
        ":memory:",
        config={
            "enable_external_access": "false",
            "python_enable_replacements": "false",
            "memory_limit": f"{limits.memory_bytes}B",
            "threads": str(limits.threads),
            # A statement may read files in its directory, so no two databases share one.
            "temp_directory": str(spill_directory() / uuid.uuid4().hex) if limits.temp_bytes else "",
        },
    )
    # Among the options of ``connect`` DuckDB 2.0 does not take it into account.
    connection.execute(f"set max_temp_directory_size = '{limits.temp_bytes}B'")
    connection.execute("set global TimeZone = 'UTC'")
    connection.execute("set lock_configuration = true")
    return connection


@cache
def spill_directory() -> Path:
    """Return the directory of this process for temporary files, which no other user can read."""
    directory = Path(tempfile.mkdtemp(prefix="statestore-sql-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def run_on_own_connection(
    connection: duckdb.DuckDBPyConnection,
    statement: str,
    with_params: Mapping[str, Any],
    tables: Mapping[tuple[str, ...], StateDataset],
) -> Any:
    """Run a statement on the user's own connection, and leave nothing behind in it.

    DuckDB looks for unknown tables among the Python variables of its caller. Here the variables are the tables, and no
    others.
    """
    variables: dict[str, Any] = {name[0]: dataset for name, dataset in tables.items() if len(name) == 1}
    variables |= {"__statestore_connection": connection, "__statestore_statement": statement}
    variables["__statestore_params"] = with_params
    return eval("__statestore_connection.sql(__statestore_statement, **__statestore_params)", variables)


# The result of a SQL statement, as a DuckDB relation that raises the errors of the client.


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
    def times(self) -> dict[str, dt.datetime]:
        """The time of the rolling aggregates that were read, by query id."""
        return dict(self._snapshot.times)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.relation.columns)

    def interrupt(self) -> None:
        """Interrupt the statement's running call from another thread: it raises DuckDB's ``InterruptException``."""
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
        """Return all rows as a pandas DataFrame. Raises ``RequestError`` if pandas is not installed."""
        import_optional("pandas", "A pandas frame", RequestError)
        frame: pd.DataFrame = self._call("df")
        return frame

    def pl(self) -> pl.DataFrame:
        """Return all rows as a Polars DataFrame. Raises ``RequestError`` if Polars is not installed."""
        import_optional("polars", "A Polars frame", RequestError)
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


_NO_TABLE = re.compile(r"Table with name|Catalog \".*\" does not exist")


def sql(
    client: SqlClient,
    statement: str,
    *,
    query_params: Sequence[Any] | Mapping[str, Any] | None = None,
    connection: duckdb.DuckDBPyConnection | None = None,
    version: int | None = None,
    at: Any = None,
    timeout: float | None = None,
    limits: SqlLimits | None = None,
) -> StateRelation:
    """Return the rows of a SQL statement over the state of running queries.

    Names of tables are:

    - ``operator``;
    - ``operator.state``, if an operator has several state variables;
    - ``query.operator`` (the query by name or id), if several queries have an operator of that name;
    - ``query.operator.state``;
    - each of these as one quoted name with dots.

    All tables of a query are read at one version: ``version``, which needs a statement over one query, or that of the
    first rows. All rolling aggregates are as of ``at``, a datetime, or of the time when the first rows were asked for;
    with ``at="watermark"`` those of a query are as of the watermark of its version.
    Rows are fetched when the result is read, and again each time.

    ``query_params`` are the values of ``?``, ``$1`` or ``$name``. Without ``connection``, the statement must be a
    single read; it runs on a DuckDB in memory that opens no files and whose time zone is UTC. With a ``connection`` of
    the user's own, any statement is allowed, also with that connection's tables, which take precedence over operators
    of the same name. Qualified names of operators must then be written as one name: ``"query.operator"``.

    ``limits`` are those of the statement (default: ``SqlLimits()``); a ``connection`` of the user's own has its own.

    Raises ``UnknownOperatorError`` naming the existing tables, ``RequestError`` for a statement that does not
    only read or a ``version`` of several queries, ``RequestLimitError`` for a statement that needs more memory,
    DuckDB's own errors for wrong SQL, and the errors of a client's ``scan``.
    """
    duckdb = import_duckdb()
    # An EXPLAIN does not share the database: EXPLAIN ANALYZE runs the statement that it explains.
    may_share = connection is not None or statement_kind(duckdb, statement) == "SELECT"
    all_tables = catalog(client.operators())
    snapshot = StatementSnapshot(client, timeout, version, at)
    tables: dict[tuple[str, ...], StateDataset] = {}
    queries: dict[str, str] = {}  # a table of each query, by its id
    unclear: list[str] = []
    for name in candidate_names(statement):
        try:
            table = resolve(name, all_tables)
        except UnclearNameError as error:
            unclear.append(str(error))
        else:
            if table is not None:
                tables[name] = StateDataset(snapshot, table)
                queries[table.query_id] = table.full_name
                if table.is_rolling:
                    snapshot.rolling[table.query_id] = table
    if version is not None and len(queries) > 1:
        raise RequestError(
            f"version={version} is one of several queries here, whose versions have nothing to do with each other: the "
            f"statement reads {', '.join(sorted(queries.values()))}. Leave version out, or ask for each query alone."
        )
    try:
        with_params: dict[str, Any] = {} if query_params is None else {"params": query_params}
        database: StatementDatabase | None = None
        if connection is None:
            database = database_with_tables(duckdb, tables, limits or SqlLimits(), may_share=may_share)
            connection = database.connection
            relation = connection.sql(statement, **with_params)
        else:
            relation = run_on_own_connection(connection, statement, with_params, tables)
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        if _NO_TABLE.search(str(error)) is None:
            raise_client_error(snapshot, error)
            raise
        exist = ", ".join(sorted(s.full_name for s in all_tables)) or "none"
        known = f"Tables of running queries: {exist}. SQL reads operators; client.features(...) reads feature views."
        raise UnknownOperatorError(f"{error}\n{' '.join([*unclear, known])}") from error
    except duckdb.Error as error:
        raise_client_error(snapshot, error, database)
        raise
    return StateRelation(relation, connection, snapshot, database)
