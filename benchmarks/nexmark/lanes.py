"""One contestant's running query: its batches, the time that each took, and a check of its whole output.

The time of a batch is Spark's ``triggerExecution``. Behind a batch that has moved the watermark, Spark runs one without
data, which emits and removes what the watermark has closed; its time is added to that of the batch before. A turn ends
when the query has nothing left to do, so that this batch does not run in the turn of the next contestant. A query that
runs a batch a second, data or not, is stopped between its turns. Batches with neither data nor a new watermark are idle
and do not count.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from backends.encoding.key_groups import spark_xxhash64

from .generator import SPARK_SCHEMA, NexmarkConf
from .queries import NexmarkContestant

CHECK = "check"
HASH_SHIFT = 24
LOOK_EVERY = 0.05
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
    """Return the ``Check`` of expected rows."""
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

    @classmethod
    def of(cls, progress: dict[str, Any]) -> Batch:
        """Read a batch from Spark's progress."""
        check = progress.get("observedMetrics", {}).get(CHECK, {})
        data = [s["numInputRows"] for s in progress["sources"] if s["description"].startswith("FileStreamSource")]
        watermark = progress.get("eventTime", {}).get("watermark")
        return cls(
            progress["batchId"],
            progress["durationMs"]["triggerExecution"] / 1e3,
            sum(data) > 0,
            -1 if watermark is None else _milliseconds(watermark),
            Check(check.get("rows") or 0, check.get("hashes") or 0),
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
    """A query and the batches that it has executed. ``timeout`` is how many seconds a batch may take."""

    contestant: NexmarkContestant
    query: Any
    root: Path
    timeout: float
    begin: Callable[[], Any]
    executed: list[Batch] = field(default_factory=list)
    given: int = 0

    @classmethod
    def start(
        cls,
        spark: SparkSession,
        contestant: NexmarkContestant,
        root: Path,
        conf: NexmarkConf,
        files: int,
        timeout: float,
    ) -> Lane:
        """Start a query that waits for input, ``files`` files a batch."""
        (root / "input").mkdir(parents=True)
        events = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", files).parquet(f"{root}/input/*")
        writer = (
            observed(contestant.make(events, conf))
            .writeStream.queryName(f"{contestant.query}_{contestant.name}")
            .outputMode(contestant.output_mode)
            .option("checkpointLocation", str(root / "checkpoint"))
            .format("noop")
        )
        return cls(contestant, writer.start(), root, timeout, writer.start)

    def run(self, directories: Sequence[Path], watermark_ms: int = -1) -> list[float]:
        """Add these batches at once, wait for them and for the windows that the watermark closes; return their seconds.

        If the query runs a batch a second, data or not, wait until its watermark is ``watermark_ms``. -1: wait until
        Spark reports that the query waits for data.
        Raises ``RuntimeError`` if the query fails, ``TimeoutError`` if a batch takes too long.
        """
        first = len(self.executed)
        for source in directories:
            # Files appear all at once, by a rename.
            draft = self.root / f"draft-{source.name}"
            shutil.copytree(source, draft, copy_function=os.link)
            draft.rename(self.root / "input" / source.name)
        self.given += len(directories)
        deadline = time.monotonic() + self.timeout * (len(directories) + 1)
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
    def name(self) -> str:
        """Return the query's name."""
        return f"{self.contestant.query} {self.contestant.name}"

    @property
    def total(self) -> Check:
        """Return the ``Check`` of the query's whole output."""
        return sum((batch.check for batch in self.executed), Check())

    @property
    def data_batches(self) -> list[Batch]:
        """Return the batches that had events."""
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


def _milliseconds(time_text: str) -> int:
    return round(datetime.fromisoformat(time_text.replace("Z", "+00:00")).timestamp() * 1000)
