"""Snapshots: the whole state of one partition at one version, as files in the storage.

A descriptor lists the files by name, size and digest. A file that an earlier snapshot has uploaded is not uploaded
again: files are compared by content, so their process, host or local directory does not matter. The idea is that of
RocksDB's and Flink's incremental checkpoints.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from backends import fault_points
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, StoreClosedError
from backends.formats.changelog import GROUPS_DIRECTORY
from backends.formats.local_state import LocalState
from backends.formats.manifest import SnapshotDescriptor, SnapshotFile, SnapshotRef, seal, unseal
from backends.load_watch import LoadWatch
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest, file_digest

_INLINE_BYTES = 64 << 10
_TOGETHER_BYTES = 256 << 10
"""Larger SST files are stored separately: an object with several files lives as long as one of them is needed."""


class Digests:
    """The digests of local files that never change. Hard links to one file share its digest."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], str] = {}

    def of(self, files: list[Path]) -> dict[Path, str]:
        """Return the digests of these files, and forget those of all others."""
        keys = {path: ((s := path.stat()).st_ino, s.st_size, s.st_mtime_ns) for path in files}
        self._known = {key: self._known.get(key) or file_digest(path) for path, key in keys.items()}
        return {path: self._known[key] for path, key in keys.items()}


class PreparedSnapshot(NamedTuple):
    """A snapshot whose large files are in storage. Its descriptor and its small files are not stored yet.

    ``files`` are the files in storage, and those whose content will be part of the descriptor. ``small`` are the small
    files by name, which will be stored in one object with the descriptor. ``written`` is the number of bytes stored.
    """

    directory: str
    backend: str
    state: LocalState
    files: tuple[SnapshotFile, ...]
    small: Mapping[str, bytes]
    written: int

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes that are still to be stored."""
        return sum(map(len, self.small.values())) + sum(len(f.content or b"") for f in self.files)

    def new_path(self, suffix: str) -> str:
        """Return a new name for a file of the snapshot."""
        return f"{self.directory}/{self.state.version}-{uuid.uuid4().hex}{suffix}"


class StoredSnapshot(NamedTuple):
    """A snapshot that is in storage, its descriptor, and the bytes that were written for it."""

    ref: SnapshotRef
    descriptor: SnapshotDescriptor
    written: int


def prepare(
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
    small_bytes: int = 0,
    listed: dict[str, dict[str, int]] | None = None,
) -> PreparedSnapshot:
    """Upload the large files in ``local``, except those that ``earlier`` has.

    ``listed`` keeps listings of the storage, by the directory above those of the partitions. Calls for several
    partitions pass the same dict, so that only the first call that needs a listing makes it.

    Small SST files are not uploaded here but stored with the descriptor: files of at most ``_TOGETHER_BYTES``, the
    smallest first, up to ``small_bytes`` in all. Raises ``StorageError``. Retention removes the files that were
    uploaded before the error, when their version is no longer kept.
    """
    assert state.head is not None
    sizes = {path: size for path in sorted(local.iterdir()) if (size := path.stat().st_size)}
    small = _small(sizes, small_bytes)
    large = [p for p, size in sizes.items() if p not in small and (size > _INLINE_BYTES or p.suffix == ".sst")]
    digest_by_path = digests.of(large)
    reusable = {
        (f.file.size, f.file.digest): f.file
        for f in (earlier.files if earlier else ())
        if f.file is not None and f.file.within is None
    }
    if any((sizes[path], digest_by_path[path]) in reusable for path in large):
        # An uploaded file that has since been lost or truncated is uploaded again.
        above = directory if listed is None else directory.rsplit("/", 2)[0]
        listed = {} if listed is None else listed
        if above not in listed:
            listed[above] = dict(storage.list(above))
        size_by_path = listed[above]
        reusable = {key: file for key, file in reusable.items() if file.is_in(size_by_path)}
    cancelled = threading.Event()

    def put(path: Path) -> FileRef:
        stored_file = reusable.get((sizes[path], digest_by_path[path]))
        if stored_file is not None:
            return stored_file
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
        SnapshotFile(p.name, file=refs[p]) if p in refs else SnapshotFile(p.name, content=p.read_bytes())
        for p in sizes
        if p not in small
    )
    fresh = [ref for ref in refs.values() if (ref.size, ref.digest) not in reusable]
    beside = {path.name: path.read_bytes() for path in sizes if path in small}
    return PreparedSnapshot(directory, backend, state, entries, beside, sum(ref.size for ref in fresh))


def _small(sizes: Mapping[Path, int], most: int) -> set[Path]:
    small: set[Path] = set()
    for size, path in sorted((size, path) for path, size in sizes.items() if path.suffix == ".sst"):
        most -= size
        if most < 0 or size > _TOGETHER_BYTES:
            break
        small.add(path)
    return small


def store_alone(storage: CheckpointStorage, prepared: PreparedSnapshot) -> StoredSnapshot:
    """Store the descriptor in a separate file. Raises ``StorageError``."""
    state = prepared.state
    assert state.head is not None and not prepared.small
    path = prepared.new_path(".snapshot")
    descriptor = SnapshotDescriptor(path, prepared.backend, state, prepared.files)
    fault_points.reached("snapshot:descriptor")
    file = storage.put_new(path, seal(descriptor))
    fault_points.reached("snapshot:uploaded")
    return StoredSnapshot(SnapshotRef(state.version, state.head, file), descriptor, prepared.written + file.size)


def store_together(storage: CheckpointStorage, prepared: Sequence[PreparedSnapshot]) -> list[StoredSnapshot]:
    """Store the descriptors of several partitions and their small files in one object. Raises ``StorageError``.

    The object has each partition's files one after the other, and its descriptor after them. Its name has the highest
    of the versions, so that it stays as long as one of the snapshots may be needed. Later snapshots do not share its
    content: otherwise the whole object would have to stay for a part.
    """
    if len(prepared) == 1 and not prepared[0].small:
        return [store_alone(storage, prepared[0])]
    within = f"{GROUPS_DIRECTORY}/{max(p.state.version for p in prepared)}-{uuid.uuid4().hex}.snapshots"
    pieces: list[bytes] = []
    offset = 0

    def add(path: str, data: bytes) -> FileRef:
        nonlocal offset
        pieces.append(data)
        offset += len(data)
        return FileRef(path, len(data), digest(data), within, offset - len(data))

    stored = []
    for one in prepared:
        assert one.state.head is not None
        begin = offset
        beside = [SnapshotFile(name, file=add(one.new_path(".sst"), data)) for name, data in one.small.items()]
        path = one.new_path(".snapshot")
        descriptor = SnapshotDescriptor(path, one.backend, one.state, (*one.files, *beside))
        ref = SnapshotRef(one.state.version, one.state.head, add(path, seal(descriptor)))
        stored.append(StoredSnapshot(ref, descriptor, one.written + offset - begin))
    storage.put_new(within, b"".join(pieces))
    return stored


def read_together(storage: CheckpointStorage, refs: Iterable[FileRef]) -> dict[str, bytes]:
    """Read the files of ``refs`` that share an object with another one of them, with one request per object.

    Return their contents by path. Missing or damaged files are left out; reading such a file alone reports the error.
    """
    by_object: dict[str, list[FileRef]] = {}
    for ref in refs:
        by_object.setdefault(ref.stored_in, []).append(ref)
    data_by_path: dict[str, bytes] = {}
    for parts in by_object.values():
        if len(parts) > 1:
            data_by_path.update(storage.read_together(parts))
    return data_by_path


def read_descriptor(storage: CheckpointStorage, ref: SnapshotRef, data: bytes | None = None) -> SnapshotDescriptor:
    """Read the descriptor that ``ref`` names, or take it from ``data``, which was checked.

    Raises ``MissingFileError`` or ``DamagedFileError``.
    """
    name = storage.full_location(ref.file.stored_in)
    snapshot = unseal(storage.read(ref.file) if data is None else data, SnapshotDescriptor, name)
    if (snapshot.path, snapshot.state.version, snapshot.state.head) != (ref.file.path, ref.version, ref.head):
        raise DamagedFileError(
            f"{name} describes version {snapshot.state.version} in {snapshot.path}: files have been exchanged."
        )
    if any(Path(f.name).name != f.name for f in snapshot.files):
        raise DamagedFileError(f"{name} names files outside of the snapshot's directory.")
    return snapshot


def download(
    storage: CheckpointStorage, snapshot: SnapshotDescriptor, backend: str, into: Path, threads: int, watch: LoadWatch
) -> None:
    """Fetch a snapshot's files into a local directory, ``threads`` at once, each when it is the load's turn.

    Files that an earlier call fetched completely before it failed are not fetched again. Raises ``MissingFileError`` or
    ``DamagedFileError`` naming the file, ``InvalidStateStoreArgument`` for another backend's snapshot.
    """
    if snapshot.backend != backend:
        raise InvalidStateStoreArgument(
            f"{storage.full_location(snapshot.path)} was written by the provider {snapshot.backend!r}, not "
            f"{backend!r}: choose that provider, or a new checkpoint location."
        )
    stored = [(entry.file, into / entry.name) for entry in snapshot.files if entry.file is not None]
    watch.expect(len(stored), sum(ref.size for ref, _ in stored))
    together = read_together(storage, [ref for ref, target in stored if ref.within is not None and not target.exists()])

    def fetch_alone(ref: FileRef, target: Path) -> None:
        with storage.fetch_turn(watch):
            fetch(ref, target)

    def fetch(ref: FileRef, target: Path) -> None:
        draft = target.with_name(f"{target.name}.draft")
        watch.begin_file(draft, ref.size)
        is_done = False
        try:
            if ref.path in together:
                draft.write_bytes(together[ref.path])
            else:
                storage.read_to_file(ref, draft)
            draft.rename(target)
            is_done = True
        finally:
            watch.end_file(draft, is_done=is_done)

    for entry in snapshot.files:
        if entry.file is None:
            (into / entry.name).write_bytes(entry.content or b"")
    present_sizes = [ref.size for ref, target in stored if target.exists()]
    watch.step(len(present_sizes), sum(present_sizes))
    missing = [(ref, target) for ref, target in stored if not target.exists()]
    for ref, target in missing:
        if ref.path in together:
            fetch(ref, target)
            watch.step()
    alone = [(ref, target) for ref, target in missing if ref.path not in together]
    if not alone:
        return
    with Pool(threads, thread_name_prefix="statestore-load") as pool:
        fetches = [pool.submit(fetch_alone, ref, target) for ref, target in alone]
        try:
            for fetched in fetches:
                fetched.result()
                watch.step()
        finally:
            for fetched in fetches:
                fetched.cancel()
