"""Spans of a gateway's turns: the whole tree of each trajectory, whatever becomes of it."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serve.collector import collector, names
from serve.field_engine import GENERATED, PROMPT, FieldEngine
from serve.stage import Scripted, Stage, say_nothing, staged

from libra.serve import span_export
from libra.serve.gateway import health
from libra.serve.gateway.spans import Spans
from libra.serve.span_endpoint import span_endpoint
from libra.serve.span_export import exporting

CHAT = "/v1/chat/completions"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Recorded:
    """Spans in memory, on a clock that counts."""

    def __init__(self) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        ticks = itertools.count(1)
        self.spans = Spans(provider.get_tracer("test"), lambda: next(ticks))

    def done(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def of(self, trajectory: str) -> list[ReadableSpan]:
        found = [it for it in self.done() if attributes(it).get("gen_ai.conversation.id") == trajectory]
        return sorted(found, key=lambda it: (it.start_time or 0, -(it.end_time or 0)))  # around its first turn


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def body(trajectory: str, tool: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    own = {"trajectory": trajectory, "prompt": "p", "task": "search"} | ({} if tool is None else {"tool": tool})
    return {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "libra": own} | more


def tree(spans: list[ReadableSpan]) -> list[tuple[str, str | None]]:
    """Names of spans, each with that of its parent among them."""
    names = {it.context.span_id: it.name for it in spans if it.context is not None}
    return [(it.name, None if it.parent is None else names.get(it.parent.span_id, "another")) for it in spans]


AGENT = "invoke_agent search"


async def test_a_trajectory_with_tools_is_a_whole_tree() -> None:
    recorded = Recorded()
    async with staged(engines=0, fields=[FieldEngine()], watchers=[recorded.spans]) as stage:
        await stage.post(CHAT, body("t"))
        await stage.post(CHAT, body("t", {"name": "look", "status": "ok", "returned_tokens": 9}))
        await stage.post(CHAT, body("t", {"name": "run", "status": "error"}))
        assert not [it for it in recorded.done() if it.name == AGENT]  # it goes on
        await stage.post("/trajectories/t/finish", {"reward": 0.5})
    spans = recorded.of("t")
    assert tree(spans) == [
        (AGENT, None),
        ("chat m", AGENT),
        ("execute_tool look", AGENT),
        ("chat m", AGENT),
        ("execute_tool run", AGENT),
        ("chat m", AGENT),
    ]
    assert len(recorded.done()) == 6
    assert len({it.context.trace_id for it in spans if it.context}) == 1
    agent, first, look, second, run, _ = spans
    assert attributes(agent) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "libra",
        "gen_ai.request.model": "m",
        "gen_ai.conversation.id": "t",
        "gen_ai.agent.name": "search",
        "gen_ai.usage.input_tokens": 3 * PROMPT,
        "gen_ai.usage.output_tokens": 3 * GENERATED,
        "libra.prompt": "p",
        "libra.turns": 3,
        "libra.end": "finished",
        "libra.reward": 0.5,
    }
    told = attributes(first)
    assert told["libra.engine"] == "f0" and told["libra.reason"] == "least loaded"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (PROMPT, GENERATED)
    assert told["gen_ai.request.max_tokens"] == 5 and told["server.address"] == "127.0.0.1"
    assert (look.start_time, attributes(look)["libra.returned_tokens"]) == (first.end_time, 9)
    assert look.end_time == second.start_time and look.status.is_unset
    assert attributes(run)["error.type"] == "error" and not run.status.is_ok
    for it in spans:
        assert it.start_time is not None and it.end_time is not None and it.start_time < it.end_time


async def test_a_retried_turn_is_one_span_that_names_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "RECHECK_SECONDS", 1000.0)
    recorded, engines = Recorded(), [FieldEngine(status=500), FieldEngine()]
    async with staged(engines=0, fields=engines, watchers=[recorded.spans]) as stage:
        for number in range(2):  # one of them begins at the engine that fails
            assert (await stage.post(CHAT, body(f"t{number}")))[0] == 200
            await stage.post(f"/trajectories/t{number}/finish", {})
    chats = [it for it in recorded.done() if it.name == "chat m"]
    events = [[(event.name, (event.attributes or {})["libra.engine"]) for event in it.events] for it in chats]
    assert [("libra.placed", "f0"), ("libra.failed", "f0"), ("libra.placed", "f1")] in events
    assert {attributes(it)["libra.engine"] for it in chats} == {"f1"} and all(it.status.is_unset for it in chats)


async def test_a_turn_that_no_engine_serves_is_an_error() -> None:
    recorded = Recorded()
    async with staged(engines=0, fields=[FieldEngine(status=500)], watchers=[recorded.spans]) as stage:
        assert (await stage.post(CHAT, body("t")))[0] == 500
        await stage.post("/trajectories/t/forget", {})
    agent, chat = recorded.of("t")
    assert attributes(chat)["error.type"] == "500" and attributes(agent)["libra.end"] == "forgotten"
    assert attributes(agent)["libra.turns"] == 0


async def test_trajectories_without_an_end_have_spans_in_the_end() -> None:
    recorded = Recorded()
    async with staged(engines=0, fields=[FieldEngine()], watchers=[recorded.spans]) as stage:
        await stage.post(CHAT, body("idle"))
        await stage.post(CHAT, body("open"))
        stage.gateway._ends.expire("idle")
    recorded.spans.close()
    for id, end in (("idle", "given up"), ("open", "open")):
        assert [attributes(it).get("libra.end") for it in recorded.of(id)] == [end, None]


async def test_a_client_that_goes_away_leaves_a_whole_span() -> None:
    recorded = Recorded()
    async with staged(engines=0, scripted=[Scripted(say_nothing)], watchers=[recorded.spans]) as stage:
        turn = asyncio.create_task(stage.post(CHAT, body("t")))
        while not stage.engine("s0").in_flight:
            await asyncio.sleep(0.005)
        turn.cancel()
        while not recorded.done():
            await asyncio.sleep(0.005)
    recorded.spans.close()
    agent, chat = recorded.of("t")
    assert attributes(chat)["error.type"] == "CancelledError" and attributes(agent)["libra.end"] == "open"


async def test_a_turn_of_no_trajectory_is_alone() -> None:
    recorded = Recorded()
    async with staged(engines=0, fields=[FieldEngine()], watchers=[recorded.spans]) as stage:
        await stage.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2})
    (chat,) = recorded.done()
    assert chat.name == "chat" and chat.parent is None and "gen_ai.conversation.id" not in attributes(chat)


async def test_the_clients_trace_goes_on_to_the_engine() -> None:
    recorded, engine = Recorded(), FieldEngine()
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
    async with staged(engines=0, fields=[engine], watchers=[recorded.spans]) as stage:
        async with stage.session.post(CHAT, json=body("t"), headers=headers) as response:
            assert response.status == 200
        await stage.post("/trajectories/t/finish", {})
    agent, chat = recorded.of("t")
    for span in (agent, chat):
        assert span.parent is not None and f"{span.parent.span_id:016x}" == CALLER
    assert chat.context is not None and [it.context for it in chat.links] == [agent.context]
    (asked,) = [it for it in engine.asked if it.path == CHAT]
    assert asked.headers["traceparent"] == f"00-{TRACE}-{chat.context.span_id:016x}-01"
    assert asked.headers["tracestate"] == "vendor=1"


async def test_a_gateway_without_spans_passes_headers_on_as_they_are() -> None:
    engine, given = FieldEngine(), f"00-{TRACE}-{CALLER}-01"
    async with (
        staged(engines=0, fields=[engine]) as stage,
        stage.session.post(CHAT, json=body("t"), headers={"traceparent": given}) as response,
    ):
        assert response.status == 200
    assert [it.headers["traceparent"] for it in engine.asked if it.path == CHAT] == [given]


# Export


async def _turns(stage: Stage) -> None:
    for id in ("a", "b"):
        await stage.post(CHAT, body(id))
    await stage.post("/trajectories/a/finish", {})


@contextmanager
def exported_spans(address: str) -> Iterator[Spans]:
    with exporting(address, "libra-route") as tracer, closing(Spans(tracer)) as spans:
        yield spans


async def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    with collector() as (base, came), exported_spans(span_endpoint(base, {}) or "") as spans:
        async with staged(engines=0, fields=[FieldEngine()], watchers=[spans]) as stage:
            await _turns(stage)
    (resource,) = {str(it.resource) for request in came for it in request.resource_spans}
    assert "libra-route" in resource
    assert sorted(names(came)) == ["chat m", "chat m", AGENT, AGENT]


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        (None, {}, None),
        ("http://h:4318/", {}, "http://h:4318/v1/traces"),
        ("http://h:4318/v1/traces", {}, "http://h:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, "http://h:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h/own"}, "http://h/own"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h", "OTEL_SDK_DISABLED": "true"}, None),
        ("http://h", {"OTEL_SDK_DISABLED": "true"}, "http://h/v1/traces"),
    ],
)
def test_the_collector_is_given_or_a_variable(given: str | None, variables: dict[str, str], expected: str) -> None:
    assert span_endpoint(given, variables) == expected


@pytest.mark.parametrize("given", ["h:4318", "grpc://h:4317", "http://", "http://user:secret@h:port"])
def test_an_address_that_is_none_is_refused_without_being_shown(given: str) -> None:
    with pytest.raises(ValueError, match=re.escape("--otel: not the address of a collector")) as refused:
        span_endpoint(given, {})
    assert "secret" not in str(refused.value)


async def test_a_collector_that_is_not_there_costs_spans_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export, "END_SECONDS", 0.1)
    with socket.socket() as taken:  # nothing listens there
        taken.bind(("127.0.0.1", 0))
        address = f"http://user:secret@127.0.0.1:{taken.getsockname()[1]}/v1/traces"
        with exported_spans(address) as spans:
            async with staged(engines=0, fields=[FieldEngine()], watchers=[spans]) as stage:
                await _turns(stage)
                assert stage.gateway.counts.turns == 2
    (told,) = [it.getMessage() for it in caplog.records if "spans" in it.getMessage()]
    assert told == "4 spans are lost: the collector on 127.0.0.1 does not accept them"
