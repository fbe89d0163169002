"""SQL over state, on an in-memory client: pushdown, the versions that a statement sees, and names."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import (
    EnvironmentProblemError,
    QueryTimeoutError,
    RequestError,
    RequestLimitError,
    UnknownOperatorError,
)
from spark_bridge.queryable.client.async_results import AsyncSqlRows
from spark_bridge.queryable.sql import sql as duckdb_connections
from spark_bridge.queryable.sql import statement_process
from spark_bridge.queryable.sql.sql import SqlLimits, sql
from spark_bridge.queryable.sql.statement_process import ProcessStatement
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.queryable.sql.memory_state import (
    FLIGHTS,
    Memory,
    State,
    memory,
    several,
)


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


def test_explain_does_not_change_later_statements() -> None:
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


def test_without_duckdb_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(EnvironmentProblemError, match=r"ray-statestore\[sql\]"):
        sql(memory(), "select 1")


@dataclass
class Endless(Memory):
    """A table of many rows that is made as it is read; ``alive`` counts batches that are still referenced."""

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


LARGE = "select k, count(*) from (select a.range * 1000000 + b.range k from range(30000) a, range(30000) b) group by k"
"""Needs many GiB."""
SMALL = SqlLimits(memory_bytes=128 << 20, threads=1, temp_bytes=0)


def test_statement_beyond_its_memory_fails_and_others_continue() -> None:
    client = two_versions()
    other = sql(client, "select a.user from a order by 1", limits=SMALL).to_arrow_reader(1)
    with pytest.raises(RequestLimitError, match=r"more than the 128 MiB .*SqlLimits.*sql_memory_bytes.*--sql-memory"):
        sql(client, LARGE, limits=SMALL).fetchall()
    assert other.read_all()["user"].to_pylist() == [1, 2]
    relation = sql(client, LARGE, limits=SMALL)
    with pytest.raises(RequestLimitError, match="128 MiB"):
        list(relation.record_batches()[1])
    assert sql(client, "select a.user from a order by 1", limits=SMALL).fetchall() == [(1,), (2,)]


@pytest.mark.parametrize(
    "setting", ["set memory_limit = '8GB'", "set threads = 64", "set max_temp_directory_size = '8GB'"]
)
def test_a_statement_cannot_change_its_limits(setting: str) -> None:
    with pytest.raises(RequestError, match="One statement that reads"):
        sql(two_versions(), setting)
    told = sql(
        two_versions(), "select current_setting('memory_limit') m, current_setting('threads') t", limits=SMALL
    ).fetchall()
    assert told == [("128.0 MiB", 1)]


def test_temporary_files_are_private_bounded_and_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    duckdb_connections.spill_directory.cache_clear()
    seen: set[int] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            seen.update(path.stat().st_mode & 0o777 for path in tmp_path.iterdir())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        limits = SqlLimits(memory_bytes=64 << 20, threads=1, temp_bytes=48 << 20)
        with pytest.raises(RequestLimitError, match="64 MiB of memory and 48 MiB of temporary files"):
            sql(two_versions(), LARGE, limits=limits).fetchall()
        enough = SqlLimits(memory_bytes=64 << 20, threads=1, temp_bytes=1 << 30)
        rows = sql(
            two_versions(), "select hash(range) h from range(8000000) order by h limit 9000000", limits=enough
        ).arrow()
        assert rows.num_rows == 8_000_000
    finally:
        ended.set()
        watching.join()
        duckdb_connections.spill_directory.cache_clear()
        duckdb_connections._idle.clear()
    assert seen == {0o700}
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_database_is_reused_only_after_its_statement_is_released() -> None:
    client = two_versions()
    duckdb_connections._idle.clear()
    first = sql(client, "select a.user from a order by 1", limits=SMALL)
    second = sql(client, "select a.user from a order by 1", limits=SMALL)
    assert first._database is not None and second._database is not None
    assert first._database._database is not second._database._database
    made = first._database._database
    del first
    gc.collect()
    third = sql(client, "select a.user from a order by 1", limits=SMALL)
    assert third._database is not None and third._database._database is made
    assert third.fetchall() == second.fetchall() == [(1,), (2,)]


# -- in a child process ------------------------------------------------------------------------------


def rows_of(client: Any, statement: str, **given: Any) -> list[dict[str, Any]]:
    with closing(ProcessStatement(client, statement, **given)) as answer:
        schema, batches = answer.record_batches()
        return pa.Table.from_batches(batches, schema).to_pylist()


@pytest.mark.parametrize("fail_after", [None, 0, 3])
def test_failing_scan_raises_instead_of_truncating(fail_after: int | None) -> None:
    client = memory(failure=QueryTimeoutError("no answer within 30 s"), fail_after=fail_after)
    for statement in ("select sum(n) from users", "from users"):
        with pytest.raises(QueryTimeoutError, match="no answer within 30 s"):
            rows_of(client, statement)
    client.failure = None
    assert rows_of(client, "select count(*) n from users") == [{"n": 100}]


def test_values_of_all_types_and_parameters_reach_a_process_and_come_back() -> None:
    rows = rows_of(memory(), "select * from aircraft order by flights")
    assert repr(rows) == repr(FLIGHTS.sort_by("flights").to_pylist())  # NaN equals nothing
    sent = {"a": [{"b": "é"}, None], "n": 2**62}
    assert rows_of(memory(), "select $n n, $a[1].b b", query_params=sent) == [{"n": 2**62, "b": "é"}]
    assert rows_of(memory(), "select 'x'::enum('x', 'y') e from users limit 2") == [{"e": "x"}] * 2
    with pytest.raises(RequestError, match="JSON values"):
        rows_of(memory(), "select ?", query_params=[b"bytes"])


def test_a_process_reads_one_version_of_each_query() -> None:
    client = two_versions()
    with closing(ProcessStatement(client, "select x.n from a x join a y using (user) join b using (user)")) as answer:
        list(answer.record_batches()[1])
        assert answer.versions == {"q1": 4}
    assert {asked.version for asked in client.scans} == {None, 4} or {asked.version for asked in client.scans} == {4}


def test_process_is_reused_and_replaced_after_its_end() -> None:
    statement_process.end_idle_processes()
    pids = []
    for statement in ("select 1", "select nothing", "select 2", "select sum(range) from range(1000000000000)"):
        answer = ProcessStatement(memory(), statement)
        pids.append(answer._process.popen.pid)
        with closing(answer), ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda answer=answer: list(answer.record_batches()[1]))
            if "range" in statement:
                eventually(lambda answer=answer: answer._is_sent)
                answer.end(QueryTimeoutError("too long"))
                with pytest.raises(QueryTimeoutError, match="too long"):
                    asked.result(PATIENCE)
            asked.exception(PATIENCE)
    assert len(set(pids)) == 1
    eventually(lambda: not is_there(pids[0]))
    assert rows_of(memory(), "select 3 as n") == [{"n": 3}]
    assert len(statement_process._idle) == 1


class HeldStart:
    """The start of a statement that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.made: list[ProcessStatement] = []

    def begin(self) -> ProcessStatement:
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE)
        self.made.append(ProcessStatement(memory(), "select 1 as n"))
        return self.made[0]


@pytest.mark.parametrize("ends_first", [True, False])
def test_a_process_is_given_back_though_its_caller_left_before_the_answer_began(ends_first: bool) -> None:
    """``ends_first``: the statement is ended before it has its process; else it begins after its caller has left."""
    start = HeldStart()

    async def leave() -> None:
        rows = AsyncSqlRows(start.begin)

        async def wait() -> None:
            await rows

        caller = asyncio.ensure_future(wait())
        await asyncio.to_thread(start.begun.wait, PATIENCE)
        caller.cancel()
        if ends_first:
            ending = asyncio.ensure_future(rows.aclose())
            await asyncio.sleep(0)
            start.may_go_on.set()
            await ending
        else:
            start.may_go_on.set()
            pending = rows._calls._pending
            assert pending is not None
            await asyncio.wait([pending])
            await rows.aclose()

    statement_process.end_idle_processes()
    asyncio.run(leave())
    process = start.made[0]._process
    assert process in statement_process._idle or process.popen.wait(10.0) is not None


def test_a_process_is_given_back_though_another_task_still_waits_for_its_answer() -> None:
    """As in the HTTP service: the request that left is cancelled, and not the task in which it waits for the answer."""
    start = HeldStart()

    async def leave() -> None:
        rows = AsyncSqlRows(start.begin)

        async def wait() -> None:
            await rows

        waits = asyncio.ensure_future(wait())
        await asyncio.to_thread(start.begun.wait, PATIENCE)
        ending = asyncio.ensure_future(rows.aclose())
        await asyncio.sleep(0)
        start.may_go_on.set()
        await ending
        with pytest.raises(RequestError, match="ended before it began"):
            await waits

    statement_process.end_idle_processes()
    asyncio.run(leave())
    process = start.made[0]._process
    assert process in statement_process._idle or process.popen.wait(10.0) is not None


def test_processes_end_with_the_program_also_if_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, threading\n"
        "from spark_bridge.queryable.sql.statement_process import ProcessStatement\n"
        "from tests.spark_bridge.queryable.memory_reads import eventually\n"
        "from tests.spark_bridge.queryable.sql.memory_state import memory\n"
        "idle = ProcessStatement(memory(), 'select 1')\n"
        "list(idle.record_batches()[1])\n"
        "first = idle._process.popen.pid\n"
        "busy = ProcessStatement(memory(), 'select sum(range) from range(1000000000000)')\n"
        "idle.close()\n"
        "threading.Thread(target=busy.record_batches, daemon=True).start()\n"
        "eventually(lambda: busy._is_sent)\n"
        "print(first, busy._process.popen.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    for is_killed in (True, False):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        ) as parent:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2 and all(map(is_there, pids))
            if is_killed:
                parent.kill()
        eventually(lambda pids=pids: not any(map(is_there, pids)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def test_a_row_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = SqlLimits(memory_bytes=1 << 30, threads=1, temp_bytes=0)
    with pytest.raises(RequestLimitError, match=r"A row of the answer has 76 MiB; at most 64 MiB"):
        rows_of(memory(), "select repeat('x', 80000000) as x", limits=large)
    with closing(ProcessStatement(memory(), "select repeat('x', 1000000) x from range(20)", limits=large)) as answer:
        sizes = [batch.nbytes for batch in answer.record_batches()[1]]
    assert sum(sizes) > 20_000_000 and max(sizes) <= statement_process.PIECE_BYTES


@pytest.mark.parametrize("wrong", [{"memory_bytes": 1000}, {"threads": 0}, {"temp_bytes": -1}, {"threads": 1.5}])
def test_invalid_limits_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=next(iter(wrong))):
        SqlLimits(**wrong)
