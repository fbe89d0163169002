"""The coordinator's rules, without Ray: real storage in a directory, a clock that tests turn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backends.encoding.schema import StateSchema
from backends.exceptions import DamagedFileError, MissingFileError, StorageError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.fencing import place_path
from coordinator_actor.exceptions import (
    CoordinatorError,
    FencedError,
    IncompleteBatchError,
    InvalidRequestError,
    LineageError,
    RetiredRunError,
    StaleBatchError,
    StaleOwnerError,
    UnknownHostError,
    UnknownOperatorError,
    UnknownRunError,
)
from coordinator_actor.messages import MIRROR, HostReport, InputPace, OperatorSpec
from coordinator_actor.run.owners import assign
from spark_bridge.exceptions import rebuilt_error
from tests.coordinator_actor.coordinator_world import SCHEMA, World, acknowledge, run_of

OTHER_KEY = StateSchema(pa.schema([("k", pa.string())]), pa.schema([("n", pa.int64())])).to_json()
OTHER_STATE = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.float64())])).to_json()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def started(world: World) -> Coordinator:
    c = world.coordinator()
    assert c.register_query(world.registration()).refusal is None
    return c


def test_a_pause_while_leases_are_checked_ends_no_lease(world: World) -> None:
    """All leases are compared with one reading of the clock, so a pause after that reading does no harm."""
    step = 0.0

    def clock() -> float:
        world.now += step
        return world.now - step

    c = Coordinator(clock, world.storage, CoordinatorConf(report_timeout=0.0, host_timeout=10.0))
    c.register_host(world.host(0), HostReport())
    c.register_query(world.registration())
    step = 1000.0
    c.expire()
    step = 0.0
    assert [h["host_id"] for h in c.describe()["hosts"]] == ["h0"]
    assert [q["run_id"] for q in c.describe()["queries"]] == ["run1"]


def test_the_last_acknowledgement_prepares_the_version_and_sparks_commit_completes_it(
    world: World, started: Coordinator
) -> None:
    assert [a.manifest_id for a in world.run_batch(started, 0)] == [None, 1]
    grant = world.open(started, 1)
    assert grant.version == 1
    assert grant.head is not None and grant.head.startswith("operators/op/2/0/default/1-")
    assert [r.version for r in started.lineage("run1", "op", 0, 1).changelogs] == [1]
    world.run_batch(started, 1)
    first, second = world.manifests()
    assert (first["parent"], second["parent"], second["version"], second["run_id"]) == (None, 1, 2, "run1")
    assert second["operators"]["op"]["partitions"]["1"]["attempt"] == "t"


def test_the_drivers_heartbeat_replaces_a_lost_progress_event(world: World, started: Coordinator) -> None:
    world.run_batch(started, 0)
    (world.root / "ck/commits/0").unlink()
    assert started.driver_heartbeat("run1") is True
    assert started.open_for_read("run1", "op", 0).version == 0
    world.commit_spark(0)
    assert started.driver_heartbeat("run1") is True
    assert started.open_for_read("run1", "op", 0).version == 1
    assert started.driver_heartbeat("nobody") is False


def test_lag_of_a_mirror_outlives_its_driver_and_the_coordinator(world: World) -> None:
    registration = world.registration(operators=(OperatorSpec("op", 2, SCHEMA, kind=MIRROR),))

    def lags(c: Coordinator) -> tuple[float, float]:
        (query,) = c.describe()["queries"]
        assert query["is_mirror"]
        return query["lag_seconds"], round(c.heartbeat_host("h0", "a", {}).lags.get("run1", 0.0), 1)

    c = world.coordinator()
    c.register_query(registration)
    world.run_batch(c, 0)
    c.driver_heartbeat("run1", pace=InputPace(behind_seconds=3.0))
    assert lags(c) == (3.0, 3.0)
    world.now += 10
    assert lags(c) == (13.0, 13.0), "its driver says nothing any more"
    again = world.coordinator()
    again.serve_ended(registration)
    assert lags(again) == (10.0, 10.0), "the version is that old"


def test_a_version_is_not_completed_before_sparks_commit(world: World, started: Coordinator) -> None:
    for p in range(2):
        acknowledge(started, world.stage(world.open(started, 0, p), p, 0, "t"))
    with pytest.raises(InvalidRequestError, match="commits/0"):
        world.open(started, 1)
    with pytest.raises(InvalidRequestError, match="not completed"):
        started.lineage("run1", "op", 0, 1)
    assert started.open_for_read("run1", "op", 0).version == 0
    world.commit_spark(0)
    assert started.batch_committed("run1", 0) is True
    assert started.batch_committed("run1", 0) is False
    (completed,) = started.heartbeat_host("h0", "a", {"run1": 0}).completed
    (of_other,) = started.heartbeat_host("h1", "a", {"run1": 0}).completed
    assert (completed.version, sorted([*completed.heads["op"], *of_other.heads["op"]])) == (1, [0, 1])
    assert started.heartbeat_host("h0", "a", {"run1": 0}).completed == (completed,), "an answer may have been lost"
    assert started.heartbeat_host("h0", "a", {"run1": 1}).completed == ()


def test_a_host_that_sees_a_commit_completes_the_version_and_gets_its_own_part(
    world: World, started: Coordinator
) -> None:
    for p in range(2):
        acknowledge(started, world.stage(world.open(started, 0, p), p, 0, "t"))
    world.commit_spark(0)
    seen = started.see_commit("run1", 0, "h0")
    (completed,) = started.heartbeat_host("h0", "a", {"run1": 0}).completed
    assert seen == completed and seen.version == 1 and len(seen.heads["op"]) == 1
    assert started.see_commit("run1", 0, "h0") == seen, "an answer may have been lost"
    with pytest.raises(UnknownRunError):
        started.see_commit("run of another cluster", 0, "h0")


def test_the_last_acknowledgement_is_not_answered_before_the_manifest_is_durable(
    world: World, started: Coordinator
) -> None:
    def full(path: str) -> None:
        if path.startswith("manifests/"):
            raise StorageError("disk full")

    acknowledge(started, world.stage(world.open(started, 0, 0), 0, 0, "t"))
    last = world.stage(world.open(started, 0, 1), 1, 0, "t")
    world.put_hook = full
    with pytest.raises(StorageError):
        acknowledge(started, last)
    assert world.manifests() == []
    world.put_hook = None
    assert acknowledge(started, last).manifest_id == 2  # 1 may exist all the same, or appear later


def test_a_repeated_attempt_replaces_the_first_by_a_manifest_with_a_higher_id(
    world: World, started: Coordinator
) -> None:
    world.run_batch(started, 0)
    for p in range(2):
        acknowledge(started, world.stage(world.open(started, 1, p), p, 1, "first"))
    again = acknowledge(started, world.stage(world.open(started, 1, 1), 1, 1, "second"))
    assert again.manifest_id == 3
    made = world.manifests()
    assert [(m["id"], m["parent"], m["version"]) for m in made] == [(1, None, 1), (2, 1, 2), (3, 1, 2)]
    attempts = {p: e["attempt"] for p, e in made[2]["operators"]["op"]["partitions"].items()}
    assert attempts == {"0": "first", "1": "second"}
    world.commit_spark(1)
    assert world.open(started, 2, 1).head == made[2]["operators"]["op"]["partitions"]["1"]["changelog"]["path"]


def test_an_acknowledgement_whose_answer_was_lost_makes_no_other_manifest(world: World, started: Coordinator) -> None:
    messages = [world.stage(world.open(started, 0, p), p, 0, "t") for p in range(2)]
    assert [acknowledge(started, m).manifest_id for m in messages] == [None, 1]
    assert [acknowledge(started, m).manifest_id for m in messages] == [1, 1]
    assert len(world.manifests()) == 1


def test_late_commits_are_refused_and_change_nothing(world: World, started: Coordinator) -> None:
    late = world.stage(world.open(started, 0), 0, 0, "late")
    world.run_batch(started, 0)
    world.open(started, 1)
    with pytest.raises(StaleBatchError):
        acknowledge(started, late)
    with pytest.raises(StaleBatchError):
        world.open(started, 0)
    assert len(world.manifests()) == 1


def test_acknowledgements_count_only_from_the_owner_that_is_known(world: World, started: Coordinator) -> None:
    good = world.stage(world.open(started, 0), 0, 0, "t")
    other = "h1" if good.host_id == "h0" else "h0"
    with pytest.raises(StaleOwnerError, match="does not own"):
        acknowledge(started, msgspec.structs.replace(good, host_id=other))
    with pytest.raises(UnknownHostError):
        acknowledge(started, msgspec.structs.replace(good, incarnation="older"))
    with pytest.raises(LineageError):
        acknowledge(started, msgspec.structs.replace(good, base="elsewhere"))
    with pytest.raises(InvalidRequestError, match="2 partitions"):
        acknowledge(started, msgspec.structs.replace(good, partition=2))
    with pytest.raises(UnknownRunError):
        acknowledge(started, msgspec.structs.replace(good, run_id="nobody"))


def test_a_newer_run_retires_the_older_and_starts_from_the_last_committed_batch(
    world: World, started: Coordinator
) -> None:
    world.run_batch(started, 0)
    old = world.stage(world.open(started, 1, 0), 0, 1, "old")
    answer = started.register_query(world.registration("run2"))
    assert (answer.refusal, answer.completed_version, answer.epoch) == (None, 1, 2)
    with pytest.raises(RetiredRunError, match="run2"):
        acknowledge(started, old)
    with pytest.raises(RetiredRunError, match="run2"):
        world.open(started, 1)
    assert started.heartbeat_host("h0", "a", {"run1": 0}).unload_runs == ("run1",)
    world.run_batch(started, 1, run="run2")
    # The newer one has first recorded the existing version under its epoch.
    assert [(m["run_id"], m["epoch"]) for m in world.manifests()] == [("run1", 1), ("run1", 2), ("run2", 2)]


def test_an_uncommitted_version_of_an_older_run_is_done_again_from_its_base(world: World, started: Coordinator) -> None:
    """The driver was killed between our commit and Spark's own."""
    world.run_batch(started, 0)
    world.plan_spark(1)
    for p in range(2):
        acknowledge(started, world.stage(world.open(started, 1, p), p, 1, "t"))
    answer = world.coordinator().register_query(world.registration("run2"))
    assert answer.completed_version == 1
    c = world.coordinator()
    c.register_query(world.registration("run3"))
    world.run_batch(c, 1, run="run3")
    assert [(m["version"], m["parent"], m["run_id"], m["epoch"]) for m in world.manifests()] == [
        (1, None, "run1", 1), (2, 1, "run1", 1), (2, 1, "run1", 2), (2, 1, "run1", 3), (2, 1, "run3", 3),
    ]  # fmt: skip


def test_a_user_who_deletes_sparks_last_commits_goes_back(world: World, started: Coordinator) -> None:
    for batch in range(4):
        world.run_batch(started, batch)
    for batch in (2, 3):
        (world.root / "ck/commits" / str(batch)).unlink()
    c = world.coordinator()
    assert c.register_query(world.registration("run2")).completed_version == 2
    back = world.manifests()[-1]
    assert (back["version"], back["parent"], back["operators"]) == (2, 1, world.manifests()[1]["operators"])
    grant = world.open(c, 2, 0, "run2")
    assert grant.head == back["operators"]["op"]["partitions"]["0"]["changelog"]["path"]
    world.run_batch(c, 2, run="run2")
    assert world.manifests()[-1]["parent"] == back["id"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query_id": "another"}, ["query q", "another"]),
        ({"key_groups": 512}, ["1024", "512"]),
        ({"operators": (OperatorSpec("other", 2, SCHEMA),)}, ["'op'", "'other'"]),
        ({"operators": (OperatorSpec("op", 2, OTHER_KEY),)}, ["key schema", "k long", "k string"]),
        ({"operators": (OperatorSpec("op", 2, OTHER_STATE),)}, ["state schema", "n long", "n double"]),
        ({"operators": (OperatorSpec("op", 2000, SCHEMA),)}, ["1024"]),
    ],
)
def test_a_program_that_does_not_fit_the_checkpoint_is_refused(
    world: World, started: Coordinator, change: dict[str, Any], words: list[str]
) -> None:
    world.run_batch(started, 0)
    epochs = list((world.root / "ck/statestore/epochs").iterdir())
    refusal = world.coordinator().register_query(world.registration("run2", **change)).refusal
    assert refusal is not None
    assert [w for w in words if w not in refusal] == [], refusal
    assert list((world.root / "ck/statestore/epochs").iterdir()) == epochs


def test_the_remedy_for_a_refused_program_works(world: World, started: Coordinator) -> None:
    world.run_batch(started, 0)

    def refusal_of(**changes: Any) -> str | None:
        return world.coordinator().register_query(world.registration("run2", **changes)).refusal

    refusal = refusal_of(key_groups=512)
    named = re.search(r"set spark\.statestore\.keyGroups=(\d+)\.", refusal or "")
    assert named is not None and refusal_of(key_groups=int(named[1])) is None
    refusal = refusal_of(operators=(OperatorSpec("other", 2, SCHEMA),))
    named = re.search(r"has the operators '(\w+)', and the program has 'other'; give", refusal or "")
    assert named is not None and refusal_of(operators=(OperatorSpec(named[1], 2, SCHEMA),)) is None
    refusal = refusal_of(operators=(OperatorSpec("op", 2000, SCHEMA),))
    named = re.search(r"key groups \((\d+)\); lower num_partitions", refusal or "")
    assert named is not None and refusal_of(operators=(OperatorSpec("op", int(named[1]), SCHEMA),)) is None
    refusal = refusal_of(query_id="another")
    assert refusal is not None and refusal.endswith("Use a separate checkpoint location.")
    own = {"checkpoint_location": f"{world.root}/own", "state_location": f"{world.root}/own/statestore"}
    assert refusal_of(query_id="another", **own) is None


def test_commits_without_state_are_refused(world: World) -> None:
    world.commit_spark(4)
    refusal = world.coordinator().register_query(world.registration()).refusal
    assert refusal is not None and "version 5" in refusal and "no version exists" in refusal


def delete_the_files_named_in(refusal: str, world: World) -> None:
    """Follow "delete commits/0 and offsets/1 in the checkpoint location": delete exactly the files that it names."""
    found = re.search(r"delete (.*?) in the checkpoint location", refusal)
    assert found is not None, refusal
    for span in found[1].split(" and "):
        ends = [re.fullmatch(r"(commits|offsets)/(\d+)", name) for name in span.split(" to ")]
        (directory,) = {end[1] for end in ends if end is not None}
        numbers = [int(end[2]) for end in ends if end is not None]
        for number in range(numbers[0], numbers[-1] + 1):
            (world.root / "ck" / directory / str(number)).unlink(missing_ok=True)


def test_the_remedy_for_a_batch_that_ran_only_in_part_works(world: World, started: Coordinator) -> None:
    world.plan_spark(0)
    acknowledge(started, world.stage(world.open(started, 0, 0), 0, 0, "t"))
    world.commit_spark(0)
    world.plan_spark(1)
    remedy = r"op/1.*foreachBatch.*delete commits/0 and offsets/1 .*commits/\.0\.crc and offsets/\.1\.crc"
    with pytest.raises(IncompleteBatchError, match=remedy):
        world.open(started, 1)
    refusal = world.coordinator().register_query(world.registration("run2")).refusal
    assert refusal is not None and "foreachBatch" in refusal
    delete_the_files_named_in(refusal, world)
    c = world.coordinator()
    answer = c.register_query(world.registration("run3"))
    assert (answer.refusal, answer.completed_version) == (None, 0), "it repeats the batch from the state before it"
    for batch in range(2):
        world.run_batch(c, batch, run="run3")
    assert c.batch_committed("run3", 1)


def test_the_remedy_for_batches_in_which_nothing_ran_works(world: World, started: Coordinator) -> None:
    """A foreachBatch that does not consume its DataFrame."""
    for batch in range(2):
        world.plan_spark(batch)
    world.commit_spark(0)
    refusal = world.coordinator().register_query(world.registration("run2")).refusal
    assert refusal is not None and "needs state version 1" in refusal and "no version exists" in refusal
    remedy = r"foreachBatch .*delete commits/0 and offsets/1 .*commits/\.0\.crc and offsets/\.1\.crc"
    assert re.search(remedy, refusal), refusal
    world.plan_spark(2)
    world.commit_spark(1)
    refusal = world.coordinator().register_query(world.registration("run2")).refusal
    assert refusal is not None
    assert "batches 0 to 1" in refusal and "delete commits/0 to commits/1 and offsets/1 to offsets/2" in refusal
    delete_the_files_named_in(refusal, world)
    c = world.coordinator()
    assert c.register_query(world.registration("run2")).refusal is None
    for batch in range(3):
        world.plan_spark(batch)
        world.run_batch(c, batch, run="run2")
    for batch in range(3, 5):  # and behind batches that ran
        world.plan_spark(batch)
        world.commit_spark(batch)
    refusal = world.coordinator().register_query(world.registration("run3")).refusal
    assert refusal is not None and "delete commits/3 to commits/4 and offsets/4 to offsets/5" in refusal
    offsets_3 = world.root / "ck/offsets/3"
    content = offsets_3.read_text()
    offsets_3.unlink()  # Spark keeps the offsets of minBatchesToRetain batches
    without_offsets = world.coordinator().register_query(world.registration("run3")).refusal
    assert without_offsets is not None and without_offsets.endswith("start with a new checkpoint location.")
    elsewhere = {"checkpoint_location": f"{world.root}/new", "state_location": f"{world.root}/new/statestore"}
    assert world.coordinator().register_query(world.registration("run3", **elsewhere)).refusal is None
    offsets_3.write_text(content)
    delete_the_files_named_in(refusal, world)
    c = world.coordinator()
    answer = c.register_query(world.registration("run4"))
    assert (answer.refusal, answer.completed_version) == (None, 3)
    world.run_batch(c, 3, run="run4")
    assert c.batch_committed("run4", 3)


def test_a_version_without_a_manifest_is_put_together_from_groups_and_files(world: World, started: Coordinator) -> None:
    """The last attempt of one partition has a separate file; a group of another run of the batch does not count."""
    world.run_grouped_batch(started, 0)
    grants = {p: world.open(started, 1, p) for p in range(2)}
    in_group = world.stage_group({0: grants[0]}, 1, "t", "run1")
    alone = world.stage(grants[1], 1, 1, "t")
    world.stage_group(grants, 1, "other", "run0")
    world.commit_spark(1)
    c = world.coordinator()
    assert c.register_query(world.registration("run2")).refusal is None
    entries = run_of(c, "run2").versions.chain[2].operators["op"].partitions
    assert [entries[p].changelog for p in range(2)] == [in_group[0].file, alone.file]
    assert entries[0].changelog.within is not None and entries[1].changelog.within is None


def test_a_damaged_index_of_a_group_that_a_version_may_need_is_named(world: World, started: Coordinator) -> None:
    world.run_grouped_batch(started, 0)
    world.stage_group({p: world.open(started, 1, p) for p in range(2)}, 1, "t", "run1")
    world.commit_spark(1)
    older, group = sorted((world.root / "ck/statestore/groups").iterdir())
    whole = group.read_bytes()
    group.write_bytes(whole[:-1])
    with pytest.raises(DamagedFileError, match=f"{group.name} is damaged: it has no footer"):
        world.coordinator().register_query(world.registration("run2"))
    group.write_bytes(whole)
    older.write_bytes(b"x")  # its version has a manifest
    assert world.coordinator().register_query(world.registration("run2")).refusal is None


def test_a_stale_listing_that_hides_a_group_refuses_the_query_and_makes_no_other_state(
    world: World, started: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run_grouped_batch(started, 0)
    world.stage_group({p: world.open(started, 1, p) for p in range(2)}, 1, "t", "run1")
    world.commit_spark(1)
    list_all = CheckpointStorage.list

    def stale(storage: CheckpointStorage, directory: str = "", after: str | None = None) -> list[tuple[str, int]]:
        found = list_all(storage, directory, after=after)
        return [(path, size) for path, size in found if not path.startswith("groups/2-")]

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointStorage, "list", stale)
        refusal = world.coordinator().register_query(world.registration("run2")).refusal
    assert refusal is not None and refusal.startswith("Spark has committed batch 1 of"), refusal
    assert max(m["version"] for m in world.manifests()) == 1
    c = world.coordinator()
    assert c.register_query(world.registration("run3")).refusal is None
    assert run_of(c, "run3").versions.completed == 2


def test_changes_of_two_runs_never_make_one_version(world: World, started: Coordinator) -> None:
    """Spark may have planned the batch again for the second run, with other rows."""
    acknowledge(started, world.stage(world.open(started, 0, 0), 0, 0, "t"))
    c = world.coordinator()
    assert c.register_query(world.registration("run2")).refusal is None
    acknowledge(c, world.stage(world.open(c, 0, 1, "run2"), 1, 0, "t", "run2"))
    world.commit_spark(0)
    refusal = world.coordinator().register_query(world.registration("run3")).refusal
    assert refusal is not None and "1 of 2 state partitions never ran in it (op/0)" in refusal
    assert world.manifests() == []


def test_a_missing_manifest_in_the_middle_is_damage_that_names_it(world: World, started: Coordinator) -> None:
    for batch in range(3):
        world.run_batch(started, batch)
    (world.root / "ck/statestore" / place_path(1, 2)).unlink()
    with pytest.raises(
        MissingFileError, match=r"Manifest 2, a file before .*/manifests/.*-0*3\.json.*does not exist, but version 3"
    ):
        world.coordinator().register_query(world.registration("run2"))


@pytest.mark.parametrize("path", [place_path(1, 1), f"epochs/{1:020d}.json", "query.json"])
def test_a_flipped_digit_in_a_record_is_damage_that_names_it(world: World, started: Coordinator, path: str) -> None:
    world.run_batch(started, 0)
    file = world.root / "ck/statestore" / path
    changed = file.read_bytes().replace(b"1", b"2", 1)
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    with pytest.raises(DamagedFileError, match=path):
        world.coordinator().register_query(world.registration("run2"))


def test_of_two_coordinators_only_the_newer_completes_versions(world: World, started: Coordinator) -> None:
    world.run_batch(started, 0)
    held = [world.stage(world.open(started, 1, p), p, 1, "old") for p in range(2)]
    newer = world.coordinator()
    assert newer.register_query(world.registration("run2")).epoch == 2
    acknowledge(started, held[0])
    with pytest.raises(FencedError, match="this one has epoch 1"):
        acknowledge(started, held[1])
    world.run_batch(newer, 1, run="run2")
    head = max(world.manifests(), key=lambda m: (m["epoch"], m["id"]))
    assert head["run_id"] == "run2"
    third = world.coordinator()
    third.register_query(world.registration("run3"))
    wanted = head["operators"]["op"]["partitions"]["0"]["changelog"]["path"]
    assert world.open(third, 2, 0, "run3").head == wanted


def test_the_commit_of_a_run_in_another_cluster_completes_nothing_here(world: World, started: Coordinator) -> None:
    """The old coordinator has prepared the version; a newer run makes it again, and Spark commits that."""
    for p in range(2):
        acknowledge(started, world.stage(world.open(started, 0, p), p, 0, "old"))
    newer = world.coordinator()
    newer.register_query(world.registration("run2"))
    world.run_batch(newer, 0, run="run2", attempt="new")
    for seen in (lambda: started.batch_committed("run1", 0), lambda: started.driver_heartbeat("run1")):
        with pytest.raises(FencedError, match="taken over"):
            seen()
    assert started.open_for_read("run1", "op", 0).version == 0


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_takeover_around_the_manifest_write_loses_no_answered_acknowledgement(
    world: World, started: Coordinator, moment: str
) -> None:
    """If the old coordinator answers, the new one has seen its manifest; else it does not answer."""
    acknowledge(started, world.stage(world.open(started, 0, 0), 0, 0, "t"))
    last = world.stage(world.open(started, 0, 1), 1, 0, "t")
    newer = world.coordinator()

    def take_over(path: str) -> None:
        if path.startswith("manifests/"):
            world.put_hook = None
            newer.register_query(world.registration("run2"))

    if moment == "before":
        world.put_hook = take_over
        with pytest.raises(FencedError):
            acknowledge(started, last)
    else:
        assert acknowledge(started, last).manifest_id == 1
        newer.register_query(world.registration("run2"))
    world.commit_spark(0)
    third = world.coordinator()
    assert third.register_query(world.registration("run3")).refusal is None
    assert world.open(third, 1, 0, "run3").head is not None


def test_a_restarted_coordinator_learns_the_running_batch_from_its_hosts(world: World, started: Coordinator) -> None:
    world.run_batch(started, 0)
    grants = [world.open(started, 1, p) for p in range(2)]
    first = world.stage(grants[0], 0, 1, "t")
    acknowledge(started, first)

    restarted = world.coordinator(hosts=0)
    report = HostReport((world.registration(),), (first,), {"run1": 1})
    for i in range(2):
        restarted.register_host(world.host(i), report)
    answer = acknowledge(restarted, world.stage(grants[1], 1, 1, "t"))
    assert answer.manifest_id == 3
    assert world.manifests()[-1]["epoch"] == 2


def test_acknowledgements_lost_with_coordinator_and_host_are_found_in_storage(
    world: World, started: Coordinator
) -> None:
    world.run_batch(started, 0)
    for p in range(2):
        grant = world.open(started, 1, p)
        message = world.stage(grant, p, 1, "t")
        if p == 0:
            acknowledge(started, message)
    restarted = world.coordinator()
    restarted.register_query(world.registration())
    for p in (0, 1):
        world.open(restarted, 1, p)
    world.commit_spark(1)
    grant = world.open(restarted, 2, 0)
    assert grant.version == 2 and grant.head is not None
    assert [m["version"] for m in world.manifests()] == [1, 1, 2]


def test_an_old_run_reported_by_a_host_does_not_retire_the_newer_one(world: World, started: Coordinator) -> None:
    started.register_query(world.registration("run2"))
    restarted = world.coordinator()
    restarted.register_query(world.registration("run2"))
    restarted.register_host(world.host(0), HostReport((world.registration("run1"),)))
    world.run_batch(restarted, 0, run="run2")
    with pytest.raises(CoordinatorError):
        world.open(restarted, 0, run="run1")


def test_owners_are_balanced_stay_put_and_move_when_their_host_is_lost(world: World) -> None:
    c = world.coordinator(hosts=3)
    c.register_query(world.registration(n=9))
    before = [o.host_id for o in c.locate("op").owners]
    assert sorted(before.count(h) for h in ("h0", "h1", "h2")) == [3, 3, 3]
    world.now += 9
    for i in (0, 1):
        c.heartbeat_host(f"h{i}", "a")
    world.now += 5
    c.expire()
    after = [o.host_id for o in c.locate("op").owners]
    assert "h2" not in after
    assert all(a == b for a, b in zip(after, before, strict=True) if b != "h2")
    assert c.heartbeat_host("h2", "a").known is False


def test_changes_that_arrive_while_the_run_ends_are_not_acknowledged(
    world: World, started: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease ends without waiting for a thread that works on the run; that thread then writes no manifest."""
    checkpoints = run_of(started, "run1").machine.checkpoints
    count = checkpoints.acknowledge

    def ends(*args: Any) -> Any:
        checkpoints.cancel_all("the query has ended")
        return count(*args)

    for partition in (0, 1):
        message = world.stage(world.open(started, 0, partition), partition, 0, "t")
        if partition == 1:
            monkeypatch.setattr(checkpoints, "acknowledge", ends)
            with pytest.raises(RetiredRunError, match="its checkpoint 1 was cancelled"):
                acknowledge(started, message)
        else:
            acknowledge(started, message)
    assert world.manifests() == []


def test_a_restarted_host_is_a_new_incarnation(world: World, started: Coordinator) -> None:
    started.register_host(world.host(0, "b"), HostReport())
    assert started.heartbeat_host("h0", "a").known is False
    assert started.heartbeat_host("h0", "b").known is True


def test_a_coordinator_that_has_just_begun_does_not_deny_an_operator(tmp_path):
    world = World(tmp_path)
    c = Coordinator(lambda: world.now, world.storage)
    with pytest.raises(UnknownRunError, match="ask again"):
        c.locate("nobody")
    world.now += CoordinatorConf().report_timeout
    with pytest.raises(UnknownOperatorError):
        c.locate("nobody")


def test_locate_names_the_existing_operators(world: World, started: Coordinator) -> None:
    with pytest.raises(UnknownOperatorError, match="'op'"):
        started.locate("nobody")
    other = world.registration("run9", query_id="q9", state_location=str(world.root / "other"), name=None)
    started.register_query(other)
    with pytest.raises(UnknownOperatorError, match=r"query=.*name \(q, run run1\).*unnamed \(q9, run run9\)"):
        started.locate("op")
    assert started.locate("op", "q9").run_id == started.locate("op", "run9").run_id == "run9"
    assert started.locate("op", "name").run_id == "run1"


def test_a_run_that_is_over_is_unloaded_and_refuses_everything(world: World, started: Coordinator) -> None:
    assert started.deactivate_instances("run1") is True
    assert started.heartbeat_host("h0", "a", {"run1": 0}).unload_runs == ("run1",)
    with pytest.raises(RetiredRunError, match="query ended"):
        world.open(started, 0)
    started.register_host(world.host(0), HostReport((world.registration(),)))
    with pytest.raises(RetiredRunError):
        world.open(started, 0)


def test_leases_end(world: World, started: Coordinator) -> None:
    world.now += 61
    started.expire()
    assert started.describe()["queries"] == [] and started.describe()["hosts"] == []
    assert not started.is_idle()
    world.now += CoordinatorConf().idle_timeout
    assert started.is_idle()


def test_leases_do_not_run_while_the_coordinator_stalls(world: World, started: Coordinator) -> None:
    world.now += 6
    started.heartbeat_host("h0", "a")
    world.now += 100
    started.expire(stood_still=99)
    assert [h["host_id"] for h in started.describe()["hosts"]] == ["h0", "h1"] and started.describe()["queries"]
    assert all(h["seconds_since_heartbeat"] >= 0 for h in started.describe()["hosts"])
    world.now += 4
    started.expire()  # h1 has sent no heartbeat for 11 s of the coordinator's time
    assert [h["host_id"] for h in started.describe()["hosts"]] == ["h0"]
    world.now += 49
    started.expire()
    assert started.describe()["queries"]
    world.now += 1
    started.expire()
    assert not started.describe()["queries"] and not started.describe()["hosts"]
    world.now += 500  # it was not needed for 654 s, of which 99 do not count
    assert not started.is_idle()
    world.now += 46
    assert started.is_idle()


def test_assignment_without_hosts_left_over() -> None:
    assert assign(["a", "b"], ["h"], {"a": "gone"}) == {"a": "h", "b": "h"}


def test_errors_cross_the_network_by_name() -> None:
    assert type(rebuilt_error("FencedError", "x")) is FencedError
    assert type(rebuilt_error("os", "x", CoordinatorError)) is CoordinatorError
