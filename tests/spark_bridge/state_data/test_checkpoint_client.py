"""The query client on a checkpoint: the same answers as from all rows of the state, for variables of every kind."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.exceptions import RequestError, StateVersionError, UnknownKvStateIdError, UnknownOperatorError
from spark_bridge.queryable.client import scans
from spark_bridge.queryable.protocol import StateAnswer
from spark_bridge.state_data.checkpoint_client import CheckpointClient, StoredReads
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.effort import effort
from tests.patience import PATIENCE
from tests.spark_bridge.overview.conftest import stream
from tests.spark_bridge.queryable.client_world import Cluster, go_back
from tests.spark_bridge.state_data.format_fixtures import Stored

__all__ = ["stream"]
VARIABLES = [
    ("firsts", "default"),
    ("reminders", "fired"),
    ("reminders", "timers"),
    ("sessions", "default"),
    ("totals", "default"),
    ("visits", "last"),
    ("visits", "seen"),
    ("visits", "pages"),
    ("windows", "default"),
]
CHANGED = ("change_type", "before", "after")


@pytest.fixture(scope="module")
def client() -> CheckpointClient:
    return CheckpointClient.open(str(Stored("file").checkpoint))


def of_stream(s: Any) -> CheckpointClient:
    return CheckpointClient.open(str(s.world.root / "ck"))


def rows_by(client: CheckpointClient, operator: str, state: str, names: list[str], version: int) -> dict[str, Any]:
    """Return all rows at a version in lists by some of their columns."""
    found: dict[str, Any] = {}
    for row in client.scan(operator, state, version=version).to_pylist():
        found.setdefault(repr([row.pop(n) for n in names]), []).append(row)
    return found


@pytest.mark.parametrize(("operator", "state"), VARIABLES)
def test_diff_is_the_difference_of_two_scans(client: CheckpointClient, operator: str, state: str) -> None:
    with client.diff(operator, 1, 4, state=state) as differences:
        found = differences.to_arrow()
    names = [name for name in found.schema.names if name not in CHANGED]
    before, after = (rows_by(client, operator, state, names, version) for version in (1, 4))
    wanted = {
        key: "insert" if key not in before else "delete" if key not in after else "update"
        for key in {*before, *after}
        if before.get(key) != after.get(key)
    }
    assert {repr([r[n] for n in names]): r["change_type"] for r in found.to_pylist()} == wanted
    assert list(client.diff(operator, 4, 4, state=state)) == []


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1000), (2, 3)])
def test_a_diff_is_the_same_however_rows_come(
    client: CheckpointClient, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    whole = {state: client.diff(operator, 1, 4, state=state).to_arrow() for operator, state in VARIABLES[-4:]}
    left = itertools.cycle(sizes)
    opened = scans._opened

    def cut(*given: Any) -> StateAnswer:
        answer, n = opened(*given), next(left)
        pieces = (batch[at : at + n] for batch in answer.batches for at in range(0, batch.num_rows, n))
        return dataclasses.replace(answer, batches=pieces)

    monkeypatch.setattr(scans, "_opened", cut)
    for operator, state in VARIABLES[-4:]:
        assert client.diff(operator, 1, 4, state=state).to_arrow() == whole[state]


def test_a_diff_has_both_values(client: CheckpointClient) -> None:
    found = {(r["k"], r["g"]): r for r in client.diff("totals", 1, 4).to_arrow().to_pylist()}
    assert found["a", 0]["before"]["n"] == client.get("totals", ("a", 0), version=1)["n"]
    assert found["a", 0]["after"]["n"] == client.get("totals", ("a", 0), version=4)["n"]
    assert all((r["before"] is None) == (r["change_type"] == "insert") for r in found.values())


@pytest.mark.parametrize("backend", effort(["file"], ["file", "rocksdb"]))
def test_lookup_equals_the_scanned_row(backend: str) -> None:
    client = CheckpointClient.open(str(Stored(backend).checkpoint))
    for row in client.scan("totals").to_pylist()[:3]:
        key = (row.pop("k"), row.pop("g"))
        assert client.get("totals", key) == row
    assert client.get("totals", ("nobody", 0)) is None
    elements = [r for r in client.scan("visits", "seen").to_pylist() if r.pop("k") == "many"]
    assert client.get("visits", "many", state="seen") == elements and len(elements) > 200
    entries = {
        r["g"]: {"n": r["n"], "at": r["at"]} for r in client.scan("visits", "pages").to_pylist() if r["k"] == "b"
    }
    assert client.get("visits", "b", state="pages") == entries
    window = next(r["window"] for r in client.scan("windows").to_pylist() if r["k"] == "b")
    assert client.get("windows", "b", window=window["start"])["n"] == client.get("windows", "b")[0]["n"]
    assert client.get_many("totals", [("a", 0), ("nobody", 1)]).column("n").to_pylist()[1] is None


def test_sql_and_filters(client: CheckpointClient) -> None:
    rows = client.scan("totals").to_pylist()
    assert client.sql("select count(*), sum(n) from totals").fetchall() == [(len(rows), sum(r["n"] for r in rows))]
    (found,) = client.sql("select n from totals where k = 'a' and g = 0").fetchall()
    assert found[0] == client.get("totals", ("a", 0))["n"]
    assert {r["n"] for r in client.scan("totals", where=[("n", ">", 4)]).to_pylist()} == {
        r["n"] for r in rows if r["n"] > 4
    }
    assert client.scan("totals", prefix=("a",)).to_arrow().num_rows == sum(r["k"] == "a" for r in rows)
    assert client.scan("totals", limit=2, columns=["n"]).to_arrow().shape == (2, 1)
    assert client.count("totals") == len(rows)


def test_unknown_operators_states_and_versions_are_errors(client: CheckpointClient) -> None:
    with pytest.raises(UnknownOperatorError, match="has no operator 'nope'; its operators: 'firsts'"):
        client.get("nope", 1)
    with pytest.raises(UnknownKvStateIdError, match="'nope'"):
        client.get("visits", "a", state="nope")
    with pytest.raises(StateVersionError, match="there are the versions"):
        client.scan("totals", version=77)
    with pytest.raises(RequestError, match="give the earlier version first"):
        client.diff("totals", 4, 1)
    with pytest.raises(StateVersionError, match="cannot be watched from"):
        client.watch("totals", from_version=99)


def test_watch_gives_each_version_and_follows_the_query(stream: Any) -> None:
    s = stream(batches=2)
    client = of_stream(s)
    with client.watch("op", from_version=0) as changes:
        seen: dict[int, dict[int, int]] = {}

        def take(until: int) -> None:
            while len(seen.get(until, {})) < len(range(until - 1, 30, 2)):
                change = next(changes)
                for row in change.batch.to_pylist():
                    seen.setdefault(change.version, {})[row["k"]] = row["after"]["n"]

        take(2)
        s.batch(2)
        take(3)
    assert seen == {v: {k: (v - 1) * 1000 + k for k in range(v - 1, 30, 2)} for v in (1, 2, 3)}


def test_description_of_an_operator_is_that_of_the_query_client(rolled_back: tuple[Cluster, CheckpointClient]) -> None:
    cluster, client = rolled_back
    stored, of_hosts = client.describe("totals"), cluster.client().describe("totals")
    of_cluster = ("hosts", "partitions", "query_name", "requests")
    assert stored.keys() == of_hosts.keys()
    assert all(stored[name] == of_hosts[name] for name in of_hosts if name not in of_cluster)
    assert stored["states"][0]["index"] == []
    assert [p["partition"] for p in stored["partitions"]] == [p["partition"] for p in of_hosts["partitions"]]
    assert stored["hosts"][0]["oldest_version"] == 0


def test_a_watch_of_a_key_loads_only_what_its_changes_need(stream: Any, monkeypatch: Any) -> None:
    s = stream(batches=1)
    s.batch(1, {7: 1})
    s.batch(2, {8: 1})
    s.batch(3, {7: 2})
    client = of_stream(s)
    loaded: list[int] = []
    from coordinator_actor.reading import stored_files as partition_reader

    opened = partition_reader.opened_partition

    def counted(place: Any, piece: Any, *args: Any, **kwargs: Any) -> Any:
        loaded.append(piece.lineage.version)
        return opened(place, piece, *args, **kwargs)

    monkeypatch.setattr(partition_reader, "opened_partition", counted)
    watch = client.watch("op", keys=[7], from_version=1)
    found = []
    for change in watch:
        found.append((change.version, change.batch.to_pylist()[0]["after"]["n"]))
        if len(found) == 2:
            watch.close()
    assert found == [(2, 1), (4, 2)] and loaded == [2, 4]


def test_versions_of_another_layout_are_read(stream: Any) -> None:
    """A router names the partitions of the last layout; the older version has others."""
    first = stream(batches=2, n=3)
    first.c.deactivate_instances(first.registration.run_id)
    first.close()
    s = Stream(first.world.root, n=2, run="run2", at=first.at)
    s.batch(2)
    s.close()
    client = of_stream(s)
    assert len(client.reads.locate("op", None).owners) == 2
    for version in (1, 2, 3):
        rows = {r["k"]: r["n"] for r in client.scan("op", version=version).to_pylist()}
        assert rows == s.at[version]
        assert all(client.get("op", k, version=version) == {"n": n} for k, n in list(rows.items())[:4])
    changed = {r["k"]: r["after"]["n"] for r in client.diff("op", 1, 3).to_arrow().to_pylist()}
    assert changed == {k: n for k, n in s.at[3].items() if s.at[1].get(k) != n}


@pytest.fixture
def rolled_back(tmp_path: Path) -> Iterator[tuple[Cluster, CheckpointClient]]:
    """A query with three versions; a client has read the third one. The query then starts again from the first one."""
    cluster, now = Cluster(tmp_path), itertools.count(0.0, 10.0)
    (tmp_path / "ck/metadata").write_text('{"id":"q"}')
    for n in (10, 20, 30):
        cluster.batch({1: (n, "first")})
    client = CheckpointClient(StoredReads(find_state(str(tmp_path / "ck")), clock=lambda: next(now)))
    assert client.get("totals", 1) == {"n": 30, "name": "first"}
    yield cluster, client
    cluster.close()


def test_a_client_that_stays_open_follows_a_query_that_was_rolled_back(
    rolled_back: tuple[Cluster, CheckpointClient],
) -> None:
    cluster, client = rolled_back
    go_back(cluster, 1, "run2")
    assert client.get("totals", 1) == {"n": 10, "name": "first"}
    with pytest.raises(StateVersionError, match="Version 3 of the state"):
        client.get("totals", 1, version=3)
    cluster.batch({1: (21, "other")})
    assert client.get("totals", 1) == {"n": 21, "name": "other"}


def test_of_two_looks_at_once_the_one_that_saw_more_counts(
    rolled_back: tuple[Cluster, CheckpointClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, client = rolled_back
    look, saw, may_end = StateVersions.look, threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> StateVersions:
        found = look(*args, **kwargs)
        saw.set()
        assert may_end.wait(PATIENCE)
        return found

    monkeypatch.setattr(StateVersions, "look", slow)
    slower = threading.Thread(target=client.reads.versions)
    slower.start()
    assert saw.wait(PATIENCE)
    monkeypatch.setattr(StateVersions, "look", look)
    cluster.batch({1: (40, "first")})
    assert client.get("totals", 1) == {"n": 40, "name": "first"}
    may_end.set()
    slower.join(PATIENCE)
    looked = client.reads._looked
    assert looked is not None and looked.versions.completed == 4, "no answer is older than one before"


@pytest.mark.parametrize("from_version", [None, 3])
def test_a_watch_without_changes_so_far_notices_a_rollback(
    rolled_back: tuple[Cluster, CheckpointClient], from_version: int | None
) -> None:
    cluster, client = rolled_back
    watch = client.watch("totals", from_version=from_version)
    assert list(watch.up_to(3)) == []
    go_back(cluster, 1, "run2")
    for n in (21, 31, 41):
        cluster.batch({1: (n, "other")})
    with pytest.raises(StateVersionError, match="rolled back"):
        list(watch.up_to(4))
    assert client.watch("totals", from_version=3).run_id == "run2"
