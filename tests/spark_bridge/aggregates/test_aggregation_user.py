"""A user's own aggregate as functions on Arrow tables."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.aggregates.aggregator import Aggregator, result_fields, results
from spark_bridge.aggregates.computation import Output, UserAggregate
from spark_bridge.exceptions import InvalidOperatorError
from tests.effort import examples
from tests.spark_bridge.aggregates.aggregation_runs import run, split

STATE = pa.schema([("weight", pa.float64()), ("weighted", pa.float64())])


def partial(rows: pa.Table) -> pa.Table:
    rows = rows.append_column("weighted", pc.multiply(rows["x"], rows["w"]))
    sums = rows.group_by("group_id").aggregate([("w", "sum"), ("weighted", "sum")])
    return sums.rename_columns(["group_id", "weight", "weighted"])


def merge(states: pa.Table) -> pa.Table:
    sums = states.group_by("group_id").aggregate([("weighted", "sum"), ("weight", "sum")])
    return sums.rename_columns(["group_id", "weighted", "weight"])  # any order of columns will do


def finish(states: pa.Table) -> Any:
    return pc.divide(states["weighted"], states["weight"])


def weighted_mean(**changes: Any) -> Aggregator:
    functions: dict[str, Any] = {"partial": partial, "merge": merge, "finish": finish, "result_type": pa.float32()}
    user = UserAggregate(STATE, **(functions | changes))
    return Aggregator([Output("mean", "merge", None, None, None, columns=("x", "w"), user=user)])


def batch_of(rows: list[tuple[int, int, int]]) -> pa.RecordBatch:
    keys, xs, ws = zip(*rows, strict=True)
    columns = {"key": pa.array(keys, pa.int64()), "x": pa.array(xs, pa.float64()), "w": pa.array(ws, pa.float64())}
    return pa.record_batch(columns)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9), st.integers(1, 3)), min_size=1, max_size=20),
    st.lists(st.integers(0, 20), max_size=3),
    st.booleans(),
)
def test_a_weighted_mean_however_rows_are_split(
    rows: list[tuple[int, int, int]], cuts: list[int], by_pairs: bool
) -> None:
    answer = run(weighted_mean(), [batch_of(part) for part in split(rows, cuts)], by_pairs=by_pairs)
    for key, got in answer.items():
        mine = [(x, w) for k, x, w in rows if k == key]
        assert got["mean"] == pytest.approx(sum(x * w for x, w in mine) / sum(w for _, w in mine), rel=1e-6)


def test_clients_and_those_without_finish_see_the_state() -> None:
    rows = [(1, 2, 3), (1, 4, 1)]
    states = weighted_mean().partial([0, 0], 1, batch_of(rows))
    assert [f.name for f in states.schema] == ["mean.merge.weight", "mean.merge.weighted"]
    assert results(states)[0].to_pylist() == [{"weight": 4.0, "weighted": 10.0}]
    assert str(result_fields(states.schema)[0].type) == "struct<weight: double, weighted: double>"
    plain = weighted_mean(finish=None, result_type=None)
    assert run(plain, [batch_of(rows)], by_pairs=True) == {1: {"mean": {"weight": 4.0, "weighted": 10.0}}}
    assert weighted_mean().result_fields == [pa.field("mean", pa.float32())]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial": lambda rows: None}, "mean: partial returned a builtins.NoneType; it must return a pyarrow.Table"),
        ({"partial": lambda rows: rows}, r"it must give group_id and the state columns weight, weighted \(weight,"),
        ({"partial": lambda rows: partial(rows).slice(1)}, "mean: partial answered 1 rows for 2 groups"),
        ({"merge": lambda states: states}, "mean: merge answered 4 rows for 2 groups"),
        ({"finish": lambda states: states["weight"].slice(1)}, "mean: finish returned .* array of 2 values"),
        ({"finish": lambda states: pa.array(["a", "b"])}, "mean: finish has the type string where float was declared"),
    ],
)
def test_wrong_answer_is_an_error_with_the_reason(changes: dict[str, Any], message: str) -> None:
    rows = [(1, 2, 3), (2, 4, 1)]
    with pytest.raises(InvalidOperatorError, match=message):
        run(weighted_mean(**changes), [batch_of(rows), batch_of(rows)], by_pairs=True)
