"""``rewrite_state`` on the checkpoints of real streams, with tasks in the test's own process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from backends.exceptions import (
    DamagedFileError,
    InvalidStateStoreArgument,
    MissingFileError,
    StorageError,
    VersionNotFoundError,
)
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.records import read_audit_records
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import OperatorSpec, QueryRegistration
from coordinator_actor.reading.verification import verify_version
from coordinator_actor.savepoints.new_checkpoint import NewCheckpoint
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_format.layouts import join_schema
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery import rewrite_state as rewrite_state_module
from spark_bridge.state_surgery import shuffle
from spark_bridge.state_surgery.new_state import NewStateReport, new_query_id
from spark_bridge.state_surgery.rewrite_state import rewrite_state
from spark_bridge.state_surgery.shuffle import conformed
from tests.coordinator_actor.coordinator_world import World
from tests.effort import effort, only_thorough
from tests.spark_bridge.state_data.format_fixtures import Stored, copied
from tests.spark_bridge.state_flows import Flow
from tests.spark_bridge.state_surgery.surgery_steps import OwnWorkers, program_of, rows, tree, variables, versions_of


@pytest.fixture
def old() -> str:
    return Stored("file").checkpoint


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and steps of a few rows, so that each partition is made of many."""
    monkeypatch.setattr(shuffle, "FLUSH_BYTES", 300)
    monkeypatch.setattr(shuffle, "RUN_BYTES", 100)
    monkeypatch.setattr(shuffle, "REWRITE_CHUNK_BYTES", 2_000)


def rewritten(old: str, operator: Any, function: Any, new: Path, **options: Any) -> NewStateReport:
    return rewrite_state(old, operator, function, str(new), workers=OwnWorkers(), **options)


def same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


ALL: Mapping[str, Any] = {
    "firsts": same,
    "reminders": {"fired": same, "timers": same},
    "sessions": same,
    "totals": same,
    "visits": dict.fromkeys(("last", "seen", "pages", "recent", "tags", "timers"), same),
    "windows": same,
}


@pytest.mark.parametrize(
    ("backend", "n"), [("rocksdb", 5), *(only_thorough(*of) for of in (("rocksdb", 1), ("file", 1), ("file", 5)))]
)
def test_every_kind_of_state_is_read_and_written(backend: str, n: int, tmp_path: Path) -> None:
    old, other = Stored(backend).checkpoint, {"rocksdb": "file", "file": "rocksdb"}[backend]
    report = rewritten(old, list(ALL), ALL, tmp_path / "new", program=program_of(old), num_partitions=n, backend=other)
    assert [(o.name, o.num_partitions, o.backend) for o in report.operators] == [(name, n, other) for name in ALL]
    for operator, state in variables(old):
        assert rows(str(tmp_path / "new"), operator, state) == rows(old, operator, state), (operator, state)
        expected = len(rows(old, operator, state))
        assert report.rows_read[operator, state] == report.rows_written[operator, state] == expected
    # The elements of each list in their order.
    seen = [row["seq"] for row in rows(str(tmp_path / "new"), "visits", "seen", sort=False) if row["k"] == "many"]
    assert seen == [row["seq"] for row in rows(old, "visits", "seen", sort=False) if row["k"] == "many"]
    assert len(seen) > 270
    assert not verify_version(versions_of(str(tmp_path / "new")), reads_rows=True).lost


def test_state_whose_older_manifests_are_damaged_gets_a_checkpoint_that_is_whole(old: str, tmp_path: Path) -> None:
    damaged = copied(old, tmp_path / "damaged")
    manifests = sorted(Path(damaged, "statestore/manifests").iterdir())
    manifests[0].write_bytes(b"rubbish")
    with pytest.raises(DamagedFileError, match=manifests[0].name):
        versions_of(damaged)
    rewritten(damaged, "totals", same, tmp_path / "new")
    for operator, state in variables(old):
        assert rows(str(tmp_path / "new"), operator, state) == rows(old, operator, state), (operator, state)
    assert verify_version(versions_of(str(tmp_path / "new")), reads_rows=True).is_sound
    manifests[-1].write_bytes(b"rubbish")
    with pytest.raises(DamagedFileError, match=manifests[-1].name):
        rewritten(damaged, "totals", same, tmp_path / "newer")


def test_unnamed_operators_stay_unchanged(old: str, tmp_path: Path) -> None:
    def later(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(batch.schema.get_field_index("n"), "n", pc.add(batch["n"], 100))

    report = rewritten(old, "visits", {"last": later, "tags": None}, tmp_path / "new", reference="request 7")
    new = str(tmp_path / "new")
    for operator, state in variables(old):
        if state == "tags":
            continue
        before = rows(old, operator, state)
        if (operator, state) == ("visits", "last"):
            before = [{**row, "n": row["n"] + 100} for row in before]
        assert rows(new, operator, state) == sorted(before, key=repr), (operator, state)
    assert ("visits", "tags") not in variables(new)
    assert report.version == report.batch_id + 1 == versions_of(old).completed
    record = read_audit_records(CheckpointStorage.open(f"{new}/statestore"))[0]
    assert (record.what, record.reference, record.operators) == ("rewrite_state", "request 7", ("visits",))
    assert record.details["checkpoint"] == old
    for directory in ("offsets", "commits", "sources"):
        assert set(tree(Path(new) / directory)) <= set(tree(Path(old) / directory))
    assert (Path(new) / "offsets" / str(report.batch_id)).read_text() == (
        Path(old) / "offsets" / str(report.batch_id)
    ).read_text()


def by_k(batch: pa.RecordBatch) -> pa.Table:
    return pa.table({"k": batch["k"], "n.count.count": batch["n.count.count"]})


def added_up(table: pa.Table) -> pa.Table:
    added = table.group_by("k").aggregate([("n.count.count", "sum")])
    return added.rename_columns([name.removesuffix("_sum") for name in added.column_names])


def test_keys_change_and_their_rows_are_combined(old: str, tmp_path: Path) -> None:
    report = rewritten(old, "totals", by_k, tmp_path / "new", key=["k"], combine=added_up)
    expected: dict[Any, int] = {}
    for row in rows(old, "totals"):
        expected[row["k"]] = expected.get(row["k"], 0) + row["n.count.count"]
    found = rows(str(tmp_path / "new"), "totals")
    assert {row["k"]: row["n.count.count"] for row in found} == expected and len(found) == len(expected)
    assert report.rows_written["totals", "default"] == len(expected) < report.rows_made["totals", "default"]
    schema = versions_of(str(tmp_path / "new"))
    made = schema.schema(schema.operators(schema.completed)["totals"])
    before = versions_of(old).schema(versions_of(old).operators(5)["totals"]).families["default"]
    assert made.families["default"].value.field("n.count.count") == before.value.field("n.count.count")


@pytest.mark.parametrize("key", ["of_k", {"totals": "of_k"}])
def test_one_key_column_may_be_given_by_its_name_alone(old: str, tmp_path: Path, key: Any) -> None:
    def renamed(batch: pa.RecordBatch) -> pa.RecordBatch:
        by = by_k(batch)
        return by.rename_columns(["of_k" if name == "k" else name for name in by.schema.names])

    def first_of_each(table: pa.Table) -> pa.Table:
        return table.take([table["of_k"].to_pylist().index(one) for one in table["of_k"].unique().to_pylist()])

    rewritten(old, "totals", renamed, tmp_path / "new", key=key, combine=first_of_each)
    found = {row["of_k"] for row in rows(str(tmp_path / "new"), "totals")}
    assert found == {row["k"] for row in rows(old, "totals")}


def test_equal_keys_without_combine_are_refused_and_nothing_is_left(old: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidStateStoreArgument, match=r"'totals' come several times, such as k=.*combine="):
        rewritten(old, "totals", by_k, tmp_path / "new", key=["k"])
    assert not tree(tmp_path)
    rewritten(old, "totals", by_k, tmp_path / "new", key=["k"], combine=added_up)


@pytest.mark.parametrize(
    "combine",
    [
        lambda table: table,
        lambda table: table.slice(0, 1).set_column(0, "k", pa.array(["nobody"])),
    ],
)
def test_combine_must_give_one_row_for_each_key(old: str, tmp_path: Path, combine: Any) -> None:
    with pytest.raises(InvalidStateStoreArgument, match="at most one row for each"):
        rewritten(old, "totals", by_k, tmp_path / "new", key=["k"], combine=combine)
    assert not tree(tmp_path)


def test_an_operator_is_split_and_two_are_merged(old: str, tmp_path: Path) -> None:
    def split(batch: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
        named = pc.is_valid(batch["k"])
        return {"named": batch.filter(named), "nameless": batch.filter(pc.invert(named))}

    rewritten(old, "totals", split, tmp_path / "split")
    named, nameless = rows(str(tmp_path / "split"), "named"), rows(str(tmp_path / "split"), "nameless")
    assert sorted(named + nameless, key=repr) == rows(old, "totals")
    assert named and nameless and all(row["k"] is None for row in nameless)
    assert "totals" not in {operator for operator, _ in variables(str(tmp_path / "split"))}

    def together(batch: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
        return {"totals": batch}

    rewritten(str(tmp_path / "split"), ["named", "nameless"], together, tmp_path / "merged")
    assert rows(str(tmp_path / "merged"), "totals") == rows(old, "totals")
    assert {o for o, _ in variables(str(tmp_path / "merged"))} == set(ALL)


def test_program_determines_the_layout_of_the_new_state(old: str, tmp_path: Path) -> None:
    family = StateSchema(
        pa.schema([pa.field("g", pa.string(), nullable=False), pa.field("k", pa.string())]),
        pa.schema([pa.field("n.count.count", pa.decimal128(20, 0)), pa.field("note", pa.string())]),
    )
    spec = OperatorSpec("totals", 3, OperatorSchema.of_rows(family).to_json(), "file")

    def changed(batch: pa.RecordBatch) -> pa.Table:
        return pa.table(
            {
                "note": pa.array([None] * batch.num_rows),
                "n.count.count": batch["n.count.count"],
                "k": batch["k"],
                "g": batch["g"].cast(pa.string()),
            }
        )

    program = program_of(old, totals=spec)
    report = rewritten(old, "totals", changed, tmp_path / "new", program=program)
    found = state_table(str(tmp_path / "new"), "totals", state_columns=True)
    assert found.schema.field("n.count.count").type == pa.decimal128(20, 0) and found["note"].null_count == len(found)
    assert sorted(map(str, found["g"].to_pylist())) == sorted(str(row["g"]) for row in rows(old, "totals"))
    made = next(o for o in report.operators if o.name == "totals")
    assert (made.num_partitions, made.backend) == (3, "file")
    stored = versions_of(str(tmp_path / "new"))
    assert stored.schema(stored.operators(stored.completed)["totals"]).to_json() == spec.schema

    def without(name: str) -> Callable[[pa.RecordBatch], pa.Table]:
        return lambda batch: changed(batch).drop_columns([name])

    for function, said in (
        (without("note"), r"without 'note'.*need the columns g \(string\), k \(string\)"),
        (same, "without 'note' and with the unknown"),
        (lambda b: changed(b).set_column(3, "g", b["g"]), "'g' of the rows of operator 'totals' is int32.*Cast"),
        (lambda b: changed(b).set_column(3, "g", pa.array([None] * b.num_rows, pa.string())), "'g'.* nulls"),
        (lambda b: changed(b).to_pylist(), "came as list"),
        (lambda b: {"other": changed(b)}, r"to 'other', which takes none: it can give rows to 'totals'"),
    ):
        with pytest.raises(InvalidStateStoreArgument, match=said):
            rewritten(old, "totals", function, tmp_path / "refused", program=program)
    assert not (tmp_path / "refused").exists() or not tree(tmp_path / "refused")


def test_kept_operators_must_fit_the_program(old: str, tmp_path: Path) -> None:
    by_g = StateSchema(pa.schema([("g", pa.int32())]), pa.schema([("fired", pa.int64())]))
    other = OperatorSpec("reminders", 2, OperatorSchema.of_rows(by_g).to_json())
    with pytest.raises(InvalidStateStoreArgument, match=r"'reminders' as it is stored.*Rewrite it as well"):
        rewritten(old, "totals", same, tmp_path / "new", program=program_of(old, reminders=other))
    with pytest.raises(InvalidStateStoreArgument, match="'windows', and the program does not"):
        program = [spec for spec in program_of(old) if spec.name != "windows"]
        rewritten(old, "totals", same, tmp_path / "new", program=program)
    rewritten(old, ["totals", "windows"], {"totals": same, "windows": None}, tmp_path / "new", program=program)
    assert "windows" not in {operator for operator, _ in variables(str(tmp_path / "new"))}

    def to_another_key(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.rename_columns([{"k": "name"}.get(name, name) for name in batch.schema.names])

    with pytest.raises(InvalidStateStoreArgument, match="give functions for all variables"):
        rewritten(old, "visits", {"last": to_another_key}, tmp_path / "other", key=["name"])


def test_a_dry_run_counts_and_shows_and_writes_nothing(old: str, tmp_path: Path) -> None:
    report = rewritten(old, "totals", by_k, tmp_path / "new", key=["k"], combine=added_up, dry_run=True)
    assert report.dry_run and not tree(tmp_path)
    real = rewritten(old, "totals", by_k, tmp_path / "new", key=["k"], combine=added_up)
    assert report.operators == real.operators
    assert (report.rows_read, report.rows_made, report.rows_written) == (
        real.rows_read,
        real.rows_made,
        real.rows_written,
    )
    before, after = report.samples_before["totals", "default"], report.samples_after["totals", "default"]
    assert before.num_rows == after.num_rows == 5 and after.column_names == ["k", "n.count.count"]
    assert by_k(before).to_pylist() == after.to_pylist()
    with pytest.raises(InvalidStateStoreArgument, match="come several times"):
        rewritten(old, "totals", by_k, tmp_path / "other", key=["k"], dry_run=True)


def test_bad_calls_are_refused_with_the_remedy(old: str, tmp_path: Path) -> None:
    new = tmp_path / "new"
    for call, said in (
        (lambda: rewritten(old, "nobody", same, new), "Operator 'nobody' does not exist"),
        (lambda: rewritten(old, "visits", same, new), r"has the state variables 'last', .*function=\{'name'"),
        (lambda: rewritten(old, "visits", {"lost": same}, new), "State variable 'lost' does not exist"),
        (lambda: rewritten(old, "visits", {}, new), "names no state variable"),
        (lambda: rewritten(old, "totals", "same", new), "must be a function"),
        (lambda: rewritten(old, [], same, new), "must name one operator"),
        (lambda: rewritten(old, ["totals", "windows"], {"totals": same}, new), "give one for each"),
        (lambda: rewritten(old, "totals", same, new, num_partitions=0), "must be an int from 1"),
        (lambda: rewritten(old, "totals", same, new, num_partitions={"windows": 2}), "'totals' are rewritten"),
        (lambda: rewritten(old, "totals", same, new, backend="paper"), "paper"),
        (lambda: rewritten(old, "totals", same, new, key=["x"]), "without the key columns 'x'.*key="),
        (lambda: rewritten(old, "totals", same, new, combine={"windows": added_up}), "'windows', which gets no rows"),
        (lambda: rewritten(old, "totals", lambda b: None, new), "made no rows.*program="),
        (lambda: rewritten(old, "totals", lambda b: {"../x": b}, new), r"'../x'"),
        (lambda: rewritten(old, "totals", lambda b: {5: b}, new), "gave rows to 5"),
        (lambda: rewritten(old, "totals", lambda b: {"windows": b}, new), "'windows', which stays as it is"),
        (lambda: rewritten(old, "firsts", same, new), "also kept by time: give program="),
        (lambda: rewritten(old, "totals", same, new, program=[]), "has none"),
        (lambda: rewritten(old, "totals", same, new, program=program_of(old), key=["k"]), "key= and program="),
        (lambda: rewritten(Stored("file").savepoint, "totals", same, new), "is a savepoint: restore_savepoint"),
    ):
        with pytest.raises(InvalidStateStoreArgument, match=said):
            call()
    with pytest.raises(VersionNotFoundError):
        rewritten(old, "totals", same, new, version=99)
    with pytest.raises(MissingFileError):
        rewritten(str(tmp_path / "nothing"), "totals", same, new)
    with pytest.raises(SavepointError, match="is inside the checkpoint"):
        rewritten(old, "totals", same, Path(old) / "new")
    assert not tree(tmp_path)
    rewritten(old, "totals", same, new)
    written = tree(tmp_path)
    with pytest.raises(SavepointError, match="there is offsets"):
        rewritten(old, "totals", same, new)
    assert tree(tmp_path) == written


def test_sessions_must_not_overlap(old: str, tmp_path: Path) -> None:
    def one_key(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(0, "k", pa.array(["all"] * batch.num_rows))

    with pytest.raises(InvalidStateStoreArgument, match="overlap an earlier session of their key"):
        rewritten(old, "sessions", one_key, tmp_path / "new", program=program_of(old))


def test_error_of_a_function_reaches_the_caller(old: str, tmp_path: Path) -> None:
    def failing(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ZeroDivisionError("in the user's function")

    with pytest.raises(ZeroDivisionError, match="in the user's function"):
        rewritten(old, "totals", failing, tmp_path / "new", program=program_of(old))
    assert not tree(tmp_path)


def test_state_only_rewrite_makes_state_for_a_new_query(old: str, tmp_path: Path) -> None:
    report = rewritten(old, "totals", same, tmp_path / "new", state_only=True)
    assert (report.version, report.batch_id) == (0, None)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["metadata", "statestore"]
    versions = versions_of(str(tmp_path / "new"))
    assert versions.completed == 0
    assert rows(str(tmp_path / "new"), "totals") == rows(old, "totals")


@pytest.mark.parametrize("backend", ["file", only_thorough("rocksdb")])
def test_a_write_that_fails_leaves_nothing(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, left = Stored(backend).checkpoint, 0

    def failing(name: str) -> Callable[..., Any]:
        real = getattr(CheckpointStorage, name)

        def write(self: CheckpointStorage, path: str, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and str(tmp_path) in self.location:
                raise StorageError(f"no room for {path}")
            return real(self, path, *args, **kwargs)

        return write

    for name in ("put_new", "put_file"):
        monkeypatch.setattr(CheckpointStorage, name, failing(name))
    writes = 0
    while True:
        left = writes
        try:
            rewritten(old, ["totals", "windows"], {"totals": same, "windows": None}, tmp_path / "new")
            break
        except StorageError as error:
            assert "no room" in str(error)
        assert not tree(tmp_path), writes
        writes += effort(5, 1)
    assert writes > 20
    assert rows(str(tmp_path / "new"), "totals") == rows(old, "totals")


def test_batches_without_offsets_are_rejected_before_any_change(old: str, tmp_path: Path) -> None:
    ck = copied(old, tmp_path / "ck")
    (tmp_path / "ck" / "offsets" / "2").unlink()
    for dry_run in (True, False):
        with pytest.raises(SavepointError, match="offsets/2 does not exist"):
            rewritten(ck, "totals", same, tmp_path / "new", version=4, dry_run=dry_run)
    assert not (tmp_path / "new").exists() or not tree(tmp_path / "new")


def test_concurrent_writers_of_one_checkpoint_with_separate_state(tmp_path: Path) -> None:
    """One makes it; the other, who has looked before that, leaves it alone."""

    def new() -> NewCheckpoint:
        made = NewCheckpoint.at(
            str(tmp_path / "ck"),
            str(tmp_path / "states"),
            {},
            query_id=new_query_id(),
            key_groups=16,
            version=0,
            how="rewritten",
        )
        made.check_place()
        return made

    first, second, third = new(), new(), new()
    first.claim()
    with pytest.raises(SavepointError, match="Another process is making a checkpoint"):
        second.claim()
    first.checkpoint.put_new("offsets/0", b"v1")
    first.finish()
    held = tree(tmp_path)
    with pytest.raises(SavepointError, match="Another process has just made"):
        third.claim()
    assert tree(tmp_path) == held and "ck/offsets/0" in held and not any("claim" in path for path in held)
    first.remove()
    assert not tree(tmp_path)


class Named:
    """A query whose value has a column that is named as one of the key."""

    def init(self, handle: Any) -> None:
        self.last = handle.getValueState("last", "user STRING, n LONG")
        self.timers = handle.getListState("timers", "n LONG")
        self.handle = handle


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flow:
    monkeypatch.setattr(rewrite_state_module, "new_query_id", lambda: "q")
    flow = Flow(tmp_path / "old", processor=Named)

    def both(of: Any) -> None:
        of.last.update(("someone", 5))
        of.timers.put([(1,), (2,)])
        of.handle.registerTimer(10**12)

    flow.batch({(user, 0): both for user in "abc"})
    flow.stop()
    return flow


def test_a_value_named_as_a_key_keeps_its_name_and_hidden_timers_stay(named: Flow, tmp_path: Path) -> None:
    rewritten(named.location, "op", {"last": same}, tmp_path / "new" / "ck")
    found = rows(str(tmp_path / "new" / "ck"), "op", "last")
    assert found == rows(named.location, "op", "last") and {row["user__value"] for row in found} == {"someone"}
    again = Flow(tmp_path / "new", processor=Named, run="run2")
    seen: list[Any] = []
    again.batch(
        {("a", 0): lambda of: seen.extend([of.last.get(), list(of.timers.get()), list(of.handle.listTimers())])}
    )
    again.stop()
    assert seen == [("someone", 5), [(1,), (2,)], [10**12]]


def test_variables_that_stay_need_a_place_in_the_program(named: Flow, tmp_path: Path) -> None:
    program = [OperatorSpec("other", 1, program_of(Stored("file").checkpoint)[0].schema)]
    with pytest.raises(InvalidStateStoreArgument, match="'op', and the program does not"):
        rewritten(named.location, "op", {"last": None}, tmp_path / "new", program=program)


def test_a_new_join_begins_empty(old: str, tmp_path: Path) -> None:
    side = [pa.field("n", pa.int64())]
    schema = join_schema(pa.schema([("k", pa.string())]), ("k",), {"left": side, "right": side}, ("left",), {})
    join = OperatorSpec("joined", 2, schema.to_json())
    rewritten(old, "totals", same, tmp_path / "new", program=[*program_of(old), join])
    assert rows(str(tmp_path / "new"), "joined", "left") == []


def test_numbers_are_not_rounded_and_times_are_kept(old: str, tmp_path: Path) -> None:
    def timeless(batch: pa.RecordBatch) -> pa.RecordBatch:
        at = batch.schema.get_field_index("expiration_timestamp_ms")
        return batch.set_column(at, "expiration_timestamp_ms", pa.array([None] * batch.num_rows, pa.int64()))

    def rounded(batch: pa.RecordBatch) -> pa.RecordBatch:
        at = batch.schema.get_field_index("n.count.count")
        return batch.set_column(at, "n.count.count", pa.array([0.5] * batch.num_rows))

    def endless(batch: pa.RecordBatch) -> pa.RecordBatch:
        at = batch.schema.get_field_index("session_window")
        starts, _ = batch.column(at).flatten()
        both = pa.StructArray.from_arrays([starts, starts], names=["start", "end"])
        return batch.set_column(at, "session_window", both)

    for operator, function, said in (
        ("reminders", {"timers": timeless}, "'expiration_timestamp_ms'.* nulls"),
        ("totals", rounded, "'n.count.count'.*double"),
        ("sessions", endless, "do not end after their beginning"),
    ):
        with pytest.raises(InvalidStateStoreArgument, match=said):
            rewritten(old, operator, function, tmp_path / "new", program=program_of(old))
    single = StateSchema(pa.schema([("user", pa.int64())]), pa.schema([("x", pa.float32())]))
    pairs = PairsOfRows(VariableRows(schema := OperatorSchema.of_rows(single), schema.in_use[0], raw=True))
    exact = conformed(pa.table({"user": [1, 2, 3], "x": [0.5, None, float("nan")]}), pairs, "rows")
    assert exact["x"].to_pylist()[:2] == [0.5, None]
    with pytest.raises(InvalidStateStoreArgument, match="values would be rounded"):
        conformed(pa.table({"user": [1], "x": [0.1]}), pairs, "rows")


def test_call_printed_by_a_rejected_schema_makes_a_usable_checkpoint(old: str, tmp_path: Path) -> None:
    def registration(checkpoint: str) -> QueryRegistration:
        query = json.loads(Path(checkpoint, "statestore/query.json").read_bytes().partition(b"\n")[0])
        return QueryRegistration(
            query_id=query["query_id"],
            run_id="again",
            name=None,
            session_id="s",
            checkpoint_location=checkpoint,
            state_location=f"{checkpoint}/statestore",
            operators=tuple(program),
            key_groups=query["key_groups"],
        )

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        column = batch.schema.get_field_index("n.count.count")
        return batch.set_column(column, "n.count.count", batch.column(column).cast(pa.float64()))

    checkpoint = copied(old, tmp_path / "ck")
    (stored,) = (spec for spec in program_of(checkpoint) if spec.name == "totals")
    n = '"name":"n.count.count","nullable":true,"type":"{}"'
    changed = stored.schema.replace(n.format("long"), n.format("double"))
    assert changed != stored.schema
    program = program_of(checkpoint, totals=msgspec.structs.replace(stored, schema=changed))
    refusal = World(tmp_path).coordinator().register_query(registration(checkpoint)).refusal
    printed = re.search(r"rewrite_state\(.*?, program=dataframe\)", refusal or "")
    assert printed is not None, refusal
    names = {
        "rewrite_state": partial(rewrite_state, workers=OwnWorkers()),
        "function": function,
        "dataframe": program,
    }
    report = eval(printed[0], names)
    answer = World(tmp_path).coordinator().register_query(registration(report.checkpoint_location))
    assert (answer.refusal, answer.completed_version) == (None, versions_of(old).completed)
    assert [row["n.count.count"] for row in rows(report.checkpoint_location, "totals")] == [
        float(row["n.count.count"]) for row in rows(old, "totals")
    ]


def test_state_without_a_batch_is_rewritten_as_the_error_advises(tmp_path: Path) -> None:
    old = str(tmp_path / "old")
    rewritten(Stored("file").checkpoint, "totals", same, Path(old), state_only=True)
    with pytest.raises(InvalidStateStoreArgument, match=r"give state_only=True for a new query"):
        rewritten(old, "totals", same, tmp_path / "new")
    assert rewritten(old, "totals", same, tmp_path / "new", state_only=True).version == 0
    assert rows(str(tmp_path / "new"), "totals") == rows(old, "totals")
