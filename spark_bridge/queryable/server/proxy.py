"""``KvStateClientProxy``: in every host, a server that answers for all hosts (Flink's class of that name)."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from backends.background_loop import failing_loops
from backends.decoders import json_decoder
from backends.host_memory import BoundedDict
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError, listed_names
from coordinator_actor.exceptions import QueryEndedError as EndedError
from coordinator_actor.exceptions import UnknownOperatorError as UnknownError
from coordinator_actor.messages import KvStateLocationOracle, OperatorLocation, OperatorSpec
from spark_bridge import exceptions
from spark_bridge.queryable import protocol
from spark_bridge.queryable.connections import KvConnections
from spark_bridge.queryable.routing.feature_reads import FeatureReads
from spark_bridge.queryable.routing.router import StateRouter
from spark_bridge.queryable.routing.scatter_gather import FINAL_ERRORS, MOVED, Attempts, should_locate
from spark_bridge.queryable.server.limits import RequestLimits
from spark_bridge.queryable.server.server import KvStateServer

if TYPE_CHECKING:
    from spark_bridge.queryable.server.tokens import TokenVerifier

# The location cache of a proxy: a ``KvStateLocationOracle`` per query, fetched when needed and refreshed while in
# use.


log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 2.0
"""An oracle in use is fetched again at this age, aside from the requests that use it."""
FETCH_SECONDS = 0.1
"""The least seconds between two fetches of an oracle, however many requests find it wrong."""
ENDED_SECONDS = 0.5
"""TTL of the cached answer that a query has ended, in seconds."""
MAX_CACHED_RUNS = 1024
FETCHES = "fetch the owners of the partitions of a query: requests use the owners that were known before"


@dataclass
class _CachedOracle:
    """An oracle, and the locations that were made from it, by operator.

    ``at`` is when it was cached, or asked for again. ``fetched`` is the same; -inf if the coordinator was never asked.
    """

    oracle: KvStateLocationOracle
    at: float
    fetched: float = float("-inf")
    locations: dict[str, OperatorLocation] = field(default_factory=dict)


class LocationCache:
    """Oracles by job, for any number of threads. ``_lock`` guards all dicts; reads of them take no lock.

    A job is a query on its state location. A copy of a checkpoint has the same query id, but is a separate job.

    ``coordinator`` may fail with ``HostUnavailableError``: the cached oracles then stay in use. ``take_unreachable``
    returns the address of a host that took no connection, to report it to the coordinator.
    """

    def __init__(
        self,
        coordinator: CoordinatorPort,
        clock: Callable[[], float] = time.monotonic,
        take_unreachable: Callable[[], str] = str,
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._take_unreachable = take_unreachable
        # Nobody tells this cache that a query has ended which is not asked for any more: the oldest ones are evicted.
        self._cached: BoundedDict[str, _CachedOracle] = BoundedDict(MAX_CACHED_RUNS)
        self._jobs: dict[str, str] = {}
        self._specs: dict[tuple[str, str], OperatorSpec] = {}
        self._ended: BoundedDict[str, tuple[str, float]] = BoundedDict(MAX_CACHED_RUNS)
        self._lock = threading.Lock()
        self._fetching: BoundedDict[str, threading.Lock] = BoundedDict(MAX_CACHED_RUNS)
        self._used: set[str] = set()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._refresher: threading.Thread | None = None

    def get(self, job_id: str) -> KvStateLocationOracle | None:
        """Return the cached oracle of a job, also by its query id, or None. The coordinator is not asked."""
        cached = self._cached.get(job_id)
        if cached is not None:
            return cached.oracle
        return next((c.oracle for c in list(self._cached.values()) if c.oracle.query_id == job_id), None)

    def update(self, job_id: str, oracle: KvStateLocationOracle | None) -> None:
        """Cache an oracle of a job; None forgets the cached one. ``job_id`` may be its query id."""
        if oracle is not None:
            self._put(_CachedOracle(oracle, self._clock()))
            return
        with self._lock:
            for job in [j for j, c in self._cached.items() if job_id in (j, c.oracle.query_id)]:
                del self._cached[job]

    def _put(self, cached: _CachedOracle) -> None:
        with self._lock:
            oracle = cached.oracle
            job_id = oracle.state_location or oracle.query_id
            self._cached[job_id] = cached
            self._ended.pop(job_id, None)
            self._jobs[oracle.run_id] = job_id
            while len(self._jobs) > MAX_CACHED_RUNS:
                run_id = next(iter(self._jobs))
                del self._jobs[run_id]
                # A copy of the entries: other threads add specs without the lock.
                self._specs = {key: spec for key, spec in list(self._specs.items()) if key[0] != run_id}

    def location(self, run_id: str, operator: str, *, with_schema: bool = False) -> OperatorLocation:
        """Return the location of an operator of a run: the same object until something changes.

        It has a schema only ``with_schema``. Raises ``RetiredRunError`` if the run is unknown or not the query's newest
        one, ``QueryEndedError``, ``UnknownOperatorError``, and ``HostUnavailableError`` if the operator is not cached
        and the coordinator does not answer.
        """
        job_id = self._jobs.get(run_id)
        cached = None if job_id is None else self._cached.get(job_id)
        if job_id is None or cached is None:
            job_id = self._find(run_id, operator)
            cached = self._cached.get(job_id)
        if cached is None:
            if ended := self._ended.get(job_id):
                raise exceptions.QueryEndedError(ended[0])
            raise RetiredRunError(f"Run {run_id} of query {job_id} is not running; locate the operator again.")
        if cached.oracle.run_id != run_id:
            raise RetiredRunError(
                f"Run {run_id} of query {cached.oracle.query_id} has been replaced by run {cached.oracle.run_id}; "
                "locate the operator again."
            )
        if self._clock() - cached.at > MAX_AGE_SECONDS:
            self._refresh_soon(job_id)
        location = cached.locations.get(operator)
        if location is None or (with_schema and not location.operator.schema):
            location = cached.locations[operator] = self._made(cached.oracle, operator, with_schema)
        return location

    def refresh(self, run_id: str) -> None:
        """Fetch the oracle of a run again, which proved wrong, unless it was fetched in the last ``FETCH_SECONDS``."""
        job_id = self._jobs.get(run_id)
        if job_id is not None:
            self._fetch(job_id, FETCH_SECONDS)

    def start(self) -> None:
        """Allow refreshes, also again after ``stop``."""
        self._wake.clear()  # else no thread would be started again
        self._stopping.clear()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    # -- fetching from the coordinator ---------------------------------------------------------

    def _find(self, run_id: str, operator: str) -> str:
        """Return the job of a run that is not cached."""
        job = self._jobs.get(run_id)
        if job is not None:
            # Its oracle was removed: the query has perhaps ended, and may have been started again.
            ended = self._ended.get(job)
            if ended is None or self._clock() - ended[1] > ENDED_SECONDS:
                self._fetch(job, 0.0, operator)
            return job
        try:
            location = self._coordinator.locate(operator, run_id)
        except EndedError as error:
            raise RetiredRunError(f"Run {run_id} is over; locate the operator again. ({error})") from error
        except UnknownError as error:
            raise RetiredRunError(f"Run {run_id} is not running; locate the operator again. ({error})") from error
        self._specs[run_id, operator] = location.operator
        self._fetch(run_id, 0.0, operator)
        return self._jobs.get(run_id, run_id)

    def _fetch(self, job_id: str, unless_since: float, operator: str | None = None) -> None:
        """Fetch the oracle of a job, or of a run's job, unless it was fetched in the last ``unless_since`` seconds.

        If another thread is fetching, this one waits and uses the result of that fetch.
        """
        begun = self._clock()
        with self._lock:
            fetching = self._fetching.setdefault(job_id, threading.Lock())
        with fetching:
            cached = self._cached.get(self._jobs.get(job_id, job_id))
            if cached is not None and cached.fetched > begun - unless_since:
                return
            try:
                if unreachable := self._take_unreachable():
                    self._coordinator.suspect_host(unreachable)
                oracle = self._coordinator.get_kv_state_location_oracle(job_id)
                if oracle is None:
                    names = [o.name for o in cached.oracle.operators] if cached is not None else []
                    if (name := [*names, operator][0]) is not None:
                        with contextlib.suppress(UnknownError):
                            self._coordinator.locate(name, job_id)  # raises if it remembers that the query has ended
            except EndedError as error:
                self.update(job_id, None)
                with self._lock:
                    self._ended[job_id] = str(error), self._clock()
                return
            except (CoordinatorError, exceptions.HostUnavailableError) as error:
                if cached is None:
                    raise
                log.info("Query %s is served from cached locations: %s", job_id, error)
                oracle = None
            now = self._clock()
            # None: the coordinator does not know the query (yet), because the coordinator was replaced.
            if cached is not None and oracle in (None, cached.oracle):
                cached.at = cached.fetched = now  # locations that were made of it stay
            elif oracle is not None:
                self._put(_CachedOracle(oracle, now, now))

    def _made(self, oracle: KvStateLocationOracle, operator: str, with_schema: bool) -> OperatorLocation:
        if operator not in {o.name for o in oracle.operators}:
            exist = listed_names(operator, (o.name for o in oracle.operators))
            raise exceptions.UnknownOperatorError(
                f"Query {oracle.name or oracle.query_id} (run {oracle.run_id}) has no operator {operator!r}; "
                f"operators that exist: {exist}"
            )
        owners = oracle.owners(operator)
        spec = self._specs.get((oracle.run_id, operator))
        if spec is None and with_schema:
            spec = self._specs[oracle.run_id, operator] = self._coordinator.locate(operator, oracle.run_id).operator
        return OperatorLocation(
            oracle.query_id,
            oracle.run_id,
            oracle.name,
            spec or OperatorSpec(operator, len(owners), ""),
            oracle.key_groups,
            oracle.completed_version,
            owners,
            standbys=oracle.standbys,
        )

    # -- refreshes of oracles in use -----------------------------------------------------------

    def _refresh_soon(self, job_id: str) -> None:
        self._used.add(job_id)
        if self._wake.is_set() or self._stopping.is_set():
            return
        self._wake.set()
        with self._lock:
            if self._refresher is None or not self._refresher.is_alive():
                self._refresher = threading.Thread(target=self._run, name="statestore-oracles", daemon=True)
                self._refresher.start()

    def _run(self) -> None:
        while self._wake.wait():
            self._wake.clear()
            if self._stopping.is_set():
                return
            while self._used and not self._stopping.is_set():
                job_id = self._used.pop()
                try:
                    self._fetch(job_id, MAX_AGE_SECONDS / 2)
                except Exception as error:  # noqa: BLE001 - the thread must survive; cached oracles stay in use
                    log.warning("The locations of query %s could not be fetched: %s", job_id, error)
                    failing_loops.failed(self, FETCHES, "Look at the log of that host and of the coordinator.", error)
                else:
                    failing_loops.recovered(self)
            # Wait, so that a coordinator that does not answer is not asked for every request.
            self._stopping.wait(FETCH_SECONDS)


# ``ForwardingReads``: answers for all hosts.
#
# This host's partitions are read here; the owners are asked for the others.


T = TypeVar("T")

MAX_RETRY_SECONDS = 1.0
"""When owners have moved, a request is repeated here for at most this many seconds from its first failure on.

The client has more time, and waits without taking room here.
"""


@dataclass(eq=False, repr=False)
class ForwardingReads:
    """``StateReads`` of a proxy: answers requests with ``forward`` for all partitions, others for this host's.

    ``_find_own`` returns the reads of this host alone, and ``_address`` its own query address; both are called
    once, with the first request. Requests to other hosts have no ``forward``, so no request goes further than one step.
    """

    _find_own: Callable[[], protocol.OwnReads]
    _address: Callable[[], str]
    _locations: LocationCache
    _connections: KvConnections
    patience: float = MAX_RETRY_SECONDS
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    @cached_property
    def own(self) -> protocol.OwnReads:
        return self._find_own()

    @cached_property
    def router(self) -> StateRouter:
        return StateRouter(self._connections, local=(self._address(), self.own), clock=self.clock, sleep=self.sleep)

    @cached_property
    def _feature_reads(self) -> FeatureReads:
        return FeatureReads(self.own, self.router, self._locations.location)

    # -- for all hosts -------------------------------------------------------------------------

    def lookup(self, request: protocol.LookupRequest, keys: pa.BinaryArray) -> tuple[int, pa.BinaryArray]:
        if not request.forward:
            return self.own.lookup(request, keys)
        family, at = request.column_family, request.at
        return self._answer(request, lambda of, deadline: self.router.lookup(of, family, keys, at, deadline))

    def lookup_one(self, request: protocol.LookupRequest, key: bytes) -> tuple[int, bytes | None]:
        if not request.forward:
            return self.own.lookup_one(request, key)
        family, at = request.column_family, request.at
        return self._answer(request, lambda of, deadline: self.router.lookup_one(of, family, key, at, deadline))

    def key_rows(self, request: protocol.KeyRowsRequest, keys: pa.BinaryArray) -> protocol.StateAnswer:
        if not request.forward:
            return self.own.key_rows(request, keys)
        return self._answer(
            request, lambda of, deadline: self.router.key_rows(of, request, keys, deadline), with_schema=True
        )

    def scan(self, request: protocol.ScanRequest) -> protocol.StateAnswer:
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
        return self._answer(
            request,
            lambda location, deadline: self.router.scan(location, request, deadline, relocate, in_order=in_order),
            with_schema=True,
        )

    def count(self, request: protocol.ScanRequest) -> tuple[int, int]:
        if not request.forward:
            return self.own.count(request)
        return self._answer(request, lambda location, deadline: self.router.count(location, request, deadline))

    def views(self, request: protocol.ViewsRequest) -> list[protocol.ViewLocation]:
        return self._feature_reads.views(request)

    def features(self, request: protocol.FeaturesRequest, keys: pa.BinaryArray | bytes) -> protocol.FeatureAnswer:
        deadline = self.clock() + self._connections.timeout

        def moved(error: Exception) -> None:
            for run_id in self._feature_reads.run_ids(request.view):
                self._moved(run_id, error)

        return self._retried(lambda: self._feature_reads.features(request, keys, deadline), moved)

    # -- requests that any host can answer -----------------------------------------------------

    def locate(self, operator: str, query: str | None) -> OperatorLocation:
        return self.own.locate(operator, query)

    def changes(self, request: protocol.ChangesRequest, keys: pa.BinaryArray | None) -> protocol.StateAnswer:
        return self.own.changes(request, keys)

    def await_completed(self, run_id: str, after: int, seconds: float) -> int:
        return self.own.await_completed(run_id, after, seconds)

    def lag_ms(self, run_id: str) -> int:
        """See ``StateReads``. Every host of the cluster knows it."""
        return self.own.lag_ms(run_id)

    def operators(self) -> list[dict[str, Any]]:
        return self.own.operators()

    def describe(self, operator: str | None, query: str | None) -> dict[str, Any]:
        return self.own.describe(operator, query)

    # -- attempts ------------------------------------------------------------------------------

    def _answer(
        self,
        request: protocol.LookupRequest | protocol.KeyRowsRequest | protocol.ScanRequest,
        ask: Callable[[OperatorLocation, float], T],
        *,
        with_schema: bool = False,
    ) -> T:
        """Return the result of ``ask``; retry for a short time if partitions have moved. Raises the owners' errors."""
        run_id, operator = request.run_id, request.operator
        deadline = self.clock() + self._connections.timeout

        def attempt() -> T:
            return ask(self._locations.location(run_id, operator, with_schema=with_schema), deadline)

        return self._retried(attempt, lambda error: self._moved(run_id, error))

    def _retried(self, attempt: Callable[[], T], moved: Callable[[Exception], object]) -> T:
        attempts: Attempts | None = None
        while True:
            try:
                return attempt()
            except (RetiredRunError, *FINAL_ERRORS) as error:
                moved(error)
                raise  # the client has named a run, and must find out which one is next
            except MOVED as error:
                # From the first failure on: a connection to a dead machine alone takes longer.
                attempts = attempts or Attempts("", self.clock() + self.patience, clock=self.clock)
                try:
                    delay = attempts.delay(error)
                except exceptions.QueryTimeoutError:
                    moved(error)  # the client has more time, and may ask here again
                    raise error from None
                moved(error)
            self.sleep(delay)

    def _moved(self, run_id: str, error: Exception) -> None:
        if should_locate(error):
            self._locations.refresh(run_id)


FORWARDED_SECONDS = 30.0
"""Another host may take this many seconds for an answer, or for the next rows of one."""
DESCRIBE_SECONDS = 5.0


def connections_to_hosts(token: str, tls: ssl.SSLContext | None = None) -> KvConnections:
    """Return the connections of a proxy to other hosts. ``tls`` is the context of a client."""
    return KvConnections(token, tls, FORWARDED_SECONDS)


class KvStateClientProxy(KvStateServer):
    """Answers queries of this host's state, and requests with ``forward`` for all hosts.

    ``reads`` returns the reads that this host answers from; it is first called with the first request.
    ``coordinator`` locates state. ``hosts`` are the connections to other hosts, with the cluster's token
    (``connections_to_hosts``); the proxy closes them when it shuts down. The other arguments are those of
    ``KvStateServer``.
    """

    def __init__(
        self,
        reads: Callable[[], protocol.OwnReads],
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
        self._locations = LocationCache(coordinator, take_unreachable=hosts.take_unreachable)
        forwarding = ForwardingReads(reads, lambda: self.server_address, self._locations, self._hosts)
        super().__init__(forwarding, tokens, ip=ip, port=port, limits=limits, tls=tls, host_id=host_id)

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """Return the owners of partitions by the id of a query, None if they are not known here. From any thread."""
        return self._locations.get(job_id)

    def update_kv_state_location_oracle(self, job_id: str, oracle: KvStateLocationOracle | None) -> None:
        """Set the owners of a query's partitions; None makes the proxy forget them. Thread-safe.

        The proxy fetches what it needs by itself, and again if it is stale or proves wrong. This method is for callers
        with newer information.
        """
        self._locations.update(job_id, oracle)

    def describe(self, request: protocol.DescribeRequest) -> dict[str, Any]:
        """See ``KvStateServer``; with ``forward`` the answer has all hosts of the operator's query, as ``hosts``."""
        if not request.forward or request.operator is None:
            return super().describe(request)
        location = self._reads.locate(request.operator, request.query)
        addresses = dict.fromkeys(owner.query_address for owner in location.owners)
        asked = protocol.DescribeRequest(request.operator, location.run_id)
        return {"hosts": self._described(addresses, asked)}

    def _described(self, addresses: Iterable[str], request: protocol.DescribeRequest) -> list[dict[str, Any]]:
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
            except (exceptions.SparkBridgeError, OSError) as error:
                answers.append({"query_address": address, "failure": str(error)})
        for exchange in begun:
            try:
                reply, body = exchange.finish()
            except (exceptions.SparkBridgeError, CoordinatorError, OSError) as error:
                answers.append({"query_address": exchange.address, "failure": str(error)})
                continue
            answers.append(json_decoder(dict[str, Any]).decode(body) if type(reply) is protocol.DescribeReply else {})
        return answers

    def start(self) -> None:
        self._locations.start()
        super().start()

    def shutdown(self) -> None:
        self._locations.stop()
        super().shutdown()
        self._hosts.drop()
