"""A running query forgets keys between two batches: with real coordinator, hosts and clients, without Ray and Spark."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import StorageError, VersionNotFoundError
from backends.formats.manifest import Manifest
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor import forgetting
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.fencing import RecordFiles
from coordinator_actor.durable.manifests import ManifestLog, RewrittenFiles
from coordinator_actor.exceptions import BatchHeldError, FencedError, InvalidRequestError, LapsedHoldError
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.run.holds import BUSY_SECONDS, LISTED_EVERY, UPLOAD
from coordinator_actor.run.query_state import RECORDS_EVERY
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.transport.protocol import TaskIdentity
from tests.effort import effort
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import Cluster, Grouping, HeardPort, TwoCoordinators
from tests.spark_bridge.queryable.memory_reads import eventually
from tests.spark_bridge.state_surgery.surgery_steps import files_with

SECRET = "xK3vP9qL2mZ8wR5tY7uB"
OTHER = "aQ4sD6fG1hJ0kX2cV8bN"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Grouping(tmp_path)
    yield made
    made.close()


def snapshots(cluster: Cluster) -> None:
    for h in cluster.hosts:
        for upload in h.host.maintenance.do_maintenance():
            upload.result()


def worked(cluster: Cluster) -> None:
    """Some versions that have a secret of user 1; changelogs and snapshots of several partitions are in one object."""
    cluster.batch({1: (1, SECRET), 2: (1, OTHER), 3: (1, "c"), 4: (1, "d"), 5: (1, "e")})
    snapshots(cluster)
    for n in range(2, 6):
        cluster.batch({1: (n, SECRET), 2: (n, OTHER), 6: (1, "f")})
    snapshots(cluster)
    cluster.batch({2: (6, OTHER), 7: (1, "g")})
    together = {path.suffix for path in (cluster.root / "ck/statestore/groups").iterdir()}
    assert together == {".changelogs", ".snapshots"}


def ck(cluster: Cluster) -> str:
    return str(cluster.root / "ck")


def forget(cluster: Cluster, port: Any = None, **more: Any) -> Any:
    return forget_keys("name", "totals", [1], coordinator=port or HeardPort(cluster), **more)


def check_forgotten(cluster: Cluster) -> None:
    """User 1 is in no version, no byte, and no answer; user 2 is as before.

    A usual run reads the first and the last version: no byte is that of any other.
    """
    assert files_with(ck(cluster), SECRET) == [] and files_with(ck(cluster), OTHER)
    there = StateVersions.look(find_state(ck(cluster))).readable
    for version in effort((there[1], there[-1]), there[1:]):
        users = state_table(ck(cluster), "totals", version=version)["user"].to_pylist()
        assert 1 not in users and 2 in users, version
    client = cluster.client()
    for version in (None, there[1], there[-1]):
        found = [client.get("totals", user, version=version) for user in (1, 2)]
        assert [one is not None for one in found] == [False, True], version


def test_forgotten_key_leaves_answers_versions_and_files(cluster):
    worked(cluster)
    assert files_with(ck(cluster), SECRET)
    client = cluster.client()
    assert client.get("totals", 1, version=1)["name"] == SECRET  # a copy that a host has loaded

    report = forget(cluster)

    assert (report.keys, report.version) == (1, 6)
    check_forgotten(cluster)
    cluster.batch({2: (7, OTHER), 8: (1, "h")})
    cluster.remove_old_versions()
    check_forgotten(cluster)
    cluster.batch({1: (9, "anew")})
    assert client.get("totals", 1) == {"n": 9, "name": "anew"} and client.get("totals", 2)["n"] == 7
    cluster.replace_coordinator()
    cluster.start("run2")
    cluster.batch({2: (5, OTHER)})
    assert client.get("totals", 1)["n"] == 9 and client.get("totals", 2)["n"] == 5
    assert files_with(ck(cluster), SECRET) == []


def test_exchange_waits_for_the_current_batch_and_holds_the_next(cluster, monkeypatch):
    worked(cluster)
    port, steps, held = HeardPort(cluster), [], threading.Event()
    batch = cluster.version
    cluster.world.plan_spark(batch)
    tasks = [TaskIdentity("run1", "totals", p, batch, f"a{p}", "t") for p in range(cluster.partitions)]
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
    eventually(lambda: any("waits for batch 6" in step for step in steps))
    cluster.batch({1: (3, SECRET), 2: (9, OTHER)})
    thread.join(PATIENCE)
    assert held.is_set() and not thread.is_alive()
    check_forgotten(cluster)
    cluster.batch({2: (10, OTHER)})
    assert cluster.client().get("totals", 2)["n"] == 10


def test_no_snapshot_is_taken_during_a_hold(cluster, caplog):
    worked(cluster)
    port = HeardPort(cluster)

    port.before["adopt_rewritten"] = lambda: snapshots(cluster)
    with caplog.at_level(logging.WARNING):
        forget(cluster, port)
    assert not caplog.records
    check_forgotten(cluster)


def test_no_snapshot_is_taken_of_what_a_host_still_has_from_before(cluster):
    worked(cluster)
    steps: list[str] = []
    forgetting_ = threading.Thread(
        target=forget_keys, args=("name", "totals", [1]), kwargs={"coordinator": cluster.port, "progress": steps.append}
    )
    forgetting_.start()
    eventually(lambda: any(step.startswith("waits for 2 hosts") for step in steps))
    snapshots(cluster)  # of hosts that do not know of the exchange yet
    assert files_with(ck(cluster), SECRET) == []
    for h in cluster.hosts:
        h.host.heartbeat()
        h.host.heartbeat()
    forgetting_.join(PATIENCE)
    assert not forgetting_.is_alive()
    assert cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS).waits_for == "the batches, which are not held"
    cluster.c.hold_query("name", "me", 0)
    check_forgotten(cluster)
    cluster.batch({2: (7, OTHER)})
    snapshots(cluster)
    check_forgotten(cluster)


def test_replaced_coordinator_exchanges_nothing_and_a_retry_succeeds(cluster):
    worked(cluster)
    port, steps = HeardPort(cluster), []

    def replace() -> None:
        cluster.replace_coordinator()
        cluster.world.now += BUSY_SECONDS + 1  # which knows nothing of uploads that have begun before

    port.before["adopt_rewritten"] = replace
    forget(cluster, port, progress=steps.append)
    assert any(step.startswith("starts again: The hold of run run1 has lapsed") for step in steps)
    check_forgotten(cluster)


def test_lost_reply_is_looked_up(cluster):
    worked(cluster)

    def lost() -> None:
        raise StorageError("the answer is lost")

    port = HeardPort(cluster)
    port.after["adopt_rewritten"] = lost
    forget(cluster, port)
    check_forgotten(cluster)
    port.before["adopt_rewritten"] = lost
    with pytest.raises(StorageError, match="is lost"):
        forget_keys("name", "totals", [2], coordinator=port)
    assert cluster.client().get("totals", 2)["n"] == 6, "nothing was changed"
    cluster.batch({3: (4, OTHER)})


@pytest.mark.parametrize("hosts_report_first", [True, False])
def test_a_run_whose_exchange_storage_has_not_answered_is_registered_again(cluster, monkeypatch, hosts_report_first):
    """Storage writes the manifest of the exchange, and its answer is lost: the coordinator cannot tell what counts."""
    worked(cluster)
    port, real, lost = HeardPort(cluster), RecordFiles.create, []

    def registered_again() -> None:
        """Inform the hosts and the driver of it with a heartbeat."""
        for h in cluster.hosts if hosts_report_first else ():
            h.host.heartbeat()
        assert not cluster.c.driver_heartbeat("run1")
        cluster.start("run1")

    def create(self: RecordFiles, path: str, record: Any) -> None:
        real(self, path, record)
        if isinstance(record, Manifest) and record.rewritten and not lost:
            lost.append(path)
            port.before["hold_query"] = registered_again
            raise StorageError("the answer is lost")

    monkeypatch.setattr(RecordFiles, "create", create)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(forget, cluster, port).result(PATIENCE)
    assert lost
    check_forgotten(cluster)
    cluster.batch({1: (9, OTHER), 2: (7, OTHER)})
    assert cluster.client().get("totals", 1)["n"] == 9
    assert files_with(ck(cluster), SECRET) == []
    table = state_table(ck(cluster), "totals", version=1)  # what the exchange has replaced is still replaced
    assert 1 not in table["user"].to_pylist()


def test_dead_holder_delays_the_query_briefly_and_changes_nothing(cluster):
    worked(cluster)
    holder = cluster.c.hold_query("name", "somebody", forgetting.HOLD_SECONDS, batches=True)
    assert (holder.waits_for, holder.version) == (None, 6)
    with pytest.raises(InvalidRequestError, match="being rewritten by somebody"):
        forget(cluster)
    with pytest.raises(BatchHeldError):
        cluster.batch({2: (4, "b")})
    cluster.world.now += forgetting.HOLD_SECONDS + 1
    for h in cluster.hosts:
        h.host.register()
    cluster.batch({2: (4, "b")})
    with pytest.raises(LapsedHoldError, match="has lapsed"):
        cluster.c.adopt_rewritten("run1", holder.hold, holder.epoch, written_record(cluster))
    assert cluster.client().get("totals", 1)["n"] == 5
    forget(cluster)  # "retry when that is done"
    check_forgotten(cluster)


def test_hanging_storage_delays_the_query_only_briefly(cluster, monkeypatch):
    """The caller hangs in its last write. The query continues, and its files are exchanged when the storage answers."""
    worked(cluster)
    monkeypatch.setattr(forgetting, "MAX_HELD_SECONDS", 0.2)
    monkeypatch.setattr(forgetting, "HOLD_RENEW_SECONDS", 0.05)
    stuck, free = threading.Event(), threading.Event()
    real = CheckpointStorage.put_new

    def put_new(self: CheckpointStorage, path: str, data: bytes) -> Any:
        if path.startswith("rewritten/") and not free.is_set():
            stuck.set()
            assert free.wait(PATIENCE)
        return real(self, path, data)

    monkeypatch.setattr(CheckpointStorage, "put_new", put_new)
    steps: list[str] = []
    thread = threading.Thread(target=forget, args=(cluster,), kwargs={"progress": steps.append})
    thread.start()
    assert stuck.wait(PATIENCE)
    assert cluster.client().get("totals", 2)["n"] == 6
    batch = cluster.version
    cluster.world.plan_spark(batch)

    def goes_on() -> bool:
        try:
            cluster.hosts[0].host.open(TaskIdentity("run1", "totals", 0, batch, "b", "t"))
        except BatchHeldError:
            return False
        return True

    eventually(goes_on)
    cluster.batch({2: (7, OTHER)})
    free.set()
    thread.join(PATIENCE)
    assert not thread.is_alive() and any(step.startswith("waits for the query again") for step in steps)
    check_forgotten(cluster)
    cluster.batch({2: (8, OTHER)})


def written_record(cluster: Cluster) -> str:
    """Write a record that would exchange files, as an interrupted caller leaves it, and return its path."""
    port, paths = HeardPort(cluster), []

    def note(run_id: str, hold: str, epoch: int, path: str) -> None:
        paths.append(path)
        raise InvalidRequestError("no")

    port.__dict__["adopt_rewritten"] = note
    with pytest.raises(InvalidRequestError, match="no"):
        forget(cluster, port)
    return paths[-1]


def test_uploads_and_reports_that_are_under_way_are_waited_for(cluster):
    worked(cluster)
    cluster.c.lineage("run1", "totals", 0, 6, UPLOAD)
    held = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, batches=True)
    assert held.waits_for is not None and held.waits_for.startswith("uploads of snapshots")
    with pytest.raises(BatchHeldError):
        cluster.c.lineage("run1", "totals", 1, 6, UPLOAD)
    cluster.c.release_files("run1", "totals", 0, UPLOAD)
    assert cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, batches=True).waits_for is None
    assert cluster.c.hold_query("name", "me", 0).waits_for == "no holder holds the query"
    cluster.c.lineage("run1", "totals", 1, 6, UPLOAD)


def test_files_that_were_written_for_another_coordinator_are_not_exchanged(cluster):
    worked(cluster)
    held = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, batches=True)
    manifests = ManifestLog(cluster.world.storage(f"{ck(cluster)}/statestore", {}), "me")
    manifests.put_record("rewritten/6-a.json", RewrittenFiles(6, {}, {}))
    cluster.replace_coordinator()
    cluster.world.now += BUSY_SECONDS + 1
    anew = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, batches=True)
    assert (anew.waits_for, anew.version, anew.epoch) == (None, held.version, held.epoch + 1)
    with pytest.raises(InvalidRequestError, match=f"epoch {anew.epoch}. since its files up to version 6"):
        cluster.c.adopt_rewritten("run1", anew.hold, held.epoch, "rewritten/6-a.json")
    cluster.c.adopt_rewritten("run1", anew.hold, anew.epoch, "rewritten/6-a.json")
    cluster.c.adopt_rewritten("run1", anew.hold, anew.epoch, "rewritten/6-a.json")  # the message may come twice


def test_the_record_of_the_exchange_goes_with_the_last_version_that_it_is_about(tmp_path):
    cluster = Grouping(tmp_path, min_versions_to_retain=2, maintenance_interval=1.0)
    try:
        worked(cluster)
        forget(cluster)
        records = tmp_path / "ck/statestore/rewritten"
        assert len(list(records.iterdir())) == 1
        for n in range(8):
            cluster.batch({2: (n, OTHER)})
            cluster.remove_old_versions()
        for _ in range(RECORDS_EVERY):
            cluster.world.now += 2
            cluster.c.maintain()
        assert StateVersions.look(find_state(ck(cluster))).chain[cluster.version].rewritten == ()
        assert list(records.iterdir()) == []
        assert files_with(ck(cluster), SECRET) == []
    finally:
        cluster.close()


def test_retention_does_not_rely_on_abandoned_snapshots(tmp_path):
    cluster = Grouping(tmp_path, min_versions_to_retain=2, maintenance_interval=1.0)
    try:
        for n in range(1, 9):
            cluster.batch({1: (n, SECRET), 2: (n, OTHER)})
            snapshots(cluster)
        cluster.batch({2: (9, OTHER)})
        cluster.world.now += 2
        cluster.c.maintain()  # which plans to begin with a snapshot between the first one and the last one
        forget(cluster)
        cluster.batch({2: (10, OTHER)})
        check_forgotten(cluster)
        cluster.remove_old_versions()
        cluster.batch({2: (11, OTHER)})
        cluster.remove_old_versions()
        check_forgotten(cluster)
    finally:
        cluster.close()


def test_keys_are_forgotten_after_retention_has_removed_files(tmp_path):
    """Retention has removed changelogs below the snapshots that versions begin with, and older snapshots."""
    cluster = Grouping(tmp_path, min_versions_to_retain=2, maintenance_interval=1.0)
    try:
        for n in range(1, effort(16, 30)):
            cluster.batch({user: (n, SECRET if user == 1 else OTHER) for user in range(1, 3 + n % 6)})
            for upload in cluster.hosts[n // 2 % 2].host.maintenance.do_maintenance() if n % 2 else ():
                upload.result()  # partitions have snapshots of different versions
            cluster.world.now += 2
            cluster.c.maintain()
            if n % 12 == 11:
                cluster.batch({1: (n, SECRET), 2: (n, OTHER)})
                assert files_with(ck(cluster), SECRET)
                forget(cluster)
                check_forgotten(cluster)
        assert StateVersions.look(find_state(ck(cluster))).oldest > 1
        cluster.batch({1: (1, SECRET), 2: (1, OTHER)})
        forget_keys(ck(cluster), "totals", [1])  # as a query that does not run
        assert files_with(ck(cluster), SECRET) == []
        cluster.replace_coordinator()
        cluster.start("run2")
        cluster.batch({2: (5, OTHER)})
        assert cluster.client().get("totals", 2)["n"] == 5
    finally:
        cluster.close()


def test_files_written_under_a_hold_that_has_lapsed_are_not_exchanged(tmp_path):
    """The caller stalls for longer than its hold. Retention removes what it has written, since no manifest names it."""
    cluster = Grouping(tmp_path, min_versions_to_retain=2, maintenance_interval=1.0)
    try:
        worked(cluster)
        for n in range(7, 12):
            cluster.batch({1: (n, SECRET), 2: (n, OTHER)})
            cluster.remove_old_versions()
        port, steps, written = HeardPort(cluster), [], []

        def stall() -> None:
            written.extend(path for path in (cluster.root / "ck/statestore/groups").iterdir())
            cluster.world.now += forgetting.HOLD_SECONDS + 1
            for h in cluster.hosts:
                h.host.register()
            for n in range(20, 24):  # the versions whose files were written are given up one by one
                cluster.batch({1: (n, SECRET), 2: (n, OTHER)})
                cluster.remove_old_versions()
            for _ in range(LISTED_EVERY):
                cluster.world.now += 2
                cluster.c.maintain()

        port.before["adopt_rewritten"] = stall
        forget(cluster, port, progress=steps.append)
        assert any(not path.exists() for path in written), "retention has removed nothing"
        assert any(step.startswith("starts again") for step in steps)
        check_forgotten(cluster)
        assert cluster.client().get("totals", 2)["n"] == 23
    finally:
        cluster.close()


def test_a_hold_that_has_lapsed_is_not_renewed(cluster):
    worked(cluster)
    held = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS)
    cluster.world.now += forgetting.HOLD_SECONDS - 1
    renewed = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, hold=held.hold)
    assert renewed.hold == held.hold == cluster.c.hold_query("name", "me", 5.0).hold, "the message may come twice"
    cluster.world.now += forgetting.HOLD_SECONDS + 1
    with pytest.raises(LapsedHoldError, match="has lapsed"):
        cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, hold=held.hold)
    anew = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, batches=True)
    assert anew.hold not in ("", held.hold) and anew.waits_for is None
    manifests = ManifestLog(cluster.world.storage(f"{ck(cluster)}/statestore", {}), "me")
    manifests.put_record("rewritten/6-a.json", RewrittenFiles(6, {}, {}))
    with pytest.raises(LapsedHoldError, match="has lapsed"):
        cluster.c.adopt_rewritten("run1", held.hold, anew.epoch, "rewritten/6-a.json")
    cluster.c.adopt_rewritten("run1", anew.hold, anew.epoch, "rewritten/6-a.json")


def test_a_hold_that_lapses_while_the_message_waits_for_the_run_is_not_renewed(cluster):
    worked(cluster)
    held = cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS)
    run = cluster.c.registries.runs.get("run1")
    outcome: list[Any] = []

    def renew() -> None:
        try:
            outcome.append(cluster.c.hold_query("name", "me", forgetting.HOLD_SECONDS, hold=held.hold))
        except InvalidRequestError as error:
            outcome.append(error)

    waiting = WaitedFor(run.lock)
    run.lock = waiting
    with waiting.real:
        thread = threading.Thread(target=renew)
        thread.start()
        assert waiting.is_waited_for.wait(PATIENCE)
        cluster.world.now += forgetting.HOLD_SECONDS + 1
    thread.join(PATIENCE)
    assert isinstance(outcome[0], LapsedHoldError)


class WaitedFor:
    """A lock that signals an attempt to acquire it."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.is_waited_for = threading.Event()

    def __enter__(self) -> None:
        self.is_waited_for.set()
        self.real.__enter__()

    def __exit__(self, *error: object) -> None:
        self.real.__exit__(*error)


def test_files_that_are_missing_are_not_exchanged(cluster, monkeypatch):
    """Whatever removes them: the files that an exchange names are there, or all starts again."""
    worked(cluster)
    real, removed = RecordFiles.create, []

    def create(self: RecordFiles, path: str, record: Any) -> None:
        if isinstance(record, RewrittenFiles) and not removed:
            removed.append(next(iter(record.changelogs.values())).stored_in)
            (cluster.root / "ck/statestore" / removed[0]).unlink()
        real(self, path, record)

    monkeypatch.setattr(RecordFiles, "create", create)
    steps: list[str] = []
    forget(cluster, progress=steps.append)
    assert removed and any(step.startswith("starts again") and removed[0] in step for step in steps)
    check_forgotten(cluster)


def test_a_version_that_spark_commits_while_a_stopped_query_forgets_is_kept(cluster):
    """Version 7 is prepared, and Spark commits its batch between the look at its commits and the exchange."""
    worked(cluster)
    batch = cluster.batch({1: (9, SECRET), 2: (9, OTHER)}, committed=False)
    location = ck(cluster)

    def committed(step: str) -> None:
        if step.startswith("rewrites"):
            cluster.world.commit_spark(batch)

    forget_keys(location, "totals", [1], progress=committed)
    assert files_with(location, SECRET) == []
    rows = state_table(location, "totals", version=batch + 1).to_pylist()
    assert {row["user"]: row["n"] for row in rows} == {2: 9, 3: 1, 4: 1, 5: 1, 6: 1, 7: 1}
    cluster.version += 1
    cluster.replace_coordinator()
    cluster.start("run2")
    cluster.batch({3: (5, OTHER)})
    check_forgotten(cluster)
    assert cluster.client().get("totals", 2)["n"] == 9


@pytest.fixture
def restarting(tmp_path: Path) -> Iterator[TwoCoordinators]:
    made = TwoCoordinators(tmp_path)
    made.batch({1: (1, SECRET), 2: (1, OTHER), 3: (1, "c"), 4: (1, "d"), 5: (1, "e")})
    made.restarts = True
    yield made
    made.close()


def test_a_finished_batch_that_no_manifest_names_is_recovered_before_keys_are_forgotten(restarting):
    """Two coordinators have each acknowledged a part of the batch, and Spark is about to commit it."""
    cluster = restarting
    batch = cluster.batch(dict.fromkeys(range(1, 20), (2, OTHER)), committed=False)
    with pytest.raises(VersionNotFoundError, match=f"All tasks of batch {batch} .* Start the query once and wait"):
        forget_keys(ck(cluster), "totals", [1])
    cluster.world.commit_spark(batch)
    cluster.restarts = False
    cluster.start("run2")
    cluster.batch({3: (3, OTHER)})
    assert cluster.client().get("totals", 2)["n"] == 2
    forget(cluster)
    check_forgotten(cluster)


def test_a_task_of_a_batch_begun_before_the_coordinator_fails_once_keys_are_forgotten(restarting):
    """The forgetter removes the changelogs of the tasks that the first coordinator has acknowledged."""
    cluster = restarting
    # User 3 is in a partition whose task has finished; the other partitions keep their files.
    cluster.between_coordinators = lambda: forget_keys(ck(cluster), "totals", [3])
    with pytest.raises(FencedError):
        cluster.batch(dict.fromkeys(range(1, 20), (2, OTHER)), committed=False)
    cluster.restarts = False
    cluster.start("run2")
    cluster.batch({2: (2, OTHER)})
    client = cluster.client()
    assert client.get("totals", 3) is None and client.get("totals", 2)["n"] == 2


def test_ended_query_that_is_still_served_forgets(cluster):
    worked(cluster)
    registration = cluster.hosts[0].host.cache.registration("run1")
    assert registration is not None
    cluster.c.serve_ended(registration)
    for h in cluster.hosts:
        h.host.heartbeat()
    client = cluster.client()
    assert client.get("totals", 1)["n"] == 5
    forget_keys(ck(cluster), "totals", [1], coordinator=HeardPort(cluster))
    check_forgotten(cluster)


def test_a_path_of_a_running_query_means_that_query(cluster):
    worked(cluster)
    forget_keys(ck(cluster), "totals", [1], coordinator=HeardPort(cluster))
    check_forgotten(cluster)
    cluster.batch({2: (4, OTHER)})  # whose coordinator has not been fenced off


@pytest.mark.parametrize("name", ["shop: totals", "shop/totals", "s3:totals"])
def test_any_name_of_a_running_query_means_that_query(tmp_path, name):
    """Spark lets a query have any name, and its name may look like a location."""
    cluster = Grouping(tmp_path, name=name)
    worked(cluster)
    forget_keys(name, "totals", [1], coordinator=HeardPort(cluster))
    check_forgotten(cluster)
    cluster.close()


def test_a_query_whose_coordinator_has_just_restarted_is_not_taken_for_an_ended_one(cluster):
    """The driver reports to the new coordinator a moment later."""
    worked(cluster)
    port, steps = HeardPort(cluster), []

    def restart() -> None:
        cluster.port.c = Coordinator(lambda: cluster.world.now, cluster.world.storage, CoordinatorConf())
        port.after["describe"] = lambda: port.after.update(describe=report)

    def report() -> None:
        for h in cluster.hosts:
            h.host.register()
        cluster.start("run1")
        cluster.world.now += BUSY_SECONDS + 1  # the new coordinator knows nothing of uploads that have begun before

    port.before["describe"] = restart
    forget_keys(ck(cluster), "totals", [1], coordinator=port, progress=steps.append)
    assert "waits for the drivers' reports to a coordinator that has just started" in steps
    check_forgotten(cluster)
    cluster.batch({2: (4, OTHER)})  # the query has not been fenced
    assert cluster.client().get("totals", 2)["n"] == 4


def test_a_copy_of_a_running_query_forgets_and_the_original_does_not(cluster):
    """Both have the query id of the original."""
    worked(cluster)
    shutil.copytree(ck(cluster), f"{ck(cluster)}-copy")
    forget_keys(f"{ck(cluster)}-copy", "totals", [1], coordinator=HeardPort(cluster))
    assert files_with(f"{ck(cluster)}-copy", SECRET) == [] and files_with(ck(cluster), SECRET)
    assert cluster.client().get("totals", 1)["n"] == 5
    cluster.batch({1: (6, SECRET)})


def test_a_query_that_runs_in_another_cluster_is_fenced_off_and_can_be_started_again(cluster):
    worked(cluster)
    forget_keys(ck(cluster), "totals", [1])  # by a process that has not joined the cluster
    with pytest.raises(FencedError):
        cluster.batch({2: (7, OTHER)})
    cluster.tasks = []
    cluster.replace_coordinator()
    cluster.start("run2")
    cluster.batch({2: (7, OTHER)})
    check_forgotten(cluster)
    assert cluster.client().get("totals", 2)["n"] == 7


@pytest.mark.parametrize("message", ["hold_query", "adopt_rewritten"])
def test_query_that_ends_during_forget_is_treated_as_stopped(cluster, message):
    worked(cluster)
    port, steps = HeardPort(cluster), []

    def end() -> None:
        cluster.c.deactivate_instances("run1")

    port.before[message] = end
    forget_keys(ck(cluster), "totals", [1], coordinator=port, progress=steps.append)
    assert any(step.startswith("looks whether the query still runs") for step in steps)
    assert files_with(ck(cluster), SECRET) == []
    cluster.start("run2")
    cluster.batch({2: (7, OTHER)})
    check_forgotten(cluster)


def test_query_that_stops_with_a_savepoint_is_not_touched(cluster):
    worked(cluster)
    cluster.c.trigger_savepoint("request", "name", str(cluster.root / "savepoints"), stop=True)
    with pytest.raises(InvalidRequestError, match=r"Do it after the stop, with the checkpoint location"):
        forget(cluster)
    cluster.c.deactivate_instances("run1")
    forget_keys(ck(cluster), "totals", [1], coordinator=HeardPort(cluster))
    assert files_with(f"{ck(cluster)}/statestore", SECRET) == []
