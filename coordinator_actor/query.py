"""One registered query: its operators, versions and owners, and the acknowledgements of the running batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from backends.encoding.operator_schema import OperatorSchema
from backends.formats import chain as chains
from backends.formats.chain import Layout, Retention
from backends.formats.changelog import read_changelog_meta
from backends.formats.manifest import Lineage, Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.formats.snapshot import Snapshot
from backends.storage.checkpoint_storage import digest
from backends.storage.file_ref import FileRef
from coordinator_actor.checkpoints.acknowledgements import AcknowledgeCheckpoint
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint
from coordinator_actor.checkpoints.snapshot_lag import SnapshotLag
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.exceptions import IncompleteBatchError, LineageError
from coordinator_actor.manifests import ManifestLog, SparkCommits
from coordinator_actor.messages import BatchTimes, Completed, HostInfo, OperatorSpec, QueryRegistration

EMPTY: Mapping[TaskKey, tuple[SnapshotRef, ...]] = MappingProxyType({})
NO_DURATIONS: Mapping[TaskKey, float] = MappingProxyType({})


@dataclass(frozen=True)
class Assignment:
    """Who owns which partition. ``number`` grows with every change in a run; ``generation`` is that of the hosts.

    ``owners`` has an index into ``hosts`` for each partition of each operator.
    """

    number: int
    generation: int
    hosts: tuple[HostInfo, ...]
    owners: Mapping[str, list[int]]
    of_host: Mapping[str, tuple[TaskKey, ...]]

    @classmethod
    def of(cls, number: int, generation: int, hosts: Sequence[HostInfo], owners: Mapping[TaskKey, str]) -> Assignment:
        """An assignment from the host of each partition, in the order of the partitions."""
        places = {host.host_id: i for i, host in enumerate(hosts)}
        by_operator: dict[str, list[int]] = {}
        by_host: dict[str, list[TaskKey]] = {host.host_id: [] for host in hosts}
        for task, host_id in owners.items():
            by_operator.setdefault(task[0], []).append(places[host_id])
            by_host[host_id].append(task)
        return cls(number, generation, tuple(hosts), by_operator, {h: tuple(t) for h, t in by_host.items()})

    def owner(self, operator: str, partition: int) -> HostInfo:
        """The owner of a partition."""
        return self.hosts[self.owners[operator][partition]]


@dataclass
class QueryState:
    """What the coordinator knows of one run. ``lock`` guards everything in it.

    Every micro-batch is a checkpoint of all operators: ``batch`` is the one that is being acknowledged, ``last`` the one
    that was prepared last. The completed one is the version that Spark has committed.
    ``unnamed`` are the snapshots that no manifest of a completed version names yet. ``planned`` is what the
    next manifest will keep, ``recorded`` what the last one says. ``busy`` has the partitions that are
    being loaded or uploaded, and until when that is believed; ``rescaling`` those of them that are made of the files of
    an earlier layout. ``pinned`` are versions that must not be removed
    whatever retention says. ``held_from`` is the first batch whose tasks must wait, if any;
    ``held_by_record``: for a savepoint of that id, begun by an earlier coordinator. ``uncertain``: the last manifest could not be
    written, as far as one knows.
    """

    registration: QueryRegistration
    log: ManifestLog
    commits: SparkCommits
    clock: Callable[[], float]
    completed: int = 0
    highest_opened: int = -1
    chain: dict[int, Manifest] = field(default_factory=dict)
    batch: PendingCheckpoint | None = None
    last: CompletedCheckpoint | None = None
    unnamed: dict[TaskKey, tuple[SnapshotRef, ...]] = field(default_factory=dict)
    planned: Retention | None = None
    recorded: Retention | None = None
    descriptors: dict[str, Snapshot] = field(default_factory=dict)
    busy: dict[TaskKey, float] = field(default_factory=dict)
    rescaling: dict[TaskKey, float] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    held_from: int | None = None
    held_by_record: int | None = None
    maintained: float = 0.0
    assignment: Assignment | None = None
    reported_owners: dict[TaskKey, str] = field(default_factory=dict)
    announced: Completed | None = None
    announced_by_host: dict[str, Completed] = field(default_factory=dict)
    retired_by: str | None = None
    ended: bool = False
    driver_seen: float = 0.0
    counter: CheckpointIDCounter = field(default_factory=CheckpointIDCounter)
    stats: CheckpointStatsTracker = field(default_factory=CheckpointStatsTracker)
    lag: SnapshotLag | None = None
    warned_of: int | None = None
    uncertain: bool = False
    unbalanced: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._times: tuple[int, BatchTimes] | None = None
        self.adopt(self.registration.operators)
        operators = self.registration.operators
        self.layouts = {o.name: Layout(o.name, o.num_partitions, o.backend) for o in operators}
        self.num_tasks = sum(o.num_partitions for o in operators)
        self.checkpoints = CheckpointCoordinator(
            self.run_id,
            self.tasks(),
            id_counter=self.counter,
            stats_tracker=self.stats,
            timeout=None,  # Spark commits a batch however long it took
            clock=self.clock,
            on_fully_acknowledged_checkpoint=self._prepare,
        )

    @property
    def run_id(self) -> str:
        """The run."""
        return self.registration.run_id

    def adopt(self, operators: tuple[OperatorSpec, ...]) -> None:
        """Take the declarations with their schemas as they have become over all runs; nothing else of them differs."""
        self.registration = msgspec.structs.replace(self.registration, operators=operators)
        self._specs = {o.name: o for o in operators}
        self.schema_ids = {o.name: OperatorSchema.from_json(o.schema).id for o in operators}

    def begin_with(self, initial: Mapping[str, Mapping[int, PartitionEntry]]) -> None:
        """Write the manifest of version 0 of a state that does not begin empty."""
        operators = {
            name: OperatorEntry.of(
                layout.num_partitions, self.schema_ids[name], layout.backend, dict(initial.get(name, {}))
            )
            for name, layout in self.layouts.items()
        }
        manifest_id, now = self.counter.get_and_increment(), self._now_ms()
        self._append(
            Manifest(manifest_id, None, 0, self.log.epoch, self.run_id, now, operators, oldest=0, chain_from=0)
        )

    def operator(self, name: str) -> OperatorSpec | None:
        """The declaration of an operator."""
        return self._specs.get(name)

    def tasks(self) -> Iterator[TaskKey]:
        """Every declared partition of every operator."""
        for operator in self.registration.operators:
            for partition in range(operator.num_partitions):
                yield operator.name, partition

    def entry(self, version: int, operator: str, partition: int) -> PartitionEntry | None:
        """What a partition contributed to a version of the chain, in the layout of that version."""
        return chains.entry(self.chain, version, operator, partition)

    def head(self, version: int, operator: str, partition: int) -> str | None:
        """What made a partition's state at a version; None for the empty version 0."""
        return chains.head_of(self.chain, version, self.layouts[operator], partition, self.registration.key_groups)

    @property
    def oldest(self) -> int:
        """The oldest version that is kept, besides the empty 0."""
        return self.chain[max(self.chain)].oldest if self.chain else 0

    @property
    def readable(self) -> range:
        """The completed versions that are kept; the empty version 0 is one as long as nothing has been removed."""
        chain, completed = self.chain, self.completed
        if not chain:
            return range(completed, completed + 1)
        lowest = min(chain)
        oldest = chain[max(chain)].oldest or (0 if lowest <= 1 else lowest)
        return range(min(oldest, completed), completed + 1)

    @property
    def below(self) -> dict[int, Manifest]:
        """The completed part of the chain."""
        return {v: m for v, m in self.chain.items() if v <= self.completed}

    def snapshots(self, operator: str, partition: int, version: int) -> tuple[SnapshotRef, ...]:
        """A partition's snapshots of versions up to one, ascending, named in a manifest or not yet; in the present layout."""
        held = chains.segments(self.chain, operator, self.completed)
        named: list[SnapshotRef] = []
        if held and held[0].layout == self.layouts[operator]:
            named = chains.snapshots(self.below, held[0], of=partition).get(partition, [])
        known = {s.file.path: s for s in (*named, *self.unnamed.get((operator, partition), ()))}
        return tuple(sorted((s for s in known.values() if s.version <= version), key=lambda s: s.version))

    def heads(self, version: int, keys: Iterable[TaskKey]) -> dict[str, dict[int, str]]:
        """Those of some partitions, by operator; those of the empty version 0 are left out."""
        heads: dict[str, dict[int, str]] = {name: {} for name in self.layouts}
        for operator, partition in keys:
            head = self.head(version, operator, partition)
            if head is not None:
                heads[operator][partition] = head
        return heads

    def lineage(self, operator: str, partition: int, version: int) -> Lineage:
        """The files that lead to a version."""
        layout = self.layouts[operator]
        found = chains.lineage(self.chain, version, layout, partition, self.registration.key_groups)
        return msgspec.structs.replace(found, snapshots=self.snapshots(operator, partition, version))

    def carry_snapshots(self) -> None:
        """Take up the snapshots that only manifests of versions above the completed one name: those may be replaced."""
        for task, found in self._named_only_above().items():
            if self.is_in_layout(self.completed, task[0]):
                self.unnamed[task] = found

    def is_in_layout(self, version: int, operator: str) -> bool:
        """Whether a version of the chain is in the layout that the run declares."""
        manifest = self.chain.get(version)
        held = manifest.operators.get(operator) if manifest else None
        return held is not None and chains.layout_of(operator, held) == self.layouts[operator]

    def take_over(self) -> bool:
        """Make what is there the record of this epoch: what an older coordinator may yet write counts for nothing then.

        Returns whether versions above the completed one are given up. They are if the user has removed Spark's last
        batches: with other rows to come, nothing may be put together with them. A version that was merely not committed
        in time stays, for its batch comes again with the same rows. What only manifests that are given up name of
        snapshots is named again, also for the sake of an earlier layout, whose snapshots the manifests of the run's own
        layout cannot name.
        """
        if not self.chain:
            return False
        newest = max(self.chain)
        lost = {} if newest == self.completed else self._named_only_above()
        is_same_layout = all(self.is_in_layout(self.completed, operator) for operator, _ in lost)
        is_ours = self.chain[newest].run_id == self.run_id
        comes_again = newest == self.completed + 1 and (is_ours or self.commits.has_begun(self.completed))
        goes_back = newest > self.completed and self.completed in self.chain and not (is_same_layout and comes_again)
        if goes_back:
            self._write_again(self.completed, lost)
        elif self.chain[newest].epoch != self.log.epoch:
            self._write_again(newest)
        return goes_back

    def _named_only_above(self) -> dict[TaskKey, tuple[SnapshotRef, ...]]:
        """Snapshots of the completed versions that only manifests above these name."""
        below, lost = self.below, {}
        for operator in self.layouts:
            for held in chains.segments(below, operator)[:1]:
                named = chains.snapshots(below, held)
                for partition, found in chains.snapshots(below, held, self.chain.values()).items():
                    if gone := tuple(s for s in found if s not in named.get(partition, ())):
                        lost[(operator, partition)] = gone
        return lost

    def plan_retention(self, is_sound: Callable[[SnapshotRef], bool]) -> None:
        """Decide which versions the next manifest keeps."""
        target = max(0, self.completed - self.registration.min_versions_to_retain - 1)
        target = min((target, *self.pinned.values()))
        self.planned = chains.retain(self.below, self.layouts, target, self.oldest, is_sound)

    def cancel_checkpoints(self) -> None:
        """The query has ended: what is pending is given up."""
        self.checkpoints.cancel_all("the query has ended")

    def is_rescaling(self, now: float) -> bool:
        """Whether a partition is being made of the files of an earlier layout."""
        return any(until > now for until in self.rescaling.values())

    # -- the running batch ---------------------------------------------------------------------

    def acknowledged(self, version: int) -> dict[TaskKey, PartitionEntry]:
        """What the partitions have acknowledged of a version that is not completed yet."""
        for checkpoint in (self.batch, self.last):
            if checkpoint is not None and checkpoint.properties["version"] == version:
                return checkpoint.states
        return {}

    def acknowledge(
        self, version: int, entries: Mapping[TaskKey, PartitionEntry], durations: Mapping[TaskKey, float] = NO_DURATIONS
    ) -> int | None:
        """Take partitions' changes; the last ones write the manifest. Returns its id once the version is prepared.

        Changes of a prepared version, by repeated attempts, make another manifest with a higher id. ``durations`` in seconds.
        """
        batch = self.batch
        if batch is None or batch.is_discarded or batch.properties["version"] != version:
            batch = self._start(version, {t: e for t, e in self.acknowledged(version).items() if t not in entries})
        # Those that are repeated first: with the last missing one the checkpoint is complete.
        for task, entry in sorted(entries.items(), key=lambda named: batch.lacks(named[0])):
            size, duration = entry.changelog.size, durations.get(task, 0.0)
            self.checkpoints.receive_acknowledge_message(
                AcknowledgeCheckpoint(self.run_id, task, batch.id, entry, size, duration)
            )
        return self.chain[version].id if self.batch is None else None

    def times(self, batch_id: int) -> BatchTimes | None:
        """The times of a batch, as Spark has logged them; None if no operator uses them."""
        if not any(o.uses_time for o in self.registration.operators):
            return None
        if self._times is None or self._times[0] != batch_id:
            self._times = (batch_id, self.commits.times(batch_id))
        return self._times[1]

    def begin(self, version: int) -> None:
        """The first task of a batch is there: its checkpoint begins, unless it has before."""
        known = (self.batch, self.last)
        if all(checkpoint is None or checkpoint.properties["version"] != version for checkpoint in known):
            self._start(version, {})

    def _start(self, version: int, states: dict[TaskKey, PartitionEntry]) -> PendingCheckpoint:
        if self.batch is not None:
            self.checkpoints.cancel_checkpoint(self.batch.id, f"batch {version - 1} has begun")
        self.batch = self.checkpoints.trigger_checkpoint(states=states, properties={"version": version})
        return self.batch

    def _prepare(self, checkpoint: CompletedCheckpoint) -> None:
        """Write the manifest of a checkpoint that every partition has acknowledged."""
        version: int = checkpoint.properties["version"]
        held: dict[TaskKey, PartitionEntry] = checkpoint.states
        self._append(self._manifest(version, checkpoint.id, self.layouts, held, self.schema_ids))
        self.recorded = self.planned
        self.batch, self.last = None, checkpoint

    def _manifest(
        self,
        version: int,
        manifest_id: int,
        layouts: Mapping[str, Layout],
        held: Mapping[TaskKey, PartitionEntry],
        schema_ids: Mapping[str, str],
    ) -> Manifest:
        below = self.chain.get(version - 1)
        keep = self.planned or Retention(self.oldest, min(self.chain, default=1))
        return Manifest(
            id=manifest_id,
            parent=below.id if below else None,
            version=version,
            epoch=self.log.epoch,
            run_id=self.run_id,
            created_ms=self._now_ms(),
            operators={
                name: OperatorEntry.of(
                    layout.num_partitions,
                    schema_ids[name],
                    layout.backend,
                    {
                        p: PartitionEntry(e.attempt, e.changelog, self._unnamed_in(layout, p))
                        for p in range(layout.num_partitions)
                        if (e := held[(name, p)])
                    },
                )
                for name, layout in layouts.items()
            },
            oldest=keep.oldest,
            chain_from=keep.chain_from,
        )

    def _unnamed_in(self, layout: Layout, partition: int) -> tuple[SnapshotRef, ...]:
        if layout != self.layouts[layout.operator]:
            return ()
        return self.unnamed.get((layout.operator, partition), ())

    def _append(self, manifest: Manifest) -> None:
        self.uncertain = True
        appended = self.log.append(manifest, self.counter)
        self.uncertain = False
        kept = {v: m for v, m in self.chain.items() if manifest.chain_from <= v < manifest.version}
        self.chain = {**kept, manifest.version: appended}

    def _now_ms(self) -> int:
        return int(self.clock() * 1000)

    # -- versions ------------------------------------------------------------------------------

    def name_snapshots(self) -> None:
        """Name the snapshots that are not named yet in a manifest of the completed version, for the next run to find.

        Not if a later version is prepared already: it would no longer be the newest. Nor if the user, who does not wait for
        us behind ``stop()``, has removed the checkpoint: it must not come to be again.
        """
        if (
            self.ended
            or self.retired_by
            or not any(self.unnamed.values())
            or max(self.chain, default=0) != self.completed
            or self.log.query_file() is None
        ):
            return
        named = {task: found for task, found in self.unnamed.items() if self.is_in_layout(self.completed, task[0])}
        self._write_again(self.completed, named)
        self.unnamed.clear()

    def _write_again(self, version: int, found: Mapping[TaskKey, tuple[SnapshotRef, ...]] = EMPTY) -> None:
        """Write a version's manifest once more, as the newest and under this epoch, naming more snapshots."""
        current = self.chain[version]
        operators = {
            name: msgspec.structs.replace(
                operator,
                partitions=operator.partitions.with_snapshots(
                    {p: found[(name, p)] for p in operator.partitions if (name, p) in found}
                ),
            )
            for name, operator in current.operators.items()
        }
        self._append(
            msgspec.structs.replace(
                current,
                id=self.counter.get_and_increment(),
                epoch=self.log.epoch,
                created_ms=self._now_ms(),
                operators=operators,
                # What a newer one has let go of does not come back.
                oldest=max(current.oldest, self.oldest),
                chain_from=max(current.chain_from, min(self.chain)),
            )
        )

    def complete(self, version: int) -> None:
        """Take a version as completed: Spark has committed its batch."""
        is_ours = self.highest_opened >= version - 1
        if version not in self.chain or (is_ours and self.chain[version].run_id != self.run_id):
            # If this run has not begun the batch, an older one, still running when this one was registered, has committed it.
            self.recover(version)
            self._require_own_schemas(version)
        elif self.uncertain:
            # A manifest whose writing failed may be there all the same, or come to be. What is completed must not change.
            self._write_again(version)
        self.completed = version
        self.last = None
        for name, operator in self.chain[version].operators.items():
            for partition, named in operator.partitions.snapshots.items():
                left = tuple(s for s in self.unnamed.pop((name, partition), ()) if s not in named)
                if left:
                    self.unnamed[(name, partition)] = left
        self.announce()

    def _require_own_schemas(self, version: int) -> None:
        """Raise ``LineageError`` if another program has written a version: this one would take its rows for its own."""
        for name, operator in self.chain[version].operators.items():
            if operator.schema_id != self.schema_ids[name]:
                raise LineageError(
                    f"Run {self.chain[version].run_id} has committed batch {version - 1} after run {self.run_id} had been "
                    f"started, with another schema of operator {name!r}. Start the query again."
                )

    def announce(self) -> None:
        """Get ready what the hosts are told of the completed version, each of its own partitions."""
        of_host = {} if self.assignment is None else self.assignment.of_host
        by_host = {h: Completed(self.run_id, self.completed, self.heads(self.completed, t)) for h, t in of_host.items()}
        # Who reads without the lock takes what is for all first.
        self.announced_by_host = by_host
        self.announced = Completed(self.run_id, self.completed, {})

    def recover(self, version: int) -> None:
        """Prepare a version that Spark has committed although this coordinator saw no manifest of it.

        Hosts may have died together with an earlier coordinator after their acknowledgements; the
        changelogs are durable and name their run and base. Raises ``IncompleteBatchError``.
        """
        self.log.refresh()
        self.chain = self.log.chain()
        if version in self.chain and self.chain[version].run_id == self.run_id:
            return
        run_id, layouts, found = self.stored_changes(version)
        lacking = [task for task in tasks_of(layouts) if task not in found]
        if lacking:
            raise IncompleteBatchError(incomplete_message(version - 1, lacking, len(tasks_of(layouts))))
        if self.batch is not None:
            self.checkpoints.cancel_checkpoint(self.batch.id, f"batch {version - 1} is committed")
            self.batch = None
        # Rows are numbered by the schemas of the run that has written them.
        theirs = self.log.runs().get(run_id)
        schema_ids = theirs.schema_ids if theirs is not None and run_id != self.run_id else {}
        ids = {**self.schema_ids, **schema_ids}
        self._append(self._manifest(version, self.counter.get_and_increment(), layouts, found, ids))

    def stored_changes(self, version: int) -> tuple[str, Mapping[str, Layout], dict[TaskKey, PartitionEntry]]:
        """What the partitions have acknowledged of a version, or else what the storage has of it; of which run, in which layouts.

        If this run has done nothing of it, an earlier one has: Spark had committed its batch before this run began, perhaps
        with another number of partitions. Changes of two runs never make one version: each may have seen other rows.
        """
        found = dict(self.acknowledged(version))
        runs = {
            self.run_id: self.layouts,
            **{r: {x.operator: x for x in file.layouts} for r, file in self.log.runs().items() if r != self.run_id},
        }
        for run_id, layouts in runs.items():
            if layouts.keys() != self.layouts.keys():
                continue
            for name, partition in tasks_of(layouts):
                if (name, partition) not in found:
                    changes = self._stored_changelog(layouts[name], partition, version, run_id)
                    if changes is not None:
                        found[(name, partition)] = changes
            if found:
                return run_id, layouts, found
        return self.run_id, self.layouts, found

    def _stored_changelog(self, layout: Layout, partition: int, version: int, run_id: str) -> PartitionEntry | None:
        base = chains.head_of(self.chain, version - 1, layout, partition, self.registration.key_groups)
        for path, size in reversed(self.log.storage.list(f"{layout.directory(partition)}/")):
            name = path.rsplit("/", 1)[-1]
            if not name.startswith(f"{version}-") or not name.endswith(".changelog"):
                continue
            data = self.log.storage.get(path)
            meta = read_changelog_meta(data)
            if (meta.query_run_id, meta.version, meta.base) == (run_id, version, base):
                return PartitionEntry(meta.attempt, FileRef(path, size, digest(data)))
        return None


def tasks_of(layouts: Mapping[str, Layout]) -> list[TaskKey]:
    """Every partition of every operator."""
    return [(name, p) for name, layout in layouts.items() for p in range(layout.num_partitions)]


def incomplete_message(batch_id: int, lacking: list[TaskKey], total: int) -> str:
    """Why a batch that ran only in part stops the query, and how to go on."""
    named = ", ".join(f"{o}/{p}" for o, p in lacking[:8]) + (", ..." if len(lacking) > 8 else "")
    return (
        f"Spark committed batch {batch_id}, but {len(lacking)} of {total} state partitions never ran in it ({named}): "
        "most likely a foreachBatch function consumed only a part of its DataFrame (head, limit, take). Make it consume all "
        f"of it in every batch, delete commits/{batch_id} and offsets/{batch_id + 1} in the checkpoint location, and start "
        "the query again: it repeats the batch from the state before it."
    )
