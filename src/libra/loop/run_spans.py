"""Spans of a run's episodes, by OpenTelemetry's conventions for generative AI.

Invariant: the spans of an episode are made at its end. One `invoke_agent` contains a `chat` for each engine's part of a
turn, and an `execute_tool` for each return. Only episodes for training have spans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time_ns

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from libra.loop.episode import Episode
from libra.loop.turn_maker import TurnReport
from libra.trajectory import Trajectory, Turn

_TRAINED = re.compile(r"g\d+-\d+(~\d+)?")  # id of a group's episode, or of a further context of the episode
_PROVIDER = "libra"


@dataclass(frozen=True, slots=True)
class _Part:
    """An engine's part in a turn. Times are nanoseconds of the wall clock."""

    report: TurnReport
    start: int
    end: int


class RunSpans:
    """Makes spans with `tracer`. `clock` returns wall-clock nanoseconds."""

    def __init__(self, tracer: Tracer, clock: Callable[[], int] = time_ns) -> None:
        self._tracer, self._clock = tracer, clock
        self._parts: dict[str, list[_Part]] = {}  # by trajectory, in order

    def turn(self, report: TurnReport) -> None:
        """Record the end of an engine's part in a turn."""
        if _TRAINED.fullmatch(report.trajectory):
            now = self._clock()
            part = _Part(report, now - round(1e9 * report.seconds), now)
            self._parts.setdefault(report.trajectory, []).append(part)

    def episode(self, episode: Episode) -> None:
        """Make the spans of an episode that has ended."""
        for each in episode.contexts:
            if parts := self._parts.pop(each.trajectory.id, None):
                self._invoked(each.trajectory, parts)

    def _invoked(self, trajectory: Trajectory, parts: Sequence[_Part]) -> None:
        common: dict[str, AttributeValue] = {
            "gen_ai.provider.name": _PROVIDER,
            "gen_ai.conversation.id": trajectory.id,
        }
        attributes = common | {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": trajectory.task,
            "gen_ai.usage.output_tokens": trajectory.generated_tokens,
            "libra.prompt": trajectory.prompt_id,
            "libra.turns": len(trajectory.turns),
            "libra.policy_version": trajectory.policy_version,
            "libra.reward": trajectory.reward or 0.0,
        }
        name = f"invoke_agent {trajectory.task}"
        span = self._tracer.start_span(name, Context(), SpanKind.INTERNAL, attributes, start_time=parts[0].start)
        inside, left = set_span_in_context(span, Context()), list(parts)
        for turn, context in zip(trajectory.turns, trajectory.contexts(), strict=True):
            made, ended = 0, parts[0].start
            while left and made < turn.generated_tokens:
                part = left.pop(0)
                self._chat(part, context + made, common, inside)
                made, ended = made + part.report.tokens, part.end
            if turn.tool is not None:
                self._returned(turn, ended, common, inside)
        span.end(self._clock())

    def _chat(self, part: _Part, context: int, common: dict[str, AttributeValue], inside: Context) -> None:
        report = part.report
        attributes = common | {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": context,
            "gen_ai.usage.output_tokens": report.tokens,
            "libra.engine": report.worker,
            "libra.reason": report.placement.reason,
            "libra.bucket": report.placement.bucket,
            "libra.migrated": report.placement.migrated,
        }
        span = self._tracer.start_span("chat", inside, SpanKind.CLIENT, attributes, start_time=part.start)
        span.end(part.end)

    def _returned(self, turn: Turn, start: int, common: dict[str, AttributeValue], inside: Context) -> None:
        attributes = common | {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": turn.tool or "",
            "gen_ai.tool.type": "function",
            "libra.tool_status": turn.status or "",
            "libra.returned_tokens": turn.returned_tokens,
        }
        name = f"execute_tool {turn.tool}"
        span = self._tracer.start_span(name, inside, SpanKind.INTERNAL, attributes, start_time=start)
        if turn.status in ("error", "timeout"):
            span.set_attribute("error.type", turn.status)
            span.set_status(StatusCode.ERROR)
        span.end(start + round(1e9 * (turn.tool_seconds or 0.0)))
