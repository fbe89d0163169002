"""Nexmark's queries as a comparison of the suite."""

from __future__ import annotations

from suite.model import ENVIRONMENTS, VENV, VENV42, VENV43, Case, Comparison, Contestant, Measured, Size, Target
from suite.runner import Steps

LABELS = {
    "aggregate": "`aggregate`",
    "identity": "a shuffle and `mapInArrow` of an identity (q11, q12, q18, q19)",
    "join": "`join` (q4, q9: and `aggregate`)",
    "native": "Spark's own aggregation (q4, q9: behind a join; q8, q20: a join)",
}
OURS = frozenset({"aggregate", "join"})
BEST = {"q4": "join", "q8": "join", "q9": "join", "q20": "join"}  # our form that the targets of a query apply to
TITLES = {
    "q4": "q4, average winning prices per category and 10 s in which auctions opened",
    "q8": "q8, people who open an auction within the 10 s in which they register",
    "q9": "q9, auctions with their winning bid",
    "q11": "q11, bids per bidder and session",
    "q12": "q12, bids per bidder and 10 s of processing time",
    "q18": "q18, last bid per bidder and auction",
    "q19": "q19, top 10 bids per auction",
    "q20": "q20, bids with their auctions",
}


def run(size: Size, steps: Steps) -> Measured:
    """Measure all queries, one after the other in one session, the contestants of each in turns."""
    from totals import ON_ROCKSDB

    from . import lanes
    from .generator import NexmarkConf

    conf = NexmarkConf(event_rate=size["event_rate"], out_of_order_group_size=size["out_of_order"])
    chosen = {query: lanes.available(query, size["contestants"]) for query in size["queries"]}
    measured = Measured(
        {
            name: Contestant(LABELS[name], {} if name in OURS else ON_ROCKSDB, name in OURS)
            for name in size["contestants"]
            if any(name == c.name for its in chosen.values() for c in its)
        },
        notes=[
            "Of every query the number of rows and a sum of their hashes, over all batches, were equal to what pandas "
            "computes from the same events; of q12 from the times that the batches had. `identity` answers nothing.",
            "A batch without data that closes windows or auctions, or removes rows of a join, counts with the batch "
            "before. No contestant runs in another's turn; the first batch of a turn does not count.",
            "Spark 3.5 has no `max_by` of several rows, which Spark's own aggregation needs for q19.",
            "On Spark 4.3 the executors are those of Spark's own cluster, since RayDP has none for it.",
        ],
    )
    with lanes.session(size["partitions"]) as spark:
        for query, contestants in chosen.items():
            if not contestants:
                continue
            turns, profiles = lanes.measure(spark, contestants, size, conf, steps)
            measured.cases.append(Case(TITLES[query], "s a batch", turns))
            measured.notes += profiles
    return measured


def _targets() -> tuple[Target, ...]:
    """Return the target of each query on each line: no workload gains less than 1.4 times against Spark's own."""
    return tuple(
        Target.times(
            f"Nexmark {query} against Spark's own, {ENVIRONMENTS[environment]}",
            *(TITLES[query], BEST.get(query, "aggregate"), 1.4, "native", environment),
        )
        for environment in (VENV, VENV42, VENV43)
        for query in TITLES
        if (query, environment) != ("q19", VENV)
    )


_USUAL = dict(
    queries=list(TITLES),
    contestants=["aggregate", "join", "identity", "native"],
    out_of_order=1,
    partitions=2,
    batches=1,
)
COMPARISONS = (
    Comparison(
        name="nexmark",
        title="Nexmark: the queries that are about state",
        about="Events as of Nexmark's generator, 1 person, 3 auctions and 46 bids of 50, with its hot keys and 10,000 "
        "events per second of event time; and the queries that keep state by key. Bids are read from parquet files "
        "with the others.",
        run=run,
        sizes={
            "full": {**_USUAL, **dict(events=100_000, event_rate=10_000, warm_up=2, turns=3)},
            "smoke": {**_USUAL, **dict(events=5_000, event_rate=500, warm_up=1, turns=2)},
        },
        minutes={"full": 60, "smoke": 8},
        environments=(VENV, VENV42, VENV43),
        targets=_targets(),
        in_smoke=False,
    ),
)
