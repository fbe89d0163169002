"""Whether a batch takes longer when the state is larger."""

from __future__ import annotations

from suite.comparison import Comparison, Measured
from suite.model import Case, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import chosen, directory, in_turns, measured_of

FILL_ROWS = 500_000
OURS, HOSTS = "aggregate", "hosts"
FILLING, RUNNING = "{:,} keys: memory of both hosts at most, as they are filled", "{:,} keys: the same, in the batches"
MEMORY = 2 * 2048
"""MiB: ``host_memory`` of two hosts."""


def run(size: Size, steps: Steps) -> Measured:
    """Fill each contestant's state to one size after another, and run batches of distinct random keys in between."""
    import lanes
    import numpy as np
    import stateful_profile
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    names, keys = chosen(size["contestants"]), sorted(size["keys"])
    measured = measured_of(names)
    touched = min(size["touched"], keys[0])
    with directory() as root, lanes.session(size["partitions"]) as spark:
        given = lanes.Input(root / "batches", Workload("long", "a long key", touched, keys[-1]))
        running = []
        for contestant in (CONTESTANTS[n] for n in names):
            running.append(lanes.Lane(contestant, root / contestant.name, given))
            lanes.start(spark, running[-1])
        held = 0
        steps.expect(len(names) * len(keys) * (size["turns"] + 1))
        for count in keys:
            fills = given.fill(held, count, FILL_ROWS)
            for _ in range(size["warm_up"] + size["turns"] * size["batches"]):
                ids = np.sort(given.rng.choice(count, touched, replace=False))
                given.add(given.workload.batch_of(ids, given.rng))
            stateful_profile.forget_peaks(HOSTS)
            for lane in running:
                steps.now(f"{count:,} keys: filling {lane.contestant.name}")
                lane.run(fills + size["warm_up"])
                lane.check()
                steps.advance()
            filling = stateful_profile.peak_memory(HOSTS)
            stateful_profile.forget_peaks(HOSTS)
            turns = in_turns(running, size["turns"], size["batches"], steps, f"{count:,} keys")
            measured.cases.append(Case(f"{count:,} keys in the state", "s a batch", turns, x=count))
            if OURS in names:
                peak = stateful_profile.peak_memory(HOSTS)
                measured.cases.append(Case(FILLING.format(count), "MiB", {OURS: [[filling]]}))
                measured.cases.append(Case(RUNNING.format(count), "MiB", {OURS: [[peak]]}))
            held = count
    measured.notes.append(f"A batch has {touched:,} rows, each of another key of the state, at random.")
    measured.notes.append(
        f"Memory is what the kernel counts (VmHWM), caches and the code included; `host_memory` is {MEMORY // 2:,} MiB "
        f"a host. The state is filled by batches of {FILL_ROWS:,} rows."
    )
    return measured


COMPARISONS = (
    Comparison(
        name="growth",
        title="Growth: batch time as the state grows",
        about="The state is filled to each size, then batches of random keys are run; one query per contestant all "
        "along.",
        run=run,
        sizes={
            "full": {
                "keys": [100_000, 1_000_000, 10_000_000],
                "touched": 50_000,
                "contestants": ["native", "aggregate"],
                "partitions": 2,
                "warm_up": 5,
                "turns": 3,
                "batches": 3,
            },
            "smoke": {
                "keys": [5_000, 50_000],
                "touched": 5_000,
                "contestants": ["native", "aggregate"],
                "partitions": 2,
                "warm_up": 1,
                "turns": 3,
                "batches": 2,
            },
        },
        minutes={"full": 45, "smoke": 6},
        targets=(
            Target(
                "`aggregate` against native RocksDB, 10^6 keys",
                "1,000,000 keys in the state",
                "aggregate",
                4.5,
                against="native",
                at_least=True,
            ),
            Target(
                "`aggregate` against native RocksDB, 10^7 keys",
                "10,000,000 keys in the state",
                "aggregate",
                6,
                against="native",
                at_least=True,
            ),
            Target(
                "growth from 10^5 to 10^7 keys",
                "10,000,000 keys in the state",
                "aggregate",
                1.3,
                kind="growth",
                since="100,000 keys in the state",
            ),
            Target(
                "memory of both hosts with 10^7 keys, twice `host_memory`",
                FILLING.format(10_000_000),
                OURS,
                MEMORY,
                "value",
                unit="MiB",
            ),
        ),
        in_smoke=False,
        picture="lines",
        x_label="keys in the state",
    ),
)
