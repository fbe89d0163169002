"""The rules of retention: the versions, manifests and files that must be kept, and the files to remove.

Shared by a provider that keeps its own manifests and by the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from backends.formats.file_names import version_in
from backends.formats.manifest import SnapshotRef
from backends.formats.manifest_chain import Chain, Segment, segments, snapshots


class Base(NamedTuple):
    """The start of a load in a segment: a snapshot, or (None) the state that lies below the segment."""

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
    chain: Chain,
    operators: Iterable[str],
    target: int,
    floor: int,
    is_sound: Callable[[SnapshotRef], bool],
) -> Retention:
    """Return the files that must be kept for the versions from ``target`` on.

    ``floor`` is the oldest version that a manifest says is kept already. The oldest version kept is that of a snapshot
    at or below ``target``: with a newer one, a version from ``target`` on could be lost. The snapshot must be sound,
    for the files that lead past it are removed. An earlier layout is kept until every partition of the present one has
    a snapshot of its own at or below ``target``; a partition that has one gives up its older files before.
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
    """Return whether a segment lies on top of an earlier layout that is still kept."""
    below = chain.get(segment.first - 1)
    return below is not None and segment.layout.operator in below.operators


def range_of(chain: Chain, segment: Segment) -> Iterable[int]:
    """Return the partitions of a segment."""
    return chain[segment.last].operators[segment.layout.operator].partitions


def garbage(files: Iterable[str], needed: Collection[str], oldest: int) -> list[str]:
    """Return which of the partitions' ``files`` may be removed.

    These are the files of versions up to the ``oldest`` kept that are not ``needed``. Files of later versions stay in
    any case, for they may belong to a commit or an upload under way; they are removed when their version is no longer
    kept.
    """
    return [f for f in files if f not in needed and 0 <= version_in(f) <= oldest]


def needed_files(
    chain: Chain,
    retention: Retention,
    files_of: Callable[[SnapshotRef], Collection[str]],
    unnamed: Iterable[SnapshotRef] = (),
) -> set[str]:
    """Return the files to which something kept refers.

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
            held = chain[version].operators[planned.layout.operator].partitions
            # A group stays as long as one of its parts is needed.
            needed.update(held.stored_in(p) for p in held if version > above.get(p, version))
        for partition, refs in snapshots(chain, segment).items():
            for ref in refs:
                if ref.version >= above.get(partition, ref.version + 1):
                    needed.add(ref.file.stored_in)
                    needed.update(files_of(ref))
    return needed


def _overlap(one: Segment, other: Segment) -> bool:
    return one.layout == other.layout and one.first <= other.last and other.first <= one.last
