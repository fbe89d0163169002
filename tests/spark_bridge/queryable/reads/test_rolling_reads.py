"""Answers of rolling aggregates as of random moments, through every interface of clients and of stored state."""

from __future__ import annotations

import datetime as dt
import json
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from backends.conf import SECOND
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.encoding.values import encode_values
from backends.exceptions import InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.records import LookupRecord
from coordinator_actor.feature_views import Feature, FeatureView
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.aggregates.rolling import Pieces, Rolling, declared_rolling, piece_fields
from spark_bridge.cli.main import app
from spark_bridge.exceptions import RequestError, StateTimeError, StateVersionError
from spark_bridge.operators import rolling_task
from spark_bridge.state_data.checkpoint_client import CheckpointClient
from spark_bridge.state_data.frames import state_changes_table, state_table
from spark_bridge.state_data.looked_up_state import in_storage
from spark_bridge.state_format.layouts import DUE_FAMILY, LOST_FAMILY, TILES_FAMILY, rolling_schema
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_http.app import ARROW, TIME_HEADER, TIMES_HEADER
from spark_bridge.state_surgery import take_over
from spark_bridge.state_surgery.declared_operators import OfProgram
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.state_surgery.rewrite_state import bootstrap_state, planned_rewrite, rewrite_state
from spark_bridge.ui.app import create_ui
from spark_bridge.ui.live import StoredSystem
from tests.command_line import CliRunner
from tests.effort import effort
from tests.patience import PATIENCE
from tests.spark_bridge.operators.operator_runs import TS, batch_of
from tests.spark_bridge.operators.rolling_model import ROWS, model, random_rows, rolling_operator
from tests.spark_bridge.queryable.client_world import served
from tests.spark_bridge.state_flows import Query
from tests.spark_bridge.state_http.http_state import answering
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers, files_with
from tests.spark_bridge.ui.systems import ACT, Tokens

TOTALS = StateSchema(pa.schema([("k", pa.string())]), pa.schema([("n", pa.int64())]))
HORIZONS = ("30 seconds", "10 minutes", "1 hour")


def time_of(us: int) -> dt.datetime:
    return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=us)


class Stream:
    """A query of rolling aggregates, batch by batch, with the rows of each key."""

    def __init__(
        self, root: Path, seed: int, n: int = 2, backend: str = "file", run: str = "run1", lag_ms: int = 60_000
    ) -> None:
        self.lag_ms = lag_ms
        self.rng = random.Random(seed)
        self.logic, self.rolling = rolling_operator(HORIZONS)
        self.query = Query(root, self.logic.schema, "rolling_aggregate", n, backend, run)
        (root / "ck" / "metadata").write_text('{"id":"q"}')
        self.rows: dict[str, list[tuple[int, float]]] = {}
        self.clock = 1_000_000.0
        self.watermark = 0
        self.newest = 0

    def batch(self, num: int | None = None) -> None:
        """A batch with some late rows; the watermark is a minute behind."""
        self.clock += self.rng.choice((1, 20, 300, 3000))
        new = random_rows(self.rng, self.clock, num or self.rng.choice((2, 20)), self.rng.choice((2, 200)))
        self.watermark = max(self.watermark, self.newest * 1000 - self.lag_ms) if self.newest else 0
        bound = self.rolling.expired(self.watermark * 1000)
        for key, at, value in new:
            if at * SECOND > bound:
                self.rows.setdefault(key, []).append((int(at * SECOND), value))
                self.newest = max(self.newest, int(at))
        self.rows = {key: rows for key, rows in self.rows.items() if max(t for t, _ in rows) > bound}
        self.query.process(self.logic, ["k"], batch_of(ROWS, new), self.watermark)

    def moment(self) -> int:
        """A moment at or after the watermark, in us."""
        late = self.rng.choice((0, 0, 1, 30, 600, 5000))
        return max(self.watermark * 1000, int((self.clock - self.rng.random() * 70) * SECOND)) + late * SECOND


def expected(rolling: Rolling, rows: dict[str, list[tuple[int, float]]], moment: int) -> dict[str, dict[str, Any]]:
    """The results of all keys."""
    return {key: model(rolling, of_key, moment) for key, of_key in rows.items()}


def without_key(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("k", "key_group", "partition_id")}


@pytest.mark.parametrize("seed", range(6))
def test_every_interface_gives_the_models_answer(tmp_path: Path, seed: int) -> None:
    """get, get_many, get_each, key_rows, scan, count, SQL, a checkpoint, and tables of state: one answer."""
    stream = Stream(tmp_path, seed, backend=("file", "rocksdb")[seed % 2])
    keys = [f"k{i}" for i in range(9)]
    with served(stream.query) as client:
        for _ in range(12):
            stream.batch()
            stream.query.host.heartbeat()
            moment = stream.moment()
            at = time_of(moment)
            answers = expected(stream.rolling, stream.rows, moment)
            assert {k: client.get("op", k, at=at) for k in keys} == {k: answers.get(k) for k in keys}
            assert client.answered_at == at
            assert client.answered_version == stream.query.version
            table = client.get_many("op", keys, at=at).to_pylist()
            absent = dict.fromkeys(next(iter(answers.values()), {}))
            assert [without_key(row) for row in table] == [answers.get(k, absent) for k in keys] or not answers
            assert client.get_each("op", keys, at=at) == [answers.get(k) for k in keys]
            rows = client.key_rows("op", keys, at=at).to_pylist()
            assert {row["k"]: without_key(row) for row in rows} == answers
            scanned = client.scan("op", at=at).to_pylist()
            assert {row["k"]: without_key(row) for row in scanned} == answers
            busy = client.scan("op", where=[("n_10m", ">", 0)], at=at).to_pylist()
            assert {row["k"] for row in busy} == {k for k, a in answers.items() if a["n_10m"] > 0}
            assert client.count("op", at=at) == len(answers)
            relation = client.sql("select k, n_10m, total_1h from op where k <> 'k7' order by k", at=at)
            assert relation.fetchall() == [
                (k, a["n_10m"], a["total_1h"]) for k, a in sorted(answers.items()) if k != "k7"
            ]
        ms = moment // 1000 * 1000 + 1000
        stored = state_table(stream.query.location, "op", at=time_of(ms)).to_pylist()
        assert {row["k"]: without_key(row) for row in stored} == expected(stream.rolling, stream.rows, ms)
        checkpoint = CheckpointClient.open(stream.query.location)
        assert {k: checkpoint.get("op", k, at=time_of(ms)) for k in stream.rows} == expected(
            stream.rolling, stream.rows, ms
        )
        checkpoint.close()
    stream.query.close()


@pytest.mark.parametrize("seed", range(3))
def test_features_are_the_columns_of_get_many(tmp_path: Path, seed: int) -> None:
    """Of one key and of many, as of one time, and again from a version and a time."""
    stream = Stream(tmp_path, seed)
    keys = [f"k{i}" for i in range(9)]
    columns = list(model(stream.rolling, [(1, 1.0)], 1))
    view = FeatureView("v", "k", [Feature(name, "op") for name in columns])
    stream.query.c.declare_view(stream.query.run, view)
    with served(stream.query) as client:
        for _ in range(6):
            stream.batch()
            stream.query.host.heartbeat()
            at = time_of(stream.moment())
            wanted = client.get_many("op", keys, at=at)
            rows = client.features("v", keys, at=at)
            assert rows.to_arrow().to_pylist() == wanted.to_pylist()
            assert client.answered_at == at
            for key, row in zip(keys, wanted.to_pylist(), strict=True):
                assert client.features("v", [key], at=at).to_arrow().to_pylist() == [row]
        before = dt.datetime.now(dt.timezone.utc)
        client.features("v", keys)
        assert client.answered_at is not None
        assert before - dt.timedelta(seconds=5) <= client.answered_at
        stream.batch()
        stream.query.host.heartbeat()
        again = client.features("v", keys, at=at, versions=rows.versions)
        assert again.to_dict() == rows.to_dict()
    stream.query.close()


def test_a_version_and_a_time_give_the_same_answer_again(tmp_path: Path) -> None:
    """What clients have recorded by version and time is what storage answers for these, bit by bit."""
    stream = Stream(tmp_path, 7)
    recorded: list[tuple[str, int, dt.datetime, Any]] = []
    with served(stream.query) as client:
        for _ in range(15):
            stream.batch()
            stream.query.host.heartbeat()
            for key in stream.rows:
                answer = client.get("op", key, at=time_of(stream.moment()))
                recorded.append((key, client.answered_version, client.answered_at, answer))
        assert len({version for _, version, _, _ in recorded}) == 15
        for key, version, at, answer in stream.rng.sample(recorded, 40):
            assert client.get("op", key, version=version, at=at) == answer
        checkpoint = CheckpointClient.open(stream.query.location)
        for key, version, at, answer in stream.rng.sample(recorded, 15):
            assert checkpoint.get("op", key, version=version, at=at) == answer
        checkpoint.close()
    stream.query.close()


def test_the_default_time_is_the_hosts_clock(tmp_path: Path) -> None:
    """Without ``at`` the answer is as of now: long after the last event, counts are zero, and sums too."""
    stream = Stream(tmp_path, 3)
    stream.batch(20)
    with served(stream.query) as client:
        key = next(iter(stream.rows))
        before = dt.datetime.now(dt.timezone.utc)
        answer = client.get("op", key)
        assert before <= client.answered_at <= dt.datetime.now(dt.timezone.utc)
        assert (answer["n_1h"], answer["total_1h"], answer["least_1h"]) == (0, 0.0, None)
        assert client.get("op", "never seen") is None
        assert abs((client.now() - dt.datetime.now(dt.timezone.utc)).total_seconds()) < PATIENCE
    stream.query.close()


def test_times_that_cannot_be_answered_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time before the tiles, or inside one, is an error that names a time that can be answered."""
    monkeypatch.setattr(rolling_task, "FEW_ROWS", 0)
    stream = Stream(tmp_path, 5)
    rows = [("a", 1_000_000 + i, 1.0) for i in range(200)]
    stream.query.process(stream.logic, ["k"], batch_of(ROWS, rows), 0)
    rows = [("a", 1_003_000 + i / 8, 1.0) for i in range(200)]
    stream.query.process(stream.logic, ["k"], batch_of(ROWS, rows), 1_000_100_000)
    with served(stream.query) as client:
        with pytest.raises(StateTimeError, match=r"older than the retained tiles.*Ask as of that time") as raised:
            client.get("op", "a", at=time_of(1_000_050 * SECOND))
        watermark = str(raised.value).partition("watermark ")[2].partition("Z")[0]
        assert client.get("op", "a", at=dt.datetime.fromisoformat(watermark))["n_1h"] == 101
        inside = 1_003_010 * SECOND + 300_000
        with pytest.raises(StateTimeError, match="merged in one tile") as raised:
            client.get("op", "a", at=time_of(inside))
        later = str(raised.value).partition("as of ")[2].partition("Z")[0]
        assert client.get("op", "a", at=dt.datetime.fromisoformat(later))["n_30s"] == 89
        assert client.get("op", "a", at=time_of(1_003_010 * SECOND))["n_30s"] == 81
        with pytest.raises(RequestError, match="is not a time"):
            client.get("op", "a", at="yesterday")
    stream.query.close()


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_times_that_need_expired_rows_are_errors(tmp_path: Path, backend: str) -> None:
    """A key that has expired, or lost a late row, has no smaller number as of a time before: every interface raises.

    An earlier version has the number. Rescaling, a savepoint and forgetting keep what is known of lost rows.
    """
    stream = Stream(tmp_path, 5, backend=backend)
    stream.query.c.declare_view(stream.query.run, FeatureView("v", "k", [Feature("n_1h", "op")]))
    old, quiet = 1_000_000, 1_000_100
    rows = [(f"k{i}", old, 1.0) for i in range(8)]
    stream.query.process(stream.logic, ["k"], batch_of(ROWS, rows), 0)
    rows = [(f"k{i}", quiet + 20_000, 1.0) for i in range(2)]
    stream.query.process(stream.logic, ["k"], batch_of(ROWS, rows), (quiet + 20_000) * 1000)
    at, complete = time_of(quiet * SECOND), time_of((quiet + 20_000) * SECOND)
    with served(stream.query) as client:
        stream.query.host.heartbeat()
        for ask in (
            lambda: client.get("op", "k5", at=at),
            lambda: client.get("op", "k1", at=at),
            lambda: client.get_many("op", ["k5", "k6"], at=at),
            lambda: client.get_each("op", ["k5"], at=at),
            lambda: client.key_rows("op", ["k5"], at=at).to_pylist(),
            lambda: client.features("v", ["k5"], at=at),
            lambda: client.features("v", [f"k{i}" for i in range(8)], at=at),
            lambda: client.scan("op", at=at).to_pylist(),
            lambda: client.count("op", at=at),
            lambda: client.sql("select * from op", at=at).fetchall(),
            lambda: state_table(stream.query.location, "op", at=at),
        ):
            with pytest.raises(Exception, match="is older than the retained rows") as raised:
                ask()
            named = str(raised.value).partition("Ask as of ")[2].partition("Z")[0]
        assert client.get("op", "k5", at=at, version=1)["n_1h"] == 1
        oldest = dt.datetime.fromisoformat(named).replace(tzinfo=dt.timezone.utc)
        assert oldest == time_of((old // 300 + 1) * 300 * SECOND + 3600 * SECOND)
        assert client.get("op", "k5", at=oldest) is None
        assert client.get("op", "k1", at=oldest)["n_1h"] == 0
        assert client.get("op", "k1", at=complete)["n_1h"] == 1
        with pytest.raises(StateTimeError, match="retained rows"):
            client.get("op", "k5", at=oldest - dt.timedelta(microseconds=1))
    checkpoint = CheckpointClient.open(stream.query.location)
    with pytest.raises(StateTimeError, match="retained rows"):
        checkpoint.get("op", "k5", at=at)
    checkpoint.close()
    looked_up = in_storage(find_state(stream.query.location), "op", None, None, LookupRecord(2, "", 0))
    codec = looked_up.view.codec
    keys, moments = codec.encode(codec.columns(["k5"])), pa.array([oldest, at], TS).cast(pa.int64())
    assert not looked_up.columns(keys, pa.array([0]), moments[:1])[1][0].as_py()
    with pytest.raises(StateTimeError, match="retained rows"):
        looked_up.columns(keys, pa.array([0, 0]), moments)

    stream.query.c.trigger_savepoint("r1", "name", str(tmp_path / "sp"))
    path = finished_savepoint(stream.query, "r1")
    stream.query.stop()
    forget_keys(stream.query.location, "op", ["k0"])
    restored = str(tmp_path / "restored")
    restore_into_checkpoint(path, restored, num_partitions=5, open_storage=stream.query.world.storage)
    for location in (stream.query.location, restored):
        with pytest.raises(StateTimeError, match="retained rows"):
            state_table(location, "op", at=at)
        assert len(answers_of(location, int(complete.timestamp()) * SECOND)) == (1 if location != restored else 2)


def test_there_is_no_feed_of_changes(tmp_path: Path) -> None:
    """Watches and tables of changes are refused, with the sink as the way out."""
    stream = Stream(tmp_path, 5)
    stream.batch(5)
    with served(stream.query) as client, pytest.raises(RequestError, match="Write the rows that the operator emits"):
        next(iter(client.watch("op", from_version=0)))
    with pytest.raises(RequestError, match="no feed"):
        state_changes_table(stream.query.location, "op", from_version=0)
    stream.query.close()


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_another_layout_keeps_the_answers(tmp_path: Path, backend: str) -> None:
    """A restart with more partitions has all three families of each key in the partition of the key."""
    stream = Stream(tmp_path, 11, backend=backend)
    for _ in range(10):
        stream.batch(40)
    rows, clock, watermark, newest = stream.rows, stream.clock, stream.watermark, stream.newest
    stream.query.stop()
    stream = Stream(tmp_path, 12, n=5, backend=backend, run="run2")
    stream.rows, stream.clock, stream.watermark, stream.newest = rows, clock, watermark, newest
    with served(stream.query) as client:
        for _ in range(5):
            stream.batch(20)
            stream.query.host.heartbeat()
            moment = stream.moment()
            scanned = client.scan("op", at=time_of(moment)).to_pylist()
            answers = expected(stream.rolling, stream.rows, moment)
            assert {row["k"]: without_key(row) for row in scanned} == answers
    stream.query.close()


def test_the_watermark_of_the_version_that_answers(tmp_path: Path) -> None:
    """``at="watermark"`` is as of the floored watermark of the newest version, through every method.

    Watermarks are between two hops: what was merged by such a watermark can be answered as of the floored one.
    """
    stream = Stream(tmp_path, 21, lag_ms=59_300)
    with served(stream.query) as client:
        stream.batch(5)
        stream.query.host.heartbeat()
        with pytest.raises(StateTimeError, match="Version 1 of operator 'op' has no watermark yet"):
            client.get("op", "k1", at="watermark")
        for _ in range(12):
            stream.batch(60)
            stream.query.host.heartbeat()
            floored = stream.rolling.at_watermark(stream.watermark)
            answers = expected(stream.rolling, stream.rows, floored)
            keys = sorted(stream.rows)
            assert [client.get("op", k, at="watermark") for k in keys] == [answers[k] for k in keys]
            assert (client.answered_at, client.answered_version) == (time_of(floored), stream.query.version)
            assert client.get_each("op", keys, at="watermark") == [answers[k] for k in keys]
            with client.scan("op", at="watermark") as rows:
                assert (rows.version, rows.at) == (stream.query.version, time_of(floored))
                assert {row["k"]: without_key(row) for row in rows.to_pylist()} == answers
            relation = client.sql("select k, n_1h from op union all select k, n_1h from op", at="watermark")
            assert sorted(relation.fetchall()) == sorted([(k, a["n_1h"]) for k, a in answers.items()] * 2)
            assert list(relation.times.values()) == [time_of(floored)]
            checkpoint = CheckpointClient.open(stream.query.location)
            assert {k: checkpoint.get("op", k, at="watermark") for k in keys[:2]} == {k: answers[k] for k in keys[:2]}
            assert checkpoint.answered_at == time_of(floored)
            checkpoint.close()
        again = client.get("op", keys[0], at="watermark", version=stream.query.version)
        assert again == answers[keys[0]]
        client._watermarks._of_versions.clear()
        with pytest.raises(StateVersionError, match=r"watermark of version 2 .* is not known"):
            client.get("op", keys[0], at="watermark", version=2)
        with pytest.raises(RequestError, match="leave isolation='latest' out"):
            client.get("op", keys[0], at="watermark", isolation="latest")
    stream.query.close()


def test_http_the_command_line_and_the_page_take_a_time_and_name_it(tmp_path: Path) -> None:
    """Every route that reads takes ``at``; the answer names its time, also without ``at``."""
    stream = Stream(tmp_path, 23, lag_ms=59_300)
    for _ in range(6):
        stream.batch(40)
    floored = stream.rolling.at_watermark(stream.watermark)
    key = sorted(stream.rows)[0]
    with served(stream.query) as client, answering(client) as http:
        stream.query.host.heartbeat()
        for at, us in (("watermark", floored), (text_of_time(floored + 90 * SECOND), floored + 90 * SECOND)):
            answers, text = expected(stream.rolling, stream.rows, us), text_of_time(us)
            one = http.get(f"/v1/operators/op/keys/{key}", params={"at": at}).json()
            assert (one["value"], one["at"]) == (answers[key], text)
            many = http.post("/v1/operators/op/lookup", json={"keys": sorted(answers), "at": at})
            assert many.json()["at"] == text
            assert [without_key(row) for row in many.json()["rows"]] == [answers[k] for k in sorted(answers)]
            arrow = http.post("/v1/operators/op/lookup", json={"keys": [key], "at": at}, headers={"Accept": ARROW})
            assert arrow.headers[TIME_HEADER] == text
            assert without_key(pa.ipc.open_stream(arrow.content).read_all().to_pylist()[0]) == answers[key]
            rows = http.post("/v1/operators/op/scan", json={"at": at})
            assert rows.headers[TIME_HEADER] == text
            scanned = map(json.loads, rows.text.splitlines())
            assert {row["k"]: without_key(row) for row in scanned} == answers
            selected = http.post("/v1/sql", json={"sql": "select k, n_1h from op", "at": at})
            assert selected.headers[TIMES_HEADER] == f"q={text}"
            assert selected.json()["times"] == {"q": text}
            assert {row["k"]: row["n_1h"] for row in selected.json()["rows"]} == {
                k: a["n_1h"] for k, a in answers.items()
            }
            run = CliRunner().invoke
            checkpoint = ["--checkpoint", stream.query.location, "--at", at]
            shown = json.loads(run(app, ["get", "op", key, "--json", *checkpoint]).stdout)
            assert (shown["value"], shown["at"]) == (answers[key], text)
            shown = json.loads(run(app, ["scan", "op", "--json", *checkpoint]).stdout)
            assert shown["at"] == text
            assert {row["k"]: without_key(row) for row in shown["rows"]} == answers
            printed = run(app, ["sql", "select count(*) as n from op where n_1h > 0", *checkpoint])
            assert f"Rolling aggregates are as of {text}." in printed.stderr
            page = TestClient(create_ui(StoredSystem(stream.query.location), Tokens()), headers=page_token())
            looked_up = page.get("/keys", params={"table": "q/op/default", "key.k": key, "at": at}).text
            assert f"as of {text}" in looked_up and "Watch this key" not in looked_up
            assert f"as of {text}" in page.get("/scan", params={"table": "q/op/default", "limit": 5, "at": at}).text
        now = http.get(f"/v1/operators/op/keys/{key}").json()
        assert now["value"]["n_1h"] == 0 and now["at"].startswith(str(dt.datetime.now(dt.timezone.utc).year))
        assert "as of" in page.get("/scan", params={"table": "q/op/default", "limit": 5}).text
        wrong = http.get(f"/v1/operators/op/keys/{key}", params={"at": "yesterday"})
        assert wrong.status_code == 400 and "ISO 8601" in wrong.json()["detail"]
        assert http.post("/v1/sql", json={"sql": "select * from op", "at": "+12000-01-01"}).status_code == 400
    stream.query.close()


def text_of_time(us: int) -> str:
    return time_of(us).isoformat().replace("+00:00", "Z")


def page_token() -> dict[str, str]:
    return {"Authorization": f"Bearer {ACT}"}


# -- savepoints, copies and other changes of stored state --------------------------------------


def answers_of(location: str, moment: int, operator: str = "op") -> dict[str, Any]:
    rows = state_table(location, operator, at=time_of(moment)).to_pylist()
    return {row["k"]: without_key(row) for row in rows}


def finished_savepoint(query: Query, request: str) -> str:
    """The path of a savepoint, once it is done."""
    deadline = time.monotonic() + PATIENCE
    while (path := query.c.savepoint_status(request).path) is None:
        assert time.monotonic() < deadline, query.c.savepoint_status(request)
        query.c.expire()
        query.host.heartbeat()
    return path


def stored_keys(location: str) -> dict[str, int]:
    """How many rows each column family has."""
    versions = StateVersions.look(find_state(location))
    counts: dict[str, int] = {}
    for piece in versions.reading("op", versions.newest_completed()).pieces:
        with opened_partition(versions.place, piece) as state:
            for family in ("default", TILES_FAMILY, DUE_FAMILY):
                counts[family] = counts.get(family, 0) + sum(
                    part.num_rows for part in state.reads.scan(None, None, None, family)
                )
    return counts


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_savepoints_and_rewritten_checkpoints_have_all_families(tmp_path: Path, backend: str) -> None:
    """A savepoint restored with more partitions, and a checkpoint in which another operator is rewritten."""
    stream = Stream(tmp_path, 31, backend=backend)
    for _ in range(8):
        stream.batch(40)
    stream.query.c.trigger_savepoint("r1", "name", str(tmp_path / "sp"))
    path = finished_savepoint(stream.query, "r1")
    moment = stream.moment()
    answers = expected(stream.rolling, stream.rows, moment)
    families = stored_keys(stream.query.location)
    assert families[TILES_FAMILY] and families["default"] == families[DUE_FAMILY]
    stream.query.stop()
    restored = str(tmp_path / "restored")
    restore_into_checkpoint(path, restored, num_partitions=5, open_storage=stream.query.world.storage)
    assert (answers_of(restored, moment), stored_keys(restored)) == (answers, families)


def test_forgotten_keys_leave_all_families(tmp_path: Path) -> None:
    """No byte of a key is left, in tiles and due times neither; the others keep their answers, and the stream goes
    on.
    """
    stream = Stream(tmp_path, 33)
    gone = "a name that no other bytes are by chance"
    rows = [(gone, 1_000_000 + 60 * i, 1.0) for i in range(40)]
    stream.query.process(stream.logic, ["k"], batch_of(ROWS, rows), 0)
    for _ in range(8):
        stream.batch(40)
    moment = stream.moment()
    answers = expected(stream.rolling, stream.rows, moment)
    stream.query.stop()
    before = stored_keys(stream.query.location)
    assert files_with(stream.query.location, gone)
    forget_keys(stream.query.location, "op", [gone])
    assert files_with(stream.query.location, gone) == []
    there = stored_keys(stream.query.location)
    assert [before[family] - there[family] for family in before] == [1, 1, 1]
    assert answers_of(stream.query.location, moment) == answers


def test_rows_of_rolling_aggregates_cannot_be_rewritten(tmp_path: Path) -> None:
    """Refused before anything is written; what the error advises works: the operator stays, or begins empty."""
    stream = Stream(tmp_path, 35)
    for _ in range(6):
        stream.batch(40)
    moment = stream.moment()
    stream.query.stop()
    old, new = stream.query.location, tmp_path / "new"
    with pytest.raises(InvalidStateStoreArgument, match=r"has rolling aggregates.*as far back as the longest horizon"):
        rewrite_state(old, "op", lambda batch: batch, str(new), workers=OwnWorkers())
    schema = stream.logic.schema.to_json()
    totals = OperatorSpec("totals", 2, OperatorSchema.of_rows(TOTALS).to_json())
    program = [OperatorSpec("op", 2, schema, kind="rolling_aggregate", uses_time=True), totals]
    rows = pa.table({"k": ["a"], "n": pa.array([1], pa.int64())})
    for given, of in (({"op": rows}, program), ({("op", "default"): rows}, program), (rows, program[:1])):
        with pytest.raises(InvalidStateStoreArgument, match=r"'op' has rolling aggregates.*Leave 'op' out of rows="):
            bootstrap_state(given, str(new), of, workers=OwnWorkers())
    with pytest.raises(InvalidStateStoreArgument, match="take over with a program without 'op'"):
        take_over._matched(SimpleNamespace(), {"op": OfProgram(program[0])}, None)
    assert not new.exists()

    bootstrap_state({"totals": rows}, str(new), program, workers=OwnWorkers())
    assert answers_of(str(new), moment) == {}
    rewrite_state(old, "op", None, str(tmp_path / "empty"), program=program[:1], workers=OwnWorkers())
    assert answers_of(str(tmp_path / "empty"), moment) == {}
    versions = StateVersions.look(find_state(old))
    options = dict.fromkeys(("key", "combine", "num_partitions", "backend"))
    (same,), _ = planned_rewrite(
        versions,
        versions.newest_completed(),
        {},
        program=program[:1],
        **options,
        sample=lambda *_: {},
        open_storage=CheckpointStorage.open,
    )
    families = {"default", TILES_FAMILY, DUE_FAMILY, LOST_FAMILY}
    assert same.copied is not None and set(same.copied.families) == families


def special_values(rng: random.Random, kind: pa.DataType, num: int) -> list[Any]:
    """Values of a type with nulls, negative zeros, and numbers of very different sizes."""
    if pa.types.is_floating(kind):
        return [rng.choice([None, -0.0, 0.0, 1e-300, rng.random(), -rng.random() * 1e9, 1e300]) for _ in range(num)]
    return [rng.choice([None, rng.randrange(-100, 100)]) for _ in range(num)]


@pytest.mark.parametrize("kind", [pa.int64(), pa.int32(), pa.float64()])
@pytest.mark.parametrize("seed", effort(range(1), range(5)))
def test_single_keys_have_the_bytes_of_the_columns(kind: pa.DataType, seed: int) -> None:
    """Each function of plain numbers, over rows with nulls: the two ways to an answer agree bit by bit."""
    rng = random.Random(seed)
    functions = ("count", "sum", "mean", "min", "max", "stddev_samp", "stddev_pop", "var_samp", "var_pop")
    outputs = [Output(f, f, "v", None, kind) for f in functions]
    outputs += [Output(f, f, "v", "ts", kind, TS) for f in ("first", "last")]
    rolling = declared_rolling({o.name: HORIZONS for o in outputs}, exact=False)
    aggregator = Aggregator(outputs)
    fields = piece_fields(TS, aggregator.state_schema)
    keys = pa.schema([pa.field("k", pa.string())])
    schema = rolling_schema(keys, ("k",), fields, {"rolling": rolling.to_text()}, aggregator.zeros)
    rows = VariableRows(schema, schema.variables[0])
    answered = 0
    for _ in range(40):
        stored = []
        for family, name in (("default", "recent"), (TILES_FAMILY, "tiles")):
            num = rng.randrange(1, 12)
            times = sorted(rng.sample(range(10_000), num))
            us = pa.array([t * SECOND for t in times], pa.int64()).cast(TS)
            groups = np.arange(num)
            of_rows = pa.record_batch({"v": pa.array(special_values(rng, kind, num), kind), "ts": us})
            pieces = Pieces(np.zeros(num, np.int64), np.asarray(us.cast("int64")), np.asarray(us.cast("int64")),
                            aggregator.partial(groups, num, of_rows))  # fmt: skip
            value = schema.families[family].value
            columns = [pa.nulls(1, f.type) for f in value]
            columns[value.get_field_index(name)] = pieces.lists(1, value.field(name).type)
            if family == "default":
                columns[value.get_field_index("older")] = pa.array([[]], value.field("older").type)
            columns[-1] = pa.array([5 * SECOND], pa.int64()).cast(TS)
            stored.append(schema.families[family].encode_values(pa.RecordBatch.from_arrays(columns, schema=value)))
        moment = rng.choice((times[-1], rng.randrange(5, 12_000))) * SECOND
        at = rows.as_of(0, moment)
        columns = [pa.RecordBatch.from_arrays(at.rolled(*stored), schema=at.value)]
        assert at.singles is not None
        single = at.singles.value(stored[0][0].as_py(), stored[1][0].as_py(), moment)
        if single is not None:
            answered += 1
            assert single == encode_values(columns[0])[0].as_py(), columns[0].to_pylist()
        object.__setattr__(at, "singles", None)
        again = pa.RecordBatch.from_arrays(at.rolled(*stored), schema=at.value)
        assert encode_values(again) == encode_values(columns[0])
    assert answered > 10
