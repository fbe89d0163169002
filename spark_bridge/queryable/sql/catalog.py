"""The tables that SQL may name: the state variables of running queries, and the table that a name means."""

from __future__ import annotations

import datetime as dt
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from backends.encoding.operator_schema import TIMERS
from spark_bridge.queryable.protocol import WATERMARK
from spark_bridge.queryable.sql.pushdown import ScanPushdown, push_down
from spark_bridge.state_format.layouts import ROLLING

_IDENTIFIER = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'
_LEXEMES = re.compile(
    r"[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"
    rf"|(?P<name>{_IDENTIFIER}(?:\s*\.\s*{_IDENTIFIER}){{0,2}})",
    re.DOTALL,
)
_PART = re.compile(_IDENTIFIER)


def candidate_names(statement: str) -> list[tuple[str, ...]]:
    """Return the names in a SQL statement that may be names of tables: each is one to three identifiers, unquoted.

    There are more names than tables, because columns and keywords are names too.
    """
    names: dict[tuple[str, ...], None] = {}
    for lexeme in _LEXEMES.finditer(statement):
        if lexeme["name"] is not None:
            parts = _PART.findall(lexeme["name"])
            names[tuple(p[1:-1].replace('""', '"') if p[0] == '"' else p for p in parts)] = None
    return list(names)


@dataclass(frozen=True)
class CatalogTable:
    """One state variable of one operator of a running query. ``key`` are the grouping key's columns, without a window.

    ``is_only``: the operator has no other state variable. ``has_ranges``: its keys are stored in the order of ``key``.
    ``is_rolling``: its rows are as of a time.
    """

    query: str | None
    query_id: str
    run_id: str
    operator: str
    state: str
    key: tuple[str, ...]
    is_only: bool
    has_ranges: bool = True
    is_rolling: bool = False

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of the table in SQL; other tables may have some of the same names."""
        short: list[tuple[str, ...]] = [(self.operator, self.state), *([(self.operator,)] if self.is_only else [])]
        queries = [q for q in (self.query, self.query_id, self.run_id) if q]
        return [*short, *((q, *name) for q in queries for name in short)]

    @property
    def full_name(self) -> str:
        """The name to write in SQL so that no other table is meant: with the query."""
        query = self.query_id if self.query_id == self.run_id else self.query or self.query_id
        parts = [query, self.operator, *([] if self.is_only else [self.state])]
        return ".".join(quoted(p) for p in parts)


def catalog(operators: Sequence[Mapping[str, Any]]) -> list[CatalogTable]:
    """Return the tables of a client's ``operators()``.

    If a copy of a checkpoint runs next to the original, both have one query id: their run ids name them instead.
    """
    runs: dict[str, set[str]] = {}
    for operator in operators:
        runs.setdefault(operator["query_id"], set()).add(operator["run_id"])
    return [
        table if len(runs[table.query_id]) == 1 else replace(table, query_id=table.run_id)
        for operator in operators
        for table in catalog_tables(operator)
    ]


def catalog_tables(operator: Mapping[str, Any]) -> list[CatalogTable]:
    """Return the tables of one operator; ``operator`` is one of a client's ``operators()``."""
    states = operator["state"]
    return [
        CatalogTable(
            query=operator["query_name"],
            query_id=operator["query_id"],
            run_id=operator["run_id"],
            operator=operator["operator"],
            state=state["name"],
            key=tuple(name for name in state["key"] if name != state.get("window")),
            is_only=len(states) == 1,
            # Windows and timers are stored by time first.
            has_ranges="window" not in state and state["kind"] != TIMERS,
            is_rolling=state["kind"] == ROLLING,
        )
        for state in states
    ]


class UnclearNameError(Exception):
    """Several tables have a name."""


def resolve(name: tuple[str, ...], tables: Sequence[CatalogTable]) -> CatalogTable | None:
    """Return the table that a name in SQL means; None if there is none. Case counts only if it tells two tables apart.

    A single name with dots is also read as several parts. Raises ``UnclearNameError``, which names the tables that
    there are.
    """
    readings = [name, *([tuple(name[0].split("."))] if len(name) == 1 and "." in name[0] else [])]
    for fold in (str, str.lower):
        for parts in readings:
            wanted = tuple(map(fold, parts))
            matches = [s for s in tables if wanted in (tuple(map(fold, n)) for n in s.names)]
            if len(matches) == 1:
                return matches[0]
            if matches:
                options = ", ".join(sorted(s.full_name for s in matches))
                raise UnclearNameError(f"{'.'.join(map(quoted, name))} can be any of {options}; write which one.")
            operators = [s for s in tables if wanted in {(fold(s.operator),), (fold(s.query or ""), fold(s.operator))}]
            if operators:
                options = ", ".join(sorted(s.full_name for s in operators))
                raise UnclearNameError(
                    f"{'.'.join(map(quoted, name))} has several state variables: {options}; write which one."
                )
    return None


def quoted(identifier: str) -> str:
    """Return an identifier in SQL, quoted if necessary."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", identifier):
        return identifier
    return '"' + identifier.replace('"', '""') + '"'


# The interface of a client to SQL: the methods that SQL calls. A client depends on ``sql``, never the reverse.


class VersionedRows(Protocol):
    """Rows at one version, as a stream: the result of a client's scan."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    @property
    def version(self) -> int:
        """The version of all rows."""

    @property
    def at(self) -> dt.datetime | None:
        """The time that rolling aggregates are of; None for rows of other operators."""

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None:
        """End the scan, so that the hosts stop."""


class SqlClient(Protocol):
    """The methods of ``QueryableStateClient`` that SQL uses."""

    def operators(self) -> list[dict[str, Any]]:
        """Return the operators of the running queries."""

    def now(self) -> dt.datetime:
        """Return the default time of rolling aggregates."""

    @property
    def scan(self) -> Callable[..., VersionedRows]:
        """The method that returns the rows of a state variable."""

    @property
    def key_rows(self) -> Callable[..., VersionedRows]:
        """The method that returns the rows that some keys have, in the columns of ``scan``."""


# State variables as the Arrow datasets that DuckDB reads, all of one statement at one version.


@dataclass(eq=False, repr=False)
class StatementSnapshot:
    """The state as one statement sees it: everything of a query is read at one version.

    The first rows that are read fix that version, unless ``version`` does, and the time of rolling aggregates, unless
    ``at`` does. ``at="watermark"`` is the watermark of each query's version.
    """

    _client: SqlClient
    _timeout: float | None = None
    _version: int | None = None
    _at: Any = None
    versions: dict[str, int] = field(default_factory=dict)
    """The version by query id. ``_lock`` guards the choice of a version."""
    times: dict[str, dt.datetime] = field(default_factory=dict)
    """The time of the rolling aggregates that were read, by query id."""
    rolling: dict[str, CatalogTable] = field(default_factory=dict)
    """By query id, a table of rolling aggregates that the statement reads."""
    _failure: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, error: Exception) -> None:
        """Keep the first error of a scan, because DuckDB passes on only an error's message."""
        self._failure = self._failure or error

    def taken_failure(self) -> Exception | None:
        """Return the first error since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def scan(self, table: CatalogTable, pushdown: ScanPushdown, limit: int | None = None) -> VersionedRows:
        with self._lock:
            version = self.versions.get(table.query_id)
            if version is None:
                rows = self._open(table, pushdown, limit, self._first_version(table.query_id))
                self.versions[table.query_id] = rows.version
                return rows
        return self._open(table, pushdown, limit, version)

    def _first_version(self, query_id: str) -> int | None:
        """Return the version to read first: as of the watermark, one whose watermark the client knows."""
        rolling = self.rolling.get(query_id)
        if self._version is not None or rolling is None or self._at != WATERMARK:
            return self._version
        with closing(self._open(rolling, ScanPushdown(), 0, None)) as rows:
            return rows.version

    def _open(
        self, table: CatalogTable, pushdown: ScanPushdown, limit: int | None, version: int | None
    ) -> VersionedRows:
        asked = {"columns": pushdown.columns, "query": table.query_id, "version": version, "timeout": self._timeout}
        if table.is_rolling:
            # All tables of a statement are as of one time.
            self._at = self._client.now() if self._at is None else self._at
            asked["at"] = self._at
        if pushdown.keys is not None:
            rows = self._client.key_rows(table.operator, pushdown.keys, table.state, **asked)
        else:
            bounds = pushdown.prefix, pushdown.start, pushdown.end
            rows = self._client.scan(table.operator, table.state, *bounds, limit=limit, where=pushdown.where, **asked)
        if rows.at is not None:
            self.times[table.query_id] = rows.at
        return rows


class StateDataset(pads.Dataset):  # type: ignore[misc]
    """One state variable as a table that DuckDB reads. DuckDB pushes columns and filters down into a ``Dataset``."""

    def __init__(self, snapshot: StatementSnapshot, table: CatalogTable) -> None:
        # Arrow's own part of the object is not initialized: only the methods that DuckDB calls work.
        self._snapshot = snapshot
        self._table = table

    @property
    def schema(self) -> pa.Schema:
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
        return pa.schema([self._rows.schema.field(name) for name in self._columns])

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows as a stream. The scan ends when the reader is released."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            with _keeping_failure(self._snapshot):
                for batch in self._rows:
                    # The whole filter again: the conditions that were pushed down need not be all of it, nor exact.
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
