"""``KvStateClientProxy``: in every host, a server that answers for all hosts (Flink's class of that name)."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from backends.decoders import json_decoder
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError
from coordinator_actor.location_oracle import KvStateLocationOracle
from spark_bridge.exceptions import SparkBridgeError
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import DescribeReply, DescribeRequest
from spark_bridge.queryable.protocol.state_reads import StateReads
from spark_bridge.queryable.server.limits.request_limits import RequestLimits
from spark_bridge.queryable.server.proxy.forwarding_reads import ForwardingReads
from spark_bridge.queryable.server.proxy.location_cache import LocationCache
from spark_bridge.queryable.server.server import KvStateServer

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens.token_verifier import TokenVerifier

FORWARDED_SECONDS = 30.0
"""Another host may take this many seconds for an answer, or for the next rows of one."""
DESCRIBE_SECONDS = 5.0


def connections_to_hosts(token: str, tls: ssl.SSLContext | None = None) -> KvConnections:
    """Return the connections of a proxy to other hosts. ``tls`` is the context of a client."""
    return KvConnections(token, tls, FORWARDED_SECONDS)


class KvStateClientProxy(KvStateServer):
    """Answers queries of this host's state, and requests with ``forward`` for all hosts.

    ``reads`` returns what this host answers from; it is first called when something is asked. ``coordinator`` says
    where state is. ``hosts`` are the connections to other hosts, with the cluster's token (``connections_to_hosts``);
    the proxy closes them when it shuts down. The other arguments are those of ``KvStateServer``.
    """

    def __init__(
        self,
        reads: Callable[[], StateReads],
        coordinator: CoordinatorPort,
        tokens: TokenVerifier,
        hosts: KvConnections,
        *,
        ip: str,
        port: int = 0,
        limits: RequestLimits = RequestLimits(),  # noqa: B008 - frozen
        tls: ssl.SSLContext | None = None,
        host_id: str = "",
    ) -> None:
        self._hosts = hosts
        self._locations = LocationCache(coordinator)
        forwarding = ForwardingReads(reads, lambda: self.server_address, self._locations, self._hosts)
        super().__init__(forwarding, tokens, ip=ip, port=port, limits=limits, tls=tls, host_id=host_id)

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """Return who owns which partitions of a query, as far as this proxy knows; else None. From any thread.

        ``job_id`` is the id of the query.
        """
        return self._locations.get(job_id)

    def update_kv_state_location_oracle(self, job_id: str, oracle: KvStateLocationOracle | None) -> None:
        """Tell the proxy who owns which partitions of a query; None makes it forget. From any thread.

        The proxy fetches what it needs by itself, and again if it is old or proves wrong. This method is for callers
        that know better.
        """
        self._locations.update(job_id, oracle)

    def describe(self, request: DescribeRequest) -> dict[str, Any]:
        """See ``KvStateServer``; with ``forward`` the answer has all hosts of the operator's query, as ``hosts``."""
        if not request.forward or request.operator is None:
            return super().describe(request)
        location = self._reads.locate(request.operator, request.query)
        addresses = dict.fromkeys(owner.query_address for owner in location.owners)
        asked = DescribeRequest(request.operator, location.run_id)
        return {"hosts": self._described(addresses, asked)}

    def _described(self, addresses: Iterable[str], request: DescribeRequest) -> list[dict[str, Any]]:
        """Return the descriptions of hosts; for a host that does not answer, the reason."""
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
            answers.append(json_decoder(dict[str, Any]).decode(body) if type(reply) is DescribeReply else {})
        return answers

    def start(self) -> None:
        """See ``KvStateServer``."""
        self._locations.start()
        super().start()

    def shutdown(self) -> None:
        """See ``KvStateServer``."""
        self._locations.stop()
        super().shutdown()
        self._hosts.drop()
