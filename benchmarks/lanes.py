"""Streams side by side: a session, batches given to queries one by one, and the progress of each query.

Each contestant is one streaming query, reading parquet files. A batch is a directory with one file per executor that
appears in its input directory, and the trigger is Spark's default (a batch as soon as there is one). Between turns a
query only looks into its empty directory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
import totals
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from suite.machine import PROCESSES, own_ray
from suite.model import Case, Measured, Turns, rotated
from suite.model import Contestant as Described
from suite.runner import Steps
from totals import CHECK, CONTESTANTS, ON_ROCKSDB, Batch, Contestant, Expected, Workload, checked

EXECUTORS = 2
BATCH_TIMEOUT = 600.0
LOOK_EVERY = 0.1
SPARK_4 = 4
POLLING = "spark.sql.streaming.pollingDelay"
"""3 s for all contestants, so that idle ones do not list their directories a hundred times a second.

Each listing starts some processes (Hadoop's, if its native library is missing). The time of a batch begins after it.
"""

Figures = dict[str, list[float]]
"""Milliseconds by step, one per batch or task."""

TASK_METRICS = {
    "deserialize": lambda m: m.executorDeserializeTime(),
    "run": lambda m: m.executorRunTime(),
    "of it JVM cpu": lambda m: m.executorCpuTime() / 1e6,
    "of it gc": lambda m: m.jvmGcTime(),
    "of it shuffle fetch": lambda m: m.shuffleReadMetrics().fetchWaitTime(),
    "of it shuffle write": lambda m: m.shuffleWriteMetrics().writeTime() / 1e6,
    "shuffle KB written": lambda m: m.shuffleWriteMetrics().bytesWritten() / 1e3,
}

CpuSeconds = dict[int, tuple[str, float]]
"""The role of a process and its CPU seconds, by process id."""

SLOW_TURNS = 2
ON_CLUSTER = "RayDP with two executors of one core, two hosts, checkpoints on the local disk, the sink noop"
AT_ONCE = {POLLING: "10ms"}
"""Spark's default, for queries that run alone and are timed from their input on."""
EQUAL = "Of every batch, warm-up included, the number of rows and a hash of them were equal to what numpy computes."


def has_spark_4() -> bool:
    """Return whether this environment has the interfaces of Spark 4."""
    return int(pyspark.__version__.split(".")[0]) >= SPARK_4


@contextmanager
def session(
    partitions: int,
    *,
    provider: str = "rocksdb",
    configs: Mapping[str, str] | None = None,
    object_store_memory: int = 200 << 20,
) -> Iterator[SparkSession]:
    """Give a session with two executors of one core, two hosts, and the settings of all contestants.

    The executors are RayDP's, or those of Spark's own cluster where RayDP is not installed.
    """
    from backends import StateStoreConf
    from spark_bridge import attach, init_spark, stop_spark

    cloudpickle.register_pickle_by_value(totals)  # executors do not have this directory on their path
    conf = StateStoreConf(provider=provider)
    settings = {
        "spark.sql.shuffle.partitions": str(partitions),
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        POLLING: "3s",
        **ON_ROCKSDB,
        **(configs or {}),
    }
    with own_ray(EXECUTORS + 1, object_store_memory), ExitStack() as stack:
        stack.callback(stop_spark)
        if importlib.util.find_spec("raydp") is not None:
            spark = init_spark("benchmark", EXECUTORS, 1, "1500m", conf=conf, configs=settings)
        else:
            os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            cluster = f"local-cluster[{EXECUTORS},1,1500]"
            builder = SparkSession.builder.master(cluster).config(map=settings | {"spark.executor.memory": "1500m"})
            stack.callback((spark := builder.getOrCreate()).stop)
            attach(spark, num_hosts=EXECUTORS, conf=conf)
        spark.sparkContext.setLogLevel("ERROR")
        yield spark


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

    def draw(self, batches: int) -> None:
        for _ in range(batches):
            self.add()

    def add(self, batch: Batch | None = None) -> None:
        """Make one more batch, by default of random rows."""
        batch = batch or self.workload.draw(self.rng)
        self.directories.append(self._root / f"{len(self.directories):06}")
        write_batch(batch.table(self.workload), self.directories[-1], self.files)
        self.expected.add(batch)


def write_batch(rows: pa.Table, directory: Path, files: int) -> None:
    """Write a batch as parquet files, which get its rows in turn, into a new directory that is named by its number."""
    directory.mkdir(parents=True)
    seconds = 1_700_000_000 + int(directory.name)  # Spark takes files in the order of their times
    for part in range(files):
        path = directory / f"{part}.parquet"
        pq.write_table(rows.take(pa.array(np.arange(part, rows.num_rows, files))), path)
        os.utime(path, (seconds, seconds))


def give(batch: Path, root: Path) -> None:
    """Put a batch into the input directory below ``root``: its files appear all at once, by a rename."""
    draft = root / "draft"
    shutil.copytree(batch, draft, copy_function=os.link)
    draft.rename(root / "input" / batch.name)


def writer_of(df: DataFrame, name: str, output_mode: str, root: Path) -> Any:
    """Return the writer of a query whose checkpoint is below ``root`` and whose rows go nowhere."""
    writer = df.writeStream.queryName(name).outputMode(output_mode).format("noop")
    return writer.option("checkpointLocation", str(root / "checkpoint"))


@dataclass
class Profile:
    """Where the time of a query's counted batches went: CPU by role of the processes, and steps of the hosts."""

    cpu: Figures = field(default_factory=lambda: defaultdict(list))
    store: Figures = field(default_factory=lambda: defaultdict(list))
    cpu_of_turns: list[float] = field(default_factory=list)

    def note_turn(self, query: Any, before: CpuSeconds, batches: int) -> None:
        """Keep the CPU time of a turn, in milliseconds per batch, and the last commits of the query's partitions."""
        from spark_bridge.session.current import current_cluster

        used = cpu_since(before)
        self.cpu_of_turns.append(sum(used.values()) / batches)
        for role, seconds in used.items():
            self.cpu[role].append(seconds / batches * 1e3)
        for host in current_cluster().describe_hosts():
            for instance in host["instances"]:
                if instance["run_id"] == str(query.runId):
                    for name, milliseconds in instance["last_commit"].items():
                        if name not in ("version", "batch_id"):
                            self.store[name].append(milliseconds)

    def text(self, spark: SparkSession, query: str, progress: Sequence[Mapping[str, Any]]) -> str:
        """Report the medians, with Spark's own of the batches with this progress."""
        steps_of_spark: Figures = defaultdict(list)
        for event in progress:
            for name, milliseconds in event["durationMs"].items():
                steps_of_spark[name].append(milliseconds)
        of_stages = stages(spark, query, [p["batchId"] for p in progress])
        sections = {
            "Spark, ms a batch": steps_of_spark,
            **{f"{stage}, ms": steps for stage, steps in of_stages.items()},
            "state store, ms a partition": self.store,
            "CPU, ms a batch": self.cpu,
        }
        said = []
        for section, steps in sections.items():
            medians = sorted(((statistics.median(values), step) for step, values in steps.items()), reverse=True)
            if shown := ", ".join(f"{step} {value:.0f}" for value, step in medians if value >= 1):
                said.append(f"{section}: {shown}")
        return f"Where the time of `{query}` goes. {'; '.join(said)}."


@dataclass
class Lane:
    contestant: Contestant
    root: Path
    given: Input
    query: Any = None
    progress: list[dict[str, Any]] = field(default_factory=list)
    fed: int = 0
    skipped: int = 0  # batch ids that were not batches of the benchmark
    counted_from: int = 0
    spent: Profile = field(default_factory=Profile)

    def feed(self, batches: int) -> None:
        """Put the next batches into its input directory, all at once."""
        (self.root / "input").mkdir(parents=True, exist_ok=True)
        for source in self.given.directories[self.fed : self.fed + batches]:
            give(source, self.root)
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

    def profile(self, spark: SparkSession) -> str:
        return self.spent.text(spark, self.contestant.name, self.progress[self.counted_from :])


def start(
    spark: SparkSession, lane: Lane, settings: Mapping[str, str] | None = None, *, files_per_trigger: int | None = None
) -> None:
    """Start the lane's query, or start it again; it waits for input. ``settings`` are Spark's, for this query alone."""
    given, contestant = lane.given, lane.contestant
    (lane.root / "input").mkdir(parents=True, exist_ok=True)
    reader = spark.readStream.schema(given.workload.input)
    df = reader.option("maxFilesPerTrigger", files_per_trigger or given.files).parquet(f"{lane.root}/input/*")
    chosen = {**contestant.settings, **(settings or {})}
    usual = {name: spark.conf.get(name, None) for name in chosen}
    try:
        # A query takes the settings of its session as they are when it starts.
        for name, value in chosen.items():
            spark.conf.set(name, value)
        rows = checked(contestant.make(df, given.workload))
        lane.query = writer_of(rows, contestant.name, contestant.output_mode, lane.root).start()
    finally:
        for name, value in usual.items():
            spark.conf.unset(name) if value is None else spark.conf.set(name, value)


# -- contestants in turns


def described(names: Sequence[str]) -> dict[str, Described]:
    return {n: Described(c.label, {**c.settings, **c.arguments}, c.is_ours) for n in names if (c := CONTESTANTS[n])}


def chosen(wanted: Sequence[str]) -> list[str]:
    """Return the wanted contestants that this environment has. Raises ``ValueError`` for an unknown name."""
    if unknown := [name for name in wanted if name not in CONTESTANTS]:
        raise ValueError(f"Unknown contestant {', '.join(unknown)}; the contestants are {', '.join(CONTESTANTS)}.")
    return [name for name in wanted if has_spark_4() or not CONTESTANTS[name].needs_spark_4]


def in_turns(lanes: Sequence[Lane], turns: int, batches: int, steps: Steps, what: str) -> Turns:
    """Return the seconds of each batch, turn by turn; Lanes keep their CPU.

    Slow contestants have ``SLOW_TURNS`` turns of one batch after all turns of the others. In between, they would keep
    the others waiting for minutes, and Spark ends Python workers that are idle for one minute.
    """
    seconds: Turns = {lane.contestant.name: [] for lane in lanes}
    for lane in lanes:
        lane.counted_from = len(lane.progress)
    fast, slow = ([lane for lane in lanes if lane.contestant.is_slow == is_slow] for is_slow in (False, True))
    rounds = [(turn, fast, batches) for turn in range(turns)]
    rounds += [(turn, slow, 1) for turn in range(min(turns, SLOW_TURNS))]
    for turn, group, count in rounds:
        for lane in rotated(group, turn):
            steps.now(f"{what}: turn {turn + 1} of {turns}, {lane.contestant.name}")
            before = cpu_seconds()
            seconds[lane.contestant.name].append(lane.run(count))
            lane.spent.note_turn(lane.query, before, count)
            steps.advance()
    for lane in lanes:
        lane.check()
    return seconds


def cpu(name: str, lanes: Sequence[Lane]) -> Case:
    """Return the CPU of all processes, Spark's and ours, in each turn: a busy machine hardly changes it."""
    turns = {lane.contestant.name: [[seconds] for seconds in lane.spent.cpu_of_turns] for lane in lanes}
    return Case(f"{name}: CPU of all processes", "CPU s a batch", turns)


def warmed(
    spark: SparkSession, names: Sequence[str], root: Path, given: Input, batches: int, steps: Steps, what: str = ""
) -> list[Lane]:
    """Start the query of each contestant, run so many batches (slow contestants none), and check the results."""
    running = []
    for name in names:
        steps.now(f"{what}warming up {name}")
        lane = Lane(CONTESTANTS[name], root / name, given)
        start(spark, lane)
        if batches and not lane.contestant.is_slow:
            lane.run(batches)
            lane.check()
        running.append(lane)
        steps.advance()
    return running


def measured_of(names: Sequence[str]) -> Measured:
    """Return the empty part for the results of these contestants."""
    return Measured(described(names), [], [f"All on {ON_CLUSTER}.", EQUAL])


# -- where the time of a batch goes


def cpu_seconds() -> CpuSeconds:
    """Return the CPU seconds of the processes below this one. Unlike times, they are the same on a busy machine."""
    used: CpuSeconds = {}
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            command, times = " ".join(process.cmdline()), process.cpu_times()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        kind = next((kind for mark, kind in PROCESSES.items() if mark in command), "others of Ray, Spark's master")
        used[process.pid] = ("driver's Python" if process == own else kind, times.user + times.system)
    return used


def cpu_since(before: CpuSeconds) -> dict[str, float]:
    """Return the CPU seconds used since then, by the role of the processes, without processes that have ended."""
    used: dict[str, float] = defaultdict(float)
    for pid, (kind, seconds) in cpu_seconds().items():
        used[kind] += max(0.0, seconds - before.get(pid, ("", 0.0))[1])
    return used


def forget_peaks(role: str) -> None:
    """Have the kernel count the most memory of the processes of a role (a value of ``PROCESSES``) from now on."""
    for pid in _pids(role):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory(role: str) -> float:
    """Return the most MiB that the processes of a role have had, added up, since ``forget_peaks``."""
    kib = 0
    for pid in _pids(role):
        status = Path(f"/proc/{pid}/status").read_text()
        kib += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return kib / 1024


def _pids(role: str) -> list[int]:
    return [pid for pid, (kind, _) in cpu_seconds().items() if kind == role]


def stages(spark: SparkSession, query: str, batches: Sequence[int]) -> dict[str, Figures]:
    """Return, by place of the stage in its batch: the wall time of the stage, and Spark's figures per task."""
    store = spark.sparkContext._jsc.sc().statusStore()
    array = spark.sparkContext._gateway.new_array(spark.sparkContext._jvm.double, 0)
    found = store.stageList(None, False, False, array, None)
    of_batch: dict[int, list[Any]] = defaultdict(list)
    for i in range(found.size()):
        stage = found.apply(i)
        words = stage.description().getOrElse(None) if stage.description().isDefined() else ""
        lines = [line.strip() for line in str(words).split("\n")]
        if lines[0] == query and lines[-1].startswith("batch = ") and stage.completionTime().isDefined():
            batch = lines[-1].removeprefix("batch = ")
            if batch.isdigit() and int(batch) in batches:
                of_batch[int(batch)].append(stage)
    figures: dict[str, Figures] = {}
    for its in of_batch.values():
        its.sort(key=lambda s: s.stageId())
        for place, stage in enumerate(its):
            steps = figures.setdefault(f"stage {place + 1} of {len(its)}", defaultdict(list))
            steps["stage, wall"].append(stage.completionTime().get().getTime() - stage.submissionTime().get().getTime())
            tasks = store.taskList(stage.stageId(), stage.attemptId(), 1000)
            for t in range(tasks.size()):
                task = tasks.apply(t)
                steps["task, wall"].append(task.duration().get())
                steps["scheduler delay"].append(task.schedulerDelay())
                metrics = task.taskMetrics().get()
                for name, read in TASK_METRICS.items():
                    steps[name].append(read(metrics))
    return figures
