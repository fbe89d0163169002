"""Spans: ids that every process makes alike, parents, errors, other threads, and calls over the network."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode

from backends import spans
from backends.open_telemetry import OpenTelemetryTracer
from tests.collector import recorded_spans

BATCH = spans.batch("run", 7)


def test_ids_follow_from_the_subject_of_a_trace() -> None:
    """These ids are promised: processes of several releases meet in one trace."""
    assert [f"{i:x}" for i in BATCH.ids] == ["7a9de209ef90a32ba86966a3328ece89", "f522a919a16b0588"]
    others = [
        spans.batch("run", 8),
        spans.batch("ruin", 7),
        spans.savepoint("run", 7),
        spans.run("run"),
    ]
    assert len({*BATCH.ids, *(i for t in others for i in t.ids)}) == 10


def test_spans_of_processes_that_do_not_know_each_other_are_one_trace() -> None:
    with recorded_spans(role="host") as there, spans.span("host.apply", BATCH):
        pass
    with recorded_spans(role="driver") as here:
        spans.finished("batch", BATCH, 1_000, 2_000, is_root=True, rows=3, query_name=None)
    root, child = here.one("batch"), there.one("host.apply")
    assert root.parent is None
    assert (root.context.trace_id, root.context.span_id) == BATCH.ids
    assert child.parent is not None
    assert (child.context.trace_id, child.parent.span_id) == BATCH.ids
    assert child.context.span_id != root.context.span_id
    assert (root.start_time, root.end_time) == (1_000, 2_000)
    of_both = {"statestore.run_id": "run", "statestore.version": 7}
    assert root.attributes == {"statestore.role": "driver", **of_both, "statestore.rows": 3}
    assert child.attributes == {"statestore.role": "host", **of_both}


def test_a_span_is_a_child_of_the_current_one_of_its_trace() -> None:
    with recorded_spans() as recorded:
        with spans.span("task", BATCH, partition=1), spans.step("task.read"):
            with spans.span("host.open", BATCH):
                pass
            with spans.span("host.apply", spans.batch("run", 6)):
                pass
        with spans.span("task", BATCH, partition=2):
            pass
    assert recorded.path(recorded.one("host.open")) == ["task", "task.read", "host.open"]
    assert recorded.path(recorded.one("host.apply")) == ["host.apply"]  # of another trace
    assert {s.parent.span_id for s in recorded.named("task") if s.parent} == {BATCH.ids[1]}


def test_a_step_needs_a_span_to_be_a_step_of() -> None:
    with recorded_spans() as recorded:
        with spans.step("storage.get"):
            pass
        with spans.alone("maintenance"), spans.step("storage.delete"):
            pass
    assert [recorded.path(s) for s in recorded.all()] == [["maintenance", "storage.delete"], ["maintenance"]]


def test_an_error_is_the_status_without_its_message() -> None:
    with recorded_spans() as recorded:
        with pytest.raises(ValueError, match="of Alice"), spans.span("task", BATCH):
            raise ValueError("the salary of Alice is 7")
        with pytest.raises(FileExistsError), spans.span("claim", BATCH):
            raise FileExistsError
        spans.finished("batch", BATCH, 1, 2, is_root=True, failure="SparkException")
    failed = recorded.one("task")
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "ValueError")
    assert failed.attributes is not None and failed.attributes["error.type"] == "ValueError"
    assert "Alice" not in failed.to_json()
    assert recorded.one("claim").status.status_code is StatusCode.UNSET
    assert recorded.one("batch").status.description == "SparkException"


def test_an_abandoned_generator_has_not_failed() -> None:
    def rows() -> Any:
        with spans.span("task", BATCH):
            yield 1
            yield 2

    with recorded_spans() as recorded:
        given = rows()
        next(given)
        given.close()
    assert recorded.one("task").status.status_code is StatusCode.UNSET


def test_work_of_other_threads_is_a_child_of_the_span_that_has_begun_it() -> None:
    def work() -> None:
        with spans.step("storage.get"):
            pass

    with recorded_spans() as recorded, spans.Pool(2) as pool:
        with spans.span("host.load", BATCH):
            for done in [pool.submit(work) for _ in range(4)]:
                done.result()
            list(pool.map(lambda _: work(), range(2)))
        pool.submit(work).result()  # below nothing: no step
    assert [recorded.path(s) for s in recorded.named("storage.get")] == [["host.load", "storage.get"]] * 6


def test_a_call_over_the_network_is_a_child_of_the_span_of_its_caller() -> None:
    with recorded_spans(role="task") as task:
        assert spans.headers() == ()
        with spans.span("task", BATCH):
            ((name, header),) = spans.headers()
    assert name == b"traceparent"
    with recorded_spans(role="host") as host:
        with spans.under(header.decode()), spans.span("host.open", BATCH):
            pass
        with spans.under(header.decode()), spans.step("host.read"):
            pass
        for malformed in ("", "00-1-2-3", header.decode().upper(), f"{header.decode()}-x", None):
            with spans.under(malformed), spans.span("host.commit", BATCH):
                pass
    caller = task.one("task").context.span_id
    for name_here in ("host.open", "host.read"):
        parent = host.one(name_here).parent
        assert parent is not None and parent.span_id == caller
    assert {s.parent.span_id for s in host.named("host.commit") if s.parent} == {BATCH.ids[1]}


def test_all_processes_sample_the_same_traces() -> None:
    """A sampler decides by the id of the trace, for those who do not make the root as well."""
    versions = range(200)
    sampler = ParentBased(TraceIdRatioBased(0.3))
    with recorded_spans(sampler) as driver:
        for version in versions:
            trace = spans.batch("run", version)
            spans.finished(trace.kind, trace, 1, 2, is_root=True)
    with recorded_spans(sampler) as host:
        for version in versions:
            with spans.span("host.commit", spans.batch("run", version)), spans.step("storage.put"):
                pass
    roots = {s.context.trace_id for s in driver.all()}
    assert 20 < len(roots) < 100
    assert {s.context.trace_id for s in host.all()} == roots
    assert len(host.all()) == 2 * len(roots)


class Faulty(SpanProcessor):
    def __init__(self, at: str) -> None:
        self._at = at

    def on_start(self, span: SdkSpan, parent_context: Any = None) -> None:
        if self._at == "start":
            raise OSError("a fault at the start")

    def on_end(self, span: Any) -> None:
        if self._at == "end":
            raise OSError("a fault at the end")


@pytest.mark.parametrize("at", ["start", "end"])
def test_a_span_that_cannot_be_made_fails_nothing(at: str, caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Faulty(at))
    spans.set_tracer(OpenTelemetryTracer(provider, {}))
    try:
        with caplog.at_level(logging.WARNING, "backends.tracing"):
            for _ in range(3):
                with spans.span("task", BATCH) as span:
                    span.note(rows=1)
                spans.finished("batch", BATCH, 1, 2, is_root=True)
    finally:
        spans.set_tracer(None)
    assert [r.getMessage() for r in caplog.records] == ["A span was not made; further ones that fail are not logged"]
