"""Processors of all forms, and a task that runs one over some rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle
from pyspark.sql import Row

from backends.encoding.keys import decode_keys
from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge.stateful.arrow_task import ArrowLogic, Declaring
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.process_task import Mode, ProcessLogic, ProcessorState, TaskInput
from spark_bridge.stateful.stateful_processor import (
    ArrowBatch,
    ArrowResult,
    ArrowStatefulProcessor,
    ArrowStatefulProcessorHandle,
    StatefulProcessor,
    TimerValues,
)
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import Logic
from tests.spark_bridge.operators.operator_runs import TS, OperatorRun, batch_of

KEYS = pa.schema([("user", pa.string())])
ROWS = pa.schema([("user", pa.string()), ("ts", TS), ("v", pa.int64())])
INPUT = TaskInput(struct_of("user string, ts timestamp, v long"), KEYS)
OUTPUT = struct_of("user string, n long, total long")
USERS = ["ann", "bob", "eve", None, ""]
TINY = Limits(memory=400, step_rows=3, step_bytes=300, fan_in=2)
NO_TIME = BatchTimes()
Answer = Iterator[Any] | list[Any] | None


class Totals(StatefulProcessor):
    """Number and sum of the rows of each key."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.state = handle.getValueState("totals", "n long, total long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        n, total = self.state.get() or (0, 0)
        for row in rows:
            assert (row.user,) == key
            n, total = n + 1, total + row.v
        self.state.update((n, total))
        yield Row(total=total, user=key[0], n=n)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        n, total = self.state.get() or (0, 0)
        self.state.update((n + 1, total + initialState.v))


class PandasTotals(Totals):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Any:
        n, total = self.state.get() or (0, 0)
        for frame in rows:
            assert frame.index.tolist() == list(range(len(frame)))
            assert set(frame["user"]) == {key[0]}
            n, total = n + len(frame), total + int(frame["v"].sum())
        self.state.update((n, total))
        yield pd.DataFrame({"total": [total], "user": [key[0]], "n": [n]})

    def handleInitialState(self, key: Any, initialState: Any, timerValues: TimerValues) -> None:
        n, total = self.state.get() or (0, 0)
        self.state.update((n + len(initialState), total + int(initialState["v"].sum())))


class ArrowTotals(ArrowStatefulProcessor):
    def init(self, handle: ArrowStatefulProcessorHandle) -> None:
        handle.declare_state("n long, total long", name="totals")

    def process(self, batch: ArrowBatch) -> ArrowResult:
        assert batch.rows["user"].combine_chunks() == batch.keys["user"].combine_chunks().take(batch.key_index)
        rows = batch.rows.append_column("key", batch.key_index).group_by("key", use_threads=False)
        sums = rows.aggregate([("user", "count", pc.CountOptions(mode="all")), ("v", "sum")])
        state = pa.table(
            {
                "total": pc.add(pc.fill_null(batch.state["total"], 0), sums["v_sum"]),
                "n": pc.add(pc.fill_null(batch.state["n"], 0), sums["user_count"]),
            }
        )
        return ArrowResult(output=state.append_column("user", batch.keys["user"]), state=state)

    def handle_initial_state(self, batch: ArrowBatch) -> ArrowResult:
        return ArrowResult(state=self.process(batch).state)


def run_of(logic: Logic, processor: Any, time_mode: str = "none", num_partitions: int = 1) -> OperatorRun:
    """Run an operator with the declarations of the processor."""
    driver = ProcessorState(KEYS, time_mode, None)
    processor.init(driver.handle)
    return OperatorRun(logic, OperatorSchema(driver.declare()), KEYS.names, num_partitions)


def process(
    processor: Any,
    mode: Mode = "rows",
    *,
    output: str = "user string, n long, total long",
    time_mode: str = "none",
    num_partitions: int = 1,
    **fields: Any,
) -> OperatorRun:
    """A processor's operator. It reaches the tasks as Spark sends it."""
    declaring = cloudpickle.loads(cloudpickle.dumps(processor))
    logic = ProcessLogic(processor, mode, time_mode, fields.pop("input", INPUT), struct_of(output), **fields)
    return run_of(logic, declaring, time_mode, num_partitions)


def in_arrow(processor: ArrowStatefulProcessor, *, time_mode: str = "none", **fields: Any) -> OperatorRun:
    """The operator of a processor in columns."""
    num_partitions = fields.pop("num_partitions", 1)
    logic = ArrowLogic(processor, time_mode, INPUT, ROWS, fields.pop("output", OUTPUT), **fields)
    return run_of(logic, Declaring(processor), time_mode, num_partitions)


FORMS: dict[str, Callable[..., OperatorRun]] = {
    "rows": lambda **f: process(Totals(), "rows", **f),
    "pandas": lambda **f: process(PandasTotals(), "pandas", **f),
    "arrow": lambda **f: in_arrow(ArrowTotals(), **f),
}


def rows(*given: tuple[str | None, int]) -> pa.RecordBatch:
    return batch_of(ROWS, [(user, None, v) for user, v in given])


def stored(run: OperatorRun, family: str) -> list[dict[str, Any]]:
    """Keys and values of a family."""
    found = []
    schema = run.schema.families[family]
    for provider in run.providers:
        store = provider.get_read_store(provider.latest_version())
        for pairs in store.scan(b"", None, family):
            keys = decode_keys(pairs.column(0), schema.key).to_pylist()
            found += [{**k, **v} for k, v in zip(keys, schema.decode_values(pairs.column(1)).to_pylist(), strict=True)]
        store.abort()
    return found


def in_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: (row["user"] is not None, row["user"], *map(str, row.values())))
