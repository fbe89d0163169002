"""Lists every file of a query's state with its kind, and with the version or savepoint that keeps the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats import manifest_chain as chains
from backends.formats import snapshot
from backends.formats.changelog_group import GROUPS_DIRECTORY
from backends.formats.file_names import version_in
from backends.formats.manifest import ChangelogRef, Lineage, SnapshotRef
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.create_if_absent import CREATE_PROBE
from coordinator_actor.durable.audit_log import AUDIT
from coordinator_actor.durable.checkpoint_records import HISTORY
from coordinator_actor.durable.fencing import EPOCHS, FENCE, MANIFESTS
from coordinator_actor.durable.manifest_folds import FOLDS
from coordinator_actor.durable.manifests import QUERY_FILE, manifest_path, schema_path
from coordinator_actor.durable.rewritten_files import REWRITTEN
from coordinator_actor.reading.stored_versions import StateVersions

SNAPSHOT_READ_THREADS = 16

_RECORDS = {
    EPOCHS: ("epoch", "it says which run has the state; only the last ones stay"),
    "checkpoints": ("place", "it says where the checkpoint is"),
    "savepoint-ids": ("savepoint id", "its number is not given again"),
    FOLDS: ("fold", "it has copies of manifests, to be read with few requests"),
    REWRITTEN: ("exchange of files", "it says which files stand in the place of those that manifests name"),
    AUDIT: ("audit record", "it says what was done by hand; it is never removed"),
    HISTORY: ("history", "it is for people; a newer one replaces it"),
    "standalone": ("standalone store", "a provider that is used alone, with manifests of its own"),
}
UNKNOWN = "not known: a damaged manifest may name it"
"""What keeps a file that no manifest names, where one of them cannot be read."""
_SINGLE = {QUERY_FILE: "it says whose state this is", CREATE_PROBE: "it shows that the store overwrites nothing"}
_KINDS = {"changelog": "changelog", "snapshot": "snapshot", "sst": "snapshot file", "part": "snapshot file"}


@dataclass(frozen=True)
class StoredFile:
    """One file below the state location. ``kept_by`` says what needs it; nothing if retention may remove it.

    ``why`` says what becomes of a file that nothing keeps.
    """

    path: str
    size: int
    kind: str
    operator: str | None = None
    partition: int | None = None
    version: int | None = None
    kept_by: tuple[str, ...] = ()
    why: str = ""


def stored_files(
    versions: StateVersions, version: int | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> list[StoredFile]:
    """Return all files of a query's state, by path; with ``version`` only those that this version can be loaded from.

    Reads the manifests and the descriptors of snapshots, and lists the rest. Raises ``VersionNotFoundError``.
    """
    storage = open_storage(versions.place.state_location, versions.place.options)
    kept: dict[str, list[str]] = {}
    wanted = None if version is None else versions.resolve(version)
    _keep_manifests(versions, kept)
    _keep_changes(versions, kept)
    _keep_snapshots(storage, _snapshots(versions), kept)
    listed = dict(storage.list())
    listed.update(dict.fromkeys(storage.unfinished("operators"), 0))
    chosen = None if wanted is None else _of_version(storage, versions, wanted)
    return [
        _described(path, size, kept.get(path, ()), versions)
        for path, size in sorted(listed.items())
        if chosen is None or path in chosen
    ]


def _keep_manifests(versions: StateVersions, kept: dict[str, list[str]]) -> None:
    schemas: dict[str, list[int]] = {}
    for version, manifest in versions.chain.items():
        kept.setdefault(manifest_path(manifest), []).append(f"version {version}")
        for entry in manifest.operators.values():
            schemas.setdefault(schema_path(entry.schema_id), []).append(version)
    for path, of in schemas.items():
        kept.setdefault(path, []).append(f"versions {min(of)} to {max(of)}")


def _keep_changes(versions: StateVersions, kept: dict[str, list[str]]) -> None:
    oldest = versions.oldest
    for version, manifest in versions.chain.items():
        for entry in manifest.operators.values():
            for partition in entry.partitions if version > oldest else ():
                # A group is kept as long as one of its parts is.
                kept.setdefault(entry.partitions.stored_in(partition), []).append(f"version {version}")
    for lineage in _lineages(versions, oldest):
        for ref in _loaded_from(lineage)[1]:
            kept.setdefault(ref.file.stored_in, []).append(f"version {oldest}, the oldest one")


def _lineages(versions: StateVersions, version: int) -> Iterator[Lineage]:
    """Give the files of each partition at a version, and those of earlier layouts that it is loaded from."""
    if version not in versions.readable:
        return
    for operator in versions.operators(version):
        left = [piece.lineage for piece in versions.reading(operator, version).pieces]
        while left:
            lineage = left.pop()
            yield lineage
            if lineage.rescaled is not None and _loaded_from(lineage)[0] is None:
                left += [source.lineage for source in lineage.rescaled.sources]


def _loaded_from(lineage: Lineage) -> tuple[SnapshotRef | None, list[ChangelogRef]]:
    """Return the newest snapshot, None if there is none, and the changelogs after it."""
    newest = lineage.snapshots[-1] if lineage.snapshots else None
    return newest, [ref for ref in lineage.changelogs if newest is None or ref.version > newest.version]


def _snapshots(versions: StateVersions) -> list[SnapshotRef]:
    oldest = versions.oldest
    found = {ref.file.path: ref for lineage in _lineages(versions, oldest) if (ref := _loaded_from(lineage)[0])}
    for operator in {name for manifest in versions.chain.values() for name in manifest.operators}:
        for segment in chains.segments(versions.chain, operator):
            for refs in chains.snapshots(versions.chain, segment).values():
                found.update((ref.file.path, ref) for ref in refs if ref.version > oldest)
    return list(found.values())


def _keep_snapshots(storage: CheckpointStorage, refs: Iterable[SnapshotRef], kept: dict[str, list[str]]) -> None:
    def read(ref: SnapshotRef) -> frozenset[str]:
        try:
            return snapshot.read_descriptor(storage, ref).paths
        except (DamagedFileError, MissingFileError):
            return frozenset()  # 'verify' names the damage

    there = list(refs)
    with ThreadPoolExecutor(SNAPSHOT_READ_THREADS, thread_name_prefix="statestore-files") as pool:
        for ref, paths in zip(there, pool.map(read, there), strict=True):
            for path in {ref.file.stored_in, *paths}:
                kept.setdefault(path, []).append(f"snapshot of version {ref.version}")


def _of_version(storage: CheckpointStorage, versions: StateVersions, version: int) -> set[str]:
    """Return the paths of the files that a version can be loaded from, and of its manifests and schemas."""
    found: set[str] = set()
    refs: list[SnapshotRef] = []
    for operator, entry in versions.operators(version).items():
        found.add(schema_path(entry.schema_id))
        left = [piece.lineage for piece in versions.reading(operator, version).pieces]
        while left:
            lineage = left.pop()
            base = versions.base(lineage)
            found.update(ref.file.stored_in for ref in lineage.changelogs if ref.version > base)
            refs += [ref for ref in lineage.snapshots if ref.version >= base]
            if lineage.rescaled is not None and base < 0:
                left += [source.lineage for source in lineage.rescaled.sources]
    of_snapshots: dict[str, list[str]] = {}
    _keep_snapshots(storage, refs, of_snapshots)
    manifests = {manifest_path(m) for v, m in versions.chain.items() if v <= version}
    return {QUERY_FILE, *found, *of_snapshots, *manifests}


def _described(path: str, size: int, kept: Iterable[str], versions: StateVersions) -> StoredFile:
    top = path.partition("/")[0]
    kept_by = tuple(dict.fromkeys(kept))
    if not kept_by and versions.damages and top in (GROUPS_DIRECTORY, "operators", "schemas", MANIFESTS):
        kept_by = ("it is damaged: 'statestore verify' says how" if path in versions.damages else UNKNOWN,)
    if top == GROUPS_DIRECTORY:
        why = "" if kept_by else _why_not(version_in(path), versions)
        kind = "snapshots" if path.endswith(".snapshots") else "changelogs"
        return StoredFile(path, size, kind, version=version_in(path), kept_by=kept_by, why=why)
    if top == "operators":
        return _of_partition(path, size, kept_by, versions)
    if top == MANIFESTS and size == len(FENCE):
        return StoredFile(path, size, "fence", kept_by=("it keeps an earlier coordinator from writing; it stays",))
    if top == MANIFESTS:
        why = "" if kept_by else "a later manifest replaces it; retention removes it"
        return StoredFile(path, size, "manifest", kept_by=kept_by, why=why)
    if top == "schemas":
        why = "" if kept_by else "rows of versions that are gone; it is never removed"
        return StoredFile(path, size, "schema", kept_by=kept_by, why=why)
    if path in _SINGLE:
        return StoredFile(path, size, "record", kept_by=(_SINGLE[path],))
    if top in _RECORDS:
        kind, why = _RECORDS[top]
        return StoredFile(path, size, kind, kept_by=(why,))
    return _foreign(path, size)


def _foreign(path: str, size: int) -> StoredFile:
    return StoredFile(path, size, "unknown", why="it is none of the state's; nothing reads or removes it")


def _of_partition(path: str, size: int, kept_by: tuple[str, ...], versions: StateVersions) -> StoredFile:
    parts = path.split("/")
    operator = parts[1] if len(parts) > 2 else None
    partition = int(parts[3]) if len(parts) > 4 and parts[3].isdecimal() else None
    suffix = path.rpartition(".")[2]
    kind = _KINDS.get(suffix, "unfinished" if "#" in path else "unknown")
    version = version_in(path)
    why = "" if kept_by else _why_not(version, versions)
    return StoredFile(path, size, kind, operator, partition, version if version >= 0 else None, kept_by, why)


def _why_not(version: int, versions: StateVersions) -> str:
    if version < 0:
        return "its name is none of the state's; nothing reads or removes it"
    if version <= versions.oldest:
        return "no version needs it any more; retention removes it"
    if version > versions.completed:
        return "of a batch that is under way, or was given up; it goes when its version is no longer kept"
    return "no manifest names it: an attempt that did not count, or a snapshot to be named; it goes with its version"
