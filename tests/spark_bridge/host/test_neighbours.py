"""The storage of one query hangs, answers errors or is slow: 19 other queries on the same 20 hosts do not feel it.

``tests/coordinator_actor/test_hanging_storage.py`` shows the same of the coordinator alone, message by message.
"""

from __future__ import annotations

import os
import statistics
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark_bridge.exceptions import STATESTORE_ERRORS
from tests.backends.storage.s3_faults import Fault, FaultProxy, S3Server, fault_proxy, s3_server
from tests.patience import PATIENCE
from tests.spark_bridge.conftest import wait_until
from tests.spark_bridge.host.neighbour_world import (
    HEARTBEAT_SECONDS,
    HOST_TIMEOUT,
    NeighbourWorld,
    RunningQuery,
)
from tests.spark_bridge.queryable.host_world import G

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.thorough,  # otherwise: tests/coordinator_actor/test_hanging_storage.py
]

NEIGHBOURS = 19
BEATS = round(1.5 * HOST_TIMEOUT / HEARTBEAT_SECONDS)
"""A phase lasts so many heartbeats of each host: long enough for every lease to end that is not renewed."""
SLOWER = 1.5
"""Upper bound on a neighbour's median batch duration, as a multiple of its duration next to a healthy query."""
PHASES = 6
"""How often to measure at most: a machine whose speed changes between two phases is measured again."""


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[S3Server, FaultProxy]]:
    with s3_server() as server, fault_proxy(server) as proxy:
        yield server, proxy


@pytest.fixture
def world(
    spark: SparkSession, servers: tuple[S3Server, FaultProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NeighbourWorld]:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    made = NeighbourWorld(tmp_path, s3_options(servers[0], servers[0].endpoint))
    yield made
    made.close()


def s3_options(server: S3Server, endpoint: str) -> dict[str, str]:
    options = {
        "endpoint": endpoint,
        "path.style.access": "true",
        "access.key": server.account.access_key,
        "secret.key": server.account.secret_key,
    }
    return {f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()}


@contextmanager
def hangs(proxy: FaultProxy) -> Iterator[None]:
    proxy.gate.clear()
    try:
        yield
    finally:
        proxy.gate.set()


@contextmanager
def planned(proxy: FaultProxy, fault: Fault) -> Iterator[None]:
    proxy.plan = [fault]
    try:
        yield
    finally:
        proxy.plan = []


def answers_errors(proxy: FaultProxy) -> AbstractContextManager[None]:
    return planned(proxy, Fault("answer", status=503, times=1 << 30))


def takes_30_seconds(proxy: FaultProxy) -> AbstractContextManager[None]:
    return planned(proxy, Fault("delay", seconds=30.0, times=1 << 30))


MAY_FAIL = STATESTORE_ERRORS


class SickDriver:
    """Runs batches of the query with the slow storage. All tasks of a batch run at once and retry until they succeed.

    It reports no commit to the coordinator, so on the first message of each batch the coordinator reads storage. No
    batch runs while the test holds ``between_batches``.
    """

    def __init__(self, query: RunningQuery) -> None:
        self.query = query
        self.failed_batches = 0
        self._stopping = threading.Event()
        self.between_batches = threading.Lock()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._run, self._renew_lease)]
        for thread in self._threads:
            thread.start()

    def _renew_lease(self) -> None:
        """As drivers do, who register a run again that the coordinator has given up."""
        port = self.query.world.port
        while not self._stopping.wait(1.0):
            with suppress(*MAY_FAIL):
                if port.renew_leases([self.query.run_id]):
                    port.register_query(self.query.registration)

    def _run(self) -> None:
        with ThreadPoolExecutor(self.query.num_partitions) as tasks:
            while not self._stopping.is_set():
                try:
                    with self.between_batches:
                        self.query.batch(tasks.map, tell=False)
                except MAY_FAIL:
                    self.failed_batches += 1
                    self._stopping.wait(0.1)

    def wait_for_batches(self, count: int) -> None:
        goal = self.query.batch_id + count
        wait_until(lambda: self.query.batch_id >= goal)

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def phase(world: NeighbourWorld, queries: Sequence[RunningQuery]) -> tuple[list[float], list[float]]:
    """Run batches of these queries, four at a time, for ``BEATS`` heartbeats; return what batches and lookups took."""
    ending = threading.Event()
    took: list[float] = []

    def drive(own: Sequence[RunningQuery]) -> None:
        while not ending.is_set():
            for query in own:
                took.append(query.batch())
            world.renew_leases(own)

    with world.client(queries) as lookups, ThreadPoolExecutor(4) as drivers:
        driving = [drivers.submit(drive, queries[i::4]) for i in range(4)]
        try:
            world.wait_for_beats(BEATS)
        finally:
            ending.set()
        for one in driving:
            one.result()
    return took, lookups


@pytest.mark.parametrize("is_poor", [hangs, answers_errors, takes_30_seconds], ids=lambda f: f.__name__)
def test_slow_storage_of_one_query_does_not_slow_others(
    world: NeighbourWorld,
    servers: tuple[S3Server, FaultProxy],
    is_poor: Callable[[FaultProxy], AbstractContextManager[None]],
) -> None:
    server, proxy = servers
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    server.make_bucket(bucket)
    queries = [RunningQuery(world, f"q{i}", 4, str(world.root / f"q{i}")) for i in range(NEIGHBOURS)]
    options = s3_options(server, proxy.endpoint)
    sick = SickDriver(RunningQuery(world, "sick", G, f"s3a://{bucket}/sick", options))
    for query in queries:
        query.batch()
    sick.wait_for_batches(1)
    owners = [query.owners() for query in queries]
    registered = [h.registrations for h in world.hosts]
    before: list[float] = []
    beside: list[float] = []
    for _ in range(PHASES):
        before += phase(world, queries)[0]
        with sick.between_batches:  # so that the first to feel it are the coordinator and all hosts that ask it
            poor = ExitStack()
            poor.enter_context(is_poor(proxy))
            seen = len(proxy.seen) + proxy.num_waiting
        with poor:
            wait_until(lambda: len(proxy.seen) + proxy.num_waiting > seen)  # noqa: B023
            took, lookups = phase(world, queries)
            beside += took
            assert len(took) > NEIGHBOURS and lookups
            assert {h["host_id"] for h in world.port.describe()["hosts"]} == {h.host.info.host_id for h in world.hosts}
        sick.wait_for_batches(2)
        if statistics.median(beside) <= SLOWER * statistics.median(before):
            break
    else:
        pytest.fail(f"A batch takes {statistics.median(beside):.3f} s, before {statistics.median(before):.3f} s")
    sick.stop()
    assert [query.owners() for query in queries] == owners
    assert [h.registrations for h in world.hosts] == registered
    assert [h.failures for h in world.hosts] == [[] for _ in world.hosts]
