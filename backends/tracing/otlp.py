"""The provider that sends spans to a collector by OTLP over HTTP. Imported only if the setting asks for it.

Spans are collected and sent by a thread of the SDK; what does not fit into its queue is dropped. So neither a slow
collector nor one that is gone holds anybody up. The variables ``OTEL_...`` count: sampler, queue, headers, resource.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

SERVICE = "ray-statestore"


def set_provider(collector: str | None) -> None:
    """Set the provider of this process, which sends to a collector; None: to that of the environment."""
    exporter = OTLPSpanExporter(None if collector is None else f"{collector.rstrip('/')}/v1/traces")
    resource = Resource.create({SERVICE_NAME: SERVICE}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
