"""Savepoints of a running query: the real coordinator and the real hosts, without Ray and Spark; a clock that tests
turn.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.messages import SavepointExported, SavepointStatus
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import read_stored_savepoint, read_stored_savepoints
from tests.coordinator_actor.coordinator_world import run_of
from tests.coordinator_actor.savepoints.savepoint_streams import G, Stream, run_and_clean
from tests.effort import only_thorough


def test_a_savepoint_is_made_by_the_hosts_and_says_what_it_is_of(stream):
    s = stream()
    assert s.trigger() == SavepointStatus(known=True)
    path = s.finish()
    assert Path(path).parent == s.world.root / "sp" and Path(path).name == "savepoint-q-3"
    assert s.savepoint_rows(path) == s.at[2]
    info = read_stored_savepoint(path)
    assert (info.metadata.version, info.metadata.batch_id, info.metadata.checkpoint_id) == (2, 1, 3)
    assert (info.metadata.query_id, info.metadata.query_name, info.metadata.key_groups) == ("q", "name", G)
    assert [i.path for i in read_stored_savepoints(str(s.world.root / "sp"))] == [path]


def test_sparks_files_of_the_batch_and_the_one_before_it_are_in_it(stream):
    s = stream(3)
    s.trigger()
    s.batch(3)  # Spark commits another batch before the files are copied
    path = Path(s.finish())
    files = {f.relative_to(path / "spark").as_posix() for f in (path / "spark").rglob("*") if f.is_file()}
    assert files == {"offsets/1", "offsets/2", "commits/1", "commits/2", *(f"sources/0/{b}" for b in range(4))}
    for name in files:
        assert (path / "spark" / name).read_bytes() == (s.world.root / "ck" / name).read_bytes()


@pytest.mark.parametrize("later", [0, only_thorough(1), 2, only_thorough(5)])
@pytest.mark.parametrize("applied", [False, True], ids=["hosts behind", "hosts up to date"])
def test_it_is_of_the_version_that_was_completed_however_many_batches_follow(stream, later, applied):
    s = stream()
    s.trigger()
    s.copy_spark_files()
    s.batches(2, 2 + later)
    s.begin(2 + later, dict.fromkeys(range(40), -1))  # acknowledged by all, but Spark may never commit it
    if applied:
        for host in s.hosts.values():
            for order in s.c.heartbeat_host(host.info.host_id, "a", {"run1": 0}).completed:
                host.loader.complete(order)
    for host in s.hosts.values():
        host.coordinator.calls.clear()
    assert s.savepoint_rows(s.finish()) == s.at[2]
    was_loaded = any("lineage" in host.coordinator.calls for host in s.hosts.values())
    assert was_loaded is (later > 2), "a held state is exported without a load"


@pytest.mark.parametrize("backend", ["file", "rocksdb"])
def test_state_held_at_the_order_is_not_read_back_however_many_batches_follow(stream, backend):
    s, go_on = stream(n=4, backend=backend), threading.Event()
    s.trigger()
    s.copy_spark_files()
    for host in s.hosts.values():
        host.exports._pool.submit(go_on.wait, 20)
        host.heartbeat()
        host.coordinator.calls.clear()
    s.batches(2, 9)
    for host in s.hosts.values():
        host.heartbeat()
    go_on.set()
    s.heartbeat()
    assert s.savepoint_rows(s.status().path) == s.at[2]
    assert not any("lineage" in host.coordinator.calls for host in s.hosts.values())


def test_batches_complete_between_the_exports_of_two_hosts(stream):
    s = stream(n=4)
    s.trigger()
    s.copy_spark_files()
    s.batch(2, dict.fromkeys(range(0, 30, 3)))
    s.heartbeat(0)
    s.batch(3, dict.fromkeys(range(60), 7))
    assert s.is_pending()
    s.batch(4)
    s.heartbeat(1)
    assert s.savepoint_rows(s.status().path) == s.at[2]
    assert s.rows() == s.at[5]


def test_it_is_not_done_before_sparks_files_are_copied(stream):
    s = stream()
    s.trigger()
    s.heartbeat()
    assert s.is_pending() and not (s.world.root / "sp").joinpath("savepoint-q-3/_metadata").exists()
    s.copy_spark_files()
    assert s.status().path is not None
    assert s.savepoint_rows(s.status().path) == s.at[2]


def test_two_savepoints_at_once_are_each_of_the_right_version(stream):
    s = stream()
    s.trigger("first")
    s.batch(2)
    s.trigger("second")
    s.batch(3)
    assert [s.savepoint_rows(s.finish(r)) for r in ("first", "second")] == [s.at[2], s.at[3]]


def test_the_same_request_begins_nothing_twice(stream):
    s = stream()
    s.trigger()
    s.trigger()
    path = s.finish()
    assert s.trigger().path == path
    s.c.deactivate_instances("run1")
    assert s.status().path == path == s.trigger().path, "though the query has ended"
    assert len(read_stored_savepoints(str(s.world.root / "sp"))) == 1
    assert s.status("another") == SavepointStatus(known=False)


def test_a_request_may_arrive_while_earlier_ones_are_checked(stream):
    """A run that ends looks at its requests, and so does everybody who asks for a status, without the run's lock."""
    s = stream()
    s.trigger("r1")
    looking = iter(s.c.registries.runs.savepoints_of("run1").requests.items())
    s.trigger("r2")
    assert [request_id for request_id, _ in looking] == ["r1"]
    assert s.status("r2").known


def test_without_a_path_it_is_next_to_the_state_and_left_alone(stream):
    s = stream(min_versions_to_retain=1, maintenance_interval=1.0)
    s.c.trigger_savepoint("r1", "q")
    path = s.finish()
    assert Path(path).parent == s.world.root / "ck/statestore/savepoints"
    run_and_clean(s, 2, 8)
    assert s.savepoint_rows(path) == s.at[2]
    assert restore_into_checkpoint(path, str(s.world.root / "new")).version == 2


# -- hosts that go -----------------------------------------------------------------------------


def test_the_partition_of_a_host_that_dies_half_way_is_exported_by_another(stream):
    s = stream(n=4)
    s.trigger()
    s.copy_spark_files()
    s.heartbeat(0)
    s.batch(2)
    s.lose(1)
    s.batch(3)
    assert s.savepoint_rows(s.finish()) == s.at[2]


def test_a_host_that_dies_while_the_stream_is_quiet_does_not_keep_it_from_being_made(stream):
    s = stream(n=4)
    s.trigger()
    s.copy_spark_files()
    s.heartbeat(0)
    s.lose(1)
    assert s.savepoint_rows(s.finish()) == s.at[2]


def test_a_partition_that_moves_half_way_is_exported_by_its_new_owner(stream):
    s = stream(n=4, hosts=1)
    s.trigger()
    s.copy_spark_files()
    s.add_host(1)
    assert s.c.rebalance() == {"run1": 2}
    s.batch(2)
    s.hosts[0].maintenance.do_maintenance()
    assert {i.partition for i in s.hosts[1].cache.instances.values()} and len(s.hosts[0].cache.instances) == 2
    s.heartbeat(1)
    assert s.is_pending()
    s.heartbeat(0)
    assert s.savepoint_rows(s.status().path) == s.at[2]


def test_a_restarted_host_exports_the_state_that_it_has_lost(stream):
    s = stream(n=2, hosts=1)
    s.trigger()
    s.copy_spark_files()
    s.kill(0)
    s.add_host(0, "b")
    s.batch(2)
    assert s.savepoint_rows(s.finish()) == s.at[2]


def test_a_report_that_is_lost_is_made_again(stream):
    s = stream()
    s.trigger()
    s.copy_spark_files()
    for host in s.hosts.values():
        send, host.exports._report_export = host.exports._report_export, lost
        s.heartbeat(int(host.info.host_id[1:]))
        host.exports._report_export = send
    assert s.is_pending()
    s.heartbeat()
    assert s.savepoint_rows(s.status().path) == s.at[2]


def lost(message: SavepointExported) -> None:
    raise UnknownHostError("the coordinator is away")


def test_a_report_of_an_unknown_host_is_ignored(stream):
    s = stream()
    s.trigger()
    message = SavepointExported("run1", 3, "op", 0, "h0", "another", failure="no")
    with pytest.raises(UnknownHostError):
        s.c.savepoint_exported(message)
    s.c.savepoint_exported(SavepointExported("nobody", 3, "op", 0, "h0", "a", failure="no"))
    s.c.savepoint_exported(SavepointExported("run1", 99, "op", 0, "h0", "a", failure="no"))
    assert s.savepoint_rows(s.finish()) == s.at[2]
    s.c.savepoint_exported(SavepointExported("run1", 3, "op", 0, "h0", "a", failure="too late"))
    assert s.status().path is not None


# -- ids ---------------------------------------------------------------------------------------


def test_ids_always_ascend_and_are_shared_with_the_manifests(stream):
    s = stream()
    ids = [m.id for m in s.log().manifests.values()]
    for i in range(2):
        s.trigger(f"r{i}")
        ids.append(read_stored_savepoint(s.finish(f"r{i}")).metadata.checkpoint_id)
        s.batch(2 + i)
        ids.append(max(s.log().manifests))
    assert ids == [1, 2, 3, 4, 5, 6]
    s.trigger("dies with its coordinator")
    s.restart_coordinator()
    assert s.status("dies with its coordinator").known is False
    assert s.c.trigger_savepoint("after", "name", str(s.world.root / "sp")).known
    s.batch(4)
    path = s.finish("after")
    assert read_stored_savepoint(path).metadata.checkpoint_id == 9 and s.savepoint_rows(path) == s.at[4]
    assert max(s.log().manifests) == 10
    assert [(r.checkpoint_id, r.version) for r in s.log().savepoints.all()] == [(3, 2), (5, 3), (7, 4), (9, 4)]
    assert Path(path).name == "savepoint-q-9"


def test_a_savepoint_of_a_quiet_stream_is_made_by_a_restarted_coordinator(stream):
    s = stream()
    s.restart_coordinator()
    s.trigger()
    assert s.savepoint_rows(s.finish()) == s.at[2]


def test_savepoints_do_not_disturb_a_batch_that_is_being_acknowledged(stream):
    s = stream()
    s.begin(2, {3: 33}, range(1))
    s.trigger()
    assert s.savepoint_rows(s.finish()) == s.at[2]
    s.begin(2, {3: 33}, range(1, 2))
    s.commit(2)
    s.at[3] = {**s.at[2], 3: 33}
    assert {k: v for k, v in s.rows().items() if k != 3} == {k: v for k, v in s.at[3].items() if k != 3}
    s.batch(3)
    stats = s.c.checkpoint_stats("name")
    assert (stats["checkpoints"]["counts"]["completed"], stats["savepoints"]["counts"]["completed"]) == (4, 1)
    assert stats["checkpoints"]["counts"]["failed"] == 0


# -- retention ---------------------------------------------------------------------------------


def test_the_version_of_a_savepoint_is_not_removed_while_it_is_made(stream):
    s = stream(0, hosts=0, min_versions_to_retain=1, maintenance_interval=1.0)
    for i in range(2):
        s.add_host(i, deltas_per_snapshot=1)
    run_and_clean(s, 0, 4)
    s.trigger()
    s.copy_spark_files()
    run_and_clean(s, 4, 12)
    assert run_of(s.c, "run1").versions.oldest <= 4
    assert s.savepoint_rows(s.finish()) == s.at[4]
    s.c.expire()
    run_and_clean(s, 12, 17)
    assert run_of(s.c, "run1").versions.oldest > 12, "and let go of then"


def test_a_savepoint_outlives_the_versions_it_was_made_of(stream):
    s = stream(0, hosts=0, min_versions_to_retain=1, maintenance_interval=1.0)
    s.add_host(0, deltas_per_snapshot=1)
    run_and_clean(s, 0, 3)
    s.trigger()
    path = s.finish()
    before = {f: f.read_bytes() for f in Path(path).rglob("*") if f.is_file()}
    s.c.expire()
    run_and_clean(s, 3, 9)
    assert run_of(s.c, "run1").versions.oldest > 3
    assert {f: f.read_bytes() for f in Path(path).rglob("*") if f.is_file()} == before
    assert s.savepoint_rows(path) == s.at[3]


# -- resuming from it ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "backend"), [(1, "rocksdb"), (2, "file"), (3, "file")])
def test_a_query_resumes_exactly_after_a_savepoint(stream, tmp_path, n, backend):
    s = stream(3)
    s.trigger(stop=True)
    path = s.finish()
    s.c.deactivate_instances("run1")
    root = tmp_path / "restored"
    restored = restore_into_checkpoint(path, str(root / "ck"), num_partitions=n, backend=backend)
    assert (restored.version, restored.batch_id) == (3, 2)
    after = Stream(root, n, backend=backend, at=dict(s.at), query_id=restored.query_id)
    try:
        assert run_of(after.c, "run1").versions.completed == 3
        assert after.rows() == after.at[3]
        after.batch(3)
        assert after.rows() == after.at[4]
        known = sorted(after.log().manifests)
        after.trigger("r2")
        second = after.finish("r2")
        assert after.savepoint_rows(second) == after.at[4]
        assert read_stored_savepoint(second).metadata.checkpoint_id == known[-1] + 1
    finally:
        after.close()
    assert s.savepoint_rows(path) == s.at[3]


def test_the_coordinators_of_both_kinds_are_apart(stream):
    """A savepoint neither queues behind a batch nor ends it."""
    s = stream()
    run = run_of(s.c, "run1")
    assert isinstance(run.machine.checkpoints, CheckpointCoordinator)
    assert s.c.registries.runs.savepoints_of("run1").coordinator is not run.machine.checkpoints
    assert s.c.registries.runs.savepoints_of("run1").coordinator.id_counter is run.machine.checkpoints.id_counter
