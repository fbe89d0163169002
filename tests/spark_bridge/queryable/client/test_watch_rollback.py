"""``client.watch`` and a query that went back: one history is given or none; and answers that the consumer takes
long over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator_actor.exceptions import RetiredRunError, UnknownRunError
from spark_bridge.exceptions import RequestLimitError, StateVersionError
from spark_bridge.host.prepared_versions import IDLE_RUN_SECONDS
from spark_bridge.queryable.protocol import ChangesRequest, RowsReply
from spark_bridge.queryable.reads import answer_version, operator_plan
from spark_bridge.queryable.reads.change_feed import MANIFESTS_IDLE_SECONDS
from tests.spark_bridge.queryable.client_world import Cluster, go_back


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A query whose hosts soon ask the coordinator where it is, and whether it has ended."""
    monkeypatch.setattr(operator_plan, "DIRECTORY_SECONDS", 0.05)
    monkeypatch.setattr(answer_version, "ASK_COORDINATOR_SECONDS", 0.1)
    made = Cluster(tmp_path, partitions=1)
    yield made
    made.close()


def outsider(c: Cluster) -> int:
    """The host that has no partition."""
    (found,) = [i for i, h in enumerate(c.hosts) if h.host.cache.instance(c.run, "totals", 0) is None]
    return found


def count(change: Any) -> int:
    (row,) = change.batch.to_pylist()
    return int(row["after"]["n"])


@pytest.mark.parametrize("is_located", [False, True])
def test_rewritten_versions_are_never_mixed_into_a_watch(cluster: Cluster, is_located: bool) -> None:
    for n in range(1, 7):
        cluster.batch({1: (n, "a")})
    other = outsider(cluster)
    client = cluster.client(hosts=(other,))
    changes = client.watch("totals", from_version=0)
    assert [count(next(changes)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    cluster.batch({1: (7, "a")})
    assert cluster.hosts[other].host.version_requests.completed_version("run1", 7, 5.0).version == 7
    go_back(cluster, 5, "run2")
    cluster.batch({1: (60, "b")})
    cluster.batch({1: (70, "b")})
    if is_located:
        client._access.moved(("totals", None), RetiredRunError("of the test"))
    with pytest.raises(StateVersionError, match=r"rolled back.*version 6.*remade by run run2.*Read the state again"):
        next(changes)
    there = client.get("totals", 1)  # "Read the state again and watch from there."
    assert there is not None and there["n"] == 70
    again = client.watch("totals", from_version=7)
    cluster.batch({1: (80, "b")})
    assert count(next(again)) == 80


def test_watch_that_missed_the_rolled_back_versions_continues(cluster: Cluster) -> None:
    for n in range(1, 6):
        cluster.batch({1: (n, "a")})
    changes = cluster.client(hosts=(outsider(cluster),)).watch("totals", from_version=0)
    assert [count(next(changes)) for _ in range(5)] == [1, 2, 3, 4, 5]
    cluster.batch({1: (6, "a")})
    go_back(cluster, 5, "run2")
    cluster.batch({1: (60, "b")})
    cluster.start("run3")
    cluster.batch({1: (70, "c")})
    assert [count(next(changes)) for _ in range(2)] == [60, 70]
    cluster.start("run4")
    cluster.batch({1: (80, "d")})
    assert count(next(changes)) == 80


def test_another_watch_notices_a_rollback_since_the_first_one(cluster: Cluster) -> None:
    for n in range(1, 7):
        cluster.batch({1: (n, "a")})
    client = cluster.client(hosts=(outsider(cluster),))
    changes = client.watch("totals", from_version=0)
    assert changes.run_id is None
    assert [count(next(changes)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert (changes.position, changes.run_id) == (6, "run1")
    go_back(cluster, 4, "run2")
    for n in range(5, 8):
        cluster.batch({1: (10 * n, "b")})
    with pytest.raises(StateVersionError, match=r"rolled back.*version 6.*remade by run run2"):
        next(client.watch("totals", from_version=6, from_run="run1"))
    assert count(next(client.watch("totals", from_version=6))) == 70
    assert count(next(client.watch("totals", from_version=4, from_run="run1"))) == 50


def test_every_version_comes_with_its_changes_or_none(cluster: Cluster) -> None:
    for n in (1, 1, 2, 2):
        cluster.batch({1: (n, "a")})
    found = []
    with cluster.client().watch("totals", from_version=0, every_version=True) as changes:
        while changes.position != 4:
            found.append(next(changes))
    assert [(change.version, change.batch.num_rows) for change in found] == [(1, 1), (3, 1), (4, 0)]
    assert found[2].batch.schema.equals(found[0].batch.schema)


def test_the_changes_of_a_replaced_run_are_refused_and_it_is_forgotten(cluster: Cluster) -> None:
    cluster.batch({1: (1, "a")})
    host = cluster.hosts[outsider(cluster)]
    reads = host.proxy._reads.own
    list(reads.changes(ChangesRequest("run1", "totals", 0, 1), None).batches)
    assert reads._changes._manifests.runs() == ["run1"]
    cluster.start("run2")
    with pytest.raises(RetiredRunError, match="replaced by run run2"):
        reads.changes(ChangesRequest("run1", "totals", 0, 1), None)
    assert not reads._changes._manifests.runs()
    with pytest.raises((RetiredRunError, UnknownRunError)):
        host.host.version_requests.completed_version("run1", 2, 1.0)
    assert host.host.completed.newest("run1") is None


def test_runs_without_local_partitions_are_forgotten_when_unused(cluster: Cluster) -> None:
    cluster.batch({1: (1, "a")})
    other = outsider(cluster)
    for i in (other, 1 - other):
        reads = cluster.hosts[i].proxy._reads.own
        list(reads.changes(ChangesRequest("run1", "totals", 0, 1), None).batches)
    for i, kept in ((other, []), (1 - other, ["run1"])):
        host, reads = cluster.hosts[i].host, cluster.hosts[i].proxy._reads.own
        host.maintenance.do_maintenance()
        assert host.completed.runs() == reads._changes._manifests.runs() == ["run1"]
        clock = reads._changes._manifests._clock
        reads._changes._manifests._clock = lambda clock=clock: clock() + MANIFESTS_IDLE_SECONDS + 1
        for asking in host.version_requests._asking.values():
            asking.at -= IDLE_RUN_SECONDS + 1
        host.maintenance.do_maintenance()
        assert host.completed.runs() == reads._changes._manifests.runs() == kept
        assert reads.await_completed("run1", 0, 5.0) == 1


def test_slow_watcher_gets_the_rest_in_another_answer(cluster: Cluster) -> None:
    for n in range(1, 6):
        cluster.batch({1: (n, "a")})
    client = cluster.client()
    stream = client._access.stream
    ended = 0

    class TooLong:
        """The frames of a stream up to the third one with rows: then the time for one answer is over."""

        def __init__(self, frames: Any, most: int) -> None:
            self.frames, self.most = frames, most

        def __iter__(self) -> Iterator[Any]:
            nonlocal ended
            given = 0
            for one in self.frames:  # a slow machine says now and then that there is work
                if given == self.most:
                    ended += 1
                    raise RequestLimitError("The answer took longer than the 600 s allowed here.")
                given += isinstance(one[0], RowsReply)
                yield one

        def close(self) -> None:
            self.frames.close()

    def limited(most: int) -> Callable[..., TooLong]:
        return lambda *args: TooLong(stream(*args), most)

    client._access.stream = limited(2)
    changes = client.watch("totals", from_version=0)
    assert [count(next(changes)) for _ in range(3)] == [1, 2, 3]
    assert ended == 2
    client._access.stream = limited(0)
    with pytest.raises(RequestLimitError):
        [next(changes) for _ in range(3)]
