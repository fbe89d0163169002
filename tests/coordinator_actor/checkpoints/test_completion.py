"""Completions of checkpoints that fail, hang, are interrupted, or whose checkpoint ends first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from backends.exceptions import StorageError
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, FullyAcknowledged
from coordinator_actor.checkpoints.pending_checkpoint import CompletedCheckpoint, Received
from coordinator_actor.exceptions import (
    CoordinatorError,
    InvalidRequestError,
)
from tests.coordinator_actor.checkpoints.checkpoint_world import (
    A,
    B,
    World,
    ack,
    coordinator,
    decline,
    recorded,
)
from tests.patience import HANG, PATIENCE


def test_a_completion_that_fails_is_tried_again(world: World) -> None:
    coord, seen = recorded(world)
    pending = coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "a"))
    seen.failure = StorageError("the disk is full")
    for state in ("b1", "b2"):
        with pytest.raises(StorageError, match="the disk is full"):
            coord.receive_acknowledge_message(ack(B, 1, state))
        assert list(coord.get_pending_checkpoints()) == [1] and not pending.is_discarded
        assert pending.is_fully_acknowledged and pending.states == {A: "a", B: state}
        assert coord.successful == [] and seen.cancelled == []
        assert coord.stats.counts()["failed"] == 0
    seen.failure = None
    assert coord.receive_acknowledge_message(ack(B, 1, "b2")) is Received.COMPLETED
    assert [c.states for c in coord.successful] == [{A: "a", B: "b2"}]


def test_a_failed_completion_still_expires_and_can_be_declined(world: World) -> None:
    for end in ("expire", "decline"):
        coord, seen = recorded(world, [A], timeout=10)
        coord.trigger_checkpoint()
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
    coord.trigger_checkpoint()
    seen.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        coord.receive_acknowledge_message(ack(A, 1))
    seen.failure = None
    assert coord.receive_acknowledge_message(ack(A, 1)) is Received.COMPLETED


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


def test_while_a_completion_hangs_others_wait_and_everything_else_continues(world: World) -> None:
    hang = Hanging()
    coord = coordinator(world, subsumes=False, store=hang)
    one, two = coord.trigger_checkpoint(), coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, one.id, "a"))
    with ThreadPoolExecutor(3) as pool:
        last = pool.submit(coord.receive_acknowledge_message, ack(B, one.id, "b"))
        assert hang.begun.wait(PATIENCE)
        again = pool.submit(coord.receive_acknowledge_message, ack(A, one.id, "a2"))
        refused = pool.submit(coord.receive_decline_message, decline(A, one.id))
        assert coord.receive_acknowledge_message(ack(A, two.id)) is Received.PENDING
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


def test_a_caller_that_waited_for_a_failed_completion_tries_it_with_its_own_state(world: World) -> None:
    hang = Hanging()
    hang.failure = StorageError("x")
    coord = coordinator(world, store=hang)
    coord.trigger_checkpoint()
    coord.receive_acknowledge_message(ack(A, 1, "a"))
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(coord.receive_acknowledge_message, ack(B, 1, "b"))
        assert hang.begun.wait(PATIENCE)
        again = pool.submit(coord.receive_acknowledge_message, ack(A, 1, "a2"))
        assert waiting(coord)
        hang.go_on.set()
        for tried in (last, again):
            with pytest.raises(StorageError):
                tried.result(PATIENCE)
    assert [c.states for c in hang.seen] == [{A: "a", B: "b"}, {A: "a2", B: "b"}]
    hang.failure = None
    assert coord.receive_acknowledge_message(ack(B, 1, "b")) is Received.COMPLETED


def waiting(coord: CheckpointCoordinator) -> bool:
    """Wait until a thread waits for a completion."""
    deadline = time.monotonic() + PATIENCE
    while not coord._completion_ended._waiters and time.monotonic() < deadline:  # type: ignore[attr-defined]
        time.sleep(0.001)
    return bool(coord._completion_ended._waiters)  # type: ignore[attr-defined]


def test_shutdown_releases_callers_that_wait_for_a_completion(world: World) -> None:
    hang = Hanging()
    coord = coordinator(world, [A], store=hang)
    coord.trigger_checkpoint()
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(coord.receive_acknowledge_message, ack(A, 1, "a"))
        assert hang.begun.wait(PATIENCE)
        again = pool.submit(coord.receive_acknowledge_message, ack(A, 1, "a2"))
        assert waiting(coord)
        coord.shutdown()
        try:
            assert again.result(PATIENCE) is Received.UNKNOWN and not last.done()
        finally:
            hang.go_on.set()
        assert last.result(PATIENCE) is Received.COMPLETED


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("end", ["expire", "stop", "shutdown", "subsumed"])
def test_an_end_during_a_completion_takes_effect_only_if_that_fails(world: World, end: str, fails: bool) -> None:
    hang = Hanging()
    cancelled: list[int] = []

    def complete(completed: CompletedCheckpoint) -> None:
        if completed.id == 1:
            hang(completed)

    coord = coordinator(
        world,
        [A],
        timeout=10,
        store=complete,
        cancelled=cancelled.append,
    )
    pending = coord.trigger_checkpoint()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(coord.receive_acknowledge_message, ack(A, 1, "a"))
        assert hang.begun.wait(PATIENCE)
        if end == "expire":
            world.now += 10
            assert coord.expire() == []
        elif end == "stop":
            coord.cancel_all("the query has ended")
        elif end == "shutdown":
            coord.shutdown()
        else:
            coord.trigger_checkpoint()
            assert coord.receive_acknowledge_message(ack(A, 2)) is Received.COMPLETED
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
            coord.receive_acknowledge_message(ack(A, completed.id))
        errors.append(raised.value)

    coord = coordinator(world, [A], store=complete)
    coord.trigger_checkpoint()
    assert coord.receive_acknowledge_message(ack(A, 1)) is Received.COMPLETED and errors


def test_a_caller_may_store_a_checkpoint_between_two_steps(world: World) -> None:
    coord, seen = recorded(world)
    pending = coord.trigger_checkpoint(now=1.0)
    assert coord.acknowledge(ack(A, 1, "a"), 2.0) is Received.PENDING
    acknowledged = coord.acknowledge(ack(B, 1, "b"), 3.0)
    assert isinstance(acknowledged, FullyAcknowledged) and acknowledged.completed.duration == 2.0
    with pytest.raises(InvalidRequestError, match="own callback"):
        coord.acknowledge(ack(A, 1, "a2"), 4.0)
    coord.fail(acknowledged, StorageError("full"))
    assert not pending.is_discarded and seen.completed == [], "the hook that stores is for the one call"
    again = coord.acknowledge(ack(A, 1, "a2"), 5.0)
    assert isinstance(again, FullyAcknowledged)
    coord.complete(again)
    assert [c.states for c in coord.successful] == [{A: "a2", B: "b"}] and pending.completed is again.completed
