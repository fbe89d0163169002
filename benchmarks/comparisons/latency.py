"""How long a small batch takes, compared with the same stream without state."""

from __future__ import annotations

import numpy as np
from suite.comparison import Comparison, Measured
from suite.model import Case, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import chosen, directory, in_turns, measured_of, profile

P50, P99 = "p50 of a batch", "p99 of all batches"


def run(size: Size, steps: Steps) -> Measured:
    """Measure many small batches, given at once in each turn: Spark takes one directly after the other."""
    import lanes
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    names = chosen(size["contestants"])
    measured = measured_of(names)
    steps.expect(len(names) * (size["turns"] + 1))
    with directory() as root, lanes.session(size["partitions"]) as spark:
        # One file a batch: Spark looks at each.
        given = lanes.Input(root / "batches", Workload("long", "a long key", size["rows"], size["keys"]), files=1)
        for _ in range(size["warm_up"] + size["turns"] * size["batches"]):
            given.add()
        running = []
        for contestant in (CONTESTANTS[n] for n in names):
            steps.now(f"warming up {contestant.name}")
            lane = lanes.Lane(contestant, root / contestant.name, given)
            lanes.start(spark, lane)
            lane.run(size["warm_up"])
            lane.check()
            running.append(lane)
            steps.advance()
        turns = in_turns(running, size["turns"], size["batches"], steps, "batches")
        if size["profile"]:
            measured.notes += [profile(spark, lane) for lane in running]
    # The first batch of a turn waits for Spark's next look into the directory, and its JVM has rested: not counted.
    ms = {name: [[seconds * 1e3 for seconds in turn[1:]] for turn in its] for name, its in turns.items()}
    measured.cases.append(Case(P50, "ms", ms))
    p99 = {name: [[float(np.quantile(np.concatenate(its), 0.99))]] for name, its in ms.items()}
    measured.cases.append(Case(P99, "ms", p99))
    measured.notes.append(
        f"A turn is {size['batches']} batches of {size['rows']:,} rows that lie ready, each begun as soon as the one "
        "before is through. Spark's own part (looking for files, its logs, planning) is in all figures; `identity` has "
        "it and the shuffle, and no state."
    )
    return measured


COMPARISONS = (
    Comparison(
        name="latency",
        title="Latency of a micro-batch",
        about="Small batches as fast as they come. `identity` is the floor: the same shuffle, and a Python stage that "
        "hands on its rows.",
        run=run,
        sizes={
            "full": {
                "rows": 1_000,
                "keys": 100_000,
                "contestants": ["identity", "native", "aggregate"],
                "partitions": 4,
                "warm_up": 40,
                # Short turns, and many: what slows the machine for some seconds then meets all contestants.
                "turns": 10,
                "batches": 12,
                "profile": True,
            },
            "smoke": {
                "rows": 1_000,
                "keys": 10_000,
                "contestants": ["identity", "native", "aggregate"],
                "partitions": 4,
                "warm_up": 6,
                "turns": 3,
                "batches": 8,
                "profile": False,
            },
        },
        minutes={"full": 30, "smoke": 6},
        targets=(
            Target(
                "small batches: what `aggregate` adds to the same stream with an identity function, p50",
                P50,
                "aggregate",
                50,
                kind="difference",
                against="identity",
                unit="ms",
            ),
        ),
        in_smoke=False,
        picture="bars",
    ),
)
