"""SQL over the state of running queries: DuckDB on a client's scans.

DuckDB takes each operator for a ``pyarrow.dataset.Dataset``, as it takes tables of Lance. DuckDB asks for a scanner of
the columns and rows that it needs, and gets a scan of them from the hosts, as a stream. The hosts apply the part of a
filter that ``pushdown`` understands; Arrow then applies the whole filter to the rows that come.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spark_bridge.exceptions import RequestError, UnknownOperatorError
from spark_bridge.queryable.sql.catalog import UnclearNameError, candidate_names, catalog, resolve
from spark_bridge.queryable.sql.dataset import StateDataset, StatementSnapshot
from spark_bridge.queryable.sql.duckdb_connections import (
    SqlLimits,
    StatementDatabase,
    database_with_tables,
    import_duckdb,
    run_on_own_connection,
    statement_kind,
)
from spark_bridge.queryable.sql.relation import StateRelation, raise_client_error
from spark_bridge.queryable.sql.sql_client import SqlClient

if TYPE_CHECKING:
    import duckdb

_NO_TABLE = re.compile(r"Table with name|Catalog \".*\" does not exist")


def sql(
    client: SqlClient,
    statement: str,
    *,
    query_params: Sequence[Any] | Mapping[str, Any] | None = None,
    connection: duckdb.DuckDBPyConnection | None = None,
    version: int | None = None,
    timeout: float | None = None,
    limits: SqlLimits | None = None,
) -> StateRelation:
    """Return the rows that a SQL statement makes of the state of running queries.

    Names of tables are:

    - ``operator``;
    - ``operator.state``, where an operator has several state variables;
    - ``query.operator`` (the query by name or id), where several queries have an operator of that name;
    - ``query.operator.state``;
    - each of these as one quoted name with dots.

    Everything of a query is read at one version: ``version``, which needs a statement over one query, or that of the
    first rows. Rows are fetched when the result is asked for, and again each time.

    ``query_params`` are the values of ``?``, ``$1`` or ``$name``. Without ``connection`` only one statement that reads
    is possible, on a DuckDB in memory that opens no files and whose time zone is UTC. With a ``connection`` of the
    user's own the statement may be any, also with that connection's tables, which go before operators of the same name.
    Qualified names of operators are then to be written as one name: ``"query.operator"``.

    ``limits`` are those of the statement (default: ``SqlLimits()``); a ``connection`` of the user's own has its own.

    Raises ``UnknownOperatorError`` naming the tables that there are, ``RequestError`` for a statement that does not
    only read or a ``version`` of several queries, ``RequestLimitError`` for a statement that needs more memory,
    DuckDB's own errors for wrong SQL, and what a client's ``scan`` raises.
    """
    duckdb = import_duckdb()
    # An EXPLAIN does not share the database: EXPLAIN ANALYZE runs the statement that it explains.
    may_share = connection is not None or statement_kind(duckdb, statement) == "SELECT"
    known = catalog(client.operators())
    snapshot = StatementSnapshot(client, timeout, version)
    tables: dict[tuple[str, ...], StateDataset] = {}
    queries: dict[str, str] = {}  # a table of each query, by its id
    unclear: list[str] = []
    for name in candidate_names(statement):
        try:
            table = resolve(name, known)
        except UnclearNameError as error:
            unclear.append(str(error))
        else:
            if table is not None:
                tables[name] = StateDataset(snapshot, table)
                queries[table.query_id] = table.full_name
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
        exist = ", ".join(sorted(s.full_name for s in known)) or "none"
        more = " ".join([*unclear, f"Tables of running queries: {exist}."])
        raise UnknownOperatorError(f"{error}\n{more}") from error
    except duckdb.Error as error:
        raise_client_error(snapshot, error, database)
        raise
    return StateRelation(relation, connection, snapshot, database)
