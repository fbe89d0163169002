"""What maintenance asks of storage: listings are rare, descriptors are read once and together, and no lock is held."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.exceptions import StorageError
from backends.formats import snapshot
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import RequestSender
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.exceptions import FencedError
from coordinator_actor.run import retention
from coordinator_actor.run.holds import LISTED_EVERY, KnownFiles
from tests.coordinator_actor.coordinator_world import World, run_of
from tests.coordinator_actor.run.retention_steps import begin, maintain, names, run_batches, upload
from tests.patience import PATIENCE

Asked = list[tuple[str, str]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The requests that were made, by verb and path."""
    made: Asked = []
    send = RequestSender.send

    def noted(self: RequestSender, verb: str, path: str, call: Callable[[], Any], **more: Any) -> Any:
        made.append((verb, path))
        return send(self, verb, path, call, **more)

    monkeypatch.setattr(RequestSender, "send", noted)
    return made


def three_versions(world: World, c: Coordinator, end: int) -> None:
    """Run batches until ``end``, and take a snapshot of each partition."""
    run_batches(world, c, end - 2, end)
    for p in (0, 1):
        upload(world, c, p)


def test_files_are_removed_by_manifests_and_listed_once_in_ten_maintenances(world: World, asked: Asked) -> None:
    c = begin(world)
    three_versions(world, c, 2)
    for i in range(1, LISTED_EVERY + 1):
        asked.clear()
        three_versions(world, c, 3 * i + 2)
        maintain(world, c)
        listed = [path for verb, path in asked if verb == "list" and path in ("operators", "groups")]
        assert (set(listed) == {"operators", "groups"}) is (i == 1) and (i == 1 or not listed), i
    oldest = run_of(c, "run1").versions.oldest
    assert oldest >= 3 * LISTED_EVERY - 6
    assert names(world, 0, "changelog")[0] == oldest + 1 and names(world, 0, "snapshot")[0] == oldest
    maintain(world, c)
    assert ("list", "operators") in asked


def test_a_failed_removal_is_repeated_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        three_versions(world, c, end)
    maintain(world, c)
    run_batches(world, c, 12, 12)

    def fails(storage: CheckpointStorage, paths: Sequence[str]) -> None:
        raise StorageError("does not answer")

    with monkeypatch.context() as failing:
        failing.setattr(CheckpointStorage, "delete_all", fails)
        maintain(world, c)
    assert names(world, 0, "changelog")[0] == 1
    maintain(world, c)
    assert names(world, 0, "changelog")[0] == 7


def test_a_coordinator_that_was_replaced_removes_nothing_more(world: World) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        three_versions(world, c, end)
    maintain(world, c)
    run_batches(world, c, 12, 12)
    begin(world, "run2", world.coordinator())
    with pytest.raises(FencedError, match="taken over by another coordinator"):
        retention.remove_garbage(run_of(c, "run1"), world.now)
    assert names(world, 0, "changelog")[0] == 1


@pytest.mark.parametrize("when", ["before the listing", "behind it"])
def test_a_snapshot_that_a_listing_shows_cut_never_becomes_the_oldest(world: World, when: str) -> None:
    c = begin(world)
    run = run_of(c, "run1")
    made = []
    for end in (2, 5, 8, 11):
        run_batches(world, c, end - 2, end)
        made.append([upload(world, c, p) for p in (0, 1)])
    if when == "behind it":
        maintain(world, c)
        assert run.versions.planned is not None and run.versions.planned.oldest == 6
    whole = snapshot.read_descriptor(run.manifests.storage, made[2][0]).files[0].file
    assert whole is not None
    (world.root / "ck/statestore" / whole.path).write_bytes(b"")
    run_batches(world, c, 12, 14)
    for _ in range(LISTED_EVERY + 1):
        maintain(world, c)
    # Without the truncated file, the snapshots of version 9 would be the oldest ones.
    assert run.versions.planned is not None and run.versions.planned.oldest == 9
    bases = {base.partition: base.snapshot for base in run.versions.planned.bases}
    assert bases == {0: made[1][0], 1: made[2][1]}


def test_a_snapshot_taken_after_the_listing_may_become_the_oldest(world: World) -> None:
    c = begin(world)
    run_batches(world, c, 0, 0)
    maintain(world, c)
    for end in (3, 6, 9):
        three_versions(world, c, end)
    maintain(world, c)
    planned = run_of(c, "run1").versions.planned
    assert planned is not None and planned.oldest == 4


def test_maintenance_asks_no_storage_under_the_lock_of_the_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    c = begin(world)
    for end in (2, 5, 8, 11):
        three_versions(world, c, end)
    c = begin(world, c=world.coordinator())  # which has read no descriptors yet
    run = run_of(c, "run1")
    send = RequestSender.send
    held: list[tuple[str, str]] = []

    def noted(self: RequestSender, verb: str, path: str, call: Callable[[], Any], **more: Any) -> Any:
        if run.lock._is_owned():  # type: ignore[attr-defined]
            held.append((verb, path))
        return send(self, verb, path, call, **more)

    monkeypatch.setattr(RequestSender, "send", noted)
    retention.remove_garbage(run, world.now)
    assert held == []


def test_descriptors_are_read_together_and_once(world: World, monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    c = begin(world)
    for end in (2, 5, 8):
        three_versions(world, c, end)
    c.deactivate_instances("run1")
    c = begin(world, "run2")
    both = threading.Barrier(2)
    read = snapshot.read_descriptor

    def waits(*args: Any) -> Any:
        both.wait(PATIENCE)  # for another descriptor
        return read(*args)

    asked.clear()
    with monkeypatch.context() as reading:
        reading.setattr(snapshot, "read_descriptor", waits)
        retention.remove_garbage(run_of(c, "run2"), world.now)
    assert len([path for verb, path in asked if verb == "read" and path.endswith(".snapshot")]) == 6
    asked.clear()
    retention.remove_garbage(run_of(c, "run2"), world.now)
    assert not [path for verb, path in asked if verb == "read"]


def test_a_snapshot_taken_up_while_descriptors_are_read_is_not_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = begin(world)
    three_versions(world, c, 2)
    c.deactivate_instances("run1")
    c = begin(world, "run2")
    run_batches(world, c, 3, 3, "run2")
    run = run_of(c, "run2")
    read = snapshot.read_descriptor

    def meanwhile(*args: Any) -> Any:
        found = read(*args)
        with run.lock:
            run.versions.descriptors["new"] = found
        return found

    monkeypatch.setattr(snapshot, "read_descriptor", meanwhile)
    retention._read_descriptors(run, retention._snapshots(run))
    assert "new" in run.versions.descriptors


def test_runs_that_begin_together_are_maintained_one_after_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    at: dict[str, float] = {}
    monkeypatch.setattr(
        "coordinator_actor.coordinator.remove_garbage",
        lambda run, now: at.setdefault(run.run_id, world.now) and [],
    )
    c = world.coordinator()
    for i in range(8):
        root = str(world.root / f"ck{i}")
        registration = world.registration(
            f"run{i}", query_id=f"q{i}", checkpoint_location=root, state_location=f"{root}/statestore"
        )
        assert c.register_query(registration).refusal is None
    for _ in range(60):
        world.now += 1
        c.maintain()
    assert len(at) == 8 and len(set(at.values())) >= 6
    assert max(at.values()) <= 1060


def test_known_files_are_those_listed_and_named_and_not_removed(world: World) -> None:
    storage = world.storage(str(world.root / "ck/statestore"), {})
    litter = "operators/op/2/0/default/1-litter.changelog"
    storage.put_new(litter, b"x")
    files = KnownFiles()
    files.look(storage, 1)
    files.needed(["groups/2-a.changelogs"])
    assert files.paths == {litter, "groups/2-a.changelogs"}
    files.removed([litter])
    assert files.paths == {"groups/2-a.changelogs"}
