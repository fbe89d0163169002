"""Queries of processors whose batches a test runs itself: the real coordinator, a real host, real state variables.

There is neither Ray nor Spark. Every operation is done on the state and on a model of it, so that a test knows
what every version must hold.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups, partition_of, partition_range
from backends.encoding.keys import KeyRange, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from coordinator_actor.messages import BatchTimes, OperatorFigures, OperatorSpec
from spark_bridge.host.host import Host
from spark_bridge.stateful.process_task import ProcessorState
from spark_bridge.task.executor import StepTimer
from spark_bridge.task.state_task import Logic
from spark_bridge.transport.protocol import GetCommand, ScanCommand, TaskIdentity
from tests.coordinator_actor.coordinator_world import World
from tests.spark_bridge.host.host_steps import opened

G = 16
KEYS = pa.schema([("user", pa.string()), ("shard", pa.int32())])
Key = tuple[str, int]


class HostAccess:
    """``StateAccess`` over a host in this process, for one task."""

    def __init__(self, host: Host, task: TaskIdentity, opened: Any, n: int) -> None:
        self.batch_id = task.batch_id
        self.times: BatchTimes = opened.times
        self.schema = OperatorSchema.from_json(opened.schema)
        self.key_groups = partition_range(task.partition, n, G)
        self.num_key_groups = G
        self._host, self._task = host, task
        self._staged: dict[str, list[tuple[pa.BinaryArray, pa.BinaryArray]]] = {}

    def get_many(self, keys: pa.BinaryArray, column_family: str = "default") -> pa.BinaryArray:
        task = self._task
        command = GetCommand(task.run_id, task.operator, task.partition, task.batch_id, column_family)
        return self._host.reads.get_many(command, keys)

    def scan(
        self, ranges: Sequence[KeyRange], column_family: str = "default", limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        task = self._task
        command = ScanCommand(task.run_id, task.operator, task.partition, task.batch_id, column_family, limit)
        return self._host.reads.scan(command, ranges)

    def stage(self, keys: pa.BinaryArray, values: pa.BinaryArray, column_family: str = "default") -> None:
        self._staged.setdefault(column_family, []).append((keys, values))

    def commit(self, figures: OperatorFigures, timings: dict[str, float] | None = None) -> None:
        families = {
            family: SortedPairs.last_wins(
                pa.concat_arrays([k for k, _ in parts]), pa.concat_arrays([v for _, v in parts])
            )
            for family, parts in self._staged.items()
        }
        self._host.commit(self._task, Changes({"default": SortedPairs.empty(), **families}), timings or {}, figures)


class ModelVariable:
    """A state variable as Python values; the methods are those of the real ones."""

    def __init__(self) -> None:
        self.of: dict[Key, Any] = {}
        self.key: Key = ("", 0)

    def update(self, value: tuple[Any, ...]) -> None:
        self.of[self.key] = value

    def clear(self) -> None:
        self.of.pop(self.key, None)

    def put(self, elements: list[tuple[Any, ...]]) -> None:
        self.of[self.key] = list(elements)

    def appendList(self, elements: list[tuple[Any, ...]]) -> None:
        self.of.setdefault(self.key, []).extend(elements)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self.of.setdefault(self.key, {})[key] = value

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self.of.get(self.key, {}).pop(key, None)
        if not self.of.get(self.key):
            self.of.pop(self.key, None)

    def registerTimer(self, expiry: int) -> None:
        self.of.setdefault(self.key, set()).add(expiry)

    def deleteTimer(self, expiry: int) -> None:
        self.of.get(self.key, set()).discard(expiry)


class Everything:
    """A processor with a variable of every kind; ``do`` handles the current key."""

    def init(self, handle: Any) -> None:
        self.timers = handle
        self.total = handle.getValueState("total", "n LONG, user STRING")
        self.visits = handle.getListState("visits", "page STRING, at LONG")
        self.pages = handle.getMapState("pages", "page STRING, user STRING", "n INT, note STRUCT<text: STRING>")


NAMES = ("total", "visits", "pages", "timers")


class Model:
    """What ``Everything`` keeps."""

    def __init__(self) -> None:
        self.total, self.visits, self.pages, self.timers = (ModelVariable() for _ in NAMES)

    def at(self, key: Key) -> Model:
        for name in NAMES:
            getattr(self, name).key = key
        return self

    def snapshot(self) -> dict[str, dict[Key, Any]]:
        return {name: pickle.loads(pickle.dumps(getattr(self, name).of)) for name in NAMES}


Operation = Callable[[Any], None]


class Query:
    """A query with the operator ``op``, run batch by batch. ``version`` is the last completed one."""

    def __init__(
        self, root: Path, schema: OperatorSchema, kind: str, n: int = 2, backend: str = "file", run: str = "run1"
    ) -> None:
        self.world = World(root)
        self.n = n
        self.run = run
        self.version = 0
        spec = OperatorSpec("op", n, schema.to_json(), backend, kind, uses_time=True)
        self.c = self.world.coordinator(0)
        self.host: Any = Host(
            self.world.host(0, run),
            self.c,  # type: ignore[arg-type]
            root / f"local-{run}",
            conf=StateStoreConf(provider=backend, fsync=False),
            open_storage=self.world.storage,
        )
        self.host.register()
        answer = self.c.register_query(self.world.registration(run, n, operators=(spec,), key_groups=G))
        assert answer.refusal is None, answer.refusal
        self.version = answer.completed_version

    @property
    def location(self) -> str:
        return str(self.world.root / "ck")

    def run_batch(self, timestamp_ms: int, watermark_ms: int, work: Callable[[HostAccess, int], None]) -> None:
        """Run one batch: ``work`` is given the state of each partition, and the partition; then complete it."""
        batch = self.version
        offsets = self.world.root / "ck" / "offsets" / str(batch)
        offsets.parent.mkdir(parents=True, exist_ok=True)
        times = f'{{"batchWatermarkMs":{watermark_ms},"batchTimestampMs":{timestamp_ms},"conf":{{}}}}'
        offsets.write_text(f"v1\n{times}\n{{}}")
        for p in range(self.n):
            task = TaskIdentity(self.run, "op", p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex)
            work(HostAccess(self.host, task, opened(self.host, task), self.n), p)
        self.world.commit_spark(batch)
        self.c.batch_committed(self.run, batch)
        self.version += 1

    def process(self, logic: Logic, keys: Sequence[str], rows: pa.RecordBatch, watermark_ms: int = 0) -> None:
        """A batch of an operator's logic; ``keys`` are the columns that key groups come from."""
        groups = key_groups(rows.select(list(keys)), G)

        def work(access: HostAccess, p: int) -> None:
            own = rows.filter(pa.array(groups * self.n // G == p))
            for _ in logic.process(iter([own] if own.num_rows else []), access, StepTimer()):
                pass

        self.run_batch(1000, watermark_ms, work)

    def stop(self) -> None:
        """The query ends."""
        self.c.deactivate_instances(self.run)
        self.close()

    def close(self) -> None:
        self.host.close()


class Flow(Query):
    """A query of a processor. ``at`` is what each version of ``Everything`` must hold, ``times`` the batches'
    timestamps.
    """

    def __init__(
        self,
        root: Path,
        processor: Callable[[], Any] = Everything,
        n: int = 2,
        backend: str = "file",
        run: str = "run1",
    ) -> None:
        declaring = ProcessorState(KEYS, "processingtime", None)
        processor().init(declaring.handle)
        schema = OperatorSchema(declaring.declare(), tuple(KEYS.names))
        super().__init__(root, schema, "transform_with_state", n, backend, run)
        self.processor = processor
        self.model = Model()
        self.at = {0: self.model.snapshot()}
        self.times: dict[int, int] = {}

    def batch(self, operations: dict[Key, Operation]) -> None:
        """Run one batch, and complete it."""
        keys = pa.record_batch([pa.array(c) for c in zip(*operations, strict=True)] or [[], []], schema=KEYS)
        groups = key_groups(keys, G)
        ordered = sorted(zip(encode_keys(keys, groups).to_pylist(), groups.tolist(), operations, strict=True))

        def work(access: HostAccess, p: int) -> None:
            own = [(encoded, key) for encoded, group, key in ordered if partition_of(group, G, self.n) == p]
            processor = self.processor()
            state = ProcessorState(KEYS, "processingtime", access)
            processor.init(state.handle)
            rows = pa.record_batch(
                [pa.array([key[i] for _, key in own], f.type) for i, f in enumerate(KEYS)], schema=KEYS
            )
            state.begin(pa.array([encoded for encoded, _ in own], pa.binary()), rows)
            for i, (_, key) in enumerate(own):
                state.set_key(i)
                operations[key](processor)
            state.end()
            state.finish()
            access.commit(OperatorFigures())

        self.run_batch(self.times.get(self.version, 1000 * (self.version + 1)), 0, work)
        if self.processor is Everything:
            for key, operation in operations.items():
                operation(self.model.at(key))
        self.at[self.version] = self.model.snapshot()

    def restarted(self, run: str, n: int, backend: str, processor: Callable[[], Any] | None = None) -> Flow:
        """The query stopped, and started again with another layout."""
        self.stop()
        again = Flow(self.world.root, processor or self.processor, n, backend, run)
        again.model, again.at, again.times = self.model, self.at, self.times
        return again
