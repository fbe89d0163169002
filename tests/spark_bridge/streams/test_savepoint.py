"""Savepoints of running queries: taken, opened with other tools, restored elsewhere, refused, deleted.

``Flow`` is a query of two operators, one behind the other, whose state pandas can compute from the same rows: the first
one by a key of two columns, the second one counts what the first emits, so that it sees each row of each batch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.dataset as ds
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from coordinator_actor.savepoints.savepoint_format import SavepointInfo, SavepointMetadata
from spark_bridge import (
    QueryableStateClient,
    aggregate,
    delete_savepoint,
    describe_savepoint,
    list_savepoints,
    restore_savepoint,
    trigger_savepoint,
)
from spark_bridge import functions as S
from spark_bridge.session.current import current_cluster
from tests.effort import effort, only_thorough
from tests.patience import HANG, PATIENCE
from tests.spark_bridge.conftest import Stream, remove_checkpoint, settle, wait_until
from tests.spark_bridge.streams.flow import NULL, SCHEMA, Flow, Sink, backend, kept_by, progressed, same_state, start

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.slow]


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """A Spark setting, for as long as the block runs."""
    before = spark.conf.get(name, None)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, before)


def described(savepoint: str) -> SavepointMetadata:
    """Return the description that the savepoint has of itself."""
    info: SavepointInfo = describe_savepoint(savepoint)
    assert info.metadata is not None
    return info.metadata


def parquet_files(savepoint: str, operator: str) -> list[str]:
    return sorted(str(p) for p in Path(savepoint, "operators", operator, "default").glob("*.parquet"))


def with_outputs(operator: str, stored: pd.DataFrame) -> pd.DataFrame:
    """A savepoint's table as the state it stands for: key columns as index, output columns."""
    stored = stored.assign(s=stored["s"].fillna(NULL))
    if operator == "per_key":
        columns = {"n": "n.count.count", "total": "total.sum.sum", "top": "top.max.value"}
        return pd.DataFrame(
            {"k": stored["k"], "s": stored["s"], **{n: stored[c] for n, c in columns.items()}}
        ).set_index(["k", "s"])
    mean = stored["mean.mean.sum"] / stored["mean.mean.count"]
    return pd.DataFrame(
        {"s": stored["s"], "rows": stored["rows.count.count"], "best": stored["best.max.value"], "mean": mean}
    ).set_index("s")


def read_with_pandas(savepoint: str, operator: str) -> pd.DataFrame:
    files = parquet_files(savepoint, operator)
    return with_outputs(operator, pd.concat([pd.read_parquet(f) for f in files], ignore_index=True))


def read_with_a_query_engine(savepoint: str, operator: str) -> pd.DataFrame:
    """With DuckDB where it is installed, else as one Arrow dataset."""
    files = parquet_files(savepoint, operator)
    if importlib.util.find_spec("duckdb") is not None:
        duckdb: Any = importlib.import_module("duckdb")
        return with_outputs(operator, duckdb.sql("SELECT * FROM read_parquet(?)", params=[files]).df())
    return with_outputs(operator, ds.dataset(files, format="parquet").to_table().to_pandas())


def check_savepoint(flow: Flow, savepoint: str) -> int:
    """Its files hold what pandas computes from the rows up to the savepoint's batch, which is returned."""
    batch = described(savepoint).batch_id
    for operator, wanted in flow.expected(batch).items():
        same_state(read_with_pandas(savepoint, operator), wanted)
        same_state(read_with_a_query_engine(savepoint, operator), wanted)
    return batch


@pytest.fixture(scope="module")
def client(spark: SparkSession) -> QueryableStateClient:
    return QueryableStateClient.connect()


@pytest.fixture
def flow(make_stream: Callable[..., Stream]) -> Flow:
    return Flow(make_stream(SCHEMA))


def test_a_savepoint_while_batches_go_on(flow: Flow, client: QueryableStateClient, tmp_path: Path) -> None:
    flow.add(7)
    sink = Sink(0.1)
    query = start(flow.frame(), flow.stream.checkpoint, sink, name="flow")
    progressed(query, 1)
    first = trigger_savepoint(query, str(tmp_path / "sp"))
    second = trigger_savepoint("flow", str(tmp_path / "sp"))
    paths = [first.result(PATIENCE), second.result(PATIENCE)]
    settle(query)
    third = trigger_savepoint(str(query.id), str(tmp_path / "sp")).result(PATIENCE)
    assert sink.seen == list(range(7))
    flow.check(client, query)

    saved = [check_savepoint(flow, path) for path in [*paths, third]]
    assert saved[0] >= 1
    assert saved[2] == 6
    made = [described(path) for path in [*paths, third]]
    ids = [d.checkpoint_id for d in made]
    # The first two were asked for at once, so either may have come first.
    assert len(set(ids)) == 3
    assert ids[2] == max(ids)
    assert [batch for _, batch in sorted(zip(ids, saved, strict=True))] == sorted(saved)
    assert [Path(path).name for path in [*paths, third]] == [f"savepoint-{str(query.id)[:8]}-{i}" for i in ids]
    assert all(d.query_id == str(query.id) for d in made)
    assert {str(Path(s.path)) for s in list_savepoints(str(tmp_path / "sp"))} == {*paths, third}
    query.stop()

    # And the way back, with other partition counts and the other backend.
    restored = restore_savepoint(paths[0], str(tmp_path / "ck"), num_partitions=4, backend="file")
    assert (restored.batch_id, restored.version) == (saved[0], saved[0] + 1)
    assert restored.query_id != str(query.id)
    go_on_from(flow, client, str(tmp_path / "ck"), saved[0], 4, 4, "file")


def go_on_from(
    flow: Flow, client: QueryableStateClient, checkpoint: str, batch: int, n: int, m: int, provider: str
) -> int:
    """Start the query at a restored location; it must continue after the savepoint's batch, and end exact.

    Returns the number of additional files in Spark's first batch, which otherwise has a single file. Spark had listed
    them in ``sources`` when the savepoint was made, but not yet in a committed batch.
    """
    sink = Sink()
    with backend(provider):
        query = start(flow.frame(n, m), checkpoint, sink)
    settle(query)
    ahead = flow.batch_of[-1] - batch - len(sink.seen)
    assert ahead >= 0
    assert sink.seen == list(range(batch + 1, batch + 1 + len(sink.seen)))
    assert kept_by(checkpoint) == {provider}
    flow.with_merged(batch + 1, ahead).check(client, query)
    query.stop()
    return ahead


@dataclass
class Saved:
    """A savepoint whose query has continued, and whose checkpoint no longer exists."""

    flow: Flow
    path: str
    batch: int


@pytest.fixture(scope="module")
def saved(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Taken behind batch 3; three batches later, with as few kept as can be, the checkpoint is removed."""
    root = tmp_path_factory.mktemp("saved")
    (root / "in").mkdir()
    flow = Flow(Stream(spark, root, SCHEMA), seed=2)
    flow.add(4)
    with setting(spark, "spark.sql.streaming.minBatchesToRetain", "1"):
        query = start(flow.frame(4, 2), flow.stream.checkpoint, Sink())
        settle(query)
        path = trigger_savepoint(query, str(root / "savepoints")).result(PATIENCE)
        flow.add(3)
        settle(query)
        query.stop()
    remove_checkpoint(flow.stream.checkpoint)
    return Saved(flow, path, 3)


def test_a_savepoint_outlives_its_checkpoint(saved: Saved) -> None:
    assert check_savepoint(saved.flow, saved.path) == saved.batch


@pytest.mark.parametrize(("n", "provider"), [(1, "file"), only_thorough(16, "rocksdb")])
def test_restored_to_other_partitions_and_the_other_backend(
    saved: Saved, client: QueryableStateClient, tmp_path: Path, n: int, provider: str
) -> None:
    checkpoint = str(tmp_path / "ck")
    restore_savepoint(saved.path, checkpoint, num_partitions=n, backend=provider)
    assert go_on_from(saved.flow, client, checkpoint, saved.batch, n, n, provider) == 0


def test_restored_as_it_was_and_restarted_twice(saved: Saved, client: QueryableStateClient, tmp_path: Path) -> None:
    """Nothing more than the path is said; the second start finds a checkpoint like any other."""
    checkpoint = str(tmp_path / "ck")
    restore_savepoint(saved.path, checkpoint)
    assert go_on_from(saved.flow, client, checkpoint, saved.batch, 4, 2, "rocksdb") == 0
    assert go_on_from(saved.flow, client, checkpoint, saved.flow.batch_of[-1], 4, 2, "rocksdb") == 0


def test_a_location_that_is_in_use_is_not_restored_into(saved: Saved, tmp_path: Path) -> None:
    checkpoint = tmp_path / "ck"
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "offsets" / "0").write_text("v1")
    with pytest.raises(Exception, match=r"there is offsets already"):
        restore_savepoint(saved.path, str(checkpoint))
    assert [p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()] == ["offsets/0"]


def other_program(flow: Flow, change: str) -> DataFrame:
    """The same query, but for one thing."""
    rows, total, second = flow.stream.read(), S.sum("v"), "per_s"
    if change == "key type":
        rows = rows.withColumn("k", F.col("k").cast("string"))
    elif change == "aggregate":
        total = S.max("v")
    elif change == "operator":
        second = "renamed"
    per_key = aggregate(
        rows, by=["k", "s"], operator="per_key", num_partitions=4, n=S.count(), total=total, top=S.max("v")
    )
    if change == "fewer operators":
        return per_key
    return aggregate(
        per_key, by="s", operator=second, num_partitions=2, rows=S.count(), best=S.max("total"), mean=S.mean("n")
    )


OTHER_PROGRAMS = {
    "key type": ["per_key", "k long", "k string"],
    "aggregate": ["per_key", "total.sum", "total.max"],
    "operator": ["per_s", "renamed"],
    "fewer operators": ["per_s"],
}


def test_another_program_is_refused_with_the_differences(saved: Saved, tmp_path: Path) -> None:
    """Each in turn, at the same location: nothing is changed there."""
    checkpoint = str(tmp_path / "ck")
    restore_savepoint(saved.path, checkpoint)
    before = sorted(p for p in tmp_path.rglob("*") if "statestore" in p.parts)
    # Another key or aggregate is refused in the same way by a checkpoint of one operator; see test_wrong_use.py.
    for change in effort(["operator", "fewer operators"], list(OTHER_PROGRAMS)):
        words = OTHER_PROGRAMS[change]
        query = start(other_program(saved.flow, change), checkpoint, Sink())
        with pytest.raises(Exception, match=r"."):
            query.processAllAvailable()
        message = str(query.exception())
        for word in words:
            assert word in message, message
        assert sorted(p for p in tmp_path.rglob("*") if "statestore" in p.parts) == before


def test_savepoint_is_restored_into_a_program_with_fewer_operators(
    saved: Saved, client: QueryableStateClient, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "ck"
    with pytest.raises(Exception, match="nobody"):
        restore_savepoint(saved.path, str(checkpoint), operators=["per_key", "per_s", "nobody"])
    assert not checkpoint.exists()
    restored = restore_savepoint(saved.path, str(checkpoint), operators=["per_key"])
    assert [o.name for o in restored.operators] == ["per_key"]
    sink = Sink()
    query = start(other_program(saved.flow, "fewer operators"), str(checkpoint), sink)
    settle(query)
    assert sink.seen == [4, 5, 6]
    saved.flow.check(client, query, ["per_key"])


def test_the_state_alone_starts_a_new_query(
    saved: Saved, make_stream: Callable[..., Stream], client: QueryableStateClient, tmp_path: Path
) -> None:
    fresh = Flow(make_stream(SCHEMA), seed=3)
    fresh.add(2)
    restore_savepoint(saved.path, fresh.stream.checkpoint, num_partitions=5, state_only=True)
    sink = Sink()
    query = start(fresh.frame(5, 5), fresh.stream.checkpoint, sink)
    settle(query)
    assert sink.seen == [0, 1]
    # For the state it is as if the new rows had come behind those of the savepoint.
    both = Flow(fresh.stream)
    both.frames = [*saved.flow.frames[: saved.batch + 1], *fresh.frames]
    both.batch_of = list(range(len(both.frames)))
    both.check(client, query)


def test_stopping_with_a_savepoint_lets_no_sink_see_a_later_batch(
    flow: Flow, client: QueryableStateClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The query is stopped only that late: time enough for batches that nothing holds.
    monkeypatch.setattr("spark_bridge.session.savepoints.SAVEPOINT_POLL_SECONDS", 4.0)
    flow.add(2)
    sink = Sink(0.15)
    query = start(flow.frame(), flow.stream.checkpoint, sink)
    progressed(query, 1)
    with ThreadPoolExecutor(1) as another_thread:
        triggered = another_thread.submit(trigger_savepoint, query, str(tmp_path / "sp"), stop=True)

        def is_made_of_a_stream_that_goes_on() -> bool:
            while flow.batch_of[-1] < len(sink.seen) + 3:
                flow.add()
            return triggered.done() and triggered.result().done()

        wait_until(is_made_of_a_stream_that_goes_on)
    path = triggered.result().result()
    assert not query.isActive
    # Spark cancels the held batch's job before it interrupts its thread: a sink in Python may see that first, and
    # raise.
    error = query.exception()
    assert error is None or f"cancelled part of cancelled job group {query.runId}" in str(error), error
    batch = check_savepoint(flow, path)
    time.sleep(0.5)
    assert sink.seen == list(range(batch + 1))
    assert batch < flow.batch_of[-1], "the stream was over before the savepoint: nothing was stopped"
    # Both the restored query and the checkpoint itself continue after the savepoint.
    restore_savepoint(path, str(tmp_path / "ck"))
    go_on_from(flow, client, str(tmp_path / "ck"), batch, 3, 2, "rocksdb")
    assert go_on_from(flow, client, flow.stream.checkpoint, batch, 3, 2, "rocksdb") == 0


def test_a_savepoint_of_a_query_that_does_not_run(flow: Flow, tmp_path: Path) -> None:
    """Whether that is said at once or by the future."""
    with pytest.raises(Exception, match="nobody"):
        trigger_savepoint("nobody", str(tmp_path / "sp")).result(PATIENCE)
    flow.add()
    query = start(flow.frame(2, 1), flow.stream.checkpoint, Sink())
    settle(query)
    query.stop()
    with pytest.raises(Exception, match=f"{query.id}|{query.runId}"):
        trigger_savepoint(query, str(tmp_path / "sp")).result(PATIENCE)
    assert not list((tmp_path / "sp").rglob("*.parquet"))


def test_deleting_a_savepoint_removes_it_and_nothing_else(saved: Saved, tmp_path: Path) -> None:
    base = tmp_path / "sp"
    copies = [base / Path(saved.path).name, base / "savepoint-another-9"]
    for copy in copies:
        shutil.copytree(saved.path, copy)
    (base / "notes.txt").write_text("mine")
    assert len(list_savepoints(str(base))) == 2
    delete_savepoint(str(copies[0]))
    assert not copies[0].exists()
    assert [str(Path(s.path)) for s in list_savepoints(str(base))] == [str(copies[1])]
    assert check_savepoint(saved.flow, str(copies[1])) == saved.batch
    with pytest.raises(Exception, match=copies[0].name):
        describe_savepoint(str(copies[0]))
    with pytest.raises(Exception, match=copies[0].name):
        restore_savepoint(str(copies[0]), str(tmp_path / "ck"))
    # Other directories are not deleted.
    with pytest.raises(Exception, match=r"(?i)savepoint"):
        delete_savepoint(str(base))
    assert (base / "notes.txt").read_text() == "mine"
    assert len(list_savepoints(str(base))) == 1


@pytest.mark.parametrize("victims", [only_thorough("host"), "hosts and coordinator"])
def test_a_savepoint_while_processes_die(
    flow: Flow, client: QueryableStateClient, tmp_path: Path, victims: str
) -> None:
    flow.add(6)
    query = start(flow.frame(), flow.stream.checkpoint, Sink(0.1))
    progressed(query, 1)
    cluster = current_cluster()
    pids = [int(h["pid"]) for h in cluster.describe_hosts()]
    doomed = pids[:1] if victims == "host" else [*pids, int(cluster.coordinator.call("describe")["pid"])]
    future = trigger_savepoint(query, str(tmp_path / "sp"))
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    error = future.exception(HANG)
    settle(query)
    flow.check(client, query)
    if error is None:
        check_savepoint(flow, future.result())
    else:
        assert len(str(error)) > 20, f"{error!r} gives no reason"
        assert list_savepoints(str(tmp_path / "sp")) == []
    again = trigger_savepoint(query, str(tmp_path / "again")).result(PATIENCE)
    assert check_savepoint(flow, again) == 5
