"""The cost of a state task on another machine than its partition, and whether tasks of a partition stay on a machine.

    python benchmarks/locality.py             five minutes, root; writes benchmarks/results/locality.json
    python benchmarks/locality.py --batches 6 --no-write

On the lab of the tests: a head and three machines with an executor and a state host each, which run the bank of the
tests in 6 partitions. Between any two machines a packet takes 0, 1 and 10 ms (a round trip twice that), in turns. Of
each state task, the result has Spark's time and the machines of its executor and of its partition's owner.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MACHINES, PARTITIONS = 4, 6
DELAYS = (0.0, 1.0, 10.0)
SETTLE = 4
"""Batches behind a change of the network that are not counted."""


def follow(address: str, checkpoint: str) -> None:
    """On machine 0: run the bank, and print its state tasks and the time of each batch as JSON, until killed."""
    from spark_bridge import init_spark
    from spark_bridge.session.current import current_cluster
    from tests.lab.accounts import OPERATOR, TRANSFERS
    from tests.lab.bank import accounts

    configs = {
        "spark.statestore.sharedFileSystem": "true",
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
    }
    spark = init_spark("locality", MACHINES - 1, 1, "512m", ray_address=address, configs=configs)
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", TRANSFERS)
    rows = source.option("startTimestamp", 1_000_000).option("numPartitions", 3).load()
    query = accounts(rows).writeStream.option("checkpointLocation", checkpoint).format("noop").start()
    context = spark.sparkContext
    store = context._jsc.sc().statusStore()
    shown: set[int] = set()
    batch = -1
    while query.isActive:
        progress = query.lastProgress
        if progress is None or progress["batchId"] == batch:
            time.sleep(0.02)
            continue
        batch = progress["batchId"]
        owners = [owner.ip for owner in current_cluster().coordinator.locate(OPERATOR).owners]
        jobs = set(context.statusTracker().getJobIdsForGroup(str(query.runId))) - shown
        shown |= jobs
        if len(jobs) != 1:  # more than one batch has passed: which is which is not said
            continue
        info = context.statusTracker().getJobInfo(jobs.pop())
        assert info is not None
        tasks = store.taskList(max(info.stageIds), 0, PARTITIONS)
        found = []
        for task in (tasks.apply(i) for i in range(tasks.size())):
            if task.duration().isDefined():
                found.append([task.index(), task.host(), owners[task.index()], task.duration().get()])
        print(json.dumps({"ms": progress["durationMs"]["triggerExecution"], "tasks": found}), flush=True)
    raise SystemExit(str(query.exception()))


def measured(batches: int, turns: int) -> dict[float, list[dict[str, Any]]]:
    """Return the batches that were counted, by the delay of the network in ms."""
    from tests.lab.lab import Lab
    from tests.lab.ray_nodes import ray_address, ray_environment, start_ray

    found: dict[float, list[dict[str, Any]]] = defaultdict(list)
    with Lab(MACHINES) as lab:
        start_ray(lab, [1] * MACHINES)
        argv = [sys.executable, __file__, "--follow", ray_address(lab), str(lab.shared / "ck")]
        environment = ray_environment() | {"PYTHONPATH": str(ROOT)}
        with (lab.directory / "log").open("w+") as log:
            stream = lab.popen(0, argv, environment, stdout=subprocess.PIPE, stderr=log)
            assert stream.stdout is not None
            for delay in DELAYS * turns:
                for k in range(MACHINES):
                    # A packet passes two cables.
                    lab.delay(k, delay / 2) if delay else lab.mend(k)
                seen = 0
                while seen < SETTLE + batches:
                    line = stream.stdout.readline()
                    if not line:
                        raise RuntimeError((lab.directory / "log").read_text()[-3000:])
                    if line.startswith("{"):
                        seen += 1
                        if seen > SETTLE:
                            found[delay].append(json.loads(line))
            stream.kill()
            stream.wait()
    return found


def summary(found: dict[float, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians and quartiles in ms by delay, and how often a task ran where its predecessor did."""
    by_delay = {}
    stayed = moved = 0
    for delay, batches in found.items():
        times: dict[str, list[float]] = {"own": [], "another": []}
        last: dict[int, str] = {}
        for batch in batches:
            for partition, machine, owner, ms in batch["tasks"]:
                times["own" if machine == owner else "another"].append(ms)
                stayed += last.get(partition) == machine
                moved += partition in last and last[partition] != machine
                last[partition] = machine
        by_delay[f"{delay:g} ms"] = {
            "batches": len(batches),
            "batch_ms": np.percentile([b["ms"] for b in batches], [25, 50, 75]).round(1).tolist(),
            "tasks": {place: len(ms) for place, ms in times.items()},
            "task_ms": {place: np.percentile(ms, [25, 50, 75]).round(1).tolist() for place, ms in times.items() if ms},
        }
    return {"by_delay": by_delay, "stayed": stayed, "moved": moved}


def main() -> int:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20, help="counted batches of each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--follow", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.follow:
        follow(*options.follow)
    found = summary(measured(options.batches, options.turns))
    print(json.dumps(found, indent=1))
    if not options.no_write:
        (RESULTS / "locality.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
