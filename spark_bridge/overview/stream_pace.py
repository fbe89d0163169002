"""Speed and delay of queries: sums over the last checkpoints of an overview."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from spark_bridge.overview.model import RUNNING, Checkpoint, Operator, Overview, Query

RECENT_CHECKPOINTS = 20
"""At most this many of the last checkpoints are looked at."""
IDLE_MS = 10_000
STANDING_MS = 60_000
USUAL_INTERVALS = 3
"""A query without a batch for so many of its usual intervals, and for ``IDLE_MS`` at least, has no new input; a
watermark that has not risen for so many, and for ``STANDING_MS`` at least, waits for newer input.
"""


@dataclass(frozen=True)
class QueryPace:
    """One query at one moment. Times are in ms; what is not known is None.

    ``rows_per_second`` are the input rows of the last checkpoints over the time from the first to the last of them;
    ``usual_ms`` is the median duration of these checkpoints, ``interval_ms`` the median time between two.
    A query that is idle has no new input, and 0 rows a second. ``backlog_rows`` wait in the sources. The watermark has
    not risen for ``watermark_stands_ms``, where that is long: results that it closes wait for rows of later times.
    ``freshness_ms`` is the age of the last completed one, or, where none is known to be completed, of the last prepared
    one. ``watermark_behind_ms`` says how far the watermark is behind now, ``batch_ms`` how long the running batch has
    run. ``hottest`` is the partition whose last commit took longest, as ``operator/partition``, and ``hottest_ms`` that
    time.
    """

    query: str
    status: str
    version: int
    freshness_ms: int | None = None
    watermark_behind_ms: int | None = None
    batch_ms: int | None = None
    usual_ms: float | None = None
    interval_ms: float | None = None
    rows_per_second: float | None = None
    bytes_per_checkpoint: float | None = None
    keys: int | None = None
    memory_bytes: int | None = None
    hottest: str | None = None
    hottest_ms: float | None = None
    is_idle: bool = False
    backlog_rows: int | None = None
    watermark_stands_ms: int | None = None


def pace_of(overview: Overview) -> tuple[QueryPace, ...]:
    """Return the pace of each query, in the order of the overview."""
    return tuple(query_pace(query, overview.taken_ms) for query in overview.queries)


def query_pace(query: Query, now_ms: int) -> QueryPace:
    """Return the pace of one query at a moment, in ms since 1970."""
    recent = [c for c in query.checkpoints[-RECENT_CHECKPOINTS:] if c.completed_ms is not None]
    moments = [c.completed_ms for c in recent if c.completed_ms is not None]
    durations = [c.duration_ms for c in recent if c.duration_ms is not None]
    added = [c.delta_bytes for c in recent if c.delta_bytes is not None]
    newest = moments[-1] if moments else query.checkpoints[-1].prepared_ms if query.checkpoints else None
    hottest = _hottest(query.operators)
    interval = median(b - a for a, b in pairwise(moments)) if len(moments) > 1 else None
    freshness = _since(newest, now_ms)
    runs = query.status == RUNNING
    patience = USUAL_INTERVALS * (interval or 0)
    is_idle = runs and query.batch_ms is None and freshness is not None and freshness > max(IDLE_MS, patience)
    stands = _since(query.watermark_rose_ms, now_ms) if runs and query.watermark_ms is not None else None
    return QueryPace(
        query.title,
        query.status,
        query.completed_version,
        freshness_ms=freshness,
        watermark_behind_ms=_since(query.watermark_ms, now_ms),
        batch_ms=query.batch_ms,
        usual_ms=median(durations) if durations else None,
        interval_ms=interval,
        rows_per_second=0.0 if is_idle else _rate(recent, moments),
        bytes_per_checkpoint=sum(added) / len(added) if added else None,
        keys=_sum([o.keys for o in query.operators]),
        memory_bytes=_sum([o.memory_bytes for o in query.operators]),
        hottest=None if hottest is None else hottest[1],
        hottest_ms=None if hottest is None else hottest[0],
        is_idle=is_idle,
        backlog_rows=_backlog(query, is_idle),
        watermark_stands_ms=stands if stands is not None and stands > max(STANDING_MS, patience) else None,
    )


def _backlog(query: Query, is_idle: bool) -> int | None:
    known = None if query.input is None else query.input.backlog_rows
    # With rows in its sources Spark would have begun a batch.
    return known if known is None or not is_idle else 0


def _since(moment_ms: int | None, now_ms: int) -> int | None:
    return None if moment_ms is None else max(0, now_ms - moment_ms)


def _rate(recent: Sequence[Checkpoint], moments: Sequence[int]) -> float | None:
    rows = [c.rows for c in recent[1:] if c.rows is not None]
    if len(moments) < 2 or moments[-1] <= moments[0] or len(rows) < len(recent) - 1:
        return None
    # The rows of the first checkpoint came before the time that is counted.
    return sum(rows) * 1000 / (moments[-1] - moments[0])


def _hottest(operators: Sequence[Operator]) -> tuple[float, str] | None:
    timed = [
        (sum(p.commit_ms.values()), f"{o.name}/{p.partition}") for o in operators for p in o.partitions if p.commit_ms
    ]
    return max(timed, default=None)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None
