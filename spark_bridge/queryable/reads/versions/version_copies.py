"""Copies from storage of partitions at retained versions that a host no longer has in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from backends.exceptions import LoadEndedError, VersionNotFoundError
from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from spark_bridge.exceptions import HostUnavailableError, StateVersionError, TooManyRequestsError
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol.request_context import before_slow_work

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
    goes on then, for later readers. ``COPY_LOADS_AT_ONCE`` loads go on together, and end when their run does.
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
        """Give a copy of a partition for a ``with``; the copy stays at that version meanwhile.

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
        except BaseException as error:  # noqa: BLE001 - the readers that wait are told
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
