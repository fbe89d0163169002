"""Restarts with another number of partitions, another backend or both: the state stays what pandas computes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from backends.formats.changelog import GROUPS_DIRECTORY, SUFFIX, read_index
from backends.storage.checkpoint_storage import CheckpointStorage
from spark_bridge import QueryableStateClient, rebalance
from spark_bridge.session.current import current_cluster
from tests.effort import only_thorough
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.streams.flow import SCHEMA, Flow, Sink, backend, kept_by, newest_manifest, progressed, start
from tests.spark_bridge.streams.other_driver import Driver

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(spark: SparkSession) -> QueryableStateClient:
    return QueryableStateClient.connect()


@pytest.fixture
def flow(make_stream: Callable[..., Stream]) -> Flow:
    return Flow(make_stream(SCHEMA), seed=11)


def layouts(stream: Stream, operator: str) -> set[int]:
    """Return the partition counts that have state, in partition files or in a host's changelog groups."""
    storage = CheckpointStorage.open(str(Path(stream.checkpoint, "statestore")))
    paths = [path.split("/") for path, _ in storage.list("operators")]
    groups = [(path, size) for path, size in storage.list(GROUPS_DIRECTORY) if path.endswith(SUFFIX)]
    grouped = [meta for path, size in groups for meta, _ in read_index(storage, path, size)]
    return {int(n) for _, name, n, *_ in paths if name == operator} | {
        meta.num_partitions for meta in grouped if meta.operator == operator
    }


def run(
    flow: Flow,
    client: QueryableStateClient,
    partitions: tuple[int, int],
    provider: str = "rocksdb",
    batches: int = 2,
) -> None:
    """Restart with these partitions and this backend: asked before its first batch, and behind the last one."""
    done = bool(flow.frames)
    sink = Sink()
    with backend(provider):
        query = start(flow.frame(*partitions), flow.stream.checkpoint, sink)
    if done:
        # No batch has run: the state is read from the old files alone. The client has asked the old run a moment ago.
        flow.check(client, query)
    flow.add(batches)
    settle(query)
    flow.check(client, query)
    assert sink.seen == list(range(flow.batch_of[-1] + 1 - batches, flow.batch_of[-1] + 1))
    assert kept_by(flow.stream.checkpoint) == {provider}
    query.stop()


def test_another_partition_count_or_backend_or_both_at_each_restart(flow: Flow, client: QueryableStateClient) -> None:
    run(flow, client, (4, 2), "rocksdb")
    run(flow, client, (1, 5), "rocksdb")
    run(flow, client, (1, 5), "file")
    run(flow, client, (3, 5), "rocksdb", batches=1)
    run(flow, client, (16, 1), "file", batches=1)
    # Layouts that users may go back to still exist.
    assert layouts(flow.stream, "per_key") == {4, 1, 3, 16}
    assert layouts(flow.stream, "per_s") == {2, 5, 1}


def remove_last(stream: Stream, batches: int) -> None:
    """As Spark lets users do: forget the last batches."""
    last = max(int(p.name) for p in Path(stream.checkpoint, "offsets").glob("[0-9]*"))
    for batch in range(last - batches + 1, last + 1):
        for directory in ("offsets", "commits"):
            for name in (str(batch), f".{batch}.crc"):
                Path(stream.checkpoint, directory, name).unlink(missing_ok=True)


@pytest.mark.thorough  # otherwise: the tests below
@pytest.mark.parametrize("removed", [1, 3], ids=["behind-the-rescaling", "before-the-rescaling"])
def test_rescaled_again_from_an_older_batch(flow: Flow, client: QueryableStateClient, removed: int) -> None:
    """The base is a version of the first layout or of the second; neither is the newest, nor has the third's count."""
    run(flow, client, (4, 2), batches=3)
    run(flow, client, (2, 3), batches=2)
    remove_last(flow.stream, removed)
    sink = Sink()
    query = start(flow.frame(5, 4), flow.stream.checkpoint, sink)
    settle(query)
    flow.merge_last(removed)  # Spark reads the files of the removed batches again, as one
    assert sink.seen == [5 - removed]
    flow.check(client, query)
    query.stop()
    run(flow, client, (3, 3))


class DiesBeforeTheCommit:
    """A sink that does something when it has the batch, and fails: Spark does not commit it."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def __call__(self, batch: DataFrame, n: int) -> None:
        batch.collect()
        self.action()
        raise RuntimeError("the sink fails")


def kill_all_state_processes() -> None:
    cluster = current_cluster()
    for pid in [int(cluster.coordinator.call("describe")["pid"]), *(int(h["pid"]) for h in cluster.describe_hosts())]:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "action", [only_thorough(lambda: None, id="stopped"), pytest.param(kill_all_state_processes, id="killed")]
)
def test_the_first_batch_of_a_rescaled_query_is_not_committed(
    flow: Flow, client: QueryableStateClient, action: Callable[[], None]
) -> None:
    """Its version is prepared in the new layout. The next run has yet another, and repeats the batch from the old
    one.
    """
    run(flow, client, (4, 2))
    flow.add()
    writer = flow.frame(3, 3).writeStream.option("checkpointLocation", flow.stream.checkpoint)
    failing = writer.foreachBatch(DiesBeforeTheCommit(action)).start()
    with pytest.raises(Exception, match="the sink fails"):
        failing.processAllAvailable()
    assert newest_manifest(flow.stream.checkpoint)["version"] == 3
    assert not Path(flow.stream.checkpoint, "commits", "2").exists()
    sink = Sink()
    query = start(flow.frame(16, 1), flow.stream.checkpoint, sink)
    settle(query)
    assert sink.seen == [2]
    flow.check(client, query)
    query.stop()
    run(flow, client, (4, 2))


# Otherwise: the test above, and test_failures.py::test_a_driver_killed_between_our_commit_and_sparks_own
@pytest.mark.thorough
def test_the_session_dies_before_the_first_batch_of_a_rescaled_query_is_committed(
    flow: Flow, client: QueryableStateClient, tmp_path: Path
) -> None:
    """The driver, its hosts and its Ray cluster die at once; another session continues."""
    run(flow, client, (4, 2))
    flow.add()
    with Driver(flow.stream, tmp_path, ray="own", partitions=(3, 3), die_in_batch=2) as driver:
        driver.wait_for_death()
    assert newest_manifest(flow.stream.checkpoint)["version"] == 3
    assert not Path(flow.stream.checkpoint, "commits", "2").exists()
    run_again = start(flow.frame(5, 1), flow.stream.checkpoint, Sink())
    settle(run_again)
    flow.check(client, run_again)
    run_again.stop()
    run(flow, client, (2, 2))


def owners(query: StreamingQuery) -> dict[str, int]:
    """How many partitions each host holds of a query."""
    return {
        h["host_id"]: sum(1 for i in h["instances"] if i["run_id"] == str(query.runId))
        for h in current_cluster().describe_hosts()
    }


def test_rebalancing_on_demand_disturbs_nothing(flow: Flow, client: QueryableStateClient) -> None:
    flow.add(6)
    sink = Sink(0.1)
    query = start(flow.frame(4, 2), flow.stream.checkpoint, sink)
    progressed(query, 0)
    for batch in (1, 2, 3):
        rebalance()
        progressed(query, batch)
    settle(query)
    flow.check(client, query)
    assert sink.seen == list(range(6))

    def is_balanced() -> bool:
        # Repeat it: a stalled machine briefly loses its hosts' leases, and with them their shares.
        rebalance()
        held = owners(query).values()
        return sum(held) == 6 and max(held) - min(held) <= 1

    wait_until(is_balanced)
