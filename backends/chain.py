"""Walking manifests: which versions there are, from which files each is made, and what may be removed.

Shared by a provider that keeps its own manifests and by the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from backends.exceptions import DamagedFileError, MissingFileError
from backends.manifest import ChangelogRef, Lineage, Manifest, PartitionEntry, SnapshotRef

PartitionKey = tuple[str, int]
"""Operator and partition."""


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


def partitions(manifest: Manifest) -> Iterator[tuple[PartitionKey, PartitionEntry]]:
    """Every partition's entry."""
    for operator, entry in manifest.operators.items():
        for partition, held in entry.partitions.items():
            yield (operator, partition), held


def entry(chain: Mapping[int, Manifest], version: int, key: PartitionKey) -> PartitionEntry | None:
    """What a partition contributed to a version."""
    manifest = chain.get(version)
    held = manifest.operators.get(key[0]) if manifest else None
    return held.partitions.get(key[1]) if held else None


def head_of(chain: Mapping[int, Manifest], version: int, key: PartitionKey) -> str | None:
    """The changelog that a partition's state ends with at a version; None for the empty version 0."""
    held = entry(chain, version, key)
    return held.changelog.path if held else None


def snapshots(
    chain: Mapping[int, Manifest], key: PartitionKey, manifests: Iterable[Manifest] = ()
) -> list[SnapshotRef]:
    """A partition's snapshots of versions on the chain, ascending; those named by ``manifests`` besides count too."""
    found: dict[str, SnapshotRef] = {}
    for manifest in (*chain.values(), *manifests):
        held = entry({0: manifest}, 0, key)
        for ref in held.snapshots if held else ():
            if head_of(chain, ref.version, key) == ref.head:
                found[ref.file.path] = ref
    return sorted(found.values(), key=lambda ref: (ref.version, ref.file.path))


def lineage(chain: Mapping[int, Manifest], key: PartitionKey, version: int) -> Lineage:
    """The files that make a partition's state at a version of the chain."""
    logs = []
    for v in sorted(chain):
        held = entry(chain, v, key)
        if v <= version and held is not None:
            logs.append(ChangelogRef(v, held.changelog))
    fitting = tuple(ref for ref in snapshots(chain, key) if ref.version <= version)
    return Lineage(version, tuple(logs), fitting)


@dataclass(frozen=True)
class Retention:
    """What is kept: versions from ``oldest``, manifests from ``chain_from``, and per partition what is above ``bases``."""

    oldest: int
    chain_from: int
    bases: Mapping[PartitionKey, SnapshotRef | None]


def retain(
    chain: Mapping[int, Manifest],
    keys: Iterable[PartitionKey],
    target: int,
    floor: int,
    is_sound: Callable[[SnapshotRef], bool],
) -> Retention:
    """Keep what versions from ``target`` on need. ``floor`` is what a manifest says is kept already.

    The oldest version kept is that of a snapshot at or below ``target``: nothing older could be removed anyway.
    Above the floor it must be a sound one, or what leads past it would be lost.
    """
    target = max(target, floor)  # after going back to an older version, less may be asked for than is kept
    bases: dict[PartitionKey, SnapshotRef | None] = {}
    for key in keys:
        fitting = [s for s in reversed(snapshots(chain, key)) if s.version <= target]
        bases[key] = next((s for s in fitting if s.version <= floor or is_sound(s)), None)
    versions = [0 if base is None else base.version for base in bases.values()]
    if not versions or not chain:
        return Retention(floor, min(chain, default=1), bases)
    return Retention(max(versions), max(min(chain), min(versions)), bases)


def garbage(
    files: Iterable[str],
    chain: Mapping[int, Manifest],
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
    for key, base in retention.bases.items():
        above = 0 if base is None else base.version
        for version in chain:
            held = entry(chain, version, key)
            if held is not None and version > above:
                needed.add(held.changelog.path)
        for ref in snapshots(chain, key):
            if ref.version >= above:
                needed.add(ref.file.path)
                needed.update(files_of(ref))
    return [f for f in files if f not in needed and 0 <= version_in(f) <= retention.oldest]


def version_in(path: str) -> int:
    """The version that a file's name begins with, ``<version>-<unique>.<kind>``; -1 if it is no such name."""
    version, dash, _ = path.rsplit("/", 1)[-1].partition("-")
    return int(version) if dash and version.isdecimal() else -1
