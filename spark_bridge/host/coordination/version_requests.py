"""Asking the coordinator for a run's completed version: one question for all threads that wait (request coalescing)."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from backends.bounded_dict import BoundedDict
from coordinator_actor.exceptions import RetiredRunError, UnknownRunError
from spark_bridge.host.coordination.completed_versions import CompletedVersion, CompletedVersions
from spark_bridge.host.coordination.registration import HostRegistration
from spark_bridge.host.held.held_partitions import HeldPartitions

ASK_SECONDS = 0.02
"""The completed version is asked for at most once in this many seconds, however many readers wait for it."""
UNKNOWN_RUN_SECONDS = 0.5
"""A host believes for this many seconds that there is no such run: any client may name any run, and each question
costs.
"""
IDLE_RUN_SECONDS = 60.0
"""A host without partitions of a run remembers for this many seconds what the coordinator said of the run last."""
MOST_ASKED = 1000
"""The host knows of at most this many runs when it has asked for them."""


@dataclass
class _Asking:
    """The questions for one run. The thread that holds ``lock`` asks for all that wait.

    ``at`` is when the last question was asked, ``answered`` when the last question that has been answered was asked;
    both are times of ``time.monotonic``. ``refusal``: the coordinator said that there is no such run. ``has_ended``:
    the coordinator said that the query has ended, and that the last version is read on.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    answered: float = float("-inf")
    refusal: UnknownRunError | RetiredRunError | None = None
    has_ended: bool = False

    def raise_refusal(self) -> None:
        """Raise what the coordinator has said just now."""
        refusal = self.refusal
        if refusal is not None and time.monotonic() - self.at < UNKNOWN_RUN_SECONDS:
            raise type(refusal)(*refusal.args)  # an error of its own for every thread


class VersionRequests:
    """Thread-safe.

    ``_lock`` guards the table of runs alone; the lock of a run is held while the coordinator is asked.
    """

    def __init__(self, registration: HostRegistration, held: HeldPartitions, completed: CompletedVersions) -> None:
        self._registration = registration
        self._held = held
        self._completed = completed
        self._lock = threading.Lock()
        self._asking: BoundedDict[str, _Asking] = BoundedDict(MOST_ASKED)

    def completed_version(self, run_id: str, at_least: int, seconds: float) -> CompletedVersion | None:
        """Return the last completed version of a run that this host knows of; ask first if that is below ``at_least``.

        Asks again until ``seconds`` are over, and then returns what is known, None if nothing is. Raises what the
        coordinator raises, as ``RetiredRunError`` if the run is over.
        """
        newest = self._completed.newest(run_id)
        if newest is not None and newest.version >= at_least:
            return newest
        deadline = time.monotonic() + seconds
        with self._lock:
            asking = self._asking.setdefault(run_id, _Asking())
        while True:
            newest = self._completed.newest(run_id)
            left = deadline - time.monotonic()
            if (newest is not None and newest.version >= at_least) or left <= 0:
                return newest
            if not asking.lock.acquire(timeout=left):
                continue
            try:
                if run_id not in self._held.registrations:
                    asking.raise_refusal()
                # Another thread may have asked meanwhile.
                pause = asking.at + ASK_SECONDS - time.monotonic()
                newest = self._completed.wait(run_id, at_least, min(left, pause))
                if newest is None or newest.version < at_least:
                    self._ask(run_id, asking)
            except (UnknownRunError, RetiredRunError) as error:
                asking.refusal = type(error)(*error.args)
                if run_id not in self._held.registrations:  # else the heartbeat says that the run is over
                    self._completed.forget(run_id)
                    self._held.tell_ended(run_id)
                raise
            finally:
                asking.lock.release()

    def _ask(self, run_id: str, asking: _Asking) -> None:
        registration = self._registration
        asking.at, asking.refusal = time.monotonic(), None
        answer = registration.call_about(
            run_id, lambda: registration.coordinator.completed(run_id, registration.info.host_id)
        )
        self._completed.note(answer)
        asking.has_ended, asking.answered = answer.ended, asking.at

    def has_ended(self, run_id: str) -> bool:
        """Return whether the coordinator has answered the last question for a run that its query has ended."""
        asking = self._asking.get(run_id)
        return asking is not None and asking.has_ended

    def has_asked_since(self, run_id: str, moment: float) -> bool:
        """Return whether a question for a run was asked since ``moment`` (of ``time.monotonic``), and was answered."""
        asking = self._asking.get(run_id)
        return asking is not None and asking.answered >= moment

    def forget_idle_runs(self) -> None:
        """Forget the versions of runs that this host has no part of, when nobody has asked for ``IDLE_RUN_SECONDS``.

        Nobody tells this host that such a run is over. The next reader has the coordinator asked again.
        """
        until = time.monotonic() - IDLE_RUN_SECONDS
        for run_id in self._completed.runs():
            asking = self._asking.get(run_id)
            if run_id not in self._held.registrations and (asking is None or asking.at <= until):
                self._completed.forget(run_id)

    def forget(self, run_id: str) -> None:
        """Forget a run that is over."""
        with self._lock:
            self._asking.pop(run_id, None)
