"""Snapshots of several partitions in one object: each is read by itself, and damage of one spoils no other."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends.exceptions import DamagedFileError
from backends.formats.local_state import LocalState
from backends.formats.manifest import SnapshotDescriptor
from backends.formats.snapshot import (
    Digests,
    PreparedSnapshot,
    StoredSnapshot,
    download,
    prepare,
    read_descriptor,
    read_together,
    store_together,
)
from backends.load_watch import LoadWatch
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.requests import RequestCounts

SMALL = 1 << 20


@dataclass
class Uploads:
    """Storage, and what partitions put there."""

    root: Path
    storage: CheckpointStorage
    pool: ThreadPoolExecutor

    def prepare(
        self,
        partition: int,
        files: dict[str, bytes],
        version: int = 3,
        earlier: SnapshotDescriptor | None = None,
        small_bytes: int = SMALL,
        listed: dict[str, dict[str, int]] | None = None,
    ) -> PreparedSnapshot:
        local = self.root / f"local{partition}-{version}"
        local.mkdir()
        for name, data in files.items():
            (local / name).write_bytes(data)
        return prepare(
            self.storage,
            f"operators/op/4/{partition}/default",
            "rocksdb",
            local,
            LocalState(version, f"head of {partition}", 1),
            earlier=earlier,
            digests=Digests(),
            pool=self.pool,
            is_cancelled=lambda: False,
            small_bytes=small_bytes,
            listed=listed,
        )

    def loaded(self, stored: StoredSnapshot) -> dict[str, bytes]:
        into = self.root / f"loaded{len(list(self.root.iterdir()))}"
        into.mkdir()
        descriptor = read_descriptor(self.storage, stored.ref)
        assert descriptor == stored.descriptor
        download(self.storage, descriptor, "rocksdb", into, 2, LoadWatch())
        return {path.name: path.read_bytes() for path in into.iterdir()}

    def paths(self) -> list[str]:
        return [path for path, _ in self.storage.list()]


@pytest.fixture(params=["path", "memory"])
def uploads(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Uploads]:
    location = str(tmp_path / "ck") if request.param == "path" else f"memory://together/{tmp_path.name}"
    with ThreadPoolExecutor(2) as pool:
        yield Uploads(tmp_path, CheckpointStorage.open(location, fsync=False), pool)


def files_of(partition: int) -> dict[str, bytes]:
    return {"CURRENT": b"c%d" % partition, "1.sst": b"one of %d" % partition * 100, "2.sst": b"two of %d" % partition}


def test_small_snapshots_are_one_object_and_each_is_loaded_by_itself(uploads: Uploads) -> None:
    stored = store_together(uploads.storage, [uploads.prepare(p, files_of(p), 3 + p) for p in range(3)])
    (path,) = uploads.paths()
    assert path.startswith("groups/5-") and path.endswith(".snapshots"), "it bears the highest version"
    assert {s.ref.file.stored_in for s in stored} == {path} and {p for s in stored for p in s.descriptor.paths} == {
        path
    }
    assert [uploads.loaded(s) for s in stored] == [files_of(p) for p in range(3)]
    assert sum(s.written for s in stored) == dict(uploads.storage.list())[path]
    assert len({s.ref.file.path for s in stored}) == 3


def test_large_files_are_files_and_are_shared_and_those_in_an_object_are_not(uploads: Uploads) -> None:
    files = {"1.sst": b"x" * 300_000, "2.sst": b"small"}
    (first,) = store_together(uploads.storage, [uploads.prepare(0, files)])
    assert sorted(path.partition("/")[0] for path in uploads.paths()) == ["groups", "operators"]
    (again,) = store_together(uploads.storage, [uploads.prepare(0, files, 4, first.descriptor.without_content)])
    shared = first.descriptor.paths & again.descriptor.paths
    assert len(shared) == 1 and next(iter(shared)).startswith("operators/op/4/0/default/3-")
    assert len(uploads.paths()) == 3 and uploads.loaded(again) == files
    assert again.written < 5_000 < 300_000 < first.written


def test_one_listing_tells_of_the_files_of_all_partitions(uploads: Uploads) -> None:
    files = {"1.sst": b"x" * 300_000}
    first = store_together(uploads.storage, [uploads.prepare(p, files) for p in range(3)])
    lost = next(path for path in uploads.paths() if path.startswith("operators/op/4/1/"))
    uploads.storage.delete(lost)
    counts = RequestCounts()
    uploads.storage = CheckpointStorage.open(uploads.storage.location, fsync=False, requests=counts)
    listed: dict[str, dict[str, int]] = {}
    again = [uploads.prepare(p, files, 4, first[p].descriptor, listed=listed) for p in range(3)]
    assert [one.written for one in again] == [0, 300_000, 0]
    assert counts.read()["list"] == 1 and list(listed) == ["operators/op/4"]


def test_of_many_small_files_the_smallest_are_stored_together(uploads: Uploads) -> None:
    files = {f"{i}.sst": bytes([i]) * 100 * i for i in range(1, 6)}
    prepared = uploads.prepare(0, files, small_bytes=600)
    assert set(prepared.small) == {"1.sst", "2.sst", "3.sst"} and prepared.nbytes == 600
    (stored,) = store_together(uploads.storage, [prepared])
    assert len(uploads.paths()) == 3 and uploads.loaded(stored) == files


def test_a_single_snapshot_without_small_files_is_a_file_as_before(uploads: Uploads) -> None:
    (stored,) = store_together(uploads.storage, [uploads.prepare(0, {"CURRENT": b"c"})])
    assert uploads.paths() == [stored.ref.file.path] and stored.ref.file.within is None
    assert uploads.loaded(stored) == {"CURRENT": b"c"}


def test_damage_of_one_part_leaves_the_others_readable(uploads: Uploads) -> None:
    stored = store_together(uploads.storage, [uploads.prepare(p, files_of(p)) for p in range(3)])
    (path,) = uploads.paths()
    whole = uploads.storage.get(path)
    in_second = [f.file for f in stored[1].descriptor.files if f.file is not None]
    for ref in (*in_second, stored[1].ref.file):
        at = ref.offset + ref.size // 2
        uploads.storage.delete(path)
        uploads.storage.put_new(path, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert [uploads.loaded(stored[p]) for p in (0, 2)] == [files_of(p) for p in (0, 2)]
        with pytest.raises(DamagedFileError, match=path):
            uploads.loaded(stored[1])


def test_snapshots_in_one_object_take_one_request(uploads: Uploads) -> None:
    stored = store_together(uploads.storage, [uploads.prepare(p, files_of(p)) for p in range(3)])
    counts = RequestCounts()
    storage = CheckpointStorage.open(uploads.storage.location, fsync=False, requests=counts)
    read = read_together(storage, [s.ref.file for s in stored])
    assert counts.read()["get"] == 1
    assert [read_descriptor(storage, s.ref, read[s.ref.file.path]) for s in stored] == [s.descriptor for s in stored]
    (uploads.root / "into").mkdir()
    download(storage, stored[1].descriptor, "rocksdb", uploads.root / "into", 2, LoadWatch())
    assert counts.read()["get"] == 2
    assert {p.name: p.read_bytes() for p in (uploads.root / "into").iterdir()} == files_of(1)
    path = stored[0].ref.file.stored_in
    whole = storage.get(path)
    storage.delete(path)
    storage.put_new(path, whole[:10] + b"?" + whole[11:-3])  # the first part differs, and the last one is cut
    sound = [f.file for s in stored for f in (*s.descriptor.files, s.ref) if f.file is not None]
    assert set(read_together(storage, sound)) == {f.path for f in sound[1:-1]}, (
        "of the first and the last part bytes differ"
    )
    storage.delete(path)
    assert read_together(storage, sound) == {}


def test_only_whole_snapshots_of_an_object_that_was_cut_are_sound(uploads: Uploads) -> None:
    stored = store_together(uploads.storage, [uploads.prepare(p, files_of(p)) for p in range(2)])
    (path,) = uploads.paths()
    whole = uploads.storage.get(path)
    last = stored[0].ref.file
    for size, sound in ((len(whole), 2), (len(whole) - 1, 1), (last.offset + last.size, 1), (last.offset, 0)):
        uploads.storage.delete(path)
        uploads.storage.put_new(path, whole[:size])
        sizes = dict(uploads.storage.list())
        assert [s.ref.file.is_in(sizes) and s.descriptor.is_complete(sizes) for s in stored] == [
            i < sound for i in (0, 1)
        ]
    assert not stored[0].ref.file.is_in({})
