"""Groups of changelogs: parts and index are read each by itself, and damage of one leaves the others readable."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

from backends.exceptions import DamagedFileError, InvalidStateStoreArgument, MissingFileError
from backends.formats import changelog
from backends.formats.changelog import (
    MAGIC,
    ChangelogMeta,
    Changes,
    GroupIndex,
    GroupMember,
    group_path,
    read_changelog,
    read_index,
    write_changelog,
    write_group,
)
from backends.formats.manifest import seal
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef

SIZES = (0, 1, 1000, 3)


def member(partition: int, size: int, operator: str = "op") -> GroupMember:
    meta = ChangelogMeta("run", operator, partition, 8, 3, f"try{partition}", f"operators/op/8/{partition}/default/2-x")
    changes = Changes.of(pa.array([b"k"]), pa.array([random.Random(partition).randbytes(size)]))
    path = f"operators/{operator}/8/{partition}/default/3-u{partition}.changelog"
    return GroupMember(meta, path, write_changelog(changes, meta))


class Stored:
    """A group in storage."""

    def __init__(self, storage: CheckpointStorage, members: list[GroupMember]) -> None:
        self.storage = storage
        self.members = members
        self.path = group_path(3)
        self.data, self.refs = write_group(self.path, members)
        storage.put_new(self.path, self.data)

    def replace(self, data: bytes) -> None:
        self.storage.delete(self.path)
        self.storage.put_new(self.path, data)

    def index(self) -> list[tuple[ChangelogMeta, FileRef]]:
        return read_index(self.storage, self.path, dict(self.storage.list("groups"))[self.path])

    def readable(self) -> list[int]:
        """Return which parts come out whole; the others must be damage that names the group and the part."""
        found = []
        for i, (ref, held) in enumerate(zip(self.refs, self.members, strict=True)):
            try:
                data = self.storage.read(ref)
            except DamagedFileError as error:
                assert self.storage.full_location(self.path) in str(error) and ref.path in str(error)
                continue
            assert data == held.data
            found.append(i)
        return found


@pytest.fixture(params=["path", "memory"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    location = str(tmp_path / "ck") if request.param == "path" else f"memory://groups/{tmp_path.name}"
    storage = CheckpointStorage.open(location, fsync=False)
    return Stored(storage, [member(p, size, ("op", "other")[p % 2]) for p, size in enumerate(SIZES)])


def test_every_part_is_read_by_its_reference_and_the_index_says_which_commit_it_is(group: Stored) -> None:
    assert group.readable() == [0, 1, 2, 3]
    assert group.index() == [(m.meta, ref) for m, ref in zip(group.members, group.refs, strict=True)]
    for ref, held in zip(group.refs, group.members, strict=True):
        assert (ref.path, ref.size, ref.within, ref.stored_in) == (held.path, len(held.data), group.path, group.path)
        assert read_changelog(group.storage.read(ref))[0] == held.meta
    assert group.path.startswith("groups/3-")


@pytest.mark.parametrize("tail", [1, 16, 17, 1000, 64 << 10])
def test_an_index_longer_than_the_first_read_is_read_whole(
    group: Stored, monkeypatch: pytest.MonkeyPatch, tail: int
) -> None:
    monkeypatch.setattr(changelog, "_TAIL_BYTES", max(tail, changelog._FOOTER_BYTES))
    assert [ref for _, ref in group.index()] == group.refs


def test_a_flipped_bit_anywhere_spoils_one_part_or_the_index(group: Stored) -> None:
    end = group.refs[-1].offset + group.refs[-1].size
    spots = [0, end - 1, end, len(group.data) - 1, *random.Random(0).sample(range(len(group.data)), 60)]
    for at in spots:
        group.replace(group.data[:at] + bytes([group.data[at] ^ 16]) + group.data[at + 1 :])
        hit = [i for i, ref in enumerate(group.refs) if ref.offset <= at < ref.offset + ref.size]
        assert group.readable() == [i for i in range(len(SIZES)) if i not in hit]
        if hit:
            assert [ref for _, ref in group.index()] == group.refs
        else:
            with pytest.raises(DamagedFileError, match=group.path):
                group.index()


def test_of_a_group_that_is_cut_the_parts_before_the_cut_are_readable(group: Stored) -> None:
    ends = [ref.offset + ref.size for ref in group.refs]
    for length in {0, 1, 10, *ends, *(end - 1 for end in ends), len(group.data) - 1, len(group.data) - 16}:
        group.replace(group.data[:length])
        assert group.readable() == [i for i, end in enumerate(ends) if end <= length]
        with pytest.raises(DamagedFileError, match=group.path):
            group.index()


def test_a_group_that_is_gone_is_named(group: Stored) -> None:
    group.storage.delete(group.path)
    with pytest.raises(MissingFileError, match=f"{group.path}, from byte 0 on {group.refs[0].path}, .* does not exist"):
        group.storage.read(group.refs[0])
    with pytest.raises(MissingFileError, match=group.path):
        read_index(group.storage, group.path, len(group.data))


def test_another_group_in_its_place_is_damage(group: Stored) -> None:
    other = Stored(group.storage, [member(p, size + 1) for p, size in enumerate(SIZES)])
    group.replace(other.data)
    assert group.readable() == []
    with pytest.raises(DamagedFileError, match="files have been exchanged"):
        group.index()


def test_a_group_of_a_newer_release_is_refused(group: Stored) -> None:
    sealed = seal(GroupIndex(group.path, (), format_version=2))
    group.replace(sealed + len(sealed).to_bytes(8, "little") + MAGIC)
    with pytest.raises(InvalidStateStoreArgument, match="has the format 2; this release reads 1"):
        group.index()
