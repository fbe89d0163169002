"""What metrics cost, as a share of a batch.

    python benchmarks/metrics_overhead.py                      2 hosts with 4, 100 and 500 partitions, 7 turns
    python benchmarks/metrics_overhead.py --turns 3 --partitions 4 100

A real coordinator and real hosts run batches on a local disk, without Spark, so that a batch takes no longer than it
must. In each turn each size runs batches; then everything is published to Ray as the processes do it, and timed:

- the coordinator's look, once a second, and its figures of each checkpoint,
- the looks of the hosts, once in five seconds each, with all that they describe of themselves for it,
- what is counted of each message of acknowledgements,
- the driver's: Spark's progress of each batch, and the figures of operators once in ten seconds.

All times are of the processor, so that others on the machine disturb little. What comes with time is counted for the
length of the batch. The share is of what coordinator, hosts and tasks take of the processor for the batch; Spark, which
takes far more, has no part in it. Not in it is Ray's export of what was published, which Ray does for itself too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from played_stream import PlayedStream, Shape, played_stream
from ray_cluster import own_ray
from rich.console import Console
from rich.table import Table

from backends.storage.request_counts import RequestCounts
from coordinator_actor.lease_watch import LEASE_WATCH_SECONDS
from coordinator_actor.on_ray.ray_metrics import RayMetrics
from coordinator_actor.query_metrics import QueryMetrics
from spark_bridge.host_actor.host_metrics import HOST_METRICS_SECONDS as HOST_SECONDS
from spark_bridge.host_actor.host_metrics import HostMetrics
from spark_bridge.queryable.server.request_statistics import RequestStatistics
from spark_bridge.session.operator_progress import StateOperatorProgress
from spark_bridge.session.stream_metrics import STREAM_METRICS_SECONDS as DRIVER_SECONDS
from spark_bridge.session.stream_metrics import StreamMetrics

BATCHES = 5
"""Batches of a turn; the least number behind which all is published once."""
PROGRESS = json.dumps(
    {
        "inputRowsPerSecond": 500_000.0,
        "processedRowsPerSecond": 600_000.0,
        "durationMs": dict.fromkeys(
            ("addBatch", "commitOffsets", "getBatch", "latestOffset", "queryPlanning", "triggerExecution", "walCommit"),
            5,
        ),
    }
)
OPERATOR = StateOperatorProgress(
    "op0", 1, 100_000, 500, 0, 0, 12.0, 1 << 20, 4, 4, 30_000, 25_000.0, dict.fromkeys(map(str, range(12)), 1.0)
)


@dataclass
class Published:
    """One size: its stream, and how its processes publish. ``shares`` has one share of a batch for each turn."""

    stream: PlayedStream
    coordinator: QueryMetrics
    hosts: list[HostMetrics]
    acknowledgements: RayMetrics
    driver: StreamMetrics
    batches: list[float] = field(default_factory=list)
    costs: list[dict[str, float]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, stream: PlayedStream) -> Published:
        """Publish for a stream."""
        name = f"n{stream.shape.partitions}"
        run_id = stream.registration.run_id
        driver = StreamMetrics(RayMetrics({"namespace": name}), lambda _: [OPERATOR])
        driver.close()  # its own thread would publish beside the measurement
        driver.add(run_id, "played")
        hosts = [
            HostMetrics(
                RayMetrics({"namespace": name, "host": host.info.host_id}), RequestStatistics(), host.files.requests, 0
            )
            for host in stream.hosts
        ]
        metrics = QueryMetrics(RayMetrics({"namespace": name}), time.time)
        return cls(stream, metrics, hosts, RayMetrics({"namespace": name}), driver)

    def turn(self) -> None:
        """Run batches, and publish what they have done."""
        began = time.process_time()
        batch = statistics.median(self.stream.run(BATCHES))
        used = (time.process_time() - began) / BATCHES
        looks = {
            "coordinator": _seconds(self._coordinator_look),  # with the figures of all batches of the turn
            "coordinator, nothing new": _seconds(self._coordinator_look),
            "hosts": _seconds(self._hosts_look),
            "driver": _seconds(self.driver.publish),
        }
        checkpoint = max(0.0, looks["coordinator"] - looks["coordinator, nothing new"]) / BATCHES
        # Each host sends its acknowledgements in one message, or in few.
        message = _seconds(self._acknowledged) * len(self.hosts)
        progress = _seconds(lambda: self.driver.batch(self.stream.registration.run_id, PROGRESS))
        cost = {
            "coordinator": checkpoint + message + looks["coordinator, nothing new"] * batch / LEASE_WATCH_SECONDS,
            "hosts": looks["hosts"] * batch / HOST_SECONDS,
            "driver": progress + looks["driver"] * batch / DRIVER_SECONDS,
        }
        self.batches.append(used)
        self.costs.append(cost)
        self.shares.append(sum(cost.values()) / used)

    def _coordinator_look(self) -> None:
        coordinator = self.stream.coordinator
        self.coordinator.publish(*coordinator.counts(), coordinator.running(), RequestCounts())

    def _hosts_look(self) -> None:
        names = {self.stream.registration.run_id: "played"}
        for host, metrics in zip(self.stream.hosts, self.hosts, strict=True):
            metrics.publish(host.describe(), names)

    def _acknowledged(self) -> None:
        self.acknowledgements.observe("statestore_acknowledge_seconds", 0.001)
        self.acknowledgements.add("statestore_prepared_versions_total", 1)


def _seconds(work: Callable[[], None]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def measure(partitions: Sequence[int], turns: int) -> list[Published]:
    """Run all sizes in turns. The first turn makes the series, and does not count."""
    with own_ray(2), ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rs-")))
        sizes = [
            Published.of(
                stack.enter_context(
                    played_stream(root / str(n), f"file://{root}/{n}/ck", Shape(hosts=2, partitions=n, slots=8))
                )
            )
            for n in partitions
        ]
        for turn in range(turns + 1):
            for size in sizes:
                size.turn()
                if turn == 0:
                    for noted in (size.batches, size.costs, size.shares):
                        noted.clear()
        return sizes


def report(sizes: Sequence[Published]) -> Table:
    """Return a table with the medians, and the least and the most of the shares."""
    table = Table("partitions", "batch, ms", "coordinator, ms", "hosts, ms", "driver, ms", "share of a batch", "spread")
    for size in sizes:
        costs = (statistics.median(cost[who] * 1000 for cost in size.costs) for who in size.costs[0])
        table.add_row(
            str(size.stream.shape.partitions),
            f"{statistics.median(size.batches) * 1000:.1f}",
            *(f"{cost:.3f}" for cost in costs),
            f"{statistics.median(size.shares):.2%}",
            f"{min(size.shares):.2%} to {max(size.shares):.2%}",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, nargs="+", default=[4, 100, 500])
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    Console().print(report(measure(given.partitions, given.turns)))


if __name__ == "__main__":
    main()
