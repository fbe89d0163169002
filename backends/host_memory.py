"""One budget for the memory of all stores of a process: ``host_memory``.

Memory counts as long as it is in use: its holder keeps a ``Claim`` with the memory, and the end of the claim subtracts
the bytes. So memory that a reader or a scan still keeps alive counts, too. The kinds of memory, and the rule for each
when memory is short:

- needed: changes of running batches, scans, copies that are read once, changes that a host's partition has not written
  to its database yet (counted as copies), and the fixed memory of each open database. Everything else makes room for
  them. A commit or a scan that does not fit even then is rejected. Copies have a quarter of the budget at most, changes
  that a host gathers to save time a quarter of that, and both use the disk instead.
- passing: requests that are being received, and changelogs that are being written. All spared memory makes room for
  them. They are short-lived, so nothing is rejected for them; a commit waits for its turn (``admitted``).
- spared: before-images and last reads, a quarter of the budget at most. They never evict anything else; the oldest of
  the process are evicted first.
- caches: row caches have their share as long as nothing needs it; the largest of them are emptied first. RocksDB's
  block cache and write buffers keep theirs.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeVar
from weakref import ref

from backends.conf import StateStoreConf
from backends.exceptions import HostMemoryBusyError, HostMemoryError

STAGED, DELTAS, SCANS, DATABASES = "staged_commits", "deltas", "scans", "open_databases"
COPIES = "copies"
NEEDED = (STAGED, DELTAS, SCANS, COPIES, DATABASES)
REQUESTS, CHANGELOGS = "requests", "changelogs"
PASSING = (REQUESTS, CHANGELOGS)
BEFORE_IMAGES, LAST_READS = "before_images", "last_reads"
SPARED = (BEFORE_IMAGES, LAST_READS)
ROW_CACHE, BLOCK_CACHE, WRITE_BUFFERS = "row_cache", "block_cache", "write_buffers"

KEPT_OF_COMMIT = 2
"""A commit keeps this many times its changes: the changes, and the write that is prepared for the engine, which is
about as large.
"""
PEAK_OF_COPY = 3
"""Peak memory of a copy's changes while they are merged, as a multiple of the changes."""
PEAK_OF_COMMIT = 3
"""Peak memory of a commit, as a multiple of its changes.

While the host receives a commit, its changes are in memory twice. Afterwards there are ``KEPT_OF_COMMIT`` copies and
the changelog.
"""
MAX_WAITING = 1000
"""At most this many commits of a run wait for their turn: each has a thread of the server."""

_lock = threading.Lock()
_budgets: dict[tuple[int, int, int, int], HostMemory] = {}


class Claim:
    """Some bytes of a budget, counted until the claim is garbage-collected."""

    __slots__ = ("__weakref__", "_gone", "drop", "is_dropped", "kind", "nbytes", "number")

    def __init__(
        self, gone: deque[tuple[str, int, int]], number: int, kind: str, nbytes: int, drop: Callable[[], None] | None
    ) -> None:
        self._gone = gone
        self.number = number
        self.kind = kind
        self.nbytes = nbytes
        self.drop = drop
        """Releases the memory of the claim; None for memory that nothing else can take."""
        self.is_dropped = False
        """Whether ``drop`` is being called, or was: the owner of the memory must not start to keep it now."""

    def __del__(self) -> None:
        # Any allocation may end a claim, including one that is made under a lock: so this takes no lock.
        self._gone.append((self.kind, self.nbytes, self.number))


class HostMemory:
    """The memory that all stores of the process may use together, ``limit`` bytes.

    Thread-safe. The lock of this module is held only for additions and for the release of claims, and no other lock is
    taken under it.
    """

    def __init__(self, conf: StateStoreConf) -> None:
        self.limit = conf.host_memory
        self.row_cache_bytes = conf.row_cache_bytes
        self._working = conf.host_memory - conf.block_cache_bytes - conf.write_buffer_bytes
        self._held = dict.fromkeys((*NEEDED, *PASSING, *SPARED, ROW_CACHE), 0)
        self._gone: deque[tuple[str, int, int]] = deque()
        self._droppable: OrderedDict[int, ref[Claim]] = OrderedDict()
        self._number = 0
        self._measures: dict[str, Callable[[], int]] = {}
        # Admitted commits: their bytes, and how many each run has. Waiting commits, in order of arrival.
        self._admitted = 0
        self._admitted_of: Counter[str] = Counter()
        self._waiting: deque[tuple[str, object]] = deque()
        self._turn = threading.Condition(_lock)
        self._row_claims: dict[int, ref[Claim]] = {}
        self._largest_rows: list[tuple[int, int]] = []
        """A heap of the claims of row caches, each as its negative size and its number; some of them are gone."""
        self._row_lookups = {"asked": 0, "hits": 0}

    def measure(self, kind: str, size: Callable[[], int]) -> None:
        """Include the size of a cache of the process in ``held``."""
        self._measures[kind] = size

    def held(self) -> dict[str, int]:
        """Return the bytes that are held, by kind."""
        with _lock:
            self._settle()
            counted = dict(self._held)
        return counted | {kind: size() for kind, size in list(self._measures.items())}

    # -- row caches ----------------------------------------------------------------------------

    def count_rows(self, asked: int, hits: int) -> None:
        """Count the requested keys and the hits of a row cache. No lock is taken, so the counts are approximate."""
        self._row_lookups["asked"] += asked
        self._row_lookups["hits"] += hits

    def row_cache_counts(self) -> dict[str, int]:
        """Return the keys that row caches were ``asked`` for, and those that they had (``hits``)."""
        return dict(self._row_lookups)

    def _row_room(self) -> int:
        """Return how many bytes all row caches may have together now."""
        others = sum(self._held.values()) - self._held[ROW_CACHE]
        return max(0, min(self.row_cache_bytes, self._working - others))

    def row_allowance(self, own: Claim | None) -> int:
        """Return the maximum bytes of the row cache with this claim: the rest of the budget, or an equal share.

        The time grows with the logarithm of the number of row caches (one per partition and column family).
        """
        with _lock:
            self._settle()
            return self._row_allowance(own)

    def _row_allowance(self, own: Claim | None) -> int:
        room, used, others = self._row_room(), self._held[ROW_CACHE], len(self._row_claims)
        if own is not None and own.number in self._row_claims:
            used, others = used - own.nbytes, others - 1
        return max(room - used, room // (others + 1))

    def claim_rows(self, nbytes: int, drop: Callable[[], None]) -> Claim | None:
        """Count the bytes of a row cache, and empty larger caches for them; None if that is more than its share.

        ``drop`` is called, with the lock, when the cache must be emptied. It may be called before the caller keeps the
        memory: so the caller checks ``is_dropped`` afterwards.
        """
        with _lock:
            self._settle()
            if nbytes > self._row_allowance(None):
                return None
            self._empty_row_caches(self._row_room() - nbytes)
            claim = self._new(ROW_CACHE, nbytes, drop)
            self._row_claims[claim.number] = ref(claim)
            heappush(self._largest_rows, (-nbytes, claim.number))
            return claim

    def _empty_row_caches(self, limit: int) -> None:
        """Empty row caches, the largest first, until they have at most ``limit`` bytes together."""
        while self._largest_rows and self._held[ROW_CACHE] > limit:
            reference = self._row_claims.get(heappop(self._largest_rows)[1])
            claim = None if reference is None else reference()
            if claim is not None and claim.drop is not None:
                claim.is_dropped = True
                claim.drop()
            claim = None  # the last reference: its end subtracts the bytes
            self._settle()

    # -- claims --------------------------------------------------------------------------------

    def claim(self, kind: str, nbytes: int, what: str) -> Claim:
        """Count needed bytes; last reads, before-images and the row cache make room for them.

        Raises ``HostMemoryError``, which names the rejected ``what``, if there is no room even then.
        """
        with _lock:
            self._settle()
            needed = sum(self._held[k] for k in NEEDED)
            if needed + nbytes > self._working:
                raise HostMemoryError(self._refusal(what, nbytes, needed))
            claim = self._new(kind, nbytes, None)
        self._make_room()
        return claim

    @property
    def copies_bytes(self) -> int:
        """The bytes that all copies may use together: loads must not take the room of commits."""
        return self.limit // 4

    def claim_copy(self, nbytes: int, *, is_optional: bool = False) -> Claim | None:
        """Count changes of a copy, ``nbytes`` large, with the memory for merging them; None if there is no room.

        Optional changes, which could be written instead, get a quarter of the memory of copies.
        """
        peak = PEAK_OF_COPY * nbytes
        limit = self.copies_bytes // 4 if is_optional else self.copies_bytes
        with _lock:
            self._settle()
            needed = sum(self._held[k] for k in NEEDED)
            if self._held[COPIES] + peak > limit or needed + peak > self._working:
                return None
            claim = self._new(COPIES, peak, None)
        self._make_room()
        return claim

    @contextmanager
    def admitted(self, run_id: str, nbytes: int, what: str, seconds: float) -> Iterator[None]:
        """Admit a commit of ``nbytes`` bytes of changes, for a ``with`` block, once it fits next to the admitted ones.

        Commits are admitted in order of arrival. One commit of each run is admitted even without room, so that a run
        never waits for the storage of another run. Only these commits can exceed the budget. Raises ``HostMemoryError``
        for changes that could never be kept, and ``HostMemoryBusyError`` if the commit is not admitted within
        ``seconds``, or if ``MAX_WAITING`` commits of its run wait already.
        """
        if KEPT_OF_COMMIT * nbytes > self._working:
            raise HostMemoryError(self._refusal(what, KEPT_OF_COMMIT * nbytes, 0))
        peak = PEAK_OF_COMMIT * nbytes
        with self._turn:
            if sum(run == run_id for run, _ in self._waiting) >= MAX_WAITING:
                raise HostMemoryBusyError(
                    f"{what} must wait, and {MAX_WAITING} commits of run {run_id} wait already: ask again."
                )
            ticket = (run_id, object())
            self._waiting.append(ticket)
            try:
                if not self._wait_for_turn(ticket, peak, seconds):
                    raise HostMemoryBusyError(
                        f"{what} needs {peak:,} bytes for a moment, and has waited {seconds:g} s for its turn: "
                        f"{self._admitted:,} are being used by other commits of this host, which has "
                        f"host_memory={self.limit:,}. Ask again."
                    )
                self._admitted += peak
                self._admitted_of[run_id] += 1
            finally:
                self._waiting.remove(ticket)
                self._turn.notify_all()  # the next one's turn may have come
        try:
            yield
        finally:
            with self._turn:
                self._admitted -= peak
                self._admitted_of[run_id] -= 1
                if not self._admitted_of[run_id]:
                    del self._admitted_of[run_id]
                self._turn.notify_all()

    def _wait_for_turn(self, ticket: tuple[str, object], peak: int, seconds: float) -> bool:
        run_id = ticket[0]

        def is_its_turn() -> bool:
            self._settle()
            needed = sum(self._held[k] for k in NEEDED)
            if self._waiting[0] == ticket and needed + self._admitted + peak <= self._working:
                return True
            return not self._admitted_of[run_id] and next(t for t in self._waiting if t[0] == run_id) == ticket

        # An admitted commit ends and notifies: nothing else needs to be waited for.
        return self._turn.wait_for(is_its_turn, seconds)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _refusal(self, what: str, nbytes: int, needed: int) -> str:
        databases = self._held[DATABASES]
        return (
            f"{what} needs {nbytes:,} bytes, and {max(0, self._working - needed):,} of host_memory={self.limit:,} are "
            f"free: {needed - databases:,} are held by other commits and scans, {databases:,} by the open RocksDB "
            f"databases, {self.limit - self._working:,} are RocksDB's block cache and write buffers. Set "
            "StateStoreConf(host_memory=...) higher, or have more hosts, with at least as many partitions. Smaller "
            "batches (maxFilesPerTrigger, maxOffsetsPerTrigger) help from the next batch on: a batch that Spark has "
            "begun is run again with the same rows, also after a restart."
        )

    def note(self, kind: str, nbytes: int) -> Claim:
        """Count bytes that are already held and can no longer be rejected; others make room for them."""
        with _lock:
            claim = self._new(kind, nbytes, None)
        self._make_room()
        return claim

    def spare(self, kind: str, nbytes: int, drop: Callable[[], None]) -> Claim | None:
        """Count spared bytes: ``drop`` is called, without a lock, when they must be evicted.

        Return None if there is no room even without all older spared memory: then the caller must not keep them.
        ``drop`` must not keep alive what it drops. It may be called before the caller keeps the memory: so the caller
        checks ``is_dropped`` afterwards.
        """
        with _lock:
            self._settle()
            if nbytes > self._spared_room():
                return None
            claim = self._new(kind, nbytes, drop)
            self._droppable[claim.number] = ref(claim)
        self._make_room()
        # This very claim may have made room: memory counted by ``note`` cannot be dropped.
        return None if claim.is_dropped else claim

    def move(self, claim: Claim, kind: str) -> None:
        with _lock:
            self._held[claim.kind] -= claim.nbytes
            self._held[kind] += claim.nbytes
            claim.kind = kind

    def resize(self, claim: Claim, nbytes: int) -> None:
        """Change the size of a claim that can no longer be rejected to ``nbytes`` bytes."""
        with _lock:
            self._held[claim.kind] += nbytes - claim.nbytes
            claim.nbytes = nbytes
        self._make_room()

    def _new(self, kind: str, nbytes: int, drop: Callable[[], None] | None) -> Claim:
        self._number += 1
        claim = Claim(self._gone, self._number, kind, nbytes, drop)
        self._held[kind] += nbytes
        return claim

    def _settle(self) -> None:
        while self._gone:
            kind, nbytes, number = self._gone.popleft()
            self._held[kind] -= nbytes
            self._droppable.pop(number, None)
            self._row_claims.pop(number, None)
        if len(self._largest_rows) > 2 * len(self._row_claims) + 16:
            self._largest_rows = [entry for entry in self._largest_rows if entry[1] in self._row_claims]
            heapify(self._largest_rows)

    def _spared_room(self) -> int:
        """Return how many bytes spared memory may have. When memory is short, it shrinks before row caches do."""
        others = sum(self._held[k] for k in (*NEEDED, *PASSING))
        return max(0, min(self.limit // 4, self._working - self.row_cache_bytes - others))

    def _make_room(self) -> None:
        """Drop spared memory, the oldest first, and then rows, until everything fits.

        A reader may keep dropped memory alive for a while. So the loop counts the bytes that it has dropped, and stops
        at the initial excess.
        """
        with _lock:
            self._settle()
            over = sum(self._held[k] for k in SPARED) - self._spared_room()
        while over > 0:
            with _lock:
                claim = self._droppable.popitem(last=False)[1]() if self._droppable else None
                if claim is not None:
                    claim.is_dropped = True
                is_end = not self._droppable
            if claim is not None and claim.drop is not None:
                over -= claim.nbytes
                drop = claim.drop
                claim = None  # so that no reference is left after ``drop``: the end of the claim subtracts its bytes
                drop()
            if is_end:
                break
        with _lock:
            self._settle()
            self._empty_row_caches(self._row_room())


def host_memory(conf: StateStoreConf) -> HostMemory:
    """Return the budget of all stores of the process with the same limits."""
    limits = (conf.host_memory, conf.row_cache_bytes, conf.block_cache_bytes, conf.write_buffer_bytes)
    with _lock:
        if limits not in _budgets:
            _budgets[limits] = HostMemory(conf)
        return _budgets[limits]


# A dict that remembers a bounded number of entries.


K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Keep ``limit`` entries, and evict the oldest ones.

    Setting a key again keeps its place, so that readers without a lock never miss it. The dict has no lock; threads may
    set keys at once. Only ``d[key] = value`` and ``setdefault`` are bounded. Raises ``ValueError`` for a limit below 1.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        if limit < 1:
            raise ValueError(f"limit={limit} must be at least 1.")
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        while len(self) > self._limit:
            # Another thread may set or evict an entry between any two of these steps: then look again.
            with suppress(KeyError, RuntimeError, StopIteration):
                del self[next(iter(self))]

    def setdefault(self, key: K, default: V) -> V:
        """Return the entry of ``key``; set ``default`` first where there is none."""
        if key not in self:
            self[key] = default
        return self[key]


# Counts of durations by buckets with fixed bounds, as Prometheus's histograms have them.


@dataclass(frozen=True)
class HistogramBuckets:
    """The counts of a histogram. ``cumulative`` has for each of ``bounds`` the number of values up to the bound.

    ``count`` is the number of values, ``total`` is their sum. Histograms of several processes can be added, because
    their bounds are the same.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    count: int
    total: float


class BucketCounts:
    """Counts values since the process began. Not thread-safe."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def count_value(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramBuckets:
        cumulative: list[int] = []
        seen = 0
        for count in self._counts[:-1]:
            seen += count
            cumulative.append(seen)
        return HistogramBuckets(self._bounds, tuple(cumulative), seen + self._counts[-1], self._total)
