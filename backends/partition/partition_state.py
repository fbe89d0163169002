"""The state of one partition: an engine at the completed version, with the running batch's changes on top.

The engine (RocksDB, say) holds the last completed version. Commits of the running batch are durable as changelogs and
stay beside the engine as deltas. So a batch is rolled back by dropping its deltas, and a reader of the completed
version never sees them. For the versions just before it, the before-images of what changed are kept, so that those
versions are read as fast as the newest.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa

from backends import fault_points
from backends.conf import StateStoreConf
from backends.encoding.keys import KeyRange
from backends.encoding.merged_scan import merged_scan
from backends.encoding.sorted_pairs import SortedPairs, as_binary, is_strictly_sorted
from backends.engines.backend import backend_of
from backends.engines.buffered_engine import BufferedEngine
from backends.engines.engine import StateEngine
from backends.engines.full_disk import writing_to
from backends.exceptions import InvalidStateStoreArgument, LineageMismatchError
from backends.formats.changelog import ChangelogMeta, Changes, write_changelog
from backends.formats.file_names import changelog_name
from backends.formats.manifest import Lineage, SnapshotRef
from backends.formats.snapshot import PreparedSnapshot, StoredSnapshot, store_together
from backends.host_memory import CHANGELOGS, KEPT_OF_COMMIT, SCANS, STAGED, host_memory
from backends.ids import DEFAULT_FAMILY
from backends.metrics import StateStoreMetrics
from backends.partition import background
from backends.partition.before_images import BeforeImages
from backends.partition.context import PartitionContext
from backends.partition.counted_scan import counted_scan
from backends.partition.held_versions import HeldVersions
from backends.partition.layers import Delta, Undo, VersionView
from backends.partition.load_watch import LoadWatch
from backends.partition.loading import Loading
from backends.partition.local_directory import LocalDirectory
from backends.partition.recent_reads import RecentReads
from backends.partition.snapshot_uploads import SnapshotUploads
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef

log = logging.getLogger(__name__)

WriteChangelog = Callable[[CheckpointStorage, ChangelogMeta, str, bytes], FileRef]
"""Stores the bytes of a changelog under a name that never existed."""


def put_changelog(storage: CheckpointStorage, meta: ChangelogMeta, path: str, data: bytes) -> FileRef:
    """Store a changelog as a file of its own."""
    return storage.put_unique(path, data)


class PartitionState:
    """One partition's state. Reads, ``stage`` and ``snapshot`` may run in many threads at once.

    ``directory`` is the partition's own below the state location, see ``Layout.directory``. What an earlier process
    left in ``local_dir`` is used if ``load`` finds it in the lineage, and thrown away if not. Raises
    ``ConcurrentCommitError`` if ``local_dir`` is in use.

    There are three locks, in the order in which they are taken. The lock of ``SnapshotUploads`` is held for a whole
    upload. ``_mutation`` is held for ``load``, ``complete``, the capture of a snapshot and ``close``, so that one of
    them at a time uses the engine. The lock of ``HeldVersions`` is held for moments, also for the figures here that add
    up.
    """

    def __init__(
        self,
        local_dir: Path,
        storage: CheckpointStorage,
        directory: str,
        conf: StateStoreConf,
        backend: str,
        engine: type[StateEngine],
    ) -> None:
        self._local = LocalDirectory(Path(local_dir))
        try:
            self._local.scratch.clear()
            self._engine: StateEngine = engine(self._local.engine, conf)
        except BaseException:
            self._local.unlock()
            raise
        self._storage = storage
        self._directory = directory
        self._conf = conf
        self._context = PartitionContext(self._engine, backend, storage, directory, conf, self._local.scratch)
        self._mutation = threading.Lock()
        self._memory = host_memory(conf)
        self._versions = HeldVersions(self._engine, directory, conf, self._memory)
        self._recent_reads = RecentReads(conf.versions_in_memory_bytes, self._memory)
        self._before_images = BeforeImages(self._engine, conf, self._versions, self._recent_reads, self._memory)
        self._uploads = SnapshotUploads(self._context, self._versions, self._mutation)
        self._figures = dict.fromkeys(
            (
                "bytes_written",
                "snapshot_bytes_written",
                "snapshots",
                "get_ms",
                "changelog_ms",
                "apply_ms",
                "load_ms",
                "snapshot_ms",
            ),
            0.0,
        )

    @property
    def version(self) -> int:
        """The last completed version here."""
        return self._versions.version

    @property
    def head(self) -> str | None:
        """The path of the changelog that made the completed version; None for the empty version 0."""
        return self._versions.head

    def newest(self) -> tuple[int, str | None]:
        """Return the version with all that was accepted, and its head."""
        return self._versions.newest()

    # -- loading and completing ----------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        """Whether reads wait until a version is loaded."""
        return self._versions.is_loading

    def wait_loaded(self, seconds: float) -> bool:
        """Return whether reads need not wait for a load, now or at some moment within ``seconds``."""
        changed = self._versions.changed
        with changed:
            return changed.wait_for(lambda: not self._versions.is_loading, seconds)

    def load(self, lineage: Lineage, watch: LoadWatch | None = None) -> None:
        """Bring the state to the version of ``lineage``, telling ``watch`` of the progress.

        Goes on from what is held if that is part of the lineage, else from the nearest snapshot, else from the empty
        version; if a snapshot turns out to be damaged, from an older one. Files are fetched in parallel and checked. If
        no way leads to the version, the error of the first one is raised (``MissingFileError``, ``DamagedFileError``),
        and the state is at some version of the lineage. The same holds for ``StorageError`` and ``LoadEndedError``: the
        next load goes on from what this one has fetched and applied. Reads wait meanwhile. Pending changes that do not
        follow from the loaded version are dropped. Raises ``LocalDiskFullError`` if there is no room.
        """
        started = time.perf_counter()
        versions = self._versions
        with self._mutation:
            versions.check_open()
            # A write that ended midway leaves the engine at no version.
            is_engine_right = self._engine.state.head == versions.head
            if (versions.version, versions.head) == (lineage.version, lineage.head) and is_engine_right:
                return
            versions.begin_loading()
            loading = Loading(self._context, versions.version, versions.head, watch)
            try:
                with writing_to(self._local.engine):
                    loading.run(lineage)
            finally:
                versions.end_loading(loading.version, loading.head)
                self._recent_reads.forget_others(loading.head)
            self._figures["load_ms"] = (time.perf_counter() - started) * 1e3

    def complete(self, version: int, head: str) -> None:
        """Apply held changes up to those whose changelog is ``head``: the version is committed for good.

        Nothing happens if the state is there already. Raises ``LineageMismatchError`` if the changes are
        not held here, or do not follow from the version that is: load the version from storage.
        """
        with self._mutation:
            self._versions.check_open()
            if (self.version, self.head) == (version, head):
                return
            for delta in self._versions.steps_to(version, head):
                self._apply(delta)
            self._versions.drop_unrelated()

    def _apply(self, delta: Delta) -> None:
        started = time.perf_counter()
        before = self._before_images.when_applied(delta)
        state = self._before_images.state_after(delta, before)
        with self._versions.applying(delta, before):
            fault_points.reached("apply")
            delta.apply.result()(state)
        self._recent_reads.forget_others(self.head)
        self._figures["apply_ms"] = (time.perf_counter() - started) * 1e3

    def pinned(self) -> AbstractContextManager[None]:
        """Within the block, keep what the last versions change for readers, even if that must be looked up."""
        return self._before_images.pinned()

    # -- the running batch ---------------------------------------------------------------------

    @property
    def storage_used(self) -> dict[str, int]:
        """Return the counts of this process's requests to the location of the partition's files:
        ``CheckpointStorage.used``.
        """
        return self._storage.used

    def stage(self, meta: ChangelogMeta, changes: Changes, write: WriteChangelog = put_changelog) -> FileRef:
        """Make an attempt's changes durable and keep them, invisible until accepted.

        ``write`` stores the changelog, perhaps together with others, and returns when it is durable. Raises
        ``LineageMismatchError`` if ``meta.base`` is not held here as the version below, ``HostMemoryError`` if there is
        no room for the changes. Changes that come again are never refused for room.
        """
        started = time.perf_counter()
        self._versions.check_base(meta)
        nbytes = KEPT_OF_COMMIT * changes.nbytes
        with self._versions.changed:
            is_repeated = self._versions.pending.is_held(meta.version)
        if is_repeated:
            # It comes in the place of changes that stay until the version is completed, for which it is needed.
            claim = self._memory.note(STAGED, nbytes)
        else:
            claim = self._memory.claim(STAGED, nbytes, f"The commit of version {meta.version} of {self._directory}")
        apply = background.submit(self._engine.prepare, changes)
        before = background.submit(self._before_images.when_staged, meta, changes)
        path = f"{self._directory}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        fault_points.reached("commit:changelog")
        changelog = write_changelog(changes, meta, self._conf.compression)
        written = self._memory.note(CHANGELOGS, len(changelog))
        ref = write(self._storage, meta, path, changelog)
        del changelog, written
        fault_points.reached("commit:durable")
        with self._versions.changed:
            self._versions.pending.stage(Delta(meta, ref, changes, before, apply, claim))
            self._figures["bytes_written"] += ref.size
            self._figures["changelog_ms"] = (time.perf_counter() - started) * 1e3
        return ref

    def accept(self, version: int, attempt: str) -> None:
        """Have readers of ``version`` see an attempt that was acknowledged, in place of any attempt before it.

        Raises ``LineageMismatchError`` if nothing of that attempt is held.
        """
        with self._versions.changed:
            if not self._versions.pending.accept(version, attempt):
                held = ", ".join(f"{m.version}:{m.attempt}" for m, _, _ in self.pending()) or "none"
                raise LineageMismatchError(
                    f"No changes of attempt {attempt!r} to version {version} of {self._directory} are held here; held "
                    f"are version {self.version} and the attempts {held}."
                )

    def discard(self, version: int, attempt: str) -> None:
        """Drop an attempt's staged changes; if there are none, its accepted ones. No error if it has neither."""
        with self._versions.changed:
            self._versions.pending.discard(version, attempt)

    def pending(self) -> list[tuple[ChangelogMeta, FileRef, bool]]:
        """Return the changes over the completed version, and whether they are accepted; in the order of versions."""
        with self._versions.changed:
            return self._versions.pending.listed()

    # -- reads ---------------------------------------------------------------------------------

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

        ``version`` None is the last completed one. With ``remember``, what is read may spare the commit that follows a
        second look-up; queries, which no commit follows, say False. Raises ``VersionNotFoundError`` if the version, or
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
            self._figures["get_ms"] = (time.perf_counter() - started) * 1e3
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

        Shows the version as it is at the call, however long the scan takes and whatever is committed meanwhile. Raises
        ``HostMemoryError`` if there is no room for the changes that lie over the engine.
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
        """Scan several ranges, of which no two overlap: all scans show the same moment. See ``scan``."""
        with self._versions.reading(version, head) as view:
            self._check_family(column_family, view)
            bases = [self._engine.scan(start, end, column_family) for start, end in ranges]
        changes = SortedPairs.empty()
        for layer in view.layers:
            if column_family in layer.changes.families:
                pairs = layer.changes.families[column_family]
                changes = changes.under(pairs.between(*ranges[0]) if len(ranges) == 1 else pairs)
        memory = self._memory
        claim = memory.claim(SCANS, changes.nbytes, f"A scan of {self._directory}") if len(changes) else None
        return [
            counted_scan(merged_scan(base, changes.between(*bounds) if len(changes) else changes), memory, claim)
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
        """Scan ascending ranges, of which no two overlap, one after the other; a batch may have pairs of many ranges.

        See ``scan``.
        """
        with self._versions.reading(version, head) as view:
            self._check_family(column_family, view)
            base = self._engine.scan_ranges(ranges, column_family)
        changes = SortedPairs.empty()
        for layer in view.layers:
            if column_family in layer.changes.families:
                changes = changes.under(layer.changes.families[column_family].within(ranges))
        memory = self._memory
        claim = memory.claim(SCANS, changes.nbytes, f"A scan of {self._directory}") if len(changes) else None
        return counted_scan(merged_scan(base, changes), memory, claim)

    def num_keys(self, version: int | None = None, *, head: str | None = None) -> int | None:
        """Return the exact number of keys of all column families at a version; None if it is not at hand.

        Raises as ``get_many``.
        """
        with self._versions.reading(version, head) as view:
            return self._num_keys(view)

    def _num_keys(self, view: VersionView) -> int | None:
        if not view.layers:
            return self._engine.state.num_keys
        last = view.layers[-1]
        return last.num_keys if isinstance(last, Undo) else None

    def column_families(self, version: int | None = None, *, head: str | None = None) -> frozenset[str]:
        """Return the names of the column families that exist at a version."""
        with self._versions.reading(version, head) as view:
            return view.families

    def _check_family(self, column_family: str, view: VersionView) -> None:
        if column_family not in view.families:
            raise InvalidStateStoreArgument(
                f"There is no column family {column_family!r} in {self._directory}; there are "
                f"{', '.join(sorted(view.families))}. Create it with create_column_family."
            )

    # -- snapshots, figures, the end -----------------------------------------------------------

    def snapshot(self, earlier: SnapshotRef | None) -> SnapshotRef:
        """Upload the completed version, but for the files that ``earlier`` has; commits and reads go on meanwhile.

        The returned snapshot counts once a manifest names it. Raises ``StorageError``, ``StoreClosedError`` if the
        state is closed meanwhile, ``VersionNotFoundError`` for the empty version 0.
        """
        (made,) = self.store_snapshots([(self, self.prepare_snapshot(earlier))])
        return made.ref

    def prepare_snapshot(
        self, earlier: SnapshotRef | None, small_bytes: int = 0, listed: dict[str, dict[str, int]] | None = None
    ) -> PreparedSnapshot:
        """Do the part of ``snapshot`` that concerns this partition alone: ``store_snapshots`` does the rest.

        Small files, up to ``small_bytes`` together, are left for that. ``listed``: see ``backends.formats.snapshot``.
        Raises as ``snapshot`` does.
        """
        started = time.perf_counter()
        prepared = self._uploads.prepare(earlier, small_bytes, listed)
        with self._versions.changed:
            self._figures["snapshot_ms"] = (time.perf_counter() - started) * 1e3
        return prepared

    @staticmethod
    def store_snapshots(prepared: Sequence[tuple[PartitionState, PreparedSnapshot]]) -> list[StoredSnapshot]:
        """Finish snapshots of partitions with the same state location, with one request. Raises ``StorageError``."""
        made = store_together(prepared[0][0]._storage, [one for _, one in prepared])
        for (state, _), stored in zip(prepared, made, strict=True):
            state._snapshot_stored(stored)
        return made

    def _snapshot_stored(self, stored: StoredSnapshot) -> None:
        self._uploads.stored(stored.descriptor)
        with self._versions.changed:
            self._figures["snapshots"] += 1
            self._figures["snapshot_bytes_written"] += stored.written
        log.info(
            "Written snapshot file for version %d of %s at %s",
            stored.ref.version,
            self._directory,
            self._storage.full_location(stored.ref.file.stored_in),
        )

    def write_out(self) -> None:
        """Have the engine write what only its memory holds to its local files, so that others can use that memory.

        Raises ``StoreClosedError``.
        """
        # A capture writes all column families at one moment, and nothing has to be kept of it.
        with self._local.scratch.directory() as captured, self._mutation:
            self._versions.check_open()
            self._engine.capture(captured)

    def metrics(self, version: int | None = None, *, head: str | None = None) -> StateStoreMetrics:
        """Return the figures of this partition: times in ms are those of the last call of each kind.

        The number of keys is that of a version that is held (None: the last completed one), or the engine's own if it
        is not at hand. Raises ``VersionNotFoundError``.
        """
        with self._versions.reading(version, head) as view, self._versions.changed:
            counted = self._num_keys(view) if view.layers else None
            num_keys = self._engine.num_keys() if counted is None else counted
            figures = {**self._figures, "files": float(self._engine.num_files())}
            nbytes = self._engine.memory_bytes() + self._versions.nbytes() + self._recent_reads.nbytes
            return StateStoreMetrics(num_keys, nbytes, figures)

    def close(self) -> None:
        """Close the engine once the reads under way have ended; scans under way end with an error. Files stay."""
        if self._versions.is_closed:
            return
        with self._mutation:
            self._versions.close()
            self._recent_reads.clear()
            self._engine.close()
        self._uploads.close()
        self._local.unlock()

    def destroy(self) -> None:
        """Close, and remove the local files. The durable ones stay."""
        self.close()
        self._local.remove()


def open_partition(
    local_dir: Path, storage: CheckpointStorage, directory: str, conf: StateStoreConf, *, is_copy: bool = False
) -> PartitionState:
    """Open the state of one partition with the engine that ``conf`` names. See ``PartitionState``.

    ``is_copy``: it will be read a little and thrown away, so that changes need not get into the engine's own order.
    """
    backend = backend_of(conf)
    engine = BufferedEngine if is_copy else backend.engine
    return PartitionState(local_dir, storage, directory, conf, backend.name, engine)
