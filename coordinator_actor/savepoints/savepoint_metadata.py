"""The metadata of a savepoint, ``_metadata.json``: the last file to be written, which finishes the savepoint."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from backends.exceptions import MissingFileError
from backends.formats.sealed import seal, unseal
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.file_ref import FileRef
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.savepoints.savepoint_format import (
    METADATA_FILE,
    SAVEPOINT_FORMAT_VERSION,
    SavepointMetadata,
    check_metadata,
)


class _Version(Struct, frozen=True):
    """The only part of the metadata that every release must understand."""

    format_version: int


def write_metadata(storage: CheckpointStorage, metadata: SavepointMetadata) -> FileRef:
    """Finish a savepoint whose files were written. ``storage`` is that of the savepoint.

    Raises ``SavepointError`` if files are missing or the metadata is not consistent, ``FileExistsInStorageError`` if
    there is a savepoint already.
    """
    check_metadata(metadata)
    there = dict(storage.list())
    absent = [file.path for file in metadata.files() if there.get(file.path) != file.size]
    if absent:
        raise SavepointError(
            f"{len(absent)} files of the savepoint at {storage.location} are missing or not of the size they were "
            "written "
            f"with: {some_of(absent)}. Somebody else has written there or removed them; take another savepoint."
        )
    return storage.put_new(METADATA_FILE, seal(metadata))


def read_metadata(storage: CheckpointStorage) -> SavepointMetadata:
    """Return the metadata of the savepoint that ``storage`` is at.

    Raises ``SavepointError`` if there is none, or if a newer release wrote it; ``DamagedFileError``.
    """
    try:
        data = storage.get(METADATA_FILE)
    except MissingFileError as error:
        raise SavepointError(
            f"{storage.location} is no savepoint: there is no {METADATA_FILE} in it. It is not the directory of a "
            "savepoint "
            "(<base>/savepoint-<query>-<checkpoint>), or of one that was never finished, or was deleted in part; "
            "remove "
            "such a directory by hand."
        ) from error
    name = storage.full_location(METADATA_FILE)
    found = unseal(data, _Version, name).format_version
    if found != SAVEPOINT_FORMAT_VERSION:
        raise SavepointError(
            f"{name} has the format {found}; this release reads {SAVEPOINT_FORMAT_VERSION}. Use the newer release."
        )
    metadata = unseal(data, SavepointMetadata, name)
    check_metadata(metadata)
    return metadata


def some_of(names: Sequence[str]) -> str:
    """Return the first names of many, for a message."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
