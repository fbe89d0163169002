"""The computation of each aggregate function."""

from __future__ import annotations

from spark_bridge.aggregates.bounded_lists import LISTS
from spark_bridge.aggregates.central_moments import MOMENTS
from spark_bridge.aggregates.computation import Computation
from spark_bridge.aggregates.counts_and_sums import COUNT, COUNT_IF, MEAN, SUM
from spark_bridge.aggregates.distinct_sketch import SKETCH
from spark_bridge.aggregates.extremes import FIRST, LAST, MAX, MIN
from spark_bridge.aggregates.outputs import split_function
from spark_bridge.aggregates.user_aggregate import USER
from spark_bridge.exceptions import InvalidOperatorError

COMPUTATIONS: dict[str, Computation] = {
    "count": COUNT,
    "count_if": COUNT_IF,
    "sum": SUM,
    "mean": MEAN,
    "min": MIN,
    "max": MAX,
    "first": FIRST,
    "last": LAST,
    "stddev_samp": MOMENTS,
    "stddev_pop": MOMENTS,
    "var_samp": MOMENTS,
    "var_pop": MOMENTS,
    "collect_list": LISTS,
    "collect_set": LISTS,
    "top_k": LISTS,
    "approx_count_distinct": SKETCH,
    "merge": USER,
}


def computation_of(function: str) -> Computation:
    """Return the computation of a function such as ``top_k(10)``; raises ``InvalidOperatorError``."""
    name = split_function(function)[0]
    if name not in COMPUTATIONS:
        raise InvalidOperatorError(f"Unknown aggregate function {function!r}; there are {', '.join(COMPUTATIONS)}.")
    return COMPUTATIONS[name]
