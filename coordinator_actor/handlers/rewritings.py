"""Handles messages about rewriting files of a running query, and messages about savepoints."""

from __future__ import annotations

from contextlib import suppress

from backends.exceptions import StorageError
from coordinator_actor.exceptions import InvalidRequestError, LapsedHoldError, RetiredRunError, UnknownHostError
from coordinator_actor.handlers.locations import assign_owners
from coordinator_actor.handlers.registries import Handler
from coordinator_actor.messages import HeldQuery, SavepointExported, SavepointStatus
from coordinator_actor.run.holds import BUSY_SECONDS, Hold
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.savepoints.savepoint_coordinator import status_of


class Rewritings(Handler):
    """Holds runs, and exchanges their files. All changes to a run are made under its lock."""

    def hold_query(
        self, query: str, holder: str, seconds: float, *, batches: bool | None = None, hold: str = ""
    ) -> HeldQuery:
        run = self._runs.running(query, or_ended=seconds <= 0)
        with run.lock:
            if seconds <= 0:
                run.machine.rewriting.end(holder)
                self._announce_owners(run)
                return self._held(run, None, "no holder holds the query")
            run.lifetime.require_current()
            # The message may have waited for the lock until the hold was over.
            now = self._registries.clock()
            current = run.machine.rewriting.at(now)
            if hold and (current is None or current.id != hold):
                raise self._lapsed(run)
            if current is not None and current.holder != holder:
                raise InvalidRequestError(
                    f"The files of run {run.run_id} are already being rewritten by {current.holder}; "
                    "retry when that is done."
                )
            if run.machine.savepoint_hold.batch_id is not None:
                raise InvalidRequestError(
                    f"Run {run.run_id} stops with a savepoint: its files cannot be rewritten now. Do it after "
                    "the stop, with the checkpoint location."
                )
            renewed = current if hold and current is not None else run.machine.rewriting.begin(holder, now, seconds)
            run.catch_up()
            # Wait for long operations before any batch has to wait.
            waits_for = self._copied(run, now)
            first = None if batches is False else renewed.batch_id
            if batches and waits_for is None and first is None:
                first = run.machine.next_batch_to_hold
            # Requests to storage may have taken long: the hold starts now.
            renewed = run.machine.rewriting.renew(renewed, self._registries.clock(), seconds, first)
            waits_for = waits_for or _worked_on(run, renewed)
            if waits_for is None:
                run.name_snapshots()
            return self._held(run, renewed, waits_for)

    def adopt_rewritten(self, run_id: str, hold: str, epoch: int, path: str) -> None:
        run = self._runs.get(run_id)
        with run.lock:
            run.lifetime.require_current()
            if path in run.manifests.rewritten:
                return  # the message was repeated
            record = run.manifests.record(path)
            now = self._registries.clock()
            current = run.machine.rewriting.at(now)
            if current is None or current.id != hold:
                raise self._lapsed(run)
            is_quiet = not self._copied(run, now) and not _worked_on(run, current)
            if not is_quiet or run.manifests.epoch != epoch or record.version != run.versions.completed:
                raise InvalidRequestError(
                    f"Run {run_id} has advanced (version {run.versions.completed}, epoch {run.manifests.epoch}) since "
                    f"its files up to version {record.version} were rewritten in epoch {epoch}. Nothing was changed; "
                    "start over."
                )
            with suppress(UnknownHostError):  # there is no host that needs to learn of it
                assign_owners(self._registries, run)
            try:
                run.adopt_rewritten(path, record)
            except StorageError:
                run.lifetime.ended = True
            else:
                run.machine.rewriting.exchanged(now)
                return
        # The manifest may exist, or may appear later: then the exchange counts, and the program that has asked for it
        # removes the old files, which this run would continue with. A new claim of the state settles it.
        self._runs.forget(run, "it is unknown whether its files were exchanged")
        raise StorageError(
            f"Storage did not say whether the files of run {run_id} were exchanged. The next heartbeat of its driver "
            "registers the run again, which settles that. Forget the keys again if the files were not exchanged."
        )

    def _announce_owners(self, run: QueryState) -> None:
        """Assign the partitions of a run after an exchange, so that each host learns the heads of its partitions.

        After a restart of the coordinator no batch may come for long that would assign them.
        """
        if run.last_exchange and not run.assignment.is_made:
            before = run.assignment.current
            with suppress(UnknownHostError):
                if assign_owners(self._registries, run) is not before:
                    run.announce()

    @staticmethod
    def _lapsed(run: QueryState) -> LapsedHoldError:
        return LapsedHoldError(
            f"The hold of run {run.run_id} has lapsed, or its coordinator was replaced: files written under it may be "
            "gone. Nothing was changed; start from scratch with a new hold."
        )

    def _copied(self, run: QueryState, now: float) -> str | None:
        """Return what copies a run's state, or may do so without having reported yet; None if nothing does."""
        savepoints = self._runs.savepoints_of(run.run_id)
        if run.files_in_use.is_uploading(now):
            return f"uploads of snapshots, or {BUSY_SECONDS:.0f} s after a restart of the coordinator"
        if run.assignment.awaits_reports and self._registries.expects_reports():
            return "hosts, which report to a coordinator that has just been started"
        if savepoints is not None and savepoints.pending():
            return "a savepoint"
        return None

    def _held(self, run: QueryState, hold: Hold | None, waits_for: str | None) -> HeldQuery:
        with self._registries.lock:
            hosts = self._registries.hosts.nodes_of_session(run.registration.session_id)
        untold = tuple(
            host_id for host_id in hosts if run.last_exchange and not run.machine.rewriting.is_clean(host_id)
        )
        held_by = "" if hold is None else hold.id
        return HeldQuery(run.registration, run.manifests.epoch, run.versions.completed, waits_for, untold, held_by)


def _worked_on(run: QueryState, hold: Hold | None) -> str | None:
    """Return which batch is under way despite the hold; None if none is, so that nothing is written."""
    first = None if hold is None else hold.batch_id
    if first is None:
        return "the batches, which are not held"
    is_quiet = run.versions.completed == max(run.versions.chain, default=-1) == first
    return None if is_quiet else f"batch {first - 1}"


# The messages about savepoints: users request them, hosts report what they have exported.


class Savepoints(Handler):
    """Begins savepoints of running queries, and forwards the reports of hosts about them."""

    def trigger_savepoint(
        self, request_id: str, query: str, path: str | None = None, *, stop: bool = False
    ) -> SavepointStatus:
        status = self.savepoint_status(request_id)
        if status.known:
            return status
        run = self._runs.running(query)
        with run.lock:
            run.lifetime.require_current()
            run.catch_up()
            base = path if path is not None else f"{run.registration.state_location}/savepoints"
            savepoints = self._runs.savepoints_of(run.run_id)
            if savepoints is None:
                raise RetiredRunError(f"Run {run.run_id} is over; start the query again.")
            savepoints.trigger(request_id, base, stop=stop)
        return self.savepoint_status(request_id)

    def savepoint_status(self, request_id: str) -> SavepointStatus:
        request = self._runs.savepoint_request(request_id)
        return SavepointStatus(known=False) if request is None else status_of(request)

    def savepoint_exported(self, message: SavepointExported) -> None:
        self._require_host(message.host_id, message.incarnation)
        savepoints = self._runs.savepoints_of(message.run_id)
        if savepoints is not None:
            savepoints.exported(message)
