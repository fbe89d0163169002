"""Nexmark's queries as a comparison of the suite."""

from __future__ import annotations

from suite.comparison import ENVIRONMENTS, VENV, VENV42, Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps
from suite.ratios import Target

LABELS = {
    "aggregate": "`aggregate`",
    "arrow": "`transform_with_state_in_arrow`",
    "rows": "`transform_with_state`",
    "join": "`join` (q4, q9: and `aggregate`)",
    "native": "Spark's own aggregation (q4, q9: behind a join; q8, q20: a join)",
    "spark_rows": "Spark `transformWithState`",
    "spark_pandas": "Spark `applyInPandasWithState`",
}
OURS = frozenset({"aggregate", "arrow", "rows", "join"})
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
    from stateful_queries import ON_ROCKSDB

    from . import compare
    from .generator import NexmarkConf

    conf = NexmarkConf(event_rate=size["event_rate"], out_of_order_group_size=size["out_of_order"])
    chosen = {query: compare.available(query, size["contestants"]) for query in size["queries"]}
    measured = Measured(
        {
            name: Contestant(LABELS[name], {} if name in OURS else ON_ROCKSDB, name in OURS)
            for name in size["contestants"]
            if any(name in names for names in chosen.values())
        },
        notes=[
            "Of every query the number of rows and a sum of their hashes, over all batches, were equal to what pandas "
            "computes from the same events; of q12 from the times that the batches had.",
            "A batch without data that closes windows or auctions, or removes rows of a join, counts with the batch "
            "before. No contestant runs in another's turn; the first batch of a turn does not count.",
            "Spark 3.5 has no `max_by` of several rows, with which Spark's own aggregation writes q19.",
        ],
    )
    with compare.session(size["partitions"]) as spark:
        for query, names in chosen.items():
            found = compare.run(
                query,
                size["events"],
                size["turns"] * size["batches"],
                spark=spark,
                contestants=names,
                warm_up=size["warm_up"],
                turn=size["batches"],
                conf=conf,
                report=steps.now,
            )
            measured.cases.append(Case(TITLES[query], "s a batch", {m.contestant: m.turns for m in found}))
    return measured


def _targets() -> tuple[Target, ...]:
    """Return the target of each query on each line: no workload gains less than 1.4 times against Spark's own."""
    return tuple(
        Target(
            f"Nexmark {query} against Spark's own, {ENVIRONMENTS[environment]}",
            TITLES[query],
            BEST.get(query, "aggregate"),
            1.4,
            against="native",
            at_least=True,
            environment=environment,
        )
        for environment in (VENV, VENV42)
        for query in TITLES
        if (query, environment) != ("q19", VENV)
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
            "full": {
                "queries": list(TITLES),
                "contestants": ["aggregate", "join", "native"],
                "events": 100_000,
                "event_rate": 10_000,
                "out_of_order": 1,
                "partitions": 2,
                "warm_up": 2,
                "turns": 3,
                "batches": 1,
            },
            "smoke": {
                "queries": list(TITLES),
                "contestants": ["aggregate", "arrow", "join", "native"],
                "events": 5_000,
                "event_rate": 500,
                "out_of_order": 1,
                "partitions": 2,
                "warm_up": 1,
                "turns": 2,
                "batches": 1,
            },
        },
        minutes={"full": 60, "smoke": 4},
        environments=(VENV, VENV42),
        targets=_targets(),
        in_smoke=False,
        picture="bars",
    ),
)
