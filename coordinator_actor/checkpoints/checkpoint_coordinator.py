"""Triggers, completes and gives up checkpoints (Flink: ``CheckpointCoordinator``).

Differences from Flink, and the reasons:

- Hooks run without any lock. So a storage that hangs delays only the tasks that acknowledge that one checkpoint.
- A checkpoint whose completion fails stays pending, and a repeated acknowledgement tries again.
- The last acknowledgement of a task counts, since Spark takes the attempt that ends last.
- A completed checkpoint subsumes those with lower ids, not those with earlier timestamps, since clocks jump.
- Nothing is triggered by an interval: Spark's micro-batches and the user's savepoints trigger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator_actor.checkpoints.acknowledgements import AcknowledgeCheckpoint, DeclineCheckpoint, Received
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.pending_checkpoint import CancelReason, PendingCheckpoint
from coordinator_actor.checkpoints.pending_checkpoints import Completing, PendingCheckpoints
from coordinator_actor.checkpoints.tasks import TaskKey, Tasks
from coordinator_actor.exceptions import CheckpointNotTriggeredError, InvalidRequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointHooks:
    """What is called as a checkpoint goes on, and what a completed or failed one means for the others.

    All hooks are called without any lock held. If ``store`` raises, the checkpoint is not completed, and the
    acknowledger gets the error. So ``store`` may be called several times for one checkpoint. While it runs, other
    acknowledgers of the same checkpoint wait. Therefore a caller must hold its own lock around all calls that may
    complete a checkpoint, or around none of them; ``cancel_all``, ``expire`` and ``shutdown`` wait for no completion.
    """

    trigger: Callable[[PendingCheckpoint], None] | None = None
    """Tells the tasks of a new checkpoint."""
    store: Callable[[CompletedCheckpoint], None] | None = None
    """Stores a checkpoint that all tasks have acknowledged."""
    completed: Callable[[CompletedCheckpoint], None] | None = None
    """Hears of a checkpoint that is stored and no longer pending."""
    cancelled: Callable[[PendingCheckpoint, Exception | None], None] | None = None
    """Hears of a checkpoint that was given up (``PendingCheckpoint.cancelled`` says why), and of the error that made
    its completion fail. An error of this hook is logged.
    """
    subsumes: bool = True
    """A completed checkpoint ends the pending ones with lower ids."""
    keeps_failed: bool = True
    """A checkpoint that could not be stored stays pending with its acknowledgements: the next one tries again."""


class CheckpointCoordinator:
    """The checkpoints of one job over a fixed set of tasks. Safe to use from many threads.

    ``timeout``, in seconds: ``expire`` gives up older checkpoints (None: never). ``PendingCheckpoints`` has all state.
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

        ``timestamp`` is the clock's unless given. ``checkpoint_id`` was taken from the counter before. The tasks in
        ``states`` count as having acknowledged. If these are all tasks, the checkpoint is completed on return (its
        ``completed`` is set), or the error of the completion is raised and nothing is pending. ``properties`` are
        handed through to the completed checkpoint.

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
                why = f"its tasks could not be told: {error}"
                if not self._cancel(pending.id, CancelReason.FAILED, why, error):
                    log.exception("Telling the tasks of checkpoint %d failed after it was over", pending.id)
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
        """Give a checkpoint up because a task declines it. The answer is true for a pending or a recently ended one.

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

    # ---- giving up

    def expire(self) -> list[int]:
        """Give up the checkpoints that are older than the timeout. Return their ids."""
        expired = [] if self._timeout is None else self._pending.cancel_older(self._timeout)
        self._tell_cancelled(expired)
        return [pending.id for pending in expired]

    def cancel_checkpoint(self, checkpoint_id: int, reason: str) -> bool:
        """Give a pending checkpoint up. Return False if there is none of that id, or if it is being completed."""
        return self._cancel(checkpoint_id, CancelReason.CANCELLED, reason)

    def _cancel(self, checkpoint_id: int, reason: CancelReason, why: str, error: Exception | None = None) -> bool:
        cancelled = self._pending.cancel(checkpoint_id, reason, why)
        if cancelled is not None:
            self._tell_cancelled([cancelled], error)
        return cancelled is not None

    def cancel_all(self, why: str) -> None:
        """Give all pending checkpoints up."""
        self._tell_cancelled(self._pending.cancel_all(CancelReason.STOPPED, why))

    def shutdown(self) -> None:
        """Give up all that is pending, and take no more messages.

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
