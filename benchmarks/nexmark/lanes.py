"""Nexmark's queries as streams in turns: the batches of each, the time that each took, and a check of all output.

The time of a batch is Spark's ``triggerExecution``. Behind a batch that has moved the watermark, Spark runs one without
data, which emits and removes what the watermark has closed; its time is added to that of the batch before. A turn ends
when the query has nothing left to do, so that this batch does not run in the turn of the next contestant. A query that
runs a batch a second, data or not, is stopped between its turns. Batches with neither data nor a new watermark are idle
and do not count.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lanes import Profile, cpu_seconds, give, has_spark_4, write_batch, writer_of
from lanes import session as streams
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from suite.machine import directory
from suite.model import Size, Turns, rotated
from suite.runner import Steps

from backends.encoding.key_groups import spark_xxhash64

from . import expected, generator, queries
from .generator import SPARK_SCHEMA, NexmarkConf
from .queries import CLOSES_BY_WATERMARK, CONTESTANTS, OUTPUTS, WATERMARK_DELAY_MS, NexmarkContestant

CHECK = "check"
HASH_SHIFT = 24
LOOK_EVERY = 0.05
FILES = 2
TIMEOUT = 300.0
"""Seconds that a batch may take."""
TICKS = "RateStream"
"""Part of the description of the source that makes a query run a batch a second."""
WAITS = "Waiting for data to arrive"
"""Spark's message for a query that has nothing to do, not even for an advanced watermark."""


@dataclass(frozen=True)
class Check:
    """The number of rows, and a sum of their hashes, which does not depend on their order."""

    rows: int = 0
    hashes: int = 0

    def __add__(self, other: Check) -> Check:
        return Check(self.rows + other.rows, self.hashes + other.hashes)


def observed(df: DataFrame) -> DataFrame:
    """Return the same rows, with the ``Check`` of each batch in its progress."""
    hashes = F.shiftrightunsigned(F.xxhash64(*df.columns), HASH_SHIFT)
    return df.observe(CHECK, F.count(F.lit(1)).alias("rows"), F.sum(hashes).alias("hashes"))


def check_of(rows: pa.Table) -> Check:
    check = Check()
    for batch in rows.to_batches():
        hashes = spark_xxhash64(batch).view(np.uint64) >> np.uint64(HASH_SHIFT)
        check += Check(batch.num_rows, int(hashes.sum()))
    return check


@dataclass
class Batch:
    """An executed micro-batch. ``watermark_ms`` is -1 in a query without one."""

    number: int
    seconds: float
    has_data: bool
    watermark_ms: int
    check: Check
    progress: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, progress: dict[str, Any]) -> Batch:
        check = progress.get("observedMetrics", {}).get(CHECK, {})
        data = [s["numInputRows"] for s in progress["sources"] if s["description"].startswith("FileStreamSource")]
        said = progress.get("eventTime", {}).get("watermark")
        watermark = None if said is None else datetime.fromisoformat(said.replace("Z", "+00:00"))
        return cls(
            progress["batchId"],
            progress["durationMs"]["triggerExecution"] / 1e3,
            sum(data) > 0,
            -1 if watermark is None else round(watermark.timestamp() * 1000),
            Check(check.get("rows") or 0, check.get("hashes") or 0),
            progress,
        )


def seconds_by_batch(executed: Sequence[Batch], first: int) -> list[float]:
    """Return the seconds of each batch with data from batch ``first`` on, with the batches without data behind it."""
    seconds: list[float] = []
    for before, batch in zip((None, *executed[:-1]), executed, strict=True):
        if batch.number < first:
            continue
        if batch.has_data:
            seconds.append(batch.seconds)
        elif seconds and before is not None and batch.watermark_ms > before.watermark_ms:
            seconds[-1] += batch.seconds
    return seconds


@dataclass
class Lane:
    name: str
    contestant: NexmarkContestant
    query: Any
    root: Path
    begin: Callable[[], Any]
    executed: list[Batch] = field(default_factory=list)
    given: int = 0
    counted: list[dict[str, Any]] = field(default_factory=list)
    spent: Profile = field(default_factory=Profile)

    @classmethod
    def start(cls, spark: SparkSession, contestant: NexmarkContestant, root: Path, conf: NexmarkConf) -> Lane:
        """Start a query that waits for input, ``FILES`` files a batch."""
        (root / "input").mkdir(parents=True)
        events = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", FILES).parquet(f"{root}/input/*")
        name = f"{contestant.query}_{contestant.name}"
        writer = writer_of(observed(contestant.make(events, conf)), name, contestant.output_mode, root)
        return cls(name, contestant, writer.start(), root, writer.start)

    def run(self, directories: Sequence[Path], watermark_ms: int = -1) -> list[float]:
        """Add these batches at once, wait for them and for the windows that the watermark closes; return their seconds.

        If the query runs a batch a second, data or not, wait until its watermark is ``watermark_ms``. -1: wait until
        Spark reports that the query waits for data.
        Raises ``RuntimeError`` if the query fails, ``TimeoutError`` if a batch takes too long.
        """
        first = len(self.executed)
        if not self.contestant.answers:  # it has no state, so nothing runs after the batch to close windows
            watermark_ms = -1
        for source in directories:
            give(source, self.root)
        self.given += len(directories)
        deadline = time.monotonic() + TIMEOUT * (len(directories) + 1)
        while not self._is_through(watermark_ms):
            if (error := self.query.exception()) is not None:
                raise RuntimeError(f"{self.name} failed: {error}") from error
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self.name} was not through with {self.given} batches and watermark {watermark_ms} in time; it "
                    f"has executed {self.executed[-3:]} last."
                )
            time.sleep(LOOK_EVERY)
            self._look()
        self._look()
        return seconds_by_batch(self.executed, first)

    def profile(self, spark: SparkSession) -> str:
        return self.spent.text(spark, self.name, self.counted)

    def pause(self) -> None:
        """End the query until ``resume``, if it has a source that always has rows."""
        last = self.query._jsq.lastProgress()
        if last is not None and TICKS in last.json():
            self.query.stop()
            self._look()

    def resume(self) -> None:
        """Restart the query from its checkpoint, unless it runs or has failed."""
        if not self.query.isActive and self.query.exception() is None:
            self.query = self.begin()

    @property
    def total(self) -> Check:
        return sum((batch.check for batch in self.executed), Check())

    @property
    def data_batches(self) -> list[Batch]:
        return [batch for batch in self.executed if batch.has_data]

    def batch_times_ms(self) -> list[int]:
        """Return the processing time of each batch that had events, from its entry in ``offsets``."""
        times = []
        for batch in self.data_batches:
            lines = (self.root / "checkpoint" / "offsets" / str(batch.number)).read_text().splitlines()
            times.append(int(json.loads(lines[1])["batchTimestampMs"]))
        return times

    def stop(self) -> None:
        """End the query, and remove its files."""
        self.query.stop()
        shutil.rmtree(self.root, ignore_errors=True)

    def _is_through(self, watermark_ms: int) -> bool:
        if len(self.data_batches) < self.given:
            return False
        if watermark_ms < 0:
            return bool(self.query.status["message"] == WAITS)
        return any(batch.watermark_ms >= watermark_ms for batch in self.executed[-1:])

    def _look(self) -> None:
        last = self.query._jsq.lastProgress()
        if last is None or last.batchId() < len(self.executed):
            return
        for event in self.query._jsq.recentProgress():
            if event.batchId() == len(self.executed):
                progress = json.loads(event.json())
                # An idle trigger reports a batch that was not executed.
                if "addBatch" in progress["durationMs"]:
                    if CHECK not in progress.get("observedMetrics", {}):
                        progress["observedMetrics"] = {CHECK: self._observed(event.batchId())}
                    self.executed.append(Batch.of(progress))

    def _observed(self, number: int) -> dict[str, int]:
        """Return what was observed in the last batch, if it had no data; Spark's progress does not have this."""
        execution = self.query._jsq.streamingQuery().lastExecution()
        if execution is None or execution.currentBatchId() != number:
            raise RuntimeError(
                f"{self.name} began another batch before the output of batch {number} was read; add fewer at once."
            )
        seen = execution.observedMetrics().get(CHECK)
        if seen.isEmpty() or seen.get().isNullAt(1):
            return {}
        return {"rows": seen.get().getLong(0), "hashes": seen.get().getLong(1)}


# -- a query's contestants in turns


@dataclass(frozen=True)
class _Input:
    """Batches, made once. ``watermarks_ms[i]`` is the watermark after batch i; the last batch closes everything."""

    batches: list[pa.RecordBatch]
    directories: list[Path]
    watermarks_ms: list[int]


def measure(
    spark: SparkSession, contestants: Sequence[NexmarkContestant], size: Size, conf: NexmarkConf, steps: Steps
) -> tuple[Turns, list[str]]:
    """Return the seconds of the batches of each turn, by contestant of one query, and a profile of each.

    The batches of a turn are given at once, after one that does not count, since the queries may have been stopped
    before. Raises ``AssertionError`` for a contestant with wrong output.
    """
    warm_up, turns, batches, query = size["warm_up"], size["turns"], size["batches"], contestants[0].query
    with directory() as root:
        steps.now(f"{query}: making the batches")
        given = _make_input(root / "batches", query, conf, size["events"], warm_up + turns * (batches + 1))
        lanes: list[Lane] = []
        try:
            for contestant in contestants:
                steps.now(f"{query}: warming up {contestant.name}")
                lane = Lane.start(spark, contestant, root / contestant.name, conf)
                lanes.append(lane)
                for i in range(warm_up):
                    lane.run(given.directories[i : i + 1], given.watermarks_ms[i])
                lane.pause()
            seconds: Turns = {lane.contestant.name: [] for lane in lanes}
            for i in range(turns):
                first = warm_up + i * (batches + 1)
                end = first + batches + 1
                for lane in rotated(lanes, i):
                    steps.now(f"{query}: turn {i + 1} of {turns}: {lane.contestant.name}")
                    lane.resume()
                    lane.run(given.directories[first : first + 1], given.watermarks_ms[first])
                    executed, before = len(lane.executed), cpu_seconds()
                    taken = lane.run(given.directories[first + 1 : end], given.watermarks_ms[end - 1])
                    lane.counted += [batch.progress for batch in lane.executed[executed:] if batch.has_data]
                    lane.spent.note_turn(lane.query, before, batches)
                    lane.pause()
                    seconds[lane.contestant.name].append(taken)
            steps.now(f"{query}: checking results")
            profiles = [lane.profile(spark) for lane in lanes]
            for lane in (lane for lane in lanes if lane.contestant.answers):
                lane.resume()
                if query in CLOSES_BY_WATERMARK:
                    lane.run(given.directories[-1:], given.watermarks_ms[-1])
                _check(lane, given)
        finally:
            for lane in lanes:
                lane.stop()
    return seconds, profiles


def available(query: str, wanted: Sequence[str]) -> list[NexmarkContestant]:
    """Return the wanted contestants that this Spark can run; raises ``ValueError`` for an unknown query."""
    if query not in OUTPUTS:
        raise ValueError(f"Unknown query {query!r}; the queries are {', '.join(OUTPUTS)}.")
    of_query = (c for c in CONTESTANTS if c.query == query and c.name in wanted)
    return [c for c in of_query if has_spark_4() or not c.needs_spark_4]


@contextmanager
def session(partitions: int = 2) -> Iterator[SparkSession]:
    """Give the suite's session, with times in UTC."""
    for module in (generator, queries):  # executors do not have this directory on their path
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
        write_batch(pa.Table.from_batches([batch]), directories[-1], FILES)
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


def _check(lane: Lane, given: _Input) -> None:
    """Raise ``AssertionError`` unless a contestant gave the expected rows."""
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
