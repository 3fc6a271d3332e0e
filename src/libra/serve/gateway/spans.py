"""Spans of trajectories, turns and tool calls, by OpenTelemetry's conventions for generative AI.

Invariant: each turn has one span `chat`, whatever its outcome. The turns of a trajectory, and a span `execute_tool` for
each tool return, belong to one span `invoke_agent`, from the first turn to the trajectory's end. If a turn's request
has a `traceparent`, the turn's span is a child of the caller's span, with a link to its `invoke_agent`. The engine gets
the `traceparent` of the turn's span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import time_ns
from urllib.parse import urlsplit

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from libra.route.policy import Placement, ToolReturn
from libra.serve.gateway.upstreams import TurnFailure, Upstream
from libra.serve.gateway.usage import Usage
from libra.serve.gateway.watcher import UNCOUNTED, End, RoutedTurn, Watcher
from libra.trajectory import Trajectory

_MODEL_BYTES = 256  # longest name of a model that is passed on
_PROVIDER = "libra"  # since the engines' provider is unknown
_OPEN = "open"  # end of a trajectory that is unfinished when the gateway stops
_headers = TraceContextTextMapPropagator()
_text = msgspec.json.Decoder(str)


@dataclass(slots=True)
class _Agent:
    """A trajectory with an open span."""

    span: Span
    context: Context  # contains `span`
    answered: int | None = None  # time of the answer to its last turn, in ns; None after a tool return
    turns: int = 0  # answered turns
    prompt_tokens: int = 0  # of all turns
    generated_tokens: int = 0


class Spans(Watcher):
    """Makes spans of the watched turns with `tracer`. `clock` returns wall-clock nanoseconds."""

    def __init__(self, tracer: Tracer, clock: Callable[[], int] = time_ns) -> None:
        self._tracer, self._clock = tracer, clock
        self._agents: dict[str, _Agent] = {}  # by trajectory
        self._turns: dict[RoutedTurn, Span] = {}

    def begun(self, turn: RoutedTurn) -> None:
        now, caller = self._clock(), _headers.extract(turn.request.headers, Context())
        called = get_current_span(caller).get_span_context()
        parent, links, model = caller, [], _model(turn)
        common: dict[str, AttributeValue] = {"gen_ai.provider.name": _PROVIDER}
        if model:
            common["gen_ai.request.model"] = model
        if not turn.session.lone:
            id = turn.needed.trajectory_id
            common["gen_ai.conversation.id"] = id
            agent = self._agents.get(id) or self._invoked(turn, caller, common, now)
            if turn.returned is not None and agent.answered is not None:
                self._returned(agent, id, turn.returned, now)
            if called.is_valid:
                links.append(Link(agent.span.get_span_context()))
            else:
                parent = agent.context
        attributes = common | {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.max_tokens": turn.room,
            "gen_ai.request.stream": bool(turn.body.stream),
            "libra.context_tokens": turn.needed.context_tokens,
        }
        name = f"chat {model}" if model else "chat"
        self._turns[turn] = self._tracer.start_span(name, parent, SpanKind.CLIENT, attributes, links, now)

    def _invoked(self, turn: RoutedTurn, caller: Context, common: Mapping[str, AttributeValue], now: int) -> _Agent:
        task, attributes = turn.needed.task, {**common, "gen_ai.operation.name": "invoke_agent"}
        attributes["libra.prompt"] = turn.needed.prompt_id
        if task:
            attributes["gen_ai.agent.name"] = task
        name = f"invoke_agent {task}" if task else "invoke_agent"
        span = self._tracer.start_span(name, caller, SpanKind.INTERNAL, attributes, start_time=now)
        agent = self._agents[turn.needed.trajectory_id] = _Agent(span, set_span_in_context(span, caller))
        return agent

    def _returned(self, agent: _Agent, id: str, returned: ToolReturn, now: int) -> None:
        """Make the span of a tool call, from the answer to the previous turn until now."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.conversation.id": id,
            "gen_ai.tool.name": returned.tool,
            "gen_ai.tool.type": "function",
            "libra.tool_status": returned.status,
            "libra.returned_tokens": returned.returned_tokens,
        }
        name, start, agent.answered = f"execute_tool {returned.tool}", agent.answered, None
        span = self._tracer.start_span(name, agent.context, SpanKind.INTERNAL, attributes, start_time=start)
        if returned.status in ("error", "timeout"):
            span.set_attribute("error.type", returned.status)
            span.set_status(StatusCode.ERROR)
        span.end(now)

    def placed(self, turn: RoutedTurn, engine: Upstream, placement: Placement) -> None:
        span, address = self._turns[turn], urlsplit(engine.section.url)
        chosen: dict[str, AttributeValue] = {"libra.engine": engine.id, "libra.reason": placement.reason}
        span.add_event("libra.placed", chosen, self._clock())
        port = address.port or (443 if address.scheme == "https" else 80)
        span.set_attributes(
            chosen
            | {
                "libra.bucket": placement.bucket,
                "libra.migrated": placement.migrated,
                "server.address": address.hostname or "",
                "server.port": port,
            }
        )

    def headers(self, turn: RoutedTurn) -> Mapping[str, str]:
        carried: dict[str, str] = {}
        _headers.inject(carried, set_span_in_context(self._turns[turn], Context()))
        return carried

    def failed(self, turn: RoutedTurn, engine: Upstream, failure: TurnFailure) -> None:
        told = {"libra.engine": engine.id, "error.type": failure.fault.name.lower(), "libra.message": failure.message}
        self._turns[turn].add_event("libra.failed", told, self._clock())

    def ended(self, turn: RoutedTurn, usage: Usage | None, trouble: str) -> None:
        span, now = self._turns.pop(turn), self._clock()
        if usage is not None:
            span.set_attributes({"gen_ai.usage.input_tokens": usage[0], "gen_ai.usage.output_tokens": usage[1]})
            agent = self._agents.get(turn.needed.trajectory_id)
            if agent is not None:
                agent.answered, agent.turns = now, agent.turns + 1
                agent.prompt_tokens += usage[0]
                agent.generated_tokens += usage[1]
        elif trouble != UNCOUNTED:
            span.set_attribute("error.type", trouble)
            span.set_status(StatusCode.ERROR)
        span.end(now)

    def closed(self, id: str, end: End, trajectory: Trajectory | None) -> None:
        agent = self._agents.pop(id, None)
        if agent is not None:
            self._close(agent, end, None if trajectory is None else trajectory.reward)

    def _close(self, agent: _Agent, end: str, reward: float | None = None) -> None:
        span = agent.span
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": agent.prompt_tokens,
                "gen_ai.usage.output_tokens": agent.generated_tokens,
                "libra.turns": agent.turns,
                "libra.end": end,
            }
        )
        if reward is not None:
            span.set_attribute("libra.reward", reward)
        span.end(self._clock())

    def close(self) -> None:
        """End the spans of trajectories that have not ended."""
        for agent in self._agents.values():
            self._close(agent, _OPEN)
        self._agents.clear()


def _model(turn: RoutedTurn) -> str:
    """The model's name; empty if the request has none, or an invalid or too long one."""
    raw = memoryview(turn.body.model)
    if not 2 < len(raw) <= _MODEL_BYTES:
        return ""
    try:
        return _text.decode(raw)
    except ValueError:
        return ""
