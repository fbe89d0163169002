"""SQL over state: what is pushed down, what a statement sees, which names there are. On an in-memory client that
does what it is asked.
"""

from __future__ import annotations

import datetime
import gc
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.exceptions import EnvironmentProblemError, QueryTimeoutError, RequestError, UnknownOperatorError
from spark_bridge.queryable.protocol.messages import Comparison
from spark_bridge.queryable.sql import pushdown
from spark_bridge.queryable.sql.catalog import CatalogTable, UnclearNameError, candidate_names, catalog_tables, resolve
from spark_bridge.queryable.sql.expressions import (
    Call,
    FieldRef,
    UnknownExpressionError,
    columns_read,
    parse_expression,
)
from spark_bridge.queryable.sql.pushdown import ScanPushdown, as_json, push_down
from spark_bridge.queryable.sql.sql import sql
from tests.effort import examples
from tests.patience import PATIENCE

UTC = datetime.timezone.utc


@dataclass
class Rows:
    schema: pa.Schema
    version: int
    batches: Iterator[pa.RecordBatch]
    closed: bool = False

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
        """What was asked for rows."""
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


# -- expressions ---------------------------------------------------------------------------------


def test_an_expression_can_be_taken_apart() -> None:
    tree = parse_expression((pc.field("a") > 3) & pc.field("s", "x").isin(["p", 'q"', None]))
    assert isinstance(tree, Call) and tree.function == "and_kleene"
    greater, is_in = tree.arguments
    assert isinstance(greater, Call) and greater.arguments[0] == FieldRef(("a",))
    assert isinstance(is_in, Call) and is_in.arguments == (FieldRef(("s", "x")),)
    assert is_in.options is not None and is_in.options["value_set"].as_py() == ["p", 'q"', None]
    assert columns_read(tree) == {"a", "s"}


def test_an_expression_of_another_form_is_an_error_of_its_own() -> None:
    with pytest.raises(UnknownExpressionError):
        parse_expression(pc.field(0) > 3)
    assert push_down(pc.field(0) > 3, ["n"], FLIGHTS.schema, ["tail"]) == ScanPushdown(None)
    deep = pc.field("a") == 0
    for n in range(5_000):
        deep = deep | (pc.field("a") == n)
    with pytest.raises(UnknownExpressionError):
        parse_expression(deep)


@pytest.mark.parametrize(
    "value",
    [
        pa.scalar(3),
        pa.scalar(2**62),
        pa.scalar("x'\"é"),
        pa.scalar(1.25),
        pa.scalar(True),
        pa.scalar(datetime.datetime(2013, 1, 1, 0, 0, 0, 7, tzinfo=UTC), pa.timestamp("us", "UTC")),
        pa.scalar(datetime.datetime(1013, 1, 1), pa.timestamp("us")),
        pa.scalar(datetime.date(2013, 1, 1)),
        pa.scalar(Decimal("-0.01"), pa.decimal128(38, 2)),
        pa.scalar(b"ab"),
    ],
)
def test_values_go_through_json(value: pa.Scalar) -> None:
    plain = as_json(value)
    assert plain is not None
    assert pa.scalar(plain).cast(value.type).equals(value)


def test_values_that_json_cannot_say_stay() -> None:
    assert as_json(pa.scalar(b"\xff")) is None
    assert as_json(pa.scalar([1])) is None


def test_conditions_may_begin_with_the_value() -> None:
    three, flights = pc.scalar(3), pc.field("flights")
    for expression, where in (
        (pc.less(three, flights), Comparison("flights", ">", [3])),
        (pc.less_equal(three, flights), Comparison("flights", ">=", [3])),
        (pc.greater(three, flights), Comparison("flights", "<", [3])),
        (pc.greater_equal(three, flights), Comparison("flights", "<=", [3])),
        (pc.equal(three, flights), Comparison("flights", "=", [3])),
    ):
        assert push_down(expression, None, FLIGHTS.schema, []).where == [where]


# -- what is pushed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "where"),
    [
        ("flights = 3", [Comparison("flights", "=", [3])]),
        ("3 < flights", [Comparison("flights", ">", [3])]),
        ("flights <> 3", [Comparison("flights", "!=", [3])]),
        ("flights between 2 and 4", [Comparison("flights", ">=", [2]), Comparison("flights", "<=", [4])]),
        ("flights + 1 = 3", [Comparison("flights", "=", [2])]),
        ("carrier = 'AA' and flights > 0", [Comparison("carrier", "=", ["AA"]), Comparison("flights", ">", [0])]),
        ("flights in (1, 5, 7)", [Comparison("flights", "in", [1, 5, 7])]),
        ("flights = 1 or flights = 8", [Comparison("flights", "in", [1, 8])]),
        ("carrier is null", [Comparison("carrier", "is null")]),
        ("carrier is not null", [Comparison("carrier", "is not null")]),
        ("seen >= '2013-01-01 05:00:00'", [Comparison("seen", ">=", ["2013-01-01 05:00:00.000000Z"])]),
        ("fare = 1.5", [Comparison("fare", "=", ["1.50"])]),
        ("day > '2013-01-05'", [Comparison("day", ">", ["2013-01-05"])]),
        ("code = 'ab'::blob", [Comparison("code", "=", ["ab"])]),
        # What only the client can do.
        ("code = '\\x03\\xFF'::blob", []),
        ("flights not in (1, 2, 3)", []),
        ("place.lat = 3", []),
        ("flights = 1 or carrier = 'UA'", []),
        ("flights % 2 = 0", []),
        ("carrier like 'A%'", []),
        ("delay > 1", []),
        ("delay = 'nan'::double", []),
        ("late", []),
        ("legs = [3, null]", []),
    ],
)
def test_conditions_reach_the_hosts_and_rows_are_as_without_them(condition: str, where: list[Comparison]) -> None:
    client = memory()
    found = sql(client, f"select tail, leg from aircraft where {condition} order by all").fetchall()
    with duckdb.connect() as plain:
        plain.execute("set TimeZone = 'UTC'")
        plain.register("aircraft", FLIGHTS)
        wanted = plain.sql(f"select tail, leg from aircraft where {condition} order by all").fetchall()
    assert found == wanted
    assert all(a.rows is not None and a.rows.closed for a in client.asked)
    if not duckdb.__version__.startswith("1."):  # that of Python 3.10 gives others away
        assert [c for a in client.scans for c in a.where] == where


def test_only_the_columns_that_are_needed_are_fetched() -> None:
    client = memory()
    sql(client, "select carrier, avg(flights) from aircraft where leg = 2 group by carrier").fetchall()
    assert [set(a.columns or ()) for a in client.scans] == [{"carrier", "flights", "leg"}]


@pytest.mark.parametrize(
    ("condition", "keys"),
    [
        ("tail = 'N3' and leg = 2", [{"tail": "N3", "leg": 2}]),
        ("tail in ('N1', 'N5', 'none') and leg = 1", [{"tail": t, "leg": 1} for t in ("N1", "N5", "none")]),
        (
            "(tail = 'N1' or tail = 'N2') and leg in (1, 9) and flights > 0",
            [{"tail": t, "leg": n} for t in ("N1", "N2") for n in (1, 9)],
        ),
    ],
)
def test_keys_are_looked_up(condition: str, keys: list[dict[str, Any]]) -> None:
    client = memory()
    found = sql(client, f"select flights from aircraft where {condition} order by 1").fetchall()
    with duckdb.connect() as plain:
        plain.register("aircraft", FLIGHTS)
        assert found == plain.sql(f"select flights from aircraft where {condition} order by 1").fetchall()
    (asked,) = client.scans
    assert asked.keys is not None
    assert sorted(map(str, asked.keys)) == sorted(map(str, keys))


@pytest.mark.parametrize(
    ("condition", "bounds"),
    [
        ("user = 3", "keys"),
        ("user > 5", (None, (5,), None)),
        ("user >= 5 and user < 9", (None, (5,), (9,))),
        ("user <= 9", (None, None, (10,))),
        ("user <= 9223372036854775807", (None, None, None)),
    ],
)
def test_ranges_of_keys_bound_the_scan(condition: str, bounds: object) -> None:
    client = memory()
    found = sql(client, f"select user, n from users where {condition} order by 1").fetchall()
    table = client.states["q1", "users", "default"].versions[7]
    assert found == [
        r
        for r in zip(*(c.to_pylist() for c in table.columns), strict=True)
        if eval(condition.replace("= 3", "== 3"), {"user": r[0]})
    ]
    (asked,) = client.scans
    assert (asked.prefix, asked.start, asked.end) == bounds if bounds != "keys" else asked.keys == [{"user": 3}]


def test_leading_columns_of_the_key_bound_the_scan() -> None:
    client = memory()
    assert len(sql(client, "from aircraft where tail = 'N1'").fetchall()) == 2
    assert len(sql(client, "from aircraft where tail = 'N1' and leg > 1").fetchall()) == 1
    assert len(sql(client, "from aircraft where tail = 'N1' and leg >= 1 and leg < 2").fetchall()) == 1
    assert [(a.prefix, a.start, a.end) for a in client.scans] == [
        (("N1",), None, None),
        (("N1",), None, None),
        (None, ("N1", 1), ("N1", 2)),
    ]


def test_long_lists_are_not_sent_twice_over(monkeypatch: pytest.MonkeyPatch) -> None:
    client = memory()
    values = ", ".join(f"'{'x' * 2000}{n}'" for n in range(150))
    assert sql(client, f"select count(*) from aircraft where carrier in ({values}, 'AA')").fetchall() == [(4,)]
    assert [a.where for a in client.scans] == [[]]
    monkeypatch.setattr(pushdown, "MAX_KEYS", 100)
    client = memory()
    many = ", ".join(map(str, range(50, 151)))
    assert sql(client, f"select count(*) from users where user in ({many})").fetchall() == [(50,)]
    assert [a.keys for a in client.scans] == [None]


COLUMNS = ("tail", "leg", "carrier", "delay", "flights", "day", "late")
LITERALS = {
    "tail": st.sampled_from(["N1", "N3", "N9"]).map(lambda v: f"'{v}'"),
    "leg": st.integers(0, 3).map(str),
    "carrier": st.sampled_from(["'AA'", "'UA'", "'ZZ'", "null"]),
    "delay": st.sampled_from(["1.5", "-2", "'nan'::double", "10", "null"]),
    "flights": st.sampled_from(["0", "5", "11", "99", "2.5", "null"]),
    "day": st.integers(1, 13).map(lambda d: f"date '2013-01-{d:02}'"),
    "late": st.sampled_from(["true", "false"]),
}


@st.composite
def simple(draw: st.DrawFn) -> str:
    column = draw(st.sampled_from(COLUMNS))
    kind = draw(st.sampled_from(["compare", "in", "null", "not in"]))
    if kind == "null":
        return f"{column} is {draw(st.sampled_from(['', 'not ']))}null"
    if kind == "compare":
        comparison = draw(st.sampled_from(["=", "<>", "<", "<=", ">", ">=", "is distinct from"]))
        return f"{column} {comparison} {draw(LITERALS[column])}"
    values = ", ".join(draw(st.lists(LITERALS[column], min_size=1, max_size=4)))
    return f"{column} {kind} ({values})"


conditions = st.recursive(
    simple(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        inner.map(lambda c: f"not ({c})"),
    ),
    max_leaves=5,
)


@settings(max_examples=examples(120), deadline=None)
@given(conditions)
def test_any_condition_gives_the_rows_that_duckdb_finds_in_a_plain_table(condition: str) -> None:
    found = sql(memory(), f"select flights from aircraft where {condition} order by 1").fetchall()
    assert found == PLAIN.sql(f"select flights from aircraft where {condition} order by 1").fetchall()


PLAIN = duckdb.connect()
PLAIN.execute("create table aircraft as select * from FLIGHTS")


# -- one version ---------------------------------------------------------------------------------


def two_versions() -> Memory:
    def table(total: int) -> pa.Table:
        return pa.table({"user": pa.array([1, 2], pa.int64()), "n": pa.array([total, -total], pa.int64())})

    return Memory(
        {
            ("q1", "a", "default"): State(["user"], {4: table(1)}),
            ("q1", "b", "default"): State(["user"], {4: table(5)}),
            ("q2", "c", "default"): State(["user"], {9: table(7)}),
        }
    )


def test_a_version_may_be_given_where_all_is_of_one_query() -> None:
    client = two_versions()
    versions = client.states["q1", "a", "default"].versions
    versions[5] = pa.table({"user": pa.array([3], pa.int64()), "n": pa.array([0], pa.int64())})
    for version, users in ((4, [1, 2]), (5, [3])):
        relation = sql(client, "select a.user from a order by 1", version=version)
        assert relation.fetchall() == [(user,) for user in users] and relation.versions == {"q1": version}
    asked = len(client.scans)
    with pytest.raises(RequestError, match=r"version=5 is one of several queries here.* q1.a, q2.c"):
        sql(client, "select * from a, c", version=5)
    assert len(client.scans) == asked


def test_a_statement_sees_one_version_of_each_query() -> None:
    client = two_versions()
    relation = sql(
        client,
        "select x.n, y.n, b.n, c.n from a x join a y using (user) join b using (user) join c using (user) order by 1",
    )
    for query, name in (("q1", "a"), ("q1", "b"), ("q2", "c")):
        versions = client.states[query, name, "default"].versions
        versions[max(versions) + 1] = pa.table(
            {"user": pa.array([1, 2], pa.int64()), "n": pa.array([0, 0], pa.int64())}
        )
    assert relation.fetchall() == [(-1, -1, -5, -7), (1, 1, 5, 7)]
    assert relation.versions == {"q1": 4, "q2": 9}
    assert relation.fetchall() == [(-1, -1, -5, -7), (1, 1, 5, 7)]
    assert sql(client, "select sum(abs(n)) from b").fetchall() == [(0,)]


# -- names ---------------------------------------------------------------------------------------


def test_names_are_found_where_tables_can_be() -> None:
    statement = (
        "with c as (select 'from x', e'it\\'s from y', $$ from z $$, $t$ from w $t$ from \"My Q\" . \"a.b\".s1) -- "
        "from v\n"
        'select count(*) /* from u */ from c, Aircraft as "he said ""hi""" where c.n = 3.5 and $n = 1'
    )
    names = set(candidate_names(statement))
    assert {("My Q", "a.b", "s1"), ("c",), ("Aircraft",), ("c", "n"), ('he said "hi"',)} <= names
    assert not names & {("x",), ("y",), ("z",), ("w",), ("v",), ("u",)}


def state(query: str, operator: str, name: str, *, only: bool, query_name: str | None = None) -> CatalogTable:
    return CatalogTable(query_name, query, f"run-{query}", operator, name, ("k",), only)


def test_names_are_resolved() -> None:
    aircraft = state("q1", "aircraft", "default", only=True, query_name="flights")
    sessions, pages = (state("q1", "web", name, only=False, query_name="flights") for name in ("sessions", "pages"))
    first, second = (
        state(q, "users", "default", only=True, query_name=n) for q, n in (("q1", "flights"), ("q2", "clicks"))
    )
    upper, lower = state("q1", "X", "default", only=True), state("q1", "x", "default", only=True)
    dotted = state("q2", "a.b", "default", only=True)
    known = [aircraft, sessions, pages, first, second, upper, lower, dotted]
    for name, wanted in {
        ("aircraft",): aircraft,
        ("AIRCRAFT",): aircraft,
        ("aircraft", "default"): aircraft,
        ("flights", "aircraft"): aircraft,
        ("q1", "aircraft"): aircraft,
        ("run-q1", "aircraft", "default"): aircraft,
        ("web", "sessions"): sessions,
        ("web.pages",): pages,
        ("flights.web.pages",): pages,
        ("clicks", "users"): second,
        ("q1.users",): first,
        ("x",): lower,
        ("X",): upper,
        ("a.b",): dotted,
        ("nothing",): None,
        ("web", "nothing"): None,
    }.items():
        assert resolve(name, known) is wanted, name
    with pytest.raises(UnclearNameError, match=r"users can be any of clicks\.users, flights\.users; write which one"):
        resolve(("users",), known)
    with pytest.raises(
        UnclearNameError, match=r"web has several state variables: flights\.web\.pages, flights\.web\.sessions"
    ):
        resolve(("web",), known)


def test_windows_are_no_part_of_the_key_that_is_looked_up() -> None:
    state = {"name": "default", "kind": "rows", "key": {"user": "int64", "window": "struct<...>"}, "window": "window"}
    operator = {"query_name": None, "query_id": "q", "run_id": "r", "operator": "o", "state": [state]}
    (of,) = catalog_tables(operator)
    assert (of.key, of.has_ranges, of.is_only) == (("user",), False, True)
    timers = {"name": "timers", "kind": "timers", "key": {"user": "int64"}}
    assert [(s.key, s.has_ranges) for s in catalog_tables({**operator, "state": [timers]})] == [(("user",), False)]


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


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("select k from web.pages", [(0,)]),
        ('select k from "web.sessions"', [(1,)]),
        ("select k from clicks.users", [(2,)]),
        ("select k from Q2.Users", [(3,)]),
        ('select k from "my.q".users', [(3,)]),
        ('select k from "my.q"."odd one"', [(4,)]),
        ("select k from clicks.web.pages", [(0,)]),
        (
            "select a.k, b.k, c.k, d.k from clicks.web.pages a, clicks.users b, web.sessions c, q2.users d",
            [(0, 2, 1, 3)],
        ),
        ("select a.k, b.k from web.Pages a, Web.pages b, CLICKS.users c, clicks.users d", [(0, 0)]),
        ("with users as (select 9 as k) select k from users", [(9,)]),
        ("select web.k from web.pages as web", [(0,)]),
    ],
)
def test_tables_by_all_their_names(statement: str, rows: list[tuple[Any, ...]]) -> None:
    assert sql(several(), statement).fetchall() == rows


def test_unclear_and_unknown_names_say_what_there_is() -> None:
    with pytest.raises(
        UnknownOperatorError, match=r"users can be any of \"my\.q\"\.users, clicks\.users; write which one"
    ):
        sql(several(), "select * from users")
    with pytest.raises(
        UnknownOperatorError, match=r"web has several state variables: clicks\.web\.pages, clicks\.web\.sessions"
    ):
        sql(several(), "select * from web")
    with pytest.raises(UnknownOperatorError, match=r"(?s)planes.*Tables of running queries: q1\.aircraft, q1\.users\."):
        sql(memory(), "select * from planes")


@pytest.mark.parametrize("name", ["nothing", "nothing.users", "nothing.web.pages", "web.nothing", "clicks.web.nothing"])
def test_unknown_names_of_several_parts(name: str) -> None:
    with pytest.raises(
        UnknownOperatorError, match=r"(?s)does not exist.*Tables of running queries: .*clicks\.web\.pages"
    ):
        sql(several(), f"from {name}")


def test_only_operators_that_are_named_are_opened() -> None:
    client = several()
    sql(client, "select k from clicks.users").fetchall()
    assert {(a.query, a.operator) for a in client.asked} == {("q1", "users")}


# -- results, lifetime, errors -------------------------------------------------------------------


def test_results_in_all_forms() -> None:
    relation = sql(
        memory(),
        "select tail, seen, legs, place, fare from aircraft where flights < $limit order by flights",
        query_params={"limit": 2},
    )
    table = relation.arrow()
    assert table.schema.names == relation.columns == ["tail", "seen", "legs", "place", "fare"]
    assert table.to_pylist() == FLIGHTS.slice(0, 2).select(table.schema.names).to_pylist()
    assert list(relation.df()["tail"]) == list(relation.pl()["tail"]) == ["N1", "N2"]
    assert len(relation) == 2
    assert "N1" in repr(relation)
    assert relation.filter("fare > 0").project("tail").fetchall() == [("N2",)]
    assert sql(memory(), "select sum(n) from users where user < ?", query_params=[3]).fetchall() == [(30,)]


def test_a_result_lives_without_anything_else_being_kept() -> None:
    def made() -> Any:
        return sql(memory(), "select user from users"), sql(several(), "select k from web.pages").filter("k >= 0")

    relations = made()
    gc.collect()
    assert [len(r.fetchall()) for r in relations] == [100, 1]
    reader = sql(memory(), "select user from users").to_arrow_reader(10)
    gc.collect()
    assert reader.read_all().num_rows == 100


def test_statements_do_not_see_each_other() -> None:
    clients = [
        Memory({("q", "t", "s"): State(["k"], {1: pa.table({"k": pa.array([n], pa.int64())})})}) for n in range(8)
    ]
    found: list[Any] = [None] * 8

    def ask(n: int) -> None:
        found[n] = [sql(clients[n], "select k from t").fetchall() for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == [[[(n,)]] * 5 for n in range(8)]


@pytest.mark.parametrize("fail_after", [None, 3])
def test_errors_of_the_client_come_as_they_are(fail_after: int | None) -> None:
    client = memory(failure=QueryTimeoutError("no answer within 30 s"), fail_after=fail_after)
    with pytest.raises(QueryTimeoutError, match="no answer within 30 s"):
        sql(client, "select sum(n) from users").fetchall()
    client.failure = None
    assert sql(client, "select count(*) from users").fetchall() == [(100,)]


def test_errors_of_sql_are_duckdbs() -> None:
    with pytest.raises(duckdb.ParserException):
        sql(memory(), "select from where")
    with pytest.raises(duckdb.BinderException):
        sql(memory(), "select nothing from users")
    with pytest.raises(duckdb.CatalogException):
        sql(memory(), "select nothing(user) from users")
    with pytest.raises(duckdb.Error):
        sql(memory(), "select error('x') from users").fetchall()


def test_a_scan_that_is_left_early_is_closed() -> None:
    client = memory()
    assert len(sql(client, "from users limit 3").fetchall()) == 3
    gc.collect()
    assert all(a.rows is not None and a.rows.closed for a in client.asked)


# -- what a statement may do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "create table t as select 1",
        "insert into users values (1)",
        "drop table users",
        "copy (select 1) to '/tmp/statestore-test.csv'",
        "attach '/tmp/statestore-test.db' as t",
        "set threads = 1",
        "set enable_external_access = true",
        "install httpfs",
        "select 1; select 2",
        "",
    ],
)
def test_only_one_statement_that_reads(statement: str) -> None:
    with pytest.raises(RequestError, match="One statement that reads is possible"):
        sql(memory(), statement)


def test_what_is_explained_changes_nothing_for_later_statements() -> None:
    for change in (
        "create macro avg(x) as 42",
        "create or replace macro sum(x) as 43",
        "create table main.users as select 7 as n",
    ):
        try:
            assert sql(memory(), f"explain analyze {change}").fetchall()
        except duckdb.Error:
            continue
    assert sql(memory(), "select avg(user), sum(user) from users").fetchall() == [(49.5, 4950)]
    assert "projection" in str(sql(memory(), "explain select avg(user) from users").fetchall()).lower()


def test_no_files_and_no_python_variables() -> None:
    hidden = FLIGHTS
    assert hidden is not None
    for statement in (
        "from '/etc/passwd'",
        "from read_text('/etc/passwd')",
        "from glob('/*')",
        "from read_csv('/etc/passwd')",
    ):
        with pytest.raises((UnknownOperatorError, duckdb.Error)):
            sql(memory(), statement).fetchall()
    for statement in ("from hidden", "from tables", "from known"):
        with pytest.raises(UnknownOperatorError):
            sql(memory(), statement)


def test_a_connection_of_the_users_has_its_own_tables_too_and_keeps_nothing() -> None:
    with duckdb.connect() as connection:
        connection.execute("create table names as select 1 as user, 'Ann' as name")
        connection.register("ages", pa.table({"user": [1], "age": [33]}))
        found = sql(
            memory(),
            "select name, age, n from users join names using (user) join ages using (user)",
            connection=connection,
        )
        assert found.fetchall() == [("Ann", 33, 10)]
        assert sql(several(), 'select k from "clicks.users"', connection=connection).fetchall() == [(2,)]
        sql(memory(), "create table kept as select * from users", connection=connection)
        assert connection.sql("select count(*) from kept").fetchall() == [(100,)]
        assert sorted(connection.sql("select table_name from information_schema.tables").fetchall()) == [
            ("ages",),
            ("kept",),
            ("names",),
        ]
        with pytest.raises(duckdb.CatalogException):
            connection.sql("select * from users")


def test_without_duckdb_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(EnvironmentProblemError, match=r"ray-statestore\[sql\]"):
        sql(memory(), "select 1")


# -- size ----------------------------------------------------------------------------------------


@dataclass
class Endless(Memory):
    """A table of many rows that is made as it is read; ``alive`` counts batches that nobody has let go of."""

    total: int = 2_000
    given: int = 0
    most_alive: int = 0

    def _batches(self, table: pa.Table) -> Iterator[pa.RecordBatch]:
        before = pa.total_allocated_bytes()
        self.given = self.most_alive = 0
        for _ in range(self.total):
            self.given += 1
            yield pa.RecordBatch.from_arrays([pa.array(np.arange(16_384)) for _ in table.schema], schema=table.schema)
            self.most_alive = max(self.most_alive, pa.total_allocated_bytes() - before)


def test_a_large_scan_is_streamed() -> None:
    table = pa.table({"k": pa.array([1], pa.int64()), "v": pa.array([1], pa.int64())})
    client = Endless({("q", "t", "s"): State(["k"], {1: table})})
    assert sql(client, "select count(*), sum(v) from t where v % 16384 >= 8192").fetchall()[0][0] == 2_000 * 8_192
    # 32 million rows: half a gigabyte, if it were kept.
    assert client.most_alive < 64 << 20
    assert len(sql(client, "from t limit 10").fetchall()) == 10
    assert client.given < 400
