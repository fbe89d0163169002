"""Restores a savepoint to a new checkpoint location. A query there continues exactly after the savepoint.

``new_checkpoint`` defines the write order of the checkpoint's files, and the reasons. Each partition is built by its
backend's own engine in a scratch directory, from the row groups that have some of its key groups. It is uploaded as the
snapshot that its first version begins with.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from backends import spans
from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.encoding.columns import to_spark_type
from backends.encoding.key_groups import check_partitions, partition_range
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema, evolved
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.engines.engine import backend_of
from backends.exceptions import DamagedFileError, IncompatibleSchemaError, InvalidStateStoreArgument
from backends.formats.manifest import OperatorEntry, PartitionEntry
from backends.storage.checkpoint_storage import CheckpointStorage, OpenStorage
from backends.storage.locations import FileRef
from coordinator_actor.exceptions import SavepointMismatchError
from coordinator_actor.messages import ExportedFile, OperatorSpec
from coordinator_actor.savepoints import savepoint_format
from coordinator_actor.savepoints.export import SPARK_DIRECTORY, file_schema
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint, build_partition

# Lists the differences between a savepoint and the program that is to continue it, naming both sides.


def differences(
    metadata: savepoint_format.SavepointMetadata,
    operators: Sequence[OperatorSpec | str],
    *,
    allow_non_restored_state: bool,
) -> list[str]:
    """Return the differences that keep the program from continuing, one line each.

    Names in ``operators`` select operators of the savepoint. Declarations are those of the whole program: unless
    ``allow_non_restored_state``, the program must declare every operator of the savepoint.
    """
    stored = {operator.name: operator for operator in metadata.operators}
    reasons: list[str] = []
    for wanted in operators:
        name = wanted if isinstance(wanted, str) else wanted.name
        operator = stored.get(name)
        if operator is None:
            reasons.append(
                f"operator {name!r} is not in the savepoint, which has {', '.join(map(repr, sorted(stored)))}"
            )
        elif isinstance(wanted, OperatorSpec):
            reasons += _operator_differences(operator, wanted)
    if any(isinstance(wanted, OperatorSpec) for wanted in operators) and not allow_non_restored_state:
        named = {wanted if isinstance(wanted, str) else wanted.name for wanted in operators}
        reasons += [
            f"operator {name!r} is in the savepoint, but not in the program (allow_non_restored_state=True drops it)"
            for name in sorted(stored.keys() - named)
        ]
    return reasons


def _operator_differences(operator: savepoint_format.SavepointOperator, spec: OperatorSpec) -> Iterator[str]:
    if operator.kind != spec.kind:
        yield f"operator {spec.name!r} is of the kind {operator.kind!r} in the savepoint, {spec.kind!r} in the program"
    stored, declared = operator.schema, OperatorSchema.from_json(spec.schema)
    try:
        evolved(stored, declared, spec.kind)
    except IncompatibleSchemaError as error:
        rows, here = stored.families.get(DEFAULT_FAMILY), declared.families.get(DEFAULT_FAMILY)
        lines: list[str] = []
        if rows is not None and here is not None:
            lines += (f"key {line}" for line in _column_differences(rows.key, here.key))
            lines += (f"state {line}" for line in _column_differences(rows.value, here.value))
        yield from (f"operator {spec.name!r}: {line}" for line in lines or [str(error)])


def _column_differences(stored: pa.Schema, declared: pa.Schema) -> Iterator[str]:
    stored_types = {field.name: _type(field) for field in stored}
    here = {field.name: _type(field) for field in declared}
    for name, kind in stored_types.items():
        if name not in here:
            yield f"column {name!r} ({kind}) is in the savepoint, but not in the program"
        elif here[name] != kind:
            yield f"column {name!r} is {kind} in the savepoint, {here[name]} in the program"
    for name, kind in here.items():
        if name not in stored_types:
            yield f"column {name!r} ({kind}) is in the program, but not in the savepoint"
    if stored_types == here and list(stored_types) != list(here):
        yield f"columns come as {', '.join(stored_types)} in the savepoint, as {', '.join(here)} in the program"


def _type(field: pa.Field) -> str:
    spark = to_spark_type(field.name, field.type)
    kind = spark if isinstance(spark, str) else json.dumps(spark, sort_keys=True)
    return kind if field.nullable else f"{kind} not null"


log = logging.getLogger(__name__)


class RestoredOperator(Struct, frozen=True):
    """One restored operator."""

    name: str
    num_partitions: int
    backend: str
    rows: int


class RestoredSavepoint(Struct, frozen=True):
    """The new checkpoint location that a savepoint was restored to.

    ``version`` is the version of its state; the query begins with the batch of this number. ``batch_id`` is the last
    committed batch in the new checkpoint; None if a new query starts with the state (``state_only``).
    """

    checkpoint_location: str
    query_id: str
    version: int
    batch_id: int | None
    operators: tuple[RestoredOperator, ...]


@dataclass(frozen=True)
class _Target:
    """The new form of one restored operator. ``conf.provider`` is the name of its backend in manifest and program."""

    operator: savepoint_format.SavepointOperator
    num_partitions: int
    conf: StateStoreConf


@spans.traced("savepoint.restore")
def restore_into_checkpoint(
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
    """Make the new ``checkpoint_location`` from the savepoint at ``path``. A query started there continues after it.

    ``num_partitions`` (for all operators, or by name) and ``backend`` are by default those that ``operators`` declare,
    else those of the savepoint. ``operators`` are names, which choose what is restored, or the program's declarations,
    which must agree with the savepoint; ``allow_non_restored_state`` then drops operators that the program does not
    have. With ``state_only`` the query is a new one that starts with batch 0 and with this state as its version 0. In
    both cases the query has a new id.

    ``state_location`` is the base directory of ``spark.statestore.location``, if the session has that. ``threads``
    partitions are built at once, in ``scratch`` (by default the system's temporary directory). ``scratch`` holds these
    partitions, and the files of a savepoint that is not on a local disk. ``progress`` is called for each step, from
    several threads. ``clock`` gives seconds since 1970.

    Raises, before anything is written: ``SavepointError`` (no savepoint, or a target that is in use),
    ``SavepointMismatchError`` with all differences, ``DamagedFileError`` naming every file that is missing or damaged,
    ``InvalidStateStoreArgument``. Raises ``StorageError`` during writes, after it has removed what it wrote.
    """
    options = dict(storage_options or {})
    savepoint = open_storage(path, options)
    metadata = savepoint_format.read_metadata(savepoint)
    targets = _targets(metadata, operators, num_partitions, backend, options, allow_non_restored_state)
    if threads < 1:
        raise InvalidStateStoreArgument(f"threads={threads} must be 1 or more.")
    new = NewCheckpoint.at(
        checkpoint_location,
        state_location,
        options,
        query_id=new_query_id(),
        key_groups=metadata.key_groups,
        version=0 if state_only else metadata.version,
        how="restored",
        open_storage=open_storage,
    )
    new.check_place(savepoint, "savepoint")
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="statestore-restore-", dir=scratch) as directory:
        needed = [f.ref for t in targets for v in t.operator.variables for f in v.files]
        needed += [] if state_only else metadata.spark_files
        say = progress or log.info
        say(f"checking {len(needed)} files of {savepoint.location}")
        local = savepoint_format.check_files(savepoint, needed, Path(directory), keep=True, threads=threads)
        with new.made(say):
            restore = _Restore(metadata, new, Path(directory), local, say)
            rows = restore.write_state(targets, threads, round(clock() * 1000))
            _write_spark(new.checkpoint, () if state_only else metadata.spark_files, local)
    log.info("Restored savepoint %s to %s as query %s", savepoint.location, new.checkpoint.location, new.query_id)
    return RestoredSavepoint(
        new.checkpoint.location,
        new.query_id,
        new.version,
        None if state_only else metadata.batch_id,
        tuple(
            RestoredOperator(t.operator.name, t.num_partitions, t.conf.provider, rows[t.operator.name]) for t in targets
        ),
    )


# -- checks before anything is written ---------------------------------------------------------


def _targets(
    metadata: savepoint_format.SavepointMetadata,
    operators: Sequence[OperatorSpec | str] | None,
    num_partitions: int | Mapping[str, int] | None,
    backend: str | None,
    options: Mapping[str, str],
    allow_non_restored_state: bool,
) -> list[_Target]:
    stored = {operator.name: operator for operator in metadata.operators}
    wanted = list(stored) if operators is None else list(operators)
    named = [one if isinstance(one, str) else one.name for one in wanted]
    if not named or len(set(named)) != len(named):
        raise InvalidStateStoreArgument(f"operators={named!r} must name one operator or more, each of them once.")
    reasons = differences(metadata, wanted, allow_non_restored_state=allow_non_restored_state)
    if isinstance(num_partitions, Mapping):
        reasons += [
            f"num_partitions names operator {name!r}, which is not restored" for name in num_partitions.keys() - named
        ]
    if reasons:
        raise SavepointMismatchError(
            f"The savepoint of query {metadata.query_name or metadata.query_id} (checkpoint {metadata.checkpoint_id}) "
            "does not fit the program:\n" + "\n".join(f"- {line}" for line in reasons)
        )
    targets = []
    for one in wanted:
        spec = one if isinstance(one, OperatorSpec) else None
        operator = stored[one if isinstance(one, str) else one.name]
        count = num_partitions.get(operator.name) if isinstance(num_partitions, Mapping) else num_partitions
        if count is None:
            count = spec.num_partitions if spec else operator.num_partitions
        n = check_partitions(operator.name, count, metadata.key_groups)
        conf = StateStoreConf(
            provider=backend or (spec.backend if spec else operator.backend), storage_options=dict(options)
        )
        backend_of(conf)  # raises before anything is written if the backend does not exist
        targets.append(_Target(operator, n, conf))
    return targets


# -- the state ---------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Restore:
    """Writes the state of one restored query."""

    _metadata: savepoint_format.SavepointMetadata
    _new: NewCheckpoint
    _scratch: Path
    _local: Mapping[str, Path]
    _say: Callable[[str], None]
    _failed: threading.Event = field(default_factory=threading.Event)

    def write_state(self, targets: Sequence[_Target], threads: int, now_ms: int) -> dict[str, int]:
        """Write everything below ``statestore/``, the manifest last. Return the number of rows per operator."""
        self._new.write_schemas(t.operator.schema for t in targets)
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
                    f"{rows[target.operator.name]} were found in its files: their key groups differ from those in the "
                    "metadata file."
                )
        written = {
            t.operator.name: OperatorEntry.of(
                t.num_partitions, t.operator.schema.id, t.conf.provider, entries[t.operator.name]
            )
            for t in targets
        }
        self._new.append(written, now_ms)
        return rows

    def _build(self, target: _Target, partition: int) -> tuple[PartitionEntry, int]:
        """Build one partition: a changelog without changes as its head, and a snapshot. Also return its row count."""
        name, n, conf = target.operator.name, target.num_partitions, target.conf
        first, end = partition_range(partition, n, self._metadata.key_groups)
        meta = self._new.changelog_meta(name, partition, n, f"{self._metadata.query_id}/{self._metadata.checkpoint_id}")
        variables = target.operator.variables
        pairs = ((v.name, batch) for v in variables for batch in self._pairs(v, first, end))
        with spans.step("savepoint.restore_partition", operator=name, partition=partition):
            entry, rows = build_partition(
                self._new.state,
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

    def _pairs(self, variable: savepoint_format.SavepointVariable, first: int, end: int) -> Iterator[SortedPairs]:
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
        columns = parquet.schema_arrow.names
        if columns != expected.names:
            raise DamagedFileError(f"{path} has the columns {columns}, but its schema says {expected.names}.")
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


def _write_spark(checkpoint: CheckpointStorage, files: Sequence[FileRef], local: Mapping[str, Path]) -> None:
    """Write Spark's own files, except ``metadata``."""
    order = ("sources", "offsets", "commits")
    paths = {ref.path.removeprefix(f"{SPARK_DIRECTORY}/"): local[ref.path] for ref in files}
    for target in sorted(paths, key=lambda p: (order.index(p.partition("/")[0]), p)):
        checkpoint.put_new(target, paths[target].read_bytes())
