"""Handles the messages of a driver about its queries: start, leases and end of runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from backends import spans
from backends.exceptions import MissingFileError, StorageError, UnsupportedLocationError
from backends.formats.manifest import PartitionEntry
from backends.storage.checkpoint_storage import CreateIfAbsentProofs, OpenStorage
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.manifests import QUERY_FILE, ManifestLog, QueryFile
from coordinator_actor.durable.records import read_feature_views
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import CoordinatorError, FencedError, InvalidRequestError, UnknownHostError
from coordinator_actor.handlers.locations import assign_owners
from coordinator_actor.handlers.registries import LEASE_OVER, STOPPED, Handler, Registries
from coordinator_actor.messages import Completed, InputPace, QueryRegistration, RegisteredQuery
from coordinator_actor.run.compatibility import bound_elsewhere, evolved_operators, refusal_of
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.run.recovery import first_look
from coordinator_actor.savepoints.savepoint_coordinator import InBackground, RunSavepoints

log = logging.getLogger(__name__)


class Queries(Handler):
    """Registers runs, completes their versions and ends them.

    ``coordinator_id`` is written to the claimed epochs. ``_registering`` has a lock per state location, held while a
    run claims the state there; the registries' lock guards the dict.
    """

    def __init__(
        self,
        coordinator_id: str,
        registries: Registries,
        conf: CoordinatorConf,
        open_storage: OpenStorage,
        in_background: InBackground,
    ) -> None:
        super().__init__(registries)
        self._coordinator_id = coordinator_id
        self._conf = conf
        self._open_storage = open_storage
        self._in_background = in_background
        self._proofs = CreateIfAbsentProofs()
        self._registering: dict[str, threading.Lock] = {}

    def register_query(
        self, registration: QueryRegistration, initial: Mapping[str, Mapping[int, PartitionEntry]] | None = None
    ) -> RegisteredQuery:
        with self._registries.lock:
            registering = self._registering.setdefault(registration.state_location, threading.Lock())
        with registering:
            run = self._runs.find(registration.run_id)
            if run is not None:
                run.lifetime.driver_seen = self._registries.clock()
                return RegisteredQuery(None, run.manifests.epoch, run.versions.completed)
            trace = spans.run(registration.run_id)
            with spans.span("coordinator.register", trace, query_id=registration.query_id) as span:
                answer = self._register(registration, initial)
                span.note(version=answer.completed_version, epoch=answer.epoch, refused=answer.refusal is not None)
                return answer

    def _register(
        self, registration: QueryRegistration, initial: Mapping[str, Mapping[int, PartitionEntry]] | None
    ) -> RegisteredQuery:
        was_over = self._runs.is_over_for_good(registration.run_id)
        storage = self._open_storage(registration.state_location, registration.storage_options)
        spark = self._open_storage(registration.checkpoint_location, registration.storage_options)
        manifests = ManifestLog(storage, self._coordinator_id)
        commits = SparkCommits(spark)
        look = first_look(registration, manifests, commits, self._proofs.require)
        was_known = look.newest is not None and look.newest.run_id == registration.run_id
        if manifests.epochs.is_superseded(look.newest, registration.run_id):
            return RegisteredQuery(f"Run {registration.run_id} has been replaced by a newer one.", 0, 0)
        if look.newest is not None and look.newest.ends(registration.run_id):
            ended = (
                f"{look.newest.coordinator_id} has rewritten files in the state of run {registration.run_id} while no "
                "coordinator knew of the run. Start the query again."
            )
            return RegisteredQuery(ended, 0, 0)
        if look.query is None and (look.newest is not None or manifests.manifests):
            # It is written before the first epoch, and records the number of key groups.
            raise MissingFileError(
                f"{storage.full_location(QUERY_FILE)} does not exist, but its directory has state: it was removed, or "
                "is kept elsewhere. Restore it from a copy."
            )
        completed = look.completed
        lag = replace(self._conf.snapshot_lag, maintenance_interval=registration.maintenance_interval)
        run = QueryState(registration, manifests, commits, self._registries.clock, lag)
        run.feature_views = look.views
        # No host holds anything of a run that has not claimed the state.
        run.assignment.awaits_reports = was_known
        if was_known:
            run.files_in_use.await_renewals(self._registries.clock())
        run.versions.load(manifests.chain(), completed)
        refusal = refusal_of(run, look.query, look.place)
        if refusal is not None:
            return RegisteredQuery(refusal, 0, completed)
        try:
            self._proofs.require(storage)
        except UnsupportedLocationError as error:
            return RegisteredQuery(str(error), 0, completed)
        run.adopt(evolved_operators(run))
        if look.query is None:
            manifests.ensure_query_file(QueryFile(registration.query_id, registration.key_groups))
        refusal = bound_elsewhere(run, look.place)
        if refusal is not None:
            return RegisteredQuery(refusal, 0, completed)
        self._finish_repeats(registration.state_location)
        with spans.step("coordinator.claim", was_known=was_known, rescaled=run.versions.is_rescaled):
            self._claim(run, initial, was_known=was_known)
        savepoints = RunSavepoints(
            run, self._open_storage, self._in_background, self._registries.clock, self._conf.savepoint_timeout
        )
        self._runs.register_run(run, savepoints, was_over=was_over)
        if run.versions.completed and not was_known:
            # Hosts load existing state while Spark plans the first batch.
            with suppress(UnknownHostError):
                assign_owners(self._registries, run)
        log.info(
            "Registered query %s (run %s) at version %d, epoch %d",
            registration.query_id,
            registration.run_id,
            run.versions.completed,
            manifests.epoch,
        )
        return RegisteredQuery(None, manifests.epoch, run.versions.completed)

    def _finish_repeats(self, state_location: str) -> None:
        """Write manifests for all acknowledged changes of runs on this state: a new run is about to replace them."""
        for other in self._runs.at_location(state_location):
            with other.lock:
                if other.lifetime.is_current:
                    try:
                        other.perform(other.machine.wait_no_more(self._registries.clock()))
                    except FencedError:
                        log.info("Run %s was already replaced in another cluster", other.run_id)

    @staticmethod
    def _claim(run: QueryState, initial: Mapping[str, Mapping[int, PartitionEntry]] | None, *, was_known: bool) -> None:
        """Claim the state. The run is not visible to others before this has succeeded."""
        while True:
            run.claim(initial)
            operators = evolved_operators(run)
            if operators == run.registration.operators:
                break
            # An older run has changed the schemas in the meantime: this one has to follow them.
            run.adopt(operators)
        run.take_over(was_known=was_known)

    def renew_leases(self, run_ids: Sequence[str]) -> list[str]:
        with self._registries.lock:
            return [run_id for run_id in run_ids if not self._renewed(run_id)]

    def _renewed(self, run_id: str) -> bool:
        """Renew the lease of a run. Return whether the run is known: registered, or permanently over."""
        run = self._runs.find(run_id)
        if run is not None and not run.lifetime.ended:
            run.lifetime.driver_seen = self._registries.clock()
            self._registries.needed()
        return run is not None or self._runs.is_over_for_good(run_id)

    def driver_heartbeat(
        self, run_id: str, *, is_stopping: bool = False, is_at_work: bool = False, pace: InputPace | None = None
    ) -> bool:
        with self._registries.lock:
            run = self._runs.find(run_id)
            is_known = self._renewed(run_id)
        if run is None or run.lifetime.ended:
            return is_known
        if pace is not None and pace.behind_seconds is not None:
            run.looked_at = self._registries.clock() - pace.behind_seconds
        with run.lock:
            try:
                # The progress event of a batch may have reached a coordinator that was being restarted.
                run.catch_up()
                if not is_stopping:
                    run.end_recorded_hold()
            finally:  # failing storage must not hide the batch
                run.spark.record_heartbeat(is_at_work, run.versions.completed, self._registries.clock())
                run.spark.pace = pace
        return True

    def batch_committed(self, run_id: str, batch_id: int, *, by_driver: bool = False) -> bool:
        run = self._runs.awaited(run_id)
        if by_driver and run.lifetime.is_current and run.versions.completed == batch_id:
            run.spark_logs.has(batch_id)  # without the lock: tasks of the next batch may arrive during the request
        with run.lock:
            # Also for a query that has ended: its last batch may be committed without a report.
            before = run.versions.completed
            if not run.lifetime.is_served or batch_id + 1 <= before:
                return False
            if run.is_taken_up:
                self.take_up_versions(run_id)
                return run.versions.completed > before
            run.advance(batch_id + 1, is_own=by_driver)
            return True

    def see_commit(self, run_id: str, batch_id: int, host_id: str) -> Completed:
        self.batch_committed(run_id, batch_id)
        return self._runs.get(run_id).completed_for(host_id)

    def deactivate_instances(self, run_id: str) -> bool:
        run = self._runs.find(run_id)
        if run is not None:
            self._finish(run)
        with self._registries.lock:
            self._registries.instances.deactivate(run_id)
            run = self._runs.find(run_id)
            self._runs.remove(run_id)
            by = None if run is None else run.lifetime.retired_by
            why = STOPPED if by is None else f"replaced by {by}"
            self._runs.remember_over(run_id, why)
        if run is not None:
            self._runs.end(run, why)
        return True

    def serve_ended(self, registration: QueryRegistration, failure: str = "") -> RegisteredQuery:
        with self._registries.lock:
            self._runs.note_failure(registration.run_id, failure)
            registering = self._registering.setdefault(registration.state_location, threading.Lock())
        with registering:
            run = self._runs.find(registration.run_id)
            if run is None:
                with spans.span("coordinator.take_up_ended", spans.run(registration.run_id)):
                    return self._take_up_ended(registration)
            if not run.lifetime.is_served:
                self.deactivate_instances(run.run_id)
                return RegisteredQuery(f"Run {run.run_id} has been replaced by run {run.lifetime.retired_by}.", 0, 0)
            if run.lifetime.is_current:
                self._finish(run)
                self._runs.stop(run)
            run.lifetime.driver_seen = self._registries.clock()
            return RegisteredQuery(None, run.manifests.epoch, run.versions.completed)

    def _take_up_ended(self, registration: QueryRegistration) -> RegisteredQuery:
        """Register a run whose query has ended, and that this coordinator, after a restart, does not know."""
        run_id = registration.run_id
        if self._runs.is_over_for_good(run_id):
            return RegisteredQuery(f"Run {run_id} is over.", 0, 0)
        storage = self._open_storage(registration.state_location, registration.storage_options)
        manifests = ManifestLog(storage, self._coordinator_id)
        newest = manifests.epochs.newest()
        if newest is None or newest.run_id != run_id:
            by = "the state no longer exists" if newest is None else f"run {newest.run_id} has replaced it"
            return RegisteredQuery(f"Run {run_id} is permanently over: {by} at {registration.state_location}.", 0, 0)
        commits = SparkCommits(self._open_storage(registration.checkpoint_location, registration.storage_options))
        completed = commits.next_batch()
        manifests.refresh()
        run = QueryState(registration, manifests, commits, self._registries.clock)
        run.feature_views = read_feature_views(storage)
        run.assignment.awaits_reports = True
        run.take_up(completed, newest.epoch)
        run.adopt(evolved_operators(run))
        if completed not in run.versions.chain:
            return RegisteredQuery(f"Version {completed} of run {run_id} has no manifest.", 0, completed)
        run.stop(self._registries.clock())
        self._runs.register_ended_run(run)
        log.info("Run %s, whose query has ended, can be read at version %d", run_id, completed)
        return RegisteredQuery(None, newest.epoch, completed)

    def take_up_versions(self, run_id: str, behind: float | None = None) -> RegisteredQuery:
        run = self._runs.get(run_id)
        run.lifetime.require_served()
        began = self._registries.clock()
        if behind is not None and run.looked_at is None:
            run.looked_at = began - behind  # before requests to storage, which may fail from the beginning
        if run.lifetime.stopped_at is None:
            raise InvalidRequestError(f"Run {run_id} runs here: its versions are completed by its own batches.")
        with run.lock:
            newest = run.manifests.epochs.newest()
            if newest is None or newest.run_id != run_id:
                by = "no run" if newest is None else f"run {newest.run_id}"
                return RegisteredQuery(f"The state of run {run_id} is claimed by {by}.", 0, run.versions.completed)
            completed = run.commits.next_batch()
            exchange, served = run.last_exchange, run.versions.chain.get(run.versions.completed)
            # The served version may get another manifest: files were exchanged, as when keys are forgotten, or some
            # tasks of its batch have run again, whose changes are named after Spark's commit.
            is_news = completed > run.versions.completed or newest.epoch > run.manifests.epoch
            if is_news or run.manifests.has_news():
                run.manifests.refresh()
                # A batch may be committed that no manifest names: the query's own coordinator reconstructs it.
                if completed in run.manifests.chain():
                    run.take_up(completed, newest.epoch)
                    current = run.versions.chain.get(completed)
                    is_same = served is not None and current is not None and served.version == current.version
                    if run.last_exchange != exchange or (is_same and served != current):
                        run.machine.rewriting.exchanged(self._registries.clock())
        if run.looked_at is not None:
            run.looked_at = began
        return RegisteredQuery(None, newest.epoch, run.versions.completed)

    def _finish(self, run: QueryState) -> None:
        """Complete the versions that Spark has committed, and write the files for the next run. The query has ended."""
        steps: tuple[tuple[Callable[[], None], str], ...] = (
            # The commit of the last batch may not have been reported yet. Only this coordinator knows its repeated
            # acknowledgements.
            (run.catch_up, "The last version of run %s is not completed; the next run does it"),
            # The snapshots only save time: the next run takes new ones.
            (run.name_snapshots, "The last snapshots of run %s are not named in a manifest"),
            (run.write_history, "The last checkpoints of run %s are not in the history"),
        )
        with run.lock:
            if not run.lifetime.is_current:
                return
            for step, warning in steps:
                try:
                    step()
                except (StorageError, CoordinatorError):
                    log.warning(warning, run.run_id, exc_info=True)

    def overdue(self, now: float) -> list[QueryState]:
        """Return the runs whose drivers have not renewed their leases for the driver timeout before ``now``."""
        with self._registries.lock:
            return [r for r in self._runs.by_id.values() if now - r.lifetime.driver_seen > self._conf.driver_timeout]

    def forget(self, overdue: Sequence[QueryState]) -> None:
        """End runs whose leases are over. Not to be called under the lock of the registries."""
        for run in overdue:
            # Not permanently: a machine may have slept, and the driver (only the driver) may bring the run back.
            log.warning("The driver of run %s has sent no heartbeat; the run is forgotten", run.run_id)
            self._runs.forget(run, LEASE_OVER)
