"""The state machine of one run: which of its versions is completed, which is prepared, and what each still waits for.

``RunMachine`` does no I/O and reads no clock. A transition takes a message, the facts from storage that it needs, and
``now``, in seconds since 1970. It checks the message, and changes the state or returns a ``WriteManifest``. Its caller
(``QueryState``) writes that manifest durably, and reports ``manifest_written`` or ``write_failed``. Only a written
manifest makes a change count: a transition that raises an error, or whose write fails, leaves the state as it was.

A prepared batch may be repeated: Spark retries a task, or a ``foreachBatch`` function runs the plan twice. The attempt
that was acknowledged last counts, so it needs another manifest. Spark's stage distinguishes the two cases:

- A retried task has its old stage. Its manifest is written before it is answered.
- A plan that runs again has a new stage, with all tasks of an operator or with some. It has one manifest: when the last
  task has come, or, if only some come, when the version completes.

A stage is new if a lower one is known for that task. If the stage of a task is not known, no stage of it is new.
Manifests record the stage of each task. After a restart a host's report of a higher stage overrides the manifest, and
one of the same stage does not: two hosts may report attempts of one stage, and the manifest knows which was the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from msgspec import structs

from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.formats.manifest_chain import Layout, Retention
from coordinator_actor import exceptions
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, FullyAcknowledged
from coordinator_actor.checkpoints.pending_checkpoint import (
    AcknowledgeCheckpoint,
    CheckpointIDCounter,
    CompletedCheckpoint,
    PendingCheckpoint,
    TaskKey,
)
from coordinator_actor.durable.manifests import RewrittenFiles
from coordinator_actor.messages import Acknowledge, Acknowledged, HostInfo
from coordinator_actor.run.holds import RewritingHold, SavepointHold
from coordinator_actor.run.versions import QueryVersions, changes_in, tasks_of

TaskChanges = Mapping[TaskKey, tuple[PartitionEntry, float]]
"""Acknowledged changes of partitions, each with the duration of its commit in seconds."""
EarlierStates = Mapping[TaskKey, PartitionEntry | None]
"""The state that each task of a message had acknowledged before."""
NO_STAGES: Mapping[TaskKey, int] = MappingProxyType({})


@dataclass(frozen=True)
class _Repeat:
    """A plan that runs again for the prepared version.

    ``changes`` are those that no manifest names yet. ``awaited`` are the tasks that are still to come in the stage that
    runs the plan again, ``stages`` is that stage by operator.
    """

    changes: TaskChanges = field(default_factory=dict)
    awaited: frozenset[TaskKey] = frozenset()
    stages: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WriteManifest:
    """A manifest that must be written durably before the transition that made it counts.

    Its epoch and sequence are those of the place where it is written. ``checkpoint`` is the checkpoint that the
    manifest completes, ``chain`` the manifests below it if their files are exchanged. ``repeat`` and ``stages`` replace
    those of the machine once the manifest is written. ``before`` is for the case that the write fails.
    """

    manifest: Manifest
    checkpoint: FullyAcknowledged | None = None
    chain: dict[int, Manifest] | None = None
    repeat: _Repeat = _Repeat()
    stages: Mapping[TaskKey, int] = field(default_factory=dict)
    before: EarlierStates = field(default_factory=dict)


class RunMachine:
    """The versions and batches of one run. The lock of the run guards everything here.

    ``highest_opened`` is the highest batch id that a host has opened, -1 before the first. ``begun_before`` is a batch
    that had begun when this coordinator took the run over. ``pending`` is the checkpoint that is being acknowledged: a
    micro-batch is a checkpoint of all operators. ``prepared`` is the last one whose manifest was written, until its
    version is completed. ``is_uncertain``: the write of the last manifest seems to have failed; the manifest may still
    exist. ``schema_ids`` are those of the operators. Memory grows with the number of tasks.
    """

    def __init__(self, run_id: str, versions: QueryVersions, counter: CheckpointIDCounter) -> None:
        self.versions = versions
        self.schema_ids: Mapping[str, str] = {}
        self.highest_opened = -1
        self.begun_before: int | None = None
        self.pending: PendingCheckpoint | None = None
        self.prepared: CompletedCheckpoint | None = None
        self.is_uncertain = False
        self.savepoint_hold = SavepointHold()
        self.rewriting = RewritingHold()
        self._run_id = run_id
        self._counter = counter
        self._tasks = dict.fromkeys(tasks_of(versions.layouts))
        # Without a timeout: Spark commits a batch however long it took.
        self.checkpoints = CheckpointCoordinator(run_id, self._tasks, id_counter=counter, timeout=None)
        self._stages: dict[TaskKey, int] = {}  # of each task's last acknowledgement of the version, if known
        self._repeat = _Repeat()
        self._may_wait = True
        self._completed: tuple[int, int] | None = None  # the version that was completed last, and when, in ms

    # -- opening a batch -----------------------------------------------------------------------

    def note_opened(self, batch_id: int) -> None:
        """Record that a host has opened a batch, as it reports directly or by its acknowledgement."""
        self.highest_opened = max(self.highest_opened, batch_id)

    def require_newest(self, batch_id: int) -> None:
        """Raise ``StaleBatchError`` if a later batch has begun."""
        if batch_id < self.highest_opened:
            raise exceptions.StaleBatchError(
                f"A task of batch {batch_id} is too late: batch {self.highest_opened} of run {self._run_id} has begun."
            )

    def require_not_held(self, batch_id: int, now: float) -> None:
        """Raise ``BatchHeldError`` if a batch waits."""
        if self.savepoint_hold.holds(batch_id):
            raise exceptions.BatchHeldError(
                f"Batch {batch_id} of run {self._run_id} waits: the query stops with a savepoint of version "
                f"{self.savepoint_hold.batch_id}."
            )
        hold = self.rewriting.at(now)
        if hold is not None and hold.holds(batch_id):
            raise exceptions.BatchHeldError(
                f"Batch {batch_id} of run {self._run_id} waits: {hold.holder} rewrites files of its versions."
            )

    def open_batch(self, batch_id: int, now: float) -> None:
        """Begin the checkpoint of a batch that a host opens, unless it has begun before."""
        self.highest_opened = batch_id
        if all(c is None or c.properties["version"] != batch_id + 1 for c in (self.pending, self.prepared)):
            self._start(batch_id + 1, {}, now)

    def may_be_committed(self, batch_id: int) -> bool:
        """Return whether Spark may have committed a batch that is not known to be committed: the batch has begun.

        A batch may have begun before this coordinator, which then knows only some of its acknowledgements. Needs no
        lock.
        """
        return batch_id in (self.highest_opened, self.begun_before) or batch_id + 1 in self.versions.chain

    @property
    def next_batch_to_hold(self) -> int:
        """Return the first batch without any begun task: one may have begun before this coordinator."""
        completed = self.versions.completed
        has_begun = self.highest_opened >= completed or self.begun_before == completed
        return completed + 1 if has_begun else completed

    # -- acknowledging -------------------------------------------------------------------------

    def check_acknowledgement(self, message: Acknowledge, owner: HostInfo) -> Acknowledged | None:
        """Raise an error unless the changes of a partition with that owner may be taken.

        Return the earlier answer if they were taken before, and that answer was lost; else None.
        """
        task = (message.operator, message.partition)
        if owner.host_id != message.host_id:
            raise exceptions.StaleOwnerError(
                f"Host {message.host_id} does not own {task[0]}/{task[1]} of run {self._run_id}; {owner.host_id} does."
            )
        completed = self.versions.completed
        if message.version - 1 == completed:
            # The batch may have been opened before a restart of the coordinator, and the host has yet to report it.
            self.note_opened(completed)
        if message.version != self.highest_opened + 1 or message.version <= completed:
            raise exceptions.StaleBatchError(
                f"Version {message.version} of run {self._run_id} cannot be committed: batch {self.highest_opened} is "
                f"the newest one opened, version {completed} the last completed one."
            )
        base = self.versions.head(message.version - 1, *task)
        if message.base != base:
            raise exceptions.LineageError(
                f"Changes of {task[0]}/{task[1]} apply to {message.base}, but version {message.version - 1} ends with "
                f"{base}."
            )
        manifest = self.versions.chain.get(message.version)
        if manifest is None or manifest.run_id != self._run_id or not self._is_prepared(message.version):
            return None
        if self._last(task) != PartitionEntry(message.attempt, message.file):
            return None
        return Acknowledged(message.version, None if task in self._repeat.changes else manifest.id)

    def acknowledge(self, messages: Sequence[Acknowledge], now: float) -> WriteManifest | None:
        """Take changes of one version. The last missing ones need a manifest, and so do most changes that are repeated.

        Loops over all tasks run for a manifest and for a new stage, not for every message.
        """
        version = messages[0].version
        for message in messages:
            if (message.operator, message.partition) not in self._tasks:
                raise exceptions.InvalidRequestError(
                    f"{message.operator}/{message.partition} is not a partition of run {self._run_id}."
                )
        changes = {(m.operator, m.partition): (PartitionEntry(m.attempt, m.file), m.duration) for m in messages}
        stages = {(m.operator, m.partition): m.stage for m in messages if m.stage is not None}
        earlier = {task: self._stages[task] for task in stages if task in self._stages}
        raised = {task: max(stage, earlier.get(task, stage)) for task, stage in stages.items()}
        if self._is_prepared(version):
            in_new_stage = {task: stages[task] for task in changes if task in earlier and stages[task] > earlier[task]}
            write = self._acknowledge_again(changes, in_new_stage, raised, now)
        else:
            write = self._acknowledge_first(version, changes, raised, now)
        if write is None:
            self._stages.update(raised)
        return write

    def named_by(self, version: int) -> int | None:
        """Return the id of the manifest that names all acknowledged changes of a version; None if there is none yet."""
        return self.versions.chain[version].id if self._is_prepared(version) and not self._repeat.changes else None

    def _acknowledge_first(
        self, version: int, changes: TaskChanges, stages: Mapping[TaskKey, int], now: float
    ) -> WriteManifest | None:
        batch = self.pending
        if batch is None or batch.is_discarded or batch.properties["version"] != version:
            kept = {task: entry for task, entry in self.acknowledged(version).items() if task not in changes}
            batch = self._start(version, kept, now)
        before = {task: batch.state(task) for task in changes}
        checkpoint = self._count(batch, changes, now)
        if checkpoint is not None:
            return self._completing(checkpoint, now, stages, before=before)
        if batch.is_discarded:
            # The lease of the driver, which waits for no lock, has expired in between.
            raise exceptions.RetiredRunError(f"Run {self._run_id} is over: its checkpoint {batch.id} was cancelled.")
        return None

    def _acknowledge_again(
        self, changes: TaskChanges, in_new_stage: Mapping[TaskKey, int], stages: Mapping[TaskKey, int], now: float
    ) -> WriteManifest | None:
        """Take changes of the prepared version. ``in_new_stage`` has the new stage of tasks that had an earlier one."""
        new = {task: change for task, change in changes.items() if self._last(task) != change[0]}
        in_new_stage = {task: stage for task, stage in in_new_stage.items() if task in new}
        repeat = self._repeat
        awaited, of_operator = set(repeat.awaited), dict(repeat.stages)
        for operator, stage in {(task[0], stage) for task, stage in in_new_stage.items()}:
            if stage > of_operator.get(operator, -1):
                of_operator[operator] = stage
                stage_of = {**self._stages, **stages}
                awaited |= {t for t in self._tasks if t[0] == operator and stage_of.get(t, stage) < stage}
        awaited -= new.keys()
        unnamed = {**repeat.changes, **new}
        if unnamed and not (self._may_wait and awaited and in_new_stage.keys() == new.keys()):
            return self._name(unnamed, now, stages, _Repeat({}, frozenset(awaited), of_operator))
        self._repeat = _Repeat(unnamed, frozenset(awaited), of_operator)
        return None

    def _name(
        self, changes: TaskChanges, now: float, stages: Mapping[TaskKey, int] = NO_STAGES, repeat: _Repeat | None = None
    ) -> WriteManifest:
        """Make another manifest of the prepared version: with these changes, and the named ones of all other tasks."""
        assert self.prepared is not None
        unchanged = {task: entry for task, entry in self.prepared.states.items() if task not in changes}
        batch = self.checkpoints.trigger_checkpoint(states=unchanged, properties=self.prepared.properties, now=now)
        checkpoint = self._count(batch, changes, now)
        if checkpoint is None:
            raise exceptions.InvalidRequestError(
                f"Checkpoint {batch.id} of run {self._run_id} was cancelled; the run has ended."
            )
        return self._completing(checkpoint, now, stages, repeat=repeat or _Repeat(stages=self._repeat.stages))

    def _count(self, batch: PendingCheckpoint, changes: TaskChanges, now: float) -> FullyAcknowledged | None:
        """Take acknowledgements; return the checkpoint if all tasks have acknowledged it."""
        received: object = None
        # Repeated changes first: with the last missing one the checkpoint is complete.
        for task, (entry, duration) in sorted(changes.items(), key=lambda change: batch.lacks(change[0])):
            message = AcknowledgeCheckpoint(self._run_id, task, batch.id, entry, entry.changelog.size, duration)
            received = self.checkpoints.acknowledge(message, now)
        return received if isinstance(received, FullyAcknowledged) else None

    def _completing(
        self,
        checkpoint: FullyAcknowledged,
        now: float,
        stages: Mapping[TaskKey, int],
        *,
        repeat: _Repeat = _Repeat(),
        before: EarlierStates = MappingProxyType({}),
    ) -> WriteManifest:
        completed, all_stages = checkpoint.completed, {**self._stages, **stages}
        version, layouts = completed.properties["version"], self.versions.layouts
        try:
            manifest = self._manifest(
                version, layouts, completed.states, self.schema_ids, completed.id, now, all_stages
            )
        except BaseException as error:  # such as a path that no manifest can name
            self._undo(checkpoint, before, error, now)
            raise
        return WriteManifest(manifest, checkpoint, repeat=repeat, stages=stages, before=before)

    def _start(
        self, version: int, states: Mapping[TaskKey, PartitionEntry], now: float, why: str = ""
    ) -> PendingCheckpoint:
        """Begin a checkpoint. A pending one is cancelled: ``why``, or because of the batch that has begun."""
        if self.pending is not None:
            self.checkpoints.cancel_checkpoint(self.pending.id, why or f"batch {version - 1} has begun")
        # Replaced in one step: readers without the lock must not see a batch disappear.
        self.pending = self.checkpoints.trigger_checkpoint(states=states, properties={"version": version}, now=now)
        return self.pending

    # -- the outcome of a write ----------------------------------------------------------------

    def manifest_written(self, write: WriteManifest, manifest: Manifest) -> None:
        """Make the transition count: its manifest is durable, as ``manifest``."""
        self.is_uncertain = False
        if write.chain is not None:
            self.versions.load(write.chain)
            self.versions.drop_plan()
        self.versions.append_manifest(manifest)
        if write.checkpoint is not None:
            self.checkpoints.complete(write.checkpoint)
            self.pending, self.prepared = None, write.checkpoint.completed
            self._repeat = write.repeat
            self._stages.update(write.stages)
            self.versions.recorded = self.versions.planned

    def write_failed(self, write: WriteManifest, error: BaseException, now: float) -> None:
        """Undo the transition. The manifest may exist all the same, or appear later."""
        self.is_uncertain = True
        if write.checkpoint is not None:
            self._undo(write.checkpoint, write.before, error, now)

    def _undo(self, checkpoint: FullyAcknowledged, before: EarlierStates, error: BaseException, now: float) -> None:
        batch = checkpoint.pending
        self.checkpoints.fail(checkpoint, error)
        if batch is self.pending:
            kept = {task: entry for task, entry in batch.states.items() if task not in before}
            kept.update({task: entry for task, entry in before.items() if entry is not None})
            self._start(batch.properties["version"], kept, now, f"it could not be completed: {error}")
        else:
            self.checkpoints.cancel_checkpoint(batch.id, f"its manifest could not be written: {error}")

    # -- what is acknowledged ------------------------------------------------------------------

    def acknowledged(self, version: int) -> dict[TaskKey, PartitionEntry]:
        """Return the acknowledged changes of a version that is not completed yet: the last of each task."""
        if self._is_prepared(version):
            assert self.prepared is not None
            return {**self.prepared.states, **{task: entry for task, (entry, _) in self._repeat.changes.items()}}
        if self.pending is not None and self.pending.properties["version"] == version:
            return self.pending.states
        return {}

    def is_newer(self, task: TaskKey, stage: int | None) -> bool:
        """Return whether a stage of a task is known to be later than the stage of its last acknowledgement."""
        return stage is not None and stage > self._stages.get(task, stage)

    def _is_prepared(self, version: int) -> bool:
        return self.prepared is not None and self.prepared.properties["version"] == version

    def _last(self, task: TaskKey) -> PartitionEntry | None:
        assert self.prepared is not None
        repeated = self._repeat.changes.get(task)
        entry: PartitionEntry | None = self.prepared.states.get(task) if repeated is None else repeated[0]
        return entry

    # -- completing a version ------------------------------------------------------------------

    def require_next(self, version: int) -> None:
        """Raise ``StaleBatchError`` or ``InvalidRequestError`` unless a version follows the completed one."""
        completed = self.versions.completed
        if version < completed:
            raise exceptions.StaleBatchError(
                f"Batch {version} of run {self._run_id} is committed already; version {completed} is completed."
            )
        if version != completed + 1:
            raise exceptions.InvalidRequestError(
                f"Version {version} of run {self._run_id} cannot be completed: the last completed version is "
                f"{completed}."
            )

    def must_recover(self, version: int) -> bool:
        """Return whether Spark has committed a version that this run's manifests do not name.

        If this run has not begun the batch, then an older one, still running when this one was registered, has
        committed the batch.
        """
        manifest = self.versions.chain.get(version)
        is_ours = self.highest_opened >= version - 1
        return manifest is None or (is_ours and manifest.run_id != self._run_id)

    def recover(
        self,
        version: int,
        layouts: Mapping[str, Layout],
        changes: Mapping[TaskKey, PartitionEntry],
        schema_ids: Mapping[str, str],
        now: float,
    ) -> WriteManifest:
        """Name the changes of a version that Spark has committed without a manifest of this run."""
        if self.pending is not None:
            self.checkpoints.cancel_checkpoint(self.pending.id, f"batch {version - 1} is committed")
            self.pending = None
        return WriteManifest(self._manifest(version, layouts, changes, {**self.schema_ids, **schema_ids}, None, now))

    def settle(self, version: int, now: float) -> WriteManifest | None:
        """Return the manifest that a version needs before it completes. A completed version must not change.

        Either its plan has run again in part: Spark runs no more of it, and the last attempts count. Or the last
        manifest is in doubt: it may exist all the same, or appear later. While the write fails, the version waits.
        """
        if self._repeat.changes:
            return self._name(self._repeat.changes, now)
        return self._write_again(version) if self.is_uncertain else None

    def wait_no_more(self, now: float) -> WriteManifest | None:
        """Name all changes that no manifest names yet, and from now on each change before it is answered.

        The run is being replaced: acknowledged changes that no manifest names would be lost with it.
        """
        self._may_wait = False
        return self._name(self._repeat.changes, now) if self._repeat.changes else None

    def complete(self, version: int, now: float) -> None:
        """Complete a version that Spark has committed."""
        self.versions.complete(version)
        self.prepared = None
        self._stages, self._repeat = {}, _Repeat()
        self._completed = version, _ms(now)

    # -- taking over ---------------------------------------------------------------------------

    def begin_with(self, initial: Mapping[str, Mapping[int, PartitionEntry]], now: float) -> WriteManifest:
        """Make the manifest of version 0 of a query that begins with state."""
        operators = {
            name: OperatorEntry.of(
                layout.num_partitions, self.schema_ids[name], layout.backend, dict(initial.get(name, {}))
            )
            for name, layout in self.versions.layouts.items()
        }
        return WriteManifest(
            Manifest(
                id=self._counter.get_and_increment(),
                parent=None,
                version=0,
                epoch=0,
                run_id=self._run_id,
                created_ms=_ms(now),
                operators=operators,
                oldest=0,
                chain_from=0,
            )
        )

    def renew_record(self, epoch: int, *, had_begun: bool) -> WriteManifest | None:
        """Make the state the record of a claimed epoch, so that later writes of an older coordinator are ignored.

        Versions above the completed one are given up if the user has removed Spark's last batches: the rows to come may
        differ, so no later version may be put together with them. A version that was merely not committed in time
        stays, because its batch is repeated with the same rows (it ``had_begun``). Snapshots that only abandoned
        manifests name are named again, also for the sake of an earlier layout: manifests of the run's own layout cannot
        name its snapshots.
        """
        versions = self.versions
        chain, completed = versions.chain, versions.completed
        if not chain:
            return None
        newest = max(chain)
        lost = {} if newest == completed else versions.named_only_above()
        is_same_layout = all(versions.is_in_layout(completed, operator) for operator, _ in lost)
        is_ours = chain[newest].run_id == self._run_id
        comes_again = newest == completed + 1 and (is_ours or had_begun)
        if newest > completed and completed in chain and not (is_same_layout and comes_again):
            return self._write_again(completed, lost)
        return self._write_again(newest) if chain[newest].epoch != epoch else None

    def resume(self, *, had_begun: bool) -> None:
        """Continue with the version that an earlier coordinator has prepared, if there is one.

        The manifest, not the hosts, determines the last attempts, except those of a later stage.
        """
        versions = self.versions
        if had_begun:
            self.begun_before = versions.completed
        following = versions.chain.get(versions.completed + 1)
        if following is not None and following.run_id == self._run_id:
            at, changes, properties = following.created_ms / 1000, changes_in(following), {"version": following.version}
            self.prepared = CompletedCheckpoint(following.id, at, 0.0, changes, properties=properties)
            self._stages = {
                (name, p): stage
                for name, operator in following.operators.items()
                for p in operator.partitions
                if (stage := operator.stage_of(p)) is not None
            }
        versions.carry_snapshots()

    # -- other manifests -----------------------------------------------------------------------

    @property
    def can_name_snapshots(self) -> bool:
        """Return whether a manifest of the completed version can name more snapshots: it must be the newest one."""
        versions = self.versions
        return any(versions.unnamed.values()) and max(versions.chain, default=0) == versions.completed

    def name_snapshots(self) -> WriteManifest:
        """Name the unnamed snapshots in a manifest of the completed version, where the next run reads them."""
        versions = self.versions
        version = versions.completed
        named = {task: refs for task, refs in versions.unnamed.items() if versions.is_in_layout(version, task[0])}
        return self._write_again(version, named)

    def exchange_files(self, path: str, record: RewrittenFiles) -> WriteManifest:
        """Name the record at ``path``, whose files replace those of the kept versions. The newest one is completed.

        The manifests of the versions below stay as they are; the record maps the files that they name.
        """
        versions = self.versions
        chain = {version: record.of(manifest) for version, manifest in versions.chain.items()}
        return WriteManifest(self._again(chain[max(chain)], rewritten=(path,)), chain=chain)

    # -- building manifests --------------------------------------------------------------------

    def _manifest(
        self,
        version: int,
        layouts: Mapping[str, Layout],
        changes: Mapping[TaskKey, PartitionEntry],
        schema_ids: Mapping[str, str],
        manifest_id: int | None,
        now: float,
        stages: Mapping[TaskKey, int] = NO_STAGES,
    ) -> Manifest:
        """Build the manifest of a version, from the changes of every partition of these layouts."""
        versions = self.versions
        below = versions.chain.get(version - 1)
        keep = versions.planned or Retention(versions.oldest, min(versions.chain, default=1))
        operators = {
            name: OperatorEntry.of(
                layout.num_partitions,
                schema_ids[name],
                layout.backend,
                {
                    p: PartitionEntry(e.attempt, e.changelog, versions.unnamed_in(layout, p))
                    for p in range(layout.num_partitions)
                    if (e := changes[(name, p)])
                },
                {p: stages[(name, p)] for p in range(layout.num_partitions) if (name, p) in stages},
            )
            for name, layout in layouts.items()
        }
        completed = self._completed
        return Manifest(
            id=self._counter.get_and_increment() if manifest_id is None else manifest_id,
            parent=below.id if below else None,
            version=version,
            epoch=0,
            run_id=self._run_id,
            created_ms=_ms(now),
            operators=operators,
            oldest=keep.oldest,
            chain_from=keep.chain_from,
            parent_completed_ms=completed[1] if completed is not None and completed[0] == version - 1 else None,
        )

    def _write_again(
        self, version: int, snapshots: Mapping[TaskKey, tuple[SnapshotRef, ...]] = MappingProxyType({})
    ) -> WriteManifest:
        """Write the manifest of a version again, as the newest one, naming more snapshots.

        The time when the version was prepared stays.
        """
        manifest = self.versions.chain[version]
        operators = {
            name: structs.replace(
                operator,
                partitions=operator.partitions.with_snapshots(
                    {p: snapshots[(name, p)] for p in operator.partitions if (name, p) in snapshots}
                ),
            )
            for name, operator in manifest.operators.items()
        }
        return WriteManifest(self._again(manifest, operators=operators))

    def _again(self, manifest: Manifest, **changes: Any) -> Manifest:
        """Return a manifest as the newest one. Files that a newer manifest has released do not come back."""
        versions = self.versions
        return structs.replace(
            manifest,
            id=self._counter.get_and_increment(),
            oldest=max(manifest.oldest, versions.oldest),
            chain_from=max(manifest.chain_from, min(versions.chain)),
            **changes,
        )


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
