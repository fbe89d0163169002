"""Checkpoints with both kinds of changelogs, single files and objects with many; and damaged objects.

The intact rest of a damaged object is read: versions, changes, and the state that a query resumes with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.conf import DEFAULT_FAMILY
from backends.exceptions import DamagedFileError, MissingFileError, StateStoreError
from backends.formats.manifest import ChangelogRef
from coordinator_actor.reading import stored_files as partition_reader
from coordinator_actor.reading.stored_files import opened_partition, stored_files
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.reading.verification import verify_version
from tests.coordinator_actor.coordinator_world import World

PARTITIONS, BATCHES = 4, 6
GROUPED = (1, 2, 4)
"""The batches whose changelogs are in one object."""
Changed = list[tuple[int, bytes | None, bytes | None]]
"""The version, the old and the new value of each change."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A query that was upgraded, rolled back and upgraded again: some batches are stored together, others not."""
    world = World(tmp_path)
    c = world.coordinator()
    assert c.register_query(world.registration(n=PARTITIONS)).refusal is None
    for batch in range(BATCHES):
        world.plan_spark(batch)
        run = world.run_grouped_batch if batch in GROUPED else world.run_batch
        run(c, batch, PARTITIONS, attempt=f"t{batch}")
        c.batch_committed("run1", batch)
    assert len(list((tmp_path / "ck/statestore/groups").iterdir())) == len(GROUPED)
    return world


def versions_of(world: World) -> StateVersions:
    return StateVersions.look(find_state(str(world.root / "ck")))


def value_at(world: World, version: int, partition: int) -> bytes:
    """The value of the one key, which each batch changes."""
    versions = versions_of(world)
    piece = versions.reading("op", version).pieces[partition]
    with opened_partition(versions.place, piece) as state:
        (value,) = (
            v for batch in partition_reader.scan_family(state, DEFAULT_FAMILY) for v in batch.column(1).to_pylist()
        )
    assert isinstance(value, bytes)
    return value


def changes_of(world: World, partition: int, since: int = 0, until: int = BATCHES) -> Changed:
    versions = versions_of(world)
    (piece,) = (p for p in versions.reading_of_changes("op", since, until).pieces if p.partition == partition)
    return [
        (version, old, new)
        for version, families in partition_reader.changes(versions.place, piece, [DEFAULT_FAMILY])
        for old, new in zip(
            families[DEFAULT_FAMILY].before.to_pylist(), families[DEFAULT_FAMILY].after.to_pylist(), strict=True
        )
    ]


def expected_changes(since: int = 0, until: int = BATCHES) -> Changed:
    return [(v, b"t%d" % (v - 2) if v > 1 else None, b"t%d" % (v - 1)) for v in range(since + 1, until + 1)]


def changelog(world: World, version: int, partition: int) -> ChangelogRef:
    lineage = versions_of(world).reading("op", version).pieces[partition].lineage
    (ref,) = (ref for ref in lineage.changelogs if ref.version == version)
    return ref


def group_of(world: World, version: int) -> Path:
    within = changelog(world, version, 0).file.within
    assert within is not None
    return world.root / "ck/statestore" / within


def test_each_version_and_all_changes_are_read_whichever_kind_a_batch_is_of(world: World) -> None:
    for p in range(PARTITIONS):
        for version in range(1, BATCHES + 1):
            assert value_at(world, version, p) == b"t%d" % (version - 1)
        for since in range(BATCHES):
            assert changes_of(world, p, since) == expected_changes(since)


def test_files_of_both_kinds_are_listed_and_verified(world: World) -> None:
    found = stored_files(versions_of(world))
    kinds = {kind: sum(f.kind == kind for f in found) for kind in ("changelog", "changelogs")}
    assert kinds == {"changelog": (BATCHES - len(GROUPED)) * PARTITIONS, "changelogs": len(GROUPED)}
    assert verify_version(versions_of(world)).is_sound


def _flipped(data: bytes, ref: ChangelogRef) -> bytes:
    at = ref.file.offset + ref.file.size // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _cut_in_it(data: bytes, ref: ChangelogRef) -> bytes:
    return data[: ref.file.offset + ref.file.size // 2]


@pytest.mark.parametrize(("spoil", "partition", "lost"), [(_flipped, 1, {1}), (_cut_in_it, 2, {2, 3})])
def test_the_intact_rest_of_a_damaged_object_is_read_as_versions_and_as_changes(
    world: World, spoil: Callable[[bytes, ChangelogRef], bytes], partition: int, lost: set[int]
) -> None:
    version = GROUPED[1] + 1
    file = group_of(world, version)
    file.write_bytes(spoil(file.read_bytes(), changelog(world, version, partition)))
    for p in range(PARTITIONS):
        if p not in lost:
            assert value_at(world, BATCHES, p) == b"t%d" % (BATCHES - 1)
            assert changes_of(world, p) == expected_changes()
            continue
        with pytest.raises(DamagedFileError, match=f"{file.name}.* is damaged"):
            value_at(world, version, p)
        with pytest.raises(DamagedFileError, match=f"{file.name}.* is damaged"):
            changes_of(world, p)
        # The versions below it do not need it.
        assert value_at(world, version - 1, p) == b"t%d" % (version - 2)
        assert changes_of(world, p, 0, version - 1) == expected_changes(0, version - 1)
    found = verify_version(versions_of(world))
    assert {d.path for d in found.damages} == {f"groups/{file.name}"}
    assert found.lost == tuple(f"op/{p}" for p in sorted(lost))


def test_an_object_whose_index_is_cut_is_read_completely(world: World) -> None:
    version = GROUPED[0] + 1
    file = group_of(world, version)
    last = changelog(world, version, PARTITIONS - 1).file
    data = file.read_bytes()
    for kept in last.offset + last.size, len(data) - 1:  # no index, and one whose end is missing
        file.write_bytes(data[:kept])
        for p in range(PARTITIONS):
            assert value_at(world, BATCHES, p) == b"t%d" % (BATCHES - 1)
            assert changes_of(world, p) == expected_changes()
        found = verify_version(versions_of(world))
        assert [d.path for d in found.damages] == [f"groups/{file.name}"] and found.lost == ()


def test_an_object_that_is_gone_is_named_by_each_partition(world: World) -> None:
    version = GROUPED[2] + 1
    file = group_of(world, version)
    file.unlink()
    for p in range(PARTITIONS):
        with pytest.raises(MissingFileError, match=f"{file.name}.* does not exist"):
            changes_of(world, p)
        assert value_at(world, version - 1, p) == b"t%d" % (version - 2)


def test_exchanged_parts_are_refused(world: World) -> None:
    """Each part is whole, but at another part's place: its digest and the contents of the changelog show it."""
    version = GROUPED[0] + 1
    file = group_of(world, version)
    data = file.read_bytes()
    refs = [changelog(world, version, p).file for p in range(PARTITIONS)]
    assert len({ref.size for ref in refs}) == 1, "parts of one size, so that the object stays one"
    first, second = (data[ref.offset : ref.offset + ref.size] for ref in refs[:2])
    file.write_bytes(second + first + data[refs[2].offset :])
    for p in range(PARTITIONS):
        if p > 1:
            assert changes_of(world, p) == expected_changes()
        else:
            with pytest.raises(StateStoreError, match="is damaged"):
                value_at(world, version, p)
