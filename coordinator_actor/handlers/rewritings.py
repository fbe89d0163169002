"""The messages of who writes files of a running query anew: hold its batches, then exchange the files."""

from __future__ import annotations

from coordinator_actor.exceptions import InvalidRequestError
from coordinator_actor.handlers.completion import catch_up
from coordinator_actor.handlers.registries import Registries
from coordinator_actor.messages import HeldQuery
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
                return self._held(run, is_quiet=False)
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
            is_quiet = self._is_quiet(run, hold.batch_id, now)
            if is_quiet:
                run.name_snapshots()
            return self._held(run, is_quiet=is_quiet)

    def adopt_rewritten(self, run_id: str, holder: str, epoch: int, path: str) -> None:
        """See ``CoordinatorPort``."""
        run = self._runs.get(run_id)
        with run.lock:
            run.require_current()
            if path in run.manifests.rewritten:
                return  # the message has come twice
            now = self._registries.clock()
            hold = run.rewriting.at(now)
            is_held = hold is not None and hold.holder == holder and self._is_quiet(run, hold.batch_id, now)
            record = run.manifests.record(path)
            if not is_held or run.manifests.epoch != epoch or record.version != run.versions.completed:
                raise InvalidRequestError(
                    f"Run {run_id} has gone on (version {run.versions.completed}, epoch {run.manifests.epoch}) since "
                    f"its files up to version {record.version} were written anew in epoch {epoch}. Nothing was "
                    "changed; begin again."
                )
            run.adopt_rewritten(path, record)
            run.rewriting.exchanged(now)

    def _is_quiet(self, run: QueryState, batch_id: int, now: float) -> bool:
        """Return whether nothing is written for a run any more, and nothing copied, until its batches go on."""
        versions = run.versions
        savepoints = self._runs.savepoints_of(run.run_id)
        return (
            versions.completed == batch_id
            and max(versions.chain, default=-1) == batch_id
            and not run.files_in_use.is_uploading(now)
            and (savepoints is None or not savepoints.pending())
        )

    @staticmethod
    def _held(run: QueryState, *, is_quiet: bool) -> HeldQuery:
        return HeldQuery(run.registration, run.manifests.epoch, run.versions.completed, is_quiet)
