"""Makes savepoints when it is asked to, and restores them (Flink: ``SavepointCoordinator``).

A separate instance beside the checkpoint coordinator, sharing its id counter: periodic checkpoints and savepoints neither
queue behind each other nor end each other. Nor do two savepoints (Flink since 1.2): each belongs to the one who asked for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from coordinator_actor.checkpoints.checkpoint_coordinator import CheckpointCoordinator, Timers
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.checkpoints.checkpoint_stats import CheckpointStatsTracker
from coordinator_actor.checkpoints.checkpoints import (
    CancelReason,
    CompletedCheckpoint,
    NoCheckpointStore,
    PendingCheckpoint,
    TaskKey,
)
from coordinator_actor.exceptions import (
    CheckpointCoordinatorShutdownError,
    CoordinatorError,
    SavepointDeclinedError,
    SavepointExpiredError,
    SavepointFailedError,
    SavepointMismatchError,
)

LOG = logging.getLogger(__name__)

_ERRORS: dict[CancelReason, type[CoordinatorError]] = {
    CancelReason.EXPIRED: SavepointExpiredError,
    CancelReason.DECLINED: SavepointDeclinedError,
    CancelReason.SHUTDOWN: CheckpointCoordinatorShutdownError,
}


class SavepointCoordinator(CheckpointCoordinator):
    """The savepoints of one job; safe to use from many threads.

    ``store`` writes a savepoint that all tasks have acknowledged, and returns its path. It is called once per savepoint,
    without any lock held; if it raises, the savepoint has failed. The other arguments are a ``CheckpointCoordinator``'s.
    """

    def __init__(
        self,
        job_id: str,
        tasks: Iterable[TaskKey],
        *,
        id_counter: CheckpointIDCounter,
        store: Callable[[CompletedCheckpoint], str],
        stats_tracker: CheckpointStatsTracker | None = None,
        trigger: Callable[[PendingCheckpoint], None] | None = None,
        timeout: float | None = 600.0,
        max_concurrent: int | None = None,
        clock: Callable[[], float] = time.time,
        timers: Timers | None = None,
        replace: bool = True,
        subsume: bool = False,
        slow_after: float | None = None,
        on_cancel_checkpoint: Callable[[int], None] | None = None,
        on_fully_acknowledged_checkpoint: Callable[[CompletedCheckpoint], None] | None = None,
        on_shutdown: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            job_id,
            tasks,
            id_counter=id_counter,
            completed_store=NoCheckpointStore(),
            stats_tracker=stats_tracker,
            trigger=trigger,
            timeout=timeout,
            max_concurrent=max_concurrent,
            clock=clock,
            timers=timers,
            replace=replace,
            subsume=subsume,
            slow_after=slow_after,
            on_cancel_checkpoint=on_cancel_checkpoint,
            on_fully_acknowledged_checkpoint=on_fully_acknowledged_checkpoint,
            on_shutdown=on_shutdown,
        )
        self._write = store
        # A future is in the first of these until it is claimed, by its completion or by what made the savepoint fail: the
        # user may cancel it until then. Each is claimed once.
        self._futures: dict[int, Future[str]] = {}
        self._storing: dict[int, Future[str]] = {}
        self._paths: dict[int, str] = {}
        self._futures_lock = threading.Lock()
        self._restore_path: str | None = None

    def trigger_savepoint(
        self, timestamp: float | None = None, *, properties: Mapping[str, Any] | None = None
    ) -> Future[str]:
        """Begin a savepoint; the future is its path. ``properties`` are in what ``store`` gets.

        The future fails with ``SavepointExpiredError``, ``SavepointDeclinedError``, ``CheckpointCoordinatorShutdownError``, or
        ``SavepointFailedError`` whose cause is the error. To cancel the future before ``store`` is called is to give up the savepoint.
        """
        future: Future[str] = Future()
        checkpoint_id = self.get_and_increment_checkpoint_id()
        # Before anything can call back: what is triggered may be over before the call returns.
        with self._futures_lock:
            self._futures[checkpoint_id] = future
        future.add_done_callback(lambda done: self._on_done(checkpoint_id, done))
        try:
            self.start_checkpoint(timestamp, checkpoint_id=checkpoint_id, properties=properties)
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
        """How many futures are open."""
        with self._futures_lock:
            return len(self._futures) + len(self._storing)

    def restore_savepoint(
        self,
        path: str,
        load: Callable[[str], CompletedCheckpoint],
        restore: Callable[[TaskKey, Any], None],
        *,
        allow_non_restored_state: bool = False,
    ) -> CompletedCheckpoint:
        """Hand the states of the savepoint at ``path``, as ``load`` reads it, to ``restore``; returns it.

        The id counter is set above the savepoint's. An operator of the program that the savepoint does not have begins empty.
        One that only the savepoint has is refused with ``SavepointMismatchError``, before anything is restored, unless
        ``allow_non_restored_state``. Other partition counts always are: a state belongs to one partition of a layout.
        Raises ``CheckpointCoordinatorShutdownError`` after shutdown, and what ``load`` raises.
        """
        self._check_not_shut_down()
        savepoint = load(path)
        gone, changed = self._differences(savepoint)
        if changed or (gone and not allow_non_restored_state):
            remedy = (
                "Restore it into a new checkpoint location with the number of partitions that is wanted"
                if changed
                else "Declare these operators again, or pass allow_non_restored_state=True to leave their state behind"
            )
            raise SavepointMismatchError(
                f"The savepoint {path} does not fit {self.job_id}: {'; '.join((*changed, *gone))}. {remedy}."
            )
        for difference in gone:
            LOG.warning("Restoring %s: %s; its state is left behind", path, difference)
        with self._lock:
            # Another thread may have shut it down while the savepoint was read.
            if self._shutdown:
                raise self._shut_down_error()
            self.id_counter.ensure_above(savepoint.id)
        for task, state in savepoint.states.items():
            if task in self._tasks.index:
                restore(task, state)
        self._restore_path = path
        self.stats.on_restored(savepoint)
        return savepoint

    def get_savepoint_restore_path(self) -> str | None:
        """The savepoint that was restored last, None if none was."""
        return self._restore_path

    def _differences(self, savepoint: CompletedCheckpoint) -> tuple[list[str], list[str]]:
        gone, changed = [], []
        for operator, partitions in sorted(savepoint.operators().items()):
            own = self._tasks.parallelism.get(operator)
            if own is None:
                gone.append(f"the operator {operator!r} ({partitions} partitions) is in the savepoint only")
            elif own != partitions:
                changed.append(
                    f"the operator {operator!r} has {partitions} partitions in the savepoint and {own} in the program"
                )
        return gone, changed

    # ---- what the base class calls

    def on_fully_acknowledged_checkpoint(self, completed: CompletedCheckpoint) -> None:
        """Store the savepoint, unless its future was cancelled."""
        with self._futures_lock:
            future = self._futures.pop(completed.id, None)
            if future is not None and future.set_running_or_notify_cancel():
                self._storing[completed.id] = future
            if completed.id not in self._storing:
                raise SavepointFailedError(f"Savepoint {completed.id} of {self.job_id} was cancelled by its requester.")
        super().on_fully_acknowledged_checkpoint(completed)
        path = self._write(completed)
        with self._futures_lock:
            self._paths[completed.id] = path

    def _completed(self, completed: CompletedCheckpoint) -> None:
        with self._futures_lock:
            future, path = self._storing.pop(completed.id), self._paths.pop(completed.id)
        future.set_result(path)

    def _keeps_failed(self) -> bool:
        return False

    def _cancelled(self, pending: PendingCheckpoint, reason: CancelReason, why: str, error: Exception | None) -> None:
        failure = _ERRORS.get(reason, SavepointFailedError)(
            f"Savepoint {pending.id} of {self.job_id} was not made: {why}."
        )
        failure.__cause__ = error
        try:
            super()._cancelled(pending, reason, why, error)
        finally:
            self._fail(pending.id, failure)

    def _on_running(self) -> None:
        """Savepoints are made on demand only: a job that begins to run ends none (as in Flink)."""

    def _fail(self, checkpoint_id: int, error: Exception) -> None:
        with self._futures_lock:
            future = self._storing.pop(checkpoint_id, None)
            self._paths.pop(checkpoint_id, None)
            if future is None:
                future = self._futures.pop(checkpoint_id, None)
                if future is None or not future.set_running_or_notify_cancel():
                    return
        future.set_exception(error)

    def _on_done(self, checkpoint_id: int, future: Future[str]) -> None:
        if future.cancelled():
            self.cancel_checkpoint(checkpoint_id, "cancelled by its requester")
