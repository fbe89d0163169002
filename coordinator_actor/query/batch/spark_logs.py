"""Reads of Spark's commit log and offset log: each is made once, beside the messages that need it, without a lock.

A batch waits for two writes, its changes and its manifest. Before them its first task needs two facts: the batch before
is committed, and the times of its own batch. The driver reports a committed batch while Spark plans the next one, so
that the first fact is known when the tasks come. Callers that need the same answer at the same time share one request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from backends.tracing.spans import Pool
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.messages import BatchTimes

T = TypeVar("T")


class _SingleFlight(Generic[T]):
    """One request for all threads that ask for the same batch, and its answer until one asks for another batch."""

    def __init__(self, ask: Callable[[int], T]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._batch: int | None = None
        self._answer: Future[T] = Future()

    def at(self, batch_id: int) -> T:
        """Return the answer for a batch. A false answer and an error are not kept: the next caller asks again."""
        while True:
            with self._lock:
                is_ours = self._batch != batch_id
                if is_ours:
                    self._batch, self._answer = batch_id, Future()
                answer = self._answer
            if is_ours:
                return self._asked(batch_id, answer)
            # The thread that asked raises its error, and a no may be older than this call: then ask again.
            if answer.exception() is None and (told := answer.result()):
                return told

    def _asked(self, batch_id: int, answer: Future[T]) -> T:
        told: T | None = None
        try:
            told = self._ask(batch_id)
        except BaseException as error:
            self._forget(answer)
            answer.set_exception(
                error if isinstance(error, Exception) else RuntimeError("the thread that asked has ended")
            )
            raise
        if not told:
            self._forget(answer)
        answer.set_result(told)
        return told

    def _forget(self, answer: Future[T]) -> None:
        with self._lock:
            if self._answer is answer:
                self._batch = None


class SparkLogs:
    """Spark's ``commits/`` and ``offsets/`` as one run reads them. Many threads may share an object."""

    def __init__(self, commits: SparkCommits) -> None:
        self._committed = _SingleFlight(commits.has)
        self._times = _SingleFlight(commits.times)

    def has(self, batch_id: int) -> bool:
        """Return whether Spark has committed a batch. While a run lasts, what is committed stays so."""
        return self._committed.at(batch_id)

    def times(self, batch_id: int) -> BatchTimes:
        """Return the times of a batch that Spark has planned. Raises what ``SparkCommits.times`` raises."""
        return self._times.at(batch_id)

    def ahead(self, batch_id: int, *, is_before_open: bool, uses_time: bool) -> None:
        """Read what opening a batch needs, both at the same time: is the batch before committed, and the batch's times.

        Raises what ``has`` and ``times`` raise.
        """
        if not is_before_open:
            if uses_time:
                self.times(batch_id)
            return
        if not uses_time:
            self.has(batch_id - 1)
            return
        with Pool(1) as pool:
            times = pool.submit(self.times, batch_id)
            self.has(batch_id - 1)
            times.result()
