"""SQL over HTTP, on real hosts: formats, limits, errors, and callers that leave."""

from __future__ import annotations

import asyncio
import csv
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from spark_bridge.queryable.client.async_client import AsyncQueryableStateClient
from spark_bridge.queryable.sql import statement_process
from spark_bridge.state_http.access import HttpLimits
from spark_bridge.state_http.app import create_app
from spark_bridge.state_http.models import ARROW, CSV, JSON, LINES
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_http.http_state import raw
from tests.spark_bridge.state_http.memory_client import TOKEN, Tokens
from tests.spark_bridge.ui.browser import serving

USERS = 5_000
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ENDLESS = "select sum(a.range * b.range) as s from range(10000000) a, range(10000000) b"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("sql"))
    made.batch({i: (10 * i, f"user {i}" if i % 3 else "") for i in range(USERS)})
    yield made
    made.close()


def app_of(cluster: Cluster, **limits: Any) -> Any:
    made = AsyncQueryableStateClient(cluster.client())

    async def connect() -> AsyncQueryableStateClient:
        return made

    return create_app(connect, Tokens(), HttpLimits(timeout=PATIENCE, **limits))


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[TestClient]:
    app = app_of(cluster, max_sql_rows=USERS, sql_seconds=PATIENCE)
    with TestClient(app, headers=BEARER, raise_server_exceptions=False) as made:
        yield made


def test_rows_in_every_format(http: TestClient) -> None:
    asked = {"sql": 'select "user", n, name from totals where "user" <= $most order by 1', "params": {"most": 2}}
    answer = http.post("/v1/sql", json=asked)
    assert answer.headers["x-statestore-versions"] == "q=1"
    rows = [
        {"user": 0, "n": 0, "name": ""},
        {"user": 1, "n": 10, "name": "user 1"},
        {"user": 2, "n": 20, "name": "user 2"},
    ]
    columns = [{"name": "user", "type": "int64"}, {"name": "n", "type": "int64"}, {"name": "name", "type": "string"}]
    assert answer.json() == {"columns": columns, "versions": {"q": 1}, "times": {}, "rows": rows}
    lines = http.post("/v1/sql", json=asked, headers={"Accept": LINES})
    assert [httpx.Response(200, content=line).json() for line in lines.text.splitlines()] == rows
    table = http.post("/v1/sql", json=asked, headers={"Accept": CSV})
    assert table.headers["content-type"].startswith(CSV)
    assert table.text.splitlines() == ['"user","n","name"', '0,0,""', '1,10,"user 1"', '2,20,"user 2"']
    arrow = http.post("/v1/sql", json=asked, headers={"Accept": f"text/html, {ARROW};q=0.5"})
    with pa.ipc.open_stream(arrow.content) as reader:
        assert reader.read_all().to_pylist() == rows


def test_an_answer_without_rows_is_complete(http: TestClient) -> None:
    asked = {"sql": "select n from totals where n < 0"}
    assert http.post("/v1/sql", json=asked).json()["rows"] == []
    assert http.post("/v1/sql", json=asked, headers={"Accept": CSV}).text == '"n"\n'
    none = http.post("/v1/sql", json={"sql": "from totals", "limit": 0})
    assert none.json()["rows"] == []


def test_columns_of_one_name_are_told_apart(http: TestClient) -> None:
    asked = {"sql": "select 1 as a, 2 as A, 3 as b, 4 as a"}
    names = ["a", "A__value", "b", "a__value__value"]
    answer = http.post("/v1/sql", json=asked).json()
    assert [column["name"] for column in answer["columns"]] == names
    assert answer["rows"] == [dict(zip(names, range(1, 5), strict=True))]
    assert http.post("/v1/sql", json=asked, headers={"Accept": LINES}).json() == answer["rows"][0]
    for sql in (asked["sql"], f"{asked['sql']} where false"):
        table = http.post("/v1/sql", json={"sql": sql}, headers={"Accept": CSV})
        assert table.text.splitlines()[0] == ",".join(f'"{name}"' for name in names)


def test_times_of_day_and_empty_maps(http: TestClient) -> None:
    asked = {"sql": "select time '23:00:00.5' as at, [time '01:02:03'] as times, map([], [])::map(text, int) as m"}
    row = {"at": "23:00:00.500000", "times": ["01:02:03"], "m": {}}
    assert http.post("/v1/sql", json=asked).json()["rows"] == [row]
    assert http.post("/v1/sql", json=asked, headers={"Accept": LINES}).json() == row
    answer = http.post("/v1/sql", json=asked, headers={"Accept": CSV})
    assert list(csv.DictReader(io.StringIO(answer.text))) == [row | {"times": '["01:02:03"]', "m": "{}"}]


def test_csv_of_every_kind_of_value(http: TestClient) -> None:
    sql = (
        "select null::int as a, 1.5::double as b, 'nan'::double as c, [1, null] as d, 'x\"y' as e, "
        "date '2024-03-09' as f, true as g"
    )
    answer = http.post("/v1/sql", json={"sql": sql}, headers={"Accept": CSV})
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert row == {"a": "", "b": "1.5", "c": "NaN", "d": "[1,null]", "e": 'x"y', "f": "2024-03-09", "g": "true"}


def test_all_rows_come_in_pieces(http: TestClient) -> None:
    answer = http.post("/v1/sql", json={"sql": "from totals"})
    assert sorted(row["user"] for row in answer.json()["rows"]) == list(range(USERS))
    some = http.post("/v1/sql", json={"sql": "from totals", "limit": 4_500})
    assert len(some.json()["rows"]) == 4_500


@pytest.mark.parametrize(
    ("body", "status", "error", "says"),
    [
        ({"sql": "select * from nothing"}, 404, "UnknownOperatorError", "totals"),
        ({"sql": "selekt 1"}, 400, "RequestError", "syntax"),
        ({"sql": "select cast('x' || n as int) as x from totals"}, 400, "RequestError", "INT32"),
        ({"sql": "create table a as select 1"}, 400, "RequestError", "CREATE"),
        ({"sql": "select * from read_csv('/etc/passwd')"}, 400, "RequestError", "disabled"),
        ({"sql": "from totals", "version": 99}, 409, "StateVersionError", "99"),
        ({"sql": "from totals", "limit": USERS + 1}, 413, "RequestLimitError", "limit"),
        ({"sql": "select ?", "params": {"a": 1}}, 400, "RequestError", ""),
        ({"sql": ""}, 400, "RequestError", "sql"),
        ({"sql": "from totals", "rows": 1}, 400, "RequestError", "rows"),
    ],
)
def test_what_cannot_be_is_refused(http: TestClient, body: dict[str, Any], status: int, error: str, says: str) -> None:
    answer = http.post("/v1/sql", json=body)
    assert (answer.status_code, answer.json().get("error")) == (status, error), answer.text
    assert says in answer.json()["detail"]


def test_a_format_that_is_not_there_is_refused_with_those_that_are(http: TestClient) -> None:
    answer = http.post("/v1/sql", json={"sql": "select 1"}, headers={"Accept": "application/xml"})
    assert answer.status_code == 400 and CSV in answer.json()["detail"]
    assert http.post("/v1/sql", json={"sql": "select 1"}, headers={"Accept": "*/*"}).headers["content-type"] == JSON


def test_no_token_no_answer(http: TestClient) -> None:
    assert http.post("/v1/sql", json={"sql": "select 1"}, headers={"Authorization": "Bearer x"}).status_code == 401


def test_more_rows_than_allowed_cut_the_answer_and_say_so(cluster: Cluster) -> None:
    with serving(app_of(cluster, max_sql_rows=USERS - 1)) as address, httpx.Client(timeout=PATIENCE) as client:
        pieces: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: SIM117 - the end is what is raised
            with client.stream("POST", f"{address}/v1/sql", json={"sql": "from totals"}, headers=BEARER) as answer:
                pieces.extend(answer.iter_text())
    problem = httpx.Response(200, text="".join(pieces)).json()["problem"]
    assert (problem["status"], problem["error"]) == (413, "RequestLimitError")


def test_a_statement_ends_after_its_time(cluster: Cluster) -> None:
    with TestClient(app_of(cluster, sql_seconds=3, max_sql=1), headers=BEARER) as http:
        answer = http.post("/v1/sql", json={"sql": ENDLESS})
        assert (answer.status_code, answer.json()["error"]) == (504, "QueryTimeoutError")
        eventually(lambda: not working())
        # Another process starts, which may take longer than a statement may: then some statements end first.
        eventually(lambda: http.post("/v1/sql", json={"sql": "select 1 as a"}).status_code == 200)


def test_a_statement_beyond_its_memory_is_413_and_others_continue(cluster: Cluster) -> None:
    groups = "from range(30000) a, range(30000) b group by all"
    large = f"select a.range * 1000000 + b.range k, count(*) n {groups}"
    with TestClient(app_of(cluster, sql_memory_bytes=128 << 20, sql_threads=1), headers=BEARER) as http:
        for _ in range(3):
            answer = http.post("/v1/sql", json={"sql": large})
            assert (answer.status_code, answer.json()["error"]) == (413, "RequestLimitError")
            assert "64 MiB" in answer.json()["detail"] and "sql_memory_bytes" in answer.json()["detail"]
        told = http.post("/v1/sql", json={"sql": "select count(*) n from totals"})
        assert told.json()["rows"] == [{"n": USERS}]


IN_ONE_CALL = [
    "SELECT length(repeat('x', 1000000000))",
    "SELECT length(repeat('x', 4000000000))",
    "SELECT list_sum(range(1000000000))",
    "SELECT md5(repeat('x', 900000000)) FROM totals LIMIT 1",
]
"""Statements of gigabytes that DuckDB's own limit does not stop."""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
@pytest.mark.parametrize("statement", IN_ONE_CALL)
def test_values_of_one_call_end_the_statement_and_not_this_process(cluster: Cluster, statement: str) -> None:
    with TestClient(app_of(cluster, sql_memory_bytes=128 << 20, sql_seconds=PATIENCE), headers=BEARER) as http:
        http.post("/v1/sql", json={"sql": "select 1"})
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
        before = memory_of_this_process("VmRSS")
        answer = http.post("/v1/sql", json={"sql": statement})
        assert (answer.status_code, answer.json()["error"]) == (413, "RequestLimitError")
        assert "64 MiB" in answer.json()["detail"] and "sql_memory_bytes" in answer.json()["detail"]
        assert memory_of_this_process("VmHWM") - before < 64 << 20
        told = http.post("/v1/sql", json={"sql": "select count(*) n from totals"})
        assert told.json()["rows"] == [{"n": USERS}]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_the_remedy_of_a_statement_beyond_its_memory_works(cluster: Cluster) -> None:
    statement = "SELECT length(repeat('x', 300000000)) n"
    with TestClient(app_of(cluster, sql_memory_bytes=128 << 20, sql_seconds=PATIENCE), headers=BEARER) as http:
        answer = http.post("/v1/sql", json={"sql": statement})
        assert answer.status_code == 413 and "have the limit raised: " in answer.json()["detail"]
        less = http.post("/v1/sql", json={"sql": statement.replace("300000000", "3000000")})
        assert less.json()["rows"] == [{"n": 3_000_000}]
    with TestClient(app_of(cluster, sql_memory_bytes=2 << 30, sql_seconds=PATIENCE), headers=BEARER) as http:
        assert http.post("/v1/sql", json={"sql": statement}).json()["rows"] == [{"n": 300_000_000}]


def test_the_remedies_of_other_limits_of_statements_work(cluster: Cluster) -> None:
    with TestClient(app_of(cluster, max_sql_rows=10, sql_seconds=PATIENCE), headers=BEARER) as http:

        def ask(**body: Any) -> httpx.Response:
            return http.post("/v1/sql", json=body)

        assert "more than the 10 rows" in ask(sql="from totals", limit=11).json()["detail"]
        pieces, ended = raw(http.app, "POST", "/v1/sql", b'{"sql": "from totals"}')
        assert not ended and b"ask for fewer, or say limit" in b"".join(pieces)
        for remedied in ({"sql": "from totals", "limit": 10}, {"sql": "from totals limit 10"}):
            assert len(ask(**remedied).json()["rows"]) == 10
        assert "One statement that reads" in ask(sql="select 1; select 2").json()["detail"]
        assert ask(sql="select 1 as a").json()["rows"] == [{"a": 1}]
        assert "application/json" in http.post("/v1/sql", json={"sql": "select 1"}, headers={"Accept": "a/b"}).text
    slow = f"{ENDLESS} where a.range in (select n from totals)"
    with TestClient(app_of(cluster, sql_seconds=3.0), headers=BEARER) as http:
        ask(sql="select 1")
        assert "by conditions on the key columns" in ask(sql=slow).json()["detail"]
        answered = {"sql": 'select count(*) n from totals where "user" = 7'}
        eventually(lambda: http.post("/v1/sql", json=answered).status_code == 200)


def test_statements_at_once_do_not_end_each_other(cluster: Cluster) -> None:
    wrong, right = "SELECT list_sum(range(1000000000))", "select count(*) n from totals"
    limits = {"sql_memory_bytes": 512 << 20, "sql_seconds": PATIENCE, "max_sql": 4}
    with serving(app_of(cluster, **limits)) as address, ThreadPoolExecutor(4) as pool:

        def answered(statement: str) -> int:
            asked = {"sql": statement}
            return httpx.post(f"{address}/v1/sql", json=asked, headers=BEARER, timeout=PATIENCE).status_code

        assert list(pool.map(answered, [wrong, right] * 4)) == [413, 200] * 4


def test_a_killed_process_is_reported_and_the_next_statement_works(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    take = statement_process._taken_process
    monkeypatch.setattr(statement_process, "_taken_process", lambda: taken.append(take()) or taken[-1])
    limits = {"sql_seconds": 10 * PATIENCE, "max_sql": 1}
    with serving(app_of(cluster, **limits)) as address, ThreadPoolExecutor(1) as pool:
        ask = partial(httpx.post, f"{address}/v1/sql", headers=BEARER, timeout=PATIENCE)
        asked = pool.submit(ask, json={"sql": ENDLESS})
        eventually(lambda: taken)
        os.kill(taken[0].popen.pid, signal.SIGKILL)
        answer = asked.result(PATIENCE)
        assert (answer.status_code, answer.json()["error"]) == (413, "RequestLimitError")
        assert "SIGKILL" in answer.json()["detail"] and "1,024 MiB" in answer.json()["detail"]
        assert ask(json={"sql": "select 1 as a"}).json()["rows"] == [{"a": 1}]


def memory_of_this_process(kind: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{kind}:")[2].split()[0]) << 10


def test_a_caller_that_disconnects_ends_the_statement_also_before_the_first_row(cluster: Cluster) -> None:
    with serving(app_of(cluster, sql_seconds=10 * PATIENCE, max_sql=1)) as address:

        async def leave() -> None:
            async with httpx.AsyncClient(timeout=PATIENCE, headers=BEARER) as client:
                asked = asyncio.ensure_future(client.post(f"{address}/v1/sql", json={"sql": ENDLESS}))
                await asyncio.to_thread(eventually, working)
                full = await client.post(f"{address}/v1/sql", json={"sql": "select 1"})
                assert (full.status_code, full.json()["error"]) == (429, "TooManyRequestsError")
                asked.cancel()

        asyncio.run(leave())
        eventually(lambda: not working())
        again = {"sql": "select 1 as a"}
        eventually(lambda: httpx.post(f"{address}/v1/sql", json=again, headers=BEARER).status_code == 200)


def working() -> bool:
    """Whether a thread works on a statement."""
    return any(thread.name == "statestore-sql" for thread in threading.enumerate())
