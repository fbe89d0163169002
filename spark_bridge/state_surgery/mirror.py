"""``mirror``: follows the state of a query of Spark, batch after batch, so that clients can read it here.

The query keeps its own state and its code. The mirror is a streaming query of its own: its source has Spark's committed
batches as offsets, and each of its batches reads the change feed of the state between two of them (Spark 4's format
``statestore``). The first batch reads the whole state, and so does each batch for which there is no feed: files of it
were removed, or the query was rolled back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from backends.conf import DEFAULT_FAMILY
from backends.encoding.columns import distinct_names
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument, MissingFileError, StateStoreError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.messages import OperatorSpec
from spark_bridge.operators.mirror_task import PLACE, REMOVED, MirrorLogic
from spark_bridge.session.settings import storage_settings
from spark_bridge.state_format.layouts import ALL_ROWS_KEY, PRESENT, TTL
from spark_bridge.state_surgery.spark_state import (
    KINDS_BY_SPARK,
    PROCESSOR,
    SESSION,
    TTL_FIELDS,
    SparkOperator,
    SparkQuery,
    check_state_of_spark,
    listed,
    numbered_fields,
)
from spark_bridge.task.state_task import StateTask

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

MIRRORED_BATCH = "mirrored_batch"
"""The operator that says which batch of the Spark query each version of the mirror has."""
MIRRORED_BATCH_SCHEMA = OperatorSchema.of_rows(
    StateSchema(pa.schema([("query", pa.string())]), pa.schema([("batch", pa.int64()), ("committed_ms", pa.int64())]))
)
"""The schema of ``MIRRORED_BATCH``."""
FORMAT = "statestore_mirrored_batches"
STRUCTS = ("key", "user_map_key", "value", "user_map_value")
"""The columns of Spark's reader that have the key and, as the last one, the value."""
CHANGE_SUFFIXES = (".changelog", ".delta")
"""The suffixes of the files with the changes of a version: of RocksDB, and of HDFS state stores."""
MAX_UNCHECKED_BATCHES = 10
"""Spark keeps the files of more batches: up to here, the feed is read without a look for its files."""


@dataclass(frozen=True)
class SparkBatch:
    """A committed batch of Spark. ``digest`` tells it from a batch of the same number after a rollback."""

    number: int
    digest: str

    @classmethod
    def newest(cls, storage: CheckpointStorage) -> SparkBatch | None:
        """Return the last committed batch of a checkpoint; None if there is none."""
        number = SparkCommits(storage).last_committed()
        return None if number is None else cls.at(storage, number)

    @classmethod
    def at(cls, storage: CheckpointStorage, number: int) -> SparkBatch | None:
        """Return a batch as it was planned last; None if its plan no longer exists."""
        try:
            plan = storage.get(f"offsets/{number}")  # it has the time at which the batch was planned
        except MissingFileError:
            return None
        return cls(number, hashlib.sha256(plan).hexdigest()[:16])


@dataclass(frozen=True)
class MirrorColumn:
    """A column of the mirror, and the expression for it over the rows of Spark's reader, whose fields are numbered."""

    name: str
    expression: str
    kind: pa.DataType


@dataclass(frozen=True)
class MirroredState:
    """A state of the Spark query, and the operator ``name`` of the mirror that keeps it: one row per key.

    ``variable`` is the state variable of a processor.
    """

    name: str
    operator: SparkOperator
    variable: str | None
    keys: tuple[MirrorColumn, ...]
    values: tuple[MirrorColumn, ...]

    @cached_property
    def schema(self) -> OperatorSchema:
        """Return the schema of the operator."""
        key, value = (pa.schema([(one.name, one.kind) for one in columns]) for columns in (self.keys, self.values))
        return OperatorSchema.of_rows(StateSchema(key, value))

    def changes(self, query: SparkQuery, start: int | None) -> DataFrame:
        """Return the changes after the batch ``start`` and up to that of ``query``; with None, all rows of the state.

        Raises ``StateStoreError`` if the state has other columns than the mirror.
        """
        from pyspark.sql import functions as F

        rows = query.state(self.operator, start, **_of_variable(self.variable))
        keys, values = columns_of(self.operator, rows)
        if (keys, values) != (self.keys, self.values):
            raise StateStoreError(
                f"The state of {self.operator.in_words} has got other columns: {listed([one.name for one in values])} "
                f"instead of {listed([one.name for one in self.values])}, or other types. Start a mirror with a new "
                "checkpoint location."
            )
        # Fields of a buffer may have one name: numbers tell them apart.
        structs = [name for name in STRUCTS if name in rows.columns]
        rows = rows.withColumns({name: numbered_fields(rows, name) for name in structs})
        columns = [F.expr(one.expression).alias(one.name) for one in (*keys, *values)]
        # Spark reads the changes of a key in one task, in their order, and numbers the rows of a task in this order.
        removed = F.lit(False) if start is None else F.col("change_type") == "delete"
        place = F.monotonically_increasing_id()
        return rows.select(*columns, removed.alias(REMOVED), place.alias(PLACE))


def _of_variable(name: str | None) -> dict[str, str]:
    return {} if name is None else {"stateVarName": name}


def columns_of(operator: SparkOperator, rows: DataFrame) -> tuple[tuple[MirrorColumn, ...], tuple[MirrorColumn, ...]]:
    """Return the columns of key and value in rows of Spark's reader. Raises ``InvalidOperatorError``."""
    from pyspark.sql import types as T

    from spark_bridge.operators.columns import arrow_type

    def fields(struct: str) -> list[MirrorColumn]:
        return [
            MirrorColumn(f.name, f"{struct}.b{i}", arrow_type(f.dataType))
            for i, f in enumerate(rows.schema[struct].dataType.fields)
            if not isinstance(f.dataType, T.NullType)
        ]

    *of_key, of_value = [name for name in STRUCTS if name in rows.columns]
    keys = [column for struct in of_key for column in fields(struct)]
    kind = rows.schema[of_value].dataType
    if KINDS_BY_SPARK.get(operator.name) == PROCESSOR and kind.names == TTL_FIELDS:
        inner = kind["value"].dataType.fields
        values = [MirrorColumn(f.name, f"{of_value}.b0.`{f.name}`", arrow_type(f.dataType)) for f in inner]
        values.append(MirrorColumn(TTL, f"{of_value}.b1", pa.int64()))
    else:
        values = fields(of_value)
    if KINDS_BY_SPARK.get(operator.name) == SESSION:  # its values repeat the key
        values = [one for one in values if one.name not in {key.name for key in keys}]
    keys = keys or [MirrorColumn(ALL_ROWS_KEY, "true", pa.bool_())]
    values = values or [MirrorColumn(PRESENT.field(0).name, "true", pa.bool_())]
    names = distinct_names([one.name for one in (*keys, *values)])
    columns = tuple(replace(one, name=name) for name, one in zip(names, (*keys, *values), strict=True))
    return columns[: len(keys)], columns[len(keys) :]


def mirror(
    spark: SparkSession,
    spark_checkpoint: str,
    checkpoint_location: str,
    *,
    operators: Mapping[str, int | tuple[int, str]] | None = None,
    name: str | None = None,
    interval: str = "1 second",
    num_partitions: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> StreamingQuery:
    """Start a query that follows the state of a query of Spark, and return it; stop it as any other streaming query.

        query = mirror(spark, "s3a://bucket/native", "s3a://bucket/mirror", operators={"totals": 0})
        QueryableStateClient.connect().get("totals", 42)

    The Spark query may run in any Spark application, and its checkpoint is only read. It must write changelogs: HDFS
    state stores always do, and RocksDB with
    ``spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled=true``. ``spark`` is a session of Spark 4
    that ``init_spark`` or ``attach`` has joined to a state cluster.

    Arguments:

    - ``spark_checkpoint``: the checkpoint of the Spark query, which has committed a batch.
    - ``checkpoint_location``: that of the mirror. A mirror that is started again continues there.
    - ``operators``: the names of the mirror's operators, each with the number of an operator of Spark, and for a
      variable of ``transformWithState`` with its name: ``{"totals": 0, "seen": (1, "seen")}``. By default all states
      are mirrored, under names such as ``operator_0`` and ``operator_1_seen``.
    - ``name``: the name of the mirror for clients and on the page.
    - ``interval``: how often the mirror looks for new batches. It reads all of them together.
    - ``num_partitions``: the number of state partitions of each operator, by default the session's
      ``spark.sql.shuffle.partitions``.
    - ``storage_options``: options of the storage of ``spark_checkpoint``.

    Keys and values have the columns of Spark's own state: an aggregation has its buffers, a mean for instance ``sum``
    and ``count``. The second column of a name gets ``__value`` appended. A map has a row for each entry. A value with a
    TTL has the column ``ttl_expiration_ms``, and stays until Spark has removed it. The operator ``mirrored_batch`` has
    one row, by the id of the Spark query: the batch that the other operators show at the same version. Each answer has
    its lag (``QueryableStateClient.lag_seconds``): how old the state may be.

    Raises ``InvalidStateStoreArgument``, before anything is written, for Spark 3.5, a checkpoint without a committed
    batch, and state without a change feed (joins, lists, RocksDB without changelogs), which it names.
    """
    options = {**storage_settings(spark), **(storage_options or {})}
    query = _native(spark, spark_checkpoint, CheckpointStorage.open(spark_checkpoint, options))
    following = _Mirror(query, _states(query, operators), num_partitions)
    return following.start(checkpoint_location, options, name, interval)


def _native(spark: SparkSession, location: str, storage: CheckpointStorage) -> SparkQuery:
    """Return the Spark query at its last committed batch. Raises ``InvalidStateStoreArgument``."""
    check_state_of_spark("mirror", spark, storage, "use serve_state(follow=True)")
    newest = SparkBatch.newest(storage)
    if newest is None:
        raise InvalidStateStoreArgument(
            f"{storage.location} has no committed batch, so its stateful operators are not known: start the mirror "
            "after the first batch."
        )
    return SparkQuery(spark, location, storage, newest.number, None)


def _states(query: SparkQuery, operators: Mapping[str, int | tuple[int, str]] | None) -> list[MirroredState]:
    """Return the states to mirror. Raises ``InvalidStateStoreArgument`` if one of them has no change feed."""
    by_number = {one.id: one for one in query.operators}
    places: list[int | tuple[int, str]] = []
    for one in by_number.values():
        places += [(one.id, variable) for variable in one.variables] or [one.id]
    if not places:
        raise InvalidStateStoreArgument(f"{query.storage.location} has no stateful operator, so no state to mirror.")
    if operators is None:
        operators = {"_".join(map(str, ("operator", *(p if isinstance(p, tuple) else (p,))))): p for p in places}
    states: list[MirroredState] = []
    refusals = []
    for name, place in operators.items():
        if name == MIRRORED_BATCH or place not in places:
            raise InvalidStateStoreArgument(
                f"operators= has {name!r}: {place!r}. The states of {query.storage.location} are "
                f"{', '.join(map(repr, places))}, and {MIRRORED_BATCH!r} is the name of the mirror's own operator."
            )
        number, variable = place if isinstance(place, tuple) else (place, None)
        refusal = _refusal(query, by_number[number], variable)
        if refusal is None:
            rows = query.state(by_number[number], **_of_variable(variable))
            states.append(MirroredState(name, by_number[number], variable, *columns_of(by_number[number], rows)))
        else:
            refusals.append(refusal)
    if refusals:
        others = {one.name: operators[one.name] for one in states}
        remedy = f" Mirror the other states: operators={others!r}." if others else ""
        raise InvalidStateStoreArgument(" ".join(refusals) + remedy)
    return states


def _refusal(query: SparkQuery, operator: SparkOperator, variable: str | None) -> str | None:
    """Return why a state cannot be mirrored; None if it can."""
    if operator.name == "symmetricHashJoin":
        return f"Spark has no change feed of {operator.in_words}, a join."
    if variable is not None and "list_element" in query.state(operator, stateVarName=variable).columns:
        return f"Spark's change feed of {operator.in_words} leaves out elements of lists, and {variable!r} is a list."
    if not all(versions_with_changes(query.storage, operator.id).values()):
        return (
            f"{operator.in_words} of {query.storage.location} writes no changelogs, so Spark has no change feed of it. "
            "Start the Spark query again with "
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled=true, and the mirror after its next "
            "batch."
        )
    return None


def versions_with_changes(storage: CheckpointStorage, operator: int) -> dict[str, set[int]]:
    """Return for each partition of an operator of Spark the versions (batch + 1) whose changes are in a file."""
    versions: dict[str, set[int]] = {}
    for path, _ in storage.list(f"state/{operator}/"):
        place, _, file = path.rpartition("/")
        stem, suffix = posixpath.splitext(file)
        if place.rpartition("/")[2].isdigit():
            of_partition = versions.setdefault(place, set())
            number = stem.partition("_")[0]  # an id of the version may follow
            if suffix in CHANGE_SUFFIXES and number.isdigit():
                of_partition.add(int(number))
    return versions


@dataclass(frozen=True)
class _Operator:
    """An operator of the mirror: its name, its schema, and where the rows of its keys go."""

    name: str
    schema: OperatorSchema
    num_partitions: int
    num_key_groups: int

    @property
    def spec(self) -> OperatorSpec:
        return OperatorSpec(self.name, self.num_partitions, self.schema.to_json(), kind="mirror")

    def keep(self, changes: DataFrame, *, is_scan: bool) -> None:
        """Run the tasks that keep the changes, at the batch of the query whose thread calls."""
        from spark_bridge.operators.map_in_arrow import KeyRouting, map_in_arrow

        keys = self.schema.families[DEFAULT_FAMILY].key.names
        logic = MirrorLogic(self.schema, is_scan)
        task = StateTask(self.name, self.num_partitions, self.num_key_groups, tuple(keys), logic, uses_time=False)
        routing = KeyRouting(keys, self.num_partitions, self.num_key_groups)
        map_in_arrow(changes, task.run, "statestore_mirror", f"{REMOVED} boolean", routing).collect()


class _Mirror:
    """The work of a mirror's batches, and how old its state is. ``clock`` gives the seconds since 1970."""

    def __init__(
        self,
        query: SparkQuery,
        states: Sequence[MirroredState],
        num_partitions: int | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._query = query
        self._states = states
        self._num_partitions = num_partitions
        self._clock = clock
        self._operators: list[_Operator] = []
        self._batch: int | None = None
        """The batch of Spark whose state the mirror has; None before the first one."""
        self._current_at: float | None = None
        """When that batch was the newest one."""
        self._has_run = False
        self._is_failing = False

    def start(self, location: str, options: Mapping[str, str], name: str | None, interval: str) -> StreamingQuery:
        """Declare the operators, and start the query."""
        from spark_bridge.operators.map_in_arrow import (
            check_operator_name,
            declare,
            key_group_count,
            map_in_arrow,
            partition_count,
        )

        spark = self._query.spark
        source = batches_source(self._query.storage.location, options)
        spark.dataSource.register(source)
        df = spark.readStream.format(source.name()).load()
        key_groups = key_group_count(df)
        partitions = partition_count(df, self._num_partitions, key_groups)
        self._operators = [_Operator(one.name, one.schema, partitions, key_groups) for one in self._states]
        self._operators.append(_Operator(MIRRORED_BATCH, MIRRORED_BATCH_SCHEMA, 1, key_groups))
        for operator in self._operators:
            check_operator_name(operator.name, df)
            # The listener finds the operators in the plan, and ``run`` runs their tasks.
            df = map_in_arrow(df, unchanged, declare(operator.spec, behind=self.behind), df.schema)
        own = CheckpointStorage.open(location, options)
        if (last := SparkCommits(own).last_committed()) is not None:
            self._batch = json.loads(own.get(f"offsets/{last}").rsplit(b"\n", 1)[-1])["batch"]
        writer = df.writeStream.foreachBatch(self.run).option("checkpointLocation", location)
        if name is not None:
            writer = writer.queryName(name)
        return writer.trigger(processingTime=interval).start()

    def run(self, df: DataFrame, batch_id: int) -> None:
        """Read what has changed between two batches of Spark, and keep it: the function of ``foreachBatch``."""
        from py4j.protocol import Py4JJavaError

        try:
            self._keep_changes(df, batch_id)
        except Py4JJavaError as error:
            name = error.java_exception.getClass().getName()
            if not name.endswith("InterruptedException"):
                raise
            # ``stop()`` has interrupted a job. Spark finds the interruption by an expression over the text of the
            # error, which overflows Java's stack if the text is as long as usual.
            short = f"py4j.protocol.Py4JJavaError: An error occurred while calling a job: {name}"
            raise StateStoreError(short) from None

    def _keep_changes(self, df: DataFrame, batch_id: int) -> None:
        (row,) = df.collect()
        end = SparkBatch(row["end"], row["end_digest"])
        storage = self._query.storage
        start = row["start"] if self._has_feed(SparkBatch(row["start"], row["start_digest"]), end) else None
        newest = end if start is not None else SparkBatch.newest(storage)
        if newest is None:
            raise StateStoreError(f"{storage.location} has no committed batch any more: its state cannot be read.")
        spark = df.sparkSession
        query = replace(self._query, spark=spark, batch_id=newest.number)
        *operators, position = self._operators
        log.info("Batch %d reads batches %s to %d of %s", batch_id, start, newest.number, storage.location)
        for operator, state in zip(operators, self._states, strict=True):
            operator.keep(state.changes(query, start), is_scan=start is None)
        if SparkBatch.at(storage, newest.number) != newest:
            raise StateStoreError(
                f"{storage.location} was rolled back while its batch {newest.number} was read. Nothing was committed: "
                "start the mirror again."
            )
        committed_ms = SparkCommits(storage).committed_ms(newest.number)
        now = spark.createDataFrame(
            [(query.id, newest.number, committed_ms, False, 0)],
            f"query string, batch long, committed_ms long, {REMOVED} boolean, {PLACE} long",
        )
        position.keep(now, is_scan=True)
        self._batch, self._has_run = newest.number, True

    def _has_feed(self, start: SparkBatch, end: SparkBatch) -> bool:
        """Return whether Spark has the changes from one batch to another. False after a rollback of the Spark query."""
        storage = self._query.storage
        if start.number >= end.number or start.number < 0:
            return False
        if SparkBatch.at(storage, start.number) != start or SparkBatch.at(storage, end.number) != end:
            log.info("Spark was rolled back, or has forgotten batch %d: the mirror begins again", start.number)
            return False
        if self._has_run and end.number - start.number <= MAX_UNCHECKED_BATCHES:
            return True
        needed = set(range(start.number + 2, end.number + 2))
        for operator in {one.operator.id for one in self._states}:
            if not all(needed <= versions for versions in versions_with_changes(storage, operator).values()):
                log.info("Some changes after batch %d are gone: the mirror begins again", start.number)
                return False
        return True

    def behind(self) -> float | None:
        """Return how many seconds old the state may be; None before the first batch.

        While Spark's checkpoint cannot be read, the seconds grow.
        """
        now, batch = self._clock(), self._batch
        if batch is None:
            return None
        try:
            commits = SparkCommits(self._query.storage)
            waiting = min((number for number in commits.committed() if number > batch), default=None)
            since_ms = None if waiting is None else commits.committed_ms(waiting)
            self._current_at = now if since_ms is None else since_ms / 1000
            self._is_failing = False
        except StateStoreError as error:
            if not self._is_failing:
                log.warning("The mirror of %s cannot look for new batches: %s", self._query.storage.location, error)
            self._is_failing = True
        return None if self._current_at is None else max(0.0, now - self._current_at)


def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the rows as they are."""
    return batches


def batches_source(location: str, options: Mapping[str, str]) -> Any:
    """Return a data source for streams whose offsets are Spark's committed batches; a batch has its bounds as a row.

    The class holds the storage options: Spark would show them in plans.
    """
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Bounds(InputPartition):  # type: ignore[misc]
        """The first and the last batch: numbers and digests."""

    class Reader(DataSourceStreamReader):  # type: ignore[misc]
        """Finds the last committed batch."""

        def initialOffset(self) -> dict[str, Any]:
            return {"batch": -1, "digest": ""}

        def latestOffset(self) -> dict[str, Any]:  # Spark 4.0 has no other form
            newest = SparkBatch.newest(CheckpointStorage.open(location, options))
            return self.initialOffset() if newest is None else {"batch": newest.number, "digest": newest.digest}

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Any]:
            return [Bounds((start["batch"], start["digest"], end["batch"], end["digest"]))]

        def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
            yield partition.value

    class Source(DataSource):  # type: ignore[misc]
        """The committed batches of a Spark query."""

        @classmethod
        def name(cls) -> str:
            return FORMAT

        def schema(self) -> str:
            return "start long, start_digest string, end long, end_digest string"

        def streamReader(self, schema: Any) -> Any:
            return Reader()

    return Source
