"""Makes spans with OpenTelemetry's SDK. Imported only while tracing is on.

If a span cannot be made, because of a fault in the SDK or in a custom processor, the fault is logged once and the span
is left out. The traced work continues.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token
from typing import ParamSpec, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Tracer as SdkTracer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from backends.spans import OFF, Attribute, Span, Trace, error_name

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

INSTRUMENTATION = "ray-statestore"
_HEADER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class OpenTelemetryTracer:
    """The tracer of a process whose provider is set. ``who`` is added to the attributes of every span."""

    def __init__(self, provider: TracerProvider, who: Mapping[str, str]) -> None:
        tracer = provider.get_tracer(INSTRUMENTATION)
        assert isinstance(tracer, SdkTracer)
        self._tracer = tracer
        self._ids = tracer.id_generator = _Ids(tracer.id_generator)
        self._who = _named(who)
        self._has_failed = False

    def span(self, name: str, trace: Trace | None, attributes: Mapping[str, Attribute], *, is_root: bool) -> Span:
        try:
            return self._begun(name, trace, None, attributes, is_root=is_root)
        except Exception as error:  # noqa: BLE001 - a failure to trace must not fail the step
            self.failed(error)
            return OFF

    def finished(
        self,
        name: str,
        trace: Trace,
        times: tuple[int, int],
        attributes: Mapping[str, Attribute],
        *,
        is_root: bool,
        failure: str | None,
    ) -> None:
        try:
            span = self._begun(name, trace, times[0], attributes, is_root=is_root)
            if failure is not None:
                span.fail(failure)
            span.end(times[1])
        except Exception as error:  # noqa: BLE001 - as above
            self.failed(error)

    def _begun(
        self, name: str, trace: Trace | None, began: int | None, attributes: Mapping[str, Attribute], *, is_root: bool
    ) -> _LiveSpan:
        named = {**self._who, **_named(attributes), **({} if trace is None else _named(_about(trace)))}
        if trace is not None and is_root:
            with self._ids.given(*trace.ids):
                return _LiveSpan(self, self._tracer.start_span(name, Context(), attributes=named, start_time=began))
        context = None if trace is None else self._context(trace)
        return _LiveSpan(self, self._tracer.start_span(name, context, attributes=named, start_time=began))

    def _context(self, trace: Trace) -> Context | None:
        """Return the context with the parent of a span of a trace; None: the current one."""
        trace_id, root_id = trace.ids
        if api.get_current_span().get_span_context().trace_id == trace_id:
            return None
        return api.set_span_in_context(_remote(trace_id, root_id, self._flags(trace_id, trace.kind)), Context())

    def _flags(self, trace_id: int, name: str) -> TraceFlags:
        """Return whether a trace is sampled, as the sampler of the process that makes its root decides, by the id."""
        decided = self._tracer.sampler.should_sample(Context(), trace_id, name)
        is_sampled = decided.decision is Decision.RECORD_AND_SAMPLE
        return TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)

    def has_current(self) -> bool:
        return api.get_current_span().get_span_context().is_valid

    def carried(self, work: Callable[P, T]) -> Callable[P, T]:
        context = contexts.get_current()

        def carried(*args: P.args, **kwargs: P.kwargs) -> T:
            token = contexts.attach(context)
            try:
                return work(*args, **kwargs)
            finally:
                contexts.detach(token)

        return carried

    def header(self) -> bytes | None:
        current = api.get_current_span().get_span_context()
        if not current.is_valid:
            return None
        return f"00-{current.trace_id:032x}-{current.span_id:016x}-{current.trace_flags:02x}".encode()

    def under(self, header: str) -> Span:
        """See ``Tracer``. A malformed header counts as no header."""
        match = _HEADER.fullmatch(header)
        if match is None:
            return OFF
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        return _LiveSpan(self, _remote(trace_id, span_id, TraceFlags(flags)))

    def failed(self, error: Exception) -> None:
        """Log that a span was not made, for the first one."""
        if not self._has_failed:
            self._has_failed = True
            log.warning("A span was not made; further ones that fail are not logged", exc_info=error)


class _LiveSpan(Span):
    """A span of the SDK, or a block below a span of another process."""

    __slots__ = ("_span", "_token", "_tracer")

    def __init__(self, tracer: OpenTelemetryTracer, span: api.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._token: Token[Context] | None = None

    def __enter__(self) -> Span:
        self._token = contexts.attach(api.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._token is not None:
            contexts.detach(self._token)
        try:
            # A generator that is not read to its end has not failed, and "the file exists" is an answer of storage.
            if error is not None and not isinstance(error, GeneratorExit | FileExistsError):
                self.fail(error_name(error))
            self.end()
        except Exception as failure:  # noqa: BLE001 - as in ``OpenTelemetryTracer.span``
            self._tracer.failed(failure)

    def note(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _named(attributes))

    def fail(self, name: str) -> None:
        """Record the class of the error that ended the step."""
        self._span.set_status(Status(StatusCode.ERROR, name))
        self._span.set_attribute("error.type", name)

    def end(self, ended: int | None = None) -> None:
        """End the span, at a time in ns since 1970; None is now."""
        self._span.end(ended)


class _Ids(IdGenerator):
    """Gives a root the ids of its trace, and every other span those of the provider's generator."""

    def __init__(self, others: IdGenerator) -> None:
        self._others = others
        self._next = threading.local()

    @contextmanager
    def given(self, trace_id: int, span_id: int) -> Iterator[None]:
        """Give these ids to this thread's next span within the block."""
        self._next.ids = trace_id, span_id
        try:
            yield
        finally:
            self._next.ids = None

    def generate_span_id(self) -> int:
        ids: tuple[int, int] | None = getattr(self._next, "ids", None)
        return self._others.generate_span_id() if ids is None else ids[1]

    def generate_trace_id(self) -> int:
        ids: tuple[int, int] | None = getattr(self._next, "ids", None)
        return self._others.generate_trace_id() if ids is None else ids[0]

    def is_trace_id_random(self) -> bool:
        return False


def _remote(trace_id: int, span_id: int, flags: TraceFlags) -> NonRecordingSpan:
    """Return the stand-in for a span of another process: it records nothing."""
    return NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))


def _about(trace: Trace) -> dict[str, Attribute]:
    number = {"batch": "version", "savepoint": "savepoint_id"}.get(trace.kind)
    return {"run_id": trace.run_id, **({} if number is None else {number: trace.number})}


def _named(attributes: Mapping[str, Attribute]) -> dict[str, str | int | float | bool]:
    return {f"statestore.{name}": value for name, value in attributes.items() if value is not None}


# The provider that sends spans to a collector by OTLP over HTTP. Imported only if the setting asks for it.
#
# A thread of the SDK collects and sends spans; spans that do not fit into its queue are dropped. So neither a slow
# collector nor a missing one delays the traced work. The variables ``OTEL_...`` apply: sampler, queue, headers,
# resource.


SERVICE = "ray-statestore"


def set_provider(collector: str | None) -> None:
    """Set the provider of this process, which sends to a collector; None: to that of the environment."""
    exporter = OTLPSpanExporter(None if collector is None else f"{collector.rstrip('/')}/v1/traces")
    resource = Resource.create({SERVICE_NAME: SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    api.set_tracer_provider(provider)
