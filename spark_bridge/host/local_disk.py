"""The local disk of a host as a cache of the state: reservations of loads, evictions and their figures.

A host whose partitions do not fit on its disk keeps those that are used. ``DiskRoom`` evicts the others, and the next
task or reader of an evicted partition loads it again.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from backends.exceptions import LocalDiskFullError
from backends.host_memory import BoundedDict
from backends.load_watch import LoadWatch
from spark_bridge.host.instances import Instance, InstanceKey
from spark_bridge.host.partition_cache import PartitionCache

log = logging.getLogger(__name__)

T = TypeVar("T")

IN_USE_SECONDS = 60.0
"""A partition that a task has opened, or was loaded for, is evicted after this many seconds without a commit."""
WARNING_SECONDS = 300.0
"""Evictions are logged as a warning once in this many seconds."""
MIN_FREE_SHARE, MIN_FREE_BYTES = 1 / 32, 1 << 30
"""Maintenance evicts an unused partition if a smaller share of the budget or of the file system is free, and fewer
bytes.
"""
REPEAT_STEP_SECONDS, REPEAT_TURN_SECONDS = 1.0, 20.0
"""A load that waits for its turn reports progress after the first number of seconds, and continues after the second."""
ROOM_SECONDS = 1.0
"""A load that waits for room on the disk looks again, and reports progress, after this many seconds."""
EMPTY_SECONDS, RELEASE_SECONDS = 0.6, 20.0
"""A load on a full disk fails once it has waited so long without another partition or load: the first number counts
from when the host's directory has no files of others. Seconds count, not attempts, since each load wakes all others.
"""
EMPTY_BYTES = 64 << 10
"""A directory with fewer bytes has no partition."""
MAX_EVICTED = 100_000
"""At most this many evicted partitions are remembered, for the figures. Those of ended queries are never loaded again,
and would stay for ever.
"""
_MIB = 1 << 20
_REMEDY = (
    "Set local_disk_bytes higher, make room, or keep local copies on a larger disk (those of a host are in Ray's "
    "session directory: ray start --temp-dir). More partitions (a restart with a larger spark.sql.shuffle.partitions) "
    "are smaller, and more machines hold fewer of them each."
)


class LocalDisk:
    """The room below ``directory``: ``budget`` bytes, or the file system's free space if that is None or less.

    Thread-safe. ``changed`` guards the tables, and is notified when there may be more room: after a commit, a load or
    an eviction. No other lock is taken while it is held. ``_turn`` is held while a load repeats a failed write; these
    loads are ``_repeating``. Memory: one entry for each load, and for each of the last ``MAX_EVICTED`` evictions.
    """

    def __init__(self, directory: Path, budget: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self._budget = budget
        self._clock = clock
        self.changed = threading.Condition()
        self._reserved: dict[LoadWatch, int] = {}
        self._turn = threading.Lock()
        self._repeating: set[LoadWatch] = set()
        self._evicted: BoundedDict[InstanceKey, None] = BoundedDict(MAX_EVICTED)
        self._evictions = self._evicted_bytes = self._reread_bytes = 0
        self._unreported = self._unreported_bytes = 0
        self._last_eviction = self._last_warning = float("-inf")

    @contextmanager
    def reserving(self, watch: LoadWatch, what: str, fetched: Path) -> Iterator[None]:
        """Let a load reserve room within the block, as soon as it knows the bytes of its files.

        ``fetched``, in the partition's directory, has the files that the load, or one before, has fetched.
        ``LoadWatch.expect`` raises ``LocalDiskFullError`` if there is no room.
        """
        watch.reserve = lambda nbytes: self._reserve(watch, nbytes, what, fetched)
        try:
            yield
        finally:
            watch.reserve = None
            with self.changed:
                if self._reserved.pop(watch, None) is not None:  # else two loads without room would wake each other
                    self.changed.notify_all()

    def _reserve(self, watch: LoadWatch, nbytes: int, what: str, fetched: Path) -> None:
        needed = max(0, nbytes - bytes_below(fetched))
        with self.changed:
            others = [(other, size) for other, size in self._reserved.items() if other is not watch]
            outstanding = sum(max(0, size - other.progress().nbytes) for other, size in others)
            free, total = self._room()
            if needed > free - outstanding:
                whole = needed + bytes_below(fetched.parent)
                error = LocalDiskFullError(
                    f"{what} needs {whole / _MIB:.1f} MiB in {self.directory}: {max(0, free) / _MIB:.1f} of "
                    f"{total / _MIB:.1f} MiB are free, and other loads will take {outstanding / _MIB:.1f} MiB of "
                    f"them. {_REMEDY}"
                )
                error.is_larger_than_disk = whole > total
                error.is_refused = True
                raise error
            self._reserved[watch] = self._reserved.get(watch, 0) + nbytes

    def _room(self) -> tuple[int, int]:
        """Return the free bytes, and the bytes in all."""
        existing = next(p for p in (self.directory, *self.directory.absolute().parents) if p.exists())
        usage = shutil.disk_usage(existing)
        if self._budget is None:
            return usage.free, usage.total
        return min(usage.free, self._budget - bytes_below(self.directory)), self._budget

    def is_nearly_full(self) -> bool:
        free, total = self._room()
        return free < min(MIN_FREE_SHARE * total, MIN_FREE_BYTES)

    @property
    def is_loading(self) -> bool:
        """Return whether a load has reserved room now, other than those that repeat a failed write."""
        with self.changed:
            return any(watch not in self._repeating for watch in self._reserved)

    def notify(self) -> None:
        """Wake the loads that wait for room."""
        with self.changed:
            self.changed.notify_all()

    @contextmanager
    def turn(self, watch: LoadWatch) -> Iterator[None]:
        """Repeat a load in its turn, after a write found the disk full though there had been room to reserve.

        Two such loads at once might take the room of each other again and again. If the storage of one hangs, the
        others continue after ``REPEAT_TURN_SECONDS``.
        """
        waited_seconds = 0.0
        while (
            not (has_turn := self._turn.acquire(timeout=REPEAT_STEP_SECONDS)) and waited_seconds < REPEAT_TURN_SECONDS
        ):
            waited_seconds += REPEAT_STEP_SECONDS
            watch.step()
        with self.changed:
            self._repeating.add(watch)
        try:
            yield
        finally:
            with self.changed:
                self._repeating.discard(watch)
            if has_turn:
                self._turn.release()

    def wait(self, seconds: float) -> float:
        """Wait until there may be more room, at most ``seconds``; return the seconds, not counting a stall."""
        begun = time.monotonic()
        with self.changed:
            self.changed.wait(seconds)
        return min(seconds, time.monotonic() - begun)

    def note_eviction(self, key: InstanceKey, nbytes: int) -> None:
        """Count an eviction, and warn of it from time to time."""
        with self.changed:
            self._evicted[key] = None
            self._evictions += 1
            self._evicted_bytes += nbytes
            self._unreported += 1
            self._unreported_bytes += nbytes
            self._last_eviction = now = self._clock()
            is_due = now - self._last_warning >= WARNING_SECONDS
            number, evicted_bytes = self._unreported, self._unreported_bytes
            if is_due:
                self._last_warning, self._unreported, self._unreported_bytes = now, 0, 0
            self.changed.notify_all()
        if is_due:
            free, total = self._room()
            log.warning(
                "The local disk is smaller than the state of this host: %d partitions with %.1f MiB were evicted, and "
                "are loaded again when they are used (%.1f of %.1f MiB are free in %s). %s",
                *(number, evicted_bytes / _MIB, max(0, free) / _MIB, total / _MIB, self.directory, _REMEDY),
            )

    def note_loaded(self, key: InstanceKey, nbytes: int) -> None:
        """Count the bytes of a load of a partition that was evicted before."""
        with self.changed:
            if key in self._evicted:
                del self._evicted[key]
                self._reread_bytes += nbytes

    def describe(self) -> dict[str, int | float | None]:
        """Return the figures of the disk, as JSON types; ``evicted_seconds`` ago was the last eviction."""
        with self.changed:
            last = self._last_eviction
            figures = (self._evictions, self._evicted_bytes, self._reread_bytes)
        return {
            **dict(zip(("evictions", "evicted_bytes", "reread_bytes"), figures, strict=True)),
            "budget": self._budget,
            "evicted_seconds": None if last == float("-inf") else round(self._clock() - last, 1),
        }


@dataclass(eq=False, repr=False)
class DiskRoom:
    """Makes room on a full disk: removes kept files and unused copies, then evicts the least recently used partitions.

    If all of these are in use, the work waits for its turn. It fails only if there is nothing to wait for: the
    partition alone is larger than the disk.
    """

    _cache: PartitionCache
    _disk: LocalDisk
    _clock: Callable[[], float]

    def make(
        self, work: Callable[[], T], key: InstanceKey | None, watch: LoadWatch | None, instance: Instance | None = None
    ) -> T:
        """Do some work for the partition ``key`` (None: a copy). While the disk is full, make room, and retry the work.

        If the others are in use, wait for them; raise the error if there are none. Without a ``watch`` this does not
        wait. ``instance`` is the partition, once it is open.
        """
        alone_seconds = empty_seconds = 0.0
        turn: AbstractContextManager[None] = nullcontext()
        while True:
            try:
                with turn:
                    return work()
            except LocalDiskFullError as error:
                turn = nullcontext() if watch is None or error.is_refused else self._disk.turn(watch)
                if error.is_larger_than_disk:
                    raise
                if self._free(key, error):
                    alone_seconds = empty_seconds = 0.0
                    continue
                own = 0
                if instance is not None:
                    # Readers of the latest version must not meet the empty version that is left.
                    self._cache.withdraw(instance)
                    # Two loads that wait might hold the room that each other needs.
                    fetched = bytes_below(instance.state.local_dir)
                    with instance.commit_lock:
                        instance.state.drop_local_files()
                    own = bytes_below(instance.state.local_dir)
                    if own < fetched:
                        self._disk.notify()
                is_alone = not self._others_on_disk(key) and not self._disk.is_loading
                # Others may be releasing their files: an eviction, or a load that found the disk full as well.
                is_empty = is_alone and bytes_below(self._disk.directory) <= own + EMPTY_BYTES
                alone_seconds = alone_seconds if is_alone else 0.0
                empty_seconds = empty_seconds if is_empty else 0.0
                if watch is None or alone_seconds >= RELEASE_SECONDS or empty_seconds >= EMPTY_SECONDS:
                    raise
                waited_seconds = self._disk.wait(ROOM_SECONDS / 5 if is_alone else ROOM_SECONDS)
                alone_seconds += waited_seconds if is_alone else 0.0
                empty_seconds += waited_seconds if is_empty else 0.0
                watch.step()  # the partitions in use make progress, and this load comes after them

    def _free(self, key: InstanceKey | None, error: LocalDiskFullError) -> bool:
        """Remove something that is not in use, other than the partition ``key``; return whether there was something."""
        dropped = self._cache.drop_least_wanted()
        if dropped is not None:
            log.warning("The kept files of %s are removed to make room: %s", dropped, error)
            return True
        return bool(self._cache.drop_unused_copies()) or self._evict_least_used(key)

    def _evict_least_used(self, key: InstanceKey | None = None) -> bool:
        """Evict the own partition that was not used for the longest time; return whether there was one."""
        now = self._clock()
        for instance in sorted(self._others_on_disk(key), key=lambda other: other.last_use):
            if instance.in_use_until > now or instance.state.is_loading or instance.state.snapshots.is_uploading:
                continue
            nbytes = bytes_below(instance.state.local_dir)
            if self._cache.evict(instance):
                self._disk.note_eviction(instance.key, nbytes)
                return True
        return False

    def _others_on_disk(self, key: InstanceKey | None) -> list[Instance]:
        """Return the other own partitions that have files on the disk: the file backend has them only in memory."""
        with_files = [i for i in self._cache.all() if i.key != key and bytes_below(i.state.local_dir)]
        return [i for i in with_files if not i.state.is_closed]

    def keep_within_disk(self) -> None:
        """Evict kept files or one unused partition if the disk is nearly full: RocksDB needs room for its own work."""
        if self._disk.is_nearly_full() and self._cache.drop_least_wanted() is None:
            self._evict_least_used()


def bytes_below(directory: Path) -> int:
    """Return the bytes on disk of all files in a directory and below; hard links to one file count once.

    Files that are removed during the call may be left out.
    """
    inodes: dict[int, int] = {}
    left = [str(directory)]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
                        else:
                            status = entry.stat(follow_symlinks=False)
                            inodes[status.st_ino] = status.st_blocks * 512
                    except FileNotFoundError:
                        continue
        except (FileNotFoundError, NotADirectoryError):
            continue
    return sum(inodes.values())
