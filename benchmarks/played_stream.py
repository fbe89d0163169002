"""A stream without Spark: real hosts and a real coordinator, on real storage.

Each batch is what the tasks of Spark would do: every partition of every operator is opened at the host that owns it,
changed and committed, each task in a thread. Then Spark's commit is written, and coordinator and hosts learn of it,
while Spark writes the offsets of the next batch. Spark's own writes bypass the counting proxy, and take
``spark_seconds`` longer. Snapshots and the removal of expired files run between batches, all at once every
``maintenance`` batches, so that they do not affect a measured batch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
from played_host import HostApart, HostHere, Player, TasksOf, door_to

from backends.conf import StateStoreConf
from backends.encoding.schema import StateSchema
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.messages import HostInfo, OperatorSpec, QueryRegistration
from spark_bridge.host.host import Host

SCHEMA = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())])).to_json()
AT_EACH_CALL = 1e-3
"""The coordinator's maintenance interval, so that it removes what it may whenever it is called."""


@dataclass(frozen=True)
class Shape:
    """How large a stream is. ``keys`` are changed in each partition in each batch.

    ``slots`` tasks run at once, the same number at each host; 0: all of them. ``retain`` versions before the completed
    one are kept.
    """

    hosts: int
    partitions: int
    operators: int = 1
    keys: int = 100
    slots: int = 0
    maintenance: int = 10
    retain: int = 10

    @property
    def slots_of_a_host(self) -> int:
        """Return how many tasks run at once at one host."""
        return -(-(self.slots or self.operators * self.partitions) // self.hosts)


@dataclass
class PlayedCluster:
    """A coordinator in this process and its hosts, for any number of queries."""

    coordinator: Coordinator
    players: list[Player]
    threads: ThreadPoolExecutor

    def start(
        self,
        location: str,
        shape: Shape,
        options: Mapping[str, str] | None = None,
        spark_options: Mapping[str, str] | None = None,
        earlier: PlayedStream | None = None,
        spark_seconds: float = 0.0,
    ) -> PlayedStream:
        """Start a query on a checkpoint location. With ``earlier``, which has ended, start a new run of that query."""
        registration = QueryRegistration(
            query_id=str(uuid.uuid4()) if earlier is None else earlier.registration.query_id,
            run_id=str(uuid.uuid4()),
            name="played",
            session_id="session",
            checkpoint_location=location,
            state_location=f"{location}/statestore",
            operators=tuple(OperatorSpec(f"op{i}", shape.partitions, SCHEMA) for i in range(shape.operators)),
            storage_options=dict(options or {}),
            min_versions_to_retain=shape.retain,
            maintenance_interval=AT_EACH_CALL,
        )
        registered = self.coordinator.register_query(registration)
        if registered.refusal is not None:
            raise RuntimeError(f"The coordinator refuses the query: {registered.refusal}")
        spark = CheckpointStorage.open(location, dict(spark_options or {}))
        batch = 0 if earlier is None else earlier.batch
        stream = PlayedStream(shape, self, registration, spark, spark_seconds, batch)
        if earlier is None:
            stream.plan()
        return stream


@dataclass
class PlayedStream:
    """A running query. ``spark`` is where Spark writes, ``batch`` the next batch, which is planned."""

    shape: Shape
    cluster: PlayedCluster
    registration: QueryRegistration
    spark: CheckpointStorage
    spark_seconds: float
    batch: int = 0
    _owners: dict[tuple[str, int], str] = field(default_factory=dict)
    _told: Future[None] | None = None

    @property
    def coordinator(self) -> Coordinator:
        """Return the coordinator."""
        return self.cluster.coordinator

    @property
    def hosts(self) -> list[Host]:
        """Return the hosts, which are in this process."""
        return [player.host for player in self.cluster.players if isinstance(player, HostHere)]

    def run(self, batches: int) -> list[float]:
        """Run so many batches, and return the seconds of each: from its first task's start to its last one's end."""
        taken = []
        for _ in range(batches):
            began = time.perf_counter()
            self._run_tasks()
            taken.append(time.perf_counter() - began)
            self._commit()
            if self.batch % self.shape.maintenance == 0:
                self.maintain()
        self._hear()
        return taken

    def plan(self) -> None:
        """Write the offsets of the next batch, as Spark does."""
        self._write(f"offsets/{self.batch}", b"v1\n{}\n{}")

    def _write(self, path: str, content: bytes) -> None:
        time.sleep(self.spark_seconds)
        self.spark.put_new(path, content)

    def _commit(self) -> None:
        """Write Spark's commit; then the driver says so, while Spark plans the next batch."""
        self._hear()
        self._write(f"commits/{self.batch}", b"v1\n{}")
        self._told = self.cluster.threads.submit(self._tell, self.batch)
        self.batch += 1
        self.plan()

    def _tell(self, batch: int) -> None:
        self.coordinator.batch_committed(self.registration.run_id, batch, by_driver=True)
        for player in self.cluster.players:
            player.heartbeat()

    def _hear(self) -> None:
        if self._told is not None:
            self._told.result()
            self._told = None

    def _run_tasks(self) -> None:
        shape, players = self.shape, {player.info.address: player for player in self.cluster.players}
        addresses = list(players)
        left = {
            (spec.name, p): self._owners.get((spec.name, p), addresses[p % len(addresses)])
            for spec in self.registration.operators
            for p in range(spec.num_partitions)
        }
        while left:
            asked: dict[str, list[tuple[str, int]]] = {}
            for task, address in left.items():
                asked.setdefault(address, []).append(task)
            self._owners.update(left)
            given = {
                address: TasksOf(self.registration.run_id, self.batch, shape.keys, shape.slots_of_a_host, tasks)
                for address, tasks in asked.items()
            }
            answers = [self.cluster.threads.submit(players[address].run, tasks) for address, tasks in given.items()]
            left = {task: address for answer in answers for task, address in answer.result().items()}

    def maintain(self) -> None:
        """Take all snapshots that are due, and remove what is no longer kept."""
        self._hear()
        for done in [self.cluster.threads.submit(player.maintain) for player in self.cluster.players]:
            done.result()
        self.coordinator.maintain()


@contextmanager
def played_cluster(
    root: Path, hosts: int, *, apart: bool = True, conf: StateStoreConf | None = None
) -> Iterator[PlayedCluster]:
    """Start a coordinator and hosts with local directories below ``root``; ``apart``: each host in its own process."""
    # No heartbeats are sent during a long batch, so no lease may expire.
    of_coordinator = CoordinatorConf(host_timeout=1e9, driver_timeout=1e9, report_timeout=0.0)
    coordinator = Coordinator(time.time, CheckpointStorage.open, of_coordinator)
    conf = conf or StateStoreConf(host_memory=512 << 20)
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        door = stack.enter_context(door_to(coordinator, root / "door")) if apart else ""
        threads = stack.enter_context(ThreadPoolExecutor(hosts + 1, thread_name_prefix="player"))
        players: list[Player] = []
        for i in range(hosts):
            info = HostInfo(f"host-{i}", uuid.uuid4().hex, f"grpc://10.0.0.{i}:1", f"node-{i}", "session")
            directory = root / f"host-{i}"
            players.append(
                HostApart(info, door, directory, conf) if apart else HostHere(info, coordinator, directory, conf)
            )
            stack.callback(players[-1].close)
        for player in players:
            player.register()
        yield PlayedCluster(coordinator, players, threads)


@contextmanager
def played_stream(root: Path, location: str, shape: Shape) -> Iterator[PlayedStream]:
    """Start a query on a checkpoint location, with hosts in this process."""
    with played_cluster(root, shape.hosts, apart=False) as cluster:
        yield cluster.start(location, shape)
