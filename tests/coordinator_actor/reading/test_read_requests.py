"""Old versions of changelogs that were stored together are read with no more requests than a file a partition took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import RequestCounts
from coordinator_actor.reading import stored_files
from coordinator_actor.reading.stored_files import opened_partition
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from tests.coordinator_actor.coordinator_world import World

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
            for batch in stored_files.scan_family(state, "default"):
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
