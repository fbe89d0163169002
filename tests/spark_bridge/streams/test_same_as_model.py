"""Processors on random input give what a plain model gives, without Spark: the task's logic on real state stores.

The model is itself compared with Spark's ``transformWithState`` in ``test_same_as_spark``.
"""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge import StatefulProcessor
from spark_bridge.stateful.ddl import struct_of
from spark_bridge.stateful.process_task import ProcessLogic, ProcessorState, TaskInput
from spark_bridge.stateful.state_values import RowCodec
from spark_bridge.task.external_sort import Limits
from spark_bridge.task.state_task import EventTime
from tests.effort import effort
from tests.spark_bridge.operators.operator_runs import OperatorRun
from tests.spark_bridge.streams.processors import (
    BY,
    INITIAL,
    INPUT,
    OUTPUT,
    Commands,
    Model,
    PandasCommands,
    based_on,
    ordered,
    random_batches,
    random_starts,
)

SMALL = Limits(memory=4_000, step_rows=7)
"""Of rows that fit into memory, and of a step: so that keys and their rows come in many parts, by way of the disk."""


TIME_MODES = ["none", "eventTime", "processingTime"]


USUAL = [(Commands, 0, "eventTime"), (PandasCommands, 1, "processingTime")]
"""Each form of rows once, and each kind of timers; without timers are most tests of ``test_process_task.py``."""
ALL = [(*p, mode) for p in ((Commands, 0), (Commands, 1), (PandasCommands, 1)) for mode in TIME_MODES]


@pytest.mark.parametrize(("processor", "seed", "time_mode"), effort(USUAL, ALL))
def test_random_commands(processor: type, seed: int, time_mode: str) -> None:
    check_random_commands(processor, time_mode, seed, batches=effort(2, 4))


@pytest.mark.thorough  # otherwise: test_random_commands
@pytest.mark.long
@pytest.mark.parametrize("time_mode", TIME_MODES)
@pytest.mark.parametrize("processor", [Commands, PandasCommands], ids=["rows", "pandas"])
def test_many_random_commands(processor: type, time_mode: str) -> None:
    for seed in range(2, 10):
        check_random_commands(processor, time_mode, seed, batches=8)


def check_random_commands(processor: type, time_mode: str, seed: int, batches: int) -> None:
    """Run random batches through both and compare."""
    rng = random.Random(seed)
    codec = RowCodec(struct_of(INPUT))
    keys = pa.schema([codec.schema.field(name) for name in BY])
    made = based_on(StatefulProcessor, processor, time_mode=time_mode)
    declaring = ProcessorState(keys, time_mode.lower(), None)
    made.init(declaring.handle)
    schema = OperatorSchema(declaring.declare(), tuple(BY))

    limits = SMALL if seed % 2 else Limits()
    event_time = EventTime("ts") if time_mode == "eventTime" else None
    mode = "pandas" if processor is PandasCommands else "rows"
    common = {"processor": made, "mode": mode, "time_mode": time_mode.lower(), "limits": limits}
    logic = ProcessLogic(**common, input=TaskInput(codec.struct, keys, event_time), output=struct_of(OUTPUT))
    starts = RowCodec(struct_of(INITIAL))
    initial = ProcessLogic(**common, input=TaskInput(starts.struct, keys), output=struct_of(OUTPUT), is_initial=True)

    model = Model(time_mode)
    run = OperatorRun(initial, schema, BY, num_partitions=rng.choice([1, 3]))
    first = random_starts(time_mode)
    assert run.batch(starts.to_batch(first), BatchTimes(model.now)) == []
    model.start_with(first)
    run.logic = logic
    for number, commands in enumerate(random_batches(seed, time_mode, batches)):
        rows = list(commands)
        rng.shuffle(rows)
        times = BatchTimes(model.now, model.watermark, model.late_watermark)
        found = run.batch(codec.to_batch(rows), times, [rng.randrange(60) for _ in range(3)])
        expected = model.run(commands)
        assert ordered((r["k"], r["g"], r["seq"], r["found"]) for r in found) == expected, (
            f"batch {number} of seed {seed}"
        )
        assert run.figures.num_rows_dropped_by_watermark == model.num_late
