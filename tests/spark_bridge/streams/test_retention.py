"""Users go back to any batch that Spark still has; what only older ones need is removed while the query runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from spark_bridge import QueryableStateClient
from spark_bridge.session.current import current_cluster
from tests.effort import only_thorough
from tests.spark_bridge.conftest import Stream, settle, wait_until
from tests.spark_bridge.streams.running import Totals, start_totals

pytestmark = [pytest.mark.spark, pytest.mark.spark42_only, pytest.mark.slow]


@pytest.fixture(scope="module")
def client(spark: Any) -> QueryableStateClient:
    return QueryableStateClient.connect()


@pytest.fixture
def totals(stream: Stream, request: pytest.FixtureRequest) -> Totals:
    return Totals(stream, request.node.name.partition("[")[0])


@pytest.fixture
def few_batches_kept(spark: Any) -> Iterator[int]:
    name = "spark.sql.streaming.minBatchesToRetain"
    spark.conf.set(name, "3")
    yield 3
    spark.conf.unset(name)


def batches(stream: Stream, directory: str) -> list[int]:
    return sorted(int(p.name) for p in Path(stream.checkpoint, directory).glob("[0-9]*"))


def remove(stream: Stream, directory: str, batch: int) -> None:
    for name in (str(batch), f".{batch}.crc"):
        Path(stream.checkpoint, directory, name).unlink(missing_ok=True)


def state_files(stream: Stream, kind: str) -> list[Path]:
    state = Path(stream.checkpoint, "statestore")
    return sorted((*(state / "operators").rglob(f"*.{kind}"), *(state / "groups").rglob(f"*.{kind}s")))


def versions(files: list[Path]) -> set[int]:
    return {int(f.name.partition("-")[0]) for f in files}


def run_batches(totals: Totals, n: int) -> None:
    """Run so many micro-batches, each of one file."""
    query = start_totals(totals.frame(), totals.stream)
    for _ in range(n):
        totals.add()
        settle(query)
    query.stop()


@pytest.mark.parametrize("k", [only_thorough(1), 3])
def test_the_last_k_offsets_and_commits_are_removed(totals: Totals, client: QueryableStateClient, k: int) -> None:
    run_batches(totals, 5)
    for batch in batches(totals.stream, "offsets")[-k:]:
        remove(totals.stream, "offsets", batch)
        remove(totals.stream, "commits", batch)
    assert batches(totals.stream, "commits")[-1] == 4 - k
    again = start_totals(totals.frame(), totals.stream)
    settle(again)
    # Spark reads the files of the removed batches again, as one batch.
    totals.check(client)
    totals.add()
    settle(again)
    totals.check(client)


def test_commits_alone_are_removed(totals: Totals, client: QueryableStateClient) -> None:
    run_batches(totals, 4)
    for batch in batches(totals.stream, "commits"):
        remove(totals.stream, "commits", batch)
    again = start_totals(totals.frame(), totals.stream)
    settle(again)
    assert batches(totals.stream, "commits") == [3]  # Spark repeats the last batch only
    totals.check(client)
    totals.add()
    settle(again)
    totals.check(client)


def test_only_versions_that_spark_can_go_back_to_are_kept(
    totals: Totals, client: QueryableStateClient, few_batches_kept: int
) -> None:
    query = start_totals(totals.frame(), totals.stream)

    def add() -> None:
        totals.add()
        settle(query)

    for _ in range(5):
        add()
    wait_until(lambda: state_files(totals.stream, "snapshot"))

    def oldest_is_gone() -> bool:
        add()  # what is kept is decided by the manifests of new versions
        return all(min(versions(state_files(totals.stream, kind))) > 2 for kind in ("changelog", "snapshot"))

    wait_until(oldest_is_gone)
    totals.check(client)

    # A host that dies loads a snapshot and the changelogs behind it.
    for host in current_cluster().hosts:
        ray.kill(host, no_restart=False)
    add()
    totals.check(client)
    query.stop()

    # Spark itself keeps a few batches, needs two of them to begin, and all the others may be removed.
    kept = batches(totals.stream, "offsets")
    assert few_batches_kept < len(kept) < 10
    for batch in kept[2:]:
        remove(totals.stream, "offsets", batch)
        remove(totals.stream, "commits", batch)
    again = start_totals(totals.frame(), totals.stream)
    settle(again)
    totals.check(client)
    again.stop()

    # Further back there is nothing: the query says so and changes nothing.
    coordinator = current_cluster().coordinator
    wait_until(
        lambda: all(q["ended_at"] for q in coordinator.call("describe")["queries"] if q["run_id"] == str(again.runId))
    )
    before = state_files(totals.stream, "changelog")
    for directory in ("offsets", "commits"):
        moved = Path(totals.stream.checkpoint, directory)
        last = batches(totals.stream, directory)[-1]
        content = (moved / str(last)).read_bytes()
        for batch in batches(totals.stream, directory):
            remove(totals.stream, directory, batch)
        for batch in (0, 1):
            (moved / str(batch)).write_bytes(content)
    totals.add()
    refused = start_totals(totals.frame(), totals.stream)
    with pytest.raises(Exception, match=r"needs state version 2, but at .* versions \d+ to \d+ are kept"):
        refused.processAllAvailable()
    assert state_files(totals.stream, "changelog") == before
