"""An operator with rolling aggregates, random rows for it, and the results that it must have as of any moment."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from spark_bridge import functions as S
from spark_bridge.aggregates.aggregator import Aggregator
from spark_bridge.aggregates.computation import Output
from spark_bridge.aggregates.rolling import Rolling, declared_rolling, piece_fields
from spark_bridge.operators.rolling_task import RollingLogic
from spark_bridge.state_format.layouts import rolling_schema
from tests.spark_bridge.operators.operator_runs import TS

HORIZONS = ("10 minutes", "1 hour", "1 day")
ROWS = pa.schema([pa.field("k", pa.string()), pa.field("ts", TS), pa.field("v", pa.float64())])
OUTPUTS = (
    Output("n", "count", None, None, None),
    Output("total", "sum", "v", None, pa.float64()),
    Output("least", "min", "v", None, pa.float64()),
    Output("last", "last", "v", "ts", pa.float64(), TS),
)


def rolling_operator(
    horizons: Sequence[str] = HORIZONS, *, exact: bool = False, outputs: Sequence[Output] = OUTPUTS
) -> tuple[RollingLogic, Rolling]:
    """Return an operator with all of ``outputs`` over each horizon, by ``k``."""
    rolling = declared_rolling({o.name: horizons for o in outputs}, exact=exact)
    aggregator = Aggregator(outputs)
    keys = pa.schema([pa.field("k", pa.string())])
    pieces = piece_fields(TS, aggregator.state_schema)
    schema = rolling_schema(keys, ("k",), pieces, {"rolling": rolling.to_text()}, aggregator.zeros)
    output = pa.schema([*keys, pa.field("ts", TS), *rolling.fields(aggregator.state_schema)])
    return RollingLogic(schema, aggregator, rolling, output, "ts"), rolling


def model(rolling: Rolling, rows: Sequence[tuple[int, float]], moment: int) -> dict[str, Any]:
    """The results of ``OUTPUTS`` for rows of (time in us, value) as of a moment."""
    answer: dict[str, Any] = {}
    for output, horizons in rolling.outputs:
        for h in horizons:
            start = int(h.start(np.array([moment]))[0])
            chosen = [(t, v) for t, v in rows if start < t <= moment]
            values = [v for _, v in chosen]
            answer[f"{output}_{h.name}"] = {
                "n": len(values),
                "total": float(sum(values)),
                "least": min(values, default=None),
                "last": max(chosen)[1] if chosen else None,
            }[output]
    return answer


def random_rows(rng: random.Random, clock_s: int, num: int, span_s: int) -> list[tuple[str, float, float]]:
    """Rows around a time: some keys are busy, some rows are hours late, and values add up exactly."""
    rows = []
    for _ in range(num):
        key = f"k{min(rng.randrange(8), rng.randrange(8))}"
        late = rng.choice((0, 0, 0, rng.randrange(7200)))
        at = clock_s - late - rng.randrange(span_s)
        rows.append((key, at + rng.choice((0, 0, 0.25, 0.5)), float(rng.randrange(100))))
    return rows


# -- every function ------------------------------------------------------------------------------

MONEY = pa.decimal128(12, 2)
EVERY_ROW = pa.schema(
    [
        pa.field("k", pa.string()),
        pa.field("ts", TS),
        pa.field("x", pa.float64()),
        pa.field("n", pa.int64()),
        pa.field("d", MONEY),
        pa.field("s", pa.string()),
        pa.field("b", pa.bool_()),
        pa.field("w", pa.int64()),
    ]
)
"""``w`` is never null; the other values may be."""
_QUANTILE = S.percentile_approx("x", 0.5, 0.01)
_MEDIAN = f"{_QUANTILE.name}({','.join(_QUANTILE.arguments)})"
EVERY_FUNCTION = (
    Output("rows", "count", None, None, None),
    Output("count", "count", "x", None, pa.float64()),
    Output("count_if", "count_if", "b", None, pa.bool_()),
    Output("sum_x", "sum", "x", None, pa.float64()),
    Output("sum_n", "sum", "n", None, pa.int64()),
    Output("sum_d", "sum", "d", None, MONEY),
    Output("mean", "mean", "x", None, pa.float64()),
    Output("min", "min", "s", None, pa.string()),
    Output("max", "max", "n", None, pa.int64()),
    Output("first", "first", "w", "ts", pa.int64(), TS),
    Output("last", "last", "w", "ts", pa.int64(), TS),
    Output("stddev", "stddev_samp", "x", None, pa.float64()),
    Output("distinct", "approx_count_distinct(9)", "n", None, pa.int64()),
    Output("list", "collect_list(5)", "w", "ts", pa.int64(), TS),
    Output("set", "collect_set(4)", "s", None, pa.string()),
    Output("top", "top_k(3)", "n", None, pa.int64()),
    Output("median", _MEDIAN, "x", None, pa.float64()),
)
SKETCHES = Aggregator(EVERY_FUNCTION[-5:-4] + EVERY_FUNCTION[-1:])
EveryRow = tuple[str, int, Any, Any, Any, Any, Any, int]


def every_row(rng: random.Random, key: str, us: int) -> EveryRow:
    """A row with values that add up exactly."""

    def some(value: Any) -> Any:
        return None if rng.random() < 0.2 else value

    cents = Decimal(rng.randrange(-(10**8), 10**8)).scaleb(-2)
    number = rng.choice((rng.randrange(6), rng.randrange(-(2**40), 2**40)))
    values = (rng.randrange(-400, 400) / 4, number, cents, rng.choice("abcdefg"), rng.random() < 0.5)
    return (key, us, *map(some, values), rng.randrange(1000))  # type: ignore[return-value]


def every_batch(rows: Sequence[EveryRow]) -> pa.RecordBatch:
    """Rows as a batch; the times are microseconds."""
    columns = [[row[i] for row in rows] for i in range(len(EVERY_ROW))]
    arrays = [
        pa.array(c, pa.int64()).cast(TS) if f.type == TS else pa.array(c, f.type)
        for c, f in zip(columns, EVERY_ROW, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=EVERY_ROW)


def _one_group(rows: Sequence[EveryRow]) -> tuple[Any, int, pa.RecordBatch]:
    return np.zeros(len(rows), np.int64), 1, every_batch(rows)


def every_result(rows: Sequence[EveryRow]) -> dict[str, Any]:
    """The results of ``EVERY_FUNCTION`` for rows in a horizon, by numpy and plain Python; sketches are of all rows."""
    x = np.array([row[2] for row in rows if row[2] is not None], float)
    numbers = [row[3] for row in rows if row[3] is not None]
    money = [row[4] for row in rows if row[4] is not None]
    texts = sorted(row[5] for row in rows if row[5] is not None)
    w = [row[7] for row in sorted(rows, key=lambda row: (row[1], row[7]))]
    distinct, median = (column[0].as_py() for column in SKETCHES.results(SKETCHES.partial(*_one_group(rows))))
    assert abs(distinct - len(set(numbers))) <= 2 + 0.15 * len(set(numbers))
    exact = float(np.sort(x)[math.floor(0.5 * (len(x) - 1))]) if len(x) else None
    assert median is None if exact is None else abs(median - exact) <= 0.01 * abs(exact) + 1e-9
    return {
        "rows": len(rows),
        "count": len(x),
        "count_if": sum(row[6] is True for row in rows),
        "sum_x": float(x.sum()),
        "sum_n": sum(numbers),
        "sum_d": sum(money, Decimal("0.00")),
        "mean": float(x.mean()) if len(x) else None,
        "min": min(texts, default=None),
        "max": max(numbers, default=None),
        "first": max(row[7] for row in rows if row[1] == min(row[1] for row in rows)) if rows else None,
        "last": w[-1] if w else None,
        "stddev": float(np.std(x, ddof=1)) if len(x) > 1 else None,
        "distinct": distinct,
        "list": w[-5:],
        "set": sorted(set(texts))[:4],
        "top": sorted(numbers, reverse=True)[:3],
        "median": median,
    }


def differences(answer: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The results that are not as expected. Divided floats may differ in their last bits."""
    wrong = {}
    for name, want in expected.items():
        got, function = answer[name], name.rsplit("_", 1)[0]
        if function in ("mean", "stddev") and want is not None and got is not None:
            is_same = abs(got - want) <= 1e-9 * abs(want) + 1e-9
        else:
            is_same = got == want or (not want and not got and function in ("list", "set", "top"))
        if not is_same:
            wrong[name] = got, want
    return wrong
