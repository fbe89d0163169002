"""Enable tracing within a block, and keep the spans in memory for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from backends import spans
from backends.open_telemetry import OpenTelemetryTracer


@dataclass
class Recorded:
    exporter: InMemorySpanExporter

    def all(self) -> tuple[ReadableSpan, ...]:
        """The spans that have ended, in the order of their ends."""
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [s for s in self.all() if s.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def path(self, span: ReadableSpan) -> list[str]:
        """The names from the topmost span that is known down to this one."""
        by_id = {s.context.span_id: s for s in self.all() if s.context is not None}
        names = [span.name]
        while span.parent is not None and span.parent.span_id in by_id:
            span = by_id[span.parent.span_id]
            names.insert(0, span.name)
        return names


@contextmanager
def recorded_spans(sampler: Sampler | None = None, **who: str) -> Iterator[Recorded]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans.set_tracer(OpenTelemetryTracer(provider, who))
    try:
        yield Recorded(exporter)
    finally:
        spans.set_tracer(None)
