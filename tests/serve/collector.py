"""A collector of spans that takes OTLP over HTTP, and keeps what comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A receiver of spans by HTTP: its address, and what has come."""
    came: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                came.append(ExportTraceServiceRequest.FromString(content))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", came
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def names(came: Sequence[ExportTraceServiceRequest]) -> list[str]:
    """Names of all spans that came."""
    scopes = [scope for request in came for each in request.resource_spans for scope in each.scope_spans]
    return [span.name for scope in scopes for span in scope.spans]
