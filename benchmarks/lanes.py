"""Streams side by side: a session on RayDP, batches given to queries one by one, and the progress of each query.

Each contestant is one streaming query, reading parquet files. A batch is a directory with one file per executor that
appears in its input directory, and the trigger is Spark's default (a batch as soon as there is one). Between turns a
query only looks into its empty directory.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pyspark
import stateful_profile
import stateful_queries
import workloads
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from ray_cluster import own_ray
from stateful_queries import CHECK, CONTESTANTS, ON_ROCKSDB, Contestant, checked
from workloads import Batch, Expected, Workload

EXECUTORS = 2
BATCH_TIMEOUT = 600.0
LOOK_EVERY = 0.1
SPARK_4 = 4
POLLING = "spark.sql.streaming.pollingDelay"
"""3 s for all contestants, so that idle ones do not list their directories a hundred times a second.

Each listing starts some processes (Hadoop's, if its native library is missing). The time of a batch begins after it.
"""


def has_spark_4() -> bool:
    """Return whether this environment has the interfaces of Spark 4."""
    return int(pyspark.__version__.split(".")[0]) >= SPARK_4


def available() -> list[str]:
    """Return the contestants that run in this environment."""
    return [c.name for c in CONTESTANTS.values() if has_spark_4() or not c.needs_spark_4]


@contextmanager
def session(
    partitions: int,
    *,
    provider: str = "rocksdb",
    configs: Mapping[str, str] | None = None,
    memory: str = "1500m",
    object_store_memory: int = 200 << 20,
) -> Iterator[SparkSession]:
    """Give a session on RayDP with two executors of one core, two hosts, and the settings of all contestants."""
    from backends import StateStoreConf
    from spark_bridge import init_spark, stop_spark

    for module in (stateful_queries, workloads):  # executors do not have this directory on their path
        cloudpickle.register_pickle_by_value(module)
    with own_ray(EXECUTORS + 1, object_store_memory):
        try:
            spark = init_spark(
                "benchmark",
                num_executors=EXECUTORS,
                executor_cores=1,
                executor_memory=memory,
                conf=StateStoreConf(provider=provider),
                configs={
                    "spark.sql.shuffle.partitions": str(partitions),
                    "spark.sql.streaming.numRecentProgressUpdates": "1000",
                    "spark.ui.enabled": "false",
                    "spark.log.level": "ERROR",
                    POLLING: "3s",
                    **ON_ROCKSDB,
                    **(configs or {}),
                },
            )
            spark.sparkContext.setLogLevel("ERROR")
            yield spark
        finally:
            stop_spark()


class Input:
    """Batches, made once for all contestants: ``directories[i]`` holds the files of batch i."""

    def __init__(self, root: Path, workload: Workload, files: int = EXECUTORS) -> None:
        self.workload, self.expected, self.directories = workload, Expected(workload), list[Path]()
        self.files = files
        self.rng = np.random.default_rng(20130101)
        self._root = root

    def fill(self, first: int, end: int, rows: int) -> int:
        """Make batches with a row of each key from ``first`` on, in random order; return their number."""
        numbers = self.rng.permutation(np.arange(first, end))
        parts = np.array_split(numbers, max(1, -(-len(numbers) // rows)))
        for ids in parts:
            self.add(self.workload.batch_of(ids, self.rng))
        return len(parts)

    def add(self, batch: Batch | None = None) -> None:
        """Make one more batch, by default of random rows."""
        batch = batch or self.workload.draw(self.rng)
        i = len(self.directories)
        directory = self._root / f"{i:06}"
        directory.mkdir(parents=True)
        for part in range(self.files):
            path = directory / f"{part}.parquet"
            pq.write_table(batch.table(self.workload, slice(part, None, self.files)), path)
            # Spark takes files in the order of their times.
            os.utime(path, ns=((seconds := 1_700_000_000 + i) * 10**9, seconds * 10**9))
        self.expected.add(batch)
        self.directories.append(directory)


@dataclass
class Lane:
    """One contestant's query, and the progress of its batches."""

    contestant: Contestant
    root: Path
    given: Input
    query: Any = None
    progress: list[dict[str, Any]] = field(default_factory=list)
    fed: int = 0
    skipped: int = 0  # batch ids that were not batches of the benchmark
    counted_from: int = 0
    store_steps: stateful_profile.Figures = field(default_factory=dict)
    cpu: stateful_profile.Figures = field(default_factory=dict)
    cpu_of_turns: list[float] = field(default_factory=list)

    def feed(self, batches: int) -> None:
        """Put the next batches into its input directory, all at once."""
        (self.root / "input").mkdir(parents=True, exist_ok=True)
        for source in self.given.directories[self.fed : self.fed + batches]:
            # Files appear all at once, by a rename.
            draft = self.root / "draft"
            shutil.copytree(source, draft, copy_function=os.link)
            draft.rename(self.root / "input" / source.name)
        self.fed += batches

    def run(self, batches: int) -> list[float]:
        """Give the query the next batches, wait for all, and return the seconds of each (Spark's triggerExecution)."""
        before = len(self.progress)
        self.feed(batches)
        self.wait()
        return [p["durationMs"]["triggerExecution"] / 1e3 for p in self.progress[before:]]

    def wait(self, look_every: float = LOOK_EVERY) -> None:
        """Wait until the query has done all its batches. Raises the query's error, or ``TimeoutError``."""
        deadline = time.monotonic() + BATCH_TIMEOUT * max(1, self.fed - len(self.progress))
        while len(self.progress) < self.fed:
            if (error := self.query.exception()) is not None:
                raise RuntimeError(f"The query of {self.contestant.name} failed: {error}") from error
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.contestant.name} was not through with batch {len(self.progress)} in time")
            time.sleep(look_every)
            last = self.query._jsq.lastProgress()
            if last is not None and last.batchId() >= len(self.progress) + self.skipped:
                self._note_progress()

    def _note_progress(self) -> None:
        events, new = self.query._jsq.recentProgress(), []
        # From the newest backwards: each look at an event is a call into the driver's JVM, which is busy with batches.
        for i in range(len(events) - 1, -1, -1):
            if events[i].batchId() < len(self.progress) + self.skipped:
                break
            new.append(events[i])
        for event in reversed(new):
            if event.batchId() == len(self.progress) + self.skipped and event.numInputRows():
                self.progress.append(json.loads(event.json()))

    def check(self) -> None:
        """Raise unless every batch gave the expected rows."""
        expected = self.given.expected.checks[self.contestant.gives]
        for i, progress in enumerate(self.progress):
            seen = progress["observedMetrics"][CHECK]
            if (seen["rows"], seen["hashes"]) != expected[i]:
                raise AssertionError(
                    f"Batch {i} of {self.contestant.name} gave {seen}, not {expected[i]} (rows, hashes)"
                )

    def stop(self) -> None:
        """Stop the query; it can be started again."""
        self.query.stop()

    def note_cpu(self, before: stateful_profile.CpuSeconds, batches: int) -> None:
        """Keep the CPU time of a turn, in milliseconds per batch."""
        used = stateful_profile.cpu_since(before)
        self.cpu_of_turns.append(sum(used.values()) / batches)
        for name, seconds in used.items():
            self.cpu.setdefault(name, []).append(seconds / batches * 1e3)

    def note_store(self) -> None:
        """Keep what the hosts say of the last commits of this query's partitions."""
        from spark_bridge.session.current import current_cluster

        steps = stateful_profile.store_steps(current_cluster().describe_hosts(), str(self.query.runId))
        for name, values in steps.items():
            self.store_steps.setdefault(name, []).extend(values)

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU seconds per batch, of all processes."""
        return sum(map(statistics.median, self.cpu.values())) / 1e3

    @property
    def counted(self) -> list[dict[str, Any]]:
        """Return the progress of the batches that count."""
        return self.progress[self.counted_from :]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each batch that counts."""
        return [p["durationMs"]["triggerExecution"] / 1e3 for p in self.counted]


def start(
    spark: SparkSession,
    lane: Lane,
    settings: Mapping[str, str] | None = None,
    *,
    files_per_trigger: int | None = None,
) -> None:
    """Start the lane's query, or start it again; it waits for input. ``settings`` are Spark's, for this query alone."""
    given, contestant = lane.given, lane.contestant
    (lane.root / "input").mkdir(parents=True, exist_ok=True)
    reader = spark.readStream.schema(given.workload.input).option(
        "maxFilesPerTrigger", files_per_trigger or given.files
    )
    df = reader.parquet(f"{lane.root}/input/*")
    chosen = {**contestant.settings, **(settings or {})}
    usual = {name: spark.conf.get(name, None) for name in chosen}
    try:
        # A query takes the settings of its session as they are when it starts.
        for name, value in chosen.items():
            spark.conf.set(name, value)
        lane.query = (
            checked(contestant.make(df, given.workload))
            .writeStream.queryName(contestant.name)
            .outputMode(contestant.output_mode)
            .option("checkpointLocation", str(lane.root / "checkpoint"))
            .format("noop")
            .start()
        )
    finally:
        for name, value in usual.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)
