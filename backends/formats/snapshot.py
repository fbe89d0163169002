"""Snapshots: the whole state of one partition at one version, as files in the storage.

A descriptor lists the files by name, size and digest. A file that an earlier snapshot has uploaded is not uploaded
again: files are compared by content, so it does not matter which process, host or local directory they came from. The
idea is that of RocksDB's and Flink's incremental checkpoints.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from backends import fault_points
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, StoreClosedError
from backends.formats.local_state import LocalState
from backends.formats.manifest import STATE_FORMAT_VERSION, SnapshotRef
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage, file_digest
from backends.storage.file_ref import FileRef

_INLINE_BYTES = 64 << 10


class SnapshotFile(Struct, frozen=True):
    """One file of a snapshot: its name in the backend, and where its content is. The descriptor holds small ones
    itself.
    """

    name: str
    file: FileRef | None = None
    content: bytes | None = None


class SnapshotDescriptor(Struct, frozen=True):
    """The descriptor of a snapshot, ``<version>-<unique>.snapshot`` in the partition's directory."""

    path: str
    backend: str
    state: LocalState
    files: tuple[SnapshotFile, ...]
    format_version: int = field(default=STATE_FORMAT_VERSION)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the files to which the snapshot refers."""
        return frozenset(f.file.path for f in self.files if f.file is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of the files to which the snapshot refers."""
        return sum(f.file.size for f in self.files if f.file is not None)

    def is_complete(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all files of the snapshot are there, in full size. ``sizes`` are those of all stored files."""
        return all(sizes.get(f.file.path) == f.file.size for f in self.files if f.file is not None)


class Watch(Protocol):
    """What ``download`` tells of its progress; see ``backends.partition.load_watch.LoadWatch``."""

    def expect(self, files: int, nbytes: int) -> None:
        """Take note of files that are needed."""

    def begin_file(self, target: Path, size: int) -> None:
        """Take note of a file that is being fetched."""

    def end_file(self, target: Path, *, is_done: bool) -> None:
        """Take note of a file that was fetched, or was not."""

    def step(self, files: int = 0, nbytes: int = 0) -> None:
        """Take note of a step of work."""


class Digests:
    """The digests of local files that never change. Hard links to one file share its digest."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], str] = {}

    def of(self, files: list[Path]) -> dict[Path, str]:
        """Return the digests of these files, and forget those of all others."""
        keys = {path: ((s := path.stat()).st_ino, s.st_size, s.st_mtime_ns) for path in files}
        self._known = {key: self._known.get(key) or file_digest(path) for path, key in keys.items()}
        return {path: self._known[key] for path, key in keys.items()}


def upload(
    storage: CheckpointStorage,
    directory: str,
    backend: str,
    local: Path,
    state: LocalState,
    *,
    earlier: SnapshotDescriptor | None,
    digests: Digests,
    pool: ThreadPoolExecutor,
    is_cancelled: Callable[[], bool],
) -> tuple[SnapshotRef, int]:
    """Upload the files in ``local`` but for those that ``earlier`` has; return the snapshot and the bytes written.

    Raises ``StorageError``. Files that were uploaded before the error are removed when their version is no longer kept.
    """
    assert state.head is not None
    files = sorted(path for path in local.iterdir() if path.stat().st_size)
    large = [path for path in files if path.stat().st_size > _INLINE_BYTES or path.suffix == ".sst"]
    known = digests.of(large)
    # An uploaded file that has been lost or cut short since is uploaded again.
    there = dict(storage.list(directory)) if earlier else {}
    reusable = {
        (f.file.size, f.file.digest): f.file
        for f in (earlier.files if earlier else ())
        if f.file is not None and there.get(f.file.path) == f.file.size
    }
    cancelled = threading.Event()

    def put(path: Path) -> FileRef:
        held = reusable.get((path.stat().st_size, known[path]))
        if held is not None:
            return held
        if cancelled.is_set() or is_cancelled():
            raise StoreClosedError(f"The state of {directory} was closed while a snapshot of it was uploaded.")
        fault_points.reached("snapshot:file")
        name = f"{directory}/{state.version}-{uuid.uuid4().hex}{path.suffix or '.part'}"
        return storage.put_file(name, path)

    uploads = {path: pool.submit(put, path) for path in large}
    try:
        refs = {path: done.result() for path, done in uploads.items()}
    finally:
        cancelled.set()
        for done in uploads.values():
            done.cancel()
    entries = tuple(
        SnapshotFile(p.name, file=refs[p]) if p in refs else SnapshotFile(p.name, content=p.read_bytes()) for p in files
    )
    path = f"{directory}/{state.version}-{uuid.uuid4().hex}.snapshot"
    fault_points.reached("snapshot:descriptor")
    descriptor = storage.put_new(path, seal(SnapshotDescriptor(path, backend, state, entries)))
    fault_points.reached("snapshot:uploaded")
    fresh = [ref for ref in refs.values() if (ref.size, ref.digest) not in reusable]
    return SnapshotRef(state.version, state.head, descriptor), descriptor.size + sum(ref.size for ref in fresh)


def read_descriptor(storage: CheckpointStorage, ref: SnapshotRef) -> SnapshotDescriptor:
    """Read the descriptor that ``ref`` names. Raises ``MissingFileError`` or ``DamagedFileError``."""
    name = storage.full_location(ref.file.path)
    snapshot = unseal(storage.read(ref.file), SnapshotDescriptor, name)
    if (snapshot.path, snapshot.state.version, snapshot.state.head) != (ref.file.path, ref.version, ref.head):
        raise DamagedFileError(
            f"{name} describes version {snapshot.state.version} in {snapshot.path}: files have been exchanged."
        )
    if any(Path(f.name).name != f.name for f in snapshot.files):
        raise DamagedFileError(f"{name} names files outside of the snapshot's directory.")
    return snapshot


def download(
    storage: CheckpointStorage, snapshot: SnapshotDescriptor, backend: str, into: Path, threads: int, watch: Watch
) -> None:
    """Fetch a snapshot's files into a local directory, ``threads`` at once.

    Files that an earlier call has fetched whole, before it failed, are not fetched again. Raises ``MissingFileError``
    or ``DamagedFileError`` naming the file, ``InvalidStateStoreArgument`` for another backend's snapshot.
    """
    if snapshot.backend != backend:
        raise InvalidStateStoreArgument(
            f"{storage.full_location(snapshot.path)} was written by the provider {snapshot.backend!r}, not "
            f"{backend!r}: choose that provider, or a new checkpoint location."
        )
    stored = [(entry.file, into / entry.name) for entry in snapshot.files if entry.file is not None]
    watch.expect(len(stored), sum(ref.size for ref, _ in stored))

    def fetch(ref: FileRef, target: Path) -> None:
        draft = target.with_name(f"{target.name}.draft")
        watch.begin_file(draft, ref.size)
        is_done = False
        try:
            storage.read_to_file(ref, draft)
            draft.rename(target)
            is_done = True
        finally:
            watch.end_file(draft, is_done=is_done)

    with ThreadPoolExecutor(threads, thread_name_prefix="statestore-load") as pool:
        for entry in snapshot.files:
            if entry.file is None:
                (into / entry.name).write_bytes(entry.content or b"")
        there = [ref.size for ref, target in stored if target.exists()]
        watch.step(len(there), sum(there))
        fetches = [pool.submit(fetch, ref, target) for ref, target in stored if not target.exists()]
        try:
            for fetched in fetches:
                fetched.result()
                watch.step()
        finally:
            for fetched in fetches:
                fetched.cancel()
