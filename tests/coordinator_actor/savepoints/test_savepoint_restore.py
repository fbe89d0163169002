"""Savepoints restored to other layouts and backends, and refused; the same pairs come out, byte for byte."""

from __future__ import annotations

import math
import shutil
import uuid
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import (
    DamagedFileError,
    InvalidStateStoreArgument,
    MissingFileError,
)
from backends.formats.manifest import seal
from backends.storage.checkpoint_storage import CheckpointStorage
from backends.storage.locations import FileRef
from coordinator_actor.exceptions import SavepointError, SavepointMismatchError
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.savepoints import export as savepoint_export
from coordinator_actor.savepoints.export import export_partition
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_format import (
    read_metadata,
    read_stored_savepoint,
    read_stored_savepoints,
    remove_stored_savepoint,
)
from tests.backends.strategies import FIXED, LEAVES, batches
from tests.coordinator_actor.savepoints.savepoint_makers import (
    INTS,
    G,
    Savepoint,
    assert_same,
    cut,
    joined,
    loaded,
    numbers,
    restore,
    small,
    spark_checkpoint,
    storage,
    stored,
    tree,
)
from tests.effort import examples, only_thorough


@pytest.fixture
def made(tmp_path: Path) -> Savepoint:
    return small(tmp_path)


@pytest.mark.parametrize(
    ("n", "backend"),
    [
        (1, "file"),
        (3, "rocksdb"),
        (16, "file"),
        only_thorough(1, "rocksdb"),
        only_thorough(3, "file"),
        only_thorough(16, "rocksdb"),
    ],
)
def test_restored_to_any_layout_the_pairs_are_the_same(made: Savepoint, tmp_path: Path, n: int, backend: str) -> None:
    target = tmp_path / "new"
    restored = restore(made, target, num_partitions=n, backend=backend)
    assert [(o.name, o.num_partitions, o.backend, o.rows) for o in restored.operators] == [
        ("op", n, backend, 500),
        ("none", n, backend, 0),
    ]
    assert_same(loaded(target, "op", tmp_path)["default"], made.operators["op"][1])
    assert len(loaded(target, "none", tmp_path)["default"]) == 0


def every_type() -> tuple[StateSchema, SortedPairs]:
    """Columns of every type that can be stored, as key and as value, in schemas that forbid nulls here and there."""
    nan = np.array([0x7FF8000000000123], np.uint64).view(np.float64)[0]  # a NaN with a payload
    nested = pa.struct([pa.field("a", pa.int32(), nullable=False), pa.field("b", pa.list_(pa.float64()))])
    kinds = {
        **dict.fromkeys(LEAVES),
        pa.list_(pa.string()): None,
        nested: None,
        pa.list_(nested): None,
    }
    samples: dict[pa.DataType, list[Any]] = {kind: list(_samples(kind, nan)) for kind in kinds}
    n = 60
    columns = [pa.array([samples[k][i % len(samples[k])] for i in range(n)], k) for k in kinds]
    names = [f"c{i}" for i in range(len(columns))]
    maps = pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))
    value_columns = [*columns, pa.array([None if i % 3 else [("x", i), ("y", 1)] for i in range(n)], maps)]
    ids = pa.field("id", pa.int32(), nullable=False)
    key = pa.record_batch([pa.array(range(n), pa.int32()), *columns], names=["id", *names])
    value = pa.record_batch(value_columns, names=[*names, "map"])
    schema = StateSchema(pa.schema([ids, *list(key.schema)[1:]]), value.schema)
    return schema, stored(key, value)


def _samples(kind: pa.DataType, nan: float) -> list[Any]:
    from tests.backends.strategies import LADDERS

    if kind in (pa.float32(), pa.float64()):
        return [None, 0.0, -0.0, math.nan, nan, -math.nan, math.inf, -1.5]
    if kind in LADDERS:
        return [None, *LADDERS[kind]]
    if pa.types.is_list(kind):
        return [None, [], [None], [{"a": 1, "b": [math.nan, None, -0.0]}], [{"a": 2, "b": None}, None]]
    return [None, {"a": 1, "b": None}, {"a": -1, "b": []}, {"a": 0, "b": [-0.0, nan]}]


@pytest.mark.parametrize("backend", [only_thorough("rocksdb"), "file"])
def test_every_type_round_trips_byte_for_byte(tmp_path: Path, backend: str) -> None:
    schema, pairs = every_type()
    assert len(pairs) == 60 and len(FIXED) == 12
    savepoint = Savepoint(tmp_path / "sp", {"op": (schema, pairs)})
    savepoint.make(spark_checkpoint(tmp_path / "old"))
    restore(savepoint, tmp_path / "new", num_partitions=3, backend=backend)
    assert_same(loaded(tmp_path / "new", "op", tmp_path)["default"], pairs)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schema_round_trips_byte_for_byte(tmp_path: Path, data: st.DataObject) -> None:
    keys = data.draw(batches())
    values = data.draw(batches(maps=True, max_rows=keys.num_rows).filter(lambda b: b.num_rows == keys.num_rows))
    schema = StateSchema(keys.schema, values.schema)
    pairs = stored(keys, values)
    directory = tmp_path / uuid.uuid4().hex
    file = export_partition(
        storage(directory), "op", "default", schema, 0, G - 1, cut(pairs, 0, G, rows=3), scratch=directory / "scratch"
    )
    from coordinator_actor.savepoints.restore import _read

    found = list(_read(directory / file.path, file, schema, 0, G))
    assert_same(joined([pa.record_batch([p.keys, p.values], names=["key", "value"]) for p in found]), pairs)


def test_further_variables_of_an_operator_are_restored_as_column_families(tmp_path: Path) -> None:
    timers = StateSchema(pa.schema([("at", pa.timestamp("us", tz="UTC")), ("k", pa.int64())]), pa.schema([]))
    keys = pa.record_batch([pa.array([5, 6, 7], pa.timestamp("us", tz="UTC")), pa.array([1, 2, 3])], names=["at", "k"])
    nothing = pa.RecordBatch.from_struct_array(pa.array([{}] * 3, pa.struct([])))
    pairs = stored(keys, nothing)
    own = numbers(20)
    extra = {"op": {"timers": (timers, pairs), "ttl": (INTS, SortedPairs.empty())}}
    savepoint = Savepoint(tmp_path / "sp", {"op": (INTS, own)}, variables=extra)
    savepoint.make(spark_checkpoint(tmp_path / "old"))
    for backend in ("rocksdb", "file"):
        target = tmp_path / f"new-{backend}"
        assert restore(savepoint, target, num_partitions=3, backend=backend).operators[0].rows == 23
        found = loaded(target, "op", tmp_path)
        assert sorted(found) == ["default", "timers", "ttl"]
        assert_same(found["default"], own)
        assert_same(found["timers"], pairs)


def test_many_row_groups_of_many_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savepoint_export, "ROW_GROUP_ROWS", 70)
    pairs = numbers(3000)
    savepoint = Savepoint(tmp_path / "sp", {"op": (INTS, pairs)}, num_partitions=2)
    savepoint.make(spark_checkpoint(tmp_path / "old"))
    file = next((tmp_path / "sp/operators/op/default").iterdir())
    sizes = [pq.ParquetFile(file).metadata.row_group(i).num_rows for i in range(pq.ParquetFile(file).num_row_groups)]
    assert set(sizes[:-1]) == {70} and len(sizes) > 15
    restore(savepoint, tmp_path / "new", num_partitions=5, backend="file")
    assert_same(loaded(tmp_path / "new", "op", tmp_path)["default"], pairs)


def test_only_the_row_groups_of_a_partition_are_read(made: Savepoint, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(savepoint_export, "ROW_GROUP_ROWS", 10)
    savepoint = Savepoint(tmp_path / "sp2", {"op": (INTS, numbers(320))}, num_partitions=1)
    savepoint.make(tmp_path / "old")
    reads: list[int] = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, i, **kw: (reads.append(i), read(self, i, **kw))[1]
    )
    restore(savepoint, tmp_path / "new", num_partitions=8, backend="file")
    # 32 row groups; the one where two partitions meet is read for both.
    assert set(reads) == set(range(32)) and len(reads) <= 32 + 7


def test_the_base_of_a_restored_version_is_never_the_empty_version(tmp_path: Path) -> None:
    """Version 1 is what a load would otherwise make of the first changelog alone, if its snapshot is damaged."""
    savepoint = Savepoint(tmp_path / "sp", {"op": (INTS, numbers(50))}, num_partitions=1, batch=0)
    savepoint.make(spark_checkpoint(tmp_path / "old", 0))
    assert restore(savepoint, tmp_path / "new", backend="file").version == 1
    assert len(loaded(tmp_path / "new", "op", tmp_path)["default"]) == 50
    directory = tmp_path / "new/statestore/operators/op/1/0/default"
    for file in (f for f in directory.iterdir() if not f.name.endswith(".changelog")):
        file.unlink()
    with pytest.raises(MissingFileError):
        loaded(tmp_path / "new", "op", tmp_path)


@pytest.mark.parametrize("backend", [only_thorough("rocksdb"), "file"])
def test_state_alone_is_loaded_by_hosts(made: Savepoint, tmp_path: Path, backend: str) -> None:
    restore(made, tmp_path / "new", state_only=True, backend=backend, num_partitions=3)
    assert_same(loaded(tmp_path / "new", "op", tmp_path)["default"], made.operators["op"][1])


def test_names_choose_and_declarations_must_agree(made: Savepoint, tmp_path: Path) -> None:
    assert [o.name for o in restore(made, tmp_path / "a", operators=["op"]).operators] == ["op"]
    op, none = OperatorSpec("op", 6, INTS.to_json(), "file"), OperatorSpec("none", 2, INTS.to_json())
    assert [(o.num_partitions, o.backend) for o in restore(made, tmp_path / "b", operators=[op, none]).operators] == [
        (6, "file"),
        (2, "rocksdb"),
    ]
    with pytest.raises(SavepointMismatchError, match="'none' is in the savepoint, but not in the program"):
        restore(made, tmp_path / "c", operators=[op])
    assert not (tmp_path / "c").exists()
    dropped = restore(made, tmp_path / "c", operators=[op], allow_non_restored_state=True, num_partitions=3)
    assert [(o.name, o.num_partitions) for o in dropped.operators] == [("op", 3)]


def test_all_differences_are_in_one_message(made: Savepoint, tmp_path: Path) -> None:
    value = pa.schema([("word", pa.string()), ("n", pa.int32()), ("more", pa.float64())])
    other = StateSchema(pa.schema([pa.field("k", pa.int64(), nullable=False), ("j", pa.date32())]), value)
    order = StateSchema(INTS.key, pa.schema([("word", pa.string()), ("n", pa.int64())]))
    specs = [
        OperatorSpec("op", 4, other.to_json()),
        OperatorSpec("none", 4, order.to_json(), kind="deduplicate"),
        OperatorSpec("new", 4, INTS.to_json()),
    ]
    for allow in (False, True):
        with pytest.raises(SavepointMismatchError) as caught:
            restore(made, tmp_path / "new", operators=specs, num_partitions={"x": 1}, allow_non_restored_state=allow)
        assert str(caught.value).splitlines()[1:] == [
            "- operator 'op': key column 'k' is long in the savepoint, long not null in the program",
            "- operator 'op': key column 'j' (date) is in the program, but not in the savepoint",
            "- operator 'op': state column 'n' is long in the savepoint, integer in the program",
            "- operator 'op': state column 'more' (double) is in the program, but not in the savepoint",
            "- operator 'none' is of the kind 'aggregate' in the savepoint, 'deduplicate' in the program",
            "- operator 'none': state columns come as n, word in the savepoint, as word, n in the program",
            "- operator 'new' is not in the savepoint, which has 'none', 'op'",
            "- num_partitions names operator 'x', which is not restored",
        ]
    with pytest.raises(SavepointMismatchError, match="'x' is not in the savepoint"):
        restore(made, tmp_path / "new", operators=["x"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_partitions": G + 1}, "must be an int from 1 to 32"),
        ({"num_partitions": 0}, "must be an int from 1 to 32"),
        ({"num_partitions": True}, "must be an int from 1 to 32"),
        ({"num_partitions": {"op": 2.0}}, "must be an int from 1 to 32"),
        ({"backend": "redis"}, "provider='redis' is unknown"),
        ({"backend": "nowhere.Provider"}, "cannot be imported"),
        ({"backend": "pathlib.Path"}, "is not a LocalStateStoreProvider"),
        ({"operators": []}, "must name one operator or more"),
        ({"operators": ["op", "op"]}, "each of them once"),
        ({"threads": 0}, "threads=0"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    made: Savepoint, tmp_path: Path, how: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=message):
        restore(made, tmp_path / "new", **how)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "held",
    [
        "offsets/0",
        "commits/0",
        "sources/0/0",
        "state/0/0/1.delta",
        "metadata",
        ".metadata.crc",
        "statestore/query.json",
    ],
)
def test_a_target_in_use_is_refused(made: Savepoint, tmp_path: Path, held: str) -> None:
    file = tmp_path / "new" / held
    file.parent.mkdir(parents=True)
    file.write_text("x")
    with pytest.raises(SavepointError, match="new checkpoint location, and in"):
        restore(made, tmp_path / "new")
    assert tree(tmp_path / "new") == {held}


def test_a_target_in_the_savepoint_is_refused(made: Savepoint, tmp_path: Path) -> None:
    before = tree(made.path)
    (tmp_path / "link").symlink_to(made.path)
    for target in (made.path, made.path / "new", tmp_path / "link/new"):
        with pytest.raises(SavepointError, match="is inside the savepoint"):
            restore(made, target)
    assert tree(made.path) == before
    restore(made, made.path.with_name(f"{made.path.name}-restored"))


def test_missing_and_damaged_files_are_all_named_and_nothing_is_written(made: Savepoint, tmp_path: Path) -> None:
    first, second = sorted((made.path / "operators/op/default").iterdir())[:2]
    content = bytearray(first.read_bytes())
    content[50] ^= 1
    first.write_bytes(content)
    second.unlink()
    (made.path / "spark/offsets/3").write_text("other")
    with pytest.raises(DamagedFileError) as caught:
        restore(made, tmp_path / "new")
    assert all(name in str(caught.value) for name in (first.name, second.name, "spark/offsets/3", "3 of 14 files"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(DamagedFileError, match=first.name):
        read_stored_savepoint(str(made.path), is_verified=True, open_storage=storage)
    # What is not restored need not be whole.
    restore(made, tmp_path / "new", operators=["none"], state_only=True)


def test_rows_of_other_key_groups_than_the_metadata_says_stop_a_restore(made: Savepoint, tmp_path: Path) -> None:
    target = storage(made.path)
    metadata = read_metadata(target)
    operator = metadata.operators[0]
    files = list(operator.variables[0].files)
    # A file with a right digest that is not what it should be: that of other key groups.
    shutil.copy(made.path / files[1].path, made.path / files[0].path)
    files[0] = msgspec.structs.replace(files[0], size=files[1].size, digest=files[1].digest)
    variable = msgspec.structs.replace(operator.variables[0], files=tuple(files))
    operator = msgspec.structs.replace(operator, variables=(variable,))
    (made.path / "_metadata.json").write_bytes(seal(msgspec.structs.replace(metadata, operators=(operator,))))
    with pytest.raises(DamagedFileError, match="differ from those in the metadata file"):
        restore(made, tmp_path / "new")
    assert not (tmp_path / "new/metadata").exists()


def test_of_two_restores_to_one_place_one_wins(made: Savepoint, tmp_path: Path) -> None:
    class Slow(CheckpointStorage):
        def put_new(self, path: str, data: bytes) -> FileRef:
            if path == "query.json":
                restore(made, tmp_path / "new")
            return super().put_new(path, data)

    with pytest.raises(SavepointError, match="Another process is making a checkpoint"):
        restore_into_checkpoint(
            str(made.path), str(tmp_path / "new"), open_storage=lambda p, o: Slow.open(p, o, fsync=False)
        )
    assert_same(loaded(tmp_path / "new", "op", tmp_path)["default"], made.operators["op"][1])


def test_savepoints_live_in_object_stores_too(made: Savepoint, tmp_path: Path) -> None:
    base = f"memory://{uuid.uuid4().hex}"
    target = storage(f"{base}/sp/savepoint-1")
    for path in tree(made.path):
        target.put_new(path, (made.path / path).read_bytes())
    said: list[str] = []
    (listed,) = read_stored_savepoints(f"{base}/sp", open_storage=storage)
    assert (
        listed.path == f"{base}/sp/savepoint-1"
        and read_stored_savepoint(listed.path, is_verified=True, open_storage=storage) == listed
    )
    restore_into_checkpoint(
        listed.path,
        str(tmp_path / "new"),
        num_partitions=3,
        open_storage=storage,
        scratch=tmp_path / "scratch",
        progress=said.append,
    )
    assert_same(loaded(tmp_path / "new", "op", tmp_path)["default"], made.operators["op"][1])
    assert not list((tmp_path / "scratch").iterdir())
    assert len(said) == 1 + 6 and "restored partition 2 of 3 of operator 'op': " in "\n".join(said)
    restore_into_checkpoint(listed.path, f"{base}/new", state_only=True, open_storage=storage)
    assert {p.partition("/")[0] for p, _ in storage(f"{base}/new").list()} == {"statestore", "metadata"}
    remove_stored_savepoint(listed.path, open_storage=storage)
    assert storage(f"{base}/sp").list() == []
