"""Triggers, completes and cancels checkpoints (Flink: ``CheckpointCoordinator``).

Differences from Flink, and the reasons:

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
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CheckpointNotTriggeredError,
    InvalidRequestError,
)

# The pending checkpoints of one job: the fate of each, without any call to the outside.


log = logging.getLogger(__name__)

RECENT_IDS = 16
"""The number of finished checkpoints that are remembered, to distinguish late messages from wrong ones (as in Flink).
"""
Verdict = tuple[CancelReason, str]
"""The reason to cancel a checkpoint."""


class Completing(NamedTuple):
    """A checkpoint that its caller must complete now; the caller then reports the outcome."""

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


class PendingCheckpoints:
    """The pending checkpoints of one job over a fixed set of tasks, and the ids of those that ended recently.

    Thread-safe. ``_lock`` guards everything here. It is held briefly, except to wait for the end of a completion.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Tasks,
        id_counter: CheckpointIDCounter,
        stats: CheckpointStatsTracker,
        clock: Callable[[], float],
    ) -> None:
        self._job_id = job_id
        self._tasks = tasks
        self._id_counter = id_counter
        self._stats = stats
        self._clock = clock
        self._lock = threading.Lock()
        self._completion_ended = threading.Condition(self._lock)
        self._attempts: dict[int, _Attempt] = {}  # in the order of their trigger
        self._recent: deque[int] = deque(maxlen=RECENT_IDS)
        self._shutdown = False

    def __len__(self) -> int:
        """Return the number of pending checkpoints."""
        return len(self._attempts)

    def by_id(self) -> dict[int, PendingCheckpoint]:
        """Return the pending checkpoints, in the order of their trigger."""
        with self._lock:
            return {i: a.pending for i, a in self._attempts.items()}

    def trigger(
        self,
        checkpoint_id: int | None,
        timestamp: float | None,
        states: Mapping[TaskKey, Any],
        properties: Mapping[str, Any] | None,
    ) -> tuple[PendingCheckpoint, Completing | None]:
        """Add a checkpoint; if ``states`` are those of all tasks, the caller completes the checkpoint.

        Raises ``CheckpointCoordinatorShutdownError``, and ``InvalidRequestError`` for an id that was used before.
        """
        with self._lock:
            now = self._clock()
            if self._shutdown:
                raise CheckpointCoordinatorShutdownError(f"The checkpoint coordinator of {self._job_id} is shut down.")
            # Under the lock, so that of two checkpoints the later one gets the higher id.
            taken = self._id_counter.get_and_increment() if checkpoint_id is None else checkpoint_id
            if taken in self._attempts or taken in self._recent:
                raise InvalidRequestError(f"Checkpoint {taken} of {self._job_id} was triggered before: take a new id.")
            stamp = now if timestamp is None else timestamp
            pending = PendingCheckpoint(self._job_id, taken, stamp, self._tasks, started=now, properties=properties)
            for task, state in states.items():
                pending.acknowledge(task, state, at=now)
            attempt = self._attempts[taken] = _Attempt(pending)
            self._stats.on_triggered(pending)
            if not pending.is_fully_acknowledged:
                return pending, None
            attempt.verdict = (CancelReason.FAILED, "it could not be completed")
            return pending, _begin_completion(attempt, now)

    def acknowledge(self, message: AcknowledgeCheckpoint) -> Received | Completing:
        """Take an acknowledgement. With the last one, the caller completes the checkpoint.

        Waits for a completion that is under way. Raises ``InvalidRequestError`` for another job or an unknown task.
        """
        with self._lock:
            attempt = self._attempt(message, "acknowledge")
            if attempt is None:
                return self._late(message)
            now = self._clock()
            pending = attempt.pending
            pending.acknowledge(message.task, message.state, message.size, message.duration, at=now)
            return _begin_completion(attempt, now) if pending.is_fully_acknowledged else Received.PENDING

    def decline(self, message: DeclineCheckpoint) -> Received | PendingCheckpoint:
        """Cancel the checkpoint that a message declines, and return it. Waits and raises as ``acknowledge``."""
        with self._lock:
            attempt = self._attempt(message, "decline")
            if attempt is None:
                return self._late(message)
            attempt.pending.check_task(message.task)
            operator, partition = message.task
            return self._end(attempt, CancelReason.DECLINED, f"declined by {operator}/{partition}: {message.reason}")

    def _attempt(self, message: AcknowledgeCheckpoint | DeclineCheckpoint, verb: str) -> _Attempt | None:
        """Return the pending checkpoint of a message. Waits for a completion that is under way."""
        if self._shutdown:
            return None
        if message.job_id != self._job_id:
            raise InvalidRequestError(
                f"{message.task[0]}/{message.task[1]} wants to {verb} checkpoint {message.checkpoint_id} of "
                f"{message.job_id}, but this is the coordinator of {self._job_id}."
            )
        while True:
            attempt = self._attempts.get(message.checkpoint_id)
            if attempt is None or self._shutdown:
                return None
            if attempt.completing is None:
                return attempt
            if attempt.completing == threading.get_ident():
                raise InvalidRequestError(f"Checkpoint {message.checkpoint_id} is being completed by its own callback.")
            self._completion_ended.wait()

    def _late(self, message: AcknowledgeCheckpoint | DeclineCheckpoint) -> Received:
        """Answer a message that has no pending checkpoint."""
        if self._shutdown or message.checkpoint_id not in self._recent:
            return Received.UNKNOWN
        log.debug("A message of %s for checkpoint %d came after its end", message.task, message.checkpoint_id)
        return Received.LATE

    # ---- the end of checkpoints

    def succeeded(self, completing: Completing, *, subsumes: bool) -> list[PendingCheckpoint]:
        """Record a completion; return the checkpoints with lower ids, which are cancelled if ``subsumes``."""
        pending, completed = completing
        with self._lock:
            pending.completed = completed
            self._remove(self._attempts[pending.id])
            older = [a for i, a in self._attempts.items() if subsumes and i < completed.id]
            why = f"checkpoint {completed.id}, a later one, is completed"
            subsumed = self._end_all(older, CancelReason.SUBSUMED, why)
            self._stats.on_completed(completed, pending.figures())
            self._completion_ended.notify_all()
        return subsumed

    def failed(self, completing: Completing, verdict: Verdict | None) -> bool:
        """Record a failed completion; return whether the checkpoint is cancelled.

        It is if its cancellation was requested during the completion, or by ``verdict``. If not, it waits for another
        acknowledgement.
        """
        with self._lock:
            attempt = self._attempts[completing.pending.id]
            attempt.completing = None
            verdict = attempt.verdict or verdict
            if verdict is not None:
                self._end(attempt, *verdict)
            self._completion_ended.notify_all()
        return verdict is not None

    def cancel(self, checkpoint_id: int, reason: CancelReason, why: str) -> PendingCheckpoint | None:
        """Cancel a checkpoint, and return it.

        Return None if the id is unknown, or if the checkpoint is being completed.
        """
        with self._lock:
            attempt = self._attempts.get(checkpoint_id)
            if attempt is None or attempt.completing is not None:
                return None
            return self._end(attempt, reason, why)

    def cancel_all(self, reason: CancelReason, why: str) -> list[PendingCheckpoint]:
        """Cancel all checkpoints, and return them. One that is being completed is cancelled if its completion fails."""
        with self._lock:
            return self._end_all(list(self._attempts.values()), reason, why)

    def cancel_older(self, timeout: float) -> list[PendingCheckpoint]:
        """Cancel those that were triggered ``timeout`` seconds ago or earlier, as ``cancel_all`` does."""
        with self._lock:
            now = self._clock()
            overdue = [a for a in self._attempts.values() if now - a.pending.started >= timeout]
            return self._end_all(overdue, CancelReason.EXPIRED, f"not complete within {timeout} s")

    def shut_down(self) -> list[PendingCheckpoint] | None:
        """Cancel all as ``cancel_all`` does, and accept no more messages; None if that was done before."""
        with self._lock:
            if self._shutdown:
                return None
            self._shutdown = True
            ended = self._end_all(list(self._attempts.values()), CancelReason.SHUTDOWN, "the coordinator was shut down")
            self._completion_ended.notify_all()
            return ended

    @property
    def is_shut_down(self) -> bool:
        """Return whether no more messages are accepted."""
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
        self._stats.on_failed(pending.id, f"{reason.value}: {why}")
        return pending

    def _remove(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.pending.id]
        self._recent.append(attempt.pending.id)


def _begin_completion(attempt: _Attempt, now: float) -> Completing:
    attempt.completing = threading.get_ident()
    return Completing(attempt.pending, attempt.pending.to_completed(now))


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

    ``timeout``, in seconds: ``expire`` cancels older checkpoints (None: never). ``PendingCheckpoints`` has all state.
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
            raise InvalidRequestError(f"timeout is {timeout}; it must be more than 0 seconds, or None.")
        self.job_id = job_id
        self.id_counter = id_counter if id_counter is not None else CheckpointIDCounter()
        self.stats = CheckpointStatsTracker()
        self._hooks = hooks or CheckpointHooks()
        self._timeout = timeout
        self._pending = PendingCheckpoints(job_id, Tasks(tasks), self.id_counter, self.stats, clock)

    def trigger_checkpoint(
        self,
        timestamp: float | None = None,
        *,
        checkpoint_id: int | None = None,
        states: Mapping[TaskKey, Any] | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> PendingCheckpoint:
        """Trigger a checkpoint and return it.

        ``timestamp`` defaults to the clock. ``checkpoint_id`` was taken from the counter before. The tasks in
        ``states`` count as having acknowledged. If these are all tasks, the checkpoint is completed on return (its
        ``completed`` is set), or the error of the completion is raised and nothing is pending. ``properties`` are
        copied to the completed checkpoint.

        Raises ``CheckpointNotTriggeredError`` or ``CheckpointCoordinatorShutdownError`` with the reason.
        """
        pending, completing = self._pending.trigger(checkpoint_id, timestamp, states or {}, properties)
        log.debug("Triggering checkpoint %d of %s @ %s", pending.id, self.job_id, pending.timestamp)
        if completing is not None:
            self._complete(completing)
        elif self._hooks.trigger is not None:
            try:
                self._hooks.trigger(pending)
            except Exception as error:
                why = f"its tasks could not be notified: {error}"
                if not self._cancel(pending.id, CancelReason.FAILED, why, error):
                    log.exception("Notifying the tasks of checkpoint %d failed after its end", pending.id)
                    return pending
                raise CheckpointNotTriggeredError(
                    f"Checkpoint {pending.id} of {self.job_id} was not triggered: {why}"
                ) from error
        return pending

    def receive_acknowledge_message(self, message: AcknowledgeCheckpoint) -> Received:
        """Take an acknowledgement. The answer is true for a pending or a recently ended checkpoint.

        Raises ``InvalidRequestError`` for another job or an unknown task, and the error of a failed completion.
        """
        received = self._pending.acknowledge(message)
        return self._complete(received) if isinstance(received, Completing) else received

    def receive_decline_message(self, message: DeclineCheckpoint) -> Received:
        """Cancel a checkpoint because a task declines it. The answer is true for a pending or a recently ended one.

        Raises ``InvalidRequestError`` for another job or an unknown task.
        """
        received = self._pending.decline(message)
        if isinstance(received, Received):
            return received
        self._tell_cancelled([received])
        return Received.ABORTED

    def _complete(self, completing: Completing) -> Received:
        pending, completed = completing
        hooks = self._hooks
        try:
            if hooks.store is not None:
                hooks.store(completed)
        except BaseException as error:
            is_kept = not isinstance(error, Exception) or hooks.keeps_failed
            verdict = None if is_kept else (CancelReason.FAILED, f"it could not be stored: {error}")
            if self._pending.failed(completing, verdict):
                self._tell_cancelled([pending], error if isinstance(error, Exception) else None)
            if is_kept:
                raise
            log.warning("Checkpoint %d of %s could not be stored", pending.id, self.job_id, exc_info=error)
            return Received.ABORTED
        subsumed = self._pending.succeeded(completing, subsumes=hooks.subsumes)
        log.debug("Completed checkpoint %d of %s in %.3f s", completed.id, self.job_id, completed.duration)
        if hooks.completed is not None:
            hooks.completed(completed)
        self._tell_cancelled(subsumed)
        return Received.COMPLETED

    # ---- cancelling

    def expire(self) -> list[int]:
        """Cancel the checkpoints that are older than the timeout. Return their ids."""
        expired = [] if self._timeout is None else self._pending.cancel_older(self._timeout)
        self._tell_cancelled(expired)
        return [pending.id for pending in expired]

    def cancel_checkpoint(self, checkpoint_id: int, reason: str) -> bool:
        """Cancel a pending checkpoint. Return False if the id is unknown, or if the checkpoint is being completed."""
        return self._cancel(checkpoint_id, CancelReason.CANCELLED, reason)

    def _cancel(self, checkpoint_id: int, reason: CancelReason, why: str, error: Exception | None = None) -> bool:
        cancelled = self._pending.cancel(checkpoint_id, reason, why)
        if cancelled is not None:
            self._tell_cancelled([cancelled], error)
        return cancelled is not None

    def cancel_all(self, why: str) -> None:
        """Cancel all pending checkpoints."""
        self._tell_cancelled(self._pending.cancel_all(CancelReason.STOPPED, why))

    def shutdown(self) -> None:
        """Cancel everything that is pending, and accept no more messages.

        A completion that is under way still counts if it succeeds.
        """
        ended = self._pending.shut_down()
        if ended is not None:
            log.info("The checkpoint coordinator of %s is shut down", self.job_id)
            self._tell_cancelled(ended)

    def is_shutdown(self) -> bool:
        """Return whether the coordinator was shut down."""
        return self._pending.is_shut_down

    def _tell_cancelled(self, cancelled: Iterable[PendingCheckpoint], error: Exception | None = None) -> None:
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
        return self._pending.by_id()

    def get_number_of_pending_checkpoints(self) -> int:
        """Return the number of pending checkpoints."""
        return len(self._pending)
