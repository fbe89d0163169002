"""Walking manifests: which versions there are, from which files each is made, and what may be removed.

Shared by a provider that keeps its own manifests and by the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import xxhash

from backends.encoding.key_groups import partition_of, partition_range
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.file_names import partition_directory, version_in
from backends.formats.manifest import (
    ChangelogRef,
    Lineage,
    Manifest,
    OperatorEntry,
    PartitionEntry,
    Rescaled,
    SnapshotRef,
    Source,
)

Chain = Mapping[int, Manifest]
"""Manifest per version."""


class Layout(NamedTuple):
    """How the state of an operator is divided, and what keeps it."""

    operator: str
    num_partitions: int
    backend: str

    def directory(self, partition: int) -> str:
        """Where a partition's files are."""
        return partition_directory(self.operator, self.num_partitions, partition)


class Segment(NamedTuple):
    """Versions in a row, from ``first`` to ``last``, of one layout."""

    layout: Layout
    first: int
    last: int


def walk(
    head: Manifest | None, manifest: Callable[[int], Manifest | None], name: Callable[[int], str]
) -> dict[int, Manifest]:
    """Manifest per version from ``head`` down to its ``chain_from``, newest first.

    Raises ``MissingFileError`` or ``DamagedFileError`` if one is not there, or is not of the version that belongs there.
    """
    chain: dict[int, Manifest] = {}
    if head is None:
        return chain
    current = head
    while True:
        chain[current.version] = current
        if current.version <= head.chain_from:
            return chain
        if current.parent is None:
            raise DamagedFileError(
                f"{name(current.id)} (version {current.version}) names no parent, but cannot be the first."
            )
        parent = manifest(current.parent)
        if parent is None:
            raise MissingFileError(
                f"{name(current.parent)} does not exist, but version {current.version} of the state builds on it: it was "
                "removed, or is kept elsewhere. Restore it from a copy."
            )
        if parent.version != current.version - 1:
            raise DamagedFileError(
                f"{name(parent.id)} holds version {parent.version} where version {current.version - 1} belongs: files have "
                "been exchanged. Restore them from a copy."
            )
        current = parent


def layout_of(operator: str, entry: OperatorEntry) -> Layout:
    """The layout that an entry is in."""
    return Layout(operator, entry.num_partitions, entry.backend)


def segments(chain: Chain, operator: str, version: int | None = None) -> list[Segment]:
    """The layouts that an operator has had in the versions up to one, the last one first."""
    found: list[Segment] = []
    for v in sorted(chain, reverse=True):
        held = chain[v].operators.get(operator)
        if held is None or (version is not None and v > version):
            continue
        layout = layout_of(operator, held)
        if found and found[-1].layout == layout:
            found[-1] = found[-1]._replace(first=v)
        else:
            found.append(Segment(layout, v, v))
    return found


def entry(chain: Chain, version: int, operator: str, partition: int) -> PartitionEntry | None:
    """What a partition contributed to a version, in the layout of that version."""
    manifest = chain.get(version)
    held = manifest.operators.get(operator) if manifest else None
    return held.partitions.get(partition) if held else None


def snapshots(
    chain: Chain, segment: Segment, manifests: Iterable[Manifest] = (), *, of: int | None = None
) -> dict[int, list[SnapshotRef]]:
    """Per partition (or ``of`` one) the snapshots of a segment's versions, ascending.

    Those named by ``manifests`` count besides those that the chain names.
    """
    found: dict[int, dict[str, SnapshotRef]] = {}
    operator = segment.layout.operator
    for manifest in (*chain.values(), *manifests):
        held = manifest.operators.get(operator)
        if held is None or layout_of(operator, held) != segment.layout:
            continue
        named = held.partitions.snapshots
        for partition in named if of is None else [of] if of in named else []:
            for ref in named[partition]:
                in_segment = segment.first <= ref.version <= segment.last
                if in_segment and _head(chain, ref.version, operator, partition) == ref.head:
                    found.setdefault(partition, {})[ref.file.path] = ref
    return {p: sorted(refs.values(), key=lambda ref: (ref.version, ref.file.path)) for p, refs in found.items()}


def _head(chain: Chain, version: int, operator: str, partition: int) -> str | None:
    manifest = chain.get(version)
    held = manifest.operators.get(operator) if manifest else None
    return held.partitions.head(partition) if held and partition in held.partitions else None


def head_of(chain: Chain, version: int, layout: Layout, partition: int, key_groups: int = 0) -> str | None:
    """What made the state of a partition at a version: its changelog, or what stands for one where the layout is new.

    None for the empty version 0, and for a version that is not on the chain.
    """
    manifest = chain.get(version)
    held = manifest.operators.get(layout.operator) if manifest else None
    if held is None:
        return None
    if layout_of(layout.operator, held) == layout:
        return held.partitions.head(partition) if partition in held.partitions else None
    return _rescaled_head(held, version, layout, partition, key_groups)


def _rescaled_head(below: OperatorEntry, version: int, layout: Layout, partition: int, key_groups: int) -> str:
    """Says all that the state follows from: the changelogs of the earlier layout, and the new one."""
    heads = xxhash.xxh3_128()
    for p in _sources(below, partition_range(partition, layout.num_partitions, key_groups), key_groups):
        # Of an initial state, partitions without rows are not there.
        if p in below.partitions:
            heads.update(below.partitions.head(p).encode() + b"\n")
    return f"{layout.directory(partition)}/{version}-{heads.hexdigest()}.rescaled-{layout.backend}"


def _sources(below: OperatorEntry, groups: tuple[int, int], key_groups: int) -> range:
    """The partitions of an earlier layout that have some of these key groups: the first one, and the one behind the last."""
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
    """The files that make a partition's state at a version of the chain.

    Where the layout of the chain is an earlier one, they are those of its partitions that have some of
    the key groups, of which there are ``key_groups``. Of a partition that is only a source of another one, the key groups that
    the other one has are ``wanted``: what lies below an earlier change of the layout is not taken over beyond them.
    """
    held = segments(chain, layout.operator, version)
    own = held.pop(0) if held and held[0].layout == layout else None
    rescaled = None
    if held:
        rescaled = _rescaled(chain, held[0].last, layout, partition, key_groups, wanted)
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
        Source(earlier.directory(p), earlier.backend, lineage(chain, version, earlier, p, key_groups, (first, end)))
        for p in _sources(below, (first, end), key_groups)
    )
    head = _rescaled_head(below, version, layout, partition, key_groups)
    return Rescaled(version, head, first.to_bytes(2, "big"), end.to_bytes(2, "big") if end < 1 << 16 else None, sources)


class Base(NamedTuple):
    """From where the versions of a segment are made, for one partition: a snapshot, or None for what lies below it."""

    segment: Segment
    partition: int
    snapshot: SnapshotRef | None


@dataclass(frozen=True)
class Retention:
    """What is kept: versions from ``oldest``, manifests from ``chain_from``, and what is above the ``bases``."""

    oldest: int
    chain_from: int
    bases: Sequence[Base] = ()


def retain(
    chain: Chain,
    operators: Iterable[str],
    target: int,
    floor: int,
    is_sound: Callable[[SnapshotRef], bool],
) -> Retention:
    """Keep what versions from ``target`` on need. ``floor`` is what a manifest says is kept already.

    The oldest version kept is that of a snapshot at or below ``target``: nothing older could be removed anyway.
    It must be a sound one, or what leads past it would be lost. An earlier layout is kept until every partition of the
    present one has a snapshot of its own at or below ``target``; of those that have one, what is older goes before.
    """
    target = max(target, floor)  # after going back to an older version, less may be asked for than is kept
    bases: list[Base] = []
    lowest: list[int] = []  # per partition of the lowest layout that is kept
    for operator in operators:
        for segment in segments(chain, operator):
            if segment.first > target and versions_below(chain, segment):
                # Versions of the layout below it are asked for as well; all of this one is kept.
                bases += [Base(segment, p, None) for p in range_of(chain, segment)]
                continue
            known = snapshots(chain, segment)
            found = []
            for p in range_of(chain, segment):
                fitting = [s for s in reversed(known.get(p, ())) if s.version <= target]
                found.append(Base(segment, p, next((s for s in fitting if is_sound(s)), None)))
            bases += found
            if all(b.snapshot is not None for b in found) or not versions_below(chain, segment):
                lowest += [0 if b.snapshot is None else b.snapshot.version for b in found]
                break
    if not lowest or not chain:
        return Retention(floor, min(chain, default=1), bases)
    oldest = max(0 if b.snapshot is None else b.snapshot.version for b in bases)
    return Retention(max(oldest, floor), max(min(chain), min(lowest)), bases)


def versions_below(chain: Chain, segment: Segment) -> bool:
    """Whether a segment lies on top of an earlier layout that is still kept."""
    below = chain.get(segment.first - 1)
    return below is not None and segment.layout.operator in below.operators


def range_of(chain: Chain, segment: Segment) -> Iterable[int]:
    """The partitions of a segment."""
    return chain[segment.last].operators[segment.layout.operator].partitions


def garbage(
    files: Iterable[str],
    chain: Chain,
    retention: Retention,
    files_of: Callable[[SnapshotRef], Collection[str]],
    unnamed: Iterable[SnapshotRef] = (),
) -> list[str]:
    """Which of the partitions' ``files`` may go: those of versions up to the oldest kept that nothing kept refers to.

    Files of later versions stay in any case, for they may belong to a commit or an upload under way; they go
    when their version is no longer kept. ``files_of`` names the files that a snapshot consists of;
    ``unnamed`` are snapshots that the next manifest will name.
    """
    needed: set[str] = set()
    for ref in unnamed:
        needed.update((ref.file.path, *files_of(ref)))
    for planned, bases in groupby(retention.bases, lambda base: base.segment):
        # It may have grown since.
        segment = next((s for s in segments(chain, planned.layout.operator) if _overlap(s, planned)), None)
        if segment is None:
            continue
        above = {base.partition: 0 if base.snapshot is None else base.snapshot.version for base in bases}
        for version in range(segment.first, segment.last + 1):
            held = chain[version].operators[planned.layout.operator].partitions
            needed.update(held.head(p) for p in held if version > above.get(p, version))
        for partition, refs in snapshots(chain, segment).items():
            for ref in refs:
                if ref.version >= above.get(partition, ref.version + 1):
                    needed.add(ref.file.path)
                    needed.update(files_of(ref))
    return [f for f in files if f not in needed and 0 <= version_in(f) <= retention.oldest]


def _overlap(one: Segment, other: Segment) -> bool:
    return one.layout == other.layout and one.first <= other.last and other.first <= one.last
