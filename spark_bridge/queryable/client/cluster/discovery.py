"""Discovery: how a client finds coordinator and hosts, in the Ray cluster or through a proxy at a known address."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from backends.decoders import json_decoder
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import OperatorLocation
from spark_bridge.exceptions import (
    EnvironmentProblemError,
    HostUnavailableError,
    QueryableStateError,
    RequestError,
)
from spark_bridge.queryable.protocol.connections import KvConnections
from spark_bridge.queryable.protocol.messages import LocateOperatorRequest, LocateReply

ADDRESS_VARIABLE = "STATESTORE_ADDRESS"
TOKEN_VARIABLE = "STATESTORE_TOKEN"
SCHEME = "statestore://"
DISCOVERY_SECONDS = 5.0
"""The coordinator may take this many seconds for one answer; a caller with more time asks again."""


class Discovery(Protocol):
    """Finds operators and hosts. Every method raises errors that ``retries`` knows; times are of ``time.monotonic``."""

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        """Return where an operator's partitions are."""

    def proxy(self) -> str:
        """Return the address of a host that answers for all hosts; after ``failed`` it may be another host."""

    def failed(self) -> None:
        """Say that the proxy did not answer."""


class ProxyDiscovery:
    """Finds operators through one of several proxies, which is used until it fails.

    The next proxies are the given ones, then the hosts that proxies have named. So a client outlives the host whose
    address it was given: a restarted host has another port.
    """

    def __init__(self, addresses: Sequence[str], connections: KvConnections) -> None:
        self._given = list(addresses)
        self._named: list[str] = []
        self._current = self._given[0]
        self._connections = connections

    def proxy(self) -> str:
        """See ``Discovery``."""
        return self._current

    def failed(self) -> None:
        """See ``Discovery``."""
        known = list(dict.fromkeys([*self._given, *self._named]))
        at = known.index(self._current) if self._current in known else -1
        self._current = known[(at + 1) % len(known)]

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        """See ``Discovery``."""
        proxy = self._current
        reply, body = self._connections.request(proxy, LocateOperatorRequest(operator, query), deadline=deadline)
        if not isinstance(reply, LocateReply):
            raise QueryableStateError(f"{proxy} answered a question for a location by {type(reply).__name__}.")
        location = json_decoder(OperatorLocation).decode(body)
        self._named = addresses_in(location)
        return location


def addresses_in(location: OperatorLocation) -> list[str]:
    """Return the query addresses of the owners of an operator's partitions, each once."""
    return list(dict.fromkeys(owner.query_address for owner in location.owners if owner.query_address))


class CoordinatorDiscovery:
    """Finds operators through the coordinator, and hosts among the owners that it has named.

    ``coordinator`` takes ``DISCOVERY_SECONDS`` at most; ``within(seconds)`` returns one that takes fewer seconds.
    """

    def __init__(self, coordinator: CoordinatorPort, within: Callable[[float], CoordinatorPort] | None = None) -> None:
        self._coordinator = coordinator
        self._within = within
        self._addresses: list[str] = []

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        """See ``Discovery``."""
        left = deadline - time.monotonic()
        coordinator = self._coordinator
        if self._within is not None and left < DISCOVERY_SECONDS:
            if left <= 0:
                raise HostUnavailableError("There was no time left to ask the coordinator.")
            coordinator = self._within(left)
        location = coordinator.locate(operator, query)
        self._addresses = addresses_in(location) or self._addresses
        return location

    def proxy(self) -> str:
        """See ``Discovery``.

        Raises ``QueryableStateError`` if no query runs, because then there are no hosts to ask.
        """
        if not self._addresses:
            running = self._coordinator.operators()
            if not running:
                raise NoRunningQueryError("No query with state is running.")
            self.locate(running[0].operator.name, running[0].run_id, math.inf)
        addresses = self._addresses
        if not addresses:
            raise QueryableStateError("The hosts of the running queries have no addresses for query clients.")
        return addresses[0]

    def failed(self) -> None:
        """See ``Discovery``."""
        self._addresses = self._addresses[1:]


class NoRunningQueryError(QueryableStateError):
    """No query is running, so there are no hosts to ask."""


def addresses_of(address: str | Sequence[str]) -> list[str]:
    """Return the ``ip:port`` of one or several addresses, which may begin with ``statestore://``.

    Raises ``RequestError``.
    """
    given = address.split(",") if isinstance(address, str) else list(address)
    addresses = [a.strip().removeprefix(SCHEME).rstrip("/") for a in given]
    for plain in addresses:
        host, _, port = plain.rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise RequestError(
                f"address={plain!r} is not of the form ip:port or {SCHEME}ip:port: it is the query address of a "
                "host, which "
                "`statestore status` shows."
            )
    if not addresses:
        raise RequestError("address= is empty; give the query address of at least one host.")
    return addresses


def from_environment(
    address: str | Sequence[str] | None, token: str | None
) -> tuple[str | Sequence[str] | None, str | None]:
    """Return address and token; one that is not given comes from the environment, or is None."""
    return address or os.environ.get(ADDRESS_VARIABLE) or None, token or os.environ.get(TOKEN_VARIABLE) or None


def coordinator_in_cluster(namespace: str, coordinator_name: str, timeout: float) -> tuple[CoordinatorDiscovery, str]:
    """Return the coordinator of the Ray cluster, which this process joins if it has not joined yet, and a token.

    Raises ``EnvironmentProblemError`` without Ray or a cluster, ``HostUnavailableError`` without a coordinator.
    """
    try:
        import ray
    except ImportError as error:
        raise EnvironmentProblemError(
            "Without an address the coordinator is found by Ray, which is not installed here. Give address= and "
            "token=, or set "
            f"{ADDRESS_VARIABLE} and {TOKEN_VARIABLE}."
        ) from error
    from coordinator_actor.on_ray.ray_port import RayCoordinatorPort

    if not ray.is_initialized():
        try:
            ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level="WARNING")
        except (ConnectionError, ValueError) as error:
            raise EnvironmentProblemError(
                "No Ray cluster answers at the address that this machine has on record; set RAY_ADDRESS, or give "
                "address= and "
                f"token=. Ray says: {error}"
            ) from error
    token = RayCoordinatorPort(namespace, coordinator_name, timeout).token()
    port = RayCoordinatorPort(namespace, coordinator_name, min(timeout, DISCOVERY_SECONDS))
    return CoordinatorDiscovery(port, lambda seconds: RayCoordinatorPort(namespace, coordinator_name, seconds)), token
