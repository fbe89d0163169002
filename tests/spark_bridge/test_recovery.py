"""Processes die at random, two drivers meet on one checkpoint, a driver is gone for good: the state stays exact."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
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
from tests.patience import PATIENCE

from .conftest import Stream, driver_environment, settle, wait_until
from .test_savepoint import SCHEMA, Flow, MapInArrow, Sink, progressed, start

pytestmark = pytest.mark.spark
PARTITIONS = (3, 2)


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
    """One kind of process after the other, in an order of the seed's own, at moments of its own."""
    killer = Killer(seed, tmp_path)
    strikes = killer.random.sample(Killer.KINDS, len(Killer.KINDS))
    flow.add(2)
    sink = Sink()
    slow = noted(tmp_path, 0.15)
    query = start(flow.frame(*PARTITIONS, before=slow, between=slow), flow.stream.checkpoint, sink)
    progressed(query, 0)
    for kind in strikes:
        before = int(query.lastProgress["batchId"])
        while flow.batch_of[-1] < before + 3:  # enough for the second in which it strikes
            flow.add()
        killer.strike(kind)
        progressed(query, before + 1)
        wait_until_all_answer()
    settle(query)
    assert sorted(set(sink.seen)) == list(range(flow.batch_of[-1] + 1))
    flow.check(client, query)
    assert failed_tasks(spark, query) <= killer.failures_allowed


def test_no_task_fails_when_state_processes_die(
    flow: Flow, client: QueryableStateClient, spark: SparkSession, tmp_path: Path
) -> None:
    """Coordinator, a host, and all of them: tasks wait and go on."""
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


# -- other drivers -----------------------------------------------------------------------------

DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
import ray
from pyspark.sql import SparkSession
from backends import StateStoreConf
from coordinator_actor.coordinator_conf import CoordinatorConf
from spark_bridge import attach, stop_spark
from spark_bridge.session.java import ensure_java
from spark_bridge.session.current import current_cluster
from tests.spark_bridge.conftest import Stream, settle
from tests.spark_bridge.test_savepoint import SCHEMA, Flow

options = json.loads(sys.argv[1])
ensure_java()
ray_options = {"namespace": options["namespace"], "log_to_driver": False, "logging_level": "WARNING"}
if options["ray"] == "own":
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, **ray_options)
else:
    ray.init(address=options["ray"], **ray_options)
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
conf = StateStoreConf(deltas_per_snapshot=2, maintenance_interval=0.5, min_versions_to_retain=3)
coordinator_conf = CoordinatorConf(**options["coordinator_conf"])
attach(spark, num_hosts=2, namespace=options["namespace"], conf=conf, coordinator_conf=coordinator_conf)

def sink(batch, n):
    batch.collect()
    if n == options["die_in_batch"]:
        os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

stream = Stream(spark, Path(options["root"]), SCHEMA)
writer = Flow(stream).frame(*options["partitions"]).writeStream.option("checkpointLocation", stream.checkpoint)
query = writer.foreachBatch(sink).start()
settle(query)
cluster = current_cluster()
ready = Path(options["ready"])
ready.with_suffix(".draft").write_text(json.dumps({"address": cluster.query_addresses()[0], "token": cluster.token}))
ready.with_suffix(".draft").rename(ready)
while not Path(options["end"]).exists():
    if query.exception() is not None:
        raise query.exception()
    time.sleep(0.05)
stop_spark()
spark.stop()
ray.shutdown()
"""


class Driver:
    """Another driver in a process of its own, which runs the query of a ``Flow`` on plain local Spark.

    ``ray`` is "own" or the "same" cluster as this process's; with ``die_in_batch`` its sink kills it, Spark included,
    when it has that batch. ``with`` ends it, and whatever it has started.
    """

    def __init__(
        self,
        stream: Stream,
        scratch: Path,
        *,
        ray: str,
        partitions: tuple[int, int] = PARTITIONS,
        die_in_batch: int = -1,
        namespace: str = "statestore",
        coordinator_conf: dict[str, float] | None = None,
    ) -> None:
        self._ready, self._end, self._log = scratch / "ready.json", scratch / "end", scratch / "driver.log"
        options = {
            "root": str(stream.root),
            "ray": "own" if ray == "own" else ray_address(),
            "partitions": partitions,
            "die_in_batch": die_in_batch,
            "namespace": namespace,
            "coordinator_conf": coordinator_conf or {},
            "ready": str(self._ready),
            "end": str(self._end),
        }
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(DRIVER), json.dumps(options)],
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env=driver_environment(scratch),
            )

    def wait_until_ready(self) -> QueryableStateClient:
        """Wait until it has processed all there is; a client of its hosts."""

        def ready() -> bool:
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            return self._ready.exists()

        wait_until(ready, timeout=2 * PATIENCE)  # Ray and Spark are to be started
        said = json.loads(self._ready.read_text())
        return QueryableStateClient.connect(address=said["address"], token=said["token"])

    def wait_for_death(self) -> None:
        """Wait until its sink has killed it."""
        assert self.process.wait(2 * PATIENCE) == -signal.SIGKILL, self._log.read_text()[-3000:]

    def end(self) -> None:
        """Have it stop its query and its session."""
        self._end.touch()
        assert self.process.wait(PATIENCE) == 0, self._log.read_text()[-3000:]

    def kill(self) -> None:
        """It is gone from one moment to the next, Spark included."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for process in started:
            if process.is_running():
                process.kill()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def ray_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def gated(gate: Path) -> MapInArrow:
    """Lets rows through while a file exists."""
    path = str(gate)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            while not os.path.exists(path):  # noqa: PTH110
                time.sleep(0.02)
            yield batch

    return run


@pytest.mark.parametrize("cluster", ["same", "own"])
def test_of_two_drivers_on_one_checkpoint_the_newer_wins(
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
        # It repeats the batch in which the older one is, and runs the next.
        client_of_newer = newer.wait_until_ready()
        flow.check(client_of_newer, older)
        gate.touch()
        with pytest.raises(Exception, match=r"."):
            older.processAllAvailable()
        message = str(older.exception())
        assert re.search(r"has been replaced by run|has been taken over", message), message
        flow.check(client_of_newer, older)
        # And goes on as if nothing had been.
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


def test_a_killed_driver_leaves_nothing_behind(flow: Flow, client: QueryableStateClient, tmp_path: Path) -> None:
    """Its hosts go with it, its leases run out, and the coordinator that nobody needs any more ends."""
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
