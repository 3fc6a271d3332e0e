"""Spans of a run's episodes: the whole tree of each that is trained on, and nothing of others."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libra.loop.episode import Episode
from libra.loop.run_spans import RunSpans
from libra.loop.turn_maker import TurnReport
from libra.route.policy import Placement
from libra.trajectory import Trajectory, Turn

SECOND = 10**9


class Recorded:
    """Spans in memory, on a clock that the test sets."""

    def __init__(self) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.seconds = 0.0
        self.spans = RunSpans(provider.get_tracer("test"), lambda: round(self.seconds * SECOND))

    def turn(self, id: str, worker: str, tokens: int, seconds: float, until: float) -> None:
        self.seconds = until
        self.spans.turn(TurnReport(id, worker, tokens, seconds, Placement(worker, 1, True, "because"), None))

    def done(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self._exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found


def episode(id: str, *turns: Turn, branches: tuple[Episode, ...] = ()) -> Episode:
    trajectory = Trajectory(id, "p", "sums", 10, turns, 0.5, 3, True)
    return Episode(trajectory, [], [], [], [], 0.5, (), branches)


def times(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / SECOND, span.end_time / SECOND


def test_an_episode_is_an_agent_with_its_turns_and_tools() -> None:
    recorded = Recorded()
    recorded.turn("g0-1", "rollout-0", 5, seconds=1.0, until=2.0)
    recorded.turn("g0-1", "rollout-1", 3, seconds=1.0, until=4.0)  # the rest of that turn
    recorded.turn("g0-1", "rollout-1", 4, seconds=2.0, until=9.0)
    assert recorded.done() == {}
    recorded.seconds = 10.0
    recorded.spans.episode(episode("g0-1", Turn(8, "add", "error", 6, 2.5), Turn(4, None, None, 0)))
    spans = recorded.done()
    [agent], [tool], chats = spans["invoke_agent sums"], spans["execute_tool add"], spans["chat"]
    assert times(agent) == (1.0, 10.0) and times(tool) == (4.0, 6.5)
    assert [times(chat) for chat in chats] == [(1.0, 2.0), (3.0, 4.0), (7.0, 9.0)]
    told = [dict(chat.attributes or {}) for chat in chats]
    assert [each["libra.engine"] for each in told] == ["rollout-0", "rollout-1", "rollout-1"]
    assert [each["gen_ai.usage.input_tokens"] for each in told] == [10, 15, 24]
    assert [each["gen_ai.usage.output_tokens"] for each in told] == [5, 3, 4]
    assert {each["libra.reason"] for each in told} == {"because"}
    assert (agent.attributes or {})["libra.reward"] == 0.5 and not tool.status.is_ok
    for span in (tool, *chats):
        assert span.parent is not None and span.parent.span_id == agent.context.span_id


def test_other_contexts_of_an_episode_are_agents_too_and_evaluations_are_none() -> None:
    recorded = Recorded()
    for id in ("g7-0", "g7-0~1", "start-sampled-3"):
        recorded.turn(id, "rollout-0", 2, seconds=1.0, until=1.0)
    branch = episode("g7-0~1", Turn(2, None, None, 0))
    recorded.spans.episode(episode("g7-0", Turn(2, None, None, 0), branches=(branch,)))
    recorded.spans.episode(episode("start-sampled-3", Turn(2, None, None, 0)))
    told = [dict(span.attributes or {}) for span in recorded.done()["invoke_agent sums"]]
    assert [each["gen_ai.conversation.id"] for each in told] == ["g7-0", "g7-0~1"]
    assert recorded.spans._parts == {}
