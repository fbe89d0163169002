"""State stays exact when processes die at random, two drivers share a checkpoint, or a driver is lost."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from spark_bridge import QueryableStateClient
from spark_bridge.session.current import current_cluster
from tests.effort import effort, only_thorough
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.streams.flow import SCHEMA, Flow, MapInArrow, Sink, progressed, start
from tests.spark_bridge.streams.other_driver import PARTITIONS, Driver

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only]


@pytest.fixture(scope="module")
def client(spark: SparkSession) -> QueryableStateClient:
    return QueryableStateClient.connect()


@pytest.fixture
def flow(make_stream: Callable[..., Stream]) -> Flow:
    return Flow(make_stream(SCHEMA), seed=21)


# -- kills at random ---------------------------------------------------------------------------


def noted(directory: Path, pause: float) -> MapInArrow:
    """Leaves the process id of each PySpark worker that runs the query below ``pids``, and takes its time."""
    notes = directory / "pids"
    notes.mkdir()
    path = str(notes)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        with open(os.path.join(path, str(os.getpid())), "w"):  # noqa: PTH118, PTH123
            pass
        for batch in batches:
            yield batch
            time.sleep(pause)

    return run


def coordinator_pid() -> int:
    return int(current_cluster().coordinator.call("describe")["pid"])


def host_pids() -> list[int]:
    return [int(h["pid"]) for h in current_cluster().describe_hosts()]


def wait_until_all_answer() -> None:
    """No host is being restarted any more."""
    wait_until(lambda: len(current_cluster().addresses()) == len(current_cluster().hosts))


def worker_pids(directory: Path) -> list[int]:
    """The PySpark workers that have left a note and live."""
    return [int(p.name) for p in sorted((directory / "pids").iterdir()) if is_worker(int(p.name))]


def is_worker(pid: int) -> bool:
    try:
        return "pyspark.daemon" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def executor_pids(directory: Path) -> list[int]:
    """The executors, each a Java process that its PySpark workers descend from."""
    ancestors = (p for pid in worker_pids(directory) for p in psutil.Process(pid).parents())
    return sorted({p.pid for p in ancestors if p.name() == "java"})


def failed_tasks(spark: SparkSession, query: StreamingQuery) -> int:
    """Task attempts of a query that failed, as Spark counts them."""
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    stages: set[int] = set()
    for job in tracker.getJobIdsForGroup(str(query.runId)):
        info = tracker.getJobInfo(job)
        stages.update(info.get().stageIds() if info.isDefined() else [])
    infos = [tracker.getStageInfo(stage) for stage in stages]
    return sum(int(info.get().numFailedTasks()) for info in infos if info.isDefined())


class Killer:
    """Kills processes of the running query, chosen and timed by a seed."""

    KINDS = ("coordinator", "host", "hosts", "workers", "executor", "everything")

    def __init__(self, seed: int, notes: Path) -> None:
        self.random = random.Random(seed)
        self.notes = notes
        self.failures_allowed = 0

    def strike(self, kind: str) -> None:
        """Kill one kind of process at some moment of the next second."""
        time.sleep(self.random.random())
        doomed: list[int] = []
        if kind in ("workers", "everything"):
            workers = worker_pids(self.notes)
            self.failures_allowed += len(workers)  # each runs one task, or none
            doomed += workers
        if kind == "executor":
            doomed.append(self.random.choice(executor_pids(self.notes)))
            self.failures_allowed += sum(PARTITIONS)  # it runs one task, and has the output of others
        if kind in ("hosts", "state processes", "everything"):
            doomed += host_pids()
        if kind == "host":
            doomed.append(self.random.choice(host_pids()))
        if kind in ("coordinator", "state processes", "everything"):
            doomed.append(coordinator_pid())
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # Spark ends idle workers by itself


@pytest.mark.parametrize("seed", [4])
def test_kills_at_random_change_nothing(
    flow: Flow, client: QueryableStateClient, spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """Kill one kind of process after the other; the seed determines the order and the moments."""
    killer = Killer(seed, tmp_path)
    kinds = effort(("executor", "everything"), Killer.KINDS)  # the others die in the next test too
    strikes = killer.random.sample(kinds, len(kinds))
    flow.add(2)
    sink = Sink()
    slow = noted(tmp_path, 0.15)
    query = start(flow.frame(*PARTITIONS, before=slow, between=slow), flow.stream.checkpoint, sink)
    progressed(query, 0)
    for kind in strikes:
        before = int(query.lastProgress["batchId"])
        while flow.batch_of[-1] < before + 3:  # enough for the second of the kill
            flow.add()
        killer.strike(kind)
        progressed(query, before + 1)
        wait_until_all_answer()
    settle(query)
    assert sorted(set(sink.seen)) == list(range(flow.batch_of[-1] + 1))
    flow.check(client, query)
    assert failed_tasks(spark, query) <= killer.failures_allowed


@pytest.mark.matrix
def test_no_task_fails_when_state_processes_die(
    flow: Flow, client: QueryableStateClient, spark: SparkSession, tmp_path: Path
) -> None:
    """Kill the coordinator, a host, and then all of them: tasks wait and continue."""
    killer = Killer(7, tmp_path)
    flow.add(6)
    slow = noted(tmp_path, 0.15)
    query = start(flow.frame(*PARTITIONS, before=slow, between=slow), flow.stream.checkpoint, Sink())
    for batch, kind in enumerate(("coordinator", "host", "state processes")):
        progressed(query, batch)
        wait_until_all_answer()
        killer.strike(kind)
    settle(query)
    flow.check(client, query)
    assert failed_tasks(spark, query) == 0


def test_local_files_that_a_cleaner_removes_cost_no_key(flow: Flow, client: QueryableStateClient) -> None:
    """Hosts notice, at the latest in the next snapshot, and load their partitions again."""
    flow.add(3)
    first = start(flow.frame(*PARTITIONS), flow.stream.checkpoint, Sink())
    settle(first)
    first.stop()
    query = start(flow.frame(*PARTITIONS), flow.stream.checkpoint, Sink())
    flow.add()
    settle(query)
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    engines = list(session.glob(f"statestore/*/*/data/*/{query.id}/**/engine"))
    assert len(engines) == sum(PARTITIONS)
    for engine in engines:
        shutil.rmtree(engine)
    snapshots = snapshots_of(flow)
    while snapshots_of(flow) < snapshots + sum(PARTITIONS):
        flow.add()
        settle(query)
    flow.check(client, query)
    query.stop()
    for pid in host_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until_all_answer()
    again = start(flow.frame(*PARTITIONS), flow.stream.checkpoint, Sink())
    flow.add()
    settle(again)
    flow.check(client, again)


def snapshots_of(flow: Flow) -> int:
    """Return the number of snapshots that the last manifests name, one for each partition and version."""
    manifests = Path(flow.stream.checkpoint, "statestore", "manifests").glob("*.json")
    return len({name for path in manifests for name in re.findall(r'"([^"]*\.snapshot)"', path.read_text())})


# -- other drivers -----------------------------------------------------------------------------


def gated(gate: Path) -> MapInArrow:
    """Lets rows through while a file exists."""
    path = str(gate)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            while not os.path.exists(path):  # noqa: PTH110
                time.sleep(0.02)
            yield batch

    return run


@pytest.mark.parametrize("cluster", map(only_thorough, ("same", "own")))
def test_newer_of_two_drivers_on_one_checkpoint_wins(
    flow: Flow, client: QueryableStateClient, tmp_path: Path, cluster: str
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    flow.add(2)
    older = start(flow.frame(*PARTITIONS, before=gated(gate)), flow.stream.checkpoint, Sink())
    settle(older)
    gate.unlink()
    flow.add(2)
    wait_until(lambda: Path(flow.stream.checkpoint, "offsets", "2").exists())
    with Driver(flow.stream, tmp_path, ray=cluster) as newer:
        # It repeats the older driver's current batch, and runs the next.
        client_of_newer = newer.wait_until_ready()
        flow.check(client_of_newer, older)
        gate.touch()
        with pytest.raises(Exception, match=r"."):
            older.processAllAvailable()
        message = str(older.exception())
        assert re.search(r"has been replaced by run|has been taken over", message), message
        flow.check(client_of_newer, older)
        # It continues normally.
        flow.add()
        wait_until(lambda: Path(flow.stream.checkpoint, "commits", "4").exists())
        wait_until(
            lambda: client_of_newer.get_many("per_s", ["a"], query=str(older.id))["rows"][0].as_py() == rows_of_a(flow)
        )
        flow.check(client_of_newer, older)
        client_of_newer.close()
        newer.end()
    flow.add()
    again = start(flow.frame(5, 2), flow.stream.checkpoint, Sink())
    settle(again)
    flow.check(client, again)


def rows_of_a(flow: Flow) -> int:
    return int(flow.expected()["per_s"].loc["a", "rows"])


def actors_of(namespace: str) -> list[str]:
    return sorted(a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == namespace)


@pytest.mark.thorough  # otherwise: host/test_small_disk.py
def test_a_stream_goes_on_with_local_disks_that_are_smaller_than_its_state(
    flow: Flow, client: QueryableStateClient, tmp_path: Path
) -> None:
    """Partitions are evicted and loaded again, again and again, and no number changes."""
    namespace = "small-disks"
    flow.add(2)
    small = {"local_disk_bytes": 1 << 20}
    with Driver(flow.stream, tmp_path, ray="same", namespace=namespace, partitions=(64, 32), conf=small) as driver:
        client_of_driver = driver.wait_until_ready()
        query = client_of_driver.operators()[0]["query_id"]

        def evictions() -> list[int]:
            hosts = [ray.get_actor(name, namespace=namespace) for name in actors_of(namespace) if "Host" in name]
            return [host["disk"]["evictions"] for host in ray.get([host.describe.remote() for host in hosts])]

        for batch in range(2, 5):
            before = evictions()
            flow.add()
            wait_until(lambda batch=batch: Path(flow.stream.checkpoint, "commits", str(batch)).exists())
            flow.check(client_of_driver, query)
            assert len(before) == 2 and all(now > then for now, then in zip(evictions(), before, strict=True))
        client_of_driver.close()
        driver.end()
    again = start(flow.frame(3, 2), flow.stream.checkpoint, Sink())
    settle(again)
    flow.check(client, again)


@pytest.mark.thorough  # otherwise: leases and idleness in coordinator_actor/test_coordinator.py, test_demo.py
def test_a_killed_driver_leaves_nothing_behind(flow: Flow, client: QueryableStateClient, tmp_path: Path) -> None:
    """Its hosts end with it, its leases expire, and the unused coordinator ends."""
    namespace = "left-behind"
    leases = {"host_timeout": 2.0, "driver_timeout": 3.0, "idle_timeout": 20.0}
    flow.add(2)
    with Driver(flow.stream, tmp_path, ray="same", namespace=namespace, coordinator_conf=leases) as driver:
        driver.wait_until_ready().close()
        actors = [ray.get_actor(name, namespace=namespace) for name in actors_of(namespace)]
        described = [ray.get(actor.describe.remote()) for actor in actors]
        (coordinator,) = (a for a, d in zip(actors, described, strict=True) if "queries" in d)

        def leases_of() -> tuple[int, int]:
            now = ray.get(coordinator.describe.remote())
            return len(now["hosts"]), len(now["queries"])

        assert len(actors) == 3
        # A machine that stands still for longer than a lease loses them for a moment.
        wait_until(lambda: leases_of() == (2, 1))
        driver.kill()

    def no_leases() -> bool:
        try:
            return leases_of() == (0, 0)
        except ray.exceptions.RayActorError:  # not even the coordinator is there any more
            return True

    wait_until(no_leases, timeout=50)  # the leases that there would be without its conf are longer
    flow.add()
    query = start(flow.frame(*PARTITIONS), flow.stream.checkpoint, Sink())
    settle(query)
    flow.check(client, query)
    wait_until(lambda: not actors_of(namespace))
    wait_until(lambda: not any(psutil.pid_exists(d["pid"]) for d in described))
