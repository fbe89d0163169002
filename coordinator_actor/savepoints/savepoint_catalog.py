"""The savepoints in storage: listed, described, verified and deleted by their metadata files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from backends.exceptions import DamagedFileError, MissingFileError
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.file_ref import FileRef, file_digest
from backends.tracing.spans import Pool
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.savepoints.savepoint_format import (
    METADATA_FILE,
    SavepointInfo,
)
from coordinator_actor.savepoints.savepoint_metadata import read_metadata


def read_stored_savepoint(
    path: str, storage_options: Mapping[str, str] | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> SavepointInfo:
    """Return the description of a savepoint, from its metadata alone. Raises ``SavepointError`` or
    ``DamagedFileError``.
    """
    storage = open_storage(path, storage_options or {})
    return SavepointInfo(storage.location, read_metadata(storage))


def read_stored_savepoints(
    base_path: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> list[SavepointInfo]:
    """Return the savepoints directly below a directory, the oldest first, without unfinished ones.

    A savepoint with a damaged metadata file is listed with its ``damage``, so that it hides no other savepoint.
    """
    storage = open_storage(base_path, storage_options or {})
    found: list[SavepointInfo] = []
    for path, _ in storage.list():
        name, slash, file = path.partition("/")
        if not slash or file != METADATA_FILE:
            continue
        one = open_storage(f"{storage.location.rstrip('/')}/{name}", storage_options or {})
        try:
            found.append(SavepointInfo(one.location, read_metadata(one)))
        except (DamagedFileError, SavepointError) as error:
            found.append(SavepointInfo(one.location, None, str(error)))
    return sorted(found, key=lambda info: (info.metadata.created_ms if info.metadata else -1, info.path))


def remove_stored_savepoint(
    path: str, storage_options: Mapping[str, str] | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> None:
    """Remove a savepoint: first its metadata file, so that a half-deleted one is no savepoint, then its other files.

    Files that do not belong to the savepoint stay. Raises ``SavepointError`` for a path that is no savepoint.
    """
    storage = open_storage(path, storage_options or {})
    read_metadata(storage)
    storage.delete(METADATA_FILE)
    for directory in ("operators", "spark"):
        storage.delete_all([*(f for f, _ in storage.list(directory)), *storage.unfinished(directory)])
    if storage.is_local:
        _remove_empty(Path(storage.location))


def _remove_empty(root: Path) -> None:
    """Remove the directories that a local disk keeps, if they are empty."""
    for name in ("operators", "spark"):
        for directory, _, _ in os.walk(root / name, topdown=False):
            if not any(Path(directory).iterdir()):
                Path(directory).rmdir()
    if root.is_dir() and not any(root.iterdir()):
        root.rmdir()


def verify_stored_savepoint(
    path: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    threads: int = 2,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> SavepointInfo:
    """Read all files of a savepoint and compare them with what was written.

    Raises ``SavepointError``, or ``DamagedFileError`` naming every file that is missing or damaged.
    """
    storage = open_storage(path, storage_options or {})
    metadata = read_metadata(storage)
    with TemporaryDirectory(prefix="statestore-savepoint-") as scratch:
        check_files(storage, metadata.files(), Path(scratch), keep=False, threads=threads)
    return SavepointInfo(storage.location, metadata)


def check_files(
    storage: CheckpointStorage, files: Sequence[FileRef], scratch: Path, *, keep: bool, threads: int
) -> dict[str, Path]:
    """Return local copies of files, by path, after comparing each with what was written.

    Files of a local storage are not copied. Others are fetched into ``scratch``, where they stay if ``keep``. Raises
    ``DamagedFileError`` naming every file that is missing or damaged, ``StorageError``.
    """

    def check(ref: FileRef) -> Path | str:
        try:
            if storage.is_local:
                return _checked(storage, ref)
            copy = scratch / uuid.uuid4().hex
            storage.read_to_file(ref, copy)
            if not keep:
                copy.unlink()
            return copy
        except (MissingFileError, DamagedFileError) as error:
            return str(error)

    with Pool(threads, thread_name_prefix="statestore-savepoint") as pool:
        found = list(pool.map(check, files))
    damage = [problem for problem in found if isinstance(problem, str)]
    if damage:
        raise DamagedFileError(
            f"{len(damage)} of {len(files)} files of the savepoint at {storage.location} are missing or damaged:\n"
            + "\n".join(damage)
        )
    return {ref.path: path for ref, path in zip(files, found, strict=True) if isinstance(path, Path)}


def _checked(storage: CheckpointStorage, ref: FileRef) -> Path:
    """Return the path of a file of a local storage after comparing it with what was written."""
    path = Path(storage.full_location(ref.path))
    if not path.is_file():
        raise MissingFileError(f"{path} ({ref.size} bytes) does not exist.")
    size, digest = path.stat().st_size, file_digest(path)
    if (size, digest) != (ref.size, ref.digest):
        raise DamagedFileError(
            f"{path} is damaged: {size} bytes with digest {digest}, written were {ref.size} bytes with digest "
            f"{ref.digest}."
        )
    return path
