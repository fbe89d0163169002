"""One registered run of a query. ``QueryState`` owns all facts that the coordinator knows about the run."""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping

import msgspec

from backends.encoding.operator_schema import OperatorSchema
from backends.formats.manifest import PartitionEntry
from backends.formats.manifest_chain import Layout
from backends.spans import Pool
from backends.storage.requests import used_together
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker, SnapshotLag, SnapshotLagConf
from coordinator_actor.checkpoints.pending_checkpoint import CheckpointIDCounter, TaskKey
from coordinator_actor.durable.fencing import RecordFiles
from coordinator_actor.durable.manifests import ManifestLog, RewrittenFiles
from coordinator_actor.durable.records import CheckpointRecords, LookupRecords
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import IncompleteBatchError, InvalidRequestError, LineageError, RetiredRunError
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from coordinator_actor.run.batches import NO_DURATIONS, LoggedTimes, RunningBatch, SparkAtWork, SparkLogs
from coordinator_actor.run.history import CheckpointHistory
from coordinator_actor.run.holds import FilesInUse, KnownFiles, RewritingHold, SavepointHold
from coordinator_actor.run.owners import Announcements, RunAssignment
from coordinator_actor.run.recovery import StoredChanges, incomplete_message, stored_changes
from coordinator_actor.run.versions import NO_STAGES, LookedUpVersions, ManifestWriter, QueryVersions, tasks_of

# The lifetime of one registered run: running, ended and still read, replaced by a newer run, or over.


RECORDS_EVERY = 60
"""One maintenance in this many looks for old claims and savepoint records."""


def _share_of(run_id: str) -> float:
    """Return a share from 0 to 1, which staggers the maintenance of runs that begin together."""
    return zlib.crc32(run_id.encode()) / (1 << 32)


class RunLifetime:
    """The lifetime of a run. Needs no lock: each value is replaced as a whole. Moments are of the coordinator's clock.

    ``driver_seen`` is the time of the driver's last message. ``stopped_at`` is when the query ended: from then on the
    run changes nothing, and hosts continue to answer from its last version, until the run is over (``ended``).
    ``retired_by`` is the newer run that has replaced this one. ``maintained`` is when garbage was removed last; at
    first a time before the run began, which differs from run to run.
    """

    def __init__(self, registration: QueryRegistration, now: float) -> None:
        self._registration = registration
        self.driver_seen = now
        self.maintained = now - _share_of(registration.run_id) * registration.maintenance_interval
        self.ended = False
        self.stopped_at: float | None = None
        self.retired_by: str | None = None
        self._maintenances = 0

    def seen(self, now: float) -> None:
        """Record a message of the driver."""
        self.driver_seen = now

    def prolong(self, seconds: float, now: float) -> None:
        """Let the lease of the driver run ``seconds`` longer."""
        self.driver_seen = min(now, self.driver_seen + seconds)

    def maintained_at(self, now: float) -> None:
        """Record that garbage is being removed."""
        self.maintained = now
        self._maintenances += 1

    @property
    def records_are_due(self) -> bool:
        """Return whether this maintenance looks for records that are no longer needed: the first one, and few more."""
        return self._maintenances % RECORDS_EVERY == 1

    def retire(self, run_id: str) -> None:
        """Record that a newer run replaces this one."""
        self.retired_by = run_id

    def end(self) -> None:
        """Record that the run is over: it may not change anything any more, and can no longer be read."""
        self.ended = True

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


log = logging.getLogger(__name__)

LAG_SECONDS = 5.0
"""A follower looks about once a second. It is late if its last successful look began longer ago than this."""


class QueryState:
    """One registered run of a query.

    ``lock`` guards all writes to the run and its parts: ``versions``, ``batch`` and ``files_in_use``. It is held during
    requests to the run's storage, so messages that must not wait for storage do not take the lock. They read values
    that are only ever replaced as a whole: the chain and the completed version, the registration, the announcements to
    hosts, and the lifetime of the run, which they also write. ``assignment``, the checkpoints and ``spark_logs`` have
    separate locks. ``is_taken_up``: this coordinator has not claimed the state, and may only read it.
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
        self.manifests = manifests
        self.commits = commits
        self.spark_logs = SparkLogs(commits)
        self.lifetime = RunLifetime(registration, clock())
        self.counter = CheckpointIDCounter()
        operators = registration.operators
        layouts = {o.name: Layout(o.name, o.num_partitions, o.backend) for o in operators}
        self.versions = QueryVersions(layouts, registration.key_groups)
        self.registration = registration
        self.adopt(operators)
        self.times = LoggedTimes(self.spark_logs, clock, uses_time=any(o.uses_time for o in operators))
        self.batch = RunningBatch(self.run_id, self.tasks(), self.counter, clock, self._prepare)
        self.assignment = RunAssignment()
        self.announcements = Announcements(self.run_id, self.versions, self.assignment)
        self.files_in_use = FilesInUse()
        self.files = KnownFiles()
        self.rewriting = RewritingHold()
        self.savepoint_hold = SavepointHold(manifests.savepoints)
        self.spark = SparkAtWork()
        self.looked_up = LookedUpVersions(LookupRecords(manifests.storage), self.versions)
        self.history = CheckpointHistory(
            CheckpointRecords(RecordFiles(manifests.storage)),
            clock(),
            lambda: used_together(manifests.storage.used, commits.used),
        )
        self.is_taken_up = False
        self.looked_at: float | None = None
        """When a follower's last successful look at storage began; None if the run follows no query."""
        self._writer = ManifestWriter(self.run_id, manifests, self.versions, self.counter, clock)
        self._clock = clock
        self._lag_conf = snapshot_lag or SnapshotLagConf()
        self._lag: SnapshotLag | None = None
        self._begun_before: int | None = None

    # -- what the program declares -------------------------------------------------------------

    def adopt(self, operators: tuple[OperatorSpec, ...]) -> None:
        """Take the declarations with their schemas evolved over all runs. Nothing else of them differs."""
        self.registration = msgspec.structs.replace(self.registration, operators=operators)
        self._specs = {o.name: o for o in operators}
        self.schema_ids = {o.name: OperatorSchema.from_json(o.schema).id for o in operators}

    @property
    def run_id(self) -> str:
        """Return the run id."""
        return self.registration.run_id

    @property
    def stats(self) -> CheckpointStatsTracker:
        """Return the figures of the run's micro-batches."""
        return self.batch.checkpoints.stats

    def operator(self, name: str) -> OperatorSpec | None:
        """Return the declaration of an operator, or None."""
        return self._specs.get(name)

    def tasks(self) -> Iterator[TaskKey]:
        """Return every declared partition of every operator."""
        return iter(tasks_of(self.versions.layouts))

    def is_named(self, query: str) -> bool:
        """Return whether that is the name, the query id, the run id or the state location."""
        of = self.registration
        return query in (of.name, of.query_id, of.run_id, of.state_location)

    def has_partition(self, operator: str, partition: int) -> bool:
        """Return whether the run has such a partition."""
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
        """Return how many seconds ago a late follower last looked at storage; else 0."""
        behind = 0.0 if self.looked_at is None else now - self.looked_at
        return behind if behind > LAG_SECONDS else 0.0

    def stop(self, now: float) -> None:
        """Record that the query has ended: the run changes nothing any more, and its last version can still be read."""
        self.registration = msgspec.structs.replace(self.registration, ended=True)
        self.lifetime.stopped_at = now

    # -- beginning -----------------------------------------------------------------------------

    def load(self, completed: int) -> None:
        """Load the manifests as they were read; ``completed`` is the version that Spark has committed."""
        self.versions.load(self.manifests.chain(), completed)

    def take_up(self, completed: int, epoch: int) -> None:
        """Load the manifests of a run whose query has ended, as they were read; ``epoch`` is the run's last one.

        Claims and writes nothing: the user may have removed the checkpoint, or may start the query elsewhere.
        """
        self.is_taken_up = True
        self.manifests.epochs.current = epoch
        self.load(completed)
        # Files that the query has removed are known here from earlier looks.
        oldest, chain = self.versions.oldest, self.versions.chain
        self.versions.load({v: m for v, m in chain.items() if v >= oldest})
        self.manifests.forget({m.id for m in self.versions.chain.values()})
        if self.commits.had_begun(completed):
            self._begun_before = completed
        self.announce()

    def claim(self, initial: Mapping[str, Mapping[int, PartitionEntry]] | None) -> None:
        """Claim the next epoch, load what storage has then, and complete what Spark has committed.

        ``initial`` has the files of version 0 of a query that begins with state. Raises ``IncompleteBatchError``.
        """
        manifests, versions = self.manifests, self.versions
        # Files that a manifest names are in storage.
        named = {operator.schema_id for m in versions.chain.values() for operator in m.operators.values()}
        for operator in self.registration.operators:
            if self.schema_ids[operator.name] not in named:
                manifests.ensure_schema(self.schema_ids[operator.name], operator.schema)
        manifests.claim(self.run_id, versions.layouts.values(), self.schema_ids)
        with Pool(1) as pool:
            last_id = pool.submit(manifests.last_id)
            # No other run can make a version any more, but an older run may just have committed one.
            completed = self.commits.next_batch()
            self.counter.ensure_above(last_id.result())
        self.load(max(versions.completed, completed))
        if initial is not None and not versions.chain and versions.completed == 0:
            self._writer.begin_with(initial, self.schema_ids)
        if versions.completed > 0 and versions.completed not in versions.chain:
            self._recover(versions.completed)

    def take_over(self, *, was_known: bool = True) -> None:
        """Begin the work of this run on the claimed state, with a prepared version or a held batch if there is one.

        Later writes of an older coordinator are ignored. ``was_known``: the run has claimed the state before, so that a
        savepoint may hold it.
        """
        versions = self.versions
        if self._replace_record():
            log.info("Run %s rolls back to version %d", self.run_id, versions.completed)
        following = versions.chain.get(versions.completed + 1)
        if following is not None and following.run_id == self.run_id:
            self.batch.restore_prepared(following)
        if self.commits.had_begun(versions.completed):
            self._begun_before = versions.completed
        versions.carry_snapshots()
        if self.last_exchange:
            self.rewriting.exchanged(self._clock())  # an earlier coordinator may not have informed all hosts
        self.announce()
        if was_known:
            self.savepoint_hold.take_over(self.run_id)
        conf = self._lag_conf
        self._lag = SnapshotLag(self.run_id, self.tasks(), self._clock(), versions.completed, conf)

    def _replace_record(self) -> bool:
        """Make the state the record of this epoch. Return whether versions above the completed one are given up.

        They are given up if the user has removed Spark's last batches: the rows to come may differ, so no later version
        may be put together with them. A version that was merely not committed in time stays, because its batch is
        repeated with the same rows. Snapshots that only abandoned manifests name are named again, also for the sake of
        an earlier layout: manifests of the run's own layout cannot name its snapshots.
        """
        versions = self.versions
        chain, completed = versions.chain, versions.completed
        if not chain:
            return False
        newest = max(chain)
        lost = {} if newest == completed else versions.named_only_above()
        is_same_layout = all(versions.is_in_layout(completed, operator) for operator, _ in lost)
        is_ours = chain[newest].run_id == self.run_id
        comes_again = newest == completed + 1 and (is_ours or self.commits.had_begun(completed))
        goes_back = newest > completed and completed in chain and not (is_same_layout and comes_again)
        if goes_back:
            self._writer.write_again(completed, lost)
        elif chain[newest].epoch != self.manifests.epoch:
            self._writer.write_again(newest)
        return goes_back

    # -- batches -------------------------------------------------------------------------------

    def look_ahead(self, batch_id: int) -> None:
        """Read from Spark's logs what opening a batch needs. Call this without the lock, before the batch is opened."""
        completed, needs_times = self.versions.completed, self.times.needs_reading(batch_id)
        if self.lifetime.is_current and completed in (batch_id - 1, batch_id):
            self.spark_logs.ahead(batch_id, is_before_open=completed < batch_id, uses_time=needs_times)

    def may_be_committed(self, batch_id: int) -> bool:
        """Return whether Spark may have committed a batch that is not known to be committed: the batch has begun.

        A batch may have begun before this coordinator, which then knows only some of its acknowledgements. Needs no
        lock.
        """
        return batch_id in (self.batch.highest_opened, self._begun_before) or batch_id + 1 in self.versions.chain

    def acknowledge(
        self,
        version: int,
        changes: Mapping[TaskKey, PartitionEntry],
        durations: Mapping[TaskKey, float] = NO_DURATIONS,
        stages: Mapping[TaskKey, int] = NO_STAGES,
    ) -> int | None:
        """Take the changes of partitions. Return the id of the manifest if one names them, else None.

        ``durations`` are in seconds. ``stages`` are Spark's stage ids, if known.
        """
        if version - 1 == self._begun_before:
            # Spark commits the batch once an earlier coordinator and this one have each acknowledged a part of it, and
            # no manifest of it is written. A run that has claimed the state since removes changelogs without a
            # manifest.
            self.manifests.epochs.check()
        is_named = self.batch.acknowledge(version, changes, durations, stages)
        return self.versions.chain[version].id if is_named else None

    def _prepare(self, version: int, checkpoint_id: int, changes: Mapping[TaskKey, PartitionEntry]) -> None:
        """Write the manifest of a version that every partition has acknowledged."""
        self._writer.write(version, self.versions.layouts, changes, self.schema_ids, checkpoint_id, self.batch.stages)
        self.history.prepared(version, self._clock())
        self.versions.record_retention()

    def complete(self, version: int) -> None:
        """Complete a version: Spark has committed its batch."""
        versions = self.versions
        is_ours = self.batch.highest_opened >= version - 1
        if version not in versions.chain or (is_ours and versions.chain[version].run_id != self.run_id):
            # If this run has not begun the batch, then an older one, still running when this one was registered, has
            # committed the batch.
            self._recover(version)
            self._require_own_schemas(version)
        elif self.batch.is_repeated:
            # The plan has run again in part. Spark runs no more of it, and the last attempts count. If this manifest
            # cannot be written, the version is not completed, and the next attempt writes one again.
            self.batch.end_repeat()
        elif self._writer.is_uncertain:
            # A manifest whose writing failed may exist all the same, or appear later. A completed version must not
            # change.
            self._writer.write_again(version)
        self.batch.completed()
        versions.complete(version)
        self._writer.note_completed(version)
        self.history.completed(versions.chain[version], self._clock())
        self.announce()

    def _require_own_schemas(self, version: int) -> None:
        """Raise ``LineageError`` if another program has written a version: this one would misread its rows."""
        manifest = self.versions.chain[version]
        for name, operator in manifest.operators.items():
            if operator.schema_id != self.schema_ids[name]:
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
        self.batch.give_up(f"batch {version - 1} is committed")
        # Rows are numbered by the schemas of the run that has written them.
        theirs = self.manifests.epochs.runs().get(changes.run_id)
        schema_ids = theirs.schema_ids if theirs is not None and changes.run_id != self.run_id else {}
        self._writer.write(version, changes.layouts, changes.found, {**self.schema_ids, **schema_ids})

    def stored_changes(self, version: int) -> StoredChanges:
        """Return the changes of a version that were acknowledged, or else those in storage."""
        acknowledged = self.batch.acknowledged(version)
        return stored_changes(self.manifests, self.versions, self.run_id, version, acknowledged)

    def name_snapshots(self) -> None:
        """Name the unnamed snapshots in a manifest of the completed version, for the next run to find.

        Not if a later version is prepared: the manifest would no longer be the newest. Nor if the user has removed the
        checkpoint, which the user may do right after ``stop()``: the checkpoint must not be recreated.
        """
        versions = self.versions
        if (
            not self.lifetime.is_current
            or not any(versions.unnamed.values())
            or max(versions.chain, default=0) != versions.completed
            or self.manifests.query_file() is None
        ):
            return
        completed = versions.completed
        named = {task: found for task, found in versions.unnamed.items() if versions.is_in_layout(completed, task[0])}
        self._writer.write_again(completed, named)
        versions.unnamed.clear()

    def write_history(self) -> None:
        """Write the history of the last checkpoints, as the run ends. Not if the user has removed the checkpoint."""
        if self.lifetime.is_current and self.history.is_unwritten and self.manifests.query_file() is not None:
            self.history.write(self._clock())

    # -- rewriting files --------------------------------------------------------------------------

    @property
    def next_batch_to_hold(self) -> int:
        """Return the first batch without any begun task: one may have begun before this coordinator."""
        completed = self.versions.completed
        has_begun = self.batch.highest_opened >= completed or self._begun_before == completed
        return completed + 1 if has_begun else completed

    @property
    def last_exchange(self) -> str:
        """Return the path of the record of the last exchange of files, "" if none still counts."""
        return self.manifests.rewritten[-1] if self.manifests.rewritten else ""

    def adopt_rewritten(self, path: str, record: RewrittenFiles) -> None:
        """Replace files of the kept versions with those that a record names; the completed version is the newest one.

        From then on a partition whose files were exchanged has another head: hosts load it again.
        """
        self._writer.adopt(path, record)
        self.versions.plan_anew()
        self.files.list_again()
        self.announce()

    # -- announcements to hosts -------------------------------------------------------------------

    def announce(self) -> None:
        """Prepare the announcements of the completed version to hosts."""
        self.announcements.prepare(self.last_exchange)

    # -- snapshots -----------------------------------------------------------------------------

    def snapshot_uploaded(self, task: TaskKey, version: int, now: float) -> None:
        """Record a snapshot that counts, for the warning about partitions whose snapshots lag behind."""
        if self._lag is not None:
            self._lag.report_uploaded(task, version, now)

    def lag_warning(self, now: float) -> str | None:
        """Return the warning about partitions whose snapshots lag behind; None if there is none, or no new one."""
        return None if self._lag is None else self._lag.warning(self.versions.completed, now)
