"""The limits of a server, and its queue of waiting requests."""

from __future__ import annotations

import threading
import time

import pytest

from backends.exceptions import InvalidStateStoreArgument
from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.queryable.server.limits import AdmissionLimiter, ComputeSlot, RequestLimits
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import eventually


@pytest.mark.parametrize(
    "given",
    [
        {"max_keys": 0},
        {"max_keys": -1},
        {"max_scans": 1.5},
        {"max_requests": True},
        {"max_connections": "many"},
        {"scan_seconds": 0},
        {"idle_seconds": float("inf")},
        {"idle_seconds": float("nan")},
        {"max_request_bytes": 100},
        {"max_request_bytes": 1 << 32},
        {"max_buffered_bytes": 1 << 20},
    ],
)
def test_unusable_limits_are_rejected(given):
    with pytest.raises(InvalidStateStoreArgument, match=next(iter(given))):
        RequestLimits(**given)


def test_limits_have_defaults_and_take_whole_seconds():
    assert RequestLimits().max_request_bytes == 64 << 20
    assert RequestLimits(scan_seconds=5).scan_seconds == 5


def test_requests_are_served_in_order_of_arrival():
    limiter = AdmissionLimiter(1, "lookups")
    limiter.acquire(0)
    order = []

    def wait(i: int) -> None:
        with limiter.admitted(PATIENCE):
            order.append(i)

    threads = []
    for i in range(5):
        threads.append(threading.Thread(target=wait, args=(i,)))
        threads[-1].start()
        eventually(lambda i=i: len(limiter._waiting) == i + 1)
    with pytest.raises(TooManyRequestsError):
        limiter.acquire(0)
    limiter.release()
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4] and limiter.taken == 0


def test_waiting_has_an_end_and_frees_the_place_in_the_queue():
    limiter = AdmissionLimiter(10, "bytes")
    limiter.acquire(0, 6)
    got = []

    def ask_for_much() -> None:
        with pytest.raises(TooManyRequestsError) as refused:
            limiter.acquire(0.2, 9)
        got.append(refused.value)

    large = threading.Thread(target=ask_for_much)
    large.start()
    eventually(lambda: limiter._waiting or got)  # or this machine has stood still until it gave up
    limiter.acquire(PATIENCE, 3)  # behind the large one, and has its place when that gives up
    assert not limiter._waiting  # not before it: no request overtakes
    large.join()
    assert len(got) == 1 and limiter.taken == 9
    with pytest.raises(TooManyRequestsError, match="11 more"):
        limiter.acquire(5, 11)  # never
    limiter.release(6)
    limiter.release(3)
    assert limiter.taken == 0


def test_no_turn_is_lost_between_giving_up_and_being_served():
    limiter = AdmissionLimiter(2, "lookups")
    refused = []

    def work() -> None:
        for _ in range(300):
            try:
                with limiter.admitted(0.0005):
                    time.sleep(0.0002)
            except TooManyRequestsError:
                refused.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused and limiter.taken == 0 and not limiter._waiting


def test_one_after_the_other_until_patience_ends():
    slot, inside, most, may_end = ComputeSlot(patience=0.2), 0, [], threading.Event()
    counting = threading.Lock()

    def work() -> None:
        nonlocal inside
        with slot:
            with counting:
                inside += 1
                most.append(inside)
            may_end.wait(HANG)
            with counting:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    eventually(lambda: len(most) == 3)  # the others do not wait for ever
    assert time.monotonic() - began >= 0.2
    may_end.set()
    for thread in threads:
        thread.join()
    # Exactly the amount taken has been returned.
    slot._patience = HANG
    most.clear()
    may_end.clear()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: most == [1])
    time.sleep(0.05)
    assert most == [1]
    may_end.set()
    for thread in threads:
        thread.join()


def test_long_holder_blocks_only_one_waiter():
    slot, may_end = ComputeSlot(patience=HANG), threading.Event()

    def stay() -> None:
        with slot:
            may_end.wait(HANG)

    thread = threading.Thread(target=stay)
    thread.start()
    eventually(lambda: slot._holder is not None)
    waited = []
    for patience in (0.3, HANG, HANG):
        slot._patience = patience
        began = time.monotonic()
        with slot:
            waited.append(time.monotonic() - began)
    may_end.set()
    thread.join()
    assert waited[0] >= 0.3
    assert max(waited) < PATIENCE
    assert slot._holder is None
