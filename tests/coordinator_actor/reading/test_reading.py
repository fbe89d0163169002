"""Reading state from its storage alone: checkpoints made by the real coordinator and hosts, without Ray and Spark."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from backends.encoding.keys import decode_keys
from backends.encoding.values import decode_values
from backends.exceptions import (
    DamagedFileError,
    InvalidStateStoreArgument,
    MissingFileError,
    StateStoreError,
    VersionNotFoundError,
)
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.reading import stored_files
from coordinator_actor.reading.stored_files import changes, opened_partition
from coordinator_actor.reading.stored_versions import Piece, Reading, StateVersions, find_state
from coordinator_actor.reading.verification import verify_version
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from tests.coordinator_actor.savepoints.savepoint_streams import KEYS, VALUES, Rows, Stream, run_and_clean

Changed = list[tuple[int, int, int | None, int | None]]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[..., Stream]]:
    made: list[Stream] = []

    def make(batches: int = 2, root: Path | None = None, **kwargs: Any) -> Stream:
        one = Stream(root or tmp_path / str(len(made)), **kwargs)
        made.append(one)
        one.batches(max(one.at), max(one.at) + batches)
        return one

    yield make
    for one in made:
        one.close()


def location(s: Stream) -> str:
    return str(s.world.root / "ck")


def look(s: Stream) -> StateVersions:
    return StateVersions.look(find_state(location(s)))


def rows_of(reading: Reading) -> Rows:
    found: Rows = {}
    for piece in reading.pieces:
        with opened_partition(reading.place, piece) as state:
            for batch in stored_files.scan_family(state, "default"):
                keys = decode_keys(batch.column(0), KEYS).column(0).to_pylist()
                assert not found.keys() & set(keys)
                found.update(zip(keys, decode_values(batch.column(1), VALUES).column(0).to_pylist(), strict=True))
    return found


def numbers(values: pa.Array) -> list[int | None]:
    decoded = decode_values(values, VALUES).column(0).to_pylist()
    return [n if there else None for n, there in zip(decoded, values.is_valid().to_pylist(), strict=True)]


def changes_of(reading: Reading) -> Changed:
    found: Changed = []
    for piece in reading.pieces:
        for version, families in changes(reading.place, piece, ["default"]):
            pairs = families["default"]
            keys = decode_keys(pairs.keys, KEYS).column(0).to_pylist()
            found += zip([version] * len(keys), keys, numbers(pairs.before), numbers(pairs.after), strict=True)
    return sorted(found, key=lambda change: change[:2])


def expected_changes(at: dict[int, Rows], first: int, last: int) -> Changed:
    return [
        (v, k, at[v - 1].get(k), at[v].get(k))
        for v in range(first + 1, last + 1)
        for k in sorted(at[v - 1].keys() | at[v].keys())
        if at[v - 1].get(k) != at[v].get(k)
    ]


def stop(s: Stream) -> None:
    s.c.deactivate_instances(s.registration.run_id)
    s.close()


def rescaled(stream: Callable[..., Stream]) -> Stream:
    """A query that was restarted with other partition counts and backends, two batches each."""
    s = stream(2, n=2, backend="file")
    for run, n, backend in (("run2", 3, "file"), ("run3", 1, "rocksdb"), ("run4", 1, "file")):
        stop(s)
        s = stream(2, s.world.root, n=n, backend=backend, run=run, at=s.at)
    return s


def files(s: Stream) -> dict[str, tuple[int, int]]:
    found = {}
    for path in (s.world.root / "ck").rglob("*"):
        stat = path.stat()
        found[str(path)] = (stat.st_mtime_ns, stat.st_size if path.is_file() else 0)
    return found


def test_every_version_of_every_layout_can_be_read(stream):
    s = rescaled(stream)
    versions = look(s)
    assert versions.readable == range(9)
    layouts = set()
    for version in versions.readable:
        reading = versions.reading("op", version)
        assert reading.version == version
        assert rows_of(reading) == s.at[version], version
        layouts |= {(len(reading.pieces), piece.backend) for piece in reading.pieces}
    assert layouts == {(2, "file"), (3, "file"), (1, "rocksdb"), (1, "file")}
    assert versions.reading("op").version == 8


def test_changes_between_two_versions_whatever_layouts_are_in_between(stream):
    s = rescaled(stream)
    versions = look(s)
    for first, last in ((0, 8), (0, 1), (2, 4), (3, 6), (5, 5)):
        found = changes_of(versions.reading_of_changes("op", first, last))
        assert found == expected_changes(s.at, first, last), (first, last)


def test_removed_keys_are_changes(stream):
    s = stream(2)
    s.batch(2, {2: None, 3: 1, 50: None})
    found = changes_of(look(s).reading_of_changes("op", 2))
    assert found == [(3, 2, s.at[2][2], None), (3, 3, s.at[2][3], 1), (3, 50, None, None)]


def test_only_what_spark_has_committed_is_read(stream):
    s = stream(2)
    s.begin(2, dict.fromkeys(range(40), -1))  # prepared: all have acknowledged
    assert max(s.log().chain()) == 3
    versions = look(s)
    assert versions.readable == range(3)
    assert rows_of(versions.reading("op")) == s.at[2]
    with pytest.raises(VersionNotFoundError, match=r"Version 3 .* there are the versions 0 to 2"):
        versions.resolve(3)


def test_versions_that_are_not_there_are_named(stream):
    s = stream(2)
    versions = look(s)
    with pytest.raises(VersionNotFoundError, match=r"Version 9 .* versions 0 to 2.*after batch N"):
        versions.reading("op", 9)
    with pytest.raises(InvalidStateStoreArgument, match="'2'"):
        versions.reading("op", "2")
    with pytest.raises(InvalidStateStoreArgument, match="from_version=2 is above to_version=1"):
        versions.reading_of_changes("op", 2, 1)
    with pytest.raises(InvalidStateStoreArgument, match=r"Operator 'other' does not exist .* there are 'op'"):
        versions.reading("other")


def test_before_the_first_batch_there_is_the_empty_version_or_none(stream):
    s = stream(0)
    with pytest.raises(VersionNotFoundError, match="has no completed version"):
        look(s).reading("op")
    s.begin(0, {1: 1})
    assert rows_of(look(s).reading("op")) == {}
    s.commit(0)
    assert rows_of(look(s).reading("op")) == {1: 1}
    assert rows_of(look(s).reading("op", 0)) == {}


def test_reading_leaves_no_trace(stream):
    s = rescaled(stream)
    before = files(s)
    versions = look(s)
    for version in (0, 3, 8):
        rows_of(versions.reading("op", version))
    changes_of(versions.reading_of_changes("op", 1, 7))
    assert files(s) == before
    s.batch(8)
    assert rows_of(look(s).reading("op")) == s.at[9], "and the query continues"


def test_a_reading_can_be_sent_to_another_process(stream):
    s = stream(2)
    reading = pickle.loads(pickle.dumps(look(s).reading("op")))
    assert rows_of(reading) == s.at[2]


# -- retention ---------------------------------------------------------------------------------


def kept(stream: Callable[..., Stream], batches: int) -> Stream:
    s: Stream = stream(0, hosts=0, min_versions_to_retain=2, maintenance_interval=1.0)
    for i in range(2):
        s.add_host(i, deltas_per_snapshot=2)
    run_and_clean(s, 0, batches)
    return s


def test_after_retention_kept_versions_can_be_read_and_others_are_named(stream):
    s = kept(stream, 12)
    versions = look(s)
    oldest = versions.readable[0]
    assert 4 < oldest < 10 and versions.readable[-1] == 12
    for version in versions.readable:
        assert rows_of(versions.reading("op", version)) == s.at[version]
    assert changes_of(versions.reading_of_changes("op", oldest)) == expected_changes(s.at, oldest, 12)
    for gone in (0, 1, oldest - 1):
        with pytest.raises(VersionNotFoundError, match=f"versions {oldest} to 12"):
            versions.reading("op", gone)
    with pytest.raises(VersionNotFoundError, match=f"Version {oldest - 1} .* versions {oldest} to 12"):
        versions.reading_of_changes("op", oldest - 1)


def test_a_version_that_is_removed_before_it_is_read_is_said_to_be(stream):
    s = kept(stream, 6)
    reading = look(s).reading("op")
    feed = look(s).reading_of_changes("op", look(s).readable[0])
    assert rows_of(reading) == s.at[6]
    run_and_clean(s, 6, 20)
    oldest = look(s).readable[0]
    assert oldest > 6
    with pytest.raises(
        VersionNotFoundError, match=f"Version 6 .* removed while it was read: now versions {oldest} to 20"
    ):
        rows_of(reading)
    with pytest.raises(VersionNotFoundError, match="removed while it was read"):
        changes_of(feed)
    assert rows_of(look(s).reading("op")) == s.at[20]


def test_changelogs_removed_while_the_changes_are_read_are_reported_as_gone(stream):
    s = kept(stream, 6)
    reading = look(s).reading_of_changes("op", look(s).readable[0])
    feed = changes(reading.place, reading.pieces[0], ["default"])
    next(feed)
    run_and_clean(s, 6, 20)
    with pytest.raises(VersionNotFoundError, match="removed while it was read"):
        list(feed)


def test_manifests_removed_while_they_are_read_are_listed_again(stream):
    """The listing is old when the files are read: newer manifests exist, and those they let go of are gone."""
    s = kept(stream, 6)
    listed: list[str] = []

    class Slow(CheckpointStorage):
        def list(self, prefix: str = "", *, after: str | None = None) -> list[tuple[str, int]]:
            found = super().list(prefix, after=after)
            if prefix == "manifests/" and not listed:
                listed.extend(path for path, _ in found)
                run_and_clean(s, 6, 20)
            return found

    def open_slow(place: str, options: Any) -> CheckpointStorage:
        return Slow.open(place, options)

    versions = StateVersions.look(find_state(location(s)), open_storage=open_slow)
    assert listed and versions.readable[0] > 6, "those that it began with were gone"
    assert rows_of(versions.reading("op")) == s.at[20]


def test_a_file_that_is_missing_from_a_kept_version_is_damage(stream):
    s = stream(3)
    reading = look(s).reading("op")
    next((s.world.root / "ck/statestore/operators/op/2/0/default").glob("2-*.changelog")).unlink()
    with pytest.raises(MissingFileError, match="Restore it from a copy"):
        rows_of(reading)


def test_damage_is_named_and_never_read(stream):
    s = stream(3)
    path = next((s.world.root / "ck/statestore/operators/op/2/1/default").glob("3-*.changelog"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match=path.name):
        rows_of(look(s).reading("op"))
    assert rows_of(look(s).reading("op", 2)) == s.at[2]


@pytest.mark.parametrize("harm", ["missing", "cut", "changed"])
def test_each_file_that_an_error_names_is_restored_from_a_copy_and_all_is_well(stream, tmp_path, harm):
    s = stream(0, min_versions_to_retain=3)
    run_and_clean(s, 0, 3)
    for host in s.hosts.values():
        host.maintenance.upload_snapshots(list(host.cache.all()))
    s.heartbeat()
    run_and_clean(s, 3, 5)
    s.close()
    state = s.world.root / "ck/statestore"
    copy = shutil.copytree(state, tmp_path / "copy")
    named = 0

    def check() -> None:
        """Start the query again, and read all versions."""
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "harmed", state)
        refusal = s.coordinator().register_query(msgspec.structs.replace(s.registration, run_id="again")).refusal
        assert refusal is None, refusal
        versions = look(s)
        for version in versions.readable:
            assert rows_of(versions.reading("op", version)) == s.at[version]

    def named_by_verification() -> str:
        shutil.rmtree(state)
        shutil.copytree(tmp_path / "harmed", state)
        try:
            versions = StateVersions.look(find_state(location(s)), passes_over_damage=True)
            return str(verify_version(versions).damages)
        except StateStoreError as error:
            return str(error)

    for file in sorted(path.relative_to(copy) for path in copy.rglob("*") if path.is_file()):
        content = (copy / file).read_bytes()
        shutil.rmtree(tmp_path / "harmed", ignore_errors=True)
        shutil.copytree(copy, tmp_path / "harmed")
        harmed = tmp_path / "harmed" / file
        if harm == "missing":
            harmed.unlink()
        elif harm == "cut":
            harmed.write_bytes(content[:-1])
        else:
            middle = len(content) // 2
            harmed.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        try:
            check()
        except (DamagedFileError, MissingFileError) as error:
            before = re.search(r"a file before (\S+) by its name", str(error))
            if before is None:
                assert str(file) in str(error), error
            else:  # only its id is known: it is the file that the copy has there, and the checkpoint has not
                names = [path.name for path in (copy / "manifests").iterdir() if path.name < Path(before[1]).name]
                assert [name for name in names if not (state / "manifests" / name).exists()] == [file.name]
            assert re.search(r"Restore (it|them) from a copy", str(error)), error
            assert (before[0] if before is not None else file.name) in named_by_verification(), file
            shutil.copy(copy / file, harmed)
            check()
            named += 1
    assert named > 4


@pytest.mark.parametrize("remedy", ["Name one of them with version=", "start the query"])
def test_a_committed_version_without_a_manifest_is_recovered_or_an_older_one_is_named(stream, remedy):
    s = stream(3)
    max((s.world.root / "ck/statestore/manifests").iterdir()).unlink()  # the coordinator died before it wrote it
    with pytest.raises(VersionNotFoundError) as refused:
        look(s).reading("op")
    said = str(refused.value)
    named = re.search(
        r"the versions 0 to (\d+)\. Name one of them with version=, or start the query: it recovers", said
    )
    assert named is not None, said
    if remedy == "start the query":
        answer = s.coordinator().register_query(msgspec.structs.replace(s.registration, run_id="again"))
        assert (answer.refusal, answer.completed_version) == (None, 3)
        assert rows_of(look(s).reading("op")) == s.at[3]
    else:
        assert rows_of(look(s).reading("op", int(named[1]))) == s.at[2]


# -- where it is -------------------------------------------------------------------------------


def test_state_at_another_location_is_found_by_the_querys_id(stream, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    s = stream(2, state_location=str(elsewhere / "q"))
    with pytest.raises(MissingFileError, match=r"ck/statestore: there is no query.json.*state_location="):
        find_state(location(s))
    with pytest.raises(MissingFileError, match="metadata does not exist"):
        find_state(location(s), str(elsewhere))
    (s.world.root / "ck/metadata").write_text(json.dumps({"id": "q"}))
    place = find_state(f"file:{location(s)}/", f"{elsewhere}/")
    assert rows_of(StateVersions.look(place).reading("op")) == s.at[2]


def test_state_next_to_sparks_files_is_found_although_the_session_says_elsewhere(stream, tmp_path):
    s = stream(2)
    (s.world.root / "ck/metadata").write_text(json.dumps({"id": "q"}))
    assert find_state(location(s), str(tmp_path / "elsewhere")) == find_state(location(s))


def test_a_restored_checkpoint_is_read_from_its_first_version(stream, tmp_path):
    s = stream(3)
    s.trigger()
    path = s.finish()
    behind, anew = tmp_path / "behind", tmp_path / "anew"
    restore_into_checkpoint(path, str(behind))
    restore_into_checkpoint(path, str(anew), state_only=True, num_partitions=3)
    for place, version in ((behind, 3), (anew, 0)):
        versions = StateVersions.look(find_state(str(place)))
        assert versions.readable == range(version, version + 1)
        assert rows_of(versions.reading("op")) == s.at[3]
        with pytest.raises(VersionNotFoundError, match=f"there is version {version}"):
            versions.reading("op", version + 1)


def test_a_new_query_that_began_with_a_state_has_changes_from_its_version_0_on(stream, tmp_path):
    s = stream(3)
    s.trigger()
    anew = tmp_path / "anew"
    restored = restore_into_checkpoint(s.finish(), str(anew / "ck"), state_only=True, num_partitions=2)
    after = stream(2, anew, at={0: s.at[3]}, query_id=restored.query_id)
    assert [rows_of(look(after).reading("op", v)) for v in range(3)] == [after.at[v] for v in range(3)]
    found = changes_of(look(after).reading_of_changes("op", 0))
    assert [c for c in found if c[2] != c[3]] == expected_changes(after.at, 0, 2)


def test_commits_without_a_manifest_are_not_passed_over(stream):
    s = stream(2)
    s.world.plan_spark(2)
    s.world.commit_spark(2)
    versions = look(s)
    with pytest.raises(VersionNotFoundError, match=r"the last completed version is 3, but .* versions 0 to 2"):
        versions.reading("op")
    assert rows_of(versions.reading("op", 2)) == s.at[2]


def test_going_back_in_sparks_commits_goes_back_in_the_state(stream):
    s = stream(3)
    for directory in ("commits", "offsets"):
        (s.world.root / "ck" / directory / "2").unlink()
    assert look(s).readable == range(3)
    assert rows_of(look(s).reading("op")) == s.at[2]


def test_going_back_below_the_kept_versions_leaves_nothing_to_read(stream):
    s = kept(stream, 12)
    oldest = look(s).readable[0]
    for batch in range(3, 12):
        for directory in ("commits", "offsets"):
            (s.world.root / "ck" / directory / str(batch)).unlink(missing_ok=True)
    with pytest.raises(
        VersionNotFoundError, match=f"the last completed version is 3, .* versions from {oldest} to 12 are kept"
    ):
        look(s).reading("op")


def test_no_directory_is_made_where_there_is_no_state(tmp_path):
    with pytest.raises(StateStoreError):
        find_state(str(tmp_path / "nothing"))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_in_the_temporary_directory(stream, tmp_path, monkeypatch):
    s = stream(2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    reading = look(s).reading("op")
    with opened_partition(reading.place, reading.pieces[0]) as state:
        assert list(scratch.iterdir())
        batches = stored_files.scan_family(state, "default")
        next(batches)
    assert list(scratch.iterdir()) == []
    piece: Piece = reading.pieces[0]
    next((s.world.root / "ck/statestore/operators/op/2/0/default").glob("2-*.changelog")).unlink()
    with pytest.raises(MissingFileError), opened_partition(reading.place, piece):
        pass
    assert list(scratch.iterdir()) == []
