"""Reads that any copy of a partition may answer: the owner is asked first, and a copy as well if it does not answer.

After "The Tail at Scale" (Dean and Barroso): a second request that goes out late costs little, and cuts off the waits
for a host that commits, stalls or is lost. The delay follows the time that answers take, and hedges have a budget: so a
cluster whose hosts are all slow is not asked twice as much.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Generic, TypeVar

from msgspec.structs import replace

from backends.host_memory import BoundedDict
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.connections import KvConnections, KvExchange
from spark_bridge.queryable.routing.scatter_gather import FINAL_ERRORS, PERMANENT, ScatteredRequest

T = TypeVar("T")

HEDGE_SECONDS = 0.01
"""A copy is asked as well if the first host has not answered after this many seconds, or later (``AnswerTimes``)."""
SECONDS_PER_KEY = 2e-6
"""As long as no answer for about as many keys has come, each key is expected to take so long."""
HEDGE_SHARE = 0.1
"""At most so many hedges go out per request, and ``HEDGE_BURST`` more."""
HEDGE_BURST = 5.0
HEDGE_ANYWAY, HEDGE_ANYWAY_SECONDS, LEAST_HEDGE_ANYWAY = 20, 1.0, 3
"""A request needs no budget after so many times the delay, or so many seconds if that is sooner, but not before the
least number of delays: its host hangs.
"""
COPY_AGAIN_SECONDS, MAX_COPY_AGAIN_SECONDS = 0.1, 1.0
"""A copy that was too old is asked again after so many seconds, then after twice as many, while no host answers."""
COPY_CONNECT_SECONDS = 0.25
"""Connecting to one of several hosts that may answer takes at most this many seconds."""
SLOW_SECONDS = 2.0
"""A host that was slower than a copy, or could not be reached, is asked last for this many seconds."""
MAX_SLOW = 4096
MARKS_SLOW = (exceptions.ConnectionClosedError, exceptions.HostUnavailableError, OSError)
"""Errors of a host that is asked last from then on."""
HOPELESS = (
    *PERMANENT,
    *FINAL_ERRORS,
    exceptions.StateVersionError,
    exceptions.UnknownKvStateIdError,
    ValueError,  # RequestError and the like: the request is wrong
)
"""Errors that every host answers to a request."""

WaitForAny = Callable[[Sequence[KvExchange], float], Sequence[KvExchange]]
"""Waits until some of the exchanges have an answer, or so many seconds; returns those that have one."""


def wait_for_any(exchanges: Sequence[KvExchange], seconds: float) -> Sequence[KvExchange]:
    """Wait until the whole answer of an exchange, or of several, has come."""
    until = time.monotonic() + seconds
    while True:
        by_fileno = {exchange.fileno(): exchange for exchange in exchanges}
        poll = select.poll()
        for fileno in by_fileno:
            poll.register(fileno, select.POLLIN)
        events = poll.poll(max(0.0, until - time.monotonic()) * 1000)
        ready = [by_fileno[fileno] for fileno, _ in events if by_fileno[fileno].has_answer()]
        if ready or not events:
            return ready


class AnswerTimes:
    """How long answers take: the mean, and how far they are from it, as TCP estimates round trips (RFC 6298).

    Requests for 1, 2 to 3, 4 to 7, ... keys are apart. Thread-safe, as a lost update does no harm.
    """

    def __init__(self) -> None:
        self._estimates: dict[int, tuple[float, float]] = {}

    def note(self, num_keys: int, seconds: float) -> None:
        size = num_keys.bit_length()
        mean, deviation = self._estimates.get(size, (seconds, seconds / 2))
        deviation += (abs(seconds - mean) - deviation) / 4
        self._estimates[size] = (mean + (seconds - mean) / 8, deviation)

    def hedge_delay(self, num_keys: int) -> float:
        """Return after how many seconds an answer is late."""
        estimate = self._estimates.get(num_keys.bit_length())
        if estimate is None:
            return HEDGE_SECONDS + num_keys * SECONDS_PER_KEY
        mean, deviation = estimate
        return max(HEDGE_SECONDS, 2 * mean, mean + 4 * deviation)


@dataclass
class _Race(Generic[T]):
    """The attempts at one answer: the requests to send, and those under way, in order, with the times of sending.

    ``last_resort`` is sent to the owner if all have failed. A hedge is sent at ``hedge_at`` if there is budget for it,
    and at ``hedge_anyway_at`` else. Copies that have refused a request may answer a moment later.
    """

    requests: list[ScatteredRequest[T]]
    last_resort: ScatteredRequest[T] | None
    owner: str
    refused: list[ScatteredRequest[T]] = field(default_factory=list)
    refused_seconds: float = COPY_AGAIN_SECONDS
    under_way: dict[KvExchange, tuple[ScatteredRequest[T], float]] = field(default_factory=dict)
    hedge_at: float = 0.0
    hedge_anyway_at: float = 0.0
    answer: tuple[int, T] | None = None
    failure: Exception | None = None


@dataclass(eq=False, repr=False)
class HedgedReads:
    """Gets each answer from the first host that has it; ``local`` answers for ``local_address``. Thread-safe."""

    _connections: KvConnections
    _local_address: str
    _local: protocol.StateReads | None
    clock: Callable[[], float] = time.monotonic
    wait: WaitForAny = wait_for_any

    def __post_init__(self) -> None:
        self._slow_until: BoundedDict[str, float] = BoundedDict(MAX_SLOW)
        self._times = AnswerTimes()
        self._budget = HEDGE_BURST  # without a lock: a lost update costs a hedge or saves one

    def answers(
        self, requests: Sequence[Sequence[ScatteredRequest[T]]], at: protocol.At, deadline: float
    ) -> list[tuple[int, T]]:
        """Return version and answer of each request, which is given to the owner first, and then to its copies.

        If none may answer at this staleness, the owner is asked for its last completed version. Raises the last error
        of a request that no host has answered, and errors that no other host can help at once.
        """
        self._budget = min(HEDGE_BURST, self._budget + HEDGE_SHARE * len(requests))
        races = [_Race(sorted(hosts, key=self.is_slow), hosts[0], hosts[0].address) for hosts in requests]
        races_by_speed = sorted(races, key=lambda race: self.is_slow(race.requests[0]))
        try:
            while pending := [race for race in races_by_speed if race.answer is None]:
                for race in pending:
                    if not race.under_way or self._may_hedge(race):
                        self._send_next(race, at, deadline)
                pending = [race for race in pending if race.answer is None]
                for race in pending:
                    if race.under_way and race.refused and not race.requests:
                        race.requests, race.refused = race.refused, []
                        race.hedge_at = race.hedge_anyway_at = self.clock() + race.refused_seconds
                        race.refused_seconds = min(2 * race.refused_seconds, MAX_COPY_AGAIN_SECONDS)
                exchanges = [exchange for race in pending for exchange in race.under_way]
                if exchanges:
                    hedges = [race.hedge_at for race in pending if race.requests]
                    ready = set(self.wait(exchanges, min([deadline, *hedges]) - self.clock()))
                    for race in pending:
                        self._collect(race, ready, deadline)
        finally:
            for race in races:
                for exchange in race.under_way:
                    exchange.abandon()
        return [race.answer for race in races if race.answer is not None]

    def is_slow(self, request: ScatteredRequest[T]) -> bool:
        """Return whether the host of a request was slower than a copy, or could not be reached, a moment ago."""
        return bool(self._slow_until) and self._slow_until.get(request.address, 0.0) > self.clock()

    def _may_hedge(self, race: _Race[T]) -> bool:
        now = self.clock()
        if not race.requests or now < race.hedge_at:
            return False
        if now < race.hedge_anyway_at:
            if self._budget < 1:
                race.hedge_at = min(now + HEDGE_SECONDS, race.hedge_anyway_at)
                return False
            self._budget -= 1
        return True

    def _send_next(self, race: _Race[T], at: protocol.At, deadline: float) -> None:
        """Send the request to the next host. Raises the last failure if there is none."""
        connect_seconds = COPY_CONNECT_SECONDS
        if race.requests:
            request = race.requests.pop(0)
        elif race.last_resort is not None:
            request, race.last_resort = race.last_resort, None
            at, connect_seconds = replace(at, staleness=0), math.inf
        else:
            assert race.failure is not None
            raise race.failure
        try:
            if self._local is not None and request.address == self._local_address:
                race.answer = request.read(self._local, at)
                self._note_slow(race.under_way)
                return
            exchange = self._connections.begin(request.address, *request.message(at), deadline, connect_seconds)
        except Exception as error:  # noqa: BLE001 - raised if no other host answers
            self._failed(race, request, error)
            return
        now = self.clock()
        race.under_way[exchange] = request, now
        delay = self._times.hedge_delay(request.num_keys)
        race.hedge_at = now + delay
        race.hedge_anyway_at = now + max(LEAST_HEDGE_ANYWAY * delay, min(HEDGE_ANYWAY * delay, HEDGE_ANYWAY_SECONDS))

    def _collect(self, race: _Race[T], ready: set[KvExchange], deadline: float) -> None:
        for exchange in [exchange for exchange in race.under_way if exchange in ready]:
            overtaken = list(takewhile(lambda earlier: earlier is not exchange, race.under_way))  # noqa: B023
            request, sent_at = race.under_way.pop(exchange)
            try:
                race.answer = request.receive(exchange)
            except Exception as error:  # noqa: BLE001 - raised if no other host answers
                self._failed(race, request, error)
            else:
                self._times.note(request.num_keys, self.clock() - sent_at)
                self._note_slow(overtaken)
                return
            finally:
                exchange.close()  # no effect if the answer has been read
        if race.under_way and self.clock() >= deadline:
            self._note_slow(race.under_way)
            silent = ", ".join(exchange.address for exchange in race.under_way)
            raise exceptions.HostUnavailableError(f"{silent} did not answer in time.") from race.failure

    def _failed(self, race: _Race[T], request: ScatteredRequest[T], error: Exception) -> None:
        if isinstance(error, HOPELESS):
            raise error
        race.failure = error
        if isinstance(error, exceptions.NotOwnerError) and request.address != race.owner:
            race.refused.append(request)
        if isinstance(error, MARKS_SLOW):
            self._note_slow([request])

    def _note_slow(self, hosts: Iterable[KvExchange | ScatteredRequest[T]]) -> None:
        for host in hosts:
            self._slow_until.pop(host.address, None)
            self._slow_until[host.address] = self.clock() + SLOW_SECONDS
