"""The ``KvStateLocationOracle``s that a proxy keeps: one per running query, fetched when needed and looked at again while in use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from coordinator_actor.exceptions import CoordinatorError, RetiredRunError
from coordinator_actor.exceptions import QueryEndedError as EndedError
from coordinator_actor.exceptions import UnknownOperatorError as UnknownError
from coordinator_actor.location_oracle import KvStateLocationOracle
from coordinator_actor.messages import OperatorLocation, OperatorSpec
from spark_bridge.exceptions import HostUnavailableError, QueryEndedError, UnknownOperatorError

log = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
"""An oracle in use is fetched again when it is as old as that, aside from the requests that use it."""
FETCH_SECONDS = 0.1
"""However many requests find it wrong, an oracle is not fetched more often than that."""
ENDED_SECONDS = 0.5
"""For so long a query that has ended is taken for ended without asking again."""
REMEMBERED_RUNS = 1024


class OracleSource(Protocol):
    """The coordinator, as far as a proxy needs it."""

    def locate(self, operator: str, query: str | None = None) -> OperatorLocation:
        """Where an operator's partitions are."""

    def get_kv_state_location_oracle(self, job_id: str) -> KvStateLocationOracle | None:
        """Who owns what of a query; None if it is not running."""


@dataclass
class _Kept:
    """``at`` is when it came, or when another one was asked for; ``fetched`` the same, unless nobody has asked the coordinator.

    ``locations`` are what was made of it, by operator.
    """

    oracle: KvStateLocationOracle
    at: float
    fetched: float = float("-inf")
    locations: dict[str, OperatorLocation] = field(default_factory=dict)


class LocationCache:
    """For any number of threads. ``coordinator`` may fail with ``HostUnavailableError``: what is known then goes on serving."""

    def __init__(self, coordinator: OracleSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._jobs: dict[str, str] = {}
        self._specs: dict[tuple[str, str], OperatorSpec] = {}
        self._ended: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}
        self._used: set[str] = set()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._refresher: threading.Thread | None = None

    def get(self, job_id: str) -> KvStateLocationOracle | None:
        """What is known of a query; None if nothing is. Asks nobody."""
        kept = self._kept.get(job_id)
        return None if kept is None else kept.oracle

    def update(self, job_id: str, oracle: KvStateLocationOracle | None) -> None:
        """What is known of a query from now on; None: nothing."""
        if oracle is None:
            self._kept.pop(job_id, None)
        else:
            self._keep(job_id, _Kept(oracle, self._clock()))

    def _keep(self, job_id: str, kept: _Kept) -> None:
        with self._lock:
            oracle = kept.oracle
            self._kept[job_id] = kept
            self._ended.pop(job_id, None)
            self._jobs[oracle.run_id] = job_id
            while len(self._jobs) > REMEMBERED_RUNS:
                run_id = next(iter(self._jobs))
                del self._jobs[run_id]
                self._specs = {key: spec for key, spec in self._specs.items() if key[0] != run_id}

    def location(self, run_id: str, operator: str, *, with_schema: bool = False) -> OperatorLocation:
        """Where an operator of a run is: the same object as long as nothing changes. Its schema is there only ``with_schema``.

        Raises ``RetiredRunError`` if the run is not the query's newest one, or nobody knows it, ``QueryEndedError``,
        ``UnknownOperatorError``, and ``HostUnavailableError`` if it is not known here and the coordinator does not answer.
        """
        job_id = self._jobs.get(run_id)
        kept = None if job_id is None else self._kept.get(job_id)
        if job_id is None or kept is None:
            job_id = self._find(run_id, operator)
            kept = self._kept.get(job_id)
        if kept is None:
            raise self._not_running(job_id, run_id)
        if kept.oracle.run_id != run_id:
            raise RetiredRunError(
                f"Run {run_id} of query {job_id} has been replaced by run {kept.oracle.run_id}; locate the operator again."
            )
        if self._clock() - kept.at > REFRESH_SECONDS:
            self._refresh_soon(job_id)
        location = kept.locations.get(operator)
        if location is None or (with_schema and not location.operator.schema):
            location = kept.locations[operator] = self._made(kept.oracle, operator, with_schema)
        return location

    def refresh(self, run_id: str) -> None:
        """What is known of a run has proved wrong, or nobody answered there: fetch it, unless that has just been done."""
        job_id = self._jobs.get(run_id)
        if job_id is not None:
            self._fetch(job_id, FETCH_SECONDS)

    def start(self) -> None:
        """Refresh what is used, again after ``stop``."""
        self._wake.clear()  # else nobody would begin a thread again
        self._stopping.clear()

    def stop(self) -> None:
        """End the thread that refreshes."""
        self._stopping.set()
        self._wake.set()

    # -- with the coordinator ------------------------------------------------------------------

    def _find(self, run_id: str, operator: str) -> str:
        """The query of a run that is not known here."""
        known = self._jobs.get(run_id)
        if known is not None:
            # Its oracle was taken away: perhaps it has ended, and may have been started again.
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
        kept = self._kept.get(found.query_id)
        if kept is None or kept.oracle.run_id != run_id:
            self._fetch(found.query_id, 0.0, operator)
        return found.query_id

    def _fetch(self, job_id: str, unless_since: float, operator: str | None = None) -> None:
        """Fetch what the coordinator knows of a query. Who comes while another does so has what that one has fetched."""
        begun = self._clock()
        with self._lock:
            fetching = self._fetching.setdefault(job_id, threading.Lock())
        with fetching:
            kept = self._kept.get(job_id)
            if kept is not None and kept.fetched > begun - unless_since:
                return
            try:
                oracle = self._coordinator.get_kv_state_location_oracle(job_id)
                if oracle is None:
                    names = [o.name for o in kept.oracle.operators] if kept is not None else []
                    self._require_not_ended(job_id, [*names, operator][0])
            except EndedError as error:
                self.update(job_id, None)
                with self._lock:
                    self._ended[job_id] = str(error), self._clock()
                    while len(self._ended) > REMEMBERED_RUNS:
                        del self._ended[next(iter(self._ended))]
                return
            except (CoordinatorError, HostUnavailableError) as error:
                if kept is None:
                    raise
                log.info("Query %s is served by what was known of it before: %s", job_id, error)
                oracle = None
            if oracle is None:
                # The coordinator does not know it (yet): it was replaced.
                if kept is not None:
                    kept.at = kept.fetched = self._clock()
            elif kept is not None and kept.oracle == oracle:
                kept.at = kept.fetched = self._clock()  # locations that were made of it stay
            else:
                now = self._clock()
                self._keep(job_id, _Kept(oracle, now, now))

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
                f"Query {oracle.name or oracle.query_id} (run {oracle.run_id}) has no operator {operator!r}; operators that "
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

    # -- while it is used ----------------------------------------------------------------------

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
                    self._fetch(job_id, REFRESH_SECONDS / 2)
                except Exception as error:  # noqa: BLE001 - the thread must go on; what is known goes on serving
                    log.warning("The locations of query %s could not be fetched: %s", job_id, error)
            # A coordinator that does not answer is not asked by every request.
            self._stopping.wait(FETCH_SECONDS)
