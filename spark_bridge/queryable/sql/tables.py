"""The tables of a SQL statement over live state: which operators it names, and what DuckDB reads of them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from spark_bridge.queryable.protocol.messages import Comparison
from spark_bridge.queryable.sql.pushdown import Pushed, push

_IDENTIFIER = r'(?:"(?:[^"]|"")+"|[^\W\d][\w$]*)'
_LEXEMES = re.compile(
    r"[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"
    rf"|(?P<name>{_IDENTIFIER}(?:\s*\.\s*{_IDENTIFIER}){{0,2}})",
    re.DOTALL,
)
_PART = re.compile(_IDENTIFIER)


class StateRows(Protocol):
    """Rows at one version, as they come: what a client's scan is."""

    @property
    def schema(self) -> pa.Schema:
        """The columns."""

    @property
    def version(self) -> int:
        """The version that the rows are of."""

    def __iter__(self) -> Iterator[pa.RecordBatch]: ...

    def close(self) -> None:
        """End it; the hosts stop."""


class SqlClient(Protocol):
    """What SQL needs of a client."""

    def operators(self) -> list[dict[str, Any]]:
        """The operators of the running queries."""

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
        where: Sequence[Comparison] = (),
        query: str | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> StateRows:
        """The rows of a state variable."""

    def key_rows(
        self,
        operator: str,
        keys: pa.RecordBatch,
        state: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        query: str | None = None,
        version: int | None = None,
        timeout: float | None = None,
    ) -> StateRows:
        """The rows that some keys have, in the columns of ``scan``."""


# -- names ---------------------------------------------------------------------------------------


def names_in(statement: str) -> list[tuple[str, ...]]:
    """The names in a SQL statement that might be tables': each is one to three identifiers, unquoted.

    More than there are tables, as columns and keywords are among them.
    """
    found: dict[tuple[str, ...], None] = {}
    for lexeme in _LEXEMES.finditer(statement):
        if lexeme["name"] is not None:
            parts = _PART.findall(lexeme["name"])
            found[tuple(p[1:-1].replace('""', '"') if p[0] == '"' else p for p in parts)] = None
    return list(found)


@dataclass(frozen=True)
class RunningState:
    """One state variable of one operator of a running query; ``key`` are the columns of its grouping key, without a window.

    ``is_only`` if the operator has no other, ``has_ranges`` if its keys are stored in the order of ``key``.
    """

    query: str | None
    query_id: str
    run_id: str
    operator: str
    state: str
    key: tuple[str, ...]
    is_only: bool
    has_ranges: bool = True

    @property
    def names(self) -> list[tuple[str, ...]]:
        """What it is called in SQL; others may be called the same."""
        short: list[tuple[str, ...]] = [(self.operator, self.state), *([(self.operator,)] if self.is_only else [])]
        queries = [q for q in (self.query, self.query_id, self.run_id) if q]
        return [*short, *((q, *name) for q in queries for name in short)]

    @property
    def in_words(self) -> str:
        """How to write it for sure, with the query that it is of."""
        parts = [self.query or self.query_id, self.operator, *([] if self.is_only else [self.state])]
        return ".".join(quoted(p) for p in parts)


class UnclearNameError(Exception):
    """Several state variables go by a name."""


def resolve(name: tuple[str, ...], known: Sequence[RunningState]) -> RunningState | None:
    """The state variable that a name in SQL is of; None if there is none. Case counts only if it tells two apart.

    A single name with dots in it is also read as parts. Raises ``UnclearNameError``, which says what there is.
    """
    asked = [name, *([tuple(name[0].split("."))] if len(name) == 1 and "." in name[0] else [])]
    for fold in (str, str.lower):
        for parts in asked:
            wanted = tuple(map(fold, parts))
            found = [s for s in known if wanted in (tuple(map(fold, n)) for n in s.names)]
            if len(found) == 1:
                return found[0]
            if found:
                options = ", ".join(sorted(s.in_words for s in found))
                raise UnclearNameError(f"{'.'.join(map(quoted, name))} can be any of {options}; write which one.")
            operators = [s for s in known if wanted in {(fold(s.operator),), (fold(s.query or ""), fold(s.operator))}]
            if operators:
                options = ", ".join(sorted(s.in_words for s in operators))
                raise UnclearNameError(
                    f"{'.'.join(map(quoted, name))} has several state variables: {options}; write which one."
                )
    return None


def quoted(identifier: str) -> str:
    """An identifier for SQL."""
    if re.fullmatch(r"[a-z_][a-z0-9_]*", identifier):
        return identifier
    return '"' + identifier.replace('"', '""') + '"'


# -- tables --------------------------------------------------------------------------------------


class Snapshot:
    """One statement's view of the state: whatever it reads of a query, it reads at one version.

    That version is fixed with the first rows that are asked for.
    """

    def __init__(self, client: SqlClient, timeout: float | None = None) -> None:
        self._client = client
        self._timeout = timeout
        self._lock = threading.Lock()
        self.versions: dict[str, int] = {}
        self._failure: Exception | None = None

    def failed(self, error: Exception) -> None:
        """A scan has failed. The first error is kept, for DuckDB passes on only what it says."""
        self._failure = self._failure or error

    def taken_failure(self) -> Exception | None:
        """The first error since this was asked last."""
        failure, self._failure = self._failure, None
        return failure

    def scan(self, of: RunningState, pushed: Pushed, limit: int | None = None) -> StateRows:
        """Rows at the version of this snapshot."""
        with self._lock:
            version = self.versions.get(of.query_id)
            if version is None:
                rows = self._open(of, pushed, limit, None)
                self.versions[of.query_id] = rows.version
                return rows
        return self._open(of, pushed, limit, version)

    def _open(self, of: RunningState, pushed: Pushed, limit: int | None, version: int | None) -> StateRows:
        if pushed.keys is not None:
            return self._client.key_rows(
                of.operator,
                pushed.keys,
                of.state,
                pushed.columns,
                query=of.query_id,
                version=version,
                timeout=self._timeout,
            )
        return self._client.scan(
            of.operator,
            of.state,
            pushed.prefix,
            pushed.start,
            pushed.end,
            limit,
            pushed.columns,
            where=pushed.where,
            query=of.query_id,
            version=version,
            timeout=self._timeout,
        )


class StateDataset(pads.Dataset):  # type: ignore[misc]
    """One state variable as a table that DuckDB reads. It is a ``Dataset`` so that DuckDB pushes columns and filters down."""

    def __init__(self, snapshot: Snapshot, of: RunningState) -> None:
        # Arrow's own part of the object is not there: only what DuckDB calls works.
        self._snapshot = snapshot
        self._of = of

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self._schema

    @cached_property
    def _schema(self) -> pa.Schema:
        with _noting(self._snapshot):
            rows = self._snapshot.scan(self._of, Pushed(), limit=0)
            rows.close()
            return rows.schema

    def scanner(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, **_: Any
    ) -> StateScanner:
        """The rows that pass ``filter``, in ``columns`` (None: all)."""
        with _noting(self._snapshot):
            pushed = push(filter, columns, self._schema, self._of.key, has_ranges=self._of.has_ranges)
            return StateScanner(self._snapshot, self._snapshot.scan(self._of, pushed), columns, filter)


class StateScanner:
    """What DuckDB takes for a ``pyarrow.dataset.Scanner``."""

    def __init__(
        self, snapshot: Snapshot, rows: StateRows, columns: Sequence[str] | None, expression: pc.Expression | None
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
        """The rows, as they come. When the reader goes, the scan ends."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            with _noting(self._snapshot):
                for batch in self._rows:
                    # Once more, and all of it: what was pushed need not be all, nor right.
                    passing = batch if self._filter is None else batch.filter(self._filter)
                    if passing.num_rows:
                        yield passing.select(self._columns)
        finally:
            self._rows.close()


@contextmanager
def _noting(snapshot: Snapshot) -> Iterator[None]:
    """Keeps the error that ends a block for the one who waits for DuckDB."""
    try:
        yield
    except Exception as error:
        snapshot.failed(error)
        raise
