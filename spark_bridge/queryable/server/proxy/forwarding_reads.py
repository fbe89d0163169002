"""``ForwardingReads``: answers for all hosts.

This host's partitions are read here; the owners are asked for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa

from coordinator_actor.exceptions import RetiredRunError
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import QueryTimeoutError
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import ChangesRequest, KeyRowsRequest, LookupRequest, ScanRequest
from spark_bridge.queryable.protocol.state_reads import StateAnswer, StateReads
from spark_bridge.queryable.routing.retries import FINAL_ERRORS, MOVED, Attempts, should_locate
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.server.proxy.location_cache import LocationCache

T = TypeVar("T")

MAX_RETRY_SECONDS = 1.0
"""When owners have moved, a request is repeated here for at most this many seconds. The client has more time, and waits
without taking room here.
"""


class ForwardingReads:
    """``StateReads`` of a proxy: answers requests with ``forward`` for all partitions, others for this host's.

    ``own`` returns what this host answers by itself, and ``address`` its own query address; both are called once, when
    something is asked. Requests to other hosts have no ``forward``, so no request goes further than one step.
    """

    def __init__(
        self,
        own: Callable[[], StateReads],
        address: Callable[[], str],
        locations: LocationCache,
        connections: KvConnections,
        *,
        patience: float = MAX_RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._find_own = own
        self._address = address
        self._locations = locations
        self._connections = connections
        self._patience = patience
        self._clock = clock
        self._sleep = sleep

    @cached_property
    def own(self) -> StateReads:
        """The answers of this host."""
        return self._find_own()

    @cached_property
    def router(self) -> StateRouter:
        """The router that asks the other hosts."""
        return StateRouter(self._connections, local=(self._address(), self.own), clock=self._clock, sleep=self._sleep)

    # -- for all hosts -------------------------------------------------------------------------

    def lookup(self, request: LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        """See ``StateReads``."""
        if not request.forward:
            return self.own.lookup(request, keys)
        return self._answer(
            request,
            lambda location, deadline: self.router.lookup(location, request.column_family, keys, request.at, deadline),
        )

    def lookup_one(self, request: LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        """See ``StateReads``."""
        if not request.forward:
            return self.own.lookup_one(request, key)
        return self._answer(
            request,
            lambda location, deadline: self.router.lookup_one(
                location, request.column_family, key, request.at, deadline
            ),
        )

    def key_rows(self, request: KeyRowsRequest, keys: pa.BinaryArray) -> StateAnswer:
        """See ``StateReads``."""
        if not request.forward:
            return self.own.key_rows(request, keys)
        return _state_answer(
            self._answer(
                request,
                lambda location, deadline: self.router.key_rows(location, request, keys, deadline),
                with_schema=True,
            )
        )

    def scan(self, request: ScanRequest) -> StateAnswer:
        """See ``StateReads``.

        The rows of ``partitions`` come in their order; without ``partitions`` the hosts' rows come as they arrive.
        """
        if not request.forward:
            return self.own.scan(request)

        def relocate(error: Exception) -> OperatorLocation:
            self._moved(request.run_id, error)
            try:
                return self._locations.location(request.run_id, request.operator, with_schema=True)
            except FINAL_ERRORS as gone:
                raise RetiredRunError(str(gone)) from gone  # the client must find out which run is next

        in_order = request.partitions is not None
        return _state_answer(
            self._answer(
                request,
                lambda location, deadline: self.router.scan(location, request, deadline, relocate, in_order=in_order),
                with_schema=True,
            )
        )

    def count(self, request: ScanRequest) -> tuple[int, int]:
        """See ``StateReads``."""
        if not request.forward:
            return self.own.count(request)
        return self._answer(request, lambda location, deadline: self.router.count(location, request, deadline))

    # -- requests that any host can answer -----------------------------------------------------

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        """See ``StateReads``."""
        return self.own.locate(operator, query)

    def changes(self, request: ChangesRequest, keys: pa.BinaryArray | None) -> StateAnswer:
        """See ``StateReads``."""
        return self.own.changes(request, keys)

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        """See ``StateReads``."""
        return self.own.await_completed(run_id, after, seconds)

    def lag_ms(self, run_id: str) -> int:
        """See ``StateReads``. Every host of the cluster knows it."""
        return self.own.lag_ms(run_id)

    def operators(self) -> list[dict[str, Any]]:
        """See ``StateReads``."""
        return self.own.operators()

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        """See ``StateReads``."""
        return self.own.describe(operator, query)

    # -- attempts ------------------------------------------------------------------------------

    def _answer(
        self,
        request: LookupRequest | KeyRowsRequest | ScanRequest,
        ask: Callable[[OperatorLocation, float], T],
        *,
        with_schema: bool = False,
    ) -> T:
        """Return the result of ``ask``; repeat the call for a little while if partitions have moved.

        Raises what the owners raise.
        """
        run_id, operator = request.run_id, request.operator
        begun = self._clock()
        attempts: Attempts | None = None
        while True:
            try:
                location = self._locations.location(run_id, operator, with_schema=with_schema)
                return ask(location, begun + self._connections.timeout)
            except (RetiredRunError, *FINAL_ERRORS) as error:
                self._moved(run_id, error)
                raise  # the client has named a run, and must find out which one is next
            except MOVED as error:
                attempts = attempts or Attempts("", begun + self._patience, clock=self._clock)
                try:
                    delay = attempts.delay(error)
                except QueryTimeoutError:
                    raise error from None  # the client has more time
                self._moved(run_id, error)
            self._sleep(delay)

    def _moved(self, run_id: str, error: Exception) -> None:
        if should_locate(error):
            self._locations.refresh(run_id)


def _state_answer(answer: StateAnswer) -> StateAnswer:
    return StateAnswer(answer.version, answer.schema, answer.batches)
