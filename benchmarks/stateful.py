"""How fast a stream's running count and sum is, in Spark's own ways and in ours, side by side in one run.

    python benchmarks/stateful.py                                    native and ours, on Spark 3.5; five minutes or so
    python benchmarks/stateful.py --contestants native aggregate --profile       and where the time of a batch goes
    .venv42/bin/python benchmarks/stateful.py                        Spark 4's transformWithState too; half an hour
    .venv42/bin/python benchmarks/stateful.py --contestants rows spark_rows --batches 9 --turn 3

Each contestant is one streaming query on RayDP with two executors of one core, with the same number of state partitions,
a checkpoint on the local disk, and the sink "noop". Each gets the same batches: a directory with one parquet file per
executor appears in its input directory, and the trigger is Spark's default (a batch as soon as there is one), one such
directory per micro-batch. Contestants take turns; a turn is some batches (``--turn``) back to back, so that what a
contestant leaves for after a batch falls into its own next one. A slow one (the pandas forms, and Spark's own Python forms)
gets one batch a turn, and one to warm up. Between turns a query only looks into its empty directory, every half second.

The time of a batch is Spark's ``triggerExecution``. Of every batch, those that are not counted too, the number of rows and
a hash of them are compared with what numpy says; no time is shown if one differs. CPU is that of all processes below this
one, which a busy machine hardly changes. Native runs on the RocksDB provider with changelog checkpointing, and without the
count of its rows, as Spark's guide advises for speed (``--native-row-count`` leaves it on, as it is by default).

"stateless" is no contestant: the same shuffle and a Python stage that adds up each batch alone. It shows what is left if
state costs nothing, and so the limit of any operator in Python.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import stateful_profile
import stateful_queries
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from stateful_queries import CHECK, CONTESTANTS, INPUT, Contestant, Longs, checked, expected_checks

EXECUTORS = 2
BATCH_TIMEOUT = 600.0
LOOK_EVERY = 0.05
SPARK_4 = 4
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
console = Console(width=max(Console().width, 140), highlight=False)


@dataclass
class Input:
    """Batches made once: ``directories[i]`` holds the files of batch i, ``checks[keeps_state][i]`` what must come of it."""

    directories: list[Path]
    checks: dict[bool, list[tuple[int, int]]]


def make_input(root: Path, batches: int, rows: int, keys: int) -> Input:
    """Random users, each as likely as any other, and amounts in cents."""
    rng = np.random.default_rng(20130101)
    directories = []
    made: list[tuple[Longs, Longs]] = []
    for i in range(batches):
        users, amounts = rng.integers(0, keys, rows), rng.integers(1, 100_000, rows)
        made.append((users, amounts))
        directories.append(root / f"{i:06}")
        directories[-1].mkdir(parents=True)
        for part in range(EXECUTORS):
            columns = [pa.array(values[part::EXECUTORS]) for values in (users, amounts)]
            path = directories[-1] / f"{part}.parquet"
            pq.write_table(pa.table(columns, ["user", "amount"]), path)
            # Spark takes files in the order of their times.
            os.utime(path, ns=((seconds := 1_700_000_000 + i) * 10**9, seconds * 10**9))
    return Input(directories, {k: expected_checks(made, keys, keeps_state=k) for k in (True, False)})


@dataclass
class Lane:
    """One contestant's running query, and the progress of its batches."""

    contestant: Contestant
    query: Any
    inbox: Path
    given: Input
    progress: list[dict[str, Any]] = field(default_factory=list)
    counted_from: int = 0
    store_steps: stateful_profile.Figures = field(default_factory=dict)
    cpu: stateful_profile.Figures = field(default_factory=dict)

    def run(self, batches: int) -> None:
        """Give the next batches all at once, and wait until they are through."""
        start, end = len(self.progress), len(self.progress) + batches
        for source in self.given.directories[start:end]:
            # Files appear all at once, by a rename.
            draft = self.inbox.with_name(f"{self.inbox.name}.draft")
            shutil.copytree(source, draft, copy_function=os.link)
            draft.rename(self.inbox / source.name)
        deadline = time.monotonic() + BATCH_TIMEOUT * batches
        while len(self.progress) < end:
            if (error := self.query.exception()) is not None:
                raise RuntimeError(f"The query of {self.contestant.name} failed: {error}") from error
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.contestant.name} was not through with batch {len(self.progress)} in time")
            time.sleep(LOOK_EVERY)
            last = self.query._jsq.lastProgress()
            if last is not None and last.batchId() >= end - 1:
                self._note_progress()

    def _note_progress(self) -> None:
        for event in self.query._jsq.recentProgress():
            if event.batchId() == len(self.progress) and event.numInputRows():
                self.progress.append(json.loads(event.json()))

    def check(self) -> None:
        """Raise unless every batch gave what it must."""
        expected = self.given.checks[self.contestant.keeps_state]
        for i, progress in enumerate(self.progress):
            seen = progress["observedMetrics"][CHECK]
            if (seen["rows"], seen["hashes"]) != expected[i]:
                raise AssertionError(
                    f"Batch {i} of {self.contestant.name} gave {seen}, not {expected[i]} (rows, hashes)"
                )

    def note_cpu(self, before: dict[str, float], batches: int) -> None:
        """Keep the CPU time of a turn, in milliseconds per batch."""
        for name, seconds in stateful_profile.cpu_seconds().items():
            self.cpu.setdefault(name, []).append((seconds - before.get(name, 0.0)) / batches * 1e3)

    def note_store(self) -> None:
        """Keep what the hosts say of the last commits of this query's partitions."""
        from spark_bridge.session import current_cluster

        steps = stateful_profile.store_steps(current_cluster().describe_hosts(), str(self.query.runId))
        for name, values in steps.items():
            self.store_steps.setdefault(name, []).extend(values)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds per batch, of all processes."""
        return sum(map(statistics.median, self.cpu.values())) / 1e3

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The progress of the batches that count."""
        return self.progress[self.counted_from :]

    @property
    def seconds(self) -> list[float]:
        """How long each of them took."""
        return [p["durationMs"]["triggerExecution"] / 1e3 for p in self.counted]


def start(spark: SparkSession, contestant: Contestant, root: Path, given: Input) -> Lane:
    """Start a query that waits for input."""
    inbox = root / contestant.name / "input"
    inbox.mkdir(parents=True)
    df = spark.readStream.schema(INPUT).option("maxFilesPerTrigger", EXECUTORS).parquet(f"{inbox}/*")
    query = (
        checked(contestant.make(df))
        .writeStream.queryName(contestant.name)
        .outputMode(contestant.output_mode)
        .option("checkpointLocation", str(root / contestant.name / "checkpoint"))
        .format("noop")
        .start()
    )
    return Lane(contestant, query, inbox, given)


@contextmanager
def session(options: argparse.Namespace) -> Iterator[SparkSession]:
    """RayDP with two executors of one core, and the settings of all contestants."""
    import ray

    from backends import StateStoreConf
    from spark_bridge import init_spark, stop_spark

    cloudpickle.register_pickle_by_value(stateful_queries)  # executors do not have this directory on their path
    ray_dir = tempfile.mkdtemp(prefix="rs-", dir="/tmp")  # short: Ray's sockets live below it
    ray.init(
        address="local",
        num_cpus=EXECUTORS + 1,
        namespace="statestore",
        log_to_driver=False,
        logging_level=logging.WARNING,
        include_dashboard=False,
        _temp_dir=ray_dir,
        object_store_memory=200 << 20,
    )
    try:
        spark = init_spark(
            "stateful",
            num_executors=EXECUTORS,
            executor_cores=1,
            executor_memory="1500m",
            conf=StateStoreConf(provider=options.provider),
            configs={
                "spark.sql.shuffle.partitions": str(options.partitions),
                "spark.sql.streaming.stateStore.providerClass": ROCKSDB,
                "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
                "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": str(options.native_row_count).lower(),
                "spark.sql.streaming.pollingDelay": "500ms",
                "spark.sql.streaming.numRecentProgressUpdates": "1000",
                "spark.ui.enabled": "false",
                "spark.log.level": "ERROR",
                **dict(c.split("=", 1) for c in options.conf),
            },
        )
        spark.sparkContext.setLogLevel("ERROR")
        yield spark
    finally:
        stop_spark()
        ray.shutdown()
        shutil.rmtree(ray_dir, ignore_errors=True)


def measure(spark: SparkSession, options: argparse.Namespace, root: Path) -> list[Lane]:
    """Run all batches of all contestants, in turns."""
    chosen = [CONTESTANTS[name] for name in options.contestants]
    turns = max(1, -(-options.batches // options.turn))
    total = options.warm_up + turns * options.turn
    with console.status(f"Making {total} batches of {options.rows:,} rows"):
        given = make_input(root / "batches", total, options.rows, options.keys)
    lanes: list[Lane] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    work = sum((1 if c.is_slow else options.warm_up) + turns * (1 if c.is_slow else options.turn) for c in chosen)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=work)
        for contestant in chosen:
            bar.update(task, description=f"warming up {contestant.name}")
            lane = start(spark, contestant, root, given)
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
    """Medians, and how many times as fast as the others each is."""
    table = Table(
        title=f"Spark {pyspark.__version__}: {options.rows:,} rows over {options.keys:,} keys a batch, "
        f"{options.partitions} partitions",
        title_justify="left",
    )
    table.add_column("contestant")
    yardsticks = [lane for lane in lanes if lane.contestant.name in ("native", "spark_rows", "spark_pandas")]
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
    """How many times as fast ``lane`` is; the spread is that over turns, which lie close together in time."""
    overall = statistics.median(yardstick.seconds) / statistics.median(lane.seconds)
    count = min(len(yardstick.seconds), len(lane.seconds))
    turns = [_nth(yardstick.seconds, i, count) / _nth(lane.seconds, i, count) for i in range(count)]
    if count < 2:
        return f"{overall:.2f}"
    low, _, high = statistics.quantiles(turns, n=4, method="inclusive")
    return f"{overall:.2f} ({low:.2f} to {high:.2f})"


def _nth(seconds: list[float], i: int, count: int) -> float:
    """The median of the i-th of ``count`` equal parts."""
    return statistics.median(seconds[i * len(seconds) // count : max((i + 1) * len(seconds) // count, 1)])


def main() -> None:
    """Measure and print."""
    has_spark_4 = int(pyspark.__version__.split(".")[0]) >= SPARK_4
    available = [c.name for c in CONTESTANTS.values() if has_spark_4 or not c.needs_spark_4]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in available if CONTESTANTS[name].keeps_state]
    parser.add_argument(
        "--contestants",
        nargs="+",
        choices=available,
        default=usual,
        metavar="NAME",
        help="some of " + ", ".join(f"{name} ({CONTESTANTS[name].label})" for name in available),
    )
    parser.add_argument("--rows", type=int, default=500_000, help="rows per batch (default 500000)")
    parser.add_argument("--keys", type=int, default=100_000, help="keys (default 100000)")
    parser.add_argument("--batches", type=int, default=12, help="batches that count (default 12)")
    parser.add_argument("--turn", type=int, default=3, help="batches in a row of one contestant (default 3)")
    parser.add_argument(
        "--warm-up", type=int, default=8, help="batches before, not counted: the JVM compiles meanwhile (default 8)"
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
    with tempfile.TemporaryDirectory(prefix="statestore-bench-") as temporary, session(options) as spark:
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
