"""Writes the files of a query's kept versions anew without the rows of some keys. What is there is not touched.

All versions that are kept stay readable. In each partition that may have rows of the keys:

- every changelog is written anew, under a new name and on top of the new name of the one before. So whatever was made
  of the old ones, in a host's memory or on its disk, is of another lineage, and is loaded again;
- of the snapshots, the one at which loading the oldest version begins, and the newest one, are built anew by the
  backend's engine, of nothing but the rows that stay. The reason is that files of RocksDB keep rows that were removed,
  and the bounds of files that are gone. Snapshots between them are given up; loading replays changelogs instead.

An object that also has parts of other partitions is written anew with these as they are.

What is read and written grows with the state of these partitions, and with their changelogs of all kept versions.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import structs

from backends.conf import StateStoreConf
from backends.encoding.key_groups import partition_of, partition_range
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats import manifest_chain as chains
from backends.formats import snapshot
from backends.formats.changelog import Changes, read_changelog, read_changelog_meta, write_changelog
from backends.formats.changelog_group import GROUPS_DIRECTORY, GroupMember, group_path, write_group
from backends.formats.file_names import changelog_name, version_in
from backends.formats.manifest import Manifest, PartitionEntry, SnapshotRef
from backends.formats.manifest_chain import Layout, Segment
from backends.formats.snapshot import PreparedSnapshot
from backends.formats.snapshot_descriptor import SnapshotDescriptor
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.file_ref import FileRef
from coordinator_actor.durable.rewritten_files import RewrittenFiles
from coordinator_actor.reading.partition_reader import opened_partition, scan_family
from coordinator_actor.reading.stored_versions import Piece, StateVersions
from coordinator_actor.savepoints.partition_builder import build_snapshot
from coordinator_actor.surgery.forgotten_keys import ForgottenKeys

log = logging.getLogger(__name__)

REWRITTEN_GROUP_BYTES = 32 << 20
"""Changelogs are written together in objects of about this size."""
REWRITE_THREADS = 4
"""At most this many partitions are read, or built, at once."""


class Rewriting:
    """Writes the files of an operator anew without the rows of some keys.

    ``run`` may be called again when more versions are there: what it has written before is not written again.
    ``rows`` is the number of rows that have gone from the newest snapshots and the changelogs after them, as far as
    that is known: a changelog says that a key has a new value, not whether the key had one.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        operator: str,
        forgotten: ForgottenKeys,
        *,
        open_storage: OpenStorage = CheckpointStorage.open,
        scratch: Path | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._storage = storage
        self._operator = operator
        self._forgotten = forgotten
        self._open = open_storage
        self._scratch = scratch
        self._say = say
        self._changelogs: dict[str, FileRef] = {}
        self._snapshots: dict[str, SnapshotRef] = {}
        self._built: dict[tuple[Layout, int], int] = {}
        self.removed_rows = 0
        """The rows of the keys that were in changelogs and snapshots: one of them counts in each that has had it."""

    def run(self, versions: StateVersions) -> RewrittenFiles:
        """Write anew what the kept versions need. Return which files stand in the place of which.

        Raises ``DamagedFileError``, ``MissingFileError``, ``StorageError``: what was written until then counts for
        nothing, and is removed when its versions are no longer kept.
        """
        affected = self._affected(versions)
        self._rewrite_changelogs(versions, affected)
        self._move_changelogs(versions)
        self._rewrite_snapshots(versions, affected)
        self._move_snapshots(versions, affected)
        return RewrittenFiles(max(versions.chain), dict(self._changelogs), dict(self._snapshots))

    def directories(self, versions: StateVersions) -> tuple[str, ...]:
        """Return the directories whose files are written anew."""
        return tuple(
            f"{segment.layout.directory(p)}/"
            for segment, partitions in self._affected(versions).items()
            for p in partitions
        )

    def _affected(self, versions: StateVersions) -> dict[Segment, frozenset[int]]:
        """Return the partitions of each layout that are written anew, the earliest layout first.

        A partition that was made of one of an earlier layout is named by the heads of that, whatever keys it has.
        """
        found: dict[Segment, frozenset[int]] = {}
        below: tuple[int, frozenset[int]] | None = None
        for segment in reversed(chains.segments(versions.chain, self._operator)):
            n = segment.layout.num_partitions
            own = self._forgotten.partitions(n)
            if below is not None:
                own |= {p for p in range(n) if self._has_source(versions.key_groups, n, p, *below)}
            found[segment] = own
            below = n, own
        return found

    @staticmethod
    def _has_source(num_groups: int, n: int, partition: int, below: int, affected: frozenset[int]) -> bool:
        first, end = partition_range(partition, n, num_groups)
        sources = range(partition_of(first, num_groups, below), partition_of(end - 1, num_groups, below) + 1)
        return not affected.isdisjoint(sources)

    # -- changelogs ----------------------------------------------------------------------------

    def _rewrite_changelogs(self, versions: StateVersions, affected: dict[Segment, frozenset[int]]) -> None:
        chain, new = versions.chain, dict(versions.chain)
        group = _Group(self._storage, self._changelogs)
        for segment, partitions in affected.items():
            for version in range(segment.first, segment.last + 1):
                held = chain[version].operators[self._operator].partitions
                left = {p: held[p] for p in sorted(partitions) if p in held and held.head(p) not in self._changelogs}
                for (p, entry), data in zip(left.items(), self._read_all(left.values()), strict=True):
                    base = self._base(versions, new, segment.layout, p, version)
                    group.add(entry.changelog.path, self._filtered(segment.layout, p, data, base))
                new[version] = group.names(version).of(chain[version])
        group.close()

    def _read_all(self, entries: Iterable[PartitionEntry]) -> list[bytes]:
        with ThreadPoolExecutor(REWRITE_THREADS, thread_name_prefix="statestore-rewrite") as pool:
            return list(pool.map(lambda entry: self._storage.read(entry.changelog), entries))

    def _base(
        self, versions: StateVersions, new: dict[int, Manifest], layout: Layout, partition: int, version: int
    ) -> tuple[str | None, str | None]:
        """Return the head below a version of a partition as it was, and as it is when the files are exchanged."""
        key_groups = versions.key_groups
        return (
            chains.head_of(versions.chain, version - 1, layout, partition, key_groups),
            chains.head_of(new, version - 1, layout, partition, key_groups),
        )

    def _filtered(
        self, layout: Layout, partition: int, data: bytes, base: tuple[str | None, str | None]
    ) -> GroupMember:
        meta, changes = read_changelog(data)
        kept = {family: self._forgotten.without(family, pairs) for family, pairs in changes.families.items()}
        self.removed_rows += changes.num_changes - sum(map(len, kept.values()))
        # Below the lowest version that is kept there is no head any more, and none is looked for.
        meta = structs.replace(meta, base=base[1] if base[0] is not None and meta.base == base[0] else meta.base)
        path = f"{layout.directory(partition)}/{changelog_name(meta.version, uuid.uuid4().hex)}"
        return GroupMember(meta, path, write_changelog(Changes(kept), meta, StateStoreConf().compression))

    def _move_changelogs(self, versions: StateVersions) -> None:
        """Write the other parts of objects with changelogs that were written anew into new objects, as they are."""
        old = {path for path in self._changelogs if self._changelogs[path].path != path}
        entries = list(_entries(versions.chain))
        objects = {e.changelog.within for e in entries if e.changelog.path in old and e.changelog.within is not None}
        group = _Group(self._storage, self._changelogs)
        for entry in entries:
            ref = entry.changelog
            if ref.within in objects and ref.path not in self._changelogs:
                data = self._storage.read(ref)
                group.add(ref.path, GroupMember(read_changelog_meta(data), ref.path, data))
        group.close()

    # -- snapshots -----------------------------------------------------------------------------

    def _rewrite_snapshots(self, versions: StateVersions, affected: dict[Segment, frozenset[int]]) -> None:
        record = RewrittenFiles(max(versions.chain), self._changelogs, {})
        new = {version: record.of(manifest) for version, manifest in versions.chain.items()}
        due = []
        for segment, partitions in affected.items():
            known = chains.snapshots(versions.chain, segment)
            for p in sorted(partitions):
                refs = known.get(p, [])
                base = [ref for ref in refs if ref.version <= versions.oldest][-1:] or refs[:1]
                newest = refs[-1:] if (segment.layout, p) not in self._built else []
                for ref in {one.file.path: one for one in (*base, *newest)}.values():
                    if ref.file.path not in self._snapshots:
                        due.append((segment.layout, p, ref))
        with ThreadPoolExecutor(REWRITE_THREADS, thread_name_prefix="statestore-rewrite") as pool:
            made = pool.map(lambda one: self._rebuilt(versions, new, *one), due)
            for i, ((layout, p, ref), (rebuilt, removed)) in enumerate(zip(due, made, strict=True)):
                self._snapshots[ref.file.path] = rebuilt
                self._built[layout, p] = max(ref.version, self._built.get((layout, p), -1))
                self.removed_rows += removed
                self._say(f"snapshot {i + 1} of {len(due)} was written anew")

    def _rebuilt(
        self, versions: StateVersions, new: dict[int, Manifest], layout: Layout, partition: int, ref: SnapshotRef
    ) -> tuple[SnapshotRef, int]:
        lineage = chains.lineage(versions.chain, ref.version, layout, partition, versions.key_groups)
        piece = Piece(partition, layout.directory(partition), layout.backend, lineage)
        head = chains.head_of(new, ref.version, layout, partition, versions.key_groups)
        assert head is not None
        removed = 0
        with opened_partition(versions.place, piece, open_storage=self._open) as state:
            families = sorted(state.reads.column_families())

            def kept() -> Iterator[tuple[str, SortedPairs]]:
                nonlocal removed
                for family in families:
                    for batch in scan_family(state, family):
                        pairs = SortedPairs(batch.column(0), batch.column(1))
                        left = self._forgotten.without(family, pairs)
                        removed += len(pairs) - len(left)
                        if len(left):
                            yield family, left

            conf = StateStoreConf(provider=layout.backend, storage_options=dict(versions.place.options))
            made, _ = build_snapshot(
                self._storage, head, ref.version, families, kept(), conf, is_distinct=True, scratch=self._scratch
            )
        return made, removed

    def _move_snapshots(self, versions: StateVersions, affected: dict[Segment, frozenset[int]]) -> None:
        """Write the other parts of objects with files of given-up snapshots into new objects, as they are."""
        refs: dict[str, tuple[Layout, int, SnapshotRef]] = {}
        gone: set[str] = set()
        for operator in {name for manifest in versions.chain.values() for name in manifest.operators}:
            for segment in chains.segments(versions.chain, operator):
                own = affected.get(segment, frozenset())
                for p, known in chains.snapshots(versions.chain, segment).items():
                    for ref in known:
                        refs[ref.file.path] = segment.layout, p, ref
                        if p in own:
                            gone.add(ref.file.path)
        with ThreadPoolExecutor(REWRITE_THREADS, thread_name_prefix="statestore-rewrite") as pool:
            read = pool.map(lambda one: snapshot.read_descriptor(self._storage, one[2]), refs.values())
            descriptors = dict(zip(refs, read, strict=True))
        objects = {path for gone_path in gone for path in _objects(refs[gone_path][2], descriptors[gone_path])}
        for path, (layout, p, ref) in refs.items():
            held = descriptors[path]
            if path not in gone and path not in self._snapshots and not objects.isdisjoint(_objects(ref, held)):
                self._snapshots[path] = self._moved(layout, p, held)

    def _moved(self, layout: Layout, partition: int, held: SnapshotDescriptor) -> SnapshotRef:
        """Store a snapshot's descriptor, and its files that share an object with others, anew."""
        beside = {f.name: f.file for f in held.files if f.file is not None and f.file.within is not None}
        small = {name: self._storage.read(ref) for name, ref in beside.items()}
        files = tuple(f for f in held.files if f.name not in beside)
        directory = held.path.rpartition("/")[0]
        prepared = PreparedSnapshot(directory, held.backend, held.state, files, small, 0)
        (stored,) = snapshot.store_together(self._storage, [prepared])
        return stored.ref


class _Group:
    """Collects changelogs for objects of about ``REWRITTEN_GROUP_BYTES``, and notes in ``places`` where each one is."""

    def __init__(self, storage: CheckpointStorage, places: dict[str, FileRef]) -> None:
        self._storage = storage
        self._places = places
        self._named = dict(places)
        self._members: list[tuple[str, GroupMember]] = []
        self._nbytes = 0

    def add(self, old: str, member: GroupMember) -> None:
        """Take the changelog that stands in the place of ``old``."""
        self._named[old] = FileRef(member.path, len(member.data), "")
        self._members.append((old, member))
        self._nbytes += len(member.data)
        if self._nbytes >= REWRITTEN_GROUP_BYTES:
            self.close()

    def names(self, version: int) -> RewrittenFiles:
        """Return which names stand for which, also of what is not written yet. Where they are is not in it."""
        return RewrittenFiles(version, self._named, {})

    def close(self) -> None:
        """Write what was collected. The object bears the highest version in it, and stays as long as that is needed."""
        if not self._members:
            return
        path = group_path(max(version_in(one.path) for _, one in self._members))
        data, refs = write_group(path, [one for _, one in self._members])
        self._storage.put_unique(path, data)
        self._places.update({old: ref for (old, _), ref in zip(self._members, refs, strict=True)})
        self._members, self._nbytes = [], 0


def _entries(chain: chains.Chain) -> Iterator[PartitionEntry]:
    for manifest in chain.values():
        for operator in manifest.operators.values():
            yield from operator.partitions.values()


def _objects(ref: SnapshotRef, held: SnapshotDescriptor) -> set[str]:
    """Return the objects that have parts of a snapshot and may have parts of others."""
    return {path for path in (ref.file.stored_in, *held.paths) if path.startswith(f"{GROUPS_DIRECTORY}/")}
