"""Checks in Spark's own log whether a prepared version is completed, so that no reader is behind Spark.

After a commit, the driver notifies the coordinator, and the coordinator notifies the hosts. A message may be late or
lost. So a read looks for the file ``commits/N``. Spark has written it when ``awaitTermination`` or
``processAllAvailable`` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from backends.exceptions import StateStoreError
from backends.host_memory import BoundedDict
from backends.storage.checkpoint_storage import OpenStorage
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import CoordinatorError, HostUnavailableError, RetiredRunError, UnknownRunError
from coordinator_actor.messages import QueryRegistration
from spark_bridge.host.partition_cache import PartitionCache
from spark_bridge.host.registration import GRANT_SECONDS, CompletedVersion, CompletedVersions, HostRegistration

PREPARED_LOOK_SECONDS = 0.002
"""The least seconds between two looks for one version, however many readers wait for the next one."""
HANGS_SECONDS = 0.5
"""A reader waits at most this many seconds for a look of another reader: waiting readers block those of other runs."""
QUICK_SECONDS = 0.001
"""A look that took less was of storage that does not hang now, such as a local disk: readers then look themselves."""
MAX_OWN_LOOKS = 4
"""At most this many readers of a host look themselves at once, so that storage that hangs holds no more of them."""
MAX_RUNS = 1000


@dataclass(eq=False)
class _Prepared:
    """The last version that tasks of a run have prepared here, until it is known to be completed.

    ``changed`` guards all fields but ``commits`` and ``is_quick``, which are only replaced. ``begun`` is when the last
    look began, ``answered`` when the last look without an error began, both by ``time.monotonic``. ``failure`` is the
    error of the look that began at ``begun``. The first thread that looks opens ``commits``, also for later versions.
    ``is_quick`` says whether the last look took less than ``QUICK_SECONDS``.
    """

    registration: QueryRegistration
    version: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_looking: bool = False
    begun: float = float("-inf")
    answered: float = float("-inf")
    failure: Exception | None = None
    commits: SparkCommits | None = None
    is_quick: bool = False


def _spark_directory(prepared: _Prepared) -> tuple[str, object]:
    return prepared.registration.checkpoint_location, prepared.registration.storage_options


@dataclass(eq=False, repr=False)
class PreparedVersions:
    """Determines whether prepared versions are completed. Thread-safe.

    If neither storage nor the coordinator answers, reads of that run fail; other runs are not affected. The table is
    read without a lock, and changed under ``_noting``. A look takes one request to storage and, once per version, one
    message to the coordinator. Unless storage is quick, one thread looks for all readers of a run, who wait without a
    lock. ``gives`` returns whether another host may own partitions of a run by now.
    """

    _registration: HostRegistration
    _cache: PartitionCache
    _completed: CompletedVersions
    _open_storage: OpenStorage
    _gives: Callable[[str], bool]

    def __post_init__(self) -> None:
        self._prepared: BoundedDict[str, _Prepared] = BoundedDict(MAX_RUNS)
        self._taken_under: BoundedDict[str, int] = BoundedDict(MAX_RUNS)
        self._noting = threading.Lock()
        self._own_looks = threading.Semaphore(MAX_OWN_LOOKS)
        self._cache.on_run_ended(self._forget)

    def accepted(self, registration: QueryRegistration, version: int, under: int | None = None) -> None:
        """Record that the coordinator has accepted changes for a version.

        ``under`` is the number of the host's last report of the run before it sent its own changes.
        """
        with self._noting:
            if under is not None:
                self._taken_under[registration.run_id] = under
            prepared = self._prepared.get(registration.run_id)
            if prepared is None or prepared.version < version:
                following = _Prepared(registration, version)
                if prepared is not None and _spark_directory(prepared) == _spark_directory(following):
                    following.commits, following.is_quick = prepared.commits, prepared.is_quick
                self._prepared[registration.run_id] = following

    def _doubt(self, run_id: str) -> None:
        """Treat the next version as prepared if other hosts may have made it without this host's knowledge.

        There are three cases:

        - This host has no lease. It may be cut off from the coordinator, while clients still reach it.
        - This host is handing partitions over.
        - This host has reported the run again, and has not taken part in a version since. Others may have made the next
          one.

        The answers of this host are correct until Spark commits a batch after the last one that is known here.
        """
        newest = self._completed.newest(run_id)
        registration = self._cache.registrations.get(run_id)
        if newest is None or registration is None:
            return
        if self._is_doubtful(run_id):
            self.accepted(registration, newest.version + 1)

    def _is_doubtful(self, run_id: str) -> bool:
        return not self._registration.is_leased or self._gives(run_id) or self._may_be_others(run_id)

    def _may_be_others(self, run_id: str) -> bool:
        number = self._registration.number_of(run_id)
        is_again = number > 1 and self._taken_under.get(run_id) != number
        return is_again and not self._cache.has_ended(run_id)  # an ended query makes no versions

    def is_settled(self, run_id: str) -> bool:
        """Return whether ``completed`` is known to have every version that Spark has committed; see ``_is_open``."""
        self._doubt(run_id)
        prepared = self._prepared.get(run_id)
        return prepared is None or self._completed.has(run_id, prepared.version) or self._is_open(prepared)

    def settle(self, run_id: str, seconds: float) -> None:
        """Return once ``completed`` has every version that Spark had committed when this was called.

        Raises the coordinator's error about the run, and ``HostUnavailableError`` if storage and the coordinator do not
        answer within ``seconds`` whether the version is completed. A reader that looks itself (``_is_open``) may wait
        longer if the storage begins to hang in its look.
        """
        prepared = None if self.is_settled(run_id) else self._prepared.get(run_id)
        if prepared is None:
            return
        asked, is_ours = time.monotonic(), False
        deadline = asked + seconds
        with prepared.changed:
            while not self._completed.has(run_id, prepared.version) and prepared.answered < asked:
                now = time.monotonic()
                if prepared.failure is not None and prepared.begun >= asked:
                    raise self._failed(prepared, prepared.failure)
                until = (
                    deadline if is_ours or not prepared.is_looking else min(deadline, prepared.begun + HANGS_SECONDS)
                )
                if now > until:
                    raise self._failed(prepared, TimeoutError(f"no answer within {now - prepared.begun:.1f} s"))
                pause = prepared.begun + PREPARED_LOOK_SECONDS - now
                if prepared.is_looking:
                    prepared.changed.wait(until - now)
                elif pause > 0:
                    prepared.changed.wait(min(until - now, pause))
                else:
                    is_ours = True
                    self._begin_look(prepared, now)

    def _is_open(self, prepared: _Prepared) -> bool:
        """Return whether a look by the reader itself shows that ``completed`` has all that Spark has committed.

        False says nothing. A thread's look takes several switches between threads, which is long on busy cores, and
        all readers need one between the tasks of a batch and its commit.
        """
        commits, run_id = prepared.commits, prepared.registration.run_id
        if commits is None or not prepared.is_quick or not self._completed.has(run_id, prepared.version - 1):
            return False
        if not self._own_looks.acquire(blocking=False):
            return False
        begun = time.monotonic()
        try:
            # In this order: Spark removes old records, and this process may have stood still before the look.
            return not commits.has(prepared.version - 1) and not self._is_doubtful(run_id)
        except (StateStoreError, OSError):
            return False  # the look of a thread raises it, or waits for the storage
        finally:
            prepared.is_quick = time.monotonic() - begun < QUICK_SECONDS
            self._own_looks.release()

    def _begin_look(self, prepared: _Prepared, now: float) -> None:
        # In a separate thread: storage may hang for longer than this reader waits.
        threading.Thread(target=self._look, args=(prepared,), name="statestore-commit-look", daemon=True).start()
        prepared.is_looking, prepared.begun, prepared.failure = True, now, None

    def _look(self, prepared: _Prepared) -> None:
        failure: Exception | None = None
        try:
            self._take_commit(prepared)
        except Exception as error:  # noqa: BLE001 - those who wait raise it
            failure = error
        with prepared.changed:
            prepared.is_looking, prepared.failure = False, failure
            if failure is None:
                prepared.answered = prepared.begun
            prepared.changed.notify_all()

    def _take_commit(self, prepared: _Prepared) -> None:
        """Complete the version if Spark has committed its batch."""
        of, version = prepared.registration, prepared.version
        if self._is_being_prepared(of.run_id, version):
            return
        if prepared.commits is None:
            prepared.commits = SparkCommits(self._open_storage(of.checkpoint_location, of.storage_options))
        commits, begun = prepared.commits, time.monotonic()
        is_committed = commits.has(version - 1)
        prepared.is_quick = time.monotonic() - begun < QUICK_SECONDS
        if not is_committed and not (self._is_doubtful(of.run_id) and _is_past(commits, version - 1)):
            # Without the version before, this host has missed the message about its commit.
            if self._completed.has(of.run_id, version - 1) or not commits.has(version - 2):
                return
            version -= 1
        host_id = self._registration.info.host_id
        ask = partial(self._registration.coordinator.see_commit, of.run_id, version - 1, host_id)
        self._completed.note(self._registration.call(of.run_id, ask, for_reader=True))

    def _is_being_prepared(self, run_id: str, version: int) -> bool:
        """Return whether a task of the version's batch has opened a partition here, and its changes are still to come.

        If so, Spark cannot have committed the batch, and a long batch costs no requests to storage. The answer is False
        if another host may have made the changes: if this host's lease has ended, or it has reported the run again
        since, or if it has loaded the partition within the batch, because the task here may then be a duplicate.
        """
        with self._cache.lock:
            return any(
                i.invocations_of == version - 1
                and i.loaded_at != version - 1
                and version not in i.acknowledged
                and i.state.version < version
                and self._registration.is_surely_known_since(run_id, i.opened_at - GRANT_SECONDS)
                for i in self._cache.of_run(run_id)
            )

    def _failed(self, prepared: _Prepared, failure: Exception) -> Exception:
        if isinstance(failure, CoordinatorError):
            return type(failure)(*failure.args)  # a new error for every thread
        of = prepared.registration
        return HostUnavailableError(
            f"Host {self._registration.info.host_id} could not find out whether Spark has committed batch "
            f"{prepared.version - 1} of query {of.name or 'unnamed'} (run {of.run_id}) in {of.checkpoint_location}: "
            f"{failure}. Ask again."
        )

    def _forget(self, run_id: str | None) -> None:
        with self._noting:
            for table in (self._prepared, self._taken_under):
                if run_id is None:
                    table.clear()
                else:
                    table.pop(run_id, None)


# Asking the coordinator for a run's completed version: one question for all threads that wait (request coalescing).


ASK_SECONDS = 0.02
"""The least seconds between two questions for the completed version, however many readers wait for it."""
UNKNOWN_RUN_SECONDS = 0.5
"""TTL of a cached answer that a run does not exist, in seconds: a client may name any run, and each question to the
coordinator costs.
"""
IDLE_RUN_SECONDS = 60.0
"""TTL of the coordinator's last answer about a run that this host has no partitions of, in seconds."""
MAX_ASKED = 1000
"""The host remembers its questions about at most this many runs."""


@dataclass
class _Asking:
    """The questions for one run. The thread that holds ``lock`` asks for all that wait.

    ``at`` is when the last question was asked, ``answered`` when the last question that has been answered was asked;
    both are times of ``time.monotonic``. ``refusal``: the coordinator answered that the run does not exist.
    ``has_ended``: it answered that the query has ended, and that its last version stays readable.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    answered: float = float("-inf")
    refusal: UnknownRunError | RetiredRunError | None = None
    has_ended: bool = False

    def raise_refusal(self) -> None:
        refusal = self.refusal
        if refusal is not None and time.monotonic() - self.at < UNKNOWN_RUN_SECONDS:
            raise type(refusal)(*refusal.args)  # a new error for every thread


_NEVER_ASKED = _Asking()


class VersionRequests:
    """Asks the coordinator for completed versions. Thread-safe.

    ``_lock`` guards only the table of runs. The lock of a run is held while the coordinator is asked.
    """

    def __init__(self, registration: HostRegistration, cache: PartitionCache, completed: CompletedVersions) -> None:
        self._registration = registration
        self._cache = cache
        self._completed = completed
        self._lock = threading.Lock()
        self._asking: BoundedDict[str, _Asking] = BoundedDict(MAX_ASKED)

    def completed_version(self, run_id: str, at_least: int, seconds: float) -> CompletedVersion | None:
        """Return the last completed version of a run that this host knows of; ask first if that is below ``at_least``.

        Asks again until ``seconds`` are over, and then returns the known version, or None. Raises the errors of the
        coordinator, as ``RetiredRunError`` if the run is over.
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
                if run_id not in self._cache.registrations:
                    asking.raise_refusal()
                # Another thread may have asked since.
                pause = asking.at + ASK_SECONDS - time.monotonic()
                newest = self._completed.wait(run_id, at_least, min(left, pause))
                if newest is None or newest.version < at_least:
                    self._ask(run_id, asking)
            except (UnknownRunError, RetiredRunError) as error:
                asking.refusal = type(error)(*error.args)
                if run_id not in self._cache.registrations:  # else the heartbeat reports that the run is over
                    self._completed.forget(run_id)
                    self._cache.end_run(run_id)
                raise
            finally:
                asking.lock.release()

    def _ask(self, run_id: str, asking: _Asking) -> None:
        registration = self._registration
        asking.at, asking.refusal = time.monotonic(), None
        ask = partial(registration.coordinator.completed, run_id, registration.info.host_id)
        answer = registration.call(run_id, ask, for_reader=True)
        self._completed.note(answer)
        asking.has_ended, asking.answered = answer.ended, asking.at

    def has_ended(self, run_id: str) -> bool:
        """Return whether the coordinator has answered the last question for a run that its query has ended."""
        return self._asking.get(run_id, _NEVER_ASKED).has_ended

    def has_asked_since(self, run_id: str, moment: float) -> bool:
        """Return whether a question for a run was asked since ``moment`` (of ``time.monotonic``), and was answered."""
        return self._asking.get(run_id, _NEVER_ASKED).answered >= moment

    def forget_idle_runs(self) -> None:
        """Forget the versions of runs that this host has no part of, after ``IDLE_RUN_SECONDS`` without a reader.

        This host gets no message when such a run is over. The next reader asks the coordinator again.
        """
        until = time.monotonic() - IDLE_RUN_SECONDS
        for run_id in self._completed.runs():
            if run_id not in self._cache.registrations and self._asking.get(run_id, _NEVER_ASKED).at <= until:
                self._completed.forget(run_id)

    def forget(self, run_id: str) -> None:
        with self._lock:
            self._asking.pop(run_id, None)


def _is_past(commits: SparkCommits, batch_id: int) -> bool:
    """Return whether Spark has committed a later batch.

    Spark removes old records, so the record of ``batch_id`` itself may be gone when a host has been cut off for long.
    """
    last = commits.last_committed()
    return last is not None and last > batch_id
