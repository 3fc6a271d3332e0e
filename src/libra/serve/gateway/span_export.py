"""Spans on their way to a collector, by OTLP over HTTP.

Invariant: spans leave in batches, from a thread of their own; a collector that does not answer delays no turn, and
loses spans only. What is not given here is as the standard variables `OTEL_...` say, such as `OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER` and `OTEL_EXPORTER_OTLP_HEADERS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from libra.serve.gateway.spans import Spans

_SERVICE = "libra-route"


@contextmanager
def exported_spans(endpoint: str) -> Iterator[Spans]:
    """Spans that go to the collector whose traces are received at `endpoint`. At the end those of trajectories that go
    on are ended, and all are sent."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _SERVICE}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    spans = Spans(provider.get_tracer("libra"))
    try:
        yield spans
    finally:
        spans.close()
        provider.shutdown()
