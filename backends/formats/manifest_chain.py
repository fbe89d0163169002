"""Walks the chain of manifests: finds the versions that exist, and the lineage of a partition (the files that make it).

Used by a provider that keeps its own manifests and by the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import xxhash

from backends.encoding.key_groups import partition_of, partition_range
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.manifest import (
    ChangelogRef,
    Lineage,
    Manifest,
    OperatorEntry,
    PartitionEntry,
    Rescaled,
    SnapshotRef,
    SourcePartition,
    partition_directory,
    version_in,
)

Chain = Mapping[int, Manifest]
"""A manifest per version."""


class Layout(NamedTuple):
    """The number of partitions of an operator's state, and the backend that keeps them."""

    operator: str
    num_partitions: int
    backend: str

    def directory(self, partition: int) -> str:
        """Return the directory of a partition's files below the state location."""
        return partition_directory(self.operator, self.num_partitions, partition)


class Segment(NamedTuple):
    """Consecutive versions, from ``first`` to ``last``, of one layout."""

    layout: Layout
    first: int
    last: int


def walk(
    head: Manifest | None,
    manifest: Callable[[int], Manifest | None],
    name: Callable[[int], str],
    gap: Callable[[Manifest, MissingFileError | DamagedFileError], Manifest | None] | None = None,
) -> dict[int, Manifest]:
    """Return the manifest per version from ``head`` down to its ``chain_from``, newest first.

    ``manifest`` reads the manifest of an id, None if there is none; ``name`` names its file, for messages. Raises
    ``MissingFileError`` if a manifest does not exist, ``DamagedFileError`` if one has an unexpected version. With
    ``gap`` the chain leaves that version out instead. ``gap`` gets the child manifest and the error. It returns the
    manifest from which the chain continues below the gap, or None if there is none.
    """
    chain: dict[int, Manifest] = {}
    current, below = head, math.inf
    while current is not None:
        assert head is not None
        if current.version < below:
            chain[current.version] = current
        if current.version <= head.chain_from:
            break
        try:
            current = _parent(current, manifest, name)
        except (MissingFileError, DamagedFileError) as error:
            if gap is None:
                raise
            below = min(below, current.version - 1)
            if below == 0:
                # Version 0 is missing, and it has files. A chain that begins with version 1 would mean that version 0
                # is the empty state.
                chain.pop(1, None)
            current = gap(current, error)
    return chain


def _parent(current: Manifest, manifest: Callable[[int], Manifest | None], name: Callable[[int], str]) -> Manifest:
    if current.parent is None:
        raise DamagedFileError(
            f"{name(current.id)} (version {current.version}) names no parent, but cannot be the first."
        )
    parent = manifest(current.parent)
    if parent is None:
        raise MissingFileError(
            f"{name(current.parent)} does not exist, but version {current.version} of the state builds on it: it "
            "was removed, or is kept elsewhere. Restore it from a copy."
        )
    if parent.version != current.version - 1:
        raise DamagedFileError(
            f"{name(parent.id)} holds version {parent.version} where version {current.version - 1} belongs: files "
            "have been exchanged. Restore them from a copy."
        )
    return parent


def layout_of(operator: str, entry: OperatorEntry) -> Layout:
    """Return the layout of an operator's entry in a manifest."""
    return Layout(operator, entry.num_partitions, entry.backend)


def segments(chain: Chain, operator: str, version: int | None = None) -> list[Segment]:
    """Return the segments of an operator's versions, the last one first; only of those up to ``version``, if given."""
    segments_of_chain: list[Segment] = []
    for v in sorted(chain, reverse=True):
        entry = chain[v].operators.get(operator)
        if entry is None or (version is not None and v > version):
            continue
        layout = layout_of(operator, entry)
        if segments_of_chain and segments_of_chain[-1].layout == layout:
            segments_of_chain[-1] = segments_of_chain[-1]._replace(first=v)
        else:
            segments_of_chain.append(Segment(layout, v, v))
    return segments_of_chain


def _operator_entry(chain: Chain, version: int, operator: str) -> OperatorEntry | None:
    manifest = chain.get(version)
    return None if manifest is None else manifest.operators.get(operator)


def entry(chain: Chain, version: int, operator: str, partition: int) -> PartitionEntry | None:
    """Return the entry of a partition in a version, in the layout of that version; None if there is none."""
    operator_entry = _operator_entry(chain, version, operator)
    return operator_entry.partitions.get(partition) if operator_entry else None


def snapshots(
    chain: Chain, segment: Segment, manifests: Iterable[Manifest] = (), *, of: int | None = None
) -> dict[int, list[SnapshotRef]]:
    """Return the snapshots of a segment's versions, ascending, per partition (or only of the partition ``of``).

    Snapshots that ``manifests`` name count as well as those that the chain names.
    """
    by_partition: dict[int, dict[str, SnapshotRef]] = {}
    operator = segment.layout.operator
    for manifest in (*chain.values(), *manifests):
        entry = manifest.operators.get(operator)
        if entry is None or layout_of(operator, entry) != segment.layout:
            continue
        named = entry.partitions.snapshots
        wanted = named if of is None else named.keys() & {of}
        for partition in wanted:
            for ref in named[partition]:
                in_segment = segment.first <= ref.version <= segment.last
                if in_segment and _head(chain, ref.version, operator, partition) == ref.head:
                    by_partition.setdefault(partition, {})[ref.file.path] = ref
    return {p: sorted(refs.values(), key=lambda ref: (ref.version, ref.file.path)) for p, refs in by_partition.items()}


def _head(chain: Chain, version: int, operator: str, partition: int) -> str | None:
    entry = _operator_entry(chain, version, operator)
    return entry.partitions.head(partition) if entry and partition in entry.partitions else None


def head_of(chain: Chain, version: int, layout: Layout, partition: int, key_groups: int = 0) -> str | None:
    """Return the head of a partition at a version: the changelog that made its state.

    If the chain has an earlier layout at that version, no changelog made the state in ``layout``. Its head is then a
    name derived from the changelogs of the earlier layout. Return None for the empty version 0, and for a version that
    is not on the chain.
    """
    entry = _operator_entry(chain, version, layout.operator)
    if entry is None:
        return None
    if layout_of(layout.operator, entry) == layout:
        return _head(chain, version, layout.operator, partition)
    return _rescaled_head(entry, version, layout, partition, key_groups)


def _rescaled_head(below: OperatorEntry, version: int, layout: Layout, partition: int, key_groups: int) -> str:
    """Return a name for all that the state derives from: the earlier layout's changelogs, and the new layout."""
    heads = xxhash.xxh3_128()
    for p in _sources(below, partition_range(partition, layout.num_partitions, key_groups), key_groups):
        # Version 0 of a query that begins with state has entries only for partitions with rows.
        if p in below.partitions:
            heads.update(below.partitions.head(p).encode() + b"\n")
    return f"{layout.directory(partition)}/{version}-{heads.hexdigest()}.rescaled-{layout.backend}"


def _sources(below: OperatorEntry, groups: tuple[int, int], key_groups: int) -> range:
    """Return the partitions of an earlier layout that have some of the key groups (first, end excluded)."""
    first, end = groups
    n = below.num_partitions
    return range(partition_of(first, key_groups, n), partition_of(end - 1, key_groups, n) + 1)


def lineage(
    chain: Chain,
    version: int,
    layout: Layout,
    partition: int,
    key_groups: int = 0,
    wanted: tuple[int, int] | None = None,
) -> Lineage:
    """Return the files that make a partition's state at a version of the chain.

    If the chain has an earlier layout, the files include those of the earlier partitions that have some of the key
    groups of this one. ``key_groups`` is the number of all key groups. ``wanted`` (first, end excluded) limits the key
    groups: if a load reads this partition only as a source of another one, it needs only those of the other one.
    """
    chain_segments = segments(chain, layout.operator, version)
    own = chain_segments.pop(0) if chain_segments and chain_segments[0].layout == layout else None
    rescaled = None
    if chain_segments:
        rescaled = _rescaled(chain, chain_segments[0].last, layout, partition, key_groups, wanted)
    if own is None:
        return Lineage(version, rescaled=rescaled)
    logs = []
    for v in range(own.first, min(version, own.last) + 1):
        one = entry(chain, v, layout.operator, partition)
        if one is not None:
            logs.append(ChangelogRef(v, one.changelog))
    fitting = tuple(s for s in snapshots(chain, own, of=partition).get(partition, ()) if s.version <= version)
    return Lineage(version, tuple(logs), fitting, rescaled)


def _rescaled(
    chain: Chain, version: int, layout: Layout, partition: int, key_groups: int, wanted: tuple[int, int] | None
) -> Rescaled:
    below = chain[version].operators[layout.operator]
    earlier = layout_of(layout.operator, below)
    first, end = partition_range(partition, layout.num_partitions, key_groups)
    if wanted is not None:
        first, end = max(first, wanted[0]), min(end, wanted[1])
    sources = tuple(
        SourcePartition(
            earlier.directory(p), earlier.backend, lineage(chain, version, earlier, p, key_groups, (first, end))
        )
        for p in _sources(below, (first, end), key_groups)
    )
    head = _rescaled_head(below, version, layout, partition, key_groups)
    return Rescaled(version, head, first.to_bytes(2, "big"), end.to_bytes(2, "big") if end < 1 << 16 else None, sources)


# The rules of retention: the versions, manifests and files that must be kept, and the files to remove.
#
# Used by a provider that keeps its own manifests and by the coordinator.


class Base(NamedTuple):
    """The start of a load in a segment: a snapshot, or (None) the state below the segment."""

    segment: Segment
    partition: int
    snapshot: SnapshotRef | None


@dataclass(frozen=True)
class Retention:
    """Rules of retention: versions from ``oldest``, manifests from ``chain_from``, files above ``bases``."""

    oldest: int
    chain_from: int
    bases: Sequence[Base] = ()


def retain(
    chain: Chain, operators: Iterable[str], target: int, floor: int, is_sound: Callable[[SnapshotRef], bool]
) -> Retention:
    """Return the files that must be kept for the versions from ``target`` on.

    ``floor`` is the oldest version that a manifest already declares as kept. The oldest version kept is that of a
    snapshot at or below ``target``: with a newer one, a version from ``target`` on could be lost. The snapshot must be
    sound, because the changelogs below it are removed. An earlier layout is kept until every partition of the present
    one has its own snapshot at or below ``target``. A partition that has such a snapshot does not wait for the others:
    its older files are removed at once.
    """
    target = max(target, floor)  # after a rollback to an older version, the target may be below what is kept
    bases: list[Base] = []
    lowest: list[int] = []  # per partition of the lowest layout that is kept
    for operator in operators:
        for segment in segments(chain, operator):
            if segment.first > target and versions_below(chain, segment):
                # The target is a version of an earlier layout. So all files of this layout are kept.
                bases += [Base(segment, p, None) for p in range_of(chain, segment)]
                continue
            by_partition = snapshots(chain, segment)
            oldest_of_partitions = []
            for p in range_of(chain, segment):
                fitting = [s for s in reversed(by_partition.get(p, ())) if s.version <= target]
                oldest_of_partitions.append(Base(segment, p, next((s for s in fitting if is_sound(s)), None)))
            bases += oldest_of_partitions
            if all(b.snapshot is not None for b in oldest_of_partitions) or not versions_below(chain, segment):
                lowest += [0 if b.snapshot is None else b.snapshot.version for b in oldest_of_partitions]
                break
    if not lowest or not chain:
        return Retention(floor, min(chain, default=1), bases)
    oldest = max(0 if b.snapshot is None else b.snapshot.version for b in bases)
    return Retention(max(oldest, floor), max(min(chain), min(lowest)), bases)


def versions_below(chain: Chain, segment: Segment) -> bool:
    """Return whether a segment lies on top of an earlier layout that is still kept."""
    below = chain.get(segment.first - 1)
    return below is not None and segment.layout.operator in below.operators


def range_of(chain: Chain, segment: Segment) -> Iterable[int]:
    """Return the partitions of a segment."""
    return chain[segment.last].operators[segment.layout.operator].partitions


def garbage(files: Iterable[str], needed: Collection[str], oldest: int) -> list[str]:
    """Return which of the partitions' ``files`` may be removed.

    These are the files of versions up to the ``oldest`` kept that are not ``needed``. Files of later versions always
    stay, because they may belong to a commit or an upload under way; they are removed when their version is no longer
    kept.
    """
    return [f for f in files if f not in needed and 0 <= version_in(f) <= oldest]


def needed_files(
    chain: Chain,
    retention: Retention,
    files_of: Callable[[SnapshotRef], Collection[str]],
    unnamed: Iterable[SnapshotRef] = (),
) -> set[str]:
    """Return the files that kept versions refer to.

    ``files_of`` names the files that a snapshot consists of; ``unnamed`` are snapshots that the next manifest will
    name.
    """
    needed: set[str] = set()
    for ref in unnamed:
        needed.update((ref.file.stored_in, *files_of(ref)))
    for planned, bases in groupby(retention.bases, lambda base: base.segment):
        # The segment may have grown since.
        segment = next((s for s in segments(chain, planned.layout.operator) if _overlap(s, planned)), None)
        if segment is None:
            continue
        above = {base.partition: 0 if base.snapshot is None else base.snapshot.version for base in bases}
        for version in range(segment.first, segment.last + 1):
            partitions = chain[version].operators[planned.layout.operator].partitions
            # A group stays as long as one of its parts is needed.
            needed.update(partitions.stored_in(p) for p in partitions if version > above.get(p, version))
        for partition, refs in snapshots(chain, segment).items():
            for ref in refs:
                if ref.version >= above.get(partition, ref.version + 1):
                    needed.add(ref.file.stored_in)
                    needed.update(files_of(ref))
    return needed


def _overlap(one: Segment, other: Segment) -> bool:
    return one.layout == other.layout and one.first <= other.last and other.first <= one.last


# The size of a version of the state in bytes: the bytes that its batch has added, and those of a load.


def delta_bytes(manifest: Manifest) -> int:
    """Return the bytes of the changelogs that a version has added."""
    return sum(sum(operator.partitions.stored.size) for operator in manifest.operators.values())


def full_bytes(chain: Chain, version: int, snapshot_bytes: Callable[[SnapshotRef], int | None]) -> int | None:
    """Return the bytes of a version's files: for each partition, a snapshot and the changelogs after it.

    Partitions without their own snapshot are loaded from the changelogs since the first version, or since an earlier
    layout. All files of an earlier layout count. ``snapshot_bytes`` returns the bytes of a snapshot, None if they are
    not known; the sum is then unknown, too.
    """
    total = 0
    for operator in chain[version].operators:
        for segment in segments(chain, operator, version):
            newest = {partition: refs[-1] for partition, refs in snapshots(chain, segment).items()}
            sizes = [snapshot_bytes(ref) for ref in newest.values()]
            known_sizes = [size for size in sizes if size is not None]
            if len(known_sizes) < len(sizes):
                return None
            total += sum(known_sizes)
            start = np.zeros(segment.layout.num_partitions, np.int64)
            for partition, ref in newest.items():
                start[partition] = ref.version
            for v in range(segment.first, segment.last + 1):
                entries = chain[v].operators[operator].partitions
                numbers = np.fromiter(entries, np.int64, len(entries))
                added = np.asarray(entries.stored.size, np.int64)
                total += int(added[start[numbers] < v].sum())
            if len(newest) == segment.layout.num_partitions:
                break
    return total
