"""An operator's logic over several partitions and batches, on real providers in this process, without Spark."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from backends import FileStateStoreProvider, StateStoreConf, StateStoreId
from backends.encoding.key_groups import key_groups, partition_range
from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.providers.standalone_provider import LocalStateStoreProvider
from coordinator_actor.messages import BatchTimes, OperatorFigures
from spark_bridge.stateful.testing import LocalStateAccess
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.state_task import Logic

NUM_GROUPS = 16
TS = pa.timestamp("us", "UTC")
WINDOW = pa.struct([pa.field("start", TS), pa.field("end", TS)])
CONF = StateStoreConf(fsync=False, compression="none", track_total_number_of_rows=False)
SECOND = 1_000_000


class OperatorRun:
    """One operator of ``num_partitions``, batch by batch. ``keys`` are the columns that key groups come from, as
    stored.
    """

    def __init__(
        self,
        logic: Logic,
        schema: OperatorSchema,
        keys: Sequence[str],
        num_partitions: int,
        provider: type[LocalStateStoreProvider] = FileStateStoreProvider,
    ) -> None:
        self.logic = logic
        self.schema = OperatorSchema.from_json(schema.to_json())
        self.keys = list(keys)
        self.num_partitions = num_partitions
        root = f"memory://{uuid.uuid4().hex}"
        self.providers = [provider(StateStoreId(root, "op", p), CONF) for p in range(num_partitions)]
        self.figures = OperatorFigures()

    def batch(self, rows: pa.RecordBatch, times: BatchTimes, cuts: Iterable[int] = ()) -> list[dict[str, Any]]:
        """Process a batch in pieces cut at ``cuts``, and return the rows that the tasks emit."""
        emitted: list[dict[str, Any]] = []
        figures = []
        groups = key_groups(rows.select(self.keys), NUM_GROUPS)
        for p, provider in enumerate(self.providers):
            of_task = rows.filter(pa.array(groups * self.num_partitions // NUM_GROUPS == p))
            bounds = [0, *sorted(min(c, of_task.num_rows) for c in cuts), of_task.num_rows]
            pieces = [of_task.slice(a, b - a) for a, b in pairwise(bounds) if b > a]
            own = partition_range(p, self.num_partitions, NUM_GROUPS)
            store = LocalStateAccess(provider, self.schema, times, own, NUM_GROUPS)
            for output in self.logic.process(iter(pieces), store, StepTimer()):
                assert store.figures is not None, "output came before the commit"
                emitted += output.to_pylist()
            assert store.figures is not None
            figures.append(store.figures)
        names = ("num_rows", "num_rows_updated", "num_rows_removed", "num_rows_dropped_by_watermark")
        every = {name for f in figures for name in f.custom}
        custom = {name: sum(f.custom.get(name, 0) for f in figures) for name in every}
        self.figures = OperatorFigures(*(sum(getattr(f, name) for f in figures) for name in names), custom)
        return emitted

    def restart(self) -> None:
        """Continue with new providers, which load the state from storage."""
        for p, provider in enumerate(self.providers):
            provider.close()
            self.providers[p] = type(provider)(provider.id, CONF)

    def close(self) -> None:
        """Close the providers."""
        for provider in self.providers:
            provider.close()

    def size(self, family: str) -> int:
        """The number of stored rows of a family."""
        return len(self.stored_keys(family))

    def stored_keys(self, family: str) -> list[dict[str, Any]]:
        """The stored keys of a family."""
        return [key for key, _ in self.stored_rows(family)]

    def stored_rows(self, family: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The stored rows of a family: key and value."""
        rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
        schema = self.schema.families[family]
        for provider in self.providers:
            store = provider.get_read_store(provider.latest_version())
            for pairs in store.scan(b"", None, family) if provider.latest_version() else ():
                keys, values = decode_keys(pairs.column(0), schema.key), schema.decode_values(pairs.column(1))
                rows += zip(keys.to_pylist(), values.to_pylist(), strict=True)
            store.abort()
        return rows


class Watermark:
    """Spark's watermark of a query with one source: the greatest time seen less a delay, from the next batch on."""

    def __init__(self, delay_s: int) -> None:
        self.delay_s = delay_s
        self.late_s = self.now_s = 0

    def times(self) -> BatchTimes:
        """The times of the batch to come."""
        return BatchTimes(0, self.now_s * 1000, self.late_s * 1000)

    def advance(self, seen_s: Iterable[int | None]) -> None:
        """Advance to the next batch."""
        greatest = max((s for s in seen_s if s is not None), default=0)
        self.late_s, self.now_s = self.now_s, max(self.now_s, greatest - self.delay_s)


def column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values as a column; times are seconds, windows pairs of them."""
    if kind == TS:
        return pa.array([None if v is None else v * SECOND for v in values], pa.int64()).cast(TS)
    if kind == WINDOW:
        return pa.StructArray.from_arrays([column([v[i] for v in values], TS) for i in (0, 1)], fields=list(WINDOW))
    return pa.array(values, kind)


def batch_of(schema: pa.Schema, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    """Rows as a batch; see ``column``."""
    return pa.RecordBatch.from_arrays(
        [column([r[i] for r in rows], f.type) for i, f in enumerate(schema)], schema=schema
    )


def seconds(value: Any) -> Any:
    """Convert the output of a task: times become seconds, windows become pairs of seconds."""
    if isinstance(value, dict):
        return tuple(seconds(v) for v in value.values())
    return int(value.timestamp()) if hasattr(value, "timestamp") else value
