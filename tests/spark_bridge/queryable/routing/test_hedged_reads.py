"""Hedged reads: how many second requests go out, and when. The time of most tests passes only when it is waited for."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from coordinator_actor.messages import OperatorLocation, OperatorSpec
from spark_bridge.exceptions import (
    ConnectionClosedError,
    HostUnavailableError,
    NotOwnerError,
    RequestError,
    StateVersionError,
)
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.protocol import At, LookupReply, pack_one
from spark_bridge.queryable.routing.hedged import HedgedReads
from spark_bridge.queryable.routing.scatter_gather import ScatteredKey
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.queryable.memory_reads import TOKEN, MemoryReads, serving
from tests.spark_bridge.queryable.routing.router_world import soon
from tests.spark_bridge.queryable.routing.slow_hosts import hear, said, scripted

LOCATION = OperatorLocation("q", "run", "q", OperatorSpec("totals", 1, ""), 16, 7, ())
STALE = At(staleness=1)
OWNER, COPY = "owner:1", "copy:1"
Delay = float | Exception


class _Exchange:
    def __init__(self, hosts: SlowHosts, address: str, delay: Delay) -> None:
        self.address, self._failure = address, delay if isinstance(delay, Exception) else None
        self.answers_at = hosts.now + (0.001 if isinstance(delay, Exception) else delay)
        self.is_abandoned = False

    def finish(self) -> tuple[LookupReply, bytes]:
        if self._failure is not None:
            raise self._failure
        return LookupReply(7), pack_one(self.address.encode())

    def abandon(self) -> None:
        self.is_abandoned = True

    def close(self) -> None:
        pass


class SlowHosts:
    """Connections to hosts that answer after their delays, or fail. ``now`` is the time of their clock."""

    def __init__(self, delay_of: Callable[[str], Delay]) -> None:
        self.delay_of = delay_of
        self.now = 1000.0
        self.asked: list[str] = []
        self.limits: list[tuple[float, float]] = []
        self.begun: list[_Exchange] = []
        connections: Any = self
        wait: Any = self._wait
        self.reads = HedgedReads(connections, "", None, clock=lambda: self.now, wait=wait)

    def begin(self, address: str, header: Any, body: bytes, deadline: float, connect_seconds: float) -> _Exchange:
        self.asked.append(address)
        self.limits.append((deadline - self.now, connect_seconds))
        self.begun.append(_Exchange(self, address, self.delay_of(address)))
        return self.begun[-1]

    def _wait(self, exchanges: Sequence[_Exchange], seconds: float) -> list[_Exchange]:
        first = min(exchange.answers_at for exchange in exchanges)
        self.now = min(max(first, self.now), self.now + max(0.0, seconds))
        return [exchange for exchange in exchanges if exchange.answers_at <= self.now]

    def get(self, owners: Sequence[str] = (OWNER,), num_keys: int = 1) -> list[bytes | None]:
        """Ask owners at once, whose copies are at ``COPY``; return the addresses that have answered."""
        keys = [ScatteredKey(owner, b"\0\0k", LOCATION, "default", False, (COPY,), num_keys) for owner in owners]
        answers = self.reads.answers([key.alternatives() for key in keys], STALE, self.now + 10.0)
        return [address for _, address in answers]


def test_hosts_that_are_all_slow_are_asked_once() -> None:
    turns = iter([*[0.03] * 19, 0.045] * 3)
    hosts = SlowHosts(lambda address: 0.03 if address == COPY else next(turns))
    for _ in range(60):
        hosts.get()
    assert hosts.asked == [OWNER, COPY, *[OWNER] * 59], "the delay follows the answers"


def test_hedges_have_a_budget() -> None:
    hosts = SlowHosts(lambda address: 0.03)
    hosts.get([f"owner:{i}" for i in range(40)])
    assert hosts.asked.count(COPY) == 5

    turns = iter([0.001, 0.001, 0.15] * 1000)
    hosts = SlowHosts(lambda address: 0.1 if address == COPY else next(turns))
    for _ in range(900):
        hosts.get()
    assert 10 < hosts.asked.count(COPY) <= 95


def test_hosts_that_all_take_seconds_are_not_asked_twice() -> None:
    hosts = SlowHosts(lambda address: 0.6)
    for _ in range(20):
        hosts.get()
    hosts.asked.clear()
    hosts.reads._budget = 0.0
    hosts.delay_of = lambda address: 1.5
    for _ in range(5):
        hosts.reads._budget = 0.0
        hosts.get()
    assert hosts.asked == [OWNER] * 5


def test_hosts_that_hang_are_left_without_a_budget() -> None:
    hosts = SlowHosts(lambda address: 0.001 if address == COPY else HANG)
    begun = hosts.now
    assert hosts.get([f"owner:{i}" for i in range(40)]) == [COPY.encode()] * 40
    assert hosts.now - begun < 0.5


def test_a_host_that_hangs_is_left_within_a_second_though_answers_take_long() -> None:
    hosts = SlowHosts(lambda address: 0.15)
    for _ in range(5):
        hosts.get()
    hosts.reads._budget = 0.0
    hosts.delay_of = lambda address: 0.15 if address == COPY else HANG
    begun = hosts.now
    assert hosts.get() == [COPY.encode()]
    assert 0.9 < hosts.now - begun < 1.2


def test_a_request_for_many_keys_is_given_more_time() -> None:
    hosts = SlowHosts(lambda address: 0.2)
    hosts.get(num_keys=200_000)
    assert hosts.asked == [OWNER]
    hosts.get()
    assert hosts.asked == [OWNER, OWNER, COPY], "answers to many keys tell nothing of those to one"


def test_a_host_is_asked_last_only_if_a_copy_was_faster() -> None:
    delays: dict[str, Delay] = {OWNER: 0.012, COPY: 0.05}
    hosts = SlowHosts(delays.__getitem__)
    assert hosts.get() + hosts.get() == [OWNER.encode()] * 2
    assert hosts.asked[:3] == [OWNER, COPY, OWNER]
    delays.update({OWNER: 1.0, COPY: 0.001})
    assert hosts.get() + hosts.get() == [COPY.encode()] * 2
    assert hosts.asked[-3:] == [OWNER, COPY, COPY]
    hosts.now += 2.1
    delays[OWNER] = 0.001
    assert hosts.get() == [OWNER.encode()]


def test_the_loser_is_abandoned_and_not_closed() -> None:
    hosts = SlowHosts(lambda address: 0.001 if address == COPY else HANG)
    hosts.get()
    assert [exchange.is_abandoned for exchange in hosts.begun] == [True, False]


def test_hosts_that_are_known_to_be_slow_are_asked_after_the_others() -> None:
    silent: list[str] = ["slow:1", COPY]
    hosts = SlowHosts(lambda address: HostUnavailableError("It is silent.") if address in silent else 0.001)
    with pytest.raises(HostUnavailableError):
        hosts.get(["slow:1"])
    hosts.asked.clear()
    silent.clear()
    hosts.get(["slow:1", OWNER])
    assert hosts.asked == [OWNER, "slow:1"]


def test_only_connecting_is_limited_while_others_may_answer() -> None:
    hosts = SlowHosts(lambda address: NotOwnerError("It has no copy."))
    with pytest.raises(NotOwnerError):
        hosts.get()
    assert hosts.asked == [OWNER, COPY, OWNER, COPY]
    assert [seconds > 9 for seconds, _ in hosts.limits] == [True] * 4
    assert [seconds for _, seconds in hosts.limits] == [0.25, 0.25, float("inf"), 0.25]


@pytest.mark.parametrize("is_known_to_hang", [False, True])
def test_a_copy_that_was_too_old_is_asked_again_while_the_owner_hangs(is_known_to_hang: bool) -> None:
    refusals: list[Delay] = [NotOwnerError("It is too old.")] * 3
    hosts = SlowHosts(lambda address: HANG if address == OWNER else refusals.pop() if refusals else 0.001)
    if is_known_to_hang:
        hosts.reads._slow_until[OWNER] = hosts.now + 2
    hosts.reads._budget = 1.0
    begun = hosts.now
    assert hosts.get() == [COPY.encode()]
    assert 0.29 < hosts.now - begun < 0.8, "after 0.1 and 0.2 s, and 0.4 s if the first refusal came later"
    assert sorted(hosts.asked) == [COPY] * 4 + [OWNER]


def test_a_copy_that_stays_too_old_is_not_asked_all_the_time() -> None:
    hosts = SlowHosts(lambda address: HANG if address == OWNER else NotOwnerError("It is too old."))
    with pytest.raises(HostUnavailableError):
        hosts.get()
    assert 10 <= hosts.asked.count(COPY) <= 15, "in ten seconds"


@pytest.mark.parametrize("error", [RequestError("A null key."), StateVersionError("Not completed.")])
def test_errors_that_no_other_host_can_help_are_raised_at_once(error: Exception) -> None:
    failures: dict[str, Delay] = {OWNER: error, COPY: 0.001}
    hosts = SlowHosts(failures.__getitem__)
    with pytest.raises(type(error)):
        hosts.get()
    assert hosts.asked == [OWNER]
    failures[OWNER] = 0.001
    assert hosts.get() == [OWNER.encode()], "the host is not slow"


def test_only_hosts_that_are_unavailable_are_asked_last() -> None:
    failures: dict[str, Delay] = {OWNER: NotOwnerError("It has moved."), COPY: 0.001}
    hosts = SlowHosts(failures.__getitem__)
    assert hosts.get() == [COPY.encode()]
    failures[OWNER] = ConnectionClosedError("It is gone.")
    assert hosts.get() == [COPY.encode()]
    assert hosts.asked == [OWNER, COPY, OWNER, COPY]
    failures[OWNER] = 0.001
    assert hosts.get() == [COPY.encode()]


def test_an_answer_that_stalls_after_its_first_bytes_is_overtaken() -> None:
    answer, answered = said(LookupReply(7), pack_one(bytes(100_000))), threading.Event()

    def stalls(peer: socket.socket) -> None:
        hear(peer)
        peer.sendall(answer[:50_000])
        assert answered.wait(PATIENCE), "the client waits for the rest"

    with (
        scripted(stalls) as owner,
        serving(MemoryReads({b"\0\0k": b"v"})) as (server, _),
        KvConnections(TOKEN) as connections,
    ):
        key = ScatteredKey(owner, b"\0\0k", LOCATION, "default", False, (server.server_address,))
        try:
            answers = HedgedReads(connections, "", None).answers([key.alternatives()], STALE, soon())
        finally:
            answered.set()
    assert answers == [(7, b"v")]
