"""One query: where the time of its batches went, its checkpoints, watermark, late rows, TTLs and timers."""

from __future__ import annotations

from starlette.responses import Response

from backends.encoding.operator_schema import TIMERS
from spark_bridge.overview.faults import awaited
from spark_bridge.overview.stream_pace import query_pace
from spark_bridge.ui.charts import MOST_DURATION_BARS, PHASES, steps, timeline
from spark_bridge.ui.requests import PageCall, faults_about
from spark_bridge.ui.system import reference, state_id

CHECKPOINTS_AT_ONCE = 25


def query(call: PageCall) -> Response:
    """Show a query."""
    of = call.named_query()
    first = call.number("from", 0)
    newest_first = of.checkpoints[::-1]
    recent = of.checkpoints[-MOST_DURATION_BARS:]
    known = [c for c in recent if c.rows is not None]
    ref = reference(of, call.overview.queries)
    about = (f"query {of.title}", *(f"operator {o.name} of query {of.title}" for o in of.operators))
    return call.render(
        "query.html",
        query=of,
        faults=faults_about(call.overview.faults, *about),
        awaited=awaited(of),
        pace=query_pace(of, call.overview.taken_ms),
        timeline=timeline(of.checkpoints),
        phases=PHASES,
        steps=steps(recent),
        rows=sum(c.rows or 0 for c in known),
        late=sum(c.late or 0 for c in known),
        duplicates=sum(c.duplicates or 0 for c in known),
        removed=sum(c.removed or 0 for c in known),
        known=len(known),
        checkpoints=newest_first[first : first + CHECKPOINTS_AT_ONCE],
        first=first,
        at_once=CHECKPOINTS_AT_ONCE,
        timed=[
            (o, v, state_id(ref, o.name, v.name))
            for o in of.operators
            for v in o.variables
            if v.ttl_ms is not None or v.kind == TIMERS
        ],
    )
