"""Puts stateful operators into a DataFrame's plan: ``mapInArrow``, routing by key, initial state, and ticks.

Here, Spark never gets the name of a user's column, because it would parse the name. It reads a dot as a field of a
struct, and by default it refuses a name if the DataFrame has another one that differs only in case.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backends.conf import DEFAULT_FAMILY, StateStoreConf, check_name
from backends.decoders import msgpack_decoder
from backends.encoding.key_groups import DEFAULT_KEY_GROUPS, MAX_KEY_GROUPS, partition_range
from backends.encoding.keys import KeyRange
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import InvalidStateStoreArgument, StateStoreError
from backends.formats.changelog import ChangelogMeta
from backends.formats.manifest import PartitionEntry
from coordinator_actor.messages import BatchTimes, OperatorFigures, OperatorSpec, QueryRegistration
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.exceptions import InvalidOperatorError, PartitionMismatchError, other_key_groups
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.state_task import Logic, StateTask, end_rows, partitions_of
from spark_bridge.task.task_store import Spool
from spark_bridge.transport import protocol

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql import types as T

    from spark_bridge.operators.join_sides import JoinSide

# Sending each row to the state partition that owns the key group of the row's key.
#
# Every partition owns one contiguous range of key groups (Flink's key groups on Spark's shuffle). Spark offers only
# ``repartition(n, expression)``, which places a row at ``pmod(murmur3(expression), n)``. So the expression returns, for
# each partition, an integer whose hash leads to it.


SPARK_SEED = 42


def target_column(columns: list[str], num_partitions: int, key_groups: int) -> Column:
    """Return the expression for ``repartition`` that sends keys of key group g to partition ``g * n // G``.

    ``columns`` are those of the key in stored order, by names that SQL takes without quotes.
    """
    # SQL's div, which Column does not offer, divides integers without a detour over doubles.
    hashed = f"xxhash64({', '.join(columns)})"
    partition = F.expr(f"cast(pmod({hashed}, {key_groups}L) * {num_partitions} div {key_groups} as int)")
    targets = F.array(*[F.lit(t) for t in partition_targets(num_partitions)])
    return F.element_at(targets, partition + F.lit(1))


@lru_cache(maxsize=64)
def partition_targets(num_partitions: int) -> tuple[int, ...]:
    """Return for each partition p the smallest int that Spark's ``repartition(num_partitions, ...)`` sends there."""
    start, size = 0, max(1024, num_partitions * 8)
    targets: dict[int, int] = {}
    while len(targets) < num_partitions:
        candidates = np.arange(start, start + size, dtype=np.int32)
        places = np.mod(murmur3_int(candidates).astype(np.int64), num_partitions)
        places_in_use, first = np.unique(places, return_index=True)
        for place, index in zip(places_in_use.tolist(), first.tolist(), strict=True):
            targets.setdefault(place, int(candidates[index]))
        start += size
    return tuple(targets[p] for p in range(num_partitions))


def murmur3_int(values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return Spark's ``hash(int)``: Murmur3_x86_32 of the four little-endian bytes of each value."""
    with np.errstate(over="ignore"):
        k = values.astype(np.uint32) * np.uint32(0xCC9E2D51)
        k = (k << np.uint32(15)) | (k >> np.uint32(17))
        k = k * np.uint32(0x1B873593)
        h = np.uint32(SPARK_SEED) ^ k
        h = (h << np.uint32(13)) | (h >> np.uint32(19))
        h = h * np.uint32(5) + np.uint32(0xE6546B64)
        h = h ^ np.uint32(4)
        h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        h = h ^ (h >> np.uint32(16))
    result: NDArray[np.int32] = h.view(np.int32)
    return result


RunOnBatches: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""The work on the rows of one partition: Arrow batches in, Arrow batches out."""


@dataclass(frozen=True)
class KeyRouting:
    """Sends each row to the partition that owns the key group of the row's key; ``keys`` are in stored order.

    The rows carry neither key group nor partition: a task computes both from the keys, once for each key.
    """

    keys: Sequence[str]
    num_partitions: int
    key_groups: int


def map_in_arrow(
    df: DataFrame, run: RunOnBatches, name: str, schema: T.StructType | str, routing: KeyRouting | None = None
) -> DataFrame:
    """Return the rows that ``run`` makes of each partition; Spark's plan shows the function as ``name``.

    ``run`` gets the columns with their own names. With ``routing``, rows go to the partitions of their keys first.
    """
    names, positions = df.columns, _positions(df)
    by_position = df.toDF(*positions)
    if routing is not None:
        columns = [positions[names.index(key)] for key in routing.keys]
        # The shuffle comes last: Spark 4.2 skips tasks of an operator that a projection separates from it.
        by_position = by_position.repartition(
            routing.num_partitions, target_column(columns, routing.num_partitions, routing.key_groups)
        )

    def run_with_names(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return run(batch.rename_columns(names) for batch in batches)

    run_with_names.__name__ = run_with_names.__qualname__ = name
    return by_position.mapInArrow(run_with_names, schema)


def columns_by_name(df: DataFrame) -> tuple[DataFrame, dict[str, Column]]:
    """Return the DataFrame with other names, and its columns by the names that they had.

    The columns are bare references: Spark keeps the watermark of a window over one, and drops it over an alias.
    """
    positions = _positions(df)
    return df.toDF(*positions), {name: F.col(at) for name, at in zip(df.columns, positions, strict=True)}


def _positions(df: DataFrame) -> list[str]:
    return [f"column{i}" for i in range(len(df.columns))]


# The initial state of an operator: version 0 of the state, made by a batch job before the first micro-batch.
#
# Spark hands an initial state to the tasks of the first batch. Here it is in the store before the first batch, as if
# it had been restored from a savepoint, so that the first batch can be repeated like any other.


_RESULT = "partition int, entry binary"
_RESULT_SCHEMA = pa.schema([("partition", pa.int32()), ("entry", pa.binary())])
InitialEntries: TypeAlias = dict[str, dict[int, PartitionEntry]]
"""The manifest's entries of version 0, by operator and partition."""


@dataclass(frozen=True)
class InitialState:
    """The rows of a batch DataFrame, and the logic that makes state of them. ``routing`` is the operator's own."""

    rows: DataFrame
    routing: KeyRouting
    logic: Logic


class InitialStateAccess:
    """The ``StateAccess`` of a partition without state; ``commit`` writes version 0 of the partition."""

    def __init__(
        self,
        registration: QueryRegistration,
        spec: OperatorSpec,
        partition: int,
        attempt: str,
        times: BatchTimes,
        conf: StateStoreConf,
    ) -> None:
        self.batch_id = 0
        self.times = times
        self.schema = OperatorSchema.from_json(spec.schema)
        self.key_groups = partition_range(partition, spec.num_partitions, registration.key_groups)
        self.num_key_groups = registration.key_groups
        self.entry: PartitionEntry | None = None
        self._registration = registration
        self._conf = replace(conf, provider=spec.backend)
        # No version has this base, so that no reader can take version 0 for changes to the empty state.
        base = f"initial/{registration.query_id}"
        run_id = f"initial-{registration.run_id}"
        from coordinator_actor.savepoints.new_checkpoint import STORE

        self._meta = ChangelogMeta(run_id, spec.name, partition, spec.num_partitions, 0, attempt, base, STORE)
        self._staged = Spool(protocol.COMMIT_SCHEMA, compression=None)

    def get_many(self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        return pa.nulls(len(keys), pa.binary())

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        return iter(())

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        self._staged.add(pa.RecordBatch.from_arrays([keys, values], schema=protocol.COMMIT_SCHEMA), column_family)

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        """Write the state durably; it counts from the moment that the manifest of version 0 names it."""
        # Tasks of all operators import this file, and only those of an initial state write to storage.
        from backends.storage.checkpoint_storage import CheckpointStorage
        from coordinator_actor.savepoints.new_checkpoint import build_partition

        location, options = self._registration.state_location, self._registration.storage_options
        storage = CheckpointStorage.open(location, options, fsync=self._conf.fsync)
        pairs = ((family, SortedPairs.last_wins(b.column(0), b.column(1))) for family, b in self._staged.labelled())
        families = {DEFAULT_FAMILY, *self.schema.families}
        self.entry, _ = build_partition(storage, self._meta, sorted(families), pairs, self._conf)

    def close(self) -> None:
        self._staged.close()


@dataclass(frozen=True)
class InitialStateTask:
    """The function of the batch job's tasks: one partition's rows in, the partition's entry for the manifest out."""

    registration: QueryRegistration
    spec: OperatorSpec
    keys: Sequence[str]
    logic: Logic
    times: BatchTimes
    conf: StateStoreConf

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Make the state of one partition, and yield its entry, unless it gets no rows."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        attempt = f"{context.taskAttemptId()}-{uuid.uuid4().hex[:8]}"
        store = InitialStateAccess(self.registration, self.spec, partition, attempt, self.times, self.conf)
        try:
            for _ in self.logic.process(self._checked(batches, partition), store, StepTimer()):
                pass
        finally:
            store.close()
        if store.entry is not None:
            entry = msgspec.msgpack.encode(store.entry)
            yield pa.record_batch([pa.array([partition], pa.int32()), pa.array([entry])], schema=_RESULT_SCHEMA)

    def _checked(self, batches: Iterator[pa.RecordBatch], partition: int) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            ends, num_key_groups = end_rows(batch), self.registration.key_groups
            if set(partitions_of(ends, self.keys, num_key_groups, self.spec.num_partitions)) != {partition}:
                raise PartitionMismatchError(
                    f"The initial state of operator {self.spec.name!r} came to task {partition} with rows of another "
                    "partition."
                )
            yield batch


def make_initial_states(
    registration: QueryRegistration, states: Mapping[str, InitialState], timestamp_ms: int, conf: StateStoreConf
) -> InitialEntries:
    """Run a batch job for each operator with an initial state; return the entries for the manifest of version 0.

    ``timestamp_ms`` (since 1970) is the processing time that processors see. A partition without rows has no entry.
    Raises ``PartitionMismatchError`` if the initial state was declared with another number of key groups.
    """
    entries: InitialEntries = {}
    for spec in registration.operators:
        if spec.name in states:
            initial = states[spec.name]
            routing = initial.routing
            if routing.key_groups != registration.key_groups:
                raise other_key_groups(spec.name, routing.key_groups, registration.key_groups)
            times = BatchTimes(timestamp_ms=timestamp_ms)
            task = InitialStateTask(registration, spec, routing.keys, initial.logic, times, conf)
            results = map_in_arrow(initial.rows, task.run, "statestore_initial_state", _RESULT, routing).collect()
            entries[spec.name] = {
                row["partition"]: msgpack_decoder(PartitionEntry).decode(bytes(row["entry"])) for row in results
            }
    return entries


# The stateful operators that this driver has declared, and finding them in a query's plan.
#
# Spark's plan shows the name of the function after every ``mapInArrow``. Each operator's function has a unique name,
# which the listener uses to find the declaration.


FUNCTION_PREFIX = "statestore_"


class Lag(Protocol):
    """Measures how old the state of a mirror may be. The listener starts it with the query, and closes it."""

    def start(self) -> None:
        """Begin to look."""

    def seconds(self) -> float | None:
        """Return how many seconds old the state may be, without I/O; None if that is not known yet."""

    def close(self) -> None:
        """Stop looking."""


@dataclass(frozen=True)
class DeclaredOperator:
    """An operator that this driver has declared.

    ``initial`` is its initial state, ``aggregator`` the functions of an aggregate, ``sides`` those of a join, ``lag``
    that of a mirror.
    """

    spec: OperatorSpec
    initial: InitialState | None = None
    aggregator: Aggregator | None = None
    sides: tuple[JoinSide, ...] = ()
    lag: Lag | None = None


_declared: dict[str, DeclaredOperator] = {}
_lock = threading.Lock()
"""Guards ``_declared``."""


def declare(operator: DeclaredOperator) -> str:
    """Remember an operator, and return the function name under which the plan will show it."""
    name = f"{FUNCTION_PREFIX}{uuid.uuid4().hex}"
    with _lock:
        _declared[name] = operator
    return name


def stateful_operator(
    df: DataFrame,
    operator: DeclaredOperator,
    routing: KeyRouting,
    logic: Logic,
    output: T.StructType,
    watermark_lag_ms: int,
) -> DataFrame:
    """Declare an operator, and return the output of its tasks; for ``watermark_lag_ms`` see ``StateTask``."""
    spec, keys = operator.spec, tuple(routing.keys)
    task = StateTask(spec.name, spec.num_partitions, routing.key_groups, keys, logic, spec.uses_time, watermark_lag_ms)
    return map_in_arrow(df, task.run, declare(operator), output, routing)


def operators_in_plan(plan: Any) -> list[DeclaredOperator]:
    """Return the operators of a JVM logical plan, in no particular order, one entry per occurrence."""
    operators = []
    for node in nodes(plan):
        if node.nodeName() in ("MapInArrow", "PythonMapInArrow"):
            name = node.functionExpr().name() if hasattr(node.functionExpr(), "name") else ""
            if name.startswith(FUNCTION_PREFIX):
                with _lock:
                    operators.append(_declared[name])
    return operators


def nodes(plan: Any) -> Iterator[Any]:
    """Yield all nodes of a JVM logical plan, the root first."""
    yield plan
    children = plan.children().iterator()
    while children.hasNext():
        yield from nodes(children.next())


def declared_in(df: DataFrame) -> list[DeclaredOperator]:
    """Return the declarations of the operators that are in a DataFrame's plan."""
    return operators_in_plan(df._jdf.queryExecution().analyzed())


CONNECT_REMEDY = (
    "This is a session of Spark Connect, whose client reaches neither a query's plan nor the events of its batches. "
    "Run the program where Spark's driver runs, for instance with spark-submit, and with a session that "
    "SparkSession.builder.getOrCreate() makes without remote() and without SPARK_REMOTE in the environment. To read "
    "state, no Spark is needed: use QueryableStateClient.connect()."
)


def is_connect(spark_object: object) -> bool:
    """Return whether a Spark session or DataFrame is of Spark Connect."""
    return type(spark_object).__module__.startswith("pyspark.sql.connect.")


def check_operator_name(name: str, df: DataFrame) -> None:
    """Raise ``InvalidOperatorError`` for a name that a directory cannot have, or that is in the DataFrame's plan.

    Raises the same for a DataFrame of Spark Connect, whose plan is out of reach.
    """
    if is_connect(df):
        raise InvalidOperatorError(CONNECT_REMEDY)
    try:
        check_name("an operator", name)
    except InvalidStateStoreArgument as error:
        raise InvalidOperatorError(f"operator={error} It names the state in the checkpoint and in queries.") from error
    if any(o.spec.name == name for o in declared_in(df)):
        raise InvalidOperatorError(
            f"operator={name!r} is used twice in one query; give each stateful operator a different name."
        )


@contextmanager
def refusing(operator: str) -> Iterator[None]:
    """Make an ``InvalidOperatorError`` that names the operator of a ``StateStoreError``."""
    try:
        yield
    except StateStoreError as error:
        raise InvalidOperatorError(f"Operator {operator!r}: {error}") from error


# The settings of a Spark session that stateful operators read: key groups, state partitions, the size of frames.


KEY_GROUPS_CONF = "spark.statestore.keyGroups"
"""The number of key groups of a new query, 1 to 65536; a query cannot continue with another number."""
SHUFFLE_PARTITIONS_CONF = "spark.sql.shuffle.partitions"
FRAME_ROWS_CONF = "spark.sql.execution.arrow.maxRecordsPerBatch"
FRAME_BYTES_CONF = "spark.sql.execution.arrow.maxBytesPerBatch"
"""Since Spark 4.0."""
NO_LIMIT = (1 << 31) - 1
"""Stands for no limit of the rows or bytes of a frame, as in Spark."""
MAX_CONFIGURED_FRAME_BYTES = NO_LIMIT - 1
"""The highest value that Spark takes for ``FRAME_BYTES_CONF``."""


def configured_key_groups(spark: SparkSession) -> int:
    """Return the session's setting of the number of key groups, unchecked."""
    return int(spark.conf.get(KEY_GROUPS_CONF, str(DEFAULT_KEY_GROUPS)) or DEFAULT_KEY_GROUPS)


def state_layout(operator: str, num_partitions: int | None, *frames: DataFrame) -> tuple[int, int]:
    """Return the numbers of partitions and key groups of an operator over these DataFrames.

    Raises ``InvalidOperatorError`` for a wrong name or number.
    """
    for df in frames:
        check_operator_name(operator, df)
    key_groups = key_group_count(frames[0])
    return partition_count(frames[0], num_partitions, key_groups), key_groups


def key_group_count(df: DataFrame) -> int:
    """Return the number of key groups that the DataFrame's session asks for; raises ``InvalidOperatorError``."""
    key_groups = configured_key_groups(df.sparkSession)
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise InvalidOperatorError(f"{KEY_GROUPS_CONF}={key_groups} is out of range; it must be 1 to {MAX_KEY_GROUPS}.")
    return key_groups


def partition_count(df: DataFrame, num_partitions: int | None, key_groups: int) -> int:
    """Return the number of state partitions: ``num_partitions``, or that of the session's shuffles.

    Raises ``InvalidOperatorError``.
    """
    n = num_partitions
    if n is None:
        n = int(df.sparkSession.conf.get(SHUFFLE_PARTITIONS_CONF, "200") or 200)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidOperatorError(f"num_partitions={num_partitions!r} must be a positive integer.")
    if n > key_groups:
        raise InvalidOperatorError(
            f"num_partitions={n} is greater than the number of key groups, {key_groups}; lower it, or start a new "
            f"checkpoint with a greater {KEY_GROUPS_CONF}."
        )
    return n


def frame_limits(spark: SparkSession) -> tuple[int, int]:
    """Return the most rows and the most bytes of a DataFrame for a processor, as the session sets them for Arrow.

    Zero or less means no limit, as in Spark. Bytes may have a unit, such as ``64MB``.
    """
    rows = int(spark.conf.get(FRAME_ROWS_CONF, "10000") or 10_000)
    # Spark also validates the default, if it knows the setting: so the value for "no limit" must be valid.
    text = spark.conf.get(FRAME_BYTES_CONF, str(MAX_CONFIGURED_FRAME_BYTES)) or MAX_CONFIGURED_FRAME_BYTES
    num_bytes = int(spark._jvm.org.apache.spark.network.util.JavaUtils.byteStringAsBytes(str(text)))
    return _or_no_limit(rows), _or_no_limit(num_bytes)


def _or_no_limit(limit: int) -> int:
    return limit if 0 < limit < MAX_CONFIGURED_FRAME_BYTES else NO_LIMIT


# Micro-batches for quiet streams. Spark runs no batch without new data, so no timer fires and no window closes.


SOURCE_EVOLUTION_CONF = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
"""True on Spark 4.2 and later: each source of a query has a name, and Spark refuses sources without one."""

TICKS = "statestoreTicks"
"""The option that marks the rate source of ``with_ticks`` in a plan; Spark's source ignores it."""


def sources_in_plan(plan: Any) -> list[bool]:
    """Return for each source of a JVM logical plan whether ``with_ticks`` has added it, in Spark's order of sources."""
    relations = [node for node in nodes(plan) if node.nodeName().startswith("StreamingRelation")]
    # Sources of Spark's first interface have no such options.
    return [one.nodeName() == "StreamingRelationV2" and one.extraOptions().containsKey(TICKS) for one in relations]


def with_ticks(df: DataFrame, operator: str) -> DataFrame:
    """Return the same rows and columns, watermark included, from a plan that runs a batch at every trigger.

    Batches start at most once a second. The plan also has a rate source, which always has new rows, and a filter that
    drops them all. Spark must not see that the filter drops all rows, or it would leave the source out. ``operator``
    names the source where Spark needs names; it must not change at a restart.
    """
    reader = df.sparkSession.readStream.format("rate").options(**{"rowsPerSecond": 1, "numPartitions": 1, TICKS: True})
    if str(df.sparkSession.conf.get(SOURCE_EVOLUTION_CONF, "false")).lower() == "true":
        # Spark refuses a name while the setting is false.
        reader = reader.name(f"ticks_{re.sub('[^A-Za-z0-9_]', lambda c: f'_{ord(c[0]):02x}_', operator)}")
    nothing = reader.load().where(F.col("value") < 0)
    # A union takes its columns and their metadata from its first side.
    return df.union(nothing.select(*[F.lit(None).cast(f.dataType).alias(f.name) for f in df.schema.fields]))
