"""The demo's stream process: the Spark driver, and at the end the comparison with pandas.

Run as ``python -m spark_bridge.demo.stream <StreamOptions as JSON>`` by ``app``.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import ray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from backends import StateStoreConf
from backends.decoders import json_decoder
from spark_bridge import QueryableStateClient, aggregate, init_spark, stop_spark
from spark_bridge import functions as S
from spark_bridge.demo.events import (
    BatchCommitted,
    DemoError,
    DemoEvent,
    EventPipe,
    Failed,
    HostKilled,
    HostsPlaced,
    Progress,
    Started,
    StreamOptions,
    Verified,
)
from spark_bridge.demo.expected import FLIGHT_KEY, expected_state, first_difference
from spark_bridge.demo.flights import (
    OPERATOR,
    SPARK_SCHEMA,
    batch_bounds,
    load_flights,
    release_files,
    retract_files,
)
from spark_bridge.demo.processes import end_with_parent
from spark_bridge.demo.ray_for_demo import (
    EXECUTOR_MEMORY,
    RayForDemo,
    hosts_by_machine,
    machines_of_cluster,
    own_cluster,
)
from spark_bridge.session.cluster.java import ensure_java
from spark_bridge.session.current import current_cluster

log = logging.getLogger(__name__)

UNKNOWN_KEYS = ["N00000", "", "no such aircraft", "n14228"]
STREAM_POLL_SECONDS = 0.05
BATCH_TIMEOUT_S = 120.0
COMPLETION_TIMEOUT_S = 120.0


class FlightStream:
    """One run of the demo's query, from its start to the comparison at its end."""

    def __init__(self, options: StreamOptions, events: EventPipe) -> None:
        self._options = options
        self._send = events.send
        self._directory = Path(options.directory)
        self._touched: dict[int, int] = {}
        self._seen: set[str | None] = set()
        self._hosts: dict[str, int] = {}

    def run(self) -> None:
        """Run the query over the flights and check its state. Raises ``DemoError`` if the state is wrong."""
        self._send(Progress("loading the flights"))
        flights = load_flights()
        batches = self._options.batches
        files, checkpoint = self._directory / "flights", self._directory / "checkpoint"
        done = highest_batch(checkpoint / "commits") + 1
        # A batch that was planned but not committed is the next to run, so the target is never lower.
        target = min(batches, done + (self._options.stop_after or batches))
        retract_files(files, batches, keep=target)
        release_files(flights, files, batches, target)

        self._send(Progress("starting Ray" if self._options.machines is None else "joining the Ray cluster"))
        with self._ray() as cluster:
            self._send(Progress("starting Spark on Ray"))
            conf = StateStoreConf(provider=self._options.backend)
            spark = init_spark(
                "flights-demo", executor_cores=1, executor_memory=EXECUTOR_MEMORY, conf=conf, **cluster.executors
            )
            try:
                self._run_query(spark, flights, cluster.address, done, target)
            finally:
                stop_spark()

    def _ray(self) -> AbstractContextManager[RayForDemo]:
        machines = self._options.machines
        return own_cluster(Path(self._options.ray_directory)) if machines is None else machines_of_cluster(machines)

    def _run_query(self, spark: SparkSession, flights: pd.DataFrame, address: str, done: int, target: int) -> None:
        self._send(Progress("starting the query"))
        query = self._start(spark)
        try:
            self._send(Started(address, done, target))
            if done:
                self._seen.update(self._keys_in_state(flights))
            self._follow(query, done, target)
            self._send(Progress("comparing the state with pandas"))
            wait_until_completed(target)
            self._verify(flights.iloc[: batch_bounds(len(flights), self._options.batches)[target]], flights)
        finally:
            query.stop()

    def _start(self, spark: SparkSession) -> StreamingQuery:
        flights = (
            spark.readStream.schema(SPARK_SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(f"file://{self._directory}/flights")
        )
        state = aggregate(
            flights,
            by=FLIGHT_KEY,
            operator=OPERATOR,
            num_partitions=self._options.partitions,
            flights=S.count(),
            air_time=S.sum("air_time"),
            mean_delay=S.mean("arr_delay"),
            worst_delay=S.max("arr_delay"),
            last_departure=S.max("departure"),
            last_dest=S.last("dest", by="departure"),
        )
        return (
            state.writeStream.queryName("flights")
            .outputMode("append")
            .option("checkpointLocation", f"file://{self._directory}/checkpoint")
            .foreachBatch(self._sink)
            .start()
        )

    @staticmethod
    def _keys_in_state(flights: pd.DataFrame) -> list[str | None]:
        """Return the aircraft that earlier runs have left in the state."""
        candidates = [None, *flights[FLIGHT_KEY].dropna().unique().tolist()]
        with QueryableStateClient.connect() as client:
            answer: pa.Table = client.get_many(OPERATOR, candidates)
        counts = answer.column("flights").to_pylist()
        return [key for key, count in zip(candidates, counts, strict=True) if count is not None]

    def _sink(self, changed: DataFrame, batch_id: int) -> None:
        """Count the aircraft that the batch changed, in place of a real sink."""
        keys = [row[0] for row in changed.select(FLIGHT_KEY).collect()]
        self._touched[batch_id] = len(keys)
        self._seen.update(keys)

    def _follow(self, query: StreamingQuery, done: int, target: int) -> None:
        """Report each committed batch until ``target`` batches are committed."""
        kill_at = done + max(1, (target - done) // 2) if self._options.kill_host else None
        reported = done
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        while reported < target:
            error = query.exception()
            if error is not None:
                raise DemoError(f"the query failed: {error}")
            if not query.isActive:
                raise DemoError(f"the query stopped by itself after batch {reported}")
            for progress in query.recentProgress:
                number = progress["batchId"] + 1
                if number <= reported or progress["numInputRows"] == 0:
                    continue
                self._send(self._describe(progress))
                self._say_where_hosts_stand()
                reported = number
                deadline = time.monotonic() + BATCH_TIMEOUT_S
                if kill_at is not None and reported >= kill_at and reported < target:
                    kill_at = None
                    threading.Timer(0.1, self._kill_host, [reported + 1]).start()
            if time.monotonic() > deadline:
                raise DemoError(f"batch {reported + 1} was not committed within {BATCH_TIMEOUT_S:.0f} s")
            time.sleep(STREAM_POLL_SECONDS)

    def _describe(self, progress: Any) -> DemoEvent:
        batch_id = progress["batchId"]
        return BatchCommitted(
            number=batch_id + 1,
            rows=progress["numInputRows"],
            rows_per_second=progress["processedRowsPerSecond"],
            touched_keys=self._touched.get(batch_id),
            total_keys=len(self._seen),
            checkpoint=batch_id + 1,
            batch_ms=progress["durationMs"]["triggerExecution"],
            state_ms=state_milliseconds(batch_id + 1),
        )

    def _say_where_hosts_stand(self) -> None:
        if self._options.machines is not None and (stand := hosts_by_machine()) != self._hosts:
            self._hosts = stand
            self._send(HostsPlaced(stand))

    def _kill_host(self, number: int) -> None:
        pid = current_cluster().describe_hosts()[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        self._send(HostKilled(pid, number))

    def _verify(self, streamed: pd.DataFrame, all_flights: pd.DataFrame) -> None:
        """Compare the whole state with pandas. Raises ``DemoError`` naming the first difference."""
        expected = expected_state(streamed)
        known = expected.column(FLIGHT_KEY).to_pylist()
        unseen = sorted(set(all_flights[FLIGHT_KEY].dropna()) - set(known)) + UNKNOWN_KEYS
        with QueryableStateClient.connect() as client:
            started = time.perf_counter()
            answer: pa.Table = client.get_many(OPERATOR, known + unseen)
            read_ms = (time.perf_counter() - started) * 1e3
        difference = first_difference(expected, answer.slice(0, len(known)))
        if difference is not None:
            raise DemoError(f"the state is not what pandas computes: {difference}")
        for row in answer.slice(len(known)).to_pylist():
            key = row.pop(FLIGHT_KEY)
            if any(value is not None for value in row.values()):
                raise DemoError(f"aircraft {key!r} has not flown yet, but the state has {row}")
        self._send(Verified(len(known), len(streamed), len(unseen), read_ms))


def highest_batch(log_directory: Path) -> int:
    """Return the highest batch id in one of Spark's logs (``offsets``, ``commits``); -1 if there is none."""
    if not log_directory.is_dir():
        return -1
    return max((int(p.name) for p in log_directory.iterdir() if p.name.isdigit()), default=-1)


def wait_until_completed(version: int) -> None:
    """Wait until the hosts have applied ``version``: they hear of Spark's commit a moment later."""
    cluster = current_cluster()
    deadline = time.monotonic() + COMPLETION_TIMEOUT_S
    while True:
        held: list[int] | None = None
        with suppress(ray.exceptions.RayError):  # a host that was killed is being restarted
            held = [i["version"] for host in cluster.describe_hosts() for i in host["instances"]]
        completed = cluster.coordinator.locate(OPERATOR).completed_version
        if completed == version and held is not None and all(v == version for v in held):
            return
        if time.monotonic() > deadline:
            raise DemoError(
                f"version {version} was not completed in {COMPLETION_TIMEOUT_S:.0f} s: the coordinator has "
                f"{completed}, the hosts have {held}"
            )
        time.sleep(STREAM_POLL_SECONDS)


def state_milliseconds(version: int) -> float | None:
    """Return the longest time, in ms, that a task worked on state for ``version``; None if the hosts do not say."""
    times = []
    try:
        descriptions = current_cluster().describe_hosts()
    except ray.exceptions.RayError:
        log.warning("the hosts did not describe themselves", exc_info=True)
        return None
    for description in descriptions:
        for instance in description["instances"]:
            commit = instance["last_commit"]
            if commit and commit["version"] == version:
                times.append(sum(value for name, value in commit.items() if name.endswith("_ms")))
    return max(times, default=None)


def main() -> None:
    """Run the stream as the options on the command line say; report an error to the parent and exit with 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = json_decoder(StreamOptions).decode(sys.argv[1])
    events = EventPipe(options.events_fd)
    end_with_parent()
    ensure_java()
    try:
        FlightStream(options, events).run()
    except Exception as error:
        log.exception("the demo's stream failed")
        kind = "" if isinstance(error, DemoError) else f"{type(error).__name__}: "
        events.send(Failed(f"{kind}{error}"))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
