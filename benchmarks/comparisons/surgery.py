"""The cost of rewriting a large state row by row, compared with Spark's offline repartition, which changes no row."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.comparison import VENV42, Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps

from comparisons.savepoints import FEW, FILL_ROWS, MANY, NATIVE, OURS, repartition_seconds
from comparisons.streams import AT_ONCE, EQUAL, ON_CLUSTER, directory

if TYPE_CHECKING:
    import pyarrow as pa
    from lanes import Lane

REWRITE, REPARTITION = "rewrite_state", "Spark's repartition"
SAME_KEY, OTHER_KEY = "a column of every row changes", "the key of every row becomes a string"
OPERATOR = "totals"
OBJECT_STORE = 4 << 30
"""Bytes of Ray's object store; by itself Ray would take 30 % of the memory."""
TASKS = 2
"""As many as Spark has cores."""


def run(size: Size, steps: Steps) -> Measured:
    """Fill the same state with both, stop them, and rewrite or repartition it in turns."""
    import lanes
    from ray import cloudpickle
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have this directory on their path
    with directory() as root, lanes.session(FEW, configs=AT_ONCE, object_store_memory=OBJECT_STORE) as spark:
        measured = Measured(
            {
                REWRITE: Contestant("`rewrite_state`, a function of Arrow batches for every row", {}, True),
                REPARTITION: Contestant("Spark's offline repartition, which moves rows and changes none"),
            },
            [],
            [
                f"All on {ON_CLUSTER}. Both have two tasks of one core at a time; no query runs meanwhile.",
                EQUAL,
                "Ray's object store has 4 GiB, Spark's executors have 1.5 GB each.",
                "Each changes 4 partitions to 8, and 8 to 4. Rows and sums of rewritten state are checked.",
            ],
        )
        steps.expect(2 + size["turns"])
        given = lanes.Input(root / "batches", Workload("long", "a long key", size["rows"], size["keys"]))
        fills = given.fill(0, size["keys"], FILL_ROWS)
        running = {name: lanes.Lane(CONTESTANTS[name], root / name, given) for name in (OURS, NATIVE)}
        for lane in running.values():
            steps.now(f"filling {lane.contestant.name}")
            lanes.start(spark, lane)
            lane.run(fills)
            lane.check()
            lane.stop()
            steps.advance()
        found: dict[str, dict[str, list[list[float]]]] = {SAME_KEY: {}, OTHER_KEY: {}}
        for turn in range(size["turns"]):
            after = (MANY, FEW)[turn % 2]
            steps.now(f"turn {turn + 1} of {size['turns']}")
            for case, function in ((SAME_KEY, _one_more), (OTHER_KEY, _string_key)):
                seconds = _rewrite(running[OURS], root / "rewritten", function, after, size["keys"])
                found[case].setdefault(REWRITE, []).append([seconds])
            theirs = repartition_seconds(spark, running[NATIVE], after, measured)
            if theirs is not None:
                for its in found.values():
                    its.setdefault(REPARTITION, []).append([theirs])
            steps.advance()
        measured.cases += [Case(case, "s", its) for case, its in found.items()]
    return measured


def _rewrite(lane: Lane, new: Path, function: Any, partitions: int, keys: int) -> float:
    """Return the seconds of one rewriting, and remove what it made."""
    import pyarrow.compute as pc

    from spark_bridge import rewrite_state, state_batches

    began = time.perf_counter()
    report = rewrite_state(
        str(lane.root / "checkpoint"),
        OPERATOR,
        function,
        str(new),
        num_partitions=partitions,
        concurrency=TASKS,
        ray_remote_args={"num_cpus": 0},  # Spark's executors, which stand still, have the CPUs
    )
    seconds = time.perf_counter() - began
    before, after = (
        sum(pc.sum(batch["n"]).as_py() for batch in state_batches(str(place), OPERATOR))
        for place in (lane.root / "checkpoint", new)
    )
    wanted = before + keys if function is _one_more else before
    if (report.rows_written[OPERATOR, "default"], after) != (keys, wanted):
        raise AssertionError(f"{report.rows_written} rows with {after} were written, not {keys} with {wanted}.")
    shutil.rmtree(new)
    return seconds


def _one_more(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow.compute as pc

    return batch.set_column(1, batch.schema.names[1], pc.add(batch.column(1), 1))


def _string_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    return batch.set_column(0, batch.schema.names[0], batch.column(0).cast(pa.string()))


COMPARISONS = (
    Comparison(
        name="surgery",
        title="Rewriting state",
        about="A stopped query's state is written anew, with every row changed by a function, into a new checkpoint. "
        "Spark has no such operation; its offline repartition (4.2) reads and writes the same rows unchanged.",
        run=run,
        sizes={
            "full": {"keys": 10_000_000, "rows": 100_000, "turns": 2},
            "smoke": {"keys": 20_000, "rows": 5_000, "turns": 2},
        },
        minutes={"full": 25, "smoke": 4},
        environments=(VENV42,),
        in_smoke=False,
        picture="bars",
    ),
)
