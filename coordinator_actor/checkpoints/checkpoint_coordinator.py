"""Triggers checkpoints, collects their acknowledgements, and completes or gives them up (Flink: ``CheckpointCoordinator``).

What differs from Flink, and why: callbacks run without any lock, so that a storage that hangs holds up nobody but those who
acknowledge that checkpoint; a completion that fails leaves the checkpoint pending, so that a repeated acknowledgement tries
again; the last acknowledgement of a task counts, for the attempt that Spark takes is the last one; a checkpoint is subsumed by
a higher id and not by a later timestamp, for clocks jump; a declined checkpoint is followed by another one only while the
scheduler runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints.checkpoints import (
    AcknowledgeCheckpoint,
    CancelReason,
    CompletedCheckpoint,
    CompletedCheckpointStore,
    DeclineCheckpoint,
    MemoryCheckpointStore,
    PendingCheckpoint,
    Received,
    TaskKey,
    Tasks,
)
from coordinator_actor.checkpoints.job_status import JobStatus, JobStatusListener
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CheckpointNotTriggeredError,
    CheckpointRestoreError,
    CoordinatorError,
    InvalidRequestError,
)

LOG = logging.getLogger(__name__)

RECENT_IDS = 16
"""How many finished checkpoints are remembered, to tell late messages from wrong ones (as in Flink)."""


class TimerHandle(Protocol):
    """One call that is to come."""

    def cancel(self) -> None:
        """Do not call; no effect on a call that has begun."""
        ...


class Timers(Protocol):
    """Calls functions later."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` once, in ``delay`` seconds, and not from within this call."""
        ...


class ThreadTimers:
    """Timers by daemon threads."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` in a thread of its own."""
        timer = threading.Timer(delay, callback)
        timer.daemon = True
        timer.name = "statestore-checkpoint-timer"
        timer.start()
        return timer


class _Attempt:
    """One pending checkpoint, with what only its coordinator needs to know."""

    def __init__(self, pending: PendingCheckpoint) -> None:
        self.pending = pending
        self.handles: list[TimerHandle] = []
        self.completing: int | None = None  # the thread that is completing it
        # What is to become of it should its completion fail; otherwise it goes on waiting.
        self.verdict: tuple[CancelReason, str] | None = None


class CheckpointCoordinator:
    """The checkpoints of one job over a fixed set of tasks; safe to use from many threads.

    ``trigger`` tells the tasks of a new checkpoint. ``interval`` seconds lie between periodic ones (None: there are none),
    ``min_pause`` at least between the end of one and the trigger of the next, ``max_concurrent`` (None: any number) may be
    pending at once, and one that is not complete ``timeout`` seconds after its trigger is given up (None: never). One that is
    pending for ``slow_after`` seconds is warned about. ``subsume``: a completed checkpoint ends the pending ones before it.
    ``replace``: a task's later acknowledgement takes the place of its earlier one; False ignores it, as Flink does.

    ``on_cancel_checkpoint(id)``, ``on_fully_acknowledged_checkpoint(completed)`` and ``on_shutdown()`` can be handed in or
    overridden. All are called without any lock held. If the second one or the store raises, the checkpoint is not completed:
    it stays pending with all its acknowledgements, the error reaches the acknowledger, and the next acknowledgement tries
    again, so it may be called more than once for one checkpoint. While it runs, others that acknowledge the same checkpoint
    wait; so a caller's own lock must be held either around all calls to this coordinator or in none.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Iterable[TaskKey],
        *,
        id_counter: CheckpointIDCounter | None = None,
        completed_store: CompletedCheckpointStore | None = None,
        stats_tracker: CheckpointStatsTracker | None = None,
        trigger: Callable[[PendingCheckpoint], None] | None = None,
        interval: float | None = None,
        timeout: float | None = 600.0,
        min_pause: float = 0.0,
        max_concurrent: int | None = 1,
        clock: Callable[[], float] = time.time,
        timers: Timers | None = None,
        replace: bool = True,
        subsume: bool = True,
        slow_after: float | None = None,
        on_cancel_checkpoint: Callable[[int], None] | None = None,
        on_fully_acknowledged_checkpoint: Callable[[CompletedCheckpoint], None] | None = None,
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        for name, value in (("interval", interval), ("timeout", timeout), ("slow_after", slow_after)):
            if value is not None and not value > 0:
                raise InvalidRequestError(f"{name} is {value}; it must be more than 0 seconds, or None.")
        if not min_pause >= 0:
            raise InvalidRequestError(f"min_pause is {min_pause}; it must be 0 seconds or more.")
        if max_concurrent is not None and max_concurrent < 1:
            raise InvalidRequestError(f"max_concurrent is {max_concurrent}; it must be 1 or more, or None.")
        self.job_id = job_id
        self.id_counter = id_counter if id_counter is not None else CheckpointIDCounter()
        self.stats = stats_tracker if stats_tracker is not None else CheckpointStatsTracker()
        self._tasks = Tasks(tasks)
        self._store: CompletedCheckpointStore = (
            completed_store if completed_store is not None else MemoryCheckpointStore()
        )
        self._trigger = trigger
        self._interval = interval
        self._timeout = timeout
        self._min_pause = min_pause
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._timers: Timers = timers if timers is not None else ThreadTimers()
        self._replace = replace
        self._subsume = subsume
        self._slow_after = slow_after
        self._cancel_callback = on_cancel_checkpoint
        self._acknowledged_callback = on_fully_acknowledged_checkpoint
        self._shutdown_callback = on_shutdown
        self._lock = threading.Lock()
        self._completion_ended = threading.Condition(self._lock)
        self._attempts: dict[int, _Attempt] = {}  # in the order of their trigger
        self._recent: deque[int] = deque(maxlen=RECENT_IDS)
        self._last_completion: float | None = None
        self._scheduling = False
        self._queued = False
        self._tick_handle: TimerHandle | None = None
        self._generation = 0
        self._listener: JobStatusListener | None = None
        self._shutdown = False

    # ---- callbacks

    def on_cancel_checkpoint(self, checkpoint_id: int) -> None:
        """A checkpoint was given up. What this raises is logged."""
        if self._cancel_callback is not None:
            self._cancel_callback(checkpoint_id)

    def on_fully_acknowledged_checkpoint(self, completed: CompletedCheckpoint) -> None:
        """All tasks have acknowledged a checkpoint; if this raises, it is not completed."""
        if self._acknowledged_callback is not None:
            self._acknowledged_callback(completed)

    def on_shutdown(self) -> None:
        """The coordinator has been shut down, and its pending checkpoints have been given up."""
        if self._shutdown_callback is not None:
            self._shutdown_callback()

    def _cancelled(self, pending: PendingCheckpoint, reason: CancelReason, why: str, error: Exception | None) -> None:
        """As ``on_cancel_checkpoint``, with the reason; ``error`` is what a completion failed with."""
        self.on_cancel_checkpoint(pending.id)

    def _completed(self, completed: CompletedCheckpoint) -> None:
        """A checkpoint is stored, and no longer pending."""

    def _keeps_failed(self) -> bool:
        """Whether a checkpoint that could not be stored stays pending, for a repeated acknowledgement to try again."""
        return True

    # ---- triggering

    def trigger_checkpoint(self, timestamp: float | None = None) -> bool:
        """Trigger a checkpoint; returns whether that was done.

        If too many are pending, the request is queued, as in Flink: a checkpoint is triggered as soon as one of them ends,
        and until then further requests are turned down.
        """
        try:
            self._start(timestamp, queue=True)
        except (CheckpointNotTriggeredError, CheckpointCoordinatorShutdownError) as error:
            level = logging.WARNING if error.__cause__ is not None else logging.DEBUG
            LOG.log(level, "%s", error, exc_info=error.__cause__)
            return False
        return True

    def start_checkpoint(
        self,
        timestamp: float | None = None,
        *,
        checkpoint_id: int | None = None,
        states: Mapping[TaskKey, Any] | None = None,
        properties: Mapping[str, Any] | None = None,
    ) -> PendingCheckpoint:
        """Trigger a checkpoint and return it.

        ``timestamp`` is the clock's unless given. ``checkpoint_id``: one that was taken from the counter before. ``states`` are
        of tasks that count as having acknowledged; if these are all, it is completed on return (its ``completed`` is set), or
        the error that prevents it is raised and nothing is pending. ``properties`` are found again in the completed one.

        Raises ``CheckpointNotTriggeredError`` or ``CheckpointCoordinatorShutdownError`` with the reason.
        """
        return self._start(timestamp, checkpoint_id=checkpoint_id, states=states, properties=properties)

    def _start(
        self,
        timestamp: float | None,
        *,
        checkpoint_id: int | None = None,
        states: Mapping[TaskKey, Any] | None = None,
        properties: Mapping[str, Any] | None = None,
        queue: bool = False,
    ) -> PendingCheckpoint:
        completed: CompletedCheckpoint | None = None
        with self._lock:
            now = self._clock()
            self._check_may_start(now, queue)
            # Under the lock, so that of two checkpoints the one with the higher id is the one triggered later.
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
            else:
                self._arm(attempt)
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

    def _check_may_start(self, now: float, queue: bool) -> None:
        if self._shutdown:
            raise self._shut_down_error()
        if self._max_concurrent is not None and len(self._attempts) >= self._max_concurrent:
            if queue:
                self._queued = True
                self._cancel_tick()
            raise CheckpointNotTriggeredError(
                f"{len(self._attempts)} checkpoints of {self.job_id} are pending ({sorted(self._attempts)}), and at most "
                f"{self._max_concurrent} may be: wait until one of them has ended."
            )
        pause = self._remaining_pause(now)
        if pause > 0:
            if queue and self._scheduling:
                self._arm_tick(pause)
            raise CheckpointNotTriggeredError(
                f"The last checkpoint of {self.job_id} ended less than min_pause={self._min_pause} s ago: wait {pause:.3f} s."
            )

    def _remaining_pause(self, now: float) -> float:
        if self._last_completion is None or not self._min_pause:
            return 0.0
        elapsed = now - self._last_completion
        # A clock that was set back says nothing about how long ago it was.
        return self._min_pause - elapsed if 0 <= elapsed < self._min_pause else 0.0

    def _arm(self, attempt: _Attempt) -> None:
        if self._timeout is not None:
            expire = self._guarded(lambda: self._expire_attempt(attempt))
            attempt.handles.append(self._timers.call_later(self._timeout, expire))
        if self._slow_after is not None:
            warn = self._guarded(lambda: self._warn_slow(attempt))
            attempt.handles.append(self._timers.call_later(self._slow_after, warn))

    def _warn_slow(self, attempt: _Attempt) -> None:
        with self._lock:
            if attempt.pending.is_discarded:
                return
            missing = attempt.pending.describe_missing()
        LOG.warning(
            "Checkpoint %d of %s is pending for %s s: %s", attempt.pending.id, self.job_id, self._slow_after, missing
        )

    # ---- messages

    def receive_acknowledge_message(self, message: AcknowledgeCheckpoint) -> bool:
        """Take an acknowledgement; returns whether it belongs to a pending or a recently ended checkpoint.

        Raises ``InvalidRequestError`` for another job or a task that is none of this one's, and what prevented a completion.
        """
        return self.acknowledge(message) is not Received.UNKNOWN

    def acknowledge(self, message: AcknowledgeCheckpoint) -> Received:
        """As ``receive_acknowledge_message``; returns what became of it."""
        with self._lock:
            attempt = self._attempt(message, "acknowledge")
            if attempt is None:
                return self._late(message)
            now = self._clock()
            pending = attempt.pending
            pending.acknowledge(
                message.task, message.state, message.size, message.duration, at=now, replace=self._replace
            )
            if not pending.is_fully_acknowledged:
                return Received.PENDING
            completed = self._begin_completion(attempt, now)
        return self._complete(attempt, completed)

    def receive_decline_message(self, message: DeclineCheckpoint) -> bool:
        """Give a checkpoint up because a task declines it; returns whether it is pending or has recently ended.

        While the scheduler runs, another one is triggered unless a more recent one is pending.
        Raises ``InvalidRequestError`` for another job or a task that is none of this one's.
        """
        with self._lock:
            attempt = self._attempt(message, "decline")
            if attempt is None:
                return self._late(message) is not Received.UNKNOWN
            attempt.pending.check_task(message.task)
            operator, partition = message.task
            why = f"declined by {operator}/{partition}: {message.reason}"
            self._end(attempt, CancelReason.DECLINED, why)
            if self._queued:
                self._promote_queued()
            elif self._scheduling and not any(i > message.checkpoint_id for i in self._attempts):
                self._arm_tick(self._remaining_pause(self._clock()))
        self._notify(attempt)
        return True

    def _attempt(self, message: AcknowledgeCheckpoint | DeclineCheckpoint, verb: str) -> _Attempt | None:
        """The pending checkpoint of a message, after a completion that is under way."""
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
            self._store.add(completed)
        except BaseException as error:
            kept = not isinstance(error, Exception) or self._keeps_failed()
            with self._lock:
                attempt.completing = None
                verdict = attempt.verdict
                if verdict is None and not kept:
                    verdict = (CancelReason.FAILED, f"it could not be stored: {error}")
                if verdict is not None:
                    self._end(attempt, *verdict)
                    self._promote_queued()
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
            self._last_completion = self._clock()
            self._remove(attempt)
            subsumed = self._drop_subsumed(completed.id) if self._subsume else []
            self.stats.on_completed(completed, pending.figures())
            self._promote_queued()
            self._completion_ended.notify_all()
        LOG.debug("Completed checkpoint %d of %s in %.3f s", completed.id, self.job_id, completed.duration)
        self._completed(completed)
        for dropped in subsumed:
            self._notify(dropped)
        return Received.COMPLETED

    def _drop_subsumed(self, checkpoint_id: int) -> list[_Attempt]:
        older = [a for i, a in self._attempts.items() if i < checkpoint_id]
        return self._end_all(older, CancelReason.SUBSUMED, f"checkpoint {checkpoint_id}, a later one, is completed")

    # ---- giving up

    def expire(self) -> list[int]:
        """Give up what is older than the timeout by the clock; returns the ids. Timers do the same by themselves."""
        if self._timeout is None:
            return []
        with self._lock:
            now = self._clock()
            overdue = [a for a in self._attempts.values() if now - a.pending.started >= self._timeout]
            expired = self._end_all(overdue, CancelReason.EXPIRED, self._expiry())
            if expired:
                self._promote_queued()
        for attempt in expired:
            self._notify(attempt)
        return [a.pending.id for a in expired]

    def cancel_checkpoint(self, checkpoint_id: int, reason: str) -> bool:
        """Give a pending checkpoint up; False if there is none of that id, or it is being completed."""
        with self._lock:
            attempt = self._attempts.get(checkpoint_id)
        return attempt is not None and self._cancel(attempt, CancelReason.CANCELLED, reason)

    def _expire_attempt(self, attempt: _Attempt) -> None:
        self._cancel(attempt, CancelReason.EXPIRED, self._expiry(), or_later=True)

    def _expiry(self) -> str:
        return f"not complete within {self._timeout} s"

    def _cancel(
        self,
        attempt: _Attempt,
        reason: CancelReason,
        why: str,
        error: Exception | None = None,
        *,
        or_later: bool = False,
    ) -> bool:
        """Give up; with ``or_later`` also one that is being completed, should that fail."""
        with self._lock:
            if attempt.pending.is_discarded:
                return False
            if attempt.completing is not None:
                if or_later and attempt.verdict is None:
                    attempt.verdict = (reason, why)
                return False
            self._end(attempt, reason, why)
            self._promote_queued()
        self._notify(attempt, error)
        return True

    def _end_all(self, attempts: list[_Attempt], reason: CancelReason, why: str) -> list[_Attempt]:
        """Give up all of them that are not being completed; those are given up if that fails."""
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
        for handle in attempt.handles:
            handle.cancel()
        attempt.handles.clear()

    def _notify(self, attempt: _Attempt, error: Exception | None = None) -> None:
        assert attempt.pending.cancelled is not None
        reason, why = attempt.pending.cancelled
        LOG.info("Checkpoint %d of %s was given up (%s): %s", attempt.pending.id, self.job_id, reason.value, why)
        try:
            self._cancelled(attempt.pending, reason, why, error)
        except Exception:
            LOG.exception("The callback for the cancelled checkpoint %d failed", attempt.pending.id)

    # ---- periodic checkpoints

    def start_checkpoint_scheduler(self) -> None:
        """Trigger a checkpoint every ``interval`` seconds from now on. What is pending is given up first, as in Flink.

        Without an interval nothing is triggered. Raises ``CheckpointCoordinatorShutdownError``.
        """
        with self._lock:
            if self._shutdown:
                raise self._shut_down_error()
            ended = self._stop("the scheduler was started anew")
            self._scheduling = self._interval is not None
            if self._interval is not None:
                self._arm_tick(self._interval)
        for attempt in ended:
            self._notify(attempt)

    def stop_checkpoint_scheduler(self) -> None:
        """Trigger no more by itself, and give up all that is pending."""
        with self._lock:
            ended = self._stop("the scheduler was stopped")
        for attempt in ended:
            self._notify(attempt)

    def _stop(self, why: str, reason: CancelReason = CancelReason.STOPPED) -> list[_Attempt]:
        self._scheduling = False
        self._queued = False
        self._cancel_tick()
        return self._end_all(list(self._attempts.values()), reason, why)

    def _arm_tick(self, delay: float) -> None:
        self._cancel_tick()
        generation = self._generation
        self._tick_handle = self._timers.call_later(delay, self._guarded(lambda: self._tick(generation)))

    def _cancel_tick(self) -> None:
        self._generation += 1
        if self._tick_handle is not None:
            self._tick_handle.cancel()
            self._tick_handle = None

    def _tick(self, generation: int) -> None:
        with self._lock:
            if generation != self._generation:
                return
            self._tick_handle = None
            if self._scheduling and self._interval is not None:
                self._arm_tick(self._interval)
        self.trigger_checkpoint()

    def _promote_queued(self) -> None:
        if self._queued and not self._shutdown:
            self._queued = False
            self._arm_tick(self._remaining_pause(self._clock()))

    def _guarded(self, call: Callable[[], None]) -> Callable[[], None]:
        """For timers, whose caller can do nothing about an error."""

        def run() -> None:
            try:
                call()
            except Exception:
                LOG.exception("A timer of the checkpoint coordinator of %s failed", self.job_id)

        return run

    # ---- restoring

    def restore_latest_checkpointed_state(
        self,
        restore: Callable[[TaskKey, Any], None],
        *,
        error_if_no_checkpoint: bool = False,
        all_or_nothing_state: bool = False,
    ) -> CompletedCheckpoint | None:
        """Hand the states of the latest completed checkpoint to ``restore``; returns that checkpoint, None if there is none.

        The store is recovered first, and the counter set above all that it holds. Raises ``CheckpointRestoreError``, before
        anything is restored, if there is none and ``error_if_no_checkpoint``, if it is of other
        tasks or another number of partitions, and, with ``all_or_nothing_state``, if only some tasks of an operator have state.
        """
        self._check_not_shut_down()
        self._store.recover()
        latest = self._store.latest()
        if latest is None:
            if error_if_no_checkpoint:
                raise CheckpointRestoreError(f"There is no completed checkpoint of {self.job_id} to restore from.")
            return None
        own = self._tasks.parallelism
        unknown = sorted(task for task in latest.states if task not in self._tasks.index)
        if unknown or any(own[o] != n for o, n in latest.parallelism.items() if o in own):
            raise CheckpointRestoreError(
                f"Checkpoint {latest.id} does not fit the tasks of {self.job_id}, whose operators and partition counts are "
                f"{own}; the checkpoint's are {latest.operators()}."
                + (f" It has state of {len(unknown)} tasks that do not exist: {_named(unknown)}." if unknown else "")
            )
        if all_or_nothing_state:
            with_state = {operator for operator, _ in latest.states}
            lacking = [t for t in self._tasks.keys if t[0] in with_state and t not in latest.states]
            if lacking:
                raise CheckpointRestoreError(
                    f"Checkpoint {latest.id} has state only for a part of the tasks of an operator; "
                    f"{len(lacking)} have none: {_named(lacking)}."
                )
        self.id_counter.ensure_above(latest.id)
        for task, state in latest.states.items():
            restore(task, state)
        self.stats.on_restored(latest)
        return latest

    # ---- shutdown

    def shutdown(self) -> None:
        """Give up all that is pending, and take no more messages. A completion that is under way still counts if it succeeds."""
        with self._lock:
            if self._shutdown:
                return
            self._shutdown = True
            self._listener = None
            ended = self._stop("the coordinator was shut down", CancelReason.SHUTDOWN)
            self._completion_ended.notify_all()
        LOG.info("The checkpoint coordinator of %s is shut down", self.job_id)
        for attempt in ended:
            self._notify(attempt)
        try:
            self._store.shutdown()
        finally:
            self.on_shutdown()

    def is_shutdown(self) -> bool:
        """Whether it has been shut down."""
        return self._shutdown

    def _check_not_shut_down(self) -> None:
        if self._shutdown:
            raise self._shut_down_error()

    def _shut_down_error(self) -> CoordinatorError:
        return CheckpointCoordinatorShutdownError(f"The checkpoint coordinator of {self.job_id} is shut down.")

    # ---- looking

    def get_pending_checkpoints(self) -> dict[int, PendingCheckpoint]:
        """The pending checkpoints by id, in the order of their trigger."""
        with self._lock:
            return {i: a.pending for i, a in self._attempts.items()}

    def get_successful_checkpoints(self) -> list[CompletedCheckpoint]:
        """The completed checkpoints that are kept, by ascending id."""
        return self._store.all()

    def get_number_of_pending_checkpoints(self) -> int:
        """How many are pending."""
        return len(self._attempts)

    def get_number_of_retained_successful_checkpoints(self) -> int:
        """How many completed ones are kept."""
        return self._store.num_retained

    def get_and_increment_checkpoint_id(self) -> int:
        """Take the next id from the counter."""
        return self.id_counter.get_and_increment()

    # ---- the job's status

    def create_activator_deactivator(self) -> JobStatusListener:
        """A listener that starts the scheduler when the job runs, and stops it otherwise; always the same one.

        Raises ``CheckpointCoordinatorShutdownError``.
        """
        with self._lock:
            if self._shutdown:
                raise self._shut_down_error()
            if self._listener is None:
                self._listener = _ActivatorDeactivator(self)
            return self._listener

    def _on_running(self) -> None:
        self.start_checkpoint_scheduler()


class _ActivatorDeactivator:
    """Starts and stops a coordinator with its job (Flink: ``CheckpointCoordinatorDeActivator``)."""

    def __init__(self, coordinator: CheckpointCoordinator) -> None:
        self._coordinator = coordinator

    def job_status_changed(self, job_id: str, status: JobStatus | str) -> None:
        """Raises ``InvalidRequestError`` for another job or an unknown status; of no effect after shutdown."""
        coordinator = self._coordinator
        if job_id != coordinator.job_id:
            raise InvalidRequestError(
                f"A status of {job_id} came to the checkpoint coordinator of {coordinator.job_id}."
            )
        try:
            status = JobStatus(status)
        except ValueError as error:
            raise InvalidRequestError(
                f"{status!r} is no job status; these are: {[s.value for s in JobStatus]}."
            ) from error
        if coordinator.is_shutdown():
            return
        if status is not JobStatus.RUNNING:
            coordinator.stop_checkpoint_scheduler()
            return
        try:
            coordinator._on_running()
        except CheckpointCoordinatorShutdownError:
            LOG.debug("%s runs, but its checkpoint coordinator has just been shut down", job_id)


def _named(tasks: list[TaskKey]) -> str:
    return ", ".join(f"{operator}/{partition}" for operator, partition in tasks[:8]) + (
        ", ..." if len(tasks) > 8 else ""
    )
