"""DuckDB connections in which the state variables of a statement are tables."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_bridge.exceptions import EnvironmentProblemError, RequestError
from spark_bridge.queryable.sql.catalog import quoted
from spark_bridge.queryable.sql.dataset import StateDataset

if TYPE_CHECKING:
    import duckdb

_database: duckdb.DuckDBPyConnection | None = None
_database_lock = threading.Lock()
"""Guards ``_database``. All SELECTs share an empty DuckDB, which takes tens of milliseconds to make; none can change
it.
"""


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


def connection_with_tables(duckdb: Any, tables: Mapping[tuple[str, ...], StateDataset], *, may_share: bool) -> Any:
    """Return a connection to an empty database in memory with the tables.

    It is the shared database if ``may_share``, and if no name is qualified; else a new one.
    """
    global _database
    if may_share and all(len(name) == 1 for name in tables):
        with _database_lock:
            if _database is None:
                _database = _empty_database(duckdb)
            connection = _database.cursor()
    else:
        connection = _empty_database(duckdb)
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
    return connection


def _empty_database(duckdb: Any) -> Any:
    connection = duckdb.connect(
        ":memory:", config={"enable_external_access": "false", "python_enable_replacements": "false"}
    )
    connection.execute("set global TimeZone = 'UTC'")
    connection.execute("set lock_configuration = true")
    return connection


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
