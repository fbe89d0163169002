"""A collector of traces: takes spans by OTLP over HTTP from any process, as Jaeger does, and keeps them.

``recorded_spans`` enables tracing in this process, within a block, and keeps the spans in memory.
"""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from backends import spans
from backends.open_telemetry import OpenTelemetryTracer


@dataclass(frozen=True)
class CollectedSpan:
    """``parent`` is the id of another span, or empty. Times are in ns since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    failure: str
    attributes: Mapping[str, Any]
    service: str

    def __getitem__(self, name: str) -> Any:
        return self.attributes[f"statestore.{name}"]


class Collector:
    """Serves at ``address`` within a ``with`` block."""

    def __init__(self) -> None:
        self._spans: list[CollectedSpan] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def spans(self) -> list[CollectedSpan]:
        """All that have come."""
        with self._lock:
            return list(self._spans)

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for of_resource in request.resource_spans:
                service = _attributes(of_resource.resource.attributes)["service.name"]
                for scope in of_resource.scope_spans:
                    self._spans += [_collected(span, service) for span in scope.spans]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    take(body)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _collected(span: Any, service: str) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        failure=span.status.message,
        attributes=_attributes(span.attributes),
        service=service,
    )


def _attributes(given: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in given}


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
