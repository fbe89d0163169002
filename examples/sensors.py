"""Sensors that fall silent: a processor with timers, and with state that expires.

    python examples/sensors.py [directory]

Some sensors stop. No row comes from them any more, and yet the stream reports this, some seconds later.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import DataFrame, Row

from ray_statestore import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
    init_spark,
    stop_spark,
    transform_with_state,
)

SENSORS, FAULTY, FILES, READINGS_PER_FILE = 20, 3, 4, 400
SILENT_AFTER_MS, FAULTS_KEPT_MS = 3_000, 3_600_000


class Watch(StatefulProcessor):
    """Reports sensors that have sent nothing for some time, with their faults of the last hour."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "ts timestamp, value double")
        self.faults = handle.getMapState("faults", "code int", "times long", ttlDurationMs=FAULTS_KEPT_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: TimerValues) -> Iterator[Row]:
        last = self.last.get()
        for row in rows:
            if last is None or row.ts > last[0]:
                last = (row.ts, row.value)
            if row.fault is not None:
                (times,) = self.faults.getValue((row.fault,)) or (0,)
                self.faults.updateValue((row.fault,), (times + 1,))
        if last is not None:
            self.last.update(last)

        # One timer per sensor, always some seconds ahead.
        for timer in self.handle.listTimers():
            self.handle.deleteTimer(timer)
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + SILENT_AFTER_MS)
        return iter(())

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[Row]:
        last = self.last.get()
        faults = {code: times for (code,), (times,) in self.faults.iterator()}
        if last is not None:
            yield Row(sensor=key[0], last_seen=last[0], value=last[1], faults=faults)


def write_readings(directory: Path, sensors: range) -> None:
    """Add a parquet file of random readings."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng()
    fault = rng.integers(0, 100, READINGS_PER_FILE)
    readings = pd.DataFrame(
        {
            "sensor": rng.integers(sensors.start, sensors.stop, READINGS_PER_FILE),
            "value": rng.normal(20.0, 1.0, READINGS_PER_FILE).round(2),
            "fault": pd.array(np.where(fault < 5, fault, -1), dtype="Int32").astype("Int32"),
            "ts": pd.Timestamp.now("UTC").floor("us"),
        }
    )
    readings.loc[readings["fault"] < 0, "fault"] = pd.NA
    readings["ts"] = readings["ts"].astype("datetime64[us, UTC]")
    readings.to_parquet(directory / f"readings-{time.time_ns()}.parquet", index=False)


def show(batch: DataFrame, number: int) -> None:
    """Print the output of a micro-batch."""
    for row in sorted(batch.collect()):
        print(f"batch {number}: sensor {row.sensor} is silent since {row.last_seen}, its faults: {row.faults}")


def main(directory: Path) -> None:
    """Stream the readings; let the first sensors fall silent, and a while later the others."""
    write_readings(directory / "readings", range(SENSORS))
    spark = init_spark("sensors", num_executors=2, executor_cores=1, executor_memory="1g")
    try:
        readings = spark.readStream.schema("sensor long, value double, fault int, ts timestamp").parquet(
            str(directory / "readings")
        )
        silent = transform_with_state(
            readings,
            "sensor",
            Watch(),
            "sensor long, last_seen timestamp, value double, faults map<int, long>",
            operator="watch",
            time_mode="processingTime",
            num_partitions=2,
        )
        query = (
            silent.writeStream.outputMode("append")
            .option("checkpointLocation", str(directory / "checkpoint"))
            .foreachBatch(show)
            .start()
        )
        query.processAllAvailable()
        for _ in range(FILES):
            write_readings(directory / "readings", range(FAULTY, SENSORS))
            time.sleep(SILENT_AFTER_MS / 2_000)
        # No more rows come, but timers fire.
        query.awaitTermination(2 * SILENT_AFTER_MS // 1_000)
        query.stop()
    finally:
        stop_spark()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="sensors-") as temporary:
            main(Path(temporary))
