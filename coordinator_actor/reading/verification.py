"""Reads every file that a version can be loaded from, and reports damage.

The report says whether the version can still be loaded. Nothing is written or locked. A version has more files than
its newest snapshots need: an older snapshot and the changelogs after it can replace a damaged newer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from msgspec import Struct

from backends.encoding.operator_schema import OperatorSchema
from backends.exceptions import DamagedFileError, MissingFileError, StateStoreError
from backends.formats import snapshot
from backends.formats.changelog import GROUPS_DIRECTORY, read_changelog, read_index
from backends.formats.manifest import Lineage, OperatorEntry, SnapshotDescriptor, SnapshotRef, version_in
from backends.partition.partition_state import PartitionState
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.locations import FileRef
from coordinator_actor.durable.fencing import EPOCHS, RecordFiles, numbered_path
from coordinator_actor.durable.manifests import CHECKPOINTS, schema_path
from coordinator_actor.durable.records import AUDIT, DIRECTORY, FEATURE_VIEWS, HISTORY, LookupRecords
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import StateVersions

VERIFY_THREADS = 8
"""Files that are read at once. Changelogs are held in memory during the read, files of snapshots are not."""


T = TypeVar("T")
DifferencesIn: TypeAlias = Callable[[OperatorSchema, PartitionState], Iterable[str]]
"""Compares the rows of a partition, and says what differs."""


@dataclass(frozen=True)
class Damage:
    """A file that differs from what was written. ``path`` is below the state location; ``version`` is the file's own.

    For a file that shares an object with others, ``path`` is the object's. A manifest has no operator, a schema no
    partition.
    """

    path: str
    operator: str | None
    partition: int | None
    version: int | None
    what: str


@dataclass(frozen=True)
class Verification:
    """The result of checking a version's files. ``lost`` partitions (``operator/partition``) cannot be loaded.

    ``files`` and ``nbytes`` were read; ``rows`` counts the pairs of all column families if they were read as well.
    ``differences`` are between the rows of a partition: the path is that of its directory.
    """

    version: int
    files: int
    nbytes: int
    damages: tuple[Damage, ...] = ()
    lost: tuple[str, ...] = ()
    rows: int | None = None
    differences: tuple[Damage, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is damaged, and nothing differs."""
        return not self.damages and not self.lost and not self.differences


@dataclass(frozen=True)
class _File:
    """A changelog with the path of the one below it, if known, or the descriptor of a snapshot; and its partition."""

    operator: str
    partition: int
    version: int
    ref: FileRef
    base: str | None = None
    knows_base: bool = False
    snapshot: SnapshotRef | None = None


@dataclass(frozen=True)
class _Part:
    """A file that snapshots share, the first snapshot that has it, and the paths of all that do."""

    ref: FileRef
    of: _File
    snapshots: set[str] = field(default_factory=set)


@dataclass
class _ReadFiles:
    """The bytes of the files that were read, their damages by path, and the files that snapshots share, by path."""

    nbytes: int = 0
    damages: dict[str, Damage] = field(default_factory=dict)
    parts: dict[str, _Part] = field(default_factory=dict)

    def note(self, ref: FileRef, of: _File, what: str | None) -> None:
        """Count a file that was read; ``what`` is its damage, None for a sound file."""
        if what is None:
            self.nbytes += ref.size
        else:
            self.damages[ref.path] = Damage(ref.stored_in, of.operator, of.partition, version_in(ref.path), what)


def verify_version(
    versions: StateVersions,
    version: int | None = None,
    *,
    reads_rows: bool = False,
    differences_in: DifferencesIn = lambda schema, state: (),
    progress: Callable[[int, int], None] = lambda done, total: None,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> Verification:
    """Read all files that a version (None: the last completed one) can be loaded from, each once.

    Damages include manifests that ``versions`` was to skip, and schemas. A program that declares the same operators
    runs without the files of their schemas.

    ``reads_rows`` also loads every partition, as a host would, reads all its pairs, and compares them by
    ``differences_in``. ``progress`` is called with the number of files read and the total, which grows as descriptors
    of snapshots are read. Memory grows with the number of files. Raises ``VersionNotFoundError``, ``StorageError`` if
    storage cannot be reached.
    """
    at = versions.resolve(version)
    storage = open_storage(versions.place.state_location, versions.place.options)
    operators = versions.operators(at) if versions.chain else {}
    pieces = {
        (operator, piece.partition): piece
        for operator, entry in operators.items()
        for piece in versions.pieces(operator, entry, at)
    }
    named = (f for (operator, p), piece in pieces.items() for f in _files(versions, operator, p, piece.lineage))
    files = {file.ref.path: file for file in named}
    read = _read_files(storage, files, progress)
    damages, parts = {**_damaged_schemas(versions, operators), **read.damages}, read.parts
    bad = {*damages, *(path for part in damages if part in parts for path in parts[part].snapshots)}
    lost = [f"{o}/{p}" for (o, p), piece in pieces.items() if not _is_loadable(versions, piece.lineage, bad)]
    rows, differences = None, list[Damage]()
    if reads_rows:
        rows = 0
        for (operator, p), piece in pieces.items():
            if f"{operator}/{p}" in lost:
                continue
            try:
                with opened_partition(versions.place, piece, open_storage=open_storage) as state:
                    for family in state.reads.column_families():
                        rows += sum(batch.num_rows for batch in state.reads.scan(None, None, None, family))
                    for what in differences_in(versions.schema(operators[operator]), state):
                        differences.append(Damage(piece.directory, operator, p, at, what))
            except StateStoreError as error:
                lost.append(f"{operator}/{p}")
                damages[f"{operator}/{p}"] = Damage(piece.directory, operator, p, at, str(error))
    all_damages = (*damages_of_manifests(versions), *_damaged_records(storage), *(damages[i] for i in sorted(damages)))
    num_files = len(files) + len(parts)
    return Verification(at, num_files, read.nbytes, all_damages, tuple(lost), rows, tuple(differences))


def _read_files(
    storage: CheckpointStorage, files: Mapping[str, _File], progress: Callable[[int, int], None]
) -> _ReadFiles:
    """Read the files of a version: changelogs and descriptors, the files of snapshots, and the indexes of objects."""
    read = _ReadFiles()
    with ThreadPoolExecutor(VERIFY_THREADS, thread_name_prefix="statestore-verify") as pool:
        checked_files = pool.map(lambda file: _tried(lambda: _check_file(storage, file)), files.values())
        for done, (file, (descriptor, what)) in enumerate(zip(files.values(), checked_files, strict=True), 1):
            read.note(file.ref, file, what)
            for named in () if descriptor is None else descriptor.files:
                if named.file is not None:
                    read.parts.setdefault(named.file.path, _Part(named.file, file)).snapshots.add(file.ref.path)
            progress(done, len(files) + len(read.parts))
        checked_parts = pool.map(lambda part: _tried(lambda: storage.check(part.ref)), read.parts.values())
        for done, (part, (_, what)) in enumerate(zip(read.parts.values(), checked_parts, strict=True), len(files) + 1):
            read.note(part.ref, part.of, what)
            progress(done, len(files) + len(read.parts))
        # A damaged index does not prevent a load: it is only for a version without a manifest.
        groups = {f.ref.stored_in: f for f in files.values() if f.snapshot is None and f.ref.within is not None}
        sizes = dict(storage.list(GROUPS_DIRECTORY)) if groups else {}
        there = [path for path in groups if path in sizes]  # the parts of the others are missing already
        checked_indexes = pool.map(lambda path: _tried(lambda: read_index(storage, path, sizes[path])), there)
        for path, (_, what) in zip(there, checked_indexes, strict=True):
            read.note(FileRef(path, 0, ""), groups[path], what)
    return read


def _tried(check: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return the result of a check, or the damage that the check has found."""
    try:
        return check(), None
    except (DamagedFileError, MissingFileError) as error:
        return None, str(error)


def damages_of_manifests(versions: StateVersions) -> tuple[Damage, ...]:
    """Return the damages of the manifests that were skipped."""
    return tuple(Damage(path, None, None, None, what) for path, what in versions.damages.items())


def _damaged_schemas(versions: StateVersions, operators: Mapping[str, OperatorEntry]) -> dict[str, Damage]:
    """Return the damages of the schemas of operators, by path."""
    damages = {}
    for operator, entry in operators.items():
        try:
            versions.schema(entry)
        except (DamagedFileError, MissingFileError) as error:
            path = schema_path(entry.schema_id)
            damages[path] = Damage(path, operator, None, None, str(error))
    return damages


def _damaged_records(storage: CheckpointStorage) -> list[Damage]:
    """Return the damages of the other records. A query does not start if one that it needs is damaged."""
    records, errors = RecordFiles(storage), dict[str, DamagedFileError]()
    directories = (EPOCHS, CHECKPOINTS, HISTORY, AUDIT, FEATURE_VIEWS, DIRECTORY)
    paths = [numbered_path(directory, number) for directory in directories for number in records.numbers(directory)]
    lookups = LookupRecords(storage)
    paths += [lookups.path(by, batch_id) for by, batches in lookups.batches().items() for batch_id in batches]
    records.read_all(paths, AnyRecord, errors)
    return [Damage(path, None, None, None, str(error)) for path, error in sorted(errors.items())]


class AnyRecord(Struct):
    """A record of any kind: its digest is checked, and its fields are not read."""


def _files(versions: StateVersions, operator: str, partition: int, lineage: Lineage) -> Iterator[_File]:
    kept_from = versions.base(lineage)
    base, below = None, 0  # there is nothing below the first version
    if lineage.rescaled is not None:
        base, below = lineage.rescaled.head, lineage.rescaled.version
        for source in lineage.rescaled.sources if kept_from < 0 else ():
            # The directory is ``operators/<operator>/<n>/<p>/<store>``.
            yield from _files(versions, operator, int(source.directory.split("/")[-2]), source.lineage)
    for ref in lineage.changelogs:
        if ref.version > kept_from:
            # If a manifest is damaged, the version below may be unknown.
            yield _File(operator, partition, ref.version, ref.file, base, knows_base=below == ref.version - 1)
        base, below = ref.file.path, ref.version
    for uploaded in lineage.snapshots:
        if uploaded.version >= kept_from:
            yield _File(operator, partition, uploaded.version, uploaded.file, snapshot=uploaded)


def _check_file(storage: CheckpointStorage, file: _File) -> SnapshotDescriptor | None:
    """Return the descriptor if the file describes a snapshot."""
    if file.snapshot is not None:
        return snapshot.read_descriptor(storage, file.snapshot)
    name = storage.full_location(file.ref.path)
    meta, _ = read_changelog(storage.read(file.ref), name)
    in_file = (meta.operator, meta.partition, meta.version)
    if in_file != (file.operator, file.partition, file.version):
        raise DamagedFileError(
            f"{name} says that it is version {meta.version} of {meta.operator}/{meta.partition}, and the manifest "
            f"names it for version {file.version} of {file.operator}/{file.partition}: files have been exchanged."
        )
    if file.knows_base and meta.base != file.base:
        raise DamagedFileError(
            f"{name} applies to {meta.base}, and the manifests have {file.base} below it: files have been exchanged."
        )
    return None


def _is_loadable(versions: StateVersions, lineage: Lineage, bad: set[str]) -> bool:
    """Return whether sound files lead to the version, by the same search as loading."""
    kept_from = versions.base(lineage)
    heads = {ref.version: ref.file.path for ref in lineage.changelogs}
    starts = [
        ref.version
        for ref in lineage.snapshots
        if kept_from <= ref.version <= lineage.version
        and heads.get(ref.version) == ref.head
        and ref.file.path not in bad
    ]
    if kept_from >= 0:
        pass  # everything below is removed, or will be
    elif lineage.rescaled is not None:
        if all(_is_loadable(versions, source.lineage, bad) for source in lineage.rescaled.sources):
            starts.append(lineage.rescaled.version)
    elif lineage.is_empty or (1 in heads and 0 not in heads):
        starts.append(0)
    sound = {version for version, path in heads.items() if path not in bad}
    return any(all(v in sound for v in range(start + 1, lineage.version + 1)) for start in starts)
