"""Hosts of another coordinator follow a query by its storage alone, and change nothing there."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from backends.conf import StateStoreConf
from backends.encoding.key_groups import key_groups
from backends.encoding.keys import encode_keys
from backends.exceptions import VersionNotFoundError
from backends.formats.changelog import Changes
from backends.formats.manifest import ChangelogRef
from backends.partition.loading import Loading
from coordinator_actor.coordinator import Coordinator
from coordinator_actor.coordinator_conf import CoordinatorConf
from coordinator_actor.durable.spark_commits import SparkCommits
from coordinator_actor.exceptions import InvalidRequestError
from coordinator_actor.messages import HostInfo, QueryRegistration, RegisteredQuery
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.exceptions import StateVersionError
from spark_bridge.host.host import Host
from spark_bridge.overview.from_cluster import overview_of_cluster
from spark_bridge.queryable.protocol import At, LookupRequest, ScanRequest
from spark_bridge.queryable.reads.host_reads import HostReads
from spark_bridge.serving import FollowedQuery
from spark_bridge.state_data.checkpoint_client import query_in_storage
from spark_bridge.state_surgery.forget_keys import forget_keys
from spark_bridge.transport.protocol import TaskIdentity
from tests.patience import PATIENCE
from tests.spark_bridge.queryable.client_world import KEYS, Cluster, G, HeardPort, served

USERS = 40


class Follower:
    """One host with its own coordinator that follows a query."""

    def __init__(self, query: Cluster) -> None:
        self.query = query
        self.c = Coordinator(lambda: query.world.now, query.world.storage, CoordinatorConf(report_timeout=0.0))
        info = HostInfo("replica", "a", "grpc://127.0.0.1:99", "node", "serving")
        conf = StateStoreConf(provider="file", fsync=False)
        clock = lambda: query.world.now  # noqa: E731
        self.host = Host(info, self.c, query.root / "replica", conf=conf, open_storage=query.world.storage, clock=clock)
        self.host.register()
        self.reads = HostReads(self.host, wait_seconds=5.0)
        self.loaded: list[int] = []
        registration = self.look_up()
        self.serve(registration)
        self.followed = FollowedQuery(
            registration, self.c, self.look_up, self.serve, 0.001, clock=lambda: query.world.now
        )

    def look_up(self) -> QueryRegistration:
        versions = StateVersions.look(find_state(str(self.query.root / "ck")))
        return query_in_storage(versions, versions.resolve(None), "followed", "serving", is_followed=True)

    def serve(self, registration: QueryRegistration) -> None:
        assert self.c.serve_ended(registration).refusal is None

    def look(self) -> None:
        self.followed.look()
        self.host.heartbeat()

    def version(self, at: At | None = None) -> int:
        """Scan all, and return the version, whose rows must be right."""
        run = self.c.locate("totals").run_id
        answer = self.reads.scan(ScanRequest(run, "totals", at=at or At("completed")))
        rows = [row for batch in answer.batches for row in batch.to_pylist()]
        assert sorted(r["user"] for r in rows) == list(range(USERS))
        assert {r["n"] for r in rows} == {answer.version}
        return answer.version


def batch(query: Cluster) -> None:
    query.batch(dict.fromkeys(range(USERS), (query.version + 1, "a")))


@pytest.fixture
def query(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path, min_versions_to_retain=3, maintenance_interval=1.0)
    batch(made)
    (tmp_path / "ck/metadata").write_text('{"id":"q"}')
    yield made
    made.close()


@pytest.fixture
def follower(query: Cluster) -> Iterator[Follower]:
    made = Follower(query)
    yield made
    made.host.close()


def files(query: Cluster) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in (query.root / "ck").rglob("*") if p.is_file()}


def test_each_version_is_seen_once_it_is_completed(query: Cluster, follower: Follower) -> None:
    assert follower.version() == 1
    for version in (2, 3, 4):
        batch(query)
        before = files(query)
        assert follower.version() == version - 1, "as it was known"
        follower.look()
        assert follower.version() == version
        assert files(query) == before
    assert follower.version(At("version", 2)) == 2


def test_a_version_that_is_prepared_and_not_committed_is_not_seen(query: Cluster, follower: Follower) -> None:
    query.world.commit_spark = lambda *a: None  # type: ignore[method-assign]
    query.batch(dict.fromkeys(range(USERS), (2, "a")), complete=False)
    follower.look()
    assert follower.version() == 1


def test_late_manifest_of_a_committed_batch_is_applied(query: Cluster, follower: Follower) -> None:
    """``foreachBatch`` has run some tasks again: the manifest with their changes follows Spark's commit."""

    def names(at: At | None = None) -> set[str]:
        answer = follower.reads.scan(ScanRequest("run1", "totals", at=at or At("completed")))
        assert answer.version == 2
        return {row["name"] for batch in answer.batches for row in batch.to_pylist()}

    rows, run_task, stage = dict.fromkeys(range(USERS), (2, "first")), query._run_task, [1]

    def in_stage(p: int, batch: int, changes: Changes) -> None:
        task = TaskIdentity("run1", "totals", p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex, stage[0])
        if stage[0] == 1 or p == 0:  # some tasks run again
            (host,) = [h.host for h in query.hosts if h.host.open(task).redirect is None]
            host.commit(task, changes, {})

    query._run_task = in_stage  # type: ignore[method-assign]
    query.batch(rows, committed=False)
    stage[0] = 2
    query.batch(dict.fromkeys(range(USERS), (2, "again")), complete=False)
    follower.look()
    assert names() == {"first"}, "all that storage tells yet"
    query._run_task = run_task  # type: ignore[method-assign]
    query.complete()
    follower.look()
    assert names() == {"first", "again"}
    follower.look()
    assert names() == {"first", "again"}


def test_follower_reuses_its_loaded_state(query: Cluster, follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    assert follower.version() == 1
    read: list[int] = []
    decoded = Loading._decoded

    def noted(self: Loading, ref: ChangelogRef, data: bytes, head: str | None) -> Changes:
        read.append(ref.version)
        return decoded(self, ref, data, head)

    monkeypatch.setattr(Loading, "_decoded", noted)
    batch(query)
    follower.look()
    assert follower.version() == 2
    assert read == [2] * query.partitions, "the new changelog of each partition, and nothing of the version before"


def test_versions_that_the_query_removes_are_forgotten(query: Cluster, follower: Follower) -> None:
    for _ in range(12):
        batch(query)
        query.remove_old_versions()
        follower.look()
    assert follower.version() == 13
    (of,) = follower.c.operators()
    assert of.oldest_version == query.c.operators()[0].oldest_version > 5
    run = follower.c.registries.runs.get(of.run_id)
    assert len(run.manifests.manifests) <= 13 - of.oldest_version + 2, "no history is held"
    with pytest.raises(StateVersionError, match=str(of.oldest_version)):
        follower.version(At("version", 1))


def test_restarted_query_is_still_followed(query: Cluster, follower: Follower) -> None:
    assert follower.version() == 1
    query.start("run2")
    batch(query)
    follower.look()
    assert follower.c.locate("totals").run_id == "run2"
    assert follower.version() == 2
    assert [q["run_id"] for q in follower.c.describe()["queries"]] == ["run2"]
    batch(query)
    follower.look()
    assert follower.version() == 3


def test_a_run_with_other_partitions_is_followed_from_its_first_version_on(query: Cluster, follower: Follower) -> None:
    """Until then the last version is its predecessor's, and answered with those partitions."""
    assert follower.version() == 1
    query.partitions //= 2
    query.start("run2")
    for _ in range(2):
        with pytest.raises(VersionNotFoundError, match="wait for its first batch"):
            follower.look()
        assert follower.c.locate("totals").run_id == "run1" and follower.version() == 1
    for version in (2, 3):
        batch(query)
        follower.look()
        assert follower.version() == version
        location = follower.c.locate("totals")
        assert (location.run_id, location.operator.num_partitions) == ("run2", query.partitions)


def test_a_query_that_runs_here_is_not_followed(query: Cluster) -> None:
    with pytest.raises(InvalidRequestError, match="runs here"):
        query.c.take_up_versions("run1")


def test_lookups_of_keys_follow_too(query: Cluster, follower: Follower) -> None:
    columns = pa.record_batch([pa.array([7], pa.int64())], schema=KEYS)
    (key,) = encode_keys(columns, key_groups(columns, G)).to_pylist()
    versions = []
    for _ in range(3):
        request = LookupRequest("run1", "totals", At("completed"))
        version, value = follower.reads.lookup_one(request, key)
        assert value is not None
        versions.append(version)
        batch(query)
        follower.look()
    assert versions == [1, 2, 3]


def test_a_host_that_looks_at_sparks_log_has_nothing_written_either(query: Cluster, follower: Follower) -> None:
    """A host without a lease asks whether Spark has committed the next batch, and says so."""
    assert follower.version() == 1
    batch(query)
    before = files(query)
    assert follower.c.batch_committed("run1", 1) is True
    assert follower.c.batch_committed("run1", 1) is False
    follower.host.heartbeat()
    assert follower.version() == 2 and files(query) == before


def test_follower_does_not_rebuild_a_missing_manifest(query: Cluster, follower: Follower) -> None:
    assert follower.version() == 1
    query.world.plan_spark(1)
    query.world.commit_spark(1)
    before = files(query)
    assert follower.c.batch_committed("run1", 1) is False
    follower.look()
    assert files(query) == before and follower.version() == 1


def test_forgotten_keys_are_forgotten_without_a_new_version(query: Cluster) -> None:
    batch(query)
    follower = Follower(query)
    try:
        version = follower.version()
        port = HeardPort(query)
        forget_keys("name", "totals", [7], coordinator=port)  # type: ignore[arg-type]
        follower.look()
        run = follower.c.locate("totals").run_id
        answer = follower.reads.scan(ScanRequest(run, "totals", at=At("completed")))
        users = [row["user"] for rows in answer.batches for row in rows.to_pylist()]
        assert answer.version == version and sorted(users) == [user for user in range(USERS) if user != 7]
    finally:
        follower.host.close()


def test_a_follower_survives_every_error(query: Cluster, follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    take_up, errors = follower.c.take_up_versions, [KeyError("part"), RuntimeError("a bug"), OSError("disk")]
    looked = threading.Semaphore(0)

    def failing(run_id: str, behind: float | None = None) -> RegisteredQuery:
        if errors:
            raise errors.pop()
        answer = take_up(run_id, behind)
        looked.release()
        return answer

    monkeypatch.setattr(follower.followed._coordinator, "take_up_versions", failing)
    batch(query)
    follower.followed.start()
    try:
        assert looked.acquire(timeout=PATIENCE), "the loop has ended"
        follower.host.heartbeat()
        assert follower.version() == 2
    finally:
        follower.followed.close()


def test_answers_carry_the_lag_of_a_follower(
    query: Cluster, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower.look()
    assert follower.reads.lag_ms("run1") == 0
    batch(query)

    def fails(self: SparkCommits) -> int:
        raise RuntimeError("storage has a bug")

    monkeypatch.setattr(SparkCommits, "next_batch", fails)
    for _ in range(8):
        query.world.now += 1
        with pytest.raises(RuntimeError):
            follower.followed.look()
        follower.host.heartbeat()
    assert follower.version() == 1
    assert follower.reads.lag_ms("run1") == 8_000
    query.world.now += 2
    assert follower.reads.lag_ms("run1") == 10_000, "it grows between two heartbeats"
    with served(follower) as client:  # type: ignore[arg-type]
        assert client.get("totals", 7) is not None and client.lag_seconds == 10.0
        assert client.scan("totals").to_arrow().num_rows == USERS and client.lag_seconds == 10.0
        assert client.get_many("totals", [1, 2, 3]).num_rows == 3 and client.lag_seconds == 10.0
        (fault,) = [
            f
            for f in overview_of_cluster({**follower.c.describe(), "namespace": "n"}, [], now_ms=0).faults
            if "follow" in f.kind
        ]
        assert "10.0 s ago" in fault.what and "version 1" in fault.what

        monkeypatch.undo()
        follower.look()
        assert follower.version() == 2
        assert client.get("totals", 7) is not None and client.lag_seconds == 0.0


def test_restarted_coordinator_learns_the_lag_of_its_follower(query: Cluster, follower: Follower) -> None:
    query.world.now += 60
    follower.c = Coordinator(lambda: query.world.now, query.world.storage, CoordinatorConf(report_timeout=0.0))
    follower.serve(follower.look_up())
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(SparkCommits, "next_batch", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            follower.c.take_up_versions("run1", 60.0)
    (described,) = follower.c.describe()["queries"]
    assert described["lag_seconds"] == 60.0
