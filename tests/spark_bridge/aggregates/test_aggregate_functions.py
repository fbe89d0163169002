"""Declared aggregate functions become outputs, or errors that say what is wrong.

``first`` and ``last`` against plain Python: rows of the same order, nulls, whatever way the rows are split.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from spark_bridge import functions as S
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.exceptions import InvalidOperatorError
from spark_bridge.functions import AggregateFunction
from spark_bridge.operators.aggregate import output_of
from tests.effort import examples
from tests.spark_bridge.aggregates.aggregation_runs import run, split

SCHEMA = T.StructType(
    [
        T.StructField("i", T.IntegerType()),
        T.StructField("x", T.DoubleType()),
        T.StructField("m", T.DecimalType(12, 2)),
        T.StructField("s", T.StringType()),
        T.StructField("flag", T.BooleanType()),
        T.StructField("ts", T.TimestampType()),
        T.StructField("tags", T.ArrayType(T.StringType())),
        T.StructField("map", T.MapType(T.StringType(), T.LongType())),
        T.StructField("twice", T.LongType()),
        T.StructField("twice", T.LongType()),
        T.StructField("group_id", T.LongType()),
    ]
)
TS = pa.timestamp("us", "UTC")


def same(table: pa.Table) -> pa.Table:
    return table


@pytest.mark.parametrize(
    ("function", "result", "state"),
    [
        (S.count(), "int64", ["count.count"]),
        (S.count("*"), "int64", ["count.count"]),
        (S.count("map"), "int64", ["count.count"]),
        (S.count_if("flag"), "int64", ["count_if.count"]),
        (S.sum("i"), "int64", ["sum.sum"]),
        (S.sum("m"), "decimal128(22, 2)", ["sum.sum"]),
        (S.avg("i"), "double", ["mean.sum", "mean.count"]),
        (S.mean("m"), "decimal128(16, 6)", ["mean(12,2).sum", "mean(12,2).count"]),
        (S.min("tags"), "list<element: string>", ["min.value"]),
        (S.stddev("i"), "double", ["stddev_samp.count", "stddev_samp.mean", "stddev_samp.m2"]),
        (S.variance("m"), "double", ["var_samp.count", "var_samp.mean", "var_samp.m2"]),
        (S.first("s"), "string", ["first.value", "first.by"]),
        (S.last("tags", by="x"), "list<element: string>", ["last.value", "last.by"]),
        (S.collect_list("s", limit=7), "list<element: string>", ["collect_list(7).pairs"]),
        (S.collect_set("s"), "list<element: string>", ["collect_set(1000).items"]),
        (S.top_k("x", 3), "list<element: double>", ["top_k(3).items"]),
        (S.top_k("x", 3, by="ts", descending=False), "list<element: double>", ["top_k(3,ascending).pairs"]),
        (S.top_k(["s", "i"], 2), "list<element: struct<s: string, i: int32>>", ["top_k(2).items"]),
        (S.approx_count_distinct("s"), "int64", ["approx_count_distinct(9).sketch"]),
        (S.approx_count_distinct("tags", rsd=0.01), "int64", ["approx_count_distinct(14).sketch"]),
        (S.merge("x", state=pa.schema([("p", pa.float64())]), partial=same, merge=same), "double", ["merge.p"]),
    ],
)
def test_state_columns_and_result_types(function: AggregateFunction, result: str, state: list[str]) -> None:
    aggregator = Aggregator([output_of(SCHEMA, "o", function, "ts")])
    assert [str(f.type) for f in aggregator.result_fields] == [result]
    assert aggregator.state_schema.names == [f"o.{name}" for name in state]


def test_values_are_ordered_by_the_watermark_column() -> None:
    assert output_of(SCHEMA, "o", S.first("s"), "ts") == Output("o", "first", "s", "ts", pa.string(), TS)
    assert output_of(SCHEMA, "o", S.last("s", by="i"), "ts").by == "i"
    assert output_of(SCHEMA, "o", S.collect_list("s"), None).by is None
    assert output_of(SCHEMA, "o", S.top_k("s", 1), "ts").by is None


def test_a_users_aggregate_keeps_its_types_and_columns() -> None:
    state = T.StructType([T.StructField("p", T.DoubleType(), nullable=False), T.StructField("n", T.LongType())])
    function = S.merge(["x", "i"], state=state, partial=same, merge=same, finish=same, result=T.FloatType())
    output = output_of(SCHEMA, "o", function, "ts")
    assert output.inputs == ("x", "i")
    assert output.user is not None
    assert output.user.state == pa.schema([("p", pa.float64()), ("n", pa.int64())])
    assert Aggregator([output]).result_fields == [pa.field("o", pa.float32())]


STATE = pa.schema([("p", pa.float64())])


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: S.sum("s"), "o=S.sum: column 's' has type string, which sum does not take"),
        (lambda: S.stddev("flag"), "o=S.stddev_samp: column 'flag' has type boolean"),
        (lambda: S.count_if("i"), "o=S.count_if: column 'i' has type int, which count_if does not take"),
        (lambda: S.max("map"), "o=S.max: column 'map' has type map<string,bigint>"),
        (lambda: S.collect_set("map"), "o=S.collect_set: column 'map' has type map"),
        (lambda: S.approx_count_distinct("map"), "o=S.approx_count_distinct: column 'map' has type map"),
        (lambda: S.top_k(["i", "map"], 2), "o=S.top_k: column 'i, map' has type struct<i:int,map:map"),
        (lambda: S.top_k(["i", "i"], 2), "o=S.top_k: a column is named twice in i, i"),
        (lambda: S.top_k("i", 2, by="map"), "o=S.top_k: by='map' has type map<string,bigint>, which has no order"),
        (lambda: S.first("s"), "o=S.first: which event time"),
        (lambda: S.sum("nope"), "o=S.sum: 'nope': the column does not exist; the DataFrame has i, x, m"),
        (lambda: S.sum("twice"), "o=S.sum: 'twice': the column is ambiguous"),
        (lambda: S.sum(None), "S.sum: None is not the name of a column: give the column's name"),  # type: ignore[arg-type]
        (lambda: S.top_k([], 2), "S.top_k: None is not the name of a column"),
        (lambda: S.top_k(["i", 3], 2), "S.top_k: 3 is not the name of a column"),  # type: ignore[list-item]
        (lambda: S.top_k("i", 0), "top_k: k=0 must be a positive integer"),
        (lambda: S.collect_list("s", limit=True), "collect_list: limit=True must be a positive integer"),
        (lambda: S.collect_list("s", max_bytes=0), "collect_list: max_bytes=0 must be a positive integer"),
        (lambda: S.collect_set("s", limit=5, max_bytes=5), "limit=5 and max_bytes=5: give limit to drop"),
        (lambda: S.collect_set("s", limit=1.5), "collect_set: limit=1.5 must be"),  # type: ignore[arg-type]
        (lambda: S.approx_count_distinct("s", rsd=0.4), "rsd=0.4 is out of range; it must be"),
        (lambda: S.approx_count_distinct("s", rsd=0.001), "rsd=0.001 is out of range; it must be"),
        (lambda: S.approx_count_distinct("s", rsd=0), "rsd=0 is out of range; it must be"),
        (lambda: S.merge("x", state=STATE, partial=None, merge=same), "merge: partial=None is not a function"),  # type: ignore[arg-type]
        (lambda: S.merge("x", state=STATE, partial=same, merge=same, finish=same), "finish= and result= .* together"),
        (lambda: S.merge("group_id", state=STATE, partial=same, merge=same), "'group_id' is the column of the groups"),
        (lambda: S.merge("x", state=pa.schema([]), partial=same, merge=same), "at least one column.*it has none"),
        (lambda: S.merge("x", state=pa.schema([("a.b", pa.int64())]), partial=same, merge=same), "contain a dot"),
        (lambda: S.merge("x", state=3, partial=same, merge=same), "state=3 declares no columns"),
        (lambda: S.merge("x", state=pa.schema([("t", pa.time32("s"))]), partial=same, merge=same), "cannot be stored"),
        (
            lambda: S.merge("x", state=STATE, partial=same, merge=same, finish=same, result=float),
            "result=<class 'float'> is not a type",
        ),
    ],
)
def test_wrong_declarations_raise_errors_with_the_reason(declare: Any, message: str) -> None:
    with pytest.raises(InvalidOperatorError, match=message):
        output_of(SCHEMA, "o", declare(), None)


AGGREGATOR = Aggregator([Output(f, f, "v", "by", pa.string(), pa.int64()) for f in ("first", "last")])
Row = tuple[int, "str | None", "int | None"]


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    keys, values, orders = zip(*rows, strict=True)
    return pa.record_batch(
        {"key": pa.array(keys, pa.int64()), "v": pa.array(values, pa.string()), "by": pa.array(orders, pa.int64())}
    )


def expected(rows: list[Row], key: int) -> dict[str, Any]:
    """Of rows of the same order the greater value, a null being the least; rows without an order do not count."""
    of_key = [(by, "" if v is None else f"v{v}") for k, v, by in rows if k == key and by is not None]
    if not of_key:
        return {"first": None, "last": None}
    least, greatest = min(of_key)[0], max(of_key)[0]
    chosen = {"first": max(v for by, v in of_key if by == least), "last": max(v for by, v in of_key if by == greatest)}
    return {name: value[1:] if value else None for name, value in chosen.items()}


@settings(max_examples=examples(120), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.none() | st.sampled_from(["", "a", "b", "c"]), st.none() | st.integers(0, 2)),
        min_size=1,
        max_size=30,
    ),
    st.lists(st.integers(0, 30), max_size=3),
    st.booleans(),
)
@example([(0, "b", 1), (0, "a", 1)], [1], True)
@example([(0, "b", 1), (0, "a", 1)], [1], False)
def test_the_greater_value_of_the_same_order_is_taken(rows: list[Row], cuts: list[int], by_pairs: bool) -> None:
    answer = run(AGGREGATOR, [batch_of(part) for part in split(rows, cuts)], by_pairs=by_pairs)
    assert answer == {key: expected(rows, key) for key in {row[0] for row in rows}}
