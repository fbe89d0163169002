"""``verify_version`` names each damaged file, and says rightly whether the version can still be loaded.

The oracle is loading itself, as a host does it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.exceptions import MissingFileError, StateStoreError, VersionNotFoundError
from backends.formats.changelog import GroupMember, group_path, read_changelog, write_changelog, write_group
from backends.formats.manifest import Manifest, OperatorEntry, seal, unseal
from backends.storage.locations import digest
from coordinator_actor.reading.stored_files import opened_partition, stored_files
from coordinator_actor.reading.stored_versions import StatePlace, StateVersions
from coordinator_actor.reading.verification import Verification, verify_version
from tests.coordinator_actor.savepoints.savepoint_streams import Stream
from tests.effort import only_thorough

VERSION = 6


def versions_at(root: Path) -> StateVersions:
    return StateVersions.look(StatePlace(str(root / "ck"), str(root / "ck/statestore")))


def verified(root: Path, version: int | None = None, **kwargs: Any) -> Verification:
    return verify_version(versions_at(root), version, **kwargs)


@pytest.fixture(scope="module", params=[only_thorough("file"), "rocksdb"])  # RocksDB's has more kinds of files
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six versions in two partitions, with snapshots of the second and the fourth; older versions are not kept."""
    root = tmp_path_factory.mktemp("verified")
    s = Stream(root, hosts=1, backend=request.param, min_versions_to_retain=2, maintenance_interval=1.0)
    for first, last in ((0, 2), (2, 4), (4, VERSION - 1)):
        s.batches(first, last)
        s.heartbeat()
        if last < VERSION - 1:
            for instance in s.hosts[0].cache.all():
                s.hosts[0].maintenance.upload_snapshots([instance])
        s.world.now += 2
        s.c.maintain()
    # The next manifest says what is kept, and then the rest goes.
    s.batch(VERSION - 1)
    s.world.now += 2
    s.c.maintain()
    s.close()
    assert not list((root / "ck").rglob("1-*.changelog"))
    return root


@pytest.fixture
def damaged(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """A copy of the checkpoint with a file flipped, cut or removed."""

    def damage(path: str, how: str) -> Path:
        root = tmp_path / "copy"
        shutil.copytree(checkpoint / "ck", root / "ck")
        file = root / "ck/statestore" / path
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        if how == "removed":
            file.unlink()
        else:
            file.write_bytes(data if how == "flipped" else data[:-1])
        return root

    return damage


def loads(root: Path, partition: int) -> bool:
    versions = versions_at(root)
    piece = versions.reading("op", VERSION).pieces[partition]
    try:
        with opened_partition(versions.place, piece):
            return True
    except StateStoreError:
        return False


def needed(root: Path) -> list[str]:
    found = stored_files(versions_at(root), VERSION)
    return [f.path for f in found if f.kind in ("changelog", "snapshot", "snapshot file", "snapshots")]


def test_a_sound_version_is_sound(checkpoint: Path) -> None:
    found = verified(checkpoint, reads_rows=True)
    assert found.is_sound and found.version == VERSION
    assert found.files >= len(needed(checkpoint)), "descriptors and small files of snapshots share one object"
    assert found.nbytes == sum((checkpoint / "ck/statestore" / p).stat().st_size for p in needed(checkpoint))
    assert found.rows == 30


def test_each_damaged_file_is_named_and_loading_agrees(
    checkpoint: Path, damaged: Callable[[str, str], Path], tmp_path: Path
) -> None:
    outcomes = set()
    for i, path in enumerate(needed(checkpoint)):
        root = damaged(path, ("flipped", "cut", "removed")[i % 3])
        found = verified(root)
        assert [d.path for d in found.damages] == [path]
        assert path in found.damages[0].what
        partition = found.damages[0].partition
        assert found.lost == (() if loads(root, partition) else (f"op/{partition}",))
        outcomes.add(found.lost == ())
        shutil.rmtree(root)
    assert outcomes == {True, False}


@pytest.mark.parametrize("how", ["flipped", "removed"])
def test_a_damaged_schema_hides_no_other_damage(
    damaged: Callable[[str, str], Path], checkpoint: Path, how: str
) -> None:
    entry = versions_at(checkpoint).operators(VERSION)["op"]
    schema = f"schemas/{entry.schema_id}.json"
    root = damaged(schema, how)
    alone = verified(root)
    assert [(d.path, d.operator, d.partition) for d in alone.damages] == [(schema, "op", None)]
    assert schema in alone.damages[0].what and alone.lost == () and not alone.is_sound
    changelogs = [p for p in needed(checkpoint) if p.endswith(".changelog")]
    for path in changelogs:
        (root / "ck/statestore" / path).unlink()
    found = verified(root, reads_rows=True)
    assert {d.path for d in found.damages} >= {schema, *changelogs}
    assert found.lost == ("op/0", "op/1")


def test_two_damaged_files_of_a_partition(checkpoint: Path, tmp_path: Path) -> None:
    if any((checkpoint / "ck").rglob("*.sst")):
        return  # the other backend shows it
    paths = [p for p in needed(checkpoint) if "/2/0/default/" in p]
    outcomes = set()
    for i, one in enumerate(paths):
        for other in paths[i + 1 :]:
            root = tmp_path / "copy"
            shutil.copytree(checkpoint / "ck", root / "ck")
            for path in (one, other):
                (root / "ck/statestore" / path).write_bytes(b"")
            found = verified(root)
            # A part of a snapshot is not looked for where its descriptor is damaged.
            assert {d.path for d in found.damages} <= {one, other} and found.damages
            assert (found.lost == ()) == loads(root, 0), (one, other)
            outcomes.add(found.lost == ())
            shutil.rmtree(root)
    assert outcomes == {True, False}


@pytest.mark.parametrize("changed", [{"partition": 1}, {"base": "operators/op/2/0/default/4-other.changelog"}])
def test_files_that_were_exchanged_are_damage(checkpoint: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    """A sound changelog, named by a sound manifest, that is of another partition or follows upon another one."""
    shutil.copytree(checkpoint / "ck", tmp_path / "ck")
    base = tmp_path / "ck/statestore"
    for path in (base / "manifests").iterdir():
        manifest = unseal(path.read_bytes(), Manifest, path.name)
        if manifest.version == 5:
            entries = manifest.operators["op"].partitions
            file = base / entries.head(0)
            meta, changes = read_changelog(file.read_bytes())
            data = write_changelog(changes, msgspec.structs.replace(meta, **changed))
            file.write_bytes(data)
            entries.stored.size[0], entries.stored.digest[0] = len(data), digest(data)
            path.write_bytes(seal(manifest))
    found = verified(tmp_path)
    assert ["exchanged" in d.what for d in found.damages] == [True] and found.lost == ("op/0",)


def grouped(checkpoint: Path, root: Path) -> Path:
    """Copy the checkpoint with the changelogs of version 5 in one object; return the object's path."""
    shutil.copytree(checkpoint / "ck", root / "ck")
    base = root / "ck/statestore"
    object_path = group_path(5)
    for path in (base / "manifests").iterdir():
        manifest = unseal(path.read_bytes(), Manifest, path.name)
        if manifest.version == 5:
            held = manifest.operators["op"]
            files = [base / held.partitions.head(p) for p in held.partitions]
            members = [
                GroupMember(read_changelog(f.read_bytes())[0], held.partitions.head(p), f.read_bytes())
                for p, f in enumerate(files)
            ]
            data, refs = write_group(object_path, members)
            entries = {p: msgspec.structs.replace(held.partitions[p], changelog=ref) for p, ref in enumerate(refs)}
            (base / object_path).parent.mkdir(exist_ok=True)
            (base / object_path).write_bytes(data)
            operator = OperatorEntry.of(2, held.schema_id, held.backend, entries)
            path.write_bytes(seal(msgspec.structs.replace(manifest, operators={"op": operator})))
            for file in files:
                file.unlink()
    return base / object_path


def test_changelogs_in_one_object(checkpoint: Path, tmp_path: Path) -> None:
    file = grouped(checkpoint, tmp_path)
    name = f"groups/{file.name}"
    whole = file.read_bytes()
    assert verified(tmp_path).is_sound
    (described,) = (f for f in stored_files(versions_at(tmp_path)) if f.path == name)
    assert (described.kind, described.kept_by) == ("changelogs", ("version 5",))
    assert name in {f.path for f in stored_files(versions_at(tmp_path), VERSION)}

    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    found = verified(tmp_path)
    assert [(d.path, d.partition) for d in found.damages] == [(name, 0)] and found.lost == ("op/0",)
    # Without a manifest the index locates the parts. With one, all can be read.
    file.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    found = verified(tmp_path)
    assert [d.path for d in found.damages] == [name] and found.lost == ()
    file.unlink()
    found = verified(tmp_path)
    assert {d.path for d in found.damages} == {name} and found.lost == ("op/0", "op/1")


def test_older_versions_can_be_verified(checkpoint: Path) -> None:
    assert verified(checkpoint, 3).files < verified(checkpoint).files
    with pytest.raises(VersionNotFoundError, match="versions 2 to 6"):
        verified(checkpoint, 7)


def test_unreadable_rows_are_damage(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file has the bytes that were written, and they cannot be loaded: only reading the rows shows that."""
    from backends.partition.partition_state import PartitionState

    def fail(self: PartitionState, *args: Any, **kwargs: Any) -> None:
        raise MissingFileError("no")

    monkeypatch.setattr(PartitionState, "load", fail)
    assert verified(checkpoint).is_sound
    found = verified(checkpoint, reads_rows=True)
    assert found.lost == ("op/0", "op/1") and [d.what for d in found.damages] == ["no", "no"]


def test_progress_counts_files(checkpoint: Path) -> None:
    heard: list[tuple[int, int]] = []
    found = verified(checkpoint, progress=lambda done, total: heard.append((done, total)))
    assert [done for done, _ in heard] == list(range(1, found.files + 1)) and heard[-1][1] == found.files


def test_a_rescaled_version_is_read_from_its_earlier_layout(tmp_path: Path) -> None:
    s = Stream(tmp_path, n=2, hosts=1)
    s.batches(0, 2)
    s.c.deactivate_instances("run1")
    s.close()
    wider = Stream(tmp_path, n=3, hosts=1, at=s.at, run="run2")
    wider.batch(2)
    wider.close()
    found = verified(tmp_path, reads_rows=True)
    assert (found.is_sound, found.version, found.rows) == (True, 3, len(wider.at[3]))
    old = next((tmp_path / "ck/statestore/operators/op/2/1").rglob("1-*.changelog"))
    old.unlink()
    found = verified(tmp_path)
    assert [d.partition for d in found.damages] == [1]
    assert set(found.lost) == {f"op/{p}" for p in range(3) if not _loads(tmp_path, p)} != set()


def _loads(root: Path, partition: int) -> bool:
    versions = versions_at(root)
    try:
        with opened_partition(versions.place, versions.reading("op", 3).pieces[partition]):
            return True
    except StateStoreError:
        return False
