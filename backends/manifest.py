"""Manifests: the only truth about which files make a version (DESIGN: SlateDB's and Iceberg's manifests).

A manifest says what changed since its parent. Manifests are written once, create-if-absent, and
never changed; version V is the one found by walking the parents of the newest manifest of the
highest epoch.
"""

from __future__ import annotations

from msgspec import Struct, field

FORMAT_VERSION = 1


class FileRef(Struct, frozen=True):
    """A file below the state location: its relative path, size in bytes, and xxh3-128 hex digest."""

    path: str
    size: int
    digest: str


class ChangelogRef(Struct, frozen=True):
    """A changelog file and the version it leads to."""

    version: int
    file: FileRef


class SnapshotRef(Struct, frozen=True):
    """The state of one partition at ``version``, whose last changelog is ``head``. ``file`` lists the files of it."""

    version: int
    head: str
    file: FileRef


class PartitionEntry(Struct, frozen=True):
    """What one partition contributed to a version: the accepted attempt and its changelog.

    ``snapshots`` are those that became known since the parent manifest, of this version or earlier ones.
    """

    attempt: str
    changelog: FileRef
    snapshots: tuple[SnapshotRef, ...] = ()


class OperatorEntry(Struct, frozen=True):
    """One operator in a manifest: layout, schema id, backend, and the partitions that changed."""

    num_partitions: int
    schema_id: str
    backend: str
    partitions: dict[int, PartitionEntry]


class Manifest(Struct, frozen=True):
    """One version of a query's whole state. ``parent`` is None for the first one.

    ``oldest`` is the oldest version that is kept (besides the empty 0), and ``chain_from`` the
    lowest version whose manifest is kept for its sake: what only lower ones need is being removed.
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
    format_version: int = field(default=FORMAT_VERSION)


class Lineage(Struct, frozen=True):
    """The files from which one partition can be brought to ``version``.

    ``changelogs`` ascend to that version, one per version; ``snapshots`` ascend as well. Loading
    begins with the empty version 0 if the first changelog makes version 1, else with a snapshot.
    """

    version: int
    changelogs: tuple[ChangelogRef, ...] = ()
    snapshots: tuple[SnapshotRef, ...] = ()

    @property
    def head(self) -> str | None:
        """The path of the changelog that made the version; None for the empty version 0."""
        return self.changelogs[-1].file.path if self.changelogs else None
