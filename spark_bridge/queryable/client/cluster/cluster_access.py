"""Access of a client to the hosts: known operators, requests that any host can answer, and repeated attempts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from backends.decoders import json_decoder
from spark_bridge.exceptions import ConnectionClosedError, HostUnavailableError
from spark_bridge.queryable.client.cluster.discovery import Discovery
from spark_bridge.queryable.client.cluster.known_operators import KnownOperator, KnownOperators, OperatorRef
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.exchange import KvStream
from spark_bridge.queryable.protocol.messages import DescribeReply, Request
from spark_bridge.queryable.routing.retries import Attempts, retrying, should_locate

T = TypeVar("T")


class ClusterAccess:
    """The way of ``QueryableStateClient`` and ``StateWatch`` to hosts. For any number of threads.

    ``timeout``: the seconds of a call that names none. ``on_moved`` is called when the location of an operator has
    perhaps proved wrong. A ``deadline`` is a time of ``time.monotonic``.
    """

    def __init__(
        self, discovery: Discovery, connections: KvConnections, timeout: float, on_moved: Callable[[], None]
    ) -> None:
        self.timeout = timeout
        self._discovery = discovery
        self._connections = connections
        self._on_moved = on_moved
        self._operators = KnownOperators(discovery.locate)

    def answer(
        self,
        what: str,
        ref: OperatorRef,
        timeout: float | None,
        ask: Callable[[KnownOperator, float], T],
        begun: float | None = None,
        failure: Exception | None = None,
    ) -> T:
        """Return the result of ``ask(known operator, deadline)``; repeat the call where that may help.

        ``what`` begins the message of a ``QueryTimeoutError``. ``begun`` is when a first attempt began, which has
        failed with ``failure``.
        """
        begun = time.monotonic() if begun is None else begun
        deadline = begun + (self.timeout if timeout is None else timeout)
        attempts = Attempts(what, deadline, had_answer=self._operators.had_answer(ref), begun=begun)
        return retrying(
            lambda: ask(self._operators.get(ref, deadline), deadline),
            attempts,
            relocate=lambda error: self.moved(ref, error),
            failure=failure,
        )

    def answer_of_any_host(self, what: str, request: Request, timeout: float | None) -> Any:
        """Return the answer of any one host; repeat the request where that may help."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        return retrying(
            lambda: self.ask_host(request, deadline),
            Attempts(what, deadline),
            relocate=lambda error: self._discovery.failed(),
        )

    def known(self, ref: OperatorRef, deadline: float) -> KnownOperator:
        """Return the known operator of that name; look it up if none is known."""
        return self._operators.get(ref, deadline)

    def moved(self, ref: OperatorRef, error: Exception) -> None:
        """Forget the location of an operator if ``error`` says that it may be wrong.

        Leave a proxy that does not answer.
        """
        if should_locate(error):
            self._operators.forget(ref)
            self._on_moved()
        if isinstance(error, ConnectionClosedError | HostUnavailableError | OSError):
            self._discovery.failed()

    def ask_host(self, request: Request, deadline: float) -> Any:
        """Return the answer of any one host to a request that every host can answer; an answer in JSON is decoded."""
        reply, body = self._connections.request(self._discovery.proxy(), request, deadline=deadline)
        return json_decoder(Any).decode(body) if isinstance(reply, DescribeReply) else reply

    def stream(self, request: Request, body: bytes, deadline: float) -> KvStream:
        """Return the rows of any one host. A caller that stops early must close the stream."""
        return self._connections.stream(self._discovery.proxy(), request, body, deadline)
