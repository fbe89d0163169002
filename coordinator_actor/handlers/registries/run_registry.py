"""The runs that a coordinator knows: registered, over, and ended ones, with their savepoints."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from backends.bounded_dict import BoundedDict
from coordinator_actor.exceptions import RetiredRunError, UnknownQueryError, UnknownRunError
from coordinator_actor.handlers.registries.instance_registry import InstanceRegistry
from coordinator_actor.messages import QueryRegistration
from coordinator_actor.query.query_state import QueryState
from coordinator_actor.savepoints.run_savepoints import RunSavepoints

REMEMBERED_ENTRIES = 1000
LONGEST_FAILURE = 600
LEASE_OVER = "its driver was not heard of"
STOPPED = "its query ended"


@dataclass(frozen=True)
class OverRun:
    """A run that is over, for clients that still ask for its state, and for people.

    ``at`` is in seconds since 1970: when it ended, or when its driver was last heard of. ``was_running``: its query had
    not ended, as far as its driver has said.
    """

    registration: QueryRegistration
    at: float
    why: str
    was_running: bool = False

    def has(self, operator: str, query: str | None) -> bool:
        """Return whether the run had that operator, and that name, query id, run id or state location."""
        of = self.registration
        return (query is None or query in (of.name, of.query_id, of.run_id, of.state_location)) and any(
            o.name == operator for o in self.registration.operators
        )


class RunRegistry:
    """The runs that a coordinator knows.

    ``by_id`` has the registered runs. A run is *over* if it is to be unloaded: for good, or (``LEASE_OVER``) until its
    driver registers it again. The last ``REMEMBERED_ENTRIES`` such runs are remembered, and as many savepoint requests
    of ended runs. ``lock`` guards everything here; see ``Registries``.
    """

    def __init__(self, lock: threading.RLock, instances: InstanceRegistry, clock: Callable[[], float]) -> None:
        self._lock = lock
        self._instances = instances
        self._clock = clock
        self.by_id: dict[str, QueryState] = {}
        self._expected: Counter[str] = Counter()
        """Run id to the number of hosts' reports about the run that are being processed."""
        self._changed = threading.Condition(lock)
        self._savepoints: dict[str, RunSavepoints] = {}
        self._over: BoundedDict[str, str] = BoundedDict(REMEMBERED_ENTRIES)
        self._ended: BoundedDict[str, OverRun] = BoundedDict(REMEMBERED_ENTRIES)
        self._ended_savepoints: BoundedDict[str, Future[str]] = BoundedDict(REMEMBERED_ENTRIES)
        self._failures: BoundedDict[str, str] = BoundedDict(REMEMBERED_ENTRIES)

    # -- finding -------------------------------------------------------------------------------

    def get(self, run_id: str) -> QueryState:
        """Return a registered run. Raises ``RetiredRunError`` if it is over for good, else ``UnknownRunError``."""
        with self._lock:
            run = self.by_id.get(run_id)
            if run is None and self.is_over_for_good(run_id):
                raise RetiredRunError(f"Run {run_id} is over ({self._over[run_id]}); start the query again.")
        if run is None:
            raise UnknownRunError(f"Run {run_id} is not registered with this coordinator; it must be registered again.")
        return run

    def awaited(self, run_id: str) -> QueryState:
        """Return a registered run, as ``get`` does. Wait for a run that a host has reported, and storage is read for.

        Not for messages that must not wait for storage.
        """
        with self._changed:
            self._changed.wait_for(lambda: run_id in self.by_id or run_id not in self._expected)
        return self.get(run_id)

    def expect(self, run_id: str) -> None:
        """Take note that the report of a host about a run is being taken up."""
        with self._lock:
            self._expected[run_id] += 1

    def expect_no_more(self, run_id: str) -> None:
        """Take note that the report of a host about a run is taken up, or could not be."""
        with self._changed:
            self._expected[run_id] -= 1
            if not self._expected[run_id]:
                del self._expected[run_id]
            self._changed.notify_all()

    def is_expected(self, run_id: str) -> bool:
        """Return whether the report of a host about a run is being taken up."""
        with self._lock:
            return run_id in self._expected

    def find(self, run_id: str) -> QueryState | None:
        """Return a registered run, or None."""
        with self._lock:
            return self.by_id.get(run_id)

    def current(self) -> list[QueryState]:
        """Return the registered runs whose queries run."""
        with self._lock:
            return [run for run in self.by_id.values() if run.lifetime.is_current]

    def served(self) -> list[QueryState]:
        """Return the registered runs that hosts answer from: those whose queries run, and of ended ones the last.

        Where a query has run again, its earlier runs are replaced.
        """
        with self._lock:
            return [run for run in self.by_id.values() if run.lifetime.is_served]

    def of_session(self, session_id: str) -> list[QueryState]:
        """Return the registered runs of a driver's session."""
        with self._lock:
            return [run for run in self.by_id.values() if run.registration.session_id == session_id]

    def running(self, query: str, *, or_ended: bool = False) -> QueryState:
        """Return the running query of that name, query id or run id.

        ``or_ended``: if none runs, the ended one that is still read.

        Raises ``UnknownQueryError`` if there is none, or more than one.
        """
        running = self.current()
        found = [run for run in running if run.is_named(query)]
        if or_ended and not found:
            found = [run for run in self.served() if run.is_named(query)]
        if len(found) != 1:
            names = (f"{r.registration.name or 'unnamed'} ({r.registration.query_id}, run {r.run_id})" for r in running)
            exist = ", ".join(names) or "none"
            how_many = "Several running queries are" if found else "No running query with state is"
            raise UnknownQueryError(f"{how_many} named {query!r}; running: {exist}. Give the query id or the run id.")
        return found[0]

    # -- runs that are over --------------------------------------------------------------------

    def is_over(self, run_id: str) -> bool:
        """Return whether the run is over, for good or until its driver registers it again."""
        with self._lock:
            return run_id in self._over

    def is_over_for_good(self, run_id: str) -> bool:
        """Return whether the run is over for good."""
        with self._lock:
            return self._over.get(run_id, LEASE_OVER) != LEASE_OVER

    def remember_over(self, run_id: str, why: str) -> None:
        """Remember that a run is over, and why."""
        with self._lock:
            self._over[run_id] = why

    def ended(self) -> list[OverRun]:
        """Return the runs that have ended."""
        with self._lock:
            return list(self._ended.values())

    def lost(self) -> list[OverRun]:
        """Return the runs whose drivers were lost while their queries ran, and which nobody has started again since."""
        with self._lock:
            there = {run.registration.state_location for run in self.by_id.values()}
            found = {e.registration.state_location: e for e in self._ended.values()}  # of a place, the last one
        return [e for at, e in found.items() if e.why == LEASE_OVER and e.was_running and at not in there]

    def at_location(self, state_location: str) -> list[QueryState]:
        """Return the registered runs whose state is at ``state_location``."""
        with self._lock:
            return [run for run in self.by_id.values() if run.registration.state_location == state_location]

    # -- changing ------------------------------------------------------------------------------

    def add(self, run: QueryState, savepoints: RunSavepoints, *, was_over: bool) -> None:
        """Register a run that has claimed its state. Runs on the same state are replaced, and end.

        ``was_over``: the run was over for good when its registration began. Raises ``RetiredRunError`` if the run was
        stopped since: a host had reported it, and its storage was slower than its driver.
        """
        run_id, location = run.run_id, run.registration.state_location
        with self._lock:
            if not was_over and self.is_over_for_good(run_id):
                raise RetiredRunError(f"Run {run_id} is over ({self._over[run_id]}); it ended while it was registered.")
            replaced = self._retire(location, run_id)
            self.by_id[run_id] = run
            self._changed.notify_all()
            self._savepoints[run_id] = savepoints
            self._over.pop(run_id, None)
            self._ended.pop(run_id, None)
        for other in replaced:
            self.end(other, f"run {run_id} has replaced it")

    def remove(self, run_id: str) -> None:
        """Forget a registered run."""
        with self._lock:
            self.by_id.pop(run_id, None)

    def forget(self, run: QueryState, why: str) -> None:
        """Forget a registered run until its driver registers it again. Not to be called under the lock."""
        self.remove(run.run_id)
        self.end(run, why)
        self.remember_over(run.run_id, LEASE_OVER)

    def add_stopped(self, run: QueryState) -> None:
        """Register the last run on a state, whose query has ended, to be read on. Earlier ones are replaced, and end.

        Raises ``RetiredRunError`` if a query has begun to run there meanwhile.
        """
        location = run.registration.state_location
        with self._lock:
            running = next((other for other in self.at_location(location) if other.lifetime.is_current), None)
            if running is not None:
                raise RetiredRunError(f"Run {run.run_id} has been replaced by run {running.run_id}.")
            replaced = self._retire(location, run.run_id)
            self.by_id[run.run_id] = run
            self._changed.notify_all()
        for other in replaced:
            self.end(other, f"run {run.run_id} has replaced it")

    def _retire(self, location: str, run_id: str) -> list[QueryState]:
        """Replace the runs on a state, and return them. The lock is held."""
        replaced = self.at_location(location)
        for other in replaced:
            other.lifetime.retire(run_id)
            if other.lifetime.stopped_at is not None:  # its driver has reported its end already
                del self.by_id[other.run_id]
                self._over[other.run_id] = f"replaced by {run_id}"
        return replaced

    def stop(self, run: QueryState) -> None:
        """Take note that the query of a run has ended: nothing is active or pending; its last version is read on."""
        with self._lock:
            run.stop(self._clock())
        self._end_work(run, STOPPED)

    def end(self, run: QueryState, why: str) -> None:
        """End a run: nothing of it is active or pending any more, and nobody reads it."""
        was_running = run.lifetime.is_current
        run.lifetime.end()
        with self._lock:
            at = run.lifetime.driver_seen if why == LEASE_OVER else self._clock()
            self._ended[run.run_id] = OverRun(run.registration, at, why, was_running)
        self._end_work(run, why)

    def note_failure(self, run_id: str, failure: str) -> None:
        """Take note of the error with which the query of a run has ended; "" if it has ended without one."""
        with self._lock:
            if failure:
                self._failures[run_id] = failure[:LONGEST_FAILURE]

    def failure(self, run_id: str) -> str:
        """Return the error with which the query of a run has ended, or ""."""
        with self._lock:
            return self._failures.get(run_id, "")

    def _end_work(self, run: QueryState, why: str) -> None:
        with self._lock:
            self._instances.deactivate(run.run_id)
        run.batch.checkpoints.cancel_all("the query has ended")
        with self._lock:
            savepoints = self._savepoints.pop(run.run_id, None)
            if savepoints is not None:
                # A savepoint that is being written may still be finished.
                for request_id, request in savepoints.requests.items():
                    self._ended_savepoints[request_id] = request
        if savepoints is not None:
            savepoints.shutdown(why)

    # -- savepoints ----------------------------------------------------------------------------

    def savepoints_of(self, run_id: str) -> RunSavepoints | None:
        """Return the savepoints of a run; None if the run is over or unknown."""
        with self._lock:
            return self._savepoints.get(run_id)

    def savepoint_request(self, request_id: str) -> Future[str] | None:
        """Return the future path of a requested savepoint, or None."""
        with self._lock:
            requests = [savepoints.requests for savepoints in self._savepoints.values()]
            return next((r[request_id] for r in (*requests, self._ended_savepoints) if request_id in r), None)
