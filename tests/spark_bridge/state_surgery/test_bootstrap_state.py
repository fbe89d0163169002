"""``bootstrap_state`` turns rows of any source into a query's initial state; tasks run in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from backends.encoding.operator_schema import OperatorSchema, StateVariable
from backends.encoding.schema import StateSchema
from backends.exceptions import InvalidStateStoreArgument
from backends.storage.checkpoint_storage import CheckpointStorage
from coordinator_actor.durable.records import read_audit_records
from coordinator_actor.exceptions import SavepointError
from coordinator_actor.messages import OperatorSpec
from coordinator_actor.reading.stored_versions import StateVersions, find_state
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.state_data.frames import state_table
from spark_bridge.state_format.layouts import MAP, VALUE, map_families, value_families, with_ttl
from spark_bridge.state_format.rows_to_pairs import PairsOfRows
from spark_bridge.state_format.stored_rows import VariableRows
from spark_bridge.state_surgery import declared_operators
from spark_bridge.state_surgery.declared_operators import merged_states, states_of_rows
from spark_bridge.state_surgery.new_state import NewStateReport
from spark_bridge.state_surgery.rewrite_state import bootstrap_state
from tests.coordinator_actor.coordinator_world import World
from tests.effort import only_thorough
from tests.spark_bridge.state_data.format_fixtures import Stored
from tests.spark_bridge.state_surgery.surgery_steps import (
    GIVEN,
    KEYS,
    PROGRAM,
    OwnWorkers,
    program_of,
    rows,
    tree,
    variables,
)


def made(given: Any, at: Path, program: Any = PROGRAM, **options: Any) -> NewStateReport:
    return bootstrap_state(given, str(at), program, workers=OwnWorkers(), **options)


def batches() -> Iterator[pa.RecordBatch]:
    yield from GIVEN.to_batches(max_chunksize=3)


@pytest.mark.parametrize(
    "given",
    [
        GIVEN,
        GIVEN.combine_chunks().to_batches()[0],
        pa.RecordBatchReader.from_batches(GIVEN.schema, batches()),
        pa.concat_tables([GIVEN.slice(2), GIVEN.slice(0, 2)]),
        GIVEN.to_pandas(types_mapper=pd.ArrowDtype),
        {"totals": GIVEN.select(["x.sum.sum", "user", "n.count.count"])},
        {
            ("totals", "default"): GIVEN.cast(
                pa.schema({"user": pa.int32(), "n.count.count": pa.int16(), "x.sum.sum": pa.float32()})
            )
        },
    ],
    ids=["table", "batch", "reader", "chunks", "pandas", "order", "types"],
)
def test_rows_come_as_people_have_them(given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared_operators, "SOURCE_BYTES", 40)
    report = made(given, tmp_path / "ck", reference="import 3")
    assert rows(str(tmp_path / "ck"), "totals") == sorted(GIVEN.to_pylist(), key=repr)
    assert report.rows_written == {("totals", "default"): 4} and report.batch_id is None and report.version == 0
    record = read_audit_records(CheckpointStorage.open(f"{tmp_path}/ck/statestore"))[0]
    assert (record.what, record.reference, record.counts["rows_written"]) == ("bootstrap_state", "import 3", 4)
    table = state_table(str(tmp_path / "ck"), "totals")
    assert set(table["partition_id"].to_pylist()) <= {0, 1, 2} and len(set(table["partition_id"].to_pylist())) > 1


@pytest.mark.parametrize("backend", ["file", only_thorough("rocksdb")])
def test_every_kind_of_state_can_be_given(backend: str, tmp_path: Path) -> None:
    old = Stored(backend).checkpoint
    given = {
        (operator, state): state_table(old, operator, state, state_columns=True) for operator, state in variables(old)
    }
    made(given, tmp_path / "ck", program_of(old))
    for operator, state in variables(old):
        assert rows(str(tmp_path / "ck"), operator, state) == rows(old, operator, state), (operator, state)


def test_missing_variables_begin_empty_and_a_ttl_is_kept(tmp_path: Path) -> None:
    schema = OperatorSchema(
        (
            StateVariable("last", VALUE, value_families("last", KEYS, with_ttl([pa.field("n", pa.int64())])), 1000),
            StateVariable(
                "pages",
                MAP,
                map_families(
                    "pages", KEYS, [pa.field("page", pa.string())], [pa.field("n", pa.int32())], has_ttl=False
                ),
            ),
        )
    )
    program = [OperatorSpec("visits", 2, schema.to_json(), "file"), *PROGRAM]
    given = pa.table({"user": [4, 5], "n": [1, 2], "ttl_expiration_ms": [99, None]})
    made({("visits", "last"): given}, tmp_path / "ck", program)
    assert rows(str(tmp_path / "ck"), "visits", "last") == given.to_pylist()
    assert rows(str(tmp_path / "ck"), "visits", "pages") == rows(str(tmp_path / "ck"), "totals") == []
    with pytest.raises(InvalidStateStoreArgument, match=r"without 'ttl_expiration_ms'"):
        made({("visits", "last"): given.drop_columns(["ttl_expiration_ms"])}, tmp_path / "other", program)
    with pytest.raises(InvalidStateStoreArgument, match="give rows as a mapping"):
        made(given, tmp_path / "other", program)
    with pytest.raises(InvalidStateStoreArgument, match="rows for 'visits'"):
        made({"visits": given}, tmp_path / "other", program)
    pages = pa.table({"user": [1, 1], "page": ["a", "a"], "n": [1, 2]})
    with pytest.raises(InvalidStateStoreArgument, match="come several times, such as user=1, page='a'"):
        made({("visits", "pages"): pages}, tmp_path / "other", program)
    assert not tree(tmp_path / "other")


def test_bad_rows_are_rejected_and_leave_nothing(tmp_path: Path) -> None:
    twice = pa.concat_tables([GIVEN, GIVEN.slice(1, 1)])
    for given, options, said in (
        (GIVEN.drop_columns(["user"]), {}, "without 'user'"),
        (GIVEN.append_column("more", GIVEN["user"]), {}, "unknown 'more'"),
        (twice, {}, "come several times, such as user=2.*combine="),
        (twice, {"combine": "merge"}, "needs program= to know how"),
        (GIVEN, {"combine": {"totlas": "merge"}}, "combine= names 'totlas'"),
        (twice, {"combine": "add"}, "must be a function, or 'merge'"),
        (GIVEN.set_column(1, "n.count.count", pa.array([1, 2, None, 4])), {}, "'n.count.count'.* 1 nulls"),
        (GIVEN.set_column(0, "user", pa.array(["1", "2", "3", "4"])), {}, "'user'.*string.*int64"),
        ([1, 2], {}, "The rows are list: give a pyarrow Table"),
        (GIVEN, {"num_partitions": 2000}, "from 1 to 1024"),
        (GIVEN, {"num_partitions": {"other": 2}}, "'other', and the program has 'totals'"),
        (GIVEN, {"key_groups": 0}, "key groups must be 1"),
        (GIVEN, {"backend": "paper"}, "paper"),
        (GIVEN, {"as_input": True}, "input rows of an aggregate"),
        ({"nobody": GIVEN}, {}, "rows for 'nobody'; the program has"),
        ({"totals": GIVEN, ("totals", "default"): GIVEN}, {}, "twice"),
    ):
        with pytest.raises(InvalidStateStoreArgument, match=said):
            made(given, tmp_path / "ck", **options)
        assert not tree(tmp_path), said
    made(
        twice,
        tmp_path / "ck",
        combine=lambda t: (
            t.group_by("user")
            .aggregate([("n.count.count", "max"), ("x.sum.sum", "max")])
            .rename_columns(GIVEN.column_names)
        ),
    )
    assert len(rows(str(tmp_path / "ck"), "totals")) == 4
    with pytest.raises(SavepointError, match="there is statestore, metadata already"):
        made(GIVEN, tmp_path / "ck")


def test_states_of_input_rows_are_those_of_the_aggregate() -> None:
    aggregator = Aggregator([Output("n", "count", None, None, None), Output("x", "sum", "amount", None, pa.float64())])
    schema = OperatorSchema.of_rows(StateSchema(KEYS, aggregator.state_schema))
    pairs = PairsOfRows(VariableRows(schema, schema.in_use[0], raw=True))
    states = partial(states_of_rows, aggregator, pairs, "operator 'totals'")
    first = states(pa.record_batch({"user": pa.array([1, 2, 1]), "amount": pa.array([1.0, 2.0, None])}))
    second = states(pa.record_batch({"amount": pa.array([8.0]), "user": pa.array([1])}))
    merged = merged_states(aggregator, pairs, pa.Table.from_batches([first, second]))
    assert sorted(merged.to_pylist(), key=repr) == [
        {"user": 1, "n.count.count": 3, "x.sum.sum": 9.0},
        {"user": 2, "n.count.count": 1, "x.sum.sum": 2.0},
    ]
    with pytest.raises(InvalidStateStoreArgument, match="without 'amount': they need the columns 'user', 'amount'"):
        states(pa.record_batch({"user": pa.array([1])}))


def test_a_query_begins_with_the_state(tmp_path: Path) -> None:
    report = made(GIVEN, tmp_path / "ck")
    versions = StateVersions.look(find_state(str(tmp_path / "ck")))
    assert versions.completed == 0 and list(versions.readable) == [0]
    world = World(tmp_path)
    answer = world.coordinator(0).register_query(
        world.registration("run1", 3, operators=tuple(PROGRAM), key_groups=1024, query_id=report.query_id)
    )
    assert (answer.refusal, answer.completed_version) == (None, 0)
