"""Manifests: the only truth about which files make a version (as in SlateDB and Iceberg).

A manifest says what changed since its parent. Manifests are written once, create-if-absent, and never changed. Version
V is the one that is found by walking the parents of the newest manifest of the highest epoch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct, field

from backends.formats.partition_entries import PartitionEntries, PartitionEntry, SnapshotRef
from backends.storage.file_ref import FileRef

__all__ = [
    "STATE_FORMAT_VERSION",
    "ChangelogRef",
    "FileRef",
    "Lineage",
    "Manifest",
    "OperatorEntry",
    "PartitionEntry",
    "Rescaled",
    "SnapshotRef",
    "SourcePartition",
]

STATE_FORMAT_VERSION = 1
NO_PARTITION_STAGES: Mapping[int, int] = MappingProxyType({})


class ChangelogRef(Struct, frozen=True):
    """A changelog file and the version to which it leads."""

    version: int
    file: FileRef


class OperatorEntry(Struct, frozen=True):
    """One operator in a manifest: layout, schema id, backend, and the partitions that changed.

    ``stage`` is the highest of Spark's stages in which these changes were made; None: not known. ``earlier_stages`` has
    the stages of the partitions whose changes were made in a lower one: a plan that ran again has not reached them.
    Both hold only within the run that wrote the manifest.
    """

    num_partitions: int
    schema_id: str
    backend: str
    partitions: PartitionEntries
    stage: int | None = None
    earlier_stages: dict[int, int] = {}

    @classmethod
    def of(
        cls,
        num_partitions: int,
        schema_id: str,
        backend: str,
        partitions: Mapping[int, PartitionEntry],
        stages: Mapping[int, int] = NO_PARTITION_STAGES,
    ) -> OperatorEntry:
        """Make the entry of what each partition contributed, in which of Spark's stages, where that is known."""
        stage = max(stages.values(), default=None)
        earlier = {p: s for p, s in stages.items() if s != stage}
        return cls(num_partitions, schema_id, backend, PartitionEntries.of(partitions), stage, earlier)

    def stage_of(self, partition: int) -> int | None:
        """Return the stage in which the changes of a partition were made; None: not known."""
        return self.earlier_stages.get(partition, self.stage)


class Manifest(Struct, frozen=True):
    """One version of a query's whole state. ``parent`` is the id of the manifest below; None for the first one.

    ``created_ms`` is when the version was prepared, in ms since 1970.

    ``oldest`` is the oldest version that is kept (besides the empty 0). ``chain_from`` is the lowest version whose
    manifest is kept to make ``oldest``. Files that only lower versions need are being removed. ``sequence`` counts the
    manifests of an epoch from 1 on, by which a query's coordinators fence each other; 0 in manifests from before there
    were fences, and where nobody fences. ``parent_completed_ms`` is when the version below was completed, in ms since
    1970; None where the coordinator that wrote this did not see that. ``rewritten`` are the paths of the records that
    say which files of the versions below stand in other places by now, the oldest first (``rewritten_files.py``).
    """

    id: int
    parent: int | None
    version: int
    epoch: int
    run_id: str
    created_ms: int
    operators: dict[str, OperatorEntry]
    oldest: int = 0
    chain_from: int = 1
    format_version: int = field(default=STATE_FORMAT_VERSION)
    sequence: int = 0
    parent_completed_ms: int | None = None
    rewritten: tuple[str, ...] = ()


class SourcePartition(Struct, frozen=True):
    """A partition of an earlier layout, from which another partition takes over a range of keys.

    Its files are in ``directory``; ``backend`` is the name of the backend that made its snapshots.
    """

    directory: str
    backend: str
    lineage: Lineage


class Rescaled(Struct, frozen=True):
    """The state of a partition where a new layout begins: the keys from ``start`` to ``end`` of the ``sources``.

    ``head`` stands for the changelog that would have made it. ``end`` None is the end of all keys.
    """

    version: int
    head: str
    start: bytes
    end: bytes | None
    sources: tuple[SourcePartition, ...]


class Lineage(Struct, frozen=True):
    """The files from which one partition can be brought to ``version``.

    ``changelogs`` ascend to that version, one per version; ``snapshots`` ascend as well. Loading begins with the empty
    version 0 if the first changelog makes version 1, else with a snapshot, or with the partitions of an earlier layout
    (``rescaled``), whose key groups have been divided anew.
    """

    version: int
    changelogs: tuple[ChangelogRef, ...] = ()
    snapshots: tuple[SnapshotRef, ...] = ()
    rescaled: Rescaled | None = None

    @property
    def head(self) -> str | None:
        """The path of the changelog that made the version; None for the empty version 0."""
        if self.changelogs:
            return self.changelogs[-1].file.path
        return self.rescaled.head if self.rescaled is not None else None

    @property
    def oldest(self) -> float:
        """The lowest version of which there is a file, of earlier layouts too; infinite if there is no file."""
        sources = self.rescaled.sources if self.rescaled is not None else ()
        lowest = [math.inf, *(source.lineage.oldest for source in sources)]
        lowest += [log.version for log in self.changelogs[:1]] + [snapshot.version for snapshot in self.snapshots[:1]]
        return min(lowest)

    @property
    def is_empty(self) -> bool:
        """Whether this is the lineage of the empty version 0."""
        return self.version == 0 and self.head is None
