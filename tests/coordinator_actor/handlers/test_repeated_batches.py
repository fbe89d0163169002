"""A prepared batch is repeated: how many manifests it takes, and whose changes they name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from backends.exceptions import StorageError
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.handlers.registries import RunRegistry
from coordinator_actor.messages import Acknowledge, Acknowledged, HostReport, Refused
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.savepoints.savepoint_coordinator import RunSavepoints
from tests.coordinator_actor.coordinator_world import World, acknowledge

N = 8


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def prepared(world: World, stage: int | None = 1, n: int = N) -> Coordinator:
    """A coordinator with a run whose first batch is prepared."""
    c = world.coordinator()
    assert c.register_query(world.registration(n=n)).refusal is None
    assert [commit(world, c, p, "first", stage).manifest_id for p in range(n)] == [None] * (n - 1) + [1]
    assert len(world.manifests()) == 1
    return c


def committed(world: World, c: Coordinator, partition: int, attempt: str, stage: int | None) -> Acknowledge:
    """Return a host's message for a task of the first batch. The host holds it, for its next report."""
    message = world.stage(world.open(c, 0, partition), partition, 0, attempt)
    message = msgspec.structs.replace(message, stage=stage)
    return message


def commit(world: World, c: Coordinator, partition: int, attempt: str, stage: int | None) -> Acknowledged:
    """Commit a task of the first batch, with a separate message for its acknowledgement."""
    message = committed(world, c, partition, attempt, stage)
    answer = acknowledge(c, message)
    world.pending["op", partition] = message
    return answer


def restarted(world: World, n: int = N, *, is_reported: bool = True) -> Coordinator:
    """Another coordinator, which takes up the run, and hears from the hosts what they have acknowledged."""
    c = world.coordinator(hosts=0)
    for i in range(2):
        mine = tuple(m for m in world.pending.values() if m.host_id == world.host(i).host_id)
        report = HostReport((world.registration(n=n),), mine, {"run1": 0}) if is_reported else HostReport()
        c.register_host(world.host(i), report)
    assert c.register_query(world.registration(n=n)).refusal is None
    return c


def complete(world: World, c: Coordinator) -> None:
    world.commit_spark(0)
    assert c.batch_committed("run1", 0, by_driver=True) is True


def attempts(world: World, n: int = N) -> list[str]:
    """Whose changes the newest manifest names, by partition."""
    entries = world.manifests()[-1]["operators"]["op"]["partitions"]
    return [entries[str(p)]["attempt"] for p in range(n)]


def second(those: Iterable[int], n: int = N) -> list[str]:
    return ["second" if p in those else "first" for p in range(n)]


def test_a_plan_that_runs_again_takes_one_manifest(world: World) -> None:
    c = prepared(world, n=100)
    for stage, attempt in ((2, "second"), (5, "third")):
        answers = [commit(world, c, p, attempt, stage) for p in range(100)]
        # The last task of the plan is answered when the manifest is durable.
        assert [a.manifest_id for a in answers] == [None] * 99 + [world.manifests()[-1]["id"]]
        assert attempts(world, 100) == [attempt] * 100
    assert len(world.manifests()) == 3
    complete(world, c)
    assert len(world.manifests()) == 3


def test_a_plan_that_runs_again_in_part_takes_one_manifest_when_the_version_completes(world: World) -> None:
    c = prepared(world)
    for p in (3, 5):
        assert commit(world, c, p, "second", 2).manifest_id is None
    assert len(world.manifests()) == 1
    complete(world, c)
    assert len(world.manifests()) == 2
    assert attempts(world) == second((3, 5))
    path = world.manifests()[-1]["operators"]["op"]["partitions"]["3"]["changelog"]["path"]
    assert world.open(c, 1, 3).head == path


@pytest.mark.parametrize("stage", [1, None])
def test_a_task_that_is_tried_again_has_its_manifest_before_it_is_answered(world: World, stage: int | None) -> None:
    c = prepared(world, stage)
    answer = commit(world, c, 4, "second", stage)
    assert (answer.manifest_id, len(world.manifests())) == (world.manifests()[-1]["id"], 2)
    assert attempts(world) == second((4,))


def test_a_task_that_is_tried_again_while_the_plan_runs_again_has_its_manifest_at_once(world: World) -> None:
    """Those that come behind it share one, however many they are."""
    c = prepared(world)
    for p in range(3):
        assert commit(world, c, p, "lost", 2).manifest_id is None
    assert commit(world, c, 1, "second", 2).manifest_id == world.manifests()[-1]["id"]
    assert attempts(world) == ["lost", "second", "lost"] + ["first"] * (N - 3)
    rest = [commit(world, c, p, "second", 2).manifest_id for p in range(3, N)]
    assert rest == [None] * (N - 4) + [world.manifests()[-1]["id"]]
    assert len(world.manifests()) == 3
    assert attempts(world) == ["lost", "second", "lost"] + ["second"] * (N - 3)


def test_a_retry_behind_a_restart_in_a_repeat_lets_the_rest_share_a_manifest(world: World) -> None:
    """The manifest that the restarted coordinator reads names tasks of both stages."""
    c = prepared(world)
    for p in range(3):
        commit(world, c, p, "second", 2)
    commit(world, c, 1, "second", 2)
    again = restarted(world)
    before = len(world.manifests())
    commit(world, again, 0, "third", 2)
    assert len(world.manifests()) == before + 1
    rest = [commit(world, again, p, "second", 2).manifest_id for p in range(3, N)]
    assert rest == [None] * (N - 4) + [world.manifests()[-1]["id"]]
    assert attempts(world) == ["third"] + ["second"] * (N - 1)


def test_a_duplicate_message_writes_no_manifest(world: World) -> None:
    c = prepared(world)
    message = committed(world, c, 2, "second", 2)
    assert [acknowledge(c, message).manifest_id for _ in range(2)] == [None, None]
    assert len(world.manifests()) == 1
    for p in range(N):
        if p != 2:
            commit(world, c, p, "second", 2)
    assert acknowledge(c, message).manifest_id == world.manifests()[-1]["id"]
    assert len(world.manifests()) == 2


def full(path: str) -> None:
    if path.startswith("manifests/"):
        raise StorageError("disk full")


def test_changes_refused_in_a_repeat_are_never_named(world: World) -> None:
    c = prepared(world)
    for p in range(N - 1):
        commit(world, c, p, "second", 2)
    world.put_hook = full
    with pytest.raises(StorageError, match="disk full"):
        commit(world, c, N - 1, "refused", 2)
    world.put_hook = None
    complete(world, c)
    assert attempts(world) == second(range(N - 1))
    assert len(world.manifests()) == 2


def test_refused_changes_never_replace_accepted_ones(world: World) -> None:
    """Writing a first manifest fails, in a message with the second acknowledgement of a task."""
    c = world.coordinator(hosts=1)
    assert c.register_query(world.registration(n=2)).refusal is None
    commit(world, c, 0, "accepted", 1)
    messages = tuple(committed(world, c, p, "refused", 1) for p in range(2))
    world.put_hook = full
    answers = c.acknowledge_many("run1", "h0", "a", messages)
    assert [type(a) for a in answers] == [Refused, Refused]
    world.put_hook = None
    commit(world, c, 1, "last", 1)
    assert attempts(world, 2) == ["accepted", "last"]


def test_a_version_is_not_completed_before_the_manifest_of_its_repeat_is_written(world: World) -> None:
    """A manifest whose write failed may exist or not: each try writes another one, with a higher id."""
    c = prepared(world)
    commit(world, c, 3, "second", 2)
    world.commit_spark(0)
    world.put_hook = full
    for _ in range(2):
        with pytest.raises(StorageError, match="disk full"):
            c.batch_committed("run1", 0)
        assert c.registries.runs.by_id["run1"].versions.completed == 0
    world.put_hook = None
    assert c.batch_committed("run1", 0, by_driver=True) is True
    assert attempts(world) == second((3,))
    assert world.manifests()[-1]["id"] == 4  # 2 and 3 may still appear


def test_a_coordinator_that_restarts_in_a_repeat_continues_it(world: World) -> None:
    c = prepared(world, n=100)
    for p in range(50):
        commit(world, c, p, "second", 2)
    again = restarted(world, 100)
    before = len(world.manifests())  # the new coordinator has written the version under its own epoch
    answers = [commit(world, again, p, "second", 2).manifest_id for p in range(50, 100)]
    assert answers == [None] * 49 + [world.manifests()[-1]["id"]]
    assert len(world.manifests()) == before + 1
    assert attempts(world, 100) == ["second"] * 100
    complete(world, again)
    assert len(world.manifests()) == before + 1


def test_a_repeat_that_neither_coordinator_nor_hosts_survive_leaves_what_the_manifest_names(world: World) -> None:
    c = prepared(world)
    for p in range(3):
        commit(world, c, p, "second", 2)
    again = restarted(world, is_reported=False)
    before = len(world.manifests())
    for p in range(3, N):
        assert commit(world, again, p, "second", 2).manifest_id is None
    complete(world, again)
    assert attempts(world) == second(range(3, N))
    assert len(world.manifests()) == before + 1
    assert [again.lineage("run1", "op", p, 1).changelogs[0].version for p in range(N)] == [1] * N


@pytest.mark.parametrize("is_reported", [True, False])
def test_a_task_that_is_tried_again_behind_a_restart_has_its_manifest_before_it_is_answered(
    world: World, is_reported: bool
) -> None:
    prepared(world)
    again = restarted(world, is_reported=is_reported)
    answer = commit(world, again, 4, "second", 1)
    assert answer.manifest_id == world.manifests()[-1]["id"]
    assert attempts(world) == second((4,))


def test_a_stage_is_not_new_where_no_earlier_one_is_known(world: World) -> None:
    """After its restart the coordinator knows the stages of the tasks on one host, but not of those on the other."""
    prepared(world, stage=None)
    world.pending = {
        task: msgspec.structs.replace(m, stage=1 if m.host_id == "h0" else None) for task, m in world.pending.items()
    }
    again = restarted(world)
    p = next(p for (_, p), m in world.pending.items() if m.host_id == "h1")
    assert commit(world, again, p, "second", 2).manifest_id == world.manifests()[-1]["id"]


def test_a_query_that_ends_names_repeated_changes_of_its_last_batch(world: World) -> None:
    c = prepared(world)
    commit(world, c, 3, "second", 2)
    world.commit_spark(0)  # and the event that says so never comes
    assert c.deactivate_instances("run1") is True
    assert attempts(world) == second((3,))


def test_a_first_manifest_of_two_stages_tells_them_apart(world: World) -> None:
    """``take`` ran some tasks, then ``write`` all: the manifest names tasks of both, and the rest come behind it."""
    c = world.coordinator()
    assert c.register_query(world.registration(n=N)).refusal is None
    for p in range(4):
        commit(world, c, p, "first", 1)
    for p in (4, 5, 6, 7, 0, 1, 2):
        commit(world, c, p, "second", 2)
    assert len(world.manifests()) == 1
    again = restarted(world)
    complete(world, again)
    assert attempts(world) == second({0, 1, 2, 4, 5, 6, 7})


def test_a_task_that_is_tried_again_within_a_repeat_hides_no_later_one(world: World) -> None:
    c = prepared(world)
    for p in range(3):
        commit(world, c, p, "second", 2)
    commit(world, c, 1, "second", 2)
    for p in (3, 4, 5):
        commit(world, c, p, "second", 2)
    again = restarted(world)
    complete(world, again)
    assert attempts(world) == second(range(6))


def test_a_run_that_is_replaced_leaves_repeated_changes_of_its_last_batch(world: World) -> None:
    c = prepared(world)
    commit(world, c, 3, "second", 2)
    world.commit_spark(0)  # and the driver dies before it says so
    new = msgspec.structs.replace(world.registration(n=N), run_id="run2")
    assert c.register_query(new).refusal is None
    assert attempts(world) == second((3,))


def test_a_version_that_two_runs_complete_has_one_content(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older run learns of Spark's commit between the claim of the newer one and the end of the older one."""
    c = prepared(world)
    commit(world, c, 3, "second", 2)
    world.commit_spark(0)
    register_run = RunRegistry.register_run
    heads = []

    def late(self: RunRegistry, run: QueryState, savepoints: RunSavepoints, *, was_over: bool) -> None:
        assert c.batch_committed("run1", 0, by_driver=True) is True
        heads.append(self.by_id["run1"].versions.head(1, "op", 3))
        register_run(self, run, savepoints, was_over=was_over)

    monkeypatch.setattr(RunRegistry, "register_run", late)
    new = msgspec.structs.replace(world.registration(n=N), run_id="run2")
    assert c.register_query(new).refusal is None
    assert heads == [c.registries.runs.by_id["run2"].versions.head(1, "op", 3)]
