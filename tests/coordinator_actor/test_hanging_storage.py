"""The storage of one query hangs: its own messages wait, in a bounded number of threads, and no other message does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.coordinator_port import GROUPS, CoordinatorPort, Group, query_of
from coordinator_actor.exceptions import BatchHeldError, InvalidRequestError, QueryBusyError, UnknownRunError
from coordinator_actor.handlers import hosts as host_messages
from coordinator_actor.messages import HostReport, OpenBatch, QueryRegistration
from coordinator_actor.threads import MAX_WAITING_MESSAGES, THREADS_PER_QUERY, QueryThreads
from tests.coordinator_actor.coordinator_world import HangingStorage, World
from tests.patience import HANG, PATIENCE

HOSTS, FEW_HOSTS, PARTITIONS = 100, 8, 20


class Cluster(CoordinatorPort):
    """A coordinator with the threads that its actor has, and a way to it."""

    def __init__(self, world: World, storage: HangingStorage) -> None:
        self.queries = QueryThreads()
        self.background: list[Any] = []
        conf = CoordinatorConf(report_timeout=0.0, host_timeout=10.0, savepoint_timeout=30.0)
        self.coordinator = Coordinator(
            lambda: world.now, storage.open, conf, self.background.append, apart=self.queries.submit
        )

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.coordinator.submit(method, args, kwargs)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.begin(method, *args, **kwargs).result(PATIENCE)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def storage(world: World) -> HangingStorage:
    return HangingStorage(world.storage)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_messages, "TAKE_UP_SECONDS", 0.01)


@pytest.fixture
def cluster(world: World, storage: HangingStorage) -> Iterator[Cluster]:
    made = Cluster(world, storage)
    for i in range(HOSTS):
        made.register_host(world.host(i), HostReport())
    for registration in (query(world, "hanging"), query(world, "healthy")):
        assert made.register_query(registration).refusal is None
    yield made


def query(world: World, name: str) -> QueryRegistration:
    root = world.root / name
    return world.registration(
        name,
        PARTITIONS,
        name=name,
        query_id=f"q-{name}",
        checkpoint_location=str(root),
        state_location=f"{root}/statestore",
    )


def location(world: World) -> str:
    return query(world, "hanging").checkpoint_location


def occupied(threads: QueryThreads) -> dict[str, tuple[int, int]]:
    """Return how many threads are at work for each query, and how much work waits."""
    with threads._lock:
        return {query: (lane.running, len(lane.waiting)) for query, lane in threads._lanes.items()}


def wait_until_free(cluster: Cluster, futures: list[Future[Any]]) -> None:
    for future in futures:
        with pytest.raises(InvalidRequestError, match="commits/0 does not exist"):
            future.result(PATIENCE)


def test_everything_else_is_answered_while_all_hosts_wait_for_one_query(
    world: World, storage: HangingStorage, cluster: Cluster
) -> None:
    with storage.hangs(location(world)):
        waiting = [cluster.begin("open_batch", OpenBatch("hanging", 1, f"h{i}", "a")) for i in range(HOSTS)]
        storage.wait_for_call()
        for _ in range(3):
            world.now += 9
            orders = [cluster.heartbeat_host(f"h{i}", "a", {"hanging": 0, "healthy": 0}) for i in range(HOSTS)]
            assert all(o.known for o in orders)
            assert cluster.renew_leases(["hanging", "healthy"]) == []
            cluster.coordinator.expire()
        assert len(cluster.describe()["hosts"]) == HOSTS
        for name in ("healthy", "hanging"):
            assert len({o.host_id for o in cluster.locate("op", name).owners}) == PARTITIONS
            assert cluster.open_for_read(name, "op", 3).version == 0
            oracle = cluster.get_kv_state_location_oracle(f"q-{name}")
            assert oracle is not None and oracle.num_partitions("op") == PARTITIONS
        assert cluster.open_batch(OpenBatch("healthy", 0, "h7", "a")).version == 0
        assert cluster.rebalance() == {"hanging": 0, "healthy": 0}
        assert occupied(cluster.queries)["hanging"] == (THREADS_PER_QUERY, HOSTS - THREADS_PER_QUERY)
        assert not any(future.done() for future in waiting)
    wait_until_free(cluster, waiting)


def test_a_coordinator_that_starts_while_a_storage_hangs_takes_up_the_other_queries(
    world: World, storage: HangingStorage, cluster: Cluster
) -> None:
    report = HostReport(
        (query(world, "hanging"), query(world, "healthy")),
        held={"hanging": {"op": [3]}, "healthy": {"op": [3]}},
    )
    with storage.hangs(location(world)):
        again = Cluster(world, storage)
        for i in range(FEW_HOSTS):
            again.register_host(world.host(i), report)
        storage.wait_for_call()
        assert again.open_batch(OpenBatch("healthy", 0, "h7", "a")).owners
        assert again.locate("op", "healthy").owners[3].host_id == "h0"
        # The reports about the other query are in progress, so the hosts are not asked for them again.
        orders = [again.heartbeat_host(f"h{i}", "a", {"hanging": 0, "healthy": 0}) for i in range(FEW_HOSTS)]
        assert all(o.known and o.unknown_runs == {"hanging": False} for o in orders)
        with pytest.raises(UnknownRunError):
            again.completed("hanging", "h0")
        early = again.begin("open_batch", OpenBatch("hanging", 0, "h7", "a"))
        assert not early.done()
    assert early.result(PATIENCE).hosts, "a task that came before the query was known has waited for it"
    assert again.locate("op", "hanging").owners[3].host_id in {f"h{i}" for i in range(FEW_HOSTS)}


def test_a_report_that_cannot_be_processed_is_requested_again(
    world: World,
    storage: HangingStorage,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The version is prepared by the reports, and its manifest cannot be written."""
    monkeypatch.setattr(host_messages, "TAKE_UP_SECONDS", PATIENCE)
    again = Cluster(world, storage)
    messages = []
    for p in range(PARTITIONS):
        owner = cluster.open_for_read("healthy", "op", p).owner
        cluster.open_batch(OpenBatch("healthy", 0, owner.host_id, owner.incarnation))
        grant = cluster.open_for_read("healthy", "op", p)
        messages.append(world.stage(grant, p, 0, "t", "healthy"))
    report = HostReport((query(world, "healthy"),), tuple(messages), {"healthy": 0})

    def full(path: str) -> None:
        if path.startswith("manifests/"):
            raise OSError("disk full")

    world.put_hook = full
    again.register_host(world.host(0), report)
    assert "must report run healthy again" in caplog.text and "disk full" in caplog.text
    assert again.coordinator.counts()[0] == 1, "the host is known"
    orders = again.heartbeat_host("h0", "a", {"healthy": 0})
    assert orders.known and orders.unknown_runs == {"healthy": True}
    world.put_hook = None
    again.report_runs("h0", "a", report)
    assert again.heartbeat_host("h0", "a", {"healthy": 0}).unknown_runs == {}
    world.commit_spark(0, "healthy")
    assert again.batch_committed("healthy", 0) is True
    assert [m["version"] for m in world.manifests_of("healthy")] == [1]


@pytest.mark.parametrize("waits_for", ["a thread", "storage"])
def test_a_late_report_of_a_stopped_run_changes_nothing(
    world: World, storage: HangingStorage, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """A coordinator that was just started takes up a report when the driver stops the query."""
    again = Cluster(world, storage)
    epochs = world.root / "healthy/statestore/epochs"
    before = sorted(epochs.iterdir())
    report = HostReport((query(world, "healthy"),), held={"healthy": {"op": [3]}})
    if waits_for == "a thread":
        monkeypatch.setattr(again.queries, "_threads", 1)
        go_on = threading.Event()
        again.queries.submit("the reports of run healthy", lambda: go_on.wait(HANG))
        again.register_host(world.host(0), report)
        assert again.call("deactivate_instances", "healthy") is True
        go_on.set()
    else:
        with storage.hangs(str(world.root / "healthy")):
            again.register_host(world.host(0), report)
            storage.wait_for_call()
            assert again.call("deactivate_instances", "healthy") is True
    while occupied(again.queries):
        pass
    assert again.coordinator.registries.runs.current() == []
    assert again.heartbeat_host("h0", "a", {"healthy": 0}).unload_runs == ("healthy",)
    if waits_for == "a thread":
        assert sorted(epochs.iterdir()) == before, "the state was not claimed"


def test_a_query_with_too_many_reports_keeps_no_host_from_registering(
    world: World, storage: HangingStorage, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Cluster(world, storage)
    report = HostReport((query(world, "hanging"), query(world, "healthy")), held={"healthy": {"op": [3]}})
    with storage.hangs(location(world)):
        again.register_host(world.host(0), report)
        storage.wait_for_call()
        while list(occupied(again.queries)) != ["the reports of run hanging"]:
            pass
        monkeypatch.setattr(again.queries, "_threads", 1)
        monkeypatch.setattr(again.queries, "_most_waiting", 0)
        again.register_host(world.host(1), report)
        orders = again.heartbeat_host("h1", "a", {"hanging": 0, "healthy": 0})
        assert orders.unknown_runs == {"hanging": True}, "it is asked for again"
        assert again.coordinator.counts()[0] == 2 and again.locate("op", "healthy").owners


def test_leases_and_maintenance_wait_for_no_savepoint_that_cannot_be_given_up(
    world: World, storage: HangingStorage, cluster: Cluster
) -> None:
    c = cluster.coordinator
    registration = world.registration("run1", 2)
    c.register_query(registration)
    world.run_batch(c, 0)
    world.open(c, 1)
    cluster.trigger_savepoint("request", "run1", stop=True)
    with pytest.raises(BatchHeldError):
        world.run_batch(c, 1)
        world.open(c, 2)
    world.now += 31
    for i in range(HOSTS):
        cluster.heartbeat_host(f"h{i}", "a")

    def look() -> None:
        c.expire()
        world.now += 60
        c.maintain()

    with storage.hangs(registration.state_location):
        looking = threading.Thread(target=look)
        looking.start()
        storage.wait_for_call()
        looking.join(PATIENCE)
        assert not looking.is_alive()
        assert cluster.locate("op", "healthy").owners
    cluster.call("batch_committed", "run1", 0)
    while occupied(cluster.queries):
        pass
    assert world.open(c, 2).version == 2


def test_the_threads_and_waiting_calls_of_a_query_are_bounded() -> None:
    threads, may_end, began = QueryThreads(threads=2, most_waiting=3), threading.Event(), threading.Semaphore(0)

    def work() -> str:
        began.release()
        assert may_end.wait(HANG)
        return "done"

    futures = [threads.submit("slow", work) for _ in range(5)]
    assert began.acquire(timeout=PATIENCE) and began.acquire(timeout=PATIENCE)
    assert occupied(threads) == {"slow": (2, 3)}
    with pytest.raises(QueryBusyError, match="3 messages about slow wait already, and 2 are being answered"):
        threads.submit("slow", work)
    assert threads.submit("other", lambda: 7).result(PATIENCE) == 7
    may_end.set()
    assert [future.result(PATIENCE) for future in futures] == ["done"] * 5

    def failing() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        threads.submit("slow", failing).result(PATIENCE)
    assert threads.submit("slow", lambda: 8).result(PATIENCE) == 8
    assert MAX_WAITING_MESSAGES > THREADS_PER_QUERY


@pytest.mark.parametrize("message", [m for m, group in GROUPS.items() if group is Group.QUERIES])
def test_messages_that_may_wait_for_storage_say_which_query_they_are_about(message: str, world: World) -> None:
    record = OpenBatch("run9", 0, "h0", "a")
    args: dict[str, tuple[Any, ...]] = {
        "register_query": (record,),
        "serve_ended": (record,),
        "look_up": ("op", "run9", "by", 0),
        "open_batch": (record,),
        "snapshot_uploaded": (record,),
        "savepoint_exported": (record,),
        "trigger_savepoint": ("request", "run9"),
    }
    named = message in ("issue_token", "list_tokens", "revoke_token")
    assert query_of(message, args.get(message, ("run9",)), {}) == (message if named else "run9")
    assert query_of("rebalance", (), {}) == "rebalance"
