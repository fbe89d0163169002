"""The state that the stream must end with, computed by pandas alone, and the comparison with the stream's state."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pyarrow as pa

FLIGHT_KEY = "tailnum"
RELATIVE_TOLERANCE = 1e-9
STATE_SCHEMA = pa.schema(
    [
        pa.field(FLIGHT_KEY, pa.string()),
        pa.field("flights", pa.int64()),
        pa.field("air_time", pa.int64()),
        pa.field("mean_delay", pa.float64()),
        pa.field("worst_delay", pa.int32()),
        pa.field("last_departure", pa.timestamp("us", tz="UTC")),
        pa.field("last_dest", pa.string()),
    ]
)


def expected_state(flights: pd.DataFrame) -> pa.Table:
    """Return the figures per aircraft over ``flights``: a row of ``STATE_SCHEMA`` per tailnum, null included."""
    grouped = flights.groupby(FLIGHT_KEY, dropna=False)
    state = pd.DataFrame(
        {
            "flights": grouped.size(),
            "air_time": grouped["air_time"].sum(min_count=1),
            "mean_delay": grouped["arr_delay"].mean(),
            "worst_delay": grouped["arr_delay"].max(),
            "last_departure": grouped["departure"].max(),
        }
    )
    # Of several flights at the last departure time, the greatest destination counts.
    newest = flights[flights["departure"] == grouped["departure"].transform("max")]
    state["last_dest"] = newest.groupby(FLIGHT_KEY, dropna=False)["dest"].max()
    return pa.Table.from_pandas(state.reset_index(), schema=STATE_SCHEMA, preserve_index=False)


def first_difference(expected: pa.Table, actual: pa.Table) -> str | None:
    """Return the first difference of ``actual`` from ``expected`` (same keys in the same order) in words, or None.

    Floats may differ by 1e-9 relative, since a sum depends on the order of its terms; all other values must be equal.
    """
    if actual.num_rows != expected.num_rows:
        return f"{actual.num_rows} rows came back for {expected.num_rows} keys"
    missing = [name for name in expected.column_names if name not in actual.column_names]
    if missing:
        return f"the columns {missing} are missing; there are {actual.column_names}"
    keys = expected.column(FLIGHT_KEY).to_pylist()
    for name in expected.column_names:
        pairs = zip(keys, expected.column(name).to_pylist(), actual.column(name).to_pylist(), strict=True)
        for key, want, got in pairs:
            if not same_value(want, got):
                return f"aircraft {key!r}: {name} is {got!r} in the state, {want!r} by pandas"
    return None


def same_value(want: Any, got: Any) -> bool:
    """Return whether two values are equal: floats within the relative tolerance; null equals null only."""
    if want is None or got is None:
        return want is got
    if isinstance(want, float):
        return isinstance(got, float) and math.isclose(want, got, rel_tol=RELATIVE_TOLERANCE)
    return bool(want == got)
