"""Rewrites the files of a query's readable versions without the rows of some keys. It changes no existing file.

All readable versions stay readable. In each partition that may have rows of the keys:

- Each changelog that a readable version needs is rewritten, under a new name and on top of the new name of the one
  below. A host's copy in memory or on disk was made from the old names. It belongs to another lineage, so hosts load
  the partition again.
- The backend's engine rebuilds two snapshots from the remaining rows: the first one that a load needs, and the newest
  one. RocksDB's own files would keep removed rows and the key ranges of deleted files. The snapshots in between are
  dropped; a load applies changelogs instead.
- Retention may have removed the changelog at the version of the first of these snapshots. An empty one takes its place:
  a load needs only its name.

An object that also has parts of other partitions is rewritten with those parts unchanged.

Reads and writes grow with the state of these partitions, with their changelogs of all readable versions, and by one
request per shared object.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups, partition_of, partition_range
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import DamagedFileError
from backends.formats import changelog, snapshot
from backends.formats import manifest_chain as chains
from backends.formats.manifest import Manifest, SnapshotDescriptor, SnapshotRef, changelog_name, version_in
from backends.formats.manifest_chain import Layout, Segment
from backends.formats.snapshot import PreparedSnapshot
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.locations import FileRef
from coordinator_actor.durable.manifests import RewrittenFiles
from coordinator_actor.reading import stored_files
from coordinator_actor.reading.stored_versions import Piece, StateVersions
from coordinator_actor.savepoints.new_checkpoint import build_snapshot

# Finds the rows of an operator's state that belong to some keys, in every column family, and their partitions.


class ForgottenKeys:
    """Keys whose rows are to be removed. ``columns`` are the values of the key columns, a row for each key.

    A column of the stored key that is not among ``columns``, such as a window, may have any value. ``families`` are the
    column families of the operator. ``num_groups`` is the number of key groups. ``is_whole``: ``columns`` are all
    routing columns in stored order. Only the partitions of these keys can then have rows.
    """

    def __init__(
        self, columns: pa.RecordBatch, families: Mapping[str, StateSchema], num_groups: int, *, is_whole: bool
    ) -> None:
        self.num_keys = columns.num_rows
        self._names = columns.schema.names
        self._encoded = _encoded(columns)
        self._families = families
        self._num_groups = num_groups
        self._groups = np.unique(key_groups(columns, num_groups)) if is_whole else None

    def partitions(self, num_partitions: int) -> frozenset[int]:
        """Return the partitions of a layout that may have rows of the keys."""
        if self._groups is None:
            return frozenset(range(num_partitions))
        return frozenset(partition_of(int(group), self._num_groups, num_partitions) for group in self._groups)

    def without(self, family: str, pairs: SortedPairs) -> SortedPairs:
        """Return the pairs of a column family that belong to none of the keys.

        A family without a schema has only the bookmarks of sweeps. Their values are keys, so no bookmark is kept. The
        keys of some families lack the columns, such as families by key group. All pairs of such a family stay.
        """
        schema = self._families.get(family)
        if schema is None:
            return SortedPairs.empty()
        if not len(pairs) or not {*self._names} <= {*schema.key.names}:
            return pairs
        is_forgotten = self.among(schema, pairs.keys)
        if not is_forgotten.any():
            return pairs
        keep = pa.array(~is_forgotten)
        return SortedPairs(pairs.keys.filter(keep), pairs.values.filter(keep))

    def among(self, schema: StateSchema, keys: pa.BinaryArray) -> npt.NDArray[np.bool_]:
        """Return for each stored key of a column family whether it belongs to one of the keys."""
        columns = decode_keys(keys, schema.key)
        is_among = pc.is_in(_encoded(columns.select(self._names)), self._encoded)
        return np.asarray(is_among.to_numpy(zero_copy_only=False), np.bool_)


def _encoded(columns: pa.RecordBatch) -> pa.BinaryArray:
    """Return the columns as one value that is equal if all of them are equal, including nulls and NaNs."""
    return encode_keys(columns, np.zeros(columns.num_rows, np.int64))


log = logging.getLogger(__name__)

REWRITTEN_GROUP_BYTES = 32 << 20
"""Changelogs are written together in objects of about this size."""
REWRITE_THREADS = 4
"""At most this many partitions are read, or built, at once."""
INDEX_THREADS = 16
"""At most this many indexes of shared objects are read at once."""
T = TypeVar("T")
U = TypeVar("U")


class Rewriting:
    """Rewrites the files of an operator without the rows of some keys.

    ``run`` may be called again when more versions exist, and then writes only the files of these. Nothing may remove
    the written files until the exchange, although no manifest names them. ``removed_rows`` counts the rows of the keys
    in changelogs and snapshots: a row counts in each file that had it.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        operator: str,
        forgotten: ForgottenKeys,
        *,
        open_storage: OpenStorage = CheckpointStorage.open,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._storage = storage
        self._operator = operator
        self._forgotten = forgotten
        self._open = open_storage
        self._say = say
        self._affected_of: dict[Layout, frozenset[int]] = {}
        self._sizes: Mapping[str, int] = {}
        self._changelogs: dict[str, FileRef] = {}
        self._snapshots: dict[str, SnapshotRef] = {}
        self._descriptors: dict[str, SnapshotDescriptor] = {}
        self._built: dict[tuple[Layout, int], int] = {}
        self._has_keys: dict[str, bool] = {}
        self._of_layout: dict[int, frozenset[int]] = {}
        self.removed_rows = 0

    def run(self, versions: StateVersions) -> RewrittenFiles:
        """Write the files that the readable versions need. Return which files replace which ones.

        Raises ``DamagedFileError``, ``MissingFileError``, ``StorageError``. Files written until then are ignored;
        retention removes them when their versions are no longer kept.
        """
        # Listed in each call: an upload that was under way in the last one may have ended since.
        self._sizes = dict(self._storage.list("operators")) | dict(self._storage.list(changelog.GROUPS_DIRECTORY))
        loaded = stored_files.loaded_files(versions, stored_files.SnapshotReader(self._storage, self._sizes))
        affected = self._affected(versions)
        rebuilt = self._to_rebuild(loaded, affected)
        self._rewrite_changelogs(versions, affected, loaded, {one.ref.head for one in rebuilt})
        self._move_changelogs(versions, loaded)
        self._rebuild_snapshots(versions, rebuilt)
        self._move_snapshots(loaded, affected)
        return RewrittenFiles(max(versions.chain), dict(self._changelogs), dict(self._snapshots))

    def missing(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the written files that a listing does not show, or shows with other sizes."""
        files = [*self._changelogs.values(), *(ref.file for ref in self._snapshots.values())]
        files += [f.file for descriptor in self._descriptors.values() for f in descriptor.files if f.file is not None]
        return sorted({file.stored_in for file in files if not file.is_in(sizes)})

    def obsolete(self, paths: Iterable[str], versions: StateVersions) -> Iterator[str]:
        """Yield the unneeded files that may have rows of the keys, or belong to a replaced lineage."""
        replaced = tuple(
            f"{s.layout.directory(p)}/" for s, partitions in self._affected(versions).items() for p in partitions
        )
        for path in paths:
            if path.startswith((f"{changelog.GROUPS_DIRECTORY}/", *replaced)) or self._may_have_keys(path):
                yield path

    @property
    def emptied(self) -> frozenset[str]:
        """The shared objects that may have rows of the keys. No version needs them after the exchange."""
        return frozenset(path for path, has_keys in self._has_keys.items() if has_keys)

    def _may_have_keys(self, path: str) -> bool:
        """Return whether a file may have rows of the keys, by operator and partition: ``operators/<name>/4/0/...``."""
        parts = path.split("/")
        if len(parts) < 5 or parts[0] != "operators" or parts[1] != self._operator:
            return False
        if not (parts[2].isdecimal() and parts[3].isdecimal()):
            return True
        return int(parts[3]) in self._partitions(int(parts[2]))

    def _partitions(self, num_partitions: int) -> frozenset[int]:
        """Return the partitions of a layout that may have rows of the keys."""
        if num_partitions not in self._of_layout:
            self._of_layout[num_partitions] = self._forgotten.partitions(num_partitions)
        return self._of_layout[num_partitions]

    def _affected(self, versions: StateVersions) -> dict[Segment, frozenset[int]]:
        """Return the partitions of each layout that are rewritten, the earliest layout first.

        If a partition of an earlier layout is rewritten, so is each partition that was made from it, whatever its keys.
        A layout that is on the chain twice has the same partitions both times. Later calls include all partitions of
        earlier ones, even if an earlier layout has left the chain: changelogs written by then have new heads as bases.
        """
        segments = list(reversed(chains.segments(versions.chain, self._operator)))
        while True:
            before = dict(self._affected_of)
            affected: dict[Segment, frozenset[int]] = {}
            below: tuple[int, frozenset[int]] | None = None
            for segment in segments:
                n = segment.layout.num_partitions
                own = self._partitions(n) | self._affected_of.get(segment.layout, frozenset())
                if below is not None:
                    own |= {p for p in range(n) if self._has_source(versions.key_groups, n, p, *below)}
                self._affected_of[segment.layout] = affected[segment] = own
                below = n, own
            if self._affected_of == before:
                return affected

    @staticmethod
    def _has_source(num_groups: int, n: int, partition: int, below: int, affected: frozenset[int]) -> bool:
        first, end = partition_range(partition, n, num_groups)
        sources = range(partition_of(first, num_groups, below), partition_of(end - 1, num_groups, below) + 1)
        return not affected.isdisjoint(sources)

    # -- changelogs ----------------------------------------------------------------------------

    def _rewrite_changelogs(
        self,
        versions: StateVersions,
        affected: dict[Segment, frozenset[int]],
        loaded: stored_files.LoadedFiles,
        heads: set[str],
    ) -> None:
        chain, new = versions.chain, dict(versions.chain)
        group = _Group(self._storage, self._changelogs)
        for segment, partitions in affected.items():
            for version in range(segment.first, segment.last + 1):
                entries = chain[version].operators[self._operator].partitions
                names = {p: entries.head(p) for p in sorted(partitions) if p in entries}
                names = {p: name for p, name in names.items() if name not in self._changelogs}
                left = {p: entries[p] for p, name in names.items() if loaded.needs(version, name)}
                read = _parallel(REWRITE_THREADS, lambda one: self._storage.read(one.changelog), left.values())
                for (p, entry), data in zip(left.items(), read, strict=True):
                    base = self._base(versions, new, segment.layout, p, version)
                    group.add_changelog(entry.changelog.path, self._filtered(segment.layout, p, data, base))
                for p in names.keys() - left.keys():
                    if names[p] in heads:
                        group.add_changelog(
                            names[p], self._empty(segment.layout, p, chain[version], entries[p].attempt)
                        )
                new[version] = group.names(version).of(chain[version])
        group.close()

    def _base(
        self, versions: StateVersions, new: dict[int, Manifest], layout: Layout, partition: int, version: int
    ) -> tuple[str | None, str | None]:
        """Return the head below a version of a partition before the exchange of files, and after it."""
        key_groups = versions.key_groups
        return (
            chains.head_of(versions.chain, version - 1, layout, partition, key_groups),
            chains.head_of(new, version - 1, layout, partition, key_groups),
        )

    def _filtered(
        self, layout: Layout, partition: int, data: bytes, base: tuple[str | None, str | None]
    ) -> changelog.GroupMember:
        meta, changes = changelog.read_changelog(data)
        kept = {family: self._forgotten.without(family, pairs) for family, pairs in changes.families.items()}
        self.removed_rows += changes.num_changes - sum(map(len, kept.values()))
        # No manifest on the chain has the base of the lowest version. Its name stays, because no load looks for it.
        new_base = base[1] if base[0] is not None and meta.base == base[0] else meta.base
        meta = structs.replace(meta, base=new_base, key_growth=None)
        return self._member(layout, partition, meta, changelog.Changes(kept))

    def _empty(self, layout: Layout, partition: int, manifest: Manifest, attempt: str) -> changelog.GroupMember:
        """Return an empty changelog for the version of a snapshot. Loads use its name and never apply it."""
        n = layout.num_partitions
        base = f"{layout.directory(partition)}/{manifest.version - 1}-removed"
        meta = changelog.ChangelogMeta(manifest.run_id, layout.operator, partition, n, manifest.version, attempt, base)
        return self._member(layout, partition, meta, changelog.Changes({}))

    def _member(
        self, layout: Layout, partition: int, meta: changelog.ChangelogMeta, changes: changelog.Changes
    ) -> changelog.GroupMember:
        path = f"{layout.directory(partition)}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        return changelog.GroupMember(meta, path, changelog.write_changelog(changes, meta, StateStoreConf().compression))

    def _move_changelogs(self, versions: StateVersions, loaded: stored_files.LoadedFiles) -> None:
        """Write the needed parts of objects that may have rows of the keys into new objects, unchanged."""
        left = list(self._parts_of_others(versions, loaded))
        unknown = sorted({ref.stored_in for ref in left} - self._has_keys.keys())
        self._has_keys.update(zip(unknown, _parallel(INDEX_THREADS, self._index_has_keys, unknown), strict=True))
        moved: dict[str, list[FileRef]] = {}
        for ref in left:
            if self._has_keys[ref.stored_in]:
                moved.setdefault(ref.stored_in, []).append(ref)
        group = _Group(self._storage, self._changelogs)
        for refs in moved.values():
            parts = self._storage.read_together(refs)
            for ref in refs:
                data = parts.get(ref.path) or self._storage.read(ref)
                group.add_changelog(
                    ref.path, changelog.GroupMember(changelog.read_changelog_meta(data), ref.path, data)
                )
        group.close()

    def _parts_of_others(self, versions: StateVersions, loaded: stored_files.LoadedFiles) -> Iterator[FileRef]:
        """Yield the changelogs in shared objects that readable versions need and that were not rewritten."""
        for version, manifest in versions.chain.items():
            for operator in manifest.operators.values():
                partitions = operator.partitions
                for p in partitions:
                    name = partitions.head(p)
                    if name not in self._changelogs and loaded.needs(version, name) and partitions.stored_in(p) != name:
                        yield partitions[p].changelog

    def _index_has_keys(self, path: str) -> bool:
        """Return whether an object of changelogs may have rows of the keys, by all changelogs that its index lists.

        Manifests do not name all of them: some belong to rejected attempts, or to versions that are no longer kept.
        """
        if path not in self._sizes:
            return True  # it is missing: a reader of its parts reports that
        try:
            return any(
                self._may_have_keys(ref.path) for _, ref in changelog.read_index(self._storage, path, self._sizes[path])
            )
        except DamagedFileError as error:
            log.warning("The index of %s is damaged, so its parts are rewritten: %s", path, error)
            return True

    # -- snapshots -----------------------------------------------------------------------------

    def _to_rebuild(
        self, loaded: stored_files.LoadedFiles, affected: dict[Segment, frozenset[int]]
    ) -> list[stored_files.NamedSnapshot]:
        partitions = {(segment.layout, p) for segment, own in affected.items() for p in own}
        of_partition: dict[tuple[Layout, int], list[stored_files.NamedSnapshot]] = {}
        for named in loaded.snapshots.values():
            if (named.layout, named.partition) in partitions:
                of_partition.setdefault((named.layout, named.partition), []).append(named)
        due = []
        for key, snapshots in of_partition.items():
            snapshots.sort(key=lambda one: (one.ref.version, one.ref.file.path))
            first = [one for one in snapshots if one.ref.version <= loaded.oldest][-1:] or snapshots[:1]
            newest = snapshots[-1:] if key not in self._built else []
            due += list({one.ref.file.path: one for one in (*first, *newest)}.values())
        return [one for one in due if one.ref.file.path not in self._snapshots]

    def _rebuild_snapshots(self, versions: StateVersions, due: list[stored_files.NamedSnapshot]) -> None:
        record = RewrittenFiles(max(versions.chain), self._changelogs, {})
        new = {version: record.of(manifest) for version, manifest in versions.chain.items()}
        with ThreadPoolExecutor(REWRITE_THREADS, thread_name_prefix="statestore-rewrite") as pool:
            rebuilt = pool.map(lambda one: self._rebuilt(versions, new, one), due)
            for i, (one, (stored, removed)) in enumerate(zip(due, rebuilt, strict=True)):
                self._record_moved(one.ref, stored)
                key = one.layout, one.partition
                self._built[key] = max(one.ref.version, self._built.get(key, -1))
                self.removed_rows += removed
                self._say(f"rewrote snapshot {i + 1} of {len(due)}")

    def _record_moved(self, old: SnapshotRef, stored: snapshot.StoredSnapshot) -> None:
        self._snapshots[old.file.path] = stored.ref
        self._descriptors[stored.ref.file.path] = stored.descriptor

    def _rebuilt(
        self, versions: StateVersions, new: dict[int, Manifest], named: stored_files.NamedSnapshot
    ) -> tuple[snapshot.StoredSnapshot, int]:
        layout, partition, ref = named.layout, named.partition, named.ref
        lineage = chains.lineage(versions.chain, ref.version, layout, partition, versions.key_groups)
        piece = Piece(partition, layout.directory(partition), layout.backend, lineage)
        head = chains.head_of(new, ref.version, layout, partition, versions.key_groups)
        assert head is not None
        removed = 0
        with stored_files.opened_partition(versions.place, piece, open_storage=self._open) as state:
            families = sorted(state.reads.column_families())

            def kept() -> Iterator[tuple[str, SortedPairs]]:
                nonlocal removed
                for family in families:
                    for batch in stored_files.scan_family(state, family):
                        pairs = SortedPairs(batch.column(0), batch.column(1))
                        left = self._forgotten.without(family, pairs)
                        removed += len(pairs) - len(left)
                        if len(left):
                            yield family, left

            conf = StateStoreConf(provider=layout.backend, storage_options=dict(versions.place.options))
            stored, _ = build_snapshot(self._storage, head, ref.version, families, kept(), conf, is_distinct=True)
        return stored, removed

    def _move_snapshots(self, loaded: stored_files.LoadedFiles, affected: dict[Segment, frozenset[int]]) -> None:
        """Write the parts of whole snapshots in objects that may have rows of the keys into new objects, unchanged.

        Such an object has no index. It has no rows of the keys if snapshots of other partitions account for each byte.
        """
        rewritten = {(segment.layout, p) for segment, own in affected.items() for p in own}
        others: dict[str, tuple[stored_files.NamedSnapshot, SnapshotDescriptor]] = {
            path: (one, one.descriptor)
            for path, one in loaded.snapshots.items()
            if (one.layout, one.partition) not in rewritten and one.descriptor is not None
        }
        accounted: dict[str, int] = {}
        for one, content in others.values():
            for file in _shared_files(one.ref, content):
                accounted[file.stored_in] = accounted.get(file.stored_in, 0) + file.size
        for path, nbytes in accounted.items():
            if path not in self._has_keys:
                self._has_keys[path] = self._sizes.get(path, -1) != nbytes
        for path, (one, content) in others.items():
            files = _shared_files(one.ref, content)
            if path not in self._snapshots and any(self._has_keys[file.stored_in] for file in files):
                self._record_moved(one.ref, self._moved(content))

    def _moved(self, content: SnapshotDescriptor) -> snapshot.StoredSnapshot:
        """Rewrite a snapshot's descriptor, and its files that share an object with others."""
        beside = {f.name: f.file for f in content.files if f.file is not None and f.file.within is not None}
        small = {name: self._storage.read(ref) for name, ref in beside.items()}
        files = tuple(f for f in content.files if f.name not in beside)
        directory = content.path.rpartition("/")[0]
        prepared = PreparedSnapshot(directory, content.backend, content.state, files, small, 0)
        (stored,) = snapshot.store_together(self._storage, [prepared])
        return stored


class _Group:
    """Collects changelogs for objects of about ``REWRITTEN_GROUP_BYTES``; records their locations in ``places``."""

    def __init__(self, storage: CheckpointStorage, places: dict[str, FileRef]) -> None:
        self._storage = storage
        self._places = places
        self._named = dict(places)
        self._members: list[tuple[str, changelog.GroupMember]] = []
        self._nbytes = 0

    def add_changelog(self, old: str, member: changelog.GroupMember) -> None:
        """Add the changelog that replaces ``old``."""
        self._named[old] = FileRef(member.path, len(member.data), "")
        self._members.append((old, member))
        self._nbytes += len(member.data)
        if self._nbytes >= REWRITTEN_GROUP_BYTES:
            self.close()

    def names(self, version: int) -> RewrittenFiles:
        """Return the replacements by name, including changelogs that are not written yet. It has no locations."""
        return RewrittenFiles(version, self._named, {})

    def close(self) -> None:
        """Write the collected changelogs.

        The object has the name of its highest version. Retention keeps the object as long as that version.
        """
        if not self._members:
            return
        path = changelog.group_path(max(version_in(one.path) for _, one in self._members))
        data, refs = changelog.write_group(path, [one for _, one in self._members])
        self._storage.put_unique(path, data)
        self._places.update({old: ref for (old, _), ref in zip(self._members, refs, strict=True)})
        self._members, self._nbytes = [], 0


def _shared_files(ref: SnapshotRef, content: SnapshotDescriptor) -> list[FileRef]:
    """Return the files of a snapshot, its descriptor included, that share an object with others."""
    files = [ref.file, *(f.file for f in content.files if f.file is not None)]
    return [file for file in files if file.within is not None]


def _parallel(threads: int, work: Callable[[T], U], items: Iterable[T]) -> list[U]:
    with ThreadPoolExecutor(threads, thread_name_prefix="statestore-rewrite") as pool:
        return list(pool.map(work, items))
