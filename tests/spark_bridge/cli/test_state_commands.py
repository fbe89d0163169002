"""``get``, ``scan``, ``sql``, ``watch`` and ``diff`` on checkpoints and savepoints, with neither Ray nor Spark."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from click.testing import Result
from msgspec.structs import replace

from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import write_query_id
from coordinator_actor.feature_views import Feature
from coordinator_actor.messages import RunningView
from spark_bridge.cli import cluster_commands, sources, state_commands
from spark_bridge.cli.main import app
from spark_bridge.cli.sources import bound_of, condition_of, key_of_words
from spark_bridge.exceptions import RequestError, UnknownKeyOrNamespaceError
from spark_bridge.state_data import checkpoint_client
from tests.command_line import CliRunner
from tests.spark_bridge.queryable.feature_world import VIEW, FeatureCluster
from tests.spark_bridge.state_data.format_fixtures import Stored
from tests.spark_bridge.state_flows import Flow

CHECKPOINT = str(Stored("file").checkpoint)
KEY = pa.schema([("k", pa.string()), ("g", pa.int32())])


def run(*args: str, code: int = 0, at: str = CHECKPOINT) -> Result:
    result = CliRunner().invoke(app, [*args, "--checkpoint", at])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def as_json(*args: str, code: int = 0, at: str = CHECKPOINT) -> Any:
    return json.loads(run(*args, "--json", code=code, at=at).stdout)


# -- keys and conditions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["k=a,b", "g=0"], ["g=0", "k=a,b"], ["a,b", "0"], ['"a,b",0'], ['["a,b", 0]'], ['{"g": 0, "k": "a,b"}']]
)
def test_a_key_is_written_in_several_ways(words: list[str]) -> None:
    assert key_of_words(words, KEY) == ("a,b", 0)


def test_a_key_of_one_column() -> None:
    text, number = pa.schema([("k", pa.string())]), pa.schema([("n", pa.int64())])
    assert key_of_words(["a=b"], text) == "a=b", "only the name of a column stands before its value"
    assert key_of_words(["k=b"], text) == "b"
    assert (
        key_of_words(["{7}"], text) == "{7}"
        and key_of_words(["null"], text) == "null"
        and key_of_words(["7"], text) == "7"
    )
    assert key_of_words(["7"], number) == key_of_words(["n=7"], number) == 7
    assert key_of_words(["null"], number) is None and key_of_words(["[null]"], text) is None


def test_wrong_key_error_names_the_expected_form() -> None:
    with pytest.raises(UnknownKeyOrNamespaceError, match=r"3 values were given; the key has 2 columns \(k: string"):
        key_of_words(["a", "b", "c"], KEY)
    with pytest.raises(UnknownKeyOrNamespaceError, match="Key column 'g': 'x' is no int32"):
        key_of_words(["k=a", "g=x"], KEY)


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("n > 10", ("n", ">", 10)),
        ("n<=1.5", ("n", "<=", 1.5)),
        ("k = a b", ("k", "=", "a b")),
        ('k != "7"', ("k", "!=", "7")),
        ('k in ["a", "b"]', ("k", "in", ["a", "b"])),
        ("v IS  NOT NULL", ("v", "is not null")),
        ("v is null", ("v", "is null")),
        ("within = 3", ("within", "=", 3)),
    ],
)
def test_conditions(text: str, condition: tuple[Any, ...]) -> None:
    assert condition_of(text) == condition


@pytest.mark.parametrize(("text", "why"), [("n", "is not a condition"), ("k in a", "comes a JSON array")])
def test_wrong_conditions(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        condition_of(text)


def test_bounds_are_json_or_text() -> None:
    assert [bound_of(t) for t in (None, "de", '["de", 1]', "7")] == [None, "de", ["de", 1], 7]


# -- get, scan, sql --------------------------------------------------------------------------------


def test_get() -> None:
    found = as_json("get", "totals", "k=a", "g=0")
    assert (found["operator"], found["key"], found["value"]["n"]) == ("totals", ["a", 0], 14)
    assert as_json("get", "totals", "a", "0", "--version", "2")["value"]["n"] == 6
    assert "n: 14" in run("get", "totals", "a,0").stdout
    assert len(as_json("get", "visits", "many", "--state", "seen")["value"]) > 200
    start = as_json("get", "windows", "b")["value"][0]["window"]["start"]
    assert as_json("get", "windows", "b", "--window", start)["value"]["n"] > 0


def test_no_such_key_is_exit_code_1() -> None:
    assert as_json("get", "totals", "nobody", "0", code=1)["value"] is None
    result = run("get", "totals", "nobody", "0", code=1)
    assert "has nothing for this key" in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("get", "nope", "1"), "its operators: 'firsts'"),
        (("get", "totals", "a"), "has 1 parts, the key columns are 2"),
        (("get", "visits", "a", "--state", "x"), "no state variable 'x'"),
        (("scan", "totals", "--version", "77"), "there are the versions"),
        (("scan", "totals", "--columns", "nope"), "There is no column 'nope'"),
        (("sql", "select nope from totals"), "nope"),
        (("sql", "select 1 from nope"), "Tables of running queries"),
        (("sql", "drop table totals"), "One statement that reads is possible"),
        (("diff", "totals", "4", "1"), "give the earlier version first"),
        (("watch", "totals", "--from-version", "99"), "cannot be watched from"),
    ],
)
def test_what_is_asked_wrongly_is_exit_code_2(args: tuple[str, ...], message: str) -> None:
    result = run(*args, code=2)
    assert message in result.stderr and not result.stdout


def test_scan_in_every_form() -> None:
    found = as_json("scan", "totals", "--where", "n > 4", "--columns", "k,g,n")
    assert found["operator"] == "totals" and found["version"] == 5
    assert all(row["n"] > 4 for row in found["rows"]) and found["rows"]
    text = run("scan", "totals", "--where", "n > 4", "--columns", "k,g,n", "--format", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [{"k": r["k"] or None, "g": int(r["g"]), "n": int(r["n"])} for r in rows] == found["rows"]
    assert "14" in run("scan", "totals", "--columns", "n").stdout
    assert {row["k"] for row in as_json("scan", "totals", "--prefix", '["a"]')["rows"]} == {"a"}
    empty = as_json("scan", "totals", "--where", "n > 1000")
    assert empty["rows"] == []


def test_scan_reports_further_rows() -> None:
    result = run("scan", "totals", "--limit", "2", "--json")
    assert len(json.loads(result.stdout)["rows"]) == 2 and "more than 2 rows" in result.stderr
    result = run("scan", "totals", "--limit", "0", "--json")
    assert len(json.loads(result.stdout)["rows"]) == 13 and not result.stderr
    assert not run("scan", "totals", "--limit", "13", "--json").stderr


def test_sql_tells_columns_of_one_name_apart() -> None:
    sql = "select 1 as a, 2 as a"
    assert as_json("sql", sql)["rows"] == [{"a": 1, "a__value": 2}]
    assert run("sql", sql, "--format", "csv").stdout.splitlines() == ["a,a__value", "1,2"]
    assert run("sql", sql).stdout.split() == ["a", "a__value", "1", "2"]


def test_sql() -> None:
    found = as_json("sql", "select k, g, n from totals order by n desc limit 1")
    assert found["rows"] == [{"k": "a", "g": 0, "n": 14}]
    found = as_json("sql", "select n from totals where k = 'a' and g = 0", "--version", "4")
    assert found["rows"] == [{"n": 12}]
    result = CliRunner().invoke(app, ["sql", "-", "--checkpoint", CHECKPOINT, "--json"], input="select 1 as one")
    assert json.loads(result.stdout)["rows"] == [{"one": 1}]


# -- watch and diff --------------------------------------------------------------------------------


def test_watch_a_key() -> None:
    lines = run("watch", "totals", "a", "0", "--from-version", "1", "--changes", "2", "--json").stdout.splitlines()
    found = [json.loads(line) for line in lines]
    assert [(c["version"], c["before"]["n"], c["after"]["n"]) for c in found] == [(4, 6, 12), (5, 12, 14)]
    text = run("watch", "totals", "a", "0", "--from-version", "3", "--changes", "1").stdout
    assert text.startswith("version 4  changed  k=a g=0  n: 6 -> 12, total: 10.0 -> 21.0")


def test_ctrl_c_ends_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_client, "threading", SimpleNamespace(Event=Interrupted, Lock=threading.Lock))
    result = run("watch", "totals", "a", "0", "--from-version", "4")
    assert result.stdout.count("\n") == 1 and not result.stderr


def test_diff() -> None:
    found = as_json("diff", "totals", "3", "4", code=1)
    assert (found["from_version"], found["to_version"]) == (3, 4)
    assert sorted((r["change_type"], r["k"] or "") for r in found["rows"]) == [
        ("added", "a"),
        ("changed", ""),
        ("changed", "a"),
    ]
    assert as_json("diff", "totals", "3", "4", "--summary", code=1)["changed"] == 2
    assert "3 to 4: 1 added, 2 changed, 0 removed" in run("diff", "totals", "3", "4", code=1).stdout
    assert as_json("diff", "totals", "4", "4")["rows"] == []
    assert as_json("diff", "firsts", "1", "--summary", code=1)["removed"] > 0


def test_a_savepoint_is_read_like_a_checkpoint() -> None:
    result = run("get", "totals", "a", "0", "--json", at=Stored("file").savepoint)
    assert "is a savepoint" in result.stderr
    assert json.loads(result.stdout) == as_json("get", "totals", "a", "0")
    assert as_json("diff", "totals", "5", at=Stored("file").savepoint)["rows"] == []


def test_names_of_columns_that_look_like_markup_are_shown_as_they_are() -> None:
    shown = run("sql", 'select 1 as "total[eur]", 2 as "n[/b]"').stdout
    assert shown.split() == ["total[eur]", "n[/b]", "1", "2"]


@pytest.mark.parametrize("args", [("get", "a,0"), ("scan",), ("watch", "--from-version", "0", "--changes", "1")])
def test_values_do_not_control_the_terminal(tmp_path: Path, args: tuple[str, ...]) -> None:
    """A state has what others have sent. Programs get it as it is."""
    flow, evil = Flow(tmp_path), "\x1b]0;title\x07\x1b[2J\r\x9b31m"
    flow.batch({("a", 0): lambda of: of.total.update((1, evil))})
    flow.stop()
    write_query_id(CheckpointStorage.open(flow.location), "q")
    command, *more = args
    asked = (command, "op", *more, "--state", "total")
    shown = run(*asked, at=flow.location).stdout
    assert r"\x1b]0;title\x07\x1b[2J\x0d\x9b31m" in shown and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    assert json.dumps(evil, ensure_ascii=False)[1:-1] in run(*asked, "--json", at=flow.location).stdout


def test_damage_is_reported(tmp_path: Path) -> None:
    at = tmp_path / "ck"
    shutil.copytree(CHECKPOINT, at)
    for file in (at / "statestore/operators").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-1])
    for command in (("get", "totals", "a", "0"), ("scan", "totals"), ("diff", "totals", "1", "4")):
        result = run(*command, code=2, at=str(at))
        assert "operators/totals" in result.stderr and "bytes" in result.stderr
    assert "operators/totals" in run("sql", "select * from totals", code=2, at=str(at)).stderr


# -- feature views -----------------------------------------------------------------------------


def test_feature_views_are_listed_and_described(tmp_path: Path) -> None:
    cluster = FeatureCluster(tmp_path)
    cluster.write({"totals": {1: (10, "one")}})
    cluster.declare(replace(VIEW, max_age="5 minutes"))
    cluster.declare(replace(VIEW, name="broken", features=[Feature("x", "no_such"), Feature("n", "totals")]))
    cluster.close()
    (tmp_path / "ck/metadata").write_text('{"id": "q"}')
    at = str(tmp_path / "ck")
    text = run("features", at=at).stdout
    assert re.search(r"risk +fraud +user +4 +\d+\.\d s +5 minutes +What a model knows of a user\.", text)
    assert "broken" in text and "has no operator 'no_such'" in text
    assert [view["view"] for view in as_json("features", at=at)] == ["risk", "broken"]
    shown = run("features", "risk", at=at).stdout
    assert shown.startswith("risk: What a model knows of a user.")
    assert re.search(r"user_name +totals +name +string +unknown", shown)
    assert as_json("features", "risk", at=at)["features"][0]["default"] == 0
    assert "There is no feature view 'none'" in run("features", "none", at=at, code=2).stderr
    assert "--drop needs the VIEW of a running query" in run("features", "risk", "--drop", at=at, code=2).stderr


def test_operators_and_columns_of_take_over_may_have_dots() -> None:
    options = ["totals.spent=2", "totals.address.city=city", "fraud.cards.spent=amount", "fraud.cards.n=0"]
    pairs = state_commands._columns_of_options(options)
    assert state_commands._columns_by_operator(pairs, ("totals", "fraud", "fraud.cards")) == {
        "totals": {"spent": 2, "address.city": "city"},
        "fraud.cards": {"spent": "amount", "n": 0},
    }
    with pytest.raises(RequestError, match=r"--column spent=2 must be OPERATOR\.COLUMN=SOURCE"):
        state_commands._columns_of_options(["spent=2"])
    with pytest.raises(RequestError, match=r"total\.n=1 begins with no operator .*: 'totals'\. Did you"):
        state_commands._columns_by_operator([("total.n", "1")], ("totals",))


def test_a_feature_view_is_dropped_by_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def answer(namespace: str, coordinator: str, method: str, *args: object) -> Any:
        sent.append((method, *args))
        return (RunningView(VIEW, "q", "run1", "name"),) if method == "feature_views" else True

    monkeypatch.setattr(cluster_commands, "_sent", answer)
    monkeypatch.setattr(sources, "joined_ray", lambda *_: nullcontext())
    dropped = CliRunner().invoke(app, ["features", "risk", "--drop"])
    assert (dropped.exit_code, sent[-1]) == (0, ("drop_view", "run1", "risk"))
    assert "Dropped the feature view 'risk'" in dropped.stderr
    unknown = CliRunner().invoke(app, ["features", "other", "--drop"])
    assert unknown.exit_code == 2 and "No running query has a feature view 'other'" in unknown.stderr
    assert sent[-1] == ("feature_views",)
