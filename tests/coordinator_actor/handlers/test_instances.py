"""Owners of the partitions of a running query, their moves, and the coordinator's answers about a run, without Ray."""

from __future__ import annotations

import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.conf import StateStoreId, StateStoreProviderId
from coordinator_actor.checkpoints.checkpoint_stats import SnapshotLagConf
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.exceptions import StaleOwnerError, UnknownHostError, UnknownQueryError
from coordinator_actor.messages import Acknowledge, Acknowledged, KvStateLocationOracle, Refused
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.coordinator_world import World, acknowledge, run_of
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.patience import HANG, PATIENCE


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[..., Stream]]:
    made: list[Stream] = []

    def make(batches: int = 1, *, n: int = 4, **kwargs: Any) -> Stream:
        made.append(Stream(tmp_path / str(len(made)), n, **kwargs))
        made[-1].batches(0, batches)
        return made[-1]

    yield make
    for one in made:
        one.close()


def instance(s: Stream, p: int, run: str = "run1") -> StateStoreProviderId:
    return StateStoreProviderId(StateStoreId(s.registration.checkpoint_location, "op", p), run)


def owners(s: Stream, run: str = "run1") -> list[str]:
    return [s.c.open_for_read(run, "op", p).owner.host_id for p in range(s.n)]


def loaded(s: Stream) -> dict[int, list[int]]:
    return {i: sorted(held.partition for held in host.cache.instances.values()) for i, host in s.hosts.items()}


def pass_time(s: Stream, seconds: float) -> None:
    """Let time pass with heartbeats of driver and hosts; the coordinator looks at its runs."""
    while seconds > 0:
        s.world.now += min(seconds, 5.0)
        seconds -= 5.0
        for host in s.hosts.values():
            s.c.heartbeat_host(host.info.host_id, host.info.incarnation)
        s.c.driver_heartbeat("run1")
        s.c.expire()


def warnings(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and words in r.getMessage()]


# -- instances (Spark) -------------------------------------------------------------------------


def test_the_partitions_of_a_run_are_active_where_they_are_owned_until_it_ends(stream):
    s = stream(0)
    ids = [instance(s, p) for p in range(4)]
    assert s.c.get_locations(ids) == [None] * 4
    s.batch(0)
    names = owners(s)
    assert s.c.get_locations(ids) == [f"executor_127.0.0.1_{h}" for h in names]
    assert [s.c.get_location(i) for i in ids] == s.c.get_locations(ids)
    assert [[s.c.verify_if_instance_active(i, h) for h in ("h0", "h1")] for i in ids] == [
        [h == "h0", h == "h1"] for h in names
    ]
    assert s.c.get_location(instance(s, 4)) is None and s.c.get_location(instance(s, 0, "run2")) is None
    assert s.c.deactivate_instances("run1") is True
    assert s.c.get_locations(ids) == [None] * 4
    assert not any(s.c.verify_if_instance_active(i, h) for i in ids for h in ("h0", "h1"))
    s.heartbeat()
    assert loaded(s) == {0: [], 1: []}


def test_a_newer_run_has_new_instances_and_the_older_ones_are_inactive(stream):
    s = stream()
    s.c.register_query(msgspec.structs.replace(s.registration, run_id="run2"))
    assert s.c.get_locations([instance(s, p) for p in range(4)]) == [None] * 4
    found = s.c.open_for_read("run2", "op", 0).owner
    assert s.c.get_location(instance(s, 0, "run2")) == f"executor_127.0.0.1_{found.host_id}"


@pytest.mark.parametrize("how", ["driver", "session"])
def test_nothing_is_active_of_a_run_whose_driver_is_gone(stream, how):
    s = stream()
    if how == "session":
        assert s.c.unregister_session("s") is False
    else:
        s.world.now += 61
        s.c.expire()
    assert s.c.get_locations([instance(s, p) for p in range(4)]) == [None] * 4
    assert s.c.describe()["instances"] == [] and s.c.describe()["queries"] == []


def test_a_host_gets_its_partitions_of_the_runs_that_it_asks_about(stream):
    s = stream(0)
    assert s.c.verify_instances("h0", "a", ("run1", "nobody")) == {}, "not known yet"
    s.batch(0)
    named = {i: s.c.verify_instances(f"h{i}", "a", ("run1", "nobody")) for i in (0, 1)}
    assert named == {i: {"run1": {"op": loaded(s)[i]}} for i in (0, 1)}
    s.add_host(2)
    assert s.c.verify_instances("h2", "a", ("run1",)) == {"run1": {"op": []}}
    assert s.c.verify_instances("h0", "a", ()) == {}
    with pytest.raises(UnknownHostError):
        s.c.verify_instances("h0", "another", ("run1",))


def test_a_host_unloads_at_its_maintenance_moved_partitions_only(stream):
    s = stream(hosts=1)
    assert loaded(s) == {0: [0, 1, 2, 3]}
    s.hosts[0].maintenance.do_maintenance()
    assert loaded(s) == {0: [0, 1, 2, 3]}
    s.add_host(1)
    s.heartbeat_until(lambda: sorted(owners(s)) == ["h0", "h0", "h1", "h1"])
    s.begin(1, dict.fromkeys(range(30), 1))
    moved = loaded(s)[1]
    assert len(moved) == 2 and loaded(s)[0] == [0, 1, 2, 3]
    s.commit(1)
    s.at[2] = {**s.at[1], **dict.fromkeys(range(30), 1)}
    s.hosts[0].maintenance.do_maintenance()
    assert loaded(s) == {0: [p for p in range(4) if p not in moved], 1: moved}
    assert s.rows() == s.at[2]


def test_a_coordinator_that_does_not_know_the_owners_yet_has_nothing_unloaded(stream):
    s = stream()
    before = loaded(s)
    s.restart_coordinator()
    for host in s.hosts.values():
        host.maintenance.do_maintenance()
    assert loaded(s) == before and sum(map(len, before.values())) == 4
    s.batch(1)
    assert loaded(s) == before, "the owners are those that reported"


# -- owners ------------------------------------------------------------------------------------


def test_rebalancing_a_quiet_stream_moves_only_the_new_hosts_share(stream):
    s = stream(hosts=1, n=6)
    before = owners(s)
    s.add_host(1)
    assert s.c.rebalance() == {"run1": 3}
    after = owners(s)
    assert sorted(after) == ["h0"] * 3 + ["h1"] * 3 and set(before) == {"h0"}
    assert s.c.get_locations([instance(s, p) for p in range(6)]) == [f"executor_127.0.0.1_{h}" for h in after]
    assert s.rows() == s.at[1]
    s.hosts[0].maintenance.do_maintenance()
    assert loaded(s) == {i: [p for p in range(6) if after[p] == f"h{i}"] for i in (0, 1)}
    assert s.c.rebalance() == {"run1": 0}
    s.batch(1)
    assert owners(s) == after and s.rows() == s.at[2]


def test_rebalancing_waits_for_the_batch_that_is_under_way(stream):
    s = stream(hosts=1)
    s.begin(1, {1: 1}, range(2))
    s.add_host(1)
    assert s.c.rebalance() == {"run1": 0}
    assert set(owners(s)) == {"h0"}
    s.begin(1, {1: 1}, range(2, 4))
    assert s.c.rebalance() == {"run1": 0}, "Spark has not committed it"
    s.commit(1)
    assert s.c.rebalance("name") == {"run1": 2}


def test_only_the_query_that_is_named_is_rebalanced(stream):
    s = stream(hosts=1)
    s.add_host(1)
    assert s.c.rebalance("another") == {} and set(owners(s)) == {"h0"}
    for name in ("q", "run1"):
        assert list(s.c.rebalance(name)) == ["run1"]
    assert sorted(owners(s)) == ["h0", "h0", "h1", "h1"]


def test_nothing_is_owned_before_anything_is_asked(stream):
    s = stream(0)
    assert s.c.rebalance() == {"run1": 0}
    s.c.deactivate_instances("run1")
    assert s.c.rebalance() == {}


@pytest.mark.parametrize("when", ["between batches", "in a batch"])
def test_the_partitions_of_a_lost_host_move_and_the_others_stay(stream, when):
    s = stream(hosts=3, n=9)
    before = owners(s)
    gone = [p for p in range(9) if before[p] == "h2"]
    rows = {k: -k for k in range(0, 30, 4)}
    if when == "in a batch":
        s.begin(1, rows, iter(p for p in range(9) if p not in gone[1:]))  # it has committed one of its partitions
    s.lose(2)
    if when == "in a batch":
        s.begin(1, rows, iter(gone[1:]))  # the tasks that failed with it are run again
        s.commit(1)
        s.at[2] = {**s.at[1], **rows}
    else:
        s.batch(1, rows)
    after = owners(s)
    assert "h2" not in after and {p for p in range(9) if before[p] != after[p]} == set(gone)
    assert sorted(map(after.count, ("h0", "h1"))) == [4, 5]
    assert s.rows() == s.at[2]
    assert s.c.get_locations([instance(s, p) for p in range(9)]) == [f"executor_127.0.0.1_{h}" for h in after]


def test_reports_of_a_returning_host_about_moved_partitions_are_ignored(stream):
    s = stream()
    (of_h1, *_) = loaded(s)[1]
    away = s.hosts[1]
    s.lose(1)
    s.begin(1, {1: 5}, range(4))
    task = TaskIdentity("run1", "op", of_h1, 1, uuid.uuid4().hex, uuid.uuid4().hex)
    away.cache.registrations.setdefault("run1", s.registration)
    away.register()
    assert away.open(task).redirect == s.hosts[0].info.address
    message = next(a for a in s.hosts[0].cache.report().pending if a.partition == of_h1)
    with pytest.raises(StaleOwnerError, match="h0 does"):
        acknowledge(s.c, msgspec.structs.replace(message, host_id="h1"))


def test_a_restarted_host_keeps_its_partitions(stream):
    s = stream()
    before = owners(s)
    s.kill(0)
    s.add_host(0, "b")
    s.batch(1)
    assert owners(s) == before and s.rows() == s.at[2]
    assert [s.c.open_for_read("run1", "op", p).owner.incarnation for p in range(4)] == [
        "b" if h == "h0" else "a" for h in before
    ]


# -- the location oracle -----------------------------------------------------------------------


def test_the_oracle_agrees_with_the_coordinator_on_every_key_group(stream):
    s = stream()
    oracle = s.c.get_kv_state_location_oracle("q")
    assert isinstance(oracle, KvStateLocationOracle)
    assert (oracle.query_id, oracle.run_id, oracle.name, oracle.completed_version) == ("q", "run1", "name", 1)
    for group in range(oracle.key_groups):
        p = oracle.partition_of("op", group)
        assert oracle.location_of("op", group) == s.c.open_for_read("run1", "op", p).owner
    assert oracle.owners("op") == s.c.locate("op").owners and oracle.num_partitions("op") == 4
    assert msgspec.json.decode(msgspec.json.encode(oracle), type=KvStateLocationOracle) == oracle
    s.lose(1)
    s.batch(1)
    after = s.c.get_kv_state_location_oracle("q")
    assert after is not None and after.completed_version == 2
    assert {h.host_id for h in after.owners("op")} == {"h0"} != {h.host_id for h in oracle.owners("op")}


def test_a_query_that_does_not_run_has_no_oracle(stream):
    s = stream()
    assert s.c.get_kv_state_location_oracle("another") is None
    s.c.register_query(msgspec.structs.replace(s.registration, run_id="run2"))
    assert s.c.get_kv_state_location_oracle("run1") is None, "a newer run has replaced it"
    for job in ("q", "run2", s.registration.state_location):
        oracle = s.c.get_kv_state_location_oracle(job)
        assert oracle is not None and oracle.run_id == "run2"
    s.c.deactivate_instances("run2")
    assert s.c.get_kv_state_location_oracle("q") is None


# -- what is acknowledged together -------------------------------------------------------------


def staged(s: Stream, p: int, batch: int, attempt: str) -> Acknowledge:
    """Make changes of a partition durable and return the acknowledgement, as a host does before it sends it."""
    return s.world.stage(s.c.open_for_read("run1", "op", p), p, batch, attempt)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the missing one first", "the repeated one first"])
def test_a_repeated_attempt_in_the_message_of_the_last_missing_one_counts(stream, order):
    """The last acknowledged attempt counts, whatever it comes together with."""
    s = stream(n=2, hosts=1)
    s.hosts[0].open(TaskIdentity("run1", "op", 0, 1, "x", uuid.uuid4().hex))
    acknowledge(s.c, staged(s, 1, 1, "first"))
    both = [staged(s, 0, 1, "missing"), staged(s, 1, 1, "repeated")]
    answers = s.c.acknowledge_many("run1", "h0", "a", [both[i] for i in order])
    newest = s.log().head()
    assert newest is not None and newest.version == 2
    named = {p: e.attempt for p, e in newest.operators["op"].partitions.items()}
    assert named == {0: "missing", 1: "repeated"}, answers


def test_a_wrong_one_among_many_is_refused_alone(stream):
    s = stream(n=2, hosts=1)
    s.hosts[0].open(TaskIdentity("run1", "op", 0, 1, "x", uuid.uuid4().hex))
    good = [staged(s, p, 1, "t") for p in (0, 1)]
    wrong = [
        msgspec.structs.replace(good[0], base="elsewhere"),
        msgspec.structs.replace(good[0], partition=7),
        msgspec.structs.replace(good[0], version=5),
    ]
    answers = s.c.acknowledge_many("run1", "h0", "a", [good[0], *wrong, good[1]])
    assert [a.error if isinstance(a, Refused) else None for a in answers] == [
        None, "LineageError", "InvalidRequestError", "StaleBatchError", None,
    ]  # fmt: skip
    assert isinstance(answers[4], Acknowledged) and answers[4].manifest_id == 2
    assert s.c.acknowledge_many("run1", "h0", "a", [good[1]]) == (Acknowledged(2, 2),), "its answer was lost"
    assert sorted(s.log().manifests) == [1, 2]


# -- figures and warnings ----------------------------------------------------------------------


def test_the_figures_of_batches(stream):
    s = stream(2)
    s.begin(2, dict.fromkeys(range(20), 1), range(1))
    s.world.now += 3
    s.begin(2, dict.fromkeys(range(20), 1), range(1, 3))
    figures = s.c.checkpoint_stats("name")["checkpoints"]
    assert figures["counts"] == {"triggered": 3, "in_progress": 1, "completed": 2, "failed": 0}
    assert [(p["acknowledged"], p["tasks"]) for p in figures["in_progress"]] == [(3, 4)]
    s.begin(2, dict.fromkeys(range(20), 1), range(3, 4))
    figures = s.c.checkpoint_stats("q")["checkpoints"]
    assert [h["id"] for h in figures["history"]] == [1, 2, 3] == sorted(s.log().manifests)
    assert (figures["latest"]["duration"], figures["latest"]["tasks"]) == (3.0, 4)
    assert figures["latest"]["acknowledging"] == 3.0
    assert (figures["overall"]["duration"]["max"], figures["overall"]["duration"]["min"]) == (3.0, 0.0)
    assert set(figures["recent"]["duration"]) == {"p50", "p90", "p99", "max"}
    assert s.c.checkpoint_stats("run1")["savepoints"]["counts"]["triggered"] == 0
    with pytest.raises(UnknownQueryError):
        s.c.checkpoint_stats("nobody")


@pytest.mark.parametrize("which", ["size", "duration"])
def test_the_figures_name_every_partition_that_took_part(stream, which):
    """The first one as well, whose acknowledgement begins the checkpoint."""
    s = stream()
    figures = run_of(s.c, "run1").stats.task_stats()
    entries = s.log().manifests[1].operators["op"].partitions
    assert figures is not None and len(figures["op"][which]) == 4
    if which == "size":
        assert figures["op"]["size"] == [entries[p].changelog.size for p in range(4)]
        assert s.c.checkpoint_stats("q")["checkpoints"]["latest"]["size"] == sum(figures["op"]["size"])
    else:
        assert all(seconds > 0 for seconds in figures["op"]["duration"])


def test_a_slow_batch_is_warned_of_once_and_the_missing_partitions_are_named(stream, caplog):
    s = stream()
    s.begin(1, {1: 1}, range(1))
    pass_time(s, 595)
    assert warnings(caplog, "not been acknowledged") == []
    pass_time(s, 30)
    (warning,) = warnings(caplog, "not been acknowledged")
    assert re.search(r"Batch 1 of run run1 .* 60\d s", warning) and "3 of 4" in warning, warning
    assert "op/1" in warning and "op/0" not in warning
    s.begin(1, {1: 1}, range(1, 4))
    s.commit(1)
    pass_time(s, 700)
    assert len(warnings(caplog, "not been acknowledged")) == 1, "a quiet stream is not slow"
    s.begin(2, {1: 1}, range(2))
    pass_time(s, 620)
    assert len(warnings(caplog, "not been acknowledged")) == 2


def test_a_batch_without_a_finished_partition_is_slow_as_well(stream, caplog):
    s = stream()
    for host in s.hosts.values():
        host.open(TaskIdentity("run1", "op", 0, 1, uuid.uuid4().hex, uuid.uuid4().hex))
    pass_time(s, 620)
    assert len(warnings(caplog, "not been acknowledged")) == 1


def lag_stream(stream: Callable[..., Stream]) -> Stream:
    lag = SnapshotLagConf(
        multiplier_for_min_version_diff_to_log=1,
        multiplier_for_min_time_diff_to_log=2,
        deltas_per_snapshot=3,
        snapshot_lag_report_interval=50.0,
    )
    # The time between two rounds of maintenance is the query's.
    s = stream(0, n=2, hosts=0, conf=CoordinatorConf(snapshot_lag=lag), maintenance_interval=10.0)
    s.add_host(0, deltas_per_snapshot=1)
    return s


def upload(s: Stream, *partitions: int) -> None:
    """What maintenance does, for some partitions only."""
    s.heartbeat()
    for held in list(s.hosts[0].cache.instances.values()):
        if held.partition in partitions:
            s.hosts[0].maintenance.upload_snapshots([held])


def test_partitions_whose_snapshots_lag_behind_are_named(stream, caplog):
    s = lag_stream(stream)
    s.batches(0, 4)
    pass_time(s, 15)
    assert warnings(caplog, "Lag") == [], "not for long enough yet"
    upload(s, 0)
    pass_time(s, 10)
    (warning,) = warnings(caplog, "Snapshot Lag Report")
    assert "queryRunId=run1" in warning and "1 of 2 at version 4" in warning
    assert "op/1 (no snapshot, 4 versions" in warning and "op/0" not in warning
    pass_time(s, 30)
    assert len(warnings(caplog, "Lag")) == 1
    upload(s, 1)
    pass_time(s, 60)
    assert len(warnings(caplog, "Lag")) == 1, "both have caught up"
    s.batches(4, 8)
    upload(s, 1)
    pass_time(s, 60)
    assert "op/0 (snapshot of version 4, 4 versions" in warnings(caplog, "Lag")[-1]
    assert "op/1" not in warnings(caplog, "Lag")[-1]


def test_a_run_that_is_over_lags_behind_nothing(stream, caplog):
    s = lag_stream(stream)
    s.batches(0, 8)
    s.c.deactivate_instances("run1")
    s.world.now += 500
    s.c.expire()
    assert warnings(caplog, "Lag") == []


def test_looking_does_not_wait_for_a_run_that_is_busy(tmp_path):
    """A call that waits for the storage holds the run's lock; the look at the leases must not wait for it."""
    world = World(tmp_path)
    c = world.coordinator()
    c.register_query(world.registration())
    run = run_of(c, "run1")
    go, at = threading.Event(), threading.Event()

    def hold() -> None:
        with run.lock:
            at.set()
            go.wait(HANG)

    holder, looking = threading.Thread(target=hold), threading.Thread(target=c.expire)
    holder.start()
    assert at.wait(PATIENCE)
    looking.start()
    looking.join(PATIENCE)
    stuck = looking.is_alive()
    go.set()
    holder.join()
    looking.join()
    assert not stuck
