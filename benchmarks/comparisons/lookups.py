"""Reading the state of a running stream, compared with Redis."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

from suite.comparison import Comparison, Measured
from suite.model import Case, Contestant, Size
from suite.progress import Steps
from suite.ratios import Target

OURS, REDIS = "ours", "redis"
SCAN = "scan of all rows"
UNITS = {"single": "lookups/s", "async": "lookups/s", "batched": "keys/s"}
WORK = {
    "single": "single blocking lookups",
    "async": "64 lookups in flight",
    "batched": "1,000 random keys a call",
}


def _contestants() -> dict[str, Contestant]:
    return {
        OURS: Contestant(
            "QueryableStateClient and AsyncQueryableStateClient, beside an idle stream on RayDP",
            {"direct": "True"},
            True,
        ),
        REDIS: Contestant(
            "redis-py with hiredis, the same values by msgpack under totals:<user>", {"save": "''", "appendonly": "no"}
        ),
    }


def run(size: Size, steps: Steps) -> Measured:
    """Measure lookups by several client processes, and a scan, in turns."""
    import queries

    keys, turns = size["keys"], size["turns"]
    measured = Measured(_contestants())
    steps.expect(2 * turns * (len(size["work"]) * len(size["clients"]) + 1))
    with queries.running_stream(keys, size["partitions"], {}) as _, queries.running_redis(keys) as port:
        queries.check_equal(port, keys)
        address, token = queries.connection()
        os.environ["STATESTORE_TOKEN"] = token
        places = {OURS: address, REDIS: str(port)}
        for work in size["work"]:
            for count in size["clients"]:
                found: dict[str, list[queries.Figures]] = {OURS: [], REDIS: []}
                what = f"{WORK[work]}, {count} client{'s' if count > 1 else ''}"
                with ExitStack() as stack:
                    begun = {
                        name: stack.enter_context(queries.clients(name, work, place, count, size["seconds"], keys))
                        for name, place in places.items()
                    }
                    for turn in range(turns):
                        for name in (OURS, REDIS) if turn % 2 == 0 else (REDIS, OURS):
                            steps.now(f"{what}: turn {turn + 1} of {turns}, {name}")
                            found[name].append(queries.turn(begun[name]))
                            steps.advance()
                for figure, label in (
                    ("keys_per_second", what),
                    ("p50_ms", f"{what}, p50"),
                    ("p99_ms", f"{what}, p99"),
                ):
                    is_rate = figure == "keys_per_second"
                    its = {name: [[f[figure]] for f in figures] for name, figures in found.items()}
                    measured.cases.append(Case(label, UNITS[work] if is_rate else "ms", its, more_is_better=is_rate))
        measured.cases.append(_scan(keys, port, turns, steps))
    measured.notes += [
        "Before anything was timed, 2,000 keys, absent ones among them, had the same values in both; both scans had "
        "the same sums.",
        "Clients are processes that know an address and have neither Ray nor Spark. Servers, clients and the stream "
        "share the cores. p99 is that of the slowest client.",
    ]
    return measured


def _scan(keys: int, port: int, turns: int, steps: Steps) -> Case:
    """Measure a scan of all rows: ours as Arrow batches, Redis' by SCAN and MGET with unpacked values."""
    import msgpack
    import pyarrow.compute as pc
    import redis
    from query_clients import OPERATOR

    from spark_bridge import QueryableStateClient

    store = redis.Redis(port=port)

    def ours() -> tuple[int, float]:
        rows, spent = 0, 0.0
        with QueryableStateClient.connect() as client:
            for batch in client.scan(OPERATOR):
                rows += batch.num_rows
                spent += pc.sum(batch.column("spent")).as_py()
        return rows, spent

    def theirs() -> tuple[int, float]:
        rows, spent, cursor = 0, 0.0, 0
        while True:
            cursor, found = store.scan(cursor, count=10_000)
            values = [msgpack.unpackb(value) for value in store.mget(found)] if found else []
            rows += len(values)
            spent += sum(value[1] for value in values)
            if not cursor:
                return rows, spent

    expected = (keys, keys * (keys - 1) / 4)
    rates: dict[str, list[list[float]]] = {OURS: [], REDIS: []}
    for turn in range(turns):
        for name, work in ((OURS, ours), (REDIS, theirs)) if turn % 2 == 0 else ((REDIS, theirs), (OURS, ours)):
            steps.now(f"scan: turn {turn + 1} of {turns}, {name}")
            began = time.perf_counter()
            found = work()
            rates[name].append([keys / (time.perf_counter() - began)])
            if found != expected:
                raise AssertionError(f"The scan of {name} gave {found}, not {expected} (rows, sum of spent).")
            steps.advance()
    return Case(SCAN, "rows/s", rates, more_is_better=True)


COMPARISONS = (
    Comparison(
        name="queries",
        title="Queries of a running stream beside Redis",
        about="Of each user a count, a sum and the last time, kept by `aggregate`, beside the same values in Redis.",
        run=run,
        sizes={
            "full": {
                "keys": 1_000_000,
                "partitions": 4,
                "work": ["single", "async", "batched"],
                "clients": [1, 8],
                "turns": 5,
                "seconds": 3.0,
            },
            "smoke": {
                "keys": 20_000,
                "partitions": 4,
                "work": ["single", "batched"],
                "clients": [1],
                "turns": 3,
                "seconds": 0.5,
            },
        },
        minutes={"full": 20, "smoke": 6},
        targets=(
            *(
                Target(what, what, OURS, 0.8, against=REDIS, at_least=True)
                for what in (f"{WORK['single']}, 1 client", f"{WORK['single']}, 8 clients")
            ),
            Target(
                f"{WORK['batched']}, 8 clients, against `MGET`",
                f"{WORK['batched']}, 8 clients",
                OURS,
                1.2,
                against=REDIS,
                at_least=True,
            ),
            Target(SCAN, SCAN, OURS, 5e6, "value", unit="rows/s", at_least=True),
        ),
        picture="bars",
    ),
)
