"""Whole episodes with scripted engines: what was sampled is what is trained on, whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from fakes.engines import Script, ScriptedEngine, Take, letters, turn
from fakes.far_end import PATIENCE
from fakes.scripted import MERGED, AskTool, FirstInstance, MergingCodec, Unwatched, echo, instance, make_fleet

from libra.backends.transport.engine_messages import Generate
from libra.environments.protocol import Prompt, Tool, ToolError
from libra.environments.served import EpisodeFailedError
from libra.exec.protocols import WorkerLostError
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.fleet import ServingFleet
from libra.loop.rollout import Rollout
from libra.loop.turn_maker import TurnReport
from libra.route.policy import ToolReturn, TurnRequest
from libra.trajectory.record import ToolStatus, Turn

PROMPT = Prompt("p", "Qab;", answer="A1;")
CODEC = MergingCodec()


async def hang(argument: str) -> str:
    return await asyncio.get_running_loop().create_future()


async def complain(argument: str) -> str:
    raise ToolError("=!;")


async def crash(argument: str) -> str:
    raise ZeroDivisionError(argument)


async def cancel_itself(argument: str) -> str:
    raise asyncio.CancelledError


async def not_to_be_cancelled(argument: str) -> str:
    while True:
        try:
            return await hang(argument)
        except asyncio.CancelledError:
            if argument == "0":
                raise ZeroDivisionError(argument) from None
            argument = "0"


async def give_up(argument: str) -> str:
    raise TimeoutError("the service behind the tool")


async def garbage(argument: str) -> Any:
    return None


def not_awaitable(argument: str) -> Any:
    return "=;"


TOOLS: Mapping[str, Tool] = {
    "e": echo,
    "hang": hang,
    "complain": complain,
    "crash": crash,
    "cancel_itself": cancel_itself,
    "not_to_be_cancelled": not_to_be_cancelled,
    "give_up": give_up,
    "garbage": garbage,
    "not_awaitable": not_awaitable,
    "forbidden": echo,
}
ALLOWED = [name for name in TOOLS if name != "forbidden"]


class Reports(list[TurnReport]):
    """The turns that were reported, and what engines and tools had to do."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[str, str, int]] = []

    def turn(self, report: TurnReport) -> None:
        self.append(report)

    def turns(self, worker: str, change: int) -> None:
        self.changes.append(("turns", worker, change))

    def tools(self, worker: str, change: int) -> None:
        self.changes.append(("tools", worker, change))


def make_rollout(fleet: ServingFleet, longest: int = 1000, reports: Reports | None = None) -> Rollout:
    kept = reports if reports is not None else Reports()
    return Rollout(AskTool(TOOLS), ALLOWED, CODEC, fleet, longest, kept, now=lambda: 12.5)


def finish(episode: Awaitable[Episode]) -> Episode:
    async def run() -> Episode:
        return await asyncio.wait_for(episode, PATIENCE)

    return asyncio.run(run())


def play(*answers: Any, longest: int = 1000) -> tuple[Episode, Script, FirstInstance]:
    """One episode on one engine."""
    script, policy = Script(*answers), FirstInstance()
    rollout = make_rollout(make_fleet(policy, ScriptedEngine("e0", script)), longest)
    return finish(rollout.episode(EpisodeRequest("g0-0", PROMPT, 3, 0.7))), script, policy


ANSWER = turn(letters("A1;"))


# --- tokens in, tokens out -----------------------------------------------------------------------------------------


def test_an_episode_is_the_tokens_that_were_sampled() -> None:
    asked = letters(">e:ab;")  # sampled as a, b; the codec would make one token of them
    first = turn(asked, spans=[(4, 0), (5, 2)])
    last = turn(letters("A1;"), spans=[(5, 0)])
    episode, script, policy = play(first, last)
    prompt, back = [ord("Q"), MERGED, ord(";")], [ord("="), MERGED, ord(";")]
    assert episode.tokens == prompt + asked + back + letters("A1;")
    assert episode.generated == [False] * 3 + [True] * 6 + [False] * 3 + [True] * 3
    assert episode.logprobs == [0.0] * 3 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0] + [0.0] * 3 + [-1.0, -2.0, -3.0]
    assert episode.versions == [-1] * 3 + [4, 4, 5, 5, 5, 5] + [-1] * 3 + [5, 5, 5]
    assert [request.tokens for _, request in script.requests] == [prompt, prompt + asked + back]
    assert policy.asked == [("place", None), ("tool_returned", ToolReturn("e", "ok", 3))]
    trajectory = episode.trajectory
    assert (trajectory.id, trajectory.prompt_id, trajectory.task) == ("g0-0", "p", "ask")
    assert trajectory.prompt_tokens == 3
    assert [(t.generated_tokens, t.tool, t.status, t.returned_tokens) for t in trajectory.turns] == [
        (6, "e", "ok", 3),
        (3, None, None, 0),
    ]
    assert trajectory.turns[0].tool_seconds is not None
    assert trajectory.final_context == len(episode.tokens)
    assert trajectory.reward == episode.reward == 1.0
    assert trajectory.policy_version == 4  # the oldest that wrote any of it
    assert (trajectory.finished, trajectory.started_at) == (True, 12.5)
    assert episode.turn_buckets == (0, 0)
    assert policy.done == [trajectory]


def test_a_wrong_answer_is_an_episode_too() -> None:
    episode, _, _ = play(turn(letters("A2;")))
    assert (episode.reward, len(episode.trajectory.turns)) == (0.0, 1)


def fails(*_: object) -> float:
    raise ZeroDivisionError("no cases")


@pytest.mark.parametrize(
    ("reward", "complaint"),
    [
        (fails, "the reward of p raised ZeroDivisionError: no cases"),
        (lambda *_: float("nan"), "^environment ask: the reward of p is nan; return a finite number$"),
        (lambda *_: None, "^environment ask: the reward of p is None; return a finite number$"),
    ],
)
def test_a_reward_that_is_none_names_itself(
    monkeypatch: pytest.MonkeyPatch, reward: Callable[..., float], complaint: str
) -> None:
    monkeypatch.setattr(AskTool, "reward", reward)
    with pytest.raises(EpisodeFailedError, match=complaint):
        play(turn(letters("A2;")))


@pytest.mark.parametrize("fresh", [False, True])
def test_what_an_engine_is_asked(fresh: bool) -> None:
    script, policy, reports = Script(ANSWER), FirstInstance(), Reports()
    rollout = make_rollout(make_fleet(policy, ScriptedEngine("e0", script)), reports=reports)
    finish(rollout.episode(EpisodeRequest("g0-0", PROMPT, 3, 0.7, fresh=fresh)))
    [(engine, request)] = script.requests
    assert engine == "e0"
    assert request == Generate(
        request.id, CODEC.encode("Qab;"), 8, 0.7, ord(";"), priority=5, salt="g0-0" if fresh else None
    )
    [asked] = policy.requests
    assert asked == TurnRequest("g0-0", "p", 3, 3, "ask", due=3)
    assert rollout.generated_tokens == 3
    assert [(report.trajectory, report.worker, report.tokens) for report in reports] == [("g0-0", "e0", 3)]


def test_with_a_seed_an_episode_asks_for_the_same_draws_whatever_it_is_called() -> None:
    def seeds(id: str, seed: int | None) -> list[int | None]:
        script = Script(turn(letters(">e:1;")), ANSWER)
        rollout = make_rollout(make_fleet(FirstInstance(), ScriptedEngine("e0", script)))
        finish(rollout.episode(EpisodeRequest(id, PROMPT, 0.0, 1.0, seed=seed)))
        return [request.seed for _, request in script.requests]

    first, again, other = seeds("start-0", 7), seeds("end-0", 7), seeds("start-1", 8)
    assert first == again and not {*first} & {*other}
    assert len({*first}) == 2  # a turn does not draw what the turn before drew
    assert seeds("start-0", None) == [None, None]


def test_every_request_has_its_own_id() -> None:
    _, script, _ = play(turn(letters(">e:1;")), turn(letters(">e:2;")), ANSWER)
    assert len({request.id for _, request in script.requests}) == 3


def test_the_stop_text_must_be_one_token() -> None:
    class TwoTokens(AskTool):
        stop = "ba"

    with pytest.raises(ValueError, match="the stop text 'ba' must be one token of the model, not 2"):
        Rollout(TwoTokens(TOOLS), [], CODEC, make_fleet(FirstInstance()), 100, Unwatched(), now=lambda: 0.0)


# --- tools ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "status", "reply"),
    [
        ("e", "ok", "=1;"),
        ("complain", "error", "=!;"),
        ("crash", "error", "=?;"),
        ("hang", "timeout", "=T;"),
        ("give_up", "timeout", "=T;"),
        ("cancel_itself", "error", "=?;"),
        ("not_to_be_cancelled", "timeout", "=T;"),
        ("garbage", "error", "=?;"),
        ("not_awaitable", "error", "=?;"),
        ("forbidden", "error", "=?;"),
        ("no such tool", "error", "=?;"),
    ],
)
def test_how_a_call_ended_and_what_the_agent_reads(tool: str, status: ToolStatus, reply: str) -> None:
    call = letters(f">{tool}:1;")
    episode, script, policy = play(turn(call), ANSWER)
    made = episode.trajectory.turns[0]
    assert (made.tool, made.status, made.returned_tokens) == (tool, status, len(reply))
    assert script.requests[1][1].tokens == CODEC.encode(PROMPT.text) + call + letters(reply)
    assert policy.asked[1] == ("tool_returned", ToolReturn(tool, status, len(reply)))
    assert episode.reward == 1.0


# --- accidents -----------------------------------------------------------------------------------------------------


def on_two_engines(
    answers: Callable[[Callable[[Take], None]], list[Any]], reports: Reports | None = None
) -> tuple[Episode, Script, FirstInstance]:
    """One episode that begins on e0; the answers may contain the accident that takes e0 away."""
    policy = FirstInstance()

    def accident(take: Take) -> None:
        fleet.remove("e0")
        raise WorkerLostError("engine e0 went away")

    script = Script(*answers(accident))
    fleet = make_fleet(policy, ScriptedEngine("e0", script), ScriptedEngine("e1", script))
    return finish(make_rollout(fleet, reports=reports).episode(EpisodeRequest("g0-0", PROMPT, 3, 0.7))), script, policy


def test_it_is_told_which_engine_has_turns_and_whose_episodes_wait_for_tools() -> None:
    """An episode that waits for a tool is of the engine that served it last."""
    reports = Reports()
    on_two_engines(lambda gone: [turn(letters(">e:1;")), gone, turn(letters(">hang:1;")), ANSWER], reports)
    assert [(what, worker) for what, worker, change in reports.changes if change == 1] == [
        ("turns", "e0"),
        ("tools", "e0"),
        ("turns", "e0"),
        ("turns", "e1"),
        ("tools", "e1"),
        ("turns", "e1"),
    ]
    begun, over = reports.changes[::2], reports.changes[1::2]
    assert [(what, worker, -change) for what, worker, change in begun] == over  # one thing after the other


async def test_an_episode_that_is_cancelled_leaves_nothing_counted() -> None:
    reports = Reports()
    fleet, waiting = make_fleet(FirstInstance()), asyncio.Event()

    class Stuck(ScriptedEngine):
        async def generate(self, request: Generate, take: Take) -> None:
            waiting.set()
            await asyncio.get_running_loop().create_future()

    fleet.add(instance(Stuck("e0", Script())))
    episode = asyncio.create_task(make_rollout(fleet, reports=reports).episode(EpisodeRequest("g0-0", PROMPT, 3, 0.7)))
    await waiting.wait()
    episode.cancel()
    await asyncio.gather(episode, return_exceptions=True)
    assert reports.changes == [("turns", "e0", 1), ("turns", "e0", -1)]


def test_a_lost_engine_costs_no_completed_turn() -> None:
    call = turn(letters(">e:1;"), spans=[(2, 0)])
    episode, script, policy = on_two_engines(lambda accident: [call, accident, turn(letters("A1;"), spans=[(3, 0)])])
    assert [engine for engine, _ in script.requests] == ["e0", "e0", "e1"]
    before, again = script.requests[1][1], script.requests[2][1]
    assert again.tokens == before.tokens == CODEC.encode("Qab;") + letters(">e:1;=1;")
    assert again.id != before.id
    assert episode.tokens == again.tokens + letters("A1;")
    assert len(episode.tokens) == len(episode.generated) == len(episode.logprobs) == len(episode.versions)
    assert episode.versions[-3:] == [3, 3, 3]
    assert [t.generated_tokens for t in episode.trajectory.turns] == [5, 3]
    # A tool return is told once; after it the turn is placed like any other.
    assert [verb for verb, _ in policy.asked] == ["place", "tool_returned", "place"]
    assert len(policy.done) == 1


def test_a_loss_that_nobody_acts_on_is_an_error() -> None:
    """Or the turn would be sent to the same engine for ever."""

    def accident(take: Take) -> None:
        raise WorkerLostError("engine e0 went away")

    with pytest.raises(WorkerLostError, match="engine e0 went away"):
        play(accident)


# --- cut off -------------------------------------------------------------------------------------------------------


# The prompt is 3 tokens, the call 5, its result 3; another turn needs room for 8.
@pytest.mark.parametrize(("longest", "requests"), [(19, 2), (18, 1)])
def test_no_turn_starts_that_could_outgrow_the_longest_context(longest: int, requests: int) -> None:
    call = turn(letters(">e:1;"))
    episode, script, policy = play(call, ANSWER, longest=longest)
    assert len(script.requests) == requests
    if requests == 1:
        assert episode.tokens == CODEC.encode("Qab;") + letters(">e:1;")
        assert episode.trajectory.turns == (Turn(5, None, None, 0),)
        assert episode.reward == 0.0
        assert policy.done == [episode.trajectory]


def test_the_last_turn_that_is_allowed_calls_no_tool() -> None:
    calls: list[str] = []

    class Counting(AskTool):
        max_turns = 3

    async def count(argument: str) -> str:
        calls.append(argument)
        return "=;"

    script, policy = Script(*(turn(letters(f">c:{i};")) for i in range(3))), FirstInstance()
    fleet = make_fleet(policy, ScriptedEngine("e0", script))
    rollout = Rollout(Counting({"c": count}), ["c"], CODEC, fleet, 1000, Unwatched(), now=lambda: 0.0)
    episode = finish(rollout.episode(EpisodeRequest("g0-0", PROMPT, 3, 0.7)))
    assert calls == ["0", "1"]
    assert [t.tool for t in episode.trajectory.turns] == ["c", "c", None]
    assert episode.trajectory.finished


async def test_a_turn_waits_for_weights_as_new_as_those_its_group_was_started_under() -> None:
    script = Script(ANSWER)
    engine = ScriptedEngine("e0", script)
    fleet = make_fleet(FirstInstance(), engine)
    engine.version = 3
    waiting = asyncio.create_task(make_rollout(fleet).episode(EpisodeRequest("g0-0", PROMPT, 3, 0.7, version=4)))
    fleet.renewed()
    await asyncio.sleep(0)
    assert not script.requests and not waiting.done()
    engine.version = 4
    fleet.renewed()
    assert (await asyncio.wait_for(waiting, PATIENCE)).trajectory.finished
