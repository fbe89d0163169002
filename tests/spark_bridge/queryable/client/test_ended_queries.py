"""Queries that have ended are answered from their last completed version, until they run again or are over."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.exceptions import RetiredRunError, UnknownQueryError
from coordinator_actor.messages import OpenBatch, QueryRegistration
from spark_bridge.exceptions import QueryEndedError, StateVersionError, WrongOperatorError
from spark_bridge.queryable.client import watch
from spark_bridge.queryable.reads import answer_version, operator_plan
from tests.spark_bridge.queryable.client.client_rows import UntilGone
from tests.spark_bridge.queryable.client_world import TOTALS, Cluster

USERS = 40


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(operator_plan, "DIRECTORY_SECONDS", 0.02)
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.1)
    made = Cluster(tmp_path)
    for n in (1, 2):
        made.batch(dict.fromkeys(range(USERS), (n, "a")))
    yield made
    made.close()


def registration(c: Cluster) -> QueryRegistration:
    return c.c.registries.runs.get(c.run).registration


def end(c: Cluster) -> None:
    """The query ends, as its driver says."""
    assert c.c.serve_ended(registration(c)).refusal is None
    for h in c.hosts:
        h.host.heartbeat()


def loaded(c: Cluster) -> int:
    return sum(len(h.host.cache.all()) for h in c.hosts)


def files(c: Cluster) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in (c.root / "ck").rglob("*") if p.is_file()}


@pytest.mark.parametrize("direct", [False, True])
def test_all_reads_continue_after_the_end(cluster: Cluster, direct: bool) -> None:
    with cluster.client(direct=direct) as before:
        assert before.get("totals", 3) == {"n": 2, "name": "a"}
        end(cluster)
        for client in (before, cluster.client(direct=direct)):
            assert client.get("totals", 3) == {"n": 2, "name": "a"}
            assert client.get("totals", 3, version=1) == {"n": 1, "name": "a"}
            assert client.get("totals", 3, query="run1") == {"n": 2, "name": "a"}
            assert client.get_many("totals", list(range(USERS))).num_rows == USERS
            assert client.count("totals") == len(client.scan("totals").to_pandas()) == USERS
            assert client.sql("select sum(n) as n from totals").df()["n"][0] == 2 * USERS
            (of,) = client.operators()
            assert (of["operator"], of["completed_version"], of["ended"]) == ("totals", 2, True)


def test_ended_query_does_not_change(cluster: Cluster) -> None:
    end(cluster)
    before = files(cluster)
    info = cluster.hosts[0].host.info
    with pytest.raises(RetiredRunError, match="is over; start the query again"):
        cluster.c.open_batch(OpenBatch("run1", 2, info.host_id, info.incarnation))
    with pytest.raises(RetiredRunError):
        cluster.c.acknowledge_many("run1", info.host_id, info.incarnation, [])
    for _ in range(3):
        for h in cluster.hosts:
            h.host.register()
            assert h.host.maintenance.do_maintenance() == []
        cluster.world.now += 100
        cluster.c.renew_leases(["run1"])
        cluster.c.maintain()
        cluster.c.expire()
    assert files(cluster) == before, "snapshots are due, and old versions are no longer kept, but the query has ended"


def test_unreported_last_batch_is_served(cluster: Cluster) -> None:
    cluster.batch({1: (3, "b")}, complete=False)
    end(cluster)
    assert cluster.client().get("totals", 1) == {"n": 3, "name": "b"}


def test_unread_partitions_are_unloaded_and_reloaded(cluster: Cluster) -> None:
    client = cluster.client()
    end(cluster)
    assert loaded(cluster) == cluster.partitions
    for h in cluster.hosts:
        h.host.maintenance.do_maintenance()
    assert client.get("totals", 3) == {"n": 2, "name": "a"}
    for h in cluster.hosts:
        h.host.maintenance.do_maintenance()
    assert loaded(cluster) == 1, "the one that was read"
    for h in cluster.hosts:
        h.host.maintenance.do_maintenance()
    assert loaded(cluster) == 0
    assert client.count("totals") == USERS
    assert loaded(cluster) == cluster.partitions


@pytest.mark.parametrize("driver_first", [False, True])
def test_restarted_coordinator_learns_of_the_ended_query_and_writes_nothing(
    cluster: Cluster, driver_first: bool
) -> None:
    client, last = cluster.client(), registration(cluster)
    end(cluster)
    before = files(cluster)
    if driver_first:
        cluster.port.c = cluster.world.coordinator(0)
        assert cluster.c.renew_leases(["run1"]) == ["run1"]
        assert cluster.c.serve_ended(last).refusal is None
        for h in cluster.hosts:
            h.host.register()
    else:
        cluster.replace_coordinator()
        assert cluster.c.renew_leases(["run1"]) == []
    assert client.get("totals", 3) == {"n": 2, "name": "a"}
    assert cluster.client().get_many("totals", list(range(USERS))).num_rows == USERS
    assert cluster.c.registries.runs.current() == [] and files(cluster) == before


def test_removed_checkpoint_is_not_recreated(cluster: Cluster) -> None:
    last = registration(cluster)
    end(cluster)
    shutil.rmtree(cluster.root / "ck")
    cluster.port.c = cluster.world.coordinator(0)
    assert "the state no longer exists" in str(cluster.c.serve_ended(last).refusal)
    assert not (cluster.root / "ck").exists()


def test_a_query_that_runs_again_replaces_its_ended_run(cluster: Cluster) -> None:
    client, last = cluster.client(), registration(cluster)
    end(cluster)
    cluster.start("run2")
    cluster.batch({1: (7, "c")})
    assert client.get("totals", 1) == {"n": 7, "name": "c"}
    assert client.get("totals", 2) == {"n": 2, "name": "a"}
    assert [o["ended"] for o in client.operators()] == [False]
    assert [q["run_id"] for q in cluster.c.describe()["queries"]] == ["run2"]
    assert "run run2 has replaced it" in str(cluster.world.coordinator(0).serve_ended(last).refusal)
    assert "is over" in str(cluster.c.serve_ended(last).refusal)
    assert cluster.c.locate("totals").run_id == "run2"


def test_the_end_of_a_run_that_was_replaced_is_its_end(cluster: Cluster) -> None:
    last = registration(cluster)
    cluster.start("run2")
    assert "replaced by run run2" in str(cluster.c.serve_ended(last).refusal)
    assert [q["run_id"] for q in cluster.c.describe()["queries"]] == ["run2"]


def test_serving_ends_when_the_driver_says_so_or_is_gone(cluster: Cluster) -> None:
    client = cluster.client(timeout=0.5)
    end(cluster)
    assert client.get("totals", 3) == {"n": 2, "name": "a"}
    cluster.world.now += 1000
    cluster.c.expire()
    for h in cluster.hosts:
        h.host.register()
    with pytest.raises(QueryEndedError, match="its driver sent no more heartbeats"):
        cluster.c.locate("totals")
    (over,) = cluster.c.registries.runs.ended()
    assert cluster.c.serve_ended(over.registration).refusal is None, "the driver is back"
    assert cluster.c.locate("totals").run_id == "run1"
    cluster.c.deactivate_instances("run1")
    with pytest.raises(QueryEndedError, match="its query ended"):
        cluster.c.locate("totals")


def test_queries_that_run_come_before_ended_ones_and_of_these_the_last(cluster: Cluster) -> None:
    end(cluster)
    for number in (2, 3):
        root = cluster.root / f"ck{number}"
        cluster.registration = {
            "query_id": f"q{number}",
            "name": f"name{number}",
            "checkpoint_location": str(root),
            "state_location": str(root / "statestore"),
        }
        cluster.start(f"run{number}")
        assert cluster.c.locate("totals").query_id == f"q{number}", "it runs"
        cluster.world.now += 1
        end(cluster)
    assert cluster.c.locate("totals").query_id == "q3"
    assert [o.query_id for o in cluster.c.operators()] == ["q3"]
    assert cluster.client().sql("select count(*) as n from totals").df()["n"][0] == 0
    assert cluster.c.locate("totals", "name").query_id == "q"


def test_a_watch_gives_all_versions_and_ends(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster.client().watch("totals", keys=[1], from_version=0) as changes:
        assert next(changes).version == 1
        end(cluster)
        monkeypatch.setattr(watch, "Attempts", UntilGone)
        assert [change.version for change in changes] == [2]
    assert list(cluster.client().watch("totals")) == [], "one that begins behind the end"
    with pytest.raises(StateVersionError, match="from_version=3"):
        next(cluster.client().watch("totals", from_version=3))


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_copy_of_a_checkpoint_runs_while_the_original_is_served(tmp_path, has_ended):
    """Both have one query id, and the same operators and partitions on the same hosts."""
    cluster = Cluster(tmp_path)
    try:
        cluster.batch({1: (1, "a"), 2: (1, "b")})
        if has_ended:
            end(cluster)
        cluster.start_copy("run2", "backup")
        cluster.batch({1: (2, "copy")})
        cluster.batch({3: (1, "copy")})
        client = cluster.client()
        for _ in range(2):  # the second answers come from cached locations
            assert [client.get("totals", user, query="run1") for user in (1, 3)] == [{"n": 1, "name": "a"}, None]
            assert client.get("totals", 1, query="run2") == {"n": 2, "name": "copy"}
            assert client.get("totals", 3, query="run2") == {"n": 1, "name": "copy"}
        if not has_ended:
            with pytest.raises(UnknownQueryError, match=r"\(q, run run1\).*\(q, run run2\).*or the run id") as refused:
                cluster.c.trigger_savepoint("one", "q", str(tmp_path / "savepoints"))
            (run,) = re.findall("run (run2)", str(refused.value))
            cluster.c.trigger_savepoint("one", run, str(tmp_path / "savepoints"))
            rows = client.sql('select c.n as new, o.n as old from run1.totals o join run2.totals c using ("user")')
            assert sorted(rows.fetchall()) == [(1, 1), (2, 1)]
        cluster.c.deactivate_instances("run2")
        for h in cluster.hosts:
            h.host.heartbeat()
        assert client.get("totals", 2, query="run1") == {"n": 1, "name": "b"}
    finally:
        cluster.close()


@pytest.mark.parametrize("query", [None, "name"])
def test_permanent_failures_are_reported_at_once(cluster: Cluster, query: str | None) -> None:
    """A client has had answers. Its query is over, and the operator's name is that of several others, or of none."""
    client = cluster.client()
    assert client.get("totals", 3, query=query) is not None
    cluster.c.deactivate_instances("run1")
    for name in ("ck2", "ck3") if query is None else ("ck2",):
        location = str(cluster.root / name)
        cluster.registration = {"checkpoint_location": location, "state_location": f"{location}/statestore"}
        cluster.registration |= {"query_id": name}
        cluster.start(f"run of {name}", {"totals" if query is None else "sums": OperatorSchema.of_rows(TOTALS)})
    for h in cluster.hosts:
        h.host.heartbeat()
    why = "say which with query=.*run of ck3" if query is None else "operators that exist: 'sums'"
    asked = cluster.port.c.locate
    calls = []
    cluster.port.locate = lambda *args: calls.append(args) or asked(*args)
    with pytest.raises(WrongOperatorError, match=why):
        client.get("totals", 3, query=query)
    assert 1 <= len(calls) < 5
