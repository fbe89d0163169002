"""The load of a coordinator in a large cluster: 200 simulated hosts, 10,000 partitions, one checkpoint a second.

    python benchmarks/coordinator.py                    the coordinator's class in this process; a minute
    python benchmarks/coordinator.py --actor            a real actor, in a Ray cluster started for it
    python benchmarks/coordinator.py --seconds 10 --hosts 20 --partitions 1000

Every simulated host asks for its part of a batch, acknowledges the changes of its partitions in one message, sends two
heartbeats a second (``--heartbeat``), and uploads the snapshots of its partitions once per maintenance interval. The
driver sends one heartbeat a second, and a message for each committed batch. Small files in ``offsets/`` and
``commits/`` replace Spark's. Changelogs have names, but are not written: the coordinator does not read them.

CPU is that of the coordinator's process (``--actor``), or of the calls to its class. Without ``--actor``, memory
includes the simulated cluster, and there is one thread, so that a checkpoint takes the sum of all its messages.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil
import pyarrow as pa
from ray_cluster import own_ray
from rich.console import Console
from rich.table import Table

from backends import StateStoreId, StateStoreProviderId
from backends.encoding.schema import StateSchema
from backends.formats.local_state import LocalState
from backends.formats.manifest import SnapshotRef, changelog_path, seal
from backends.formats.snapshot import SnapshotDescriptor
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef, digest
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.messages import (
    Acknowledge,
    BatchGrant,
    HostInfo,
    HostReport,
    OpenBatch,
    OperatorSpec,
    QueryRegistration,
    Refused,
    SnapshotUploaded,
)

RUN, SESSION = "run-1", "session-1"
HOSTS_PER_NODE = 4
MIB = 1 << 20
console = Console(width=max(Console().width, 150))
SCHEMA = StateSchema(
    pa.schema([("user", pa.int64())]), pa.schema([("n", pa.int64()), ("spent", pa.float64())])
).to_json()


class Link(Protocol):
    """Calls a coordinator, in this process or as an actor."""

    def call(self, method: str, *args: Any) -> Any:
        """Send one message, and return the answer."""

    def tick(self) -> None:
        """Do what the coordinator does every second."""

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the coordinator has used so far."""

    def resident(self) -> int:
        """Return the bytes of memory that are in use."""


class InProcess:
    """The coordinator's class. One thread calls it, so that the CPU of a call is the coordinator's."""

    def __init__(self) -> None:
        self._coordinator = Coordinator(time.time, CheckpointStorage.open)
        self._cpu = 0.0

    def call(self, method: str, *args: Any) -> Any:
        started = time.process_time()
        try:
            return getattr(self._coordinator, method)(*args)
        finally:
            self._cpu += time.process_time() - started

    def tick(self) -> None:
        """Do what the actor's threads do."""
        for method in ("expire", "maintain", "describe"):
            self.call(method)

    def cpu_seconds(self) -> float:
        return self._cpu

    def resident(self) -> int:
        return int(psutil.Process().memory_info().rss)


class InActor:
    """A named actor in the Ray cluster that this process has joined."""

    def __init__(self, namespace: str) -> None:
        import ray

        from coordinator_actor.actor import get_or_create_coordinator

        self._get, self._kill = ray.get, ray.kill
        self._actor = get_or_create_coordinator(namespace)
        self._process = psutil.Process(self.call("describe")["pid"])

    def call(self, method: str, *args: Any) -> Any:
        return self._get(getattr(self._actor, method).remote(*args))

    def end(self) -> None:
        """End the actor."""
        self._kill(self._actor)

    def tick(self) -> None:
        """Do nothing: the actor has threads for this."""

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident(self) -> int:
        return int(self._process.memory_info().rss)


@contextmanager
def directory() -> Iterator[Path]:
    """Give a directory for a checkpoint, in memory where possible: the coordinator is measured, not the disk."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="coordinator-", dir=memory if memory.is_dir() else None))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def linked(in_actor: bool) -> Iterator[Link]:
    """Give a coordinator; it and its files are removed afterwards."""
    if not in_actor:
        yield InProcess()
        return
    with own_ray(1), actor("benchmark") as link:
        yield link


@contextmanager
def actor(namespace: str) -> Iterator[InActor]:
    """Give a coordinator in the Ray cluster that this process has joined; it is ended afterwards."""
    link = InActor(namespace)
    try:
        yield link
    finally:
        link.end()


@dataclass
class PlayedHost:
    """A simulated host with the last reply it got; ``heads`` are its partitions' changelogs at the last version."""

    info: HostInfo
    assignment: int = 0
    owned: dict[str, list[int]] = field(default_factory=dict)
    version: int = 0
    heads: dict[tuple[str, int], str] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        """Return the first arguments of most messages."""
        return self.info.host_id, self.info.incarnation

    def take(self, grant: BatchGrant, batch: int) -> None:
        """Take the grant of a batch; it names owners only if they have changed."""
        if grant.version != batch:
            raise RuntimeError(f"Batch {batch} was granted at version {grant.version}.")
        self.version, self.assignment = batch, grant.assignment
        if grant.owners:
            ids = [h.host_id for h in grant.hosts]
            self.owned = {
                operator: [p for p, i in enumerate(owners) if ids[i] == self.info.host_id]
                for operator, owners in grant.owners.items()
            }


def acknowledged(
    host: PlayedHost, grant: BatchGrant, sizes: Mapping[str, int], run: str, rng: random.Random
) -> list[Acknowledge]:
    """Return the changes of all partitions of a host; ``sizes`` has the partitions of each operator."""
    made, version = [], grant.version + 1
    for operator, partitions in host.owned.items():
        for p in partitions:
            path = changelog_path(operator, sizes[operator], p, "default", version, rng.randbytes(16).hex())
            file = FileRef(path, rng.randrange(1000, 100_000), rng.randbytes(16).hex())
            base = grant.heads.get(operator, {}).get(p)
            attempt = f"{p}.{grant.version}"
            made.append(Acknowledge(run, operator, p, version, attempt, *host.name, file, base, rng.random()))
            host.heads[operator, p] = path
    return made


def uploaded(
    host: PlayedHost, operator: str, partition: int, version: int, root: Path, run: str, rng: random.Random
) -> SnapshotUploaded:
    """Upload the snapshot of a partition to the checkpoint at ``root``, and return the message about the snapshot."""
    head = host.heads[operator, partition]
    path = f"{head.rpartition('/')[0]}/{version}-{rng.randbytes(16).hex()}.snapshot"
    data = seal(SnapshotDescriptor(path, "rocksdb", LocalState(version, head, 1000), ()))
    file = root / "statestore" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    snapshot = SnapshotRef(version, head, FileRef(path, len(data), digest(data)))
    return SnapshotUploaded(run, operator, partition, *host.name, snapshot, None)


class Cluster:
    """The simulated hosts, driver and Spark. ``each`` calls a function for every item, in some threads or in this one.

    ``waited`` are the seconds that the answers to all messages took so far.
    """

    def __init__(self, link: Link, root: Path, options: argparse.Namespace, each: Callable[..., Any]) -> None:
        self._link, self._root, self._each = link, root, each
        self._rng = random.Random(1)
        self._snapshot_rounds = max(1, round(options.maintenance_interval / options.interval))
        share, more = divmod(options.partitions, options.operators)
        self.sizes = {f"operator_{i}": share + (i < more) for i in range(options.operators)}
        self.messages: Counter[str] = Counter()
        self.waited = 0.0
        self.registration = QueryRegistration(
            query_id=str(uuid.uuid4()),
            run_id=RUN,
            name="load",
            session_id=SESSION,
            checkpoint_location=str(root),
            state_location=str(root / "statestore"),
            operators=tuple(OperatorSpec(name, n, SCHEMA) for name, n in self.sizes.items()),
            key_groups=max(1024, *self.sizes.values()),
            min_versions_to_retain=options.retain,
            maintenance_interval=options.maintenance_interval,
        )
        self.hosts = [
            PlayedHost(
                HostInfo(
                    f"host-{i:04d}", uuid.uuid4().hex, f"grpc://10.0.0.1:{i}", f"node-{i // HOSTS_PER_NODE}", SESSION
                )
            )
            for i in range(options.hosts)
        ]

    def send(self, method: str, messages: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Send messages of one kind, made before the first is sent; return the answers in order."""
        made = list(messages)
        self.messages[method] += len(made)
        started = time.perf_counter()
        answers = list(self._each(lambda args: self._link.call(method, *args), made))
        self.waited += time.perf_counter() - started
        return answers

    def start(self) -> None:
        """Register the hosts and the driver's query."""
        for directory in ("offsets", "commits"):
            (self._root / directory).mkdir(parents=True)
        self.send("register_host", [(h.info, HostReport()) for h in self.hosts])
        (registered,) = self.send("register_query", [(self.registration,)])
        if registered.refusal is not None:
            raise RuntimeError(f"The coordinator refuses the query: {registered.refusal}")

    def checkpoint(self, batch: int) -> None:
        """Run one micro-batch, from its offsets to the driver's message that it is committed."""
        (self._root / "offsets" / str(batch)).write_text("v1\n{}")
        grants = self.send("open_batch", [(OpenBatch(RUN, batch, *h.name, h.assignment),) for h in self.hosts])
        made = []
        for host, grant in zip(self.hosts, grants, strict=True):
            host.take(grant, batch)
            made.append((RUN, *host.name, tuple(acknowledged(host, grant, self.sizes, RUN, self._rng))))
        answers = [a for many in self.send("acknowledge_many", [m for m in made if m[-1]]) for a in many]
        refused = [a for a in answers if isinstance(a, Refused)]
        if refused:
            raise RuntimeError(
                f"{len(refused)} acknowledgements of batch {batch} were refused, the first: {refused[0]}"
            )
        if not any(a.manifest_id is not None for a in answers):
            raise RuntimeError(
                f"All {len(answers)} partitions acknowledged batch {batch}, but no manifest was written."
            )
        (self._root / "commits" / str(batch)).write_text("v1\n{}")
        self.send("batch_committed", [(RUN, batch)])

    def upload_snapshots(self, batch: int) -> None:
        """Upload snapshots of the last completed version, of the partitions whose turn it is."""
        turn = batch % self._snapshot_rounds
        made = [
            (uploaded(host, operator, p, batch + 1, self._root, RUN, self._rng),)
            for host in self.hosts
            for operator, partitions in host.owned.items()
            for p in partitions
            if p % self._snapshot_rounds == turn
        ]
        if not all(self.send("snapshot_uploaded", made)):
            raise RuntimeError(f"Snapshots of version {batch + 1} do not count.")

    def beat(self) -> None:
        """Send the heartbeats of all hosts, and take the completed versions of the answers."""
        orders = self.send("heartbeat_host", [(*h.name, {RUN: h.version}) for h in self.hosts])
        for host, order in zip(self.hosts, orders, strict=True):
            if not order.known or order.unload_runs:
                raise RuntimeError(f"{host.info.host_id} was forgotten: {order}")
            host.version = max([host.version, *(c.version for c in order.completed)])

    def beat_driver(self) -> None:
        """Send the driver's heartbeat."""
        if self.send("driver_heartbeat", [(RUN,)]) != [True]:
            raise RuntimeError("The coordinator has forgotten the run.")

    def manifest_bytes(self) -> list[int]:
        """Return the size of each manifest in bytes."""
        return [path.stat().st_size for path in sorted((self._root / "statestore" / "manifests").iterdir())]

    def providers(self) -> list[StateStoreProviderId]:
        """Return one instance per partition."""
        where = self.registration.checkpoint_location
        return [StateStoreProviderId(StateStoreId(where, o, p), RUN) for o, n in self.sizes.items() for p in range(n)]


@dataclass
class Measured:
    """One run: seconds, bytes and messages. ``checkpoints`` are the seconds that the messages of each took."""

    checkpoints: list[float]
    seconds: float
    cpu: float
    peak_memory: int
    messages: Counter[str]
    late: int


def play(cluster: Cluster, link: Link, options: argparse.Namespace) -> Measured:
    """Run a checkpoint every interval, together with all other messages."""
    taken, late, peak = [], 0, link.resident()
    beats = max(1, round(options.interval / options.heartbeat))
    before, cpu, started = Counter(cluster.messages), link.cpu_seconds(), time.perf_counter()
    count = max(1, round(options.seconds / options.interval))
    for batch in range(count):
        waited = cluster.waited
        cluster.checkpoint(batch)
        taken.append(cluster.waited - waited)
        cluster.upload_snapshots(batch)
        cluster.beat_driver()
        link.tick()
        for beat in range(1, beats + 1):
            cluster.beat()
            rest = started + (batch + beat / beats) * options.interval - time.perf_counter()
            late += beat == beats and rest < 0
            time.sleep(max(0.0, rest))
        peak = max(peak, link.resident())
    seconds = time.perf_counter() - started
    return Measured(taken, seconds, link.cpu_seconds() - cpu, peak, cluster.messages - before, late)


def best_of(rounds: int, work: Callable[[], Any]) -> float:
    """Return the least seconds that ``work`` takes."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def locate(cluster: Cluster, link: Link) -> tuple[float, float]:
    """Return the seconds to report every instance, one message each, and to locate all of them in one call."""
    providers, hosts = cluster.providers(), cluster.hosts
    reports = [(p, f"node-{i % len(hosts)}", f"e{i % len(hosts)}") for i, p in enumerate(providers)]
    started = time.perf_counter()
    cluster.send("report_active_instance", reports)
    reported = time.perf_counter() - started
    found = link.call("get_locations", tuple(providers))
    if list(found) != [f"executor_{host}_{executor}" for _, host, executor in reports]:
        raise RuntimeError("Instances were located elsewhere than they had been reported.")
    return reported, best_of(5, lambda: link.call("get_locations", tuple(providers)))


def show(
    cluster: Cluster, measured: Measured, located: tuple[float, float], oracle: float, interval: float, where: str
) -> bool:
    """Print the figures next to the limits; return whether all limits are kept."""
    hosts, partitions, count = len(cluster.hosts), sum(cluster.sizes.values()), len(measured.checkpoints)
    # Per interval, not per second: a coordinator that makes fewer checkpoints than it should would look idle.
    manifests, cores = cluster.manifest_bytes(), measured.cpu / count / interval
    per_checkpoint = sum(measured.messages.values()) / count
    of_hosts = sum(measured.messages[m] for m in ("open_batch", "acknowledge_many")) / count
    rows: list[tuple[str, str, str, bool | None]] = [
        (
            "checkpoints",
            f"{count} in {measured.seconds:.1f} s, {measured.late} of them begun late",
            f"one per {interval:g} s",
            measured.seconds <= 1.05 * count * interval,
        ),
        (
            "answers to the messages of a checkpoint",
            f"median {statistics.median(measured.checkpoints) * 1e3:.0f} ms, longest "
            f"{max(measured.checkpoints) * 1e3:.0f} ms",
            "",
            None,
        ),
        (
            "the coordinator's CPU",
            f"{cores:.2f} cores at that rate ({measured.cpu / count * 1e3:.0f} ms a checkpoint)",
            "under 1 core",
            cores < 1,
        ),
        ("its memory, at most", f"{measured.peak_memory / MIB:.0f} MiB", "under 1 GB", measured.peak_memory < 10**9),
        (
            "a manifest",
            f"median {statistics.median(manifests) / 1e3:.0f} kB, largest {max(manifests) / 1e3:.0f} kB "
            f"({statistics.median(manifests) / partitions:.0f} bytes per partition changed)",
            "what changed since the parent",
            None,
        ),
        (
            "messages of a batch itself",
            f"{of_hosts:.0f} a checkpoint ({of_hosts / hosts:.1f} per host)",
            "by hosts, not partitions",
            of_hosts <= 2 * hosts,
        ),
        (
            "all messages",
            f"{per_checkpoint:.0f} a checkpoint ({per_checkpoint / hosts:.1f} per host): "
            + ", ".join(f"{m} {n / count:.0f}" for m, n in measured.messages.most_common()),
            "by hosts, not partitions",
            None,
        ),
        (f"locating {partitions:,} instances in one call", f"{located[1] * 1e3:.0f} ms", "under 1 s", located[1] < 1),
        (f"reporting {partitions:,} instances, one message each", f"{located[0]:.1f} s", "", None),
        ("locating all partitions of an operator for a query client", f"{oracle * 1e3:.0f} ms", "", None),
    ]
    table = Table(title=f"{hosts} hosts, {partitions:,} partitions, {where}", title_justify="left")
    for heading in ("what", "measured", "limit", ""):
        table.add_column(heading)
    for what, value, limit, kept in rows:
        table.add_row(what, value, limit, "" if kept is None else "kept" if kept else "[bold red]BROKEN")
    console.print(table)
    return all(kept is not False for *_, kept in rows)


def main() -> int:
    """Measure and print; return 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actor", action="store_true", help="a real Ray actor")
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--partitions", type=int, default=10_000)
    parser.add_argument("--operators", type=int, default=1, help="the partitions are divided among so many")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds from checkpoint to checkpoint")
    parser.add_argument(
        "--maintenance-interval", type=float, default=60.0, help="seconds between snapshots of a partition"
    )
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds between two of a host")
    parser.add_argument("--retain", type=int, default=100, help="versions kept before the completed one")
    parser.add_argument("--threads", type=int, default=4, help="that send messages to the actor")
    options = parser.parse_args()
    with directory() as root, linked(options.actor) as link, ThreadPoolExecutor(options.threads) as pool:
        cluster = Cluster(link, root, options, pool.map if options.actor else map)
        cluster.start()
        measured = play(cluster, link, options)
        operator = next(iter(cluster.sizes))
        oracle = best_of(5, lambda: link.call("locate", operator))
        located = locate(cluster, link)
        where = "a Ray actor" if options.actor else "in this process"
        return 0 if show(cluster, measured, located, oracle, options.interval, where) else 1


if __name__ == "__main__":
    sys.exit(main())
