"""The location cache of a proxy: a ``KvStateLocationOracle`` per query, fetched when needed and refreshed while in
use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from backends.background_loop import failing_loops
from backends.bounded_dict import BoundedDict
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.exceptions import CoordinatorError, RetiredRunError
from coordinator_actor.exceptions import QueryEndedError as EndedError
from coordinator_actor.exceptions import UnknownOperatorError as UnknownError
from coordinator_actor.location_oracle import KvStateLocationOracle
from coordinator_actor.messages import OperatorLocation, OperatorSpec
from spark_bridge.exceptions import HostUnavailableError, QueryEndedError, UnknownOperatorError

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 2.0
"""An oracle in use is fetched again at this age, aside from the requests that use it."""
FETCH_SECONDS = 0.1
"""However many requests find an oracle wrong, it is not fetched more often than that."""
ENDED_SECONDS = 0.5
"""A query that has ended is taken for ended for this many seconds, without asking again."""
MAX_CACHED_RUNS = 1024
FETCHES = "fetch the owners of the partitions of a query: requests use the owners that were known before"


@dataclass
class _CachedOracle:
    """An oracle, and the locations that were made of it, by operator.

    ``at`` is when it came, or when another one was asked for. ``fetched`` is the same, but -inf if the coordinator was
    not asked.
    """

    oracle: KvStateLocationOracle
    at: float
    fetched: float = float("-inf")
    locations: dict[str, OperatorLocation] = field(default_factory=dict)


class LocationCache:
    """Oracles by job, for any number of threads. ``_lock`` guards all dicts; reads of them take no lock.

    A job is a query on its state location: a copy of a checkpoint, which has the same query id, is a job of its own.

    ``coordinator`` may fail with ``HostUnavailableError``: the cached oracles go on serving then.
    """

    def __init__(self, coordinator: CoordinatorPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._cached: dict[str, _CachedOracle] = {}

        self._jobs: dict[str, str] = {}
        self._specs: dict[tuple[str, str], OperatorSpec] = {}
        self._ended: BoundedDict[str, tuple[str, float]] = BoundedDict(MAX_CACHED_RUNS)
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}
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
                self._specs = {key: spec for key, spec in self._specs.items() if key[0] != run_id}

    def location(self, run_id: str, operator: str, *, with_schema: bool = False) -> OperatorLocation:
        """Return where an operator of a run is: the same object as long as nothing changes.

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
            raise self._not_running(job_id, run_id)
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
        """Fetch the oracle of a run again, because it has proved wrong or its owners do not answer.

        Unless it was fetched just now.
        """
        job_id = self._jobs.get(run_id)
        if job_id is not None:
            self._fetch(job_id, FETCH_SECONDS)

    def start(self) -> None:
        """Allow refreshes, also again after ``stop``."""
        self._wake.clear()  # else no thread would be started again
        self._stopping.clear()

    def stop(self) -> None:
        """End the thread that refreshes."""
        self._stopping.set()
        self._wake.set()

    # -- fetching from the coordinator ---------------------------------------------------------

    def _find(self, run_id: str, operator: str) -> str:
        """Return the job of a run that is not cached."""
        known = self._jobs.get(run_id)
        if known is not None:
            # Its oracle was removed: the query has perhaps ended, and may have been started again.
            ended = self._ended.get(known)
            if ended is None or self._clock() - ended[1] > ENDED_SECONDS:
                self._fetch(known, 0.0, operator)
            return known
        try:
            found = self._coordinator.locate(operator, run_id)
        except EndedError as error:
            raise RetiredRunError(f"Run {run_id} is over; locate the operator again. ({error})") from error
        except UnknownError as error:
            raise RetiredRunError(f"Run {run_id} is not running; locate the operator again. ({error})") from error
        self._specs[run_id, operator] = found.operator
        self._fetch(run_id, 0.0, operator)
        return self._jobs.get(run_id, run_id)

    def _fetch(self, job_id: str, unless_since: float, operator: str | None = None) -> None:
        """Fetch the oracle of a job, or of a run's job, unless it was fetched in the last ``unless_since`` seconds.

        A thread that comes while another one fetches waits, and uses what that one has fetched.
        """
        begun = self._clock()
        with self._lock:
            fetching = self._fetching.setdefault(job_id, threading.Lock())
        with fetching:
            cached = self._cached.get(self._jobs.get(job_id, job_id))
            if cached is not None and cached.fetched > begun - unless_since:
                return
            try:
                oracle = self._coordinator.get_kv_state_location_oracle(job_id)
                if oracle is None:
                    names = [o.name for o in cached.oracle.operators] if cached is not None else []
                    self._require_not_ended(job_id, [*names, operator][0])
            except EndedError as error:
                self.update(job_id, None)
                with self._lock:
                    self._ended[job_id] = str(error), self._clock()
                return
            except (CoordinatorError, HostUnavailableError) as error:
                if cached is None:
                    raise
                log.info("Query %s is served by what was known of it before: %s", job_id, error)
                oracle = None
            if oracle is None:
                # The coordinator does not know the query (yet), because the coordinator was replaced.
                if cached is not None:
                    cached.at = cached.fetched = self._clock()
            elif cached is not None and cached.oracle == oracle:
                cached.at = cached.fetched = self._clock()  # locations that were made of it stay
            else:
                now = self._clock()
                self._put(_CachedOracle(oracle, now, now))

    def _require_not_ended(self, job_id: str, operator: str | None) -> None:
        """Raise the coordinator's ``QueryEndedError`` if it remembers that a query has ended."""
        if operator is None:
            return
        try:
            self._coordinator.locate(operator, job_id)
        except UnknownError:
            log.debug("The coordinator does not know query %s", job_id)

    def _made(self, oracle: KvStateLocationOracle, operator: str, with_schema: bool) -> OperatorLocation:
        if operator not in {o.name for o in oracle.operators}:
            exist = ", ".join(repr(o.name) for o in oracle.operators)
            raise UnknownOperatorError(
                f"Query {oracle.name or oracle.query_id} (run {oracle.run_id}) has no operator {operator!r}; "
                "operators that "
                f"exist: {exist}."
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
        )

    def _not_running(self, job_id: str, run_id: str) -> Exception:
        ended = self._ended.get(job_id)
        if ended is not None:
            return QueryEndedError(ended[0])
        return RetiredRunError(f"Run {run_id} of query {job_id} is not running; locate the operator again.")

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
                except Exception as error:  # noqa: BLE001 - the thread must go on; cached oracles go on serving
                    log.warning("The locations of query %s could not be fetched: %s", job_id, error)
                    failing_loops.failed(self, FETCHES, "Look at the log of that host and of the coordinator.", error)
                else:
                    failing_loops.recovered(self)
            # Wait, so that a coordinator that does not answer is not asked for every request.
            self._stopping.wait(FETCH_SECONDS)
