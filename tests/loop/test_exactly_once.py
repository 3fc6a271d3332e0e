"""Whatever happens to engines, an episode is the one that a single engine would have made: no token is lost or made
twice, no tool is called twice, and the policy hears of each event once."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from fakes.engines import STOP, MadeUpEngine, connect_made_up, logprob, next_token
from fakes.scripted import AskTool, Unwatched
from hypothesis import event, given, settings
from hypothesis import strategies as st

from libra.backends.transport.engine_messages import LoadWeights, LoanState
from libra.backends.vllm.engine_handle import EngineHandle
from libra.environments.protocol import Prompt, ToolCall
from libra.loop.episode import Episode, EpisodeRequest
from libra.loop.fleet import ServingEngine, ServingFleet
from libra.loop.rollout import Rollout
from libra.plan.allocation import Allocation, Bucket
from libra.route import policy
from libra.route.catalogue import POLICIES, policy_named
from libra.route.policy import Placement, ToolReturn, TurnRequest, View
from libra.trajectory.record import Trajectory

LONGEST = 30  # so that some episodes end as they find no room for another turn
CAPACITY = {"short": 18, "long": LONGEST}
ALLOCATION = Allocation(1, (Bucket("short", 1, 0, 8), Bucket("long", 1, 8, LONGEST)))
PROMPTS = ["ab;", "cd;", "efg;"]
DONE_BY = 3_000  # rounds: an episode that is not over by then hangs


class Characters:
    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(token) for token in tokens)


def calls_tool(text: str) -> bool:
    return zlib.crc32(text.encode()) % 4 > 0


def tool_reply(text: str) -> str:
    return "=" + text[:2] * 2 + ";"


class Agent(AskTool):
    """Three turns of four ask the one tool; a turn has 8 tokens at most, and there are 4 at most."""

    deadline = 60.0

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()
        super().__init__({"t": self._tool})

    def parse(self, text: str) -> ToolCall | None:
        return ToolCall("t", text) if calls_tool(text) else None

    async def _tool(self, text: str) -> str:
        self.called[text] += 1
        return tool_reply(text)


class Heard:
    """A policy, and what it was told."""

    def __init__(self, inner: policy.Policy) -> None:
        self.inner = inner
        self.first: Counter[str] = Counter()
        self.returns: Counter[str] = Counter()
        self.finished_: Counter[str] = Counter()
        self.moves = 0

    def place(self, request: TurnRequest, view: View) -> Placement | None:
        self.first[request.trajectory_id] += 1
        return self.inner.place(request, view)

    def tool_returned(self, request: TurnRequest, returned: ToolReturn, view: View) -> Placement | None:
        self.returns[request.trajectory_id] += 1
        return self.inner.tool_returned(request, returned, view)

    def bucket_overrun(self, request: TurnRequest, generated_tokens: int, view: View) -> Placement | None:
        placement = self.inner.bucket_overrun(request, generated_tokens, view)
        self.moves += placement is not None and placement.migrated
        return placement

    def finished(self, trajectory: Trajectory) -> None:
        self.finished_[trajectory.id] += 1
        self.inner.finished(trajectory)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class Engine:
    handle: EngineHandle
    worker: MadeUpEngine


class World:
    """Two engines at first; the test says what happens to which."""

    def __init__(self, name: str) -> None:
        self.policy = Heard(policy_named(name))
        self.fleet = ServingFleet(self.policy, ALLOCATION)
        self.agent = Agent()
        self.rollout = Rollout(self.agent, ["t"], Characters(), self.fleet, LONGEST, Unwatched(), now=lambda: 0.0)
        self.version = self.recalls = 0
        self.leaving: list[asyncio.Task[None]] = []
        self.engines: list[Engine] = []  # in service, and those that were given up and may still talk
        self.add("short")
        self.add("long")

    def add(self, shape: str) -> None:
        name = f"{shape}-{len(self.engines)}"
        recalled = self.recalled if shape == "short" else None  # the longest contexts stay with engines of one's own
        handle, worker = connect_made_up(name, CAPACITY[shape], lambda lost, why: self.fleet.remove(lost), recalled)
        worker.version = self.version
        self.engines.append(Engine(handle, worker))
        self.fleet.add(ServingEngine(handle, shape, CAPACITY[shape]))

    def recalled(self, handle: EngineHandle) -> None:
        self.fleet.renewed()
        if handle.away:
            self.recalls += 1
            self.leaving.append(asyncio.create_task(handle.vacate(0.0)))

    async def do(self, what: str, index: int) -> None:
        engine = self.engines[index % len(self.engines)]
        match what:
            case "step":
                engine.worker.step()
            case "tell":
                engine.worker.tell()
            case "recall" | "lend":
                engine.worker.tell(LoanState("a burst" if what == "recall" else "", 0.0, 0.0, 0, 0))
            case "kill":
                engine.worker.die()
            case "give up":  # it hangs, or seems to
                engine.handle.declare_lost("it is silent")
            case "retire":
                self.fleet.remove(engine.handle.name)
                await engine.handle.stop()
            case "load":
                self.version += 1
                for entry in self.fleet.instances():
                    await entry.handle.load(LoadWeights(self.version, 0, 0))
            case shape:
                self.add(shape)
        for _ in range(3):
            await asyncio.sleep(0)

    def close(self) -> None:
        for engine in self.engines:
            engine.handle.close()


async def play(name: str, script: list[tuple[str, int]]) -> tuple[World, list[Episode]]:
    world = World(name)
    episodes = [
        asyncio.create_task(world.rollout.episode(EpisodeRequest(f"g0-{i}", Prompt(f"p{i}", text, ""), 0.0, 1.0)))
        for i, text in enumerate(PROMPTS)
    ]
    try:
        for what, index in script:
            await world.do(what, index)
        world.add("long")
        for round in range(DONE_BY):
            if all(episode.done() for episode in episodes):
                break
            await world.do("step" if round % 3 else "tell", round // 3)
        assert all(episode.done() for episode in episodes), "an episode hangs"
        return world, [await episode for episode in episodes]
    finally:
        for episode in episodes:
            episode.cancel()
        world.close()


@dataclass
class Wanted:
    """An episode as one engine makes it all."""

    tokens: list[int]
    generated: list[bool]
    turns: list[int]  # generated tokens of each
    called: list[str]


def undisturbed(prompt: str) -> Wanted:
    codec = Characters()
    tokens = codec.encode(prompt)
    wanted = Wanted(tokens, [False] * len(tokens), [], [])
    while True:
        turn: list[int] = []
        while len(turn) < Agent.turn_tokens and (not turn or turn[-1] != STOP):
            turn.append(next_token(tokens + turn))
        tokens += turn
        wanted.generated += [True] * len(turn)
        wanted.turns.append(len(turn))
        text = codec.decode(turn)
        if not calls_tool(text) or len(wanted.turns) == Agent.max_turns:
            return wanted
        wanted.called.append(text)
        back = codec.encode(tool_reply(text))
        if len(tokens) + len(back) + Agent.turn_tokens > LONGEST:
            return wanted
        tokens += back
        wanted.generated += [False] * len(back)


EVENTS = [
    "step",
    "step",
    "step",
    "step",
    "tell",
    "tell",
    "recall",
    "recall",
    "lend",
    "kill",
    "give up",
    "retire",
    "load",
    "short",
    "long",
]
SCRIPTS = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=60)


@settings(deadline=None, max_examples=300)
@given(name=st.sampled_from(POLICIES), script=SCRIPTS)
def test_an_episode_is_what_one_engine_would_have_made(name: str, script: list[tuple[str, int]]) -> None:
    world, episodes = asyncio.run(play(name, script))
    event(f"turns moved between buckets: {min(world.policy.moves, 3)}")
    event(f"devices were recalled: {min(world.recalls, 3)}")
    called: Counter[str] = Counter()
    for index, (prompt, episode) in enumerate(zip(PROMPTS, episodes, strict=True)):
        wanted = undisturbed(prompt)
        called.update(wanted.called)
        assert episode.tokens == wanted.tokens
        assert episode.generated == wanted.generated
        assert [turn.generated_tokens for turn in episode.trajectory.turns] == wanted.turns
        assert len(episode.turn_buckets) == len(wanted.turns)
        for place, (own, version, chance) in enumerate(
            zip(episode.generated, episode.versions, episode.logprobs, strict=True)
        ):
            if own:
                assert 0 <= version <= world.version
                assert chance == logprob(wanted.tokens[:place], version)
            else:
                assert (version, chance) == (-1, 0.0)
        id = f"g0-{index}"
        assert world.policy.first[id] >= 1
        assert world.policy.returns[id] == len(wanted.turns) - 1
        assert world.policy.finished_[id] == 1
    assert world.agent.called == called
    assert world.rollout.generated_tokens == sum(sum(episode.generated) for episode in episodes)
