"""The checkpoint coordinator, with a clock that tests turn.

Counterparts of Flink 1.0's tests, and where each is:

CheckpointCoordinatorTest, in this file:
- testCheckpointAbortsIfTriggerTasksAreNotExecuted, ...IfTriggerTasksAreFinished, ...IfAckTasksAreNotExecuted:
  test_a_checkpoint_aborts_when_its_tasks_cannot_be_notified (who runs is known to ``trigger`` alone here)
- testTriggerAndConfirmSimpleCheckpoint: test_trigger_and_confirm
- testTriggerAndDeclineCheckpointSimple: test_a_declined_checkpoint_is_given_up
- testMultipleConcurrentCheckpoints: test_multiple_concurrent_checkpoints
- testSuccessfulCheckpointSubsumesUnsuccessful: test_a_completed_checkpoint_subsumes_those_before_it
- testCheckpointTimeoutIsolated: test_a_checkpoint_expires
- handleMessagesForNonExistingCheckpoints: test_messages_that_belong_to_nothing

CheckpointIDCounterTest (testSerialIncrementAndGet, testConcurrentGetAndIncrement, testSetCount):
``test_pending_checkpoint.py``. CoordinatorShutdownTest: test_shutdown_..., here and in ``test_completion.py``.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from backends.exceptions import StorageError
from coordinator_actor.checkpoints.checkpoint_coordinator import RECENT_IDS, CheckpointCoordinator, CheckpointHooks
from coordinator_actor.checkpoints.pending_checkpoint import (
    CancelReason,
    CompletedCheckpoint,
    PendingCheckpoint,
    Received,
)
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CheckpointNotTriggeredError,
    InvalidRequestError,
)
from spark_bridge.exceptions import rebuilt_error
from tests.coordinator_actor.checkpoints.checkpoint_world import (
    A,
    B,
    C,
    World,
    ack,
    coordinator,
    decline,
    recorded,
)

# ---- trigger and acknowledge


def test_trigger_and_confirm(world: World) -> None:
    coord, seen = recorded(world)
    assert coord.get_number_of_pending_checkpoints() == 0
    assert coord.trigger_checkpoint(77.5)
    [(checkpoint_id, pending)] = coord.get_pending_checkpoints().items()
    assert seen.triggered == [pending]
    assert (pending.id, pending.timestamp, pending.job_id, pending.num_acknowledged) == (checkpoint_id, 77.5, "job", 0)
    assert pending.not_yet_acknowledged == {A, B} and not pending.is_discarded and not pending.is_fully_acknowledged
    world.advance(2)
    assert coord.receive_acknowledge_message(ack(B, checkpoint_id, "b1", size=5))
    assert pending.not_yet_acknowledged == {A} and pending.num_acknowledged == 1 and pending.states == {B: "b1"}
    assert coord.receive_acknowledge_message(ack(B, checkpoint_id, "b2", size=7))  # again: does not complete it
    assert not pending.is_fully_acknowledged and seen.completed == []
    world.advance(1)
    assert coord.receive_acknowledge_message(ack(A, checkpoint_id, "a", size=100))
    assert pending.is_discarded and pending.is_fully_acknowledged
    assert coord.get_number_of_pending_checkpoints() == 0
    [completed] = coord.successful
    assert seen.completed == [completed] and pending.completed is completed
    assert completed.id == checkpoint_id and completed.job_id == "job" and completed.timestamp == 77.5
    assert completed.states == {A: "a", B: "b2"} and completed.size == 107 and completed.duration == 3
    world.advance(1e6)
    assert seen.cancelled == [], "the timeout is disarmed"
    # Another one takes its place.
    assert coord.trigger_checkpoint(80)
    [new_id] = coord.get_pending_checkpoints()
    assert new_id > checkpoint_id
    coord.receive_acknowledge_message(ack(A, new_id))
    coord.receive_acknowledge_message(ack(B, new_id))
    completed = coord.successful[-1]
    assert (completed.id, completed.timestamp, completed.states) == (new_id, 80, {})
    assert len(coord.successful) == 2 and seen.cancelled == []


def test_hooks_are_called_in_the_order_of_events(world: World) -> None:
    seen: list[Any] = []
    hooks = CheckpointHooks(
        trigger=lambda pending: seen.append(("trigger", pending.id)),
        store=lambda completed: seen.append(("store", completed.id)),
        completed=lambda completed: seen.append(("completed", completed.id)),
        cancelled=lambda pending, error: seen.append(("cancelled", pending.id, error)),
    )
    coord = CheckpointCoordinator("job", [A], hooks, clock=world.clock)
    coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1))
    coord.trigger_checkpoint()
    coord.receive_decline_message(decline(A, 2))
    assert seen == [("trigger", 1), ("store", 1), ("completed", 1), ("trigger", 2), ("cancelled", 2, None)]


def test_a_checkpoint_aborts_when_its_tasks_cannot_be_notified(world: World) -> None:
    coord, seen = recorded(world)
    seen.failure = OSError("task 1 is not running")
    for _ in range(2):
        with pytest.raises(CheckpointNotTriggeredError, match="task 1 is not running") as raised:
            coord.trigger_checkpoint()
        assert raised.value.__cause__ is seen.failure
        assert coord.get_number_of_pending_checkpoints() == 0
        assert seen.cancelled[0] == 1 and seen.triggered[0].is_discarded
    assert coord.stats.counts() == {"triggered": 2, "in_progress": 0, "completed": 0, "failed": 2}
    assert isinstance(rebuilt_error("CheckpointNotTriggeredError", "x"), CheckpointNotTriggeredError)


def test_a_checkpoint_that_completes_while_its_tasks_are_notified_counts(world: World) -> None:
    def tell(pending: PendingCheckpoint) -> None:
        coord.receive_acknowledge_message(ack(A, pending.id, "a"))
        coord.receive_acknowledge_message(ack(B, pending.id, "b"))
        raise OSError("the answer was lost")

    coord = coordinator(world, trigger=tell)
    assert coord.trigger_checkpoint()
    assert [c.states for c in coord.successful] == [{A: "a", B: "b"}]


def test_the_last_acknowledged_attempt_counts(world: World) -> None:
    coord = coordinator(world)
    coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "first", size=1))
    coord.receive_acknowledge_message(ack(A, 1, "second", size=3))
    coord.receive_acknowledge_message(ack(B, 1, "b"))
    [completed] = coord.successful
    assert completed.states == {A: "second", B: "b"} and completed.size == 3


def test_an_attempt_without_state_takes_the_state_away(world: World) -> None:
    coord = coordinator(world)
    coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "first", size=1))
    coord.receive_acknowledge_message(ack(A, 1))
    coord.receive_acknowledge_message(ack(B, 1, "b", size=2))
    [completed] = coord.successful
    assert completed.states == {B: "b"} and completed.size == 2


def test_an_acknowledgement_is_answered_with_its_outcome(world: World) -> None:
    coord = coordinator(world)
    assert coord.receive_acknowledge_message(ack(A, 1)) is Received.UNKNOWN
    coord.trigger_checkpoint()
    assert coord.receive_acknowledge_message(ack(A, 1)) is Received.PENDING
    assert coord.receive_acknowledge_message(ack(B, 1)) is Received.COMPLETED
    assert coord.receive_acknowledge_message(ack(B, 1)) is Received.LATE


def test_multiple_concurrent_checkpoints(world: World) -> None:
    coord, _ = recorded(world, (A, B, C))
    one = coord.trigger_checkpoint(1)
    coord.receive_acknowledge_message(ack(B, one.id))
    two = coord.trigger_checkpoint(2)
    assert coord.get_pending_checkpoints() == {one.id: one, two.id: two}
    for task, pending in ((C, one), (A, two), (A, one), (B, two)):
        coord.receive_acknowledge_message(ack(task, pending.id))
    assert one.is_discarded and not two.is_discarded and coord.get_number_of_pending_checkpoints() == 1
    coord.receive_acknowledge_message(ack(C, two.id))
    assert two.is_discarded
    assert [(c.id, c.timestamp) for c in coord.successful] == [(one.id, 1), (two.id, 2)]


def test_a_completed_checkpoint_subsumes_those_before_it(world: World) -> None:
    coord, seen = recorded(world, (A, B, C))
    # The clock is set back in between: ids say what is older.
    one, two, three = coord.trigger_checkpoint(500), coord.trigger_checkpoint(400), coord.trigger_checkpoint(300)
    for task, pending in ((B, one), (C, two), (A, two), (A, one), (B, two)):
        coord.receive_acknowledge_message(ack(task, pending.id))
    assert one.is_discarded and two.is_discarded and not three.is_discarded
    assert one.cancelled is not None and one.cancelled[0] is CancelReason.SUBSUMED
    assert list(coord.get_pending_checkpoints()) == [three.id]
    assert [c.id for c in coord.successful] == [two.id] and seen.cancelled == [one.id]
    assert coord.receive_acknowledge_message(ack(C, one.id)), "late, and without effect"
    assert [c.id for c in coord.successful] == [two.id]


def test_subsumption_can_be_switched_off(world: World) -> None:
    coord, seen = recorded(world, (A,), subsumes=False)
    one, two = coord.trigger_checkpoint(), coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, two.id))
    assert not one.is_discarded and seen.cancelled == []
    coord.receive_acknowledge_message(ack(A, one.id))
    assert [c.id for c in coord.successful] == [two.id, one.id]


def test_messages_that_belong_to_nothing(world: World) -> None:
    coord = coordinator(world)
    pending = coord.trigger_checkpoint()
    for message, receive in (
        (ack(A, 1, job_id="another"), coord.receive_acknowledge_message),
        (ack(("op", 2), 1), coord.receive_acknowledge_message),
        (decline(A, 1, job_id="another"), coord.receive_decline_message),
        (decline(("op", 2), 1), coord.receive_decline_message),
    ):
        with pytest.raises(InvalidRequestError, match=r"another.*job|op/2 is not a task"):
            receive(message)  # type: ignore[operator]
    assert not coord.receive_acknowledge_message(ack(A, 2)) and not coord.receive_decline_message(decline(A, 2))
    assert pending.num_acknowledged == 0 and not pending.is_discarded


def test_sixteen_finished_checkpoints_are_remembered(world: World) -> None:
    assert RECENT_IDS == 16
    coord = coordinator(world, [A], timeout=10)
    for i in range(1, RECENT_IDS + 2):
        coord.trigger_checkpoint()
        if i % 3 == 0:
            coord.receive_acknowledge_message(ack(A, i))
        elif i % 3 == 1:
            coord.receive_decline_message(decline(A, i))
        else:
            world.advance(10)
    assert coord.get_number_of_pending_checkpoints() == 0
    known = [i for i in range(RECENT_IDS + 3) if coord.receive_acknowledge_message(ack(A, i))]
    assert known == list(range(2, RECENT_IDS + 2))
    assert known == [i for i in range(RECENT_IDS + 3) if coord.receive_decline_message(decline(A, i))]


def test_a_checkpoint_may_be_started_with_states_and_properties(world: World) -> None:
    coord, seen = recorded(world)
    given = coord.trigger_checkpoint(5, states={A: "a"}, properties={"version": 3})
    assert given.not_yet_acknowledged == {B}
    coord.receive_acknowledge_message(ack(B, given.id, "b"))
    assert seen.completed[0].properties == {"version": 3} and seen.completed[0].states == {A: "a", B: "b"}
    whole = coord.trigger_checkpoint(6, states={A: "a2", B: "b2"})
    assert whole.completed is seen.completed[1] and whole.completed.states == {A: "a2", B: "b2"}
    assert len(seen.triggered) == 1, "no task left to notify"
    seen.failure = StorageError("full")
    with pytest.raises(StorageError, match="full"):
        coord.trigger_checkpoint(7, states={A: "a3", B: "b3"})
    assert coord.get_number_of_pending_checkpoints() == 0 and seen.cancelled == [3]
    with pytest.raises(InvalidRequestError, match="not a task"):
        coord.trigger_checkpoint(8, states={("op", 9): "x"})
    assert coord.get_number_of_pending_checkpoints() == 0


def test_an_id_is_used_once(world: World) -> None:
    coord = coordinator(world, [A])
    taken = coord.id_counter.get_and_increment()
    assert coord.trigger_checkpoint(checkpoint_id=taken).id == taken
    with pytest.raises(InvalidRequestError, match="triggered before"):
        coord.trigger_checkpoint(checkpoint_id=taken)
    coord.receive_acknowledge_message(ack(A, taken))
    with pytest.raises(InvalidRequestError, match="triggered before"):
        coord.trigger_checkpoint(checkpoint_id=taken)


# ---- giving up


def test_a_checkpoint_expires(world: World) -> None:
    coord, seen = recorded(world, timeout=200)
    pending = coord.trigger_checkpoint(timestamp=5)
    coord.receive_acknowledge_message(ack(A, 1))
    world.advance(199)
    assert coord.expire() == [] and not pending.is_discarded
    world.advance(1)
    assert pending.is_discarded and pending.cancelled is not None
    assert pending.cancelled[0] is CancelReason.EXPIRED and "op/1" in pending.cancelled[1]
    assert coord.get_number_of_pending_checkpoints() == 0 and coord.successful == []
    assert seen.cancelled == [1] and seen.completed == []
    assert coord.receive_acknowledge_message(ack(B, 1)) and seen.completed == []


def test_expiry_by_hand(world: World) -> None:
    coord, seen = recorded(world, timeout=10)
    coord.trigger_checkpoint()
    world.now += 6
    coord.trigger_checkpoint()
    world.now += 4
    assert coord.expire() == [1] and coord.expire() == [] and list(coord.get_pending_checkpoints()) == [2]
    world.now += 6
    assert coord.expire() == [2] and seen.cancelled == [1, 2]
    never = coordinator(world, timeout=None)
    never.trigger_checkpoint()
    world.advance(1e9)
    assert never.expire() == [] and never.get_number_of_pending_checkpoints() == 1


def test_a_declined_checkpoint_is_given_up(world: World) -> None:
    coord, seen = recorded(world)
    pending = coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(B, 1))
    assert coord.receive_decline_message(decline(A, 1, "out of memory"))
    assert pending.cancelled == (CancelReason.DECLINED, "declined by op/0: out of memory")
    assert pending.is_discarded and seen.cancelled == [1] and coord.get_number_of_pending_checkpoints() == 0
    assert coord.receive_decline_message(decline(B, 1)) and coord.receive_acknowledge_message(ack(A, 1))
    world.advance(1000)
    assert coord.get_number_of_pending_checkpoints() == 0 and seen.cancelled == [1], "nothing follows by itself"


def test_a_checkpoint_can_be_cancelled(world: World) -> None:
    coord, seen = recorded(world)
    pending = coord.trigger_checkpoint()
    assert not coord.cancel_checkpoint(2, "x") and coord.cancel_checkpoint(1, "the query ended")
    assert pending.cancelled == (CancelReason.CANCELLED, "the query ended") and seen.cancelled == [1]
    assert not coord.cancel_checkpoint(1, "again")


def test_a_failing_cancel_callback_is_logged_and_ends_nothing_else(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    def fail(checkpoint_id: int) -> None:
        seen.append(checkpoint_id)
        raise OSError("no")

    coord = coordinator(world, cancelled=fail)
    coord.trigger_checkpoint()
    coord.trigger_checkpoint()
    coord.cancel_all("the query has ended")
    assert seen == [1, 2] and coord.get_number_of_pending_checkpoints() == 0
    assert len([r for r in caplog.records if r.exc_info]) == 2


# ---- wrong use and shutdown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"tasks": [A, B, A]}, "1 of the 3 tasks"),
    ],
)
def test_wrong_options(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        coordinator(world, **options)


def test_shutdown_gives_everything_up_and_takes_nothing_more(world: World) -> None:
    coord, seen = recorded(world, [A])
    coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1))
    coord.trigger_checkpoint()
    assert not coord.is_shutdown() and len(coord.successful) == 1
    coord.shutdown()
    coord.shutdown()
    assert coord.is_shutdown() and seen.cancelled == [2]
    assert seen.triggered[1].cancelled is not None and seen.triggered[1].cancelled[0] is CancelReason.SHUTDOWN
    assert coord.get_number_of_pending_checkpoints() == 0
    assert not coord.receive_acknowledge_message(ack(A, 2)) and not coord.receive_decline_message(decline(A, 2))
    with pytest.raises(CheckpointCoordinatorShutdownError, match="of job is shut down"):
        coord.trigger_checkpoint()


# ---- many of everything


def test_acknowledgements_of_many_threads_complete_each_checkpoint_once() -> None:
    tasks = [("op", p) for p in range(40)]
    completed: list[CompletedCheckpoint] = []
    coord = CheckpointCoordinator("job", tasks, CheckpointHooks(store=completed.append, subsumes=False), timeout=None)
    ids = [coord.trigger_checkpoint().id for _ in range(20)]
    messages = [ack(task, i, f"{i}:{task}") for i in ids for task in tasks] * 2
    random.Random(7).shuffle(messages)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(coord.receive_acknowledge_message, messages))
    assert sorted(c.id for c in completed) == ids and results.count(Received.COMPLETED) == len(ids)
    assert all(c.states == {task: f"{c.id}:{task}" for task in tasks} for c in completed)
    assert coord.stats.counts()["completed"] == 20 and Received.UNKNOWN not in results[: len(tasks)]


def test_whether_all_have_acknowledged_costs_the_same_for_any_number_of_tasks() -> None:
    """Counted in lines run, not in time: no Python loop over the tasks runs per acknowledgement.

    The least of several: a run may also clean up garbage of other tests, line by line.
    """
    few, many = (min(_steps_per_acknowledgement(n) for _ in range(3)) for n in (10, 10_000))
    assert many == few > 10


def _steps_per_acknowledgement(tasks: int) -> int:
    coord = CheckpointCoordinator("job", [("op", p) for p in range(tasks)], timeout=None)
    coord.trigger_checkpoint()
    steps = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal steps
        steps += 1
        return count

    message = ack(("op", 3), 1, "x")
    before = sys.gettrace()
    sys.settrace(count)
    try:
        coord.receive_acknowledge_message(message)
    finally:
        sys.settrace(before)
    return steps


def test_the_record_of_many_tasks_stays_small() -> None:
    tasks = [("op", p) for p in range(2_000)]
    coord = CheckpointCoordinator("job", tasks, timeout=None)
    states = dict.fromkeys(tasks, "s")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(104):
            coord.trigger_checkpoint(states=states)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(coord.stats.history()) == 100
    # 12 bytes per task and checkpoint (a hundred of 10,000 tasks are 12 MB), and one checkpoint's states.
    assert grown < 100 * 2_000 * 12 + 200_000
