"""The interface of a backend's engine, which holds the pairs of one partition at one version; and buffered engines.

Everything else (changelogs, manifests, pending changes, older versions, snapshots in the storage, maintenance) is
shared. A new backend is an engine and a provider class that names the engine; see ``rocksdb.py``.
"""

from __future__ import annotations

import errno
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.sorted_pairs import SortedPairs, merged_scan
from backends.engines.sorted_map_engine import SortedMap, SortedMapScan
from backends.exceptions import InvalidStateStoreArgument, LocalDiskFullError
from backends.formats.changelog import Changes
from backends.formats.local_state import LocalState
from backends.host_memory import PEAK_OF_COPY, Claim, host_memory


class StateEngine(Protocol):
    """One version of the pairs. Reads may run in many threads; writes are serialised and exclude reads.

    Scans are the exception: a scan shows the pairs as they were at its call, whatever is written while it is consumed.
    """

    def __init__(self, path: Path, conf: StateStoreConf) -> None:
        """Open the engine. Local files, if it has any, are in the directory ``path``, which no other engine uses."""

    @property
    def state(self) -> LocalState:
        """The state that the engine holds. A new engine has that of an earlier process if it opens its local files."""

    @property
    def column_families(self) -> frozenset[str]:
        """The names of the column families, "default" among them."""

    def get_many(self, keys: pa.BinaryArray, column_family: str, *, keep: bool = True) -> pa.BinaryArray:
        """Return the values in the order of ``keys``, which need not be sorted.

        The value is null if the key or the family does not exist. ``keep`` False: the keys are unlikely to be read
        again, so a cache need not make room for them.
        """

    def get_one(self, key: bytes, column_family: str) -> bytes | None:
        """Return the value of one key; None if the key or the family does not exist."""

    def scan(self, start: bytes | None, end: bytes | None, column_family: str) -> Iterator[pa.RecordBatch]:
        """Return batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order."""

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str) -> Iterator[pa.RecordBatch]:
        """Return the pairs of ascending, non-overlapping ranges, one range after the other. See ``scan``.

        There may be thousands of ranges with few pairs each, or none: a batch has those of many of them.
        """

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Prepare changes, in any thread and concurrently with reads and writes. Return the function that writes them.

        The function takes the state after the changes. It may be called much later, or never. After a crash the engine
        has all changes, none of them, or the state ``LocalState.unfinished``, which no load can continue. While the
        function writes, other keys may be read.
        """

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Write the pairs of column families into an empty engine, faster than ``prepare``.

        Each key comes once, and none is removed. The engine then holds ``unfinished``, which no load can continue,
        until a later write sets its state.
        """

    def capture(self, directory: Path) -> Callable[[], None]:
        """Begin a snapshot of the engine's content in ``directory``, which exists.

        The call is quick. The returned function may take long, runs concurrently with writes, and leaves the snapshot's
        files in ``directory``.
        """

    def restore(self, directory: Path) -> None:
        """Replace everything with the files that ``capture`` made; they, or ``directory`` itself, may be moved away.

        Raises ``DamagedFileError`` or ``LocalStateDamagedError`` if the files are not usable; the engine is empty then.
        """

    def num_keys(self) -> int:
        """Return the number of keys of all families; an estimate if keys are not counted."""

    def memory_bytes(self) -> int:
        """Return the bytes of memory that this engine alone holds."""

    def num_files(self) -> int:
        """Return the number of local files that hold the pairs."""

    def clear(self) -> None:
        """Start over with the empty version 0."""

    def close(self) -> None:
        """Release everything; scans under way end with ``StoreClosedError``. Local files stay."""


# The engine that a configuration names. Hosts and readers need the engine only, and no provider.


@dataclass(frozen=True)
class BackendEngine:
    """The name of a backend, as snapshots record it, and its engine.

    ``opens_slowly``: opening the engine for writing takes so long that a host defers it until it has something to write
    (``DeferredEngine``).
    """

    name: str
    engine: type[StateEngine]
    opens_slowly: bool


def backend_of(conf: StateStoreConf) -> BackendEngine:
    """Return the name and the engine of the provider that ``conf`` names.

    Raises ``InvalidStateStoreArgument`` if the provider has no engine.
    """
    provider = conf.provider_class()
    name, engine = getattr(provider, "backend", None), getattr(provider, "engine", None)
    if not isinstance(name, str) or not isinstance(engine, type):
        raise InvalidStateStoreArgument(
            f"provider={conf.provider!r} names {provider.__name__}, which is not a LocalStateStoreProvider: "
            "a host needs its engine."
        )
    return BackendEngine(name, engine, bool(getattr(provider, "opens_slowly", False)))


# Detects a full disk of the local copies by the errors that files and engines raise.


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_MESSAGES = ("No space left on device", "Disk quota exceeded")
"""Messages of the operating system for these errors. Engines raise errors that have the message but no number."""


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, says that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if any(message in str(error) for message in _FULL_MESSAGES):
            return True
        error = error.__cause__
    return False


def disk_full(path: Path, error: BaseException) -> LocalDiskFullError:
    """Return the error for a full disk. ``path`` is on that disk, and may not exist yet."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    usage, mib = shutil.disk_usage(existing), 1 << 20
    return LocalDiskFullError(
        f"The disk of {path} is full: {usage.free / mib:.1f} of {usage.total / mib:.1f} MiB are free ({error}). Make "
        "room there, or keep local copies on a larger disk: those of a host are in Ray's session directory (ray start "
        "--temp-dir)."
    )


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Raise ``LocalDiskFullError`` in place of any error of the block that says that the disk of ``path`` is full."""
    try:
        yield
    except LocalDiskFullError:
        raise
    except Exception as error:
        if is_full_disk(error):
            raise disk_full(path, error) from error
        raise


# Engines that buffer changes in memory, over the backend's own engine, which has the pairs of a snapshot.
#
# ``BufferedEngine`` serves a copy that is read once. A database that replays changelogs sorts each changelog by itself,
# for one read a moment later. Here the first read sorts all changelogs together.
#
# ``DeferredEngine`` serves a host's partition that was just loaded. Opening a database for writing takes twenty times
# as long as the rest of a small load, so it is deferred until there are enough changes to write.


BUFFERED_CHANGES_BYTES = 128 << 20
"""A copy that buffers more bytes of changes than this writes them to the underlying engine."""
UNWRITTEN_BYTES = 256 << 10
"""A host's partition that buffers more bytes than this writes them to the underlying engine: all reads merge buffered
changes, and buffered changes leave less memory for batches.
"""
GATHERED_BYTES = 8 << 20
"""A host's partition that gathers changes of the same keys writes them when they have more bytes than this."""
SAMPLED_KEYS = 64
"""A partition looks for this many keys of its last version to see whether the next one changes them again."""


@dataclass(frozen=True)
class _Buffer:
    """The changes over the underlying engine. Immutable: a reader keeps the object that it began with.

    ``is_over_pairs``: whether the underlying engine may have pairs. If not, keys that are removed need not be
    remembered.
    """

    is_over_pairs: bool
    unmerged: tuple[Changes, ...] = ()
    maps: Mapping[str, SortedMap] = field(default_factory=dict)
    nbytes: int = 0
    claims: tuple[Claim, ...] = ()

    @property
    def families(self) -> frozenset[str]:
        """The column families of the changes."""
        return frozenset(self.maps).union(*(changes.families for changes in self.unmerged))

    def with_more(self, changes: Changes, claim: Claim) -> _Buffer:
        """Return these changes with ``changes`` on top of them."""
        nbytes = self.nbytes + changes.nbytes
        return replace(self, unmerged=(*self.unmerged, changes), nbytes=nbytes, claims=(*self.claims, claim))

    def of(self, family: str) -> SortedMap:
        """Return the changes of a family, all of them merged."""
        return self.maps.get(family) or SortedMap(keeps_removed=self.is_over_pairs)

    def merged(self) -> _Buffer:
        """Return the same changes, all of them merged."""
        families = Changes.together(self.unmerged).families
        if len(self.unmerged) == 1:
            # The pairs may be slices of a whole changelog or message, which the claims do not count.
            families = {family: pairs.compact() for family, pairs in families.items()}
        maps = {**self.maps, **{family: self.of(family).with_changes(pairs) for family, pairs in families.items()}}
        nbytes, claims = sum(family_map.nbytes for family_map in maps.values()), self.claims
        # Merged changes may take less memory: give up the claims that they do not need.
        while len(claims) > 1 and sum(claim.nbytes for claim in claims[1:]) >= PEAK_OF_COPY * nbytes:
            claims = claims[1:]
        return replace(self, unmerged=(), maps=maps, nbytes=nbytes, claims=claims)


class BufferedEngine:
    """The engine of the backend that ``conf`` names, with changes buffered over it; see ``StateEngine``.

    It holds only changes of keys from ``start`` (included) to ``end`` (not included); other keys are never read. If
    ``host_memory`` has no room for more changes of copies, the changes go into the underlying engine.

    A reader takes the buffered changes first, and then reads the underlying engine. Changes that are flushed in between
    appear in both.
    """

    def __init__(self, path: Path, conf: StateStoreConf, start: bytes | None = None, end: bytes | None = None) -> None:
        self._below: StateEngine = backend_of(conf).engine(path, conf)
        self._memory = host_memory(conf)
        self._range = (start, end)
        self._changing = threading.Lock()
        """Guards the replacement of ``_buffer``, by a write and by a reader that merges it. Held only briefly."""
        self._scans: weakref.WeakSet[SortedMapScan] = weakref.WeakSet()
        self._begin_with(self._below.state)

    def _begin_with(self, state: LocalState) -> None:
        with self._changing:
            self._buffer = _Buffer(is_over_pairs=state != LocalState())
        self.state = state

    def _max_buffered(self, changes: Changes) -> int:
        """Return the limit of buffered changes with ``changes`` among them, in bytes; -1 if nothing is buffered."""
        return BUFFERED_CHANGES_BYTES

    @property
    def column_families(self) -> frozenset[str]:
        return self._buffer.families | self._below.column_families

    def get_many(
        self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY, *, keep: bool = True
    ) -> pa.BinaryArray:
        changes = self._changes(column_family)
        return changes.get_or_read(keys, lambda others: self._below.get_many(others, column_family, keep=keep))

    def get_one(self, key: bytes, column_family: str = DEFAULT_FAMILY) -> bytes | None:
        is_changed, value = self._changes(column_family).find(key)
        return value if is_changed else self._below.get_one(key, column_family)

    def scan(
        self, start: bytes | None, end: bytes | None, column_family: str = DEFAULT_FAMILY
    ) -> Iterator[pa.RecordBatch]:
        changes = self._changes(column_family)
        below = self._below.scan(start, end, column_family)
        if not changes.runs:
            return below
        is_over = changes.keeps_removed
        scan = SortedMapScan(merged_scan(below, changes.between(start, end)) if is_over else changes.scan(start, end))
        self._scans.add(scan)
        return scan

    def scan_ranges(self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY) -> Iterator[pa.RecordBatch]:
        changes = self._changes(column_family)
        below = self._below.scan_ranges(ranges, column_family)
        if not changes.runs:
            return below
        scan = SortedMapScan(merged_scan(below, changes.within(ranges)))
        self._scans.add(scan)
        return scan

    def _changes(self, column_family: str) -> SortedMap:
        """Return the changes of a family, merged."""
        buffer = self._buffer
        if buffer.unmerged:
            with self._changing:
                buffer = self._buffer = self._buffer.merged()
        return buffer.of(column_family)

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        return lambda state: self._add(changes, state)

    def _add(self, changes: Changes, state: LocalState) -> None:
        new = Changes({family: self._of_range(pairs) for family, pairs in changes.families.items()})
        max_bytes = self._max_buffered(new)
        if self._buffer.nbytes + new.nbytes > max_bytes:
            self._write_below()
        claim = self._claim(new.nbytes) if new.nbytes <= max_bytes else None
        if claim is None:
            self._write_below()
            self._write(new, state)
            return
        self._buffer_more(new, claim)
        self.state = state

    def _claim(self, nbytes: int) -> Claim | None:
        return self._memory.claim_copy(nbytes)

    def _buffer_more(self, changes: Changes, claim: Claim) -> None:
        with self._changing:
            self._buffer = self._buffer.with_more(changes, claim)

    def _of_range(self, pairs: SortedPairs) -> SortedPairs:
        if self._range == (None, None):
            return pairs
        cut = pairs.between(*self._range)
        return cut if len(cut) == len(pairs) else cut.compact()  # a slice would keep the whole changelog in memory

    def _write_below(self) -> None:
        """Flush all changes to the underlying engine."""
        if not self._buffer.families and self.state == self._below.state:
            return
        self._changes(DEFAULT_FAMILY)
        self._write(
            Changes({f: family_map.between(None, None) for f, family_map in self._buffer.maps.items()}), self.state
        )

    def _write(self, changes: Changes, state: LocalState) -> None:
        """Write changes to the underlying engine. Afterwards nothing is buffered."""
        with self._reset_on_damage():
            self._below.prepare(changes)(state)
        self._begin_with(state)

    @contextmanager
    def _reset_on_damage(self) -> Iterator[None]:
        """Take over the underlying engine's state if a block fails and changes it: the partition needs a load then."""
        before = self._below.state
        try:
            yield
        except BaseException:
            if self._below.state != before:
                self._begin_with(self._below.state)
            raise

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        try:
            self._below.load_sorted(parts, unfinished)
        finally:
            self._begin_with(self._below.state)

    def capture(self, directory: Path) -> Callable[[], None]:
        self._write_below()
        with self._reset_on_damage():  # the first open for writing detects damage
            return self._below.capture(directory)

    def restore(self, directory: Path) -> None:
        try:
            self._below.restore(directory)
        finally:
            self._begin_with(self._below.state)

    def num_keys(self) -> int:
        if self.state.num_keys is not None:
            return self.state.num_keys
        buffer = self._buffer
        unmerged = sum(len(pairs) for changes in buffer.unmerged for pairs in changes.families.values())
        return self._below.num_keys() + unmerged + sum(len(run) for of in buffer.maps.values() for run in of.runs)

    def memory_bytes(self) -> int:
        """Return the bytes of memory of the underlying engine and of the changes."""
        return self._below.memory_bytes() + self._buffer.nbytes

    def num_files(self) -> int:
        return self._below.num_files()

    def clear(self) -> None:
        self._below.clear()
        self._begin_with(LocalState())

    def close(self) -> None:
        self._below.close()
        for scan in list(self._scans):
            scan.close()
        self._begin_with(LocalState())


class DeferredEngine(BufferedEngine):
    """The engine of a host's partition.

    Changes stay in memory until the first snapshot, or ``UNWRITTEN_BYTES``. From then on they go into the underlying
    engine, except for changes that mostly replace those of the version before: of these, ``GATHERED_BYTES`` stay in
    memory, so that a key that changes in every version is written once for many of them. The next snapshot, or changes
    of other keys, end that.

    If the process ends before, changelogs have the buffered changes, as for a database that has not written its memory
    to files. If ``host_memory`` has no room, nothing is buffered.
    """

    _sample: tuple[str, pa.BinaryArray, int] | None = None
    """A family, some of the keys that the last version has changed there, and their number."""

    def _begin_with(self, state: LocalState) -> None:
        super()._begin_with(state)
        # An unfinished engine buffers nothing. Either it rejects changes, or they complete its version.
        self._is_written = state.is_unfinished

    def _max_buffered(self, changes: Changes) -> int:
        if not self._is_written:
            return UNWRITTEN_BYTES
        return GATHERED_BYTES if self._replace_the_last(changes) else -1

    def _replace_the_last(self, changes: Changes) -> bool:
        """Return whether changes have at least half of the keys that the last version has changed, and few others."""
        if self._sample is None:
            return False
        family, keys, num_keys = self._sample
        pairs = changes.families.get(family)
        if pairs is None or not 0 < len(pairs) <= 2 * num_keys or self.state.is_unfinished:
            return False
        return bool(2 * np.count_nonzero(pairs.find(keys) >= 0) >= len(keys))

    def _note_keys(self, changes: Changes) -> None:
        family, pairs = max(changes.families.items(), key=lambda of: len(of[1]), default=("", SortedPairs.empty()))
        if len(pairs):
            positions = np.linspace(0, len(pairs) - 1, min(len(pairs), SAMPLED_KEYS), dtype=int)
            self._sample = family, pairs.keys.take(pa.array(positions)), len(pairs)

    def prepare(self, changes: Changes) -> Callable[[LocalState], None]:
        """Return a function that buffers the changes, or writes them."""
        if not self._is_written or self._replace_the_last(changes):
            return super().prepare(changes)
        write = self._below.prepare(changes)
        return lambda state: self._apply(changes, write, state)

    def _apply(self, changes: Changes, write: Callable[[LocalState], None], state: LocalState) -> None:
        if not self._is_written:  # the engine was reloaded since, and buffers changes
            self._add(changes, state)
            return
        self._write_below()
        try:
            write(state)
        finally:
            self.state = self._below.state
        self._note_keys(changes)

    def _add(self, changes: Changes, state: LocalState) -> None:
        super()._add(changes, state)
        self._note_keys(changes)

    def _claim(self, nbytes: int) -> Claim | None:
        return self._memory.claim_copy(nbytes, is_optional=self._is_written)

    def _buffer_more(self, changes: Changes, claim: Claim) -> None:
        """Merge gathered changes at once, in the thread that completes a version: reads then need not wait for it."""
        buffer = self._buffer.with_more(changes, claim)
        if self._is_written:
            buffer = buffer.merged()
        with self._changing:
            self._buffer = buffer

    def _write(self, changes: Changes, state: LocalState) -> None:
        super()._write(changes, state)
        self._is_written = True

    def load_sorted(self, parts: Iterable[tuple[str, SortedPairs]], unfinished: LocalState) -> None:
        """Load pairs into the underlying engine.

        All later changes go there too, including those that lead to its version.
        """
        super().load_sorted(parts, unfinished)
        self._is_written = True

    def capture(self, directory: Path) -> Callable[[], None]:
        """Begin a snapshot of the underlying engine, with all changes."""
        captured = super().capture(directory)
        self._is_written = True
        return captured

    def write_gathered(self) -> None:
        """Write gathered changes: the local files then have the last version."""
        if self._is_written:
            self._write_below()
