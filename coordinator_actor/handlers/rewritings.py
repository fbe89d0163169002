"""The messages of who writes files of a running query anew: hold its batches, then exchange the files."""

from __future__ import annotations

from contextlib import suppress

from coordinator_actor.exceptions import InvalidRequestError, UnknownHostError
from coordinator_actor.handlers.completion import catch_up
from coordinator_actor.handlers.owners import assigned
from coordinator_actor.handlers.registries import Registries
from coordinator_actor.messages import HeldQuery
from coordinator_actor.query.files_in_use import BUSY_SECONDS
from coordinator_actor.query.query_state import QueryState


class Rewritings:
    """Holds runs, and exchanges their files. Whatever changes a run is done under its lock."""

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def hold_query(self, query: str, holder: str, seconds: float) -> HeldQuery:
        """See ``CoordinatorPort``."""
        run = self._runs.running(query)
        now = self._registries.clock()
        with run.lock:
            run.require_current()
            if seconds <= 0:
                run.rewriting.end(holder)
                return _held(run, "nobody holds the query")
            other = run.rewriting.at(now)
            if other is not None and other.holder != holder:
                raise InvalidRequestError(
                    f"The files of run {run.run_id} are being written anew by {other.holder} already; ask again when "
                    "that is done."
                )
            if run.held_from is not None:
                raise InvalidRequestError(
                    f"Run {run.run_id} stops with a savepoint: its files are not written anew meanwhile. Do it behind "
                    "the stop, with the checkpoint location."
                )
            catch_up(self._runs, run)
            hold = run.rewriting.begin(holder, run.next_batch_to_hold, now, seconds)
            waits_for = self._under_way(run, hold.batch_id, now)
            if waits_for is None:
                run.name_snapshots()
            return _held(run, waits_for)

    def adopt_rewritten(self, run_id: str, holder: str, epoch: int, path: str) -> None:
        """See ``CoordinatorPort``."""
        run = self._runs.get(run_id)
        with run.lock:
            run.require_current()
            if path in run.manifests.rewritten:
                return  # the message has come twice
            now = self._registries.clock()
            hold = run.rewriting.at(now)
            is_held = hold is not None and hold.holder == holder and self._under_way(run, hold.batch_id, now) is None
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

    def _under_way(self, run: QueryState, batch_id: int, now: float) -> str | None:
        """Return what is written or copied of a run whose batches from ``batch_id`` on are held; None if nothing is."""
        versions = run.versions
        savepoints = self._runs.savepoints_of(run.run_id)
        if not versions.completed == max(versions.chain, default=-1) == batch_id:
            return f"batch {batch_id - 1}"
        if run.files_in_use.is_uploading(now):
            return f"uploads of snapshots, or {BUSY_SECONDS:.0f} s after a restart of the coordinator"
        if run.assignment.awaits_reports and self._registries.expects_reports():
            return "hosts, which report to a coordinator that has just been started"
        if savepoints is not None and savepoints.pending():
            return "a savepoint"
        return None


def _held(run: QueryState, waits_for: str | None) -> HeldQuery:
    return HeldQuery(run.registration, run.manifests.epoch, run.versions.completed, waits_for)
