"""The format of savepoints: one completed version of a whole query, independent of backends and partitions.

After Flink's canonical savepoints: typed columns instead of a backend's own files. So a savepoint can be restored to
any number of partitions and any backend, and read by every program that reads Parquet.

    <savepoint>/operators/<operator>/<family>/key-groups-<first>-<last>.parquet     ``last`` is included
    <savepoint>/spark/offsets/, commits/, sources/                                  Spark's own files
    <savepoint>/_metadata.json                                                      written last

``_metadata.json`` makes the directory a savepoint, and names the files that count. There are files for every column
family of a state variable that is not deleted. A Parquet file has the key group, the key's columns and the value's
columns as the newest schema has them, sorted by stored key (see ``column_names``).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from backends.conf import check_name
from backends.encoding.columns import RESERVED_PREFIX, distinct_names
from backends.encoding.key_groups import check_num_groups
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, MissingFileError, StateStoreError
from backends.formats.manifest import seal, unseal
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.locations import FileRef, file_digest
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import ExportedFile

SAVEPOINT_FORMAT_VERSION = 1
METADATA_FILE = "_metadata.json"
DEFAULT_VARIABLE = "default"
"""The column family of an operator's own rows, if it has some."""
KEY_GROUP_COLUMN = f"{RESERVED_PREFIX}key_group"
"""The first column of every file, int32. No column of a user can have such a name."""
_DIGITS = 5


class SavepointVariable(Struct, frozen=True):
    """One column family of an operator, by name. ``schema`` is the JSON of its ``StateSchema``.

    ``files`` ascend. Every key group is in exactly one of them.
    """

    name: str
    schema: str
    files: tuple[ExportedFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class SavepointOperator(Struct, frozen=True):
    """One operator. A restore uses its backend and number of partitions by default.

    ``operator_schema`` is the JSON of its ``OperatorSchema``. Older releases, whose operators all had their own rows,
    did not write it.
    """

    name: str
    kind: str
    backend: str
    num_partitions: int
    variables: tuple[SavepointVariable, ...]
    operator_schema: str | None = None

    @property
    def schema(self) -> OperatorSchema:
        """Return the state variables of the operator with their schemas."""
        if self.operator_schema is not None:
            return OperatorSchema.from_json(self.operator_schema)
        return OperatorSchema.from_json(next(v.schema for v in self.variables if v.name == DEFAULT_VARIABLE))


class SavepointMetadata(Struct, frozen=True):
    """The content of ``_metadata.json``.

    ``batch_id`` is the batch that Spark committed last, ``version`` the state after that batch (one more).
    ``created_ms`` is in ms since 1970. ``checkpoint_location`` is where the query ran. ``spark_files`` are below
    ``spark/``.
    """

    checkpoint_id: int
    query_id: str
    query_name: str | None
    version: int
    batch_id: int
    created_ms: int
    key_groups: int
    checkpoint_location: str
    operators: tuple[SavepointOperator, ...]
    spark_files: tuple[FileRef, ...]
    format_version: int = SAVEPOINT_FORMAT_VERSION

    def files(self) -> list[FileRef]:
        """Return every file of the savepoint, without the metadata file itself."""
        return [*(f.ref for o in self.operators for v in o.variables for f in v.files), *self.spark_files]


class SavepointInfo(Struct, frozen=True):
    """A savepoint at ``path``. If its metadata file is damaged, ``metadata`` is None and ``damage`` says how."""

    path: str
    metadata: SavepointMetadata | None
    damage: str | None = None

    @property
    def rows(self) -> int:
        operators = self.metadata.operators if self.metadata else ()
        return sum(variable.rows for operator in operators for variable in operator.variables)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.metadata.files()) if self.metadata else 0


def column_names(schema: StateSchema) -> tuple[list[str], list[str]]:
    """Return the names of a file's key and value columns, which follow the key group in this order.

    These are the names of the schema. A value column with the name of a key column, or of a value column before it,
    gets ``__value`` appended until the name is unique. Upper and lower case count as equal, as they do in SQL.
    """
    keys = list(schema.key.names)
    return keys, distinct_names(schema.value.names, reserved=keys)


def file_path(operator: str, variable: str, first_group: int, last_group: int) -> str:
    """Return the path of the rows of key groups ``first_group`` to ``last_group``, both included."""
    check_name("an operator", operator)
    check_name("a state variable", variable)
    return f"operators/{operator}/{variable}/key-groups-{first_group:0{_DIGITS}d}-{last_group:0{_DIGITS}d}.parquet"


def check_metadata(metadata: SavepointMetadata) -> None:
    """Raise ``SavepointError`` unless the metadata is consistent: nothing missing, nothing twice."""
    problems: list[str] = []
    if metadata.batch_id < 0 or metadata.version != metadata.batch_id + 1:
        problems.append(f"version {metadata.version} is not that after batch {metadata.batch_id}")
    try:
        check_num_groups(metadata.key_groups)
    except InvalidStateStoreArgument as error:
        problems.append(str(error))
    names = [operator.name for operator in metadata.operators]
    if not names or len(set(names)) != len(names):
        problems.append(f"its operators are {', '.join(map(repr, names)) or 'none'}: each must be there once")
    for operator in metadata.operators:
        problems += _operator_problems(operator, metadata.key_groups)
    paths = {file.path for file in metadata.spark_files}
    needed = [f"spark/offsets/{metadata.batch_id}", f"spark/commits/{metadata.batch_id}"]
    if metadata.batch_id > 0:
        needed.append(f"spark/offsets/{metadata.batch_id - 1}")
    problems += [f"{path} is not among Spark's files" for path in needed if path not in paths]
    if problems:
        raise SavepointError(f"The savepoint of query {metadata.query_id} is not whole: {'; '.join(problems)}.")


def _operator_problems(operator: SavepointOperator, key_groups: int) -> Iterable[str]:
    names = [variable.name for variable in operator.variables]
    if operator.operator_schema is not None:
        yield from _schema_problems(operator, names)
    elif len(set(names)) != len(names) or DEFAULT_VARIABLE not in names:
        yield (
            f"operator {operator.name!r} has the variables {names}: {DEFAULT_VARIABLE!r} and others, each once, are "
            "needed"
        )
    for variable in operator.variables:
        what = f"variable {variable.name!r} of operator {operator.name!r}"
        try:
            StateSchema.from_json(variable.schema)
        except StateStoreError as error:
            yield f"the schema of {what} cannot be read: {error}"
        at = 0
        for file in variable.files:
            if file.path != file_path(operator.name, variable.name, file.first_group, file.last_group):
                yield f"{file.path} is not the name of key groups {file.first_group} to {file.last_group} of {what}"
            if file.first_group != at:
                yield f"key groups of {what} are missing or duplicated where {file.path} begins ({at} comes next)"
            at = file.last_group + 1
        if at != key_groups:
            yield f"the key groups of {what} end with {at - 1}, but there are {key_groups}"


def _schema_problems(operator: SavepointOperator, names: Sequence[str]) -> Iterable[str]:
    try:
        families = operator.schema.families
    except StateStoreError as error:
        yield f"the schema of operator {operator.name!r} cannot be read: {error}"
        return
    if sorted(names) != sorted(families):
        yield f"operator {operator.name!r} has the variables {names}, but its schema has {list(families)}"
    for variable in operator.variables:
        if variable.name in families and variable.schema != families[variable.name].to_json():
            yield f"variable {variable.name!r} of operator {operator.name!r} has another schema than the operator says"


# The metadata of a savepoint, ``_metadata.json``: the last file to be written, which finishes the savepoint.


class _Version(Struct, frozen=True):
    """The only part of the metadata that every release must understand."""

    format_version: int


def write_metadata(storage: CheckpointStorage, metadata: SavepointMetadata) -> FileRef:
    """Finish a savepoint whose files were written. ``storage`` is that of the savepoint.

    Raises ``SavepointError`` if files are missing or the metadata is not consistent, ``FileExistsInStorageError`` if
    there is a savepoint already.
    """
    check_metadata(metadata)
    sizes = dict(storage.list())
    absent = [file.path for file in metadata.files() if sizes.get(file.path) != file.size]
    if absent:
        raise SavepointError(
            f"{len(absent)} files of the savepoint at {storage.location} are missing or do not have the size they "
            f"were written with: {some_of(absent)}. Another process has written there or removed them; take another "
            "savepoint."
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
            f"{storage.location} is not a savepoint: it has no {METADATA_FILE}. Either it is not the directory of a "
            "savepoint (<base>/savepoint-<query>-<checkpoint>), or the savepoint was never finished, or was partly "
            "deleted; remove such a directory by hand."
        ) from error
    name = storage.full_location(METADATA_FILE)
    version = unseal(data, _Version, name).format_version
    if version != SAVEPOINT_FORMAT_VERSION:
        raise SavepointError(
            f"{name} has the format {version}; this release reads {SAVEPOINT_FORMAT_VERSION}. Use the newer release."
        )
    metadata = unseal(data, SavepointMetadata, name)
    check_metadata(metadata)
    return metadata


def some_of(names: Sequence[str]) -> str:
    """Return the first names of many, for a message."""
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


# The savepoints in storage: listed, described, verified and deleted by their metadata files.


def read_stored_savepoint(
    path: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    is_verified: bool = False,
    open_storage: OpenStorage = CheckpointStorage.open,
) -> SavepointInfo:
    """Return the description of a savepoint, from its metadata alone.

    ``is_verified``: also read all of its files and compare them with their recorded digests. Raises ``SavepointError``,
    or ``DamagedFileError`` naming every file that is missing or damaged.
    """
    storage = open_storage(path, storage_options or {})
    metadata = read_metadata(storage)
    if is_verified:
        with TemporaryDirectory(prefix="statestore-savepoint-") as scratch:
            check_files(storage, metadata.files(), Path(scratch), keep=False, threads=2)
    return SavepointInfo(storage.location, metadata)


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
    savepoints: list[SavepointInfo] = []
    for path, _ in storage.list():
        name, slash, file = path.partition("/")
        if not slash or file != METADATA_FILE:
            continue
        one = open_storage(f"{storage.location.rstrip('/')}/{name}", storage_options or {})
        try:
            savepoints.append(SavepointInfo(one.location, read_metadata(one)))
        except (DamagedFileError, SavepointError) as error:
            savepoints.append(SavepointInfo(one.location, None, str(error)))
    return sorted(savepoints, key=lambda info: (info.metadata.created_ms if info.metadata else -1, info.path))


def remove_stored_savepoint(
    path: str, storage_options: Mapping[str, str] | None = None, *, open_storage: OpenStorage = CheckpointStorage.open
) -> None:
    """Remove a savepoint: first its metadata file, so that a half-deleted one does not count, then its other files.

    Files that do not belong to the savepoint stay. Raises ``SavepointError`` for a path without a savepoint.
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


def check_files(
    storage: CheckpointStorage, files: Sequence[FileRef], scratch: Path, *, keep: bool, threads: int
) -> dict[str, Path]:
    """Return local copies of files, by path, after comparing each with its recorded digest.

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
        errors = list(pool.map(check, files))
    damage = [problem for problem in errors if isinstance(problem, str)]
    if damage:
        raise DamagedFileError(
            f"{len(damage)} of {len(files)} files of the savepoint at {storage.location} are missing or damaged:\n"
            + "\n".join(damage)
        )
    return {ref.path: path for ref, path in zip(files, errors, strict=True) if isinstance(path, Path)}


def _checked(storage: CheckpointStorage, ref: FileRef) -> Path:
    """Return the path of a file of a local storage after comparing it with its recorded digest."""
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
