"""Simulated hosts, drivers and queries of a large cluster, played to a real coordinator actor.

Every simulated host asks for its part of a batch, acknowledges the changes of its partitions in one message, sends
heartbeats, and uploads the snapshots of its partitions once per maintenance interval. Small files in ``offsets/`` and
``commits/`` replace Spark's. Changelogs have names, but are not written: the coordinator does not read them.
"""

from __future__ import annotations

import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from backends import StateStoreId, StateStoreProviderId
from backends.encoding.schema import StateSchema
from backends.formats.local_state import LocalState
from backends.formats.manifest import SnapshotRef, changelog_path, seal
from backends.formats.snapshot import SnapshotDescriptor
from backends.storage.locations import FileRef, digest
from coordinator_actor import messages
from coordinator_actor.messages import Acknowledge, BatchGrant, HostInfo, OperatorSpec, QueryRegistration
from coordinator_actor.run.holds import UPLOAD

SESSION, OPERATOR = "session-1", "totals"
HOSTS_PER_NODE = 4
ANSWER_SECONDS = 60.0
SCHEMA = StateSchema(
    pa.schema([("user", pa.int64())]), pa.schema([("n", pa.int64()), ("spent", pa.float64())])
).to_json()


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
) -> messages.SnapshotUploaded:
    """Upload the snapshot of a partition to the checkpoint at ``root``, and return the message about the snapshot."""
    head = host.heads[operator, partition]
    path = f"{head.rpartition('/')[0]}/{version}-{rng.randbytes(16).hex()}.snapshot"
    data = seal(SnapshotDescriptor(path, "rocksdb", LocalState(version, head, 1000), ()))
    file = root / "statestore" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    snapshot = SnapshotRef(version, head, FileRef(path, len(data), digest(data)))
    return messages.SnapshotUploaded(run, operator, partition, *host.name, snapshot, None)


class InActor:
    """A coordinator's named actor in the Ray cluster that this process has joined.

    ``send`` sends the messages of a host as hosts do: those of a batch over ``connections``. Heartbeats go through Ray:
    of those that a host sends each second, it sends every second one over a connection at most.
    """

    def __init__(self, namespace: str) -> None:
        import ray

        from coordinator_actor.actor import ClusterStore, get_or_create_coordinator
        from coordinator_actor.coordinator_conf import COORDINATOR_NAME
        from coordinator_actor.direct_calls import DIRECT, DirectCalls

        self._get, self._kill = ray.get, ray.kill
        self._actor = get_or_create_coordinator(namespace)
        described = self.call("describe")
        self._process = psutil.Process(described["pid"])
        self.connections = DirectCalls(ClusterStore(namespace, COORDINATOR_NAME).secret(""))
        self._address = described["direct"]["address"]
        self._direct = {*DIRECT} - {"heartbeat_host"}

    def call(self, method: str, *args: Any) -> Any:
        return self._get(getattr(self._actor, method).remote(*args))

    def send(self, method: str, *args: Any) -> Any:
        from coordinator_actor.direct_calls import NotDirectError

        if method in self._direct:
            self.connections.follow(self._address)
            try:
                return self.connections.call(method, args, {}, ANSWER_SECONDS)
            except NotDirectError:
                pass  # as a host does
        return self.call(method, *args)

    def close(self) -> None:
        """End the actor."""
        self.connections.follow("")
        self._kill(self._actor)

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident(self) -> int:
        return int(self._process.memory_info().rss)


def empty_actor(max_concurrency: int = 1) -> Callable[..., Any]:
    """Start an actor that takes the arguments of a message and returns nothing; return a call that waits for it."""
    import ray

    from coordinator_actor.process import take_ordinary_priority

    class Empty:
        def __init__(self) -> None:
            take_ordinary_priority()

        def take(self, *arguments: Any) -> None:
            """Do nothing."""

    made = ray.remote(num_cpus=0, max_concurrency=max_concurrency)(Empty).remote()
    return lambda *arguments: ray.get(made.take.remote(*arguments))


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Give a directory for a checkpoint, in memory where possible: the coordinator is measured, not the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="coordinator-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def played_hosts(count: int) -> list[HostInfo]:
    return [
        HostInfo(f"host-{i:04d}", uuid.uuid4().hex, f"grpc://10.0.{i}.1:1", f"node-{i // HOSTS_PER_NODE}", SESSION)
        for i in range(count)
    ]


def registration_of(name: str, root: Path, partitions: int, retain: int, maintenance: float) -> QueryRegistration:
    """Return the registration of a query whose checkpoint is at ``root``, and make Spark's directories there."""
    for directory in ("offsets", "commits"):
        (root / directory).mkdir(parents=True)
    return QueryRegistration(
        query_id=str(uuid.uuid4()),
        run_id=str(uuid.uuid4()),
        name=name,
        session_id=SESSION,
        checkpoint_location=str(root),
        state_location=str(root / "statestore"),
        operators=(OperatorSpec(OPERATOR, partitions, SCHEMA),),
        key_groups=max(1024, partitions),
        min_versions_to_retain=retain,
        maintenance_interval=maintenance,
    )


@dataclass
class PlayedQuery:
    """One query and its part of every host. ``call`` sends the coordinator a message.

    ``each`` applies a function to every item, in several threads or in this one.
    """

    registration: QueryRegistration
    hosts: list[PlayedHost]
    call: Callable[..., Any]
    interval: float
    each: Callable[..., Iterable[Any]] = map
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    batch: int = 0
    is_registered: bool = False
    waited: float = 0.0

    @property
    def run(self) -> str:
        return self.registration.run_id

    @property
    def partitions(self) -> int:
        return self.registration.operators[0].num_partitions

    @property
    def root(self) -> Path:
        return Path(self.registration.checkpoint_location)

    def send_all(self, method: str, arguments: Iterable[tuple[Any, ...]]) -> list[Any]:
        """Send messages of one kind, made before the first is sent; return the answers in order."""
        made = list(arguments)
        started = time.perf_counter()
        answers = list(self.each(lambda args: self.call(method, *args), made))
        self.waited += time.perf_counter() - started
        return answers

    def register(self) -> None:
        registered = self.call("register_query", self.registration)
        if registered.refusal is not None:
            raise RuntimeError(f"The coordinator refuses a query: {registered.refusal}")
        self.is_registered = True

    def checkpoint(self) -> None:
        """Run one micro-batch, from its offsets to the driver's message that it is committed.

        All its hosts but those of the first batch own partitions.
        """
        batch = self.batch
        (self.root / "offsets" / str(batch)).write_text("v1\n{}")
        hosts = [h for h in self.hosts if batch == 0 or any(h.owned.values())]
        asked = [(messages.OpenBatch(self.run, batch, *h.name, h.assignment),) for h in hosts]
        grants = self.send_all("open_batch", asked)
        changed = []
        for host, grant in zip(hosts, grants, strict=True):
            host.take(grant, batch)
            if made := tuple(acknowledged(host, grant, {OPERATOR: self.partitions}, self.run, self.rng)):
                changed.append((self.run, *host.name, made))
        answers = [a for many in self.send_all("acknowledge_many", changed) for a in many]
        refused = [a for a in answers if isinstance(a, messages.Refused)]
        if refused or not any(a.manifest_id is not None for a in answers):
            raise RuntimeError(f"Batch {batch} of {self.registration.name} is not prepared: {refused[:1] or answers}")
        (self.root / "commits" / str(batch)).write_text("v1\n{}")
        self.send_all("batch_committed", [(self.run, batch)])
        self.batch += 1

    def upload_snapshots(self) -> None:
        """Upload snapshots of the last completed version, of the partitions whose turn it is."""
        version = self.batch
        rounds = max(1, round(self.registration.maintenance_interval / self.interval))
        due = [(host, p) for host in self.hosts for p in host.owned.get(OPERATOR, ()) if p % rounds == version % rounds]
        self.send_all("lineage", [(self.run, OPERATOR, p, version, UPLOAD) for _, p in due])
        args = (version, self.root, self.run, self.rng)
        if not all(self.send_all("snapshot_uploaded", [(uploaded(host, OPERATOR, p, *args),) for host, p in due])):
            raise RuntimeError(f"Snapshots of version {version} do not count.")

    def beat(self) -> None:
        """Send the heartbeats of all hosts, and take the completed versions of the answers."""
        beats = [(*h.name, {self.run: h.version}) for h in self.hosts]
        orders = self.each(lambda args: self.call("heartbeat_host", *args), beats)
        for host, order in zip(self.hosts, orders, strict=True):
            if not order.known or order.unload_runs:
                raise RuntimeError(f"{host.info.host_id} was forgotten: {order}")
            host.version = max([host.version, *(c.version for c in order.completed)])


def locate_seconds(query: PlayedQuery) -> float:
    """Report every instance, one message each; return the least seconds in which one call locates all of them."""
    location, hosts = query.registration.checkpoint_location, len(query.hosts)
    ids = [StateStoreProviderId(StateStoreId(location, OPERATOR, p), query.run) for p in range(query.partitions)]
    reports = [(id_, f"node-{i % hosts}", f"e{i % hosts}") for i, id_ in enumerate(ids)]
    query.send_all("report_active_instance", reports)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        found = query.call("get_locations", tuple(ids))
        seconds.append(time.perf_counter() - started)
        if list(found) != [f"executor_{host}_{executor}" for _, host, executor in reports]:
            raise RuntimeError("Instances were located elsewhere than they had been reported.")
    return min(seconds)
