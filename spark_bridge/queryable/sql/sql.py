"""SQL over the state of running queries: DuckDB on a client's scans.

DuckDB takes each operator for a ``pyarrow.dataset.Dataset``, as it does Lance's tables: it asks for a scanner of the columns and rows that
it needs, and gets a scan of these from the hosts, as a stream. Of a filter the hosts do what ``pushdown`` understands; Arrow then applies
all of it to what comes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from spark_bridge.exceptions import EnvironmentProblemError, RequestError, UnknownOperatorError
from spark_bridge.queryable.sql.tables import (
    RunningState,
    Snapshot,
    SqlClient,
    StateDataset,
    UnclearNameError,
    names_in,
    quoted,
    resolve,
)

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl

_NO_TABLE = re.compile(r"Table with name|Catalog \".*\" does not exist")
_database: duckdb.DuckDBPyConnection | None = None
_database_lock = threading.Lock()
"""An empty DuckDB takes tens of milliseconds to make, so that all SELECTs share one; none of them can change it."""


def sql(
    client: SqlClient,
    statement: str,
    *,
    query_params: Sequence[Any] | Mapping[str, Any] | None = None,
    connection: duckdb.DuckDBPyConnection | None = None,
    timeout: float | None = None,
) -> StateRelation:
    """The rows that a SQL statement makes of the state of running queries.

    Tables are ``operator``, ``operator.state`` where an operator has several state variables, ``query.operator`` (by name or id) where several
    queries have an operator of the name, ``query.operator.state``, or one quoted name with dots. Whatever is read of a query is
    read at one version: that of the first rows. Rows are fetched when the result is asked for, and anew each time.

    ``query_params`` are the values of ``?``, ``$1`` or ``$name``. Without ``connection`` only one statement that reads is possible, on a DuckDB
    in memory that opens no files and whose time zone is UTC. With a ``connection`` of the user's the statement may be any, also with its tables,
    which go before operators of the same name; qualified names of operators are then to be written as one: ``"query.operator"``.

    Raises ``UnknownOperatorError`` naming the tables that there are, ``RequestError`` for a statement that does not only read, DuckDB's own
    errors for what is wrong with the SQL, and what a client's ``scan`` raises.
    """
    duckdb = _duckdb()
    # EXPLAIN ANALYZE runs whatever it explains.
    may_share = connection is not None or _reading_kind(duckdb, statement) == "SELECT"
    known = [found for operator in client.operators() for found in running_states(operator)]
    snapshot = Snapshot(client, timeout)
    tables: dict[tuple[str, ...], StateDataset] = {}
    unclear: list[str] = []
    for name in names_in(statement):
        try:
            of = resolve(name, known)
        except UnclearNameError as error:
            unclear.append(str(error))
        else:
            if of is not None:
                tables[name] = StateDataset(snapshot, of)
    try:
        with_params: dict[str, Any] = {} if query_params is None else {"params": query_params}
        if connection is None:
            connection = _connection(duckdb, tables, may_share=may_share)
            relation = connection.sql(statement, **with_params)
        else:
            relation = _on(connection, statement, with_params, tables)
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        if _NO_TABLE.search(str(error)) is None:
            _raise_first(snapshot, error)
            raise
        exist = ", ".join(sorted(s.in_words for s in known)) or "none"
        more = " ".join([*unclear, f"Tables of running queries: {exist}."])
        raise UnknownOperatorError(f"{error}\n{more}") from error
    except duckdb.Error as error:
        _raise_first(snapshot, error)
        raise
    return StateRelation(relation, connection, snapshot)


class StateRelation:
    """The result of a statement: a ``duckdb.DuckDBPyRelation`` that raises the client's own errors, not DuckDB's text of them.

    It has all methods of ``relation``, DuckDB's object. Nothing is read before one of them is called that needs rows, and each such call reads
    again, at the same version. Not to be used by several threads at once.
    """

    def __init__(self, relation: Any, connection: duckdb.DuckDBPyConnection, snapshot: Snapshot) -> None:
        self.relation = relation
        self._connection = connection  # lives as long as the relation that it runs
        self._snapshot = snapshot

    @property
    def versions(self) -> dict[str, int]:
        """The version read, by query id."""
        return dict(self._snapshot.versions)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.relation.columns)

    def arrow(self) -> pa.Table:
        """All rows as an Arrow table."""
        return self._call("to_arrow_table")

    def to_arrow_reader(self, batch_size: int = 100_000) -> pa.RecordBatchReader:
        """The rows as a stream, which is read while the hosts send."""
        # DuckDB has called it so since 1.5, and otherwise before.
        name = "to_arrow_reader" if hasattr(self.relation, "to_arrow_reader") else "fetch_arrow_reader"
        return self._call(name, batch_size)

    def df(self) -> pd.DataFrame:
        """All rows as a pandas DataFrame."""
        frame: pd.DataFrame = self._call("df")
        return frame

    def pl(self) -> pl.DataFrame:
        """All rows as a Polars DataFrame."""
        frame: pl.DataFrame = self._call("pl")
        return frame

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows as tuples."""
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
        duckdb = _duckdb()
        self._snapshot.taken_failure()
        try:
            result = getattr(self.relation, method)(*args, **kwargs)
        except duckdb.Error as error:
            _raise_first(self._snapshot, error)
            raise
        if isinstance(result, duckdb.DuckDBPyRelation):
            return StateRelation(result, self._connection, self._snapshot)
        return result


def _raise_first(snapshot: Snapshot, error: Exception) -> None:
    """Raise the client's error that DuckDB's comes from, if it comes from one."""
    failure = snapshot.taken_failure()
    if failure is not None:
        raise failure from error


def running_states(operator: Mapping[str, Any]) -> list[RunningState]:
    """The state variables of one of the ``operators()`` of a client."""
    states = operator["state"]
    return [
        RunningState(
            query=operator["query_name"],
            query_id=operator["query_id"],
            run_id=operator["run_id"],
            operator=operator["operator"],
            state=state["name"],
            key=tuple(name for name in state["key"] if name != state.get("window")),
            is_only=len(states) == 1,
            # Windows and timers are stored by time first.
            has_ranges="window" not in state and state["kind"] != "timers",
        )
        for state in states
    ]


def _duckdb() -> Any:
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise EnvironmentProblemError(
            "SQL over state needs the package duckdb: install it, or ray-statestore[sql]."
        ) from error
    return duckdb


def _reading_kind(duckdb: Any, statement: str) -> str:
    """SELECT or EXPLAIN. Raises ``RequestError`` for another statement, or several."""
    kinds = [s.type.name for s in duckdb.extract_statements(statement)]
    if kinds not in (["SELECT"], ["EXPLAIN"]):
        raise RequestError(
            f"One statement that reads is possible, not {', '.join(kinds) or 'none'}: the state cannot be changed. To keep what is read in "
            "tables of your own, give connection=."
        )
    return str(kinds[0])


def _connection(duckdb: Any, tables: Mapping[tuple[str, ...], StateDataset], *, may_share: bool) -> Any:
    """A connection to an empty database in memory in which the tables are; its own one, or if it may the one that is shared."""
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
        # A view by the full name, on a table that this connection alone has.
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


def _on(
    connection: duckdb.DuckDBPyConnection,
    statement: str,
    with_params: Mapping[str, Any],
    tables: Mapping[tuple[str, ...], StateDataset],
) -> Any:
    """Run a statement on the user's own connection, and leave nothing behind in it.

    DuckDB looks for tables that it does not have among the Python variables of its caller: here these are the tables, and nothing else.
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
