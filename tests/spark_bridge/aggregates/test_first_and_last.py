"""``first`` and ``last`` against plain Python: rows of the same order, nulls, whatever way the rows are split."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from tests.effort import examples
from tests.spark_bridge.aggregates.aggregation_runs import run, split

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
