"""Snapshots in manifests, kept and removed files, and where Spark begins, without Ray."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from backends.exceptions import StorageError
from backends.formats.manifest import SnapshotRef
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.records import HISTORY, LookupRecord, LookupRecords
from coordinator_actor.exceptions import UnknownHostError
from coordinator_actor.messages import HostReport, SnapshotUploaded
from coordinator_actor.reading.verification import _damaged_records
from coordinator_actor.run.holds import BUSY_SECONDS, UPLOAD
from coordinator_actor.run.query_state import RECORDS_EVERY
from tests.coordinator_actor.coordinator_world import World, run_of
from tests.coordinator_actor.run.retention_steps import KEEP, begin, maintain, names, plan_spark, run_batches, upload


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_snapshot_is_named_by_the_next_manifest_once_and_shortens_the_lineage(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 4)
    made = upload(world, c, 0)
    assert c.lineage("run1", "op", 0, 5).snapshots == (made,)
    run_batches(world, c, 5, 6)
    named = [[len(p["snapshots"]) for p in m["operators"]["op"]["partitions"].values()] for m in world.manifests()]
    assert named == [[0, 0]] * 5 + [[1, 0], [0, 0]]
    again = begin(world, "run2")
    assert again.lineage("run2", "op", 0, 7).snapshots == (made,)
    assert again.lineage("run2", "op", 0, 4).snapshots == ()
    assert [r.version for r in again.lineage("run2", "op", 0, 7).changelogs] == list(range(1, 8))


def test_a_version_from_before_two_rescalings_has_the_snapshots_of_its_own_time(world: World) -> None:
    """The query has its old number of partitions again: a reader of the old version needs no earlier changelogs."""
    c = begin(world)
    run_batches(world, c, 0, 1)
    made = upload(world, c, 0)
    run_batches(world, c, 2, 2)
    for batch, run, n in ((3, "run2", 3), (4, "run3", 2)):
        assert c.register_query(world.registration(run, n)).refusal is None
        plan_spark(world, batch)
        world.run_batch(c, batch, n, run)
        c.batch_committed(run, batch)
    assert c.lineage("run3", "op", 0, 3).snapshots == (made,)
    assert c.lineage("run3", "op", 0, 5).snapshots == ()


def test_snapshots_of_a_stopped_query_are_there_for_the_next_run(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 2)
    made = upload(world, c, 1)
    c.deactivate_instances("run1")
    assert len(world.manifests()) == 4
    again = begin(world, "run2")
    assert again.lineage("run2", "op", 1, 3).snapshots == (made,)
    run_batches(world, again, 3, 3, "run2")
    assert world.manifests()[-1]["parent"] == 5


def test_a_coordinator_that_takes_up_an_ended_query_knows_the_snapshots_below_its_oldest_version(world: World) -> None:
    """Each partition has its snapshots at other versions, as hosts do whose maintenance is not in step."""
    c = begin(world)
    run_batches(world, c, 0, 4)
    upload(world, c, 0)
    run_batches(world, c, 5, 9)
    upload(world, c, 1)
    for last in (16, 17):
        run_batches(world, c, run_of(c).versions.completed, last)
        maintain(world, c)
    versions = run_of(c).versions
    assert min(versions.chain) < versions.oldest == 10
    lineages = [c.lineage("run1", "op", p, v) for p in range(2) for v in versions.readable]
    assert all(lineage.snapshots for lineage in lineages)
    registration = run_of(c).registration
    c.serve_ended(registration)
    again = world.coordinator()
    assert again.serve_ended(msgspec.structs.replace(registration, ended=True)).refusal is None
    assert run_of(again).versions.readable == versions.readable
    assert [again.lineage("run1", "op", p, v) for p in range(2) for v in versions.readable] == lineages


def test_a_checkpoint_that_is_removed_right_after_its_query_is_not_created_again(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 2)
    upload(world, c, 1)
    shutil.rmtree(world.root / "ck")
    c.deactivate_instances("run1")
    assert not (world.root / "ck").exists()


def test_expired_versions_are_removed_and_the_rest_can_be_loaded(world: World) -> None:
    c = begin(world)
    for end in range(2, 21, 3):
        run_batches(world, c, end - 2, end)
        for p in (0, 1):
            upload(world, c, p)
        maintain(world, c)
    run_batches(world, c, 21, 21)
    maintain(world, c)
    # 22 versions; 3 before the newest are kept and the base of an uncommitted one, so from the snapshot of 15 on.
    assert world.manifests()[-1]["oldest"] == 15
    for p in (0, 1):
        assert names(world, p, "changelog") == list(range(16, 23))
        assert names(world, p, "snapshot") == [15, 18, 21]
        assert {15, 18, 21} <= set(names(world, p, "sst")) and len(names(world, p, "sst")) <= 4
    assert sorted({m["version"] for m in world.manifests()}) == list(range(15, 23))
    again = begin(world, "run2")
    lineage = again.lineage("run2", "op", 0, 22)
    assert [s.version for s in lineage.snapshots] == [15, 18, 21]
    refs = [r.file for r in lineage.changelogs if r.version > 15] + [s.file for s in lineage.snapshots]
    storage = world.storage(str(world.root / "ck/statestore"), {})
    assert all(len(storage.read(ref)) == ref.size for ref in refs)


def test_a_maintenance_removes_all_files_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    delete_all = CheckpointStorage.delete_all

    def counted(storage: CheckpointStorage, paths: Sequence[str]) -> None:
        asked.append(len(paths))
        delete_all(storage, paths)

    c = begin(world)
    for end in (2, 5, 8, 11):
        run_batches(world, c, end - 2, end)
        for p in (0, 1):
            upload(world, c, p)
    maintain(world, c)
    run_batches(world, c, 12, 12)

    def count() -> int:
        # The history of checkpoints is written in the background.
        return sum(p.is_file() and p.parent.name != HISTORY for p in (world.root / "ck/statestore").rglob("*"))

    before = count()
    monkeypatch.setattr(CheckpointStorage, "delete_all", counted)
    maintain(world, c)
    assert asked == [before - count()] and asked[0] > 12


def test_nothing_is_removed_before_a_manifest_says_so_and_while_a_partition_is_loaded(world: World) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        run_batches(world, c, end - 2, end)
        for p in (0, 1):
            upload(world, c, p)
    maintain(world, c)  # plans; no manifest says it yet
    assert names(world, 0, "changelog") == list(range(1, 13))
    run_batches(world, c, 12, 12)
    c.lineage("run1", "op", 0, 13)  # a host begins to load partition 0
    maintain(world, c)
    assert names(world, 0, "changelog") == list(range(1, 14))
    assert names(world, 1, "changelog") == list(range(7, 14))
    world.now += BUSY_SECONDS
    maintain(world, c)
    assert names(world, 0, "changelog") == list(range(7, 14))


def groups(world: World) -> list[int]:
    return sorted(int(f.name.partition("-")[0]) for f in (world.root / "ck/statestore/groups").glob("*"))


def run_grouped_batches(world: World, c: Coordinator, first: int, last: int) -> None:
    for batch in range(first, last + 1):
        plan_spark(world, batch)
        world.run_grouped_batch(c, batch)
        c.batch_committed("run1", batch)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_group_stays_as_long_as_a_manifest_needs_one_of_its_parts(world: World, behind: int) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        run_grouped_batches(world, c, end - 2, end)
        for p in (0, 1):
            if p != behind or end == 2:
                upload(world, c, p)
    maintain(world, c)
    run_grouped_batches(world, c, 12, 12)
    maintain(world, c)
    # One partition begins with a snapshot of version 6, the other with one of version 3.
    assert world.manifests()[-1]["oldest"] == 6 and groups(world) == list(range(4, 14))
    storage = world.storage(str(world.root / "ck/statestore"), {})
    lineage = begin(world, "run2").lineage("run2", "op", behind, 13)
    assert [s.version for s in lineage.snapshots] == [3]
    assert all(len(storage.read(r.file)) == r.file.size for r in lineage.changelogs if r.version > 3)


def test_no_group_is_removed_that_a_load_reads(world: World) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        run_grouped_batches(world, c, end - 2, end)
        for p in (0, 1):
            upload(world, c, p)
    maintain(world, c)
    run_grouped_batches(world, c, 12, 12)
    c.lineage("run1", "op", 0, 13)  # a host begins to load partition 0
    c.lineage("run1", "op", 1, 13, UPLOAD)  # which reads no changelogs
    maintain(world, c)
    assert groups(world) == list(range(6, 14)), "the load may begin with any version that the last manifest keeps"
    world.now += BUSY_SECONDS
    maintain(world, c)
    assert groups(world) == list(range(7, 14))


def test_litter_is_removed_with_its_version(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 0)
    world.stage(world.open(c, 1, 0), 0, 1, "dies before it acknowledges")
    assert names(world, 0, "changelog") == [1, 2]
    for end in (3, 6, 9, 12):
        run_batches(world, c, end - 2, end)
        assert end > 6 or names(world, 0, "changelog")[:3] == [1, 2, 2]
        for p in (0, 1):
            upload(world, c, p)
        maintain(world, c)
    run_batches(world, c, 13, 13)
    maintain(world, c)
    assert names(world, 0, "changelog") == list(range(8, 15))


def test_a_snapshot_of_another_lineage_or_another_host_does_not_count(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 1)
    upload(world, c, 0, head="operators/op/2/0/default/2-other.changelog", counts=False)
    lineage = c.lineage("run1", "op", 0, 2)
    assert lineage.head is not None
    made = SnapshotRef(2, lineage.head, FileRef("operators/op/2/0/default/2-x.snapshot", 1, "d"))
    owner = world.open_owner(c, 0)
    other = "h1" if owner.host_id == "h0" else "h0"
    good = SnapshotUploaded("run1", "op", 0, owner.host_id, owner.incarnation, made, None)

    def begin_upload() -> None:
        c.lineage("run1", "op", 0, 2, UPLOAD)

    begin_upload()
    assert not c.snapshot_uploaded(msgspec.structs.replace(good, host_id=other))
    with pytest.raises(UnknownHostError):
        c.snapshot_uploaded(msgspec.structs.replace(good, incarnation="dead"))
    gone = SnapshotRef(1, "h", FileRef("operators/op/2/0/default/1-gone.snapshot", 1, "d"))
    begin_upload()
    assert not c.snapshot_uploaded(msgspec.structs.replace(good, reused=gone))
    begin_upload()
    c.release_files("run1", "op", 0, UPLOAD)
    assert not c.snapshot_uploaded(good), "the host has given it up, and nothing has protected its files since"
    begin_upload()
    world.now += BUSY_SECONDS + 1
    c.register_host(owner, HostReport())
    c.renew_leases(["run1"])
    assert not c.snapshot_uploaded(good), "it was taken for dead"
    begin_upload()
    assert c.snapshot_uploaded(good) and not c.snapshot_uploaded(good)


def test_going_back_keeps_the_snapshots_that_only_later_manifests_name(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 2)
    made = upload(world, c, 0)
    run_batches(world, c, 3, 5)
    c.deactivate_instances("run1")
    for batch in (3, 4, 5):
        (world.root / f"ck/offsets/{batch}").unlink()
        (world.root / f"ck/commits/{batch}").unlink()
    again = begin(world, "run2")
    assert run_of(again, "run2").versions.completed == 3
    assert again.lineage("run2", "op", 0, 3).snapshots == (made,)
    run_batches(world, again, 3, 3, "run2")
    assert begin(world, "run3").lineage("run3", "op", 0, 4).snapshots == (made,)


@pytest.mark.parametrize(
    ("offsets", "commits", "version"),
    [
        ([], [], 0),
        ([0], [], 0),
        ([0, 1], [0], 1),
        ([0, 1], [0, 1], 2),
        ([0, 1, 2], [], 2),
        ([2, 3], [2], 3),
        ([0, 1, 2], [0], 2),
        ([], [0, 1], 2),
    ],
)
def test_the_version_needed_is_that_of_the_batch_that_spark_begins_with(
    world: World, offsets: list[int], commits: list[int], version: int
) -> None:
    c = begin(world)
    run_batches(world, c, 0, 3)
    for batch in range(4):
        (world.root / f"ck/commits/{batch}").unlink()
        (world.root / f"ck/offsets/{batch}").unlink()
    for batch in commits:
        world.commit_spark(batch)
    for batch in offsets:
        plan_spark(world, batch)
    assert world.coordinator().register_query(world.registration("run3")).completed_version == version


def test_more_removed_from_sparks_logs_than_is_kept_is_refused_until_it_is_restored(world: World) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        run_batches(world, c, end - 2, end)
        for p in (0, 1):
            upload(world, c, p)
        maintain(world, c)
    run_batches(world, c, 12, 12)
    whole = {path: path.read_text() for name in ("offsets", "commits") for path in (world.root / "ck" / name).iterdir()}
    for directory in ("offsets", "commits"):
        for file in (world.root / "ck" / directory).iterdir():
            if int(file.name) > 3:
                file.unlink()
    refusal = world.coordinator().register_query(world.registration("run2")).refusal
    assert refusal is not None and "needs state version 4" in refusal and "versions 6 to 13 are kept" in refusal
    for directory in ("offsets", "commits"):
        for file in (world.root / "ck" / directory).iterdir():
            file.unlink()
    refusal = world.coordinator().register_query(world.registration("run2")).refusal
    assert refusal is not None and "needs state version 0" in refusal
    for path, text in whole.items():  # "Restore them"
        path.write_text(text)
    answer = world.coordinator().register_query(world.registration("run2"))
    assert (answer.refusal, answer.completed_version) == (None, 13)


def test_versions_that_were_the_newest_within_some_seconds_are_kept(world: World) -> None:
    """With ``min_seconds_to_retain``, the version of any time in these seconds can be read, across restarts too.

    A version of which no manifest says when it was completed counts from the next manifest on.
    """
    c = begin(world, seconds=100)
    completed_at: dict[int, float] = {}

    def batches(first: int, last: int, c: Coordinator, run: str) -> None:
        for batch in range(first, last + 1):
            run_batches(world, c, batch, batch, run)
            completed_at[batch + 1] = world.now
            for p in (0, 1):
                upload(world, c, p, run)
            maintain(world, c)
            readable = run_of(c, run).versions.readable
            newest_then = max((v for v, at in completed_at.items() if at <= world.now - 100), default=1)
            assert readable[0] <= newest_then, "the version that was the newest one 100 s ago"

    batches(0, 25, c, "run1")
    oldest = run_of(c, "run1").versions.readable[0]
    assert 26 - 10 >= oldest >= 26 - 20, "older ones are removed"
    assert names(world, 0, "changelog")[0] >= oldest - 4
    again = begin(world, "run2", world.coordinator(), seconds=100)
    batches(26, 32, again, "run2")
    assert run_of(again, "run2").versions.readable[0] > oldest
    shorter = begin(world, "run3", again, seconds=0)
    for batch in range(33, 37):
        run_batches(world, shorter, batch, batch, "run3")
        for p in (0, 1):
            upload(world, shorter, p, "run3")
        maintain(world, shorter)
    assert run_of(shorter, "run3").versions.readable[0] >= 37 - KEEP - 4, "without the seconds, versions alone count"


def test_manifests_that_a_failed_deletion_has_left_are_removed_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = begin(world)

    def go_on(last: int) -> None:
        run_batches(world, c, run_of(c).versions.completed, last)
        for p in range(2):
            upload(world, c, p)
        maintain(world, c)

    def fail(paths: Sequence[str]) -> None:
        raise StorageError("storage is down for a moment")

    for last in range(2, 12, 3):
        go_on(last)
    with monkeypatch.context() as down:
        down.setattr(run_of(c).manifests.storage, "delete_all", fail)
        for last in range(14, 21, 3):
            go_on(last)
        left = min(manifest["version"] for manifest in world.manifests())
    for last in range(23, 33, 3):
        go_on(last)
    assert min(manifest["version"] for manifest in world.manifests()) == min(run_of(c).versions.chain) > left


def test_a_damaged_record_of_a_lookup_does_not_stop_the_removal_of_files(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    c = begin(world)
    run_batches(world, c, 0, 2)
    LookupRecords(run_of(c).manifests.storage).make("other", 7, LookupRecord(3, "run1", 1000))
    path = world.root / "ck/statestore" / LookupRecords.path("other", 7)
    path.write_bytes(path.read_bytes()[:-5])
    for last in range(5, 30, 3):
        run_batches(world, c, last - 2, last)
        for p in range(2):
            upload(world, c, p)
        maintain(world, c)
    assert min(names(world, 0, "changelog")) > 3
    assert "batch 7 of query other has looked up is not kept" in caplog.text
    assert [d.path for d in _damaged_records(run_of(c).manifests.storage)] == [LookupRecords.path("other", 7)]


def test_records_whose_writers_died_are_removed_at_the_second_look(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 2)
    state = world.root / "ck/statestore"

    def write_in_part() -> list[Path]:
        paths = [state / directory / "00000000000000000009.json#7" for directory in ("manifests", "lookups/q", "audit")]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{")
        return paths

    paths = write_in_part()
    for _ in range(RECORDS_EVERY):
        maintain(world, c)
    assert all(path.exists() for path in paths), "a writer may be at work"
    maintain(world, c)
    assert not any(path.exists() for path in paths)
    assert c.lineage("run1", "op", 0, 3).head is not None
