"""What of a statement reaches the hosts: conditions, columns, keys and ranges of keys."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import closing
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.queryable.protocol import Comparison
from spark_bridge.queryable.sql import pushdown
from spark_bridge.queryable.sql.pushdown import (
    FieldRef,
    FunctionCall,
    ScanPushdown,
    UnknownExpressionError,
    as_json,
    columns_read,
    parse_expression,
    push_down,
)
from spark_bridge.queryable.sql.sql import sql
from spark_bridge.queryable.sql.statement_process import ProcessStatement
from tests.effort import examples
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.queryable.sql.memory_state import (
    FLIGHTS,
    UTC,
    Memory,
    memory,
)

Ask = Callable[[Memory, str], list[tuple[Any, ...]]]


@pytest.fixture(params=["in this process", "in its own process"])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Run a statement, and return its rows."""
    if request.param == "in this process":
        return lambda client, statement: sql(client, statement).fetchall()

    def asked(client: Memory, statement: str) -> list[tuple[Any, ...]]:
        with closing(ProcessStatement(client, statement)) as answer:
            schema, batches = answer.record_batches()
            table = pa.Table.from_batches(batches, schema)
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    return asked


def test_an_expression_can_be_taken_apart() -> None:
    tree = parse_expression((pc.field("a") > 3) & pc.field("s", "x").isin(["p", 'q"', None]))
    assert isinstance(tree, FunctionCall) and tree.function == "and_kleene"
    greater, is_in = tree.arguments
    assert isinstance(greater, FunctionCall) and greater.arguments[0] == FieldRef(("a",))
    assert isinstance(is_in, FunctionCall) and is_in.arguments == (FieldRef(("s", "x")),)
    assert is_in.options is not None and is_in.options["value_set"].as_py() == ["p", 'q"', None]
    assert columns_read(tree) == {"a", "s"}


def test_expression_of_another_form_has_its_own_error() -> None:
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


def test_values_without_a_json_form_are_not_converted() -> None:
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
def test_conditions_reach_the_hosts_and_rows_are_as_without_them(
    condition: str, where: list[Comparison], ask: Ask
) -> None:
    client = memory()
    found = ask(client, f"select tail, leg from aircraft where {condition} order by all")
    with duckdb.connect() as plain:
        plain.execute("set TimeZone = 'UTC'")
        plain.register("aircraft", FLIGHTS)
        wanted = plain.sql(f"select tail, leg from aircraft where {condition} order by all").fetchall()
    assert found == wanted
    eventually(lambda: all(a.rows is not None and a.rows.closed for a in client.asked))
    if not duckdb.__version__.startswith("1."):  # that of Python 3.10 gives others away
        assert [c for a in client.scans for c in a.where] == where


def test_only_the_columns_that_are_needed_are_fetched(ask: Ask) -> None:
    client = memory()
    ask(client, "select carrier, avg(flights) from aircraft where leg = 2 group by carrier")
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
def test_keys_are_looked_up(condition: str, keys: list[dict[str, Any]], ask: Ask) -> None:
    client = memory()
    found = ask(client, f"select flights from aircraft where {condition} order by 1")
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
def test_ranges_of_keys_bound_the_scan(condition: str, bounds: object, ask: Ask) -> None:
    client = memory()
    found = ask(client, f"select user, n from users where {condition} order by 1")
    table = client.states["q1", "users", "default"].versions[7]
    assert found == [
        r
        for r in zip(*(c.to_pylist() for c in table.columns), strict=True)
        if eval(condition.replace("= 3", "== 3"), {"user": r[0]})
    ]
    (asked,) = client.scans
    assert (asked.prefix, asked.start, asked.end) == bounds if bounds != "keys" else asked.keys == [{"user": 3}]


def test_leading_columns_of_the_key_bound_the_scan(ask: Ask) -> None:
    client = memory()
    assert len(ask(client, "from aircraft where tail = 'N1'")) == 2
    assert len(ask(client, "from aircraft where tail = 'N1' and leg > 1")) == 1
    assert len(ask(client, "from aircraft where tail = 'N1' and leg >= 1 and leg < 2")) == 1
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
    monkeypatch.setattr(pushdown, "MAX_PUSHED_KEYS", 100)
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
