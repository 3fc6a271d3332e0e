"""CPU time that watchers of a gateway add to a turn: none, the live page's memory, and spans.

    python -m benchmarks.watching [--quick] [--json FILE]

Trajectories have eight turns, with a tool return before each but the first. Spans are collected in batches, and neither
encoded nor sent.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.command import command_line
from benchmarks.rows import Row, report
from libra.config.extras import install_command, missing_library
from libra.route.policy import Placement, ToolReturn, TurnRequest
from libra.serve.gateway.config import UpstreamSection
from libra.serve.gateway.formats import FORMATS, TurnFormat
from libra.serve.gateway.libra_field import LibraField
from libra.serve.gateway.recent import Recent
from libra.serve.gateway.sessions import TurnSession
from libra.serve.gateway.spans import Spans
from libra.serve.gateway.turn_bodies import TurnBody
from libra.serve.gateway.upstreams import Upstream
from libra.serve.gateway.watcher import End, RoutedTurn, Watcher

GOAL_MICROSECONDS = 0.5  # of a turn without a watcher
_TURNS = 8  # of a trajectory
_RAW = b'{"model": "m", "messages": [], "max_tokens": 100}'


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line("watching", __doc__, quick="a tenth of the turns: a first look")
    options = parser.parse_args(arguments)
    if (library := missing_library("otel")) is not None:
        print(f"{library} is not installed: {install_command('otel')}", file=sys.stderr)
        return 2
    report(asyncio.run(_rows(2_000 if options.quick else 20_000)), options.json)
    return 0


async def _rows(turns: int) -> list[Row]:
    none, page = added(Watcher(), turns), added(Recent(), turns)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    spans = added(Spans(provider.get_tracer("benchmark")), turns)
    provider.shutdown()
    met = (f"below {GOAL_MICROSECONDS:g} us", none < GOAL_MICROSECONDS)
    return [
        Row("no watcher", "CPU time of a turn", none, "us", *met),
        Row("live page", "CPU time of a turn", page, "us"),
        Row("spans", "CPU time of a turn", spans, "us"),
    ]


def added(watcher: Watcher, turns: int) -> float:
    """Mean microseconds that a turn's calls of the watcher take."""
    format = next(it for it in FORMATS if it.path == "/v1/chat/completions")
    body, request = format.read(_RAW), make_mocked_request("POST", format.path)
    engine = Upstream(UpstreamSection(name="e0", url="http://127.0.0.1:8000", max_model_len=4096))
    placement = Placement("e0", 0, False, "least loaded")
    taken = 0.0
    for number in range(0, turns, _TURNS):
        passing = [_turn(format, request, body, f"{number}", position) for position in range(_TURNS)]
        began = time.process_time()
        for turn in passing:
            watcher.begun(turn)
            watcher.placed(turn, engine, placement)
            watcher.headers(turn)
            watcher.ended(turn, (1000, 100), "")
        watcher.closed(f"{number}", End.FORGOTTEN, None)
        taken += time.process_time() - began
    return 1e6 * taken / turns


def _turn(format: TurnFormat, request: web.Request, body: TurnBody, id: str, position: int) -> RoutedTurn:
    returned = ToolReturn("look", "ok", 100) if position else None
    needed = TurnRequest(id, id, 1000, 1000 + 200 * position, "search")
    return RoutedTurn(request, format, body, _RAW, TurnSession(LibraField(id)), needed, returned, 100, False)


if __name__ == "__main__":
    sys.exit(main())
