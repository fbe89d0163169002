"""The rules between hosts and coordinator when answers are lost, grants are late and storage hangs; without Ray.

Each of these was once wrong.

Where a host keeps partitions, and over which storage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from backends.conf import StateStoreConf
from backends.exceptions import StateStoreError, StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.exceptions import CoordinatorError, IncompleteBatchError, RetiredRunError
from coordinator_actor.messages import HostReport
from spark_bridge.exceptions import HostUnavailableError
from spark_bridge.host.host import Host
from spark_bridge.host.instances import PartitionFiles
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.held_runs import get, one, start
from tests.spark_bridge.host.host_steps import Port, ch, make_host, plan_spark, reg, run_task, task


def test_replanned_batch_never_has_rows_of_the_earlier_run(tmp_path):
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path)
    c.register_query(reg(w))
    plan_spark(w, 0)
    for p in (0, 1):
        run_task([h], 0, p, value=b"run1-old-data")
    w.commit_spark(0)
    # the user goes back one batch: deletes offsets/0 and commits/0
    (w.root / "ck/offsets/0").unlink()
    (w.root / "ck/commits/0").unlink()
    assert c.register_query(reg(w, "run2")).completed_version == 0
    h.heartbeat()
    plan_spark(w, 0)
    # batch 0 is planned again, with other rows; partition 1 does not run in it (head(1) in foreachBatch)
    run_task([h], 0, 0, "run2", value=b"run2-new-data")
    w.commit_spark(0)
    plan_spark(w, 1)
    with pytest.raises(IncompleteBatchError):  # what should happen
        run_task([h], 1, 0, "run2", value=b"x")


def lost(tmp_path):
    """Spark committed batch 0 whose manifest was never written: coordinator and host of p0 died together."""
    w = World(tmp_path)
    c = w.coordinator(0)
    h = make_host(w, c, 0, tmp_path)
    c.register_query(reg(w))
    plan_spark(w, 0)
    run_task([h], 0, 0, value=b"a")
    c2 = w.coordinator(0)
    h2 = make_host(w, c2, 0, tmp_path, inc="b")
    c2.register_query(reg(w))
    _, a = run_task([h2], 0, 1, value=b"b")
    assert a.manifest_id is None
    w.commit_spark(0)  # both tasks were answered: Spark logs the batch
    return w  # everything dies


def test_a_version_whose_manifest_was_never_written_is_recovered(tmp_path):
    w = lost(tmp_path)
    c = w.coordinator(0)
    recovered = c.register_query(reg(w, "run2"))
    assert (recovered.refusal, recovered.completed_version) == (None, 1)
    assert rows_of(w, c, "run2", tmp_path) == {0: b"a", 1: b"b"}


def rows_of(w, c, run, tmp_path):
    """Return the value of each partition's key, as a host that holds nothing yet loads it from storage."""
    h = make_host(w, c, 0, tmp_path, inc=f"reads-{run}")
    return {p: get(h, run, p) for p in (0, 1)}


def test_a_recovery_that_dies_is_done_by_the_next_run(tmp_path):
    w = lost(tmp_path)
    c = w.coordinator(0)

    class Crash(BaseException):
        pass

    def crash(path):
        if path.startswith("manifests/"):
            raise Crash

    w.put_hook = crash
    with pytest.raises(Crash):
        c.register_query(reg(w, "run2"))
    w.put_hook = None
    c = w.coordinator(0)
    recovered = c.register_query(reg(w, "run3"))
    assert (recovered.refusal, recovered.completed_version) == (None, 1)
    assert rows_of(w, c, "run3", tmp_path) == {0: b"a", 1: b"b"}


def test_a_failed_recovery_leaves_no_half_registered_run(tmp_path):
    w = lost(tmp_path)
    c = w.coordinator(0)

    def fail(path):
        if path.startswith("manifests/"):
            raise StorageError("throttled")

    w.put_hook = fail
    with pytest.raises(StorageError):
        c.register_query(reg(w, "run1"))  # driver's heartbeat registers run1 again
    w.put_hook = None
    assert (
        c.driver_heartbeat("run1") is False or 1 in c.registries.runs.by_id["run1"].versions.chain
    )  # otherwise it is never registered again
    if not c.driver_heartbeat("run1"):
        c.register_query(reg(w, "run1"))
    h = make_host(w, c, 0, tmp_path, inc="c")
    plan_spark(w, 1)
    run_task([h], 1, 0, value=b"x")


def test_host_learns_of_a_completed_version_after_a_lost_reply(tmp_path):
    _w, _c, (h,) = start(tmp_path)

    def lose(*_):
        raise HostUnavailableError("answer lost")

    h.port.after["heartbeat_host"] = lose
    with pytest.raises(HostUnavailableError):
        h.heartbeat()
    h.port.after.clear()
    for _ in range(5):
        h.heartbeat()
    assert get(h) == b"v"  # version 1 is completed; the stream is quiet now


def test_a_late_grant_does_not_roll_a_partition_back(tmp_path):
    w, c, (h,) = start(tmp_path)
    h.heartbeat()  # version 1 applied
    plan_spark(w, 1)
    slow = task(1, 0, attempt="speculative")
    go, granted = threading.Event(), threading.Event()

    asked = h.grants.for_task

    def stall(task):
        grant = asked(task)
        if task.attempt == "speculative":
            granted.set()
            go.wait()
        return grant

    h.grants.for_task = stall
    res = []

    def run():
        try:
            res.append(h.open(slow))
        except (CoordinatorError, StateStoreError) as e:
            res.append(e)

    t = threading.Thread(target=run)
    t.start()
    granted.wait()
    for p in (0, 1):
        run_task([h], 1, p, value=b"batch1")
    w.commit_spark(1)
    c.batch_committed("run1", 1)
    h.heartbeat()
    plan_spark(w, 2)
    assert get(h) == b"batch1"
    go.set()
    t.join()
    assert get(h) == b"batch1"  # completed stays completed for query clients


def test_a_late_grant_of_an_old_run_does_not_unload_the_new_one(tmp_path):
    w, c, (h,) = start(tmp_path)
    h.heartbeat()
    plan_spark(w, 1)
    slow = task(1, 0, attempt="old")
    go, granted = threading.Event(), threading.Event()

    asked = h.grants.for_task

    def stall(task):
        grant = asked(task)
        if task.attempt == "old":
            granted.set()
            go.wait()
        return grant

    h.grants.for_task = stall

    def open_late():
        with contextlib.suppress(RetiredRunError):
            h.open(slow)

    t = threading.Thread(target=open_late)
    t.start()
    granted.wait()
    c.register_query(reg(w, "run2"))
    h.heartbeat()
    run_task([h], 1, 0, run="run2", value=b"new")
    go.set()
    t.join()
    for _ in range(3):
        h.heartbeat()
    runs = {i.registration.run_id for i in h.cache.instances.values()}
    assert runs == {"run2"} and h.cache.report().pending, (runs, h.cache.report().pending)


def test_a_task_that_loads_while_the_coordinator_restarts_can_commit(tmp_path):
    w, c, h = one(tmp_path)
    plan_spark(w, 0)
    run_task([h], 0)
    w.commit_spark(0)
    c.batch_committed("run1", 0)
    h = make_host(w, c, 0, tmp_path, inc="b")
    plan_spark(w, 1)
    t = task(1)

    def restart(*_):
        h.port.after.clear()
        c2 = w.coordinator(0)
        c2.register_query(reg(w, n=1))
        h.port.c = c2
        h.heartbeat()  # driver and host report again

    h.port.after["lineage"] = restart  # the coordinator dies while the state is loaded
    assert h.open(t).redirect is None
    h.commit(t, ch(b"x"), {})


def test_memory_of_attempts_is_bounded(tmp_path):
    w, c, h = one(tmp_path)
    for b in range(50):
        plan_spark(w, b)
        run_task([h], b)
        w.commit_spark(b)
        c.batch_committed("run1", b)
        h.heartbeat()
    assert len(next(iter(h.cache.instances.values())).invocations) <= 2


def test_memory_of_snapshots_is_bounded(tmp_path):
    w = World(tmp_path)
    c = w.coordinator(0)
    port = Port(c)
    h = Host(
        w.host(0),
        port,
        tmp_path / "l",
        conf=StateStoreConf(provider="file", fsync=False, deltas_per_snapshot=1),
        open_storage=w.storage,
    )
    h.register()
    c.register_query(reg(w, n=1, min_versions_to_retain=2, maintenance_interval=1.0))
    for b in range(40):
        plan_spark(w, b)
        run_task([h], b)
        w.commit_spark(b)
        c.batch_committed("run1", b)
        h.heartbeat()
        for f in h.maintenance.do_maintenance():
            f.result()
        w.now += 2
        c.maintain()
    versions = c.registries.runs.by_id["run1"].versions
    kept = len(list((tmp_path / "ck/statestore/operators/op/1/0/default").glob("*.snapshot")))
    assert len(versions.descriptors) <= kept + 1


def test_manifest_overrides_a_report_of_the_last_attempt(tmp_path):
    w = World(tmp_path)
    c = w.coordinator(0)
    h0 = make_host(w, c, 0, tmp_path)
    c.register_query(reg(w))
    plan_spark(w, 0)
    run_task([h0], 0, 0, value=b"A", attempt="A")
    w.now += 5
    h1 = make_host(w, c, 1, tmp_path)
    w.now += 6
    c.expire()
    run_task([h1], 0, 0, value=b"B", attempt="B")  # h0 was lost: the task ran again; B is the last acknowledged
    run_task([h1], 0, 1, value=b"1", attempt="one")
    c2 = w.coordinator(0)
    h0.port.c = h1.port.c = c2  # coordinator restarted; h0 is back
    h0.heartbeat()
    h1.heartbeat()
    c2.register_query(reg(w))
    run_task([h1, h0], 0, 1, value=b"1", attempt="two")  # speculation or a second action of foreachBatch
    atts = [w.manifests()[-1]["operators"]["op"]["partitions"][k]["attempt"] for k in "01"]
    assert atts == ["B", "two"]


def test_hosts_of_a_session_that_stops_do_not_bring_its_runs_back(tmp_path):
    w, c, h = one(tmp_path)
    c.register_host(World.host(7).__class__("o", "a", "grpc://x:1", "n", "other"), HostReport())
    plan_spark(w, 0)
    run_task([h], 0)
    assert c.unregister_session("s") is True  # StateCluster.stop(): hosts stop only afterwards
    epochs = len(list((tmp_path / "ck/statestore/epochs").iterdir()))
    h.heartbeat()
    assert "run1" not in c.registries.runs.by_id and len(list((tmp_path / "ck/statestore/epochs").iterdir())) == epochs


def test_the_partitions_of_a_query_share_one_storage_and_other_options_have_another(tmp_path: Path) -> None:
    opened: list[tuple[str, dict[str, str]]] = []

    def open_storage(location: str, options: Mapping[str, str]) -> CheckpointStorage:
        opened.append((location, dict(options)))
        return CheckpointStorage.open(location)

    files = PartitionFiles(tmp_path / "local", "a", StateStoreConf(fsync=False), open_storage)
    of = World(tmp_path).registration("run1")
    (spec,) = of.operators
    other = msgspec.structs.replace(of, storage_options={"fs.s3a.access.key": "new"})
    states = [files.open_own(of, spec, 0, set), files.open_own(of, spec, 1, set)]
    states.append(files.open_copy(of, "copied", spec.backend, tmp_path / "copy"))
    assert opened == [(of.state_location, {})]
    states.append(files.open_copy(other, "copied", spec.backend, tmp_path / "other"))
    assert opened[1:] == [(of.state_location, {"fs.s3a.access.key": "new"})]
    for state in states:
        state.close()
