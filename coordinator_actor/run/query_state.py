"""One registered run of a query: ``QueryState`` reads what the state machine needs, and writes what it decides."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import structs

from backends import spans
from backends.encoding.operator_schema import OperatorSchema
from backends.formats.manifest import PartitionEntry
from backends.formats.manifest_chain import Layout
from backends.storage.requests import used_together
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker, SnapshotLag, SnapshotLagConf
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter, TaskKey
from coordinator_actor.durable.fencing import RecordFiles
from coordinator_actor.durable.manifests import ManifestLog, RewrittenFiles
from coordinator_actor.durable.records import CheckpointRecords, LookupRecords, write_feature_views
from coordinator_actor.durable.spark_commits import SparkCommits, SparkLogs
from coordinator_actor.exceptions import (
    IncompleteBatchError,
    InvalidRequestError,
    LineageError,
    RetiredRunError,
    UnknownRunError,
)
from coordinator_actor.feature_views import FeatureView
from coordinator_actor.messages import MIRROR, Acknowledge, Completed, OperatorSpec, QueryRegistration
from coordinator_actor.run.history import CheckpointHistory, SparkAtWork
from coordinator_actor.run.holds import FilesInUse, KnownFiles, SavepointHold
from coordinator_actor.run.owners import RunAssignment
from coordinator_actor.run.recovery import StoredChanges, incomplete_message, stored_changes
from coordinator_actor.run.state_machine import RunMachine, WriteManifest
from coordinator_actor.run.versions import LookedUpVersions, QueryVersions, tasks_of

log = logging.getLogger(__name__)

LAG_SECONDS = 5.0
"""A follower looks about once a second. It is late if its last successful look began longer ago than this."""
RECORDS_EVERY = 60
"""One maintenance in this many looks for old claims and savepoint records."""


class RunLifetime:
    """The lifetime of a run: running, ended and still read, replaced by a newer run, or over.

    Needs no lock: each value is replaced as a whole. Moments are of the coordinator's clock. ``driver_seen`` is the
    time of the driver's last message. ``stopped_at`` is when the query ended: from then on the run changes nothing, and
    hosts continue to answer from its last version, until the run is over (``ended``). ``retired_by`` is the newer run
    that has replaced this one. ``maintained`` is when garbage was removed last; at first a time before the run began,
    which differs from run to run, so that the maintenance of runs that begin together is staggered.
    """

    def __init__(self, registration: QueryRegistration, now: float) -> None:
        self._registration = registration
        self.driver_seen = now
        share = zlib.crc32(registration.run_id.encode()) / (1 << 32)
        self.maintained = now - share * registration.maintenance_interval
        self.ended = False
        self.stopped_at: float | None = None
        self.retired_by: str | None = None
        self._maintenances = 0

    def maintained_at(self, now: float) -> None:
        """Record that garbage is being removed."""
        self.maintained = now
        self._maintenances += 1

    @property
    def records_are_due(self) -> bool:
        """Return whether this maintenance looks for records that are no longer needed: the first one, and few more."""
        return self._maintenances % RECORDS_EVERY == 1

    @property
    def is_served(self) -> bool:
        """Return whether hosts answer from the run: it is neither over nor replaced."""
        return not self.ended and self.retired_by is None

    @property
    def is_current(self) -> bool:
        """Return whether the query runs: it has not ended, and the run is neither over nor replaced."""
        return self.is_served and self.stopped_at is None

    def require_served(self) -> None:
        """Raise ``RetiredRunError`` if the run is over or replaced."""
        if not self.is_served:
            self.require_current()

    def require_current(self) -> None:
        """Raise ``RetiredRunError`` if the query has ended, or the run is over or replaced."""
        run = self._registration
        if self.retired_by is not None:
            raise RetiredRunError(
                f"Run {run.run_id} of query {run.query_id} has been replaced by run {self.retired_by} on the same "
                f"checkpoint ({run.checkpoint_location}); only the newer one may continue."
            )
        if self.ended or self.stopped_at is not None:
            raise RetiredRunError(f"Run {run.run_id} is over; start the query again.")


class QueryState:
    """One registered run of a query: its state machine, and the storage around it.

    ``lock`` guards all writes to the run and its parts: ``machine`` with its ``versions``, and ``files_in_use``. It is
    held during requests to the run's storage, so messages that must not wait for storage do not take the lock. They
    read values that are only ever replaced as a whole: the chain and the completed version, the registration, the
    announcements to hosts, and the lifetime of the run, which they also write. ``assignment``, the checkpoints and
    ``spark_logs`` have separate locks. ``is_taken_up``: this coordinator has not claimed the state, and may only read
    it. ``looked_at`` is when a follower's last successful look at storage began, or when the state of a mirror
    (``is_mirror``) was that of the mirrored query; None for other runs. ``feature_views`` are those whose record is in
    the state of the query. ``unfinished_records`` are the paths of records that were being written at the last look for
    them. ``copy_lags`` has, by operator and partition, how many versions each standby copy that exists is behind.
    ``when_completed`` is called after each completed version, for savepoints that wait for it.
    """

    def __init__(
        self,
        registration: QueryRegistration,
        manifests: ManifestLog,
        commits: SparkCommits,
        clock: Callable[[], float],
        snapshot_lag: SnapshotLagConf | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.run_id = registration.run_id
        self.manifests = manifests
        self.commits = commits
        operators = registration.operators
        self.spark_logs = SparkLogs(commits, clock, uses_time=any(o.uses_time for o in operators))
        self.spark = SparkAtWork()
        self.lifetime = RunLifetime(registration, clock())
        self.counter = CheckpointIDCounter()
        layouts = {o.name: Layout(o.name, o.num_partitions, o.backend) for o in operators}
        self.versions = QueryVersions(layouts, registration.key_groups)
        self.machine = RunMachine(self.run_id, self.versions, self.counter)
        self.registration = registration
        self.adopt(operators)
        self.copy_lags: Mapping[str, list[list[int]]] = {}
        self.unfinished_records: set[str] = set()
        self.assignment = RunAssignment(self.run_id, self.tasks(), registration.query_id, registration.standby_replicas)
        self.files_in_use = FilesInUse()
        self.files = KnownFiles()
        self.looked_up = LookedUpVersions(LookupRecords(manifests.storage), self.versions)
        self.history = CheckpointHistory(
            CheckpointRecords(RecordFiles(manifests.storage)),
            clock(),
            lambda: used_together(manifests.storage.used, commits.used),
        )
        self.feature_views: tuple[FeatureView, ...] = ()
        self.when_completed: Callable[[], None] = lambda: None
        self.is_taken_up = False
        self.looked_at: float | None = None
        self._announced: Completed | None = None
        self._announced_to: Mapping[str, Completed] = {}
        self._clock = clock
        self.snapshot_lag = SnapshotLag(self.run_id, self.tasks(), clock(), conf=snapshot_lag)
        self._slow: int | None = None  # the checkpoint that a warning was made of

    @contextmanager
    def lock_if_free(self) -> Iterator[bool]:
        """Hold the lock unless another thread does, which may wait for storage. Yield whether it is held."""
        is_held = self.lock.acquire(blocking=False)
        try:
            yield is_held
        finally:
            if is_held:
                self.lock.release()

    # -- what the program declares -------------------------------------------------------------

    def adopt(self, operators: tuple[OperatorSpec, ...]) -> None:
        """Take the declarations with their schemas evolved over all runs. Nothing else of them differs."""
        self.registration = structs.replace(self.registration, operators=operators)
        self._specs = {o.name: o for o in operators}
        self.machine.schema_ids = {o.name: OperatorSchema.from_json(o.schema).id for o in operators}

    @property
    def stats(self) -> CheckpointStatsTracker:
        """Return the figures of the run's micro-batches."""
        return self.machine.checkpoints.stats

    def operator(self, name: str) -> OperatorSpec | None:
        return self._specs.get(name)

    def tasks(self) -> Iterator[TaskKey]:
        """Return every declared partition of every operator."""
        return iter(tasks_of(self.versions.layouts))

    def has_partition(self, operator: str, partition: int) -> bool:
        spec = self.operator(operator)
        return spec is not None and 0 <= partition < spec.num_partitions

    def require_partition(self, operator: str, partition: int) -> None:
        """Raise ``InvalidRequestError`` if the run has no such partition."""
        spec = self.operator(operator)
        if spec is None:
            raise InvalidRequestError(
                f"Run {self.run_id} has no operator {operator!r}; it has {', '.join(self._specs)}."
            )
        if not 0 <= partition < spec.num_partitions:
            raise InvalidRequestError(
                f"Operator {operator!r} has {spec.num_partitions} partitions; there is no {partition}."
            )

    def lag(self, now: float) -> float:
        """Return how old the state of a mirror, or of a late follower, may be, in seconds; else 0."""
        looked_at = self.looked_at
        if looked_at is None and self.is_mirror:
            # Its driver has told nothing yet: the version is as old as the state that it shows, or less.
            manifest = self.versions.chain.get(self.versions.completed)
            looked_at = None if manifest is None else manifest.created_ms / 1000
        behind = 0.0 if looked_at is None else max(0.0, now - looked_at)
        return behind if behind > LAG_SECONDS or self.is_mirror else 0.0

    @property
    def is_mirror(self) -> bool:
        """Return whether the query is a mirror of a query of Spark."""
        return any(operator.kind == MIRROR for operator in self.registration.operators)

    def stop(self, now: float) -> None:
        """Record that the query has ended: the run changes nothing any more, and its last version can still be read."""
        self.registration = structs.replace(self.registration, ended=True)
        self.lifetime.stopped_at = now

    # -- writes of the state machine -----------------------------------------------------------

    def perform(self, write: WriteManifest | None) -> None:
        """Write a manifest that the state machine has decided on, and report the outcome to it.

        Raises the error of a failed write.
        """
        if write is None:
            return
        version, number = write.manifest.version, write.manifest.id
        try:
            with spans.alone("coordinator.manifest", run_id=self.run_id, version=version, manifest_id=number):
                manifest = self.manifests.append(write.manifest, self.counter)
        except BaseException as error:
            self.machine.write_failed(write, error, self._clock())
            raise
        self.machine.manifest_written(write, manifest)
        if write.checkpoint is not None:
            self.history.prepared(version, self._clock())

    # -- beginning -----------------------------------------------------------------------------

    def take_up(self, completed: int, epoch: int) -> None:
        """Load the manifests of a run whose query has ended, as they were read; ``epoch`` is the run's last one.

        Claims and writes nothing: the user may have removed the checkpoint, or may start the query elsewhere.
        """
        self.is_taken_up = True
        self.manifests.epochs.current = epoch
        self.versions.load(self.manifests.chain(), completed)
        # Manifests that the query has removed are known here from earlier looks.
        self.manifests.forget({m.id for m in self.versions.chain.values()})
        if self.commits.had_begun(completed):
            self.machine.begun_before = completed
        self.announce()

    def claim(self, initial: Mapping[str, Mapping[int, PartitionEntry]] | None) -> None:
        """Claim the next epoch, load what storage has then, and complete what Spark has committed.

        ``initial`` has the files of version 0 of a query that begins with state. Raises ``IncompleteBatchError``.
        """
        manifests, versions, schema_ids = self.manifests, self.versions, self.machine.schema_ids
        # Files that a manifest names are in storage.
        named = {operator.schema_id for m in versions.chain.values() for operator in m.operators.values()}
        for operator in self.registration.operators:
            if schema_ids[operator.name] not in named:
                manifests.ensure_schema(schema_ids[operator.name], operator.schema)
        manifests.claim(self.run_id, versions.layouts.values(), schema_ids)
        with spans.Pool(1) as pool:
            last_id = pool.submit(manifests.last_id)
            # No other run can make a version any more, but an older run may just have committed one.
            completed = self.commits.next_batch()
            self.counter.ensure_above(last_id.result())
        versions.load(manifests.chain(), max(versions.completed, completed))
        if initial is not None and not versions.chain and versions.completed == 0:
            self.perform(self.machine.begin_with(initial, self._clock()))
        if versions.completed > 0 and versions.completed not in versions.chain:
            self._recover(versions.completed)

    def take_over(self, *, was_known: bool = True) -> None:
        """Begin the work of this run on the claimed state, with a prepared version or a held batch if there is one.

        ``was_known``: the run has claimed the state before, so that a savepoint may hold it.
        """
        versions, had_begun = self.versions, self.commits.had_begun(self.versions.completed)
        record = self.machine.renew_record(self.manifests.epoch, had_begun=had_begun)
        if record is not None and record.manifest.version < max(versions.chain):
            log.info("Run %s rolls back to version %d", self.run_id, versions.completed)
        self.perform(record)
        self.machine.resume(had_begun=had_begun)
        if self.last_exchange:
            # An earlier coordinator may not have informed all hosts.
            self.machine.rewriting.exchanged(self._clock())
        self.announce()
        savepoint = self.manifests.savepoints.hold_of(self.run_id) if was_known else None
        if savepoint is not None:
            self.machine.savepoint_hold = SavepointHold(savepoint.version, savepoint.checkpoint_id)
        conf = self.snapshot_lag.conf
        self.snapshot_lag = SnapshotLag(self.run_id, self.tasks(), self._clock(), versions.completed, conf)

    # -- batches -------------------------------------------------------------------------------

    def look_ahead(self, batch_id: int) -> None:
        """Read from Spark's logs what opening a batch needs. Call this without the lock, before the batch is opened."""
        completed = self.versions.completed
        if self.lifetime.is_current and completed in (batch_id - 1, batch_id):
            self.spark_logs.look_ahead(batch_id, is_before_open=completed < batch_id)

    def acknowledge(self, messages: Sequence[Acknowledge]) -> int | None:
        """Take changes of one version. Return the id of the manifest that names them, or None."""
        version = messages[0].version
        if version - 1 == self.machine.begun_before:
            # Spark commits the batch once an earlier coordinator and this one have each acknowledged a part of it, and
            # no manifest of it is written. A run that has claimed the state since removes changelogs without a
            # manifest.
            self.manifests.epochs.check()
        self.perform(self.machine.acknowledge(messages, self._clock()))
        return self.machine.named_by(version)

    def catch_up(self) -> None:
        """Complete the prepared version if Spark has committed its batch, even if no message has reported it yet.

        Raises ``FencedError`` if another coordinator has taken over.
        """
        completed = self.versions.completed
        following = self.versions.chain.get(completed + 1)
        if following is not None and following.run_id == self.run_id and self.spark_logs.has(completed):
            self._require_own()
            self.complete(completed + 1)

    def advance(self, version: int, *, is_own: bool = False) -> None:
        """Complete a version, as Spark's commits say. Raises ``StaleBatchError`` or ``InvalidRequestError``.

        ``is_own``: the run's driver or a task of its next batch reported it. Else the commit was only seen, and it may
        be that of a run in another cluster which has replaced this one: raises ``FencedError`` if there is such a run.
        """
        if version == self.versions.completed:
            return
        self.machine.require_next(version)
        if not self.spark_logs.has(version - 1):
            raise InvalidRequestError(
                f"Version {version} of run {self.run_id} cannot be completed: Spark's commits/{version - 1} does not "
                f"exist in {self.registration.checkpoint_location}, or no longer."
            )
        if not is_own:
            self._require_own()
        self.complete(version)

    def _require_own(self) -> None:
        """Raise ``FencedError`` unless a seen commit is certainly this run's: others claim an epoch before theirs."""
        self.manifests.epochs.check()

    def complete(self, version: int) -> None:
        """Complete a version: Spark has committed its batch."""
        with spans.span("coordinator.complete", spans.batch(self.run_id, version)):
            if self.machine.must_recover(version):
                self._recover(version)
                self._require_own_schemas(version)
            else:
                self._settle(version)
            self.machine.complete(version, self._clock())
            self.history.completed(self.versions.chain[version], self._clock())
            self.announce()
        self.when_completed()

    def _settle(self, version: int) -> None:
        self.perform(self.machine.settle(version, self._clock()))

    def _require_own_schemas(self, version: int) -> None:
        """Raise ``LineageError`` if another program has written a version: this one would misread its rows."""
        manifest = self.versions.chain[version]
        for name, operator in manifest.operators.items():
            if operator.schema_id != self.machine.schema_ids[name]:
                raise LineageError(
                    f"Run {manifest.run_id} has committed batch {version - 1} after run {self.run_id} had been "
                    f"started, with another schema of operator {name!r}. Start the query again."
                )

    def _recover(self, version: int) -> None:
        """Prepare a version that Spark has committed without a manifest of it. Raises ``IncompleteBatchError``."""
        self.manifests.refresh()
        self.versions.load(self.manifests.chain())
        chain = self.versions.chain
        if version in chain and chain[version].run_id == self.run_id:
            return
        changes = self.stored_changes(version)
        if missing := changes.missing:
            raise IncompleteBatchError(incomplete_message(version - 1, missing, len(tasks_of(changes.layouts))))
        # Rows are numbered by the schemas of the run that has written them.
        theirs = self.manifests.epochs.runs().get(changes.run_id)
        schema_ids = theirs.schema_ids if theirs is not None and changes.run_id != self.run_id else {}
        self.perform(self.machine.recover(version, changes.layouts, changes.entries, schema_ids, self._clock()))

    def stored_changes(self, version: int) -> StoredChanges:
        """Return the changes of a version that were acknowledged, or else those in storage."""
        return stored_changes(self.manifests, self.versions, self.run_id, version, self.machine.acknowledged(version))

    def name_snapshots(self) -> None:
        """Name the unnamed snapshots in a manifest of the completed version, for the next run.

        Does nothing if a later version is prepared, because the manifest would no longer be the newest. Does nothing if
        the user has removed the checkpoint right after ``stop()``: it must not be recreated.
        """
        machine = self.machine
        if self.lifetime.is_current and machine.can_name_snapshots and self.manifests.query_file() is not None:
            self.perform(machine.name_snapshots())
            self.versions.unnamed.clear()

    def write_history(self) -> None:
        """Write the history of the last checkpoints as the run ends, unless the user has removed the checkpoint."""
        if self.lifetime.is_current and self.history.is_unwritten and self.manifests.query_file() is not None:
            self.history.write(self._clock())

    def keep_feature_views(self, views: tuple[FeatureView, ...]) -> None:
        """Keep these feature views in place of all earlier ones, first durably."""
        if views != self.feature_views:
            write_feature_views(self.manifests.storage, views)
            self.feature_views = views

    # -- holds, and rewriting files ------------------------------------------------------------

    def end_recorded_hold(self) -> None:
        """End a hold that an earlier coordinator began: its savepoint has failed before that could be written."""
        record_id = self.machine.savepoint_hold.record_id
        if record_id is not None:
            self.manifests.savepoints.release(record_id)
            self.machine.savepoint_hold = SavepointHold()

    @property
    def last_exchange(self) -> str:
        """Return the path of the record of the last exchange of files, "" if none still counts."""
        return self.manifests.rewritten[-1] if self.manifests.rewritten else ""

    def adopt_rewritten(self, path: str, record: RewrittenFiles) -> None:
        """Replace files of the kept versions with those that a record names; the completed version is the newest one.

        From then on a partition whose files were exchanged has another head: hosts load it again.
        """
        self.perform(self.machine.exchange_files(path, record))
        self.files.list_again()
        self.announce()

    # -- announcements to hosts ----------------------------------------------------------------

    def announce(self) -> None:
        """Prepare the announcements of the completed version: for each host the heads of its own partitions."""
        assignment, completed, rewritten = self.assignment.current, self.versions.completed, self.last_exchange
        of_host = {} if assignment is None else assignment.of_host
        created_ms = self.versions.created_ms(completed)
        announced = Completed(self.run_id, completed, {}, rewritten=rewritten, created_ms=created_ms)
        announced_to = {
            host: structs.replace(announced, heads=self.versions.heads(completed, tasks))
            for host, tasks in of_host.items()
        }
        # In this order: readers without the lock look at ``_announced`` first.
        self._announced_to = announced_to
        self._announced = announced

    def announcement_to(self, host_id: str) -> Completed | None:
        """Return the announcement for a host; None while the run is being registered. Needs no lock."""
        announced = self._announced
        return None if announced is None else self._announced_to.get(host_id, announced)

    def completed_for(self, host_id: str) -> Completed:
        """Return the last completed version, with the heads of a host's partitions. Needs no lock."""
        self.lifetime.require_served()
        announced = self.announcement_to(host_id)
        if announced is None:
            raise UnknownRunError(f"Run {self.run_id} is being registered; ask again.")
        return announced if self.lifetime.stopped_at is None else structs.replace(announced, ended=True)

    # -- warnings ------------------------------------------------------------------------------

    def slow_warning(self, now: float, seconds: float) -> str | None:
        """Return the warning about a batch that has taken longer than ``seconds``.

        None if there is no such batch, or if its warning was returned before.
        """
        batch = self.machine.pending
        if batch is None or now - batch.started <= seconds or self._slow == batch.id:
            return None
        self._slow = batch.id
        return (
            f"Batch {batch.properties['version'] - 1} of run {self.run_id} has not been acknowledged for "
            f"{now - batch.started:.0f} s: {batch.describe_missing()}"
        )
