"""Savepoints as files: exported, read by others, described, deleted."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from backends.encoding.key_groups import key_groups
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import (
    DamagedFileError,
    FileExistsInStorageError,
    MissingFileError,
    SchemaMismatchError,
    StoreClosedError,
)
from backends.formats.manifest import seal
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import ExportedFile
from coordinator_actor.savepoints import export as savepoint_export
from coordinator_actor.savepoints.export import copy_spark_files, export_partition, file_schema
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import (
    SavepointMetadata,
    column_names,
    read_metadata,
    read_stored_savepoint,
    read_stored_savepoints,
    remove_stored_savepoint,
    write_metadata,
)
from tests.coordinator_actor.savepoints.savepoint_makers import (
    BATCH,
    INTS,
    G,
    Savepoint,
    assert_same,
    cut,
    loaded,
    numbers,
    restore,
    small,
    spark_checkpoint,
    storage,
    stored,
    tree,
)


@pytest.fixture
def made(tmp_path: Path) -> Savepoint:
    return small(tmp_path)


# -- the files ------------------------------------------------------------------------------------


def test_files_are_typed_parquet_sorted_by_key(made: Savepoint) -> None:
    directory = made.path / "operators/op/default"
    assert sorted(p.name for p in directory.iterdir()) == [
        "key-groups-00000-00007.parquet",
        "key-groups-00008-00015.parquet",
        "key-groups-00016-00023.parquet",
        "key-groups-00024-00031.parquet",
    ]
    table = pyarrow.dataset.dataset(directory).to_table()
    assert table.schema.names == ["__statestore_key_group", "k", "n", "word"]
    assert table.schema.types == [pa.int32(), pa.int64(), pa.int64(), pa.string()]
    frame = table.to_pandas()
    assert sorted(frame.k) == list(range(500)) and (frame.k == frame.n).all()
    assert (frame.sort_values(["__statestore_key_group", "k"], kind="stable").k == frame.k).all()
    expected = key_groups(pa.record_batch([pa.array(frame.k)], names=["k"]), G)
    assert (frame["__statestore_key_group"] == expected).all()
    # An empty operator can be read as well.
    assert len(pyarrow.dataset.dataset(made.path / "operators/none/default").to_table()) == 0


def test_value_columns_named_as_key_columns_get_a_suffix() -> None:
    key = pa.schema([("k", pa.int64()), ("K__value", pa.int64())])
    value = pa.schema([("k", pa.int64()), ("k__value__value", pa.int64()), ("N", pa.int64()), ("n", pa.int64())])
    assert column_names(StateSchema(key, value)) == (
        ["k", "K__value"],
        ["k__value__value__value", "k__value__value", "N", "n__value"],
    )


def test_columns_of_the_same_names_are_restored(tmp_path: Path) -> None:
    schema = StateSchema(pa.schema([("k", pa.int64())]), pa.schema([("K", pa.string()), ("k", pa.int64())]))
    keys = pa.array(range(50))
    rows = pa.record_batch([pa.array([f"{i}" for i in range(50)]), pa.array(range(50, 100))], names=["K", "k"])
    pairs = stored(pa.record_batch([keys], names=["k"]), rows)
    savepoint = Savepoint(tmp_path / "sp", {"op": (schema, pairs)})
    savepoint.make(spark_checkpoint(tmp_path / "old"))
    assert file_schema(schema).names == ["__statestore_key_group", "k", "K__value", "k__value__value"]
    restore(savepoint, tmp_path / "new", num_partitions=3)
    assert_same(loaded(tmp_path / "new", "op", tmp_path)["default"], pairs)


def export(
    target: Path, pairs: SortedPairs, first: int = 0, last: int = G - 1, rows: int = 100, **how: Any
) -> ExportedFile:
    scratch = target / "scratch"
    return export_partition(
        storage(target / "sp"), "op", "default", INTS, first, last, cut(pairs, 0, G, rows), scratch=scratch, **how
    )


def test_the_same_pairs_give_the_same_bytes_however_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = numbers(300)
    monkeypatch.setattr(savepoint_export, "ROW_GROUP_ROWS", 100)
    for limit in (1 << 20, 1700):
        monkeypatch.setattr(savepoint_export, "ROW_GROUP_BYTES", limit)
        made = {export(tmp_path / f"{limit}-{rows}", pairs, rows=rows) for rows in (1, 7, 99, 100, 300)}
        assert len(made) == 1
    file = pq.ParquetFile(tmp_path / "1700-7/sp/operators/op/default/key-groups-00000-00031.parquet")
    assert 3 < file.num_row_groups < 20
    assert not list((tmp_path / "1700-7/scratch").iterdir())


def test_pages_do_not_tell_how_the_rows_came(tmp_path: Path) -> None:
    keys = pa.array(range(40_000))
    words = pa.array([f"{i:0100d}" for i in range(40_000)])  # several pages in one row group
    pairs = stored(pa.record_batch([keys], names=["k"]), pa.record_batch([keys, words], names=["n", "word"]))
    made = {export(tmp_path / str(rows), pairs, rows=rows) for rows in (7001, 1 << 14, 31_111, 40_000)}
    assert len(made) == 1


def test_files_of_an_earlier_attempt_are_taken_if_they_are_whole_and_replaced_if_not(tmp_path: Path) -> None:
    pairs = numbers(100)
    first = export(tmp_path, pairs)
    path = tmp_path / "sp" / first.path
    inode = path.stat().st_ino
    assert export(tmp_path, pairs) == first and path.stat().st_ino == inode
    path.write_bytes(path.read_bytes()[:100])
    assert export(tmp_path, pairs) == first
    assert path.stat().st_size == first.size
    assert tree(tmp_path / "sp") == {first.path}


def test_an_export_is_throttled_and_cancelled_between_batches(tmp_path: Path) -> None:
    spent: list[tuple[float, float]] = []

    def throttle(took: float, computed: float) -> None:
        spent.append((took, computed))

    export(tmp_path, numbers(1000), throttle=throttle)
    assert len(spent) == 10 and all(took > 0 and computed > 0 for took, computed in spent)
    with pytest.raises(StoreClosedError, match="cancelled"):
        export(tmp_path / "b", numbers(1000), throttle=throttle, is_cancelled=lambda: len(spent) >= 13)
    assert len(spent) == 13
    assert tree(tmp_path / "b") == set()


def test_time_that_the_throttle_slept_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, processor = [0.0], [0.0]
    monkeypatch.setattr(savepoint_export.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(savepoint_export.time, "thread_time", lambda: processor[0])
    spent: list[tuple[float, float]] = []

    def throttle(took: float, computed: float) -> None:
        spent.append((took, computed))
        now[0] += 1000.0
        processor[0] += 1.0

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in cut(numbers(300), 0, G, 100):
            now[0] += 2.0
            processor[0] += 0.5
            yield batch

    export_partition(
        storage(tmp_path), "op", "default", INTS, 0, G - 1, batches(), scratch=tmp_path / "scratch", throttle=throttle
    )
    assert spent == [(2.0, 0.5)] * 3


def test_pairs_that_do_not_belong_into_the_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SavepointError, match="which is to have 0 to 30"):
        export(tmp_path, numbers(500), last=30)
    with pytest.raises(SavepointError, match="which is to have 1 to 31"):
        export(tmp_path, numbers(500), first=1)
    pairs = numbers(50)
    batch = pa.record_batch([pairs.keys, pairs.values], names=["key", "value"])
    for wrong in ([batch, batch], [batch.slice(25), batch.slice(0, 25)]):
        with pytest.raises(SavepointError, match="do not ascend"):
            export_partition(storage(tmp_path), "op", "default", INTS, 0, G - 1, iter(wrong), scratch=tmp_path)
    other = StateSchema(INTS.key, pa.schema([("n", pa.int64())]))
    with pytest.raises(SchemaMismatchError):
        export_partition(storage(tmp_path), "op", "default", other, 0, G - 1, iter([batch]), scratch=tmp_path)
    assert not [f for f in tree(tmp_path) if f.endswith(".parquet")]


# -- Spark's files --------------------------------------------------------------------------------


def test_spark_files_are_those_of_two_batches_and_all_sources_without_checksums(made: Savepoint) -> None:
    assert tree(made.path / "spark") == {
        "offsets/3",
        "offsets/4",
        "commits/3",
        "commits/4",
        "sources/0/0",
        "sources/0/9.compact",
    }


def test_the_first_batch_is_copied_alone(tmp_path: Path) -> None:
    root = spark_checkpoint(tmp_path / "old", 0)
    refs = copy_spark_files(storage(root), storage(tmp_path / "sp"), 0)
    assert {r.path for r in refs} == {
        "spark/offsets/0",
        "spark/commits/0",
        "spark/sources/0/0",
        "spark/sources/0/9.compact",
    }
    assert {r.path for r in refs} == {f"spark/{p}" for p in tree(tmp_path / "sp/spark")}
    assert copy_spark_files(storage(root), storage(tmp_path / "sp"), 0) == refs  # again


def test_files_that_spark_needs_must_exist(tmp_path: Path) -> None:
    root = spark_checkpoint(tmp_path / "old")
    (root / "commits/3").unlink()  # Spark does without
    assert len(copy_spark_files(storage(root), storage(tmp_path / "sp"), BATCH)) == 5
    (root / "offsets/3").unlink()
    with pytest.raises(SavepointError, match="offsets/3 does not exist"):
        copy_spark_files(storage(root), storage(tmp_path / "sp"), BATCH)
    with pytest.raises(SavepointError, match="commits/5 does not exist"):
        copy_spark_files(storage(root), storage(tmp_path / "sp"), 5)


class Purged(CheckpointStorage):
    """Spark removes ``gone`` between the check and the copy, because its query makes progress."""

    root: Path
    gone: str

    def get(self, path: str) -> bytes:
        if path == self.gone:
            (self.root / path).unlink()
        return super().get(path)


@pytest.mark.parametrize(
    ("gone", "is_needed"), [("commits/3", False), ("offsets/3", True), ("offsets/4", True), ("commits/4", True)]
)
def test_a_log_that_spark_removes_during_the_copy_is_missed_only_if_it_is_needed(
    tmp_path: Path, gone: str, is_needed: bool
) -> None:
    root = spark_checkpoint(tmp_path / "old")
    spark = Purged.open(str(root))
    assert isinstance(spark, Purged)
    spark.root, spark.gone = root, gone
    if is_needed:
        with pytest.raises(SavepointError, match=f"after batch 4 .* {gone} does not exist there. The batch must"):
            copy_spark_files(spark, storage(tmp_path / "sp"), BATCH)
        return
    copies = {ref.path for ref in copy_spark_files(spark, storage(tmp_path / "sp"), BATCH)}
    assert f"spark/{gone}" not in copies and len(copies) == 5


class Compacting(CheckpointStorage):
    """A compacted file replaces files of the sources while they are copied."""

    root: Path
    rounds = 0
    lock = threading.Lock()

    def get(self, path: str) -> bytes:
        with self.lock:
            if path.startswith("sources/1/") and self.rounds:
                self.rounds -= 1
                for file in (self.root / "sources/1").iterdir():
                    file.unlink()
                (self.root / f"sources/1/{100 - self.rounds}.compact").write_text(f"v1\ncompacted {self.rounds}")
                raise MissingFileError(path)
            return super().get(path)


@pytest.mark.parametrize(("rounds", "ends"), [(1, True), (5, True), (1000, False)])
def test_sources_that_change_during_the_copy_are_listed_again(tmp_path: Path, rounds: int, ends: bool) -> None:
    root = spark_checkpoint(tmp_path / "old")
    (root / "sources/1").mkdir()
    for i in range(3):
        (root / f"sources/1/{i}").write_text("v1")
    spark = Compacting.open(str(root))
    assert isinstance(spark, Compacting)
    spark.root, spark.rounds = root, rounds
    if not ends:
        with pytest.raises(SavepointError, match="changed 20 times"):
            copy_spark_files(spark, storage(tmp_path / "sp"), BATCH)
        return
    refs = copy_spark_files(spark, storage(tmp_path / "sp"), BATCH)
    assert {r.path.removeprefix("spark/") for r in refs if "sources" in r.path} == {
        f for f in tree(root) if f.startswith("sources/") and not f.endswith(".crc")
    }
    target = storage(tmp_path / "sp")
    assert all(target.read(r) for r in refs)


# -- the metadata file ----------------------------------------------------------------------------


def test_a_savepoint_is_described_listed_verified_and_deleted(made: Savepoint, tmp_path: Path) -> None:
    info = read_stored_savepoint(str(made.path), open_storage=storage)
    assert info.metadata is not None and info.rows == 500 and info.damage is None
    assert info.size == sum((made.path / f).stat().st_size for f in tree(made.path) if f != "_metadata.json")
    assert [o.name for o in info.metadata.operators] == ["op", "none"]
    assert info.metadata.operators[0].variables[0].rows == 500
    assert read_stored_savepoint(str(made.path), is_verified=True, open_storage=storage) == info
    other = Savepoint(tmp_path / "sp/savepoint-0", {"op": (INTS, numbers(5))})
    other.make(tmp_path / "old", lambda m: msgspec.structs.replace(m, created_ms=999))
    (tmp_path / "sp/unfinished/operators").mkdir(parents=True)
    (tmp_path / "sp/unfinished/operators/x.parquet").write_bytes(b"x")
    listed = read_stored_savepoints(str(tmp_path / "sp"), open_storage=storage)
    assert [i.path for i in listed] == [str(other.path), str(made.path)]
    assert listed[1] == info
    assert read_stored_savepoints(str(tmp_path / "nowhere"), open_storage=storage) == []
    (made.path / "notes.txt").write_text("mine")
    remove_stored_savepoint(str(made.path), open_storage=storage)
    assert tree(tmp_path / "sp/savepoint-1") == {"notes.txt"}
    remove_stored_savepoint(str(other.path), open_storage=storage)
    assert not other.path.exists()
    assert read_stored_savepoints(str(tmp_path / "sp"), open_storage=storage) == []


def test_anything_but_a_savepoint_is_refused_everywhere(made: Savepoint, tmp_path: Path) -> None:
    (made.path / "_metadata.json").unlink()
    for path in (made.path, tmp_path / "nowhere"):
        for call in (read_stored_savepoint, partial(read_stored_savepoint, is_verified=True), remove_stored_savepoint):
            with pytest.raises(SavepointError, match=r"is not a savepoint: it has no _metadata\.json"):
                call(str(path), open_storage=storage)
        with pytest.raises(SavepointError, match="is not a savepoint"):
            restore_into_checkpoint(str(path), str(tmp_path / "new"), open_storage=storage)
    assert (made.path / "operators").exists() and not (tmp_path / "new").exists()


def test_deletion_begins_with_the_metadata_file(made: Savepoint) -> None:
    class Dying(CheckpointStorage):
        def delete_all(self, paths: Sequence[str]) -> None:
            raise OSError("dead")

    with pytest.raises(OSError, match="dead"):
        remove_stored_savepoint(str(made.path), open_storage=Dying.open)
    assert not (made.path / "_metadata.json").exists() and (made.path / "operators").exists()
    with pytest.raises(SavepointError, match=r"was partly deleted; remove such a directory by hand") as left:
        remove_stored_savepoint(str(made.path), open_storage=storage)
    shutil.rmtree(str(left.value).partition(" is not a savepoint")[0])
    assert read_stored_savepoints(str(made.path.parent), open_storage=storage) == []


def test_a_damaged_or_newer_metadata_file_is_named(made: Savepoint, tmp_path: Path) -> None:
    path = made.path / "_metadata.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"clicks", b"clocks"))
    with pytest.raises(DamagedFileError, match=r"_metadata\.json is damaged"):
        read_stored_savepoint(str(made.path), open_storage=storage)
    (damaged,) = read_stored_savepoints(str(tmp_path / "sp"), open_storage=storage)
    assert damaged.metadata is None and "damaged" in str(damaged.damage) and damaged.rows == damaged.size == 0
    path.write_bytes(whole)
    metadata = read_metadata(storage(made.path))
    path.write_bytes(seal(msgspec.structs.replace(metadata, format_version=2)))
    with pytest.raises(SavepointError, match="has the format 2; this release reads 1"):
        read_stored_savepoint(str(made.path), open_storage=storage)


def _without_a_file(m: SavepointMetadata) -> SavepointMetadata:
    o = m.operators[0]
    v = msgspec.structs.replace(o.variables[0], files=o.variables[0].files[:-1])
    return msgspec.structs.replace(m, operators=(msgspec.structs.replace(o, variables=(v,)),))


def _with_a_file_twice(m: SavepointMetadata) -> SavepointMetadata:
    o = m.operators[0]
    f = o.variables[0].files
    v = msgspec.structs.replace(o.variables[0], files=(f[0], *f))
    return msgspec.structs.replace(m, operators=(msgspec.structs.replace(o, variables=(v,)),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_a_file, "the key groups of variable 'default' of operator 'op' end with 23, but there are 32"),
        (_with_a_file_twice, "missing or duplicated where operators/op/default/key-groups-00000-00007.parquet begins"),
        (lambda m: msgspec.structs.replace(m, version=9), "version 9 is not that after batch 4"),
        (lambda m: msgspec.structs.replace(m, operators=()), "its operators are none"),
        (lambda m: msgspec.structs.replace(m, operators=m.operators * 2), "each must be there once"),
        (lambda m: msgspec.structs.replace(m, spark_files=()), "spark/commits/4 is not among Spark's files"),
        (lambda m: msgspec.structs.replace(m, batch_id=3, version=4), "spark/offsets/2 is not among Spark's files"),
        (lambda m: msgspec.structs.replace(m, key_groups=0), "number of key groups must be 1 to 65536"),
    ],
)
def test_metadata_that_does_not_fit_together_makes_no_savepoint(
    tmp_path: Path, change: Callable[[SavepointMetadata], SavepointMetadata], message: str
) -> None:
    savepoint = Savepoint(tmp_path / "sp", {"op": (INTS, numbers(100))})
    with pytest.raises(SavepointError, match=message):
        savepoint.make(spark_checkpoint(tmp_path / "old"), change)
    assert not (tmp_path / "sp/_metadata.json").exists()


def test_metadata_is_written_only_over_whole_files_and_once(made: Savepoint) -> None:
    metadata = read_metadata(storage(made.path))
    with pytest.raises(FileExistsInStorageError):
        write_metadata(storage(made.path), metadata)
    (made.path / "_metadata.json").unlink()
    file = made.path / metadata.operators[0].variables[0].files[1].path
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SavepointError, match=r"key-groups-00008-00015\.parquet"):
        write_metadata(storage(made.path), metadata)
