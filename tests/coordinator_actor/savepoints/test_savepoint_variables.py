"""Savepoints of operators with several state variables, whose schemas have changed: from real hosts, and back."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backends.encoding.key_groups import key_groups, partition_of
from backends.encoding.keys import encode_keys
from backends.encoding.operator_schema import OperatorSchema, StateVariable, evolved
from backends.encoding.schema import StateSchema
from backends.encoding.sorted_pairs import SortedPairs
from backends.formats.changelog import Changes
from backends.formats.manifest import seal
from coordinator_actor.durable.manifests import ManifestLog, schema_path
from coordinator_actor.exceptions import SavepointError, SavepointMismatchError
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.savepoints.restore import restore_into_checkpoint
from coordinator_actor.savepoints.savepoint_coordinator import savepoint_families
from coordinator_actor.savepoints.savepoint_format import SavepointMetadata, read_metadata
from spark_bridge.transport.protocol import TaskIdentity
from tests.coordinator_actor.savepoints.savepoint_makers import assert_same, loaded, storage
from tests.coordinator_actor.savepoints.savepoint_streams import G, Stream
from tests.effort import only_thorough

KEY = pa.schema([("k", pa.int64())])
OLD = StateSchema(KEY, pa.schema([("n", pa.int32()), ("gone", pa.string())]))
NEW = StateSchema(KEY, pa.schema([("more", pa.list_(pa.string())), ("n", pa.int64())]))
ENTRIES = StateSchema(pa.schema([("k", pa.int64()), ("u", pa.string())]), pa.schema([("v", pa.float64())]))
EXPIRY = StateSchema(pa.schema([("__expiry", pa.int64()), ("k", pa.int64())]), pa.schema([("present", pa.bool_())]))
TIMERS = {"timers.-keys": StateSchema(KEY, pa.schema([("expiries", pa.list_(pa.int64()))])), "timers.-expiry": EXPIRY}
BEFORE = OperatorSchema((StateVariable("a", "value", {"a": OLD}), StateVariable("b", "value", {"b": OLD})), ("k",))
PROGRAM = OperatorSchema(
    (
        StateVariable("a", "value", {"a": NEW}),
        StateVariable("m", "map", {"m": OLD, "m.-entries": ENTRIES}),
        StateVariable("timers", "timers", TIMERS),
        StateVariable("b", "value", {}, deleted=True),
    ),
    ("k",),
    {"time_mode": "eventtime"},
)
AFTER = evolved(BEFORE, PROGRAM)
FAMILIES = ["a", "m", "m.-entries", "timers.-expiry", "timers.-keys"]
NUMBERS = range(40)


def pairs(schema: StateSchema, columns: dict[str, list[Any]]) -> SortedPairs:
    """Rows as they are stored, of columns of keys and values."""
    keys, values = (
        pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in part], schema=part)
        for part in (schema.key, schema.value)
    )
    groups = key_groups(keys.select(["k"]), G)
    return SortedPairs.last_wins(encode_keys(keys, groups), schema.encode_values(values))


def commit(s: Stream, batch: int, changes: dict[str, SortedPairs]) -> None:
    for directory in ("offsets", "sources/0"):
        path = s.world.root / "ck" / directory / str(batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"v1\n{directory} {batch}")
    for p in range(s.n):
        task = TaskIdentity(s.registration.run_id, "op", p, batch, uuid.uuid4().hex[:6], uuid.uuid4().hex)
        (host,) = (h for h in s.hosts.values() if h.open(task).redirect is None)
        host.commit(task, Changes({name: part_of(given, p, s.n) for name, given in changes.items()}), {})
    s.commit(batch)


def part_of(given: SortedPairs, p: int, n: int) -> SortedPairs:
    both = zip(given.keys.to_pylist(), given.values.to_pylist(), strict=True)
    return SortedPairs.from_dict({k: v for k, v in both if partition_of(int.from_bytes(k[:2], "big"), G, n) == p})


def start(s: Stream, schema: OperatorSchema) -> None:
    """A new run of the query, with that program."""
    spec = OperatorSpec("op", s.n, schema.to_json(), "file", kind="transform_with_state")
    s.registration = s.world.registration(uuid.uuid4().hex, n=s.n, operators=(spec,), key_groups=G)
    s.register()


@pytest.fixture
def savepoint(stream: Callable[..., Stream]) -> Iterator[tuple[Stream, str]]:
    """Rows of two schemas and of variables of three kinds, and of one that is deleted. ``m`` was never written to."""
    s = stream(0)
    start(s, BEFORE)
    old = {"k": list(NUMBERS), "n": list(NUMBERS), "gone": ["x"] * len(NUMBERS)}
    commit(s, 0, {"a": pairs(OLD, old), "b": pairs(OLD, old)})
    start(s, PROGRAM)
    evens = {"k": list(NUMBERS[::2]), "n": [-i for i in NUMBERS[::2]], "more": [["y"]] * len(NUMBERS[::2])}
    entries = {"k": [i for i in NUMBERS for _ in "uv"], "u": ["u", "v"] * len(NUMBERS), "v": [0.5] * 2 * len(NUMBERS)}
    expiry = {"__expiry": [7], "k": [3], "present": [True]}
    commit(
        s,
        1,
        {
            "a": pairs(AFTER.families["a"], evens),
            "m.-entries": pairs(ENTRIES, entries),
            "timers.-expiry": pairs(EXPIRY, expiry),
        },
    )
    s.trigger()
    yield s, s.finish()


def expected() -> dict[str, SortedPairs]:
    """Return the restored content: rows of the newest schema only, without its history."""
    evens = [i % 2 == 0 for i in NUMBERS]
    a = {
        "k": list(NUMBERS),
        "n": [-i if even else i for i, even in zip(NUMBERS, evens, strict=True)],
        "more": [["y"] if even else None for even in evens],
    }
    entries = {"k": [i for i in NUMBERS for _ in "uv"], "u": ["u", "v"] * len(NUMBERS), "v": [0.5] * 2 * len(NUMBERS)}
    return {
        "a": pairs(NEW, a),
        "m": SortedPairs.empty(),
        "m.-entries": pairs(ENTRIES, entries),
        "timers.-keys": SortedPairs.empty(),
        "timers.-expiry": pairs(EXPIRY, {"__expiry": [7], "k": [3], "present": [True]}),
    }


def test_every_variable_that_is_not_deleted_is_in_it_with_rows_of_the_newest_schema(
    savepoint: tuple[Stream, str],
) -> None:
    assert AFTER.families["a"].history == (OLD.value,) and list(savepoint_families(AFTER.to_json())) == FAMILIES
    metadata = read_metadata(storage(Path(savepoint[1])))
    (operator,) = metadata.operators
    assert operator.schema == AFTER.compacted() and operator.schema.settings == {"time_mode": "eventtime"}
    assert [(v.name, v.rows) for v in operator.variables] == [
        ("a", 40),
        ("m", 0),
        ("m.-entries", 80),
        ("timers.-expiry", 1),
        ("timers.-keys", 0),
    ]
    files = [Path(savepoint[1]) / f.path for f in operator.variables[0].files]
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert sorted((r["k"], r["more"], r["n"]) for r in rows)[:2] == [(0, ["y"], 0), (1, None, 1)]
    assert set(rows[0]) == {"__statestore_key_group", "k", "more", "n"}


@pytest.mark.parametrize(("n", "backend"), [(1, "rocksdb"), (3, "file"), only_thorough(16, "rocksdb")])
def test_it_is_restored_to_any_layout(savepoint: tuple[Stream, str], tmp_path: Path, n: int, backend: str) -> None:
    target = tmp_path / "new"
    restored = restore_into_checkpoint(
        savepoint[1], str(target), num_partitions=n, backend=backend, open_storage=storage, clock=lambda: 5.0
    )
    assert [(o.name, o.rows) for o in restored.operators] == [("op", 121)]
    found = loaded(target, "op", tmp_path, G)
    assert {name: len(p) for name, p in found.items() if name != "default"} == {
        name: len(p) for name, p in expected().items()
    }
    for name, rows in expected().items():
        assert_same(found[name], rows)
    log = ManifestLog(storage(target / "statestore"), "reader")
    log.refresh()
    head = log.head()
    assert head is not None
    schema_id = head.operators["op"].schema_id
    assert OperatorSchema.from_json(log.schema(schema_id)) == AFTER.compacted()
    assert [p.name for p in (target / "statestore/schemas").iterdir()] == [schema_path(schema_id).split("/")[1]]


def test_a_program_may_resume_from_it_as_it_may_from_a_checkpoint(
    savepoint: tuple[Stream, str], tmp_path: Path
) -> None:
    def spec(*variables: StateVariable, **how: Any) -> OperatorSpec:
        return OperatorSpec("op", 2, OperatorSchema(variables, ("k",)).to_json(), kind="transform_with_state", **how)

    def restore(spec: OperatorSpec) -> None:
        target = tmp_path / uuid.uuid4().hex
        restore_into_checkpoint(savepoint[1], str(target), operators=[spec], open_storage=storage)

    restore(spec(StateVariable("a", "value", {"a": StateSchema(KEY, pa.schema([("n", pa.float64())]))})))
    with pytest.raises(SavepointMismatchError) as caught:
        restore(spec(StateVariable("a", "value", {"a": OLD}), StateVariable("m", "list", {"m": OLD})))
    (line,) = str(caught.value).splitlines()[1:]
    assert line.startswith("- operator 'op': State variable 'a': [STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION]")
    assert "(more array<string>, n long)" in line and "(n integer, gone string)" in line
    with pytest.raises(SavepointMismatchError, match=r"of the kind 'transform_with_state'[\s\S]*rows default"):
        restore(OperatorSpec("op", 2, OLD.to_json()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda o: msgspec.structs.replace(o, variables=o.variables[1:]),
            r"has the variables \['m', .*its schema has \['a'",
        ),
        (lambda o: msgspec.structs.replace(o, operator_schema="{}"), "schema of operator 'op' cannot be read"),
        (lambda o: msgspec.structs.replace(o, operator_schema=None), "'default' and others"),
        (
            lambda o: msgspec.structs.replace(o, operator_schema=AFTER.to_json()),
            "'a' of operator 'op' has another schema",
        ),
    ],
)
def test_inconsistent_metadata_is_not_a_savepoint(
    savepoint: tuple[Stream, str], change: Callable[[Any], Any], words: str
) -> None:
    at = storage(Path(savepoint[1]))
    metadata = read_metadata(at)
    changed: SavepointMetadata = msgspec.structs.replace(metadata, operators=(change(metadata.operators[0]),))
    at.delete("_metadata.json")
    at.put_new("_metadata.json", seal(changed))
    with pytest.raises(SavepointError, match=words):
        read_metadata(at)


def test_an_operator_without_variables_has_a_savepoint_as_well(stream: Callable[..., Stream], tmp_path: Path) -> None:
    s = stream(0)
    start(s, OperatorSchema((), ("k",)))
    commit(s, 0, {})
    s.trigger()
    path = s.finish()
    assert read_metadata(storage(Path(path))).operators[0].variables == ()
    restored = restore_into_checkpoint(path, str(tmp_path / "new"), num_partitions=3, open_storage=storage)
    assert [o.rows for o in restored.operators] == [0]
    assert all(len(p) == 0 for p in loaded(tmp_path / "new", "op", tmp_path, G).values())
