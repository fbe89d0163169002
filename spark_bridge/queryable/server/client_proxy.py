"""``KvStateClientProxy``: in every host, a server that answers for all hosts (Flink's class of that name, which is a ``KvStateServer`` too)."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from backends.decoders import json_decoder
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.location_oracle import KvStateLocationOracle
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import Describe, Described
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.server.forwarding_reads import ForwardingReads
from spark_bridge.queryable.server.location_cache import LocationCache, OracleSource
from spark_bridge.queryable.server.request_limits import RequestLimits
from spark_bridge.queryable.server.request_statistics import RequestStatistics
from spark_bridge.queryable.server.server import KvStateServer

if TYPE_CHECKING:
    from spark_bridge.queryable.server.token_verifier import TokenVerifier

ANSWER_SECONDS = 30.0
"""How long another host may take for an answer, or for the next rows of one."""
DESCRIBE_SECONDS = 5.0


class KvStateClientProxy(KvStateServer):
    """Answers queries of this host's state, and those that have ``forward`` for all hosts.

    ``reads`` gives what this host answers from: it is first called when something is asked. ``coordinator`` says where state is, ``token``
    is the cluster's, for the other hosts, and ``client_tls`` the context of a client of theirs. The rest as for ``KvStateServer``.
    """

    def __init__(
        self,
        reads: Callable[[], StateReads],
        coordinator: OracleSource,
        tokens: TokenVerifier,
        *,
        token: str,
        ip: str,
        port: int = 0,
        limits: RequestLimits = RequestLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        statistics: RequestStatistics | None = None,
        host_id: str = "",
        answer_seconds: float = ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosts = KvConnections(token, client_tls, answer_seconds)
        self._oracles = LocationCache(coordinator, clock)
        forwarding = ForwardingReads(reads, lambda: self.server_address, self._oracles, self._hosts)
        super().__init__(
            forwarding, tokens, ip=ip, port=port, limits=limits, tls=tls, statistics=statistics, host_id=host_id
        )

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """Who owns what of a query (``job_id`` is its query id), as this proxy knows it; None if it knows nothing. From any thread."""
        return self._oracles.get(job_id)

    def update_kv_state_location_oracle(self, job_id: str, oracle: KvStateLocationOracle | None) -> None:
        """Tell the proxy who owns what of a query; None makes it forget. From any thread.

        It fetches what it needs by itself, and again what is old or proves wrong: this is for who knows better.
        """
        self._oracles.update(job_id, oracle)

    def describe(self, request: Describe) -> dict[str, Any]:
        """See ``KvStateServer``; with ``forward`` that of all hosts of the operator's query, as ``hosts``."""
        if not request.forward or request.operator is None:
            return super().describe(request)
        location = self._reads.locate(request.operator, request.query)
        addresses = dict.fromkeys(owner.query_address for owner in location.owners)
        asked = Describe(request.operator, location.run_id)
        return {"hosts": self._described(addresses, asked)}

    def _described(self, addresses: Iterable[str], request: Describe) -> list[dict[str, Any]]:
        """What hosts say of themselves; of one that does not answer, why."""
        deadline = time.monotonic() + DESCRIBE_SECONDS
        answers: list[dict[str, Any]] = []
        begun = []
        for address in addresses:
            if address == self.server_address:
                answers.append(super().describe(request))
                continue
            try:
                begun.append(self._hosts.begin(address, request, b"", deadline))
            except (SparkBridgeError, OSError) as error:
                answers.append({"query_address": address, "failure": str(error)})
        for exchange in begun:
            try:
                reply, body = exchange.finish()
            except (SparkBridgeError, CoordinatorError, OSError) as error:
                answers.append({"query_address": exchange.address, "failure": str(error)})
                continue
            answers.append(json_decoder(dict[str, Any]).decode(body) if type(reply) is Described else {})
        return answers

    def start(self) -> None:
        """See ``KvStateServer``."""
        self._oracles.start()
        super().start()

    def shutdown(self) -> None:
        """See ``KvStateServer``."""
        self._oracles.stop()
        super().shutdown()
        self._hosts.drop()
