"""Triggers, completes and cancels checkpoints (Flink: ``CheckpointCoordinator``).

Differences from Flink, and the reasons:

- A checkpoint completes in two steps. With the last acknowledgement, ``acknowledge`` returns it as fully acknowledged.
  The caller stores it, and then calls ``complete`` or ``fail``. ``receive_acknowledge_message`` does both steps, with
  the hook ``store`` between them.
- Hooks run without any lock. So a storage that hangs delays only the tasks that acknowledge that one checkpoint.
- A checkpoint whose completion fails stays pending, and a repeated acknowledgement retries it.
- The last acknowledgement of a task counts, because Spark takes the attempt that ends last.
- A completed checkpoint subsumes those with lower ids, not those with earlier timestamps, because clocks jump.
- No timer triggers checkpoints: Spark's micro-batches and the user's savepoints do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from coordinator_actor import exceptions
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints.pending_checkpoint import (
    AcknowledgeCheckpoint,
    CancelReason,
    CheckpointIDCounter,
    CompletedCheckpoint,
    DeclineCheckpoint,
    PendingCheckpoint,
    Received,
    TaskKey,
    Tasks,
)

log = logging.getLogger(__name__)

RECENT_IDS = 16
"""The number of finished checkpoints that are remembered, to distinguish late messages from wrong ones (as in Flink).
"""
Verdict = tuple[CancelReason, str]
"""The reason to cancel a checkpoint."""


class FullyAcknowledged(NamedTuple):
    """A checkpoint that every task has acknowledged. The caller stores it, and then calls ``complete`` or ``fail``."""

    pending: PendingCheckpoint
    completed: CompletedCheckpoint


@dataclass
class _Attempt:
    """One pending checkpoint, with its internal state.

    ``completing`` is the id of the thread that completes the checkpoint. ``verdict`` is the reason to cancel the
    checkpoint if that completion fails. Without a verdict the checkpoint stays pending.
    """

    pending: PendingCheckpoint
    completing: int | None = None
    verdict: Verdict | None = None

    def fully_acknowledged(self, now: float) -> FullyAcknowledged:
        self.completing = threading.get_ident()
        return FullyAcknowledged(self.pending, self.pending.to_completed(now))


@dataclass(frozen=True)
class CheckpointHooks:
    """Callbacks for the events of a checkpoint, and the effect of a completed or failed one on the others.

    All hooks are called without any lock held. If ``store`` raises, the checkpoint is not completed, and the
    acknowledger gets the error. So ``store`` may be called several times for one checkpoint. While it runs, other
    acknowledgers of the same checkpoint wait. Therefore a caller must hold its own lock around all calls that may
    complete a checkpoint, or around none of them; ``cancel_all``, ``expire`` and ``shutdown`` wait for no completion.
    """

    trigger: Callable[[PendingCheckpoint], None] | None = None
    """Notifies the tasks of a new checkpoint."""
    store: Callable[[CompletedCheckpoint], None] | None = None
    """Stores a checkpoint that all tasks have acknowledged."""
    completed: Callable[[CompletedCheckpoint], None] | None = None
    """Called for a checkpoint that is stored and no longer pending."""
    cancelled: Callable[[PendingCheckpoint, Exception | None], None] | None = None
    """Called for a checkpoint that was cancelled (``PendingCheckpoint.cancelled`` says why), with the error that made
    its completion fail. An error of this hook is logged.
    """
    subsumes: bool = True
    """A completed checkpoint ends the pending ones with lower ids."""
    keeps_failed: bool = True
    """A checkpoint that could not be stored stays pending with its acknowledgements: the next one retries."""


class CheckpointCoordinator:
    """The checkpoints of one job over a fixed set of tasks. Safe to use from many threads.

    ``timeout``, in seconds: ``expire`` cancels older checkpoints (None: never). ``clock`` gives the time of calls that
    do not pass ``now``. ``_lock`` guards the pending checkpoints and the ids of those that ended recently. It is held
    briefly, except to wait for the end of a completion.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Iterable[TaskKey],
        hooks: CheckpointHooks | None = None,
        *,
        id_counter: CheckpointIDCounter | None = None,
        timeout: float | None = 600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise exceptions.InvalidRequestError(f"timeout is {timeout}; it must be more than 0 seconds, or None.")
        self.job_id = job_id
        self.id_counter = id_counter if id_counter is not None else CheckpointIDCounter()
        self.stats = CheckpointStatsTracker()
        self._tasks = Tasks(tasks)
        self._hooks = hooks or CheckpointHooks()
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._completion_ended = threading.Condition(self._lock)
        self._attempts: dict[int, _Attempt] = {}  # in the order of their trigger
        self._recent: deque[int] = deque(maxlen=RECENT_IDS)
        self._shutdown = False

    def trigger_checkpoint(
        self,
        timestamp: float | None = None,
        *,
        checkpoint_id: int | None = None,
        states: Mapping[TaskKey, Any] | None = None,
        properties: Mapping[str, Any] | None = None,
        now: float | None = None,
    ) -> PendingCheckpoint:
        """Trigger a checkpoint and return it.

        ``timestamp`` defaults to the clock. ``checkpoint_id`` was taken from the counter before. The tasks in
        ``states`` count as having acknowledged. If these are all tasks, the checkpoint is completed on return (its
        ``completed`` is set), or the error of the completion is raised and nothing is pending. ``properties`` are
        copied to the completed checkpoint.

        Raises ``CheckpointNotTriggeredError`` or ``CheckpointCoordinatorShutdownError`` with the reason, and
        ``InvalidRequestError`` for an id that was used before.
        """
        with self._lock:
            now = self._clock() if now is None else now
            if self._shutdown:
                raise exceptions.CheckpointCoordinatorShutdownError(
                    f"The checkpoint coordinator of {self.job_id} is shut down."
                )
            # Under the lock, so that of two checkpoints the later one gets the higher id.
            new_id = self.id_counter.get_and_increment() if checkpoint_id is None else checkpoint_id
            if new_id in self._attempts or new_id in self._recent:
                raise exceptions.InvalidRequestError(
                    f"Checkpoint {new_id} of {self.job_id} was triggered before: take a new id."
                )
            stamp = now if timestamp is None else timestamp
            pending = PendingCheckpoint(self.job_id, new_id, stamp, self._tasks, started=now, properties=properties)
            for task, state in (states or {}).items():
                pending.acknowledge(task, state, at=now)
            attempt = self._attempts[new_id] = _Attempt(pending)
            self.stats.on_triggered(pending)
            acknowledged: FullyAcknowledged | None = None
            if pending.is_fully_acknowledged:
                attempt.verdict = (CancelReason.FAILED, "it could not be completed")
                acknowledged = attempt.fully_acknowledged(now)
        log.debug("Triggering checkpoint %d of %s @ %s", pending.id, self.job_id, pending.timestamp)
        if acknowledged is not None:
            self._store_and_complete(acknowledged)
        elif self._hooks.trigger is not None:
            try:
                self._hooks.trigger(pending)
            except Exception as error:
                why = f"its tasks could not be notified: {error}"
                if not self._cancel(pending.id, CancelReason.FAILED, why, error):
                    log.exception("Notifying the tasks of checkpoint %d failed after its end", pending.id)
                    return pending
                raise exceptions.CheckpointNotTriggeredError(
                    f"Checkpoint {pending.id} of {self.job_id} was not triggered: {why}"
                ) from error
        return pending

    def receive_acknowledge_message(self, message: AcknowledgeCheckpoint) -> Received:
        """Take an acknowledgement. The answer is true for a pending or a recently ended checkpoint.

        Raises ``InvalidRequestError`` for another job or an unknown task, and the error of a failed completion.
        """
        received = self.acknowledge(message)
        return self._store_and_complete(received) if isinstance(received, FullyAcknowledged) else received

    def receive_decline_message(self, message: DeclineCheckpoint) -> Received:
        """Cancel a checkpoint because a task declines it. The answer is true for a pending or a recently ended one.

        Raises ``InvalidRequestError`` for another job or an unknown task.
        """
        with self._lock:
            attempt = self._attempt_of(message, "decline")
            if attempt is None:
                return self._late(message)
            attempt.pending.place(message.task)
            operator, partition = message.task
            why = f"declined by {operator}/{partition}: {message.reason}"
            cancelled = self._end(attempt, CancelReason.DECLINED, why)
        self._report_cancelled([cancelled])
        return Received.ABORTED

    # ---- completing in two steps

    def acknowledge(self, message: AcknowledgeCheckpoint, now: float | None = None) -> Received | FullyAcknowledged:
        """Take an acknowledgement. With the last one, the caller stores the checkpoint, and reports the outcome.

        Waits for a completion that is under way. Raises ``InvalidRequestError`` for another job or an unknown task.
        """
        with self._lock:
            attempt = self._attempt_of(message, "acknowledge")
            if attempt is None:
                return self._late(message)
            now = self._clock() if now is None else now
            pending = attempt.pending
            pending.acknowledge(message.task, message.state, message.size, message.duration, at=now)
            return attempt.fully_acknowledged(now) if pending.is_fully_acknowledged else Received.PENDING

    def complete(self, acknowledged: FullyAcknowledged) -> None:
        """Record that a checkpoint is stored."""
        pending, completed = acknowledged
        with self._lock:
            pending.completed = completed
            self._remove(self._attempts[pending.id])
            older = [a for i, a in self._attempts.items() if self._hooks.subsumes and i < completed.id]
            why = f"checkpoint {completed.id}, a later one, is completed"
            subsumed = self._end_all(older, CancelReason.SUBSUMED, why)
            self.stats.on_completed(completed, pending.figures())
            self._completion_ended.notify_all()
        log.debug("Completed checkpoint %d of %s in %.3f s", completed.id, self.job_id, completed.duration)
        if self._hooks.completed is not None:
            self._hooks.completed(completed)
        self._report_cancelled(subsumed)

    def fail(self, acknowledged: FullyAcknowledged, error: BaseException, verdict: Verdict | None = None) -> None:
        """Record that a checkpoint could not be stored. It waits for another acknowledgement.

        It is cancelled instead if that was requested during the completion, or by ``verdict``.
        """
        with self._lock:
            attempt = self._attempts[acknowledged.pending.id]
            attempt.completing = None
            verdict = attempt.verdict or verdict
            if verdict is not None:
                self._end(attempt, *verdict)
            self._completion_ended.notify_all()
        if verdict is not None:
            self._report_cancelled([acknowledged.pending], error if isinstance(error, Exception) else None)

    def _store_and_complete(self, acknowledged: FullyAcknowledged) -> Received:
        try:
            if self._hooks.store is not None:
                self._hooks.store(acknowledged.completed)
        except BaseException as error:
            if not isinstance(error, Exception) or self._hooks.keeps_failed:
                self.fail(acknowledged, error)
                raise
            self.fail(acknowledged, error, (CancelReason.FAILED, f"it could not be stored: {error}"))
            checkpoint_id = acknowledged.pending.id
            log.warning("Checkpoint %d of %s could not be stored", checkpoint_id, self.job_id, exc_info=error)
            return Received.ABORTED
        self.complete(acknowledged)
        return Received.COMPLETED

    def _attempt_of(self, message: AcknowledgeCheckpoint | DeclineCheckpoint, verb: str) -> _Attempt | None:
        """Return the pending checkpoint of a message. Waits for a completion that is under way."""
        if self._shutdown:
            return None
        if message.job_id != self.job_id:
            raise exceptions.InvalidRequestError(
                f"{message.task[0]}/{message.task[1]} wants to {verb} checkpoint {message.checkpoint_id} of "
                f"{message.job_id}, but this is the coordinator of {self.job_id}."
            )
        while True:
            attempt = self._attempts.get(message.checkpoint_id)
            if attempt is None or self._shutdown:
                return None
            if attempt.completing is None:
                return attempt
            if attempt.completing == threading.get_ident():
                raise exceptions.InvalidRequestError(
                    f"Checkpoint {message.checkpoint_id} is being completed by its own callback."
                )
            self._completion_ended.wait()

    def _late(self, message: AcknowledgeCheckpoint | DeclineCheckpoint) -> Received:
        if self._shutdown or message.checkpoint_id not in self._recent:
            return Received.UNKNOWN
        log.debug("A message of %s for checkpoint %d came after its end", message.task, message.checkpoint_id)
        return Received.LATE

    # ---- cancelling

    def expire(self) -> list[int]:
        """Cancel the checkpoints that are older than the timeout. Return their ids."""
        if self._timeout is None:
            return []
        with self._lock:
            now = self._clock()
            overdue = [a for a in self._attempts.values() if now - a.pending.started >= self._timeout]
            expired = self._end_all(overdue, CancelReason.EXPIRED, f"not complete within {self._timeout} s")
        self._report_cancelled(expired)
        return [pending.id for pending in expired]

    def cancel_checkpoint(self, checkpoint_id: int, reason: str) -> bool:
        """Cancel a pending checkpoint. Return False if the id is unknown, or if the checkpoint is being completed."""
        return self._cancel(checkpoint_id, CancelReason.CANCELLED, reason)

    def _cancel(self, checkpoint_id: int, reason: CancelReason, why: str, error: Exception | None = None) -> bool:
        with self._lock:
            attempt = self._attempts.get(checkpoint_id)
            if attempt is None or attempt.completing is not None:
                return False
            cancelled = self._end(attempt, reason, why)
        self._report_cancelled([cancelled], error)
        return True

    def cancel_all(self, why: str) -> None:
        """Cancel all pending checkpoints. One that is being completed is cancelled if its completion fails."""
        with self._lock:
            cancelled = self._end_all(list(self._attempts.values()), CancelReason.STOPPED, why)
        self._report_cancelled(cancelled)

    def shutdown(self) -> None:
        """Cancel everything that is pending, and accept no more messages.

        A completion that is under way still counts if it succeeds.
        """
        with self._lock:
            if self._shutdown:
                return
            self._shutdown = True
            ended = self._end_all(list(self._attempts.values()), CancelReason.SHUTDOWN, "the coordinator was shut down")
            self._completion_ended.notify_all()
        log.info("The checkpoint coordinator of %s is shut down", self.job_id)
        self._report_cancelled(ended)

    def is_shutdown(self) -> bool:
        """Return whether the coordinator was shut down."""
        return self._shutdown

    def _end_all(self, attempts: Collection[_Attempt], reason: CancelReason, why: str) -> list[PendingCheckpoint]:
        """Cancel checkpoints. One that is being completed is cancelled only if its completion fails."""
        ended = []
        for attempt in attempts:
            if attempt.completing is None:
                ended.append(self._end(attempt, reason, why))
            elif attempt.verdict is None:
                attempt.verdict = (reason, why)
        return ended

    def _end(self, attempt: _Attempt, reason: CancelReason, why: str) -> PendingCheckpoint:
        pending = attempt.pending
        if reason is CancelReason.EXPIRED:
            why = f"{why}: {pending.describe_missing()}"
        pending.cancelled = (reason, why)
        self._remove(attempt)
        self.stats.on_failed(pending.id, f"{reason.value}: {why}")
        return pending

    def _remove(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.pending.id]
        self._recent.append(attempt.pending.id)

    def _report_cancelled(self, cancelled: Iterable[PendingCheckpoint], error: Exception | None = None) -> None:
        for pending in cancelled:
            assert pending.cancelled is not None
            reason, why = pending.cancelled
            log.info("Checkpoint %d of %s was given up (%s): %s", pending.id, self.job_id, reason.value, why)
            if self._hooks.cancelled is None:
                continue
            try:
                self._hooks.cancelled(pending, error)
            except Exception:
                log.exception("The callback for the cancelled checkpoint %d failed", pending.id)

    # ---- figures

    def get_pending_checkpoints(self) -> dict[int, PendingCheckpoint]:
        """Return the pending checkpoints by id, in the order of their trigger."""
        with self._lock:
            return {i: a.pending for i, a in self._attempts.items()}

    def get_number_of_pending_checkpoints(self) -> int:
        return len(self._attempts)
