"""Every aggregate function on a stream against Spark's own function of that name in a batch query."""

from __future__ import annotations

import datetime as dt
import math
import random
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column, Row
from pyspark.sql import functions as F

from spark_bridge import aggregate
from spark_bridge import functions as S
from spark_bridge.functions import AggregateFunction
from tests.spark_bridge.conftest import Stream

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = (
    "k long, i int, l long, x double, f float, m decimal(12,2), big decimal(38,10), s string, flag boolean, d date, "
    "ts timestamp, tags array<int>, p struct<a:int,b:string>, bin binary, odd double"
)
NUMBERS = ("i", "l", "x", "f", "m", "big")
ALL = (*NUMBERS, "s", "flag", "d", "ts", "tags", "p", "bin", "odd")
VARIANCES = ("stddev", "stddev_samp", "stddev_pop", "variance", "var_samp", "var_pop")
ODD = (0.0, -0.0, math.nan, math.inf, -math.inf, 1.5)


def functions() -> dict[str, tuple[AggregateFunction, Column]]:
    """Ours and Spark's, by output name. Lists are compared sorted, for Spark's have no order."""

    def product(table: pa.Table) -> pa.Table:
        column = next(c for c in table.column_names if c != "group_id")
        products = table.group_by("group_id").aggregate([(column, "product")])
        return products.rename_columns([{f"{column}_product": "p"}.get(c, c) for c in products.column_names])

    pairs = {"n": (S.count(), F.count("*")), "true": (S.count_if("flag"), F.expr("count_if(flag)"))}
    for c in NUMBERS:
        pairs |= {f"sum_{c}": (S.sum(c), F.sum(c)), f"avg_{c}": (S.avg(c), F.avg(c))}
    for name in VARIANCES:
        pairs |= {f"{name}_{c}": (getattr(S, name)(c), getattr(F, name)(c)) for c in ("i", "x", "m")}
    for name in ("sum", "avg", *VARIANCES):
        pairs[f"{name}_odd"] = (getattr(S, name)("odd"), getattr(F, name)("odd"))
    for c in ALL:
        values = F.collect_list(c)
        pairs |= {
            f"count_{c}": (S.count(c), F.count(c)),
            f"min_{c}": (S.min(c), F.min(c)),
            f"max_{c}": (S.max(c), F.max(c)),
            f"list_{c}": (S.collect_list(c), F.sort_array(values)),
            f"top_{c}": (S.top_k(c, 5), F.slice(F.sort_array(values, asc=False), 1, 5)),
            f"distinct_{c}": (S.approx_count_distinct(c), F.approx_count_distinct(c)),
            f"about_{c}": (S.approx_count_distinct(c, rsd=0.3), F.approx_count_distinct(c, rsd=0.3)),
        }
        if c != "odd":  # Spark keeps every NaN apart in a set
            pairs[f"set_{c}"] = (S.collect_set(c), F.sort_array(F.collect_set(c)))
    pairs |= {
        # Times are unique, so Spark's choice is deterministic.
        "first": (S.first("s", by="ts"), F.min_by("s", "ts")),
        "last": (S.last("s", by="ts"), F.max_by("s", "ts")),
        "by_time": (
            S.collect_list("i", by="ts"),
            F.expr("transform(sort_array(collect_list(nvl2(i, (ts, i), null))), e -> e.i)"),
        ),
        "product": (
            S.merge("f", state="p double", partial=product, merge=product, finish=lambda t: t["p"], result="double"),
            F.product("f"),
        ),
    }
    return pairs


def rows_of(seed: int) -> list[tuple[Any, ...]]:
    draw = random.Random(seed)
    start = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)

    def maybe(value: Any) -> Any:
        return None if draw.random() < 0.2 else value

    rows: list[tuple[Any, ...]] = []
    for n, second in enumerate(draw.sample(range(10**6), 240)):
        key = draw.choice([1, 2, 3, None]) if n else 4
        if key is not None and draw.random() < 0.01:
            key, values = 5, (None,) * 14  # a key without any value
        else:
            values = (
                maybe(draw.randint(-1000, 1000)),
                maybe(draw.randint(-(2**40), 2**40)),
                maybe(draw.uniform(-1e3, 1e3)),
                maybe(draw.choice([0.5, -0.75, 0.0, -0.0, 1.25]) if key == 2 else draw.choice([0.5, -0.75, 1.25])),
                maybe(Decimal(draw.randint(-(10**6), 10**6)).scaleb(-2)),
                maybe(Decimal(draw.randint(-(10**20), 10**20)).scaleb(-10)),
                maybe(draw.choice("abcäö") + str(draw.randint(0, 100))),
                maybe(draw.random() < 0.3),
                maybe(dt.date(2024, 1, 1) + dt.timedelta(days=draw.randint(0, 20))),
                start + dt.timedelta(seconds=second),
                maybe([draw.randint(0, 3) for _ in range(draw.randint(0, 3))]),
                maybe({"a": draw.randint(0, 3), "b": maybe(draw.choice("xyz"))}),
                maybe(bytes([draw.randint(0, 255)])),
                # One key alone has numbers that spoil all sums.
                draw.choice(ODD) if key == 1 else 2.5,
            )
        rows.append((key, *values))
    return rows


def plain(value: Any) -> Any:
    """Values that compare as they should: -0.0 with 0.0, NaN with itself."""
    if isinstance(value, Row):
        return tuple(plain(v) for v in value)
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return bytes(value) if isinstance(value, bytearray) else value


def is_same(name: str, ours: Any, sparks: Any) -> bool:
    if name.startswith("about_"):
        # 16 registers for up to 100 values: here both correct a bias, Spark by measured tables.
        return abs(ours - sparks) <= max(1, 0.03 * sparks)
    if isinstance(ours, float) and isinstance(sparks, float):
        return ours == sparks or math.isclose(ours, sparks, rel_tol=1e-9)
    return bool(ours == sparks)


def test_every_function_equals_sparks(make_stream: Any) -> None:
    stream: Stream = make_stream(SCHEMA)
    rows = rows_of(7)
    for part in (rows[:100], rows[100:101], rows[101:]):
        stream.add(part)
    pairs = functions()
    df = aggregate(
        stream.read(), by="k", operator="functions", num_partitions=2, **{n: ours for n, (ours, _) in pairs.items()}
    )
    native = stream.spark.read.schema(SCHEMA).parquet(str(stream.root / "in"))
    expected = native.groupBy("k").agg(*[spark.alias(n) for n, (_, spark) in pairs.items()])
    types = {f.name: f.dataType.simpleString() for f in expected.schema.fields}
    assert {f.name: f.dataType.simpleString() for f in df.schema.fields} == types

    newest: dict[Any, Row] = {}
    query = (
        df.writeStream.option("checkpointLocation", stream.checkpoint)
        .foreachBatch(lambda batch, _: newest.update({row["k"]: row for row in batch.collect()}))
        .start()
    )
    query.processAllAvailable()
    query.stop()
    sparks = {row["k"]: row for row in expected.collect()}
    assert sorted(newest, key=repr) == sorted(sparks, key=repr)
    assert {
        (key, name): (plain(newest[key][name]), plain(row[name]))
        for key, row in sparks.items()
        for name in pairs
        if not is_same(name, plain(newest[key][name]), plain(row[name]))
    } == {}
