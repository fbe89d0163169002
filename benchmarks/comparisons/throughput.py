"""Running totals in each way of Spark and in ours: throughput, growth with the state, latency of small batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from suite.machine import directory
from suite.model import VENV, VENV42, VENV43, Case, Comparison, Measured, Size, Target
from suite.runner import Steps

LABELS = {
    "long": "a long key",
    "strings": "string keys",
    "aggregates": "5 aggregates",
    "rows-per-key": "10 rows a key",
    "skew": "a key with most rows",
    "columns": "a key of 3 columns",
    "all-at-once": "a key of 3 columns, 5 aggregates",
}
LONG = LABELS["long"]
VARIED = ["native", "aggregate", "arrow"]
ALL = ["native", "native_hdfs", "aggregate", "arrow", "rows", "identity", "pandas"]
ALL += ["spark_pandas_state", "spark_rows", "spark_pandas"]
MIN_GAIN = 1.4  # on every workload
FULL = dict(rows=500_000, keys=100_000, partitions=2, warm_up=6, turns=3, batches=3, polling="3s", profile=True)
SMOKE = dict(rows=20_000, keys=4_000, partitions=2, warm_up=2, turns=3, batches=1, polling="300ms", profile=False)


def _workload(name: str, size: Size) -> Any:
    """Return one of ``LABELS``; ``rows`` and ``keys`` are those of a batch."""
    from totals import FIVE, Workload

    rows, keys = size["rows"], size["keys"]
    special: dict[str, dict[str, Any]] = {
        "strings": dict(key="string"),
        "aggregates": dict(aggregates=FIVE),
        "rows-per-key": dict(keys=rows // 10),
        "skew": dict(rows=keys, hot_rows=2 * rows),
        "columns": dict(key="columns"),
        "all-at-once": dict(key="columns", aggregates=FIVE),
    }
    return Workload(**{"rows": rows, "keys": keys, **special.get(name, {})})


def run(size: Size, steps: Steps) -> Measured:
    """Measure all contestants that this environment has, on each of the workloads."""
    import lanes

    names = lanes.chosen(size["contestants"])
    measured = lanes.measured_of(names)
    steps.expect(len(size["workloads"]) * len(names) * (size["turns"] + 1))
    with directory() as root, lanes.session(size["partitions"], configs={lanes.POLLING: size["polling"]}) as spark:
        for name in size["workloads"]:
            label, given = LABELS[name], lanes.Input(root / name / "batches", _workload(name, size))
            steps.now(f"{label}: making batches")
            given.draw(size["warm_up"] + size["turns"] * size["batches"])
            running = lanes.warmed(spark, names, root / name, given, size["warm_up"], steps, f"{label}: ")
            turns = lanes.in_turns(running, size["turns"], size["batches"], steps, label)
            measured.cases.append(Case(label, "s a batch", turns))
            steps.say(f"{label}: " + ", ".join(f"{n} {min(min(turn) for turn in t):.2f} s" for n, t in turns.items()))
            measured.cases.append(lanes.cpu(label, running))
            if size["profile"]:
                measured.notes += [lane.profile(spark) for lane in running]
            for lane in running:
                lane.query.stop()
    return measured


def _variant(name: str, about: str, contestants: Sequence[str] = VARIED) -> Comparison:
    chosen = {"workloads": [name], "contestants": list(contestants)}
    what = f"`aggregate` against native RocksDB, {LABELS[name]}"
    return Comparison(
        name=f"throughput-{name}",
        title=f"Throughput: {LABELS[name]}",
        about=about,
        run=run,
        sizes={"full": {**chosen, **FULL}, "smoke": {**chosen, **SMOKE}},
        minutes={"full": 30, "smoke": 6},
        targets=(Target.times(what, LABELS[name], "aggregate", MIN_GAIN, "native"),),
        in_smoke=False,
    )


THROUGHPUT = Comparison(
    name="throughput",
    title="Throughput: running count and sum",
    about="Random users, each as likely as any other; a count and a sum of each user's amounts. The time of a batch is "
    "Spark's `triggerExecution`. The pandas forms and Spark's Python forms take two turns of one batch after all turns "
    "of the others, and none to warm up.",
    run=run,
    sizes={
        "full": {"workloads": ["long"], "contestants": ALL, **FULL},
        "smoke": {"workloads": ["all-at-once"], "contestants": ["native", "aggregate", "arrow", "rows"], **SMOKE},
    },
    minutes={"full": 90, "smoke": 6},
    environments=(VENV, VENV42, VENV43),
    targets=(
        Target.times("`aggregate` against native RocksDB", LONG, "aggregate", 2.5, "native"),
        Target.times("the same on Spark 4.2", LONG, "aggregate", 2.5, "native", VENV42),
        Target.times("the same on Spark 4.3", LONG, "aggregate", 2.5, "native", VENV43),
        Target.times("row form against native RocksDB", LONG, "rows", 1.5, "native"),
        Target.times("the same on Spark 4.2", LONG, "rows", 1.5, "native", VENV42),
        Target.times("the same on Spark 4.3", LONG, "rows", 1.5, "native", VENV43),
        Target.times("row form against `transformWithState`", LONG, "rows", 15, "spark_rows", VENV42),
        Target.times("pandas form against `transformWithStateInPandas`", LONG, "pandas", 25, "spark_pandas", VENV42),
        Target.times("Arrow form against `applyInPandasWithState`", LONG, "arrow", 40, "spark_pandas_state", VENV42),
    ),
)
VARIANTS = (
    _variant("strings", "Keys are strings of 17 characters."),
    _variant("aggregates", "Count, sum, minimum and maximum of one column, and the sum of another."),
    _variant(
        "rows-per-key", "A batch has a tenth as many keys as rows, so that adding up before the shuffle gains more."
    ),
    _variant(
        "skew",
        "One key has a million rows of each batch, 100,000 others have one each on average.",
        [*VARIED, "aggregate_partial"],
    ),
    _variant("columns", "The key is a long, a string and an int."),
)

# -- whether a batch takes longer when the state is larger

FILL_ROWS = 500_000
OURS, HOSTS = "aggregate", "hosts"
FILLING, RUNNING = "{:,} keys: memory of both hosts at most, as they are filled", "{:,} keys: the same, in the batches"
MEMORY = 2 * 2048
"""MiB: ``host_memory`` of two hosts."""


def run_growth(size: Size, steps: Steps) -> Measured:
    """Fill each contestant's state to one size after another, and run batches of distinct random keys in between."""
    import lanes
    from totals import Workload

    names, keys = lanes.chosen(size["contestants"]), sorted(size["keys"])
    measured = lanes.measured_of(names)
    touched = min(size["touched"], keys[0])
    filled = 0
    steps.expect(len(names) * (len(keys) * (size["turns"] + 1) + 1))
    with directory() as root, lanes.session(size["partitions"]) as spark:
        given = lanes.Input(root / "batches", Workload(touched, keys[-1]))
        running = lanes.warmed(spark, names, root, given, 0, steps)
        for count in keys:
            fills = given.fill(filled, count, FILL_ROWS)
            for _ in range(size["warm_up"] + size["turns"] * size["batches"]):
                ids = np.sort(given.rng.choice(count, touched, replace=False))
                given.add(given.workload.batch_of(ids, given.rng))
            lanes.forget_peaks(HOSTS)
            for lane in running:
                steps.now(f"{count:,} keys: filling {lane.contestant.name}")
                lane.run(fills + size["warm_up"])
                lane.check()
                steps.advance()
            filling = lanes.peak_memory(HOSTS)
            lanes.forget_peaks(HOSTS)
            turns = lanes.in_turns(running, size["turns"], size["batches"], steps, f"{count:,} keys")
            measured.cases.append(Case(f"{count:,} keys in the state", "s a batch", turns, x=count))
            if OURS in names:
                peak = lanes.peak_memory(HOSTS)
                measured.cases.append(Case(FILLING.format(count), "MiB", {OURS: [[filling]]}))
                measured.cases.append(Case(RUNNING.format(count), "MiB", {OURS: [[peak]]}))
            filled = count
    measured.notes += [
        f"A batch has {touched:,} rows, each of another key of the state, at random.",
        f"Memory is the kernel's VmHWM, caches and code included; `host_memory` is {MEMORY // 2:,} MiB a host. The "
        f"state is filled by batches of {FILL_ROWS:,} rows.",
    ]
    return measured


STATE = "{:,} keys in the state"
GROWTH = Comparison(
    name="growth",
    title="Growth: batch time as the state grows",
    about="The state is filled to each size, then batches of random keys are run, in one query per contestant.",
    run=run_growth,
    sizes={
        "full": dict(keys=[100_000, 1_000_000, 10_000_000], touched=50_000, contestants=["native", "aggregate"])
        | dict(partitions=2, warm_up=5, turns=3, batches=3),
        "smoke": dict(keys=[5_000, 50_000], touched=5_000, contestants=["native", "aggregate"])
        | dict(partitions=2, warm_up=1, turns=3, batches=2),
    },
    minutes={"full": 45, "smoke": 6},
    targets=(
        Target.times("`aggregate` against native RocksDB, 10^6 keys", STATE.format(10**6), OURS, 4.5, "native"),
        Target.times("`aggregate` against native RocksDB, 10^7 keys", STATE.format(10**7), OURS, 6, "native"),
        Target("growth from 10^5 to 10^7 keys", STATE.format(10**7), OURS, 1.3, "growth", since=STATE.format(10**5)),
        Target.at_most(
            "memory of both hosts with 10^7 keys, twice `host_memory`", FILLING.format(10**7), OURS, MEMORY, "MiB"
        ),
    ),
    in_smoke=False,
    picture="lines",
    x_label="keys in the state",
)

# -- how long a small batch takes, compared with the same stream without state

P50, P99 = "p50 of a batch", "p99 of all batches"


def run_latency(size: Size, steps: Steps) -> Measured:
    """Measure many small batches, given at once in each turn: Spark takes one directly after the other."""
    import lanes
    from totals import Workload

    names = lanes.chosen(size["contestants"])
    measured = lanes.measured_of(names)
    steps.expect(len(names) * (size["turns"] + 1))
    with directory() as root, lanes.session(size["partitions"]) as spark:
        # One file a batch: Spark looks at each.
        given = lanes.Input(root / "batches", Workload(size["rows"], size["keys"]), files=1)
        given.draw(size["warm_up"] + size["turns"] * size["batches"])
        running = lanes.warmed(spark, names, root, given, size["warm_up"], steps)
        turns = lanes.in_turns(running, size["turns"], size["batches"], steps, "batches")
        if size["profile"]:
            measured.notes += [lane.profile(spark) for lane in running]
    # The first batch of a turn waits for Spark's next look into the directory, and its JVM was idle: not counted.
    ms = {name: [[seconds * 1e3 for seconds in turn[1:]] for turn in its] for name, its in turns.items()}
    p99 = {name: [[float(np.quantile(np.concatenate(its), 0.99))]] for name, its in ms.items()}
    measured.cases += [Case(P50, "ms", ms), Case(P99, "ms", p99)]
    measured.notes.append(
        f"A turn is {size['batches']} batches of {size['rows']:,} rows that lie ready, each begun as soon as the one "
        "before is through. Spark's own part (looking for files, its logs, planning) is in all figures; `identity` has "
        "it and the shuffle, and no state."
    )
    return measured


_LATENCY = dict(rows=1_000, contestants=["identity", "native", "aggregate"], partitions=4)
LATENCY = Comparison(
    name="latency",
    title="Latency of a micro-batch",
    about="Small batches as fast as they come. `identity` is the floor: the same shuffle, and a Python stage that "
    "returns its rows.",
    run=run_latency,
    sizes={
        # Short turns, and many: what slows the machine for some seconds then meets all contestants.
        "full": {**_LATENCY, **dict(keys=100_000, warm_up=40, turns=10, batches=12, profile=True)},
        "smoke": {**_LATENCY, **dict(keys=10_000, warm_up=6, turns=3, batches=8, profile=False)},
    },
    minutes={"full": 30, "smoke": 6},
    targets=(
        Target(
            "small batches: what `aggregate` adds to the same stream with an identity function, p50",
            *(P50, "aggregate", 50, "difference", "identity"),
            unit="ms",
        ),
    ),
    in_smoke=False,
)
COMPARISONS = (THROUGHPUT, *VARIANTS, GROWTH, LATENCY)
