"""A stream without Spark: real hosts and a real coordinator in this process, on real storage.

Each batch is what the tasks of Spark would do: every partition of every operator is opened at the host that owns it,
changed and committed, each task in a thread, then Spark's commit is written, and coordinator and hosts hear of it. What
Spark writes itself goes past the counting proxy. Snapshots and the removal of what is no longer kept come between
batches, all at once every ``maintenance`` batches, so that no batch is measured beside them.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from backends.conf import StateStoreConf
from backends.encoding.schema import StateSchema
from backends.formats.changelog import Changes
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.messages import HostInfo, OperatorSpec, QueryRegistration
from spark_bridge.host.host import Host
from spark_bridge.transport.protocol import TaskIdentity

SCHEMA = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("n", pa.int64())])).to_json()
AT_EACH_CALL = 1e-3
"""The coordinator's maintenance interval, so that it removes what it may whenever it is called."""


@dataclass(frozen=True)
class Shape:
    """How large a stream is. ``keys`` are changed in each partition in each batch.

    ``slots`` tasks run at once; 0: all of them. ``retain`` versions before the completed one are kept.
    """

    hosts: int
    partitions: int
    operators: int = 1
    keys: int = 100
    slots: int = 0
    maintenance: int = 10
    retain: int = 10


@dataclass
class PlayedStream:
    """A running query with its hosts. ``spark`` is where Spark writes, ``batch`` the next batch."""

    shape: Shape
    coordinator: Coordinator
    hosts: list[Host]
    registration: QueryRegistration
    spark: CheckpointStorage
    batch: int = 0

    def run(self, batches: int) -> list[float]:
        """Run so many batches, and return the seconds of each: from its first task's start to its last one's end."""
        slots = self.shape.slots or self.shape.operators * self.shape.partitions
        taken = []
        with ThreadPoolExecutor(slots, thread_name_prefix="task") as tasks:
            for _ in range(batches):
                taken.append(self._run_one(tasks))
                if self.batch % self.shape.maintenance == 0:
                    self.maintain()
        return taken

    def _run_one(self, tasks: ThreadPoolExecutor) -> float:
        batch = self.batch
        self.spark.put_new(f"offsets/{batch}", b"v1\n{}\n{}")
        began = time.perf_counter()
        for done in [
            tasks.submit(self._task, spec.name, p, batch)
            for spec in self.registration.operators
            for p in range(spec.num_partitions)
        ]:
            done.result()
        taken = time.perf_counter() - began
        self.spark.put_new(f"commits/{batch}", b"v1\n{}")
        self.coordinator.batch_committed(self.registration.run_id, batch, by_driver=True)
        for host in self.hosts:
            host.heartbeat()
        self.batch += 1
        return taken

    def _task(self, operator: str, partition: int, batch: int) -> None:
        run_id = self.registration.run_id
        task = TaskIdentity(run_id, operator, partition, batch, f"{partition}.{batch}", uuid.uuid4().hex, batch)
        asked = self.hosts[partition % len(self.hosts)]
        by_address = {host.info.address: host for host in self.hosts}
        while True:
            opened = asked.open(task)
            if opened.redirect is not None:
                asked = by_address[opened.redirect]
            elif opened.loading is None:
                break
        rng = random.Random(f"{operator}/{partition}/{batch}")
        keys = sorted(rng.sample(range(100_000), self.shape.keys))
        stored = pa.array([k.to_bytes(8, "big") for k in keys], pa.binary())
        values = pa.array([rng.randbytes(16) for _ in keys], pa.binary())
        asked.commit(task, Changes.of(stored, values), {})

    def maintain(self) -> None:
        """Take all snapshots that are due, and remove what is no longer kept."""
        for begun in [f for host in self.hosts for f in host.maintenance.do_maintenance()]:
            begun.result()
        self.coordinator.maintain()


@contextmanager
def played_stream(
    root: Path,
    location: str,
    shape: Shape,
    options: Mapping[str, str] | None = None,
    spark_options: Mapping[str, str] | None = None,
    earlier: PlayedStream | None = None,
) -> Iterator[PlayedStream]:
    """Start a query on a checkpoint location, with hosts whose local directories are below ``root``.

    With ``earlier``, which has ended, the query goes on there with a new run, coordinator and hosts.
    """
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
    # Nobody sends heartbeats while a batch takes long: no lease may end.
    conf = CoordinatorConf(host_timeout=1e9, driver_timeout=1e9, report_timeout=0.0)
    coordinator = Coordinator(time.time, CheckpointStorage.open, conf)
    hosts = []
    for i in range(shape.hosts):
        info = HostInfo(f"host-{i}", uuid.uuid4().hex, f"grpc://10.0.0.{i}:1", f"node-{i}", "session")
        hosts.append(Host(info, coordinator, root / f"host-{i}", conf=StateStoreConf(host_memory=512 << 20)))
    try:
        for host in hosts:
            host.register()
        registered = coordinator.register_query(registration)
        if registered.refusal is not None:
            raise RuntimeError(f"The coordinator refuses the query: {registered.refusal}")
        spark = CheckpointStorage.open(location, dict(spark_options or {}))
        yield PlayedStream(shape, coordinator, hosts, registration, spark, 0 if earlier is None else earlier.batch)
    finally:
        for host in hosts:
            host.close()
