"""Copies from storage of partitions at retained versions that a host no longer has in memory."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from backends.exceptions import LoadEndedError, VersionNotFoundError
from backends.host_memory import BoundedDict
from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from coordinator_actor.reading.stored_versions import Piece
from spark_bridge.exceptions import HostUnavailableError, NotOwnerError, StateVersionError, TooManyRequestsError
from spark_bridge.host.held_partitions import Instance, RunKey
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol import before_slow_work
from spark_bridge.queryable.reads.operator_plan import OperatorPlan

MAX_VERSIONS = 4
"""Versions of operators that are held at most, each with the partitions that were asked for."""
COPY_IDLE_SECONDS = 60.0
COPY_LOADS_AT_ONCE = 2
"""Loading takes disk and network, which reads and commits need as well."""
VersionCopyKey = tuple[str, str, int]
"""Run id, operator, version."""


@dataclass(eq=False)
class _Copies:
    """The partitions of one operator at one version.

    ``users`` is the number of readers and loads; ``used`` is when the last one began or ended. ``dropped``: the copies
    are destroyed when the last user ends.
    """

    users: int = 0
    used: float = 0.0
    dropped: bool = False
    partitions: dict[int, Future[PartitionState]] = field(default_factory=dict)

    def destroy(self) -> None:
        for loaded in self.partitions.values():
            if loaded.done() and loaded.exception() is None:
                loaded.result().destroy()


class VersionCopies:
    """Holds copies for their readers. Thread-safe; the lock guards the copies and their numbers of users.

    A reader waits only for the loading of the partitions that it reads itself, and for ``wait_seconds`` at most. A load
    then continues, for later readers. ``COPY_LOADS_AT_ONCE`` loads run in parallel, and end when their run does.
    """

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic, *, wait_seconds: float) -> None:
        self._host = host
        self._wait = wait_seconds
        self._clock = clock
        # An RLock: garbage collection may release an abandoned stream at any allocation, also in a thread that has the
        # lock.
        self._lock = threading.RLock()
        self._loads = ThreadPoolExecutor(COPY_LOADS_AT_ONCE, thread_name_prefix="statestore-copy")
        self._held: dict[VersionCopyKey, _Copies] = {}
        host.held.on_run_ended(self.drop)
        host.held.on_files_exchanged(self.drop)
        host.maintenance.on_maintenance(self.release_idle)

    @contextmanager
    def at(
        self, registration: QueryRegistration, spec: OperatorSpec, partition: int, version: int
    ) -> Iterator[PartitionState]:
        """Yield a copy of a partition for a ``with``; the copy stays at that version until the ``with`` ends.

        Raises ``StateVersionError`` if the version is not retained, ``TooManyRequestsError`` if as many other versions
        as possible are in use, ``HostUnavailableError`` if the copy is not loaded yet, and what loading raises.
        """
        key = (registration.run_id, spec.name, version)
        self.release_idle()
        if not self._is_loaded(key, partition):
            before_slow_work()
        with self._lock:
            copies = self._reserved(key)
            copies.users += 1
            loaded = copies.partitions.get(partition)
            if loaded is None:
                loaded = copies.partitions[partition] = Future()
                copies.users += 1
                self._loads.submit(self._load, loaded, copies, registration, spec, partition, version)
        try:
            if not wait([loaded], self._wait).done:
                progress = self._host.copy_loading.progress((registration.run_id, spec.name, partition, version))
                raise HostUnavailableError(
                    f"Version {version} of partition {partition} of operator {spec.name!r} (run "
                    f"{registration.run_id}) is being loaded from storage, which takes longer: {progress}. Ask again "
                    "in a moment."
                )
            yield loaded.result()
        finally:
            self._release(copies)

    def _is_loaded(self, key: VersionCopyKey, partition: int) -> bool:
        with self._lock:
            held = self._held.get(key)
            loaded = None if held is None else held.partitions.get(partition)
        return loaded is not None and loaded.done()

    def _reserved(self, key: VersionCopyKey) -> _Copies:
        held = self._held.get(key)
        if held is not None:
            return held
        if len(self._held) >= MAX_VERSIONS:
            idle = [k for k, c in self._held.items() if not c.users]
            if not idle:
                raise TooManyRequestsError(
                    f"This host reads {MAX_VERSIONS} older versions from storage already: "
                    f"{', '.join(f'{v} of {o!r}' for _, o, v in self._held)}. Try again later, or ask for a newer "
                    "version."
                )
            self._held.pop(min(idle, key=lambda k: self._held[k].used)).destroy()
        made = self._held[key] = _Copies(used=self._clock())
        return made

    def _release(self, copies: _Copies) -> None:
        with self._lock:
            copies.users -= 1
            copies.used = self._clock()
            is_over = copies.dropped and not copies.users
        if is_over:
            copies.destroy()

    def _load(
        self,
        loaded: Future[PartitionState],
        copies: _Copies,
        registration: QueryRegistration,
        spec: OperatorSpec,
        partition: int,
        version: int,
    ) -> None:
        try:
            loaded.set_result(self._filled(copies, registration, spec, partition, version))
        except BaseException as error:  # noqa: BLE001 - the waiting readers raise it
            with self._lock:
                del copies.partitions[partition]  # the next reader tries again
            loaded.set_exception(error)
        finally:
            self._release(copies)

    def _filled(
        self, copies: _Copies, registration: QueryRegistration, spec: OperatorSpec, partition: int, version: int
    ) -> PartitionState:
        below = self._host.files.copies
        try:
            return self._host.copy_loading.load(
                registration, spec, partition, version, below, is_abandoned=lambda: copies.dropped
            )
        except VersionNotFoundError as error:
            raise StateVersionError(str(error)) from error
        except LoadEndedError as error:
            raise HostUnavailableError(f"{error} Ask again.") from error

    def release_idle(self) -> None:
        """Destroy copies that were not used for a while."""
        until = self._clock() - COPY_IDLE_SECONDS
        with self._lock:
            idle = [key for key, c in self._held.items() if not c.users and c.used <= until]
            gone = [self._held.pop(key) for key in idle]
        for copies in gone:
            copies.destroy()

    def drop(self, run_id: str | None) -> None:
        """Destroy the copies of a run (None: of all runs), those in use as soon as they are no longer read."""
        with self._lock:
            keys = [key for key in self._held if run_id in (None, key[0])]
            gone = [self._held.pop(key) for key in keys]
            for copies in gone:
                copies.dropped = True
            idle = [copies for copies in gone if not copies.users]
        for copies in idle:
            copies.destroy()


# Loads that requests wait for briefly: a load continues without its requests, for later ones.
#
# A request occupies a slot of the host's admission limiters while it is processed. If requests that wait for one
# partition held all slots, no request would be answered from the partitions that are loaded.


T = TypeVar("T")

LOADS_AT_ONCE = 8
"""Loads that run in parallel; further loads wait for them."""
MAX_WAITING_REQUESTS = 16
"""Concurrent waiting requests, fewer than the limiters admit; further requests are refused at once, and must be
retried.
"""


class BackgroundLoads:
    """Runs loads in separate threads.

    Thread-safe; the lock guards the running loads. No request waits longer than ``wait_seconds``.
    """

    def __init__(
        self, wait_seconds: float, *, at_once: int = LOADS_AT_ONCE, max_waiting: int = MAX_WAITING_REQUESTS
    ) -> None:
        self.wait_seconds = wait_seconds
        self._pool = ThreadPoolExecutor(at_once, thread_name_prefix="statestore-read-load")
        self._waiting = threading.Semaphore(max_waiting)
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[Any]] = {}

    def result(self, key: Hashable, load: Callable[[], T], what: str) -> T:
        """Return the result of ``load``, or raise its error.

        ``load`` runs once, in another thread, for all requests for ``key``. Raises ``HostUnavailableError``, with
        ``what`` in its message, if the load takes longer; the load then continues.
        """
        with self.waiting(what):
            with self._lock:
                running: Future[T] | None = self._running.get(key)
                if running is None:
                    running = self._running[key] = self._pool.submit(self._run, key, load)
            if not wait([running], self.wait_seconds).done:
                raise self.unavailable(what)
            return running.result()

    def _run(self, key: Hashable, load: Callable[[], T]) -> T:
        try:
            return load()
        finally:
            with self._lock:
                del self._running[key]

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count as a waiting request within a ``with``. Raises ``HostUnavailableError`` if too many requests wait."""
        if not self._waiting.acquire(blocking=False):
            raise self.unavailable(what)
        try:
            yield
        finally:
            self._waiting.release()

    def unavailable(self, what: str) -> HostUnavailableError:
        """Return the error for a request that has waited, or may not wait."""
        return HostUnavailableError(f"{what} is being loaded, which takes longer; ask again in a moment.")


# Loading of partitions that requests read, in the background; partitions of other hosts are refused for a moment.


REFUSED_SECONDS = 0.1
"""TTL of a cached answer that another host owns a partition, in seconds."""
MAX_REFUSED = 1 << 14


class PartitionLoader:
    """Loads partitions of this host. Thread-safe; the lock guards changes of the cached refusals."""

    def __init__(self, host: Host, wait_seconds: float) -> None:
        self.loads = BackgroundLoads(wait_seconds)
        self._host = host
        self._refused: BoundedDict[RunKey, tuple[float, str]] = BoundedDict(MAX_REFUSED)
        self._lock = threading.Lock()

    def held(self, plan: OperatorPlan, partition: int) -> Instance:
        """Return a partition of this host; load it if it is not loaded. Raises as ``load`` does."""
        held = self._host.held.instance(plan.run_id, plan.operator, partition)
        return self.load(plan, partition) if held is None else held

    def load(self, plan: OperatorPlan, partition: int, *, again: bool = False) -> Instance:
        """Load a partition; with ``again`` also one that is loaded, because its changes are not those that count.

        Raises ``NotOwnerError`` for another host's partition, ``HostUnavailableError`` if loading takes longer.
        """
        key = (plan.run_id, plan.operator, partition)
        until, message = self._refused.get(key, (0.0, ""))
        if time.monotonic() < until:
            raise NotOwnerError(message)
        try:
            return self.loads.result(
                (*key, again),
                lambda: self._host.reads.load(*key, again=again),
                _name(plan.run_id, plan.operator, partition),
            )
        except NotOwnerError as error:
            with self._lock:
                self._refused[key] = (time.monotonic() + REFUSED_SECONDS, str(error))
            raise

    def wait_loaded(self, instance: Instance, seconds: float) -> None:
        """Wait a moment if another version is being loaded; a read itself would wait as long as the loading takes.

        Raises ``HostUnavailableError`` if the partition is not loaded after ``seconds``.
        """
        instance.is_read = True
        state = instance.state
        if state.is_loading:
            what = _name(*instance.run_key)
            with self.loads.waiting(what):
                if not state.wait_loaded(seconds):
                    raise self.loads.unavailable(what)


def _name(run_id: str, operator: str, partition: int) -> str:
    return f"Partition {partition} of operator {operator!r} (run {run_id})"


# Copies of partitions that follow a query: loaded from storage once, then brought from version to version.


MAX_IDLE_FOLLOWERS = 16
"""The most copies that are kept without a reader."""
FOLLOWER_IDLE_SECONDS = 60.0
FollowerKey = tuple[str, str, str]
"""Run id, directory, backend."""


@dataclass(eq=False)
class Follower:
    """A copy of a partition that advances from version to version; for one reader at a time."""

    state: PartitionState
    used_at: float


class FollowerCopies:
    """The copies without a reader. Thread-safe; the lock guards them.

    ``is_active(run id)`` returns whether changes of a run may still be read; copies of other runs are not kept.
    """

    def __init__(self, host: Host, clock: Callable[[], float], is_active: Callable[[str], bool]) -> None:
        self._host = host
        self._clock = clock
        self._is_active = is_active
        # An RLock: garbage collection may release an abandoned stream at any allocation, also in a thread that has the
        # lock.
        self._lock = threading.RLock()
        self._idle: dict[FollowerKey, list[Follower]] = {}

    def take(self, plan: OperatorPlan, piece: Piece, version: int) -> Follower:
        """Return a copy at ``version`` or before, or a new one. The caller has exclusive use until ``give_back``."""
        self.release_idle()
        with self._lock:
            idle = self._idle.get(_key(plan, piece), [])
            fitting = [f for f in idle if f.state.version <= version]
            if fitting:
                chosen = max(fitting, key=lambda f: f.state.version)
                idle.remove(chosen)
                return chosen
        local = self._host.files.copies / uuid.uuid4().hex
        state = self._host.files.open_copy(plan.registration, piece.directory, piece.backend, local)
        return Follower(state, self._clock())

    def give_back(self, plan: OperatorPlan, piece: Piece, follower: Follower) -> None:
        """Keep a copy for the next reader; destroy it if its run is over."""
        follower.used_at = self._clock()
        with self._lock:
            is_active = self._is_active(plan.run_id)
            if is_active:
                self._idle.setdefault(_key(plan, piece), []).append(follower)
        if not is_active:
            follower.state.destroy()
        self.release_idle()

    def release_idle(self) -> None:
        """Destroy copies that were not used for a while, and the oldest ones if there are too many."""
        until = self._clock() - FOLLOWER_IDLE_SECONDS
        with self._lock:
            idle = [(f, key) for key, followers in list(self._idle.items()) for f in followers]
            idle.sort(key=lambda one: one[0].used_at)
            surplus = len(idle) - MAX_IDLE_FOLLOWERS
            gone = [one for i, one in enumerate(idle) if one[0].used_at <= until or i < surplus]
            for follower, key in gone:
                self._idle[key].remove(follower)
        for follower, _ in gone:
            follower.state.destroy()

    def drop(self, run_id: str | None) -> None:
        """Destroy the copies of a run (None: of all runs)."""
        with self._lock:
            gone = [key for key in self._idle if run_id in (None, key[0])]
            followers = [f for key in gone for f in self._idle.pop(key)]
        for follower in followers:
            follower.state.destroy()


def _key(plan: OperatorPlan, piece: Piece) -> FollowerKey:
    return (plan.run_id, piece.directory, piece.backend)
