"""A pending checkpoint by itself, and the messages about it.

The counter of checkpoint ids.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from coordinator_actor.checkpoints.pending_checkpoint import (
    AcknowledgeCheckpoint,
    CheckpointIDCounter,
    DeclineCheckpoint,
    PendingCheckpoint,
    Tasks,
)
from coordinator_actor.exceptions import InvalidRequestError


def test_messages_travel_as_json() -> None:
    message = AcknowledgeCheckpoint("job", ("op", 3), 7, {"path": "x"}, 12, 0.5)
    assert msgspec.json.decode(msgspec.json.encode(message), type=AcknowledgeCheckpoint) == message
    refusal = DeclineCheckpoint("job", ("op", 3), 7, "why")
    assert msgspec.json.decode(msgspec.json.encode(refusal), type=DeclineCheckpoint) == refusal


def test_a_pending_checkpoint_by_itself() -> None:
    pending = PendingCheckpoint("job", 1, 50.0, Tasks([("op", p) for p in range(10)]), started=10.0)
    with pytest.raises(InvalidRequestError, match=r"10 of 10 tasks have not acknowledged it: op/0, .*, \.\.\."):
        pending.to_completed(11)
    missing = pending.not_yet_acknowledged
    missing.clear()
    assert pending.num_not_yet_acknowledged == 10, "the caller gets a copy"
    for p in range(10):
        pending.acknowledge(("op", p), p or None, size=2**62, duration=p, at=20 + p)
    assert repr(pending) == "PendingCheckpoint(id=1, acknowledged=10/10)"
    completed = pending.to_completed(9)
    assert completed.duration == 0 and completed.size == 10 * 2**62, "clocks go back; sums go beyond 64 bits"
    assert completed.states == {("op", p): p for p in range(1, 10)}
    figures = pending.figures()
    assert (figures.first, figures.last) == (20, 29) and math.isclose(float(figures.durations.sum()), 45)
    pending.completed = completed
    with pytest.raises(InvalidRequestError, match="is over"):
        pending.acknowledge(("op", 1), "x", at=30)


def test_the_counter_counts_and_only_goes_forward() -> None:
    counter = CheckpointIDCounter()
    assert [counter.get_and_increment() for _ in range(4)] == [1, 2, 3, 4] and counter.get() == 5
    counter.set_count(1337)
    assert [counter.get_and_increment(), counter.get_and_increment()] == [1337, 1338]
    with pytest.raises(InvalidRequestError, match="is at 1339 and cannot be set back to 1338"):
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
