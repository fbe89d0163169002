"""Loads of partitions: started once for all that ask, waited for with a bound, and shown while they last.

A load continues after a call that waited for it has been answered. A task gets the progress of the load, and asks
again; a query gets ``HostUnavailableError``. While files are loaded, their lease is renewed, and the coordinator
neither removes nor exchanges them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

from backends import spans
from backends.formats.manifest import Lineage
from backends.load_watch import LoadProgress, LoadWatch
from coordinator_actor.messages import OpenGrant
from coordinator_actor.run.holds import FILES_RENEW_SECONDS
from spark_bridge.exceptions import STATESTORE_ERRORS, HostUnavailableError
from spark_bridge.host.instances import RunKey
from spark_bridge.host.registration import HostRegistration

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_READ_LOADS = 8
"""Loads for queries that run in parallel; further loads wait for them."""
MAX_COPY_LOADS = 2
"""Loading copies takes disk and network, which reads and commits need as well."""
MAX_WAITING_REQUESTS = 16
"""At most this many requests wait for loads; a host refuses further ones at once, and they must be retried.

A host admits more requests than this at a time, so that it still answers requests for loaded partitions.
"""


@dataclass(eq=False)
class Load:
    """One load that callers wait for, or one that has failed.

    ``goal`` is run, epoch, version and head of a load for tasks. ``askers`` are the callers that were asked to retry.
    If the load fails, each of them gets the error, and any other caller starts a new load. ``last_asked`` is when a
    caller last asked for the load, by the host's clock.
    """

    goal: tuple[Hashable, ...]
    last_asked: float
    result: Future[Any]
    askers: set[str] = field(default_factory=set)


class _Watched(NamedTuple):
    """A load that fetches files. ``epoch`` is that of its grant."""

    key: Hashable
    epoch: int
    watch: LoadWatch
    lease: FileLease


class Loads:
    """The loads of one host, at most one of each key. Thread-safe; ``_lock`` guards both tables.

    Each load for a task has its own thread, so that a load that hangs does not delay another query. There are at most
    as many of these threads as tasks. Loads for queries share one pool, and those of copies another one.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._loads: dict[Hashable, Load] = {}
        self._watched: dict[object, _Watched] = {}
        self.reads = ThreadPoolExecutor(MAX_READ_LOADS, thread_name_prefix="statestore-read-load")
        self.copies = ThreadPoolExecutor(MAX_COPY_LOADS, thread_name_prefix="statestore-copy")
        self._waiting = threading.Semaphore(MAX_WAITING_REQUESTS)

    # -- starting and waiting ------------------------------------------------------------------

    def start(
        self,
        key: Hashable,
        work: Callable[[Load], Any],
        pool: ThreadPoolExecutor | None,
        goal: tuple[Hashable, ...] = (),
        asker: str | None = None,
    ) -> Load:
        """Return the load of ``key`` that is under way; start it, in a thread of ``pool`` or its own, if there is none.

        If the last load has failed, and ``asker`` was asked to wait for it with the same goal, raises its error.
        """
        with self._lock:
            load = self._loads.get(key)
            if load is not None and load.result.done():
                self._raise_failure(key, load, goal, asker)
                load = None
            if load is None:
                load = self._loads[key] = Load(goal, self._clock(), Future())
                try:
                    self._begin(key, load, work, pool)
                except BaseException:  # for example, the machine allows no more threads
                    del self._loads[key]
                    raise
            load.last_asked = self._clock()
            if asker is not None:
                load.askers.add(asker)
            return load

    def _begin(self, key: Hashable, load: Load, work: Callable[[Load], Any], pool: ThreadPoolExecutor | None) -> None:
        if pool is not None:
            pool.submit(self._run, key, load, work)
        else:
            run = spans.carried(self._run)
            threading.Thread(target=run, args=(key, load, work), name="statestore-open", daemon=True).start()

    def wait_for_task(
        self, key: Hashable, goal: tuple[Hashable, ...], work: Callable[[Load], None], asker: str, seconds: float
    ) -> bool:
        """Start or join a load; return whether it has ended within ``seconds``. If not, the caller asks again.

        Raises the error of a failed load as ``start`` does.
        """
        load = self.start(key, work, None, goal, asker)
        if not wait([load.result], seconds).done:
            return False
        with self._lock:
            self._raise_failure(key, load, goal, asker)
        return True

    def _raise_failure(self, key: Hashable, load: Load, goal: tuple[Hashable, ...], asker: str | None) -> None:
        if self._loads.get(key) is load:
            del self._loads[key]
        failure = load.result.exception()
        if failure is not None and load.goal == goal and asker in load.askers:
            raise failure

    def read_result(self, key: Hashable, load: Callable[[], T], what: str, seconds: float) -> T:
        """Return the result of a load for queries, or raise its error; it runs once for all requests for ``key``.

        Raises ``HostUnavailableError``, with ``what`` in its message, if the load takes longer than ``seconds``.
        """
        with self.waiting(what):
            running = self.start(key, lambda _: load(), self.reads)
            if not wait([running.result], seconds).done:
                raise self.unavailable(what)
            result: T = running.result.result()
            return result

    def _run(self, key: Hashable, load: Load, work: Callable[[Load], Any]) -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = work(load)
        except BaseException as error:  # noqa: BLE001 - those who wait raise it
            failure = error
        with self._lock:
            if (failure is None or not load.askers) and self._loads.get(key) is load:
                del self._loads[key]
        if failure is None:
            load.result.set_result(result)
        else:
            load.result.set_exception(failure)

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
        """Return the error for a request whose load takes too long, or that may not wait because too many others do."""
        return HostUnavailableError(f"{what} is being loaded, which takes longer; ask again in a moment.")

    # -- loads that fetch files ----------------------------------------------------------------

    @contextmanager
    def watching(
        self,
        key: Hashable,
        what: str,
        lease: FileLease,
        is_abandoned: Callable[[], bool],
        epoch: int = 0,
        *,
        is_ahead: bool = False,
    ) -> Iterator[LoadWatch]:
        """Show a load of ``what``, renew its lease and let it be ended within the block.

        A load that ``is_ahead`` fetches after the others, until a task or a reader waits for it.
        """
        token = object()
        watch = LoadWatch(
            what,
            is_abandoned=is_abandoned,
            is_ahead=lambda: is_ahead and not self._is_awaited(key),
            on_step=lease.renew,
            clock=self._clock,
        )
        with self._lock:
            self._watched[token] = _Watched(key, epoch, watch, lease)
        try:
            yield watch
        finally:
            with self._lock:
                del self._watched[token]

    def _is_awaited(self, key: Hashable) -> bool:
        """Return whether a task or a reader waits for the load of ``key``; read without the lock."""
        load = self._loads.get(key)
        return load is not None and not load.result.done()

    def _under_way(self) -> list[_Watched]:
        with self._lock:
            return list(self._watched.values())

    def progress(self, key: Hashable) -> LoadProgress:
        """Return the progress of the load under way of a partition or copy; nothing if there is none."""
        return next((load.watch.progress() for load in self._under_way() if load.key == key), LoadProgress())

    def describe(self) -> list[str]:
        """Return what is being loaded, and its progress, for people."""
        return [f"{load.watch.what}: {load.watch.progress()}" for load in self._under_way()]

    def due_leases(self) -> list[tuple[str, Callable[[], None]]]:
        """Return, for each load under way whose lease is due, the run id and the function that renews the lease.

        A renewal may take long. The lease of a load that no caller waits for is not renewed: storage may block its
        thread for ever, and the files must not stay as long as that.
        """
        return [
            (load.lease.run_id, load.lease.renew)
            for load in self._under_way()
            if load.lease.is_due and load.watch.is_wanted
        ]

    def end_older(self, key: Hashable, grant: OpenGrant) -> None:
        """End the load of a partition for an older run: the run of the grant needs the partition."""
        run_id = grant.registration.run_id
        for load in self._under_way():
            if load.key == key and load.lease.run_id != run_id and load.epoch < grant.epoch:
                load.watch.end(f"run {run_id} has replaced run {load.lease.run_id}", is_over=True)

    def end_run(self, run_id: str) -> None:
        for load in self._under_way():
            if load.lease.run_id == run_id:
                load.watch.end("its run is over", is_over=True)

    def forget_failures(self, run_id: str | None) -> None:
        """Forget the loads for tasks of a run (None: of all runs) that have failed."""
        with self._lock:
            for key, load in list(self._loads.items()):
                if load.result.done() and (run_id is None or load.goal[:1] == (run_id,)):
                    del self._loads[key]


@dataclass(eq=False, repr=False)
class FileLease:
    """The lease of one load or upload, of a version of a partition of a run.

    Used by the thread that loads. The host's heartbeat has the lease renewed, too, in another thread, since one step of
    a load may take longer than the lease. At worst both send the same message.

    ``use`` tells the load from others of the same partition. A lease that is neither renewed nor ended runs out after
    ``BUSY_SECONDS``, so the death of a host leaves nothing behind. ``clock`` gives seconds.
    """

    _registration: HostRegistration
    partition: RunKey
    _version: int
    _use: str
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._renewed = self._clock()

    @property
    def run_id(self) -> str:
        return self.partition[0]

    def lineage(self) -> Lineage:
        """Begin the lease; return the files. Raises the errors of the coordinator."""
        ask = partial(self._registration.coordinator.lineage, *self.partition, self._version, self._use)
        lineage = self._registration.call(self.run_id, ask, for_reader=True)
        self._renewed = self._clock()
        return lineage

    @property
    def is_due(self) -> bool:
        """Return whether the lease was not renewed for ``FILES_RENEW_SECONDS``."""
        return self._clock() - self._renewed >= FILES_RENEW_SECONDS

    def renew(self) -> None:
        """Renew the lease if that is due: one message in ``FILES_RENEW_SECONDS``.

        A load calls this after each of its steps. A failure is only logged: the load may end before the lease runs out.
        """
        if not self.is_due:
            return
        self._renewed = self._clock()
        try:
            if not self._registration.coordinator.renew_files(*self.partition, self._use):
                self.lineage()  # a restarted coordinator does not know the load
        except STATESTORE_ERRORS as error:
            log.warning(
                "Could not report to the coordinator that version %d of %s is still being loaded; "
                "retrying in %.0f s: %s",
                self._version,
                self.partition,
                FILES_RENEW_SECONDS,
                error,
            )

    def is_held(self) -> bool:
        """Return whether the lease has lasted since ``lineage``. Renews it if that is due.

        An upload calls this before its snapshot counts: while the lease lasts, the coordinator exchanges no files; once
        it has run out, it may have exchanged them. Raises the errors of the coordinator.
        """
        if not self.is_due:
            return True
        begun = self._clock()
        is_held = self._registration.coordinator.renew_files(*self.partition, self._use)
        if is_held:
            self._renewed = begun
        return is_held

    def end(self) -> None:
        """End the lease. A failure is logged, since the lease runs out by itself."""
        try:
            self._registration.coordinator.release_files(*self.partition, self._use)
        except STATESTORE_ERRORS as error:
            log.info("Could not report to the coordinator that the load of %s is over: %s", self.partition, error)
