"""Reads that any copy of a partition may answer: the owner is asked first, and a copy as well if it does not answer.

After "The Tail at Scale" (Dean and Barroso): a second request that goes out late costs little, and cuts off the waits
for a host that commits, stalls or is lost.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from msgspec.structs import replace

from backends.host_memory import BoundedDict
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.connections import KvConnections, KvExchange
from spark_bridge.queryable.routing.scatter_gather import ScatteredRequest

T = TypeVar("T")

HEDGE_SECONDS = 0.01
"""A copy is asked as well if the first host has not answered after this many seconds."""
COPY_CONNECT_SECONDS = 0.25
"""Connecting to one of several hosts that may answer takes at most this many seconds."""
SLOW_SECONDS = 2.0
"""A host that was slow or failed is asked last for this many seconds."""
MAX_SLOW = 4096

WaitForAny = Callable[[Sequence[KvExchange], float], Sequence[KvExchange]]
"""Waits until some of the exchanges have an answer, or so many seconds; returns those that have one."""


def wait_for_any(exchanges: Sequence[KvExchange], seconds: float) -> Sequence[KvExchange]:
    """Wait for the first bytes of an answer on any of the connections."""
    ready = [exchange for exchange in exchanges if exchange.has_buffered()]
    if ready:
        return ready
    by_fileno = {exchange.fileno(): exchange for exchange in exchanges}
    poll = select.poll()
    for fileno in by_fileno:
        poll.register(fileno, select.POLLIN)
    return [by_fileno[fileno] for fileno, _ in poll.poll(max(0.0, seconds) * 1000)]


@dataclass
class _Race(Generic[T]):
    """The attempts at one answer: those to make, those under way, and the one to make if all have failed."""

    attempts: list[tuple[ScatteredRequest[T], protocol.At]]
    last: tuple[ScatteredRequest[T], protocol.At] | None
    under_way: dict[KvExchange, ScatteredRequest[T]] = field(default_factory=dict)
    hedge_at: float = 0.0
    answer: tuple[int, T] | None = None
    failure: Exception | None = None


class HedgedReads:
    """Get each answer from the first host that has it. Thread-safe.

    Requests to ``local_address`` are answered by ``local`` in this process.
    """

    def __init__(
        self,
        connections: KvConnections,
        local_address: str,
        local: protocol.StateReads | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: WaitForAny = wait_for_any,
    ) -> None:
        self._connections = connections
        self._local_address = local_address
        self._local = local
        self._clock = clock
        self._wait = wait
        self._slow_until: BoundedDict[str, float] = BoundedDict(MAX_SLOW)

    def answers(
        self, requests: Sequence[Sequence[ScatteredRequest[T]]], at: protocol.At, deadline: float
    ) -> list[tuple[int, T]]:
        """Return version and answer of each request, which is given to the owner first, and then to its copies.

        If none may answer at this staleness, the owner is asked for its last completed version. Raises the last error
        of a request that no host has answered.
        """
        races = [_Race(self._attempts(hosts, at), (hosts[0], replace(at, staleness=0))) for hosts in requests]
        try:
            while pending := [race for race in races if race.answer is None]:
                now = self._clock()
                for race in pending:
                    if not race.under_way or (now >= race.hedge_at and race.attempts):
                        self._begin_next(race, deadline)
                exchanges = [exchange for race in pending for exchange in race.under_way]
                if exchanges and all(race.answer is None for race in pending):
                    hedges = [race.hedge_at for race in pending if race.attempts]
                    ready = set(self._wait(exchanges, min([deadline, *hedges]) - self._clock()))
                    for race in pending:
                        self._collect(race, ready, deadline)
        finally:
            for race in races:
                for exchange in race.under_way:
                    exchange.close()
        return [race.answer for race in races if race.answer is not None]

    def _attempts(
        self, hosts: Sequence[ScatteredRequest[T]], at: protocol.At
    ) -> list[tuple[ScatteredRequest[T], protocol.At]]:
        now = self._clock()
        ordered = sorted(hosts, key=lambda request: self._slow_until.get(request.address, 0.0) > now)
        return [(request, at) for request in ordered]

    def _begin_next(self, race: _Race[T], deadline: float) -> None:
        """Send the request to the next host. Raises the last failure if there is none, and no answer is awaited."""
        for exchange in race.under_way:
            self._note_slow(exchange.address)
        if self._clock() >= deadline or (not race.attempts and race.last is None):
            raise race.failure or exceptions.HostUnavailableError(
                f"None of {', '.join(exchange.address for exchange in race.under_way)} answered in time."
            )
        if race.attempts:
            request, at = race.attempts.pop(0)
        else:
            assert race.last is not None
            (request, at), race.last = race.last, None
        race.hedge_at = self._clock() + HEDGE_SECONDS
        try:
            if self._local is not None and request.address == self._local_address:
                race.answer = request.read(self._local, at)
                return
            connect_by = min(deadline, self._clock() + COPY_CONNECT_SECONDS) if race.last is not None else deadline
            exchange = request.send(self._connections, at, connect_by)
            exchange.wait_until(deadline)
            race.under_way[exchange] = request
        except Exception as error:  # noqa: BLE001 - raised if no other host answers
            self._failed(race, request.address, error)

    def _collect(self, race: _Race[T], ready: set[KvExchange], deadline: float) -> None:
        for exchange in [exchange for exchange in race.under_way if exchange in ready]:
            request = race.under_way.pop(exchange)
            try:
                race.answer = request.receive(exchange, deadline)
                return
            except Exception as error:  # noqa: BLE001 - raised if no other host answers
                self._failed(race, request.address, error)
            finally:
                exchange.close()  # no effect if the answer has been read
        if race.under_way and self._clock() >= deadline:
            self._begin_next(race, deadline)

    def _failed(self, race: _Race[T], address: str, error: Exception) -> None:
        race.failure = error
        if not isinstance(error, exceptions.NotOwnerError):
            self._note_slow(address)

    def _note_slow(self, address: str) -> None:
        self._slow_until.pop(address, None)
        self._slow_until[address] = self._clock() + SLOW_SECONDS
