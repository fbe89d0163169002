"""State in memory, as SQL asks for it."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_bridge.queryable.protocol import Comparison
from spark_bridge.queryable.sql.catalog import CatalogTable

UTC = datetime.timezone.utc


@dataclass
class Rows:
    schema: pa.Schema
    version: int
    batches: Iterator[pa.RecordBatch]
    closed: bool = False
    at: None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self.batches

    def close(self) -> None:
        self.closed = True


@dataclass
class Asked:
    operator: str
    state: str | None
    query: str | None
    version: int | None
    columns: list[str] | None
    where: list[Comparison]
    keys: list[dict[str, Any]] | None = None
    prefix: Any = None
    start: Any = None
    end: Any = None
    limit: int | None = None
    rows: Rows | None = None


@dataclass
class State:
    """One state variable: a table per version; the key are its first columns."""

    key: list[str]
    versions: dict[int, pa.Table]


@dataclass
class Memory:
    """A client of states in memory, which does exactly what it is asked: no more rows, no more columns."""

    states: dict[tuple[str, str, str], State]
    names: dict[str, str] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    batch_rows: int = 2
    failure: Exception | None = None
    fail_after: int | None = None

    def operators(self) -> list[dict[str, Any]]:
        found = []
        for (query, operator), group in itertools.groupby(sorted(self.states), lambda k: k[:2]):
            states = [
                {"name": s, "kind": "value", "key": dict.fromkeys(self.states[query, operator, s].key, "string")}
                for _, _, s in group
            ]
            found.append(
                {
                    "operator": operator,
                    "query_name": self.names.get(query),
                    "query_id": query,
                    "run_id": f"run-{query}",
                    "state": states,
                }
            )
        return found

    def _table(
        self, operator: str, state: str | None, query: str | None, version: int | None
    ) -> tuple[State, int, pa.Table]:
        assert query is not None and state is not None
        found = self.states[query, operator, state]
        at = max(found.versions) if version is None else version
        return found, at, found.versions[at]

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
    ) -> Rows:
        of, at, table = self._table(operator, state, query, version)
        asked = Asked(
            operator,
            state,
            query,
            version,
            None if columns is None else list(columns),
            list(where),
            None,
            prefix,
            start,
            end,
            limit,
        )
        self.asked.append(asked)
        if self.failure is not None and self.fail_after is None and limit != 0:
            raise self.failure
        for comparison in where:
            table = table.filter(holds(table, comparison))
        keys = [tuple(row) for row in zip(*(table[k].to_pylist() for k in of.key), strict=True)]
        inside = [
            (prefix is None or key[: len(prefix)] == prefix)
            and (start is None or before(start, key, or_equal=True))
            and (end is None or not before(end, key, or_equal=True))
            for key in keys
        ]
        asked.rows = self._rows(table.filter(pa.array(inside, pa.bool_())).slice(0, limit), columns, at)
        return asked.rows

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
    ) -> Rows:
        of, at, table = self._table(operator, state, query, version)
        assert keys.schema.names == of.key
        asked = Asked(operator, state, query, version, None if columns is None else list(columns), [], keys.to_pylist())
        self.asked.append(asked)
        wanted = set(zip(*(c.to_pylist() for c in keys.columns), strict=True))
        inside = [tuple(row) in wanted for row in zip(*(table[k].to_pylist() for k in of.key), strict=True)]
        asked.rows = self._rows(table.filter(pa.array(inside, pa.bool_())), columns, at)
        return asked.rows

    def _rows(self, table: pa.Table, columns: Sequence[str] | None, version: int) -> Rows:
        given = table if columns is None else table.select(list(columns))
        return Rows(given.schema, version, self._batches(given))

    def _batches(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(table.to_batches(max_chunksize=self.batch_rows)):
            if self.failure is not None and number == self.fail_after:
                raise self.failure
            yield batch

    @property
    def scans(self) -> list[Asked]:
        """Return the requests for rows."""
        return [a for a in self.asked if a.limit != 0]


def before(bound: tuple[Any, ...], key: tuple[Any, ...], *, or_equal: bool) -> bool:
    """Whether a bound, which may be shorter, is not behind a key; null is first."""
    ranks = [[(v is not None, v) for v in values] for values in (bound, key[: len(bound)])]
    return ranks[0] <= ranks[1] if or_equal else ranks[0] < ranks[1]


def holds(table: pa.Table, comparison: Comparison) -> pa.ChunkedArray:
    """A comparison as hosts evaluate it."""
    column = table[comparison.column]
    values = [pa.scalar(v).cast(column.type) for v in comparison.values]
    functions = {
        "=": pc.equal,
        "!=": pc.not_equal,
        "<": pc.less,
        "<=": pc.less_equal,
        ">": pc.greater,
        ">=": pc.greater_equal,
    }
    if comparison.comparison == "is null":
        return pc.is_null(column)
    if comparison.comparison == "is not null":
        return pc.is_valid(column)
    if comparison.comparison == "in":
        return pc.is_in(column, pa.array([v.as_py() for v in values], column.type))
    return functions[comparison.comparison](column, values[0])


FLIGHTS = pa.table(
    {
        "tail": pa.array(["N1", "N2", "N3", "N4", "N5", 'N"6'] * 2),
        "leg": pa.array([1] * 6 + [2] * 6, pa.int32()),
        "carrier": pa.array(["AA", "AA", "UA", None, "DL", "DL"] * 2),
        "delay": pa.array([1.5, -2.0, float("nan"), None, 10.0, 3.0] * 2),
        "flights": pa.array(range(12), pa.int64()),
        "seen": pa.array([datetime.datetime(2013, 1, 1, h, tzinfo=UTC) for h in range(12)], pa.timestamp("us", "UTC")),
        "fare": pa.array([Decimal(n) / 4 for n in range(12)], pa.decimal128(10, 2)),
        "day": pa.array([datetime.date(2013, 1, 1 + n) for n in range(12)]),
        "code": pa.array([bytes([n, 255]) for n in range(11)] + [b"ab"]),
        "late": pa.array([True, False, None] * 4),
        "legs": pa.array([[n, None] for n in range(12)], pa.list_(pa.int64())),
        "place": pa.array([{"lat": n, "lon": -1.0} for n in range(12)]),
    }
)


def memory(**kwargs: Any) -> Memory:
    users = pa.table({"user": pa.array(range(100), pa.int64()), "n": pa.array(range(0, 1000, 10), pa.int64())})
    return Memory(
        {
            ("q1", "aircraft", "default"): State(["tail", "leg"], {7: FLIGHTS}),
            ("q1", "users", "default"): State(["user"], {7: users}),
        },
        **kwargs,
    )


def state(query: str, operator: str, name: str, *, only: bool, query_name: str | None = None) -> CatalogTable:
    return CatalogTable(query_name, query, f"run-{query}", operator, name, ("k",), only)


def several() -> Memory:
    def numbers(n: int) -> State:
        return State(["k"], {1: pa.table({"k": pa.array([n], pa.int64()), "default": ["x"]})})

    names = [
        ("q1", "web", "pages"),
        ("q1", "web", "sessions"),
        ("q1", "users", "default"),
        ("q2", "users", "default"),
        ("q2", "odd one", "main"),
    ]
    return Memory({name: numbers(i) for i, name in enumerate(names)}, {"q1": "clicks", "q2": "my.q"})
