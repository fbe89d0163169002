"""The micro-batch of a run that is under way: which of its tasks have acknowledged their changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from backends.formats.manifest import Manifest, PartitionEntry
from coordinator_actor.checkpoints.acknowledgements import AcknowledgeCheckpoint
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.pending_checkpoint import PendingCheckpoint
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.query.query_versions import changes_in

NO_DURATIONS: Mapping[TaskKey, float] = MappingProxyType({})


class RunningBatch:
    """The batch that is under way. Every micro-batch is a checkpoint of all operators.

    ``highest_opened`` is the highest batch id that a host has opened, -1 before the first. ``pending`` is the
    checkpoint that is being acknowledged, ``prepared`` the last one whose manifest was written, until its version is
    completed. ``prepare(version, checkpoint id, changes)`` writes the manifest. The lock of the run guards everything
    here.
    """

    def __init__(
        self,
        run_id: str,
        tasks: Iterable[TaskKey],
        counter: CheckpointIDCounter,
        clock: Callable[[], float],
        prepare: Callable[[int, int, Mapping[TaskKey, PartitionEntry]], None],
    ) -> None:
        self.highest_opened = -1
        self.pending: PendingCheckpoint | None = None
        self.prepared: CompletedCheckpoint | None = None
        self._run_id = run_id
        self._prepare = prepare
        self._warned_of: int | None = None
        self.checkpoints = CheckpointCoordinator(
            run_id,
            tasks,
            id_counter=counter,
            timeout=None,  # Spark commits a batch however long it took
            clock=clock,
            on_fully_acknowledged_checkpoint=self._write_manifest,
        )

    def opened(self, batch_id: int) -> None:
        """Take note that a host has opened a batch, as it reports or by its acknowledgement."""
        self.highest_opened = max(self.highest_opened, batch_id)

    def begin(self, batch_id: int) -> None:
        """Begin the checkpoint of a batch that a host opens, unless it has begun before."""
        self.highest_opened = batch_id
        known = (self.pending, self.prepared)
        if all(checkpoint is None or checkpoint.properties["version"] != batch_id + 1 for checkpoint in known):
            self._start(batch_id + 1, {})

    def acknowledged(self, version: int) -> dict[TaskKey, PartitionEntry]:
        """Return the changes that were acknowledged of a version that is not completed yet."""
        for checkpoint in (self.pending, self.prepared):
            if checkpoint is not None and checkpoint.properties["version"] == version:
                return checkpoint.states
        return {}

    def acknowledge(
        self, version: int, entries: Mapping[TaskKey, PartitionEntry], durations: Mapping[TaskKey, float]
    ) -> bool:
        """Take the changes of partitions. The last missing ones write the manifest. Return whether it is written.

        Changes of a prepared version, by repeated attempts, make another manifest with a higher id. ``durations`` are
        in seconds.
        """
        batch = self.pending
        if batch is None or batch.is_discarded or batch.properties["version"] != version:
            batch = self._start(version, {t: e for t, e in self.acknowledged(version).items() if t not in entries})
        # Repeated changes first: with the last missing one the checkpoint is complete.
        for task, entry in sorted(entries.items(), key=lambda named: batch.lacks(named[0])):
            size, duration = entry.changelog.size, durations.get(task, 0.0)
            self.checkpoints.receive_acknowledge_message(
                AcknowledgeCheckpoint(self._run_id, task, batch.id, entry, size, duration)
            )
        return self.pending is None

    def _start(self, version: int, states: Mapping[TaskKey, PartitionEntry]) -> PendingCheckpoint:
        if self.pending is not None:
            self.checkpoints.cancel_checkpoint(self.pending.id, f"batch {version - 1} has begun")
        self.pending = self.checkpoints.trigger_checkpoint(states=states, properties={"version": version})
        return self.pending

    def _write_manifest(self, checkpoint: CompletedCheckpoint) -> None:
        self._prepare(checkpoint.properties["version"], checkpoint.id, checkpoint.states)
        self.pending, self.prepared = None, checkpoint

    def restore_prepared(self, manifest: Manifest) -> None:
        """Take up a version that was prepared before the coordinator was restarted.

        The manifest knows better than the hosts which attempts were the last ones.
        """
        self.prepared = CompletedCheckpoint(
            manifest.id,
            manifest.created_ms / 1000,
            0.0,
            dict(changes_in(manifest)),
            properties={"version": manifest.version},
        )

    def completed(self) -> None:
        """Forget the prepared checkpoint: its version is completed."""
        self.prepared = None

    def give_up(self, why: str) -> None:
        """Give the pending checkpoint up."""
        if self.pending is not None:
            self.checkpoints.cancel_checkpoint(self.pending.id, why)
            self.pending = None

    def slow_warning(self, now: float, seconds: float) -> str | None:
        """Return the warning about a batch that has taken longer than ``seconds``.

        None if there is no such batch, or if its warning was returned before.
        """
        batch = self.pending
        if batch is None or now - batch.started <= seconds or self._warned_of == batch.id:
            return None
        self._warned_of = batch.id
        return (
            f"Batch {batch.properties['version'] - 1} of run {self._run_id} has not been acknowledged for "
            f"{now - batch.started:.0f} s: {batch.describe_missing()}"
        )
