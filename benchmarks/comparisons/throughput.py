"""Running totals of many rows, written in each way that Spark has and in ours, with several keys and distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.comparison import VENV, VENV42, Comparison, Measured
from suite.model import Case, Size
from suite.progress import Steps
from suite.ratios import Target

from comparisons.streams import chosen, cpu, directory, in_turns, measured_of, profile

LABELS = {
    "long": "a long key",
    "strings": "string keys",
    "aggregates": "5 aggregates",
    "rows-per-key": "10 rows a key",
    "skew": "a key with most rows",
    "columns": "a key of 3 columns",
    "all-at-once": "a key of 3 columns, 5 aggregates",
}
VARIED = ["native", "aggregate", "arrow"]
ALL = [
    "native",
    "native_hdfs",
    "aggregate",
    "arrow",
    "rows",
    "identity",
    "pandas",
    "spark_pandas_state",
    "spark_rows",
    "spark_pandas",
]
WORST = 1.4  # no workload is to gain less than this
FULL = {
    "rows": 500_000,
    "keys": 100_000,
    "partitions": 2,
    "warm_up": 6,
    "turns": 3,
    "batches": 3,
    "polling": "3s",
    "profile": True,
}
SMOKE = {
    "rows": 20_000,
    "keys": 4_000,
    "partitions": 2,
    "warm_up": 2,
    "turns": 3,
    "batches": 1,
    "polling": "300ms",
    "profile": False,
}


def _workload(name: str, size: Size) -> Any:
    """One of ``LABELS``; ``rows`` and ``keys`` are those of a batch."""
    from workloads import FIVE, Workload

    label, rows, keys = LABELS[name], size["rows"], size["keys"]
    if name == "strings":
        return Workload(name, label, rows, keys, key="string")
    if name == "aggregates":
        return Workload(name, label, rows, keys, aggregates=FIVE)
    if name == "rows-per-key":
        return Workload(name, label, rows, rows // 10)
    if name == "skew":
        return Workload(name, label, keys, keys, hot_rows=2 * rows)
    if name == "columns":
        return Workload(name, label, rows, keys, key="columns")
    if name == "all-at-once":
        return Workload(name, label, rows, keys, key="columns", aggregates=FIVE)
    return Workload(name, label, rows, keys)


def run(size: Size, steps: Steps) -> Measured:
    """Measure all contestants that this environment has, on each of the workloads."""
    import lanes
    from stateful_queries import CONTESTANTS

    names = chosen(size["contestants"])
    measured = measured_of(names)
    steps.expect(len(size["workloads"]) * len(names) * (size["turns"] + 1))
    with directory() as root, lanes.session(size["partitions"], configs={lanes.POLLING: size["polling"]}) as spark:
        for name in size["workloads"]:
            workload = _workload(name, size)
            given = lanes.Input(root / name / "batches", workload)
            steps.now(f"{workload.label}: making batches")
            for _ in range(size["warm_up"] + size["turns"] * size["batches"]):
                given.add()
            running = []
            for contestant in (CONTESTANTS[n] for n in names):
                steps.now(f"{workload.label}: warming up {contestant.name}")
                lane = lanes.Lane(contestant, root / name / contestant.name, given)
                lanes.start(spark, lane)
                if not contestant.is_slow:
                    lane.run(size["warm_up"])
                    lane.check()
                running.append(lane)
                steps.advance()
            turns = in_turns(running, size["turns"], size["batches"], steps, workload.label)
            measured.cases.append(Case(workload.label, "s a batch", turns))
            steps.say(
                f"{workload.label}: " + ", ".join(f"{n} {min(min(turn) for turn in t):.2f} s" for n, t in turns.items())
            )
            measured.cases.append(cpu(workload.label, running))
            if size["profile"]:
                measured.notes += [profile(spark, lane) for lane in running]
            for lane in running:
                lane.stop()
    return measured


def _variant(name: str, about: str, contestants: Sequence[str] = VARIED) -> Comparison:
    what = f"`aggregate` against native RocksDB, {LABELS[name]}"
    return Comparison(
        name=f"throughput-{name}",
        title=f"Throughput: {LABELS[name]}",
        about=about,
        run=run,
        sizes={
            "full": {"workloads": [name], "contestants": list(contestants), **FULL},
            "smoke": {"workloads": [name], "contestants": list(contestants), **SMOKE},
        },
        minutes={"full": 30, "smoke": 6},
        targets=(Target(what, LABELS[name], "aggregate", WORST, against="native", at_least=True),),
        in_smoke=False,
        picture="bars",
    )


COMPARISONS = (
    Comparison(
        name="throughput",
        title="Throughput: running count and sum",
        about="Random users, each as likely as any other; a count and a sum of each user's amounts. The time of a "
        "batch is Spark's `triggerExecution`. The pandas forms and Spark's Python forms take one batch in each of "
        "the first two turns, and none to warm up.",
        run=run,
        sizes={
            "full": {"workloads": ["long"], "contestants": ALL, **FULL},
            "smoke": {
                "workloads": ["all-at-once"],
                "contestants": ["native", "aggregate", "arrow", "rows"],
                **SMOKE,
            },
        },
        minutes={"full": 90, "smoke": 6},
        environments=(VENV, VENV42),
        targets=(
            Target(
                "`aggregate` against native RocksDB", LABELS["long"], "aggregate", 2.5, against="native", at_least=True
            ),
            Target(
                "the same on Spark 4.2",
                LABELS["long"],
                "aggregate",
                2.5,
                against="native",
                at_least=True,
                environment=VENV42,
            ),
            Target("row form against native RocksDB", LABELS["long"], "rows", 1.5, against="native", at_least=True),
            Target(
                "the same on Spark 4.2",
                LABELS["long"],
                "rows",
                1.5,
                against="native",
                at_least=True,
                environment=VENV42,
            ),
            Target(
                "row form against `transformWithState`",
                LABELS["long"],
                "rows",
                15,
                against="spark_rows",
                at_least=True,
                environment=VENV42,
            ),
            Target(
                "pandas form against `transformWithStateInPandas`",
                LABELS["long"],
                "pandas",
                25,
                against="spark_pandas",
                at_least=True,
                environment=VENV42,
            ),
            Target(
                "Arrow form against `applyInPandasWithState`",
                LABELS["long"],
                "arrow",
                40,
                against="spark_pandas_state",
                at_least=True,
                environment=VENV42,
            ),
        ),
        picture="bars",
    ),
    _variant("strings", "Keys are strings of 17 characters."),
    _variant("aggregates", "Count, sum, least and greatest of one column, and the sum of another."),
    _variant(
        "rows-per-key", "A tenth as many keys as rows in a batch: what is added up before the shuffle is worth more."
    ),
    _variant(
        "skew",
        "One key has a million rows of each batch, 100,000 others have one each on average.",
        [*VARIED, "aggregate_partial"],
    ),
    _variant("columns", "The key is a long, a string and an int."),
)
