"""Makes the savepoints that users request (Flink: ``SavepointCoordinator``).

A savepoint coordinator runs next to the checkpoint coordinator of a run and shares its id counter: micro-batches and
savepoints neither wait for each other nor end each other. Nor do two savepoints (as in Flink since 1.2): each belongs
to the user who requested it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from backends import spans
from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import StorageError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from coordinator_actor import exceptions
from coordinator_actor.checkpoints import pending_checkpoint
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, CheckpointHooks
from coordinator_actor.durable.records import SavepointRecord
from coordinator_actor.messages import OperatorSpec, Refused, SavepointExported, SavepointOrder, SavepointStatus
from coordinator_actor.run.holds import SavepointHold
from coordinator_actor.run.owners import Assignment
from coordinator_actor.run.query_state import QueryState
from coordinator_actor.savepoints import savepoint_format
from coordinator_actor.savepoints.export import copy_spark_files

_ERRORS: dict[pending_checkpoint.CancelReason, type[exceptions.CoordinatorError]] = {
    pending_checkpoint.CancelReason.EXPIRED: exceptions.SavepointExpiredError,
    pending_checkpoint.CancelReason.DECLINED: exceptions.SavepointDeclinedError,
    pending_checkpoint.CancelReason.SHUTDOWN: exceptions.CheckpointCoordinatorShutdownError,
}


class SavepointCoordinator(CheckpointCoordinator):
    """The savepoints of one job. Safe to use from many threads.

    ``store`` writes a savepoint that all tasks have acknowledged, and returns its path. It is called once per
    savepoint, without any lock held. If it raises, the savepoint has failed. ``trigger`` notifies the tasks of a new
    savepoint; ``timeout`` and ``clock`` are those of a ``CheckpointCoordinator``.

    ``_futures_lock`` guards the futures and paths. It is never held together with ``_lock`` of the base class.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Iterable[pending_checkpoint.TaskKey],
        *,
        id_counter: pending_checkpoint.CheckpointIDCounter,
        store: Callable[[pending_checkpoint.CompletedCheckpoint], str],
        trigger: Callable[[pending_checkpoint.PendingCheckpoint], None] | None = None,
        timeout: float | None = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        hooks = CheckpointHooks(
            trigger, self._store, self._hand_over, self._cancelled, subsumes=False, keeps_failed=False
        )
        super().__init__(job_id, tasks, hooks, id_counter=id_counter, timeout=timeout, clock=clock)
        self._write = store
        # A future runs from when the completion claims it. Until then the user may cancel it.
        self._futures: dict[int, Future[str]] = {}
        self._paths: dict[int, str] = {}
        self._futures_lock = threading.Lock()

    def trigger_savepoint(
        self, timestamp: float | None = None, *, properties: Mapping[str, Any] | None = None
    ) -> Future[str]:
        """Begin a savepoint. The result of the future is its path. ``properties`` are passed to ``store``.

        The future fails with ``SavepointExpiredError``, ``SavepointDeclinedError``,
        ``CheckpointCoordinatorShutdownError``, or ``SavepointFailedError`` whose cause is the error. Cancelling the
        future before ``store`` is called cancels the savepoint.
        """
        future: Future[str] = Future()
        checkpoint_id = self.id_counter.get_and_increment()
        # Before any callback can run: the savepoint may be over before the trigger returns.
        with self._futures_lock:
            self._futures[checkpoint_id] = future
        began = spans.now()
        future.add_done_callback(lambda done: self._on_done(checkpoint_id, began, done))
        try:
            self.trigger_checkpoint(timestamp, checkpoint_id=checkpoint_id, properties=properties)
        except exceptions.CheckpointCoordinatorShutdownError as error:
            self._fail(checkpoint_id, error)
        except exceptions.CoordinatorError as error:
            failure = exceptions.SavepointFailedError(
                f"Savepoint {checkpoint_id} of {self.job_id} was not triggered: {error}"
            )
            failure.__cause__ = error.__cause__ or error
            self._fail(checkpoint_id, failure)
        except BaseException:
            with self._futures_lock:
                self._futures.pop(checkpoint_id, None)
            raise
        return future

    def get_number_of_pending_savepoints(self) -> int:
        """Return the number of savepoints whose futures are open."""
        with self._futures_lock:
            return len(self._futures)

    # ---- hooks of the base class

    def _store(self, completed: pending_checkpoint.CompletedCheckpoint) -> None:
        """Store the savepoint, unless its future was cancelled."""
        with self._futures_lock:
            future = self._claimed(completed.id)
            if future is None:
                raise exceptions.SavepointFailedError(
                    f"Savepoint {completed.id} of {self.job_id} was cancelled by its requester."
                )
            self._futures[completed.id] = future
        path = self._write(completed)
        with self._futures_lock:
            self._paths[completed.id] = path

    def _hand_over(self, completed: pending_checkpoint.CompletedCheckpoint) -> None:
        """Pass the path to the user who requested the savepoint."""
        with self._futures_lock:
            future, path = self._futures.pop(completed.id), self._paths.pop(completed.id)
        future.set_result(path)

    def _cancelled(self, pending: pending_checkpoint.PendingCheckpoint, error: Exception | None) -> None:
        """Make the future fail with the reason."""
        assert pending.cancelled is not None
        reason, why = pending.cancelled
        failure = _ERRORS.get(reason, exceptions.SavepointFailedError)(
            f"Savepoint {pending.id} of {self.job_id} was not made: {why}."
        )
        failure.__cause__ = error
        self._fail(pending.id, failure)

    def _fail(self, checkpoint_id: int, error: Exception) -> None:
        with self._futures_lock:
            future = self._claimed(checkpoint_id)
            self._paths.pop(checkpoint_id, None)
        if future is not None:
            future.set_exception(error)

    def _claimed(self, checkpoint_id: int) -> Future[str] | None:
        """Take the future of a savepoint, which cannot be cancelled any more; None if it was. The lock is held."""
        future = self._futures.pop(checkpoint_id, None)
        is_open = future is not None and (future.running() or future.set_running_or_notify_cancel())
        return future if is_open else None

    def _on_done(self, checkpoint_id: int, began: int, future: Future[str]) -> None:
        error = None if future.cancelled() else future.exception()
        failure = "CancelledError" if future.cancelled() else None if error is None else spans.error_name(error)
        trace = spans.savepoint(self.job_id, checkpoint_id)
        spans.finished(trace.kind, trace, began, is_root=True, failure=failure)
        if future.cancelled():
            self.cancel_checkpoint(checkpoint_id, "cancelled by its requester")


# The savepoints of one run: orders to hosts, the copy of Spark's own files, and the metadata at the end.
#
# The stream keeps running. A savepoint is of one completed version, and retention keeps this version until the
# savepoint is done. With ``stop`` the tasks of the next batch are held, so that no sink sees a batch after the
# savepoint; they continue if the savepoint fails. A savepoint does not outlive its coordinator: the user retries.


log = logging.getLogger(__name__)

SPARKS_FILES: pending_checkpoint.TaskKey = ("Spark's own files", 0)
"""The files that the coordinator copies: one more task that every savepoint waits for."""

InBackground = Callable[[Callable[[], None]], None]


@dataclass
class _Savepoint:
    """A requested savepoint of ``version``. It has ``begun`` when that version is completed.

    With ``stop`` the query is held after that version.
    """

    version: int
    location: str
    stop: bool
    begun: bool = False


def status_of(request: Future[str]) -> SavepointStatus:
    """Return the status of a requested savepoint."""
    if not request.done():
        return SavepointStatus(known=True)
    error = request.exception()
    if error is None:
        return SavepointStatus(known=True, path=request.result())
    cause = f" ({type(error.__cause__).__name__}: {error.__cause__})" if error.__cause__ is not None else ""
    return SavepointStatus(known=True, failure=Refused(type(error).__name__, f"{error}{cause}"))


class RunSavepoints:
    """The savepoints of one run.

    The lock of the run guards everything here. It must be held in every call except ``pending``, ``exported`` and
    ``shutdown``. ``requests`` are the future paths, by request id; because others read them without that lock, they are
    only ever replaced as a whole.
    """

    def __init__(
        self,
        run: QueryState,
        open_storage: OpenStorage,
        in_background: InBackground,
        clock: Callable[[], float],
        timeout: float,
    ) -> None:
        self._run = run
        self._open_storage = open_storage
        self._in_background = in_background
        self._clock = clock
        self._savepoints: dict[int, _Savepoint] = {}
        self.requests: Mapping[str, Future[str]] = {}
        self._stopping: Future[str] | None = None
        self._stopping_id: int | None = None
        self.coordinator = SavepointCoordinator(
            run.run_id,
            [*run.tasks(), SPARKS_FILES],
            id_counter=run.counter,
            store=self._store,
            trigger=self._trigger,
            timeout=timeout,
            clock=clock,
        )
        run.when_completed = self.on_completed

    def trigger(self, request_id: str, base: str, *, stop: bool) -> None:
        """Begin a savepoint below the directory ``base``. A repeated request with the same id is a no-op.

        Raises ``InvalidRequestError`` if no batch is committed yet.
        """
        if request_id in self.requests:
            return
        run = self._run
        version = run.versions.completed
        if stop:
            if self._stopping is not None:
                raise exceptions.InvalidRequestError(f"Run {run.run_id} is already being stopped with a savepoint.")
            # The sink may have seen a batch that has begun: the savepoint is of the version after that batch.
            begun = run.commits.last_begun()
            version = max(run.versions.completed, run.machine.highest_opened + 1, 0 if begun is None else begun + 1)
            held_from = run.machine.savepoint_hold.batch_id
            if held_from is not None and held_from > run.machine.highest_opened:
                version = held_from  # an earlier coordinator has not allowed any batch after this version
        if version == 0:
            raise exceptions.InvalidRequestError(
                f"No batch of query {run.registration.query_id} is committed yet, so no state exists to save; "
                "wait for one."
            )
        if stop:
            run.machine.savepoint_hold = SavepointHold(version)
        future = self.coordinator.trigger_savepoint(properties={"version": version, "base": base, "stop": stop})
        self.requests = {**self.requests, request_id: future}
        if stop:
            self._stopping = future
        self.settle()

    def pending(self) -> list[int]:
        """Return the ids of the savepoints that are being made. Needs no lock."""
        return list(self.coordinator.get_pending_checkpoints())

    def _trigger(self, pending: pending_checkpoint.PendingCheckpoint) -> None:
        run, asked = self._run, pending.properties
        location = f"{asked['base'].rstrip('/')}/savepoint-{run.registration.query_id[:8]}-{pending.id}"
        now_ms = int(self._clock() * 1000)
        with spans.span("savepoint.trigger", self._trace(pending.id), version=asked["version"], stop=asked["stop"]):
            run.manifests.savepoints.create(
                SavepointRecord(pending.id, asked["version"], location, now_ms, run.run_id, asked["stop"])
            )
        self._savepoints[pending.id] = _Savepoint(asked["version"], location, asked["stop"])
        if asked["stop"]:
            self._stopping_id = pending.id
        log.info("Triggering savepoint %d of run %s at version %d", pending.id, run.run_id, asked["version"])
        self.on_completed()

    def on_completed(self) -> None:
        """Begin the savepoints that have waited for a version that is completed now."""
        for checkpoint_id, savepoint in list(self._savepoints.items()):
            if not savepoint.begun and savepoint.version <= self._run.versions.completed:
                savepoint.begun = True
                self._run.versions.pin(checkpoint_id, savepoint.version)
                self._in_background(lambda c=checkpoint_id, h=savepoint: self._copy_spark_files(c, h))  # type: ignore[misc]

    def _copy_spark_files(self, checkpoint_id: int, savepoint: _Savepoint) -> None:
        """Copy Spark's files. Runs without the lock of the run, because it takes time."""
        registration = self._run.registration
        try:
            with spans.span("savepoint.spark_files", self._trace(checkpoint_id)):
                spark = self._open_storage(registration.checkpoint_location, registration.storage_options)
                files = copy_spark_files(spark, self._storage(savepoint.location), savepoint.version - 1)
        except Exception as error:  # any error makes the savepoint fail
            log.warning("Spark's files were not copied for savepoint %d", checkpoint_id, exc_info=True)
            reason = f"Spark's own files were not copied: {type(error).__name__}: {error}"
            self.coordinator.receive_decline_message(
                pending_checkpoint.DeclineCheckpoint(self._run.run_id, SPARKS_FILES, checkpoint_id, reason)
            )
            return
        self._acknowledge(checkpoint_id, SPARKS_FILES, files, sum(f.size for f in files), 0.0)

    def _acknowledge(
        self, checkpoint_id: int, task: pending_checkpoint.TaskKey, state: Any, size: int, duration: float
    ) -> None:
        message = pending_checkpoint.AcknowledgeCheckpoint(self._run.run_id, task, checkpoint_id, state, size, duration)
        self.coordinator.receive_acknowledge_message(message)

    def exported(self, message: SavepointExported) -> None:
        """Record that a host has exported a partition, or has failed.

        Without the lock of the run: the last partition writes the metadata.
        """
        task = (message.operator, message.partition)
        if message.failure is not None:
            self.coordinator.receive_decline_message(
                pending_checkpoint.DeclineCheckpoint(self._run.run_id, task, message.checkpoint_id, message.failure)
            )
            return
        size = sum(f.size for f in message.files.values())
        self._acknowledge(message.checkpoint_id, task, message.files, size, message.duration)

    def orders_for(self, host_id: str, assignment: Assignment) -> Iterator[SavepointOrder]:
        """Yield the orders that a host has yet to carry out."""
        run = self._run
        pending = self.coordinator.get_pending_checkpoints()
        for checkpoint_id, savepoint in list(self._savepoints.items()):
            if not savepoint.begun or checkpoint_id not in pending:
                continue
            missing = pending[checkpoint_id].not_yet_acknowledged
            partitions: dict[str, list[int]] = {}
            for operator, partition in assignment.of_host.get(host_id, ()):
                if (operator, partition) in missing:
                    partitions.setdefault(operator, []).append(partition)
            if partitions:
                yield SavepointOrder(
                    run.registration,
                    checkpoint_id,
                    savepoint.version,
                    savepoint.location,
                    partitions,
                    is_held=savepoint.stop,
                )

    def _trace(self, savepoint_id: int) -> spans.Trace:
        return spans.savepoint(self._run.run_id, savepoint_id)

    def _store(self, completed: pending_checkpoint.CompletedCheckpoint) -> str:
        savepoint, registration = self._savepoints[completed.id], self._run.registration
        with spans.span("savepoint.metadata", self._trace(completed.id)):
            metadata = savepoint_format.SavepointMetadata(
                checkpoint_id=completed.id,
                query_id=registration.query_id,
                query_name=registration.name,
                version=savepoint.version,
                batch_id=savepoint.version - 1,
                created_ms=int(self._clock() * 1000),
                key_groups=registration.key_groups,
                checkpoint_location=registration.checkpoint_location,
                operators=tuple(_savepoint_operator(spec, completed.states) for spec in registration.operators),
                spark_files=tuple(completed.states[SPARKS_FILES]),
            )
            savepoint_format.write_metadata(self._storage(savepoint.location), metadata)
        log.info("Savepoint %d of run %s stored at %s", completed.id, registration.run_id, savepoint.location)
        return savepoint.location

    def _storage(self, location: str) -> CheckpointStorage:
        return self._open_storage(location, self._run.registration.storage_options)

    def settle(self) -> None:
        """Fail overdue savepoints, and release the versions and holds that are no longer needed."""
        self.settle_in_memory()
        if self.holds_in_vain:
            self._let_go()

    @property
    def holds_in_vain(self) -> bool:
        """Return whether the run is held for a savepoint that has failed."""
        return self._stopping is not None and self._stopping.done() and self._stopping.exception() is not None

    def settle_in_memory(self) -> None:
        """Fail overdue savepoints, and release the versions that are no longer needed. Does no I/O."""
        self.coordinator.expire()
        pending = self.coordinator.get_pending_checkpoints()
        for checkpoint_id in [c for c in self._savepoints if c not in pending]:
            del self._savepoints[checkpoint_id]
            self._run.versions.unpin(checkpoint_id)

    def _let_go(self) -> None:
        """Release the run, because the savepoint that it was to be stopped with has failed.

        The failure is written first, for a later coordinator.
        """
        if self._stopping_id is not None:
            try:
                self._run.manifests.savepoints.release(self._stopping_id)
            except StorageError:
                log.warning(
                    "Run %s is held until the failure of its savepoint is recorded", self._run.run_id, exc_info=True
                )
                return
        self._stopping, self._stopping_id = None, None
        self._run.machine.savepoint_hold = SavepointHold()

    def shutdown(self, why: str) -> None:
        """Make all pending savepoints fail: the run is over."""
        log.debug("The savepoints of run %s end: %s", self._run.run_id, why)
        self._run.when_completed = lambda: None
        self.coordinator.shutdown()


def savepoint_families(schema: str) -> dict[str, str]:
    """Return the column families of an operator in a savepoint, with their schemas and all history."""
    variables = OperatorSchema.from_json(schema).variables
    return {name: s.to_json() for v in variables if not v.deleted for name, s in v.families.items()}


def _savepoint_operator(
    spec: OperatorSpec, files: Mapping[pending_checkpoint.TaskKey, Any]
) -> savepoint_format.SavepointOperator:
    """Return an operator as it was exported: all rows are of the newest schema."""
    schema, partitions = OperatorSchema.from_json(spec.schema).compacted(), range(spec.num_partitions)
    variables = tuple(
        savepoint_format.SavepointVariable(name, s.to_json(), tuple(files[(spec.name, p)][name] for p in partitions))
        for name, s in schema.families.items()
    )
    return savepoint_format.SavepointOperator(
        spec.name, spec.kind, spec.backend, len(partitions), variables, schema.to_json()
    )
