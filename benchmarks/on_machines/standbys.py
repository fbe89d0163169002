"""What standbys cost a batch: the same query without and with them, in turns, on two machines with a host each.

    python -m benchmarks.on_machines.standbys               ten minutes, root; writes benchmarks/results/standbys.json

On the lab of the tests: each turn starts the query on a new checkpoint, writes all its keys ``FILLS`` times, and times
further batches. A first turn, which warms up the JVMs, does not count. The machines share the cores of this computer,
so the copies' work takes time from the batches, which it would not do on separate machines. ``cpu_ratios`` are those of
the CPU time of all processes, and each turn has that of the hosts alone. Run it alone: other programs of Python and
Java count as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.on_machines.programs import CONFIGS, copy_lags, started
from benchmarks.on_machines.running import finish, parser_of
from spark_bridge import init_spark, stop_spark
from spark_bridge.session.current import current_cluster
from spark_bridge.session.settings import STANDBY_REPLICAS_CONF
from tests.lab.lab import Lab
from tests.lab.ray_nodes import ray_address, ray_environment, start_ray

CPUS = [0, 2, 2]
EXECUTORS = 2
FILLS = 3
"""After so many writes of all keys, RocksDB's write buffers are full and it writes files, as in a long run."""


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU time of all processes of this computer that run Ray, Spark and hosts, and that of the hosts.

    The machines of the lab see only their own processes: this computer sees all.
    """
    total = hosts = 0.0
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.info["name"].startswith(("python", "java", "ray", "gcs_server")):
            total += times.user + times.system
            if process.info["name"].startswith("ray::StateStoreH"):
                hosts += times.user + times.system
    return total, hosts


def run(address: str, directory: str, keys: int, rows: int, turns: int, batches: int) -> None:
    """Run the turns on machine 0, and print a line of JSON for each."""
    spark = init_spark("standbys", EXECUTORS, 1, "768m", ray_address=address, configs=CONFIGS)
    orders = [(0, 1) if turn % 2 == 0 else (1, 0) for turn in range(turns)]
    for turn, order in enumerate([(0,), *orders]):
        for standbys in order:
            spark.conf.set(STANDBY_REPLICAS_CONF, str(standbys))
            query = started(spark, f"{directory}/{turn}-{standbys}", keys, rows, "0 seconds")
            print(json.dumps({"standbys": standbys, **timed(query, FILLS * keys // rows, batches)}), flush=True)
            query.stop()
    stop_spark()


def timed(query: Any, warm_up: int, batches: int) -> dict[str, Any]:
    """Print a line once the query is warm; return the seconds of each batch after that."""
    seen: dict[int, float] = {}
    is_warm = False
    while len(seen) < warm_up + batches:
        query.awaitTermination(0.2)
        for progress in query.recentProgress:
            seen[progress["batchId"]] = progress["durationMs"]["triggerExecution"] / 1e3
        if not is_warm and len(seen) >= warm_up:
            is_warm = True
            print(json.dumps({"warm_at": len(seen)}), flush=True)
    lags = copy_lags(current_cluster().coordinator.describe())
    seconds = [seen[n] for n in sorted(seen)[warm_up:]]
    return {"batches": len(seen), "seconds": seconds, "copies": len(lags), "max_lag": max(lags, default=0)}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=100_000, help="of a batch")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--inside", nargs=2, metavar=("ADDRESS", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.keys, options.rows, options.turns, options.batches)
    if options.inside:
        run(*options.inside, *sizes)
        return 0
    with Lab(len(CPUS)) as lab:
        start_ray(lab, CPUS)
        names = ("--keys", "--rows", "--turns", "--batches")
        given = [text for name, size in zip(names, sizes, strict=True) for text in (name, str(size))]
        inside = ["--inside", ray_address(lab), str(lab.shared)]
        argv = [sys.executable, "-m", "benchmarks.on_machines.standbys", *given, *inside]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "start_new_session": True}
        with (Path(lab.directory) / "standbys.log").open("w") as log:
            program = lab.popen(0, argv, ray_environment(), stderr=log, **pipes)
            assert program.stdout is not None
            turns: list[dict[str, Any]] = []
            for line in program.stdout:
                event = json.loads(line) if line.startswith("{") else {}
                if "warm_at" in event:
                    warm_at, began = event["warm_at"], cpu_seconds()
                elif event:
                    cpus = [b - a for a, b in zip(began, cpu_seconds(), strict=True)]
                    batches = event.pop("batches") - warm_at
                    total, hosts = (round(cpu / batches, 3) for cpu in cpus)
                    turns.append({**event, "cpu_seconds": total, "hosts_cpu_seconds": hosts})
                    shown = {**turns[-1], "seconds": round(float(np.median(turns[-1]["seconds"])), 3)}
                    print(json.dumps(shown), flush=True)
            if program.wait() or len(turns) < 1 + 2 * options.turns:
                print((Path(lab.directory) / "standbys.log").read_text()[-3000:])
                return 1
    del turns[0]
    by_standbys = {n: [t for t in turns if t["standbys"] == n] for n in (0, 1)}
    pairs = list(zip(by_standbys[0], by_standbys[1], strict=True))
    ratios = [float(np.median(b["seconds"]) / np.median(a["seconds"])) for a, b in pairs]
    cpu = [b["cpu_seconds"] / a["cpu_seconds"] for a, b in pairs]
    results = {"keys": options.keys, "rows": options.rows, "ratios": ratios, "cpu_ratios": cpu, "turns": turns}
    print(json.dumps({"ratios": [round(r, 2) for r in ratios], "cpu_ratios": [round(r, 2) for r in cpu]}))
    return finish(options, "standbys", json.dumps(results), [])


if __name__ == "__main__":
    sys.exit(main())
