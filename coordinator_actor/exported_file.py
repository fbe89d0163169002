"""A file of a savepoint, as hosts tell the coordinator of it."""

from __future__ import annotations

from msgspec import Struct

from backends.storage.file_ref import FileRef


class ExportedFile(Struct, frozen=True):
    """A Parquet file below the savepoint: the rows of the key groups ``first_group`` to ``last_group``, both included."""

    path: str
    size: int
    digest: str
    rows: int
    first_group: int
    last_group: int

    @property
    def ref(self) -> FileRef:
        """The file as storage knows it."""
        return FileRef(self.path, self.size, self.digest)
