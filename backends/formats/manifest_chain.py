"""Walks the chain of manifests: finds the versions that exist, and the lineage of a partition (the files that make it).

Shared by a provider that keeps its own manifests and by the coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import xxhash

from backends.encoding.key_groups import partition_of, partition_range
from backends.exceptions import DamagedFileError, MissingFileError
from backends.formats.file_names import partition_directory
from backends.formats.manifest import (
    ChangelogRef,
    Lineage,
    Manifest,
    OperatorEntry,
    PartitionEntry,
    Rescaled,
    SnapshotRef,
    SourcePartition,
)

Chain = Mapping[int, Manifest]
"""A manifest per version."""


class Layout(NamedTuple):
    """Into how many partitions the state of an operator is divided, and which backend keeps them."""

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
    ``MissingFileError`` if a manifest is not there, ``DamagedFileError`` if one is not of the version that belongs
    there. With ``gap`` the chain leaves that version out: ``gap`` is told the manifest whose parent that is, and the
    error, and returns a manifest from which the chain goes on with the versions below, None if there is none.
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
                # Changelogs from version 1 on are applied to no state; these are applied to what is not known.
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
    """Return the entry of a partition in a version, in the layout of that version; None if nothing."""
    manifest = chain.get(version)
    held = manifest.operators.get(operator) if manifest else None
    return held.partitions.get(partition) if held else None


def snapshots(
    chain: Chain, segment: Segment, manifests: Iterable[Manifest] = (), *, of: int | None = None
) -> dict[int, list[SnapshotRef]]:
    """Return the snapshots of a segment's versions, ascending, per partition (or only of the partition ``of``).

    Snapshots that ``manifests`` name count as well as those that the chain names.
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
    """Return the changelog that made the state of a partition at a version, or the name that stands for one.

    Such a name stands for the changelog where the chain has an earlier layout than ``layout``. None for the empty
    version 0, and for a version that is not on the chain.
    """
    manifest = chain.get(version)
    held = manifest.operators.get(layout.operator) if manifest else None
    if held is None:
        return None
    if layout_of(layout.operator, held) == layout:
        return held.partitions.head(partition) if partition in held.partitions else None
    return _rescaled_head(held, version, layout, partition, key_groups)


def _rescaled_head(below: OperatorEntry, version: int, layout: Layout, partition: int, key_groups: int) -> str:
    """Return a name that tells everything the state follows from: the changelogs of the earlier layout, and the new
    one.
    """
    heads = xxhash.xxh3_128()
    for p in _sources(below, partition_range(partition, layout.num_partitions, key_groups), key_groups):
        # An initial state has no partitions without rows.
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

    Where the chain has an earlier layout, the files are those of the earlier partitions that have some of the key
    groups of this one; there are ``key_groups`` in all. For a partition that is itself only a source, ``wanted`` are
    the key groups that the other partition has: below a still earlier change of the layout, no others are taken over.
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
        SourcePartition(
            earlier.directory(p), earlier.backend, lineage(chain, version, earlier, p, key_groups, (first, end))
        )
        for p in _sources(below, (first, end), key_groups)
    )
    head = _rescaled_head(below, version, layout, partition, key_groups)
    return Rescaled(version, head, first.to_bytes(2, "big"), end.to_bytes(2, "big") if end < 1 << 16 else None, sources)
