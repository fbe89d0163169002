"""``mirror``: follows the state of a query of Spark, batch after batch, so that clients can read it here.

The query keeps its state and its code. The mirror is a separate streaming query: its source has Spark's committed
batches as offsets, and each of its batches reads the change feed of the state between two of them (Spark 4's format
``statestore``). The first batch reads the whole state, and so does each batch without a feed: files of it
were removed, or the query was rolled back.
"""

from __future__ import annotations

import json
import logging
import posixpath
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from backends.background_loop import BackgroundLoop
from backends.conf import DEFAULT_FAMILY, check_name
from backends.encoding.columns import distinct_names
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument, StateStoreError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.spark_commits import SparkBatch, SparkCommits
from coordinator_actor.messages import MIRROR, OperatorSpec
from spark_bridge.exceptions import STATESTORE_ERRORS
from spark_bridge.operators import map_in_arrow
from spark_bridge.operators.columns import arrow_type
from spark_bridge.operators.mirror_task import PLACE, REMOVED, MirrorLogic
from spark_bridge.session.current import current_cluster
from spark_bridge.session.settings import storage_settings
from spark_bridge.state_format.layouts import ALL_ROWS_KEY, PRESENT, TTL
from spark_bridge.state_surgery.spark_state import (
    KINDS_BY_SPARK,
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
LOOK_SECONDS = 1.0


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
        key, value = (pa.schema([(one.name, one.kind) for one in columns]) for columns in (self.keys, self.values))
        # So that a restart cannot give the operator another state of the same columns.
        mirrored = str(self.operator.id) if self.variable is None else f"{self.operator.id}/{self.variable}"
        return replace(OperatorSchema.of_rows(StateSchema(key, value)), settings={"mirrors": mirrored})

    def changes(self, query: SparkQuery, start: int | None) -> DataFrame:
        """Return the changes after the batch ``start`` and up to that of ``query``; with None, all rows of the state.

        Raises ``StateStoreError`` if the state has other columns than the mirror.
        """
        rows = query.state(self.operator, start, **_of_variable(self.variable))
        keys, values = columns_of(self.operator, rows)
        if (keys, values) != (self.keys, self.values):
            raise StateStoreError(
                f"The state of {self.operator.in_words} has got other columns: {listed([one.name for one in values])} "
                f"instead of {listed([one.name for one in self.values])}, or other types. Start a mirror with a new "
                "checkpoint location."
            )
        structs = [name for name in STRUCTS if name in rows.columns]
        rows = rows.withColumns({name: numbered_fields(rows, name, levels=2) for name in structs})
        columns = [F.expr(one.expression).alias(one.name) for one in (*keys, *values)]
        # Spark reads the changes of a key in one task, in their order, and numbers the rows of a task in this order.
        removed = F.lit(False) if start is None else F.col("change_type") == "delete"
        place = F.monotonically_increasing_id()
        return rows.select(*columns, removed.alias(REMOVED), place.alias(PLACE))


def _of_variable(name: str | None) -> dict[str, str]:
    return {} if name is None else {"stateVarName": name}


def columns_of(operator: SparkOperator, rows: DataFrame) -> tuple[tuple[MirrorColumn, ...], tuple[MirrorColumn, ...]]:
    """Return the columns of key and value in rows of Spark's reader. Raises ``InvalidOperatorError``."""

    def fields(kind: T.StructType, path: str) -> list[MirrorColumn]:
        return [
            MirrorColumn(f.name, f"{path}.b{i}", arrow_type(f.dataType))
            for i, f in enumerate(kind.fields)
            if not isinstance(f.dataType, T.NullType)
        ]

    *of_key, of_value = [name for name in STRUCTS if name in rows.columns]
    keys = [column for name in of_key for column in fields(rows.schema[name].dataType, name)]
    kind = rows.schema[of_value].dataType
    has_ttl = bool(operator.variables) and kind.names == TTL_FIELDS and isinstance(kind["value"].dataType, T.StructType)
    values = fields(kind["value"].dataType, f"{of_value}.b0") if has_ttl else fields(kind, of_value)
    if has_ttl:
        values.append(MirrorColumn(TTL, f"{of_value}.b1", pa.int64()))
    if KINDS_BY_SPARK.get(operator.name) == SESSION:
        # The session and the key come first, and are in the key but for the end of the session.
        names = {key.name for key in keys}
        values = [one for i, one in enumerate(values) if i >= len(keys) or one.name not in names]
    keys = keys or [MirrorColumn(ALL_ROWS_KEY, "true", pa.bool_())]
    values = values or [MirrorColumn(PRESENT.field(0).name, "true", pa.bool_())]
    names_of_all = distinct_names([one.name for one in (*keys, *values)])
    columns = tuple(replace(one, name=name) for name, one in zip(names_of_all, (*keys, *values), strict=True))
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
    - ``storage_options``: options of the storage of ``spark_checkpoint``. Options of ``checkpoint_location`` are those
      of the session.

    Keys and values have the columns of Spark's own state: an aggregation has its buffers, a mean for instance ``sum``
    and ``count``. The second column of a name gets ``__value`` appended. A map has a row for each entry. A value with a
    TTL has the column ``ttl_expiration_ms``, and stays until Spark has removed it. The operator ``mirrored_batch`` has
    one row, by the id of the Spark query: the batch that the other operators show at the same version. Each answer has
    its lag (``QueryableStateClient.lag_seconds``): how old the state may be.

    Raises ``InvalidStateStoreArgument``, before anything is written, for Spark 3.5, a checkpoint without a committed
    batch, a checkpoint location of another query, and state without a change feed (joins, lists, RocksDB without
    changelogs), which it names.
    """
    options = {**storage_settings(spark), **(storage_options or {})}
    query = _native(spark, spark_checkpoint, CheckpointStorage.open(spark_checkpoint, options))
    states = _states(query, operators)
    own_options = {**storage_settings(spark), **current_cluster().conf.storage_options}
    own = CheckpointStorage.open(checkpoint_location, own_options)
    mirrored = last_planned(own, query.storage)
    following = _Mirror(query, states, MirrorLag(query.storage, own, mirrored), num_partitions)
    return following.start(checkpoint_location, options, name, interval)


def last_planned(own: CheckpointStorage, native: CheckpointStorage) -> tuple[int, SparkBatch] | None:
    """Return the last committed batch of the mirror, and the batch of Spark up to which it was planned to read.

    None for a new mirror. Raises ``InvalidStateStoreArgument`` for the checkpoint of another query.
    """

    def end_of(batch_id: int) -> SparkBatch:
        offset = own.get(f"offsets/{batch_id}").rsplit(b"\n", 1)[-1]
        end = json.loads(offset[offset.index(b"{") :])  # a place may come before it
        return SparkBatch(int(end["batch"]), str(end["digest"]))

    commits = SparkCommits(own)
    begun, last = commits.last_begun(), commits.last_committed()
    own_root, native_root = (f"{storage.location.rstrip('/')}/" for storage in (own, native))
    if not own_root.startswith(native_root):
        with suppress(ValueError, KeyError, TypeError):  # the offset of another source
            if begun is not None:
                end_of(begun)
            return None if last is None else (last, end_of(last))
    raise InvalidStateStoreArgument(
        f"{own.location} is not the checkpoint of a mirror: give the mirror another checkpoint_location=, outside of "
        "the checkpoint of the Spark query."
    )


def _native(spark: SparkSession, location: str, storage: CheckpointStorage) -> SparkQuery:
    """Return the Spark query at its last committed batch. Raises ``InvalidStateStoreArgument``."""
    check_state_of_spark("mirror", spark, storage, "use serve_state(follow=True)")
    if (newest := SparkBatch.newest(storage)) is None:
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
    if not operators:
        raise InvalidStateStoreArgument(
            f"operators= is empty, so there is no state to mirror. The states of {query.storage.location} are "
            f"{', '.join(map(repr, places))}: name them, or leave out operators= for all."
        )
    states: list[MirroredState] = []
    refusals = []
    for name, place in operators.items():
        if place not in places:
            raise InvalidStateStoreArgument(
                f"operators= has {name!r}: {place!r}. The states of {query.storage.location} are "
                f"{', '.join(map(repr, places))}."
            )
        check_name("an operator of the mirror, in operators=", name)
        if name == MIRRORED_BATCH:
            raise InvalidStateStoreArgument(
                f"operators= has {name!r}, the name of the mirror's own operator: choose another name."
            )
        number, variable = place if isinstance(place, tuple) else (place, None)
        state = _state(query, name, by_number[number], variable)
        if isinstance(state, str):
            refusals.append(state)
        else:
            states.append(state)
    if refusals:
        others = {one.name: operators[one.name] for one in states}
        remedy = f" Mirror the other states: operators={others!r}." if others else ""
        raise InvalidStateStoreArgument(" ".join(refusals) + remedy)
    return states


def _state(query: SparkQuery, name: str, operator: SparkOperator, variable: str | None) -> MirroredState | str:
    """Return a state to mirror, or why it cannot be mirrored."""
    if operator.name == "symmetricHashJoin":
        return f"Spark has no change feed of {operator.in_words}, a join."
    rows = query.state(operator, **_of_variable(variable))
    if "list_element" in rows.columns:
        return f"Spark's change feed of {operator.in_words} leaves out elements of lists, and {variable!r} is a list."
    if not _has_changelogs(query, operator):
        return (
            f"{operator.in_words} of {query.storage.location} writes no changelogs, so Spark has no change feed of it. "
            "Start the Spark query again with "
            "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled=true, and the mirror after its next "
            "batch."
        )
    try:
        state = MirroredState(name, operator, variable, *columns_of(operator, rows))
        state.schema.to_json()
    except STATESTORE_ERRORS as error:
        return f"The state {variable or ''!r} of {operator.in_words} has columns that cannot be kept here: {error}"
    return state


def _has_changelogs(query: SparkQuery, operator: SparkOperator) -> bool:
    """Return whether each partition has a file with the changes of the last committed batch."""
    has_changes: dict[str, bool] = {}
    for path, _ in query.storage.list(f"state/{operator.id}/"):
        place, _, file = path.rpartition("/")
        stem, suffix = posixpath.splitext(file)
        # An id of the version may follow its number.
        if place.rpartition("/")[2].isdigit() and stem.partition("_")[0] == str(query.batch_id + 1):
            has_changes[place] = has_changes.get(place, False) or suffix in CHANGE_SUFFIXES
    return bool(has_changes) and all(has_changes.values())


@dataclass(frozen=True)
class _Operator:
    """An operator of the mirror: its name, its schema, and where the rows of its keys go."""

    name: str
    schema: OperatorSchema
    num_partitions: int
    num_key_groups: int

    @property
    def spec(self) -> OperatorSpec:
        return OperatorSpec(self.name, self.num_partitions, self.schema.to_json(), kind=MIRROR)

    def keep(self, changes: DataFrame, *, is_scan: bool) -> None:
        """Run the tasks that keep the changes, at the batch of the query whose thread calls."""
        keys = self.schema.families[DEFAULT_FAMILY].key.names
        logic = MirrorLogic(self.schema, is_scan)
        task = StateTask(self.name, self.num_partitions, self.num_key_groups, tuple(keys), logic, uses_time=False)
        routing = map_in_arrow.KeyRouting(keys, self.num_partitions, self.num_key_groups)
        output = f"{REMOVED} boolean"
        map_in_arrow.map_in_arrow(changes, task.run, "statestore_mirror", output, routing).collect()


class MirrorLag:
    """How old the state of a mirror may be: a loop looks every second for batches that the mirror does not show.

    ``native`` is the checkpoint of the Spark query, ``own`` that of the mirror. ``planned`` is the last committed batch
    of the mirror, with the batch of Spark up to which it has read. ``clock`` gives the seconds since 1970; Spark's
    commits have the times of its storage.
    """

    def __init__(
        self,
        native: CheckpointStorage,
        own: CheckpointStorage,
        planned: tuple[int, SparkBatch] | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._native = native
        self._own = own
        self._clock = clock
        self._planned = planned
        self._shown: SparkBatch | None = None
        """The batch of Spark that clients see."""
        self._current_at: float | None = None
        """When that batch was the newest one; None if that is not known."""
        if planned is not None:
            committed_ms = SparkCommits(own).committed_ms(planned[0])
            self._current_at = None if committed_ms is None else committed_ms / 1000
        self._loop = BackgroundLoop(
            self.look,
            LOOK_SECONDS,
            name="statestore-mirror",
            what=f"look for new batches of {native.location}: the lag of its mirror grows",
            remedy="Look at the storage of that checkpoint and at its credentials. The loop retries by itself.",
        )

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._loop.close()

    def planned(self, batch_id: int, batch: SparkBatch) -> None:
        """Note that a batch of the mirror has read up to a batch of Spark. It counts once it is committed."""
        self._planned = batch_id, batch

    def look(self) -> None:
        """Compare the batch that clients see with Spark's newest one. Raises the errors of storage."""
        began, planned = self._clock(), self._planned
        if planned is None:
            return
        if self._shown != planned[1] and self._own.exists(f"commits/{planned[0]}"):
            self._shown = planned[1]
        shown = self._shown
        # After a rollback, the lag grows from the time of the last look before it.
        if shown is None or SparkBatch.at(self._native, shown.number) != shown:
            return
        commits = SparkCommits(self._native)
        if not (newer := [number for number in commits.committed() if number > shown.number]):
            self._current_at = began
        elif min(newer) == shown.number + 1:
            next_ms = commits.committed_ms(min(newer))
            self._current_at = self._current_at if next_ms is None else min(began, next_ms / 1000)

    def seconds(self) -> float | None:
        """Return how many seconds old the state may be; None if that is not known yet."""
        return None if self._current_at is None else max(0.0, self._clock() - self._current_at)


class _Mirror:
    """The batches of a mirror."""

    def __init__(
        self, query: SparkQuery, states: Sequence[MirroredState], lag: MirrorLag, num_partitions: int | None
    ) -> None:
        self._query = query
        self._states = states
        self._lag = lag
        self._num_partitions = num_partitions
        self._operators: list[_Operator] = []
        self._batch: SparkBatch | None = None
        """The batch of Spark that the last batch of this run has read."""

    def start(self, location: str, options: Mapping[str, str], name: str | None, interval: str) -> StreamingQuery:
        spark = self._query.spark
        source = batches_source(self._query.storage.location, options, uuid.uuid4().hex)
        spark.dataSource.register(source)
        reader = spark.readStream.format(source.name())
        if str(spark.conf.get(map_in_arrow.SOURCE_EVOLUTION_CONF, "false")).lower() == "true":
            reader = reader.name("mirrored_batches")
        df = reader.load()
        partitions, key_groups = map_in_arrow.state_layout(MIRRORED_BATCH, self._num_partitions, df)
        self._operators = [_Operator(one.name, one.schema, partitions, key_groups) for one in self._states]
        self._operators.append(_Operator(MIRRORED_BATCH, MIRRORED_BATCH_SCHEMA, 1, key_groups))
        for operator in self._operators:
            map_in_arrow.check_operator_name(operator.name, df)
            # The listener finds the operators in the plan, and ``run`` runs their tasks.
            name_in_plan = map_in_arrow.declare(map_in_arrow.DeclaredOperator(operator.spec, lag=self._lag))
            df = map_in_arrow.map_in_arrow(df, unchanged, name_in_plan, df.schema)
        writer = df.writeStream.foreachBatch(self.run).option("checkpointLocation", location)
        if name is not None:
            writer = writer.queryName(name)
        return writer.trigger(processingTime=interval).start()

    def run(self, df: DataFrame, batch_id: int) -> None:
        """Read what has changed between two batches of Spark, and keep it: the function of ``foreachBatch``."""
        try:
            self._run(df, batch_id)
        except Py4JJavaError as error:
            # ``stop()`` interrupts a job. Spark searches the error message for the interruption with an expression
            # that overflows Java's stack if the message has the usual length.
            first = str(error.java_exception.toString()).partition("\n")[0][:500]
            is_stopped = "Interrupted" in first or "cancelled" in first
            log.log(logging.INFO if is_stopped else logging.ERROR, "Batch %d has failed", batch_id, exc_info=True)
            short = f"py4j.protocol.Py4JJavaError: An error occurred while calling a job: {first}"
            raise StateStoreError(short) from None

    def _run(self, df: DataFrame, batch_id: int) -> None:
        (row,) = df.collect()
        start, end = SparkBatch(row["start"], row["start_digest"]), SparkBatch(row["end"], row["end_digest"])
        if self._batch is not None:
            start = self._batch  # a scan may have read another batch than was planned
        spark, storage = df.sparkSession, self._query.storage
        batch = end
        if not (self._has_feed(start, end) and self._keep_changes(spark, start.number, end)):
            newest = end if SparkBatch.at(storage, end.number) == end else SparkBatch.newest(storage)
            if newest is None:
                raise StateStoreError(f"{storage.location} has no committed batch now: start the mirror again.")
            batch = newest
            log.info("Batch %d of the mirror reads the whole state at batch %d", batch_id, batch.number)
            self._keep(spark, None, batch)
        position = spark.createDataFrame(
            [(self._query.id, batch.number, SparkCommits(storage).committed_ms(batch.number), False, 0)],
            f"query string, batch long, committed_ms long, {REMOVED} boolean, {PLACE} long",
        )
        self._operators[-1].keep(position, is_scan=True)
        self._batch = batch
        self._lag.planned(batch_id, batch)

    def _has_feed(self, start: SparkBatch, end: SparkBatch) -> bool:
        """Return whether the state at one batch is followed by the changes up to the other: not after a rollback."""
        is_known = all(SparkBatch.at(self._query.storage, batch.number) == batch for batch in (start, end))
        return 0 <= start.number < end.number and is_known

    def _keep_changes(self, spark: SparkSession, start: int, end: SparkBatch) -> bool:
        """Keep the changes between two batches. Return whether Spark had them: it removes those of old batches.

        Tasks that have committed commit again with the whole state, as after a retry of a stage.
        """
        try:
            self._keep(spark, start, end)
        except (Py4JJavaError, PySparkException) as error:
            if "CANNOT_LOAD_STATE_STORE" not in str(error) and "STDS_" not in str(error):
                raise
            log.warning("Spark has not all changes of batches %d to %d: %s", start + 1, end.number, str(error)[:500])
            return False
        return True

    def _keep(self, spark: SparkSession, start: int | None, end: SparkBatch) -> None:
        """Keep the changes after ``start``, or the whole state. Raises ``StateStoreError`` after a rollback."""
        query = replace(self._query, spark=spark, batch_id=end.number)
        for operator, state in zip(self._operators, self._states, strict=False):  # the last one is the mirror's own
            operator.keep(state.changes(query, start), is_scan=start is None)
        now, newest = SparkBatch.at(query.storage, end.number), SparkCommits(query.storage).last_committed()
        if now not in (None, end) or newest is None or newest < end.number:
            raise StateStoreError(
                f"{query.storage.location} was rolled back while its batch {end.number} was read. Nothing was "
                "committed: start the mirror again."
            )


def unchanged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Return the rows as they are."""
    return batches


def batches_source(location: str, options: Mapping[str, str], suffix: str) -> Any:
    """Return a data source for streams whose offsets are Spark's committed batches; a batch has its bounds as a row.

    The class holds the storage options: Spark would show them in plans. ``suffix`` makes its name unique.
    """
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Bounds(InputPartition):  # type: ignore[misc]
        """The first and the last batch: numbers and digests."""

    class Reader(DataSourceStreamReader):  # type: ignore[misc]
        """Finds the last committed batch."""

        def __init__(self) -> None:
            self._storage: CheckpointStorage | None = None
            self._last: dict[str, Any] | None = None

        def initialOffset(self) -> dict[str, Any]:
            return {"batch": -1, "digest": ""}

        def latestOffset(self) -> dict[str, Any]:  # Spark 4.0 has no other form
            try:
                self._storage = self._storage or CheckpointStorage.open(location, options)
                newest = SparkBatch.newest(self._storage)
            except StateStoreError as error:
                if self._last is None:
                    raise
                log.warning("The mirror cannot look for new batches of %s: %s", location, error)
                newest = None
            if newest is not None:
                self._last = {"batch": newest.number, "digest": newest.digest}
            return self._last or self.initialOffset()

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[Any]:
            return [Bounds((start["batch"], start["digest"], end["batch"], end["digest"]))]

        def read(self, partition: Any) -> Iterator[tuple[Any, ...]]:
            yield partition.value

    class Source(DataSource):  # type: ignore[misc]
        """The committed batches of a Spark query."""

        @classmethod
        def name(cls) -> str:
            return f"{FORMAT}_{suffix}"

        def schema(self) -> str:
            return "start long, start_digest string, end long, end_digest string"

        def streamReader(self, schema: Any) -> Any:
            return Reader()

    return Source
