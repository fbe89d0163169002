"""The counter of checkpoint ids."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter
from coordinator_actor.exceptions import (
    InvalidRequestError,
)


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
