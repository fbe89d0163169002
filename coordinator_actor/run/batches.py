"""The micro-batch of a run that is under way: which of its tasks have acknowledged their changes.

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

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import MappingProxyType
from typing import Generic, TypeVar

from backends.formats.manifest import Manifest, PartitionEntry
from backends.spans import Pool
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, CheckpointHooks
from coordinator_actor.checkpoints.pending_checkpoint import (
    AcknowledgeCheckpoint,
    CheckpointIDCounter,
    CompletedCheckpoint,
    PendingCheckpoint,
    TaskKey,
)
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import InvalidRequestError, RetiredRunError
from coordinator_actor.messages import BatchTimes, InputPace
from coordinator_actor.run.versions import NO_STAGES, changes_in

NO_DURATIONS: Mapping[TaskKey, float] = MappingProxyType({})


class RunningBatch:
    """The batch that is under way. Every micro-batch is a checkpoint of all operators.

    ``highest_opened`` is the highest batch id that a host has opened, -1 before the first. ``pending`` is the
    checkpoint that is being acknowledged, ``prepared`` the last one whose manifest was written, until its version is
    completed. ``prepare(version, checkpoint id, changes)`` writes the manifest. The lock of the run guards everything
    here. A call that raises an error has changed nothing here. Memory grows with the number of tasks.
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
        self._tasks = tuple(tasks)
        self._prepare = prepare
        self._warned_of: int | None = None
        # The stage of each task's last acknowledgement of the version, if known.
        self._stages: dict[TaskKey, int] = {}
        # Of the prepared version: repeated changes that no manifest names yet, with their duration in seconds,
        self._repeated: dict[TaskKey, tuple[PartitionEntry, float]] = {}
        # the tasks that are still to come in the stage that runs the plan again, and that stage of each operator.
        self._awaited: set[TaskKey] = set()
        self._repeating: dict[str, int] = {}
        self._may_wait = True
        self.checkpoints = CheckpointCoordinator(
            run_id,
            self._tasks,
            CheckpointHooks(store=self._write_manifest),
            id_counter=counter,
            timeout=None,  # Spark commits a batch however long it took
            clock=clock,
        )

    def opened(self, batch_id: int) -> None:
        """Record that a host has opened a batch, as it reports directly or by its acknowledgement."""
        self.highest_opened = max(self.highest_opened, batch_id)

    def begin(self, batch_id: int) -> None:
        """Begin the checkpoint of a batch that a host opens, unless it has begun before."""
        self.highest_opened = batch_id
        known = (self.pending, self.prepared)
        if all(checkpoint is None or checkpoint.properties["version"] != batch_id + 1 for checkpoint in known):
            self._start(batch_id + 1, {})

    # -- what is known -------------------------------------------------------------------------

    def acknowledged(self, version: int) -> dict[TaskKey, PartitionEntry]:
        """Return the acknowledged changes of a version that is not completed yet: the last of each task."""
        if self._is_prepared(version):
            assert self.prepared is not None
            return {**self.prepared.states, **{task: entry for task, (entry, _) in self._repeated.items()}}
        if self.pending is not None and self.pending.properties["version"] == version:
            return self.pending.states
        return {}

    def is_taken(self, version: int, task: TaskKey, entry: PartitionEntry) -> bool:
        """Return whether these are a task's last acknowledged changes of a prepared version."""
        return self._is_prepared(version) and self._last(task) == entry

    def is_named(self, task: TaskKey) -> bool:
        """Return whether a manifest of the prepared version names the last acknowledged changes of a task."""
        return task not in self._repeated

    def is_newer(self, task: TaskKey, stage: int | None) -> bool:
        """Return whether a stage of a task is known to be later than the stage of its last acknowledgement."""
        return stage is not None and stage > self._stages.get(task, stage)

    @property
    def is_repeated(self) -> bool:
        """Return whether tasks of the prepared version were repeated and no manifest names their changes yet."""
        return bool(self._repeated)

    @property
    def stages(self) -> Mapping[TaskKey, int]:
        """Return the stage of each task's last acknowledgement of the version, if known."""
        return MappingProxyType(self._stages)

    def _is_prepared(self, version: int) -> bool:
        return self.prepared is not None and self.prepared.properties["version"] == version

    def _last(self, task: TaskKey) -> PartitionEntry | None:
        assert self.prepared is not None
        repeated = self._repeated.get(task)
        entry: PartitionEntry | None = self.prepared.states.get(task) if repeated is None else repeated[0]
        return entry

    # -- acknowledging -------------------------------------------------------------------------

    def acknowledge(
        self,
        version: int,
        entries: Mapping[TaskKey, PartitionEntry],
        durations: Mapping[TaskKey, float],
        stages: Mapping[TaskKey, int] = NO_STAGES,
    ) -> bool:
        """Take the changes of partitions. The last missing ones write the manifest. Return whether one names them.

        Changes of a prepared version make another manifest with a higher id; see the head of this file for when.
        ``durations`` are in seconds, ``stages`` are Spark's stage ids, if known. Loops over all tasks run for a
        manifest and for a new stage, not for every message.
        """
        with self._noted(stages) as earlier:
            if self._is_prepared(version):
                return self._acknowledge_again(entries, durations, stages, earlier)
            return self._acknowledge_first(version, entries, durations)

    def _acknowledge_first(
        self, version: int, entries: Mapping[TaskKey, PartitionEntry], durations: Mapping[TaskKey, float]
    ) -> bool:
        batch = self.pending
        if batch is None or batch.is_discarded or batch.properties["version"] != version:
            batch = self._start(version, {t: e for t, e in self.acknowledged(version).items() if t not in entries})
        before = {task: state for task in entries if (state := batch.state(task)) is not None}
        try:
            # Repeated changes first: with the last missing one the checkpoint is complete.
            for task, entry in sorted(entries.items(), key=lambda named: batch.lacks(named[0])):
                self._receive(batch, task, entry, durations.get(task, 0.0))
        except BaseException as error:
            kept = {**{t: e for t, e in batch.states.items() if t not in entries}, **before}
            self._start(version, kept, f"it could not be completed: {error}")
            raise
        if batch.is_discarded and batch.completed is None:
            # The lease of the driver, which waits for no lock, has expired in between.
            raise RetiredRunError(f"Run {self._run_id} is over: its checkpoint {batch.id} was cancelled.")
        return self.pending is None

    def _acknowledge_again(
        self,
        entries: Mapping[TaskKey, PartitionEntry],
        durations: Mapping[TaskKey, float],
        stages: Mapping[TaskKey, int],
        earlier: Mapping[TaskKey, int],
    ) -> bool:
        """Take changes of the prepared version. ``earlier`` are the stages of these tasks that were known before."""
        new = {t: (e, durations.get(t, 0.0)) for t, e in entries.items() if self._last(t) != e}
        in_new_stage = {t for t in new if t in earlier and stages[t] > earlier[t]}
        awaited, repeating = set(self._awaited), dict(self._repeating)
        for operator, stage in {(t[0], stages[t]) for t in in_new_stage}:
            if stage > repeating.get(operator, -1):
                repeating[operator] = stage
                awaited |= {t for t in self._tasks if t[0] == operator and self._stages.get(t, stage) < stage}
        awaited -= new.keys()
        if self._may_wait and awaited and in_new_stage == new.keys():
            self._repeated.update(new)
        else:
            self._name({**self._repeated, **new})
        self._awaited, self._repeating = awaited, repeating
        return not self._repeated

    def end_repeat(self) -> None:
        """Write the manifest of a version that was repeated in part: the other partitions stay as they were.

        If it cannot be written, nothing has changed, and the next call writes it under another id.
        """
        if self._repeated:
            self._name(self._repeated)
            self._awaited = set()

    def wait_no_more(self) -> None:
        """Write all changes that no manifest names yet.

        From now on write a manifest before each answer: the run is replaced.

        Acknowledged changes that no manifest names would be lost with the run.
        """
        self._may_wait = False
        self.end_repeat()

    def _name(self, repeated: Mapping[TaskKey, tuple[PartitionEntry, float]]) -> None:
        """Write another manifest of the prepared version: with these changes, and the named ones of all other tasks."""
        if not repeated:
            return
        assert self.prepared is not None
        unchanged = {t: e for t, e in self.prepared.states.items() if t not in repeated}
        batch = self.checkpoints.trigger_checkpoint(states=unchanged, properties=self.prepared.properties)
        try:
            for task, (entry, duration) in repeated.items():
                self._receive(batch, task, entry, duration)
            if batch.completed is None:
                raise InvalidRequestError(
                    f"Checkpoint {batch.id} of run {self._run_id} was cancelled; the run has ended."
                )
        except BaseException as error:
            self.checkpoints.cancel_checkpoint(batch.id, f"its manifest could not be written: {error}")
            raise
        self._repeated = {}

    def _receive(self, batch: PendingCheckpoint, task: TaskKey, entry: PartitionEntry, duration: float) -> None:
        self.checkpoints.receive_acknowledge_message(
            AcknowledgeCheckpoint(self._run_id, task, batch.id, entry, entry.changelog.size, duration)
        )

    @contextmanager
    def _noted(self, stages: Mapping[TaskKey, int]) -> Iterator[dict[TaskKey, int]]:
        """Record the stages, unless the block fails. Yield the earlier known stages of the same tasks."""
        earlier = {task: self._stages[task] for task in stages if task in self._stages}
        self._stages.update({task: max(stage, earlier.get(task, stage)) for task, stage in stages.items()})
        try:
            yield earlier
        except BaseException:
            for task in stages:
                self._stages.pop(task, None)
            self._stages.update(earlier)
            raise

    def _start(self, version: int, states: Mapping[TaskKey, PartitionEntry], why: str = "") -> PendingCheckpoint:
        """Begin a checkpoint. A pending one is cancelled: ``why``, or because of the batch that has begun."""
        if self.pending is not None:
            self.checkpoints.cancel_checkpoint(self.pending.id, why or f"batch {version - 1} has begun")
        self.pending = self.checkpoints.trigger_checkpoint(states=states, properties={"version": version})
        return self.pending

    def _write_manifest(self, checkpoint: CompletedCheckpoint) -> None:
        self._prepare(checkpoint.properties["version"], checkpoint.id, checkpoint.states)
        self.pending, self.prepared = None, checkpoint

    # -- advancing --------------------------------------------------------------------------------

    def restore_prepared(self, manifest: Manifest) -> None:
        """Recover a version that was prepared before the coordinator was restarted.

        The manifest, not the hosts, determines the last attempts, except those of a later stage.
        """
        changes = changes_in(manifest)
        self.prepared = CompletedCheckpoint(
            manifest.id,
            manifest.created_ms / 1000,
            0.0,
            dict(changes),
            properties={"version": manifest.version},
        )
        known = {(name, p): manifest.operators[name].stage_of(p) for name, p in changes}
        self._stages = {task: stage for task, stage in known.items() if stage is not None}

    def completed(self) -> None:
        """Forget the prepared checkpoint: its version is completed."""
        self.prepared = None
        self._stages, self._repeated, self._awaited, self._repeating = {}, {}, set(), {}

    def give_up(self, why: str) -> None:
        """Cancel the pending checkpoint."""
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


# Reads of Spark's commit log and offset log: each is made once, outside the lock and in parallel to the messages.
#
# A batch waits for two writes, its changes and its manifest. Before them its first task needs two facts: the batch
# before is committed, and the times of its own batch. The driver reports a committed batch while Spark plans the next
# one, so that the first fact is known when the tasks come. Callers that need the same answer at the same time share one
# request.


T = TypeVar("T")


class _SingleFlight(Generic[T]):
    """One request for all threads that ask for the same batch, and its answer until another batch is requested."""

    def __init__(self, ask: Callable[[int], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._batch: int | None = None
        self._answer: Future[T] = Future()

    def at(self, batch_id: int) -> T:
        """Return the answer for a batch. A false answer and an error are not kept: the next caller asks again."""
        while True:
            with self._lock:
                is_ours = self._batch != batch_id
                if is_ours:
                    self._batch, self._answer = batch_id, Future()
                answer = self._answer
            if is_ours:
                return self._asked(batch_id, answer)
            # The thread that asked raises its error, and a False may be older than this call: then ask again.
            if answer.exception() is None and (told := answer.result()):
                return told

    def _asked(self, batch_id: int, answer: Future[T]) -> T:
        told: T | None = None
        try:
            told = self._ask(batch_id)
        except BaseException as error:
            self._forget(answer)
            answer.set_exception(
                error if isinstance(error, Exception) else RuntimeError("the thread that asked has ended")
            )
            raise
        if not told:
            self._forget(answer)
        answer.set_result(told)
        return told

    def _forget(self, answer: Future[T]) -> None:
        with self._lock:
            if self._answer is answer:
                self._batch = None


class SparkLogs:
    """Spark's ``commits/`` and ``offsets/`` as one run reads them. Many threads may share an object."""

    def __init__(self, commits: SparkCommits) -> None:
        self._committed = _SingleFlight(commits.has)
        self._times = _SingleFlight(commits.times)

    def has(self, batch_id: int) -> bool:
        """Return whether Spark has committed a batch. During a run, a committed batch stays committed."""
        return self._committed.at(batch_id)

    def times(self, batch_id: int) -> BatchTimes:
        """Return the times of a batch that Spark has planned. Raises the errors of ``SparkCommits.times``."""
        return self._times.at(batch_id)

    def ahead(self, batch_id: int, *, is_before_open: bool, uses_time: bool) -> None:
        """Read what opening a batch needs, both at the same time: whether the batch before is committed, and the
        batch's times.

        Raises the errors of ``has`` and ``times``.
        """
        if not is_before_open:
            if uses_time:
                self.times(batch_id)
            return
        if not uses_time:
            self.has(batch_id - 1)
            return
        with Pool(1) as pool:
            times = pool.submit(self.times, batch_id)
            self.has(batch_id - 1)
            times.result()


# The times of a run's batches, as Spark has logged them: moment, watermark and late watermark.


class LoggedTimes:
    """The times of the last batch whose tasks needed them. The lock of the run guards ``at`` alone.

    ``uses_time``: an operator of the query uses times; otherwise nothing is read.
    """

    def __init__(self, logs: SparkLogs, clock: Callable[[], float], *, uses_time: bool) -> None:
        self._logs = logs
        self._uses_time = uses_time
        self._known: tuple[int, BatchTimes] | None = None
        self._clock = clock
        self.rose_at: float | None = None
        """When the current watermark was first read, by the clock of the coordinator."""

    @property
    def last(self) -> BatchTimes | None:
        """The times that were read last, for people."""
        known = self._known
        return None if known is None else known[1]

    @property
    def watermark_ms(self) -> int:
        """The watermark of the batch whose times were read last, in ms since 1970; 0 without one."""
        known = self._known
        return 0 if known is None else known[1].watermark_ms

    def at(self, batch_id: int) -> BatchTimes | None:
        """Return the times of a batch; None if no operator uses them. Raises what ``SparkLogs.times`` raises."""
        if not self._uses_time:
            return None
        if self._known is None or self._known[0] != batch_id:
            times = self._logs.times(batch_id)
            if self.rose_at is None or times.watermark_ms != self.watermark_ms:
                self.rose_at = self._clock()
            self._known = (batch_id, times)
        return self._known[1]

    def needs_reading(self, batch_id: int) -> bool:
        """Return whether ``at`` will have to read the times of a batch."""
        known = self._known
        return self._uses_time and (known is None or known[0] != batch_id)


# The time since Spark began to work on a batch, as the driver reports it.
#
# The checkpoint of a batch begins when a task opens the state. Before that Spark plans the batch and reads the source;
# after the last acknowledgement the sink writes. The checkpoint alone would suggest that no batch runs in these phases.


class SparkAtWork:
    """The reports of a run's driver, in a heartbeat a second. The lock of the run must be held only for ``heard``."""

    def __init__(self) -> None:
        self.pace: InputPace | None = None
        """The pace of the input in the last batch that the driver knows."""
        # The completed version, and since when Spark is at the batch after it;
        self._running: tuple[int, float] | None = None
        # the version that was completed last, and since when Spark was at its batch. Others may read during ``heard``.
        self._made: tuple[int, float] | None = None

    def heard(self, is_at_work: bool, completed: int, now: float) -> None:
        """Record a heartbeat. ``completed`` is the completed version: after it, another batch is at work."""
        running = self._running
        if running is not None and completed == running[0] + 1:
            self._made = (completed, running[1])
        if not is_at_work:
            self._running = None
        elif running is None or running[0] != completed:
            self._running = (completed, now)

    def began(self, completed: int, pending: PendingCheckpoint | None) -> float | None:
        """Return when the batch after the completed version began, at the latest; None if there is none."""
        known = [] if pending is None else [pending.started]
        running = self._running
        if running is not None and running[0] == completed:
            known.append(running[1])
        return min(known, default=None)

    def began_of(self, version: int) -> float | None:
        """Return when the batch of the newest completed version began; None for one that heartbeats did not see."""
        made = self._made
        return made[1] if made is not None and made[0] == version else None
