"""The micro-batches of runs: hosts open partitions, load them, and acknowledge their changes and snapshots."""

from __future__ import annotations

import math
from collections.abc import Sequence

from backends import spans
from backends.exceptions import StateStoreError, VersionNotFoundError
from backends.formats.manifest import Lineage
from coordinator_actor import exceptions
from coordinator_actor.handlers.locations import assign_owners
from coordinator_actor.handlers.registries import Handler
from coordinator_actor.messages import (
    Acknowledge,
    Acknowledged,
    BatchGrant,
    Completed,
    OpenBatch,
    OpenGrant,
    Refused,
    SnapshotUploaded,
)
from coordinator_actor.run.holds import UPLOAD
from coordinator_actor.run.query_state import QueryState


class Batches(Handler):
    """Opens batches and takes the acknowledgements of their tasks. All changes to a run are made under its lock."""

    def open_batch(self, request: OpenBatch) -> BatchGrant:
        trace = spans.batch(request.run_id, request.batch_id + 1)
        with spans.span("coordinator.open_batch", trace, host=request.host_id):
            run = self._runs.awaited(request.run_id)
            run.look_ahead(request.batch_id)
            with run.lock:
                run.lifetime.require_current()
                self._require_host(request.host_id, request.incarnation)
                return self._open_batch(run, request)

    def _open_batch(self, run: QueryState, request: OpenBatch) -> BatchGrant:
        batch_id, machine = request.batch_id, run.machine
        machine.require_newest(batch_id)
        run.advance(batch_id, is_own=True)
        now = self._registries.clock()
        machine.require_not_held(batch_id, now)
        is_new = batch_id > machine.highest_opened
        waiting = [task for task in request.waiting if run.has_partition(*task)]
        assignment = assign_owners(self._registries, run, moves=is_new, waiting=waiting)
        machine.open_batch(batch_id, now)
        run.history.begun(batch_id + 1, now)
        is_news = request.assignment != assignment.number
        return BatchGrant(
            version=batch_id,
            epoch=run.manifests.epoch,
            assignment=assignment.number,
            registration=run.registration,
            heads=run.versions.heads(batch_id, assignment.of_host.get(request.host_id, ())),
            hosts=assignment.hosts if is_news else (),
            owners=dict(assignment.owners) if is_news else {},
            times=run.spark_logs.times_for_tasks(batch_id),
            created_ms=run.versions.created_ms(batch_id),
        )

    def open_for_read(self, run_id: str, operator: str, partition: int) -> OpenGrant:
        run = self._runs.get(run_id)
        run.lifetime.require_served()
        run.require_partition(operator, partition)
        owner = assign_owners(self._registries, run).owner(operator, partition)
        # Without the lock of the run, which may be held over storage. Read the version first: the chain keeps it.
        completed = run.versions.completed
        head = run.versions.head(completed, operator, partition)
        is_begun = run.machine.may_be_committed(completed)
        created_ms = run.versions.created_ms(completed)
        epoch = run.manifests.epoch
        return OpenGrant(owner, completed, head, run.registration, epoch, is_begun=is_begun, created_ms=created_ms)

    def completed(self, run_id: str, host_id: str) -> Completed:
        return self._runs.get(run_id).completed_for(host_id)

    def lineage(self, run_id: str, operator: str, partition: int, version: int, use: str = "") -> Lineage:
        run = self._runs.awaited(run_id)
        with run.lock:
            run.require_partition(operator, partition)
            versions = run.versions
            if use == UPLOAD and run.machine.rewriting.at(self._registries.clock()) is not None:
                raise exceptions.BatchHeldError(
                    f"No snapshot of run {run_id} is taken while its files are being rewritten."
                )
            if version > versions.completed:
                raise exceptions.InvalidRequestError(
                    f"Version {version} is not completed; {versions.completed} is the last one that is."
                )
            if version not in versions.readable:
                raise VersionNotFoundError(
                    f"Version {version} of query {run.registration.name or 'unnamed'} ({run.registration.query_id}) is "
                    f"no longer kept; there are the versions {versions.readable[0]} to {versions.readable[-1]}."
                )
            lineage = versions.lineage(operator, partition, version)
            run.files_in_use.begin(
                (operator, partition),
                use,
                self._registries.clock(),
                is_rescaling=lineage.rescaled is not None,
                # An upload reads no changelogs.
                oldest=math.inf if use == UPLOAD else lineage.oldest,
            )
            return lineage

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
                run.snapshot_lag.report_uploaded(task, new.version, self._registries.clock())
            return counts

    def acknowledge_many(
        self, run_id: str, host_id: str, incarnation: str, messages: Sequence[Acknowledge]
    ) -> tuple[Acknowledged | Refused, ...]:
        # All of one version: those of an older one are rejected.
        trace = spans.batch(run_id, max((m.version for m in messages), default=0))
        with spans.span("coordinator.acknowledge", trace, host=host_id, num_partitions=len(messages)):
            run = self._runs.awaited(run_id)
            with run.lock:
                run.lifetime.require_current()
                self._require_host(host_id, incarnation)
                return self._acknowledge(run, host_id, messages)

    def _acknowledge(
        self, run: QueryState, host_id: str, messages: Sequence[Acknowledge]
    ) -> tuple[Acknowledged | Refused, ...]:
        current = run.assignment.current
        for message in messages:
            # A host that has changed a partition without an owner holds it.
            if current is None or current.find(message.operator, message.partition) is None:
                run.assignment.report((message.operator, message.partition), host_id)
        assignment = assign_owners(self._registries, run)
        answers: list[Acknowledged | Refused | None] = []
        accepted: list[Acknowledge] = []
        for message in messages:
            task = (message.operator, message.partition)
            try:
                run.require_partition(*task)
                answer = run.machine.check_acknowledgement(message, assignment.owner(*task))
            except (exceptions.CoordinatorError, StateStoreError) as error:
                answers.append(_refused(error))
                continue
            run.files_in_use.end(task, message.host_id)  # the owner has loaded the partition
            answers.append(answer)
            if answer is None:
                accepted.append(message)
        outcome = self._accept(run, accepted) if accepted else Acknowledged(0, None)
        return tuple(outcome if answer is None else answer for answer in answers)

    def _accept(self, run: QueryState, messages: Sequence[Acknowledge]) -> Acknowledged | Refused:
        """Take checked changes of one version. They all have one answer."""
        version, now = messages[0].version, self._registries.clock()
        try:
            manifest_id = run.acknowledge(messages)
        except (exceptions.CoordinatorError, StateStoreError) as error:
            return _refused(error)
        run.history.acknowledged(version, messages, now)
        return Acknowledged(version, manifest_id)

    def rebalance(self, query: str | None = None) -> dict[str, int]:
        moved = {}
        for run in self._runs.current():
            if query is not None and not run.registration.is_named(query):
                continue
            run.assignment.unbalance()
            # The thread that works on a run may wait for its storage. Its next batch moves the partitions.
            with run.lock_if_free() as is_free:
                moved[run.run_id] = self._rebalance(run) if is_free else 0
        return moved

    def _rebalance(self, run: QueryState) -> int:
        before = run.assignment.current
        if before is None or run.machine.highest_opened >= run.versions.completed:
            return 0
        after = assign_owners(self._registries, run, rebalance=True)
        run.announce()
        return sum(after.find(*task) != before.find(*task) for task in run.tasks())


def _refused(error: Exception) -> Refused:
    return Refused(type(error).__name__, str(error))
