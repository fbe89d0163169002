"""The bytes of a version, over snapshots, changelogs and earlier layouts."""

from __future__ import annotations

from backends.formats.manifest import Manifest, OperatorEntry, PartitionEntry, SnapshotRef
from backends.formats.manifest_chain import delta_bytes, full_bytes
from backends.storage.locations import FileRef


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
