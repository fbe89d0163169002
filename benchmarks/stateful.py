"""How fast a stream keeps a running count and sum, in Spark's own ways and in ours, side by side in one run.

    python benchmarks/stateful.py                                    native and ours, on Spark 3.5; five minutes or so
    python benchmarks/stateful.py --contestants native aggregate --profile       and where the time of a batch goes
    .venv42/bin/python benchmarks/stateful.py                        Spark 4's transformWithState too; half an hour
    .venv42/bin/python benchmarks/stateful.py --contestants rows spark_rows --batches 9 --turn 3

Each contestant is one streaming query on RayDP with two executors of one core, with the same number of state
partitions, a checkpoint on the local disk, and the sink "noop". Each gets the same batches: a directory with one
parquet file per executor appears in its input directory, and the trigger is Spark's default (a batch as soon as there
is one), one such directory per micro-batch. Contestants take turns; a turn is some batches (``--turn``) back to back,
so that work which a contestant leaves for after a batch falls into its own next batch. A slow contestant (the pandas
forms, and Spark's own Python forms) gets one batch a turn, and one to warm up. Between turns a query only looks into
its empty directory, every half second.

The time of a batch is Spark's ``triggerExecution``. Of every batch, counted or not, the number of rows and a hash of
them are compared with what numpy computes; no time is shown if one differs. CPU is that of all processes below this
one, which a busy machine hardly changes. Native runs on the RocksDB provider with changelog checkpointing, and without
the count of its rows, as Spark's guide advises for speed (``--native-row-count`` leaves the count on, as by default).

"stateless" is not a contestant: the same shuffle and a Python stage that adds up each batch alone. It shows what
remains if state costs nothing, which is the limit of any operator in Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyspark
import stateful_profile
from lanes import Input, Lane, available, session, start
from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stateful_queries import CONTESTANTS, YARDSTICKS
from workloads import Workload

ROW_COUNT = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"
console = Console(width=max(Console().width, 140), highlight=False)


def measure(spark: SparkSession, options: argparse.Namespace, root: Path) -> list[Lane]:
    """Run all batches of all contestants, in turns."""
    chosen = [CONTESTANTS[name] for name in options.contestants]
    turns = max(1, -(-options.batches // options.turn))
    total = options.warm_up + turns * options.turn
    with console.status(f"Making {total} batches of {options.rows:,} rows"):
        given = Input(root / "batches", Workload("long", "a long key", options.rows, options.keys))
        for _ in range(total):
            given.add()
    lanes: list[Lane] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    work = sum((1 if c.is_slow else options.warm_up) + turns * (1 if c.is_slow else options.turn) for c in chosen)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=work)
        for contestant in chosen:
            bar.update(task, description=f"warming up {contestant.name}")
            lane = Lane(contestant, root / contestant.name, given)
            start(spark, lane, {ROW_COUNT: "true"} if options.native_row_count else None)
            lanes.append(lane)
            for _ in range(1 if contestant.is_slow else options.warm_up):
                lane.run(1)
                bar.advance(task)
            lane.check()
            lane.counted_from = len(lane.progress)
        for turn in range(turns):
            first = turn % len(lanes)
            for lane in (*lanes[first:], *lanes[:first]):
                batches = 1 if lane.contestant.is_slow else options.turn
                bar.update(task, description=f"turn {turn + 1} of {turns}: {lane.contestant.name}")
                before = stateful_profile.cpu_seconds()
                lane.run(batches)
                bar.advance(task, batches)
                lane.note_cpu(before, batches)
                if options.profile:
                    lane.note_store()
    for lane in lanes:
        lane.check()
    return lanes


def show(lanes: Sequence[Lane], options: argparse.Namespace) -> None:
    """Print medians, and how many times as fast as the others each contestant is."""
    table = Table(
        title=f"Spark {pyspark.__version__}: {options.rows:,} rows over {options.keys:,} keys a batch, "
        f"{options.partitions} partitions",
        title_justify="left",
    )
    table.add_column("contestant")
    yardsticks = [lane for lane in lanes if lane.contestant.name in YARDSTICKS]
    for heading in (
        "batches",
        "median s",
        "min to max s",
        "CPU s",
        "M rows/s",
        *(f"times {y.contestant.name}" for y in yardsticks),
    ):
        table.add_column(heading, justify="right")
    for lane in lanes:
        seconds = lane.seconds
        median = statistics.median(seconds)
        table.add_row(
            lane.contestant.name,
            str(len(seconds)),
            f"{median:.2f}",
            f"{min(seconds):.2f} to {max(seconds):.2f}",
            f"{lane.cpu_seconds:.2f}",
            f"{options.rows / median / 1e6:.2f}",
            *("" if y is lane else _ratio(y, lane) for y in yardsticks),
        )
    console.print(table)
    console.print(
        "times X: median of X over that of the row, and in brackets the middle half of the ratios of their turns. "
        f"Load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. All results were equal."
    )


def _ratio(yardstick: Lane, lane: Lane) -> str:
    """Return how many times as fast ``lane`` is; the spread is that over turns, which lie close together in time."""
    overall = statistics.median(yardstick.seconds) / statistics.median(lane.seconds)
    count = min(len(yardstick.seconds), len(lane.seconds))
    turns = [_nth(yardstick.seconds, i, count) / _nth(lane.seconds, i, count) for i in range(count)]
    if count < 2:
        return f"{overall:.2f}"
    low, _, high = statistics.quantiles(turns, n=4, method="inclusive")
    return f"{overall:.2f} ({low:.2f} to {high:.2f})"


def _nth(seconds: list[float], i: int, count: int) -> float:
    """Return the median of the i-th of ``count`` equal parts."""
    return statistics.median(seconds[i * len(seconds) // count : max((i + 1) * len(seconds) // count, 1)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = available()
    # applyInPandasWithState alone takes as long as all others together.
    unusual = ("native_hdfs", "spark_pandas_state", "aggregate_partial")
    usual = [n for n in names if CONTESTANTS[n].gives == "totals" and n not in unusual]
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=names,
        default=usual,
        metavar="NAME",
        help="some of " + ", ".join(f"{name} ({CONTESTANTS[name].label})" for name in names),
    )
    parser.add_argument("--rows", type=int, default=500_000, help="rows per batch (default 500000)")
    parser.add_argument("--keys", type=int, default=100_000, help="keys (default 100000)")
    parser.add_argument("--batches", type=int, default=12, help="batches that count (default 12)")
    parser.add_argument("--turn", type=int, default=3, help="batches in a row of one contestant (default 3)")
    parser.add_argument(
        "--warm-up", type=int, default=8, help="batches before, not counted, in which the JVM compiles (default 8)"
    )
    parser.add_argument("--partitions", type=int, default=2, help="state partitions (default 2, one per core)")
    parser.add_argument("--provider", choices=("rocksdb", "file"), default="rocksdb", help="ours (default rocksdb)")
    parser.add_argument("--native-row-count", action="store_true", help="let Spark's RocksDB count its rows")
    parser.add_argument(
        "--conf", action="append", default=[], metavar="KEY=VALUE", help="another Spark setting, for all"
    )
    parser.add_argument("--profile", action="store_true", help="show where the time of a batch goes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    configs = dict(c.split("=", 1) for c in options.conf)
    with (
        tempfile.TemporaryDirectory(prefix="statestore-bench-") as temporary,
        session(options.partitions, provider=options.provider, configs=configs) as spark,
    ):
        lanes = measure(spark, options, Path(temporary))
        show(lanes, options)
        if options.profile:
            for lane in lanes:
                numbers = [p["batchId"] for p in lane.counted]
                sections = {
                    "Spark's query progress": stateful_profile.spark_steps(lane.counted),
                    **stateful_profile.stages(spark, lane.contestant.name, numbers),
                    "Spark's state operator": stateful_profile.native_steps(lane.counted),
                    "state store": lane.store_steps,
                    "CPU per batch": lane.cpu,
                }
                stateful_profile.show(
                    console, f"{lane.contestant.name}: milliseconds, unless a line says otherwise", sections
                )
        if options.json:
            options.json.write_text(json.dumps({lane.contestant.name: lane.counted for lane in lanes}))


if __name__ == "__main__":
    main()
