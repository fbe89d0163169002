"""The descriptor of a snapshot: which files it consists of, and where they are."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field, structs

from backends.formats.local_state import LocalState
from backends.formats.manifest import STATE_FORMAT_VERSION
from backends.storage.file_ref import FileRef


class SnapshotFile(Struct, frozen=True):
    """One file of a snapshot: its name in the backend, and where its content is. The descriptor holds small ones
    itself.
    """

    name: str
    file: FileRef | None = None
    content: bytes | None = None


class SnapshotDescriptor(Struct, frozen=True):
    """The descriptor of a snapshot, ``<version>-<unique>.snapshot`` in the partition's directory."""

    path: str
    backend: str
    state: LocalState
    files: tuple[SnapshotFile, ...]
    format_version: int = field(default=STATE_FORMAT_VERSION)

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the objects to which the snapshot refers."""
        return frozenset(f.file.stored_in for f in self.files if f.file is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of the files to which the snapshot refers."""
        return sum(f.file.size for f in self.files if f.file is not None)

    def is_complete(self, sizes: Mapping[str, int]) -> bool:
        """Return whether all files of the snapshot are there, in full size. ``sizes`` are those of all stored files."""
        return all(f.file.is_in(sizes) for f in self.files if f.file is not None)

    @property
    def without_content(self) -> SnapshotDescriptor:
        """The same with only the files that are in storage: what it takes to know which objects are needed."""
        return structs.replace(self, files=tuple(f for f in self.files if f.file is not None))
