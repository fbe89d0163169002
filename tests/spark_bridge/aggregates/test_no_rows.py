"""The state of no rows: what Spark answers for it, and that it adds nothing to other states."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from spark_bridge import functions as S
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.functions import AggregateFunction
from spark_bridge.operators.aggregate import output_of
from spark_bridge.task.keyed_rows import empty

TYPES = {"i": "integer", "x": "double", "m": "decimal(12,2)", "s": "string", "flag": "boolean", "ts": "timestamp"}
SCHEMA = T.StructType.fromJson(
    {"type": "struct", "fields": [{"name": n, "type": t, "nullable": True, "metadata": {}} for n, t in TYPES.items()]}
)
AT = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)


@pytest.mark.parametrize(
    ("function", "of_nothing"),
    [
        (S.count(), 0),
        (S.count("s"), 0),
        (S.count_if("flag"), 0),
        (S.sum("i"), None),
        (S.sum("x"), None),
        (S.sum("m"), None),
        (S.avg("i"), None),
        (S.avg("m"), None),
        (S.min("i"), None),
        (S.max("s"), None),
        (S.max("x"), None),
        (S.stddev("x"), None),
        (S.var_pop("i"), None),
        (S.first("s", by="ts"), None),
        (S.last("i", by="ts"), None),
        (S.collect_list("s"), []),
        (S.collect_list("s", by="ts"), []),
        (S.collect_set("i"), []),
        (S.top_k("x", 2), []),
        (S.top_k(["s", "i"], 2, by="ts"), []),
        (S.approx_count_distinct("s"), 0),
    ],
    ids=lambda v: f"{v.name}-{v.column}-{v.by}" if isinstance(v, AggregateFunction) else None,
)
def test_aggregates_of_no_rows_match_spark_and_change_nothing(function: AggregateFunction, of_nothing: Any) -> None:
    aggregator = Aggregator([output_of(SCHEMA, "out", function, None)])
    nothing = aggregator.partial(np.zeros(0, np.int64), 1, empty(aggregator.input_schema))
    assert nothing.num_rows == 1
    assert aggregator.results(nothing)[0].to_pylist() == [of_nothing]

    some = aggregator.partial(np.zeros(2, np.int64), 1, _rows())
    alone = aggregator.results(some)[0].to_pylist()
    assert alone != [of_nothing]
    for pair in ([nothing, some], [some, nothing]):
        both = pa.Table.from_batches(pair).combine_chunks().to_batches()[0]
        assert aggregator.results(aggregator.merge(np.zeros(2, np.int64), 1, both))[0].to_pylist() == alone
        old, new = pair
        assert aggregator.results(aggregator.merge_pairs(old, pa.array([True]), new))[0].to_pylist() == alone
    twice = pa.Table.from_batches([nothing, nothing]).combine_chunks().to_batches()[0]
    merged = aggregator.merge(np.zeros(2, np.int64), 1, twice)
    assert aggregator.results(merged)[0].to_pylist() == [of_nothing]


def _rows() -> pa.RecordBatch:
    values = {"i": [1, 2], "x": [1.0, 2.0], "m": ["1.00", "2.00"], "s": ["a", "b"], "flag": [True, True]}
    columns = [pa.array(values[n], t) for n, t in (("i", pa.int32()), ("x", pa.float64()))]
    columns += [pa.array(values["m"]).cast(pa.decimal128(12, 2)), pa.array(values["s"]), pa.array(values["flag"])]
    columns.append(pa.array([AT, AT + dt.timedelta(1)], pa.timestamp("us", "UTC")))
    return pa.RecordBatch.from_arrays(columns, names=SCHEMA.names)
