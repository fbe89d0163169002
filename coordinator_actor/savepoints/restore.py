"""Restores a savepoint to a new checkpoint location, from which a query goes on exactly behind the savepoint.

Everything is checked before anything is written. Then these are written, in this order: ``query.json`` with the id of
the new query, the snapshots of all partitions, the manifest, Spark's ``sources``, ``offsets`` and ``commits``, and
Spark's ``metadata`` with that id. Before ``metadata`` exists, Spark gives the query an id of its own, and the
coordinator refuses the query because ``query.json`` names another id. So a restore that dies half-way never leaves a
checkpoint that starts with only a part of the state. (With a manifest but without ``offsets`` and ``commits`` the query
would be refused as well: Spark would begin with batch 0.)

Each partition is built by its backend's own engine in a scratch directory, from the row groups that have some of its
key groups. It is uploaded as the snapshot that its first version begins with.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from backends.conf import StateStoreConf
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import encode_keys
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.backend import backend_of
from backends.exceptions import DamagedFileError, FileExistsInStorageError, InvalidStateStoreArgument
from backends.formats.changelog import ChangelogMeta
from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry
from backends.formats.sealed import seal
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.file_ref import FileRef
from backends.tracing import spans
from coordinator_actor.checkpoints.checkpoint_id import CheckpointIDCounter
from coordinator_actor.durable.manifests import ManifestLog, QueryFile
from coordinator_actor.exceptions import SavepointError, SavepointMismatchError
from coordinator_actor.messages import ExportedFile, OperatorSpec
from coordinator_actor.savepoints.differences import differences
from coordinator_actor.savepoints.export import SPARK_DIRECTORY, file_schema
from coordinator_actor.savepoints.partition_builder import STORE, build_partition
from coordinator_actor.savepoints.savepoint_catalog import check_files, read_metadata
from coordinator_actor.savepoints.savepoint_format import SavepointMetadata, SavepointOperator, SavepointVariable

log = logging.getLogger(__name__)
_SPARKS_OWN = ("offsets", "commits", "sources", "state", "statestore")


class RestoredOperator(Struct, frozen=True):
    """One restored operator."""

    name: str
    num_partitions: int
    backend: str
    rows: int


class RestoredSavepoint(Struct, frozen=True):
    """The new checkpoint location that a savepoint was restored to.

    ``version`` is the version of its state; the query begins with the batch of this number. ``batch_id`` is the last
    batch that Spark takes as committed; None if a new query starts with the state (``state_only``).
    """

    checkpoint_location: str
    query_id: str
    version: int
    batch_id: int | None
    operators: tuple[RestoredOperator, ...]


@dataclass(frozen=True)
class _Target:
    """What one operator is restored as. ``conf.provider`` is the name of its backend in manifest and program."""

    operator: SavepointOperator
    num_partitions: int
    conf: StateStoreConf


@spans.traced("savepoint.restore")
def restore_savepoint(
    path: str,
    checkpoint_location: str,
    *,
    num_partitions: int | Mapping[str, int] | None = None,
    backend: str | None = None,
    operators: Sequence[OperatorSpec | str] | None = None,
    state_only: bool = False,
    allow_non_restored_state: bool = False,
    storage_options: Mapping[str, str] | None = None,
    state_location: str | None = None,
    threads: int = 2,
    scratch: Path | None = None,
    progress: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.time,
    new_query_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    open_storage: OpenStorage = CheckpointStorage.open,
) -> RestoredSavepoint:
    """Make the new ``checkpoint_location`` from the savepoint at ``path``. A query started there goes on behind it.

    ``num_partitions`` (for all operators, or by name) and ``backend`` are by default those that ``operators`` declare,
    else those of the savepoint. ``operators`` are names, which choose what is restored, or the program's declarations,
    which must agree with the savepoint; ``allow_non_restored_state`` then drops operators that the program does not
    have. With ``state_only`` the query is a new one that starts with batch 0 and with this state as its version 0. In
    both cases the query has a new id.

    ``state_location`` is the base directory of ``spark.statestore.location``, if the session has that. ``threads``
    partitions are built at once, in ``scratch`` (by default the system's temporary directory). ``scratch`` holds these
    partitions, and the files of a savepoint that is not on a local disk. ``progress`` is told of each step, from
    several threads. ``clock`` gives seconds since 1970.

    Raises, before anything is written: ``SavepointError`` (no savepoint, or a target that is in use),
    ``SavepointMismatchError`` with all differences, ``DamagedFileError`` naming every file that is missing or damaged,
    ``InvalidStateStoreArgument``. Raises later ``StorageError``; the directory is then to be removed.
    """
    options = dict(storage_options or {})
    savepoint = open_storage(path, options)
    checkpoint = open_storage(checkpoint_location, options)
    metadata = read_metadata(savepoint)
    targets = _targets(metadata, operators, num_partitions, backend, options, allow_non_restored_state)
    if threads < 1:
        raise InvalidStateStoreArgument(f"threads={threads} must be 1 or more.")
    query_id = new_query_id()
    base = state_location or None
    state = open_storage(
        f"{checkpoint.location.rstrip('/')}/statestore" if base is None else f"{base.rstrip('/')}/{query_id}", options
    )
    _check_place(savepoint, checkpoint, state)
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="statestore-restore-", dir=scratch) as directory:
        needed = [f.ref for t in targets for v in t.operator.variables for f in v.files]
        needed += [] if state_only else metadata.spark_files
        say = progress or log.info
        say(f"checking {len(needed)} files of {savepoint.location}")
        local = check_files(savepoint, needed, Path(directory), keep=True, threads=threads)
        restore = _Restore(
            metadata, state, query_id, 0 if state_only else metadata.version, Path(directory), local, say
        )
        rows = restore.write_state(targets, threads, round(clock() * 1000))
        _write_spark(checkpoint, query_id, () if state_only else metadata.spark_files, local)
    log.info("Restored savepoint %s to %s as query %s", savepoint.location, checkpoint.location, query_id)
    return RestoredSavepoint(
        checkpoint.location,
        query_id,
        restore.version,
        None if state_only else metadata.batch_id,
        tuple(
            RestoredOperator(t.operator.name, t.num_partitions, t.conf.provider, rows[t.operator.name]) for t in targets
        ),
    )


# -- checks before anything is written ---------------------------------------------------------


def _targets(
    metadata: SavepointMetadata,
    operators: Sequence[OperatorSpec | str] | None,
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    options: Mapping[str, str],
    allow_non_restored_state: bool,
) -> list[_Target]:
    held = {operator.name: operator for operator in metadata.operators}
    wanted = list(held) if operators is None else list(operators)
    named = [one if isinstance(one, str) else one.name for one in wanted]
    if not named or len(set(named)) != len(named):
        raise InvalidStateStoreArgument(f"operators={named!r} must name one operator or more, each of them once.")
    found = differences(metadata, wanted, allow_non_restored_state=allow_non_restored_state)
    if isinstance(num_partitions, Mapping):
        found += [
            f"num_partitions names operator {name!r}, which is not restored" for name in num_partitions.keys() - named
        ]
    if found:
        raise SavepointMismatchError(
            f"The savepoint of query {metadata.query_name or metadata.query_id} (checkpoint {metadata.checkpoint_id}) "
            "does not "
            "fit the program:\n" + "\n".join(f"- {line}" for line in found)
        )
    targets = []
    for one in wanted:
        spec = one if isinstance(one, OperatorSpec) else None
        operator = held[one if isinstance(one, str) else one.name]
        given = num_partitions.get(operator.name) if isinstance(num_partitions, Mapping) else num_partitions
        n = given if given is not None else spec.num_partitions if spec else operator.num_partitions
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= metadata.key_groups:
            raise InvalidStateStoreArgument(
                f"num_partitions={n!r} for operator {operator.name!r} must be an int from 1 to {metadata.key_groups}, "
                "the number "
                "of key groups, which is fixed for the life of the state."
            )
        conf = StateStoreConf(
            provider=backend or (spec.backend if spec else operator.backend), storage_options=dict(options)
        )
        backend_of(conf)  # raises before anything is written if there is no such backend
        targets.append(_Target(operator, n, conf))
    return targets


def _check_place(savepoint: CheckpointStorage, checkpoint: CheckpointStorage, state: CheckpointStorage) -> None:
    """Raise ``SavepointError`` unless the target is new, and outside of the savepoint."""
    source, target = _canonical(savepoint), _canonical(checkpoint)
    if target == source or target.startswith(f"{source}/"):
        raise SavepointError(
            f"{checkpoint.location} lies in the savepoint {savepoint.location}: restore to a directory outside of it."
        )
    held = [name for name in _SPARKS_OWN if checkpoint.list(name)]
    held += [name for name in ("metadata", ".metadata.crc") if checkpoint.exists(name)]
    if held or state.list():
        raise SavepointError(
            f"A savepoint is restored to a new checkpoint location, but in {checkpoint.location} there is "
            f"{', '.join(held) or state.location} already. Choose another, or remove it if it was left by a restore "
            "that failed."
        )


def _canonical(storage: CheckpointStorage) -> str:
    return os.path.realpath(storage.location) if storage.is_local else storage.location


# -- the state ---------------------------------------------------------------------------------


class _Restore:
    """Writes the state of one restored query at ``version``."""

    def __init__(
        self,
        metadata: SavepointMetadata,
        state: CheckpointStorage,
        query_id: str,
        version: int,
        scratch: Path,
        local: Mapping[str, Path],
        say: Callable[[str], None],
    ) -> None:
        self.version = version
        self._metadata = metadata
        self._state = state
        self._query_id = query_id
        self._run_id = f"restored-{query_id}"
        self._scratch = scratch
        self._local = local
        self._say = say
        self._failed = threading.Event()

    def write_state(self, targets: Sequence[_Target], threads: int, now_ms: int) -> dict[str, int]:
        """Write everything below ``statestore/``, the manifest last. Return the number of rows per operator."""
        try:
            self._state.put_new("query.json", seal(QueryFile(self._query_id, self._metadata.key_groups)))
        except FileExistsInStorageError as error:
            raise SavepointError(f"Somebody else is restoring a savepoint to {self._state.location} now.") from error
        logs = ManifestLog(self._state, "restore")
        for schema in (t.operator.schema for t in targets):
            logs.ensure_schema(schema.id, schema.to_json())
        entries: dict[str, dict[int, PartitionEntry]] = {t.operator.name: {} for t in targets}
        rows = dict.fromkeys(entries, 0)
        with spans.Pool(threads, thread_name_prefix="statestore-restore") as pool:
            building = {
                (t.operator.name, p): pool.submit(self._build, t, p) for t in targets for p in range(t.num_partitions)
            }
            try:
                for (name, partition), future in building.items():
                    entries[name][partition], number = future.result()
                    rows[name] += number
            finally:
                self._failed.set()
                for future in building.values():
                    future.cancel()
        for target in targets:
            exported = sum(variable.rows for variable in target.operator.variables)
            if rows[target.operator.name] != exported:
                raise DamagedFileError(
                    f"Operator {target.operator.name!r} has {exported} rows in the savepoint, but "
                    f"{rows[target.operator.name]} "
                    "were found in its files: their key groups are not those that the metadata file says."
                )
        self._write_manifest(logs, targets, entries, now_ms)
        return rows

    def _write_manifest(
        self,
        logs: ManifestLog,
        targets: Sequence[_Target],
        entries: Mapping[str, Mapping[int, PartitionEntry]],
        now_ms: int,
    ) -> None:
        logs.claim(self._run_id)
        made = {
            t.operator.name: OperatorEntry.of(
                t.num_partitions, t.operator.schema.id, t.conf.provider, entries[t.operator.name]
            )
            for t in targets
        }
        logs.append(
            Manifest(
                id=0,
                parent=None,
                version=self.version,
                epoch=logs.epoch,
                run_id=self._run_id,
                created_ms=now_ms,
                operators=made,
                oldest=self.version,
                chain_from=self.version,
            ),
            CheckpointIDCounter(),
        )

    def _build(self, target: _Target, partition: int) -> tuple[PartitionEntry, int]:
        """Build one partition: a changelog without changes as its head, and a snapshot. Also return its row count."""
        name, n, conf = target.operator.name, target.num_partitions, target.conf
        first, end = partition_range(partition, n, self._metadata.key_groups)
        attempt = f"savepoint-{self._metadata.checkpoint_id}"
        # Its base is no version here: nobody may take the changelog for the first changes to the empty version 0.
        base = f"savepoint/{self._metadata.query_id}/{self._metadata.checkpoint_id}"
        meta = ChangelogMeta(self._run_id, name, partition, n, self.version, attempt, base, STORE)
        variables = target.operator.variables
        pairs = ((v.name, batch) for v in variables for batch in self._pairs(v, first, end))
        with spans.step("savepoint.restore_partition", operator=name, partition=partition):
            entry, rows = build_partition(
                self._state,
                meta,
                [v.name for v in variables],
                pairs,
                conf,
                is_distinct=True,
                scratch=self._scratch,
                is_cancelled=self._failed.is_set,
            )
        self._say(f"restored partition {partition} of {n} of operator {name!r}: {rows} rows")
        return entry, rows

    def _pairs(self, variable: SavepointVariable, first: int, end: int) -> Iterator[SortedPairs]:
        """Yield the stored pairs of key groups ``first`` (included) to ``end`` (not included), a row group at a time.

        They come in the order of keys.
        """
        schema = StateSchema.from_json(variable.schema)
        for file in variable.files:
            if file.first_group < end and first <= file.last_group:
                yield from _read(self._local[file.path], file, schema, first, end)


def _read(path: Path, file: ExportedFile, schema: StateSchema, first: int, end: int) -> Iterator[SortedPairs]:
    expected = file_schema(schema)
    with pq.ParquetFile(path) as parquet:
        found = parquet.schema_arrow
        if found.names != expected.names:
            raise DamagedFileError(f"{path} has the columns {found.names}, but its schema says {expected.names}.")
        for i in range(parquet.num_row_groups):
            groups = parquet.metadata.row_group(i).column(0).statistics
            if groups is not None and groups.has_min_max and (groups.max < first or groups.min >= end):
                continue
            for batch in parquet.read_row_group(i, use_threads=False).to_batches():
                pairs = _encode(batch, schema, first, end)
                if len(pairs):
                    yield pairs


def _encode(batch: pa.RecordBatch, schema: StateSchema, first: int, end: int) -> SortedPairs:
    """Return the rows of key groups ``first`` (included) to ``end`` (not included), as they are stored."""
    groups = np.asarray(batch.column(0))
    begin, stop = np.searchsorted(groups, [first, end]).tolist()
    part = batch.slice(begin, stop - begin)
    behind = 1 + len(schema.key)
    keys = _columns(part.columns[1:behind], schema.key.names, len(part))
    values = _columns(part.columns[behind:], schema.value.names, len(part))
    return SortedPairs.of(encode_keys(keys, groups[begin:stop]), schema.encode_values(values))


def _columns(columns: list[pa.Array], names: list[str], n: int) -> pa.RecordBatch:
    if columns:
        return pa.RecordBatch.from_arrays(columns, names=names)
    # Rows without columns count as rows, too.
    return pa.RecordBatch.from_struct_array(pa.array([{}] * n, pa.struct([])))


# -- Spark -------------------------------------------------------------------------------------


def _write_spark(
    checkpoint: CheckpointStorage, query_id: str, files: Sequence[FileRef], local: Mapping[str, Path]
) -> None:
    """Write Spark's own files, ``metadata`` last: only with that file the directory is a checkpoint."""
    order = ("sources", "offsets", "commits")
    paths = {ref.path.removeprefix(f"{SPARK_DIRECTORY}/"): local[ref.path] for ref in files}
    for target in sorted(paths, key=lambda p: (order.index(p.partition("/")[0]), p)):
        checkpoint.put_new(target, paths[target].read_bytes())
    checkpoint.put_new("metadata", json.dumps({"id": query_id}, separators=(",", ":")).encode())
