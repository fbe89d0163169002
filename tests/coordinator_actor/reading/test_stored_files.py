"""``stored_files`` says why each file is kept: retention removes exactly the files without a reason.

Old versions of changelogs that were stored together are read with no more requests than a file a partition took.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import RequestCounts
from coordinator_actor.reading.stored_files import StoredFile, opened_partition, scan_family, stored_files
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions, find_state
from tests.coordinator_actor.coordinator_world import World
from tests.coordinator_actor.savepoints.savepoint_streams import Stream


def look(root: Path) -> StateVersions:
    return StateVersions.look(StatePlace(str(root / "ck"), str(root / "ck/statestore")))


def found_at(root: Path, version: int | None = None) -> dict[str, StoredFile]:
    return {file.path: file for file in stored_files(look(root), version)}


def on_disk(root: Path) -> dict[str, int]:
    base = root / "ck/statestore"
    return {str(p.relative_to(base)): p.stat().st_size for p in base.rglob("*") if p.is_file()}


@pytest.fixture(params=["file", "rocksdb"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Stream:
    """A stream that keeps few versions, so that many files have expired. Snapshots of partitions share one object."""
    s = Stream(tmp_path, hosts=1, backend=request.param, min_versions_to_retain=2, maintenance_interval=1.0)
    # One partition has fewer snapshots, so that older versions of it alone are needed.
    for first, last, partitions in ((0, 3, {0, 1}), (3, 6, {0, 1}), (6, 7, {0}), (7, 9, {0})):
        s.batches(first, last)
        s.heartbeat()
        s.hosts[0].maintenance.upload_snapshots([i for i in s.hosts[0].cache.all() if i.partition in partitions])
    s.batches(9, 11)
    s.world.now += 2
    s.c.maintain()  # it plans what the next manifest keeps
    s.batches(11, 12)
    return s


def test_every_file_is_described(old: Stream, tmp_path: Path) -> None:
    found = found_at(tmp_path)
    assert {path: file.size for path, file in found.items()} == on_disk(tmp_path)
    kinds = {file.kind for file in found.values()}
    assert kinds >= {"changelog", "manifest", "schema", "epoch", "record"} and kinds & {"snapshot", "snapshots"}
    assert "unknown" not in {file.kind for file in found.values()}
    old.close()


def test_files_without_a_reason_are_those_that_retention_removes(old: Stream, tmp_path: Path) -> None:
    before = found_at(tmp_path)
    old.world.now += 2
    old.c.maintain()
    removed = before.keys() - on_disk(tmp_path).keys()
    assert len(removed) > 5
    assert {before[path].why for path in removed if "/" in path} <= {
        "no version needs it any more; retention removes it",
        "a later manifest replaces it; retention removes it",
    }
    assert [path for path in removed if before[path].kept_by and not path.startswith("history/")] == []
    unneeded = [p for p, file in before.items() if not file.kept_by and "retention removes it" in file.why]
    assert sorted(unneeded) == sorted(path for path in removed if not path.startswith("history/"))
    old.close()


def test_files_of_a_version_are_enough_to_load_it(old: Stream, tmp_path: Path) -> None:
    old.close()
    versions = look(tmp_path)
    newest = versions.readable[-1]
    needed = found_at(tmp_path, newest)
    for path in on_disk(tmp_path):
        if path not in needed and path.startswith(("operators/", "groups/")):
            (tmp_path / "ck/statestore" / path).unlink()
    for piece in versions.reading("op", newest).pieces:
        with opened_partition(versions.place, piece) as state:
            assert state.version == newest


def test_other_files_are_explained(old: Stream, tmp_path: Path) -> None:
    base = tmp_path / "ck/statestore"
    directory = base / "operators/op/2/0/default"
    (directory / "11-lost.changelog").write_bytes(b"x")
    (directory / "99-early.changelog").write_bytes(b"x")
    (base / "notes.txt").write_bytes(b"x")
    found = found_at(tmp_path)
    assert "did not count" in found["operators/op/2/0/default/11-lost.changelog"].why
    assert "under way" in found["operators/op/2/0/default/99-early.changelog"].why
    assert found["notes.txt"].kind == "unknown" and not found["notes.txt"].kept_by
    old.close()


PARTITIONS, BATCHES = 4, 6


def requests_for(world: World, version: int) -> tuple[int, list[bytes]]:
    """Read a version, partition by partition; return the requests, and the values that were found."""
    counts = RequestCounts()

    def counted(location: str, options: Mapping[str, str]) -> CheckpointStorage:
        return CheckpointStorage.open(location, options, requests=counts)

    place = find_state(str(world.root / "ck"))
    reading = StateVersions.look(place).reading("op", version)
    values: list[bytes] = []
    for piece in reading.pieces:
        with opened_partition(place, piece, open_storage=counted) as state:
            for batch in scan_family(state, "default"):
                values += batch.column(1).to_pylist()
    return sum(counts.read().values()), values


def test_a_version_of_groups_takes_no_more_requests_than_one_of_files(tmp_path: Path) -> None:
    apart, grouped = World(tmp_path / "apart"), World(tmp_path / "grouped")
    for world in (apart, grouped):
        c = world.coordinator()
        assert c.register_query(world.registration(n=PARTITIONS)).refusal is None
        for batch in range(BATCHES):
            world.plan_spark(batch)
            run = world.run_grouped_batch if world is grouped else world.run_batch
            run(c, batch, PARTITIONS, attempt=f"t{batch}")
            c.batch_committed("run1", batch)
    assert list((tmp_path / "grouped/ck/statestore/groups").iterdir()), "nothing was stored together"
    for version in range(1, BATCHES + 1):
        files, of_files = requests_for(apart, version)
        groups, of_groups = requests_for(grouped, version)
        assert of_files == of_groups == [b"t%d" % (version - 1)] * PARTITIONS
        assert 0 < groups <= files == version * PARTITIONS, f"version {version}"
