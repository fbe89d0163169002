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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from coordinator_actor.checkpoints.acknowledgements import AcknowledgeCheckpoint, DeclineCheckpoint, Received
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints.completed_checkpoint import CompletedCheckpoint
from coordinator_actor.checkpoints.pending_checkpoint import CancelReason, PendingCheckpoint
from coordinator_actor.checkpoints.tasks import TaskKey, Tasks
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CheckpointNotTriggeredError,
    InvalidRequestError,
)

LOG = logging.getLogger(__name__)

RECENT_IDS = 16
"""The number of finished checkpoints that are remembered, to tell late messages from wrong ones (as in Flink)."""


class _Attempt:
    """One pending checkpoint, with what only its coordinator needs to know.

    ``completing`` is the id of the thread that completes the checkpoint. ``verdict`` is the reason to give the
    checkpoint up if that completion fails. Without a verdict the checkpoint goes on waiting.
    """

    def __init__(self, pending: PendingCheckpoint) -> None:
        self.pending = pending
        self.completing: int | None = None
        self.verdict: tuple[CancelReason, str] | None = None


class CheckpointCoordinator:
    """The checkpoints of one job over a fixed set of tasks. Safe to use from many threads.

    ``trigger`` tells the tasks of a new checkpoint. ``timeout``, in seconds: ``expire`` gives up older checkpoints
    (None: never). ``subsume``: a completed checkpoint ends the pending ones with lower ids.
    ``on_fully_acknowledged_checkpoint`` can be handed in, or overridden like the other hooks.

    The hooks ``on_fully_acknowledged_checkpoint``, ``on_completed_checkpoint`` and ``on_cancel_checkpoint`` are called
    without any lock held. If the first one raises, the checkpoint is not completed: it stays pending with all its
    acknowledgements, the acknowledger gets the error, and the next acknowledgement tries again. So this hook may be
    called several times for one checkpoint. While it runs, other acknowledgers of the same checkpoint wait. Therefore a
    caller must hold its own lock around all calls that may complete a checkpoint, or around none of them;
    ``cancel_all``, ``expire`` and ``shutdown`` wait for no completion.

    One lock, ``_lock``, guards all state. The hooks are called outside of it.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Iterable[TaskKey],
        *,
        id_counter: CheckpointIDCounter | None = None,
        stats_tracker: CheckpointStatsTracker | None = None,
        trigger: Callable[[PendingCheckpoint], None] | None = None,
        timeout: float | None = 600.0,
        clock: Callable[[], float] = time.time,
        subsume: bool = True,
        on_fully_acknowledged_checkpoint: Callable[[CompletedCheckpoint], None] | None = None,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise InvalidRequestError(f"timeout is {timeout}; it must be more than 0 seconds, or None.")
        self.job_id = job_id
        self.id_counter = id_counter if id_counter is not None else CheckpointIDCounter()
        self.stats = stats_tracker if stats_tracker is not None else CheckpointStatsTracker()
        self._tasks = Tasks(tasks)
        self._trigger = trigger
        self._timeout = timeout
        self._clock = clock
        self._subsume = subsume
        self._acknowledged_callback = on_fully_acknowledged_checkpoint
        self._lock = threading.Lock()
        self._completion_ended = threading.Condition(self._lock)
        self._attempts: dict[int, _Attempt] = {}  # in the order of their trigger
        self._recent: deque[int] = deque(maxlen=RECENT_IDS)
        self._shutdown = False

    # ---- hooks

    def on_fully_acknowledged_checkpoint(self, completed: CompletedCheckpoint) -> None:
        """Store a checkpoint that all tasks have acknowledged. If this raises, the checkpoint is not completed."""
        if self._acknowledged_callback is not None:
            self._acknowledged_callback(completed)

    def on_completed_checkpoint(self, completed: CompletedCheckpoint) -> None:
        """Take note of a checkpoint that is stored and no longer pending."""

    def on_cancel_checkpoint(self, pending: PendingCheckpoint, error: Exception | None) -> None:
        """Take note of a checkpoint that was given up: ``pending.cancelled`` says why.

        ``error`` made its completion fail. An error of this hook is logged.
        """

    def _keeps_failed(self) -> bool:
        """Return whether a checkpoint that could not be stored stays pending, for another try."""
        return True

    # ---- triggering

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
        completed: CompletedCheckpoint | None = None
        with self._lock:
            now = self._clock()
            self._check_not_shut_down()
            # Under the lock, so that of two checkpoints the later one gets the higher id.
            taken = self.id_counter.get_and_increment() if checkpoint_id is None else checkpoint_id
            if taken in self._attempts or taken in self._recent:
                raise InvalidRequestError(f"Checkpoint {taken} of {self.job_id} was triggered before: take a new id.")
            stamp = now if timestamp is None else timestamp
            pending = PendingCheckpoint(self.job_id, taken, stamp, self._tasks, started=now, properties=properties)
            for task, state in (states or {}).items():
                pending.acknowledge(task, state, at=now)
            attempt = self._attempts[taken] = _Attempt(pending)
            self.stats.on_triggered(pending)
            if pending.is_fully_acknowledged:
                attempt.verdict = (CancelReason.FAILED, "it could not be completed")
                completed = self._begin_completion(attempt, now)
        LOG.debug("Triggering checkpoint %d of %s @ %s", taken, self.job_id, stamp)
        if completed is not None:
            self._complete(attempt, completed)
        elif self._trigger is not None:
            try:
                self._trigger(pending)
            except Exception as error:
                if not self._cancel(attempt, CancelReason.FAILED, f"its tasks could not be told: {error}", error):
                    LOG.exception("Telling the tasks of checkpoint %d failed after it was over", taken)
                    return pending
                raise CheckpointNotTriggeredError(
                    f"Checkpoint {taken} of {self.job_id} was not triggered: its tasks could not be told: {error}"
                ) from error
        return pending

    # ---- messages

    def receive_acknowledge_message(self, message: AcknowledgeCheckpoint) -> Received:
        """Take an acknowledgement. The answer is true for a pending or a recently ended checkpoint.

        Raises ``InvalidRequestError`` for another job or an unknown task, and the error of a failed completion.
        """
        with self._lock:
            attempt = self._attempt(message, "acknowledge")
            if attempt is None:
                return self._late(message)
            now = self._clock()
            pending = attempt.pending
            pending.acknowledge(message.task, message.state, message.size, message.duration, at=now)
            if not pending.is_fully_acknowledged:
                return Received.PENDING
            completed = self._begin_completion(attempt, now)
        return self._complete(attempt, completed)

    def receive_decline_message(self, message: DeclineCheckpoint) -> Received:
        """Give a checkpoint up because a task declines it. The answer is true for a pending or a recently ended one.

        Raises ``InvalidRequestError`` for another job or an unknown task.
        """
        with self._lock:
            attempt = self._attempt(message, "decline")
            if attempt is None:
                return self._late(message)
            attempt.pending.check_task(message.task)
            operator, partition = message.task
            self._end(attempt, CancelReason.DECLINED, f"declined by {operator}/{partition}: {message.reason}")
        self._notify(attempt)
        return Received.ABORTED

    def _attempt(self, message: AcknowledgeCheckpoint | DeclineCheckpoint, verb: str) -> _Attempt | None:
        """Return the pending checkpoint of a message. Waits for a completion that is under way."""
        if self._shutdown:
            return None
        if message.job_id != self.job_id:
            raise InvalidRequestError(
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
                raise InvalidRequestError(f"Checkpoint {message.checkpoint_id} is being completed by its own callback.")
            self._completion_ended.wait()

    def _late(self, message: AcknowledgeCheckpoint | DeclineCheckpoint) -> Received:
        """Answer a message that has no pending checkpoint."""
        if self._shutdown or message.checkpoint_id not in self._recent:
            return Received.UNKNOWN
        LOG.debug("A message of %s for checkpoint %d came after its end", message.task, message.checkpoint_id)
        return Received.LATE

    # ---- completing

    def _begin_completion(self, attempt: _Attempt, now: float) -> CompletedCheckpoint:
        attempt.completing = threading.get_ident()
        return attempt.pending.to_completed(now)

    def _complete(self, attempt: _Attempt, completed: CompletedCheckpoint) -> Received:
        pending = attempt.pending
        try:
            self.on_fully_acknowledged_checkpoint(completed)
        except BaseException as error:
            kept = not isinstance(error, Exception) or self._keeps_failed()
            with self._lock:
                attempt.completing = None
                verdict = attempt.verdict
                if verdict is None and not kept:
                    verdict = (CancelReason.FAILED, f"it could not be stored: {error}")
                if verdict is not None:
                    self._end(attempt, *verdict)
                self._completion_ended.notify_all()
            if verdict is not None:
                self._notify(attempt, error if isinstance(error, Exception) else None)
            if kept:
                raise
            LOG.warning("Checkpoint %d of %s could not be stored", pending.id, self.job_id, exc_info=error)
            return Received.ABORTED
        with self._lock:
            attempt.completing = None
            pending.completed = completed
            self._remove(attempt)
            older = [a for i, a in self._attempts.items() if i < completed.id] if self._subsume else []
            why = f"checkpoint {completed.id}, a later one, is completed"
            subsumed = self._end_all(older, CancelReason.SUBSUMED, why)
            self.stats.on_completed(completed, pending.figures())
            self._completion_ended.notify_all()
        LOG.debug("Completed checkpoint %d of %s in %.3f s", completed.id, self.job_id, completed.duration)
        self.on_completed_checkpoint(completed)
        for dropped in subsumed:
            self._notify(dropped)
        return Received.COMPLETED

    # ---- giving up

    def expire(self) -> list[int]:
        """Give up the checkpoints that are older than the timeout. Return their ids."""
        if self._timeout is None:
            return []
        with self._lock:
            now = self._clock()
            overdue = [a for a in self._attempts.values() if now - a.pending.started >= self._timeout]
            expired = self._end_all(overdue, CancelReason.EXPIRED, f"not complete within {self._timeout} s")
        for attempt in expired:
            self._notify(attempt)
        return [a.pending.id for a in expired]

    def cancel_checkpoint(self, checkpoint_id: int, reason: str) -> bool:
        """Give a pending checkpoint up. Return False if there is none of that id, or if it is being completed."""
        with self._lock:
            attempt = self._attempts.get(checkpoint_id)
        return attempt is not None and self._cancel(attempt, CancelReason.CANCELLED, reason)

    def cancel_all(self, why: str) -> None:
        """Give all pending checkpoints up."""
        with self._lock:
            ended = self._end_all(list(self._attempts.values()), CancelReason.STOPPED, why)
        for attempt in ended:
            self._notify(attempt)

    def _cancel(self, attempt: _Attempt, reason: CancelReason, why: str, error: Exception | None = None) -> bool:
        with self._lock:
            if attempt.pending.is_discarded or attempt.completing is not None:
                return False
            self._end(attempt, reason, why)
        self._notify(attempt, error)
        return True

    def _end_all(self, attempts: list[_Attempt], reason: CancelReason, why: str) -> list[_Attempt]:
        """Give up checkpoints. One that is being completed is given up only if its completion fails."""
        ended = []
        for attempt in attempts:
            if attempt.completing is None:
                self._end(attempt, reason, why)
                ended.append(attempt)
            elif attempt.verdict is None:
                attempt.verdict = (reason, why)
        return ended

    def _end(self, attempt: _Attempt, reason: CancelReason, why: str) -> None:
        if reason is CancelReason.EXPIRED:
            why = f"{why}: {attempt.pending.describe_missing()}"
        attempt.pending.cancelled = (reason, why)
        self._remove(attempt)
        self.stats.on_failed(attempt.pending.id, f"{reason.value}: {why}")

    def _remove(self, attempt: _Attempt) -> None:
        del self._attempts[attempt.pending.id]
        self._recent.append(attempt.pending.id)

    def _notify(self, attempt: _Attempt, error: Exception | None = None) -> None:
        assert attempt.pending.cancelled is not None
        reason, why = attempt.pending.cancelled
        LOG.info("Checkpoint %d of %s was given up (%s): %s", attempt.pending.id, self.job_id, reason.value, why)
        try:
            self.on_cancel_checkpoint(attempt.pending, error)
        except Exception:
            LOG.exception("The callback for the cancelled checkpoint %d failed", attempt.pending.id)

    # ---- shutdown

    def shutdown(self) -> None:
        """Give up all that is pending, and take no more messages.

        A completion that is under way still counts if it succeeds.
        """
        with self._lock:
            if self._shutdown:
                return
            self._shutdown = True
            attempts = list(self._attempts.values())
            ended = self._end_all(attempts, CancelReason.SHUTDOWN, "the coordinator was shut down")
            self._completion_ended.notify_all()
        LOG.info("The checkpoint coordinator of %s is shut down", self.job_id)
        for attempt in ended:
            self._notify(attempt)

    def is_shutdown(self) -> bool:
        """Return whether the coordinator was shut down."""
        return self._shutdown

    def _check_not_shut_down(self) -> None:
        if self._shutdown:
            raise CheckpointCoordinatorShutdownError(f"The checkpoint coordinator of {self.job_id} is shut down.")

    # ---- figures

    def get_pending_checkpoints(self) -> dict[int, PendingCheckpoint]:
        """Return the pending checkpoints by id, in the order of their trigger."""
        with self._lock:
            return {i: a.pending for i, a in self._attempts.items()}

    def get_number_of_pending_checkpoints(self) -> int:
        """Return the number of pending checkpoints."""
        return len(self._attempts)
