"""Which version was seen when, as manifests say."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from backends.exceptions import InvalidStateStoreArgument, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.fencing import RecordFiles
from coordinator_actor.durable.records import CheckpointRecord, CheckpointRecords
from coordinator_actor.reading.stored_versions import StateVersions, VersionTimes, find_state, ms_of
from spark_bridge.state_data.frames import state_table
from tests.spark_bridge.queryable.client_world import Cluster

START = 1_000_000.0


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    made = Cluster(tmp_path)
    (tmp_path / "ck").mkdir(exist_ok=True)
    (tmp_path / "ck/metadata").write_text('{"id":"q"}')
    made.world.now = START
    for n in range(1, 5):
        made.batch({1: (n, "a")}, complete=False)  # prepared 10 s before it is completed
        made.world.now += 10
        for h in made.hosts:
            h.host.register()
        made.complete()
        made.world.now += 50
        commit_at(tmp_path, n - 1, int(made.world.now) * 1000 - 50_500)
    made.close()
    return made


def commit_at(root: Path, batch: int, ms: int) -> None:
    """Spark has committed a batch at that time of the world's clock."""
    os.utime(root / "ck/commits" / str(batch), (ms / 1000, ms / 1000))


def times(cluster: Cluster) -> VersionTimes:
    return VersionTimes.of(StateVersions.look(find_state(str(cluster.root / "ck"))))


def test_a_version_is_there_from_its_completion_on(cluster: Cluster) -> None:
    found = times(cluster)
    at = [int(START * 1000) + 10_000 + 60_000 * n for n in range(4)]
    assert found.versions == (0, 1, 2, 3, 4)
    assert found.completed_ms == (0, at[0], at[1], at[2], at[3] - 500), "of the last one: when Spark committed it"
    for version, ms in enumerate(at[:3], 1):
        assert found.version_at(ms - 1) == version - 1
        assert found.version_at(ms) == found.version_at(ms + 40_000) == version
    assert found.version_at(at[3] + 10**9) == 4


def test_the_history_says_when_the_last_version_was_completed(cluster: Cluster) -> None:
    """A row between preparation and completion gets what clients were answered then: the version before."""
    versions = StateVersions.look(find_state(str(cluster.root / "ck")))
    storage = CheckpointStorage.open(versions.place.state_location)
    at = int(START * 1000) + 190_000
    manifest = versions.chain[4]
    other = CheckpointRecord(manifest.id - 1, 4, 1, "of another attempt", completed_ms=at - 5000)
    own = CheckpointRecord(manifest.id, 4, manifest.epoch, manifest.run_id, completed_ms=at)
    CheckpointRecords(RecordFiles(storage)).write((other, own))
    found = times(cluster)
    assert manifest.created_ms < at - 1
    assert [found.version_at(ms) for ms in (manifest.created_ms, at - 1, at)] == [3, 3, 4]


def test_tables_as_of_a_time_show_the_answers_of_that_time(cluster: Cluster) -> None:
    begin = datetime.fromtimestamp(START, timezone.utc)
    for seconds, n in ((9.999, None), (10, 1), (60, 1), (69.999, 1), (70, 2), (3600, 4)):
        at = begin + timedelta(seconds=seconds)
        naive = at.replace(tzinfo=None)
        for as_of in (at, at.isoformat(), naive, naive.isoformat(), at.astimezone(timezone(timedelta(hours=9)))):
            table = state_table(str(cluster.root / "ck"), "totals", as_of=as_of)
            assert table["n"].to_pylist() == ([] if n is None else [n])


def test_wrong_times(cluster: Cluster) -> None:
    place = str(cluster.root / "ck")
    for as_of in ("yesterday", 17, ""):
        with pytest.raises(InvalidStateStoreArgument, match="is not a time: give a datetime"):
            state_table(place, "totals", as_of=as_of)  # type: ignore[arg-type]
    with pytest.raises(InvalidStateStoreArgument, match="give one of them"):
        state_table(place, "totals", version=1, as_of="2026-01-01")
    assert ms_of("1970-01-01T00:00:01+00:00") == ms_of("1970-01-01T00:00:01") == 1000
    kept = VersionTimes("ck", (3, 4), (5_000, 6_000))
    with pytest.raises(VersionNotFoundError, match=r"as of 1970-01-01 00:00:04.999.*version 3, of 1970-01-01 00:00:05"):
        kept.version_at(4_999)
    assert kept.version_at(5_000) == 3


def test_a_coordinator_that_was_replaced_has_not_seen_the_completion(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    (tmp_path / "ck/metadata").write_text('{"id":"q"}')
    cluster.world.now = START
    cluster.batch({1: (1, "a")})
    cluster.world.now += 60
    cluster.replace_coordinator()
    cluster.batch({1: (2, "a")})
    cluster.world.now += 60
    cluster.batch({1: (3, "a")})
    for n in range(3):
        commit_at(tmp_path, n, int(START * 1000) + 60_000 * n)
    assert times(cluster).completed_ms[1:] == tuple(int(START * 1000) + 60_000 * n for n in range(3))
    cluster.close()
