"""Loading: bringing an engine to the version of a lineage.

Loading begins with what the engine holds, a snapshot, an earlier layout or nothing, and goes on with changelogs.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from backends import fault_points
from backends.engines.backend import backend_of
from backends.engines.buffered_engine import BufferedEngine
from backends.engines.engine import StateEngine
from backends.exceptions import (
    DamagedFileError,
    LoadEndedError,
    LocalDiskFullError,
    LocalStateDamagedError,
    MissingFileError,
    StorageError,
)
from backends.formats import snapshot
from backends.formats.changelog import Changes, read_changelog
from backends.formats.local_state import LocalState
from backends.formats.manifest import ChangelogRef, Lineage, Rescaled, SnapshotRef, SourcePartition
from backends.partition import rescaling
from backends.partition.before_images import replaced_pairs, state_after
from backends.partition.changelog_reads import ChangelogReads
from backends.partition.context import PartitionContext
from backends.partition.load_watch import LoadWatch
from backends.partition.local_directory import Scratch

log = logging.getLogger(__name__)

REPLAYED_BYTES = 1 << 20
"""Changelogs are applied together up to this many bytes: each look-up of old values and each write has a price of its
own.
"""


class Loading:
    """One load of one engine, which nothing else uses meanwhile.

    ``version`` and ``head`` say how far the load has come. A write that failed midway leaves the engine at no version,
    and these at the one before the write. What a load has fetched and applied before it failed, the next one need not
    fetch and apply again: files of a snapshot stay in the scratch space until a load succeeds. Of a load from an
    earlier layout only the files of the partition stay at which it failed.
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
                # The changelogs need not wait for the snapshot, whose files are other requests.
                with ChangelogReads(self._context.storage, rest, self._context.conf.load_threads) as reads:
                    self._begin_at(start)
                    if [ref.version for ref in rest] != list(range(self.version + 1, lineage.version + 1)):
                        raise MissingFileError(
                            f"Not all changelogs from version {self.version + 1} of {self._context.directory} are "
                            f"among the files that lead to version {lineage.version}."
                        )
                    self._watch.expect(len(rest), sum(ref.file.size for ref in rest))
                    self._replay(reads)
                self._context.scratch.drop_kept()
                return
            except LocalDiskFullError:
                raise  # another way needs room, too
            except (MissingFileError, DamagedFileError, LocalStateDamagedError) as error:
                first_error = first_error or error
                log.warning(
                    "Version %d of %s cannot be loaded this way: %s", lineage.version, self._context.directory, error
                )
        assert first_error is not None
        raise first_error

    def _starts(self, lineage: Lineage) -> list[SnapshotRef | LocalState | Rescaled | None]:
        """Return where loading may begin, the best first.

        A snapshot, what the engine holds (``LocalState``), an earlier layout, or None for the empty version 0.
        """
        heads: dict[int, str] = {ref.version: ref.file.path for ref in lineage.changelogs}
        if lineage.rescaled is not None:
            heads[lineage.rescaled.version] = lineage.rescaled.head
        held = self._engine.state
        is_held_right = held.head is not None and heads.get(held.version) == held.head
        above = held.version if is_held_right else -1  # a query may begin with a state: a snapshot of version 0
        starts: list[SnapshotRef | LocalState | Rescaled | None] = [
            ref
            for ref in reversed(lineage.snapshots)
            if above < ref.version <= lineage.version and heads.get(ref.version) == ref.head
        ]
        if is_held_right:
            # Replaying a few changelogs is cheaper than fetching everything.
            near = self._context.conf.deltas_per_snapshot
            is_near = not starts or lineage.snapshots[-1].version - held.version <= near
            starts.insert(0 if is_near else len(starts), held)
        if lineage.rescaled is not None:
            starts.append(lineage.rescaled)
        elif lineage.is_empty or (1 in heads and 0 not in heads):
            starts.append(None)
        if not starts:
            raise MissingFileError(
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
        snapshot.download(context.storage, descriptor, context.backend, directory, threads, self._watch)
        try:
            fault_points.reached("load:downloaded")
            self.version, self.head = 0, None
            name = context.storage.full_location(ref.file.path)
            try:
                self._engine.restore(directory)
            except LocalDiskFullError:
                raise
            except (DamagedFileError, LocalStateDamagedError) as error:
                raise DamagedFileError(f"The files of {name} cannot be opened: {error}") from error
            if self._engine.state != descriptor.state:
                found = self._engine.state
                self._engine.clear()
                raise DamagedFileError(f"{name} should hold {descriptor.state}, but its files hold {found}.")
            self.version, self.head = ref.version, ref.head
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # the engine has what it wants of it
        self._watch.step()

    def _take_over(self, rescaled: Rescaled) -> None:
        unfinished = LocalState.unfinished(rescaled.head)
        self._engine.clear()
        self.version, self.head = unfinished.version, unfinished.head
        counts_keys = self._context.conf.track_total_number_of_rows
        loaded = partial(self._loaded, start=rescaled.start, end=rescaled.end)
        rescaling.take_over(rescaled, self._engine, loaded, self._watch.step, counts_keys=counts_keys)
        self.version, self.head = rescaled.version, rescaled.head

    @contextmanager
    def _loaded(self, source: SourcePartition, *, start: bytes | None, end: bytes | None) -> Iterator[StateEngine]:
        """Load a partition of an earlier layout into an engine of its own, for as long as the block lasts.

        Of its changelogs, the engine need not hold more than the keys from ``start`` to ``end``.
        """
        context = self._context
        # Keys are counted when they are taken over: to count them in a replay, each would have to be looked up.
        conf = replace(context.conf, provider=source.backend, track_total_number_of_rows=False)
        backend = backend_of(conf)
        with context.scratch.directory() as directory:
            engine = BufferedEngine(directory / "engine", conf, start, end)
            try:
                scratch = Scratch(context.scratch.kept(source.directory))
                held = PartitionContext(engine, backend.name, context.storage, source.directory, conf, scratch)
                Loading(held, engine.state.version, engine.state.head, self._watch).run(source.lineage)
                yield engine
            finally:
                engine.close()

    def _replay(self, changelogs: Iterable[tuple[ChangelogRef, bytes]]) -> None:
        """Apply changelogs in their order, several small ones at once. A load that is to be gone on with loses none."""
        head = self.head
        waiting: list[tuple[ChangelogRef, Changes]] = []
        nbytes = 0
        try:
            for ref, data in changelogs:
                changes = self._decoded(ref, data, head)
                if waiting and nbytes + changes.nbytes > REPLAYED_BYTES:
                    self._apply(waiting)
                    waiting, nbytes = [], 0
                waiting.append((ref, changes))
                head, nbytes = ref.file.path, nbytes + changes.nbytes
                if nbytes >= REPLAYED_BYTES:
                    self._apply(waiting)
                    waiting, nbytes = [], 0
                self._watch.step(1, ref.file.size)
        except (StorageError, LoadEndedError):
            if waiting:
                self._apply(waiting)
            raise
        if waiting:
            self._apply(waiting)

    def _decoded(self, ref: ChangelogRef, data: bytes, head: str | None) -> Changes:
        """Return the changes of a changelog, which are to lead on from ``head``."""
        name = self._context.storage.full_location(ref.file.path)
        meta, changes = read_changelog(data, name)
        if meta.version != ref.version or meta.base != head:
            raise DamagedFileError(
                f"{name} holds version {meta.version} on top of {meta.base}, but version {ref.version} on top of "
                f"{head} is needed here: files have been exchanged. Restore them from a copy."
            )
        return changes

    def _apply(self, steps: Sequence[tuple[ChangelogRef, Changes]]) -> None:
        """Apply the changes of changelogs, at least one, of which each leads on from the one before it."""
        last, _ = steps[-1]
        changes = Changes.together([changes for _, changes in steps])
        before = replaced_pairs(self._engine, changes) if self._context.conf.track_total_number_of_rows else None
        state = state_after(self._engine.state, last.version, last.file.path, changes, before)
        self._engine.prepare(changes)(state)
        self.version, self.head = last.version, last.file.path
