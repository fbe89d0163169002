"""State stays exact when real processes die, tasks are retried, or a plan runs twice or in part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from pyspark.sql import DataFrame, SparkSession

from backends.formats.manifest import Manifest, unseal
from coordinator_actor.coordinator_conf import COORDINATOR_NAME, NAMESPACE
from spark_bridge import QueryableStateClient, aggregate
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from spark_bridge.session.settings import STANDBY_REPLICAS_CONF, STATE_LOCATION_CONF
from tests.backends.storage.s3_faults import Fault, FaultProxy
from tests.effort import only_thorough
from tests.patience import HANG
from tests.spark_bridge.conftest import Stream, driver_environment, held_instances, settle, wait_until
from tests.spark_bridge.streams.running import KEYS, Totals, start_totals

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(spark: Any) -> QueryableStateClient:
    return QueryableStateClient.connect()


@pytest.fixture
def totals(stream: Stream, request: pytest.FixtureRequest) -> Totals:
    return Totals(stream, request.node.name.replace("[", ".").replace("]", ""))


def once(flag: Path, action: Callable[[], None]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for mapInArrow behind the operator that does something on the first call of one task only."""
    path = str(flag)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                action()
            yield batch

    return run


def fail() -> None:
    raise RuntimeError("this attempt fails after its state was committed")


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "action", [only_thorough(fail, id="task-retried"), pytest.param(kill_myself, id="worker-killed")]
)
def test_a_task_that_dies_after_its_commit_is_run_again(
    totals: Totals, client: QueryableStateClient, tmp_path: Path, action: Callable[[], None]
) -> None:
    totals.add(2)
    schema = "k long, n long, total double"
    query = start_totals(totals.frame().mapInArrow(once(tmp_path / "flag", action), schema), totals.stream)
    settle(query)
    assert (tmp_path / "flag").exists()
    totals.check(client)
    totals.add(2)
    settle(query)
    totals.check(client)


def test_a_worker_killed_before_its_commit(totals: Totals, client: QueryableStateClient, tmp_path: Path) -> None:
    totals.add(3)
    before = totals.stream.read().mapInArrow(once(tmp_path / "flag", kill_myself), "k long, v double")
    query = start_totals(
        aggregate(before, by="k", operator=totals.operator, n=S.count(), total=S.sum("v")), totals.stream
    )
    settle(query)
    assert (tmp_path / "flag").exists()
    totals.check(client)


def slow(seconds: float) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Holds every partition's rows back, so that a test can strike between open and commit of its tasks."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(seconds)
            yield batch

    return run


def slow_frame(totals: Totals, seconds: float = 0.4) -> DataFrame:
    """Tasks of the operator take their time, one after the other, some committed and some not at any moment."""
    df = totals.frame()
    return df.mapInArrow(slow(seconds), "k long, n long, total double")


def host_pids() -> list[int]:
    return [int(h["pid"]) for h in current_cluster().describe_hosts()]


def coordinator_pid() -> int:
    return int(current_cluster().coordinator.call("describe")["pid"])


VICTIMS: dict[str, Callable[[], list[int]]] = {
    "a host": lambda: host_pids()[:1],
    "the coordinator": lambda: [coordinator_pid()],
    "the coordinator and all hosts": lambda: [*host_pids(), coordinator_pid()],
}
MOMENTS = (0.15, 0.55, 0.9)


@pytest.mark.thorough  # otherwise: test_recovery.py::test_no_task_fails_when_state_processes_die
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_state_processes_killed_mid_batch(totals: Totals, client: QueryableStateClient, turn: int) -> None:
    """At different moments of a batch; in all turns together, everybody at each of them."""
    totals.add()
    query = start_totals(slow_frame(totals), totals.stream)
    query.processAllAvailable()

    def next_batch_begins() -> bool:
        """A batch has ended just now, and there is another."""
        done = query.lastProgress["batchId"]
        while totals.stream.files < done + 4:
            totals.add()
        wait_until(lambda: query.lastProgress["batchId"] > done or query.exception())
        return query.lastProgress["batchId"] + 1 < totals.stream.files

    for victims, moment in zip(VICTIMS.values(), (*MOMENTS[turn:], *MOMENTS[:turn]), strict=True):
        wait_until(next_batch_begins)
        time.sleep(moment)
        for pid in victims():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(current_cluster().addresses()) == len(current_cluster().hosts))
    settle(query)
    totals.check(client)
    query.stop()


def test_coordinator_and_hosts_killed_between_batches(totals: Totals, client: QueryableStateClient) -> None:
    """After Spark's ``commits/N`` and before the next batch: storage alone must say that N + 1 is completed."""
    totals.add(2)
    query = start_totals(totals.frame(), totals.stream)
    query.processAllAvailable()
    for pid in [coordinator_pid(), *host_pids()]:
        os.kill(pid, signal.SIGKILL)
    totals.add(2)
    settle(query)
    totals.check(client)


def test_hosts_send_the_messages_of_a_batch_without_ray_also_to_the_next_coordinator(
    totals: Totals, client: QueryableStateClient
) -> None:
    def direct() -> dict[str, Any]:
        described: dict[str, Any] = current_cluster().coordinator.call("describe")["direct"]
        return described

    def is_found() -> bool:
        """Run a batch, and return whether hosts have found the coordinator: an idle one sends heartbeats by Ray."""
        totals.add(1)
        settle(query)
        return bool(direct()["messages"])

    query = start_totals(totals.frame(), totals.stream)
    addresses = set()
    for _ in range(2):
        wait_until(is_found)
        before = direct()
        totals.add(2)
        settle(query)
        totals.check(client)
        for message in ("open_batch", "acknowledge_many"):
            assert direct()["messages"][message] >= before["messages"].get(message, 0) + 2, message  # of two batches
        addresses.add(before["address"])
        os.kill(coordinator_pid(), signal.SIGKILL)
    wait_until(is_found)
    assert len({*addresses, direct()["address"]}) == 3


def test_other_queries_go_on_when_a_storage_refuses_a_restarted_coordinator(
    make_stream: Callable[..., Stream], client: QueryableStateClient, spark: SparkSession, s3: FaultProxy
) -> None:
    """The new coordinator cannot take up one of two queries. Copies of both are on both hosts."""
    refused, well = (Totals(make_stream(), name) for name in ("refused", "well"))
    queries = []
    spark.conf.set(STANDBY_REPLICAS_CONF, "1")
    try:
        for totals in (refused, well):
            totals.add(2)
            queries.append(start_totals(totals.frame(2), totals.stream))
            settle(queries[-1])
            spark.conf.unset(STATE_LOCATION_CONF)  # the second query keeps its state in its checkpoint
    finally:
        spark.conf.unset(STANDBY_REPLICAS_CONF)
    of_refused, of_well = queries
    s3.plan.append(Fault("answer", status=403, times=10**9))
    answered = len(s3.seen)
    before = coordinator_pid()
    ray.kill(ray.get_actor(COORDINATOR_NAME, namespace=NAMESPACE), no_restart=False)
    wait_until(lambda: coordinator_pid() != before and len(s3.seen) > answered)

    for _ in range(2):
        well.add()
        settle(of_well)  # all copies have the version
        well.check(client)
    assert of_well.exception() is None and of_refused.exception() is None
    s3.plan.clear()
    refused.add()
    settle(of_refused)
    refused.check(client)
    well.check(client)


def run_driver(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run another driver in a separate process, on plain local Spark with its own Ray."""
    with tempfile.TemporaryDirectory() as scratch:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *args],
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
            env=driver_environment(scratch),
        )


DRIVER = """
import os, signal, sys, threading, time
from pathlib import Path
import ray
from pyspark.sql import SparkSession
from spark_bridge import aggregate, attach, functions as S
from spark_bridge.session.ray_cluster import ensure_java

root, kill_at = Path(sys.argv[1]), int(sys.argv[2])
ensure_java()
ray.init(address="local", num_cpus=2, namespace="statestore", log_to_driver=False, include_dashboard=False,
         object_store_memory=100 << 20)
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
attach(spark, num_hosts=2)
df = spark.readStream.schema("k long, v double").option("maxFilesPerTrigger", 1).option("maxFileAge", "36500d")
totals = aggregate(df.parquet(str(root / "in")), by="k", operator="t", num_partitions=3, n=S.count(), total=S.sum("v"))

def strike():
    # Between our manifest of version kill_at + 1 and Spark's commits/<kill_at>: the sink is still at work.
    want = f'"version":{kill_at + 1},'
    while not any(want in p.read_text() for p in (root / "checkpoint/statestore/manifests").glob("*.json")):
        time.sleep(0.005)
    assert not (root / f"checkpoint/commits/{kill_at}").exists()
    os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=strike, daemon=True).start()

def sink(batch, n):
    batch.collect()
    time.sleep(300 if n == kill_at else 0)

query = totals.writeStream.option("checkpointLocation", str(root / "checkpoint")).foreachBatch(sink).start()
query.processAllAvailable()
"""


@pytest.mark.spark42_only
def test_a_driver_killed_between_our_commit_and_sparks_own(stream: Stream, client: QueryableStateClient) -> None:
    totals = Totals(stream, "t")
    totals.add(3)
    killed = run_driver(DRIVER, str(stream.root), "1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert not Path(stream.checkpoint, "commits", "1").exists()
    again = start_totals(totals.frame(3), stream)
    settle(again)
    totals.check(client)


def test_foreach_batch_that_runs_the_plan_twice(totals: Totals, client: QueryableStateClient) -> None:
    totals.add(3)
    seen: list[tuple[int, ...]] = []

    def sink(batch: DataFrame, n: int) -> None:
        seen.append((n, batch.count(), len(batch.collect())))

    query = totals.frame().writeStream.option("checkpointLocation", totals.stream.checkpoint).foreachBatch(sink).start()
    settle(query)
    assert seen == [(n, KEYS, KEYS) for n in range(3)]
    totals.check(client)
    manifests = Path(totals.stream.checkpoint, "statestore/manifests").glob("*.json")
    versions = Counter(unseal(path.read_bytes(), Manifest, path.name).version for path in manifests)
    assert versions == {1: 2, 2: 2, 3: 2}, "one for the plan, and one for the plan that runs again"


def test_foreach_batch_that_looks_at_one_row_first(totals: Totals, client: QueryableStateClient) -> None:
    totals.add(3)

    def sink(batch: DataFrame, n: int) -> None:
        batch.head(1)
        batch.collect()

    query = totals.frame().writeStream.option("checkpointLocation", totals.stream.checkpoint).foreachBatch(sink).start()
    settle(query)
    totals.check(client)


@pytest.mark.parametrize("consumed", ["nothing", only_thorough("part")])
def test_foreach_batch_that_runs_part_of_the_plan_fails_and_can_be_repaired(
    totals: Totals, client: QueryableStateClient, consumed: str
) -> None:
    """Spark commits the batch nevertheless. The next batch must not continue from state that lacks partitions."""
    totals.add(2)
    frame = totals.frame().writeStream.option("checkpointLocation", totals.stream.checkpoint)

    def sink(batch: DataFrame, n: int) -> None:
        if consumed == "part":
            batch.head(1)
        elif n:
            batch.collect()

    query = frame.foreachBatch(sink).start()
    with pytest.raises(Exception, match=r"(?s)foreachBatch.*commits/0"):
        query.processAllAvailable()
    again = start_totals(totals.frame(), totals.stream)
    with pytest.raises(Exception, match=r"(?s)foreachBatch.*commits/0"):
        again.processAllAvailable()
    for name in ("commits/0", "commits/.0.crc", "offsets/1", "offsets/.1.crc"):
        Path(totals.stream.checkpoint, name).unlink(missing_ok=True)
    repaired = start_totals(totals.frame(), totals.stream)
    settle(repaired)
    totals.check(client)


def test_coalesce_after_the_operator_is_a_clear_error_and_loses_no_state(
    totals: Totals, client: QueryableStateClient
) -> None:
    totals.add(2)
    query = start_totals(totals.frame().coalesce(2), totals.stream)
    with pytest.raises(Exception, match=r"(?s)repartition"):
        query.processAllAvailable()
    good = start_totals(totals.frame().repartition(2), totals.stream)
    settle(good)
    totals.check(client)


@pytest.mark.thorough  # otherwise: the test above
def test_union_after_the_operator_is_a_clear_error_and_loses_no_state(
    totals: Totals, make_stream: Callable[..., Stream], client: QueryableStateClient
) -> None:
    totals.add(2)
    other = make_stream("k long, n long, total double")
    other.add([(1, 1, 1.0)])
    query = start_totals(other.read().union(totals.frame()), totals.stream)
    with pytest.raises(Exception, match=r"(?s)repartition"):
        query.processAllAvailable()


def test_killed_processes_leave_the_cluster_in_order(spark: Any) -> None:
    """After all the killing above: the same two hosts, one coordinator, and only the last runs of queries are read."""
    cluster = current_cluster()

    def is_in_order() -> bool:
        queries, held = cluster.coordinator.call("describe")["queries"], held_instances()
        last_runs = {q["run_id"] for q in queries}
        has_ended = all(q["ended_at"] is not None and q["retired_by"] is None for q in queries)
        return has_ended and held is not None and {i["run_id"] for i in held} <= last_runs

    # Within less than the lease of a run, which would end it too.
    wait_until(is_in_order, timeout=50)
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "statestore"]
    assert sorted(n for n in names if n.startswith("StateStore")) == sorted(
        [
            "StateStoreCoordinator",
            *(f"StateStoreHost-{cluster.session_id}-{i}" for i in range(len(cluster.hosts))),
        ]
    )
