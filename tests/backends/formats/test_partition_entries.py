"""Partitions of a manifest, kept by columns: reading them back, and damage.

The bytes of a version, over snapshots, changelogs and earlier layouts.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.exceptions import DamagedFileError
from backends.formats.manifest import (
    Manifest,
    OperatorEntry,
    PartitionEntries,
    PartitionEntry,
    SnapshotRef,
    StoredEntries,
    seal,
    unseal,
)
from backends.formats.manifest_chain import delta_bytes, full_bytes
from backends.storage.locations import FileRef


def entry(p: int, name: str = "1-x.changelog", n: int = 4, snapshots: tuple[SnapshotRef, ...] = ()) -> PartitionEntry:
    return PartitionEntry(f"try{p}", FileRef(f"operators/op/{n}/{p}/default/{name}", 10 + p, f"d{p}"), snapshots)


REF = SnapshotRef(1, "head", FileRef("operators/op/4/2/default/1-y.snapshot", 5, "d"))


@pytest.mark.parametrize("numbers", [[], [0], [0, 1, 2, 3], [2], [1, 3], [3, 0, 1]])
def test_entries_round_trip(numbers):
    given = {p: entry(p, f"1-{p}.changelog", snapshots=(REF,) if p == 2 else ()) for p in numbers}
    packed = PartitionEntries.of(given)
    assert dict(packed) == given and list(packed) == sorted(numbers) and len(packed) == len(numbers)
    assert [packed.head(p) for p in packed] == [given[p].changelog.path for p in sorted(numbers)]
    assert dict(packed.snapshots) == ({2: (REF,)} if 2 in numbers else {})
    manifest = Manifest(1, None, 1, 1, "run", 0, {"op": OperatorEntry(4, "s", "file", packed)})
    again = unseal(seal(manifest), Manifest, "x")
    assert again == manifest and dict(again.operators["op"].partitions) == given
    assert 9 not in packed
    for ask in (packed.head, packed.__getitem__):
        with pytest.raises(KeyError):
            ask(9)
    assert PartitionEntries.of(packed) is packed


def test_entries_name_the_groups_of_their_changelogs():
    given = {p: entry(p, f"1-{p}.changelog") for p in (1, 2, 4, 5)}
    for p, group, offset in ((1, "groups/1-b.changelogs", 40), (2, "groups/1-a.changelogs", 0)):
        given[p] = msgspec.structs.replace(
            given[p], changelog=msgspec.structs.replace(given[p].changelog, within=group, offset=offset)
        )
    given[5] = msgspec.structs.replace(
        given[5], changelog=msgspec.structs.replace(given[5].changelog, within="groups/1-b.changelogs", offset=7)
    )
    packed = PartitionEntries.of(given)
    assert dict(packed) == given
    assert [packed.stored_in(p) for p in packed] == [given[p].changelog.stored_in for p in (1, 2, 4, 5)]
    assert packed.stored_in(4) == packed.head(4) and packed.stored_in(5) == packed.stored_in(1) != packed.head(1)
    with pytest.raises(KeyError):
        packed.stored_in(3)
    manifest = Manifest(1, None, 1, 1, "run", 0, {"op": OperatorEntry(6, "s", "file", packed)})
    again = unseal(seal(manifest), Manifest, "x").operators["op"].partitions
    assert dict(again) == given and seal(manifest).count(b"1-b.changelogs") == 1
    more = packed.with_snapshots({1: (REF,)})
    assert more[1].changelog == given[1].changelog and more[4].changelog.within is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"group": [0]}, "differ in length"),
        ({"offset": None}, "differ in length"),
        ({"group": [0, 1]}, "1 groups"),
        ({"group": [-2, 0]}, "1 groups"),
    ],
)
def test_groups_that_do_not_fit_the_columns_are_damage(changes, match):
    file = msgspec.structs.replace(entry(0).changelog, within="groups/1-a.changelogs", offset=0)
    packed = PartitionEntries.of({0: PartitionEntry("try0", file), 1: entry(1)})
    with pytest.raises(ValueError, match=match):
        PartitionEntries(msgspec.structs.replace(packed.stored, **changes))


def test_entries_of_a_release_without_groups_are_read():
    packed = PartitionEntries.of({p: entry(p) for p in range(2)})
    manifest = Manifest(1, None, 1, 1, "run", 0, {"op": OperatorEntry(2, "s", "file", packed)})
    text = seal(manifest).split(b"\n")[0]
    before = text.replace(b',"groups":[],"group":null,"offset":null', b"")
    assert before != text
    assert unseal(before + b"\n" + seal_digest(before), Manifest, "x") == manifest


def test_entries_that_differ_are_not_equal():
    one = PartitionEntries.of({0: entry(0), 1: entry(1)})
    assert one == PartitionEntries.of({1: entry(1), 0: entry(0)})
    assert one != PartitionEntries.of({0: entry(0)})
    assert one != PartitionEntries.of({0: entry(0), 1: entry(1, "1-other.changelog")})


def test_changelogs_at_another_place_are_refused():
    for wrong in (entry(1, n=3), entry(2)):
        with pytest.raises(ValueError, match="is not in"):
            PartitionEntries.of({0: entry(0), 1: wrong})
    with pytest.raises(ValueError, match="not a changelog of partition 1"):
        PartitionEntries.of({1: entry(2)})


def test_snapshots_are_added_to_those_that_are_named():
    packed = PartitionEntries.of({p: entry(p, snapshots=(REF,) if p == 2 else ()) for p in range(4)})
    other = msgspec.structs.replace(REF, version=3)
    more = packed.with_snapshots({2: (other,), 0: (other,), 1: (), 9: (other,)})
    assert dict(more.snapshots) == {0: (other,), 2: (REF, other)}
    assert dict(packed.snapshots) == {2: (REF,)}
    assert {p: msgspec.structs.replace(e, snapshots=()) for p, e in more.items()} == {p: entry(p) for p in range(4)}


@pytest.mark.parametrize("column", ["attempt", "changelog", "size", "digest", "partition"])
def test_columns_that_do_not_fit_together_are_damage(column):
    packed = PartitionEntries.of({p: entry(p) for p in (1, 2, 3)})
    columns: dict[str, Any] = {column: getattr(packed.stored, column)[:2]}
    short = msgspec.structs.replace(packed.stored, **columns)
    with pytest.raises(ValueError, match="differ in length"):
        PartitionEntries(short)
    manifest = Manifest(1, None, 1, 1, "run", 0, {"op": OperatorEntry(4, "s", "file", packed)})
    text = seal(manifest).split(b"\n")[0]
    cut = text.replace(msgspec.json.encode(packed.stored), msgspec.json.encode(short))
    assert cut != text
    sealed = cut + b"\n" + seal_digest(cut)
    with pytest.raises(DamagedFileError, match=r"the-file.*differ in length"):
        unseal(sealed, Manifest, "the-file")


def seal_digest(content: bytes) -> bytes:
    from backends.storage.locations import digest

    return digest(content).encode() + b"\n"


def test_the_directory_is_written_once():
    packed = PartitionEntries.of({p: entry(p) for p in range(4)})
    assert packed.stored == StoredEntries(
        "operators/op/4/*/default",
        ["try0", "try1", "try2", "try3"],
        ["1-x.changelog"] * 4,
        [10, 11, 12, 13],
        ["d0", "d1", "d2", "d3"],
    )
    manifest = Manifest(1, None, 1, 1, "run", 0, {"op": OperatorEntry(4, "s", "file", packed)})
    assert seal(manifest).count(b"operators/op") == 1


def log_path(n: int, p: int, version: int) -> str:
    return f"operators/op/{n}/{p}/default/{version}-a.changelog"


def snapshot(n: int, p: int, version: int) -> SnapshotRef:
    path = f"operators/op/{n}/{p}/default/{version}-b.snapshot"
    return SnapshotRef(version, log_path(n, p, version), FileRef(path, 1, "d"))


def manifest(version: int, sizes: list[int], *snapshots: tuple[int, SnapshotRef]) -> Manifest:
    n = len(sizes)
    entries = {
        p: PartitionEntry("t", FileRef(log_path(n, p, version), size, "d"), tuple(s for q, s in snapshots if q == p))
        for p, size in enumerate(sizes)
    }
    return Manifest(version, version - 1, version, 1, "run", 0, {"op": OperatorEntry.of(n, "s", "rocksdb", entries)})


def test_the_newest_snapshot_of_a_partition_counts_and_the_changes_after_it() -> None:
    chain = {
        1: manifest(1, [1, 10]),
        2: manifest(2, [2, 20], (0, snapshot(2, 0, 1))),
        3: manifest(3, [4, 40], (0, snapshot(2, 0, 2))),
        4: manifest(4, [8, 80]),
    }
    sizes = {1: 1000, 2: 2000}
    assert delta_bytes(chain[4]) == 88
    assert full_bytes(chain, 4, lambda ref: sizes[ref.version]) == 2000 + 4 + 8 + 10 + 20 + 40 + 80
    # A manifest may name a snapshot of a version below its own.
    assert full_bytes(chain, 1, lambda ref: sizes[ref.version]) == 1000 + 10


def test_a_snapshot_of_unknown_size_makes_the_sum_unknown() -> None:
    chain = {1: manifest(1, [1, 10], (0, snapshot(2, 0, 1)))}
    assert full_bytes(chain, 1, lambda ref: None) is None


def test_an_earlier_layout_counts_until_every_partition_has_its_own_snapshot() -> None:
    chain = {
        1: manifest(1, [1, 10]),
        2: manifest(2, [100, 200, 300]),
        3: manifest(3, [1000, 2000, 3000], (0, snapshot(3, 0, 2))),
    }
    assert full_bytes(chain, 3, lambda ref: 7) == 11 + 7 + 200 + 300 + 6000
    chain[3] = manifest(3, [1000, 2000, 3000], *((p, snapshot(3, p, 2)) for p in range(3)))
    assert full_bytes(chain, 3, lambda ref: 7) == 3 * 7 + 6000
