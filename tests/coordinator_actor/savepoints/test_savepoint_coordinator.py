"""The savepoint coordinator, with a clock that tests turn.

Counterparts of Flink 1.0's SavepointCoordinatorTest, and where each is:

- testSimpleTriggerSavepoint: test_trigger_and_acknowledge
- testAbortSavepointIfTriggerTasksNotExecuted, ...AreFinished, testAbortSavepointIfAckTasksAreNotExecuted:
  test_a_savepoint_fails_when_its_tasks_cannot_be_notified
- testAbortOnCheckpointTimeout: test_a_savepoint_expires
- testAbortSavepointsOnShutdown: test_shutdown
- testAbortSavepointOnStateStoreFailure: test_a_savepoint_that_cannot_be_stored_fails
- testAbortSavepointIfSubsumed: test_savepoints_do_not_subsume_each_other
- testRollback...: test_savepoint_restore.py: restoring makes a new checkpoint
"""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from backends.exceptions import StorageError
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from coordinator_actor.checkpoints.pending_checkpoint import (
    AcknowledgeCheckpoint,
    CheckpointIDCounter,
    CompletedCheckpoint,
    DeclineCheckpoint,
    PendingCheckpoint,
    Received,
    TaskKey,
)
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    SavepointDeclinedError,
    SavepointExpiredError,
    SavepointFailedError,
)
from coordinator_actor.savepoints.savepoint_coordinator import SavepointCoordinator
from spark_bridge.exceptions import rebuilt_error
from tests.coordinator_actor.checkpoints.checkpoint_world import World
from tests.patience import HANG, PATIENCE

A, B = ("op", 0), ("op", 1)


class Store:
    """Savepoints in a dict."""

    def __init__(self) -> None:
        self.held: dict[str, CompletedCheckpoint] = {}
        self.failure: BaseException | None = None

    def store(self, completed: CompletedCheckpoint) -> str:
        if self.failure is not None:
            raise self.failure
        path = f"sp/{completed.id}"
        self.held[path] = completed
        return path


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def store() -> Store:
    return Store()


def savepoints(world: World, store: Store, tasks: Any = (A, B), **options: Any) -> SavepointCoordinator:
    made = SavepointCoordinator(
        "job", tasks, **{"id_counter": CheckpointIDCounter(), "store": store.store, "clock": world.clock, **options}
    )
    world.coordinators.append(made)
    return made


def ack(task: TaskKey, checkpoint_id: int, state: Any = "s") -> AcknowledgeCheckpoint:
    return AcknowledgeCheckpoint("job", task, checkpoint_id, state)


def acknowledge_all(coord: CheckpointCoordinator, checkpoint_id: int, tasks: Any = (A, B)) -> None:
    for operator, partition in tasks:
        assert coord.receive_acknowledge_message(ack((operator, partition), checkpoint_id, f"{operator}/{partition}"))


def nothing_left(coord: SavepointCoordinator, world: World) -> bool:
    left = (coord.get_number_of_pending_savepoints(), coord.get_number_of_pending_checkpoints())
    return left == (0, 0) and not coord._futures and not coord._paths


# ---- making


def test_trigger_and_acknowledge(world: World, store: Store) -> None:
    told: list[PendingCheckpoint] = []
    coord = savepoints(world, store, trigger=told.append)
    future = coord.trigger_savepoint(127.5, properties={"base": "s3://b/sp"})
    assert isinstance(future, Future) and not future.done() and coord.get_number_of_pending_savepoints() == 1
    [pending] = told
    assert coord.get_pending_checkpoints() == {1: pending}
    assert (pending.id, pending.timestamp, pending.num_acknowledged) == (1, 127.5, 0)
    assert coord.receive_acknowledge_message(ack(A, 1, "a")) is Received.PENDING and not future.done()
    assert coord.receive_acknowledge_message(ack(B, 1, "b")) is Received.COMPLETED
    assert pending.is_discarded and future.result(0) == "sp/1"
    saved = store.held["sp/1"]
    assert saved.states == {A: "a", B: "b"} and saved.timestamp == 127.5 and saved.properties == {"base": "s3://b/sp"}
    assert nothing_left(coord, world)
    assert coord.stats.counts()["completed"] == 1


def test_the_counter_is_shared_with_the_checkpoints(world: World, store: Store) -> None:
    counter = CheckpointIDCounter()
    checkpoints = CheckpointCoordinator("job", [A], id_counter=counter, timeout=None)
    coord = savepoints(world, store, [A], id_counter=counter)
    ids = []
    for _ in range(3):
        pending = checkpoints.trigger_checkpoint()
        future = coord.trigger_savepoint()
        [savepoint_id] = coord.get_pending_checkpoints()
        ids += [pending.id, savepoint_id]
        checkpoints.receive_acknowledge_message(ack(A, pending.id))
        assert not future.done(), "a completed checkpoint ends no savepoint"
        assert not checkpoints.receive_acknowledge_message(ack(A, savepoint_id))
        coord.receive_acknowledge_message(ack(A, savepoint_id))
        assert future.result(0) == f"sp/{savepoint_id}"
    assert ids == [1, 2, 3, 4, 5, 6]


def test_a_result_is_set_when_the_savepoint_is_no_longer_pending(world: World, store: Store) -> None:
    coord = savepoints(world, store, [A])
    seen: list[Any] = []
    coord.trigger_savepoint().add_done_callback(
        lambda f: seen.append(
            (f.result(), coord.get_number_of_pending_checkpoints(), coord.stats.counts()["completed"])
        )
    )
    acknowledge_all(coord, 1, [A])
    assert seen == [("sp/1", 0, 1)]


def test_without_tasks_a_savepoint_is_made_at_once(world: World, store: Store) -> None:
    coord = savepoints(world, store, ())
    assert coord.trigger_savepoint().result(0) == "sp/1" and store.held["sp/1"].states == {}
    store.failure = StorageError("full")
    assert isinstance(coord.trigger_savepoint().exception(0), SavepointFailedError)
    assert nothing_left(coord, world)


# ---- failing


def fails(future: Future[str], kind: type[Exception], match: str) -> BaseException | None:
    """That the future has failed so; returns the cause."""
    assert future.done()
    with pytest.raises(kind, match=match) as raised:
        future.result(0)
    assert type(raised.value) is kind and type(rebuilt_error(kind.__name__, "x")) is kind
    return raised.value.__cause__


def test_a_savepoint_fails_when_its_tasks_cannot_be_notified(world: World, store: Store) -> None:
    failure = OSError("host 3 does not answer")

    def tell(pending: PendingCheckpoint) -> None:
        raise failure

    coord = savepoints(world, store, trigger=tell)
    assert fails(coord.trigger_savepoint(), SavepointFailedError, "host 3 does not answer") is failure
    assert nothing_left(coord, world)


def test_a_savepoint_expires(world: World, store: Store) -> None:
    coord = savepoints(world, store, timeout=20)
    future = coord.trigger_savepoint()
    coord.receive_acknowledge_message(ack(A, 1))
    world.advance(19)
    assert not future.done()
    world.advance(1)
    fails(future, SavepointExpiredError, r"Savepoint 1 of job was not made: not complete within 20 s: 1 of 2 .* op/1")
    assert coord.receive_acknowledge_message(ack(B, 1)) and store.held == {} and nothing_left(coord, world)
    assert coord.stats.counts()["failed"] == 1


def test_expiry_by_hand(world: World, store: Store) -> None:
    coord = savepoints(world, store, timeout=20)
    future = coord.trigger_savepoint()
    world.now += 20
    assert coord.expire() == [1]
    fails(future, SavepointExpiredError, "within 20 s")


def test_a_savepoint_is_declined(world: World, store: Store) -> None:
    coord = savepoints(world, store)
    future, other = coord.trigger_savepoint(), coord.trigger_savepoint()
    assert coord.receive_decline_message(DeclineCheckpoint("job", B, 1, "no room"))
    fails(future, SavepointDeclinedError, "declined by op/1: no room")
    assert not other.done() and list(coord.get_pending_checkpoints()) == [2], "no other one is triggered instead"
    assert coord.receive_decline_message(DeclineCheckpoint("job", A, 1, "late"))
    acknowledge_all(coord, 2)
    assert other.result(0) == "sp/2" and nothing_left(coord, world)


def test_shutdown(world: World, store: Store) -> None:
    coord = savepoints(world, store)
    futures = [coord.trigger_savepoint(), coord.trigger_savepoint()]
    coord.shutdown()
    for future in futures:
        fails(future, CheckpointCoordinatorShutdownError, "was not made: the coordinator was shut down")
    fails(coord.trigger_savepoint(), CheckpointCoordinatorShutdownError, "is shut down")
    assert nothing_left(coord, world)


def test_a_savepoint_that_cannot_be_stored_fails(world: World, store: Store) -> None:
    coord = savepoints(world, store)
    store.failure = StorageError("the bucket is gone")
    future = coord.trigger_savepoint()
    coord.receive_acknowledge_message(ack(A, 1))
    assert coord.receive_acknowledge_message(ack(B, 1)) is Received.ABORTED, "the host has done its part"
    assert fails(future, SavepointFailedError, "could not be stored: the bucket is gone") is store.failure
    assert coord.receive_acknowledge_message(ack(B, 1)) is Received.LATE
    assert coord.stats.counts()["failed"] == 1 and nothing_left(coord, world)


def test_an_interrupted_storing_may_be_tried_again(world: World, store: Store) -> None:
    coord = savepoints(world, store, [A])
    future = coord.trigger_savepoint()
    store.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        coord.receive_acknowledge_message(ack(A, 1))
    assert not future.done()
    store.failure = None
    assert coord.receive_acknowledge_message(ack(A, 1)) is Received.COMPLETED
    assert future.result(0) == "sp/1" and nothing_left(coord, world)


def test_savepoints_do_not_subsume_each_other(world: World, store: Store) -> None:
    coord = savepoints(world, store)
    first, second = coord.trigger_savepoint(), coord.trigger_savepoint()
    acknowledge_all(coord, 2)
    assert second.result(0) == "sp/2" and not first.done()
    acknowledge_all(coord, 1)
    assert first.result(0) == "sp/1"
    assert nothing_left(coord, world)


# ---- cancelling the future


def test_to_cancel_the_future_is_to_cancel_the_savepoint(world: World, store: Store) -> None:
    coord = savepoints(world, store)
    future = coord.trigger_savepoint()
    coord.receive_acknowledge_message(ack(A, 1))
    assert future.cancel() and coord.get_number_of_pending_checkpoints() == 0
    assert (
        coord.receive_acknowledge_message(ack(B, 1)) is Received.LATE
        and store.held == {}
        and nothing_left(coord, world)
    )
    with pytest.raises(CancelledError):
        future.result(0)
    assert concurrent.futures.wait([future], timeout=PATIENCE).done == {future}
    assert coord.stats.failures()[0].reason == "cancelled: cancelled by its requester"


def test_once_it_is_being_stored_a_savepoint_cannot_be_cancelled(world: World) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Store):
        def store(self, completed: CompletedCheckpoint) -> str:
            begun.set()
            assert go_on.wait(HANG)
            return super().store(completed)

    coord = savepoints(world, Slow(), [A], timeout=10)
    future = coord.trigger_savepoint()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(coord.receive_acknowledge_message, ack(A, 1))
        assert begun.wait(PATIENCE)
        assert not future.cancel() and coord.get_number_of_pending_savepoints() == 1
        world.advance(10)
        coord.shutdown()
        assert not future.done(), "what becomes of it is not known yet"
        go_on.set()
        assert last.result(PATIENCE) is Received.COMPLETED
    assert future.result(0) == "sp/1" and nothing_left(coord, world)


def test_a_future_cancelled_at_the_last_moment_is_not_stored(world: World, store: Store) -> None:
    class Late(SavepointCoordinator):
        def _store(self, completed: CompletedCheckpoint) -> None:
            assert future.cancel()
            super()._store(completed)

    coord = Late("job", [A], id_counter=CheckpointIDCounter(), store=store.store, clock=world.clock)
    future = coord.trigger_savepoint()
    assert coord.receive_acknowledge_message(ack(A, 1)) is Received.ABORTED
    assert future.cancelled() and store.held == {} and nothing_left(coord, world)
    assert concurrent.futures.wait([future], timeout=PATIENCE).done == {future}


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_at_once_every_future_ends_once(store: Store, seed: int) -> None:
    """Acknowledgements, declines, cancellations and the shutdown from many threads."""
    coord = SavepointCoordinator("job", [A, B], id_counter=CheckpointIDCounter(), store=store.store, timeout=None)
    futures = [coord.trigger_savepoint() for _ in range(60)]
    calls: list[Any] = []
    for i in range(1, 61):
        calls += [
            lambda i=i: coord.receive_acknowledge_message(ack(A, i)),
            lambda i=i: coord.receive_acknowledge_message(ack(B, i)),
        ]
        if i % 3 == seed % 3:
            calls.append(lambda i=i: coord.receive_decline_message(DeclineCheckpoint("job", A, i, "x")))
        if i % 4 == seed % 4:
            calls.append(futures[i - 1].cancel)
        if i == 50:
            calls.append(coord.shutdown)
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(call) for call in calls]:
            done.result(PATIENCE)
    assert concurrent.futures.wait(futures, timeout=PATIENCE).not_done == set()
    for i, future in enumerate(futures, 1):
        stored = f"sp/{i}" in store.held
        assert stored == (not future.cancelled() and future.exception() is None)
    assert not coord._futures and not coord._paths and coord.get_pending_checkpoints() == {}
