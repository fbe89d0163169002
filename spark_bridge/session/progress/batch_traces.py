"""The driver's spans: the root of each batch's trace, and Spark's steps below, made when Spark tells of the batch."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from backends.tracing import spans, trace_ids
from coordinator_actor.messages import QueryRegistration

FIRST_STEPS = ("latestOffset", "walCommit", "getBatch", "queryPlanning")
LAST_STEPS = ("addBatch", "commitOffsets")
"""Spark's steps of a batch in their order. Spark tells how long each took, but not when it began: the first ones are
laid end to end from the beginning of the batch on, the last ones up to its end."""


class BatchTraces:
    """The batches of one driver's queries. Thread-safe: ``_lock`` guards the table of runs."""

    def __init__(self) -> None:
        self._runs: dict[str, tuple[QueryRegistration, int, int]] = {}
        self._lock = threading.Lock()

    def add(self, registration: QueryRegistration, version: int) -> None:
        """Begin with a run, whose first batch goes on from a version."""
        if spans.is_on():
            with self._lock:
                self._runs[registration.run_id] = registration, version + 1, spans.now()

    def batch(self, run_id: str, batch_id: int, progress: str) -> None:
        """Make the root of a batch's trace from Spark's progress of that batch, as JSON."""
        if not spans.is_on():
            return
        told: Mapping[str, Any] = json.loads(progress)
        took: Mapping[str, int] = told.get("durationMs") or {}
        if "addBatch" not in took:
            return  # nothing was run
        version = batch_id + 1
        began = _ns(str(told["timestamp"]))
        ended = began + took.get("triggerExecution", sum(took.values())) * 1_000_000
        with self._lock:
            known = self._runs.get(run_id)
            if known is None:
                return
            self._runs[run_id] = known[0], version + 1, ended
        trace = trace_ids.batch(run_id, version)
        _root(known[0], trace, began, ended, rows=int(told.get("numInputRows") or 0))
        first, last = began, ended
        for step in (s for s in FIRST_STEPS if s in took):
            spans.finished(f"spark.{step}", trace, first, first + took[step] * 1_000_000)
            first += took[step] * 1_000_000
        for step in reversed([s for s in LAST_STEPS if s in took]):
            spans.finished(f"spark.{step}", trace, last - took[step] * 1_000_000, last)
            last -= took[step] * 1_000_000

    def end(self, run_id: str, exception: str | None) -> None:
        """End with a run. ``exception`` is what its last batch has failed with: that has a root, too."""
        with self._lock:
            known = self._runs.pop(run_id, None)
        if known is None or exception is None:
            return
        registration, version, since = known
        failure = exception.partition(":")[0].rpartition(".")[2].strip() or "StreamingQueryException"
        _root(registration, trace_ids.batch(run_id, version), since, 0, failure=failure)


def _root(
    registration: QueryRegistration,
    trace: trace_ids.Trace,
    began: int,
    ended: int,
    *,
    rows: int | None = None,
    failure: str | None = None,
) -> None:
    spans.finished(
        trace.kind,
        trace,
        began,
        ended,
        is_root=True,
        failure=failure,
        query_id=registration.query_id,
        query_name=registration.name,
        rows=rows,
    )


def _ns(timestamp: str) -> int:
    """Return the time of Spark's progress (``2026-11-25T17:00:00.123Z``) in ns since 1970."""
    return round(datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp() * 1000) * 1_000_000
