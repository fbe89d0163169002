"""The state of one partition: an engine at a completed version, the running batch's changes on top.

The engine (RocksDB, say) holds the last completed version. Commits of the running batch are durable
as changelogs and stay beside it as deltas, so that rolling a batch back is dropping them, and a
reader of the completed version never sees them (DESIGN, section 4). Of the versions just before it,
the before-images of what changed are kept, so that they are read at the speed of the newest.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from backends import fault_points
from backends.conf import StateStoreConf
from backends.encoding.merged_scan import merged_scan
from backends.encoding.sorted_pairs import SortedPairs, as_binary, is_strictly_sorted
from backends.engines.choice import backend_of
from backends.engines.engine import StateEngine
from backends.exceptions import (
    ConcurrentCommitError,
    DamagedFileError,
    InvalidStateStoreArgument,
    LineageMismatchError,
    LocalStateDamagedError,
    MissingFileError,
    StoreClosedError,
    VersionNotFoundError,
)
from backends.formats import snapshot
from backends.formats.changelog import ChangelogMeta, Changes, changelog_name, read_changelog, write_changelog
from backends.formats.manifest import ChangelogRef, Lineage, Rescaled, SnapshotRef, Source
from backends.formats.snapshot import LocalState
from backends.ids import DEFAULT_FAMILY
from backends.metrics import StateStoreMetrics
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef

log = logging.getLogger(__name__)

_background: ThreadPoolExecutor


def _start_background() -> None:
    global _background
    _background = ThreadPoolExecutor(2, thread_name_prefix="statestore-prepare")


_start_background()
os.register_at_fork(after_in_child=_start_background)  # threads do not live on in a fork


@dataclass(eq=False)
class _Delta:
    """One attempt's durable changes to a version.

    ``before`` are the pairs that they replace, ``apply`` what writes them: both are made while the changelog is written.
    """

    meta: ChangelogMeta
    file: FileRef
    changes: Changes
    before: Future[Changes | None]
    apply: Future[Callable[[LocalState], None]]


@dataclass(eq=False)
class _Undo:
    """What leads back from a version to the one below it."""

    version: int
    head: str | None
    changes: Changes
    families: frozenset[str]
    num_keys: int | None

    @property
    def nbytes(self) -> int:
        return sum(pairs.nbytes for pairs in self.changes.families.values())


@dataclass(frozen=True)
class _View:
    """A version as it is read: the changes over the engine, the last of them counting most, and what made the version."""

    version: int
    layers: tuple[_Delta | _Undo, ...]
    head: str | None
    families: frozenset[str]


@dataclass(frozen=True)
class _Read:
    """The last bulk reads of a column family at a completed version, in ascending order of their keys.

    A batch mostly writes the very keys that it has read, a step of them after the other.
    """

    head: str | None
    parts: tuple[SortedPairs, ...]
    nbytes: int

    def values(self, keys: pa.BinaryArray) -> pa.BinaryArray | None:
        """The values of sorted keys, if all of them have been read."""
        read_keys = pa.concat_arrays([p.keys for p in self.parts])
        read_values = pa.concat_arrays([p.values for p in self.parts])
        if keys.equals(read_keys):
            return read_values
        at = SortedPairs(read_keys, read_values).find(keys)
        return read_values.take(pa.array(at)) if (at >= 0).all() else None


class PartitionState:
    """One partition's state. Reads, ``stage`` and ``snapshot`` may run in many threads at once.

    ``directory`` is the partition's own below the state location
    (``operators/<operator>/<n>/<partition>/<store>``). What an earlier process left in ``local_dir``
    is used if ``load`` finds it in the lineage, and thrown away if not.
    Raises ``ConcurrentCommitError`` if ``local_dir`` is in use.

    How reads stay exact while versions advance: every read notes which changes it lays over the
    engine. ``complete`` first makes the delta part of all new reads, then waits for the reads that do
    not have it, and only then writes it: whoever still reads has the changed keys from the delta itself.
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
        self._local_dir = Path(local_dir)
        self._storage = storage
        self._directory = directory
        self._conf = conf
        self._backend = backend
        self._lock_file = _lock(self._local_dir)
        try:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._engine: StateEngine = engine(self._local_dir / "engine", conf)
        except BaseException:
            os.close(self._lock_file)
            raise
        self._staged: dict[tuple[int, str], _Delta] = {}
        self._accepted: dict[int, _Delta] = {}
        self._applying: _Delta | None = None
        self._undos: list[_Undo] = []
        self._pins = 0
        self._loading = False
        self._closed = False
        self._last_reads: dict[str, _Read] = {}
        self._readers: dict[object, tuple[_Delta | _Undo, ...]] = {}
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._version: int
        self._head: str | None
        self._completed: _View | None
        self._set_completed(self._engine.state.version, self._engine.state.head)
        self._mutation = threading.Lock()
        self._snapshotting = threading.Lock()
        self._digests = snapshot.Digests()
        self._custom = dict.fromkeys(
            ("bytes_written", "snapshot_bytes_written", "snapshots", "get_ms", "changelog_ms", "apply_ms", "load_ms"),
            0.0,
        )
        self._custom["snapshot_ms"] = 0.0

    @property
    def _scratch(self) -> Path:
        return self._local_dir / "scratch"

    @property
    def version(self) -> int:
        """The last completed version here."""
        return self._version

    @property
    def head(self) -> str | None:
        """The path of the changelog that made it; None for the empty version 0."""
        return self._head

    @property
    def is_loading(self) -> bool:
        """Whether reads wait until a version is loaded."""
        return self._loading

    def wait_loaded(self, seconds: float) -> bool:
        """Whether reads need not wait for a version to be loaded, now or at some moment within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._loading, seconds)

    # -- versions ------------------------------------------------------------------------------

    def load(self, lineage: Lineage) -> None:
        """Bring the state to the version of ``lineage``.

        Goes on from what is held if that is part of the lineage, else from the nearest snapshot, else
        from the empty version; if a snapshot turns out to be damaged, from an older one. Files are
        fetched in parallel and checked. If no way leads to the version, the error of the first one is
        raised (``MissingFileError``, ``DamagedFileError``), and the state is at some version of the
        lineage. Reads wait meanwhile. Pending changes that do not follow from the loaded version are dropped.
        """
        started = time.perf_counter()
        with self._mutation:
            self._check_open()
            # A write that ended midway leaves the engine at no version.
            if (self._version, self._head) == (lineage.version, lineage.head) and self._engine.state.head == self._head:
                return
            with self._changed:
                self._loading = True
                self._completed = None
                self._wait_for_readers(lambda _: False)
            try:
                self._load(lineage)
            finally:
                with self._changed:
                    self._undos.clear()
                    self._drop_unrelated()
                    self._loading = False
                    self._set_completed(self._version, self._head)
                    self._changed.notify_all()
            self._custom["load_ms"] = (time.perf_counter() - started) * 1e3

    def _load(self, lineage: Lineage) -> None:
        first_error: Exception | None = None
        for start in self._starts(lineage):
            try:
                if start is None:
                    self._engine.clear()
                    self._version, self._head = 0, None
                elif isinstance(start, SnapshotRef):
                    self._restore(start)
                elif isinstance(start, Rescaled):
                    self._rescale(start)
                rest = [ref for ref in lineage.changelogs if ref.version > self._version]
                if [ref.version for ref in rest] != list(range(self._version + 1, lineage.version + 1)):
                    raise MissingFileError(
                        f"Not all changelogs from version {self._version + 1} of {self._directory} are among the files that "
                        f"lead to version {lineage.version}."
                    )
                self._replay(rest)
                return
            except (MissingFileError, DamagedFileError, LocalStateDamagedError) as error:
                first_error = first_error or error
                log.warning("Version %d of %s cannot be loaded this way: %s", lineage.version, self._directory, error)
        assert first_error is not None
        raise first_error

    def _starts(self, lineage: Lineage) -> list[SnapshotRef | LocalState | Rescaled | None]:
        """Where loading may begin, the best first: a snapshot, what is held here, an earlier layout, or (None) nothing."""
        heads: dict[int, str] = {ref.version: ref.file.path for ref in lineage.changelogs}
        if lineage.rescaled is not None:
            heads[lineage.rescaled.version] = lineage.rescaled.head
        held = self._engine.state
        is_held_right = held.head is not None and heads.get(held.version) == held.head
        above = (
            held.version if is_held_right else -1
        )  # a query may begin with a state: its version 0 is a snapshot then
        starts: list[SnapshotRef | LocalState | Rescaled | None] = [
            ref
            for ref in reversed(lineage.snapshots)
            if above < ref.version <= lineage.version and heads.get(ref.version) == ref.head
        ]
        if is_held_right:
            # Replaying a few changelogs is cheaper than fetching everything.
            is_near = not starts or lineage.snapshots[-1].version - held.version <= self._conf.deltas_per_snapshot
            starts.insert(0 if is_near else len(starts), held)
        if lineage.rescaled is not None:
            starts.append(lineage.rescaled)
        elif lineage.is_empty or (1 in heads and 0 not in heads):
            starts.append(None)
        if not starts:
            raise MissingFileError(
                f"No snapshot leads to version {lineage.version} of {self._directory}, and its changelogs begin with version "
                f"{min(heads, default=0)}."
            )
        return starts

    def _restore(self, ref: SnapshotRef) -> None:
        descriptor = snapshot.read_descriptor(self._storage, ref)
        with self._scratch_directory() as directory:
            snapshot.download(self._storage, descriptor, self._backend, directory, self._conf.load_threads)
            fault_points.reached("load:downloaded")
            self._version, self._head = 0, None
            name = self._storage.full_location(ref.file.path)
            try:
                self._engine.restore(directory)
            except (DamagedFileError, LocalStateDamagedError) as error:
                raise DamagedFileError(f"The files of {name} cannot be opened: {error}") from error
            if self._engine.state != descriptor.state:
                found = self._engine.state
                self._engine.clear()
                raise DamagedFileError(f"{name} should hold {descriptor.state}, but its files hold {found}.")
            self._version, self._head = ref.version, ref.head

    def _rescale(self, rescaled: Rescaled) -> None:
        """Take over the keys from ``rescaled.start`` to ``end`` of the partitions of an earlier layout."""
        # Whoever dies meanwhile leaves a state that no lineage knows.
        unfinished = LocalState(0, f"{rescaled.head}, unfinished", None)
        self._engine.clear()
        self._version, self._head = unfinished.version, unfinished.head
        families: set[str] = set()
        num_keys = 0
        for source in rescaled.sources:
            with self._scratch_directory() as directory, self._opened(source, directory) as state:
                for family in sorted(state.column_families()):
                    families.add(family)
                    for batch in state.scan(None, rescaled.start, rescaled.end, family):
                        pairs = SortedPairs(batch.column("key"), batch.column("value"))
                        num_keys += len(pairs)
                        self._engine.prepare(Changes({family: pairs}))(unfinished)
                        fault_points.reached("load:rescaling")
        made = LocalState(rescaled.version, rescaled.head, num_keys if self._conf.track_total_number_of_rows else None)
        self._engine.prepare(Changes({family: SortedPairs.empty() for family in families}))(made)
        self._version, self._head = rescaled.version, rescaled.head

    @contextmanager
    def _opened(self, source: Source, directory: Path) -> Iterator[PartitionState]:
        # To count keys, replaying would have to look up every one that it writes; they are counted as they are taken over.
        conf = replace(self._conf, provider=source.backend, track_total_number_of_rows=False)
        state = open_partition(directory / "source", self._storage, source.directory, conf)
        try:
            state.load(source.lineage)
            yield state
        finally:
            state.close()

    @contextmanager
    def _scratch_directory(self) -> Iterator[Path]:
        directory = self._scratch / uuid.uuid4().hex
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _replay(self, changelogs: Sequence[ChangelogRef]) -> None:
        if not changelogs:
            return
        with ThreadPoolExecutor(self._conf.load_threads, thread_name_prefix="statestore-load") as pool:
            # A window bounds what is held in memory of a long chain.
            window = self._conf.load_threads * 2
            reads = [pool.submit(self._storage.read, ref.file) for ref in changelogs[:window]]
            try:
                for i, ref in enumerate(changelogs):
                    data = reads[i % window].result()
                    if i + window < len(changelogs):
                        reads[i % window] = pool.submit(self._storage.read, changelogs[i + window].file)
                    self._replay_one(ref, data)
            finally:
                for read in reads:
                    read.cancel()

    def _replay_one(self, ref: ChangelogRef, data: bytes) -> None:
        name = self._storage.full_location(ref.file.path)
        meta, changes = read_changelog(data, name)
        if meta.version != ref.version or meta.base != self._head:
            raise DamagedFileError(
                f"{name} holds version {meta.version} on top of {meta.base}, but version {ref.version} on top of "
                f"{self._head} is needed here: files have been exchanged. Restore them from a copy."
            )
        growth = _growth(changes, self._before(changes)) if self._conf.track_total_number_of_rows else None
        self._engine.prepare(changes)(self._next_state(ref.version, ref.file.path, growth))
        self._version, self._head = ref.version, ref.file.path

    def _next_state(self, version: int, head: str, growth: int | None) -> LocalState:
        num_keys = self._engine.state.num_keys
        return LocalState(version, head, None if growth is None or num_keys is None else num_keys + growth)

    def _before(self, changes: Changes) -> Changes:
        """The pairs that ``changes`` replace in the engine: null where there is none."""
        if self._engine.state.num_keys == 0:
            return Changes({n: SortedPairs(p.keys, pa.nulls(len(p), pa.binary())) for n, p in changes.families.items()})
        # Keys that are written and had not been read are new ones mostly, as those of a list's elements.
        get = partial(self._engine.get_many, keep=False)
        return Changes({n: SortedPairs(p.keys, get(p.keys, n)) for n, p in changes.families.items()})

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
        before = self._before_images(delta)
        growth = _growth(delta.changes, before) if before and self._conf.track_total_number_of_rows else None
        state = self._next_state(delta.meta.version, delta.file.path, growth)
        num_keys = self._engine.state.num_keys
        undo = (
            None if before is None else _Undo(self._version, self._head, before, self._engine.column_families, num_keys)
        )
        held = self._version, self._head, self._undos
        with self._changed:
            self._applying = delta
            self._undos = self._kept_undos(undo)
            self._set_completed(delta.meta.version, delta.file.path)
            self._wait_for_readers(lambda layers: delta in layers)
        try:
            fault_points.reached("apply")
            delta.apply.result()(state)
        except BaseException:
            with self._changed:
                self._version, self._head, self._undos = held
            raise
        finally:
            with self._changed:
                self._applying = None
                self._set_completed(self._version, self._head)
        self._custom["apply_ms"] = (time.perf_counter() - started) * 1e3

    def _before_images(self, delta: _Delta) -> Changes | None:
        before = delta.before.result()
        return self._before(delta.changes) if before is None and self._needs_before() else before

    def _needs_before(self) -> bool:
        """Whether before-images are worth looking up; those at hand are kept in any case."""
        return self._conf.track_total_number_of_rows or bool(self._pins)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Meanwhile, what the last versions change is kept for readers, even if that must be looked up."""
        with self._changed:
            self._pins += 1
        try:
            yield
        finally:
            with self._changed:
                self._pins -= 1

    def _kept_undos(self, newest: _Undo | None) -> list[_Undo]:
        kept: list[_Undo] = []
        nbytes = 0
        for undo in () if newest is None else (newest, *reversed(self._undos)):
            nbytes += undo.nbytes
            if len(kept) == self._conf.max_versions_in_memory or nbytes > self._conf.versions_in_memory_bytes:
                break
            kept.insert(0, undo)
        return kept

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
        apply = _background.submit(self._engine.prepare, changes)
        before = _background.submit(self._before_at, meta, changes)
        path = f"{self._directory}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        fault_points.reached("commit:changelog")
        ref = self._storage.put_new(path, write_changelog(changes, meta, self._conf.compression))
        fault_points.reached("commit:durable")
        with self._changed:
            self._staged[(meta.version, meta.attempt)] = _Delta(meta, ref, changes, before, apply)
            self._custom["bytes_written"] += ref.size
            self._custom["changelog_ms"] = (time.perf_counter() - started) * 1e3
        return ref

    def _before_at(self, meta: ChangelogMeta, changes: Changes) -> Changes | None:
        """The pairs that changes replace, if they can be told now; None for later, or for never."""
        if self._loading:
            return None  # the threads are for all partitions: none may wait long
        try:
            with self._reading(meta.version - 1, meta.base) as view:
                known: dict[str, SortedPairs] = {}
                unknown: dict[str, SortedPairs] = {}
                for family, pairs in changes.families.items():
                    read = self._last_reads.get(family)
                    values = read.values(pairs.keys) if read is not None and read.head == meta.base else None
                    if not len(pairs):
                        known[family] = pairs
                    elif values is not None:
                        known[family] = SortedPairs(pairs.keys, values)
                    else:
                        unknown[family] = pairs
                # With something over it, the engine does not show the version below.
                if unknown and (view.layers or not self._needs_before()):
                    return None
                return Changes({**known, **self._before(Changes(unknown)).families})
        except (VersionNotFoundError, StoreClosedError):
            return None  # it is being loaded, was rolled back, or is past already

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
        reader = object()
        view = self._begin_read(reader, version, head)
        try:
            yield view
        finally:
            self._end_read(reader)

    def _begin_read(self, reader: object, version: int | None, head: str | None) -> _View:
        """A view that stays as it is until ``_end_read(reader)``.

        The completed version is read without the lock. Whoever changes what it is made of sets ``_completed`` first, and looks at the readers then;
        a reader signs on first, and then looks whether ``_completed`` is still the same. So one of them sees the other.
        """
        view = self._completed
        if view is not None and version in (None, view.version) and head in (None, view.head):
            self._readers[reader] = view.layers
            if self._completed is view:
                return view
            self._end_read(reader)
        with self._changed:
            self._changed.wait_for(lambda: not self._loading)
            self._check_open()
            view = self._view(self._version if version is None else version, head)
            self._readers[reader] = view.layers
            return view

    def _set_completed(self, version: int, head: str | None) -> None:
        """Show this version from now on. The view comes first: a read that follows a look at ``version`` must not show an earlier one."""
        layers = () if self._applying is None else (self._applying,)
        families = self._engine.column_families.union(*(delta.changes.families for delta in layers))
        self._completed = _View(version, layers, head, families)
        self._version, self._head = version, head

    def _end_read(self, reader: object) -> None:
        del self._readers[reader]
        if self._num_waiting:  # one who begins to wait later looks at the readers after that
            with self._changed:
                self._changed.notify_all()

    def _wait_for_readers(self, may_stay: Callable[[tuple[_Delta | _Undo, ...]], bool]) -> None:
        """Wait, with the lock, for the reads under way but for those whose layers are harmless."""
        self._num_waiting += 1
        try:
            self._changed.wait_for(lambda: all(may_stay(layers) for layers in list(self._readers.values())))
        finally:
            self._num_waiting -= 1

    def _view(self, version: int, head: str | None) -> _View:
        layers: list[_Delta | _Undo] = [] if self._applying is None else [self._applying]
        families = self._engine.column_families.union(*(d.changes.families for d in layers))
        if version < self._version:
            for undo in reversed(self._undos):
                layers.append(undo)
                if (undo.version, undo.head) == (version, head if head is not None else undo.head):
                    return _View(version, tuple(layers), undo.head, undo.families)
            raise self._not_held(version, head)
        at = self._head
        for delta in self._steps_above(version, head):
            layers.append(delta)
            families = families.union(delta.changes.families)
            at = delta.file.path
        if head is not None and head != at:
            raise self._not_held(version, head)
        return _View(version, tuple(layers), at, families)

    def _steps_above(self, version: int, head: str | None) -> list[_Delta]:
        """What leads from the completed version to a later one: what was accepted, or else what ends with ``head``.

        Of a repeated attempt the coordinator may have said already that it counts, and its acknowledgement be still on its way.
        """
        steps: list[_Delta] = []
        at = self._head
        for v in range(self._version + 1, version + 1):
            delta = self._accepted.get(v)
            if delta is None or delta.meta.base != at:
                break
            steps.append(delta)
            at = delta.file.path
        if len(steps) == version - self._version and head in (None, at):
            return steps
        if head is None:
            raise self._not_held(version, head)
        try:
            return self._steps_to(version, head)
        except LineageMismatchError as error:
            raise self._not_held(version, head) from error

    def _not_held(self, version: int, head: str | None) -> VersionNotFoundError:
        held = sorted({*(u.version for u in self._undos), self._version, *self._accepted})
        return VersionNotFoundError(
            f"Version {version}{'' if head is None else f' ({head})'} of {self._directory} is not held here; "
            f"held: {', '.join(map(str, held))} ({self._head})."
        )

    def get_many(
        self,
        keys: pa.Array | pa.ChunkedArray,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
        remember: bool = True,
    ) -> pa.BinaryArray:
        """Values at a version, in the order of ``keys``; null where a key has none. Sorted keys are fastest.

        ``version`` None is the last completed one. With ``remember``, what is read may spare the commit that follows reading it
        again; queries, which no commit follows, say False. Raises ``VersionNotFoundError`` if the version, or the one that the
        changelog ``head`` made, is not held.
        """
        started = time.perf_counter()
        keys = as_binary("keys", keys)
        if keys.null_count:
            raise InvalidStateStoreArgument(f"{keys.null_count} of {len(keys)} keys are null; a key cannot be null.")
        reader = object()
        view = self._begin_read(reader, version, head)
        try:
            self._check_family(column_family, view)
            values = self._engine.get_many(keys, column_family)
            if remember and not view.layers and len(keys) and is_strictly_sorted(keys):
                self._remember(view.head, column_family, SortedPairs(keys, values))
            for layer in view.layers:
                if column_family in layer.changes.families:
                    values = layer.changes.families[column_family].overlay(keys, values)
        finally:
            self._end_read(reader)
        if remember:
            self._custom["get_ms"] = (time.perf_counter() - started) * 1e3
        return values

    def get_one(
        self,
        key: bytes,
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> bytes | None:
        """The value of one key at a version, None if it has none: ``get_many`` for a single lookup, in some microseconds."""
        reader = object()
        view = self._begin_read(reader, version, head)
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
            self._end_read(reader)

    def _remember(self, head: str | None, column_family: str, read: SortedPairs) -> None:
        """Keep what was read, for the commit that may follow, as long as it is not much."""
        held = self._last_reads.get(column_family)
        follows = held is not None and held.head == head and held.parts[-1].keys[-1].as_py() < read.keys[0].as_py()
        parts, nbytes = (held.parts, held.nbytes) if held is not None and follows else ((), 0)
        nbytes += read.nbytes
        if nbytes <= self._conf.versions_in_memory_bytes:
            self._last_reads[column_family] = _Read(head, (*parts, read), nbytes)

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
        return self.scan_ranges([(start, end)], version, column_family, head=head)[0]

    def scan_ranges(
        self,
        ranges: Sequence[tuple[bytes | None, bytes | None]],
        version: int | None = None,
        column_family: str = DEFAULT_FAMILY,
        *,
        head: str | None = None,
    ) -> list[Iterator[pa.RecordBatch]]:
        """``scan`` of several ranges, of which no two overlap: all of them show the same moment."""
        with self._reading(version, head) as view:
            self._check_family(column_family, view)
            bases = [self._engine.scan(start, end, column_family) for start, end in ranges]
        changes = SortedPairs.empty()
        for layer in view.layers:
            if column_family in layer.changes.families:
                pairs = layer.changes.families[column_family]
                changes = changes.under(pairs.between(*ranges[0]) if len(ranges) == 1 else pairs)
        return [
            merged_scan(base, changes.between(*bounds) if len(changes) else changes)
            for base, bounds in zip(bases, ranges, strict=True)
        ]

    def num_keys(self, version: int | None = None, *, head: str | None = None) -> int | None:
        """The exact number of keys of all column families at a version; None if it is not at hand. Raises as ``get_many``."""
        with self._reading(version, head) as view:
            if not view.layers:
                return self._engine.state.num_keys
            last = view.layers[-1]
            return last.num_keys if isinstance(last, _Undo) else None

    def newest(self) -> tuple[int, str | None]:
        """The version with all that was accepted, and its head: what was acknowledged last."""
        with self._changed:
            newest = self._version, self._head
            for version in sorted(self._accepted):
                delta = self._accepted[version]
                if (version - 1, delta.meta.base) == newest:
                    newest = version, delta.file.path
            return newest

    def column_families(self, version: int | None = None, *, head: str | None = None) -> frozenset[str]:
        """The names of the column families that exist at a version."""
        with self._reading(version, head) as view:
            return view.families

    def _check_family(self, column_family: str, view: _View) -> None:
        if column_family not in view.families:
            raise InvalidStateStoreArgument(
                f"There is no column family {column_family!r} in {self._directory}; there are "
                f"{', '.join(sorted(view.families))}. Create it with create_column_family."
            )

    # -- snapshots -----------------------------------------------------------------------------

    def snapshot(self, earlier: SnapshotRef | None) -> SnapshotRef:
        """Upload the completed version, but for the files that ``earlier`` has; commits and reads go on meanwhile.

        What is returned counts once a manifest names it. Raises ``StorageError``, ``StoreClosedError`` if
        the state is closed meanwhile, ``VersionNotFoundError`` for the empty version 0.
        """
        started = time.perf_counter()
        with self._snapshotting, self._scratch_directory() as directory:
            with self._mutation:
                self._check_open()
                state = self._engine.state
                if state.head is None:
                    raise VersionNotFoundError(
                        f"{self._directory} is at the empty version 0: there is nothing to keep."
                    )
                finish = self._engine.capture(directory)
            fault_points.reached("snapshot:captured")
            finish()
            descriptor = None
            if earlier is not None:
                try:
                    descriptor = snapshot.read_descriptor(self._storage, earlier)
                except (MissingFileError, DamagedFileError) as error:
                    log.warning("All of %s is uploaded, for an earlier snapshot is no help: %s", self._directory, error)
            with ThreadPoolExecutor(self._conf.upload_threads, thread_name_prefix="statestore-upload") as pool:
                ref, written = snapshot.upload(
                    self._storage,
                    self._directory,
                    self._backend,
                    directory,
                    state,
                    earlier=descriptor,
                    digests=self._digests,
                    pool=pool,
                    is_cancelled=lambda: self._closed,
                )
        with self._changed:
            self._custom["snapshots"] += 1
            self._custom["snapshot_bytes_written"] += written
            self._custom["snapshot_ms"] = (time.perf_counter() - started) * 1e3
        log.info(
            "Written snapshot file for version %d of %s at %s",
            ref.version,
            self._directory,
            self._storage.full_location(ref.file.path),
        )
        return ref

    # -- life ----------------------------------------------------------------------------------

    def metrics(self, version: int | None = None, *, head: str | None = None) -> StateStoreMetrics:
        """Figures of this partition: times in ms are those of the last call of each kind.

        The number of keys is that of a version that is held (None: the last completed one); ``VersionNotFoundError``.
        """
        with self._reading(version, head) as view, self._changed:
            undo = view.layers[-1] if view.layers and isinstance(view.layers[-1], _Undo) else None
            num_keys = undo.num_keys if undo is not None and undo.num_keys is not None else self._engine.num_keys()
            custom = {**self._custom, "files": float(self._engine.num_files())}
            layers: tuple[_Delta | _Undo, ...] = (*self._staged.values(), *self._accepted.values(), *self._undos)
            held = sum(pairs.nbytes for layer in layers for pairs in layer.changes.families.values())
            return StateStoreMetrics(num_keys, self._engine.memory_bytes() + held, custom)

    def close(self) -> None:
        """Close the engine once the reads under way have ended; scans under way end with an error. Files stay."""
        if self._closed:
            return
        with self._mutation, self._changed:
            self._closed = True
            self._completed = None
            self._wait_for_readers(lambda _: False)
            self._staged.clear()
            self._accepted.clear()
            self._undos.clear()
            self._last_reads = {}
            self._engine.close()
        with self._snapshotting:  # an upload under way ends with the file that it is at
            shutil.rmtree(self._scratch, ignore_errors=True)
        os.close(self._lock_file)

    def destroy(self) -> None:
        """Close, and remove the local files. The durable ones stay."""
        self.close()
        shutil.rmtree(self._local_dir, ignore_errors=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"The state of {self._directory} is closed here: open it again.")


def open_partition(local_dir: Path, storage: CheckpointStorage, directory: str, conf: StateStoreConf) -> PartitionState:
    """Open the state of one partition with the engine that ``conf`` names. See ``PartitionState``."""
    backend = backend_of(conf)
    return PartitionState(local_dir, storage, directory, conf, backend.name, backend.engine)


def _growth(changes: Changes, before: Changes) -> int:
    """By how many keys the state grows."""
    return sum(
        before.families[name].values.null_count - pairs.values.null_count for name, pairs in changes.families.items()
    )


def _lock(local_dir: Path) -> int:
    """Hold a directory until the returned descriptor is closed, or the process ends."""
    local_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(local_dir / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConcurrentCommitError(
            f"{local_dir} is open in another provider, in this process or another: one writer at a time. "
            "Close it, or give each provider its own local_dir."
        ) from error
    return descriptor
