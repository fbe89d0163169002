"""No version and no byte of a checkpoint has a forgotten key; everything else stays, and the query continues.

Which stored rows belong to keys: in families of any order of columns, with nulls, and where it cannot be decided.

Keys are forgotten in a checkpoint on S3, over the real protocol.
"""

from __future__ import annotations

import copy
import math
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from msgspec import structs

from backends.encoding.key_groups import key_groups
from backends.encoding.keys import decode_keys, encode_keys
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.exceptions import InvalidStateStoreArgument, MissingFileError, VersionNotFoundError
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.records import read_audit_records
from coordinator_actor.exceptions import FencedError
from coordinator_actor.forgetting import ForgetRequest, forget_in_storage
from coordinator_actor.reading import stored_files as partition_reader
from coordinator_actor.reading.stored_files import stored_files
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from coordinator_actor.rewriting import ForgottenKeys
from coordinator_actor.run import holds
from coordinator_actor.run.holds import BUSY_SECONDS
from spark_bridge.exceptions import SessionError, UnknownKeyOrNamespaceError
from spark_bridge.operators.aggregate_task import AggregateLogic
from spark_bridge.operators.deduplicate import DeduplicateLogic
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_format.layouts import deduplicate_schema
from spark_bridge.state_surgery.forget_keys import forget_keys, keys_to_forget
from spark_bridge.task.state_task import EventTime
from tests.backends.storage.s3_server import faulty_s3
from tests.effort import effort, only_thorough
from tests.spark_bridge.operators.operator_runs import SECOND, TS, WINDOW, batch_of
from tests.spark_bridge.state_flows import NAMES, Flow, Key, Query
from tests.spark_bridge.state_surgery.surgery_steps import files_with, patterns_of
from tests.spark_bridge.variable_operations import AGGREGATOR, flat, in_order, random_operation

BACKENDS = ("rocksdb", "file")
BY_WINDOW = pa.schema([pa.field("window", WINDOW), pa.field("k", pa.string())])


def unlikely(rng: random.Random) -> str:
    """A name that no other bytes are by chance, and that nothing compresses."""
    return "".join(rng.choices(string.ascii_letters + string.digits, k=24))


def check_counts(host: Any) -> None:
    """The host has counted the pairs of each partition right."""
    for instance in host.cache.instances.values():
        engine = instance.state._engine
        pairs = sum(b.num_rows for family in engine.column_families for b in engine.scan(None, None, family))
        assert engine.state.num_keys == pairs


class Clicks:
    """A stream over keys with unique names, with snapshots and removals in between."""

    def __init__(self, root: Path, backend: str, n: int = 2) -> None:
        self.rng = random.Random(7)
        self.names = [unlikely(self.rng) for _ in range(12)]
        self.flow = Flow(root, n=n, backend=backend)

    @property
    def keys(self) -> list[Key]:
        return [(name, shard) for name in self.names for shard in (0, 1)]

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.flow.batch({key: random_operation(self.rng) for key in self.rng.sample(self.keys, 9)})

    def snapshots(self) -> None:
        """Take a snapshot of each partition, which the next manifest names."""
        for upload in self.flow.host.maintenance.do_maintenance():
            upload.result()

    def again(self, run: str, n: int, backend: str) -> None:
        self.flow = self.flow.restarted(run, n, backend)

    def expect_forgotten(self, names: list[str]) -> None:
        """The model forgets, too: in all versions."""
        for held in self.flow.at.values():
            for of in held.values():
                for key in [key for key in of if key[0] in names]:
                    del of[key]
        for name in NAMES:
            of = getattr(self.flow.model, name).of
            for key in [key for key in of if key[0] in names]:
                del of[key]

    def check(self, *, all_versions: bool = False) -> None:
        """Every version that can be read holds what the model holds: all are read by the last one's changelogs.

        Of earlier versions, a usual run looks at some variables: those of a version are in the same files.
        """
        there = StateVersions.look(find_state(self.flow.location)).readable
        some = (there[0], there[len(there) // 2], there[-1])
        for version in there if all_versions else effort(some, there):
            if version:
                for name in NAMES if version == there[-1] else effort((NAMES[version % len(NAMES)],), NAMES):
                    table = state_table(self.flow.location, "op", name, version)
                    rows = list(zip(*(table.column(i).to_pylist() for i in range(table.num_columns - 2)), strict=True))
                    assert in_order(rows) == in_order(flat(name, self.flow.at[version][name])), (version, name)
        check_counts(self.flow.host)


@pytest.fixture
def clicks(tmp_path: Path) -> Iterator[Callable[..., Clicks]]:
    made: list[Clicks] = []

    def make(*args: Any) -> Clicks:
        made.append(Clicks(tmp_path, *args))
        return made[-1]

    yield make
    for one in made:
        one.flow.close()


@pytest.mark.parametrize("backend", ["rocksdb", only_thorough("file")])  # which the tests below have
def test_forgotten_key_is_in_no_version_and_no_byte(clicks, backend):
    stream = clicks(backend)
    stream.run(4)
    stream.snapshots()
    stream.run(effort(7, 13))
    stream.snapshots()
    stream.run(2)
    stream.flow.stop()
    gone, stays = stream.names[:2], stream.names[2:]
    before = {name: files_with(stream.flow.location, name) for name in gone}
    for found in before.values():  # the search finds them where they are
        assert any(f.endswith((".changelog", ".changelogs")) for f in found)
        assert any(f.endswith((".sst", ".snapshots", ".snapshot", ".part")) for f in found)
    versions = StateVersions.look(find_state(stream.flow.location)).readable

    steps: list[str] = []
    keys = [(name, shard) for name in gone for shard in (0, 1)]
    report = forget_keys(stream.flow.location, "op", keys, reference="request 12", progress=steps.append)

    assert {name: files_with(stream.flow.location, name) for name in gone} == {name: [] for name in gone}
    assert all(files_with(stream.flow.location, name) for name in stays)
    assert report.keys == 4 and report.rows > 0 and report.files > 0 and steps
    assert StateVersions.look(find_state(stream.flow.location)).readable == versions, "all versions stay"
    stream.expect_forgotten(gone)
    stream.check()
    there = StateVersions.look(find_state(stream.flow.location))
    assert not [f.path for f in stored_files(there) if not f.kept_by and f.kind != "manifest"], (
        "what nothing keeps is removed"
    )
    begun, done = read_audit_records(stream.flow.world.storage(f"{stream.flow.location}/statestore", {}))
    assert (begun.status, done.status, done.reference, done.counts["keys"]) == ("begun", "done", "request 12", 4)

    stream.again("run2", 2, backend)
    stream.run(2)
    stream.snapshots()
    stream.run(1)
    stream.check()
    stream.flow.stop()
    forget_keys(stream.flow.location, "op", [(stays[0], 0)])  # the first exchange is part of the second one
    stream.flow.model = copy.deepcopy(stream.flow.model)
    for held in [*stream.flow.at.values(), {name: getattr(stream.flow.model, name).of for name in NAMES}]:
        for of in held.values():
            of.pop((stays[0], 0), None)
    stream.again("run3", 3, BACKENDS[1 - BACKENDS.index(backend)])
    stream.run(1)
    stream.check()


def test_files_recreated_by_late_writes_are_ignored_and_removed(clicks):
    stream = clicks("rocksdb")
    stream.run(11)
    stream.snapshots()
    stream.run(1)
    stream.flow.stop()
    root, gone = Path(stream.flow.location), stream.names[:2]
    keys = [(name, shard) for name in gone for shard in (0, 1)]

    def files_with_keys() -> list[str]:
        return sorted({path for name in gone for path in files_with(stream.flow.location, name)})

    def arrive_late() -> None:
        for path, data in removed.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        assert files_with_keys() == sorted(removed)

    removed = {path: (root / path).read_bytes() for path in files_with_keys()}
    kinds = {path.rpartition(".")[2] for path in removed}
    assert kinds & {"changelog", "changelogs"} and kinds & {"sst", "snapshot", "snapshots"}
    forget_keys(stream.flow.location, "op", keys)
    stream.expect_forgotten(gone)

    arrive_late()
    stream.check(all_versions=True)
    there = StateVersions.look(find_state(stream.flow.location))
    assert not [f.path for f in stored_files(there) if f.kept_by and f"statestore/{f.path}" in removed]
    forget_keys(stream.flow.location, "op", keys)
    assert files_with_keys() == [], "forgetting the keys again removes what came late"

    stream.again("run2", 2, "rocksdb")
    run = stream.flow.c.registries.runs.by_id["run2"]
    run.registration = structs.replace(run.registration, min_versions_to_retain=1, maintenance_interval=0.0)
    stream.flow.world.now += BUSY_SECONDS  # loads of the first run may have lasted until now
    stream.flow.host.heartbeat()
    stream.flow.c.maintain()
    assert not run.files.paths & {path.removeprefix("statestore/") for path in removed}
    arrive_late()
    for _ in range(2 * holds.LISTED_EVERY):
        stream.flow.batch({(stream.names[2], shard): random_operation(stream.rng) for shard in (0, 1)})
        stream.snapshots()
        stream.flow.c.maintain()
    assert files_with_keys() == [], "retention removes what came late with its version"
    stream.check()


def test_versions_of_earlier_layouts_forget_too(clicks):
    stream = clicks("file")
    stream.run(2)
    stream.snapshots()
    stream.run(2)
    stream.again("run2", 3, "file")  # whose partitions are made of the files of the first two
    stream.run(1)
    stream.snapshots()
    stream.run(1)
    stream.again("run3", 2, "file")
    stream.run(1)
    stream.flow.stop()
    (gone,) = stream.names[:1]
    key = (gone, 0)
    forget_keys(stream.flow.location, "op", [key, (gone, 1)])
    assert files_with(stream.flow.location, gone) == []
    stream.expect_forgotten([gone])
    stream.check(all_versions=True)
    stream.again("run4", 4, "file")
    stream.run(1)
    stream.check()


def changed(cluster: Clicks) -> dict[str, bytes]:
    """All files of a checkpoint."""
    root = Path(cluster.flow.location)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class DyingStorage:
    """Storage of a process that dies at its n-th write or removal."""

    def __init__(self, left: int) -> None:
        self.left = left

    def open(self, location: str, options: Any) -> CheckpointStorage:
        storage = CheckpointStorage.open(location, options, fsync=False)
        for name in ("put_new", "put_file", "delete_all"):
            setattr(storage, name, self.dying(getattr(storage, name)))
        return storage

    def dying(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise Died
            return write(*args, **kwargs)

        return call


class Died(BaseException):
    """The process has died."""


def test_crash_at_any_write_leaves_the_old_or_the_new_state(clicks):
    stream = clicks("file")
    stream.run(3)
    stream.snapshots()
    stream.run(3)
    stream.flow.stop()
    (gone,) = stream.names[:1]
    key, location = (gone, 0), stream.flow.location
    place = find_state(location)

    def keys_of(schema: OperatorSchema, groups: int) -> ForgottenKeys:
        return keys_to_forget("op", schema, groups, [key, (gone, 1)])

    before, outcomes = state_table(location, "op", "total"), []
    for steps in range(100):
        storage = DyingStorage(steps)
        try:
            forget_in_storage(place, ForgetRequest("op", keys_of, open_storage=storage.open))
            break
        except Died:
            now = state_table(location, "op", "total")
            outcomes.append(gone in now["user"].to_pylist())
            assert now.equals(before if outcomes[-1] else before.filter(pc.not_equal(before["user"], gone)))
    else:
        raise AssertionError("it never comes to its end")
    assert outcomes[0] and not outcomes[-1] and outcomes == sorted(outcomes, reverse=True), outcomes
    assert files_with(location, gone) == [], "what those who died have left goes as well"
    stream.expect_forgotten([gone])
    stream.check()
    stream.again("run2", 2, "file")
    stream.run(1)
    stream.check()


def test_concurrent_forget_is_fenced_and_can_be_retried(clicks):
    stream = clicks("file")
    stream.run(3)
    stream.flow.stop()
    one, other = stream.names[:2]
    location = stream.flow.location

    def request(name: str, **more: Any) -> ForgetRequest:
        keys = [(name, 0), (name, 1)]
        return ForgetRequest("op", lambda schema, groups: keys_to_forget("op", schema, groups, keys), **more)

    def opened(location_: str, options: Any) -> CheckpointStorage:
        storage = CheckpointStorage.open(location_, options, fsync=False)
        put = storage.put_new

        def put_new(path: str, data: bytes) -> Any:
            made = put(path, data)
            if path.startswith("rewritten/"):  # just before its manifest
                forget_in_storage(find_state(location), request(other))
            return made

        storage.put_new = put_new  # type: ignore[method-assign]
        return storage

    with pytest.raises(FencedError):
        forget_in_storage(find_state(location), request(one, open_storage=opened))
    assert files_with(location, other) == [], "the files of the first attempt have the other key"
    stream.expect_forgotten([other])
    stream.check()
    forget_keys(location, "op", [(one, 0), (one, 1)])
    assert files_with(location, one) == [] == files_with(location, other)
    stream.expect_forgotten([one])
    stream.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_planned_before_an_exchange_is_replanned(clicks, backend):
    """The version stays readable: a reader that meets a removed file finds the one that replaces it."""
    stream = clicks(backend)
    stream.run(3)
    stream.snapshots()
    stream.run(3)
    stream.flow.stop()
    place, gone = find_state(stream.flow.location), stream.names[0]
    planned = StateVersions.look(place)
    changes = [
        partition_reader.changes(place, piece, ["total"])
        for piece in planned.reading_of_changes("op", planned.readable[0]).pieces
    ]
    begun = [next(one, None) for one in changes]
    forget_keys(stream.flow.location, "op", [(gone, 0), (gone, 1)])
    stream.expect_forgotten([gone])
    found = []
    for piece in planned.reading("op").pieces:
        with partition_reader.opened_partition(place, piece) as state:
            found += [batch.column(0) for batch in partition_reader.scan_family(state, "total")]
    schema = planned.schema(planned.entry("op", planned.completed)).families["total"]
    keys = [key for column in found for key in decode_keys(column, schema.key).to_pylist()]
    assert {key["user"] for key in keys} == {user for user, _ in stream.flow.at[planned.completed]["total"]}
    rest = [version for one in changes for version, _ in one]
    assert rest and all(version > first[0] for first in begun if first for version in rest[:1])


def test_all_windows_of_a_key_go(tmp_path):
    state = StateSchema(BY_WINDOW, AGGREGATOR.state_schema)
    schema = OperatorSchema.of_rows(state, ("k", "window"))
    logic = AggregateLogic(state, AGGREGATOR, pa.schema([*BY_WINDOW, *AGGREGATOR.result_fields]), "update", None)
    values = pa.schema([*BY_WINDOW, pa.field("v", pa.float64())])
    q = Query(tmp_path, schema, "aggregate")
    q.process(logic, ("window", "k"), batch_of(values, [((i, i + 5), k, 1.0) for i in range(9) for k in ("a", "bb")]))
    q.process(logic, ("window", "k"), batch_of(values, [((0, 5), "a", 1.0), ((0, 5), None, 1.0)]))
    q.stop()
    forget_keys(q.location, "op", ["a", None])
    for version in (1, 2):
        assert set(state_table(q.location, "op", version=version)["k"].to_pylist()) == {"bb"}
    again = Query(tmp_path, schema, "aggregate", run="run2")
    again.process(logic, ("window", "k"), batch_of(values, [((0, 5), k, 1.0) for k in ("a", "bb")]))
    check_counts(again.host)
    again.stop()


def test_rows_kept_by_time_are_forgotten_with_their_key(tmp_path):
    rows = pa.schema([pa.field("k", pa.string()), pa.field("ts", TS)])
    schema = deduplicate_schema(rows.remove(1), ("k",), TS)
    logic = DeduplicateLogic(schema, ("k", "ts"), ("ts",), EventTime("ts"), None, 10 * SECOND)
    names = [unlikely(random.Random(i)) for i in range(2)]
    q = Query(tmp_path, schema, "deduplicate")
    q.process(logic, ["k"], batch_of(rows, [(name, 5) for name in names]))
    q.stop()
    assert files_with(q.location, names[0])
    forget_keys(q.location, "op", pa.table({"k": names[:1]}))
    assert files_with(q.location, names[0]) == [] and files_with(q.location, names[1])
    assert state_table(q.location, "op")["k"].to_pylist() == names[1:]


@pytest.mark.parametrize(
    ("operator", "keys", "error", "message"),
    [
        ("other", [("a", 0)], InvalidStateStoreArgument, "Operator 'other' does not exist"),
        ("op", [], InvalidStateStoreArgument, "keys= is empty"),
        ("op", ["a"], UnknownKeyOrNamespaceError, "tuple of 2 values"),
        ("op", [("a", "b")], UnknownKeyOrNamespaceError, "Key column 'shard' is int32"),
        ("op", "a", UnknownKeyOrNamespaceError, "is one key"),
    ],
)
def test_invalid_calls_are_rejected_before_any_change(clicks, operator, keys, error, message):
    stream = clicks("file")
    stream.run(1)
    stream.flow.stop()
    before = changed(stream)
    with pytest.raises(error, match=message):
        forget_keys(stream.flow.location, operator, keys)
    assert changed(stream) == before


def test_locations_without_state_and_foreign_queries_are_rejected(tmp_path, clicks):
    with pytest.raises(MissingFileError, match=r"No state of a query is kept"):
        forget_keys(str(tmp_path / "nothing"), "op", [("a", 0)])
    with pytest.raises(SessionError, match="give the checkpoint location"):
        forget_keys("some query", "op", [("a", 0)])
    stream = clicks("file")
    with pytest.raises(VersionNotFoundError, match=r"Start the query, and wait for its first batch"):
        forget_keys(stream.flow.location, "op", [("a", 0)])
    stream.run(2)
    stream.flow.stop()
    gone = stream.keys[0]
    forget_keys(stream.flow.location, "op", [gone])  # the location, as the error of a query by its name says
    users = state_table(stream.flow.location, "op", "total").select(["user", "shard"]).to_pylist()
    assert users and dict(zip(("user", "shard"), gone, strict=True)) not in users


KEY = pa.schema([("user", pa.string()), ("share", pa.float64())])
BY_TIME = pa.schema([pa.field("due", pa.int64()), *KEY])
VALUE = pa.schema([("n", pa.int64())])
FAMILIES = {"default": StateSchema(KEY, VALUE), "default.-due": StateSchema(BY_TIME, VALUE)}
ROWS = [("a", 1.0), ("a", None), (None, 1.0), (None, None), ("a", math.nan), ("a", 0.0), ("b", -0.0)]


def batch(rows: list[tuple[object, ...]], schema: pa.Schema = KEY) -> pa.RecordBatch:
    return pa.record_batch([pa.array([row[i] for row in rows], f.type) for i, f in enumerate(schema)], schema=schema)


def pairs(rows: list[tuple[object, ...]], schema: pa.Schema) -> SortedPairs:
    keys = encode_keys(batch(rows, schema), np.zeros(len(rows), np.int64))
    return SortedPairs.of(keys, pa.array([repr(row).encode() for row in rows], pa.binary()))


@pytest.mark.parametrize("gone", [[0], [1, 2], [3], [4], [5], [6], [0, 1, 2, 3, 4, 5, 6]])
def test_rows_of_the_keys_go_from_every_family_and_no_others(gone: list[int]) -> None:
    forgotten = ForgottenKeys(batch([ROWS[i] for i in gone]), FAMILIES, 16, is_whole=True)
    left = {repr(row).encode() for i, row in enumerate(ROWS) if i not in gone}
    kept = forgotten.without("default", pairs(ROWS, KEY))
    assert set(kept.values.to_pylist()) == left
    by_time = [(due, *row) for due in (1, 2) for row in ROWS]
    kept = forgotten.without("default.-due", pairs(by_time, BY_TIME))
    assert len(kept) == 2 * len(left)
    removals = SortedPairs(pairs(ROWS, KEY).keys, pa.nulls(len(ROWS), pa.binary()))
    assert len(forgotten.without("default", removals)) == len(left), "a removal has the bytes of the key as well"


def test_rows_without_a_schema_are_removed_as_possible_rows_of_a_key() -> None:
    forgotten = ForgottenKeys(batch([ROWS[0]]), FAMILIES, 16, is_whole=True)
    assert len(forgotten.without("ttl.-sweep", pairs(ROWS, KEY))) == 0


def test_only_partitions_of_the_keys_are_looked_at_where_all_columns_are_given() -> None:
    keys = batch(ROWS[:2])
    groups = key_groups(keys, 16)
    assert ForgottenKeys(keys, FAMILIES, 16, is_whole=True).partitions(4) == {int(g) * 4 // 16 for g in groups}
    assert ForgottenKeys(keys.select(["user"]), FAMILIES, 16, is_whole=False).partitions(3) == {0, 1, 2}


GONE, STAYS = "Zr7mQx2vNc9bLt4wKs1e", "Hd5gYu8jPf3oAi6kXz0q"


@pytest.mark.thorough  # otherwise: the tests above on a local disk, over the same storage interface
def test_no_object_has_a_forgotten_key(tmp_path: Path) -> None:
    flow = Flow(tmp_path, backend="rocksdb")
    for version in range(6):
        flow.batch({(user, 0): lambda of, n=version: of.total.update((n, "x")) for user in (GONE, STAYS)})
        for upload in flow.host.maintenance.do_maintenance():
            upload.result()
    flow.stop()
    with faulty_s3() as server:
        server.put_all("bucket", "ck", Path(flow.location))
        made, options = server.client(), server.settings

        def objects_with(name: str) -> list[str]:
            keys = [one["Key"] for one in made.list_objects_v2(Bucket="bucket", Prefix="ck/")["Contents"]]
            contents = {key: made.get_object(Bucket="bucket", Key=key)["Body"].read() for key in keys}
            return [key for key, data in contents.items() if any(p in data for p in patterns_of(name))]

        assert objects_with(GONE)
        forget_keys("s3://bucket/ck", "op", [(GONE, 0)], storage_options=options)
        assert objects_with(GONE) == [] and objects_with(STAYS)
        for version in range(1, 7):
            found = state_table("s3://bucket/ck", "op", "total", version, storage_options=options)
            assert found["user"].to_pylist() == [STAYS]
