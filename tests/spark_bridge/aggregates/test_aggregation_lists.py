"""collect_list, collect_set and top_k against sorted Python lists."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from tests.effort import examples
from tests.spark_bridge.aggregates.aggregation_runs import run, split

PAGE = pa.struct([("page", pa.string()), ("n", pa.int64())])
ROWS = pa.schema(
    [
        ("key", pa.int64()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("n", pa.int64()),
        ("page", pa.string()),
        ("tags", pa.list_(pa.int32())),
    ]
)
TEXT, LONG, DOUBLE, TAGS = pa.string(), pa.int64(), pa.float64(), pa.list_(pa.field("element", pa.int32()))
AGGREGATOR = Aggregator(
    [
        Output("all s", "collect_list(100)", "s", None, TEXT),
        Output("s by n", "collect_list(3)", "s", "n", TEXT, LONG),
        Output("set x", "collect_set(100)", "x", None, DOUBLE),
        Output("few s", "collect_set(2)", "s", None, TEXT),
        Output("set tags", "collect_set(100)", "tags", None, TAGS),
        Output("top x", "top_k(2)", "x", None, DOUBLE),
        Output("low n", "top_k(2,ascending)", "n", None, LONG),
        Output("s of top x", "top_k(3)", "s", "x", TEXT, DOUBLE),
        Output("s of low n", "top_k(3,ascending)", "s", "n", TEXT, LONG),
        Output("top pages", "top_k(2)", None, None, PAGE, columns=("page", "n")),
    ]
)
row = st.fixed_dictionaries(
    {
        "key": st.integers(0, 2),
        "x": st.none() | st.sampled_from([0.0, -0.0, math.nan, 1.5, -math.inf]),
        "s": st.none() | st.text("abé\0", max_size=2),
        "n": st.none() | st.integers(-2, 2) | st.sampled_from([-(2**63), 2**63 - 1]),
        "page": st.none() | st.sampled_from(["/", "/a"]),
        "tags": st.none() | st.lists(st.none() | st.integers(0, 1), max_size=2),
    }
)


def order(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(order(v) for v in value)
    if value is None:
        return (0,)
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value + 0.0)
    if isinstance(value, list):
        return (1, *(order(v) for v in value))
    return (1, value.encode() if isinstance(value, str) else value)


def expected_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def some(column: str) -> list[Any]:
        return sorted((r[column] for r in rows if r[column] is not None), key=order)

    def distinct(column: str) -> list[Any]:
        return list({repr(order(v)): v for v in some(column)}.values())

    def by(value: str, column: str, *, keep: str) -> list[Any]:
        pairs = [(r[column], r[value]) for r in rows if r[keep] is not None]
        return [v for _, v in sorted(pairs, key=order)]

    pages = sorted(((r["page"], r["n"]) for r in rows), key=order, reverse=True)
    return {
        "all s": some("s"),
        "s by n": by("s", "n", keep="s")[-3:],
        "set x": distinct("x"),
        "few s": distinct("s")[:2],
        "set tags": distinct("tags"),
        "top x": some("x")[::-1][:2],
        "low n": some("n")[:2],
        "s of top x": by("s", "x", keep="x")[::-1][:3],
        "s of low n": by("s", "n", keep="n")[:3],
        "top pages": [{"page": p, "n": n} for p, n in pages[:2]],
    }


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(row, min_size=1, max_size=25), st.lists(st.integers(0, 25), max_size=3), st.booleans())
def test_lists_equal_sorted_python_lists_however_rows_are_split(
    rows: list[dict[str, Any]], cuts: list[int], by_pairs: bool
) -> None:
    batches = [pa.RecordBatch.from_pylist(part, schema=ROWS) for part in split(rows, cuts)]
    for key, got in run(AGGREGATOR, batches, by_pairs=by_pairs).items():
        expected = expected_of([r for r in rows if r["key"] == key])
        assert {
            k: (v, expected[k])
            for k, v in got.items()
            if repr(v).replace("-0.0", "0.0") != repr(expected[k]).replace("-0.0", "0.0")
        } == {}


def test_result_types_are_arrays_of_the_input_types() -> None:
    types = {f.name: str(f.type) for f in AGGREGATOR.result_fields}
    assert types["s by n"] == "list<element: string>"
    assert types["set tags"] == "list<element: list<element: int32>>"
    assert types["top pages"] == "list<element: struct<page: string, n: int64>>"
    assert [f.name for f in AGGREGATOR.state_schema][:2] == [
        "all s.collect_list(100).items",
        "s by n.collect_list(3).pairs",
    ]


def test_states_that_passed_through_spark_are_merged() -> None:
    berlin, utc = pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us", "UTC")
    latest = Aggregator(
        [Output("v", "collect_list(2)", "v", "ts", TEXT, utc), Output("last", "last", "v", "ts", TEXT, utc)]
    )
    item = pa.struct([("by", berlin), ("value", pa.large_string())])
    states = pa.record_batch(
        {
            "last.last.value": pa.array(["a", "b"]),
            "last.last.by": pa.array([1, 2], berlin),
            "v.collect_list(2).pairs": pa.array(
                [[(2, "b"), (3, "c")], [(1, "a")]], pa.large_list(pa.field("item", item))
            ),
        }
    )
    merged = latest.merge([0, 0], 1, states)
    assert [c.to_pylist() for c in latest.results(merged)] == [[["b", "c"]], ["b"]]


def test_list_with_a_limit_is_bounded() -> None:
    keep = Aggregator([Output("v", "collect_list(5)", "v", "v", pa.int64(), pa.int64())])
    rows = pa.record_batch({"key": pa.array([1] * 1000, LONG), "v": pa.array(range(1000), LONG)})
    states = keep.partial(pa.array([0] * 1000), 1, rows)
    assert len(states.column(0)[0]) == 5
    assert run(keep, [rows, rows.slice(0, 10)], by_pairs=True) == {1: {"v": [995, 996, 997, 998, 999]}}
