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


class PartitionEntry(Struct, frozen=True):
    """What one partition contributed to a version: the accepted attempt and its changelog."""

    attempt: str
    changelog: FileRef


class OperatorEntry(Struct, frozen=True):
    """One operator in a manifest: layout, schema id, backend, and the partitions that changed."""

    num_partitions: int
    schema_id: str
    backend: str
    partitions: dict[int, PartitionEntry]


class Manifest(Struct, frozen=True):
    """One version of a query's whole state. ``parent`` is None for the first one."""

    id: int
    parent: int | None
    version: int
    epoch: int
    run_id: str
    created_ms: int
    operators: dict[str, OperatorEntry]
    format_version: int = field(default=FORMAT_VERSION)
