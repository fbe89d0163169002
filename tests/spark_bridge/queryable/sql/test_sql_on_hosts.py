"""SQL over real hosts: the rows are those of scans, whatever is pushed down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spark_bridge.exceptions import AccessDeniedError, StateVersionError, UnknownOperatorError
from spark_bridge.queryable.client.client import QueryableStateClient
from tests.effort import effort
from tests.spark_bridge.queryable.client.client_rows import NINE, ROWS, bounds, windowed
from tests.spark_bridge.queryable.client_world import Cluster, served
from tests.spark_bridge.state_flows import Flow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Users 0 to 999 with n of ten times that."""
    made = Cluster(tmp_path_factory.mktemp("sql"))
    users: dict[Any, Any] = {i: (10 * i, f"user {i}" if i % 3 else None) for i in range(1000)}
    made.batch(users)
    made.batch({7: None, None: (1, "nobody")})
    yield made
    made.close()


@pytest.fixture(scope="module", params=["direct", "forwarded"])
def client(cluster: Cluster, request: pytest.FixtureRequest) -> QueryableStateClient:
    made: QueryableStateClient = cluster.client(direct=request.param == "direct")
    return made


def test_aggregates_over_all_keys(client: QueryableStateClient) -> None:
    total = sum(10 * i for i in range(1000)) - 70 + 1
    assert client.sql("select count(*), sum(n), count(name) from totals").fetchall() == [(1000, total, 666)]
    assert client.sql("select max(n) from totals where name is null").fetchall() == [(9990,)]


@pytest.mark.parametrize(
    ("condition", "users"),
    [
        ("user = 42", [42]),
        ("user = 7", []),
        ("user in (5, 3, 99999, 3)", [3, 5]),
        ("user is null", [None]),
        ("user >= 990 and user < 993", [990, 991, 992]),
        ("user between 10 and 12", [10, 11, 12]),
        ("user <= 1 and n >= 0", [0, 1]),
        ("n = 120", [12]),
        ("name = 'user 500'", [500]),
        ("name in ('user 1', 'user 2', 'x')", [1, 2]),
        ("name like 'user 99_' and n <> 9910", [992, 994, 995, 997, 998]),
        ("user = 3 or user = 4", [3, 4]),
        ("user = 5 and n = 51", []),
    ],
)
def test_conditions(client: QueryableStateClient, condition: str, users: list[int | None]) -> None:
    found = client.sql(f"select user, n from totals where {condition} order by user").fetchall()
    assert found == [(u, 1 if u is None else 10 * u) for u in users]


def test_a_join_with_itself_sees_one_version_while_batches_go_on(tmp_path: Path) -> None:
    made = Cluster(tmp_path)
    made.batch(dict.fromkeys(range(100), (0, "0")))
    stop = threading.Event()

    def go_on() -> None:
        for n in range(1, 400):
            if stop.is_set():
                return
            made.batch({i: (n, str(n)) for i in range(100)})

    stream = threading.Thread(target=go_on)
    stream.start()
    try:
        client = made.client()
        versions = set()
        for _ in range(effort(6, 15)):
            relation = client.sql(
                "select count(distinct x.n), count(*), bool_and(x.n = y.n) from totals x join totals y using (user)"
            )
            assert relation.fetchall() == [(1, 100, True)]
            versions |= set(relation.versions.values())
        assert len(versions) > 1
    finally:
        stop.set()
        stream.join()
        made.close()


def test_processors_variables(tmp_path: Path) -> None:
    def fill(of: Any) -> None:
        of.total.update((3, "u3"))
        of.visits.appendList([("/", 1), ("/b", 2)])
        of.pages.updateValue(("/a", "x"), (1, ("text",)))
        of.pages.updateValue(("/b", "y"), (2, None))
        of.timers.registerTimer(5000)

    flow = Flow(tmp_path)
    flow.batch({("a", 1): fill, ("b", 2): lambda of: of.total.update((4, None))})
    with served(flow) as client:
        for state in ("total", "visits", "pages", "timers"):
            rows = client.scan("op", state).to_pylist()
            assert client.sql(f"from op.{state}").arrow().to_pylist() == rows
            where = "where user = 'a' and shard = 1"
            assert client.sql(f"from op.{state} {where}").arrow().to_pylist() == [r for r in rows if r["user"] == "a"]
            assert client.sql(f"from op.{state} where user = 'a'").arrow().num_rows == sum(
                r["user"] == "a" for r in rows
            )
            assert client.sql(f"from op.{state} where user >= 'b'").arrow().num_rows == sum(
                r["user"] >= "b" for r in rows
            )
            assert client.sql(f"from op.{state} where user < 'b' and shard < 3").arrow().num_rows == sum(
                r["user"] < "b" for r in rows
            )
        joined = "select v.page, t.n from op.visits v join op.total t using (user, shard) order by v.at"
        assert client.sql(joined).fetchall() == [("/", 3), ("/b", 3)]
        with pytest.raises(UnknownOperatorError, match="several state variables"):
            client.sql("from op")
    flow.close()


@pytest.mark.parametrize(
    ("order", "by"), [(("window", "user"), ("user", "window")), (("window", "user"), ()), (("user", "window"), ())]
)
def test_windows(tmp_path: Path, order: tuple[str, ...], by: tuple[str, ...]) -> None:
    query = windowed(tmp_path, order, by, ROWS)
    with served(query) as client:
        rows = {(r[0], r[1]["start"], r[2]) for r in ROWS}

        def found(where: str) -> set[Any]:
            return set(client.sql(f'select user, "window".start, n from op where {where}').fetchall())

        assert found("true") == rows
        assert found("user = 1") == {r for r in rows if r[0] == 1}
        assert found("user in (1, 2)") == rows
        assert found("user >= 2 and user < 9") == {r for r in rows if r[0] == 2}
        later = bounds(1)["start"].isoformat()
        assert found(f"\"window\".start >= '{later}'") == {r for r in rows if r[1] > NINE}
        assert found(f"user = 1 and \"window\".start = '{later}'") == {r for r in rows if r[2] == 11}
    query.close()


def test_errors_are_the_clients(cluster: Cluster) -> None:
    wrong = cluster.client(token="wrong")
    with pytest.raises(AccessDeniedError):
        wrong.sql("select 1 from totals")
    client = cluster.client()
    relation = client.sql("select count(*) from totals")
    relation._snapshot.versions["q"] = 99
    with pytest.raises(StateVersionError):
        relation.fetchall()
