"""The cost of metrics, as a share of a batch.

    python benchmarks/metrics_overhead.py                      2 hosts with 4, 100 and 500 partitions, 7 turns
    python benchmarks/metrics_overhead.py --turns 3 --partitions 4 100
    python benchmarks/metrics_overhead.py --spark              one stream on Ray and Spark, with metrics and without
    python benchmarks/metrics_overhead.py --spark --turns 4 --batches 10

Without ``--spark`` a real coordinator and real hosts run batches on a local disk, without Spark, so that a batch is as
short as possible. In each turn each size runs batches. Then all metrics are published to Ray as the processes do it,
and timed:

- the coordinator's metrics, once a second, and its figures of each checkpoint,
- the metrics of each host, once in five seconds, including the description that the host makes for them,
- the counters of each message of acknowledgements,
- the driver's: Spark's progress of each batch, and the figures of operators once in ten seconds.

All times are CPU times, so that other processes on the machine disturb little. Periodic work is counted for the length
of the batch. The share is relative to the CPU time of coordinator, hosts and tasks for the batch. Spark's CPU time is
far more, and is not included. Ray's export of the published metrics is not included; Ray also exports its own.

With ``--spark`` the batches are whole: a stream on RayDP with two executors and two hosts, ``aggregate`` over 1,000
rows a batch, each begun as soon as the previous one has ended. Each turn runs batches with metrics and batches without,
in the reverse order of the turn before: an order to the processes stops publishing for a while. The first batch after
such a change does not count. The table has the time of a batch, the CPU time of all processes for it, including
Spark's, and the CPU time of publishing, counted in the processes that publish. Ray continues to export the last values
for 20 s, so the difference does not include its export here either.
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
from typing import Any

from played_stream import PlayedStream, Shape, played_stream
from ray_cluster import own_ray
from rich.console import Console
from rich.table import Table

from backends.storage.requests import RequestCounts
from coordinator_actor.actor import RayMetrics
from coordinator_actor.metrics import QueryMetrics
from coordinator_actor.threads import LEASE_WATCH_SECONDS
from spark_bridge.host_actor import HOST_METRICS_SECONDS as HOST_SECONDS
from spark_bridge.host_actor import HostMetrics
from spark_bridge.queryable.server.limits import RequestStatistics
from spark_bridge.session.progress import STREAM_METRICS_SECONDS as DRIVER_SECONDS
from spark_bridge.session.progress import StateOperatorProgress, StreamMetrics

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
        driver.close()  # its own thread would publish during the measurement
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


# -- whole batches -----------------------------------------------------------------------------

ON, OFF = "with metrics", "without"
ROWS, KEYS, PARTITIONS, WARM_UP = 1_000, 100_000, 4, 40


@dataclass
class Arm:
    """The batches with metrics, or those without.

    A turn has the seconds of its batches; and of the processor, for one batch, those used and those for publishing.
    """

    seconds: list[list[float]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)


def measure_in_spark(turns: int, batches: int) -> dict[str, Arm]:
    """Run one stream, with metrics and without in turns."""
    import lanes
    import stateful_profile
    from comparisons.streams import AT_ONCE, directory
    from stateful_queries import CONTESTANTS
    from workloads import Workload

    arms = {ON: Arm(), OFF: Arm()}
    with directory() as root, lanes.session(PARTITIONS, configs=AT_ONCE) as spark:
        given = lanes.Input(root / "batches", Workload("long", "a long key", ROWS, KEYS), files=1)
        for _ in range(WARM_UP + 2 * turns * batches):
            given.add()
        lane = lanes.Lane(CONTESTANTS["aggregate"], root / "aggregate", given)
        lanes.start(spark, lane)
        lane.run(WARM_UP)
        for turn in range(turns):
            for name in (ON, OFF) if turn % 2 == 0 else (OFF, ON):
                _let_publish(name == ON)
                _published()
                before = stateful_profile.cpu_seconds()
                arms[name].seconds.append(lane.run(batches)[1:])
                arms[name].cpu.append(sum(stateful_profile.cpu_since(before).values()) / batches)
                arms[name].published.append(_published() / batches)
        _let_publish(True)
        lane.check()
        lane.stop()
    return arms


def _let_publish(on: bool) -> None:
    """Let coordinator, hosts and driver publish their metrics, and count the time, or let them not."""
    _in_processes(_host_publishes, _coordinator_publishes, on)
    _replaced(StreamMetrics, ("publish", "batch"), on)


def _published() -> float:
    """Return the seconds of the processor that publishing took since the last call."""
    return sum(_in_processes(_taken, _coordinator_taken)) + _taken(StreamMetrics)


def _in_processes(of_host: Callable[..., Any], of_coordinator: Callable[..., Any], *args: Any) -> list[Any]:
    import ray

    from spark_bridge.session.current import current_cluster

    cluster = current_cluster()
    coordinator = ray.get_actor(cluster.options.coordinator_name, namespace=cluster.options.namespace)
    told = [host.__ray_call__.remote(of_host, *args) for host in cluster.hosts]
    answers: list[Any] = ray.get([*told, coordinator.__ray_call__.remote(of_coordinator, *args)], timeout=30)
    return answers


def _host_publishes(host: Any, on: bool) -> None:
    _replaced(host, ("_publish",), on)


def _coordinator_publishes(coordinator: Any, on: bool) -> None:
    _replaced(coordinator._query_metrics, ("publish",), on)
    _replaced(coordinator, ("_acknowledged",), on)


def _coordinator_taken(coordinator: Any) -> float:
    return _taken(coordinator) + _taken(coordinator._query_metrics)


def _replaced(owner: Any, methods: tuple[str, ...], on: bool) -> None:
    """Replace methods by ones that count their time, or by ones that do nothing."""
    for name in methods:
        kept = f"_kept_{name}"
        if not hasattr(owner, kept):
            setattr(owner, kept, getattr(owner, name))
        setattr(owner, name, _counted(owner, getattr(owner, kept)) if on else lambda *_: None)


def _counted(owner: Any, method: Callable[..., None]) -> Callable[..., None]:
    def counted(*args: Any) -> None:
        began = time.thread_time()
        method(*args)
        owner.taken_by_metrics = getattr(owner, "taken_by_metrics", 0.0) + time.thread_time() - began

    return counted


def _taken(owner: Any) -> float:
    taken = float(getattr(owner, "taken_by_metrics", 0.0))
    owner.taken_by_metrics = 0.0
    return taken


def report_in_spark(arms: dict[str, Arm]) -> Table:
    """Return a table with the medians, and how much more a turn with metrics took than the one without."""
    table = Table("", ON, OFF, "more, median of turns", "least to most")
    for what, figures in (
        ("a batch, ms", {name: [statistics.mean(turn) for turn in arm.seconds] for name, arm in arms.items()}),
        ("processor for a batch, ms", {name: arm.cpu for name, arm in arms.items()}),
    ):
        more = [a / b - 1 for a, b in zip(figures[ON], figures[OFF], strict=True)]
        table.add_row(
            what,
            *(f"{statistics.median(figures[name]) * 1000:.1f}" for name in (ON, OFF)),
            f"{statistics.median(more):+.1%}",
            f"{min(more):+.1%} to {max(more):+.1%}",
        )
    shares = [published / used for published, used in zip(arms[ON].published, arms[ON].cpu, strict=True)]
    table.add_row(
        "of it publishing, ms",
        *(f"{statistics.median(arms[name].published) * 1000:.2f}" for name in (ON, OFF)),
        f"{statistics.median(shares):.2%} of the batch's",
        f"{min(shares):.2%} to {max(shares):.2%}",
    )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, nargs="+", default=[4, 100, 500])
    parser.add_argument("--turns", type=int, default=None, help="7, and 12 with --spark")
    parser.add_argument("--spark", action="store_true", help="whole batches, with metrics and without")
    parser.add_argument("--batches", type=int, default=20, help="batches of a half turn with --spark")
    given = parser.parse_args()
    if given.spark:
        Console().print(report_in_spark(measure_in_spark(given.turns or 12, given.batches)))
    else:
        Console().print(report(measure(given.partitions, given.turns or 7)))


if __name__ == "__main__":
    main()
