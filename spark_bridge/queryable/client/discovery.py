"""Discovery: how a client finds coordinator and hosts, in the Ray cluster or through a proxy at a known address."""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from backends.decoders import json_decoder
from backends.encoding.operator_schema import OperatorSchema
from backends.host_memory import BoundedDict
from coordinator_actor.access_tokens import Scope
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import OperatorLocation
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.client.arguments import KeyCodec
from spark_bridge.queryable.client.state_views import StateView, state_view
from spark_bridge.queryable.connections import KvConnections, KvExchange
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scatter_gather import Attempts, retrying, should_locate
from spark_bridge.queryable.routing.scopes import ScopedOperators
from spark_bridge.transport.tls import TlsConf

ADDRESS_VARIABLE = "STATESTORE_ADDRESS"
TOKEN_VARIABLE = "STATESTORE_TOKEN"
SCHEME = "statestore://"
DISCOVERY_SECONDS = 5.0
"""The coordinator may take this many seconds for one answer; a caller with more time asks again."""


class Discovery(Protocol):
    """Finds operators and hosts. Every method raises errors that ``retries`` knows; times are of ``time.monotonic``."""

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        """Return the location of an operator's partitions."""

    def proxy(self) -> str:
        """Return the address of a host that answers for all hosts; after ``failed`` it may be another host."""

    def knows_proxy(self) -> bool:
        """Return whether ``proxy`` has an address without asking for it."""

    def failed(self) -> None:
        """Report that the proxy did not answer."""

    def note(self, addresses: Sequence[str]) -> None:
        """Note the addresses of hosts that an answer has named: the next proxies."""


LOCATE_AGAIN_SECONDS = 0.05
KEPT_WATERMARKS = 1000
"""The watermarks of versions that a client has read, which it can read as of their watermark again."""


class Watermarks:
    """The watermarks of the versions that a client has read."""

    def __init__(self, discovery: Discovery, router: StateRouter) -> None:
        self._discovery = discovery
        self._router = router
        self._of_versions: BoundedDict[tuple[str, int], int] = BoundedDict(KEPT_WATERMARKS)

    def version_at(self, target: KnownOperator, view: StateView, asked: protocol.At, deadline: float) -> protocol.At:
        """Return a version, by default the one that is completed now, as of its watermark.

        Raises ``StateVersionError`` for an earlier version that the client has not read as of its watermark, and
        ``StateTimeError`` if the version has no watermark.
        """
        run_id, version = target.location.run_id, asked.version
        is_newest = asked.isolation == "completed"
        watermark_ms = None if is_newest else self._of_versions.get((run_id, version))
        if watermark_ms is None:
            location = self._discovery.locate(target.location.operator.name, run_id, deadline)
            while location.completed_version < self._router.seen.get(run_id) and time.monotonic() < deadline:
                time.sleep(LOCATE_AGAIN_SECONDS)  # the host does not have the version yet that another host answered
                location = self._discovery.locate(target.location.operator.name, run_id, deadline)
            newest = location.completed_version
            self._router.seen.note(run_id, newest)
            if location.watermark_ms is not None:
                self._of_versions[run_id, newest] = location.watermark_ms
            version = newest if is_newest else version
            watermark_ms = self._of_versions.get((run_id, version))
            if watermark_ms is None and version != newest:
                raise exceptions.StateVersionError(
                    f"The watermark of version {version} of operator {view.operator!r} is not known: hosts know that "
                    f"of the last completed version, {newest}. Leave version= out, or give at= a datetime."
                )
        if watermark_ms is None:
            raise exceptions.StateTimeError(
                f"Version {version} of operator {view.operator!r} has no watermark yet: a watermark comes with the "
                "batch after the first rows with event times. Wait for that batch, or give at= a datetime."
            )
        return protocol.At("version", version, moment=view.rolling.at_watermark(watermark_ms))


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
        return self._current

    def knows_proxy(self) -> bool:
        return True

    def failed(self) -> None:
        addresses = list(dict.fromkeys([*self._given, *self._named]))
        at = addresses.index(self._current) if self._current in addresses else -1
        self._current = addresses[(at + 1) % len(addresses)]

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        proxy = self._current
        request = protocol.LocateOperatorRequest(operator, query)
        reply, body = self._connections.request(proxy, request, deadline=deadline)
        if not isinstance(reply, protocol.LocateReply):
            kind = type(reply).__name__
            raise exceptions.QueryableStateError(f"{proxy} answered a question for a location by {kind}.")
        location = json_decoder(OperatorLocation).decode(body)
        self._named = addresses_in(location)
        return location

    def note(self, addresses: Sequence[str]) -> None:
        self._named = list(dict.fromkeys(filter(None, addresses))) or self._named


def addresses_in(location: OperatorLocation) -> list[str]:
    """Return the query addresses of the owners of an operator's partitions, each once."""
    return list(dict.fromkeys(owner.query_address for owner in location.owners if owner.query_address))


class CoordinatorDiscovery:
    """Finds operators through the coordinator, and hosts among the owners that it has named.

    ``coordinator`` takes ``DISCOVERY_SECONDS`` at most; ``within(seconds)`` returns one that takes fewer seconds.
    ``take_unreachable`` returns the address of a host that took no connection, to report it to the coordinator.
    """

    def __init__(self, coordinator: CoordinatorPort, within: Callable[[float], CoordinatorPort] | None = None) -> None:
        self._coordinator = coordinator
        self._within = within
        self._addresses: list[str] = []
        self.take_unreachable: Callable[[], str] = str

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        left = deadline - time.monotonic()
        coordinator = self._coordinator
        if self._within is not None and left < DISCOVERY_SECONDS:
            if left <= 0:
                raise exceptions.HostUnavailableError("The timeout ended before the coordinator could be asked.")
            coordinator = self._within(left)
        if unreachable := self.take_unreachable():
            coordinator.suspect_host(unreachable)
        location = coordinator.locate(operator, query)
        self._addresses = addresses_in(location) or self._addresses
        return location

    def proxy(self) -> str:
        """See ``Discovery``. Raises ``QueryableStateError`` without a running query, since no host has state then."""
        if not self._addresses:
            running = self._coordinator.operators()
            if not running:
                raise NoRunningQueryError("No query with state is running.")
            self.locate(running[0].operator.name, running[0].run_id, math.inf)
        addresses = self._addresses
        if not addresses:
            raise exceptions.QueryableStateError(
                "The hosts of the running queries have no addresses for query clients."
            )
        return addresses[0]

    def knows_proxy(self) -> bool:
        return bool(self._addresses)

    def failed(self) -> None:
        self._addresses = self._addresses[1:]

    def note(self, addresses: Sequence[str]) -> None:
        self._addresses = list(dict.fromkeys(filter(None, addresses))) or self._addresses


class ScopedDiscovery:
    """Finds only operators that a token with ``scope`` may read, for a client that itself may read all of them.

    ``operators`` returns those of the running queries, within some seconds.
    """

    def __init__(self, scope: Scope, discovery: Discovery, operators: Callable[[float], list[dict[str, Any]]]) -> None:
        self.scope = scope
        self._locate = discovery.locate
        self._operators = operators
        self.proxy, self.knows_proxy = discovery.proxy, discovery.knows_proxy
        self.failed, self.note = discovery.failed, discovery.note

    def locate(self, operator: str, query: str | None, deadline: float) -> OperatorLocation:
        left = max(0.0, deadline - time.monotonic())
        locate = partial(self._locate, deadline=deadline)
        return ScopedOperators(self.scope, lambda: self._operators(left), locate).locate(operator, query)


class NoRunningQueryError(exceptions.QueryableStateError):
    """No query is running, so there are no hosts to ask."""


def addresses_of(address: str | Sequence[str]) -> list[str]:
    """Return the ``ip:port`` of addresses, which may begin with ``statestore://``. Raises ``RequestError``."""
    named = address.split(",") if isinstance(address, str) else list(address)
    addresses = [a.strip().removeprefix(SCHEME).rstrip("/") for a in named]
    for plain in addresses:
        host, _, port = plain.rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise exceptions.RequestError(
                f"address={plain!r} is not of the form ip:port or {SCHEME}ip:port: it is the query address of a "
                "host, which `statestore status` shows."
            )
    if not addresses:
        raise exceptions.RequestError("address= is empty; give the query address of at least one host.")
    return addresses


def connected(
    namespace: str,
    coordinator_name: str,
    address: str | Sequence[str] | None,
    token: str | None,
    tls: TlsConf | ssl.SSLContext | None,
    timeout: float,
    direct: bool | None,
) -> tuple[Discovery, KvConnections, StateRouter]:
    """Return the way to hosts for the arguments of ``QueryableStateClient.connect``."""
    address, token = from_environment(address, token)
    context = tls.client_context() if isinstance(tls, TlsConf) else tls
    if address is None:
        in_cluster, own_token = coordinator_in_cluster(namespace, coordinator_name, timeout)
        connections = KvConnections(token or own_token, context, timeout)
        in_cluster.take_unreachable = connections.take_unreachable
        return in_cluster, connections, StateRouter(connections, via=in_cluster.proxy if direct is False else None)
    if token is None:
        raise exceptions.QueryableStateError(
            "address= needs a token= as well (or STATESTORE_TOKEN in the environment): hosts reject clients "
            "without one. `statestore token` issues them."
        )
    addresses = addresses_of(address)
    connections = KvConnections(token, context, timeout)
    discovery = ProxyDiscovery(addresses, connections)
    return discovery, connections, StateRouter(connections, via=None if direct else discovery.proxy)


def from_environment(
    address: str | Sequence[str] | None, token: str | None
) -> tuple[str | Sequence[str] | None, str | None]:
    """Return address and token; one that is not given comes from the environment, or is None."""
    return address or os.environ.get(ADDRESS_VARIABLE) or None, token or os.environ.get(TOKEN_VARIABLE) or None


_joining = threading.Lock()
"""Ray fails if two threads of a process join its cluster at once."""


def coordinator_in_cluster(namespace: str, coordinator_name: str, timeout: float) -> tuple[CoordinatorDiscovery, str]:
    """Return the coordinator of the Ray cluster, which this process joins if it has not joined yet, and a token.

    Raises ``EnvironmentProblemError`` without Ray or a cluster, ``HostUnavailableError`` without a coordinator.
    """
    try:
        import ray
    except ImportError as error:
        raise exceptions.EnvironmentProblemError(
            "Without an address the coordinator is found by Ray, which is not installed here. Give address= and "
            f"token=, or set {ADDRESS_VARIABLE} and {TOKEN_VARIABLE}; or, on a machine of the cluster: "
            "pip install 'ray-statestore[cluster]'."
        ) from error
    from coordinator_actor.reference import RayCoordinatorPort

    with _joining:
        if not ray.is_initialized():
            try:
                ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level="WARNING")
            except (ConnectionError, ValueError) as error:
                raise exceptions.EnvironmentProblemError(
                    "No Ray cluster answers at the address that this machine has on record; set RAY_ADDRESS, or give "
                    f"address= and token=. Ray says: {error}"
                ) from error
    token = RayCoordinatorPort(namespace, coordinator_name, timeout).token()
    port = RayCoordinatorPort(namespace, coordinator_name, min(timeout, DISCOVERY_SECONDS))
    return CoordinatorDiscovery(port, lambda seconds: RayCoordinatorPort(namespace, coordinator_name, seconds)), token


# The operators that a client knows: used until their location proves wrong, and refreshed in the background.


log = logging.getLogger(__name__)

REFRESH_SECONDS = 3.0
"""A location in use is looked up again at this age."""
OperatorRef = tuple[str, str | None]
"""Operator and query, as a caller names them."""


@dataclass
class KnownOperator:
    """The location of an operator, its state variables, and by these the lengths of its windows in us, once known."""

    location: OperatorLocation
    schema: OperatorSchema
    views: dict[str | None, StateView] = field(default_factory=dict)
    window_us: dict[str, int] = field(default_factory=dict)
    located_at: float = 0.0

    @classmethod
    def of(cls, location: OperatorLocation, earlier: KnownOperator | None = None) -> KnownOperator:
        """Return the operator of a location, with the views of ``earlier`` if the operator is still the same."""
        if earlier is not None and _content(location) == _content(earlier.location):
            # Another run may have windows of another length.
            window_us = earlier.window_us if location.run_id == earlier.location.run_id else {}
            return cls(location, earlier.schema, earlier.views, window_us)
        return cls(location, OperatorSchema.from_json(location.operator.schema))

    def view(self, state: str | None) -> StateView:
        """Return a state variable. Raises ``UnknownKvStateIdError``."""
        view = self.views.get(state)
        if view is None:
            view = state_view(self.location.operator.name, self.schema, self.location.key_groups, state)
            self.views[state] = view
        return view


@dataclass
class KnownView:
    """The location of a feature view, the codec of its keys, and the columns of its features."""

    location: protocol.ViewLocation
    codec: KeyCodec
    columns: pa.Schema
    located_at: float = 0.0

    @cached_property
    def dtypes(self) -> list[np.dtype[Any]]:
        """The types of numpy of the columns."""
        return [np.dtype(kind.to_pandas_dtype()) for kind in self.columns.types]

    @cached_property
    def names(self) -> list[str]:
        """The features, in the order of the columns. ``Schema.names`` creates a list on each call."""
        return list(self.columns.names)

    @cached_property
    def plain_key(self) -> type | None:
        """The Python type whose keys, once encoded, are the values of the key column; None for other keys."""
        types = self.codec.schema.types
        if len(types) == 1 and (pa.types.is_integer(types[0]) or pa.types.is_string(types[0])):
            return int if pa.types.is_integer(types[0]) else str
        return None

    @cached_property
    def is_plain(self) -> bool:
        """Whether hosts send the features of one key as a list of values."""
        return protocol.have_plain_values(self.columns)

    @classmethod
    def of(cls, location: protocol.ViewLocation) -> KnownView:
        view = location.view
        stored = pa.ipc.read_schema(pa.py_buffer(location.key))
        codec = KeyCodec(view.name, stored, view.keys, location.key_groups, "feature view")
        return cls(location, codec, pa.ipc.read_schema(pa.py_buffer(location.columns)))


def _content(location: OperatorLocation) -> tuple[object, ...]:
    return location.operator.schema, location.operator.name, location.key_groups


class Located(Protocol):
    """Something that a client has located, at a time of the client's clock."""

    located_at: float


L = TypeVar("L", bound=Located)


class KnownTargets(Generic[L]):
    """Known operators, or known feature views, by name and query, for any number of threads.

    ``locate`` returns one, from its name, its query, a deadline, and what was known of it. It holds no lock, and no
    thread between refreshes, so a process may fork.
    """

    def __init__(self, locate: Callable[[str, str | None, float, L | None], L]) -> None:
        self._locate = locate
        self._known: dict[OperatorRef, L] = {}
        self._last: dict[OperatorRef, L] = {}

    def had_answer(self, ref: OperatorRef) -> bool:
        return ref in self._last

    def get(self, ref: OperatorRef, deadline: float) -> L:
        """Return the known one of that name; look it up if none is known."""
        target = self.known(ref)
        return self._look_up(ref, deadline) if target is None else target

    def known(self, ref: OperatorRef) -> L | None:
        """Return the known one of that name, or None. Never waits: an old location is refreshed by a thread."""
        target = self._known.get(ref)
        if target is not None and time.monotonic() - target.located_at > REFRESH_SECONDS:
            self._refresh(ref, target)
        return target

    def forget(self, ref: OperatorRef) -> None:
        self._known.pop(ref, None)

    def _look_up(self, ref: OperatorRef, deadline: float) -> L:
        target = self._locate(*ref, deadline, self._last.get(ref))
        target.located_at = time.monotonic()
        self._known[ref] = self._last[ref] = target
        return target

    def _refresh(self, ref: OperatorRef, target: L) -> None:
        # Set before the look-up, so that other threads use the location during it. Two threads at once look it up
        # twice.
        target.located_at = time.monotonic()

        def refresh() -> None:
            try:
                self._look_up(ref, time.monotonic() + REFRESH_SECONDS)
            except Exception as error:  # noqa: BLE001 - a request with a wrong location finds that out by itself
                log.debug("The location of %s could not be refreshed: %s", ref, error)

        threading.Thread(target=refresh, name="statestore-locate", daemon=True).start()


# Access of a client to the hosts: known operators, requests that any host can answer, and repeated attempts.


T = TypeVar("T")


class ClusterAccess:
    """The way of ``QueryableStateClient`` and ``StateWatch`` to hosts. For any number of threads.

    ``timeout``: the seconds of a call that names none. ``on_moved`` is called when the location of an operator has
    perhaps proved wrong. ``find_views`` returns one feature view, or all; by default any host does. A ``deadline`` is a
    time of ``time.monotonic``.
    """

    def __init__(
        self, discovery: Discovery, connections: KvConnections, timeout: float, on_moved: Callable[[], None]
    ) -> None:
        self.timeout = timeout
        self._discovery = discovery
        self._connections = connections
        self._on_moved = on_moved
        self._operators = KnownTargets(self._locate_operator)
        self._views = KnownTargets(self._locate_view)
        self.find_views: Callable[[protocol.ViewsRequest, float], list[protocol.ViewLocation]] = self._views_of_host

    def answer(
        self,
        what: str,
        ref: OperatorRef,
        timeout: float | None,
        ask: Callable[[KnownOperator, float], T],
        begun: float | None = None,
        failure: Exception | None = None,
    ) -> T:
        """Return the result of ``ask(known operator, deadline)``; retry if that may help.

        ``what`` begins the message of a ``QueryTimeoutError``. ``begun`` is when a first attempt began, which has
        failed with ``failure``.
        """
        return self._answer(self._operators, what, ref, timeout, ask, begun, failure)

    def answer_of_view(self, what: str, view: str, timeout: float | None, ask: Callable[[KnownView, float], T]) -> T:
        """Return the result of ``ask(known view, deadline)``; retry if that may help."""
        return self._answer(self._views, what, (view, None), timeout, ask)

    def knows_proxy(self) -> bool:
        """Return whether a host that answers for all hosts is known."""
        return self._discovery.knows_proxy()

    def known_view(self, view: str) -> KnownView | None:
        """Return a view that has been located, or None. Never waits."""
        return self._views.known((view, None))

    def _answer(
        self,
        known: KnownTargets[L],
        what: str,
        ref: OperatorRef,
        timeout: float | None,
        ask: Callable[[L, float], T],
        begun: float | None = None,
        failure: Exception | None = None,
    ) -> T:
        begun = time.monotonic() if begun is None else begun
        deadline = begun + (self.timeout if timeout is None else timeout)
        attempts = Attempts(what, deadline, had_answer=known.had_answer(ref), begun=begun)
        moved = partial(self._moved, known, ref)
        return retrying(lambda: ask(known.get(ref, deadline), deadline), attempts, relocate=moved, failure=failure)

    def views(self, timeout: float | None) -> list[protocol.ViewLocation]:
        """Return all feature views; retry if that may help."""
        request = protocol.ViewsRequest()
        return self._of_any_host("feature_views()", timeout, lambda deadline: self.find_views(request, deadline))

    def _views_of_host(self, request: protocol.ViewsRequest, deadline: float) -> list[protocol.ViewLocation]:
        _, body = self._connections.request(self._discovery.proxy(), request, deadline=deadline)
        return json_decoder(list[protocol.ViewLocation]).decode(body)

    def _locate_operator(
        self, operator: str, query: str | None, deadline: float, earlier: KnownOperator | None
    ) -> KnownOperator:
        return KnownOperator.of(self._discovery.locate(operator, query, deadline), earlier)

    def _locate_view(self, view: str, _: str | None, deadline: float, earlier: KnownView | None) -> KnownView:
        (location,) = self.find_views(protocol.ViewsRequest(view), deadline)
        self._discovery.note(location.addresses)
        if earlier is not None and earlier.location.revision == location.revision:
            return KnownView(location, earlier.codec, earlier.columns)
        return KnownView.of(location)

    def answer_of_any_host(self, what: str, request: protocol.Request, timeout: float | None) -> Any:
        """Return the answer of any one host; retry if that may help."""
        return self._of_any_host(what, timeout, lambda deadline: self.ask_host(request, deadline))

    def _of_any_host(self, what: str, timeout: float | None, ask: Callable[[float], T]) -> T:
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        attempts = Attempts(what, deadline)
        return retrying(lambda: ask(deadline), attempts, relocate=lambda error: self._discovery.failed())

    def known(self, ref: OperatorRef, deadline: float) -> KnownOperator:
        """Return the known operator of that name; look it up if none is known."""
        return self._operators.get(ref, deadline)

    def moved(self, ref: OperatorRef, error: Exception) -> None:
        """Forget an operator's location if ``error`` says that it may be wrong; leave a proxy that does not answer."""
        self._moved(self._operators, ref, error)

    def _moved(self, known: KnownTargets[Any], ref: OperatorRef, error: Exception) -> None:
        if should_locate(error):
            known.forget(ref)
            self._on_moved()
        if isinstance(error, exceptions.ConnectionClosedError | exceptions.HostUnavailableError | OSError):
            self._discovery.failed()

    def ask_host(self, request: protocol.Request, deadline: float) -> Any:
        """Return the answer of any one host to a request that every host can answer; an answer in JSON is decoded."""
        reply, body = self._connections.request(self._discovery.proxy(), request, deadline=deadline)
        return json_decoder(Any).decode(body) if isinstance(reply, protocol.DescribeReply) else reply

    def stream(self, request: protocol.Request, body: bytes, deadline: float) -> KvExchange:
        """Return the rows of any one host. A caller that stops early must close the stream."""
        return self._connections.stream(self._discovery.proxy(), request, body, deadline)
