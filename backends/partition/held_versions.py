"""The versions of a partition that can be read. Reads stay exact while versions advance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import ref

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import SortedPairs, as_binary, is_strictly_sorted, merged_scan
from backends.engines.engine import StateEngine
from backends.exceptions import InvalidStateStoreArgument, LineageMismatchError, StoreClosedError, VersionNotFoundError
from backends.formats.changelog import ChangelogMeta, Changes
from backends.host_memory import BEFORE_IMAGES, LAST_READS, SCANS, Claim, HostMemory
from backends.partition.layers import Delta, Layer, OlderVersion, PartitionContext, PendingChanges, VersionView


class HeldVersions:
    """The completed version, the pending changes above it, and the before-images of the versions just below it.

    How reads stay exact while versions advance: every read registers which layers it uses over the engine. ``applying``
    first makes the delta a layer of all new reads, then waits for the reads that do not have it, and only then allows
    the engine to be written. A read that is still under way then takes the changed keys from the delta itself.

    Locks: ``changed`` guards everything here, ``pending`` included. It is held only briefly, except to wait on it. The
    completed version is read without it (see ``begin_read``). ``complete`` and ``load`` of a partition are serialised
    by a lock of the partition that is always taken first. Only they write ``version``, ``head`` and the older versions,
    with one exception: any thread that does not hold ``changed`` may call ``drop_older``.
    """

    def __init__(self, engine: StateEngine, directory: str, conf: StateStoreConf, memory: HostMemory) -> None:
        self._engine = engine
        self._directory = directory
        self._conf = conf
        self._memory = memory
        self.changed = threading.Condition()
        self.pending = PendingChanges(memory)
        self.is_loading = False
        self.is_closed = False
        self.readers: dict[object, tuple[Layer, ...]] = {}
        """The reads under way, and the layers of each."""
        self._num_waiting = 0
        self._older: list[OlderVersion] = []
        self._applying: Delta | None = None
        self._completed: VersionView | None
        self.version: int
        """The last completed version here."""
        self.head: str | None
        """The path of the changelog that made the version; None for the empty version 0."""
        self._show(engine.state.version, engine.state.head)

    def check_open(self) -> None:
        """Raise ``StoreClosedError`` if the partition is closed."""
        if self.is_closed:
            raise StoreClosedError(f"The state of {self._directory} is closed here: open it again.")

    # -- the completed version -----------------------------------------------------------------

    def begin_loading(self) -> None:
        """Wait for the reads under way to end, and make new ones wait until ``end_loading``."""
        with self.changed:
            self.is_loading = True
            self._completed = None
            self._wait_for_readers(lambda _: False)

    def end_loading(self, version: int, head: str | None) -> None:
        """Show the version that was loaded. Pending changes that do not follow it are dropped."""
        with self.changed:
            self._older = []
            self.pending.drop_unrelated(version, head)
            self.is_loading = False
            self._show(version, head)
            self.changed.notify_all()

    @contextmanager
    def applying(self, delta: Delta, before: Changes | None) -> Iterator[None]:
        """Show the version that ``delta`` makes; within the block the engine is written, with no read in the way.

        ``before`` are the before-images of ``delta``, which keep the version below readable; None: it cannot be read.
        If the block raises, the version below is shown again.
        """
        before_all = self.version, self.head, self._older
        older = self._with_older(before)
        with self.changed:
            self._applying = delta
            self._older = _not_dropped(older)
            self._show(delta.meta.version, delta.file.path)
            self._wait_for_readers(lambda layers: delta in layers)
        try:
            yield
        except BaseException:
            with self.changed:
                self.version, self.head, self._older = before_all[0], before_all[1], _not_dropped(before_all[2])
            raise
        finally:
            with self.changed:
                self._applying = None
                self._show(self.version, self.head)

    def _with_older(self, before: Changes | None) -> list[OlderVersion]:
        """Return the older versions to keep once the version above has before-images: the newest ones, within the
        limits.
        """
        if before is None or not self._conf.max_versions_in_memory:
            return []
        newest = OlderVersion(
            self.version, self.head, before, self._engine.column_families, self._engine.state.num_keys
        )
        if newest.nbytes <= self._conf.versions_in_memory_bytes:
            newest.claim = self._memory.spare(BEFORE_IMAGES, newest.nbytes, partial(_drop, ref(self), ref(newest)))
        if newest.claim is None:
            return []
        kept: list[OlderVersion] = []
        nbytes = 0
        for one in (newest, *reversed(self._older)):
            nbytes += one.nbytes
            if len(kept) == self._conf.max_versions_in_memory or nbytes > self._conf.versions_in_memory_bytes:
                break
            kept.insert(0, one)
        return kept

    def drop_older(self, one: OlderVersion) -> None:
        """Drop the before-images of a version, and of those below it, which need these; reads under way continue."""
        with self.changed:
            if one in self._older:
                self._older = self._older[self._older.index(one) + 1 :]

    def _show(self, version: int, head: str | None) -> None:
        """Show this version from now on.

        The view is set before ``version``: a reader that saw the new ``version`` must not get an older view.
        """
        layers = () if self._applying is None else (self._applying,)
        families = self._engine.column_families.union(*(delta.changes.families for delta in layers))
        self._completed = VersionView(version, layers, head, families)
        self.version, self.head = version, head

    def close(self) -> None:
        """Reject new reads, wait for those under way, and drop all changes over the engine."""
        with self.changed:
            self.is_closed = True
            self._completed = None
            self._wait_for_readers(lambda _: False)
            self.pending.clear()
            self._older = []

    # -- pending changes -----------------------------------------------------------------------

    def check_base(self, meta: ChangelogMeta) -> None:
        """Raise ``LineageMismatchError`` if ``meta.base`` is not held here as the version below the commit."""
        with self.changed:
            self.check_open()
            is_completed = (meta.version - 1, meta.base) == (self.version, self.head)
            is_accepted = meta.base is not None and self.pending.accepted_head(meta.version - 1) == meta.base
            if not is_completed and not is_accepted:
                raise LineageMismatchError(
                    f"Changes to version {meta.version} of {self._directory} apply to {meta.base}, but held here is "
                    f"version {self.version} ({self.head}). Open the store again."
                )

    def steps_to(self, version: int, head: str) -> list[Delta]:
        """Return the pending changes that lead from the completed version to the one that ``head`` made, at least one.

        Raises ``LineageMismatchError`` if they are not held here.
        """
        with self.changed:
            steps = self.pending.steps(self.head, version, head)
        if steps is None:
            raise LineageMismatchError(
                f"Version {version} ({head}) of {self._directory} does not follow the state that is held here, version "
                f"{self.version} ({self.head}). Load it from storage."
            )
        if not steps:
            raise LineageMismatchError(
                f"{head} made version {self.version} of {self._directory}, not version {version}. Load it from storage."
            )
        return steps

    def drop_unrelated(self) -> None:
        """Drop the pending changes that do not continue from the completed version."""
        with self.changed:
            self.pending.drop_unrelated(self.version, self.head)

    def newest(self) -> tuple[int, str | None]:
        """Return the version including all accepted changes, and its head."""
        with self.changed:
            steps = self.pending.accepted_above(self.version, self.head)
            return (steps[-1].meta.version, steps[-1].file.path) if steps else (self.version, self.head)

    def nbytes(self) -> int:
        """Return the memory of all changes over the engine."""
        with self.changed:
            return sum(layer.nbytes for layer in (*self.pending, *self._older))

    # -- reads ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self, version: int | None, head: str | None = None) -> Iterator[VersionView]:
        """Keep a version unchanged within the block. ``head``, if given, must have made the version."""
        reader = object()
        view = self.begin_read(reader, version, head)
        try:
            yield view
        finally:
            self.end_read(reader)

    def begin_read(self, reader: object, version: int | None, head: str | None) -> VersionView:
        """Return a view that does not change until ``end_read(reader)``. ``version`` None is the completed one.

        No lock is taken for the completed version: a writer first sets ``_completed`` and then looks for readers; a
        reader first registers and then checks ``_completed`` again. So one of the two sees the other. Raises
        ``VersionNotFoundError``, ``StoreClosedError``.
        """
        view = self._completed
        if view is not None and version in (None, view.version) and head in (None, view.head):
            self.readers[reader] = view.layers
            if self._completed is view:
                return view
            self.end_read(reader)
        with self.changed:
            self.changed.wait_for(lambda: not self.is_loading)
            self.check_open()
            view = self._view(self.version if version is None else version, head)
            self.readers[reader] = view.layers
            return view

    def end_read(self, reader: object) -> None:
        """Let the version that was read change."""
        del self.readers[reader]
        if self._num_waiting:  # a writer that begins to wait later looks at the readers after that
            with self.changed:
                self.changed.notify_all()

    def _wait_for_readers(self, may_stay: Callable[[tuple[Layer, ...]], bool]) -> None:
        """Wait, with the lock, until ``may_stay`` accepts the layers of all reads under way."""
        self._num_waiting += 1
        try:
            self.changed.wait_for(lambda: all(may_stay(layers) for layers in list(self.readers.values())))
        finally:
            self._num_waiting -= 1

    def _view(self, version: int, head: str | None) -> VersionView:
        layers: list[Layer] = [] if self._applying is None else [self._applying]
        families = self._engine.column_families.union(*(d.changes.families for d in layers))
        if version < self.version:
            for one in reversed(self._older):
                layers.append(one)
                if (one.version, one.head) == (version, head if head is not None else one.head):
                    return VersionView(version, tuple(layers), one.head, one.families)
            raise self._not_held(version, head)
        at = self.head
        for delta in self._steps_above(version, head):
            layers.append(delta)
            families = families.union(delta.changes.families)
            at = delta.file.path
        if head is not None and head != at:
            raise self._not_held(version, head)
        return VersionView(version, tuple(layers), at, families)

    def _steps_above(self, version: int, head: str | None) -> list[Delta]:
        """Return the deltas from the completed version to ``version``: the accepted ones, or, if these do not end in
        ``head``, those that do.

        The coordinator may already have accepted a repeated attempt, while the answer to its acknowledgement is still
        on its way.
        """
        wanted = version - self.version
        steps = self.pending.accepted_above(self.version, self.head)[:wanted]
        at = steps[-1].file.path if steps else self.head
        if len(steps) == wanted and head in (None, at):
            return steps
        if head is None:
            raise self._not_held(version, head)
        try:
            return self.steps_to(version, head)
        except LineageMismatchError as error:
            raise self._not_held(version, head) from error

    def _not_held(self, version: int, head: str | None) -> VersionNotFoundError:
        versions = sorted({*(u.version for u in self._older), self.version, *self.pending.accepted_versions()})
        return VersionNotFoundError(
            f"Version {version}{'' if head is None else f' ({head})'} of {self._directory} is not held here; "
            f"held: {', '.join(map(str, versions))} ({self.head})."
        )


def _drop(versions: ref[HeldVersions], one: ref[OlderVersion]) -> None:
    target, dropped = versions(), one()
    if target is not None and dropped is not None:
        target.drop_older(dropped)


def _not_dropped(older: list[OlderVersion]) -> list[OlderVersion]:
    """Return the older versions above the newest one that was dropped concurrently."""
    first = max((i + 1 for i, one in enumerate(older) if one.claim is not None and one.claim.is_dropped), default=0)
    return older[first:]


# The pairs that the stream has read last: mostly the same pairs that its next commit replaces.


@dataclass(frozen=True)
class _Read:
    """Bulk reads of one column family at a completed version, in ascending order of their keys up to ``last``.

    No ``parts`` if there were too many bytes.
    """

    head: str | None
    last: bytes
    parts: tuple[SortedPairs, ...] = ()
    claims: tuple[Claim, ...] = ()


class RecentReads:
    """The last bulk reads of each column family, up to ``max_bytes`` each, as long as ``memory`` can spare them.

    Kept from a task's read to its commit, or to the next version. Needs no lock: every read and write accesses one dict
    entry.
    """

    def __init__(self, max_bytes: int, memory: HostMemory) -> None:
        self._max_bytes = max_bytes
        self._memory = memory
        self._reads: dict[str, _Read] = {}

    def remember(self, head: str | None, column_family: str, read: SortedPairs) -> None:
        """Keep what was read at the version that ``head`` made.

        An operator reads in steps, in ascending order of the keys: pairs that follow the last read are added to it.
        """
        last_read, last = self._reads.get(column_family), read.keys[-1].as_py()
        follows = last_read is not None and last_read.head == head and last_read.last < read.keys[0].as_py()
        earlier = last_read if last_read is not None and follows else _Read(head, b"")
        nbytes = sum(c.nbytes for c in earlier.claims) + read.nbytes
        claim = None
        if (earlier.parts or not follows) and nbytes <= self._max_bytes:
            claim = self._memory.spare(LAST_READS, read.nbytes, partial(_forget, ref(self), column_family))
        if claim is None:  # a part of a read is useless, and so are the parts that follow
            self._reads[column_family] = _Read(head, last)
        else:
            self._reads[column_family] = _Read(head, last, (*earlier.parts, read), (*earlier.claims, claim))
            if any(c.is_dropped for c in (*earlier.claims, claim)):  # by another thread, which found nothing here
                self._reads[column_family] = _Read(head, last)

    def values(self, head: str | None, column_family: str, keys: pa.BinaryArray) -> pa.BinaryArray | None:
        """Return the values of sorted keys at the version that ``head`` made; None unless all of them were read."""
        read = self._reads.get(column_family)
        if read is None or read.head != head or not read.parts:
            return None
        read_keys = pa.concat_arrays([p.keys for p in read.parts])
        read_values = pa.concat_arrays([p.values for p in read.parts])
        if keys.equals(read_keys):
            return read_values
        at = SortedPairs(read_keys, read_values).find(keys)
        return read_values.take(pa.array(at)) if (at >= 0).all() else None

    def forget(self, column_family: str) -> None:
        """Drop the reads of a family: the task that has read it has committed, or the memory is needed."""
        self._reads.pop(column_family, None)

    def forget_others(self, head: str | None) -> None:
        """Drop the reads at other versions than the one that ``head`` made."""
        for family, read in list(self._reads.items()):
            if read.head != head:
                self._reads.pop(family, None)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return sum(claim.nbytes for read in list(self._reads.values()) for claim in read.claims)

    def clear(self) -> None:
        """Drop all reads."""
        self._reads.clear()


def _forget(reads: ref[RecentReads], column_family: str) -> None:
    recent = reads()
    if recent is not None:
        recent.forget(column_family)


# Counts the memory that a scan holds.


_FEW_BYTES = 64 << 10
"""Smaller batches are not counted: a task scans thousands of ranges with few pairs each, one after the other."""


def counted_scan(
    batches: Iterator[pa.RecordBatch], memory: HostMemory, changes: Claim | None
) -> Iterator[pa.RecordBatch]:
    """Return the batches of a scan; its last batch is counted, and ``changes`` as long as the scan lives."""
    last: Claim | None = None
    for batch in batches:
        if last is not None or batch.nbytes >= _FEW_BYTES:
            last = last or memory.note(SCANS, 0)
            memory.resize(last, batch.nbytes)
        yield batch


# Reads of one partition, each at one version: the engine's pairs with the layers of changes over them.


class VersionReads:
    """Reads the versions that a partition holds. All reads may run in many threads at once.

    ``get_ms`` is the time of the last ``get_many`` of a task, in milliseconds.
    """

    def __init__(
        self, context: PartitionContext, versions: HeldVersions, recent_reads: RecentReads, memory: HostMemory
    ) -> None:
        self._engine = context.engine
        self._directory = context.directory
        self._versions = versions
        self._recent_reads = recent_reads
        self._memory = memory
        self.get_ms = 0.0

    def get_many(
        self,
        keys: pa.Array | pa.ChunkedArray,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
        remember: bool = True,
    ) -> pa.BinaryArray:
        """Return the values at a version, in the order of ``keys``; null where a key has none. Sorted keys are fastest.

        ``version`` None is the last completed one. ``remember`` keeps the result, which may save the following commit a
        second look-up; queries, which no commit follows, pass False. Raises ``VersionNotFoundError`` if the version, or
        the one that the changelog ``head`` made, is not held.
        """
        started = time.perf_counter()
        keys = as_binary("keys", keys)
        if keys.null_count:
            raise InvalidStateStoreArgument(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
        reader = object()
        view = self._versions.begin_read(reader, version, head)
        try:
            self._check_family(column_family, view)
            values = self._engine.get_many(keys, column_family)
            if remember and not view.layers and len(keys) and is_strictly_sorted(keys):
                self._recent_reads.remember(view.head, column_family, SortedPairs(keys, values))
            for layer in view.layers:
                if column_family in layer.changes.families:
                    values = layer.changes.families[column_family].overlay(keys, values)
        finally:
            self._versions.end_read(reader)
        if remember:
            self.get_ms = (time.perf_counter() - started) * 1e3
        return values

    def get_one(
        self,
        key: bytes,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> bytes | None:
        """Return the value of one key at a version, None if it has none: ``get_many`` for one key, in microseconds."""
        versions = self._versions
        reader = object()
        view = versions.begin_read(reader, version, head)
        try:
            if column_family not in view.families:
                self._check_family(column_family, view)
            for layer in reversed(view.layers):
                pairs = layer.changes.families.get(column_family)
                if pairs is not None:
                    is_changed, value = pairs.get(key)
                    if is_changed:
                        return value
            return self._engine.get_one(key, column_family)
        finally:
            versions.end_read(reader)

    def scan(
        self,
        version: int | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Return batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order.

        Shows the version at the time of the call, however long the scan takes and whatever is committed during it.
        Raises ``HostMemoryError`` if there is no room for the changes over the engine.
        """
        return self.scan_ranges([(start, end)], version, column_family, head=head)[0]

    def scan_ranges(
        self,
        ranges: Sequence[tuple[bytes | None, bytes | None]],
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> list[Iterator[pa.RecordBatch]]:
        """Scan several ranges that do not overlap: all scans show the same moment. See ``scan``."""
        with self._versions.reading(version, head) as view:
            self._check_family(column_family, view)
            bases = [self._engine.scan(start, end, column_family) for start, end in ranges]
        only = ranges[0] if len(ranges) == 1 else (None, None)
        changes, claim = self._changes(view, column_family, lambda pairs: pairs.between(*only))
        return [
            counted_scan(merged_scan(base, changes.between(*bounds) if len(changes) else changes), self._memory, claim)
            for base, bounds in zip(bases, ranges, strict=True)
        ]

    def scan_in_turn(
        self,
        ranges: Sequence[KeyRange],
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Scan ascending ranges that do not overlap, one after the other; a batch may have pairs of many ranges.

        See ``scan``.
        """
        with self._versions.reading(version, head) as view:
            self._check_family(column_family, view)
            base = self._engine.scan_ranges(ranges, column_family)
        changes, claim = self._changes(view, column_family, lambda pairs: pairs.within(ranges))
        return counted_scan(merged_scan(base, changes), self._memory, claim)

    def _changes(
        self, view: VersionView, column_family: str, wanted: Callable[[SortedPairs], SortedPairs]
    ) -> tuple[SortedPairs, Claim | None]:
        """Return the changes of the wanted keys in the layers of a view, and the claim to their memory."""
        changes = SortedPairs.empty()
        for layer in view.layers:
            if column_family in layer.changes.families:
                changes = changes.under(wanted(layer.changes.families[column_family]))
        claim = self._memory.claim(SCANS, changes.nbytes, f"A scan of {self._directory}") if len(changes) else None
        return changes, claim

    def num_keys(self, version: int | None = None, *, head: str | None = None) -> int | None:
        """Return the exact number of keys of all column families at a version; None if it is unknown.

        Raises as ``get_many``.
        """
        with self._versions.reading(version, head) as view:
            return self.counted(view)

    def counted(self, view: VersionView) -> int | None:
        """Return the number of keys that a view shows; None if it is unknown."""
        if not view.layers:
            return self._engine.state.num_keys
        last = view.layers[-1]
        return last.num_keys if isinstance(last, OlderVersion) else None

    def column_families(self, version: int | None = None, *, head: str | None = None) -> frozenset[str]:
        """Return the names of the column families that exist at a version."""
        with self._versions.reading(version, head) as view:
            return view.families

    def _check_family(self, column_family: str, view: VersionView) -> None:
        if column_family not in view.families:
            raise InvalidStateStoreArgument(
                f"Column family {column_family!r} does not exist in {self._directory}; there are "
                f"{', '.join(sorted(view.families))}. Create it with create_column_family."
            )
