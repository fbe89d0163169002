"""The load of many queries on one coordinator: 50 queries, 1,000 partitions, 100 simulated hosts, an actor, 10 minutes.

    python benchmarks/many_queries.py                ten minutes; writes benchmarks/results/many-queries*
    python benchmarks/many_queries.py --seconds 30 --queries 5 --partitions 100 --hosts 10 --no-write

Each query has its partitions and runs a micro-batch every ``--interval`` seconds: its hosts ask for their part of the
batch, acknowledge, and upload a snapshot of each partition once per maintenance interval. Every host sends a heartbeat
a second about all runs it holds. The driver renews the leases of all its runs and sends a heartbeat for each, once a
second, and says which batches are committed; a client locates an operator of each query every 10 s. Every answer is
checked, and its latency kept: from the call to the answer in the process that plays the cluster, whose threads wait for
each other as real hosts do not. Calls of an empty actor at the same time show the share of Ray, this process and the
machine in that latency. CPU and memory are those of the coordinator's process; the state that a query keeps grows up to
``--retain`` versions.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from played_queries import (
    InActor,
    PlayedHost,
    PlayedQuery,
    empty_actor,
    memory_directory,
    played_hosts,
    registration_of,
)
from rich.console import Console
from rich.table import Table
from suite.machine import own_ray
from suite.model import Spread
from suite.report import lines

from coordinator_actor.messages import HostInfo, HostReport

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
console = Console(width=max(Console().width, 150))
MAX_LINES = 6
SLICES = 60
"""The latencies of a run are summed up in so many slices of its time."""
LOCATE_SECONDS = 10.0
MAINTENANCE_SECONDS = 60.0
HEARTBEAT_SECONDS = 1.0
BEATING_THREADS = 10
EMPTY, EMPTY_SECONDS = "(an empty actor)", 0.1
SLOW_MS, GROWTH = 1000.0, 1.25
"""Limits: the 99th percentile of any message above that of an empty actor in ms, memory at the end to that at the half.
"""


class Latencies:
    """The latency of every message, by kind. Thread-safe; grows by 16 bytes a message."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.began = time.perf_counter()

    def call(self, link: InActor, method: str, *args: Any) -> Any:
        started = time.perf_counter()
        answer = link.call(method, *args)
        self.keep(method, started)
        return answer

    def keep(self, kind: str, started: float) -> None:
        """Keep how long something took that ends now."""
        self._kept[kind].append((started - self.began, (time.perf_counter() - started) * 1e3))

    def kinds(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return for each kind (seconds since the beginning, milliseconds) of all messages, the most frequent first."""
        found = {kind: np.array(kept).reshape(-1, 2) for kind, kept in self._kept.items()}
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))


@dataclass
class Load:
    """A cluster of many queries that is played to a coordinator until ``ended``."""

    link: InActor
    empty: Callable[[], Any]
    options: argparse.Namespace
    queries: list[PlayedQuery]
    infos: list[HostInfo]
    latencies: Latencies
    late: int = 0

    def call(self, method: str, *args: Any) -> Any:
        return self.latencies.call(self.link, method, *args)

    def checkpoint(self, query: PlayedQuery) -> None:
        if not query.is_registered:
            query.register()
        query.checkpoint()
        query.upload_snapshots()

    def beat(self, number: int) -> None:
        parts = {q.run: q.hosts[number] for q in self.queries if any(q.hosts[number].owned.values())}
        info = self.infos[number]
        orders = self.call("heartbeat_host", info.host_id, info.incarnation, {r: h.version for r, h in parts.items()})
        if not orders.known or orders.unload_runs:
            raise RuntimeError(f"{info.host_id} was forgotten: {orders}")

    def renew(self, number: int) -> None:
        if self.call("renew_leases", [q.run for q in self.queries if q.is_registered]):
            raise RuntimeError("The coordinator has forgotten runs.")

    def beat_driver(self, number: int) -> None:
        query = self.queries[number]
        if query.is_registered and not self.call("driver_heartbeat", query.run):
            raise RuntimeError("The coordinator has forgotten a run.")

    def call_empty(self, number: int) -> None:
        started = time.perf_counter()
        self.empty()
        self.latencies.keep(EMPTY, started)

    def locate(self, number: int) -> None:
        """Ask where an operator's partitions are, as a client that has just come."""
        query = self.queries[number]
        if not query.batch:
            return
        found = self.call("locate", query.registration.operators[0].name, query.run)
        if len(found.owners) != query.partitions:
            raise RuntimeError(f"{found.operator.name} was located with {len(found.owners)} partitions.")


@dataclass
class Sample:
    """CPU in cores and memory in bytes of the coordinator at a moment, in seconds since the beginning."""

    at: float
    cores: float
    memory: int


def play(load: Load) -> list[Sample]:
    """Play the load for its time; return a sample for each slice. Raises what any message has raised."""
    options, ended = load.options, threading.Event()

    def every(seconds: float, count: int, what: Callable[[int], None], shift: float) -> None:
        """Do ``what`` for 0 to ``count - 1`` in turn, each every so many seconds, until the end."""
        due = time.perf_counter() + shift
        while not ended.is_set():
            for number in range(count):
                what(number)
                due += seconds / count
                rest = due - time.perf_counter()
                if rest < -seconds:  # no catching up: a late call stays late, and is counted
                    load.late += 1
                    due = time.perf_counter()
                if ended.wait(max(0.0, rest)):
                    return

    hosts, queries = len(load.infos), len(load.queries)
    loops: list[tuple[Any, ...]] = [
        (options.interval, 1, lambda _, q=query: load.checkpoint(q), options.interval * i / queries)
        for i, query in enumerate(load.queries)
    ]
    # Hosts beat each by itself: an answer that takes long delays no other host.
    share = max(1, -(-hosts // BEATING_THREADS))
    loops += [
        (HEARTBEAT_SECONDS, len(range(first, min(first + share, hosts))), lambda i, f=first: load.beat(f + i), 0.0)
        for first in range(0, hosts, share)
    ]
    loops += [(HEARTBEAT_SECONDS, 1, load.renew, 0.0), (HEARTBEAT_SECONDS, queries, load.beat_driver, 0.0)]
    loops += [(EMPTY_SECONDS, 1, load.call_empty, 0.0), (LOCATE_SECONDS, queries, load.locate, 0.0)]
    samples: list[Sample] = []
    with ThreadPoolExecutor(len(loops)) as pool:
        load.latencies.began = began = time.perf_counter()
        running: list[Future[None]] = [pool.submit(every, *loop) for loop in loops]
        try:
            cpu, at = load.link.cpu_seconds(), began
            for i in range(SLICES):
                ended.wait(max(0.0, began + options.seconds * (i + 1) / SLICES - time.perf_counter()))
                now, used = time.perf_counter(), load.link.cpu_seconds()
                samples.append(Sample(now - began, (used - cpu) / (now - at), load.link.resident()))
                cpu, at = used, now
                broken = [f for f in running if f.done()]
                if broken:
                    broken[0].result()
        finally:
            ended.set()
    for one in running:
        one.result()
    return samples


def summary(load: Load, samples: Sequence[Sample]) -> dict[str, Any]:
    options = load.options
    messages = {}
    for kind, kept in load.latencies.kinds().items():
        ms = kept[:, 1]
        p50, p99 = np.percentile(ms, [50, 99])
        messages[kind] = {"count": len(ms), "p50": round(p50, 3), "p99": round(p99, 3), "most": round(ms.max(), 3)}
    moments = {"first": samples[0], "half": samples[len(samples) // 2], "last": samples[-1]}
    owned = [sum(len(ps) for q in load.queries for ps in q.hosts[i].owned.values()) for i in range(options.hosts)]
    return {
        **{name: getattr(options, name) for name in ("queries", "partitions", "hosts", "interval", "retain")},
        "seconds": round(samples[-1].at, 1),
        "batches": sum(q.batch for q in load.queries),
        "late": load.late,
        "partitions_of_a_host": [min(owned), max(owned)],
        "cores": round(float(np.mean([s.cores for s in samples])), 3),
        "memory_mib": {moment: round(sample.memory / MIB, 1) for moment, sample in moments.items()},
        "messages_ms": messages,
        "samples": [[round(s.at, 1), round(s.cores, 3), round(s.memory / MIB, 1)] for s in samples],
    }


def broken_limits(found: dict[str, Any]) -> list[str]:
    memory, broken = found["memory_mib"], []
    if found["cores"] >= 1:
        broken.append(f"the coordinator takes {found['cores']} cores")
    if memory["last"] > GROWTH * memory["half"]:
        broken.append(f"memory grows: {memory['half']} MiB at the half, {memory['last']} MiB at the end")
    messages = found["messages_ms"]
    most = SLOW_MS + messages[EMPTY]["p99"]
    broken += [f"{k}: p99 {m['p99']} ms" for k, m in messages.items() if m["p99"] > most]
    return broken


def show(found: dict[str, Any]) -> None:
    memory = found["memory_mib"]
    table = Table(
        title=f"{found['queries']} queries, {found['partitions']:,} partitions, {found['hosts']} hosts, a batch per "
        f"{found['interval']:g} s, {found['seconds']:.0f} s: {found['cores']:.2f} cores, memory {memory['first']} MiB "
        f"at first, {memory['half']} at the half, {memory['last']} at the end; {found['batches']:,} batches, "
        f"{found['late']} times late",
        title_justify="left",
    )
    for heading in ("message", "count", "a second", "p50 ms", "p99 ms", "most ms"):
        table.add_column(heading, justify="left" if heading == "message" else "right")
    for kind, m in found["messages_ms"].items():
        rate = m["count"] / found["seconds"]
        table.add_row(kind, f"{m['count']:,}", f"{rate:,.1f}", f"{m['p50']:.2f}", f"{m['p99']:.2f}", f"{m['most']:.1f}")
    console.print(table)


def pictures(load: Load, samples: Sequence[Sample]) -> dict[str, str]:
    """Return SVGs by name: the 99th percentiles of the messages over time, and CPU and memory over time."""
    edges = np.linspace(0, load.options.seconds, 13)
    drawn: dict[str, list[tuple[float, Spread]]] = {}
    for kind, kept in load.latencies.kinds().items():
        points = []
        for low, high in pairwise(edges):
            ms = kept[(kept[:, 0] >= low) & (kept[:, 0] < high), 1]
            if len(ms):
                points.append((float(low + high) / 2, Spread(*(float(v) for v in np.percentile(ms, [99, 99, 99])))))
        if len(points) == len(edges) - 1 and (kind == EMPTY or len(drawn) < MAX_LINES - 1):
            drawn[kind] = points
    of_load = f"{len(load.queries)} queries, {load.options.partitions:,} partitions, {len(load.infos)} hosts"
    step = max(1, len(samples) // 12)
    shown = samples[step - 1 :: step]
    use = {
        "memory, MiB": [(s.at, Spread.of([s.memory / MIB])) for s in shown],
        "CPU, % of a core": [(s.at, Spread.of([s.cores * 100])) for s in shown],
    }
    across = "seconds since the start"
    return {
        "many-queries-latency": lines(f"99th percentile of the answers: {of_load}", "ms", across, drawn, is_time=True),
        "many-queries-use": lines(f"The coordinator's process: {of_load}", "", across, use, is_time=True),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=1000, help="of all queries together")
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds from batch to batch of a query")
    parser.add_argument("--retain", type=int, default=20, help="versions kept before the completed one")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    with own_ray(1), memory_directory() as root, closing(InActor("many-queries")) as link:
        latencies, infos = Latencies(), played_hosts(options.hosts)
        share, more = divmod(options.partitions, options.queries)
        queries = []
        for i in range(options.queries):
            name, partitions = f"query-{i}", share + (i < more)
            registration = registration_of(name, root / name, partitions, options.retain, MAINTENANCE_SECONDS)
            hosts = [PlayedHost(info) for info in infos]
            queries.append(PlayedQuery(registration, hosts, partial(latencies.call, link), options.interval))
        load = Load(link, empty_actor(), options, queries, infos, latencies)
        for info in infos:  # their heartbeats must follow at once
            load.call("register_host", info, HostReport())
        samples = play(load)
    found = summary(load, samples)
    show(found)
    if not options.no_write:
        (RESULTS / "many-queries.json").write_text(json.dumps(found, indent=1) + "\n")
        for name, drawn in pictures(load, samples).items():
            (RESULTS / f"{name}.svg").write_text(drawn)
    broken = broken_limits(found)
    for words in broken:
        console.print(f"BROKEN: {words}", style="bold red")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
