"""The history of checkpoints: its entries for a version, and that it outlives coordinators, without Ray."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import StorageError
from backends.formats.manifest import Manifest
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import num_requests, used_together
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.durable.fencing import RecordFiles, numbered_path
from coordinator_actor.durable.moved_checkpoints import fork_checkpoint
from coordinator_actor.durable.records import (
    HISTORY,
    KEPT_FILES,
    MAX_RECORDS,
    CheckpointRecord,
    CheckpointRecords,
    HistoryFile,
)
from coordinator_actor.messages import MAX_STEPS, CommitFigures, HostReport
from coordinator_actor.run.history import WRITE_SECONDS, CheckpointHistory
from tests.coordinator_actor.coordinator_world import HangingStorage, World, acknowledge, batches, begin, run_of, staged


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def history(c: Coordinator, query: str = "q") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = c.checkpoint_stats(query)["history"]
    return found


def files(world: World) -> list[str]:
    return sorted(path.name for path in (world.root / "ck/statestore" / HISTORY).glob("*"))


def later(world: World, c: Coordinator, seconds: float = WRITE_SECONDS) -> None:
    world.now += seconds
    c.maintain()


def test_a_record_says_when_each_step_was_done_and_what_it_did(world: World) -> None:
    c = begin(world)
    world.plan_spark(0)
    first = staged(
        world,
        c,
        0,
        0,
        CommitFigures(5, 4, 1, 2, {"put": 6, "get": 1, "sent_bytes": 70}, {"get_ms": 10.0, "changelog_ms": 3.0}),
    )
    second = staged(world, c, 0, 1, CommitFigures(6, 5, 0, 0, {"put": 2, "sent_bytes": 30}, {"get_ms": 30.0}, 4))
    world.now += 1.0
    acknowledge(c, first)
    world.now += 2.0

    def manifests_take_a_while(path: str) -> None:
        world.now += 0.5 if path.startswith("manifests/") else 0.0

    world.put_hook = manifests_take_a_while
    acknowledge(c, second)
    world.put_hook = None
    world.now += 4.0
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    (record,) = history(c)
    sizes = sum(m.file.size for m in (first, second))
    assert {name: record[name] for name in ("version", "run_id", "epoch", "partitions", "delta_bytes", "retried")} == {
        "version": 1,
        "run_id": "run1",
        "epoch": 1,
        "partitions": 2,
        "delta_bytes": sizes,
        "retried": 0,
    }
    assert record["phases"] == {"tasks": 1000, "acknowledge": 2000, "manifest": 500, "commit": 4000}
    assert record["duration_ms"] == 3500
    assert (record["begun_ms"], record["completed_ms"]) == (1_000_000, 1_007_500)
    assert [record[name] for name in ("rows", "updated", "removed", "late", "duplicates")] == [11, 9, 1, 2, 4]
    assert record["steps"] == {
        "get_ms": {"sum_ms": 40.0, "max_ms": 30.0},
        "changelog_ms": {"sum_ms": 3.0, "max_ms": 3.0},
    }
    assert record["id"] == world.manifests()[-1]["id"]
    # Nine by hosts; the coordinator has at least written a manifest and looked for Spark's commit.
    assert record["requests"] >= 9 + 2
    used = record["storage"]
    assert record["requests"] == num_requests(used) and used["put"] >= 8 + 1 and used["get"] >= 1
    assert used["sent_bytes"] > 100


def test_requests_are_those_since_the_version_before(world: World) -> None:
    c = begin(world)
    batches(world, c, 0, 1)
    run = run_of(c)
    before = num_requests(used_together(run.manifests.storage.used, run.commits.used))
    for _ in range(50):
        run.manifests.storage.exists("query.json")
    batches(world, c, 2, 2)
    after = num_requests(used_together(run.manifests.storage.used, run.commits.used))
    second, third = history(c)[-2:]
    assert third["requests"] == after - before
    assert third["requests"] == second["requests"] + 50


def test_a_repeated_partition_counts_once_and_is_retried(world: World) -> None:
    c = begin(world)
    world.plan_spark(0)
    acknowledge(c, staged(world, c, 0, 0, CommitFigures(rows=5)))
    acknowledge(c, staged(world, c, 0, 0, CommitFigures(rows=7)))
    acknowledge(c, staged(world, c, 0, 1, CommitFigures(rows=1)))
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    (record,) = history(c)
    assert (record["retried"], record["rows"]) == (1, 8)


def test_names_of_steps_are_bounded(world: World) -> None:
    c = begin(world)
    world.plan_spark(0)
    for p in range(2):
        steps = {f"step{i + p * MAX_STEPS}": 1.0 for i in range(MAX_STEPS)}
        acknowledge(c, staged(world, c, 0, p, CommitFigures(steps=steps)))
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    assert len(history(c)[0]["steps"]) == MAX_STEPS


def test_the_history_outlives_the_coordinator_and_the_run(world: World) -> None:
    c = begin(world)
    batches(world, c, 0, 2)
    assert files(world) == []  # nothing is written while batches run
    later(world, c)
    before = history(c)
    assert [record["version"] for record in before] == [1, 2, 3]
    assert len(files(world)) == 1

    # The coordinator is killed; the next one has the same run.
    c = begin(world)
    later(world, c, 0.0)
    assert history(c) == before
    batches(world, c, 3, 3)
    c.deactivate_instances("run1")

    # The run is over: its last version is in storage, and the next run continues the history.
    c = begin(world, "run2")
    later(world, c, 0.0)
    assert [(record["version"], record["run_id"]) for record in history(c)] == [(v, "run1") for v in (1, 2, 3, 4)]


def test_one_file_takes_many_versions_and_old_files_go(world: World) -> None:
    c = begin(world, maintenance_interval=1.0)
    for first in range(0, 12, 3):
        batches(world, c, first, first + 2)
        later(world, c)
    # Each pass tidies up what the pass before has left.
    later(world, c)
    assert len(files(world)) == KEPT_FILES
    assert [record["version"] for record in history(c)] == list(range(1, 13))


def test_the_number_of_records_is_bounded(world: World) -> None:
    storage = world.storage(str(world.root / "ck/statestore"), {})
    made = CheckpointHistory(CheckpointRecords(RecordFiles(storage)), 0.0)
    for version in range(1, MAX_RECORDS + 51):
        made.completed(Manifest(version, None, version, 1, "run1", 0, {}), float(version))
    made.write(1000.0)
    assert [r.version for r in made.records()] == list(range(51, MAX_RECORDS + 51))
    assert CheckpointRecords(RecordFiles(storage)).load() == made.records()


def test_two_coordinators_that_see_the_same_version_keep_both_histories(world: World) -> None:
    storage = world.storage(str(world.root / "ck/statestore"), {})

    def opened() -> CheckpointHistory:
        return CheckpointHistory(CheckpointRecords(RecordFiles(storage)), 0.0)

    old, new = opened(), opened()
    new.write(0.0)  # it has read what is there
    old.completed(Manifest(1, None, 1, 1, "run1", 0, {}), 1.0)
    for one in (old, new):
        one.completed(Manifest(2, 1, 2, 1, "run1", 0, {}), 2.0)
        one.write(20.0)
    assert [r.version for r in new.records()] == [1, 2]


def test_a_damaged_file_costs_its_figures_only(world: World, caplog: pytest.LogCaptureFixture) -> None:
    c = begin(world)
    for batch in range(2):
        batches(world, c, batch, batch)
        later(world, c)
    newest = world.root / "ck/statestore" / HISTORY / files(world)[-1]
    newest.write_bytes(newest.read_bytes().replace(b"run1", b"ruin"))
    with caplog.at_level(logging.WARNING):
        c = begin(world)
        later(world, c, 0.0)
    assert [record["version"] for record in history(c)] == [1]
    assert newest.name in caplog.text
    batches(world, c, 2, 2)  # the state itself is as it was
    later(world, c)
    assert [record["version"] for record in history(c)] == [1, 3]


def test_storage_that_fails_is_tried_again(world: World) -> None:
    c = begin(world)
    batches(world, c, 0, 0)

    def fail(path: str) -> None:
        if path.startswith(HISTORY):
            raise StorageError("no")

    world.put_hook = fail
    later(world, c)
    assert files(world) == []
    world.put_hook = None
    later(world, c, 1.0)
    assert [r.version for r in CheckpointRecords(RecordFiles(run_of(c).manifests.storage)).load()] == [1]


def test_no_batch_waits_for_the_history(world: World) -> None:
    """Storage hangs where the history is written: batches still complete."""
    from threading import Thread

    hanging = HangingStorage(CheckpointStorage.open)
    storage = hanging.open(str(world.root / "h"), {})
    made = CheckpointHistory(CheckpointRecords(RecordFiles(storage)), 0.0)
    made.write(0.0)
    made.completed(Manifest(1, None, 1, 1, "run1", 0, {}), 1.0)
    with hanging.hangs(str(world.root / "h")):
        writer = Thread(target=made.write, args=(20.0,))
        writer.start()
        hanging.wait_for_call()
        made.begun(2, 2.0)
        made.acknowledged(2, (), 2.0)
        made.completed(Manifest(2, 1, 2, 1, "run1", 0, {}), 3.0)
        assert [r.version for r in made.records()] == [1, 2]
    writer.join()
    assert made.is_unwritten  # the second one came too late for that file
    made.write(40.0)
    assert [r.version for r in CheckpointRecords(RecordFiles(storage)).load()] == [1, 2]


def test_the_end_of_a_run_does_not_bring_a_removed_checkpoint_back(world: World) -> None:
    from shutil import rmtree

    c = begin(world)
    batches(world, c, 0, 0)
    rmtree(world.root / "ck")
    c.deactivate_instances("run1")
    assert not (world.root / "ck").exists()


def test_a_coordinator_that_starts_in_a_batch_counts_the_reports_of_hosts(world: World) -> None:
    c = begin(world)
    world.plan_spark(0)
    reported = staged(world, c, 0, 0, CommitFigures(rows=5))
    acknowledge(c, reported)
    # Killed. The hosts report to the next one.
    c = world.coordinator()
    report = HostReport((world.registration(),), (reported,), {"run1": 0}, {"run1": {"op": [0]}})
    info = next(world.host(i) for i in range(2) if world.host(i).host_id == reported.host_id)
    c.register_host(info, report)
    acknowledge(c, staged(world, c, 0, 1, CommitFigures(rows=2)))
    world.commit_spark(0)
    c.batch_committed("run1", 0)
    assert history(c)[0]["rows"] == 7


def test_the_full_size_is_measured_by_maintenance_and_written_with_the_next_record(world: World) -> None:
    c = begin(world, maintenance_interval=5.0)
    batches(world, c, 0, 2)
    assert history(c)[-1]["full_bytes"] is None
    later(world, c)
    changelogs = (world.root / "ck/statestore/operators").rglob("*.changelog")
    assert history(c)[-1]["full_bytes"] == sum(path.stat().st_size for path in changelogs)
    batches(world, c, 3, 3)
    later(world, c)
    stored = CheckpointRecords(RecordFiles(run_of(c).manifests.storage)).load()
    assert [r.full_bytes is None for r in stored] == [True, True, False, False]


def test_the_history_returns_entries_that_are_new_or_changed_since_a_mark(world: World) -> None:
    c = begin(world, maintenance_interval=5.0)

    def told(since: str, query: str = "q") -> tuple[str, list[int]]:
        answer = c.checkpoint_stats(query, since)
        assert answer["history_is_all"] == (since in ("", "another:1", "none"))
        return answer["history_mark"], [record["version"] for record in answer["history"]]

    batches(world, c, 0, 1)
    first, versions = told("")
    assert versions == [1, 2] and told(first) == (first, [])
    assert told("another:1") == told("none") == (first, [1, 2])
    batches(world, c, 2, 2)
    second, versions = told(first)
    assert versions == [3] and told(second) == (second, [])
    later(world, c)  # the full size of the last one is measured
    assert told(second)[1] == [3] and told(first)[1] == [3]


def test_a_history_that_is_full_tells_which_are_gone() -> None:
    kept: list[CheckpointRecord] = [CheckpointRecord(i, i, 1, "r", partitions=1) for i in range(1, MAX_RECORDS + 1)]

    class Files:
        def load(self) -> tuple[CheckpointRecord, ...]:
            return tuple(kept)

    made = CheckpointHistory(Files(), 0.0)  # type: ignore[arg-type]
    made.write(0.0)
    mark = made.changed_since("")["history_mark"]
    assert made.changed_since(mark)["history_first"] == 1
    made.completed(Manifest(MAX_RECORDS + 1, None, MAX_RECORDS + 1, 1, "r", 0, {}), 1.0)
    changed = made.changed_since(mark)
    assert ([r["id"] for r in changed["history"]], changed["history_first"]) == ([MAX_RECORDS + 1], 2)


def test_a_fork_takes_the_history_along(world: World) -> None:
    from shutil import copytree

    query = "00000000-0000-0000-0000-000000000001"
    base = world.root / "states"
    (world.root / "ck").mkdir()
    (world.root / "ck/metadata").write_text(f'{{"id":"{query}"}}')
    c = world.coordinator()
    registration = world.registration(query_id=query, state_location=str(base / query))
    assert c.register_query(registration).refusal is None
    batches(world, c, 0, 1)
    c.deactivate_instances("run1")
    copytree(world.root / "ck", world.root / "copy")
    forked = fork_checkpoint(str(world.root / "copy"), str(base))
    found = CheckpointRecords(RecordFiles(world.storage(forked.state_location, {}))).load()
    assert [r.version for r in found] == [1, 2]


def test_files_have_a_number_of_their_newest_checkpoint(world: World) -> None:
    storage = world.storage(str(world.root / "x"), {})
    files = RecordFiles(storage)
    CheckpointRecords(files).write((CheckpointRecord(3, 1, 1, "r"), CheckpointRecord(7, 2, 1, "r")))
    assert [r.id for r in files.read(numbered_path(HISTORY, 7), HistoryFile).records] == [3, 7]
