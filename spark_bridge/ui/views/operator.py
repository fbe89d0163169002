"""One operator: its partitions by host, its hottest partitions, and its schema."""

from __future__ import annotations

from starlette.responses import Response

from spark_bridge.overview.model import Operator, Partition, Query
from spark_bridge.ui.charts import MEASURES, heat_map, measure_in_words, partition_measure
from spark_bridge.ui.requests import PageCall, faults_about
from spark_bridge.ui.system import reference, tables_of

PARTITIONS_AT_ONCE = 50
HOTTEST = 10
COLUMNS = ("partition", "keys", "bytes", "time", "rows", "lag")


def named_operator(call: PageCall) -> tuple[Query, Operator]:
    """Return the operator that the request names. Raises ``LookupError`` with those that there are."""
    of, name = call.named_query(), call.given("operator")
    for operator_ in of.operators:
        if operator_.name == name:
            return of, operator_
    there = ", ".join(o.name for o in of.operators) or "none"
    raise LookupError(f"Query {of.title} has no operator {name[:200]!r}; it has {there}.")


def operator(call: PageCall) -> Response:
    """Show an operator."""
    of, one = named_operator(call)
    there = [m for m in MEASURES if any(partition_measure(p, m) is not None for p in one.partitions)]
    measure = call.given("by") if call.given("by") in there else (there[0] if there else "")
    order = call.given("sort") if call.given("sort") in COLUMNS else "partition"
    first = call.number("from", 0)
    ordered = sorted(one.partitions, key=lambda p: _order(p, order))
    hottest = sorted(one.partitions, key=lambda p: -(partition_measure(p, measure) or 0))[:HOTTEST] if measure else []
    ref = reference(of, call.overview.queries)
    return call.render(
        "operator.html",
        query=of,
        operator=one,
        faults=faults_about(call.overview.faults, f"operator {one.name} of query {of.title}"),
        measures=there,
        measure=measure,
        heat=heat_map(one, measure) if measure else None,
        hottest=[(p, measure_in_words(measure, partition_measure(p, measure))) for p in hottest],
        in_words=measure_in_words,
        bytes_of=lambda p: partition_measure(p, "bytes"),
        partitions=ordered[first : first + PARTITIONS_AT_ONCE],
        order=order,
        columns=COLUMNS,
        first=first,
        at_once=PARTITIONS_AT_ONCE,
        tables=[t for t in tables_of(call.overview) if (t.query, t.operator) == (ref, one.name)],
    )


def _order(partition: Partition, by: str) -> tuple[float, int]:
    """Return the place of a partition: ascending by number, else those with most first."""
    if by == "partition":
        return (0.0, partition.partition)
    value = partition.snapshot_lag if by == "lag" else partition_measure(partition, by)
    return (-(value if value is not None else -1.0), partition.partition)
