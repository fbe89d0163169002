"""Layers of later changes and before-images over the engine, which let reads see other versions than the engine's."""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from backends.conf import StateStoreConf
from backends.engines.engine import StateEngine
from backends.exceptions import ConcurrentCommitError
from backends.formats.changelog import ChangelogMeta, Changes
from backends.formats.local_state import LocalState
from backends.host_memory import DELTAS, Claim, HostMemory
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest


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
        """Memory in bytes."""
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

    It has no lock: ``HeldVersions.changed`` guards all access.
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
        """Keep an attempt's changes."""
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
        """Return whether there are changes of an attempt of this version."""
        return version in self._accepted or any(staged == version for staged, _ in self._staged)

    def accepted_versions(self) -> list[int]:
        """Return the versions that have an accepted attempt."""
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
        """Drop all changes."""
        self._staged.clear()
        self._accepted.clear()


# The local directory of a partition: one process uses the directory at a time, and its scratch space is removed.


_KEPT = "kept-"


class Scratch:
    """Short-lived directories below ``root``, which is created with the first one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def kept(self, name: str) -> Path:
        """Return the directory of a name; create it if necessary. It stays until ``drop_kept`` or ``clear``."""
        directory = self._root / f"{_KEPT}{digest(name.encode())}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def drop_kept(self) -> None:
        """Remove the directories that were kept."""
        for directory in self._root.glob(f"{_KEPT}*"):
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """Make a new empty directory, and remove the directory at the end of the block."""
        directory = self._root / uuid.uuid4().hex
        directory.mkdir(parents=True)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def clear(self) -> None:
        """Remove everything that is left here, including files of a process that was killed."""
        shutil.rmtree(self._root, ignore_errors=True)


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
        """Remove the directory and everything in it."""
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


# The objects that the classes of one partition share.


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
