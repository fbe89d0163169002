"""The versions of a partition that can be read: the engine's, with layers of later changes and before-images over it.

Reads stay exact while versions advance.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from weakref import ref

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.exceptions import LineageMismatchError, StoreClosedError, VersionNotFoundError
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.local_state import LocalState
from backends.host_memory import BEFORE_IMAGES, DELTAS, Claim, HostMemory
from backends.storage.locations import FileRef


@dataclass(frozen=True)
class BeforeImage:
    """The pairs that changes replace, and the claim to their memory. The changes have the same keys."""

    changes: Changes
    claim: Claim


@dataclass(eq=False)
class Delta:
    """One attempt's durable changes, which lead to a version.

    ``before`` are the pairs that the changes replace, ``apply`` writes the changes to the engine. Background threads
    make both while the changelog is written. ``claim`` counts the memory of the changes and of ``apply``.
    """

    meta: ChangelogMeta
    file: FileRef
    changes: Changes
    before: Future[BeforeImage | None]
    apply: Future[Callable[[LocalState], None]]
    claim: Claim

    @property
    def nbytes(self) -> int:
        """Memory in bytes, including that of the before-images once they exist."""
        is_there = self.before.done() and self.before.exception() is None
        before = self.before.result() if is_there else None
        return self.claim.nbytes + (0 if before is None else before.claim.nbytes)


@dataclass(eq=False)
class OlderVersion:
    """A version below the completed one, as the before-images that lead back to it from the version above it.

    ``head``, ``families`` and ``num_keys`` are those of ``version``.
    """

    version: int
    head: str | None
    changes: Changes
    families: frozenset[str]
    num_keys: int | None
    claim: Claim | None = None
    """Counts the memory; None until there is room for it."""

    @property
    def nbytes(self) -> int:
        return self.changes.nbytes


Layer: TypeAlias = Delta | OlderVersion


@dataclass(frozen=True)
class VersionView:
    """A version as reads see it: the engine with ``layers`` over it. A later layer overrides an earlier one.

    ``head`` is the changelog that made the version, ``families`` are its column families.
    """

    version: int
    layers: tuple[Layer, ...]
    head: str | None
    families: frozenset[str]


# The changes of the running batch: durable, and not yet part of the completed version.


class PendingChanges:
    """Staged attempts, and the accepted attempt of each version, over a completed version.

    It has no lock: ``ReadableVersions.changed`` guards all access.
    """

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._staged: dict[tuple[int, str], Delta] = {}
        self._accepted: dict[int, Delta] = {}

    def __iter__(self) -> Iterator[Delta]:
        """Return all changes, the staged ones first."""
        yield from self._staged.values()
        yield from self._accepted.values()

    def record_staged(self, delta: Delta) -> None:
        self._staged[(delta.meta.version, delta.meta.attempt)] = delta

    def accept(self, version: int, attempt: str) -> bool:
        """Accept a staged attempt for its version, in place of an earlier one; False if the attempt is unknown."""
        delta = self._staged.pop((version, attempt), None)
        if delta is None:
            accepted = self._accepted.get(version)
            return accepted is not None and accepted.meta.attempt == attempt
        self._accepted[version] = delta
        self._memory.move(delta.claim, DELTAS)
        return True

    def discard(self, version: int, attempt: str) -> None:
        """Drop an attempt's staged changes; if there are none, its accepted ones."""
        if self._staged.pop((version, attempt), None) is not None:
            return
        accepted = self._accepted.get(version)
        if accepted is not None and accepted.meta.attempt == attempt:
            del self._accepted[version]

    def listed(self) -> list[tuple[ChangelogMeta, FileRef, bool]]:
        """Return all changes, and whether they are accepted; in the order of versions."""
        entries = [(d.meta, d.file, False) for d in self._staged.values()]
        entries += [(d.meta, d.file, True) for d in self._accepted.values()]
        return sorted(entries, key=lambda entry: entry[0].version)

    def has_version(self, version: int) -> bool:
        return version in self._accepted or any(staged == version for staged, _ in self._staged)

    def accepted_versions(self) -> list[int]:
        return list(self._accepted)

    def accepted_head(self, version: int) -> str | None:
        """Return the changelog of the accepted attempt of a version; None if there is none."""
        accepted = self._accepted.get(version)
        return None if accepted is None else accepted.file.path

    def accepted_above(self, version: int, head: str | None) -> list[Delta]:
        """Return the accepted changes that continue from a version, one version after the other."""
        steps: list[Delta] = []
        while (delta := self._accepted.get(version + 1)) is not None and delta.meta.base == head:
            steps.append(delta)
            version, head = version + 1, delta.file.path
        return steps

    def steps(self, base: str | None, version: int, head: str) -> list[Delta] | None:
        """Return the changes that lead from ``base`` to ``version`` as ``head`` made it; None if they are not held.

        The list is empty if ``head`` is ``base``.
        """
        deltas = {delta.file.path: delta for delta in self}
        steps: list[Delta] = []
        wanted: str | None = head
        while wanted != base:
            delta = deltas.pop(wanted, None) if wanted is not None else None
            if delta is None or (not steps and delta.meta.version != version):
                return None
            steps.insert(0, delta)
            wanted = delta.meta.base
        return steps

    def drop_unrelated(self, version: int, head: str | None) -> None:
        """Drop the changes that do not continue from a completed version."""
        follows = {head}
        for delta in sorted(self, key=lambda d: d.meta.version):
            if delta.meta.version > version and delta.meta.base in follows:
                follows.add(delta.file.path)
        self._staged = {k: d for k, d in self._staged.items() if d.file.path in follows and k[0] > version}
        self._accepted = {v: d for v, d in self._accepted.items() if d.file.path in follows and v > version}

    def clear(self) -> None:
        self._staged.clear()
        self._accepted.clear()


class ReadableVersions:
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

    @property
    def is_applying(self) -> bool:
        """Return whether changes are being written to the engine now. Reads do not wait for that."""
        return self._applying is not None

    def check_open(self) -> None:
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
        version_below, head_below, older_below = self.version, self.head, self._older
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
                self.version, self.head, self._older = version_below, head_below, _not_dropped(older_below)
            raise
        finally:
            with self.changed:
                self._applying = None
                self._show(self.version, self.head)

    def _with_older(self, before: Changes | None) -> list[OlderVersion]:
        """Return the older versions that stay readable once the present version is one of them.

        They are the newest ones within the limits. ``before`` are the before-images that lead back to the present one.
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
        if self._num_waiting:  # a writer that begins to wait after this check no longer sees the reader
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
        """Return the deltas from the completed version to ``version``, as ``head`` made it.

        These are usually the accepted deltas. But the coordinator may have accepted a repeated attempt, and its answer
        has not arrived here yet. Then a delta that is only staged here leads to ``head``.
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


def _drop(versions: ref[ReadableVersions], one: ref[OlderVersion]) -> None:
    target, dropped = versions(), one()
    if target is not None and dropped is not None:
        target.drop_older(dropped)


def _not_dropped(older: list[OlderVersion]) -> list[OlderVersion]:
    """Return the older versions above the newest one that was dropped concurrently."""
    first = max((i + 1 for i, one in enumerate(older) if one.claim is not None and one.claim.is_dropped), default=0)
    return older[first:]
