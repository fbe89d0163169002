"""State on the page, of real hosts and of a checkpoint: keys, versions, scans, SQL, CSV, hottest keys, watches."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from coordinator_actor.feature_views import Feature, FeatureView
from spark_bridge.exceptions import RequestError
from spark_bridge.queryable.sql.sql import SqlLimits
from spark_bridge.ui.live import StoredSystem
from spark_bridge.ui.lookups import parsed, text_of
from spark_bridge.ui.requests import form_token, tables_of
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import go_back
from tests.spark_bridge.state_data.format_fixtures import Stored
from tests.spark_bridge.ui.browser import served_page
from tests.spark_bridge.ui.conftest import Look
from tests.spark_bridge.ui.systems import ACT, HOSTILE, LOOK, Forms, Served, Tokens, served

pytestmark = pytest.mark.in_turns("hosts", "storage")

TABLE = "q/totals/default"


def stored(hosts: Served) -> StoredSystem:
    """The same state, as storage has it."""
    return StoredSystem(str(hosts.cluster.world.root / "ck"), open_storage=hosts.cluster.world.storage)


@pytest.fixture(params=["hosts", "storage"])
def page(request: pytest.FixtureRequest, hosts: Served, look: Look) -> TestClient:
    return look(hosts.system if request.param == "hosts" else stored(hosts))


def cells(text: str) -> list[str]:
    return [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text, re.DOTALL)]


def run(page: TestClient, statement: str, path: str = "/sql", **fields: str) -> Any:
    return page.post(path, data={"statement": statement, "form_token": form_token(ACT), **fields})


# -- keys --------------------------------------------------------------------------------------


def test_a_key_has_inputs_of_its_types_and_a_value(page: TestClient) -> None:
    text = page.get("/keys", params={"table": TABLE, "key.user": "5"}).text
    assert 'inputmode="decimal" value="5"' in text and "int64" in text
    assert cells(text) == ["5", "7", "user 5"] and "Version 3" in text
    assert "The key has nothing" in page.get("/keys", params={"table": TABLE, "key.user": "5000"}).text
    assert "The key has nothing" in page.get("/keys", params={"table": TABLE, "null.user": "1"}).text


def test_versions_of_a_key_are_shown_side_by_side(page: TestClient) -> None:
    text = page.get("/keys", params={"table": TABLE, "key.user": "5", "versions": "1, 2 3"}).text
    assert cells(text) == ["5", "5", "5", "5", "6", "7", "user 5", "user 5", "user 5"]
    assert text.count('class="changed"') == 1 and "version 2" in text
    gone = page.get("/keys", params={"table": TABLE, "key.user": "5", "versions": "99"})
    assert gone.status_code == 400 and "99" in gone.text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"key.user": "five"}, "Key column &#39;user&#39;: &#39;five&#39; is no int64"),
        ({"key.user": ""}, "has no value"),
        ({"key.user": str(2**63)}, "is no int64"),
        ({"key.user": "1", "versions": "1,2,3,4,5,6,7"}, "give up to 6 numbers"),
        ({"key.user": "1", "versions": "-1"}, "give up to 6 numbers"),
    ],
)
def test_invalid_key_is_rejected(given: dict[str, str], why: str, page: TestClient) -> None:
    answer = page.get("/keys", params={"table": TABLE, **given})
    assert answer.status_code == 400 and why in answer.text


# -- scans -------------------------------------------------------------------------------------


def test_a_scan_with_filters(page: TestClient) -> None:
    filters = {"column0": "n", "is0": ">=", "value0": "199", "column1": "name", "is1": "!=", "value1": "user 0"}
    text = page.get("/scan", params={"table": TABLE, "limit": "50", **filters}).text
    assert cells(text) == ["199", "199", "user 199"]
    assert "1 rows at version 3" in text and 'class="bars"' in text
    some = page.get("/scan", params={"table": TABLE, "limit": "7", "column0": "user", "is0": "in", "value0": "1, 2,3"})
    assert sorted(cells(some.text)[::3]) == ["1", "2", "3"]
    assert "and there are more" in page.get("/scan", params={"table": TABLE, "limit": "7"}).text
    earlier = page.get("/scan", params={"table": TABLE, "limit": "9", "version": "1", "column0": "user", "value0": "5"})
    assert cells(earlier.text) == ["5", "5", "user 5"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"column0": "nothing"},
        {"column0": "n", "is0": "like", "value0": "1"},
        {"column0": "n", "is0": "=", "value0": "many"},
        {"limit": "1001"},
        {"limit": "-1"},
        {"version": "x"},
        {"version": "77"},
    ],
)
def test_invalid_scan_is_rejected(wrong: dict[str, str], page: TestClient) -> None:
    answer = page.get("/scan", params={"table": TABLE, "limit": "5", **wrong})
    assert answer.status_code == 400 and 'role="alert"' in answer.text and "<td" not in answer.text


def test_all_rows_as_csv(page: TestClient) -> None:
    answer = page.get("/scan.csv", params={"table": TABLE, "column0": "n", "is0": "<", "value0": "50"})
    assert answer.headers["content-disposition"] == 'attachment; filename="scan.csv"'
    assert answer.headers["content-type"].startswith("text/csv")
    head, *rows = csv.reader(io.StringIO(answer.text))
    assert head == ["user", "n", "name"]
    expected = [i for i in range(200) if (i + 2 if i < 10 else i + 1 if i < 100 else i) < 50]
    assert sorted(int(row[0]) for row in rows) == expected


# -- SQL ---------------------------------------------------------------------------------------


def test_a_statement_gives_rows_and_a_chart(page: TestClient) -> None:
    text = run(page, "select user % 2 as odd, sum(n) as visits from totals group by 1 order by 1").text
    assert cells(text) == ["0", "9955", "1", "10055"]
    assert "visits by odd" in text
    assert "odd by n" in run(page, "select user % 2 as odd, n from totals", x="n", y="odd").text


def test_a_statement_as_csv(page: TestClient) -> None:
    answer = run(page, "select '=1+1' as formula, null as nothing, user from totals where user = 3", "/sql.csv")
    assert list(csv.reader(io.StringIO(answer.text))) == [["formula", "nothing", "user"], ["'=1+1", "", "3"]]


def test_csv_has_whole_values_that_the_page_cuts(page: TestClient) -> None:
    statement = "select list(user order by user) as users, repeat('ab', 400)::blob as bytes from totals"
    rows = list(csv.reader(io.StringIO(run(page, statement, "/sql.csv").text)))
    assert rows[1:] == [[str(list(range(200))), "0x" + "6162" * 400]]
    shown = [html.unescape(cell) for cell in cells(run(page, statement).text)]
    assert [text.partition("…")[2] for text in shown] == [" (890 characters)", " (1,602 characters)"]


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("drop table totals", "One statement that reads is possible"),
        ("select 1; select 2", "One statement that reads is possible"),
        ("select * from nothing", "nothing"),
        ("selec", "selec"),
        ("select * from read_csv('/etc/passwd')", ""),
    ],
)
def test_invalid_statement_is_rejected(statement: str, why: str, page: TestClient) -> None:
    for path in ("/sql", "/sql.csv"):
        answer = run(page, statement, path)
        assert answer.status_code == 400 and why in answer.text and "root:" not in answer.text


def test_endless_statement_times_out(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "select sum(a.range * b.range) from range(1000000) a, range(1000000) b"
    with monkeypatch.context() as changed:
        changed.setattr("spark_bridge.ui.state_pages.SQL_SECONDS", 0.2)
        answer = run(page, endless)
    assert answer.status_code == 400 and "was not done after" in answer.text
    assert run(page, "select 1").status_code == 200


def test_statement_beyond_its_memory_fails_with_the_reason(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.ui.state_pages.PAGE_SQL", SqlLimits(256 << 20, threads=1, temp_bytes=0))
    large = "select a.range * 1000000 + b.range k, count(*) n from range(30000) a, range(30000) b group by all"
    for path in ("/sql", "/sql.csv"):
        answer = run(page, large, path)
        assert answer.status_code == 400 and "64 MiB" in answer.text and "--sql-memory" in answer.text
    assert run(page, "select 1").status_code == 200


def test_an_answer_that_is_too_large_for_a_page_is_refused(page: TestClient) -> None:
    for path in ("/sql", "/sql.csv"):
        answer = run(page, "select repeat('x', 100000) x from range(1000)", path)
        assert answer.status_code == 400 and "more than 64 MiB" in answer.text
        assert run(page, "select repeat('x', 1000) x from range(1000)", path).status_code == 200


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_values_are_escaped(text: str, page: TestClient) -> None:
    quoted = text.replace("'", "''").replace("\x00", "")
    shown = run(page, f"select '{quoted}' as \"{quoted[:50].replace(chr(34), '')}\", 1 as n")
    assert shown.status_code == 200 and Forms(shown.text).suspect == []
    assert (
        html.escape(quoted[:40].replace("''", "'")).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in shown.text
    )
    for path, given in (
        ("/keys", {"key.user": text, "versions": text}),
        ("/scan", {"limit": "5", "column0": "name", "value0": text, "x": text, "y": text}),
        ("/scan", {"limit": text, "column0": text}),
    ):
        answer = page.get(path, params={"table": TABLE, **given})
        assert answer.status_code in (200, 400) and Forms(answer.text).suspect == []


# -- hottest keys, and the watch ---------------------------------------------------------------


def test_the_hottest_keys_are_those_of_most_changes(page: TestClient) -> None:
    text = page.get("/operator/hottest", params={"table": TABLE}).text
    counts = [cell for cell in cells(text) if "look up" not in cell]
    assert counts[1:20:2] == ["3"] * 10 and {int(key) for key in counts[0:20:2]} == set(range(10))
    assert "310 changes of 200 keys" in text
    link = re.findall(r'href="(/keys\?[^"]*)"', text)[0]
    assert "Version 3" in page.get(html.unescape(link)).text


def events(address: str, path: str, token: str, ready: threading.Event) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events that the page sends. ``ready`` is set once it watches."""
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.stream("GET", address + path, headers=headers, timeout=PATIENCE) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream"), answer.read()
        name = ""
        for line in answer.iter_lines():
            if line.startswith(":"):
                ready.set()
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


def test_watched_key_shows_each_version_that_changed_it(tmp_path: Path) -> None:
    made = served(tmp_path)
    made.cluster.batch({1: (1, "a"), 2: (1, "b")})
    tokens = Tokens()
    try:
        with served_page(made.system, tokens) as address:
            got = events(address, f"/watch?table={TABLE}&key.user=1", LOOK, ready := threading.Event())
            told: list[Any] = []

            def read() -> None:
                told.extend(event for event in got)

            reading = threading.Thread(target=read, daemon=True)
            reading.start()
            assert ready.wait(PATIENCE)
            version = 1
            while not told:  # the watch begins with the version that is completed when it asks
                version = made.cluster.batch({1: (version + 1, "a"), 2: (5, "b")})
            name, first = told[0]
            assert (
                name == "change" and first["rows"][0]["change"] == "update" and "name: a" in first["rows"][0]["after"]
            )
            tokens.revoked.add(LOOK)
            deadline = time.monotonic() + PATIENCE
            while reading.is_alive():
                assert time.monotonic() < deadline, "the watch continues without a token"
                made.cluster.batch({1: (99 + made.cluster.version, "a")})
                reading.join(0.05)
            assert told[-1] == ("problem", {"problem": "The token is unknown."})
            wrong = httpx.get(f"{address}/watch?table={TABLE}&key.user=x", headers={"Authorization": f"Bearer {ACT}"})
            assert wrong.status_code == 400 and "is no int64" in wrong.text
    finally:
        made.cluster.close()


def test_watch_that_a_browser_resumes_after_a_rollback_says_so(tmp_path: Path) -> None:
    made = served(tmp_path)
    made.cluster.batch({1: (1, "a")})
    made.cluster.batch({1: (2, "a")})
    headers = {"Authorization": f"Bearer {LOOK}"}

    def told(address: str, last: str) -> dict[str, str]:
        """The fields of the first event after a reconnect."""
        asked = {**headers, "Last-Event-ID": last}
        with httpx.stream(
            "GET", f"{address}/watch?table={TABLE}&key.user=1", headers=asked, timeout=PATIENCE
        ) as answer:
            found: dict[str, str] = {}
            for line in answer.iter_lines():
                if line and not line.startswith(":"):
                    found.update([line.split(": ", 1)])
                elif found:
                    break
            return found

    try:
        with served_page(made.system, Tokens()) as address:
            seen = told(address, "1")
            assert json.loads(seen["data"])["version"] == 2
            go_back(made.cluster, 1, "run2")
            made.cluster.batch({1: (7, "other")})
            made.cluster.batch({1: (8, "other")})
            after = told(address, seen["id"])
            assert after["event"] == "problem" and "rolled back" in after["data"], after
    finally:
        made.cluster.close()


def test_watch_of_a_checkpoint_shows_completed_versions(hosts: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_bridge.state_data.checkpoint_client.WATCH_POLL_SECONDS", 0.01)
    changes = stored(hosts).client().watch("totals", [(5,)], from_version=0)
    told = [next(iterator) for iterator in [iter(changes)] for _ in range(3)]
    assert [(c.version, c.batch.column("change_type").to_pylist()) for c in told] == [
        (1, ["insert"]),
        (2, ["update"]),
        (3, ["update"]),
    ]
    changes.close()
    assert list(changes) == []


# -- savepoints --------------------------------------------------------------------------------


def test_progress_of_a_savepoint_is_read_before_the_list(tmp_path: Path, look: Look) -> None:
    """Otherwise one that is completed in between is shown as made, and is not in the list."""
    made = served(tmp_path)
    calls: list[str] = []

    def noted(name: str) -> Any:
        call = getattr(made.system, name)

        def note(*args: Any) -> Any:
            calls.append(name)
            return call(*args)

        return note

    try:
        made.cluster.batch({1: (1, "a")})
        for name in ("savepoints", "savepoint_status"):
            setattr(made.system, name, noted(name))
        look(made.system).get("/savepoints?request=unknown")
        assert calls == ["savepoint_status", "savepoints"]
    finally:
        made.cluster.close()


def test_a_savepoint_is_made_listed_described_and_checked(tmp_path: Path, look: Look) -> None:
    made = served(tmp_path)
    try:
        made.cluster.batch({i: (i, "a") for i in range(20)})
        page = look(made.system)
        assert "There is no savepoint" in page.get("/savepoints").text
        answer = page.post("/savepoints", data={"query": "run1", "form_token": form_token(ACT)}, follow_redirects=False)
        assert answer.status_code == 303
        while "is being made" in (text := page.get(answer.headers["location"]).text):
            for h in made.cluster.hosts:
                h.host.heartbeat()
            made.cluster.c.maintain()
        assert "The savepoint is made" in text
        (link,) = re.findall(r'href="(/savepoint\?[^"]*)"', text)
        described = page.get(html.unescape(link)).text
        assert '<td class="n">20</td>' in described and "Check every file" in described
        fields = {**Forms(described.partition("<h2>Contents</h2>")[2]).hidden}
        assert "Every file is present" in page.post("/savepoint", data=fields).text
        file = next((tmp_path / "ck").rglob("savepoint-*/operators/**/*.parquet"))
        file.write_bytes(b"damaged")
        broken = page.post("/savepoint", data=fields)
        assert broken.status_code == 400 and file.name in html.unescape(broken.text)
        others = look(made.system, LOOK)
        assert others.get("/savepoints?directory=/etc").status_code == 400
        assert others.get(html.unescape(link)).status_code == 200
        for name in ("../secret", "..", ""):
            assert page.get("/savepoint", params={"query": "q", "name": name}).status_code == 400
    finally:
        made.cluster.close()


# -- a checkpoint of an earlier release, and typed values --------------------------------------


def test_every_state_variable_of_a_checkpoint_can_be_looked_at(look: Look) -> None:
    system = StoredSystem(str(Stored("file").checkpoint))
    page = look(system)
    assert "Watermark" in page.get("/query").text
    tables = tables_of(system.overview())
    assert len(tables) == 12
    for table in tables:
        scanned = page.get("/scan", params={"table": table.id, "limit": "3"})
        assert scanned.status_code == 200 and "rows at version 5" in scanned.text, table.id
    windows = next(t for t in tables if t.window)
    row = next(iter(system.client().scan("windows", limit=1))).to_pylist()[0]
    text = page.get("/keys", params={"table": windows.id, "key.k": text_of(row["k"])}).text
    assert "All windows of the key" in text and "–" in "".join(cells(text))


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_a_key_of_a_checkpoint_is_found_in_its_partition_alone(backend: str) -> None:
    client = StoredSystem(str(Stored(backend).checkpoint)).client()
    all_rows = [row for batch in client.scan("totals") for row in batch.to_pylist()]
    for row in all_rows[:5]:
        found = [r for batch in client.key_rows("totals", [(row["k"], row["g"])]) for r in batch.to_pylist()]
        assert found == [row]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("-7", pa.int32()),
        ("1.5", pa.float64()),
        ("12.30", pa.decimal128(10, 2)),
        ("true", pa.bool_()),
        ("2024-03-09", pa.date32()),
        ("2024-03-09T23:00:00.000007", pa.timestamp("us", "UTC")),
        ("2024-03-09T23:00:00", pa.timestamp("us")),
        ("a / b", pa.string()),
        ("AP8=", pa.binary()),
        ("[1, 2]", pa.list_(pa.int64())),
    ],
)
def test_typed_values_round_trip(text: str, kind: pa.DataType) -> None:
    value = parsed(text, kind, "x")
    assert pa.scalar(value, kind).is_valid and parsed(text_of(value), kind, "x") == value


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", pa.int64()),
        ("1e3", pa.int64()),
        ("maybe", pa.bool_()),
        ("yesterday", pa.timestamp("us", "UTC")),
        ("{", pa.list_(pa.int64())),
        ("***", pa.binary()),
        ("1.234", pa.decimal128(10, 2)),
    ],
)
def test_invalid_typed_values_are_rejected(text: str, kind: pa.DataType) -> None:
    with pytest.raises(RequestError, match=r"^x: .* is no "):
        parsed(text, kind, "x")


# -- feature views -----------------------------------------------------------------------------


def test_feature_views_have_their_owner_bound_and_age(page: TestClient, hosts: Served) -> None:
    assert "No feature view is declared" in page.get("/features").text
    name = HOSTILE[0]
    view = FeatureView(name, "user", [Feature("n", "totals", default=0)], "fraud", "What <b>we</b> know.", "3 days")
    hosts.cluster.c.declare_view(hosts.cluster.run, view)
    try:
        text = page.get("/features").text
        assert "What &lt;b&gt;we&lt;/b&gt; know." in text and "<b>" not in text
        assert name not in text and html.escape(name)[:20] in text
        assert "<dd>fraud</dd>" in text and "<dd>3 days old, then an error</dd>" in text
        assert re.search(r"<dt>Age</dt><dd>\d+\.\d s</dd>", text)
        assert cells(text)[:4] == ["totals", "n", "int64", "0"]
    finally:
        hosts.cluster.c.drop_view(hosts.cluster.run, name)
