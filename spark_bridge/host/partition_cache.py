"""``PartitionCache``: every partition that a host has on its disk, with pins, and an eviction rule for each kind."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from backends.partition.partition_state import PartitionState
from coordinator_actor.messages import Acknowledge, HostReport, QueryRegistration
from spark_bridge.exceptions import TooManyRequestsError
from spark_bridge.host.instances import Instance, InstanceKey, PartitionFiles, RunKey, key_of

log = logging.getLogger(__name__)

KEPT_FILES_SECONDS = 600.0
COPY_IDLE_SECONDS = 60.0
MAX_VERSIONS = 4
"""At most this many versions of operators have copies for queries, each of the partitions that were asked for."""
MAX_IDLE_FOLLOWERS = 16
FOR_EVER = -1.0
"""Instead of the seconds to wait for a lock."""
NOTHING_HELD = 1 << 62
"""The version reported of a run that a host knows, but has no partition of: no version is newer."""


class Kind(Enum):
    """The kinds of copies that never become own partitions. Standby copies do: they are kept files."""

    VERSION = "version"
    FOLLOWER = "follower"
    SAVEPOINT = "savepoint"


class CopyKey(NamedTuple):
    """Identifies copies: ``of`` is operator and version, or for a follower the directory and backend of its files."""

    kind: Kind
    run_id: str
    of: tuple[str, Hashable]
    partition: int


@dataclass(eq=False)
class Copy:
    """A copy of a partition. The lock of ``PartitionCache`` guards all fields.

    ``loaded`` is the result of the load. ``pins`` counts readers, and the load under way. ``is_dropped``: the copy is
    no longer in the cache, and its load ends.
    """

    key: CopyKey
    last_used: float
    loaded: Future[PartitionState] = field(init=False)
    pins: int = 1
    is_dropped: bool = False

    @property
    def state(self) -> PartitionState | None:
        """The loaded state; None during the load, and if it has failed."""
        return self.loaded.result() if self.loaded.done() and not self.has_failed else None

    @property
    def has_failed(self) -> bool:
        return self.loaded.done() and self.loaded.exception() is not None


class Evicted(NamedTuple):
    """Accepted commits of a partition that was evicted, by version: a restarted coordinator needs them."""

    run_id: str
    acknowledged: dict[int, Acknowledge]


def close(instance: Instance) -> None:
    """Close the state of a partition once the commit under way has ended. The local files stay."""
    with instance.commit_lock:
        instance.state.close()


def destroy(instance: Instance) -> None:
    """Close the state of a partition, and remove the local files."""
    with instance.commit_lock:
        instance.state.destroy()
    log.info("Unloaded %s", instance)


class PartitionCache:
    """The partitions of a host, and the runs that it has, or has had, partitions of. Thread-safe.

    =========== ================================ ============================================================
    kind         entries                          eviction
    =========== ================================ ============================================================
    own          ``instances``: serve tasks and   another host owns the partition; its files were exchanged;
                 queries of a run                 its run is over, or has ended and no query reads it: then
                                                  the files are kept
    kept         files for the next load: laid    not used for ``KEPT_FILES_SECONDS``; the disk is full; the
                 aside, loaded in part, or        files were exchanged; the run is over, unless they are whole
                 loaded ahead of the first task;
                 standby copies, which clients
                 read and which follow
    version      copies at a retained version,    not used for ``COPY_IDLE_SECONDS``; the oldest unused one of
                 for queries                      more than ``MAX_VERSIONS``; the run is over; files exchanged
    follower     copies that advance from         not used for ``COPY_IDLE_SECONDS``; the oldest unused one of
                 version to version               more than ``MAX_IDLE_FOLLOWERS``; as for a version
    savepoint    copies for an export             as soon as the export ends
    =========== ================================ ============================================================

    A copy that is evicted while it is pinned is destroyed with its last pin. ``running_loads`` starts loads and
    waits for them, ``partition_loader`` fills the entries.

    ``lock`` guards all tables here, and ``invocations`` and ``commits`` of every ``Instance``. ``instance``,
    ``copy`` and ``registration`` read tables without it. A thread that holds ``lock`` takes no other lock but those of
    ``CompletedVersions``, ``Grants``, ``VersionRequests`` and ``Loads``. It is an RLock: garbage collection may release
    an abandoned stream, and with it a pin, at any allocation, also in a thread that has the lock.

    A partition's loading lock is held by the thread that loads or unloads the partition, or moves its kept files. Locks
    are taken in this order: the loading lock, the instance's ``commit_lock``, ``lock``.
    """

    def __init__(self, files: PartitionFiles, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = files
        self._clock = clock
        self.lock = threading.RLock()
        self.instances: dict[InstanceKey, Instance] = {}
        self.registrations: dict[str, QueryRegistration] = {}
        self._by_run: dict[RunKey, Instance] = {}
        self._kept: dict[InstanceKey, Instance] = {}
        self._evicted: dict[InstanceKey, Evicted] = {}
        self.wanted: frozenset[InstanceKey] = frozenset()
        """Kept files that the coordinator's last orders name: this host owns the partition, or is about to."""
        self.standbys: frozenset[InstanceKey] = frozenset()
        self._loading_locks: dict[InstanceKey, threading.Lock] = {}
        self._in_use: dict[object, tuple[str, set[str]]] = {}
        """By work under way: the state that is loaded or laid aside, and the runs whose directories must stay."""
        self._copies: dict[tuple[CopyKey, int], Copy] = {}
        """Numbered, because there may be several followers and exports of one partition."""
        self._number = itertools.count(1)
        self._opened: dict[str, int] = {}
        self._exchanged: dict[str, str] = {}
        self._forget_hooks: list[Callable[[str], None]] = []
        self._ended_run_hooks: list[Callable[[str | None], None]] = []

    # -- own partitions ------------------------------------------------------------------------

    def instance(self, run_id: str, operator: str, partition: int) -> Instance | None:
        return self._by_run.get((run_id, operator, partition))

    def copy(self, run_id: str, operator: str, partition: int) -> Instance | None:
        """Return ``whole_copy`` of a run by its id, for readers: a copy of another host's partition."""
        registration = self.registrations.get(run_id)
        return None if registration is None else self.whole_copy(registration, operator, partition)

    def whole_copy(self, registration: QueryRegistration, operator: str, partition: int) -> Instance | None:
        """Return the copy of a partition that a load has left whole for a run; None without one.

        It may follow, or be used otherwise, unless the partition's loading lock is held.
        """
        kept = self._kept.get(key_of(registration, operator, partition))
        is_of_run = kept is not None and kept.registration.run_id == registration.run_id
        return kept if kept is not None and is_of_run and kept.is_whole_copy else None

    def all(self) -> list[Instance]:
        with self.lock:
            return list(self.instances.values())

    def of_run(self, run_id: str, operator: str | None = None) -> list[Instance]:
        return [i for i in self.all() if i.registration.run_id == run_id and operator in (None, i.operator)]

    def has_instance(self, instance: Instance) -> bool:
        """Return whether this instance is the one that serves its partition."""
        with self.lock:
            return self.instances.get(instance.key) is instance

    def register_instance(self, instance: Instance) -> None:
        """Let a loaded partition serve."""
        with self.lock:
            self.instances[instance.key] = instance
            self._by_run[instance.run_key] = instance

    def remove_instance(self, instance: Instance) -> bool:
        """Let a partition serve no longer; return whether this instance did."""
        with self.lock:
            if self.instances.get(instance.key) is not instance:
                return False
            del self.instances[instance.key]
            self._by_run.pop(instance.run_key, None)
            return True

    def withdraw(self, instance: Instance) -> bool:
        """Let a partition serve no longer whose files are dropped to make room; return whether it did.

        Its accepted commits are kept, for the report to a coordinator that was restarted.
        """
        with self.lock:
            if not self.remove_instance(instance):
                return False
            if instance.acknowledged:
                run_id = instance.registration.run_id
                before = self._evicted.get(instance.key)
                earlier = before.acknowledged if before is not None and before.run_id == run_id else {}
                self._evicted[instance.key] = Evicted(run_id, {**earlier, **instance.acknowledged})
            return True

    def loading_lock(self, key: InstanceKey) -> threading.Lock:
        with self.lock:
            return self._loading_locks.setdefault(key, threading.Lock())

    @contextmanager
    def loading_locked(self, key: InstanceKey, seconds: float = 0.0) -> Iterator[bool]:
        """Hold a loading lock within the block, and yield True; yield False if it is taken for ``seconds`` more.

        With ``FOR_EVER`` this waits until it has the lock.
        """
        lock = self.loading_lock(key)
        is_locked = lock.acquire(timeout=seconds)
        try:
            yield is_locked
        finally:
            if is_locked:
                lock.release()

    def unload(self, instance: Instance, *, waits: bool = True) -> None:
        """Unload a partition and remove its local files, if it is the one that serves.

        ``waits``: also for a load of the partition that is under way. Otherwise nothing happens during one.
        """
        with self.loading_locked(instance.key, FOR_EVER if waits else 0.0) as is_locked:
            if is_locked and self.remove_instance(instance):
                destroy(instance)

    def lay_aside(self, instance: Instance, *, waits: bool = True) -> None:
        """Unload a partition, but keep its local files for a while: its query may be started again.

        ``waits``: see ``unload``.
        """
        with self.loading_locked(instance.key, FOR_EVER if waits else 0.0) as is_locked:
            if not is_locked:
                return
            with self.in_use(instance.registration.run_id, instance.key):
                if not self.remove_instance(instance):
                    return
                if self.kept(instance.key) is None:
                    close(instance)
                    self.keep(instance)
                else:  # a copy that is loaded for a newer run
                    destroy(instance)

    def evict(self, instance: Instance, *, if_damaged: bool = False) -> bool:
        """Unload a partition to make room, and remove its local files; return whether that was possible at once.

        It is not while the partition is loaded, or a commit to it is under way. Accepted changes are in storage: the
        next load reads them from there. ``if_damaged``: only if an error has left the partition at no version.
        """
        with self.loading_locked(instance.key) as is_locked:
            if not is_locked or not instance.commit_lock.acquire(blocking=False):
                return False
            try:
                if if_damaged and instance.state.is_whole:
                    return False
                if not self.withdraw(instance):
                    return False
                instance.state.destroy()
            finally:
                instance.commit_lock.release()
        log.info("Evicted %s %s", instance, "after an error" if if_damaged else "to make room on the local disk")
        return True

    def forget_evicted(self, run_id: str, version: int | None = None) -> None:
        """Forget the accepted commits to evicted partitions of a run up to ``version``, which is completed; or all."""
        with self.lock:
            for key, evicted in list(self._evicted.items()):
                if evicted.run_id != run_id:
                    continue
                left = {v: a for v, a in evicted.acknowledged.items() if version is not None and v > version}
                if left:
                    self._evicted[key] = Evicted(run_id, left)
                else:
                    del self._evicted[key]

    # -- kept files ----------------------------------------------------------------------------

    def kept(self, key: InstanceKey) -> Instance | None:
        """Return the partition whose files are kept, if they are."""
        with self.lock:
            return self._kept.get(key)

    def pop_kept(self, key: InstanceKey) -> Instance | None:
        """Return the partition whose files are kept, and keep them no longer. Its loading lock is held."""
        with self.lock:
            return self._kept.pop(key, None)

    def keep(self, instance: Instance) -> None:
        """Keep the files of a partition for the next load of it, or keep them longer. Its loading lock is held."""
        with self.lock:
            instance.kept_since = self._clock()
            self._kept[instance.key] = instance

    def kept_copies(self) -> list[Instance]:
        """Return the kept files that are whole, and open: the copies of partitions."""
        with self.lock:
            return [kept for kept in self._kept.values() if kept.is_whole_copy]

    def want(self, wanted: frozenset[InstanceKey], standbys: frozenset[InstanceKey]) -> None:
        """Note what the coordinator's orders name: these files are kept, and go last if the disk is full."""
        now = self._clock()
        with self.lock:
            self.wanted, self.standbys = wanted, standbys
            for key in (wanted | standbys) & self._kept.keys():
                self._kept[key].kept_since = now

    def drop_least_wanted(self) -> Instance | None:
        """Remove the kept files of one partition, and return it; None if there are only files that are wanted soon.

        Files that no order names go first, and then the standby copy that was read least recently.
        """
        with self.lock:
            unwanted = [kept for key, kept in self._kept.items() if key not in self.wanted]
        for one in sorted(unwanted, key=lambda kept: (kept.key in self.standbys, kept.last_use)):
            if self.drop_kept(lambda kept, one=one: kept is one):  # type: ignore[misc]
                return one
        return None

    def drop_unused(self) -> None:
        """Remove the kept files and the copies that were not used for long."""
        now = self._clock()
        self.drop_kept(lambda kept: now - kept.kept_since > KEPT_FILES_SECONDS)
        self.evict_copies()

    def drop_kept(self, is_meant: Callable[[Instance], bool]) -> int:
        """Remove the selected files that are kept and that no load is using; return the number of partitions."""
        with self.lock:
            selected = [i for i in self._kept.values() if is_meant(i)]
        dropped = 0
        for instance in selected:
            with self.loading_locked(instance.key) as is_locked:
                if is_locked and self.kept(instance.key) is instance:
                    self.pop_kept(instance.key)
                    destroy(instance)
                    dropped += 1
        for run_id in {i.registration.run_id for i in selected}:
            self._remove_unused(run_id)
        return dropped

    def runs_in_use(self) -> set[str]:
        """Return the runs whose local directories have files that serve, are kept, or are loaded or laid aside now."""
        with self.lock:
            run_ids = {i.registration.run_id for i in (*self.instances.values(), *self._kept.values())}
            return run_ids.union(*(runs for _, runs in self._in_use.values()))

    @contextmanager
    def in_use(self, run_id: str, key: InstanceKey) -> Iterator[None]:
        """Keep the run's local directory while a partition, which then serves not, is loaded or laid aside.

        The directory of the run before stays, too: the load may continue with its files. The partition's loading lock
        is held.
        """
        token = object()
        with self.lock:
            present = (self.instances.get(key), self._kept.get(key))
            before = {i.registration.run_id for i in present if i is not None} - {run_id}
            self._in_use[token] = key[0], {run_id, *before}
        try:
            yield
        finally:
            with self.lock:
                del self._in_use[token]
            for of_run in before:
                self._remove_unused(of_run)

    def _remove_unused(self, run_id: str) -> None:
        """Remove the directory of a run that is over, once nothing there serves, is kept or in use."""
        if run_id not in self.registrations and run_id not in self.runs_in_use():
            self._files.remove_run(run_id)

    # -- copies --------------------------------------------------------------------------------

    def pin_version(self, key: CopyKey, start_load: Callable[[Copy], Future[PartitionState]]) -> Copy:
        """Pin the one copy of a version until ``unpin``; if there is none, start its load.

        The load has a separate pin. Raises ``TooManyRequestsError`` if copies of ``MAX_VERSIONS`` others are in use.
        """
        if (key, 0) not in self._copies:
            self.evict_copies()
        evicted: list[Copy] = []
        try:
            with self.lock:
                copy = self._copies.get((key, 0))
                if copy is not None and copy.has_failed:
                    self._take_out([copy])
                    copy = None
                if copy is None:
                    evicted = self._room_for_version(key)
                    copy = Copy(key, self._clock())
                    copy.loaded = start_load(copy)
                    copy.loaded.add_done_callback(partial(self._end_load, copy))
                    self._copies[key, 0] = copy
                copy.pins += 1
                return copy
        finally:
            for one in evicted:
                self._destroy(one)

    def has_version(self, key: CopyKey) -> bool:
        """Return whether there is a copy of a version, and it is loaded."""
        copy = self._copies.get((key, 0))
        return copy is not None and copy.state is not None

    def _room_for_version(self, key: CopyKey) -> list[Copy]:
        """Take the copies of the version that was not used for the longest time out of the cache, if one must go."""
        versions: dict[tuple[str, Hashable], list[Copy]] = {}
        for copy in list(self._copies.values()):
            if copy.key.kind is Kind.VERSION:
                versions.setdefault((copy.key.run_id, copy.key.of), []).append(copy)
        if (key.run_id, key.of) in versions or len(versions) < MAX_VERSIONS:
            return []
        idle = [copies for copies in versions.values() if not any(copy.pins for copy in copies)]
        if not idle:
            raise TooManyRequestsError(
                f"This host reads {MAX_VERSIONS} older versions from storage already: "
                f"{', '.join(f'{copies[0].key.of[1]} of {copies[0].key.of[0]!r}' for copies in versions.values())}. "
                "Try again later, or ask for a newer version."
            )
        return self._take_out(min(idle, key=lambda copies: max(copy.last_used for copy in copies)))

    @contextmanager
    def pinned(
        self, key: CopyKey, open_copy: Callable[[], PartitionState], at_most: int = -1
    ) -> Iterator[PartitionState]:
        """Pin a copy at version ``at_most`` or before, for one reader; ``open_copy`` makes one if there is none."""
        self.evict_copies()
        with self.lock:
            fitting = [
                (c.state.version, c)
                for c in list(self._copies.values())
                if c.key == key and not c.pins and c.state is not None and c.state.version <= at_most
            ]
            _, copy = max(fitting, key=lambda entry: entry[0], default=(0, None))
            if copy is not None:
                copy.pins += 1
        if copy is None:
            copy = Copy(key, self._clock())
            copy.loaded = Future()
            copy.loaded.set_result(open_copy())
            with self.lock:
                self._copies[key, next(self._number)] = copy
        try:
            yield copy.loaded.result()
        finally:
            self.unpin(copy)

    def _end_load(self, copy: Copy, _: Future[PartitionState]) -> None:
        """Release the pin of a load. If it has failed, the next reader loads the copy again."""
        if copy.has_failed:
            with self.lock:
                self._take_out([copy])
        self.unpin(copy)

    def unpin(self, copy: Copy) -> None:
        """Release one pin. A copy that was dropped is destroyed with its last pin."""
        with self.lock:
            copy.pins -= 1
            copy.last_used = self._clock()
            is_over = copy.is_dropped and not copy.pins
        if is_over:
            self._destroy(copy)
        if copy.key.kind is not Kind.VERSION:  # reads unpin versions often, and maintenance evicts them soon enough
            self.evict_copies()

    def evict_copies(self) -> None:
        """Destroy the copies that were not used for long, and the unused followers that are too many."""
        now = self._clock()

        def evicted(copies: list[Copy]) -> list[Copy]:
            unused = [copy for copy in copies if not copy.pins]
            followers = sorted((c for c in unused if c.key.kind is Kind.FOLLOWER), key=lambda copy: copy.last_used)
            surplus = followers[: max(0, len(followers) - MAX_IDLE_FOLLOWERS)]
            return [
                copy
                for copy in unused
                if copy in surplus or copy.key.kind is Kind.SAVEPOINT or now - copy.last_used >= COPY_IDLE_SECONDS
            ]

        self._drop(evicted)

    def drop_unused_copies(self) -> int:
        """Destroy all copies that no reader has pinned, to make room; return their number."""
        return self._drop(lambda copies: [copy for copy in copies if not copy.pins])

    def drop_copies(self, run_id: str | None) -> None:
        """Destroy the copies of a run (None: of all), those in use with their last pin. Their loads end."""
        self._drop(lambda copies: [copy for copy in copies if run_id in (None, copy.key.run_id)])

    def _drop(self, selected: Callable[[list[Copy]], list[Copy]]) -> int:
        """Take the selected copies out of the cache, and destroy those without a pin; return the number of these."""
        with self.lock:
            dropped = self._take_out(selected(list(self._copies.values())))
            unused = [copy for copy in dropped if not copy.pins]
        for copy in unused:
            self._destroy(copy)
        return len(unused)

    def _take_out(self, copies: list[Copy]) -> list[Copy]:
        for copy in copies:
            copy.is_dropped = True
        for key in [key for key, copy in list(self._copies.items()) if copy.is_dropped]:
            self._copies.pop(key, None)
        return copies

    @staticmethod
    def _destroy(copy: Copy) -> None:
        if copy.state is not None:
            copy.state.destroy()

    # -- runs ----------------------------------------------------------------------------------

    def registration(self, run_id: str) -> QueryRegistration | None:
        """Return a run that this host has, or has had, partitions of."""
        return self.registrations.get(run_id)

    def note_opened(self, registration: QueryRegistration, batch_id: int) -> None:
        """Record that a task of a batch has opened a partition: a restarted coordinator must know the batch."""
        run_id = registration.run_id
        with self.lock:
            self.registrations[run_id] = registration
            self._opened[run_id] = max(batch_id, self._opened.get(run_id, 0))

    def note_ended(self, run_ids: Sequence[str]) -> frozenset[str]:
        """Record that queries have ended, and return the runs that were not recorded before.

        A restarted coordinator must know them, and no snapshot of them is due.
        """
        news = set()
        with self.lock:
            for run_id in run_ids:
                registration = self.registrations.get(run_id)
                if registration is not None and not registration.ended:
                    self.registrations[run_id] = replace(registration, ended=True)
                    news.add(run_id)
        return frozenset(news)

    def has_ended(self, run_id: str) -> bool:
        """Return whether the query of a run is known to have ended. Its last version is read on."""
        registration = self.registrations.get(run_id)
        return registration is not None and registration.ended

    def on_run_forgotten(self, hook: Callable[[str], None]) -> None:
        """Call ``hook``, with ``lock``, with the id of each run that this host forgets because it is over."""
        self._forget_hooks.append(hook)

    def on_run_ended(self, hook: Callable[[str | None], None]) -> None:
        """Call ``hook`` with the id of each run that is over here, and with None when the host closes."""
        self._ended_run_hooks.append(hook)

    def forget_run(self, run_id: str) -> None:
        """Forget a run that is over; its partitions are unloaded separately."""
        # The registration goes first: a thread that waits for a version wakes when it is forgotten, and must not find
        # it.
        with self.lock:
            self.registrations.pop(run_id, None)
            self._opened.pop(run_id, None)
            self._exchanged.pop(run_id, None)
            self.forget_evicted(run_id)
            for hook in self._forget_hooks:
                hook(run_id)

    def end_run(self, run_id: str | None) -> None:
        """Drop the copies of a run that is over (None: of all runs), and call the hooks of ``on_run_ended``."""
        for hook in self._ended_run_hooks:
            hook(run_id)
        self.drop_copies(run_id)

    def unload_run(self, run_id: str) -> None:
        """Lay the partitions of a run aside that is over, and forget the run."""
        with self.lock:
            instances = self.of_run(run_id)
            self.forget_run(run_id)
        self.end_run(run_id)
        # Files that were laid aside stay: they are whole.
        self.drop_kept(lambda kept: kept.registration.run_id == run_id and not kept.state.is_closed)
        for instance in instances:
            self.lay_aside(instance)
        self._remove_unused(run_id)

    def report(self, run_ids: Container[str] | None = None) -> HostReport:
        """Return the report of this host about these runs, or all if None, to a restarted coordinator."""
        with self.lock:
            registrations = {r: of for r, of in self.registrations.items() if run_ids is None or r in run_ids}
            pending = tuple(a for i in self.instances.values() for a in list(i.acknowledged.values()))
            pending += tuple(a for key, e in self._evicted.items() for a in self._not_repeated(key, e))
            partitions: dict[str, dict[str, list[int]]] = {}
            for i in self.instances.values():
                partitions.setdefault(i.registration.run_id, {}).setdefault(i.operator, []).append(i.partition)
        return HostReport(
            tuple(registrations.values()),
            tuple(a for a in pending if a.run_id in registrations),
            {run_id: batch_id for run_id, batch_id in self._opened.items() if run_id in registrations},
            {run_id: operators for run_id, operators in partitions.items() if run_id in registrations},
        )

    def _not_repeated(self, key: InstanceKey, evicted: Evicted) -> list[Acknowledge]:
        """Return the accepted commits that no later attempt has replaced since the partition was loaded again."""
        instance = self.instances.get(key)
        replaced = instance.acknowledged if instance is not None else {}
        return [a for version, a in evicted.acknowledged.items() if version not in replaced]

    def versions(self) -> dict[str, int]:
        """Return by run id the lowest version of the partitions that are loaded here."""
        with self.lock:
            lowest = dict.fromkeys(self.registrations, NOTHING_HELD)
            for i in self.instances.values():
                run_id = i.registration.run_id
                lowest[run_id] = min(i.state.version, lowest.get(run_id, i.state.version))
            return lowest

    # -- exchanged files -----------------------------------------------------------------------

    def drop_exchanged(self, run_id: str) -> bool:
        """Drop the copies and kept files of a run whose files were exchanged; return whether nothing older is left.

        Own partitions of the run itself are the caller's.
        """
        self.drop_copies(run_id)
        registration = self.registration(run_id)
        location = None if registration is None else registration.state_location
        self.drop_kept(lambda kept: run_id == kept.registration.run_id or location == kept.key[0])
        with self.lock:  # one that is being loaded now may become a copy of the files from before
            others = (key for key, i in self.instances.items() if i.registration.run_id != run_id)
            in_use = (state for state, _ in self._in_use.values())
            return location not in (*in_use, *(state for state, _, _ in (*self._kept, *others)))

    def note_exchanged(self, run_id: str, exchange: str) -> None:
        """Note that nothing of a run from before an exchange of files is held here any more."""
        with self.lock:
            if run_id in self.registrations:
                self._exchanged[run_id] = exchange

    def last_exchange(self, run_id: str) -> str:
        """Return the last exchange of a run after which this host holds nothing older; "" if there was none."""
        with self.lock:
            return self._exchanged.get(run_id, "")

    def exchanged(self) -> dict[str, str]:
        """Return by run the last exchange after which this host holds nothing older, for the heartbeat."""
        with self.lock:
            return dict(self._exchanged)

    def close(self) -> None:
        """Unload everything, and remove the local files."""
        for instance in self.all():
            self.unload(instance)
        for run_id in {*self.registrations}:
            self.unload_run(run_id)
        self.drop_kept(lambda kept: True)  # partitions opened since then have been laid aside, too
        self.end_run(None)
