"""The state of one partition: RocksDB at a completed version, and the running batch's changes on top.

RocksDB holds the last completed version. Commits of the running batch are durable as changelogs and
stay beside it as deltas, so that rolling a batch back is dropping them, and a reader of the
completed version never sees them (DESIGN, section 4).
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from backends.changelog import DEFAULT_FAMILY, ChangelogMeta, Changes, changelog_name, read_changelog, write_changelog
from backends.conf import StateStoreConf
from backends.exceptions import (
    DamagedFileError,
    InvalidStateStoreArgument,
    LineageMismatchError,
    StoreClosedError,
    VersionNotFoundError,
)
from backends.manifest import FileRef
from backends.metrics import StateStoreMetrics
from backends.rocksdb_files import LocalRocksDB
from backends.scans import merged_scan
from backends.sorted_pairs import SortedPairs, as_binary
from backends.storage import CheckpointStorage

_counting = ThreadPoolExecutor(2, thread_name_prefix="statestore-count")


@dataclass(eq=False)
class _Delta:
    """One attempt's durable changes to a version."""

    meta: ChangelogMeta
    file: FileRef
    changes: Changes
    growth: Future[int] | None


@dataclass(frozen=True)
class _View:
    """A version as it is read: the deltas over RocksDB, oldest first, and the changelog that made the version."""

    deltas: tuple[_Delta, ...]
    head: str | None


@dataclass(frozen=True)
class _Read:
    """The last bulk read of a completed version: a batch mostly writes the very keys that it has read."""

    head: str | None
    column_family: str
    keys: pa.BinaryArray
    num_present: int


class PartitionState:
    """One partition's state. Reads and ``stage`` may run in many threads at once.

    ``directory`` is the partition's own below the state location
    (``operators/<operator>/<n>/<partition>/<store>``). What an earlier process left in ``local_dir``
    is used if ``load`` finds it in the lineage, and thrown away if not.
    Raises ``ConcurrentCommitError`` if ``local_dir`` is in use.

    How reads stay exact while versions advance: every read notes which deltas it lays over RocksDB.
    ``complete`` first makes the delta part of all new reads, then waits for the reads that do not
    have it, and only then writes it: whoever still reads has the changed keys from the delta itself.
    """

    def __init__(self, local_dir: Path, storage: CheckpointStorage, directory: str, conf: StateStoreConf) -> None:
        self._local_dir = Path(local_dir)
        self._storage = storage
        self._directory = directory
        self._conf = conf
        self._db = LocalRocksDB(self._local_dir, conf)
        self._version = self._db.state.version
        self._head = self._db.state.head
        self._staged: dict[tuple[int, str], _Delta] = {}
        self._accepted: dict[int, _Delta] = {}
        self._applying: _Delta | None = None
        self._loading = False
        self._closed = False
        self._last_read: _Read | None = None
        self._readers: dict[object, tuple[_Delta, ...]] = {}
        self._changed = threading.Condition()
        self._mutation = threading.Lock()
        self._custom = {"bytes_written": 0.0, "load_ms": 0.0, "apply_ms": 0.0, "stage_ms": 0.0, "get_ms": 0.0}

    @property
    def version(self) -> int:
        """The last completed version here."""
        return self._version

    @property
    def head(self) -> str | None:
        """The path of the changelog that made it; None for the empty version 0."""
        return self._head

    # -- versions ------------------------------------------------------------------------------

    def load(self, chain: Sequence[tuple[int, FileRef]]) -> None:
        """Bring the state to the last version of ``chain``, which begins at the first changelog and ascends.

        Goes on from what is held if that is part of the chain, else starts over. Files are fetched in
        parallel and checked; one that is missing, damaged or exchanged raises
        (``MissingFileError``, ``DamagedFileError``), and the state stays at the version before it.
        Reads wait meanwhile. Pending changes that do not follow from the loaded version are dropped.
        """
        started = time.perf_counter()
        with self._mutation:
            self._check_open()
            if chain and (self._version, self._head) == (chain[-1][0], chain[-1][1].path):
                return
            with self._changed:
                self._loading = True
                self._changed.wait_for(lambda: not self._readers)
            try:
                self._replay(chain)
            finally:
                with self._changed:
                    self._drop_unrelated()
                    self._loading = False
                    self._changed.notify_all()
            self._custom["load_ms"] = (time.perf_counter() - started) * 1e3

    def _replay(self, chain: Sequence[tuple[int, FileRef]]) -> None:
        done = next((i + 1 for i, (v, ref) in enumerate(chain) if (v, ref.path) == (self._version, self._head)), 0)
        if done == 0 and self._head is not None:
            self._db.clear()
            self._version, self._head = 0, None
        rest = chain[done:]
        with ThreadPoolExecutor(self._conf.load_threads, thread_name_prefix="statestore-load") as pool:
            # A window bounds what is held in memory of a long chain.
            window = self._conf.load_threads * 2
            reads = [pool.submit(self._storage.read, ref) for _, ref in rest[:window]]
            try:
                for i, (version, ref) in enumerate(rest):
                    data = reads[i % window].result()
                    if i + window < len(rest):
                        reads[i % window] = pool.submit(self._storage.read, rest[i + window][1])
                    self._replay_one(version, ref, data)
            finally:
                for read in reads:
                    read.cancel()

    def _replay_one(self, version: int, ref: FileRef, data: bytes) -> None:
        name = self._storage.full_location(ref.path)
        meta, changes = read_changelog(data, name)
        if meta.version != version or meta.base != self._head:
            raise DamagedFileError(
                f"{name} holds version {meta.version} on top of {meta.base}, but version {version} on top of "
                f"{self._head} is needed here: files have been exchanged. Restore them from a copy."
            )
        growth = self._db.growth(changes) if self._conf.track_total_number_of_rows else None
        self._db.apply(changes, version, ref.path, growth)
        self._version, self._head = version, ref.path

    def complete(self, version: int, head: str) -> None:
        """Apply held changes up to those whose changelog is ``head``: the version is committed for good.

        Nothing happens if the state is there already. Raises ``LineageMismatchError`` if the changes are
        not held here, or do not follow from the version that is: load it from storage.
        """
        with self._mutation:
            self._check_open()
            if (self._version, self._head) == (version, head):
                return
            for delta in self._steps_to(version, head):
                self._apply(delta)
            with self._changed:
                self._drop_unrelated()

    def _steps_to(self, version: int, head: str) -> list[_Delta]:
        with self._changed:
            held = {d.file.path: d for d in (*self._staged.values(), *self._accepted.values())}
        steps: list[_Delta] = []
        wanted: str | None = head
        while wanted != self._head:
            delta = held.pop(wanted, None) if wanted is not None else None
            if delta is None or (not steps and delta.meta.version != version):
                raise LineageMismatchError(
                    f"Version {version} ({head}) of {self._directory} does not follow from what is held here, version "
                    f"{self._version} ({self._head}). Load it from storage."
                )
            steps.insert(0, delta)
            wanted = delta.meta.base
        if not steps:
            raise LineageMismatchError(
                f"{head} made version {self._version} of {self._directory}, not version {version}. Load it from storage."
            )
        return steps

    def _apply(self, delta: _Delta) -> None:
        started = time.perf_counter()
        growth = self._growth_of(delta)
        before = self._version, self._head
        with self._changed:
            self._applying = delta
            self._version, self._head = delta.meta.version, delta.file.path
            self._changed.wait_for(lambda: all(delta in deltas for deltas in self._readers.values()))
        try:
            self._db.apply(delta.changes, delta.meta.version, delta.file.path, growth)
        except BaseException:
            with self._changed:
                self._version, self._head = before
            raise
        finally:
            with self._changed:
                self._applying = None
        self._custom["apply_ms"] = (time.perf_counter() - started) * 1e3

    def _drop_unrelated(self) -> None:
        """Forget pending changes that do not lead on from the completed version."""
        follows = {self._head}
        for delta in sorted((*self._staged.values(), *self._accepted.values()), key=lambda d: d.meta.version):
            if delta.meta.version > self._version and delta.meta.base in follows:
                follows.add(delta.file.path)
        self._staged = {k: d for k, d in self._staged.items() if d.file.path in follows and k[0] > self._version}
        self._accepted = {v: d for v, d in self._accepted.items() if d.file.path in follows and v > self._version}

    # -- the running batch ---------------------------------------------------------------------

    def stage(self, meta: ChangelogMeta, changes: Changes) -> FileRef:
        """Make an attempt's changes durable and keep them, invisible until accepted.

        Raises ``LineageMismatchError`` if ``meta.base`` is not held here as the version below.
        """
        started = time.perf_counter()
        with self._changed:
            self._check_open()
            accepted = self._accepted.get(meta.version - 1)
            follows_completed = (meta.version - 1, meta.base) == (self._version, self._head)
            if not follows_completed and (accepted is None or accepted.file.path != meta.base):
                raise LineageMismatchError(
                    f"Changes to version {meta.version} of {self._directory} apply to {meta.base}, but held here is "
                    f"version {self._version} ({self._head}). Open the store again."
                )
        growth = None
        if follows_completed and self._conf.track_total_number_of_rows:
            # Counted while the file is written; only applying the changes needs the result.
            growth = _counting.submit(self._count, meta, changes)
        path = f"{self._directory}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        ref = self._storage.put_new(path, write_changelog(changes, meta, self._conf.compression))
        with self._changed:
            self._staged[(meta.version, meta.attempt)] = _Delta(meta, ref, changes, growth)
            self._custom["bytes_written"] += ref.size
            self._custom["stage_ms"] = (time.perf_counter() - started) * 1e3
        return ref

    def _count(self, meta: ChangelogMeta, changes: Changes) -> int:
        with self._reading(meta.version - 1, meta.base):
            read = self._last_read
            if read is not None and read.head == meta.base and set(changes.families) == {read.column_family}:
                pairs = changes.families[read.column_family]
                if pairs.keys.equals(read.keys):
                    return len(pairs) - int(pairs.values.null_count) - read.num_present
            return self._db.growth(changes)

    def _growth_of(self, delta: _Delta) -> int | None:
        if not self._conf.track_total_number_of_rows:
            return None
        if delta.growth is not None:
            try:
                return delta.growth.result()
            except VersionNotFoundError:
                # The version below was being loaded, rolled back, or had moved on before counting began.
                pass
        return self._db.growth(delta.changes)

    def accept(self, version: int, attempt: str) -> None:
        """An attempt has been acknowledged: it is what readers of ``version`` see, and replaces any before it.

        Raises ``LineageMismatchError`` if nothing of that attempt is held.
        """
        with self._changed:
            delta = self._staged.pop((version, attempt), None)
            if delta is None:
                held = self._accepted.get(version)
                if held is not None and held.meta.attempt == attempt:
                    return
                raise LineageMismatchError(
                    f"No changes of attempt {attempt!r} to version {version} of {self._directory} are held here; held "
                    f"are version {self._version} and the attempts {self._pending_names()}."
                )
            self._accepted[version] = delta

    def discard(self, version: int, attempt: str) -> None:
        """Drop an attempt's staged changes; if there are none, its accepted ones. No error if it has neither."""
        with self._changed:
            if self._staged.pop((version, attempt), None) is not None:
                return
            accepted = self._accepted.get(version)
            if accepted is not None and accepted.meta.attempt == attempt:
                del self._accepted[version]

    def pending(self) -> list[tuple[ChangelogMeta, FileRef, bool]]:
        """Changes held over the completed version, and whether they are accepted; in the order of versions."""
        with self._changed:
            held = [(d.meta, d.file, False) for d in self._staged.values()]
            held += [(d.meta, d.file, True) for d in self._accepted.values()]
        return sorted(held, key=lambda entry: entry[0].version)

    def _pending_names(self) -> str:
        return ", ".join(f"{m.version}:{m.attempt}" for m, _, _ in self.pending()) or "none"

    # -- reads ---------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, version: int | None, head: str | None = None) -> Iterator[_View]:
        """What makes up a version, kept as it is while it is read. ``head``, if given, must have made it."""
        token = object()
        with self._changed:
            self._changed.wait_for(lambda: not self._loading)
            self._check_open()
            view = self._view(self._version if version is None else version, head)
            self._readers[token] = view.deltas
        try:
            yield view
        finally:
            with self._changed:
                del self._readers[token]
                self._changed.notify_all()

    def _view(self, version: int, head: str | None) -> _View:
        deltas = [] if self._applying is None else [self._applying]
        at = self._head
        for v in range(self._version + 1, version + 1):
            delta = self._accepted.get(v)
            if delta is None or delta.meta.base != at:
                break
            deltas.append(delta)
            at = delta.file.path
        reached = self._version if not deltas else deltas[-1].meta.version
        if reached != version or (head is not None and head != at):
            held = sorted({self._version, *self._accepted})
            raise VersionNotFoundError(
                f"Version {version}{'' if head is None else f' ({head})'} of {self._directory} is not held here; "
                f"held: {', '.join(map(str, held))} ({self._head})."
            )
        return _View(tuple(deltas), at)

    def get_many(
        self,
        keys: pa.Array | pa.ChunkedArray,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> pa.BinaryArray:
        """Values at a version, in the order of ``keys``; null where a key has none. Sorted keys are fastest.

        ``version`` None is the last completed one. Raises ``VersionNotFoundError`` if the version, or the
        one that the changelog ``head`` made, is not held.
        """
        started = time.perf_counter()
        keys = as_binary("keys", keys)
        if keys.null_count:
            raise InvalidStateStoreArgument(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
        with self._reading(version, head) as view:
            self._check_family(column_family, view)
            values = self._db.get_many(keys, column_family)
            if not view.deltas and self._conf.track_total_number_of_rows:
                self._last_read = _Read(view.head, column_family, keys, len(values) - values.null_count)
            for delta in view.deltas:
                if column_family in delta.changes.families:
                    values = delta.changes.families[column_family].overlay(keys, values)
        self._custom["get_ms"] = (time.perf_counter() - started) * 1e3
        return values

    def scan(
        self,
        version: int | None = None,
        start: bytes | None = None,
        end: bytes | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Batches of ``key`` and ``value`` from ``start`` (included) to ``end`` (not included), in key order.

        Shows the version as it is at the call, however long it takes and whatever is committed meanwhile.
        """
        with self._reading(version, head) as view:
            self._check_family(column_family, view)
            base = self._db.scan(start, end, column_family)
        changes = SortedPairs.empty()
        for delta in view.deltas:
            if column_family in delta.changes.families:
                changes = changes.under(delta.changes.families[column_family].between(start, end))
        return merged_scan(base, changes)

    def column_families(self, version: int | None = None, *, head: str | None = None) -> frozenset[str]:
        """The names of the column families that exist at a version."""
        with self._reading(version, head) as view:
            return self._families(view)

    def _families(self, view: _View) -> frozenset[str]:
        return self._db.column_families.union(*(d.changes.families for d in view.deltas))

    def _check_family(self, column_family: str, view: _View) -> None:
        families = self._families(view)
        if column_family not in families:
            raise InvalidStateStoreArgument(
                f"There is no column family {column_family!r} in {self._directory}; there are "
                f"{', '.join(sorted(families))}. Create it with create_column_family."
            )

    # -- life ----------------------------------------------------------------------------------

    def metrics(self) -> StateStoreMetrics:
        """Figures of this partition: times in ms are those of the last call of each kind."""
        with self._changed:
            self._check_open()
            custom = dict(self._custom)
            pending = (*self._staged.values(), *self._accepted.values())
            held = sum(pairs.nbytes for d in pending for pairs in d.changes.families.values())
            return StateStoreMetrics(self._db.num_keys(), self._db.memory_bytes() + held, custom)

    def close(self) -> None:
        """Close RocksDB once the reads under way have ended; scans under way end with an error. Files stay."""
        with self._mutation, self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._readers)
            self._staged.clear()
            self._accepted.clear()
            self._db.close()

    def destroy(self) -> None:
        """Close, and remove the local files. The durable ones stay."""
        self.close()
        if self._local_dir.exists():
            shutil.rmtree(self._local_dir)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"The state of {self._directory} is closed here: open it again.")
