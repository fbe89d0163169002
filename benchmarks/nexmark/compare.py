"""Nexmark's queries about state, this project's operators and Spark's own side by side.

    python -m benchmarks.nexmark.compare                                         all queries, on Spark 3.5
    python -m benchmarks.nexmark.compare q18 q19 --events 500000 --batches 10
    .venv42/bin/python -m benchmarks.nexmark.compare q9 --contestants rows spark_rows

As in ``stateful.py``: each contestant is a streaming query on RayDP with two executors of one core, all get the same
batches (a directory of parquet files per micro-batch), and they take turns. After the last batch, the output of each
contestant in all batches, counted or not, must be that of ``expected.py``, by number of rows and hashes; otherwise no
time is given.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyspark

from . import arrow_processors, events, expected, generator, joins, pandas_functions, processors, queries
from .events import CLOSES_BY_WATERMARK, OUTPUTS, WATERMARK_DELAY_MS
from .generator import NexmarkConf
from .lanes import Check, Lane, check_of
from .queries import CONTESTANTS, contestants_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILES = 2
SPARK_4 = 4
_SENT_TO_EXECUTORS: tuple[ModuleType, ...] = (
    arrow_processors,
    events,
    generator,
    joins,
    pandas_functions,
    processors,
    queries,
)


@dataclass(frozen=True)
class Measurement:
    """The figures of a query's contestant: ``turns`` has the seconds of the batches of each turn.

    ``rows`` events were in each batch; ``output_rows`` is all that the query has given.
    """

    query: str
    contestant: str
    label: str
    rows: int
    output_rows: int
    turns: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each batch."""
        return [s for turn in self.turns for s in turn]


@dataclass(frozen=True)
class _Input:
    """Batches, made once. ``watermarks_ms[i]`` is the watermark after batch i; the last batch closes everything."""

    batches: list[pa.RecordBatch]
    directories: list[Path]
    watermarks_ms: list[int]


def run(
    query: str,
    events_per_batch: int,
    batches: int,
    *,
    spark: SparkSession | None = None,
    contestants: Sequence[str] | None = None,
    warm_up: int = 2,
    turn: int = 1,
    conf: NexmarkConf | None = None,
    partitions: int = 2,
    timeout: float = 300.0,
    report: Callable[[str], None] = lambda step: None,
) -> list[Measurement]:
    """Measure the contestants of a query (None: all that this Spark has): ``batches`` batches after ``warm_up`` ones.

    ``turn`` batches are given at once, after one that does not count, since the queries may have been stopped before.
    Without ``spark``, a session is started. ``report`` is called with each step.
    Raises ``ValueError`` for an unknown query or contestant, ``AssertionError`` for a contestant with wrong output.
    """
    if events_per_batch < 1 or batches < 1 or warm_up < 0 or turn < 1:
        raise ValueError(
            f"events_per_batch={events_per_batch}, batches={batches} and turn={turn} must be positive, and "
            f"warm_up={warm_up} not negative."
        )
    names = available(query)
    if unknown := set(contestants or ()) - set(names):
        raise ValueError(
            f"{query} has no contestants {', '.join(sorted(unknown))} on Spark {pyspark.__version__}; it has "
            f"{', '.join(names)}."
        )
    if spark is None:
        with session(partitions) as own:
            return run(
                query,
                events_per_batch,
                batches,
                spark=own,
                contestants=contestants,
                warm_up=warm_up,
                turn=turn,
                conf=conf,
                timeout=timeout,
                report=report,
            )
    chosen = [c for c in CONTESTANTS if c.query == query and c.name in (names if contestants is None else contestants)]
    conf = conf or NexmarkConf()
    turns = -(-batches // turn)
    with tempfile.TemporaryDirectory(prefix="statestore-nexmark-") as temporary:
        root = Path(temporary)
        report(f"{query}: making {warm_up + turns * (turn + 1)} batches of {events_per_batch:,} events")
        given = _make_input(root / "batches", query, conf, events_per_batch, warm_up + turns * (turn + 1))
        lanes: list[Lane] = []
        measured: list[Measurement] = []
        try:
            for contestant in chosen:
                report(f"{query}: warming up {contestant.name}")
                lane = Lane.start(spark, contestant, root / contestant.name, conf, FILES, timeout)
                lanes.append(lane)
                for i in range(warm_up):
                    lane.run(given.directories[i : i + 1], given.watermarks_ms[i])
                lane.pause()
            seconds: dict[str, list[list[float]]] = {c.name: [] for c in chosen}
            for i in range(turns):
                first = warm_up + i * (turn + 1)
                end = first + turn + 1
                begins = i % len(lanes)
                for lane in (*lanes[begins:], *lanes[:begins]):
                    report(f"{query}: turn {i + 1} of {turns}: {lane.contestant.name}")
                    lane.resume()
                    lane.run(given.directories[first : first + 1], given.watermarks_ms[first])
                    taken = lane.run(given.directories[first + 1 : end], given.watermarks_ms[end - 1])
                    lane.pause()
                    seconds[lane.contestant.name].append(taken)
            report(f"{query}: checking results")
            for lane in lanes:
                lane.resume()
                if query in CLOSES_BY_WATERMARK:
                    lane.run(given.directories[-1:], given.watermarks_ms[-1])
                output_rows = _check(lane, given)
                c = lane.contestant
                measured.append(Measurement(query, c.name, c.label, events_per_batch, output_rows, seconds[c.name]))
        finally:
            for lane in lanes:
                lane.stop()
    return measured


def available(query: str, wanted: Sequence[str] | None = None) -> list[str]:
    """Return the wanted contestants of a query (None: all) that this Spark has."""
    names = [c.name for c in contestants_of(query, has_spark_4=int(pyspark.__version__.split(".")[0]) >= SPARK_4)]
    return [n for n in names if wanted is None or n in wanted]


@contextmanager
def session(partitions: int = 2) -> Iterator[SparkSession]:
    """Give the suite's session, on RayDP with two executors of one core, with times in UTC."""
    # The modules of this directory's parent find each other by their plain names.
    scripts = str(Path(__file__).resolve().parents[1])
    if scripts not in sys.path:
        sys.path.append(scripts)
    from lanes import session as streams
    from pyspark import cloudpickle

    for module in _SENT_TO_EXECUTORS:  # which do not have this directory on their path
        cloudpickle.register_pickle_by_value(module)
    with streams(partitions, configs={"spark.sql.session.timeZone": "UTC"}) as spark:
        yield spark


def _make_input(root: Path, query: str, conf: NexmarkConf, events_per_batch: int, count: int) -> _Input:
    made = list(generator.batches(conf, events_per_batch, count))
    if query in CLOSES_BY_WATERMARK:
        made.append(generator.closing_events(conf, events_per_batch * count))
    directories, watermarks = list[Path](), list[int]()
    # Of a join, the watermark is that of the side which is further behind.
    latest = dict.fromkeys((generator.AUCTION, generator.BID) if query in ("q4", "q9") else (generator.BID,), 0)
    for i, batch in enumerate(made):
        directories.append(root / f"{i:06}")
        generator.write_batch(batch, directories[-1], i, FILES)
        for kind, before in latest.items():
            times = batch.column("date_time").filter(pc.equal(batch.column("event_type"), kind)).cast(pa.int64())
            latest[kind] = max(before, pc.max(times).as_py() or 0)
        reached = min(latest.values()) // 1000 - WATERMARK_DELAY_MS
        watermarks.append(reached if query in CLOSES_BY_WATERMARK else -1)
    return _Input(made, directories, watermarks)


def expected_batches(query: str, batches: Sequence[pa.RecordBatch], times_ms: Sequence[int]) -> list[pa.Table]:
    """Return the expected output: batch by batch, or in one if the query emits what the watermark has closed.

    ``times_ms`` are the processing times of the batches.
    """
    if query == "q12":
        return list(expected.processing_time_counts(batches, times_ms))
    each = {
        "q8": expected.new_sellers,
        "q18": expected.last_bids,
        "q19": expected.top_bids,
        "q20": expected.bids_of_category,
    }
    if query in each:
        return list(each[query](batches))
    return [{"q4": expected.winning_prices, "q9": expected.winning_bids, "q11": expected.sessions}[query](batches)]


def _check(lane: Lane, given: _Input) -> int:
    """Return the number of rows that a contestant gave; raises ``AssertionError`` unless they are the expected ones."""
    query = lane.contestant.query
    if query in CLOSES_BY_WATERMARK:
        # The closing events themselves stay open.
        must, gave = [check_of(expected_batches(query, given.batches[:-1], [])[0])], [lane.total]
    else:
        must = [check_of(rows) for rows in expected_batches(query, given.batches, lane.batch_times_ms())]
        gave = [batch.check for batch in lane.data_batches]
        if lane.total != sum(gave, Check()):
            raise AssertionError(f"{lane.name} gave rows in batches without events.")
    for i, (one, other) in enumerate(zip(gave, must, strict=True)):
        if one != other:
            where = "" if query in CLOSES_BY_WATERMARK else f" in batch {i}"
            raise AssertionError(f"{lane.name} gave {one}{where}, not {other}.")
    return lane.total.rows


def _lines(measured: Sequence[Measurement]) -> Iterator[str]:
    native = {m.query: statistics.median(m.seconds) for m in measured if m.contestant == "native"}
    for m in measured:
        median = statistics.median(m.seconds)
        times = f"{native[m.query] / median:8.2f} x native" if m.query in native else ""
        yield (
            f"{m.query:4} {m.contestant:13} {m.label:36} median {median:7.2f} s  min {min(m.seconds):7.2f} s  "
            f"{m.rows / median / 1e3:8.1f} thousand events/s  {m.output_rows:9,} rows out{times}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("queries", nargs="*", default=list(OUTPUTS), help=f"some of {', '.join(OUTPUTS)} (default all)")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="of each query those of these that it has")
    parser.add_argument("--events", type=int, default=100_000, help="events per batch (default 100000)")
    parser.add_argument("--batches", type=int, default=6, help="batches that count (default 6)")
    parser.add_argument("--turn", type=int, default=1, help="batches in a row of one contestant (default 1)")
    parser.add_argument("--warm-up", type=int, default=3, help="batches before, not counted (default 3)")
    parser.add_argument("--partitions", type=int, default=2, help="state partitions (default 2, one per core)")
    parser.add_argument("--seed", type=int, default=0, help="of the events (default 0)")
    parser.add_argument(
        "--event-rate", type=int, default=10_000, help="events per second of event time (default 10000)"
    )
    parser.add_argument(
        "--out-of-order", type=int, default=1, help="events in a group of mixed order (default 1: none)"
    )
    options = parser.parse_args(arguments)
    conf = NexmarkConf(seed=options.seed, event_rate=options.event_rate, out_of_order_group_size=options.out_of_order)
    chosen = {query: available(query, options.contestants) for query in options.queries}
    with session(options.partitions) as spark:
        for query, names in chosen.items():
            measured = run(
                query,
                options.events,
                options.batches,
                spark=spark,
                contestants=names,
                warm_up=options.warm_up,
                turn=options.turn,
                conf=conf,
                report=lambda step: print(f"  {step}", file=sys.stderr, flush=True),
            )
            print("\n".join(_lines(measured)), flush=True)


if __name__ == "__main__":
    main()
