"""An operator with rolling aggregates, random rows for it, and the results that it must have as of any moment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

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
