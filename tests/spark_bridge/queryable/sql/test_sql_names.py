"""Names of operators and state variables in a statement."""

from __future__ import annotations

from typing import Any

import pytest

from spark_bridge.exceptions import UnknownOperatorError
from spark_bridge.queryable.sql.catalog import UnclearNameError, candidate_names, catalog_tables, resolve
from spark_bridge.queryable.sql.sql import sql
from tests.spark_bridge.queryable.sql.memory_state import (
    memory,
    several,
    state,
)


def test_names_are_found_where_tables_can_be() -> None:
    statement = (
        "with c as (select 'from x', e'it\\'s from y', $$ from z $$, $t$ from w $t$ from \"My Q\" . \"a.b\".s1) -- "
        "from v\n"
        'select count(*) /* from u */ from c, Aircraft as "he said ""hi""" where c.n = 3.5 and $n = 1'
    )
    names = set(candidate_names(statement))
    assert {("My Q", "a.b", "s1"), ("c",), ("Aircraft",), ("c", "n"), ('he said "hi"',)} <= names
    assert not names & {("x",), ("y",), ("z",), ("w",), ("v",), ("u",)}


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


def test_windows_are_not_part_of_a_looked_up_key() -> None:
    state = {"name": "default", "kind": "rows", "key": {"user": "int64", "window": "struct<...>"}, "window": "window"}
    operator = {"query_name": None, "query_id": "q", "run_id": "r", "operator": "o", "state": [state]}
    (of,) = catalog_tables(operator)
    assert (of.key, of.has_ranges, of.is_only) == (("user",), False, True)
    timers = {"name": "timers", "kind": "timers", "key": {"user": "int64"}}
    assert [(s.key, s.has_ranges) for s in catalog_tables({**operator, "state": [timers]})] == [(("user",), False)]


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


def test_ambiguous_and_unknown_names_list_the_candidates() -> None:
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
