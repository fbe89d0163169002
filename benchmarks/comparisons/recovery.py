"""How long a query stalls: when a host is killed, and when it restarts with only its checkpoint."""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

from suite.comparison import Comparison, Measured
from suite.model import Case, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import AT_ONCE, chosen, directory, measured_of

FILL_ROWS = 500_000
OURS = "aggregate"
BEYOND, OWN, KILLED = (
    "beyond the batch's own time",
    "a batch, to its commit",
    "kill of a host to the next completed checkpoint",
)
RESTART = "query start to the first completed batch"


def _timed_batch(lane: Any) -> float:
    """Return the seconds from the input to the batch's progress, which Spark reports once the batch is committed."""
    began = time.perf_counter()
    lane.run(1)
    return time.perf_counter() - began


def run_kill(size: Size, steps: Steps) -> Measured:
    """Kill one host after another, each right before the input of a batch."""
    import lanes
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    from spark_bridge.session.current import current_cluster

    measured = measured_of([OURS])
    own, killed = [], []
    steps.expect(size["turns"] + 1)
    with directory() as root, lanes.session(size["partitions"], configs=AT_ONCE) as spark:
        given = lanes.Input(root / "batches", Workload("long", "a long key", size["rows"], size["keys"]))
        fills = given.fill(0, size["keys"], FILL_ROWS)
        for _ in range(size["warm_up"] + size["turns"] * (size["batches"] + 1)):
            given.add()
        lane = lanes.Lane(CONTESTANTS[OURS], root / OURS, given)
        lanes.start(spark, lane)
        steps.now(f"filling {size['keys']:,} keys")
        lane.run(fills + size["warm_up"])
        lane.check()
        steps.advance()
        time.sleep(size["settle"])
        for turn in range(size["turns"]):
            steps.now(f"host killed: turn {turn + 1} of {size['turns']}")
            own.append([_timed_batch(lane) for _ in range(size["batches"])])
            hosts = current_cluster().describe_hosts()
            began = time.perf_counter()
            os.kill(int(hosts[turn % len(hosts)]["pid"]), signal.SIGKILL)
            lane.run(1)
            killed.append([time.perf_counter() - began])
            steps.advance()
        lane.check()
    beyond = [[after[0] - statistics.median(before)] for after, before in zip(killed, own, strict=True)]
    for name, turns in ((BEYOND, beyond), (KILLED, killed), (OWN, own)):
        measured.cases.append(Case(name, "s", {OURS: turns}))
    measured.notes.append(
        "The host is killed by SIGKILL and the batch's input appears at the same moment; Ray starts the host again, "
        "and its partitions are loaded where the coordinator puts them. Spark's own store has nothing to compare: "
        "losing an executor fails its tasks."
    )
    return measured


def run_restart(size: Size, steps: Steps) -> Measured:
    """Fill the queries, then start them again and again, each time in a new cluster, in turns."""
    import lanes
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    names = chosen(size["contestants"])
    measured = measured_of(names)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    steps.expect(len(names) * (size["turns"] + 1))
    with directory() as root:
        given = lanes.Input(root / "batches", Workload("long", "a long key", size["rows"], size["keys"]))
        small = lanes.Input(root / "small", Workload("long", "a long key", 1_000, 1_000))
        fills = given.fill(0, size["keys"], FILL_ROWS)
        for _ in range(size["turns"] * 2):
            given.add()
        for _ in range(3):
            small.add()
        running = [lanes.Lane(CONTESTANTS[name], root / name, given) for name in names]
        with lanes.session(size["partitions"]) as spark:
            for lane in running:
                steps.now(f"filling {lane.contestant.name}")
                lanes.start(spark, lane)
                lane.run(fills)
                lane.check()
                steps.advance()
            # Both take their snapshots in the background, once a minute.
            time.sleep(size["settle"])
            for lane in running:
                lane.stop()
        for turn in range(size["turns"]):
            with lanes.session(size["partitions"]) as spark:
                # A small query of each kind first, so that the JVMs and Python have loaded their code.
                for name in names:
                    warm = lanes.Lane(CONTESTANTS[name], root / f"warm-{turn}-{name}", small)
                    lanes.start(spark, warm)
                    warm.run(len(small.directories))
                    warm.check()
                    warm.stop()
                for lane in running if turn % 2 == 0 else running[::-1]:
                    steps.now(f"restart: turn {turn + 1} of {size['turns']}, {lane.contestant.name}")
                    lane.feed(1)
                    began = time.perf_counter()
                    lanes.start(spark, lane)
                    lane.wait(0.02)
                    found[lane.contestant.name].append([time.perf_counter() - began])
                    lane.run(1)
                    lane.stop()
                    steps.advance()
        for lane in running:
            lane.check()
    measured.cases.append(Case(RESTART, "s", found))
    measured.notes.append(
        f"Each turn is a new Ray cluster, Spark session and hosts: nothing but the checkpoint is left. The first batch "
        f"has {size['rows']:,} rows. Queries were stopped after both had had time for a snapshot."
    )
    return measured


COMPARISONS = (
    Comparison(
        name="host-kill",
        title="Recovery: a host is killed",
        about="A running query whose state is in two hosts; one of them is killed as the next batch begins.",
        run=run_kill,
        sizes={
            "full": {
                "keys": 1_000_000,
                "rows": 50_000,
                "partitions": 4,
                "warm_up": 5,
                "turns": 7,
                "batches": 5,
                "settle": 70.0,
            },
            "smoke": {
                "keys": 20_000,
                "rows": 5_000,
                "partitions": 4,
                "warm_up": 2,
                "turns": 2,
                "batches": 3,
                "settle": 0.0,
            },
        },
        minutes={"full": 15, "smoke": 6},
        targets=(
            Target(
                "host kill to the next completed checkpoint, beyond the batch's own time",
                BEYOND,
                OURS,
                2.5,
                "value",
                unit="s",
            ),
        ),
        in_smoke=False,
    ),
    Comparison(
        name="restart",
        title="Recovery: cold restart",
        about="A query with a large state is started again where nothing but its checkpoint is left.",
        run=run_restart,
        sizes={
            "full": {
                "keys": 10_000_000,
                "rows": 50_000,
                "contestants": ["native", OURS],
                "partitions": 4,
                "turns": 3,
                "settle": 80.0,
            },
            "smoke": {
                "keys": 20_000,
                "rows": 5_000,
                "contestants": ["native", OURS],
                "partitions": 4,
                "turns": 1,
                "settle": 0.0,
            },
        },
        minutes={"full": 60, "smoke": 6},
        targets=(
            Target(
                "cold restart of 10^7 keys, as fast as native or faster",
                RESTART,
                OURS,
                1,
                against="native",
                at_least=True,
            ),
        ),
        in_smoke=False,
        picture="bars",
    ),
)
