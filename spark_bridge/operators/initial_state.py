"""The initial state of an operator: version 0 of the state, made by a batch job before the first micro-batch.

Spark hands an initial state to the tasks of the first batch. Here it is in the store before the first batch, as if it
had been restored from a savepoint, so that the first batch can be repeated like any other.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import pyarrow as pa

from backends.conf import StateStoreConf
from backends.decoders import msgpack_decoder
from backends.encoding.key_groups import partition_range
from backends.encoding.keys import KeyRange
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import ChangelogMeta
from backends.formats.partition_entries import PartitionEntry
from backends.ids import DEFAULT_FAMILY
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.messages import BatchTimes, OperatorFigures, OperatorSpec, QueryRegistration
from coordinator_actor.savepoints.partition_builder import STORE, build_partition
from spark_bridge.exceptions import PartitionMismatchError, other_key_groups
from spark_bridge.operators.map_in_arrow import KeyRouting, map_in_arrow
from spark_bridge.task.staged_changes import StagedChanges
from spark_bridge.task.state_task import Logic, end_rows, partitions_of
from spark_bridge.task.step_timer import StepTimer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RESULT = "partition int, entry binary"
_RESULT_SCHEMA = pa.schema([("partition", pa.int32()), ("entry", pa.binary())])
InitialEntries: TypeAlias = dict[str, dict[int, PartitionEntry]]
"""The manifest's entries of version 0, by operator and partition."""


@dataclass(frozen=True)
class InitialState:
    """The rows of a batch DataFrame, how they are routed (as the operator's own), and the logic that makes state."""

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
        # The base is no version's: no reader may take version 0 for changes to an empty state.
        base = f"initial/{registration.query_id}"
        run_id = f"initial-{registration.run_id}"
        self._meta = ChangelogMeta(run_id, spec.name, partition, spec.num_partitions, 0, attempt, base, STORE)
        self._staged = StagedChanges()

    def get_many(self, keys: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> pa.BinaryArray:
        """Return nulls: there is no state yet."""
        return pa.nulls(len(keys), pa.binary())

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = DEFAULT_FAMILY, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Return nothing: there is no state yet."""
        return iter(())

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = DEFAULT_FAMILY) -> None:
        """Add pairs to the state."""
        self._staged.add(column_family, keys, values)

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        """Write the state durably; it counts from the moment that the manifest of version 0 names it."""
        location, options = self._registration.state_location, self._registration.storage_options
        storage = CheckpointStorage.open(location, options, fsync=self._conf.fsync)
        pairs = ((family, SortedPairs.last_wins(b.column(0), b.column(1))) for family, b in self._staged)
        families = {DEFAULT_FAMILY, *self.schema.families}
        self.entry, _ = build_partition(storage, self._meta, sorted(families), pairs, self._conf)

    def close(self) -> None:
        """Drop what was staged."""
        self._staged.close()


@dataclass(frozen=True)
class InitialStateTask:
    """The function of the batch job's tasks: one partition's rows in, the partition's entry for the manifest out."""

    registration: QueryRegistration
    spec: OperatorSpec
    keys: tuple[str, ...]
    logic: Logic
    times: BatchTimes
    conf: StateStoreConf

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Make the state of one partition, and yield its entry, unless there are no rows."""
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
            task = InitialStateTask(registration, spec, tuple(routing.keys), initial.logic, times, conf)
            made = map_in_arrow(initial.rows, task.run, "statestore_initial_state", _RESULT, routing).collect()
            entries[spec.name] = {
                row["partition"]: msgpack_decoder(PartitionEntry).decode(bytes(row["entry"])) for row in made
            }
    return entries
