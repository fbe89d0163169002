"""The checkpoint coordinator and its id counter, with timers and a clock that tests turn.

Counterparts of Flink 1.0's tests, and where each is:

CheckpointCoordinatorTest
  testCheckpointAbortsIfTriggerTasksAreNotExecuted,
  ...IfTriggerTasksAreFinished, ...IfAckTasksAreNotExecuted  test_tasks_that_cannot_be_told_abort_the_checkpoint (who runs
                                                             is known to ``trigger`` alone here)
  testTriggerAndConfirmSimpleCheckpoint                      test_trigger_and_confirm
  testTriggerAndDeclineCheckpointSimple, ...Complex          test_a_declined_checkpoint_is_given_up, test_a_decline_is_followed_by_...
  testMultipleConcurrentCheckpoints                          test_multiple_concurrent_checkpoints
  testSuccessfulCheckpointSubsumesUnsuccessful               test_a_completed_checkpoint_subsumes_those_before_it
  testCheckpointTimeoutIsolated                              test_a_checkpoint_expires
  handleMessagesForNonExistingCheckpoints                    test_messages_that_belong_to_nothing
  testPeriodicTriggering                                     test_periodic_triggering
  testMinTimeBetweenCheckpointsInterval                      test_the_pause_between_checkpoints
  testMaxConcurrentAttempts1, 2, 5                           test_max_concurrent
  testMaxConcurrentAttempsWithSubsumption                    test_max_concurrent_with_subsumption
  testPeriodicSchedulingWithInactiveTasks                    test_periodic_triggering_begins_when_the_tasks_can_be_told
CheckpointStateRestoreTest
  testSetState, testStateOnlyPartiallyAvailable,
  testNoCheckpointAvailable                                  test_restore_...
CheckpointIDCounterTest
  testSerialIncrementAndGet, testConcurrentGetAndIncrement,
  testSetCount                                               test_the_counter_...
CoordinatorShutdownTest                                      test_shutdown_..., test_the_job_status_...
"""

from __future__ import annotations

import random
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from backends.exceptions import StorageError
from coordinator_actor.checkpoint_coordinator import RECENT_IDS, CheckpointCoordinator, ThreadTimers
from coordinator_actor.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints import (
    AcknowledgeCheckpoint,
    CancelReason,
    CompletedCheckpoint,
    DeclineCheckpoint,
    MemoryCheckpointStore,
    PendingCheckpoint,
    Received,
    TaskKey,
)
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CheckpointNotTriggeredError,
    CheckpointRestoreError,
    CoordinatorError,
    InvalidRequestError,
    error_from,
)
from coordinator_actor.job_status import JobStatus
from tests.coordinator_actor.checkpoint_world import World
from tests.patience import HANG, PATIENCE

A, B, C = ("op", 0), ("op", 1), ("other", 0)


@pytest.fixture
def world() -> World:
    return World()


def coordinator(world: World, tasks: Any = (A, B), **options: Any) -> CheckpointCoordinator:
    return CheckpointCoordinator("job", tasks, **{"clock": world.clock, "timers": world, **options})


def ack(task: TaskKey, checkpoint_id: int, state: Any = None, **more: Any) -> AcknowledgeCheckpoint:
    return AcknowledgeCheckpoint(more.pop("job_id", "job"), task, checkpoint_id, state, **more)


def decline(task: TaskKey, checkpoint_id: int, reason: str = "busy", job_id: str = "job") -> DeclineCheckpoint:
    return DeclineCheckpoint(job_id, task, checkpoint_id, reason)


class Recorder:
    """The callbacks of a coordinator, which must come without its lock held."""

    def __init__(self) -> None:
        self.triggered: list[PendingCheckpoint] = []
        self.completed: list[CompletedCheckpoint] = []
        self.cancelled: list[int] = []
        self.shutdowns = 0
        self.failure: BaseException | None = None
        self.coordinator: CheckpointCoordinator | None = None

    def options(self) -> dict[str, Any]:
        return {
            "trigger": self.trigger,
            "on_cancel_checkpoint": self.cancel,
            "on_fully_acknowledged_checkpoint": self.complete,
            "on_shutdown": self.shutdown,
        }

    def _check(self) -> None:
        if self.coordinator is not None:
            assert self.coordinator._lock.acquire(timeout=1), "called with the lock held"
            self.coordinator._lock.release()

    def trigger(self, pending: PendingCheckpoint) -> None:
        self._check()
        self.triggered.append(pending)
        if self.failure is not None:
            raise self.failure

    def complete(self, completed: CompletedCheckpoint) -> None:
        self._check()
        self.completed.append(completed)
        if self.failure is not None:
            raise self.failure

    def cancel(self, checkpoint_id: int) -> None:
        self._check()
        self.cancelled.append(checkpoint_id)

    def shutdown(self) -> None:
        self._check()
        self.shutdowns += 1


def recorded(world: World, tasks: Any = (A, B), **options: Any) -> tuple[CheckpointCoordinator, Recorder]:
    recorder = Recorder()
    made = coordinator(world, tasks, **{**recorder.options(), **options})
    recorder.coordinator = made
    return made, recorder


# ---- trigger and acknowledge


def test_trigger_and_confirm(world: World) -> None:
    coord, seen = recorded(world)
    assert (coord.get_number_of_pending_checkpoints(), coord.get_number_of_retained_successful_checkpoints()) == (0, 0)
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
    [completed] = coord.get_successful_checkpoints()
    assert seen.completed == [completed] and pending.completed is completed
    assert completed.id == checkpoint_id and completed.job_id == "job" and completed.timestamp == 77.5
    assert completed.states == {A: "a", B: "b2"} and completed.size == 107 and completed.duration == 3
    assert world.armed == [], "the timeout is disarmed"
    # Another one takes its place.
    assert coord.trigger_checkpoint(80)
    [new_id] = coord.get_pending_checkpoints()
    assert new_id > checkpoint_id
    coord.receive_acknowledge_message(ack(A, new_id))
    coord.receive_acknowledge_message(ack(B, new_id))
    [completed] = coord.get_successful_checkpoints()
    assert (completed.id, completed.timestamp, completed.states) == (new_id, 80, {})
    assert coord.get_number_of_retained_successful_checkpoints() == 1 and seen.cancelled == []


def test_callbacks_can_be_overridden(world: World) -> None:
    seen: list[Any] = []

    class Own(CheckpointCoordinator):
        def on_cancel_checkpoint(self, checkpoint_id: int) -> None:
            seen.append(("cancel", checkpoint_id))

        def on_fully_acknowledged_checkpoint(self, completed: CompletedCheckpoint) -> None:
            seen.append(("full", completed.id))

        def on_shutdown(self) -> None:
            seen.append("shutdown")

    coord = Own("job", [A], clock=world.clock, timers=world)
    coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1))
    coord.start_checkpoint()
    coord.receive_decline_message(decline(A, 2))
    coord.shutdown()
    coord.shutdown()
    assert seen == [("full", 1), ("cancel", 2), "shutdown"]


def test_tasks_that_cannot_be_told_abort_the_checkpoint(world: World) -> None:
    coord, seen = recorded(world)
    seen.failure = OSError("task 1 is not running")
    assert not coord.trigger_checkpoint()
    assert coord.get_number_of_pending_checkpoints() == 0 and world.armed == []
    assert seen.cancelled == [1] and seen.triggered[0].is_discarded
    with pytest.raises(CheckpointNotTriggeredError, match="task 1 is not running") as raised:
        coord.start_checkpoint()
    assert raised.value.__cause__ is seen.failure
    assert coord.stats.counts() == {"triggered": 2, "in_progress": 0, "completed": 0, "failed": 2, "restored": 0}
    assert isinstance(error_from("CheckpointNotTriggeredError", "x"), CheckpointNotTriggeredError)


def test_a_checkpoint_that_completes_while_its_tasks_are_told_counts(world: World) -> None:
    def tell(pending: PendingCheckpoint) -> None:
        coord.receive_acknowledge_message(ack(A, pending.id, "a"))
        coord.receive_acknowledge_message(ack(B, pending.id, "b"))
        raise OSError("the answer was lost")

    coord = coordinator(world, trigger=tell)
    assert coord.trigger_checkpoint()
    assert [c.states for c in coord.get_successful_checkpoints()] == [{A: "a", B: "b"}]


def test_the_last_acknowledged_attempt_counts_or_as_in_flink_the_first(world: World) -> None:
    for replace, state, size in ((True, "second", 3), (False, "first", 1)):
        coord = coordinator(world, replace=replace)
        coord.start_checkpoint()
        coord.receive_acknowledge_message(ack(A, 1, "first", size=1))
        coord.receive_acknowledge_message(ack(A, 1, "second", size=3))
        coord.receive_acknowledge_message(ack(B, 1, "b"))
        [completed] = coord.get_successful_checkpoints()
        assert completed.states == {A: state, B: "b"} and completed.size == size


def test_an_attempt_without_state_takes_the_state_away(world: World) -> None:
    coord = coordinator(world)
    coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "first", size=1))
    coord.receive_acknowledge_message(ack(A, 1))
    coord.receive_acknowledge_message(ack(B, 1, "b", size=2))
    [completed] = coord.get_successful_checkpoints()
    assert completed.states == {B: "b"} and completed.size == 2


def test_what_became_of_an_acknowledgement(world: World) -> None:
    coord = coordinator(world)
    assert coord.acknowledge(ack(A, 1)) is Received.UNKNOWN
    coord.start_checkpoint()
    assert coord.acknowledge(ack(A, 1)) is Received.PENDING
    assert coord.acknowledge(ack(B, 1)) is Received.COMPLETED
    assert coord.acknowledge(ack(B, 1)) is Received.LATE


def test_multiple_concurrent_checkpoints(world: World) -> None:
    coord, _ = recorded(world, (A, B, C), max_concurrent=None, completed_store=MemoryCheckpointStore(2))
    one = coord.start_checkpoint(1)
    coord.receive_acknowledge_message(ack(B, one.id))
    two = coord.start_checkpoint(2)
    assert coord.get_pending_checkpoints() == {one.id: one, two.id: two}
    for task, pending in ((C, one), (A, two), (A, one), (B, two)):
        coord.receive_acknowledge_message(ack(task, pending.id))
    assert one.is_discarded and not two.is_discarded and coord.get_number_of_pending_checkpoints() == 1
    coord.receive_acknowledge_message(ack(C, two.id))
    assert two.is_discarded
    assert [(c.id, c.timestamp) for c in coord.get_successful_checkpoints()] == [(one.id, 1), (two.id, 2)]


def test_a_completed_checkpoint_subsumes_those_before_it(world: World) -> None:
    coord, seen = recorded(world, (A, B, C), max_concurrent=None, completed_store=MemoryCheckpointStore(10))
    # The clock is set back in between: ids say what is older.
    one, two, three = coord.start_checkpoint(500), coord.start_checkpoint(400), coord.start_checkpoint(300)
    for task, pending in ((B, one), (C, two), (A, two), (A, one), (B, two)):
        coord.receive_acknowledge_message(ack(task, pending.id))
    assert one.is_discarded and two.is_discarded and not three.is_discarded
    assert one.cancelled is not None and one.cancelled[0] is CancelReason.SUBSUMED
    assert list(coord.get_pending_checkpoints()) == [three.id]
    assert [c.id for c in coord.get_successful_checkpoints()] == [two.id] and seen.cancelled == [one.id]
    assert coord.receive_acknowledge_message(ack(C, one.id)), "late, and without effect"
    assert [c.id for c in coord.get_successful_checkpoints()] == [two.id]


def test_subsumption_can_be_switched_off(world: World) -> None:
    coord, seen = recorded(world, (A,), max_concurrent=None, subsume=False, completed_store=MemoryCheckpointStore(10))
    one, two = coord.start_checkpoint(), coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, two.id))
    assert not one.is_discarded and seen.cancelled == []
    coord.receive_acknowledge_message(ack(A, one.id))
    assert [c.id for c in coord.get_successful_checkpoints()] == [one.id, two.id]


def test_messages_that_belong_to_nothing(world: World) -> None:
    coord = coordinator(world)
    pending = coord.start_checkpoint()
    for message, receive in (
        (ack(A, 1, job_id="another"), coord.receive_acknowledge_message),
        (ack(("op", 2), 1), coord.receive_acknowledge_message),
        (decline(A, 1, job_id="another"), coord.receive_decline_message),
        (decline(("op", 2), 1), coord.receive_decline_message),
    ):
        with pytest.raises(InvalidRequestError, match=r"another.*job|op/2 is no task"):
            receive(message)  # type: ignore[operator]
    assert not coord.receive_acknowledge_message(ack(A, 2)) and not coord.receive_decline_message(decline(A, 2))
    assert pending.num_acknowledged == 0 and not pending.is_discarded


def test_sixteen_finished_checkpoints_are_remembered(world: World) -> None:
    assert RECENT_IDS == 16
    coord = coordinator(world, [A], timeout=10)
    for i in range(1, RECENT_IDS + 2):
        coord.start_checkpoint()
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
    given = coord.start_checkpoint(5, states={A: "a"}, properties={"version": 3})
    assert given.not_yet_acknowledged == {B}
    coord.receive_acknowledge_message(ack(B, given.id, "b"))
    assert seen.completed[0].properties == {"version": 3} and seen.completed[0].states == {A: "a", B: "b"}
    whole = coord.start_checkpoint(6, states={A: "a2", B: "b2"})
    assert whole.completed is seen.completed[1] and whole.completed.states == {A: "a2", B: "b2"}
    assert len(seen.triggered) == 1, "nobody needs to be told"
    seen.failure = StorageError("full")
    with pytest.raises(StorageError, match="full"):
        coord.start_checkpoint(7, states={A: "a3", B: "b3"})
    assert coord.get_number_of_pending_checkpoints() == 0 and seen.cancelled == [3]
    with pytest.raises(InvalidRequestError, match="no task"):
        coord.start_checkpoint(8, states={("op", 9): "x"})
    assert coord.get_number_of_pending_checkpoints() == 0


def test_an_id_is_used_once(world: World) -> None:
    coord = coordinator(world, [A], max_concurrent=None)
    taken = coord.get_and_increment_checkpoint_id()
    assert coord.start_checkpoint(checkpoint_id=taken).id == taken
    with pytest.raises(InvalidRequestError, match="triggered before"):
        coord.start_checkpoint(checkpoint_id=taken)
    coord.receive_acknowledge_message(ack(A, taken))
    with pytest.raises(InvalidRequestError, match="triggered before"):
        coord.start_checkpoint(checkpoint_id=taken)


# ---- completions that fail


@pytest.mark.parametrize("failing", ["callback", "store"])
def test_a_completion_that_fails_is_tried_again(world: World, failing: str) -> None:
    class Store(MemoryCheckpointStore):
        failure: Exception | None = None

        def add(self, completed: CompletedCheckpoint) -> None:
            if self.failure is not None:
                raise self.failure
            super().add(completed)

    store = Store()
    coord, seen = recorded(world, completed_store=store)
    pending = coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "a"))
    failure = StorageError("the disk is full")
    if failing == "store":
        store.failure = failure
    else:
        seen.failure = failure
    for state in ("b1", "b2"):
        with pytest.raises(StorageError, match="the disk is full"):
            coord.receive_acknowledge_message(ack(B, 1, state))
        assert list(coord.get_pending_checkpoints()) == [1] and not pending.is_discarded
        assert pending.is_fully_acknowledged and pending.states == {A: "a", B: state}
        assert coord.get_successful_checkpoints() == [] and seen.cancelled == []
        assert coord.stats.counts()["failed"] == 0
    store.failure = seen.failure = None
    assert coord.acknowledge(ack(B, 1, "b2")) is Received.COMPLETED
    assert [c.states for c in coord.get_successful_checkpoints()] == [{A: "a", B: "b2"}]


def test_without_replacement_a_repeated_acknowledgement_still_tries_again(world: World) -> None:
    coord, seen = recorded(world, [A], replace=False)
    coord.start_checkpoint()
    seen.failure = StorageError("x")
    with pytest.raises(StorageError):
        coord.receive_acknowledge_message(ack(A, 1, "first"))
    seen.failure = None
    assert coord.acknowledge(ack(A, 1, "second")) is Received.COMPLETED
    assert [c.states for c in coord.get_successful_checkpoints()] == [{A: "first"}]


def test_a_failed_completion_still_expires_and_can_be_declined(world: World) -> None:
    for end in ("expire", "decline"):
        coord, seen = recorded(world, [A], timeout=10)
        coord.start_checkpoint()
        seen.failure = StorageError("x")
        with pytest.raises(StorageError):
            coord.receive_acknowledge_message(ack(A, 1))
        if end == "expire":
            world.advance(10)
        else:
            assert coord.receive_decline_message(decline(A, 1))
        assert coord.get_number_of_pending_checkpoints() == 0 and seen.cancelled == [1]


def test_an_interrupted_completion_leaves_the_checkpoint_pending(world: World) -> None:
    coord, seen = recorded(world, [A])
    coord.start_checkpoint()
    seen.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        coord.receive_acknowledge_message(ack(A, 1))
    seen.failure = None
    assert coord.acknowledge(ack(A, 1)) is Received.COMPLETED


class Hanging:
    """A completion that takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self.seen: list[CompletedCheckpoint] = []

    def __call__(self, completed: CompletedCheckpoint) -> None:
        self.seen.append(completed)
        self.begun.set()
        assert self.go_on.wait(HANG)
        if self.failure is not None:
            raise self.failure


def test_while_a_completion_hangs_others_wait_and_everything_else_goes_on(world: World) -> None:
    hang = Hanging()
    coord = coordinator(world, max_concurrent=None, subsume=False, on_fully_acknowledged_checkpoint=hang)
    one, two = coord.start_checkpoint(), coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, one.id, "a"))
    with ThreadPoolExecutor(3) as pool:
        last = pool.submit(coord.acknowledge, ack(B, one.id, "b"))
        assert hang.begun.wait(PATIENCE)
        again = pool.submit(coord.acknowledge, ack(A, one.id, "a2"))
        refused = pool.submit(coord.receive_decline_message, decline(A, one.id))
        assert coord.acknowledge(ack(A, two.id)) is Received.PENDING
        assert coord.get_number_of_pending_checkpoints() == 2 and not coord.cancel_checkpoint(one.id, "no")
        assert not again.done() and not refused.done() and not last.done()
        hang.go_on.set()
        assert (
            last.result(PATIENCE) is Received.COMPLETED
            and again.result(PATIENCE) is Received.LATE
            and refused.result(PATIENCE)
        )
    assert hang.seen[0].states == {A: "a", B: "b"} and one.completed is hang.seen[0]
    assert not two.is_discarded


def test_one_who_waited_for_a_failed_completion_tries_it_with_its_own_state(world: World) -> None:
    hang = Hanging()
    hang.failure = StorageError("x")
    coord = coordinator(world, on_fully_acknowledged_checkpoint=hang)
    coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "a"))
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(coord.acknowledge, ack(B, 1, "b"))
        assert hang.begun.wait(PATIENCE)
        again = pool.submit(coord.acknowledge, ack(A, 1, "a2"))
        assert waiting(coord)
        hang.go_on.set()
        for tried in (last, again):
            with pytest.raises(StorageError):
                tried.result(PATIENCE)
    assert [c.states for c in hang.seen] == [{A: "a", B: "b"}, {A: "a2", B: "b"}]
    hang.failure = None
    assert coord.acknowledge(ack(B, 1, "b")) is Received.COMPLETED


def waiting(coord: CheckpointCoordinator) -> bool:
    """Wait until a thread waits for a completion."""
    deadline = time.monotonic() + PATIENCE
    while not coord._completion_ended._waiters and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.001)
    return bool(coord._completion_ended._waiters)  # type: ignore[attr-defined]


def test_shutdown_frees_those_who_wait_for_a_completion(world: World) -> None:
    hang = Hanging()
    coord = coordinator(world, [A], on_fully_acknowledged_checkpoint=hang)
    coord.start_checkpoint()
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(coord.acknowledge, ack(A, 1, "a"))
        assert hang.begun.wait(PATIENCE)
        again = pool.submit(coord.acknowledge, ack(A, 1, "a2"))
        assert waiting(coord)
        coord.shutdown()
        try:
            assert again.result(PATIENCE) is Received.UNKNOWN and not last.done()
        finally:
            hang.go_on.set()
        assert last.result(PATIENCE) is Received.COMPLETED


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("end", ["timer", "expire", "stop", "shutdown", "subsumed"])
def test_what_ends_during_a_completion_ends_only_if_that_fails(world: World, end: str, fails: bool) -> None:
    hang = Hanging()
    cancelled: list[int] = []

    def complete(completed: CompletedCheckpoint) -> None:
        if completed.id == 1:
            hang(completed)

    coord = coordinator(
        world,
        [A],
        timeout=10,
        max_concurrent=None,
        completed_store=MemoryCheckpointStore(5),
        on_fully_acknowledged_checkpoint=complete,
        on_cancel_checkpoint=cancelled.append,
    )
    pending = coord.start_checkpoint()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(coord.acknowledge, ack(A, 1, "a"))
        assert hang.begun.wait(PATIENCE)
        if end == "timer":
            world.advance(10)
        elif end == "expire":
            world.now += 10
            assert coord.expire() == []
        elif end == "stop":
            coord.stop_checkpoint_scheduler()
        elif end == "shutdown":
            coord.shutdown()
        else:
            coord.start_checkpoint()
            assert coord.acknowledge(ack(A, 2)) is Received.COMPLETED
        assert not pending.is_discarded and cancelled == []
        hang.failure = StorageError("x") if fails else None
        hang.go_on.set()
        if fails:
            with pytest.raises(StorageError):
                last.result(PATIENCE)
        else:
            assert last.result(PATIENCE) is Received.COMPLETED
    assert pending.is_discarded and coord.get_number_of_pending_checkpoints() == 0
    assert (pending.completed is None) == fails and cancelled == ([1] if fails else [])


def test_a_callback_may_not_acknowledge_its_own_checkpoint(world: World) -> None:
    errors: list[CoordinatorError] = []

    def complete(completed: CompletedCheckpoint) -> None:
        with pytest.raises(InvalidRequestError, match="own callback") as raised:
            coord.acknowledge(ack(A, completed.id))
        errors.append(raised.value)

    coord = coordinator(world, [A], on_fully_acknowledged_checkpoint=complete)
    coord.start_checkpoint()
    assert coord.acknowledge(ack(A, 1)) is Received.COMPLETED and errors


# ---- giving up


def test_a_checkpoint_expires(world: World) -> None:
    coord, seen = recorded(world, timeout=200)
    pending = coord.start_checkpoint(timestamp=5)
    coord.receive_acknowledge_message(ack(A, 1))
    world.advance(199)
    assert coord.expire() == [] and not pending.is_discarded
    world.advance(1)
    assert pending.is_discarded and pending.cancelled is not None
    assert pending.cancelled[0] is CancelReason.EXPIRED and "op/1" in pending.cancelled[1]
    assert coord.get_number_of_pending_checkpoints() == 0 and coord.get_successful_checkpoints() == []
    assert seen.cancelled == [1] and seen.completed == []
    assert coord.receive_acknowledge_message(ack(B, 1)) and seen.completed == []


def test_expiry_by_hand(world: World) -> None:
    coord, seen = recorded(world, timeout=10, max_concurrent=None, timers=World())
    coord.start_checkpoint()
    world.now += 6
    coord.start_checkpoint()
    world.now += 4
    assert coord.expire() == [1] and coord.expire() == [] and list(coord.get_pending_checkpoints()) == [2]
    world.now += 6
    assert coord.expire() == [2] and seen.cancelled == [1, 2]
    never = coordinator(world, timeout=None)
    never.start_checkpoint()
    world.advance(1e9)
    assert never.expire() == [] and never.get_number_of_pending_checkpoints() == 1


def test_a_timer_expires_whatever_the_clock_says(world: World) -> None:
    timers = World()
    coord = coordinator(world, timeout=10, timers=timers)
    pending = coord.start_checkpoint()
    world.now -= 500
    assert coord.expire() == []
    timers.advance(10)
    assert pending.is_discarded


def test_a_slow_checkpoint_is_warned_about_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    coord = coordinator(world, timeout=None, slow_after=5)
    coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1))
    world.advance(4)
    assert caplog.records == []
    world.advance(100)
    assert [r.message for r in caplog.records] == [
        "Checkpoint 1 of job is pending for 5 s: 1 of 2 tasks have not acknowledged it: op/1"
    ]
    coord.receive_acknowledge_message(ack(B, 1))
    coord.start_checkpoint(states={A: 1, B: 2})
    world.advance(100)
    assert len(caplog.records) == 1


def test_a_declined_checkpoint_is_given_up(world: World) -> None:
    coord, seen = recorded(world)
    pending = coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(B, 1))
    assert coord.receive_decline_message(decline(A, 1, "out of memory"))
    assert pending.cancelled == (CancelReason.DECLINED, "declined by op/0: out of memory")
    assert pending.is_discarded and seen.cancelled == [1] and coord.get_number_of_pending_checkpoints() == 0
    assert coord.receive_decline_message(decline(B, 1)) and coord.receive_acknowledge_message(ack(A, 1))
    world.advance(1000)
    assert coord.get_number_of_pending_checkpoints() == 0 and seen.cancelled == [1], "nothing follows by itself"


def test_a_decline_is_followed_by_another_checkpoint_while_the_scheduler_runs(world: World) -> None:
    coord, seen = recorded(world, interval=100, max_concurrent=3, timeout=None)
    coord.start_checkpoint_scheduler()
    world.advance(200)
    assert list(coord.get_pending_checkpoints()) == [1, 2]
    coord.receive_decline_message(decline(A, 1))
    world.advance(0)
    assert list(coord.get_pending_checkpoints()) == [2], "a more recent one is pending"
    coord.receive_decline_message(decline(A, 2))
    assert list(coord.get_pending_checkpoints()) == []
    world.advance(0)
    assert list(coord.get_pending_checkpoints()) == [3] and seen.cancelled == [1, 2]
    world.advance(100)
    assert list(coord.get_pending_checkpoints()) == [3, 4], "and the rhythm goes on"


def test_a_checkpoint_can_be_cancelled(world: World) -> None:
    coord, seen = recorded(world)
    pending = coord.start_checkpoint()
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

    coord = coordinator(world, max_concurrent=None, on_cancel_checkpoint=fail)
    coord.start_checkpoint()
    coord.start_checkpoint()
    coord.stop_checkpoint_scheduler()
    assert seen == [1, 2] and coord.get_number_of_pending_checkpoints() == 0
    assert len([r for r in caplog.records if r.exc_info]) == 2


# ---- when a checkpoint may be triggered


def test_why_a_checkpoint_may_not_be_triggered(world: World) -> None:
    coord = coordinator(world, min_pause=5)
    coord.start_checkpoint()
    with pytest.raises(CheckpointNotTriggeredError, match=r"1 checkpoints of job are pending \(\[1\]\), and at most 1"):
        coord.start_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1))
    coord.receive_acknowledge_message(ack(B, 1))
    world.advance(2)
    with pytest.raises(CheckpointNotTriggeredError, match=r"min_pause=5 s ago: wait 3\.000 s"):
        coord.start_checkpoint()
    assert not coord.trigger_checkpoint()
    world.advance(3)
    assert coord.trigger_checkpoint()
    assert coord.id_counter.get() == 3, "refusals take no ids"


def test_a_clock_that_was_set_back_does_not_hold_up_checkpoints(world: World) -> None:
    coord = coordinator(world, min_pause=5)
    coord.start_checkpoint(states={A: 1, B: 1})
    world.now -= 1000
    assert coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 2))
    coord.receive_acknowledge_message(ack(B, 2))
    assert coord.get_successful_checkpoints()[-1].duration >= 0


def test_a_request_too_many_is_queued(world: World) -> None:
    coord, seen = recorded(world)
    assert coord.trigger_checkpoint()
    assert not coord.trigger_checkpoint()
    assert not coord.trigger_checkpoint(), "one is queued already"
    coord.receive_acknowledge_message(ack(A, 1))
    coord.receive_acknowledge_message(ack(B, 1))
    assert coord.get_number_of_pending_checkpoints() == 0
    world.advance(0)
    assert list(coord.get_pending_checkpoints()) == [2]
    world.advance(599)
    assert len(seen.triggered) == 2, "one, and once"
    # Not so a start, whose caller is told at once.
    with pytest.raises(CheckpointNotTriggeredError):
        coord.start_checkpoint()
    coord.receive_decline_message(decline(A, 2))
    world.advance(10)
    assert len(seen.triggered) == 2


@pytest.mark.parametrize("end", ["expire", "decline", "cancel", "fail"])
def test_a_queued_request_goes_on_however_the_other_ends(world: World, end: str) -> None:
    coord, seen = recorded(world, [A], timeout=10)
    coord.trigger_checkpoint()
    assert not coord.trigger_checkpoint()
    if end == "expire":
        world.now += 10
        assert coord.expire() == [1]
    elif end == "decline":
        coord.receive_decline_message(decline(A, 1))
    elif end == "cancel":
        coord.cancel_checkpoint(1, "x")
    else:
        hang = Hanging()
        hang.failure = StorageError("x")
        hang.go_on.set()
        coord._acknowledged_callback = lambda c: (world.advance(10), hang(c))  # type: ignore[assignment, return-value]
        with pytest.raises(StorageError):
            coord.receive_acknowledge_message(ack(A, 1))
    world.advance(0)
    assert list(coord.get_pending_checkpoints()) == [2] and seen.cancelled == [1]


def test_periodic_triggering(world: World) -> None:
    coord, seen = recorded(world, [A], interval=10, timeout=None, max_concurrent=None)
    coord.start_checkpoint_scheduler()
    world.advance(9)
    assert seen.triggered == []
    world.advance(41)
    assert [(p.id, p.timestamp) for p in seen.triggered] == [(i, 1000 + 10 * i) for i in range(1, 6)]
    coord.stop_checkpoint_scheduler()
    assert all(p.is_discarded for p in seen.triggered) and coord.get_number_of_pending_checkpoints() == 0
    assert seen.cancelled == [1, 2, 3, 4, 5] and world.armed == []
    world.advance(100)
    assert len(seen.triggered) == 5
    coord.start_checkpoint_scheduler()
    coord.start_checkpoint_scheduler()  # again: not twice as many
    world.advance(50)
    assert len(seen.triggered) == 10


def test_a_tick_that_has_begun_when_the_scheduler_stops_does_nothing(world: World) -> None:
    coord, seen = recorded(world, [A], interval=10)
    coord.start_checkpoint_scheduler()
    [tick] = world.armed
    coord.stop_checkpoint_scheduler()
    tick.callback()
    assert seen.triggered == [] and world.armed == []


def test_the_pause_between_checkpoints(world: World) -> None:
    coord, seen = recorded(world, [A], interval=12, min_pause=50, timeout=None)
    coord.start_checkpoint_scheduler()
    world.advance(12)
    first = seen.triggered[0]
    world.advance(20)
    coord.receive_acknowledge_message(ack(A, first.id))
    done = world.now
    world.advance(49.5)
    assert len(seen.triggered) == 1
    world.advance(0.5)
    assert [p.timestamp for p in seen.triggered] == [1012, done + 50]
    coord.receive_acknowledge_message(ack(A, seen.triggered[1].id))
    world.advance(49)
    assert len(seen.triggered) == 2
    world.advance(1)
    assert len(seen.triggered) == 3


@pytest.mark.parametrize("most", [1, 2, 5])
def test_max_concurrent(world: World, most: int) -> None:
    coord, seen = recorded(world, [A], interval=10, timeout=None, max_concurrent=most)
    coord.start_checkpoint_scheduler()
    world.advance(1000)
    assert len(seen.triggered) == most == coord.get_number_of_pending_checkpoints()
    assert world.armed == [], "it sleeps until one of them ends"
    coord.receive_acknowledge_message(ack(A, 1))
    world.advance(0)
    assert len(seen.triggered) == most + 1, "at once"
    world.advance(1000)
    assert len(seen.triggered) == most + 1


def test_max_concurrent_with_subsumption(world: World) -> None:
    coord, _ = recorded(world, [A], interval=10, timeout=None, max_concurrent=2)
    coord.start_checkpoint_scheduler()
    world.advance(100)
    assert list(coord.get_pending_checkpoints()) == [1, 2]
    coord.receive_acknowledge_message(ack(A, 2))
    world.advance(100)
    assert list(coord.get_pending_checkpoints()) == [3, 4]


def test_periodic_triggering_begins_when_the_tasks_can_be_told(world: World) -> None:
    coord, seen = recorded(world, [A], interval=10, timeout=None)
    seen.failure = OSError("not running")
    coord.start_checkpoint_scheduler()
    world.advance(200)
    assert len(seen.triggered) == 20 and coord.get_number_of_pending_checkpoints() == 0
    seen.failure = None
    world.advance(10)
    assert coord.get_number_of_pending_checkpoints() == 1


def test_without_an_interval_the_scheduler_triggers_nothing(world: World) -> None:
    coord, seen = recorded(world)
    coord.start_checkpoint()
    coord.start_checkpoint_scheduler()
    assert seen.cancelled == [1] and world.armed == []
    coord.start_checkpoint()
    coord.receive_decline_message(decline(A, 2))
    world.advance(1e6)
    assert len(seen.triggered) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"slow_after": 0}, "slow_after is 0"),
        ({"min_pause": -0.1}, "min_pause is -0.1"),
        ({"max_concurrent": 0}, "max_concurrent is 0"),
        ({"tasks": [A, B, A]}, "1 of the 3 tasks"),
    ],
)
def test_wrong_options(world: World, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        coordinator(world, **options)


# ---- the job's status and shutdown


def test_the_job_status_starts_and_stops_the_scheduler(world: World) -> None:
    coord, seen = recorded(world, [A], interval=10, timeout=None, max_concurrent=None)
    listener = coord.create_activator_deactivator()
    assert coord.create_activator_deactivator() is listener
    world.advance(100)
    assert seen.triggered == []
    for i, status in enumerate(s for s in JobStatus if s is not JobStatus.RUNNING):
        listener.job_status_changed("job", JobStatus.RUNNING)
        world.advance(10)
        assert len(seen.triggered) == i + 1
        listener.job_status_changed("job", status.value)
        assert coord.get_number_of_pending_checkpoints() == 0
        world.advance(100)
        assert len(seen.triggered) == i + 1
    with pytest.raises(InvalidRequestError, match="another"):
        listener.job_status_changed("another", JobStatus.RUNNING)
    with pytest.raises(InvalidRequestError, match="'PAUSED' is no job status"):
        listener.job_status_changed("job", "PAUSED")
    coord.shutdown()
    listener.job_status_changed("job", JobStatus.RUNNING)
    world.advance(100)
    assert coord.get_number_of_pending_checkpoints() == 0
    with pytest.raises(CheckpointCoordinatorShutdownError):
        coord.create_activator_deactivator()


def test_shutdown_gives_everything_up_and_takes_nothing_more(world: World) -> None:
    coord, seen = recorded(world, [A], interval=10)
    coord.start_checkpoint_scheduler()
    world.advance(10)
    coord.receive_acknowledge_message(ack(A, 1))
    world.advance(10)
    assert not coord.is_shutdown() and coord.get_number_of_retained_successful_checkpoints() == 1
    coord.shutdown()
    coord.shutdown()
    assert coord.is_shutdown() and seen.shutdowns == 1 and seen.cancelled == [2]
    assert seen.triggered[1].cancelled is not None and seen.triggered[1].cancelled[0] is CancelReason.SHUTDOWN
    assert coord.get_number_of_pending_checkpoints() == coord.get_number_of_retained_successful_checkpoints() == 0
    assert world.armed == [] and not coord.trigger_checkpoint()
    assert not coord.receive_acknowledge_message(ack(A, 2)) and not coord.receive_decline_message(decline(A, 2))
    for refused in (
        coord.start_checkpoint,
        coord.start_checkpoint_scheduler,
        lambda: coord.restore_latest_checkpointed_state(lambda task, state: None),
    ):
        with pytest.raises(CheckpointCoordinatorShutdownError, match="of job is shut down"):
            refused()


def test_the_shutdown_callback_comes_even_if_the_store_fails(world: World) -> None:
    class Store(MemoryCheckpointStore):
        def shutdown(self) -> None:
            raise StorageError("x")

    coord, seen = recorded(world, completed_store=Store())
    with pytest.raises(StorageError):
        coord.shutdown()
    assert seen.shutdowns == 1


# ---- restoring


def complete(coord: CheckpointCoordinator, states: dict[TaskKey, Any], tasks: Any) -> int:
    pending = coord.start_checkpoint()
    for task in tasks:
        coord.receive_acknowledge_message(ack(task, pending.id, states.get(task)))
    return pending.id


def test_restore_hands_out_the_latest_state(world: World) -> None:
    coord = coordinator(world, (A, B, C))
    complete(coord, {A: "old", B: "old"}, (A, B, C))
    last = complete(coord, {A: "a", B: "b"}, (A, B, C))
    restored: dict[TaskKey, Any] = {}
    found = coord.restore_latest_checkpointed_state(
        restored.__setitem__, error_if_no_checkpoint=True, all_or_nothing_state=True
    )
    assert restored == {A: "a", B: "b"} and found is not None and found.id == last
    assert coord.stats.counts()["restored"] == 1


def test_restore_of_partial_state(world: World) -> None:
    coord = coordinator(world, (A, B, C))
    complete(coord, {A: "a"}, (A, B, C))
    restored: dict[TaskKey, Any] = {}
    with pytest.raises(CheckpointRestoreError, match=r"only for a part.*op/1"):
        coord.restore_latest_checkpointed_state(restored.__setitem__, all_or_nothing_state=True)
    assert restored == {}
    coord.restore_latest_checkpointed_state(restored.__setitem__)
    assert restored == {A: "a"}


def test_restore_without_a_checkpoint(world: World) -> None:
    coord = coordinator(world)
    assert coord.restore_latest_checkpointed_state(lambda task, state: None) is None
    with pytest.raises(CheckpointRestoreError, match="no completed checkpoint"):
        coord.restore_latest_checkpointed_state(lambda task, state: None, error_if_no_checkpoint=True)
    assert coord.stats.counts()["restored"] == 0


@pytest.mark.parametrize("tasks", [[A], [A, B, ("op", 2)], [C]])
def test_restore_to_other_tasks_is_refused(world: World, tasks: list[TaskKey]) -> None:
    store = MemoryCheckpointStore()
    complete(coordinator(world, completed_store=store), {A: "a", B: "b"}, (A, B))
    restored: dict[TaskKey, Any] = {}
    with pytest.raises(CheckpointRestoreError, match=r"does not fit.*\{'op': 2\}"):
        coordinator(world, tasks, completed_store=store).restore_latest_checkpointed_state(restored.__setitem__)
    assert restored == {}
    grown = coordinator(world, [A, B, C], completed_store=store)
    assert grown.restore_latest_checkpointed_state(restored.__setitem__) is not None and len(restored) == 2


def test_restore_sets_the_counter_above_what_was_restored(world: World) -> None:
    store = MemoryCheckpointStore()
    store.add(CompletedCheckpoint(41, 0, 0, {A: "a"}))
    coord = coordinator(world, completed_store=store)
    coord.restore_latest_checkpointed_state(lambda task, state: None)
    assert coord.start_checkpoint().id == 42


# ---- the counter


def test_the_counter_counts_and_only_goes_forward() -> None:
    counter = CheckpointIDCounter()
    assert [counter.get_and_increment() for _ in range(4)] == [1, 2, 3, 4] and counter.get() == 5
    counter.set_count(1337)
    assert [counter.get_and_increment(), counter.get_and_increment()] == [1337, 1338]
    with pytest.raises(InvalidRequestError, match="stands at 1339 and cannot be set back to 1338"):
        counter.set_count(1338)
    counter.set_count(1339)
    counter.ensure_above(10)
    assert counter.get() == 1339
    counter.ensure_above(1339)
    assert counter.get() == 1340 and CheckpointIDCounter(7).get_and_increment() == 7
    with pytest.raises(InvalidRequestError):
        CheckpointIDCounter(-1)


def test_the_counter_is_thread_safe() -> None:
    counter = CheckpointIDCounter()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda _: [counter.get_and_increment() for _ in range(500)], range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert sorted(i for ids in taken for i in ids) == list(range(1, 4001))
    assert all(ids == sorted(ids) for ids in taken)


# ---- many of everything


def test_real_timers_expire_and_trigger() -> None:
    expired = threading.Event()
    coord = CheckpointCoordinator(
        "job", [A], timeout=0.01, timers=ThreadTimers(), on_cancel_checkpoint=lambda i: expired.set()
    )
    coord.start_checkpoint()
    assert expired.wait(PATIENCE)
    coord.shutdown()
    told: list[int] = []
    enough = threading.Event()

    def tell(pending: PendingCheckpoint) -> None:
        told.append(pending.id)
        coord.receive_acknowledge_message(ack(A, pending.id))
        if len(told) >= 3:
            enough.set()

    coord = CheckpointCoordinator("job", [A], interval=0.01, trigger=tell)
    coord.start_checkpoint_scheduler()
    assert enough.wait(PATIENCE)
    coord.shutdown()
    assert told == sorted(set(told))


def test_an_error_in_a_timer_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    coord = coordinator(world, interval=10)

    def broken(pending: PendingCheckpoint) -> None:
        raise RuntimeError("broken counter")

    coord.stats.on_triggered = broken  # type: ignore[method-assign]
    coord.start_checkpoint_scheduler()
    world.advance(10)
    assert any("timer" in r.message and r.exc_info for r in caplog.records)


def test_acknowledgements_of_many_threads_complete_each_checkpoint_once() -> None:
    tasks = [("op", p) for p in range(40)]
    completed: list[CompletedCheckpoint] = []
    coord = CheckpointCoordinator(
        "job",
        tasks,
        max_concurrent=None,
        subsume=False,
        timeout=None,
        completed_store=MemoryCheckpointStore(50),
        on_fully_acknowledged_checkpoint=completed.append,
    )
    ids = [coord.start_checkpoint().id for _ in range(20)]
    messages = [ack(task, i, f"{i}:{task}") for i in ids for task in tasks] * 2
    random.Random(7).shuffle(messages)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(coord.acknowledge, messages))
    assert sorted(c.id for c in completed) == ids and results.count(Received.COMPLETED) == len(ids)
    assert all(c.states == {task: f"{c.id}:{task}" for task in tasks} for c in completed)
    assert coord.stats.counts()["completed"] == 20 and Received.UNKNOWN not in results[: len(tasks)]


def test_whether_all_have_acknowledged_costs_the_same_for_any_number_of_tasks() -> None:
    """Counted in lines run, not in time: no Python loop over the tasks runs per acknowledgement."""
    few, many = (_steps_per_acknowledgement(n) for n in (10, 10_000))
    assert many == few > 10


def _steps_per_acknowledgement(tasks: int) -> int:
    coord = CheckpointCoordinator("job", [("op", p) for p in range(tasks)], timeout=None)
    coord.start_checkpoint()
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


def test_what_is_remembered_of_ten_thousand_tasks_stays_small() -> None:
    tasks = [("op", p) for p in range(10_000)]
    coord = CheckpointCoordinator("job", tasks, timeout=None, stats_tracker=CheckpointStatsTracker(20))
    states = dict.fromkeys(tasks, "s")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(24):
            coord.start_checkpoint(states=states)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(coord.stats.history()) == 20
    # 12 bytes per task and checkpoint (a hundred of them are 12 MB), and one checkpoint's states.
    assert grown < 20 * 10_000 * 12 + 1_000_000
