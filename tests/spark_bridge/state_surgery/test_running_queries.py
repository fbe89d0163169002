"""A running query forgets keys between two batches: with real coordinator, hosts and clients, without Ray and Spark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import StorageError
from coordinator_actor.exceptions import BatchHeldError, InvalidRequestError
from coordinator_actor.query.files_in_use import BUSY_SECONDS
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.surgery import forgetting
from spark_bridge.state_data.state_tables import state_table
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.transport.protocol import TaskIdentity
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import Cluster
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_surgery.traces import files_with

SECRET = "xK3vP9qL2mZ8wR5tY7uB"
OTHER = "aQ4sD6fG1hJ0kX2cV8bN"


class Port:
    """The way to the coordinator; ``before`` and ``after`` are done around a message."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}

    def __getattr__(self, name: str) -> Any:
        def send(*args: Any, **kwargs: Any) -> Any:
            self.before.pop(name, lambda: None)()
            answer = getattr(self._cluster.c, name)(*args, **kwargs)
            self.after.pop(name, lambda: None)()
            return answer

        return send


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def worked(cluster: Cluster) -> None:
    """Some versions, with snapshots of several partitions in one object, that have a secret of user 1."""
    cluster.batch({1: (1, SECRET), 2: (1, OTHER), 3: (1, "c"), 4: (1, "d"), 5: (1, "e")})
    for h in cluster.hosts:
        for upload in h.host.maintenance.do_maintenance():
            upload.result()
    cluster.batch({1: (2, SECRET), 2: (2, OTHER), 6: (1, "f")})
    cluster.batch({2: (3, OTHER), 7: (1, "g")})


def ck(cluster: Cluster) -> str:
    return str(cluster.root / "ck")


def forget(cluster: Cluster, port: Any = None, **more: Any) -> Any:
    return forget_keys("name", "totals", [1], coordinator=port or cluster.port, **more)


def check_forgotten(cluster: Cluster) -> None:
    """User 1 is in no version, no byte, and no answer; user 2 is as before."""
    assert files_with(ck(cluster), SECRET) == [] and files_with(ck(cluster), OTHER)
    there = StateVersions.look(find_state(ck(cluster))).readable
    for version in there[1:]:
        users = state_table(ck(cluster), "totals", version=version)["user"].to_pylist()
        assert 1 not in users and 2 in users, version
    for h in cluster.hosts:
        h.host.heartbeat()
    client = cluster.client()
    for version in (None, 1, there[-1]):
        found = [client.get("totals", user, version=version) for user in (1, 2)]
        assert [one is not None for one in found] == [False, True], version


def test_answers_versions_and_files_forget_and_the_query_goes_on(cluster):
    worked(cluster)
    assert files_with(ck(cluster), SECRET)
    client = cluster.client()
    assert client.get("totals", 1, version=1)["name"] == SECRET  # a copy that a host has loaded

    report = forget(cluster)

    assert (report.keys, report.version) == (1, 3)
    check_forgotten(cluster)
    cluster.batch({2: (4, OTHER), 8: (1, "h")})
    cluster.remove_old_versions()
    cluster.batch({1: (9, "anew")})
    assert client.get("totals", 1) == {"n": 9, "name": "anew"} and client.get("totals", 2)["n"] == 4
    cluster.replace_coordinator()
    cluster.start("run2")
    cluster.batch({2: (5, OTHER)})
    assert client.get("totals", 1)["n"] == 9 and client.get("totals", 2)["n"] == 5
    assert files_with(ck(cluster), SECRET) == []


def test_a_batch_under_way_is_waited_for_and_the_next_one_waits(cluster, monkeypatch):
    worked(cluster)
    port, steps, held = Port(cluster), [], threading.Event()
    batch = cluster.version
    cluster.world.plan_spark(batch)
    tasks = [TaskIdentity("run1", "totals", p, batch, f"a{p}", "t") for p in range(4)]
    for task in tasks:
        for h in cluster.hosts:
            h.host.open(task)

    def next_batch_waits() -> None:
        cluster.world.plan_spark(batch + 1)
        with pytest.raises(BatchHeldError, match=r"forget_keys of .*writes files"):
            cluster.hosts[0].host.open(TaskIdentity("run1", "totals", 0, batch + 1, "b", "t"))
        held.set()

    port.before["adopt_rewritten"] = next_batch_waits
    thread = threading.Thread(target=forget, args=(cluster, port), kwargs={"progress": steps.append})
    thread.start()
    eventually(lambda: any("waits for batch 3" in step for step in steps))
    cluster.batch({1: (3, SECRET), 2: (9, OTHER)})
    thread.join(PATIENCE)
    assert held.is_set() and not thread.is_alive()
    check_forgotten(cluster)
    cluster.batch({2: (10, OTHER)})
    assert cluster.client().get("totals", 2)["n"] == 10


def test_no_snapshot_is_taken_meanwhile_and_that_is_no_problem(cluster, caplog):
    worked(cluster)
    port = Port(cluster)

    def maintain() -> None:
        for h in cluster.hosts:
            for upload in h.host.maintenance.do_maintenance():
                upload.result()

    port.before["adopt_rewritten"] = maintain
    with caplog.at_level(logging.WARNING):
        forget(cluster, port)
    assert not caplog.records
    check_forgotten(cluster)


def test_a_coordinator_that_is_replaced_meanwhile_exchanges_nothing_and_all_begins_again(cluster):
    worked(cluster)
    port, steps = Port(cluster), []

    def replace() -> None:
        cluster.replace_coordinator()
        cluster.world.now += BUSY_SECONDS + 1  # which knows nothing of uploads that have begun before

    port.before["adopt_rewritten"] = replace
    forget(cluster, port, progress=steps.append)
    assert any(step.startswith("begins again: Run run1 has gone on") for step in steps)
    check_forgotten(cluster)


def test_an_answer_that_is_lost_is_looked_up(cluster):
    worked(cluster)

    def lost() -> None:
        raise StorageError("the answer is lost")

    port = Port(cluster)
    port.after["adopt_rewritten"] = lost
    forget(cluster, port)
    check_forgotten(cluster)
    port.before["adopt_rewritten"] = lost
    with pytest.raises(StorageError, match="is lost"):
        forget_keys("name", "totals", [2], coordinator=port)
    assert cluster.client().get("totals", 2)["n"] == 3, "nothing was changed"
    cluster.batch({3: (4, OTHER)})


def test_a_holder_that_dies_holds_nobody_up_for_long_and_changes_nothing(cluster):
    worked(cluster)
    holder = cluster.c.hold_query("name", "somebody", forgetting.HOLD_SECONDS)
    assert (holder.waits_for, holder.version) == (None, 3)
    with pytest.raises(InvalidRequestError, match="written anew by somebody already"):
        forget(cluster)
    with pytest.raises(BatchHeldError):
        cluster.batch({2: (4, "b")})
    cluster.world.now += forgetting.HOLD_SECONDS + 1
    for h in cluster.hosts:
        h.host.register()
    cluster.batch({2: (4, "b")})
    with pytest.raises(InvalidRequestError, match="has gone on"):
        cluster.c.adopt_rewritten("run1", "somebody", holder.epoch, written_record(cluster))
    assert cluster.client().get("totals", 1)["n"] == 2


def written_record(cluster: Cluster) -> str:
    """A record that would exchange files, as somebody has left it."""
    port, paths = Port(cluster), []

    def note(run_id: str, holder: str, epoch: int, path: str) -> None:
        paths.append(path)
        raise InvalidRequestError("no")

    port.__dict__["adopt_rewritten"] = note
    with pytest.raises(InvalidRequestError, match="no"):
        forget(cluster, port)
    return paths[-1]


def test_a_query_that_has_ended_and_is_answered_on_forgets(cluster):
    worked(cluster)
    registration = cluster.hosts[0].host.held.registration("run1")
    assert registration is not None
    cluster.c.serve_ended(registration)
    for h in cluster.hosts:
        h.host.heartbeat()
    client = cluster.client()
    assert client.get("totals", 1)["n"] == 2
    forget_keys(ck(cluster), "totals", [1], coordinator=cluster.port)
    check_forgotten(cluster)


def test_a_path_of_a_running_query_means_that_query(cluster):
    worked(cluster)
    forget_keys(ck(cluster), "totals", [1], coordinator=cluster.port)
    check_forgotten(cluster)
    cluster.batch({2: (4, OTHER)})  # whose coordinator has not been fenced off


def test_a_query_that_stops_with_a_savepoint_is_left_alone(cluster):
    worked(cluster)
    cluster.c.trigger_savepoint("request", "name", str(cluster.root / "savepoints"), stop=True)
    with pytest.raises(InvalidRequestError, match="stops with a savepoint"):
        forget(cluster)
