"""Twenty queries on twenty hosts, one of them on S3 behind a proxy whose faults meet no other query.

The coordinator is the Ray actor. The hosts live in the test's process and send their heartbeats as their actors would.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from backends.conf import StateStoreConf
from backends.encoding.operator_schema import OperatorSchema
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.actor import get_or_create_coordinator
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, CoordinatorConf
from coordinator_actor.messages import HostInfo, OperatorSpec, QueryRegistration
from coordinator_actor.reference import RayCoordinatorPort
from spark_bridge.host.host import Host
from spark_bridge.queryable.protocol import LookupRequest
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.transport.protocol import TaskIdentity
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.host_world import COMPLETED, STATE, G, changes_of, partitions_of, stored

HEARTBEAT_SECONDS = 0.5
HOST_TIMEOUT = 5.0
RECOVERY_TIMEOUT = 10.0
"""How long hosts and drivers wait for one answer of the coordinator, in seconds."""


class BeatingHost:
    """A host with its heartbeat."""

    def __init__(self, i: int, root: Path, namespace: str) -> None:
        info = HostInfo(f"h{i}", uuid.uuid4().hex, f"grpc://127.0.0.1:{i}", f"node{i}", "s")
        port = RayCoordinatorPort(namespace, COORDINATOR_NAME, RECOVERY_TIMEOUT)
        conf = StateStoreConf(provider="file", fsync=False)
        register = port.register_host

        def counted(*args: Any) -> None:
            self.registrations += 1
            register(*args)

        port.register_host = counted  # type: ignore[assignment,method-assign]
        self.host = Host(info, port, root / f"local{i}", conf=conf)
        self.reads = HostReads(self.host)
        self.beats = 0
        self.registrations = 0
        self.failures: list[BaseException] = []
        self._stopping = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self.host.register()
        self._beating.start()

    def _beat(self) -> None:
        while not self._stopping.wait(HEARTBEAT_SECONDS):
            try:
                self.host.heartbeat()
                self.beats += 1
            except Exception as error:  # noqa: BLE001, the test looks at them
                self.failures.append(error)

    def close(self) -> None:
        self._stopping.set()
        self._beating.join(PATIENCE)
        self.host.close()


class RunningQuery:
    """A query and its driver: ``batch`` runs one micro-batch, its tasks one after the other or all at once."""

    def __init__(
        self,
        world: NeighbourWorld,
        name: str,
        num_partitions: int,
        location: str,
        options: dict[str, str] | None = None,
    ) -> None:
        self.world = world
        self.name = name
        self.run_id = f"run-{name}"
        self.num_partitions = num_partitions
        self.batch_id = 0
        self.spark = CheckpointStorage.open(location, world.past_the_proxy if options else {}, fsync=False)
        self.registration = QueryRegistration(
            query_id=f"id-{name}",
            run_id=self.run_id,
            name=name,
            session_id="s",
            checkpoint_location=location,
            state_location=f"{location}/statestore",
            operators=(OperatorSpec("op", num_partitions, OperatorSchema.of_rows(STATE).to_json(), "file"),),
            key_groups=G,
            storage_options=options or {},
        )
        answer = world.port.register_query(self.registration)
        assert answer.refusal is None, answer.refusal
        self._owners: dict[int, BeatingHost] = {}

    def batch(self, map_tasks: Callable[..., Any] = map, *, tell: bool = True) -> float:
        """Run the next batch; return its seconds. Without ``tell``, the coordinator must look what Spark committed."""
        begun = time.perf_counter()
        offsets = f"offsets/{self.batch_id}"
        if not self.spark.exists(offsets):
            self.spark.put_new(offsets, b"v1\n{}\n{}")
        list(map_tasks(self._task, range(self.num_partitions)))
        self.spark.put_new(f"commits/{self.batch_id}", b"v1\n{}")
        if tell:
            self.world.port.batch_committed(self.run_id, self.batch_id)
        self.batch_id += 1
        return time.perf_counter() - begun

    def _task(self, partition: int) -> None:
        task = TaskIdentity(self.run_id, "op", partition, self.batch_id, uuid.uuid4().hex[:6], uuid.uuid4().hex)
        owner = self._owners.get(partition, self.world.hosts[0])
        redirect = owner.host.open(task).redirect
        if redirect is not None:
            owner = self._owners[partition] = self.world.by_address[redirect]
            assert owner.host.open(task).redirect is None
        owner.host.commit(task, changes_of(self.world.values, partition, self.num_partitions), {})

    def owners(self) -> list[str]:
        return [owner.host_id for owner in self.world.port.locate("op", self.name).owners]


class NeighbourWorld:
    """The coordinator's actor in a separate namespace, the hosts, and the added queries."""

    def __init__(self, root: Path, past_the_proxy: dict[str, str], hosts: int = 20) -> None:
        self.root = root
        self.past_the_proxy = past_the_proxy
        self.namespace = f"neighbours-{uuid.uuid4().hex[:8]}"
        self.values = {key: key for key in range(64)}
        conf = CoordinatorConf(host_timeout=HOST_TIMEOUT, report_timeout=0.0)
        self._actor = get_or_create_coordinator(self.namespace, conf=conf)
        self.port = RayCoordinatorPort(self.namespace, COORDINATOR_NAME, RECOVERY_TIMEOUT)
        self.hosts = [BeatingHost(i, root, self.namespace) for i in range(hosts)]
        self.by_address = {h.host.info.address: h for h in self.hosts}

    def look_up(self, query: RunningQuery) -> None:
        """Locate a random key of a query, and read it from its owner."""
        key = random.randrange(64)
        location = self.port.locate("op", query.name)
        owner = self.by_address[location.owners[partitions_of([key], query.num_partitions)[0]].address]
        _, values = owner.reads.lookup(LookupRequest(location.run_id, "op", COMPLETED), stored([key]))
        assert STATE.decode_values(values).column("n").to_pylist() == [key]

    @contextmanager
    def client(self, queries: Sequence[RunningQuery]) -> Iterator[list[float]]:
        """Look keys of these queries up all the while; give the seconds that each answer took."""
        took: list[float] = []
        stopping = threading.Event()

        def run() -> None:
            while not stopping.is_set():
                begun = time.perf_counter()
                self.look_up(random.choice(queries))
                took.append(time.perf_counter() - begun)

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(run)
            try:
                yield took
            finally:
                stopping.set()
        running.result()

    def wait_for_beats(self, beats: int) -> None:
        """Wait until so many heartbeats of each host have been answered from now on."""
        goal = {h: h.beats + beats for h in self.hosts}
        deadline = time.monotonic() + PATIENCE
        while any(h.beats < n for h, n in goal.items()):
            assert time.monotonic() < deadline, [(h.host.info.host_id, h.failures[-1:]) for h in self.hosts]
            time.sleep(0.05)

    def renew_leases(self, queries: Sequence[RunningQuery]) -> None:
        """Say that the driver of these queries lives."""
        assert self.port.renew_leases([q.run_id for q in queries]) == []

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.hosts)) as threads:
            list(threads.map(BeatingHost.close, self.hosts))
        ray.kill(self._actor, no_restart=True)
