"""Writes the files of a savepoint: the rows of one partition as Parquet, and copies of Spark's own files.

Exports run concurrently with the stream, in the processes that own the state. So an export takes one batch at a time,
reports after each batch how long it took and how much processor time it used, and lets the caller sleep.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from backends.encoding.columns import binary_content, gather_fixed
from backends.encoding.keys import KEY_GROUP_BYTES, decode_keys
from backends.encoding.schema import StateSchema, nullable_schema
from backends.encoding.sorted_pairs import as_binary, is_strictly_sorted
from backends.exceptions import DamagedFileError, FileExistsInStorageError, MissingFileError, StoreClosedError
from backends.spans import Pool
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest, file_digest
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import ExportedFile
from coordinator_actor.savepoints.savepoint_format import KEY_GROUP_COLUMN, METADATA_FILE, column_names, file_path

ROW_GROUP_ROWS = 100_000
ROW_GROUP_BYTES = 32 << 20
"""The bytes of keys and values in their stored form: a row group of long rows has fewer rows."""
SPARK_DIRECTORY = "spark"
_COPY_ATTEMPTS = 20
_COPY_THREADS = 8
log = logging.getLogger(__name__)


def export_partition(
    storage_of_savepoint: CheckpointStorage,
    operator: str,
    variable: str,
    schema: StateSchema,
    first_group: int,
    last_group: int,
    batches: Iterator[pa.RecordBatch],
    *,
    scratch: Path,
    throttle: Callable[[float, float], None] | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ExportedFile:
    """Write the pairs of key groups ``first_group`` to ``last_group``, both included, as one Parquet file.

    ``variable`` is the column family. ``batches`` have ``key`` and ``value`` (binary, encoded by
    ``backends.encoding.keys`` and ``backends.encoding.values``, by any schema of the history), ascending by key over
    all batches, as ``VersionReads.scan`` yields them. The file is made in ``scratch`` (any local directory) and then
    uploaded. ``throttle`` is called after each batch with the seconds that the batch took, and the seconds of processor
    time that this thread used for it; it may sleep.

    The same pairs give the same bytes, however they are divided into batches. So a file that an earlier attempt has
    uploaded is either the same, and stays, or was truncated when that attempt died, and is replaced.

    Raises ``SchemaMismatchError`` if the pairs are not of ``schema``, ``SavepointError`` if they are not in order or of
    other key groups, ``StoreClosedError`` if ``is_cancelled``, ``StorageError``.
    """
    path = file_path(operator, variable, first_group, last_group)
    scratch.mkdir(parents=True, exist_ok=True)
    local = scratch / f"{uuid.uuid4().hex}.parquet"
    started, computed = time.perf_counter(), time.thread_time()
    try:
        with _Writer(local, schema, first_group, last_group, storage_of_savepoint.full_location(path)) as writer:
            for batch in batches:
                if is_cancelled():
                    raise StoreClosedError(f"The export of {storage_of_savepoint.full_location(path)} was cancelled.")
                writer.write_pairs(batch)
                if throttle is not None:
                    throttle(time.perf_counter() - started, time.thread_time() - computed)
                started, computed = time.perf_counter(), time.thread_time()
        if is_cancelled():
            raise StoreClosedError(f"The export of {storage_of_savepoint.full_location(path)} was cancelled.")
        ref = _upload(storage_of_savepoint, path, local)
        return ExportedFile(ref.path, ref.size, ref.digest, writer.rows, first_group, last_group)
    finally:
        local.unlink(missing_ok=True)


def file_schema(schema: StateSchema) -> pa.Schema:
    """Return the Arrow schema of a file: key group, key columns, value columns.

    All but the first may be null, at every depth: Parquet would reject rows whose struct is null. The ``StateSchema``
    in the metadata says which columns may not be null.
    """
    keys, values = column_names(schema)
    fields = [pa.field(KEY_GROUP_COLUMN, pa.int32(), nullable=False)]
    for names, schema_of in ((keys, schema.key), (values, schema.value)):
        fields += [f.with_name(name) for name, f in zip(names, nullable_schema(schema_of), strict=True)]
    return pa.schema(fields)


class _Writer:
    """Turns pairs into rows, and cuts them into row groups only by the number and the bytes of the rows."""

    def __init__(self, local: Path, schema: StateSchema, first_group: int, last_group: int, name: str) -> None:
        self.rows = 0
        self._schema = file_schema(schema)
        self._name = name
        key, value, *history = (nullable_schema(part) for part in (schema.key, schema.value, *schema.history))
        self._stored = replace(schema, key=key, value=value, history=tuple(history))
        self._groups = first_group, last_group
        self._last_key: bytes | None = None
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0
        # Keys are unique and values mostly numbers: looking for repeated ones costs more than it saves.
        self._parquet = pq.ParquetWriter(
            local, self._schema, compression="zstd", compression_level=1, use_dictionary=[KEY_GROUP_COLUMN]
        )

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._flush()
        finally:
            self._parquet.close()

    def write_pairs(self, batch: pa.RecordBatch) -> None:
        """Take pairs, and write the row groups that are full."""
        keys, values = as_binary("keys", batch.column(0)), as_binary("values", batch.column(1))
        groups = self._checked_groups(keys)
        sizes = np.diff(binary_content(keys)[1]) + np.diff(binary_content(values)[1])
        ends = np.cumsum(sizes)
        columns = [
            pa.array(groups, pa.int32()),
            *decode_keys(keys, self._stored.key).columns,
            *self._stored.decode_values(values).columns,
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        at, num_bytes = 0, 0
        while at < len(keys):
            # The row that fills the bytes of the group is the last row in it.
            by_bytes = int(np.searchsorted(ends, num_bytes + ROW_GROUP_BYTES - self._pending_bytes)) + 1
            end = min(len(keys), at + ROW_GROUP_ROWS - self._pending_rows, by_bytes)
            self._pending.append(rows.slice(at, end - at))
            self._pending_rows += end - at
            self._pending_bytes += int(ends[end - 1]) - num_bytes
            at, num_bytes = end, int(ends[end - 1])
            if self._pending_rows == ROW_GROUP_ROWS or self._pending_bytes >= ROW_GROUP_BYTES:
                self._flush()
        self.rows += len(keys)

    def _checked_groups(self, keys: pa.BinaryArray) -> npt.NDArray[Any]:
        if keys.null_count or not len(keys):
            if not len(keys):
                return np.zeros(0, np.int32)
            raise SavepointError(f"{keys.null_count} of the keys for {self._name} are null.")
        if not is_strictly_sorted(keys) or (self._last_key is not None and keys[0].as_py() <= self._last_key):
            raise SavepointError(
                f"The keys for {self._name} do not ascend; they must come in the order of their bytes."
            )
        self._last_key = keys[len(keys) - 1].as_py()
        content, offsets = binary_content(keys)
        if (np.diff(offsets) < KEY_GROUP_BYTES).any():
            raise SavepointError(f"A key for {self._name} is shorter than its key group.")
        groups = gather_fixed(content, offsets[:-1], np.dtype(">u2")).astype(np.int32)
        first, last = self._groups
        if groups[0] < first or groups[-1] > last:
            raise SavepointError(
                f"Keys of the groups {groups[0]} to {groups[-1]} came for {self._name}, which is to have {first} to "
                f"{last}."
            )
        return groups

    def _flush(self) -> None:
        if self._pending_rows:
            # In one piece, so that not even the pages depend on the division into batches.
            table = pa.Table.from_batches(self._pending, self._schema).combine_chunks()
            self._parquet.write_table(table, row_group_size=self._pending_rows)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0


def _upload(storage: CheckpointStorage, path: str, local: Path) -> FileRef:
    try:
        return storage.put_file(path, local)
    except (FileExistsError, FileExistsInStorageError):
        own = FileRef(path, local.stat().st_size, file_digest(local))
        if _holds(storage, own, local.with_suffix(".held")):
            return own
        _check_unfinished(storage)
        log.warning("%s was left by an earlier attempt, differs, and is replaced", storage.full_location(path))
        storage.delete(path)
        return storage.put_file(path, local)


def _check_unfinished(storage: CheckpointStorage) -> None:
    """Raise ``SavepointError`` if the savepoint is finished: its files are not left by an earlier attempt.

    The query of a copied checkpoint has the id and the numbers of the original.
    """
    if storage.exists(METADATA_FILE):
        raise SavepointError(
            f"{storage.location} is a finished savepoint already, with other content. Another query with the same id "
            "has made it: its checkpoint is a copy of this query's, or the original. Make the savepoint again, which "
            "gives it another number, or choose another directory."
        )


def _holds(storage: CheckpointStorage, ref: FileRef, copy: Path) -> bool:
    """Return whether the storage has a file with exactly that content."""
    try:
        storage.read_to_file(ref, copy)
    except (MissingFileError, DamagedFileError):
        return False
    finally:
        copy.unlink(missing_ok=True)
    return True


Moved: TypeAlias = Callable[[str, bytes], tuple[str, bytes]]
"""Takes the path and the content of a file of Spark, and returns those of its copy."""


def copy_spark_files(
    spark_storage: CheckpointStorage,
    target_storage: CheckpointStorage,
    batch_id: int,
    below: str = SPARK_DIRECTORY,
    moved: Moved = lambda path, data: (path, data),
) -> list[FileRef]:
    """Copy Spark's files for continuing after batch ``batch_id`` to the directory ``below``. Return the copies.

    These are ``offsets`` and ``commits`` of that batch, ``offsets`` and, if it exists, ``commits`` of the batch before
    it, and all of ``sources``. Sources may be ahead of the batch: Spark reads from them only what follows its offsets.
    Spark appends to and compacts sources during the copy. Whenever a file vanishes, all are listed again. Hadoop's
    hidden checksums are not copied: they are optional, and Spark's storage makes its own.

    Raises ``SavepointError`` if the batch is not committed, or if the sources keep changing; ``StorageError``.
    """
    copied = []
    for path in spark_log_files(spark_storage, batch_id):
        try:
            copied.append(_copy(spark_storage, target_storage, path, below, moved))
        except MissingFileError as error:  # Spark has advanced since, and has removed the file
            if path in _needed_logs(batch_id):
                raise _no_logs(spark_storage, batch_id, [path]) from error
    return copied + _copy_sources(spark_storage, target_storage, below, moved)


@dataclass(frozen=True)
class SparkFiles:
    """Spark's files of a query after the committed batch ``batch_id``, for a new query that continues from there.

    Spark identifies sources by their places in ``offsets/`` and ``sources/``. ``places`` has the new place of each
    source. The places in ``ticks`` belong to new ``rate`` sources, which begin at ``begun_ms`` (since 1970). If Spark
    has planned the next batch, ``with_planned_batch`` copies its offsets too, and the new query runs that batch.
    """

    storage: CheckpointStorage
    batch_id: int
    places: tuple[int, ...] | None = None
    ticks: tuple[int, ...] = ()
    begun_ms: int = 0
    with_planned_batch: bool = False

    def check(self) -> None:
        """Raise ``SavepointError`` if no query can continue after the batch, or if its sources are not as expected."""
        spark_log_files(self.storage, self.batch_id)
        if self.places is not None:
            self._moved(f"offsets/{self.batch_id}", self.storage.get(f"offsets/{self.batch_id}"))

    def copy_to(self, target: CheckpointStorage) -> None:
        """Copy the files. Raises ``SavepointError`` and ``StorageError``."""
        copy_spark_files(self.storage, target, self.batch_id, below="", moved=self._moved)
        planned = f"offsets/{self.batch_id + 1}"
        if self.with_planned_batch and self.storage.exists(planned):
            _copy(self.storage, target, planned, "", self._moved)
        for place in self.ticks:
            target.put_new(f"sources/{place}/0", f"v1\n{self.begun_ms}".encode())

    def _moved(self, path: str, data: bytes) -> tuple[str, bytes]:
        """Return the path and the content of a file in the new checkpoint."""
        directory, _, rest = path.partition("/")
        if self.places is None or directory == "commits":
            return path, data
        if directory == "sources":
            place, _, name = rest.partition("/")
            return (f"sources/{self.places[int(place)]}/{name}", data) if place.isdigit() else (path, data)
        version, times, *lines = data.rstrip(b"\n").split(b"\n")
        if version != b"v1" or len(lines) != len(self.places):
            raise SavepointError(
                f"{self.storage.full_location(path)} has the version {version.decode()} and {len(lines)} offsets; the "
                f"version must be v1, with the offsets of the program's {len(self.places)} sources, in their order. "
                "Give the program the sources of the old query. If they have names, set "
                "spark.sql.streaming.queryEvolution.enableSourceEvolution=false and use sources without names."
            )
        offsets = dict(zip(self.places, lines, strict=True)) | dict.fromkeys(self.ticks, b"0")
        return path, b"\n".join([version, times, *(offsets[place] for place in sorted(offsets))])


def spark_log_files(storage: CheckpointStorage, batch_id: int) -> list[str]:
    """Return which of Spark's ``offsets`` and ``commits`` a query needs to continue after a batch.

    Raises ``SavepointError`` if the batch is not committed, or if Spark no longer keeps its offsets.
    """
    needed = _needed_logs(batch_id)
    absent = [path for path in needed if not storage.exists(path)]
    if absent:
        raise _no_logs(storage, batch_id, absent)
    # Spark does not need it to continue, and a user may have removed it.
    before = f"commits/{batch_id - 1}"
    return [*needed, before] if batch_id > 0 and storage.exists(before) else needed


def _needed_logs(batch_id: int) -> list[str]:
    return [f"offsets/{b}" for b in (batch_id - 1, batch_id) if b >= 0] + [f"commits/{batch_id}"]


def _no_logs(storage: CheckpointStorage, batch_id: int, absent: Sequence[str]) -> SavepointError:
    return SavepointError(
        f"No query can continue after batch {batch_id} of {storage.location}: {', '.join(absent)} does not exist "
        "there. The batch must be committed by Spark, and Spark must still keep its offsets."
    )


def _copy_sources(spark: CheckpointStorage, target: CheckpointStorage, below: str, moved: Moved) -> list[FileRef]:
    copied: dict[str, FileRef] = {}
    listed = _visible(spark)
    with Pool(_COPY_THREADS, thread_name_prefix="statestore-savepoint") as pool:
        for _ in range(_COPY_ATTEMPTS):
            new = [path for path in listed if path not in copied]
            copies = pool.map(lambda path: _copy_if_there(spark, target, path, below, moved), new)
            copied.update({path: copy for path, copy in zip(new, copies, strict=True) if copy is not None})
            now = _visible(spark)
            # A listing takes time. A file that was removed during it may have been replaced by a file that the listing
            # does not show.
            if all(path in copied for path in listed) and set(listed) <= set(now):
                return [copied[path] for path in listed]
            listed = now
    raise SavepointError(
        f"The files in {spark.full_location('sources')} changed {_COPY_ATTEMPTS} times while they were copied; "
        "take the savepoint again when there is less load."
    )


def _visible(storage: CheckpointStorage) -> list[str]:
    """Return the files of the sources, without those that Hadoop treats as hidden."""
    return [path for path, _ in storage.list("sources") if not path.rpartition("/")[2].startswith(".")]


def _copy_if_there(
    spark: CheckpointStorage, target: CheckpointStorage, path: str, below: str, moved: Moved
) -> FileRef | None:
    try:
        return _copy(spark, target, path, below, moved)
    except MissingFileError:
        return None


def _copy(spark: CheckpointStorage, storage: CheckpointStorage, path: str, below: str, moved: Moved) -> FileRef:
    path, data = moved(path, spark.get(path))
    target = f"{below}/{path}" if below else path
    try:
        return storage.put_new(target, data)
    except FileExistsInStorageError:
        # Left by an earlier attempt at the same savepoint.
        if storage.get(target) != data:
            _check_unfinished(storage)
            storage.delete(target)
            return storage.put_new(target, data)
        return FileRef(target, len(data), digest(data))
