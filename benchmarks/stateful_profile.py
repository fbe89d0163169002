"""Where the time of a batch goes, for ``stateful.py --profile``: steps and tasks of Spark, and steps of the store."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

Figures = dict[str, list[float]]
"""Milliseconds by step, one per batch or task."""

PROCESSES = {
    "pyspark.daemon": "Python workers",
    "pyspark/daemon": "Python workers",
    "StateStoreHost": "hosts",
    "StateStoreCoordinator": "coordinator",
    "-Dspark.driver.port=": "executors' JVMs",
    "SparkSubmit": "driver's JVM",
}
"""A string in the command line of a process, and the role of such a process."""
TASK_METRICS = {
    "deserialize": lambda m: m.executorDeserializeTime(),
    "run": lambda m: m.executorRunTime(),
    "of it JVM cpu": lambda m: m.executorCpuTime() / 1e6,
    "of it gc": lambda m: m.jvmGcTime(),
    "of it shuffle fetch": lambda m: m.shuffleReadMetrics().fetchWaitTime(),
    "of it shuffle write": lambda m: m.shuffleWriteMetrics().writeTime() / 1e6,
    "shuffle KB written": lambda m: m.shuffleWriteMetrics().bytesWritten() / 1e3,
}


def spark_steps(progress: Sequence[Mapping[str, Any]]) -> Figures:
    """Return the steps of Spark's query progress."""
    steps: Figures = defaultdict(list)
    for event in progress:
        for name, milliseconds in event["durationMs"].items():
            steps[name].append(milliseconds)
    return steps


def native_steps(progress: Sequence[Mapping[str, Any]]) -> Figures:
    """Return the figures of Spark's state operators: sums over their tasks."""
    steps: Figures = defaultdict(list)
    for event in progress:
        for operator in event["stateOperators"]:
            for name in ("allUpdatesTimeMs", "allRemovalsTimeMs", "commitTimeMs"):
                steps[name].append(operator[name])
            for name, value in operator.get("customMetrics", {}).items():
                if "atency" in name and value:
                    steps[name].append(value)
    return steps


def store_steps(described: Sequence[Mapping[str, Any]], run_id: str) -> Figures:
    """Return the steps of the last commits of the partitions, from the state store's hosts."""
    steps: Figures = defaultdict(list)
    for host in described:
        for instance in host["instances"]:
            if instance["run_id"] == run_id:
                for name, milliseconds in instance["last_commit"].items():
                    if name not in ("version", "batch_id"):
                        steps[name].append(milliseconds)
    return steps


CpuSeconds = dict[int, tuple[str, float]]
"""The role of a process and its CPU seconds, by process id."""


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


def show(console: Console, title: str, sections: Mapping[str, Figures]) -> None:
    """Print medians and extremes."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("step")
    for heading in ("median", "min", "max", "of"):
        table.add_column(heading, justify="right")
    for section, steps in sections.items():
        for i, (name, values) in enumerate(sorted(steps.items(), key=lambda s: -statistics.median(s[1]))):
            cells = (f"{f(values):.1f}" for f in (statistics.median, min, max))
            table.add_row(section if not i else "", name, *cells, str(len(values)), end_section=i == len(steps) - 1)
    console.print(table)
