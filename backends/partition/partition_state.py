"""The state of one partition: an engine at the completed version, with the running batch's changes on top.

The engine (for example RocksDB) holds the last completed version. Commits of the running batch are durable as
changelogs and stay outside the engine as deltas. So a batch is rolled back by dropping its deltas, and a reader of the
completed version never sees them. For the versions just before it, the before-images of the changes are kept, so that
those versions are read as fast as the newest.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import structs

from backends import exceptions, fault_points
from backends.conf import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import BufferedEngine, DeferredEngine, StateEngine, backend_of, writing_to
from backends.formats import snapshot
from backends.formats.changelog import ChangelogMeta, Changes, read_changelog, write_changelog
from backends.formats.local_state import LocalState
from backends.formats.manifest import ChangelogRef, Lineage, SnapshotDescriptor, SnapshotRef, changelog_name
from backends.formats.snapshot import PreparedSnapshot, StoredSnapshot
from backends.host_memory import (
    BEFORE_IMAGES,
    CHANGELOGS,
    COPIES,
    KEPT_OF_COMMIT,
    PEAK_OF_COPY,
    STAGED,
    Claim,
    HostMemory,
    host_memory,
)
from backends.load_watch import LoadWatch
from backends.partition.loading import (
    Loading,
    LocalDirectory,
    PartitionContext,
    key_growth,
    replaced_pairs,
    state_after,
)
from backends.partition.readable_versions import BeforeImage, Delta, ReadableVersions
from backends.partition.version_reads import RecentReads, VersionReads
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from backends.store import StateStoreMetrics

T = TypeVar("T")

log = logging.getLogger(__name__)


class SnapshotUploads:
    """Uploads snapshots of one partition, one at a time.

    Locks: ``_uploading`` is held for a whole upload, and taken first. ``mutation`` is the partition's, held during the
    capture of the engine, so that nothing is written then. The lock of ``ReadableVersions`` guards the figures:
    ``count`` and ``bytes_written`` add up over all snapshots, ``milliseconds`` is the time of the last upload.
    """

    def __init__(self, context: PartitionContext, versions: ReadableVersions, mutation: threading.Lock) -> None:
        self._context = context
        self._versions = versions
        self._mutation = mutation
        self._uploading = threading.Lock()
        self._digests = snapshot.Digests()
        self._last: SnapshotDescriptor | None = None
        self.count = 0
        self.bytes_written = 0
        self.milliseconds = 0.0

    @property
    def is_uploading(self) -> bool:
        """Whether a snapshot is being uploaded."""
        return self._uploading.locked()

    def store(self, earlier: SnapshotRef | None) -> SnapshotRef:
        """Upload the completed version, except the files that ``earlier`` has.

        Commits and reads continue during the upload.

        The returned snapshot counts once a manifest names it. Raises ``StorageError``, ``StoreClosedError`` if the
        state is closed during the upload, ``VersionNotFoundError`` for the empty version 0.
        """
        (stored,) = store_snapshots([(self, self.prepare(earlier))])
        return stored.ref

    def prepare(
        self, earlier: SnapshotRef | None, small_bytes: int = 0, listed: dict[str, dict[str, int]] | None = None
    ) -> PreparedSnapshot:
        """Do the part of ``store`` that concerns only this partition: ``store_snapshots`` does the rest.

        Small files, up to ``small_bytes`` together, are left for that. ``listed``: see ``backends.formats.snapshot``.
        Raises as ``store`` does.
        """
        started = time.perf_counter()
        context = self._context
        storage, directory, engine = context.storage, context.directory, context.engine
        with self._uploading, context.scratch.directory() as local:
            with self._mutation:
                self._versions.check_open()
                state = engine.state
                if state.head is None:
                    raise exceptions.VersionNotFoundError(
                        f"{directory} is at the empty version 0: there is nothing to keep."
                    )
                finish = engine.capture(local)
            fault_points.reached("snapshot:captured")
            finish()
            with Pool(context.conf.upload_threads, thread_name_prefix="statestore-upload") as pool:
                prepared = snapshot.prepare(
                    storage,
                    directory,
                    context.backend,
                    local,
                    state,
                    earlier=None if earlier is None else self._descriptor(earlier),
                    digests=self._digests,
                    pool=pool,
                    is_cancelled=lambda: self._versions.is_closed,
                    small_bytes=small_bytes,
                    listed=listed,
                )
        with self._versions.changed:
            self.milliseconds = (time.perf_counter() - started) * 1e3
        return prepared

    def _descriptor(self, ref: SnapshotRef) -> SnapshotDescriptor | None:
        last = self._last
        if last is not None and last.path == ref.file.path:
            return last
        try:
            return snapshot.read_descriptor(self._context.storage, ref)
        except (exceptions.MissingFileError, exceptions.DamagedFileError) as error:
            directory = self._context.directory
            log.warning("All of %s is uploaded, because an earlier snapshot cannot be used: %s", directory, error)
            return None

    def _note(self, stored: StoredSnapshot) -> None:
        """Record a stored snapshot: the next snapshot may share its files."""
        self._last = stored.descriptor.without_content
        with self._versions.changed:
            self.count += 1
            self.bytes_written += stored.written
        log.info(
            "Written snapshot file for version %d of %s at %s",
            stored.ref.version,
            self._context.directory,
            self._context.storage.full_location(stored.ref.file.stored_in),
        )

    def close(self) -> None:
        """Wait for an upload under way, which ends with its current file, and remove the local files."""
        with self._uploading:
            self._context.scratch.clear()


def store_snapshots(prepared: Sequence[tuple[SnapshotUploads, PreparedSnapshot]]) -> list[StoredSnapshot]:
    """Finish snapshots of partitions with the same state location, with one request. Raises ``StorageError``."""
    snapshots = snapshot.store_together(prepared[0][0]._context.storage, [one for _, one in prepared])
    for (uploads, _), stored in zip(prepared, snapshots, strict=True):
        uploads._note(stored)
    return snapshots


# The changes of attempts at the running batch: made durable, then accepted or discarded.


class EncodedAttempt(NamedTuple):
    """The changes of one attempt, encoded to be stored as ``changelog`` under ``path``, a name that never existed.

    ``before``, ``apply`` and ``claim`` are those of the ``Delta``; ``written`` counts the memory of ``changelog``.
    """

    meta: ChangelogMeta
    storage: CheckpointStorage
    path: str
    changelog: bytes
    changes: Changes
    before: Future[BeforeImage | None]
    apply: Future[Callable[[LocalState], None]]
    claim: Claim
    written: Claim
    started: float


class BatchAttempts:
    """Takes the changes that tasks commit to a partition: ``encode``, then store the changelog, then ``record``.

    It also finds the pairs that the changes replace (before-images), which serve reads of older versions and the count
    of keys. A bulk look-up of old values costs time. So they are taken from the stream's latest reads if possible, and
    looked up only if keys are counted or a reader of an older version asks for it. If they were read, the changelog
    says by how many keys the state grows: loads and copies then look up nothing.

    Many threads may commit at once. ``bytes_written`` adds up over all changelogs, under the lock of
    ``ReadableVersions``; ``changelog_ms`` is the time of the last one, in milliseconds. ``_lock`` guards the pins.
    """

    def __init__(
        self, context: PartitionContext, versions: ReadableVersions, recent_reads: RecentReads, memory: HostMemory
    ) -> None:
        self._context = context
        self._versions = versions
        self._recent_reads = recent_reads
        self._memory = memory
        self._pins = 0
        self._lock = threading.Lock()
        self.bytes_written = 0
        self.changelog_ms = 0.0

    def encode(self, meta: ChangelogMeta, changes: Changes) -> EncodedAttempt:
        """Encode an attempt's changes, and begin to prepare their application.

        Raises ``LineageMismatchError`` if ``meta.base`` is not held here as the version below, ``HostMemoryError`` if
        there is no room for the changes. Repeated changes are never rejected for lack of room.
        """
        started = time.perf_counter()
        storage, directory = self._context.storage, self._context.directory
        self._versions.check_base(meta)
        nbytes = KEPT_OF_COMMIT * changes.nbytes
        with self._versions.changed:
            is_repeated = self._versions.pending.has_version(meta.version)
        if is_repeated:
            # It replaces changes that stay until the version is completed, because the completion needs them.
            claim = self._memory.note(STAGED, nbytes)
        else:
            claim = self._memory.claim(STAGED, nbytes, f"The commit of version {meta.version} of {directory}")
        # A commit that found no room comes back, and needs the reads then.
        images = self._images_read(meta.base, changes)
        if self._context.conf.track_total_number_of_rows and images.keys() == changes.families.keys():
            meta = structs.replace(meta, key_growth=key_growth(images, changes))
        apply = _submit(self._context.engine.prepare, changes)
        before = _submit(self._when_staged, meta, changes, images)
        path = f"{directory}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        fault_points.reached("commit:changelog")
        changelog = write_changelog(changes, meta, self._context.conf.compression)
        written = self._memory.note(CHANGELOGS, len(changelog))
        return EncodedAttempt(meta, storage, path, changelog, changes, before, apply, claim, written, started)

    def record(self, encoded: EncodedAttempt, file: FileRef) -> None:
        """Keep an attempt whose changelog is durable as ``file``. It is invisible until accepted."""
        fault_points.reached("commit:durable")
        delta = Delta(encoded.meta, file, encoded.changes, encoded.before, encoded.apply, encoded.claim)
        with self._versions.changed:
            self._versions.pending.record_staged(delta)
            self.bytes_written += file.size
            self.changelog_ms = (time.perf_counter() - encoded.started) * 1e3

    def store_alone(self, meta: ChangelogMeta, changes: Changes) -> FileRef:
        """Encode an attempt, store its changelog as a separate file, and record it. Raises as ``encode`` does."""
        encoded = self.encode(meta, changes)
        file = encoded.storage.put_unique(encoded.path, encoded.changelog)
        self.record(encoded, file)
        return file

    def accept(self, version: int, attempt: str) -> None:
        """Show an acknowledged attempt to readers of ``version``, in place of any attempt before it.

        Raises ``LineageMismatchError`` if nothing of that attempt is held.
        """
        with self._versions.changed:
            if not self._versions.pending.accept(version, attempt):
                attempts = ", ".join(f"{m.version}:{m.attempt}" for m, _, _ in self.pending()) or "none"
                raise exceptions.LineageMismatchError(
                    f"No changes of attempt {attempt!r} to version {version} of {self._context.directory} are held "
                    f"here; held are version {self._versions.version} and the attempts {attempts}."
                )

    def discard(self, version: int, attempt: str) -> None:
        """Drop an attempt's staged changes; if there are none, its accepted ones. No error if it has neither."""
        with self._versions.changed:
            self._versions.pending.discard(version, attempt)

    def pending(self) -> list[tuple[ChangelogMeta, FileRef, bool]]:
        """Return the changes over the completed version, and whether they are accepted; in the order of versions."""
        with self._versions.changed:
            return self._versions.pending.listed()

    # -- before-images -------------------------------------------------------------------------

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Within the block, look before-images up even if nothing else needs them."""
        with self._lock:
            self._pins += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins -= 1

    def _are_looked_up(self) -> bool:
        """Return whether before-images are worth a look-up. Known before-images are always kept."""
        return self._context.conf.track_total_number_of_rows or bool(self._pins)

    def _images_read(self, base: str | None, changes: Changes) -> dict[str, SortedPairs]:
        """Return before-images by family. A family is left out unless the task has read all keys that it changes there.

        The task's reads are dropped: its commit has come, and another attempt reads again.
        """
        images: dict[str, SortedPairs] = {}
        for family, pairs in changes.families.items():
            values = self._recent_reads.values(base, family, pairs.keys)
            self._recent_reads.forget(family)
            if not len(pairs):
                images[family] = pairs
            elif values is not None:
                images[family] = SortedPairs(pairs.keys, values)
        return images

    def _when_staged(
        self, meta: ChangelogMeta, changes: Changes, images: Mapping[str, SortedPairs]
    ) -> BeforeImage | None:
        """Return all before-images if they can be found while the changelog is written; None: later, or never."""
        if self._versions.is_loading:
            return None  # a background thread may not wait long
        try:
            with self._versions.reading(meta.version - 1, meta.base) as view:
                unknown = {family: pairs for family, pairs in changes.families.items() if family not in images}
                # With a layer over it, the engine does not show the version below.
                if unknown and (view.layers or not self._are_looked_up()):
                    return None
                all_images = Changes({**images, **replaced_pairs(self._context.engine, Changes(unknown)).families})
                # The keys are those of the changes, and counted with them.
                nbytes = sum(pairs.values.nbytes for pairs in all_images.families.values())
                return BeforeImage(all_images, self._memory.note(BEFORE_IMAGES, nbytes))
        except (exceptions.VersionNotFoundError, exceptions.StoreClosedError):
            return None  # the version below is being loaded, was rolled back, or is past already

    def when_applied(self, delta: Delta) -> Changes | None:
        """Return the before-images of changes that are applied next; None if nothing needs them."""
        before = delta.before.result()
        if before is not None:
            return before.changes
        return replaced_pairs(self._context.engine, delta.changes) if self._are_looked_up() else None

    def when_followed(self, delta: Delta) -> Changes | None:
        """Return the before-images of changes that another host has made; None if nothing needs them.

        They would only keep the version below readable. Clients that want that version ask the owner.
        """
        return self.when_applied(delta) if delta.meta.key_growth is None or self._pins else None

    def state_after(self, delta: Delta, before: Changes | None) -> LocalState:
        """Return the state of the engine after ``delta`` is applied; its keys are counted if their growth is known."""
        growth: int | None = None
        if self._context.conf.track_total_number_of_rows:
            growth = delta.meta.key_growth
            if growth is None and before is not None:
                growth = key_growth(before.families, delta.changes)
        return state_after(self._context.engine.state, delta.meta.version, delta.file.path, growth)


class PartitionState:
    """One partition's state. This class loads and completes its versions; its parts do everything else.

    ``reads`` answers at any version that is held, ``attempts`` takes the changes of the running batch, ``snapshots``
    uploads the completed version. All three may be used by many threads at once.

    ``directory`` is the partition's own below the state location, see ``Layout.directory``. Files that an earlier
    process left in ``local_dir`` are used if ``load`` finds them in the lineage, and discarded if not. Raises
    ``ConcurrentCommitError`` if ``local_dir`` is in use.

    There are three locks, in the order of acquisition. The lock of ``SnapshotUploads`` is held for a whole upload.
    ``_mutation`` is held for ``load``, ``complete``, the capture of a snapshot and ``close``, so that one of them at a
    time uses the engine. The lock of ``ReadableVersions`` is held briefly, also for the cumulative figures here.
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
        self._context = PartitionContext(self._engine, backend, storage, directory, conf, self._local.scratch)
        self._mutation = threading.Lock()
        memory = host_memory(conf)
        self._versions = ReadableVersions(self._engine, directory, conf, memory)
        self._recent_reads = RecentReads(conf.versions_in_memory_bytes, memory)
        self.reads = VersionReads(self._context, self._versions, self._recent_reads, memory)
        self.attempts = BatchAttempts(self._context, self._versions, self._recent_reads, memory)
        self.snapshots = SnapshotUploads(self._context, self._versions, self._mutation)
        self.changelog_bytes = 0
        """The size of the changelogs behind the newest snapshot of the last load, and of all that came since."""
        self._load_ms = 0.0
        self._apply_ms = 0.0

    @property
    def version(self) -> int:
        """The last completed version here."""
        return self._versions.version

    @property
    def head(self) -> str | None:
        """The path of the changelog that made the completed version; None for the empty version 0."""
        return self._versions.head

    @property
    def local_dir(self) -> Path:
        return self._local.path

    @property
    def is_closed(self) -> bool:
        """Whether the state was closed. The local files may still be there."""
        return self._versions.is_closed

    @property
    def is_whole(self) -> bool:
        """Whether the engine is at the completed version, or is being brought there.

        A write that ended midway leaves the engine at no version.
        """
        return self._versions.is_applying or self._engine.state.head == self._versions.head

    @property
    def fetched_dir(self) -> Path:
        """The directory of the files that loads have fetched and the engine does not have yet."""
        return self._local.scratch.root

    def drop_local_files(self) -> None:
        """Begin again with the empty version 0 after a failed load, to make room for others on the disk."""
        self._local.scratch.drop_kept()
        self.load(Lineage(0))

    def newest(self) -> tuple[int, str | None]:
        """Return the version including all accepted changes, and its head."""
        return self._versions.newest()

    # -- loading and completing ----------------------------------------------------------------

    @property
    def storage_used(self) -> dict[str, int]:
        """Return the counts of this process's requests to the location of the partition's files:
        ``CheckpointStorage.used``.
        """
        return self._context.storage.used

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
        """Bring the state to the version of ``lineage``, and report the progress to ``watch``.

        The load starts from what is held if that is part of the lineage, else from the nearest snapshot, else from the
        empty version; if a snapshot turns out to be damaged, from an older one. Files are fetched in parallel and
        checked. If no start leads to the version, the error of the first one is raised (``MissingFileError``,
        ``DamagedFileError``), and the state is at some version of the lineage. The same holds for ``StorageError`` and
        ``LoadEndedError``: the next load continues from what this one has fetched and applied. Reads wait for the load.
        Pending changes that do not follow the loaded version are dropped. Raises ``LocalDiskFullError`` if there is no
        room.
        """
        started = time.perf_counter()
        versions = self._versions
        with self._mutation:
            versions.check_open()
            if (versions.version, versions.head) == (lineage.version, lineage.head) and self.is_whole:
                return
            versions.begin_loading()
            loading = Loading(self._context, versions.version, versions.head, watch)
            try:
                with writing_to(self._local.engine):
                    loading.run(lineage)
            finally:
                versions.end_loading(loading.version, loading.head)
                newest = max((s.version for s in lineage.snapshots), default=0)
                self.changelog_bytes = sum(log.file.size for log in lineage.changelogs if log.version > newest)
                self._recent_reads.forget_others(loading.head)
            self._load_ms = (time.perf_counter() - started) * 1e3

    def follow(self, ref: ChangelogRef, data: bytes) -> Changes:
        """Apply the content of the next version's changelog, which the owner of the partition has made; return it.

        Reads go on, unlike during ``load``. Raises ``LineageMismatchError`` if the changelog does not follow the
        version that is held, and as ``load`` does; ``load`` then finds out what can be used. Raises
        ``HostMemoryBusyError`` if other copies use the share of memory that all copies have: commits come first.
        """
        context = self._context
        meta, changes = read_changelog(data, context.storage.full_location(ref.file.path))
        memory = host_memory(context.conf)
        claim = memory.claim_copy(changes.nbytes)
        if claim is None:
            if PEAK_OF_COPY * changes.nbytes <= memory.copies_bytes:
                raise exceptions.HostMemoryBusyError(
                    f"A copy of {context.directory} cannot follow now: its changes have {changes.nbytes:,} bytes, and "
                    f"copies may use {memory.copies_bytes:,} of host_memory={memory.limit:,} together."
                )
            claim = memory.note(COPIES, KEPT_OF_COMMIT * changes.nbytes)  # it would never fit
        with self._mutation, writing_to(self._local.engine):
            self._versions.check_open()
            if not self.is_whole or (meta.version, meta.base) != (ref.version, self.head):
                raise exceptions.LineageMismatchError(
                    f"{ref.file.path} makes version {meta.version} of {context.directory} on top of {meta.base}, but "
                    f"this copy holds version {self.version} ({self.head}). Load it from storage."
                )
            before: Future[BeforeImage | None] = Future()
            apply: Future[Callable[[LocalState], None]] = Future()
            before.set_result(None)
            apply.set_result(context.engine.prepare(changes))
            delta = Delta(meta, ref.file, changes, before, apply, claim)
            self._apply(delta, self.attempts.when_followed(delta))
        return changes

    def complete(self, version: int, head: str) -> None:
        """Apply held changes up to those whose changelog is ``head``. The version is then permanently committed.

        This is a no-op if the state is already there. Raises ``LineageMismatchError`` if the changes are not held here,
        or do not follow the version that is: load the version from storage.
        """
        with self._mutation:
            self._versions.check_open()
            if (self.version, self.head) == (version, head):
                return
            for delta in self._versions.steps_to(version, head):
                self._apply(delta, self.attempts.when_applied(delta))
            self._versions.drop_unrelated()

    def _apply(self, delta: Delta, before: Changes | None) -> None:
        started = time.perf_counter()
        state = self.attempts.state_after(delta, before)
        with self._versions.applying(delta, before):
            fault_points.reached("apply")
            delta.apply.result()(state)
        self.changelog_bytes += delta.file.size
        self._recent_reads.forget_others(self.head)
        self._apply_ms = (time.perf_counter() - started) * 1e3

    # -- figures, the end ----------------------------------------------------------------------

    def write_out(self) -> None:
        """Flush the engine's memory to its local files, so that others can use that memory.

        Raises ``StoreClosedError``.
        """
        # A capture writes all column families at one moment, and nothing of it has to be kept.
        with self._local.scratch.directory() as captured, self._mutation:
            self._versions.check_open()
            self._engine.capture(captured)

    def metrics(self, version: int | None = None, *, head: str | None = None) -> StateStoreMetrics:
        """Return the figures of this partition: times in ms are those of the last call of each kind.

        The number of keys is that of a version that is held (None: the last completed one), or the engine's own if it
        is unknown. Raises ``VersionNotFoundError``.
        """
        with self._versions.reading(version, head) as view, self._versions.changed:
            counted = self.reads.counted(view) if view.layers else None
            num_keys = self._engine.num_keys() if counted is None else counted
            figures = {
                "bytes_written": float(self.attempts.bytes_written),
                "snapshot_bytes_written": float(self.snapshots.bytes_written),
                "snapshots": float(self.snapshots.count),
                "get_ms": self.reads.get_ms,
                "changelog_ms": self.attempts.changelog_ms,
                "apply_ms": self._apply_ms,
                "load_ms": self._load_ms,
                "snapshot_ms": self.snapshots.milliseconds,
                "files": float(self._engine.num_files()),
            }
            nbytes = self._engine.memory_bytes() + self._versions.nbytes() + self._recent_reads.nbytes
            return StateStoreMetrics(num_keys, nbytes, figures)

    def close(self) -> None:
        """Close the engine once the reads under way have ended; scans under way end with an error.

        Files stay, and have the completed version, if they can be written.
        """
        self._close(writes=True)

    def destroy(self) -> None:
        """Close, and remove the local files. The durable ones stay."""
        self._close(writes=False)
        self._local.remove()

    def _close(self, *, writes: bool) -> None:
        if self._versions.is_closed:
            return
        with self._mutation:
            self._versions.close()
            self._recent_reads.clear()
            if writes and isinstance(self._engine, DeferredEngine):
                try:
                    self._engine.write_gathered()
                except Exception:  # a full disk, for instance: the next load takes the changelogs
                    log.warning("The local files of %s lack its last versions", self._context.directory, exc_info=True)
            self._engine.close()
        self.snapshots.close()
        self._local.unlock()


def open_partition(
    local_dir: Path, storage: CheckpointStorage, directory: str, conf: StateStoreConf, *, is_copy: bool = False
) -> PartitionState:
    """Open the state of one partition with the engine that ``conf`` names. See ``PartitionState``.

    ``is_copy``: the state is for a few reads and then discarded, so changes need not be written to the engine.
    """
    backend = backend_of(conf)
    engine = BufferedEngine if is_copy else DeferredEngine if backend.opens_slowly else backend.engine
    return PartitionState(local_dir, storage, directory, conf, backend.name, engine)


# Two threads that prepare changes during the write of their changelog. All partitions of the process share them.


_pool: ThreadPoolExecutor


def _submit(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call ``function`` in one of the threads. No call may wait long: the other partitions need the threads too."""
    return _pool.submit(function, *arguments)


def _start() -> None:
    global _pool
    _pool = ThreadPoolExecutor(2, thread_name_prefix="statestore-prepare")


_start()
os.register_at_fork(after_in_child=_start)  # a forked process does not inherit the threads
