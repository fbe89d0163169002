"""A stream without Spark: real hosts and a real coordinator, on real storage.

Each batch is what the tasks of Spark would do: every partition of every operator is opened at the host that owns it,
changed and committed, each task in a thread. Then Spark's commit is written, and coordinator and hosts learn of it,
while Spark writes the offsets of the next batch. Spark's own writes bypass the counting proxy, and take
``spark_seconds`` longer. Snapshots and the removal of expired files run between batches, all at once every
``maintenance`` batches, so that they do not affect a measured batch.

Each host has its own process, and its tasks are threads of that process, as Spark's tasks run on the machines of their
hosts. A host calls the coordinator through a socket.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from backends.conf import DEFAULT_FAMILY, StateStoreConf
from backends.decoders import keep_pandas_out
from backends.encoding.schema import StateSchema
from backends.formats.changelog import Changes
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.coordinator_port import CoordinatorPort
from coordinator_actor.messages import HostInfo, OperatorSpec, QueryRegistration
from spark_bridge.host.host import Host
from spark_bridge.transport.protocol import GetCommand, TaskIdentity

Redirects = Mapping[tuple[str, int], str]
"""The addresses of the hosts that tasks were redirected to, by operator and partition."""
AUTHENTICATION = uuid.uuid4().bytes
SWITCH_SECONDS = 0.0005
"""How long a thread of a host keeps the interpreter while others wait, in seconds."""


@dataclass(frozen=True)
class Shape:
    """How large a stream is. In each batch ``keys`` of ``of_keys`` are changed in each partition.

    With ``reads`` tasks read them first. ``slots`` tasks run at once, the same number at each host; 0: all of them.
    ``retain`` versions before the completed one are kept.
    """

    hosts: int
    partitions: int
    operators: int = 1
    keys: int = 100
    slots: int = 0
    maintenance: int = 10
    retain: int = 10
    of_keys: int = 100_000
    reads: bool = False

    @property
    def slots_of_a_host(self) -> int:
        return -(-(self.slots or self.operators * self.partitions) // self.hosts)


@dataclass(frozen=True)
class TasksOf:
    """The tasks of a batch that ask one host first."""

    run_id: str
    batch: int
    shape: Shape
    tasks: Sequence[tuple[str, int]]


class HostHere(Host):
    def __init__(self, info: HostInfo, coordinator: CoordinatorPort, directory: Path, conf: StateStoreConf) -> None:
        super().__init__(info, coordinator, directory, conf=conf)
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def run(self, given: TasksOf) -> Redirects:
        slots = given.shape.slots_of_a_host
        if slots not in self._threads:
            self._threads[slots] = ThreadPoolExecutor(slots, thread_name_prefix="task")
        threads = self._threads[slots]
        begun = {task: threads.submit(self._task, given, *task) for task in given.tasks}
        sent_on = {task: done.result() for task, done in begun.items()}
        return {task: address for task, address in sent_on.items() if address is not None}

    def _task(self, given: TasksOf, operator: str, partition: int) -> str | None:
        attempt, batch = f"{partition}.{given.batch}", given.batch
        task = TaskIdentity(given.run_id, operator, partition, batch, attempt, uuid.uuid4().hex, batch)
        opened = self.open(task)
        while opened.loading is not None:
            opened = self.open(task)
        if opened.redirect is not None:
            return opened.redirect
        changed = changes(partition, batch, given.shape)
        if given.shape.reads:
            keys = changed.families[DEFAULT_FAMILY].keys
            values = self.reads.get_many(GetCommand(given.run_id, operator, partition, batch), keys)
            if values.null_count:
                raise AssertionError(f"{values.null_count} of {len(keys)} keys of partition {partition} are missing.")
        self.commit(task, changed, {})
        return None

    def maintain(self) -> None:
        for begun in self.maintenance.do_maintenance():
            begun.result()

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown()
        super().close()


def changes(partition: int, batch: int, shape: Shape) -> Changes:
    """Return the changes of a partition, the same ones for the same batch."""
    rng = np.random.default_rng((partition, batch))
    drawn = np.sort(rng.choice(shape.of_keys, shape.keys, replace=False, shuffle=False)).astype(">i8")
    return Changes.of(binary(drawn.tobytes(), 8), binary(rng.bytes(16 * shape.keys), 16))


def binary(data: bytes, width: int) -> pa.BinaryArray:
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(data) // width, [None, pa.py_buffer(data)]).cast(
        pa.binary()
    )


# -- a host in a separate process


class HostApart:
    """A host in a separate process, which ends with this one. It learns of versions while it runs tasks."""

    def __init__(self, info: HostInfo, door: str, directory: Path, conf: StateStoreConf) -> None:
        self.info = info
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        (self._tasks, tasks), (self._orders, orders) = context.Pipe(), context.Pipe()
        given = (tasks, orders, info, door, AUTHENTICATION, directory, conf)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        tasks.close()
        orders.close()

    def run(self, given: TasksOf) -> Redirects:
        """Run tasks until all have committed; return those that belong to another host."""
        answer: Redirects = _ask(self._tasks, "run", given)
        return answer

    def order(self, what: str) -> Any:
        """Have the host do something: "register", "heartbeat", "maintain" or "describe"."""
        return _ask(self._orders, what)

    def close(self) -> None:
        self._tasks.close()
        with suppress(EOFError, BrokenPipeError):
            self.order("close")
        self._process.join(30)


def _ask(way: Connection, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Have the other end call a method; return the answer, or raise what was raised there."""
    way.send((method, args, kwargs))
    is_done, answer = way.recv()
    if not is_done:
        raise answer
    return answer


def _obey(way: Connection, called: Any) -> None:
    """Call one method after the other, until ``close`` has been called or the caller has ended."""
    with suppress(EOFError, ConnectionError):
        while True:
            method, args, kwargs = way.recv()
            try:
                answer = (True, getattr(called, method)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                answer = (False, error)
            way.send(answer)
            if method == "close":
                return


def _serve(
    tasks: Connection, orders: Connection, info: HostInfo, door: str, key: bytes, directory: Path, conf: StateStoreConf
) -> None:
    # As a host's actor does (``spark_bridge/host_actor.py``).
    keep_pandas_out()
    sys.setswitchinterval(SWITCH_SECONDS)
    host = HostHere(info, PortThroughDoor(door, key), directory, conf)
    threading.Thread(target=_obey, args=(tasks, host), name="tasks", daemon=True).start()
    _obey(orders, host)


class PortThroughDoor(CoordinatorPort):
    """Sends messages to a coordinator in another process. Each thread has its own connection."""

    def __init__(self, door: str, key: bytes) -> None:
        self._door = door
        self._key = key
        self._here = threading.local()

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Send one message and return the answer, or raise what the coordinator raises."""
        if not hasattr(self._here, "connection"):
            self._here.connection = Client(self._door, "AF_UNIX", self._key)
        return _ask(self._here.connection, "call", method, *args, **kwargs)


@contextmanager
def door_to(coordinator: CoordinatorPort, address: Path) -> Iterator[str]:
    """Let hosts in other processes call a coordinator within the block; yield the address for it."""
    with Listener(str(address), "AF_UNIX", backlog=128, authkey=AUTHENTICATION) as listener:
        threading.Thread(target=_admit, args=(listener, coordinator), name="door", daemon=True).start()
        yield str(address)


def _admit(listener: Listener, coordinator: CoordinatorPort) -> None:
    with suppress(OSError):  # the listener was closed
        while True:
            connection = listener.accept()
            threading.Thread(target=_obey, args=(connection, coordinator), daemon=True).start()


# -- the stream


SCHEMA = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())])).to_json()
AT_EACH_CALL = 1e-3
"""The coordinator's maintenance interval, so that it removes what it may whenever it is called."""


@dataclass
class PlayedCluster:
    """A coordinator in this process and its hosts, for any number of queries."""

    coordinator: Coordinator
    players: list[HostApart]
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
        self.cluster.coordinator.batch_committed(self.registration.run_id, batch, by_driver=True)
        for player in self.cluster.players:
            player.order("heartbeat")

    def _hear(self) -> None:
        if self._told is not None:
            self._told.result()
            self._told = None

    def _run_tasks(self) -> None:
        players = {player.info.address: player for player in self.cluster.players}
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
                at: TasksOf(self.registration.run_id, self.batch, self.shape, tasks) for at, tasks in asked.items()
            }
            answers = [self.cluster.threads.submit(players[address].run, tasks) for address, tasks in given.items()]
            left = {task: address for answer in answers for task, address in answer.result().items()}

    def maintain(self) -> None:
        """Take all snapshots that are due, and remove what is no longer kept."""
        self._hear()
        for done in [self.cluster.threads.submit(player.order, "maintain") for player in self.cluster.players]:
            done.result()
        self.cluster.coordinator.maintain()


@contextmanager
def played_cluster(root: Path, hosts: int, *, conf: StateStoreConf | None = None) -> Iterator[PlayedCluster]:
    """Start a coordinator and hosts with local directories below ``root``; each host has its own process."""
    # No heartbeats are sent during a long batch, so no lease may expire.
    of_coordinator = CoordinatorConf(host_timeout=1e9, driver_timeout=1e9, report_timeout=0.0)
    coordinator = Coordinator(time.time, CheckpointStorage.open, of_coordinator)
    conf = conf or StateStoreConf(host_memory=512 << 20)
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        door = stack.enter_context(door_to(coordinator, root / "door"))
        threads = stack.enter_context(ThreadPoolExecutor(hosts + 1, thread_name_prefix="player"))
        players: list[HostApart] = []
        for i in range(hosts):
            info = HostInfo(f"host-{i}", uuid.uuid4().hex, f"grpc://10.0.0.{i}:1", f"node-{i}", "session")
            directory = root / f"host-{i}"
            players.append(HostApart(info, door, directory, conf))
            stack.callback(players[-1].close)
        for player in players:
            player.order("register")
        yield PlayedCluster(coordinator, players, threads)
