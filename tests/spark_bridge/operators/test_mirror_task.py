"""The tasks of a mirror against a dict: changes of keys, and whole states, in any order of rows."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.conf import DEFAULT_FAMILY
from backends.encoding.operator_schema import OperatorSchema
from backends.encoding.schema import StateSchema
from coordinator_actor.messages import BatchTimes
from spark_bridge.operators.mirror_task import PLACE, REMOVED, MirrorLogic
from spark_bridge.task.external_sort import Limits
from tests.spark_bridge.operators.operator_runs import OperatorRun

KEY = pa.schema([pa.field("user", pa.string()), pa.field("at", pa.timestamp("us", "UTC"))])
VALUE = pa.schema([pa.field("n", pa.int64())])
SCHEMA = OperatorSchema.of_rows(StateSchema(KEY, VALUE))
COLUMNS = {
    "user": pa.string(),
    "at": pa.timestamp("us", "Europe/Berlin"),  # as Spark gives it
    "n": pa.int64(),
    REMOVED: pa.bool_(),
    PLACE: pa.int64(),
}
SMALL = Limits(memory=1500, step_rows=3, step_bytes=500, fan_in=2)
changes = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "", None]), st.none() | st.integers(0, 2), st.none() | st.integers(0, 1 << 40)
    ),
    max_size=12,
)
"""User, time, and the value; a change without a value removes its key."""
batches = st.lists(st.tuples(changes, st.booleans(), st.integers(0, 9)), min_size=1, max_size=5)


def rows_of(of_batch: list[Any], seed: int) -> pa.RecordBatch:
    rows = [(user, at, n, n is None, place) for place, (user, at, n) in enumerate(of_batch)]
    random.Random(seed).shuffle(rows)
    arrays = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(COLUMNS.values())]
    return pa.RecordBatch.from_arrays(arrays, names=list(COLUMNS))


@pytest.mark.parametrize("limits", [None, SMALL])
@given(of_batches=batches)
def test_last_change_of_each_key_counts(limits: Limits | None, of_batches: list[Any]) -> None:
    model: dict[Any, int] = {}
    run = OperatorRun(MirrorLogic(SCHEMA, False, limits), SCHEMA, KEY.names, num_partitions=3)
    for of_batch, is_scan, seed in of_batches:
        run.logic = MirrorLogic(SCHEMA, is_scan, limits)
        if is_scan:
            model.clear()
        for user, at, n in of_batch:
            model.pop((user, at), None)
            if n is not None:
                model[user, at] = n
        assert run.batch(rows_of(of_batch, seed), BatchTimes(), cuts=[seed]) == []
        kept = {
            (key["user"], key["at"] and key["at"].microsecond): value["n"]
            for key, value in run.stored_rows(DEFAULT_FAMILY)
        }
        assert kept == model
        assert run.figures.num_rows == len(of_batch)
    run.close()
