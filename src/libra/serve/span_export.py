"""Export of spans to a collector, by OTLP over HTTP.

Invariant: a separate thread sends spans in batches. A collector that does not answer delays no turn, and delays
shutdown by `END_SECONDS` at most. Its spans are lost, and the log says so once a minute. Other settings come from the
standard variables `OTEL_...`, such as `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and `OTEL_EXPORTER_OTLP_HEADERS`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from time import monotonic
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

_TOLD_SECONDS = 60.0  # between two log lines about lost spans
END_SECONDS = 2.0  # in which the last spans may be sent at shutdown
_LOG = logging.getLogger(__name__)


class _ToldExporter(SpanExporter):
    """Exports to `endpoint`, and logs lost spans once a minute."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # it would log each attempt
        self._exporter, self._host, self._told = OTLPSpanExporter(endpoint), urlsplit(endpoint).hostname, 0.0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.FAILURE and (not self._told or monotonic() >= self._told + _TOLD_SECONDS):
            self._told = monotonic()
            _LOG.warning("%d spans are lost: the collector on %s does not accept them", len(spans), self._host)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def exporting(endpoint: str, service: str) -> Iterator[Tracer]:
    """Context with a tracer for the collector at `endpoint`; sends the last spans on exit. `service` names the sender,
    unless the standard variables do.
    """
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider, exporter = TracerProvider(resource=resource, shutdown_on_exit=False), _ToldExporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider.get_tracer("libra")
    finally:
        giving_up = Timer(END_SECONDS, exporter.shutdown)
        giving_up.start()
        provider.shutdown()
        giving_up.cancel()
