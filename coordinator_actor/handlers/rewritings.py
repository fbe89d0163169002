"""Handles messages for rewriting files of a running query: hold its batches, then exchange the files."""

from __future__ import annotations

from contextlib import suppress

from coordinator_actor.exceptions import InvalidRequestError, UnknownHostError
from coordinator_actor.handlers.completion import catch_up
from coordinator_actor.handlers.owners import assigned
from coordinator_actor.handlers.registries.registries import Registries
from coordinator_actor.messages import HeldQuery
from coordinator_actor.query.batch.rewriting_hold import Hold
from coordinator_actor.query.files.files_in_use import BUSY_SECONDS
from coordinator_actor.query.query_state import QueryState


class Rewritings:
    """Holds runs, and exchanges their files. Whatever changes a run is done under its lock."""

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def hold_query(self, query: str, holder: str, seconds: float, *, batches: bool = False) -> HeldQuery:
        """See ``CoordinatorPort``."""
        run = self._runs.running(query, or_ended=seconds <= 0)
        now = self._registries.clock()
        with run.lock:
            if seconds <= 0:
                run.rewriting.end(holder)
                return self._held(run, "nobody holds the query")
            run.lifetime.require_current()
            other = run.rewriting.at(now)
            if other is not None and other.holder != holder:
                raise InvalidRequestError(
                    f"The files of run {run.run_id} are being written anew by {other.holder} already; ask again when "
                    "that is done."
                )
            if run.savepoint_hold.batch_id is not None:
                raise InvalidRequestError(
                    f"Run {run.run_id} stops with a savepoint: its files are not written anew meanwhile. Do it after "
                    "the stop, with the checkpoint location."
                )
            catch_up(self._runs, run)
            # What may take long is waited for before any batch has to wait.
            waits_for = self._copied(run, now)
            first = run.next_batch_to_hold if batches and waits_for is None else None
            hold = run.rewriting.begin(holder, first, now, seconds)
            waits_for = waits_for or _worked_on(run, hold)
            if waits_for is None:
                run.name_snapshots()
            return self._held(run, waits_for)

    def adopt_rewritten(self, run_id: str, holder: str, epoch: int, path: str) -> None:
        """See ``CoordinatorPort``."""
        run = self._runs.get(run_id)
        with run.lock:
            run.lifetime.require_current()
            if path in run.manifests.rewritten:
                return  # the message has come twice
            now = self._registries.clock()
            hold = run.rewriting.at(now)
            is_held = hold is not None and hold.holder == holder
            is_held = is_held and not self._copied(run, now) and not _worked_on(run, hold)
            record = run.manifests.record(path)
            if not is_held or run.manifests.epoch != epoch or record.version != run.versions.completed:
                raise InvalidRequestError(
                    f"Run {run_id} has gone on (version {run.versions.completed}, epoch {run.manifests.epoch}) since "
                    f"its files up to version {record.version} were written anew in epoch {epoch}. Nothing was "
                    "changed; begin again."
                )
            with suppress(UnknownHostError):  # no host is there that would have to be told
                assigned(self._registries, run)
            run.adopt_rewritten(path, record)
            run.rewriting.exchanged(now)

    def _copied(self, run: QueryState, now: float) -> str | None:
        """Return the name of what copies the state of a run, or may do so and has not reported yet; None if nothing
        does.
        """
        savepoints = self._runs.savepoints_of(run.run_id)
        if run.files_in_use.is_uploading(now):
            return f"uploads of snapshots, or {BUSY_SECONDS:.0f} s after a restart of the coordinator"
        if run.assignment.awaits_reports and self._registries.expects_reports():
            return "hosts, which report to a coordinator that has just been started"
        if savepoints is not None and savepoints.pending():
            return "a savepoint"
        return None

    def _held(self, run: QueryState, waits_for: str | None) -> HeldQuery:
        with self._registries.lock:
            hosts = self._registries.hosts.nodes_of_session(run.registration.session_id)
        untold = tuple(host_id for host_id in hosts if run.last_exchange and not run.rewriting.is_clean(host_id))
        return HeldQuery(run.registration, run.manifests.epoch, run.versions.completed, waits_for, untold)


def _worked_on(run: QueryState, hold: Hold | None) -> str | None:
    """Return which batch is under way though the run is held; None if none is, so that nothing is written."""
    first = None if hold is None else hold.batch_id
    if first is None:
        return "the batches, which are not held"
    is_quiet = run.versions.completed == max(run.versions.chain, default=-1) == first
    return None if is_quiet else f"batch {first - 1}"
