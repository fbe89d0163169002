"""Scatter-gather: send one request to each of several hosts, then collect all answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.exchange import KvExchange
from spark_bridge.queryable.protocol.messages import At
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.routing.scattered_requests import ScatteredRequest

T = TypeVar("T")


class ScatterGather:
    """Send requests to hosts and collect the answers.

    Requests to ``local_address`` are answered by ``local`` in this process, without a network.
    """

    def __init__(self, connections: KvConnections, local_address: str, local: StateReads | None) -> None:
        self._connections = connections
        self._local_address = local_address
        self._local = local

    def answers(self, requests: Sequence[ScatteredRequest[T]], at: At, deadline: float) -> list[tuple[int, T]]:
        """Return version and answer of each request; ``deadline`` is a time of ``time.monotonic``.

        All requests are sent before any answer is read. If some fail, the other answers are read all the same, so that
        their connections stay usable; then the first failure is raised.
        """
        begun: list[KvExchange | None] = []
        answers: list[tuple[int, T]] = []
        failure: Exception | None = None
        try:
            for request in requests:
                exchange = None
                if self._local is None or request.address != self._local_address:
                    try:
                        exchange = request.send(self._connections, at, deadline)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failure = error
                        break
                begun.append(exchange)
            for request, exchange in zip(requests, begun, strict=False):
                try:
                    if exchange is not None:
                        answers.append(request.receive(exchange, deadline))
                    elif self._local is not None and failure is None:
                        answers.append(request.read(self._local, at))
                except Exception as error:  # noqa: BLE001 - raised below
                    failure = failure or error
        finally:
            for exchange in begun:
                if exchange is not None:
                    exchange.abandon()  # no effect on exchanges whose answer has been read
        if failure is not None:
            raise failure
        return answers
