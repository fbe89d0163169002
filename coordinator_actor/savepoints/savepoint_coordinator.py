"""Makes the savepoints that users ask for (Flink: ``SavepointCoordinator``).

A savepoint coordinator stands beside the checkpoint coordinator of a run and shares its id counter: micro-batches and
savepoints neither wait for each other nor end each other. Nor do two savepoints (as in Flink since 1.2): each belongs
to the user who asked for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from backends.tracing import spans, trace_ids
from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, CheckpointHooks
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.pending_checkpoint import CancelReason, PendingCheckpoint
from coordinator_actor.checkpoints.tasks import TaskKey
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CoordinatorError,
    SavepointDeclinedError,
    SavepointExpiredError,
    SavepointFailedError,
)

_ERRORS: dict[CancelReason, type[CoordinatorError]] = {
    CancelReason.EXPIRED: SavepointExpiredError,
    CancelReason.DECLINED: SavepointDeclinedError,
    CancelReason.SHUTDOWN: CheckpointCoordinatorShutdownError,
}


class SavepointCoordinator(CheckpointCoordinator):
    """The savepoints of one job. Safe to use from many threads.

    ``store`` writes a savepoint that all tasks have acknowledged, and returns its path. It is called once per
    savepoint, without any lock held. If it raises, the savepoint has failed. ``trigger`` tells the tasks of a new
    savepoint; ``timeout`` and ``clock`` are those of a ``CheckpointCoordinator``.

    ``_futures_lock`` guards the futures and paths. It is never held together with the lock of ``PendingCheckpoints``.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Iterable[TaskKey],
        *,
        id_counter: CheckpointIDCounter,
        store: Callable[[CompletedCheckpoint], str],
        trigger: Callable[[PendingCheckpoint], None] | None = None,
        timeout: float | None = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        hooks = CheckpointHooks(
            trigger, self._store, self._hand_over, self._cancelled, subsumes=False, keeps_failed=False
        )
        super().__init__(job_id, tasks, hooks, id_counter=id_counter, timeout=timeout, clock=clock)
        self._write = store
        # A future moves from ``_futures`` to ``_storing`` when the completion claims it. Until then the user may cancel
        # it. Each future is claimed once: by its completion, or by the failure of its savepoint.
        self._futures: dict[int, Future[str]] = {}
        self._storing: dict[int, Future[str]] = {}
        self._paths: dict[int, str] = {}
        self._futures_lock = threading.Lock()

    def trigger_savepoint(
        self, timestamp: float | None = None, *, properties: Mapping[str, Any] | None = None
    ) -> Future[str]:
        """Begin a savepoint. The result of the future is its path. ``properties`` are handed through to ``store``.

        The future fails with ``SavepointExpiredError``, ``SavepointDeclinedError``,
        ``CheckpointCoordinatorShutdownError``, or ``SavepointFailedError`` whose cause is the error. Cancelling the
        future before ``store`` is called gives the savepoint up.
        """
        future: Future[str] = Future()
        checkpoint_id = self.id_counter.get_and_increment()
        # Before anything can call back: the savepoint may be over before the trigger returns.
        with self._futures_lock:
            self._futures[checkpoint_id] = future
        began = spans.now()
        future.add_done_callback(lambda done: self._on_done(checkpoint_id, began, done))
        try:
            self.trigger_checkpoint(timestamp, checkpoint_id=checkpoint_id, properties=properties)
        except CheckpointCoordinatorShutdownError as error:
            self._fail(checkpoint_id, error)
        except CoordinatorError as error:
            failure = SavepointFailedError(f"Savepoint {checkpoint_id} of {self.job_id} was not triggered: {error}")
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
            return len(self._futures) + len(self._storing)

    # ---- hooks of the base class

    def _store(self, completed: CompletedCheckpoint) -> None:
        """Store the savepoint, unless its future was cancelled."""
        with self._futures_lock:
            future = self._futures.pop(completed.id, None)
            if future is not None and future.set_running_or_notify_cancel():
                self._storing[completed.id] = future
            if completed.id not in self._storing:
                raise SavepointFailedError(f"Savepoint {completed.id} of {self.job_id} was cancelled by its requester.")
        path = self._write(completed)
        with self._futures_lock:
            self._paths[completed.id] = path

    def _hand_over(self, completed: CompletedCheckpoint) -> None:
        """Hand the path to the user who asked for the savepoint."""
        with self._futures_lock:
            future, path = self._storing.pop(completed.id), self._paths.pop(completed.id)
        future.set_result(path)

    def _cancelled(self, pending: PendingCheckpoint, error: Exception | None) -> None:
        """Make the future fail with the reason."""
        assert pending.cancelled is not None
        reason, why = pending.cancelled
        failure = _ERRORS.get(reason, SavepointFailedError)(
            f"Savepoint {pending.id} of {self.job_id} was not made: {why}."
        )
        failure.__cause__ = error
        self._fail(pending.id, failure)

    def _fail(self, checkpoint_id: int, error: Exception) -> None:
        with self._futures_lock:
            future = self._storing.pop(checkpoint_id, None)
            self._paths.pop(checkpoint_id, None)
            if future is None:
                future = self._futures.pop(checkpoint_id, None)
                if future is None or not future.set_running_or_notify_cancel():
                    return
        future.set_exception(error)

    def _on_done(self, checkpoint_id: int, began: int, future: Future[str]) -> None:
        error = None if future.cancelled() else future.exception()
        failure = "CancelledError" if future.cancelled() else None if error is None else spans.error_name(error)
        trace = trace_ids.savepoint(self.job_id, checkpoint_id)
        spans.finished(trace.kind, trace, began, is_root=True, failure=failure)
        if future.cancelled():
            self.cancel_checkpoint(checkpoint_id, "cancelled by its requester")
