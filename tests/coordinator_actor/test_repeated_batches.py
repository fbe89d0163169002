"""A prepared batch that comes again: how many manifests it takes, and whose changes they name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from backends.exceptions import StorageError
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import Acknowledged
from tests.coordinator_actor.coordinator_world import World
from tests.coordinator_actor.coordinators import acknowledge

N = 8


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def prepared(world: World, stage: int | None = 1) -> Coordinator:
    """A coordinator with a run whose first batch is prepared."""
    c = world.coordinator()
    assert c.register_query(world.registration(n=N)).refusal is None
    last = [commit(world, c, p, "first", stage) for p in range(N)][-1]
    assert last.manifest_id == 1 and len(world.manifests()) == 1
    return c


def commit(world: World, c: Coordinator, partition: int, attempt: str, stage: int | None) -> Acknowledged:
    """A task of the first batch commits; its acknowledgement is a message of its own."""
    message = world.stage(world.open(c, 0, partition), partition, 0, attempt)
    return acknowledge(c, msgspec.structs.replace(message, stage=stage))


def attempts(world: World) -> list[str]:
    """Whose changes the newest manifest names, by partition."""
    entries = world.manifests()[-1]["operators"]["op"]["partitions"]
    return [entries[str(p)]["attempt"] for p in range(N)]


def test_a_plan_that_runs_again_takes_one_manifest(world: World) -> None:
    c = prepared(world)
    for stage, attempt in ((2, "second"), (5, "third")):
        answers = [commit(world, c, p, attempt, stage) for p in range(N)]
        # The last task of the plan is answered when the manifest is durable.
        assert [a.manifest_id for a in answers] == [None] * (N - 1) + [world.manifests()[-1]["id"]]
        assert attempts(world) == [attempt] * N
    assert len(world.manifests()) == 3


def test_a_plan_that_runs_again_in_part_takes_one_manifest_when_the_version_completes(world: World) -> None:
    c = prepared(world)
    for p in (3, 5):
        assert commit(world, c, p, "second", 2).manifest_id is None
    assert len(world.manifests()) == 1
    world.commit_spark(0)
    assert c.batch_committed("run1", 0) is True
    assert len(world.manifests()) == 2
    assert attempts(world) == ["second" if p in (3, 5) else "first" for p in range(N)]
    path = world.manifests()[-1]["operators"]["op"]["partitions"]["3"]["changelog"]["path"]
    assert world.open(c, 1, 3).head == path


@pytest.mark.parametrize("stage", [1, None])
def test_a_task_that_is_tried_again_has_its_manifest_before_it_is_answered(world: World, stage: int | None) -> None:
    c = prepared(world, stage)
    answer = commit(world, c, 4, "second", stage)
    assert (answer.manifest_id, len(world.manifests())) == (world.manifests()[-1]["id"], 2)
    assert attempts(world) == ["second" if p == 4 else "first" for p in range(N)]


def test_what_was_refused_in_a_repeat_is_never_named(world: World) -> None:
    c = prepared(world)

    def full(path: str) -> None:
        if path.startswith("manifests/"):
            raise StorageError("disk full")

    for p in range(N - 1):
        commit(world, c, p, "second", 2)
    world.put_hook = full
    with pytest.raises(StorageError, match="disk full"):
        commit(world, c, N - 1, "refused", 2)
    world.put_hook = None
    world.commit_spark(0)
    assert c.batch_committed("run1", 0) is True
    assert attempts(world) == ["second"] * (N - 1) + ["first"]


def test_a_coordinator_that_dies_in_a_repeat_leaves_a_version_that_can_be_read(world: World) -> None:
    c = prepared(world)
    for p in range(3):
        commit(world, c, p, "second", 2)
    again = world.coordinator()
    assert again.register_query(world.registration(n=N)).refusal is None
    for p in range(3, N):
        commit(world, again, p, "second", 2)
    world.commit_spark(0)
    assert again.batch_committed("run1", 0) is True
    assert attempts(world) == ["first"] * 3 + ["second"] * (N - 3)
    assert [again.lineage("run1", "op", p, 1).changelogs[0].version for p in range(N)] == [1] * N
