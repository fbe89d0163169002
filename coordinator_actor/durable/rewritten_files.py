"""``rewritten/<version>-<unique>.json``: files of versions that were written anew, because their content must go.

A manifest is never changed. So where the files that it names must go, as when keys are forgotten, a record says which
files stand in their place. A record counts from the manifest on that names it: that manifest is written under the
fencing of all manifests, so that no coordinator that has been replaced can exchange files. Each later manifest names
the record again, until no manifest of a version that the record is about is kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from msgspec import Struct, structs

from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.formats.partition_entries import PartitionEntries
from backends.storage.file_ref import FileRef

REWRITTEN = "rewritten"


class RewrittenFiles(Struct, frozen=True):
    """The files that stand in the place of others, by the paths of these: changelogs, and descriptors of snapshots.

    They are of versions up to ``version``. Grows with the changed partitions and the versions that are kept.
    """

    version: int
    changelogs: dict[str, FileRef]
    snapshots: dict[str, SnapshotRef]

    def of(self, manifest: Manifest) -> Manifest:
        """Return a manifest with the files that count. A manifest that names them already stays as it is."""
        if manifest.version > self.version:
            return manifest
        operators = {name: self._operator(entry) for name, entry in manifest.operators.items()}
        if all(entry is manifest.operators[name] for name, entry in operators.items()):
            return manifest
        return structs.replace(manifest, operators=operators)

    def _operator(self, entry: OperatorEntry) -> OperatorEntry:
        held = entry.partitions
        is_changed = any(held.head(p) in self.changelogs for p in held) or any(
            ref.file.path in self.snapshots for refs in held.snapshots.values() for ref in refs
        )
        if not is_changed:
            return entry
        return structs.replace(entry, partitions=PartitionEntries.of({p: self._partition(held[p]) for p in held}))

    def _partition(self, entry: PartitionEntry) -> PartitionEntry:
        return PartitionEntry(
            entry.attempt,
            self.changelogs.get(entry.changelog.path, entry.changelog),
            tuple(self.snapshots.get(ref.file.path, ref) for ref in entry.snapshots),
        )


def new_path(version: int) -> str:
    """Return a new path for a record about versions up to ``version``."""
    return f"{REWRITTEN}/{version}-{uuid.uuid4().hex}.json"


def version_of(path: str) -> int:
    """Return the highest version that a record is about."""
    return int(path.rpartition("/")[2].partition("-")[0])


def still_named(paths: Iterable[str], chain_from: int) -> tuple[str, ...]:
    """Return those of some records that are about versions from ``chain_from`` on, whose manifests are kept."""
    return tuple(path for path in dict.fromkeys(paths) if version_of(path) >= chain_from)
