"""DuckDB connections in which the state variables of a statement are tables, and the limits of a statement.

DuckDB bounds the memory, threads and temporary files of a database, not of a statement. So no two statements share a
database at the same time. Making a database takes 40 ms, so an idle one is reused.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import EnvironmentProblemError, RequestError, RequestLimitError
from spark_bridge.queryable.sql.catalog import quoted
from spark_bridge.queryable.sql.dataset import StateDataset

if TYPE_CHECKING:
    import duckdb

LEAST_MEMORY_BYTES = 16 << 20
"""DuckDB needs about this much for the smallest statement."""
KEPT_DATABASES = 4
"""At most this many empty databases wait for their next statement."""


@dataclass(frozen=True)
class SqlLimits:
    """The limits of one SQL statement. Raises ``InvalidStateStoreArgument`` for a limit with which nothing could run.

    - ``memory_bytes``: the memory that DuckDB may use for the statement; at least 16 MiB.
    - ``threads``: the threads that DuckDB may use for the statement.
    - ``temp_bytes``: the bytes that the statement may move to temporary files when ``memory_bytes`` are not enough;
      with 0 it moves none. The files are in a private directory below ``tempfile.gettempdir()``.
    """

    memory_bytes: int = 2048 << 20
    threads: int = os.cpu_count() or 1
    temp_bytes: int = 8192 << 20

    def __post_init__(self) -> None:
        least = {"memory_bytes": LEAST_MEMORY_BYTES, "threads": 1, "temp_bytes": 0}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least[field.name]:
                raise InvalidStateStoreArgument(
                    f"SqlLimits.{field.name} must be a whole number of at least {least[field.name]}, not {value!r}."
                )

    def share_of(self, statements: int) -> SqlLimits:
        """Return the limits of each of so many statements at once that have these bytes together."""
        return SqlLimits(
            max(LEAST_MEMORY_BYTES, self.memory_bytes // statements), self.threads, self.temp_bytes // statements
        )

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
    """Return whether DuckDB or Arrow says that a statement has reached its limit of memory."""
    return isinstance(error, MemoryError) or "Out of Memory Error" in str(error)


_idle: deque[tuple[SqlLimits, Any]] = deque()
"""Empty databases that may run the next SELECT with the same limits. A deque needs no lock."""


def import_duckdb() -> Any:
    """Return the module ``duckdb``. Raises ``EnvironmentProblemError`` if it is not installed."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise EnvironmentProblemError(
            "SQL over state needs the package duckdb: install it, or ray-statestore[sql]."
        ) from error
    return duckdb


def statement_kind(duckdb: Any, statement: str) -> str:
    """Return "SELECT" or "EXPLAIN". Raises ``RequestError`` for another statement, or for several."""
    kinds = [s.type.name for s in duckdb.extract_statements(statement)]
    if kinds not in (["SELECT"], ["EXPLAIN"]):
        raise RequestError(
            f"One statement that reads is possible, not {', '.join(kinds) or 'none'}: the state cannot be changed. "
            "To keep what "
            "is read in tables of your own, give connection=."
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
        # Nothing is there if the database could not be made.
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
    """Return an empty database in memory with the tables.

    It is used again afterwards if ``may_share``, and if no name is qualified.
    """
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
    return eval(
        "__statestore_connection.sql(__statestore_statement, **__statestore_params)",
        {
            **variables,
            "__statestore_connection": connection,
            "__statestore_statement": statement,
            "__statestore_params": with_params,
        },
    )
