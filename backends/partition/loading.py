"""Loading: bringing an engine in its local directory to the version of a lineage.

Loading begins with what the engine holds, a snapshot, an earlier layout or nothing, and continues with changelogs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from backends import exceptions, fault_points
from backends.conf import StateStoreConf
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import BufferedEngine, StateEngine, backend_of, writing_to
from backends.exceptions import ConcurrentCommitError
from backends.formats import snapshot
from backends.formats.changelog import Changes, read_changelog
from backends.formats.local_state import LocalState
from backends.formats.manifest import ChangelogRef, Lineage, Rescaled, SnapshotRef, SourcePartition
from backends.load_watch import LoadWatch
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import digest

log = logging.getLogger(__name__)

_KEPT = "kept-"


class Scratch:
    """Short-lived directories below ``root``, which is created with the first one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def kept(self, name: str) -> Path:
        """Return the directory of a name; create it if necessary. It stays until ``drop_kept`` or ``clear``."""
        directory = self.root / f"{_KEPT}{digest(name.encode())}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def drop_kept(self) -> None:
        for directory in self.root.glob(f"{_KEPT}*"):
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Make a new empty directory, and remove the directory at the end of the block."""
        directory = self.root / uuid.uuid4().hex
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything that is left here, including files of a process that was killed."""
        shutil.rmtree(self.root, ignore_errors=True)


class LocalDirectory:
    """The directory ``path``, created if necessary and locked until ``unlock`` or the end of the process.

    ``engine`` is the engine's own directory in it. Raises ``ConcurrentCommitError`` if the directory is in use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_file = lock(path)
        self.engine = path / "engine"
        self.scratch = Scratch(path / "scratch")

    def unlock(self) -> None:
        """Let others use the directory. The files stay."""
        os.close(self._lock_file)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def lock(directory: Path) -> int:
    """Lock a directory until the returned file descriptor is closed, or the process ends.

    Raises ``ConcurrentCommitError`` if another descriptor holds the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConcurrentCommitError(
            f"{directory} is open in another provider, in this process or another: one writer at a time. "
            "Close it, or give each provider its own local_dir."
        ) from error
    return descriptor


@dataclass(frozen=True)
class PartitionContext:
    """An engine and the durable files that it is loaded from.

    ``directory`` is the partition's own in the ``storage``, ``backend`` the name of the engine's backend, and
    ``scratch`` provides local directories for temporary files.
    """

    engine: StateEngine
    backend: str
    storage: CheckpointStorage
    directory: str
    conf: StateStoreConf
    scratch: Scratch


# The changelogs of a load, read ahead: some at once, and the first small ones during the fetch of a snapshot.


AHEAD_BYTES = 1 << 20
"""At most this many bytes of changelogs are read before they can be applied: a host loads dozens of partitions at once.
"""


class ChangelogReads:
    """Reads changelogs in their order with ``threads`` threads. A context manager; no read continues after its end.

    At most twice as many changelogs as threads are in memory, and ``AHEAD_BYTES`` before the first one is requested. A
    read that another load of the process shares needs no thread here.
    """

    def __init__(self, storage: CheckpointStorage, changelogs: Sequence[ChangelogRef], threads: int) -> None:
        self._storage = storage
        self._left = deque(changelogs)
        self._window = 2 * threads
        self._under_way: deque[tuple[ChangelogRef, Callable[[], bytes]]] = deque()
        self._threads = threads
        self._pool: Pool | None = None
        nbytes = 0
        while self._left and len(self._under_way) < self._window:
            nbytes += self._left[0].file.size
            if nbytes > AHEAD_BYTES:
                break
            self._begin_next()

    def __enter__(self) -> ChangelogReads:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[ChangelogRef, bytes]]:
        """Return each changelog with its content. Raises what ``CheckpointStorage.read`` raises."""
        while self._left or self._under_way:
            while self._left and len(self._under_way) < self._window:
                self._begin_next()
            ref, read = self._under_way.popleft()
            yield ref, read()

    def _begin_next(self) -> None:
        ref = self._left.popleft()
        if self._storage.is_being_shared(ref.file):
            # Another load reads it, or has read it: a thread would only wait.
            self._under_way.append((ref, partial(self._storage.read, ref.file)))
            return
        if self._pool is None:
            self._pool = Pool(self._threads, thread_name_prefix="statestore-load")
        self._under_way.append((ref, self._pool.submit(self._storage.read, ref.file).result))


def replaced_pairs(engine: StateEngine, changes: Changes) -> Changes:
    """Return the pairs that ``changes`` replace in the engine: null where there is none."""
    if engine.state.num_keys == 0:
        return Changes({n: SortedPairs(p.keys, pa.nulls(len(p), pa.binary())) for n, p in changes.families.items()})
    # Keys that are written without a prior read are mostly new ones, such as those of a list's elements.
    get = partial(engine.get_many, keep=False)
    return Changes({n: SortedPairs(p.keys, get(p.keys, n)) for n, p in changes.families.items()})


def key_growth(before: Mapping[str, SortedPairs], changes: Changes) -> int:
    """Return by how many pairs ``changes`` let the state grow; ``before`` has their before-images by family."""
    return sum(before[name].values.null_count - pairs.values.null_count for name, pairs in changes.families.items())


def state_after(below: LocalState, version: int, head: str, growth: int | None) -> LocalState:
    """Return the state of an engine after ``version``; None for the growth or the keys below: they are not counted."""
    if growth is None or below.num_keys is None:
        return LocalState(version, head, None)
    return LocalState(version, head, below.num_keys + growth)


REPLAYED_BYTES = 1 << 20
"""Changelogs are applied together up to this many bytes: each look-up of old values and each write has a fixed cost."""


class _Step(NamedTuple):
    """A changelog to be applied; ``growth`` is its ``ChangelogMeta.key_growth``."""

    ref: ChangelogRef
    changes: Changes
    growth: int | None


class Loading:
    """One load of one engine, with exclusive access.

    ``version`` and ``head`` are the progress of the load. A write that failed midway leaves the engine without a
    version, while these still name the version before the write. A later load reuses what this one has fetched and
    applied before it failed: files of a snapshot stay in the scratch space until a load succeeds. Of a load from an
    earlier layout, only the files of the partition where it failed stay.
    """

    def __init__(
        self, context: PartitionContext, version: int, head: str | None, watch: LoadWatch | None = None
    ) -> None:
        self._context = context
        self._watch = LoadWatch(context.directory) if watch is None else watch
        self._engine = context.engine
        self.version = version
        self.head = head

    def run(self, lineage: Lineage) -> None:
        """Bring the engine to the version of ``lineage``; see ``PartitionState.load``."""
        first_error: Exception | None = None
        for start in self._starts(lineage):
            above = 0 if start is None else start.version
            rest = [ref for ref in lineage.changelogs if ref.version > above]
            try:
                # The changelogs need not wait for the snapshot, whose files are separate requests.
                with ChangelogReads(self._context.storage, rest, self._context.conf.load_threads) as reads:
                    self._begin_at(start)
                    if [ref.version for ref in rest] != list(range(self.version + 1, lineage.version + 1)):
                        raise exceptions.MissingFileError(
                            f"Not all changelogs from version {self.version + 1} of {self._context.directory} are "
                            f"among the files that lead to version {lineage.version}."
                        )
                    self._watch.expect(len(rest), sum(ref.file.size for ref in rest))
                    self._replay(reads)
                self._context.scratch.drop_kept()
                return
            except exceptions.LocalDiskFullError:
                raise  # another start needs room, too
            except (
                exceptions.MissingFileError,
                exceptions.DamagedFileError,
                exceptions.LocalStateDamagedError,
            ) as error:
                first_error = first_error or error
                log.warning(
                    "Version %d of %s cannot be loaded this way: %s", lineage.version, self._context.directory, error
                )
        assert first_error is not None
        raise first_error

    def _starts(self, lineage: Lineage) -> list[SnapshotRef | LocalState | Rescaled | None]:
        """Return the possible starts of the load, the best first.

        A start is a snapshot, what the engine holds (``LocalState``), an earlier layout, or None for the empty version
        0.
        """
        heads: dict[int, str] = {ref.version: ref.file.path for ref in lineage.changelogs}
        if lineage.rescaled is not None:
            heads[lineage.rescaled.version] = lineage.rescaled.head
        local = self._engine.state
        is_held_right = local.head is not None and heads.get(local.version) == local.head
        above = local.version if is_held_right else -1  # a query may begin with a state: a snapshot of version 0
        starts: list[SnapshotRef | LocalState | Rescaled | None] = [
            ref
            for ref in reversed(lineage.snapshots)
            if above < ref.version <= lineage.version and heads.get(ref.version) == ref.head
        ]
        if is_held_right:
            # Replaying a few changelogs is cheaper than fetching everything.
            near = self._context.conf.deltas_per_snapshot
            is_near = not starts or lineage.snapshots[-1].version - local.version <= near
            starts.insert(0 if is_near else len(starts), local)
        if lineage.rescaled is not None:
            starts.append(lineage.rescaled)
        elif lineage.is_empty or (1 in heads and 0 not in heads):
            starts.append(None)
        if not starts:
            raise exceptions.MissingFileError(
                f"No snapshot leads to version {lineage.version} of {self._context.directory}, and its changelogs "
                f"begin with version {min(heads, default=0)}."
            )
        return starts

    def _begin_at(self, start: SnapshotRef | LocalState | Rescaled | None) -> None:
        if isinstance(start, SnapshotRef):
            self._restore(start)
        elif isinstance(start, Rescaled):
            self._take_over(start)
        elif start is None:
            self._engine.clear()
            self.version, self.head = 0, None

    def _restore(self, ref: SnapshotRef) -> None:
        context = self._context
        descriptor = snapshot.read_descriptor(context.storage, ref)
        directory = context.scratch.kept(ref.file.path)
        threads = context.conf.load_threads
        download = partial(
            snapshot.download, context.storage, descriptor, context.backend, directory, threads, self._watch
        )
        try:
            with writing_to(directory):
                download()
        except exceptions.LocalDiskFullError:
            if self._engine.state == LocalState():
                raise
            # The engine's own files, which the snapshot replaces, take the room.
            self._engine.clear()
            self.version, self.head = 0, None
            directory.mkdir(parents=True, exist_ok=True)
            download()
        try:
            fault_points.reached("load:downloaded")
            self.version, self.head = 0, None
            name = context.storage.full_location(ref.file.path)
            try:
                self._engine.restore(directory)
            except exceptions.LocalDiskFullError:
                raise
            except (exceptions.DamagedFileError, exceptions.LocalStateDamagedError) as error:
                raise exceptions.DamagedFileError(f"The files of {name} cannot be opened: {error}") from error
            if self._engine.state != descriptor.state:
                state = self._engine.state
                self._engine.clear()
                raise exceptions.DamagedFileError(f"{name} should hold {descriptor.state}, but its files hold {state}.")
            self.version, self.head = ref.version, ref.head
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # the engine has taken what it needs from it
        self._watch.step()

    def _take_over(self, rescaled: Rescaled) -> None:
        """Rescale: take the keys from ``rescaled.start`` to ``end`` over from the partitions of an earlier layout.

        The layout of an operator changes when its query restarts with another number of partitions or another backend.
        ``formats/manifest_chain.py`` finds the partitions that have the range.
        """
        # A process that dies here leaves a state that no lineage knows.
        unfinished = LocalState.unfinished(rescaled.head)
        self._engine.clear()
        self.version, self.head = unfinished.version, unfinished.head
        families: set[str] = set()
        num_keys = 0

        def taken_over() -> Iterator[tuple[str, SortedPairs]]:
            nonlocal num_keys
            for source in rescaled.sources:
                with self._loaded(source, rescaled.start, rescaled.end) as engine:
                    for family in sorted(engine.column_families):
                        families.add(family)
                        for batch in engine.scan(rescaled.start, rescaled.end, family):
                            pairs = SortedPairs(batch.column("key"), batch.column("value"))
                            num_keys += len(pairs)
                            yield family, pairs
                            self._watch.step()
                            fault_points.reached("load:rescaling")

        self._engine.load_sorted(taken_over(), unfinished)
        counts_keys = self._context.conf.track_total_number_of_rows
        state = LocalState(rescaled.version, rescaled.head, num_keys if counts_keys else None)
        self._engine.prepare(Changes({family: SortedPairs.empty() for family in families}))(state)
        self.version, self.head = rescaled.version, rescaled.head

    @contextmanager
    def _loaded(self, source: SourcePartition, start: bytes, end: bytes | None) -> Iterator[StateEngine]:
        """Load a partition of an earlier layout into a separate engine, for the duration of the block.

        Of its changelogs, the engine need not hold more than the keys from ``start`` to ``end``.
        """
        context = self._context
        # Keys are counted when they are taken over: counting them in a replay would need a look-up of each.
        conf = replace(context.conf, provider=source.backend, track_total_number_of_rows=False)
        backend = backend_of(conf)
        with context.scratch.directory() as directory:
            engine = BufferedEngine(directory / "engine", conf, start, end)
            try:
                scratch = Scratch(context.scratch.kept(source.directory))
                loaded = PartitionContext(engine, backend.name, context.storage, source.directory, conf, scratch)
                Loading(loaded, engine.state.version, engine.state.head, self._watch).run(source.lineage)
                yield engine
            finally:
                engine.close()

    def _replay(self, changelogs: Iterable[tuple[ChangelogRef, bytes]]) -> None:
        """Apply changelogs in their order, several small ones at once. A load that is to continue loses none."""
        head = self.head
        waiting: list[_Step] = []
        nbytes = 0
        try:
            for ref, data in changelogs:
                step = self._decoded(ref, data, head)
                if waiting and nbytes + step.changes.nbytes > REPLAYED_BYTES:
                    self._apply(waiting)
                    waiting, nbytes = [], 0
                waiting.append(step)
                head, nbytes = ref.file.path, nbytes + step.changes.nbytes
                if nbytes >= REPLAYED_BYTES:
                    self._apply(waiting)
                    waiting, nbytes = [], 0
                self._watch.step(1, ref.file.size)
        except (exceptions.StorageError, exceptions.LoadEndedError):
            if waiting:
                self._apply(waiting)
            raise
        if waiting:
            self._apply(waiting)

    def _decoded(self, ref: ChangelogRef, data: bytes, head: str | None) -> _Step:
        """Return the step that a changelog makes, which must follow ``head``."""
        name = self._context.storage.full_location(ref.file.path)
        meta, changes = read_changelog(data, name)
        if meta.version != ref.version or meta.base != head:
            raise exceptions.DamagedFileError(
                f"{name} holds version {meta.version} on top of {meta.base}, but version {ref.version} on top of "
                f"{head} is needed here: files have been exchanged. Restore them from a copy."
            )
        return _Step(ref, changes, meta.key_growth)

    def _apply(self, steps: Sequence[_Step]) -> None:
        """Apply the changes of at least one changelog. Each changelog must follow the one before it."""
        last = steps[-1].ref
        changes = Changes.together([step.changes for step in steps])
        growth: int | None = None
        if self._context.conf.track_total_number_of_rows:
            known = [step.growth for step in steps if step.growth is not None]
            if len(known) == len(steps):
                growth = sum(known)
            else:
                growth = key_growth(replaced_pairs(self._engine, changes).families, changes)
        state = state_after(self._engine.state, last.version, last.file.path, growth)
        self._engine.prepare(changes)(state)
        self.version, self.head = last.version, last.file.path
