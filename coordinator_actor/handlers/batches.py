"""The micro-batches of runs: hosts open partitions, load them, and acknowledge their changes and snapshots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from backends import spans
from backends.exceptions import StateStoreError, VersionNotFoundError
from backends.formats.manifest import Lineage, PartitionEntry
from coordinator_actor.checkpoints.pending_checkpoint import TaskKey
from coordinator_actor.exceptions import (
    BatchHeldError,
    CoordinatorError,
    InvalidRequestError,
    LineageError,
    StaleBatchError,
    StaleOwnerError,
    UnknownRunError,
)
from coordinator_actor.handlers.locations import Locations
from coordinator_actor.handlers.owners import assigned
from coordinator_actor.handlers.registries import Registries, RunRegistry
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    BatchGrant,
    Completed,
    LookedUp,
    OpenBatch,
    OpenGrant,
    Refused,
    SnapshotUploaded,
)
from coordinator_actor.run.holds import UPLOAD
from coordinator_actor.run.owners import Assignment
from coordinator_actor.run.state import QueryState

# Completes the versions whose batches Spark has committed. The lock of the run is held in all calls.


def catch_up(runs: RunRegistry, run: QueryState) -> None:
    """Complete the prepared version if Spark has committed its batch, even if no message has reported it yet.

    Raises ``FencedError`` if another coordinator has taken over.
    """
    completed, chain = run.versions.completed, run.versions.chain
    following = chain.get(completed + 1)
    if following is not None and following.run_id == run.run_id and run.spark_logs.has(completed):
        _require_own(run)
        _complete(runs, run, completed + 1)


def advance(runs: RunRegistry, run: QueryState, batch_id: int, *, is_own: bool = False) -> None:
    """Complete version ``batch_id``, as Spark's commits say. Raises ``StaleBatchError`` or ``InvalidRequestError``.

    ``is_own``: the run's driver or a task of its next batch reported it. Else the commit was only seen, and it may be
    that of a run in another cluster which has replaced this one: raises ``FencedError`` if there is such a run.
    """
    completed = run.versions.completed
    if batch_id == completed:
        return
    if batch_id < completed:
        raise StaleBatchError(
            f"Batch {batch_id} of run {run.run_id} is committed already; version {completed} is completed."
        )
    if batch_id != completed + 1:
        raise InvalidRequestError(
            f"Version {batch_id} of run {run.run_id} cannot be completed: the last completed version is {completed}."
        )
    if not run.spark_logs.has(batch_id - 1):
        raise InvalidRequestError(
            f"Version {batch_id} of run {run.run_id} cannot be completed: Spark's commits/{batch_id - 1} does not "
            f"exist in {run.registration.checkpoint_location}, or no longer."
        )
    if not is_own:
        _require_own(run)
    _complete(runs, run, batch_id)


def _require_own(run: QueryState) -> None:
    """Raise ``FencedError`` unless a seen commit is certainly this run's: others claim an epoch before theirs."""
    run.manifests.epochs.check()


def _complete(runs: RunRegistry, run: QueryState, version: int) -> None:
    with spans.span("coordinator.complete", spans.batch(run.run_id, version)):
        run.complete(version)
    savepoints = runs.savepoints_of(run.run_id)
    if savepoints is not None:
        savepoints.on_completed()


class Batches:
    """Opens batches and takes the acknowledgements of their tasks. All changes to a run are made under its lock."""

    def __init__(self, registries: Registries) -> None:
        self._registries = registries
        self._runs = registries.runs

    def open_batch(self, request: OpenBatch) -> BatchGrant:
        trace = spans.batch(request.run_id, request.batch_id + 1)
        with spans.span("coordinator.open_batch", trace, host=request.host_id):
            return self._open_batch(request)

    def _open_batch(self, request: OpenBatch) -> BatchGrant:
        run = self._runs.awaited(request.run_id)
        batch_id = request.batch_id
        run.look_ahead(batch_id)
        with run.lock:
            run.lifetime.require_current()
            self._require_host(request.host_id, request.incarnation)
            if batch_id < run.batch.highest_opened:
                raise StaleBatchError(
                    f"A task of batch {batch_id} is too late: "
                    f"batch {run.batch.highest_opened} of run {run.run_id} has begun."
                )
            advance(self._runs, run, batch_id, is_own=True)
            if run.savepoint_hold.holds(batch_id):
                raise BatchHeldError(
                    f"Batch {batch_id} of run {run.run_id} waits: the query stops with a savepoint of version "
                    f"{run.savepoint_hold.batch_id}."
                )
            hold = run.rewriting.at(self._registries.clock())
            if hold is not None and hold.holds(batch_id):
                raise BatchHeldError(
                    f"Batch {batch_id} of run {run.run_id} waits: {hold.holder} rewrites files of its versions."
                )
            is_new = batch_id > run.batch.highest_opened
            waiting = [task for task in request.waiting if run.has_partition(*task)]
            assignment = assigned(self._registries, run, moves=is_new, waiting=waiting)
            run.batch.begin(batch_id)
            run.history.begun(batch_id + 1, self._registries.clock())
            is_news = request.assignment != assignment.number
            return BatchGrant(
                version=batch_id,
                epoch=run.manifests.epoch,
                assignment=assignment.number,
                registration=run.registration,
                heads=run.versions.heads(batch_id, assignment.of_host.get(request.host_id, ())),
                hosts=assignment.hosts if is_news else (),
                owners=dict(assignment.owners) if is_news else {},
                times=run.times.at(batch_id),
            )

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        run = self._runs.get(run_id)
        run.lifetime.require_served()
        run.require_partition(operator, partition)
        owner = assigned(self._registries, run).owner(operator, partition)
        # Without the lock of the run, which may be held over storage. Read the version first: the chain keeps it.
        completed = run.versions.completed
        head = run.versions.head(completed, operator, partition)
        is_begun = run.may_be_committed(completed)
        return OpenGrant(owner, completed, head, run.registration, run.manifests.epoch, is_begun=is_begun)

    def completed(self, run_id: str, host_id: str) -> Completed:
        run = self._runs.get(run_id)
        run.lifetime.require_served()
        announced = run.announcements.to(host_id)
        if announced is None:
            raise UnknownRunError(f"Run {run_id} is being registered; ask again.")
        return announced if run.lifetime.stopped_at is None else replace(announced, ended=True)

    def lineage(self, run_id: str, operator: str, partition: int, version: int, use: str = "") -> Lineage:
        run = self._runs.awaited(run_id)
        with run.lock:
            run.require_partition(operator, partition)
            versions = run.versions
            if use == UPLOAD and run.rewriting.at(self._registries.clock()) is not None:
                raise BatchHeldError(f"No snapshot of run {run_id} is taken while its files are being rewritten.")
            if version > versions.completed:
                raise InvalidRequestError(
                    f"Version {version} is not completed; {versions.completed} is the last one that is."
                )
            if version not in versions.readable:
                raise VersionNotFoundError(
                    f"Version {version} of query {run.registration.name or 'unnamed'} ({run.registration.query_id}) is "
                    f"no longer kept; there are the versions {versions.readable[0]} to {versions.readable[-1]}."
                )
            found = versions.lineage(operator, partition, version)
            run.files_in_use.begin(
                (operator, partition),
                use,
                self._registries.clock(),
                is_rescaling=found.rescaled is not None,
                # An upload reads no changelogs.
                oldest=math.inf if use == UPLOAD else found.oldest,
            )
            return found

    def renew_files(self, run_id: str, operator: str, partition: int, use: str) -> bool:
        run = self._runs.awaited(run_id)
        with run.lock:
            return run.files_in_use.renew((operator, partition), use, self._registries.clock())

    def release_files(self, run_id: str, operator: str, partition: int, use: str) -> None:
        run = self._runs.find(run_id)
        if run is not None:
            with run.lock:
                run.files_in_use.end((operator, partition), use)

    def snapshot_uploaded(self, message: SnapshotUploaded) -> bool:
        run = self._runs.awaited(message.run_id)
        task, new = (message.operator, message.partition), message.snapshot
        with run.lock:
            run.lifetime.require_current()
            run.require_partition(*task)
            self._require_host(message.host_id, message.incarnation)
            if not run.files_in_use.end(task, UPLOAD, self._registries.clock()):
                # The report is late: the host has given the upload up, or was considered dead. Some of its files were
                # unprotected and may have been removed.
                return False
            assignment = run.assignment.current
            owner = None if assignment is None else assignment.find(*task)
            if owner is None or owner.host_id != message.host_id:
                return False
            counts = run.versions.add_snapshot(task, new, message.reused, message.descriptor)
            if counts:
                run.snapshot_uploaded(task, new.version, self._registries.clock())
            return counts

    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: Sequence[Acknowledge]
    ) -> tuple[Acknowledged | Refused, ...]:
        # All of one version: those of an older one are rejected.
        trace = spans.batch(run_id, max((m.version for m in messages), default=0))
        with spans.span("coordinator.acknowledge", trace, host=host_id, num_partitions=len(messages)):
            return self._acknowledge_many(run_id, host_id, incarnation, messages)

    def _acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: Sequence[Acknowledge]
    ) -> tuple[Acknowledged | Refused, ...]:
        run = self._runs.awaited(run_id)
        with run.lock:
            run.lifetime.require_current()
            self._require_host(host_id, incarnation)
            current = run.assignment.current
            for message in messages:
                # A host that has changed a partition without an owner holds it.
                if current is None or current.find(message.operator, message.partition) is None:
                    run.assignment.report((message.operator, message.partition), host_id)
            assignment = assigned(self._registries, run)
            answers: dict[int, Acknowledged | Refused] = {}
            changes: dict[TaskKey, PartitionEntry] = {}
            taken: list[Acknowledge] = []
            version = run.batch.highest_opened + 1
            for i, message in enumerate(messages):
                try:
                    known = _checked(run, message, assignment)
                except (CoordinatorError, StateStoreError) as error:
                    answers[i] = Refused(type(error).__name__, str(error))
                    continue
                version = message.version
                if known is None:
                    changes[(message.operator, message.partition)] = PartitionEntry(message.attempt, message.file)
                    taken.append(message)
                else:
                    answers[i] = known
            accepted: Acknowledged | Refused
            now = self._registries.clock()
            try:
                durations = {(m.operator, m.partition): m.duration for m in messages}
                stages = {(m.operator, m.partition): m.stage for m in messages if m.stage is not None}
                stages = {task: stage for task, stage in stages.items() if task in changes}
                manifest_id = run.acknowledge(version, changes, durations, stages) if changes else None
                accepted = Acknowledged(version, manifest_id)
                run.history.acknowledged(version, taken, now)
            except (CoordinatorError, StateStoreError) as error:
                accepted = Refused(type(error).__name__, str(error))
            return tuple(answers.get(i, accepted) for i in range(len(messages)))

    def rebalance(self, query: str | None = None) -> dict[str, int]:
        moved = {}
        for run in self._runs.current():
            if query is not None and not run.is_named(query):
                continue
            run.assignment.unbalance()
            # The thread that works on a run may wait for its storage. Its next batch moves the partitions.
            if not run.lock.acquire(blocking=False):
                moved[run.run_id] = 0
                continue
            try:
                moved[run.run_id] = self._rebalance(run)
            finally:
                run.lock.release()
        return moved

    def _rebalance(self, run: QueryState) -> int:
        before = run.assignment.current
        if before is None or run.batch.highest_opened >= run.versions.completed:
            return 0
        after = assigned(self._registries, run, rebalance=True)
        run.announce()
        return sum(after.find(*task) != before.find(*task) for task in run.tasks())

    def _require_host(self, host_id: str, incarnation: str) -> None:
        with self._registries.lock:
            self._registries.hosts.require(host_id, incarnation)


def _checked(run: QueryState, message: Acknowledge, assignment: Assignment) -> Acknowledged | None:
    """Raise an error unless the changes may be taken.

    Return the earlier answer if they were taken before, and that answer was lost; else None.
    """
    task = (message.operator, message.partition)
    run.require_partition(*task)
    owner = assignment.owner(*task)
    if owner.host_id != message.host_id:
        raise StaleOwnerError(
            f"Host {message.host_id} does not own {task[0]}/{task[1]} of run {run.run_id}; {owner.host_id} does."
        )
    versions, batch = run.versions, run.batch
    if message.version - 1 == versions.completed:
        # The batch may have been opened before a restart of the coordinator, and the host has yet to report it.
        batch.opened(versions.completed)
    if message.version != batch.highest_opened + 1 or message.version <= versions.completed:
        raise StaleBatchError(
            f"Version {message.version} of run {run.run_id} cannot be committed: batch {batch.highest_opened} is the "
            f"newest one opened, version {versions.completed} the last completed one."
        )
    base = versions.head(message.version - 1, *task)
    if message.base != base:
        raise LineageError(
            f"Changes of {task[0]}/{task[1]} apply to {message.base}, but version {message.version - 1} ends with "
            f"{base}."
        )
    run.files_in_use.end(task, message.host_id)  # the owner has loaded the partition
    prepared = versions.chain.get(message.version)
    if prepared is None or prepared.run_id != run.run_id:
        return None
    if not batch.is_taken(message.version, task, PartitionEntry(message.attempt, message.file)):
        return None
    return Acknowledged(message.version, prepared.id if batch.is_named(task) else None)


# Lookups of one query in the state of another: the version that a batch reads, and its location.


class Lookups:
    """Answers the tasks of queries that look up."""

    def __init__(self, registries: Registries, locations: Locations) -> None:
        self._registries = registries
        self._locations = locations

    def look_up(self, operator: str, query: str, by: str, batch_id: int) -> LookedUp:
        location = self._locations.locate(operator, query)
        run = self._registries.runs.get(location.run_id)
        run.lifetime.require_served()
        try:
            record = run.looked_up.resolve(by, batch_id, self._registries.clock(), run.lock)
        except VersionNotFoundError:
            run.manifests.epochs.check()  # a replaced coordinator does not know the versions of its successor
            raise
        return LookedUp(location, record.version, record.at_ms)
