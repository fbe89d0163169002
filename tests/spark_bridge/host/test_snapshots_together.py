"""A host stores the snapshots of its partitions together and does not read their metadata again; without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backends.exceptions import StorageError
from backends.partition.partition_state import SnapshotUploads, store_snapshots
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.run.holds import BUSY_SECONDS
from spark_bridge.host import maintenance
from spark_bridge.transport.protocol import GetCommand
from tests.coordinator_actor.coordinator_world import SCHEMA, World, run_of
from tests.effort import only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.host.host_steps import make_host, plan_spark, run_task, task

PARTITIONS = 4
KEEP = 3


class Query:
    """A query of some partitions on one host that retains few versions."""

    def __init__(self, root: Path, backend: str = "file", threads: int = 1) -> None:
        self.root = root
        self.threads = threads
        self.operators = (OperatorSpec("op", PARTITIONS, SCHEMA, backend=backend),)
        self.world = World(root)
        self.batches = 0
        self.start("run1", "a")

    def start(self, run: str, incarnation: str) -> None:
        self.run = run
        self.coordinator = self.world.coordinator(0)
        self.host = make_host(
            self.world,
            self.coordinator,
            0,
            self.root,
            incarnation,
            clock=lambda: self.world.now,
            maintenance_threads=self.threads,
        )
        registration = self.world.registration(
            run, operators=self.operators, min_versions_to_retain=KEEP, maintenance_interval=10.0
        )
        assert self.coordinator.register_query(registration).refusal is None

    def batch(self) -> None:
        plan_spark(self.world, self.batches)
        for p in range(PARTITIONS):
            run_task([self.host], self.batches, p, self.run, b"%d of %d" % (self.batches, p))
        self.world.commit_spark(self.batches)
        self.coordinator.batch_committed(self.run, self.batches)
        self.host.heartbeat()
        self.batches += 1

    def snapshots(self) -> None:
        self.host.maintenance.upload_snapshots(self.host.cache.all())

    def maintain(self) -> None:
        self.world.now += 10.0
        self.host.heartbeat()
        self.coordinator.maintain()

    def groups(self) -> list[int]:
        return sorted(int(p.name.partition("-")[0]) for p in (self.root / "ck/statestore/groups").glob("*.snapshots"))

    def assert_holds(self) -> None:
        for p in range(PARTITIONS):
            while self.host.open(task(self.batches, p, self.run)).loading is not None:
                pass
            read = self.host.reads.get_many(GetCommand(self.run, "op", p, self.batches), pa.array([b"k"], pa.binary()))
            assert read.to_pylist() == [b"%d of %d" % (self.batches - 1, p)]


@pytest.fixture
def query(tmp_path: Path) -> Query:
    return Query(tmp_path)


@pytest.fixture(params=["file", only_thorough("rocksdb")])  # what is due is the host's to know, not the backend's
def of_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Query:
    return Query(tmp_path, request.param)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the snapshot files that are read and the partition directories that are listed."""
    seen: list[str] = []
    read, listed, together = CheckpointStorage.read, CheckpointStorage.list, CheckpointStorage.read_together

    def reads(storage: CheckpointStorage, ref: FileRef) -> bytes:
        seen.append(ref.path)
        return read(storage, ref)

    def lists(storage: CheckpointStorage, prefix: str = "", **given: str) -> list[tuple[str, int]]:
        seen.append(prefix)
        return listed(storage, prefix, **given)

    def reads_together(storage: CheckpointStorage, refs: Sequence[FileRef]) -> dict[str, bytes]:
        seen.append(refs[0].stored_in)
        return together(storage, refs)

    monkeypatch.setattr(CheckpointStorage, "read", reads)
    monkeypatch.setattr(CheckpointStorage, "read_together", reads_together)
    monkeypatch.setattr(CheckpointStorage, "list", lists)
    return seen


def test_all_that_is_due_is_stored_with_one_request_and_loaded_by_another_host(of_backend: Query) -> None:
    query = of_backend
    for _ in range(10):
        query.batch()
    for begun in query.host.maintenance.do_maintenance():
        begun.result()
    assert query.groups() == [10]
    query.batch()
    assert {len(run_of(query.coordinator, "run1").versions.snapshots("op", p, 11)) for p in range(PARTITIONS)} == {1}
    for path in (query.root / "ck/statestore/operators").rglob("*.changelog"):
        if int(path.name.partition("-")[0]) < 11:
            path.unlink()
    assert not list((query.root / "ck/statestore/operators").rglob("*.sst")), "all of this state is small"
    query.start("run2", "b")
    plan_spark(query.world, query.batches)
    query.assert_holds()


def test_snapshots_of_several_threads_are_stored_with_one_request(tmp_path: Path) -> None:
    query = Query(tmp_path, threads=2)
    for _ in range(10):
        query.batch()
    for begun in query.host.maintenance.do_maintenance():
        begun.result()
    assert query.groups() == [10] and {i.snapshot_version for i in query.host.cache.all()} == {10}


def test_a_partition_that_takes_long_does_not_hold_up_those_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "MEET_SECONDS", 0.05)
    query = Query(tmp_path, threads=2)
    for _ in range(10):
        query.batch()
    slow, go_on = query.host.cache.all()[0], threading.Event()
    prepare = slow.state.snapshots.prepare

    def waits(*given: Any) -> Any:
        assert go_on.wait(HANG)
        return prepare(*given)

    monkeypatch.setattr(slow.state.snapshots, "prepare", waits)
    begun = query.host.maintenance.do_maintenance()
    next(as_completed(begun)).result()
    stored = [i for i in query.host.cache.all() if i.snapshot_version == 10]
    assert len(stored) == PARTITIONS // 2 and slow not in stored
    go_on.set()
    for each in begun:
        each.result(PATIENCE)
    assert {i.snapshot_version for i in query.host.cache.all()} == {10}


def test_parts_of_a_snapshot_are_not_read_again(query: Query, watched: list[str]) -> None:
    for _ in range(3):
        for _ in range(3):
            query.batch()
        query.snapshots()
        query.maintain()
    assert [path for path in watched if path.endswith((".snapshot", ".snapshots", "default"))] == []
    versions = run_of(query.coordinator, "run1").versions
    assert len(versions.descriptors) == 3 * PARTITIONS
    query.batch()  # its manifest names the last of them
    query.start("run2", "b")
    query.batch()
    query.maintain()
    assert len([path for path in watched if path.endswith(".snapshots")]) == 3, "a new coordinator reads each object"
    assert run_of(query.coordinator, "run2").versions.descriptors == versions.descriptors


def test_the_object_stays_as_long_as_one_partition_begins_with_it(of_backend: Query) -> None:
    query = of_backend
    for round_ in range(5):
        for _ in range(3):
            query.batch()
        late = query.host.cache.all()[0]
        due = [i for i in query.host.cache.all() if i is not late or round_ == 0]
        query.host.maintenance.upload_snapshots(due)
        query.maintain()
    query.batch()
    query.maintain()
    assert query.groups()[0] == 3, "the snapshot of version 3 is the only one of the partition that lags"
    query.snapshots()
    for _ in range(6):
        query.batch()
        query.maintain()
    query.batch()
    query.maintain()
    assert query.groups()[0] > 3
    query.start("run2", "b")
    plan_spark(query.world, query.batches)
    query.assert_holds()


def test_number_of_waiting_snapshots_is_bounded(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "TOGETHER_BYTES", 1)
    for _ in range(3):
        query.batch()
    query.snapshots()
    directory = query.root / "ck/statestore"
    assert query.groups() == [] and len(list(directory.rglob("*.snapshot"))) == PARTITIONS


def fails_of(world: World, is_meant: Callable[[str], bool]) -> None:
    def fail(path: str) -> None:
        if is_meant(path):
            raise StorageError("throttled")

    world.put_hook = fail


def test_a_snapshot_that_fails_is_tried_again_and_spoils_no_other(
    query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        query.batch()
    fails_of(query.world, lambda path: path.endswith(".snapshots"))
    query.snapshots()
    assert {i.snapshot_version for i in query.host.cache.all()} == {0}
    query.world.put_hook = None
    broken = query.host.cache.all()[1]
    with monkeypatch.context() as patched:
        patched.setattr(broken.state.snapshots, "prepare", lambda *_: 1 / 0)
        query.snapshots()
    assert [i.snapshot_version for i in query.host.cache.all()] == [
        3 * (i is not broken) for i in query.host.cache.all()
    ]
    query.snapshots()
    assert broken.snapshot_version == 3


def test_upload_counts_as_running_while_its_host_reports_it(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise keys could be forgotten during a slow upload, and the upload would bring their rows back."""
    query.batch()
    run, seen = run_of(query.coordinator, "run1"), []

    def slow(prepared: Any) -> Any:
        for _ in range(4):
            query.world.now += BUSY_SECONDS / 2
            query.host.maintenance.do_maintenance()
            seen.append(run.files_in_use.is_uploading(query.world.now))
        return store_snapshots(prepared)

    monkeypatch.setattr(maintenance, "store_snapshots", slow)
    query.snapshots()
    assert seen == [True] * 4 and not run.files_in_use.is_uploading(query.world.now)
    assert query.groups() == [1]


def test_upload_declared_dead_stores_nothing(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    query.batch()
    prepare = SnapshotUploads.prepare

    def stalling(self: Any, *args: Any) -> Any:
        query.world.now += BUSY_SECONDS + 1 if not query.groups() else 0.0
        return prepare(self, *args)

    monkeypatch.setattr(SnapshotUploads, "prepare", stalling)
    query.snapshots()
    assert query.groups() == []
    monkeypatch.undo()
    query.snapshots()
    assert query.groups() == [1]


def test_an_upload_that_fails_is_over_at_once(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise forgetting keys would wait for it for a quarter of an hour."""
    query.batch()

    def failing(prepared: Any) -> Any:
        raise StorageError("the bucket is gone")

    monkeypatch.setattr(maintenance, "store_snapshots", failing)
    query.snapshots()
    assert not run_of(query.coordinator, "run1").files_in_use.is_uploading(query.world.now)
